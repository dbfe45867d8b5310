# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "filelock==4.2.11", "ir-measures==0.4.3", "jinja2==3.1.6", "matplotlib==3.11.2",
#     "numpy==2.4.6", "pandas==3.1.1", "scikit-learn==1.9.1",
# ]
# ///
"""
Score runs and verdicts as the shared tasks and trec_eval do; compare them; write submissions.

Reads   runs, verdicts, qrels; claims.jsonl: verdicts on claims; for the page claims and corpus
        (data/convert.py reads other formats)
Writes  metrics.tsv, .json, .md, .tex; .cells.tsv: intervals and p-values; .claims.tsv: by claim;
        .curves.tsv: by depth; --by: .groups.tsv: by group of claims
        --report: a page with every claim's rankings
        pool: pairs to judge, also as a run; merge: qrels with their labels, or silver judgements
        submission: a table and its zip
Prints  the table; the last line is JSON

Examples
    python 06_evaluate.py --report work/demo/test/report.html
    python 06_evaluate.py work/demo/test/{bm25,rerank}.tsv --measures climatecheck2026 trec P@5
    python 06_evaluate.py pool work/demo/test/{hybrid,rerank}.tsv
    python 06_evaluate.py merge labelled.tsv
    python 06_evaluate.py submission work/demo/test/verdicts.tsv --task climatecheck2025
"""
# --- constants (same in all six scripts)
import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during imports: no traceback
LABELS = ("SUPPORTS", "REFUTES", "NEI")
RUN = ["claim_id", "abstract_id", "rank", "score"]
# Flags that decide no byte of an output, but for the rounding of batches on a device
NEUTRAL = {"force", "out", "device", "batch_size", "concurrency", "function", "flags"}
# --- end of constants

import argparse
import contextlib
import difflib
import hashlib
import html
import io
import json
import os
import re
import resource
import shlex
import shutil
import sys
import time
import unicodedata
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np

PAIR, CLAIMS = ["claim_id", "abstract_id"], ["claim_id", "claim"]  # columns
QRELS = [*PAIR, "label"]
VERDICTS = ("SUPPORTED", "REFUTED", "DISPUTED", "NOT ENOUGH INFORMATION")  # on claims
STAGES = "bm25 dense splade hybrid rerank llm verdicts llm_verdicts".split()
MEASURES = {
    "climatecheck2025": "R@2, R@5, R@10, B-Pref, Subtask I, Judged@10, P, R, F1, Subtask II",
    "climatecheck2026": "R@2, R@5, B-Pref, Retrieval 2026, Judged@5, P, R, F1, Verification 2026",
    "checkthat": "MRR@1, MRR@5, MRR@10, R@5, R@10",
    "verirel": "pooled R@1, pooled R@3, pooled R@5, pooled R@10, pooled R@20, pooled R@50, "
               "R@1, R@3, R@5, R@10, R@20, R@50, abstract P, abstract R, abstract F1",
    "trec": "nDCG@10, MAP, RR, B-Pref (trec_eval), Judged@10",
}
COMPOSED = {  # by the organisers of ClimateCheck
    "Subtask I": (np.mean, ["R@2", "R@5", "R@10", "B-Pref"]),
    "Subtask II": (np.sum, ["F1", "R@10"]),
    "Retrieval 2026": (np.mean, ["R@5", "B-Pref"]),
    "Verification 2026": (np.sum, ["F1", "R@5"])}
STANCE, CONFUSION = ("P", "R", "F1", "macro F1"), "confusion"  # of confusion matrices
PER_CLAIM = ["R@5", "Success@1"]  # always in .claims.tsv: for the page, for McNemar's test
NOTES = """Bold: the best run. Italics: the second best.
† differs from the first run, p < 0.05 (paired randomisation over claims, Holm).
Means over claims with evidence; B-Pref needs rows and an NEI abstract, too; Judged@k: all claims.
Pooled R@k is a mean over pairs. P, R, F1 of labels are weighted by support, macro F1 is not.
P, R, F1 and B-Pref see the first --depth ranks; B-Pref has n / R, trec_eval's n / min(R, N)."""
UNJUDGED, NOTHING = -1, -2  # an abstract without a judgement; no abstract at this rank
DEPTHS = (1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 300, 500, 600, 800, 1000)
PUBLISHED = Path(sys.argv[0]).parent / "recipes" / "published.tsv"
TASKS = {"climatecheck2025": (10, ".csv"), "climatecheck2026": (10, ".csv"),
         "climatecheck2026-narratives": (10, ".csv"),
         "checkthat4b": (5, ".tsv")}  # abstracts per claim, kind of table
OFFICIAL = {"SUPPORTS": "Supports", "REFUTES": "Refutes", "NEI": "Not Enough Information"}

warnings.simplefilter("ignore", RuntimeWarning)  # 0 / 0 is NaN: there is no value

# -------------------- Runs beside judgements
def advised(args, *words):
    """Return a command for the same data, to be copied."""
    files = ["--data", args.data, "--work", args.work, "--split", args.split]
    return shlex.join(["python", *words, *files])

def columns_of(path):
    """Return the names in a table's header."""
    _, header = next(read_lines(path))
    return header.replace('"', "").split("\t")

def read_run(path, **known):
    """Read a run, or verdicts: a run with the column label."""
    if "label" in columns_of(path):
        known["label"] = LABELS
    return read_table(path, RUN, **known)

def read_qrels(path):
    if "judge" in columns_of(path):
        warn(path, "silver judgements stand in for gold; --silver keeps them apart")
    return read_table(path, QRELS, label=LABELS)[QRELS]

def refuse_foreign(path, ours, theirs, kind):
    """Refuse ids of which none is in the qrels: spelt otherwise, or of another data set."""
    if not ours.isin(theirs).any():
        here, there = (repr(next(iter(ids), "nothing")) for ids in (ours, theirs))
        fail(path, f"none of its {kind} is in the qrels: {here} here, {there} there; spell ids "
             "alike, and name files of one data set")

def judged_rows(path, run, qrels):
    """Return the run's rows for the claims of the qrels, and counts of claims not in both."""
    refuse_foreign(path, run["claim_id"], qrels["claim_id"], "claims")
    wanted, given = set(qrels["claim_id"]), set(run["claim_id"])
    counts = {"claims_missing": len(wanted - given), "claims_unknown": len(given - wanted)}
    if wanted != given:
        warn(path, f"{len(wanted - given)} claims without rows (0 in recall, left out of B-Pref), "
             f"{len(given - wanted)} others are left out")
    run = run[run["claim_id"].isin(wanted)]
    refuse_foreign(path, run["abstract_id"], qrels["abstract_id"], "abstracts")
    return run, counts

def gold_of(qrels):
    """Return claims, and of each the number R of relevant and N of other abstracts."""
    relevant = (qrels["label"] != "NEI").groupby(qrels["claim_id"], sort=False)
    R = relevant.sum()
    return SimpleNamespace(claims=R.index, R=R.to_numpy(float), N=(relevant.size() - R).to_numpy())

def labels_by_rank(run, qrels, gold):
    """Return gold and given labels by rank, as places in LABELS, both [claims, depth]."""
    places = {label: place for place, label in enumerate(LABELS)}
    rows, ranks = gold.claims.get_indexer(run["claim_id"]), run["rank"].to_numpy() - 1
    labels = np.full((len(gold.claims), ranks.max() + 1), NOTHING, np.int8)
    said = labels.copy()
    labels[rows, ranks] = run[PAIR].merge(qrels, how="left")["label"].map(places).fillna(UNJUDGED)
    if "label" in run:
        said[rows, ranks] = run["label"].map(places)
    return labels, said

# -------------------- Measures of a claim
# Each is a fraction by claim: (numerator, denominator), both [claims], of gold labels by rank, cut
# at rank k. A run's value is the sum of its numerators / the sum of its denominators; a claim with
# denominator 0 does not count.
def evidence(labels):
    return (labels == 0) | (labels == 1)  # SUPPORTS or REFUTES

def mean_of(values, counted):
    return np.where(counted, values, 0.0), counted

def recall(labels, gold):
    """Share of a claim's evidence that is found."""
    return mean_of(evidence(labels).sum(1) / gold.R, gold.R > 0)

def pooled_recall(labels, gold):
    """Share of all evidence pairs that is found (+VeriRel, eq. 7)."""
    return evidence(labels).sum(1), gold.R

def reciprocal_rank(labels, gold):
    """1 / rank of the first evidence, 0 without any."""
    hits = evidence(labels)
    return mean_of(hits.any(1) / (hits.argmax(1) + 1), gold.R > 0)

def success(labels, gold):
    return mean_of(evidence(labels).any(1), gold.R > 0)

def bpref(labels, gold):
    """B-Pref of the ClimateCheck organisers; trec_eval has n / min(R, N) inside.

    Each relevant abstract adds (1 - n / R) / R, with n judged non-relevant ones above it, at most
    R. Submitted claims with both kinds of judgement count.
    """
    n = np.minimum((labels == LABELS.index("NEI")).cumsum(1), gold.R[:, None])
    counted = (gold.R > 0) & (gold.N > 0) & (labels[:, 0] != NOTHING)
    return mean_of((evidence(labels) * (1 - n / gold.R[:, None])).sum(1) / gold.R, counted)

