"""
Measure 01_index.py and 02_retrieve.py at ClimateCheck's size beside the bare libraries.

Reads   nothing; makes its corpus with make_corpus.py (0.7 GB) and the rest (4 GB) under --folder
Prints  a table of ratios (ours / theirs, below 1 is better); then one line of JSON, last on stdout

Examples
    python tests/benchmarks/bench_retrieval.py
    python tests/benchmarks/bench_retrieval.py --abstracts 40000 --parts build search
"""

import argparse
import itertools
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TERMS = 30_522  # BERT's vocabulary
POSTINGS = 103.5  # a text: 40.8 million in all
DIMENSIONS = 1024  # BGE-M3, e5-large
SAMPLE = 40_000  # abstracts for rank-bm25, which takes minutes for all
PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L4": 121e12, "T4": 65e12}  # FLOP/s


# ---------------------------------------------------------------- Measuring
def watch(command):
    """Run a command. Return its last line as JSON, seconds, peak MiB of all its processes."""
    start = time.monotonic()
    peak = 0
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = psutil.Popen(command, text=True, **streams)
    while process.poll() is None:
        try:
            family = [process, *process.children(recursive=True)]
            peak = max(peak, sum(member.memory_full_info().pss for member in family))
        except psutil.Error:
            pass  # one of them ended just now
        time.sleep(1)  # to sample more often slows down what is measured
    seconds = time.monotonic() - start
    lines = process.stdout.read().splitlines()
    assert process.returncode == 0, command
    return json.loads(lines[-1]), seconds, peak / 2**20


def child(name, folder):
    """Run one of CHILDREN in a process of its own."""
    return watch([sys.executable, __file__, "--folder", str(folder), "--child", name])


def script(name):
    """Return the names of one of the kit's scripts."""
    sys.argv = [name]
    return runpy.run_path(str(ROOT / name))


def timed(call):
    """Return seconds and the result of a call."""
    start = time.monotonic()
    result = call()
    return time.monotonic() - start, result


def read_claims(folder):
    lines = (folder / "claims.test.tsv").read_text(encoding="utf-8").splitlines()[1:]
    return [line.split("\t")[1] for line in lines]


# ---------------------------------------------------------------- Children
def bare_build(folder):
    """Build and save an index as bm25s's README does; reading the corpus is not measured."""
    import bm25s
    import Stemmer

    with open(folder / "corpus.jsonl", encoding="utf-8") as file:
        texts = [json.loads(line)["abstract"] for line in file]
    start = time.monotonic()
    tokens = bm25s.tokenize(texts, stemmer=Stemmer.Stemmer("english"), show_progress=False)
    bm25 = bm25s.BM25(backend="numba")
    bm25.index(tokens, show_progress=False)
    bm25.save(folder / "bare", show_progress=False)
    return {"seconds": time.monotonic() - start}


def both_searches(folder):
    """Return seconds of bm25s and of 02_retrieve.py, and how many top-1,000 lists are the same."""
    import bm25s
    import Stemmer

    names = script("02_retrieve.py")
    index = folder / "work" / "index" / "bm25"
    meta = json.loads((index / "meta.json").read_text())
    claims = read_claims(folder)
    plain = bm25s.BM25.load(folder / "bare")
    plain.backend = "numpy"
    bare = bm25s.BM25.load(folder / "bare")
    bare.backend = "numba"
    bare.activate_numba_scorer()
    options = {"stemmer": Stemmer.Stemmer("english"), "show_progress": False}
    tokens = bm25s.tokenize(claims, **options)
    bare.retrieve(tokens, k=10, show_progress=False)  # compiles

    def ours(k):
        search_bm25 = names["search_bm25"]
        loading, _ = timed(lambda: list(search_bm25(index, meta, ["no such term"], None)))
        scored = search_bm25(index, meta, claims, None)
        seconds, found = timed(
            lambda: [(scores, names["best_rows"](scores, 0, k)) for scores in scored]
        )
        return seconds - loading, found

    result = {}
    for k in (600, 1000, 5000):
        k = min(k, meta["abstracts"])
        bare_times = []
        our_times = []
        for _ in range(3):
            seconds, _ = timed(lambda k=k: bare.retrieve(tokens, k=k, show_progress=False))
            bare_times.append(seconds)
            seconds, _ = ours(k)
            our_times.append(seconds)
        result[f"top {k}"] = {"bare": np.median(bare_times), "ours": np.median(our_times)}
    plain_time, _ = timed(lambda: plain.retrieve(tokens, k=1000, show_progress=False))
    result["top 1000, bm25s without numba"] = {
        "bare": plain_time,
        "ours": result["top 1000"]["ours"],
    }
    same = 0
    _, found = ours(1000)
    words = bm25s.tokenize(claims, return_ids=False, **options)
    for (scores, rows), claim_words in zip(found, words):
        theirs = bare.get_scores([word for word in claim_words if word in bare.vocab_dict])
        their_rows = np.argsort(-theirs, kind="stable")[:1000]
        if np.array_equal(rows, their_rows) and np.allclose(scores[rows], theirs[rows]):
            same += 1
    return result | {"same": same, "claims": len(claims)}


