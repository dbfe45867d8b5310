"""The recipes: one system whole, in small, against a scripted endpoint; their form."""
import os
import re
import subprocess
import sys

import pandas as pd
import pytest
from conftest import ROOT

SYSTEMS = "kiepura_lam ant_bridge alexunlp_fmt efc pranav baseline_2025 airwaves verirel " \
          "climatesense_2026".split()

def answer(prompt):
    """What a language model could say to any question of stages 4 and 5."""
    marks = re.findall(r"^\[(\d+)\]", prompt, re.M)
    if marks:
        return " > ".join(f"[{mark}]" for mark in [*marks[1::-1], *marks[2:]])
    return ("SUPPORTS", "REFUTES", "NEI")[len(prompt) % 3]

def shell(name, **settings):
    env = os.environ | {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    command = ["bash", str(ROOT / "recipes" / f"{name}.sh")]
    return subprocess.run(command, env=env | settings, capture_output=True, text=True, check=False)

def test_a_system_with_all_six_stages_in_small(models, endpoint, tmp_path):
    """A second run makes nothing; what replaces which model is said."""
    how = {"DATA": "data/demo", "SMALL": "1", "WORK": str(tmp_path / "work"), "LLM_MODEL": "toy",
           "LLM_BASE_URL": endpoint(answer).url}
    done = shell("kiepura_lam", **how)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "small: data/models/minilm replaces BAAI/bge-m3" in done.stderr
    table = pd.read_csv(tmp_path / "work/test/metrics.tsv", sep="\t")
    assert list(table["run"]) == "bm25 splade dense hybrid rerank llm verdicts deberta".split()
    assert table["R@10"].between(0.2, 1).all()
    file, = (tmp_path / "work/test/climatecheck2025").glob("*.csv")
    assert pd.read_csv(file, dtype=str).iloc[:, 0].nunique() == 25
    made = [path for path in (tmp_path / "work").rglob("*") if path.is_file()]
    before = {path: path.stat().st_mtime_ns for path in made}
    assert shell("kiepura_lam", **how).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in made} == before

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

def test_texts_become_lemmas(toy):
    import spacy
    nlp = spacy.blank("en")
    nlp.add_pipe("lemmatizer", config={"mode": "lookup"})
    nlp.initialize()
    nlp.to_disk(toy / "pipeline")
    command = [sys.executable, str(ROOT / "recipes/lemmatise.py"), "data/demo", "lemmas"]
    done = subprocess.run([*command, "--pipeline", "pipeline"], cwd=toy, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "c3\tpolar bear starve" in (toy / "lemmas/claims.test.tsv").read_text(encoding="utf-8")
    corpus = (toy / "lemmas/corpus.jsonl").read_text(encoding="utf-8")
    assert '"abstract_id": "0012", "abstract": "glaciers alps lose' in corpus

@pytest.mark.parametrize("name", SYSTEMS)
def test_a_recipe_is_short_and_its_figures_are_published(name):
    text = (ROOT / "recipes" / f"{name}.sh").read_text(encoding="utf-8")
    assert len(text.split("= tables ]")[0].splitlines()) <= 75
    assert max(map(len, text.splitlines())) <= 100
    figures = pd.read_csv(ROOT / "recipes" / "published.tsv", sep="\t")
    rows = figures.loc[figures["system"] == name, "row"]
    assert len(rows) and any(f"{row}.tsv" in text or row in text for row in rows)

def test_published_recalls_of_verirel_are_shares_of_all_evidence_pairs():
    figures = pd.read_csv(ROOT / "recipes" / "published.tsv", sep="\t")
    assert not figures.duplicated(["system", "table", "row", "measure"]).any()
    for table, pairs in (("SciFact", 209), ("Check-COVID", 1009)):
        values = figures.loc[figures["table"] == table, "value"]
        assert len(values) and ((values * pairs).round() / pairs - values).abs().max() < 5.1e-5