def judged(labels, gold):
    """Share of submitted abstracts that are judged."""
    submitted = np.maximum((labels != NOTHING).sum(1), 1)
    return (labels >= 0).sum(1) / submitted, np.ones(len(labels))

RANKED = {"R": recall, "pooled R": pooled_recall, "MRR": reciprocal_rank, "Success": success,
          "B-Pref": bpref, "Judged": judged}

def abstract_level(labels, said, gold):
    """SciFact's abstract-level measures, labels only (Wadden et al. 2020)."""
    called = evidence(said).sum(1)
    right = (evidence(labels) & (labels == said)).sum(1)
    R = gold.R * (said >= 0).any()  # no labels, no value
    return {"abstract P": (right, called), "abstract R": (right, R),
            "abstract F1": (2 * right, called + R)}

def trec_fraction(name, run, qrels, gold):
    """The fraction of a measure of ir-measures; ranks stand in for scores."""
    import ir_measures
    values, tables = np.zeros(len(gold.R)), []
    for table in (qrels.assign(relevance=(qrels["label"] != "NEI").astype(int)),
                  run.assign(score=-run["rank"].astype(float))):
        numbers = gold.claims.get_indexer(table["claim_id"]).astype(str)  # ERR wants numbers
        tables.append(table.assign(query_id=numbers, doc_id=table["abstract_id"]))
    try:
        measure = ir_measures.parse_measure("Bpref" if name == "B-Pref (trec_eval)" else name)
        if str(measure).endswith("@0"):
            raise ValueError  # trec_eval would abort the process
        for one in ir_measures.iter_calc([measure], *tables):
            values[int(one.query_id)] = one.value
    except Exception:  # of many kinds: no such measure, parameter or package
        fail("--measures", f"cannot compute {name!r}; see --help")
    return mean_of(values, gold.R > 0)

def confusion(labels, said):
    """Confusion matrix of each claim, [claims, 3 gold, 3 given labels]."""
    matrices = np.zeros((len(labels), 3, 3))
    rows, ranks = np.nonzero((labels >= 0) & (said >= 0))
    np.add.at(matrices, (rows, labels[rows, ranks], said[rows, ranks]), 1)
    return matrices

def stance_scores(matrices):
    """Weighted precision, recall, F1, and macro F1 of matrices [..., gold, given], as scikit-learn.

    Macro F1 is the mean over the labels that occur, in gold or given.
    """
    right = np.diagonal(matrices, axis1=-2, axis2=-1)
    support, given = matrices.sum(-1), matrices.sum(-2)
    f1 = 2 * right / (support + given)
    scores = right / np.maximum(given, 1), right / np.maximum(support, 1), np.nan_to_num(f1)
    weighted = [(score * support).sum(-1) / support.sum(-1) for score in scores]
    return [*weighted, np.nanmean(f1, axis=-1)]

# -------------------- Measures of a run
# parts: what the measures of a run are made of: {measure: [claims, 2], numerator and denominator},
# and under CONFUSION the confusion matrices, [claims, 3, 3]
def needed_for(names):
    """Return the measures that are fractions, among names and what they are composed of."""
    needed = []
    for name in names:
        needed += COMPOSED[name][1] if name in COMPOSED else [name]
    return [name for name in dict.fromkeys(needed) if name not in STANCE]

def parts_of_measures(run, qrels, names, depth):
    """Return the parts of measures; stance and B-Pref see the first depth ranks."""
    gold = gold_of(qrels)
    labels, said = labels_by_rank(run, qrels, gold)
    known = abstract_level(labels, said, gold) | {"B-Pref": bpref(labels[:, :depth], gold)}
    parts = {CONFUSION: confusion(labels[:, :depth], said[:, :depth])}
    for name in needed_for(names):
        at_k = re.fullmatch(rf"({'|'.join(RANKED)})@([1-9]\d*)", name)
        if at_k:
            fraction = RANKED[at_k[1]](labels[:, : int(at_k[2])], gold)
        elif name in known:
            fraction = known[name]
        else:
            fraction = trec_fraction(name, run, qrels, gold)
        parts[name] = np.stack(fraction, axis=-1)
    return parts

def quotients(parts):
    """Return {measure: numerators / denominators}."""
    return {name: part[..., 0] / part[..., 1] for name, part in parts.items() if name != CONFUSION}

def values_of(sums, names):
    """Values of measures [..., names] from parts that are summed over claims."""
    known = quotients(sums) | dict(zip(STANCE, stance_scores(sums[CONFUSION])))
    for name in set(COMPOSED) & set(names):
        compose, members = COMPOSED[name]
        known[name] = compose([known[member] for member in members], axis=0)
    return np.stack([known[name] for name in names], axis=-1)

def curve_of(labels, gold):
    """Return a table of k, recall at k, success at k."""
    import pandas as pd
    claims, rows = max((gold.R > 0).sum(), 1), []
    for k in DEPTHS:
        if k <= labels.shape[1]:
            shares = recall(labels[:, :k], gold)[0], success(labels[:, :k], gold)[0]
            rows.append((k, *(share.sum() / claims for share in shares)))
    return pd.DataFrame(rows, columns=["k", "recall", "success"])

def condensed(run, qrels):
    """Return a run without unjudged abstracts, ranked anew (Sakai 2007).

    A claim without any judged one keeps its rows: it was submitted, and nothing was found.
    """
    known = run[PAIR].merge(qrels, how="left")["label"].notna().to_numpy()
    kept = run[known | ~run["claim_id"].isin(run["claim_id"][known])]
    return kept.assign(rank=kept.groupby("claim_id").cumcount() + 1)

def views_of(args, run, qrels, silver):
    """Return {suffix of measures: the run and the judgements that they are taken from}."""
    import pandas as pd
    views = {"": (run, qrels)}
    if args.condensed:
        views[" condensed"] = condensed(run, qrels), qrels
    if args.silver:  # gold comes first
        views[" silver"] = run, pd.concat([qrels, silver[QRELS]]).drop_duplicates(PAIR)
    return views

def values_by_claim(parts, claims):
    """Return a table of the fractions of all views, by claim."""
    import pandas as pd
    tables = [pd.DataFrame(quotients(one), claims).add_suffix(view) for view, one in parts.items()]
    return pd.concat(tables, axis=1)

def score_runs(args, qrels, silver):
    """Return what is known of each run: parts by view, values by claim, curve, counts, rows."""
    gold, scored, names = gold_of(qrels), {}, [*args.measures, *PER_CLAIM]
    stems = [" ".join(Path(path).stem.split()) for path in args.runs]
    for path, stem in zip(args.runs, stems):
        run, counts = judged_rows(path, read_run(path), qrels)
        views = views_of(args, run, qrels, silver)
        parts = {view: parts_of_measures(*pair, names, args.depth) for view, pair in views.items()}
        labels, _ = labels_by_rank(run, qrels, gold)
        warn_of_run(args, path, run, qrels, judged(labels[:, :10], gold)[0].mean())
        scored[stem if stems.count(stem) == 1 else path] = SimpleNamespace(
            parts=parts, per_claim=values_by_claim(parts, gold.claims),
            curve=curve_of(labels, gold), counts=counts,
            judged_ids=set(run["abstract_id"][run["abstract_id"].isin(qrels["abstract_id"])]),
            rows=side_by_side(run, qrels) if args.report else [])
    return scored

def warn_of_run(args, path, run, qrels, share):
    """Warn of numbers that mean little; share: of the first ten ranks, how much is judged."""
    if share < 0.5:
        warn(path, f"{share:.0%} of the first 10 ranks are judged, the rest counts as no "
             f"evidence; what to judge: {advised(args, '06_evaluate.py', 'pool', path)}")
    if "label" in run and "REFUTES" not in set(qrels["label"]):
        warn(path, f"no pair of {args.qrels} is REFUTES: if SUPPORTS means relevant there, as in "
             "TREC and CheckThat!, the measures of labels mean nothing")

def warn_of_unknown(args, qrels, scored, corpus):
    """Warn of judged abstracts that neither the corpus nor a run has."""
    names = qrels["abstract_id"].unique()
    unknown = set(names).difference(corpus, *(one.judged_ids for one in scored.values()))
    if corpus and unknown:
        example = next(name for name in names if name in unknown)
        warn(args.qrels, f"{len(unknown)} of {len(names)} judged abstracts are neither in "
             f"{args.corpus} nor in a run, such as {example!r}; none can be found")

# -------------------- Comparison of runs
# stacks: the parts of all runs, {measure: [runs, claims, ...]}
def weighted_sums(stacks, weights):
    """Sums over claims with weights [resamples, claims]: {measure: [resamples, runs, ...]}."""
    return {name: np.tensordot(weights, stack, (1, 1)) for name, stack in stacks.items()}

