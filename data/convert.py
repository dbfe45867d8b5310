"""
Convert a corpus, claims, qrels, runs or verdicts of other formats into the files of the kit.

Reads   FILE: CSV or TSV with a header, JSON Lines, or a TREC run or qrels; in UTF-8
Writes  OUT: JSON Lines for a corpus, else TSV; for SciFact's claims with evidence, claims.SPLIT.tsv
        and beside it qrels.SPLIT.tsv
Prints  kind and rows of the table, what was left out; the last line is JSON

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
from pathlib import Path

import numpy as np
import pandas as pd

LABELS = ("SUPPORTS", "REFUTES", "NEI")
RELEVANT = "RELEVANT"  # where relevance is judged, not stance: TREC, CheckThat!, BEIR
SPELT = {  # in lower case, without white space and underscores
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
KEPT = {"run": ["score"], "verdicts": ["score", "label", *PROBABILITIES], "claims": ["language"]}
RENAMED = {
    "abstract_original_index": "abstract_id",
    "annotation": "label",  # ClimateCheck
    "post_id": "claim_id",
    "cord_uid": "abstract_id",
    "tweet_text": "claim",  # CheckThat!
    "query-id": "claim_id",
    "corpus-id": "abstract_id",  # BEIR
    "doc_id": "abstract_id",
}  # SciFact
FORMS = [  # columns that tell the form of a file, and our names for some of them
    ({"_id", "title", "text"}, {"_id": "abstract_id", "text": "abstract"}),  # BEIR's corpus
    ({"_id", "text"}, {"_id": "claim_id", "text": "claim"}),  # BEIR's queries
    ({"query-id", "corpus-id", "score"}, {"score": "relevance"}),  # BEIR's qrels
    ({"id", "claim", "evidence"}, {"id": "claim_id"}),
]  # SciFact's claims
TREC = {  # by number of fields
    4: ["claim_id", "q0", "abstract_id", "relevance"],
    6: ["claim_id", "q0", "abstract_id", "rank", "score", "tag"],
}
WARNINGS = []  # of this call


# ---------------------------------------------------------------- Messages, texts, labels
def fail(where, what):
    """Bad input or usage: one line on stderr, exit status 2."""
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
    """Return 7, 7.0 (an integer in a column with gaps) and " 7" as "7", None as ""."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    name = "" if value is None else str(value).strip()
    if "\t" in name or len(name.splitlines()) > 1:
        fail(repr(name), "an id holds a tab or a line break; fix the file")
    return name


def label_of(text):
    """Return the label that a text spells; an unknown spelling is returned as it is."""
    bare = re.sub(r"[\s_]", "", text)
    for label, pattern in SPELT.items():
        if re.fullmatch(pattern, bare, re.IGNORECASE):
            return label
    return text


def grade_label(grade):
    """Return the label of a grade of relevance; below 0 means not judged, as in TREC: ""."""
    if float(grade) > 0:
        return RELEVANT
    return "NEI" if float(grade) == 0 else ""


def paper(row, key, text):
    """Return a record of the corpus; key and text: the row's names of abstract_id and abstract."""
    sentences = row.get(text) if isinstance(row.get(text), list) else [row.get(text)]
    abstract = " ".join(one for one in sentences if isinstance(one, str))
    rest = {name: value for name, value in row.items() if name not in (key, text)}
    ours = {"abstract_id": row[key], "title": row.get("title"), "abstract": abstract}
    return ours | rest | ours  # in this order, and ours win


def storable(record, left_out):
    """Return the fields of a record that are texts (NFC) or finite numbers; count the others."""
    kept = {}
    for name, value in record.items():
        if isinstance(value, str):
            kept[name] = unicodedata.normalize("NFC", value)
        elif isinstance(value, (int, float)) and math.isfinite(value):
            kept[name] = value
        elif value is not None:
            left_out[name] = left_out.get(name, 0) + 1
    return kept


