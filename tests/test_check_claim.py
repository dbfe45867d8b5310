"""recipes/check_claim.py: a claim is data, an answer that of the verdicts, an error one line."""

import json
import os
import re
import shutil
import subprocess

import pytest
from conftest import ROOT, TOY, jsonl, records, tiny

HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202e"
CONTROL = r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]"
CLAIM = '--top "polar\tbears"\' lose\n\x1b[31m sea ice $(touch pwned) `touch pwned`; {é} \\n%s'


@pytest.fixture(scope="module")
def check(warm):
    """check("a claim", LLM_MODEL="toy"): check_claim.py in a copy of a process, as its scripts."""

    def call_check(*words, script="recipes/check_claim.py", **env):
        return subprocess.run(
            ["python", str(ROOT / script), *map(str, words)],
            env=os.environ | env | {"PATH": warm},
            text=True,
            capture_output=True,
        )

    return call_check


@pytest.fixture(scope="module")
def flags(check, tmp_path_factory):
    """--data and --work of the toy, two abstracts of it hostile, with a BM25 index."""
    folder = tmp_path_factory.mktemp("check")
    corpus = records(TOY / "corpus.jsonl")
    corpus[0]["title"] = f"Bears{HOSTILE} of a bay"
    corpus[1]["abstract"] += HOSTILE
    jsonl(folder / "corpus.jsonl", *corpus)
    flags = ["--data", str(folder), "--work", str(folder / "work")]
    assert check("--indexes", "bm25", *flags, script="01_index.py").returncode == 0
    return flags


def test_a_hostile_claim_is_data_and_is_asked_once(check, flags, endpoint):
    def reply(prompt):
        if "a tenth" in prompt:
            return "SUPPORTS"
        if "in zoos" in prompt:
            return "REFUTES"
        return "NEI"

    server = endpoint(reply)
    env = {"LLM_BASE_URL": server.url, "LLM_MODEL": "toy", "OPENAI_API_KEY": "dummy"}
    done = check(*flags, "--json", "--top", "3", "--", CLAIM, **env)
    assert done.returncode == 0 and not re.search(CONTROL, done.stdout), done.stderr
    answer = json.loads(done.stdout)
    assert answer["claim"] == " ".join(CLAIM.split())
    assert not (ROOT / "pwned").exists()
    found = {record["abstract_id"]: record["label"] for record in answer["abstracts"]}
    assert found == {"0001": "SUPPORTS", "0002": "NEI", "0003": "REFUTES"}
    keys = ("verdict", "SUPPORTS", "REFUTES", "NEI", "judge", "unusable", "held_out_F1")
    assert [answer[key] for key in keys] == ["DISPUTED", 1, 1, 1, "toy", 0, None]
    asked = len(server.asked)
    shown = check(*flags, "--top", "3", "--", CLAIM, COLUMNS="60", **env).stdout
    assert "Verdict  DISPUTED (SUPPORTS 1, REFUTES 1, NEI 1)" in shown
    assert not re.search(CONTROL, shown)
    assert max(map(len, shown.splitlines())) <= 60
    assert len(server.asked) == asked


def test_failed_requests_are_named_and_sent_again(check, flags, endpoint):
    broken = ["in zoos"]

    def reply(prompt):
        if any(word in prompt for word in broken):
            return {"status": 400, "text": "no"}
        return "NEI"

    server = endpoint(reply)
    words = (*flags, "--top", "3", "Do polar bears lose sea ice?")
    env = {"LLM_BASE_URL": server.url, "LLM_MODEL": "toy", "OPENAI_API_KEY": "dummy"}
    shown = " ".join(check(*words, **env).stdout.split())
    assert "refused by the server: 1 (the next call asks again)" in shown
    asked = len(server.asked)
    broken.clear()
    answer = json.loads(check(*words, "--json", **env).stdout)
    assert (answer["refused"], answer["NEI"], len(server.asked)) == (0, 3, asked + 1)


def test_a_key_alone_asks_nobody_and_a_classifier_says_what_it_is_worth(
    check, flags, endpoint, tmp_path
):
    folder = tmp_path / "classifier"
    tiny(folder, ["contradiction", "neutral", "entailment"])
    config = json.loads((folder / "config.json").read_text())
    config["stance_temperature"] = 1e6  # all labels get 1/3
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copytree(flags[3], tmp_path / "work")
    (tmp_path / "work/models").mkdir()
    folder.rename(tmp_path / "work/models/classifier")
    worth = {"held_out_F1": 0.3, "majority_F1": 0.4}
    (tmp_path / "work/models/classifier.meta.json").write_text(json.dumps(worth))
    server = endpoint("NEI".format)
    words = (*flags[:3], tmp_path / "work", "--top", "2", "Do polar bears lose sea ice?")
    done = check(*words, "--json", LLM_BASE_URL=server.url, OPENAI_API_KEY="dummy")
    assert done.returncode == 0 and not server.asked, done.stderr
    assert done.stderr.startswith("LLM_MODEL is not set, so no language model is asked\n")
    answer = json.loads(done.stdout)
    assert answer["judge"] == str(tmp_path / "work/models/classifier")
    keys = ("verdict", "held_out_F1", "majority_F1")
    assert [answer[key] for key in keys] == ["UNDECIDED", 0.3, 0.4]
    done = check(*words, LLM_MODEL="toy")  # there is no endpoint
    shown = " ".join(done.stdout.split())
    assert "error" not in done.stderr and "Verdict UNDECIDED (" in shown
    assert "no label is much more probable than chance" in shown
    assert "F1 0.300 on held-out pairs, 0.400 if all get the most frequent label" in shown
    assert "its verdicts are worthless" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "quotes"),
        (["polar", "bears"], "quotes"),
        ([" \n"], "the claim is empty"),
        (["sea", "--top", "x"], "argument --top"),
        (["sea"], "no classifier; train one: python recipes/train/classifier.py --data"),
        (["sea", "--work", "w"], "w/index: no index; make one: python 01_index.py --data"),
    ],
)
def test_one_line_says_what_is_wrong_before_any_work(check, flags, words, said, contents):
    before = contents(flags[1])
    done = check(*flags, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: [^\n]+\n", done.stderr) and said in done.stderr
    assert not (ROOT / "w").exists()
    assert contents(flags[1]) == before


def test_a_file_in_the_place_of_the_answers_stays(check, flags, tmp_path):
    shutil.copytree(flags[3], tmp_path / "work")
    (tmp_path / "work/models/classifier").mkdir(parents=True)
    shutil.rmtree(tmp_path / "work/checked", ignore_errors=True)
    (tmp_path / "work/checked").write_text("x")
    done = check(*flags[:3], tmp_path / "work", "sea")
    assert done.returncode == 2 and done.stderr.startswith(f"error: {tmp_path}/work/checked: not")
    assert (tmp_path / "work/checked").read_text() == "x" and done.stderr.count("\n") == 1
