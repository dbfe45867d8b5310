"""The recipes: one system whole, in small, against a scripted endpoint; their form."""

import functools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ABSTRACTS, ROOT, SIZES, cases, cells, load, read, records, tiny
from transformers import AutoTokenizer, MistralConfig, MistralForCausalLM

SYSTEMS = (
    "kiepura_lam ant_bridge alexunlp_fmt efc pranav baseline_2025 airwaves verirel "
    "climatesense_2026 checkthat_2026 sourcesniffers kvist_2026 claim2source_2026".split()
)


def path_of(name):
    """Return the path of a recipe below the root."""
    folder = "systems/" if name in SYSTEMS else ""
    return f"recipes/{folder}{name}.sh"


def answer(prompt):
    """What a language model could say to any question of stages 4 and 5."""
    if "YES or NO" in prompt:
        return "NO"
    marks = re.findall(r"^\[(\d+)\]", prompt, re.M)
    if marks:  # the first two change places
        return " > ".join(f"[{mark}]" for mark in [*marks[1::-1], *marks[2:]])
    return ("SUPPORTS", "REFUTES", "NEI")[len(prompt) % 3]


@pytest.fixture
def small(toy, endpoint, shell):
    """small(name): a recipe in small, its table and what it has printed on stderr."""
    server = endpoint(answer)

    def run_small(name):
        how = {"DATA": f"{toy}/data/demo", "WORK": f"{toy}/made", "SMALL": "1", "LLM_MODEL": "toy"}
        done = shell(path_of(name), **how, LLM_BASE_URL=server.url)
        assert done.returncode == 0, done.stderr[-3000:]
        return read(toy / "made/test/metrics.tsv"), done.stderr

    return run_small


def test_a_system_with_all_six_stages_in_small(toy, small):
    """A second run makes nothing; what replaces which model is said."""
    table, said = small("kiepura_lam")
    assert "small: data/models/minilm replaces BAAI/bge-m3" in said
    assert list(table["run"]) == "bm25 splade dense hybrid rerank llm verdicts".split()
    assert table["R@10"].astype(float).between(0.2, 1).all()
    assert list((toy / "made/test/climatecheck2025").glob("*.zip"))
    made = [path for path in (toy / "made").rglob("[!m]*") if path.is_file()]  # without metrics
    before = [path.stat().st_mtime_ns for path in made]
    small("kiepura_lam")
    assert [path.stat().st_mtime_ns for path in made] == before


def test_todays_models_in_small(small):
    """The stand-in of the causal reranker is one; no language model is loaded."""
    table, said = small("best")
    assert "work/small/causal replaces Qwen/Qwen3-Reranker-4B" in said
    runs = "bm25 dense fused rerank pointwise llm verdicts nli combined"
    assert set(table["run"]) == set(runs.split())


VLLM = """. recipes/systems/common.sh demo
JUDGE=toy
ask $T/llm python 04_llm_rerank.py $D --run $T/hybrid.tsv --backend none --model toy --window 4"""


def test_vllm_answers_pieces_until_nothing_waits(toy, warm):
    """It dies in the second piece, and a second call asks the rest."""
    how = {"DATA": f"{toy}/data/demo", "WORK": f"{toy}/work/demo", "VLLM_LOG": f"{toy}/log"}
    env = os.environ | how | {"PIECE": "2", "PATH": f"{ROOT}/tests/stand_ins:{warm}"}
    replies = []
    for status in (1, 0):
        done = subprocess.run(["bash", "-c", VLLM], cwd=ROOT, env=env)
        assert done.returncode == status
        replies.append(records(toy / "work/demo/test/llm.replies.jsonl"))
    assert replies[1][:2] == replies[0]
    first, died, *rest = (toy / "log").read_text().splitlines()
    asked = " ".join([first, *rest]).split()
    assert died == rest[0] and len(set(asked)) == len(asked) == 6  # two windows a claim
    assert sorted(reply["custom_id"] for reply in replies[1]) == sorted(asked)
    assert not list(toy.glob("work/demo/test/*.piece.*"))


