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
import argparse
import atexit
import contextlib
import ctypes
import functools
import hashlib
import io
import json
import math
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import time
import unicodedata
import zlib
from pathlib import Path

import numpy as np

# --- constants (same in all six scripts)
LABELS = ("SUPPORTS", "REFUTES", "NEI")
RUN = ["claim_id", "abstract_id", "rank", "score"]
NEUTRAL = {"force", "out", "device", "batch_size", "concurrency"}  # no byte depends on these
# --- end of constants

LANGUAGES = ("danish dutch english french german italian norwegian portuguese russian spanish "
             "swedish turkish").split()  # with a Snowball stemmer and stopwords in bm25s
ANALYSERS = {  # normalise: a Unicode form; the others are arguments of bm25s.tokenize
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
SHARED = ["job", "corpus", "fields", "separator", "force", "device", "batch_size"]
FLAGS = {  # what else decides an index
    "bm25": ["analyser", "language", "bm25_method", "k1", "b"],
    "dense": ["pooling", "query_prompt", "document_prompt", "max_length", "dtype"],
    "splade": ["activation", "max_length", "dtype"],
}
BATCH = {"dense": 32, "splade": 8}  # texts; SPLADE's logits of 8 x 512 tokens take 0.5 GB
SHARD = 4096      # abstracts
OVERLAP = 50      # tokens that neighbouring windows share: AIRwaves 2025, section 3
ROWS = 64         # rows of the similarity matrix at a time: 0.1 GB at 394,269 abstracts
WARMUP = 0.1      # share of the steps: AIRwaves 2025, Kiepura & Lam 2025
DEV_POOL = 1_000  # unjudged abstracts that dev claims rank: enough to tell epochs apart, soon done
NDCG = "eval_dev_cosine_ndcg@10"

# -------------------- Texts
def text_of(record, fields, separator=" "):
    """Join the fields that are not empty, the items of a list by commas."""
    texts = []
    for value in map(record.get, fields):
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value or "")
        texts.append(text.strip())
    return separator.join(filter(None, texts))

def read_texts(args):
    """Return {abstract_id: text} in corpus order."""
    corpus = read_corpus(args.corpus)
    fields = [field.strip() for field in args.fields.split(",")]
    for field in fields:
        values = [record[field] for record in corpus.values() if field in record]
        if not values:
            print(f"warning: {args.corpus}: no record has the field {field}", file=sys.stderr)
        elif not any(values):
            print(f"warning: {args.corpus}: {field} is empty in all records", file=sys.stderr)
    texts = {name: text_of(record, fields, args.separator) for name, record in corpus.items()}
    if not any(texts.values()):
        fail(args.corpus, f"no record has text in {args.fields}; check --fields")
    return texts

# -------------------- Folders of arrays: shards and indexes
def checksums(folder):
    """Return {name: [bytes, crc32]} of the files in a folder, without meta.json."""
    files = {}
    for path in sorted(folder.iterdir()):
        if path.name != "meta.json":
            data = np.memmap(path, mode="r")
            files[path.name] = [len(data), zlib.crc32(data)]
    return files

def digest_of(meta):
    """Return the sha256 of meta.json as a dictionary, without its field sha256."""
    facts = {name: value for name, value in meta.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

def complete(folder, facts, **arrays):
    """Write arrays, and last meta.json: facts, checksums of all files, and its own digest."""
    folder.mkdir(exist_ok=True)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    meta = facts | {"files": checksums(folder)}
    meta["sha256"] = digest_of(meta)
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))

def read_meta(folder):
    """Return the meta.json of a folder; ValueError or OSError if anything in it has changed."""
    try:
        meta = json.loads((folder / "meta.json").read_bytes())
    except RecursionError as error:
        raise ValueError("meta.json is nested too deep") from error
    if not isinstance(meta, dict) or meta.get("sha256") != digest_of(meta):
        raise ValueError("meta.json has changed")
    if meta.get("files") != checksums(folder):
        raise ValueError("its files have changed")
    return meta

