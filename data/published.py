"""
Read published data sets: one function for each, which download.py calls.

Reads   the published files, at or below the folder that a function is given
Yields  pairs (split, row), in any order:
            None, a record of the corpus with abstract_id, abstract and other fields
            "train", a row with claim_id and any of claim, language, codes, abstract_id, label
        Ids and labels are as the files spell them.

To add a data set: write its function here, name it in READERS, describe it in sources.json.
"""

import filecmp
import itertools
import os
import pickle
import random
import re

import convert
from convert import PAIR, RELEVANT, as_id, fail, warn

SEED = 13  # of the CLIMATE-FEVER splits that results are published on
# All names in a pickled table of texts, numbers and dates, in pandas 1.5 to 3 and numpy 1 and 2
TABLE_NAMES = """
    builtins.slice __builtin__.slice _codecs.encode numpy.dtype numpy.ndarray
    numpy._core.multiarray._reconstruct numpy._core.numeric._frombuffer
    pandas.DataFrame pandas.core.frame.DataFrame pandas.Index pandas.RangeIndex
    pandas.core.indexes.base.Index pandas.core.indexes.base._new_Index
    pandas.core.indexes.range.RangeIndex pandas.core.internals.managers.BlockManager
    pandas._libs.internals._unpickle_block pandas.arrays.DatetimeArray
    pandas.core.arrays.datetimes.DatetimeArray pandas._libs.arrays.__pyx_unpickle_NDArrayBacked
    """.split()
PICKLE = "a pickle can hold code; --allow-pickle reads it with an unpickler for tables only"


# ---------------------------------------------------------------- Files
def find(source, *patterns):
    """Return the files at or below source whose names match a pattern, sorted."""
    paths = sorted([source, *source.rglob("*")])
    found = [path for path in paths if path.is_file() and any(map(path.match, patterns))]
    if not found:
        fail(source, f"no file {' or '.join(patterns)}; give the folder of the published files")
    return found


def find_one(source, pattern):
    """Return the one file that matches; copies with the same bytes count as one."""
    first, *others = find(source, pattern)
    for path in others:
        if not filecmp.cmp(first, path, shallow=False):
            fail(source, f"{first} and {path} differ; give the folder of one data set")
    return first


def demand(where, record, *fields):
    """End the script if a record lacks one of the fields."""
    missing = [field for field in fields if field not in record]
    if missing:
        fail(where, f"no {', '.join(missing)}; see the published schema")


def records_of(path):
    """Yield the records of a parquet, pickle, TSV, CSV or JSON file."""
    if path.suffix == ".parquet":
        from pyarrow import parquet

        # In batches: a whole corpus takes gigabytes
        for batch in parquet.ParquetFile(path).iter_batches(10_000):
            yield from batch.to_pylist()
    elif path.suffix == ".pkl":
        with open(path, "rb") as file:
            table = TableUnpickler(file).load()
        yield from table.to_dict("records")
    elif path.suffix in (".tsv", ".csv"):
        yield from convert.read_delimited(path).to_dict("records")
    else:
        for _, record in convert.read_json(path):
            yield record


def read_records(path, *fields):
    """Yield the records of a file; end the script at one that lacks one of the fields."""
    for record in records_of(path):
        demand(path, record, *fields)
        yield record


class TableUnpickler(pickle.Unpickler):
    """An unpickler that builds pandas tables and imports or calls nothing else."""

    def find_class(self, module, name):
        module = re.sub(r"^numpy\.core\b", "numpy._core", module)  # its name before numpy 2
        if name == "Int64Index":  # before pandas 2
            module = "pandas"
            name = "Index"
        if f"{module}.{name}" not in TABLE_NAMES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no table needs")
        return super().find_class(module, name)


# ---------------------------------------------------------------- Records
def renamed(record, **names):
    """Return some fields of a record under our names; names: {our name: theirs}."""
    return {ours: record.get(theirs) for ours, theirs in names.items()}


def codes_of(value):
    """Return codes, a list or a text, as "1_1;1_6"; None without any."""
    codes = dict.fromkeys(re.findall(r'[^;,\s"\[\]]+', convert.joined(value) or ""))
    return ";".join(codes) or None


