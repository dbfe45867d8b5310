"""recipes/train/reranker.py: losses, dev; restarts."""

from argparse import Namespace

import layouts
import numpy as np
import pytest
import torch
from conftest import ABSTRACTS, CLAIMS, KEY, RUN, cells, facts, kill_before, load, read, tiny, tsv
from safetensors.torch import load_file
from sentence_transformers import CrossEncoder

SCRIPT = "reranker.py"
MODULAR = "cross-encoder/ettin-reranker-32m-v1"
KIT = load("recipes/train/reranker.py")
TRAIN = "--model tiny --max-length 32 --batch-size 2 --lr 1e-3 --dev-split test --epochs 2"


@pytest.mark.parametrize(
    "loss, shape, rows",
    cells("""bce|pairs|5; l1|pairs|5; bce|tuples|5; margin|tuples|3; lambda|tuples|2;
        softmax|tuples|2"""),
)
def test_every_loss_trains_a_model_that_reranks(toy, call, loss, shape, rows):
    tiny(toy / "tiny", dtype="bfloat16")
    tsv(toy / "data/demo/claims.train.tsv", CLAIMS, f"c1|{'sun ' * 700}; c2|ice")
    words = f"data/demo/{shape}.jsonl {TRAIN} --loss {loss} --positive-weight balanced --cutoff 1"
    made = facts(call(SCRIPT, words, cwd=toy))
    assert made["rows"] == int(rows) and len(made["dev_ndcg@10"]) == 3  # before, two epochs
    weights = load_file(toy / "work/demo/models/reranker/model.safetensors").values()
    assert {part.dtype for part in weights} == {torch.float32}  # as always in training
    assert "up to date" in call(SCRIPT, words, cwd=toy).stdout
    assert facts(call("03_rerank.py", "--depth 4", cwd=toy))["made"]
    trained = CrossEncoder(str(toy / "work/demo/models/reranker"), device="cpu")
    assert trained.max_seq_length == 512  # not the 32 of the training


def test_a_head_of_modules_is_read_trained_and_read_again(toy, call, refused):
    layouts.make(toy, [MODULAR])
    words = f"data/demo/pairs.jsonl {TRAIN} --model {MODULAR} --out"
    for model, command in ((MODULAR, None), ("trained", f"{words} trained")):
        if command:
            facts(call(SCRIPT, command, cwd=toy))
        facts(call("03_rerank.py", f"--model {model} --out new.tsv --batch-size 3", cwd=toy))
        run = read(toy / "new.tsv")
        claims = read(toy / "data/demo/claims.test.tsv").set_index("claim_id")["claim"]
        pairs = [(claims[claim_id], ABSTRACTS[name]) for claim_id, name in run[KEY].to_numpy()]
        library = CrossEncoder(str(toy / model), device="cpu", activation_fn=torch.nn.Identity())
        np.testing.assert_allclose(run["score"], library.predict(pairs), rtol=1e-4, atol=1e-6)
    refused(toy, "classifier.py", f"--model {MODULAR}", said="a head of its own")


def logits_model(folder):
    """A small cross-encoder whose scores are logits."""
    return CrossEncoder(tiny(folder / "tiny"), device="cpu", activation_fn=torch.nn.Identity())


def test_losses_by_hand(tmp_path):
    model = logits_model(tmp_path)
    claims = ["ice", "sea"]
    good = ["ice melts", "sun"]
    bad = ["up", "the sea is up"]
    up = model.predict(list(zip(claims, good)))
    down = model.predict(list(zip(claims, bad)))
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


def test_losses_over_lists_by_hand(tmp_path):
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
        scores = model.predict([(claim, text) for text in abstracts])
        wanted.append(np.log(np.exp(scores).sum()) - scores[values.index(0)])
    assert found == pytest.approx(np.mean(wanted), abs=1e-5)
    assert KIT.loss_of(model, lists, Namespace(loss="lambda", cutoff=5)).k == 5


@pytest.mark.parametrize("depth", [1, 3])
def test_dev_is_the_ndcg_of_the_candidates(toy, call, depth):
    tiny(toy / "tiny")
    run = "c3|0001|1|1; c4|0006|1|3; c4|0005|2|2; c4|0004|3|1"  # one is alone; none of c5
    tsv(toy / "work/demo/test/hybrid.tsv", RUN, run)
    words = f"data/demo/pairs.jsonl {TRAIN} --dev-depth {depth} --out trained"
    curve = facts(call(SCRIPT, words, cwd=toy))["dev_ndcg@10"]
    words = f"--model tiny --max-length 32 --depth {depth} --out new.tsv"
    facts(call("03_rerank.py", words, cwd=toy))
    qrels = read(toy / "data/demo/qrels.test.tsv")
    run = read(toy / "new.tsv")
    values = []
    for claim, judged in qrels[qrels["label"] != "NEI"].groupby("claim_id"):
        rows = run[run["claim_id"] == claim]
        hits = rows["rank"][rows["abstract_id"].isin(judged["abstract_id"])]
        ideal = sum(1 / np.log2(rank + 2) for rank in range(len(hits)))
        values.append(sum(1 / np.log2(rank + 1) for rank in hits) / ideal if ideal else 0)
    assert curve[0] == pytest.approx(np.mean(values), abs=1e-4)


@pytest.mark.parametrize(
    "flag, said", cells("--dev-run typo.tsv|typo.tsv: not found; --loss softmax|'positive'")
)
def test_no_dev_run_and_pairs_for_a_loss_on_tuples_are_refused(toy, refused, flag, said):
    tiny(toy / "tiny")
    refused(toy, SCRIPT, f"data/demo/pairs.jsonl {TRAIN} {flag}", said=said)


def test_a_checkpoint_that_a_kill_tore_is_made_again(toy, call, killed):
    tiny(toy / "tiny")
    words = f"data/demo/pairs.jsonl {TRAIN} --out"
    whole = facts(call(SCRIPT, f"{words} whole", cwd=toy))
    kill = kill_before("log = trainer.state.log_history")
    assert killed(SCRIPT, f"{words} killed", cwd=toy, edits=kill)
    max(toy.glob("killed.parts/*/checkpoint-*/trainer_state.json")).unlink()
    assert facts(call(SCRIPT, f"{words} killed", cwd=toy)) == whole | {"made": ["killed"]}


def test_a_training_that_early_stopping_has_ended_is_over(toy, call, killed):
    tiny(toy / "tiny")
    words = f"data/demo/tuples.jsonl {TRAIN} --loss softmax --epochs 9 --patience 1 --out"
    whole = facts(call(SCRIPT, f"{words} whole", cwd=toy))
    assert len(whole["dev_ndcg@10"]) < 10  # it is one longer than the epochs
    kill = kill_before("log = trainer.state.log_history")
    assert killed(SCRIPT, f"{words} killed", cwd=toy, edits=kill)
    assert facts(call(SCRIPT, f"{words} killed", cwd=toy)) == whole | {"made": ["killed"]}
