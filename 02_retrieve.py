"""
Retrieve abstracts for each claim with every index, and fuse runs, ours or others'.

Reads   data/NAME/claims.SPLIT.tsv: claim_id, claim
        work/NAME/index/{bm25,dense,splade}/ (01_index.py)
        with --restrict an earlier run: only its candidates are scored
Writes  work/NAME/SPLIT/{bm25,dense,splade}.tsv and, from two retrievers on, hybrid.tsv, their reciprocal rank fusion:
        claim_id, abstract_id, rank (from 1), score (higher is better)
Prints  one line of JSON, last on stdout

Examples
    python 02_retrieve.py
    python 02_retrieve.py --retrievers bm25 dense --top-k 600
    python 02_retrieve.py --retrievers dense --restrict work/demo/test/bm25.tsv --out work/demo/test/restricted
    python 02_retrieve.py fuse a.tsv b.trec --out hybrid.tsv
    python 02_retrieve.py fuse a.tsv b.tsv --method zscore --weights 0.3 0.7 --out hybrid.tsv
"""
import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import re
import resource
import shutil
import sys
import threading
import time
from pathlib import Path

import numpy as np

RRF_K = 60       # Cormack et al. 2009
BLOCK = 65_536   # rows of the dense matrix turned to float32 at once: 256 MiB at 1,024 dimensions
CLAIMS = 256     # claims scored at once against them: 0.4 GiB at 394,269 abstracts
COMPILE = 10**7  # postings from which on it pays to compile the scorer (about two seconds)

# --- helpers: the same block in all six scripts
LABELS, START = ("SUPPORTS", "REFUTES", "NEI"), time.monotonic()
SPELT = {name: LABELS[place] for place, names in enumerate((  # by the data sets in use
    "SUPPORT SUPPORTED ENTAILMENT", "REFUTE REFUTED CONTRADICT CONTRADICTION", "NOT_ENOUGH_INFORMATION NOT_ENOUGH_INFO "
    "NOTENOUGHINFO NEUTRAL")) for name in names.split()}
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
    if not isinstance(table.index, pd.RangeIndex):
        fail(f"{path}:1", "the rows have more fields than the header; mend the header")
    table.index += 1 if trec else 2
    return check_table(path, table, columns, trec, **known)

