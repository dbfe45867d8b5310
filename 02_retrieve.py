"""
Retrieve abstracts for each claim with every index, and fuse the runs by reciprocal rank.

Reads   data/NAME/claims.SPLIT.tsv: claim_id, claim
        work/NAME/index/{bm25,dense,splade}/ (01_index.py)
Writes  work/NAME/SPLIT/{bm25,dense,splade}.tsv and, from two retrievers on, hybrid.tsv:
        claim_id, abstract_id, rank (from 1), score (higher is better)
Prints  one line of JSON, last on stdout

Examples
    python 02_retrieve.py
    python 02_retrieve.py --retrievers bm25 dense --top-k 600
    python 02_retrieve.py --split train
    python 02_retrieve.py fuse a.tsv b.trec --out hybrid.tsv
"""
import argparse
import contextlib
import hashlib
import json
import os
import resource
import shutil
import sys
import threading
import time
from pathlib import Path

import numpy as np

RRF_K = 60  # Cormack et al. 2009
BLOCK = 65_536  # rows of the dense matrix turned to float32 at once: 256 MiB at 1,024 dimensions

# --- helpers: the same block in all six scripts
LABELS, START = ("SUPPORTS", "REFUTES", "NEI"), time.monotonic()
PACKAGES = "numpy pandas torch transformers sentence_transformers bm25s openai".split()
TREC = {6: "claim_id q0 abstract_id rank score tag".split(), 4: "claim_id q0 abstract_id label".split()}
if not sys.stderr.isatty():  # every tqdm obeys these: plain lines where no bar can be drawn
    os.environ.setdefault("TQDM_MININTERVAL", "10")
    os.environ.setdefault("TQDM_BAR_FORMAT", "{desc}: {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]\n")

def fail(where, what):
    """Bad input or usage: one line on stderr, exit status 2."""
    sys.exit(print("error:", *f"{where}: {what}".split(), file=sys.stderr) or 2)

def reject(path, table, bad, what):
    """Fail at the first row where bad (boolean, by row) holds; what may name the row's {columns}."""
    if bad.any():  # the index counts records: line breaks inside quoted fields come on top
        breaks = table.loc[: bad.idxmax()].iloc[:-1].apply(lambda column: column.str.count("\n")).to_numpy().sum()
        fail(f"{path}:{bad.idxmax() + int(breaks)}", what.format(**table.loc[bad.idxmax()]))

def read_table(path, columns, **known):
    """TSV with a header, or TREC, as strings; a run comes by claim and rank. known: the ids that a column may hold."""
    import pandas as pd
    try:
        with open(path, encoding="utf-8-sig") as file:
            words = file.readline().split()
        trec = set(columns) <= set(TREC.get(len(words), ())) and not set(columns) & set(words)
        shape = dict(sep=r"\s+", header=None, names=TREC[len(words)]) if trec else dict(sep="\t")
        table = pd.read_csv(path, dtype=str, na_filter=False, skip_blank_lines=False, encoding="utf-8-sig", **shape)
    except (OSError, ValueError) as error:
        fail(path, f"{getattr(error, 'strerror', None) or error}; give a table with the columns {', '.join(columns)}")
    if not isinstance(table.index, pd.RangeIndex) or not set(columns) <= set(table):
        found = ", ".join(map(str, table))
        fail(f"{path}:1", f"the columns {', '.join(columns)} are wanted, {found} found; mend the header")
    table.index += 1 if trec else 2
    table = table[(table != "").any(axis=1)].copy()
    ids = [column for column in columns if column.endswith("_id")]
    reject(path, table, (table[ids] == "").any(axis=1), "an id is empty; fill it in or remove the row")
    reject(path, table, table.duplicated(ids), " ".join(f"{c} {{{c}}}" for c in ids) + " stands twice; keep one row")
    for column, allowed in known.items():
        reject(path, table, ~table[column].isin(allowed), f"unknown {column} {{{column}}}; give the files that go together")
    if "label" in columns and trec:  # TREC judges relevance: no stance to be had
        table["label"] = np.where(pd.to_numeric(table["label"], errors="coerce") > 0, "RELEVANT", "NEI")
    elif "label" in columns:
        table["label"] = table["label"].str.upper()
        reject(path, table, ~table["label"].isin(LABELS), f"label {{label!r}} is none of {', '.join(LABELS)}; map it")
    if "rank" not in columns:
        return table
    rank, score = (pd.to_numeric(table[c], errors="coerce").astype(float) for c in ("rank", "score"))
    reject(path, table, ~np.isfinite(score), "score {score!r} is not a finite number; repair the row")
    if trec:  # as trec_eval does: by score, whatever the rank column says
        rank = score.groupby(table["claim_id"]).rank(method="first", ascending=False)
    reject(path, table, ~(rank >= 1) | (rank % 1 != 0), "rank {rank!r} is not an integer from 1; number the rows anew")
    run = table.assign(rank=rank.astype(int), score=score, order=table["claim_id"].factorize()[0])
    run = run.sort_values(["order", "rank"])
    gap = run["rank"] != run.groupby("order").cumcount() + 1
    reject(path, table, gap.sort_index(), "the ranks of claim {claim_id} have a gap or a tie here; number the rows anew")
    return run.drop(columns="order").reset_index(drop=True)

