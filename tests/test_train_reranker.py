"""recipes/train/reranker.py: losses, dev, kills."""

import functools
import json
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import RUN, facts, jsonl, kill_before, load, read, tiny, tsv
from safetensors.torch import load_file
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder import losses

SCRIPT = "reranker.py"
KIT = load("recipes/train/reranker.py")
TRAIN = ("--model", "tiny", "--max-length", 32, "--batch-size", 2, "--lr", 1e-3)
DEV = ("--dev-split", "test")


@pytest.mark.parametrize(
    ("loss", "shape", "rows"),
    [
        ("bce", "pairs", 5),
        ("l1", "pairs", 5),
        ("bce", "tuples", 5),
        ("margin", "tuples", 3),
        ("lambda", "tuples", 2),
        ("softmax", "tuples", 2),
    ],
)
def test_every_loss_trains_a_model_that_reranks(toy, call, loss, shape, rows):
    tiny(toy / "tiny", dtype="bfloat16")
    words = (*TRAIN, f"data/demo/{shape}.jsonl", "--loss", loss, "--epochs", 2, *DEV)
    words = (*words, "--cutoff", 1, "--positive-weight", "balanced")
    made = facts(call(SCRIPT, *words, cwd=toy))
    assert made["rows"] == rows and len(made["dev_ndcg@10"]) == 3  # before, two epochs
    weights = load_file(toy / "work/demo/models/reranker/model.safetensors").values()
    assert {part.dtype for part in weights} == {torch.float32}  # as always in training
    assert "up to date" in call(SCRIPT, *words, cwd=toy).stdout
    assert facts(call("03_rerank.py", "--depth", 4, cwd=toy))["made"]
    trained = CrossEncoder(str(toy / "work/demo/models/reranker"), device="cpu")
    assert trained.max_seq_length == 512  # not the 32 of the training


def logits_model(folder):
    """A small cross-encoder whose scores are logits."""
    model = CrossEncoder(tiny(folder / "tiny"), device="cpu").eval()
    model.activation_fn = torch.nn.Identity()
    return model


def test_losses_by_hand(models, tmp_path):
    model = logits_model(tmp_path)
    claims = ["ice", "sea"]
    good = ["ice melts", "sun"]
    bad = ["up", "the sea is up"]
    score = functools.partial(model.predict, show_progress_bar=False)
    up = score(list(zip(claims, good)))
    down = score(list(zip(claims, bad)))
    lead = up - down
    margin = float(np.abs(lead).mean())  # one pair may be beyond it
    loss = KIT.loss_of(model, [], Namespace(loss="margin", margin=margin))
    found = loss([claims, good, bad], torch.tensor([-1.0, -1.0])).item()
    assert found == pytest.approx(np.maximum(0, margin - lead).mean(), abs=1e-5)
    loss = KIT.loss_of(model, [], Namespace(loss="l1"))
    targets = np.array([1.0, 0.25])
    found = loss([claims, good], torch.tensor(targets)).item()
    assert found == pytest.approx(np.abs(1 / (1 + np.exp(-up)) - targets).mean(), abs=1e-5)
    rows = [("ice", "a", 1.0), *3 * [("ice", "b", 0.0)], ("sea", "c", 1.0)]
    for weight, times in ((2.5, 2.5), ("balanced", 1.5), (1, 1)):
        loss = KIT.loss_of(model, rows, Namespace(loss="bce", positive_weight=weight))
        # With a weight of 1, gradients of targets between 0 and 1 would differ in the last bit.
        assert (loss.bce_with_logits_loss.pos_weight is None) == (weight == 1)
        found = loss([2 * claims, good + bad], torch.tensor([1.0, 1, 0, 0])).item()
        wanted = np.concatenate([times * np.log1p(np.exp(-up)), np.log1p(np.exp(down))]).mean()
        assert found == pytest.approx(wanted, abs=1e-5)


def test_losses_over_lists_by_hand(models, tmp_path):
    tuples = [("ice", "a", "x"), ("ice", "a", "y"), ("ice", "b", "x"), ("sea", "c", "y")]
    assert KIT.lists_of(tuples, "lambda") == [
        ("ice", ["x", "a", "y", "b"], [0, 1, 0, 1]),
        ("sea", ["y", "c"], [0, 1]),
    ]
    low = -np.inf
    lists = KIT.lists_of(tuples, "softmax")
    assert [row[1:] for row in lists] == [
        (["x", "a", "y"], [low, 0, low]),
        (["x", "b"], [low, 0]),
        (["y", "c"], [low, 0]),
    ]
    model = logits_model(tmp_path)
    claims, texts, targets = zip(*lists)
    found = KIT.loss_of(model, lists, Namespace(loss="softmax"))
    found = found([claims, texts], [torch.tensor(values) for values in targets]).item()
    wanted = []
    for claim, abstracts, values in lists:
        scores = model.predict([(claim, text) for text in abstracts], show_progress_bar=False)
        wanted.append(np.log(np.exp(scores).sum()) - scores[values.index(0)])
    assert found == pytest.approx(np.mean(wanted), abs=1e-5)
    found = KIT.loss_of(model, lists, Namespace(loss="lambda", cutoff=5))
    assert isinstance(found, losses.LambdaLoss) and found.k == 5


