"""
Convert a corpus, claims, qrels, runs or verdicts of other formats into the files of the kit.

Reads   FILE, in UTF-8: CSV or TSV with a header, JSON Lines, a JSON document (an array of records,
        or an object {id: record}), a run or qrels of TREC, also as JSON (see below); all of these
        packed by gzip, too
Writes  OUT: JSON Lines for a corpus, else TSV; for SciFact's claims with evidence, claims.SPLIT.tsv
        and beside it qrels.SPLIT.tsv
Prints  kind and number of rows of the table; the last line is JSON; warnings name what is left out

Examples
    python data/convert.py papers.csv --columns abstract_id=pmid,abstract=text --out corpus.jsonl
    python data/convert.py posts.json --columns claim_id=index,claim=text --out claims.test.tsv
    python data/convert.py judged.csv --labels "REFUTES=false,REFUTES=wrong" --out qrels.test.tsv
    python data/convert.py run.trec --out run.tsv
    python data/convert.py papers-2024.jsonl papers-2025.jsonl --out corpus.jsonl
    python data/convert.py pairs.csv --make-ids --out claims.test.tsv

The name of OUT tells the kind of the table, as in claims.test.tsv, qrels.test.tsv, corpus.jsonl and
run.tsv. For other names --kind does, or else the first line of this list whose columns are there:

    kind      columns of the file
    verdicts  claim_id, abstract_id, rank, label; optional score, p_supports, p_refutes, p_nei
    run       claim_id, abstract_id, rank; optional score (default: minus the rank)
    run       claim_id, preds (a list of abstract_ids, best first)
    run       TREC's six fields, or JSON {claim_id: {abstract_id: score}}: ranked by score
    qrels     claim_id, abstract_id, label or relevance
    qrels     TREC's four fields, or JSON {claim_id: {abstract_id: relevance}}: whole numbers only
    corpus    abstract_id, abstract (a text, or a list of sentences); any other field
    claims    claim_id, claim; optional language

The columns of BEIR (_id, title, text; query-id, corpus-id, score), SciFact (doc_id; id, claim,
evidence), ClimateCheck (abstract_original_index, annotation) and CheckThat! (post_id, tweet_text,
cord_uid, preds) are known, too. --columns names any others. Case does not matter in these names.

Errors name FILE:LINE. In a JSON document, the number is that of the record.
"""

import argparse
import contextlib
import csv
import gzip
import hashlib
import json
import math
import os
import re
import sys
import unicodedata
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd

LABELS = ("SUPPORTS", "REFUTES", "NEI")
RELEVANT = "RELEVANT"  # where relevance is judged, not stance: TREC, CheckThat!, BEIR
SPELLINGS = {  # without white space, hyphens and underscores, in either case
    "SUPPORTS": "support(s|ed|ing)?|entail(s|ed|ing|ment)?",
    "REFUTES": "refut(e|es|ed|ing|ation)|contradict(s|ed|ing|ion|ory)?",
    "NEI": "nei|neutral|(notenough|insufficient)(info(rmation)?|evidence)?",
}
FORMS = [  # the columns that a kind needs; the first form that fits is taken
    "verdicts: claim_id, abstract_id, rank, label",
    "run: claim_id, abstract_id, rank",
    "run: claim_id, preds",  # CheckThat!
    "run: claim_id, q0, abstract_id, score",  # TREC; q0 tells it from judgements
    "qrels: claim_id, abstract_id, relevance",
    "qrels: claim_id, abstract_id, label",
    "corpus: abstract_id, abstract",
    "claims: claim_id, claim",
]
SCORED_RUN = "run: claim_id, abstract_id, score"  # with --kind run; else they may be judgements
PAIR = ["claim_id", "abstract_id"]
TEXTS = ["claim", "abstract"]  # --make-ids makes claim_id and abstract_id of them
PROBABILITIES = "p_supports p_refutes p_nei".split()
WRITTEN = {  # columns that are written, where the table has them
    "verdicts": "claim_id abstract_id rank score label p_supports p_refutes p_nei".split(),
    "run": "claim_id abstract_id rank score".split(),
    "qrels": "claim_id abstract_id label".split(),
    "claims": "claim_id claim language".split(),
    "corpus": ["abstract_id"],  # and all others, but for those of a pair
}
JUDGED = "rank score label relevance p_supports p_refutes p_nei".split()
OF_A_PAIR = ["claim_id", "claim", *JUDGED]
OTHER_COLUMNS = "language abstract_id abstract title evidence cited_doc_ids preds".split()
OUR_COLUMNS = [*OF_A_PAIR, *OTHER_COLUMNS]
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
TAKEN = {*TREC_RUN, "preds", "relevance"}  # read for a run or qrels, so they are not left out
ROW_BREAK = re.compile(r"[\t\n\v\f\r\x1c-\x1e\x85\u2028\u2029]")  # as str.splitlines has it
NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?"
TREC_LINE = re.compile(rf"(?:\S+\s+){{3}}{NUMBER}(\s+{NUMBER}\s.*)?", re.IGNORECASE)
# A structure in place of a text, or its source text: FEVER's evidence, a list in a cell, ids alone
NESTED = r"""(?s)\d+([\s,]+\d+)+|\[[\d\s,\[\]]*\]|[\[{]\s*((['"]).*?\3\s*(?=[,:\]])|[\[{]).*[\]}]"""
WARNINGS = []  # of this call


