# /// script
# requires-python = ">=3.11"
# dependencies = ["ir-measures==0.4.3", "numpy==2.4.6", "pandas==3.1.1"]
# ///
"""
Score runs and verdicts as the shared tasks and trec_eval do; compare them; write submissions.

Reads   runs, verdicts, qrels; corpus, if it is there, for a note on evidence that it lacks
        --report: also claims and WORK/SPLIT/claims.jsonl; submission: claims and corpus
Writes  metrics.tsv; metrics.json with intervals, p-values and counts; metrics.claims.tsv with
        values by claim
        --report: an HTML page with the rankings; submission: a zip with the table or tables
Prints  the table, notes on it, and the counts behind it; the last line is JSON

Functions that all scripts share stand at the end, in a marked block.

Examples
    python 06_evaluate.py a.tsv b.tsv --measures climatecheck2026 trec P@5 --report report.html
    python 06_evaluate.py submission --task climatecheck2025
"""

import argparse
import contextlib
import csv
import functools
import hashlib
import html
import json
import os
import re
import sys
import tempfile
import time
import warnings
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

PAIR = ["claim_id", "abstract_id"]
RUN = [*PAIR, "rank", "score"]
QRELS = [*PAIR, "label"]
LABELS = ("SUPPORTS", "REFUTES", "NEI")
STAGES = "bm25 dense splade hybrid fused rerank llm verdicts llm_verdicts".split()
SETS = {  # of measures, by name
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
    "Verification 2026": (np.sum, ["F1", "R@5"]),
}
STANCE = ("P", "R", "F1", "macro F1")  # of labels; R@k is a measure of rankings
NOTES = {  # on measures whose names match this pattern
    "pooled R": "Pooled R@k is the share of all evidence pairs that is found.",
    "B-Pref": "B-Pref skips claims without evidence, without NEI pairs or without rows; B-Pref "
    "(trec_eval) skips those without evidence, divides by min(R, N), not R, and reads all ranks.",
    "Judged": "Judged@k is a mean over all claims.",
    "abstract": "Abstract P, R and F1 count evidence with the right label, at all ranks.",
    "^(P|R|F1|macro F1)$": "P, R and F1 are of labels, weighted by support; macro F1 is not.",
    "": "*: differs from the first run, p < 0.05 (paired randomisation test, Holm). A run without "
    "rows for a tenth of the claims or more is not compared: no *, no bold; if it is the first, "
    "no run is.",
}
LEGEND = "Below a value: its 95 % bootstrap interval over claims. Bold: the best run."
TABLES = (".tsv", ".json", ".claims.tsv")  # endings of the files with numbers
UNJUDGED = -1  # in place of a label's number: the run has this row, the qrels do not
NO_ROW = -2  # the run has fewer rows
TASKS = """climatecheck2025 climatecheck2026 climatecheck2026-narratives
    checkthat4b checkthat2026""".split()
OFFICIAL = {"SUPPORTS": "Supports", "REFUTES": "Refutes", "NEI": "Not Enough Information"}
warnings.simplefilter("ignore", RuntimeWarning)  # 0 / 0 is NaN here, which means no value


# ---------- Runs beside judgements
@functools.cache
def digest_once(path):
    """Return the digest of a file or folder, such as an index that several runs were made from."""
    return digest(path)


def warn_of_changes(path):
    """Warn if a file that this one was made from is another one now, as the sidecar tells."""
    for name, sha256 in sidecar_of(path).get("inputs", {}).items():
        if Path(name).exists() and digest_once(name) != sha256:
            warn(path, f"{name} has changed since this was made; make it again")


def read_run(path, qrels):
    """Return a run's rows for claims of the qrels, and counts of what is missing."""
    warn_of_changes(path)
    run = read_table(path, RUN, label=LABELS)
    for column in PAIR:
        if not run[column].isin(qrels[column]).any():
            fail(path, f"no {column} is in the qrels; name a run and qrels of one split")
    claims = set(qrels["claim_id"])
    given = set(run["claim_id"])
    counts = {"claims without rows": len(claims - given), "claims not judged": len(given - claims)}
    return run[run["claim_id"].isin(claims)], counts


class Judgements(NamedTuple):
    """A run beside the qrels. A label is its place in LABELS, or UNJUDGED, or NO_ROW."""

    R: np.ndarray  # (claims,), relevant abstracts
    N: np.ndarray  # (claims,), other judged abstracts
    gold: np.ndarray  # (claims, ranks), labels in the qrels
    predicted: np.ndarray  # (claims, ranks), labels in the run

    def first(self, k):
        """Return the judgements of the first k ranks."""
        return self._replace(gold=self.gold[:, :k], predicted=self.predicted[:, :k])


def judgements_of(run, qrels):
    """Return the Judgements of a run; claims in the order of the qrels."""
    is_relevant = qrels["label"] != "NEI"
    by_claim = is_relevant.groupby(qrels["claim_id"], sort=False)
    R = by_claim.sum()
    N = by_claim.size() - R
    claims = R.index.get_indexer(run["claim_id"])
    ranks = run["rank"].to_numpy() - 1
    gold = np.full((len(R), ranks.max() + 1), NO_ROW, np.int8)
    predicted = gold.copy()
    gold[claims, ranks] = UNJUDGED
    # Only rows with an abstract of the qrels can be judged; merging all takes five times as long.
    known = run.loc[run["abstract_id"].isin(qrels["abstract_id"]), RUN].merge(qrels[QRELS])
    judged_claims = R.index.get_indexer(known["claim_id"])
    gold[judged_claims, known["rank"] - 1] = known["label"].map(LABELS.index)
    if "label" in run:
        predicted[claims, ranks] = run["label"].map(LABELS.index)
    return Judgements(R.to_numpy(float), N.to_numpy(), gold, predicted)


# ---------- Measures of a claim
# A measure maps Judgements to a numerator and a denominator for each claim. A run's value is the
# sum of the numerators divided by the sum of the denominators. So a claim with a denominator of 0
# does not count; if all others have 1, the value is a mean over claims.
def is_evidence(labels):
    """Return where labels are SUPPORTS or REFUTES."""
    return (labels == 0) | (labels == 1)  # places in LABELS


def mean_over(is_counted, values):
    """Return the fractions for a mean of values over the claims that are counted."""
    return np.where(is_counted, values, 0.0), is_counted


def recall(judgements):
    """Share of a claim's evidence that is found."""
    R = judgements.R
    return mean_over(R > 0, is_evidence(judgements.gold).sum(1) / R)


