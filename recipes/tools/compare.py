# /// script
# requires-python = ">=3.11"
# dependencies = ["pandas==3.1.1"]
# ///
"""
Run a command for compare.sh and record its cost; print a table of all runs.

Reads   table: metrics.json, runs and indexes with their sidecars, rows/*.json
Writes  run: ROW.json (error, GPU memory) and ROW.json.log (the output of the command)
        table: WORK/compare.tsv
Prints  run: one line; table: a line for each run, also for those that failed

Examples
    python recipes/tools/compare.py run rows/x.json python 03_rerank.py --model x
    python recipes/tools/compare.py table work/demo/compare x

Seconds are those that sidecars (.meta.json) state; after an interruption, they count from the
resumed call. GPU memory is the peak that nvidia-smi shows, summed over all GPUs, minus the level at
the start; it means little on a GPU that others use, too. Equal scores are rows of a run that have
the score of another row of their claim.
"""

import contextlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import kit

SECONDS = 2  # between samples of GPU memory; PyTorch keeps what it has reserved, so peaks stay
INDEXES = ("bm25", "dense", "splade")


# -------------------- Run
def gpu_memory():
    """Return the MiB in use on all GPUs, 0 without nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if not shutil.which(command[0]):
        return 0
    shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return sum(int(word) for word in shown.split() if word.isdigit())


def watched(command, log):
    """Run a command, its output in a file. Return its exit status and peak of GPU memory (MiB)."""
    before = gpu_memory()
    peak = 0
    with open(log, "w", encoding="utf-8") as file:
        with subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as process:
            while process.poll() is None:
                peak = max(peak, gpu_memory() - before)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(SECONDS)
    return process.returncode, peak


def error_in(text, status):
    """Return the last line of an output that names an error."""
    lines = re.findall(r"^(?:error: |\w+(?:\.\w+)*(?:Error|Exception): ).*", text, re.M)
    if not lines:
        return f"exit status {status}"
    return " ".join(lines[-1].removeprefix("error: ").split())


def read_row(path):
    """Return what the job run wrote about a command."""
    try:
        return {**json.loads(path.read_bytes())}  # a TypeError if it is no object
    except (ValueError, TypeError) as error:
        kit.fail(path, f"no row of compare.sh ({error}); remove this file")


def run(args):
    """Run a command and write its cost; if its output was up to date, the old costs stay."""
    log = Path(f"{args.row}.log")
    kit.check_outs(args.row, log)
    if not args.command:
        kit.fail(args.row, "no command to run; give one after this argument")
    args.row.parent.mkdir(parents=True, exist_ok=True)
    old = {}
    if args.row.exists():
        old = read_row(args.row)
    status, peak = watched(args.command, log)
    row = {"gpu_mib": peak}
    text = log.read_text(encoding="utf-8", errors="replace")
    if status:
        row["error"] = error_in(text, status)
    elif '"made": []' in text:
        row = old
        row.pop("error", None)
    with kit.written(args.row, {}) as new:
        new.write_text(json.dumps(row) + "\n", encoding="utf-8")
    print(f"{args.row.stem}: {row.get('error') or 'done'}; see {log}")
    return status


# -------------------- Table
def seconds_of(run, index):
    """Return the seconds that a run took, together with its index if it has its own."""
    paths = [run, *(index / kind for kind in INDEXES)]
    return sum(kit.sidecar_of(path).get("seconds", 0) for path in paths)


def read_rows(work, name):
    """Return what the job run wrote about the index of a run and about the run."""
    paths = [work / "rows" / f"{name}.index.json", work / "rows" / f"{name}.json"]
    return [read_row(path) for path in paths if path.exists()]


def cells_of(run, values, p_values):
    """Return {measure: value as text}, with † where it differs significantly from the first run."""
    cells = {}
    for measure in values.columns:
        cells[measure] = f"{values.loc[run, measure]:.3f}"
        if p_values.loc[run, measure] < 0.05:
            cells[measure] += "†"
    return cells


def costs_of(name, path, rows, work):
    """Return seconds, GPU memory and equal scores of a run in a file."""
    table = kit.read_texts(path, "claim_id", "score")
    peaks = [row["gpu_mib"] for row in rows if row.get("gpu_mib")]
    return {
        "seconds": seconds_of(path, work / "index" / name),
        "GPU MiB": max(peaks, default=None),
        "equal scores": int(table.duplicated(["claim_id", "score"]).sum()),
    }


def table(args):
    """Write and print the table of all runs."""
    import pandas as pd

    out = args.work / "compare.tsv"
    kit.check_outs(out)
    values = kit.read_metrics(args.work / "metrics.json", "value")
    p_values = kit.read_metrics(args.work / "metrics.json", "p_holm")
    metrics = args.work / "metrics.tsv"
    arguments = kit.sidecar_of(metrics).get("arguments", {})
    paths = {Path(path).stem: path for path in arguments.get("runs", [])}
    if not set(values.index) <= set(paths):
        kit.fail(metrics, "its provenance has other runs; make it again: python 06_evaluate.py")
    lines = []
    for name in dict.fromkeys([*values.index, *args.names]):  # each once, in this order
        rows = read_rows(args.work, name)
        errors = [row["error"] for row in rows if "error" in row]
        line = {"run": name}
        if name in values.index and not errors:
            line |= cells_of(name, values, p_values)
            line |= costs_of(name, paths[name], rows, args.work)
        line["error"] = "; ".join(errors) or None
        lines.append(line)
    shown = pd.DataFrame(lines).dropna(axis=1, how="all").round(3)
    with kit.written(out, {}) as new:
        kit.write_table(shown, new)
    print(shown.to_string(index=False, na_rep="-", float_format="{:.9g}".format))
    print("† differs from the first run, p < 0.05 (paired randomisation over claims, Holm).")
    print(json.dumps({"made": [str(out)], "rows": len(lines)}))
    return 0


def main():
    parser = kit.parser(__doc__)
    jobs = parser.add_subparsers(required=True)
    run_job = jobs.add_parser("run", help=run.__doc__)
    run_job.set_defaults(job=run)
    table_job = jobs.add_parser("table", help=table.__doc__)
    table_job.set_defaults(job=table)
    # fmt: off
    run_job.add_argument("row", type=Path, help="write the cost of the command to this JSON file")
    run_job.add_argument("command", nargs="...", help="run this command")
    table_job.add_argument("work", type=Path, help="read and write in this folder of compare.sh")
    table_job.add_argument("names", nargs="*",
        help="show a line for each of these runs, even if it failed")
    # fmt: on
    args = parser.parse_args()
    sys.exit(args.job(args))


if __name__ == "__main__":
    kit.call(main)
