# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "PyStemmer==3.1.0", "bm25s==0.3.16", "numpy==2.4.6", "pandas==3.1.1",
#   "sentence-transformers==6.2.0", "torch==2.13.0", "transformers==5.23.0",
# ]
# ///
"""
Retrieve abstracts for each claim, fuse runs, mine training examples.

Reads   claims and index/{bm25,dense,splade}/; fuse: runs; mine: a run, qrels, corpus
Writes  {bm25,dense,splade}.tsv, hybrid.tsv (their fusion); fuse: fused.tsv; mine: examples.jsonl
Prints  counts of each file, last one line of JSON

Examples
    python 02_retrieve.py --retrievers dense --restrict work/demo/test/bm25.tsv --out work/demo/few
    python 02_retrieve.py fuse a.tsv b.tsv --method zscore --weights 0.3 0.7
    python 02_retrieve.py mine --shape tuples --hard 5 --easy 10 --easy-from corpus
"""
import argparse
import atexit
import contextlib
import hashlib
import io
import json
import os
import re
import resource
import shutil
import sys
import time
import zlib
from pathlib import Path

import numpy as np

# --- constants (same in all six scripts)
LABELS = ("SUPPORTS", "REFUTES", "NEI")
RUN = ["claim_id", "abstract_id", "rank", "score"]
NEUTRAL = {"force", "out", "device", "batch_size", "concurrency"}  # no byte depends on these
# --- end of constants

SHAPES = {"pairs": ["abstract_id", "target"], "labels": ["abstract_id", "label"],
          "tuples": ["positive", "negatives"]}
POOLS = {"nei": ["NEI"], "unjudged": [None], "both": ["NEI", None]}  # labels of negatives

# -------------------- Search: scores for each claim
def open_index(folder, corpus):
    """Return meta.json of an unchanged index of this corpus (sha256)."""
    try:
        meta = json.loads((folder / "meta.json").read_bytes())
        for name, mark in meta["files"].items():
            data = np.memmap(folder / name, mode="r")
            if [len(data), zlib.crc32(data)] != mark:
                raise ValueError(f"{name} has changed")
        if meta["corpus"] != corpus:
            raise ValueError("the corpus has changed")
    except Exception as error:  # a file is missing, empty or of another version
        fail(folder, f"{error}; make it again: 01_index.py --indexes {folder.name} --force")
    return meta

def check_finite(scores, where, what):
    count = np.sum(~np.isfinite(scores))
    if count:
        fail(where, f"{count} of {len(scores)} scores are NaN or infinite; {what}")

def sum_postings(folder, ending, meta, queries):
    """Yield the scores (abstracts,) of each query (terms, weights), in float32."""
    from scipy.sparse import csc_matrix
    paths = [f"{folder}/{name}{ending}" for name in ("data", "indices", "indptr")]
    parts = tuple(np.load(path, mmap_mode="r") for path in paths)
    matrix = csc_matrix(parts, shape=(meta["abstracts"], len(parts[2]) - 1))
    return (matrix[:, terms] @ weights for terms, weights in queries)

def search_bm25(folder, meta, claims, args):
    import bm25s
    from Stemmer import Stemmer
    _, *how, stemmer = meta["analyser"].values()
    how.append(Stemmer(stemmer) if stemmer else None)
    known, queries = json.loads((folder / "vocab.index.json").read_bytes()), []
    for words in bm25s.tokenize(claims, *how, return_ids=False, show_progress=False):
        terms = [known[word] for word in words if word in known]
        queries.append((terms, np.ones(len(terms), np.float32)))
    return sum_postings(folder, ".csc.index.npy", meta, queries)

