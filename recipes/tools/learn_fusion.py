# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy==2.4.6", "pandas==3.1.1", "scikit-learn==1.9.1"]
# ///
"""
Learn to fuse runs: a random forest or gradient boosting predicts which candidates are evidence.

The features of a candidate are its score and rank in each run, and its score and rank in the
reciprocal rank fusion of all runs (k = 60); a run that lacks the candidate gives no value. The
forest has 100 trees of depth 10, as that of Kvist et al. (CheckThat! 2026), the boosting 100 trees
of scikit-learn's defaults. The new score is the predicted probability of evidence, and candidates
with equal probabilities keep the order of the reciprocal rank fusion.

What is learnt from the runs of judged claims is applied to the runs of --test. How much it gains is
seen on the judged claims themselves: they are dealt into folds, and each claim is scored by what is
learnt from the other folds. Evaluate this run beside 02_retrieve.py fuse, since a few hundred
claims are often too few to gain anything.

Reads   runs of judged claims, their qrels, and the runs of the same systems for other claims
Writes  learnt.tsv, the fused run of --test; learnt.folds.tsv, that of the judged claims
Prints  the last line is JSON

Example
    python recipes/tools/learn_fusion.py work/demo/train/{bm25,dense}.tsv \\
        --qrels data/demo/qrels.train.tsv --test work/demo/test/{bm25,dense}.tsv
"""

import functools
from pathlib import Path

import kit
import pandas as pd
from kit import PAIR, RUN

RRF_K = 60  # Cormack et al. 2009


def read_candidates(paths):
    """Return the candidates of all runs in the order of their reciprocal rank fusion.

    Columns: PAIR, rank and score of the fusion, rank_0 and score_0 of the first run, and so on.
    """
    runs = [kit.read_table(path, RUN) for path in paths]
    points = [run.assign(score=1 / (RRF_K + run["rank"])) for run in runs]
    sums = pd.concat(points).groupby(PAIR, sort=False)["score"].sum()
    table = kit.ranked(sums.reset_index())
    for number, run in enumerate(runs):
        table = table.merge(run[RUN], on=PAIR, how="left", suffixes=("", f"_{number}"))
    return table


def learner_of(args):
    """Return a classifier of scikit-learn, which takes missing values as they are."""
    from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier

    if args.model == "forest":
        return RandomForestClassifier(n_estimators=100, max_depth=10, random_state=args.seed)
    return HistGradientBoostingClassifier(early_stopping=False, random_state=args.seed)


def learn(args):
    """Learn a fusion from runs of judged claims, and apply it to runs of other claims."""
    from sklearn.model_selection import GroupKFold, cross_val_predict

    folds_out = args.out.removesuffix(".tsv") + ".folds.tsv"
    task = kit.task_of(args, *args.runs, *args.test, args.qrels)
    if kit.up_to_date(args, task, args.out, folds_out):
        return {"made": []}
    names = [Path(path).name for path in args.runs]
    if [Path(path).name for path in args.test] != names:
        kit.fail("--test", f"other runs than those to learn from; give {', '.join(names)} in order")
    qrels = kit.read_qrels(args.qrels)
    evidence = qrels[qrels["label"] != "NEI"]
    train = read_candidates(args.runs)
    train = train[train["claim_id"].isin(evidence["claim_id"])]
    test = read_candidates(args.test)
    pairs = pd.MultiIndex.from_frame(train[PAIR])
    is_evidence = pairs.isin(pd.MultiIndex.from_frame(evidence[PAIR]))
    claims = train.loc[is_evidence, "claim_id"].nunique()
    if claims < 2 * args.folds:
        what = f"{claims} claims have evidence among the candidates of these runs"
        kit.fail(args.qrels, f"{what}; {args.folds} folds need {2 * args.folds} of them")
    learner = learner_of(args)
    folds = GroupKFold(args.folds, shuffle=True, random_state=args.seed)
    features = train.drop(columns=PAIR)
    held_out = cross_val_predict(
        learner, features, is_evidence, groups=train["claim_id"], cv=folds, method="predict_proba"
    )
    learner.fit(features, is_evidence)
    predicted = learner.predict_proba(test.drop(columns=PAIR))
    summary = {"claims": claims, "candidates": len(train)}
    for path, table, scores in ((args.out, test, predicted), (folds_out, train, held_out)):
        run = kit.ranked(table.assign(score=scores[:, 1]))
        with kit.written(path, task, **summary) as new:
            kit.write_table(run[run["rank"] <= args.top_k], new)
    return {"made": [args.out, folds_out], **summary}


# fmt: off
def add_learn(add):
    add("runs", nargs="+", help="learn from these runs of judged claims")
    add("--qrels", required=True, help="take the evidence of these claims from this file")
    add("--test", nargs="+", required=True,
        help="fuse these runs of other claims, made by the same systems, in the same order")
    add("--out", default="{work}/{split}/learnt.tsv",
        help="write the fused run to this file, and that of the judged claims to NAME.folds.tsv")
    add("--model", choices=("forest", "boosting"), default="forest",
        help="learn a random forest or histogram gradient boosting")
    add("--folds", type=functools.partial(kit.LLM_RERANK.number, int, 2, 1000), default=5,
        help="deal the judged claims into this many folds")
    add("--top-k", type=kit.count, default=100, help="keep this many abstracts per claim")
    add("--seed", type=kit.count_or_0, default=13, help="seed of the folds and of the learner")
# fmt: on


if __name__ == "__main__":
    kit.run(__doc__, learn, add_learn)
