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
import json
import pickle
import random
import re
from pathlib import Path

import convert
from convert import RELEVANT, as_id, fail

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
    """Return the files at or below source whose names match, sorted."""
    paths = [source] if source.is_file() else sorted(filter(Path.is_file, source.rglob("*")))
    found = [path for path in paths if any(map(path.match, patterns))]
    if not found:
        fail(source, f"no file {' or '.join(patterns)}; give the folder of the published files")
    return found


def only(source, pattern):
    """Return the one file that matches; copies with the same bytes count as one."""
    found = find(source, pattern)
    if not all(filecmp.cmp(found[0], path, shallow=False) for path in found):
        fail(source, f"{found[0]} and {found[-1]} differ; give the folder of one data set")
    return found[0]


def demand(where, found, *wanted):
    """End the script if columns are missing."""
    missing = [column for column in wanted if column not in found]
    if missing:
        there = ", ".join(map(str, found))
        fail(where, f"no {', '.join(missing)} among {there}; see the published schema")


def rows(path, *wanted):
    """Yield the records of a parquet, pickle, TSV, CSV or JSON file that has the columns wanted."""
    if path.suffix == ".parquet":
        from pyarrow import parquet

        batches = parquet.ParquetFile(path).iter_batches(10_000)  # a whole corpus takes gigabytes
        records = (record for batch in batches for record in batch.to_pylist())
    elif path.suffix == ".pkl":
        with open(path, "rb") as file:
            records = TableUnpickler(file).load().to_dict("records")
    elif path.suffix in (".tsv", ".csv"):
        records = convert.read_table(path).to_dict("records")
    elif path.open(encoding="utf-8-sig").read(1) == "[":
        records = json.loads(path.read_text(encoding="utf-8-sig"))
    else:
        records = (record for _, record in convert.read_json(path))
    for record in records:
        demand(path, record, *wanted)
        yield record


class TableUnpickler(pickle.Unpickler):
    """An unpickler that builds pandas tables and imports or calls nothing else."""

    def find_class(self, module, name):
        module = re.sub(r"^numpy\.core\b", "numpy._core", module)  # its name before numpy 2
        if name == "Int64Index":  # before pandas 2
            module, name = "pandas", "Index"
        if f"{module}.{name}" not in TABLE_NAMES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no table needs")
        return super().find_class(module, name)


# ---------------------------------------------------------------- Rows
def renamed(row, **names):
    """Return some fields of a row under our names; names: {our name: theirs}."""
    return {ours: row.get(theirs) for ours, theirs in names.items()}


def codes_of(value):
    """Return codes, a list or a text, as "1_1;1_6"; None without any."""
    codes = value if isinstance(value, list) else re.split(r"[;,\s]+", value or "")
    return ";".join(dict.fromkeys(filter(None, codes))) or None


def papers(table, key, text="abstract"):
    """Yield rows as records of the corpus; key and text: their names of abstract_id, abstract."""
    for row in table:
        if isinstance(row.get("metadata"), dict):  # SciFact-Open: year, venue
            row = row.pop("metadata") | row
        yield None, convert.corpus_record(row, key, text)


def corpus_of(source, pattern, key, text="abstract"):
    """Yield the records of the one corpus file in JSON Lines."""
    yield from papers(rows(only(source, pattern), key, text), key, text)


# ---------------------------------------------------------------- Data sets
def read_climatecheck(source, args):
    """ClimateCheck: parquet files of both hub data sets; test labels in *gold*."""
    files = find(source, "*.parquet", "*gold*.csv", "*gold*.tsv")
    names = {path: str(path.relative_to(source)) for path in files}
    corpus = [path for path in files if "corpus" in names[path]]
    gold = [path for path in files if "gold" in names[path]]
    if not corpus:
        fail(source, "no *corpus*.parquet; add climatecheck_publications_corpus.parquet")
    for path in corpus:
        yield from papers(rows(path, "abstract_id", "abstract"), "abstract_id")
    rest = [path for path in files if path not in (*corpus, *gold)]
    columns = ("claim_id", "claim", "abstract_id", "annotation")  # of test, only two are public
    for split, public in (("train", 4), ("test", 2)):
        paths = [path for path in rest if path.name.startswith(split)]
        for path in [path for path in paths if args.edition in names[path]] or paths:
            for row in rows(path, *columns[:public]):
                more = {"label": row.get("annotation"), "codes": codes_of(row.get("narrative"))}
                yield split, row | more
    for path in gold:
        for row in rows(path, "claim_id", "annotation"):
            key = "abstract_id" if "abstract_id" in row else "abstract_original_index"
            demand(path, row, key)
            more = {"label": row["annotation"], "codes": codes_of(row.get("narrative"))}
            yield "test", row | {"abstract_id": row[key]} | more


