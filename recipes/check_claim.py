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
Prints  verdict and abstracts, for people or (--json) as one line of JSON

The classifier that 05_classify.py train wrote labels the abstracts; if LLM_BASE_URL or
OPENAI_API_KEY is set, the language model LLM_MODEL does.

Example
    python recipes/check_claim.py --data data/mine "Polar bears are thriving"
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

from tools import kit


# -------------------- Run the scripts
def run(*words):
    """Run a script. If it fails, print its last line and end with its exit status."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        print([*command, *done.stderr.splitlines()][-1], file=sys.stderr)
        sys.exit(abs(done.returncode))


def indexes_in(work, data):
    """Return the kinds of indexes in a work folder; end if there is none."""
    kinds = [kind for kind in ("bm25", "dense", "splade") if (work / "index" / kind).is_dir()]
    if not kinds:
        kit.fail(
            f"{work}/index", f"no index; make it by: python 01_index.py --data {data} --work {work}"
        )
    return kinds


def judge_in(work, data):
    """Return the flags of 05_classify.py that say who labels, and its name; end without one."""
    classifier = work / "models" / "classifier"
    if os.environ.get("LLM_BASE_URL") or os.environ.get("OPENAI_API_KEY"):
        model = os.environ.get("LLM_MODEL", "gpt-4.1")
        return ["llm", "--retry-errors", "--backend", "openai", "--model", model], "llm"
    if not classifier.is_dir():
        kit.fail(
            classifier,
            f"no classifier; make it by: python 05_classify.py train --data "
            f"{data} --work {work}, or set LLM_BASE_URL and LLM_MODEL",
        )
    return ["--model", classifier], "classifier"


def judge(claim, args):
    """Return the verdicts on the best abstracts of a claim, by the scripts 02, 03 and 05."""
    kinds = indexes_in(args.work, args.data)
    flags, name = judge_in(args.work, args.data)  # what is missing is said before any work
    split = f"checked/{hashlib.sha256(claim.encode()).hexdigest()[:16]}"
    folder = args.work / split
    claims, best = folder / "claims.tsv", folder / f"{kinds[0]}.tsv"
    if len(kinds) > 1:
        best = folder / "hybrid.tsv"
    folder.mkdir(parents=True, exist_ok=True)
    quoted = claim.replace('"', '""')
    claims.write_text(f'claim_id\tclaim\n{folder.name}\t"{quoted}"\n', encoding="utf-8")
    base = ["--data", args.data, "--work", args.work, "--split", split, "--claims", claims]
    run("02_retrieve.py", *base, "--retrievers", *kinds)
    if (args.work / "models" / "reranker").is_dir():
        run("03_rerank.py", *base, "--run", best, "--depth", args.top + 15, "--first-stage", 0.8)
        best = folder / "rerank.tsv"
    out = folder / ("llm_verdicts.tsv" if name == "llm" else "verdicts.tsv")
    run("05_classify.py", *flags, *base, "--run", best, "--top-k", args.top, "--out", out)
    classifier = args.work / "models" / "classifier"
    sentences = ["--model", classifier] if classifier.is_dir() else []
    run("05_classify.py", "aggregate", out, *base, *sentences, "--out", out.with_suffix(".jsonl"))
    return out


# -------------------- Show the answer
def read_answer(verdicts, corpus):
    """Return the verdict on the claim, and every judged abstract with its title and sentence."""
    answer = json.loads(verdicts.with_suffix(".jsonl").read_bytes())
    made = json.loads(Path(f"{verdicts}.meta.json").read_bytes())
    answer |= {"judge": made["arguments"]["model"], "unusable": made.get("unusable", 0)}
    answer["failed"] = made.get("failed", 0)  # of the unusable ones
    sentences = {one["abstract_id"]: one["sentence"] for one in answer.pop("evidence")}
    records, answer["abstracts"] = kit.read_corpus(corpus), []
    for row in kit.read_table(verdicts, kit.RUN).to_dict("records"):
        name, chances = row["abstract_id"], {}
        for key in ("p_supports", "p_refutes", "p_nei"):
            chances[key] = float(row[key])
        answer["abstracts"].append(
            {
                "abstract_id": name,
                "rank": int(row["rank"]),
                "label": row["label"],
                **chances,
                "probability": chances[f"p_{row['label'].lower()}"],
                "sentence": sentences.get(name),
                "title": kit.text_of(records[name], ["title"]),
                "text": kit.text_of(records[name], ["abstract"]),
            }
        )
    return answer


def show(head, text):
    """Print text behind its head, without control characters."""
    width, indent = min(100, max(40, shutil.get_terminal_size().columns)), " " * len(head)
    text = "".join(c for c in " ".join(text.split()) if c.isprintable())
    print(textwrap.fill(text, width, initial_indent=head, subsequent_indent=indent) or head)


def show_answer(answer):
    """Print an answer for people."""
    counts = ", ".join(f"{label} {answer[label]}" for label in kit.LABELS)
    show("Claim    ", answer["claim"])
    show("Verdict  ", f"{answer['verdict']} ({counts})")
    show("Judge    ", answer["judge"])
    if answer["unusable"]:
        show(
            "         ",
            f"replies without a label, which count as NEI: {answer['unusable']}, of "
            f"them failed requests: {answer['failed']} (the next call asks again)",
        )
    for one in answer["abstracts"]:
        head = f"{one['rank']:>2}  {one['label']:8} {100 * one['probability']:3.0f} %  "
        print()
        show(head, one["title"] or textwrap.shorten(one["text"], 160))
        for more in filter(None, (one["sentence"], one["abstract_id"])):
            show("    ", more)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = lambda what: kit.fail("check_claim.py", f"{what}; put the claim in quotes")
    parser.add_argument("claim")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--data", default="data/demo", type=Path, help="folder of the corpus")
    parser.add_argument("--work", type=Path, help="folder of index and models; default: work/NAME")
    parser.add_argument("--top", default=5, type=int, help="abstracts that are labelled")
    args = parser.parse_args()
    claim = " ".join(args.claim.split())
    if not claim:
        parser.error("the claim is empty")
    os.chdir(kit.ROOT)
    args.work = args.work or Path("work", args.data.resolve().name)
    answer = read_answer(judge(claim, args), args.data / "corpus.jsonl")
    if args.json:
        print(json.dumps(answer))
    else:
        show_answer(answer)


if __name__ == "__main__":
    main()