# ---------------------------------------------------------------- Messages, texts, labels
def fail(where, what):
    """End with one line on stderr and exit status 2."""
    print(" ".join(f"error: {where}: {what}".split()), file=sys.stderr)
    sys.exit(2)


def warn(where, what):
    """Print a warning on stderr, and keep it."""
    WARNINGS.append(f"warning: {where}: {what}")
    print(WARNINGS[-1], file=sys.stderr)


def check_place(out, files):
    """End if an output would replace an input, a folder, or a device such as /dev/null."""
    if out.resolve() in [Path(file).resolve() for file in files]:
        fail(out, "this command reads it; give another --out")
    if out.exists() and not out.is_file():
        fail(out, "not made by this script, which would replace it; give another --out")


@contextlib.contextmanager
def whole(path):
    """Yield a path for this process alone; what is written there becomes path, or is removed."""
    new = Path(f"{path}.{os.getpid()}.tmp")
    try:
        yield new
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def one_line(text):
    """Return a text in NFC, with single blanks for white space."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def as_text(value):
    """Return a value as text: "" for none, "7" for 7 and 7.0, JSON for a list or a truth value."""
    if isinstance(value, str):
        return value
    if value is None or value != value:  # NaN
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, ensure_ascii=False, default=str)


def joined(value):
    """Return a text, or a list of sentences, as one text; None stays None."""
    if isinstance(value, list):
        return " ".join(as_text(sentence) for sentence in value if sentence is not None)
    return None if value is None else as_text(value)


def as_id(value):
    """Return an id as text: "7" for 7, 7.0 (an integer in a column with gaps) and " 7"."""
    return as_text(value).strip()


def made_id(text):
    """Return an id for a text, the same for any white space: 12 digits of its sha256, or ""."""
    text = one_line(joined(text) or "")
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
    """Return the label of a grade of relevance; a grade below 0 is not judged, as in TREC: ""."""
    grade = float(grade)
    if grade > 0:
        return RELEVANT
    if grade == 0:
        return "NEI"
    return ""


def corpus_record(record, left_out):
    """Return a record of the corpus: abstract_id, title, abstract, then its other fields.

    Title and abstract may be lists of sentences. Texts (in NFC) and finite numbers are kept;
    left_out counts the other fields. The id stays as it is, as in all files that refer to it.
    """
    kept = {"abstract_id": record.pop("abstract_id")}
    ours = {
        "title": joined(record.get("title")),
        "abstract": joined(record.get("abstract")) or "",
    }
    for field, value in (
        ours | record | ours
    ).items():  # the first for the order, the last for values
        if isinstance(value, str):
            kept[field] = unicodedata.normalize("NFC", value)
        elif isinstance(value, (int, float)) and math.isfinite(value):
            kept[field] = value
        elif value is not None:
            left_out[field] += 1
    return kept


def evidence_of(record):
    """Return {abstract_id: label} of a claim of SciFact; cited without evidence is NEI."""
    labels = {as_id(abstract_id): "NEI" for abstract_id in record.get("cited_doc_ids") or ()}
    for abstract_id, rationales in record.get("evidence", {}).items():
        if isinstance(rationales, dict):  # SciFact-Open: one rationale
            labels[abstract_id] = rationales["label"]
        elif rationales:  # all rationales of an abstract share a label
            labels[abstract_id] = rationales[0]["label"]
    return labels


# ---------------------------------------------------------------- Reading CSV, TSV and TREC
def unquoted(field):
    """Return a field without the quotation marks that pandas puts around it."""
    quoted = re.fullmatch(r'"((?:[^"]|"")*)"', field)
    return quoted[1].replace('""', '"') if quoted else field


def open_text(path):
    """Open a text in UTF-8, which gzip may have packed."""
    with open(path, "rb") as file:
        if not file.seekable():
            fail(path, "a pipe, which can be read only once; write it to a file first")
        is_packed = file.read(2) == b"\x1f\x8b"
    if is_packed:
        return gzip.open(path, "rt", encoding="utf-8-sig")
    return open(path, encoding="utf-8-sig")


def first_line(path):
    """Return the first line that is not blank, "" if there is none."""
    with open_text(path) as file:
        for line in file:
            if line.strip():
                return line.strip()
    return ""


def table_of_rows(path, rows):
    """Return a table of {line: fields}, of which the first are the names of the columns."""
    if not rows:
        fail(path, "an empty file; give one with rows")
    columns = [column.strip() for column in rows.pop(min(rows))]
    for line, fields in rows.items():
        if len(fields) != len(columns):
            what = f"{len(fields)} fields, the first row has {len(columns)}; fix it"
            fail(f"{path}:{line}", what)
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns, dtype=str)


def table_of_lines(path, lines):
    """Return a table of {line number: line} of a TSV file whose rows are lines."""
    return table_of_rows(path, {number: line.split("\t") for number, line in lines.items()})


def read_lines(path):
    """Return {number: line} of the lines of a text that are not blank."""
    with open_text(path) as file:
        return {number: line.rstrip("\n") for number, line in enumerate(file, 1) if line.strip()}


def quoted_rows(path, delimiter):
    """Yield (line, fields) of a text with quoted fields, which may hold line breaks."""
    csv.field_size_limit(2**31 - 1)
    line = 1
    with open_text(path) as file:
        reader = csv.reader(
            file, delimiter=delimiter, strict=True, skipinitialspace=delimiter != "\t"
        )
        try:
            for fields in reader:
                if "".join(fields).strip():
                    yield line, fields
                line = reader.line_num + 1
        except csv.Error as error:
            fail(f"{path}:{line}", f"{error}; fix its quotation marks")


def read_delimited(path):
    """Return the table of texts of a CSV, TSV or TREC file; the index holds line numbers."""
    header = first_line(path)
    lines = read_lines(path)
    rows = {number: line for number, line in lines.items() if line[0] not in "#;"}  # no comments
    match = TREC_LINE.fullmatch(next(iter(rows.values()), "").strip())
    if match:
        columns = TREC_QRELS
        if match[1]:  # a score and a tag, which may have several words
            columns = TREC_RUN
        last = len(columns) - 1
        rows = {number: line.split(maxsplit=last) for number, line in rows.items()}
        return table_of_rows(path, {0: columns} | rows)  # as if line 0 were a header
    delimiter = max("\t,;", key=header.count)
    tabs = {line.count("\t") for line in lines.values()}
    if delimiter == "\t" and len(tabs) == 1:
        # Every line has as many tabs: no quotation mark can swallow rows
        table = table_of_lines(path, lines)
        return table.map(unquoted).rename(columns=unquoted)
    return table_of_rows(path, dict(quoted_rows(path, delimiter)))


# ---------------------------------------------------------------- Reading JSON
def parsed(path, number, text):
    """Return the value of a JSON text that begins in this line of the file."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        line = number + error.lineno - 1
        fail(f"{path}:{line}", f"no JSON ({error.msg}, column {error.colno}); fix the line")
    if "\\u" in text:  # an escape, which may be half of a surrogate pair: that becomes ?
        value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    return value


