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
Writes  work/NAME/index/   one folder each, with abstract_ids.json (row to id) and meta.json:
            bm25/      postings by term, in the format of bm25s
            dense/     embeddings.npy: abstracts x dimensions, float16, unit length
            splade/    data.npy, indices.npy, indptr.npy: CSC, abstracts x vocabulary
            graph/     neighbours.npy: abstracts x k, rows of the corpus, nearest first
        work/NAME/models/encoder/
        OUT.parts/ holds finished shards and checkpoints; an interrupted run resumes from them.
Prints  one line of JSON, last on stdout

Examples
    python 01_index.py
    python 01_index.py --indexes bm25 --analyser nltk --k1 1.2 --b 0.75
    python 01_index.py --indexes dense --dense-model BAAI/bge-m3 --device cuda:0 cuda:1
    python 01_index.py graph --neighbours 10
    python 01_index.py train --loss triplet --epochs 3 --lr 5e-5
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
import ctypes
import difflib
import functools
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import re
import resource
import shlex
import shutil
import sys
import time
import unicodedata
import zlib
from array import array
from pathlib import Path

import numpy as np

LANGUAGES = ("danish dutch english french german italian norwegian portuguese russian spanish "
             "swedish turkish").split()  # with a Snowball stemmer and stopwords in bm25s
ANALYSERS = {  # a Unicode form, and arguments of bm25s.tokenize
    "default": {  # Lucene's 33 stopwords
        "normalise": "NFKC", "lower": True, "token_pattern": r"(?u)\b\w\w+\b",
        "stopwords": "english", "stemmer": "english"},
    "plain": {  # whitespace tokenisation, no normalisation: AIRwaves 2025
        "normalise": None, "lower": False, "token_pattern": r"\S+",
        "stopwords": None, "stemmer": None},
    "nltk": {  # NLTK's 179 stopwords: Ant Bridge 2025
        "normalise": "NFKC", "lower": True, "token_pattern": r"[^\W_]+",
        "stopwords": "english_plus", "stemmer": None},
}
FLAGS = {  # beside the texts and the model, these decide an index
    "bm25": ["analyser", "language", "bm25_method", "k1", "b"],
    "dense": ["pooling", "query_prompt", "document_prompt", "max_length", "dtype"],
    "splade": ["activation", "max_length", "dtype"],
}
POOLED = 16       # tokens that SPLADE pools at once on a CPU: equal weights in less time
BATCH = {"dense": 32, "splade": 8}  # texts; SPLADE's logits of 8 x 512 tokens take 0.5 GB
SHARD = 4096      # abstracts
OVERLAP = 50      # tokens that neighbouring windows share: AIRwaves 2025, section 3
ROWS = 64         # rows of the similarity matrix at a time: 0.1 GB at 394,269 abstracts
WARMUP = 0.1      # share of the steps: AIRwaves 2025, Kiepura & Lam 2025
DEV_POOL = 1_000  # unjudged abstracts that dev claims rank: epochs differ, and it is soon done
NDCG = "dev_cosine_ndcg@10"  # decides on the best epoch

# -------------------- Texts, shards, indexes
def read_abstracts(args):
    """Return {abstract_id: text} in corpus order."""
    corpus = read_corpus(args.corpus)
    fields = [field.strip() for field in args.fields.split(",")]
    for field in fields:
        values = [record[field] for record in corpus.values() if field in record]
        if not values:
            warn(args.corpus, f"no record has the field {field}")
        elif not any(values):
            warn(args.corpus, f"the field {field} is empty in all {len(values)} records")
    texts = {name: text_of(record, fields, args.separator) for name, record in corpus.items()}
    if not any(texts.values()):
        fail(args.corpus, f"no record has text in {args.fields}; check --fields")
    return texts

def unfinished(folder, count):
    """Yield the rows (a slice of count rows) of each shard that is missing or damaged."""
    from tqdm.auto import tqdm
    for start in tqdm(range(0, count, SHARD), folder.stem, unit=" shards"):
        shard = folder / str(start)
        if read_object(shard / "meta.json").get("files") != files_of(shard):
            remove(shard)
            yield slice(start, start + SHARD)

def save_shard(folder, rows, arrays):
    """Write the arrays of a shard with their checksums, whole or not at all."""
    new, shard = folder / "new", folder / str(rows.start)
    remove(new)
    new.mkdir()
    for name, values in arrays.items():
        np.save(new / name, values)
    (new / "meta.json").write_text(json.dumps({"files": files_of(new)}))
    new.rename(shard)

