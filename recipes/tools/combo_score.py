# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy==2.4.6", "pandas==3.1.1", "scipy==1.17.1"]
# ///
"""
Add the feedback of a verifier to the scores of a reranker: ComboScorer (+VeriRel 2025, eq. 5).

The new score of a claim and an abstract is

    (1 - alpha) sigmoid(score of the reranker) + alpha (P(SUPPORTS) + P(REFUTES))

Scores of the reranker have to be logits, as 03_rerank.py writes them. The verifier is any model
that 05_classify.py labels pairs with. A pair without a verdict is an error.

Reads   a run, and verdicts on its pairs
Writes  a run: the same pairs by their new scores; equal scores keep the order of the run
Prints  the last line is JSON

Example
    python 03_rerank.py --depth 100
    python 05_classify.py --run work/demo/test/rerank.tsv --out work/demo/test/feedback.tsv
    python recipes/tools/combo_score.py work/demo/test/{rerank,feedback}.tsv --alpha 0.3
"""

import kit
from kit import PAIR, PROBABILITIES, RUN


def combo_score(logits, evidence, alpha):
    """Return (1 - alpha) sigmoid(logits) + alpha evidence; evidence: P(SUPPORTS) + P(REFUTES)."""
    from scipy.special import expit

    return (1 - alpha) * expit(logits) + alpha * evidence


def combine(args):
    """Score the pairs of a run by its scores and by verdicts on them."""
    task = kit.task_of(args, args.run, args.verdicts)
    if kit.up_to_date(args, task, args.out):
        return {"made": []}
    run = kit.read_table(args.run, RUN)
    verdicts = kit.read_verdicts(args.verdicts, PAIR)[[*PAIR, *PROBABILITIES]]
    table = run.merge(verdicts, on=PAIR, how="left")
    evidence = table["p_supports"] + table["p_refutes"]
    for claim_id, abstract_id in table.loc[evidence.isna(), PAIR].to_numpy():
        what = f"no verdict on claim {claim_id}, abstract {abstract_id}"
        kit.fail(args.verdicts, f"{what}; label all pairs of {args.run} by 05_classify.py")
    table["score"] = combo_score(table["score"], evidence, args.alpha)
    with kit.written(args.out, task, rows=len(table)) as new:
        kit.write_table(kit.ranked(table), new)
    return {"made": [args.out], "rows": len(table)}


# fmt: off
def add_combine(add):
    add("run", help="combine the scores of this run, which are logits")
    add("verdicts", help="read P(label) of the same pairs from these verdicts")
    add("--alpha", type=kit.share, default=0.5, help="weight of the verdicts, from 0 to 1")
    add("--out", default="{work}/{split}/combo.tsv", help="write the new run to this file")
# fmt: on


if __name__ == "__main__":
    kit.run(__doc__, combine, add_combine)
