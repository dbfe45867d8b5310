"""
Score runs and verdicts as organisers, reviewers and trec_eval do; compare runs, show them, hand them in.

Reads   runs and verdicts (02 to 05, TREC runs, ClimateCheck's CSV, CheckThat's TSV), data/NAME/qrels.SPLIT.tsv
Writes  work/NAME/SPLIT/metrics.tsv: a row a run; .json the same at full precision, .md and .tex for papers
        metrics.cells.tsv: a row a run and measure, with interval, difference from the first run, and p-values
        metrics.claims.tsv: a row a run and claim; metrics.curves.tsv: recall, and first evidence found, by rank
        --report FILE.html: all of it on one page, with plots, and every claim's rankings side by side
        pool: the pairs that are worth judging next; merge: qrels with the labels that came back
        submission: the file and zip of a shared task, checked
Prints  the table; then one line of JSON, last on stdout

Examples
    python 06_evaluate.py --report work/demo/test/report.html
    python 06_evaluate.py work/demo/test/hybrid.tsv work/demo/test/rerank.tsv --measures climatecheck2026 trec P@5
    python 06_evaluate.py --ablation work/demo/ablation --resamples 10000
    python 06_evaluate.py submission work/demo/test/verdicts.tsv --task climatecheck2025
    python 06_evaluate.py pool work/demo/test/hybrid.tsv work/demo/test/rerank.tsv --min-runs 2 --depth 10
    python 06_evaluate.py merge work/demo/test/pool.tsv --out qrels.more.tsv
"""
import argparse
import contextlib
import functools
import hashlib
import html
import io
import json
import os
import re
import resource
import shutil
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np

STAGES = ("bm25", "dense", "splade", "hybrid", "rerank", "llm", "verdicts", "llm_verdicts")  # the order of the pipeline
MEASURES = {  # a shared task's or a tool's table; --measures takes these names, their columns, and any of ir-measures
    "climatecheck2025": ("R@2", "R@5", "R@10", "B-Pref", "Subtask I", "Judged@10", "P", "R", "F1", "Subtask II"),
    "climatecheck2026": ("R@2", "R@5", "B-Pref", "Retrieval 2026", "Judged@5", "P", "R", "F1", "Verification 2026"),
    "checkthat": ("MRR@1", "MRR@5", "MRR@10", "R@5", "R@10"),
    "verirel": (*(f"{kind}R@{k}" for kind in ("pooled ", "") for k in (1, 3, 5, 10, 20, 50)),
                "abstract P", "abstract R", "abstract F1"),
    "trec": ("nDCG@10", "MAP", "RR", "B-Pref (trec_eval)", "Judged@10"),
}
COMPOSED = {  # how the organisers make one number of several
    "Subtask I": (np.mean, ("R@2", "R@5", "R@10", "B-Pref")), "Subtask II": (np.sum, ("F1", "R@10")),
    "Retrieval 2026": (np.mean, ("R@5", "B-Pref")), "Verification 2026": (np.sum, ("F1", "R@5")),
}
MEANT = {
    "R": "recall of the three labels, weighted by support", "R@k": "share of a claim's evidence, mean over claims",
    "pooled R@k": "share of all evidence pairs (+VeriRel, eq. 7)",
    "B-Pref": "the organisers': n / R inside the term, over the ranks that count as submitted (--depth)",
    "B-Pref (trec_eval)": "n / min(R, N) inside the term", "P": "weighted by support",
    "F1": "weighted by support, over the ranks that count as submitted (--depth), as P and R",
    "abstract F1": "SciFact: evidence found with its label", "Judged@k": "share of the first k that is judged",
}
UNJUDGED, NOTHING = -1, -2  # at a rank: an abstract without judgement; no abstract any more
ALPHA = 0.05  # what counts as significant
SIGNIFICANT = "differs from the first run, p < 0.05 (paired randomisation over claims, Holm)."
DEPTHS = (1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 300, 500, 1000)  # of the curves (Kiepura & Lam, Table 7)
RENAMED = {"abstract_original_index": "abstract_id", "annotation": "label", "post_id": "claim_id", "cord_uid": "abstract_id"}

# --- helpers: the same block in all six scripts
LABELS, START = ("SUPPORTS", "REFUTES", "NEI"), time.monotonic()
SPELT = {name: LABELS[place] for place, names in enumerate((  # by the data sets in use
    "SUPPORT SUPPORTED ENTAILMENT", "REFUTE REFUTED CONTRADICT CONTRADICTION", "NOT_ENOUGH_INFORMATION NOT_ENOUGH_INFO "
    "NOTENOUGHINFO NEUTRAL")) for name in names.split()}
PACKAGES = "numpy pandas torch transformers sentence_transformers bm25s openai".split()
TREC = {6: "claim_id q0 abstract_id rank score tag".split(), 4: "claim_id q0 abstract_id label".split()}
if not sys.stderr.isatty():  # every tqdm obeys these: plain lines where no bar can be drawn
    os.environ.setdefault("TQDM_MININTERVAL", "10")
    os.environ.setdefault("TQDM_BAR_FORMAT", "{desc}: {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]\n")

def fail(where, what):
    """Bad input or usage: one line on stderr, exit status 2."""
    sys.exit(print("error:", *f"{where}: {what}".split(), file=sys.stderr) or 2)

def reject(path, table, bad, what):
    """Fail at the first row where bad (boolean, by row) holds; what may name the row's {columns}."""
    if bad.any():  # the index counts records: line breaks inside quoted fields come on top
        breaks = table.loc[: bad.idxmax()].iloc[:-1].apply(lambda column: column.str.count("\n")).to_numpy().sum()
        fail(f"{path}:{bad.idxmax() + int(breaks)}", what.format(**table.loc[bad.idxmax()]))

def read_table(path, columns, **known):
    """TSV with a header, or TREC, as strings; a run comes by claim and rank. known: the ids that a column may hold."""
    import pandas as pd
    try:
        with open(path, encoding="utf-8-sig") as file:
            words = file.readline().split()
        trec = set(columns) <= set(TREC.get(len(words), ())) and not set(columns) & set(words)
        shape = dict(sep=r"\s+", header=None, names=TREC[len(words)]) if trec else dict(sep="\t")
        table = pd.read_csv(path, dtype=str, na_filter=False, skip_blank_lines=False, encoding="utf-8-sig", **shape)
    except (OSError, ValueError) as error:
        fail(path, f"{getattr(error, 'strerror', None) or error}; give a table with the columns {', '.join(columns)}")
    if not isinstance(table.index, pd.RangeIndex):
        fail(f"{path}:1", "the rows have more fields than the header; mend the header")
    table.index += 1 if trec else 2
    return check_table(path, table, columns, trec, **known)

def check_table(path, table, columns, trec=False, **known):
    """What read_table refuses and mends; table is indexed by line."""
    import pandas as pd
    if not set(columns) <= set(table):
        found = ", ".join(map(str, table))
        fail(f"{path}:1", f"the columns {', '.join(columns)} are wanted, {found} found; mend the header")
    table = table[(table != "").any(axis=1)].copy()
    ids = [column for column in columns if column.endswith("_id")]
    reject(path, table, (table[ids] == "").any(axis=1), "an id is empty; fill it in or remove the row")
    reject(path, table, table.duplicated(ids), " ".join(f"{c} {{{c}}}" for c in ids) + " stands twice; keep one row")
    for column, allowed in known.items():
        reject(path, table, ~table[column].isin(allowed), f"unknown {column} {{{column}}}; give the files that go together")
    if "label" in columns and trec:  # TREC judges relevance: no stance to be had
        table["label"] = np.where(pd.to_numeric(table["label"], errors="coerce") > 0, "RELEVANT", "NEI")
    elif "label" in columns:
        table["label"] = table["label"].str.upper().str.replace(" ", "_").replace(SPELT)
        reject(path, table, ~table["label"].isin(LABELS), f"label {{label!r}} is none of {', '.join(LABELS)}; map it")
    if "rank" not in columns:
        return table
    rank, score = (pd.to_numeric(table[c], errors="coerce").astype(float) for c in ("rank", "score"))
    reject(path, table, ~np.isfinite(score), "score {score!r} is not a finite number; repair the row")
    if trec:  # as trec_eval does: by score, whatever the rank column says
        rank = score.groupby(table["claim_id"]).rank(method="first", ascending=False)
    reject(path, table, ~(rank >= 1) | (rank % 1 != 0), "rank {rank!r} is not an integer from 1; number the rows anew")
    run = table.assign(rank=rank.astype(int), score=score, order=table["claim_id"].factorize()[0])
    run = run.sort_values(["order", "rank"])
    gap = run["rank"] != run.groupby("order").cumcount() + 1
    reject(path, table, gap.sort_index(), "the ranks of claim {claim_id} have a gap or a tie here; number the rows anew")
    return run.drop(columns="order").reset_index(drop=True)