# ---------------------------------------------------------------- Parts
def build(folder, results):
    """BM25 from JSONL to a saved index: ours with reading and hashing, bm25s without reading."""
    for name in ("bare", "work/index/bm25"):
        shutil.rmtree(folder / name, ignore_errors=True)
    theirs, _, their_peak = child("bare_build", folder)
    command = [sys.executable, str(ROOT / "01_index.py"), "--indexes", "bm25", "--force"]
    _, seconds, peak = watch([*command, "--data", str(folder), "--work", str(folder / "work")])
    results["BM25 build, s"] = (seconds, theirs["seconds"], 1.1)
    results["BM25 build, peak MiB"] = (peak, their_peak, 1.1)


def search(folder, results):
    """BM25 for all claims, without loading: scores and lists."""
    times, _, _ = child("both_searches", folder)
    for name, seconds in times.items():
        if name.startswith("top"):
            results[f"BM25 search, {name}, s"] = (seconds["ours"], seconds["bare"], 1.8)
    results["BM25 top-1000 lists that are the same"] = (times["same"], times["claims"], 1)


def rank_bm25(folder, results):
    """The library of the organisers and three teams, on the first 40,000 abstracts, same terms."""
    from rank_bm25 import BM25Okapi

    names = script("02_retrieve.py")
    claims = read_claims(folder)
    small = folder / "small"
    small.mkdir(exist_ok=True)
    with open(folder / "corpus.jsonl", encoding="utf-8") as file:
        lines = list(itertools.islice(file, SAMPLE))
    (small / "corpus.jsonl").write_text("".join(lines), encoding="utf-8")
    command = [sys.executable, str(ROOT / "01_index.py"), "--indexes", "bm25", "--force"]
    watch([*command, "--analyser", "plain", "--data", str(small), "--work", str(small)])
    index = small / "index" / "bm25"
    meta = json.loads((index / "meta.json").read_text())
    scored = names["search_bm25"](index, meta, claims, None)
    seconds, _ = timed(lambda: [names["best_rows"](scores, 0, 1000) for scores in scored])
    theirs = BM25Okapi([json.loads(line)["abstract"].split() for line in lines])

    def search():
        return [np.argsort(-theirs.get_scores(claim.split()))[:1000] for claim in claims]

    their_seconds, _ = timed(search)
    name = f"BM25 search of {len(lines)}, top 1000, beside rank-bm25, s"
    results[name] = (seconds, their_seconds, None)


def make_encoder(folder, layers=24):
    """Return the folder of a SentenceTransformer of BERT-large's size with random weights."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import AutoTokenizer, BertConfig, BertModel

    if not (folder / "modules.json").exists():
        config = BertConfig(
            hidden_size=DIMENSIONS,
            num_hidden_layers=layers,
            num_attention_heads=16,
            intermediate_size=4096,
        )
        BertModel(config).save_pretrained(folder / "bert")
        AutoTokenizer.from_pretrained(ROOT / "data/models/minilm").save_pretrained(folder / "bert")
        masked = Transformer(str(folder / "bert"), max_seq_length=512)
        encoder = SentenceTransformer(modules=[masked, Pooling(DIMENSIONS)], device="cpu")
        encoder.save_pretrained(str(folder))
    return folder


def stage(folder, results):
    """02_retrieve.py, top 5,000: BM25, 1,024 dimensions, 40.8 million SPLADE postings."""
    from scipy import sparse

    names = script("01_index.py")
    rng = np.random.default_rng(13)
    index = folder / "work" / "index"
    bm25 = json.loads((index / "bm25" / "meta.json").read_text())
    abstract_ids = (index / "bm25" / "abstract_ids.json").read_text()
    count = bm25["abstracts"]
    for kind in ("dense", "splade"):
        (index / kind).mkdir(exist_ok=True)
    header = {"descr": "<f2", "fortran_order": False, "shape": (count, DIMENSIONS)}
    with open(index / "dense" / "embeddings.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, count, 8192):
            block = rng.normal(size=(min(8192, count - start), DIMENSIONS))
            block /= np.linalg.norm(block, axis=1, keepdims=True)
            file.write(block.astype(np.float16).tobytes())
    weights = 1 / (rng.permutation(TERMS) + 20)  # some terms are in most texts
    sizes = rng.multinomial(int(count * POSTINGS), weights / weights.sum()).clip(max=count)
    postings = [np.sort(rng.choice(count, size, replace=False)) for size in sizes]
    rows = np.concatenate(postings).astype(np.int32)
    del postings
    starts = np.cumsum([0, *sizes])
    values = rng.random(len(rows), np.float32)
    matrix = sparse.csc_matrix((values, rows, starts), shape=(count, TERMS))
    sparse.save_npz(index / "splade" / "weights.npz", matrix, compressed=False)
    del matrix, rows, values
    models = {
        "dense": make_encoder(folder / "bert-large"),
        "splade": ROOT / "data/models/splade-tiny",
    }
    shared = {"corpus": bm25["corpus"], "abstracts": count, "max_length": 512, "query_prompt": None}
    for kind, model in models.items():
        meta = shared | {
            "kind": kind,
            "activation": "log1p_relu",
            "model": str(model),
            "model_sha256": names["digest"](model),
        }
        (index / kind / "meta.json").write_text(json.dumps(meta))
        (index / kind / "abstract_ids.json").write_text(abstract_ids)
    command = [sys.executable, str(ROOT / "02_retrieve.py")]
    command += ["--data", str(folder), "--work", str(folder / "work")]
    command += ["--top-k", "5000", "--device", "cpu", "--force"]
    _, seconds, peak = watch(command)
    results["02_retrieve.py, all three, top 5000, s"] = (seconds, None, None)
    results["02_retrieve.py, all three, peak MiB (limit 4096)"] = (peak, None, 4096)


def gpu_rates(model, texts, times):
    """Return tokens per second and shares of the GPU's peak; operations: 2 a weight and token."""
    import torch

    coded = model.tokenizer(texts, truncation=True, max_length=model.max_seq_length)
    tokens = sum(map(len, coded["input_ids"]))
    weights = 0
    for name, parameter in model.named_parameters():
        if "embeddings" not in name:
            weights += parameter.numel()
    rates = {"tokens per second": (tokens / times[0], tokens / times[1], None)}
    for name, peak in PEAK.items():
        if name in torch.cuda.get_device_name():
            shares = [2 * weights * tokens / seconds / peak for seconds in times]
            rates[f"share of {name}'s peak FLOP/s"] = (*shares, None)
    return rates


