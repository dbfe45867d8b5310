# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "ir-measures==0.4.3", "jinja2==3.1.6", "numpy==2.4.6", "pandas==3.1.1",
# ]
# ///
"""
Score runs and verdicts as the shared tasks and trec_eval do; compare them; write submissions.

Reads   runs, verdicts, qrels; for the page also claims, corpus, claims.jsonl
Writes  metrics.tsv, .tex, .json (with intervals, p-values, counts), .claims.tsv (by claim);
        --report: a page with all rankings; submission: a table and its zip
Prints  the table, what explains it, counts; the last line is JSON

Examples
    python 06_evaluate.py --report work/demo/test/report.html
    python 06_evaluate.py a.tsv b.tsv --measures climatecheck2026 trec P@5
    python 06_evaluate.py submission --task climatecheck2025
"""

import argparse
import contextlib
import csv
import hashlib
import json
import re
import shutil
import sys
import time
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np

PAIR, CLAIM = ["claim_id", "abstract_id"], ["claim_id", "claim"]  # columns
RUN, QRELS = [*PAIR, "rank", "score"], [*PAIR, "label"]
LABELS = ("SUPPORTS", "REFUTES", "NEI")
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
    "Verification 2026": (np.sum, ["F1", "R@5"]),
}
STANCE, CONFUSION = ("P", "R", "F1", "macro F1"), "confusion"
PER_CLAIM = ["R@5", "Success@1"]  # for the page, for McNemar's test
NOTES = {  # what a table may show: what explains it
    r"^\*\*": "Bold: the best run. Italics: the second best.",
    "†": "† differs from the first run, p < 0.05 (paired randomisation, Holm).",
    "^(?!pooled|Judged|B-Pref).+@|^MAP|^RR": "Means are over claims with evidence.",
    "^pooled": "Pooled R@k is a mean over pairs.",
    "^Judged": "Judged@k is a mean over all claims.",
    r"\(trec_eval": "B-Pref (trec_eval): n / min(R, N) in place of n / R.",
    "^B-Pref($|@)": "B-Pref has n / R; claims need rows, evidence, NEI.",
    "^(P|R|F1)$": "P, R and F1 of labels are weighted by support.",
    "^macro": "Macro F1 is not weighted.",
    "^abstract": "Abstract P, R, F1: evidence with the right label.",
}
UNJUDGED, NOTHING = -1, -2  # of labels
TASKS = {
    "climatecheck2025": 10,
    "climatecheck2026": 10,
    "climatecheck2026-narratives": 10,
    "checkthat4b": 5,
}  # abstracts per claim
OFFICIAL = {"SUPPORTS": "Supports", "REFUTES": "Refutes", "NEI": "Not Enough Information"}
warnings.simplefilter("ignore", RuntimeWarning)  # 0 / 0 is NaN: there is no value


# ---------- Runs beside judgements
def judged_rows(path, qrels):
    """Return a run's rows for claims of the qrels, and counts of what is missing."""
    run = read_table(path, RUN)
    if "label" in run:
        read_table(path, RUN, label=LABELS)  # which refuses other labels
    for column in PAIR:
        if not run[column].isin(qrels[column]).any():
            fail(path, f"no {column} is in the qrels; name others")
    claims, given = set(qrels["claim_id"]), set(run["claim_id"])
    counts = {"claims without rows": len(claims - given), "unknown claims": len(given - claims)}
    return run[run["claim_id"].isin(claims)], counts


def judgements(run, qrels):
    """Return claims, R relevant and N other abstracts of each, labels by rank."""
    relevant = (qrels["label"] != "NEI").groupby(qrels["claim_id"], sort=False)
    R, places = relevant.sum(), dict(zip(LABELS, range(3)))
    rows, ranks = R.index.get_indexer(run["claim_id"]), run["rank"].to_numpy(int) - 1
    labels = np.full((len(R), ranks.max() + 1), NOTHING, np.int8)
    said = labels.copy()
    labels[rows, ranks] = run[PAIR].merge(qrels, how="left")["label"].map(places).fillna(UNJUDGED)
    if "label" in run:
        said[rows, ranks] = run["label"].map(places)
    N = (relevant.size() - R).to_numpy()
    return SimpleNamespace(claims=R.index, R=R.to_numpy(float), N=N, labels=labels, said=said)


