"""
Measure 06_evaluate.py at size, beside ranx.

Reads   nothing; makes runs (20 of 1,000 claims and 1,000 ranks take 600 MB) and their qrels
Prints  seconds and peak memory of 06_evaluate.py; its time relative to ranx's for the same measures
        (ranx once compiled), and the largest difference of their values; the time of reading a run
        relative to pandas; the last line is JSON

Examples
    python tests/benchmarks/bench_evaluate.py
    python tests/benchmarks/bench_evaluate.py --runs 2 --claims 100
"""

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parent.parent.parent
CORPUS = 394_269
RANX = {"R@10": "recall@10", "R@100": "recall@100", "MRR@10": "mrr@10", "Success@5": "hit_rate@5"}


def make(folder, runs, claims, depth):
    """Write qrels of 8 abstracts a claim, and runs, the later the better; return their paths."""
    rng = np.random.default_rng(13)
    judged = np.stack([rng.choice(CORPUS, 8, replace=False) for _ in range(claims)])
    claim_ids = np.array([f"claim{number}" for number in range(claims)])
    labels = rng.choice(["SUPPORTS", "REFUTES", "NEI"], judged.shape)
    labels[:, 0] = "SUPPORTS"
    qrels = pd.DataFrame(
        {
            "claim_id": claim_ids.repeat(8),
            "abstract_id": judged.ravel(),
            "label": labels.ravel(),
        }
    )
    qrels.to_csv(folder / "qrels.tsv", sep="\t", index=False)
    paths = [folder / f"run{run:02}.tsv" for run in range(runs)]
    ranks = np.arange(1, depth + 1)
    for run, path in enumerate(paths, 1):
        found = rng.integers(0, CORPUS, size=(claims, depth + 200))
        places = np.minimum(rng.geometric(0.004 * run, size=judged.shape), depth) - 1
        np.put_along_axis(found, places, judged, axis=1)
        lists = [pd.unique(abstract_ids)[:depth] for abstract_ids in found]
        table = pd.DataFrame(
            {
                "claim_id": claim_ids.repeat(depth),
                "abstract_id": np.concatenate(lists),
                "rank": np.tile(ranks, claims),
                "score": np.tile(1000.0 - ranks, claims),
            }
        )
        table.to_csv(path, sep="\t", index=False)
    return paths


def ours(folder, paths, *flags):
    """Return seconds, peak MiB and {run: {measure: value}} of the script."""
    begun = time.monotonic()
    files = ["--data", folder, "--qrels", folder / "qrels.tsv", "--out", folder / "m.tsv"]
    command = [sys.executable, ROOT / "06_evaluate.py", *paths, *files, *flags]
    child = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)
    child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        sys.exit("06_evaluate.py failed")
    values = json.loads((folder / "m.json").read_bytes())["value"]
    return time.monotonic() - begun, usage.ru_maxrss // 1024, values


def theirs(folder, paths):
    """Return seconds and {run: {measure: value}} of ranx for the same files."""
    from ranx import Qrels, Run, evaluate

    evaluate(Qrels({"q": {"d": 1}}), Run({"q": {"d": 1.0}}), list(RANX.values()))  # compiles it
    begun = time.monotonic()
    values = {}
    columns = {"q_id_col": "claim_id", "doc_id_col": "abstract_id", "score_col": "score"}
    ids = {"claim_id": object, "abstract_id": object}
    table = pd.read_csv(folder / "qrels.tsv", sep="\t", dtype=str)
    table = table[table["label"] != "NEI"].assign(score=1)
    qrels = Qrels.from_df(table.astype(ids), **columns)
    for path in paths:
        table = pd.read_csv(path, sep="\t", dtype={"claim_id": str, "abstract_id": str})
        run = Run.from_df(table.astype(ids | {"score": float}), **columns)
        values[path.stem] = evaluate(qrels, run, list(RANX.values()))
    return time.monotonic() - begun, values


def read_ratio(path):
    """Return the time of the script's read_table over that of pandas, the best of three each."""
    sys.argv = ["06_evaluate.py"]
    read_table = runpy.run_path(str(ROOT / "06_evaluate.py"))["read_table"]
    columns = ["claim_id", "abstract_id", "rank", "score"]
    ours = []
    theirs = []
    for _ in range(3):
        begun = time.monotonic()
        read_table(path, columns)
        ours.append(time.monotonic() - begun)
        begun = time.monotonic()
        pd.read_csv(path, sep="\t", dtype=str)
        theirs.append(time.monotonic() - begun)
    return min(ours) / min(theirs)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--claims", type=int, default=1000)
    parser.add_argument("--depth", type=int, default=1000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = make(folder, args.runs, args.claims, args.depth)
        whole, peak, _ = ours(folder, paths)
        words = ("--measures", *RANX)
        with_intervals, _, _ = ours(folder, paths, *words)
        seconds, _, values = ours(folder, paths, *words, "--resamples", "0")
        other, expected = theirs(folder, paths)
        reading = read_ratio(paths[0])
    differences = []
    for run, measures in values.items():
        for ours_name, ranx_name in RANX.items():
            differences.append(abs(measures[ours_name] - expected[run][ranx_name]))
    apart = max(differences)
    rows = args.runs * args.claims * args.depth
    print(f"{rows:,} rows, ClimateCheck 2025's measures, intervals, p: {whole:.0f} s, {peak} MiB")
    print(f"{seconds / other:.2f} times ranx's time without intervals and p, as ranx")
    print(f"{with_intervals / other:.2f} times ranx's time with them")
    print(f"a run is read in {reading:.2f} times the time of pandas.read_csv(dtype=str)")
    print(f"largest difference of a value: {apart:.1e}")
    result = {
        "rows": rows,
        "seconds": whole,
        "peak_mib": peak,
        "ratio_to_ranx": seconds / other,
        "ratio_with_intervals": with_intervals / other,
        "ratio_of_reading": reading,
        "difference": apart,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