def unfinished(folder, count):
    """Yield the rows (a slice of count rows) of each shard that is not whole in folder."""
    from tqdm.auto import tqdm
    for start in tqdm(range(0, count, SHARD), folder.stem, unit=" shards"):
        try:
            read_meta(folder / str(start))
        except (OSError, ValueError):  # not there, or damaged
            remove(folder / str(start))
            yield slice(start, start + SHARD)

def save_shard(folder, rows, **arrays):
    """Write a shard, whole or not at all, before the next one begins."""
    new, shard = folder / "new", folder / str(rows.start)
    remove(new)
    complete(new, {}, **arrays)
    new.rename(shard)

def join_shards(folder, count):
    """Return {name: array} of all shards. Their files are mapped: each is in memory once."""
    joined = {}
    for file in folder.glob("0/*.npy"):
        shards = [folder / str(start) for start in range(0, count, SHARD)]
        parts = [np.load(shard / file.name, mmap_mode="r") for shard in shards]
        joined[file.stem] = np.concatenate(parts)
    return joined

# -------------------- BM25
def analyser_of(name, language):
    """Return how texts become terms: a name, a Unicode form, arguments of bm25s.tokenize."""
    analyser = {"name": name} | ANALYSERS[name]
    if language != "english":
        for step in ("stopwords", "stemmer"):
            analyser[step] = analyser[step] and language
    return analyser

def tokenise(analyser, texts):
    """Return (ids, vocab) of bm25s: numbers of the terms of each text, {term: number}."""
    import bm25s
    from Stemmer import Stemmer
    if analyser["normalise"]:
        texts = [unicodedata.normalize(analyser["normalise"], text) for text in texts]
    return bm25s.tokenize(
        texts, lower=analyser["lower"], token_pattern=analyser["token_pattern"],
        stopwords=analyser["stopwords"], show_progress=False,
        stemmer=Stemmer(analyser["stemmer"]) if analyser["stemmer"] else None)

def tokenise_all(analyser, texts):
    """Do the work of tokenise on all cores, which bm25s does on one."""
    from joblib import cpu_count
    from tqdm.auto import tqdm
    chunks = [texts[start : start + SHARD] for start in range(0, len(texts), SHARD)]
    cores = int(os.environ.get("OMP_NUM_THREADS") or cpu_count())  # Ray's limit; SLURM's
    ignore_ctrl_c = signal.signal, (signal.SIGINT, signal.SIG_IGN)
    ids, vocabulary = [], {}
    with multiprocessing.Pool(min(cores, len(chunks)), *ignore_ctrl_c) as pool:
        parts = pool.imap(functools.partial(tokenise, analyser), chunks)
        for part in tqdm(parts, "tokenise", len(chunks), unit=" shards"):
            for term in sorted(part.vocab):  # bm25s numbers stems in the order of a set
                vocabulary.setdefault(term, len(vocabulary))
            number_of = {number: vocabulary[term] for term, number in part.vocab.items()}
            for row in part.ids:
                ids.append([number_of[number] for number in row])
    return ids, vocabulary

def index_bm25(texts, folder, args, task):
    """Save the BM25 scores of all postings (Kamphuis et al. 2020, table 1). Return facts."""
    import bm25s
    analyser = analyser_of(args.analyser, args.language)
    ids, vocabulary = tokenise_all(analyser, list(texts.values()))
    if not vocabulary:
        fail(args.corpus, f"no term is left by --analyser {args.analyser}; plain keeps all words")
    bm25 = bm25s.BM25(args.k1, args.b, method=args.bm25_method, csc_backend="scipy")
    bm25.index((ids, vocabulary), create_empty_token=False)
    bm25.save(folder, show_progress=False)
    return {"analyser": analyser, "empty": ids.count([])}, {}

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
    if length > tokens and length != math.inf:  # static embeddings have no limit
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
    """Before a batch is encoded, add its truncated texts; NaN if its tokenizer does not tell."""
    rows = getattr(inputs[0], "encodings", None)
    truncated = sum(bool(row.overflowing) for row in rows) if rows else math.nan
    with counter:
        counter.value += truncated

