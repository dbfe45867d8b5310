"""Fixtures: scripts alone in a folder with their inputs, toy data, small models, an endpoint."""
import contextlib
import json
import os
import runpy
import shutil
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SECRETS = ("OPENAI_API_KEY", "LLM_BASE_URL", "LLM_MODEL")

ABSTRACTS = {  # what the toy claims are about, and what only sounds like it
    "0001": "Body mass of polar bears in Hudson Bay fell by a tenth as the ice-free season grew.",
    "0002": "Ursus maritimus fasts longer and weighs less where sea ice breaks up early.",
    "0003": "Polar bears in zoos prefer cold pools to warm ones, a study of captivity shows.",
    "0004": "Solar irradiance has not risen since 1980 while the surface warmed by 0.8 degrees.",
    "0005": "Satellite measurements of the sun show cycles of eleven years and no upward trend.",
    "0006": "A survey of what people believe about the sun and warming in twelve countries.",
    "0007": "Sea level rose by 3.7 millimetres a year since 2006, faster than before.",
    "0008": "Altimeters find that the rise of the ocean surface accelerates.",
    "0009": "A new tide gauge for measuring sea level on rocky coasts is described.",
    "0010": "Wheat grown with more carbon dioxide holds less zinc and protein.",
    "0011": "Farmers in Kenya adopt drought-tolerant maize when credit is at hand.",
    "0012": "Glaciers of the Alps lost a third of their volume in twenty years.",
}
CLAIMS = {
    "train": {"c1": "More CO2 makes wheat less nutritious",
              "c2": "Alpine glaciers are melting away #Alps"},
    "test": {"c3": "Polar bears are starving!!", "c4": "It's the sun, stupid",
             "c5": "sea level rise is NOT accelerating"},
}
RUN = ["claim_id", "abstract_id", "rank", "score"]
QRELS = {
    "c1": {"0010": "SUPPORTS", "0011": "NEI"},
    "c2": {"0012": "SUPPORTS", "0009": "NEI", "0004": "REFUTES"},
    "c3": {"0001": "SUPPORTS", "0002": "SUPPORTS", "0003": "NEI"},
    "c4": {"0004": "REFUTES", "0005": "REFUTES", "0006": "NEI"},
    "c5": {"0007": "REFUTES", "0008": "REFUTES", "0009": "NEI"},
}

