"""
Convert a corpus, claims, qrels, runs or verdicts of other formats into the files of the kit.

Reads   FILE: CSV or TSV with a header, JSON Lines, or a TREC run or qrels; in UTF-8
Writes  OUT: JSON Lines for a corpus, else TSV; for SciFact's claims with evidence, claims.SPLIT.tsv
        and beside it qrels.SPLIT.tsv
Prints  kind and number of rows of the table; the last line is JSON; warnings name what is left out

Examples
    python data/convert.py papers.csv --columns abstract_id=pmid,abstract=text --out corpus.jsonl
    python data/convert.py posts.csv --columns claim_id=id,claim=text --out claims.test.tsv
    python data/convert.py run.trec --out run.tsv

The columns tell which kind a table is; the first kind that fits is taken:

    verdicts  claim_id, abstract_id, rank, label; optional score, p_supports, p_refutes, p_nei
    run       claim_id, abstract_id, rank; optional score (default: minus the rank); TREC: 6 fields
    qrels     claim_id, abstract_id, label or relevance; TREC: 4 fields
    corpus    abstract_id, abstract (a text, or a list of sentences); any other field
    claims    claim_id, claim; optional language

Known as well are the columns of BEIR (_id, title, text; query-id, corpus-id, score), SciFact
(doc_id; id, claim, evidence), ClimateCheck (abstract_original_index, annotation) and CheckThat!
(post_id, tweet_text, cord_uid, preds). --columns names others.
"""

import argparse
import csv
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
RELEVANT = "RELEVANT"  # where relevance is judged, not stance: TREC, CheckThat!, BEIR
SPELLINGS = {  # without white space and underscores, in either case
    "SUPPORTS": "supports?|supported|entailment",
    "REFUTES": "refute[sd]?|contradict(ion)?",
    "NEI": "nei|notenoughinfo(rmation)?|neutral",
}
KINDS = {  # columns that each kind needs; the first kind that fits is taken
    "verdicts": ["claim_id", "abstract_id", "rank", "label"],
    "run": ["claim_id", "abstract_id", "rank"],
    "qrels": ["claim_id", "abstract_id", "label"],
    "corpus": ["abstract_id", "abstract"],
    "claims": ["claim_id", "claim"],
}
PROBABILITIES = ["p_supports", "p_refutes", "p_nei"]
WRITTEN = {  # columns that are written, where the table has them; a corpus keeps all
    "verdicts": ["claim_id", "abstract_id", "rank", "score", "label", *PROBABILITIES],
    "run": ["claim_id", "abstract_id", "rank", "score"],
    "qrels": ["claim_id", "abstract_id", "label"],
    "claims": ["claim_id", "claim", "language"],
}
KNOWN_COLUMNS = {  # columns of any file, and our names for them
    "abstract_original_index": "abstract_id",  # ClimateCheck
    "annotation": "label",  # ClimateCheck
    "post_id": "claim_id",  # CheckThat!
    "cord_uid": "abstract_id",  # CheckThat!
    "tweet_text": "claim",  # CheckThat!
    "query-id": "claim_id",  # BEIR
    "corpus-id": "abstract_id",  # BEIR
    "doc_id": "abstract_id",  # SciFact
}
KNOWN_FORMS = [  # columns that tell the form of a file, and our names for some of them
    ({"_id", "title", "text"}, {"_id": "abstract_id", "text": "abstract"}),  # BEIR's corpus
    ({"_id", "text"}, {"_id": "claim_id", "text": "claim"}),  # BEIR's queries
    ({"query-id", "corpus-id", "score"}, {"score": "relevance"}),  # BEIR's qrels
    ({"id", "claim", "evidence"}, {"id": "claim_id"}),  # SciFact's claims
]
TREC_QRELS = ["claim_id", "q0", "abstract_id", "relevance"]
TREC_RUN = ["claim_id", "q0", "abstract_id", "rank", "score", "tag"]
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


