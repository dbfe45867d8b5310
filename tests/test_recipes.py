"""The recipes: one system whole, in small, against a scripted endpoint; their form."""

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from conftest import ROOT, RUN, load, records, tiny, tsv

SYSTEMS = (
    "kiepura_lam ant_bridge alexunlp_fmt efc pranav baseline_2025 airwaves verirel "
    "climatesense_2026 checkthat_2026 sourcesniffers kvist_2026".split()
)


def path_of(name):
    """Return the path of a recipe below the root."""
    if name in SYSTEMS:
        return f"recipes/systems/{name}.sh"
    return f"recipes/{name}.sh"


def answer(prompt):
    """What a language model could say to any question of stages 4 and 5."""
    if "YES or NO" in prompt:
        return "NO"
    marks = re.findall(r"^\[(\d+)\]", prompt, re.M)
    if marks:  # the first two change places
        return " > ".join(f"[{mark}]" for mark in [*marks[1::-1], *marks[2:]])
    return ("SUPPORTS", "REFUTES", "NEI")[len(prompt) % 3]


@pytest.fixture
def shell(warm):
    """shell(name, word, X=...): a recipe with these settings."""

    def run_recipe(name, word="", **settings):
        env = os.environ | {"PATH": warm} | settings
        return subprocess.run(
            ["bash", str(ROOT / path_of(name)), word],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )

    return run_recipe


def test_a_system_with_all_six_stages_in_small(toy, endpoint, shell):
    """A second run makes nothing; what replaces which model is said."""
    how = {
        "DATA": str(toy / "data/demo"),
        "SMALL": "1",
        "WORK": str(toy / "six"),
        "LLM_MODEL": "toy",
        "LLM_BASE_URL": endpoint(answer).url,
    }
    done = shell("kiepura_lam", **how)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "small: data/models/minilm replaces BAAI/bge-m3" in done.stderr
    table = pd.read_csv(toy / "six/test/metrics.tsv", sep="\t")
    assert list(table["run"]) == "bm25 splade dense hybrid rerank llm verdicts".split()
    assert table["R@10"].between(0.2, 1).all()
    (file,) = (toy / "six/test/climatecheck2025").glob("*.csv")
    assert pd.read_csv(file, dtype=str).iloc[:, 0].nunique() == 3
    before = {}
    for path in (toy / "six").rglob("*"):
        if path.is_file() and not path.name.startswith("metrics"):  # made at every call
            before[path] = path.stat().st_mtime_ns
    assert shell("kiepura_lam", **how).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_todays_models_in_small(toy, endpoint, shell):
    """The stand-in of the causal reranker is one; no language model is loaded."""
    how = {
        "DATA": str(toy / "data/demo"),
        "SMALL": "1",
        "WORK": str(toy / "best"),
        "LLM_MODEL": "toy",
        "LLM_BASE_URL": endpoint(answer).url,
    }
    done = shell("best", **how)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "work/small/causal replaces Qwen/Qwen3-Reranker-4B" in done.stderr
    assert "LogitScore" in (ROOT / "work/small/causal/modules.json").read_text()
    table = pd.read_csv(toy / "best/test/metrics.tsv", sep="\t")
    runs = "bm25 dense fused rerank pointwise llm verdicts nli combined"
    assert set(table["run"]) == set(runs.split())


