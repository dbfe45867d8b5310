# /// script
# requires-python = ">=3.11"
# dependencies = ["pandas==3.1.1"]
# ///
"""
Copy a data folder without titles: ClimateCheck's papers index and judge abstracts alone.

Reads   DATA/corpus.jsonl, DATA/claims.SPLIT.tsv, DATA/qrels.SPLIT.tsv
Writes  OUT/corpus.jsonl with abstract_id, abstract and an empty title; claims and qrels as they
        are; OUT/meta.json, last: the sha256 of what was read

Example
    python recipes/tools/abstracts.py data/climatecheck2025 work/climatecheck2025/abstracts
"""
import argparse
import json
import shutil
from pathlib import Path

from kit import digest, read_corpus

def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder of corpus, claims and qrels")
    parser.add_argument("out", type=Path, help="folder for the copy")
    args = parser.parse_args()
    tables = sorted([*args.data.glob("claims.*.tsv"), *args.data.glob("qrels.*.tsv")])
    corpus, done = args.data / "corpus.jsonl", args.out / "meta.json"
    task = json.dumps({path.name: digest(path) for path in [corpus, *tables]}, indent=1)
    if done.exists() and done.read_text() == task:
        print(f"up to date: {args.out}")
        return
    args.out.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    for path in tables:
        shutil.copy(path, args.out)
    with open(args.out / "corpus.jsonl", "w", encoding="utf-8") as file:
        for name, record in read_corpus(corpus).items():
            line = {"abstract_id": name, "title": "", "abstract": record["abstract"]}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    done.write_text(task)

if __name__ == "__main__":
    main()
