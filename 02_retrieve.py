# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "PyStemmer==3.1.0", "bm25s==0.3.16", "numpy==2.4.6", "pandas==3.1.1",
#   "sentence-transformers==6.2.0", "torch==2.13.0", "tqdm==4.70.1", "transformers==5.23.0",
# ]
# ///
"""
Retrieve abstracts for each claim; fuse runs.

Reads   claims and index/*/; fuse: runs, and fusion.json of recipes/train/fit_fusion.py
Writes  a run for each index, {bm25,dense,splade}.tsv, and hybrid.tsv, their fusion by reciprocal
        rank; fuse: fused.tsv
Prints  counts of each file; the last line is JSON

recipes/train/ fits the weights of a fusion, and mines training examples from a run. Functions that
several scripts share stand at the end, in marked blocks.

Examples
    python 02_retrieve.py --retrievers bm25 dense --top-k 200
    python 02_retrieve.py fuse a.tsv b.tsv --method zscore --weights 0.3 0.7
"""

import argparse
import contextlib
import csv
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import sys
import time
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np

PAIR = ["claim_id", "abstract_id"]
RUN = [*PAIR, "rank", "score"]
RRF_K = 60  # Cormack et al. 2009
BATCH = 128  # claims whose scores are in memory: 0.2 GiB with 394,269 abstracts
# The block "models" ends its messages with this.
ADVICE = "its name is in meta.json of the index; data/README.md, What loads, has more"


# ---------- Search: scores of all abstracts for each claim
def search_bm25(folder, meta, claims, args):
    """Yield the BM25 scores of all abstracts for each claim; a repeated term counts repeatedly."""
    import bm25s

    bm25 = bm25s.BM25.load(folder, mmap=True, show_progress=False)
    if not bm25.vocab_dict:  # no abstract has a term
        yield from np.zeros((len(claims), meta["abstracts"]))
        return
    # For bm25l and bm25+, the library adds to all abstracts the score of one without any term of
    # the claim. Without this constant, such an abstract has the score 0, as in other variants.
    bm25.nonoccurrence_array = None
    tokens = tokenise(claims, return_ids=False, **meta["analyser"])
    ids = list(map(bm25.get_tokens_ids, tokens))
    with ThreadPoolExecutor(2) as pool:  # takes half of the time, as numpy needs no Python lock
        for start in range(0, len(ids), BATCH):
            yield from pool.map(bm25.get_scores_from_ids, ids[start : start + BATCH])


def encode_claims(meta, claims, args):
    """Return the vectors (claims, dimensions) that the model of an index makes of claims."""
    import sentence_transformers as st

    load = st.SparseEncoder if meta["kind"] == "splade" else st.SentenceTransformer
    model = meta["model"]
    if Path(model).exists() and digest(model) != meta["model_sha256"]:
        fail(model, f"it has changed since the {meta['kind']} index was made; see 01_index.py")
    encoder = open_model(load, model, args)
    if meta["max_length"]:  # static embeddings have no limit
        encoder.max_seq_length = meta["max_length"]
    return encoder.encode_query(
        claims, prompt=meta["query_prompt"], convert_to_tensor=True, show_progress_bar=True
    )


def search_splade(folder, meta, claims, args):
    """Yield the inner products of term weights with all abstracts for each claim."""
    from scipy.sparse import load_npz

    vectors = encode_claims(meta, claims, args).cpu().coalesce()
    rows, terms = vectors.indices().numpy()
    weights = vectors.values().numpy()
    if meta["activation"] == "relu":
        weights = np.expm1(weights)  # undoes the logarithm of log(1 + ReLU(logit))
    index = load_npz(folder / "weights.npz")  # CSC: abstracts x vocabulary
    for row in range(len(claims)):
        yield index[:, terms[rows == row]] @ weights[rows == row]


def search_dense(folder, meta, claims, args):
    """Yield the cosines with all abstracts for each claim: exact, in float32."""
    import torch

    # mmap_mode "c", since torch warns of "r"
    vectors = torch.from_numpy(np.load(folder / "embeddings.npy", mmap_mode="c"))
    # The index has unit vectors, so inner products with unit vectors are cosines.
    queries = torch.nn.functional.normalize(encode_claims(meta, claims, args).float())
    for batch in queries.split(BATCH):
        # In blocks, so that no float32 copy of the whole index is made.
        cosines = [batch @ block.to(batch.device).float().T for block in vectors.split(65_536)]
        yield from torch.cat(cosines, dim=1).cpu().numpy()


# For each kind of index: the function that yields scores, and a score that is too low for a run.
# BM25 and SPLADE give the score 0 to an abstract without a term of the claim.
SEARCH = {
    "bm25": (search_bm25, 0),
    "dense": (search_dense, -np.inf),
    "splade": (search_splade, 0),
}


