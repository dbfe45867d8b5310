# /// script
# requires-python = ">=3.11"
# dependencies = ["PyStemmer==3.1.0", "accelerate==1.15.0", "bm25s==0.3.16", "numpy==2.4.6",
#   "pandas==3.1.1", "protobuf==7.36.2", "ray==2.60.0", "sentence-transformers==6.2.0",
#   "sentencepiece==0.2.3", "torch==2.13.0", "tqdm==4.70.1", "transformers==5.23.0"]
# ///
"""
Run stages 1, 2, 3 and 5 on many machines: cut corpus or run into shards, start the scripts, merge.

index     cuts corpus.jsonl into --shards of neighbouring abstracts; 01_index.py for each
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
Prints  one line of JSON, last on stdout: the result of each script by shard

Examples
    python recipes/on_ray.py index --shards 64 --gpus 1 --address auto -- --dense-model BAAI/bge-m3
    for i in 0 1 2 3; do python recipes/on_ray.py index --only $i/3 -- --indexes bm25; done
    for i in 1 2 3 0; do python recipes/on_ray.py retrieve --only $i/3 -- --retrievers bm25; done
"""

import itertools
import json
import os
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pandas as pd
from tools import kit

SCRIPTS = {
    "index": "01_index.py",
    "retrieve": "02_retrieve.py",
    "rerank": "03_rerank.py",
    "classify": "05_classify.py",
}
RETRIEVE = import_module("02_retrieve")
ABSTRACTS = 4096  # SHARD of 01_index.py, so that the same texts share its batches
ROWS = 32  # of small shards, as kernels treat odd rows apart
OURS = set("--data --work --split --corpus --index --run --out --restrict".split())


