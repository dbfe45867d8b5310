# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "PyStemmer==3.1.0", "bm25s==0.3.16", "ir-measures==0.4.3", "numpy==2.4.6", "pandas==3.1.1",
#   "sentence-transformers==6.2.0", "torch==2.13.0", "tqdm==4.70.1", "transformers==5.23.0",
# ]
# ///
"""
Retrieve abstracts for each claim, fuse runs, fit a fusion's weights, mine training examples.

Reads   claims and index/*/; fuse: runs; fit: runs, qrels; mine: a run, qrels, corpus
Writes  {bm25,dense,splade}.tsv and hybrid.tsv, their reciprocal rank fusion; fuse: fused.tsv;
        fit: fusion.json; mine: examples.jsonl
Prints  counts of each file; the last line is JSON

Examples
    python 02_retrieve.py --limit 5
    python 02_retrieve.py fuse a.tsv b.tsv --method zscore --weights 0.3 0.7
    python 02_retrieve.py fit work/demo/train/{bm25,dense}.tsv --split train --measure R@10
    python 02_retrieve.py mine --shape tuples --hard 5 --easy 10
"""

import argparse
import contextlib
import csv
import hashlib
import itertools
import json
import shutil
import sys
import time
import unicodedata
from pathlib import Path

import numpy as np

PAIR = ["claim_id", "abstract_id"]
RUN = [*PAIR, "rank", "score"]
LABELS = ("SUPPORTS", "REFUTES", "NEI")
POOLS = {  # labels of what may be a negative; None: unjudged
    "both": ("NEI", None),
    "nei": ("NEI",),
    "unjudged": (None,),
}


# ---------- Search: scores of all abstracts for each claim
def search_bm25(folder, meta, claims, args):
    """Yield BM25 scores. A repeated term counts repeatedly."""
    import bm25s

    bm25 = bm25s.BM25.load(folder, mmap=True, show_progress=False)
    rows = map(bm25.get_tokens_ids, tokenise(claims, return_ids=False, **meta["analyser"]))
    return map(bm25.get_scores_from_ids, rows)


def encode_claims(meta, claims, args):
    """Return the embeddings of claims (claims, dimensions)."""
    import sentence_transformers as st

    load = st.SparseEncoder if meta["kind"] == "splade" else st.SentenceTransformer
    model = meta["model"]
    if Path(model).exists() and digest(model) != meta["model_sha256"]:
        fail(model, f"it has changed since the {meta['kind']} index was made; see 01_index.py")
    encoder = open_model(load, model, args)
    if meta["max_length"]:  # static embeddings have no limit
        encoder.max_seq_length = meta["max_length"]
    return encoder.encode_query(claims, prompt=meta["query_prompt"], convert_to_tensor=True)


def search_splade(folder, meta, claims, args):
    """Yield inner products of term weights."""
    from scipy.sparse import load_npz

    vectors = encode_claims(meta, claims, args).cpu().coalesce()
    (rows, terms), weights = vectors.indices().numpy(), vectors.values().numpy()
    if meta["activation"] == "relu":
        weights = np.expm1(weights)  # undoes the logarithm of log(1 + ReLU(logit))
    index = load_npz(folder / "weights.npz")  # CSC: abstracts x vocabulary
    for row in range(len(claims)):
        yield index[:, terms[rows == row]] @ weights[rows == row]


def search_dense(folder, meta, claims, args):
    """Yield cosines, exact, in float32: inner products of unit vectors."""
    import torch

    vectors = torch.from_numpy(np.load(folder / "embeddings.npy", mmap_mode="c"))
    queries = torch.nn.functional.normalize(encode_claims(meta, claims, args).float())
    for part in queries.split(128):  # their scores take 0.2 GiB with 394,269 abstracts
        blocks = [part @ block.to(part.device).float().T for block in vectors.split(65_536)]
        yield from torch.cat(blocks, dim=1).cpu().numpy()


# What yields scores (abstracts,) of each claim, and the score of nothing in common
SEARCH = {"bm25": (search_bm25, 0), "dense": (search_dense, -np.inf), "splade": (search_splade, 0)}


