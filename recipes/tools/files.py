"""Read the kit's TSV and JSONL files in the programs of this folder (formats: data/README.md)."""
import csv
import json

import pandas as pd

def unquoted(field):
    """Undo the quoting of pandas: a quoted field whose inner quotation marks are all doubled."""
    inner = field[1:-1].replace('""', "")
    if len(field) > 1 and field[0] == field[-1] == '"' and '"' not in inner:
        return field[1:-1].replace('""', '"')
    return field

def read_tsv(path):
    """Return a table of strings. A row is a line, so no quotation mark joins two rows."""
    table = pd.read_csv(path, sep="\t", dtype=str, na_filter=False, quoting=csv.QUOTE_NONE,
                        encoding="utf-8-sig", encoding_errors="replace")
    return table.map(unquoted)

def read_jsonl(path):
    """Return the records of a file; blank lines are left out."""
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        return [json.loads(line) for line in file if line.strip()]
