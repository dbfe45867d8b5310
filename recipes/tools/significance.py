# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy==2.4.6", "pandas==3.1.1", "scipy==1.17.1"]
# ///
"""
Compare runs with the first one: Wilcoxon's signed-rank test and McNemar's test (AIRwaves 2025).

Reads   metrics.claims.tsv of 06_evaluate.py: each measure by run and claim
Prints  for each further run and measure the claims that both runs have a value for, their mean
        difference, how many are won and lost, and two-sided p-values, not corrected for several
        comparisons; McNemar's test is for measures that are 0 or 1 by claim

Example
    python recipes/tools/significance.py work/demo/test/metrics.claims.tsv --measures R@5 Success@1
"""

import argparse
from pathlib import Path

import pandas as pd
from kit import fail
from scipy import stats


def wilcoxon(differences):
    """Two-sided p of the signed-rank test; 1 where no claim differs.

    Rounded, as ranks would otherwise depend on errors of rounding.
    """
    differences = differences.round(9)
    return stats.wilcoxon(differences).pvalue if differences.any() else 1.0


def mcnemar(differences):
    """Two-sided exact p that of the claims that differ, as many are won as lost."""
    won, lost = (differences > 0).sum(), (differences < 0).sum()
    return stats.binomtest(won, won + lost).pvalue if won + lost else 1.0


def compare(values):
    """Return p by further run from the values of one measure, [claims, runs]."""
    first, rows = values.iloc[:, 0], []
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
        if values.isin([0, 1]).where(values.notna(), True).all(axis=None):
            row["p_mcnemar"] = mcnemar(differences)
        rows.append(row)
    return pd.DataFrame(rows)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", help="metrics.claims.tsv")
    parser.add_argument("--measures", nargs="+", help="some of its columns (default: all)")
    args = parser.parse_args()
    if not Path(args.table).is_file():
        fail(args.table, "no such file; 06_evaluate.py makes it, beside metrics.tsv")
    table = pd.read_csv(args.table, sep="\t", dtype={"run": str, "claim_id": str})
    if list(table)[:2] != ["run", "claim_id"] or table["run"].nunique() < 2:
        fail(args.table, "no values of two runs by claim; name a metrics.claims.tsv of two")
    known = list(table)[2:]
    for measure in args.measures or ():
        if measure not in known:
            fail(args.table, f"no measure {measure}; it has {', '.join(known)}")
    tests = {}
    for measure in args.measures or known:
        values = table.pivot(index="claim_id", columns="run", values=measure)
        tests[measure] = compare(values[table["run"].unique()])
    tests = pd.concat(tests, names=["measure"]).reset_index("measure")
    print(tests.to_csv(sep="\t", index=False, float_format="%.4g"), end="")


if __name__ == "__main__":
    main()