def read_json(path):
    """Yield (line, record) of JSON Lines, or (number, record) of a JSON array."""
    with open_text(path) as file:
        if re.fullmatch(r"\{.*\}", first_line(path)):
            found = (
                (number, parsed(path, number, line))
                for number, line in enumerate(file, 1)
                if line.strip()
            )
        else:
            document = parsed(path, 1, file.read())
            found = enumerate(document if isinstance(document, list) else [document], 1)
        for number, record in found:
            if not isinstance(record, dict):
                fail(f"{path}:{number}", f"no JSON object but: {type(record).__name__}; fix it")
            yield number, record


def nested_table(records):
    """Return the table of {claim_id: {abstract_id: number}} or of {id: record}."""
    entries = [entry for record in records for entry in record.items()]
    rows = [(key, *field) for key, record in entries for field in record.items()]
    table = pd.DataFrame(rows, columns=[*PAIR, "score"], dtype=object)
    scores = table["score"]
    if not all(isinstance(score, (int, float)) for score in scores):
        return pd.DataFrame([{"id": key} | record for key, record in entries], dtype=object)
    if (scores % 1 == 0).all():
        return table.assign(relevance=scores)  # qrels; with --kind run, the scores count
    return table.assign(q0="Q0")  # by this column, kind_of() takes it for a run of TREC