def test_a_claim_of_700_words_trains_and_is_reranked(toy, call):
    tiny(toy / "tiny")
    for split in ("train", "test"):
        path = toy / f"data/demo/claims.{split}.tsv"
        header, *lines = path.read_text().splitlines()
        lines = [line.replace("\t", "\t" + "sun " * 700) for line in lines]
        path.write_text("\n".join([header, *lines]))
    words = (*TRAIN, "data/demo/pairs.jsonl", "--epochs", 1, *DEV)
    assert facts(call(SCRIPT, *words, cwd=toy))["rows"] == 5
    words = ("--max-length", 32, "--depth", 2)
    assert facts(call("03_rerank.py", *words, cwd=toy))["truncated"] == 6


@pytest.mark.parametrize("depth", [1, 3])
def test_dev_is_the_ndcg_of_the_candidates(toy, call, depth):
    tiny(toy / "tiny")
    run = "c3|0001|1|1; c4|0006|1|3; c4|0005|2|2; c4|0004|3|1"  # one is alone; none of c5
    tsv(toy / "work/demo/test/hybrid.tsv", RUN, run)
    words = ("--epochs", 1, *DEV, "--dev-depth", depth, "--out", "trained")
    curve = facts(call(SCRIPT, *TRAIN, "data/demo/pairs.jsonl", *words, cwd=toy))["dev_ndcg@10"]
    words = ("--model", "tiny", "--max-length", 32, "--depth", depth, "--out", "new.tsv")
    facts(call("03_rerank.py", *words, cwd=toy))
    qrels = read(toy / "data/demo/qrels.test.tsv")
    run = read(toy / "new.tsv")
    values = []
    for claim, judged in qrels[qrels["label"] != "NEI"].groupby("claim_id"):
        rows = run[run["claim_id"] == claim]
        hits = rows["rank"][rows["abstract_id"].isin(judged["abstract_id"])]
        ideal = sum(1 / np.log2(rank + 2) for rank in range(len(hits)))
        values.append(sum(1 / np.log2(rank + 1) for rank in hits) / ideal if ideal else 0)
    assert curve[0] == pytest.approx(np.mean(values), abs=1e-4)


def test_kill_9_in_training_ends_in_the_same_bytes(toy, call, killed):
    tiny(toy / "tiny")
    words = (*TRAIN, "data/demo/pairs.jsonl", "--epochs", 2, *DEV)
    whole = facts(call(SCRIPT, *words, "--out", "whole", cwd=toy))
    kill = kill_before("log = trainer.state.log_history")
    assert killed(SCRIPT, *words, "--out", "killed", cwd=toy, edits=kill)
    state = max(toy.glob("killed.parts/*/checkpoint-*/trainer_state.json"))
    state.unlink()  # as if the kill had torn the last checkpoint
    again = facts(call(SCRIPT, *words, "--out", "killed", cwd=toy))
    assert {**again, "made": 0} == {**whole, "made": 0} and not (toy / "killed.parts").exists()
    for path in filter(Path.is_file, (toy / "whole").rglob("*")):
        assert path.read_bytes() == Path(str(path).replace("whole", "killed")).read_bytes(), path


def test_a_dev_run_that_is_not_there_and_pairs_for_a_loss_on_tuples_are_refused(toy, refused):
    tiny(toy / "tiny")
    words = (*TRAIN, "data/demo/pairs.jsonl")
    refused(toy, SCRIPT, *words, "--dev-run", "typo.tsv", said="typo.tsv: not found")
    refused(toy, SCRIPT, *words, "--loss", "softmax", said="'positive'")


LOSS = {
    '    if args.loss == "bce":\n': """    if args.loss == "mse":
        return losses.MSELoss(model)
    if args.loss == "bce":\n""",
    'choices=("bce", "l1"': 'choices=("mse", "bce", "l1"',
}


def test_a_loss_is_added_in_two_lines(toy, call):
    tiny(toy / "tiny")
    jsonl(toy / "x.jsonl", {"claim_id": "c1", "abstract_id": "0010", "target": 0.5})
    words = (*TRAIN, "x.jsonl", "--loss", "mse", "--epochs", 1)
    made = facts(call(SCRIPT, *words, cwd=toy, edits=LOSS))
    assert json.loads((toy / "work/demo/models/reranker.meta.json").read_text())["rows"] == 1
    assert made["rows"] == 1
