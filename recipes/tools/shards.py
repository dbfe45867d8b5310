"""
Cut a corpus or a run into shards, run a script on one, merge what they made; see on_ray.py.

Bad input raises ValueError with the line to print, a failure that may be retried RuntimeError.
"""
import functools
import hashlib
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from argparse import ArgumentParser
from operator import itemgetter
from pathlib import Path

import pandas as pd

from tools.files import ROOT, digest, read_tsv

SCRIPTS = {"index": "01_index.py", "retrieve": "02_retrieve.py", "rerank": "03_rerank.py",
           "classify": "05_classify.py"}
ABSTRACTS = 4096  # of a block: SHARD of 01_index.py, so that the same texts share its batches
CLAIMS = 1024     # cut at multiples of it: whole groups of 03_rerank.py (GROUP) at any --depth
ROWS = 32         # smaller blocks are its multiples: kernels treat odd rows apart
PLACES = {"work", "corpus", "index", "run", "out"}  # flags that differ from shard to shard

def refuse(line):
    raise ValueError(line)

def read(path):
    """Return a table of strings."""
    try:
        return read_tsv(path)
    except ValueError as error:
        refuse(f"{path}: {error}; fix the table")

def write(path, table):
    """Write a table, whole or not at all, with its provenance."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(f"{path}.tmp", sep="\t", index=False, lineterminator="\n")
    Path(f"{path}.meta.json").write_text(json.dumps({"command": sys.argv}, indent=1) + "\n")
    os.replace(f"{path}.tmp", path)

# -------------------- Cut
def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

def blocks_of(corpus, size, shards):
    """Yield (shard, line number, line), size abstracts each in turn; blank lines do not count."""
    count = 0
    with open(corpus, "rb") as file:
        for number, line in enumerate(file, 1):
            yield count // size % shards + 1, number, line
            count += bool(line.strip())

def state_of(path):
    """Return what changes when somebody writes to a file: its size and its time."""
    return {"bytes": os.stat(path).st_size, "changed": os.stat(path).st_mtime_ns}

def is_source(path, mark):
    """Return whether a file is still what the mark was written for; it is read only if touched."""
    made = json.loads(Path(mark).read_text())
    return state_of(path).items() <= made.items() or sha256(path) == made["sha256"]

def cut_corpus(args):
    """Write FOLDER/I/corpus.jsonl, once; refuse another corpus behind existing shards."""
    mark, new, shards = Path(args.folder, "cut.json"), Path(f"{args.folder}.tmp"), args.shards
    facts = state_of(args.corpus)
    if mark.exists():
        if not is_source(args.corpus, mark):
            refuse(f"{args.corpus}: not what {args.folder} was cut from; delete that folder, or "
                   "give another --work")
        return
    if args.job != "index":
        refuse(f"{args.folder}: no such folder; run index with the same --shards first")
    enough = (shards - 1) * ABSTRACTS + 1  # for one block each
    with open(args.corpus, "rb") as file:
        count = sum(1 for _ in itertools.islice(filter(bytes.strip, file), enough))
    if count < shards:
        refuse(f"{args.corpus}: {count} abstracts for {shards} shards; lower --shards")
    size = ABSTRACTS if count == enough else count // shards // ROWS * ROWS or 1
    shutil.rmtree(new, ignore_errors=True)
    for shard, rows in itertools.groupby(blocks_of(args.corpus, size, shards), itemgetter(0)):
        (new / str(shard)).mkdir(parents=True, exist_ok=True)
        with open(new / str(shard) / "corpus.jsonl", "ab") as file:
            file.writelines(line for _, _, line in rows)
    facts |= {"sha256": sha256(args.corpus), "size": size}
    (new / mark.name).write_text(json.dumps(facts))
    new.rename(args.folder)

def size_of(args):
    """Return how many abstracts a block has."""
    return json.loads(Path(args.folder, "cut.json").read_text())["size"]

def original(line, args):
    """Return an error line with a place in the original corpus for one in a shard's."""
    found = re.match(rf"{re.escape(str(Path(args.folder)))}/(\d+)/corpus.jsonl:(\d+)(.*)", line)
    if not found:
        return line
    rows = blocks_of(args.corpus, size_of(args), args.shards)
    numbers = (number for shard, number, _ in rows if shard == int(found[1]))
    return f"{args.corpus}:{next(itertools.islice(numbers, int(found[2]) - 1, None))}{found[3]}"

