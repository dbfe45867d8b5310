# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "PyStemmer==3.1.0", "accelerate==1.15.0", "bm25s==0.3.16", "datasets==5.2.0",
#     "numpy==2.4.6", "pandas==3.1.1", "sentence-transformers==6.2.0", "torch==2.13.0",
#     "tqdm==4.70.1", "transformers==5.23.0",
# ]
# ///
"""
Index the abstracts (BM25, dense, SPLADE), find their neighbours, fine-tune the dense encoder.

Reads   data/NAME/corpus.jsonl
        train: claims.SPLIT.tsv, and examples.jsonl of 02_retrieve.py mine --shape tuples
Writes  work/NAME/index/bm25/    postings by term, in the format of bm25s
        work/NAME/index/dense/   embeddings.npy: abstracts x dimensions, float16, unit length
        work/NAME/index/splade/  data.npy, indices.npy, indptr.npy: CSC, abstracts x vocabulary
        work/NAME/index/graph/   neighbours.npy, similarities.npy: abstracts x k, nearest first
        In each: abstract_ids.json (row to id), meta.json (settings, checksums)
        work/NAME/models/encoder/
        OUT.parts/ holds finished shards and checkpoints; an interrupted run resumes from them.
Prints  one line of JSON, last on stdout

Examples
    python 01_index.py
    python 01_index.py --indexes bm25 --analyser nltk --k1 1.2 --b 0.75
    python 01_index.py --indexes dense --dense-model BAAI/bge-m3 --device cuda:0 cuda:1
    python 01_index.py graph --neighbours 10
    python 01_index.py train --loss triplet
"""
import argparse
import atexit
import contextlib
import csv
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import time
import zlib
from array import array
from pathlib import Path

import numpy as np

METHODS = ("lucene", "robertson", "atire", "bm25l", "bm25+")  # as bm25s names them
LANGUAGES = (  # with a Snowball stemmer and stopwords in bm25s
    "danish", "dutch", "english", "french", "german", "italian", "norwegian", "portuguese",
    "russian", "spanish", "swedish", "turkish")
ANALYSERS = {  # arguments of bm25s.tokenize: lower, token_pattern, stopwords, stemmer
    "default": (True, r"(?u)\b\w\w+\b", "english", "english"),  # Lucene's 33 stopwords
    "plain": (False, r"\S+", None, None),  # no normalisation: AIRwaves 2025
    "nltk": (True, r"[^\W_]+", "english_plus", None),  # NLTK's 179 stopwords: Ant Bridge 2025
}
FLAGS = {  # that decide what an index holds
    "bm25": ["analyser", "language", "bm25_method", "k1", "b"],
    "dense": ["dense_model", "pooling", "query_prompt", "document_prompt", "max_length", "dtype"],
    "splade": ["splade_model", "activation", "top_terms", "max_length", "dtype"],
}
SHARD = 4096   # abstracts
BATCH = {"dense": 32, "splade": 8}  # SPLADE: the logits of 8 x 512 tokens take 0.5 GB
OVERLAP = 50   # tokens that neighbouring windows share: AIRwaves 2025, section 3
ROWS = 64      # rows of the similarity matrix at a time: 0.6 GB at 394,269 abstracts
TRAINING = {   # epochs, learning rate, batch size, batches a step
    "triplet": (3, 5e-5, 32, 2),      # Kiepura & Lam 2025, section 4.1
    "mnrl": (2, 7e-6, 64, 1),         # AIRwaves 2025, section 3
    "cached-mnrl": (2, 7e-6, 64, 1),
}
WARMUP = 0.1   # share of the steps, in both
NDCG = "eval_dev_cosine_ndcg@10"

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

# ---------------------------------------------------------------- Texts, shards, folders
def text_of(record, fields, separator=" "):
    """Join the non-empty fields of an abstract; items of a list join by commas."""
    texts = []
    for value in map(record.get, fields):
        value = ", ".join(map(str, value)) if isinstance(value, list) else value
        texts.append("" if value is None else str(value).strip())
    return separator.join(filter(None, texts))