def best_rows(scores, lowest, k):
    """Return the k best rows with a score above lowest; ties keep the order of the rows.

    The scores are cut into blocks. The k best of the blocks' maxima are k scores, so the k-th best
    score is at least the lowest of them. Sorting only the scores that reach this bound takes a
    fifth of the time.
    """
    k = min(k, len(scores))
    height = max(1, len(scores) // (4 * k))  # scores in a block, which is a column
    blocks = scores[: len(scores) // height * height].reshape(height, -1)
    bound = np.partition(blocks.max(axis=0), -k)[-k]
    rows = np.flatnonzero((scores >= bound) & (scores > lowest))
    return rows[np.argsort(-scores[rows], kind="stable")][:k]


# ---------- Retrieve
def search(kind, claims, inputs, args):
    """Return a table of PAIR and score: each claim's best abstracts in an index, best first.

    claims: a table of claims; inputs: {path: sha256} of the indexes and the corpus.
    """
    import pandas as pd

    folder = Path(args.index, kind)
    scores_of, lowest = SEARCH[kind]
    meta = read_meta(folder, inputs[str(folder)])
    if meta["corpus"] != inputs[args.corpus]:
        fail(folder, "the corpus has changed since then; make the index again by 01_index.py")
    abstract_ids = np.array(json.loads((folder / "abstract_ids.json").read_bytes()), object)
    if args.restrict:
        run = read_table(args.restrict, RUN, claim_id=claims["claim_id"], abstract_id=abstract_ids)
        run["row"] = pd.Index(abstract_ids).get_indexer(run["abstract_id"])
        candidates = run.groupby("claim_id")["row"].agg(list)
    found = []
    all_scores = scores_of(folder, meta, claims["claim"].tolist(), args)
    for claim_id, scores in zip(claims["claim_id"], all_scores):
        if not np.isfinite(scores).all():
            fail(folder, "scores are not finite; make the index again with --dtype fp32")
        if args.restrict:
            is_other = np.ones(len(scores), bool)
            is_other[candidates.get(claim_id, [])] = False
            scores[is_other] = lowest
        rows = best_rows(scores, lowest, args.top_k)
        found += [(claim_id, abstract_ids[row], scores[row]) for row in rows]
    return pd.DataFrame(found, columns=[*PAIR, "score"])


def write_run(run, path, task, top_k, claim_count):
    """Rank the rows of each claim in their order, write the first top_k as a run, and return it.

    claim_count: the number of all claims, from which those without rows are counted.
    """
    run = run.assign(rank=run.groupby("claim_id").cumcount() + 1)
    run = run.loc[run["rank"] <= top_k, RUN]
    with written(path, task) as new:
        write_table(run, new)
    missing = claim_count - run["claim_id"].nunique()
    print(f"{path}: {len(run)} rows, {claim_count} claims, {missing} without rows")
    if run.empty:
        warn(path, "an empty run; see languages in data/README.md, and --analyser of 01_index.py")
    return run


def retrieve(args):
    """Write a run for each index, and their reciprocal rank fusion."""
    kinds = args.retrievers or [kind for kind in SEARCH if Path(args.index, kind).is_dir()]
    outs = [f"{args.out}/{kind}.tsv" for kind in kinds]
    if len(kinds) > 1:
        outs.append(f"{args.out}/hybrid.tsv")
    indexes = [Path(args.index, kind) for kind in kinds]
    inputs = [args.claims, args.corpus, *indexes]
    if args.restrict:
        inputs.append(args.restrict)
    task = task_of(args, *inputs)
    if not kinds:
        fail(args.index, "no index; make one by 01_index.py")
    if up_to_date(args, task, *outs):
        return {"made": []}
    claims = read_table(args.claims, ["claim_id", "claim"])
    runs = [search(kind, claims, task["inputs"], args) for kind in kinds]
    runs = [write_run(run, out, task, args.top_k, len(claims)) for run, out in zip(runs, outs)]
    if len(runs) > 1:
        abstract_ids = json.loads((indexes[0] / "abstract_ids.json").read_bytes())
        fused = fuse_runs(runs, Fusion("rrf", args.rrf_k, [1] * len(runs)), abstract_ids)
        write_run(fused, outs[-1], task, args.top_k, len(claims))
    return {"made": outs, "claims": len(claims)}


# ---------- Fuse
# Each of these functions returns the points of the rows of a run; --help shows its docstring.
def reciprocal_rank(run, k):
    """1 / (k + rank)"""
    return 1 / (k + run["rank"])


def zscore(run, _):
    """z-score within the claim, where a missing abstract gets the lowest of the claim"""
    # A missing abstract gets 0 points. The lowest score is subtracted, not the mean, so that the
    # lowest abstract gets 0 points, too. This shifts all sums of a claim by the same constant.
    scores = run["score"].groupby(run["claim_id"])
    deviation = scores.transform("std", ddof=0).replace(0, 1)
    return (run["score"] - scores.transform("min")) / deviation


def inverse_rank(run, _):
    """1 / rank"""
    return 1 / run["rank"]


class Method(NamedTuple):
    """A fusion method: how the rows of a pair in several runs become one score."""

    points: callable  # called with a run and k, returns the points of each row
    combine: callable  # combine(weighted points, axis=1); a run without the pair has NaN there
    constants: list  # values of k that fit_fusion.py tries: [0] if it has no k, []: never


METHODS = {
    "zscore": Method(zscore, np.nansum, [0]),
    "rrf": Method(reciprocal_rank, np.nansum, [1, 6, 15, RRF_K]),  # Cormack et al. 2009
    "union": Method(inverse_rank, np.nanmax, []),  # the best rank
}


class Fusion(NamedTuple):
    """How several runs become one; recipes/train/fit_fusion.py finds it, fuse applies it."""

    method: str  # a name in METHODS
    k: float
    weights: tuple  # a number for each run


def points_table(runs, method, k):
    """Return a table of points (pairs, runs), indexed by PAIR; NaN where a run lacks a pair."""
    import pandas as pd

    runs = [run.set_index(PAIR, drop=False) for run in runs]
    return pd.concat([METHODS[method].points(run, k) for run in runs], axis=1)


def combined_scores(table, weights, method):
    """Return the scores of the pairs in a table of points."""
    # The sum of the same numbers in another order can differ in the last bit, which would break
    # ties. So the numbers are sorted first.
    terms = np.sort(table.to_numpy() * weights, axis=1)
    return METHODS[method].combine(terms, axis=1)


def fuse_runs(runs, fusion, abstract_ids):
    """Return a table of PAIR and score, best first.

    Ties are broken by the order of abstract_ids or, if it is empty, by that of the runs.
    """
    import pandas as pd

    table = points_table(runs, fusion.method, fusion.k)
    scores = combined_scores(table, fusion.weights, fusion.method)
    fused = table.index.to_frame(index=False).assign(score=scores)
    row = pd.Index(abstract_ids).get_indexer(fused["abstract_id"])
    claims, _ = fused["claim_id"].factorize()
    return fused.iloc[np.lexsort((row, -fused["score"], claims))]


def check_claims(tables):
    """End if no claim is in all of {path: table}; warn of each table that lacks some claims."""
    claims = {path: set(table["claim_id"]) for path, table in tables.items()}
    in_any = set.union(*claims.values())
    if in_any and not set.intersection(*claims.values()):
        fail(", ".join(claims), "no claim in common; name files of one split")
    for path, claim_ids in claims.items():
        if claim_ids != in_any:
            warn(path, f"{len(in_any - claim_ids)} of {len(in_any)} claims are not in it")


def names_of(runs, args):
    """Return a name for each run that is the same in all splits: its path below WORK/SPLIT.

    A run elsewhere has the name of its file.
    """
    names = []
    folder = Path(args.work, args.split).resolve()
    for run in runs:
        path = Path(run).resolve()
        is_below = path.is_relative_to(folder)
        names.append(str(path.relative_to(folder)) if is_below else path.name)
    return names


def warn_of_splits(args):
    """Warn of runs that were made for another split than this call is for."""
    for path in args.runs:
        split = sidecar_of(path).get("arguments", {}).get("split", args.split)
        if split != args.split:
            warn(path, f"it was made for the split {split}, this call is for {args.split}: --split")


def read_fusion(args):
    """Return the Fusion in --fusion, a file of recipes/train/fit_fusion.py."""
    path = args.fusion
    try:
        found = json.loads(Path(path).read_bytes())
        names = found["runs"]
        weights = [amount(weight) for weight in found["weights"]]
        fusion = Fusion(found["method"], amount(found["rrf_k"]), weights)
        if fusion.method not in METHODS or len(weights) != len(names):
            raise ValueError
    except (ValueError, LookupError, TypeError, argparse.ArgumentTypeError):
        fail(path, "no fusion; make one by recipes/train/fit_fusion.py")
    if names != names_of(args.runs, args):
        fail(path, f"it is for {', '.join(names)}; name these runs, in this order")
    return fusion


def fuse(args):
    """Fuse run files into one run."""
    weights = args.weights or [1] * len(args.runs)
    if len(weights) != len(args.runs):
        fail("--weights", f"{len(weights)} for {len(args.runs)} runs; give one for each")
    fusion = Fusion(args.method, args.rrf_k, weights)
    inputs = list(args.runs)
    if args.fusion:
        check_input(args.fusion, args)
        fusion = read_fusion(args)
        inputs.append(args.fusion)
    corpus = f"{args.data}/corpus.jsonl"  # for the order of ties; runs can be fused without it
    has_corpus = Path(corpus).exists()
    if has_corpus:
        inputs.append(corpus)
    task = task_of(args, *inputs)
    if up_to_date(args, task, args.out):
        return {"made": []}
    warn_of_splits(args)
    runs = [read_table(path, RUN) for path in args.runs]
    if fusion.method != "union":  # which may join runs of different claims, as of two languages
        check_claims(dict(zip(args.runs, runs)))
    abstract_ids = list(read_corpus(corpus)) if has_corpus else []
    fused = fuse_runs(runs, fusion, abstract_ids)
    write_run(fused, args.out, task, args.top_k, fused["claim_id"].nunique())
    return {"made": [args.out]}


# ---------- Command line
# fmt: off
def add_ranks(add):
    add("--top-k", type=count, default=100, help="keep this many abstracts per claim in a run")
    add("--rrf-k", type=count_or_0, default=RRF_K, help="""k of the reciprocal rank fusion
        1 / (k + rank); a larger k makes the first ranks count less""")

def add_retrieve(job):
    add = job.add_argument_group("inputs and outputs").add_argument
    add("--claims", default="{data}/claims.{split}.tsv", help="retrieve abstracts for these claims")
    add("--corpus", default="{data}/corpus.jsonl",
        help="the abstracts that were indexed; if they have changed since, the job stops")
    add("--index", default="{work}/index", help="read the indexes of 01_index.py in this folder")
    add("--out", default="{work}/{split}", help="write the runs to this folder")
    add = job.add_argument_group("search").add_argument
    add("--retrievers", nargs="+", choices=SEARCH,
        help="search these indexes only (default: all that are in --index)")
    add("--restrict", help="""score only the candidates that this run has for a
        claim; BM25 and SPLADE leave out those with score 0""")
    add_ranks(add)
    add("--device", nargs="+", help="""encode claims on the first of these devices: cpu, mps, cuda
        (default: a GPU, if there is one)""")
    add_shared(job, split="test")

def add_fuse(job):
    points = "; ".join(f"{name}: {method.points.__doc__}" for name, method in METHODS.items())
    add = job.add_argument_group("inputs and outputs").add_argument
    add("runs", nargs="+", help="fuse these runs; ties keep the order of the corpus in --data")
    add("--out", default="{work}/{split}/fused.tsv", help="write the fused run to this file")
    add("--fusion", help="""take --method, --weights and --rrf-k from this file of
        recipes/train/fit_fusion.py; name the same runs in the same order""")
    add = job.add_argument_group("fusion").add_argument
    add("--method", choices=METHODS, default="rrf",
        help=f"""sum these points over the runs; union takes the maximum instead, and can join runs
        of different claims, such as one run per language: {points}""")
    add("--weights", nargs="+", type=amount,
        help="""multiply the points of each run by its weight, one per run (default: 1 each); name
        the runs before this flag""")
    add_ranks(add)
    add_shared(job, split="test")

# fmt: on


def main():
    moved = {"fit": "fit_fusion.py", "mine": "mine.py"}
    job = "".join(sys.argv[1:2])
    if job in moved:
        fail(job, f"is a program of its own: python recipes/train/{moved[job]}")
    run_job(command_line({retrieve: add_retrieve, fuse: add_fuse}))


# --- helpers (same in all six scripts)
START = time.monotonic()
WARNINGS = []  # what this call has warned of; sidecars keep it
CHANGE_NO_OUTPUT = {"force", "out", "device", "function"}  # arguments, in every job
PACKAGES = ("numpy", "pandas", "torch", "transformers", "sentence_transformers", "bm25s", "openai")
MADE_BY = {  # {a file's name, or its part before the first dot: the job that makes it}
    "bm25.tsv": "02_retrieve.py",
    "dense.tsv": "02_retrieve.py",
    "splade.tsv": "02_retrieve.py",
    "bm25": "01_index.py",
    "dense": "01_index.py",
    "splade": "01_index.py",
    "graph": "01_index.py graph",
    "hybrid": "02_retrieve.py",
    "fused": "02_retrieve.py fuse",
    "fusion": "recipes/train/fit_fusion.py",
    "examples": "recipes/train/mine.py",
    "rerank": "03_rerank.py",
    "verdicts": "05_classify.py",
}
# Files of a folder that no model or index needs: README.md, hidden ones (hf download leaves some)
NOT_LOADED = r"(^|/)\.\w|^README.md$"
ONE_LINE = r"[^\t\r\n]+"  # an id that fits into a TSV file


def shown(text):
    """Return a text in one line, with control characters escaped and passwords of URLs hidden."""
    text = re.sub(r"(?<=://)[^/@\s]+@", "***@", " ".join(str(text).split()))
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def warn(where, what):
    """Print a warning on stderr, and keep it for the sidecars."""
    WARNINGS.append(shown(f"warning: {where}: {what}"))
    print(WARNINGS[-1], file=sys.stderr)


def fail(where, what):
    """End with one line on stderr and exit status 2."""
    print(shown(f"error: {where}: {what}"), file=sys.stderr)
    sys.exit(2)


def within(number, least, most=1_000_000_000):
    """Return the number if it is in this range; argparse shows the error to the user."""
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"{number} is out of its range, {least:,} to {most:,}")
    return number


def count(text):
    """Return a whole number of at least 1."""
    return within(int(text), 1)


def count_or_0(text):
    """Return a whole number of at least 0."""
    return within(int(text), 0)


def amount(text):
    """Return a number of at least 0."""
    return within(float(text), 0)


def share(text):
    """Return a number from 0 to 1."""
    return within(float(text), 0, 1)


def seconds(text):
    """Return a number of seconds, up to a day."""
    return within(float(text), 0.1, 86_400)


def json_object(text):
    """Return a dict of JSON; argparse shows a text that is none to the user."""
    return {**json.loads(text)}


def digest(path):
    """Return the sha256 of a file, or of the files of a folder that are loaded."""
    path = Path(path)
    total = hashlib.sha256()
    for part in [path, *sorted(path.rglob("*"))]:
        name = part.relative_to(path).as_posix()
        if part.is_file() and not re.search(NOT_LOADED, name):
            with part.open("rb") as file:
                hashlib.file_digest(file, lambda: total)  # goes on with total
    return total.hexdigest()


def check_input(path, args):
    """End if an input is missing; say which job makes it, or which splits are there."""
    path = Path(path)
    if path.exists():
        return
    kind = path.name.split(".")[0]
    made_by = MADE_BY.get(path.name, MADE_BY.get(kind))
    advice = [f"make it by {made_by}"] if made_by else []
    for folder in reversed(path.parents):
        if not folder.exists() and not made_by:
            fail(folder, "no such folder; fix its name, or see data/README.md")
    splits = [other.name.split(".")[1] for other in path.parent.glob(f"{kind}.*.tsv")]
    if splits:
        advice.append(f"splits there: {', '.join(sorted(splits))}")
    for name, value in vars(args).items():
        if str(value) == str(path):
            advice.append(f"name another file for {name.replace('_', '-')}")
    fail(path, f"not found; {'; '.join(advice) or 'fix its name'}")


def task_of(args, *inputs, models=(), without=()):
    """Return what decides an output: arguments, and digests of inputs and of local models.

    without: names of arguments that change no output of this job.
    """
    for path in inputs:
        check_input(path, args)
    # A model that is not there is one of the hub.
    paths = [str(path) for path in (*inputs, *models) if Path(path).exists()]
    left_out = CHANGE_NO_OUTPUT.union(without)
    arguments = {name: value for name, value in vars(args).items() if name not in left_out}
    return {"arguments": arguments, "inputs": {path: digest(path) for path in paths}}


def sidecar_of(path):
    """Return the provenance of an output; {} without a sidecar, or with a torn one."""
    made = {}
    with contextlib.suppress(OSError, ValueError):
        made = json.loads(Path(f"{Path(path)}.meta.json").read_bytes())
    return made if isinstance(made, dict) else {}


def check_outs(*outs, inputs=(), is_folder=False):
    """End if an output would replace an input of this call, or what the kit has not made.

    A file never replaces a folder, nor a folder a file. A folder (is_folder) replaces only one that
    has a sidecar.
    """
    are_read = [os.path.abspath(path) for path in inputs]  # a file may be named in several ways
    for out in map(Path, outs):
        taken = [path for path in out.parents if path.is_file()]
        is_ours = is_folder and Path(f"{out}.meta.json").exists()
        is_other = out.exists() and not out.is_file()  # a folder, or a device such as /dev/null
        if (is_other and not is_ours) or (is_folder and out.is_file()):
            taken.append(out)
        for path in taken:
            fail(path, "not made by this script, which would replace it; give another name")
        if os.path.abspath(out) in are_read:
            fail(out, "this call reads it; give another name for what it writes")


def up_to_date(args, task, *outs, is_folder=False):
    """Return whether this very task has made all outs, and nobody has changed them since."""
    check_outs(*outs, inputs=task.get("inputs", ()), is_folder=is_folder)
    for out in outs:
        if args.force or not Path(out).exists():
            return False
        # <=: the sidecar has all of this, and more
        if not (task | {"sha256": digest(out)}).items() <= sidecar_of(out).items():
            return False
    for out in outs:
        print(f"up to date: {out} (same inputs and flags; --force makes it again)")
    return True


def remove(path):
    """Remove a folder or a file, if it is there."""
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)