def evidence_of(row):
    """Return {abstract_id: label} of a claim of SciFact; cited without evidence is NEI."""
    labels = dict.fromkeys(map(str, row.get("cited_doc_ids") or ()), "NEI")
    for name, rationales in row.get("evidence", {}).items():
        if isinstance(rationales, dict):  # SciFact-Open: one a pair
            rationales = [rationales]
        if rationales:  # those of an abstract share a label
            labels[name] = rationales[0]["label"]
    return labels


# ---------------------------------------------------------------- Reading
def trec_columns(line):
    """Return the columns of a TREC file by its first line, None if it is something else."""
    fields = line.split()
    columns = TREC.get(len(fields))
    number = columns and fields[3 if len(fields) == 4 else 4]
    return columns if number and re.fullmatch(r"[-+.\deE]+", number) else None


def unquoted(field):
    """Return a field without the quotation marks that pandas puts around it."""
    quoted = re.fullmatch(r'"((?:[^"]|"")*)"', field)
    return quoted[1].replace('""', '"') if quoted else field


def rows_of(path, text, delimiter):
    """Yield (line, fields) of a table with a header."""
    # Where every line of a TSV file has as many tabs, no quotation mark can swallow rows
    tabs = {line.count("\t") for line in text.split("\n") if line}
    quoting = csv.QUOTE_NONE if delimiter == "\t" and len(tabs) == 1 else csv.QUOTE_MINIMAL
    csv.field_size_limit(2**31 - 1)
    reader, line = (
        csv.reader(
            io.StringIO(text),
            delimiter=delimiter,
            quoting=quoting,
            strict=True,
            skipinitialspace=delimiter != "\t",
        ),
        1,
    )
    try:
        for row in reader:
            if any(map(str.strip, row)):
                yield line, list(map(unquoted, row)) if quoting == csv.QUOTE_NONE else row
            line = reader.line_num + 1
    except csv.Error as error:
        fail(f"{path}:{line}", f"{error}; fix its quotation marks")


def read_json(path):
    """Yield (line, record) of JSON Lines."""
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            try:
                if line.strip():
                    yield number, {**json.loads(line)}
            except (ValueError, TypeError) as error:
                fail(f"{path}:{number}", f"no JSON object ({error}); fix the line")


def read_table(path):
    """Return a table of texts under the names of its columns; the index holds line numbers."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except ValueError as error:
        fail(path, f"{error}; save it as CSV in UTF-8")
    if not text.strip():
        fail(path, "an empty file; give one with rows")
    first = text.split("\n", 1)[0]
    if columns := trec_columns(first):
        lines = enumerate(text.split("\n"), 1)
        rows = {number: line.split() for number, line in lines if line.strip()}
    else:
        rows = dict(rows_of(path, text, max("\t,;", key=first.count)))
        columns = [name.strip() for name in rows.pop(min(rows))]
    for line, row in rows.items():
        if len(row) != len(columns):
            fail(f"{path}:{line}", f"{len(row)} fields, the first row has {len(columns)}; fix it")
    return pd.DataFrame(list(rows.values()), index=list(rows), columns=columns, dtype=str)


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
    form = next((names for columns, names in FORMS if columns <= set(table)), {})
    named = {name: ours for ours, name in theirs.items()}
    table = table.rename(columns=RENAMED | form | named)
    if twice := list(filter(None, table.columns[table.columns.duplicated()])):
        fail(f"{path}:1", f"two columns mean {twice[0]}; remove or rename one")
    return table


def numbers(column):
    """Return a column of texts as floats, NaN for what is not a number."""
    return pd.to_numeric(column, errors="coerce").astype(float)


def with_list_rows(path, table):
    """Return CheckThat!'s lists of ids, in the order of rank, as a row for every id."""
    reject(path, table, table.duplicated("claim_id"), "there is an earlier list for this post")
    lists = table["preds"].str.findall(r"[^\s\[\]'\",]+")
    table = table.assign(abstract_id=lists)[lists.str.len() > 0].explode("abstract_id")
    return table.assign(rank=(table.groupby(level=0).cumcount() + 1).astype(str))