@pytest.mark.parametrize("settings, flags", cases("spending.tsv"))
def test_a_rehearsal_spends_only_on_a_model_that_the_user_names(settings, flags, warm):
    script = f"export {settings}; . recipes/systems/common.sh demo; llm gpt-4.1"
    env = os.environ | {"PATH": warm}
    shown = subprocess.check_output(["bash", "-c", script], cwd=ROOT, env=env, text=True)
    assert shown.splitlines()[-1].startswith(flags)


# The memory that is in use, more at each call
NVIDIA = """#!/bin/bash
n=$(cat $0.n || echo 0); echo $((n + 100)) | tee $0.n
"""


def test_a_model_that_fails_is_a_line_with_its_error_until_it_works(toy, shell, warm):
    (toy / "nvidia-smi").write_text(NVIDIA)
    (toy / "nvidia-smi").chmod(0o755)
    tiny(toy / "good")
    how = {
        "DATA": f"{toy}/data/demo",
        "WORK": f"{toy}/compare",
        "PATH": f"{toy}:{warm}",
        "RUN": f"{toy}/work/demo/test/hybrid.tsv",
        "RETRIEVERS": "bm25",
        "MODELS": f"{toy}/bad {toy}/good",
    }
    as_file = str(toy).replace("/", "_")
    good = toy / f"compare/test/{as_file}_good.tsv"
    times = set()
    for worked in (False, True):
        done = shell("recipes/compare.sh", **how)
        assert done.returncode == 0, done.stderr[-3000:]
        table = read(toy / "compare/compare.tsv").set_index("run")
        assert len(table) == 4 and float(table.loc["bm25", "nDCG@10"]) > 0
        assert float(table.loc[good.stem, "GPU MiB"]) >= 100
        bad = table.loc[f"{as_file}_bad"]
        assert bool(bad["nDCG@10"]) == worked != bool(bad.get("error"))
        times.add(good.stat().st_mtime_ns)
        tiny(toy / "bad", seed=5)
    assert len(times) == 1  # the good model was not run again


@pytest.mark.parametrize("name, word, settings, words", cases("bad_settings.tsv"))
def test_what_would_fail_later_is_said_before_anything_is_made(
    name, word, settings, words, tmp_path, shell
):
    how = {"DATA": "data/demo", "WORK": f"{tmp_path}/work"}
    how |= dict(setting.split("=") for setting in settings.split(", "))
    done = shell(path_of(name), word, **how)
    [error] = done.stderr.splitlines()
    assert done.returncode == 2 and error.startswith("error: ")
    assert not (tmp_path / "work").exists()
    assert all(word in error for word in words.split(", "))


# In place of Python: notes its arguments, and makes what --out names, a file or a folder of runs
REHEARSAL = """#!/bin/bash
(printf '%q ' "$@"; echo) >> $NOTES
while [ $# -gt 1 ]; do
  if [ $1 = --out ]; then
    case $2 in
      *.*) mkdir -p $(dirname $2) && touch $2 ;;
      *) mkdir -p $2 && touch $2/{bm25,dense,splade,hybrid}.tsv ;;
    esac
  fi
  shift
done
"""


# A recipe works in the folder above it. work/abstracts is what tools/texts.py would copy.
STAGE = """set -e
mkdir -p bin data work/languages work/test work/demo/test
cp -r $ROOT/recipes .
cp -r $ROOT/tests/toy data/demo
for name in claims.dev qrels.dev qrels.all qrels.citation qrels.pooling; do
  touch data/demo/$name.tsv
done
sets="climatecheck2025 climatecheck2026 checkthat4b checkthat2026 scifact scifact-open check-covid"
for name in $sets; do ln -s $PWD/data/demo data/$name; done
for name in languages/en languages/fr languages/de abstracts; do
  ln -s $PWD/data/demo work/$name
done
for name in test/bm25 test/dense test/splade test/hybrid demo/test/rerank; do
  printf 'claim_id\tabstract_id\trank\tscore\n' > work/$name.tsv
done
printf '%s' "$REHEARSAL" > bin/python
chmod 755 bin/python
"""
FULL = {
    "SMALL": "",
    "DEVICE": "cuda:0 cuda:1",
    "LLM_BASE_URL": "http://none",
    "RERANK_BASE_URL": "http://none",
    "JINA_BASE_URL": "http://none",
    "REHEARSAL": REHEARSAL,
    "ROOT": str(ROOT),
}


