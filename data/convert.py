"""
Convert a corpus, claims, qrels, runs or verdicts of other formats into the files of the kit.

Reads   FILE, a text in UTF-8, packed by gzip or not: CSV or TSV with a header, JSON Lines, a JSON
        document (an array of records, or an object {id: record}), a run or qrels of TREC, also as
        JSON (see below)
Writes  OUT: JSON Lines for a corpus, else TSV. Claims that hold their evidence, such as SciFact's,
        become claims.SPLIT.tsv and qrels.SPLIT.tsv
Prints  the kind of the table and its number of rows; the last line is JSON. Warnings count what is
        left out

Examples
    python data/convert.py papers.csv --columns abstract_id=pmid,abstract=text --out corpus.jsonl
    python data/convert.py posts.json --columns claim_id=index,claim=text --out claims.test.tsv
    python data/convert.py judged.csv --labels "REFUTES=false,REFUTES=wrong" --out qrels.test.tsv
    python data/convert.py run.trec --out run.tsv
    python data/convert.py papers-2024.jsonl.gz papers-2025.jsonl.gz --out corpus.jsonl
    python data/convert.py pairs.csv --make-ids --out claims.test.tsv

The name of OUT gives the kind of the table: claims.test.tsv, qrels.test.tsv, corpus.jsonl, run.tsv.
For other names, give --kind; without it, the first line of this list whose columns the file has
decides:

    kind      columns of the file
    verdicts  claim_id, abstract_id, rank, label; optional score, p_supports, p_refutes, p_nei
    run       claim_id, abstract_id, rank; optional score (default: minus the rank)
    run       claim_id, preds (a list of abstract_ids, best first)
    run       TREC's six fields, or JSON {claim_id: {abstract_id: score}}: ranked by score
    qrels     claim_id, abstract_id, label or relevance
    qrels     TREC's four fields, or JSON {claim_id: {abstract_id: relevance}}: whole numbers only
    corpus    abstract_id, abstract (a text, or a list of sentences); any other field
    claims    claim_id, claim; optional language

The column names of BEIR (_id, title, text; query-id, corpus-id, score), SciFact (doc_id; id, claim,
evidence), ClimateCheck (abstract_original_index, annotation) and CheckThat! (post_id, tweet_text,
cord_uid, preds) are known, in upper or lower case. Name all others with --columns.

Errors name FILE:LINE. In a JSON document, the number is that of the record.
"""

import argparse
import contextlib
import csv
import gzip
import hashlib
import io
import json
import math
import os
import re
import sys
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd

LABELS = ("SUPPORTS", "REFUTES", "NEI")
SPELLINGS = {  # without white space, hyphens and underscores, in either case
    "SUPPORTS": "support(s|ed)?|entail(s|ed|ment)",
    "REFUTES": "refute[sd]?|contradict(s|ed|ion)?",
    "NEI": "nei|notenough(info(rmation)?|evidence)|neutral",
}
FORMS = [  # the columns that a kind needs; the first form that fits is taken
    "verdicts: claim_id, abstract_id, rank, label",
    "run: claim_id, abstract_id, rank",
    "run: claim_id, preds",  # CheckThat!
    "run: claim_id, q0, abstract_id, score",  # TREC
    "qrels: claim_id, abstract_id, relevance",
    "qrels: claim_id, abstract_id, label",
    "corpus: abstract_id, abstract",
    "claims: claim_id, claim",
    "narratives: claim_id, codes",
]
SCORED_RUN = (
    "run: claim_id, abstract_id, score"  # if a run is wanted; else scores may be judgements
)
PAIR = ["claim_id", "abstract_id"]
TEXTS = ["claim", "abstract"]  # --make-ids makes claim_id and abstract_id from them
EVIDENCE = ["evidence", "cited_doc_ids"]  # of SciFact's claims
PROBABILITIES = "p_supports p_refutes p_nei".split()
WRITTEN = {  # the columns of each kind that are written, if the table has them
    "verdicts": "claim_id abstract_id rank score label p_supports p_refutes p_nei".split(),
    "run": "claim_id abstract_id rank score".split(),
    "qrels": "claim_id abstract_id label".split(),
    "claims": "claim_id claim language".split(),
    "narratives": "claim_id codes".split(),
    "corpus": ["abstract_id"],  # and every field that does not belong to a pair
}
OF_A_PAIR = "claim_id claim rank score label relevance".split() + PROBABILITIES
OUR_COLUMNS = {*OF_A_PAIR, *"abstract_id abstract title language codes preds".split(), *EVIDENCE}
KNOWN_COLUMNS = (  # of any file, written as for --columns
    "abstract_id=abstract_original_index,label=annotation,"  # ClimateCheck
    "claim_id=post_id,claim=tweet_text,abstract_id=cord_uid,"  # CheckThat!
    "claim_id=query-id,abstract_id=corpus-id,abstract_id=doc_id"  # BEIR, SciFact
)
KNOWN_FORMS = [  # of a file that has all columns of one of these; the first is taken
    "abstract_id=_id,title=title,abstract=text",  # BEIR's corpus
    "claim_id=_id,claim=text",  # BEIR's queries
    "claim_id=query-id,abstract_id=corpus-id,relevance=score",  # BEIR's qrels
    "claim_id=id,claim=claim",  # SciFact's claims
    "abstract_id=id,abstract=abstract",
]
PAPERS = {"cord_uid", "pubkey"}  # CheckThat!: the paper that a post is about
TREC_QRELS = "claim_id q0 abstract_id relevance".split()
TREC_RUN = "claim_id q0 abstract_id position score tag".split()
CONSUMED = {*TREC_RUN, "preds", "relevance"}  # what ranks and labels are made from
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
NO_TEXTS = {  # first bytes of files that hold no text in UTF-8
    b"\xff\xfe": "a text in UTF-16",
    b"\xfe\xff": "a text in UTF-16",
    b"\xd0\xcf\x11\xe0": "an old Excel workbook",
    b"PK\x03\x04": "an Excel workbook or another zip archive",
}
WARNINGS = []  # all warnings of this process


# ---------------------------------------------------------------- Messages and outputs
def shown(text):
    """Return a text as one line, with its control characters escaped."""
    text = " ".join(text.split())
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def warn(where, what):
    """Print a warning on stderr, and keep it for SOURCE.md."""
    WARNINGS.append(shown(f"warning: {where}: {what}"))
    print(WARNINGS[-1], file=sys.stderr)


def fail(where, what):
    """End with one line on stderr and exit status 2."""
    print(shown(f"error: {where}: {what}"), file=sys.stderr)
    sys.exit(2)


def check_outs(outs, inputs):
    """Refuse outputs that would replace an input or a folder, or need a folder where a file is."""
    inputs = [Path(path).resolve() for path in inputs]
    for out in outs:
        if out.is_dir() or any(parent.is_file() for parent in out.parents):
            fail(out, "a folder stands there, or a file in place of its folder; give another --out")
        if out.resolve() in inputs:
            fail(out, "this command reads it; give another --out")


@contextlib.contextmanager
def whole(path):
    """Yield a temporary path; what is written there replaces path if the block succeeds."""
    new = Path(f"{path}.{os.getpid()}.tmp")
    try:
        yield new
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


# ---------------------------------------------------------------- Values
def as_text(value):
    """Return a value as text in Unicode NFC.

    Null and NaN are "", 7.0 is "7"; the items of a list are joined by blanks.
    """
    if isinstance(value, list):
        return " ".join(as_text(item) for item in value if item is not None)
    if value is None or value != value:  # NaN
        return ""
    if isinstance(value, float) and value.is_integer():  # an integer in a column with gaps
        value = int(value)
    if not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False, default=str)
    return unicodedata.normalize("NFC", value)


def one_line(value):
    """Return a value as text, with single blanks for white space; ids and claims are such texts."""
    return " ".join(as_text(value).split())


def made_id(value):
    """Return an id for a text: 12 digits of the sha256 of its one_line(), "" for an empty text."""
    text = one_line(value)
    if not text:
        return ""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def label_of(text):
    """Return the label that a text spells; an unknown spelling is returned as it is."""
    spelling = re.sub(r"[\s_-]", "", text)
    for label, pattern in SPELLINGS.items():
        if re.fullmatch(pattern, spelling, re.IGNORECASE):
            return label
    return text