def check_table(path, table, columns, trec=False, **known):
    """What read_table refuses and mends; table is indexed by line."""
    import pandas as pd
    if not set(columns) <= set(table):
        found = ", ".join(map(str, table))
        fail(f"{path}:1", f"the columns {', '.join(columns)} are wanted, {found} found; mend the header")
    table = table[(table != "").any(axis=1)].copy()
    ids = [column for column in columns if column.endswith("_id")]
    reject(path, table, (table[ids] == "").any(axis=1), "an id is empty; fill it in or remove the row")
    reject(path, table, table.duplicated(ids), " ".join(f"{c} {{{c}}}" for c in ids) + " stands twice; keep one row")
    for column, allowed in known.items():
        reject(path, table, ~table[column].isin(allowed), f"unknown {column} {{{column}}}; give the files that go together")
    if "label" in columns and trec:  # TREC judges relevance: no stance to be had
        table["label"] = np.where(pd.to_numeric(table["label"], errors="coerce") > 0, "RELEVANT", "NEI")
    elif "label" in columns:
        table["label"] = table["label"].str.upper().str.replace(" ", "_").replace(SPELT)
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
    if Path(path).is_dir():
        fail(path, "a folder; name the JSONL file in it")
    for number, line in enumerate(open(path, "rb"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if rb"\ud" in line.lower():  # half a character, as in JSON that was cut off somewhere, becomes a question mark
                record = json.loads(json.dumps(record, ensure_ascii=False).encode("utf-8", "replace"))
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
    same, read = not args.force, {Path(path).resolve() for path in inputs}
    for path in map(Path, paths):
        made = {}
        with contextlib.suppress(OSError, ValueError):
            made = json.loads(Path(f"{path}.meta.json").read_text(encoding="utf-8"))
        known = made.get("arguments", {})
        theirs = path.is_dir() and any(path.iterdir()) and known.get("job") != args.job  # it would be replaced whole
        if theirs or any(map(Path.is_file, path.parents)):
            fail(path, "a folder or file stands there that this command did not make; give another --out, or move it")
        if path.resolve() in read:
            fail(path, "this command reads it, and would write over it; give another --out")
        same &= path.exists() and known == vars(args) | {"force": False} and made.get("inputs") == inputs
    return same and not print(*(f"up to date: {path}" for path in paths), sep="\n")

def remove(*paths):
    """Delete files and folders, those that are there."""
    for path in map(Path, paths):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

@contextlib.contextmanager
def written(path, args, inputs, **facts):
    """Yield a temporary path; the file or folder made there becomes path, whole, with its provenance beside it."""
    path, temporary, meta = Path(path), Path(f"{path}.tmp-{os.getpid()}"), Path(f"{path}.meta.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f"{path.name}.tmp-[0-9]*"):  # what a killed process left behind
        try:
            os.kill(int(left.name.split(".tmp-")[-1].split(".")[0]), 0)
        except ProcessLookupError:
            remove(left)
        except (OSError, ValueError):  # someone else's, alive; or no process number
            pass
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
        if path.is_dir():
            os.replace(path, f"{temporary}.old")
        if temporary.is_dir():  # first the provenance, which vouches for nothing as long as there is no folder
            os.replace(provenance, meta)
        else:
            meta.unlink(missing_ok=True)  # from here on it would vouch for the new bytes
        os.replace(temporary, path)
        if provenance.exists():
            os.replace(provenance, meta)
        remove(f"{temporary}.old")
    finally:
        remove(temporary, f"{temporary}.meta.json")

def spent():
    """Seconds and peak memory (MiB) of this process so far."""
    unit = 1024 if sys.platform == "linux" else 1024**2
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // unit
    return {"seconds": round(time.monotonic() - START, 1), "peak_mib": peak}

class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The docstring as it stands, and the defaults."""
    def _get_help_string(self, action):
        return super()._get_help_string(action) if action.default else action.help

def at_least(least):
    """For argparse: a whole number from least on."""
    def whole(text):
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is below {least}")
        return int(text)
    return whole

def run_job(doc, jobs):
    """Run the job named by the first word (else the first of jobs); the last line of stdout is its JSON."""
    words = sys.argv[1:]
    job, flags = jobs[words.pop(0) if words and words[0] in jobs else next(iter(jobs))]
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=doc, formatter_class=Help, allow_abbrev=False)
    parser.error = lambda message: fail(Path(sys.argv[0]).name, f"{message}; see --help")
    flags(parser.add_argument)
    parser.set_defaults(job=f"{Path(sys.argv[0]).name} {job.__name__}")
    parser.add_argument("--data", default="data/demo", help="folder of corpus, claims and qrels")
    parser.add_argument("--work", default="work/demo", help="folder of all that is made from them")
    parser.add_argument("--split", default="train" if job.__name__ == "train" else "test", help="which claims")
    parser.add_argument("--seed", type=int, default=13, help="of every random choice")
    parser.add_argument("--device", default="auto", help="cuda, cuda:1, mps, cpu; auto takes the best there is")
    parser.add_argument("--force", action="store_true", help="make outputs again that are up to date")
    args = parser.parse_args(words)
    for word in ("data", "work", "split"):
        for name, value in vars(args).items():
            texts = [text.replace(f"{{{word}}}", getattr(args, word)) if isinstance(text, str) else text
                     for text in (value if isinstance(value, list) else [value])]
            setattr(args, name, texts if isinstance(value, list) else texts[0])
    if getattr(args, "out", None):
        args.out = str(Path(args.out))  # without a slash at its end, behind which names would be put
    try:
        print(json.dumps(job(args) | spent(), ensure_ascii=False))
    except KeyboardInterrupt:
        sys.exit(130)
# --- end of helpers

# --- models: the same block in all scripts that load one
def model_folder(name):
    """The folder of a model: name itself, or the hub's snapshot of it (from the cache under HF_HUB_OFFLINE=1)."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(name, ignore_patterns=["*.onnx*", "openvino/*", "*.h5", "*.msgpack", "*.pkl"]))
    except Exception as error:  # a dozen kinds: no network, no such model, no access, not in the cache
        fail(name, f"no such folder, and the hub does not give it ({type(error).__name__}); check the name, the network, "
             "and for a gated model its terms and HF_TOKEN; see data/download.py --help")

def device_of(name):
    """The torch device that --device names; auto takes the best there is."""
    import torch
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError):
        fail("--device", f"there is no {name} that torch could use here; take auto or cpu")
    return name

def precision_of(device):
    """fp32 on a CPU; on a GPU bf16, or fp16 where it would only be emulated."""
    import torch
    if not str(device).startswith("cuda"):
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"

@contextlib.contextmanager
def ticking(what):
    """While something without a progress bar goes on (imports, loading), say so every three seconds."""
    done = threading.Event()
    def tick(seconds=0):
        sys.stderr.write(f"{what} ... {seconds} s\n")  # in one piece: an error may be on its way at the same time
        done.wait(3) or tick(seconds + 3)
    threading.Thread(target=tick, daemon=True).start()
    try:
        yield
    finally:
        done.set()
# --- end of models

# --- texts to terms and vectors: the same block in 01_index.py and 02_retrieve.py
def default_analyser(model):
    """As bm25s: lower case, words of two characters and more, Lucene's 33 English stopwords out, Snowball stems."""
    import Stemmer
    from bm25s.stopwords import STOPWORDS_EN
    words, stem = re.compile(r"(?u)\b\w\w+\b").findall, Stemmer.Stemmer("english").stemWords
    return (lambda texts: (words(text.lower()) for text in texts),
            lambda words: [None if word in STOPWORDS_EN else stem for word, stem in zip(words, stem(words))])

def plain_analyser(model):
    """What stands between white space, nothing changed or removed (AIRwaves' raw baseline)."""
    return lambda texts: map(str.split, texts), lambda words: words

def nltk_analyser(model):
    """Lower case, punctuation removed, NLTK's 179 English stopwords out (Ant Bridge, organisers of ClimateCheck)."""
    from bm25s.stopwords import STOPWORDS_EN_PLUS  # NLTK's list, without its download at run time
    stopwords = frozenset(STOPWORDS_EN_PLUS)
    bare = re.compile(r"[^\w\s]|_").sub
    return (lambda texts: (text.lower().split() for text in texts),
            lambda words: [None if word in stopwords or (term := bare("", word)) in stopwords else term or None
                           for word in words])

def spacy_analyser(model):
    """Lower-cased lemmas of alphanumeric tokens, spaCy's stopwords out (AIRwaves); spaCy is not in requirements.txt."""
    try:
        import spacy
        nlp = spacy.load(model, exclude=["parser", "ner"])
    except (ImportError, OSError):
        fail("--analyser spacy", f"it needs spaCy and its pipeline {model}: pip install spacy, python -m spacy download "
             f"{model}; or name a pipeline's folder with --spacy-model")
    return (lambda texts: ([token.lemma_.lower() for token in doc if token.text.isalnum() and not token.is_stop]
                           for doc in nlp.pipe(texts)), lambda words: words)

# analyser(model) -> split(texts): the words of each text; terms(words): what each word is indexed as, None for nothing
ANALYSERS = {"default": default_analyser, "plain": plain_analyser, "nltk": nltk_analyser, "spacy": spacy_analyser}

def load_encoder(kind, folder, device, dtype, max_length=None):
    """SentenceTransformer or SparseEncoder; a bare masked language model gets the pooling of SPLADE on top."""
    with ticking(f"loading {folder}"):
        import torch
        from sentence_transformers import SentenceTransformer, SparseEncoder
        from sentence_transformers.base.modules import Transformer
        from sentence_transformers.sparse_encoder.modules import SpladePooling
        device = device_of(device)
        dtype = precision_of(device) if dtype == "auto" else dtype
        how = {"model_kwargs": {"dtype": {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]}}
        if kind == "dense":
            encoder = SentenceTransformer(str(folder), device=device, **how)
        elif (folder / "modules.json").is_file():
            encoder = SparseEncoder(str(folder), device=device, **how)
        else:
            masked = Transformer(str(folder), transformer_task="fill-mask", **how)
            encoder = SparseEncoder(modules=[masked, SpladePooling("max")], device=device)
    if max_length and max_length < (encoder.max_seq_length or sys.maxsize):
        encoder.max_seq_length = max_length
    return encoder, dtype

TERMS = 2_048  # of the vocabulary, whose logits are held at once
ACTIVATIONS = {
    "log1p_relu": lambda logits: logits.relu().log1p(),  # SPLADE-v3 as published (Formal et al. 2021)
    "relu": lambda logits: logits.relu(),                # Kiepura & Lam 2025, eq. 2
}

def sparse_vectors(encoder, texts, activation, task):
    """(texts, vocabulary) float32: w_v = max over tokens of activation(logit), padding masked out.

    Both activations rise with the logit, so the maximum comes first: one row a text to activate instead
    of one a token. Encoders of another build (sums, static query weights) do as they were made to.
    """
    import torch
    from sentence_transformers.sparse_encoder.modules import SpladePooling
    from sentence_transformers.util import batch_to_device
    splade = len(encoder) == 2 and isinstance(encoder[1], SpladePooling) and encoder[1].pooling_strategy == "max"
    head = encoder[0].model.get_output_embeddings() if splade else None
    if not isinstance(head, torch.nn.Linear) or encoder[1].activation_function != "relu":  # ReLU, then the logarithm: "relu"
        if activation != "log1p_relu":
            fail("--activation", f"{activation} needs a SPLADE model with max pooling; leave the flag out for this one")
        encode = {"query": encoder.encode_query, "document": encoder.encode_document}[task]
        return encode(texts, batch_size=len(texts), convert_to_sparse_tensor=False, save_to_cpu=True).float().numpy()
    encoder[0].unpad_inputs = False
    with torch.inference_mode():
        features = batch_to_device(encoder.preprocess(texts, prompt=encoder.prompts.get(task), task=task), encoder.device)
        with largest_logits(head, features["attention_mask"] == 0):
            logits = encoder.eval()[0](features)["token_embeddings"][:, 0]
        return ACTIVATIONS[activation](logits.float()).cpu().numpy()

@contextlib.contextmanager
def largest_logits(head, padding):
    """While this lasts, head (linear, from hidden states to the vocabulary) gives one row a text: each term's maximum over
    the tokens, 0 for padding. It goes by blocks of terms, as 30,522 logits a token at once are slow to write and to read."""
    import torch

    def forward(hidden):
        parts = zip(head.weight.split(TERMS), [None] * len(head.weight) if head.bias is None else head.bias.split(TERMS))
        blocks = (torch.nn.functional.linear(hidden, weight, bias) for weight, bias in parts)
        return torch.cat([block.masked_fill_(padding[..., None], 0).amax(dim=1) for block in blocks], 1)[:, None]

    head.forward = forward
    try:
        yield
    finally:
        del head.forward
# --- end of texts to terms and vectors

# ----------------------------------------------------------- Ranking
def top_k(scores, k):
    """The k best rows of scores (1-D), best first; equal scores in corpus order, also where the cut falls among them.

    The maxima of 4 k or more blocks come first: k of them reach a floor that no row of the result lies
    below, and what reaches it is little to sort.
    """
    height = len(scores) // (4 * k)
    if height > 1:
        maxima = scores[: len(scores) // height * height].reshape(height, -1).max(axis=0)
        rows = np.flatnonzero(scores >= np.partition(maxima, -k)[-k])
    else:
        rows = np.arange(len(scores))
    return rows[np.argsort(-scores[rows], kind="stable")][:k]

# ----------------------------------------------------------- Search
# Each loads its index, encodes the claims, and returns a generator of scores (abstracts,), one array a claim.
def search_bm25(folder, meta, claims, args):
    """BM25 as bm25s has it; claims go through the analyser stored with the index."""
    import bm25s
    bm25 = bm25s.BM25.load(folder)
    if bm25.nonoccurrence_array is not None:  # bm25l, bm25+: what absent terms add to all abstracts alike; 0 means no term
        bm25.nonoccurrence_array = np.zeros_like(bm25.nonoccurrence_array)
    if meta["postings"] >= COMPILE and importlib.util.find_spec("numba"):
        bm25.activate_numba_scorer()
        bm25.get_scores_from_ids([0])
    split, terms_of = ANALYSERS[meta["analyser"]["name"]](meta["analyser"].get("model"))
    known = [[term for term in terms_of(words) if term in bm25.vocab_dict] for words in split(claims)]
    return (bm25.get_scores(terms) if terms else np.zeros(meta["abstracts"], np.float32) for terms in known)

def search_dense(folder, meta, claims, args):
    """Cosines: inner products of unit vectors."""
    encoder, _ = open_encoder(folder, meta, args)
    queries = encoder.encode_query(claims, prompt=meta["query_prompt"], normalize_embeddings=True)
    vectors = np.load(folder / "embeddings.npy", mmap_mode="c")
    return inner_products(vectors, queries, args.block, encoder.device)

def inner_products(vectors, queries, block, device):
    """Yield vectors @ query (abstracts,) in float32, exact, for each of queries; at most block rows in memory at once."""
    import torch
    for first in range(0, len(queries), CLAIMS):
        part = torch.from_numpy(np.asarray(queries[first : first + CLAIMS], np.float32)).to(device)
        scores = np.empty((len(part), len(vectors)), np.float32)
        for start in range(0, len(vectors), block):
            rows = torch.from_numpy(vectors[start : start + block]).to(device).float()
            scores[:, start : start + block] = (part @ rows.T).cpu().numpy()
        yield from scores

def search_splade(folder, meta, claims, args):
    """Inner products of sparse vectors."""
    encoder, _ = open_encoder(folder, meta, args)
    queries = np.concatenate([sparse_vectors(encoder, claims[start : start + 32], meta["activation"], "query")
                              for start in range(0, len(claims), 32)])
    data, indices, indptr = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("data", "indices", "indptr"))
    return (sum_postings(query, data, indices, indptr, meta["abstracts"]) for query in queries)

def sum_postings(query, data, indices, indptr, count):
    """matrix @ query (count,) in float32, where matrix is CSC: only the postings of the query's own terms are read."""
    scores = np.zeros(count, np.float32)
    for term in np.flatnonzero(query):
        postings = slice(indptr[term], indptr[term + 1])
        scores[indices[postings]] += query[term] * data[postings]
    return scores

def open_encoder(folder, meta, args):
    """The model that made the index at folder; another one would put claims into another space."""
    model = model_folder(getattr(args, f"{meta['kind']}_model") or meta["model"])
    if fingerprints(model)[model.as_posix()] != meta["model_sha256"]:
        fail(folder / "meta.json", f"this index was not made with {model} as it is now; build it again with 01_index.py")
    return load_encoder(meta["kind"], model, args.device, "fp32", meta["max_length"])

SEARCHERS = {"bm25": search_bm25, "dense": search_dense, "splade": search_splade}
POSITIVE = ("bm25", "splade")  # a score of 0 means that claim and abstract share no term: no candidate

# ----------------------------------------------------------- Fusion
# What a run gives to each of its abstracts; one that it lacks gets nothing. scores (n,): best first.
def reciprocal_ranks(scores, k):
    """1 / (k + rank), rank from 1 (Cormack et al. 2009): ranks only, as BM25 and cosine share no scale."""
    return 1 / (k + np.arange(1, len(scores) + 1))

def min_max(scores, k):
    """(score - lowest) / (highest - lowest); 0 where all are equal."""
    spread = scores.max() - scores.min()
    return (scores - scores.min()) / spread if spread else np.zeros(len(scores))

def z_scores(scores, k):
    """(score - mean) / standard deviation, moved so that the lowest is 0: what a run lacks counts like its last."""
    spread = scores.std()
    return (scores - scores.min()) / spread if spread else np.zeros(len(scores))

def places(scores, k):
    """1 / rank: the union takes the best of them, sums nothing."""
    return 1 / np.arange(1, len(scores) + 1)

METHODS = {"rrf": (reciprocal_ranks, sum), "minmax": (min_max, sum), "zscore": (z_scores, sum), "union": (places, max)}

def fuse_rankings(rankings, order, method="rrf", weights=None, k=RRF_K):
    """[(id, score)], best first, from several of the same form; equal scores by order, {id: place}."""
    value, together = METHODS[method]
    given = {}
    for ranking, weight in zip(rankings, weights or [1.0] * len(rankings)):
        points = weight * value(np.array([score for _, score in ranking]), k) if ranking else np.empty(0)
        for (name, _), point in zip(ranking, points.tolist()):
            given.setdefault(name, []).append(point)
    fused = [(name, together(points)) for name, points in given.items()]
    return sorted(fused, key=lambda pair: (-pair[1], order[pair[0]]))

# ----------------------------------------------------------- Runs
def write_run(rankings, path, args, inputs, **facts):
    """Write {claim_id: [(abstract_id, score)]}, best first, and say how many claims it has nothing for."""
    import pandas as pd
    rows = [(claim, name, rank, score) for claim, ranking in rankings.items()
            for rank, (name, score) in enumerate(ranking, 1)]
    run = pd.DataFrame(rows, columns=["claim_id", "abstract_id", "rank", "score"])
    empty = sum(not ranking for ranking in rankings.values())
    with written(path, args, inputs, rows=len(run), claims_without_rows=empty, **facts) as temporary:
        run.to_csv(temporary, sep="\t", index=False, float_format="%.9g", lineterminator="\n")
    print(f"{path}: {len(run)} rows, {len(rankings)} claims, {empty} of them without any")

def open_index(folder, corpus, fingerprint):
    """meta.json of an index, which must have been built from the corpus at hand (where there is one)."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        fail(folder, "no such index; build it with 01_index.py, or leave it out of --retrievers")
    if fingerprint not in (None, meta["corpus"]):
        fail(folder / "meta.json", f"this index was built from another corpus than {corpus}; run 01_index.py again")
    return meta

def candidates_of(path, claims, place):
    """{claim_id: rows (ascending)} of an earlier run; place: {abstract_id: row of the index}."""
    run = read_table(path, ["claim_id", "abstract_id", "rank", "score"], abstract_id=place)
    rows = {claim: np.sort(part["abstract_id"].map(place).to_numpy()) for claim, part in run.groupby("claim_id")}
    return {claim: rows.get(claim, np.empty(0, np.int64)) for claim in claims}

def rank(kind, scores, ids, candidates, k):
    """[(abstract_id, score)], best first: the top k of scores (abstracts,), or of its candidate rows."""
    rows = top_k(scores, k) if candidates is None else candidates[top_k(scores[candidates], k)]
    found = zip(rows.tolist(), scores[rows].tolist())
    return [(ids[row], score) for row, score in found if score > 0 or kind not in POSITIVE]

def retrieve(args):
    """One run per retriever, then their fusion."""
    folders = {kind: Path(args.index) / kind for kind in args.retrievers}
    corpus = Path(args.corpus)
    fingerprint = fingerprints(corpus)[corpus.as_posix()] if corpus.exists() else None
    metas = {kind: open_index(folder, corpus, fingerprint) for kind, folder in folders.items()}
    if len({meta["corpus"] for meta in metas.values()}) > 1:
        fail(args.index, "its indexes were built from different corpora; run 01_index.py again")
    inputs = fingerprints(args.claims, *folders.values(), *([args.restrict] if args.restrict else []))
    claims = read_table(args.claims, ["claim_id", "claim"])
    names = [*args.retrievers, "hybrid"] if len(args.retrievers) > 1 else args.retrievers
    paths = {name: Path(args.out) / f"{name}.tsv" for name in names}
    if up_to_date(paths.values(), args, inputs):
        return {"made": []}
    if not len(claims):
        fail(args.claims, "it holds no claim; give one a line")
    from tqdm.auto import tqdm
    runs, place, seconds = {}, {}, {}
    for kind, folder in folders.items():
        ids = json.loads((folder / "abstract_ids.json").read_text(encoding="utf-8"))
        place = place or {name: row for row, name in enumerate(ids)}
        candidates = candidates_of(args.restrict, claims["claim_id"], place) if args.restrict else {}
        found = SEARCHERS[kind](folder, metas[kind], list(claims["claim"]), args)
        start, runs[kind] = time.monotonic(), {}
        for claim, scores in zip(claims["claim_id"], tqdm(found, desc=kind, total=len(claims), unit=" claims")):
            runs[kind][claim] = rank(kind, scores, ids, candidates.get(claim), args.top_k)
        seconds[kind] = round(time.monotonic() - start, 2)
        write_run(runs[kind], paths[kind], args, inputs, seed=args.seed, search_seconds=seconds[kind])
    if "hybrid" in paths:
        fused = {claim: fuse_rankings([run[claim] for run in runs.values()], place, "rrf", k=args.rrf_k)[: args.top_k]
                 for claim in claims["claim_id"]}
        write_run(fused, paths["hybrid"], args, inputs, seed=args.seed)
    return {"made": [str(path) for path in paths.values()], "claims": len(claims), "search_seconds": seconds}

def fuse(args):
    """Fuse run files, whoever made them."""
    if args.weights and (len(args.weights) != len(args.runs) or args.method == "union"):
        fail("--weights", f"{len(args.weights)} for {len(args.runs)} runs by {args.method}; give one a run, none for union")
    if args.weights and not np.isfinite(args.weights).all():
        fail("--weights", "each is to be a finite number")
    inputs = fingerprints(*args.runs, *([args.corpus] if args.corpus else []))
    if up_to_date([args.out], args, inputs):
        return {"made": []}
    known = {"abstract_id": read_corpus(args.corpus)} if args.corpus else {}
    runs = [read_table(path, ["claim_id", "abstract_id", "rank", "score"], **known) for path in args.runs]
    names = known.get("abstract_id") or [name for run in runs for name in run["abstract_id"]]
    order = {name: row for row, name in enumerate(dict.fromkeys(names))}
    rankings = {claim: [[] for _ in runs] for run in runs for claim in run["claim_id"]}
    for number, run in enumerate(runs):
        for claim, rows in run.groupby("claim_id", sort=False):
            rankings[claim][number] = list(zip(rows["abstract_id"], rows["score"]))
    fused = {claim: fuse_rankings(lists, order, args.method, args.weights, args.rrf_k)[: args.top_k]
             for claim, lists in rankings.items()}
    write_run(fused, args.out, args, inputs)
    return {"made": [args.out], "claims": len(fused)}

# ----------------------------------------------------------- Main
def retrieve_flags(add):
    add("--claims", "--in", default="{data}/claims.{split}.tsv", help="the claims")
    add("--index", default="{work}/index", help="folder of the indexes")
    add("--corpus", default="{data}/corpus.jsonl", help="where it is at hand, the indexes are checked to be built from it")
    add("--out", default="{work}/{split}", help="folder that gets one run a retriever, and hybrid.tsv")
    add("--retrievers", nargs="+", choices=SEARCHERS, default=list(SEARCHERS), help="which to ask")
    add("--restrict", help="an earlier run: only its candidates are scored, claim by claim")
    add("--top-k", type=at_least(1), default=100, help="abstracts kept a claim")
    add("--rrf-k", type=at_least(0), default=RRF_K, help="the k of reciprocal rank fusion")
    add("--block", type=at_least(1), default=BLOCK, help="rows of the dense index in memory at once")
    add("--dense-model", help="where the model of the dense index lies now, if it was moved")
    add("--splade-model", help="the same for the SPLADE index")

def fuse_flags(add):
    add("runs", nargs="+", help="run files, TSV or TREC")
    add("--out", default="{work}/{split}/fused.tsv", help="the fused run")
    add("--method", choices=METHODS, default="rrf", help="rrf: ranks only; minmax, zscore: sums of scores; union: best rank")
    add("--weights", nargs="+", type=float, help="one a run; without it, all count the same")
    add("--corpus", default="", help="breaks ties by its order; without it, by the order of the runs given")
    add("--top-k", type=at_least(1), default=100, help="abstracts kept a claim")
    add("--rrf-k", type=at_least(0), default=RRF_K, help="the k of reciprocal rank fusion")

def main():
    run_job(__doc__, {"retrieve": (retrieve, retrieve_flags), "fuse": (fuse, fuse_flags)})

if __name__ == "__main__":
    main()