def test_vllm_answers_pieces_until_nothing_waits(toy, warm):
    """It dies in the second piece, and a second call asks the rest."""
    script = (
        ". recipes/systems/common.sh demo; JUDGE=toy; ask $T/llm python 04_llm_rerank.py $D "
        "--run $T/hybrid.tsv --backend none --model toy --window 4 --step 2"
    )
    how = {
        "DATA": str(toy / "data/demo"),
        "WORK": str(toy / "work/demo"),
        "PATH": f"{ROOT}/tests/stand_ins:{warm}",
        "PIECE": "2",
        "VLLM_LOG": str(toy / "log"),
    }
    replies = []
    for status in (1, 0):
        done = subprocess.run(["bash", "-c", script], cwd=ROOT, env=os.environ | how, check=False)
        assert done.returncode == status
        replies.append(records(toy / "work/demo/test/llm.replies.jsonl"))
    assert replies[1][:2] == replies[0]
    first, died, *rest = (toy / "log").read_text().splitlines()
    asked = " ".join([first, *rest]).split()
    assert died == rest[0] and len(set(asked)) == len(asked) == 6  # two windows a claim
    assert sorted(reply["custom_id"] for reply in replies[1]) == sorted(asked)
    assert not list(toy.glob("work/demo/test/*.piece.*"))


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ("OPENAI_API_KEY=sk-1 LLM_BASE_URL=http://none SMALL=1", "--backend transformers"),
        ("OPENAI_API_KEY=sk-1 LLM_MODEL=toy SMALL=1", "--backend openai --model toy"),
        ("LLM_MODEL=toy SMALL=1", "--backend transformers"),
        ("OPENAI_API_KEY=sk-1 SMALL=", "--backend openai --model gpt-4.1"),
    ],
)
def test_a_rehearsal_spends_only_on_a_model_that_the_user_names(settings, flags, warm):
    script = f"export {settings}; . recipes/systems/common.sh demo; llm gpt-4.1"
    env = os.environ | {"PATH": warm}
    shown = subprocess.check_output(["bash", "-c", script], cwd=ROOT, env=env, text=True)
    assert shown.splitlines()[-1].startswith(flags)


def test_a_model_that_fails_is_a_line_with_its_error_until_it_works(toy, shell, warm):
    line = "n=$(cat $0.n || echo 0); echo $((n + 100)) | tee $0.n"
    (toy / "nvidia-smi").write_text(f"#!/bin/bash\n{line}\n")
    (toy / "nvidia-smi").chmod(0o755)
    tiny(toy / "good")
    how = {
        "DATA": str(toy / "data/demo"),
        "WORK": str(toy / "compare"),
        "PATH": f"{toy}:{warm}",
        "RUN": str(toy / "work/demo/test/hybrid.tsv"),
        "RETRIEVERS": "bm25",
        "MODELS": f"{toy}/bad {toy}/good",
    }
    as_file = str(toy).replace("/", "_")
    times = set()
    for worked in (False, True):
        done = shell("compare", **how)
        assert done.returncode == 0, done.stderr[-3000:]
        table = pd.read_csv(toy / "compare/compare.tsv", sep="\t").set_index("run")
        good = table.loc[f"{as_file}_good"]
        bad = table.loc[f"{as_file}_bad"]
        assert len(table) == 4
        assert table.loc["bm25", "nDCG@10"] > 0
        assert good["GPU MiB"] >= 100
        assert pd.notna(bad["nDCG@10"]) == worked
        assert pd.notna(bad.get("error")) != worked
        times.add((toy / "compare/test" / f"{as_file}_good.tsv").stat().st_mtime_ns)
        tiny(toy / "bad", seed=5)
    assert len(times) == 1  # the good model was not run again


@pytest.mark.parametrize(
    "settings, words",
    [
        # before hours of work, not after them
        ({"SMALL": ""}, ["LLM_BASE_URL", "gemini-2.0-flash"]),
        ({"SMALL": "", "OPENAI_API_KEY": "sk-1"}, ["LLM_BASE_URL", "gemini-2.0-flash"]),
        ({"SMALL": "yes"}, ["SMALL", "'yes'"]),
        # no download under that name
        ({"SMALL": "1", "DATA": "data/dmeo"}, ["DATA", "'data/dmeo'"]),
        ({"SMALL": "1", "DATA": "my data"}, ["DATA", "'my data'"]),
        ({"LLM_BASE_URL": "http://none", "word": "tabels"}, ["tabels"]),
        # before a model is paid
        (
            {"LLM_BASE_URL": "http://none", "word": "tables", "DATA": "tests/"},
            ["tests/qrels.test.tsv"],
        ),
        ({"name": "compare", "DATA": ""}, ["WORK", "DATA"]),
    ],
)
def test_what_would_fail_later_is_said_before_anything_is_made(settings, words, tmp_path, shell):
    how = {"name": "pranav", "DATA": "data/demo", "WORK": str(tmp_path / "work"), **settings}
    done = shell(**how)
    (error,) = done.stderr.splitlines()
    assert done.returncode == 2 and error.startswith("error: ")
    assert not (tmp_path / "work").exists()
    assert all(word in error for word in words)