def grade_label(grade):
    """Return SUPPORTS for a grade of relevance above 0, NEI for 0, "" (not judged) below 0."""
    grade = float(grade)
    if grade > 0:
        return "SUPPORTS"
    if grade == 0:
        return "NEI"
    return ""


def evidence_of(record):
    """Return {abstract_id: label} of a claim of SciFact; cited without evidence is NEI."""
    labels = {one_line(abstract_id): "NEI" for abstract_id in record.get("cited_doc_ids") or ()}
    for abstract_id, rationales in (record.get("evidence") or {}).items():
        if isinstance(rationales, dict):  # SciFact-Open: one rationale
            rationales = [rationales]
        if rationales:  # all rationales of an abstract share a label
            labels[abstract_id] = rationales[0]["label"]
    return labels


# ---------------------------------------------------------------- Reading CSV, TSV and TREC
def open_text(path):
    """Open a text file in UTF-8, which gzip may have packed."""
    with open(path, "rb") as file:
        start = file.read(4)
    for first_bytes, what in NO_TEXTS.items():
        if start.startswith(first_bytes):
            fail(path, f"{what}; save it as CSV in UTF-8")
    if start.startswith(b"\x1f\x8b"):
        return gzip.open(path, "rt", encoding="utf-8-sig")
    return open(path, encoding="utf-8-sig")


def first_line(path):
    """Return the first line that is not blank, "" if there is none."""
    with open_text(path) as file:
        for line in file:
            if line.strip():
                return line.strip()
    return ""


def unquoted(field):
    """Return a field without the quotation marks that pandas puts around it."""
    quoted = re.fullmatch(r'"((?:[^"]|"")*)"', field)
    return quoted[1].replace('""', '"') if quoted else field


def trec_rows(lines):
    """Return {line number: fields} of a TREC file, with its columns as line 0; {} for others."""
    first = next(iter(lines.values()), "").split()
    if len(first) == 4 and NUMBER.fullmatch(first[3]):
        columns = TREC_QRELS
    elif len(first) >= 6 and all(map(NUMBER.fullmatch, first[3:5])):
        columns = TREC_RUN
    else:
        return {}
    splits = len(columns) - 1  # the tag of a run may have several words
    rows = {number: line.strip().split(maxsplit=splits) for number, line in lines.items()}
    return {0: columns} | rows


def csv_rows(path, text, delimiter):
    """Return {line number: fields} of the rows of a CSV file that are not blank."""
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(io.StringIO(text), delimiter=delimiter, strict=True, skipinitialspace=True)
    rows = {}
    try:
        for row in reader:
            if any(field.strip() for field in row):
                rows[reader.line_num] = row
    except csv.Error as error:
        fail(f"{path}:{reader.line_num}", f"{error}; fix the quotation marks")
    return rows


def table_of_rows(path, rows):
    """Return the table of {line number: fields}, of which the first row names the columns."""
    if not rows:
        fail(path, "an empty file; give one with rows")
    columns = [column.strip() for column in rows.pop(min(rows))]
    for line, fields in rows.items():
        if len(fields) != len(columns):
            what = f"{len(fields)} fields, but the first row has {len(columns)}; fix the row"
            fail(f"{path}:{line}", what)
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns, dtype=str)


def read_delimited(path):
    """Return the table of a CSV, TSV or TREC file, as texts; its index holds line numbers."""
    with open_text(path) as file:
        text = file.read()
    lines = {number: line for number, line in enumerate(text.split("\n"), 1) if line.strip()}
    header = next(iter(lines.values()), "")
    delimiter = max("\t,;", key=header.count)
    rows = trec_rows(lines)
    if not rows and delimiter == "\t" and len({line.count("\t") for line in lines.values()}) == 1:
        # Every line has as many tabs: a row is a line, and no quotation mark can swallow rows
        for number, line in lines.items():
            rows[number] = [unquoted(field) for field in line.split("\t")]
    return table_of_rows(path, rows or csv_rows(path, text, delimiter))