def json_table(path):
    """Return a table of JSON records, with numbers and lists as they are."""
    lines = dict(read_json(path))
    records = list(lines.values())
    if all(isinstance(value, dict) for record in records for value in record.values()):
        table = nested_table(records)
        table.index += 1
        return table
    return pd.DataFrame(records, index=list(lines), dtype=object)


def read_any(path):
    """Return the table of a file of any format."""
    start = first_line(path)
    if start and (start[0] in "[{" or Path(path).suffix in (".jsonl", ".json")):
        return json_table(path)
    return read_delimited(path)


# ---------------------------------------------------------------- Our columns from theirs
def reject(table, is_bad, what):
    """End at the first row for which is_bad (a truth value per row) holds; the index names it."""
    if is_bad.any():
        row = table[is_bad].iloc[0]
        values = row.reindex(WRITTEN["verdicts"]).dropna()
        fail(row.name, f"{what}: {' '.join(map(str, values))}; fix the row")


def without_rows(where, table, is_bad, what):
    """Return a table without the rows for which is_bad holds; a warning counts them."""
    if is_bad.any():
        warn(where, f"{is_bad.sum()} {what}: left out")
    return table[~is_bad]


def our_names(columns, given, make_ids):
    """Return {column of the file: our name}; given: those of --columns, which have precedence."""
    lower = {column.strip().lower() for column in columns}
    guesses = {column: column for column in OUR_COLUMNS} | name_pairs(KNOWN_COLUMNS)
    for form in KNOWN_FORMS:
        names = name_pairs(form)
        if set(names) <= lower:
            guesses |= names
            break
    if make_ids or "abstract_id" in lower:
        guesses.pop("id", None)  # it may number the pairs, not claims or abstracts
    # With --columns claim=text, the file's own column claim becomes "their claim".
    names = {ours: f"their {ours}" for ours in given.values()}
    for column in columns:
        name = column.strip().lower()
        ours = guesses.get(name)
        if name in given:
            names[column] = given[name]
        elif ours and ours not in given.values():
            names[column] = ours
    return names