def clear(path):
    """Remove what killed processes have left beside an output: PATH.PID.tmp."""
    for left in path.parent.glob(f"{path.name}.*.tmp"):
        pid = left.with_suffix("").suffix[1:]  # 123 of PATH.123.tmp
        try:
            os.kill(int(pid), 0)  # which only asks whether this process runs
        except ProcessLookupError:
            remove(left)
        except (OSError, ValueError, OverflowError):
            pass  # another user's process, or not the number of one


@contextlib.contextmanager
def written(path, task, **summary):
    """Yield a temporary path for a new output, which then replaces path as a whole.

    The sidecar gets the task, the summary, and how the output was made. While the output is
    replaced, the sidecar is {}, which fits no task: after a kill then, the output is made again.
    """
    path = Path(path)
    meta = Path(f"{path}.meta.json")
    end = f"{os.getpid()}.tmp"  # two processes may write one output
    new = Path(f"{path}.{end}")
    new_meta = Path(f"{meta}.{end}")
    old = Path(f"{path}.old.{end}")
    path.parent.mkdir(parents=True, exist_ok=True)
    clear(path)
    remove(new)
    yield new
    check_outs(path, is_folder=new.is_dir())  # again: something may be in this place by now
    loaded = {name: sys.modules[name].__version__ for name in PACKAGES if name in sys.modules}
    made = {
        "command": list(map(shown, sys.argv)),
        "script": digest(sys.argv[0]),
        "packages": loaded,
        "warnings": WARNINGS,
        "sha256": digest(new),
        "seconds": round(time.monotonic() - START, 1),
    }
    new_meta.write_text(json.dumps(task | summary | made, indent=1))
    meta.write_text("{}")
    if path.is_dir():
        path.rename(old)  # a folder cannot take the place of another one
    new.replace(path)
    new_meta.replace(meta)
    remove(old)