def pooled_recall(judgements):
    """Share of all evidence pairs that is found (+VeriRel, eq. 7)."""
    return is_evidence(judgements.gold).sum(1), judgements.R


def bpref(judgements):
    """B-Pref of ClimateCheck: evidence adds 1 - n / R (in trec_eval: 1 - n / min(R, N))."""
    gold = judgements.gold
    R = judgements.R
    # n: judged non-relevant abstracts down to a rank, at most R
    n = np.minimum((gold == LABELS.index("NEI")).cumsum(1), R[:, None])
    has_rows = gold[:, 0] != NO_ROW
    is_counted = (R > 0) & (judgements.N > 0) & has_rows
    return mean_over(is_counted, (is_evidence(gold) * (1 - n / R[:, None])).sum(1) / R)


def right_evidence(judgements):
    """Return how many abstracts of a claim are evidence with the right label."""
    gold = judgements.gold
    return (is_evidence(gold) & (gold == judgements.predicted)).sum(1)


# SciFact's abstract-level measures, labels only (Wadden et al. 2020)
def abstract_precision(judgements):
    """Share of the pairs called evidence that have the right label."""
    return right_evidence(judgements), is_evidence(judgements.predicted).sum(1)


def abstract_recall(judgements):
    """Share of all evidence that has the right label; a run without labels has no value."""
    has_labels = (judgements.predicted >= 0).any()
    return right_evidence(judgements), judgements.R * has_labels


def abstract_f1(judgements):
    """Harmonic mean of abstract precision and recall."""
    right, called = abstract_precision(judgements)
    _, R = abstract_recall(judgements)
    return 2 * right, called + R


MEASURES = {  # by the part of the name before @k; ir-measures computes others
    "R": recall,
    "pooled R": pooled_recall,
    "B-Pref": bpref,
    "abstract P": abstract_precision,
    "abstract R": abstract_recall,
    "abstract F1": abstract_f1,
}


def library_fraction(name, run, qrels, judgements):
    """Return the fractions of a measure that ir-measures computes; Judged@k is over all claims."""
    import ir_measures

    columns = {"claim_id": "query_id", "abstract_id": "doc_id"}
    judged = qrels.rename(columns=columns).assign(relevance=(qrels["label"] != "NEI").astype(int))
    ranked = run.rename(columns=columns).assign(score=-run["rank"].astype(float))
    try:
        measure = ir_measures.parse_measure("Bpref" if name == "B-Pref (trec_eval)" else name)
        cutoff = measure.params.get("cutoff")  # ranks below it would only take time
        if cutoff == 0:
            raise ValueError("it reads no ranks")  # trec_eval would end the process
        if cutoff and "judged_only" not in name:  # where unjudged ranks go before the cutoff
            ranked = ranked[ranked["rank"] <= cutoff]
        found = ir_measures.iter_calc([measure], judged, ranked)
        values = {claim_id: value for claim_id, _, value in found}
    except Exception as error:  # ir-measures and its providers raise errors of many types
        fail("--measures", f"cannot compute {name!r}: {error}; see --help")
    is_counted = (judgements.R > 0) | name.startswith("Judged")
    values = [values.get(claim_id, 0) for claim_id in qrels["claim_id"].unique()]
    return mean_over(is_counted, values)


# ---------- Measures of labels
def confusion(judgements):
    """Return confusion matrices (claims, gold, predicted)."""
    labels = np.arange(len(LABELS))
    is_gold = judgements.gold[..., None] == labels  # (claims, ranks, labels)
    is_predicted = judgements.predicted[..., None] == labels
    return is_gold.transpose(0, 2, 1).astype(float) @ is_predicted


def stance_scores(matrices):
    """Weighted P, R, F1, and macro F1 of labels that occur; matrices (..., gold, predicted)."""
    right = np.diagonal(matrices, axis1=-2, axis2=-1)
    support = matrices.sum(-1)
    predicted = matrices.sum(-2)
    f1 = 2 * right / (support + predicted)
    scores = [right / np.maximum(predicted, 1), right / np.maximum(support, 1), np.nan_to_num(f1)]
    weighted = [(score * support).sum(-1) / support.sum(-1) for score in scores]
    return [*weighted, np.nanmean(f1, axis=-1)]


# ---------- Measures of a run
# What a run's values are computed from is kept for each claim, so that claims can be drawn or
# swapped. components: {measure: its fractions (claims, 2), CONFUSION: matrices (claims, 3, 3)}
CONFUSION = "confusion"  # the component of the measures of labels


def components_of(run, qrels, names, depth):
    """Return the components of measures; depth: ranks that a measure without @k reads."""
    judgements = judgements_of(run, qrels)
    members = []
    for name in names:
        members += COMPOSED[name][1] if name in COMPOSED else [name]
    components = {CONFUSION: confusion(judgements.first(depth))}
    for name in dict.fromkeys(members):
        if name in STANCE:
            continue
        kind, k = re.fullmatch(r"(?s)(.*?)(?:@([1-9]\d*))?", name).groups()
        if kind in MEASURES:
            # No claim has more ranks than the run has rows, so that many are all.
            limit = len(run) if kind.startswith("abstract") else depth
            fraction = MEASURES[kind](judgements.first(int(k or limit)))
        else:
            fraction = library_fraction(name, run, qrels, judgements)
        components[name] = np.stack(fraction, axis=-1)
    return components


def values_of(sums, names):
    """Return the values of measures (..., names).

    sums: components whose axis of claims is summed away; or as they are, for values by claim.
    """
    known = dict(zip(STANCE, stance_scores(sums[CONFUSION])))
    for name, fraction in sums.items():
        if name != CONFUSION:
            known[name] = fraction[..., 0] / fraction[..., 1]
    for name in set(COMPOSED) & set(names):
        compose, members = COMPOSED[name]
        known[name] = compose([known[member] for member in members], axis=0)
    return np.stack([known[name] for name in names], axis=-1)


# ---------- Comparison of runs
# stacks: the components of all runs, {measure: (runs, claims, ...)}
def intervals(stacks, names, resamples, seed):
    """Return 95 % percentile bootstrap intervals over claims, (2, runs, measures); Efron 1979."""
    claims = stacks[CONFUSION].shape[1]
    rng = np.random.default_rng(seed)
    draws = rng.multinomial(claims, np.full(claims, 1 / claims), size=resamples)
    # (resamples, claims) times (runs, claims, ...) is (resamples, runs, ...)
    sums = {name: np.tensordot(draws, stack, (1, 1)) for name, stack in stacks.items()}
    return np.nanquantile(values_of(sums, names), (0.025, 0.975), axis=0)


