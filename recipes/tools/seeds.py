# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy==2.4.6", "pandas==3.1.1"]
# ///
"""
Summarise runs that differ only in the seed: mean and standard deviation, and wins over a baseline.

Reads   metrics.json and metrics.claims.tsv of 06_evaluate.py, called with all runs
Prints  for each measure, the value of the baseline, which is the first run of the table; mean and
        standard deviation over the seeds (divisor: seeds - 1); and for how many claims the mean of
        the seeds is above, equal to and below the baseline (won, tied, lost); the last line is JSON

Example
    python 06_evaluate.py hybrid.tsv rerank-1.tsv rerank-2.tsv rerank-3.tsv --out seeds.tsv
    python recipes/tools/seeds.py seeds.json rerank-1 rerank-2 rerank-3
"""

import json
from pathlib import Path

import kit
import pandas as pd


def read_both(path, seeds):
    """Return values [runs, measures], and values by claim [(run, claim), measures]."""
    values = kit.read_metrics(path, "value")
    by_claim = path.with_name(path.name.removesuffix(".json") + ".claims.tsv")
    for run in seeds:
        if run not in values.index:
            kit.fail(path, f"no run {run}; it has {', '.join(values.index)}")
    return values, kit.read_values(by_claim)


def won_tied_lost(claims, baseline, seeds):
    """Return how many claims the mean of the seeds wins, ties and loses, [measures, 3]."""
    means = claims.loc[seeds].groupby("claim_id").mean()
    differences = (means - claims.loc[baseline]).round(9)
    counts = {
        "won": (differences > 0).sum(),
        "tied": (differences == 0).sum(),
        "lost": (differences < 0).sum(),
    }
    return pd.DataFrame(counts)


def main():
    parser = kit.parser(__doc__)
    # fmt: off
    parser.add_argument("metrics", type=Path, help="read the values of all runs, metrics.json")
    parser.add_argument("seeds", nargs="+", help="summarise these runs, which differ in the seed")
    # fmt: on
    args = parser.parse_args()
    values, claims = read_both(args.metrics, args.seeds)
    baseline = values.index[0]
    of_seeds = values.loc[args.seeds]
    table = pd.DataFrame(
        {baseline: values.loc[baseline], "mean": of_seeds.mean(), "std": of_seeds.std()}
    )
    counts = won_tied_lost(claims, baseline, args.seeds).astype("Int64").astype("string")
    print(table.join(counts).to_string(float_format="{:.4f}".format, na_rep="-"))
    print(json.dumps({"seeds": len(args.seeds), "baseline": baseline}))


if __name__ == "__main__":
    kit.call(main)
