# /// script
# requires-python = ">=3.11"
# dependencies = ["PyStemmer==3.1.0", "accelerate==1.15.0", "bm25s==0.3.16", "numpy==2.4.6",
#   "pandas==3.1.1", "protobuf==7.36.2", "ray==2.60.0", "sentence-transformers==6.2.0",
#   "sentencepiece==0.2.3", "torch==2.13.0", "tqdm==4.70.1", "transformers==5.23.0"]
# ///
"""
Run stages 1, 2, 3 and 5 on many machines: cut corpus or run into shards, start the scripts, merge.

index     cuts corpus.jsonl into --shards, in blocks of neighbouring abstracts; 01_index.py for each
retrieve  02_retrieve.py for each shard; merges the best rows by retriever, and fuses them (RRF)
rerank    cuts --run into shards by claims; 03_rerank.py for each; joins their outputs
classify  the same with 05_classify.py

Words behind -- go to the script. A script that dies is started again on any node and resumes; one
that refuses its input (exit status 2) is not, and the other shards are kept. All nodes see
repository, data and work under the same paths. --only I/N runs shard I alone, in this process and
without Ray, as in a SLURM job array; --only 0/N cuts the corpus (index), or runs the shards that
are missing or out of date and merges all (other jobs).

Reads   the inputs of the scripts; rerank, classify: candidates.jsonl, if it exists, as the corpus
Writes  WORK/shards-N/I/, OUT.shards-N/I/: inputs, outputs and log of shard I
        WORK/SPLIT/: the outputs of one machine; candidates.jsonl: the abstracts of the merged runs
Prints  one line of JSON, last on stdout: seconds by stage, the result of each script by shard

Examples
    python recipes/on_ray.py index --shards 64 --gpus 1 --address auto -- --dense-model BAAI/bge-m3
    for i in 0 1 2 3; do python recipes/on_ray.py index --only $i/3 -- --indexes bm25; done
    for i in 1 2 3 0; do python recipes/on_ray.py retrieve --only $i/3 -- --retrievers bm25; done
"""

import argparse
import itertools
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from tools import kit

SCRIPTS = {
    "index": "01_index.py",
    "retrieve": "02_retrieve.py",
    "rerank": "03_rerank.py",
    "classify": "05_classify.py",
}
ABSTRACTS = 4096  # per block: SHARD of 01_index.py, so that the same texts share its batches
CLAIMS = 1024  # per block: whole groups of 03_rerank.py
ROWS = 32  # smaller blocks are multiples of it: kernels treat odd rows apart
OURS = set("--data --work --split --corpus --index --run --out --restrict".split())


