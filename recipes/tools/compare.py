# /// script
# requires-python = ">=3.11"
# dependencies = ["pandas==3.1.1"]
# ///
"""
Run a command of compare.sh and keep what it took; print the table of all.

Reads   table: metrics.tsv and .json, runs and indexes with their provenance, rows/*.json
Writes  run: ROW.json (error, GPU memory) and ROW.json.log (all that the command printed)
        table: WORK/compare.tsv
Prints  run: one line; table: a line for each run, and one for each model that failed

Examples
    python recipes/tools/compare.py run rows/x.json python 03_rerank.py --model x
    python recipes/tools/compare.py table work/demo/compare x

Seconds and equal scores come from provenance and run; an interrupted command counts only the
seconds since it was resumed. GPU memory is what nvidia-smi shows above its level at the start, the
peaks of all GPUs added: on a GPU that others use, too, it means little.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

SECONDS = 2  # between two looks at the GPUs; PyTorch keeps what it has reserved
INDEXES = ("bm25", "dense", "splade")


# -------------------- Run
def gpu_memory():
    """Return the MiB in use on each GPU, [] without nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if not shutil.which(command[0]):
        return []
    shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return [int(number) for number in shown if number.isdigit()]


def watched(command, log):
    """Run a command, its output in a file. Return its exit status and peak of GPU memory (MiB)."""
    first, peaks = gpu_memory(), []
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                peaks.append([now - then for now, then in zip(gpu_memory(), first)])
                try:
                    process.wait(SECONDS)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            process.terminate()
            process.wait()
    return process.returncode, sum(map(max, zip(*peaks))) if first else None


def error_in(text, status):
    """Return the last line of an output that is an error."""
    lines = re.findall(r"^(?:error: |\w+(?:\.\w+)*(?:Error|Exception): ).*", text, re.M)
    return lines[-1].removeprefix("error: ") if lines else f"exit status {status}"


def run(args):
    """Run the command. Nothing is measured anew where everything is up to date."""
    args.row.parent.mkdir(parents=True, exist_ok=True)
    log, old = Path(f"{args.row}.log"), {}
    if args.row.exists():
        old = json.loads(args.row.read_bytes())
    status, peak = watched(args.command, log)
    row = {"gpu_mib": peak}
    text = log.read_text(encoding="utf-8", errors="replace")
    if status:
        row["error"] = error_in(text, status)
    elif '"made": []' in text:
        row = {name: value for name, value in old.items() if name != "error"}
    new = Path(f"{args.row}.tmp")
    new.write_text(json.dumps(row) + "\n", encoding="utf-8")
    new.rename(args.row)
    print(f"{args.row.stem}: {row.get('error') or 'done'}; see {log}")
    return status


# -------------------- Table
def provenance(path):
    """Return the provenance of a file or folder, {} where there is none."""
    path = Path(f"{path}.meta.json")
    return json.loads(path.read_bytes()) if path.exists() else {}


def seconds_of(run, index):
    """Return the seconds of a run, and of the one index in a folder, if any."""
    made = [provenance(path) for path in (run, *map(index.joinpath, INDEXES))]
    return sum(one.get("seconds", 0) for one in made)


def records(work, name):
    """Return what is kept about a run and its index."""
    paths = [work / "rows" / f"{name}{part}.json" for part in (".index", "")]
    return [json.loads(path.read_bytes()) for path in paths if path.exists()]


def table(args):
    """Write and print the table."""
    import pandas as pd

    metrics, rows = args.work / "metrics.tsv", []
    values = pd.read_csv(metrics, sep="\t", dtype={"run": str}).set_index("run")
    numbers = json.loads((args.work / "metrics.json").read_bytes())
    p = pd.DataFrame(numbers["p_holm"]).T.astype(float)
    paths = {Path(path).stem: path for path in provenance(metrics)["arguments"]["runs"]}
    for name in dict.fromkeys([*values.index, *args.names]):
        kept = records(args.work, name)
        errors = [one["error"] for one in kept if "error" in one]
        row = {"run": name}
        if name in values.index and not errors:
            for measure in values.columns:
                sign = "†" if p.loc[name, measure] < 0.05 else ""
                row[measure] = f"{values.loc[name, measure]:.3f}{sign}"
            ranked = pd.read_csv(paths[name], sep="\t", dtype=str)
            row["seconds"] = seconds_of(paths[name], args.work / "index" / name)
            row["GPU MiB"] = max((one.get("gpu_mib") or 0 for one in kept), default=0) or None
            row["equal scores"] = int(ranked.duplicated(["claim_id", "score"]).sum())
        rows.append(row | {"error": "; ".join(errors) or None})
    shown = pd.DataFrame(rows).dropna(axis=1, how="all").round(3)
    shown.to_csv(args.work / "compare.tsv", sep="\t", index=False)
    print(shown.to_string(index=False, na_rep="-", float_format="{:.9g}".format))
    print("† differs from the first run, p < 0.05 (paired randomisation over claims, Holm).")
    print(json.dumps({"made": [str(args.work / "compare.tsv")], "rows": len(rows)}))
    return 0


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    jobs = parser.add_subparsers(required=True)
    one = jobs.add_parser("run")
    one.add_argument("row", type=Path, help="JSON file to write")
    one.add_argument("command", nargs=argparse.REMAINDER, help="what to run")
    one.set_defaults(job=run)
    all_of_them = jobs.add_parser("table")
    all_of_them.add_argument("work", type=Path, help="folder of compare.sh")
    all_of_them.add_argument("names", nargs="*", help="of all that was tried")
    all_of_them.set_defaults(job=table)
    args = parser.parse_args()
    sys.exit(args.job(args))


if __name__ == "__main__":
    main()
