"""
Convert runs, verdicts, qrels and claims of other formats into the TSV files of the kit.

Reads   FILE: a table with a header, as TSV or CSV (commas or semicolons), or a TREC file;
        UTF-8 or UTF-16, also compressed by gzip
Writes  OUT.tsv, and its provenance OUT.tsv.meta.json (command, sha256 of FILE, warnings)
Prints  the kind of the table and its number of rows; the last line is JSON

Examples
    python data/convert.py run.trec.gz --out run.tsv
    python data/convert.py submission.csv --out verdicts.tsv
    python data/convert.py posts.csv --columns claim=text,claim_id=Claim_ID --out claims.tsv

The columns tell which kind a table is; the first kind that fits is taken:

    verdicts  claim_id, abstract_id, rank, label; optional score, p_supports, p_refutes, p_nei
    run       claim_id, abstract_id, rank; optional score (default: minus the rank); TREC: 6 fields
    qrels     claim_id, abstract_id, label or relevance; TREC: 4 fields
    claims    claim_id, claim; optional language

Known as well are the columns of ClimateCheck (abstract_original_index, annotation) and CheckThat!
(post_id, tweet_text, cord_uid, preds). --columns names others.
"""
import argparse
import csv
import gzip
import hashlib
import io
import json
import math
import os
import re
import shlex
import sys
import tempfile
import unicodedata
import zlib
from pathlib import Path

LABELS = ("SUPPORTS", "REFUTES", "NEI")
RELEVANT = "RELEVANT"  # where relevance is judged, not stance: TREC, CheckThat!, BEIR
SPELT = {  # in lower case, without white space and underscores
    "SUPPORTS": "supports?|supported|entailment",
    "REFUTES": "refute[sd]?|contradict(ion)?",
    "NEI": "nei|notenoughinfo(rmation)?|neutral"}
KINDS = {  # columns that each kind needs; the first kind that fits is taken
    "verdicts": ["claim_id", "abstract_id", "rank", "label"],
    "run": ["claim_id", "abstract_id", "rank"],
    "qrels": ["claim_id", "abstract_id", "label"],
    "claims": ["claim_id", "claim"]}
PROBABILITIES = ["p_supports", "p_refutes", "p_nei"]
COLUMNS = ["claim_id", "claim", "language", "abstract_id", "rank", "score", "label", "relevance"]
RENAMED = {
    "abstract_original_index": "abstract_id", "annotation": "label",  # ClimateCheck
    "post_id": "claim_id", "cord_uid": "abstract_id", "tweet_text": "claim"}  # CheckThat!
TREC = {  # by number of fields
    4: ["claim_id", "q0", "abstract_id", "relevance"],
    6: ["claim_id", "q0", "abstract_id", "rank", "score", "tag"]}
GUESSES = {  # for advice only: our column, and how others spell it
    "claim_id": "claimid id qid queryid postid tweetid", "claim": "claim text query tweet post",
    "abstract_id": "abstractid docid documentid paperid corpusid pid", "rank": "rank position",
    "label": "label verdict stance", "relevance": "relevance grade"}
WARNINGS = []  # of this call, for the provenance

# ---------------------------------------------------------------- Messages
def printable(text):
    """Return text as one line without control characters."""
    line = " ".join(str(text).split())
    return "".join(char if char.isprintable() else "?" for char in line)

def fail(where, what):
    """Bad input or usage: one line on stderr, exit status 2."""
    print(printable(f"error: {where}: {what}"), file=sys.stderr)
    sys.exit(2)

def warn(where, what):
    """Print a warning on stderr, and keep it for the provenance."""
    WARNINGS.append(printable(f"warning: {where}: {what}"))
    print(WARNINGS[-1], file=sys.stderr)

# ---------------------------------------------------------------- Texts, ids, labels
def one_line(text):
    """Return a text in NFC, with single blanks for white space."""
    return " ".join(unicodedata.normalize("NFC", text).split())

def torn(identifier):
    """Return whether an id holds a tab or a line break, which no TSV field can hold."""
    return "\t" in identifier or len(identifier.splitlines()) > 1

def label_of(text):
    """Return the label that a text spells; an unknown spelling is returned as it is."""
    bare = re.sub(r"[\s_]", "", text)
    for label, pattern in SPELT.items():
        if re.fullmatch(pattern, bare, re.IGNORECASE):
            return label
    return text

