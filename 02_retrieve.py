# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "PyStemmer==3.1.0", "bm25s==0.3.16", "numpy==2.4.6", "pandas==3.1.1",
#   "sentence-transformers==6.2.0", "torch==2.13.0", "transformers==5.23.0",
# ]
# ///
"""
Retrieve abstracts for each claim, fuse runs, fit a fusion's weights, mine training examples.

Reads   claims and index/{bm25,dense,splade}/; fuse: runs; fit: runs, qrels; mine: a run, qrels,
        corpus
Writes  {bm25,dense,splade}.tsv, hybrid.tsv (their fusion), bm25-rm3.tsv (--feedback);
        fuse: fused.tsv; fit: fusion.json; mine: examples.jsonl
Prints  counts of each file, last one line of JSON

Examples
    python 02_retrieve.py --retrievers dense --restrict work/demo/test/bm25.tsv --out work/demo/few
    python 02_retrieve.py --retrievers bm25 --feedback 10 --top-k 1000
    python 02_retrieve.py fuse a.tsv b.tsv --method zscore --weights 0.3 0.7
    python 02_retrieve.py fit work/demo/train/{bm25,dense}.tsv --split train --measure R@10
    python 02_retrieve.py mine --shape tuples --hard 5 --easy 10 --easy-from corpus
"""
# --- constants (same in all six scripts)
import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during imports: no traceback
LABELS = ("SUPPORTS", "REFUTES", "NEI")
RUN = ["claim_id", "abstract_id", "rank", "score"]
# Flags that decide no byte of an output, but for the rounding of batches on a device
NEUTRAL = {"force", "out", "device", "batch_size", "concurrency", "function", "flags"}
# --- end of constants

import argparse
import contextlib
import difflib
import hashlib
import itertools
import json
import os
import re
import resource
import shlex
import shutil
import sys
import time
import unicodedata
import zlib
from pathlib import Path

import numpy as np

SHAPES = {"pairs": ["abstract_id", "target"], "labels": ["abstract_id", "label"],
          "tuples": ["positive", "negatives"]}
POOLS = {"nei": ["NEI"], "unjudged": [None], "both": ["NEI", None]}  # labels of negatives
RRF_K = 60       # Cormack et al. 2009
FITTED = [("zscore", 0), ("rrf", 1), ("rrf", 6), ("rrf", 15), ("rrf", 60)]  # method, k: sums only
RM3_TERMS, RM3_CLAIM = 30, 0.7  # terms of feedback, and the weight of the claim's own
ROUNDING = 1e-9  # of scores in a run: they have nine digits

# -------------------- Search: scores of all abstracts for each claim
def made_again(folder, args):
    """Return the command that makes an index again: the one that made it, if that is known."""
    words = ["01_index.py", "--indexes", folder.name, "--data", args.data, "--work", args.work]
    words += ["--corpus", args.corpus, "--out", args.index]
    made = read_object(f"{folder}.meta.json")
    if args.corpus in str(made.get("inputs")) and isinstance(made.get("command"), list):
        words = map(str, made["command"])
    return shlex.join(["python", *words, "--force"])

def open_index(folder, corpus, args):
    """Return meta.json of an unchanged index of this corpus (sha256)."""
    try:
        meta = json.loads((folder / "meta.json").read_bytes())
        mark = meta.pop("sha256")
        if hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest() != mark:
            raise ValueError("meta.json has changed")
        for name, (size, checksum) in meta["files"].items():
            data = np.memmap(folder / name, mode="r")
            if (len(data), zlib.crc32(data)) != (size, checksum):
                raise ValueError(f"{name} has changed")
        if meta["corpus"] != corpus:
            raise ValueError("the corpus has changed")
    except Exception as error:  # a file is missing, empty or of another version
        fail(folder, f"{error}; make it again: {made_again(folder, args)}")
    return meta

def check_finite(scores, where, advice):
    count = np.sum(~np.isfinite(scores))
    if count:
        fail(where, f"{count} of {len(scores)} scores are NaN or infinite; {advice}")

def postings(folder, ending, meta):
    """Return weights (abstracts, vocabulary) of an index."""
    from scipy.sparse import csc_matrix
    paths = [f"{folder}/{name}{ending}" for name in ("data", "indices", "indptr")]
    parts = tuple(np.load(path, mmap_mode="r") for path in paths)
    return csc_matrix(parts, shape=(meta["abstracts"], len(parts[2]) - 1))

def sum_postings(matrix, queries):
    """Yield the scores (abstracts,) of each query (terms, weights), in float32."""
    for terms, weights in queries:
        yield matrix[:, terms] @ weights

def bm25_queries(folder, meta, claims):
    """Return (terms, weights) of each claim; a repeated term counts repeatedly."""
    import bm25s
    from Stemmer import Stemmer
    analyser = dict(meta["analyser"])  # arguments of bm25s.tokenize, but for these:
    form, stemmer, _ = (analyser.pop(field) for field in ("normalise", "stemmer", "name"))
    if form:
        claims = [unicodedata.normalize(form, claim) for claim in claims]
    texts = bm25s.tokenize(
        claims, stemmer=Stemmer(stemmer) if stemmer else None, return_ids=False,
        show_progress=False, **analyser)
    vocabulary, queries = json.loads((folder / "vocab.index.json").read_bytes()), []
    for words in texts:
        terms = [vocabulary[word] for word in words if word in vocabulary]
        queries.append((terms, np.ones(len(terms), np.float32)))
    return queries

def search_bm25(folder, meta, claims, args):
    """Return (scores of each claim, 0 truncated claims)."""
    matrix = postings(folder, ".csc.index.npy", meta)
    return sum_postings(matrix, bm25_queries(folder, meta, claims)), 0

def rm3(terms, documents, scores):
    """Return (terms, weights): .7 P(w|claim) + .3 P(w|feedback), RM3 (Abdul-Jaleel et al. 2004).

    documents: weights (abstracts, vocabulary) of the first abstracts; scores: theirs. Variant:
    P(w|abstract) grows with BM25's weight of w, which the index holds, not with its count alone.
    """
    likely = documents.T @ scores
    best = top_k(likely, RM3_TERMS)
    weights = np.zeros(len(likely))
    weights[best] = (1 - RM3_CLAIM) * likely[best] / likely[best].sum()
    np.add.at(weights, terms, RM3_CLAIM / len(terms))
    return np.flatnonzero(weights), weights[weights > 0]

def search_rm3(folder, meta, claims, args):
    """Yield the scores of each claim with terms of its first abstracts."""
    matrix = postings(folder, ".csc.index.npy", meta)
    by_abstract = matrix.tocsr()
    for terms, weights in bm25_queries(folder, meta, claims):
        scores = matrix[:, terms] @ weights
        first = best_rows(scores, 0, None, args.feedback)
        if len(first):
            terms, weights = rm3(terms, by_abstract[first], scores[first])
        yield matrix[:, terms] @ weights

