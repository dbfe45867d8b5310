# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "filelock==4.2.11", "ir-measures==0.4.3", "jinja2==3.1.6", "matplotlib==3.11.2",
#     "numpy==2.4.6", "pandas==3.1.1", "scipy==1.17.1",
# ]
# ///
"""
Score runs and verdicts as the shared tasks and trec_eval do; compare them; write submissions.

Reads   runs, verdicts, qrels: TSV, TREC, ClimateCheck's CSV, CheckThat!'s lists; also .gz
Writes  metrics.tsv, .json, .md, .tex; .cells.tsv: intervals and p-values; .claims.tsv: by claim;
        .curves.tsv: by depth; --report: a page with every claim's rankings
        convert: our TSV; pool: pairs to judge; merge: qrels with their labels; submission: a zip
Prints  the table; the last line is JSON

Examples
    python 06_evaluate.py --report work/demo/test/report.html
    python 06_evaluate.py work/demo/test/{bm25,rerank}.tsv --measures climatecheck2026 trec P@5
    python 06_evaluate.py convert run.trec.gz --to tsv --out run.tsv
    python 06_evaluate.py pool work/demo/test/{hybrid,rerank}.tsv
    python 06_evaluate.py submission work/demo/test/verdicts.tsv --task climatecheck2025
"""
# --- constants (same in all six scripts)
import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during imports: no traceback
LABELS = ("SUPPORTS", "REFUTES", "NEI")
RUN = ["claim_id", "abstract_id", "rank", "score"]
NEUTRAL = {"force", "out", "device", "batch_size", "concurrency", "function", "flags"}  # no byte
# --- end of constants

import argparse
import atexit
import contextlib
import csv
import difflib
import functools
import gzip
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
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np

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
NOTES = """† differs from the first run, p < 0.05 (paired randomisation over claims, Holm).
P, R, F1 of labels are weighted by support; they and B-Pref see the first --depth ranks.
B-Pref has n / R inside the term, trec_eval's n / min(R, N). Pooled R@k is a mean over pairs."""
UNJUDGED, NOTHING = -1, -2  # an abstract without a judgement; no abstract at this rank
DEPTHS = (1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 300, 500, 600, 800, 1000)
CLAIMS, QRELS = ["claim_id", "claim"], ["claim_id", "abstract_id", "label"]
TREC = {4: ["claim_id", "q0", "abstract_id", "relevance"],  # by number of fields
        6: ["claim_id", "q0", "abstract_id", "rank", "score", "tag"]}
RENAMED = {"abstract_original_index": "abstract_id", "annotation": "label",  # ClimateCheck
           "post_id": "claim_id", "cord_uid": "abstract_id", "tweet_text": "claim"}  # CheckThat!
RELEVANT = "RELEVANT"  # where relevance is judged, not stance: TREC, CheckThat!
SPELT = {"SUPPORTS": "supports?|supported|entailment",  # without spaces and _
         "REFUTES": "refute[sd]?|contradict(ion)?", "NEI": "nei|notenoughinfo(rmation)?|neutral"}
PUBLISHED = Path(sys.argv[0]).parent / "recipes" / "published.tsv"
TASKS = {"climatecheck2025": 10, "climatecheck2026": 10, "checkthat4b": 5}  # abstracts a claim
OFFICIAL = {"SUPPORTS": "Supports", "REFUTES": "Refutes", "NEI": "Not Enough Information"}

warnings.simplefilter("ignore", RuntimeWarning)  # 0 / 0 is NaN: there is no value

def warn(path, what):
    print(f"warning: {path}: {what}", file=sys.stderr)

# -------------------- Tables of any format
def unquoted(text, delimiter):
    """Return text as TSV without quotation marks. Rows keep their line, fields lose line breaks."""
    rows = csv.reader(io.StringIO(text), delimiter=delimiter, strict=True, skipinitialspace=True)
    lines = []
    for row in rows:
        if any("\t" in field and "\n" in field for field in row):
            raise csv.Error
        lines.append("\t".join(re.sub(r"[\t\n]", " ", field) for field in row))
        lines += [""] * (rows.line_num - len(lines))
    return "\n".join(lines)

def read_rows(path):
    """Read a table of any format as strings, under its own column names, indexed by line."""
    import pandas as pd
    opened = gzip.open if path.endswith(".gz") else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", errors="replace") as file:
            text = file.read()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        fail(path, f"damaged: {error}")
    first = text.partition("\n")[0]
    delimiter = "\t" if "\t" in first else ","
    names = [name.strip('" ') for name in first.split(delimiter)]
    header = "claim_id" in names or "post_id" in names
    if not header:
        names, delimiter = TREC.get(len(first.split())), r"\s+"
    elif '"' in text:
        try:
            text, delimiter = unquoted(text, delimiter), "\t"
        except csv.Error:
            warn(path, "read without quotation marks: one is open")
    if not names:
        fail(f"{path}:1", "no column claim_id or post_id, nor the 4 or 6 fields of TREC")
    try:
        table = pd.read_csv(io.StringIO(text), sep=delimiter, header=None, dtype=str,
                            na_filter=False, skip_blank_lines=False, quoting=csv.QUOTE_NONE,
                            skipinitialspace=True).set_axis(names, axis=1)
    except ValueError as error:  # a row that is longer than the first one
        line = re.findall("line ([0-9]+)", f"{error}, line 1")[0]
        fail(f"{path}:{line}", f"{error}; fix the row")
    table.index += 1  # lines
    return table[(table != "").any(axis=1)].iloc[int(header):]

def reject(path, table, bad, what):
    """End the script at the first row of which bad holds."""
    if np.any(bad):
        row = table.iloc[np.argmax(bad)]
        values = row.reindex([*RUN, "label"]).dropna().astype(str)
        fail(f"{path}:{row.name}", f"{what}: {' '.join(values)}; fix the row")