def grade_label(grade):
    """Return the label of a grade of relevance; below 0 means not judged, as in TREC: ""."""
    if math.isnan(float(grade)):
        raise ValueError(f"{grade} is no grade")
    if float(grade) > 0:
        return RELEVANT
    return "NEI" if float(grade) == 0 else ""

def warn_of_grades(where, grades):
    """Warn of grades above 1, which our labels do not keep."""
    above = sum(float(grade) > 1 for grade in grades)
    if above:
        warn(where, f"{above} rows have grades above 1, which count as 1; nDCG differs from "
                    "trec_eval's")

# ---------------------------------------------------------------- Reading
def sha256(path):
    """Return a file's sha256."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

def read_text(path):
    """Return a file's text with \\n as line break; its first bytes tell gzip and UTF-16."""
    data = Path(path).read_bytes()
    try:
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        fail(path, f"damaged gzip file ({error}); fetch it again")
    utf16 = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    text = data.decode("utf-16" if utf16 else "utf-8-sig", errors="replace")
    if not text.strip():
        fail(path, "an empty file; give one with rows")
    if "\0" in text:
        fail(path, "not a text file (a ZIP archive, an Excel workbook, or UTF-16 without its "
                   "mark?); export it as CSV in UTF-8")
    unreadable = text.count("\ufffd")
    if unreadable:
        warn(path, f"{unreadable} characters are not UTF-8, kept as U+FFFD")
    return text.replace("\r\n", "\n").replace("\r", "\n")

