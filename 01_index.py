# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "PyStemmer==3.1.0", "accelerate==1.15.0", "bm25s==0.3.16", "datasets==5.2.0",
#   "numpy==2.4.6", "pandas==3.1.1", "sentence-transformers==6.2.0", "torch==2.13.0",
#   "tqdm==4.70.1", "transformers==5.23.0",
# ]
# ///
"""
Index the abstracts (BM25, dense, SPLADE), find their neighbours, fine-tune the dense encoder.

Reads   corpus.jsonl; train: claims, and examples.jsonl of 02_retrieve.py mine --shape tuples
Writes  index/KIND/, each with abstract_ids.json (row to id) and meta.json:
            bm25/    postings, in the format of bm25s
            dense/   embeddings.npy: abstracts x dimensions, float16, unit length
            splade/  weights.npz: abstracts x vocabulary, a CSC matrix of scipy
            graph/   neighbours.npy: abstracts x k, rows of the corpus, nearest first
        models/encoder/; OUT.parts/: shards and checkpoints, from which a run resumes
Prints  what is made; the last line is JSON

Examples
    python 01_index.py --indexes bm25 --k1 1.2
    python 01_index.py --indexes dense --dense-model BAAI/bge-m3 --device cuda:0 cuda:1
    python 01_index.py train --loss triplet --epochs 3 --lr 5e-5
"""

import argparse
import contextlib
import csv
import hashlib
import json
import os
import shutil
import sys
import time
import unicodedata
from pathlib import Path

import numpy as np

LABELS = ("SUPPORTS", "REFUTES", "NEI")
ANALYSERS = {  # a Unicode form, and arguments of bm25s.tokenize
    "default": {  # Lucene's 33 stopwords
        "normalise": "NFKC",
        "lower": True,
        "token_pattern": r"(?u)\b\w\w+\b",
        "stopwords": "english",
        "stemmer": "english",
    },
    "plain": {  # whitespace tokenisation, no normalisation: AIRwaves 2025
        "normalise": None,
        "lower": False,
        "token_pattern": r"\S+",
        "stopwords": None,
        "stemmer": None,
    },
    "nltk": {  # NLTK's 179 stopwords: Ant Bridge 2025
        "normalise": "NFKC",
        "lower": True,
        "token_pattern": r"[^\W_]+",
        "stopwords": "english_plus",
        "stemmer": None,
    },
}
FLAGS = {  # what decides an index, beside texts
    "bm25": ["analyser", "language", "bm25_method", "k1", "b"],
    "dense": ["dense_model", "pooling", "query_prompt", "document_prompt", "max_length", "dtype"],
    "splade": ["splade_model", "activation", "max_length", "dtype"],
}
SHARD = 4096  # abstracts
OVERLAP = 50  # tokens that neighbouring windows share: AIRwaves 2025, section 3
DEV_POOL = 1000  # abstracts that dev claims rank beside judged ones


# ---------- Texts and BM25
def read_texts(args):
    """Return {abstract_id: text} in corpus order."""
    corpus, fields = read_corpus(args.corpus), args.fields.split(",")
    texts = {name: text_of(record, fields, args.separator) for name, record in corpus.items()}
    if not any(texts.values()):
        fail(args.corpus, f"no record has text in {args.fields}; see --fields")
    return texts


def index_bm25(texts, folder, args):
    """Save the BM25 scores of all postings (Kamphuis et al. 2020, table 1)."""
    import bm25s

    analyser = {"name": args.analyser} | ANALYSERS[args.analyser]
    if args.language != "english":
        analyser |= {step: args.language for step in ("stopwords", "stemmer") if analyser[step]}
    tokens = tokenise(texts, **analyser)
    terms = sorted(tokens.vocab)  # bm25s numbers stems in the order of a set
    number_of = np.argsort([tokens.vocab[term] for term in terms]).astype(np.int32)
    ids = [number_of[row] for row in tokens.ids]
    bm25 = bm25s.BM25(args.k1, args.b, method=args.bm25_method, csc_backend="scipy")
    bm25.index((ids, {term: number for number, term in enumerate(terms)}), False)
    bm25.save(folder, show_progress=False)
    return {"analyser": analyser, "without_terms": tokens.ids.count([])}