def randomisation(stacks, values, names, resamples, seed):
    """Return two-sided p-values against the first run (runs, measures) by paired randomisation.

    Smucker et al. 2007. A resample swaps each claim between a run and the first one, or does not.
    """
    claims = stacks[CONFUSION].shape[1]
    swaps = np.random.default_rng(seed).integers(0, 2, size=(resamples, claims))
    own = {}
    others = {}
    for name, stack in stacks.items():
        moved = np.tensordot(swaps, stack - stack[0], (1, 1))  # from the run to the first one
        own[name] = stack.sum(1) - moved
        others[name] = stack[0].sum(0) + moved
    swapped = np.abs(values_of(own, names) - values_of(others, names))
    # 1e-12: sums in another order differ in their last bits
    is_as_large = swapped >= np.abs(values - values[0]) - 1e-12
    return (1 + is_as_large.sum(0)) / (1 + np.isfinite(swapped).sum(0))  # NaN does not count


def holm(p):
    """Return p-values corrected for several comparisons (Holm 1979); NaN does not count."""
    ordered = p.dropna().sort_values()
    stepped = (ordered * np.arange(len(ordered), 0, -1)).cummax()
    return stepped.clip(upper=1).reindex(p.index)


def compare(components, names, resamples, seed):
    """Return {field: table (runs, measures)} of {run: its components}.

    Fields: value, low, high, difference from the first run, p, p_holm. Without resamples, low,
    high and p are NaN.
    """
    import pandas as pd

    of_runs = list(components.values())
    stacks = {name: np.stack([own[name] for own in of_runs]) for name in of_runs[0]}
    values = values_of({name: stack.sum(1) for name, stack in stacks.items()}, names)
    low = values * np.nan
    high = low
    p = low
    if resamples:
        low, high = intervals(stacks, names, resamples, seed)
        p = randomisation(stacks, values, names, resamples, seed)
    cells = {"value": values, "low": low, "high": high, "difference": values - values[0], "p": p}
    cells = {field: pd.DataFrame(cell, list(components), names) for field, cell in cells.items()}
    cells["difference"].iloc[0] = np.nan
    cells["p"] = cells["p"].mask(cells["difference"].isna())
    return cells | {"p_holm": cells["p"].apply(holm)}


# ---------- Tables
def cell_texts(cells, few, bounds="", best="{}"):
    """Return a table of texts.

    few: runs without rows for many claims, which are not compared; bounds: texts behind the values;
    best: format of the best values.
    """
    values = cells["value"]
    is_marked = cells["p_holm"] < 0.05
    is_marked.loc[few] = False
    texts = values.map("{:.3f}".format) + np.where(is_marked, "*", "")
    rounded = values.round(3)
    compared = rounded.drop(few)
    highest = compared.max()
    is_best = (rounded == highest) & (highest > compared.min())  # of equal runs none is best
    is_best.loc[few] = False
    texts = texts.mask(is_best, texts.map(best.format))
    return (texts + bounds).mask(values.isna(), "-")


def notes_on(names, qrels, corpus, counts):
    """Return the sentences that explain a table of measures.

    corpus: {abstract_id: record}, empty if there is none. counts: {run: {what: number}}.
    """
    evidence = qrels[qrels["label"] != "NEI"]
    with_evidence = evidence["claim_id"].nunique()
    claims = qrels["claim_id"].nunique()
    notes = [f"Means are over the {with_evidence} of {claims} claims with evidence."]
    for pattern, note in NOTES.items():
        if any(re.search(pattern, name) for name in names):
            notes.append(note)
    missing = set(evidence["abstract_id"]).difference(corpus)
    if corpus and missing:
        notes.append(
            f"{len(missing)} evidence abstracts are not in the corpus: "
            "a run of it cannot find them."
        )
    for run, numbers in counts.items():
        notes += [f"{run}: {what}: {round(n, 3):,}" for what, n in numbers.items() if n]
    return notes


def tables_of(cells, components, claims, counts):
    """Return the contents of the files with numbers, in the order of TABLES."""
    import pandas as pd

    numbers = {"counts": counts}
    for field, cell in cells.items():
        numbers[field] = cell.astype(object).where(cell.notna(), None).to_dict("index")
    by_claim = {}
    for run, own in components.items():
        names = [name for name in own if name != CONFUSION]
        by_claim[run] = pd.DataFrame(values_of(own, names), claims, names)
    by_claim = pd.concat(by_claim, names=["run", "claim_id"])
    return [
        cells["value"].to_csv(sep="\t", index_label="run"),
        json.dumps(numbers, indent=1) + "\n",
        by_claim.to_csv(sep="\t", quoting=csv.QUOTE_NONE),
    ]