def read_corpus(path):
    """{abstract_id: record} in file order; an abstract that is no text becomes "", counted in one warning."""
    corpus, empty = {}, 0
    if Path(path).is_dir():
        fail(path, "a folder; name the JSONL file in it")
    for number, line in enumerate(open(path, "rb"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if rb"\ud" in line.lower():  # half a character, as in JSON that was cut off somewhere, becomes a question mark
                record = json.loads(json.dumps(record, ensure_ascii=False).encode("utf-8", "replace"))
            name = str(record["abstract_id"]) if type(record["abstract_id"]) in (str, int) else ""
        except (ValueError, KeyError, TypeError, RecursionError):
            fail(f"{path}:{number}", "no JSON object with an abstract_id; write one object a line")
        if not name or name in corpus:
            fail(f"{path}:{number}", f"abstract_id {name!r} is empty or stands twice; give every record its own string")
        text = record.get("abstract")
        empty += not (isinstance(text, str) and text.strip())
        corpus[name] = record | {"abstract": text if isinstance(text, str) else ""}
    if empty:
        print(f"warning: {path}: {empty} abstracts are null, empty or no text; kept as empty", file=sys.stderr)
    return corpus

def fingerprints(*paths):
    """{path: sha256} of this script, of files, and of folders (of their meta.json, else of all files inside)."""
    prints = {}
    for path in map(Path, (sys.argv[0], *paths)):
        files = [path / "meta.json"] if (path / "meta.json").is_file() else sorted(path.rglob("*")) or [path]
        digests = [hashlib.file_digest(f.open("rb"), "sha256").hexdigest() for f in files if f.is_file()]
        if not digests:
            fail(path, "no such file or folder; make it with the script before this one, or name another")
        prints[path.as_posix()] = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    return prints

def up_to_date(paths, args, inputs):
    """True, and said, if all paths stand with a provenance that names these arguments and inputs."""
    same, read = not args.force, {Path(path).resolve() for path in inputs}
    for path in map(Path, paths):
        made = {}
        with contextlib.suppress(OSError, ValueError):
            made = json.loads(Path(f"{path}.meta.json").read_text(encoding="utf-8"))
        known = made.get("arguments", {})
        theirs = path.is_dir() and any(path.iterdir()) and known.get("job") != args.job  # it would be replaced whole
        if theirs or any(map(Path.is_file, path.parents)):
            fail(path, "a folder or file stands there that this command did not make; give another --out, or move it")
        if path.resolve() in read:
            fail(path, "this command reads it, and would write over it; give another --out")
        same &= path.exists() and known == vars(args) | {"force": False} and made.get("inputs") == inputs
    return same and not print(*(f"up to date: {path}" for path in paths), sep="\n")

def remove(*paths):
    """Delete files and folders, those that are there."""
    for path in map(Path, paths):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

@contextlib.contextmanager
def written(path, args, inputs, **facts):
    """Yield a temporary path; the file or folder made there becomes path, whole, with its provenance beside it."""
    path, temporary, meta = Path(path), Path(f"{path}.tmp-{os.getpid()}"), Path(f"{path}.meta.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f"{path.name}.tmp-[0-9]*"):  # what a killed process left behind
        try:
            os.kill(int(left.name.split(".tmp-")[-1].split(".")[0]), 0)
        except ProcessLookupError:
            remove(left)
        except (OSError, ValueError):  # someone else's, alive; or no process number
            pass
    try:
        yield temporary
        packages = {name: sys.modules[name].__version__ for name in PACKAGES if name in sys.modules}
        arguments = vars(args) | {"force": False}
        made = dict(command=sys.argv, arguments=arguments, inputs=inputs, packages=packages, **facts, **spent())
        provenance = Path(f"{temporary}.meta.json")
        provenance.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        for file in filter(Path.is_file, (provenance, temporary, *temporary.rglob("*"))):
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
        if path.is_dir():
            os.replace(path, f"{temporary}.old")
        if temporary.is_dir():  # first the provenance, which vouches for nothing as long as there is no folder
            os.replace(provenance, meta)
        else:
            meta.unlink(missing_ok=True)  # from here on it would vouch for the new bytes
        os.replace(temporary, path)
        if provenance.exists():
            os.replace(provenance, meta)
        remove(f"{temporary}.old")
    finally:
        remove(temporary, f"{temporary}.meta.json")

def spent():
    """Seconds and peak memory (MiB) of this process so far."""
    unit = 1024 if sys.platform == "linux" else 1024**2
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // unit
    return {"seconds": round(time.monotonic() - START, 1), "peak_mib": peak}

class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The docstring as it stands, and the defaults."""
    def _get_help_string(self, action):
        return super()._get_help_string(action) if action.default else action.help

def at_least(least):
    """For argparse: a whole number from least on."""
    def whole(text):
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is below {least}")
        return int(text)
    return whole

def run_job(doc, jobs):
    """Run the job named by the first word (else the first of jobs); the last line of stdout is its JSON."""
    words = sys.argv[1:]
    job, flags = jobs[words.pop(0) if words and words[0] in jobs else next(iter(jobs))]
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=doc, formatter_class=Help, allow_abbrev=False)
    parser.error = lambda message: fail(Path(sys.argv[0]).name, f"{message}; see --help")
    flags(parser.add_argument)
    parser.set_defaults(job=f"{Path(sys.argv[0]).name} {job.__name__}")
    parser.add_argument("--data", default="data/demo", help="folder of corpus, claims and qrels")
    parser.add_argument("--work", default="work/demo", help="folder of all that is made from them")
    parser.add_argument("--split", default="train" if job.__name__ == "train" else "test", help="which claims")
    parser.add_argument("--seed", type=int, default=13, help="of every random choice")
    parser.add_argument("--device", default="auto", help="cuda, cuda:1, mps, cpu; auto takes the best there is")
    parser.add_argument("--force", action="store_true", help="make outputs again that are up to date")
    args = parser.parse_args(words)
    for word in ("data", "work", "split"):
        for name, value in vars(args).items():
            texts = [text.replace(f"{{{word}}}", getattr(args, word)) if isinstance(text, str) else text
                     for text in (value if isinstance(value, list) else [value])]
            setattr(args, name, texts if isinstance(value, list) else texts[0])
    if getattr(args, "out", None):
        args.out = str(Path(args.out))  # without a slash at its end, behind which names would be put
    try:
        print(json.dumps(job(args) | spent(), ensure_ascii=False))
    except KeyboardInterrupt:
        sys.exit(130)
# --- end of helpers

# ----------------------------------------------------------- Reading what others write
def recognise(path):
    """The format of a table, by its first line, and that line's words: tsv (ours), trec, climatecheck (CSV) or checkthat
    (ids in a list)."""
    try:
        with open(path, encoding="utf-8-sig", errors="replace") as file:
            words = file.readline().rstrip("\n").split("\t")
    except OSError as error:
        fail(path, f"{error.strerror}; name a run, verdicts or qrels")
    if len(words) == 1 and "," in words[0]:
        return "climatecheck", words
    return "checkthat" if "post_id" in words else "tsv" if "claim_id" in words else "trec", words

def read_any(path, columns, form="auto"):
    """A run, verdicts or qrels in any of the FORMATS, with at least these columns, and label where there is one."""
    import pandas as pd

    found, words = recognise(path)
    form = found if form == "auto" else form
    if form in ("tsv", "trec"):
        return read_table(path, list(dict.fromkeys([*columns, *({"label"} & set(words) if form == "tsv" else ())])))
    try:
        sep = "," if form == "climatecheck" else "\t"
        table = pd.read_csv(path, dtype=str, na_filter=False, encoding="utf-8-sig", sep=sep)
    except (OSError, ValueError) as error:
        fail(path, f"{error}; is it of the format {form}? see --format")
    if not isinstance(table.index, pd.RangeIndex):
        fail(f"{path}:1", "the rows have more fields than the header; mend the header")
    table = table.rename(columns=RENAMED).rename(columns=str.strip)
    if (twice := table.columns.duplicated()).any():
        fail(f"{path}:1", f"two columns mean {table.columns[twice][0]}; remove or rename one")
    table.index += 2
    if {"claim_id", "preds"} <= set(table):
        reject(path, table, table.duplicated("claim_id"), "post_id {claim_id} stands twice; give each post one list")
        table["abstract_id"] = table["preds"].str.findall(r"[^\s\[\]'\",]+")
        table = table.explode("abstract_id").dropna(subset=["abstract_id"])
        if (twice := table.duplicated(["claim_id", "abstract_id"])).any():
            fail(f"{path}:{twice.idxmax()}", "an abstract stands twice in a list; keep its first place")
        table["rank"] = (table.groupby("claim_id").cumcount() + 1).astype(str)
    if "rank" in table and "score" not in table:
        table["score"] = "-" + table["rank"]
    truth = form == "checkthat" and "label" in columns and "label" not in table  # the paper that a post is about
    table = table.assign(label="1") if truth else table
    return check_table(path, table, list(dict.fromkeys([*columns, *({"label"} & set(table))])), trec=truth)

FORMATS = ("auto", "tsv", "trec", "climatecheck", "checkthat")
RUN, QRELS = ["claim_id", "abstract_id", "rank", "score"], ["claim_id", "abstract_id", "label"]

def match(path, run, gold, column):
    """Refuse ids that mean the same and are written otherwise (7 and 7.0), which would silently score 0."""
    import pandas as pd

    known = getattr(gold, f"{column}s")
    here = pd.Index(run[column].unique())
    if here.isin(known).any() or not len(here):
        return
    ours, theirs = (pd.to_numeric(pd.Series(ids), errors="coerce").dropna() for ids in (here, known))
    if column == "claim_id" or ours.isin(theirs).any():
        fail(path, f"no {column} of it stands in the qrels ({here[0]} here, {known[0]} there); write ids alike in both")

def read_run(path, gold, form):
    """A run whose claims the qrels know, and its counts: claims without a row, claims unknown, ranks against scores."""
    run = read_any(path, RUN, form)
    match(path, run, gold, "claim_id")
    known = run["claim_id"].isin(gold.claim_ids)
    counts = {"claims_missing": len(gold.claim_ids) - run["claim_id"][known].nunique(),
              "claims_unknown": run["claim_id"][~known].nunique()}
    run = run[known]
    match(path, run, gold, "abstract_id")
    rising = (run["score"].diff() > 0) & ~run["claim_id"].ne(run["claim_id"].shift())
    counts["scores_rising"] = run["claim_id"][rising].nunique()
    for count, what in zip(counts.values(), (
            "of the qrels have no row: 0 in recall, out of B-Pref", "are not in the qrels; left out",
            "have scores that rise with the rank; the ranks count")):
        if count:
            print(f"warning: {path}: {count} claims {what}", file=sys.stderr)
    return run, counts

# ----------------------------------------------------------- Judgements by rank
def gold_of(qrels):
    """Qrels made ready: claim_ids, abstract_ids, sorted keys of pairs and their labels' places, R and N by claim.

    R counts a claim's relevant abstracts, N those that were judged and are not; both are float arrays [claims].
    """
    import pandas as pd

    claims, abstracts = pd.Index(qrels["claim_id"].unique()), pd.Index(qrels["abstract_id"].unique())
    rows = claims.get_indexer(qrels["claim_id"])
    keys = rows * len(abstracts) + abstracts.get_indexer(qrels["abstract_id"])
    labels = qrels["label"].replace({"RELEVANT": LABELS[0]}).map(LABELS.index).to_numpy(np.int8)
    order = np.argsort(keys)
    counts = [np.bincount(rows, kind, len(claims)).astype(float) for kind in (labels < 2, labels == 2)]
    return SimpleNamespace(claim_ids=claims, abstract_ids=abstracts, keys=keys[order], labels=labels[order],
                           R=counts[0], N=counts[1], stance="RELEVANT" not in set(qrels["label"]))

def judge(run, gold):
    """What stands at each rank: gold labels and the run's labels, both [claims, depth] int8, as places in LABELS;
    UNJUDGED where there is none, NOTHING past a run's end."""
    rows, ranks = gold.claim_ids.get_indexer(run["claim_id"]), run["rank"].to_numpy(int) - 1
    columns = gold.abstract_ids.get_indexer(run["abstract_id"])
    keys = np.where(columns < 0, -1, rows * len(gold.abstract_ids) + columns)
    places = np.minimum(np.searchsorted(gold.keys, keys), len(gold.keys) - 1)
    labels = np.where(gold.keys[places] == keys, gold.labels[places], UNJUDGED)
    found = np.full((len(gold.claim_ids), int(ranks.max(initial=0)) + 1), NOTHING, np.int8)
    said = found.copy()
    found[rows, ranks] = labels
    if "label" in run:
        said[rows, ranks] = run["label"].map({label: place for place, label in enumerate(LABELS)})
    return found, said

def condense(found):
    """The same without what nobody judged: the condensed lists of Sakai 2007, in their old order."""
    order = np.argsort(found < 0, axis=1, kind="stable")
    found = np.take_along_axis(found, order, axis=1)
    return np.where(found < 0, NOTHING, found)

# ----------------------------------------------------------- Measures of a claim
# Each is a fraction by claim, (numerator, denominator), both [claims]. Over claims both are summed, then divided: a
# denominator of 1 makes a mean over claims, of 0 leaves a claim out.
def evidence(found):
    return (found == 0) | (found == 1)  # SUPPORTS or REFUTES

def mean_of(values, counted):
    """The fraction of a plain mean over the claims that count."""
    return np.where(counted, values, 0.0), counted.astype(float)

def recall(found, gold, k):
    """Share of a claim's relevant abstracts among its first k ranks; a claim without rows counts 0."""
    return mean_of(evidence(found[:, :k]).sum(1) / np.maximum(gold.R, 1), gold.R > 0)

def pooled_recall(found, gold, k):
    """Share of all relevant pairs that stand among their claim's first k ranks (+VeriRel, eq. 7)."""
    return evidence(found[:, :k]).sum(1).astype(float), gold.R

def reciprocal_rank(found, gold, k):
    """1 / rank of a claim's first relevant abstract, 0 if it is not among the first k."""
    hits = evidence(found[:, :k])
    return mean_of(hits.any(1) / (hits.argmax(1) + 1), gold.R > 0)

def success(found, gold, k):
    """1 if one of a claim's first k abstracts is relevant."""
    return mean_of(evidence(found[:, :k]).any(1), gold.R > 0)

def bpref(found, gold, k):
    """B-Pref as the ClimateCheck organisers compute it, over the submitted claims with both kinds of judgement.

    Walk down the first k ranks (0: all) with n, the judged non-relevant abstracts so far, capped at R: every relevant one
    adds 1 - n / R; the sum is divided by R. (trec_eval divides n by min(R, N) instead.)
    """
    found, R = found[:, :k or None], np.maximum(gold.R, 1)[:, None]
    n = np.minimum((found == 2).cumsum(1), R)
    return mean_of((evidence(found) * (1 - n / R)).sum(1) / R[:, 0], (gold.R > 0) & (gold.N > 0) & (found[:, 0] != NOTHING))

def judged(found, gold, k):
    """Share of a claim's first k abstracts that is judged, whatever the judgement."""
    return mean_of((found[:, :k] >= 0).sum(1) / np.maximum((found[:, :k] != NOTHING).sum(1), 1), np.full(len(found), True))

RANKED = {"R": recall, "pooled R": pooled_recall, "MRR": reciprocal_rank, "Success": success, "B-Pref": bpref,
          "Judged": judged}

def abstract_level(found, said, gold):
    """SciFact's abstract-level P, R, F1, labels only (Wadden et al. 2020): of all pairs called evidence, judged or not,
    those are right whose label is the gold one."""
    called, right = ((said == 0) | (said == 1)).sum(1), (evidence(found) & (found == said)).sum(1)
    return {"abstract P": (right, called), "abstract R": (right, gold.R), "abstract F1": (2 * right, called + gold.R)}

def confusion(found, said):
    """How often each label was given to each gold label, by claim: [claims, 9], over submitted pairs that are judged."""
    table = np.zeros((len(found), 9))
    rows, ranks = np.nonzero((found >= 0) & (said >= 0))
    np.add.at(table, (rows, found[rows, ranks] * 3 + said[rows, ranks]), 1)
    return table

def weighted_prf(table):
    """Precision, recall, F1 from confusions [..., gold, given], each class weighted by its share of gold labels, as
    scikit-learn's average="weighted" does; what is divided by 0 is 0."""
    right, support, given = np.diagonal(table, axis1=-2, axis2=-1), table.sum(-1), table.sum(-2)
    by_class = right / np.maximum(given, 1), right / np.maximum(support, 1), 2 * right / np.maximum(support + given, 1)
    with np.errstate(invalid="ignore"):
        return [(values * support).sum(-1) / support.sum(-1) for values in by_class]

@functools.cache
def trec_measure(name):
    """A measure of ir-measures by its name, MAP and B-Pref (trec_eval) included; tried out on two abstracts, as many names
    are known that need a parameter or another package."""
    import ir_measures

    try:
        measure = ir_measures.parse_measure({"B-Pref (trec_eval)": "Bpref"}.get(name, name))
        if str(measure).endswith("@0"):  # trec_eval would abort the whole process
            raise ValueError
        list(ir_measures.iter_calc([measure], [ir_measures.Qrel("1", "a", 1), ir_measures.Qrel("1", "b", 0)],
                                   [ir_measures.ScoredDoc("1", "a", -1.0)]))
        return measure
    except Exception:  # each package behind it raises what it likes
        known = ", ".join([*MEASURES, *COMPOSED, *(f"{word}@10" for word in RANKED if word != "B-Pref")])
        fail("--measures", f"{name!r} is unknown or cannot be computed; take {known} or a measure of ir-measures, such as "
             "nDCG@10, AP or P@5")

def trec_fractions(names, run, qrels, gold):
    """{name: fraction} from ir-measures (trec_eval inside), which sees our ranks as scores; every claim counts."""
    import ir_measures

    if not names:
        return {}
    judgements, ranking = (table.rename(columns={"abstract_id": "doc_id"}).assign(  # numbers, as ERR takes no other ids
        query_id=gold.claim_ids.get_indexer(table["claim_id"]).astype(str)) for table in (qrels, run))
    judgements["relevance"], ranking["score"] = (qrels["label"] != "NEI").astype(int), -run["rank"].astype(float)
    values = {trec_measure(name): np.zeros(len(gold.claim_ids)) for name in names}
    for one in ir_measures.iter_calc(list(values), judgements[["query_id", "doc_id", "relevance"]],
                                     ranking[["query_id", "doc_id", "score"]]):
        values[one.measure][int(one.query_id)] = one.value
    return {name: (values[trec_measure(name)], np.ones(len(gold.claim_ids))) for name in names}  # AP and MAP are one

# ----------------------------------------------------------- Measures of a run
def columns_of(words, condensed=False):
    """The measures that are asked for, each once; with condensed, those by rank once more without the unjudged."""
    names = list(dict.fromkeys(name for word in words for name in MEASURES.get(word, (word,))))
    for name in names:
        known = name in COMPOSED or name in ("P", "R", "F1", "B-Pref", "abstract P", "abstract R", "abstract F1")
        if not known and not re.fullmatch(rf"({'|'.join(RANKED)})@[1-9]\d*( condensed)?", name):
            trec_measure(name)
    ranked = [name for name in names if name.split("@")[0] in ("R", "pooled R", "MRR", "Success") and "@" in name]
    return names + [f"{name} condensed" for name in ranked if condensed]

def parts_of(run, qrels, gold, names, depth=10):
    """{name: (numerator, denominator)} by claim of all that the measures in names are made of, "given" the confusions.

    B-Pref and the confusions see the first depth ranks only (0: all), as the organisers see what was submitted only.
    """
    needed = list(dict.fromkeys(part for name in names for part in COMPOSED.get(name, (None, (name,)))[1]))
    found, said = judge(run, gold)
    by_label = abstract_level(found, said, gold) if (said >= 0).any() and gold.stance else {}
    given = said if gold.stance else np.full_like(said, NOTHING)
    parts = {"given": confusion(found[:, :depth or None], given[:, :depth or None])}
    condensed = condense(found) if any(name.endswith(" condensed") for name in needed) else None
    for name in ["Success@1", *needed]:
        word, _, k = name.removesuffix(" condensed").partition("@")
        if word in RANKED and (k or word == "B-Pref"):
            parts[name] = RANKED[word](condensed if name.endswith(" condensed") else found, gold, int(k or depth))
        elif name.startswith("abstract "):
            parts[name] = by_label.get(name, (np.zeros(len(found)), np.zeros(len(found))))
    theirs = [name for name in needed if name not in parts and name not in ("P", "R", "F1")]
    return parts | trec_fractions(theirs, run, qrels, gold), found

def packed(parts):
    """The parts side by side, [claims, parts], and the order of their names: sums over claims are all a measure needs."""
    names = [name for name in parts if name != "given"]
    return np.column_stack([parts["given"], *(column for name in names for column in parts[name])]), names

def measures_of(sums, parts, names):
    """{name: values [...]} from sums [..., parts] over claims; NaN where nothing was there to be measured."""
    given = dict(zip(("P", "R", "F1"), weighted_prf(sums[..., :9].reshape(*sums.shape[:-1], 3, 3))))
    with np.errstate(invalid="ignore", divide="ignore"):
        plain = {name: sums[..., 9 + 2 * place] / sums[..., 10 + 2 * place] for place, name in enumerate(parts)}
    known = given | plain
    known |= {name: how([known[part] for part in of], axis=0)
              for name, (how, of) in COMPOSED.items() if set(of) <= set(known)}
    return {name: known[name] for name in names}

# ----------------------------------------------------------- Comparison
def resampled(tables, resamples, seed, weigh):
    """Yield sums over claims under random weights, a hundred draws at a time: [draws, runs, parts]."""
    rng, (runs, claims, parts) = np.random.default_rng(seed), tables.shape
    flat = tables.transpose(1, 0, 2).reshape(claims, runs * parts)
    for begin in range(0, resamples, 100):
        weights = weigh(rng, min(100, resamples - begin), claims)
        yield (weights @ flat).reshape(-1, runs, parts)

def bootstrap(rng, draws, claims):
    """How often each claim is drawn when claims are drawn with replacement (Efron's bootstrap)."""
    return rng.multinomial(claims, np.full(claims, 1 / claims), size=draws).astype(float)

def swaps(rng, draws, claims):
    """For which claims two runs change places (Fisher's randomisation)."""
    return rng.integers(0, 2, size=(draws, claims)).astype(float)

def intervals(tables, parts, names, resamples, seed):
    """{name: [2, runs]}: the 95 % percentile interval of every measure of every run, over draws of the claims.

    The same draws serve all runs and measures, F1 and composed scores included, as these need sums over claims only;
    scipy.stats.bootstrap gives the same from one call a cell (a test compares).
    """
    drawn = [measures_of(sums, parts, names) for sums in resampled(tables, resamples, seed, bootstrap)]
    bounds = {}
    for name in names:
        values = np.concatenate([some[name] for some in drawn])
        missing = np.isnan(values)  # draws without a claim that counts; where all are, there is no interval
        bounds[name] = np.nanquantile(np.where(missing.all(0), 0, values), (0.025, 0.975), axis=0)
        bounds[name][:, missing.all(0)] = np.nan
    return bounds

def randomisation(tables, parts, names, resamples, seed):
    """{name: [runs]}: two-sided p of each run's difference from the first, by paired randomisation over claims
    (Smucker et al. 2007): how often chance, swapping the two runs' results claim by claim, differs as much."""
    apart = tables - tables[:1]
    first, sums = tables[0].sum(0), tables.sum(1)
    def difference(this, that):
        these, those = measures_of(this, parts, names), measures_of(that, parts, names)
        return {name: np.abs(these[name] - those[name]) for name in names}
    seen = difference(sums, np.broadcast_to(first, sums.shape))
    beyond = {name: np.ones(len(tables)) for name in names}  # the difference itself is one of the draws
    for moved in resampled(apart, resamples, seed, swaps):
        for name, values in difference(sums - moved, first + moved).items():
            beyond[name] += (values >= seen[name] - 1e-12).sum(0)
    return {name: np.where(np.isnan(seen[name]), np.nan, beyond[name] / (resamples + 1)) for name in names}

def wilcoxon(this, that):
    """Two-sided p of the signed-rank test over the claims that count for both; 1 where no claim differs."""
    from scipy import stats

    both = (this[1] > 0) & (that[1] > 0)
    apart = this[0][both] / this[1][both] - that[0][both] / that[1][both]
    return float(stats.wilcoxon(apart).pvalue) if apart.any() else 1.0

def mcnemar(this, that):
    """Two-sided exact p that two runs put evidence on the top rank equally often."""
    from scipy import stats

    gained, lost = ((this[0] > that[0]).sum(), (this[0] < that[0]).sum())
    return float(stats.binomtest(int(gained), int(gained + lost)).pvalue) if gained + lost else 1.0

def holm(values):
    """p-values of several comparisons, corrected step by step (Holm 1979); NaN stays NaN and is not counted."""
    values = np.asarray(values, float)
    order = np.argsort(values)[: (~np.isnan(values)).sum()]
    stepped = np.maximum.accumulate(values[order] * np.arange(len(order), 0, -1))
    corrected = np.full(len(values), np.nan)
    corrected[order] = np.minimum(stepped, 1)
    return corrected

def compare(parts, names, resamples, seed):
    """A row a run and measure: value, low, high, the difference from the first run and its p-values; p_holm corrects
    p_randomisation over the runs. Success@1 is there for McNemar's test."""
    import pandas as pd

    runs, first = list(parts), next(iter(parts))
    names = list(dict.fromkeys([*names, "Success@1"]))
    order = packed(parts[first])[1]
    tables = np.stack([packed(parts[run])[0] for run in runs])
    values = measures_of(tables.sum(1), order, names)
    drawn, chance = (how(tables, order, names, resamples, seed) for how in (intervals, randomisation))
    rows = []
    for name in names:
        corrected = [np.nan, *holm(chance[name][1:])]
        for place, run in enumerate(runs):
            plain = place and name in parts[run] and not np.isnan(values[name][place])
            rows.append(dict(
                run=run, measure=name, value=values[name][place], low=drawn[name][0][place], high=drawn[name][1][place],
                difference=values[name][place] - values[name][0] if place else np.nan,
                p_randomisation=chance[name][place] if place else np.nan, p_holm=corrected[place],
                p_wilcoxon=wilcoxon(parts[run][name], parts[first][name]) if plain else np.nan,
                p_mcnemar=mcnemar(parts[run][name], parts[first][name]) if plain and name == "Success@1" else np.nan))
    return pd.DataFrame(rows)

# ----------------------------------------------------------- Tables
def wide(cells, names):
    """A row a run, a column a measure; measures that no run has are left out."""
    table = cells[cells["measure"].isin(names)].pivot(index="run", columns="measure", values="value")
    table = table.reindex(index=cells["run"].unique(), columns=names).dropna(axis=1, how="all")
    return table.rename_axis(columns=None).reset_index()

def marked(cells, names, write):
    """The wide table as texts: write(row of cells, place among the runs or None where all are equal, sign of p_holm)."""
    table, at = wide(cells, names), cells.set_index(["measure", "run"])
    for name in table.columns[1:]:
        column = at.loc[name].loc[table["run"]]
        places = column["value"].round(3).rank(method="dense", ascending=False)
        places = places if places.nunique() > 1 else [None] * len(places)
        table[name] = ["-" if np.isnan(one.value) else write(one, place, one.p_holm < ALPHA)
                       for one, place in zip(column.itertuples(), places)]
    return table

def show(cells, names):
    """The table for people: three digits, a dash where a measure does not apply, * where p_holm is significant."""
    text = marked(cells, names, lambda one, place, sign: f"{one.value:.3f}" + "*" * sign).to_string(index=False)
    return text + "\n* " * ("*" in text) + SIGNIFICANT * ("*" in text)

def legend(names):
    """Which definition a name stands for, where there are several in use."""
    short = dict.fromkeys(re.sub(r"@\d+$", "@k", name) for name in names)
    return "; ".join(f"{name}: {MEANT[name]}" for name in short if name in MEANT)

def by_folder(table):
    """(folder, rows) of the runs that lie in one folder; a row is a list that begins with the run's own name."""
    for folder, rows in table.groupby(table["run"].map(lambda run: Path(run).parent.as_posix()), sort=False):
        yield folder, [[Path(row[0]).name, *row[1:]] for row in rows.to_numpy().tolist()]

def markdown(cells, names):
    """The table in Markdown, best of a column in bold, second in italics; folders of runs have a row of their own."""
    styles = {1: "**{:.3f}**", 2: "*{:.3f}*"}
    table = marked(cells, names, lambda one, place, sign: styles.get(place, "{:.3f}").format(one.value) + "†" * sign)
    rows = [list(table.columns), ["---"] * len(table.columns)]
    for folder, members in by_folder(table):
        rows += [[f"*{folder}*", *[""] * (len(table.columns) - 1)]] * (folder != ".") + members
    lines = ["| " + " | ".join(field.replace("|", "\\|") for field in row) + " |" for row in rows]
    return "\n".join([*lines, "", f"† {SIGNIFICANT} {legend(names)}.", ""])

def latex(cells, names):
    """The same in LaTeX, with booktabs' rules; folders of runs are told apart by a rule."""
    styles = {1: r"\textbf{%.3f}", 2: r"\textit{%.3f}"}
    table = marked(cells, names, lambda one, place, sign: styles.get(place, "%.3f") % one.value + r"$^\dagger$" * sign)
    escaped = [re.sub(r"([_%&#])", r"\\\1", name) for name in table.columns]
    lines = [rf"\begin{{tabular}}{{l{'r' * (len(escaped) - 1)}}}", r"\toprule", " & ".join(escaped) + r" \\"]
    for _, members in by_folder(table):
        names = [re.sub(r"([_%&#])", r"\\\1", row[0]) for row in members]
        lines += [r"\midrule", *(" & ".join([name, *row[1:]]) + r" \\" for name, row in zip(names, members))]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])

def html_table(cells, names):
    """The same in HTML, with the intervals."""
    cell = "{0.value:.3f}{1}<small>{0.low:.3f}–{0.high:.3f}</small>"
    table = marked(cells, names, lambda one, place, sign: cell.format(one, "*" * sign))
    return table.assign(run=table["run"].map(html.escape)).to_html(index=False, escape=False, border=0)

def curves(found, gold):
    """Rows of k, recall and success: how much evidence, and for how many claims the first, stands among the first k."""
    depths = [k for k in DEPTHS if k <= found.shape[1]] or [1]
    fractions = [(k, recall(found, gold, k), success(found, gold, k)) for k in depths]
    return [(k, *(part[0].sum() / max(part[1].sum(), 1) for part in parts)) for k, *parts in fractions]

# ----------------------------------------------------------- Report
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>@TITLE@</title>
<style>
:root { --support: #d8f0dc; --refute: #fbdcd7; --nei: #e6e8eb; --line: #c9ced6; --ink: #1c2430; --faint: #5b6675 }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 1200px; margin: 0 auto; padding: 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem } p, small { color: var(--faint) }
.wide { overflow-x: auto } table { border-collapse: collapse }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap }
th { cursor: pointer } th:first-child, td:first-child { text-align: left } td small { display: block; font-size: .75em }
.plots { display: flex; flex-wrap: wrap; gap: 1rem } .plots svg { max-width: 100%; height: auto }
.bar { position: sticky; top: 0; background: #fff; padding: .5rem 0; display: flex; gap: .5rem; flex-wrap: wrap }
input, select { font: inherit; padding: .3rem .5rem; border: 1px solid var(--line); border-radius: 4px; max-width: 100% }
input { flex: 1 1 14rem }
details.claim { border: 1px solid var(--line); border-radius: 6px; margin: .4rem 0; padding: .4rem .7rem }
summary { cursor: pointer; overflow-wrap: anywhere } .runs { display: flex; gap: .6rem; overflow-x: auto; padding: .5rem 0 }
.run { flex: 0 0 17rem } .run h3 { font-size: .9rem; margin: .2rem 0 }
.hit { border: 1px dashed var(--line); border-radius: 4px; padding: .2rem .5rem; margin: .25rem 0; font-size: .85rem }
.SUPPORTS, .REFUTES, .NEI { border-style: solid !important } .lost { opacity: .6 } mark { background: #fff2a8 }
.SUPPORTS { background: var(--support) } .REFUTES { background: var(--refute) } .NEI { background: var(--nei) }
.tag { padding: 0 .4rem; border-radius: 4px; border: 1px solid var(--line) }
</style>
<h1>@TITLE@</h1>
<p>@ABOUT@</p>
@WARNINGS@
<div class="wide" id="metrics">@TABLE@</div>
<p>* @SIGN@ Small: 95 % bootstrap intervals. @LEGEND@</p>
<div class="plots">@PLOTS@</div>
<h2>Claims</h2>
<p>Gold labels in colour: <span class="tag SUPPORTS">SUPPORTS</span> <span class="tag REFUTES">REFUTES</span>
<span class="tag NEI">NEI</span>, dashed: not judged. Arrows: ranks gained or lost against the run on the left.</p>
<div class="bar"><input id="search" type="search" placeholder="words of a claim, its number, a verdict" aria-label="search">
<select id="order" aria-label="order"><option value="file">as in the file</option></select><small id="count"></small></div>
<div id="claims"></div>
<script id="data" type="application/json">@DATA@</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent), list = document.getElementById("claims");
const search = document.getElementById("search"), order = document.getElementById("order");
function make(kind, text, name) {  // all texts go in as text, never as markup
  const node = document.createElement(kind); node.textContent = text ?? "";
  if (name) node.className = name;
  return node;
}
function hit(claim, [id, rank, gold, said, move], lost) {
  const [title, text] = data.abstracts[id] ?? ["", ""], node = make("details", "", `hit ${gold} ${lost ? "lost" : ""}`);
  const head = make("summary", `${lost ? "was " : ""}${rank} ${move} · ${title || text.slice(0, 80) || id}`);
  head.append(make("small", ` ${id}${gold && " · gold " + gold}${said && " · said " + said}`));
  const sentence = claim.sentences[id], at = sentence ? text.indexOf(sentence) : -1;
  const body = make("div", at < 0 ? text : text.slice(0, at));
  if (at >= 0) body.append(make("mark", sentence), text.slice(at + sentence.length));
  node.append(head, body); return node;
}
function fill(claim) {
  if (!claim.node.open || claim.node.children.length > 1) return;
  const runs = make("div", "", "runs");
  data.runs.forEach((run, place) => {
    const column = make("div", "", "run"); column.append(make("h3", run));
    for (const row of claim.rows[place]) column.append(hit(claim, row, false));
    for (const row of claim.lost[place]) column.append(hit(claim, row, true));
    runs.append(column);
  });
  claim.node.append(runs);
}
for (const claim of data.claims) {
  claim.node = make("details", "", "claim"); const head = make("summary", claim.text + " ");
  head.append(make("small", claim.id + (claim.verdict ? " · " + claim.verdict : "") + " · " + claim.note));
  claim.node.append(head);
  claim.node.addEventListener("toggle", () => fill(claim));
  claim.words = (claim.id + " " + claim.text + " " + claim.verdict).toLowerCase();
}
for (const name of data.orders) order.append(new Option(name, name));
function show() {
  const words = search.value.toLowerCase().split(/\\s+/), place = data.orders.indexOf(order.value);
  const shown = data.claims.filter(claim => words.every(word => claim.words.includes(word)));
  if (place >= 0) shown.sort((a, b) => a.keys[place] - b.keys[place]);
  list.replaceChildren(...shown.map(claim => claim.node));
  document.getElementById("count").textContent = shown.length + " of " + data.claims.length + " claims";
  if (shown.length === 1) { shown[0].node.open = true; fill(shown[0]); }
}
search.addEventListener("input", show); order.addEventListener("change", show);
document.querySelectorAll("#metrics th").forEach((head, column) => head.addEventListener("click", () => {
  const body = head.closest("table").tBodies[0], value = row => parseFloat(row.cells[column].textContent) || 0;
  const turned = head.dataset.turned = head.dataset.turned === "down" ? "up" : "down";
  const name = row => row.cells[0].textContent;
  const sorted = [...body.rows].sort((a, b) => column ? value(b) - value(a) : name(a).localeCompare(name(b)));
  body.replaceChildren(...(turned === "down" ? sorted : sorted.reverse()));
}));
search.value = decodeURIComponent(location.hash.slice(1)); show();
</script>
</html>
"""

def plot(draw, title, xlabel, ylabel):
    """An SVG element from draw(axes); the same picture is the same text."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "claims", "svg.fonttype": "none", "font.size": 9, "text.parse_math": False})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.6, 3.4), layout="constrained")
    draw(axes)
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return text.getvalue()[text.getvalue().index("<svg"):]

def plots(curve, cells, names):
    """SVGs: recall by depth, where the first evidence stands, and a curve for runs whose names end in -NUMBER."""
    runs, depths = curve["run"].unique(), sorted(curve["k"].unique())
    def lines(column):
        def draw(axes):
            for run, rows in curve.groupby("run", sort=False):
                axes.plot(rows["k"], rows[column], marker=".", label=run)
            axes.set_xscale("log")
            axes.set_xticks(depths, depths, minor=False)
            axes.minorticks_off()
        return draw
    def first(axes):  # the distribution of AIRwaves' Fig. 2
        for place, run in enumerate(runs):
            at = curve[curve["run"] == run].set_index("k")["success"].reindex(depths).ffill()
            left = np.arange(len(depths)) + 0.8 * place / len(runs) - 0.4
            axes.bar(left, at.diff().fillna(at), 0.8 / len(runs), label=run)
        bounds = zip([0, *depths], depths)
        axes.set_xticks(range(len(depths)), [f"{low + 1}-{k}" if k > low + 1 else str(k) for low, k in bounds], rotation=45)
    made = [plot(lines("recall"), "Evidence found", "abstracts read (k)", "R@k"),
            plot(first, "Rank of the first evidence", "rank", "share of claims")]
    for stem, members in sweeps(cells["run"].unique()).items():
        def sweep(axes, members=members):
            for name in names:
                values = cells[cells["measure"] == name].set_index("run")["value"].loc[list(members)]
                if values.notna().any() and values.abs().max() <= 1:
                    axes.plot(list(members.values()), values, marker="o", label=name)
        made.append(plot(sweep, f"{stem} by its number", stem, "score"))
    return made

def sweeps(runs):
    """{stem: {run: number}} of runs that differ only in the number at the end, as in llm.alpha-0.2, llm.alpha-0.4."""
    found = {}
    for run in runs:
        if parts := re.fullmatch(r"(.*[A-Za-z])-(\d+(?:\.\d+)?)", run):
            found.setdefault(parts[1], {})[run] = float(parts[2])
    return {stem: dict(sorted(some.items(), key=lambda one: one[1])) for stem, some in found.items() if len(some) > 2}

def side_by_side(runs, claim, gold, depth=10):
    """For each run, what it has on top for a claim and what evidence of the run before it lost from there, both as
    [abstract_id, rank, gold label, given label, arrow]; runs are {claim: [(abstract_id[, label]), ...]}."""
    tops, losses, before = [], [], {}
    for run in runs:
        here, top = {row[0]: rank for rank, row in enumerate(run.get(claim, []), 1)}, []
        for rank, (name, *said) in enumerate(run.get(claim, [])[:depth], 1):
            moved = before.get(name, 0) - rank
            arrow = "" if not before or not moved else "new" if name not in before else f"{'↓↑'[moved > 0]}{abs(moved)}"
            top.append([name, rank, gold.get((claim, name), ""), *(said or [""]), arrow])
        gone = [name for name, rank in before.items() if rank <= depth < here.get(name, depth + 1)
                and gold.get((claim, name), "NEI") != "NEI"]
        losses.append([[name, before[name], gold[claim, name], "", f"→ {here.get(name, 'gone')}"] for name in gone])
        tops.append(top)
        before = here
    return tops, losses

def read_verdicts(path):
    """{claim_id: verdict} and {claim_id: {abstract_id: sentence}}, as 05_classify.py --aggregate wrote them, if it did."""
    verdicts, sentences = {}, {}
    for number, line in enumerate(open(path, "rb") if Path(path).is_file() else [], 1):
        try:
            one = json.loads(line)
            verdicts[one["claim_id"]] = str(one["verdict"])
            sentences[one["claim_id"]] = {part["abstract_id"]: part.get("sentence") for part in one["evidence"]}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            fail(f"{path}:{number}", "no verdict of a claim; make the file with 05_classify.py --aggregate")
    return verdicts, sentences

def report(args, runs, qrels, cells, names, curve, per_claim, warnings):
    """The page as text: metrics, plots, and every claim with each run's top ten side by side."""
    texts, claims = read_corpus(args.corpus), read_table(args.claims, ["claim_id", "claim"])
    gold = {(claim, name): label for claim, name, label in qrels[QRELS].itertuples(index=False)}
    ranked = [{claim: list(rows.drop(columns="claim_id").itertuples(index=False, name=None)) for claim, rows in
               run[[*QRELS[:2], *({"label"} & set(run))]].groupby("claim_id", sort=False)} for run in runs.values()]
    verdicts, sentences = read_verdicts(args.aggregated)
    values = per_claim.pivot(index="claim_id", columns="run", values="R@5")[list(runs)]
    shown, used = [], {}
    for claim, text in claims.loc[claims["claim_id"].isin(values.index), ["claim_id", "claim"]].itertuples(index=False):
        tops, losses = side_by_side(ranked, claim, gold)
        used |= dict.fromkeys(row[0] for column in tops + losses for row in column)
        keys = [float(value) for value in values.loc[claim].fillna(2)]
        note = "R@5 " + ", ".join(f"{key:.2f}" if key <= 1 else "-" for key in keys)
        shown.append({"id": claim, "text": text, "verdict": verdicts.get(claim, ""), "note": note, "rows": tops,
                      "lost": losses, "sentences": sentences.get(claim, {}), "keys": [*keys, keys[-1] - keys[0]]})
    data = {"runs": list(runs), "claims": shown,
            "orders": [*(f"lowest R@5 of {run}" for run in runs), "what the last run loses against the first"],
            "abstracts": {name: [str(one.get("title") or ""), one["abstract"]] for name in used if (one := texts.get(name))}}
    words = {"TITLE": f"{Path(args.data).name}, {args.split}", "SIGN": SIGNIFICANT, "LEGEND": legend(names) + ".",
             "ABOUT": f"{len(shown)} claims, {len(runs)} runs, {len(qrels)} judged pairs.", "WARNINGS": "\n".join(warnings)}
    page = {key: html.escape(text).replace("\n", "<br>") for key, text in words.items()} | {
        "TABLE": html_table(cells, names), "PLOTS": "\n".join(plots(curve, cells, names)),
        "DATA": json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")}  # so that no text can end the script
    return re.sub(r"@([A-Z]+)@", lambda found: page[found[1]], PAGE)

# ----------------------------------------------------------- Evaluate
def run_paths(args):
    """{name: path} of the runs named, of those in a folder (in the order of their names), or of the whole pipeline."""
    if args.ablation and args.runs:
        fail("--ablation", f"it takes the place of run files such as {args.runs[0]}; give one or the other")
    if args.ablation:
        paths = sorted(path for path in Path(args.ablation).rglob("*.tsv") if not re.match(r"metrics\b|.*\.tmp-", path.name))
        names = [path.relative_to(args.ablation).with_suffix("").as_posix() for path in paths]
    else:
        made = (Path(args.work) / args.split / f"{stage}.tsv" for stage in STAGES)
        paths = list(map(Path, args.runs)) or [path for path in made if path.exists()]
        stems = [path.stem for path in paths]
        names = [path.stem if stems.count(path.stem) == 1 else path.as_posix() for path in paths]
    if not paths:
        fail(args.ablation or f"{args.work}/{args.split}", "no run there; name run files, or make some with 02_retrieve.py")
    return dict(zip(names, paths))

def outs_of(out, *kinds, also=()):
    """out, the files beside it that differ in their endings, and others; refused where one would overwrite another."""
    outs = [str(out), *(os.path.splitext(out)[0] + kind for kind in kinds), *also]
    if len(set(map(os.path.abspath, outs))) < len(outs):
        fail("--out", f"two of {', '.join(outs)} are one file; give a name with another ending")
    return outs

def save(path, content, args, inputs, **facts):
    """Write a text, or a table as TSV, whole or not at all."""
    content = content if isinstance(content, str) else content.to_csv(sep="\t", index=False, lineterminator="\n")
    with written(path, args, inputs, **facts) as temporary:
        temporary.write_text(content, encoding="utf-8")

def evaluate(args):
    """One row a run, with every measure asked for; runs come in the order given."""
    import pandas as pd

    names, paths = columns_of(args.measures, args.condensed), run_paths(args)
    outs = outs_of(args.out, ".json", ".cells.tsv", ".claims.tsv", ".curves.tsv", ".md", ".tex",
                   also=[args.report] if args.report else [])
    beside = [args.claims, args.corpus, *[args.aggregated] * Path(args.aggregated).is_file()] if args.report else []
    inputs = fingerprints(args.qrels, *paths.values(), *beside)
    if up_to_date(outs, args, inputs):
        texts = {"run": str, "measure": str}
        print(show(pd.read_csv(outs[2], sep="\t", dtype=texts, keep_default_na=False, na_values=[""]), names))
        return {"runs": json.loads(Path(outs[1]).read_text(encoding="utf-8"))}
    qrels = read_any(args.qrels, QRELS, args.qrels_format)
    if qrels.empty:
        fail(args.qrels, "no judged pair in it; give the judgements of this split")
    gold, parts, counts, curve, kept, warnings = gold_of(qrels), {}, {}, [], {}, []
    for name, path in paths.items():
        run, counts[name] = read_run(path, gold, args.format)
        parts[name], found = parts_of(run, qrels, gold, [*names, "R@5"], args.depth)
        curve += [(name, *row) for row in curves(found, gold)]
        share, kept[name] = float(judged(found, gold, 10)[0].mean()), run[run["rank"] <= 100] if args.report else None
        counts[name] |= {"judged_10": round(share, 4), "judged_pairs": int((found >= 0).sum())}
        if share < 0.5:
            warnings.append(f"{name}: {share:.0%} of its first 10 are judged, evidence without a label counts as none; "
                            "compare with --condensed, or have more judged: 06_evaluate.py pool")
            print(f"warning: {warnings[-1]}", file=sys.stderr)
    cells = compare(parts, names, args.resamples, args.seed)
    curve = pd.DataFrame(curve, columns=["run", "k", "recall", "success"])
    with np.errstate(invalid="ignore", divide="ignore"):
        per_claim = pd.concat(pd.DataFrame({"run": run, "claim_id": gold.claim_ids} | {
            name: part[0] / part[1] for name, part in parts[run].items() if name != "given"}) for run in parts)
    table = wide(cells, names)
    values = {run: {name: value for name, value in row.items() if not np.isnan(value)}
              for run, row in table.set_index("run").to_dict("index").items()}
    contents = [table, json.dumps(values, indent=1, ensure_ascii=False) + "\n", cells, per_claim, curve,
                markdown(cells, names), latex(cells, names)]
    if args.report:
        contents.append(report(args, kept, qrels, cells, names, curve, per_claim, warnings))
    for path, content in zip(outs, contents):
        save(path, content, args, inputs, counts=counts)
    print(show(cells, names))
    return {"made": outs, "runs": values}

# ----------------------------------------------------------- Pool and merge
def in_order(table, column, ids):
    """The table's rows in the order of ids; rows of one id stay as they are."""
    return table.sort_values(column, key=lambda one: one.map({name: place for place, name in enumerate(ids)}), kind="stable")

def refuse_strangers(path, table, args, claims, texts):
    """Fail where a run names claims or abstracts that --claims and --corpus lack."""
    for column, known in (("claim_id", set(claims["claim_id"])), ("abstract_id", texts)):
        if strange := [one for one in table[column] if one not in known]:
            fail(path, f"{column} {strange[0]} is not in {args.claims} and {args.corpus}, one of {len(strange)}; "
                       "give the files of this run")

def pool(args):
    """The unjudged pairs that several runs found, or any run high up, with their texts, to be labelled."""
    import pandas as pd

    inputs, pair = fingerprints(args.qrels, *args.runs, args.claims, args.corpus), QRELS[:2]
    if up_to_date([args.out], args, inputs):
        return {"made": []}
    claims, texts = read_table(args.claims, ["claim_id", "claim"]), read_corpus(args.corpus)
    qrels, runs = read_any(args.qrels, QRELS), []
    for path in args.runs:
        run = read_any(path, RUN, args.format)
        runs.append(run[run["rank"] <= max(args.depth, args.top)].assign(runs=run["rank"] <= args.depth))
        refuse_strangers(path, runs[-1], args, claims, texts)
    found = pd.concat(runs).groupby(pair, sort=False).agg(runs=("runs", "sum"), best_rank=("rank", "min")).reset_index()
    found = found[(found["runs"] >= args.min_runs) | (found["best_rank"] <= args.top)]
    table = found[~pd.MultiIndex.from_frame(found[pair]).isin(pd.MultiIndex.from_frame(qrels[pair]))]
    table = table.merge(claims[["claim_id", "claim"]], on="claim_id").assign(
        title=[str(texts[name].get("title") or "") for name in table["abstract_id"]], label="",
        abstract=[texts[name]["abstract"] for name in table["abstract_id"]])
    # in the order of the corpus: a pool in the order of ranks would tell its annotators what to think
    table = in_order(in_order(table, "abstract_id", texts), "claim_id", claims["claim_id"])
    table = table[["claim_id", "claim", "abstract_id", "title", "abstract", "label", "runs", "best_rank"]]
    breaks = dict.fromkeys(("claim", "title", "abstract"), {r"\r\n?": "\n"})  # a lone \r would end the row when read back
    table = table.replace(breaks, regex=True)
    save(args.out, table, args, inputs, pairs=len(table))
    print(f"{args.out}: {len(table)} pairs to label; {len(found) - len(table)} more are judged already")
    return {"made": [args.out], "pairs": len(table)}

def merge(args):
    """Qrels with a labelled pool folded in; a pair that was judged otherwise before is refused."""
    import pandas as pd

    inputs = fingerprints(args.qrels, args.pool)
    if up_to_date([args.out], args, inputs):
        return {"made": []}
    qrels = read_any(args.qrels, QRELS)
    reject(args.qrels, qrels, qrels["label"] == "RELEVANT", "relevance without a stance, as TREC's qrels have it, cannot be "
           "merged with stances; give qrels with the labels " + ", ".join(LABELS))
    table = read_table(args.pool, QRELS[:2])
    answers = check_table(args.pool, table[table["label"] != ""] if "label" in table else table, QRELS)
    answers = answers.join(qrels.set_index(QRELS[:2])["label"].rename("before"), on=QRELS[:2])
    reject(args.pool, answers.fillna({"before": ""}), answers["before"].notna() & (answers["before"] != answers["label"]),
           "claim {claim_id} abstract {abstract_id} is {label} here and {before} in the qrels; decide, and mend one of them")
    merged = pd.concat([qrels, answers[answers["before"].isna()]])[QRELS]
    merged = in_order(merged, "claim_id", merged["claim_id"].unique())
    counts = {label: [int((some["label"] == label).sum()) for some in (qrels, merged)] for label in merged["label"].unique()}
    counts["claims with evidence"] = [some["claim_id"][some["label"] != "NEI"].nunique() for some in (qrels, merged)]
    save(args.out, merged, args, inputs, counts=counts)
    print(*(f"{what}: {old} -> {new}" for what, (old, new) in counts.items()), sep="\n")
    return {"made": [args.out], "added": len(merged) - len(qrels), "without_label": len(table) - len(answers)}

# ----------------------------------------------------------- Submission
TASKS = {  # the name of the file in the zip, its columns, and abstracts a claim (10 in 2026, too, though R@5 counts)
    "climatecheck2025": ("predictions.csv", RUN[:3], 10), "climatecheck2026": ("predictions.csv", RUN[:3], 10),
    "checkthat4b": ("predictions.tsv", ["post_id", "preds"], 5),
}
SPELLING = {"SUPPORTS": "Supports", "REFUTES": "Refutes", "NEI": "Not Enough Information"}  # as in ClimateCheck's data

def submission(args):
    """A run as the file that a shared task asks for, and its zip; what the task would refuse is refused here."""
    name, columns, depth = TASKS[args.task]
    depth, out = args.top_k or depth, (Path(args.out) if args.out else Path(args.work) / args.split / args.task / name)
    outs, inputs = outs_of(out, ".zip"), fingerprints(args.run, args.claims, args.corpus)
    if up_to_date(outs, args, inputs):
        return {"made": []}
    claims, texts = read_table(args.claims, ["claim_id", "claim"]), read_corpus(args.corpus)
    run = read_any(args.run, RUN, args.format)
    run = in_order(run[run["rank"] <= depth], "claim_id", claims["claim_id"])
    refuse_strangers(args.run, run, args, claims, texts)
    rows = run.groupby("claim_id").size().reindex(claims["claim_id"], fill_value=0)
    if len(short := rows[rows < depth]):
        fail(args.run, f"claim {short.index[0]} has {short.iloc[0]} abstracts, {len(short)} claims have fewer than {depth}; "
                       "make a longer run, or ask for fewer with --top-k")
    if args.task == "checkthat4b":
        lists = run.groupby("claim_id", sort=False)["abstract_id"].agg(lambda ids: str(list(ids)))
        run = lists.rename_axis("post_id").rename("preds").reset_index()
    elif "label" in run:
        run, columns = run.assign(label=run["label"].map(SPELLING)), [*columns, "label"]
    text = run[columns].to_csv(sep="\t" if name.endswith("tsv") else ",", index=False, lineterminator="\n")
    save(out, text, args, inputs, rows=len(run))
    with written(outs[1], args, inputs, rows=len(run)) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        archive.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED)  # without a time: the same run, the same zip
    print(f"{out}, {outs[1]}: {len(claims)} claims, {depth} abstracts each, columns {', '.join(columns)}")
    return {"made": outs, "claims": len(claims), "rows": len(run)}

# ----------------------------------------------------------- Main
def text_flags(add):
    add("--qrels", default="{data}/qrels.{split}.tsv", help="the judged pairs")
    add("--claims", default="{data}/claims.{split}.tsv", help="the claims")
    add("--corpus", default="{data}/corpus.jsonl", help="the abstracts")
    add("--format", choices=FORMATS, default="auto", help="of runs; auto: by their first line")

def evaluate_flags(add):
    add("runs", nargs="*", help="runs and verdicts, the first being what others are compared with; without any, those of "
                                "{work}/{split} in the order of the pipeline")
    add("--ablation", help="a folder of runs instead; runs of one subfolder stand together")
    add("--measures", nargs="+", default=["climatecheck2025"], metavar="MEASURE",
        help=f"{', '.join(MEASURES)}, single columns of them, or any measure of ir-measures")
    add("--depth", type=at_least(0), default=10,
        help="ranks of a claim that count as submitted, for B-Pref, P, R and F1; 0: all")
    add("--condensed", action="store_true", help="measures by rank once more, without unjudged abstracts")
    add("--resamples", type=at_least(100), default=2000, help="of claims, for intervals and p-values")
    add("--report", metavar="FILE.html", help="write a page with tables, plots and every claim, too")
    add("--aggregated", default="{work}/{split}/claims.jsonl", help="report: what 05_classify.py --aggregate wrote")
    add("--out", default="{work}/{split}/metrics.tsv", help="the table; the other files lie beside it")
    add("--qrels-format", choices=FORMATS, default="auto", help="of the qrels")
    text_flags(add)

def pool_flags(add):
    add("runs", nargs="+", help="runs to pool")
    add("--depth", type=at_least(1), default=10, help="ranks looked at")
    add("--min-runs", type=at_least(1), default=1, help="runs that must have a pair to that depth")
    add("--top", type=at_least(0), default=0, help="a pair up to this rank of any run is taken, too")
    add("--out", default="{work}/{split}/pool.tsv", help="the pairs, with an empty column label")
    text_flags(add)

def merge_flags(add):
    add("pool", help="a pool with its labels filled in")
    add("--qrels", default="{data}/qrels.{split}.tsv", help="the judged pairs so far")
    add("--out", default="{work}/{split}/qrels.tsv", help="both together")

def submission_flags(add):
    add("run", nargs="?", default="{work}/{split}/verdicts.tsv", help="run or verdicts")
    add("--task", choices=TASKS, default="climatecheck2025", help="whose file")
    add("--top-k", type=at_least(0), default=0, help="abstracts a claim; 0: as the task asks")
    add("--out", help="the file, its zip beside it; default: {work}/{split}/TASK/, with the name that the task asks for")
    text_flags(add)

def main():
    run_job(__doc__, {"evaluate": (evaluate, evaluate_flags), "pool": (pool, pool_flags), "merge": (merge, merge_flags),
                      "submission": (submission, submission_flags)})

if __name__ == "__main__":
    main()