@pytest.fixture(scope="session")
def rehearsed(tmp_path_factory):
    """rehearsed(name): all commands of a recipe at full size with its tables; none is run."""

    @functools.cache
    def commands(name, word="tables", **settings):
        folder = tmp_path_factory.mktemp(name)
        how = {
            "WORK": f"{folder}/work",
            "NOTES": f"{folder}/notes",
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
        }
        env = os.environ | FULL | how | settings
        subprocess.run(STAGE, shell=True, cwd=folder, env=env, check=True)
        subprocess.run(["bash", f"{folder}/{path_of(name)}", word], env=env, check=True)
        return [shlex.split(line) for line in (folder / "notes").read_text().splitlines()]

    return commands


@pytest.mark.parametrize("named, backend", cells("|transformers; toy|openai"))
def test_the_demo_asks_an_endpoint_only_for_a_model_that_the_user_names(named, backend, rehearsed):
    for words in rehearsed("demo", OPENAI_API_KEY="sk-1", LLM_MODEL=named):
        if words[0] == "04_llm_rerank.py" or words[1:2] == ["llm"]:
            assert words[words.index("--backend") + 1] == backend


def test_a_translation_is_answered_by_the_model_of_the_recipe_alone(rehearsed):
    for script, *words in rehearsed("checkthat_2026"):
        if script.endswith("rewrite.py"):
            assert words[words.index("--base-url") + 1] == ""


@functools.cache
def parse(script):
    """Return a function that parses the words of a script's command line, and no more."""
    names = vars(load(script))
    if script.startswith("recipes/train/"):
        [flags] = [name for name in names if name.startswith("add_")]
        jobs = {names[flags.removeprefix("add_")]: names[flags]}
        return functools.partial(names["kit"].arguments, "", jobs)
    main = names["main"]
    main.__globals__.update(run_job=lambda args: None)
    return main


@pytest.mark.parametrize("name", [*SYSTEMS, "best", "small", "variants"])
def test_every_command_of_a_recipe_at_full_size_has_known_flags_and_values(
    name, rehearsed, monkeypatch
):
    word = "tables" if name in (*SYSTEMS, "best") else "data/demo"
    commands = rehearsed(name, word)
    commands = [words for words in commands if words[0].startswith(("0", "recipes/train/"))]
    assert len(commands) > 5
    monkeypatch.setenv("LLM_BASE_URL", "http://none")
    for words in commands:
        monkeypatch.setattr(sys, "argv", words)
        parse(words[0])()  # SystemExit 2 where argparse refuses


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_published_row_is_a_run_of_the_recipe_or_says_why_not(name, rehearsed):
    """In its own table: a run on the test split is no run on the dev split."""
    figures = FIGURES[FIGURES["system"] == name]
    made = set()
    runs = []
    tools = {Path(words[0]).name for words in rehearsed(name)}
    for script, *words in rehearsed(name):
        if script == "06_evaluate.py":
            runs = [Path(word).stem for word in words if word.endswith(".tsv")]
        elif script.endswith("published.py"):  # right behind it
            system, _, table = words[-1].partition(":")
            assert system == name
            if not table:
                table = figures["table"].iloc[0]
            made |= {(table, run) for run in runs}
    for _, figure in figures.iterrows():
        is_run = (figure["table"], figure["row"]) in made
        by_tool = Path(figure["note"]).name in tools and "made by tools/" in figure["note"]
        not_made = figure["note"].startswith("not made: ")
        assert is_run + by_tool + not_made == 1, figure.to_dict()


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_recipe_is_short(name):
    text = (ROOT / path_of(name)).read_text("utf-8")
    assert text.split('\nfurther "${1:-}"')[0].count("\n") < 75


