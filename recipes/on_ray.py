# /// script
# requires-python = ">=3.11"
# dependencies = ["PyStemmer==3.1.0", "accelerate==1.15.0", "bm25s==0.3.16", "numpy==2.4.6",
#   "pandas==3.1.1", "protobuf==7.36.2", "ray==2.60.0", "sentence-transformers==6.2.0",
#   "sentencepiece==0.2.3", "torch==2.13.0", "tqdm==4.70.1", "transformers==5.23.0"]
# ///
"""
Run stages 1, 2, 3 and 5 on many machines: cut corpus or run into shards, start the scripts, merge.

index     splits corpus.jsonl into --shards of neighbouring abstracts; 01_index.py for each
retrieve  02_retrieve.py for each; the best rows of all for each retriever, and their RRF
rerank    cuts --run by claims; 03_rerank.py for each part; joins what they write
classify  the same with 05_classify.py

Words behind -- go to the script. A script that dies is started again on any node and resumes; one
that refuses its input (exit status 2) is not, and the other shards are kept. All nodes see
repository, data and work under the same paths. --only I/N runs shard I alone, in this process and
without Ray, as in a SLURM job array; --only 0/N cuts the corpus (index), or runs the shards that
are missing or out of date and merges all (others).

Reads   what the scripts read; rerank, classify: candidates.jsonl, if it exists, as the corpus
Writes  WORK/shards-N/I/, OUT.shards-N/I/: inputs, outputs and log of shard I
        WORK/SPLIT/: what one machine writes; candidates.jsonl: the abstracts of the merged runs
Prints  one line of JSON, last on stdout: seconds by stage, facts of each script by shard

Examples
    python recipes/on_ray.py index --shards 64 --gpus 1 --address auto -- --dense-model BAAI/bge-m3
    for i in 0 1 2 3; do python recipes/on_ray.py index --only $i/3 -- --indexes bm25; done
    for i in 1 2 3 0; do python recipes/on_ray.py retrieve --only $i/3 -- --retrievers bm25; done
"""

import argparse
import itertools
import json
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
ABSTRACTS = 4096  # of a block: SHARD of 01_index.py, so that the same texts share its batches
CLAIMS = 1024  # of a block: whole groups of 03_rerank.py
ROWS = 32  # smaller blocks are its multiples: kernels treat odd rows apart
OURS = set("--data --work --split --corpus --index --run --out --restrict --aggregate".split())