def dense_arrays(vectors, rows, args):
    """Return vectors of unit length in half precision."""
    import torch
    return {"embeddings": torch.nn.functional.normalize(vectors).half().cpu().numpy()}

def splade_arrays(vectors, rows, args):
    """Return rows, terms and weights of a sparse tensor (texts x vocabulary), and its width."""
    vectors = vectors.coalesce()
    (places, terms), weights = vectors.indices().int().numpy(), vectors.values().numpy()
    if args.activation == "relu":
        weights = np.expm1(weights)  # undoes the logarithm of log(1 + ReLU(logit))
    return {"rows": places + rows.start, "terms": terms, "weights": weights,
            "width": [vectors.shape[1]]}

def encode(encoder, names, texts, settings):
    """Return the vectors of texts (texts x dimensions), dense or sparse, checked to be finite."""
    vectors = encoder.encode_document(texts, show_progress_bar=True, **settings).float()
    bad = (~vectors.sum(dim=1).to_dense().isfinite()).nonzero()
    if len(bad):
        fail(f"abstract {names[bad[0]]}", "its vector is not finite; use --dtype fp32")
    return vectors

def index_vectors(texts, folder, args, task):
    """Return facts and arrays: dense vectors, or weights of terms (SPLADE, Formal et al. 2021)."""
    import sentence_transformers as st
    import torch
    from scipy import sparse
    settings = {"batch_size": args.batch_size or BATCH[args.kind]}
    if args.kind == "dense":
        load, arrays_of = st.SentenceTransformer, dense_arrays
        settings["convert_to_tensor"] = True
    else:
        load, arrays_of = st.SparseEncoder, splade_arrays
        settings["save_to_cpu"] = True
    encoder = open_encoder(load, args, args.dtype)
    limit_length(encoder, args.max_length)
    start = "spawn" if len(args.device) > 1 else "fork"
    truncated = multiprocessing.get_context(start).Value("d")  # all devices add to it
    if args.pooling == "chunks":
        pool_chunks(encoder, args)
    elif encoder.max_seq_length != math.inf:
        encoder.register_forward_pre_hook(functools.partial(count_truncated, truncated))
    if len(args.device) > 1:
        settings["pool"] = encoder.start_multi_process_pool(args.device)
        torch.cuda.empty_cache()  # the model has moved into the workers
    names, documents, parts = list(texts), list(texts.values()), parts_of(args.out, task, args)
    for rows in unfinished(parts, len(texts)):
        truncated.value = 0
        vectors = encode(encoder, names[rows], documents[rows], settings)
        arrays = arrays_of(vectors, rows, args)
        save_shard(parts, rows, truncated=[truncated.value], **arrays)
    if "pool" in settings:
        encoder.stop_multi_process_pool(settings["pool"])
    arrays = join_shards(parts, len(texts))
    count = arrays.pop("truncated").sum()
    facts = {"max_length": encoder.max_seq_length,
             "truncated": "an unknown number" if np.isnan(count) else int(count),
             "model_sha256": task["inputs"][str(Path(args.model))]}
    if args.kind == "dense":
        return facts | {"shape": arrays["embeddings"].shape}, arrays
    shape, places = (len(texts), int(arrays["width"][0])), (arrays["rows"], arrays["terms"])
    matrix = sparse.coo_array((arrays["weights"], places), shape).tocsc()
    arrays = {"data": matrix.data, "indices": matrix.indices, "indptr": matrix.indptr}
    return facts | {"shape": shape}, arrays

# -------------------- Neighbours
def nearest(scores, k):
    """Return the columns of the k best scores, best first; ties, also at the cut, in order."""
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

