"""recipes/on_ray.py: shards give the bytes of one machine, whatever dies (bad_recipes.tsv, too)."""

import contextlib
import json
import shutil
import subprocess
import sys
import time

import pandas as pd
import psutil
import pytest
from conftest import NLI, ROOT, facts, read, records, tiny

ALONE = "--batch-size 1 --max-length"  # no padding to other texts: equal bytes
JOBS = {
    "index": ("01_index.py", f"--indexes dense splade {ALONE} 16"),
    "retrieve": ("02_retrieve.py", "--retrievers dense splade"),
    "rerank": ("03_rerank.py", f"--model reranker --depth 7 {ALONE} 64"),
    "classify": ("05_classify.py", f"--model nli {ALONE} 64"),
}
BM25 = {"index": "--indexes bm25", "retrieve": "--retrievers bm25 --top-k 30"}


@pytest.fixture
def folder(toy):
    """The toy with the demo's data; work/one and work/many."""
    shutil.copytree(ROOT / "data/demo", toy / "data/demo", dirs_exist_ok=True)
    return toy


def shorten(folder, abstracts):
    """Leave so many abstracts, and 8 claims, for speed."""
    for name, rows in (("corpus.jsonl", abstracts), ("claims.test.tsv", 9)):
        path = folder / "data/demo" / name
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:rows]))


@pytest.fixture
def here(folder, program, warm, monkeypatch):
    """here("index --only 1/2"): on_ray.py in this process, its scripts in copies of one."""
    monkeypatch.setenv("PATH", warm)
    monkeypatch.setattr(sys, "executable", "python")

    def call_here(text):
        job, *words = text.split()
        return program("on_ray", f"{job} --work work/many", *words, cwd=folder)

    return call_here


def array(here, job, shards, words):
    """Run a job shard by shard; 0 cuts the corpus before them, or merges behind them."""
    numbers = [*range(1, shards + 1), 0]
    if job == "index":
        numbers.sort()
    for number in numbers:
        assert facts(here(f"{job} --only {number}/{shards} -- {words}"))["job"] == job


def test_shards_of_all_jobs_give_the_bytes_of_one_machine(folder, here, call):
    tiny(folder / "reranker", ["relevant"])
    tiny(folder / "nli", NLI)
    shorten(folder, 66)
    for job, (script, words) in JOBS.items():
        facts(call(script, f"--work work/one {words}", cwd=folder))
        array(here, job, 2, words)
    for name in ("dense", "splade", "hybrid", "rerank", "verdicts"):
        one = (folder / f"work/one/test/{name}.tsv").read_bytes()
        many = (folder / f"work/many/test/{name}.tsv").read_bytes()
        assert one == many and len(one) > 500, name


def test_a_job_array_cuts_and_merges(folder, here):
    for job, words in BM25.items():
        array(here, job, 3, words)
    merged = read(folder / "work/many/test/bm25.tsv").sort_values("claim_id", kind="stable")
    runs = [read(folder / f"work/many/shards-3/{number}/test/bm25.tsv") for number in (1, 2, 3)]
    rows = pd.concat(runs).sort_values("score", ascending=False, kind="stable")  # ties: by shard
    best = rows.groupby("claim_id").head(30).sort_values("claim_id", kind="stable")
    assert merged["abstract_id"].tolist() == best["abstract_id"].tolist()
    corpus = folder / "data/demo/corpus.jsonl"
    found = set(merged["abstract_id"])
    candidates = [record for record in records(corpus) if record["abstract_id"] in found]
    assert records(folder / "work/many/test/candidates.jsonl") == candidates
    whole = corpus.read_bytes()
    shorten(folder, 304)
    retrieve = f"retrieve --only {{}}/3 -- {BM25['retrieve']}"
    [error] = here(retrieve.format(0)).stderr.splitlines()
    assert error.startswith("error: ") and "shards-3 was cut from" in error
    corpus.write_bytes(whole)
    facts(here(retrieve.format(2)))
    made = facts(here(retrieve.format(0)))["shards"]  # of the other claims: made again
    assert [len(made[number]["made"]) for number in "123"] == [1, 0, 1]


def test_without_ray_one_line_names_it(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "error: ray: not installed; pip install ray==" in here("index").stderr


@pytest.fixture
def cluster():
    """A Ray cluster of two nodes with one core each."""
    Cluster = pytest.importorskip("ray.cluster_utils").Cluster
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    yield cluster
    cluster.shutdown()


def start(folder, cluster, job):
    """Start a job on four shards on a cluster."""
    words = f"{job} --work work/many --shards 4 --address {cluster.address} -- {BM25[job]}"
    command = [sys.executable, ROOT / "recipes/on_ray.py", *words.split()]
    return subprocess.Popen(
        command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def script_on(node, driver):
    """Wait for a script on a node, as long as the driver that asked for it runs."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    while driver.poll() is None:
        for process in raylet.children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended since it was listed
                if "01_index.py" in " ".join(process.cmdline()):
                    return process
        time.sleep(0.05)
    raise AssertionError(f"no script ran on the node: {driver.communicate()}")


def test_an_index_is_whole_though_a_script_and_a_node_die(folder, cluster, here):
    shorten(folder, 130)
    process = start(folder, cluster, "index")
    script_on(cluster.head_node, process).kill()
    [other] = cluster.worker_nodes
    script_on(other, process)
    cluster.remove_node(other, allow_graceful=False)
    cluster.add_node(num_cpus=1)
    out, _ = process.communicate()
    assert list(json.loads(out.splitlines()[-1])["shards"]) == list("1234")
    start(folder, cluster, "retrieve").communicate()
    run = folder / "work/many/test/bm25.tsv"
    made = run.read_bytes()
    shutil.rmtree(folder / "work/many")
    for job, words in BM25.items():
        array(here, job, 4, words)
    assert run.read_bytes() == made and len(made) > 500
    shutil.rmtree(folder / "work/many")
    corpus = folder / "data/demo/corpus.jsonl"
    lines = corpus.read_text(encoding="utf-8").splitlines()
    lines[100] = "{"
    corpus.write_text("\n".join(lines), encoding="utf-8")
    process = start(folder, cluster, "index")
    _, errors = process.communicate()
    said = "error: shard 4: work/many/shards-4/4/corpus.jsonl:"
    assert process.returncode == 2 and errors.splitlines()[-1].startswith(said)
    kept = sorted(folder.glob("work/many/shards-4/*/index/bm25/meta.json"))
    assert [path.parts[-4] for path in kept] == list("123")
