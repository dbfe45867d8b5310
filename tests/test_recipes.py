"""The recipes: one system whole, in small, against a scripted endpoint; their form."""
import functools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from conftest import ROOT, RUN, load, tiny, tsv

SYSTEMS = "kiepura_lam ant_bridge alexunlp_fmt efc pranav baseline_2025 airwaves verirel " \
          "climatesense_2026".split()

def answer(prompt):
    """What a language model could say to any question of stages 4 and 5."""
    marks = re.findall(r"^\[(\d+)\]", prompt, re.M)
    if marks:
        return " > ".join(f"[{mark}]" for mark in [*marks[1::-1], *marks[2:]])
    return ("SUPPORTS", "REFUTES", "NEI")[len(prompt) % 3]

def shell(name, *words, **settings):
    env = os.environ | {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    command = ["bash", str(ROOT / "recipes" / f"{name}.sh"), *words]
    return subprocess.run(command, env=env | settings, capture_output=True, text=True, check=False)

def with_path(folder):
    return f"{folder}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"

def test_a_system_with_all_six_stages_in_small(models, endpoint, tmp_path):
    """A second run makes nothing; what replaces which model is said."""
    how = {"DATA": "data/demo", "SMALL": "1", "WORK": str(tmp_path / "work"), "LLM_MODEL": "toy",
           "LLM_BASE_URL": endpoint(answer).url}
    done = shell("kiepura_lam", **how)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "small: data/models/minilm replaces BAAI/bge-m3" in done.stderr
    table = pd.read_csv(tmp_path / "work/test/metrics.tsv", sep="\t")
    assert list(table["run"]) == "bm25 splade dense hybrid rerank llm verdicts".split()
    assert table["R@10"].between(0.2, 1).all()
    file, = (tmp_path / "work/test/climatecheck2025").glob("*.csv")
    assert pd.read_csv(file, dtype=str).iloc[:, 0].nunique() == 25
    made = [path for path in (tmp_path / "work").rglob("*") if path.is_file()]
    before = {path: path.stat().st_mtime_ns for path in made}
    assert shell("kiepura_lam", **how).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in made} == before

def test_todays_models_in_small(toy, endpoint):
    """The stand-in of the causal reranker is one; no language model is loaded."""
    how = {"DATA": str(toy / "data/demo"), "SMALL": "1", "WORK": str(toy / "best"),
           "LLM_MODEL": "toy", "LLM_BASE_URL": endpoint(answer).url}
    done = shell("best", **how)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "work/small/causal replaces Qwen/Qwen3-Reranker-4B" in done.stderr
    assert "LogitScore" in (ROOT / "work/small/causal/modules.json").read_text()
    table = pd.read_csv(toy / "best/test/metrics.tsv", sep="\t")
    runs = "bm25 splade dense hybrid rerank pointwise llm verdicts nli combined"
    assert set(table["run"]) == set(runs.split())

def test_vllm_answers_until_nothing_waits(toy):
    script = (". recipes/common.sh demo; JUDGE=toy; ask $T/llm python 04_llm_rerank.py $D "
              "--run $T/hybrid.tsv --backend none --model toy --window 4 --step 2")
    how = {"DATA": str(toy / "data/demo"), "WORK": str(toy / "work/demo"),
           "PATH": with_path(ROOT / "tests" / "stand_ins")}
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, env=os.environ | how, check=False)
    replies = (toy / "work/demo/test/llm.replies.jsonl").read_text().splitlines()
    assert done.returncode == 0 and len(replies) == 6  # two windows a claim, one after the other
    assert (toy / "work/demo/test/llm.tsv").exists()

