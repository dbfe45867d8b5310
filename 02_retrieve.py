# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "PyStemmer==3.1.0", "bm25s==0.3.16", "numpy==2.4.6", "pandas==3.1.1",
#   "sentence-transformers==6.2.0", "torch==2.13.0", "tqdm==4.70.1", "transformers==5.23.0",
# ]
# ///
"""
Retrieve abstracts for each claim, and fuse runs.

Reads   claims, index/*/; fuse: runs, and fusion.json of recipes/train/fit_fusion.py
Writes  a run for each index, {bm25,dense,splade}.tsv, and hybrid.tsv, their fusion by reciprocal
        rank; fuse: fused.tsv
Prints  counts of each file; the last line is JSON

Functions that several scripts share stand at the end, in marked blocks. recipes/train/ mines
training examples from runs, and fits the weights of a fusion.

Examples
    python 02_retrieve.py --retrievers bm25 dense --top-k 200
    python 02_retrieve.py fuse a.tsv b.tsv --method zscore --weights 0.3 0.7
"""

import argparse
import contextlib
import csv
import functools
import hashlib
import json
import os
import re
import sys
import tempfile
import time
import unicodedata
from pathlib import Path
from typing import NamedTuple

import numpy as np

PAIR = ["claim_id", "abstract_id"]
RUN = [*PAIR, "rank", "score"]
RRF_K = 60  # Cormack et al. 2009


# ---------- Search: scores of all abstracts for each claim
def search_bm25(folder, meta, claims, args):
    """Yield the BM25 scores of all abstracts for each claim; a repeated term counts repeatedly."""
    import bm25s

    bm25 = bm25s.BM25.load(folder, mmap=True, show_progress=False)
    # For bm25l and bm25+, the library adds to all abstracts a score for the terms that they lack.
    # Without it, an abstract without any term of the claim has the score 0, as in other variants.
    bm25.nonoccurrence_array = None
    for terms in tokenise(claims, return_ids=False, **meta["analyser"]):
        yield bm25.get_scores_from_ids(bm25.get_tokens_ids(terms))


