"""data/demo/: enough of it, in the shares that data/README.md promises, and consistent."""
import json
import re

import pandas as pd
from conftest import ROOT
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

def read(name):
    """Return the table of both splits."""
    paths = [ROOT / "data" / "demo" / f"{name}.{split}.tsv" for split in ("train", "test")]
    tables = [pd.read_csv(path, sep="\t", dtype=str, keep_default_na=False) for path in paths]
    return pd.concat(tables, keys=("train", "test"), names=("split", None)).reset_index("split")

LINES = (ROOT / "data" / "demo" / "corpus.jsonl").read_text("utf-8").splitlines()
CORPUS = {record["abstract_id"]: record for record in map(json.loads, LINES)}
PAIRS, TEXTS = read("qrels").merge(read("claims"), how="left"), read("claims")["claim"]

def words(text):
    """Return the words of a text that are worth comparing."""
    found = re.findall(r"[a-z0-9]{3,}", text.lower())
    return set(found) - ENGLISH_STOP_WORDS

def test_sizes_and_shares():
    assert len(TEXTS) >= 48 and len(CORPUS) == len(LINES) >= 240
    assert all(80 <= len(record["abstract"].split()) <= 200 for record in CORPUS.values())
    shares = PAIRS["label"].value_counts(normalize=True)
    assert (shares[["SUPPORTS", "REFUTES", "NEI"]] - [0.4, 0.2, 0.4]).abs().max() < 0.05
    for _, labels in PAIRS.groupby("claim_id")["label"]:
        assert 4 <= len(labels) <= 8 and 2 <= (labels != "NEI").sum() < len(labels)

def test_pairs_are_of_known_claims_and_abstracts_and_hard():
    assert PAIRS["claim"].notna().all() and not PAIRS.duplicated(["claim_id", "abstract_id"]).any()
    records = map(CORPUS.get, PAIRS["abstract_id"])
    texts = [f"{record['title']} {record['abstract']}" for record in records]
    shared = [len(words(claim) & words(text)) for claim, text in zip(PAIRS["claim"], texts)]
    nei = PAIRS["label"] == "NEI"
    assert (pd.Series(shared)[nei] >= 2).mean() > 0.95  # words of the claim, and no evidence
    assert (pd.Series(shared)[~nei] == 0).sum() >= 8  # evidence without a word of the claim
    assert not re.search(r"10\.\d{4,}/|doi\.org|https?://|arXiv", " ".join(texts))  # invented
