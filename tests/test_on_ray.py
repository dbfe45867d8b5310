"""recipes/on_ray.py: shards give the bytes of one machine, whatever dies; bad input is one line."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time

import pandas as pd
import psutil
import pytest
from conftest import ROOT, facts, read, tiny

ALONE = "--batch-size 1 --max-length"  # no padding to other texts: equal bytes
BM25 = {"index": "--indexes bm25", "retrieve": "--retrievers bm25 --top-k 30"}
JOBS = {
    "index": ("01_index.py", f"--indexes dense splade {ALONE} 16"),
    "retrieve": ("02_retrieve.py", "--retrievers dense splade"),
    "rerank": ("03_rerank.py", f"--model reranker --depth 7 {ALONE} 64"),
    "classify": ("05_classify.py", f"--model nli {ALONE} 64"),
}


@pytest.fixture
def folder(tmp_path, models):
    """A folder with the demo's data and the models; work/one and work/many."""
    shutil.copytree(ROOT / "data" / "demo", tmp_path / "data" / "demo")
    (tmp_path / "data" / "models").symlink_to(models)
    return tmp_path


def start(folder, text, **env):
    """Start on_ray.py with the words of a text, the first of which is the job."""
    job, *words = text.split()
    program = str(ROOT / "recipes/on_ray.py")
    command = [sys.executable, program, job, "--work", "work/many", *words]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def result(status, out, err):
    """Return the last line of a script as JSON, or its one line of an error."""
    assert status in (0, 2) and "Traceback" not in err, err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    if status == 0:
        assert not errors, err
        return json.loads(out.splitlines()[-1])
    assert len(errors) == 1, err
    return errors[0]


def end(process):
    out, err = process.communicate()
    return result(process.returncode, out, err)


def on_ray(folder, text, **env):
    return end(start(folder, text, **env))


def shorten(folder, abstracts):
    """Leave so many abstracts, and 8 claims, for speed."""
    for name, rows in (("corpus.jsonl", abstracts), ("claims.test.tsv", 9)):
        path = folder / "data/demo" / name
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:rows]))


def same(folder, name):
    one = folder / "work/one" / name
    many = folder / "work/many" / name
    return one.read_bytes() == many.read_bytes() and one.stat().st_size > 500


@pytest.fixture
def here(folder, program, warm, monkeypatch):
    """here("index --only 1/2"): on_ray.py in this process, its scripts in copies of one."""
    monkeypatch.setenv("PATH", warm)
    monkeypatch.setattr(sys, "executable", "python")

    def call_here(text):
        job, *words = text.split()
        done = program("on_ray", f"{job} --work work/many", *words, cwd=folder)
        return result(done.returncode, done.stdout, done.stderr)

    return call_here


def test_shards_of_all_jobs_give_the_bytes_of_one_machine(folder, here, call):
    tiny(folder / "reranker", ["relevant"])
    tiny(folder / "nli", ["contradiction", "neutral", "entailment"])
    shorten(folder, 66)
    for job, (script, words) in JOBS.items():
        facts(call(script, f"--work work/one {words}", cwd=folder))
        numbers = (0, 1, 2) if job == "index" else (1, 2, 0)  # index cuts, the others merge
        for number in numbers:
            assert here(f"{job} --only {number}/2 -- {words}")["job"] == job
    for name in ("dense", "splade", "hybrid", "rerank", "verdicts"):
        assert same(folder, f"test/{name}.tsv"), name


