"""A script that was killed goes on where it was, and ends in the bytes of one that was not.

04_llm_rerank.py has its own test, as its unfinished work is replies that were paid for.
"""
import json
import os
from pathlib import Path

import pytest
from conftest import KEY, LABELS, facts, jsonl, kill_before, tiny, tsv

SMALL = {"01": {"SHARD = 4096": "SHARD = 4"}, "03": {"GROUP = 1024": "GROUP = 4"}, "05": {}}
RENAME, SCORE = "new.rename(path)\n        found", "scores, flags = score("
SAVE, TRAINED = "last = {name: value", "return trainer.state.log_history"
NLI = ["contradiction", "neutral", "entailment"]
TRAIN = "--lr 1e-3 --max-length 24 --batch-size 8"

@pytest.fixture
def ready(toy):
    """The toy with a small model, examples, and 180 judged pairs to learn from."""
    tiny(toy / "models/tiny")
    tiny(toy / "models/nli", NLI)
    claims = [(f"t{n}", f"claim {n} on ice") for n in range(60)]
    tsv(toy / "data/demo/claims.train.tsv", ["claim_id", "claim"], claims)
    pairs = [(f"t{n // 3}", f"{n % 12 + 1:04}", LABELS[n * 7 % 5 % 3]) for n in range(180)]
    tsv(toy / "data/demo/qrels.train.tsv", [*KEY, "label"], pairs)
    jsonl(toy / "pairs.jsonl", *({"claim_id": claim, "abstract_id": name,
                                  "target": int(label != "NEI")} for claim, name, label in pairs))
    jsonl(toy / "tuples.jsonl", *({"claim_id": claim, "positive": name, "negatives": ["0009"]}
                                  for claim, name, label in pairs[:20]))
    return toy

@pytest.mark.parametrize(("command", "kill", "torn", "never"), [
    # before the third of three shards appears; after that, no second one is made
    ("01_index.py --indexes dense", (RENAME, 3), "no", (RENAME, 2)),
    ("01_index.py --indexes splade --top-terms 20", (RENAME, 3), "no", (RENAME, 2)),
    # behind the last epoch, which patience chose; no other one begins
    ("01_index.py train tuples.jsonl --loss triplet --epochs 4 --patience 1 --dev-split test "
     f"{TRAIN}", (TRAINED, 1), "no", (SAVE, 1)),
    # in the third of five groups, when the second one did not reach the disk; four are left
    ("03_rerank.py --model models/tiny --first-stage 0.5", (SCORE, 3), "0.jsonl", (SCORE, 5)),
    # while the second checkpoint is written; its epoch and those behind it are left
    (f"03_rerank.py train pairs.jsonl --model models/tiny --epochs 2 {TRAIN}",
     (SAVE, 2), "*/trainer_state.json", (SAVE, 2)),
    (f"05_classify.py train --model models/nli --epochs 3 --held-out 0.25 {TRAIN}",
     (SAVE, 2), "*/trainer_state.json", (SAVE, 3))])
def test_kill_9_changes_no_byte_and_no_work_is_done_twice(
        ready, run, call, command, kill, torn, never):
    script, *words = command.split()
    small = SMALL[script[:2]]
    whole = facts(call(script, *words, "--out", "whole", cwd=ready, edits=small))
    assert len(whole.get("dev_ndcg_at_10", [])) < 1 + 4  # patience ended it
    words += ["--out", "killed"]
    assert run(script, *words, cwd=ready, edits=small | kill_before(*kill)).returncode == -9
    [parts] = ready.glob("**/*.parts")
    for path in sorted(parts.glob(torn), key=os.path.getmtime)[-1:]:
        path.write_bytes(path.read_bytes()[:-40])
    if "train" not in words:
        words += ["--batch-size", 64]  # nothing depends on it
    done = facts(run(script, *words, cwd=ready, edits=small | kill_before(*never)))
    for name in set(whole) - {"made", "seconds", "peak_mib"}:
        assert whole[name] == done[name], name
    made = [path for path in ready.glob("whole*/**/*") if ".meta" not in path.name]
    for path in filter(Path.is_file, made or [ready / "whole"]):
        assert path.read_bytes() == Path(str(path).replace("whole", "killed")).read_bytes(), path
    assert not parts.exists()
    parts.mkdir()  # as a kill behind the last rename leaves it
    assert "up to date" in call(script, *words, cwd=ready).stdout and not parts.exists()

def test_a_classifier_keeps_its_best_epoch_labels_temperature_and_shares(ready, call):
    jsonl(ready / "more.jsonl", {"claim_id": "t1", "abstract_id": "0009", "label": "NEI"})
    words = f"--model models/nli --epochs 3 --held-out 0.25 --examples more.jsonl {TRAIN}".split()
    made = facts(call("05_classify.py", "train", *words, "--out", "model", cwd=ready))
    log = json.loads((ready / "model.meta.json").read_text())["log"]
    assert made["best_F1"] == max(line.get("eval_f1_weighted", 0) for line in log) > 0
    config = json.loads((ready / "model/config.json").read_text())
    assert list(config["id2label"].values()) == NLI and config["dtype"] == "float32"
    assert config["stance_temperature"] == made["temperature"]
    assert sum(config["stance_shares"]) == pytest.approx(1) and sum(made["pairs"].values()) == 181
