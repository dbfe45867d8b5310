"""
Measure 01_index.py and 02_retrieve.py at ClimateCheck's size, side by side with the libraries called directly.

Reads   nothing; makes its corpus with make_corpus.py (0.7 GB) and everything else (4 GB) under --folder
Prints  a table of ratios, ours / theirs below 1 is better, and one line of JSON with the same numbers, last on stdout

Examples
    python tests/benchmarks/bench_retrieval.py
    python tests/benchmarks/bench_retrieval.py --abstracts 40000 --parts build search
"""
import argparse
import json
import os
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TERMS, POSTINGS = 30_522, 103.5  # vocabulary of BERT; postings a text that make 40.8 million at ClimateCheck's size
DIMENSIONS = 1024                # BGE-M3, e5-large
SAMPLE = 40_000                  # abstracts for rank-bm25, which takes minutes for all
PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L4": 121e12, "T4": 65e12}  # bf16 (T4: fp16), dense, per second

# ----------------------------------------------------------- Measuring
def watch(command, **how):
    """Run a command; (its last line as JSON, seconds, peak MiB of all its processes together, shared pages once)."""
    start, peak = time.monotonic(), 0
    process = psutil.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, **how)
    while process.poll() is None:
        try:
            family = [process, *process.children(recursive=True)]
            peak = max(peak, sum(one.memory_full_info().pss for one in family))
        except psutil.Error:
            pass  # one of them ended just now
        time.sleep(0.1)
    seconds, lines = time.monotonic() - start, process.stdout.read().splitlines()
    assert process.returncode == 0, command
    return json.loads(lines[-1]), seconds, peak / 2**20

def script(name):
    """The names of one of the kit's scripts."""
    sys.argv = [name]
    return runpy.run_path(str(ROOT / name))

def timed(call):
    start = time.monotonic()
    result = call()
    return time.monotonic() - start, result

def read_claims(folder):
    lines = (folder / "claims.test.tsv").read_text(encoding="utf-8").splitlines()[1:]
    return [line.split("\t")[1] for line in lines]

# ----------------------------------------------------------- Children: bm25s by itself, and both searches
def bare_build(folder):
    """bm25s as its README has it; its time leaves reading the corpus out."""
    import bm25s
    import Stemmer

    with open(folder / "corpus.jsonl", encoding="utf-8") as file:
        texts = [json.loads(line)["abstract"] for line in file]
    start = time.monotonic()
    tokens = bm25s.tokenize(texts, stopwords="english", stemmer=Stemmer.Stemmer("english"), show_progress=False)
    bm25 = bm25s.BM25(backend="numba")
    bm25.index(tokens, show_progress=False)
    bm25.save(folder / "bare", show_progress=False)
    return {"seconds": time.monotonic() - start}

def both_searches(folder):
    """Seconds of bm25s and of 02_retrieve.py for the same claims, and how many of their top-1000 lists are the same."""
    import bm25s
    import Stemmer

    names, index = script("02_retrieve.py"), folder / "work" / "index" / "bm25"
    meta, claims = json.loads((index / "meta.json").read_text()), read_claims(folder)
    bare = bm25s.BM25.load(folder / "bare")
    bare.backend = "numba"
    bare.activate_numba_scorer()
    how = {"stopwords": "english", "stemmer": Stemmer.Stemmer("english"), "show_progress": False}
    tokens = bm25s.tokenize(claims, **how)
    bare.retrieve(tokens, k=10, show_progress=False)  # compiles

    def ours(k):
        return [names["top_k"](scores, k) for scores in found]

    result = {}
    for k in (600, 1000, 5000):
        k, seconds = min(k, meta["abstracts"]), {"bare": [], "ours": []}
        for _ in range(3):
            seconds["bare"].append(timed(lambda k=k: bare.retrieve(tokens, k=k, show_progress=False))[0])
            found = names["search_bm25"](index, meta, claims, None)
            seconds["ours"].append(timed(lambda k=k: ours(k))[0])
        result[f"top {k}"] = {who: float(np.median(times)) for who, times in seconds.items()}
    same, words = 0, bm25s.tokenize(claims, return_ids=False, **how)
    for scores, claim in zip(names["search_bm25"](index, meta, claims, None), words):
        theirs = bare.get_scores([word for word in claim if word in bare.vocab_dict])
        rows, their_rows = names["top_k"](scores, 1000), np.argsort(-theirs, kind="stable")[:1000]
        same += np.array_equal(rows, their_rows) and np.array_equal(scores[rows], theirs[rows])
    return result | {"same": same, "claims": len(claims)}