def one_line(text):
    """Return a text in NFC, with single blanks for white space."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def as_id(value):
    """Return an id as text: "7" for 7, 7.0 (an integer in a column with gaps) and " 7"."""
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value).strip()
    if "\t" in text or len(text.splitlines()) > 1:
        fail(repr(text), "an id holds a tab or a line break; fix the file")
    return text


def label_of(text):
    """Return the label that a text spells; an unknown spelling is returned as it is."""
    spelling = re.sub(r"[\s_]", "", text)
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


def corpus_record(record, id_field, text_field):
    """Return a record of the corpus: abstract_id, title, abstract, then the other fields.

    id_field and text_field are the record's names of abstract_id and abstract. An abstract may be
    a list of sentences.
    """
    abstract = record.get(text_field)
    if isinstance(abstract, list):
        abstract = " ".join(sentence for sentence in abstract if isinstance(sentence, str))
    elif not isinstance(abstract, str):
        abstract = ""
    ours = {"abstract_id": record[id_field], "title": record.get("title"), "abstract": abstract}
    for field, value in record.items():
        if field not in (id_field, text_field):
            ours.setdefault(field, value)
    return ours


def storable(record, left_out):
    """Return the fields that are texts (in NFC) or finite numbers; left_out counts the others."""
    kept = {}
    for field, value in record.items():
        if isinstance(value, str):
            kept[field] = unicodedata.normalize("NFC", value)
        elif isinstance(value, (int, float)) and math.isfinite(value):
            kept[field] = value
        elif value is not None:
            left_out[field] += 1
    return kept


def evidence_of(record):
    """Return {abstract_id: label} of a claim of SciFact; cited without evidence is NEI."""
    labels = {str(abstract_id): "NEI" for abstract_id in record.get("cited_doc_ids") or ()}
    for abstract_id, rationales in record.get("evidence", {}).items():
        if isinstance(rationales, dict):  # SciFact-Open: one rationale
            labels[abstract_id] = rationales["label"]
        elif rationales:  # all rationales of an abstract share a label
            labels[abstract_id] = rationales[0]["label"]
    return labels


# ---------------------------------------------------------------- Reading
def trec_columns(line):
    """Return the columns of a TREC file by its first line, None if it is something else."""
    fields = line.split()
    if len(fields) == len(TREC_QRELS):
        columns = TREC_QRELS
        number = fields[3]
    elif len(fields) == len(TREC_RUN):
        columns = TREC_RUN
        number = fields[4]
    else:
        return None
    return columns if re.fullmatch(r"[-+.\deE]+", number) else None


def unquoted(field):
    """Return a field without the quotation marks that pandas puts around it."""
    quoted = re.fullmatch(r'"((?:[^"]|"")*)"', field)
    return quoted[1].replace('""', '"') if quoted else field


def delimited_rows(path, text, delimiter):
    """Yield (line, fields) of the rows of a CSV or TSV file that are not blank."""
    quoting = csv.QUOTE_MINIMAL
    tabs = {line.count("\t") for line in text.split("\n") if line}
    if delimiter == "\t" and len(tabs) == 1:
        # Every line of this TSV file has as many tabs: no quotation mark can swallow rows
        quoting = csv.QUOTE_NONE
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(
        io.StringIO(text),
        delimiter=delimiter,
        quoting=quoting,
        strict=True,
        skipinitialspace=delimiter != "\t",
    )
    line = 1
    try:
        for row in reader:
            if any(field.strip() for field in row):
                fields = row
                if quoting == csv.QUOTE_NONE:
                    fields = [unquoted(field) for field in row]
                yield line, fields
            line = reader.line_num + 1
    except csv.Error as error:
        fail(f"{path}:{line}", f"{error}; fix its quotation marks")


def read_json(path):
    """Yield (line, record) of JSON Lines."""
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                fail(f"{path}:{number}", f"no JSON object ({error}); fix the line")
            if not isinstance(record, dict):
                kind = type(record).__name__
                fail(f"{path}:{number}", f"no JSON object but a value of type {kind}; fix the line")
            yield number, record


def read_table(path):
    """Return a table of texts under the names of its columns; the index holds line numbers."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except ValueError as error:
        fail(path, f"{error}; save it as CSV in UTF-8")
    if not text.strip():
        fail(path, "an empty file; give one with rows")
    lines = text.split("\n")
    columns = trec_columns(lines[0])
    if columns:
        rows = {number: line.split() for number, line in enumerate(lines, 1) if line.strip()}
    else:
        delimiter = max("\t,;", key=lines[0].count)
        rows = dict(delimited_rows(path, text, delimiter))
        header = rows.pop(min(rows))
        columns = [column.strip() for column in header]
    for line, fields in rows.items():
        if len(fields) != len(columns):
            what = f"{len(fields)} fields, the first row has {len(columns)}; fix it"
            fail(f"{path}:{line}", what)
    return pd.DataFrame(list(rows.values()), index=list(rows), columns=columns, dtype=str)


