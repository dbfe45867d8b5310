"""A script that was killed goes on where it was, and ends in the bytes of one that was not.

restarts.tsv has the commands, before which statement kill -9 comes (shard 3: before the third shard
appears), and a statement that the restart never reaches. 04_llm_rerank.py has a test of its own.
"""
import json
import os
from pathlib import Path

import pytest
from conftest import KEY, LABELS, cases, facts, jsonl, kill_before, tiny, tsv

SMALL = {"03": {"GROUP = 1024": "GROUP = 4"}, "05": {"SHARD = 2048": "SHARD = 4"}}
STATEMENTS = {"shard": "new.rename(shard)", "score": "scores, cut = score(",
              "save": "last = {name: value"}
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

@pytest.mark.parametrize(("command", "kill", "torn", "never", "why"), cases("restarts.tsv"))
def test_kill_9_changes_no_byte_and_no_work_is_done_twice(
        ready, killed, call, command, kill, torn, never, why):
    kill = kill_before(STATEMENTS[kill[:-2]], int(kill[-1]))
    never = kill_before(STATEMENTS[never[:-2]], int(never[-1]), by="sys.exit('done again')")
    script, *words = command.split()
    words += TRAIN.split() * ("train" in words)
    small = SMALL[script[:2]]
    whole = facts(call(script, *words, "--out", "whole", cwd=ready, edits=small))
    words += ["--out", "killed"]
    assert killed(script, *words, cwd=ready, edits=small | kill)
    [parts] = ready.glob("**/*.parts")
    for path in sorted(parts.glob(torn or "none"), key=os.path.getmtime)[-1:]:
        path.write_bytes(path.read_bytes()[:-40])
    if "train" not in words:
        words += ["--batch-size", 64]  # nothing depends on it
    done = facts(call(script, *words, cwd=ready, edits=small | never))
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
