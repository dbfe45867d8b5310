"""recipes/checkthat_2026.sh on the toy in three languages: a run by language, the submission."""

import os
import re
import subprocess
import zipfile

import pandas as pd
from conftest import CLAIMS, QRELS, ROOT, read, tsv

IDS = {"c1": "en-1", "c2": "de-2", "c3": "en-3", "c4": "de-4", "c5": "fr-5"}


def translated(prompt):
    return f"<text>{re.search('<claim>(.*)</claim>', prompt)[1]} in English</text>"


def multilingual(data):
    """Give the toy a language a claim, a dev split, and a test split without judgements."""
    for split in ("train", "test"):
        claims = read(data / f"claims.{split}.tsv")
        qrels = read(data / f"qrels.{split}.tsv")
        out = split.replace("test", "dev")
        rows = [(IDS[claim_id], claim, IDS[claim_id][:2]) for claim_id, claim in claims.values]
        tsv(data / f"claims.{out}.tsv", [*CLAIMS, "language"], rows)
        if split == "test":
            tsv(data / "claims.test.tsv", [*CLAIMS, "language"], rows)
        rows = [
            (IDS[claim_id], abstract_id, label) for claim_id, abstract_id, label in qrels.values
        ]
        tsv(data / f"qrels.{out}.tsv", QRELS, rows)
    (data / "qrels.test.tsv").unlink()


def test_each_language_gets_the_run_that_is_best_for_it_on_dev(toy, endpoint, warm):
    multilingual(toy / "data/demo")
    server = endpoint(translated)
    how = {
        "DATA": f"{toy}/data/demo",
        "WORK": f"{toy}/made",
        "SMALL": "1",
        "LLM_MODEL": "toy",
        "LLM_BASE_URL": server.url,
        "PATH": warm,
    }
    done = subprocess.run(
        ["bash", ROOT / "recipes/checkthat_2026.sh"],
        env=os.environ | how,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(server.asked) == 6  # three posts of dev, three of test
    dev = toy / "made/dev"
    test = toy / "made/test"
    columns = {}
    for language in ("en", "de", "fr"):
        metrics = pd.read_csv(dev / language / "metrics.tsv", sep="\t", index_col="run")
        columns[language] = metrics["MRR@5"]
    table = pd.DataFrame(columns)
    runs = "dense bm25 bm25-english hybrid fused rerank blended"
    assert set(table.index) == set(runs.split())
    best = {}
    for language in table:
        best[language] = re.search(rf"^{language}: (\w+)$", done.stdout, re.MULTILINE)[1]
    final = read(test / "final.tsv")
    for language, run in best.items():
        rivals = ["dense", "fused", "rerank", "blended"]
        assert run in rivals
        assert table.loc[run, language] == table.loc[rivals, language].max()
        rows = read(test / f"{run}.tsv")
        rows = rows[rows["claim_id"].str.startswith(language)]
        found = final[final["claim_id"].str.startswith(language)]
        assert found.values.tolist() == rows.values.tolist()
        assert len(rows) >= 5
    with zipfile.ZipFile(test / "submission/predictions.zip") as archive:
        tables = {name: archive.read(name).decode().splitlines() for name in archive.namelist()}
    assert set(tables) == {f"predictions_{language}.tsv" for language in best}
    for language, number in (("en", 3), ("de", 4), ("fr", 5)):
        header, row = tables[f"predictions_{language}.tsv"]
        first = final[final["claim_id"] == f"{language}-{number}"]["abstract_id"][:5]
        assert header == "index\tpreds"
        assert row == f"{number}\t{list(first)}"