def is_number(text):
    """Return whether a text is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True

def trec_columns(line):
    """Return the columns of a TREC file by its first line, None if it is something else.

    The fourth field of qrels is a number, and so is the fifth one of a run.
    """
    fields = line.split()
    columns = TREC.get(len(fields))
    return columns if columns and is_number(fields[-1 if len(fields) == 4 else 4]) else None

def unquoted(field):
    """Return a field without the quotation marks that pandas puts around it."""
    quoted = re.fullmatch(r'"((?:[^"]|"")*)"', field)
    return quoted[1].replace('""', '"') if quoted else field

def rows_by_line(text, delimiter):
    """Return {line: fields} of a table that has one row a line."""
    rows = {}
    for number, line in enumerate(text.split("\n"), 1):
        rows[number] = line.split(delimiter)
        if '"' in line:
            rows[number] = [unquoted(field) for field in rows[number]]
    return rows

def rows_by_quotes(text, delimiter):
    """Return {line: fields} as the csv module reads them: a quoted field may hold anything."""
    rows, line = {}, 1
    reader = csv.reader(io.StringIO(text), delimiter=delimiter, strict=True, skipinitialspace=True)
    for row in reader:
        rows[line] = row
        line = reader.line_num + 1
    return rows

def split_table(path, text, delimiter):
    """Return {line: fields} of a table with a header.

    A TSV file in which every line has as many tabs as the header is read line by line: no
    quotation mark can swallow rows there. Anything else is left to the csv module.
    """
    by_line = rows_by_line(text, delimiter)
    widths = {len(row) for row in by_line.values() if any(row)}
    if delimiter == "\t" and len(widths) == 1:
        return by_line
    csv.field_size_limit(2**31 - 1)
    try:
        rows = rows_by_quotes(text, delimiter)
    except csv.Error as error:
        warn(path, f"read line by line, as its quotation marks do not match ({error})")
        return by_line
    broken = [line for line, row in rows.items() if any("\n" in field for field in row)]
    if broken:
        warn(f"{path}:{broken[0]}", f"{len(broken)} rows with line breaks inside quotation marks, "
                                    "the first one here; line breaks become blanks")
    return rows

def check_grades(path, rows):
    """End the program at a grade with a fraction: four fields of a run end with a score."""
    for line, row in rows.items():
        if is_number(row[-1]) and float(row[-1]) % 1 > 0:
            fail(f"{path}:{line}", f"{row[-1]} is no grade of TREC's qrels; if this is a run, add "
                 "a header line, with tabs as in all rows: claim_id abstract_id rank score")

def without_nameless(columns, rows):
    """Return columns and rows without the empty columns that a spreadsheet leaves at the end."""
    kept = [place for place, name in enumerate(columns)
            if name or any(row[place].strip() for row in rows.values())]
    rows = {line: [row[place] for place in kept] for line, row in rows.items()}
    return [columns[place] for place in kept], rows

def read_rows(path):
    """Return a table's columns, its rows as {line: fields}, and its delimiter (TREC: None).

    Blank lines are skipped. Every row has as many fields as there are columns.
    """
    text = read_text(path)
    lines = text.split("\n")
    first = next(line for line in lines if line.strip())
    columns = trec_columns(first)
    if not columns and first.lstrip()[0] in "{[":
        fail(f"{path}:1", "JSON, not a table; data/download.py reads published data sets")
    delimiter = None if columns else max("\t,;", key=first.count)
    if columns:
        rows = {number: line.split() for number, line in enumerate(lines, 1)}
    else:
        rows = split_table(path, text, delimiter)
    rows = {line: row for line, row in rows.items() if any(map(str.strip, row))}
    if not columns:
        columns = [name.strip('" ') for name in rows.pop(min(rows))]
    for line, row in rows.items():
        if len(row) != len(columns):
            fail(f"{path}:{line}",
                 f"{len(row)} fields, the first row has {len(columns)}; fix the row")
    if columns == TREC[4]:
        check_grades(path, rows)
    if "" in columns:
        columns, rows = without_nameless(columns, rows)
    return columns, rows, delimiter

# ---------------------------------------------------------------- Our columns from theirs
def reject(path, table, bad, what):
    """End the program at the first row of which bad holds."""
    if bad.any():
        row = table[bad].iloc[0]
        values = row.reindex(["claim_id", "abstract_id", "rank", "score", "label"]).dropna()
        fail(f"{path}:{row.name}", f"{what}: {' '.join(map(str, values))}; fix the row")

def renamed(path, table, theirs):
    """Return a table with our column names; theirs: {our column: column of the file}."""
    for ours, name in theirs.items():
        if name not in table:
            fail(f"{path}:1", f"no column {name} for {ours} among {', '.join(table)}")
    table = table.rename(columns={name: ours for ours, name in theirs.items()})
    table = table.rename(columns=RENAMED)
    twice = table.columns.duplicated()
    for name in table.columns[twice].intersection([*COLUMNS, *PROBABILITIES, "preds"]):
        fail(f"{path}:1", f"two columns mean {name}; remove or rename one")
    return table.loc[:, ~twice]  # of the names that have no use, one stays for the warning

def numbers(column):
    """Return a column of texts as floats, NaN for what is not a number."""
    import pandas as pd
    return pd.to_numeric(column, errors="coerce").astype(float)

def with_decimal_points(path, table):
    """Return a table whose numbers have decimal points; spreadsheets write commas beside ;."""
    for column in table.columns.intersection(["score", "relevance", *PROBABILITIES]):
        values = table[column].str.replace(r"^(\s*-?\d*),(\d+(?:[eE][-+]?\d+)?\s*)$",
                                           r"\1.\2", regex=True)
        changed = (values != table[column]).sum()
        if changed:
            warn(path, f"{changed} fields of {column} with a decimal comma, read as a point")
        table = table.assign(**{column: values})
    return table

def with_list_rows(path, table):
    """Return CheckThat!'s lists of ids, in the order of rank, as a row for every id."""
    reject(path, table, table.duplicated("claim_id"), "there is an earlier list for this post")
    lists = table["preds"].str.findall(r"[^\s\[\]'\",]+")
    empty = lists.str.len() == 0
    if empty.any():
        warn(path, f"{empty.sum()} empty lists, left out")
    table = table.assign(abstract_id=lists)[~empty].explode("abstract_id")
    return table.assign(rank=(table.groupby(level=0).cumcount() + 1).astype(str))

def with_trec_ranks(path, table):
    """Return a TREC run with ranks as trec_eval computes them, whatever its ranks say.

    By score in single precision; equal ones by id, backwards.
    """
    import numpy as np
    scores = numbers(table["score"])
    reject(path, table, scores.isna(), "the score is not a number")
    with np.errstate(over="ignore"):
        order = table.assign(score=scores.astype("float32"))
    order = order.sort_values(["score", "abstract_id"], ascending=False)
    return table.assign(rank=(order.groupby("claim_id").cumcount() + 1).astype(str))

def with_relevance_labels(path, table):
    """Return a table with relevance as labels; rows of relevance below 0 are not judged."""
    grades = numbers(table["relevance"])
    reject(path, table, grades.isna(), "the relevance is not a number")
    labels = grades.map(grade_label)
    unjudged = labels == ""
    if unjudged.any():
        warn(path, f"{unjudged.sum()} rows of relevance below 0: not judged, left out")
    warn_of_grades(path, grades)
    return table.drop(columns="relevance").assign(label=labels)[~unjudged]