# -------------------- Cut
def bounds_of(count, shards):
    """Return the row where each shard begins, and the end; whole batches if there are enough."""
    unit = max(rows for rows in (1, ROWS, ABSTRACTS) if rows * shards <= count)
    starts = [count * shard // shards for shard in range(shards)]
    return [start // unit * unit for start in starts] + [count]


def cut_corpus(args):
    """Write FOLDER/I/corpus.jsonl, once: neighbouring abstracts. Refuse another corpus."""
    mark = Path(args.folder, "corpus.sha256")
    sha256 = kit.digest(args.corpus)
    if mark.exists():
        if mark.read_text() != sha256:
            kit.fail(
                args.corpus,
                f"not the corpus that {args.folder} was cut from; delete that folder, or give "
                "another --work",
            )
        return
    if args.job != "index":
        kit.fail(args.folder, "no such folder; run index with the same --shards first")
    kit.check_outs(args.folder, is_folder=True)
    with open(args.corpus, "rb") as lines:
        count = sum(1 for _ in lines)
    if count < args.shards:
        kit.fail(args.corpus, f"{count} abstracts for {args.shards} shards; lower --shards")
    bounds = bounds_of(count, args.shards)
    with kit.written(args.folder, {}) as new, open(args.corpus, "rb") as lines:
        for number in range(1, args.shards + 1):
            path = new / str(number) / "corpus.jsonl"
            path.parent.mkdir(parents=True)
            with open(path, "wb") as file:
                file.writelines(itertools.islice(lines, bounds[number] - bounds[number - 1]))
        (new / mark.name).write_text(sha256)


def read(path):
    """Return a table of texts, as they are in the file."""
    return kit.read_texts(path, "claim_id")


def write(path, table):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with kit.written(path, {}) as new:
        kit.write_table(table, new)


def cut_run(args):
    """Write FOLDER/I/run.tsv for these shards: neighbouring claims with all their rows."""
    table = read(args.run)
    claim_indices, claim_ids = table["claim_id"].factorize()
    if len(claim_ids) < args.shards:
        kit.fail(args.run, f"{len(claim_ids)} claims for {args.shards} shards; lower --shards")
    shards = claim_indices * args.shards // len(claim_ids) + 1
    for number in args.numbers:
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
    return json.loads(done.stdout.splitlines()[-1])


def on_cluster(args):
    """Yield the result of each shard; Ray places it, and starts it again if it dies."""
    from tqdm.auto import tqdm

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # else a wrong address takes minutes
    try:
        import ray

        ray.init(args.address, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    except ImportError:
        kit.fail("ray", "not installed; pip install ray==2.60.0, or use --only")
    except Exception as error:  # of many kinds: no cluster there, another version of Ray
        kit.fail(f"--address {args.address}", str(error).splitlines()[0])
    task = ray.remote(run_shard).options(
        num_cpus=args.cpus,
        num_gpus=args.gpus,
        scheduling_strategy="SPREAD",
        max_retries=5,
        retry_exceptions=[RuntimeError],  # raised where a script dies
    )
    shards = [task.remote(args, number) for number in args.numbers]
    for shard in tqdm(shards, desc=args.job, unit=" shards"):
        try:
            yield ray.get(shard)
        except ray.exceptions.RayError as error:
            yield {"error": str(error).splitlines()[-1]}


def results_of(args):
    """Run shards on the cluster, or with --only in this process. Return {number: result}."""
    if args.only is None:
        results = on_cluster(args)
    else:
        try:
            results = [run_shard(args, number) for number in args.numbers]
        except RuntimeError as error:  # Ray would start the shard again
            kit.fail("--only", f"{error}; call again to resume")
    results = dict(zip(args.numbers, results))
    for number, result in results.items():
        if "error" in result:
            kit.fail(f"shard {number}", result["error"])
    return results


# -------------------- Merge
def best_rows(runs, claim_ids, top_k):
    """Return the best rows of the runs of all shards, by claim; ties are in corpus order."""
    table = pd.concat(runs)
    table["claim_order"] = pd.Index(claim_ids).get_indexer(table["claim_id"])
    table["loss"] = -table["score"].astype(float)
    table = table.sort_values(["claim_order", "loss"])  # which is stable
    table["rank"] = table.groupby("claim_id").cumcount() + 1
    return table.loc[table["rank"] <= top_k, kit.RUN]


def merge_runs(args, folders):
    """Write the best rows of all shards by retriever, and their RRF.

    candidates.jsonl gets the abstracts of these rows, in corpus order.
    """
    parser = kit.parser("")
    RETRIEVE.add_retrieve(parser)
    flags = parser.parse_args(args.words)
    claims = kit.read_claims(flags.claims.format(data=args.data, split=args.split))
    index = folders[0] / "index"
    kinds = flags.retrievers or [kind for kind in RETRIEVE.SEARCH if (index / kind).is_dir()]
    out = Path(args.work, args.split)
    candidates = set()
    runs = []
    for kind in kinds:
        parts = [read(folder / args.split / f"{kind}.tsv") for folder in folders]
        best = best_rows(parts, list(claims), flags.top_k)
        write(out / f"{kind}.tsv", best)
        candidates.update(best["abstract_id"])
        runs.append(best)
    abstract_ids = []
    with kit.written(out / "candidates.jsonl", {}) as new, open(new, "wb") as file:
        for folder in folders:
            ids_of_shard = (folder / "index" / kinds[0] / "abstract_ids.json").read_bytes()
            with open(folder / "corpus.jsonl", "rb") as lines:
                for line, abstract_id in zip(lines, json.loads(ids_of_shard)):
                    if abstract_id in candidates:
                        file.write(line)
                        abstract_ids.append(abstract_id)
    if len(runs) > 1:
        fusion = RETRIEVE.Fusion("rrf", flags.rrf_k, [1] * len(runs))
        fused = RETRIEVE.fuse_runs(runs, fusion, abstract_ids)
        RETRIEVE.write_run(fused, out / "hybrid.tsv", {}, flags.top_k, len(claims))


# -------------------- Jobs
def run(args):
    """Cut, run all shards or one, merge. Return the result of each shard."""
    inputs = [args.corpus]
    if args.by_claims:
        inputs.append(args.run)
    kit.check_outs(*args.outs, inputs=inputs)
    if args.by_claims:
        cut_run(args)
    elif not args.is_one_shard:
        cut_corpus(args)
    results = results_of(args)
    folders = [Path(args.folder, str(number)) for number in args.numbers]
    if args.by_claims and not args.is_one_shard:
        write(args.out, pd.concat([read(folder / "out.tsv") for folder in folders]))
    elif args.job == "retrieve" and not args.is_one_shard:
        merge_runs(args, folders)
    return {"job": args.job, "shards": results}


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
    args.run = kit.CLASSIFY.run_of(args)
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
    add("--shards", type=kit.count, default=2, help="cut corpus or run into this many shards")
    add("--only", type=shard_of, metavar="I/N",
        help="run shard I of N alone, without Ray; 0/N cuts the corpus or merges all shards")
    add("--address", default="local",
        help="run on the Ray cluster at this address, such as auto; local is this machine")
    add("--cpus", type=kit.amount, default=1, help="reserve this many CPU cores per shard")
    add("--gpus", type=kit.amount, default=0, help="reserve this many GPUs per shard (default: 0)")


def add_retrieve(add):
    add_flags(add)
    add("--split", default="test", help="retrieve for the claims of this split")


def add_rerank(add):
    add_flags(add)
    add("--run", default="{work}/{split}/hybrid.tsv", help="rerank this run")
    add("--out", default="{work}/{split}/rerank.tsv", help="write the reranked run to this file")


def add_classify(add):
    add_flags(add)
    add("--run", help="""classify the pairs of this run (default: in {work}/{split} llm.tsv, else
        rerank.tsv, else hybrid.tsv)""")
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
    args.numbers = range(1, args.shards + 1)
    args.is_one_shard = bool(args.only)  # else shards are cut and merged, too
    if args.is_one_shard:
        args.numbers = [args.only]
    elif args.only == 0 and args.job == "index":
        args.numbers = []  # it only cuts
    args.by_claims = args.job in ("rerank", "classify")
    args.folder = f"{args.work}/shards-{args.shards}"
    args.outs = []
    if args.job == "retrieve":
        names = [f"{kind}.tsv" for kind in (*RETRIEVE.SEARCH, "hybrid")]
        args.outs = [f"{args.work}/{args.split}/{name}" for name in (*names, "candidates.jsonl")]
    if args.by_claims:
        args.outs = [args.out]
        args.folder = f"{args.out}.shards-{args.shards}"
        candidates = f"{args.work}/{args.split}/candidates.jsonl"
        if os.path.exists(candidates):
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
    jobs = {index: add_flags, retrieve: add_retrieve, rerank: add_rerank, classify: add_classify}
    args = kit.arguments(__doc__, jobs)
    prepare(args, words)
    kit.run_job(args)


if __name__ == "__main__":
    main()