def add_shared(job, split=None, force=True):
    """Add the flags that all scripts share.

    split: the default of --split, None for jobs without one. force: whether the job has --force;
    a job that is never up to date needs none.
    """
    add = job.add_argument_group("shared by all scripts").add_argument
    # fmt: off
    add("--data", default="data/demo", help="read data of this folder, {data} in other defaults")
    add("--work", help="""keep indexes, models and runs in this folder, {work} in other defaults,
        where the next scripts find them (default: work/NAME, with the last name in --data)""")
    if split:
        add("--split", default=split,
            help="take claims and judgements of this split, {split} in other defaults")
    if force:
        add("--force", action="store_true", help="make outputs again, even if they are up to date")
    # fmt: on


def command_line(jobs):
    """Return the parsed arguments; jobs: {function: what adds its flags}, the default job first.

    In defaults, {data}, {work} and {split} stand for the values of these flags.
    """
    names = [function.__name__ for function in jobs]
    helps = ["-h", "--help"]
    own = {}
    if len(jobs) == 1:  # the job is the script
        helps = []
        own = {"prog": os.path.basename(sys.argv[0]), "description": __doc__}
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    choices = parser.add_subparsers(title="jobs", metavar=f"JOB (default: {names[0]})")
    for name, function in zip(names, jobs):
        texts = {"help": function.__doc__, "description": function.__doc__} | own
        job = choices.add_parser(name, formatter_class=layout, **texts)
        job.set_defaults(function=function, job=name)
        # argparse prints its usage before an error, and has no setting for that.
        parser.error = job.error = lambda text: fail(parser.prog, f"{text}; see --help")
        jobs[function](job)
        for flag in job._actions:  # argparse has no public list of them
            is_shown = str(flag.default) not in ("None", "False", argparse.SUPPRESS)
            if is_shown and "(default" not in flag.help:
                flag.help += " (default: %(default)s)"
    words = sys.argv[1:]
    if not words or words[0] not in (*names, *helps):
        words = [names[0], *words]
    args = parser.parse_args(words)
    if "data" in args:
        args.work = args.work or f"work/{Path(args.data).resolve().name}"
    for field in ("data", "work", "split"):
        for name, value in vars(args).items():
            if isinstance(value, str) and field in args:
                setattr(args, name, value.replace(f"{{{field}}}", vars(args)[field]))
    return args


