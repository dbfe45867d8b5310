# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy==2.4.6", "pandas==3.1.1"]
# ///
"""
Compare verdicts on claims with gold verdicts; average several models' verdicts on pairs.

The gold verdict on a claim is SUPPORTED or REFUTED if all its evidence has that label, DISPUTED if
its evidence has both labels, and NOT ENOUGH INFORMATION if it has no evidence. A judged claim
without a verdict counts as wrong. So does UNDECIDED, the verdict where no label is much more
probable than chance, because it is never a gold verdict.

Reads   compare: claims.jsonl of 05_classify.py aggregate, and qrels; mean: verdicts on pairs
Writes  mean: verdicts with the mean probabilities and the most probable label
Prints  accuracy, macro F1 over the verdicts that occur, and counts

Examples
    python recipes/tools/verdicts.py work/demo/test/claims.jsonl data/demo/qrels.test.tsv
    python recipes/tools/verdicts.py mean work/demo/test/{llm_verdicts,verdicts}.tsv --out mean.tsv
"""

import json

import kit
import numpy as np
import pandas as pd
from kit import LABELS, PAIR, PROBABILITIES, RUN, fail, warn

VERDICTS = ["SUPPORTED", "REFUTED", "DISPUTED", "NOT ENOUGH INFORMATION"]
GIVEN = [*VERDICTS, "UNDECIDED", "none"]  # none: a judged claim without a verdict


def gold_verdicts(qrels):
    """Return the verdict on each judged claim that follows from the labels of its evidence."""
    claim_ids = qrels["claim_id"]
    supported = (qrels["label"] == "SUPPORTS").groupby(claim_ids, sort=False).any()
    refuted = (qrels["label"] == "REFUTES").groupby(claim_ids, sort=False).any()
    cases = [supported & refuted, supported, refuted]
    verdicts = np.select(cases, ["DISPUTED", "SUPPORTED", "REFUTED"], "NOT ENOUGH INFORMATION")
    return pd.Series(verdicts, supported.index)


def scores_of(predicted, gold):
    """Return accuracy, macro F1 and the table of counts, [gold verdicts, predicted verdicts]."""
    counts = pd.crosstab(gold, predicted.reindex(gold.index, fill_value="none"))
    counts = counts.reindex(index=VERDICTS, columns=GIVEN, fill_value=0)
    counts = counts.rename_axis(index="gold", columns="given")
    right = np.diag(counts)
    both = counts.sum(axis=1) + counts.sum()[VERDICTS]
    with np.errstate(invalid="ignore"):  # 0 / 0 where a verdict does not occur
        f1 = 2 * right / both
    return right.sum() / len(gold), np.nanmean(f1), counts


def compare(args):
    """Compare verdicts on claims with the verdicts that follow from the qrels."""
    kit.warn_of_changes(args.verdicts)
    try:
        with open(args.verdicts, encoding="utf-8") as file:
            records = [json.loads(line) for line in file]
        verdicts = {str(record["claim_id"]): record["verdict"] for record in records}
        for verdict in verdicts.values():
            GIVEN.index(verdict)  # a ValueError if it is unknown
    except (ValueError, LookupError, TypeError) as error:
        fail(args.verdicts, f"no verdicts of 05_classify.py aggregate ({error}); run this job")
    predicted = pd.Series(verdicts)
    gold = gold_verdicts(kit.read_qrels(args.qrels))
    if not predicted.index.isin(gold.index).any():
        fail(args.verdicts, "none of its claims is in the qrels; give files of the same split")
    missing = (~gold.index.isin(predicted.index)).sum()
    if missing:
        warn(args.verdicts, f"{missing} judged claims have no verdict and count as wrong")
    accuracy, macro_f1, counts = scores_of(predicted, gold)
    print(
        f"\nVerdicts on {len(gold)} claims: accuracy {accuracy:.3f}, macro F1 {macro_f1:.3f}. "
        "Gold by row, given by column:"
    )
    print(counts.to_string())
    return {"claims": len(gold), "accuracy": round(accuracy, 3), "macro_F1": round(macro_f1, 3)}


def mean(args):
    """Average the probabilities in several files of verdicts on the same pairs."""
    task = kit.task_of(args, *args.verdicts)
    if kit.up_to_date(args, task, args.out):
        return {"made": []}
    tables = [kit.read_verdicts(path, RUN).set_index(PAIR) for path in args.verdicts]
    run = tables[0].index
    for path, table in zip(args.verdicts, tables):
        if set(table.index) != set(run):
            fail(path, f"other pairs than in {args.verdicts[0]}; classify the same run")
    means = pd.concat(tables)[PROBABILITIES].groupby(PAIR, sort=False).mean()
    # where probabilities are equal, NEI wins, then REFUTES, as in 05_classify.py
    labels = np.array(LABELS[::-1], object)[means.to_numpy()[:, ::-1].argmax(axis=1)]
    verdicts = tables[0][["rank", "score"]].assign(label=labels).join(means).reset_index()
    with kit.written(args.out, task, pairs=len(verdicts)) as new:
        kit.write_table(verdicts, new)
    return {"made": [args.out], "pairs": len(verdicts)}


# fmt: off
def add_compare(add):
    add("verdicts", help="read verdicts on claims, claims.jsonl of 05_classify.py aggregate")
    add("qrels", help="compare them with the judged pairs of this file")


def add_mean(add):
    add("verdicts", nargs="+", help="average these verdicts, all on the pairs of one run")
    add("--out", required=True, help="write the averaged verdicts to this file")
# fmt: on


if __name__ == "__main__":
    kit.run_job(kit.arguments(__doc__, {compare: add_compare, mean: add_mean}))
