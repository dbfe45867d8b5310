"""recipes/check_claim.py: a claim is data, an answer that of the verdicts, an error one line."""

import json
import os
import re
import shutil
import subprocess

import pytest
from conftest import NLI, ROOT, TOY, jsonl, records, tiny

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


ENV = {"LLM_MODEL": "toy", "OPENAI_API_KEY": "dummy"}
KEYS = ["verdict", "SUPPORTS", "REFUTES", "NEI", "judge", "unusable", "failed", "held_out_F1"]


def test_a_hostile_claim_is_data_and_only_what_failed_is_asked_again(check, flags, endpoint):
    says = {"a tenth": "SUPPORTS", "in zoos": {"status": 400, "text": "no"}}

    def reply(prompt):
        for words, label in says.items():
            if words in prompt:
                return label
        return "NEI"

    server = endpoint(reply)
    env = ENV | {"LLM_BASE_URL": server.url}
    words = (*flags, "--top", "3", "--", CLAIM)
    shown = " ".join(check(*words, **env).stdout.split())
    assert "which count as NEI: 1; of these, refused or cut: 1" in shown
    says["in zoos"] = "REFUTES"
    asked = len(server.asked)
    done = check("--json", *words, **env)
    assert done.returncode == 0 and not re.search(CONTROL, done.stdout), done.stderr
    answer = json.loads(done.stdout)
    assert answer["claim"] == " ".join(CLAIM.split())
    assert not (ROOT / "pwned").exists()
    found = {record["abstract_id"]: record["label"] for record in answer["abstracts"]}
    assert found == {"0001": "SUPPORTS", "0002": "NEI", "0003": "REFUTES"}
    assert [answer[key] for key in KEYS] == ["DISPUTED", 1, 1, 1, "toy", 0, 0, None]
    shown = check(*words, COLUMNS="60", **env).stdout
    assert "Verdict  DISPUTED (SUPPORTS 1, REFUTES 1, NEI 1)" in shown
    assert "  SUPPORTS 100 %  " in shown
    assert not re.search(CONTROL, shown)
    assert max(map(len, shown.splitlines())) <= 60
    assert len(server.asked) == asked + 1


WORTH = "F1 0.300 on held-out pairs, 0.400 if all get the most frequent label"


def test_a_key_alone_asks_nobody_and_a_classifier_says_what_it_is_worth(
    check, flags, endpoint, tmp_path
):
    shutil.copytree(flags[3], tmp_path / "work")
    folder = tmp_path / "work/models/classifier"
    tiny(folder, NLI)
    config = json.loads((folder / "config.json").read_text())
    config["stance_temperature"] = 1e6  # all labels get 1/3
    (folder / "config.json").write_text(json.dumps(config))
    jsonl(tmp_path / "work/models/classifier.meta.json", {"held_out_F1": 0.3, "majority_F1": 0.4})
    server = endpoint("NEI".format)
    words = (*flags[:3], tmp_path / "work", "--top", "2", "Do polar bears lose sea ice?")
    done = check(*words, LLM_BASE_URL=server.url, OPENAI_API_KEY="dummy")
    assert done.returncode == 0 and not server.asked, done.stderr
    assert done.stderr.startswith("LLM_MODEL is not set, so no language model is asked\n")
    done = check(*words, LLM_MODEL="toy")  # there is no endpoint
    shown = " ".join(done.stdout.split())
    assert "error" not in done.stderr and "Verdict UNDECIDED (" in shown
    assert "no label is much more probable than chance" in shown
    assert f"{WORTH}: its verdicts are worthless" in shown


@pytest.mark.parametrize(
    "words, said",
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
    for name in ("index/bm25", "models/classifier"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "checked").write_text("x")
    done = check(*flags[:3], tmp_path, "sea")
    assert done.returncode == 2 and (tmp_path / "checked").read_text() == "x"
    assert re.fullmatch(rf"error: {tmp_path}/checked[^\n]+\n", done.stderr)
