# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "PyStemmer==3.1.0", "accelerate==1.15.0", "bm25s==0.3.16", "numpy==2.4.6", "pandas==3.1.1",
#   "sentence-transformers==6.2.0", "torch==2.13.0", "tqdm==4.70.1", "transformers==5.23.0",
# ]
# ///
"""
Index the abstracts (BM25, dense, SPLADE), and find their neighbours.

Reads   corpus.jsonl; graph: index/dense/
Writes  index/KIND/, each with abstract_ids.json (the id of each row) and meta.json:
            bm25/    postings, in the format of bm25s
            dense/   embeddings.npy: abstracts x dimensions, float16, unit length for cosines
            splade/  weights.npz: abstracts x vocabulary, a CSC matrix of scipy
            graph/   neighbours.npy: abstracts x k, rows of the corpus, nearest first
        index/KIND.parts/: finished shards, from which the same call resumes
Prints  what is made; the last line is JSON

Functions that several scripts share stand at the end, in marked blocks. recipes/train/encoder.py
fine-tunes the dense encoder.

Examples
    python 01_index.py --indexes dense --dense-model BAAI/bge-m3 --device cuda:0 cuda:1
    python 01_index.py graph --neighbours 10
"""

import argparse
import contextlib
import csv
import functools
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
import unicodedata
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

LANGUAGES = """danish dutch english french german italian norwegian portuguese russian spanish
    swedish turkish""".split()  # those with stopwords in bm25s and a Snowball stemmer
SHARD = 4096  # abstracts
SAMPLE = ["Sea ice melts.", "Ice"]  # for plain_features(); two lengths, so that one is padded
TENSORS = ("input_ids", "attention_mask", "token_type_ids")  # texts x tokens
OVERLAP = 50  # tokens that neighbouring windows share: AIRwaves 2025, section 3


# How texts become terms: a Unicode normal form, and arguments of bm25s.tokenize(). None leaves a
# step out.
STEPS = ("normalise", "lower", "token_pattern", "stopwords", "stemmer")
# A word may have - . / , inside. On SciFact, NLTK's word_tokenize() makes 99 % of the same tokens.
WORD = r"\w+(?:[-./,]\w+)*"
ANALYSERS = {
    "default": ("NFKC", True, r"(?u)\b\w\w+\b", "english", "english"),  # Lucene's stopwords
    "unstemmed": ("NFKC", True, r"(?u)\b\w\w+\b", "english", None),  # AlexUNLP-FMT 2025
    "plain": (None, False, r"\S+", None, None),  # split at white space: AIRwaves 2025
    "nltk": ("NFKC", True, r"[^\W_]+", "english_plus", None),  # Ant Bridge 2025
    "letters": ("NFKC", True, r"[^\W\d_]{2,}", "english_plus", None),  # ClimateSense 2026
    "words": ("NFKC", True, WORD, None, None),  # the baseline of ClimateCheck 2025
    "cased": ("NFKC", False, WORD, None, None),  # EFC 2025
}


# ---------- BM25
def index_bm25(texts, folder, args):
    """Save the BM25 scores of all postings (Kamphuis et al. 2020); return entries of meta.json."""
    import bm25s

    analyser = dict(zip(STEPS, ANALYSERS[args.analyser]))
    if args.language != "english":  # for English, the analyser names one of two lists of stopwords
        for step in ("lower", "stopwords", "stemmer"):
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
    if bm25.nonoccurrence_array is not None:  # bm25l and bm25+
        # The library subtracts the score of a term that does not occur, in which delta cancels out.
        bm25.scores["data"] += np.repeat(bm25.nonoccurrence_array, np.diff(bm25.scores["indptr"]))
    bm25.save(folder, show_progress=False)
    return {"analyser": analyser}


