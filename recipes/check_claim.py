# /// script
# requires-python = ">=3.11"
# dependencies = ["PyStemmer==3.1.0", "bm25s==0.3.16", "numpy==2.4.6", "openai==3.52.0",
#   "pandas==3.1.1", "sentence-transformers==6.2.0", "torch==2.13.0", "transformers==5.23.0"]
# ///
"""
Check one claim: a verdict, and the abstracts behind it with label, probability and sentence.

Reads   corpus.jsonl in --data, index/ and models/ in --work; paths start at the repository's root
Writes  checked/ in --work: a folder per claim, from which the same claim is answered again; only
        requests that failed are sent once more
Prints  the answer (tools/show_claim.py)

The classifier that 05_classify.py train wrote labels the abstracts; if LLM_BASE_URL or
OPENAI_API_KEY is set, the language model LLM_MODEL does.

Example
    python recipes/check_claim.py --data data/mine "Polar bears are thriving"
"""
import hashlib
import json
import os
import signal
import subprocess
import sys
from argparse import ArgumentParser, ArgumentTypeError, RawTextHelpFormatter
from pathlib import Path

def fail(text, status=2):
    """Print a message without control characters and end with this exit status."""
    print("".join(c for c in text if c.isprintable()), file=sys.stderr)
    sys.exit(status)

def run(*words, stdout=subprocess.DEVNULL):
    """Run a script. If it fails, print its last line and end with its exit status."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, errors="replace")
    if done.returncode:
        fail([*command, *done.stderr.splitlines()][-1], abs(done.returncode))

def claim_of(text):
    """Return a claim as one line of text."""
    claim = " ".join(os.fsencode(text).decode("utf-8", "replace").split())
    if not claim:
        raise ArgumentTypeError("the claim is empty")
    return claim

def positive(text):
    """Return a whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)

def indexes_in(work, data):
    """Return the kinds of indexes in a work folder; end if there is none."""
    kinds = [kind for kind in ("bm25", "dense", "splade") if (work / "index" / kind).is_dir()]
    if not kinds:
        fail(f"error: {work}/index: no index; make it by: python 01_index.py --data {data} "
             f"--work {work}")
    return kinds

def judge_in(work, data):
    """Return the flags of 05_classify.py that say who labels, and its name; end without one."""
    classifier = work / "models" / "classifier"
    if os.environ.get("LLM_BASE_URL") or os.environ.get("OPENAI_API_KEY"):
        model = os.environ.get("LLM_MODEL", "gpt-4.1")
        flags = ["llm", "--backend", "openai", "--model", model]
        return flags + (["--evidence-model", classifier] if classifier.is_dir() else []), "llm"
    if not classifier.is_dir():
        fail(f"error: {classifier}: no classifier; make it by: python 05_classify.py train "
             f"--data {data} --work {work}, or set LLM_BASE_URL and LLM_MODEL")
    return ["--model", classifier], "classifier"

def may_have_failed(verdicts):
    """Return whether requests behind verdicts failed; without verdicts, all may have failed."""
    try:
        return json.loads(Path(f"{verdicts}.meta.json").read_bytes()).get("failed", 0) > 0
    except (OSError, ValueError):
        return True

def main():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback at Ctrl-C
    parser = ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.error = lambda what: fail(f"error: check_claim.py: {what}; put the claim in quotes")
    parser.add_argument("claim", type=claim_of)
    parser.add_argument("--json", action="store_const", const="json", default="text",
                        help="print one line of JSON")
    parser.add_argument("--data", default="data/demo", type=Path, help="folder of the corpus")
    parser.add_argument("--work", type=Path, help="folder of index and models; default: work/NAME")
    parser.add_argument("--top", default=5, type=positive, help="abstracts that are labelled")
    args = parser.parse_args()
    os.chdir(Path(__file__).resolve().parent.parent)
    work = args.work or Path("work", args.data.resolve().name)
    kinds = indexes_in(work, args.data)
    judge, name = judge_in(work, args.data)  # what is missing is said before any work

    claim = args.claim.replace('"', '""')
    split = f"checked/{hashlib.sha256(claim.encode()).hexdigest()[:16]}"
    folder = work / split
    folder.mkdir(parents=True, exist_ok=True)
    claims = folder / "claims.tsv"
    claims.write_text(f'claim_id\tclaim\n{folder.name}\t"{claim}"\n', encoding="utf-8")
    base = ["--data", args.data, "--work", work, "--split", split, "--claims", claims]
    run("02_retrieve.py", *base, "--retrievers", *kinds)
    best = folder / ("hybrid.tsv" if len(kinds) > 1 else f"{kinds[0]}.tsv")
    if (work / "models" / "reranker").is_dir():
        run("03_rerank.py", *base, "--run", best, "--depth", args.top + 15, "--first-stage", 0.8)
        best = folder / "rerank.tsv"
    out = folder / ("llm_verdicts.tsv" if name == "llm" else "verdicts.tsv")
    retry = ["--retry-errors"] * (name == "llm" and may_have_failed(out))
    run("05_classify.py", *judge, *retry, *base, "--run", best, "--top-k", args.top, "--out", out,
        "--aggregate", out.with_suffix(".jsonl"))
    run("recipes/tools/show_claim.py", out, args.data / "corpus.jsonl", args.json, stdout=None)

if __name__ == "__main__":
    main()