# ---------- Measures of a claim
# (numerator, denominator), both [claims], of gold labels [claims, k ranks]. A run's value is the
# sum of numerators / that of denominators; a claim with denominator 0 does not count.
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


def bpref(labels, gold):
    """B-Pref of the ClimateCheck organisers; trec_eval has n / min(R, N) inside.

    Each relevant abstract adds 1 - n / R, with n judged non-relevant ones above it, at most R.
    """
    n = np.minimum((labels == LABELS.index("NEI")).cumsum(1), gold.R[:, None])
    counted = (gold.R > 0) & (gold.N > 0) & (labels[:, 0] != NOTHING)
    return mean_of((evidence(labels) * (1 - n / gold.R[:, None])).sum(1) / gold.R, counted)


RANKED = {"R": recall, "pooled R": pooled_recall, "B-Pref": bpref}


def abstract_level(gold):
    """SciFact's abstract-level measures, labels only (Wadden et al. 2020)."""
    called = evidence(gold.said).sum(1)
    right = (evidence(gold.labels) & (gold.labels == gold.said)).sum(1)
    R = gold.R * (gold.said >= 0).any()  # no labels, no value
    return {
        "abstract P": (right, called),
        "abstract R": (right, R),
        "abstract F1": (2 * right, called + R),
    }


def trec_fraction(name, run, qrels, gold):
    """A measure of ir-measures, by ranks. Judged@k is of all claims."""
    from ir_measures import iter_calc, parse_measure

    ids = {"claim_id": "query_id", "abstract_id": "doc_id"}
    judged = qrels.rename(columns=ids).assign(relevance=(qrels["label"] != "NEI").astype(int))
    try:
        measure = parse_measure("Bpref" if name == "B-Pref (trec_eval)" else name)
        ranked = run.rename(columns=ids).assign(score=-run["rank"].astype(float))
        found = {claim: value for claim, _, value in iter_calc([measure], judged, ranked)}
    except Exception:
        fail("--measures", f"cannot compute {name!r}; see --help")
    counted = (gold.R > 0) | name.startswith("Judged")
    return mean_of([found.get(claim, 0.0) for claim in gold.claims], counted)


def confusion(labels, said):
    """Confusion matrices [claims, gold, given]."""
    matrices = np.zeros((len(labels), 3, 3))
    rows, ranks = np.nonzero((labels >= 0) & (said >= 0))
    np.add.at(matrices, (rows, labels[rows, ranks], said[rows, ranks]), 1)
    return matrices


def stance_scores(matrices):
    """Weighted P, R, F1, and macro F1 of labels that occur; matrices [..., gold, given]."""
    right = np.diagonal(matrices, axis1=-2, axis2=-1)
    support, given = matrices.sum(-1), matrices.sum(-2)
    f1 = 2 * right / (support + given)
    scores = right / np.maximum(given, 1), right / np.maximum(support, 1), np.nan_to_num(f1)
    weighted = [(score * support).sum(-1) / support.sum(-1) for score in scores]
    return [*weighted, np.nanmean(f1, axis=-1)]


# ---------- Measures of a run
# parts: {measure: its fractions [claims, 2], CONFUSION: matrices [claims, 3, 3]}
def parts_of_measures(run, qrels, names, depth):
    """Return the parts of measures; stance and B-Pref see the first depth ranks."""
    gold = judgements(run, qrels)
    parts = {CONFUSION: confusion(gold.labels[:, :depth], gold.said[:, :depth])}
    needed = [part for name in names for part in COMPOSED.get(name, (None, [name]))[1]]
    for name in [one for one in needed if one not in STANCE]:
        at_k = re.fullmatch(rf"({'|'.join(RANKED)})(?:@([1-9]\d*))?", name)
        if at_k:
            fraction = RANKED[at_k[1]](gold.labels[:, : int(at_k[2] or depth)], gold)
        elif name.startswith("abstract "):
            fraction = abstract_level(gold)[name]
        else:
            fraction = trec_fraction(name, run, qrels, gold)
        parts[name] = np.stack(fraction, axis=-1)
    return parts