# ---------- Dense and SPLADE
def open_encoder(load, model, args, **options):
    """Open an encoder that truncates texts at --max-length, or at a lower limit of its own."""
    encoder = open_model(load, model, args, args.dtype, **options)
    if args.max_length < encoder.max_seq_length < np.inf:  # static embeddings have no limit
        encoder.max_seq_length = args.max_length
    return encoder


def open_dense_encoder(model, args):
    """Open an encoder of dense vectors with the prompts and the pooling of the flags."""
    from sentence_transformers import SentenceTransformer

    encoder = open_encoder(
        SentenceTransformer,
        model,
        args,
        prompts={"query": args.query_prompt, "document": args.document_prompt},
    )
    if args.document_prompt is None and not encoder.prompts["document"]:
        # The configurations of E5 and others call this prompt "passage".
        encoder.prompts["document"] = encoder.prompts.get("passage", "")
    if len(encoder.prompts) > 2 and not encoder.prompts["query"]:
        warn(
            model,
            f"""its prompts {[*encoder.prompts][2:]} are not used; choose by --query-prompt and
            --document-prompt""",
        )
    if not encoder.module_kwargs:  # else modules.json is there
        warn(
            model,
            f"its files name no pooling, so it is {getattr(encoder[-1], 'pooling_mode', None)}",
        )
    if args.pooling == "chunks":
        pool_chunks(encoder)
    return encoder