def encode(folder, results):
    """A shard beside sentence-transformers' encode at its defaults; BERT-large in bf16 on a GPU."""
    import torch
    from sentence_transformers import SentenceTransformer

    names = script("01_index.py")
    cuda = torch.cuda.is_available()
    if cuda:
        what = "BERT-large"
        model = make_encoder(folder / "bert-large")
        count = 4096
    else:
        what = "MiniLM"
        model = ROOT / "data/models/minilm"
        count = 512
    args = SimpleNamespace(device=None, corpus="")
    theirs = names["open_model"](SentenceTransformer, model, args, dtype="auto")
    ours = names["open_model"](SentenceTransformer, model, args, dtype="auto")
    with open(folder / "corpus.jsonl", encoding="utf-8") as file:
        lines = list(itertools.islice(file, count))
    texts = [json.loads(line)["abstract"] for line in lines]

    def encode_ours():
        with tempfile.TemporaryDirectory() as parts:
            return names["encode_shards"](ours, texts, 32, args, Path(parts))

    def encode_theirs():
        return theirs.encode_document(texts)

    times = []
    for call in (encode_ours, encode_theirs):
        call()  # warms up
    for call in (encode_ours, encode_theirs):
        first, _ = timed(call)
        second, _ = timed(call)
        times.append(min(first, second))
    results[f"encode {len(texts)} abstracts, {what}, {ours.dtype}, beside encode(), s"] = (
        *times,
        1,
    )
    if cuda:
        results |= gpu_rates(ours, texts, times)


PARTS = {"build": build, "search": search, "rank_bm25": rank_bm25, "stage": stage, "encode": encode}
CHILDREN = {"bare_build": bare_build, "both_searches": both_searches}


# ---------------------------------------------------------------- Main
def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "work" / "benchmark")
    parser.add_argument("--abstracts", type=int, default=394_269)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        result = CHILDREN[args.child](args.folder)
        print(json.dumps(result))
        return
    if not (args.folder / "corpus.jsonl").exists():
        command = [sys.executable, str(HERE / "make_corpus.py"), str(args.folder)]
        command += ["--abstracts", str(args.abstracts)]
        subprocess.run(command, check=True, stdout=sys.stderr)
    results = {}
    print(f"{len(os.sched_getaffinity(0))} cores, {args.abstracts} abstracts\n")
    print(f"{'':68} {'ours':>10} {'theirs':>10} {'ratio':>7} {'limit':>6}")
    for part in args.parts:
        print(f"measuring: {part}", file=sys.stderr, flush=True)
        new = {}
        PARTS[part](args.folder, new)
        results |= new
        for name, (ours, theirs, limit) in new.items():
            beside = " " * 18
            if theirs:
                beside = f"{theirs:10.3f} {ours / theirs:7.3f}"
            print(f"{name:68} {ours:10.3f} {beside} {limit or '':>6}", flush=True)
    columns = ("ours", "theirs", "limit")
    print(json.dumps({name: dict(zip(columns, values)) for name, values in results.items()}))


if __name__ == "__main__":
    main()