# ---------- Report
# Filled by the operator %, so %% is a percent sign. Names of runs come from file names, and texts
# from claims and abstracts; neither is trusted.
PAGE = r"""<!doctype html><html lang="en">
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root { color-scheme: light dark; --page: light-dark(#eff1f5, #121418);
  --card: light-dark(#ffffff, #1d2027); --line: light-dark(#d9dde4, #3a404c);
  --quiet: light-dark(#575f6d, #a6aebb) }
.SUPPORTS, .SUPPORTED { --ink: light-dark(#0a6336, #7edba3); --tint: light-dark(#dff3e6, #15331f) }
.REFUTES, .REFUTED { --ink: light-dark(#a01f1c, #ff9f99); --tint: light-dark(#fce6e5, #421b1c) }
.NEI, .NOT { --ink: light-dark(#744c00, #f0c766); --tint: light-dark(#fbeecb, #3a2e0e) }
.DISPUTED { --ink: light-dark(#6437a0, #ccb2f6); --tint: light-dark(#efe6fb, #30224a) }
.UNDECIDED, .unjudged { --ink: var(--quiet); --tint: light-dark(#eceef2, #2a2f38) }
.wrong { --ink: #ffffff; --tint: #b3261e; print-color-adjust: exact }
.badge { color: var(--ink); background: var(--tint); font: 600 .75rem system-ui, sans-serif;
  margin-right: .4rem; padding: .15rem .6rem; border-radius: 1rem; white-space: nowrap }
body { font: 1rem/1.5 system-ui, sans-serif; background: var(--page); overflow-wrap: anywhere;
  max-width: 84rem; margin: auto; padding: 1rem max(1rem, 2vw) }
small, thead { color: var(--quiet); font-size: .85rem }
.box { margin: .75rem 0; padding: 1rem; border-radius: .75rem; background: var(--card) }
.row { display: flex; flex-wrap: wrap; gap: .6rem 1.25rem; align-items: center }
figure { flex: 1 1 23rem; min-width: 0; margin: 0; padding: 0 .5rem; overflow-x: auto }
table { min-width: 100%%; border-collapse: collapse; white-space: nowrap }
th, td { padding: .4rem .3rem; border-bottom: 1px solid var(--line); text-align: right }
th:first-child { position: sticky; left: 0; min-width: 6.5rem; background: var(--card);
  text-align: left; white-space: normal }
td small, summary small { display: block; margin-top: .2rem }
#plot { display: grid; grid: auto / fit-content(9rem) auto 1fr; gap: 0 1rem; align-items: center }
svg { width: 100%%; height: 1.75rem; overflow: visible; stroke: currentColor; stroke-linecap: round;
  background: repeating-linear-gradient(90deg, var(--line) 0 1px, #0000 1px 25%%) }
path { stroke-width: 12px; vector-effect: non-scaling-stroke }
.axis { grid-column: 3; display: flex; justify-content: space-between }
input, select, ::placeholder { font: inherit; color: inherit; max-width: 100%%; padding: .4rem }
.columns { display: grid; grid: auto / auto-flow minmax(14.5rem, 1fr); gap: 1rem;
  margin-top: 1rem; overflow-x: auto }
.columns, figure { background:  /* a shadow on the right, as long as there is more to scroll to */
  linear-gradient(90deg, #0000, var(--card) 70%%) right / 3rem 100%% no-repeat local,
  linear-gradient(270deg, var(--quiet), #0000) right / .6rem 100%% no-repeat }
.hit { background: var(--page); border-left: 4px solid var(--ink); margin: .6rem 0; padding: .7rem }
.missed { border: 2px dashed var(--ink) }
mark { background: var(--tint); color: inherit }
@media (width < 45rem) { svg, .axis { grid-column: 1 / -1 } }
@media print { :root { font-size: 9px } #controls { display: none } .columns { display: block } }
</style>
<h1 id="heading"></h1>
<section class="box"><figure tabindex="0">%s</figure><p class="row" id="notes"></p></section>
<section class="box row"><figure style="flex: 2 1 34rem"><b id="measure"></b><div id="plot"></div>
  <small>Dot: value. Bar, if any: 95 %% bootstrap interval over claims.</small></figure>%s</section>
<h2>Claims</h2><section class="box row" id="controls">
  <input id="search" type="search" placeholder="Search" aria-label="Search claims, titles and ids">
  <select id="order" aria-label="Order"><option value="-1">Order of the qrels</option></select>
  <select id="flag" aria-label="Filter"><option value="">All claims</option></select>
  <output id="count" aria-live="polite"></output></section>
<div id="claims"></div><script id="json" type="application/json">%s</script>
<script>  // an element with an id is a global name
const data = JSON.parse(json.textContent);
const runs = data.runs.map(([name, rows]) => (
  {name, rows: Map.groupBy(rows, row => row[0]), hasLabels: rows.some(row => row[4])}));
runs.sort((a, b) => b.hasLabels - a.hasLabels);  // runs with labels come first
function element(tag, className, ...children) {  // texts become text nodes, never markup
  const node = Object.assign(document.createElement(tag), {className});
  node.append(...children.filter(Boolean));
  return node;
}
const badge = (text, className = text) => element("span", `badge ${className}`, text);
document.title = heading.textContent = data.title;
notes.append(...data.notes.map(note => element("small", "", note)));
const golds = ["SUPPORTS", "REFUTES", "NEI", "unjudged"].map(label => badge(label));
controls.append(element("small", "", "Badge of a claim: its verdict. Gold labels: ", ...golds));
// ----- Plot of the first column: for each run an SVG whose x is the value
const numbersIn = row => row.cells[1]?.textContent.match(/\d+\.\d{3}/g) ?? [];
const rows = Array.from(document.querySelector("tbody").rows).filter(row => numbersIn(row).length);
const end = Math.ceil(Math.max(1, ...rows.flatMap(numbersIn)));
for (const row of rows) {
  const [value, low = value, high = value] = numbersIn(row);
  const [name, cell] = row.cloneNode(true).cells;
  plot.append(element("b", "", name.textContent), element("span", "row", ...cell.childNodes));
  plot.insertAdjacentHTML("beforeend", `<svg viewBox="0 0 ${end} 1" preserveAspectRatio="none">
    <path d="M${low} .5H${high}" style="stroke-width: 6px; opacity: .4"/>
    <path d="M${value} .5h0"/></svg>`);
}
const ticks = [0, 0.25, 0.5, 0.75, 1].map(part => element("small", "", `${part * end}`));
plot.append(element("div", "axis", ...ticks));
measure.textContent = document.querySelector("th + th")?.textContent;
// ----- Claims; a hit is a row of a run: claim, abstract, gold label, rank, predicted label
const differ = (a, b) => a[1] === b[1] && a[4] && b[4] && a[4] !== b[4];
const FLAGS = {
  "wrong label: not the gold label": hits => hits.some(a => a[2] && a[4] && a[2] !== a[4]),
  "missed evidence: not in a run's first ten ranks": hits => hits.some(hit => hit[3] > 10),
  "runs disagree: by more than 0.2 in R@5, or in a label": (hits, recall) =>
    Math.max(...recall) - Math.min(...recall) > 0.2 || hits.some(a => hits.some(b => differ(a, b))),
};
function abstract([, id, gold, rank, label], evidence) {
  const [title, text, url, doi] = data.abstracts[id];
  const facts = element("small", "", `${id} · ${gold ? "gold " : ""}`, badge(gold || "unjudged"));
  if (label) facts.append("predicted ", badge(label));
  if (label && gold) facts.append(label === gold ? "✓ right" : badge("✗ wrong"));
  const sentence = evidence?.find(part => part.abstract_id === id)?.sentence;
  const [before, ...after] = sentence ? text.split(sentence) : [text];
  const body = element("p", "", before);
  for (const part of after) body.append(element("mark", "", sentence), part);
  const links = [url, doi.replace(/^(doi:)?(?=10\.)/i, "https://doi.org/")];
  const href = links.find(link => /^https?:\/\//i.test(link));
  if (href) body.append(" ", Object.assign(element("a", "", "Source"), {href, rel: "noopener"}));
  const missed = rank > 10 && badge(rank < 1e9 ? `missed: rank ${rank}` : "missed", "wrong");
  const name = title || `${text.slice(0, 90)} …`;
  const head = element("summary", "", missed || `${rank}. `, name, facts);
  return element("details", `hit ${gold || "unjudged"} ${missed ? "missed" : ""}`, head, body);
}
for (const claim of data.claims) {
  const columns = runs.map(run => run.rows.get(claim.id) ?? []);
  const hits = columns.flat();
  const flags = Object.keys(FLAGS).filter(flag => FLAGS[flag](hits, claim.recall));
  const titles = hits.map(([, id]) => `${id} ${data.abstracts[id][0]}`);
  claim.text = [claim.id, claim.claim, claim.verdict, ...flags, ...titles].join(" ").toLowerCase();
  const recalls = data.runs.map(([name], n) => `${name} ${claim.recall[n]?.toFixed(2)}`);
  const r5 = claim.recall[0] === null ? "no evidence in the qrels" : `R@5: ${recalls.join(", ")}`;
  const facts = element("small", "", `${claim.id} · ${r5} `);
  facts.append(...flags.map(flag => badge(flag.split(":")[0], "unjudged")));
  const head = element("summary", "", claim.verdict && badge(claim.verdict), claim.claim, facts);
  claim.node = element("details", "box", head);
  const list = (hits, n) => element("section", "",
    element("b", "", runs[n].name), ...hits.map(hit => abstract(hit, claim.evidence)));
  const open = () => claim.node.append(element("div", "columns", ...columns.map(list)));
  claim.node.addEventListener("toggle", open, {once: true});
}
flag.append(...Object.keys(FLAGS).map(name => new Option(name)));
order.append(...data.runs.map(([name], n) => new Option(`Lowest R@5 of ${name}`, n)));
controls.oninput = () => {
  // The chosen flag is searched for, too: claim.text holds the names of a claim's flags.
  const words = [flag.value.toLowerCase(), ...search.value.toLowerCase().split(/\s+/)];
  const found = data.claims.filter(claim => words.every(word => claim.text.includes(word)));
  // Claims without evidence come last. For -1 every key is 2, so the order of the qrels stays.
  const key = claim => claim.recall[order.value] ?? 2;
  claims.replaceChildren(...found.sort((a, b) => key(a) - key(b)).map(claim => claim.node));
  count.textContent = `${found.length} of ${data.claims.length} claims`;
};
controls.oninput();
</script>
"""


