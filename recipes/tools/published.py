# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy==2.4.6", "pandas==3.1.1"]
# ///
"""
Print measured figures beside the published figures of a system.

Reads   metrics.json of 06_evaluate.py; recipes/published.tsv
Prints  a table of the runs that have published figures: the measured value, and in brackets the
        published one; --remarks: the published figures that have a note, with table and source

Examples
    python recipes/tools/published.py work/demo/test/metrics.json ant_bridge
    python recipes/tools/published.py --remarks verirel
"""

from pathlib import Path

import kit

COLUMNS = "system table row measure value source note".split()
FIGURES = kit.read_texts(kit.ROOT / "recipes" / "published.tsv", *COLUMNS)


def rows_of(system):
    """Return the rows of published.tsv for SYSTEM:TABLE, or for the first table of SYSTEM."""
    tables = FIGURES["system"] + ":" + FIGURES["table"]
    chosen = tables[(tables == system) | (FIGURES["system"] == system)][:1]
    if chosen.empty:
        kit.fail(system, "no figures in recipes/published.tsv; name a system or SYSTEM:TABLE of it")
    return FIGURES[tables.isin(chosen)]


def figures_of(system):
    """Return the figures of SYSTEM:TABLE, or of the first table of SYSTEM, [rows, measures]."""
    figures = rows_of(system).pivot(index="row", columns="measure", values="value")
    return figures.astype(float)


def beside(values, figures):
    """Return the table [runs, measures] of texts "measured (published)"."""
    published = figures.reindex_like(values)
    measured = values.map("{:.3f}".format).replace("nan", "-")
    texts = measured + published.map(" ({:.4g})".format)
    texts = texts.where(published.notna(), "")
    return texts.loc[values.index.isin(figures.index), (texts != "").any()]


def print_remarks(system):
    """Print the figures of a system that have a note, grouped by table, source and note."""
    rows_of(system)  # fails if there are none
    names = FIGURES["system"] + ":" + FIGURES["table"]
    is_chosen = (FIGURES["system"] == system) | (names == system)
    figures = FIGURES[is_chosen & (FIGURES["note"] != "")]
    for head, rows in figures.groupby(["table", "source", "note"], sort=False):
        print("\n" + "; ".join(head))
        print(rows[["row", "measure", "value"]].to_string(index=False, header=False))


def main():
    parser = kit.parser(__doc__)
    # fmt: off
    add = parser.add_argument
    add("metrics", nargs="?", default="metrics.json", type=Path,
        help="read the measured figures, metrics.json")
    add("system",
        help="show the published figures of this SYSTEM or SYSTEM:TABLE in recipes/published.tsv")
    add("--remarks", action="store_true",
        help="read no metrics; show the figures that have a note, such as why no run has them")
    # fmt: on
    args = parser.parse_args()
    if args.remarks:
        print_remarks(args.system)
        return
    table = beside(kit.read_metrics(args.metrics, "value"), figures_of(args.system))
    first = rows_of(args.system).iloc[0]
    print(f"\nPublished figures in brackets ({first['system']}: {first['table']}):")
    if table.empty:
        print("none of these runs has a published figure")
    else:
        print(table.to_string())


if __name__ == "__main__":
    kit.call(main)