def values_of(sums, names):
    """Return values [..., names] from parts, summed over claims or not."""
    known = {name: part[..., 0] / part[..., 1] for name, part in sums.items() if name != CONFUSION}
    known |= zip(STANCE, stance_scores(sums[CONFUSION]))
    for name in set(COMPOSED) & set(names):
        compose, members = COMPOSED[name]
        known[name] = compose([known[member] for member in members], axis=0)
    return np.stack([known[name] for name in names], axis=-1)


# ---------- Comparison of runs (stacks: {measure: [runs, claims, ...]})
def intervals(stacks, names, resamples, seed):
    """95 % percentile bootstrap intervals over claims (Efron 1979), [2, runs, measures]."""
    claims, rng = stacks[CONFUSION].shape[1], np.random.default_rng(seed)
    draws = rng.multinomial(claims, np.full(claims, 1 / claims), size=resamples)
    sums = {name: np.tensordot(draws, stack, (1, 1)) for name, stack in stacks.items()}
    return np.nanquantile(values_of(sums, names), (0.025, 0.975), axis=0)


def randomisation(stacks, names, resamples, seed):
    """p of paired randomisation against the first run (Smucker et al. 2007), two-sided."""
    claims = stacks[CONFUSION].shape[1]
    swaps = np.random.default_rng(seed).integers(0, 2, size=(resamples, claims))
    sums = {name: stack.sum(1) for name, stack in stacks.items()}
    moved = {name: np.tensordot(swaps, stack - stack[0], (1, 1)) for name, stack in stacks.items()}
    these = values_of({name: sums[name] - moved[name] for name in sums}, names)
    those = values_of({name: sums[name][0] + moved[name] for name in sums}, names)
    swapped, values = np.abs(these - those), values_of(sums, names)  # NaN does not count
    as_large = swapped >= np.abs(values - values[0]) - 1e-12
    return (1 + as_large.sum(0)) / (1 + np.isfinite(swapped).sum(0))


def holm(p):
    """p-values corrected for several comparisons (Holm 1979); NaN does not count."""
    ordered = p.dropna().sort_values()
    stepped = (ordered * np.arange(len(ordered), 0, -1)).cummax()
    return stepped.clip(upper=1).reindex(p.index)


def compare(parts, names, resamples, seed):
    """Return {field: table [runs, measures]} from {run: its parts}."""
    import pandas as pd

    first, *_ = parts.values()
    stacks = {name: np.stack([one[name] for one in parts.values()]) for name in first}
    values = values_of({name: stack.sum(1) for name, stack in stacks.items()}, names)
    low, high = intervals(stacks, names, resamples, seed)
    p = randomisation(stacks, names, resamples, seed)
    cells = {"value": values, "low": low, "high": high, "difference": values - values[0], "p": p}
    cells = {field: pd.DataFrame(cell, list(parts), names) for field, cell in cells.items()}
    cells["difference"].iloc[0] = np.nan
    cells["p"] = cells["p"].mask(cells["difference"].isna())
    return cells | {"p_holm": cells["p"].apply(holm)}


# ---------- Tables
def texts_of(cells, bounds="", best="**{}**", second="*{}*", sign="†"):
    """Return cells as texts; patterns mark the best and second."""
    values = cells["value"]
    texts = values.map("{:.3f}".format) + np.where(cells["p_holm"] < 0.05, sign, "")
    places = values.round(3).rank(method="dense", ascending=False)
    first = (places == 1) & (places.max() > 1)  # where all are equal, none is best
    texts = texts.mask(first, texts.map(best.format)).mask(places == 2, texts.map(second.format))
    return (texts + bounds).mask(values.isna(), "-").reset_index(names="run")