# -------------------- Training
def read_examples(path, claims, texts):
    """Return [(claim, positive, negatives)] as texts, from tuples of 02_retrieve.py mine."""
    examples = []
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                example = json.loads(line)
                claim, positive = claims[example["claim_id"]], texts[example["positive"]]
                negatives = [texts[name] for name in example["negatives"]]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                fail(f"{path}:{number}", f"{error!r}; mine --shape tuples of these claims again")
            examples.append((claim, positive, negatives))
    return examples

def width_of(counts):
    """Return how many negatives each tuple gives, given how many each has, to lose the fewest.

    All tuples of a batch have the same number. Width w keeps w negatives of each tuple that has
    as many; ties go to more tuples. Example: of 1, 3 and 3, a width of 3 keeps 6.
    """
    kept = {}
    for width in range(1, max(counts, default=0) + 1):
        kept[width] = width * sum(count >= width for count in counts)
    return max(kept, key=kept.get, default=0)

def training_rows(examples, loss):
    """Return (rows of texts: claim, positive, negatives; counts of what is left out).

    The triplet loss takes one negative: a tuple with several becomes several rows.
    """
    counts = [len(negatives) for _, _, negatives in examples]
    width = 1 if loss == "triplet" else width_of(counts)
    rows, kept = [], 0
    for claim, positive, negatives in examples:
        kept += len(negatives) >= width
        if loss == "triplet":
            rows += [(claim, positive, negative) for negative in negatives]
        elif len(negatives) >= width:
            rows.append((claim, positive, *negatives[:width]))
    used = len(rows) * width
    return rows, {"examples": len(examples), "left_out": len(examples) - kept,
                  "negatives": used, "negatives_left_out": sum(counts) - used}

def dev_evaluator(paths, prompts, texts, args):
    """Return an evaluator: nDCG@10 of dev claims over judged abstracts and DEV_POOL others."""
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
    from sentence_transformers.util import cos_sim
    claims = read_table(paths[0], ["claim_id", "claim"]).set_index("claim_id")["claim"]
    qrels = read_table(paths[1], ["claim_id", "abstract_id", "label"],
                       claim_id=claims.index, abstract_id=texts, label=LABELS)
    evidence = qrels[qrels["label"] != "NEI"].groupby("claim_id")["abstract_id"].agg(set)
    if evidence.empty:
        fail(paths[1], "no evidence to evaluate on; give another --dev-split")
    drawn = np.random.default_rng(args.seed).permutation(list(texts))[:DEV_POOL]
    pool = {*drawn, *qrels["abstract_id"]}
    return InformationRetrievalEvaluator(
        claims.to_dict(), {name: text for name, text in texts.items() if name in pool},
        evidence.to_dict(), name="dev", write_csv=False, query_prompt=prompts["query"],
        corpus_prompt=prompts["document"], score_functions={"cosine": cos_sim})

def loss_of(encoder, args):
    from sentence_transformers.sentence_transformer import losses
    if args.loss == "triplet":  # max(0, cos(q, d-) - cos(q, d+) + margin)
        return losses.TripletLoss(encoder, losses.TripletDistanceMetric.COSINE, args.margin)
    if args.loss == "mnrl":
        return losses.MultipleNegativesRankingLoss(encoder, args.scale)
    return losses.CachedMultipleNegativesRankingLoss(encoder, args.scale, mini_batch_size=16)

# -------------------- Jobs
def flags_of(args, kind):
    """Return the arguments that decide one index: another --k1 must not discard a dense index."""
    flags = argparse.Namespace(**{name: vars(args)[name] for name in SHARED + FLAGS[kind]})
    flags.kind, flags.out = kind, f"{args.out}/{kind}"
    if kind != "bm25":
        flags.model = vars(args)[f"{kind}_model"]
    if kind == "splade":  # prompts and windows are the dense encoder's
        flags.query_prompt, flags.document_prompt, flags.pooling = None, None, "truncate"
    return flags

