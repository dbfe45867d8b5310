"""
Run a recipe at full size with tiny models, and measure each of its commands.

All that is not arithmetic of a network has its real size: corpus, claims, depths, requests. In
each command, an untrained model of one layer of 8 (recipes/tools/stand_in.py) takes the place of a
model on the hub, and endpoint.py answers for language models.
A recipe that was stopped goes on where it was; finished commands keep what they took.

Reads   a data folder by make_corpus.py; data/models/
Writes  WORK: what the recipe makes; WORK/commands.jsonl: a line a command
Prints  a table: each script's seconds, peak memory in MB and, of its JSON, pairs and requests; then
        seconds, memory and bytes of the whole recipe, as one line of JSON

Examples
    python tests/benchmarks/make_corpus.py work/full/climatecheck2025
    python tests/benchmarks/full_size.py pranav work/full/climatecheck2025 --work work/full/pranav
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
COUNTED = ("pairs", "replies", "prompt_tokens", "completion_tokens", "examples", "rows")
# In place of python for the recipe: runs it, and writes down what it took
WRAPPER = f"""#!/bin/bash
exec {sys.executable} {Path(__file__).resolve()} --record "$RECORD" -- "$@"
"""

TINY = Path("work/small")  # tiny models, each in a folder named as its kind
TINY_KINDS = {  # of a script's models; 03 has two others
    "--dense-model": "tiny-encoder",
    "--splade-model": "tiny-splade",
    "01_index.py": "tiny-encoder",
    "recipes/train/encoder.py": "tiny-encoder",
    "recipes/tools/count_tokens.py": "tiny-encoder",
    "03_rerank.py": "tiny-cross-encoder",
    "recipes/train/reranker.py": "tiny-cross-encoder",
    "05_classify.py": "tiny-nli",
    "recipes/train/classifier.py": "tiny-nli",
}
RERANKER_KINDS = {"monot5": "tiny-monot5", "Qwen": "tiny-causal"}  # by a part of the name


def tiny_model(script, flag, name):
    """Return the tiny model in place of a model on the hub, OWNER/NAME; another word as it is."""
    kind = TINY_KINDS.get(flag) or TINY_KINDS.get(script)
    if flag not in ("--model", "--dense-model", "--splade-model") or kind is None:
        return name
    if not re.fullmatch(r"[\w-]+/[\w.-]+", name):
        return name
    for part, other in RERANKER_KINDS.items():
        if "rerank" in script and part in name:
            kind = other
    return str(TINY / kind)


def make_tiny_models():
    """Write the tiny models that are missing."""
    subprocess.run([sys.executable, "data/download.py", "models"], cwd=ROOT, check=True)
    for kind in {*TINY_KINDS.values(), *RERANKER_KINDS.values()}:
        if not (ROOT / TINY / kind).exists():
            command = [sys.executable, "recipes/tools/stand_in.py", str(TINY / kind)]
            subprocess.run([*command, "--kind", kind], cwd=ROOT, check=True)


def record(path, words):
    """Run a command with tiny models, append what it took to a file, return its exit status."""
    flags = ["", *words]
    words = [tiny_model(words[0], flag, word) for flag, word in zip(flags, words)]
    begun = time.monotonic()
    command = [sys.executable, *words]
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line
    seconds = time.monotonic() - begun
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    try:
        made = json.loads(last)
    except ValueError:
        made = {}
    if not isinstance(made, dict):
        made = {}
    row = {"command": words, "status": process.returncode, "seconds": round(seconds, 1)}
    row |= {"peak_mb": round(peak), "is_new": made.get("made") != []}
    row |= {name: made[name] for name in COUNTED if name in made}
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    return process.returncode


def run_recipe(args):
    """Run a recipe, every command through this program; return its exit status."""
    make_tiny_models()
    folder = args.work / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "python").write_text(WRAPPER)
    (folder / "python").chmod(0o755)
    settings = {
        "PATH": f"{folder.resolve()}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RECORD": str((args.work / "commands.jsonl").resolve()),
        "DATA": str(args.data),
        "WORK": str(args.work),
        "SMALL": "",
        "LLM_MODEL": "scripted",
        "LLM_BASE_URL": f"http://localhost:{args.port}/v1",
    }
    server = subprocess.Popen(
        [sys.executable, str(HERE / "endpoint.py"), "--port", str(args.port)],
        stdout=subprocess.DEVNULL,
    )
    try:
        command = ["bash", str(ROOT / "recipes/systems" / f"{args.recipe}.sh")]
        return subprocess.run(command, env=os.environ | settings, check=False).returncode
    finally:
        server.terminate()


def job_of(words):
    """Return the script and job of a command."""
    script = Path(words[0]).name
    if len(words) > 1 and not words[1].startswith("-") and "/" not in words[1]:
        return f"{script} {words[1]}"
    return script


def print_table(rows, work):
    """Print what each kind of command took, longest first, and the whole as JSON."""
    kinds = {}
    for row in rows:
        if not row["is_new"] or row["status"] not in (0, 3):
            continue
        kind = kinds.setdefault(job_of(row["command"]), {"calls": 0, "seconds": 0.0, "peak_mb": 0})
        kind["calls"] += 1
        kind["seconds"] += row["seconds"]
        kind["peak_mb"] = max(kind["peak_mb"], row["peak_mb"])
        for name in COUNTED:
            kind[name] = kind.get(name, 0) + (row.get(name) or 0)
    print("| command | calls | seconds | peak MB | pairs | replies | prompt tokens |")
    print("|---|---|---|---|---|---|---|")
    for name, kind in sorted(kinds.items(), key=lambda item: -item[1]["seconds"]):
        counts = [kind["calls"], round(kind["seconds"]), kind["peak_mb"]]
        counts += [kind["pairs"], kind["replies"], kind["prompt_tokens"]]
        print(f"| `{name}` |", " | ".join(f"{count:,}" for count in counts), "|")
    size = 0
    for path in work.rglob("*"):
        if path.is_file():
            size += path.stat().st_size
    whole = {"seconds": round(sum(kind["seconds"] for kind in kinds.values()))}
    whole["peak_mb"] = max(kind["peak_mb"] for kind in kinds.values())
    print(json.dumps(whole | {"gb_on_disk": round(size / 1e9, 2)}))


def main():
    if sys.argv[1:2] == ["--record"]:
        sys.exit(record(sys.argv[2], sys.argv[4:]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help="name of a recipe, as pranav")
    parser.add_argument("data", type=Path, help="a data folder by make_corpus.py")
    parser.add_argument("--work", type=Path, required=True, help="keep what is made here")
    parser.add_argument("--port", type=int, default=8123, help="of the scripted endpoint")
    args = parser.parse_args()
    status = run_recipe(args)
    lines = (args.work / "commands.jsonl").read_text(encoding="utf-8").splitlines()
    print_table([json.loads(line) for line in lines], args.work)
    sys.exit(status)


if __name__ == "__main__":
    main()