def markdown(texts):
    """Return a table of texts in Markdown, and what explains it."""
    names = texts["run"].str.replace(r"([\\`*_\[\]<>|&~$])", r"\\\1", regex=True)
    lines = [""] * (len(texts) + 2)
    for name, column in texts.assign(run=names).items():
        width = max(map(len, [name, *column]))
        for place, text in enumerate([name, "-" * width, *column]):
            lines[place] += f"| {text:{width}} "
    shown = "\n".join([*texts, *texts.drop(columns="run").to_numpy().ravel()])
    notes = [NOTES[what] for what in NOTES if re.search(what, shown, re.MULTILINE)]
    return "|\n".join([*lines, ""]) + "\n".join(["", *notes])


def tables_of(cells, parts, claims, counts):
    """Return {ending: content} of the files with numbers."""
    import pandas as pd

    tex = texts_of(cells, "", r"\textbf{{{}}}", r"\textit{{{}}}", r"$^\dagger$").style
    tex = tex.hide(axis="index").format(escape="latex", subset=["run"])
    numbers, by_claim = {"counts": counts}, {}
    for field, cell in cells.items():
        numbers[field] = cell.astype(object).where(cell.notna(), None).to_dict("index")
    for run, one in parts.items():
        names = [name for name in one if name != CONFUSION]
        by_claim[run] = pd.DataFrame(values_of(one, names), claims, names)
    return {
        ".tsv": cells["value"].to_csv(sep="\t", index_label="run"),
        ".json": json.dumps(numbers, indent=1) + "\n",
        ".tex": tex.format_index(escape="latex", axis=1).to_latex(hrules=True),
        ".claims.tsv": pd.concat(by_claim, names=["run", "claim_id"]).to_csv(sep="\t"),
    }


# ---------- Report
PAGE = """<!doctype html>
<meta charset="utf-8">
<style>
body { font: 15px/1.5 sans-serif; max-width: 80rem; margin: auto }
pre { overflow: auto } small { color: #667; display: block }
.runs { display: flex; gap: .7rem; overflow: auto } .runs > div { flex: 1 0 15rem }
.hit { margin: .3rem 0; background: #eee } .missed { border: 1px dashed }
.SUPPORTS { background: #cfd } .REFUTES { background: #fcc } .NEI { background: #ffc }
</style>
<h1 id="title"></h1><pre id="table"></pre>
<p>R@5 stands below a claim. Dashed: evidence that ten ranks miss. Gold:
<b class="SUPPORTS">SUPPORTS</b> <b class="REFUTES">REFUTES</b> <b class="NEI">NEI</b></p>
<input id="search" placeholder="Search"><select id="order"></select>
<div id="claims"></div>
<script id="json" type="application/json">%s</script>
<script>  // an element with an id is a global name
const data = JSON.parse(json.textContent), runs = data.runs, abstracts = new Map(data.abstracts);
document.title = title.textContent = data.title;
table.textContent = data.table;
const safe = text => text.replace(/[&<>"]/g, sign => `&#${sign.charCodeAt()};`);  // no markup
function hit([, id, gold, rank, said], claim) {
  const [title, text] = abstracts.get(id), missed = rank > 10 ? "missed" : "";
  const sentence = claim.evidence.find(part => part.abstract_id === id)?.sentence ?? "";
  return `<details class="hit ${gold} ${missed}"><summary>${missed} ${rank < 1e9 ? rank : ""}
    ${safe(title || text.slice(0, 90))}<small>${safe(id)} ${gold && "· gold " + gold}
    ${said && "· said " + said}</small></summary>
    ${safe(text).replace(safe(sentence), "<mark>$&</mark>")}</details>`;
}
for (const claim of data.claims) {
  const recalls = runs.map(([run], n) => `${run} ${claim.recall[n]?.toFixed(2) ?? "–"}`);
  const column = ([run, rows]) => `<div><b>${safe(run)}</b>` +
    rows.filter(row => row[0] === claim.id).map(row => hit(row, claim)).join("") + "</div>";
  claim.text = `${claim.id} · ${claim.claim} ${claim.verdict}`;
  claim.node = document.createElement("details");
  claim.node.innerHTML = `<summary>${safe(claim.text)}
    <small>${safe(recalls.join(" · "))}</small></summary>`;
  claim.node.addEventListener("toggle", () => claim.node.insertAdjacentHTML("beforeend",
    `<div class="runs">${runs.map(column).join("")}</div>`), {once: true});
}
order.append(new Option("as in the qrels", -1),
  ...runs.map(([run], n) => new Option("missed most by " + run, n)));
search.oninput = order.onchange = () => {
  const n = order.value, word = search.value.toLowerCase();
  const key = ({recall}) => recall[n] ?? 2;  // claims without evidence come last
  const found = data.claims.filter(one => one.text.toLowerCase().includes(word));
  found.sort((a, b) => n < 0 ? 0 : key(a) - key(b));
  claims.replaceChildren(...found.map(claim => claim.node));
};
search.oninput();
</script>
"""


