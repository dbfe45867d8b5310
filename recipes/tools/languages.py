# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy==2.4.6", "pandas==3.1.1"]
# ///
"""
Split a data folder by the language of its claims.

The column `language` of the claims names their language; without this column, they are English.

Reads   DATA/corpus.jsonl, claims.SPLIT.tsv, qrels.SPLIT.tsv
Writes  OUT/LANGUAGE/ for each language: the whole corpus, and the claims and judgements in this
        language
Prints  the number of claims of each split and language

Example
    python recipes/tools/languages.py data/checkthat2026 work/checkthat2026/languages
    python 06_evaluate.py --data work/checkthat2026/languages/de --work work/checkthat2026 \\
        --out work/checkthat2026/test/metrics-de
"""

import re
import shutil
from collections import defaultdict
from pathlib import Path

import kit


def tables_in(data):
    """Return {language: {name of a file: rows}} of the claims and qrels in a data folder."""
    tables = defaultdict(dict)
    for path in sorted(data.glob("claims.*.tsv")):
        claims = kit.read_table(path, kit.CLAIM)
        if "language" not in claims:
            claims["language"] = "en"
        qrels = path.with_name(path.name.replace("claims", "qrels", 1))
        if qrels.exists():
            judged = kit.read_table(qrels, kit.QRELS)
        for language, rows in claims.groupby("language"):
            if not re.fullmatch(r"[\w-]+", language):
                kit.fail(
                    path, f"the language {language!r} of {rows['claim_id'].iloc[0]} is no name"
                )
            tables[language][path.name] = rows
            if qrels.exists():
                of_language = judged["claim_id"].isin(rows["claim_id"])
                tables[language][qrels.name] = judged[of_language]
    if not tables:
        kit.fail(data, "no claims.SPLIT.tsv in it; name a data folder")
    return tables


def main():
    parser = kit.parser(__doc__)
    # fmt: off
    parser.add_argument("data", help="split the claims and qrels of this folder")
    parser.add_argument("out", help="write a folder for each language to this one")
    # fmt: on
    args = parser.parse_args()
    tables = tables_in(Path(args.data))
    folders = {language: Path(args.out, language) for language in tables}
    kit.check_outs(*folders.values(), is_folder=True)
    corpus = Path(args.data, "corpus.jsonl")
    task = kit.task_of(args, corpus)
    for language, folder in folders.items():
        with kit.written(folder, task) as new:
            new.mkdir()
            shutil.copy(corpus, new)
            for name, rows in tables[language].items():
                kit.write_table(rows, new / name)
        for name, rows in tables[language].items():
            if name.startswith("claims"):
                print(f"{folder / name}: {len(rows)} claims")


if __name__ == "__main__":
    kit.call(main)