def tsv(path, header, rows):
    """Write rows, and their header, as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["\t".join(header), *("\t".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")

def fetch_models():
    """data/download.py models: nothing to do where they are at hand."""
    command = [sys.executable, str(ROOT / "data" / "download.py"), "models"]
    return subprocess.run(command, capture_output=True, text=True, check=False)

def pytest_sessionstart(session):
    """Fetch the models once before tests run in parallel; each worker keeps to one core."""
    if hasattr(session.config, "workerinput"):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    else:
        fetch_models()

@pytest.fixture(scope="session")
def models():
    """data/models/ with minilm, splade-tiny and smollm2; fetched where they are not at hand yet."""
    done = fetch_models()
    assert done.returncode == 0, done.stderr
    return ROOT / "data" / "models"

@pytest.fixture(scope="session")
def smollm(models, tmp_path_factory):
    """SmolLM2 as a folder of transformers, as its GGUF file takes half a minute to unpack."""
    from filelock import FileLock
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place, file = tmp_path_factory.getbasetemp(), next((models / "smollm2").glob("*.gguf"))
    place = place.parent if "PYTEST_XDIST_WORKER" in os.environ else place
    folder = place / "smollm2"
    with FileLock(place / "smollm2.lock"):  # once for both sides
        if not (folder / "model.safetensors").exists():
            AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
            unpacked = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
            unpacked.config.__dict__.pop("quantization_config", None)
            model = AutoModelForCausalLM.from_config(unpacked.config)
            model.load_state_dict(unpacked.state_dict())
            model.save_pretrained(folder)
    return folder

@pytest.fixture
def toy(tmp_path, models):
    """A folder with data/demo/ (12 abstracts, 5 claims), data/models, a hybrid run per split."""
    data = tmp_path / "data" / "demo"
    data.mkdir(parents=True)
    (tmp_path / "data" / "models").symlink_to(models)
    with open(data / "corpus.jsonl", "w", encoding="utf-8") as file:
        for name, text in ABSTRACTS.items():
            file.write(json.dumps({"abstract_id": name, "title": "", "abstract": text}) + "\n")
    for split, claims in CLAIMS.items():
        tsv(data / f"claims.{split}.tsv", ["claim_id", "claim"], claims.items())
        judged = [(claim, name, label) for claim in claims for name, label in QRELS[claim].items()]
        tsv(data / f"qrels.{split}.tsv", ["claim_id", "abstract_id", "label"], judged)
        rows = []
        for claim in claims:
            unjudged = [name for name in ABSTRACTS if name not in QRELS[claim]]
            for rank, name in enumerate([*reversed(QRELS[claim]), *unjudged][:6], 1):
                rows.append((claim, name, rank, round(1 / rank, 4)))
        tsv(tmp_path / "work" / "demo" / split / "hybrid.tsv", RUN, rows)
    return tmp_path

@pytest.fixture
def run():
    """run("02_retrieve.py", "--top-k", 5, cwd=folder): the script, copied alone into folder."""

    def run_script(script, *args, cwd, env=None):
        shutil.copy(ROOT / script, cwd)
        clean = {key: value for key, value in os.environ.items() if key not in SECRETS}
        clean |= {"HF_HUB_OFFLINE": "1", **(env or {})}
        words = [sys.executable, Path(script).name, *map(str, args)]
        how = {"capture_output": True, "text": True, "check": False}
        return subprocess.run(words, cwd=cwd, env=clean, **how)

    return run_script

@pytest.fixture
def load(monkeypatch):
    """load("02_retrieve.py"): the names of a script, without running it."""

    def load_script(script):
        monkeypatch.setattr(sys, "argv", [script])
        return runpy.run_path(str(ROOT / script))

    return load_script

@pytest.fixture
def contents():
    """contents(folder): {path: bytes} of its files without links, to see what a call changed."""

    def read(folder):
        found = {}
        for path in sorted(Path(folder).rglob("*")):
            aside = path.is_symlink() or "models" in path.parts or path.suffix == ".py"
            if path.is_file() and not aside:
                found[str(path.relative_to(folder))] = path.read_bytes()
        return found

    return read

@pytest.fixture
def refused(contents):
    """refused(done, before, folder, *words): exit 2, one error line, no file touched."""

    def check(done, before, folder, *words):
        assert done.returncode == 2, done.stderr
        errors = [line for line in done.stderr.splitlines() if not line.startswith("warning:")]
        assert len(errors) == 1 and errors[0].startswith("error: "), done.stderr
        assert "Traceback" not in done.stderr
        for word in words:
            assert str(word) in errors[0], errors[0]
        assert contents(folder) == before

    return check

class Endpoint:
    """An OpenAI-compatible server on this machine, which answers what reply(prompt) returns.

    That is a text, (status, text), or a dict of status, text, headers, raw (bytes in place of a
    completion), logprobs, sleep (seconds before it answers), drop (hang up without an answer).
    """

    def __init__(self, reply, delay=0):
        self.asked, self.answered, endpoint = [], [], self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                prompt = body["messages"][-1]["content"]
                key = self.headers["Authorization"]
                endpoint.asked.append({"path": self.path, "key": key, **body})
                time.sleep(delay)
                answer = reply(prompt)
                if isinstance(answer, str):
                    answer = {"text": answer}
                if isinstance(answer, tuple):
                    answer = dict(zip(("status", "text"), answer))
                time.sleep(answer.get("sleep", 0))
                if answer.get("drop"):
                    self.close_connection = True
                    return self.connection.close()
                status, text = answer.get("status", 200), answer.get("text")
                whole = {"error": {"message": text, "code": answer.get("code")}}
                if status == 200:
                    message = {"role": "assistant", "content": text}
                    choice = {"index": 0, "finish_reason": "stop", "message": message,
                              "logprobs": answer.get("logprobs")}
                    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
                    whole = {"choices": [choice], "id": "1", "object": "chat.completion",
                             "created": 0, "model": body["model"], "usage": usage}
                data = answer.get("raw") or json.dumps(whole).encode()
                if status == 200 and not answer.get("raw"):
                    endpoint.answered.append(prompt)
                with contextlib.suppress(OSError):  # the other side may be gone
                    self.send_response(status)
                    headers = {"Content-Type": "application/json"} | answer.get("headers", {})
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

@pytest.fixture
def endpoint():
    """endpoint(reply, delay): a running Endpoint; all of them stop with the test."""
    running = []

    def start(reply, delay=0):
        running.append(Endpoint(reply, delay))
        return running[-1]

    yield start
    for one in running:
        one.server.shutdown()
        one.server.server_close()