def run_job(args):
    """Run the job, and print its result as JSON; errors of files and packages are one line."""
    try:
        print(json.dumps(args.function(args)))
    except OSError as error:
        fail(error.filename or vars(args).get("out", args.job), error)
    except (UnicodeError, ImportError) as error:
        fail(args.job, error)


def read_table(path, columns, **known):
    """Read a TSV file of texts; ranks and scores are numbers, a run is sorted by claim and rank.

    known: {column: the values that it may hold, if it is there}. A faulty row ends the script.
    """
    import pandas as pd

    texts = dict.fromkeys(("claim_id", "abstract_id", "claim", "label", "codes"), str)
    layout = {"sep": "\t", "quoting": csv.QUOTE_NONE, "encoding": "utf-8-sig", "low_memory": False}
    layout |= {"na_filter": False, "skip_blank_lines": False}  # so that rows are lines
    try:
        table = pd.read_csv(path, dtype=texts, **layout)
    except ValueError as error:  # an empty file, another encoding, a row that is too long
        fail(path, f"{error}; see data/convert.py")
    is_whole = isinstance(table.index, pd.RangeIndex)  # else a row has more fields than the header
    if not is_whole or not set(columns) <= set(table):
        found = f"""found columns {", ".join(table)}; wanted {", ".join(columns)}, between tabs, in
            rows of one length; python data/convert.py {path} --out NEW.tsv (--columns WANTED=FOUND
            renames)"""
        fail(f"{path}:1", found)
    # Blank lines go; the index keeps counting them, so it is a line's number less 2.
    table = table[(table[list(columns)] != "").any(axis=1)]
    if "claim" in columns:
        quoted = '^"((?:[^"]|"")*)"$'  # as pandas writes texts with quotation marks
        claims = table["claim"].str
        table["claim"] = claims.replace(quoted, lambda text: text[1].replace('""', '"'), regex=True)
    ids = [column for column in columns if column.endswith("_id")]
    # {what is wrong: in which rows}; the first fault that occurs is reported
    faults = {f"{column} is empty": table[column] == "" for column in columns}
    for column, values in known.items():
        if column in table:
            faults[f"unknown {column}"] = ~table[column].isin(values)
    faults[f"an earlier row has this {' and '.join(ids)}"] = table.duplicated(ids)
    if "rank" in columns:
        for column in ("rank", "score"):
            table[column] = pd.to_numeric(table[column], errors="coerce")
        table = table.iloc[np.lexsort((table["rank"], table["claim_id"].factorize()[0]))]
        counted = table.groupby("claim_id").cumcount() + 1
        faults["score is not a finite number"] = ~np.isfinite(table["score"])
        faults["the ranks of a claim are not 1, 2, 3, ..."] = table["rank"] != counted
        last = table.groupby("claim_id")["score"].shift()
        faults[
            "the score is above that of the rank before: higher is better, so negate distances"
        ] = table["score"] > last
        table = table.assign(rank=counted)  # integers; some tools write 1.0
    for what, is_faulty in faults.items():
        if is_faulty.any():
            row = is_faulty.idxmax()
            what += f": {' '.join(table.loc[row].filter(regex='_id$|^label$'))}"
            advice = (
                "fix this row (data/convert.py mends line breaks), or name a file of this split"
            )
            fail(f"{path}:{row + 2}", f"{what}; {advice}")
    return table.reset_index(drop=True)