# ---------------------------------------------------------------- Our columns from theirs
def reject(path, table, is_bad, what):
    """End at the first row for which is_bad (a truth value per row) holds."""
    if is_bad.any():
        row = table[is_bad].iloc[0]
        values = row.reindex(["claim_id", "abstract_id", "rank", "score", "label"]).dropna()
        fail(f"{path}:{row.name}", f"{what}: {' '.join(map(str, values))}; fix the row")


def with_our_columns(path, table, given):
    """Return a table with our column names; given: {our column: column of the file}."""
    for ours, theirs in given.items():
        if theirs not in table:
            fail(f"{path}:1", f"no column {theirs} for {ours} among {', '.join(table)}")
    names = dict(KNOWN_COLUMNS)
    for columns, names_in_form in KNOWN_FORMS:
        if columns <= set(table):
            names |= names_in_form
            break
    for ours, theirs in given.items():
        names[theirs] = ours
    table = table.rename(columns=names)
    for column in table.columns[table.columns.duplicated()]:
        if column:
            fail(f"{path}:1", f"two columns mean {column}; remove or rename one")
    return table


def to_floats(column):
    """Return a column of texts as floats, NaN for what is not a number."""
    return pd.to_numeric(column, errors="coerce").astype(float)


def with_list_rows(path, table):
    """Return CheckThat!'s lists of ids, in the order of rank, as a row for every id."""
    reject(path, table, table.duplicated("claim_id"), "there is an earlier list for this post")
    lists = table["preds"].str.findall(r"[^\s\[\]'\",]+")
    table = table.assign(abstract_id=lists)
    table = table[lists.str.len() > 0].explode("abstract_id")
    ranks = table.groupby(level=0).cumcount() + 1
    return table.assign(rank=ranks.astype(str))


def with_trec_ranks(path, table):
    """Return a TREC run ranked as trec_eval does: by score in float32, ties by id, backwards."""
    ordered = table.assign(score=to_floats(table["score"]).astype("float32"))
    reject(path, table, ordered["score"].isna(), "the score is not a number")
    ordered = ordered.sort_values(["score", "abstract_id"], ascending=False)
    ranks = ordered.groupby("claim_id").cumcount() + 1
    return table.assign(rank=ranks.astype(str))


def with_relevance_labels(path, table):
    """Return a table with labels for its relevance; rows of relevance below 0 are left out."""
    grades = to_floats(table["relevance"])
    what = "the relevance is not an integer (if this is a run, it needs a header with rank)"
    reject(path, table, grades % 1 != 0, what)
    unjudged = grades < 0
    if unjudged.any():
        warn(
            path, f"{unjudged.sum()} rows of relevance below 0 count as not judged and are left out"
        )
    if (grades > 1).any():
        warn(path, f"{(grades > 1).sum()} rows have grades above 1, which count as 1")
    table = table.drop(columns="relevance").assign(label=grades.map(grade_label))
    return table[~unjudged]


