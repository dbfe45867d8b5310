# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy==2.4.6", "pandas==3.1.1", "scikit-learn==1.9.1"]
# ///
"""
Judge the results of runs: pool unjudged pairs, merge their labels, compare a model with gold.

Reads   pool: runs, qrels, claims, corpus; merge: the pool with labels, or verdicts, and qrels;
        agreement: silver judgements, which are labels of a model, and qrels
Writes  pool: pool.tsv, to be labelled, and pool.run.tsv, the same pairs as a run for 05 llm;
        merge: qrels.tsv, or with --judge qrels.silver.tsv
Prints  agreement: a table; the last line is JSON

Examples
    python recipes/tools/pool.py work/demo/test/{hybrid,rerank}.tsv
    python recipes/tools/pool.py merge labelled.tsv
    python recipes/tools/pool.py agreement work/demo/test/qrels.silver.tsv
"""

import kit
import numpy as np
import pandas as pd
from kit import LABELS, PAIR, RUN

QRELS = [*PAIR, "label"]
COLUMNS = "claim_id claim abstract_id title abstract label runs best_rank".split()


def save(task, tables, **summary):
    """Write {path: table}, and return the summary."""
    for path, table in tables.items():
        with kit.written(path, task, **summary) as new:
            table.to_csv(new, sep="\t", index=False, lineterminator="\n")
    return {"made": list(tables), **summary}


def pool(args):
    """Write the unjudged pairs of runs, with their texts, to be labelled."""
    as_run = args.out.removesuffix(".tsv") + ".run.tsv"
    task = kit.task_of(args, args.qrels, *args.runs, args.claims, args.corpus)
    if kit.up_to_date(args, task, args.out, as_run):
        return {"made": []}
    claims = kit.read_claims(args.claims)
    corpus = kit.read_corpus(args.corpus)
    runs = [kit.read_table(path, RUN, claim_id=claims, abstract_id=corpus) for path in args.runs]
    found = pd.concat(runs)
    found = found[found["rank"] <= args.pool_depth]
    pairs = found.groupby(PAIR)["rank"].agg(runs="size", best_rank="min")
    pairs = pairs[pairs["runs"] >= args.agreement]
    judged = kit.read_table(args.qrels, QRELS, label=LABELS).set_index(PAIR).index
    table = pairs.drop(judged, errors="ignore").reset_index()
    # claims and abstracts in the order of their files: ranks would bias annotators
    table = pd.DataFrame({"abstract_id": list(corpus)}).merge(table)
    table = pd.DataFrame(claims.items(), columns=["claim_id", "claim"]).merge(table)
    table["label"] = ""
    for column in ("title", "abstract"):  # each on one line
        texts = [kit.text_of(corpus[abstract_id], [column]) for abstract_id in table["abstract_id"]]
        table[column] = [" ".join(text.split()) for text in texts]
    rank = table.groupby("claim_id").cumcount() + 1
    run = table.assign(rank=rank, score=-rank)[RUN]
    tables = {args.out: table[COLUMNS], as_run: run}
    return save(task, tables, pairs=len(table), judged_already=len(pairs) - len(table))


def merge(args):
    """Write the qrels with the labels of a pool; or, with --judge, the labels of a model alone."""
    if args.judge:
        inputs = [args.pool]
        name = "qrels.silver.tsv"
    else:
        inputs = [args.pool, args.qrels]
        name = "qrels.tsv"
    out = args.out or f"{args.work}/{args.split}/{name}"
    task = kit.task_of(args, *inputs)
    if kit.up_to_date(args, task, out):
        return {"made": []}
    pairs = kit.read_table(args.pool, PAIR, label=[*LABELS, ""])
    labelled = pairs.loc[pairs["label"] != "", QRELS]
    summary = {"labels": len(labelled), "without_label": len(pairs) - len(labelled)}
    if args.judge:
        return save(task, {out: labelled.assign(judge=args.judge)}, **summary)
    if "judge" in pairs or "p_nei" in pairs:
        kit.fail(args.pool, "labels of a model stay apart from the qrels; name it with --judge")
    qrels = kit.read_table(args.qrels, QRELS, label=LABELS)[QRELS]
    both = pd.concat([qrels, labelled]).drop_duplicates()
    for row in both.index[both.duplicated(PAIR)]:
        pair = " ".join(pairs.loc[row, PAIR])
        kit.fail(f"{args.pool}:{row + 2}", f"the qrels have another label for {pair}; change one")
    claim_order = both["claim_id"].factorize()[0]
    both = both.iloc[np.argsort(claim_order, kind="stable")]
    return save(task, {out: both}, added=len(both) - len(qrels), **summary)


def agreement(args):
    """Print how far the models behind silver judgements agree with gold."""
    from sklearn.metrics import cohen_kappa_score

    silver = kit.read_table(args.silver, [*QRELS, "judge"], label=LABELS)
    gold = kit.read_table(args.qrels, QRELS, label=LABELS)[QRELS]
    both = silver.merge(gold, how="left", on=PAIR, suffixes=("", "_gold"))
    rows = []
    for judge, pairs in both.groupby("judge", sort=False):
        with_gold = pairs.dropna(subset="label_gold")
        predicted = with_gold["label"]
        expected = with_gold["label_gold"]
        row = {
            "judge": judge,
            "pairs": len(pairs),
            "with_gold": len(with_gold),
            "agreement": float((predicted == expected).mean()),
        }
        if len(with_gold):  # kappa is NaN where only one label occurs
            row["kappa"] = float(cohen_kappa_score(predicted, expected))
            relevance = cohen_kappa_score(predicted != "NEI", expected != "NEI")
            row["kappa_relevance"] = float(relevance)
        rows.append(row)
    print(pd.DataFrame(rows).to_string(index=False, float_format="%.3f"))
    return {"made": [], "judges": rows}


# -------------------- Command line
# fmt: off
def add_pool(add):
    add("runs", nargs="+", help="pool the pairs of these runs")
    kit.add_qrels(add)
    kit.add_claims(add)
    kit.add_corpus(add)
    add("--out", default="{work}/{split}/pool.tsv",
        help="write the pairs with an empty label to this file, and as a run to NAME.run.tsv")
    add("--pool-depth", type=int, default=10, help="pool this many ranks of each run")
    add("--agreement", type=int, default=1, metavar="N",
        help="pool only pairs that at least N runs have in these ranks")


def add_merge(add):
    add("pool", help="read labelled pairs, a pool or verdicts; skip rows without a label")
    kit.add_qrels(add)
    add("--judge", metavar="MODEL",
        help="write silver judgements, the labels of this model, apart from the qrels")
    add("--out",
        help="write to this file (default: WORK/SPLIT/qrels.tsv, --judge: qrels.silver.tsv)")


def add_agreement(add):
    add("silver", help="read silver judgements, written by merge --judge")
    kit.add_qrels(add)
# fmt: on


if __name__ == "__main__":
    jobs = {pool: add_pool, merge: add_merge, agreement: add_agreement}
    kit.run(kit.arguments(__doc__, jobs))
