"""recipes/train/classifier.py: class weights, held-out pairs, heads, kills."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from conftest import CLAIMS, LABELS, NLI, QRELS, cells, facts, jsonl, kill_before, load, tiny, tsv

SCRIPT = "classifier.py"
KIT = load("recipes/train/classifier.py")
CLASSIFY = KIT.CLASSIFY


def arguments(**other):
    how = {"max_length": 24, "seed": 1, "device": ["cpu"], "loss": "focal", "sampler": "shuffle"}
    how |= {"held_out": 0.1, "split_by": "claim"}
    return SimpleNamespace(**how | other)


def test_the_arithmetic_of_training_by_hand():
    import torch

    weights = torch.tensor(KIT.class_weights(np.array([2, 1, 3])))  # (1/2, 1, 1/3) 18/11
    logits = torch.tensor([[0.7, 0.2, 0.1], [0.3, 0.3, 0.4]]).log()
    # -(9/11 (1 - .7)^2 log .7 + 6/11 (1 - .4)^2 log .4) / 2
    assert float(KIT.focal(logits, torch.tensor([0, 2]), weights)) == pytest.approx(0.1030952)
    # roots of probabilities, as the temperature is 2, over roots of shares: .8/.4, .2/.2, .4/.8
    found = CLASSIFY.calibrated(np.log([[0.64, 0.04, 0.16]]), 2.0, [0.16, 0.04, 0.64], 0.5)
    assert 7 * found[0] == pytest.approx([4, 2, 1])
    gold = np.repeat(range(3), [50, 30, 20])
    logits = 3 * np.log([[0.5, 0.3, 0.2]] * 100)
    assert KIT.assess(logits, gold, "new")["temperature"] == pytest.approx(3, rel=0.01)


# The last prior is corrected twice, as in Kiepura & Lam 2025: shares like 1/3 / (.3, .1, .6)
PRIORS = """balanced|focal|[1, 1, 1]|[1, 1, 1]; shuffle|focal|[0.66667, 2, 0.33333]|[1, 1, 1]
    ; shuffle|cross-entropy|[1, 1, 1]|[0.9, 0.3, 1.8]
    ; balanced|weighted-focal|[0.66667, 2, 0.33333]|[0.66667, 2, 0.33333]"""


@pytest.mark.parametrize("sampler, loss, alphas, shares", cells(PRIORS))
def test_the_prior_is_corrected_once_and_adjust_knows_it(sampler, loss, alphas, shares):
    counts = np.array([30, 10, 60])
    args = arguments(sampler=sampler, loss=loss)
    assert KIT.loss_weights(counts, args) == pytest.approx(json.loads(alphas), 1e-4)
    assert 3 * KIT.seen_shares(counts, args) == pytest.approx(json.loads(shares), 1e-4)
    assert KIT.seen_shares(np.array([3, 0, 7]), args)[1] == 0


def test_claims_are_held_out_whole(capsys):
    pairs = pd.DataFrame({"claim_id": np.arange(999) // 5, "gold": np.arange(999) % 3})
    trained, held_out = KIT.hold_out(pairs, arguments())
    assert set(trained["claim_id"]).isdisjoint(held_out["claim_id"])
    assert KIT.hold_out(pairs[:4], arguments())[1].empty  # pairs of one claim
    assert "--held-out: too few pairs or claims" in capsys.readouterr().err


FREEZE = """null|embeddings layer.0 layer.1 pooler classifier; "encoder"|pooler classifier
    ; 1|layer.1 pooler classifier"""


@pytest.mark.parametrize("what, learning", cells(FREEZE))
def test_frozen_parts_do_not_learn_and_weights_are_fp32(tmp_path, models, what, learning):
    folder = tiny(tmp_path, NLI, dtype="bfloat16")
    model = CLASSIFY.open_model(KIT.with_head, folder, arguments())
    KIT.freeze(model.model, json.loads(what))
    weights = dict(model.model.named_parameters())
    assert {str(weight.dtype) for weight in weights.values()} == {"torch.float32"}
    learnt = " ".join(name for name, weight in weights.items() if weight.requires_grad)
    found = set(re.findall(r"embeddings|layer\.\d|pooler|classifier", learnt))
    assert found == set(learning.split())


def test_models_with_a_new_head_read_the_claim_first(tmp_path, models):
    model = CLASSIFY.open_model(KIT.with_head, tiny(tmp_path), arguments())
    CLASSIFY.set_reader(model, arguments(), 2)
    whole = model.tokenizer("sun", "ice")["input_ids"]
    assert model[0].preprocess([("sun", "ice")])["input_ids"].tolist() == [whole]


TRAIN = "--model nli --max-length 24 --batch-size 8 --lr 1e-3"


def test_kill_9_in_training_ends_in_the_same_bytes_and_the_best_epoch(toy, call, killed):
    tiny(toy / "nli", NLI)
    claims = [(n, f"claim {n} on ice") for n in range(60)]
    tsv(toy / "data/demo/claims.train.tsv", CLAIMS, claims)
    pairs = [(n // 3, f"{n % 12 + 1:04}", LABELS[n * 7 % 5 % 3]) for n in range(180)]
    tsv(toy / "data/demo/qrels.train.tsv", QRELS, pairs)
    jsonl(toy / "more.jsonl", {"claim_id": 1, "abstract_id": "0009", "label": "NEI"})
    words = f"{TRAIN} --epochs 9 --patience 1 --held-out 0.25 --examples more.jsonl --out"
    made = facts(call(SCRIPT, f"{words} whole", cwd=toy))
    assert made["rows"] + made["held_out"] == 181 and len(made["loss"]) < 9  # stopped early
    assert made["held_out_F1"] == pytest.approx(max(made["held_out_f1_weighted"][1:]), abs=1e-4)
    kill = kill_before("log = trainer.state.log_history")
    assert killed(SCRIPT, f"{words} killed", cwd=toy, edits=kill)
    assert facts(call(SCRIPT, f"{words} killed", cwd=toy)) == made | {"made": ["killed"]}
    for path in (toy / "whole").glob("*.*"):
        assert path.read_bytes() == (toy / "killed" / path.name).read_bytes()
    config = json.loads((toy / "whole/config.json").read_text())
    assert list(config["id2label"].values()) == NLI
    assert config["stance_temperature"] == made["temperature"]


def test_the_pairs_of_a_dev_split_choose_the_epoch_and_claims_may_be_long(toy, call):
    tiny(toy / "nli", NLI)
    for split in ("train", "test"):
        path = toy / f"data/demo/claims.{split}.tsv"
        path.write_text(re.sub(r"(?m)^(c\d\t)", r"\1" + "sun " * 700, path.read_text()))
    words = "--epochs 1 --out m --dev-split test --sampler shuffle --loss cross-entropy"
    made = facts(call(SCRIPT, f"{TRAIN} {words}", cwd=toy))
    assert made["held_out"] == 9 and made["rows"] == 5
    assert json.loads((toy / "m/config.json").read_text())["stance_shares"] == [0.4, 0.2, 0.4]
    classify = "--max-length 24 --adjust 0.5 --out v.tsv --model m"
    assert facts(call("05_classify.py", classify, cwd=toy))["truncated"] == 18