def translated(path, given):
    """Read a table of any format under our column names, with our ranks and labels.

    given: {our column: column of the file}
    """
    if Path(path).suffix in (".jsonl", ".json"):
        records = dict(read_json(path))
        table = pd.DataFrame(list(records.values()), index=list(records), dtype=object)
        table = table.where(table.notna(), None)
    else:
        table = read_table(path)
    theirs = list(table)
    table = with_our_columns(path, table, given)
    if {"claim_id", "preds"} <= set(table):
        table = with_list_rows(path, table)
    if theirs == TREC_RUN:
        table = with_trec_ranks(path, table)
    if "cord_uid" in theirs and not {"rank", "score", "label", "relevance"} & set(table):
        table["relevance"] = "1"  # CheckThat!: the paper that a post is about
    if "relevance" in table and not {"rank", "label"} & set(table):  # else it judges nothing
        table = with_relevance_labels(path, table)
    return table


# ---------------------------------------------------------------- The kind, and its checks
def kind_of(path, table):
    """Return the first kind of which all columns are there."""
    for kind, needed in KINDS.items():
        if set(needed) <= set(table):
            return kind
    kinds = "; ".join(f"{kind}: {', '.join(needed)}" for kind, needed in KINDS.items())
    fail(
        f"{path}:1",
        f"columns {', '.join(map(str, table)):.200} make no known table; name them, "
        f"as --columns claim_id=THEIRS,claim=THEIRS ({kinds})",
    )


def with_our_labels(path, table, kind):
    """Return a table with labels as we spell them; qrels may have rows without any yet."""
    empty = table["label"].str.strip() == ""
    if kind == "qrels" and empty.any():
        warn(path, f"{empty.sum()} rows without a label count as not judged and are left out")
        table = table[~empty]
    labels = table["label"].map(label_of)
    unknown = ~labels.isin([*LABELS, RELEVANT])
    what = f"the label is none of {', '.join(LABELS)} (--labels maps other spellings)"
    reject(path, table, unknown, what)
    if (labels == RELEVANT).any():
        warn(path, "relevance is judged, not stance: SUPPORTS means relevant")
    return table.assign(label=labels.replace(RELEVANT, LABELS[0]))


def with_checked_ranks(path, table):
    """Return a run by claim and rank; the ranks of a claim are 1, 2, 3, without gaps."""
    ranks = to_floats(table["rank"])
    if "score" not in table:
        table = table.assign(score=-ranks)
    claims = table["claim_id"].factorize()[0]  # the first claim of the file is 0
    wanted = ranks.groupby(claims).rank("first")
    reject(path, table, ranks != wanted, "the ranks are not 1, 2, 3")
    for column in table.columns.intersection(["score", *PROBABILITIES]):
        is_bad = ~np.isfinite(to_floats(table[column]))
        reject(path, table, is_bad, f"{column} is not a finite number")
    order = np.lexsort((ranks, claims))
    return table.assign(rank=ranks.astype(int)).iloc[order]


def checked(path, table, kind):
    """Return a translated table with the columns of its kind, and nothing that the kit refuses."""
    ids = [column for column in KINDS[kind] if column.endswith("_id")]
    for column in ids:
        table = table.assign(**{column: table[column].map(as_id)})
        reject(path, table, table[column] == "", f"{column} is empty")
    if kind in ("qrels", "verdicts"):
        table = with_our_labels(path, table, kind)
    if kind == "claims":
        table = table.assign(claim=table["claim"].map(one_line))
        reject(path, table, table["claim"] == "", "claim is empty")
    reject(path, table, table.duplicated(ids), "there is an earlier row for this")
    if kind in ("run", "verdicts"):
        table = with_checked_ranks(path, table)
    if kind == "corpus":
        return table
    return table[[column for column in WRITTEN[kind] if column in table]]


# ---------------------------------------------------------------- Writing
def quoted(text):
    """Return a text with quotation marks as pandas writes it: in marks, with its own doubled."""
    return '"' + text.replace('"', '""') + '"' if '"' in text else text


