"""recipes/narratives.py: prompts and replies, thresholds, scores; the demo's narratives."""

import json
import re
import sys

import numpy as np
import pandas as pd
import pytest
from conftest import CLAIMS, ROOT, cases, facts, load, read, tiny, tsv

sys.path.insert(0, str(ROOT / "recipes"))
from tools import kit  # noqa: E402

CODES = load("recipes/narratives.py")
TAXONOMY = CODES.read_taxonomy(ROOT / "data/taxonomy.tsv")
TEST = dict(read(ROOT / "data/demo/claims.test.tsv").to_numpy())
GOLD = dict(read(ROOT / "data/demo/narratives.test.tsv").to_numpy())


@pytest.fixture
def narratives(program, tmp_path):
    """narratives("job ..."): the program on the demo, with work/ in a folder of its own."""
    return lambda words: program("narratives", f"{words} --work {tmp_path}/work", cwd=ROOT)


@pytest.mark.parametrize(
    "reply, wanted", [row[1:] for row in cases("replies.tsv") if row[0] == "codes"]
)
def test_codes_are_read_from_a_reply(reply, wanted):
    """none: nothing that is said plainly."""
    codes = None if wanted == "none" else wanted.split()
    assert CODES.codes_in(reply.replace("\\n", "\n"), TAXONOMY) == codes


def test_a_language_model_sees_taxonomy_and_examples(narratives, endpoint, tmp_path):
    """The endpoint knows the gold; of the first two claims it says something else."""
    first, second, *_ = TEST

    def answer(prompt):
        (claim_id,) = [
            claim_id for claim_id, claim in TEST.items() if f"<claim>{claim}</claim>" in prompt
        ]
        wrong = {first: "Codes: 1_1;9_9;0_0", second: "I cannot say."}
        return wrong.get(claim_id, f"Codes: {GOLD[claim_id]}")

    server = endpoint(answer)
    done = narratives("llm --model toy")
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["waiting"] == 25
    done = narratives(f"llm --model toy --base-url {server.url}")
    assert len(server.asked) == 26  # the claim without codes is asked about once more
    assert "llm_narratives.shots.json" in done.stdout  # up to date: claims are encoded once
    assert facts(done).items() >= {"claims": 25, "unknown_codes": 1, "without_codes": 1}.items()
    assert "1 codes are not in" in done.stderr and f"get 0_0: {second}" in done.stderr
    found = dict(read(tmp_path / "work/test/llm_narratives.tsv").to_numpy())
    assert found == GOLD | {first: "1_1", second: "0_0"}
    for prompt in server.answered:
        assert all(f"\n{code} {text}\n" in prompt for code, text in TAXONOMY.items())
        assert len(re.findall(r"^Claim: ", prompt, re.M)) == 8
    start = "<claim>Antarctica is GAIN"
    (antarctica,) = [prompt for prompt in server.answered if start in prompt]
    assert "\nClaim: Greenland is losing ice" in antarctica
    assert "up to date" in narratives("llm --model toy").stdout


def test_a_language_model_is_asked_by_ones_own_prompt(narratives, tmp_path):
    prompt = tmp_path / "mine.txt"
    prompt.write_text(
        'Name {"codes"}: {taxonomy}\n--- user\n{examples}<claim>{claim}</claim>{none}'
    )
    done = narratives(f"llm --model toy --prompt {prompt} --fewshot 1")
    assert done.returncode == 3, done.stderr
    path = tmp_path / "work/test/llm_narratives.requests.jsonl"
    system, user = json.loads(path.read_text().splitlines()[0])["body"]["messages"]
    assert system["content"].startswith('Name {"codes"}: 0_0 ')
    claim = kit.plain(TEST[list(TEST)[0]])
    assert re.fullmatch(
        rf"Claim: .+\nCodes: .+\n\n<claim>{re.escape(claim)}</claim>0_0", user["content"]
    )
    prompt.write_text("{claim}")
    done = narratives(f"llm --model toy --prompt {prompt}")
    assert done.returncode == 2 and "mine.txt: it needs {taxonomy}" in done.stderr