def encode(meta, claims, args):
    """Return the vectors of claims, and in meta how many are truncated."""
    import sentence_transformers as library
    load = library.SparseEncoder if meta["kind"] == "splade" else library.SentenceTransformer
    model = meta["model"]
    if meta["model_sha256"] not in task_of(args, models=[model])["inputs"].values():
        fail(model, f"not here, or not the model of the {meta['kind']} index; run this where "
             "01_index.py was run, link the model there, or make the index again")
    encoder = open_model(load, model, args, "fp32")
    if encoder.max_seq_length != meta["max_length"]:
        encoder.max_seq_length = meta["max_length"]
    if getattr(encoder.tokenizer, "is_fast", False):
        words = encoder.tokenizer(claims, truncation=False, verbose=False)["input_ids"]
        meta["truncated_claims"] = sum(len(row) > encoder.max_seq_length for row in words)
    return encoder.encode_query(claims, prompt=meta["query_prompt"], convert_to_tensor=True)

def search_splade(folder, meta, claims, args):
    vectors = encode(meta, claims, args).cpu().coalesce()
    (rows, terms), weights = vectors.indices().numpy(), vectors.values().numpy()
    if meta["activation"] == "relu":
        weights = np.expm1(weights)  # the encoder gives log(1 + ReLU)
    queries = [(terms[rows == row], weights[rows == row]) for row in range(len(claims))]
    return sum_postings(folder, ".npy", meta, queries)

def search_dense(folder, meta, claims, args):
    import torch
    queries = torch.nn.functional.normalize(encode(meta, claims, args))
    vectors = torch.from_numpy(np.load(folder / "embeddings.npy", mmap_mode="c"))
    return inner_products(vectors, queries)

def inner_products(vectors, queries):
    """Yield vectors @ query (abstracts,) in float32 for each query, exact, block by block."""
    import torch
    for part in queries.split(128):  # scores of 0.2 GiB at 394,269 abstracts
        blocks = [part @ block.to(part.device).float().T for block in vectors.split(65_536)]
        yield from torch.cat(blocks, dim=1).cpu().numpy()

SEARCH = {"bm25": search_bm25, "dense": search_dense, "splade": search_splade}

