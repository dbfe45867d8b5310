# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy==2.4.6", "pandas==3.1.1"]
# ///
"""
Part a data folder by the language of its claims: a folder for each language.

The language stands in the column `language` of the claims; without this column, they are English.

Reads   DATA/corpus.jsonl, claims.SPLIT.tsv, qrels.SPLIT.tsv
Writes  OUT/LANGUAGE/, with the corpus and the claims and judgements of this language
Prints  the number of claims of each split and language

Example
    python recipes/tools/languages.py data/checkthat2026 work/checkthat2026/languages
    python 06_evaluate.py --data work/checkthat2026/languages/de --work work/checkthat2026
"""

import argparse
import shutil
from pathlib import Path

from kit import read_table


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # fmt: off
    parser.add_argument("data", type=Path, help="part the claims and qrels of this folder")
    parser.add_argument("out", type=Path, help="write a folder for each language to this one")
    # fmt: on
    args = parser.parse_args()
    for path in sorted(args.data.glob("claims.*.tsv")):
        claims = read_table(path, ["claim_id", "claim"])
        if "language" not in claims:
            claims["language"] = "en"
        for language, rows in claims.groupby("language"):
            folder = args.out / language
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(args.data / "corpus.jsonl", folder)
            rows.to_csv(folder / path.name, sep="\t", index=False)
            name = path.name.replace("claims", "qrels", 1)
            if (args.data / name).exists():
                qrels = read_table(args.data / name, ["claim_id", "abstract_id", "label"])
                qrels = qrels[qrels["claim_id"].isin(rows["claim_id"])]
                qrels.to_csv(folder / name, sep="\t", index=False)
            print(f"{folder / path.name}: {len(rows)} claims")


if __name__ == "__main__":
    main()
