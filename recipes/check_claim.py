# /// script
# requires-python = ">=3.11"
# dependencies = ["PyStemmer==3.1.0", "bm25s==0.3.16", "numpy==2.4.6", "openai==3.52.0",
#   "pandas==3.1.1", "sentence-transformers==6.2.0", "torch==2.13.0", "transformers==5.23.0"]
# ///
"""
Check one claim: a verdict, and the abstracts behind it with label, probability and sentence.

Reads   corpus.jsonl in --data, index/ and models/ in --work; paths start at the repository's root
Writes  checked/ in --work: a folder per claim, from which the same claim is answered again
Prints  the answer, by show_claim.py. LLM_MODEL labels if LLM_BASE_URL or OPENAI_API_KEY is set
Example python recipes/check_claim.py --data data/mine --work work/mine "Bears are thriving"
"""
import hashlib
import os
import signal
import subprocess
import sys
from argparse import ArgumentParser, RawTextHelpFormatter
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

def main():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback at Ctrl-C
    parser = ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.error = lambda what: fail(f"error: check_claim.py: {what}; put the claim in quotes")
    parser.add_argument("claim", type=os.fsencode)
    parser.add_argument("--json", action="store_const", const="json", default="text")
    parser.add_argument("--data", default="data/demo", type=Path, help="folder of the corpus")
    parser.add_argument("--work", default="work/demo", type=Path, help="folder of the index")
    parser.add_argument("--top", default=5, type=int, help="abstracts that are labelled")
    args = parser.parse_args()
    os.chdir(Path(__file__).resolve().parent.parent)
    claim = " ".join(args.claim.decode("utf-8", "replace").split()).replace('"', '""')
    split = f"checked/{hashlib.sha256(claim.encode()).hexdigest()[:16]}"
    folder, classifier = args.work / split, args.work / "models" / "classifier"
    kinds = [kind for kind in ("bm25", "dense", "splade") if (args.work / "index" / kind).is_dir()]
    if not kinds:
        fail(f"error: {args.work}/index: no index; run 01_index.py or bash recipes/demo.sh")
    folder.mkdir(parents=True, exist_ok=True)
    claims = folder / "claims.tsv"
    claims.write_text(f'claim_id\tclaim\n{folder.name}\t"{claim}"\n', encoding="utf-8")
    base = ["--data", args.data, "--work", args.work, "--split", split, "--claims", claims]
    run("02_retrieve.py", *base, "--retrievers", *kinds)
    best = folder / ("hybrid.tsv" if len(kinds) > 1 else f"{kinds[0]}.tsv")
    if (args.work / "models" / "reranker").is_dir():
        run("03_rerank.py", *base, "--run", best, "--depth", args.top + 15, "--first-stage", 0.8)
        best = folder / "rerank.tsv"
    job, out = ["--model", classifier], folder / "verdicts.tsv"
    if os.environ.get("LLM_BASE_URL") or os.environ.get("OPENAI_API_KEY"):
        model, out = os.environ.get("LLM_MODEL", "gpt-4.1"), folder / "llm_verdicts.tsv"
        job = ["llm", "--backend", "openai", "--model", model]
        job += ["--evidence-model", classifier] if classifier.is_dir() else []
    job += [*base, "--run", best, "--top-k", args.top, "--out", out]
    run("05_classify.py", *job, "--aggregate", out.with_suffix(".jsonl"))
    run("recipes/show_claim.py", out, args.data / "corpus.jsonl", args.json, stdout=None)

if __name__ == "__main__":
    main()
