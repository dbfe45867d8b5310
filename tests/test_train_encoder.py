"""recipes/train/encoder.py: rows, losses, dev, early stopping, kills."""

import pytest
import torch
from conftest import KEY, facts, jsonl, kill_before, load, tiny, tsv
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer

SCRIPT = "encoder.py"
INDEX = "work/demo/index"
KIT = load("recipes/train/encoder.py")


def test_rows_keep_the_most_negatives():
    tuples = [("c", "p", "1"), ("c", "q", "1", "2", "3"), ("c", "r", "1", "2", "3")]
    assert KIT.of_one_length(tuples) == tuples[1:]  # 2 x 3 are more than 3 x 1
    assert (
        KIT.of_one_length([*tuples, *tuples[:1] * 4])
        == [row[:3] for row in tuples] + [tuples[0]] * 4
    )
    assert KIT.of_one_length([("c", "p")]) == [("c", "p")]
    texts = {name: f"text {name}" for name in "pqr123"}
    example = {"claim_id": 1, "positive": "p", "negatives": ["2", 3]}
    rows = [("ice", "text p", "text 2"), ("ice", "text p", "text 3")]
    assert KIT.rows_of(example, {"1": "ice"}, texts, "triplet") == rows
    assert KIT.rows_of(example, {"1": "ice"}, texts, "mnrl") == [(*rows[0], "text 3")]


@pytest.fixture
def ready(toy):
    """The toy with a small model, twenty tuples, a claim of 700 words, and a dev split."""
    tiny(toy / "models/tiny")
    claims = [(f"t{n}", f"claim {n} on ice" + " and snow" * (350 * (n == 3))) for n in range(20)]
    tsv(toy / "data/demo/claims.train.tsv", ["claim_id", "claim"], claims)
    jsonl(
        toy / "tuples.jsonl",
        *(
            {
                "claim_id": claim,
                "positive": f"{n % 12 + 1:04}",
                "negatives": [f"{(n + 3) % 12 + 1:04}"],
            }
            for n, (claim, _) in enumerate(claims)
        ),
    )
    for name in ("claims", "qrels"):
        (toy / f"data/demo/{name}.dev.tsv").write_bytes(
            (toy / f"data/demo/{name}.test.tsv").read_bytes()
        )
    return toy


TRAIN = "tuples.jsonl --model models/tiny --lr 1e-3 --max-length 24 --batch-size 8".split()


def same_numbers(whole, again):
    return all(whole[name] == again[name] for name in set(whole) - {"made"})


@pytest.mark.parametrize("loss", ["triplet", "mnrl"])
def test_kill_9_in_training_ends_with_the_same_metrics(ready, call, killed, loss):
    """It comes when the second epoch has begun: of its steps, only the last two are done again."""
    words = (*TRAIN, "--loss", loss, "--epochs", 2)
    whole = facts(call(SCRIPT, *words, "--out", "whole", cwd=ready))
    [curve] = [value for name, value in whole.items() if "ndcg" in name or name == "dev"]
    assert len(curve) == 3 and whole["rows"] == 20  # before training, and after two epochs
    saves = "weights = self.model.named_parameters()"
    kill = kill_before(saves, 5)  # after the steps 1, 2, 3, which ends the first epoch, and 4
    assert killed(SCRIPT, *words, "--out", "killed", cwd=ready, edits=kill)
    again = call(SCRIPT, *words, "--out", "killed", cwd=ready, edits=kill_before(saves, 3))
    again = facts(again)
    assert same_numbers(whole, again) and not (ready / "killed.parts").exists()
    weights = [load_file(ready / name / "model.safetensors") for name in ("whole", "killed")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert "up to date" in call(SCRIPT, *words, "--out", "killed", cwd=ready).stdout


def test_a_trained_model_reads_its_own_length_and_is_indexed_by_the_next_call(ready, call):
    words = ("--epochs", 1, "--dev-split", "none", "--pooling", "chunks")
    facts(call(SCRIPT, *TRAIN, *words, cwd=ready))
    trained = SentenceTransformer(str(ready / "work/demo/models/encoder"), device="cpu")
    tokens = trained.tokenizer(["ice " * 100])["input_ids"][0]
    assert trained.max_seq_length > 24 and len(tokens) == 102
    words = ("--indexes", "dense", "--dense-model", "work/demo/models/encoder")
    assert facts(call("01_index.py", *words, cwd=ready))["made"] == [f"{INDEX}/dense"]


def test_early_stopping_keeps_the_best_epoch(ready, call):
    done = facts(call(SCRIPT, *TRAIN, "--epochs", 6, "--patience", 1, cwd=ready))
    [curve] = [value for name, value in done.items() if "ndcg" in name or name == "dev"]
    assert len(curve) < 8 and set(done) >= {"rows", "left_out", "loss"}
    tsv(ready / "data/demo/qrels.dev.tsv", [*KEY, "label"], [("c3", "0001", "SUPPORTS")])
    assert facts(call(SCRIPT, *TRAIN, "--epochs", 1, cwd=ready))["made"]  # other judgements
