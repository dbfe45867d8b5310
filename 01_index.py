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
            graph/     neighbours.npy, similarities.npy: abstracts x k, nearest first
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
from pathlib import Path

import numpy as np

# --- constants (same in all six scripts)
LABELS = ("SUPPORTS", "REFUTES", "NEI")
RUN = ["claim_id", "abstract_id", "rank", "score"]
NEUTRAL = {"force", "out", "device", "batch_size", "concurrency"}  # no byte depends on these
# --- end of constants

LANGUAGES = ("danish dutch english french german italian norwegian portuguese russian spanish "
             "swedish turkish").split()  # with a Snowball stemmer and stopwords in bm25s
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
OVERLAP = 50   # tokens that neighbouring windows share: AIRwaves 2025, section 3
ROWS = 64      # rows of the similarity matrix at a time: 0.6 GB at 394,269 abstracts
WARMUP = 0.1   # share of the steps: AIRwaves 2025, Kiepura & Lam 2025
DEV_POOL = 10_000  # abstracts that dev claims rank beside the judged ones
NDCG = "eval_dev_cosine_ndcg@10"

# -------------------- Texts, shards, folders
def text_of(record, fields, separator=" "):
    """Join the fields that are not empty, the items of a list by commas."""
    texts = []
    for value in map(record.get, fields):
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value or "")
        texts.append(text.strip())
    return separator.join(filter(None, texts))

def read_texts(args):
    """Return {abstract_id: text} in corpus order."""
    fields, corpus = args.fields.replace(", ", ",").split(","), read_corpus(args.corpus)
    for field in fields:
        if not any(record.get(field) for record in corpus.values()):
            print(f"warning: {args.corpus}: no record has the field {field}", file=sys.stderr)
    texts = {name: text_of(record, fields, args.separator) for name, record in corpus.items()}
    if not any(texts.values()):
        fail(args.corpus, f"no record has text in {args.fields}; check --fields")
    return texts

def shards(args, task, count, make):
    """Return {name: array} of count rows, made shard by shard: make(rows), rows is a slice.

    A shard is a folder, written before the next one begins; a restart reads finished shards.
    """
    from tqdm.auto import tqdm
    folder, starts, joined = parts_of(args.out, task, args), range(0, count, SHARD), {}
    for start in tqdm(starts, Path(args.out).name, unit=" shards"):
        shard, new = folder / str(start), folder / "new"
        if not shard.exists():
            remove(new)
            new.mkdir()
            for name, array in make(slice(start, start + SHARD)).items():
                np.save(new / name, array)
            new.rename(shard)
    for file in (folder / "0").iterdir():
        parts = [np.load(folder / str(start) / file.name, mmap_mode="r") for start in starts]
        joined[file.stem] = np.concatenate(parts)  # mapped, so in memory once
    return joined

def files_of(folder):
    """Return {name: [size, crc32]} of the files of an index, without meta.json."""
    files = {}
    for path in sorted(folder.iterdir()):
        if path.name != "meta.json":
            data = np.memmap(path, mode="r")
            files[path.name] = [len(data), zlib.crc32(data)]
    return files

def complete(folder, names, facts, **arrays):
    """Write the arrays of an index, its abstract_ids.json and its meta.json."""
    folder.mkdir(exist_ok=True)
    for name, array in arrays.items():
        np.save(folder / name, array)
    (folder / "abstract_ids.json").write_text(json.dumps(names))
    (folder / "meta.json").write_text(json.dumps(facts | {"files": files_of(folder)}, indent=1))

# -------------------- BM25
def analyser_of(name, language):
    """Return the arguments of bm25s.tokenize, with the stemmer by name."""
    keys = "lower", "token_pattern", "stopwords", "stemmer"
    how = {"name": name} | dict(zip(keys, ANALYSERS[name]))
    if language != "english":
        how |= {key: language for key in keys[2:] if how[key]}
    return how

def tokenise(analyser, texts):
    """Return (terms, token ids of all texts, tokens of each text) by bm25s."""
    import bm25s
    from Stemmer import Stemmer
    _, *how, stemmer = analyser.values()
    ids, terms = bm25s.tokenize(texts, *how, stemmer and Stemmer(stemmer), show_progress=False)
    tokens = np.fromiter(itertools.chain.from_iterable(ids), np.int32)
    return list(terms), tokens, [len(row) for row in ids]