def side_by_side(run, qrels):
    """Return rows [claim_id, abstract_id, gold, rank, predicted]; the last are labels, or None.

    They are the first ten ranks, and the evidence below them. Evidence that the run lacks has rank
    1e9, so that it comes last.
    """
    both = run.rename(columns={"label": "predicted"}).merge(qrels, how="outer")
    both = both[(both["rank"] <= 10) | both["label"].isin(LABELS[:2])].fillna({"rank": 1e9})
    both = both.reindex(columns=[*QRELS, "rank", "predicted"]).sort_values("rank", kind="stable")
    return json.loads(both.to_json(orient="values"))  # null where there is no label


def read_verdicts(path):
    """Return {claim_id: record} of 05_classify.py aggregate; {} if the file is not there."""
    warn_of_changes(path)
    lines = path.read_bytes().splitlines() if path.exists() else []
    return {record["claim_id"]: record for record in map(json.loads, lines)}


def rankings(args, runs, qrels, components, corpus):
    """Return the claims, rankings and texts of the page; runs: {name: rows}."""
    texts = read_claims(f"{args.data}/claims.{args.split}.tsv")
    verdicts = read_verdicts(Path(args.work, args.split, "claims.jsonl"))
    rows = {name: side_by_side(run, qrels) for name, run in runs.items()}
    abstracts = {}
    for _, abstract_id, *_ in sum(rows.values(), []):
        record = corpus.get(abstract_id, {})
        fields = ("title", "abstract", "url", "doi")
        abstracts[abstract_id] = [text_of(record, [field]) for field in fields]
    fractions = np.stack([own["R@5"] for own in components.values()], axis=1)  # (claims, runs, 2)
    recalls = np.where(fractions[..., 1], fractions[..., 0], None).tolist()  # None: no evidence
    claims = []
    for claim_id, recall_of_runs in zip(qrels["claim_id"].unique(), recalls):
        claim = {"id": claim_id, "claim": texts.get(claim_id, ""), "recall": recall_of_runs}
        claims.append(verdicts.get(claim_id, {}) | claim)
    title = f"{Path(args.data).name}, {args.split}: {len(claims)} judged claims"
    return {"title": title, "claims": claims, "runs": list(rows.items()), "abstracts": abstracts}


def report(data, cells, few, components):
    """Return the page, with a confusion matrix of each run that has labels of judged pairs."""
    import pandas as pd

    bounds = cells["low"].map("<small>{:.3f}–".format) + cells["high"].map("{:.3f}</small>".format)
    bounds = bounds.where(cells["low"].notna(), "")  # no interval without resamples
    texts = cell_texts(cells, few, bounds, "<b>{}</b>")
    table = texts.rename(html.escape).to_html(escape=False, border=0)
    figures = ""
    for run, own in components.items():
        matrix = own[CONFUSION].sum(axis=0).astype(int)
        if matrix.any():
            labels = pd.DataFrame(matrix, LABELS, LABELS).rename_axis(columns=run).to_html(border=0)
            figures += f"""<figure>{labels}<small>Gold labels in rows, predicted ones in columns.
            Only judged pairs among the first ranks (--depth) count.</small></figure>"""
    return PAGE % (table, figures, json.dumps(data).replace("<", "\\u003c"))


# ---------- Evaluate
def runs_of(args):
    """Return {name: path} of the runs in the command, else of all stages that have made one."""
    stages = [f"{args.work}/{args.split}/{stage}.tsv" for stage in STAGES]
    paths = args.runs or [path for path in stages if Path(path).exists()]
    if not paths:
        fail(args.work, f"no run in {args.split}/; make one by 02_retrieve.py, or name one")
    stems = [Path(path).stem for path in paths]
    names = [path if stems.count(stem) > 1 else stem for path, stem in zip(paths, stems)]
    return dict(zip(names, paths))


