"""
Score runs and verdicts against the judgements, exactly as the organisers of the shared tasks do.

Reads   runs and verdicts (02 to 05; TREC runs too), data/NAME/qrels.SPLIT.tsv
Writes  work/NAME/SPLIT/metrics.tsv, one row a run, and metrics.json, the same at full precision
Prints  the table; then one line of JSON, last on stdout

Examples
    python 06_evaluate.py
    python 06_evaluate.py work/demo/test/hybrid.tsv work/demo/test/rerank.tsv
    python 06_evaluate.py verdicts.tsv --qrels gold.tsv --measures climatecheck2025 climatecheck2026
"""
import argparse
import contextlib
import hashlib
import json
import os
import resource
import shutil
import sys
import threading
import time
from pathlib import Path

import numpy as np

STAGES = ("bm25", "dense", "splade", "hybrid", "rerank", "llm", "verdicts", "llm_verdicts")  # the order of the pipeline

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
    if not isinstance(table.index, pd.RangeIndex) or not set(columns) <= set(table):
        found = ", ".join(map(str, table))
        fail(f"{path}:1", f"the columns {', '.join(columns)} are wanted, {found} found; mend the header")
    table.index += 1 if trec else 2
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
    for number, line in enumerate(open(path, "rb"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
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
    for path in paths:
        made = {}
        with contextlib.suppress(OSError, ValueError):
            made = json.loads(Path(f"{path}.meta.json").read_text(encoding="utf-8"))
        same = made.get("arguments") == vars(args) | {"force": False} and made.get("inputs") == inputs
        if args.force or not same or not Path(path).exists():
            return False
    return not print(*(f"up to date: {path}" for path in paths), sep="\n")

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
        meta.unlink(missing_ok=True)  # from here on an old provenance would vouch for the new bytes
        if path.is_dir():
            remove(path)
        os.replace(temporary, path)
        os.replace(provenance, meta)
    finally:
        remove(temporary, f"{temporary}.meta.json")

def model_folder(name):
    """The folder of a model: name itself, or the hub's snapshot of it (from the cache under HF_HUB_OFFLINE=1)."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(name, ignore_patterns=["*.onnx*", "openvino/*", "*.h5", "*.msgpack", "*.pkl"]))
    except Exception as error:  # a dozen kinds: no network, no such model, no access, not in the cache
        fail(name, f"no such folder, and no such model on the hub ({type(error).__name__}); see data/download.py --help")

@contextlib.contextmanager
def ticking(what):
    """While something without a progress bar goes on (imports, loading), say so every three seconds."""
    done = threading.Event()
    def tick(seconds=0):
        print(f"{what} ... {seconds} s", file=sys.stderr, flush=True)
        done.wait(3) or tick(seconds + 3)
    threading.Thread(target=tick, daemon=True).start()
    try:
        yield
    finally:
        done.set()

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
    try:
        print(json.dumps(job(args) | spent(), ensure_ascii=False))
    except KeyboardInterrupt:
        sys.exit(130)
# --- end of helpers

# ----------------------------------------------------------- Retrieval
def recall(ranked, relevant, k):
    """Share of a claim's relevant abstracts (a non-empty set) among its first k ranks."""
    return len(relevant.intersection(ranked[:k])) / len(relevant)

def bpref(ranked, relevant, nonrelevant):
    """B-Pref of one claim as the ClimateCheck organisers compute it; both sets are non-empty.

    Walk down the ranks with n, the judged non-relevant abstracts so far, capped at R = |relevant|: every
    relevant one adds 1 - n / R; the sum is divided by R. (trec_eval divides n by min(R, N) instead.)
    """
    total, n = 0.0, 0
    for name in ranked:
        if name in relevant:
            total += 1 - n / len(relevant)
        elif name in nonrelevant:
            n = min(n + 1, len(relevant))
    return total / len(relevant)

def retrieval_measures(run, qrels, ks=(2, 5, 10)):
    """R@k: mean over the claims with a relevant abstract; a claim without rows counts 0. B-Pref: mean over the
    submitted claims with relevant and with judged non-relevant abstracts. NaN where there is no such claim."""
    ranked = {claim: list(rows) for claim, rows in run.groupby("claim_id", sort=False)["abstract_id"]}
    found, bprefs = {k: [] for k in ks}, []
    for claim, rows in qrels.groupby("claim_id", sort=False):
        relevant = set(rows["abstract_id"][rows["label"] != "NEI"])
        nonrelevant = set(rows["abstract_id"][rows["label"] == "NEI"])
        if relevant:
            for k in ks:
                found[k].append(recall(ranked.get(claim, []), relevant, k))
        if relevant and nonrelevant and claim in ranked:
            bprefs.append(bpref(ranked[claim], relevant, nonrelevant))
    columns = {f"R@{k}": found[k] for k in ks} | {"B-Pref": bprefs}
    return {name: float(np.mean(values)) if values else float("nan") for name, values in columns.items()}

# ----------------------------------------------------------- Stance
def stance_measures(verdicts, qrels):
    """Precision, recall and F1, weighted by support, over the submitted pairs that are judged (scikit-learn)."""
    from sklearn.metrics import precision_recall_fscore_support

    both = verdicts.merge(qrels, on=["claim_id", "abstract_id"], suffixes=("", "_gold"))
    if "label" not in verdicts or "RELEVANT" in set(qrels["label"]) or not len(both):
        return {"judged": len(both)}
    precision, recall, f1, _ = precision_recall_fscore_support(
        both["label_gold"], both["label"], average="weighted", zero_division=0)
    return {"judged": len(both), "P": float(precision), "R": float(recall), "F1": float(f1)}

# ----------------------------------------------------------- Shared tasks
def climatecheck2025(run, qrels):
    """Subtask I = mean(R@2, R@5, R@10, B-Pref); Subtask II = F1 + R@10."""
    row = retrieval_measures(run, qrels)
    row["Subtask I"] = float(np.mean(list(row.values())))
    row |= stance_measures(run, qrels)
    return row | ({"Subtask II": row["F1"] + row["R@10"]} if "F1" in row else {})

def climatecheck2026(run, qrels):
    """Retrieval 2026 = mean(R@5, B-Pref); Verification 2026 = F1 + R@5."""
    row = retrieval_measures(run, qrels, (2, 5))
    row["Retrieval 2026"] = float(np.mean([row["R@5"], row["B-Pref"]]))
    row |= stance_measures(run, qrels)
    return row | ({"Verification 2026": row["F1"] + row["R@5"]} if "F1" in row else {})

MEASURES = {"climatecheck2025": climatecheck2025, "climatecheck2026": climatecheck2026}

# ----------------------------------------------------------- Tables
def read_scored(path, qrels):
    """A run or verdicts file; claims that the qrels do not know are left out, and counted."""
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        label = ["label"] if "label" in file.readline().strip().split("\t") else []
    run = read_table(path, ["claim_id", "abstract_id", "rank", "score", *label])
    strange = set(run["claim_id"]) - set(qrels["claim_id"])
    return run[~run["claim_id"].isin(strange)], len(strange)

def warn(path, run, qrels, strange):
    """What the organisers' arithmetic passes over, said aloud."""
    missing = qrels["claim_id"].nunique() - run["claim_id"].nunique()
    if missing:
        print(f"warning: {path}: {missing} claims of the qrels have no row: 0 in recall, out of B-Pref", file=sys.stderr)
    if strange:
        print(f"warning: {path}: {strange} claims are not in the qrels; left out", file=sys.stderr)
    return missing

def show(table):
    """The table for people: three digits, a dash where a measure does not apply."""
    return table.to_string(index=False, na_rep="-", float_format="{:.3f}".format)

def evaluate(args):
    """One row a run, with every measure asked for; runs come in the order given."""
    import pandas as pd

    paths = args.runs or [path for stage in STAGES if (path := Path(args.work) / args.split / f"{stage}.tsv").exists()]
    paths = [Path(path) for path in paths]
    if not paths:
        fail(f"{args.work}/{args.split}", "no run there to evaluate; name run files, or make some with 02_retrieve.py")
    inputs = fingerprints(args.qrels, *paths)
    outs = [args.out, str(Path(args.out).with_suffix(".json"))]
    if up_to_date(outs, args, inputs):
        print(show(pd.read_csv(args.out, sep="\t", dtype={"run": str, "judged": int})))
        return {"runs": json.loads(Path(outs[1]).read_text(encoding="utf-8"))}
    qrels = read_table(args.qrels, ["claim_id", "abstract_id", "label"])
    names = [path.stem if [other.stem for other in paths].count(path.stem) == 1 else path.as_posix() for path in paths]
    rows, missing = {}, {}
    for name, path in zip(names, paths):
        run, strange = read_scored(path, qrels)
        missing[name] = {"claims_missing": warn(path, run, qrels, strange), "claims_unknown": strange}
        rows[name] = {key: value for measure in args.measures for key, value in MEASURES[measure](run, qrels).items()}
    columns = dict.fromkeys(key for row in sorted(rows.values(), key=len, reverse=True) for key in row)
    table = pd.DataFrame([{"run": name, **row} for name, row in rows.items()], columns=["run", *columns])
    values = {name: {key: None if np.isnan(value) else value for key, value in row.items()} for name, row in rows.items()}
    with written(outs[0], args, inputs, counts=missing) as temporary:
        table.to_csv(temporary, sep="\t", index=False, lineterminator="\n")
    with written(outs[1], args, inputs, counts=missing) as temporary:
        temporary.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(show(table))
    return {"made": outs, "runs": values}

# ----------------------------------------------------------- Main
def evaluate_flags(add):
    add("runs", nargs="*", help="runs and verdicts; without any, those of {work}/{split} in the order of the pipeline")
    add("--qrels", default="{data}/qrels.{split}.tsv", help="the judged pairs")
    add("--measures", nargs="+", choices=MEASURES, default=["climatecheck2025"], help="whose measures")
    add("--out", default="{work}/{split}/metrics.tsv", help="the table; the JSON lies beside it")

def main():
    run_job(__doc__, {"evaluate": (evaluate, evaluate_flags)})

if __name__ == "__main__":
    main()