def read_scifact(source, args):
    """SciFact: claims_train, claims_dev, claims_test.jsonl (without labels), corpus.jsonl.

    An abstract that is cited without evidence is NEI. In the splits train-cited and dev-cited
    every cited abstract is relevant, as in BEIR.
    """
    for path in find(source, "claims_train.jsonl", "claims_dev.jsonl", "claims_test.jsonl"):
        split = path.stem.removeprefix("claims_")
        labelled = () if split == "test" else ("evidence", "cited_doc_ids")
        for row in rows(path, "id", "claim", *labelled):
            claim = {"claim_id": row["id"], "claim": row["claim"]}
            yield split, claim
            for name in dict.fromkeys(map(str, row.get("cited_doc_ids", ()))):
                yield f"{split}-cited", claim | {"abstract_id": name, "label": RELEVANT}
            for name, label in convert.evidence_of(row).items():
                yield split, {"claim_id": row["id"], "abstract_id": name, "label": label}
    yield from corpus_of(source, "corpus.jsonl", "doc_id")


def read_scifact_open(source, args):
    """SciFact-Open: claims.jsonl (all are test), corpus.jsonl.

    Two further splits hold the evidence known from SciFact (citation), and the new (pooling).
    """
    path = only(source, "claims.jsonl")
    for row in rows(path, "id", "claim", "evidence"):
        claim = {"claim_id": row["id"], "claim": row["claim"]}
        yield "test", claim
        for name, label in convert.evidence_of(row).items():
            judged = claim | {"abstract_id": name, "label": label}
            yield "test", judged
            if row["evidence"][name].get("provenance") in ("citation", "pooling"):
                yield row["evidence"][name]["provenance"], judged
    yield from corpus_of(source, "corpus.jsonl", "doc_id")


def read_check_covid(source, args):
    """Check-COVID: covidCheck_SPLIT.json or its two halves, corpus.json; all: the three splits."""
    for split in ("train", "dev", "test"):
        names = [f"covidCheck_{split}{kind}.json" for kind in ("", "_composed", "_extracted")]
        for path in find(source, *names):
            for row in rows(path, "id", "claim", "cord_id", "label"):
                row |= {"claim_id": row["id"], "abstract_id": row["cord_id"]}
                yield split, row
                yield "all", row
    yield from corpus_of(source, "corpus.json", "cord_id")