def translated(path, theirs):
    """Read a table of any format under our column names, with our ranks and scores.

    theirs: {our column: column of the file}. The index holds line numbers.
    """
    import pandas as pd
    columns, rows, delimiter = read_rows(path)
    table = pd.DataFrame(list(rows.values()), index=list(rows), columns=columns, dtype=str)
    table = renamed(path, table, theirs)
    if delimiter == ";":
        table = with_decimal_points(path, table)
    if {"claim_id", "preds"} <= set(table):
        table = with_list_rows(path, table)
    if columns == TREC[6]:
        table = with_trec_ranks(path, table)
    if "cord_uid" in columns and not {"rank", "score", "label", "relevance"} & set(table):
        table["relevance"] = "1"  # CheckThat!: the paper that a post is about
    if "relevance" in table and not {"rank", "label"} & set(table):  # else it judges nothing
        table = with_relevance_labels(path, table)
    return table

# ---------------------------------------------------------------- The kind, and its checks
def advice(columns):
    """Return a value of --columns: our names for theirs, as far as their spelling tells."""
    named = {}
    for ours, spellings in GUESSES.items():
        for name in columns:
            if re.sub(r"[\W_]", "", name).lower() in spellings.split():
                named.setdefault(ours, name)
    pairs = [f"{ours}={name}" for ours, name in named.items() if ours != name]
    return shlex.quote(",".join(pairs or ["claim_id=THEIRS", "claim=THEIRS"]))

def kind_of(path, columns):
    """Return the first kind of which all columns are there."""
    for kind, wanted in KINDS.items():
        if set(wanted) <= set(columns):
            return kind
    known = "; ".join(f"{kind}: {', '.join(wanted)}" for kind, wanted in KINDS.items())
    there = ", ".join(columns)
    fail(f"{path}:1", f"columns {there:.200} make no known table; give ours = theirs, such as "
                      f"--columns {advice(columns)} ({known}; or TREC, without a header)")

def with_clean_ids(path, table, columns):
    """Return a table whose ids have no outer blanks; one with a tab or line break is refused."""
    stripped = 0
    for column in columns:
        ids = table[column].str.strip()
        reject(path, table, ids == "", f"{column} is empty")
        reject(path, table, ids.map(torn), f"{column} holds a tab or a line break")
        stripped += (ids != table[column]).sum()
        table = table.assign(**{column: ids})
    if stripped:
        warn(path, f"{stripped} ids with blanks around them, stripped")
    return table

def with_labels(path, table, kind):
    """Return a table with labels as we spell them; qrels may have rows without any yet."""
    empty = table["label"].str.strip() == ""
    if kind == "qrels" and empty.any():
        warn(path, f"{empty.sum()} rows without a label: not judged, left out")
        table = table[~empty]
    labels = table["label"].map(label_of)
    bad = ~labels.isin([*LABELS, RELEVANT])
    reject(path, table, bad, f"the label is none of {', '.join(LABELS)}")
    if (labels == RELEVANT).any():
        warn(path, "relevance is judged, not stance: SUPPORTS means relevant")
    return table.assign(label=labels.replace(RELEVANT, LABELS[0]))

def with_checked_ranks(path, table):
    """Return a run by claim and rank; the ranks of a claim are 1, 2, 3, without gaps."""
    import numpy as np
    ranks = numbers(table["rank"])
    if "score" not in table:
        table = table.assign(score=-ranks)
    claim = table["claim_id"].factorize()[0]
    expected = ranks.groupby(claim).rank("first")
    reject(path, table, ranks != expected, "the ranks are not 1, 2, 3")
    for column in table.columns.intersection(["score", *PROBABILITIES]):
        values = table[column].astype(str).str.strip()
        reject(path, table, ~np.isfinite(numbers(values)), f"{column} is not a finite number")
        table = table.assign(**{column: values})
    return table.assign(rank=ranks.astype(int)).iloc[np.lexsort((expected, claim))]