def side_by_side(run, qrels):
    """Return [claim, abstract, gold, rank, said] of ten ranks, and evidence they miss."""
    both = run.rename(columns={"label": "said"}).merge(qrels, how="outer").fillna({"rank": 1e9})
    both = both[(both["rank"] <= 10) | both["label"].isin(LABELS[:2])]
    both = both.reindex(columns=[*QRELS, "rank", "said"]).sort_values("rank", kind="stable")
    return both.astype(object).fillna("").to_numpy().tolist()


def report(args, runs, qrels, parts, cells):
    """Return the page; runs: {run: its table}; parts: {run: its parts}."""
    texts, corpus = dict(read_table(args.claims, CLAIM)[CLAIM].to_numpy()), read_corpus(args.corpus)
    rows = {name: side_by_side(run, qrels) for name, run in runs.items()}
    recalls = np.stack([one["R@5"] for one in parts.values()], axis=1)  # [claims, runs, 2]
    abstracts, claims, verdicts = {}, [], {}
    if (aggregated := Path(args.work, args.split, "claims.jsonl")).exists():
        lines = aggregated.read_bytes().splitlines()
        verdicts = {one["claim_id"]: one for one in map(json.loads, lines)}
    for _, name, *_ in sum(rows.values(), []):
        known = corpus.get(name, {})
        abstracts[name] = [str(known.get(field) or "") for field in ("title", "abstract")]
    for claim, values in zip(qrels["claim_id"].unique(), recalls.tolist()):
        known = verdicts.get(claim, {"verdict": "", "evidence": []})
        recall = [value if counted else None for value, counted in values]
        claims.append(known | {"id": claim, "claim": texts.get(claim, ""), "recall": recall})
    bounds = cells["low"].map(" {:.3f}–".format) + cells["high"].map("{:.3f}".format)
    data = {
        "title": f"{Path(args.data).name}, {args.split}: {len(claims)} judged claims",
        "table": markdown(texts_of(cells, bounds)),
        "claims": claims,
        "runs": list(rows.items()),
        "abstracts": list(abstracts.items()),
    }
    return PAGE % json.dumps(data).replace("<", "\\u003c")


# ---------- Jobs
def evaluate(args):
    """Score runs with measures, and compare them with the first."""
    folder, names, parts, counts, runs = f"{args.work}/{args.split}", [], {}, {}, {}
    stages = [f"{folder}/{stage}.tsv" for stage in STAGES]
    paths = args.runs or [path for path in stages if Path(path).exists()]
    stems = [Path(path).stem for path in paths]
    if not paths:
        fail(folder, "no run; see 02_retrieve.py")
    for word in args.measures:
        names += MEASURES[word].split(", ") if word in MEASURES else [word]
    names = list(dict.fromkeys(names))
    gold = Path(args.qrels).stem.removeprefix("qrels.")
    out = Path(args.out or f"{folder}/metrics{f'-{gold}' * (gold != args.split)}.tsv")
    task = task_of(args, args.qrels, *paths, *[args.claims, args.corpus] * bool(args.report))
    qrels = read_table(args.qrels, QRELS, label=LABELS)[QRELS]
    for path, stem in zip(paths, stems):
        name = stem if stems.count(stem) == 1 else path
        run, counts[name] = judged_rows(path, qrels)
        parts[name] = parts_of_measures(run, qrels, [*names, *PER_CLAIM], args.depth)
        runs |= {name: run} if args.report else {}
    cells = compare(parts, names, args.resamples, args.seed)
    known = cells["value"].notna().any()  # by some run
    cells = {field: cell.loc[:, known] for field, cell in cells.items()}
    outs = tables_of(cells, parts, qrels["claim_id"].unique(), counts)
    outs = {str(out.with_suffix(ending)): text for ending, text in outs.items()}
    if args.report:
        outs[args.report] = report(args, runs, qrels, parts, cells)
    for path, text in outs.items():
        with written(path, task) as new:
            new.write_text(text, encoding="utf-8")
    print(markdown(texts_of(cells)))
    for name, one in counts.items():
        print(f"{name}:", *[f"{count} {what}" for what, count in one.items()], sep="  ")
    return {"made": list(outs), "runs": len(parts)}


