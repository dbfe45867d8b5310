# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy==2.4.6", "pandas==3.1.1"]
# ///
"""
Find the claims on whose first place runs disagree, to ask a language model only about these.

MeVer (CheckThat! 2026) do so. The other claims keep the order of the first run.

Reads   select: runs, claims; merge: two runs
Writes  select: disagreement.tsv, the claims whose first places differ between the runs, and
        disagreement.run.tsv, the rows that the first run has for them
        merge: merged.tsv, the rows of the second run for the claims that it has, those of the first
        run for all others
Prints  the last line is JSON

Example
    T=work/demo/test
    python recipes/tools/disagreement.py $T/rerank.tsv $T/hybrid.tsv
    python 04_llm_rerank.py --claims $T/disagreement.tsv --run $T/disagreement.run.tsv \\
        --model gpt-4.1
    python recipes/tools/disagreement.py merge $T/rerank.tsv $T/llm.tsv
"""

import kit
import pandas as pd
from kit import CLAIM, RUN


def first_places(run, places):
    """Return the set of abstracts in the first places of each claim."""
    first = run[run["rank"] <= places]
    return first.groupby("claim_id")["abstract_id"].agg(frozenset)


def select(args):
    """Write the claims whose first places differ between runs."""
    if len(args.runs) < 2:
        kit.fail(args.runs[0], "one run cannot disagree; name two or more")
    as_run = args.out.removesuffix(".tsv") + ".run.tsv"
    task = kit.task_of(args, *args.runs, args.claims)
    if kit.up_to_date(args, task, args.out, as_run):
        return {"made": []}
    claims = kit.read_table(args.claims, CLAIM)
    runs = [kit.read_table(path, RUN, claim_id=set(claims["claim_id"])) for path in args.runs]
    found = pd.concat([first_places(run, args.places) for run in runs], axis=1)
    # a claim that a run lacks has NaN there, which differs from every set
    differs = found.apply(lambda places: len(set(places)) > 1, axis=1)
    disputed = found.index[differs]
    summary = {"claims": len(claims), "disputed": len(disputed)}
    run = runs[0][RUN]
    tables = {args.out: claims, as_run: run}
    for path, table in tables.items():
        with kit.written(path, task, **summary) as new:
            kit.write_table(table[table["claim_id"].isin(disputed)], new)
    return {"made": list(tables), **summary}


def merge(args):
    """Put the rows of a second run in place of those that the first run has for its claims."""
    task = kit.task_of(args, args.first, args.second)
    if kit.up_to_date(args, task, args.out):
        return {"made": []}
    first = kit.read_table(args.first, RUN)[RUN]
    second = kit.read_table(args.second, RUN, claim_id=set(first["claim_id"]))[RUN]
    kept = first[~first["claim_id"].isin(second["claim_id"])]
    summary = {"rows": len(kept) + len(second), "claims_replaced": second["claim_id"].nunique()}
    with kit.written(args.out, task, **summary) as new:
        kit.write_table(pd.concat([kept, second]), new)
    return {"made": [args.out], **summary}


# fmt: off
def add_select(add):
    add("runs", nargs="+", help="compare the first places of these runs, two or more")
    kit.add_claims(add)
    add("--places", type=kit.count, default=1,
        help="compare which abstracts are in this many first places, in whatever order")
    add("--out", default="{work}/{split}/disagreement.tsv",
        help="write the claims to this file, and the first run's rows to NAME.run.tsv")


def add_merge(add):
    add("first", help="keep the rows of this run for claims that the second run lacks")
    add("second", help="take all rows of this run")
    add("--out", default="{work}/{split}/merged.tsv", help="write the merged run to this file")
# fmt: on


if __name__ == "__main__":
    kit.run_job(kit.arguments(__doc__, {select: add_select, merge: add_merge}))