# ---------------------------------------------------------------- Reading JSON
def parsed(path, number, text):
    """Return the value of a JSON text that begins in this line of the file."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        line = number + error.lineno - 1
        fail(f"{path}:{line}", f"no JSON ({error.msg}, column {error.colno}); fix the line")
    if "\\u" in text:  # half of a surrogate pair?
        original = json.dumps(value, ensure_ascii=False)
        text = original.encode("utf-8", "replace").decode()
        if text != original:
            warn(f"{path}:{number}", "half a surrogate pair is no character and becomes ?")
            value = json.loads(text)
    return value


def read_json(path):
    """Yield (line, record) of JSON Lines, or (number, record) of a JSON array."""
    with open_text(path) as file:
        texts = enumerate(file, 1)
        if not re.fullmatch(r"\{.*\}", first_line(path)):
            texts = [(1, file.read())]
        for line, text in texts:
            if not text.strip():
                continue
            value = parsed(path, line, text)
            records = value if isinstance(value, list) else [value]
            for number, record in enumerate(records, line):
                if not isinstance(record, dict):
                    what = f"a JSON object is needed, not {type(record).__name__}; fix it"
                    fail(f"{path}:{number}", what)
                yield number, record


def nested_table(path, entries, wanted):
    """Return the table of {claim_id: {abstract_id: number}} or of {id: record}.

    entries: the items of the outer object; wanted: the kind that --kind or --out names, or None
    """
    rows = [(key, "Q0", *field) for key, record in entries for field in record.items()]
    table = pd.DataFrame(rows, columns=[*TREC_QRELS[:3], "score"], dtype=object)
    scores = table["score"]
    if not all(isinstance(score, (int, float)) for score in scores):
        return pd.DataFrame([{"id": key} | record for key, record in entries], dtype=object)
    if wanted != "run" and all(score % 1 == 0 for score in scores):
        warn(path, "whole numbers are taken for relevance (with --kind run, for scores)")
        table = table.rename(columns={"score": "relevance"})
    return table


def json_table(path, wanted):
    """Return the table of JSON records, with numbers and lists as they are."""
    lines = dict(read_json(path))
    entries = [entry for record in lines.values() for entry in record.items()]
    if all(isinstance(value, dict) for _, value in entries):
        table = nested_table(path, entries, wanted)
        table.index += 1
        return table
    return pd.DataFrame(list(lines.values()), list(lines), dtype=object)


def read_any(path, wanted):
    """Return the table of a file of any format; wanted: as in nested_table()."""
    try:
        start = first_line(path)
        if start.startswith(("[", "{")) or (start and Path(path).suffix in (".jsonl", ".json")):
            return json_table(path, wanted)
        return read_delimited(path)
    except (UnicodeDecodeError, EOFError) as error:  # EOFError: a part of a gzip file
        fail(path, f"not a text in UTF-8 ({error}); save it as CSV in UTF-8")


# ---------------------------------------------------------------- Our columns from theirs
def reject(table, is_bad, what):
    """Return the table, or end at the first row for which is_bad (a truth value per row) holds."""
    if is_bad.any():
        row = table[is_bad].iloc[0]
        values = row.reindex(WRITTEN["verdicts"]).dropna()
        fail(row.name, f"{what}: {' '.join(map(str, values))}; fix the row")
    return table


def leave_out(table, is_bad, what):
    """Return the table without the rows for which is_bad holds; a warning counts them."""
    if is_bad.any():
        warn(table.index[is_bad][0], f"{what}; rows left out: {is_bad.sum()}")
    return table[~is_bad]


def guessed_names(columns, make_ids):
    """Return {column: our name} of what is known without --columns; all columns in lower case."""
    guesses = {column: column for column in OUR_COLUMNS} | name_pairs(KNOWN_COLUMNS)
    for form in KNOWN_FORMS:
        names = name_pairs(form)
        if set(names) <= columns:
            guesses |= names
            break
    if make_ids or "abstract_id" in columns:
        guesses.pop("id", None)  # it may number pairs
    return guesses


def with_our_columns(path, table, given, make_ids):
    """Return a table with our column names; given: {column of the file: our column}."""
    theirs = list(table)
    for column, ours in given.items():
        if column not in theirs:
            what = f"there is no column {column} for {ours} among {', '.join(theirs)}"
            if ours in theirs:
                what += f"; our name comes first: --columns {column}={ours}"
            fail(f"{path}:1", what)
    lower = {column.strip().lower() for column in theirs}
    guesses = guessed_names(lower, make_ids)
    names = []
    for column in theirs:
        name = guesses.get(column.strip().lower(), column)
        if name in given.values():
            name = f"their {column}"
        names.append(given.get(column, name))
    for name in filter(None, names):
        same = [column for column, ours in zip(theirs, names) if ours == name]
        if len(same) > 1:
            what = f"two columns mean {name}: {' and '.join(same)}; choose one with --columns"
            fail(f"{path}:1", f"{what} {name}={same[0]}, or rename one")
    table = table.set_axis(names, axis=1)
    if PAPERS & lower and set(PAIR) <= set(table) and not set(OF_A_PAIR[2:]) & set(table):
        table = table.assign(relevance="1")
    return table


def with_made_ids(table, kind):
    """Return a table with the ids that its kind needs, made from texts if the file has none."""
    for text in TEXTS:
        column = f"{text}_id"
        if text in table and column not in table and column in WRITTEN[kind]:
            ids = table[text].map(made_id)
            what = f"{text} is empty (--drop-empty leaves such rows out)"
            reject(table, ids == "", what)
            table = table.assign(**{column: ids})
    return table


def wanted_kind(kind, out):
    """Return the kind that --kind or the name of --out gives, None if neither does."""
    named = Path(out).name.split(".")[0]
    if named not in WRITTEN:
        return kind
    if kind not in (None, named):
        fail("--kind", f"{kind}, but the name {out} says {named}; change one of them")
    return named


def kind_of(path, table, wanted, make_ids):
    """Return the kind of the first form of which all columns are there, or can be made.

    wanted: the kind that --kind or --out names, or None
    """
    found = set(table)
    if make_ids:
        found |= {f"{text}_id" for text in found.intersection(TEXTS)}
    forms = FORMS
    if wanted:
        forms = [form for form in [*FORMS, SCORED_RUN] if form.startswith(wanted)]
    for form in forms:
        kind, needed = form.split(": ")
        missing = [column for column in needed.split(", ") if column not in found]
        if not missing:
            return kind
    fail(
        f"{path}:1",
        f"""columns {", ".join(table):.200} make no {wanted or "known"} table; name the missing
        ones, such as --columns {"=THEIRS,".join(missing)}=THEIRS (--make-ids makes ids from texts;
        --kind or the name of --out gives the kind; kinds and columns: {"; ".join(forms)})""",
    )


# ---------------------------------------------------------------- The checks of a kind
def with_texts(table, columns, on_fault=reject):
    """Return a table with one-line texts in these columns; claims and ids are not empty."""
    for column in table.columns.intersection(columns):
        table = table.assign(**{column: table[column].map(one_line)})
        if column in ("claim", *PAIR):
            table = on_fault(table, table[column] == "", f"{column} is empty")
    return table


def without_repeats(table, columns, on_fault=reject):
    """Return a table without rows that repeat an earlier one; one that contradicts it is a fault.

    Rows are compared by these columns, of which the ids say what a row is about. White space makes
    no difference.
    """
    texts = table[table.columns.intersection(columns)]
    # Hashes: the texts of a whole corpus take gigabytes
    texts = texts.map(lambda value: hash(one_line(value)))
    repeated = texts.duplicated()
    table = leave_out(table, repeated, "it repeats an earlier row")
    ids = texts.columns.intersection(PAIR)
    differs = texts[~repeated].duplicated(ids)
    return on_fault(table, differs, f"an earlier row has this {' and '.join(ids)} and differs")


def to_floats(column):
    """Return a column of texts as floats, NaN for what is not a number."""
    return pd.to_numeric(column, errors="coerce").astype(float)


def with_list_rows(table):
    """Return CheckThat!'s lists of ids, in the order of rank, as a row for every id."""
    lists = table["preds"].map(one_line).str.findall(r"[^\s\[\]'\",]+")
    table = leave_out(table.assign(abstract_id=lists), lists.str.len() == 0, "preds holds no id")
    table = table.explode("abstract_id")
    return table.assign(rank=table.groupby(level=0).cumcount() + 1)


