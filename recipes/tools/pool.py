# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy==2.4.6", "pandas==3.1.1", "scikit-learn==1.9.1"]
# ///
"""
Judge what runs found: pool unjudged pairs, merge their labels, compare a judge with gold.

Reads   runs, qrels, claims, corpus; merge: the pool with labels, or verdicts; agreement: silver
        judgements
Writes  pool: pool.tsv, to be labelled, and pool.run.tsv, the same pairs as a run for 05 llm;
        merge: qrels.tsv, or with --judge qrels.silver.tsv, the labels of a model
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


def save(task, tables, **facts):
    """Write {path: table}, and return the facts."""
    for path, table in tables.items():
        with kit.written(path, task, **facts) as new:
            table.to_csv(new, sep="\t", index=False, lineterminator="\n")
    return {"made": list(tables), **facts}


def pool(args):
    """Write the unjudged pairs of runs, with their texts, to be labelled."""
    as_run = args.out.removesuffix(".tsv") + ".run.tsv"
    task = kit.task_of(args, args.qrels, *args.runs, args.claims, args.corpus)
    if kit.up_to_date(args, task, args.out, as_run):
        return {"made": []}
    claims, corpus = kit.read_claims(args.claims), kit.read_corpus(args.corpus)
    runs = [kit.read_table(path, RUN, claim_id=claims, abstract_id=corpus) for path in args.runs]
    run = pd.concat(runs)
    pairs = run[run["rank"] <= args.pool_depth].groupby(PAIR)["rank"].agg(["size", "min"])
    pairs = pairs[pairs["size"] >= args.agreement].set_axis(["runs", "best_rank"], axis=1)
    judged = kit.read_table(args.qrels, QRELS, label=LABELS).set_index(PAIR).index
    table = pairs.drop(judged, errors="ignore").reset_index()
    # in the order of the corpus: the order of ranks would tell annotators what to think
    table = pd.DataFrame({"abstract_id": list(corpus)}).merge(table)
    table = pd.DataFrame(claims.items(), columns=["claim_id", "claim"]).merge(table)
    table["label"] = ""
    for column in ("title", "abstract"):  # each on one line
        texts = [kit.text_of(corpus[name], [column]) for name in table["abstract_id"]]
        table[column] = [" ".join(text.split()) for text in texts]
    rank = table.groupby("claim_id").cumcount() + 1
    tables = {args.out: table[COLUMNS], as_run: table.assign(rank=rank, score=-rank)[RUN]}
    return save(task, tables, pairs=len(table), judged_already=len(pairs) - len(table))


def merge(args):
    """Write the qrels with the labels of a pool; or, with --judge, the labels of a model alone."""
    out = args.out or f"{args.work}/{args.split}/qrels{'.silver' * bool(args.judge)}.tsv"
    task = kit.task_of(args, args.pool, *[args.qrels] * (not args.judge))
    if kit.up_to_date(args, task, out):
        return {"made": []}
    pairs = kit.read_table(args.pool, PAIR, label=[*LABELS, ""])
    answers = pairs.loc[pairs["label"] != "", QRELS]
    facts = {"labels": len(answers), "without_label": len(pairs) - len(answers)}
    if args.judge:
        return save(task, {out: answers.assign(judge=args.judge)}, **facts)
    if {"judge", "p_nei"} & set(pairs):
        kit.fail(args.pool, "labels of a model do not join the qrels; name it by --judge")
    qrels = kit.read_table(args.qrels, QRELS, label=LABELS)[QRELS]
    both = pd.concat([qrels, answers]).drop_duplicates()
    for row in both.index[both.duplicated(PAIR)]:
        pair = " ".join(pairs.loc[row, PAIR])
        kit.fail(f"{args.pool}:{row + 2}", f"the qrels have another label of {pair}; change one")
    both = both.iloc[np.argsort(both["claim_id"].factorize()[0], kind="stable")]
    return save(task, {out: both}, added=len(both) - len(qrels), **facts)


def agreement(args):
    """Print how far the judge of silver judgements agrees with gold."""
    from sklearn.metrics import cohen_kappa_score as kappa

    silver = kit.read_table(args.silver, [*QRELS, "judge"], label=LABELS)
    gold = kit.read_table(args.qrels, QRELS, label=LABELS)[QRELS]
    both, rows = silver.merge(gold, how="left", on=PAIR, suffixes=("", "_gold")), []
    for judge, pairs in both.groupby("judge", sort=False):
        row, pairs = {"judge": judge, "pairs": len(pairs)}, pairs.dropna(subset="label_gold")
        given, known = pairs["label"], pairs["label_gold"]
        row |= {"with_gold": len(pairs), "agreement": float((given == known).mean())}
        if len(pairs):  # NaN where there is one label only
            row |= {
                "kappa": float(kappa(given, known)),
                "kappa_relevance": float(kappa(given != "NEI", known != "NEI")),
            }
        rows.append(row)
    print(pd.DataFrame(rows).to_string(index=False, float_format="%.3f"))
    return {"made": [], "judges": rows}


# -------------------- Command line
def add_qrels(add):
    add("--qrels", default="{data}/qrels.{split}.tsv", help="judged pairs")


def add_pool(add):
    add("runs", nargs="+", help="runs")
    add_qrels(add)
    add("--claims", default="{data}/claims.{split}.tsv", help="claims")
    add("--corpus", default="{data}/corpus.jsonl", help="abstracts")
    add("--out", default="{work}/{split}/pool.tsv", help="pairs with an empty label")
    add("--pool-depth", type=int, default=10, help="ranks of each run to judge")
    add("--agreement", type=int, default=1, metavar="N", help="pairs of at least N runs")


def add_merge(add):
    add("pool", help="pool with labels; rows with an empty one are left out; or verdicts")
    add_qrels(add)
    add("--judge", metavar="MODEL", help="what gave the labels: they are silver judgements")
    add("--out", help="default: WORK/SPLIT/qrels.tsv, or qrels.silver.tsv")


def add_agreement(add):
    add("silver", help="silver judgements of merge --judge")
    add_qrels(add)


if __name__ == "__main__":
    jobs = {pool: add_pool, merge: add_merge, agreement: add_agreement}
    kit.run(kit.arguments(__doc__, jobs))
