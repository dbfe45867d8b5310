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
def served():
    """The address of a server that loads the model that a request names."""
    pytest.importorskip("fastapi")
    with socket.create_server(("127.0.0.1", 0)) as free:
        _, port = free.getsockname()
    words = f"-m transformers.cli.transformers serve --host 127.0.0.1 --port {port} --device cpu"
    with subprocess.Popen([sys.executable, *words.split()]) as server:
        for _ in range(6000):  # ten minutes, on a busy machine
            try:
                urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:  # not yet
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
        server.kill()


def test_a_real_server_orders_and_labels(toy, call, served):
    asked = f"--run {RUN} --base-url {served} --timeout 30 --model"
    tokenizer = Path(tiny_llm(toy / "bytes"))
    KIT.write_llm(tokenizer, toy / "order", "[2] > [1]")
    done = call("04_llm_rerank.py", f"{asked} {toy}/order --alpha 0", cwd=toy)
    assert facts(done)["unread"] == 0
    before = read(toy / RUN).query("rank == 2")["abstract_id"]
    after = read(toy / "work/demo/test/llm.tsv").query("rank == 1")["abstract_id"]
    assert list(before) == list(after)
    KIT.write_llm(tokenizer, toy / "label", "REFUTES")
    made = facts(call("05_classify.py", f"llm {asked} {toy}/label", cwd=toy))
    assert made["unread"] == 0 and made["labels"]["REFUTES"] == made["pairs"]