def join_shards(folder, count):
    """Return {name: array} of all shards. Their files are mapped: each is in memory once."""
    joined, shards = {}, [folder / str(start) for start in range(0, count, SHARD)]
    for file in shards[0].glob("*.npy"):
        parts = [np.load(shard / file.name, mmap_mode="r") for shard in shards]
        joined[file.stem] = np.concatenate(parts)
    return joined

def digest_of(meta):
    """Return the sha256 of the facts in a meta.json, which holds it as a field, too."""
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()

def complete(folder, ids, facts, arrays):
    """Write arrays, abstract_ids.json and last meta.json: facts, checksums, its own digest."""
    folder.mkdir(exist_ok=True)
    for name, values in arrays.items():
        np.save(folder / name, values)
    (folder / "abstract_ids.json").write_text(json.dumps(ids))
    meta = facts | {"files": files_of(folder)}
    meta["sha256"] = digest_of(meta)
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))

# -------------------- BM25
def analyser_of(name, language):
    """Return how texts become terms: a name, a Unicode form, arguments of bm25s.tokenize."""
    analyser = {"name": name} | ANALYSERS[name]
    if language != "english":
        for step in ("stopwords", "stemmer"):
            analyser[step] = analyser[step] and language
    return analyser

def tokenise(analyser, texts):
    """Return ({term: number}, numbers of all tokens, tokens of each text) by bm25s."""
    import bm25s
    from Stemmer import Stemmer
    options = dict(analyser)
    form, stemmer, _ = (options.pop(step) for step in ("normalise", "stemmer", "name"))
    if form:
        texts = [unicodedata.normalize(form, text) for text in texts]
    stemmer = Stemmer(stemmer) if stemmer else None
    tokens = bm25s.tokenize(texts, stemmer=stemmer, show_progress=False, **options)
    numbers = np.fromiter(itertools.chain.from_iterable(tokens.ids), np.int32)
    return tokens.vocab, numbers, [len(row) for row in tokens.ids]

def tokenise_all(analyser, texts):
    """Return (numbers of the terms of each text, {term: number}), on all cores: bm25s uses one."""
    from joblib import cpu_count
    from tqdm.auto import tqdm
    chunks = [texts[start : start + SHARD] for start in range(0, len(texts), SHARD)]
    cores = int(os.environ.get("OMP_NUM_THREADS") or cpu_count())  # Ray's limit; SLURM's
    ignore_ctrl_c = signal.signal, (signal.SIGINT, signal.SIG_IGN)
    ids, vocabulary = [], {}
    with multiprocessing.Pool(min(cores, len(chunks)), *ignore_ctrl_c) as pool:
        parts = pool.imap(functools.partial(tokenise, analyser), chunks)
        for terms, numbers, lengths in tqdm(parts, "tokenise", len(chunks), unit=" shards"):
            for term in sorted(terms):  # bm25s numbers stems in the order of a set
                vocabulary.setdefault(term, len(vocabulary))
            number_of = np.zeros(max(terms.values(), default=0) + 1, np.int32)
            for term, number in terms.items():
                number_of[number] = vocabulary[term]
            rows = np.split(number_of[numbers], np.cumsum(lengths)[:-1])
            ids += [array("i", row.tobytes()) for row in rows]  # a list takes nine times as much
    return ids, vocabulary

def index_bm25(texts, folder, args, task):
    """Save the BM25 scores of all postings (Kamphuis et al. 2020, table 1). Return facts."""
    import bm25s
    analyser = analyser_of(args.analyser, args.language)
    ids, vocabulary = tokenise_all(analyser, list(texts.values()))
    if not vocabulary:
        fail(args.corpus, f"--analyser {args.analyser} leaves no term; plain keeps all words")
    bm25 = bm25s.BM25(args.k1, args.b, method=args.bm25_method, csc_backend="scipy")
    bm25.index((ids, vocabulary), create_empty_token=False)
    bm25.save(folder, show_progress=False)
    return {"analyser": analyser, "empty": sum(not row for row in ids)}, {}

# -------------------- Dense and SPLADE
def open_encoder(load, args, dtype):
    """Return an encoder with the prompts of the flags."""
    prompts = {"query": args.query_prompt, "document": args.document_prompt}
    encoder = open_model(load, args.model, args, dtype, prompts=prompts)
    if args.document_prompt is None and not encoder.prompts["document"]:
        encoder.prompts["document"] = encoder.prompts.get("passage", "")
    return encoder

def limit_length(encoder, tokens):
    """Let an encoder read at most so many tokens. Return how many it read before."""
    length = encoder.max_seq_length or tokens
    if tokens < length < math.inf:  # static embeddings have no limit
        encoder.max_seq_length = tokens
    return length