def evaluate(args):
    """Score runs with measures, and compare them with the first, the baseline."""
    paths = runs_of(args)
    out = args.out.removesuffix(".tsv")
    outs = [f"{out}{ending}" for ending in TABLES]
    inputs = [args.qrels, *paths.values()]
    corpus_path = f"{args.data}/corpus.jsonl"
    if args.report:
        outs.append(args.report)
        inputs += [f"{args.data}/claims.{args.split}.tsv", corpus_path]
    task = task_of(args, *inputs)
    # Each call prints its table; this only ends one that would replace an input or a folder.
    up_to_date(argparse.Namespace(force=True), task, *outs)
    names = []
    for name in args.measures:
        names += SETS[name].split(", ") if name in SETS else [name]
    names = list(dict.fromkeys(names))  # each once
    qrels = read_table(args.qrels, QRELS, label=LABELS)[QRELS]
    components = {}
    counts = {}
    runs = {}
    for name, path in paths.items():
        runs[name], counts[name] = read_run(path, qrels)
        # .claims.tsv always has R@5, and the page sorts claims by it.
        components[name] = components_of(runs[name], qrels, [*names, "R@5"], args.depth)
        counts[name]["judged pairs"] = int(components[name][CONFUSION].sum())
    cells = compare(components, names, args.resamples, args.seed)
    claims = qrels["claim_id"].unique()
    few = [name for name, n in counts.items() if n["claims without rows"] >= len(claims) / 10]
    if list(paths)[0] in few:  # the baseline
        few = list(paths)
    has_value = cells["value"].notna().any()  # for some run
    cells = {field: cell.loc[:, has_value] for field, cell in cells.items()}
    corpus = read_corpus(corpus_path) if Path(corpus_path).exists() else {}
    notes = notes_on(list(cells["value"]), qrels, corpus, counts)
    if not has_value.all():
        notes += [
            f"No run has a value of {', '.join(has_value.index[~has_value])}.",
            "B-Pref needs claims with evidence and judged NEI pairs; P, R and F1 need labels.",
        ]
    contents = tables_of(cells, components, claims, counts)
    if args.report:
        data = rankings(args, runs, qrels, components, corpus) | {"notes": [LEGEND, *notes]}
        contents.append(report(data, cells, few, components))
    for path, text in zip(outs, contents):
        with written(path, task) as new:
            new.write_text(text, encoding="utf-8")
    print(cell_texts(cells, few).to_string(line_width=100), *notes, sep="\n")
    return {"made": outs, "runs": len(components)}


# ---------- Submission
def by_language(lists, path):
    """Return {file name: text}, a file for each language (CheckThat! 2026).

    lists: the list of abstracts of each post, by ids such as en-17; a file has the numbers alone.
    path: the run, for an error.
    """
    texts = {}
    for language, part in lists.groupby(lists.index.str[:3]):
        if language not in ("en-", "fr-", "de-"):
            fail(path, f"{language}...: ids begin with en-, fr- or de-; see data/README.md")
        part.index = part.index.str[3:]
        texts[f"predictions_{language[:2]}.tsv"] = part.to_csv(sep="\t", index_label="index")
    return texts


def submitted_files(run, args):
    """Return {file name: text} for --task; run: its first ranks, in the order of the claims."""
    if args.task.startswith("checkthat"):  # a list of ids for each post
        lists = run.groupby("claim_id", sort=False)["abstract_id"].agg(list).map(str)
        lists = lists.rename("preds")
        if args.task == "checkthat2026":
            return by_language(lists, args.run)
        return {"predictions.tsv": lists.to_csv(sep="\t", index_label="post_id")}
    if "label" not in run:
        warn(args.run, "it has no labels, so it counts for retrieval alone; see 05_classify.py")
    table = run.filter([*RUN[:3], "label"]).replace({"label": OFFICIAL})
    if args.task.endswith("narratives"):
        codes = read_table(args.narratives, ["claim_id", "codes"]).set_index("claim_id")["codes"]
        table["narrative"] = table["claim_id"].map(codes)
        without = table["claim_id"][table["narrative"].isna()]
        if len(without):
            fail(
                args.narratives, f"no codes for claim {without.iloc[0]}; see recipes/narratives.py"
            )
    return {"predictions.csv": table.to_csv(index=False)}


def submission(args):
    """Write a run as the zip that a shared task asks for."""
    top_k = 5 if args.task.startswith("checkthat") else 10
    out = f"{args.work}/{args.split}/{args.task}/predictions.zip"
    claims_path = f"{args.data}/claims.{args.split}.tsv"
    corpus_path = f"{args.data}/corpus.jsonl"
    inputs = [args.run, claims_path, corpus_path]
    if args.task.endswith("narratives"):
        inputs.append(args.narratives)
    task = task_of(args, *inputs)
    if up_to_date(args, task, out):
        return {"made": []}
    claims = read_table(claims_path, ["claim_id", "claim"])["claim_id"]
    known = {"claim_id": claims, "abstract_id": read_corpus(corpus_path), "label": LABELS}
    run = read_table(args.run, RUN, **known)
    run = claims.to_frame().merge(run[run["rank"] <= top_k])  # in the order of the claims
    short = claims[~claims.isin(run["claim_id"][run["rank"] == top_k])]
    if len(short):
        fail(args.run, f"claim {short.iloc[0]} has fewer than {top_k} abstracts; fuse several runs")
    files = submitted_files(run, args)
    with written(out, task) as new, zipfile.ZipFile(new, "w") as archive:
        for name, text in files.items():  # a ZipInfo has a fixed time: the same bytes again
            archive.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED)
    return {"made": [out], "rows": len(run)}


# ---------- Command line
# fmt: off
def add_evaluate(job):
    add = job.add_argument_group("inputs and outputs").add_argument
    add("runs", nargs="*", help="score these runs, the first is the baseline (default: all stages)")
    add("--qrels", default="{data}/qrels.{split}.tsv",
        help="score by these judgements; with others than the split's, name another --out, too")
    add("--out", default="{work}/{split}/metrics.tsv",
        help="write NAME.tsv, .json and .claims.tsv; give NAME or NAME.tsv")
    add("--report", metavar="PAGE", help="write an HTML page with the first ranks to this file")
    add = job.add_argument_group("measures").add_argument
    add("--measures", nargs="+", default=["climatecheck2025"], metavar="MEASURE",
        help=f"""sets or single measures; name the runs before this flag. Sets: {', '.join(SETS)}.
        Of rankings: R@k (share of a claim's evidence in the first k ranks), 'pooled R@k' (share of
        all evidence pairs), B-Pref (mean over a claim's R evidence abstracts: 0 for one that is
        not found, else 1 - n / R, where n, at most R, counts the NEI abstracts above it), and any
        of ir-measures, such as nDCG@10, Success@5, Judged@10. Of labels: P, R, F1 (weighted by
        support), macro F1, abstract P, abstract R, abstract F1 (evidence with the right label). Of
        both, by ClimateCheck: Subtask I (mean of R@2, R@5, R@10, B-Pref), Subtask II (F1 + R@10),
        Retrieval 2026 (mean of R@5, B-Pref), Verification 2026 (F1 + R@5)""")
    add("--depth", type=count, default=10,
        help="read this many ranks for B-Pref, P, R and F1; abstract F1 reads all")
    add("--resamples", type=count_or_0, default=2000,
        help="draw this many samples for intervals and p-values; 0 leaves both out")
    add("--seed", type=count_or_0, default=13, help="draw these samples with this seed")
    add_shared(job, split="test")

