"""recipes/tools/openai_batch.py against OpenAI's queue, scripted: files and batches over HTTP."""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from conftest import ROOT, facts, jsonl, load

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
    body = {"choices": [{"message": {"content": "[2] > [1]"}}]}
    return {"custom_id": custom_id, "response": {"body": body}, "error": error}


def test_batches_are_sent_looked_up_and_fetched_once(toy, batch, queue, call, contents):
    first = batch()
    assert first.returncode == 3 and json.loads(first.stdout.splitlines()[-1])["sent"] == 3
    assert "sending 3 requests" in first.stdout and "in 2 batches" in first.stdout
    assert batch().returncode == 3
    (one, two), (three,) = queue.files  # no third
    (toy / f"{AT}.replies.jsonl").write_text('{"torn": ')
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
    _, *lines = (toy / f"{AT}.replies.jsonl").read_text().splitlines()
    assert [json.loads(line)["custom_id"] for line in lines if line != "7"] == [
        one,
        two,
        "x",
        three,
    ]
    assert KEY not in str(contents(toy)) + first.stdout + expired.stderr
    done = call(*STAGE, cwd=toy)
    assert facts(done)["rows"] and "of 3 replies, 1 refused" in done.stderr
    assert batch("--retry-errors").returncode == 3
    assert queue.files[3:] == [[two]]


def test_a_call_creates_only_the_batches_that_a_kill_has_prevented(toy, batch, queue):
    command = [sys.executable, ROOT / "recipes/tools/openai_batch.py", f"{AT}.requests.jsonl"]
    with subprocess.Popen([*command, "--max-requests", "2"], cwd=toy) as queue.victim:
        pass
    assert queue.victim.returncode == -9
    queue.victim = None
    assert batch().returncode == 3
    assert queue.files[1] == queue.files[2]
    assert list(queue.found) == ["batch-1", "batch-3"]


def test_what_cannot_be_sent_is_one_line(toy, program, refused, monkeypatch):
    jsonl(toy / "requests.jsonl", {"custom_id": "1", "body": {"messages": []}})
    words = ("tools/openai_batch", "requests.jsonl")
    refused(toy, *words, said="OPENAI_API_KEY: not set", by=program)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    refused(toy, *words, said="requests.jsonl:1: no request that names a model", by=program)


def test_numbers_out_of_range_and_replies_in_the_place_of_requests_are_refused(
    toy, program, refused, queue
):
    request = {"custom_id": "1", "body": {"model": "toy", "messages": [{"role": "user"}]}}
    jsonl(toy / "requests.jsonl", request)
    words = ("tools/openai_batch", "requests.jsonl --replies ./requests.jsonl")
    refused(toy, *words, said="--replies: ./requests.jsonl holds the requests", by=program)
    for flag in ("--max-requests", "--interval"):
        words = ("tools/openai_batch", f"requests.jsonl {flag} 0")
        refused(toy, *words, said=f"{flag}: 0", by=program)
    assert queue.files == []


def test_files_of_others_and_batches_of_other_replies_are_kept(toy, batch, queue):
    other = toy / f"{AT}.replies.batches.json.tmp"
    other.write_text("mine")
    assert batch().returncode == 3
    assert batch(f"--replies {AT}.one").returncode == 3
    assert batch(f"--replies {AT}.two").returncode == 3
    assert len(queue.files) == 6  # two batches for each of the three files
    assert other.read_text() == "mine"
    assert len(list(toy.rglob("*.batches.json"))) == 3


def test_keys_are_shown_nowhere(toy, batch, queue, monkeypatch, contents):
    address = f"http://user:pa55w0rd@127.0.0.1:{queue.server_port}/v1"
    monkeypatch.setenv("LLM_BASE_URL", address)
    assert batch().returncode == 3
    queue.found["batch-1"][0]["errors"] = {"data": [{"message": f"{KEY} or pa55w0rd is wrong"}]}
    done = batch()
    assert done.returncode == 3 and "*** or *** is wrong" in done.stderr
    queue.found["batch-1"] = []  # which is no JSON
    failed = batch()
    assert failed.returncode == 2 and "error: http://***@127.0.0.1" in failed.stderr
    said = done.stderr + failed.stderr + failed.stdout + batch("--help").stdout
    for secret in (KEY, "pa55w0rd"):
        assert secret not in said + str(contents(toy))


def test_a_batch_is_limited_in_bytes():
    pieces_of = load("recipes/tools/openai_batch.py").pieces_of
    requests = {name: name * 10 for name in "abc"}  # lines of 13 bytes
    assert [len(piece) for piece in pieces_of(requests, 9, 26)] == [2, 1]