def read_texts(args):
    """Return {abstract_id: text} in corpus order."""
    fields, corpus = re.split(r"\s*,\s*", args.fields.strip()), read_corpus(args.corpus)
    texts = {name: text_of(record, fields, args.separator) for name, record in corpus.items()}
    if not any(texts.values()):
        fail(args.corpus, f"no record has text in {args.fields}; check --fields")
    return texts

def check_numbers(args, **least):
    """Refuse flags below their least value or not finite."""
    for name, bound in least.items():
        if not bound <= getattr(args, name) < np.inf:
            fail(f"--{name.replace('_', '-')}", f"not a number from {bound} on")

def parts_of(args, inputs):
    """Return the folder of unfinished work, emptied if it belongs to another task."""
    folder, task = Path(f"{args.out}.parts"), json.dumps(task_of(args, inputs))
    mark = folder / "task.json"
    if args.force or not mark.is_file() or mark.read_text(encoding="utf-8") != task:
        remove(folder)
        folder.mkdir(parents=True)
        mark.write_text(task, encoding="utf-8")
    return folder

def shards(args, inputs, count, make):
    """Yield make(rows, update) = {name: array} for each shard (rows: a slice) of count rows.

    A shard is a file, written before the next one begins; a restart reads finished shards.
    """
    from tqdm.auto import tqdm
    folder = parts_of(args, inputs)
    with tqdm(total=count, desc=Path(args.out).name, unit=" abstracts") as bar:
        for start in range(0, count, SHARD):
            path, rows = folder / f"{start}.npz", slice(start, min(start + SHARD, count))
            if not path.exists():
                try:
                    arrays = make(rows, bar.update)
                except (RuntimeError, MemoryError) as error:
                    if "memory" not in repr(error).lower():
                        raise
                    fail(args.out, "out of memory; lower --batch-size (shards are kept)")
                with written(path, args, inputs) as new, open(new, "wb") as file:
                    np.savez(file, **arrays)
            with np.load(path) as file:
                yield dict(file)
            bar.update(rows.stop - bar.n)

def files_of(folder):
    """Return {name: [size, crc32]} of the files of an index, without meta.json."""
    found = {}
    for path in sorted(set(folder.iterdir()) - {folder / "meta.json"}):
        crc = 0
        with open(path, "rb") as file:
            while block := file.read(2**24):
                crc = zlib.crc32(block, crc)
        found[path.name] = [path.stat().st_size, crc]
    return found

def complete(folder, names, facts):
    """Add abstract_ids.json and meta.json to the files of an index."""
    ids, meta = folder / "abstract_ids.json", folder / "meta.json"
    ids.write_text(json.dumps(names, ensure_ascii=False), encoding="utf-8")
    meta.write_text(json.dumps(facts | {"files": files_of(folder)}, indent=1), encoding="utf-8")

# ---------------------------------------------------------------- BM25
def analyser_of(name, language):
    """Return the arguments of bm25s.tokenize, with the stemmer by name."""
    lower, pattern, *words = ANALYSERS[name]
    if language != "english":
        words = [word and language for word in words]
    return {"name": name, "lower": lower, "token_pattern": pattern,
            "stopwords": words[0], "stemmer": words[1]}

def tokenise(analyser, texts):
    """Return (terms, ids, lengths): sorted terms, ids of all tokens, tokens of each text."""
    import bm25s
    import Stemmer
    _, *how, stemmer = analyser.values()
    found = bm25s.tokenize(texts, *how, show_progress=False)
    stems = words = list(found.vocab)
    if stemmer:  # each word once: bm25s does it for each token
        stems = Stemmer.Stemmer(stemmer).stemWords(words)
    terms = sorted(set(stems))
    places = {term: place for place, term in enumerate(terms)}
    numbers = np.array([places[stem] for stem in stems], np.int32)
    ids = np.fromiter(itertools.chain.from_iterable(found.ids), np.int32)
    return terms, numbers[ids], [len(row) for row in found.ids]

