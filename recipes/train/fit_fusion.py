# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "ir-measures==0.4.3", "numpy==2.4.6", "pandas==3.1.1",
# ]
# ///
"""
Fit a fusion of runs: the method, k and weights, in tenths, that are best on judged claims.

Reads   runs, qrels
Writes  fusion.json, for 02_retrieve.py fuse --fusion
Prints  values of the single runs, in cross-validation, and of the ten best fusions, over the claims
        with evidence; the last line is JSON

All fusions are tried on at most 500 claims, the 30 best ones on all claims. Ties are broken by the
order of the runs here, and by that of the corpus in 02_retrieve.py fuse, so the value of a fused
run may differ a little.

Examples
    python recipes/train/fit_fusion.py work/demo/train/{bm25,dense}.tsv --split train
    python 02_retrieve.py fuse work/demo/test/{bm25,dense}.tsv --fusion work/demo/train/fusion.json
"""

import itertools
import json

import numpy as np
from training import RETRIEVE, kit

COMPARED = 500  # claims on which all fusions are compared; the best ones are compared on all
FINALISTS = 30
FOLDS = 5  # of the cross-validation
SEED = 13  # of the folds, and of the sample of claims


def all_fusions(count):
    """Return all Fusions of so many runs; for a method, those with the most even weights first."""
    tenths = [row for row in itertools.product(range(11), repeat=count) if sum(row) == 10]
    weights = sorted(np.array(tenths) / 10, key=np.std)
    fusions = []
    for name, method in RETRIEVE.METHODS.items():
        for k in method.constants:
            fusions += [RETRIEVE.Fusion(name, k, tuple(row.tolist())) for row in weights]
    return fusions


def try_fusions(runs, fusions, qrels, measure):
    """Return the values of the measure (fusions, claims)."""
    import ir_measures

    judged = qrels[kit.PAIR].set_axis(["query_id", "doc_id"], axis=1)
    judged["relevance"] = (qrels["label"] != "NEI").astype(int)
    scorer = ir_measures.evaluator([measure], judged)
    values = []
    for (method, k), group in itertools.groupby(fusions, lambda fusion: fusion[:2]):
        table = RETRIEVE.points_table(runs, method, k)
        claims = table.index.codes[0]  # the index is PAIR; these are its claims as numbers
        for fusion in group:
            scores = RETRIEVE.combined_scores(table, fusion.weights, method)
            order = np.lexsort((-scores, claims))
            rank = np.arange(len(order)) - np.searchsorted(claims[order], claims[order])  # from 0
            # The measure gets ranks for scores, as it breaks ties differently; only those that it
            # reads, and in dicts, as both save time.
            is_read = rank < measure.params.get("cutoff", np.inf)
            is_read |= "judged_only" in measure.params  # unjudged ranks go before the cutoff
            run = {}
            pairs = table.index[order[is_read]]
            for (claim_id, abstract_id), place in zip(pairs, rank[is_read]):
                run.setdefault(claim_id, {})[abstract_id] = -float(place)
            found = {metric.query_id: metric.value for metric in scorer.iter_calc(run)}
            values.append([found[claim_id] for claim_id in sorted(found)])
    return np.array(values)


def held_out_value(values):
    """Return the cross-validated mean of values (fusions, claims).

    Each fold is scored by the fusion that is best on the other folds.
    """
    fold_of = np.random.default_rng(SEED).permutation(values.shape[1]) % FOLDS
    held_out = np.zeros(values.shape[1])
    for fold in range(FOLDS):
        is_held_out = fold_of == fold
        best = values[:, ~is_held_out].sum(axis=1).argmax()
        held_out[is_held_out] = values[best, is_held_out]
    return held_out.mean()


def fit(args):
    """Find the method, k and weights (in tenths) of a fusion that are best on judged claims."""
    import ir_measures

    task = kit.task_of(args, *args.runs, args.qrels)
    if kit.up_to_date(args, task, args.out):
        return {"made": []}
    runs = [kit.read_table(path, kit.RUN) for path in args.runs]
    qrels = kit.read_qrels(args.qrels)
    RETRIEVE.check_claims(dict(zip(args.runs, runs)) | {args.qrels: qrels})
    evidence = qrels[qrels["label"] != "NEI"]
    if evidence.empty:
        kit.fail(args.qrels, "no row is SUPPORTS or REFUTES; name judgements with evidence")
    qrels = qrels[qrels["claim_id"].isin(evidence["claim_id"])]
    try:
        measure = ir_measures.parse_measure(args.measure)
        for path, run in zip(args.runs, runs):
            value = try_fusions([run], all_fusions(1)[:1], qrels, measure).mean()
            print(f"{value:.4f}  {path} alone")
    except Exception as error:  # ir-measures and its providers raise errors of many types
        kit.fail("--measure", f"cannot compute {args.measure}: {error}; see --help")
    claim_ids = np.random.default_rng(SEED).permutation(np.unique(qrels["claim_id"]))
    sample = qrels[qrels["claim_id"].isin(claim_ids[:COMPARED])]
    sample_runs = [run[run["claim_id"].isin(sample["claim_id"])] for run in runs]
    fusions = all_fusions(len(runs))
    values = try_fusions(sample_runs, fusions, sample, measure)
    held_out = held_out_value(values)
    print(
        f"{held_out:.4f}  in {FOLDS}-fold cross-validation; the best (in 02 fuse, ties may differ):"
    )
    finalists = np.argsort(-values.mean(axis=1), kind="stable")[:FINALISTS]
    fusions = [fusions[number] for number in sorted(finalists)]
    values = try_fusions(runs, fusions, qrels, measure)
    best_first = np.argsort(-values.mean(axis=1), kind="stable")
    for number in best_first[:10]:
        method, k, weights = fusions[number]
        print(f"{values[number].mean():.4f}  {method}, k = {k}, weights {weights}")
    best = best_first[0]
    method, k, weights = fusions[best]
    fusion = {
        "measure": args.measure,
        "runs": RETRIEVE.names_of(args.runs, args),
        "claims": len(claim_ids),
        "value": values[best].mean(),
        "held_out_value": held_out,
        "method": method,
        "rrf_k": k,
        "weights": weights,
    }
    with kit.written(args.out, task) as new:
        new.write_text(json.dumps(fusion, indent=1))
    return {"made": [args.out], **fusion}


# fmt: off
def add_fit(add):
    add("runs", nargs="+", help="""fit a fusion of these runs of judged claims; where a run comes
        from a trained model, take claims that the model was not trained on""")
    kit.add_qrels(add)
    add("--out", default="{work}/{split}/fusion.json", help="write the best fusion to this file")
    add("--measure", default="nDCG@10",
        help="maximise this measure of ir-measures, such as R@5 or MAP")
# fmt: on


if __name__ == "__main__":
    kit.run(__doc__, fit, add_fit, split="dev")
