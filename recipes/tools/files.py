"""The kit's own readers, so that files mean the same to the programs of this folder."""
import csv
import runpy
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parents[2]
KIT = runpy.run_path(str(ROOT / "01_index.py"))  # defines its functions, and runs nothing
read_corpus, read_table, text_of = KIT["read_corpus"], KIT["read_table"], KIT["text_of"]

def read_tsv(path):
    """Return a table of strings, numbers as they are written; a row is a line."""
    table = pd.read_csv(path, sep="\t", dtype=str, na_filter=False, quoting=csv.QUOTE_NONE,
                        encoding="utf-8-sig", encoding_errors="replace")
    return table.map(KIT["unquoted"]) if len(table) else table

def digest(path):
    """Return what provenance keeps of an input: the sha256 of a file, an index or a model."""
    if not Path(path).exists():  # a model of the hub is known by its name
        return ""
    return KIT["digest"](path)