def count_terms(analyser, texts):
    """Return ({term: column}, counts: CSC, texts x terms). By all cores."""
    from joblib import cpu_count
    from scipy import sparse
    from tqdm.auto import tqdm
    chunks = [texts[start : start + SHARD] for start in range(0, len(texts), SHARD)]
    vocabulary, tokens, ends = {}, [], [0]
    cores = int(os.environ.get("OMP_NUM_THREADS") or cpu_count())  # Ray's limit; SLURM's
    quiet = signal.signal, (signal.SIGINT, signal.SIG_IGN)
    with multiprocessing.Pool(min(cores, len(chunks)), *quiet) as pool:
        found = pool.imap(functools.partial(tokenise, analyser), chunks)
        for terms, ids, lengths in tqdm(found, "tokenise", len(chunks), unit=" shards"):
            for term in sorted(terms):  # bm25s numbers stems in the order of a set
                vocabulary.setdefault(term, len(vocabulary))
            tokens.append(np.array([vocabulary[term] for term in terms], np.int32)[ids])
            ends.extend(ends[-1] + np.cumsum(lengths))
    tokens = np.concatenate(tokens)
    parts = np.ones(len(tokens), np.int32), tokens, np.array(ends, np.int32)
    counts = sparse.csr_array(parts, (len(texts), len(vocabulary))).tocsc()
    counts.sum_duplicates()
    return vocabulary, counts

def bm25_scores(counts, k1, b, method):
    """Return BM25 scores of counts (CSC, texts x terms) as bm25s has them, in a tenth of its time.

    Kamphuis et al. 2020, table 1: Lucene's exact variant, or Robertson's with idf at least 0.
    """
    texts, frequency, lengths = counts.shape[0], np.diff(counts.indptr), counts.sum(axis=1)
    odds = (texts - frequency + 0.5) / (frequency + 0.5)
    idf = np.log(1 + odds if method == "lucene" else np.maximum(odds, 1)).astype(np.float32)
    norm = k1 * (1 - b + b * lengths / lengths.mean())
    scores = counts.data / (counts.data + norm[counts.indices])
    return (np.repeat(idf, frequency) * scores).astype(np.float32)

def index_bm25(texts, folder, args, task):
    """Save BM25 postings (Robertson & Zaragoza 2009)."""
    import bm25s
    analyser, method = analyser_of(args.analyser, args.language), args.bm25_method
    vocabulary, counts = count_terms(analyser, list(texts.values()))
    bm25 = bm25s.BM25(args.k1, args.b, method=method)
    bm25.vocab_dict, bm25.nonoccurrence_array = vocabulary, None
    bm25.scores = {"data": bm25_scores(counts, args.k1, args.b, method), "num_docs": len(texts),
                   "indices": counts.indices, "indptr": counts.indptr}
    bm25.save(folder, show_progress=False)
    return {"analyser": analyser, "empty": int(sum(counts.sum(axis=1) == 0))}, {}

# -------------------- Dense and SPLADE
def open_encoder(load, args, dtype):
    """Return an encoder with the prompts, length and pooling of the flags."""
    prompts = {"query": args.query_prompt, "document": args.document_prompt}
    encoder = open_model(load, args.model, args, dtype, prompts=prompts)
    if args.document_prompt is None and not encoder.prompts["document"]:
        encoder.prompts["document"] = encoder.prompts.get("passage", "")
    encoder.own_length = encoder.max_seq_length or args.max_length
    with contextlib.suppress(AttributeError):  # static embeddings have no limit
        encoder.max_seq_length = min(args.max_length, encoder.own_length)
    if args.pooling == "chunks":
        encoder.preprocess = functools.partial(windows_of, encoder)
        encoder.register_forward_hook(pool_windows)
    return encoder