# ----------------------------------------------------------- Parts
def build(folder, results):
    """BM25 from JSONL to saved index: ours with reading, hashing and writing; bm25s without reading."""
    for name in ("bare", "work/index/bm25"):
        shutil.rmtree(folder / name, ignore_errors=True)
    theirs, _, their_peak = watch([sys.executable, __file__, "--folder", str(folder), "--child", "bare_build"])
    command = [sys.executable, str(ROOT / "01_index.py"), "--indexes", "bm25", "--data", str(folder), "--work"]
    _, seconds, peak = watch([*command, str(folder / "work"), "--force"])
    results["BM25 build, s"] = (seconds, theirs["seconds"], 0.75)
    results["BM25 build, peak MiB"] = (peak, their_peak, 1.2)

def search(folder, results):
    """BM25 for all claims after loading, scores and lists."""
    found, _, _ = watch([sys.executable, __file__, "--folder", str(folder), "--child", "both_searches"])
    for name in [name for name in found if name.startswith("top")]:
        results[f"BM25 search, {name}, s"] = (found[name]["ours"], found[name]["bare"], 1.2)
    results["BM25 top-1000 lists that are the same"] = (found["same"], found["claims"], 1)

def rank_bm25(folder, results):
    """The library of the organisers and of three teams, on the first 40,000 abstracts; the same terms for both."""
    from rank_bm25 import BM25Okapi

    names, claims, small = script("02_retrieve.py"), read_claims(folder), folder / "small"
    small.mkdir(exist_ok=True)
    with open(folder / "corpus.jsonl", encoding="utf-8") as file:
        lines = [line for line, _ in zip(file, range(SAMPLE))]
    (small / "corpus.jsonl").write_text("".join(lines), encoding="utf-8")
    command = [sys.executable, str(ROOT / "01_index.py"), "--indexes", "bm25", "--analyser", "plain", "--data", str(small)]
    watch([*command, "--work", str(small), "--force"])
    index = small / "index" / "bm25"
    found = names["search_bm25"](index, json.loads((index / "meta.json").read_text()), claims, None)
    seconds, _ = timed(lambda: [names["top_k"](scores, 1000) for scores in found])
    theirs = BM25Okapi([json.loads(line)["abstract"].split() for line in lines])
    their_seconds, _ = timed(lambda: [np.argsort(-theirs.get_scores(claim.split()))[:1000] for claim in claims])
    results[f"BM25 search of {len(lines)}, top 1000, beside rank-bm25, s"] = (seconds, their_seconds, None)

