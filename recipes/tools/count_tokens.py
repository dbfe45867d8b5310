# /// script
# requires-python = ">=3.11"
# dependencies = ["pandas==3.1.1", "transformers==5.23.0"]
# ///
"""
Count the tokens of claims and of the fields of a collection (AIRwaves 2025, Table 2).

Reads   DATA/corpus.jsonl, DATA/claims.SPLIT.tsv
Prints  for each kind of text, the number of texts, the minimum, median and maximum of their tokens,
        and the number of texts longer than --max-length; special tokens and separators count

Example
    python recipes/tools/count_tokens.py data/checkthat4b --model intfloat/e5-large-v2
"""

from pathlib import Path

import kit
import pandas as pd
from kit import read_corpus, text_of

FIELDS = ["title", "abstract", "authors", "journal", "source"]


def main():
    parser = kit.parser(__doc__)
    # fmt: off
    add = parser.add_argument
    add("data", type=Path, help="read corpus.jsonl and claims.SPLIT.tsv of this folder")
    add("--model", default="data/models/minilm",
        help="count with the tokenizer of this model (default: %(default)s)")
    add("--max-length", type=kit.count, default=512,
        help="count the texts with more tokens than this (default: %(default)s)")
    # fmt: on
    args = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    texts = {}
    for path in sorted(args.data.glob("claims.*.tsv")):
        texts[path.stem] = list(kit.read_claims(path).values())
    records = read_corpus(args.data / "corpus.jsonl").values()
    combinations = [[field] for field in FIELDS]
    combinations += [["title", "abstract"], FIELDS]
    for fields in combinations:
        joined = [text_of(record, fields, " [SEP] ") for record in records]
        texts[", ".join(fields)] = [text for text in joined if text]
    rows = {}
    for kind, texts_of_kind in texts.items():
        if not texts_of_kind:  # the collection has no such field
            continue
        lengths = [len(token_ids) for token_ids in tokenizer(texts_of_kind).input_ids]
        tokens = pd.Series(lengths, dtype=float)
        rows[kind] = {
            "texts": len(texts_of_kind),
            "min": tokens.min(),
            "median": tokens.median(),
            "max": tokens.max(),
            f"over {args.max_length}": (tokens > args.max_length).sum(),
        }
    print(pd.DataFrame(rows).T.round(1).to_string())


if __name__ == "__main__":
    kit.call(main)