def read_corpus(path):
    """{abstract_id: record} in file order; an abstract that is no text becomes "", counted in one warning."""
    corpus, empty = {}, 0
    for number, line in enumerate(open(path, "rb"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            name = str(record["abstract_id"]) if type(record["abstract_id"]) in (str, int) else ""
        except (ValueError, KeyError, TypeError, RecursionError):
            fail(f"{path}:{number}", "no JSON object with an abstract_id; write one object a line")
        if not name or name in corpus:
            fail(f"{path}:{number}", f"abstract_id {name!r} is empty or stands twice; give every record its own string")
        text = record.get("abstract")
        empty += not (isinstance(text, str) and text.strip())
        corpus[name] = record | {"abstract": text if isinstance(text, str) else ""}
    if empty:
        print(f"warning: {path}: {empty} abstracts are null, empty or no text; kept as empty", file=sys.stderr)
    return corpus

def fingerprints(*paths):
    """{path: sha256} of this script, of files, and of folders (of their meta.json, else of all files inside)."""
    prints = {}
    for path in map(Path, (sys.argv[0], *paths)):
        files = [path / "meta.json"] if (path / "meta.json").is_file() else sorted(path.rglob("*")) or [path]
        digests = [hashlib.file_digest(f.open("rb"), "sha256").hexdigest() for f in files if f.is_file()]
        if not digests:
            fail(path, "no such file or folder; make it with the script before this one, or name another")
        prints[path.as_posix()] = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    return prints

def up_to_date(paths, args, inputs):
    """True, and said, if all paths stand with a provenance that names these arguments and inputs."""
    for path in paths:
        made = {}
        with contextlib.suppress(OSError, ValueError):
            made = json.loads(Path(f"{path}.meta.json").read_text(encoding="utf-8"))
        same = made.get("arguments") == vars(args) | {"force": False} and made.get("inputs") == inputs
        if args.force or not same or not Path(path).exists():
            return False
    return not print(*(f"up to date: {path}" for path in paths), sep="\n")

@contextlib.contextmanager
def written(path, args, inputs, **facts):
    """Yield a temporary path; the file or folder made there becomes path, whole, with its provenance beside it."""
    path, temporary, meta = Path(path), Path(f"{path}.tmp-{os.getpid()}"), Path(f"{path}.meta.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        packages = {name: sys.modules[name].__version__ for name in PACKAGES if name in sys.modules}
        arguments = vars(args) | {"force": False}
        made = dict(command=sys.argv, arguments=arguments, inputs=inputs, packages=packages, **facts, **spent())
        provenance = Path(f"{temporary}.meta.json")
        provenance.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        for file in filter(Path.is_file, (provenance, temporary, *temporary.rglob("*"))):
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
        meta.unlink(missing_ok=True)  # from here on an old provenance would vouch for the new bytes
        if path.is_dir():
            shutil.rmtree(path)
        os.replace(temporary, path)
        os.replace(provenance, meta)
    finally:
        for left in (temporary, Path(f"{temporary}.meta.json")):
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)

def model_folder(name):
    """The folder of a model: name itself, or the hub's snapshot of it (from the cache under HF_HUB_OFFLINE=1)."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(name, ignore_patterns=["*.onnx*", "openvino/*", "*.h5", "*.msgpack", "*.pkl"]))
    except Exception as error:  # a dozen kinds: no network, no such model, no access, not in the cache
        fail(name, f"no such folder, and no such model on the hub ({type(error).__name__}); see data/download.py --help")

@contextlib.contextmanager
def ticking(what):
    """While something without a progress bar goes on (imports, loading), say so every three seconds."""
    done = threading.Event()
    def tick(seconds=0):
        print(f"{what} ... {seconds} s", file=sys.stderr, flush=True)
        done.wait(3) or tick(seconds + 3)
    threading.Thread(target=tick, daemon=True).start()
    try:
        yield
    finally:
        done.set()

def spent():
    """Seconds and peak memory (MiB) of this process so far."""
    unit = 1024 if sys.platform == "linux" else 1024**2
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // unit
    return {"seconds": round(time.monotonic() - START, 1), "peak_mib": peak}

class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The docstring as it stands, and the defaults."""
    def _get_help_string(self, action):
        return super()._get_help_string(action) if action.default else action.help

def run_job(doc, jobs):
    """Run the job named by the first word (else the first of jobs); the last line of stdout is its JSON."""
    words = sys.argv[1:]
    job, flags = jobs[words.pop(0) if words and words[0] in jobs else next(iter(jobs))]
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=doc, formatter_class=Help, allow_abbrev=False)
    parser.error = lambda message: fail(Path(sys.argv[0]).name, f"{message}; see --help")
    flags(parser.add_argument)
    parser.add_argument("--data", default="data/demo", help="folder of corpus, claims and qrels")
    parser.add_argument("--work", default="work/demo", help="folder of all that is made from them")
    parser.add_argument("--split", default="train" if job.__name__ == "train" else "test", help="which claims")
    parser.add_argument("--seed", type=int, default=13, help="of every random choice")
    parser.add_argument("--device", default="auto", help="cuda, cuda:1, mps, cpu; auto takes the best there is")
    parser.add_argument("--force", action="store_true", help="make outputs again that are up to date")
    args = parser.parse_args(words)
    for name, value in vars(args).items():
        if isinstance(value, str):
            for word in ("data", "work", "split"):
                value = value.replace(f"{{{word}}}", getattr(args, word))
            setattr(args, name, value)
    try:
        print(json.dumps(job(args) | spent(), ensure_ascii=False))
    except KeyboardInterrupt:
        sys.exit(130)
# --- end of helpers

# ----------------------------------------------------------- Ranking
def top_k(scores, k):
    """The k best rows of scores (1-D), best first; equal scores in corpus order, also where the cut falls among them."""
    k = min(k, len(scores))
    cut = np.partition(scores, -k)[-k]
    above = np.flatnonzero(scores > cut)
    chosen = np.concatenate([above, np.flatnonzero(scores == cut)[: k - len(above)]])
    return chosen[np.argsort(-scores[chosen], kind="stable")]

def rrf(rankings, order, k=RRF_K):
    """[(id, score)], best first: S(d) = sum over rankings of 1 / (k + rank of d), rank from 1 (Cormack et al. 2009).

    Ranks only: BM25 and cosine share no scale. A ranking without d adds nothing. order is {id: place} for ties.
    """
    scores = {}
    for ranking in rankings:
        for rank, name in enumerate(ranking, 1):
            scores[name] = scores.get(name, 0.0) + 1 / (k + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], order[item[0]]))