def pool_chunks(encoder, args):
    """Let an encoder read a long text in windows, and pool their vectors. Return its settings."""
    if not getattr(encoder.tokenizer, "is_fast", False):
        fail("--pooling chunks", f"{args.model} has no fast tokenizer; use --pooling truncate")
    settings, stride = encoder[0].processing_kwargs, min(OVERLAP, encoder.max_seq_length // 2)
    windows = {"return_overflowing_tokens": True, "stride": stride}
    encoder[0].processing_kwargs = settings | {"text": settings.get("text", {}) | windows}
    encoder.set_pooling_include_prompt(True)  # only the first window begins with a prompt
    encoder.register_forward_hook(pool_windows)
    return settings

def pool_windows(encoder, _, features):
    """Pool the windows of each text to one vector: (mean + max) / 2 (AIRwaves 2025, eq. 3).

    Example: texts of 900 and 40 tokens in windows of 512 are three rows, of the texts 0, 0 and 1;
    the first vector comes from the first two rows.
    """
    import torch
    text_of_row = features["overflow_to_sample_mapping"]
    starts = (text_of_row.diff().nonzero()[:, 0] + 1).tolist()
    texts = features["sentence_embedding"].tensor_split(starts)
    pooled = [(windows.mean(0) + windows.amax(0)) / 2 for windows in texts]
    return features | {"sentence_embedding": torch.stack(pooled)}

def count_truncated(counter, encoder, inputs):
    """Add the truncated texts of a batch to counter; NaN if its tokenizer does not tell them."""
    rows = getattr(inputs[0], "encodings", None)
    truncated = sum(bool(row.overflowing) for row in rows) if rows else math.nan
    with counter:
        counter.value += truncated

def encode(encoder, names, texts, settings):
    """Return the vectors of texts (texts x dimensions), dense or sparse, checked to be finite."""
    vectors = encoder.encode_document(texts, show_progress_bar=True, **settings).float()
    bad = (~vectors.sum(dim=1).to_dense().isfinite()).nonzero()
    if len(bad):
        fail(f"abstract {names[bad[0]]}", "its vector is not finite; use --dtype fp32")
    return vectors

def arrays_of(vectors, start, args):
    """Return what a shard that begins at row start keeps of its vectors.

    Dense: unit length, half precision. SPLADE: rows, terms and weights.
    """
    import torch
    if args.kind == "dense":
        return {"embeddings": torch.nn.functional.normalize(vectors).half().cpu().numpy()}
    vectors = vectors.coalesce()
    (rows, terms), weights = vectors.indices().int().numpy(), vectors.values().numpy()
    if args.activation == "relu":
        weights = np.expm1(weights)  # undoes the logarithm of log(1 + ReLU(logit))
    return {"rows": rows + start, "terms": terms, "weights": weights}

def encode_all(encoder, texts, settings, args, task):
    """Return the arrays of all texts, made shard by shard, and how many texts are truncated."""
    start = "spawn" if len(args.device) > 1 else "fork"
    counter = multiprocessing.get_context(start).Value("d")  # all devices add to it
    if args.pooling == "chunks":
        pool_chunks(encoder, args)
    elif encoder.max_seq_length != math.inf:
        encoder.register_forward_pre_hook(functools.partial(count_truncated, counter))
    if len(args.device) > 1:
        import torch
        settings = settings | {"pool": encoder.start_multi_process_pool(args.device)}
        torch.cuda.empty_cache()  # the model has moved into the workers
    names, documents, parts = list(texts), list(texts.values()), parts_of(args.out, task, args)
    for rows in unfinished(parts, len(texts)):
        counter.value = 0
        vectors = encode(encoder, names[rows], documents[rows], settings)
        arrays = arrays_of(vectors, rows.start, args) | {"truncated": [counter.value]}
        save_shard(parts, rows, arrays)
    if "pool" in settings:
        encoder.stop_multi_process_pool(settings["pool"])
    arrays = join_shards(parts, len(texts))
    truncated = arrays.pop("truncated").sum()
    return arrays, "an unknown number" if np.isnan(truncated) else int(truncated)

def index_vectors(texts, folder, args, task):
    """Return facts and arrays: dense vectors, or weights of terms (SPLADE, Formal et al. 2021)."""
    import sentence_transformers as st
    from scipy import sparse
    load, settings = st.SentenceTransformer, {"convert_to_tensor": True}
    if args.kind == "splade":
        load, settings = st.SparseEncoder, {"save_to_cpu": True}
    settings["batch_size"] = args.batch_size or BATCH[args.kind]
    encoder = open_encoder(load, args, args.dtype)
    if args.kind == "splade" and encoder.device.type == "cpu":
        encoder[-1].chunk_size = POOLED
    limit_length(encoder, args.max_length)
    arrays, truncated = encode_all(encoder, texts, settings, args, task)
    shape = len(texts), encoder.get_embedding_dimension()
    if args.kind == "splade":
        places = arrays["rows"], arrays["terms"]
        matrix = sparse.coo_array((arrays["weights"], places), shape).tocsc()
        arrays = {"data": matrix.data, "indices": matrix.indices, "indptr": matrix.indptr}
    length = encoder.max_seq_length
    length = length if np.isfinite(length) else None  # static embeddings read all
    return {"shape": shape, "max_length": length, "truncated": truncated,
            "model_sha256": task["inputs"][args.model]}, arrays

# -------------------- Index
def flags_of(args, kind):
    """Return {flag: value} of what decides one index: another --k1 discards no dense index."""
    names = ["job", "corpus", "fields", "separator", *FLAGS[kind]]
    flags = {"kind": kind} | {name: vars(args)[name] for name in names}
    if kind != "bm25":
        flags["model"] = vars(args)[f"{kind}_model"]
    if kind == "splade":  # prompts and chunks are for the dense model
        flags |= {"query_prompt": None, "document_prompt": None, "pooling": "truncate"}
    return flags

def index(args):
    """Build the BM25, dense and SPLADE indexes that are asked for."""
    made, texts = [], {}
    for kind in args.indexes:
        flags = flags_of(args, kind)
        own = argparse.Namespace(**vars(args) | flags | {"out": f"{args.out}/{kind}"})
        models = [own.model] if kind != "bm25" else []
        task = task_of(own, args.corpus, models=models) | {"arguments": flags}
        if up_to_date(own, task, own.out):
            continue
        texts = texts or read_abstracts(args)
        build = index_bm25 if kind == "bm25" else index_vectors
        counted = "empty" if kind == "bm25" else "truncated"
        with written(own.out, task) as folder:
            facts, arrays = build(texts, folder, own, task)
            facts |= {"corpus": task["inputs"][args.corpus], "abstracts": len(texts)}
            complete(folder, list(texts), flags | facts, arrays)
        remove(f"{own.out}.parts")
        print(f"{own.out}: {len(texts)} abstracts, {facts[counted]} of them {counted}")
        made.append(own.out)
    return {"made": made} | ({"abstracts": len(texts)} if made else {})

# -------------------- Graph
def nearest(scores, k):
    """Return the places of the k best scores, best first; ties, also at the cut, in order."""
    candidates = (scores >= scores.topk(k).values[-1]).nonzero()[:, 0]
    return candidates[scores[candidates].argsort(descending=True, stable=True)][:k]

def neighbours_of(rows, corpus, k):
    """Return the k nearest neighbours of these rows (a slice) of corpus, unit vectors.

    Cosines are compared in millionths, as products of equal vectors differ in the last bits.
    """
    import torch
    neighbours = []
    for block in torch.arange(len(corpus))[rows].split(ROWS):
        cosines = (corpus[block] @ corpus.T).round(decimals=6)
        for row, scores in zip(block.tolist(), cosines):
            scores[row] = -2  # no abstract is its own neighbour
            neighbours.append(nearest(scores, k).tolist())
    return np.array(neighbours, np.int32)

def graph(args):
    """Find the nearest neighbours of every abstract by cosine: exact, all against all."""
    source, task = Path(args.index), task_of(args, args.index)
    if up_to_date(args, task, args.out):
        return {"made": []}
    import torch
    from sentence_transformers.util import get_device_name
    place = get_device_name() if args.device == ["auto"] else args.device[0]
    try:
        meta = read_object(source / "meta.json")
        if meta.pop("sha256", "") != digest_of(meta) or meta["files"] != files_of(source):
            raise ValueError("its files have changed")
        ids = json.loads((source / "abstract_ids.json").read_bytes())
        vectors = torch.from_numpy(np.load(source / "embeddings.npy")).to(place).float()
    except Exception as error:  # a file is missing or damaged, no such device
        fail(source, f"{error}; check --device, or make it again: python 01_index.py --indexes "
             f"dense --data {args.data} --work {args.work} --force")
    corpus = torch.nn.functional.normalize(vectors)  # half precision has moved their lengths
    k = min(args.neighbours, len(corpus) - 1)
    if k < 1:
        fail(source, "it has one abstract, which has no neighbours; index others")
    parts = parts_of(args.out, task, args)
    for rows in unfinished(parts, len(corpus)):
        save_shard(parts, rows, {"neighbours": neighbours_of(rows, corpus, k)})
    with written(args.out, task) as folder:
        facts = {"kind": "graph", "corpus": meta["corpus"]}
        complete(folder, ids, facts, join_shards(parts, len(corpus)))
    remove(parts)
    return {"made": [args.out], "abstracts": len(corpus), "neighbours": k}

# -------------------- Train
def dev_evaluator(paths, prompts, texts, args):
    """Return an evaluator: nDCG@10 of dev claims over judged abstracts and DEV_POOL others."""
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
    from sentence_transformers.util import cos_sim
    claims = read_claims(paths[0])
    qrels = read_table(paths[1], ["claim_id", "abstract_id", "label"],
                       claim_id=claims, abstract_id=texts, label=LABELS)
    evidence = qrels[qrels["label"] != "NEI"].groupby("claim_id")["abstract_id"].agg(set)
    if evidence.empty:
        fail(paths[1], "no evidence to evaluate on; give another --dev-split")
    drawn = np.random.default_rng(args.seed).permutation(list(texts))[:DEV_POOL]
    pool = {*drawn, *qrels["abstract_id"]}
    return InformationRetrievalEvaluator(
        claims, {name: text for name, text in texts.items() if name in pool},
        evidence.to_dict(), name="dev", write_csv=False, query_prompt=prompts["query"],
        corpus_prompt=prompts["document"], score_functions={"cosine": cos_sim})

def loss_of(encoder, args):
    from sentence_transformers.sentence_transformer import losses
    if args.loss == "triplet":  # max(0, cos(q, d-) - cos(q, d+) + margin)
        return losses.TripletLoss(encoder, losses.TripletDistanceMetric.COSINE, args.margin)
    return losses.MultipleNegativesRankingLoss(encoder, args.scale)

def train_encoder(encoder, rows, evaluator, parts, args):
    """Train on rows of texts. Return the log and the curve on dev, as fit_on_dev does."""
    import sentence_transformers as st
    from datasets import Dataset
    columns = ["claim", "positive", *(f"negative_{place}" for place in range(len(rows[0]) - 2))]
    prompts = dict.fromkeys(columns, encoder.prompts["document"])
    prompts["claim"] = encoder.prompts["query"]
    make = functools.partial(
        st.SentenceTransformerTrainer, encoder, loss=loss_of(encoder, args),
        train_dataset=Dataset.from_dict(dict(zip(columns, map(list, zip(*rows))))))
    return fit_on_dev(
        make, st.SentenceTransformerTrainingArguments, encoder, parts, args, evaluator, NDCG,
        per_device_train_batch_size=args.batch, warmup_steps=WARMUP, prompts=prompts,
        batch_sampler="batch_sampler" if args.loss == "triplet" else "no_duplicates")

def train(args):
    """Fine-tune the dense encoder on mined examples."""
    dev = dev_files(args)
    task = task_of(args, args.examples, args.corpus, args.claims, *dev, models=[args.model])
    if up_to_date(args, task, args.out):
        return {"made": []}
    texts, claims = read_abstracts(args), read_claims(args.claims)
    tuples = read_tuples(args.examples, claims, texts)
    rows, counts = tuple_rows(args.examples, tuples, args.loss == "triplet")
    from sentence_transformers import SentenceTransformer
    encoder = open_encoder(SentenceTransformer, args, "fp32")
    own_length = limit_length(encoder, args.max_length)
    own_settings = pool_chunks(encoder, args) if args.pooling == "chunks" else None
    evaluator = dev_evaluator(dev, encoder.prompts, texts, args) if dev else None
    log, curve = train_encoder(encoder, rows, evaluator, parts_of(args.out, task, args), args)
    facts = counts | {"dev_ndcg_at_10": curve}
    if encoder.max_seq_length != own_length:
        encoder.max_seq_length = own_length
    if own_settings is not None:
        encoder[0].processing_kwargs = own_settings
    with written(args.out, task, **facts) as folder:
        save_model(encoder, folder)
    remove(f"{args.out}.parts")
    return {"made": [args.out], **facts}

# -------------------- Command line
def add_texts(job):
    """Add the flags that say which texts are read, and how."""
    add = job.add_argument_group("texts").add_argument
    add("--corpus", default="{data}/corpus.jsonl", help="abstracts")
    add("--fields", default="title,abstract", help="fields that make a text, in order")
    add("--separator", default=" ", help="between two fields, as ' [SEP] '")
    add("--max-length", type=between(8, kind=int), default=512,
        help="tokens of a text; a model may read fewer")
    add("--pooling", choices=("truncate", "chunks"), default="truncate",
        help="longer texts for the dense model; chunks: windows, mean and maximum averaged")
    add("--query-prompt", help="before a claim, as 'query: ', dense (default: the model's own)")
    add("--document-prompt", help="before an abstract, dense (default: the model's own)")

def add_index(job):
    count = between(1, kind=int)
    add = job.add_argument_group("outputs").add_argument
    add("--indexes", nargs="+", choices=FLAGS, default=list(FLAGS), help="which to build")
    add("--out", default="{work}/index", help="folder of the indexes")
    add_texts(job)
    add = job.add_argument_group("BM25").add_argument
    add("--analyser", choices=ANALYSERS, default="default",
        help="default: lower case, stopwords, stems; plain: words between white space; nltk: lower "
        "case, NLTK's stopwords")
    add("--language", choices=LANGUAGES, default="english", help="of stopwords and stems")
    add("--bm25-method", choices=("lucene", "robertson"), default="lucene", help="variant of idf")
    add("--k1", type=between(1e-9), default=1.5, help="term-frequency saturation")
    add("--b", type=between(0, 1), default=0.75, help="length normalisation, 0: none")
    add = job.add_argument_group("models").add_argument
    add("--dense-model", default="data/models/minilm", help="a SentenceTransformer")
    add("--splade-model", default="data/models/splade-tiny", help="a SparseEncoder")
    add("--activation", choices=("log1p_relu", "relu"), default="log1p_relu",
        help="SPLADE: from logits to weights")
    add("--dtype", choices=("auto", "fp32", "bf16", "fp16"), default="auto",
        help="precision of the models; auto: half on a GPU, else fp32")
    add("--batch-size", type=count,
        help="texts at a time (default: 32, SPLADE 8); changes vectors by rounding only")

def add_graph(job):
    add = job.add_argument_group("inputs and outputs").add_argument
    add("--index", default="{work}/index/dense", help="dense index")
    add("--out", type=os.path.normpath, default="{work}/index/graph", help="graph folder")
    add = job.add_argument_group("method").add_argument
    add("--neighbours", type=between(1, kind=int), default=10, help="neighbours per abstract")

def add_train(job):
    number, count = between(0), between(1, kind=int)
    add = job.add_argument_group("inputs and outputs").add_argument
    add("examples", nargs="?", default="{work}/{split}/examples.jsonl",
        help="tuples of 02_retrieve.py mine --shape tuples")
    add("--claims", default="{data}/claims.{split}.tsv", help="claims of the examples")
    add("--model", default="data/models/minilm", help="a SentenceTransformer to start from")
    add("--out", type=os.path.normpath, default="{work}/models/encoder", help="model folder")
    add_texts(job)
    add = job.add_argument_group("training").add_argument
    add("--loss", choices=("triplet", "mnrl"), default="mnrl",
        help="triplet: one negative of each claim; mnrl: those of the batch, too")
    add("--margin", type=number, default=0.3, help="triplet: margin between cosines")
    add("--scale", type=number, default=20, help="mnrl: factor of the cosines")
    add("--epochs", type=number, default=2, help="passes over the examples")
    add("--lr", type=number, default=7e-6, help="learning rate, after a warm-up of 10 %% of steps")
    add("--batch-size", type=count, default=64, dest="batch", help="examples per batch")
    add("--accumulate", type=count, default=1, help="batches per optimiser step")
    add("--dev-split", default="dev", help="it chooses the best epoch; none: the last one stays")
    add("--patience", type=count, default=2, help="epochs without a gain before it stops")

def resolve(args):
    """Return the arguments as the jobs use them; nothing changes them afterwards."""
    if args.function is index:
        args.indexes = list(dict.fromkeys(args.indexes))
        if args.indexes != ["bm25"]:
            args.dtype = precision_of(args)
    if args.function is train:
        args = one_gpu(args)  # before torch sees any
        args.dtype = "auto"  # of autocast; the weights are fp32
        args.dtype = precision_of(args)
    return args

def main():
    MADE_BY["examples.jsonl"] = "02_retrieve.py mine --shape tuples"  # an encoder reads no pairs
    parser, jobs = command_line(index, graph, train)
    add_index(jobs["index"])
    add_graph(jobs["graph"])
    add_train(jobs["train"])
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

# --- texts (same in 01, 03, 04, 05 and 06)
def text_of(record, fields=("title", "abstract"), separator=" "):
    """Join the fields of a record that hold text; the items of a list are joined by commas."""
    texts = []
    for value in map(record.get, fields):
        items = value if isinstance(value, list) else [value]
        known = [str(item).strip() for item in items if item is not None and item == item]  # no NaN
        texts.append(", ".join(filter(None, known)))
    return separator.join(filter(None, texts))
# --- end of texts

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

# --- training (same in 01, 03 and 05)
def parts_of(out, task, args):
    """Return OUT.parts/ for unfinished work, emptied if it belongs to another task."""
    folder, mark = Path(f"{out}.parts"), json.dumps(task).encode()
    path = folder / "task.json"
    if args.force or not path.is_file() or path.read_bytes() != mark:
        remove(folder)
        folder.mkdir(parents=True)
        path.write_bytes(mark)
    return folder

def files_of(folder):
    """Return {name: [size, crc32]} of the files in a folder, without its meta.json."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "meta.json":
            data = np.memmap(path, mode="r") if path.stat().st_size else b""
            files[path.relative_to(folder).as_posix()] = [len(data), zlib.crc32(data)]
    return files

def newest_checkpoint(folder):
    """Return the newest whole checkpoint of a trainer, or None; torn or damaged ones go."""
    checkpoints = [path for path in folder.glob("checkpoint-*") if path.name[11:].isdecimal()]
    checkpoints.sort(key=lambda path: int(path.name[11:]))
    for path in reversed(checkpoints):
        if read_object(path / "meta.json").get("files") == files_of(path):
            return path
        remove(path)
    return None

def one_gpu(args):
    """Hide all GPUs but the first of --device: a Trainer multiplies its batch by those it sees."""
    kind, _, place = args.device[0].partition(":")
    if kind in ("auto", "cuda"):
        import torch
        place, count = int(place or 0), torch.cuda.device_count()
        seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        if args.device[0] != "auto" and place >= count:
            fail("--device", f"no {args.device[0]} among {count} GPUs")
        os.environ["CUDA_VISIBLE_DEVICES"] = seen.split(",")[place].strip()
    return argparse.Namespace(**vars(args) | {"device": [kind]})

def epochs_shown(measure):
    """Return a callback of a Trainer: one bar, its duration, one line an epoch, whole checkpoints.

    measure: the field of the log that decides on the best epoch, or None.
    """
    from transformers import ProgressCallback
    class Epochs(ProgressCallback):
        def on_step_end(self, how, state, control, **_):
            super().on_step_end(how, state, control)
            self.begun = getattr(self, "begun", (state.global_step, time.monotonic()))
            step, start = self.begun
            if state.global_step == step + 3:  # the first step is slow
                left = (time.monotonic() - start) / 3 * (state.max_steps - state.global_step)
                line = f"{state.max_steps} steps, about {left / 60:.1f} minutes without dev"
                self.training_bar.write(line, file=sys.stderr)

        def on_log(self, how, state, control, logs, **_):
            if not np.isfinite(logs.get("loss", 0)):
                fail("--lr", "the loss is not a finite number; lower it")

        def on_save(self, how, state, control, **_):
            folder = Path(how.output_dir, f"checkpoint-{state.global_step}")
            (folder / "meta.json").write_text(json.dumps({"files": files_of(folder)}))
            last = {name: value for line in state.log_history for name, value in line.items()}
            shown = [name for name in ("epoch", "loss", measure) if name in last]
            line = ", ".join(f"{name} {last[name]:.4f}" for name in shown)
            self.training_bar.write(line, file=sys.stderr)
    return Epochs()

def fit(make, arguments, model, folder, args, measure=None, **more):
    """Train with a checkpoint an epoch in folder, from the newest one on. Return the log.

    make: arguments to trainer. With a measure, the epoch that is best on dev is kept. The log is a
    list of {field: number}, without times: the same after an interruption.
    """
    import torch
    from transformers import EarlyStoppingCallback, ProgressCallback, logging
    checkpoint = newest_checkpoint(folder)
    state = read_object(checkpoint / "trainer_state.json") if checkpoint else {}
    if checkpoint and state["stateful_callbacks"]["TrainerControl"]["args"]["should_training_stop"]:
        more["max_steps"] = state["global_step"]  # killed after it had stopped early
    if measure:
        more |= {"eval_strategy": "epoch", "load_best_model_at_end": True,
                 "metric_for_best_model": measure, "greater_is_better": True}
    logging.disable_progress_bar()  # one for every file that is saved
    gpu = model.device.type == "cuda"
    bf16 = gpu and torch.cuda.is_bf16_supported(False)
    trainer = make(arguments(
        str(folder), num_train_epochs=args.epochs, learning_rate=args.lr, seed=args.seed,
        gradient_accumulation_steps=args.accumulate, bf16=bf16, fp16=gpu and not bf16,
        use_cpu=model.device.type == "cpu", dataloader_pin_memory=False, save_strategy="epoch",
        save_total_limit=2, logging_strategy="epoch", report_to="none", disable_tqdm=False,
        logging_nan_inf_filter=False, restore_callback_states_from_checkpoint=True, **more))
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(epochs_shown(measure))
    if measure:
        trainer.add_callback(EarlyStoppingCallback(args.patience))
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if best := trainer.state.best_model_checkpoint:  # the trainer keeps the last one if that fails
        safely = {"trust_remote_code": False, "model_kwargs": {"use_safetensors": True}}
        model.load_state_dict(type(model)(best, device="cpu", **safely).state_dict())
    log = [line for line in trainer.state.log_history if "train_runtime" not in line]
    return [{name: value for name, value in line.items() if "runtime" not in name
             and "per_second" not in name} for line in log]

def save_model(model, folder):
    """Save a trained model; its tokenizer as it was loaded, whatever it has truncated since."""
    backend = getattr(model.tokenizer, "backend_tokenizer", None)
    if backend:
        backend.no_truncation()
        backend.no_padding()
    model.save_pretrained(str(folder), create_model_card=False)
# --- end of training

# --- dev (same in 01 and 03)
def read_claims(path):
    """Return {claim_id: claim}."""
    return dict(read_table(path, ["claim_id", "claim"])[["claim_id", "claim"]].values)

def dev_files(args, *more):
    """Return the paths of claims and qrels of the dev split, and more; none if one is missing."""
    paths = [f"{args.data}/{name}.{args.dev_split}.tsv" for name in ("claims", "qrels")]
    absent = [path for path in (*paths, *more) if not Path(path).is_file()]
    if absent and args.dev_split != "none":
        warn("no dev evaluation", f"it needs {', '.join(absent)}")
    return [] if absent else [*paths, *more]

def fit_on_dev(make, arguments, model, folder, args, evaluator, measure, **more):
    """Train as fit does. Return the log, and nDCG@10 on dev before training and by epoch.

    evaluator: returns {measure: nDCG@10} of the model; None without a dev split.
    """
    curve = []
    if evaluator:
        curve = [evaluator(model)[measure]]
        print(f"before training: nDCG@10 on dev {curve[0]:.4f}")
    make = functools.partial(make, evaluator=evaluator)
    logged = f"eval_{measure}"
    log = fit(make, arguments, model, folder, args, logged if evaluator else None, **more)
    curve += [line[logged] for line in log if logged in line]
    return log, [round(value, 4) for value in curve]
# --- end of dev

# --- tuples (same in 01 and 03)
def width_of(counts):
    """Return how many negatives each tuple gives, given how many each has, to lose the fewest.

    All tuples of a batch have the same number. Width w keeps w negatives of each tuple that has
    as many; ties go to more tuples. Example: of 1, 3 and 3, a width of 3 keeps 6.
    """
    kept = {}
    for width in range(1, max(counts, default=0) + 1):
        kept[width] = width * sum(count >= width for count in counts)
    return max(kept, key=kept.get, default=0)

def read_tuples(path, claims, texts):
    """Return [(claim, positive, negatives)] as texts, from tuples of 02_retrieve.py mine."""
    tuples = []
    for number, line in read_lines(path):
        try:
            example = json.loads(line)
            claim, positive = claims[str(example["claim_id"])], texts[str(example["positive"])]
            negatives = [texts[str(name)] for name in example["negatives"]]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            fail(f"{path}:{number}", f"{error!r}; mine --shape tuples of these claims again")
        tuples.append((claim, positive, negatives))
    return tuples

def tuple_rows(path, tuples, one_negative):
    """Return rows of texts (claim, positive, negatives), and counts of what they leave out.

    one_negative: a tuple with several becomes several rows; else all rows have as many.
    """
    counts = [len(negatives) for _, _, negatives in tuples]
    width, rows, left_out = 1 if one_negative else width_of(counts), [], 0
    for claim, positive, negatives in tuples:
        if len(negatives) < width:
            left_out += 1
        elif one_negative:
            rows += [(claim, positive, negative) for negative in negatives]
        else:
            rows.append((claim, positive, *negatives[:width]))
    used = len(rows) * width
    unused = sum(counts) - used
    if not rows:
        fail(path, "no tuple has a negative, which --loss needs; see mine --pool and --hard")
    if left_out and one_negative:
        warn(path, f"{left_out} of {len(tuples)} tuples have no negative: left out")
    elif left_out or unused:
        warn(path, f"{left_out} of {len(tuples)} tuples and {unused} negatives are left out, as "
             "all tuples need as many negatives")
    return rows, {"examples": len(tuples), "left_out": left_out, "negatives": used,
                  "negatives_left_out": unused}
# --- end of tuples

if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__" and sys.platform == "linux":  # a worker of several devices
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: it ends with its parent