def with_trec_ranks(table):
    """Return a run ranked as trec_eval does it: by score in float32, ties by id, backwards."""
    scores = to_floats(table["score"]).astype("float32")
    reject(table, scores.isna(), "the score is not a number")
    table = table.assign(score=scores)
    ordered = table.sort_values(["score", "abstract_id"], ascending=False)
    return table.assign(rank=ordered.groupby("claim_id").cumcount() + 1)


def with_relevance_labels(table):
    """Return a table with labels for its relevance, "" where it is not judged."""
    grades = to_floats(table["relevance"])
    is_bad = (table["relevance"] != "") & (grades % 1 != 0)
    what = "the relevance is not an integer (if this is a run, it needs a header with rank)"
    reject(table, is_bad, what)
    if (grades > 1).any():
        warn("qrels", f"{(grades > 1).sum()} rows have grades above 1, which count as 1")
    what = "relevance is judged, not stance: SUPPORTS means relevant"
    if (grades == 0).any() and "q0" not in table:
        what += " (if the numbers stand for labels, map them: --labels SUPPORTS=1,REFUTES=0)"
    warn("qrels", what)
    return table.assign(label=grades.map(grade_label))


def with_our_labels(table, meanings):
    """Return a table with labels as we spell them; rows without a label are left out.

    meanings: {label of the file: ours}, from --labels
    """
    table = table.assign(label=table["label"].replace(meanings).map(label_of))
    table = leave_out(table, table["label"] == "", "there is no judgement")
    unknown = table["label"][~table["label"].isin(LABELS)]
    if len(unknown):
        counts = unknown.value_counts()[:20]
        flag = ",OURS=".join(counts.index)
        what = f"the label is none of {', '.join(LABELS)}; the file has {counts.to_dict()}"
        advice = f"""convert.py maps them with --labels "OURS={flag}", and grades of relevance with
            --columns relevance=THEIRS"""
        fail(unknown.index[0], f"{what}; {advice}")
    return table