# -------------------- Cut
def block_size(abstracts, shards):
    """Return the abstracts per block: whole batches of 01_index.py if each shard gets a block."""
    if abstracts > (shards - 1) * ABSTRACTS:
        return ABSTRACTS
    return max(1, abstracts // shards // ROWS * ROWS)


def cut_corpus(args):
    """Write FOLDER/I/corpus.jsonl, once: blocks of abstracts in turn. Refuse another corpus."""
    mark = Path(args.folder, "cut.json")
    sha256 = kit.digest(args.corpus)
    if mark.exists():
        if json.loads(mark.read_bytes())["sha256"] != sha256:
            kit.fail(
                args.corpus,
                f"not the corpus that {args.folder} was cut from; delete that folder, or give "
                "another --work",
            )
        return
    if args.job != "index":
        kit.fail(args.folder, "no such folder; run index with the same --shards first")
    with open(args.corpus, "rb") as lines:
        count = sum(1 for _ in lines)
    if count < args.shards:
        kit.fail(args.corpus, f"{count} abstracts for {args.shards} shards; lower --shards")
    size = block_size(count, args.shards)
    new = Path(f"{args.folder}.tmp")
    shutil.rmtree(new, ignore_errors=True)
    with open(args.corpus, "rb") as lines:
        for block in range(math.ceil(count / size)):
            path = new / str(block % args.shards + 1) / "corpus.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "ab") as file:
                file.writelines(itertools.islice(lines, size))
    (new / mark.name).write_text(json.dumps({"sha256": sha256, "size": size}))
    new.rename(args.folder)


def read(path):
    """Return a table of strings, as they are in the file."""
    import pandas as pd

    return pd.read_csv(path, sep="\t", dtype=str, na_filter=False, quoting=3)


def write(path, table):
    with kit.written(path, {}) as new:
        table.to_csv(new, sep="\t", index=False, lineterminator="\n", quoting=3)


def cut_run(args, numbers):
    """Write FOLDER/I/run.tsv for these numbers: neighbouring claims with all their rows."""
    table = read(args.run)
    if "claim_id" not in table:
        kit.fail(f"{args.run}:1", "no column claim_id; see data/convert.py")
    claim_indices, claim_ids = table["claim_id"].factorize()
    if len(claim_ids) < args.shards:
        kit.fail(args.run, f"{len(claim_ids)} claims for {args.shards} shards; lower --shards")
    size = CLAIMS if len(claim_ids) >= CLAIMS * args.shards else 1
    blocks = claim_indices // size
    count = blocks.max() + 1
    shards = (blocks * args.shards + args.shards // 2) // count + 1
    for number in numbers:
        write(f"{args.folder}/{number}/run.tsv", table[shards == number])


# -------------------- Run
def words_of(args, folder):
    """Return the flags of the script for the shard in a folder."""
    words = ["--data", args.data]
    if args.job != "index":
        words += ["--split", args.split]
    if args.by_claims:
        words += ["--work", args.work, "--corpus", args.corpus]
        words += ["--run", folder / "run.tsv", "--out", folder / "out.tsv"]
    else:
        words += ["--work", folder, "--corpus", folder / "corpus.jsonl"]
    return [*map(str, words), *args.words]


def run_shard(args, number):
    """Run the script on a shard. Return its result, or {"error": line} if it refuses its input."""
    started = time.monotonic()
    os.chdir(args.cwd)  # a worker of Ray starts elsewhere, without our environment
    os.environ.update(args.env)
    folder = Path(args.folder, str(number))
    if not folder.exists():
        return {
            "error": f"{folder}: not on {socket.gethostname()}; cut first (index --only 0/N), "
            "and share the folder under one path on all nodes"
        }
    log = folder / f"{args.job}.log"
    command = [sys.executable, args.script, *words_of(args, folder)]
    with open(log, "wb") as file:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=file)
    if done.returncode == 2:
        line = log.read_text(errors="replace").splitlines()[-1]
        return {"error": line.removeprefix("error: ")}
    if done.returncode:
        raise RuntimeError(f"{args.script}: exit status {done.returncode}; see {log}")
    result = json.loads(done.stdout.splitlines()[-1])
    result["seconds"] = round(time.monotonic() - started, 1)
    return result


def on_cluster(args):
    """Yield (number, result) of each shard as it ends; Ray places it, and starts it again."""
    from tqdm.auto import tqdm

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # else a wrong address takes minutes
    address = args.address or "local"
    try:
        import ray

        ray.init(address, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    except ImportError:
        kit.fail("ray", "not installed; pip install ray==2.60.0, or use --only")
    except Exception as error:  # of many kinds: no cluster there, another version of Ray
        kit.fail(f"--address {address}", str(error).splitlines()[0])
    task = ray.remote(run_shard).options(
        num_cpus=args.cpus,
        num_gpus=args.gpus,
        scheduling_strategy="SPREAD",
        max_retries=5,
        retry_exceptions=[RuntimeError],  # raised where a script dies
    )
    waiting = {task.remote(args, number): number for number in range(1, args.shards + 1)}
    with tqdm(total=len(waiting), desc=args.job, unit=" shards") as bar:
        while waiting:
            [done], _ = ray.wait(list(waiting))
            number = waiting.pop(done)
            try:
                result = ray.get(done)
            except ray.exceptions.RayError as error:
                result = {"error": f"shard {number}: {str(error).splitlines()[-1]}"}
            yield number, result
            bar.update()


# -------------------- Merge
def corpus_rows(folder, kind, args):
    """Return {abstract_id: row in the whole corpus} of a shard, from its index."""
    size = json.loads(Path(args.folder, "cut.json").read_bytes())["size"]
    abstract_ids = json.loads((folder / "index" / kind / "abstract_ids.json").read_bytes())
    shard = int(folder.name) - 1
    rows = {}
    for row, abstract_id in enumerate(abstract_ids):
        block = row // size * args.shards + shard
        rows[abstract_id] = block * size + row % size
    return rows


def flags_of(args, folder):
    """Return the flags of 02_retrieve.py that merging needs; folder: a shard, for its indexes."""
    kinds = [kind for kind in ("bm25", "dense", "splade") if (folder / "index" / kind).is_dir()]
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--claims", default=f"{args.data}/claims.{args.split}.tsv")
    parser.add_argument("--retrievers", nargs="+", default=kinds)
    parser.add_argument("--top-k", type=int, default=100)
    parser.add_argument("--rrf-k", default="60")
    return parser.parse_known_args(args.words)[0]


def best_rows(runs, claims, top_k):
    """Return the best rows of all runs, by claim; their column corpus_row breaks ties."""
    import pandas as pd

    table = pd.concat(runs)
    claim_order = {claim_id: index for index, claim_id in enumerate(claims)}
    table["claim_order"] = table["claim_id"].map(claim_order)
    table["loss"] = -table["score"].astype(float)
    table = table.sort_values(["claim_order", "loss", "corpus_row"])
    table = table.groupby("claim_order").head(top_k)
    table["rank"] = table.groupby("claim_order").cumcount() + 1
    return table


def merge_runs(args, folders):
    """Write the best rows of all shards by retriever, ties in corpus order, and their RRF.

    candidates.jsonl gets the abstracts of these rows, in corpus order.
    """
    flags = flags_of(args, folders[0])
    claims = kit.read_claims(flags.claims)
    out = Path(args.work, args.split)
    candidates = set()
    paths = []
    for kind in flags.retrievers:
        runs = []
        for folder in folders:
            run = read(folder / args.split / f"{kind}.tsv")
            run["corpus_row"] = run["abstract_id"].map(corpus_rows(folder, kind, args))
            runs.append(run)
        best = best_rows(runs, claims, flags.top_k)
        paths.append(str(out / f"{kind}.tsv"))
        write(paths[-1], best[kit.RUN])
        candidates.update(best["corpus_row"])
    with kit.written(out / "candidates.jsonl", {}) as new:
        with open(args.corpus, "rb") as lines, open(new, "wb") as file:
            file.writelines(line for row, line in enumerate(lines) if row in candidates)
    if len(paths) > 1:
        command = [sys.executable, args.script, "fuse", *paths, "--data", args.data]
        command += ["--rrf-k", flags.rrf_k, "--top-k", str(flags.top_k)]
        command += ["--out", str(out / "hybrid.tsv")]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)


def merge(args):
    """Join the outputs of rerank or classify; merge the runs of retrieve."""
    folders = [Path(args.folder, str(number)) for number in range(1, args.shards + 1)]
    if args.by_claims:
        import pandas as pd

        write(args.out, pd.concat(read(folder / "out.tsv") for folder in folders))
    elif args.job == "retrieve":
        merge_runs(args, folders)


# -------------------- Jobs
def results_of(args, numbers):
    """Run shards on the cluster, or with --only in this process. Return {number: result}."""
    if args.only is None:
        results = dict(on_cluster(args))
    elif args.only == 0 and args.job == "index":
        results = {}  # it only cuts
    else:
        results = {number: run_shard(args, number) for number in numbers}
    for number, result in sorted(results.items()):
        if "error" in result:
            kit.fail(f"shard {number}", result["error"])
    return dict(sorted(results.items()))


def run(args):
    """Cut, run all shards or one, merge. Return the result of each shard."""
    numbers = [args.only] if args.only else range(1, args.shards + 1)
    started = time.monotonic()
    if args.by_claims:
        cut_run(args, numbers)
    elif not args.only:
        cut_corpus(args)
    cut = time.monotonic()
    results = results_of(args, numbers)
    ran = time.monotonic()
    if not args.only:
        merge(args)
    merged = time.monotonic()
    seconds = {
        "cut": round(cut - started, 1),
        args.job: round(ran - cut, 1),
        "merge": round(merged - ran, 1),
    }
    return {"job": args.job, "seconds": seconds, "shards": results}


def index(args):
    """Index the shards of a corpus by 01_index.py."""
    return run(args)


def retrieve(args):
    """Retrieve from each shard by 02_retrieve.py, and merge the runs."""
    return run(args)


def rerank(args):
    """Rerank parts of a run by 03_rerank.py, and join them."""
    return run(args)


def classify(args):
    """Label parts of a run by 05_classify.py, and join the verdicts."""
    return run(args)


# -------------------- Command line
def shard_of(text):
    """Return I and N of a text I/N."""
    number, shards = map(int, text.split("/"))
    return number, shards


# fmt: off
def add_flags(add):
    add("--corpus",
        help="read abstracts from this file (default: DATA/corpus.jsonl; rerank and classify: "
        "WORK/SPLIT/candidates.jsonl if it exists)")
    add("--shards", type=int, default=2, help="cut corpus or run into this many shards")
    add("--only", type=shard_of, metavar="I/N",
        help="run shard I of N alone, without Ray; 0/N cuts the corpus or merges all shards")
    add("--address",
        help="run on the Ray cluster at this address, such as auto (default: this machine)")
    add("--cpus", type=float, default=1, help="reserve this many CPU cores per shard")
    add("--gpus", type=float, default=0, help="reserve this many GPUs per shard (default: 0)")


def add_rerank(add):
    add_flags(add)
    add("--run", default="{work}/{split}/hybrid.tsv", help="rerank this run")
    add("--out", default="{work}/{split}/rerank.tsv", help="write the reranked run to this file")


def add_classify(add):
    add_flags(add)
    add("--run", default="{work}/{split}/llm.tsv", help="classify the pairs of this run")
    add("--out", default="{work}/{split}/verdicts.tsv", help="write the verdicts to this file")
# fmt: on


def prepare(args, words):
    """Add to the arguments what the jobs need; words: those behind --, for the script."""
    args.words = words
    for word in words:
        flag = word.split("=")[0]
        if flag in OURS:
            kit.fail(flag, "not allowed behind --; on_ray.py sets it")
    if args.only:
        args.only, args.shards = args.only
    if args.shards < 1 or not 0 <= (args.only or 0) <= args.shards:
        kit.fail("--shards, --only", "wanted N of at least 1, and I from 0 to N")
    args.by_claims = args.job in ("rerank", "classify")
    candidates = f"{args.work}/{args.split}/candidates.jsonl"
    if args.by_claims:
        args.folder = f"{args.out}.shards-{args.shards}"
    else:
        args.folder = f"{args.work}/shards-{args.shards}"
    if args.by_claims and os.path.exists(candidates):
        args.corpus = args.corpus or candidates
    args.corpus = args.corpus or f"{args.data}/corpus.jsonl"
    args.script = str(kit.ROOT / SCRIPTS[args.job])
    args.cwd = os.getcwd()
    args.env = {name: os.environ[name] for name in os.environ if name.startswith(("HF_", "OMP_"))}


def main():
    words = []
    if "--" in sys.argv:
        split_at = sys.argv.index("--")
        words = sys.argv[split_at + 1 :]
        sys.argv = sys.argv[:split_at]
    jobs = {index: add_flags, retrieve: add_flags, rerank: add_rerank, classify: add_classify}
    args = kit.arguments(__doc__, jobs)
    prepare(args, words)
    kit.run(args)


if __name__ == "__main__":
    main()
