# /// script
# requires-python = ">=3.11"
# dependencies = ["PyStemmer==3.1.0", "bm25s==0.3.16", "numpy==2.4.6", "openai==3.52.0",
#   "pandas==3.1.1", "sentence-transformers==6.2.0", "torch==2.13.0", "transformers==5.23.0"]
# ///
"""
Check one claim: a verdict, and the abstracts behind it with label, probability and sentence.

Reads   corpus.jsonl in --data, index/ and models/ in --work; paths start at the repository's root
Writes  WORK/checked/, a folder per claim: the same claim is answered from it, and only failed
        requests are sent again
Prints  verdict and abstracts, for people or (--json) as one line of JSON

The classifier that recipes/train/classifier.py wrote labels the abstracts; its F1 on held-out pairs
is shown. If LLM_MODEL is set, and LLM_BASE_URL or OPENAI_API_KEY, this language model labels
instead.

Example
    python recipes/check_claim.py --data data/mine "Polar bears are thriving"
"""

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
    """Run a script; if it fails, print the last line of its errors and exit with its status."""
    print(f"{words[0]} ...", file=sys.stderr)  # a stage takes seconds to load its models
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        lines = done.stderr.splitlines() or command  # a killed script says nothing
        print(lines[-1], file=sys.stderr)
        sys.exit(abs(done.returncode))


def indexes_in(work, data):
    """Return the kinds of indexes in a work folder; fail if there is none."""
    kinds = [kind for kind in ("bm25", "dense", "splade") if (work / "index" / kind).is_dir()]
    if not kinds:
        command = f"python 01_index.py --data {data} --work {work}"
        kit.fail(f"{work}/index", f"no index; make one: {command}")
    return kinds


def judge_in(work, data):
    """Return the flags of 05_classify.py that choose who labels, and the name of its output.

    Fails if there is neither a language model nor a classifier.
    """
    classifier = work / "models" / "classifier"
    model = os.environ.get("LLM_MODEL")
    endpoint = os.environ.get("LLM_BASE_URL") or os.environ.get("OPENAI_API_KEY")
    if endpoint and model:
        flags = ["llm", "--retry-errors", "--backend", "openai", "--model", model]
        return flags, "llm_verdicts.tsv"
    if not classifier.is_dir():
        command = f"python recipes/train/classifier.py --data {data} --work {work}"
        kit.fail(
            classifier, f"no classifier; train one: {command}, or set LLM_BASE_URL and LLM_MODEL"
        )
    if endpoint:
        print("LLM_MODEL is not set, so no language model is asked", file=sys.stderr)
    return ["--model", classifier], "verdicts.tsv"


def judge(claim, args):
    """Return two paths: verdicts on the claim's best abstracts, and the verdict on the claim."""
    kinds = indexes_in(args.work, args.data)
    flags, name = judge_in(args.work, args.data)  # fails before any work
    claim_id = hashlib.sha256(claim.encode()).hexdigest()[:16]
    split = f"checked/{claim_id}"
    folder = args.work / split
    claims = folder / "claims.tsv"
    kit.check_outs(claims)
    folder.mkdir(parents=True, exist_ok=True)
    claims.write_text(f"claim_id\tclaim\n{claim_id}\t{kit.quoted(claim)}\n", encoding="utf-8")
    where = ["--data", args.data, "--work", args.work, "--split", split]
    base = [*where, "--claims", claims]
    run("02_retrieve.py", *base, "--retrievers", *kinds)
    best = folder / f"{kinds[0]}.tsv"
    if len(kinds) > 1:
        best = folder / "hybrid.tsv"
    if (args.work / "models" / "reranker").is_dir():
        run("03_rerank.py", *base, "--run", best, "--depth", args.top + 15, "--first-stage", 0.8)
        best = folder / "rerank.tsv"
    verdicts = folder / name
    run("05_classify.py", *flags, *base, "--run", best, "--top-k", args.top, "--out", verdicts)
    verdict = verdicts.with_suffix(".jsonl")
    run("05_classify.py", "aggregate", verdicts, *base, "--out", verdict)
    if (args.work / "models" / "classifier").is_dir():
        with_sentences = verdicts.with_suffix(".sentences.jsonl")
        run("recipes/tools/sentences.py", verdict, *where, "--out", with_sentences)
        verdict = with_sentences
    return verdicts, verdict


