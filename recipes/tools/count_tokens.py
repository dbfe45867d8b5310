# /// script
# requires-python = ">=3.11"
# dependencies = ["pandas==3.1.1", "transformers==5.23.0"]
# ///
"""
Count the tokens of claims and of the fields of a collection (AIRwaves 2025, Table 2).

Reads   DATA/corpus.jsonl, DATA/claims.SPLIT.tsv
Prints  texts, and the minimum, median and maximum of their tokens as the model reads them, and how
        many exceed --max-length, by kind of text; special tokens and separators count

Example
    python recipes/tools/count_tokens.py data/checkthat4b --model intfloat/e5-large-v2
"""

import argparse
from pathlib import Path

import pandas as pd
from kit import read_corpus, read_table, text_of

FIELDS = ["title", "abstract", "authors", "journal", "source"]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="folder of corpus and claims")
    parser.add_argument("--model", default="data/models/minilm", help="whose tokenizer")
    parser.add_argument("--max-length", type=int, default=512, help="tokens that the model reads")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    texts = {}
    for path in sorted(args.data.glob("claims.*.tsv")):
        texts[path.stem] = list(read_table(path, ["claim_id", "claim"])["claim"])
    records = read_corpus(args.data / "corpus.jsonl").values()
    for fields in [*([field] for field in FIELDS), FIELDS[:2], FIELDS]:
        joined = [text_of(record, fields, " [SEP] ") for record in records]
        texts[", ".join(fields)] = [text for text in joined if text]
    rows = {}
    for kind, some in texts.items():
        if not some:  # the collection has no such field
            continue
        tokens = pd.Series([len(ids) for ids in tokenizer(some).input_ids], dtype=float)
        rows[kind] = {
            "texts": len(some),
            "min": tokens.min(),
            "median": tokens.median(),
            "max": tokens.max(),
            f"over {args.max_length}": (tokens > args.max_length).sum(),
        }
    print(pd.DataFrame(rows).T.round(1).to_string())


if __name__ == "__main__":
    main()
