"""
Index the abstracts: BM25, dense embeddings and SPLADE, each alone or all three.

Reads   data/NAME/corpus.jsonl: abstract_id, abstract, optional title and other fields
Writes  work/NAME/index/bm25/    postings of bm25s
        work/NAME/index/dense/   embeddings.npy: abstracts x dimensions, float16, each of length 1
        work/NAME/index/splade/  data.npy, indices.npy, indptr.npy: weights by term (CSC, abstracts x vocabulary)
        In each: abstract_ids.json (row to id), meta.json (corpus fingerprint, analyser or model, shapes).
Prints  one line of JSON, last on stdout

Examples
    python 01_index.py
    python 01_index.py --indexes bm25 --k1 1.2 --b 0.75
    python 01_index.py --indexes dense --dense-model BAAI/bge-m3 --data data/climatecheck --work work/climatecheck
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

SPLADE_BATCH = 4  # texts at once on a CPU: logits are tokens x vocabulary, and small blocks of them stay in its cache
BM25_METHODS = ("lucene", "robertson", "atire", "bm25l", "bm25+")  # as bm25s names them

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

# ----------------------------------------------------------- Texts
def text_of(record, fields):
    """The text that stands for an abstract: its fields that are not empty, joined by a space."""
    return " ".join(str(record[field]).strip() for field in fields if record.get(field))

def batches_by_length(texts, size):
    """Row numbers, size at a time, longest texts first: neighbours in length share a batch and pad little."""
    order = sorted(range(len(texts)), key=lambda row: (-len(texts[row]), row))
    return [order[start : start + size] for start in range(0, len(order), size)]

# ----------------------------------------------------------- BM25
def analyse(texts):
    """Token ids by text, and the vocabulary {stem: id}: lower case, no English stopwords, Snowball stems.

    bm25s can stem by itself, but numbers its stems in the order of a Python set, which changes from
    run to run. Here a stem has the number of its first occurrence: equal input gives equal bytes.
    """
    import bm25s
    import Stemmer

    tokens = bm25s.tokenize(texts, stopwords="english", stemmer=None)
    stems = Stemmer.Stemmer("english").stemWords(list(tokens.vocab))
    vocabulary = {stem: number for number, stem in enumerate(dict.fromkeys(stems))}
    stem_ids = [vocabulary[stem] for stem in stems]
    return [[stem_ids[token] for token in ids] for ids in tokens.ids], vocabulary

def index_bm25(texts, folder, model, args):
    """BM25 postings (Robertson & Zaragoza 2009, in the variant --bm25-method), saved by bm25s itself."""
    import bm25s

    ids, vocabulary = analyse(texts)
    if not vocabulary:
        fail(args.corpus, "no abstract has a word that is no stopword; leave bm25 out of --indexes")
    bm25 = bm25s.BM25(method=args.bm25_method, k1=args.k1, b=args.b)
    bm25.index((ids, vocabulary))
    bm25.save(folder, show_progress=False)
    return {"analyser": {"stopwords": "english", "stemmer": "english"}, "method": args.bm25_method,
            "k1": args.k1, "b": args.b, "terms": len(vocabulary), "empty": sum(not row for row in ids)}

# ----------------------------------------------------------- Dense
def index_dense(texts, folder, model, args):
    """One unit vector a text, by any sentence-transformers model; float16 halves disk and memory at search."""
    from tqdm.auto import tqdm

    with ticking(f"loading {model}"):
        from sentence_transformers import SentenceTransformer

        encoder = SentenceTransformer(str(model), device=None if args.device == "auto" else args.device)
    encoder.max_seq_length = min(args.max_length, encoder.max_seq_length or args.max_length)
    shape = (len(texts), encoder.get_embedding_dimension())
    vectors = np.lib.format.open_memmap(folder / "embeddings.npy", mode="w+", dtype=np.float16, shape=shape)
    with tqdm(total=len(texts), desc="dense", unit=" abstracts") as bar:
        for rows in batches_by_length(texts, args.batch_size):
            batch = [texts[row] for row in rows]
            vectors[rows] = encoder.encode_document(batch, batch_size=len(batch), normalize_embeddings=True)
            bar.update(len(rows))
    vectors.flush()
    return {"shape": shape, "dtype": "float16", "max_length": encoder.max_seq_length, "device": str(encoder.device)}

# ----------------------------------------------------------- SPLADE
def load_splade(folder, device):
    """A SparseEncoder folder as it is; a bare masked language model gets the pooling of SPLADE on top.

    w_v = max over tokens of log(1 + ReLU(logit)) (Formal et al. 2021). sentence-transformers
    calls that activation "relu" and takes the logarithm itself; padding is masked out.
    """
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    if (folder / "modules.json").is_file():
        return SparseEncoder(str(folder), device=device)
    masked = Transformer(str(folder), transformer_task="fill-mask")
    return SparseEncoder(modules=[masked, SpladePooling("max", activation_function="relu")], device=device)

def index_splade(texts, folder, model, args):
    """One sparse vector a text over the model's vocabulary; kept on the CPU, batch by batch, then turned to CSC."""
    from scipy import sparse
    from tqdm.auto import tqdm

    with ticking(f"loading {model}"):
        encoder = load_splade(model, None if args.device == "auto" else args.device)
    encoder.max_seq_length = min(args.max_length, encoder.max_seq_length or args.max_length)
    parts, order = [], []
    size = SPLADE_BATCH if encoder.device.type == "cpu" else args.batch_size
    with tqdm(total=len(texts), desc="splade", unit=" abstracts") as bar:
        for rows in batches_by_length(texts, size):
            batch = [texts[row] for row in rows]
            weights = encoder.encode_document(batch, batch_size=len(batch), convert_to_sparse_tensor=False, save_to_cpu=True)
            parts.append(sparse.csr_matrix(weights.float().numpy()))
            order += rows
            bar.update(len(rows))
    matrix = sparse.vstack(parts)[np.argsort(order)].tocsc()
    for name in ("data", "indices", "indptr"):
        np.save(folder / f"{name}.npy", getattr(matrix, name))
    return {"shape": matrix.shape, "nonzero": int(matrix.nnz), "dtype": str(matrix.dtype), "activation": "log1p_relu",
            "max_length": encoder.max_seq_length, "device": str(encoder.device)}

