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
    python 06_evaluate.py pool work/demo/test/{hybrid,rerank}.tsv --min-runs 2
    python 06_evaluate.py merge work/demo/test/pool.tsv
    python 06_evaluate.py submission work/demo/test/verdicts.tsv --task climatecheck2025
"""
import argparse
import atexit
import contextlib
import csv
import gzip
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
DEPTHS = (1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 300, 500, 1000)  # Kiepura & Lam 2025, Table 7
CLAIMS, QRELS = ["claim_id", "claim"], ["claim_id", "abstract_id", "label"]
TREC = {4: ["claim_id", "q0", "abstract_id", "relevance"],  # by number of fields
        6: ["claim_id", "q0", "abstract_id", "rank", "score", "tag"]}
RENAMED = {"abstract_original_index": "abstract_id", "annotation": "label",  # ClimateCheck
           "post_id": "claim_id", "cord_uid": "abstract_id", "tweet_text": "claim"}  # CheckThat!
RELEVANT = "RELEVANT"  # where relevance is judged, not stance: TREC, CheckThat!
SPELT = {"SUPPORTS": "SUPPORTS SUPPORT SUPPORTED ENTAILMENT",
         "REFUTES": "REFUTES REFUTE REFUTED CONTRADICT CONTRADICTION",
         "NEI": "NEI NOT_ENOUGH_INFORMATION NOT_ENOUGH_INFO NOTENOUGHINFO NEUTRAL"}
TASKS = {"climatecheck2025": 10, "climatecheck2026": 10, "checkthat4b": 5}  # abstracts a claim
SPELLING = {"SUPPORTS": "Supports", "REFUTES": "Refutes", "NEI": "Not Enough Information"}

# --- helpers (same in all six scripts)
LABELS = ("SUPPORTS", "REFUTES", "NEI")
RUN = ["claim_id", "abstract_id", "rank", "score"]

def fail(where, what):
    """Bad input or usage: one line on stderr, exit status 2."""
    line = " ".join(f"error: {where}: {what}".split())
    print("".join(c if c.isprintable() else "?" for c in line), file=sys.stderr)
    sys.exit(2)

def read_table(path, columns, **known):
    """Read a TSV file with a header as strings, a run by claim and rank, rank and score as numbers.

    known: the values that a column may hold. The first bad row ends the script, with its line.
    """
    import pandas as pd
    rows, line = [], 1
    try:
        with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
            reader = csv.reader(file, delimiter="\t", strict=True)
            header = next(reader, [])
            line = reader.line_num + 1
            for row in reader:
                if any(row) and len(row) != len(header):
                    raise csv.Error(f"{len(row)} fields, not {len(header)}")
                if any("\t" in field and "\n" in field for field in row):
                    raise csv.Error("a quotation mark is not closed")
                if any(row):
                    rows.append([line, *row])
                line = reader.line_num + 1
    except csv.Error as error:
        fail(f"{path}:{line}", f"{error}; check its quotation marks; see 06_evaluate.py convert")
    if not set(columns) <= set(header) or len(set(header)) < len(header):
        fail(f"{path}:1", f"columns {header}, wanted {columns}; see 06_evaluate.py convert")
    table = pd.DataFrame(rows, columns=[0, *header]).set_index(0).astype(str)
    ids = [column for column in columns if column.endswith("_id")]
    bad = {f"{column} is empty": table[column].str.strip() == "" for column in columns}
    bad |= {f"unknown {column}": ~table[column].isin(known[column]) for column in known}
    bad["there is an earlier row for this"] = table.duplicated(ids)
    if "rank" in columns:
        claim = table["claim_id"].factorize()[0]
        for column in ("rank", "score"):
            table[column] = pd.to_numeric(table[column], errors="coerce").astype(float)
        bad["score is not a finite number"] = ~np.isfinite(table["score"])
        bad["ranks are not 1, 2, 3"] = table["rank"] != table.groupby(claim)["rank"].rank("first")
    for what, rows in bad.items():
        if rows.any():
            line = rows.idxmax()
            fail(f"{path}:{line}", f"{what}: {' '.join(table.loc[line, ids])}; fix the row")
    if "rank" in columns:
        table = table.iloc[np.lexsort((table["rank"], claim))].astype({"rank": int})
    return table.reset_index(drop=True)

def read_corpus(path):
    """Read {abstract_id: record} in file order; an abstract that is not a text becomes ""."""
    corpus, empty = {}, 0
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                if "\\ud" in line.lower():  # lone surrogates become U+FFFD
                    text = json.dumps(record, ensure_ascii=False).encode("utf-16", "surrogatepass")
                    record = json.loads(text.decode("utf-16", "replace"))
                name, text = str(record["abstract_id"]), record.get("abstract")
            except (ValueError, KeyError, TypeError, RecursionError):
                fail(f"{path}:{number}", "not a JSON object with an abstract_id; fix the line")
            if not name.strip() or name in corpus:
                fail(f"{path}:{number}", f"abstract_id {name!r} is empty or not unique; fix it")
            corpus[name] = record | {"abstract": text if isinstance(text, str) else ""}
            empty += not corpus[name]["abstract"].strip()
    if empty:
        print(f"warning: {path}: {empty} abstracts without text, kept as empty", file=sys.stderr)
    return corpus
# --- end of helpers

# --- helpers for outputs (same in all six scripts)
NEUTRAL = {"force", "out", "device", "batch_size", "concurrency"}  # no byte depends on these
PACKAGES = ("numpy", "pandas", "torch", "transformers", "sentence_transformers", "bm25s", "openai")
START, LOCKS = time.monotonic(), []

def sha256_of(*paths, models=()):
    """Return {path: sha256} of files, indexes (meta.json), models (config.json, else name)."""
    prints = {}
    for path in map(Path, (*paths, *models)):
        marks = [path / "meta.json", Path(f"{path}.meta.json"), path / "config.json"]
        mark = path if path.is_file() else next(filter(Path.is_file, marks), os.devnull)
        if mark == os.devnull and str(path) not in map(str, models):
            fail(path, "no such file or index; make it with the script before this one")
        with open(mark, "rb") as file:
            prints[str(path)] = hashlib.file_digest(file, "sha256").hexdigest()
    return prints

def task_of(args, inputs):
    """Return what decides the bytes of an output: arguments and inputs."""
    arguments = {name: value for name, value in vars(args).items() if name not in NEUTRAL}
    return json.loads(json.dumps({"arguments": arguments, "inputs": inputs}))

def up_to_date(paths, args, inputs):
    """Return whether this very task made all paths. Locks them until this process ends."""
    from filelock import FileLock, Timeout
    task, read = task_of(args, inputs), {Path(path).resolve() for path in inputs}
    same = not args.force
    for path in map(Path, paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock, meta = FileLock(f"{path}.lock"), Path(f"{path}.meta.json")
        try:
            LOCKS.append(lock.acquire(timeout=0))
        except Timeout:
            fail(path, "another command is making it; wait until that one ends")
        atexit.register(Path(lock.lock_file).unlink, missing_ok=True)
        made = {}
        with contextlib.suppress(OSError, ValueError):
            made = json.loads(meta.read_bytes())
        ours = made.get("arguments", {}).get("job") == args.job
        if path.resolve() in read or (path.is_dir() and any(path.iterdir()) and not ours):
            fail(path, "this command reads it, or did not make it; give another --out")
        same = same and path.exists() and task.items() <= made.items()
    for path in paths if same else ():
        remove(f"{path}.parts")  # left by a process that was killed at its very end
        print(f"up to date: {path}")
    return same

@contextlib.contextmanager
def written(path, args, inputs, **facts):
    """Yield a temporary path. What is made there becomes path, whole, with its provenance."""
    path, new, old = (Path(f"{path}{end}") for end in ("", ".tmp", ".tmp.old"))
    meta, new_meta = Path(f"{path}.meta.json"), Path(f"{new}.meta.json")
    remove(new, old)
    try:
        yield new
        modules = {name: sys.modules[name].__version__ for name in PACKAGES if name in sys.modules}
        made = task_of(args, inputs) | {"command": sys.argv, "packages": modules} | facts | spent()
        new_meta.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        meta.unlink(missing_ok=True)  # it would vouch for other bytes
        if path.is_dir():
            path.rename(old)
        new.rename(path)
        new_meta.rename(meta)
    finally:
        remove(new, new_meta, old)

def remove(*paths):
    """Delete files and folders, where they exist."""
    for path in map(Path, paths):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

def spent():
    """Return seconds and peak memory (MiB) of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak //= 1024 if sys.platform == "linux" else 1024**2
    return {"seconds": round(time.monotonic() - START, 1), "peak_mib": peak}