def test_a_model_that_fails_is_a_line_with_its_error_until_it_works(toy, models):
    tools = {"nvidia-smi": "n=$(cat $0.n || echo 0); echo $((n + 100)) | tee $0.n",
             "codecarbon": "shift 5; (echo energy_consumed,emissions; echo 0.002,0.001) "
                           "> $CODECARBON_OUTPUT_DIR/emissions.csv; exec \"$@\""}
    for name, line in tools.items():
        (toy / name).write_text(f"#!/bin/bash\n{line}\n")
        (toy / name).chmod(0o755)
    tiny(toy / "good")
    how = {"DATA": str(toy / "data/demo"), "WORK": str(toy / "compare"), "PATH": with_path(toy),
           "RUN": str(toy / "work/demo/test/hybrid.tsv"), "MODELS": f"{toy}/bad {toy}/good"}
    as_file, before = str(toy).replace("/", "_"), None
    for worked in (False, True):
        done = shell("compare", **how)
        assert done.returncode == 0, done.stderr[-3000:]
        table = pd.read_csv(toy / "compare/compare.tsv", sep="\t").set_index("run")
        good, bad = table.loc[f"{as_file}_good"], table.loc[f"{as_file}_bad"]
        assert len(table) == 3 and good["GPU MiB"] >= 100 and good["Wh"] == 2
        assert pd.notna(bad["nDCG@10"]) == worked and pd.notna(bad.get("error")) != worked
        now = (toy / "compare/test" / f"{as_file}_good.tsv").stat().st_mtime_ns
        assert before in (None, now)
        before = now
        tiny(toy / "bad", seed=5)

def test_a_name_that_is_a_retriever_and_a_reranker_has_two_rows(toy):
    how = {"DATA": str(toy / "data/demo"), "WORK": str(toy / "compare"),
           "RETRIEVERS": "data/models/minilm", "MODELS": "data/models/minilm"}  # no cross-encoder
    done = shell("compare", **how)
    assert done.returncode == 0, done.stderr[-3000:]
    table = pd.read_csv(toy / "compare/compare.tsv", sep="\t").set_index("run")
    assert list(table.index) == ["data_models_minilm", "data_models_minilm-2"]
    assert table["nDCG@10"].notna().tolist() == table["error"].isna().tolist() == [True, False]

@pytest.mark.parametrize("settings, words", [
    ({"SMALL": ""}, ["LLM_BASE_URL", "gemini-2.0-flash"]),  # before hours of work, not after them
    ({"SMALL": "", "OPENAI_API_KEY": "sk-1"}, ["LLM_BASE_URL", "gemini-2.0-flash"]),
    ({"SMALL": "yes"}, ["SMALL", "'yes'"]),
    ({"SMALL": "1", "DATA": "data/dmeo"}, ["DATA", "'data/dmeo'"]),  # no download under that name
    ({"SMALL": "1", "DATA": "my data"}, ["DATA", "'my data'"]),
])
def test_what_would_fail_later_is_said_before_anything_is_made(settings, words, tmp_path):
    how = {"DATA": "data/demo", "WORK": str(tmp_path / "work"), **settings}
    done = shell("pranav", **how)
    error, = done.stderr.splitlines()
    assert done.returncode == 2 and error.startswith("error: ") and not (tmp_path / "work").exists()
    assert all(word in error for word in words)

def test_without_judgements_there_is_no_table_and_no_further_cost(tmp_path):
    code = '. recipes/common.sh demo; table x y; further tables'
    done = subprocess.run(["bash", "-c", code], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"DATA": str(tmp_path), "SMALL": ""}, check=False)
    qrels = f"{tmp_path}/qrels.test.tsv"
    assert done.returncode == 2 and f"no table without {qrels}" in done.stdout
    assert done.stderr.startswith(f"error: tables: they need {qrels}")

def add_blank_line(path):
    path.write_text("\n" + path.read_text(encoding="utf-8"), encoding="utf-8")

