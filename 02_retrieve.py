# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "PyStemmer==3.1.0", "bm25s==0.3.16", "numpy==2.4.6", "pandas==3.1.1",
#   "sentence-transformers==6.2.0", "torch==2.13.0", "tqdm==4.70.1", "transformers==5.23.0",
# ]
# ///
"""
Retrieve abstracts for each claim, fuse runs, mine training examples.

Reads   claims, corpus and index/{bm25,dense,splade}/; fuse: runs; mine: a run and qrels
Writes  {bm25,dense,splade}.tsv, hybrid.tsv (their fusion); fuse: fused.tsv
        mine: examples.jsonl for the train jobs of 01_index.py, 03_rerank.py and 05_classify.py
Prints  counts of each file, last one line of JSON

Examples
    python 02_retrieve.py --retrievers dense --restrict bm25.tsv --out work/demo/few
    python 02_retrieve.py fuse a.tsv b.tsv --method zscore --weights 0.3 0.7
    python 02_retrieve.py mine --shape tuples --hard 5 --easy 10 --easy-from corpus
"""
import argparse
import atexit
import contextlib
import csv
import hashlib
import json
import os
import resource
import shutil
import sys
import time
import zlib
from pathlib import Path

import numpy as np

CSC = ("data", "indices", "indptr")  # of a sparse matrix of abstracts and terms
CLAIMS, ROWS = 128, 65_536  # of one matrix product: 0.2 GiB at 394,269 abstracts

# --- helpers (same in all six scripts)
LABELS = ("SUPPORTS", "REFUTES", "NEI")
RUN = ["claim_id", "abstract_id", "rank", "score"]

def fail(where, what):
    """Bad input or usage: one line on stderr, exit status 2."""
    line = " ".join(f"error: {where}: {what}".split())
    print("".join(c if c.isprintable() else "?" for c in line), file=sys.stderr)
    sys.exit(2)

def read_table(path, columns, **known):
    """Read a TSV file with a header as strings, a run by claim and rank, rank and score as numbers.

    known: the values that a column may hold. The first bad row ends the script, with its line.
    """
    import pandas as pd
    rows, line = [], 1
    try:
        with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
            reader = csv.reader(file, delimiter="\t", strict=True)
            header = next(reader, [])
            line = reader.line_num + 1
            for row in reader:
                if any(row) and len(row) != len(header):
                    raise csv.Error(f"{len(row)} fields, not {len(header)}")
                if any("\t" in field and "\n" in field for field in row):
                    raise csv.Error("a quotation mark is not closed")
                if any(row):
                    rows.append([line, *row])
                line = reader.line_num + 1
    except csv.Error as error:
        fail(f"{path}:{line}", f"{error}; check its quotation marks; see 06_evaluate.py convert")
    if not set(columns) <= set(header) or len(set(header)) < len(header):
        fail(f"{path}:1", f"columns {header}, wanted {columns}; see 06_evaluate.py convert")
    table = pd.DataFrame(rows, columns=[0, *header]).set_index(0).astype(str)
    ids = [column for column in columns if column.endswith("_id")]
    bad = {f"{column} is empty": table[column].str.strip() == "" for column in columns}
    bad |= {f"unknown {column}": ~table[column].isin(known[column]) for column in known}
    bad["there is an earlier row for this"] = table.duplicated(ids)
    if "rank" in columns:
        claim = table["claim_id"].factorize()[0]
        for column in ("rank", "score"):
            table[column] = pd.to_numeric(table[column], errors="coerce").astype(float)
        bad["score is not a finite number"] = ~np.isfinite(table["score"])
        bad["ranks are not 1, 2, 3"] = table["rank"] != table.groupby(claim)["rank"].rank("first")
    for what, rows in bad.items():
        if rows.any():
            line = rows.idxmax()
            fail(f"{path}:{line}", f"{what}: {' '.join(table.loc[line, ids])}; fix the row")
    if "rank" in columns:
        table = table.iloc[np.lexsort((table["rank"], claim))].astype({"rank": int})
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
            except (ValueError, KeyError, TypeError, RecursionError):
                fail(f"{path}:{number}", "not a JSON object with an abstract_id; fix the line")
            if not name.strip() or name in corpus:
                fail(f"{path}:{number}", f"abstract_id {name!r} is empty or not unique; fix it")
            corpus[name] = record | {"abstract": text if isinstance(text, str) else ""}
            empty += not corpus[name]["abstract"].strip()
    if empty:
        print(f"warning: {path}: {empty} abstracts without text, kept as empty", file=sys.stderr)
    return corpus
