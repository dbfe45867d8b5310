"""recipes/check_claim.py: a claim is data, an answer that of the verdicts, an error one line."""
import json
import os
import pty
import re
import subprocess
import sys

import pytest
from conftest import ROOT, RUN, TOY, jsonl, records, tsv

HOSTILE, CONTROL = "\x1b]0;owned\x07\x1b[2J\u202e", r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]"
CLAIM = "--top \"polar\tbears\"' lose\n\x1b[31m sea ice $(touch pwned) `touch pwned`; {é} \\n%s"

def check(*words, script="recipes/check_claim.py", stdout=subprocess.PIPE, **env):
    return subprocess.run([sys.executable, ROOT / script, *words], env=os.environ | env, text=True,
                          stdout=stdout, stderr=subprocess.PIPE)

@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """--data and --work of the toy, two abstracts of it hostile, with a BM25 index."""
    folder, corpus = tmp_path_factory.mktemp("check"), records(TOY / "corpus.jsonl")
    corpus[0]["title"] = f"Bears{HOSTILE} of a bay"
    corpus[1]["abstract"] += HOSTILE
    jsonl(folder / "corpus.jsonl", *corpus)
    flags = ["--data", str(folder), "--work", str(folder / "work")]
    assert check("--indexes", "bm25", *flags, script="01_index.py").returncode == 0
    return flags

def reply(prompt):
    label = "REFUTES" if "in zoos" in prompt else "NEI"
    return "SUPPORTS" if "a tenth" in prompt else label

def test_a_hostile_claim_is_data_and_is_asked_once(flags, endpoint):
    server = endpoint(reply)
    env = {"LLM_BASE_URL": server.url, "LLM_MODEL": "toy", "OPENAI_API_KEY": "dummy"}
    done = check(*flags, "--json", "--top", "3", "--", CLAIM, **env)
    assert done.returncode == 0 and not re.search(CONTROL, done.stdout)
    answer = json.loads(done.stdout)
    assert answer["claim"] == " ".join(CLAIM.split()) and not (ROOT / "pwned").exists()
    found = {one["abstract_id"]: one["label"] for one in answer["abstracts"]}
    assert found == {"0001": "SUPPORTS", "0002": "NEI", "0003": "REFUTES"}
    keys = ("verdict", "support", "SUPPORTS", "REFUTES", "NEI", "judge", "unusable")
    assert [answer[key] for key in keys] == ["DISPUTED", 0.5, 1, 1, 1, "toy", 0]
    asked, (master, terminal) = len(server.asked), pty.openpty()
    for more in ({}, {"NO_COLOR": "1"}):
        words = (*flags, "--top", "3", "--", CLAIM)
        assert check(*words, stdout=terminal, COLUMNS="60", **env, **more).returncode == 0
        shown = os.read(master, 65536).decode().replace("\r\n", "\n")
        coloured = re.findall(r"\x1b\[\d+m(\w+)\x1b\[0m", shown)
        assert sorted(coloured) == ([] if more else ["DISPUTED", "NEI", "REFUTES", "SUPPORTS"])
        assert not re.search(CONTROL, re.sub(r"\x1b\[\d+m", "", shown))
    assert max(map(len, shown.splitlines())) <= 60 and len(server.asked) == asked

def test_failed_requests_are_named_and_sent_again(flags, endpoint):
    """At first all fail, then those about one abstract, at last none."""
    broken = [""]
    def answer(prompt):
        failed = any(word in prompt for word in broken)
        return {"status": 400, "text": "no"} if failed else reply(prompt)
    server, words = endpoint(answer), (*flags, "--top", "3", "Do polar bears lose sea ice?")
    env = {"LLM_BASE_URL": server.url, "LLM_MODEL": "toy", "OPENAI_API_KEY": "dummy"}
    done = check(*words, **env)
    assert done.returncode == 2 and "requests failed" in done.stderr
    broken[0] = "in zoos"
    done = check(*words, **env)
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    assert "failed requests, which count as NEI: 1 (the next call asks again)" in shown
    assert "replies without a label" not in shown
    asked, broken[0] = len(server.asked), "\x00"
    answer = json.loads(check(*words, "--json", **env).stdout)
    assert (answer["failed"], answer["unusable"], answer["REFUTES"]) == (0, 0, 1)
    assert len(server.asked) == asked + 1

def test_a_byte_that_is_not_utf_8_is_replaced_as_in_all_stages(tmp_path):
    verdicts, corpus = tmp_path / "verdicts.tsv", tmp_path / "corpus.jsonl"
    record = '\ufeff{"abstract_id": "1", "title": "Eisb?ren", "abstract": "x"}\n'
    corpus.write_bytes(record.encode().replace(b"?", b"\xe4"))
    tsv(verdicts, [*RUN, "label", "p_supports", "p_refutes", "p_nei"],
        [("c", "1", 1, 1, "NEI", 0, 0, 1)])
    counts = dict.fromkeys(("SUPPORTS", "REFUTES"), 0) | {"NEI": 1, "evidence": []}
    jsonl(tmp_path / "verdicts.jsonl", {"claim": "x", "verdict": "NEI", **counts})
    jsonl(tmp_path / "verdicts.tsv.meta.json", {"arguments": {"model": "toy"}})
    done = check(verdicts, corpus, "json", script="recipes/tools/show_claim.py")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["abstracts"][0]["title"] == "Eisb\ufffdren"

@pytest.mark.parametrize(("words", "said"), [
    ([], "quotes"), (["polar", "bears"], "quotes"), ([" \n"], "the claim is empty"),
    (["x", "--\x1b"], "--"), (["sea", "--top", "x"], "argument --top"),
    (["sea", "--top", "0"], "argument --top: '0' is not a whole number from 1 on"),
    (["sea"], "no classifier; make it by: python 05_classify.py train --data"),
    (["sea", "--work", "w"], "w/index: no index; make it by: python 01_index.py --data")])
def test_one_line_says_what_is_wrong_before_any_work(flags, words, said, contents):
    before = contents(flags[1])
    done = check(*flags, *words)
    assert (done.returncode, done.stdout) == (2, "") and said in done.stderr
    assert re.fullmatch(r"error: [^\n\x1b]+\n", done.stderr) and not (ROOT / "w").exists()
    assert contents(flags[1]) == before
