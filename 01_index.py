# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "PyStemmer==3.1.0", "bm25s==0.3.16", "numpy==2.4.6", "pandas==3.1.1",
#   "sentence-transformers==6.2.0", "torch==2.13.0", "tqdm==4.70.1", "transformers==5.23.0",
# ]
# ///
"""
Index the abstracts (BM25, dense, SPLADE), and find their neighbours.

Reads   corpus.jsonl; graph: index/dense/
Writes  index/KIND/, each with abstract_ids.json (the id of each row) and meta.json:
            bm25/    postings, in the format of bm25s
            dense/   embeddings.npy: abstracts x dimensions, float16, unit length
            splade/  weights.npz: abstracts x vocabulary, a CSC matrix of scipy
            graph/   neighbours.npy: abstracts x k, rows of the corpus, nearest first
        OUT.parts/: finished shards, from which the same call resumes
Prints  what is made; the last line is JSON

recipes/train/encoder.py fine-tunes the dense encoder. Functions that several scripts share stand at
the end, in marked blocks.

Examples
    python 01_index.py --indexes dense --dense-model BAAI/bge-m3 --device cuda:0 cuda:1
    python 01_index.py graph --neighbours 20
"""

import argparse
import contextlib
import csv
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import sys
import time
import unicodedata
import zipfile
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np

LANGUAGES = """danish dutch english french german italian norwegian portuguese russian spanish
    swedish turkish""".split()  # those with stopwords in bm25s and a Snowball stemmer
INDEX_ARGUMENTS = {  # what decides an index, beside --corpus, --fields and --separator
    "bm25": ["analyser", "language", "bm25_method", "k1", "b", "delta"],
    "dense": ["dense_model", "pooling", "query_prompt", "document_prompt", "max_length", "dtype"],
    "splade": ["splade_model", "activation", "max_length", "dtype"],
}
# Thai, Lao, Burmese, Khmer, Japanese and Chinese put no blanks between words.
NO_BLANKS = "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]"
SHARD = 4096  # abstracts
SAMPLE = ["Sea ice melts.", "Ice"]  # for plain_features(); two lengths, so that one is padded
TENSORS = ("input_ids", "attention_mask", "token_type_ids")  # texts x tokens
OVERLAP = 50  # tokens that neighbouring windows share: AIRwaves 2025, section 3
# The block "models" ends its messages with this.
ADVICE = "name another, or fetch the small ones: python data/download.py models"


class Analyser(NamedTuple):
    """How texts become terms: a Unicode normal form, and arguments of bm25s.tokenize().

    None leaves a step out.
    """

    normalise: str | None
    lower: bool
    token_pattern: str
    stopwords: str | None
    stemmer: str | None


# A word may have - . / , inside. On SciFact, NLTK's word_tokenize() makes 99 % of the same tokens.
WORD = r"\w+(?:[-./,]\w+)*"
ANALYSERS = {
    "default": Analyser("NFKC", True, r"(?u)\b\w\w+\b", "english", "english"),  # Lucene's stopwords
    "unstemmed": Analyser("NFKC", True, r"(?u)\b\w\w+\b", "english", None),  # AlexUNLP-FMT 2025
    "plain": Analyser(None, False, r"\S+", None, None),  # split at white space: AIRwaves 2025
    "nltk": Analyser("NFKC", True, r"[^\W_]+", "english_plus", None),  # Ant Bridge 2025
    "letters": Analyser("NFKC", True, r"[^\W\d_]{2,}", "english_plus", None),  # ClimateSense 2026
    "words": Analyser("NFKC", True, WORD, None, None),  # the baseline of ClimateCheck 2025
    "cased": Analyser("NFKC", False, WORD, None, None),  # EFC 2025
}