# -------------------- Cut
def cut_corpus(args):
    """Write FOLDER/I/corpus.jsonl, once: blocks of abstracts in turn. Refuse another corpus."""
    mark, new = Path(args.folder, "cut.json"), Path(f"{args.folder}.tmp")
    facts = {"sha256": kit.digest(args.corpus)}
    if mark.exists():
        if not facts.items() <= json.loads(mark.read_bytes()).items():
            kit.fail(
                args.corpus,
                f"not what {args.folder} was cut from; delete that folder, or give another --work",
            )
        return
    if args.job != "index":
        kit.fail(args.folder, "no such folder; run index with the same --shards first")
    with open(args.corpus, "rb") as lines:
        count = sum(1 for _ in lines)
    if count < args.shards:
        kit.fail(args.corpus, f"{count} abstracts for {args.shards} shards; lower --shards")
    whole = count > (args.shards - 1) * ABSTRACTS  # a block for each shard
    facts["size"] = ABSTRACTS if whole else count // args.shards // ROWS * ROWS or 1
    shutil.rmtree(new, ignore_errors=True)
    with open(args.corpus, "rb") as lines:
        blocks = itertools.groupby(enumerate(lines), lambda row: row[0] // facts["size"])
        for block, rows in blocks:
            path = new / str(block % args.shards + 1) / "corpus.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "ab") as file:
                file.writelines(line for _, line in rows)
    (new / mark.name).write_text(json.dumps(facts))
    new.rename(args.folder)


def read(path):
    """Return a table of strings, as they are."""
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
    places, claims = table["claim_id"].factorize()
    if len(claims) < args.shards:
        kit.fail(args.run, f"{len(claims)} claims for {args.shards} shards; lower --shards")
    blocks = places // (CLAIMS if len(claims) >= CLAIMS * args.shards else 1)
    shards = (blocks * args.shards + args.shards // 2) // (blocks.max() + 1) + 1
    for number in numbers:
        write(f"{args.folder}/{number}/run.tsv", table[shards == number])


# -------------------- Run
def run_shard(args, number):
    """Run the script on a shard. Return its facts, or {"error": line} if it refuses its input."""
    begun, folder = time.monotonic(), Path(args.folder, str(number))
    words = ["--data", args.data, "--split", args.split]
    if args.parts:
        words += [
            "--work",
            args.work,
            "--corpus",
            args.corpus,
            "--run",
            folder / "run.tsv",
            "--out",
            folder / "out.tsv",
        ]
    else:
        words += ["--work", folder, "--corpus", folder / "corpus.jsonl"]
    os.chdir(args.cwd)
    os.environ.update(args.env)
    if not folder.exists():
        return {
            "error": f"{folder}: not on {socket.gethostname()}; cut first (index --only 0/N), "
            "and share the folder under one path on all nodes"
        }
    log = folder / f"{args.job}.log"
    with open(log, "wb") as file:
        done = subprocess.run(
            [sys.executable, args.script, *map(str, [*words, *args.words])],
            stdout=subprocess.PIPE,
            stderr=file,
        )
    if done.returncode == 2:
        return {"error": log.read_text(errors="replace").splitlines()[-1].removeprefix("error: ")}
    if done.returncode:
        raise RuntimeError(f"{args.script}: status {done.returncode}; see {log}")
    seconds = round(time.monotonic() - begun, 1)
    return json.loads(done.stdout.splitlines()[-1]) | {"seconds": seconds}


def on_cluster(args):
    """Yield (number, facts) of each shard as it ends; Ray places it, and starts it again."""
    from tqdm.auto import tqdm

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # else a wrong address takes minutes
    try:
        import ray

        ray.init(
            args.address or "local",
            log_to_driver=False,
            logging_level="ERROR",
            include_dashboard=False,
        )
    except ImportError:
        kit.fail("ray", "not installed; pip install ray==2.60.0, or use --only")
    except Exception as error:  # of many kinds: no cluster there, another version of Ray
        kit.fail(f"--address {args.address or 'local'}", str(error).splitlines()[0])
    start = (
        ray.remote(run_shard)
        .options(
            num_cpus=args.cpus,
            num_gpus=args.gpus,
            scheduling_strategy="SPREAD",
            max_retries=5,
            retry_exceptions=[RuntimeError],
        )
        .remote
    )  # raised where a script dies
    left = {start(args, number): number for number in range(1, args.shards + 1)}
    with tqdm(total=len(left), desc=args.job, unit=" shards") as bar:
        while left:
            [done], _ = ray.wait(list(left))
            try:
                facts = ray.get(done)
            except ray.exceptions.RayError as error:
                facts = {"error": f"shard {left[done]}: {str(error).splitlines()[-1]}"}
            yield left.pop(done), facts
            bar.update()


# -------------------- Merge
def places_of(folder, kind, args):
    """Return {abstract_id: place in the original corpus} of a shard, from its index."""
    size = json.loads(Path(args.folder, "cut.json").read_bytes())["size"]
    names = json.loads((folder / "index" / kind / "abstract_ids.json").read_bytes())
    first = int(folder.name) - 1
    return {
        name: (row // size * args.shards + first) * size + row % size
        for row, name in enumerate(names)
    }


def merge_runs(args, folders):
    """Write the best rows of all shards by retriever, ties in corpus order, and their RRF.

    candidates.jsonl gets the abstracts of these rows, in corpus order.
    """
    import pandas as pd

    parser = argparse.ArgumentParser(add_help=False)  # flags of 02_retrieve.py
    parser.add_argument("--claims", default=f"{args.data}/claims.{args.split}.tsv")
    parser.add_argument("--retrievers", nargs="+")
    parser.add_argument("--top-k", type=int, default=100)
    parser.add_argument("--rrf-k", default="60")
    flags, _ = parser.parse_known_args(args.words)
    kinds = flags.retrievers or [
        kind for kind in ("bm25", "dense", "splade") if (folders[0] / "index" / kind).is_dir()
    ]
    order = {claim: place for place, claim in enumerate(kit.read_claims(flags.claims))}
    found, out = set(), Path(args.work, args.split)
    for kind in kinds:
        tables = []
        for folder in folders:
            rows = read(folder / args.split / f"{kind}.tsv")
            tables.append(rows.assign(place=rows["abstract_id"].map(places_of(folder, kind, args))))
        rows = pd.concat(tables)
        rows["claim"], rows["loss"] = rows["claim_id"].map(order), -rows["score"].astype(float)
        rows = rows.sort_values(["claim", "loss", "place"]).groupby("claim").head(flags.top_k)
        rows["rank"] = rows.groupby("claim").cumcount() + 1
        write(out / f"{kind}.tsv", rows[kit.RUN])
        found.update(rows["place"])
    with kit.written(out / "candidates.jsonl", {}) as new, open(args.corpus, "rb") as lines:
        with open(new, "wb") as file:
            file.writelines(line for place, line in enumerate(lines) if place in found)
    if len(kinds) > 1:
        runs = [str(out / f"{kind}.tsv") for kind in kinds]
        words = ["--data", args.data, "--rrf-k", flags.rrf_k, "--top-k", str(flags.top_k)]
        subprocess.run(
            [sys.executable, args.script, "fuse", *runs, *words, "--out", str(out / "hybrid.tsv")],
            stdout=subprocess.DEVNULL,
            check=True,
        )


def merge(args):
    """Join what rerank or classify made; merge the runs of retrieve."""
    folders = [Path(args.folder, str(number)) for number in range(1, args.shards + 1)]
    if args.parts:
        import pandas as pd

        write(args.out, pd.concat(read(folder / "out.tsv") for folder in folders))
    elif args.job == "retrieve":
        merge_runs(args, folders)


# -------------------- Jobs
def run(args):
    """Cut, run all shards or one, merge. Return the facts of each shard."""
    clock = [time.monotonic()]
    numbers = [args.only] if args.only else range(1, args.shards + 1)
    if args.parts:
        cut_run(args, numbers)
    elif not args.only:
        cut_corpus(args)
    clock.append(time.monotonic())
    if args.only is None:
        done = dict(on_cluster(args))
    elif args.only or args.job != "index":
        done = {number: run_shard(args, number) for number in numbers}
    else:
        done = {}
    clock.append(time.monotonic())
    for number, facts in sorted(done.items()):
        if "error" in facts:
            kit.fail(f"shard {number}", facts["error"])
    if not args.only:
        merge(args)
    clock.append(time.monotonic())
    seconds = [round(end - start, 1) for start, end in zip(clock, clock[1:])]
    stages = dict(zip(["cut", args.job, "merge"], seconds))
    return {"job": args.job, "seconds": stages, "shards": dict(sorted(done.items()))}


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


def part(text):
    number, count = map(int, text.split("/"))
    return number, count


def add_flags(add):
    add("--corpus", help="the abstracts (default: DATA/corpus.jsonl, or candidates.jsonl)")
    add("--shards", type=int, default=2, help="number of shards")
    add("--only", type=part, help="I/N: shard I alone, without Ray; 0/N: cut or merge")
    add("--address", help="of a Ray cluster, as auto (default: this machine alone)")
    add("--cpus", type=float, default=1, help="cores of a shard")
    add("--gpus", type=float, default=0, help="GPUs of a shard")


def add_rerank(add):
    add_flags(add)
    add("--run", default="{work}/{split}/hybrid.tsv", help="run to rerank")
    add("--out", default="{work}/{split}/rerank.tsv", help="reranked run")


def add_classify(add):
    add_flags(add)
    add("--run", default="{work}/{split}/llm.tsv", help="run to classify")
    add("--out", default="{work}/{split}/verdicts.tsv", help="verdicts")


def main():
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    words, sys.argv = sys.argv[at + 1 :], sys.argv[:at]
    args = kit.arguments(
        __doc__, {index: add_flags, retrieve: add_flags, rerank: add_rerank, classify: add_classify}
    )
    for word in OURS.intersection(word.split("=")[0] for word in words):
        kit.fail(word, "not behind --; on_ray.py sets it")
    only, shards = args.only or (None, args.shards)
    if shards < 1 or not 0 <= (only or 0) <= shards:
        kit.fail("--shards, --only", "give N from 1 on, and I from 0 to N")
    parts = args.job in ("rerank", "classify")
    candidates, corpus = f"{args.work}/{args.split}/candidates.jsonl", f"{args.data}/corpus.jsonl"
    if parts and os.path.exists(candidates):
        corpus = candidates
    args.words, args.only, args.shards, args.parts = words, only, shards, parts
    args.corpus, args.script = args.corpus or corpus, str(kit.ROOT / SCRIPTS[args.job])
    args.folder = f"{args.out}.shards-{shards}" if parts else f"{args.work}/shards-{shards}"
    args.cwd = os.getcwd()
    args.env = {name: os.environ[name] for name in os.environ if name.startswith(("HF_", "OMP_"))}
    kit.run(args)


if __name__ == "__main__":
    main()