def read_corpus(path, id_field, text_field="abstract"):
    """Yield (None, record of the corpus); the fields are their abstract_id and abstract."""
    for record in read_records(path, id_field, text_field):
        if isinstance(record.get("metadata"), dict):  # SciFact-Open: year, venue
            record = record.pop("metadata") | record
        ours = {"abstract_id": record.pop(id_field), "abstract": record.pop(text_field)}
        yield None, record | ours


# ---------------------------------------------------------------- Data sets
def read_climatecheck(source, args):
    """ClimateCheck: parquet files of both hub data sets; labels of test in files named *gold*."""
    claims = {}  # {path: its name below source}
    gold = []
    for path in find(source, "*.parquet", "*gold*.csv", "*gold*.tsv"):
        name = str(path.relative_to(source))
        if "corpus" in name:
            yield from read_corpus(path, "abstract_id")
        elif "gold" in name:
            gold.append(path)
        else:
            claims[path] = name
    public = {"train": "claim_id claim abstract_id annotation", "test": "claim_id claim"}
    for split, fields in public.items():
        paths = [path for path in claims if path.name.startswith(split)]
        of_edition = [path for path in paths if args.edition in claims[path]]
        for path in of_edition or paths:
            for record in read_records(path, *fields.split()):
                yield split, climatecheck_row(record)
    for path in gold:
        for record in read_records(path, "claim_id", "annotation"):
            if "abstract_id" not in record:
                record["abstract_id"] = record["abstract_original_index"]
            yield "test", climatecheck_row(record)


def climatecheck_row(record):
    """Return a record of ClimateCheck under our names."""
    codes = codes_of(record.get("narrative"))
    return record | {"label": record.get("annotation"), "codes": codes}


def read_scifact(source, args):
    """SciFact: claims_train, claims_dev, claims_test.jsonl (without labels), corpus.jsonl.

    An abstract that is cited without evidence is NEI. In the splits train-cited and dev-cited
    every cited abstract is relevant, as in BEIR.
    """
    for path in find(source, "claims_train.jsonl", "claims_dev.jsonl", "claims_test.jsonl"):
        split = path.stem.removeprefix("claims_")
        fields = ["id", "claim"]
        if split != "test":
            fields += ["evidence", "cited_doc_ids"]
        for record in read_records(path, *fields):
            claim = renamed(record, claim_id="id", claim="claim")
            yield split, claim
            cited = map(as_id, record.get("cited_doc_ids") or ())
            for abstract_id in dict.fromkeys(cited):  # a claim may cite one twice
                yield f"{split}-cited", claim | {"abstract_id": abstract_id, "label": RELEVANT}
            for abstract_id, label in convert.evidence_of(record).items():
                yield split, claim | {"abstract_id": abstract_id, "label": label}
    yield from read_corpus(find_one(source, "corpus.jsonl"), "doc_id")


def read_scifact_open(source, args):
    """SciFact-Open: claims.jsonl (all are test), corpus.jsonl.

    Two further splits hold the evidence known from SciFact (citation), and the new (pooling).
    """
    for record in read_records(find_one(source, "claims.jsonl"), "id", "claim", "evidence"):
        claim = renamed(record, claim_id="id", claim="claim")
        yield "test", claim
        for abstract_id, label in convert.evidence_of(record).items():
            pair = claim | {"abstract_id": abstract_id, "label": label}
            yield "test", pair
            provenance = record["evidence"][abstract_id].get("provenance")
            if provenance in ("citation", "pooling"):
                yield provenance, pair
    yield from read_corpus(find_one(source, "corpus.jsonl"), "doc_id")


def read_check_covid(source, args):
    """Check-COVID: covidCheck_SPLIT.json or its two halves, corpus.json.

    The split all holds the claims of the three splits.
    """
    for split in "train dev test".split():
        for path in find(
            source,
            f"covidCheck_{split}.json",
            f"covidCheck_{split}_composed.json",
            f"covidCheck_{split}_extracted.json",  # but not *_noNEI.json
        ):
            for record in read_records(path, "id", "claim", "cord_id", "label"):
                row = record | renamed(record, claim_id="id", abstract_id="cord_id")
                yield split, row
                yield "all", row
    yield from read_corpus(find_one(source, "corpus.json"), "cord_id")


