# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "numpy==2.4.6", "pandas==3.1.1",
# ]
# ///
"""
Mine training examples: evidence, and negatives from a run and the corpus.

Reads   a run, claims, qrels, corpus.jsonl
Writes  examples.jsonl, for encoder.py, reranker.py and classifier.py (data/README.md has its
        fields)
Prints  JSON on the last line; left_out counts candidates that are likely evidence, by rank, score
        or text: the text of evidence under another id, or of a claim of the same words, is no
        negative, and neither is an abstract that is the claim itself (--shape scores, which has
        no negatives, keeps them all)

Examples
    python recipes/train/mine.py --hard 2 --easy 2
    python recipes/train/mine.py work/demo/train/dense.tsv --shape tuples --max-score 0.85
"""

import json

import numpy as np
from training import RETRIEVE, kit


def marked(table, easy, args):
    """Return a table of pairs with the columns is_evidence, is_likely and is_negative.

    is_likely: rank, score or text tells that the pair may be evidence. The margins count from the
    lowest score of the claim's evidence (NV-Retriever, Moreira et al. 2024); they mark nothing for
    a claim whose evidence is not in the run. easy: ids that easy negatives are drawn from.
    """
    is_evidence = table["label"].isin(["SUPPORTS", "REFUTES"])
    scores = table["score"].where(is_evidence).groupby(table["claim_id"])
    lowest = scores.transform("min")  # NaN, which no score is above, if the run has no evidence
    is_high = (
        (table["score"] > args.max_score)
        | (table["score"] > lowest - args.margin)
        | (table["score"] > abs(lowest) * args.relative_margin)  # abs(), as the default is infinite
    )
    return table.assign(
        is_evidence=is_evidence,
        is_likely=is_high | (table["rank"] <= args.skip_top) | (table["label"] == "TWIN"),
        is_negative=table["abstract_id"].isin(easy) & ~is_evidence,
    )


def draw(abstract_ids, number, order, rng, unwanted=()):
    """Return this number of abstract_ids, or all of them if there are fewer.

    abstract_ids: best first; unwanted: abstract ids that random draws leave out.
    """
    if order == "worst":
        abstract_ids = abstract_ids[::-1]
    if order == "random":
        size = min(number + len(unwanted), len(abstract_ids))  # enough without the unwanted ones
        rows = rng.choice(len(abstract_ids), size, replace=False)
        abstract_ids = [abstract_ids[row] for row in rows if abstract_ids[row] not in unwanted]
    return abstract_ids[:number]


def negatives_of(ranked, easy, rng, args):
    """Return {abstract_id: kind}, negatives of a claim; ranked: its marked pairs, best first."""
    first = ranked[~ranked["is_likely"]][: args.from_top]
    if not args.hard and args.shape != "labels":
        first = first[:0]  # without the run, these are judged pairs, which easy draws may take
    hard = list(first["abstract_id"][first["is_negative"]])
    taken = ranked[ranked["is_likely"] | ranked["is_evidence"]]
    unwanted = {*first["abstract_id"], *taken["abstract_id"]}
    drawn = dict.fromkeys(draw(hard, args.hard, args.draw, rng), "hard")
    return drawn | dict.fromkeys(draw(easy, args.easy, "random", rng, unwanted), "easy")


def examples_of(claim_id, rows, easy, args):
    """Yield the examples of a claim; rows: its marked pairs."""
    rng = np.random.default_rng([args.seed, *claim_id.encode()])  # no draw depends on other claims
    evidence = list(rows["abstract_id"][rows["is_evidence"]])
    ranked = rows.sort_values("rank", kind="stable")  # judged pairs that the run lacks come last
    start = {"kind": "evidence", "claim_id": claim_id}
    if args.shape == "tuples":
        for positive in evidence:
            negatives = list(negatives_of(ranked, easy, rng, args))
            yield start | {"positive": positive, "negatives": negatives}
    if args.shape == "scores":
        scored = ranked.dropna(subset="score")[: args.from_top]
        if args.gold:
            scored = scored[scored["label"].fillna("NEI") == "NEI"]
        targets = np.clip(0.5 + args.scale * (scored["score"] - args.middle), 0, 1)
        for abstract_id, target in zip(scored["abstract_id"], targets):
            yield start | {"kind": "score", "abstract_id": abstract_id, "target": round(target, 6)}
    if args.shape == "pairs" or (args.shape == "scores" and args.gold):
        for abstract_id in evidence:
            yield start | {"abstract_id": abstract_id, "target": 1.0}
    is_judged = args.shape == "labels" and rows["label"].notna().any()
    if is_judged or (args.shape == "pairs" and evidence):
        value = {"label": "NEI"} if is_judged else {"target": 0.0}
        for abstract_id, kind in negatives_of(ranked, easy, rng, args).items():
            yield start | {"kind": kind, "abstract_id": abstract_id} | value