def with_trec_ranks(path, table):
    """Return a TREC run ranked as trec_eval does: by score in float32, ties by id, backwards."""
    order = table.assign(score=numbers(table["score"]).astype("float32"))
    reject(path, table, order["score"].isna(), "the score is not a number")
    order = order.sort_values(["score", "abstract_id"], ascending=False)
    return table.assign(rank=(order.groupby("claim_id").cumcount() + 1).astype(str))


def with_relevance_labels(path, table):
    """Return a table with relevance as labels; rows of relevance below 0 are not judged."""
    grades = numbers(table["relevance"])
    reject(path, table, grades % 1 != 0, "no grade of relevance (a run needs a header with rank)")
    labels = grades.map(grade_label)
    unjudged = labels == ""
    if unjudged.any():
        warn(path, f"{unjudged.sum()} rows of relevance below 0: not judged, left out")
    if (grades > 1).any():
        warn(path, f"{(grades > 1).sum()} rows have grades above 1, which count as 1")
    return table.drop(columns="relevance").assign(label=labels)[~unjudged]


def translated(path, theirs):
    """Read a table of any format under our column names, with our ranks and labels."""
    if Path(path).suffix in (".jsonl", ".json"):
        records = dict(read_json(path))
        table = pd.DataFrame(list(records.values()), index=list(records), dtype=object)
        table = table.where(table.notna(), None)
    else:
        table = read_table(path)
    columns, table = list(table), renamed(path, table, theirs)
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
def kind_of(path, table):
    """Return the first kind of which all columns are there."""
    for kind, wanted in KINDS.items():
        if set(wanted) <= set(table):
            return kind
    known = "; ".join(f"{kind}: {', '.join(wanted)}" for kind, wanted in KINDS.items())
    fail(
        f"{path}:1",
        f"columns {', '.join(map(str, table)):.200} make no known table; name them, "
        f"as --columns claim_id=THEIRS,claim=THEIRS ({known})",
    )


def with_labels(path, table, kind):
    """Return a table with labels as we spell them; qrels may have rows without any yet."""
    empty = table["label"].str.strip() == ""
    if kind == "qrels" and empty.any():
        warn(path, f"{empty.sum()} rows without a label: not judged, left out")
        table = table[~empty]
    labels = table["label"].map(label_of)
    unknown = ~labels.isin([*LABELS, RELEVANT])
    reject(path, table, unknown, f"the label is none of {LABELS}; --labels may name it")
    if (labels == RELEVANT).any():
        warn(path, "relevance is judged, not stance: SUPPORTS means relevant")
    return table.assign(label=labels.replace(RELEVANT, LABELS[0]))


def with_checked_ranks(path, table):
    """Return a run by claim and rank; the ranks of a claim are 1, 2, 3, without gaps."""
    ranks = numbers(table["rank"])
    if "score" not in table:
        table = table.assign(score=-ranks)
    claim = table["claim_id"].factorize()[0]
    reject(path, table, ranks != ranks.groupby(claim).rank("first"), "the ranks are not 1, 2, 3")
    for column in table.columns.intersection(["score", *PROBABILITIES]):
        bad = ~np.isfinite(numbers(table[column]))
        reject(path, table, bad, f"{column} is not a finite number")
    return table.assign(rank=ranks.astype(int)).iloc[np.lexsort((ranks, claim))]


def checked(path, table, kind):
    """Return a translated table with the columns of its kind, and nothing that the kit refuses."""
    ids = [column for column in KINDS[kind] if column.endswith("_id")]
    for column in ids:
        table = table.assign(**{column: table[column].map(as_id)})
        reject(path, table, table[column] == "", f"{column} is empty")
    if kind in ("qrels", "verdicts"):
        table = with_labels(path, table, kind)
    if kind == "claims":
        table = table.assign(claim=table["claim"].map(one_line))
        reject(path, table, table["claim"] == "", "claim is empty")
    reject(path, table, table.duplicated(ids), "there is an earlier row for this")
    if kind in ("run", "verdicts"):
        table = with_checked_ranks(path, table)
    if kind == "corpus":
        return table
    columns = KINDS["run" if kind == "verdicts" else kind]
    return table[[*columns, *(column for column in KEPT.get(kind, ()) if column in table)]]