def test_tokens_are_counted_and_a_blank_line_is_no_abstract(toy):
    add_blank_line(toy / "data/demo/corpus.jsonl")
    command = [sys.executable, str(ROOT / "recipes/tools/count_tokens.py"), "data/demo"]
    done = subprocess.run(command, cwd=toy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts = {line.split()[0]: line.split()[1] for line in done.stdout.splitlines()[1:]}
    assert counts["abstract"] == "12.0" and counts["claims.test"] == "3.0"

def test_texts_become_lemmas(toy):
    import spacy
    nlp = spacy.blank("en")
    nlp.add_pipe("lemmatizer", config={"mode": "lookup"})
    nlp.initialize()
    nlp.to_disk(toy / "pipeline")
    add_blank_line(toy / "data/demo/corpus.jsonl")
    command = [sys.executable, str(ROOT / "recipes/tools/lemmatise.py"), "data/demo", "lemmas"]
    command += ["--pipeline", "pipeline"]
    done = subprocess.run(command, cwd=toy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    again = subprocess.run(command, cwd=toy, capture_output=True, text=True, check=True)
    assert again.stdout == "up to date: lemmas\n"
    with open(toy / "data/demo/claims.test.tsv", "a") as file:
        file.write('c9\t"Rivers rose\n')  # no quotation mark joins two rows
    subprocess.run(command, cwd=toy, check=True)
    assert "c9\t" in (toy / "lemmas/claims.test.tsv").read_text(encoding="utf-8")
    assert "c3\tpolar bear starve" in (toy / "lemmas/claims.test.tsv").read_text(encoding="utf-8")
    corpus = (toy / "lemmas/corpus.jsonl").read_text(encoding="utf-8")
    assert '"abstract_id": "0012", "abstract": "glaciers alps lose' in corpus

# In place of Python: notes its arguments, and makes what --out names, a file or a folder of runs
REHEARSAL = """#!/bin/bash
(printf '%q ' "$@"; echo) >> $NOTES
while [ $# -gt 1 ]; do
  if [ $1 = --out ]; then
    case $2 in
      *.*) mkdir -p $(dirname $2) && touch $2 ;;
      *) mkdir -p $2 && touch $2/{bm25,dense,splade}.tsv ;;
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
    for kind in ("bm25", "dense", "splade", "hybrid"):
        tsv(toy / "work/test" / f"{kind}.tsv", RUN, [])
    def commands(name, *words):
        how = {"DATA": f"{toy}/data/demo", "WORK": f"{toy}/work", "NOTES": f"{toy}/notes",
               "SMALL": "", "LLM_BASE_URL": "http://none", "PATH": with_path(toy / "bin")}
        done = shell(name, *words or ["tables"], **how)
        assert done.returncode == 0, done.stderr
        return [shlex.split(line) for line in (toy / "notes").read_text().splitlines()]
    return commands

@functools.cache
def parse(script):
    """Return a function that parses the words of a script's command line, and no more."""
    main = load(script).main
    main.__globals__.update(finish=lambda resolve, args: None)
    return main

@pytest.mark.parametrize("name", [*SYSTEMS, "best", "small"])
def test_every_command_of_a_recipe_at_full_size_has_known_flags_and_values(
        name, rehearsed, monkeypatch, toy):
    for kind in ("claims", "qrels"):
        path = toy / "data/demo" / f"{kind}.train.tsv"
        path.with_name(f"{kind}.dev.tsv").write_bytes(path.read_bytes())
    words = [f"{toy}/data/demo"] if name == "small" else []
    commands = [words for words in rehearsed(name, *words) if words[0].startswith("0")]
    assert len(commands) > 5
    for words in commands:
        monkeypatch.setattr(sys, "argv", words)
        parse(words[0])()  # SystemExit 2 where argparse refuses

@pytest.mark.parametrize("name", SYSTEMS)
def test_a_recipe_makes_all_rows_that_have_published_figures(name, rehearsed):
    made = set()
    for script, *words in rehearsed(name):
        if script == "06_evaluate.py" and "--published" in words:
            made |= {Path(word).stem for word in words if word.endswith(".tsv")}
    figures = pd.read_csv(ROOT / "recipes" / "published.tsv", sep="\t")
    rows = set(figures.loc[figures["system"] == name, "row"])
    only_published = {"climatesense_2026": {"baseline"}}.get(name, set())  # of the organisers
    assert rows and rows - made == only_published

@pytest.mark.parametrize("name", SYSTEMS)
def test_a_recipe_is_short(name):
    text = (ROOT / "recipes" / f"{name}.sh").read_text(encoding="utf-8")
    main, *further = text.split('\nfurther "${1:-}"')
    assert len(further) == 1 and "stage \"tables" in further[0]
    assert len(main.splitlines()) <= 75
    assert max(map(len, text.splitlines())) <= 100

def test_published_recalls_of_verirel_are_shares_of_all_evidence_pairs():
    figures = pd.read_csv(ROOT / "recipes" / "published.tsv", sep="\t")
    assert not figures.duplicated(["system", "table", "row", "measure"]).any()
    for table, pairs in (("SciFact", 209), ("SciFact-Open", 251), ("Check-COVID", 1009)):
        values = figures.loc[figures["table"] == table, "value"]
        assert len(values) and ((values * pairs).round() / pairs - values).abs().max() < 5.1e-5