def with_our_columns(path, table, given, make_ids):
    """Return a table with our column names; given: {column of the file: our column}."""
    theirs = table.columns
    for column, ours in given.items():
        if column not in theirs.str.lower():
            fail(f"{path}:1", f"no column {column} for {ours} among {', '.join(theirs)}")
    table = table.rename(columns=our_names(theirs, given, make_ids))
    for ours in table.columns[table.columns.duplicated()]:
        if ours:
            what = f"two columns mean {ours}; choose by --columns {ours}=THEIRS, or rename one"
            fail(f"{path}:1", what)
    paper_columns = PAPERS & {column.strip().lower() for column in theirs}
    if paper_columns and set(PAIR) <= set(table) and not set(JUDGED) & set(table):
        table = table.assign(relevance="1")
    return table


def without_empty_columns(path, table):
    """Return a table without the optional columns that have no value in any row."""
    columns = table.columns.intersection(["language", "preds", *JUDGED])
    empty = [column for column in columns if set(map(as_text, table[column])) == {""}]
    if empty:
        warn(path, f"columns without any value are left out: {', '.join(empty)}")
    return table.drop(columns=empty)


def with_made_ids(table, kind):
    """Return a table with the ids that its kind needs, made of texts where the file has none."""
    for text in TEXTS:
        column = f"{text}_id"
        if text in table and column not in table and column in WRITTEN[kind]:
            ids = table[text].map(made_id)
            reject(table, ids == "", f"{text} is empty (--drop-empty leaves such rows out)")
            table = table.assign(**{column: ids})
    return table


def kind_of(path, table, args):
    """Return the kind of --kind or of the name of --out, else the first whose columns are there.

    With --make-ids, a text stands for its id.
    """
    named = Path(args.out).name.split(".")[0]
    wanted = args.kind
    if not wanted and named in WRITTEN:
        wanted = named
    forms = FORMS
    if wanted:
        forms = [form for form in [*FORMS, SCORED_RUN] if form.startswith(wanted)]
    found = set(table)
    if args.make_ids:
        found |= {f"{text}_id" for text in found.intersection(TEXTS)}
    for form in forms:
        kind, needed = form.split(": ")
        missing = [column for column in needed.split(", ") if column not in found]
        if not missing:
            return kind
    fail(
        f"{path}:1",
        f"""columns {", ".join(table):.200} make no {wanted or "known"} table; name what is missing,
        as --columns {"=THEIRS,".join(missing)}=THEIRS (--make-ids makes ids of texts; --kind or the
        name of --out tells the kind; kinds and their columns: {"; ".join(forms)})""",
    )


# ---------------------------------------------------------------- The checks of a kind
def with_texts(table, columns):
    """Return a table with texts in these columns; claims and ids are not empty, and one line."""
    for column in table.columns.intersection(columns):
        texts = table[column].map(joined).fillna("").str.strip()
        if column == "claim":
            texts = texts.map(one_line)
        table = table.assign(**{column: texts})
        if column in ("claim", *PAIR):
            reject(table, texts == "", f"{column} is empty")
            reject(table, texts.str.contains(ROW_BREAK), f"{column} holds a tab or a line break")
    return table


def without_repeats(path, table, columns):
    """Return a table without rows that repeat an earlier one; end at one that contradicts it.

    Of these columns, the ids tell what a row is about. White space makes no difference.
    """
    texts = table[table.columns.intersection(columns)]
    # Hashes: the texts of a whole corpus take gigabytes
    texts = texts.map(lambda value: hash(one_line(joined(value) or "")))
    ids = texts.columns.intersection(PAIR)
    repeated = texts.duplicated()
    table = without_rows(path, table, repeated, "rows that repeat an earlier one")
    differs = texts[~repeated].duplicated(ids)
    reject(table, differs, f"an earlier row for this {' and '.join(ids)} differs")
    return table


def to_floats(column):
    """Return a column of texts as floats, NaN for what is not a number."""
    return pd.to_numeric(column, errors="coerce").astype(float)