def read_claims(path):
    """Return {claim_id: claim}."""
    table = read_table(path, ["claim_id", "claim"])
    return dict(zip(table["claim_id"], table["claim"]))


def read_corpus(path):
    """Return {abstract_id: record}."""
    corpus = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line.decode("utf-8-sig"))
                abstract_id = str(record["abstract_id"])
                is_id = record["abstract_id"] is not None and re.fullmatch(ONE_LINE, abstract_id)
                if b"\\u" in line:
                    # It fails at half of a surrogate pair.
                    json.dumps(record, ensure_ascii=False).encode()
            except (ValueError, LookupError, TypeError):
                is_id = False
            if not is_id:
                what = "no JSON object in UTF-8 with an abstract_id of one line"
                fail(f"{path}:{number}", f"{what}; see data/convert.py")
            if abstract_id in corpus:
                fail(f"{path}:{number}", f"a second abstract {abstract_id}; remove one")
            corpus[abstract_id] = record
    if not corpus:
        fail(path, "no abstracts; see data/convert.py")
    return corpus


def write_table(table, path):
    """Write a table as read_table reads it: quotation marks mean nothing."""
    table.to_csv(path, sep="\t", index=False, float_format="%.9g", quoting=csv.QUOTE_NONE)


def text_of(record, fields=("title", "abstract"), separator=" "):
    """Join the fields of a record that hold texts, numbers or lists; null and NaN hold nothing."""
    texts = []
    for field in fields:
        value = record.get(field)
        items = value if isinstance(value, list) else [value]
        known = [str(item).strip() for item in items if item is not None and item == item]
        between = " " if field == "abstract" else ", "  # sentences; names of authors
        texts.append(between.join(filter(None, known)))
    return separator.join(filter(None, texts))