def cut_run(args, numbers):
    """Write FOLDER/I/run.tsv for these numbers: neighbouring claims with all their rows."""
    table = read(args.run)
    if "claim_id" not in table:
        refuse(f"{args.run}:1: no column claim_id; see data/convert.py")
    places, claims = table["claim_id"].factorize()
    if len(claims) < args.shards:
        refuse(f"{args.run}: {len(claims)} claims for {args.shards} shards; lower --shards")
    size = CLAIMS if len(claims) >= CLAIMS * args.shards else 1
    blocks = places // size
    shards = (blocks * args.shards + args.shards // 2) // (blocks.max() + 1) + 1
    for number in numbers:
        write(f"{args.folder}/{number}/run.tsv", table[shards == number])

def check_candidates(path):
    """Refuse abstracts of merged runs whose corpus has changed since retrieve merged them."""
    mark = Path(f"{path}.meta.json")
    if Path(path).name != "candidates.jsonl" or not mark.exists():  # somebody's own corpus
        return
    corpus = json.loads(mark.read_text())["corpus"]
    if Path(corpus).exists() and not is_source(corpus, mark):
        refuse(f"{path}: {corpus} has changed since; run retrieve again, or give --corpus")

def cut(args):
    """Cut a run for all shards or one; the corpus for all."""
    if args.run:  # before merging, too: what was made from another run is found by its digest
        check_candidates(args.corpus)
        cut_run(args, [args.only] if args.only else range(1, args.shards + 1))
    if not args.run and not args.only:
        cut_corpus(args)

# -------------------- Run
def start(script, words, log):
    """Run a script, after any other process that makes the same. Return its last line, JSON."""
    while True:
        with open(log, "wb") as file:
            done = subprocess.run([sys.executable, ROOT / script, *map(str, words)],
                                  stdout=subprocess.PIPE, stderr=file)
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1])
        if done.returncode != 2:
            raise RuntimeError(f"{script}: status {done.returncode}; see {log}")
        line = Path(log).read_text(errors="replace").splitlines()[-1].removeprefix("error: ")
        if "another command is making it" not in line:
            refuse(line)
        time.sleep(1)  # it runs on a node that Ray has given up

def run(args, number):
    """Run the script on shard number. Return its facts, or {"error": line} if it is refused."""
    begun, folder = time.monotonic(), Path(args.folder, str(number))
    words = ["--data", args.data, "--split", args.split]
    if args.run:
        words += ["--work", args.work, "--corpus", args.corpus, "--run", folder / "run.tsv",
                  "--out", folder / "out.tsv"]
    else:
        words += ["--work", folder, "--corpus", folder / "corpus.jsonl"]
    try:
        os.chdir(args.cwd)
        os.environ.update(args.env)
        facts = start(SCRIPTS[args.job], [*words, *args.words], folder / f"{args.job}.log")
        return facts | {"seconds": round(time.monotonic() - begun, 1)}
    except ValueError as error:
        line = original(str(error), args)
        if args.run and "unknown abstract_id" in line:
            line = f"{line}, or give the corpus of {args.run} (--corpus)"
        return {"error": line}
    except OSError as error:
        return {"error": f"{error.filename}: {error.strerror} on {socket.gethostname()}; cut first "
                         "(index --only 0/N), and share the folder under one path on all nodes"}