def windows_of(encoder, texts, **how):
    """Return the tokens of all windows of texts; the mapping is 1 where a text begins, else 0."""
    cut = {"return_overflowing_tokens": True, "stride": min(OVERLAP, encoder.max_seq_length // 2)}
    features = encoder[0].preprocess(texts, processing_kwargs={"text": cut}, **how)
    rows = features["overflow_to_sample_mapping"]
    features.pop("prompt_length", None)  # only the first window of a text begins with the prompt
    return features | {"overflow_to_sample_mapping": rows.diff(prepend=rows[:1] - 1)}

def pool_windows(encoder, _, features):
    """Pool the windows of a text to one vector: (mean + max) / 2 (AIRwaves 2025, eq. 3)."""
    import torch
    starts = features["overflow_to_sample_mapping"].nonzero()[1:, 0].tolist()
    texts = features["sentence_embedding"].tensor_split(starts)
    pooled = [(windows.mean(0) + windows.amax(0)) / 2 for windows in texts]
    return features | {"sentence_embedding": torch.stack(pooled)}

def count_truncated(encoder, inputs):
    """Count the texts of a batch of which a fast tokenizer has cut something off."""
    cut = [row for row in getattr(inputs[0], "encodings", None) or () if row.overflowing]
    with encoder.truncated:
        encoder.truncated.value += len(cut)

def encode_shard(encoder, texts, how, args, rows):
    """Encode a shard (rows: a slice) of texts: vectors, or rows, terms and weights."""
    import torch
    encoder.truncated.value = 0
    names, texts = list(texts)[rows], list(texts.values())[rows]
    found = encoder.encode_document(texts, show_progress_bar=True, **how).float()
    bad = (~found.sum(dim=1).to_dense().isfinite()).nonzero()
    if len(bad):
        fail(f"abstract {names[bad[0]]}", "its vector is not finite; use --dtype fp32")
    made = {"truncated": [encoder.truncated.value]}
    if args.kind == "dense":
        vectors = torch.nn.functional.normalize(found)
        return made | {"embeddings": vectors.half().cpu().numpy()}
    found = found.coalesce()
    (places, terms), weights = found.indices().int().numpy(), found.values().numpy()
    if args.activation == "relu":
        weights = np.expm1(weights)  # undoes the logarithm of log(1 + ReLU(logit))
    return made | {"rows": places + rows.start, "terms": terms, "weights": weights}

def index_vectors(texts, folder, args, task):
    """Return facts and arrays: dense vectors, or weights of terms (SPLADE, Formal et al. 2021)."""
    import sentence_transformers as st
    import torch
    from scipy import sparse
    if args.kind == "dense":
        encoder = open_encoder(st.SentenceTransformer, args, args.dtype)
        how = {"batch_size": args.batch_size or 32, "convert_to_tensor": True}
    else:  # the logits of 8 x 512 tokens take 0.5 GB
        encoder = open_encoder(st.SparseEncoder, args, args.dtype)
        how = {"batch_size": args.batch_size or 8, "max_active_dims": args.top_terms,
               "save_to_cpu": True}
    start = "spawn" if len(args.device) > 1 else "fork"
    encoder.truncated = multiprocessing.get_context(start).Value("q")  # all devices add to it
    if args.pooling != "chunks":
        encoder.register_forward_pre_hook(count_truncated)
    if len(args.device) > 1:
        how["pool"] = encoder.start_multi_process_pool(args.device)
        torch.cuda.empty_cache()  # the model has moved into the workers
    make = functools.partial(encode_shard, encoder, texts, how, args)
    made = shards(args, task, len(texts), make)
    if "pool" in how:
        encoder.stop_multi_process_pool(how["pool"])
    facts = {"shape": (len(texts), encoder.get_embedding_dimension()),
             "max_length": encoder.max_seq_length, "truncated": int(made.pop("truncated").sum()),
             "model_sha256": task["inputs"][str(Path(args.model))]}
    if not getattr(encoder.tokenizer, "is_fast", False):  # it does not say what it cuts off
        facts["truncated"] = "an unknown number"
    if args.kind == "splade":
        places = made["rows"], made["terms"]
        matrix = sparse.coo_array((made["weights"], places), facts["shape"]).tocsc()
        made = {"data": matrix.data, "indices": matrix.indices, "indptr": matrix.indptr}
    return facts, made

# -------------------- Neighbours
def cosines(queries, corpus):
    """Return cosines in millionths as integers; of equal ones, the earlier row is larger."""
    import torch
    rounded = (queries @ corpus.T).mul(1e6).round().long()
    return rounded * len(corpus) - torch.arange(len(corpus), device=corpus.device)

def graph_shard(corpus, k, rows):
    """Return the k nearest neighbours of a shard (rows) of corpus, unit vectors."""
    from sentence_transformers.util import semantic_search
    ids, scores = [], []
    hits = semantic_search(corpus[rows], corpus, ROWS, len(corpus), k + 1, cosines)
    for row, found in enumerate(hits, rows.start):
        others = [hit for hit in found if hit["corpus_id"] != row][:k]
        ids.append([hit["corpus_id"] for hit in others])
        scores.append([hit["score"] for hit in others])
    similarities = (np.array(scores) + ids) // len(corpus) / 1e6
    return {"neighbours": np.array(ids, np.int32), "similarities": similarities.astype(np.float32)}

# -------------------- Training
def read_examples(path, claims, texts, loss):
    """Return (texts of tuples of 02_retrieve.py mine: claim, positive, negatives; counts).

    Tuples with fewer negatives than others are left out. The triplet loss takes one negative: a
    tuple with several becomes several rows.
    """
    import pandas as pd
    rows = []
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                example = json.loads(line)
                negatives = [texts[name] for name in example["negatives"]]
                rows.append([claims[example["claim_id"]], texts[example["positive"]], negatives])
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                fail(f"{path}:{number}", f"{error!r}; mine --shape tuples of these claims again")
    table = pd.DataFrame(rows, columns=["claim", "positive", "negatives"], dtype=object)
    width = table["negatives"].str.len()
    kept = table[width >= (1 if loss == "triplet" else width.max())]
    counts = {"examples": len(table), "left_out": len(table) - len(kept)}
    if loss == "triplet":
        return kept.explode("negatives"), counts
    negatives = pd.DataFrame(kept["negatives"].tolist(), kept.index, dtype=object)
    return kept.drop(columns="negatives").join(negatives.add_prefix("negative_")), counts

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
def index(args):
    """Build the indexes that are asked for and not up to date."""
    made, texts = [], {}
    for kind in dict.fromkeys(args.indexes):
        own = argparse.Namespace(**vars(args))
        for name in {"indexes", "split"}.union(*FLAGS.values()) - set(FLAGS[kind]):
            setattr(own, name, None)  # another --k1 must not discard a dense index
        own.kind, own.out, own.model = kind, f"{args.out}/{kind}", vars(own).get(f"{kind}_model")
        task = task_of(own, args.corpus, models=[own.model] if own.model else [])
        if up_to_date(own, task, own.out):
            continue
        texts = texts or read_texts(args)
        with written(own.out, task) as folder:
            build = index_bm25 if kind == "bm25" else index_vectors
            facts, arrays = build(texts, folder, own, task)
            facts |= {"corpus": task["inputs"][str(Path(args.corpus))], "abstracts": len(texts)}
            complete(folder, list(texts), task["arguments"] | facts, **arrays)
        remove(f"{own.out}.parts")
        print(f"{own.out}: {len(texts)} abstracts, {facts.get('truncated', 0)} of them truncated")
        made.append(own.out)
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
        meta = json.loads((source / "meta.json").read_bytes())
        names = json.loads((source / "abstract_ids.json").read_bytes())
        if meta["files"] != files_of(source):
            raise ValueError("its files have changed")
        corpus = torch.from_numpy(np.load(source / "embeddings.npy")).to(device).float()
    except Exception as error:  # a file is missing or empty, no such device
        fail(source, f"{error}; check --device, or run 01_index.py --indexes dense --force")
    k = min(args.neighbours, len(corpus) - 1)
    make = functools.partial(graph_shard, corpus, k)
    with written(args.out, task) as folder:
        made = shards(args, task, len(corpus), make)
        complete(folder, names, {"kind": "graph", "corpus": meta["corpus"]}, **made)
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
    claims = claims.set_index("claim_id")["claim"]
    table, counts = read_examples(args.examples, claims, texts, args.loss)
    if table.empty:
        fail(args.examples, f"nothing for --loss {args.loss} to train on; mine other examples")
    one_gpu(args)
    import sentence_transformers as st
    from datasets import Dataset
    encoder = open_encoder(st.SentenceTransformer, args, "fp32")
    prompts = encoder.prompts
    evaluator = dev_evaluator(dev, prompts, texts, args) if dev else None
    curve = [evaluator(encoder)[NDCG.removeprefix("eval_")]] if dev else []
    make = functools.partial(
        st.SentenceTransformerTrainer, encoder, loss=loss_of(encoder, args), evaluator=evaluator,
        train_dataset=Dataset.from_dict(table.to_dict("list")))
    log = fit(make, st.SentenceTransformerTrainingArguments, encoder,
              parts_of(args.out, task, args), args, NDCG if dev else None,
              per_device_train_batch_size=args.batch, warmup_steps=WARMUP,
              batch_sampler="batch_sampler" if args.loss == "triplet" else "no_duplicates",
              prompts=dict.fromkeys(table, prompts["document"]) | {"claim": prompts["query"]})
    curve += [line[NDCG] for line in log if NDCG in line]
    facts = counts | {"dev_ndcg_at_10": [round(value, 4) for value in curve]}
    if encoder.max_seq_length != encoder.own_length:
        encoder.max_seq_length = encoder.own_length
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
        add("--top-terms", type=count, help="SPLADE: terms kept of a text; default: all")
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