# --- end of helpers for outputs

# --- command line (same in all six scripts)
if not sys.stderr.isatty():  # tqdm prints a plain line every ten seconds
    os.environ.setdefault("TQDM_MININTERVAL", "10")
    os.environ.setdefault("TQDM_BAR_FORMAT", "{desc}: {n_fmt}/{total_fmt} [{elapsed}]\n")

class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The docstring as it stands, and every default."""

def command_line(*jobs):
    """Return (parser, shared flags, words behind the job: the first word, by default jobs[0])."""
    words = sys.argv[1:]
    job = words.pop(0) if words and words[0] in jobs else jobs[0]
    parser = argparse.ArgumentParser(
        description=sys.modules["__main__"].__doc__, formatter_class=Help, usage=argparse.SUPPRESS,
        allow_abbrev=False)
    parser.error = lambda message: fail(Path(sys.argv[0]).name, f"{message}; see --help")
    parser.set_defaults(job=job)
    add = parser.add_argument
    add("--data", default="data/demo", help="folder of corpus, claims and qrels")
    add("--work", default="work/demo", help="folder of everything made from them")
    add("--split", default="train" if job in ("train", "mine") else "test", help="which claims")
    add("--seed", type=int, default=13, help="of every random choice")
    add("--device", nargs="+", default=["auto"], help="cpu, cuda, mps, or several: cuda:0 cuda:1")
    add("--force", action="store_true", help="make outputs again that are up to date")
    shared, _ = parser.parse_known_args([word for word in words if word not in ("-h", "--help")])
    return parser, shared, words

def finish(job, args):
    """Run the job and print its result as JSON; a fault of the disk is one line, Ctrl-C silence."""
    args.job = f"{Path(sys.argv[0]).name} {args.job}"
    try:
        print(json.dumps(job(args) | spent(), ensure_ascii=False))
    except KeyboardInterrupt:
        os._exit(130)  # without tearing libraries down, which takes seconds
    except OSError as error:
        fail(error.filename or args.job, f"{error.strerror or error}; check path, rights and space")
# --- end of command line


# ---------------------------------------------------------------- Tables of any format
def read_rows(path, problem=None):
    """Read a table of any format as strings, under its own column names, indexed by line.

    problem: why it cannot be read with quotation marks; it is then read without.
    """
    import pandas as pd
    opened = gzip.open if Path(path).suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", errors="replace", newline="") as file:
            first, text = file.readline(), file.read()
    except (EOFError, gzip.zlib.error) as error:
        fail(path, f"damaged: {error}")
    delimiter = "\t" if "\t" in first else ","
    names = [name.strip('" \r\n') for name in first.split(delimiter)]
    header = bool({"claim_id", "post_id"} & set(names))
    if not header:
        names, delimiter = TREC.get(len(first.split())), " "
        text = "\n".join(" ".join(line.split()) for line in (first + text).split("\n"))
    if not names:
        fail(f"{path}:1", "no column claim_id or post_id, nor the 4 or 6 fields of TREC")
    quoting = csv.QUOTE_NONE if problem or not header else csv.QUOTE_MINIMAL
    if '"' not in text and text.count(delimiter) == (len(names) - 1) * text.count("\n"):
        with contextlib.suppress(ValueError):  # pandas is fast, but fills up short rows
            table = pd.read_csv(io.StringIO(text), sep=delimiter, names=names, dtype=str,
                                na_filter=False, quoting=csv.QUOTE_NONE)
            if isinstance(table.index, pd.RangeIndex):
                return table.set_axis(table.index + 1 + header)
    rows, lines, start = [], [], 1 + header
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, quoting=quoting,
                        skipinitialspace=delimiter == ",", strict=True)
    try:
        for row in reader:
            if any(row):
                if len(row) != len(names):
                    raise csv.Error(f"{len(row)} fields, not {len(names)}")
                if any("\t" in field and "\n" in field for field in row):
                    raise csv.Error("a quotation mark is not closed")
                rows.append(row)
                lines.append(start)
            start = reader.line_num + 1 + header
    except csv.Error as error:
        if quoting == csv.QUOTE_MINIMAL:
            return read_rows(path, f"{start}: {error}")
        fail(f"{path}:{problem or f'{start}: {error}'}", "fix the row")
    if problem:
        print(f"warning: {path}:{problem}; read without quotation marks", file=sys.stderr)
    return pd.DataFrame(rows, index=lines, columns=names, dtype=str)

def reject(path, table, bad, what):
    """End the script at the first row of which bad holds."""
    if np.any(bad):
        row = table.iloc[np.argmax(bad)]
        values = [str(row[column]) for column in [*RUN, "label"] if column in row]
        fail(f"{path}:{row.name}", f"{what}: {' '.join(values)}; fix the row")

def translated(path, table):
    """Return a table of any format under our column names, with our ranks, scores and labels."""
    import pandas as pd
    relevant = "cord_uid" in table  # CheckThat!: the paper that a post is about
    table = table.rename(columns=RENAMED)
    if not table.columns.is_unique:
        fail(f"{path}:1", f"two columns mean the same: {', '.join(table)}; remove one")
    if "preds" in table:  # CheckThat!: a list of ids in the order of rank
        reject(path, table, table.duplicated("claim_id"), "there is an earlier list for this post")
        lists = table["preds"].str.findall(r"[^\s\[\]'\",]+")
        table = table.assign(abstract_id=lists).explode("abstract_id").dropna()
        table["rank"] = (table.groupby("claim_id").cumcount() + 1).astype(str)
    if "tag" in table:  # trec_eval ranks by score, whatever the ranks say
        score = pd.to_numeric(table["score"], errors="coerce").astype(float)
        table["rank"] = score.groupby(table["claim_id"]).rank("first", ascending=False).astype(str)
    if "rank" in table and "score" not in table:
        table["score"] = "-" + table["rank"]
    if "relevance" in table and "q0" in table:
        relevance = pd.to_numeric(table["relevance"], errors="coerce")
        reject(path, table, relevance.isna(), "the relevance is not a number")
        table["label"] = np.where(relevance > 0, RELEVANT, "NEI")
    elif "label" in table:
        labels = table["label"].str.strip().str.upper().str.replace(" ", "_")
        spelt = {name: label for label, names in SPELT.items() for name in names.split()}
        reject(path, table, ~labels.isin([*spelt, ""]), f"the label is none of {', '.join(LABELS)}")
        table["label"] = labels.replace(spelt)
    elif relevant:
        table["label"] = RELEVANT
    return table

def checked(path, table, columns):
    """Return a translated table, checked; a run comes by claim and rank, as numbers."""
    import pandas as pd
    if not set(columns) <= set(table):
        fail(f"{path}:1", f"columns {', '.join(table)}, wanted {', '.join(columns)}")
    for column in {*columns, "label"} & set(table):
        reject(path, table, table[column].str.strip() == "", f"{column} is empty")
    ids = [column for column in columns if column.endswith("_id")]
    reject(path, table, table.duplicated(ids), "there is an earlier row for this")
    if "rank" not in columns:
        return table
    claim = table["claim_id"].factorize()[0]
    numbers = table[["rank", "score"]].apply(pd.to_numeric, errors="coerce").astype(float)
    expected = numbers["rank"].groupby(claim).rank("first")
    reject(path, table, ~np.isfinite(numbers["score"]), "the score is not a finite number")
    reject(path, table, numbers["rank"] != expected, "the ranks are not 1, 2, 3")
    table = table.assign(rank=expected.astype(int), score=numbers["score"])
    return table.iloc[np.lexsort((expected, claim))]

def read_any(path, columns):
    """Read a run, verdicts, qrels or claims of any format."""
    return checked(path, translated(path, read_rows(path)), columns)

def read_run(path, gold):
    """Return the rows of a run for the claims of the qrels, and counts of claims not in both."""
    run = read_any(path, RUN)
    known = run["claim_id"].isin(gold.claims)
    if not known.any():
        fail(path, f"none of its claims is in the qrels, such as {gold.claims[0]}; fix either")
    missing = len(gold.claims) - run["claim_id"][known].nunique()
    unknown = run["claim_id"][~known].nunique()
    if missing or unknown:
        print(f"warning: {path}: {missing} claims of the qrels have no row (0 in recall, left out "
              f"of B-Pref), {unknown} others are left out", file=sys.stderr)
    return run[known], {"claims_missing": missing, "claims_unknown": unknown}

# ---------------------------------------------------------------- Judgements by rank
def gold_of(qrels):
    """Return claims, judged pairs with labels (places in LABELS), and R and N of each claim.

    R, N: how many abstracts are relevant and judged non-relevant. stance: is it judged?
    """
    import pandas as pd
    relevant = (qrels["label"] != "NEI").groupby(qrels["claim_id"], sort=False)
    R, both = relevant.sum(), relevant.size()
    labels = qrels["label"].replace(RELEVANT, LABELS[0]).map(LABELS.index)
    return SimpleNamespace(
        claims=R.index, pairs=pd.MultiIndex.from_frame(qrels[QRELS[:2]]), labels=labels.to_numpy(),
        R=R.to_numpy(float), N=(both - R).to_numpy(), stance=RELEVANT not in set(qrels["label"]))

def judge(run, gold):
    """Return gold and given labels by rank, two arrays [claims, depth] of places in LABELS."""
    import pandas as pd
    rows, ranks = gold.claims.get_indexer(run["claim_id"]), run["rank"].to_numpy() - 1
    found = np.full((len(gold.claims), ranks.max() + 1), NOTHING, np.int8)
    said = found.copy()
    places = gold.pairs.get_indexer(pd.MultiIndex.from_frame(run[QRELS[:2]]))
    found[rows, ranks] = np.where(places < 0, UNJUDGED, gold.labels[places])
    if "label" in run and gold.stance:
        said[rows, ranks] = run["label"].map(LABELS.index)
    return found, said

# ---------------------------------------------------------------- Measures of a claim
# Each is a fraction by claim: (numerator, denominator), both [claims]. A run's value is the sum of
# its numerators / the sum of its denominators; a claim with denominator 0 does not count.
def evidence(labels):
    """Where a label is SUPPORTS or REFUTES."""
    return (labels == 0) | (labels == 1)

def mean_of(values, counted):
    """The fraction of a mean over the claims that count."""
    return np.where(counted, values, 0.0), counted.astype(float)

def recall(found, gold, k):
    """Share of a claim's evidence in the first k ranks; a claim without rows has 0."""
    return mean_of(evidence(found[:, :k]).sum(1) / np.maximum(gold.R, 1), gold.R > 0)