def translated(path):
    """Read a table of any format under our column names, with our ranks, scores and labels."""
    import pandas as pd
    table = read_rows(path)
    posts, table = "cord_uid" in table, table.rename(columns=RENAMED)
    if posts and not {"rank", "preds", "label", "relevance"} & set(table):
        table["relevance"] = 1  # CheckThat!: what a post is about
    if not table.columns.is_unique:
        fail(f"{path}:1", f"two columns mean the same: {', '.join(table)}; remove one")
    if "preds" in table:  # CheckThat!: a list of ids in the order of rank
        reject(path, table, table.duplicated("claim_id"), "there is an earlier list for this post")
        lists = table["preds"].str.findall(r"[^\s\[\]'\",]+")
        table = table.assign(abstract_id=lists).explode("abstract_id").dropna()
        table["rank"] = table.groupby(level=0).cumcount() + 1
    for column in {"rank", "score", "relevance"} & set(table):
        table[column] = pd.to_numeric(table[column], errors="coerce").astype(float)
    if "tag" in table:  # as trec_eval: by score, then by id backwards, whatever the ranks say
        order = table.sort_values(["score", "abstract_id"], ascending=False)
        table["rank"] = order.groupby("claim_id").cumcount() + 1
    if "rank" in table and "score" not in table:
        table["score"] = -table["rank"]
    if "relevance" in table:
        reject(path, table, table["relevance"].isna(), "the relevance is not a number")
        table["label"] = np.where(table["relevance"] > 0, RELEVANT, "NEI")
        judged = table["relevance"] >= 0
        if not judged.all():
            warn(path, f"{(~judged).sum()} rows of relevance below 0 are left out, as not judged")
        table = table[judged]
    elif "label" in table:
        labels = table["label"].str.replace(r"[\s_]", "", regex=True)
        for label, pattern in SPELT.items():
            labels[labels.str.fullmatch(pattern, case=False)] = label
        bad = ~labels.isin([*LABELS, ""])
        reject(path, table, bad, f"the label is none of {', '.join(LABELS)}")
        table["label"] = labels
    return table

def checked(path, table, columns):
    """Return a translated table, checked; a run comes by claim and rank."""
    if not set(columns) <= set(table):
        fail(f"{path}:1", f"columns {', '.join(table)}, wanted {', '.join(columns)}")
    for column in table.columns.intersection({*columns, "label"} - {"rank", "score"}):
        reject(path, table, table[column].str.strip() == "", f"{column} is empty")
    ids = [column for column in columns if column.endswith("_id")]
    reject(path, table, table.duplicated(ids), "there is an earlier row for this")
    if "rank" in columns:
        claim = table["claim_id"].factorize()[0]
        expected = table["rank"].groupby(claim).rank("first")
        bad = (table["rank"] != expected) | ~np.isfinite(table["score"])
        reject(path, table, bad, "the ranks are not 1, 2, 3, or the score is no finite number")
        table = table.iloc[np.lexsort((expected, claim))].astype({"rank": int})
    return table

def read_any(path, columns):
    return checked(path, translated(path), columns)

def read_run(path, gold):
    """Return a run's rows for the claims of the qrels, and counts of claims not in both."""
    run = read_any(path, RUN)
    wanted, given = set(gold.claims), set(run["claim_id"])
    if not wanted & given:
        fail(path, f"none of its claims is in the qrels, such as {' '.join(gold.claims[:1])}")
    counts = {"claims_missing": len(wanted - given), "claims_unknown": len(given - wanted)}
    if wanted != given:
        warn(path, "{} claims without rows (0 in recall, left out of B-Pref), {} others are left "
             "out".format(*counts.values()))
    return run[run["claim_id"].isin(wanted)], counts

# -------------------- Judgements by rank
def gold_of(qrels):
    """Return claims, R relevant and N other abstracts of each, and whether labels are stances."""
    relevant = (qrels["label"] != "NEI").groupby(qrels["claim_id"], sort=False)
    R = relevant.sum()
    return SimpleNamespace(claims=R.index, R=R.to_numpy(float), N=(relevant.size() - R).to_numpy(),
                           stance=RELEVANT not in set(qrels["label"]))

def judge(run, qrels, gold):
    """Return gold and given labels by rank, as places in LABELS, both [claims, depth]."""
    places = {RELEVANT: 0} | {label: place for place, label in enumerate(LABELS)}
    rows, ranks = gold.claims.get_indexer(run["claim_id"]), run["rank"].to_numpy() - 1
    found = np.full((len(gold.claims), ranks.max() + 1), NOTHING, np.int8)
    said, labels = found.copy(), run[QRELS[:2]].merge(qrels, how="left")["label"]
    found[rows, ranks] = labels.map(places).fillna(UNJUDGED)
    if "label" in run and gold.stance and RELEVANT not in set(run["label"]):
        said[rows, ranks] = run["label"].map(places)
    return found, said

# -------------------- Measures of a claim
# Each is a fraction by claim: (numerator, denominator), both [claims], of gold labels by rank, cut
# at rank k. A run's value is the sum of its numerators / the sum of its denominators; a claim with
# denominator 0 does not count.
def evidence(labels):
    return (labels == 0) | (labels == 1)  # SUPPORTS or REFUTES

def mean_of(values, counted):
    return np.where(counted, values, 0.0), counted

def recall(found, gold):
    """Share of a claim's evidence that is found."""
    return mean_of(evidence(found).sum(1) / gold.R, gold.R > 0)

def pooled_recall(found, gold):
    """Share of all evidence pairs that is found (+VeriRel, eq. 7)."""
    return evidence(found).sum(1), gold.R

def reciprocal_rank(found, gold):
    """1 / rank of the first evidence, 0 without any."""
    hits = evidence(found)
    return mean_of(hits.any(1) / (hits.argmax(1) + 1), gold.R > 0)

def success(found, gold):
    return mean_of(evidence(found).any(1), gold.R > 0)

def bpref(found, gold):
    """B-Pref of the ClimateCheck organisers; trec_eval has n / min(R, N) inside.

    Each relevant abstract adds (1 - n / R) / R, with n judged non-relevant ones above it, at most
    R. Submitted claims with both kinds of judgement count.
    """
    n = np.minimum((found == LABELS.index("NEI")).cumsum(1), gold.R[:, None])
    counted = (gold.R > 0) & (gold.N > 0) & (found[:, 0] != NOTHING)
    return mean_of((evidence(found) * (1 - n / gold.R[:, None])).sum(1) / gold.R, counted)