def write_table(path, table):
    """Write a table as TSV, whole or not at all; of its fields, only claims are ever quoted."""
    if "claim" in table:
        table = table.assign(claim=table["claim"].map(quoted))
    options = {"lineterminator": "\n", "quoting": csv.QUOTE_NONE}
    table.to_csv(f"{path}.tmp", sep="\t", index=False, **options)
    os.replace(f"{path}.tmp", path)


def write_corpus(path, records, where):
    """Write records as JSON Lines, whole or not at all; warnings name where they come from."""
    left_out = Counter()
    with open(f"{path}.tmp", "w", encoding="utf-8", errors="replace") as file:
        for record in records:
            record = storable(corpus_record(record, "abstract_id", "abstract"), left_out)
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    os.replace(f"{path}.tmp", path)
    for field, number in left_out.items():
        warn(where, f"{number} fields {field} are neither text nor number, left out")


def write_evidence(path, out, table):
    """Write the qrels of claims that hold their evidence, as SciFact's; return their path."""
    pairs = []
    for line, record in table.to_dict("index").items():
        try:
            for abstract_id, label in evidence_of(record).items():
                pairs.append((record["claim_id"], abstract_id, label))
        except (AttributeError, LookupError, TypeError) as error:
            form = "{doc_id: [{label: ...}]}"
            fail(f"{path}:{line}", f"evidence is not of the form {form} ({error!r}); fix the line")
    qrels = checked(path, pd.DataFrame(pairs, columns=KINDS["qrels"]), "qrels")
    target = Path(out).with_name(Path(out).name.replace("claims", "qrels", 1))
    if target == Path(out):
        fail("--out", f"{out} gets claims, and qrels go beside it; name it claims.SPLIT.tsv")
    write_table(target, qrels)
    return str(target)


def convert(args):
    """Write FILE as ours, and return a summary."""
    if Path(args.out).resolve() == Path(args.file).resolve():
        fail(args.out, "this command reads it; give another --out")
    labels = {theirs: ours for ours, theirs in args.labels.items()}
    source = translated(args.file, args.columns).replace({"label": labels})
    kind = kind_of(args.file, source)
    if source.empty:
        fail(args.file, "a header without rows; give a file with rows")
    table = checked(args.file, source, kind)
    made = [args.out]
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    if kind == "claims" and "evidence" in source:
        made.append(write_evidence(args.file, args.out, source))
    if kind == "corpus":
        write_corpus(args.out, table.to_dict("records"), args.out)
    else:
        write_table(args.out, table)
    used = {*table, "q0", "tag", "preds", "evidence"}
    unused = [str(column) for column in source if column not in used]
    if unused:
        warn(args.file, f"columns left out (no use in {kind}): {', '.join(unused)}")
    print(f"{' and '.join(made)}: {kind}, {len(table)} rows")
    return {"made": made, "kind": kind, "rows": len(table)}


# ---------------------------------------------------------------- Command line
def name_pairs(text):
    """Return {our name: that of the file} of --columns or --labels."""
    try:
        return dict(pair.split("=") for pair in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form OURS=THEIRS,...") from None


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = lambda message: fail("convert.py", f"{message}; see --help")
    add = parser.add_argument
    # fmt: off
    add("file", metavar="FILE", help="convert this table")
    add("--out", required=True,
        help="write this file, JSON Lines for a corpus, else TSV; name it claims.SPLIT.tsv for "
             "claims with evidence, whose qrels go beside it")
    add("--columns", type=name_pairs, default={}, metavar="OURS=THEIRS,...",
        help="read our column OURS from the file's column THEIRS (default: the names above)")
    add("--labels", type=name_pairs, default={}, metavar="OURS=THEIRS,...",
        help="read the file's label THEIRS as OURS, as in SUPPORTS=agrees,REFUTES=disagrees "
             "(default: common spellings of supports, refutes, not enough info)")
    # fmt: on
    args = parser.parse_args()
    try:
        print(json.dumps(convert(args)))
    except OSError as error:
        fail(error.filename or args.out, error.strerror)


if __name__ == "__main__":
    main()