def field_names(text):
    """Return names of fields without the blanks around their commas."""
    return re.sub(r"\s*,\s*", ",", text.strip())


def read_abstracts(path, fields, separator=" "):
    """Return {abstract_id: text} of a corpus; fields: their names, with commas between them."""
    fields = fields.split(",")
    records = read_corpus(path)
    known = {"title"}.union(*records.values())  # a title is optional
    unknown = set(fields) - known
    if unknown:
        tell = warn if unknown < set(fields) else fail  # fail if all are unknown
        tell(path, f"no record has the field {', '.join(sorted(unknown))}; see --fields")
    return {key: text_of(record, fields, separator) for key, record in records.items()}


# --- end of helpers


# --- analyser (same in 01 and 02)
# bm25s imports JAX if it is installed, and JAX would take most of a GPU's memory.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
INVISIBLE = "[\u00ad\u200b-\u200d\u2060\ufeff]"  # soft hyphens and zero-width characters


def tokenise(texts, name, normalise, stemmer, **options):
    """Return what bm25s.tokenize() makes of texts by an analyser, as meta.json of an index has it.

    The name of the analyser is not used. options: further arguments of bm25s.tokenize().
    """
    import bm25s
    from Stemmer import Stemmer

    if normalise:
        texts = [normalised(text, normalise) for text in texts]
    stemmer = Stemmer(stemmer) if stemmer else None
    return bm25s.tokenize(texts, stemmer=stemmer, show_progress=False, **options)


