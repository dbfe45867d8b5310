"""recipes/train/classifier.py: class weights, held-out pairs, heads, kills."""

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from conftest import CLAIMS, LABELS, QRELS, facts, jsonl, kill_before, load, tiny, tsv

SCRIPT = "classifier.py"
KIT = load("recipes/train/classifier.py")
CLASSIFY = KIT.CLASSIFY
HYBRID = "--run work/demo/test/hybrid.tsv"
NLI = ["contradiction", "neutral", "entailment"]
SHORT = "--max-length 24"


def arguments(**other):
    how = {
        "max_length": 24,
        "seed": 1,
        "dtype": "fp32",
        "device": ["cpu"],
        "epochs": 2,
        "lr": 0.001,
        "batch": 8,
        "schedule": "constant",
        "loss": "focal",
        "sampler": "shuffle",
        "held_out": 0.1,
        "split_by": "claim",
        "job": "train",
    }
    return SimpleNamespace(**how | other)


def test_the_arithmetic_of_training_by_hand():
    import torch

    rng = np.random.default_rng(0)
    weights = KIT.class_weights(np.array([2, 1, 3]))
    assert weights.tolist() == pytest.approx([9 / 11, 18 / 11, 6 / 11])  # (1/2, 1, 1/3) 18/11
    assert KIT.class_weights(np.array([2, 0, 1])).tolist() == pytest.approx([1, 0, 2])
    logits = torch.tensor(np.log([[0.7, 0.2, 0.1], [0.3, 0.3, 0.4]]))
    labels = torch.tensor([0, 2])
    by_hand = (-9 / 11 * 0.3**2 * math.log(0.7) - 6 / 11 * 0.6**2 * math.log(0.4)) / 2
    assert float(KIT.focal(logits, labels, torch.tensor(weights))) == pytest.approx(by_hand)
    freed = np.sqrt([0.6, 0.3, 0.1]) / np.sqrt([0.2, 0.1, 0.7])  # a temperature of 2: the root
    found = CLASSIFY.calibrated(np.log([[0.6, 0.3, 0.1]]), 2.0, [0.2, 0.1, 0.7], 0.5)
    np.testing.assert_allclose(found[0], freed / freed.sum())
    logits = rng.normal(size=(20_000, 3)) * 2
    labels = np.array([rng.choice(3, p=row) for row in CLASSIFY.calibrated(logits)])
    assert KIT.assess(logits * 3, labels, "x")["temperature"] == pytest.approx(3, rel=0.05)


def test_ids_of_examples_are_read_as_strings():
    example = {"claim_id": 7, "abstract_id": 12, "label": "NEI", "kind": "random"}
    rows = KIT.rows_of(example, {"7": "A claim"}, {"12": "An abstract"})
    assert rows == [("7", "12", "A claim", "An abstract", 2)]


@pytest.mark.parametrize(
    "how, alphas, shares",
    [
        ({"sampler": "balanced"}, [1, 1, 1], [1 / 3, 1 / 3, 1 / 3]),
        ({"sampler": "shuffle"}, [2 / 3, 2, 1 / 3], [1 / 3, 1 / 3, 1 / 3]),
        ({"sampler": "shuffle", "loss": "cross-entropy"}, [1, 1, 1], [0.3, 0.1, 0.6]),
        # the prior is corrected twice, as in Kiepura & Lam 2025: shares like 1/3 / (.3, .1, .6)
        (
            {"sampler": "balanced", "loss": "weighted-focal"},
            [2 / 3, 2, 1 / 3],
            [2 / 9, 6 / 9, 1 / 9],
        ),
    ],
)
def test_the_prior_is_corrected_once_and_adjust_knows_what_training_saw(how, alphas, shares):
    counts = np.array([30, 10, 60])
    args = arguments(**how)
    np.testing.assert_allclose(KIT.loss_weights(counts, args), alphas)
    np.testing.assert_allclose(KIT.seen_shares(counts, args), shares)
    unseen = KIT.seen_shares(np.array([3, 0, 7]), args)
    assert unseen[1] == 0 and unseen.sum() == pytest.approx(1)


def test_claims_are_held_out_whole(capsys):
    claims = [f"c{n // 5}" for n in range(999)]
    pairs = pd.DataFrame({"claim_id": claims, "gold": [n % 3 for n in range(999)]})
    trained, held_out = KIT.hold_out(pairs, arguments())
    assert 80 <= len(held_out) <= 120 and len(trained) + len(held_out) == 999
    assert not len(KIT.hold_out(pairs, arguments(held_out=0))[1])
    for table, share in ((pairs, 0.99), (pairs[:4], 0.1), (pairs.assign(claim_id="c"), 0.1)):
        assert not len(KIT.hold_out(table, arguments(held_out=share))[1])
        assert "--held-out: too few pairs or claims" in capsys.readouterr().err
    assert not set(held_out["claim_id"]) & set(trained["claim_id"])