# -------------------- Show the answer
def read_answer(verdicts, verdict, corpus):
    """Return the verdict on the claim, and every judged abstract with its title and sentence."""
    answer = json.loads(verdict.read_bytes())
    meta = kit.sidecar_of(verdicts)
    answer["judge"] = meta["arguments"]["model"]
    answer["unusable"] = meta.get("unusable", 0)
    answer["failed"] = meta.get("failed", 0)  # of the unusable ones
    worth = kit.sidecar_of(answer["judge"])  # of a classifier
    for name in ("held_out_F1", "majority_F1"):
        answer[name] = worth.get(name)
    evidence = answer.pop("evidence")
    sentences = {record["abstract_id"]: record.get("sentence") for record in evidence}
    records = kit.read_corpus(corpus)
    answer["abstracts"] = []
    for row in kit.read_table(verdicts, kit.RUN).to_dict("records"):
        record = records[row["abstract_id"]]
        row["probability"] = row[f"p_{row['label'].lower()}"]
        row["sentence"] = sentences.get(row["abstract_id"])
        row["title"] = kit.text_of(record, ["title"])
        row["text"] = kit.text_of(record, ["abstract"])
        answer["abstracts"].append(row)
    return answer


def show(head, text):
    """Print a text after its head, without control characters."""
    width = min(100, max(40, shutil.get_terminal_size().columns))
    indent = " " * len(head)
    text = " ".join(text.split())
    text = "".join(character for character in text if character.isprintable())
    print(textwrap.fill(text, width, initial_indent=head, subsequent_indent=indent) or head)


def show_answer(answer):
    """Print an answer for people."""
    counts = ", ".join(f"{label} {answer[label]}" for label in kit.LABELS)
    show("Claim    ", answer["claim"])
    show("Verdict  ", f"{answer['verdict']} ({counts})")
    if answer["verdict"] == "UNDECIDED":
        show("         ", "no label is much more probable than chance, 33 %")
    show("Judge    ", answer["judge"])
    if answer["held_out_F1"] is not None:
        worth = f"F1 {answer['held_out_F1']:.3f} on held-out pairs"
        worth += f", {answer['majority_F1']:.3f} if all get the most frequent label"
        if answer["held_out_F1"] <= answer["majority_F1"]:
            worth += ": its verdicts are worthless"
        show("         ", worth)
    if answer["unusable"]:
        show(
            "         ",
            f"replies without a label, which count as NEI: {answer['unusable']}; of "
            f"these, refused or cut: {answer['failed']} (the next call asks again)",
        )
    for abstract in answer["abstracts"]:
        percent = 100 * abstract["probability"]
        head = f"{abstract['rank']:>2}  {abstract['label']:8} {percent:3.0f} %  "
        print()
        show(head, abstract["title"] or textwrap.shorten(abstract["text"], 160))
        if abstract["sentence"]:
            show("    ", abstract["sentence"])
        show("    ", abstract["abstract_id"])


def main():
    parser = kit.parser(__doc__)
    parser.error = lambda what: kit.fail("check_claim.py", f"{what}; put the claim in quotes")
    # fmt: off
    add = parser.add_argument
    add("claim", help="check this claim, one sentence in quotes")
    add("--json", action="store_true", help="print one line of JSON")
    add("--data", default="data/demo", type=Path,
        help="search corpus.jsonl of this folder (default: %(default)s)")
    add("--work", type=Path,
        help="use the index and models of this folder (default: work/ and the name of --data)")
    add("--top", default=5, type=kit.count, help="label this many abstracts (default: %(default)s)")
    # fmt: on
    args = parser.parse_args()
    claim = " ".join(args.claim.split())
    if not claim:
        parser.error("the claim is empty")
    os.chdir(kit.ROOT)
    args.work = args.work or Path("work", args.data.resolve().name)
    answer = read_answer(*judge(claim, args), args.data / "corpus.jsonl")
    if args.json:
        print(json.dumps(answer))
    else:
        show_answer(answer)


if __name__ == "__main__":
    kit.call(main)