def judged(found, gold):
    """Share of submitted abstracts that are judged."""
    submitted = np.maximum((found != NOTHING).sum(1), 1)
    return (found >= 0).sum(1) / submitted, np.ones(len(found))

RANKED = {"R": recall, "pooled R": pooled_recall, "MRR": reciprocal_rank, "Success": success,
          "B-Pref": bpref, "Judged": judged}

def abstract_level(found, said, gold):
    """SciFact's abstract-level measures, labels only (Wadden et al. 2020)."""
    called = evidence(said).sum(1)
    right = (evidence(found) & (found == said)).sum(1)
    R = gold.R * (said >= 0).any()  # no labels, no value
    return {"abstract P": (right, called), "abstract R": (right, R),
            "abstract F1": (2 * right, called + R)}

def confusion(found, said):
    """Confusion matrix of each claim, [claims, 3 gold x 3 given labels]."""
    table = np.zeros((len(found), 9))
    rows, ranks = np.nonzero((found >= 0) & (said >= 0))
    np.add.at(table, (rows, found[rows, ranks] * 3 + said[rows, ranks]), 1)
    return table

def weighted_prf(table):
    """Precision, recall, F1 of matrices [..., gold, given], as scikit-learn's "weighted"."""
    right = np.diagonal(table, axis1=-2, axis2=-1)
    support, given = table.sum(-1), table.sum(-2)
    scores = (right / np.maximum(given, 1), right / np.maximum(support, 1),
              2 * right / np.maximum(support + given, 1))
    return [(score * support).sum(-1) / support.sum(-1) for score in scores]

def trec_fraction(name, run, qrels, gold):
    """The fraction of a measure of ir-measures over all claims; ranks stand in for scores."""
    import ir_measures
    values = np.zeros(len(gold.R))
    tables = [qrels.assign(relevance=(qrels["label"] != "NEI").astype(int)),
              run.assign(score=-run["rank"].astype(float))]
    for table in tables:
        table["query_id"] = gold.claims.get_indexer(table["claim_id"]).astype(str)  # for ERR
        table["doc_id"] = table["abstract_id"]
    try:
        measure = ir_measures.parse_measure("Bpref" if name == "B-Pref (trec_eval)" else name)
        if str(measure).endswith("@0"):
            raise ValueError  # trec_eval would abort the process
        for one in ir_measures.iter_calc([measure], *tables):
            values[int(one.query_id)] = one.value
    except Exception:  # of many kinds: no such measure, parameter or package
        fail("--measures", f"cannot compute {name!r}; see --help")
    return values, np.ones(len(values))

# -------------------- Measures of a run
def parts_of(run, qrels, gold, names, depth):
    """Return what measures are made of, [claims, 9 + 2 * fractions]; those by claim; gold by rank.

    First come the confusion matrices. They and B-Pref see the first depth ranks.
    """
    import pandas as pd
    found, said = judge(run, qrels, gold)
    known = abstract_level(found, said, gold) | {"B-Pref": bpref(found[:, :depth], gold)}
    needed = ["Success@1"]  # for McNemar's test
    for name in names:
        needed += COMPOSED[name][1] if name in COMPOSED else [name]
    for name in needed:
        at_k = re.fullmatch(rf"({'|'.join(RANKED)})@([1-9]\d*)", name)
        if at_k:
            known[name] = RANKED[at_k[1]](found[:, :int(at_k[2])], gold)
    fractions = {name: known[name] for name in needed if name in known}
    for name in needed:
        if name not in {*fractions, "P", "R", "F1"}:
            fractions[name] = trec_fraction(name, run, qrels, gold)
    matrices = confusion(found[:, :depth], said[:, :depth])
    parts = np.column_stack([matrices, *sum(fractions.values(), ())])
    return parts, pd.DataFrame(quotients(parts), gold.claims, list(fractions)), found

def quotients(parts):
    return parts[..., 9::2] / parts[..., 10::2]

def measures_of(sums, fractions, names):
    """Values of measures [..., names] from sums of parts over claims [..., columns]."""
    scores = weighted_prf(sums[..., :9].reshape(*sums.shape[:-1], 3, 3))
    columns = np.moveaxis(quotients(sums), -1, 0)
    known = dict(zip(["P", "R", "F1", *fractions], [*scores, *columns]))
    for name in set(COMPOSED) & set(names):
        how, members = COMPOSED[name]
        known[name] = how([known[member] for member in members], axis=0)
    return np.stack([known[name] for name in names], axis=-1)

# -------------------- Comparison of runs
# tables: the parts of all runs, [runs, claims, columns]; measure: their sums over claims to values
def resampled(tables, weights):
    """Sums over claims with weights [resamples, claims], 100 at a time to save memory."""
    batches = np.split(weights, range(100, len(weights), 100))
    return np.concatenate([np.tensordot(batch, tables, (1, 1)) for batch in batches])

def intervals(tables, measure, resamples, seed):
    """95 % percentile bootstrap intervals over claims (Efron 1979), [2, runs, measures]."""
    claims, rng = tables.shape[1], np.random.default_rng(seed)
    draws = rng.multinomial(claims, np.full(claims, 1 / claims), size=resamples)
    return np.nanquantile(measure(resampled(tables, draws)), (0.025, 0.975), axis=0)

def randomisation(tables, measure, resamples, seed):
    """Two-sided p of paired randomisation against the first run (Smucker et al. 2007).

    How often swapping two runs' results of random claims gives as large a difference.
    """
    swaps = np.random.default_rng(seed).integers(0, 2, size=(resamples, tables.shape[1]))
    moved, sums = resampled(tables - tables[0], swaps), tables.sum(1)
    swapped = measure(sums - moved) - measure(sums[0] + moved)
    seen = measure(sums) - measure(sums[0])
    return (1 + (np.abs(swapped) >= np.abs(seen) - 1e-12).sum(0)) / (resamples + 1)

