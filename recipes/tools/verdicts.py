# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy==2.4.6", "pandas==3.1.1"]
# ///
"""
Compare verdicts on claims with those that the labels of gold evidence give.

Gold is SUPPORTED or REFUTED if all evidence of a claim has that label, DISPUTED if it has both, and
NOT ENOUGH INFORMATION without any. A judged claim without a verdict counts as wrong.

Reads   claims.jsonl of 05_classify.py --aggregate, and qrels
Prints  accuracy, macro F1 over the verdicts that occur, and counts

Example
    python recipes/tools/verdicts.py work/demo/test/claims.jsonl data/demo/qrels.test.tsv
"""
import argparse
import json

import numpy as np
import pandas as pd
from kit import LABELS, PAIR, fail, read_table, warn

VERDICTS = ["SUPPORTED", "REFUTED", "DISPUTED", "NOT ENOUGH INFORMATION"]

def gold_verdicts(qrels):
    """Return the verdict on each claim that the labels of its evidence give."""
    claims = qrels["claim_id"]
    supported, refuted = ((qrels["label"] == label).groupby(claims, sort=False).any()
                          for label in LABELS[:2])
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

def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verdicts", help="claims.jsonl")
    parser.add_argument("qrels", help="judged pairs")
    args = parser.parse_args()
    try:
        with open(args.verdicts, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        given = pd.Series({str(line["claim_id"]): line["verdict"] for line in lines})
    except (OSError, ValueError, LookupError, TypeError) as error:
        fail(args.verdicts, f"no verdicts of 05_classify.py --aggregate: {error}")
    gold = gold_verdicts(read_table(args.qrels, [*PAIR, "label"], label=LABELS))
    if not given.index.isin(gold.index).any():
        fail(args.verdicts, "none of its claims is in the qrels; name files of one split")
    if missing := (~gold.index.isin(given.index)).sum():
        warn(args.verdicts, f"{missing} judged claims have no verdict, and count as wrong")
    accuracy, macro_f1, counts = scores_of(given, gold)
    print(f"\nVerdicts on {len(gold)} claims: accuracy {accuracy:.3f}, macro F1 {macro_f1:.3f}. "
          "Gold by row, given by column:")
    print(counts.to_string())

if __name__ == "__main__":
    main()