def normalised(text, form):
    """Return a text in a Unicode normal form, without invisible characters, which split words."""
    if text.isascii():
        return text
    return re.sub(INVISIBLE, "", unicodedata.normalize(form, text))


# --- end of analyser


# --- models (same in 01, 02, 03 and 05)
LEAST_TOKENS = 200  # a tokenizer with fewer knows special tokens alone: files of it are missing


def device_of(args):
    """Return the first device of --device, else a GPU if there is one, else None."""
    import torch

    has_gpu = torch.cuda.is_available()
    if not args.device:
        return "cuda" if has_gpu else None
    if args.device[0].startswith("cuda") and not has_gpu:
        fail(f"--device {args.device[0]}", "no GPU is visible; leave out --device, or give cpu")
    return args.device[0]


def batch_size_of(args):
    """Return --batch-size; without it, what is fast on the device."""
    if args.batch_size:
        return args.batch_size
    return 128 if str(device_of(args)).startswith("cuda") else 32


def refuse_bin(*_, **__):
    """Stand in for torch.load where its weights-only loader can be made to run code."""
    raise ValueError("its weights are a .bin, which the kit reads with torch 2.10 or newer alone")


def open_model(load, name, args, dtype="fp32", **options):
    """Load a model with load(name, ...), a class or function that takes the library's arguments.

    No code of the model is run. Weights are read from safetensors, else from a .bin by PyTorch's
    weights-only loader. dtype: auto is half precision on a GPU, else fp32.
    """
    import torch

    device = device_of(args)
    if dtype == "auto":
        dtype = "fp32"
        if str(device).startswith("cuda"):
            dtype = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    options |= {"device": device, "trust_remote_code": False}
    options["model_kwargs"] = {"dtype": names[dtype]}
    options["local_files_only"] = Path(name).exists()  # a folder needs no hub
    # Else transformers asks the hub to convert a .bin, which opens a pull request there.
    os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "1"
    guard = contextlib.nullcontext()
    if torch.__version__ < "2.10":  # TorchVersion compares numbers; CVE-2025-32434, 2026-24747
        guard = mock.patch("torch.load", refuse_bin)
    try:
        with guard:
            model = load(str(name), **options)
    except Exception as error:  # the libraries raise many kinds
        fail(name, f"{reason_of(error)}; {ADVICE}; or fetch it: python data/download.py model NAME")
    if len(model.tokenizer.get_vocab()) < LEAST_TOKENS:
        what = "files of its tokenizer are missing, such as tokenizer.json"
        fail(name, f"{what}; copy the whole folder")
    # Llama has none; tokenizers of static embeddings do not even have the attribute.
    if getattr(model.tokenizer, "pad_token", True) is None:
        model.tokenizer.pad_token = model.tokenizer.eos_token
        model.transformers_model.config.pad_token_id = model.tokenizer.pad_token_id
    return model


def reason_of(error):
    """Return why a model cannot be opened, in other words than the library's where they help."""
    reason = str(error)
    if "trust_remote_code" in reason:
        return "it comes with code of its own, which the kit does not run"
    if "gated repo" in reason:
        return (
            "it is gated; ask for access on its page, then export HF_TOKEN=hf_... with your token"
        )
    if "model_type" in reason or "valid JSON" in reason:
        return (
            "it has no config.json of a model; merge an adapter into its base first, and take the "
            "original of a GGUF file"
        )
    if "Weights only load failed" in reason:
        return "its .bin holds more than weights, so it is not read"
    if isinstance(error, MemoryError) or "allocate memory" in reason or "out of memory" in reason:
        return (
            "memory is too small for its weights; try --dtype bf16 or a smaller model; in training "
            "--lora 16 --lr 2e-4 or --checkpointing"
        )
    return reason


def length(text):
    """Return a number of tokens that leaves room for texts beside special tokens."""
    return within(int(text), 8)


def check_model(name):
    """End if the library is too old, or a folder is not there; OWNER/NAME may be on the hub."""
    from packaging.version import Version

    installed = importlib.metadata.version("sentence-transformers")
    if Version(installed) < Version("6.2"):
        what = f"{installed} is older than 6.2; pip install -U 'sentence-transformers>=6.2'"
        fail("sentence-transformers", what)
    if not Path(name).exists() and name.count("/") > 1:
        fail(name, f"no such model; {ADVICE}")


def check_fields(config, name, args):
    """Warn if a model was trained on other fields of abstracts than those it is given now."""
    trained = getattr(config, "trained_fields", args.fields)
    if trained != args.fields:
        warn(name, f"trained on the fields {trained}, it gets {args.fields}; see --fields")


def read_meta(folder, sha256):
    """Return the meta.json of an index; end if its files have another digest than when made."""
    if sidecar_of(folder).get("sha256") != sha256:
        fail(folder, "damaged, or without its sidecar; make it again by 01_index.py --force")
    return json.loads(Path(folder, "meta.json").read_bytes())


# --- end of models

if __name__ == "__main__":
    main()