# ---------- BM25
def index_bm25(texts, folder, args):
    """Save the BM25 scores of all postings (Kamphuis et al. 2020); return entries of meta.json."""
    import bm25s

    analyser = {"name": args.analyser} | ANALYSERS[args.analyser]._asdict()
    if args.language != "english":  # for English, the analyser names one of two lists of stopwords
        for step in ("stopwords", "stemmer"):
            if analyser[step]:
                analyser[step] = args.language
    tokens = tokenise(texts, **analyser)
    # bm25s numbers the terms in the order of a set, which differs between calls. In alphabetical
    # order, the same texts make the same bytes.
    vocabulary = {term: number for number, term in enumerate(sorted(tokens.vocab))}
    new_number = np.array([vocabulary[term] for term in tokens.vocab], dtype=np.int32)
    ids = [new_number[row] for row in tokens.ids]
    bm25 = bm25s.BM25(args.k1, args.b, args.delta, method=args.bm25_method, csc_backend="scipy")
    bm25.index((ids, vocabulary), create_empty_token=False)
    bm25.save(folder, show_progress=False)
    without_terms = tokens.ids.count([])
    sample = texts[:1000]
    is_unspaced = [len(re.findall(NO_BLANKS, text)) > len(text) / 2 for text in sample]
    if without_terms > len(texts) / 2 or np.mean(is_unspaced) > 0.5:
        what = "the analyser finds no words in most texts"
        warn(args.corpus, f"{what}; see --analyser, and languages in data/README.md")
    return {"analyser": analyser, "without_terms": without_terms}


# ---------- Dense and SPLADE
def open_encoder(load, model, args, dtype, prompts=None):
    """Open an encoder that truncates texts at --max-length, or at a lower limit of its own."""
    encoder = open_model(load, model, args, dtype, prompts=prompts)
    check_fields(getattr(encoder.transformers_model, "config", None), model, args)
    if args.max_length < encoder.max_seq_length < np.inf:  # static embeddings have no limit
        encoder.max_seq_length = args.max_length
    return encoder


def open_dense_encoder(model, args, dtype):
    """Open an encoder of dense vectors with the prompts and the pooling of the flags."""
    from sentence_transformers import SentenceTransformer

    prompts = {"query": args.query_prompt, "document": args.document_prompt}
    encoder = open_encoder(SentenceTransformer, model, args, dtype, prompts)
    if args.document_prompt is None and not encoder.prompts["document"]:
        # The configurations of E5 and others call this prompt "passage".
        encoder.prompts["document"] = encoder.prompts.get("passage", "")
    if args.pooling == "chunks":
        if not encoder.transformers_model:
            fail("--pooling", "static embeddings read whole texts; leave it out")
        pool_chunks(encoder)
    return encoder