# ---------- Dense and SPLADE
def open_encoder(load, model, args, dtype, dense=True):
    """Return an encoder with the length, prompts and pooling of the flags."""
    prompts = {"query": args.query_prompt, "document": args.document_prompt} if dense else None
    encoder = open_model(load, model, args, dtype, prompts=prompts)
    if dense and args.document_prompt is None and not encoder.prompts["document"]:
        encoder.prompts["document"] = encoder.prompts.get("passage", "")
    if args.max_length < (encoder.max_seq_length or np.inf) < np.inf:
        encoder.max_seq_length = args.max_length  # that of static embeddings stays infinite
    if dense and args.pooling == "chunks":
        pool_chunks(encoder)
    return encoder


def pool_chunks(encoder):
    """Let an encoder read long texts in windows, and pool their vectors."""
    settings, stride = encoder[0].processing_kwargs, min(OVERLAP, encoder.max_seq_length // 2)
    windows = {"return_overflowing_tokens": True, "stride": stride}
    encoder[0].processing_kwargs = settings | {"text": settings.get("text", {}) | windows}
    encoder.set_pooling_include_prompt(True)  # only the first window begins with a prompt
    encoder.register_forward_hook(pool_windows)


def pool_windows(encoder, _, features):
    """Pool the windows of each text to one vector: (mean + max) / 2 (AIRwaves 2025, eq. 3)."""
    import torch

    text_of_row = features["overflow_to_sample_mapping"]  # 0, 0, 1: the first has two windows
    starts = (text_of_row.diff().nonzero()[:, 0] + 1).tolist()
    texts = features["sentence_embedding"].tensor_split(starts)
    pooled = [(windows.mean(0) + windows.amax(0)) / 2 for windows in texts]
    return features | {"sentence_embedding": torch.stack(pooled)}


def save_shard(path, vectors):
    """Save sparse vectors, or dense ones of length 1 in half precision."""
    from scipy import sparse
    from torch.nn.functional import normalize

    if not vectors.is_sparse:
        return np.savez(path, normalize(vectors).half().numpy())
    vectors = vectors.coalesce()
    weights, places = vectors.values().numpy(), vectors.indices().numpy()
    sparse.save_npz(path, sparse.coo_array((weights, places), vectors.shape), compressed=False)


def encode_shards(encoder, texts, batch_size, args, parts):
    """Return the path of each shard, encoded unless it is in the folder parts."""
    pool = encoder.start_multi_process_pool(args.device) if len(args.device or ()) > 1 else None
    shards = {start: parts / f"{start}.npz" for start in range(0, len(texts), SHARD)}
    for start, path in shards.items():
        if not path.exists():
            vectors = (
                encoder.encode_document(
                    texts[start : start + SHARD],
                    batch_size=batch_size,
                    show_progress_bar=True,
                    pool=pool,
                    convert_to_tensor=True,
                )
                .float()
                .cpu()
            )
            if not vectors.sum().isfinite():
                fail(args.corpus, "a vector is not finite; use --dtype fp32")
            save_shard(parts / "new.npz", vectors)
            (parts / "new.npz").rename(path)
    return list(shards.values())


def index_dense(texts, folder, args):
    """Save the embeddings of texts."""
    from sentence_transformers import SentenceTransformer

    encoder = open_encoder(SentenceTransformer, args.dense_model, args, args.dtype)
    shards = encode_shards(encoder, texts, args.batch_size, args, folder.parent)
    np.save(folder / "embeddings.npy", np.concatenate([np.load(path)["arr_0"] for path in shards]))
    return {"max_length": encoder.max_seq_length if encoder.max_seq_length < np.inf else None}


def index_splade(texts, folder, args):
    """Save the weights of terms in texts (Formal et al. 2021)."""
    from scipy import sparse
    from sentence_transformers import SparseEncoder

    encoder = open_encoder(SparseEncoder, args.splade_model, args, args.dtype, dense=False)
    batch_size = max(1, args.batch_size // 4)  # logits of 8 x 512 tokens take 0.5 GB
    shards = encode_shards(encoder, texts, batch_size, args, folder.parent)
    weights = sparse.vstack([sparse.load_npz(path) for path in shards]).tocsc()
    if args.activation == "relu":
        weights.data = np.expm1(weights.data)  # undoes the logarithm of log(1 + ReLU(logit))
    sparse.save_npz(folder / "weights.npz", weights, compressed=False)
    return {"max_length": encoder.max_seq_length, "query_prompt": None}


# ---------- Index
def index(args):
    """Make the BM25, dense and SPLADE indexes that are asked for."""
    build = {"bm25": index_bm25, "dense": index_dense, "splade": index_splade}
    made, texts = [], {}
    for kind in args.indexes:
        out, model = f"{args.out}/{kind}", vars(args).get(f"{kind}_model")
        names = ["job", "corpus", "fields", "separator", *FLAGS[kind]]
        flags = {name: vars(args)[name] for name in names}
        task = task_of(argparse.Namespace(**flags), args.corpus, models=[model] if model else [])
        if up_to_date(args, task, out):
            continue
        texts = texts or read_texts(args)
        folder = parts_of(out, task) / "index"
        folder.mkdir(exist_ok=True)
        meta = {
            "kind": kind,
            "corpus": task["inputs"][args.corpus],
            "model": model,
            "model_sha256": task["inputs"].get(model, ""),
            "abstracts": len(texts),
        }
        meta = flags | meta | build[kind](list(texts.values()), folder, args)
        (folder / "abstract_ids.json").write_text(json.dumps(list(texts)))
        (folder / "meta.json").write_text(json.dumps(meta, indent=1))
        with written(out, task) as new:
            folder.rename(new)
        shutil.rmtree(f"{out}.parts")
        print(f"{out}: {len(texts)} abstracts")
        made.append(out)
    return {"made": made}


# ---------- Graph
def nearest(vectors, k):
    """Return the k other rows with the highest cosine to each row (rows, k), nearest first."""
    import torch
    from tqdm.auto import tqdm

    vectors, found = torch.nn.functional.normalize(vectors), []  # fp16 has moved their lengths
    for rows in tqdm(torch.arange(len(vectors)).split(256)):  # 0.4 GB with 394,269 abstracts
        cosines = vectors[rows] @ vectors.T
        cosines[range(len(rows)), rows] = -2
        found.append(cosines.topk(k).indices.int().cpu())
    return torch.cat(found).numpy()


def graph(args):
    """Find the nearest neighbours of every abstract by cosine: exact, all against all."""
    task, source = task_of(args, args.index), Path(args.index)
    if up_to_date(args, task, args.out):
        return {"made": []}
    import torch

    corpus = json.loads((source / "meta.json").read_bytes())["corpus"]
    vectors = torch.from_numpy(np.load(source / "embeddings.npy")).float()
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    neighbours = nearest(vectors.to(device), min(args.neighbours, len(vectors) - 1))
    with written(args.out, task) as folder:
        folder.mkdir()
        np.save(folder / "neighbours.npy", neighbours)
        shutil.copy(source / "abstract_ids.json", folder)
        (folder / "meta.json").write_text(json.dumps({"kind": "graph", "corpus": corpus}))
    return {"made": [args.out], "abstracts": len(vectors)}


# ---------- Train
def read_tuples(path, claims, texts):
    """Return texts [(claim, positive, negative, ...)] of 02_retrieve.py mine."""
    tuples = []
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            try:
                example = json.loads(line)
                claim, positive = claims[example["claim_id"]], texts[example["positive"]]
                tuples.append((claim, positive, *(texts[name] for name in example["negatives"])))
            except (ValueError, LookupError, TypeError) as error:
                fail(f"{path}:{number}", f"{error!r}; see mine --shape tuples")
    return tuples


def rows_of(tuples, loss):
    """Return triplets, one a negative, else rows of the length that keeps most negatives."""
    if loss == "triplet":
        return [(*row[:2], negative) for row in tuples for negative in row[2:]]
    counts = np.array([len(row) - 2 for row in tuples])
    kept = [width * (counts >= width).sum() for width in range(counts.max() + 1)]
    length = 2 + int(np.argmax(kept))
    return [row[:length] for row in tuples if len(row) >= length]


def dev_evaluator(paths, prompts, texts, seed):
    """Return an evaluator: nDCG@10 over judged abstracts and DEV_POOL others."""
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
    from sentence_transformers.util import cos_sim

    claims = read_table(paths[0], ["claim_id", "claim"]).set_index("claim_id")["claim"]
    qrels = read_table(
        paths[1],
        ["claim_id", "abstract_id", "label"],
        claim_id=claims.index,
        abstract_id=texts,
        label=LABELS,
    )
    evidence = qrels[qrels["label"] != "NEI"].groupby("claim_id")["abstract_id"].agg(set)
    drawn = np.random.default_rng(seed).permutation(list(texts))[:DEV_POOL]
    pool = {*drawn, *qrels["abstract_id"]}
    return InformationRetrievalEvaluator(
        claims.to_dict(),
        {name: text for name, text in texts.items() if name in pool},
        evidence.to_dict(),
        name="dev",
        write_csv=False,
        query_prompt=prompts["query"],
        corpus_prompt=prompts["document"],
        score_functions={"cosine": cos_sim},
    )


def train(args):
    """Fine-tune the dense encoder on mined examples."""
    dev = [f"{args.data}/{name}.{args.dev_split}.tsv" for name in ("claims", "qrels")]
    if not all(map(os.path.exists, dev)):
        print(f"the last epoch is kept; to choose one: {', '.join(dev)}")
        dev = []
    task = task_of(args, args.examples, args.corpus, args.claims, *dev, models=[args.model])
    if up_to_date(args, task, args.out):
        return {"made": []}
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # a Trainer multiplies its batch by GPUs
    import sentence_transformers as st
    from datasets import Dataset
    from sentence_transformers.sentence_transformer import losses

    claims = read_table(args.claims, ["claim_id", "claim"]).set_index("claim_id")["claim"]
    texts = read_texts(args)
    tuples = read_tuples(args.examples, claims, texts)
    rows = rows_of(tuples, args.loss)
    if not rows:
        fail(args.examples, "no tuple has a negative; see mine --hard")
    facts = {"examples": len(tuples), "rows": len(rows)}
    encoder = open_encoder(st.SentenceTransformer, args.model, args, "fp32")
    loss = losses.MultipleNegativesRankingLoss(encoder, args.scale)
    if args.loss == "triplet":  # max(0, cos(q, d-) - cos(q, d+) + margin)
        loss = losses.TripletLoss(encoder, losses.TripletDistanceMetric.COSINE, args.margin)
    columns = ["claim", "positive", *map(str, range(len(rows[0]) - 2))]
    data = Dataset.from_dict(dict(zip(columns, map(list, zip(*rows)))))
    prompts = dict.fromkeys(columns, encoder.prompts["document"])
    prompts["claim"] = encoder.prompts["query"]
    evaluator = dev_evaluator(dev, encoder.prompts, texts, args.seed) if dev else None
    facts |= fit(
        st.SentenceTransformerTrainer,
        st.SentenceTransformerTrainingArguments,
        encoder,
        data,
        loss,
        evaluator,
        "dev_cosine_ndcg@10",
        parts_of(args.out, task),
        args,
        prompts=prompts,
        gradient_accumulation_steps=args.accumulate,
        warmup_steps=0.1,  # share of the steps: AIRwaves 2025, Kiepura & Lam 2025
        batch_sampler="batch_sampler" if args.loss == "triplet" else "no_duplicates",
    )
    trained = open_model(st.SentenceTransformer, args.model, args, prompts=encoder.prompts)
    trained.load_state_dict(encoder.state_dict())  # with its own length, without windows
    with written(args.out, task, **facts) as folder:
        save_model(trained, folder)
    shutil.rmtree(f"{args.out}.parts")
    return {"made": [args.out], **facts}


# ---------- Command line
def add_texts(add):
    add("--corpus", default="{data}/corpus.jsonl", help="abstracts")
    add("--fields", default="title,abstract", help="fields of a text")
    add("--separator", default=" ", help="between fields")
    add("--max-length", type=int, default=512, help="tokens of a text, at most")
    add("--pooling", choices=("truncate", "chunks"), default="truncate", help="long texts, dense")
    add("--query-prompt", help="before a claim, as 'query: ' (default: the model's)")
    add("--document-prompt", help="before an abstract (default: the model's)")


def add_index(add):
    add("--indexes", nargs="+", choices=FLAGS, default=list(FLAGS), help="which to make")
    add("--out", default="{work}/index", help="folder of the indexes")
    add_texts(add)
    add("--analyser", choices=ANALYSERS, default="default", help="BM25: how texts become terms")
    add("--language", default="english", help="BM25: of stopwords, stems")
    add("--bm25-method", choices=("lucene", "robertson"), default="lucene", help="variant of idf")
    add("--k1", type=float, default=1.5, help="BM25: term-frequency saturation")
    add("--b", type=float, default=0.75, help="BM25: length normalisation, 0: none")
    add("--dense-model", default="data/models/minilm", help="a SentenceTransformer")
    add("--splade-model", default="data/models/splade-tiny", help="a SparseEncoder")
    add("--activation", choices=("log1p_relu", "relu"), default="log1p_relu", help="of SPLADE")
    add(
        "--dtype",
        choices=("auto", "fp32", "bf16", "fp16"),
        default="auto",
        help="precision; auto: half on a GPU",
    )
    add("--batch-size", type=int, default=32, help="texts at a time; of SPLADE a quarter")
    add("--device", nargs="+", help="cpu, mps, cuda:0 cuda:1 (default: a GPU, if any)")


def add_graph(add):
    add("--index", default="{work}/index/dense", help="dense index")
    add("--out", default="{work}/index/graph", help="graph")
    add("--neighbours", type=int, default=10, help="neighbours of an abstract")
    add("--device", help="cpu, cuda:0 (default: a GPU, if any)")


def add_train(add):
    add("examples", nargs="?", default="{work}/{split}/examples.jsonl", help="tuples of 02 mine")
    add("--claims", default="{data}/claims.{split}.tsv", help="claims of the examples")
    add("--model", default="data/models/minilm", help="a SentenceTransformer")
    add("--out", default="{work}/models/encoder", help="model")
    add_texts(add)
    add("--loss", choices=("triplet", "mnrl"), default="mnrl", help="mnrl: in-batch negatives")
    add("--margin", type=float, default=0.3, help="triplet: margin between cosines")
    add("--scale", type=float, default=20, help="mnrl: factor of the cosines")
    add("--epochs", type=float, default=2, help="passes over the examples")
    add("--lr", type=float, default=7e-6, help="learning rate")
    add("--batch-size", type=int, default=64, dest="batch", help="examples per batch")
    add("--accumulate", type=int, default=1, help="batches per optimiser step")
    add("--dev-split", default="dev", help="it chooses the epoch; none: the last")
    add("--patience", type=int, default=2, help="epochs without a gain")
    add("--seed", type=int, default=13, help="of order and dev abstracts")
    add("--device", nargs=1, help="cpu, mps, cuda (default: a GPU, if any)")


def main():
    run(command_line({index: add_index, graph: add_graph, train: add_train}))


# --- helpers (same in all six scripts)
START, WARNINGS = time.monotonic(), []
NEUTRAL = {"force", "out", "device", "batch_size", "function"}  # change no output
SPLITS = {"train": "train", "mine": "train", "fit": "dev"}  # of jobs; else test
PACKAGES = ("numpy", "pandas", "torch", "transformers", "sentence_transformers", "bm25s", "openai")


def warn(where, what):
    """Print a line on stderr; sidecars keep it."""
    WARNINGS.append(f"warning: {where}: {what}")
    print(WARNINGS[-1], file=sys.stderr)


def fail(where, what):
    """End with one line on stderr and exit status 2."""
    print(" ".join(f"error: {where}: {what}".split()), file=sys.stderr)
    sys.exit(2)


def read_table(path, columns, **known):
    """Read a TSV file as strings, a run with numbers; known: {column: its values}."""
    import pandas as pd

    try:
        table = pd.read_csv(
            path, sep="\t", dtype=str, na_filter=False, quoting=csv.QUOTE_NONE, encoding="utf-8-sig"
        )
    except ValueError as error:  # empty, not UTF-8, a long row
        fail(path, f"{error}; see data/convert.py")
    if not set(columns) <= set(table) or not isinstance(table.index, pd.RangeIndex):
        fail(f"{path}:1", f"wanted {', '.join(columns)} in rows of one length; see data/convert.py")
    if "claim" in columns:  # as pandas quotes
        table["claim"] = table["claim"].str.replace(
            '^"((?:[^"]|"")*)"$', lambda quoted: quoted[1].replace('""', '"'), regex=True
        )
    ids = [column for column in columns if column.endswith("_id")]
    bad = {f"{column} is empty": table[column] == "" for column in columns}
    bad |= {f"unknown {column}": ~table[column].isin(list(known[column])) for column in known}
    bad["an earlier row has this " + " and ".join(ids)] = table.duplicated(ids)
    if "rank" in columns:
        for column in ("rank", "score"):
            table[column] = pd.to_numeric(table[column], errors="coerce")
        table = table.iloc[np.lexsort((table["rank"], table["claim_id"].factorize()[0]))]
        bad["score is not a finite number"] = ~np.isfinite(table["score"])
        bad["rank is not 1, 2, 3"] = table["rank"] != table.groupby("claim_id").cumcount() + 1
    for what, rows in bad.items():
        if rows.any():
            row = rows.idxmax()
            fail(f"{path}:{row + 2}", f"{what}: {' '.join(table.loc[row, ids])}; fix this row")
    return table.reset_index(drop=True)


def read_corpus(path):
    """Read {abstract_id: record}; an abstract that is missing or null is ""."""
    corpus = {}
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
                name = str(record["abstract_id"])
            except (ValueError, LookupError, TypeError):
                fail(f"{path}:{number}", "no JSON object with an abstract_id; see data/convert.py")
            if name in corpus:
                fail(f"{path}:{number}", f"a second abstract {name}; remove one")
            corpus[name] = record | {"abstract": record.get("abstract") or ""}
    return corpus


def digest(path):
    """Return the sha256 of a file, of a folder's sidecar, or of all its files."""
    path, total = Path(path), hashlib.sha256()
    if path.is_dir() and Path(f"{path}.meta.json").exists():
        path = Path(f"{path}.meta.json")
    for one in filter(Path.is_file, [path, *sorted(path.rglob("*"))]):
        with one.open("rb") as file:
            hashlib.file_digest(file, lambda: total)
    return total.hexdigest()


def task_of(args, *inputs, models=()):
    """Return what decides an output: arguments and digests."""
    for path in inputs:
        if not Path(path).exists():
            fail(path, "not found; make it or fix its name")
    paths = [str(path) for path in (*inputs, *models) if Path(path).exists()]
    arguments = {name: value for name, value in vars(args).items() if name not in NEUTRAL}
    return {"arguments": arguments, "inputs": {path: digest(path) for path in paths}}


def up_to_date(args, task, *outs):
    """Return whether this very task has made all outs."""
    made, script = [], Path(sys.argv[0])
    for out in outs:
        meta = Path(f"{out}.meta.json")
        if Path(out).is_dir() and not meta.exists():
            fail(out, "not made by this script; give another --out")
        made.append(json.loads(meta.read_bytes()) if Path(out).exists() and meta.exists() else {})
    if args.force or not all(task.items() <= one.items() for one in made):
        return False
    for out, one in zip(outs, made):
        edited = f" (made by another version of {script.name}; --force makes it again)"
        print(f"up to date: {out}" + edited * (one["script"] != digest(script)))
    return True


@contextlib.contextmanager
def written(path, task, **facts):
    """Yield a temporary path. What is made there becomes path, whole, with a sidecar."""
    path, new, meta = Path(path), Path(f"{path}.tmp"), Path(f"{path}.meta.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(new, ignore_errors=True)
    yield new
    meta.write_text("{}")  # while the output is replaced
    shutil.rmtree(path, ignore_errors=True)
    new.replace(path)
    loaded = {name: sys.modules[name].__version__ for name in PACKAGES if name in sys.modules}
    made = {
        "command": sys.argv,
        "script": digest(sys.argv[0]),
        "packages": loaded,
        "warnings": WARNINGS,
        "seconds": round(time.monotonic() - START, 1),
    }
    new.write_text(json.dumps(task | facts | made, indent=1) + "\n")
    new.replace(meta)


def command_line(jobs):
    """Return the arguments; jobs: {function: what adds its flags}, the default first."""
    script, names = Path(sys.argv[0]).name, [function.__name__ for function in jobs]
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(script, description=__doc__, formatter_class=layout)
    choices = parser.add_subparsers(title="jobs", metavar=f"JOB (default: {names[0]})")
    for function, add_flags in jobs.items():
        name, sentence = function.__name__, function.__doc__.splitlines()[0]
        job = choices.add_parser(name, help=sentence, description=sentence)
        parser.error = job.error = lambda message: fail(script, f"{message}; see --help")
        job.set_defaults(function=function, job=name)
        job.add_argument("--data", default="data/demo", help="corpus, claims and qrels")
        job.add_argument("--work", help="what is made of it (default: work/NAME)")
        job.add_argument("--split", default=SPLITS.get(name, "test"), help="which claims")
        job.add_argument("--force", action="store_true", help="make outputs again")
        add_flags(job.add_argument)
        for flag in job._actions:
            known = flag.default not in (None, False, argparse.SUPPRESS)
            flag.help += " (default: %(default)s)" * known
    given = sys.argv[1:2] and sys.argv[1] in (*names, "-h", "--help")
    args = parser.parse_args(sys.argv[1:] if given else [names[0], *sys.argv[1:]])
    args.work = args.work or f"work/{Path(args.data).resolve().name}"
    for name, value in vars(args).items():
        for field in ("data", "work", "split") if isinstance(value, str) else ():
            value = value.replace(f"{{{field}}}", vars(args)[field])
        setattr(args, name, value)
    return args


def run(args):
    """Run the job, and print its result as JSON."""
    try:
        print(json.dumps(args.function(args)))
    except Exception as error:
        if not isinstance(error, (OSError, UnicodeError)) and "memory" not in repr(error).lower():
            raise
        fail(getattr(error, "filename", None) or args.job, error)


# --- end of helpers


def text_of(record, fields=("title", "abstract"), separator=" "):
    """Join the fields of a record that hold text; the items of a list are joined by commas."""
    texts = []
    for value in map(record.get, fields):
        items = value if isinstance(value, list) else [value]
        known = [str(item).strip() for item in items if item is not None and item == item]  # no NaN
        texts.append(", ".join(filter(None, known)))
    return separator.join(filter(None, texts))


# --- analyser (same in 01 and 02)
def tokenise(texts, name, normalise, stemmer, **options):
    """Return bm25s' tokens of texts by one of the ANALYSERS of 01_index.py."""
    import bm25s
    from Stemmer import Stemmer

    if normalise:
        texts = [unicodedata.normalize(normalise, text) for text in texts]
    stemmer = Stemmer(stemmer) if stemmer else None
    return bm25s.tokenize(texts, stemmer=stemmer, show_progress=False, **options)


# --- end of analyser


# --- models (same in 01, 02, 03 and 05)
def open_model(load, name, args, dtype="fp32", **options):
    """Return load(name), of safetensors, without code. auto: half precision on a GPU."""
    import torch

    device = args.device[0] if args.device else None
    gpu = torch.cuda.is_available() and device != "cpu"
    half = torch.bfloat16 if gpu and torch.cuda.is_bf16_supported(False) else torch.float16
    types = {
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "auto": half if gpu else torch.float32,
    }
    try:
        return load(
            str(name),
            device=device,
            trust_remote_code=False,
            **options,
            model_kwargs={"dtype": types[dtype], "use_safetensors": True},
        )
    except Exception as error:  # of many kinds
        fail(name, f"cannot be loaded: {error}; see data/README.md, models")


# --- end of models


# --- training (same in 01, 03 and 05)
def parts_of(out, task):
    """Return OUT.parts/ for unfinished work; that of another task is removed."""
    folder, mark = Path(f"{out}.parts"), Path(f"{out}.parts/task.json")
    if not mark.exists() or mark.read_text() != json.dumps(task):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        mark.write_text(json.dumps(task))
    return folder


def newest_checkpoint(folder):
    """Return the newest checkpoint, where trainer_state.json is written last, or None."""
    states = folder.glob("checkpoint-*/trainer_state.json")
    steps = [int(path.parent.name.removeprefix("checkpoint-")) for path in states]
    return str(folder / f"checkpoint-{max(steps)}") if steps else None


def fit(trainer, arguments, model, data, loss, evaluator, measure, folder, args, **settings):
    """Train on from the newest checkpoint; keep the best epoch. Return losses, curve."""
    import torch
    from transformers import EarlyStoppingCallback

    gpu, curve, callbacks = model.device.type == "cuda", [], []
    settings["bf16" if gpu and torch.cuda.is_bf16_supported(False) else "fp16"] = gpu
    with contextlib.redirect_stdout(sys.stderr):  # trainers print their logs
        if evaluator:
            curve, callbacks = [evaluator(model)[measure]], [EarlyStoppingCallback(args.patience)]
            settings |= {
                "eval_strategy": "epoch",
                "metric_for_best_model": measure,
                "load_best_model_at_end": True,
            }
        how = arguments(
            str(folder),
            num_train_epochs=args.epochs,
            learning_rate=args.lr,
            seed=args.seed,
            per_device_train_batch_size=args.batch,
            use_cpu=model.device.type == "cpu",
            save_strategy="epoch",
            save_total_limit=2,
            logging_strategy="epoch",
            logging_nan_inf_filter=False,
            report_to="none",
            restore_callback_states_from_checkpoint=True,
            **settings,
        )
        training = trainer(model, how, data, loss=loss, evaluator=evaluator, callbacks=callbacks)
        training.train(resume_from_checkpoint=newest_checkpoint(folder))
    log = training.state.log_history
    losses = [line["loss"] for line in log if "loss" in line]
    if not np.isfinite(losses).all():
        fail("--lr", "the loss is not a finite number; lower it")
    curve += [line[f"eval_{measure}"] for line in log if f"eval_{measure}" in line]
    return {"loss": losses, measure: [round(value, 4) for value in curve]}


def save_model(model, folder):
    """Save a model; its tokenizer without the truncation of training."""
    model.tokenizer.backend_tokenizer.no_truncation()
    model.tokenizer.backend_tokenizer.no_padding()
    model.max_seq_length = model.tokenizer.init_kwargs.get("model_max_length")
    model.save_pretrained(str(folder), create_model_card=False)


# --- end of training

if __name__ == "__main__":
    main()