def make_encoder(folder, layers=24):
    """A BERT of BERT-large's size with random weights, as a sentence-transformers folder."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import AutoTokenizer, BertConfig, BertModel

    if not (folder / "modules.json").exists():
        how = BertConfig(hidden_size=DIMENSIONS, num_hidden_layers=layers, num_attention_heads=16, intermediate_size=4096)
        BertModel(how).save_pretrained(folder / "bert")
        AutoTokenizer.from_pretrained(ROOT / "data/models/minilm").save_pretrained(folder / "bert")
        masked = Transformer(str(folder / "bert"), max_seq_length=512)
        SentenceTransformer(modules=[masked, Pooling(DIMENSIONS)], device="cpu").save_pretrained(str(folder))
    return folder

def stage(folder, results):
    """02_retrieve.py as a whole, top 5,000: BM25, a 1,024-dimensional dense index, 40.8 million SPLADE postings."""
    from scipy import sparse

    names, rng, index = script("02_retrieve.py"), np.random.default_rng(13), folder / "work" / "index"
    bm25 = json.loads((index / "bm25" / "meta.json").read_text())
    count = bm25["abstracts"]
    models = {"dense": make_encoder(folder / "bert-large"), "splade": ROOT / "data/models/splade-tiny"}
    for kind, model in models.items():
        (index / kind).mkdir(exist_ok=True)
        shutil.copy(index / "bm25" / "abstract_ids.json", index / kind)
        sha256 = names["fingerprints"](model)[model.as_posix()]
        meta = {"kind": kind, "corpus": bm25["corpus"], "abstracts": count, "model": str(model), "model_sha256": sha256,
                "max_length": 512, "query_prompt": None, "activation": "log1p_relu"}
        (index / kind / "meta.json").write_text(json.dumps(meta))
    shape = (count, DIMENSIONS)
    vectors = np.lib.format.open_memmap(index / "dense" / "embeddings.npy", mode="w+", dtype=np.float16, shape=shape)
    for start in range(0, count, 8192):
        block = rng.normal(size=(min(8192, count - start), DIMENSIONS)).astype(np.float32)
        vectors[start : start + 8192] = block / np.linalg.norm(block, axis=1, keepdims=True)
    vectors.flush()
    weights = 1 / (rng.permutation(TERMS) + 20)  # some terms are in most texts
    sizes = rng.multinomial(int(count * POSTINGS), weights / weights.sum()).clip(max=count)
    indices = np.concatenate([np.sort(rng.choice(count, size, replace=False)) for size in sizes]).astype(np.int32)
    matrix = sparse.csc_matrix((rng.random(len(indices), np.float32), indices, np.concatenate([[0], np.cumsum(sizes)])),
                               shape=(count, TERMS))
    for name in ("data", "indices", "indptr"):
        np.save(index / "splade" / f"{name}.npy", getattr(matrix, name))
    del matrix, indices, vectors
    command = [sys.executable, str(ROOT / "02_retrieve.py"), "--data", str(folder), "--work", str(folder / "work")]
    found, _, peak = watch([*command, "--top-k", "5000", "--device", "cpu", "--force"])
    for kind, seconds in found["search_seconds"].items():
        results[f"02_retrieve.py, {kind}, top 5000, s (limit 10)"] = (seconds, None, 10)
    results["02_retrieve.py, all three, peak MiB (limit 4096)"] = (max(peak, found["peak_mib"]), None, 4096)

def encode(folder, results):
    """Batches by token count beside sentence-transformers' encode at its defaults; BERT-large at bf16 on a GPU."""
    import torch

    names, cuda = script("01_index.py"), torch.cuda.is_available()
    model = make_encoder(folder / "bert-large") if cuda else ROOT / "data/models/minilm"
    encoder, dtype = names["load_encoder"]("dense", model, "auto", "auto", 512)
    with open(folder / "corpus.jsonl", encoding="utf-8") as file:
        texts = [json.loads(line)["abstract"] for line, _ in zip(file, range(8192 if cuda else 512))]
    budget = names["budget_of"]("dense", encoder, SimpleNamespace(batch_tokens=0))
    tokens = np.minimum(names["token_lengths"](encoder, texts), encoder.max_seq_length).sum()
    ways = {"ours": lambda: names["embed"](encoder, texts, "", "truncate", budget, lambda rows: None),
            "theirs": lambda: encoder.encode_document(texts)}
    for call in ways.values():
        call()
    seconds = {name: min(timed(call)[0] for _ in range(2)) for name, call in ways.items()}
    what = "BERT-large" if cuda else "MiniLM"
    results[f"encode {len(texts)} abstracts, {what}, {dtype}, beside encode(), s"] = (*seconds.values(), None)
    if cuda:
        weights = sum(p.numel() for name, p in encoder.named_parameters() if "embeddings" not in name)
        results["tokens per second"] = (tokens / seconds["ours"], tokens / seconds["theirs"], None)
        for name, peak in PEAK.items():
            if name in torch.cuda.get_device_name():
                share = [2 * weights * tokens / one / peak for one in seconds.values()]
                results[f"share of {name}'s peak FLOP/s"] = (*share, None)

PARTS = {"build": build, "search": search, "rank_bm25": rank_bm25, "stage": stage, "encode": encode}
CHILDREN = {"bare_build": bare_build, "both_searches": both_searches}

# ----------------------------------------------------------- Main
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "work" / "benchmark", help="where everything is made")
    parser.add_argument("--abstracts", type=int, default=394_269)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return print(json.dumps(CHILDREN[args.child](args.folder)))
    if not (args.folder / "corpus.jsonl").exists():
        command = [sys.executable, str(HERE / "make_corpus.py"), str(args.folder), "--abstracts", str(args.abstracts)]
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
            beside = f"{theirs:10.3f} {ours / theirs:7.3f}" if theirs else " " * 18
            print(f"{name:68} {ours:10.3f} {beside} {limit or '':>6}", flush=True)
    keys = ("ours", "theirs", "limit")
    print(json.dumps({name: dict(zip(keys, values)) for name, values in results.items()}))

if __name__ == "__main__":
    main()