def test_an_encoder_is_trained_resumed_and_classifies(narratives, tmp_path, monkeypatch):
    model = tiny(tmp_path / "tiny")
    out = tmp_path / "work/models/narratives"
    words = f"train --model {model} --epochs 2"
    with monkeypatch.context() as killed:
        killed.setattr("sentence_transformers.CrossEncoder.predict", None)  # ends behind training
        with pytest.raises(TypeError):
            narratives(words)
    kept = {path.stat().st_mtime_ns for path in tmp_path.glob("work/**/optimizer.pt")}
    assert len(kept) == 2 and not out.exists()
    assert facts(narratives(words)).items() >= {"claims": 25, "held_out": 5}.items()
    assert len(json.loads((out.parent / "narratives.meta.json").read_bytes())["loss"]) == 4  # steps
    assert not (out.parent / "narratives.parts").exists()
    config = json.loads((out / "config.json").read_text())
    assert list(config["id2label"].values()) == list(TAXONOMY)
    assert len(config["narrative_thresholds"]) == 33
    found = CODES.read_codes(facts(narratives("classify"))["made"][0], TEST)
    assert list(found) == list(TEST)
    assert all(codes and set(codes) <= set(TAXONOMY) for codes in found.values())
    refusal = narratives(f"classify --model {model}")
    assert refusal.returncode == 2 and "no thresholds" in refusal.stderr


def test_thresholds_by_hand():
    """Three held-out claims have the first code; the second is rare, and shares."""
    gold = np.array([[1, 1], [1, 0], [1, 0], [0, 0]])
    probabilities = np.array([[0.9, 0.05], [0.6, 0.1], [0.3, 0.1], [0.2, 0.3]])
    # first code: at .3, three of three. Both: at .3, right 3, named 4, gold 4: 6/8; at .05, 8/12
    assert CODES.fit_thresholds(gold, probabilities) == [0.3, 0.3]
    # second code: right 1, named 4, gold 1: 2/5
    assert CODES.best_threshold(gold[:, 1], probabilities[:, 1]) == 0.05


def test_scores_by_hand(narratives, tmp_path):
    """0_0: right 2, named 3, gold 2: 4/5; 1_1: 1; 1_6 and 5_2 are never named: 0."""
    tsv(tmp_path / "claims.tsv", CLAIMS, "a|x; b|x; c|x; d|x")
    header = ["claim_id", "codes"]
    gold, right, other = (tmp_path / name for name in ("gold.tsv", "right.tsv", "other.tsv"))
    tsv(gold, header, [("a", "1_1;1_6"), ("b", "0_0"), ("c", "5_2"), ("d", "0_0")])
    tsv(right, header, "a|1_1; b|0_0; c|0_0; d|0_0")
    tsv(other, header, "a|1_0")
    words = f"--claims {tmp_path}/claims.tsv --narratives {gold}"
    done = narratives(f"evaluate {right} {gold} {other} {words}")
    of_right, of_gold, of_other = facts(done)["runs"]
    assert of_right["macro_F1"] == pytest.approx((4 / 5 + 1 + 0 + 0) / 4)
    assert of_right["micro_F1"] == pytest.approx(2 * 3 / (4 + 5))
    assert of_right["weighted_F1"] == pytest.approx((2 * 4 / 5 + 1 + 0 + 0) / 5)
    assert of_gold["macro_F1"] == 1
    assert of_other["macro_F1"] == 0  # where 1_1 is right, 1_0 is wrong
    assert "3 of 4 claims are missing" in done.stderr
    table = pd.read_csv(tmp_path / "work/test/narrative_scores.codes.tsv", sep="\t")
    row = table[(table["run"] == str(right)) & (table["code"] == "0_0")].iloc[0]
    assert list(row[["right", "named", "gold"]]) == [2, 3, 2]
    assert row["F1"] == 0.8
    tsv(other, header, "e|1_4")
    tsv(tmp_path / "claims.tsv", CLAIMS, "a|x; b|x; c|x; d|x; e|x")
    refusal = narratives(f"evaluate {other} {words}")
    assert refusal.returncode == 2 and "none of its claims is in" in refusal.stderr