def best_rows(scores, lowest, k):
    """Return the k best rows with a score above lowest; ties, also at the cut, in their order."""
    k = min(k, len(scores))
    height = max(1, len(scores) // (4 * k))  # with maxima of blocks: a fifth of the time
    maxima = scores[: len(scores) // height * height].reshape(height, -1).max(axis=0)
    rows = np.flatnonzero((scores >= np.partition(maxima, -k)[-k]) & (scores > lowest))
    return rows[np.argsort(-scores[rows], kind="stable")][:k]


# ---------- Retrieve
def search(kind, claims, corpus, args):
    """Return a table of PAIR and score: each claim's best abstracts in an index."""
    import pandas as pd

    folder, (scores_of, lowest), found = Path(args.index, kind), SEARCH[kind], []
    meta = json.loads((folder / "meta.json").read_bytes())
    if meta["corpus"] != corpus:
        fail(folder, "the corpus has changed since then; see 01_index.py")
    ids = np.array(json.loads((folder / "abstract_ids.json").read_bytes()), object)
    if args.restrict:
        run = read_table(args.restrict, RUN, abstract_id=ids)
        rows = pd.Series(pd.Index(ids).get_indexer(run["abstract_id"]))
        candidates = rows.groupby(run["claim_id"]).agg(list)
    all_scores = scores_of(folder, meta, claims["claim"].tolist(), args)
    for claim, scores in zip(claims["claim_id"], all_scores):
        if not np.isfinite(scores).all():
            fail(folder, "scores are not finite; index with --dtype fp32")
        if args.restrict:
            scores[np.delete(np.arange(len(ids)), candidates.get(claim, []))] = lowest
        rows = best_rows(scores, lowest, args.top_k)
        found += [(claim, ids[row], scores[row]) for row in rows]
    return pd.DataFrame(found, columns=[*PAIR, "score"])


def write_run(run, path, task, top_k, claims):
    """Write and return the first top_k rows of each claim of a table without ranks."""
    run = run.assign(rank=run.groupby("claim_id").cumcount() + 1)
    run = run.loc[run["rank"] <= top_k, RUN]
    with written(path, task) as new:
        run.to_csv(new, sep="\t", index=False, float_format="%.9g")
    lacking = claims - run["claim_id"].nunique()
    print(f"{path}: {len(run)} rows, {claims} claims, {lacking} without rows")
    return run


def retrieve(args):
    """Write a run for each index, and their reciprocal rank fusion."""
    kinds = args.retrievers or [kind for kind in SEARCH if Path(args.index, kind).is_dir()]
    if not kinds:
        fail(args.index, "no index; make one by 01_index.py")
    names = kinds if len(kinds) == 1 else [*kinds, "hybrid"]
    outs = [f"{args.out}/{name}.tsv" for name in names]
    indexes = [Path(args.index, kind) for kind in kinds]
    task = task_of(args, args.claims, args.corpus, *indexes, *filter(None, [args.restrict]))
    if up_to_date(args, task, *outs):
        return {"made": []}
    claims = read_table(args.claims, ["claim_id", "claim"])[: args.limit]
    runs = [search(kind, claims, task["inputs"][args.corpus], args) for kind in kinds]
    runs = [write_run(run, out, task, args.top_k, len(claims)) for run, out in zip(runs, outs)]
    if len(runs) > 1:
        ids = json.loads((indexes[0] / "abstract_ids.json").read_bytes())
        fused = fuse_runs(runs, [1] * len(runs), "rrf", args.rrf_k, ids)
        write_run(fused, outs[-1], task, args.top_k, len(claims))
    return {"made": outs, "claims": len(claims)}


# ---------- Fuse
def reciprocal_rank(run, k):
    """1 / (k + rank)"""
    return 1 / (k + run["rank"])


def zscore(run, _):
    """standardised score, where a missing abstract counts as the run's lowest"""
    scores = run["score"].groupby(run["claim_id"])
    return (run["score"] - scores.transform("min")) / scores.transform("std", ddof=0).replace(0, 1)


def inverse_rank(run, _):
    """1 / rank"""
    return 1 / run["rank"]


# The points of a run's rows, how they are combined, and each k that fit tries, if any
METHODS = {
    "zscore": (zscore, np.nansum, [0]),
    "rrf": (reciprocal_rank, np.nansum, [1, 6, 15, 60]),  # Cormack et al. 2009
    "union": (inverse_rank, np.nanmax, []),
}  # the best rank: weights mean nothing


def points_table(runs, method, k):
    """Return points (pairs, runs), indexed by PAIR; NaN where a run lacks a pair."""
    import pandas as pd

    points = [METHODS[method][0](run, k).set_axis(run.set_index(PAIR).index) for run in runs]
    return pd.concat(points, axis=1)


def combined(table, weights, method):
    """Return a score for each pair of a table of points."""
    terms = np.sort(table.to_numpy() * weights, axis=1)  # the same terms give the same sum
    return METHODS[method][1](terms, axis=1)


def fuse_runs(runs, weights, method, k, ids):
    """Return a table of PAIR and score, best first; ties by ids, else by the runs."""
    import pandas as pd

    table = points_table(runs, method, k)
    fused = table.index.to_frame(index=False).assign(score=combined(table, weights, method))
    place = pd.Index(ids).get_indexer(fused["abstract_id"])
    return fused.iloc[np.lexsort((place, -fused["score"], fused["claim_id"].factorize()[0]))]


def check_claims(tables):
    """Refuse {path: claim_ids} without any in common; warn of what one lacks."""
    claims = {path: set(ids) for path, ids in tables.items()}
    somewhere = set.union(*claims.values())
    if somewhere and not set.intersection(*claims.values()):
        fail(", ".join(claims), "no claim in common; name files of one split")
    for path, ids in claims.items():
        if ids != somewhere:
            warn(path, f"{len(somewhere - ids)} of {len(somewhere)} claims are not in it")


def fuse(args):
    """Fuse run files into one run."""
    weights, method, k = args.weights or [1] * len(args.runs), args.method, args.rrf_k
    corpus = [path for path in [f"{args.data}/corpus.jsonl"] if Path(path).exists()]
    task = task_of(args, *args.runs, *corpus, *filter(None, [args.fusion]))
    if up_to_date(args, task, args.out):
        return {"made": []}
    if args.fusion:
        fitted = json.loads(Path(args.fusion).read_bytes())
        weights, method, k = fitted["weights"], fitted["method"], fitted["rrf_k"]
        if fitted["runs"] != [Path(path).name for path in args.runs]:
            fail(args.fusion, f"name {', '.join(fitted['runs'])}, in this order")
    if len(weights) != len(args.runs):
        fail("--weights", f"{len(weights)} for {len(args.runs)} runs")
    runs = [read_table(path, RUN) for path in args.runs]
    check_claims({path: run["claim_id"] for path, run in zip(args.runs, runs)})
    ids = [name for path in corpus for name in read_corpus(path)]
    fused = fuse_runs(runs, weights, method, k, ids)
    write_run(fused, args.out, task, args.top_k, fused["claim_id"].nunique())
    return {"made": [args.out]}


# ---------- Fit the weights of a fusion
def grid(count):
    """Return all weights in tenths, rows [count] with sum 1, the most even first."""
    cuts = itertools.combinations(range(9 + count), count - 1)  # of ten tenths into count parts
    rows = np.array([np.diff([-1, *cut, 9 + count]) - 1 for cut in cuts]) / 10
    return rows[np.argsort(rows.std(axis=1), kind="stable")]


def fusions(runs, evidence, measure):
    """Yield (value, method, k, weights) of every fusion; evidence: judged pairs."""
    import ir_measures

    try:
        measure = ir_measures.parse_measure(measure)
        cutoff = measure["cutoff"]
    except (KeyError, NameError, ValueError):
        fail("--measure", f"{measure} is no measure with a cutoff")
    qrels = evidence.set_axis(["query_id", "doc_id"], axis=1).assign(relevance=1)
    scorer = ir_measures.evaluator([measure], qrels)
    for method, (_, _, constants) in METHODS.items():
        for k in constants:
            table = points_table(runs, method, k)
            claims, _ = table.index.get_level_values("claim_id").factorize()
            for weights in grid(len(runs)):
                order = np.lexsort((-combined(table, weights, method), claims))
                rank = np.arange(len(order)) - np.searchsorted(claims[order], claims[order])
                first = rank < cutoff
                run = table.index[order[first]].to_frame(False, ["query_id", "doc_id"])
                value = scorer.calc_aggregate(run.assign(score=-rank[first].astype(float)))[measure]
                yield value, method, k, weights.tolist()


def fit(args):
    """Find the method and weights of a fusion that are best on judged claims."""
    from tqdm.auto import tqdm

    task = task_of(args, *args.runs, args.qrels)
    if up_to_date(args, task, args.out):
        return {"made": []}
    runs = [read_table(path, RUN) for path in args.runs]
    qrels = read_table(args.qrels, [*PAIR, "label"], label=LABELS)
    evidence = qrels.loc[qrels["label"] != "NEI", PAIR]
    tables = {path: run["claim_id"] for path, run in zip(args.runs, runs)}
    check_claims(tables | {args.qrels: evidence["claim_id"]})
    settings = sorted(tqdm(fusions(runs, evidence, args.measure), "fit"), key=lambda one: -one[0])
    for value, method, k, weights in settings[:10]:
        print(f"{value:.4f}  {method}, k = {k}, weights {' '.join(map(str, weights))}")
    fusion = {"measure": args.measure, "runs": [Path(path).name for path in args.runs]}
    fusion |= dict(zip(["value", "method", "rrf_k", "weights"], settings[0]))
    with written(args.out, task) as new:
        new.write_text(json.dumps(fusion, indent=1) + "\n")
    return {"made": [args.out], **fusion}


# ---------- Mine training examples
def draw(names, count, order, rng, unwanted=()):
    """Return count of names (best first); random ones are not unwanted."""
    if order == "random":
        rows = rng.choice(len(names), min(count + len(unwanted), len(names)), False)
        return [names[row] for row in rows if names[row] not in unwanted][:count]
    return names[:count] if order == "best" else names[::-1][:count]


def negatives_of(labels, ranked, corpus, nei, args):
    """Return what hard and easy negatives are drawn from, and what is not easy.

    labels: {abstract_id: label} of a claim; ranked: its abstracts; nei: {abstract_id: "NEI"} of
    any claim, for the pool nei alone.
    """
    pool = POOLS[args.pool]
    first = list(dict.fromkeys([*ranked, *labels]))[: args.from_top]  # last, what the run lacks
    top = [name for name in first if labels.get(name, nei.get(name)) in pool]
    rest = list(nei) if args.pool == "nei" else corpus
    return top, rest, {name for name in labels if labels[name] not in pool}.union(first)


def examples_of(claim, evidence, negatives, args):
    """Yield examples: evidence and negatives; of labels negatives alone.

    --hard and --easy count by claim in pairs, else by evidence abstract.
    """
    top, rest, not_easy = negatives
    rng = np.random.default_rng([args.seed, *claim.encode()])  # other claims change no draw
    if args.shape == "tuples":
        for name in evidence:
            drawn = draw(top, args.hard, args.draw, rng)
            drawn = drawn + draw(rest, args.easy, "random", rng, not_easy)
            yield dict(kind="evidence", claim_id=claim, positive=name, negatives=drawn)
        return
    times, value = len(evidence), {"label": "NEI"}
    if args.shape == "pairs":
        times, value = 1, {"target": 0.0}
        for name in evidence:
            yield dict(kind="evidence", claim_id=claim, abstract_id=name, target=1.0)
    for name in draw(top, times * args.hard, args.draw, rng):
        yield dict(kind="hard", claim_id=claim, abstract_id=name, **value)
    for name in draw(rest, times * args.easy, "random", rng, not_easy):
        yield dict(kind="easy", claim_id=claim, abstract_id=name, **value)


def score_examples(claim, gold, scores, args):
    """Yield the top of a run with targets 0.5 + SCALE (score - MIDDLE), clipped to 0 to 1.

    Gold evidence has the target 1 (+VeriRel, section 3.4).
    """
    for name, score in list(scores.items())[: args.from_top]:
        if name not in gold:
            target = round(min(max(0.5 + args.scale * (score - args.middle), 0.0), 1.0), 6)
            yield dict(kind="score", claim_id=claim, abstract_id=name, target=target)
    for name in gold:
        yield dict(kind="evidence", claim_id=claim, abstract_id=name, target=1.0)


def by_claim(table, column):
    """Return {claim_id: {abstract_id: value}} of a column."""
    groups = table.groupby("claim_id", sort=False)
    return {claim: dict(zip(rows["abstract_id"], rows[column])) for claim, rows in groups}


def mine(args):
    """Write training examples: evidence, and negatives of a run and the corpus."""
    if args.shape == "scores" and None in (args.middle, args.scale):
        fail("--shape scores", "it needs --middle and --scale")
    task = task_of(args, args.qrels, args.corpus, *[args.run] * (args.hard > 0))
    if up_to_date(args, task, args.out):
        return {"made": []}
    corpus, ranked, examples, skipped = list(read_corpus(args.corpus)), {}, [], 0
    qrels = read_table(args.qrels, [*PAIR, "label"], abstract_id=corpus, label=LABELS)
    if args.hard > 0:
        ranked = by_claim(read_table(args.run, RUN, abstract_id=corpus), "score")
        check_claims({args.qrels: qrels["claim_id"], args.run: ranked})
    judged = by_claim(qrels, "label")
    nei = qrels["abstract_id"][(qrels["label"] == "NEI") & (args.pool == "nei")]
    nei = dict.fromkeys(nei, "NEI")
    for claim in judged | ranked:
        labels, scores = judged.get(claim, {}), ranked.get(claim, {})
        evidence = [name for name in labels if labels[name] != "NEI"]
        if args.shape == "scores":
            examples += score_examples(claim, evidence if args.gold else [], scores, args)
        elif evidence:
            negatives = negatives_of(labels, scores, corpus, nei, args)
            examples += examples_of(claim, evidence, negatives, args)
        else:
            skipped += 1
    facts = {"examples": len(examples), "claims_without_evidence": skipped}
    with written(args.out, task, **facts) as new:
        new.write_text("".join(json.dumps(example) + "\n" for example in examples))
    return {"made": [args.out], **facts}


# ---------- Command line
def add_retrieve(add):
    add("--claims", default="{data}/claims.{split}.tsv", help="claims")
    add("--corpus", default="{data}/corpus.jsonl", help="abstracts that were indexed")
    add("--index", default="{work}/index", help="folder of the indexes")
    add("--out", default="{work}/{split}", help="folder of the runs")
    add("--retrievers", nargs="+", choices=SEARCH, help="default: those in --index")
    add("--restrict", metavar="RUN", help="score only the candidates of this run")
    add("--limit", type=int, metavar="N", help="the first N claims")
    add("--top-k", type=int, default=100, help="abstracts per claim")
    add("--rrf-k", type=int, default=60, help="k of reciprocal rank fusion")
    add("--device", nargs="+", help="cpu, cuda:0, mps (default: a GPU, if any)")


def add_fuse(add):
    points = "; ".join(f"{name}: {method[0].__doc__}" for name, method in METHODS.items())
    add("runs", nargs="+", help="runs")
    add("--out", default="{work}/{split}/fused.tsv", help="fused run")
    add("--method", choices=METHODS, default="rrf", help=f"points of a row; {points}")
    add("--weights", nargs="+", type=float, help="one a run (default: 1 each)")
    add("--rrf-k", type=int, default=60, help="k of reciprocal rank fusion")
    add("--fusion", metavar="FILE", help="fusion.json of fit, in place of these flags")
    add("--top-k", type=int, default=100, help="abstracts per claim")


def add_fit(add):
    add("runs", nargs="+", help="runs of judged claims, unseen by models")
    add("--qrels", default="{data}/qrels.{split}.tsv", help="judged pairs")
    add("--out", default="{work}/{split}/fusion.json", help="for fuse")
    add("--measure", default="nDCG@10", help="to maximise, of ir-measures")


def add_mine(add):
    add("run", nargs="?", default="{work}/{split}/hybrid.tsv", help="source of hard negatives")
    add("--qrels", default="{data}/qrels.{split}.tsv", help="judged pairs")
    add("--corpus", default="{data}/corpus.jsonl", help="abstracts, source of easy negatives")
    add("--out", default="{work}/{split}/examples.jsonl", help="training examples")
    add(
        "--shape",
        choices=("pairs", "tuples", "labels", "scores"),
        default="pairs",
        help="pairs, scores: for 03, tuples: 01, 03, labels: 05",
    )
    add("--hard", type=int, default=4, help="negatives from the top of the run (examples_of)")
    add("--easy", type=int, default=0, help="random negatives from the rest of the corpus")
    add("--from-top", type=int, default=50, help="ranks that hard negatives come from")
    add("--draw", choices=["random", "best", "worst"], default="random", help="of these ranks")
    add(
        "--pool",
        choices=POOLS,
        default="both",
        help="what may be negative; nei: what is NEI for any claim",
    )
    add("--middle", type=float, help="scores: the score with target 0.5")
    add("--scale", type=float, help="scores: target per unit of the score")
    add("--gold", action="store_true", help="scores: evidence has the target 1")
    add("--seed", type=int, default=13, help="of random draws")


def main():
    run(command_line({retrieve: add_retrieve, fuse: add_fuse, fit: add_fit, mine: add_mine}))


# --- helpers (same in all six scripts)
START, WARNINGS = time.monotonic(), []
NEUTRAL = {"force", "out", "device", "batch_size", "function"}  # change no output
SPLITS = {"train": "train", "mine": "train", "fit": "dev"}  # of jobs; else test
PACKAGES = ("numpy", "pandas", "torch", "transformers", "sentence_transformers", "bm25s", "openai")


def warn(where, what):
    """Print a line on stderr; sidecars keep it."""
    WARNINGS.append(f"warning: {where}: {what}")
    print(WARNINGS[-1], file=sys.stderr)


def fail(where, what):
    """End with one line on stderr and exit status 2."""
    print(" ".join(f"error: {where}: {what}".split()), file=sys.stderr)
    sys.exit(2)


def read_table(path, columns, **known):
    """Read a TSV file as strings, a run with numbers; known: {column: its values}."""
    import pandas as pd

    try:
        table = pd.read_csv(
            path, sep="\t", dtype=str, na_filter=False, quoting=csv.QUOTE_NONE, encoding="utf-8-sig"
        )
    except ValueError as error:  # empty, not UTF-8, a long row
        fail(path, f"{error}; see data/convert.py")
    if not set(columns) <= set(table) or not isinstance(table.index, pd.RangeIndex):
        fail(f"{path}:1", f"wanted {', '.join(columns)} in rows of one length; see data/convert.py")
    if "claim" in columns:  # as pandas quotes
        table["claim"] = table["claim"].str.replace(
            '^"((?:[^"]|"")*)"$', lambda quoted: quoted[1].replace('""', '"'), regex=True
        )
    ids = [column for column in columns if column.endswith("_id")]
    bad = {f"{column} is empty": table[column] == "" for column in columns}
    bad |= {f"unknown {column}": ~table[column].isin(list(known[column])) for column in known}
    bad["an earlier row has this " + " and ".join(ids)] = table.duplicated(ids)
    if "rank" in columns:
        for column in ("rank", "score"):
            table[column] = pd.to_numeric(table[column], errors="coerce")
        table = table.iloc[np.lexsort((table["rank"], table["claim_id"].factorize()[0]))]
        bad["score is not a finite number"] = ~np.isfinite(table["score"])
        bad["rank is not 1, 2, 3"] = table["rank"] != table.groupby("claim_id").cumcount() + 1
    for what, rows in bad.items():
        if rows.any():
            row = rows.idxmax()
            fail(f"{path}:{row + 2}", f"{what}: {' '.join(table.loc[row, ids])}; fix this row")
    return table.reset_index(drop=True)


def read_corpus(path):
    """Read {abstract_id: record}; an abstract that is missing or null is ""."""
    corpus = {}
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
                name = str(record["abstract_id"])
            except (ValueError, LookupError, TypeError):
                fail(f"{path}:{number}", "no JSON object with an abstract_id; see data/convert.py")
            if name in corpus:
                fail(f"{path}:{number}", f"a second abstract {name}; remove one")
            corpus[name] = record | {"abstract": record.get("abstract") or ""}
    return corpus


def digest(path):
    """Return the sha256 of a file, of a folder's sidecar, or of all its files."""
    path, total = Path(path), hashlib.sha256()
    if path.is_dir() and Path(f"{path}.meta.json").exists():
        path = Path(f"{path}.meta.json")
    for one in filter(Path.is_file, [path, *sorted(path.rglob("*"))]):
        with one.open("rb") as file:
            hashlib.file_digest(file, lambda: total)
    return total.hexdigest()


def task_of(args, *inputs, models=()):
    """Return what decides an output: arguments and digests."""
    for path in inputs:
        if not Path(path).exists():
            fail(path, "not found; make it or fix its name")
    paths = [str(path) for path in (*inputs, *models) if Path(path).exists()]
    arguments = {name: value for name, value in vars(args).items() if name not in NEUTRAL}
    return {"arguments": arguments, "inputs": {path: digest(path) for path in paths}}


def up_to_date(args, task, *outs):
    """Return whether this very task has made all outs."""
    made, script = [], Path(sys.argv[0])
    for out in outs:
        meta = Path(f"{out}.meta.json")
        if Path(out).is_dir() and not meta.exists():
            fail(out, "not made by this script; give another --out")
        made.append(json.loads(meta.read_bytes()) if Path(out).exists() and meta.exists() else {})
    if args.force or not all(task.items() <= one.items() for one in made):
        return False
    for out, one in zip(outs, made):
        edited = f" (made by another version of {script.name}; --force makes it again)"
        print(f"up to date: {out}" + edited * (one["script"] != digest(script)))
    return True


@contextlib.contextmanager
def written(path, task, **facts):
    """Yield a temporary path. What is made there becomes path, whole, with a sidecar."""
    path, new, meta = Path(path), Path(f"{path}.tmp"), Path(f"{path}.meta.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(new, ignore_errors=True)
    yield new
    meta.write_text("{}")  # while the output is replaced
    shutil.rmtree(path, ignore_errors=True)
    new.replace(path)
    loaded = {name: sys.modules[name].__version__ for name in PACKAGES if name in sys.modules}
    made = {
        "command": sys.argv,
        "script": digest(sys.argv[0]),
        "packages": loaded,
        "warnings": WARNINGS,
        "seconds": round(time.monotonic() - START, 1),
    }
    new.write_text(json.dumps(task | facts | made, indent=1) + "\n")
    new.replace(meta)


def command_line(jobs):
    """Return the arguments; jobs: {function: what adds its flags}, the default first."""
    script, names = Path(sys.argv[0]).name, [function.__name__ for function in jobs]
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(script, description=__doc__, formatter_class=layout)
    choices = parser.add_subparsers(title="jobs", metavar=f"JOB (default: {names[0]})")
    for function, add_flags in jobs.items():
        name, sentence = function.__name__, function.__doc__.splitlines()[0]
        job = choices.add_parser(name, help=sentence, description=sentence)
        parser.error = job.error = lambda message: fail(script, f"{message}; see --help")
        job.set_defaults(function=function, job=name)
        job.add_argument("--data", default="data/demo", help="corpus, claims and qrels")
        job.add_argument("--work", help="what is made of it (default: work/NAME)")
        job.add_argument("--split", default=SPLITS.get(name, "test"), help="which claims")
        job.add_argument("--force", action="store_true", help="make outputs again")
        add_flags(job.add_argument)
        for flag in job._actions:
            known = flag.default not in (None, False, argparse.SUPPRESS)
            flag.help += " (default: %(default)s)" * known
    given = sys.argv[1:2] and sys.argv[1] in (*names, "-h", "--help")
    args = parser.parse_args(sys.argv[1:] if given else [names[0], *sys.argv[1:]])
    args.work = args.work or f"work/{Path(args.data).resolve().name}"
    for name, value in vars(args).items():
        for field in ("data", "work", "split") if isinstance(value, str) else ():
            value = value.replace(f"{{{field}}}", vars(args)[field])
        setattr(args, name, value)
    return args


def run(args):
    """Run the job, and print its result as JSON."""
    try:
        print(json.dumps(args.function(args)))
    except Exception as error:
        if not isinstance(error, (OSError, UnicodeError)) and "memory" not in repr(error).lower():
            raise
        fail(getattr(error, "filename", None) or args.job, error)


# --- end of helpers


# --- analyser (same in 01 and 02)
def tokenise(texts, name, normalise, stemmer, **options):
    """Return bm25s' tokens of texts by one of the ANALYSERS of 01_index.py."""
    import bm25s
    from Stemmer import Stemmer

    if normalise:
        texts = [unicodedata.normalize(normalise, text) for text in texts]
    stemmer = Stemmer(stemmer) if stemmer else None
    return bm25s.tokenize(texts, stemmer=stemmer, show_progress=False, **options)


# --- end of analyser


# --- models (same in 01, 02, 03 and 05)
def open_model(load, name, args, dtype="fp32", **options):
    """Return load(name), of safetensors, without code. auto: half precision on a GPU."""
    import torch

    device = args.device[0] if args.device else None
    gpu = torch.cuda.is_available() and device != "cpu"
    half = torch.bfloat16 if gpu and torch.cuda.is_bf16_supported(False) else torch.float16
    types = {
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "auto": half if gpu else torch.float32,
    }
    try:
        return load(
            str(name),
            device=device,
            trust_remote_code=False,
            **options,
            model_kwargs={"dtype": types[dtype], "use_safetensors": True},
        )
    except Exception as error:  # of many kinds
        fail(name, f"cannot be loaded: {error}; see data/README.md, models")


# --- end of models

if __name__ == "__main__":
    main()