def encode_claims(meta, claims, args):
    """Return the vectors (claims, dimensions) that the model of an index makes of claims."""
    import sentence_transformers as st

    load = st.SparseEncoder if meta["kind"] == "splade" else st.SentenceTransformer
    model = meta["model"]
    if Path(model).exists() and digest(model) != meta["model_sha256"]:
        fail(model, f"it has changed since the {meta['kind']} index was made; see 01_index.py")
    encoder = open_model(load, model, args, revision=meta.get("model_commit"))
    if meta["max_length"]:  # static embeddings have no limit
        encoder.max_seq_length = meta["max_length"]
    return encoder.encode_query(
        claims,
        prompt=meta.get("query_prompt"),  # None: the one in the model's own files
        convert_to_tensor=True,
        show_progress_bar=True,
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
    """Yield the cosines or dot products with all abstracts for each claim: exact, in float32."""
    import torch

    # mmap_mode "c", since torch warns of "r"
    vectors = torch.from_numpy(np.load(folder / "embeddings.npy", mmap_mode="c"))
    queries = encode_claims(meta, claims, args).float()
    if meta.get("similarity") != "dot":
        # The index has unit vectors, so inner products with unit vectors are cosines.
        queries = torch.nn.functional.normalize(queries)
    for batch in queries.split(128):  # 0.2 GB of scores with 394,269 abstracts
        # In blocks, so that no float32 copy of the whole index is made.
        scores = [batch @ block.to(batch.device).float().T for block in vectors.split(65_536)]
        yield from torch.cat(scores, dim=1).cpu().numpy()


# For each kind of index: the function that yields scores, and a score that is too low for a run.
# BM25 and SPLADE give the score 0 to an abstract without a term of the claim.
SEARCH = {
    "bm25": (search_bm25, 0),
    "dense": (search_dense, -np.inf),
    "splade": (search_splade, 0),
}


def best_rows(scores, lowest, k):
    """Return the k best rows with a score above lowest; ties keep the order of the rows.

    The k-th best score is at least the k-th best maximum of blocks. Sorting only the scores that
    reach this bound takes a fifth of the time.
    """
    k = min(k, len(scores))
    length = max(1, len(scores) // (4 * k))  # of a block
    maxima = np.maximum.reduceat(scores, np.arange(0, len(scores), length))
    bound = np.partition(maxima, -k)[-k]
    rows = np.flatnonzero((scores >= bound) & (scores > lowest))
    return rows[np.argsort(-scores[rows], kind="stable")][:k]


# ---------- Retrieve
def search(kind, claims, inputs, args):
    """Return a table of PAIR and score: each claim's best abstracts in an index, best first.

    claims: {claim_id: claim}; inputs: {path: sha256} of the indexes and the corpus.
    """
    import pandas as pd

    folder = Path(args.index, kind)
    scores_of, lowest = SEARCH[kind]
    if sidecar_of(folder).get("sha256") != inputs[str(folder)]:
        fail(folder, "damaged, or without its sidecar; make it again by 01_index.py --force")
    meta = json.loads((folder / "meta.json").read_bytes())
    if meta["corpus"] != inputs[args.corpus]:
        fail(folder, "the corpus has changed since then; make the index again by 01_index.py")
    abstract_ids = np.array(json.loads((folder / "abstract_ids.json").read_bytes()), object)
    if args.restrict:
        run = read_table(args.restrict, RUN, claim_id=claims, abstract_id=abstract_ids)
        rows = pd.Index(abstract_ids).get_indexer(run["abstract_id"])
        candidates = pd.Series(rows).groupby(run["claim_id"]).agg(list)
    found = []
    equal = 0
    for claim_id, scores in zip(claims, scores_of(folder, meta, list(claims.values()), args)):
        if not np.isfinite(scores).all():
            fail(folder, "scores are not finite; make the index again with --dtype fp32")
        equal += np.ptp(scores) < 1e-5
        if args.restrict:
            is_other = np.ones(len(scores), bool)
            is_other[candidates.get(claim_id, [])] = False
            scores[is_other] = lowest
        for row in best_rows(scores, lowest, args.top_k):
            found.append((claim_id, abstract_ids[row], scores[row]))
    if equal and kind == "dense":  # others leave out what has the score 0
        warn(folder, f"all scores are equal for {equal} of {len(claims)} claims; check its model")
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
    return run


def retrieve(args):
    """Write a run for each index, and their reciprocal rank fusion."""
    kinds = args.retrievers or [kind for kind in SEARCH if Path(args.index, kind).is_dir()]
    outs = [f"{args.out}/{kind}.tsv" for kind in kinds]
    if len(kinds) > 1:
        outs.append(f"{args.out}/hybrid.tsv")
    inputs = [args.claims, args.corpus, *[Path(args.index, kind) for kind in kinds]]
    if args.restrict:
        inputs.append(args.restrict)
    task = task_of(args, *inputs)
    if not kinds:
        fail(args.index, "no index; make one by 01_index.py")
    if up_to_date(args, task, *outs):
        return {"made": []}
    claims = read_claims(args.claims)
    runs = [search(kind, claims, task["inputs"], args) for kind in kinds]
    runs = [write_run(run, out, task, args.top_k, len(claims)) for run, out in zip(runs, outs)]
    if len(runs) > 1:
        abstract_ids = json.loads(Path(args.index, kinds[0], "abstract_ids.json").read_bytes())
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
    constants: list  # values of k that a fit tries: [0] if it has no k, [] if it is not fitted


METHODS = {
    "zscore": Method(zscore, np.nansum, [0]),
    "rrf": Method(reciprocal_rank, np.nansum, [1, 6, 15, RRF_K]),  # Cormack et al. 2009
    "union": Method(inverse_rank, np.nanmax, []),  # the best rank
}


class Fusion(NamedTuple):
    """How several runs become one."""

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
    paths = [os.path.relpath(run, f"{args.work}/{args.split}") for run in runs]
    return [Path(path).name if path.startswith("..") else path for path in paths]


def warn_of_splits(args):
    """Warn of runs that were made for another split than this call is for."""
    for path in args.runs:
        split = sidecar_of(path).get("arguments", {}).get("split", args.split)
        if split != args.split:
            warn(path, f"it was made for the split {split}, this call is for {args.split}: --split")


def read_fusion(args):
    """Return the Fusion in --fusion, a file of recipes/train/fit_fusion.py."""
    try:
        found = json.loads(Path(args.fusion).read_bytes())
        names = found["runs"]
        fusion = Fusion(found["method"], amount(found["rrf_k"]), [*map(amount, found["weights"])])
        if fusion.method not in METHODS:
            raise ValueError
    except (ValueError, LookupError, TypeError, argparse.ArgumentTypeError):
        fail(args.fusion, "no fusion of runs; make one by recipes/train/fit_fusion.py")
    if names != names_of(args.runs, args):
        fail(args.fusion, f"it is for {', '.join(names)}; name these runs, in this order")
    return fusion


def fuse(args):
    """Fuse run files into one run."""
    inputs = list(args.runs)
    fusion = Fusion(args.method, args.rrf_k, args.weights or [1] * len(args.runs))
    if args.fusion:
        inputs.append(args.fusion)
        fusion = read_fusion(args)
    if len(fusion.weights) != len(args.runs):
        fail("--weights", f"{len(fusion.weights)} for {len(args.runs)} runs; give one for each")
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
    run_job(command_line({retrieve: add_retrieve, fuse: add_fuse}))


# --- helpers (same in all six scripts)
CHANGE_NO_OUTPUT = {"force", "out", "device", "function"}  # arguments, in every job
PACKAGES = ("bm25s", "sentence_transformers", "torch", "transformers")  # whose versions are kept
START = time.monotonic()
# Files of a folder that no model or index needs: README.md, hidden ones (hf download leaves some)
NOT_LOADED = r"(^|/)\.\w|^README.md$"
ABSTRACT_ID = r"(?!None$)[^\t\r\n]+"  # fits into a TSV file; None is JSON's null


def shown(text):
    """Return a text in one line, with the passwords of URLs hidden."""
    return re.sub(r"(?<=://)[^/\s]+@", "***@", " ".join(str(text).split()))


def warn(where, what):
    """Print a warning on stderr."""
    print(shown(f"warning: {where}: {what}"), file=sys.stderr)


def fail(where, what):
    """End with one line on stderr and exit status 2."""
    print(shown(f"error: {where}: {what}"), file=sys.stderr)
    sys.exit(2)


def number(kind, least, most, text):
    """Return a number within a range; argparse tells the user of any other text."""
    try:
        value = kind(text)
    except ValueError:
        value = np.nan
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{text} is no number from {least:,} to {most:,}")
    return value


count = functools.partial(number, int, 1, 1_000_000_000)
count_or_0 = functools.partial(number, int, 0, 1_000_000_000)
amount = functools.partial(number, float, 0, 1_000_000_000)
share = functools.partial(number, float, 0, 1)


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


def task_of(args, *inputs, models=(), without=()):
    """Return what decides an output: arguments but without, digests of inputs and local models."""
    for path in map(Path, inputs):
        if not path.exists():
            names = sorted(other.name for other in path.parent.glob(f"*{path.suffix}"))
            fail(path, f"not found; run the stage that makes it, or name (--run) one of {names}")
    arguments = {k: v for k, v in vars(args).items() if k not in CHANGE_NO_OUTPUT.union(without)}
    local = [path for path in models if Path(path).exists()]  # others are on the hub
    return {"arguments": arguments, "inputs": {str(p): digest(p) for p in [*inputs, *local]}}


def sidecar_of(path):
    """Return how an output was made; {} without a sidecar, or with a torn one."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(Path(f"{path}.meta.json").read_bytes())
    return {}


def up_to_date(args, task, *outs, is_folder=False):
    """Return whether this very task has made all outs, and nobody has changed them since.

    End if an output would replace an input, or what the kit has not made: a file replaces a file
    alone, a folder (is_folder) a folder that has a sidecar.
    """
    inputs = {os.path.abspath(path) for path in task["inputs"]}
    for out in map(Path, outs):
        out.parent.mkdir(parents=True, exist_ok=True)
        is_ours = out.is_dir() and Path(f"{out}.meta.json").exists() if is_folder else out.is_file()
        if out.exists() and not is_ours or os.path.abspath(out) in inputs:
            fail(out, "not made by this script, which would replace it, or read by this call")
    for out in outs:
        if args.force or not Path(out).exists():
            return False
        made = task | {"sha256": digest(out)}
        if not made.items() <= sidecar_of(out).items():
            return False
    print("up to date:", *outs, "(--force makes it again)")
    return True


@contextlib.contextmanager
def written(path, task, **summary):
    """Yield a temporary path for a new output, which then replaces path as a whole."""
    path = Path(path)
    with tempfile.TemporaryDirectory(prefix=f"{path.name}.", dir=path.parent) as folder:
        new = Path(folder, path.name)
        yield new
        made = {
            "command": [shown(word) for word in sys.argv],
            "script": digest(sys.argv[0]),
            "packages": {
                name: sys.modules[name].__version__ for name in PACKAGES if name in sys.modules
            },
            "seconds": round(time.monotonic() - START),
            "sha256": digest(new),  # before another process may replace path, too
        }
        meta = Path(f"{path}.meta.json")
        meta.write_text("{}")  # fits no task: after a kill from here on, the output is made again
        if path.is_dir() and new.is_dir():  # no folder takes the place of another one
            path.rename(f"{folder}/old")
        new.replace(path)
        meta.write_text(json.dumps(made | task | summary, indent=1))


def add_shared(job, split=None):
    """Add the flags that all scripts share; split: default of --split, None for jobs without it."""
    add = job.add_argument_group("shared by all scripts").add_argument
    # fmt: off
    add("--data", default="data/demo", help="read data of this folder, {data} in other defaults")
    add("--work", help="""keep indexes, models and runs in this folder, {work} in other defaults,
        where the next scripts find them (default: work/NAME, with the last name in --data)""")
    if split:
        add("--split", default=split,
            help="take claims and judgements of this split, {split} in other defaults")
    add("--force", action="store_true", help="make outputs again, even if they are up to date")
    # fmt: on


class Parser(argparse.ArgumentParser):
    def error(self, message):  # one line, in place of argparse's usage
        fail(self.prog, f"{message}; see --help")


def command_line(jobs):
    """Return the parsed arguments; jobs: {function: what adds its flags}, the default job first."""
    names = [function.__name__ for function in jobs]
    layout = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=__doc__, formatter_class=layout)
    choices = parser.add_subparsers(title="jobs", metavar=f"JOB (default: {names[0]})")
    for function, add_flags in jobs.items():
        name = function.__name__
        job = choices.add_parser(name, help=function.__doc__, description=function.__doc__)
        job.set_defaults(function=function, job=name)
        add_flags(job)
        for flag in job._actions:  # argparse has no public list of them
            if flag.default and flag.default != argparse.SUPPRESS:
                flag.help += f" (default: {shown(flag.default)})"
    words = sys.argv[1:]
    if not words or words[0] not in (*names, "-h", "--help"):
        words = [names[0], *words]
    args = parser.parse_args(words)
    if "data" in args:
        args.work = args.work or f"work/{Path(args.data).resolve().name}"
    for name, value in vars(args).items():
        if isinstance(value, str):
            for field in ("data", "work", "split"):  # defaults may name these flags
                value = value.replace(f"{{{field}}}", str(vars(args).get(field)))
            setattr(args, name, value)
    return args


def run_job(args):
    """Run the job, and print its result as JSON; errors of the machine are one line."""
    try:
        print(json.dumps(args.function(args)))
    except (OSError, UnicodeError, ImportError, RuntimeError) as error:
        fail(args.job, error)


def read_table(path, columns, **known):
    """Read a TSV file of texts; ranks and scores are numbers, a run is sorted by claim and rank.

    known: {column: the values that it may hold, if it is there}. The first faulty row ends the job.
    """
    import pandas as pd

    try:
        table = pd.read_csv(
            path,
            sep="\t",
            dtype=dict.fromkeys({*columns, *known} - {"rank", "score"}, str),
            encoding="utf-8-sig",
            quoting=csv.QUOTE_NONE,
            na_filter=False,
            skip_blank_lines=False,  # so that rows are lines
        )
    except ValueError as error:  # an empty file, another encoding, a row that is too long
        fail(path, f"{error}; see data/convert.py")
    is_whole = isinstance(table.index, pd.RangeIndex)  # else a row has more fields than the header
    if not is_whole or not set(columns) <= set(table):
        fail(
            f"{path}:1",
            f"""found columns {", ".join(table)}; wanted {", ".join(columns)}, between tabs, in
            rows of one length; python data/convert.py {path} --out NEW.tsv (--columns WANTED=FOUND
            renames)""",
        )
    table = table[(table[list(columns)] != "").any(axis=1)]  # without blank lines
    if "claim" in columns:
        quoted = '^"((?:[^"]|"")*)"$'  # as pandas writes texts with quotation marks
        table["claim"] = table["claim"].str.replace(
            quoted, lambda text: text[1].replace('""', '"'), regex=True
        )
    ids = [column for column in columns if column.endswith("_id")]
    faults = {f"{column} is empty": table[column] == "" for column in columns}
    for column in known.keys() & set(table):
        faults[f"unknown {column}"] = ~table[column].isin(known[column])
    faults[f"an earlier row has this {' and '.join(ids)}"] = table.duplicated(ids)
    if "rank" in columns:
        for column in ("rank", "score"):
            table[column] = pd.to_numeric(table[column], errors="coerce")
        table = table.iloc[np.lexsort((table["rank"], table["claim_id"].factorize()[0]))]
        by_claim = table.groupby("claim_id")
        counted = by_claim.cumcount() + 1
        before = by_claim["score"].shift()
        faults["score is not a finite number"] = ~np.isfinite(table["score"])
        faults["the ranks of a claim are not 1, 2, 3, ..."] = table["rank"] != counted
        faults[
            "the score is above that of the rank before: higher is better, so negate distances"
        ] = table["score"] > before
        table = table.assign(rank=counted)  # integers; some tools write 1.0
    for what, is_faulty in faults.items():
        if is_faulty.any():
            row = is_faulty.idxmax()
            fail(f"{path}:{row + 2}", f"{what}: {' '.join(table.loc[row].filter(like='_id'))}")
    return table.reset_index(drop=True)


def read_claims(path):
    """Return {claim_id: claim}."""
    columns = ["claim_id", "claim"]
    return dict(read_table(path, columns)[columns].to_numpy())


def read_corpus(path):
    """Return {abstract_id: record}."""
    corpus = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line.decode("utf-8-sig"))
                abstract_id = re.fullmatch(ABSTRACT_ID, str(record["abstract_id"]))[0]
            except (ValueError, LookupError, TypeError):
                fail(
                    f"{path}:{number}",
                    "no JSON object in UTF-8 with an abstract_id of one line; see data/convert.py",
                )
            if abstract_id in corpus:
                fail(f"{path}:{number}", f"a second abstract {abstract_id}; remove one")
            corpus[abstract_id] = record
    if not corpus:
        fail(path, "no abstracts; see data/convert.py")
    return corpus


def read_abstracts(path, fields, separator=" "):
    """Return {abstract_id: text} of a corpus; fields: names with commas between them."""
    names = [name.strip() for name in fields.split(",")]
    records = read_corpus(path)
    unknown = set(names) - {"title"}.union(*records.values())  # a title is optional
    if unknown:
        fail(path, f"no record has the field {', '.join(sorted(unknown))}; see --fields")
    return {key: text_of(record, names, separator) for key, record in records.items()}


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


def write_table(table, path):
    """Write a table as read_table reads it: quotation marks mean nothing."""
    table.to_csv(path, sep="\t", index=False, float_format="%.9g", quoting=csv.QUOTE_NONE)


# --- end of helpers


# --- analyser (same in 01 and 02)
# bm25s imports JAX if it is installed, and JAX would take most of a GPU's memory.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
INVISIBLE = "[\u00ad\u200b-\u200d\u2060\ufeff]"  # soft hyphens and zero-width characters


def tokenise(texts, normalise, stemmer, **options):
    """Return what bm25s.tokenize() makes of texts by an analyser, as meta.json of an index has it.

    options: further arguments of bm25s.tokenize().
    """
    import bm25s
    from Stemmer import Stemmer

    if normalise:
        texts = [
            text
            if text.isascii()
            else re.sub(INVISIBLE, "", unicodedata.normalize(normalise, text))
            for text in texts
        ]
    if options["lower"] == "turkish":  # before lower-casing, which is that of English
        texts = [text.replace("I", "ı").replace("İ", "i") for text in texts]
    stemmer = Stemmer(stemmer) if stemmer else None
    return bm25s.tokenize(texts, stemmer=stemmer, show_progress=False, **options)


# --- end of analyser


# --- models (same in 01, 02, 03 and 05)
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Else transformers asks the hub to convert a .bin, which opens a pull request there.
os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "1"


def device_of(args):
    """Return the first device of --device, else the one that the library takes."""
    from sentence_transformers.util import get_device_name

    return args.device[0] if args.device else get_device_name()


def batch_size_of(args):
    """Return --batch-size; without it, what is fast on the device."""
    return args.batch_size or (128 if device_of(args).startswith("cuda") else 32)


def open_model(load, name, args, dtype="fp32", **options):
    """Load a model with load(name, ...), a class or function that takes the library's arguments.

    No code of the model is run. dtype: auto is half precision on a GPU, else fp32.
    """
    import torch
    from sentence_transformers.util import load_file_path
    from tokenizers import Tokenizer

    is_old = torch.__version__ < "2.10" or None  # in which a .bin can run code (CVE-2026-24747)
    device = device_of(args)
    if dtype == "auto":
        dtype = "fp32"
        if device.startswith("cuda"):
            dtype = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    options |= {
        "device": device,
        "trust_remote_code": False,
        "model_kwargs": {"dtype": DTYPES[dtype], "use_safetensors": is_old},
        "local_files_only": Path(name).exists(),  # the hub is not asked about a folder
    }
    try:
        model = load(name, **options)
    except Exception as error:  # the libraries raise many kinds
        fail(
            name,
            f"""not loaded; train it (recipes/train), or name another (data/README.md, What loads):
            {error}""",
        )
    if model.config:  # static embeddings have none
        tokenizer = model.tokenizer
        commit = model.model_card_data.base_model_revision
        path = load_file_path(tokenizer.name_or_path, "tokenizer.json", revision=commit)
        # For some classes of tokenizers, transformers 5 takes the vocabulary alone from this file.
        if path and tokenizer.is_fast and not getattr(model[0], "do_lower_case", None):
            file = Tokenizer.from_file(path)
            tokenizer.backend_tokenizer.normalizer = file.normalizer
            tokenizer.backend_tokenizer.pre_tokenizer = file.pre_tokenizer
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # Llama has none
        model.config.pad_token_id = tokenizer.pad_token_id
        if not tokenizer.pad_token or len(tokenizer.get_vocab()) < 200:  # special tokens alone
            fail(name, "files of its tokenizer are missing, or a padding token; copy all files")
    return model


# --- end of models

if __name__ == "__main__":
    main()
