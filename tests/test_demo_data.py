"""data/demo/: enough of it, in the shares that data/README.md promises, and consistent."""
import json
import re

import pandas as pd
from conftest import ROOT
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

DEMO = ROOT / "data" / "demo"
def table(name):
    return pd.read_csv(DEMO / name, sep="\t", dtype=str, keep_default_na=False)

CORPUS = {record["abstract_id"]: record for record in map(json.loads, open(DEMO / "corpus.jsonl", encoding="utf-8"))}
CLAIMS = {split: table(f"claims.{split}.tsv") for split in ("train", "test")}
QRELS = {split: table(f"qrels.{split}.tsv") for split in ("train", "test")}
PAIRS = pd.concat(QRELS.values())
TEXT = {**{row.claim_id: row.claim for claims in CLAIMS.values() for row in claims.itertuples()}}

def words(text):
    return {word for word in re.findall(r"[a-z0-9]+", text.lower()) if word not in ENGLISH_STOP_WORDS and len(word) > 2}

def shared(pair):
    record = CORPUS[pair.abstract_id]
    return len(words(TEXT[pair.claim_id]) & words(f"{record['title']} {record['abstract']}"))

def test_at_least_48_claims_half_of_them_test():
    assert len(TEXT) == sum(map(len, CLAIMS.values())) >= 48
    assert abs(len(CLAIMS["train"]) - len(CLAIMS["test"])) <= 1

def test_at_least_240_abstracts_of_80_to_200_words():
    assert len(CORPUS) >= 240
    assert all(80 <= len(record["abstract"].split()) <= 200 for record in CORPUS.values())
    assert all(set(record) == {"abstract_id", "title", "abstract"} for record in CORPUS.values())
    assert len({record["abstract"] for record in CORPUS.values()}) == len(CORPUS)

def test_label_shares():
    shares = PAIRS["label"].value_counts(normalize=True)
    assert abs(shares["SUPPORTS"] - 0.4) < 0.05 and abs(shares["REFUTES"] - 0.2) < 0.05 and abs(shares["NEI"] - 0.4) < 0.05

def test_4_to_8_judged_pairs_a_claim_with_evidence_and_nei():
    for _, labels in PAIRS.groupby("claim_id")["label"]:
        assert 4 <= len(labels) <= 8
        assert (labels == "NEI").any() and (labels != "NEI").sum() >= 2

def test_every_pair_is_of_a_known_claim_and_abstract_and_stands_once():
    for split, qrels in QRELS.items():
        assert set(qrels["claim_id"]) == set(CLAIMS[split]["claim_id"])
        assert set(qrels["abstract_id"]) <= set(CORPUS)
        assert not qrels.duplicated(["claim_id", "abstract_id"]).any()
    assert not set(CLAIMS["train"]["claim_id"]) & set(CLAIMS["test"]["claim_id"])

def test_nei_overlaps_in_words_and_some_evidence_does_not():
    nei = PAIRS[PAIRS["label"] == "NEI"].apply(shared, axis=1)
    evidence = PAIRS[PAIRS["label"] != "NEI"].apply(shared, axis=1)
    assert (nei >= 2).mean() > 0.95
    assert (evidence == 0).sum() >= 8 and (evidence >= 3).sum() >= 48

def test_claims_sound_like_posts():
    assert sum("#" in text for text in TEXT.values()) >= 12

def test_no_identifier_of_a_real_paper():
    text = " ".join(f"{record['title']} {record['abstract']}" for record in CORPUS.values())
    assert not re.search(r"10\.\d{4,}/|doi\.org|https?://|arXiv", text)