def submission(args):
    """Write a run as the table that a shared task asks for, and its zip."""
    top_k, listed = args.top_k or TASKS[args.task], args.task == "checkthat4b"
    ending, sep = (".tsv", "\t") if listed else (".csv", ",")
    out = Path(args.out or f"{args.work}/{args.split}/{args.task}/predictions.zip")
    outs = [str(out.with_suffix(ending)), str(out.with_suffix(".zip"))]
    codes = [args.narratives] * args.task.endswith("narratives")
    task = task_of(args, args.run, args.claims, args.corpus, *codes)
    if up_to_date(args, task, *outs):
        return {"made": []}
    claims = read_table(args.claims, CLAIM)["claim_id"]
    run = read_table(args.run, RUN, claim_id=claims, abstract_id=read_corpus(args.corpus))
    run = claims.to_frame().merge(run[run["rank"] <= top_k])
    for claim in claims[~claims.isin(run["claim_id"][run["rank"] == top_k])]:
        fail(args.run, f"claim {claim} has fewer than {top_k} abstracts")
    if listed:
        run = run.groupby("claim_id", sort=False)["abstract_id"].agg(lambda ids: str(list(ids)))
        run = run.rename_axis("post_id").rename("preds").reset_index()
    else:
        run = run.filter([*RUN[:3], "label"]).replace({"label": OFFICIAL})
    for path in codes:
        known = read_table(path, ["claim_id", "codes"]).set_index("claim_id")["codes"]
        for claim in claims[~claims.isin(known.index)]:
            fail(path, f"no codes for claim {claim}; see narratives.py")
        run["narrative"] = run["claim_id"].map(known)
    text = run.to_csv(sep=sep, index=False)
    with written(outs[0], task) as new:
        new.write_text(text, encoding="utf-8")
    with written(outs[1], task) as new, zipfile.ZipFile(new, "w") as archive:
        name = zipfile.ZipInfo(f"predictions{ending}")  # has no time: the same bytes again
        archive.writestr(name, text, zipfile.ZIP_DEFLATED)
    return {"made": outs, "rows": len(run)}


# ---------- Command line
def add_evaluate(add):
    add("runs", nargs="*", help="the baseline first (default: those in WORK/SPLIT)")
    add("--qrels", default="{data}/qrels.{split}.tsv", help="judged pairs")
    add("--claims", default="{data}/claims.{split}.tsv", help="claims, for the page")
    add("--corpus", default="{data}/corpus.jsonl", help="abstracts, for the page")
    add("--out", help="default: metrics.tsv in WORK/SPLIT, or metrics-QRELS.tsv")
    add("--report", metavar="PAGE", help="HTML page")
    add(
        "--measures",
        nargs="+",
        default=["climatecheck2025"],
        help=", ".join([*MEASURES, *COMPOSED, *STANCE, "pooled R@k, or any of ir-measures"]),
    )
    add("--depth", type=int, default=10, help="ranks seen by labels and B-Pref")
    add("--resamples", type=int, default=2000, help="for intervals, p-values")
    add("--seed", type=int, default=13, help="of resampling")