def pooled_recall(found, gold, k):
    """Share of all evidence pairs in the first k ranks (+VeriRel, eq. 7)."""
    return evidence(found[:, :k]).sum(1), gold.R

def reciprocal_rank(found, gold, k):
    """1 / rank of the first evidence, 0 if it is not in the first k ranks."""
    hits = evidence(found[:, :k])
    return mean_of(hits.any(1) / (hits.argmax(1) + 1), gold.R > 0)

def success(found, gold, k):
    """1 if there is evidence in the first k ranks."""
    return mean_of(evidence(found[:, :k]).any(1), gold.R > 0)

def bpref(found, gold, k):
    """B-Pref of the ClimateCheck organisers over the first k ranks (0: all).

    Each relevant abstract adds (1 - n / R) / R, with n judged non-relevant ones above it, at most
    R. Submitted claims with both kinds of judgement count. trec_eval has n / min(R, N) inside.
    """
    found, R = found[:, :k or None], np.maximum(gold.R, 1)[:, None]
    n = np.minimum((found == 2).cumsum(1), R)
    counted = (gold.R > 0) & (gold.N > 0) & (found[:, 0] != NOTHING)
    return mean_of((evidence(found) * (1 - n / R)).sum(1) / R[:, 0], counted)

def judged(found, gold, k):
    """Share of the first k abstracts that are judged."""
    submitted = np.maximum((found[:, :k] != NOTHING).sum(1), 1)
    return mean_of((found[:, :k] >= 0).sum(1) / submitted, np.full(len(found), True))

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
    """Confusion matrix of each claim over its judged pairs, [claims, 3 gold x 3 given labels]."""
    table = np.zeros((len(found), 9))
    rows, ranks = np.nonzero((found >= 0) & (said >= 0))
    np.add.at(table, (rows, found[rows, ranks] * 3 + said[rows, ranks]), 1)
    return table