def test_a_job_array_cuts_and_merges_and_bad_input_is_one_line(folder, here, monkeypatch):
    def shard(job, number):
        return here(f"{job} --only {number}/3 -- {BM25[job]}")

    assert "share the folder" in shard("index", 2)  # not cut yet, or seen by another node only
    for job, numbers in (("index", (0, 1, 2, 3)), ("retrieve", (1, 2, 3, 0))):
        for number in numbers:
            assert shard(job, number)["job"] == job
    merged = read(folder / "work/many/test/bm25.tsv")
    runs = [read(folder / f"work/many/shards-3/{number}/test/bm25.tsv") for number in (1, 2, 3)]
    corpus = folder / "data/demo/corpus.jsonl"
    lines = corpus.read_bytes().splitlines(keepends=True)
    numbers = {json.loads(line)["abstract_id"]: number for number, line in enumerate(lines)}
    rows = pd.concat(runs)
    rows["line"] = rows["abstract_id"].map(numbers)
    rows = rows.sort_values(["score", "line"], ascending=[False, True])
    for claim_id, best in merged.groupby("claim_id"):
        expected = rows[rows["claim_id"] == claim_id]["abstract_id"].head(30)
        assert best["abstract_id"].tolist() == expected.tolist()
    found = (folder / "work/many/test/candidates.jsonl").read_bytes().splitlines(keepends=True)
    assert 200 < len(found) < 305
    assert found == [line for line in lines if line in found]
    claims = folder / "data/demo/claims.test.tsv"
    claims.write_text("".join(claims.read_text().splitlines(keepends=True)[:10]))
    shard("retrieve", 2)
    made = shard("retrieve", 0)["shards"]  # what the other claims have made old is made again
    assert [len(made[number]["made"]) for number in "123"] == [1, 0, 1]
    assert read(folder / "work/many/test/bm25.tsv")["claim_id"].nunique() == 9
    corpus.write_bytes(b"".join(lines[:-1]))
    assert "shards-3 was cut from" in shard("index", 0)
    corpus.write_bytes(b"".join(lines))
    run = "work/many/test/bm25.tsv"
    for words, said in {
        "index --shards 400": "305 abstracts for 400 shards",
        "index --only 4/3": "I from 0",
        "retrieve --only 0/2": "run index with the same --shards first",
        f"rerank --only 1/26 --run {run}": "9 claims",
        "index -- --out=x": "not allowed behind --",
        "rerank --only 1/2": "work/many/test/hybrid.tsv: [Errno 2]",
    }.items():
        assert said in here(words)
    (folder / "ray.py").write_text("raise ImportError")
    monkeypatch.undo()
    assert "pip install ray==" in on_ray(folder, "index", PYTHONPATH=str(folder))


@pytest.fixture
def cluster():
    """A Ray cluster of two nodes with one core each."""
    Cluster = pytest.importorskip("ray.cluster_utils").Cluster
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    yield cluster
    cluster.shutdown()


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
    at = f"--shards 4 --address {cluster.address} --"
    process = start(folder, f"index {at} {BM25['index']}")
    script_on(cluster.head_node, process).kill()
    (other,) = cluster.worker_nodes
    script_on(other, process)
    cluster.remove_node(other, allow_graceful=False)
    cluster.add_node(num_cpus=1)
    assert list(end(process)["shards"]) == list("1234")
    on_ray(folder, f"retrieve {at} {BM25['retrieve']}")
    run = folder / "work/many/test/bm25.tsv"
    made = run.read_bytes()
    shutil.rmtree(folder / "work/many")
    for number in range(5):  # index cuts
        here(f"index --only {number}/4 -- {BM25['index']}")
    for number in (*range(1, 5), 0):  # retrieve merges
        here(f"retrieve --only {number}/4 -- {BM25['retrieve']}")
    assert run.read_bytes() == made and len(made) > 500
    shutil.rmtree(folder / "work/many")
    corpus = folder / "data/demo/corpus.jsonl"
    lines = corpus.read_bytes().splitlines(keepends=True)
    corpus.write_bytes(b"".join([*lines[:100], b"{\n", *lines[101:]]))
    said = on_ray(folder, f"index {at} {BM25['index']}")
    assert said.startswith("error: shard 4: work/many/shards-4/4/corpus.jsonl:")
    kept = sorted(folder.glob("work/many/shards-4/*/index/bm25/meta.json"))
    assert [path.parts[-4] for path in kept] == list("123")