def add_submission(add):
    add("run", nargs="?", default="{work}/{split}/verdicts.tsv", help="run or verdicts")
    add("--claims", default="{data}/claims.{split}.tsv", help="all must have rows")
    add("--corpus", default="{data}/corpus.jsonl", help="abstracts")
    add("--narratives", default="{work}/{split}/narratives.tsv", help="codes of claims")
    add("--out", help="default: predictions.zip in WORK/SPLIT/TASK")
    add("--task", choices=TASKS, default="climatecheck2025", help="shared task")
    add("--top-k", type=int, help="per claim (default: the task's)")


def main():
    run(command_line({evaluate: add_evaluate, submission: add_submission}))


# --- helpers (same in all six scripts)
START, WARNINGS = time.monotonic(), []
NEUTRAL = {"force", "out", "device", "batch_size", "function"}  # change no output
SPLITS = {"train": "train", "mine": "train", "fit": "dev"}  # of jobs; else test
PACKAGES = ("numpy", "pandas", "torch", "transformers", "sentence_transformers", "bm25s", "openai")


def warn(where, what):
    """Print a line on stderr; sidecars keep it."""
    WARNINGS.append(f"warning: {where}: {what}")
    print(WARNINGS[-1], file=sys.stderr)


def fail(where, what):
    """End with one line on stderr and exit status 2."""
    print(" ".join(f"error: {where}: {what}".split()), file=sys.stderr)
    sys.exit(2)


def read_table(path, columns, **known):
    """Read a TSV file as strings, a run with numbers; known: {column: its values}."""
    import pandas as pd

    try:
        table = pd.read_csv(
            path, sep="\t", dtype=str, na_filter=False, quoting=csv.QUOTE_NONE, encoding="utf-8-sig"
        )
    except ValueError as error:  # empty, not UTF-8, a long row
        fail(path, f"{error}; see data/convert.py")
    if not set(columns) <= set(table) or not isinstance(table.index, pd.RangeIndex):
        fail(f"{path}:1", f"wanted {', '.join(columns)} in rows of one length; see data/convert.py")
    if "claim" in columns:  # as pandas quotes
        table["claim"] = table["claim"].str.replace(
            '^"((?:[^"]|"")*)"$', lambda quoted: quoted[1].replace('""', '"'), regex=True
        )
    ids = [column for column in columns if column.endswith("_id")]
    bad = {f"{column} is empty": table[column] == "" for column in columns}
    bad |= {f"unknown {column}": ~table[column].isin(list(known[column])) for column in known}
    bad["an earlier row has this " + " and ".join(ids)] = table.duplicated(ids)
    if "rank" in columns:
        for column in ("rank", "score"):
            table[column] = pd.to_numeric(table[column], errors="coerce")
        table = table.iloc[np.lexsort((table["rank"], table["claim_id"].factorize()[0]))]
        bad["score is not a finite number"] = ~np.isfinite(table["score"])
        bad["rank is not 1, 2, 3"] = table["rank"] != table.groupby("claim_id").cumcount() + 1
    for what, rows in bad.items():
        if rows.any():
            row = rows.idxmax()
            fail(f"{path}:{row + 2}", f"{what}: {' '.join(table.loc[row, ids])}; fix this row")
    return table.reset_index(drop=True)


def read_corpus(path):
    """Read {abstract_id: record}; an abstract that is missing or null is ""."""
    corpus = {}
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
                name = str(record["abstract_id"])
            except (ValueError, LookupError, TypeError):
                fail(f"{path}:{number}", "no JSON object with an abstract_id; see data/convert.py")
            if name in corpus:
                fail(f"{path}:{number}", f"a second abstract {name}; remove one")
            corpus[name] = record | {"abstract": record.get("abstract") or ""}
    return corpus


def digest(path):
    """Return the sha256 of a file, of a folder's sidecar, or of all its files."""
    path, total = Path(path), hashlib.sha256()
    if path.is_dir() and Path(f"{path}.meta.json").exists():
        path = Path(f"{path}.meta.json")
    for one in filter(Path.is_file, [path, *sorted(path.rglob("*"))]):
        with one.open("rb") as file:
            hashlib.file_digest(file, lambda: total)
    return total.hexdigest()


