# /// script
# requires-python = ">=3.11"
# dependencies = ["PyStemmer==3.1.0", "accelerate==1.15.0", "bm25s==0.3.16", "numpy==2.4.6",
#   "pandas==3.1.1", "protobuf==7.36.2", "ray==2.60.0", "sentence-transformers==6.2.0",
#   "sentencepiece==0.2.3", "torch==2.13.0", "tqdm==4.70.1", "transformers==5.23.0"]
# ///
"""
Run stages 1, 2, 3 and 5 on many machines: tools/shards.py cuts and merges, Ray starts the scripts.

index     splits corpus.jsonl into --shards, blocks of 4,096 in turn; 01_index.py for each
retrieve  02_retrieve.py for each; the best rows of all for each retriever, and their RRF
rerank    cuts --run by claims; 03_rerank.py for each part; joins what they write
classify  the same with 05_classify.py

Words behind -- go to the script. A script that dies is started again on any node and resumes; one
that refuses its input (exit status 2) is not, and the other shards are kept. All nodes see
repository, data and work under the same paths. --only I/N runs shard I alone, in this process and
without Ray, as in a SLURM job array; --only 0/N cuts the corpus (index) or merges (others).

Reads   what the scripts read; rerank, classify: candidates.jsonl, if it exists, as the corpus
Writes  WORK/shards-N/I/, OUT.shards-N/I/: inputs, outputs and log of shard I
        WORK/SPLIT/: what one machine writes; candidates.jsonl: the abstracts of the merged runs
Prints  one line of JSON, last on stdout: seconds by stage, facts of each script by shard

Examples
    python recipes/on_ray.py index --shards 64 --gpus 1 --address auto -- --dense-model BAAI/bge-m3
    for i in 0 1 2 3; do python recipes/on_ray.py index --only $i/3 -- --indexes bm25; done
    for i in 1 2 3 0; do python recipes/on_ray.py retrieve --only $i/3 -- --retrievers bm25; done
"""
import argparse
import json
import os
import sys
import time

from tools import shards
from tqdm.auto import tqdm

RUNS = {"rerank": ("hybrid", "rerank"), "classify": ("llm", "verdicts")}  # defaults of the scripts
OURS = set("--data --work --split --corpus --index --run --out --restrict --aggregate".split())

def on_cluster(args):
    """Yield (number, facts) of each shard as it ends; Ray places it, and starts it again."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # else a wrong address takes minutes
    try:
        import ray
        ray.init(args.address or "local", log_to_driver=False, logging_level="ERROR",
                 include_dashboard=False)
    except ImportError:
        shards.refuse("ray: not installed; pip install ray==2.60.0, or use --only")
    except Exception as error:  # of many kinds: no cluster there, another version of Ray
        shards.refuse(f"--address {args.address or 'local'}: {str(error).splitlines()[0]}")
    ray.cloudpickle.register_pickle_by_value(shards)  # nodes need not import it
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(node.get("CPU", 0) >= args.cpus and node.get("GPU", 0) >= args.gpus
               for node in nodes):
        shards.refuse(f"--cpus {args.cpus:g} --gpus {args.gpus:g}: more than any node has")
    start = ray.remote(shards.run).options(
        num_cpus=args.cpus, num_gpus=args.gpus, scheduling_strategy="SPREAD", max_retries=5,
        retry_exceptions=[RuntimeError]).remote  # raised where a script dies
    left = {start(args, number): number for number in range(1, args.shards + 1)}
    with tqdm(total=len(left), desc=args.job, unit=" shards") as bar:
        while left:
            [done], _ = ray.wait(list(left))
            try:
                facts = ray.get(done)
            except ray.exceptions.RayError as error:
                facts = {"error": f"shard {left[done]}: {str(error).splitlines()[-1]}"}
            yield left.pop(done), facts
            bar.update()

def part(text):
    number, count = map(int, text.split("/"))
    return number, count

def arguments(words):
    """Return the flags, and in .words what goes to the script."""
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS, allow_abbrev=False)
    parser.error = lambda what: shards.refuse(f"on_ray.py: {what}; see --help")
    add = parser.add_argument
    add("job", choices=shards.SCRIPTS)
    add("--data", default="data/demo", help="folder of corpus and claims")
    add("--work", help="folder of everything made from them; default: work/ and the name of --data")
    add("--split", default="test", help="which claims")
    add("--corpus", help="the abstracts")
    add("--run", help="run to rerank or classify")
    add("--out", help="reranked run, or verdicts")
    add("--shards", type=int, default=2, help="number of shards")
    add("--only", type=part, help="I/N: shard I alone, without Ray; 0/N: cut or merge")
    add("--address", help="of a Ray cluster, as auto; default: this machine alone")
    add("--cpus", type=float, default=1, help="cores of a shard")
    add("--gpus", type=float, default=0, help="GPUs of a shard")
    args = parser.parse_args(words[:at], argparse.Namespace(words=words[at + 1 :]))
    for word in OURS.intersection(word.split("=")[0] for word in args.words):
        shards.refuse(f"{word}: not behind --; on_ray.py sets it")
    args.only, args.shards = args.only or (None, args.shards)
    if args.shards < 1 or not 0 <= (args.only or 0) <= args.shards:
        shards.refuse("--shards, --only: give N from 1 on, and I from 0 to N")
    args.work = args.work or f"work/{os.path.basename(os.path.realpath(args.data))}"
    place, corpus = f"{args.work}/{args.split}", f"{args.data}/corpus.jsonl"
    args.folder, args.cwd = f"{args.work}/shards-{args.shards}", os.getcwd()
    args.env = {name: os.environ[name] for name in os.environ if name.startswith(("HF_", "OMP_"))}
    if args.job in RUNS:
        run, out = RUNS[args.job]
        args.run, args.out = args.run or f"{place}/{run}.tsv", args.out or f"{place}/{out}.tsv"
        args.folder = f"{args.out}.shards-{args.shards}"
        if os.path.exists(f"{place}/candidates.jsonl"):
            corpus = f"{place}/candidates.jsonl"
    elif args.run or args.out:
        shards.refuse(f"--run, --out: not for {args.job}")
    args.corpus = args.corpus or corpus
    return args

def run(args):
    """Cut, run all shards or one, merge. Return the errors, and the facts to print."""
    done, clock = {}, [time.monotonic()]
    shards.cut(args)
    clock.append(time.monotonic())
    if args.only is None:
        done = dict(on_cluster(args))
    elif args.only:
        done = {args.only: shards.run(args, args.only)}
    clock.append(time.monotonic())
    errors = [facts["error"] for facts in done.values() if "error" in facts]
    if not args.only and not errors:
        shards.merge(args)
    clock.append(time.monotonic())
    seconds = [round(end - start, 1) for start, end in zip(clock, clock[1:])]
    stages = dict(zip(["cut", args.job, "merge"], seconds))
    return errors, {"job": args.job, "seconds": stages, "shards": dict(sorted(done.items()))}

def main():
    try:
        errors, facts = run(arguments(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError) as error:
        name = getattr(error, "filename", None)
        errors = [f"{name}: {error.strerror}; check path and rights" if name else str(error)]
    for line in errors:
        print("".join(c for c in f"error: {line}" if c.isprintable()), file=sys.stderr)
    if errors:
        sys.exit(2)
    print(json.dumps(facts))

if __name__ == "__main__":
    main()