def index(args):
    """Build the indexes that are asked for and not up to date."""
    made, texts = [], {}
    for kind in dict.fromkeys(args.indexes):
        flags = flags_of(args, kind)
        task = task_of(flags, args.corpus, models=[flags.model] if kind != "bm25" else [])
        if up_to_date(flags, task, flags.out):
            continue
        texts = texts or read_texts(args)
        with written(flags.out, task) as folder:
            build = index_bm25 if kind == "bm25" else index_vectors
            facts, arrays = build(texts, folder, flags, task)
            facts |= {"corpus": task["inputs"][str(Path(args.corpus))], "abstracts": len(texts)}
            folder.mkdir(exist_ok=True)
            (folder / "abstract_ids.json").write_text(json.dumps(list(texts)))
            complete(folder, task["arguments"] | facts, **arrays)
        remove(f"{flags.out}.parts")
        few = f"{facts['empty']} without a term" if kind == "bm25" else (
            f"{facts['truncated']} truncated")
        print(f"{flags.out}: {len(texts)} abstracts, {few}")
        made.append(flags.out)
    return {"made": made, "abstracts": len(texts)}

def graph(args):
    """Find the nearest neighbours of every abstract by cosine: exact, all against all."""
    source, task = Path(args.index), task_of(args, args.index)
    if up_to_date(args, task, args.out):
        return {"made": []}
    import torch
    from sentence_transformers.util import get_device_name
    device = get_device_name() if args.device == ["auto"] else args.device[0]
    try:
        meta = read_meta(source)
        names = (source / "abstract_ids.json").read_text()
        vectors = torch.from_numpy(np.load(source / "embeddings.npy")).to(device).float()
    except Exception as error:  # a file is missing or damaged, no such device
        fail(source, f"{error}; check --device, or run 01_index.py --indexes dense --force")
    corpus = torch.nn.functional.normalize(vectors)  # half precision has moved them
    k = min(args.neighbours, len(corpus) - 1)
    if k < 1:
        fail(source, "an abstract alone has no neighbours; index more")
    parts = parts_of(args.out, task, args)
    with written(args.out, task) as folder:
        for rows in unfinished(parts, len(corpus)):
            save_shard(parts, rows, neighbours=neighbours_of(rows, corpus, k))
        arrays = join_shards(parts, len(corpus))
        folder.mkdir()
        (folder / "abstract_ids.json").write_text(names)
        complete(folder, {"kind": "graph", "corpus": meta["corpus"]}, **arrays)
    remove(f"{args.out}.parts")
    return {"made": [args.out], "abstracts": len(corpus), "neighbours": k}

