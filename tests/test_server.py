"""04 and 05 over HTTP, answered by a server that is not ours: transformers serve."""

import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

import pytest
from conftest import facts, load, read, tiny_llm

RUN = "work/demo/test/hybrid.tsv"
KIT = load("recipes/tools/stand_in.py")


@pytest.fixture
def served(tmp_path):
    """The address of a server that loads the model that a request names."""
    pytest.importorskip("fastapi")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    words = ["serve", "--host", "127.0.0.1", "--port", port, "--device", "cpu"]
    command = [sys.executable, "-m", "transformers.cli.transformers", *words]
    log = tmp_path / "server.log"
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file) as server:
        for _ in range(600):  # a minute
            try:
                urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:  # not yet
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
        server.kill()
    print(log.read_text())  # shown where a test fails


def test_a_real_server_orders_and_labels(toy, call, served):
    asked = ("--run", RUN, "--base-url", served, "--timeout", 30, "--model")
    tokenizer = Path(tiny_llm(toy / "bytes"))
    KIT.write_llm(tokenizer, toy / "order", "[2] > [1]")
    done = call("04_llm_rerank.py", *asked, toy / "order", "--alpha", 0, cwd=toy)
    assert facts(done)["unread"] == 0
    before = read(toy / RUN).query("rank == 2")["abstract_id"]
    after = read(toy / "work/demo/test/llm.tsv").query("rank == 1")["abstract_id"]
    assert list(before) == list(after)
    KIT.write_llm(tokenizer, toy / "label", "REFUTES")
    done = call("05_classify.py", "llm", *asked, toy / "label", cwd=toy)
    assert facts(done)["unread"] == 0
    assert set(read(toy / "work/demo/test/llm_verdicts.tsv")["label"]) == {"REFUTES"}