# --- end of helpers

# --- helpers for outputs (same in all six scripts)
NEUTRAL = {"force", "out", "device", "batch_size", "concurrency"}  # no byte depends on these
PACKAGES = ("numpy", "pandas", "torch", "transformers", "sentence_transformers", "bm25s", "openai")
START, LOCKS = time.monotonic(), []

def sha256_of(*paths, models=()):
    """Return {path: sha256} of files, indexes (meta.json), models (config.json, else name)."""
    prints = {}
    for path in map(Path, (*paths, *models)):
        marks = [path / "meta.json", Path(f"{path}.meta.json"), path / "config.json"]
        mark = path if path.is_file() else next(filter(Path.is_file, marks), os.devnull)
        if mark == os.devnull and str(path) not in map(str, models):
            fail(path, "no such file or index; make it with the script before this one")
        with open(mark, "rb") as file:
            prints[str(path)] = hashlib.file_digest(file, "sha256").hexdigest()
    return prints

def task_of(args, inputs):
    """Return what decides the bytes of an output: arguments and inputs."""
    arguments = {name: value for name, value in vars(args).items() if name not in NEUTRAL}
    return json.loads(json.dumps({"arguments": arguments, "inputs": inputs}))

def up_to_date(paths, args, inputs):
    """Return whether this very task made all paths. Locks them until this process ends."""
    from filelock import FileLock, Timeout
    task, read = task_of(args, inputs), {Path(path).resolve() for path in inputs}
    same = not args.force
    for path in map(Path, paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock, meta = FileLock(f"{path}.lock"), Path(f"{path}.meta.json")
        try:
            LOCKS.append(lock.acquire(timeout=0))
        except Timeout:
            fail(path, "another command is making it; wait until that one ends")
        atexit.register(Path(lock.lock_file).unlink, missing_ok=True)
        made = {}
        with contextlib.suppress(OSError, ValueError):
            made = json.loads(meta.read_bytes())
        ours = made.get("arguments", {}).get("job") == args.job
        if path.resolve() in read or (path.is_dir() and any(path.iterdir()) and not ours):
            fail(path, "this command reads it, or did not make it; give another --out")
        same = same and path.exists() and task.items() <= made.items()
    for path in paths if same else ():
        remove(f"{path}.parts")  # left by a process that was killed at its very end
        print(f"up to date: {path}")
    return same

@contextlib.contextmanager
def written(path, args, inputs, **facts):
    """Yield a temporary path. What is made there becomes path, whole, with its provenance."""
    path, new, old = (Path(f"{path}{end}") for end in ("", ".tmp", ".tmp.old"))
    meta, new_meta = Path(f"{path}.meta.json"), Path(f"{new}.meta.json")
    remove(new, old)
    try:
        yield new
        modules = {name: sys.modules[name].__version__ for name in PACKAGES if name in sys.modules}
        made = task_of(args, inputs) | {"command": sys.argv, "packages": modules} | facts | spent()
        new_meta.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        meta.unlink(missing_ok=True)  # it would vouch for other bytes
        if path.is_dir():
            path.rename(old)
        new.rename(path)
        new_meta.rename(meta)
    finally:
        remove(new, new_meta, old)

def remove(*paths):
    """Delete files and folders, where they exist."""
    for path in map(Path, paths):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

def spent():
    """Return seconds and peak memory (MiB) of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak //= 1024 if sys.platform == "linux" else 1024**2
    return {"seconds": round(time.monotonic() - START, 1), "peak_mib": peak}
# --- end of helpers for outputs

# --- command line (same in all six scripts)
if not sys.stderr.isatty():  # tqdm prints a plain line every ten seconds
    os.environ.setdefault("TQDM_MININTERVAL", "10")
    os.environ.setdefault("TQDM_BAR_FORMAT", "{desc}: {n_fmt}/{total_fmt} [{elapsed}]\n")

class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The docstring as it stands, and every default."""

def command_line(*jobs):
    """Return (parser, shared flags, words behind the job: the first word, by default jobs[0])."""
    words = sys.argv[1:]
    job = words.pop(0) if words and words[0] in jobs else jobs[0]
    parser = argparse.ArgumentParser(
        description=sys.modules["__main__"].__doc__, formatter_class=Help, usage=argparse.SUPPRESS,
        allow_abbrev=False)
    parser.error = lambda message: fail(Path(sys.argv[0]).name, f"{message}; see --help")
    parser.set_defaults(job=job)
    add = parser.add_argument
    add("--data", default="data/demo", help="folder of corpus, claims and qrels")
    add("--work", default="work/demo", help="folder of everything made from them")
    add("--split", default="train" if job in ("train", "mine") else "test", help="which claims")
    add("--seed", type=int, default=13, help="of every random choice")
    add("--device", nargs="+", default=["auto"], help="cpu, cuda, mps, or several: cuda:0 cuda:1")
    add("--force", action="store_true", help="make outputs again that are up to date")
    shared, _ = parser.parse_known_args([word for word in words if word not in ("-h", "--help")])
    return parser, shared, words

def finish(job, args):
    """Run the job and print its result as JSON; a fault of the disk is one line, Ctrl-C silence."""
    args.job = f"{Path(sys.argv[0]).name} {args.job}"
    try:
        print(json.dumps(job(args) | spent(), ensure_ascii=False))
    except KeyboardInterrupt:
        os._exit(130)  # without tearing libraries down, which takes seconds
    except OSError as error:
        fail(error.filename or args.job, f"{error.strerror or error}; check path, rights and space")
# --- end of command line

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
        words = len(model.tokenizer)
    except Exception as error:  # of many kinds: no such model, no network, no access, damaged files
        fail(name, f"cannot be loaded ({type(error).__name__}: {error}); see data/download.py")
    parts = [part for part in model.modules() if isinstance(part, torch.nn.Embedding)]
    sizes = [part.num_embeddings for part in parts]
    if sizes and not max(sizes) / 2 <= words <= max(sizes):
        fail(name, f"tokenizer of {words} entries, embeddings of {max(sizes)}; copy it whole")
    return model
# --- end of models

# ---------------------------------------------------------------- Search
def open_index(folder, corpus):
    """Return meta.json of an index of this corpus (sha256) whose files are as they were made."""
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
    """End the script if a score is NaN or infinite."""
    count = np.sum(~np.isfinite(np.asarray(scores, float)))  # no rows: an empty column of objects
    if count:
        fail(where, f"{count} of {len(scores)} scores are NaN or infinite; {what}")

def search_bm25(folder, meta, claims, args):
    """Return BM25 scores (abstracts,) for each claim, tokenised like the abstracts."""
    import bm25s
    from scipy.sparse import csc_matrix
    from Stemmer import Stemmer
    how = dict(meta["analyser"], return_ids=False, show_progress=False)
    if how.pop("name") == "default":
        how["stemmer"] = Stemmer(how["stemmer"])
    index = bm25s.BM25.load(folder)
    parts = tuple(index.scores[name] for name in CSC)
    matrix = csc_matrix(parts, shape=(meta["abstracts"], len(parts[2]) - 1))
    queries = map(index.get_tokens_ids, bm25s.tokenize(claims, **how))
    return (matrix[:, terms] @ np.ones(len(terms), np.float32) for terms in queries)

def encode(load, meta, claims, args):
    """Return the vectors of the claims by the model of an index, or the same one moved."""
    model = getattr(args, f"{meta['kind']}_model") or meta["model"]
    if sha256_of(models=[model])[str(Path(model))] != meta["model_sha256"]:
        fail(model, f"not the model of the {meta['kind']} index; make that again: 01_index.py")
    encoder = open_model(load, model, args, "fp32")
    encoder.max_seq_length = meta["max_length"]
    return encoder.encode_query(claims, prompt=meta["query_prompt"], convert_to_tensor=True)

def search_dense(folder, meta, claims, args):
    """Return cosines (abstracts,) for each claim."""
    import torch
    from sentence_transformers import SentenceTransformer
    queries = encode(SentenceTransformer, meta, claims, args)
    vectors = torch.from_numpy(np.load(folder / "embeddings.npy", mmap_mode="c"))
    return inner_products(vectors, torch.nn.functional.normalize(queries))

def inner_products(vectors, queries):
    """Yield vectors @ query (abstracts,) in float32 for each query, exact, block by block."""
    import torch
    for part in queries.split(CLAIMS):
        blocks = [part @ block.to(part.device).float().T for block in vectors.split(ROWS)]
        yield from torch.cat(blocks, dim=1).cpu().numpy()

def search_splade(folder, meta, claims, args):
    """Return inner products (abstracts,) of term weights for each claim."""
    from scipy.sparse import csc_matrix
    from sentence_transformers import SparseEncoder
    queries = encode(SparseEncoder, meta, claims, args).cpu().coalesce()
    (rows, terms), weights = queries.indices().numpy(), queries.values().numpy()
    if meta["activation"] == "relu":
        weights = np.expm1(weights)  # the encoder gives log(1 + ReLU)
    parts = tuple(np.load(folder / f"{name}.npy", mmap_mode="r") for name in CSC)
    matrix = csc_matrix(parts, shape=meta["shape"])
    queries = (rows == row for row in range(len(claims)))
    return (matrix[:, terms[query]] @ weights[query] for query in queries)

SEARCH = {"bm25": search_bm25, "dense": search_dense, "splade": search_splade}

def top_k(scores, k):
    """Return the k best rows of scores (1-D), best first; ties, also at the cut, by corpus order.

    No row of the result is below the k-th best of the maxima of 4 k or more blocks.
    """
    rows, height = np.arange(len(scores)), len(scores) // (4 * k)
    if height > 1:
        maxima = scores[: len(scores) // height * height].reshape(height, -1).max(axis=0)
        rows = np.flatnonzero(scores >= np.partition(maxima, -k)[-k])
    return rows[np.argsort(-scores[rows], kind="stable")][:k]

# ---------------------------------------------------------------- Fusion
METHODS = ["rrf", "minmax", "zscore", "union", "top"]

def points(scores, method, k):
    """Return what a run adds to its abstracts, from their scores (n,), best first."""
    ranks = np.arange(1, len(scores) + 1)
    shares = (scores - scores.min()) / (np.ptp(scores) or 1)
    return {
        "rrf": 1 / (k + ranks),  # Cormack et al. 2009
        "minmax": shares,
        "zscore": shares / (shares.std() or 1),  # shifted: a run's lowest is 0
        "union": 1 / ranks,
        "top": scores,
    }[method]

def fuse_runs(runs, weights, method, k):
    """Return {claim_id: {abstract_id: score}} from several of them, each best first."""
    fused = {}
    for run, weight in zip(runs, weights):
        for claim, found in run.items():
            total = fused.setdefault(claim, {})
            scores = np.array(list(found.values()))
            given = weight * points(scores, method, k) if found else scores
            for name, value in zip(found, given.tolist()):
                if method in ("union", "top"):
                    total[name] = max(value, total.get(name, value))
                else:
                    total[name] = total.get(name, 0) + value
    return fused

# ---------------------------------------------------------------- Examples
POOLS = {"nei": ["NEI"], "unjudged": [None], "both": ["NEI", None]}  # labels of negatives

def allowed(names, labels, pool):
    """Return the possible negatives among names; labels: {abstract_id: label} of the claim."""
    return [name for name in names if labels.get(name) in POOLS[pool]]

def draw(names, count, how, rng):
    """Return count of names (best first): the best, the worst or random ones."""
    if how == "random":
        return [names[row] for row in rng.choice(len(names), min(count, len(names)), False)]
    return names[:count] if how == "best" else names[::-1][:count]

def tuples(claim, evidence, top, rest, args, rng):
    """Return one example for each evidence abstract, with negatives of its own."""
    rows = []
    for name in evidence:
        drawn = draw(top, args.hard, args.draw, rng) + draw(rest, args.easy, "random", rng)
        rows.append({"kind": "evidence", "claim_id": claim, "positive": name, "negatives": drawn})
    return rows

def pairs(claim, evidence, top, rest, args, rng):
    """Return evidence with target 1 and negatives with 0; for labels only negatives, as NEI."""
    times = len(evidence) if args.per == "positive" else 1
    hard = draw(top, times * args.hard, args.draw, rng)
    easy = draw(rest, times * args.easy, "random", rng)
    value = {"label": "NEI"} if args.shape == "labels" else {"target": 0.0}
    rows = [pair("evidence", claim, name, target=1.0) for name in evidence if "target" in value]
    rows += [pair("hard", claim, name, **value) for name in hard]
    return rows + [pair("easy", claim, name, **value) for name in easy]

def pair(kind, claim, name, **value):
    """Return one example of a claim and an abstract."""
    return {"kind": kind, "claim_id": claim, "abstract_id": name} | value

def targets(scores, middle, scale):
    """Return 0.5 + scale (score - middle) within 0 and 1; by default the mean and 1 / (4 sd)."""
    middle = scores.mean() if middle is None else middle
    scale = 1 / (4 * (scores.std() or 1)) if scale is None else scale
    return np.clip(0.5 + scale * (scores - middle), 0, 1).round(6)

# ---------------------------------------------------------------- Jobs
def by_claim(table, column):
    """Return {claim_id: {abstract_id: value}} of a column."""
    groups = table.set_index("abstract_id").groupby("claim_id", sort=False)[column]
    return {claim: values.to_dict() for claim, values in groups}

def write_run(run, order, path, args, inputs):
    """Write the --top-k best of {claim_id: {abstract_id: score}}; ties by order, if any."""
    import pandas as pd
    rows = []
    for claim, found in run.items():
        best = sorted(found, key=lambda name: (-found[name], order.get(name, 0)))
        best = best[: args.top_k or None]
        rows += [(claim, name, rank, found[name]) for rank, name in enumerate(best, 1)]
    table = pd.DataFrame(rows, columns=RUN)
    check_finite(table["score"], path, "rescale the runs or weights")
    empty = sum(not found for found in run.values())
    with written(path, args, inputs, rows=len(rows), claims_without_rows=empty) as new:
        table.to_csv(new, sep="\t", index=False, float_format="%.9g", lineterminator="\n")
    print(f"{path}: {len(rows)} rows, {len(run)} claims, {empty} of them without rows")

def retrieve(args):
    """Write a run for each index, and their fusion."""
    folders = {kind: Path(args.index, kind) for kind in args.retrievers}
    inputs = sha256_of(args.claims, args.corpus, *folders.values(), *args.restrict)
    names = [*folders] + ["hybrid"] * (len(folders) > 1)
    paths = {name: f"{Path(args.out, name)}.tsv" for name in names}
    if up_to_date(paths.values(), args, inputs):
        return {"made": []}
    from tqdm.auto import tqdm
    claims, runs, seconds = read_table(args.claims, ["claim_id", "claim"]), {}, {}
    if claims.empty:
        fail(args.claims, "no claims; add one a line")
    for kind, folder in folders.items():
        meta = open_index(folder, inputs[str(Path(args.corpus))])
        ids = json.loads((folder / "abstract_ids.json").read_bytes())
        order = {name: row for row, name in enumerate(ids)}
        tables = [read_table(path, RUN, abstract_id=order) for path in args.restrict]
        earlier = [by_claim(table, "rank") for table in tables]
        found = SEARCH[kind](folder, meta, list(claims["claim"]), args)
        start, runs[kind] = time.monotonic(), {}
        for claim, scores in zip(claims["claim_id"], tqdm(found, kind, len(claims))):
            check_finite(scores, folder, "make it again with --dtype fp32")
            for run in earlier:
                few = [order[name] for name in run.get(claim, {})]
                scores[np.delete(np.arange(len(ids)), few)] = -np.inf
            best = top_k(scores, args.top_k or len(ids))
            best = best[scores[best] > (-np.inf if kind == "dense" else 0)]  # 0: no common term
            runs[kind][claim] = {ids[row]: float(scores[row]) for row in best}
        seconds[kind] = round(time.monotonic() - start, 2)
        write_run(runs[kind], order, paths[kind], args, inputs)
    if len(runs) > 1:
        fused = fuse_runs(runs.values(), [1] * len(runs), "rrf", args.rrf_k)
        write_run(fused, order, paths["hybrid"], args, inputs)
    return {"made": list(paths.values()), "claims": len(claims), "search_seconds": seconds}

def fuse(args):
    """Write the fusion of runs."""
    weights = args.weights or [1] * len(args.runs)
    if len(weights) != len(args.runs):
        fail("--weights", f"{len(weights)} for {len(args.runs)} runs; give one a run")
    inputs = sha256_of(*args.runs, *args.corpus)
    if up_to_date([args.out], args, inputs):
        return {"made": []}
    corpus = read_corpus(*args.corpus) if args.corpus else {}
    known = {"abstract_id": corpus} if corpus else {}
    np.seterr(all="ignore")  # write_run refuses what overflows
    runs = [by_claim(read_table(path, RUN, **known), "score") for path in args.runs]
    fused = fuse_runs(runs, weights, args.method, args.rrf_k)
    order = {name: row for row, name in enumerate(corpus)}
    write_run(fused, order, args.out, args, inputs)
    return {"made": [args.out], "claims": len(fused)}

def mine(args):
    """Write training examples: evidence, and negatives drawn from a run."""
    scored, any_nei = args.targets == "score", args.pool == "nei" and args.nei_of == "any"
    if scored and args.shape != "pairs":
        fail("--targets score", "needs --shape pairs")
    paths = [args.run] if scored or (args.hard + args.easy and not any_nei) else []
    inputs = sha256_of(args.qrels, args.corpus, *paths)
    if up_to_date([args.out], args, inputs):
        return {"made": []}
    corpus = read_corpus(args.corpus)
    qrels = read_table(args.qrels, [*RUN[:2], "label"], abstract_id=corpus, label=LABELS)
    judged, found, examples, skipped = by_claim(qrels, "label"), {}, [], 0
    for path in paths:
        run = read_table(path, RUN, abstract_id=corpus)
        run["score"] = targets(run["score"].to_numpy(), args.middle, args.scale)
        check_finite(run["score"], path, "give other --middle and --scale")
        found = by_claim(run, "score")
    pool, first = args.pool, args.from_top
    if any_nei:
        nei = list(dict.fromkeys(qrels["abstract_id"][qrels["label"] == "NEI"]))
        pool, first = "both", len(nei)
    if args.shape == "labels":
        pool = "unjudged"  # 05_classify.py reads the judged ones from the qrels
    for claim in judged | found:
        labels, scores = judged.get(claim, {}), found.get(claim, {})
        evidence = [name for name in labels if labels[name] != "NEI"]
        if not evidence and not args.keep_claims_without_evidence:
            skipped += 1
        elif scored:
            gold = evidence if args.gold else []
            for name in list(scores)[:first]:
                if name not in gold:
                    examples.append(pair("score", claim, name, target=scores[name]))
            examples += [pair("evidence", claim, name, target=1.0) for name in gold]
        else:
            ranked = nei if any_nei else list(scores | labels)  # last, NEI that the run lacks
            rest = corpus if args.easy_from == "corpus" else ranked[first:]
            rest = allowed(rest, labels | dict.fromkeys(ranked[:first], "top"), pool)
            top = allowed(ranked[:first], labels, pool)
            rng = np.random.default_rng([abs(args.seed), *claim.encode()])
            shape = tuples if args.shape == "tuples" else pairs
            examples += shape(claim, evidence, top, rest, args, rng)
    if not examples:
        fail(args.qrels, "no claim has evidence; see --keep-claims-without-evidence")
    facts = {"examples": len(examples), "claims_without_evidence": skipped}
    with written(args.out, args, inputs, **facts) as new, open(new, "w", encoding="utf-8") as file:
        for example in examples:
            file.write(json.dumps(example, ensure_ascii=False) + "\n")
    print(f"{args.out}: {len(examples)} examples; {skipped} claims without evidence skipped")
    return {"made": [args.out], **facts}

def whole(text):
    """For argparse: 0, 1, 2, ..."""
    if not text.isdecimal():
        raise ValueError
    return int(text)

def main():
    parser, shared, words = command_line("retrieve", "fuse", "mine")
    add, data, folder = parser.add_argument, shared.data, f"{shared.work}/{shared.split}"
    if shared.job == "retrieve":
        add("--claims", default=f"{data}/claims.{shared.split}.tsv", help="claims")
        add("--index", default=f"{shared.work}/index", help="folder of the indexes")
        add("--corpus", default=f"{data}/corpus.jsonl", help="abstracts")
        add("--out", default=folder, help="folder of the runs")
        add("--retrievers", nargs="+", choices=SEARCH, default=list(SEARCH), help="indexes")
        add("--restrict", nargs=1, default=[], help="score only the candidates of this run")
        add("--dense-model", help="where the model of the dense index is, if moved")
        add("--splade-model", help="the same for SPLADE")
    if shared.job == "fuse":
        add("runs", nargs="+", help="runs")
        add("--out", default=f"{folder}/fused.tsv", help="fused run")
        add("--method", choices=METHODS, default="rrf", help="union: best rank; top: best score")
        add("--weights", nargs="+", type=float, help="one a run")
        add("--corpus", nargs=1, default=[], help="its order breaks ties, else that of the runs")
    if shared.job != "mine":
        add("--top-k", type=whole, default=100, help="abstracts kept per claim; 0: all")
        add("--rrf-k", type=whole, default=60, help="k of reciprocal rank fusion")
    else:
        add("run", nargs="?", default=f"{folder}/hybrid.tsv", help="source of negatives")
        add("--qrels", default=f"{data}/qrels.{shared.split}.tsv", help="judged pairs")
        add("--corpus", default=f"{data}/corpus.jsonl", help="abstracts")
        add("--out", default=f"{folder}/examples.jsonl", help="training examples")
        add("--shape", choices=["pairs", "tuples", "labels"], default="pairs",
            help="labels: only negatives, as NEI")
        add("--hard", type=whole, default=4, help="negatives from the top of the run")
        add("--from-top", type=whole, default=200, help="ranks of the top")
        add("--draw", choices=["random", "best", "worst"], default="random", help="of the top")
        add("--easy", type=whole, default=0, help="random negatives from the rest")
        add("--easy-from", choices=["run", "corpus"], default="run", help="the rest of what")
        add("--pool", choices=POOLS, default="both", help="what may be a negative")
        add("--nei-of", choices=["same", "any"], default="same",
            help="any, with --pool nei: draw from NEI of all claims, without a run")
        add("--per", choices=["claim", "positive"], default="claim",
            help="unit of --hard and --easy; of tuples always positive")
        add("--targets", choices=["label", "score"], default="label",
            help="score: the top of the run with 0.5 + SCALE (score - MIDDLE)")
        add("--middle", type=float, help="by default the mean score")
        add("--scale", type=float, help="by default 1 / (4 sd) of the scores")
        add("--gold", action="store_true", help="with scores: evidence has target 1")
        add("--keep-claims-without-evidence", action="store_true", help="else they are skipped")
    args = parser.parse_args(words)
    finish({"retrieve": retrieve, "fuse": fuse, "mine": mine}[shared.job], args)

if __name__ == "__main__":
    main()