def with_checked_ranks(table):
    """Return a run by claim and rank; the ranks of a claim are 1, 2, 3, without gaps."""
    table = table.assign(rank=to_floats(table["rank"]))
    if "score" not in table:
        table = table.assign(score=-table["rank"])
    claims = table["claim_id"].factorize()[0]  # the first claim of the file is 0
    table = table.iloc[np.lexsort((table["rank"], claims))]
    counted = table.groupby("claim_id").cumcount() + 1
    reject(table, table["rank"] != counted, "the ranks of a claim are not 1, 2, 3, ...")
    table = table.assign(rank=counted)
    for column in table.columns.intersection(["score", *PROBABILITIES]):
        is_finite = np.isfinite(to_floats(table[column]))
        reject(table, ~is_finite, f"{column} is not a finite number")
    scores = to_floats(table["score"])
    is_bad = scores > scores.groupby(table["claim_id"]).shift()
    what = "the score is above that of the rank before: higher is better, so negate distances"
    return reject(table, is_bad, what)


def checked_corpus(table, make_ids):
    """Return the table of a corpus, without the columns that belong to pairs."""
    table = with_texts(table, ["abstract_id"])
    columns = ["abstract_id", "abstract"]
    if not make_ids:
        columns.append("title")
    table = without_repeats(table, columns)
    if "claim" in table or "claim_id" in table:
        table = table.drop(columns=OF_A_PAIR, errors="ignore")
    texts = table.reindex(columns=["title", "abstract"])
    texts = texts.map(lambda value: hash(one_line(value)))
    is_copy = texts.duplicated() & (texts["abstract"] != hash(""))
    if is_copy.any():
        what = "an earlier abstract has the same title and text, but another id; all are kept"
        warn(table.index[is_copy][0], f"{what}: {is_copy.sum()}")
    return table


