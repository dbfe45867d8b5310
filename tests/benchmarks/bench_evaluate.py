"""
Measure 06_evaluate.py at size, and its standard measures beside ranx's.

Reads   nothing; makes 20 runs of 1,000 claims and 1,000 ranks (20 million rows, about 600 MB) and their qrels
Prints  seconds and peak memory of 06_evaluate.py as a whole; the ratio to ranx of reading and scoring the same files
        (ranx after its compilation), and the largest difference of their values; one line of JSON, last on stdout

Examples
    python tests/benchmarks/bench_evaluate.py
    python tests/benchmarks/bench_evaluate.py --runs 3 --claims 100
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parent.parent.parent
CORPUS = 394_269
MEASURES = {"R@10": "recall@10", "R@100": "recall@100", "MRR@10": "mrr@10", "Success@5": "hit_rate@5"}  # ours: ranx's

def make(folder, runs, claims, depth):
    """Qrels of 8 abstracts a claim, and runs that find them the earlier the higher their number."""
    rng = np.random.default_rng(13)
    judged = np.stack([rng.choice(CORPUS, 8, replace=False) for _ in range(claims)])
    names = np.repeat([f"claim{place}" for place in range(claims)], 8)
    labels = np.where(np.tile(np.arange(8), claims) == 0, "SUPPORTS", rng.choice(["SUPPORTS", "REFUTES", "NEI"], claims * 8))
    qrels = pd.DataFrame({"claim_id": names, "abstract_id": judged.ravel().astype(str), "label": labels})
    qrels.to_csv(folder / "qrels.tsv", sep="\t", index=False)
    for run in range(runs):
        found = rng.integers(0, CORPUS, size=(claims, depth + 200))
        places = np.minimum(rng.geometric(0.004 * (run + 1), size=judged.shape), depth) - 1
        np.put_along_axis(found, places, judged, axis=1)
        rows = [pd.unique(one)[:depth] for one in found]
        ranks = np.tile(np.arange(1, depth + 1), claims)
        table = pd.DataFrame({"claim_id": np.repeat([f"claim{place}" for place in range(claims)], depth),
                              "abstract_id": np.concatenate(rows).astype(str), "rank": ranks, "score": 1000.0 - ranks})
        table.to_csv(folder / f"run{run:02}.tsv", sep="\t", index=False)
        print(f"run {run + 1} of {runs} made", file=sys.stderr)
    return [folder / f"run{run:02}.tsv" for run in range(runs)]

def ours(folder, paths, *flags):
    """(seconds, peak MiB, {run: {measure: value}}) of the script, as a process of its own."""
    begun = time.monotonic()
    command = [sys.executable, ROOT / "06_evaluate.py", *paths, "--qrels", folder / "qrels.tsv", "--out", folder / "m.tsv"]
    with open(folder / "log", "w") as log:
        child = subprocess.Popen([*map(str, command), *flags], stdout=subprocess.PIPE, stderr=log, text=True)
        output = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
    if status:
        sys.exit((folder / "log").read_text()[-2000:])
    return time.monotonic() - begun, usage.ru_maxrss // 1024, json.loads(output.splitlines()[-1])["runs"]

def theirs(folder, paths):
    """(seconds, {run: {measure: value}}) of ranx on the same files, read with pandas; it is compiled before."""
    from ranx import Qrels, Run, evaluate

    warm = Qrels({"q": {"d": 1}}), Run({"q": {"d": 1.0}})
    evaluate(*warm, list(MEASURES.values()))
    begun = time.monotonic()
    table = pd.read_csv(folder / "qrels.tsv", sep="\t", dtype=str)
    ids, columns = {"claim_id": object, "abstract_id": object}, {"q_id_col": "claim_id", "doc_id_col": "abstract_id"}
    table = table[table["label"] != "NEI"].assign(score=1).astype(ids)
    qrels, values = Qrels.from_df(table, score_col="score", **columns), {}
    for path in paths:
        run = pd.read_csv(path, sep="\t", dtype={"claim_id": str, "abstract_id": str, "score": float})
        run = Run.from_df(run.astype(ids), score_col="score", **columns)
        values[path.stem] = evaluate(qrels, run, list(MEASURES.values()))
    return time.monotonic() - begun, values

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--claims", type=int, default=1000)
    parser.add_argument("--depth", type=int, default=1000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = make(folder, args.runs, args.claims, args.depth)
        whole, peak, _ = ours(folder, paths)
        seconds, _, values = ours(folder, paths, "--measures", *MEASURES, "--force")
        other, expected = theirs(folder, paths)
    apart = max(abs(values[run][one] - expected[run][two]) for run in values for one, two in MEASURES.items())
    rows = args.runs * args.claims * args.depth
    print(f"{rows:,} rows: ClimateCheck 2025's measures, intervals and significance in {whole:.0f} s, {peak} MiB")
    print(f"recall, MRR, success, with intervals and significance: {seconds / other:.2f} times ranx's time without them")
    print(f"largest difference of a value: {apart:.1e}")
    result = {"rows": rows, "seconds": whole, "peak_mib": peak, "ratio_to_ranx": seconds / other, "difference": apart}
    print(json.dumps(result))

if __name__ == "__main__":
    main()