def read_climate_fever(source, args):
    """CLIMATE-FEVER: claims, each with its evidence sentences; split at random."""
    path = only(source, "climate-fever*.jsonl")
    claims = list(rows(path, "claim_id", "claim", "evidences"))
    sentences = {}  # a sentence may be evidence for several claims
    for row in claims:
        for one in row["evidences"]:
            demand(
                f"{path}, claim {row['claim_id']}",
                one,
                "evidence_id",
                "evidence_label",
                "article",
                "evidence",
            )
            sentences[one["evidence_id"]] = one
    for one in sentences.values():
        yield None, renamed(one, abstract_id="evidence_id", title="article", abstract="evidence")
    claims.sort(key=lambda row: (len(str(row["claim_id"])), str(row["claim_id"])))  # 9 before 10
    random.Random(SEED).shuffle(claims)
    splits = ["train"] * (len(claims) // 2) + ["dev"] * (len(claims) // 10)
    splits += ["test"] * (len(claims) - len(splits))
    for split, row in zip(splits, claims):
        for one in row["evidences"]:
            yield split, row | renamed(one, abstract_id="evidence_id", label="evidence_label")


def read_checkthat4b(source, args):
    """CheckThat! 2025, task 4b: query tweets (papers of test in test_gold), the collection."""
    for path in find(source, "subtask4b_query_tweets_*.tsv"):
        split = path.stem.removeprefix("subtask4b_query_tweets_")
        columns = ("post_id", "tweet_text", "cord_uid")
        public = 2 if split == "test" else 3
        for row in rows(path, *columns[:public]):
            row = renamed(row, claim_id="post_id", claim="tweet_text", abstract_id="cord_uid")
            yield split.removesuffix("_gold"), row | {"label": RELEVANT}
    path = only(source, "subtask4b_collection_data.*")
    columns = ("cord_uid", "title", "abstract")
    if path.suffix == ".pkl" and not args.allow_pickle:
        fail(path.name, PICKLE)
    for _, record in papers(rows(path, *columns), "cord_uid"):
        record["source"] = record.pop("source_x", None)
        record.pop("label", None)  # cord_uid once more
        yield None, record


def read_checkthat2026(source, args):
    """CheckThat! 2026, task 1: the collection, and posts in English, German and French.

    The path of a file of posts names language and split, as in de_train.json; claim_id is
    LANGUAGE-NUMBER. Without the papers of test, these posts have no judgements.
    """
    paths = find(source, "*.json", "*.jsonl", "*.parquet", "*.tsv", "*.csv")
    words = {path: re.findall("[a-z]+", str(path.relative_to(source)).lower()) for path in paths}
    for path in find(source, "*collection*.*"):
        yield from papers(rows(path, "pubkey", "title", "abstract"), "pubkey")
    for language, split in itertools.product(("en", "de", "fr"), ("train", "dev", "test")):
        for path in [path for path in paths if {language, split} <= set(words[path])]:
            for row in rows(path, "index", "text", *["pubkey"] * (split != "test")):
                claim = {"claim_id": f"{language}-{as_id(row['index'])}", "claim": row["text"]}
                yield (
                    split,
                    claim
                    | {"language": language, "abstract_id": row.get("pubkey"), "label": RELEVANT},
                )


def read_beir(source, args):
    """A BEIR data set: corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv."""
    queries = rows(only(source, "queries.jsonl"), "_id", "text")
    texts = {as_id(row["_id"]): row["text"] for row in queries}
    for path in find(source, "qrels/*.tsv"):
        for row in rows(path, "query-id", "corpus-id", "score"):
            pair = renamed(row, claim_id="query-id", abstract_id="corpus-id")
            label = convert.grade_label(row["score"])
            yield path.stem, pair | {"claim": texts.get(as_id(row["query-id"])), "label": label}
    yield from corpus_of(source, "corpus.jsonl", "_id", "text")


# ---------------------------------------------------------------- Folders of the kit
def read_ours(source, args):
    """Yield the rows of a data folder of the kit."""
    for path in source.glob("*.*.tsv"):  # claims, qrels, narratives
        for row in rows(path, "claim_id"):
            yield path.stem.partition(".")[2], row
    for record in rows(source / "corpus.jsonl", "abstract_id"):
        yield None, record


def read_split(source, args):
    """Draw a dev split from a data folder's training claims; another of its splits is test."""
    if not 0 < args.share < 1:
        fail("--share", f"{args.share} is not between 0 and 1")
    path = source / f"claims.{args.test}.tsv"
    if args.test.partition("-")[0] == "train" or not path.is_file():
        fail(path, "no such file, or what dev is drawn from; --test names another split for test")
    claims = rows(source / "claims.train.tsv", "claim_id", "claim")
    words = {row["claim_id"]: row["claim"].casefold() for row in claims}
    texts = sorted(set(words.values()))
    # claims of equal words stay together
    dev = set(random.Random(args.seed).sample(texts, round(args.share * len(texts))))
    for name, row in read_ours(source, args):
        split, dash, suffix = (name or "").partition("-")  # train-cited
        if split == "train":
            drawn = words.get(row["claim_id"]) in dev
            yield ("dev" if drawn else "train") + dash + suffix, row
        elif name is None:
            yield None, row
        elif name == args.test or name.startswith(args.test + "-"):
            yield "test" + name.removeprefix(args.test), row


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
}