def pool_chunks(encoder):
    """Let an encoder read long texts in overlapping windows, and pool the vectors of a text."""
    stride = min(OVERLAP, encoder.max_seq_length // 2)
    settings = encoder[0].processing_kwargs
    windows = {"return_overflowing_tokens": True, "stride": stride}
    encoder[0].processing_kwargs = settings | {"text": settings.get("text", {}) | windows}
    # Pooling without the prompt would leave out the first tokens of every window, but only the
    # first window of a text begins with the prompt.
    encoder.set_pooling_include_prompt(True)
    encoder.register_forward_hook(pool_windows)


def pool_windows(encoder, _, features):
    """Pool the windows of each text to one vector: (mean + max) / 2 (AIRwaves 2025, eq. 3)."""
    import torch

    text_of_row = features["overflow_to_sample_mapping"]  # 0, 0, 1: the first has two windows
    starts = (text_of_row.diff().nonzero()[:, 0] + 1).tolist()
    texts = features["sentence_embedding"].tensor_split(starts)
    pooled = [(windows.mean(0) + windows.amax(0)) / 2 for windows in texts]
    return features | {"sentence_embedding": torch.stack(pooled)}


def pool_maxima(encoder, activation):
    """Pool by pool_logits() if a model pools by maximum and log(1 + ReLU); return whether it does.

    Any other pooling, such as a sum over tokens, stays as it is.
    """
    pooling = encoder[-1]
    settings = vars(pooling)
    if settings.get("pooling_strategy") != "max" or settings.get("activation_function") != "relu":
        return False
    pooling.forward = functools.partial(pool_logits, activation)
    return True


def pool_logits(activation, features):
    """Pool the logits of tokens to weights of terms: texts x vocabulary (Formal et al. 2021).

    log(1 + ReLU(x)) never falls when x grows, so it makes no difference whether it comes before or
    after the maximum over tokens. After it, there is one row per text instead of hundreds.
    """
    logits = features["token_embeddings"]  # texts x tokens x vocabulary
    logits[features["attention_mask"] == 0] = 0  # so that padding adds no term
    weights = logits.amax(dim=1).relu()
    if activation == "log1p_relu":
        weights = weights.log1p()
    return features | {"sentence_embedding": weights}


# ---------- Vectors of shards
# The library's encode_document() tokenises each batch while the GPU waits. For plain encoders,
# encode_ahead() makes the same vectors in less time: a thread tokenises the next shards while one
# is encoded, and numpy makes the batches from token ids. Others go through encode_by_library().
def token_ids(encoder, texts):
    """Return the token ids of texts, each with the prompt of documents: [int32 array].

    The tokenizer truncates a long text only after it has tokenised all of it. So a text is first
    cut to n words, where n is the limit in tokens: nearly every word has at least one token.
    """
    tokenizer = encoder.tokenizer.backend_tokenizer
    limit = tokenizer.truncation["max_length"]
    texts = [encoder.prompts["document"] + text for text in texts]
    starts = [" ".join(text.split(" ", limit)[:limit]) for text in texts]
    ids = []
    for text, start, coded in zip(texts, starts, tokenizer.encode_batch_fast(starts)):
        if len(coded) < limit and start != text:
            # Some words have no token, such as the empty one between two blanks.
            coded = tokenizer.encode(text)
        ids.append(np.array(coded.ids, dtype=np.int32))
    return ids


def ahead(make, items):
    """Yield make(item) for each item in order, while a thread makes the next two."""
    waiting = deque()
    with ThreadPoolExecutor(1) as thread:
        for item in items:
            waiting.append(thread.submit(make, item))
            if len(waiting) > 2:
                yield waiting.popleft().result()
        for made in waiting:
            yield made.result()


def batches_of(lengths, batch_size):
    """Cut texts into batches, the longest first: [array of row numbers]; lengths: tokens of each.

    A padded batch has at most as many tokens as batch_size texts of the greatest length, so short
    texts make larger batches.
    """
    rows = np.argsort(-lengths, kind="stable")
    batches = []
    start = 0
    while start < len(rows):
        size = batch_size * lengths.max() // lengths[rows[start]]
        batches.append(rows[start : start + size])
        start += size
    return batches


def features_of(ids, encoder, template):
    """Pad token ids to the features that encoder.preprocess() makes of their texts.

    ids: [int32 array], one for each text. template: features that the library has made of other
    texts; all but their TENSORS is taken over.
    """
    import torch

    lengths = np.array([len(row) for row in ids])
    columns = np.arange(max(1, *lengths))  # one at least, even if no text has a token
    if encoder.tokenizer.padding_side == "left":
        columns = columns[::-1]
    is_token = columns < lengths[:, None]  # texts x columns
    padded = np.full(is_token.shape, encoder.tokenizer.pad_token_id, dtype=np.int32)
    padded[is_token] = np.concatenate(ids)  # a mask is filled row by row, so each text gets its own
    # In the order of TENSORS; token_type_ids are 0 for single texts.
    arrays = torch.from_numpy(np.stack([padded, is_token, np.zeros_like(padded)]))
    if encoder.device.type == "cuda":
        arrays = arrays.pin_memory()  # the GPU can copy pinned memory while it computes
    tensors = arrays.to(encoder.device, non_blocking=arrays.is_pinned()).long()
    return template | {name: made for name, made in zip(TENSORS, tensors) if name in template}


def plain_features(encoder):
    """Return features of SAMPLE, made by the library, as a template for features_of().

    Return None if the encoder is not plain: it has no fast tokenizer, reads windows, truncates on
    the left, limits its active dimensions, or its features are not those of features_of().
    """
    tokenizer = getattr(encoder.tokenizer, "backend_tokenizer", None)
    if tokenizer is None:  # a slow tokenizer, or static embeddings
        return None
    # These settings are those of windows. A module without the attribute is no Transformer.
    if getattr(encoder[0], "processing_kwargs", True):
        return None
    if getattr(encoder, "max_active_dims", None):
        return None
    # This call also tells the tokenizer at which length it truncates.
    template = encoder.preprocess(SAMPLE, prompt=encoder.prompts["document"], task="document")
    tokenizer.no_padding()
    truncation = tokenizer.truncation or {}
    is_known = template.keys() <= {*TENSORS, "modality", "prompt_length"}
    if truncation.get("direction") != "right" or not is_known:
        return None
    made = features_of(token_ids(encoder, SAMPLE), encoder, template)
    is_same = [made[name].tolist() == template[name].tolist() for name in made.keys() & TENSORS]
    return template if all(is_same) else None


def encode(ids, encoder, template, batch_size):
    """Return the vectors that encode_document() makes of texts (texts x dimensions)."""
    import torch
    from sentence_transformers import SparseEncoder
    from tqdm.auto import tqdm

    is_sparse = isinstance(encoder, SparseEncoder)
    batches = batches_of(np.array([max(1, len(row)) for row in ids]), batch_size)
    found = []
    for rows in tqdm(batches, "batches"):
        features = features_of([ids[row] for row in rows], encoder, template)
        with torch.inference_mode():
            vectors = encoder(features, task="document")["sentence_embedding"]
            found.append(vectors.to_sparse() if is_sparse else vectors[:, : encoder.truncate_dim])
    # The batches have another order than the texts; argsort gives the place of each text in them.
    place_of_text = torch.from_numpy(np.argsort(np.concatenate(batches)))
    return torch.cat(found).float().cpu().index_select(0, place_of_text)


def encode_ahead(shards, encoder, template, batch_size):
    """Yield the vectors of each shard; halve the batches while the GPU's memory is too small."""
    import torch

    encoder.eval()
    size = batch_size
    for ids in ahead(functools.partial(token_ids, encoder), shards):
        vectors = None
        while vectors is None:
            try:
                vectors = encode(ids, encoder, template, size)
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
                if size == batch_size:
                    warn("--batch-size", "too large for the GPU's memory; halved until it fits")
                size //= 2
        yield vectors


def encode_by_library(shards, encoder, batch_size, devices):
    """Yield the vectors that encode_document() makes of each shard, on one device or several."""
    pool = encoder.start_multi_process_pool(devices) if len(devices or ()) > 1 else None
    options = {"batch_size": batch_size, "pool": pool, "show_progress_bar": True}
    for shard in shards:
        yield encoder.encode_document(shard, convert_to_tensor=True, **options).float().cpu()
    if pool:
        encoder.stop_multi_process_pool(pool)


def save_shard(path, vectors):
    """Save sparse vectors as they are, dense ones normalised to length 1 and in half precision."""
    from scipy import sparse
    from torch.nn.functional import normalize

    if not vectors.is_sparse:
        np.savez(path, normalize(vectors).half().numpy())
        return
    vectors = vectors.coalesce()
    indices = vectors.indices().numpy()
    matrix = sparse.coo_array((vectors.values().numpy(), indices), vectors.shape)
    sparse.save_npz(path, matrix, compressed=False)


def is_intact(path):
    """Return whether a file is an undamaged zip archive, which .npz files are."""
    with contextlib.suppress(OSError, zipfile.BadZipFile):
        return zipfile.ZipFile(path).testzip() is None
    return False


def encode_shards(encoder, texts, batch_size, args, parts):
    """Encode the shards that are not in the folder parts yet; return the paths of all."""
    shards = {}
    for start in range(0, len(texts), SHARD):
        shards[parts / f"{start}.npz"] = texts[start : start + SHARD]
    missing = {path: shard for path, shard in shards.items() if not is_intact(path)}
    for path in filter(Path.exists, missing):
        warn(path, "the shard is damaged; it is made anew")
    template = plain_features(encoder)
    if template and len(args.device or ()) < 2:
        encoded = encode_ahead(missing.values(), encoder, template, batch_size)
    else:
        encoded = encode_by_library(missing.values(), encoder, batch_size, args.device)
    for vectors, path in zip(encoded, missing):
        if not vectors.sum().isfinite():
            fail(args.corpus, "a vector is not finite; use --dtype fp32")
        save_shard(parts / "new.npz", vectors)  # renamed, since a call may be killed meanwhile
        (parts / "new.npz").rename(path)
    return list(shards)


def index_dense(texts, folder, args):
    """Save the embeddings of texts; return further entries of meta.json.

    folder: an empty folder beside the finished shards, which are in its parent.
    """
    encoder = open_dense_encoder(args.dense_model, args, args.dtype)
    shards = encode_shards(encoder, texts, batch_size_of(args), args, folder.parent)
    np.save(folder / "embeddings.npy", np.concatenate([np.load(path)["arr_0"] for path in shards]))
    limit = encoder.max_seq_length
    return {"max_length": limit if limit < np.inf else None}


def index_splade(texts, folder, args):
    """Save the weights of terms in texts (Formal et al. 2021); otherwise as index_dense()."""
    from scipy import sparse
    from sentence_transformers import SparseEncoder

    encoder = open_encoder(SparseEncoder, args.splade_model, args, args.dtype)
    if not pool_maxima(encoder, args.activation) and args.activation == "relu":
        fail("--activation", "the model does not pool by maximum and log(1 + ReLU); leave it out")
    # A quarter, since logits take memory: 0.5 GB for 8 texts of 512 tokens.
    batch_size = max(1, batch_size_of(args) // 4)
    shards = encode_shards(encoder, texts, batch_size, args, folder.parent)
    weights = sparse.vstack([sparse.load_npz(path) for path in shards]).tocsc()
    sparse.save_npz(folder / "weights.npz", weights, compressed=False)
    # 02_retrieve.py reads the prompt of claims; None: the one in the model's own files
    return {"max_length": encoder.max_seq_length, "query_prompt": None}


# ---------- Index
def index(args):
    """Make the BM25, dense and SPLADE indexes that are asked for."""
    build = {"bm25": index_bm25, "dense": index_dense, "splade": index_splade}
    models = {"dense": args.dense_model, "splade": args.splade_model}
    for kind, model in models.items():
        if kind in args.indexes:
            check_model(model)
    # Wrong places are refused before hours go into the first index.
    check_outs(*[f"{args.out}/{kind}" for kind in args.indexes], is_folder=True)
    made = []
    texts = {}  # read once, and only if an index has to be made
    for kind in args.indexes:
        out = f"{args.out}/{kind}"
        model = models.get(kind)
        names = ["job", "corpus", "fields", "separator", *INDEX_ARGUMENTS[kind]]
        arguments = {name: vars(args)[name] for name in names}  # no other one changes this index
        models_read = [model] if model else []
        task = task_of(argparse.Namespace(**arguments), args.corpus, models=models_read)
        if up_to_date(args, task, out, is_folder=True):
            continue
        texts = texts or read_abstracts(args.corpus, args.fields, args.separator)
        meta = arguments | {
            "kind": kind,
            "corpus": task["inputs"][args.corpus],
            "abstracts": len(texts),
            "model": model,
            "model_sha256": task["inputs"].get(model, ""),
        }
        with parts_of(out, task) as parts:
            folder = parts / "index"
            folder.mkdir(exist_ok=True)
            meta |= build[kind](list(texts.values()), folder, args)
            (folder / "abstract_ids.json").write_text(json.dumps(list(texts)))
            (folder / "meta.json").write_text(json.dumps(meta, indent=1))
            with written(out, task) as new:
                folder.rename(new)
        print(f"{out}: {len(texts)} abstracts")
        made.append(out)
    return {"made": made}


# ---------- Graph
def nearest(vectors, k):
    """Return the k other rows that have the highest cosines with each row (rows, k)."""
    import torch
    from tqdm.auto import tqdm

    vectors = torch.nn.functional.normalize(vectors)  # float16 has changed their lengths a little
    found = []
    batches = torch.arange(len(vectors)).split(256)  # 0.4 GB with 394,269 abstracts
    for rows in tqdm(batches, "neighbours, 256 abstracts each"):
        cosines = vectors[rows] @ vectors.T
        cosines[range(len(rows)), rows] = -2  # no row is its own neighbour
        found.append(cosines.topk(k).indices.int().cpu())
    return torch.cat(found).numpy()


def graph(args):
    """Find the nearest neighbours of every abstract by cosine: exact, all against all."""
    task = task_of(args, args.index)
    if up_to_date(args, task, args.out, is_folder=True):
        return {"made": []}
    import torch

    source = Path(args.index)
    corpus = read_meta(source, task["inputs"][args.index])["corpus"]
    vectors = torch.from_numpy(np.load(source / "embeddings.npy")).float()
    neighbours = nearest(vectors.to(device_of(args)), min(args.neighbours, len(vectors) - 1))
    with written(args.out, task) as folder:
        folder.mkdir()
        np.save(folder / "neighbours.npy", neighbours)
        shutil.copy(source / "abstract_ids.json", folder)
        (folder / "meta.json").write_text(json.dumps({"kind": "graph", "corpus": corpus}))
    return {"made": [args.out], "abstracts": len(vectors)}


# ---------- Command line
# fmt: off
def add_abstracts(add):
    add("--corpus", default="{data}/corpus.jsonl", help="read the abstracts from this file")
    add("--fields", type=field_names, default="title,abstract",
        help="make the text of an abstract from these fields")
    add("--separator", default=" ", help="put this between two fields (default: a space)")
    add("--max-length", type=length, default=512,
        help="""truncate texts (with --pooling chunks: windows) at this many tokens, or at the
        model's own limit if that is lower""")
    add("--pooling", choices=("truncate", "chunks"), default="truncate", help="""dense: truncate
        long texts, or pool the vectors of overlapping windows; 01_index.py and
        recipes/train/encoder.py take the same""")
    add("--query-prompt",
        help="""dense: put this before claims, such as 'query: ' (default: the prompt in the model's
        own files, if they have one)""")
    add("--document-prompt", help="""dense: put this before abstracts (default: the prompt in the
        model's own files, if they have one)""")

def add_index(job):
    add = job.add_argument_group("inputs and outputs").add_argument
    add("--out", default="{work}/index", help="write the indexes to this folder")
    add("--indexes", nargs="+", choices=INDEX_ARGUMENTS, default=list(INDEX_ARGUMENTS),
        help="make only these indexes (default: all three)")
    add_abstracts(job.add_argument_group("texts").add_argument)
    add = job.add_argument_group("BM25").add_argument
    add("--analyser", choices=ANALYSERS, default="default", help="""default: lower case, stems, no
        stopwords, no single characters; unstemmed: the same without stems; plain: split at white
        space only; nltk: lower case, NLTK's stopwords left out; letters: like nltk, but without
        digits and single letters; words: lower case, all words, which may have - . / , inside;
        cased: like words, but not in lower case""")
    add("--language", choices=LANGUAGES, default="english",
        help="language of the analyser's stopwords and stems; for others use --analyser words")
    add("--bm25-method", choices=("lucene", "robertson", "atire", "bm25l", "bm25+"),
        default="lucene", help="""variant of BM25 (Kamphuis et al. 2020); with robertson, terms in
        more than half of the texts count nothing""")
    add("--k1", type=amount, default=1.5, help="saturation; with more, repeated terms count more")
    add("--b", type=share, default=0.75, help="length normalisation, from 0 (none) to 1 (full)")
    add("--delta", type=amount, default=0.5,
        help="""bm25l and bm25+: add this to the frequency part of each term that occurs, so that
        long texts lose less""")
    add = job.add_argument_group("models").add_argument
    add("--dense-model", default="data/models/minilm",
        help="encode by this SentenceTransformer, a folder or a name on the hub")
    add("--splade-model", default="data/models/splade-tiny",
        help="encode by this SparseEncoder, a folder or a name on the hub")
    add("--activation", choices=("log1p_relu", "relu"), default="log1p_relu",
        help="term weights of SPLADE from logits: log(1 + ReLU) as in SPLADE-v3, or ReLU alone")
    add("--dtype", choices=("auto", "fp32", "bf16", "fp16"), default="auto",
        help="precision of the models; auto takes half precision on a GPU, else fp32")
    add("--batch-size", type=count, help="""encode this many of the longest texts at once (SPLADE:
        a quarter), or more shorter ones (default: 32, on a GPU 128)""")
    add("--device", nargs="+",
        help="""encode on cpu, mps, cuda, or several, such as cuda:0 cuda:1 (default: a GPU, if
        any)""")
    add_shared(job)

def add_graph(job):
    add = job.add_argument_group("inputs and outputs").add_argument
    add("--index", default="{work}/index/dense", help="read the vectors of this dense index")
    add("--out", default="{work}/index/graph", help="write the graph to this folder")
    add("--neighbours", type=count, default=10, help="keep this many neighbours per abstract")
    add("--device", nargs=1, help="compute on this device: cpu, mps, cuda (default: a GPU, if any)")
    add_shared(job)

# fmt: on


def main():
    if sys.argv[1:2] == ["train"]:
        fail("train", "is a program of its own: python recipes/train/encoder.py")
    run_job(command_line({index: add_index, graph: add_graph}))


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


# --- parts (same in 01, 03 and 05)
def remove_parts(folder):
    """Remove a folder in OUT.parts/, and OUT.parts/ itself if only its lock is left."""
    shutil.rmtree(folder)
    if len(os.listdir(folder.parent)) == 1:
        shutil.rmtree(folder.parent)


@contextlib.contextmanager
def parts_of(out, task):
    """Yield a folder in OUT.parts/ for the unfinished work of a task, and remove it at the end.

    OUT.parts/ is locked, so a second process on the same output is refused.
    """
    parts = Path(f"{Path(out)}.parts")
    folder = parts / hashlib.sha256(json.dumps(task).encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with open(parts / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fail(parts, "another process works on it; wait for it, or give another --out")
        except OSError:
            pass  # a file system without locks, such as a mounted drive
        try:
            yield folder
        except SystemExit:  # bad input
            if not any(map(os.path.isfile, folder.rglob("*"))):  # before any work
                remove_parts(folder)
            raise
    remove_parts(folder)


# --- end of parts

if __name__ == "__main__":
    main()