def task_of(args, *inputs, models=()):
    """Return what decides an output: arguments and digests."""
    for path in inputs:
        if not Path(path).exists():
            fail(path, "not found; make it or fix its name")
    paths = [str(path) for path in (*inputs, *models) if Path(path).exists()]
    arguments = {name: value for name, value in vars(args).items() if name not in NEUTRAL}
    return {"arguments": arguments, "inputs": {path: digest(path) for path in paths}}


def up_to_date(args, task, *outs):
    """Return whether this very task has made all outs."""
    made, script = [], Path(sys.argv[0])
    for out in outs:
        meta = Path(f"{out}.meta.json")
        if Path(out).is_dir() and not meta.exists():
            fail(out, "not made by this script; give another --out")
        made.append(json.loads(meta.read_bytes()) if Path(out).exists() and meta.exists() else {})
    if args.force or not all(task.items() <= one.items() for one in made):
        return False
    for out, one in zip(outs, made):
        edited = f" (made by another version of {script.name}; --force makes it again)"
        print(f"up to date: {out}" + edited * (one["script"] != digest(script)))
    return True


@contextlib.contextmanager
def written(path, task, **facts):
    """Yield a temporary path. What is made there becomes path, whole, with a sidecar."""
    path, new, meta = Path(path), Path(f"{path}.tmp"), Path(f"{path}.meta.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(new, ignore_errors=True)
    yield new
    meta.write_text("{}")  # while the output is replaced
    shutil.rmtree(path, ignore_errors=True)
    new.replace(path)
    loaded = {name: sys.modules[name].__version__ for name in PACKAGES if name in sys.modules}
    made = {
        "command": sys.argv,
        "script": digest(sys.argv[0]),
        "packages": loaded,
        "warnings": WARNINGS,
        "seconds": round(time.monotonic() - START, 1),
    }
    new.write_text(json.dumps(task | facts | made, indent=1) + "\n")
    new.replace(meta)


def command_line(jobs):
    """Return the arguments; jobs: {function: what adds its flags}, the default first."""
    script, names = Path(sys.argv[0]).name, [function.__name__ for function in jobs]
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(script, description=__doc__, formatter_class=layout)
    choices = parser.add_subparsers(title="jobs", metavar=f"JOB (default: {names[0]})")
    for function, add_flags in jobs.items():
        name, sentence = function.__name__, function.__doc__.splitlines()[0]
        job = choices.add_parser(name, help=sentence, description=sentence)
        parser.error = job.error = lambda message: fail(script, f"{message}; see --help")
        job.set_defaults(function=function, job=name)
        job.add_argument("--data", default="data/demo", help="corpus, claims and qrels")
        job.add_argument("--work", help="what is made of it (default: work/NAME)")
        job.add_argument("--split", default=SPLITS.get(name, "test"), help="which claims")
        job.add_argument("--force", action="store_true", help="make outputs again")
        add_flags(job.add_argument)
        for flag in job._actions:
            known = flag.default not in (None, False, argparse.SUPPRESS)
            flag.help += " (default: %(default)s)" * known
    given = sys.argv[1:2] and sys.argv[1] in (*names, "-h", "--help")
    args = parser.parse_args(sys.argv[1:] if given else [names[0], *sys.argv[1:]])
    args.work = args.work or f"work/{Path(args.data).resolve().name}"
    for name, value in vars(args).items():
        for field in ("data", "work", "split") if isinstance(value, str) else ():
            value = value.replace(f"{{{field}}}", vars(args)[field])
        setattr(args, name, value)
    return args


def run(args):
    """Run the job, and print its result as JSON."""
    try:
        print(json.dumps(args.function(args)))
    except Exception as error:
        if not isinstance(error, (OSError, UnicodeError)) and "memory" not in repr(error).lower():
            raise
        fail(getattr(error, "filename", None) or args.job, error)


# --- end of helpers

if __name__ == "__main__":
    main()