def tokenise_all(texts, analyser):
    """Return ([ids of each text], {term: id}), by all cores."""
    from tqdm.auto import tqdm
    chunks = [texts[start : start + SHARD] for start in range(0, len(texts), SHARD)]
    documents, vocabulary, cores = [], {}, min(os.cpu_count(), len(chunks))
    with multiprocessing.Pool(cores, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        parts = pool.imap(functools.partial(tokenise, analyser), chunks)
        for terms, ids, lengths in tqdm(parts, "tokenise", len(chunks), unit=" shards"):
            numbers = [vocabulary.setdefault(term, len(vocabulary)) for term in terms]
            tokens = array("i", np.array(numbers, np.int32)[ids].tobytes())
            for end, length in zip(np.cumsum(lengths).tolist(), lengths):
                documents.append(tokens[end - length : end])
    return documents, vocabulary

def index_bm25(texts, folder, args, inputs):
    """Build BM25 postings (Robertson & Zaragoza 2009; variants: Kamphuis et al. 2020)."""
    import bm25s
    analyser = analyser_of(args.analyser, args.language)
    documents, vocabulary = tokenise_all(list(texts.values()), analyser)
    if not vocabulary:
        fail(args.corpus, "there are only stopwords; leave bm25 out of --indexes")
    bm25 = bm25s.BM25(args.k1, args.b, method=args.bm25_method, csc_backend="scipy")
    bm25.index((documents, vocabulary), create_empty_token=False)
    bm25.save(folder, show_progress=False)
    return {"analyser": analyser, "terms": len(vocabulary),
            "empty": sum(not document for document in documents)}

# ---------------------------------------------------------------- Dense and SPLADE
def prompt_of(encoder, given, *names):
    """Return the prompt that is given, else the model's own by the first of names, else ""."""
    own = [encoder.prompts[name] for name in names if encoder.prompts.get(name)]
    return given if given is not None else (own + [""])[0]

def limit_length(encoder, max_length, pooling="truncate"):
    """Let an encoder truncate texts, or read them in overlapping windows (chunks)."""
    encoder.max_seq_length = limit = min(max_length, encoder.max_seq_length or max_length)
    if pooling == "chunks":
        if limit <= OVERLAP + 2:
            fail("--max-length", f"windows of {limit} tokens cannot overlap by {OVERLAP}")
        encoder.preprocess = functools.partial(windows_of, encoder.tokenizer, limit)
        encoder.register_forward_hook(pool_windows)

def windows_of(tokenizer, limit, texts, prompt="", **_):
    """Return the tokens of all windows of texts; the mapping is 1 where a text begins, else 0."""
    coded = tokenizer(
        [(prompt or "") + text for text in texts], truncation=True, max_length=limit,
        stride=OVERLAP, return_overflowing_tokens=True, padding=True, return_tensors="pt")
    rows = coded["overflow_to_sample_mapping"]
    return {**coded, "overflow_to_sample_mapping": rows.diff(prepend=rows[:1] - 1)}

def pool_windows(encoder, _, features):
    """Pool the windows of a text to one vector: (mean + max) / 2 (AIRwaves 2025, eq. 3)."""
    import torch
    starts = features["overflow_to_sample_mapping"].nonzero()[1:, 0].tolist()
    texts = features["sentence_embedding"].tensor_split(starts)
    pooled = [(windows.mean(0) + windows.amax(0)) / 2 for windows in texts]
    return features | {"sentence_embedding": torch.stack(pooled)}

def encode_shard(encoder, texts, args, how, rows, update):
    """Encode a shard (rows) of texts. Return vectors, or as a CSR matrix the weights of terms.

    how: arguments of encode_document. Texts of about the same length are encoded together.
    """
    from scipy import sparse
    names, texts = list(texts)[rows], list(texts.values())[rows]
    prompted = [how["prompt"] + text for text in texts]
    tokens = encoder.tokenizer(prompted, truncation=False, verbose=False)["input_ids"]
    lengths, found = np.array([len(row) for row in tokens]), []
    order, step = np.argsort(-lengths, kind="stable"), 8 * how["batch_size"] * len(args.device)
    for part in np.split(order, range(step, len(order), step)):
        vectors = encoder.encode_document([texts[row] for row in part], **how)
        if args.kind == "splade":
            vectors = vectors.float().numpy()
            if args.activation == "relu":
                vectors = np.expm1(vectors)  # undoes the logarithm of log(1 + ReLU(logit))
        finite = np.isfinite(vectors).all(axis=1)
        if not finite.all():
            name = names[part[finite.argmin()]]
            fail(f"abstract {name}", "its vector is not finite; use --dtype fp32")
        found.append(sparse.csr_matrix(vectors) if args.kind == "splade" else vectors)
        update(len(part))
    made = {"truncated": (lengths > encoder.max_seq_length).sum()}
    if args.kind == "dense":
        return made | {"vectors": np.concatenate(found)[np.argsort(order)].astype(np.float16)}
    matrix = sparse.vstack(found, "csr")[np.argsort(order)]
    return made | {name: getattr(matrix, name) for name in ("data", "indices", "indptr", "shape")}

def save_dense(folder, made, shape):
    """Write embeddings.npy shard by shard. Return facts for meta.json."""
    truncated = 0
    with open(folder / "embeddings.npy", "wb") as file:
        header = {"descr": "<f2", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for shard in made:
            file.write(shard["vectors"].tobytes())
            truncated += int(shard["truncated"])
    return {"shape": shape, "truncated": truncated}

def save_splade(folder, made, shape):
    """Write the weights by term (CSC). Return facts for meta.json."""
    from scipy import sparse
    truncated, rows = 0, []
    for shard in made:
        arrays = shard["data"], shard["indices"], shard["indptr"]
        rows.append(sparse.csr_matrix(arrays, tuple(shard["shape"])))
        truncated += int(shard["truncated"])
    matrix = sparse.vstack(rows).tocsc()
    for name in ("data", "indices", "indptr"):
        np.save(folder / f"{name}.npy", getattr(matrix, name))
    return {"shape": matrix.shape, "truncated": truncated}

def index_vectors(texts, folder, args, inputs):
    """Encode every text as a dense vector or as weights of terms (SPLADE, Formal et al. 2021)."""
    from sentence_transformers import SentenceTransformer, SparseEncoder
    if args.kind == "dense":
        load, name, save, how = SentenceTransformer, args.dense_model, save_dense, {}
        how["normalize_embeddings"] = True
    else:
        load, name, save = SparseEncoder, args.splade_model, save_splade
        how = {"max_active_dims": args.top_terms or None, "save_to_cpu": True,
               "convert_to_sparse_tensor": False}
    encoder = open_model(load, name, args, args.dtype)
    limit_length(encoder, args.max_length, getattr(args, "pooling", ""))
    given = getattr(args, "document_prompt", None)
    how |= {"prompt": prompt_of(encoder, given, "document", "passage", "corpus"),
            "batch_size": args.batch_size or BATCH[args.kind]}
    if len(args.device) > 1:
        how["pool"] = encoder.start_multi_process_pool(args.device)
        how["chunk_size"] = how["batch_size"]
    make = functools.partial(encode_shard, encoder, texts, args, how)
    shape = len(texts), encoder.get_embedding_dimension()
    facts = save(folder, shards(args, inputs, len(texts), make), shape)
    if "pool" in how:
        encoder.stop_multi_process_pool(how["pool"])
    return facts | {"model": name, "model_sha256": inputs[str(Path(name))],
                    "max_length": encoder.max_seq_length, "computed_in": str(encoder.dtype)}

# ---------------------------------------------------------------- Jobs: index, graph
def arguments_of(kind, args):
    """Return the arguments of one index: another --k1 must not discard a dense index."""
    others = {"indexes", "split"}.union(*FLAGS.values()) - set(FLAGS[kind])
    kept = {name: value for name, value in vars(args).items() if name not in others}
    return argparse.Namespace(**kept | {"kind": kind, "out": f"{args.out}/{kind}"})

def index(args):
    """Build the indexes that are asked for and not up to date."""
    check_numbers(args, k1=0, b=0, top_terms=0, batch_size=0, max_length=1)
    if args.b > 1:
        fail("--b", "not a number from 0 to 1")
    corpus, todo = sha256_of(args.corpus), []
    for kind in args.indexes:
        own = arguments_of(kind, args)
        models = [] if kind == "bm25" else [vars(own)[f"{kind}_model"]]
        inputs = corpus | sha256_of(models=models)
        if not up_to_date([own.out], own, inputs):
            todo.append((own, inputs))
    texts = read_texts(args) if todo else {}
    for own, inputs in todo:
        facts = {"corpus": corpus[str(Path(args.corpus))], "abstracts": len(texts),
                 "query_prompt": None}
        for name in ("kind", "fields", "separator", *FLAGS[own.kind]):
            facts[name] = vars(own)[name]
        with written(own.out, own, inputs, device=args.device) as folder:
            folder.mkdir()
            build = index_bm25 if own.kind == "bm25" else index_vectors
            facts |= build(texts, folder, own, inputs)
            complete(folder, list(texts), facts)
        remove(f"{own.out}.parts")
        print(f"{own.out}: {len(texts)} abstracts, {facts.get('truncated', 0)} of them truncated")
    return {"made": [own.out for own, _ in todo], "abstracts": len(texts)}

def cosines(queries, corpus):
    """Return cosines in millionths as integers; of equal ones, the earlier row is larger."""
    import torch
    rounded = (queries @ corpus.T).mul(1e6).round().long()
    return rounded * len(corpus) - torch.arange(len(corpus), device=corpus.device)

def graph_shard(corpus, k, rows, update):
    """Return the k nearest neighbours of a shard (rows) of corpus, unit vectors."""
    from sentence_transformers.util import semantic_search
    hits, found = semantic_search(corpus[rows], corpus, ROWS, len(corpus), k + 1, cosines), []
    for row, nearest in enumerate(hits, rows.start):
        nearest = [(hit["corpus_id"], hit["score"]) for hit in nearest if hit["corpus_id"] != row]
        found.append(nearest[:k])
    ids, scores = np.moveaxis(np.array(found), 2, 0)
    similarities = (scores + ids) // len(corpus) / 1e6
    return {"neighbours": ids.astype(np.int32), "similarities": similarities.astype(np.float32)}

def graph(args):
    """Find the k nearest neighbours of every abstract by cosine: exact, all against all."""
    check_numbers(args, neighbours=1)
    source, inputs = Path(args.index), sha256_of(args.index)
    if up_to_date([args.out], args, inputs):
        return {"made": []}
    try:
        meta = json.loads((source / "meta.json").read_text(encoding="utf-8"))
        names = json.loads((source / "abstract_ids.json").read_text(encoding="utf-8"))
        vectors = np.load(source / "embeddings.npy")
        if meta["files"] != files_of(source):
            raise ValueError
    except (OSError, ValueError, KeyError):
        fail(source, "damaged, or not a dense index; run 01_index.py --indexes dense --force")
    count, k = len(vectors), min(args.neighbours, len(vectors) - 1)
    if k < 1:
        fail(source, "a single abstract has no neighbours; index two or more")
    import torch
    from sentence_transformers.util import get_device_name
    device = get_device_name() if args.device == ["auto"] else args.device[0]
    try:
        corpus = torch.from_numpy(vectors).to(device).float()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        fail(f"--device {device}", f"cannot hold the vectors: {error}")
    with written(args.out, args, inputs, device=device) as folder:
        folder.mkdir()
        found = list(shards(args, inputs, count, functools.partial(graph_shard, corpus, k)))
        for name in ("neighbours", "similarities"):
            np.save(folder / f"{name}.npy", np.concatenate([shard[name] for shard in found]))
        facts = {name: meta[name] for name in ("corpus", "abstracts", "model", "model_sha256")}
        complete(folder, names, facts | {"kind": "graph", "dense": inputs[str(source)]})
    remove(f"{args.out}.parts")
    print(f"{args.out}: {k} neighbours of {count} abstracts")
    return {"made": [args.out], "abstracts": count, "neighbours": k}

# ---------------------------------------------------------------- Job: train
def read_examples(path, claims, texts):
    """Return [claim, positive, negative, ...], all texts, of each tuple of 02_retrieve.py mine."""
    rows = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                example = json.loads(line)
                names = [example["positive"], *example["negatives"]]
                rows.append([claims[example["claim_id"]], *(texts[name] for name in names)])
            except (ValueError, KeyError, TypeError) as error:
                fail(f"{path}:{number}", f"{error!r} in a tuple; use 02_retrieve.py mine --shape "
                     "tuples, with the claims and corpus that it read")
    return rows

def columns_of(rows, loss):
    """Return ({column: texts}, number of rows left out for having fewer negatives than others).

    The triplet loss takes one negative: a row with several becomes several rows.
    """
    width = 3 if loss == "triplet" else max(map(len, rows), default=2)
    kept = [row for row in rows if len(row) >= width]
    left_out = len(rows) - len(kept)
    if loss == "triplet":
        kept = [[*row[:2], negative] for row in kept for negative in row[2:]]
    names = ["claim", "positive", *(f"negative_{place}" for place in range(1, width - 1))]
    return dict(zip(names, map(list, zip(*kept)))), left_out

def dev_evaluator(paths, prompts, texts, args):
    """Return an evaluator: nDCG@10 of dev claims over judged abstracts and --dev-pool others."""
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
    claims = read_table(paths[0], ["claim_id", "claim"]).set_index("claim_id")["claim"]
    qrels = read_table(paths[1], ["claim_id", "abstract_id", "label"],
                       claim_id=claims.index, abstract_id=texts, label=LABELS)
    evidence = qrels[qrels["label"] != "NEI"].groupby("claim_id")["abstract_id"].agg(set)
    rng, names = np.random.default_rng(args.seed), list(texts)
    pool = {names[row] for row in rng.permutation(len(names))[: args.dev_pool]}
    pool |= set(qrels["abstract_id"])
    return InformationRetrievalEvaluator(
        claims.to_dict(), {name: texts[name] for name in names if name in pool},
        evidence.to_dict(), name="dev", write_csv=False,
        query_prompt=prompts[0], corpus_prompt=prompts[1])

def last_checkpoint(folder):
    """Return (path, state) of the newest checkpoint; one without readable state is torn."""
    for path in sorted(folder.glob("checkpoint-*"), key=lambda path: -int(path.name[11:])):
        with contextlib.suppress(OSError, ValueError):
            return str(path), json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
    return None, None

def loss_of(encoder, args):
    """Return the loss that --loss names."""
    from sentence_transformers.sentence_transformer import losses
    if args.loss == "triplet":  # max(0, cos(q, d-) - cos(q, d+) + margin)
        return losses.TripletLoss(encoder, losses.TripletDistanceMetric.COSINE, args.margin)
    if args.loss == "mnrl":
        return losses.MultipleNegativesRankingLoss(encoder, args.scale)
    return losses.CachedMultipleNegativesRankingLoss(encoder, args.scale, mini_batch_size=16)

def fit(encoder, columns, prompts, evaluator, folder, args):
    """Train on {column: texts} and keep the best epoch on dev. Return dev's nDCG@10 by epoch."""
    import torch
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer as Trainer
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
    from transformers import EarlyStoppingCallback, PrinterCallback, ProgressCallback
    from transformers.utils import logging

    class Epochs(ProgressCallback):
        """One bar, and one line an epoch."""
        def on_log(self, *_, **__):
            pass

        def on_save(self, how, state, control, **_):
            last = {name: value for line in state.log_history for name, value in line.items()}
            dev = f", nDCG@10 on dev {last[NDCG]:.4f}" if NDCG in last else ""
            line = f"epoch {state.epoch:g}: loss {last['loss']:.4f}{dev}"
            self.training_bar.write(line, file=sys.stderr)

    logging.disable_progress_bar()  # one for every file that is saved
    checkpoint, state = last_checkpoint(folder)
    gpu = encoder.device.type == "cuda"
    bf16 = gpu and torch.cuda.is_bf16_supported(False)
    how, callbacks = {}, [Epochs()]
    if evaluator:
        how = {"eval_strategy": "epoch", "eval_on_start": not checkpoint, "greater_is_better": True,
               "load_best_model_at_end": True, "metric_for_best_model": NDCG}
        callbacks.append(EarlyStoppingCallback(args.patience))
    if state and state["stateful_callbacks"]["TrainerControl"]["args"]["should_training_stop"]:
        how["max_steps"] = state["global_step"]  # killed after it had stopped early
    how = Arguments(
        str(folder), num_train_epochs=args.epochs, learning_rate=args.lr, warmup_steps=WARMUP,
        per_device_train_batch_size=args.batch, gradient_accumulation_steps=args.accumulate,
        bf16=bf16, fp16=gpu and not bf16, use_cpu=encoder.device.type == "cpu",
        activation_checkpointing=args.gradient_checkpointing, dataloader_pin_memory=False,
        batch_sampler="batch_sampler" if args.loss == "triplet" else "no_duplicates",
        prompts={name: prompts[name != "claim"] for name in columns}, seed=args.seed,
        data_seed=args.seed, logging_strategy="epoch", save_strategy="epoch", save_total_limit=2,
        restore_callback_states_from_checkpoint=True, report_to="none", disable_tqdm=True, **how)
    trainer = Trainer(encoder, how, Dataset.from_dict(columns), loss=loss_of(encoder, args),
                      evaluator=evaluator, callbacks=callbacks)
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=checkpoint)
    curve = {line["step"]: line[NDCG] for line in trainer.state.log_history if NDCG in line}
    return [round(curve[step], 4) for step in sorted(curve)]

def train(args):
    """Fine-tune the dense encoder on mined examples."""
    for name, value in zip(("epochs", "lr", "batch", "accumulate"), TRAINING[args.loss]):
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    check_numbers(args, margin=0, scale=0, epochs=0, lr=0, batch=1, accumulate=1, dev_pool=0,
                  patience=1, max_length=1)
    if args.pooling == "chunks" and args.loss == "cached-mnrl":
        fail("--loss cached-mnrl", "cannot pool chunks; use mnrl")
    kind, _, number = args.device[0].partition(":")
    if kind in ("auto", "cuda"):  # the trainer would multiply batches by the GPUs that it sees
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")
        shown = dict(zip(map(str, range(len(seen))), seen)).get(number or "0", "")
        os.environ["CUDA_VISIBLE_DEVICES"], args.device = shown, [kind]
    paths = [f"{args.data}/{name}.{args.dev_split}.tsv" for name in ("claims", "qrels")]
    paths = paths if all(map(os.path.exists, paths)) else []
    inputs = sha256_of(args.examples, args.corpus, args.claims, *paths, models=[args.model])
    if up_to_date([args.out], args, inputs):
        return {"made": []}
    texts, claims = read_texts(args), read_table(args.claims, ["claim_id", "claim"])
    rows = read_examples(args.examples, dict(zip(claims["claim_id"], claims["claim"])), texts)
    columns, left_out = columns_of(rows, args.loss)
    if not columns:
        fail(args.examples, f"nothing for --loss {args.loss} to train on; mine other examples")
    print(f"{len(rows)} examples, {left_out} of them left out")
    from sentence_transformers import SentenceTransformer
    encoder = open_model(SentenceTransformer, args.model, args, "fp32")
    own_length = encoder.max_seq_length
    limit_length(encoder, args.max_length, args.pooling)
    prompts = [prompt_of(encoder, args.query_prompt, "query"),
               prompt_of(encoder, args.document_prompt, "document", "passage", "corpus")]
    evaluator = dev_evaluator(paths, prompts, texts, args) if paths else None
    curve = fit(encoder, columns, prompts, evaluator, parts_of(args, inputs), args)
    if curve and curve[0] > max(curve[1:]):
        print(f"warning: nDCG@10 on dev fell from {curve[0]} to {max(curve[1:])}", file=sys.stderr)
    encoder.max_seq_length = own_length
    encoder.prompts |= {"query": prompts[0], "document": prompts[1]}
    facts = {"examples": len(rows), "left_out": left_out, "dev_ndcg_at_10": curve}
    with written(args.out, args, inputs, device=str(encoder.device), **facts) as folder:
        encoder.save_pretrained(str(folder), create_model_card=False)
    remove(f"{args.out}.parts")
    return {"made": [args.out], **facts}

# ---------------------------------------------------------------- Main
def main():
    parser, shared, words = command_line("index", "graph", "train")
    add, data, work = parser.add_argument, shared.data, shared.work
    if shared.job == "graph":
        add("--index", default=f"{work}/index/dense", help="the dense index")
        add("--out", default=f"{work}/index/graph", help="folder of the graph")
        add("--neighbours", type=int, default=10, help="neighbours of an abstract")
    else:
        add("--corpus", default=f"{data}/corpus.jsonl", help="the abstracts")
        add("--fields", default="title,abstract", help="fields of a text, in order")
        add("--separator", default=" ", help="between two fields, as ' [SEP] '")
        add("--max-length", type=int, default=512, help="tokens, if the model reads as many")
        add("--pooling", choices=("truncate", "chunks"), default="truncate",
            help="of long texts; chunks: overlapping windows, mean and max averaged")
        add("--query-prompt", help="before a claim, as 'query: '; default: the model's own")
        add("--document-prompt", help="before an abstract; default: the model's own")
    if shared.job == "index":
        add("--out", default=f"{work}/index", help="folder of the indexes")
        add("--indexes", nargs="+", choices=FLAGS, default=list(FLAGS), help="which to build")
        add("--analyser", choices=ANALYSERS, default="default", help="tokenisation for BM25")
        add("--language", choices=LANGUAGES, default="english", help="of stopwords and stems")
        add("--bm25-method", choices=METHODS, default="lucene", help="variant of BM25")
        add("--k1", type=float, default=1.5, help="BM25: term-frequency saturation")
        add("--b", type=float, default=0.75, help="BM25: length normalisation")
        add("--dense-model", default="data/models/minilm", help="a SentenceTransformer")
        add("--splade-model", default="data/models/splade-tiny", help="a SparseEncoder")
        add("--activation", choices=("log1p_relu", "relu"), default="log1p_relu",
            help="SPLADE: from logits to weights")
        add("--top-terms", type=int, default=0, help="SPLADE: terms kept of a text; 0: all")
        add("--batch-size", type=int, default=0, help="texts at a time; 0: 32, SPLADE 8")
        add("--dtype", choices=("auto", "fp32", "bf16", "fp16"), default="auto",
            help="auto: half precision on a GPU")
    if shared.job == "train":
        add("examples", nargs="?", default=f"{work}/{shared.split}/examples.jsonl",
            help="tuples of 02_retrieve.py mine")
        add("--claims", default=f"{data}/claims.{shared.split}.tsv", help="the claims")
        add("--model", default="data/models/minilm", help="a SentenceTransformer to start from")
        add("--out", default=f"{work}/models/encoder", help="folder of the trained model")
        add("--loss", choices=TRAINING, default="mnrl", help="mnrl: in-batch negatives")
        add("--margin", type=float, default=0.3, help="triplet: margin of the cosines")
        add("--scale", type=float, default=20, help="mnrl: factor of the cosines")
        add("--epochs", type=float, help="default: triplet 3, mnrl 2")
        add("--lr", type=float, help="learning rate; default: triplet 5e-5, mnrl 7e-6")
        add("--batch-size", type=int, dest="batch", help="default: triplet 32, mnrl 64")
        add("--accumulate", type=int, help="batches a step; default: triplet 2, mnrl 1")
        add("--gradient-checkpointing", action="store_true", help="less memory, more time")
        add("--dev-split", default="dev", help="the best epoch on it is kept")
        add("--dev-pool", type=int, default=10_000, help="abstracts ranked beside judged ones")
        add("--patience", type=int, default=2, help="epochs without a gain before stopping")
    finish({"index": index, "graph": graph, "train": train}[shared.job], parser.parse_args(words))

if __name__ == "__main__":
    main()