def with_list_rows(path, table):
    """Return CheckThat!'s lists of ids, in the order of rank, as a row for every id."""
    table = without_repeats(path, table, ["claim_id", "preds"])
    lists = table["preds"].map(as_text).str.findall(r"[^\s\[\]'\",]+")
    table = table.assign(abstract_id=lists)
    table = without_rows(path, table, lists.str.len() == 0, "rows without any id in preds")
    table = table.explode("abstract_id")
    return table.assign(rank=table.groupby(level=0).cumcount() + 1)


def with_trec_ranks(table):
    """Return a run ranked as trec_eval does it: by score in float32, ties by id, backwards."""
    scores = to_floats(table["score"])
    reject(table, scores.isna(), "the score is not a number")
    ordered = table.assign(score=scores.astype("float32"))
    ordered = ordered.sort_values(["score", "abstract_id"], ascending=False)
    ranks = ordered.groupby("claim_id").cumcount() + 1
    # Scores that are equal in float32 can rise along these ranks, which the kit refuses: such a
    # score is lowered to that of the rank before.
    lowest = scores[ordered.index].groupby(ordered["claim_id"]).cummin()
    scores = table["score"].mask(scores.gt(lowest), lowest)
    return table.assign(rank=ranks, score=scores)


def with_relevance_labels(table):
    """Return a table with labels for its relevance, "" where it is not judged."""
    grades = to_floats(table["relevance"])
    is_bad = (table["relevance"] != "") & (grades % 1 != 0)  # true for NaN, which is no number
    reject(
        table,
        is_bad,
        "the relevance is not an integer (if this is a run, it needs a header with rank)",
    )
    return table.assign(label=grades.map(grade_label))


def with_our_labels(path, table, kind, meanings):
    """Return a table with labels as we spell them; qrels may have rows without any yet.

    meanings: {label of the file, in lower case: ours}, from --labels
    """
    labels = table["label"].map(lambda label: label_of(meanings.get(label.lower(), label)))
    table = table.assign(label=labels)
    if kind == "qrels":
        is_empty = table["label"] == ""
        table = without_rows(path, table, is_empty, "rows without a label, or of relevance below 0")
    labels = table["label"]
    unknown = labels[~labels.isin([*LABELS, RELEVANT])]
    if len(unknown):
        counts = unknown.value_counts()[:20]
        flag = ",OURS=".join(counts.index)
        fail(
            unknown.index[0],
            f"""the label is none of {", ".join(LABELS)}; the file has {counts.to_dict()}: say what
            they mean by --labels "OURS={flag}"; grades of relevance: --columns relevance=THEIRS""",
        )
    if (labels == RELEVANT).any():
        warn(path, "relevance is judged, not stance: SUPPORTS means relevant")
    return table.assign(label=labels.replace(RELEVANT, "SUPPORTS"))


def with_checked_ranks(table):
    """Return a run by claim and rank; the ranks of a claim are 1, 2, 3, without gaps."""
    ranks = to_floats(table["rank"])
    if "score" not in table:
        table = table.assign(score=-ranks)
    claims = table["claim_id"].factorize()[0]  # the first claim of the file is 0
    wanted = ranks.groupby(claims).rank("first")
    reject(table, ranks != wanted, "the ranks are not 1, 2, 3")
    for column in table.columns.intersection(["score", *PROBABILITIES]):
        numbers = to_floats(table[column])
        reject(table, ~np.isfinite(numbers), f"{column} is not a finite number")
    table = table.assign(rank=ranks.astype(int)).iloc[np.lexsort((ranks, claims))]
    scores = to_floats(table["score"])
    what = """the score is above that of the rank before, but higher is better (of a distance, give
        minus the distance)"""
    reject(table, scores > scores.groupby(table["claim_id"]).shift(), what)
    return table


