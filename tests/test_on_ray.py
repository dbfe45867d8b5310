"""recipes/on_ray.py: shards give the bytes of one machine, whatever dies; bad input is one line."""
import json
import os
import shutil
import subprocess
import sys
import time

import psutil
import pytest
from conftest import ROOT
from test_05_classify import NLI, tiny

MODELS = ("--max-length", 32, "--batch-size", 1)  # one text a batch: no padding, equal bytes
BM25 = {"index": ("--indexes", "bm25"), "retrieve": ("--retrievers", "bm25", "--top-k", 30)}
SMALL = {"index": ("--indexes", "dense", "splade", *MODELS),
         "retrieve": ("--retrievers", "dense", "splade"),
         "rerank": ("--model", "reranker", "--depth", 7, "--first-stage", 0.5, *MODELS),
         "classify": ("--run", "work/one/test/rerank.tsv", "--model", "nli", *MODELS)}
SCRIPTS = {"index": "01_index.py", "retrieve": "02_retrieve.py", "rerank": "03_rerank.py",
           "classify": "05_classify.py"}

@pytest.fixture
def folder(tmp_path, models):
    """A folder with the demo's data and the models."""
    shutil.copytree(ROOT / "data" / "demo", tmp_path / "data" / "demo")
    (tmp_path / "data" / "models").symlink_to(models)
    return tmp_path

def started(folder, script, *words, **env):
    command = [sys.executable, str(ROOT / script), *map(str, words)]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | env
    return subprocess.Popen(command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)

def call(*words, status=0, **env):
    """Run a script to its end. Return its last line as JSON, or its one error line."""
    process = started(*words, **env)
    out, err = process.communicate()
    assert process.returncode == status, err
    if status == 0:
        return json.loads(out.splitlines()[-1])
    error, = (line for line in err.splitlines() if line.startswith("error: "))
    assert "Traceback" not in err
    return error

def on_ray(folder, job, *words, **how):
    return call(folder, "recipes/on_ray.py", job, "--work", "work/many", *words, **how)

def same(folder, name):
    one, many = (folder / "work" / work / "test" / name for work in ("one", "many"))
    return one.read_bytes() == many.read_bytes() and one.stat().st_size > 500

# ---------------------------------------------------------------- Without Ray
def test_a_job_array_cuts_and_merges_and_bad_input_is_one_line(folder):
    corpus = folder / "data/demo/corpus.jsonl"
    lines = corpus.read_bytes().splitlines(keepends=True)

    def shard(job, number, **how):
        return on_ray(folder, job, "--only", f"{number}/3", "--", *BM25[job], **how)

    assert "share the folder" in shard("index", 2, status=2)  # not cut, or not shared
    corpus.write_bytes(b"\n" + b"".join(lines))  # a blank line is no abstract
    for job, numbers in (("index", (0, 1, 2, 3)), ("retrieve", (1, 2, 3, 0))):
        for number in numbers:
            shard(job, number)
    runs = [f"work/many/shards-3/{number}/test/bm25.tsv" for number in (1, 2, 3)]
    call(folder, "02_retrieve.py", "fuse", *runs, "--method", "top", "--top-k", 30, "--corpus",
         corpus, "--out", "work/one/test/bm25.tsv")
    assert same(folder, "bm25.tsv")
    found = (folder / "work/many/test/candidates.jsonl").read_bytes().splitlines(keepends=True)
    assert 200 < len(found) < 305 and found == [line for line in lines if line in found]
    corpus.write_bytes(b"".join(lines[:-1]))
    assert "shards-3 was cut from" in shard("index", 0, status=2)
    assert "304 abstracts for 400 shards" in on_ray(folder, "index", "--shards", 400, status=2)
    assert "25 claims" in on_ray(folder, "rerank", "--only", "1/26", "--run", runs[0], status=2)
    for words in (("--only", "4/3"), ("--shards", "0"), ("--", "--out=x"), ("--", "--k1", "nan")):
        on_ray(folder, "index", *words, status=2)
    (folder / "ray.py").write_text("raise ImportError")
    assert "pip install ray==" in on_ray(folder, "index", status=2, PYTHONPATH=str(folder))

# ---------------------------------------------------------------- On two nodes
def scripts_of(node):
    """Wait for a script on a node. Return its process."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    while True:
        for process in raylet.children(recursive=True):
            if "01_index.py" in " ".join(process.cmdline()):
                return process
        time.sleep(0.05)

@pytest.fixture
def cluster():
    """A Ray cluster of two nodes with one core each."""
    from ray.cluster_utils import Cluster
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    yield cluster
    cluster.shutdown()

def test_the_bytes_of_one_machine_though_a_script_and_a_node_die(folder, cluster):
    tiny(folder / "reranker", ["relevant"])
    tiny(folder / "nli", NLI)
    at = "--shards", 3, "--address", cluster.address
    for job, words in SMALL.items():
        call(folder, SCRIPTS[job], "--work", "work/one", *words)
    process = started(folder, "recipes/on_ray.py", "index", "--work", "work/many", *at, "--",
                      *SMALL["index"])
    head, other = cluster.head_node, *cluster.worker_nodes
    scripts_of(head).kill()
    scripts_of(other)
    cluster.remove_node(other, allow_graceful=False)
    cluster.add_node(num_cpus=1)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert list(json.loads(out.splitlines()[-1])["shards"]) == ["1", "2", "3"]
    assert "3/3" in err
    for job in ("retrieve", "rerank"):
        on_ray(folder, job, *at, "--", *SMALL[job])
    on_ray(folder, "classify", "--run", "work/many/test/rerank.tsv", *at, "--",
           *SMALL["classify"][2:])
    for name in ("dense", "splade", "hybrid", "rerank", "verdicts"):
        assert same(folder, f"{name}.tsv"), name
    shutil.rmtree(folder / "work/many")
    corpus = folder / "data/demo/corpus.jsonl"
    lines = corpus.read_bytes().splitlines(keepends=True)
    lines[210] = b'{"abstract_id": \n'
    corpus.write_bytes(b"\n".join([b"", *lines]))  # blank lines in between
    error = on_ray(folder, "index", *at, "--", *BM25["index"], status=2)
    assert error.startswith("error: data/demo/corpus.jsonl:422: not a JSON object")
    kept = sorted(folder.glob("work/many/shards-3/*/index/bm25/meta.json"))
    assert [path.parts[-4] for path in kept] == ["1", "2"]