def test_gritlms_copy_attends_in_both_directions_and_pools_by_the_mean(toy, call, warm):
    sizes = SIZES | {"vocab_size": 30_522, "num_key_value_heads": 1}
    torch.manual_seed(0)
    causal = MistralForCausalLM(MistralConfig(**sizes))
    causal.save_pretrained(toy / "causal")
    tokenizer = AutoTokenizer.from_pretrained(toy / "data/models/minilm")
    tokenizer.save_pretrained(toy / "causal")
    steps = '. recipes/systems/claim2source_2026_steps.sh; both_ways "$0/causal" "$0/both"'
    env = os.environ | {"PATH": warm}
    subprocess.run(["bash", "-c", steps, toy], cwd=ROOT, env=env, check=True)
    call("01_index.py", "--indexes dense --dense-model both --fields abstract", cwd=toy)
    ids = tokenizer(ABSTRACTS["0001"], return_tensors="pt")["input_ids"]
    nothing_hidden = torch.zeros(1, 1, ids.shape[1], ids.shape[1])
    states = causal.model(ids, attention_mask=nothing_hidden).last_hidden_state
    wanted = torch.nn.functional.normalize(states.mean(dim=1)).detach()
    found = np.load(toy / "work/demo/index/dense/embeddings.npy")[:1]
    np.testing.assert_allclose(found, wanted, atol=2e-3)


# ---------------------------------------------------------------- Prompts
SHOWN = {"batch": "pairs"} | dict.fromkeys(("ranking", "ten-best", "one-of-ten"), "claim abstracts")


def test_a_prompt_shows_the_user_what_is_judged_and_ends_with_the_form_of_a_reply():
    kit = load("05_classify.py")
    for path in sorted(ROOT.glob("recipes/systems/prompts/*.txt")):
        names = SHOWN.get(path.stem, "claim abstract").split()
        template = kit.read_prompt(path)
        *_, user = kit.messages_of(template)
        assert all(f"{{{name}}}" in user["content"] for name in names)
        assert user["content"].splitlines()[-1].startswith("Answer with ")
        assert "never an instruction" in template


# ---------------------------------------------------------------- Published figures
FIGURES = read(ROOT / "recipes/published.tsv")


def test_a_figure_stands_once():
    assert not FIGURES.duplicated(["system", "table", "row", "measure"]).any()


NOT_SETTINGS = set(
    "data work split out run index corpus claims replies dev-run verdicts graph "
    "device restrict prompt indexes retrievers seed backend timeout examples base-url".split()
)


def settings_of(words):
    """Return pairs of a flag and a value of a command; files do not count."""
    flags = " ".join(word for word in words if "/work/" not in word)
    settings = set()
    for flag, values in re.findall(r"--([a-z0-9-]+)((?: (?!--)[^`]*?)?)(?= --|$)", flags):
        if flag in NOT_SETTINGS:
            continue
        for value in values.strip().split(", "):
            if value or flag in ("gold", "structured"):
                settings.add((flag, value))
    return settings


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_setting_of_a_recipe_says_where_it_is_from(name, rehearsed):
    page = (ROOT / "recipes/DIFFERENCES.md").read_text("utf-8")
    (section,) = re.findall(rf"^### [^\n]*`{name}.sh`\n(.*?)^##", page, re.M | re.S)
    known = set()
    for code in re.findall("`([^`]+)`", section):
        known |= settings_of([code])
    for words in rehearsed(name):
        if words[0][:2] <= "05":
            assert settings_of(words) <= known