def checked_corpus(path, table, make_ids):
    """Return the table of a corpus, without the columns that belong to pairs."""
    table = with_texts(table, ["abstract_id"])
    columns = ["abstract_id", "abstract"]
    if not make_ids:
        columns.append("title")
    table = without_repeats(path, table, columns)
    if "claim" in table or "claim_id" in table:
        table = table.drop(columns=OF_A_PAIR, errors="ignore")
    return table


def checked(path, table, kind, args):
    """Return a table with the columns of its kind, and nothing that the kit refuses."""
    if kind == "corpus":
        return checked_corpus(path, table, args.make_ids)
    columns = WRITTEN[kind]
    if kind == "run" and "preds" in table:
        table = with_list_rows(path, table)
    table = with_texts(table, [*columns, "relevance"])
    if kind == "qrels" and "relevance" in table:
        if "label" in table:
            fail(f"{path}:1", "columns label and relevance: each judges the pairs; remove one")
        table = with_relevance_labels(table)
    if kind in ("qrels", "verdicts"):
        table = with_our_labels(path, table, kind, args.labels)
    table = without_repeats(path, table, columns)
    if kind == "run" and "rank" not in table:
        table = with_trec_ranks(table)
    if kind in ("run", "verdicts"):
        table = with_checked_ranks(table)
    return table[[column for column in columns if column in table]]


# ---------------------------------------------------------------- Writing
def quoted(text):
    """Return a text with quotation marks as pandas writes it: in marks, with its own doubled."""
    return '"' + text.replace('"', '""') + '"' if '"' in text else text


def write_table(table, path):
    """Write a table as TSV, whole or not at all; of its fields, only claims are ever quoted."""
    if "claim" in table:
        table = table.assign(claim=table["claim"].map(quoted))
    with whole(path) as new:
        table.to_csv(new, sep="\t", index=False, lineterminator="\n", quoting=csv.QUOTE_NONE)


def write_corpus(path, records, where):
    """Write records as JSON Lines, whole or not at all; warnings name where they come from."""
    left_out = Counter()
    with whole(path) as new, open(new, "w", encoding="utf-8") as file:
        for record in records:
            line = json.dumps(corpus_record(record, left_out), ensure_ascii=False)
            file.write(f"{line}\n")
    for field, number in left_out.items():
        warn(where, f"{number} fields {field} are neither text nor number, left out")


def is_evidence(value):
    """Return whether a claim's evidence is of SciFact's form, {doc_id: [{label: ...}]}."""
    if not isinstance(value, dict):
        return False
    return not any(isinstance(part, str) for part in value.values())


def evidence_pairs(table):
    """Return the judged pairs of claims that hold their evidence, as SciFact's do."""
    pairs = []
    rows = []
    for row, record in table.to_dict("index").items():
        record["evidence"] = record["evidence"] or {}  # null where another claim has some
        try:
            for abstract_id, label in evidence_of(record).items():
                pairs.append((record["claim_id"], abstract_id, label))
                rows.append(row)
        except (AttributeError, LookupError, TypeError) as error:
            fail(row, f"evidence is not {{doc_id: [{{label: ...}}]}} ({error!r}); fix the line")
    return pd.DataFrame(pairs, rows, WRITTEN["qrels"], dtype=object)


