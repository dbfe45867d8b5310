"""recipes/train/encoder.py: rows, losses, dev, early stopping, kills."""

import shutil

import pytest
from conftest import KEY, facts, jsonl, kill_before, load, tiny, tsv
from sentence_transformers import SentenceTransformer

SCRIPT = "encoder.py"
KIT = load("recipes/train/encoder.py")


def test_rows_keep_the_most_negatives():
    short, *long = tuples = [("c", "p", "1"), ("c", "q", "1", "2", "3"), ("c", "r", "1", "2", "3")]
    assert KIT.of_one_length(tuples) == long  # 2 x 3 are more than 3 x 1
    assert KIT.of_one_length([*tuples, *[short] * 4]) == [row[:3] for row in tuples] + [short] * 4
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
    ids = [f"{n % 12 + 1:04}" for n in range(23)]
    examples = [
        {"claim_id": f"t{n}", "positive": ids[n], "negatives": [ids[n + 3]]} for n in range(20)
    ]
    jsonl(toy / "tuples.jsonl", *examples)
    for name in ("claims", "qrels"):
        shutil.copy(toy / f"data/demo/{name}.test.tsv", toy / f"data/demo/{name}.dev.tsv")
    return toy


TRAIN = "tuples.jsonl --model models/tiny --lr 1e-3 --max-length 24 --batch-size 8"
CURVE = "dev_cosine_ndcg@10"


@pytest.mark.parametrize("loss", ["triplet", "mnrl"])
def test_kill_9_in_training_ends_with_the_same_metrics(ready, call, killed, loss):
    """It comes when the second epoch has begun: of its steps, only the last two are done again."""
    words = f"{TRAIN} --loss {loss} --epochs 2 --out"
    whole = facts(call(SCRIPT, f"{words} whole", cwd=ready))
    assert len(whole[CURVE]) == 3 and whole["rows"] == 20  # before training, and after two epochs
    saves = "weights = self.model.named_parameters()"
    kill = kill_before(saves, 5)  # after the steps 1, 2, 3, which ends the first epoch, and 4
    assert killed(SCRIPT, f"{words} killed", cwd=ready, edits=kill)
    again = facts(call(SCRIPT, f"{words} killed", cwd=ready, edits=kill_before(saves, 3)))
    assert again == whole | {"made": ["killed"]} and not (ready / "killed.parts").exists()
    weights = [(ready / name / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert weights[0] == weights[1]
    assert "up to date" in call(SCRIPT, f"{words} killed", cwd=ready).stdout


def test_a_trained_model_reads_its_own_length_and_is_indexed_by_the_next_call(ready, call):
    facts(call(SCRIPT, f"{TRAIN} --epochs 1 --dev-split none --pooling chunks --out m", cwd=ready))
    trained = SentenceTransformer(str(ready / "m"), device="cpu")
    tokens = trained.tokenizer(["ice " * 100])["input_ids"][0]
    assert trained.max_seq_length > 24 and len(tokens) == 102
    made = facts(call("01_index.py", "--indexes dense --dense-model m", cwd=ready))["made"]
    assert made == ["work/demo/index/dense"]


def test_early_stopping_keeps_the_best_epoch(ready, call):
    done = facts(call(SCRIPT, f"{TRAIN} --epochs 6 --patience 1", cwd=ready))
    assert len(done[CURVE]) < 8 and set(done) >= {"rows", "left_out", "loss"}
    tsv(ready / "data/demo/qrels.dev.tsv", [*KEY, "label"], [("c3", "0001", "SUPPORTS")])
    assert facts(call(SCRIPT, f"{TRAIN} --epochs 1", cwd=ready))["made"]  # other judgements