def encode(meta, claims, args):
    """Return the vectors of claims by the model of an index, and how many are truncated."""
    import sentence_transformers as library
    load = library.SparseEncoder if meta["kind"] == "splade" else library.SentenceTransformer
    model = meta["model"]
    if meta["model_sha256"] != (digest(model) if Path(model).exists() else ""):
        fail(model, f"not here, or not the model of the {meta['kind']} index; run this where "
             "01_index.py was run, link the model there, or make the index again")
    encoder, prompt = open_model(load, model, args, "fp32"), meta["query_prompt"]
    if meta["max_length"]:  # static embeddings have none
        encoder.max_seq_length = meta["max_length"]
    if prompt is None:
        prompt = encoder.prompts.get("query") or ""
    truncated = 0
    if getattr(encoder.tokenizer, "is_fast", False):
        texts = [prompt + claim for claim in claims]
        tokens = encoder.tokenizer(texts, truncation=False, verbose=False)["input_ids"]
        truncated = sum(len(row) > encoder.max_seq_length for row in tokens)
    return encoder.encode_query(claims, prompt=prompt, convert_to_tensor=True), truncated

def search_splade(folder, meta, claims, args):
    """Return (inner products of term weights for each claim, truncated claims)."""
    vectors, truncated = encode(meta, claims, args)
    vectors = vectors.cpu().coalesce()
    (rows, terms), weights = vectors.indices().numpy(), vectors.values().numpy()
    if meta["activation"] == "relu":
        weights = np.expm1(weights)  # the encoder gives log(1 + ReLU)
    queries = [(terms[rows == row], weights[rows == row]) for row in range(len(claims))]
    return sum_postings(postings(folder, ".npy", meta), queries), truncated

def search_dense(folder, meta, claims, args):
    """Return (cosines for each claim, truncated claims)."""
    import torch
    queries, truncated = encode(meta, claims, args)
    vectors = torch.from_numpy(np.load(folder / "embeddings.npy", mmap_mode="c"))
    return inner_products(vectors, torch.nn.functional.normalize(queries)), truncated

def inner_products(vectors, queries):
    """Yield vectors @ query (abstracts,) in float32 for each query, exact, block by block."""
    import torch
    for part in queries.split(128):  # scores of 0.2 GiB at 394,269 abstracts
        blocks = [part @ block.to(part.device).float().T for block in vectors.split(65_536)]
        yield from torch.cat(blocks, dim=1).cpu().numpy()

# A function of (folder, meta.json, claims, args), which returns an iterator of the scores
# (abstracts,) of each claim, and the number of truncated claims. LOWEST: scores of no result.
SEARCH = {"bm25": search_bm25, "dense": search_dense, "splade": search_splade}
LOWEST = {"bm25": 0, "bm25-rm3": 0, "dense": -np.inf, "splade": 0}  # 0: no common term