def add_submission(job):
    add = job.add_argument_group("inputs and outputs").add_argument
    add("run", nargs="?", default="{work}/{split}/verdicts.tsv", help="submit this run or verdicts")
    add("--narratives", default="{work}/{split}/narratives.tsv",
        help="read the codes of claims from this file, for climatecheck2026-narratives")
    add("--task", choices=TASKS, required=True, help="write what this task asks for")
    add_shared(job, split="test")
# fmt: on


def main():
    run_job(command_line({evaluate: add_evaluate, submission: add_submission}))


# --- helpers (same in all six scripts)
CHANGE_NO_OUTPUT = {"force", "out", "device", "function"}  # arguments, in every job
PACKAGES = ("bm25s", "sentence_transformers", "torch", "transformers")  # whose versions are kept
START = time.monotonic()
# Files of a folder that no model or index needs: README.md, hidden ones (hf download leaves some)
NOT_LOADED = r"(^|/)\.\w|^README.md$"
ABSTRACT_ID = r"(?!None$)[^\t\r\n]+"  # fits into a TSV file; None is JSON's null


def shown(text):
    """Return a text in one line, with the passwords of URLs hidden."""
    return re.sub(r"(?<=://)[^/\s]+@", "***@", " ".join(str(text).split()))


def warn(where, what):
    """Print a warning on stderr."""
    print(shown(f"warning: {where}: {what}"), file=sys.stderr)


def fail(where, what):
    """End with one line on stderr and exit status 2."""
    print(shown(f"error: {where}: {what}"), file=sys.stderr)
    sys.exit(2)


def number(kind, least, most, text):
    """Return a number within a range; argparse tells the user of any other text."""
    try:
        value = kind(text)
    except ValueError:
        value = np.nan
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{text} is no number from {least:,} to {most:,}")
    return value


count = functools.partial(number, int, 1, 1_000_000_000)
count_or_0 = functools.partial(number, int, 0, 1_000_000_000)
amount = functools.partial(number, float, 0, 1_000_000_000)
share = functools.partial(number, float, 0, 1)


def digest(path):
    """Return the sha256 of a file, or of the files of a folder that are loaded."""
    path = Path(path)
    total = hashlib.sha256()
    for part in [path, *sorted(path.rglob("*"))]:
        name = part.relative_to(path).as_posix()
        if part.is_file() and not re.search(NOT_LOADED, name):
            with part.open("rb") as file:
                hashlib.file_digest(file, lambda: total)  # goes on with total
    return total.hexdigest()


def task_of(args, *inputs, models=(), without=()):
    """Return what decides an output: arguments but without, digests of inputs and local models."""
    for path in map(Path, inputs):
        if not path.exists():
            names = sorted(other.name for other in path.parent.glob(f"*{path.suffix}"))
            fail(path, f"not found; run the stage that makes it, or name (--run) one of {names}")
    arguments = {k: v for k, v in vars(args).items() if k not in CHANGE_NO_OUTPUT.union(without)}
    local = [path for path in models if Path(path).exists()]  # others are on the hub
    return {"arguments": arguments, "inputs": {str(p): digest(p) for p in [*inputs, *local]}}


