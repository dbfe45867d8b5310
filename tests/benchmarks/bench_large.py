"""
Measure the scripts on large runs: memory and time of stage 3 beside its model, growth with claims.

rerank  03_rerank.py over claims x depth pairs, with a model that costs nothing in place of a
        cross-encoder: tokenisation, scores on disk, ranking and writing are what is left. At
        --stop-at the process is killed, and called again: seconds until the first new pair
claims  stages 1, 2, 4, 5 and 6 with 1,000 and with 10,000 claims on 10,000 papers; stages 4 and 5
        write their requests (--backend none)

Reads   nothing; makes corpus, claims, judgements and runs under --folder (1 GB with the defaults)
Prints  rerank: seconds and peak memory in GiB; claims: seconds and peak MB of each job, and their
        ratios; the last line is JSON

Examples
    python tests/benchmarks/bench_large.py rerank
    python tests/benchmarks/bench_large.py rerank --scored 20 --top-k 100
    python tests/benchmarks/bench_large.py rerank --claims 2000 --stop-at 0.9
    python tests/benchmarks/bench_large.py claims
"""

import argparse
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BEGUN = time.monotonic()
PAPERS = 10_000  # CheckThat! 2026
JOBS = {  # name: script, and flags beside --data and --work
    "index": "01_index.py --indexes bm25",
    "retrieve": "02_retrieve.py --retrievers bm25 --top-k 200",
    "fuse": "02_retrieve.py fuse {runs} --out {work}/test/fused.tsv",
    "fit": "recipes/train/fit_fusion.py --split test {runs} --out {work}/fusion.json",
    "mine": "recipes/train/mine.py --split test {work}/test/bm25.tsv --out {work}/examples.jsonl",
    "rank": "04_llm_rerank.py --run {work}/test/bm25.tsv --backend none --model none",
    "label": "05_classify.py llm --run {work}/test/bm25.tsv --top-k 10 --backend none --model none",
    "evaluate": "06_evaluate.py {runs}",
    "report": "06_evaluate.py {runs} --report {work}/report.html",
    "submission": "06_evaluate.py submission {work}/test/bm25.tsv --task checkthat4b",
}


def make_data(folder, claims):
    """Make 10,000 papers of ClimateCheck's lengths, and claims with a judged paper each."""
    if (folder / "qrels.test.tsv").exists():
        return
    names = runpy.run_path(str(HERE / "make_corpus.py"))
    rng = np.random.default_rng(13)
    words = names["make_words"](rng, 40_000)
    shares = 1 / (np.arange(len(words)) + names["SHIFT"]) ** names["EXPONENT"]
    vocabulary = names["Vocabulary"](words, np.cumsum(shares) / shares.sum())
    folder.mkdir(parents=True, exist_ok=True)
    lengths = names["lengths_of"](rng, PAPERS)
    names["write_corpus"](folder / "corpus.jsonl", rng, vocabulary, lengths)
    names["write_claims"](folder, "test", rng, vocabulary, {"en": claims}, PAPERS, ["SUPPORTS"])


def make_run(path, claims, depth):
    """Make a run of random papers, depth a claim."""
    rng = np.random.default_rng(13)
    with open(path, "w", encoding="utf-8") as file:
        file.write("claim_id\tabstract_id\trank\tscore\n")
        for claim in range(claims):
            for rank, paper in enumerate(rng.permutation(PAPERS)[:depth], 1):
                file.write(f"en-{claim}\t{paper}\t{rank}\t{1 - rank / depth:.6f}\n")


# -------------------- Stage 3
class Free:
    """A cross-encoder that costs nothing: MiniLM's tokenizer, and scores without a network."""

    is_asked = False
    num_labels = 1
    model_type = "CrossEncoder"
    max_seq_length = 512
    default_prompt_name = None
    modalities = ("text",)

    def __init__(self):
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(ROOT / "data/models/minilm")
        self.prompts = {}
        self.preprocess = None

    def __getitem__(self, _):
        """Return the only module, which is the model."""
        return self

    def predict(self, inputs, **_):
        """Return a score for each pair, and say when the first is asked for."""
        if not self.is_asked:
            print(f"first new pair after {time.monotonic() - BEGUN:.1f} s", flush=True)
            self.is_asked = True
        return np.array([len(text) % 97 for _, text in inputs], np.float32)