def top_k(scores, k):
    """Return the k best rows of scores, best first; ties, also at the cut, by corpus order."""
    k = min(k, len(scores))
    height = max(1, len(scores) // (4 * k))  # maxima of blocks: a fifth of the time of all scores
    maxima = scores[: len(scores) // height * height].reshape(height, -1).max(axis=0)
    rows = np.flatnonzero(scores >= np.partition(maxima, -k)[-k])
    return rows[np.argsort(-scores[rows], kind="stable")][:k]

def best_rows(scores, lowest, candidates, k):
    """Return the k best rows with a score above lowest; only candidates, unless they are None."""
    if candidates is not None:
        scores[np.delete(np.arange(len(scores)), candidates)] = lowest
    rows = top_k(scores, k)
    return rows[scores[rows] > lowest]

def check_claims(tables):
    """Refuse claim_ids {path: ids} that share none; count those that one of the tables lacks."""
    claims = {path: set(ids) for path, ids in tables.items() if len(ids)}
    somewhere = set().union(*claims.values())
    everywhere = somewhere.intersection(*claims.values())
    if somewhere and not everywhere:
        examples = ", ".join(f"{min(ids)} in {path}" for path, ids in claims.items())
        fail("claims", f"none is in all files ({examples}); are they of one split?")
    for path, ids in claims.items():
        if ids != somewhere:
            warn(path, f"{len(somewhere - ids)} of the {len(somewhere)} claims are not in it")

# -------------------- Retrieve
def by_claim(table, column):
    """Return {claim_id: {abstract_id: value}} of a column."""
    groups = table.groupby("claim_id", sort=False)
    return {claim: dict(zip(rows["abstract_id"], rows[column])) for claim, rows in groups}

def write_run(rows, claims, path, args, task, truncated=0):
    """Write and return the first --top-k of a claim's rows (claim_id, abstract_id, score)."""
    import pandas as pd
    run = pd.DataFrame(rows, columns=[*RUN[:2], "score"])
    run["rank"] = run.groupby("claim_id").cumcount() + 1
    run = run.loc[run["rank"] <= args.top_k, RUN]
    empty = claims - run["claim_id"].nunique()
    facts = {"rows": len(run), "claims_without_rows": empty, "truncated_claims": truncated}
    with written(path, task, **facts) as new:
        run.to_csv(new, sep="\t", index=False, float_format="%.9g", lineterminator="\n")
    print(f"{path}: {len(run)} rows, {claims} claims, {empty} of them without rows")
    if truncated:
        print(f"{truncated} of these claims are truncated")
    return run

def candidates_of(args, row_of):
    """Return {claim_id: rows of the index} of the run that --restrict names."""
    run = read_table(args.restrict, RUN, abstract_id=row_of)
    return {claim: rows.to_numpy()
            for claim, rows in run["abstract_id"].map(row_of).groupby(run["claim_id"])}

def search_all(search, claims, ids, lowest, candidates, args):
    """Yield (claim_id, abstract_id, score), best first; only candidates, unless they are None."""
    for claim, scores in zip(claims, search):
        check_finite(scores, args.index, "make the index again with --dtype fp32")
        rows = candidates if candidates is None else candidates.get(claim, [])
        for row in best_rows(scores, lowest, rows, args.top_k):
            yield claim, ids[row], scores[row]

def retrieve(args):
    """Write a run for each index, and their reciprocal rank fusion."""
    folders = {kind: Path(args.index, kind) for kind in args.retrievers}
    restrict = [args.restrict] if args.restrict else []
    task = task_of(args, args.claims, args.corpus, *folders.values(), *restrict)
    paths = {kind: f"{args.out}/{kind}.tsv" for kind in args.retrievers}
    if args.feedback:
        paths["bm25-rm3"] = f"{args.out}/bm25-rm3.tsv"
    if len(folders) > 1:
        paths["hybrid"] = f"{args.out}/hybrid.tsv"
    if up_to_date(args, task, *paths.values()):
        return {"made": []}
    claims = read_table(args.claims, ["claim_id", "claim"])
    if claims.empty:
        fail(args.claims, "no claims; add one a line")
    searches, runs, seconds, candidates = {}, {}, {}, None
    for kind, folder in folders.items():  # all models are loaded before the first run is written
        meta = open_index(folder, task["inputs"][args.corpus], args)
        searches[kind] = SEARCH[kind](folder, meta, claims["claim"].tolist(), args)
        if kind == "bm25" and args.feedback:
            searches["bm25-rm3"] = search_rm3(folder, meta, claims["claim"].tolist(), args), 0
    ids = json.loads((folders[args.retrievers[0]] / "abstract_ids.json").read_bytes())
    if args.restrict:
        candidates = candidates_of(args, {name: row for row, name in enumerate(ids)})
        check_claims({args.claims: claims["claim_id"], args.restrict: candidates})
    for kind, (search, truncated) in searches.items():
        start, lowest = time.monotonic(), LOWEST[kind]
        rows = list(search_all(search, claims["claim_id"], ids, lowest, candidates, args))
        seconds[kind] = round(time.monotonic() - start, 2)
        runs[kind] = write_run(rows, len(claims), paths[kind], args, task, truncated)
    if "hybrid" in paths:
        parts = [runs[kind] for kind in folders]
        fused = fuse_runs(parts, [1] * len(parts), "rrf", args.rrf_k, ids)
        write_run(fused, len(claims), paths["hybrid"], args, task)
    return {"made": list(paths.values()), "search_seconds": seconds}

# -------------------- Fuse
# Each method turns the rows of a run into points; an abstract that a run lacks gets none.
def reciprocal_rank(run, k):
    """1 / (k + rank) (Cormack et al. 2009)."""
    return 1 / (k + run["rank"])

def zscore(run, _):
    """(score - lowest score) / standard deviation of a claim's scores.

    So a missing abstract counts as the run's lowest. Scores that are equal but for rounding are 0.
    """
    claim, score = run["claim_id"], run["score"]
    low, high = (score.groupby(claim).transform(name) for name in ("min", "max"))
    spread = high - low
    equal = spread <= ROUNDING * np.maximum(low.abs(), high.abs())
    share = (score - low) / spread.mask(equal, np.inf)  # 0 to 1
    return share / share.groupby(claim).transform("std", ddof=0).replace(0, 1)

def inverse_rank(run, _):
    return 1 / run["rank"]

def own_score(run, _):
    return run["score"]

METHODS = {  # name: points of a run, and how those of several runs are combined
    "rrf": (reciprocal_rank, np.nansum), "zscore": (zscore, np.nansum),
    "union": (inverse_rank, np.nanmax), "top": (own_score, np.nanmax)}

def points_table(runs, method, k):
    """Return points (pairs, runs) by claim_id and abstract_id; NaN where a run lacks a pair."""
    import pandas as pd
    columns = []
    for run in runs:
        points = METHODS[method][0](run, k)
        check_finite(points, "fuse", "rescale the runs")
        columns.append(points.set_axis(pd.MultiIndex.from_frame(run[RUN[:2]])))
    return pd.concat(columns, axis=1)

def combined(table, weights, method):
    """Return a score for each pair of a table of points."""
    terms = np.sort(table.to_numpy() * weights, axis=1)  # the same terms give the same sum
    return METHODS[method][1](terms, axis=1)

def fuse_runs(runs, weights, method, k, ids):
    """Return rows (claim_id, abstract_id, score), best first; ties as in ids, else as in runs."""
    import pandas as pd
    table = points_table(runs, method, k)
    fused = table.index.to_frame(index=False)
    fused["score"] = combined(table, weights, method)
    check_finite(fused["score"], "fuse", "rescale the runs or --weights")
    place = pd.Index(list(ids)).get_indexer(fused["abstract_id"]).astype(np.uint64)  # -1: last
    return fused.iloc[np.lexsort((place, -fused["score"], fused["claim_id"].factorize()[0]))]

def fuse(args):
    """Fuse run files into one run."""
    weights, method, k = args.weights or [1] * len(args.runs), args.method, args.rrf_k
    if args.weights and METHODS[method][1] is np.nanmax:
        fail("--weights", f"--method {method} takes the best of all runs and has no weights")
    if len(weights) != len(args.runs):
        fail("--weights", f"{len(weights)} for {len(args.runs)} runs; give one a run")
    if args.fusion:
        weights, method, k = read_fusion(args.fusion, args.runs)
    task = task_of(args, *args.runs, *filter(None, [args.corpus, args.fusion]))
    if up_to_date(args, task, args.out):
        return {"made": []}
    ids = read_corpus(args.corpus) if args.corpus else ()
    runs = [read_table(path, RUN) for path in args.runs]
    check_claims({path: run["claim_id"] for path, run in zip(args.runs, runs)})
    fused = fuse_runs(runs, weights, method, k, ids)
    write_run(fused, fused["claim_id"].nunique(), args.out, args, task)
    return {"made": [args.out]}

# -------------------- Fit the weights of a fusion
# Each measure is by claim: hits [claims, k] are 1 where a rank holds evidence, else 0; counts
# [claims] say how much evidence there is, at least 1.
def ndcg(hits, counts):
    """Normalised discounted cumulative gain of binary relevance (Järvelin & Kekäläinen 2002)."""
    gains = 1 / np.log2(np.arange(2, hits.shape[1] + 2))
    ideal = np.cumsum(gains)[np.minimum(counts, hits.shape[1]) - 1]
    return hits @ gains / ideal

def recall(hits, counts):
    return hits.sum(axis=1) / counts

def first_hit(hits, counts):
    """1 / rank of the first evidence, 0 without any (MRR)."""
    return hits.any(axis=1) / (hits.argmax(axis=1) + 1)

MEASURES = {"nDCG": ndcg, "R": recall, "MRR": first_hit}

def measure_at_k(text):
    """For argparse: the name of a measure at a rank."""
    if not re.fullmatch(rf"({'|'.join(MEASURES)})@[1-9]\d{{0,3}}", text):
        raise argparse.ArgumentTypeError(f"{text} is none of {'@10, '.join(MEASURES)}@10")
    return text

def grid(count):
    """Return all weights in tenths, each row [count] with sum 1, the most even ones first."""
    cuts = itertools.combinations(range(9 + count), count - 1)  # of ten tenths into count parts
    rows = np.array([np.diff([-1, *cut, 9 + count]) - 1 for cut in cuts]) / 10
    return rows[np.argsort(rows.std(axis=1), kind="stable")]

def mean_measure(scores, claims, relevant, counts, measure):
    """Return the mean of a measure over claims.

    scores, claims and relevant are of pairs: a number, a place in counts [claims], a truth value.
    """
    name, k = measure.split("@")[0], int(measure.split("@")[1])
    order = np.lexsort((-scores, claims))
    ordered = claims[order]
    rank = np.arange(len(order)) - np.searchsorted(ordered, ordered)  # from 0
    hits = np.zeros((len(counts), k))
    first = rank < k
    hits[ordered[first], rank[first]] = relevant[order][first]
    return MEASURES[name](hits, counts).mean()

def settings_by_value(runs, evidence, measure):
    """Return [(value, method, k of RRF, weights)], the best first; evidence: judged pairs."""
    from tqdm.auto import tqdm
    pairs = evidence.set_index(RUN[:2]).index
    counts = evidence["claim_id"].value_counts(sort=False)
    settings = []
    for method, rrf_k in tqdm(FITTED, "fit", unit=" methods", disable=len(runs) == 1):
        table = points_table(runs, method, rrf_k)
        table = table[table.index.get_level_values("claim_id").isin(counts.index)]
        claims = counts.index.get_indexer(table.index.get_level_values("claim_id"))
        relevant = table.index.isin(pairs)
        for weights in grid(len(runs)):
            scores = combined(table, weights, method)
            value = mean_measure(scores, claims, relevant, counts.to_numpy(), measure)
            settings.append((value, method, rrf_k, weights.tolist()))
    return sorted(settings, key=lambda setting: -setting[0])

def fit(args):
    """Find the method and weights of a fusion that are best on judged claims."""
    task = task_of(args, *args.runs, args.qrels)
    if up_to_date(args, task, args.out):
        return {"made": []}
    names = [Path(path).name for path in args.runs]
    if len(set(names)) < len(names) or len(names) > 6:
        fail("fit", "give up to six runs with different names, which fuse can tell apart")
    runs = [read_table(path, RUN) for path in args.runs]
    qrels = read_table(args.qrels, [*RUN[:2], "label"], label=LABELS)
    evidence = qrels[qrels["label"] != "NEI"]
    check_claims({path: run["claim_id"] for path, run in zip(args.runs, runs)})
    found = set().union(*(run["claim_id"] for run in runs))
    check_claims({args.qrels: evidence["claim_id"], "all runs": found})
    settings, alone = settings_by_value(runs, evidence, args.measure), {}
    for path, run in zip(args.runs, runs):
        alone[path] = settings_by_value([run], evidence, args.measure)[0][0]
        print(f"{alone[path]:.4f}  {path} alone")
    for value, method, rrf_k, weights in settings[:10]:
        name = f"rrf, k = {rrf_k}" if method == "rrf" else method
        print(f"{value:.4f}  {name}, weights {' '.join(map(str, weights))}")
    value, method, rrf_k, weights = settings[0]
    best = max(alone, key=alone.get)
    if value <= alone[best]:
        warn(args.out, f"no fusion is better than {best} alone, which has the weight 1 in it: "
             f"{args.measure} {alone[best]:.4f}")
        value, weights = alone[best], [float(path == best) for path in args.runs]
    fusion = {"method": method, "rrf_k": rrf_k, "weights": weights, "measure": args.measure,
              "value": value, "alone": alone, "runs": names}
    with written(args.out, task, claims=evidence["claim_id"].nunique()) as new:
        new.write_text(json.dumps(fusion, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return {"made": [args.out], **fusion}

def read_fusion(path, runs):
    """Return (weights, method, k of RRF) that fit has written for runs of these names."""
    fusion, names = read_object(path), [Path(run).name for run in runs]
    weights, k = fusion.get("weights"), fusion.get("rrf_k")
    known = [fusion.get("method"), k] in [[method, k] for method, k in FITTED]
    if not known or fusion.get("runs") != names or np.shape(weights) != (len(runs),):
        fail(path, f"no fusion of {', '.join(names)} in this order; make it by 02_retrieve.py fit")
    return weights, fusion["method"], k

# -------------------- Mine: rows of kind, claim_id and the fields in SHAPES
def draw(names, count, order, rng):
    """Return count of names (best first): the best, the worst or random ones."""
    if order == "random":
        return [names[row] for row in rng.choice(len(names), min(count, len(names)), False)]
    return names[:count] if order == "best" else names[::-1][:count]

def wanted(evidence, args):
    """Return how many hard and how many easy negatives are drawn at a time."""
    times = len(evidence) if args.shape == "labels" else 1  # labels: as many as tuples have in all
    return times * args.hard, times * args.easy

def examples_of(claim, evidence, top, rest, args):
    """Yield evidence, and negatives drawn from top and rest; labels: the negatives alone, NEI."""
    rng = np.random.default_rng([args.seed, *claim.encode()])  # other claims change no draw
    hard, easy = wanted(evidence, args)
    if args.shape == "tuples":
        for name in evidence:
            negatives = draw(top, hard, args.draw, rng) + draw(rest, easy, "random", rng)
            yield "evidence", claim, name, negatives
        return
    value = "NEI" if args.shape == "labels" else 0.0
    if args.shape == "pairs":
        for name in evidence:
            yield "evidence", claim, name, 1.0
    for name in draw(top, hard, args.draw, rng):
        yield "hard", claim, name, value
    for name in draw(rest, easy, "random", rng):
        yield "easy", claim, name, value

def score_examples(claim, evidence, scores, args):
    """Yield the first abstracts of a run {abstract_id: score} with targets made of their scores.

    The target is 0.5 + SCALE (score - MIDDLE), clipped to 0 to 1; with --gold, 1 for evidence.
    """
    gold = evidence if args.gold else []
    for name in list(scores)[: args.from_top]:
        if name not in gold:
            target = np.clip(0.5 + args.scale * (scores[name] - args.middle), 0, 1)
            yield "score", claim, name, target.round(6)
    for name in gold:
        yield "evidence", claim, name, 1.0

def negatives_of(labels, scores, nei, corpus, args):
    """Return the names that hard negatives, and those that easy negatives are drawn from.

    labels and scores: {abstract_id: label} and {abstract_id: score} of a claim, best first.
    """
    any_nei = args.nei_of == "any"
    pool = POOLS["both" if any_nei else args.pool]
    ranked = list(scores | labels)  # last, NEI that the run lacks
    if args.top_of == "pool":
        ranked = [name for name in ranked if labels.get(name) in pool]
    first = dict.fromkeys(nei if any_nei else ranked[: args.from_top])
    behind = corpus if args.easy_from == "corpus" else ranked
    top = [name for name in first if labels.get(name) in pool]
    rest = [name for name in behind if labels.get(name) in pool and name not in first]
    return top, rest

def mine(args):
    """Write training examples: evidence, and negatives drawn from a run."""
    scored, any_nei = args.targets == "score", args.nei_of == "any"
    if scored and (args.shape != "pairs" or None in (args.middle, args.scale)):
        fail("--targets score", "needs --shape pairs, --middle and --scale")
    if args.keep_claims_without_evidence and args.shape != "pairs":
        fail("--keep-claims-without-evidence", f"--shape {args.shape} takes as many examples as "
             "there is evidence; leave it out, or use --shape pairs")
    if any_nei and args.easy and args.easy_from == "run":
        fail("--easy", "--nei-of any reads no run; add --easy-from corpus")
    needs_run = scored or (args.hard + args.easy and not any_nei)
    task = task_of(args, args.qrels, args.corpus, *([args.run] if needs_run else []))
    if up_to_date(args, task, args.out):
        return {"made": []}
    corpus, ranked, examples, skipped, short = read_corpus(args.corpus), {}, [], 0, 0
    qrels = read_table(args.qrels, [*RUN[:2], "label"], abstract_id=corpus, label=LABELS)
    if needs_run:
        ranked = by_claim(read_table(args.run, RUN, abstract_id=corpus), "score")
        check_claims({args.qrels: qrels["claim_id"], args.run: ranked})
    judged, nei = by_claim(qrels, "label"), qrels["abstract_id"][qrels["label"] == "NEI"]
    for claim in judged | ranked:
        labels, scores = judged.get(claim, {}), ranked.get(claim, {})
        evidence = [name for name in labels if labels[name] != "NEI"]
        if not evidence and not args.keep_claims_without_evidence:
            skipped += 1
            continue
        if scored:
            examples += score_examples(claim, evidence, scores, args)
            continue
        top, rest = negatives_of(labels, scores, nei, corpus, args)
        examples += examples_of(claim, evidence, top, rest, args)
        hard, easy = wanted(evidence, args)
        short += len(top) < hard or len(rest) < easy
    if short:
        warn(args.out, f"{short} claims have fewer negatives than --hard and --easy ask for; see "
             "--from-top, --pool, --easy-from")
    fields = ["kind", "claim_id", *SHAPES[args.shape]]
    facts = {"examples": len(examples), "skipped_claims_without_evidence": skipped,
             "claims_short_of_negatives": short}
    with written(args.out, task, **facts) as new, open(new, "w", encoding="utf-8") as file:
        for row in examples:
            file.write(json.dumps(dict(zip(fields, row)), ensure_ascii=False) + "\n")
    return {"made": [args.out], **facts}

# -------------------- Command line
def add_retrieve(job):
    add = job.add_argument_group("inputs and outputs").add_argument
    add("--claims", default="{data}/claims.{split}.tsv", help="claims")
    add("--corpus", default="{data}/corpus.jsonl", help="abstracts that were indexed")
    add("--index", default="{work}/index", help="folder of the indexes")
    add("--out", default="{work}/{split}", help="folder of the runs")
    add = job.add_argument_group("search").add_argument
    add("--retrievers", nargs="+", choices=SEARCH, default=list(SEARCH), help="what to search")
    add("--restrict", metavar="RUN", help="score only the candidates of this run")
    add("--top-k", type=between(1, kind=int), default=100, help="abstracts per claim")
    add("--rrf-k", type=between(0, kind=int), default=RRF_K, help="k of reciprocal rank fusion")
    add("--feedback", type=between(0, kind=int), default=0, metavar="N",
        help="N > 0: also bm25-rm3.tsv, BM25 with terms of its first N abstracts (10 is usual). "
        "First ranks do not gain, deep lists for reranking and fusion do")

def add_fuse(job):
    add = job.add_argument_group("inputs and outputs").add_argument
    add("runs", nargs="+", help="runs")
    add("--corpus", help="its order breaks ties (default: the order of the runs)")
    add("--out", default="{work}/{split}/fused.tsv", help="fused run")
    add = job.add_argument_group("method").add_argument
    add("--method", choices=METHODS, default="rrf",
        help="rrf: sum of 1 / (k + rank); zscore: sum of standardised scores, where a missing "
        "abstract counts as the run's lowest; union: best rank; top: best score")
    add("--weights", nargs="+", type=between(0), help="one a run (default: 1 each)")
    add("--rrf-k", type=between(0, kind=int), default=RRF_K, help="k of reciprocal rank fusion")
    add("--fusion", help="fusion.json of fit: its method, weights and k replace these flags")
    add("--top-k", type=between(1, kind=int), default=100, help="abstracts per claim")

def add_fit(job):
    add = job.add_argument_group("inputs and outputs").add_argument
    add("runs", nargs="+", help="runs of judged claims, of models that have not seen these claims")
    add("--qrels", default="{data}/qrels.{split}.tsv", help="judged pairs")
    add("--out", default="{work}/{split}/fusion.json", help="method and weights, for fuse")
    add = job.add_argument_group("method").add_argument
    add("--measure", type=measure_at_k, default="nDCG@10",
        help=f"what to maximise: {'@K, '.join(MEASURES)}@K")

def add_mine(job):
    count = between(0, kind=int)
    add = job.add_argument_group("inputs and outputs").add_argument
    add("run", nargs="?", default="{work}/{split}/hybrid.tsv", help="source of negatives")
    add("--qrels", default="{data}/qrels.{split}.tsv", help="judged pairs")
    add("--corpus", default="{data}/corpus.jsonl", help="abstracts")
    add("--out", default="{work}/{split}/examples.jsonl", help="training examples")
    add("--shape", choices=SHAPES, default="pairs",
        help="pairs for 03; tuples for 01 and 03; labels (NEI only) for 05")
    add("--keep-claims-without-evidence", action="store_true",
        help="else they are skipped; for --shape pairs")
    add = job.add_argument_group("negatives").add_argument
    add("--hard", type=count, default=4,
        help="negatives from the top of the run, per claim; tuples, labels: per evidence")
    add("--from-top", type=count, default=50, help="ranks that hard negatives come from")
    add("--top-of", choices=["run", "pool"], default="run",
        help="pool: of these ranks, evidence and what is no negative takes none")
    add("--draw", choices=["random", "best", "worst"], default="random", help="of these ranks")
    add("--easy", type=count, default=0, help="random negatives from the rest, counted alike")
    add("--easy-from", choices=["run", "corpus"], default="run",
        help="the rest: behind these ranks, or all of the corpus")
    add("--pool", choices=POOLS, default="both", help="what may be a negative")
    add("--nei-of", choices=["same", "any"], default="same",
        help="any: NEI abstracts of all claims; no run is read")
    add = job.add_argument_group("targets").add_argument
    add("--targets", choices=["label", "score"], default="label",
        help="score: the top of the run with 0.5 + SCALE (score - MIDDLE), clipped to 0 to 1")
    add("--middle", type=between(-1e9), help="score with target 0.5")
    add("--scale", type=between(0), help="target per unit of the score")
    add("--gold", action="store_true", help="scores: evidence has target 1")

def resolve(args):
    """Return the arguments as the jobs use them; nothing changes them afterwards."""
    if "retrievers" in args:
        args.retrievers = list(dict.fromkeys(args.retrievers))
        if args.feedback and "bm25" not in args.retrievers:
            fail("--feedback", "it searches BM25 again; add bm25 to --retrievers")
    return args

def main():
    parser, jobs = command_line(retrieve, fuse, fit, mine)
    add_retrieve(jobs["retrieve"])
    add_fuse(jobs["fuse"])
    add_fit(jobs["fit"])
    add_mine(jobs["mine"])
    finish(resolve, arguments_of(parser, jobs))

# --- helpers (same in all six scripts)
PACKAGES = ("numpy", "pandas", "torch", "transformers", "sentence_transformers", "bm25s", "openai")
MADE_BY = {  # names of files and folders that a script makes, and the command
    "bm25": "01_index.py --indexes bm25", "dense": "01_index.py --indexes dense",
    "splade": "01_index.py --indexes splade", "graph": "01_index.py graph",
    "encoder": "01_index.py train", "hybrid.tsv": "02_retrieve.py",
    "examples.jsonl": "02_retrieve.py mine", "reranker": "03_rerank.py train",
    "rerank.tsv": "03_rerank.py", "llm.tsv": "04_llm_rerank.py",
    "classifier": "05_classify.py train", "verdicts.tsv": "05_classify.py",
    "llm_verdicts.tsv": "05_classify.py llm", "claims.jsonl": "05_classify.py --aggregate FILE",
    "pool.tsv": "06_evaluate.py pool", "pool.run.tsv": "06_evaluate.py pool",
    **dict.fromkeys(("bm25.tsv", "dense.tsv", "splade.tsv"), "02_retrieve.py"),
    "bm25-rm3.tsv": "02_retrieve.py --retrievers bm25 --feedback 10",
    **dict.fromkeys(("minilm", "splade-tiny", "smollm2"), "data/download.py models")}
SPLITS = {"train": "train", "mine": "train", "fit": "dev"}  # of jobs, where it is not test
START, LOCKS, WARNINGS = time.monotonic(), contextlib.ExitStack(), []

def printable(text):
    """Return a text on one line, ? for control characters, which could steer a terminal."""
    line = " ".join(str(text).split())
    return "".join(c if c.isprintable() else "?" for c in line)

def warn(where, what):
    """Print a line on stderr, and keep it for the provenance of outputs."""
    warn_once(printable(f"warning: {where}: {what}"))

def warn_once(line):
    if line not in WARNINGS:
        WARNINGS.append(line)
        print(line, file=sys.stderr)

def fail(where, what):
    """Bad input or usage: one line on stderr, exit status 2."""
    print(printable(f"error: {where}: {what}"), file=sys.stderr)
    sys.exit(2)

# ---------- Reading
def read_lines(path):
    """Yield (number, line) of a UTF-8 file as an editor shows them, blank lines left out."""
    damaged, empty = [], True
    with open(path, "rb") as file:
        start = file.peek(2)[:2]
        kind = {b"\x1f\x8b": "gzip", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}.get(start)
        if kind:
            fail(path, f"the file is {kind}; see data/convert.py, or save it as UTF-8 text")
        for number, line in enumerate(file, 1):
            try:
                text = line.decode()
            except UnicodeDecodeError:
                damaged.append(number)
                text = line.decode(errors="replace")
            text = text.removeprefix("\ufeff").rstrip("\r\n")  # a byte order mark
            if text.strip():
                empty = False
                yield number, text
    if damaged:
        warn(f"{path}:{damaged[0]}", f"{len(damaged)} lines are not UTF-8; U+FFFD replaces what "
             "cannot be read")
    if empty:
        fail(f"{path}:1", "the file is empty; a table needs a header, a corpus one abstract a line")

def unquoted(field):
    """Return a field of a table without the quotation marks that pandas puts around it."""
    quoted = re.fullmatch('"((?:[^"]|"")*)"', field)
    return quoted[1].replace('""', '"') if quoted else field

def read_table(path, columns, **known):
    """Read a TSV file as strings, one row a line; a run by claim and rank, with numbers.

    known: the values that a column may hold. A bad row ends the script, with its line.
    """
    import pandas as pd
    rows = {}
    for number, line in read_lines(path):
        fields = line.split("\t")
        rows[number] = list(map(unquoted, fields)) if '"' in line else fields
    first = next(iter(rows))
    header = rows.pop(first)
    if not {*columns, *known} <= set(header) or len(set(header)) < len(header):
        fail(f"{path}:{first}", f"columns {', '.join(header)}, wanted {', '.join(columns)}; "
             "data/convert.py reads other formats and renames columns")
    for number, row in rows.items():
        if len(row) != len(header):
            fail(f"{path}:{number}", f"{len(row)} fields, the header has {len(header)}; fix the "
                 "row, or convert the file by data/convert.py")
    table = pd.DataFrame(rows.values(), index=rows.keys(), columns=header, dtype=str)
    if "claim" in columns:
        table["claim"] = table["claim"].str.normalize("NFC")
    ids = [column for column in columns if column.endswith("_id")]
    bad = {f"{column} is empty": table[column].str.strip() == "" for column in columns}
    for column in ids:
        bad[f"white space around {column}"] = table[column] != table[column].str.strip()
    bad |= {f"unknown {column}": ~table[column].isin(known[column]) for column in known}
    bad["there is an earlier row for this"] = table.duplicated(ids)
    if "rank" in columns:
        for column in ("rank", "score"):
            table[column] = pd.to_numeric(table[column], errors="coerce").astype(float)
        expected = table.groupby("claim_id")["rank"].rank("first")
        bad["score is not a finite number"] = ~np.isfinite(table["score"])
        bad["rank is not 1, 2, 3"] = table["rank"] != expected
    for what, rows in bad.items():
        if rows.any():
            number = rows.idxmax()
            value = table.loc[number].get(what.removeprefix("unknown "), "")
            what = f"{what} {value!r:.60}" if what.startswith("unknown") else what
            fail(f"{path}:{number}", f"{what}: {' '.join(table.loc[number, ids])}; fix the row, or "
                 "see data/convert.py")
    if "rank" in columns:
        table = table.astype({"rank": int})
        table = table.iloc[np.lexsort((table["rank"], table["claim_id"].factorize()[0]))]
    return table.reset_index(drop=True)

def read_corpus(path):
    """Read {abstract_id: record} in file order; texts in NFC; an abstract that is no text is ""."""
    corpus, empty = {}, 0
    for number, line in read_lines(path):
        try:
            record = json.loads(line)
            if "\\ud" in line.lower():  # lone surrogates become U+FFFD
                text = json.dumps(record, ensure_ascii=False).encode("utf-16", "surrogatepass")
                record = json.loads(text.decode("utf-16", "replace"))
            name = record["abstract_id"]
        except (ValueError, LookupError, TypeError, RecursionError):
            fail(f"{path}:{number}", "not a JSON object with an abstract_id; fix the line")
        if type(name) not in (str, int):
            fail(f"{path}:{number}", f"abstract_id {name!r:.60} is no string or integer; put it "
                 "into quotation marks, spelt as in the qrels")
        name = str(name)
        if name in corpus or not name or name != name.strip() or re.search(r"[\t\r\n]", name):
            fail(f"{path}:{number}", f"abstract_id {name!r:.60} is empty, not unique, or has white "
                 "space that a table cannot hold; fix it")
        for field, value in record.items():
            if isinstance(value, str):
                record[field] = unicodedata.normalize("NFC", value)
        if not isinstance(record.get("abstract"), str):
            record["abstract"] = ""
        corpus[name] = record
        empty += not record["abstract"].strip()
    if empty:
        warn(path, f"{empty} abstracts without text, kept as empty")
    return corpus

# ---------- Provenance
def read_object(path):
    """Return the JSON object in a file, {} if there is none."""
    try:
        found = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}

def digest(path):
    """Return the sha256 of a file, of an index's meta.json, or of all files of a model's folder."""
    path, total = Path(path), hashlib.sha256()
    if (path / "meta.json").is_file():
        path = path / "meta.json"
    if not path.is_dir():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    for file in sorted(path.rglob("*")):
        if file.is_file():
            total.update(f"{file.relative_to(path)} {digest(file)}\n".encode())
    return total.hexdigest()

def missing(path, args):
    """Return what to do about an input that does not exist."""
    command = MADE_BY.get(Path(path).name)
    if not command:
        splits = sorted(file.name[7:-4] for file in Path(args.data).glob("claims.*.tsv"))
        return (f"no such file, and no script makes it; check --data {args.data} and --split "
                f"{args.split} (claims of {', '.join(splits) or 'no split'} are there)")
    words = ["python", *command.split()]
    if not command.startswith("data/"):
        words += ["--data", args.data, "--work", args.work]
    if path.endswith((".tsv", ".jsonl")):
        words += ["--split", args.split]
    flags = [f"--{name}".replace("_", "-") for name, value in vars(args).items() if value == path]
    other = "".join(f", or name another one by {flag}" for flag in flags if flag in args.flags)
    return f"it is missing; make it by: {shlex.join(words)}{other}"

def task_of(args, *files, models=()):
    """Return what decides the bytes of an output: arguments, and digests of what is read.

    A model that is no folder is known by its name on the hub.
    """
    arguments = {name: value for name, value in vars(args).items() if name not in NEUTRAL}
    inputs = {}
    for path in map(str, (*files, *models)):
        name_on_hub = path in map(str, models) and path.count("/") < 2
        if not Path(path).exists() and not name_on_hub:
            fail(path, missing(path, args))
        inputs[path] = digest(path) if Path(path).exists() else ""
        made = read_object(f"{path}.meta.json") if Path(path).is_dir() else {}
        if made.get("sha256", inputs[path]) != inputs[path]:
            fail(path, "its files have changed since it was made; make it again with --force, or "
                 f"remove {path}.meta.json to use it as it is")
    return {"arguments": arguments, "inputs": inputs}

def lock(path):
    """Lock an output until the process ends; another command that makes it is refused."""
    from filelock import FileLock, Timeout
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        LOCKS.enter_context(FileLock(f"{path}.lock", timeout=0))
    except Timeout:
        fail(path, "another command is making it; wait until that one ends")
    LOCKS.callback(remove, f"{path}.lock")  # FileLock leaves the file there

def check_owner(args, task, path, known=False):
    """Refuse an output that the task reads, and folders and data that others made, unless known."""
    if path.resolve() in {Path(name).resolve() for name in task["inputs"]}:
        fail(path, "this command reads it; give another --out")
    arguments = read_object(f"{path}.meta.json").get("arguments")
    job = arguments.get("job") if isinstance(arguments, dict) else task["arguments"]["job"]
    ours = Path(f"{path}.meta.json").exists() and job == task["arguments"]["job"]
    data = Path(args.data).resolve()
    foreign = path.is_dir() and any(path.iterdir()) or data in path.resolve().parents
    if path.exists() and foreign and not (ours or known):
        fail(path, "this command did not make it; give another --out")

def up_to_date(args, task, *outs):
    """Return whether this very task made outs, which are locked until the process ends."""
    provenance = {}
    for path in map(Path, outs):
        lock(path)
        check_owner(args, task, path)
        provenance[path] = read_object(f"{path}.meta.json") if path.exists() else {}
    if args.force or any(not task.items() <= made.items() for made in provenance.values()):
        return False
    for path, made in provenance.items():
        remove(f"{path}.parts")  # left by a process that was killed at its very end
        for line in made.get("warnings") or ():
            warn_once(line)
        print(f"up to date: {path}")
        if made.get("sha256") != digest(path):
            warn(path, "its bytes have changed since it was made; --force makes it again")
    return True

@contextlib.contextmanager
def written(path, task, **facts):
    """Yield a temporary path. What is made there becomes path, whole, with its provenance."""
    meta, path = Path(f"{path}.meta.json"), Path(path).resolve()  # behind a symbolic link
    new = Path(f"{path}.tmp")
    remove(new)
    try:
        yield new
        modules = {name: sys.modules[name].__version__ for name in PACKAGES if name in sys.modules}
        gpu = "torch" in modules and sys.modules["torch"].cuda
        device = gpu.get_device_name() if gpu and gpu.is_initialized() else "no GPU of CUDA"
        made = {"command": sys.argv, "sha256": digest(new), "packages": modules, "device": device,
                "warnings": WARNINGS}
        text = json.dumps(task | made | facts | spent(), indent=1, ensure_ascii=False) + "\n"
        meta.write_text(json.dumps({"arguments": task["arguments"]}))  # vouches for no bytes
        if path.is_dir():
            remove(path)
        new.rename(path)
        meta.write_text(text, encoding="utf-8")
    finally:
        remove(new)

def remove(path):
    """Delete a file or a folder, if it exists."""
    if Path(path).is_dir() and not Path(path).is_symlink():
        shutil.rmtree(path)
    else:
        Path(path).unlink(missing_ok=True)

def spent():
    """Return seconds and peak memory (MiB) of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak //= 1024 if sys.platform == "linux" else 1024**2
    return {"seconds": round(time.monotonic() - START, 1), "peak_mib": peak}

# ---------- Command line
if not sys.stderr.isatty():  # tqdm prints a plain line every ten seconds
    os.environ.setdefault("TQDM_MININTERVAL", "10")
    os.environ.setdefault("TQDM_BAR_FORMAT", "{desc}: {n_fmt}/{total_fmt} [{elapsed}]\n")

class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action):  # no "(default: None)"
        if isinstance(action.default, list):
            return f"{action.help} (default: {' '.join(action.default)})"
        plain = any(action.default is nothing for nothing in (None, False, ""))
        return action.help if plain else super()._get_help_string(action)

def between(low, high=1e9, kind=float):
    """Return an argparse type: a number from low to high."""
    def number(text):
        if not low <= kind(text) <= high:
            raise argparse.ArgumentTypeError(f"{text} is not a number from {low:g} to {high:g}")
        return kind(text)
    return number

def device(text):
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text} is none of auto, cpu, mps, cuda, cuda:1")
    return text

def command_line(*functions):
    """Return (parser, {job: its parser}) with the flags of all jobs. The first job is the default.

    The first paragraph of a function's docstring is the job's sentence in --help.
    """
    script, names = Path(sys.argv[0]).name, [function.__name__ for function in functions]
    parser = argparse.ArgumentParser(
        prog=script, description=sys.modules["__main__"].__doc__, formatter_class=Help,
        usage=f"{script} [{' | '.join(names)}] [flags]",
        epilog=f"{script} JOB --help shows the flags of a job; without a job: {names[0]}")
    jobs = parser.add_subparsers(title="jobs", metavar="", prog=script)
    for name, function in zip(names, functions):
        sentence = " ".join((function.__doc__ or name).split("\n\n")[0].split())
        job = jobs.add_parser(
            name, help=sentence, description=sentence, formatter_class=Help, allow_abbrev=False)
        job.error = lambda message, name=name: fail(script, f"{message}; see {name} --help")
        job.set_defaults(job=f"{script} {name}", function=function)
        add = job.add_argument_group("data and device").add_argument
        add("--data", type=os.path.normpath, default="data/demo",
            help="folder of corpus, claims and qrels")
        add("--work", help="folder of everything made from them (default: work/ and the name of "
            "the data folder; two data folders of one name need it)")
        add("--split", default=SPLITS.get(name, "test"), help="which claims")
        add("--seed", type=between(0, 2**32 - 1, int), default=13, help="of every random choice")
        add("--device", nargs="+", type=device, default=["auto"], metavar="cuda:0",
            help="or cpu, mps; auto: a GPU where there is one")
        add("--force", action="store_true", help="make outputs again, from the start")
    return parser, jobs.choices

def arguments_of(parser, jobs):
    """Return the arguments; {data}, {work} and {split} in defaults are filled in.

    args.flags are the flags of the job.
    """
    words, names, script = sys.argv[1:], list(jobs), Path(sys.argv[0]).name
    for word in words:
        if re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", word):
            fail(script, f"control characters in {word!r:.60}; rename the file")
    if words and words[0] in ("-h", "--help"):
        parser.parse_args(words)
    job = words.pop(0) if words and words[0] in jobs else names[0]
    first = words[0] if words else ""
    if job == names[0] and first[:1] != "-" and not Path(first).exists():  # a misspelt job?
        for near in difflib.get_close_matches(first, names, 1, 0.7):
            fail(script, f"no job {first}; did you mean {near}?")
    args, unknown = jobs[job].parse_known_args(words)
    flags = sorted(set(re.findall(r"--[\w-]+", jobs[job].format_help())))
    if unknown:
        near = difflib.get_close_matches(unknown[0], flags, 1)
        advice = f"did you mean {near[0]}?" if near else f"see {job} --help"
        fail(script, f"unrecognized arguments: {' '.join(unknown)}; {advice}")
    args.work = args.work or f"work/{Path(os.path.abspath(args.data)).name}"
    for name, value in vars(args).items():
        setattr(args, name, filled(value, args))
    args.flags = flags
    return args

def filled(value, args):
    """Return a default value with {data}, {work} and {split} filled in."""
    if isinstance(value, list):
        return [filled(one, args) for one in value]
    if isinstance(value, str) and value.startswith(("{data}", "{work}")):
        value = value.replace("{data}", args.data).replace("{work}", args.work)
        return value.replace("{split}", args.split)
    return value

def finish(resolve, args):
    """Run the job and print its result as JSON; a fault of the disk is one line, Ctrl-C silence.

    resolve: returns the arguments as the job uses them; nothing changes them afterwards.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        args = resolve(args)
        print(json.dumps(args.function(args) | spent(), ensure_ascii=False), flush=True)
    except (KeyboardInterrupt, BrokenPipeError):  # Ctrl-C; | head
        LOCKS.close()
        os._exit(130)  # without tearing libraries down, which takes seconds
    except OSError as error:
        fail(error.filename or args.job, f"{error.strerror or error}; check path, rights and space")
    except Exception as error:
        text = repr(error)
        if "Symlink loop" in text or "SafetensorError" in text:  # links, a full disk
            fail(args.job, f"{error}; check path, rights and space")
        if "memory" not in text.lower() or "illegal" in text:
            raise
        flags = [flag for flag in ("--batch-size", "--max-length", "--top-k") if flag in args.flags]
        advice = f"lower {' or '.join(flags)}" if flags else "end other programs"
        fail(args.job, f"out of memory; {advice}, and run it again to go on")
    finally:
        LOCKS.close()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while the process ends
# --- end of helpers

# --- hub (same in 01, 02, 03, 04 and 05)
def offline_without_hub(name):
    """Use cached files alone if the hub cannot be reached: its client retries for minutes."""
    from huggingface_hub import constants, get_session
    if not Path(name).exists() and not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=5)
        except Exception:  # whatever its HTTP library raises
            constants.HF_HUB_OFFLINE = True
# --- end of hub

# --- models (same in 01, 02, 03 and 05)
def precision_of(args):
    """Return fp32, bf16 or fp16: --dtype, or what auto means: fp32 on a CPU, half on a GPU."""
    if args.dtype != "auto" or args.device[0] in ("cpu", "mps"):
        return args.dtype.replace("auto", "fp32")
    import torch
    if not torch.cuda.is_available():
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(False) else "fp16"

def open_model(load, name, args, dtype, **options):
    """Return load(name, ...), a sentence-transformers model; a bad one ends the script.

    dtype: fp32, bf16 or fp16. The model reads two inputs before anything depends on it.
    """
    import torch
    place = None if args.device == ["auto"] else args.device[0]
    precision = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    weights = {"dtype": precision, "use_safetensors": True}
    options |= {"device": place, "trust_remote_code": False, "model_kwargs": weights}
    print(f"loading {name}", file=sys.stderr)
    offline_without_hub(name)
    try:
        model = load(str(name), **options)
        words = len(model.tokenizer.get_vocab())
        for other in args.device[1:]:
            torch.empty(0, device=other)  # raises if there is no such device
        if hasattr(model, "predict"):
            model.predict([("a", "b"), ("a", "b c d")], show_progress_bar=False)
        else:
            model.encode_document(["a", "b c d"], show_progress_bar=False)
    except Exception as error:  # of many kinds: no such model, no network, no access, damaged files
        fail(name, f"cannot be loaded ({type(error).__name__}: {error}); see data/download.py")
    parts = [part for part in model.modules() if isinstance(part, torch.nn.Embedding)]
    sizes = [part.num_embeddings for part in parts]
    if sizes and not max(sizes) / 2 <= words <= max(sizes) + 64:  # added tokens may lack a row
        fail(name, f"tokenizer of {words} entries, embeddings of {max(sizes)}; copy it whole")
    return model
# --- end of models

if __name__ == "__main__":
    main()
