"""recipes/tools/kit.py: requests, replies of all shapes, what is asked again and what is not."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, cases, jsonl, load, records

KIT = load("recipes/tools/kit.py")
REQUESTS = Path("requests.jsonl")
REPLIES = Path("replies.jsonl")


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def read(text):
    """Return the word behind "Answer:"."""
    return text.partition("Answer: ")[2] or None


def answers_to(prompts, **flags):
    """Return answers_to's answers and counts; flags: other ones."""
    args = {
        "model": "toy",
        "base_url": None,
        "backend": "none",
        "structured": False,
        "max_tokens": 9,
        "extra": {},
        "retry_errors": False,
        "requests": str(REQUESTS),
        "replies": str(REPLIES),
    }
    return KIT.answers_to(prompts, read, SimpleNamespace(**args | flags))


def waiting(*prompts, **flags):
    with pytest.raises(SystemExit) as end:
        answers_to(prompts, **flags)
    assert end.value.code == 3
    return records(REQUESTS)


def answer(*replies, error=None):
    """Append a reply for each request that waits: a text, or None."""
    lines = records(REPLIES) if REPLIES.exists() else []
    for request, reply in zip(records(REQUESTS), replies, strict=True):
        response = {"status_code": 400, "body": {}}
        if reply:
            response = {"status_code": 200, "body": {"choices": [{"message": {"content": reply}}]}}
        lines.append({"custom_id": request["custom_id"], "response": response, "error": error})
    jsonl(REPLIES, *lines)


NARRATIVES = load("recipes/narratives.py")
TAXONOMY = NARRATIVES.read_taxonomy(ROOT / "data/taxonomy.tsv")
REWRITE = load("recipes/rewrite.py")
READERS = {
    "codes": lambda reply: NARRATIVES.codes_in(reply, TAXONOMY),
    "counts": load("recipes/ev2r.py").counts_of,
    "text": REWRITE.text_of_reply,
    "clean": REWRITE.cleaned,  # of a claim
}


@pytest.mark.parametrize(
    "what, reply, wanted", [row for row in cases("replies.tsv") if row[0] in READERS]
)
def test_what_a_reply_says_is_read_or_it_is_asked_again(what, reply, wanted):
    """none: nothing that is said plainly."""
    found = READERS[what](reply.replace("\\n", "\n")) or "none"
    if isinstance(found, list):
        found = " ".join(map(str, found))
    assert found == wanted


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
    *_, last = capsys.readouterr().out.splitlines()
    assert json.loads(last) == {"made": [str(REQUESTS)], "waiting": 2}  # two of three are the same
    assert waiting("One?")[0]["body"]["temperature"] == 0


def test_only_what_waits_is_written_and_failures_are_asked_again_on_demand():
    waiting("One?", "Two?", "Three?")
    answer("Answer: 1", None, "Answer: 3")
    answer(None, None, None, error={"message": "quota"})  # an error replaces no completion
    answers, counts = answers_to(["One?", "Two?", "Three?", "One?"])
    assert answers == ["1", None, "3", "1"]
    assert counts == {"read": 3, "unread": 0, "failed": 1}
    [again] = waiting("One?", "Two?", retry_errors=True)
    assert again["body"]["messages"][0]["content"] == "Two?"
    answer("Answer: 2")
    assert answers_to(["Two?"])[0] == ["2"]
    assert len(waiting("One?", "Four?")) == 1
