"""recipes/tools/openai_batch.py against OpenAI's queue, scripted: files and batches over HTTP."""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from conftest import ROOT, cells, facts, jsonl, load

AT = "work/demo/test/llm"
STAGE = ("04_llm_rerank.py", "--run work/demo/test/hybrid.tsv --model toy --backend none")
KEY = "sk-secret"


class Queue(BaseHTTPRequestHandler):
    """POST /files and /batches, GET /batches/ID and /files/ID/content.

    server.files: the custom_ids of each upload; server.found: {id of a batch or file: its lines};
    server.victim: killed at the second upload.
    """

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/v1/batches":
            batch_id = f"batch-{len(self.server.files)}"
            self.server.found[batch_id] = [{"id": batch_id, "status": "in_progress"}]
            return self.answer(*self.server.found[batch_id])
        lines = [line for line in body.splitlines() if line.startswith(b"{")]
        self.server.files.append([json.loads(line)["custom_id"] for line in lines])
        if self.server.victim and len(self.server.files) == 2:
            self.server.victim.kill()
        return self.answer({"id": "file"})

    def do_GET(self):
        self.answer(*self.server.found[self.path.split("/")[3]])

    def answer(self, *lines):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write("\n".join(map(json.dumps, lines)).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def queue(monkeypatch):
    with ThreadingHTTPServer(("127.0.0.1", 0), Queue) as server:
        server.files = []
        server.found = {}
        server.victim = None
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        monkeypatch.setenv("LLM_BASE_URL", f"http://127.0.0.1:{server.server_port}/v1")
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def batch(toy, call, program):
    """batch("..."): the program on three requests of 04, two of them in the first batch."""
    assert call(*STAGE, cwd=toy).returncode == 3
    words = f"{AT}.requests.jsonl --max-requests 2"
    return lambda more="": program("tools/openai_batch", f"{words} {more}", cwd=toy)


def reply(custom_id, error=None):
    response = {"body": {"choices": [{"message": {"content": "[2] > [1]"}}]}}
    return {"custom_id": custom_id, "response": None if error else response, "error": error}


def test_batches_are_sent_looked_up_and_fetched_once(toy, batch, queue, call):
    first = batch()
    assert first.returncode == 3 and json.loads(first.stdout.splitlines()[-1])["sent"] == 3
    assert "sending 3 requests" in first.stdout and "in 2 batches" in first.stdout
    assert batch().returncode == 3
    (one, two), (three,) = queue.files  # no third
    replies = toy / f"{AT}.replies.jsonl"
    replies.write_text('{"torn": ')
    queue.found["output"] = [reply(one)]
    queue.found["errors"] = [reply(two, {"code": "request_timeout"}), reply("x", "odd"), 7]
    queue.found["expired"] = [reply(three, {"code": "batch_expired"})]
    files = {"output_file_id": "output", "error_file_id": "errors"}
    queue.found["batch-1"][0] |= {"status": "completed", **files}
    assert batch().returncode == 3
    queue.found["batch-2"][0] |= {"status": "expired", "error_file_id": "expired"}
    expired = batch()
    assert expired.returncode == 2 and "1 requests came back without" in expired.stderr
    assert batch().returncode == 3
    assert queue.files[2:] == [[three]]
    queue.found["output"] = [reply(three)]
    queue.found["batch-3"][0] |= {"status": "completed", "output_file_id": "output"}
    facts(batch("--wait --interval 0.1"))
    assert not list(toy.rglob("*.batches.json*"))
    _, *lines = replies.read_text().splitlines()
    ids = [json.loads(line)["custom_id"] for line in lines if line != "7"]
    assert ids == [one, two, "x", three]
    done = call(*STAGE, cwd=toy)
    assert facts(done)["rows"] and "'failed': 1" in done.stderr
    assert batch("--retry-errors").returncode == 3
    assert queue.files[3:] == [[two]]


def test_a_call_creates_only_the_batches_that_a_kill_has_prevented(toy, batch, queue):
    command = [sys.executable, ROOT / "recipes/tools/openai_batch.py", f"{AT}.requests.jsonl"]
    with subprocess.Popen([*command, "--max-requests", "2"], cwd=toy) as queue.victim:
        pass
    assert queue.victim.returncode == -9
    queue.victim = None
    assert batch(f"--replies {AT}.other").returncode == 3  # another file has its own batches
    assert batch().returncode == 3
    assert queue.files[1] == queue.files[3] == queue.files[4]
    assert len(queue.files) == 5 and len(list(toy.rglob("*.batches.json"))) == 2


REFUSED = """requests.jsonl --replies ./requests.jsonl|./requests.jsonl holds the requests
    ; requests.jsonl --max-requests 0|--max-requests; requests.jsonl --interval 0|--interval
    ; nameless.jsonl|nameless.jsonl:1: no request that names a model"""


def test_what_cannot_be_sent_is_one_line(toy, program, refused, queue, monkeypatch):
    body = {"messages": [{"role": "user"}]}
    jsonl(toy / "nameless.jsonl", {"custom_id": "1", "body": body})
    jsonl(toy / "requests.jsonl", {"custom_id": "1", "body": body | {"model": "toy"}})
    for words, said in cells(REFUSED):
        refused(toy, "tools/openai_batch", words, said=said, by=program)
    monkeypatch.delenv("OPENAI_API_KEY")
    monkeypatch.delenv("LLM_BASE_URL")
    refused(toy, "tools/openai_batch", "requests.jsonl", said="OPENAI_API_KEY: not", by=program)
    assert queue.files == []


def test_keys_are_shown_nowhere(toy, batch, queue, monkeypatch, contents):
    address = f"http://user:pa55w0rd@127.0.0.1:{queue.server_port}/v1"
    monkeypatch.setenv("LLM_BASE_URL", address)
    assert batch().returncode == 3
    queue.found["batch-1"][0]["errors"] = {"data": [{"message": f"{KEY} at {address}"}]}
    done = batch()
    assert done.returncode == 3 and "*** at http://***@127.0.0.1" in done.stderr
    queue.found["batch-1"] = []  # which is no JSON
    failed = batch()
    assert failed.returncode == 2 and "error: http://***@127.0.0.1" in failed.stderr
    said = done.stderr + failed.stderr + batch("--help").stdout + str(contents(toy))
    assert KEY not in said and "pa55w0rd" not in said


def test_a_batch_is_limited_in_bytes():
    pieces_of = load("recipes/tools/openai_batch.py").pieces_of
    requests = {name: name * 10 for name in "abc"}  # lines of 13 bytes
    assert [len(piece) for piece in pieces_of(requests, 9, 26)] == [2, 1]