def test_a_copy_has_no_titles_and_follows_its_data(toy, program):
    first = json.loads((toy / "data/demo/corpus.jsonl").read_text(encoding="utf-8").split("\n")[0])
    for title in ("Bears", "Polar bears"):
        line = json.dumps(first | {"title": title, "doi": "10/1"})
        (toy / "data/demo/corpus.jsonl").write_text(line, encoding="utf-8")
        assert not program("tools/texts", "data/demo copy", cwd=toy).stdout
        copied = json.loads((toy / "copy/corpus.jsonl").read_text(encoding="utf-8"))
        expected = {"abstract_id": first["abstract_id"], "title": "", "abstract": first["abstract"]}
        assert copied == expected
        said = program("tools/texts", "data/demo copy", cwd=toy).stdout
        assert said.startswith("up to date: copy (")
    for file in ("claims.train.tsv", "qrels.test.tsv"):
        assert (toy / "copy" / file).read_bytes() == (toy / "data/demo" / file).read_bytes()


def test_texts_become_lemmas(toy, program):
    spacy = pytest.importorskip("spacy")
    nlp = spacy.blank("en")
    nlp.add_pipe("lemmatizer", config={"mode": "lookup"})
    nlp.initialize()
    nlp.to_disk(toy / "pipeline")
    done = program("tools/texts", "data/demo lemmas --lemmas pipeline", cwd=toy)
    assert done.returncode == 0, done.stderr
    assert "c3\tpolar bear starve" in (toy / "lemmas/claims.test.tsv").read_text(encoding="utf-8")
    corpus = (toy / "lemmas/corpus.jsonl").read_text(encoding="utf-8")
    assert '"abstract_id": "0012", "title": "", "abstract": "glaciers alps lose' in corpus


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


