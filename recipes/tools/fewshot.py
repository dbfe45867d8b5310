# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy==2.4.6", "pandas==3.1.1"]
# ///
"""
Draw judged claims of the train split as examples for prompts (--fewshot of stages 4 and 5).

For each claim, one judgement per label is drawn at random. A claim is left out if it has no
evidence or no NEI abstract, or the same words as a claim that will be asked about. Claims with all
three labels come first.

Reads   DATA/claims.train.tsv, DATA/qrels.train.tsv, and the claims that will be asked about
Writes  fewshot.tsv: the drawn rows of the qrels with the column claim, in the order of prompts
Prints  the last line is JSON

Examples
    python recipes/tools/fewshot.py --number 6
    python 04_llm_rerank.py --model gpt-4.1 --fewshot work/demo/test/fewshot.tsv
"""

import kit
import numpy as np
import pandas as pd


def draw(qrels, seed):
    """Return for each claim with evidence and NEI a table with one judgement per label."""
    order = np.random.default_rng(seed).permutation(len(qrels))
    drawn = qrels.iloc[order].drop_duplicates(["claim_id", "label"])
    tables = []
    for _, rows in drawn.groupby("claim_id", sort=False):
        if len(rows) > 1 and "NEI" in set(rows["label"]):
            tables.append(rows)
    return sorted(tables, key=len, reverse=True)


def fewshot(args):
    """Draw claims with one judgement per label."""
    claims_path = f"{args.data}/claims.train.tsv"
    qrels_path = f"{args.data}/qrels.train.tsv"
    task = kit.task_of(args, claims_path, qrels_path, args.claims)
    if kit.up_to_date(args, task, args.out):
        return {"made": []}
    asked = {kit.words_of(claim) for claim in kit.read_claims(args.claims).values()}
    claims = kit.read_claims(claims_path)
    qrels = kit.read_qrels(qrels_path, claim_id=claims)
    words = qrels["claim_id"].map(claims).map(kit.words_of)
    tables = draw(qrels[~words.isin(asked)], args.seed)
    if args.number > len(tables):
        what = f"only {len(tables)} claims have both evidence and NEI"
        kit.fail(qrels_path, f"{what}; lower --number, or prompt without --fewshot")
    drawn = pd.concat(tables[: args.number])
    drawn.insert(2, "claim", drawn["claim_id"].map(claims))
    with kit.written(args.out, task, judgements=len(drawn)) as new:
        kit.write_table(drawn, new)
    return {"made": [args.out], "judgements": len(drawn)}


# fmt: off
def add_fewshot(add):
    add("--claims", default="{data}/claims.{split}.tsv", help="""leave out train claims with the
        same words as one of these, about which prompts will ask; --split names their split, and
        examples always come from train""")
    add("--out", default="{work}/{split}/fewshot.tsv", help="write the judgements to this file")
    add("--number", type=kit.count, default=6, help="draw this many claims of the train split")
    add("--seed", type=kit.count_or_0, default=13, help="seed of the draw")
# fmt: on


if __name__ == "__main__":
    kit.run(__doc__, fewshot, add_fewshot)
