"""
What the programs in recipes/ share: the helpers of the six scripts, and asking a language model.

While requests wait, a program writes them and ends with status 3; the same call reads the replies.
"""
import argparse
import contextlib
import csv
import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
PAIR = ["claim_id", "abstract_id"]
RUN = [*PAIR, "rank", "score"]
LABELS = ("SUPPORTS", "REFUTES", "NEI")
AGAIN = "\n\nThe last reply could not be read. Keep to the form that is asked for."
THOUGHTS = re.compile(r"^.*(?:</think>|\[/THINK\])|(?:<think>|\[THINK\]).*", re.DOTALL)

def arguments(doc, jobs):
    """Return the arguments of a program; doc: its docstring, for --help; jobs: see command_line."""
    globals()["__doc__"] = doc
    NEUTRAL.update({"requests", "retry_errors"})
    return command_line(jobs)

def read_claims(path):
    """Return {claim_id: claim}."""
    return dict(read_table(path, ["claim_id", "claim"]).set_index("claim_id")["claim"])

def plain(text):
    """Return a text on one line, without tags of prompts and control characters."""
    tags = r"<\s*/?\s*(?:abstract|claim|text|think)\b[^>]*>"
    return " ".join(re.sub(rf"{tags}|[\x00-\x1f\x7f-\x9f\ud800-\udfff]", " ", text).split())

# -------------------- Language model
def request_of(prompt, args):
    """Return a request of the OpenAI Batch API; its custom_id is the sha256 of its body."""
    body = {"model": args.model, "messages": [{"role": "user", "content": prompt}],
            "temperature": 0, "max_tokens": args.max_tokens, **args.extra}
    body = {name: value for name, value in body.items() if value is not None}
    name = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}

def reply_of(record):
    """Return the text of a reply without thoughts, None if it was cut or failed, and the error."""
    response = record.get("response") or {}
    error = record.get("error") or response["body"].get("error")
    if error or response.get("status_code", 200) >= 400:
        return None, json.dumps(error or response)[:500]
    choice = response["body"]["choices"][0]
    cut = choice.get("finish_reason") == "length"
    return None if cut else THOUGHTS.sub(" ", choice["message"].get("content") or ""), None

def read_replies(args):
    """Return {custom_id: (text, error)}; an error replaces no completion."""
    path, replies, unusable = Path(args.replies), {}, 0
    for line in path.open(encoding="utf-8-sig", errors="replace") if path.exists() else ():
        try:
            record = json.loads(line)
            name, (text, error) = record["custom_id"], reply_of(record)
        except (LookupError, TypeError, ValueError, AttributeError):  # torn, or of another form
            unusable += bool(line.strip())
            continue
        if not error:
            replies[name] = text, None
        elif not args.retry_errors:
            replies.setdefault(name, (None, error))
    if unusable:
        warn(path, f"{unusable} lines are no replies, such as a last one that was torn")
    return replies

def wait(requests, args):
    """Write the requests that wait, say how to answer them, and end with exit status 3."""
    Path(args.requests).parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(request) + "\n" for request in requests]
    Path(args.requests).write_text("".join(lines), encoding="utf-8")
    words = ["ask", args.requests, "--replies", args.replies]
    words += ["--model", args.model] + ["--retry-errors"] * args.retry_errors
    print(f"{len(lines)} requests wait, about {sum(map(len, lines)) // 4} tokens; to answer them:")
    print(f"python 04_llm_rerank.py {shlex.join(words)}")
    print(json.dumps({"made": [args.requests], "waiting": len(lines)}))
    sys.exit(3)

def answers_to(prompts, read, args):
    """Return what read makes of the reply to each prompt, None after two that it cannot read."""
    replies, used, waiting, answers, errors = read_replies(args), set(), {}, [], []
    for prompt in prompts:
        answer = error = None
        for request in (request_of(prompt, args), request_of(prompt + AGAIN, args)):
            name = request["custom_id"]
            if name not in replies:
                waiting[name] = request
                break
            used.add(name)
            text, error = replies[name]
            answer = None if text is None else read(text)
            if error or answer is not None:
                break
        answers.append(answer)
        errors.append(error)
    if others := len(replies) - len(used):
        warn(args.replies, f"{others} replies belong to other requests, as of another --model")
    if waiting:
        wait(waiting.values(), args)
    failed = len(errors) - errors.count(None)
    useless = answers.count(None) - failed
    if failed and failed == len(errors):
        fail(args.replies, f"all requests failed: {errors[0]}; see --model, --retry-errors")
    if useless + failed:
        warn(args.replies, f"{useless} useless and {failed} failed replies; see --max-tokens, "
             "--retry-errors")
    return answers, {"useless": useless, "failed": failed, "unknown_replies": others}

def add_model(add, max_tokens):
    add("--model", default=os.environ.get("LLM_MODEL") or "data/models/smollm2", help="its name")
    add("--max-tokens", type=int, default=max_tokens, help="of a reply")
    add("--extra", type=json.loads, default={}, help="JSON of parameters; null drops one")
    add("--retry-errors", action="store_true", help="ask again what failed")

# --- helpers (same in all six scripts)
START, WARNINGS = time.monotonic(), []
NEUTRAL = {"force", "out", "device", "batch_size", "function"}  # flags that change no output
SPLITS = {"train": "train", "mine": "train", "fit": "dev"}  # of jobs, where it is not test
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
        table = pd.read_csv(path, sep="\t", dtype=str, na_filter=False, quoting=csv.QUOTE_NONE,
                            encoding="utf-8-sig")
    except ValueError as error:  # empty, not UTF-8, a long row
        fail(path, f"{error}; see data/convert.py")
    if not set(columns) <= set(table) or not isinstance(table.index, pd.RangeIndex):
        fail(f"{path}:1", f"wanted {', '.join(columns)} in rows of one length; see data/convert.py")
    if "claim" in columns:  # as pandas quotes
        table["claim"] = table["claim"].str.replace(
            '^"((?:[^"]|"")*)"$', lambda quoted: quoted[1].replace('""', '"'), regex=True)
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
            fail(path, "not found; run the script that makes it")
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
    made = {"command": sys.argv, "script": digest(sys.argv[0]), "packages": loaded,
            "warnings": WARNINGS, "seconds": round(time.monotonic() - START, 1)}
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

# --- texts (same in 01 and recipes/tools/kit.py)
def text_of(record, fields=("title", "abstract"), separator=" "):
    """Join the fields of a record that hold text; the items of a list are joined by commas."""
    texts = []
    for value in map(record.get, fields):
        items = value if isinstance(value, list) else [value]
        known = [str(item).strip() for item in items if item is not None and item == item]  # no NaN
        texts.append(", ".join(filter(None, known)))
    return separator.join(filter(None, texts))
# --- end of texts