INDEXERS = {"bm25": index_bm25, "dense": index_dense, "splade": index_splade}
FLAGS = {"bm25": {"bm25_method", "k1", "b"}, "dense": {"dense_model", "max_length", "batch_size"},
         "splade": {"splade_model", "max_length", "batch_size"}}  # those that change an index

# ----------------------------------------------------------- Main
def arguments_of(kind, args):
    """The arguments that decide what one index holds: another --k1 must not throw away hours of encoding."""
    others = {"indexes", "split"}.union(*FLAGS.values()) - FLAGS[kind]
    return argparse.Namespace(**{name: value for name, value in vars(args).items() if name not in others})

def index(args):
    """Build those of the indexes that are asked for and not up to date."""
    models = {"dense": args.dense_model, "splade": args.splade_model}
    models = {kind: model_folder(models[kind]) if kind in models else None for kind in args.indexes}
    inputs = {kind: fingerprints(args.corpus, *filter(None, [models[kind]])) for kind in args.indexes}
    folders = {kind: Path(args.out) / kind for kind in args.indexes}
    own = {kind: arguments_of(kind, args) for kind in args.indexes}
    todo = [kind for kind in args.indexes if not up_to_date([folders[kind]], own[kind], inputs[kind])]
    if not todo:
        return {"made": [], "abstracts": None}
    corpus = read_corpus(args.corpus)
    texts = [text_of(record, args.fields) for record in corpus.values()]
    if not any(texts):
        fail(args.corpus, f"no record has text in {', '.join(args.fields)}; check --fields and the file")
    for kind in todo:
        with written(folders[kind], own[kind], inputs[kind], seed=args.seed) as folder:
            folder.mkdir()
            facts = {"kind": kind, "corpus": inputs[kind][Path(args.corpus).as_posix()], "abstracts": len(texts),
                     "fields": args.fields}
            if models[kind]:
                facts |= {"model": models[kind].as_posix(), "model_sha256": inputs[kind][models[kind].as_posix()]}
            facts |= INDEXERS[kind](texts, folder, models[kind], args)
            (folder / "abstract_ids.json").write_text(json.dumps(list(corpus), ensure_ascii=False), encoding="utf-8")
            (folder / "meta.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        print(f"{folders[kind]}: {len(texts)} abstracts")
    return {"made": [str(folders[kind]) for kind in todo], "abstracts": len(texts)}

def index_flags(add):
    add("--corpus", "--in", default="{data}/corpus.jsonl", help="the abstracts, one JSON object a line")
    add("--out", default="{work}/index", help="folder that gets one folder an index")
    add("--indexes", nargs="+", choices=INDEXERS, default=list(INDEXERS), help="which to build")
    add("--fields", nargs="+", default=["title", "abstract"], help="fields of a record that are indexed, in order")
    add("--bm25-method", choices=BM25_METHODS, default="lucene", help="variant of the formula")
    add("--k1", type=float, default=1.5, help="BM25: how soon more occurrences of a term stop to count")
    add("--b", type=float, default=0.75, help="BM25: how much long abstracts are held back")
    add("--dense-model", default="data/models/minilm", help="sentence-transformers folder or hub id")
    add("--splade-model", default="data/models/splade-tiny", help="SparseEncoder or masked language model, folder or hub id")
    add("--max-length", type=int, default=512, help="tokens kept of a text; the model's own limit holds if it is lower")
    add("--batch-size", type=int, default=32, help="texts encoded at once")

def main():
    run_job(__doc__, {"index": (index, index_flags)})

if __name__ == "__main__":
    main()