def weighted_prf(table):
    """Precision, recall and F1 of confusion matrices [..., gold, given], weighted by support.

    As scikit-learn's with average="weighted", zero_division=0.
    """
    right = np.diagonal(table, axis1=-2, axis2=-1)
    support, given = table.sum(-1), table.sum(-2)
    scores = (right / np.maximum(given, 1), right / np.maximum(support, 1),
              2 * right / np.maximum(support + given, 1))
    return [(score * support).sum(-1) / support.sum(-1) for score in scores]

def trec_fractions(names, run, qrels, gold):
    """{name: fraction} of ir-measures over all claims; ranks stand in for scores."""
    import ir_measures
    import pandas as pd
    tables = []  # ERR wants claims that are numbers
    for table, column, values in ((qrels, "relevance", (qrels["label"] != "NEI").astype(int)),
                                  (run, "score", -run["rank"].astype(float))):
        claims = gold.claims.get_indexer(table["claim_id"]).astype(str)
        columns = {"query_id": claims, "doc_id": table["abstract_id"], column: values}
        tables.append(pd.DataFrame(columns))
    fractions = {}
    for name in names:
        values = np.zeros(len(gold.R))
        try:
            measure = ir_measures.parse_measure({"B-Pref (trec_eval)": "Bpref"}.get(name, name))
            if str(measure).endswith("@0"):
                raise ValueError  # trec_eval would abort the process
            for one in ir_measures.iter_calc([measure], *tables):
                values[int(one.query_id)] = one.value
        except Exception:  # of many kinds: no such measure, parameter or package
            fail("--measures", f"cannot compute {name!r}; take {', '.join([*MEASURES, *COMPOSED])},"
                 f" {'@10, '.join(RANKED)}@10, or one of ir-measures, such as AP or P@5")
        fractions[name] = values, np.ones(len(gold.R))
    return fractions

# ---------------------------------------------------------------- Measures of a run
def parts_of(run, qrels, gold, names, depth=10):
    """Return {name: fraction} of what measures are made of, and the gold labels by rank.

    "given" holds the confusion matrices. They and B-Pref see what was submitted: the first depth
    ranks (0: all). Success@1 is for McNemar's test.
    """
    needed = ["Success@1"]
    for name in names:
        needed += COMPOSED[name][1] if name in COMPOSED else [name]
    found, said = judge(run, gold)
    levels = abstract_level(found, said, gold) | {"B-Pref": bpref(found, gold, depth)}
    parts = {"given": confusion(found[:, :depth or None], said[:, :depth or None])}
    for name in dict.fromkeys(needed):
        at_k = re.fullmatch(rf"({'|'.join(RANKED)})@([1-9]\d*)", name)
        if at_k:
            parts[name] = RANKED[at_k[1]](found, gold, int(at_k[2]))
        elif name in levels:
            parts[name] = levels[name]
    theirs = [name for name in needed if name not in {*parts, "P", "R", "F1"}]
    return parts | (trec_fractions(theirs, run, qrels, gold) if theirs else {}), found

def packed(parts):
    """The parts side by side, [claims, columns]: 9 of the confusion matrix, 2 of each fraction."""
    fractions = [column for name in parts if name != "given" for column in parts[name]]
    return np.column_stack([parts["given"], *fractions])

def measures_of(sums, parts, names):
    """Values of measures [..., names] from sums of parts over claims [..., columns]."""
    with np.errstate(invalid="ignore", divide="ignore"):
        scores = weighted_prf(sums[..., :9].reshape(*sums.shape[:-1], 3, 3))
        quotients = np.moveaxis(sums[..., 9::2] / sums[..., 10::2], -1, 0)
    order = [name for name in parts if name != "given"]
    known = dict(zip(["P", "R", "F1", *order], [*scores, *quotients]))
    for name, (how, members) in COMPOSED.items():
        if set(members) <= set(known):
            known[name] = how([known[member] for member in members], axis=0)
    return np.stack([known[name] for name in names], axis=-1)

# ---------------------------------------------------------------- Comparison of runs
def resampled(tables, resamples, seed, weigh):
    """Yield sums over claims with random weights, 100 draws at a time: [draws, runs, columns]."""
    rng, (runs, claims, columns) = np.random.default_rng(seed), tables.shape
    flat = tables.transpose(1, 0, 2).reshape(claims, runs * columns)
    for begin in range(0, resamples, 100):
        weights = weigh(rng, min(100, resamples - begin), claims)
        yield (weights @ flat).reshape(-1, runs, columns)

def bootstrap(rng, draws, claims):
    """How often each claim is drawn, with replacement (Efron 1979): [draws, claims]."""
    return rng.multinomial(claims, np.full(claims, 1 / claims), size=draws).astype(float)

def swaps(rng, draws, claims):
    """For which claims two runs change places (Fisher): [draws, claims]."""
    return rng.integers(0, 2, size=(draws, claims)).astype(float)

def intervals(tables, parts, names, resamples, seed):
    """95 % percentile bootstrap intervals over claims, [2, runs, names]."""
    draws = [measures_of(sums, parts, names)
             for sums in resampled(tables, resamples, seed, bootstrap)]
    values = np.concatenate(draws)
    undefined = np.isnan(values).all(0)
    bounds = np.nanquantile(np.where(undefined, 0, values), (0.025, 0.975), axis=0)
    return np.where(undefined, np.nan, bounds)

def randomisation(tables, parts, names, resamples, seed):
    """Two-sided p of the difference from the first run, [runs, names].

    Paired randomisation over claims (Smucker et al. 2007): how often swapping two runs' results
    claim by claim gives as large a difference, the observed one included.
    """
    sums, beyond = tables.sum(1), 1
    values = measures_of(sums, parts, names)
    seen = np.abs(values - values[0])
    for moved in resampled(tables - tables[:1], resamples, seed, swaps):
        these, those = (measures_of(some, parts, names) for some in (sums - moved, sums[0] + moved))
        beyond = beyond + (np.abs(these - those) >= seen - 1e-12).sum(0)
    return np.where(np.isnan(seen), np.nan, beyond / (resamples + 1))

