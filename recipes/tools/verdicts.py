# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy==2.4.6", "pandas==3.1.1"]
# ///
"""
Score verdicts on claims against the verdicts that the labels of their gold evidence give.

A claim with evidence for and against it is DISPUTED; one without evidence has NOT ENOUGH
INFORMATION. A judged claim without a verdict counts as wrong; verdicts on other claims do not count.

Reads   claims.jsonl of 05_classify.py aggregate, qrels
Prints  accuracy, macro F1 over the verdicts that occur, the confusion matrix; the last line is JSON

Example
    python recipes/tools/verdicts.py work/demo/test/claims.jsonl data/demo/qrels.test.tsv
"""
import argparse
import json

import numpy as np
import pandas as pd
from kit import LABELS, PAIR, fail, read_table

VERDICTS = ("SUPPORTED", "REFUTED", "DISPUTED", "NOT ENOUGH INFORMATION")

def gold_verdicts(qrels):
    """Return the verdict on each claim that the labels of its evidence give."""
    supported, refuted = ((qrels["label"] == label).groupby(qrels["claim_id"], sort=False).any()
                          for label in LABELS[:2])
    cases = [supported & refuted, supported, refuted]
    verdicts = np.select(cases, VERDICTS[2:3] + VERDICTS[:2], VERDICTS[3])
    return pd.Series(verdicts, supported.index)

def read_verdicts(path):
    """Return a series of verdicts by claim."""
    verdicts = {}
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                one = json.loads(line)
                claim, verdict = str(one["claim_id"]), one["verdict"]
            except (ValueError, LookupError, TypeError):
                claim = verdict = None
            if verdict not in VERDICTS or claim in verdicts:
                fail(f"{path}:{number}", "no verdict of 05_classify.py aggregate, or a second one")
            verdicts[claim] = verdict
    return pd.Series(verdicts)

def score(given, gold):
    """Return counts, accuracy and macro F1, and the confusion matrix of verdicts by claim."""
    matrix = pd.crosstab(gold, given.reindex(gold.index, fill_value="none"))
    matrix = matrix.reindex(index=VERDICTS, columns=[*VERDICTS, "none"], fill_value=0)
    right, both = np.diag(matrix), matrix.sum(axis=1) + matrix.sum()[list(VERDICTS)]
    f1 = 2 * right[both > 0] / both[both > 0]
    return {"claims": len(gold), "missing": int(matrix["none"].sum()),
            "unknown": int((~given.index.isin(gold.index)).sum()),
            "accuracy": float(right.sum() / len(gold)), "macro_f1": float(f1.mean())}, matrix

def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verdicts", help="claims.jsonl")
    parser.add_argument("qrels", help="judged pairs")
    args = parser.parse_args()
    try:
        given = read_verdicts(args.verdicts)
        gold = gold_verdicts(read_table(args.qrels, [*PAIR, "label"], label=LABELS))
    except OSError as error:
        fail(error.filename, error.strerror)
    if not given.index.isin(gold.index).any():
        fail(args.verdicts, f"none of its claims is in {args.qrels}; name files of one data set")
    scores, matrix = score(given, gold)
    print("Gold verdicts by row, given ones by column:")
    print(matrix.rename_axis(None).rename_axis(None, axis=1).to_string())
    print(json.dumps(scores))

if __name__ == "__main__":
    main()