# -------------------- Merge
def places_of(index, number, size, shards):
    """Return {abstract_id: place in the original corpus} of a shard, from its index."""
    names, places = json.loads(Path(index, "abstract_ids.json").read_bytes()), {}
    for row, name in enumerate(names):
        places[name] = (row // size * shards + number - 1) * size + row % size
    return places

def merge_runs(args, claims, kinds, top_k):
    """Write the best rows of all shards as 02_retrieve.py fuse --method top --corpus would.

    That reads all runs and the corpus at once; here, memory does not grow with the shards.
    candidates.jsonl gets the abstracts of these rows, in corpus order.
    """
    size, best, out = size_of(args), dict.fromkeys(kinds), Path(args.work, args.split)
    order = {claim: place for place, claim in enumerate(read(claims)["claim_id"])}
    for number in range(1, args.shards + 1):
        shard = Path(args.folder, str(number))
        places = places_of(shard / "index" / kinds[0], number, size, args.shards)
        for kind in kinds:
            rows = read(shard / args.split / f"{kind}.tsv")
            rows["claim"] = rows["claim_id"].map(order)
            rows["place"] = rows["abstract_id"].map(places)
            rows["loss"] = -rows["score"].astype(float)
            rows = pd.concat([best[kind], rows]).sort_values(["claim", "loss", "place"])
            best[kind] = rows.groupby("claim").head(top_k)
    for kind, rows in best.items():
        rows = rows.assign(rank=rows.groupby("claim").cumcount() + 1)
        write(out / f"{kind}.tsv", rows[["claim_id", "abstract_id", "rank", "score"]])
    found, new = set(pd.concat(best.values())["place"]), out / "candidates.jsonl.tmp"
    with open(args.corpus, "rb") as lines, open(new, "wb") as file:
        for place, line in enumerate(filter(bytes.strip, lines)):
            if place in found:
                file.write(line)
    mark = {"corpus": args.corpus} | json.loads(Path(args.folder, "cut.json").read_text())
    Path(out, "candidates.jsonl.meta.json").write_text(json.dumps(mark))
    new.rename(out / "candidates.jsonl")

def check_shards(folders, made, own, shared=(), **flags):
    """Refuse to merge shards that differ in their flags, or have read what is no longer there.

    Each shard's folder holds the file or index made, with its provenance. Everything named there
    as an input, models included, must still have the digest that it had then; own (in the folder)
    and shared (by all shards) must be among these inputs. flags: values that all must have had.
    """
    known, digest_of = None, functools.cache(digest)  # shards share most inputs
    for folder in folders:
        path = folder / made
        if not path.exists():
            refuse(f"{path}: missing; run shard {folder.name}, then this again")
        facts = json.loads(Path(f"{path}.meta.json").read_bytes())
        inputs = {Path(name): value for name, value in facts.get("inputs", {}).items()}
        for one in (*inputs, folder / own, *map(Path, shared)):
            if inputs.get(one) != digest_of(one):
                refuse(f"{path}: not made from {one} as it is now; run shard {folder.name} again")
        same = {flag: value for flag, value in facts["arguments"].items() if flag not in PLACES}
        if known not in (None, same) or not flags.items() <= same.items():
            refuse(f"{path}: made with other flags; run shard {folder.name} again")
        known = same

def merge(args):
    """Join what rerank or classify made; merge the runs of retrieve, and fuse its retrievers."""
    folders = [Path(args.folder, str(number)) for number in range(1, args.shards + 1)]
    if args.run:
        check_shards(folders, "out.tsv", "run.tsv", [args.corpus])
        write(args.out, pd.concat([read(folder / "out.tsv") for folder in folders]))
    if args.job != "retrieve":
        return
    add = (parser := ArgumentParser(add_help=False)).add_argument  # flags of 02_retrieve.py
    add("--claims", default=f"{args.data}/claims.{args.split}.tsv")
    add("--retrievers", nargs="+", default=["bm25", "dense", "splade"])
    add("--top-k", type=int, default=100)
    add("--rrf-k", default=60)
    flags, out = parser.parse_known_args(args.words)[0], f"{args.work}/{args.split}"
    for kind in flags.retrievers:
        check_shards(folders, f"index/{kind}", "corpus.jsonl")
        check_shards(folders, f"{args.split}/{kind}.tsv", f"index/{kind}", [flags.claims],
                     top_k=flags.top_k)
    merge_runs(args, flags.claims, flags.retrievers, flags.top_k)
    runs = [f"{out}/{kind}.tsv" for kind in flags.retrievers]
    if len(runs) > 1:
        words = ["fuse", *runs, "--corpus", f"{out}/candidates.jsonl", "--out", f"{out}/hybrid.tsv",
                 "--top-k", flags.top_k, "--rrf-k", flags.rrf_k]
        start("02_retrieve.py", words, f"{out}/hybrid.log")