def rerank_without_model(folder, depth, top_k):
    """Run 03_rerank.py in this process; print seconds and the peak of memory."""
    words = ["--data", str(folder), "--work", str(folder / "work"), "--depth", str(depth)]
    words += ["--run", str(folder / "run.tsv"), "--model", "free/model", "--force"]
    if top_k:
        words += ["--top-k", str(top_k)]
    sys.argv = [str(ROOT / "03_rerank.py"), *words]
    names = runpy.run_path(sys.argv[0])["main"].__globals__
    model = Free()
    model.preprocess = names["PairReader"](model, 32)
    names["open_reranker"] = lambda *_: model
    begun = time.monotonic()
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    names["main"]()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    measured = {"seconds": round(time.monotonic() - begun), "peak_gib": round(peak / 2**20, 2)}
    print(json.dumps(measured | {"before_gib": round(base / 2**20, 2)}))


def finished_share(folder):
    """Return the share of pairs that have a score on disk."""
    paths = list(folder.glob("work/test/rerank.tsv.parts/*/scores"))
    if not paths:
        return 0.0
    return float((np.fromfile(paths[0]).reshape(-1, 2)[:, 1] > 0).mean())  # [score, state]


def rerank(args):
    """Run stage 3 in a process of its own; with --stop-at, kill it there and call it again."""
    folder = args.folder / f"rerank-{args.claims}"
    make_data(folder, args.claims)
    if not (folder / "run.tsv").exists():
        make_run(folder / "run.tsv", args.claims, args.depth)
    command = [sys.executable, __file__, "inside", "--folder", str(folder)]
    command += ["--scored", str(args.scored or args.depth), "--top-k", str(args.top_k)]
    if args.stop_at:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while process.poll() is None and finished_share(folder) < args.stop_at:
            time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
        process.wait()
        print(f"killed at {finished_share(folder):.3f} of {args.claims * args.depth:,} pairs")
    subprocess.run(command, check=True)


# -------------------- Claims
def measured(words):
    """Return seconds and peak MB of a script's call, which may wait for a language model (3)."""
    begun = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) in (0, 3), words
    return time.monotonic() - begun, usage.ru_maxrss / 1024


def claims(args):
    """Call each job with 1,000 and with 10,000 claims, and print the ratios."""
    table = {}
    for count in (1_000, 10_000):
        folder = args.folder / f"claims-{count}"
        work = folder / "work"
        make_data(folder, count)
        runs = f"{work}/test/bm25.tsv {work}/other.tsv"
        for name, flags in JOBS.items():
            script, *words = flags.format(runs=runs, work=work).split()
            words += ["--data", str(folder), "--work", str(work), "--force"]
            table.setdefault(name, []).append(measured([script, *words]))
            if name == "retrieve":  # a second run: the same rows in another order
                make_other(work / "test/bm25.tsv", work / "other.tsv")
    print("| job | seconds, 10,000 claims | MB | ratio to 1,000: seconds | MB |")
    print("|---|---|---|---|---|")
    ratios = {}
    for name, ((few, few_mb), (many, many_mb)) in table.items():
        ratios[name] = [round(many / few, 1), round(many_mb / few_mb, 1)]
        print(f"| {name} | {many:.1f} | {many_mb:.0f} | {ratios[name][0]} | {ratios[name][1]} |")
    print(json.dumps(ratios))


def make_other(path, out):
    """Write a run with the order of each claim's abstracts turned round."""
    import pandas as pd

    run = pd.read_csv(path, sep="\t", dtype={"claim_id": str, "abstract_id": str})
    run["score"] = -run["score"]
    run = run[::-1]
    run["rank"] = run.groupby("claim_id").cumcount() + 1
    run.to_csv(out, sep="\t", index=False)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", choices=("rerank", "claims", "inside"), help="inside: for rerank")
    parser.add_argument("--folder", type=Path, default=ROOT / "work/large")
    parser.add_argument("--claims", type=int, default=8_172, help="rerank: posts")
    parser.add_argument("--depth", type=int, default=2_000, help="rerank: papers a post")
    parser.add_argument("--scored", type=int, default=0, help="rerank: score this many (0: all)")
    parser.add_argument("--top-k", type=int, default=0, help="rerank: write this many (0: scored)")
    parser.add_argument("--stop-at", type=float, default=0, help="rerank: share of the pairs")
    args = parser.parse_args()
    if args.job == "inside":
        rerank_without_model(args.folder, args.scored, args.top_k)
    elif args.job == "rerank":
        rerank(args)
    else:
        claims(args)


if __name__ == "__main__":
    main()