def intervals(stacks, names, resamples, seed):
    """95 % percentile bootstrap intervals over claims (Efron 1979), [2, runs, measures]."""
    claims, rng = stacks[CONFUSION].shape[1], np.random.default_rng(seed)
    draws = rng.multinomial(claims, np.full(claims, 1 / claims), size=resamples)
    drawn = values_of(weighted_sums(stacks, draws), names)
    return np.nanquantile(drawn, (0.025, 0.975), axis=0)

def randomisation(stacks, names, resamples, seed):
    """Two-sided p of paired randomisation against the first run (Smucker et al. 2007).

    How often swapping two runs' results of random claims gives as large a difference. Swaps that
    leave a measure without a value do not count.
    """
    claims = stacks[CONFUSION].shape[1]
    swaps = np.random.default_rng(seed).integers(0, 2, size=(resamples, claims))
    sums = {name: stack.sum(1) for name, stack in stacks.items()}
    moved = weighted_sums({name: stack - stack[0] for name, stack in stacks.items()}, swaps)
    these = values_of({name: sums[name] - moved[name] for name in sums}, names)
    those = values_of({name: sums[name][0] + moved[name] for name in sums}, names)
    swapped, values = np.abs(these - those), values_of(sums, names)
    as_large = swapped >= np.abs(values - values[0]) - 1e-12
    return (1 + as_large.sum(0)) / (1 + np.isfinite(swapped).sum(0))

def holm(p):
    """p-values corrected for several comparisons (Holm 1979); NaN does not count."""
    ordered = p.dropna().sort_values()
    stepped = (ordered * np.arange(len(ordered), 0, -1)).cummax()
    return stepped.clip(upper=1).reindex(p.index)

def compare(parts, names, resamples, seed):
    """Return {field: table [runs, measures]} from {run: its parts}.

    Fields: value, low and high (of the interval), difference and p-values (against the first run).
    """
    import pandas as pd
    first, *_ = parts.values()
    stacks = {name: np.stack([one[name] for one in parts.values()]) for name in first}
    values = values_of({name: stack.sum(1) for name, stack in stacks.items()}, names)
    low, high = intervals(stacks, names, resamples, seed)
    p = randomisation(stacks, names, resamples, seed)
    cells = {"value": values, "low": low, "high": high, "difference": values - values[0],
             "p_randomisation": p, "p_holm": p}
    cells = {field: pd.DataFrame(cell, list(parts), names) for field, cell in cells.items()}
    cells["difference"].iloc[0] = np.nan
    for field in ("p_randomisation", "p_holm"):
        cells[field] = cells[field].mask(cells["difference"].isna())
    cells["p_holm"] = cells["p_holm"].apply(holm)
    return cells

def compare_views(args, scored):
    """Return compare()'s tables with the columns of all views."""
    import pandas as pd
    views, (first, *_) = [], scored.values()
    for suffix in first.parts:
        parts = {run: one.parts[suffix] for run, one in scored.items()}
        cells = compare(parts, args.measures, args.resamples, args.seed)
        views.append({field: cell.add_suffix(suffix) for field, cell in cells.items()})
    return {field: pd.concat([cells[field] for cells in views], axis=1) for field in views[0]}

def groups_of(path, column, claims):
    """Return which judged claims are in which group, [groups, claims]."""
    import pandas as pd
    table = read_table(path, CLAIMS)
    if column not in table:
        fail("--by", f"no column {column} in {path}; it has {', '.join(table)}")
    groups = pd.Series(table[column].to_numpy(), table["claim_id"]).reindex(claims)
    if groups.isna().any():
        warn(path, f"lacks {groups.isna().sum()} of {len(claims)} judged claims; they are in no "
             "group")
    return pd.get_dummies(groups, dtype=float).T

def by_group(scored, groups, measures):
    """Return a table of every measure by run and group of claims."""
    import pandas as pd
    rows = []
    for run, one in scored.items():
        table = pd.DataFrame({"run": run, "group": groups.index, "claims": groups.sum(axis=1)})
        for suffix, parts in one.parts.items():
            sums = {name: np.tensordot(groups, part, 1) for name, part in parts.items()}
            table[[name + suffix for name in measures]] = values_of(sums, measures)
        rows.append(table.astype({"claims": int}))
    return pd.concat(rows).dropna(axis=1, how="all")

# -------------------- Silver judgements
def read_silver(path, qrels):
    """Read what a model has judged of the claims of the qrels."""
    silver = read_table(path, [*QRELS, "judge"], label=LABELS)
    refuse_foreign(path, silver["claim_id"], qrels["claim_id"], "claims")
    known = silver["claim_id"].isin(qrels["claim_id"])
    if not known.all():
        warn(path, f"{(~known).sum()} labels on claims without gold are left out")
    return silver[known]

def agreement(silver, qrels):
    """Return how far each judge agrees with gold on the pairs that have both labels."""
    import pandas as pd
    from sklearn.metrics import cohen_kappa_score as kappa
    rows, both = [], silver.merge(qrels, how="left", on=PAIR, suffixes=("", "_gold"))
    for judge, pairs in both.groupby("judge", sort=False):
        row, pairs = {"judge": judge, "pairs": len(pairs)}, pairs.dropna(subset="label_gold")
        given, gold = pairs["label"], pairs["label_gold"]
        row |= {"with_gold": len(pairs), "agreement": (given == gold).mean()}
        if len(pairs):  # NaN where there is one label only
            row |= {"kappa": kappa(given, gold),
                    "kappa_relevance": kappa(given != "NEI", gold != "NEI")}
        rows.append(row)
    return pd.DataFrame(rows)

# -------------------- Verdicts on claims
def read_verdicts(path):
    """Read {claim_id: its verdict and evidence} of 05_classify.py --aggregate."""
    verdicts = {}
    for number, text in read_lines(path):
        try:
            line = json.loads(text)
            claim, verdict = str(line["claim_id"]), line["verdict"]
            sentences = [[str(one["abstract_id"]), one["sentence"]] for one in line["evidence"]]
        except (ValueError, LookupError, TypeError, RecursionError):
            verdict = None
        if verdict not in VERDICTS or claim in verdicts:
            fail(f"{path}:{number}", "not a verdict of 05_classify.py --aggregate, or the second "
                 f"one on a claim; verdicts are {', '.join(VERDICTS)}")
        verdicts[claim] = {"verdict": verdict, "evidence": sentences}
    return verdicts

def own_verdicts(path, qrels):
    """Return the path of verdicts that nobody named, None if there are none on judged claims."""
    if not os.path.isfile(path) or not os.path.isfile(qrels):
        return None
    claims = read_verdicts(path).keys()
    if claims & set(read_qrels(qrels)["claim_id"]):
        return path
    warn(path, f"left out, as none of its claims is in {qrels}; --aggregated names other verdicts")
    return None

def gold_verdicts(qrels):
    """Return the verdict on each claim that the labels of its evidence give."""
    import pandas as pd
    supported, refuted = ((qrels["label"] == label).groupby(qrels["claim_id"], sort=False).any()
                          for label in LABELS[:2])
    cases = [supported & refuted, supported, refuted]
    verdicts = np.select(cases, ["DISPUTED", "SUPPORTED", "REFUTED"], "NOT ENOUGH INFORMATION")
    return pd.Series(verdicts, supported.index)

def score_verdicts(path, verdicts, qrels):
    """Return a sentence, and accuracy, macro F1 over the verdicts that occur, and counts.

    counts: {gold: {given: claims}}. A judged claim without a verdict counts as wrong.
    """
    import pandas as pd
    gold = gold_verdicts(qrels)
    given = pd.Series({claim: one["verdict"] for claim, one in verdicts.items()})
    refuse_foreign(path, given.index, gold.index, "claims")
    others = (~given.index.isin(gold.index)).sum()
    given = given.reindex(gold.index, fill_value="none")
    if others or (given == "none").any():
        warn(path, f"{(given == 'none').sum()} judged claims without a verdict count as wrong, "
             f"{others} verdicts on other claims are left out")
    counts = pd.crosstab(gold, given).reindex(
        index=VERDICTS, columns=[*VERDICTS, "none"], fill_value=0)
    right, both = np.diag(counts), counts.sum(axis=1) + counts.sum()[list(VERDICTS)]
    return {"claims": len(gold), "accuracy": right.sum() / len(gold),
            "macro_f1": np.nanmean(2 * right / both), "counts": counts.to_dict("index")}

def verdicts_text(path, scores):
    import pandas as pd
    counts = pd.DataFrame(scores["counts"]).T
    return (f"\nVerdicts on {scores['claims']} claims, {path}: accuracy {scores['accuracy']:.3f}, "
            f"macro F1 {scores['macro_f1']:.3f}. Gold verdicts by row, given ones by column:\n\n"
            + markdown(counts.rename_axis("gold").reset_index()))

# -------------------- Tables
def figures_of(system, cells):
    """Return cells with the figures that SYSTEM or SYSTEM:TABLE has for their runs."""
    import pandas as pd
    figures = pd.read_csv(PUBLISHED, sep="\t")
    tables = figures["system"] + ":" + figures["table"]
    chosen = tables[(tables == system) | (figures["system"] == system)][:1]
    figures = figures[tables.isin(chosen)]
    if figures.empty:
        fail("--published", f"no figures of {system} in {PUBLISHED}")
    figures = figures.pivot(index="row", columns="measure", values="value")
    return cells | {"published": figures.reindex_like(cells["value"])}