def checked(table, kind, labels, on_fault=reject):
    """Return a table with the columns of its kind, in the form that the scripts accept.

    labels: {label of the file: ours}; on_fault: reject(), or leave_out() for published data sets
    """
    columns = WRITTEN[kind]
    if kind == "run" and "preds" in table:
        table = with_list_rows(table)
    if kind == "qrels" and "label" not in table and labels:
        table = table.rename(columns={"relevance": "label"})
    table = with_texts(table, [*columns, "relevance"], on_fault)
    if kind == "qrels" and "label" not in table:
        table = with_relevance_labels(table)
    if kind in ("qrels", "verdicts"):
        table = with_our_labels(table, labels)
    table = without_repeats(table, columns, on_fault)
    if kind == "run" and "rank" not in table:
        table = with_trec_ranks(table)
    if kind in ("run", "verdicts"):
        table = with_checked_ranks(table)
    if "language" in table and not any(table["language"]):
        table = table.drop(columns="language")
    return table[[column for column in columns if column in table]]


# ---------------------------------------------------------------- Writing
def quoted(text):
    """Return a text with quotation marks as pandas writes it: in marks, with its own doubled."""
    return '"' + text.replace('"', '""') + '"' if '"' in text else text


def write_table(path, table):
    """Write a table as TSV, whole or not at all; only claims are ever quoted."""
    if "claim" in table:
        table = table.assign(claim=table["claim"].map(quoted))
    with whole(path) as new:
        table.to_csv(new, sep="\t", index=False, lineterminator="\n", quoting=csv.QUOTE_NONE)


def corpus_line(record, left_out):
    """Return a record as a line of corpus.jsonl, with its texts and finite numbers.

    left_out: a Counter of the fields that hold anything else. Title and abstract may be lists of
    sentences
    """
    record = dict.fromkeys(["abstract_id", "title", "abstract"]) | record  # these come first
    if record["title"] is not None:
        record["title"] = as_text(record["title"])
    record["abstract"] = as_text(record["abstract"])
    kept = {}
    for field, value in record.items():
        if isinstance(value, str):
            kept[field] = as_text(value)
        elif isinstance(value, (int, float)) and math.isfinite(value):
            kept[field] = value
        elif value is not None:
            left_out[field] += 1
    return json.dumps(kept, ensure_ascii=False) + "\n"


def warn_of_fields(where, left_out):
    """Warn of the fields that corpus_line() has left out."""
    for field, number in left_out.items():
        warn(where, f"{number} fields {field} are neither text nor number and are left out")


# ---------------------------------------------------------------- Converting
def source_table(path, wanted, args):
    """Return the kind and the table of a file, with our column names and ids.

    The index of the table holds FILE:LINE.
    """
    table = read_any(path, wanted)
    table = table.set_axis([f"{path}:{line}" for line in table.index])
    table = with_our_columns(path, table, args.columns, args.make_ids)
    if args.drop_empty:
        for text in table.columns.intersection(TEXTS):
            table = leave_out(table, table[text].map(one_line) == "", f"{text} is empty")
    kind = kind_of(path, table, wanted, args.make_ids)
    if args.make_ids:
        table = with_made_ids(table, kind)
    return kind, table


def source_of_all(args):
    """Return the kind and the table of all files; only a corpus is made of several."""
    wanted = wanted_kind(args.kind, args.out)
    tables = []
    for path in args.files:
        kind, table = source_table(path, wanted, args)
        if kind != "corpus" and len(args.files) > 1:
            fail(path, f"it holds {kind}, but only a corpus is made of several files")
        tables.append(table.astype(object))
    source = pd.concat(tables)
    return kind, source.where(source.notna(), None)


def is_evidence(value):
    """Return whether a claim's evidence has SciFact's form, {doc_id: [{label: ...}]}."""
    return isinstance(value, dict) and str not in map(type, value.values())


def evidence_pairs(table):
    """Return the judged pairs of claims that hold their evidence, as SciFact's do."""
    pairs = []
    for row, record in table.to_dict("index").items():
        try:
            for abstract_id, label in evidence_of(record).items():
                pairs.append((row, record["claim_id"], abstract_id, label))
        except (AttributeError, LookupError, TypeError) as error:
            fail(row, f"evidence is not {{doc_id: [{{label: ...}}]}} ({error!r}); fix the line")
    columns = ["row", *WRITTEN["qrels"]]
    return pd.DataFrame(pairs, columns=columns, dtype=object).set_index("row")