# ----------------------------------------------------------- Search
def search_bm25(folder, meta, claims, args):
    """Scores (abstracts,) claim by claim; claims go through the analyser stored with the index."""
    import bm25s
    import Stemmer

    bm25 = bm25s.BM25.load(folder)
    stemmer = Stemmer.Stemmer(meta["analyser"]["stemmer"])
    stopwords = meta["analyser"]["stopwords"]
    words = bm25s.tokenize(claims, stopwords=stopwords, stemmer=None, return_ids=False, show_progress=False)
    known = [[stem for stem in stemmer.stemWords(claim) if stem in bm25.vocab_dict] for claim in words]
    return (bm25.get_scores(stems) if stems else np.zeros(meta["abstracts"], np.float32) for stems in known)

def search_dense(folder, meta, claims, args):
    """Cosines (claims, abstracts): exact inner products of unit vectors, a block of rows at a time."""
    encoder = load_encoder(folder, meta, args)
    queries = encoder.encode_query(claims, batch_size=32, normalize_embeddings=True)
    vectors = np.load(folder / "embeddings.npy", mmap_mode="r")
    scores = np.empty((len(claims), len(vectors)), np.float32)
    for start in range(0, len(vectors), BLOCK):
        scores[:, start : start + BLOCK] = queries @ vectors[start : start + BLOCK].astype(np.float32).T
    return scores