# ---------------------------------------------------------------- Writing
def write_table(path, rows):
    """Write rows as TSV, whole or not at all; a field with a quotation mark is quoted."""
    with open(f"{path}.tmp", "w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter="\t", lineterminator="\n").writerows(rows)
    os.replace(f"{path}.tmp", path)


def write_corpus(path, rows, where):
    """Write records as JSON Lines, whole or not at all; where: whose, for the warnings."""
    left_out = {}
    with open(f"{path}.tmp", "w", encoding="utf-8", errors="replace") as file:
        for row in rows:
            record = storable(paper(row, "abstract_id", "abstract"), left_out)
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    os.replace(f"{path}.tmp", path)
    for name, number in left_out.items():
        warn(where, f"{number} fields {name} are neither text nor number, left out")


def write_evidence(path, out, table):
    """Write the qrels of claims that hold their evidence, as SciFact's; return their path."""
    pairs = []
    for line, row in table.to_dict("index").items():
        try:
            pairs += [(row["claim_id"], *pair) for pair in evidence_of(row).items()]
        except (AttributeError, LookupError, TypeError) as error:
            fail(f"{path}:{line}", f"evidence is no {{doc_id: [{{label}}]}}: {error!r}")
    qrels = checked(path, pd.DataFrame(pairs, columns=KINDS["qrels"]), "qrels")
    target = Path(out).with_name(Path(out).name.replace("claims", "qrels", 1))
    if target == Path(out):
        fail("--out", f"{out} is for claims and evidence; name it claims.SPLIT.tsv")
    write_table(target, [qrels.columns, *qrels.itertuples(index=False)])
    return str(target)


def convert(args):
    """Write FILE as ours, and return facts."""
    if Path(args.out).resolve() == Path(args.file).resolve():
        fail(args.out, "this command reads it; give another --out")
    labels = {theirs: ours for ours, theirs in args.labels.items()}
    whole = translated(args.file, args.columns).replace({"label": labels})
    kind = kind_of(args.file, whole)
    if whole.empty:
        fail(args.file, "a header without rows; give a file with rows")
    table, made = checked(args.file, whole, kind), [args.out]
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    if kind == "claims" and "evidence" in whole:
        made.append(write_evidence(args.file, args.out, whole))
    if kind == "corpus":
        write_corpus(args.out, table.to_dict("records"), args.out)
    else:
        write_table(args.out, [table.columns, *table.itertuples(index=False)])
    others = [name for name in whole if name not in {*table, "q0", "tag", "preds", "evidence"}]
    if others:
        warn(args.file, f"columns left out (no use in {kind}): {', '.join(map(str, others))}")
    print(f"{' and '.join(made)}: {kind}, {len(table)} rows")
    return {"made": made, "kind": kind, "rows": len(table)}


def names(text):
    """Return {our name: that of the file} of --columns or --labels."""
    return dict(pair.split("=") for pair in text.split(","))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = lambda message: fail("convert.py", f"{message}; see --help")
    add = parser.add_argument
    add("file", metavar="FILE", help="a table of another format")
    add("--out", required=True, help="file to write")
    add(
        "--columns",
        type=names,
        default={},
        metavar="OURS=THEIRS,...",
        help="our column names for those of FILE",
    )
    add(
        "--labels",
        type=names,
        default={},
        metavar="OURS=THEIRS,...",
        help="our labels for those of FILE, as SUPPORTS=agrees,REFUTES=disagrees,NEI=unclear",
    )
    args = parser.parse_args()
    try:
        print(json.dumps(convert(args)))
    except OSError as error:
        fail(error.filename or args.out, error.strerror)


if __name__ == "__main__":
    main()
