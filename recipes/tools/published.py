# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy==2.4.6", "pandas==3.1.1"]
# ///
"""
Print measured figures beside the published ones of recipes/published.tsv.

Reads   metrics.json of 06_evaluate.py, recipes/published.tsv
Prints  for each run and measure that have a published figure: measured (published)

Examples
    python recipes/tools/published.py work/climatecheck2025/efc/test/metrics.json efc
    python recipes/tools/published.py work/scifact/verirel/test/metrics.json "verirel:SciFact-Open"
"""
import argparse
import json

import pandas as pd
from kit import ROOT, fail

FIGURES = ROOT / "recipes" / "published.tsv"

def figures_of(system):
    """Return {(run, measure): published figure} of SYSTEM, that is its first table, or SYSTEM:TABLE."""
    figures = pd.read_csv(FIGURES, sep="\t", keep_default_na=False)
    tables = figures["system"] + ":" + figures["table"]
    chosen = tables[(tables == system) | (figures["system"] == system)][:1]
    if chosen.empty:
        fail(FIGURES, f"no figures of {system}")
    return figures[tables.isin(chosen)].set_index(["row", "measure"])["value"].to_dict()

def beside(values, figures):
    """Return a table of texts: measured (published), by run and measure."""
    table = {}
    for run, measured in values.items():
        for measure, value in measured.items():
            if (run, measure) in figures and value is not None:
                text = f"{value:.4g} ({figures[run, measure]:.4g})"
                table.setdefault(measure, {})[run] = text
    return pd.DataFrame(table).fillna("")

def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", help="metrics.json")
    parser.add_argument("system", help="SYSTEM or SYSTEM:TABLE")
    args = parser.parse_args()
    try:
        with open(args.metrics, encoding="utf-8") as file:
            values = json.load(file)["value"]
    except (OSError, ValueError, KeyError) as error:
        fail(args.metrics, f"no metrics.json of 06_evaluate.py: {error}")
    table = beside(values, figures_of(args.system))
    print(f"{args.system}: measured (published)")
    print("no run here has published figures" if table.empty else table.to_string())

if __name__ == "__main__":
    main()
