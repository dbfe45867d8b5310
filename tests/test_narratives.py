"""recipes/narratives.py: prompts and replies, thresholds, scores; the demo's narratives."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from conftest import CLAIMS, ROOT, cells, facts, load, read, records, tiny, tsv

CODES = load("recipes/narratives.py")
TAXONOMY = CODES.read_taxonomy(ROOT / "data/taxonomy.tsv")
TEST = dict(read(ROOT / "data/demo/claims.test.tsv").to_numpy())
GOLD = dict(read(ROOT / "data/demo/narratives.test.tsv").to_numpy())


@pytest.fixture
def narratives(program, tmp_path):
    """narratives("job ..."): the program on the demo, with work/ in a folder of its own."""
    return lambda words: program("narratives", f"{words} --work {tmp_path}/work", cwd=ROOT)


def test_a_language_model_sees_taxonomy_and_examples(narratives, endpoint, tmp_path):
    """The endpoint knows the gold; of the first two claims it says something else."""
    first, second, *_ = TEST
    ids = {claim: claim_id for claim_id, claim in TEST.items()}
    said = GOLD | {first: "1_1;9_9;0_0", second: "none"}

    def answer(prompt):
        [claim] = re.findall("<claim>(.*)</claim>", prompt)
        return f"Codes: {said[ids[claim]]}"

    server = endpoint(answer)
    done = narratives("llm --model toy")
    assert done.returncode == 3 and '"waiting": 25}' in done.stdout, done.stderr
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
    [antarctica] = [prompt for prompt in server.answered if "<claim>Antarctica is GAIN" in prompt]
    assert "\nClaim: Greenland is losing ice" in antarctica


def test_a_language_model_is_asked_by_ones_own_prompt(narratives, tmp_path):
    prompt = tmp_path / "mine.txt"
    prompt.write_text(
        'Name {"codes"}: {taxonomy}\n--- user\n{examples}<claim>{claim}</claim>{none}'
    )
    assert narratives(f"llm --model toy --prompt {prompt} --fewshot 1").returncode == 3
    first, *_ = records(tmp_path / "work/test/llm_narratives.requests.jsonl")
    system, user = first["body"]["messages"]
    assert system["content"].startswith('Name {"codes"}: 0_0 ')
    claim = re.escape(CODES.kit.plain(TEST[list(TEST)[0]]))
    assert re.fullmatch(rf"Claim: .+\nCodes: .+\n\n<claim>{claim}</claim>0_0", user["content"])


def test_an_encoder_is_trained_resumed_and_classifies(narratives, tmp_path, monkeypatch):
    model = tiny(tmp_path / "tiny")
    out = tmp_path / "work/models/narratives"
    words = f"train --model {model} --epochs 2"
    with monkeypatch.context() as killed:
        killed.setattr("sentence_transformers.CrossEncoder.predict", None)  # ends behind training
        with pytest.raises(TypeError):
            narratives(words)
    assert len(list(tmp_path.glob("work/**/optimizer.pt"))) == 2 and not out.exists()
    made = facts(narratives(words))
    assert (made["claims"], made["held_out"], len(made["loss"])) == (25, 5, 4)  # 4 steps
    assert not (out.parent / "narratives.parts").exists()
    config = json.loads((out / "config.json").read_text())
    assert list(config["id2label"].values()) == list(TAXONOMY)
    assert len(config["narrative_thresholds"]) == 33
    found = CODES.read_codes(facts(narratives("classify"))["made"][0], TEST)
    assert list(found) == list(TEST)
    assert all(codes and set(codes) <= set(TAXONOMY) for codes in found.values())


def test_thresholds_by_hand():
    """Three held-out claims have the first code; the second is rare, and shares."""
    gold = np.array([[1, 1], [1, 0], [1, 0], [0, 0]])
    probabilities = np.array([[0.9, 0.05], [0.6, 0.1], [0.3, 0.1], [0.2, 0.3]])
    # first code: at .3, three of three. Both: at .3, right 3, named 4, gold 4: 6/8; at .05, 8/12
    assert CODES.fit_thresholds(gold, probabilities) == [0.3, 0.3]
    # second code: right 1, named 4, gold 1: 2/5
    assert CODES.best_threshold(gold[:, 1], probabilities[:, 1]) == 0.05


def test_scores_by_hand(program, tmp_path):
    """0_0: right 2, named 3, gold 2: 4/5; 1_1: 1; 1_6 and 5_2 are never named: 0."""
    header = ["claim_id", "codes"]
    tsv(tmp_path / "claims.tsv", CLAIMS, "a|x; b|x; c|x; d|x; e|x")
    tsv(tmp_path / "gold.tsv", header, [("a", "1_1;1_6"), *cells("b|0_0; c|5_2; d|0_0")])
    tsv(tmp_path / "right.tsv", header, "a|1_1; b|0_0; c|0_0; d|0_0")
    tsv(tmp_path / "other.tsv", header, "a|1_0")
    tsv(tmp_path / "none.tsv", header, "e|1_4")
    words = "--claims claims.tsv --narratives gold.tsv --work w"
    done = program("narratives", f"evaluate right.tsv gold.tsv other.tsv {words}", cwd=tmp_path)
    measures = ["macro_F1", "micro_F1", "weighted_F1"]
    right, gold, other = pd.DataFrame(facts(done)["runs"])[measures].to_numpy()
    macro = (4 / 5 + 1 + 0 + 0) / 4
    micro = 2 * 3 / (4 + 5)
    weighted = (2 * 4 / 5 + 1 + 0 + 0) / 5
    assert right == pytest.approx([macro, micro, weighted])
    assert (gold == 1).all() and (other == 0).all()  # where 1_1 is right, 1_0 is wrong
    assert "3 of 4 claims are missing" in done.stderr
    table = pd.read_csv(tmp_path / "w/test/narrative_scores.codes.tsv", sep="\t")
    [row] = table.query("run == 'right.tsv' and code == '0_0'").to_dict("records")
    assert (row["right"], row["named"], row["gold"], row["F1"]) == (2, 3, 2, 0.8)
    refusal = program("narratives", f"evaluate none.tsv {words}", cwd=tmp_path)
    assert refusal.returncode == 2 and "none of its claims is in" in refusal.stderr