def wilcoxon(apart):
    """Two-sided p of the signed-rank test of differences by claim; NaN where one does not count."""
    apart = apart.dropna()
    if not apart.any():
        return 1.0
    from scipy import stats
    return stats.wilcoxon(apart).pvalue

def mcnemar(apart):
    """Two-sided exact p that two runs have evidence on top equally often."""
    gained, lost = (apart > 0).sum(), (apart < 0).sum()
    if not gained + lost:
        return 1.0
    from scipy import stats
    return stats.binomtest(gained, gained + lost).pvalue

def holm(p):
    """p-values corrected for several comparisons (Holm 1979); NaN does not count."""
    ordered = p.dropna().sort_values()
    stepped = (ordered * np.arange(len(ordered), 0, -1)).cummax()
    return stepped.clip(upper=1).reindex(p.index)

def compare(tables, by_claim, names, resamples, seed):
    """Return {field: table [runs, measures]}: values, intervals, differences, p-values."""
    import pandas as pd
    runs, tables, (first, *_) = list(tables), np.stack(list(tables.values())), by_claim.values()
    names = list(dict.fromkeys([*names, "Success@1"]))
    measure = functools.partial(measures_of, fractions=first.columns, names=names)
    values, p = measure(tables.sum(1)), randomisation(tables, measure, resamples, seed)
    low, high = intervals(tables, measure, resamples, seed)
    apart = [one - first for one in by_claim.values()]
    cells = {"value": values, "low": low, "high": high, "difference": values - values[0],
             "p_randomisation": p, "p_holm": p,
             "p_wilcoxon": [one.apply(wilcoxon) for one in apart],
             "p_mcnemar": [one[["Success@1"]].apply(mcnemar) for one in apart]}
    cells = {field: pd.DataFrame(cell, runs, names) for field, cell in cells.items()}
    cells["difference"].iloc[0] = np.nan
    for field in list(cells)[4:]:  # p-values
        cells[field] = cells[field].mask(cells["difference"].isna())
    cells["p_holm"] = cells["p_holm"].apply(holm)
    return cells

def curve_of(found, gold):
    """Return a table of k, recall at k, success at k."""
    import pandas as pd
    claims, rows = max((gold.R > 0).sum(), 1), []
    for k in DEPTHS:
        if k <= found.shape[1]:
            shares = recall(found[:, :k], gold)[0], success(found[:, :k], gold)[0]
            rows.append((k, *(share.sum() / claims for share in shares)))
    return pd.DataFrame(rows, columns=["k", "recall", "success"])

# -------------------- Tables
def figures_of(system, cells):
    """Return cells with the figures of SYSTEM or SYSTEM:TABLE, whose further rows come last."""
    import pandas as pd
    table = pd.read_csv(PUBLISHED, sep="\t")
    keys = table["system"] + ":" + table["table"]
    table = table[keys.isin(keys[(keys == system) | (table["system"] == system)][:1])]
    if table.empty:
        fail("--published", f"no figures of {system} in {PUBLISHED}")
    figures = table.pivot(index="row", columns="measure", values="value")
    runs = cells["value"].index.union(table["row"].unique(), sort=False)
    cells = {field: cell.reindex(runs) for field, cell in cells.items()}
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

def markdown(cells):
    texts = texts_of(cells, "**{}**", "*{}*")
    texts["run"] = texts["run"].str.replace(r"([\\`*_\[\]<>|&~$])", r"\\\1", regex=True)
    rows = [list(texts), ["---"] * texts.shape[1], *texts.to_numpy()]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", NOTES, ""])

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