def search_splade(folder, meta, claims, args):
    """Inner products (abstracts,) claim by claim, summed over the postings of the claim's own terms."""
    encoder = load_encoder(folder, meta, args)
    queries = encoder.encode_query(claims, batch_size=32, convert_to_sparse_tensor=False).float().cpu().numpy()
    data, indices, indptr = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("data", "indices", "indptr"))

    def score(query):
        scores = np.zeros(meta["abstracts"], np.float32)
        for term in np.flatnonzero(query):
            postings = slice(indptr[term], indptr[term + 1])
            scores[indices[postings]] += query[term] * data[postings]
        return scores

    return map(score, queries)

def load_encoder(folder, meta, args):
    """The model that made the index at folder; another one would put claims into another space."""
    model = model_folder(getattr(args, f"{meta['kind']}_model") or meta["model"])
    if fingerprints(model)[model.as_posix()] != meta["model_sha256"]:
        fail(folder / "meta.json", f"this index was not made with {model} as it is now; build it again with 01_index.py")
    device = None if args.device == "auto" else args.device
    with ticking(f"loading {model}"):
        from sentence_transformers import SentenceTransformer, SparseEncoder
        from sentence_transformers.base.modules import Transformer
        from sentence_transformers.sparse_encoder.modules import SpladePooling

        if meta["kind"] == "dense":
            return SentenceTransformer(str(model), device=device)
        if (model / "modules.json").is_file():
            return SparseEncoder(str(model), device=device)
        masked = Transformer(str(model), transformer_task="fill-mask")  # as in 01_index.py
        return SparseEncoder(modules=[masked, SpladePooling("max", activation_function="relu")], device=device)

SEARCHERS = {"bm25": search_bm25, "dense": search_dense, "splade": search_splade}
POSITIVE = ("bm25", "splade")  # a score of 0 means that claim and abstract share no term: no candidate

# ----------------------------------------------------------- Runs
def run_table(rankings):
    """{claim_id: [(abstract_id, score)]}, best first, as a run."""
    import pandas as pd

    rows = [(claim, name, rank, score) for claim, ranking in rankings.items()
            for rank, (name, score) in enumerate(ranking, 1)]
    return pd.DataFrame(rows, columns=["claim_id", "abstract_id", "rank", "score"])

def write_run(rankings, path, args, inputs, **facts):
    """Write one run and say how many claims it has nothing for."""
    run = run_table(rankings)
    empty = sum(not ranking for ranking in rankings.values())
    with written(path, args, inputs, rows=len(run), claims_without_rows=empty, **facts) as temporary:
        run.to_csv(temporary, sep="\t", index=False, float_format="%.9g", lineterminator="\n")
    print(f"{path}: {len(run)} rows, {len(rankings)} claims, {empty} of them without any")

