"""03_rerank.py: what is mined, how ties fall, that training and reranking run alone, and what is refused."""
import json

import numpy as np
import pandas as pd
import pytest
from conftest import tsv

SCRIPT = "03_rerank.py"

def frame(text, columns):
    return pd.DataFrame([row.split() for row in text.split(",")], columns=columns)

# ----------------------------------------------------------- Functions
def test_equal_scores_fall_in_corpus_order_and_claims_keep_theirs(load):
    run = pd.DataFrame({"claim_id": ["2", "2", "1", "2"], "abstract_id": ["c", "a", "a", "b"], "rank": [1, 2, 1, 3],
                        "score": [0.5, 0.5, 9.0, 0.7]})
    ranked = load(SCRIPT)["by_score"](run, {"a": 0, "b": 1, "c": 2})
    assert ranked.values.tolist() == [["2", "b", 1, 0.7], ["2", "a", 2, 0.5], ["2", "c", 3, 0.5], ["1", "a", 1, 9.0]]

QRELS = frame("1 a SUPPORTS, 1 b REFUTES, 1 c NEI, 1 d NEI, 1 e NEI, 2 f NEI", ["claim_id", "abstract_id", "label"])
RUN = frame("1 d, 1 x, 1 a, 1 c, 1 y, 1 z, 2 a, 2 f", ["claim_id", "abstract_id"])

def mined(load, hard, easy, seed=0):
    return load(SCRIPT)["mine_examples"](RUN, QRELS, hard, easy, np.random.default_rng(seed))

def test_hard_negatives_are_judged_nei_best_ranked_first(load):
    examples = mined(load, hard=2, easy=0)
    assert [(e["abstract_id"], e["kind"], e["target"]) for e in examples] == [
        ("a", "positive", 1.0), ("b", "positive", 1.0), ("d", "hard", 0.0), ("c", "hard", 0.0)]

def test_easy_negatives_are_unjudged_candidates_and_follow_the_seed(load):
    easy = [e["abstract_id"] for e in mined(load, hard=0, easy=9) if e["kind"] == "easy"]
    assert easy == ["x", "y", "z"]
    draws = {tuple(e["abstract_id"] for e in mined(load, 0, 1, seed)) for seed in range(20)}
    assert draws == {("a", "b", "x"), ("a", "b", "y"), ("a", "b", "z")}
    assert mined(load, 1, 1, seed=5) == mined(load, 1, 1, seed=5)

def test_no_relevant_abstract_is_ever_a_negative_and_claims_without_positives_are_left_out(load):
    for seed in range(20):
        examples = mined(load, hard=9, easy=9, seed=seed)
        assert {e["claim_id"] for e in examples} == {"1"}
        assert {e["abstract_id"] for e in examples if e["target"] == 0.0}.isdisjoint({"a", "b"})

# ----------------------------------------------------------- The whole script
def test_train_then_rerank_alone_in_a_folder(toy, run):
    trained = run(SCRIPT, "train", "--epochs", 1, "--max-length", 64, cwd=toy)
    assert trained.returncode == 0, trained.stderr
    model = toy / "work" / "demo" / "models" / "reranker"
    assert json.loads((model / "config.json").read_text())["architectures"] == ["BertForSequenceClassification"]
    assert not list(model.rglob("*.bin")) and not list(model.rglob("*.pt"))
    lines = (toy / "work/demo/models/reranker.examples.jsonl").read_text().splitlines()
    assert len(lines) == json.loads(trained.stdout.splitlines()[-1])["pairs"]
    assert json.loads((toy / "work/demo/models/reranker.meta.json").read_text())["positive"] == 3

    done = run(SCRIPT, "--depth", 4, cwd=toy)
    assert done.returncode == 0, done.stderr
    before = pd.read_csv(toy / "work/demo/test/hybrid.tsv", sep="\t", dtype=str)
    after = pd.read_csv(toy / "work/demo/test/rerank.tsv", sep="\t", dtype={"claim_id": str, "abstract_id": str})
    for claim, rows in after.groupby("claim_id"):
        first = before[before["claim_id"] == claim]["abstract_id"].head(4)
        assert sorted(rows["abstract_id"]) == sorted(first)
        assert rows["rank"].tolist() == [1, 2, 3, 4] and rows["score"].is_monotonic_decreasing

    # scores are the logits of the model, whoever computes them
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    claims = dict(pd.read_csv(toy / "data/demo/claims.test.tsv", sep="\t").values)
    records = map(json.loads, open(toy / "data/demo/corpus.jsonl", encoding="utf-8"))
    texts = {record["abstract_id"]: record["abstract"] for record in records}
    encoder, row = AutoModelForSequenceClassification.from_pretrained(model).eval(), after.iloc[0]
    pair = AutoTokenizer.from_pretrained(model)(claims[row["claim_id"]], texts[row["abstract_id"]], return_tensors="pt")
    with torch.inference_mode():
        logit = encoder(**pair).logits.item()
    assert row["score"] == pytest.approx(logit, abs=1e-5)
    assert "up to date" in run(SCRIPT, "--depth", 4, cwd=toy).stdout

