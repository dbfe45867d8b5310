"""recipes/tools/openai_batch.py against OpenAI's queue, scripted: files and batches over HTTP."""

import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT, Endpoint, facts, load

AT = "work/demo/test/llm"
STAGE = ("04_llm_rerank.py", "--run work/demo/test/hybrid.tsv --model toy --backend none")
KEY = "sk-secret"
FULL = "token_limit_exceeded"


def ids_in(lines):
    return re.findall(r'"custom_id": "(\w+)"', lines)


class Queue(Endpoint):
    """POST /files and /batches, GET /batches/ID and /files/ID/content.

    server.asked: the custom_ids of each upload; server.reply: {id of a batch or file: its lines};
    server.victim: killed at the second upload.
    """

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/v1/batches":
            batch_id = f"batch-{len(self.server.asked)}"
            new = [{"id": batch_id, "status": "in_progress"}]
            return self.answer(*self.server.reply.setdefault(batch_id, new))
        self.server.asked.append(ids_in(body.decode()))
        if self.server.victim and len(self.server.asked) == 2:
            self.server.victim.kill()
        return self.answer({"id": "file"})

    def do_GET(self):
        self.answer(*self.server.reply[self.path.split("/")[3]])

    def answer(self, *lines):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write("\n".join(map(json.dumps, lines)).encode())


@pytest.fixture
def queue(endpoint, monkeypatch):
    monkeypatch.setattr("conftest.Endpoint", Queue)  # what endpoint() starts
    server = endpoint({})
    server.victim = None
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("LLM_BASE_URL", server.url)
    return server


@pytest.fixture
def batch(toy, call, program):
    """batch("..."): the program on three requests of 04, two of them in the first batch."""
    call(*STAGE, cwd=toy)
    words = f"{AT}.requests.jsonl --max-requests 2"
    return lambda more="": program("tools/openai_batch", f"{words} {more}", cwd=toy)


DONE = {"body": {"choices": [{"message": {"content": "[2] > [1]"}}]}}


def reply(custom_id, **other):
    return {"custom_id": custom_id, "response": None, "error": None, **other}


def test_batches_are_sent_looked_up_and_fetched_once(toy, batch, queue, call):
    first = batch()
    assert first.returncode == 3 and "sending 3 requests" in first.stdout
    batch()
    (one, two), (three,) = queue.asked  # no third
    replies = toy / f"{AT}.replies.jsonl"
    replies.write_text('{"torn": ')
    queue.reply["output"] = [reply(one, response=DONE)]
    timeout = reply(two, error={"code": "request_timeout"})
    queue.reply["errors"] = [timeout, reply("x", error="odd"), 7]
    queue.reply["expired"] = [reply(three, error={"code": "batch_expired"})]
    ended = {"status": "completed", "output_file_id": "output"}
    queue.reply["batch-1"][0] |= ended | {"error_file_id": "errors"}
    assert batch().returncode == 3
    queue.reply["batch-2"][0] |= {"status": "expired", "error_file_id": "expired"}
    expired = batch()
    assert expired.returncode == 2 and "1 requests came back without" in expired.stderr
    batch()
    assert queue.asked[2:] == [[three]]
    queue.reply["output"] = [reply(three, response=DONE)]
    queue.reply["batch-3"][0] |= ended
    facts(batch("--wait --interval 0.1"))
    assert not list(toy.rglob("*.batches.json*"))
    assert ids_in(replies.read_text()) == [one, two, "x", three]
    assert "'failed': 1" in call(*STAGE, cwd=toy).stderr
    batch("--retry-errors")
    assert queue.asked[3:] == [[two]]


def test_a_call_creates_only_the_batches_that_a_kill_has_prevented(toy, batch, queue):
    command = [sys.executable, ROOT / "recipes/tools/openai_batch.py", f"{AT}.requests.jsonl"]
    with subprocess.Popen([*command, "--max-requests", "2"], cwd=toy) as queue.victim:
        pass
    assert queue.victim.returncode == -9
    queue.victim = None
    batch(f"--replies {AT}.other")  # another file has its own batches
    batch()
    assert queue.asked[1] == queue.asked[3] == queue.asked[4]
    assert len(queue.asked) == 5


def test_what_a_full_queue_has_refused_is_sent_again_and_other_reasons_are_named(batch, queue):
    def failed(code):
        return {"status": "failed", "errors": {"data": [{"code": code, "message": KEY}]}}

    for number, code in ((1, "model_not_found"), (3, FULL)):
        for name in (f"batch-{number}", f"batch-{number + 1}"):
            queue.reply[name] = [{"id": name} | failed(code)]
        done = batch("--wait")
        assert done.returncode == 2 and code in done.stderr.split("error: ")[1]
        assert ("call again" in done.stderr) == (code == FULL) and KEY not in done.stderr
    (one, two), (three,) = queue.asked[2:]
    queue.reply["output"] = [reply(name, response=DONE) for name in (one, two)]
    done = {"status": "completed", "output_file_id": "output"}
    queue.reply["batch-5"] = [{"id": "batch-5"} | done]
    queue.reply["batch-6"] = [{"id": "batch-6"} | failed(FULL)]
    queue.reply["other"] = [reply(three, response=DONE)]
    queue.reply["batch-7"] = [{"id": "batch-7"} | done | {"output_file_id": "other"}]
    assert facts(batch("--wait --interval 0.1"))["sent"] == 3
    assert queue.asked[6:] == [[three]]


def test_keys_are_shown_nowhere(toy, batch, queue, monkeypatch, contents):
    address = queue.url.replace("//", "//user:pa55w0rd@")
    monkeypatch.setenv("LLM_BASE_URL", address)
    batch()
    queue.reply["batch-1"][0]["errors"] = {"data": [{"message": f"{KEY} at {address}"}]}
    done = batch()
    assert "*** at http://***@127.0.0.1" in done.stderr
    queue.reply["batch-1"] = []  # which is no JSON
    failed = batch()
    assert "error: http://***@127.0.0.1" in failed.stderr
    said = done.stderr + failed.stderr + str(contents(toy))
    assert KEY not in said and "pa55w0rd" not in said


def test_a_batch_is_limited_in_bytes():
    pieces_of = load("recipes/tools/openai_batch.py").pieces_of
    requests = {name: name * 10 for name in "abc"}  # lines of 13 bytes
    assert [len(piece) for piece in pieces_of(requests, 9, 26)] == [2, 1]