def train(args):
    """Fine-tune the dense encoder on mined examples."""
    if (args.pooling, args.loss) == ("chunks", "cached-mnrl"):
        fail("--loss cached-mnrl", "cannot pool chunks; use mnrl")
    dev = [f"{args.data}/{name}.{args.dev_split}.tsv" for name in ("claims", "qrels")]
    if not all(map(os.path.exists, dev)):
        print(f"warning: no dev evaluation without {' and '.join(dev)}", file=sys.stderr)
        dev = []
    task = task_of(args, args.examples, args.corpus, args.claims, *dev, models=[args.model])
    if up_to_date(args, task, args.out):
        return {"made": []}
    texts, claims = read_texts(args), read_table(args.claims, ["claim_id", "claim"])
    claims = dict(zip(claims["claim_id"], claims["claim"]))
    rows, counts = training_rows(read_examples(args.examples, claims, texts), args.loss)
    if not rows:
        fail(args.examples, f"nothing for --loss {args.loss} to train on; mine other examples")
    if counts["left_out"] or counts["negatives_left_out"]:
        print(f"warning: {args.examples}: {counts['left_out']} of {counts['examples']} tuples and "
              f"{counts['negatives_left_out']} negatives are left out, as all tuples need as many "
              f"negatives; {counts['negatives']} are used", file=sys.stderr)
    one_gpu(args)
    import sentence_transformers as st
    from datasets import Dataset
    encoder = open_encoder(st.SentenceTransformer, args, "fp32")
    own_length, settings = limit_length(encoder, args.max_length), None
    if args.pooling == "chunks":
        settings = pool_chunks(encoder, args)
    prompts, curve, evaluator = encoder.prompts, [], None
    if dev:
        evaluator = dev_evaluator(dev, prompts, texts, args)
        curve.append(evaluator(encoder)[NDCG.removeprefix("eval_")])
        print(f"before training: nDCG@10 on dev {curve[0]:.4f}")
    columns = ["claim", "positive", *map("negative_{}".format, range(1, len(rows[0]) - 1))]
    make = functools.partial(
        st.SentenceTransformerTrainer, encoder, loss=loss_of(encoder, args), evaluator=evaluator,
        train_dataset=Dataset.from_dict(dict(zip(columns, map(list, zip(*rows))))))
    log = fit(make, st.SentenceTransformerTrainingArguments, encoder,
              parts_of(args.out, task, args), args, NDCG if dev else None,
              per_device_train_batch_size=args.batch, warmup_steps=WARMUP,
              batch_sampler="batch_sampler" if args.loss == "triplet" else "no_duplicates",
              prompts=dict.fromkeys(columns, prompts["document"]) | {"claim": prompts["query"]})
    curve += [line[NDCG] for line in log if NDCG in line]
    facts = counts | {"dev_ndcg_at_10": [round(value, 4) for value in curve]}
    if encoder.max_seq_length != own_length:
        encoder.max_seq_length = own_length
    if settings is not None:
        encoder[0].processing_kwargs = settings
    with written(args.out, task, **facts) as folder:
        encoder.save_pretrained(str(folder), create_model_card=False)
    remove(f"{args.out}.parts")
    return {"made": [args.out], **facts}

# -------------------- Main
def main():
    job, parser, shared, words = command_line("index", "graph", "train")
    add, data, work = parser.add_argument, shared.data, shared.work
    number, count = between(0), between(1, kind=int)
    if job == "graph":
        add("--index", default=f"{work}/index/dense", help="the dense index")
        add("--out", type=os.path.normpath, default=f"{work}/index/graph", help="graph folder")
        add("--neighbours", type=count, default=10, help="neighbours per abstract")
    else:
        add("--corpus", default=f"{data}/corpus.jsonl", help="the abstracts")
        add("--fields", default="title,abstract", help="fields of a text, in order")
        add("--separator", default=" ", help="between two fields, as ' [SEP] '")
        add("--max-length", type=between(8, kind=int), default=512,
            help="tokens; a model may read fewer")
        add("--pooling", choices=("truncate", "chunks"), default="truncate",
            help="of long texts; chunks: overlapping windows, mean and max averaged")
        add("--query-prompt", help="before a claim, as 'query: '; default: the model's own")
        add("--document-prompt", help="before an abstract; default: the model's own")
    if job == "index":
        add("--out", default=f"{work}/index", help="folder of the indexes")
        add("--indexes", nargs="+", choices=FLAGS, default=list(FLAGS), help="which to build")
        add("--analyser", choices=ANALYSERS, default="default", help="tokenisation for BM25")
        add("--language", choices=LANGUAGES, default="english", help="of stopwords and stems")
        add("--bm25-method", choices=("lucene", "robertson"), default="lucene",
            help="variant of BM25")
        add("--k1", type=between(1e-9), default=1.5, help="BM25: term-frequency saturation")
        add("--b", type=between(0, 1), default=0.75, help="BM25: length normalisation")
        add("--dense-model", default="data/models/minilm", help="a SentenceTransformer")
        add("--splade-model", default="data/models/splade-tiny", help="a SparseEncoder")
        add("--activation", choices=("log1p_relu", "relu"), default="log1p_relu",
            help="SPLADE: from logits to weights")
        add("--batch-size", type=count, help="texts at a time; default: 32, SPLADE 8")
        add("--dtype", choices=("auto", "fp32", "bf16", "fp16"), default="auto",
            help="auto: half precision on a GPU")
    if job == "train":
        add("examples", nargs="?", default=f"{work}/{shared.split}/examples.jsonl",
            help="tuples of 02_retrieve.py mine")
        add("--claims", default=f"{data}/claims.{shared.split}.tsv", help="the claims")
        add("--model", default="data/models/minilm", help="a SentenceTransformer to start from")
        add("--out", type=os.path.normpath, default=f"{work}/models/encoder", help="model folder")
        add("--loss", choices=("triplet", "mnrl", "cached-mnrl"), default="mnrl",
            help="mnrl: in-batch negatives")
        add("--margin", type=number, default=0.3, help="triplet: margin of the cosines")
        add("--scale", type=number, default=20, help="mnrl: factor of the cosines")
        add("--epochs", type=number, default=2, help="passes over the examples")
        add("--lr", type=number, default=7e-6, help="learning rate")
        add("--batch-size", type=count, default=64, dest="batch", help="examples at a time")
        add("--accumulate", type=count, default=1, help="batches per optimiser step")
        add("--dev-split", default="dev", help="dev split; the epoch that is best on it is kept")
        add("--patience", type=count, default=2, help="epochs without a gain before stopping")
    finish({"index": index, "graph": graph, "train": train}[job], parser.parse_args(words))

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