# -------------------- Report
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>@TITLE@</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1240px; margin: auto; padding: 1rem }
small, th, pre { color: #66717e; font-size: .8rem } .hit small, td small { display: block }
table { border-collapse: collapse; width: 100% } svg { max-width: 100%; height: auto }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid #dde2e8 }
tr > :first-child { text-align: left } summary { cursor: pointer; overflow-wrap: anywhere }
nav { position: sticky; top: 0; background: #fff; padding: .5rem 0 }
input, select { font: inherit; width: 40% } .runs { display: flex; gap: .7rem }
.card { border: 1px solid #dde2e8; padding: .6rem; margin: .5rem 0; overflow-x: auto }
.chip { padding: .1rem .4rem; margin-left: .25rem } .runs > div { flex: 1 0 15rem }
.hit { font-size: .82rem; padding: .3rem; margin: .3rem 0; background: #f1f3f5 }
.SUPPORTS, .RELEVANT { background: #d5efde } .REFUTES { background: #fbd9d2 }
.NEI { background: #fbf0c4 } mark { background: #ffe45c } .missed { outline: 1px dashed #66717e }
</style>
<h1>@TITLE@</h1>
<div class="card">@TABLE@<pre>@NOTES@</pre></div><div class="card">@PLOT@</div>
<h2>Claims</h2>
Numbers: R@5 of each run. Gold labels: <span class="chip SUPPORTS">SUPPORTS</span>
<span class="chip REFUTES">REFUTES</span> <span class="chip NEI">NEI</span>, grey: not judged.
Dashed: evidence that the first ten ranks miss.
<nav><input id="search" type="search" placeholder="Search claims, ids, verdicts">
<select id="order"><option value="-1">in the order of the file</option></select>
<small id="count"></small></nav><div id="claims"></div>
<script id="json" type="application/json">@DATA@</script>
<script>
// An element with an id is a global name.
const data = JSON.parse(json.textContent), runs = Object.entries(data.runs);
function make(kind, name, ...children) {  // texts become text nodes, never markup
  const node = document.createElement(kind);
  node.className = name; node.append(...children); return node;
}
function hit([, id, gold, rank, said], claim) {
  const [title, text] = data.abstracts[id] ?? ["", ""];
  const sentence = claim.evidence.find(one => one.abstract_id === id)?.sentence;
  const [before, ...after] = text.split(sentence || undefined);
  const marked = after.length ? [make("mark", "", sentence), after.join(sentence)] : [];
  const place = rank > 10 ? `missed, rank ${rank}` : rank || "missed";
  const labels = (gold && ` · gold ${gold}`) + (said && ` · said ${said}`);
  return make("details", `hit ${gold} ${rank && rank < 11 ? "" : "missed"}`, make("summary", "",
    `${place}: ${title || text.slice(0, 90)}`, make("small", "", id + labels)), before, ...marked);
}
for (const claim of data.claims) {
  const chips = claim.recall.map((value, place) => make("span", "chip",
    `${runs[place][0]} ${value > 1 ? "–" : value.toFixed(2)}`));
  claim.node = make("details", "card", make("summary", "", claim.text, make("br", ""),
    make("small", "", `${claim.id} ${claim.verdict}`, ...chips)));
  claim.node.ontoggle = () => claim.node.children[1] || claim.node.append(make("div", "runs",
    ...runs.map(([run, rows]) => make("div", "", make("b", "", run),
      ...rows.filter(row => row[0] === claim.id).map(row => hit(row, claim))))));
}
runs.forEach(([run], place) => order.append(new Option("missed most by " + run, place)));
order.append(new Option("lost most from first to last run", runs.length));
search.oninput = order.onchange = () => {
  const words = search.value.toLowerCase().split(" "), run = Number(order.value);
  const key = ({recall}) => run < runs.length ? recall[run] : recall.at(-1) - recall[0];
  const found = data.claims.filter(({id, text, verdict}) => words.every(
    word => `${id} ${text} ${verdict}`.toLowerCase().includes(word)));
  if (run >= 0) found.sort((a, b) => key(a) - key(b));
  claims.replaceChildren(...found.map(claim => claim.node));
  count.textContent = `${found.length} of ${data.claims.length} claims`;
};
search.oninput();
</script>
</html>
"""

def plot(curve):
    from matplotlib import figure, rc_context
    text = io.StringIO()
    table = curve.pivot(index="k", columns="run", values="recall")[curve["run"].unique()]
    with rc_context({"svg.hashsalt": "", "svg.fonttype": "none", "text.parse_math": False}):
        axes = figure.Figure((9, 3.6), layout="constrained").subplots()
        axes.plot(table, marker=".", label=table.columns)
        axes.set(xscale="log", xlabel="abstracts read (k)", ylabel="R@k",
                 xticks=table.index, xticklabels=table.index)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        axes.figure.savefig(text, format="svg", metadata={"Date": None})
    return re.search("<svg.*", text.getvalue(), re.DOTALL)[0]

def side_by_side(run, qrels):
    """Rows of ten ranks, then the evidence that they miss."""
    both = run.rename(columns={"label": "said"}).merge(qrels[QRELS], how="outer")
    both = both.reindex(columns=[*QRELS, "rank", "said"]).fillna({"rank": 0})
    both["below"] = ~both["rank"].between(1, 10)
    both = both[~both["below"] | both["label"].isin([*LABELS[:2], RELEVANT])]
    both = both.sort_values(["below", "rank"], kind="stable").drop(columns="below")
    return both.astype(object).fillna("").to_numpy().tolist()

def report(args, sides, cells, curve, by_claim):
    texts, claims, verdicts = read_corpus(args.corpus), read_table(args.claims, CLAIMS), {}
    path = Path(args.aggregated)
    try:
        for one in map(json.loads, path.read_bytes().splitlines() if path.is_file() else []):
            verdicts[one["claim_id"]] = {"verdict": one["verdict"], "evidence": one["evidence"]}
    except (ValueError, LookupError, TypeError):
        fail(f"{path}:{len(verdicts) + 1}", "not a verdict of 05_classify.py --aggregate")
    # a claim without evidence comes behind all others
    recalls = by_claim.pivot(index="claim_id", columns="run", values="R@5")[[*sides]].fillna(2)
    data = {"runs": sides, "claims": [], "abstracts": {}}
    for _, name, *_ in sum(sides.values(), []):
        if name in texts:
            data["abstracts"][name] = str(texts[name].get("title") or ""), texts[name]["abstract"]
    for claim, text in claims[CLAIMS].to_numpy():
        if claim in recalls.index:
            one = {"id": claim, "text": text, "recall": recalls.loc[claim].tolist()}
            data["claims"].append(one | verdicts.get(claim, {"verdict": "", "evidence": []}))
    title = f"{Path(args.data).name}, {args.split}: {len(recalls)} claims"
    parts = {"TITLE": html.escape(title), "TABLE": html_table(cells), "NOTES": NOTES,
             "PLOT": plot(curve), "DATA": json.dumps(data).replace("<", "\\u003c")}
    return re.sub("@([A-Z]+)@", lambda found: parts[found[1]], PAGE)

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
    paths = [out, *(os.path.splitext(out)[0] + ending for ending in endings)]
    if out in paths[1:]:
        fail("--out", f"{out} is another output's name; give another ending")
    for path in paths[1:]:
        if os.path.exists(path) and not os.path.exists(f"{path}.meta.json"):
            fail(path, "would be replaced, and was not made by this script; give another --out")
    return paths

def evaluate(args):
    """Score runs with every measure asked for, and compare them with the first."""
    import pandas as pd
    outs = outs_of(args.out, *".json .md .tex .cells.tsv .claims.tsv .curves.tsv".split())
    files = [args.qrels, *args.runs]
    if args.report:
        outs.append(args.report)
        files += [args.claims, args.corpus, *filter(os.path.isfile, [args.aggregated])]
    if args.published:
        files.append(PUBLISHED)
    task = task_of(args, *files)
    if up_to_date(args, task, *outs):
        print(Path(outs[2]).read_text(encoding="utf-8"))
        return {"made": [], "runs": json.loads(Path(outs[1]).read_bytes())}
    names = []
    for word in args.measures:
        names += MEASURES[word].split(", ") if word in MEASURES else [word]
    qrels = read_any(args.qrels, QRELS)
    gold, tables, counts, by_claim, curve, sides = gold_of(qrels), {}, {}, {}, {}, {}
    stems = [Path(path.removesuffix(".gz")).stem for path in args.runs]
    for path, stem in zip(args.runs, stems):
        name = stem if stems.count(stem) == 1 else path
        run, counts[name] = read_run(path, gold)
        tables[name], by_claim[name], found = parts_of(
            run, qrels, gold, [*names, "R@5"], args.depth)
        curve[name] = curve_of(found, gold)
        share = judged(found[:, :10], gold)[0].mean()
        if share < 0.5:
            warn(path, f"{share:.0%} of the first 10 ranks are judged, the rest counts as no "
                 "evidence; see 06_evaluate.py pool")
        sides[name] = side_by_side(run, qrels) if args.report else []
    cells = compare(tables, by_claim, names, args.resamples, args.seed)
    by_claim = pd.concat(by_claim, names=["run"]).reset_index()
    curve = pd.concat(curve, names=["run"]).reset_index("run")
    if args.published:
        cells = figures_of(args.published, cells)
    long = pd.DataFrame({field: cell.unstack() for field, cell in cells.items()})
    long = long.reset_index(names=["measure", "run"])[["run", "measure", *cells]]
    shown = cells["value"].fillna(cells.get("published", np.nan))
    known = [name for name in dict.fromkeys(names) if shown[name].notna().any()]
    cells = {field: cell[known] for field, cell in cells.items()}
    values = {run: cells["value"].loc[run].dropna().to_dict() for run in tables}
    contents = [beside(cells["value"].copy(), cells),
                json.dumps(values, indent=1, ensure_ascii=False) + "\n",
                markdown(cells), latex(cells), long, by_claim, curve]
    if args.report:
        contents.append(report(args, sides, cells, curve, by_claim))
    save(task, dict(zip(outs, contents)), counts=counts)
    print(texts_of(cells).to_string(index=False), NOTES, sep="\n")
    return {"made": outs, "runs": values}

def convert(args):
    """Write a run, verdicts, qrels or claims of any format as our TSV."""
    task = task_of(args, args.file)
    if up_to_date(args, task, args.out):
        return {"made": []}
    table = translated(args.file)
    columns = next((kind for kind in (RUN, QRELS, CLAIMS) if set(kind) <= set(table)), RUN)
    if columns == RUN:
        columns = [*RUN, *table.filter(regex="^(label$|p_)")]
    if columns == CLAIMS:
        table = table.drop_duplicates(CLAIMS)
        table["claim"] = table["claim"].str.split().str.join(" ")
    table = checked(args.file, table, columns)[columns]
    if RELEVANT in set(table.get("label", [])):
        warn(args.file, "no stance; SUPPORTS means relevant")
        table = table.replace({"label": {RELEVANT: LABELS[0]}})
    return save(task, {args.out: table}, rows=len(table))

def read_all(args, paths):
    """Return the rows of runs, claims and corpus; runs with other ids are refused."""
    import pandas as pd
    claims, texts, runs = read_table(args.claims, CLAIMS), read_corpus(args.corpus), []
    for path in paths:
        run = read_any(path, RUN)
        reject(path, run, ~run["claim_id"].isin(claims["claim_id"]), "not in the claims")
        reject(path, run, ~run["abstract_id"].isin(list(texts)), "not in the corpus")
        runs.append(run)
    return pd.concat(runs), claims, texts

def pool(args):
    """Write the unjudged pairs of runs, with their texts, to be labelled."""
    import pandas as pd
    task = task_of(args, args.qrels, *args.runs, args.claims, args.corpus)
    if up_to_date(args, task, args.out):
        return {"made": []}
    run, claims, texts = read_all(args, args.runs)
    pairs = run[run["rank"] <= args.depth].groupby(QRELS[:2])["rank"]
    found = pairs.agg(runs="count", best_rank="min")
    qrels = read_any(args.qrels, QRELS).set_index(QRELS[:2])
    table = found.drop(qrels.index, errors="ignore").reset_index()
    # in the order of the corpus: the order of ranks would tell annotators what to think
    table = pd.DataFrame({"abstract_id": list(texts)}).merge(table)
    table = claims[CLAIMS].merge(table).assign(label="")
    for column in ("title", "abstract"):  # each on one line
        table[column] = [" ".join(str(texts[name].get(column) or "").split())
                         for name in table["abstract_id"]]
    columns = "claim_id claim abstract_id title abstract label runs best_rank".split()
    return save(task, {args.out: table[columns]}, pairs=len(table),
                judged_already=len(found) - len(table))

def merge(args):
    """Write the qrels with the labels of a pool; a label against the qrels is refused."""
    import pandas as pd
    task = task_of(args, args.qrels, args.pool)
    if up_to_date(args, task, args.out):
        return {"made": []}
    qrels, table = read_any(args.qrels, QRELS)[QRELS], translated(args.pool)
    reject(args.qrels, qrels, qrels["label"] == RELEVANT, "judged without a stance")
    answers = table[table["label"] != ""] if "label" in table else table
    answers = checked(args.pool, answers, QRELS)[QRELS]
    both = pd.concat([qrels, answers]).drop_duplicates(QRELS)
    reject(args.pool, both, both.duplicated(QRELS[:2]), "the qrels have another label")
    both = both.iloc[np.argsort(both["claim_id"].factorize()[0], kind="stable")]
    return save(task, {args.out: both}, added=len(both) - len(qrels),
                without_label=len(table) - len(answers))

def submission(args):
    """Write a run as the file that a shared task asks for, and its zip."""
    lists = args.task == "checkthat4b"
    name = "predictions.tsv" if lists else "predictions.csv"
    outs = outs_of(args.out or f"{args.work}/{args.split}/{args.task}/{name}", ".zip")
    task = task_of(args, args.run, args.claims, args.corpus)
    if up_to_date(args, task, *outs):
        return {"made": []}
    depth, (run, claims, _) = args.top_k or TASKS[args.task], read_all(args, [args.run])
    run = claims[["claim_id"]].merge(run[run["rank"] <= depth])
    rows = run["claim_id"].value_counts().reindex(claims["claim_id"], fill_value=0)
    if rows.min() < depth:
        fail(args.run, f"claim {rows.idxmin()} has {rows.min()} abstracts, fewer than {depth}; "
             "make a longer run, or lower --top-k")
    if lists:
        run = run.groupby("claim_id", sort=False)["abstract_id"].agg(lambda ids: str(list(ids)))
        run = run.rename_axis("post_id").rename("preds").reset_index()
    else:
        run = run.filter([*RUN[:3], "label"]).replace({"label": OFFICIAL})
    text = run.to_csv(sep="\t" if lists else ",", index=False, lineterminator="\n")
    facts = {"claims": len(claims), "rows": len(run)}
    with written(outs[1], task, **facts) as path, zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED)  # no time: same bytes
    return save(task, {outs[0]: text}, **facts) | {"made": outs}

def main():
    job, parser, shared, words = command_line("evaluate", "convert", "pool", "merge", "submission")
    add, data, made = parser.add_argument, shared.data, f"{shared.work}/{shared.split}"
    natural = between(1, kind=int)
    out = {"evaluate": "metrics.tsv", "pool": "pool.tsv", "merge": "qrels.tsv"}.get(job)
    add("--out", default=out and f"{made}/{out}", required=job == "convert", help="file to write")
    if job == "convert":
        add("file", help="run, verdicts, qrels or claims of any format")
        add("--to", choices=["tsv"], default="tsv", help="format")
    if job in ("evaluate", "pool", "merge"):
        add("--qrels", default=f"{data}/qrels.{shared.split}.tsv", help="judged pairs")
    if job in ("evaluate", "pool", "submission"):
        add("--claims", default=f"{data}/claims.{shared.split}.tsv", help="claims")
        add("--corpus", default=f"{data}/corpus.jsonl", help="abstracts")
    if job in ("evaluate", "pool"):
        stages = [f"{made}/{stage}.tsv" for stage in STAGES]
        add("runs", nargs="*", default=list(filter(os.path.isfile, stages)), help="first: baseline")
        add("--depth", type=natural, default=10, help="ranks that are submitted, or pooled")
    if job == "evaluate":
        add("--measures", nargs="+", default=["climatecheck2025"],
            help=f"{', '.join([*MEASURES, *COMPOSED])}, {'@k, '.join(RANKED)}@k, P, R, F1, or any "
                 "measure of ir-measures, such as AP")
        add("--published", help="SYSTEM or SYSTEM:TABLE of recipes/published.tsv, to stand beside")
        add("--resamples", type=natural, default=2000, help="for intervals and p-values")
        add("--report", help="HTML page to write")
        add("--aggregated", default=f"{made}/claims.jsonl", help="verdicts of claims, for the page")
    if job == "merge":
        add("pool", help="pool with labels")
    if job == "submission":
        add("run", nargs="?", default=f"{made}/verdicts.tsv", help="run or verdicts")
        add("--task", choices=TASKS, default="climatecheck2025", help="shared task")
        add("--top-k", type=natural, help="abstracts a claim; default: as the task asks")
    args = parser.parse_args(words)
    if "runs" in args:
        args.runs = list(dict.fromkeys(args.runs))
        if not args.runs:
            fail(made, "no run; name runs, or make some with 02_retrieve.py")
    finish(globals()[job], args)

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
    "pool.tsv": "06_evaluate.py pool",
    **dict.fromkeys(("bm25.tsv", "dense.tsv", "splade.tsv"), "02_retrieve.py"),
    **dict.fromkeys(("minilm", "splade-tiny", "smollm2"), "data/download.py models")}
SPLITS = {"train": "train", "mine": "train", "fit": "dev"}  # of jobs, where it is not test
START, LOCKS, WARNINGS = time.monotonic(), [], []

def printable(text):
    """Return a text on one line, ? for control characters, which could steer a terminal."""
    line = " ".join(str(text).split())
    return "".join(c if c.isprintable() else "?" for c in line)

def warn(where, what):
    """Print a line on stderr, and keep it for the provenance of outputs."""
    WARNINGS.append(printable(f"warning: {where}: {what}"))
    print(WARNINGS[-1], file=sys.stderr)

def fail(where, what):
    """Bad input or usage: one line on stderr, exit status 2."""
    print(printable(f"error: {where}: {what}"), file=sys.stderr)
    sys.exit(2)

# ---------- Reading
def read_lines(path):
    """Yield (number, line) of a UTF-8 file as an editor shows them, blank lines left out."""
    filled_lines, damaged = 0, []
    with open(path, "rb") as file:
        for number, data in enumerate(file, 1):
            if number == 1 and data[:2] in (b"\x1f\x8b", b"\xff\xfe", b"\xfe\xff"):
                kind = "compressed (gzip)" if data[:1] == b"\x1f" else "UTF-16"
                fail(path, f"the file is {kind}; see data/convert.py, or save it as UTF-8 text")
            if number == 1:
                data = data.removeprefix(b"\xef\xbb\xbf")  # byte order mark
            line = data.decode(errors="replace").rstrip("\r\n")
            if "\ufffd" in line and line.encode() != data.rstrip(b"\r\n"):
                damaged.append(number)
            if line.strip():
                filled_lines += 1
                yield number, line
    if damaged:
        warn(f"{path}:{damaged[0]}", f"{len(damaged)} lines are not UTF-8; U+FFFD replaces what "
             "cannot be read")
    if not filled_lines:
        fail(f"{path}:1", "the file is empty; a table needs a header, a corpus one abstract a line")

def unquoted(fields):
    """Return a column of texts without the quotation marks that pandas puts around a field."""
    inner = fields.str.slice(1, -1)
    quoted = fields.str.startswith('"') & fields.str.endswith('"') & (fields.str.len() > 1)
    quoted &= ~inner.str.replace('""', "", regex=False).str.contains('"', regex=False)
    return fields.mask(quoted, inner.str.replace('""', '"', regex=False))

def read_table(path, columns, **known):
    """Read a TSV file as strings, one row a line; a run by claim and rank, with numbers.

    known: the values that a column may hold. A bad row ends the script, with its line.
    """
    import pandas as pd
    numbers, lines = zip(*read_lines(path))
    header, *rows = [line.split("\t") for line in lines]
    header = [name.strip('"') for name in header]
    if not set(columns) <= set(header) or len(set(header)) < len(header):
        fail(f"{path}:{numbers[0]}", f"columns {', '.join(header)}, wanted {', '.join(columns)}; "
             "data/convert.py reads other formats and renames columns")
    for number, row in zip(numbers[1:], rows):
        if len(row) != len(header):
            fail(f"{path}:{number}", f"{len(row)} fields, the header has {len(header)}; fix the "
                 "row, or convert the file by data/convert.py")
    table = pd.DataFrame(rows, columns=header, index=numbers[1:], dtype=str)
    for column in header:
        if table[column].str.startswith('"').any():
            table[column] = unquoted(table[column])
    if "claim" in columns:
        table["claim"] = table["claim"].str.normalize("NFC")
    ids = [column for column in columns if column.endswith("_id")]
    bad = {f"{column} is empty": table[column].str.strip() == "" for column in columns}
    for column in ids:
        bad[f"white space around {column}"] = table[column] != table[column].str.strip()
    bad |= {f"unknown {column}": ~table[column].isin(known[column]) for column in known}
    bad["there is an earlier row for this"] = table.duplicated(ids)
    if "rank" in columns:
        claim = table["claim_id"].factorize()[0]
        values = table[["rank", "score"]].apply(pd.to_numeric, errors="coerce").astype(float)
        bad["score is not a finite number"] = ~np.isfinite(values["score"])
        bad["rank is not 1, 2, 3"] = values["rank"] != values.groupby(claim)["rank"].rank("first")
    for what, rows in bad.items():
        if rows.any():
            number = rows.idxmax()
            value = table.loc[number].get(what.removeprefix("unknown "), "")
            what = f"{what} {value!r:.60}" if what.startswith("unknown") else what
            fail(f"{path}:{number}", f"{what}: {' '.join(table.loc[number, ids])}; fix the row, or "
                 "see data/convert.py")
    if "rank" in columns:
        table = table.assign(rank=values["rank"].astype(int), score=values["score"])
        table = table.iloc[np.lexsort((table["rank"], claim))]
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

def text_of(record, fields=("title", "abstract"), separator=" "):
    """Join the fields of a record that hold text; the items of a list are joined by commas."""
    texts = []
    for value in map(record.get, fields):
        items = value if isinstance(value, list) else [value]
        known = [str(item).strip() for item in items if item is not None and item == item]  # no NaN
        texts.append(", ".join(filter(None, known)))
    return separator.join(filter(None, texts))

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
        LOCKS.append(FileLock(f"{path}.lock").acquire(timeout=0))
    except Timeout:
        fail(path, "another command is making it; wait until that one ends")
    if len(LOCKS) == 1:
        atexit.register(unlock)

def unlock():
    for one in LOCKS:
        Path(one.lock.lock_file).unlink(missing_ok=True)

def check_owner(args, task, path):
    """Refuse an output that the task reads, and folders and data that others have made."""
    if path.resolve() in {Path(name).resolve() for name in task["inputs"]}:
        fail(path, "this command reads it; give another --out")
    arguments = read_object(f"{path}.meta.json").get("arguments")
    job = arguments.get("job") if isinstance(arguments, dict) else task["arguments"]["job"]
    ours = Path(f"{path}.meta.json").exists() and job == task["arguments"]["job"]
    data = Path(args.data).resolve()
    foreign = path.is_dir() and any(path.iterdir()) or data in path.resolve().parents
    if path.exists() and foreign and not ours:
        fail(path, "this command did not make it; give another --out")

def up_to_date(args, task, *outs):
    """Return whether this very task made outs, which are locked until the process ends."""
    outs = list(map(Path, outs))
    for path in outs:
        lock(path)
        check_owner(args, task, path)
    provenance = {path: read_object(f"{path}.meta.json") for path in outs}
    for path, made in provenance.items():
        if args.force or not path.exists() or not task.items() <= made.items():
            return False
    for line in made.get("warnings") or ():
        print(line, file=sys.stderr)
    for path, made in provenance.items():
        remove(f"{path}.parts")  # left by a process that was killed at its very end
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

def remove(*paths):
    """Delete files and folders, where they exist."""
    for path in map(Path, paths):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

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

    The first line of a function's docstring is the job's sentence in --help.
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
            "the data folder)")
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
    args.work = args.work or f"work/{Path(args.data).resolve().name}"
    for name, value in vars(args).items():
        many = isinstance(value, list)
        values = [filled(one, args) for one in value] if many else filled(value, args)
        setattr(args, name, values)
    args.flags = flags
    return args

def filled(value, args):
    """Return a default value with {data}, {work} and {split} filled in."""
    if isinstance(value, str) and value.startswith(("{data}", "{work}")):
        value = value.replace("{data}", args.data).replace("{work}", args.work)
        return value.replace("{split}", args.split)
    return value

def finish(args):
    """Run the job and print its result as JSON; a fault of the disk is one line, Ctrl-C silence."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        print(json.dumps(args.function(args) | spent(), ensure_ascii=False), flush=True)
    except (KeyboardInterrupt, BrokenPipeError):  # Ctrl-C; | head
        unlock()
        os._exit(130)  # without tearing libraries down, which takes seconds
    except OSError as error:
        fail(error.filename or args.job, f"{error.strerror or error}; check path, rights and space")
    except Exception as error:
        text, flags = repr(error), ("--batch-size", "--max-length", "--top-k")
        if "Symlink loop" in text or "SafetensorError" in text:  # links, a full disk
            fail(args.job, f"{error}; check path, rights and space")
        if "memory" not in text.lower() or "illegal" in text:
            raise
        names = {"batch_size" if name == "batch" else name for name in vars(args)}
        flags = [flag for flag in flags if flag[2:].replace("-", "_") in names]
        fail(args.job, f"out of memory; lower {' or '.join(flags)}, and run it again to go on")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while the process ends
# --- end of helpers

if __name__ == "__main__":
    main()
