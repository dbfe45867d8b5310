# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy==2.4.6", "pandas==3.1.1"]
# ///
"""
Pool the unjudged pairs of runs for people to label, and merge the labels into the qrels.

Reads   pool: runs; merge: the labelled pool; both: qrels, claims, corpus
Writes  pool: pool.tsv, in which the column label is empty, and pool.run.tsv, the same pairs as a
        run, which 05_classify.py can label; merge: qrels.tsv
Prints  the last line is JSON

Examples
    python recipes/tools/pool.py work/demo/test/{hybrid,rerank}.tsv
    python recipes/tools/pool.py merge labelled.tsv
"""

from pathlib import Path

import kit
import numpy as np
import pandas as pd
from kit import CLAIM, LABELS, PAIR, QRELS, RUN

COLUMNS = "claim_id claim abstract_id title abstract label runs best_rank".split()


def save(task, tables, **summary):
    """Write {path: table}, and return the summary."""
    for path, table in tables.items():
        with kit.written(path, task, **summary) as new:
            kit.write_table(table, new)
    return {"made": list(tables), **summary}


def pool(args):
    """Write the unjudged pairs of runs with their texts, for people to label."""
    as_run = args.out.removesuffix(".tsv") + ".run.tsv"
    task = kit.task_of(args, args.qrels, *args.runs, args.claims, args.corpus)
    if kit.up_to_date(args, task, args.out, as_run):
        return {"made": []}
    if Path(args.out).exists() and kit.read_table(args.out, PAIR)["label"].any():
        kit.fail(args.out, "it has labels; keep it under another name")
    claims = kit.read_claims(args.claims)
    corpus = kit.read_corpus(args.corpus)
    runs = [kit.read_table(path, RUN, claim_id=claims, abstract_id=corpus) for path in args.runs]
    found = pd.concat(runs)
    found = found[found["rank"] <= args.pool_depth]
    pairs = found.groupby(PAIR)["rank"].agg(runs="size", best_rank="min")
    pairs = pairs[pairs["runs"] >= args.agreement]
    judged = kit.read_qrels(args.qrels).set_index(PAIR).index
    table = pairs.drop(judged, errors="ignore").reset_index()
    # claims and abstracts come in the order of their files: the order of ranks would bias people
    table = pd.DataFrame({"abstract_id": list(corpus)}).merge(table)
    table = pd.DataFrame(claims.items(), columns=CLAIM).merge(table)
    table["label"] = ""
    for column in ("title", "abstract"):
        texts = [kit.text_of(corpus[abstract_id], [column]) for abstract_id in table["abstract_id"]]
        table[column] = [" ".join(text.split()) for text in texts]
    rank = table.groupby("claim_id").cumcount() + 1
    run = table.assign(rank=rank, score=-rank)[RUN]
    return save(
        task,
        {args.out: table[COLUMNS], as_run: run},
        pairs=len(table),
        judged_already=len(pairs) - len(table),
    )


def merge(args):
    """Add the labels of a pool to the qrels."""
    task = kit.task_of(args, args.pool, args.qrels, args.claims, args.corpus)
    if kit.up_to_date(args, task, args.out):
        return {"made": []}
    pairs = kit.read_table(
        args.pool,
        PAIR,
        claim_id=kit.read_claims(args.claims),
        abstract_id=kit.read_corpus(args.corpus),
        label=[*LABELS, ""],
    )
    if "label" not in pairs:
        kit.fail(args.pool, "no column label; give the pool.tsv that you have labelled")
    if "p_nei" in pairs:
        kit.fail(
            args.pool, "labels of a model are no judgements; give a pool that you have labelled"
        )
    labelled = pairs.loc[pairs["label"] != "", QRELS]
    qrels = kit.read_qrels(args.qrels)
    both = pd.concat([qrels, labelled]).drop_duplicates()
    # The qrels stand first and hold no pair twice, so such a row is one of the pool.
    for row in both.index[both.duplicated(PAIR)]:
        pair = " ".join(pairs.loc[row, PAIR])
        kit.fail(f"{args.pool}:{row + 2}", f"the qrels have another label for {pair}; change one")
    claim_order = both["claim_id"].factorize()[0]
    both = both.iloc[np.argsort(claim_order, kind="stable")]
    return save(
        task,
        {args.out: both},
        added=len(both) - len(qrels),
        labels=len(labelled),
        without_label=len(pairs) - len(labelled),
    )


# -------------------- Command line
# fmt: off
def add_inputs(add):
    kit.add_qrels(add)
    kit.add_claims(add)
    kit.add_corpus(add)


def add_pool(add):
    add("runs", nargs="+", help="pool the pairs of these runs")
    add_inputs(add)
    add("--out", default="{work}/{split}/pool.tsv",
        help="write the pairs with an empty label to this file, and as a run to NAME.run.tsv")
    add("--pool-depth", type=kit.count, default=10, help="pool this many ranks of each run")
    add("--agreement", type=kit.count, default=1, metavar="N",
        help="pool only pairs that at least N runs have in these ranks")


def add_merge(add):
    add("pool", help="read the labelled pairs of this file; skip rows without a label")
    add_inputs(add)
    add("--out", default="{work}/{split}/qrels.tsv", help="write all judgements to this file")
# fmt: on


if __name__ == "__main__":
    kit.run_job(kit.arguments(__doc__, {pool: add_pool, merge: add_merge}))
