# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy==2.4.6", "pandas==3.1.1"]
# ///
"""
Compare verdicts on claims with gold; average the verdicts on pairs of several models.

Gold is SUPPORTED or REFUTED if all evidence of a claim has that label, DISPUTED if it has both, and
NOT ENOUGH INFORMATION without any. A judged claim without a verdict counts as wrong.

Reads   claims.jsonl of 05_classify.py --aggregate, and qrels; mean: verdicts on pairs
Writes  mean: verdicts with the mean probabilities, and the likeliest label
Prints  accuracy, macro F1 over the verdicts that occur, and counts

Examples
    python recipes/tools/verdicts.py work/demo/test/claims.jsonl data/demo/qrels.test.tsv
    python recipes/tools/verdicts.py mean work/demo/test/{llm_verdicts,verdicts}.tsv --out mean.tsv
"""

import json

import kit
import numpy as np
import pandas as pd
from kit import LABELS, PAIR, RUN, fail, read_table, warn

VERDICTS = ["SUPPORTED", "REFUTED", "DISPUTED", "NOT ENOUGH INFORMATION"]
CHANCES = ["p_supports", "p_refutes", "p_nei"]


def gold_verdicts(qrels):
    """Return the verdict on each claim that the labels of its evidence give."""
    claims = qrels["claim_id"]
    supported, refuted = (
        (qrels["label"] == label).groupby(claims, sort=False).any() for label in LABELS[:2]
    )
    cases = [supported & refuted, supported, refuted]
    return pd.Series(np.select(cases, ["DISPUTED", *VERDICTS[:2]], VERDICTS[3]), supported.index)


def scores_of(given, gold):
    """Return accuracy, macro F1 and the table of counts, [gold verdicts, given ones]."""
    counts = pd.crosstab(gold, given.reindex(gold.index, fill_value="none"))
    counts = counts.reindex(index=VERDICTS, columns=[*VERDICTS, "none"], fill_value=0)
    counts = counts.rename_axis(index="gold", columns="given")
    right, both = np.diag(counts), counts.sum(axis=1) + counts.sum()[VERDICTS]
    with np.errstate(invalid="ignore"):
        return right.sum() / len(gold), np.nanmean(2 * right / both), counts


def compare(args):
    """Compare verdicts on claims with those of gold evidence."""
    try:
        with open(args.verdicts, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        given = pd.Series({str(line["claim_id"]): line["verdict"] for line in lines})
    except (ValueError, LookupError, TypeError) as error:
        fail(args.verdicts, f"no verdicts of 05_classify.py --aggregate: {error}")
    gold = gold_verdicts(read_table(args.qrels, [*PAIR, "label"], label=LABELS))
    if not given.index.isin(gold.index).any():
        fail(args.verdicts, "none of its claims is in the qrels; name files of one split")
    if missing := (~gold.index.isin(given.index)).sum():
        warn(args.verdicts, f"{missing} judged claims have no verdict, and count as wrong")
    accuracy, macro_f1, counts = scores_of(given, gold)
    print(
        f"\nVerdicts on {len(gold)} claims: accuracy {accuracy:.3f}, macro F1 {macro_f1:.3f}. "
        "Gold by row, given by column:"
    )
    print(counts.to_string())
    return {"claims": len(gold), "accuracy": round(accuracy, 3), "macro_F1": round(macro_f1, 3)}


def mean(args):
    """Average the probabilities of several files of verdicts on the same pairs."""
    task = kit.task_of(args, *args.verdicts)
    if kit.up_to_date(args, task, args.out):
        return {"made": []}
    first, *_ = tables = [read_table(path, [*RUN, *CHANCES]) for path in args.verdicts]
    total = 0
    for path, table in zip(args.verdicts, tables):
        chances = first[PAIR].merge(table, how="left")[CHANCES].apply(pd.to_numeric)
        if chances.isna().any(axis=None) or len(table) != len(first):
            fail(path, f"other pairs than in {args.verdicts[0]}; label the same run")
        total = total + chances.to_numpy()
    chances = total / len(tables)
    labels = np.array(LABELS, object)[chances.argmax(axis=1)]
    means = first[RUN].assign(label=labels, **dict(zip(CHANCES, chances.T)))
    with kit.written(args.out, task, pairs=len(means)) as new:
        means.to_csv(new, sep="\t", index=False, float_format="%.9g", lineterminator="\n")
    return {"made": [args.out], "pairs": len(means)}


def add_compare(add):
    add("verdicts", help="claims.jsonl")
    add("qrels", help="judged pairs")


def add_mean(add):
    add("verdicts", nargs="+", help="verdicts on pairs")
    add("--out", required=True, help="their mean")


if __name__ == "__main__":
    kit.run(kit.arguments(__doc__, {compare: add_compare, mean: add_mean}))