def top_k(scores, k):
    """Return the k best rows of scores, best first; ties, also at the cut, by corpus order."""
    k = min(k, len(scores))
    height = max(1, len(scores) // (4 * k))  # maxima of blocks: a fifth of the time of all scores
    maxima = scores[: len(scores) // height * height].reshape(height, -1).max(axis=0)
    rows = np.flatnonzero(scores >= np.partition(maxima, -k)[-k])
    return rows[np.argsort(-scores[rows], kind="stable")][:k]

# -------------------- Fusion
def fuse_runs(runs, weights, method, k, ids):
    """Return rows (claim_id, abstract_id, score), best first; ties as in ids, else as in runs."""
    import pandas as pd
    parts = []
    for run, weight in zip(runs, weights):
        points = run["score"]
        if method == "rrf":
            points = 1 / (k + run["rank"])  # Cormack et al. 2009
        if method == "union":
            points = 1 / run["rank"]
        if method == "zscore":  # the lowest is 0
            claim = run["claim_id"]
            points = points - points.groupby(claim).transform("min")
            points = points / points.groupby(claim).transform("max").replace(0, 1)
            points = points / points.groupby(claim).transform("std", ddof=0).replace(0, 1)
        parts.append(run.assign(score=weight * points))
    table = pd.concat(parts).set_index(RUN[:2])["score"]
    check_finite(table, "--weights", "rescale them or the runs")
    pairs = table.sort_values().groupby(level=RUN[:2])  # the same terms give the same sum
    how = "max" if method in ("union", "top") else "sum"
    fused = pairs.agg(how).reindex(table.index.unique()).reset_index()
    place = pd.Index(list(ids)).get_indexer(fused["abstract_id"]).astype(np.uint64)  # -1: last
    return fused.iloc[np.lexsort((place, -fused["score"], fused["claim_id"].factorize()[0]))]

# -------------------- Examples: rows of kind, claim_id and the fields in SHAPES
def draw(names, count, how, rng):
    """Return count of names (best first): the best, the worst or random ones."""
    if how == "random":
        return [names[row] for row in rng.choice(len(names), min(count, len(names)), False)]
    return names[:count] if how == "best" else names[::-1][:count]

def examples_of(claim, evidence, top, rest, args):
    """Yield evidence, and negatives drawn from top and rest."""
    rng = np.random.default_rng([args.seed, *claim.encode()])  # other claims change no draw
    if args.shape == "tuples":
        for name in evidence:
            drawn = draw(top, args.hard, args.draw, rng) + draw(rest, args.easy, "random", rng)
            yield "evidence", claim, name, drawn
        return
    times, value = 1, 0.0
    if args.shape == "labels":  # negatives alone, as many as tuples have
        times, value, evidence = len(evidence), "NEI", []
    for name in evidence:
        yield "evidence", claim, name, 1.0
    for name in draw(top, times * args.hard, args.draw, rng):
        yield "hard", claim, name, value
    for name in draw(rest, times * args.easy, "random", rng):
        yield "easy", claim, name, value

# -------------------- Jobs
def by_claim(table, column):
    """Return {claim_id: {abstract_id: value}} of a column."""
    groups = table.groupby("claim_id", sort=False)
    return {claim: dict(zip(rows["abstract_id"], rows[column])) for claim, rows in groups}

def write_run(rows, claims, path, args, task, truncated=0):
    """Write the --top-k first rows of each claim. Return the run."""
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

def retrieve(args):
    """Write a run for each index, and their fusion."""
    args.retrievers = list(dict.fromkeys(args.retrievers))
    folders = [Path(args.index, kind) for kind in args.retrievers]
    task = task_of(args, args.claims, args.corpus, *folders, *args.restrict)
    names = args.retrievers + ["hybrid"] * (len(folders) > 1)
    paths = [f"{args.out}/{name}.tsv" for name in names]
    if up_to_date(args, task, *paths):
        return {"made": []}
    claims = read_table(args.claims, ["claim_id", "claim"])
    if claims.empty:
        fail(args.claims, "no claims; add one a line")
    searches, runs, seconds = [], [], {}
    for kind, folder in zip(args.retrievers, folders):
        meta = open_index(folder, task["inputs"][str(Path(args.corpus))])
        searches.append((SEARCH[kind](folder, meta, claims["claim"].tolist(), args), meta))
    ids = json.loads((folders[0] / "abstract_ids.json").read_bytes())
    order = {name: row for row, name in enumerate(ids)}
    for table in args.restrict:
        candidates = by_claim(read_table(table, RUN, abstract_id=order), "rank")
    for kind, folder, (search, meta), path in zip(args.retrievers, folders, searches, paths):
        rows, start = [], time.monotonic()
        low = -np.inf if kind == "dense" else 0  # no common term
        for claim, scores in zip(claims["claim_id"], search):
            check_finite(scores, folder, "make it again with --dtype fp32")
            if args.restrict:
                few = [order[name] for name in candidates.get(claim, {})]
                scores[np.delete(np.arange(len(ids)), few)] = low
            best = top_k(scores, args.top_k)
            best = best[scores[best] > low]
            rows += [(claim, ids[row], scores[row]) for row in best]
        seconds[kind] = round(time.monotonic() - start, 2)
        truncated = meta.get("truncated_claims", 0)
        runs.append(write_run(rows, len(claims), path, args, task, truncated))
    if len(runs) > 1:
        fused = fuse_runs(runs, [1] * len(runs), "rrf", args.rrf_k, ids)
        write_run(fused, len(claims), paths[-1], args, task)
    return {"made": paths, "search_seconds": seconds}

def fuse(args):
    weights = args.weights or [1] * len(args.runs)
    if len(weights) != len(args.runs):
        fail("--weights", f"{len(weights)} for {len(args.runs)} runs; give one a run")
    task = task_of(args, *args.runs, *args.corpus)
    if up_to_date(args, task, args.out):
        return {"made": []}
    ids = read_corpus(*args.corpus) if args.corpus else ()
    runs = [read_table(path, RUN) for path in args.runs]
    fused = fuse_runs(runs, weights, args.method, args.rrf_k, ids)
    check_finite(fused["score"], args.out, "rescale the runs or weights")
    write_run(fused, fused["claim_id"].nunique(), args.out, args, task)
    return {"made": [args.out]}

def mine(args):
    """Write training examples: evidence, and negatives drawn from a run."""
    scored, any_nei = args.targets == "score", args.nei_of == "any"
    if scored and (args.shape != "pairs" or None in (args.middle, args.scale)):
        fail("--targets score", "needs --shape pairs, --middle and --scale")
    if any_nei and args.easy and args.easy_from == "run":
        fail("--easy", "--nei-of any reads no run; add --easy-from corpus")
    runs = [args.run] if scored or (args.hard + args.easy and not any_nei) else []
    task = task_of(args, args.qrels, args.corpus, *runs)
    if up_to_date(args, task, args.out):
        return {"made": []}
    corpus, found, examples = read_corpus(args.corpus), {}, []
    skipped = short = 0
    qrels = read_table(args.qrels, [*RUN[:2], "label"], abstract_id=corpus, label=LABELS)
    for run in runs:
        found = by_claim(read_table(run, RUN, abstract_id=corpus), "score")
    judged, nei = by_claim(qrels, "label"), qrels["abstract_id"][qrels["label"] == "NEI"]
    pool = POOLS["both" if any_nei else args.pool]
    for claim in judged | found:
        labels, scores = judged.get(claim, {}), found.get(claim, {})
        evidence = [name for name in labels if labels[name] != "NEI"]
        if not evidence and not args.keep_claims_without_evidence:
            skipped += 1
            continue
        if scored:
            gold = evidence if args.gold else []
            for name in list(scores)[: args.from_top]:
                target = np.clip(0.5 + args.scale * (scores[name] - args.middle), 0, 1)
                if name not in gold:
                    examples.append(("score", claim, name, target.round(6)))
            examples += [("evidence", claim, name, 1.0) for name in gold]
            continue
        ranked = list(scores | labels)  # last, NEI that the run lacks
        first = dict.fromkeys(nei if any_nei else ranked[: args.from_top])
        top = [name for name in first if labels.get(name) in pool]
        rest = corpus if args.easy_from == "corpus" else ranked
        rest = [name for name in rest if labels.get(name) in pool and name not in first]
        examples += examples_of(claim, evidence, top, rest, args)
        short += len(top) < args.hard or len(rest) < args.easy
    fields = ["kind", "claim_id", *SHAPES[args.shape]]
    facts = {"examples": len(examples), "skipped_claims_without_evidence": skipped,
             "claims_short_of_negatives": short}
    with written(args.out, task, **facts) as new, open(new, "w", encoding="utf-8") as file:
        for row in examples:
            file.write(json.dumps(dict(zip(fields, row)), ensure_ascii=False) + "\n")
    return {"made": [args.out], **facts}

def main():
    jobs = {"retrieve": retrieve, "fuse": fuse, "mine": mine}
    job, parser, shared, words = command_line(*jobs)
    add, data, folder = parser.add_argument, shared.data, f"{shared.work}/{shared.split}"
    count = between(0, kind=int)
    if job != "fuse":
        add("--corpus", default=f"{data}/corpus.jsonl", help="abstracts")
    if job == "retrieve":
        add("--claims", default=f"{data}/claims.{shared.split}.tsv", help="claims")
        add("--index", default=f"{shared.work}/index", help="folder of the indexes")
        add("--out", default=folder, help="folder of the runs")
        add("--retrievers", nargs="+", choices=SEARCH, default=list(SEARCH), help="what to search")
        add("--restrict", nargs=1, default=[], help="score only the candidates of this run")
    if job == "fuse":
        add("runs", nargs="+", help="runs")
        add("--corpus", nargs=1, default=[], help="its order breaks ties, else that of the runs")
        add("--out", default=f"{folder}/fused.tsv", help="fused run")
        add("--method", choices=["rrf", "zscore", "union", "top"], default="rrf",
            help="union: best rank; top: best score")
        add("--weights", nargs="+", type=between(0), help="one a run")
    if job != "mine":
        add("--top-k", type=between(1, kind=int), default=100, help="abstracts per claim")
        add("--rrf-k", type=count, default=60, help="k of reciprocal rank fusion")
    else:
        add("run", nargs="?", default=f"{folder}/hybrid.tsv", help="source of negatives")
        add("--qrels", default=f"{data}/qrels.{shared.split}.tsv", help="judged pairs")
        add("--out", default=f"{folder}/examples.jsonl", help="training examples")
        add("--shape", choices=SHAPES, default="pairs",
            help="pairs for 03; tuples for 01 and 03; labels (NEI only) for 05")
        add("--hard", type=count, default=4,
            help="negatives from the top of the run, per claim; tuples, labels: per evidence")
        add("--from-top", type=count, default=200, help="ranks that hard negatives come from")
        add("--draw", choices=["random", "best", "worst"], default="random", help="of these ranks")
        add("--easy", type=count, default=0, help="random negatives from the rest, counted alike")
        add("--easy-from", choices=["run", "corpus"], default="run",
            help="the rest: behind these ranks, or all of the corpus")
        add("--pool", choices=POOLS, default="both", help="what may be a negative")
        add("--nei-of", choices=["same", "any"], default="same",
            help="any: NEI abstracts of all claims; no run is read")
        add("--targets", choices=["label", "score"], default="label",
            help="score: the top of the run with 0.5 + SCALE (score - MIDDLE), clipped")
        add("--middle", type=between(-1e9))
        add("--scale", type=between(0))
        add("--gold", action="store_true", help="scores: evidence has target 1")
        add("--keep-claims-without-evidence", action="store_true", help="else they are skipped")
    finish(jobs[job], parser.parse_args(words))

# --- helpers (same in all six scripts)
PACKAGES = ("numpy", "pandas", "torch", "transformers", "sentence_transformers", "bm25s", "openai")
DEVICES = ["auto", "cpu", "mps", "cuda", *map("cuda:{}".format, range(16))]
START, LOCKS = time.monotonic(), []

def fail(where, what):
    """Bad input or usage: one line on stderr, exit status 2."""
    line = " ".join(f"error: {where}: {what}".split())
    print("".join(c if c.isprintable() else "?" for c in line), file=sys.stderr)
    sys.exit(2)

def read_table(path, columns, **known):
    """Read a TSV file as strings; a run by claim and rank, with rank and score as numbers.

    known: the values that a column may hold. The first bad row ends the script, with its line.
    """
    import pandas as pd
    try:
        table = pd.read_csv(path, sep="\t", header=None, dtype=str, na_filter=False,
                            skip_blank_lines=False, encoding="utf-8-sig", encoding_errors="replace")
    except ValueError as error:  # an open quotation mark, a row longer than the header
        [(kind, line)] = re.findall(r"(line|row) (\d+)", str(error))[:1] or [("line", 1)]
        line = int(line) + (kind == "row")  # pandas counts rows from 0
        fail(f"{path}:{line}", f"{error}; check its quotation marks; see 06_evaluate.py convert")
    header = table.iloc[0].tolist()
    if not set(columns) <= set(header) or len(set(header)) < len(header):
        fail(f"{path}:1", f"columns {header}, wanted {columns}; see 06_evaluate.py convert")
    table = table.set_axis(header, axis=1).set_axis(table.index + 1).iloc[1:]  # lines from 1
    table = table[(table != "").any(axis=1)]
    ids = [column for column in columns if column.endswith("_id")]
    torn = table.map(lambda field: "\t" in field and "\n" in field).any(axis=1)
    bad = {"a quotation mark is not closed": torn}
    for column in [*columns, header[-1]]:  # a short row has no last field
        bad[f"{column} is empty, or the row is short"] = table[column].str.strip() == ""
    bad |= {f"unknown {column}": ~table[column].isin(known[column]) for column in known}
    bad["there is an earlier row for this"] = table.duplicated(ids)
    if "rank" in columns:
        claim = table["claim_id"].factorize()[0]
        numbers = table[["rank", "score"]].apply(pd.to_numeric, errors="coerce").astype(float)
        bad["score is not a finite number"] = ~np.isfinite(numbers["score"])
        bad["rank is not 1, 2, 3"] = numbers["rank"] != numbers.groupby(claim)["rank"].rank("first")
    for what, rows in bad.items():
        for row in rows.index[rows][:1]:  # earlier texts may hold line breaks
            line = row + table.loc[: row - 1].map(lambda text: text.count("\n")).to_numpy().sum()
            fail(f"{path}:{line}", f"{what}: {' '.join(table.loc[row, ids])}; fix the row")
    if "rank" in columns:
        table = table.assign(rank=numbers["rank"].astype(int), score=numbers["score"])
        table = table.iloc[np.lexsort((table["rank"], claim))]
    return table.reset_index(drop=True)

def read_corpus(path):
    """Read {abstract_id: record} in file order; an abstract that is not a text becomes ""."""
    corpus, empty = {}, 0
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                if "\\ud" in line.lower():  # lone surrogates become U+FFFD
                    text = json.dumps(record, ensure_ascii=False).encode("utf-16", "surrogatepass")
                    record = json.loads(text.decode("utf-16", "replace"))
                name, text = str(record["abstract_id"]), record.get("abstract")
            except (ValueError, LookupError, TypeError, RecursionError):
                fail(f"{path}:{number}", "not a JSON object with an abstract_id; fix the line")
            if record["abstract_id"] is None or not name.strip() or name in corpus:
                fail(f"{path}:{number}", f"abstract_id {name!r} is empty or not unique; fix it")
            corpus[name] = record | {"abstract": text if isinstance(text, str) else ""}
            empty += not corpus[name]["abstract"].strip()
    if empty:
        print(f"warning: {path}: {empty} abstracts without text, kept as empty", file=sys.stderr)
    return corpus

def task_of(args, *files, models=()):
    """Return what decides the bytes of an output: arguments, and sha256 of what is read.

    Of an index counts meta.json, of a model its provenance, weights, config.json or name.
    """
    arguments = {name: value for name, value in vars(args).items() if name not in NEUTRAL}
    task = {"arguments": arguments, "inputs": {}}
    for path in map(Path, (*files, *models)):
        ends = "", "/meta.json", ".meta.json", "/model.safetensors", "/config.json"
        mark = next(filter(Path.is_file, (Path(f"{path}{end}") for end in ends)), None)
        if not mark and path not in map(Path, models):
            fail(path, "no such file or index; make it with the script before this one")
        with mark.open("rb") if mark else io.BytesIO() as data:
            task["inputs"][str(path)] = hashlib.file_digest(data, "sha256").hexdigest()
    return task

def up_to_date(args, task, *outs):
    """Return whether this very task made outs. Locks them until the process ends."""
    from filelock import FileLock, Timeout
    same, read = not args.force, {Path(path).resolve() for path in task["inputs"]}
    for path in map(Path, outs):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock, meta, made = FileLock(f"{path}.lock"), Path(f"{path}.meta.json"), {}
        try:
            LOCKS.append(lock.acquire(timeout=0))
        except Timeout:
            fail(path, "another command is making it; wait until that one ends")
        atexit.register(Path(lock.lock_file).unlink, missing_ok=True)
        with contextlib.suppress(OSError, ValueError):
            made = json.loads(meta.read_bytes())
        ours = meta.exists() and made.get("arguments", vars(args)).get("job") == args.job
        if path.resolve() in read or (path.is_dir() and any(path.iterdir()) and not ours):
            fail(path, "this command reads it, or did not make it; give another --out")
        same = same and path.exists() and task.items() <= made.items()
    for path in outs if same else ():
        remove(f"{path}.parts")  # left by a process that was killed at its very end
        print(f"up to date: {path}")
    return same

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
        made = task | {"command": sys.argv, "packages": modules, "device": device} | facts | spent()
        text = json.dumps(made, indent=1, ensure_ascii=False) + "\n"
        meta.write_text(json.dumps({"arguments": task["arguments"]}))  # vouches for no bytes
        if path.is_dir():
            remove(path)
        new.rename(path)
        meta.write_text(text, encoding="utf-8")
    finally:
        remove(new)

def remove(*paths):
    """Delete files and folders, where they exist."""
    for path in map(Path, paths):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

def spent():
    """Return seconds and peak memory (MiB) of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak //= 1024 if sys.platform == "linux" else 1024**2
    return {"seconds": round(time.monotonic() - START, 1), "peak_mib": peak}

if not sys.stderr.isatty():  # tqdm prints a plain line every ten seconds
    os.environ.setdefault("TQDM_MININTERVAL", "10")
    os.environ.setdefault("TQDM_BAR_FORMAT", "{desc}: {n_fmt}/{total_fmt} [{elapsed}]\n")

class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action):  # the docstring as it stands, and defaults but None
        return action.help if action.default is None else super()._get_help_string(action)

def between(low, high=1e9, kind=float):
    """Return an argparse type: a number from low to high."""
    def number(text):
        if not low <= kind(text) <= high:
            raise argparse.ArgumentTypeError(f"{text} is not a number from {low:g} to {high:g}")
        return kind(text)
    return number

def command_line(*jobs):
    """Return (parser, shared flags, words behind the job: the first word, by default jobs[0])."""
    words = sys.argv[1:]
    job = words.pop(0) if words and words[0] in jobs else jobs[0]
    parser = argparse.ArgumentParser(
        description=sys.modules["__main__"].__doc__, formatter_class=Help, usage=argparse.SUPPRESS,
        allow_abbrev=False)
    parser.error = lambda message: fail(Path(sys.argv[0]).name, f"{message}; see --help")
    parser.set_defaults(job=f"{Path(sys.argv[0]).name} {job}")
    add = parser.add_argument
    add("--data", default="data/demo", help="folder of corpus, claims and qrels")
    add("--work", default="work/demo", help="folder of everything made from them")
    add("--split", default="train" if job in ("train", "mine") else "test", help="which claims")
    add("--seed", type=between(0, 2**32 - 1, int), default=13, help="of every random choice")
    add("--device", nargs="+", choices=DEVICES, metavar="cuda:0", default=["auto"], help="or cpu")
    add("--force", action="store_true", help="make outputs again, from the start")
    shared, _ = parser.parse_known_args([word for word in words if word not in ("-h", "--help")])
    return job, parser, shared, words

def finish(job, args):
    """Run the job and print its result as JSON; a fault of the disk is one line, Ctrl-C silence."""
    try:
        print(json.dumps(job(args) | spent(), ensure_ascii=False))
    except (KeyboardInterrupt, BrokenPipeError):  # Ctrl-C; | head
        os._exit(130)  # without tearing libraries down, which takes seconds
    except OSError as error:
        fail(error.filename or args.job, f"{error.strerror or error}; check path, rights and space")
    except (RuntimeError, MemoryError) as error:
        if "memory" not in repr(error).lower() or "illegal" in repr(error):
            raise
        fail(args.job, "out of memory; lower --batch-size or lengths, and run it again to go on")
# --- end of helpers

# --- models (same in 01, 02, 03 and 05)
def open_model(load, name, args, dtype="auto", **how):
    """Return load(name, ...), a sentence-transformers model; a bad one ends the script.

    dtype: fp32, bf16 or fp16; auto is fp32 on a CPU, and on a GPU bf16 where it has it, else fp16.
    """
    import torch
    device = None if args.device == ["auto"] else args.device[0]
    gpu = torch.cuda.is_available() if device is None else device.startswith("cuda")
    if dtype == "auto":
        dtype = ("bf16" if torch.cuda.is_bf16_supported(False) else "fp16") if gpu else "fp32"
    precision = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    print(f"loading {name}", file=sys.stderr)
    try:
        weights = {"dtype": precision, "use_safetensors": True}
        model = load(str(name), device=device, trust_remote_code=False, model_kwargs=weights, **how)
        words = len(model.tokenizer.get_vocab())
        for place in args.device[1:]:
            torch.empty(0, device=place)  # raises if there is no such device
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