def open_index(folder, corpus):
    """meta.json of an index, which must have been built from the corpus at hand (where there is one)."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        fail(folder, "no such index; build it with 01_index.py, or leave it out of --retrievers")
    if Path(corpus).exists() and fingerprints(corpus)[Path(corpus).as_posix()] != meta["corpus"]:
        fail(folder / "meta.json", f"this index was built from another corpus than {corpus}; run 01_index.py again")
    return meta

def retrieve(args):
    """One run per retriever, then their fusion."""
    if args.top_k < 1:
        fail("--top-k", "must be at least 1")
    folders = {kind: Path(args.index) / kind for kind in args.retrievers}
    metas = {kind: open_index(folder, args.corpus) for kind, folder in folders.items()}
    inputs = fingerprints(args.claims, *folders.values())
    claims = read_table(args.claims, ["claim_id", "claim"])
    names = [*args.retrievers, "hybrid"] if len(args.retrievers) > 1 else args.retrievers
    paths = {name: Path(args.out) / f"{name}.tsv" for name in names}
    if up_to_date(paths.values(), args, inputs):
        return {"made": []}
    if not len(claims):
        fail(args.claims, "it holds no claim; give one a line")
    from tqdm.auto import tqdm

    runs, ids = {}, []
    for kind, folder in folders.items():
        ids = json.loads((folder / "abstract_ids.json").read_text(encoding="utf-8"))
        runs[kind] = {}
        found = SEARCHERS[kind](folder, metas[kind], list(claims["claim"]), args)
        for claim, scores in zip(claims["claim_id"], tqdm(found, desc=kind, total=len(claims), unit=" claims")):
            rows = [row for row in top_k(scores, args.top_k) if scores[row] > 0 or kind not in POSITIVE]
            runs[kind][claim] = [(ids[row], float(scores[row])) for row in rows]
        write_run(runs[kind], paths[kind], args, inputs, seed=args.seed)
    if "hybrid" in paths:
        order = {name: place for place, name in enumerate(ids)}
        rankings = {claim: [[name for name, _ in run[claim]] for run in runs.values()] for claim in claims["claim_id"]}
        fused = {claim: rrf(lists, order, args.rrf_k)[: args.top_k] for claim, lists in rankings.items()}
        write_run(fused, paths["hybrid"], args, inputs, seed=args.seed)
    return {"made": [str(path) for path in paths.values()], "claims": len(claims)}

def fuse(args):
    """Reciprocal rank fusion of run files, whoever made them."""
    inputs = fingerprints(*args.runs, *([args.corpus] if args.corpus else []))
    if up_to_date([args.out], args, inputs):
        return {"made": []}
    known = {"abstract_id": read_corpus(args.corpus)} if args.corpus else {}
    runs = [read_table(path, ["claim_id", "abstract_id", "rank", "score"], **known) for path in args.runs]
    names = known.get("abstract_id") or [name for run in runs for name in run["abstract_id"]]
    order = {name: place for place, name in enumerate(dict.fromkeys(names))}
    rankings = {}
    for run in runs:
        for claim, rows in run.groupby("claim_id", sort=False):
            rankings.setdefault(claim, []).append(list(rows["abstract_id"]))
    fused = {claim: rrf(lists, order, args.rrf_k)[: args.top_k] for claim, lists in rankings.items()}
    write_run(fused, args.out, args, inputs)
    return {"made": [args.out], "claims": len(fused)}

# ----------------------------------------------------------- Main
def retrieve_flags(add):
    add("--claims", "--in", default="{data}/claims.{split}.tsv", help="the claims")
    add("--index", default="{work}/index", help="folder of the indexes")
    add("--corpus", default="{data}/corpus.jsonl", help="where it is at hand, the indexes are checked to be built from it")
    add("--out", default="{work}/{split}", help="folder that gets one run a retriever, and hybrid.tsv")
    add("--retrievers", nargs="+", choices=SEARCHERS, default=list(SEARCHERS), help="which to ask")
    add("--top-k", type=int, default=100, help="abstracts kept a claim")
    add("--rrf-k", type=int, default=RRF_K, help="the k of reciprocal rank fusion")
    add("--dense-model", help="where the model of the dense index lies now, if it was moved")
    add("--splade-model", help="the same for the SPLADE index")

def fuse_flags(add):
    add("runs", nargs="+", help="two or more run files, TSV or TREC")
    add("--out", default="{work}/{split}/fused.tsv", help="the fused run")
    add("--corpus", default="", help="breaks ties by its order; without it, by the order of the runs given")
    add("--top-k", type=int, default=100, help="abstracts kept a claim")
    add("--rrf-k", type=int, default=RRF_K, help="the k of reciprocal rank fusion")

def main():
    run_job(__doc__, {"retrieve": (retrieve, retrieve_flags), "fuse": (fuse, fuse_flags)})

if __name__ == "__main__":
    main()
