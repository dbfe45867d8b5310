# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy==2.4.6", "pandas==3.1.1", "scikit-learn==1.9.1"]
# ///
"""
Pool unjudged pairs of runs to be labelled, merge the labels into qrels, compare a judge with gold.

Reads   pool: runs, qrels, claims, corpus; merge: a labelled pool, or verdicts, and qrels;
        agreement: silver judgements, which are qrels with a column judge, and qrels
Writes  pool: pool.tsv, pairs with texts and an empty label; pool.run.tsv, the same as a run;
        merge: qrels.tsv, with --judge qrels.silver.tsv
Prints  counts; agreement: a table; the last line is JSON

Examples
    python recipes/tools/pool.py pool work/demo/test/{hybrid,rerank}.tsv
    python recipes/tools/pool.py merge labelled.tsv
    python recipes/tools/pool.py merge work/demo/test/verdicts.tsv --judge gpt-4.1
    python recipes/tools/pool.py agreement work/demo/test/qrels.silver.tsv
"""
from pathlib import Path

import numpy as np
import pandas as pd
from kit import LABELS, PAIR, RUN, arguments, fail, read_corpus, read_table, run, task_of
from kit import text_of, up_to_date, written

CLAIM, QRELS = ["claim_id", "claim"], [*PAIR, "label"]
COLUMNS = [*CLAIM, "abstract_id", "title", "abstract", "label", "runs", "best_rank"]

def write(table, path, task):
    with written(path, task) as new:
        table.to_csv(new, sep="\t", index=False, lineterminator="\n")

def read_qrels(path):
    return read_table(path, QRELS, label=LABELS)[QRELS]

# -------------------- Pool
def pool(args):
    """Write the unjudged pairs of runs, with their texts, to be labelled."""
    outs = [args.out, str(Path(args.out).with_suffix(".run.tsv"))]
    task = task_of(args, args.qrels, *args.runs, args.claims, args.corpus)
    if up_to_date(args, task, *outs):
        return {"made": []}
    claims, corpus = read_table(args.claims, CLAIM)[CLAIM], read_corpus(args.corpus)
    ids = {"claim_id": claims["claim_id"], "abstract_id": corpus}
    rows = pd.concat([read_table(path, RUN, **ids) for path in args.runs])
    ranks = rows[rows["rank"] <= args.pool_depth].groupby(PAIR)["rank"]
    pairs = ranks.agg(runs="count", best_rank="min")
    pairs = pairs[pairs["runs"] >= args.agreement]
    table = pairs.drop(read_qrels(args.qrels).set_index(PAIR).index, errors="ignore").reset_index()
    # in the order of the corpus: the order of ranks would tell annotators what to think
    table = pd.DataFrame({"abstract_id": list(corpus)}).merge(table)
    table = claims.merge(table).assign(label="")
    for column in ("title", "abstract"):  # each on one line
        texts = [text_of(corpus[name], [column]) for name in table["abstract_id"]]
        table[column] = [" ".join(text.split()) for text in texts]
    rank = table.groupby("claim_id").cumcount() + 1
    write(table[COLUMNS], outs[0], task)
    write(table.assign(rank=rank, score=-rank)[RUN], outs[1], task)
    return {"made": outs, "pairs": len(table), "judged_already": len(pairs) - len(table)}

# -------------------- Merge
def labels_of(path, judge):
    """Return the labelled pairs of a pool or of verdicts, and how many have no label."""
    pairs = read_table(path, PAIR)
    if "label" not in pairs:
        fail(f"{path}:1", "no column label; fill that of the file that pool writes")
    if not judge and {"judge", "p_nei"} & set(pairs):
        fail(path, "labels of a model do not join the qrels; name it by --judge")
    pairs = read_table(path, PAIR, label=[*LABELS, ""])
    return pairs.loc[pairs["label"] != "", QRELS], int((pairs["label"] == "").sum())

def merge(args):
    """Write the qrels with the labels of a pool, or silver judgements with those of a model."""
    name = "qrels.silver.tsv" if args.judge else "qrels.tsv"
    out = args.out or f"{args.work}/{args.split}/{name}"
    task = task_of(args, args.pool, *[args.qrels] * (not args.judge))
    if up_to_date(args, task, out):
        return {"made": []}
    answers, without_label = labels_of(args.pool, args.judge)
    if args.judge:
        write(answers.assign(judge=args.judge), out, task)
        return {"made": [out], "labels": len(answers), "without_label": without_label}
    qrels = read_qrels(args.qrels)
    both = pd.concat([qrels, answers]).drop_duplicates()
    for pair in both.loc[both.duplicated(PAIR), PAIR].to_numpy():
        fail(args.pool, f"the qrels have another label: {' '.join(pair)}; change one of them")
    both = both.iloc[np.argsort(both["claim_id"].factorize()[0], kind="stable")]
    write(both, out, task)
    return {"made": [out], "added": len(both) - len(qrels), "without_label": without_label}

# -------------------- Agreement
def agreement(args):
    """Print how far each judge agrees with gold on the pairs that have both labels."""
    from sklearn.metrics import cohen_kappa_score as kappa
    task_of(args, args.silver, args.qrels)  # which refuses files that are not there
    silver, rows = read_table(args.silver, [*QRELS, "judge"], label=LABELS), []
    both = silver.merge(read_qrels(args.qrels), how="left", on=PAIR, suffixes=("", "_gold"))
    for judge, pairs in both.groupby("judge", sort=False):
        known = pairs.dropna(subset="label_gold")
        given, gold = known["label"], known["label_gold"]
        row = {"judge": judge, "pairs": len(pairs), "with_gold": len(known)}
        if len(known):
            row |= {"agreement": (given == gold).mean(), "kappa": kappa(given, gold),
                    "kappa_relevance": kappa(given != "NEI", gold != "NEI")}
        rows.append(row)
    print(pd.DataFrame(rows).to_string(index=False, float_format="%.3f"))
    return {"judges": rows}

# -------------------- Command line
def add_pool(add):
    add("runs", nargs="+", help="runs")
    add("--qrels", default="{data}/qrels.{split}.tsv", help="judged pairs, which are left out")
    add("--claims", default="{data}/claims.{split}.tsv", help="claims")
    add("--corpus", default="{data}/corpus.jsonl", help="abstracts")
    add("--out", default="{work}/{split}/pool.tsv", help="pairs; as a run beside it: .run.tsv")
    add("--pool-depth", type=int, default=10, help="ranks of each run to judge")
    add("--agreement", type=int, default=1, metavar="N", help="pairs that at least N runs have")

def add_merge(add):
    add("pool", help="pool with labels, or verdicts")
    add("--qrels", default="{data}/qrels.{split}.tsv", help="judged pairs")
    add("--judge", metavar="MODEL", help="what gave the labels: silver judgements, without qrels")
    add("--out", help="default: WORK/SPLIT/qrels.tsv, or qrels.silver.tsv")

def add_agreement(add):
    add("silver", help="silver judgements")
    add("--qrels", default="{data}/qrels.{split}.tsv", help="gold")

def main():
    run(arguments(__doc__, {pool: add_pool, merge: add_merge, agreement: add_agreement}))

if __name__ == "__main__":
    main()