def pool_chunks(encoder):
    """Let an encoder read long texts in overlapping windows, and pool the vectors of a text."""
    settings = encoder[0].processing_kwargs.setdefault("text", {})  # of the tokenizer
    settings["return_overflowing_tokens"] = True
    settings["stride"] = min(OVERLAP, encoder.max_seq_length // 2)
    # Pooling without the prompt would leave out the first tokens of every window, but only the
    # first window of a text begins with the prompt.
    encoder.set_pooling_include_prompt(True)
    encoder.register_forward_hook(pool_windows)


def pool_windows(encoder, _, features):
    """Pool the windows of each text to one vector: (mean + max) / 2 (AIRwaves 2025, eq. 3)."""
    import torch

    # The text of each row: 0, 0, 1 if the first has two windows. In training, a positive and a
    # negative of each claim are in one batch, so the numbers may begin anew: 0, 0, 1, 0, 1.
    _, counts = features["overflow_to_sample_mapping"].unique_consecutive(return_counts=True)
    texts = features["sentence_embedding"].split(counts.tolist())
    pooled = [(windows.mean(0) + windows.amax(0)) / 2 for windows in texts]
    return features | {"sentence_embedding": torch.stack(pooled)}


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
# encode_ahead() makes the same vectors in less time: a thread tokenises all shards ahead, and
# batches are made from token ids.
def token_ids(encoder, texts):
    """Return the token ids of texts, each with the prompt of documents: [int64 tensor]."""
    import torch

    texts = [encoder.prompts["document"] + text for text in texts]
    coded = encoder.tokenizer.backend_tokenizer.encode_batch_fast(texts)
    return [torch.from_numpy(np.array(text.ids, np.int64)) for text in coded]


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

    ids: [int64 tensor], one for each text. template: features that the library has made of other
    texts; all but their TENSORS is taken over.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    tokenizer = encoder.tokenizer
    # True: texts come first
    padded = pad_sequence(ids, True, tokenizer.pad_token_id, tokenizer.padding_side)
    is_token = pad_sequence([torch.ones_like(row) for row in ids], True, 0, tokenizer.padding_side)
    # In the order of TENSORS; token_type_ids are 0 for single texts.
    tensors = torch.stack([padded, is_token, torch.zeros_like(padded)]).to(encoder.device)
    return template | {name: made for name, made in zip(TENSORS, tensors) if name in template}


def plain_features(encoder):
    """Return features of SAMPLE, made by the library, as a template for features_of().

    Return None if the encoder is not plain: it has no fast tokenizer, limits its active dimensions,
    or its features are not those of features_of().
    """
    tokenizer = getattr(encoder.tokenizer, "backend_tokenizer", None)
    if not tokenizer or getattr(encoder, "max_active_dims", None):
        return None
    # This call also tells the tokenizer at which length it truncates.
    template = encoder.preprocess(SAMPLE, prompt=encoder.prompts["document"], task="document")
    tokenizer.no_padding()
    made = features_of(token_ids(encoder, SAMPLE), encoder, template)
    is_same = [made[name].tolist() == template[name].tolist() for name in TENSORS if name in made]
    if all(is_same) and template.keys() <= {*TENSORS, "modality", "prompt_length"}:
        return template
    return None


def encode(batch_size, ids, encoder, template):
    """Return the vectors that encode_document() makes of texts (texts x dimensions)."""
    import torch
    from tqdm.auto import tqdm

    batches = batches_of(np.array([max(1, len(row)) for row in ids]), batch_size)
    found = []
    for rows in tqdm(batches, "batches"):
        features = features_of([ids[row] for row in rows], encoder, template)
        with torch.inference_mode():
            vectors = encoder(features, task="document")["sentence_embedding"]
        is_sparse = encoder.model_type == "SparseEncoder"
        found.append(vectors.to_sparse() if is_sparse else vectors[:, : encoder.truncate_dim])
    # The batches have another order than the texts; argsort gives the place of each text in them.
    place_of_text = torch.from_numpy(np.argsort(np.concatenate(batches)))
    return torch.cat(found).cpu().index_select(0, place_of_text)


def encode_ahead(shards, encoder, template, batch_size):
    """Yield the vectors of each shard; batches become smaller while they do not fit into memory."""
    from accelerate.utils import find_executable_batch_size

    encoder.eval()
    encode_fitting = find_executable_batch_size(encode, starting_batch_size=batch_size)
    with ThreadPoolExecutor(1) as thread:
        for ids in thread.map(functools.partial(token_ids, encoder), shards):
            yield encode_fitting(ids, encoder, template)


def save_shard(path, vectors, similarity):
    """Save sparse vectors as they are, dense ones in half precision; for cosines, of length 1."""
    from scipy import sparse
    from torch.nn.functional import normalize

    if vectors.is_sparse:
        vectors = vectors.coalesce()
        entries = (vectors.values(), vectors.indices())
        sparse.save_npz(path, sparse.coo_array(entries, vectors.shape), compressed=False)
    else:
        if similarity == "cosine":
            vectors = normalize(vectors)
        elif similarity != "dot":
            fail("--dense-model", f"it is for {similarity} distances; take one for cosines or dot")
        np.savez(path, vectors.half().numpy())


def encode_shards(encoder, texts, batch_size, args, parts):
    """Encode the shards that are not in the folder parts yet.

    Return the paths of all shards, and entries of meta.json.
    """
    commit = encoder.model_card_data.base_model_revision  # None if the model is not on the hub
    shards = {}
    for start in range(0, len(texts), SHARD):
        shards[parts / f"{start}{commit or ''}.npz"] = texts[start : start + SHARD]
    # A shard that is cut short is no zip file, as .npz files are; it is made again.
    missing = {path: shard for path, shard in shards.items() if not zipfile.is_zipfile(path)}
    pool = None
    if len(args.device or ()) > 1:
        pool = encoder.start_multi_process_pool(args.device)
        pool["input"].cancel_join_thread()  # else a dead process leaves this one waiting
    template = plain_features(encoder)
    if template and not pool:
        encoded = encode_ahead(missing.values(), encoder, template, batch_size)
    else:
        encoded = (
            encoder.encode_document(
                shard,
                batch_size=batch_size,
                show_progress_bar=True,
                convert_to_tensor=True,
                pool=pool,
            )
            for shard in missing.values()
        )
    for vectors, path in zip(encoded, missing):
        vectors = vectors.float().cpu()
        if not vectors.half().float().sum().isfinite():
            fail(args.corpus, "a vector is not finite in half precision; use --dtype fp32")
        new = parts / "new.npz"  # renamed, as a call may be killed meanwhile
        save_shard(new, vectors, encoder.similarity_fn_name)
        new.rename(path)
    if pool:
        encoder.stop_multi_process_pool(pool)
    limit = encoder.max_seq_length
    return list(shards), {
        "max_length": limit if limit < np.inf else None,  # static embeddings have none
        "model_commit": commit,
        "similarity": encoder.similarity_fn_name,
    }


def index_dense(texts, folder, args):
    """Save the embeddings of texts; return further entries of meta.json.

    folder: an empty folder beside the finished shards, which are in its parent.
    """
    encoder = open_dense_encoder(args.dense_model, args)
    shards, entries = encode_shards(encoder, texts, batch_size_of(args), args, folder.parent)
    np.save(folder / "embeddings.npy", np.concatenate([np.load(path)["arr_0"] for path in shards]))
    return entries


def index_splade(texts, folder, args):
    """Save the weights of terms in texts (Formal et al. 2021); otherwise as index_dense()."""
    from scipy import sparse
    from sentence_transformers import SparseEncoder

    encoder = open_encoder(SparseEncoder, args.splade_model, args)
    by_maximum = {"pooling_strategy": "max", "activation_function": "relu"}
    # Any other pooling, such as a sum over tokens, stays as it is.
    if by_maximum.items() <= vars(encoder[-1]).items():
        encoder[-1].forward = functools.partial(pool_logits, args.activation)
    elif args.activation == "relu":
        fail("--activation", "the model does not pool by maximum and log(1 + ReLU); leave it out")
    # A quarter, since logits take memory: 0.5 GB for 8 texts of 512 tokens.
    size = max(1, batch_size_of(args) // 4)
    shards, entries = encode_shards(encoder, texts, size, args, folder.parent)
    weights = sparse.vstack([sparse.load_npz(path) for path in shards]).tocsc()
    sparse.save_npz(folder / "weights.npz", weights, compressed=False)
    return entries


# ---------- Index
# For each kind of index: the function that makes it, and the arguments that decide it, beside the
# corpus, --fields and --separator.
INDEXES = {
    "bm25": (index_bm25, ["analyser", "language", "bm25_method", "k1", "b", "delta"]),
    "dense": (
        index_dense,
        ["dense_model", "pooling", "query_prompt", "document_prompt", "max_length", "dtype"],
    ),
    "splade": (index_splade, ["splade_model", "activation", "max_length", "dtype"]),
}


def index(args):
    """Make the BM25, dense and SPLADE indexes that are asked for."""
    tasks = {}
    for kind in args.indexes:
        build, deciding = INDEXES[kind]
        arguments = {name: vars(args)[name] for name in ("fields", "separator", *deciding)}
        model = str(arguments.get(f"{kind}_model"))  # "None" for BM25
        task = task_of(argparse.Namespace(**arguments), args.corpus, models=[model])
        if not up_to_date(args, task, f"{args.out}/{kind}", is_folder=True):
            tasks[kind] = (build, task, model)
    texts = read_abstracts(args.corpus, args.fields, args.separator or " ")
    for kind, (build, task, model) in tasks.items():
        meta = task["arguments"] | {
            "kind": kind,
            "corpus": task["inputs"][args.corpus],
            "model": model,
            "model_sha256": task["inputs"].get(model),
        }
        with parts_of(f"{args.out}/{kind}", task) as parts:
            folder = parts / "index"
            folder.mkdir(exist_ok=True)
            meta |= build(list(texts.values()), folder, args)
            (folder / "abstract_ids.json").write_text(json.dumps(list(texts)))
            (folder / "meta.json").write_text(json.dumps(meta, indent=1))
            with written(f"{args.out}/{kind}", task) as new:
                folder.rename(new)
    return {"made": [f"{args.out}/{kind}" for kind in tasks], "abstracts": len(texts)}


# ---------- Graph
def nearest(vectors, k):
    """Return the k other rows that have the highest cosines with each row (rows, k)."""
    import torch

    vectors = torch.nn.functional.normalize(vectors)  # float16 has changed their lengths a little
    found = []
    for rows in torch.arange(len(vectors)).split(256):  # 0.4 GB with 394,269 abstracts
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

    vectors = torch.from_numpy(np.load(f"{args.index}/embeddings.npy")).float()
    neighbours = nearest(vectors.to(device_of(args)), min(args.neighbours, len(vectors) - 1))
    with written(args.out, task) as folder:
        # meta.json tells of which corpus the rows are.
        shutil.copytree(args.index, folder, ignore=shutil.ignore_patterns("embeddings.npy"))
        np.save(folder / "neighbours.npy", neighbours)
    return {"made": [args.out]}


# ---------- Command line
# fmt: off
def add_abstracts(add):
    """Add the flags of texts, which recipes/train/encoder.py has, too."""
    add("--corpus", default="{data}/corpus.jsonl", help="read the abstracts from this file")
    add("--fields", default="title,abstract",
        help="make the text of an abstract from these fields")
    add("--separator",
        help="put this between two fields; in bash, $'\\n' is a line break (default: a space)")
    add("--max-length", type=count, default=512,
        help="""truncate texts (with --pooling chunks: windows) at this many tokens, or at the
        model's own limit if that is lower""")
    add("--pooling", choices=("truncate", "chunks"), default="truncate", help="""dense: truncate
        long texts, or pool the vectors of overlapping windows; train and index alike""")
    add("--query-prompt",
        help="""dense: put this before claims, such as 'query: ', in bash $'Instruct: ...\\nQuery: '
        with line breaks (default: the prompt in the model's own files, if they have one)""")
    add("--document-prompt", help="""dense: put this before abstracts, in bash $'...\\n' with line
        breaks (default: the prompt in the model's own files, if they have one)""")

def add_index(job):
    add = job.add_argument_group("inputs and outputs").add_argument
    add("--out", default="{work}/index", help="write the indexes to this folder")
    add("--indexes", nargs="+", choices=INDEXES, default=list(INDEXES),
        help="make only these indexes")
    add_abstracts(job.add_argument_group("texts").add_argument)
    add = job.add_argument_group("BM25").add_argument
    add("--analyser", choices=ANALYSERS, default="default", help="""default: lower case, stems, no
        stopwords, no single characters; unstemmed: the same without stems; plain: split at white
        space only; nltk: lower case, NLTK's stopwords left out; letters: like nltk, but without
        digits and single letters; words: lower case, all words, which may have - . / , inside;
        cased: like words, but not in lower case""")
    add("--language", choices=LANGUAGES, default="english",
        help="""language of the analyser's stopwords, stems and lower-casing; for others use
        --analyser words (Azeri: with turkish)""")
    add("--bm25-method", choices="lucene robertson atire bm25l bm25+".split(),
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
    add("--dtype", choices=("auto", *DTYPES), default="auto",
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
    run_job(command_line({index: add_index, graph: add_graph}))


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


# --- parts (same in 01, 03 and 05)
@contextlib.contextmanager
def parts_of(out, task):
    """Yield a folder for the unfinished work of a task, OUT.parts/.../, and remove it at the end.

    The same call finds there what an interrupted one has finished.
    """
    task_id = hashlib.sha256(json.dumps(task).encode()).hexdigest()[:16]
    parts = Path(f"{out}.parts", task_id)
    parts.mkdir(parents=True, exist_ok=True)
    yield parts
    shutil.rmtree(parts)
    with contextlib.suppress(OSError):  # work of other flags is there, too
        parts.parent.rmdir()


# --- end of parts

if __name__ == "__main__":
    main()