def beside(table, cells):
    """Return the table with each published figure beside its measure, and runs as a column."""
    if "published" in cells:
        figures = cells["published"].dropna(axis=1, how="all").map("{:.4g}".format)
        for name, column in figures.replace("nan", "").items():
            table.insert(table.columns.get_loc(name) + 1, f"{name} published", column)
    return table.reset_index(names="run")

def texts_of(cells, best="{}", second="{}", sign="†", bounds=""):
    """The table as texts; patterns mark the best and second, a sign what is significant."""
    values = cells["value"]
    texts = values.map("{:.3f}".format) + np.where(cells["p_holm"] < 0.05, sign, "")
    places = values.round(3).rank(method="dense", ascending=False)
    first = (places == 1) & (places.max() > 1)  # where all are equal, none is best
    texts = texts.mask(first, texts.map(best.format)).mask(places == 2, texts.map(second.format))
    return beside((texts + bounds).mask(values.isna(), "-"), cells)

def markdown(table, *names):
    """A table in Markdown, its columns aligned; names: columns whose texts are escaped."""
    texts = table.map(lambda cell: f"{cell:.3f}" if isinstance(cell, float) else str(cell))
    texts = texts.mask(table.isna(), "-")
    for name in names:
        named = texts[name].map(printable)
        texts[name] = named.str.replace(r"([\\`*_\[\]<>|&~$])", r"\\\1", regex=True)
    lines = [""] * (len(texts) + 2)
    for name, column in texts.items():
        width = max(map(len, [name, *column]))
        for place, text in enumerate([name, "-" * width, *column]):
            lines[place] += f"| {text:{width}} "
    return "".join(line + "|\n" for line in lines)

def styled(texts, escape):
    styler = texts.style.hide(axis="index").format(escape=escape, subset=["run"])
    return styler.format_index(escape=escape, axis=1)

def latex(cells):
    texts = texts_of(cells, r"\textbf{{{}}}", r"\textit{{{}}}", r"$^\dagger$")
    return styled(texts, "latex").to_latex(hrules=True)

def html_table(cells):
    low, high = cells["low"].map("{:.3f}–".format), cells["high"].map("{:.3f}".format)
    texts = texts_of(cells, "<b>{}</b>", "<i>{}</i>", bounds="<small>" + low + high + "</small>")
    return styled(texts, "html").to_html(table_uuid="metrics")

def with_values(cells):
    """Return cells without the measures that have no value, measured or published."""
    shown = cells["value"].fillna(cells.get("published", np.nan))
    names = shown.columns[shown.notna().any()]
    return {field: cell[names] for field, cell in cells.items()}

def tables_of(scored, cells):
    """Return {ending: content} of the files with numbers; measures without a value are left out."""
    import pandas as pd
    long = pd.DataFrame({field: cell.unstack() for field, cell in cells.items()})
    long = long.reset_index(names=["measure", "run"])[["run", "measure", *cells]]
    per_claim = pd.concat({run: one.per_claim for run, one in scored.items()}, names=["run"])
    curves = pd.concat({run: one.curve for run, one in scored.items()}, names=["run"])
    cells = with_values(cells)
    runs = {run: cells["value"].loc[run].dropna().to_dict() for run in scored}
    return {".tsv": beside(cells["value"].copy(), cells),
            ".json": json.dumps(runs, indent=1, ensure_ascii=False) + "\n",
            ".md": markdown(texts_of(cells, "**{}**", "*{}*"), "run") + f"\n{NOTES}\n",
            ".tex": latex(cells), ".cells.tsv": long,
            ".claims.tsv": per_claim.reset_index(), ".curves.tsv": curves.reset_index("run")}