def sidecar_of(path):
    """Return how an output was made; {} without a sidecar, or with a torn one."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(Path(f"{path}.meta.json").read_bytes())
    return {}


def up_to_date(args, task, *outs, is_folder=False):
    """Return whether this very task has made all outs, and nobody has changed them since.

    End if an output would replace an input, or what the kit has not made: a file replaces a file
    alone, a folder (is_folder) a folder that has a sidecar.
    """
    inputs = {os.path.abspath(path) for path in task["inputs"]}
    for out in map(Path, outs):
        out.parent.mkdir(parents=True, exist_ok=True)
        is_ours = out.is_dir() and Path(f"{out}.meta.json").exists() if is_folder else out.is_file()
        if out.exists() and not is_ours or os.path.abspath(out) in inputs:
            fail(out, "not made by this script, which would replace it, or read by this call")
    for out in outs:
        if args.force or not Path(out).exists():
            return False
        made = task | {"sha256": digest(out)}
        if not made.items() <= sidecar_of(out).items():
            return False
    print("up to date:", *outs, "(--force makes it again)")
    return True


@contextlib.contextmanager
def written(path, task, **summary):
    """Yield a temporary path for a new output, which then replaces path as a whole."""
    path = Path(path)
    with tempfile.TemporaryDirectory(prefix=f"{path.name}.", dir=path.parent) as folder:
        new = Path(folder, path.name)
        yield new
        made = {
            "command": [shown(word) for word in sys.argv],
            "script": digest(sys.argv[0]),
            "packages": {
                name: sys.modules[name].__version__ for name in PACKAGES if name in sys.modules
            },
            "seconds": round(time.monotonic() - START),
            "sha256": digest(new),  # before another process may replace path, too
        }
        meta = Path(f"{path}.meta.json")
        meta.write_text("{}")  # fits no task: after a kill from here on, the output is made again
        if path.is_dir() and new.is_dir():  # no folder takes the place of another one
            path.rename(f"{folder}/old")
        new.replace(path)
        meta.write_text(json.dumps(made | task | summary, indent=1))


def add_shared(job, split=None):
    """Add the flags that all scripts share; split: default of --split, None for jobs without it."""
    add = job.add_argument_group("shared by all scripts").add_argument
    # fmt: off
    add("--data", default="data/demo", help="read data of this folder, {data} in other defaults")
    add("--work", help="""keep indexes, models and runs in this folder, {work} in other defaults,
        where the next scripts find them (default: work/NAME, with the last name in --data)""")
    if split:
        add("--split", default=split,
            help="take claims and judgements of this split, {split} in other defaults")
    add("--force", action="store_true", help="make outputs again, even if they are up to date")
    # fmt: on


class Parser(argparse.ArgumentParser):
    def error(self, message):  # one line, in place of argparse's usage
        fail(self.prog, f"{message}; see --help")


def command_line(jobs):
    """Return the parsed arguments; jobs: {function: what adds its flags}, the default job first."""
    names = [function.__name__ for function in jobs]
    layout = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=__doc__, formatter_class=layout)
    choices = parser.add_subparsers(title="jobs", metavar=f"JOB (default: {names[0]})")
    for function, add_flags in jobs.items():
        name = function.__name__
        job = choices.add_parser(name, help=function.__doc__, description=function.__doc__)
        job.set_defaults(function=function, job=name)
        add_flags(job)
        for flag in job._actions:  # argparse has no public list of them
            if flag.default and flag.default != argparse.SUPPRESS:
                flag.help += f" (default: {shown(flag.default)})"
    words = sys.argv[1:]
    if not words or words[0] not in (*names, "-h", "--help"):
        words = [names[0], *words]
    args = parser.parse_args(words)
    if "data" in args:
        args.work = args.work or f"work/{Path(args.data).resolve().name}"
    for name, value in vars(args).items():
        if isinstance(value, str):
            for field in ("data", "work", "split"):  # defaults may name these flags
                value = value.replace(f"{{{field}}}", str(vars(args).get(field)))
            setattr(args, name, value)
    return args


def run_job(args):
    """Run the job, and print its result as JSON; errors of the machine are one line."""
    try:
        print(json.dumps(args.function(args)))
    except (OSError, UnicodeError, ImportError, RuntimeError) as error:
        fail(args.job, error)


def read_table(path, columns, **known):
    """Read a TSV file of texts; ranks and scores are numbers, a run is sorted by claim and rank.

    known: {column: the values that it may hold, if it is there}. The first faulty row ends the job.
    """
    import pandas as pd

    try:
        table = pd.read_csv(
            path,
            sep="\t",
            dtype=dict.fromkeys({*columns, *known} - {"rank", "score"}, str),
            encoding="utf-8-sig",
            quoting=csv.QUOTE_NONE,
            na_filter=False,
            skip_blank_lines=False,  # so that rows are lines
        )
    except ValueError as error:  # an empty file, another encoding, a row that is too long
        fail(path, f"{error}; see data/convert.py")
    is_whole = isinstance(table.index, pd.RangeIndex)  # else a row has more fields than the header
    if not is_whole or not set(columns) <= set(table):
        fail(
            f"{path}:1",
            f"""found columns {", ".join(table)}; wanted {", ".join(columns)}, between tabs, in
            rows of one length; python data/convert.py {path} --out NEW.tsv (--columns WANTED=FOUND
            renames)""",
        )
    table = table[(table[list(columns)] != "").any(axis=1)]  # without blank lines
    if "claim" in columns:
        quoted = '^"((?:[^"]|"")*)"$'  # as pandas writes texts with quotation marks
        table["claim"] = table["claim"].str.replace(
            quoted, lambda text: text[1].replace('""', '"'), regex=True
        )
    ids = [column for column in columns if column.endswith("_id")]
    faults = {f"{column} is empty": table[column] == "" for column in columns}
    for column in known.keys() & set(table):
        faults[f"unknown {column}"] = ~table[column].isin(known[column])
    faults[f"an earlier row has this {' and '.join(ids)}"] = table.duplicated(ids)
    if "rank" in columns:
        for column in ("rank", "score"):
            table[column] = pd.to_numeric(table[column], errors="coerce")
        table = table.iloc[np.lexsort((table["rank"], table["claim_id"].factorize()[0]))]
        by_claim = table.groupby("claim_id")
        counted = by_claim.cumcount() + 1
        before = by_claim["score"].shift()
        faults["score is not a finite number"] = ~np.isfinite(table["score"])
        faults["the ranks of a claim are not 1, 2, 3, ..."] = table["rank"] != counted
        faults[
            "the score is above that of the rank before: higher is better, so negate distances"
        ] = table["score"] > before
        table = table.assign(rank=counted)  # integers; some tools write 1.0
    for what, is_faulty in faults.items():
        if is_faulty.any():
            row = is_faulty.idxmax()
            fail(f"{path}:{row + 2}", f"{what}: {' '.join(table.loc[row].filter(like='_id'))}")
    return table.reset_index(drop=True)


def read_claims(path):
    """Return {claim_id: claim}."""
    columns = ["claim_id", "claim"]
    return dict(read_table(path, columns)[columns].to_numpy())


def read_corpus(path):
    """Return {abstract_id: record}."""
    corpus = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line.decode("utf-8-sig"))
                abstract_id = re.fullmatch(ABSTRACT_ID, str(record["abstract_id"]))[0]
            except (ValueError, LookupError, TypeError):
                fail(
                    f"{path}:{number}",
                    "no JSON object in UTF-8 with an abstract_id of one line; see data/convert.py",
                )
            if abstract_id in corpus:
                fail(f"{path}:{number}", f"a second abstract {abstract_id}; remove one")
            corpus[abstract_id] = record
    if not corpus:
        fail(path, "no abstracts; see data/convert.py")
    return corpus


def read_abstracts(path, fields, separator=" "):
    """Return {abstract_id: text} of a corpus; fields: names with commas between them."""
    names = [name.strip() for name in fields.split(",")]
    records = read_corpus(path)
    unknown = set(names) - {"title"}.union(*records.values())  # a title is optional
    if unknown:
        fail(path, f"no record has the field {', '.join(sorted(unknown))}; see --fields")
    return {key: text_of(record, names, separator) for key, record in records.items()}


def text_of(record, fields=("title", "abstract"), separator=" "):
    """Join the fields of a record that hold texts, numbers or lists; null and NaN hold nothing."""
    texts = []
    for field in fields:
        value = record.get(field)
        items = value if isinstance(value, list) else [value]
        known = [str(item).strip() for item in items if item is not None and item == item]
        between = " " if field == "abstract" else ", "  # sentences; names of authors
        texts.append(between.join(filter(None, known)))
    return separator.join(filter(None, texts))


def write_table(table, path):
    """Write a table as read_table reads it: quotation marks mean nothing."""
    table.to_csv(path, sep="\t", index=False, float_format="%.9g", quoting=csv.QUOTE_NONE)


# --- end of helpers

if __name__ == "__main__":
    main()
