"""recipes/narratives.py: prompts and replies, thresholds, scores; the demo's narratives."""
import json
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from conftest import LONG, ROOT, facts, jsonl, load, read, records, tiny, tsv

sys.path.insert(0, str(ROOT / "recipes"))
NARRATIVES = load("recipes/narratives.py")
from tools import codes as CODES  # noqa: E402

TAXONOMY = CODES.read_taxonomy(ROOT / "data/taxonomy.tsv")
TEST = dict(read(ROOT / "data/demo/claims.test.tsv").to_numpy())
GOLD = dict(read(ROOT / "data/demo/narratives.test.tsv").to_numpy())

def run(script, *words):
    command = [sys.executable, script, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

@pytest.fixture
def narratives(program, tmp_path):
    """narratives(job, ...): the program on the demo, with work/ in a folder of its own."""
    return lambda *words: program("narratives", *words, "--work", tmp_path / "work", cwd=ROOT)

def test_the_taxonomy_and_the_labels_of_the_demo():
    assert len(TAXONOMY) == 33 and {f"{code[0]}_0" for code in TAXONOMY} <= set(TAXONOMY)
    for split in ("train", "test"):
        claims = read(ROOT / f"data/demo/claims.{split}.tsv")
        names = set(claims["claim_id"])
        codes = CODES.read_codes(ROOT / f"data/demo/narratives.{split}.tsv", names)
        assert list(codes) == list(claims["claim_id"])
        for own in codes.values():
            assert own and set(own) <= set(TAXONOMY) and own == CODES.alone(own)

@pytest.mark.parametrize(("reply", "codes"), [
    ("Codes: 1_1;1_6", ["1_1", "1_6"]), ("codes : 1_1, 1_6 and 5_2.", ["1_1", "1_6", "5_2"]),
    ("**Codes:** 1\\_1;1\\_6", ["1_1", "1_6"]), ('{"codes": ["3_2", "5_2"]}', ["3_2", "5_2"]),
    ("1_1\n", ["1_1"]), ("It is like 2_1 and 2_3.\n\n- 2_1", ["2_1"]),
    ("Codes 1_1 and 1_6 come close.\nCodes: 1_6", ["1_6"]), ("Codes: 1_1\nNo, Codes: 1_2", ["1_2"]),
    ("Codes: 1_1;1_1;7_9", ["1_1", "7_9"]), ("Codes: 5_2_1", ["5_2_1"]), ("Codes: 0_0", ["0_0"]),
    ("Codes: X_Y;X_Y", []), ("none", []), ("", []), ("It says 1_1, or rather not.", []),
    ("Codes: 11_1", []), ("version 2.1_1", []),
])
def test_codes_are_read_from_a_reply(reply, codes):
    assert NARRATIVES.codes_in(reply, TAXONOMY) == codes

PAUSE, FRAUD = "1_4: The warming has paused", "5_3: It is a fraud"

@pytest.mark.parametrize(("reply", "codes"), [
    ("Codes: 1_4 (the warming has paused); 5_3 (it is a fraud)", ["1_4", "5_3"]),
    ("Codes: 1_4 (paused, they say), 5_3 (fraud) and 1_6 (sea).", ["1_4", "5_3", "1_6"]),
    ("Codes: 1_4 The warming has paused; 5_3 It is a fraud", ["1_4", "5_3"]),
    (f"Codes:\n- {PAUSE}\n- {FRAUD}", ["1_4", "5_3"]),
    ("**Codes:**\n\n1. **1_4**: pause\n\n2. **5_3**: fraud", ["1_4", "5_3"]),
    (f"Codes: {PAUSE}\n{FRAUD}\nThe claim says both.", ["1_4", "5_3"]),
    ("Codes: 1_4\n5_3", ["1_4", "5_3"]), ('{"codes": [\n  "1_4",\n  "5_3"\n]}', ["1_4", "5_3"]),
    ("Codes: 1_4; 5_3\n1_4: It says so.\n5_3: A hoax.", ["1_4", "5_3"]),
    ("Codes: 1_4. The claim says that it is no longer warming.", ["1_4"]),
    ("Codes: 1_0 (it says that the climate is not warming)", ["1_0"]),
    ("Codes: 0_0 (none of them)", ["0_0"]), ("Codes: 0_0 No narrative", ["0_0"]),
    # which codes are meant is open
    ("Codes: 1_4 or 5_3", []), ("Codes: 1_4 (not 5_3)", []), ("Codes: 1_4, but not 5_3", []),
    ("Codes: 1_4; 5_3 was close", []), ("Codes: 1_4\n5_3: close, but weaker", []),
    ("Codes: 1_4; 5_3\nOn reflection, 1_4 alone.", []), ("Codes: 1_4\nNo. Codes: none", []),
    (f"Codes:\n- {PAUSE}\nRejected:\n- {FRAUD}", []),
    (f"Codes:\n- {PAUSE}\n- 5_3: does not apply", []), (f"Codes:\n- {PAUSE}\n- 5_3: no", []),
])
def test_codes_with_names_and_in_lists_are_all_read_or_none(reply, codes):
    assert NARRATIVES.codes_in(reply, TAXONOMY) == codes

@pytest.mark.parametrize(("reply", "codes"), [
    ("Codes: 1_4;5_3\nBecause the cla", ["1_4", "5_3"]), ("1_4\nBecau", ["1_4"]),
    (f"Codes: {PAUSE}\nIt says", ["1_4"]),
    ("Codes: 5_2", []), ("Codes: 1_4;5", []), ("Codes: 1_4;5_3", []),  # 5_2 may become 5_2_1
    ("Let me see. Codes: 1_4\nbut", []), ("It may be\n1_4\nbut", []),  # a draft
    (f"Codes:\n- {PAUSE}\n- 5_", []), (f"Codes: {PAUSE}\n{FRAUD}\n1_6: The", []), ("", []),
])
def test_a_reply_that_was_cut_counts_where_it_begins_with_the_answer(reply, codes):
    assert NARRATIVES.codes_in_cut(reply, TAXONOMY) == codes
    args = SimpleNamespace(model="toy", temperature=0, seed=1, max_tokens=0, structured=False,
                           backend="none", extra={}, identity={})
    dialogue = NARRATIVES.choose("A claim.", [], TAXONOMY, args)
    next(dialogue)
    if codes:
        with pytest.raises(StopIteration) as end:
            dialogue.send({"content": reply, "cut": True, "error": None, "logprobs": None})
        assert end.value.value == (codes, 0)
    else:
        again = dialogue.send({"content": reply, "cut": True, "error": None, "logprobs": None})
        assert NARRATIVES.KIT.AGAIN in again["body"]["messages"][0]["content"]

def test_long_replies_are_read_at_once():
    started = time.monotonic()
    lists = [f"Codes: {part * 20_000}" for part in ("1_4 ", "1_4, ", "1_4 (a), ", "1_4\n", ": ")]
    for text in (*LONG, *(f"Codes: 1_4 {text}" for text in LONG), *lists):
        NARRATIVES.codes_in(text, TAXONOMY)
        NARRATIVES.codes_in_cut(text, TAXONOMY)
    assert time.monotonic() - started < 20

def test_a_language_model_sees_taxonomy_and_examples_and_its_codes_are_counted(
        narratives, endpoint, tmp_path):
    """The endpoint knows the gold; of the first two claims it says something else."""
    first, second, *_ = TEST
    def answer(prompt):
        name, = (name for name, claim in TEST.items() if f"<claim>{claim}</claim>" in prompt)
        wrong = {first: "Codes: 1_1;9_9;0_0", second: "I cannot say."}
        return wrong.get(name, f"Codes: {GOLD[name]}")
    server, work = endpoint(answer), tmp_path / "work/test"
    requests, replies = (work / f"llm_narratives.{kind}.jsonl" for kind in ("requests", "replies"))
    for waiting in (25, 1):  # the claim without codes is asked about once more
        done = narratives("llm", "--model", "toy")
        assert done.returncode == 3, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["waiting"] == waiting
        asked = run("04_llm_rerank.py", "ask", requests, "--replies", replies,
                    "--base-url", server.url, "--model", "toy")
        assert asked.returncode == 0, asked.stderr
    done = narratives("llm", "--model", "toy")
    assert facts(done).items() >= {"claims": 25, "unknown_codes": 1, "without_codes": 1}.items()
    assert "1 codes that" in done.stderr and "1 claims without a code" in done.stderr
    found = dict(read(work / "llm_narratives.tsv").to_numpy())
    assert found == GOLD | {first: "1_1", second: "0_0"}
    for prompt in server.answered:
        assert all(f"\n{code} {text}\n" in prompt for code, text in TAXONOMY.items())
        assert len(re.findall(r"^Claim: ", prompt, re.M)) == 8
    antarctica, = (prompt for prompt in server.answered if "<claim>Antarctica is GAIN" in prompt)
    assert "\nClaim: Greenland is losing ice" in antarctica
    assert "up to date" in narratives("llm", "--model", "toy").stdout
    lines = records(replies)
    better = [json.dumps(line).replace("9_9", "1_6") for line in lines]
    replies.write_text("\n".join(better) + "\n")
    assert facts(narratives("llm", "--model", "toy"))["unknown_codes"] == 0
    assert dict(read(work / "llm_narratives.tsv").to_numpy())[first] == "1_1;1_6"
    failed = {"custom_id": lines[0]["custom_id"], "error": {"message": "no"}, "response": None}
    jsonl(replies, failed, *(one for one in lines if one["custom_id"] != failed["custom_id"]))
    done = narratives("llm", "--model", "toy")
    assert facts(done)["failed_requests"] == 1 and "--retry-errors asks again" in done.stderr
    done = narratives("llm", "--model", "toy", "--retry-errors")
    assert json.loads(done.stdout.splitlines()[-1])["waiting"] == 1

def test_claims_of_the_same_words_are_no_examples(monkeypatch):
    """Vectors are numbers of letters; the nearest claim stands last."""
    class Encoder:
        def encode_query(self, texts, **_):
            import torch
            return torch.tensor([[float(text.lower().count(c)) for c in "abc"] for text in texts])
        encode_document = encode_query
    monkeypatch.setattr(CODES.KIT, "open_model", lambda *_: Encoder())
    known = [("A!", ["1_1"]), ("a b", ["1_2"]), ("aab", ["1_3"]), ("c", ["1_4"])]
    args = SimpleNamespace(encoder="toy", fewshot=2)
    assert NARRATIVES.nearest(["a"], known, args) == [[known[1], known[2]]]

def test_an_encoder_is_trained_and_classifies(narratives, tmp_path):
    model, work = tiny(tmp_path / "bert"), tmp_path / "work"
    done = narratives("train", "--model", model, "--epochs", 1)
    assert facts(done).items() >= {"claims": 25, "held_out": 5}.items()
    config = json.loads((work / "models/narratives/config.json").read_text())
    assert list(config["id2label"].values()) == list(TAXONOMY)
    assert len(config["narrative_thresholds"]) == 33
    suffixes = {path.suffix for path in (work / "models/narratives").rglob("*") if path.is_file()}
    assert suffixes <= {".json", ".safetensors", ".txt"}
    done = narratives("classify")
    found = CODES.read_codes(facts(done)["made"][0], TEST)
    assert list(found) == list(TEST)
    assert all(codes and set(codes) <= set(TAXONOMY) for codes in found.values())
    assert "up to date" in narratives("classify").stdout
    refusal = narratives("classify", "--model", model, "--force")
    assert refusal.returncode == 2 and "no thresholds" in refusal.stderr

def test_thresholds_by_hand():
    """Three held-out claims have the first code; the second is rare, and shares."""
    gold = np.array([[1, 1], [1, 0], [1, 0], [0, 0]])
    chances = np.array([[.9, .05], [.6, .1], [.3, .1], [.2, .3]])
    # first code: at .3, three of three. Both: at .3, right 3, named 4, gold 4: 6/8; at .05, 8/12
    assert CODES.fit_thresholds(gold, chances) == [.3, .3]
    assert CODES.best_threshold(gold[:, 1], chances[:, 1]) == .05  # right 1, named 4, gold 1: 2/5

def test_scores_by_hand(narratives, tmp_path):
    """0_0: right 2, named 3, gold 2: 4/5; 1_1: 1; 1_6 and 5_2 are never named: 0."""
    tsv(tmp_path / "claims.tsv", ["claim_id", "claim"], [(n, "x") for n in "abcd"])
    header, files = ["claim_id", "codes"], {name: tmp_path / f"{name}.tsv" for name in "gru"}
    tsv(files["g"], header, [("a", "1_1;1_6"), ("b", "0_0"), ("c", "5_2"), ("d", "0_0")])
    tsv(files["r"], header, [("a", "1_1"), ("b", "0_0"), ("c", "0_0"), ("d", "0_0")])
    tsv(files["u"], header, [("a", "1_0")])
    words = ("--claims", tmp_path / "claims.tsv", "--narratives", files["g"])
    done = narratives("evaluate", files["r"], files["g"], files["u"], *words)
    right, gold, parent = facts(done)["runs"]
    assert right["macro_F1"] == pytest.approx((4 / 5 + 1 + 0 + 0) / 4)
    assert right["micro_F1"] == pytest.approx(2 * 3 / (4 + 5))
    assert right["weighted_F1"] == pytest.approx((2 * 4 / 5 + 1 + 0 + 0) / 5)
    assert right["macro_F1_low"] < right["macro_F1"] < right["macro_F1_high"] <= 1
    assert gold["macro_F1"] == gold["macro_F1_low"] == gold["macro_F1_high"] == 1
    assert parent["macro_F1"] == 0  # where 1_1 is right, 1_0 is wrong
    assert "3 of 4 claims are missing" in done.stderr
    table = pd.read_csv(tmp_path / "work/test/narrative_scores.codes.tsv", sep="\t")
    row = table[(table["run"] == str(files["r"])) & (table["code"] == "0_0")].iloc[0]
    assert list(row[["right", "named", "gold"]]) == [2, 3, 2] and row["F1"] == .8
    tsv(tmp_path / "claims.tsv", ["claim_id", "claim"], [(n, "x") for n in "abcdef"])
    tsv(files["r"], header, [("a", "1_1"), *((n, "0_0") for n in "bcdf"), ("e", "1_4")])
    done = narratives("evaluate", files["r"], *words)  # e and f are not labelled
    assert facts(done)["runs"][0]["macro_F1"] == right["macro_F1"]
    assert "2 claims without gold are left out" in done.stderr
    tsv(files["u"], header, [("e", "1_4")])
    refusal = narratives("evaluate", files["u"], *words)
    assert refusal.returncode == 2 and "none of its claims is in" in refusal.stderr
    tsv(files["u"], header, [("x", "1_1")])
    refusal = narratives("evaluate", files["u"], *words)
    assert refusal.returncode == 2 and "u.tsv:2" in refusal.stderr

def test_f1_is_that_of_scikit_learn():
    from sklearn.metrics import f1_score
    from sklearn.preprocessing import MultiLabelBinarizer
    rng = np.random.default_rng(0)
    def draw():
        return {str(n): CODES.alone(rng.choice(list(TAXONOMY), rng.integers(1, 4)).tolist())
                for n in range(40)}
    gold, found = draw(), draw()
    both = MultiLabelBinarizer().fit([*gold.values(), *found.values()])
    pair = both.transform(gold.values()), both.transform(found.values())
    scores, _ = CODES.score(gold, found, 13)
    for average in ("macro", "micro", "weighted"):
        expected = f1_score(*pair, average=average, zero_division=0)
        assert scores[f"{average}_F1"] == pytest.approx(expected)

def test_codes_that_the_taxonomy_lacks_are_not_learned(tmp_path, capsys):
    tsv(tmp_path / "claims.tsv", ["claim_id", "claim"], [("a", "A."), ("b", "B.")])
    tsv(tmp_path / "codes.tsv", ["claim_id", "codes"], [("a", "1_1; 5_2_1"), ("b", "7_1")])
    found = CODES.read_labelled(tmp_path / "claims.tsv", tmp_path / "codes.tsv", TAXONOMY)
    assert found == [("A.", ["1_1"])]
    assert "2 codes that the taxonomy lacks" in capsys.readouterr().err