def read_source(path, args):
    """Return the kind and the table of a file, under our names of columns, with ids.

    The index holds FILE:LINE.
    """
    try:
        table = read_any(path)
    except (UnicodeDecodeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        fail(path, f"no text in UTF-8 ({error}); save it as CSV in UTF-8")
    table = table.set_axis([f"{path}:{line}" for line in table.index])
    table = with_our_columns(path, table, args.columns, args.make_ids)
    table = without_empty_columns(path, table)
    for text in table.columns.intersection(TEXTS):
        is_nested = table[text].map(joined).str.strip().str.fullmatch(NESTED, na=False)
        reject(table, is_nested, f"{text} is nested, or holds ids, not texts")
        if args.drop_empty:
            is_empty = table[text].map(made_id) == ""
            table = without_rows(path, table, is_empty, f"rows with an empty {text}")
    kind = kind_of(path, table, args)
    if args.make_ids:
        table = with_made_ids(table, kind)
    return kind, table


def read_sources(args):
    """Return the kind and the table of all files; only a corpus is made of several."""
    tables = []
    for path in args.files:
        kind, table = read_source(path, args)
        if kind != "corpus" and len(args.files) > 1:
            fail(path, f"it holds {kind}, but only a corpus is made of several files")
        tables.append(table)
    table = pd.concat(tables).astype(object)
    return kind, table.where(table.notna(), None)


def convert(args):
    """Write the files as ours, and return a summary."""
    path = ", ".join(args.files)
    out = Path(args.out)
    check_place(out, args.files)
    kind, source = read_sources(args)
    table = checked(path, source, kind, args)
    if table.empty:
        fail(path, "no rows, or none is left; give a file with rows")
    used = set(table)
    if kind in ("run", "qrels"):
        used |= TAKEN
    made = {args.out: table}
    if kind == "claims" and any(map(is_evidence, source.get("evidence", []))):
        used |= {"evidence", "cited_doc_ids"}
        qrels = out.with_name(f"qrels.{out.name.removeprefix('claims.')}")
        check_place(qrels, args.files)
        made[str(qrels)] = checked(path, evidence_pairs(source), "qrels", args)
    out.parent.mkdir(parents=True, exist_ok=True)
    if kind == "corpus":
        write_corpus(out, table.to_dict("records"), out)
    else:
        for target, rows in made.items():
            write_table(rows, target)
    unused = [column or "(no name)" for column in source if column not in used]
    if unused:
        warn(path, f"columns left out (no use in {kind}): {', '.join(unused)}")
    print(f"{' and '.join(made)}: {kind}, {len(table)} rows")
    if kind == "qrels":
        print(f"labels: {table['label'].value_counts().to_dict()}")
    return {"made": list(made), "kind": kind, "rows": len(table)}


# ---------------------------------------------------------------- Command line
def name_pairs(text):
    """Return {name of the file, in lower case: ours} of --columns or --labels."""
    names = {}
    for pair in re.split(r",(?=\s*\w+=)", text):  # a label may hold a comma
        ours, equals, theirs = map(str.strip, pair.partition("="))
        if not equals or names.setdefault(theirs.lower(), ours) != ours:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not of the form OURS=THEIRS,... with each of THEIRS once"
            )
    return names


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = lambda message: fail("convert.py", f"{message}; see --help")
    add = parser.add_argument
    # fmt: off
    add("files", metavar="FILE", nargs="+", help="convert this file; several become one corpus")
    add("--out", required=True,
        help="""write this file, JSON Lines for a corpus, else TSV; name it claims.SPLIT.tsv for
        claims with evidence, whose qrels go beside it""")
    add("--kind", choices=WRITTEN,
        help="""take the file for this kind of table (default: the first word of the name of --out
        if it is a kind, else the first kind of the list that fits)""")
    add("--make-ids", action="store_true",
        help="""make an id from the text of each claim or abstract where the file has no claim_id
        or abstract_id; equal texts get equal ids, in all files""")
    add("--drop-empty", action="store_true",
        help="leave out rows whose claim or abstract is empty, whatever is made of the file")
    add("--columns", type=lambda text: name_pairs(text.lower()), default={},
        metavar="OURS=THEIRS,...", help="""read our column OURS from the file's column THEIRS
        (default: the names above)""")
    add("--labels", type=name_pairs, default={}, metavar="OURS=THEIRS,...",
        help="""read the file's label THEIRS as SUPPORTS, REFUTES or NEI; one of these may stand
        for several (default: common spellings of supports, refutes, not enough info)""")
    # fmt: on
    args = parser.parse_intermixed_args()
    try:
        print(json.dumps(convert(args)))
    except OSError as error:
        where = error.filename or args.out
        fail(where, f"{error.strerror}; give another FILE or --out")


if __name__ == "__main__":
    main()