def wilcoxon(this, that):
    """Two-sided p of the signed-rank test over the claims that count in both runs."""
    from scipy import stats
    both = (this[1] > 0) & (that[1] > 0)
    apart = this[0][both] / this[1][both] - that[0][both] / that[1][both]
    return float(stats.wilcoxon(apart).pvalue) if apart.any() else 1.0

def mcnemar(this, that):
    """Two-sided exact p that two runs have evidence on top equally often."""
    from scipy import stats
    gained, lost = int((this[0] > that[0]).sum()), int((this[0] < that[0]).sum())
    return float(stats.binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0

def holm(values):
    """p-values corrected for several comparisons (Holm 1979); NaN does not count."""
    values = np.asarray(values, float)
    order = np.argsort(values)[: (~np.isnan(values)).sum()]
    stepped = np.maximum.accumulate(values[order] * np.arange(len(order), 0, -1))
    corrected = np.full(len(values), np.nan)
    corrected[order] = np.minimum(stepped, 1)
    return corrected

def compare(parts, names, resamples, seed):
    """Return a row a run and measure: value, interval, difference from the first run, p-values."""
    import pandas as pd
    names, (first, *others) = list(dict.fromkeys([*names, "Success@1"])), parts.values()
    tables, cells = np.stack([packed(part) for part in parts.values()]), []
    values = measures_of(tables.sum(1), first, names)
    low, high = intervals(tables, first, names, resamples, seed)
    p = randomisation(tables, first, names, resamples, seed)
    differences, p[0] = values - values[0], np.nan
    differences[0] = np.nan
    for place, name in enumerate(names):
        table = pd.DataFrame({
            "run": list(parts), "measure": name, "value": values[:, place],
            "low": low[:, place], "high": high[:, place], "difference": differences[:, place],
            "p_randomisation": p[:, place], "p_holm": holm(p[:, place]),
            "p_wilcoxon": np.nan, "p_mcnemar": np.nan})
        for row, part in enumerate(others, 1):
            if name in part and not np.isnan(values[row, place]):
                table.loc[row, "p_wilcoxon"] = wilcoxon(part[name], first[name])
            if name == "Success@1":
                table.loc[row, "p_mcnemar"] = mcnemar(part[name], first[name])
        cells.append(table)
    return pd.concat(cells)

def curves(found, gold):
    """Return rows of k, recall at k, success at k."""
    claims = max((gold.R > 0).sum(), 1)
    return [(k, recall(found, gold, k)[0].sum() / claims, success(found, gold, k)[0].sum() / claims)
            for k in DEPTHS if k <= found.shape[1]]

# ---------------------------------------------------------------- Tables
def wide(cells, field="value"):
    """A row a run, a column a measure; measures that no run has are left out."""
    table = cells.pivot(index="run", columns="measure", values=field).rename_axis(columns=None)
    table = table.reindex(index=cells["run"].unique(), columns=cells["measure"].unique())
    return table if field == "p_holm" else table.dropna(axis=1, how="all")

def texts_of(cells, first="{}", second="{}", sign="†"):
    """The table as texts: patterns for the best and second of a column, a sign for significance."""
    values = wide(cells)
    significant = wide(cells, "p_holm")[values.columns] < 0.05
    texts = values.map("{:.3f}".format) + np.where(significant, sign, "")
    places = values.round(3).rank(method="dense", ascending=False)
    best = (places == 1) & (places.max() > 1)  # where all are equal, none is best
    texts = texts.mask(best, texts.map(first.format))
    return texts.mask(places == 2, texts.map(second.format)).mask(values.isna(), "-").reset_index()

def markdown(cells):
    """The table in Markdown."""
    texts = texts_of(cells, "**{}**", "*{}*")
    texts["run"] = texts["run"].str.replace(r"([\\`*_\[\]<>|&~$])", r"\\\1", regex=True)
    rows = [list(texts), ["---"] * texts.shape[1], *texts.to_numpy()]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", NOTES, ""])

def styled(texts, escape):
    """Return a pandas Styler with the names of runs and measures escaped."""
    styler = texts.style.hide(axis="index").format(escape=escape, subset=["run"])
    return styler.format_index(escape=escape, axis=1)

def latex(cells):
    """The table in LaTeX, with the rules of booktabs."""
    texts = texts_of(cells, r"\textbf{{{}}}", r"\textit{{{}}}", r"$^\dagger$")
    return styled(texts, "latex").to_latex(hrules=True)

def html_table(cells):
    """The table in HTML, with intervals."""
    texts = texts_of(cells, "<b>{}</b>", "<i>{}</i>")
    low, high = wide(cells, "low"), wide(cells, "high")
    bounds = "<small>" + low.map("{:.3f}–".format) + high.map("{:.3f}".format) + "</small>"
    texts.iloc[:, 1:] += bounds.mask(low.isna(), "").to_numpy()
    return styled(texts, "html").to_html(table_uuid="metrics")

# ---------------------------------------------------------------- Report
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>@TITLE@</title>
<style>
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; background: #f4f6f8;
  max-width: 1240px; margin: auto; padding: 1rem 1.5rem 4rem }
