# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy==2.4.6", "pandas==3.1.1", "scipy==1.17.1"]
# ///
"""
Compare runs with the first one: Wilcoxon's signed-rank test and McNemar's test (AIRwaves 2025).

Reads   metrics.claims.tsv of 06_evaluate.py: each measure by run and claim; metrics.json, if it is
        there: runs without rows for a tenth of the claims or more are left out
Prints  for each other run and each measure, the number of claims that have a value in both runs,
        the mean difference, how many claims are won and lost, and two-sided p-values without a
        correction for multiple comparisons; McNemar's test only where each claim has 0 or 1

Example
    python 06_evaluate.py --measures R@5 Success@1
    python recipes/tools/significance.py work/demo/test/metrics.claims.tsv --measures R@5 Success@1
"""

from pathlib import Path

import kit
import pandas as pd
from scipy import stats


def wilcoxon(differences):
    """Return the two-sided p of the signed-rank test; 1 where no claim differs."""
    differences = differences.round(9)  # so that rounding errors do not decide ranks
    if not differences.any():
        return 1.0
    return stats.wilcoxon(differences).pvalue


def mcnemar(differences):
    """Return the two-sided exact p of McNemar's test; 1 where no claim differs."""
    won = (differences > 0).sum()
    lost = (differences < 0).sum()
    if won + lost == 0:
        return 1.0
    return stats.binomtest(won, won + lost).pvalue


def compare(values):
    """Return a row for each run but the first; values: of one measure, [claims, runs]."""
    first = values.iloc[:, 0]
    is_binary = values.isin([0, 1]) | values.isna()
    rows = []
    for run in values.columns[1:]:
        differences = (values[run] - first).dropna()
        row = {
            "run": run,
            "claims": len(differences),
            "difference": differences.mean(),
            "won": (differences > 0).sum(),
            "lost": (differences < 0).sum(),
            "p_wilcoxon": wilcoxon(differences),
        }
        if is_binary.all(axis=None):
            row["p_mcnemar"] = mcnemar(differences)
        rows.append(row)
    return pd.DataFrame(rows)


def main():
    parser = kit.parser(__doc__)
    # fmt: off
    parser.add_argument("table", help="read the values by run and claim, metrics.claims.tsv")
    parser.add_argument("--measures", nargs="+",
        help="compare only these measures, columns of the table (default: all)")
    # fmt: on
    args = parser.parse_args()
    table = kit.read_values(args.table)
    runs = table.index.unique("run")
    metrics = Path(args.table.removesuffix(".claims.tsv") + ".json")
    if metrics.exists():
        missing = kit.read_metrics(metrics, "counts")["claims without rows"]
        for run in missing.index[missing >= len(table.loc[runs[0]]) / 10]:
            if run == runs[0]:
                kit.fail(run, "the first run lacks rows for a tenth of the claims or more")
            kit.warn(run, "left out, without rows for a tenth of the claims or more")
            runs = runs.drop(run)
    if len(runs) < 2:
        kit.fail(args.table, "values of one run; evaluate two: python 06_evaluate.py A B")
    known = list(table)
    measures = args.measures or known
    for measure in measures:
        if measure not in known:
            kit.fail(args.table, f"no measure {measure}; it has {', '.join(known)}")
    tests = {}
    for measure in measures:
        tests[measure] = compare(table[measure].unstack("run")[runs])
    shown = pd.concat(tests, names=["measure"]).reset_index("measure")
    print(shown.to_csv(sep="\t", index=False, float_format="%.4g"), end="")


if __name__ == "__main__":
    kit.call(main)