def checked(path, table, kind):
    """Return a translated table with the columns of its kind, and nothing that the kit refuses."""
    ids = [column for column in KINDS[kind] if column.endswith("_id")]
    table = with_clean_ids(path, table, ids)
    if kind in ("qrels", "verdicts"):
        table = with_labels(path, table, kind)
    if kind == "claims":
        for column in table.columns.intersection(["claim", "language"]):
            table = table.assign(**{column: table[column].map(one_line)})
        reject(path, table, table["claim"] == "", "claim is empty")
        again = table.duplicated(["claim_id", "claim"])
        if again.any():
            warn(path, f"{again.sum()} duplicate rows, left out")
        table = table[~again]
    reject(path, table, table.duplicated(ids), "there is an earlier row for this")
    if kind == "claims":
        return table[[*KINDS[kind], *table.columns.intersection(["language"])]]
    if kind == "qrels":
        return table[KINDS[kind]]
    table = with_checked_ranks(path, table)
    columns = [*KINDS["run"], "score"]
    if kind == "verdicts":
        columns += ["label", *table.columns.intersection(PROBABILITIES)]
    return table[columns]

# ---------------------------------------------------------------- Writing
def write_table(path, rows):
    """Write rows as TSV; a field with a quotation mark is quoted, as pandas does."""
    with open(path, "w", encoding="utf-8", errors="replace", newline="") as file:
        csv.writer(file, delimiter="\t", lineterminator="\n").writerows(rows)

def made_before(out, task):
    """Return the provenance of out if this very task made it, else None."""
    try:
        made = json.loads(Path(f"{out}.meta.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(made, dict) or not isinstance(made.get("warnings"), list):
        return None
    return made if task.items() <= made.items() and Path(out).is_file() else None

def convert(args):
    """Write FILE as our TSV, whole or not at all, with its provenance; return facts."""
    out, meta = Path(args.out).resolve(), Path(f"{args.out}.meta.json")
    if out == Path(args.file).resolve() or out.is_dir():
        fail(args.out, "this command reads it, or it is a folder; give another --out")
    arguments = {"job": "convert.py", "file": args.file, "columns": args.columns, "out": args.out}
    task = {"arguments": arguments, "inputs": {args.file: sha256(args.file)}}
    made = None if args.force else made_before(args.out, task)
    if made:
        for line in made["warnings"]:
            print(printable(line), file=sys.stderr)
        print(printable(f"up to date: {args.out}"))
        if made.get("sha256") != sha256(out):
            warn(args.out, "its bytes have changed since it was made; --force makes it again")
        return {"made": []}
    table = translated(args.file, args.columns)
    kind = kind_of(args.file, table.columns)
    if table.empty:
        fail(args.file, "a header without rows; give a file with rows")
    theirs, table = table.columns, checked(args.file, table, kind)
    others = theirs.difference([*table.columns, "q0", "tag", "preds"], sort=False)
    if len(others):
        names = ", ".join(name or "(no name)" for name in others)
        warn(args.file, f"columns left out (no use in {kind}): {names}")
    facts = {"kind": kind, "rows": len(table)}
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{out.name}.tmp-", dir=out.parent) as folder:
        write_table(Path(folder, "table"), [table.columns, *table.itertuples(index=False)])
        meta.unlink(missing_ok=True)  # it does not describe the new bytes
        os.replace(Path(folder, "table"), out)
    made = task | {"command": sys.argv, "sha256": sha256(out), "warnings": WARNINGS} | facts
    meta.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(printable(f"{args.out}: {kind}, {len(table)} rows"))
    return {"made": [args.out]} | facts

def column_names(text):
    """Return {our column: column of the file} of --columns."""
    pairs = dict(pair.partition("=")[::2] for pair in text.split(","))
    for ours, theirs in pairs.items():
        if ours not in COLUMNS or not theirs:
            raise argparse.ArgumentTypeError(
                f"{ours}={theirs}: not OURS=THEIRS, with one of ours: {', '.join(COLUMNS)}")
    return pairs

def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: fail("convert.py", f"{message}; see --help")
    add = parser.add_argument
    add("file", metavar="FILE", help="run, verdicts, qrels or claims of another format")
    add("--out", required=True, metavar="OUT.tsv", help="file to write")
    add("--columns", type=column_names, default={}, metavar="OURS=THEIRS,...",
        help="our column names for those of FILE")
    add("--force", action="store_true", help="convert again, even if OUT.tsv is up to date")
    args = parser.parse_args()
    try:
        print(json.dumps(convert(args)))
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        fail(error.filename or args.out, f"{error.strerror}; check path, rights and space")

if __name__ == "__main__":
    main()