# -------------------- Report
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>@TITLE@</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1240px; margin: auto; padding: 1rem }
small, th, pre { color: #66717e; font-size: .8rem } .hit small, td small { display: block }
.card { border: 1px solid #dde2e8; padding: .6rem; margin: .5rem 0 }
.scroll { overflow-x: auto } pre { white-space: pre-wrap } svg { max-width: 100%; height: auto }
table { border-collapse: collapse; width: 100%; white-space: nowrap }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid #dde2e8 }
tr > :first-child { text-align: left; position: sticky; left: 0; background: #fff }
summary { cursor: pointer; overflow-wrap: anywhere }
nav { position: sticky; top: 0; z-index: 1; background: #fff; padding: .5rem 0 }
input, select { font: inherit; width: 40%; min-width: 12rem }
.runs { display: flex; gap: .7rem } .runs > div { flex: 1 0 15rem }
.chip { padding: .1rem .4rem; margin-left: .25rem; display: inline-block }
.hit { font-size: .82rem; padding: .3rem; margin: .3rem 0; background: #f1f3f5 }
.SUPPORTS { background: #d5efde } .REFUTES { background: #fbd9d2 } .NEI { background: #fbf0c4 }
mark { background: #ffe45c } .missed { outline: 1px dashed #66717e; outline-offset: -1px }
</style>
<h1>@TITLE@</h1>
<div class="card"><div class="scroll">@TABLE@</div><pre>@NOTES@</pre></div>
<div class="card scroll">@PLOT@</div>
<h2>Claims</h2>
Numbers: R@5 of each run. Gold labels: <span class="chip SUPPORTS">SUPPORTS</span>
<span class="chip REFUTES">REFUTES</span> <span class="chip NEI">NEI</span>, grey: not judged.
Dashed: evidence that the first ten ranks miss.
<nav><input id="search" type="search" placeholder="Search claims, ids, verdicts">
<select id="order"><option value="-1">in the order of the file</option></select>
<small id="count"></small></nav><div id="claims"></div>
<script id="json" type="application/json">@DATA@</script>
<script>
// An element with an id is a global name. Runs and abstracts come as lists of pairs: as properties
// of an object, numbers would come first, and some names have a meaning of their own.
const data = JSON.parse(json.textContent), runs = data.runs, abstracts = new Map(data.abstracts);
function make(kind, name, ...children) {  // texts become text nodes, never markup
  const node = document.createElement(kind);
  node.className = name; node.append(...children); return node;
}
function hit([, id, gold, rank, said], claim) {
  const [title, text] = abstracts.get(id) ?? ["", ""];
  const sentence = new Map(claim.evidence).get(id);
  const [before, ...after] = text.split(sentence || undefined);
  const marked = after.length ? [make("mark", "", sentence), after.join(sentence)] : [];
  const place = rank > 10 ? `missed, rank ${rank}` : rank || "missed";
  const labels = (gold && ` · gold ${gold}`) + (said && ` · said ${said}`);
  return make("details", `hit ${gold} ${rank && rank < 11 ? "" : "missed"}`, make("summary", "",
    `${place}: ${title || text.slice(0, 90)}`, make("small", "", id + labels)), before, ...marked);
}
function column([run, rows], claim) {
  const hits = rows.filter(row => row[0] === claim.id).map(row => hit(row, claim));
  return make("div", "", make("b", "", run), ...hits);
}
for (const claim of data.claims) {
  const chips = claim.recall.map((value, place) => make("span", "chip",
    `${runs[place][0]} ${value === null ? "–" : value.toFixed(2)}`));
  claim.node = make("details", "card", make("summary", "", claim.text, make("br", ""),
    make("small", "", `${claim.id} ${claim.verdict}`, ...chips)));
  claim.node.ontoggle = () => claim.node.children[1] || claim.node.append(
    make("div", "runs scroll", ...runs.map(run => column(run, claim))));
}
runs.forEach(([run], place) => order.append(new Option("missed most by " + run, place)));
order.append(new Option("lost most from first to last run", runs.length));
search.oninput = order.onchange = () => {
  const words = search.value.toLowerCase().split(" "), run = Number(order.value);
  const found = data.claims.filter(({id, text, verdict}) => words.every(
    word => `${id} ${text} ${verdict}`.toLowerCase().includes(word)));
  const counts = ({recall}) => recall[0] !== null;  // claims without evidence come last
  const key = ({recall}) => run < runs.length ? recall[run] : recall.at(-1) - recall[0];
  if (run >= 0) found.sort((a, b) => counts(b) - counts(a) || key(a) - key(b));
  claims.replaceChildren(...found.map(claim => claim.node));
  count.textContent = `${found.length} of ${data.claims.length} claims`;
};
search.oninput();
</script>
</html>
"""

def plot(scored):
    """R@k of all runs by k, as SVG."""
    import pandas as pd
    from matplotlib import figure, rc_context
    text = io.StringIO()
    table = pd.DataFrame({run: one.curve.set_index("k")["recall"] for run, one in scored.items()})
    with rc_context({"svg.hashsalt": "", "svg.fonttype": "none", "text.parse_math": False}):
        axes = figure.Figure((9, 3.6), layout="constrained").subplots()
        lines = axes.plot(table, marker=".")
        for number, line in enumerate(lines):  # there are ten colours
            line.set_linestyle(("-", "--", ":")[number // 10 % 3])
        axes.set(xscale="log", xlabel="abstracts read (k)", ylabel="R@k",
                 xticks=table.index, xticklabels=table.index)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.figure.legend(  # by name, a leading _ would hide one
            lines, list(table), loc="outside right upper", ncols=1 + len(lines) // 15,
            frameon=False)
        axes.figure.savefig(text, format="svg", metadata={"Date": None})
    return re.search("<svg.*", text.getvalue(), re.DOTALL)[0]

def side_by_side(run, qrels):
    """Rows of ten ranks, then the evidence that they miss: claim, abstract, gold, rank, said."""
    both = run.rename(columns={"label": "said"}).merge(qrels, how="outer")
    both = both.reindex(columns=[*QRELS, "rank", "said"]).fillna({"rank": 0})
    both["below"] = ~both["rank"].between(1, 10)
    both = both[~both["below"] | both["label"].isin(LABELS[:2])]
    both = both.sort_values(["below", "rank"], kind="stable").drop(columns="below")
    return both.astype(object).fillna("").to_numpy().tolist()

def report(args, scored, cells, corpus, verdicts):
    """The page, as HTML; its data are lists of pairs, so that ids and names are only ever data."""
    import pandas as pd
    recalls = pd.DataFrame({run: one.per_claim["R@5"] for run, one in scored.items()})
    recalls = recalls.astype(object).where(recalls.notna(), None)  # None: a claim without evidence
    shown, claims = {}, []
    for one in scored.values():
        for _, name, *_ in one.rows:
            record = corpus.get(name, {})
            shown[name] = text_of(record, ["title"]), text_of(record, ["abstract"])
    for claim, text in read_table(args.claims, CLAIMS)[CLAIMS].to_numpy():
        if claim in recalls.index:
            line = {"id": claim, "text": text, "recall": recalls.loc[claim].tolist()}
            claims.append(line | verdicts.get(claim, {"verdict": "", "evidence": []}))
    title = f"{Path(args.data).name}, {args.split}: {len(recalls)} judged claims"
    if len(claims) < len(recalls):
        warn(args.claims, f"lacks {len(recalls) - len(claims)} of {len(recalls)} judged claims; "
             "the page's tables hold them, its rankings do not")
        title += f", {len(claims)} of them with text"
    runs = [[run, one.rows] for run, one in scored.items()]
    data = {"runs": runs, "claims": claims, "abstracts": list(shown.items())}
    parts = {"TITLE": html.escape(title), "TABLE": html_table(with_values(cells)), "NOTES": NOTES,
             "PLOT": plot(scored), "DATA": json.dumps(data).replace("<", "\\u003c")}
    return re.sub("@([A-Z]+)@", lambda match: parts[match[1]], PAGE)

# -------------------- Jobs
def save(task, contents, **facts):
    """Write {path: text or table}, with facts for the provenance and the last line."""
    for path, content in contents.items():
        if not isinstance(content, str):
            content = content.to_csv(sep="\t", index=False, lineterminator="\n")
        with written(path, task, **facts) as temporary:
            temporary.write_text(content, encoding="utf-8")
    return {"made": list(contents), **facts}

def outs_of(out, *endings):
    """Return {ending: path}: --out for the first ending, files beside it for the others."""
    stem = os.path.splitext(out)[0]
    outs = {ending: stem + ending for ending in endings} | {endings[0]: out}
    if len(set(outs.values())) < len(outs):
        fail("--out", f"{out} is another output's name; give another ending")
    for path in list(outs.values())[1:]:
        if os.path.exists(path) and not os.path.exists(f"{path}.meta.json"):
            fail(path, "would be replaced, and was not made by this script; give another --out")
    return outs

def evaluated(args):
    """Return {ending: content} of what evaluate() writes, and facts for the provenance."""
    qrels = read_qrels(args.qrels)
    corpus = read_corpus(args.corpus) if args.corpus else {}
    verdicts = read_verdicts(args.aggregated) if args.aggregated else {}
    silver = read_silver(args.silver, qrels) if args.silver else None
    scored = score_runs(args, qrels, silver)
    warn_of_unknown(args, qrels, scored, corpus)
    cells = compare_views(args, scored)
    if args.published:
        cells = figures_of(args.published, cells)
    contents, facts = tables_of(scored, cells), {}
    if args.report:
        contents[".html"] = report(args, scored, cells, corpus, verdicts)
    if args.by:
        groups = groups_of(args.claims, args.by, qrels["claim_id"].unique())
        contents[".groups.tsv"] = by_group(scored, groups, args.measures)
        shown = markdown(contents[".groups.tsv"], "run", "group")
        contents[".md"] += f"\nBy {args.by}:\n\n{shown}"
    if args.silver:
        judges = agreement(silver, qrels)
        contents[".md"] += f"\n{args.silver} beside gold:\n\n" + markdown(judges, "judge")
        facts["silver"] = [row.dropna().to_dict() for _, row in judges.iterrows()]
    if verdicts:
        facts["claims"] = score_verdicts(args.aggregated, verdicts, qrels)
        contents[".md"] += verdicts_text(args.aggregated, facts["claims"])
    return contents, facts | {"counts": {run: one.counts for run, one in scored.items()}}

def evaluate(args):
    """Score runs with every measure asked for, and compare them with the first."""
    endings = ".tsv .json .md .tex .cells.tsv .claims.tsv .curves.tsv".split()
    outs = outs_of(args.out, *endings, *[".groups.tsv"] * bool(args.by))
    inputs = [args.qrels, *args.runs, args.corpus, args.aggregated, args.silver]
    if args.report:
        outs[".html"] = args.report
    if args.report or args.by:
        inputs.append(args.claims)
    if args.published:
        inputs.append(PUBLISHED)
    task, made = task_of(args, *filter(None, inputs)), []
    if not up_to_date(args, task, *outs.values()):
        contents, facts = evaluated(args)
        made = [outs[ending] for ending in contents]
        save(task, dict(zip(made, contents.values())), **facts)
    print(Path(outs[".md"]).read_text(encoding="utf-8"))
    known = read_object(f"{outs['.md']}.meta.json")
    facts = {name: known[name] for name in ("claims", "silver") if name in known}
    return {"made": made, "runs": read_object(outs[".json"]), **facts}

def read_all(args, paths):
    """Return the rows of runs, claims and corpus; runs with other ids are refused."""
    import pandas as pd
    claims, corpus = read_table(args.claims, CLAIMS), read_corpus(args.corpus)
    ids = {"claim_id": claims["claim_id"], "abstract_id": list(corpus)}
    return pd.concat([read_run(path, **ids) for path in paths]), claims, corpus

def pool(args):
    """Write the unjudged pairs of runs, with their texts, to be labelled."""
    import pandas as pd
    outs = outs_of(args.out, ".tsv", ".run.tsv")
    task = task_of(args, args.qrels, *args.runs, args.claims, args.corpus)
    if up_to_date(args, task, *outs.values()):
        return {"made": []}
    run, claims, corpus = read_all(args, args.runs)
    ranks = run[run["rank"] <= args.pool_depth].groupby(PAIR)["rank"]
    pairs = ranks.agg(runs="count", best_rank="min")
    pairs = pairs[pairs["runs"] >= args.agreement]
    table = pairs.drop(read_qrels(args.qrels).set_index(PAIR).index, errors="ignore").reset_index()
    # in the order of the corpus: the order of ranks would tell annotators what to think
    table = pd.DataFrame({"abstract_id": list(corpus)}).merge(table)
    table = claims[CLAIMS].merge(table).assign(label="")
    for column in ("title", "abstract"):  # each on one line
        texts = [text_of(corpus[name], [column]) for name in table["abstract_id"]]
        table[column] = [" ".join(text.split()) for text in texts]
    columns = "claim_id claim abstract_id title abstract label runs best_rank".split()
    rank = table.groupby("claim_id").cumcount() + 1
    contents = {outs[".tsv"]: table[columns],
                outs[".run.tsv"]: table.assign(rank=rank, score=-rank)[RUN]}
    return save(task, contents, pairs=len(table), judged_already=len(pairs) - len(table))

def merge(args):
    """Write the qrels with the labels of a pool, or silver judgements with those of a model."""
    import pandas as pd
    task = task_of(args, args.pool, *[args.qrels] * (not args.judge))
    if up_to_date(args, task, args.out):
        return {"made": []}
    columns = columns_of(args.pool)
    if "label" not in columns:
        fail(f"{args.pool}:1", "no column label; label the file that 06_evaluate.py pool writes")
    if not args.judge and {"judge", "p_nei"} & set(columns):
        fail(args.pool, "labels of a model do not join the qrels; name it by --judge, and they "
             "become silver judgements")
    pairs = read_table(args.pool, PAIR, label=[*LABELS, ""])
    answers = pairs.loc[pairs["label"] != "", QRELS]
    without_label = len(pairs) - len(answers)
    if args.judge:
        answers["judge"] = args.judge
        return save(task, {args.out: answers}, labels=len(answers), without_label=without_label)
    qrels = read_qrels(args.qrels)
    both = pd.concat([qrels, answers]).drop_duplicates()
    for row in both.index[both.duplicated(PAIR)][:1]:
        number = [number for number, _ in read_lines(args.pool)][row + 1]
        pair = " ".join(pairs.loc[row, PAIR])
        fail(f"{args.pool}:{number}", f"the qrels have another label: {pair}; change one of them")
    both = both.iloc[np.argsort(both["claim_id"].factorize()[0], kind="stable")]
    return save(task, {args.out: both}, added=len(both) - len(qrels), without_label=without_label)

def submission(args):
    """Write a run as the file that a shared task asks for, and its zip."""
    ending = TASKS[args.task][1]
    outs = outs_of(args.out, ending, ".zip")
    with_codes = [args.narratives] * args.task.endswith("narratives")
    task = task_of(args, args.run, args.claims, args.corpus, *with_codes)
    if up_to_date(args, task, *outs.values()):
        return {"made": []}
    run, claims, _ = read_all(args, [args.run])
    run = claims[["claim_id"]].merge(run[run["rank"] <= args.top_k])
    rows = run["claim_id"].value_counts().reindex(claims["claim_id"], fill_value=0)
    if rows.min() < args.top_k:
        fail(args.run, f"claim {rows.idxmin()} has {rows.min()} abstracts, fewer than "
             f"{args.top_k}; make a longer run, or lower --top-k")
    if args.task == "checkthat4b":
        run = run.groupby("claim_id", sort=False)["abstract_id"].agg(lambda ids: str(list(ids)))
        run = run.rename_axis("post_id").rename("preds").reset_index()
    else:
        run = run.filter([*RUN[:3], "label"]).replace({"label": OFFICIAL})
    for path in with_codes:  # the same codes in all rows of a claim
        codes = read_table(path, ["claim_id", "codes"]).set_index("claim_id")["codes"]
        run["narrative"] = run["claim_id"].map(codes)
        for claim in run["claim_id"][run["narrative"].isna()][:1]:
            fail(path, f"no codes for claim {claim}; make them by recipes/narratives.py")
    text = run.to_csv(sep="," if ending == ".csv" else "\t", index=False, lineterminator="\n")
    facts = {"claims": len(claims), "rows": len(run)}
    with written(outs[".zip"], task, **facts) as path, zipfile.ZipFile(path, "w") as archive:
        name = zipfile.ZipInfo(f"predictions{ending}")  # without a time: the same bytes again
        archive.writestr(name, text, zipfile.ZIP_DEFLATED)
    return save(task, {outs[ending]: text}, **facts) | {"made": list(outs.values())}

# -------------------- Command line
def add_evaluate(job):
    natural = between(1, kind=int)
    add = job.add_argument_group("inputs and outputs").add_argument
    add("runs", nargs="*", help="runs or verdicts, first the baseline (default: what the other "
        f"scripts have made in WORK/SPLIT, of {', '.join(STAGES)})")
    add("--qrels", default="{data}/qrels.{split}.tsv", help="judged pairs")
    add("--claims", default="{data}/claims.{split}.tsv", help="claims, for the page and --by")
    add("--corpus", default="{data}/corpus.jsonl", help="abstracts, for the page and for checks")
    add("--aggregated",
        help="verdicts on claims (default: WORK/SPLIT/claims.jsonl, if it has judged claims)")
    add("--silver", metavar="FILE", help="silver judgements (merge --judge): further columns, "
        "where they judge what gold does not, and their agreement with gold")
    add("--out", help="table; other files go beside it (default: WORK/SPLIT/metrics.tsv, with "
        "other --qrels metrics-NAME.tsv)")
    add("--report", metavar="PAGE", help="HTML page to write")
    add = job.add_argument_group("measures").add_argument
    add("--measures", nargs="+", default=["climatecheck2025"],
        help=f"{', '.join([*MEASURES, *COMPOSED])}, {'@k, '.join(RANKED)}@k, "
        f"{', '.join(STANCE)}, or any measure of ir-measures, such as AP")
    add("--depth", type=natural, default=10, help="ranks that P, R, F1 and B-Pref see")
    add("--condensed", action="store_true",
        help="further columns: unjudged abstracts leave the runs before they are measured")
    add("--by", metavar="COLUMN",
        help="column of the claims, such as a language: every measure by group, too")
    add("--resamples", type=natural, default=2000, help="for intervals and p-values")
    add("--published", metavar="SYSTEM", help="show its figures for the runs, of "
        "recipes/published.tsv; or SYSTEM:TABLE")

def add_pool(job):
    add = job.add_argument_group("inputs and outputs").add_argument
    add("runs", nargs="*", help="runs (default: as for evaluate)")
    add("--qrels", default="{data}/qrels.{split}.tsv", help="judged pairs, which are left out")
    add("--claims", default="{data}/claims.{split}.tsv", help="claims")
    add("--corpus", default="{data}/corpus.jsonl", help="abstracts")
    add("--out", default="{work}/{split}/pool.tsv", help="pairs with an empty label; "
        "beside it, as .run.tsv, the same pairs as a run, for 05_classify.py llm")
    add = job.add_argument_group("pairs").add_argument
    add("--pool-depth", type=between(1, kind=int), default=10, help="ranks of each run to judge")
    add("--agreement", type=between(1, kind=int), default=1, metavar="N",
        help="leave out pairs that fewer than N runs have at these ranks")

def add_merge(job):
    add = job.add_argument_group("inputs and outputs").add_argument
    add("pool", help="pool with labels, rows with an empty label are left out; or verdicts")
    add("--qrels", default="{data}/qrels.{split}.tsv", help="judged pairs")
    add("--judge", metavar="MODEL", help="what gave the labels: they are written as silver "
        "judgements, without the judged pairs")
    add("--out", help="both together (default: WORK/SPLIT/qrels.tsv, or qrels.silver.tsv)")

def add_submission(job):
    add = job.add_argument_group("inputs and outputs").add_argument
    add("run", nargs="?", default="{work}/{split}/verdicts.tsv", help="run or verdicts")
    add("--claims", default="{data}/claims.{split}.tsv", help="claims; all must have rows")
    add("--corpus", default="{data}/corpus.jsonl", help="abstracts")
    add("--narratives", default="{work}/{split}/narratives.tsv",
        help="codes of claims, by recipes/narratives.py; for climatecheck2026-narratives")
    add("--out", help="table or zip to write; both are (default: WORK/SPLIT/TASK/predictions)")
    add = job.add_argument_group("task").add_argument
    add("--task", choices=TASKS, default="climatecheck2025", help="shared task")
    add("--top-k", type=between(1, kind=int), help="abstracts per claim (default: the task's)")

def resolve(args):
    """Return the arguments as the jobs use them; nothing changes them afterwards."""
    folder = f"{args.work}/{args.split}"
    if "runs" in args:
        stages = [f"{folder}/{stage}.tsv" for stage in STAGES]
        args.runs = list(dict.fromkeys(args.runs or filter(os.path.isfile, stages)))
        if not args.runs:
            fail(folder, "no run; name runs, or make some by: "
                 f"{advised(args, '02_retrieve.py')}")
    if "measures" in args:
        names = []
        for word in args.measures:
            names += MEASURES[word].split(", ") if word in MEASURES else [word]
        args.measures = list(dict.fromkeys(names))
        if args.aggregated is None:
            args.aggregated = own_verdicts(f"{folder}/claims.jsonl", args.qrels)
        own_qrels = Path(f"{args.data}/qrels.{args.split}.tsv")
        other = Path(args.qrels).stem.removeprefix("qrels.")
        other = "" if Path(args.qrels) == own_qrels else f"-{other}"  # they keep their own metrics
        args.out = args.out or f"{folder}/metrics{other}.tsv"
        if not args.report and not os.path.isfile(args.corpus):
            args.corpus = ""  # the page alone needs it
    if "agreement" in args and args.agreement > len(args.runs):
        fail("--agreement", f"{args.agreement} runs, but there are {len(args.runs)}; name more")
    if "judge" in args:
        args.judge = " ".join((args.judge or "").split())
        silver = ".silver" if args.judge else ""
        args.out = args.out or f"{folder}/qrels{silver}.tsv"
    if "task" in args:
        depth, ending = TASKS[args.task]
        args.top_k = args.top_k or depth
        args.out = args.out or f"{folder}/{args.task}/predictions{ending}"
        if args.out.endswith(".zip"):  # made with the table
            args.out = args.out.removesuffix(".zip") + ending
    return args

def main():
    parser, jobs = command_line(evaluate, pool, merge, submission)
    add_evaluate(jobs["evaluate"])
    add_pool(jobs["pool"])
    add_merge(jobs["merge"])
    add_submission(jobs["submission"])
    finish(resolve, arguments_of(parser, jobs))

# --- helpers (same in all six scripts)
PACKAGES = ("numpy", "pandas", "torch", "transformers", "sentence_transformers", "bm25s", "openai")
MADE_BY = {  # names of files and folders that a script makes, and the command
    "bm25": "01_index.py --indexes bm25", "dense": "01_index.py --indexes dense",
    "splade": "01_index.py --indexes splade", "graph": "01_index.py graph",
    "encoder": "01_index.py train", "hybrid.tsv": "02_retrieve.py",
    "examples.jsonl": "02_retrieve.py mine", "reranker": "03_rerank.py train",
    "rerank.tsv": "03_rerank.py", "llm.tsv": "04_llm_rerank.py",
    "classifier": "05_classify.py train", "verdicts.tsv": "05_classify.py",
    "llm_verdicts.tsv": "05_classify.py llm", "claims.jsonl": "05_classify.py --aggregate FILE",
    "pool.tsv": "06_evaluate.py pool", "pool.run.tsv": "06_evaluate.py pool",
    **dict.fromkeys(("bm25.tsv", "dense.tsv", "splade.tsv"), "02_retrieve.py"),
    "bm25-rm3.tsv": "02_retrieve.py --retrievers bm25 --feedback 10",
    **dict.fromkeys(("minilm", "splade-tiny", "smollm2"), "data/download.py models")}
SPLITS = {"train": "train", "mine": "train", "fit": "dev"}  # of jobs, where it is not test
START, LOCKS, WARNINGS = time.monotonic(), contextlib.ExitStack(), []

def printable(text):
    """Return a text on one line, ? for control characters, which could steer a terminal."""
    line = " ".join(str(text).split())
    return "".join(c if c.isprintable() else "?" for c in line)

def warn(where, what):
    """Print a line on stderr, and keep it for the provenance of outputs."""
    warn_once(printable(f"warning: {where}: {what}"))

def warn_once(line):
    if line not in WARNINGS:
        WARNINGS.append(line)
        print(line, file=sys.stderr)

def fail(where, what):
    """Bad input or usage: one line on stderr, exit status 2."""
    print(printable(f"error: {where}: {what}"), file=sys.stderr)
    sys.exit(2)

# ---------- Reading
def read_lines(path):
    """Yield (number, line) of a UTF-8 file as an editor shows them, blank lines left out."""
    damaged, empty = [], True
    with open(path, "rb") as file:
        start = file.peek(2)[:2]
        kind = {b"\x1f\x8b": "gzip", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}.get(start)
        if kind:
            fail(path, f"the file is {kind}; see data/convert.py, or save it as UTF-8 text")
        for number, line in enumerate(file, 1):
            try:
                text = line.decode()
            except UnicodeDecodeError:
                damaged.append(number)
                text = line.decode(errors="replace")
            text = text.removeprefix("\ufeff").rstrip("\r\n")  # a byte order mark
            if text.strip():
                empty = False
                yield number, text
    if damaged:
        warn(f"{path}:{damaged[0]}", f"{len(damaged)} lines are not UTF-8; U+FFFD replaces what "
             "cannot be read")
    if empty:
        fail(f"{path}:1", "the file is empty; a table needs a header, a corpus one abstract a line")

def unquoted(field):
    """Return a field of a table without the quotation marks that pandas puts around it."""
    quoted = re.fullmatch('"((?:[^"]|"")*)"', field)
    return quoted[1].replace('""', '"') if quoted else field

def read_table(path, columns, **known):
    """Read a TSV file as strings, one row a line; a run by claim and rank, with numbers.

    known: the values that a column may hold. A bad row ends the script, with its line.
    """
    import pandas as pd
    rows = {}
    for number, line in read_lines(path):
        fields = line.split("\t")
        rows[number] = list(map(unquoted, fields)) if '"' in line else fields
    first = next(iter(rows))
    header = rows.pop(first)
    if not {*columns, *known} <= set(header) or len(set(header)) < len(header):
        fail(f"{path}:{first}", f"columns {', '.join(header)}, wanted {', '.join(columns)}; "
             "data/convert.py reads other formats and renames columns")
    for number, row in rows.items():
        if len(row) != len(header):
            fail(f"{path}:{number}", f"{len(row)} fields, the header has {len(header)}; fix the "
                 "row, or convert the file by data/convert.py")
    table = pd.DataFrame(rows.values(), index=rows.keys(), columns=header, dtype=str)
    if "claim" in columns:
        table["claim"] = table["claim"].str.normalize("NFC")
    ids = [column for column in columns if column.endswith("_id")]
    bad = {f"{column} is empty": table[column].str.strip() == "" for column in columns}
    for column in ids:
        bad[f"white space around {column}"] = table[column] != table[column].str.strip()
    bad |= {f"unknown {column}": ~table[column].isin(known[column]) for column in known}
    bad["there is an earlier row for this"] = table.duplicated(ids)
    if "rank" in columns:
        for column in ("rank", "score"):
            table[column] = pd.to_numeric(table[column], errors="coerce").astype(float)
        expected = table.groupby("claim_id")["rank"].rank("first")
        bad["score is not a finite number"] = ~np.isfinite(table["score"])
        bad["rank is not 1, 2, 3"] = table["rank"] != expected
    for what, rows in bad.items():
        if rows.any():
            number = rows.idxmax()
            value = table.loc[number].get(what.removeprefix("unknown "), "")
            what = f"{what} {value!r:.60}" if what.startswith("unknown") else what
            fail(f"{path}:{number}", f"{what}: {' '.join(table.loc[number, ids])}; fix the row, or "
                 "see data/convert.py")
    if "rank" in columns:
        table = table.astype({"rank": int})
        table = table.iloc[np.lexsort((table["rank"], table["claim_id"].factorize()[0]))]
    return table.reset_index(drop=True)

def read_corpus(path):
    """Read {abstract_id: record} in file order; texts in NFC; an abstract that is no text is ""."""
    corpus, empty = {}, 0
    for number, line in read_lines(path):
        try:
            record = json.loads(line)
            if "\\ud" in line.lower():  # lone surrogates become U+FFFD
                text = json.dumps(record, ensure_ascii=False).encode("utf-16", "surrogatepass")
                record = json.loads(text.decode("utf-16", "replace"))
            name = record["abstract_id"]
        except (ValueError, LookupError, TypeError, RecursionError):
            fail(f"{path}:{number}", "not a JSON object with an abstract_id; fix the line")
        if type(name) not in (str, int):
            fail(f"{path}:{number}", f"abstract_id {name!r:.60} is no string or integer; put it "
                 "into quotation marks, spelt as in the qrels")
        name = str(name)
        if name in corpus or not name or name != name.strip() or re.search(r"[\t\r\n]", name):
            fail(f"{path}:{number}", f"abstract_id {name!r:.60} is empty, not unique, or has white "
                 "space that a table cannot hold; fix it")
        for field, value in record.items():
            if isinstance(value, str):
                record[field] = unicodedata.normalize("NFC", value)
        if not isinstance(record.get("abstract"), str):
            record["abstract"] = ""
        corpus[name] = record
        empty += not record["abstract"].strip()
    if empty:
        warn(path, f"{empty} abstracts without text, kept as empty")
    return corpus

# ---------- Provenance
def read_object(path):
    """Return the JSON object in a file, {} if there is none."""
    try:
        found = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}

def digest(path):
    """Return the sha256 of a file, of an index's meta.json, or of all files of a model's folder."""
    path, total = Path(path), hashlib.sha256()
    if (path / "meta.json").is_file():
        path = path / "meta.json"
    if not path.is_dir():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    for file in sorted(path.rglob("*")):
        if file.is_file():
            total.update(f"{file.relative_to(path)} {digest(file)}\n".encode())
    return total.hexdigest()

def missing(path, args):
    """Return what to do about an input that does not exist."""
    command = MADE_BY.get(Path(path).name)
    if not command:
        splits = sorted(file.name[7:-4] for file in Path(args.data).glob("claims.*.tsv"))
        return (f"no such file, and no script makes it; check --data {args.data} and --split "
                f"{args.split} (claims of {', '.join(splits) or 'no split'} are there)")
    words = ["python", *command.split()]
    if not command.startswith("data/"):
        words += ["--data", args.data, "--work", args.work]
    if path.endswith((".tsv", ".jsonl")):
        words += ["--split", args.split]
    flags = [f"--{name}".replace("_", "-") for name, value in vars(args).items() if value == path]
    other = "".join(f", or name another one by {flag}" for flag in flags if flag in args.flags)
    return f"it is missing; make it by: {shlex.join(words)}{other}"

def task_of(args, *files, models=()):
    """Return what decides the bytes of an output: arguments, and digests of what is read.

    A model that is no folder is known by its name on the hub.
    """
    arguments = {name: value for name, value in vars(args).items() if name not in NEUTRAL}
    inputs = {}
    for path in map(str, (*files, *models)):
        name_on_hub = path in map(str, models) and path.count("/") < 2
        if not Path(path).exists() and not name_on_hub:
            fail(path, missing(path, args))
        inputs[path] = digest(path) if Path(path).exists() else ""
        made = read_object(f"{path}.meta.json") if Path(path).is_dir() else {}
        if made.get("sha256", inputs[path]) != inputs[path]:
            fail(path, "its files have changed since it was made; make it again with --force, or "
                 f"remove {path}.meta.json to use it as it is")
    return {"arguments": arguments, "inputs": inputs}

def lock(path):
    """Lock an output until the process ends; another command that makes it is refused."""
    from filelock import FileLock, Timeout
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        LOCKS.enter_context(FileLock(f"{path}.lock", timeout=0))
    except Timeout:
        fail(path, "another command is making it; wait until that one ends")
    LOCKS.callback(remove, f"{path}.lock")  # FileLock leaves the file there

def check_owner(args, task, path, known=False):
    """Refuse an output that the task reads, and folders and data that others made, unless known."""
    if path.resolve() in {Path(name).resolve() for name in task["inputs"]}:
        fail(path, "this command reads it; give another --out")
    arguments = read_object(f"{path}.meta.json").get("arguments")
    job = arguments.get("job") if isinstance(arguments, dict) else task["arguments"]["job"]
    ours = Path(f"{path}.meta.json").exists() and job == task["arguments"]["job"]
    data = Path(args.data).resolve()
    foreign = path.is_dir() and any(path.iterdir()) or data in path.resolve().parents
    if path.exists() and foreign and not (ours or known):
        fail(path, "this command did not make it; give another --out")

def up_to_date(args, task, *outs):
    """Return whether this very task made outs, which are locked until the process ends."""
    provenance = {}
    for path in map(Path, outs):
        lock(path)
        check_owner(args, task, path)
        provenance[path] = read_object(f"{path}.meta.json") if path.exists() else {}
    if args.force or any(not task.items() <= made.items() for made in provenance.values()):
        return False
    for path, made in provenance.items():
        remove(f"{path}.parts")  # left by a process that was killed at its very end
        for line in made.get("warnings") or ():
            warn_once(line)
        print(f"up to date: {path}")
        if made.get("sha256") != digest(path):
            warn(path, "its bytes have changed since it was made; --force makes it again")
    return True

@contextlib.contextmanager
def written(path, task, **facts):
    """Yield a temporary path. What is made there becomes path, whole, with its provenance."""
    meta, path = Path(f"{path}.meta.json"), Path(path).resolve()  # behind a symbolic link
    new = Path(f"{path}.tmp")
    remove(new)
    try:
        yield new
        modules = {name: sys.modules[name].__version__ for name in PACKAGES if name in sys.modules}
        gpu = "torch" in modules and sys.modules["torch"].cuda
        device = gpu.get_device_name() if gpu and gpu.is_initialized() else "no GPU of CUDA"
        made = {"command": sys.argv, "sha256": digest(new), "packages": modules, "device": device,
                "warnings": WARNINGS}
        text = json.dumps(task | made | facts | spent(), indent=1, ensure_ascii=False) + "\n"
        meta.write_text(json.dumps({"arguments": task["arguments"]}))  # vouches for no bytes
        if path.is_dir():
            remove(path)
        new.rename(path)
        meta.write_text(text, encoding="utf-8")
    finally:
        remove(new)

def remove(path):
    """Delete a file or a folder, if it exists."""
    if Path(path).is_dir() and not Path(path).is_symlink():
        shutil.rmtree(path)
    else:
        Path(path).unlink(missing_ok=True)

def spent():
    """Return seconds and peak memory (MiB) of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak //= 1024 if sys.platform == "linux" else 1024**2
    return {"seconds": round(time.monotonic() - START, 1), "peak_mib": peak}

# ---------- Command line
if not sys.stderr.isatty():  # tqdm prints a plain line every ten seconds
    os.environ.setdefault("TQDM_MININTERVAL", "10")
    os.environ.setdefault("TQDM_BAR_FORMAT", "{desc}: {n_fmt}/{total_fmt} [{elapsed}]\n")

class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action):  # no "(default: None)"
        if isinstance(action.default, list):
            return f"{action.help} (default: {' '.join(action.default)})"
        plain = any(action.default is nothing for nothing in (None, False, ""))
        return action.help if plain else super()._get_help_string(action)

def between(low, high=1e9, kind=float):
    """Return an argparse type: a number from low to high."""
    def number(text):
        if not low <= kind(text) <= high:
            raise argparse.ArgumentTypeError(f"{text} is not a number from {low:g} to {high:g}")
        return kind(text)
    return number

def device(text):
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text} is none of auto, cpu, mps, cuda, cuda:1")
    return text

def command_line(*functions):
    """Return (parser, {job: its parser}) with the flags of all jobs. The first job is the default.

    The first paragraph of a function's docstring is the job's sentence in --help.
    """
    script, names = Path(sys.argv[0]).name, [function.__name__ for function in functions]
    parser = argparse.ArgumentParser(
        prog=script, description=sys.modules["__main__"].__doc__, formatter_class=Help,
        usage=f"{script} [{' | '.join(names)}] [flags]",
        epilog=f"{script} JOB --help shows the flags of a job; without a job: {names[0]}")
    jobs = parser.add_subparsers(title="jobs", metavar="", prog=script)
    for name, function in zip(names, functions):
        sentence = " ".join((function.__doc__ or name).split("\n\n")[0].split())
        job = jobs.add_parser(
            name, help=sentence, description=sentence, formatter_class=Help, allow_abbrev=False)
        job.error = lambda message, name=name: fail(script, f"{message}; see {name} --help")
        job.set_defaults(job=f"{script} {name}", function=function)
        add = job.add_argument_group("data and device").add_argument
        add("--data", type=os.path.normpath, default="data/demo",
            help="folder of corpus, claims and qrels")
        add("--work", help="folder of everything made from them (default: work/ and the name of "
            "the data folder; two data folders of one name need it)")
        add("--split", default=SPLITS.get(name, "test"), help="which claims")
        add("--seed", type=between(0, 2**32 - 1, int), default=13, help="of every random choice")
        add("--device", nargs="+", type=device, default=["auto"], metavar="cuda:0",
            help="or cpu, mps; auto: a GPU where there is one")
        add("--force", action="store_true", help="make outputs again, from the start")
    return parser, jobs.choices

def arguments_of(parser, jobs):
    """Return the arguments; {data}, {work} and {split} in defaults are filled in.

    args.flags are the flags of the job.
    """
    words, names, script = sys.argv[1:], list(jobs), Path(sys.argv[0]).name
    for word in words:
        if re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", word):
            fail(script, f"control characters in {word!r:.60}; rename the file")
    if words and words[0] in ("-h", "--help"):
        parser.parse_args(words)
    job = words.pop(0) if words and words[0] in jobs else names[0]
    first = words[0] if words else ""
    if job == names[0] and first[:1] != "-" and not Path(first).exists():  # a misspelt job?
        for near in difflib.get_close_matches(first, names, 1, 0.7):
            fail(script, f"no job {first}; did you mean {near}?")
    args, unknown = jobs[job].parse_known_args(words)
    flags = sorted(set(re.findall(r"--[\w-]+", jobs[job].format_help())))
    if unknown:
        near = difflib.get_close_matches(unknown[0], flags, 1)
        advice = f"did you mean {near[0]}?" if near else f"see {job} --help"
        fail(script, f"unrecognized arguments: {' '.join(unknown)}; {advice}")
    args.work = args.work or f"work/{Path(os.path.abspath(args.data)).name}"
    for name, value in vars(args).items():
        setattr(args, name, filled(value, args))
    args.flags = flags
    return args

def filled(value, args):
    """Return a default value with {data}, {work} and {split} filled in."""
    if isinstance(value, list):
        return [filled(one, args) for one in value]
    if isinstance(value, str) and value.startswith(("{data}", "{work}")):
        value = value.replace("{data}", args.data).replace("{work}", args.work)
        return value.replace("{split}", args.split)
    return value

def finish(resolve, args):
    """Run the job and print its result as JSON; a fault of the disk is one line, Ctrl-C silence.

    resolve: returns the arguments as the job uses them; nothing changes them afterwards.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        args = resolve(args)
        print(json.dumps(args.function(args) | spent(), ensure_ascii=False), flush=True)
    except (KeyboardInterrupt, BrokenPipeError):  # Ctrl-C; | head
        LOCKS.close()
        os._exit(130)  # without tearing libraries down, which takes seconds
    except OSError as error:
        fail(error.filename or args.job, f"{error.strerror or error}; check path, rights and space")
    except Exception as error:
        text = repr(error)
        if "Symlink loop" in text or "SafetensorError" in text:  # links, a full disk
            fail(args.job, f"{error}; check path, rights and space")
        if "memory" not in text.lower() or "illegal" in text:
            raise
        flags = [flag for flag in ("--batch-size", "--max-length", "--top-k") if flag in args.flags]
        advice = f"lower {' or '.join(flags)}" if flags else "end other programs"
        fail(args.job, f"out of memory; {advice}, and run it again to go on")
    finally:
        LOCKS.close()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while the process ends
# --- end of helpers

# --- texts (same in 01, 03, 04, 05 and 06)
def text_of(record, fields=("title", "abstract"), separator=" "):
    """Join the fields of a record that hold text; the items of a list are joined by commas."""
    texts = []
    for value in map(record.get, fields):
        items = value if isinstance(value, list) else [value]
        known = [str(item).strip() for item in items if item is not None and item == item]  # no NaN
        texts.append(", ".join(filter(None, known)))
    return separator.join(filter(None, texts))
# --- end of texts

if __name__ == "__main__":
    main()