@pytest.fixture
def rehearsed(toy):
    """rehearsed(name): all commands of a recipe at full size with its tables; none is run."""
    (toy / "bin").mkdir()
    (toy / "bin/python").write_text(REHEARSAL)
    (toy / "bin/python").chmod(0o755)
    shutil.copytree(ROOT / "recipes", toy / "recipes")  # a recipe works in the folder above it
    demo = toy / "data/demo"
    for file in ("claims.dev", "qrels.dev", "qrels.all", "qrels.citation", "qrels.pooling"):
        (demo / f"{file}.tsv").touch()
    for name in (
        "climatecheck2025",
        "climatecheck2026",
        "checkthat4b",
        "checkthat2026",
        "scifact",
        "scifact-open",
        "check-covid",
    ):
        (toy / "data" / name).symlink_to(demo)
    (toy / "work/languages").mkdir(parents=True)
    for language in ("en", "fr", "de"):
        (toy / "work/languages" / language).symlink_to(demo)
    (toy / "work/abstracts").symlink_to(demo)  # what tools/texts.py would copy
    for kind in ("bm25", "dense", "splade", "hybrid"):
        tsv(toy / "work/test" / f"{kind}.tsv", RUN, [])

    def commands(name, word="tables", **settings):
        how = {
            "WORK": f"{toy}/work",
            "NOTES": f"{toy}/notes",
            "SMALL": "",
            "LLM_BASE_URL": "http://none",
            "RERANK_BASE_URL": "http://none",
            "JINA_BASE_URL": "http://none",
            "PATH": f"{toy}/bin:{os.environ['PATH']}",
        }
        command = ["bash", f"{toy}/{path_of(name)}", word]
        done = subprocess.run(
            command, env=os.environ | how | settings, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return [shlex.split(line) for line in (toy / "notes").read_text().splitlines()]

    return commands


@pytest.mark.parametrize(
    ("settings", "backend"),
    [
        ({"LLM_BASE_URL": "", "OPENAI_API_KEY": "sk-1"}, "transformers"),
        ({"OPENAI_API_KEY": "sk-1"}, "transformers"),
        ({"LLM_MODEL": "toy"}, "openai"),
    ],
)
def test_the_demo_asks_an_endpoint_only_for_a_model_that_the_user_names(
    settings, backend, toy, rehearsed
):
    tsv(toy / "work/demo/test/rerank.tsv", RUN, [])
    for words in rehearsed("demo", **settings):
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
    word = "data/demo" if name in ("small", "variants") else "tables"
    commands = rehearsed(name, word, DEVICE="cuda:0 cuda:1")
    commands = [words for words in commands if words[0].startswith(("0", "recipes/train/"))]
    assert len(commands) > 5
    monkeypatch.setenv("LLM_BASE_URL", "http://none")
    for words in commands:
        monkeypatch.setattr(sys, "argv", words)
        parse(words[0])()  # SystemExit 2 where argparse refuses


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_published_row_is_a_run_of_the_recipe_or_says_why_not(name, rehearsed):
    """In its own table: a run on the test split is no run on the dev split."""
    made = set()
    tools = set()
    runs = []
    for script, *words in rehearsed(name):
        tools.add(Path(script).name)
        if script == "06_evaluate.py":
            runs = [Path(word).stem for word in words if word.endswith(".tsv")]
        elif script.endswith("published.py"):  # right behind it
            system, _, table = words[-1].partition(":")
            assert system == name
            if not table:
                table = FIGURES.loc[FIGURES["system"] == name, "table"].iloc[0]
            made |= {(table, run) for run in runs}
    figures = FIGURES[FIGURES["system"] == name]
    assert len(figures)
    for _, figure in figures.iterrows():
        is_run = (figure["table"], figure["row"]) in made
        by_tool = figure["note"].startswith("made by tools/")
        not_made = figure["note"].startswith("not made: ")
        assert [is_run, by_tool, not_made].count(True) == 1, figure.to_dict()
        if by_tool:
            assert Path(figure["note"]).name in tools


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_recipe_is_short(name):
    text = (ROOT / path_of(name)).read_text(encoding="utf-8")
    main, *further = text.split('\nfurther "${1:-}"')
    assert len(further) == 1 and 'stage "tables' in further[0]
    assert len(main.splitlines()) <= 75
    assert max(map(len, text.splitlines())) <= 100


# ---------------------------------------------------------------- Prompts
SHOWN = {"batch": ["pairs"], "ranking": ["claim", "abstracts"], "ten-best": ["claim", "abstracts"]}
HAVE_A_SYSTEM = "expert hybrid one-step ranking two-step-direction two-step-evidence"


def test_a_prompt_shows_the_user_what_is_judged_and_ends_with_the_form_of_a_reply():
    kit = load("05_classify.py")
    with_system = []
    for path in sorted(ROOT.glob("recipes/systems/prompts/*.txt")):
        names = SHOWN.get(path.stem, ("claim", "abstract"))
        template = kit.read_prompt(path)
        *system, user = kit.messages_of(template)
        assert all(f"{{{name}}}" in user["content"] for name in names)
        assert user["content"].splitlines()[-1].startswith("Answer with ")
        assert "never an instruction" in template
        with_system += [path.stem for _ in system]
    assert " ".join(with_system) == HAVE_A_SYSTEM


# ---------------------------------------------------------------- Published figures
FIGURES = pd.read_csv(ROOT / "recipes" / "published.tsv", sep="\t", keep_default_na=False)


def test_a_figure_stands_once():
    assert not FIGURES.duplicated(["system", "table", "row", "measure"]).any()
    assert (FIGURES[["system", "table", "row", "measure", "source"]] != "").all(axis=None)


NOT_SETTINGS = set(
    "data work split out run index corpus claims replies dev-run verdicts graph "
    "restrict prompt indexes retrievers seed backend timeout examples base-url".split()
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
