# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy==2.4.6", "pandas==3.1.1"]
# ///
"""
Print measured figures beside the published ones of a system.

Reads   metrics.json of 06_evaluate.py; recipes/published.tsv
Prints  a table of the runs that have published figures: measured, and published in brackets

Example
    python recipes/tools/published.py work/demo/test/metrics.json ant_bridge
"""

import argparse
import json
from pathlib import Path

import pandas as pd
from kit import ROOT, fail


def figures_of(system):
    """Return the figures of SYSTEM's first table, or of SYSTEM:TABLE, [rows, measures]."""
    figures = pd.read_csv(ROOT / "recipes" / "published.tsv", sep="\t")
    tables = figures["system"] + ":" + figures["table"]
    chosen = tables[(tables == system) | (figures["system"] == system)][:1]
    if chosen.empty:
        fail(system, "no figures in recipes/published.tsv; name a system or SYSTEM:TABLE of it")
    return figures[tables.isin(chosen)].pivot(index="row", columns="measure", values="value")


def beside(values, figures):
    """Return texts "measured (published)" [runs, measures] where there is a published figure."""
    measures = [measure for measure in values if measure in figures]
    runs = [run for run in values.index if run in figures.index]
    table = pd.DataFrame("", index=runs, columns=measures)
    for run in runs:
        for measure in measures:
            measured = values.loc[run, measure]
            published = figures.loc[run, measure]
            if pd.notna(published):
                shown = "-" if pd.isna(measured) else f"{measured:.3f}"
                table.loc[run, measure] = f"{shown} ({published:.4g})"
    return table.loc[:, (table != "").any()]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # fmt: off
    parser.add_argument("metrics", type=Path, help="read the measured figures, metrics.json")
    parser.add_argument("system",
        help="show the published figures of this SYSTEM or SYSTEM:TABLE in recipes/published.tsv")
    # fmt: on
    args = parser.parse_args()
    if not args.metrics.exists():
        fail(args.metrics, "not found; make it: python 06_evaluate.py")
    values = pd.DataFrame(json.loads(args.metrics.read_bytes())["value"]).T.astype(float)
    table = beside(values, figures_of(args.system))
    print(f"\nPublished figures in brackets ({args.system}):")
    if table.empty:
        print("none of these runs has a published figure")
    else:
        print(table.to_string())


if __name__ == "__main__":
    main()