def read_climate_fever(source, args):
    """CLIMATE-FEVER: claims, each with its evidence sentences; split at random."""
    path = find_one(source, "climate-fever*.jsonl")
    claims = list(read_records(path, "claim_id", "claim", "evidences"))
    sentences = {}  # a sentence may be evidence for several claims
    for claim in claims:
        for evidence in claim["evidences"]:
            sentences[evidence["evidence_id"]] = renamed(
                evidence, abstract_id="evidence_id", title="article", abstract="evidence"
            )
    for record in sentences.values():
        yield None, record
    # By number, a shorter id first: the shuffle depends on this order.
    claims.sort(key=lambda claim: (len(as_id(claim["claim_id"])), as_id(claim["claim_id"])))
    random.Random(SEED).shuffle(claims)
    splits = ["train"] * (len(claims) // 2) + ["dev"] * (len(claims) // 10)
    for claim, split in itertools.zip_longest(claims, splits, fillvalue="test"):
        for evidence in claim["evidences"]:
            pair = renamed(evidence, abstract_id="evidence_id", label="evidence_label")
            yield split, claim | pair


def read_checkthat4b(source, args):
    """CheckThat! 2025, task 4b: tweets that are about a paper, and the collection of papers.

    The papers of test are read from subtask4b_query_tweets_test_gold.tsv.
    """
    for path in find(source, "subtask4b_query_tweets_*.tsv"):
        split = path.stem.removeprefix("subtask4b_query_tweets_")
        fields = ["post_id", "tweet_text"]
        if split != "test":
            fields.append("cord_uid")
        for record in read_records(path, *fields):
            row = renamed(record, claim_id="post_id", claim="tweet_text", abstract_id="cord_uid")
            yield split.removesuffix("_gold"), row | {"label": RELEVANT}
    path = find_one(source, "subtask4b_collection_data.*")
    if path.suffix == ".pkl" and not args.allow_pickle:
        fail(path.name, PICKLE)
    for _, record in read_corpus(path, "cord_uid"):
        record["source"] = record.pop("source_x", None)
        record.pop("label", None)  # cord_uid once more
        yield None, record


def read_checkthat2026(source, args):
    """CheckThat! 2026, task 1: posts in English, German and French, and the collection of papers.

    Posts are read from LANGUAGE_SPLIT.json, such as de_train.json, wherever it lies, papers from
    collection_data.json; a warning names other files. claim_id is LANGUAGE-NUMBER. Without the
    papers of test, these posts have no judgements.
    """
    collection = find_one(source, "collection_data.json")
    others = {*find(source, "*.json*", "*.?sv", "*.parquet")} - {collection}
    yield from read_corpus(collection, "pubkey")
    known = {}  # {(split, claim_id): (text, path)}
    for language, split in itertools.product("en de fr".split(), "train dev test".split()):
        fields = ["index", "text"]
        if split != "test":
            fields.append("pubkey")
        for path in source.rglob(f"{language}_{split}.json"):
            others.remove(path)
            for record in read_records(path, *fields):
                row = renamed(record, claim="text", abstract_id="pubkey")
                claim_id = f"{language}-{as_id(record['index'])}"
                text, first = known.setdefault((split, claim_id), (row["claim"], path))
                if text != row["claim"]:
                    fail(path, f"post {record['index']} has another text in {first}; remove one")
                row |= {"claim_id": claim_id, "language": language, "label": RELEVANT}
                yield split, row
    if others:
        warn(source, f"left out (not LANGUAGE_SPLIT.json): {', '.join(sorted(map(str, others)))}")


def read_beir(source, args):
    """A BEIR data set: corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv."""
    queries = read_records(find_one(source, "queries.jsonl"), "_id", "text")
    claims = {as_id(record["_id"]): record["text"] for record in queries}
    for path in find(source, "qrels/*.tsv"):
        for record in read_records(path, "query-id", "corpus-id", "score"):
            row = renamed(record, claim_id="query-id", abstract_id="corpus-id")
            row["claim"] = claims.get(as_id(row["claim_id"]))
            row["label"] = convert.grade_label(record["score"])
            yield path.stem, row
    yield from read_corpus(find_one(source, "corpus.jsonl"), "_id", "text")


# ---------------------------------------------------------------- Folders of the kit
def words_of(claim):
    """Return the words of a claim in lower case, as recipes/tools/fewshot.py compares claims."""
    return " ".join(re.sub(r"[!-/:->@\\^_`{|}\u2010-\u205e]", " ", claim.casefold()).split())


def read_rows(path, *fields):
    """Return the rows of a table of the kit; end the script if it lacks one of the fields."""
    table = convert.table_of_lines(path, convert.read_lines(path))
    demand(path, table, *fields)
    if "claim" in table:  # of the fields, only claims are ever quoted
        table["claim"] = table["claim"].map(convert.unquoted)
    return table.to_dict("records")


def read_claims(path):
    """Return {claim_id: claim} of a file of claims."""
    return {row["claim_id"]: row["claim"] for row in read_rows(path, "claim_id", "claim")}


def read_ours(source, args):
    """Yield the records of the corpus, then the rows of a data folder of the kit."""
    for record in read_records(source / "corpus.jsonl", "abstract_id"):
        yield None, record
    for kind in "claims narratives qrels".split():
        for path in source.glob(f"{kind}.*.tsv"):
            split = path.stem.removeprefix(f"{kind}.")
            for row in read_rows(path, "claim_id"):
                yield split, row


def read_split(source, args):
    """Draw dev or test from the training claims of a data folder; beside dev, --test is test."""
    claims = read_claims(source / "claims.train.tsv")
    in_order = sorted(claim.casefold() for claim in claims.values())
    distinct = list(dict.fromkeys(map(words_of, in_order)))  # claims of equal words stay together
    number = round(args.share * len(distinct))
    if not 0 < number < len(distinct):
        what = f"{args.share} draws {number} of {len(distinct)} distinct claims"
        fail("--share", f"{what}; draw some, and not all")
    drawn = set(random.Random(args.seed).sample(distinct, number))
    drawn_ids = {claim_id for claim_id, claim in claims.items() if words_of(claim) in drawn}
    if args.draw == "dev":
        asked = read_claims(source / f"claims.{args.test}.tsv")
        known = [claim_id for claim_id, claim in asked.items() if words_of(claim) in distinct]
        if known:
            warn(args.test, f"claims with the words of a training claim: {', '.join(known)}")
    for split, row in read_ours(source, args):
        if split is None:
            yield None, row
        elif f"{split}-".startswith("train-"):  # train-cited, too
            if row["claim_id"] in drawn_ids:
                split = split.replace("train", args.draw, 1)
            yield split, row
        elif args.draw == "dev" and f"{split}-".startswith(f"{args.test}-"):
            yield "test" + split.removeprefix(args.test), row


def read_join(source, args):
    """Join data folders: an id becomes FOLDER-ID, abstracts with the same text become one."""
    paths = [source, *args.others]
    folders = {os.path.basename(os.path.abspath(path)): path for path in paths}
    if len(folders) < len(paths):
        fail("join", "two folders have the same name, but ids begin with it; rename one of them")
    first_ids = {}  # {id made of title and abstract: abstract_id}
    for name, folder in folders.items():
        merged = {}  # {abstract_id: that of the earlier abstract}
        for split, row in read_ours(folder, args):
            for field in PAIR:
                own = as_id(row.get(field))
                if own:
                    row[field] = f"{name}-{own}"
            abstract_id = row.get("abstract_id")
            if split is None and abstract_id:
                texts = [row.get("title"), row.get("abstract")]
                text_id = convert.made_id(texts) or abstract_id  # without text, none are equal
                first_id = first_ids.setdefault(text_id, abstract_id)
                if first_id != abstract_id:
                    merged[abstract_id] = first_id
                    continue
            elif abstract_id in merged:
                row["abstract_id"] = merged[abstract_id]
            yield split, row
        if merged:
            warn(folder, f"{len(merged)} abstracts have the text of an earlier one: merged")


READERS = {
    "climatecheck": read_climatecheck,
    "scifact": read_scifact,
    "scifact-open": read_scifact_open,
    "check-covid": read_check_covid,
    "climate-fever": read_climate_fever,
    "checkthat4b": read_checkthat4b,
    "checkthat2026": read_checkthat2026,
    "beir": read_beir,
    "split": read_split,
    "join": read_join,
}