def mine(args):
    """Write training examples: evidence, and negatives from a run and the corpus."""
    import pandas as pd

    inputs = [args.qrels, args.claims, args.corpus]
    needs_run = args.hard or args.shape == "scores"
    if needs_run:
        inputs.append(args.run)
    task = kit.task_of(args, *inputs)
    if kit.up_to_date(args, task, args.out):
        return {"made": []}
    corpus = kit.read_corpus(args.corpus)
    easy = list(corpus)
    claims, qrels, _ = kit.read_judged(args.claims, args.qrels, easy)
    run = qrels[:0].assign(rank=0, score=0.0)
    if needs_run:
        run = kit.read_table(args.run, kit.RUN, abstract_id=easy)[kit.RUN]
        RETRIEVE.check_claims({args.qrels: qrels, args.run: run})
        if args.relative_margin < np.inf and (run["score"].min() < 0 or "hybrid" in args.run):
            kit.fail(
                "--relative-margin", f"{args.run}: ratios of fused or negative scores mean nothing"
            )
    if args.pool == "nei":
        easy = qrels["abstract_id"][qrels["label"] == "NEI"].unique().tolist()
    judged = kit.with_twins(qrels, claims, corpus).merge(run, "left")
    table = pd.concat([judged, run]).drop_duplicates(kit.PAIR)
    table = marked(table, easy, args)
    examples = []
    for claim_id, rows in table.groupby("claim_id", sort=False):
        examples += examples_of(claim_id, rows, easy, args)
    summary = {"examples": len(examples), "left_out": int(table["is_likely"].sum())}
    with kit.written(args.out, task, **summary) as new:
        new.write_text("".join(json.dumps(example) + "\n" for example in examples))
    return {"made": [args.out], **summary}


# fmt: off
def add_mine(add):
    add("run", nargs="?", default="{work}/{split}/hybrid.tsv",
        help="draw hard negatives from this run")
    kit.add_qrels(add)
    kit.add_claims(add)
    kit.add_corpus(add)
    add("--out", default="{work}/{split}/examples.jsonl", help="write the examples to this file")
    add("--shape", choices="pairs tuples labels scores".split(), default="pairs",
        help="""pairs: claim, abstract, target 0 or 1 (reranker.py, losses bce and l1); tuples:
        claim, evidence, its negatives (encoder.py; reranker.py, all losses); labels: NEI pairs of
        all judged claims (classifier.py); scores: targets from the run (reranker.py)""")
    add("--hard", type=kit.count_or_0, default=4, help="""draw this many negatives from the first
        ranks of the run, per claim (pairs, labels) or evidence abstract (tuples); with 0, the run
        is not read (but for scores)""")
    add("--easy", type=kit.count_or_0, default=0, help="""draw this many negatives at random from
        the rest of the corpus, per claim or evidence abstract, as --hard""")
    add("--from-top", type=kit.count_or_0, default=50, help="""draw hard negatives from
        the first FROM_TOP candidates that the next four rules leave (judged abstracts that the run
        lacks come last); scores: take the first FROM_TOP ranks""")
    add("--skip-top", type=kit.count_or_0, default=0,
        help="leave out this many first ranks, where evidence that nobody has judged is likely")
    add("--max-score", type=float, default=np.inf, help="""leave out candidates with a higher score
        in the run, such as 0.85 for cosines (those of a hybrid.tsv are far below)""")
    add("--margin", type=float, default=-np.inf, help="""leave out candidates with a score above the
        lowest score of the claim's evidence in the run minus this number, such as 0.05 for cosines;
        without effect where the run has no evidence of the claim""")
    add("--relative-margin", type=kit.share, default=np.inf,
        help="""leave out candidates with more than this share of that lowest score, such as 0.95;
        for the run of one retriever, as shares of a fusion's scores mean nothing""")
    add("--draw", choices="random best worst".split(), default="random",
        help="take hard negatives from these ranks at random, best first or worst first")
    add("--pool", choices=("both", "nei"), default="both",
        help="""take these as negatives; both: NEI for the claim, or not judged; nei: NEI for this
        or another claim""")
    add("--seed", type=kit.count_or_0, default=13, help="seed of the random draws")
    add("--middle", type=float, default=0.5, help="""scores: targets are 0.5 + scale * (score -
        middle), clipped to [0, 1] (recipes/MEASURED.md has 0.53 and 1.6 for MiniLM's cosines)""")
    add("--scale", type=float, default=1.0, help="scores: the factor of score - middle")
    add("--gold", action="store_true", help="scores: give all evidence the target 1, found or not")
# fmt: on


if __name__ == "__main__":
    kit.run(__doc__, mine, add_mine, split="train")