def test_a_stance_classifier_is_no_reranker(toy, run, contents, refused):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig

    folder = toy / "models" / "three"
    small = BertConfig(vocab_size=30_522, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
                       num_labels=3)
    AutoModelForSequenceClassification.from_config(small).save_pretrained(folder)
    AutoTokenizer.from_pretrained(toy / "data/models/minilm").save_pretrained(folder)
    before = contents(toy)
    done = run(SCRIPT, "--model", "models/three", cwd=toy)
    done.stderr = "\n".join(line for line in done.stderr.splitlines() if line.startswith(("error:", "Traceback")))
    refused(done, before, toy, "models/three", "3 labels")

# ----------------------------------------------------------- Bad input
@pytest.mark.parametrize(("arguments", "word"), [
    (["--model", "work/demo/models/nothing"], "work/demo/models/nothing"),
    (["--run", "nowhere.tsv", "--model", "data/models/minilm"], "nowhere.tsv"),
    (["--depth", "0"], "--depth"),
    (["train", "--qrels", "nowhere.tsv"], "nowhere.tsv"),
    (["train", "--epochs", "many"], "--epochs"),
])
def test_missing_files_and_bad_flags_are_refused(toy, run, contents, refused, arguments, word):
    before = contents(toy)
    refused(run(SCRIPT, *arguments, cwd=toy), before, toy, word)

@pytest.mark.parametrize(("row", "words"), [
    (("c9", "0001", 1, 0.5), ["hybrid.tsv:3:", "claim_id c9"]),
    (("c3", "9999", 2, 0.5), ["hybrid.tsv:3:", "abstract_id 9999"]),
    (("c3", "0001", 2, 0.5), ["hybrid.tsv:3:", "stands twice"]),
    (("c3", "0002", "2nd", 0.5), ["hybrid.tsv:3:", "rank"]),
    (("c3", "0002", 2, "nan"), ["hybrid.tsv:3:", "score"]),
])
def test_bad_runs_are_refused_by_line(toy, run, contents, refused, row, words):
    header = ["claim_id", "abstract_id", "rank", "score"]
    tsv(toy / "work/demo/test/hybrid.tsv", header, [("c3", "0001", 1, 0.9), row])
    before = contents(toy)
    refused(run(SCRIPT, "--model", "data/models/minilm", cwd=toy), before, toy, *words)

def test_a_train_split_without_a_positive_is_refused(toy, run, contents, refused):
    tsv(toy / "data/demo/qrels.train.tsv", ["claim_id", "abstract_id", "label"], [("c1", "0001", "NEI")])
    before = contents(toy)
    refused(run(SCRIPT, "train", cwd=toy), before, toy, "qrels.train.tsv", "SUPPORTS")

def test_an_unknown_label_is_refused_by_line(toy, run, contents, refused):
    tsv(toy / "data/demo/qrels.train.tsv", ["claim_id", "abstract_id", "label"], [("c1", "0001", "MAYBE")])
    before = contents(toy)
    refused(run(SCRIPT, "train", cwd=toy), before, toy, "qrels.train.tsv:2:", "MAYBE")