# --- training (same in 01, 03 and 05)
def parts_of(out, task, args):
    """Return OUT.parts/ for unfinished work, emptied if it belongs to another task."""
    folder, mark = Path(f"{out}.parts"), json.dumps(task)
    path = folder / "task.json"
    if args.force or not path.is_file() or path.read_text(encoding="utf-8") != mark:
        remove(folder)
        folder.mkdir(parents=True)
        path.write_text(mark, encoding="utf-8")
    return folder

def one_gpu(args):
    """Hide all GPUs but the first of --device: a Trainer multiplies its batch by those it sees."""
    kind, _, place = args.device[0].partition(":")
    if kind in ("auto", "cuda"):
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")
        if place and place not in map(str, range(len(seen))):
            fail("--device", f"no {args.device[0]} among GPUs {', '.join(seen)}")
        os.environ["CUDA_VISIBLE_DEVICES"], args.device = seen[int(place or 0)], [kind]

def fit(make, arguments, model, folder, args, measure=None, **more):
    """Train with a checkpoint an epoch in folder, from the newest one on. Return the log.

    make: arguments to trainer. With a measure, the epoch that is best on dev is kept.
    """
    import torch
    from transformers import EarlyStoppingCallback, ProgressCallback, logging
    class Epochs(ProgressCallback):  # one bar, and one line an epoch
        def on_log(self, how, state, control, logs, **_):
            if not np.isfinite(logs.get("loss", 0)):
                fail("--lr", "the loss is not a finite number; lower it")

        def on_save(self, how, state, control, **_):
            last = {name: value for line in state.log_history for name, value in line.items()}
            shown = [name for name in ("epoch", "loss", measure) if name in last]
            line = ", ".join(f"{name} {last[name]:.4f}" for name in shown)
            self.training_bar.write(line, file=sys.stderr)

    checkpoint, state = None, {}
    for path in sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name[11:])):
        try:
            state, checkpoint = json.loads((path / "trainer_state.json").read_bytes()), str(path)
        except (OSError, ValueError):
            remove(path)  # torn: its state is written last
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
    trainer.add_callback(Epochs)
    if measure:
        trainer.add_callback(EarlyStoppingCallback(args.patience))
    trainer.train(resume_from_checkpoint=checkpoint)
    if best := trainer.state.best_model_checkpoint:  # the trainer keeps the last one if that fails
        how = {"trust_remote_code": False, "model_kwargs": {"use_safetensors": True}}
        model.load_state_dict(type(model)(best, device="cpu", **how).state_dict())
    return trainer.state.log_history
# --- end of training

if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__" and sys.platform == "linux":  # a worker of several devices
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: it ends with its parent
