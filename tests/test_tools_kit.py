"""recipes/tools/kit.py: requests, replies of all shapes, what is asked again and what is not."""

import hashlib
import json
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT, records

sys.path.insert(0, str(ROOT / "recipes"))
from tools import kit  # noqa: E402


def completion(text, **choice):
    return {"status_code": 200, "body": {"choices": [{"message": {"content": text}, **choice}]}}


def answers_to(prompts, **flags):
    """Return answers_to's answers, the word behind "Answer:", and counts; flags: other ones."""
    args = {
        "model": "toy",
        "base_url": None,
        "max_tokens": 9,
        "extra": {},
        "retry_errors": False,
        "requests": "requests.jsonl",
        "replies": "replies.jsonl",
    }

    def read(text):
        return text.partition("Answer: ")[2] or None

    return kit.answers_to(prompts, read, SimpleNamespace(**args | flags))


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def waiting(*prompts, **flags):
    with pytest.raises(SystemExit) as end:
        answers_to(prompts, **flags)
    assert end.value.code == 3
    return records(kit.Path("requests.jsonl"))


def answer(*replies, mode="a", **more):
    """Append a reply for each request that waits: a text, or the response."""
    with open("replies.jsonl", mode, encoding="utf-8") as file:
        for request, reply in zip(records(kit.Path("requests.jsonl")), replies, strict=True):
            if isinstance(reply, str):
                reply = completion(reply)
            line = {"custom_id": request["custom_id"], "response": reply, "error": None}
            file.write(json.dumps(line | more) + "\n")


def test_a_request_is_a_line_of_the_batch_api_that_is_named_by_its_body(capsys):
    first, second = waiting("One?", "Two?", "One?", extra={"seed": 1, "temperature": None})
    assert first["body"] == {
        "model": "toy",
        "messages": [{"role": "user", "content": "One?"}],
        "max_tokens": 9,
        "seed": 1,
    }
    body = json.dumps(first["body"], sort_keys=True).encode()
    assert first["custom_id"] == hashlib.sha256(body).hexdigest()
    assert first["custom_id"] != second["custom_id"]
    assert (first["method"], first["url"]) == ("POST", "/v1/chat/completions")
    said, command, last = capsys.readouterr().out.splitlines()
    assert said.startswith(
        "2 of 2 requests have no reply yet (about "
    )  # two of the three are the same
    assert json.loads(last)["waiting"] == 2
    assert command.endswith("ask requests.jsonl --replies replies.jsonl --model toy")
    assert waiting("One?")[0]["body"]["temperature"] == 0


def test_only_what_waits_is_written_and_failures_are_asked_again_on_demand(capsys):
    waiting("One?", "Two?", "Three?")
    answer("Answer: 1", {"status_code": 400, "body": {}}, completion("Answer: 3"))
    answer(*["Answer: none"] * 3, error={"message": "quota"})  # an error replaces no completion
    answers, counts = answers_to(["One?", "Two?", "Three?", "One?"])
    assert answers == ["1", None, "3", "1"]
    assert counts["refused"] == 1 and counts["unread"] == 0
    (again,) = waiting("One?", "Two?", retry_errors=True)
    assert again["body"]["messages"][0]["content"] == "Two?"
    assert "--retry-errors" in capsys.readouterr().out
    answer("Answer: 2")
    assert answers_to(["Two?"])[0] == ["2"]
    assert len(waiting("One?", "Four?")) == 1