h3 { font-size: .85rem; margin: 0 } p, small, th { color: #66717e; font-size: .8rem }
.card { background: #fff; border: 1px solid #dde2e8; border-radius: 8px; padding: .8rem 1rem;
  margin: .5rem 0; overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: .35rem .6rem; text-align: right; border-bottom: 1px solid #dde2e8 }
tr > :first-child { text-align: left } td small { display: block; white-space: nowrap }
svg { display: block; max-width: 100%; height: auto; margin: auto }
nav { position: sticky; top: 0; background: #f4f6f8; padding: .5rem 0; display: flex; gap: .6rem;
  flex-wrap: wrap; align-items: center }
input, select { font: inherit; padding: .4rem .6rem; border: 1px solid #b8c0ca;
  border-radius: 6px; max-width: 100% } input { flex: 1 1 16rem }
summary { cursor: pointer; overflow-wrap: anywhere }
.chip { font-size: .75rem; padding: .1rem .4rem; margin-left: .25rem; border-radius: 4px }
.runs { display: flex; gap: .7rem; overflow-x: auto; padding: .8rem 1px 0 }
.runs > div { flex: 1 0 15rem }
.hit { font-size: .82rem; padding: .3rem .5rem; margin: .25rem 0; border-radius: 4px;
  border-left: 4px solid #b8c0ca; background: #f4f6f8 } .hit small { display: block }
.SUPPORTS, .RELEVANT { border-color: #1f8a4c; background: #e4f4ea }
.REFUTES { border-color: #c2402d; background: #fbe7e3 }
.NEI { border-color: #c39b1d; background: #fbf4dc }
.missed { opacity: .75; outline: 1px dashed #66717e } mark { background: #ffe45c }
</style>
<h1>@TITLE@</h1>
<div class="card">@TABLE@<p>@NOTES@</p></div><div class="card">@PLOT@</div>
<h2>Claims</h2>
<p>Numbers: R@5 of each run. Gold labels: <span class="chip SUPPORTS">SUPPORTS</span>
<span class="chip REFUTES">REFUTES</span> <span class="chip NEI">NEI</span>, grey: not judged.
Dashed: evidence that the first ten ranks miss.</p>
<nav><input id="search" type="search" placeholder="Search claims, ids, verdicts">
<select id="order"><option value="-1">in the order of the file</option></select>
<small id="count"></small></nav><div id="claims"></div>
<script id="data" type="application/json">@DATA@</script>
<script>
const get = id => document.getElementById(id), data = JSON.parse(get("data").textContent);
function make(kind, name, ...children) {  // texts become text nodes, never markup
  const node = document.createElement(kind);
  node.className = name; node.append(...children); return node;
}
function hit([id, rank, gold, said], claim) {
  const [title, text] = data.abstracts[id] ?? ["", ""], sentence = claim.sentences[id];
  const [before, ...after] = sentence ? text.split(sentence) : [text];
  const marked = after.length ? [make("mark", "", sentence), after.join(sentence)] : [];
  const place = rank > 10 ? `missed, rank ${rank}` : rank || "missed";
  const labels = (gold && ` · gold ${gold}`) + (said && ` · said ${said}`);
  return make("details", `hit ${gold} ${rank && rank < 11 ? "" : "missed"}`, make("summary", "",
    `${place}: ${title || text.slice(0, 90)}`, make("small", "", id + labels)), before, ...marked);
}
for (const claim of data.claims) {
  const chips = claim.recall.map((value, place) => {
    const chip = make("span", "chip", value === null ? "–" : value.toFixed(2));
    chip.style.background = `hsl(${value * 130} 60% 88%)`; chip.title = data.runs[place];
    return chip;
  });
  claim.node = make("details", "card", make("summary", "", claim.text, make("br", ""),
    make("small", "", `${claim.id} ${claim.verdict}`), ...chips));
  claim.node.ontoggle = () => claim.node.children[1] || claim.node.append(make("div", "runs",
    ...data.runs.map((run, place) => make("div", "", make("h3", "", run),
      ...claim.rows[place].map(row => hit(row, claim))))));
}
data.runs.forEach((run, place) => get("order").append(new Option("missed most by " + run, place)));
get("order").append(new Option("lost most from first to last run", data.runs.length));
get("search").oninput = get("order").onchange = function show() {
  const words = get("search").value.toLowerCase().split(" "), run = Number(get("order").value);
  const key = ({recall}) => run < recall.length ? recall[run] ?? 2 : recall.at(-1) - recall[0];
  const found = data.claims.filter(({id, text, verdict}) => words.every(
    word => `${id} ${text} ${verdict}`.toLowerCase().includes(word)));
  if (run >= 0) found.sort((a, b) => key(a) - key(b));
  get("claims").replaceChildren(...found.map(claim => claim.node));
  get("count").textContent = `${found.length} of ${data.claims.length} claims`;
};
get("search").oninput();
</script>
</html>
"""

def plot(curve):
    """Recall by depth, a line a run, as SVG."""
    from matplotlib import figure, rc_context
    settings = {"svg.hashsalt": "", "svg.fonttype": "none", "text.parse_math": False}
    with rc_context(settings):
        table = curve.pivot(index="k", columns="run", values="recall")[curve["run"].unique()]
        axes = figure.Figure((9, 3.6), layout="constrained").subplots()
        axes.plot(table, marker=".", label=table.columns)
        axes.set(xscale="log", xlabel="abstracts read (k)", ylabel="R@k")
        axes.set_xticks(table.index, table.index)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        text = io.StringIO()
        axes.figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg"):]

def side_by_side(run, qrels):
    """{claim: [[abstract_id, rank, gold, said], ...]}: ten ranks, then evidence that they miss."""
    run = run.reindex(columns=["claim_id", "abstract_id", "rank", "label"])
    both = run.merge(qrels[QRELS], how="outer", on=QRELS[:2], suffixes=("_said", ""))
    both["rank"] = both["rank"].fillna(0).astype(int)
    below = ~both["rank"].between(1, 10)
    both = both[~below | both["label"].isin([*LABELS[:2], RELEVANT])].assign(below=below)
    both = both.sort_values(["below", "rank"], kind="stable").astype({"label_said": object})
    columns = both[["abstract_id", "rank", "label", "label_said"]].fillna("")
    return {claim: rows.to_numpy().tolist() for claim, rows in columns.groupby(both["claim_id"])}

def read_verdicts(path):
    """{claim: (verdict, {abstract: sentence})} as 05_classify.py --aggregate wrote them."""
    verdicts = {}
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                one = json.loads(line)
                sentences = {part["abstract_id"]: part["sentence"] for part in one["evidence"]}
                verdicts[one["claim_id"]] = one["verdict"], sentences
            except (ValueError, KeyError, TypeError, RecursionError):
                fail(f"{path}:{number}", "not a verdict as 05_classify.py --aggregate writes it")
    return verdicts

def report(args, sides, cells, curve, by_claim):
    """Return the page: the table, recall curves, and the rankings of every claim."""
    texts, claims = read_corpus(args.corpus), read_table(args.claims, CLAIMS)
    verdicts = read_verdicts(args.aggregated) if Path(args.aggregated).is_file() else {}
    recalls = by_claim.pivot(index="claim_id", columns="run", values="R@5")[list(sides)]
    recalls = recalls.astype(object).where(recalls.notna(), None)
    data = {"runs": list(sides), "claims": [], "abstracts": {}}
    for claim, text in claims.loc[claims["claim_id"].isin(recalls.index), CLAIMS].to_numpy():
        rows = [side.get(claim, []) for side in sides.values()]
        for name in [row[0] for side in rows for row in side if row[0] in texts]:
            data["abstracts"][name] = str(texts[name].get("title") or ""), texts[name]["abstract"]
        verdict, sentences = verdicts.get(claim, ("", {}))
        data["claims"].append({"id": claim, "text": text, "verdict": verdict, "rows": rows,
                               "sentences": sentences, "recall": recalls.loc[claim].tolist()})
    title = html.escape(f"{Path(args.data).name}, {args.split}: {len(recalls)} claims")
    parts = {"TITLE": title, "TABLE": html_table(cells), "NOTES": NOTES.replace("\n", "<br>"),
             "PLOT": plot(curve), "DATA": json.dumps(data).replace("<", "\\u003c")}
    return re.sub("@([A-Z]+)@", lambda found: parts[found[1]], PAGE)

# ---------------------------------------------------------------- Jobs
def save(path, content, args, inputs, **facts):
    """Write a text, or a table as TSV."""
    if not isinstance(content, str):
        content = content.to_csv(sep="\t", index=False, lineterminator="\n")
    with written(path, args, inputs, **facts) as temporary:
        temporary.write_text(content, encoding="utf-8")

def outs_of(out, *kinds):
    """Return out and the paths beside it with other endings."""
    paths = [out, *(os.path.splitext(out)[0] + kind for kind in kinds)]
    if len(set(paths)) < len(paths):
        fail("--out", f"two of {', '.join(paths)} are one file; give another ending")
    return paths

def run_paths(args):
    """{name: path} of the runs, by default those of the pipeline in its order."""
    made = (Path(args.work, args.split, f"{stage}.tsv") for stage in STAGES)
    paths = list(map(Path, args.runs)) or list(filter(Path.exists, made))
    if not paths:
        fail(f"{args.work}/{args.split}", "no run; name runs, or make some with 02_retrieve.py")
    stems = [Path(path.name.removesuffix(".gz")).stem for path in paths]
    names = [stem if stems.count(stem) == 1 else str(path) for stem, path in zip(stems, paths)]
    names = ["".join(c if c.isprintable() else "?" for c in name) for name in names]
    return dict(zip(names, paths))

def evaluate(args):
    """Score runs with every measure asked for, and compare them with the first."""
    import pandas as pd
    names, paths = [], run_paths(args)
    for word in args.measures:
        names += MEASURES[word].split(", ") if word in MEASURES else [word]
    names = list(dict.fromkeys(names))
    outs = outs_of(args.out, ".json", ".md", ".tex", ".cells.tsv", ".claims.tsv", ".curves.tsv")
    read = [args.qrels, *paths.values()]
    if args.report:
        outs.append(args.report)
        read += [args.claims, args.corpus, *[args.aggregated] * Path(args.aggregated).is_file()]
    inputs = sha256_of(*read)
    if up_to_date(outs, args, inputs):
        print(Path(outs[2]).read_text(encoding="utf-8"))
        return {"made": [], "runs": json.loads(Path(outs[1]).read_bytes())}
    qrels = read_any(args.qrels, QRELS)
    if qrels.empty:
        fail(args.qrels, "no judged pair; give the judgements of this split")
    gold, parts, counts, curve, by_claim, sides = gold_of(qrels), {}, {}, [], [], {}
    for name, path in paths.items():
        run, counts[name] = read_run(path, gold)
        parts[name], found = parts_of(run, qrels, gold, [*names, "R@5"], args.depth)
        curve += [(name, *row) for row in curves(found, gold)]
        share = judged(found, gold, 10)[0].mean()
        counts[name] |= {"judged_10": round(share, 4), "judged_pairs": int((found >= 0).sum())}
        if share < 0.5:
            print(f"warning: {path}: {share:.0%} of the first 10 ranks are judged, the rest counts "
                  "as no evidence; see 06_evaluate.py pool", file=sys.stderr)
        with np.errstate(invalid="ignore", divide="ignore"):
            values = {one: part[0] / part[1] for one, part in parts[name].items() if one != "given"}
        by_claim.append(pd.DataFrame({"run": name, "claim_id": gold.claims} | values))
        sides[name] = side_by_side(run, qrels) if args.report else {}
        del run, found  # makes room for the next one
    cells, by_claim = compare(parts, names, args.resamples, args.seed), pd.concat(by_claim)
    curve = pd.DataFrame(curve, columns=["run", "k", "recall", "success"])
    asked = cells[cells["measure"].isin(names)]
    values = {run: row.dropna().to_dict() for run, row in wide(asked).iterrows()}
    contents = [wide(asked).reset_index(), json.dumps(values, indent=1, ensure_ascii=False) + "\n",
                markdown(asked), latex(asked), cells, by_claim, curve]
    if args.report:
        contents.append(report(args, sides, asked, curve, by_claim))
    for path, content in zip(outs, contents):
        save(path, content, args, inputs, counts=counts)
    print(texts_of(asked).to_string(index=False), NOTES, sep="\n")
    return {"made": outs, "runs": values}

def convert(args):
    """Write a run, verdicts, qrels or claims of any format as our TSV."""
    inputs = sha256_of(args.file)
    if up_to_date([args.out], args, inputs):
        return {"made": []}
    table = translated(args.file, read_rows(args.file))
    columns = next((kind for kind in (RUN, QRELS, CLAIMS) if set(kind) <= set(table)), RUN)
    if columns == CLAIMS:
        table = table.drop_duplicates(CLAIMS)
        table["claim"] = table["claim"].str.split().str.join(" ")  # no line breaks and tabs
    table = checked(args.file, table, columns)
    if columns == RUN:
        columns = [*RUN, *(name for name in table if name == "label" or name.startswith("p_"))]
    if "label" in columns and (table["label"] == RELEVANT).any():
        print(f"warning: {args.file}: no stance; SUPPORTS means relevant", file=sys.stderr)
        table = table.replace({"label": {RELEVANT: LABELS[0]}})
    save(args.out, table[columns], args, inputs, rows=len(table))
    print(f"{args.out}: {len(table)} rows, {', '.join(columns)}")
    return {"made": [args.out], "rows": len(table)}

def read_texts(args, runs):
    """Return claims and corpus; runs {path: run} of other claims or abstracts are refused."""
    claims, texts = read_table(args.claims, CLAIMS), read_corpus(args.corpus)
    for path, run in runs.items():
        for column, known in (("claim_id", claims["claim_id"]), ("abstract_id", list(texts))):
            reject(path, run, ~run[column].isin(known), f"{column} not in claims and corpus")
    return claims, texts

def in_order(table, column, ids):
    """The rows of a table in the order of ids."""
    places = {name: place for place, name in enumerate(ids)}
    return table.sort_values(column, key=lambda names: names.map(places), kind="stable")

def pool(args):
    """Write the unjudged pairs that several runs found, with their texts, to be labelled."""
    import pandas as pd
    inputs = sha256_of(args.qrels, *args.runs, args.claims, args.corpus)
    if up_to_date([args.out], args, inputs):
        return {"made": []}
    runs = {path: read_any(path, RUN) for path in args.runs}
    claims, texts = read_texts(args, runs)
    found = pd.concat(runs.values()).assign(runs=lambda run: run["rank"] <= args.depth)
    pairs = found.groupby(QRELS[:2], sort=False)
    found = pairs.agg(runs=("runs", "sum"), best_rank=("rank", "min"))
    found = found[(found["runs"] >= args.min_runs) | (found["best_rank"] <= args.top)]
    known = pd.MultiIndex.from_frame(read_any(args.qrels, QRELS)[QRELS[:2]])
    table = found[~found.index.isin(known)].reset_index().merge(claims[CLAIMS], on="claim_id")
    for column in ("title", "abstract"):  # each on one line
        table[column] = [" ".join(str(texts[name].get(column) or "").split())
                         for name in table["abstract_id"]]
    # in the order of the corpus: the order of ranks would tell annotators what to think
    table = in_order(in_order(table, "abstract_id", texts), "claim_id", claims["claim_id"])
    columns = "claim_id claim abstract_id title abstract label runs best_rank".split()
    save(args.out, table.assign(label="")[columns], args, inputs, pairs=len(table))
    print(f"{args.out}: {len(table)} pairs to label, {len(found) - len(table)} are judged already")
    return {"made": [args.out], "pairs": len(table)}

def merge(args):
    """Write the qrels with the labels of a pool; a label against the qrels is refused."""
    import pandas as pd
    inputs = sha256_of(args.qrels, args.pool)
    if up_to_date([args.out], args, inputs):
        return {"made": []}
    qrels = read_any(args.qrels, QRELS)[QRELS]
    table = translated(args.pool, read_rows(args.pool))
    reject(args.qrels, qrels, qrels["label"] == RELEVANT, "judged without a stance")
    answers = table[table["label"] != ""] if "label" in table else table
    answers = checked(args.pool, answers, QRELS)[QRELS]
    before = qrels.set_index(QRELS[:2])["label"].rename("before")
    before = answers.join(before, on=QRELS[:2])["before"].fillna("")
    differ = (before != "") & (before != answers["label"])
    reject(args.pool, answers, differ, "the qrels have another label")
    merged = pd.concat([qrels, answers[before == ""]])
    merged = in_order(merged, "claim_id", merged["claim_id"].unique())
    counts = pd.DataFrame({"before": qrels["label"].value_counts(),
                           "after": merged["label"].value_counts()}).fillna(0).astype(int)
    save(args.out, merged, args, inputs, counts=counts.to_dict())
    print(counts)
    return {"made": [args.out], "added": len(merged) - len(qrels),
            "without_label": len(table) - len(answers)}

def submission(args):
    """Write a run as the file that a shared task asks for, and its zip."""
    lists = args.task == "checkthat4b"
    name = "predictions.tsv" if lists else "predictions.csv"
    depth = args.top_k or TASKS[args.task]
    outs = outs_of(args.out or f"{args.work}/{args.split}/{args.task}/{name}", ".zip")
    inputs = sha256_of(args.run, args.claims, args.corpus)
    if up_to_date(outs, args, inputs):
        return {"made": []}
    run = read_any(args.run, RUN)
    run = run[run["rank"] <= depth]
    claims, _ = read_texts(args, {args.run: run})
    run = in_order(run, "claim_id", claims["claim_id"])
    rows = run.groupby("claim_id").size().reindex(claims["claim_id"], fill_value=0)
    if rows.min() < depth:
        fail(args.run, f"claim {rows.idxmin()} has {rows.min()} abstracts, fewer than {depth}; "
             "make a longer run, or give --top-k")
    if lists:
        run = run.groupby("claim_id", sort=False)["abstract_id"].agg(lambda ids: str(list(ids)))
        run = run.rename_axis("post_id").rename("preds").reset_index()
    else:
        run = run[[column for column in (*RUN[:3], "label") if column in run]]
        run = run.replace({"label": SPELLING})
    text = run.to_csv(sep="\t" if lists else ",", index=False, lineterminator="\n")
    save(outs[0], text, args, inputs)
    with written(outs[1], args, inputs) as path, zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED)  # no time: same bytes
    print(f"{', '.join(outs)}: {len(claims)} claims, {depth} abstracts each")
    return {"made": outs, "claims": len(claims), "rows": len(run)}

def natural(text, least=0):
    """For argparse: a whole number from least on."""
    if int(text) < least:
        raise ValueError
    return int(text)

def positive(text):
    """For argparse: a whole number from 1 on."""
    return natural(text, 1)

def main():
    parser, shared, words = command_line("evaluate", "convert", "pool", "merge", "submission")
    add, data, split = parser.add_argument, shared.data, shared.split
    made = f"{shared.work}/{split}"
    if shared.job == "convert":
        add("file", help="run, verdicts, qrels or claims of any format")
        add("--to", choices=["tsv"], default="tsv", help="format")
        add("--out", required=True, help="file to write")
    else:
        add("--qrels", default=f"{data}/qrels.{split}.tsv", help="judged pairs")
        add("--claims", default=f"{data}/claims.{split}.tsv", help="claims")
        add("--corpus", default=f"{data}/corpus.jsonl", help="abstracts")
    if shared.job == "evaluate":
        add("runs", nargs="*", help=f"runs, first the baseline; default: those of {made}")
        add("--measures", nargs="+", default=["climatecheck2025"],
            help=f"{', '.join(MEASURES)}, columns of them, any measure of ir-measures")
        add("--depth", type=natural, default=10, help="ranks submitted; 0: all")
        add("--resamples", type=positive, default=2000, help="for intervals and p-values")
        add("--report", help="HTML page to write")
        add("--aggregated", default=f"{made}/claims.jsonl", help="verdicts of claims, for the page")
        add("--out", default=f"{made}/metrics.tsv", help="table; others are put beside it")
    if shared.job == "pool":
        add("runs", nargs="+", help="runs")
        add("--depth", type=positive, default=10, help="ranks of each run")
        add("--min-runs", type=positive, default=1, help="runs that have a pair to this depth")
        add("--top", type=natural, default=0, help="ranks of which every pair is taken")
        add("--out", default=f"{made}/pool.tsv", help="pairs, with an empty label")
    if shared.job == "merge":
        add("pool", help="pool with labels")
        add("--out", default=f"{made}/qrels.tsv", help="qrels and labels")
    if shared.job == "submission":
        add("run", nargs="?", default=f"{made}/verdicts.tsv", help="run or verdicts")
        add("--task", choices=TASKS, default="climatecheck2025", help="shared task")
        add("--top-k", type=natural, default=0, help="abstracts a claim; 0: as the task asks")
        add("--out", help=f"file, its zip beside it; default: {made}/TASK/predictions")
    jobs = {job.__name__: job for job in (evaluate, convert, pool, merge, submission)}
    finish(jobs[shared.job], parser.parse_args(words))

if __name__ == "__main__":
    main()