def convert(args):
    """Write the files as ours, and return a summary."""
    where = ", ".join(args.files)
    out = Path(args.out)
    kind, source = source_of_all(args)
    if kind == "corpus":
        table = checked_corpus(source, args.make_ids)
    else:
        table = checked(source, kind, args.labels)
    if table.empty:
        fail(where, "no rows, or none that could be kept; give a file with rows")
    made = {out: table}
    used = {*table, *CONSUMED}
    if kind == "claims" and any(map(is_evidence, source.get("evidence", []))):
        used.update(EVIDENCE)
        qrels = out.with_name("qrels." + out.name.removeprefix("claims."))
        made[qrels] = checked(evidence_pairs(source), "qrels", args.labels)
    check_outs(made, args.files)
    out.parent.mkdir(parents=True, exist_ok=True)
    if kind == "corpus":
        left_out = Counter()
        with whole(out) as new, open(new, "w", encoding="utf-8") as file:
            for record in table.to_dict("records"):
                file.write(corpus_line(record, left_out))
        warn_of_fields(out, left_out)
    else:
        for target, rows in made.items():
            write_table(target, rows)
    unused = [column or "(no name)" for column in source if column not in used]
    if unused:
        warn(where, f"columns that {kind} do not need are left out: {', '.join(unused)}")
    names = list(map(str, made))
    print(f"{' and '.join(names)}: {kind}, {len(table)} rows")
    if kind == "qrels":
        print(f"labels: {table['label'].value_counts().to_dict()}")
    return {"made": names, "kind": kind, "rows": len(table)}


# ---------------------------------------------------------------- Command line
def name_pairs(text):
    """Return {name of the file: ours} of --columns or --labels."""
    names = {}
    for pair in re.split(r",(?=\s*\w+=)", text):  # a label may hold a comma
        ours, equals, theirs = map(str.strip, pair.partition("="))
        if not equals or theirs in names:
            what = f"{text!r} is not of the form OURS=THEIRS,... with each of THEIRS once"
            raise argparse.ArgumentTypeError(what)
        names[theirs] = ours
    return names


def label_pairs(text):
    """Return {label of the file: ours} of --labels."""
    meanings = name_pairs(text)
    for ours in meanings.values():
        if ours not in LABELS:
            what = f"{ours} is none of {', '.join(LABELS)}; our label comes first: SUPPORTS={ours}"
            raise argparse.ArgumentTypeError(what)
    return meanings


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = lambda message: fail("convert.py", f"{message}; see --help")
    add = parser.add_argument
    # fmt: off
    add("files", metavar="FILE", nargs="+", help="convert this file; several become one corpus")
    add("--out", required=True,
        help="""write this file, JSON Lines for a corpus, else TSV; the qrels of claims that hold
        their evidence go beside it, so name it claims.SPLIT.tsv""")
    add("--kind", choices=WRITTEN,
        help="""make this kind of table (default: the first word of the name of --out if it is a
        kind, else the first kind of the list above whose columns the file has)""")
    add("--make-ids", action="store_true",
        help="""make an id from the text of each claim or abstract if the file has no claim_id or
        abstract_id; equal texts get equal ids, in all files""")
    add("--drop-empty", action="store_true",
        help="leave out rows with an empty claim or abstract, whichever kind is made")
    add("--columns", type=name_pairs, default={}, metavar="OURS=THEIRS,...",
        help="read our column OURS from the file's column THEIRS (default: the names above)")
    add("--labels", type=label_pairs, default={}, metavar="OURS=THEIRS,...",
        help="""read the file's label THEIRS as OURS: SUPPORTS, REFUTES or NEI, each of which may be
        given several times (default: common spellings such as supported, contradict, neutral)""")
    # fmt: on
    args = parser.parse_intermixed_args()
    try:
        print(json.dumps(convert(args)))
    except OSError as error:
        fail(error.filename or args.out, error.strerror)


if __name__ == "__main__":
    main()