@pytest.mark.parametrize(
    "what, dtype, learning",
    [
        (None, "bfloat16", "embeddings layer.0 layer.1 pooler classifier"),
        ("encoder", "float16", "pooler classifier"),
        (1, "bfloat16", "layer.1 pooler classifier"),
    ],
)
def test_frozen_parts_do_not_learn_and_weights_are_fp32(tmp_path, models, what, dtype, learning):
    folder = tiny(tmp_path, NLI, dtype=dtype)
    model = CLASSIFY.open_model(KIT.with_head, folder, arguments(), "fp32")
    KIT.freeze(model.model, what)
    weights = dict(model.model.named_parameters())
    assert {str(weight.dtype) for weight in weights.values()} == {"torch.float32"}
    learnt = " ".join(name for name, weight in weights.items() if weight.requires_grad)
    found = set(re.findall(r"embeddings|layer\.\d|pooler|classifier", learnt))
    assert found == set(learning.split())
    assert model.config.id2label == dict(enumerate(NLI))
    assert not model.config.stance_claim_first
    CLASSIFY.set_reader(model, arguments(), 2)
    assert model[0].preprocess.in_order(["c", "a"]) == ["a", "c"]
    model = CLASSIFY.open_model(KIT.with_head, tiny(tmp_path / "new"), arguments(), "fp32")
    assert model.config.stance_claim_first
    CLASSIFY.set_reader(model, arguments(), 2)
    assert model[0].preprocess.in_order(["c", "a"]) == ["c", "a"]


@pytest.fixture
def many(toy):
    """The toy with a small NLI model and 180 judged pairs of 60 claims to learn from."""
    tiny(toy / "nli", NLI)
    claims = [(f"t{n}", f"claim {n} on ice") for n in range(60)]
    tsv(toy / "data/demo/claims.train.tsv", CLAIMS, claims)
    pairs = [(f"t{n // 3}", f"{n % 12 + 1:04}", LABELS[n * 7 % 5 % 3]) for n in range(180)]
    tsv(toy / "data/demo/qrels.train.tsv", QRELS, pairs)
    jsonl(toy / "more.jsonl", {"claim_id": "t1", "abstract_id": "0009", "label": "NEI", "kind": 1})
    return toy


TRAIN = f"--model nli {SHORT} --batch-size 8"


def test_kill_9_in_training_ends_in_the_same_bytes_and_the_best_epoch(many, call, killed):
    words = f"{TRAIN} --lr 1e-3 --epochs 3 --held-out 0.25 --examples more.jsonl --out"
    made = facts(call(SCRIPT, f"{words} whole", cwd=many))
    assert made["rows"] + made["held_out"] == 181
    assert len(made["held_out_f1_weighted"]) == 4  # before, 3 epochs
    assert made["held_out_F1"] == pytest.approx(max(made["held_out_f1_weighted"][1:]), abs=1e-4)
    kill = kill_before("log = trainer.state.log_history")
    assert killed(SCRIPT, f"{words} killed", cwd=many, edits=kill)
    max(many.glob("killed.parts/*/checkpoint-*/trainer_state.json")).unlink()  # torn by the kill
    again = facts(call(SCRIPT, f"{words} killed", cwd=many))
    assert {**again, "made": 0} == {**made, "made": 0}
    assert not (many / "killed.parts").exists()
    for path in (many / "whole").rglob("*"):
        if path.is_file():
            resumed = many / "killed" / path.relative_to(many / "whole")
            assert path.read_bytes() == resumed.read_bytes(), path
    config = json.loads((many / "whole/config.json").read_text())
    assert list(config["id2label"].values()) == NLI and config["dtype"] == "float32"
    assert config["stance_temperature"] == made["temperature"]
    assert config["stance_shares"] == pytest.approx([1 / 3] * 3)
    tokenizer = json.loads((many / "whole/tokenizer.json").read_text())
    assert tokenizer["truncation"] is None and tokenizer["padding"] is None


def test_a_classifier_that_learned_nothing_is_called_out(many, call):
    alike = [{"abstract_id": f"{n:04}", "abstract": "The ice melts."} for n in range(1, 13)]
    jsonl(many / "data/demo/corpus.jsonl", *alike)  # there is nothing to learn
    claims = [(f"t{n}", "ice") for n in range(60)]
    tsv(many / "data/demo/claims.train.tsv", CLAIMS, claims)
    words = f"{TRAIN} --lr 0 --epochs 1 --held-out 0.25 --split-by instance --out useless"
    done = call(SCRIPT, words, cwd=many)
    made = facts(done)
    assert made["held_out_F1"] <= made["majority_F1"]
    assert "warning: useless: no better than the majority label" in done.stderr


def test_the_pairs_of_a_dev_split_choose_the_epoch(toy, call, refused):
    tiny(toy / "nli", NLI)
    words = f"{TRAIN} --lr 1e-3 --epochs 1 --out m --dev-split"
    plain = "--sampler shuffle --loss cross-entropy"
    made = facts(call(SCRIPT, f"{words} test {plain}", cwd=toy))
    assert made["held_out"] == 9 and made["rows"] == 5
    assert json.loads((toy / "m/config.json").read_text())["stance_shares"] == [0.4, 0.2, 0.4]
    refused(toy, SCRIPT, f"{words} dev", said="claims.dev.tsv: not found")
    refused(toy, SCRIPT, f"{words} test --freeze 1 --lora 2", said="--freeze: --lora trains")
    words = f"{HYBRID} {SHORT} --adjust 0.5 --model"
    facts(call("05_classify.py", f"{words} m", cwd=toy))
    said = "--adjust: it needs class shares"
    refused(toy, "05_classify.py", f"{words} nli --out v.tsv", said=said)


def test_a_claim_of_700_words_trains_and_is_labelled(toy, call):
    tiny(toy / "nli", NLI)
    for split in ("train", "test"):
        path = toy / f"data/demo/claims.{split}.tsv"
        path.write_text(re.sub(r"(?m)^(c\d\t)", r"\1" + "sun " * 700, path.read_text()))
    facts(call(SCRIPT, f"--model nli --epochs 1 --held-out 0 {SHORT}", cwd=toy))
    assert facts(call("05_classify.py", f"{HYBRID} {SHORT}", cwd=toy))["truncated"] == 18
