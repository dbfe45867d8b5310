"""
Show the verdict on one claim, and the abstracts behind it with label, probability and sentence.

Reads   the verdicts of 05_classify.py on one claim, its --aggregate beside them, and corpus.jsonl
Prints  lines for people, or one line of JSON for programs

Example
    python recipes/tools/show_claim.py work/demo/checked/ID/verdicts.tsv data/demo/corpus.jsonl text
"""
import argparse
import csv
import json
import os
import shutil
import sys
import textwrap
from pathlib import Path

from kit import text_of

COLOURS = {"S": 32, "R": 31, "D": 33, "N": 2}  # by the first letter of a label or verdict

def read_answer(verdicts, corpus):
    """Return the verdict on the claim, and every judged abstract with its title and text."""
    answer = json.loads(verdicts.with_suffix(".jsonl").read_bytes())
    made = json.loads(Path(f"{verdicts}.meta.json").read_bytes())
    answer |= {"judge": made["arguments"]["model"], "unusable": made.get("unusable", 0)}
    answer["failed"] = made.get("failed", 0)  # of the unusable ones
    sentences = {one["abstract_id"]: one["sentence"] for one in answer.pop("evidence")}
    with open(verdicts, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    records = {row["abstract_id"]: {} for row in rows}
    with open(corpus, encoding="utf-8-sig", errors="replace", newline="\n") as file:
        for line in file if rows else ():
            record = json.loads(line) if line.strip() else {}
            if str(record.get("abstract_id")) in records:
                records[str(record["abstract_id"])] = record
    answer["abstracts"] = []
    for row in rows:
        name, label = row["abstract_id"], row["label"]
        one = {"abstract_id": name, "rank": int(row["rank"]), "label": label}
        one |= {key: float(row[key]) for key in ("p_supports", "p_refutes", "p_nei")}
        one |= {"probability": one[f"p_{label.lower()}"], "sentence": sentences.get(name)}
        answer["abstracts"].append(one | {"title": text_of(records[name], ["title"])})
    return answer, {name: text_of(record, ["abstract"]) for name, record in records.items()}

def show(head, text, label=""):
    """Print text behind its head, without control characters; on a terminal, colour the label."""
    width, indent = min(100, max(40, shutil.get_terminal_size().columns)), " " * len(head)
    text = "".join(c for c in " ".join(text.split()) if c.isprintable())
    text = textwrap.fill(text, width, initial_indent=head, subsequent_indent=indent) or head
    if label and sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        text = text.replace(label, f"\033[{COLOURS[label[0]]}m{label}\033[0m", 1)
    print(text)

def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verdicts", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("form", choices=("text", "json"), help="for people or programs")
    args = parser.parse_args()
    answer, texts = read_answer(args.verdicts, args.corpus)
    if args.form == "json":
        return print(json.dumps(answer).replace("\x7f", "\\u007f"))
    counts = ", ".join(f"{label} {answer[label]}" for label in ("SUPPORTS", "REFUTES", "NEI"))
    judge = answer["judge"] if texts else "none, as no index has a word of the claim"
    if answer["unusable"] > answer["failed"]:
        useless = answer["unusable"] - answer["failed"]
        judge += f"; replies without a label, which count as NEI: {useless}"
    if answer["failed"]:
        judge += (f"; failed requests, which count as NEI: {answer['failed']} (the next call asks "
                  "again)")
    show("Claim    ", answer["claim"])
    show("Verdict  ", f"{answer['verdict']} ({counts})", answer["verdict"])
    show("Judge    ", judge)
    for one in answer["abstracts"]:
        head = f"{one['rank']:>2}  {one['label']:8} {100 * one['probability']:3.0f} %  "
        text = one["title"] or textwrap.shorten(texts[one["abstract_id"]], 160)
        print()
        show(head, text, one["label"])
        for more in filter(None, (one["sentence"], one["abstract_id"])):
            show("    ", more)

if __name__ == "__main__":
    main()
