"""
Rerank the candidates of a run with a cross-encoder, or train one.

Reads   work/NAME/SPLIT/hybrid.tsv (02_retrieve.py), data/NAME/claims.SPLIT.tsv, data/NAME/corpus.jsonl
        train: also data/NAME/qrels.SPLIT.tsv
Writes  work/NAME/SPLIT/rerank.tsv: claim_id, abstract_id, rank (from 1), score (the model's logit)
        train: work/NAME/models/reranker/, and reranker.examples.jsonl, every pair that it was trained on
Prints  one line of JSON, last on stdout

Examples
    python 02_retrieve.py --split train && python 03_rerank.py train
    python 03_rerank.py
    python 03_rerank.py --model cross-encoder/ms-marco-MiniLM-L-6-v2 --depth 200 --out work/demo/test/msmarco.tsv
"""
import argparse
import contextlib
import hashlib
import json
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

# Kiepura & Lam 2025, section 4.1: the reranker is trained with these
EPOCHS, LEARNING_RATE, BATCH_SIZE, WEIGHT_DECAY = 3, 2e-5, 16, 0.01

# --- helpers: the same block in all six scripts
LABELS, START = ("SUPPORTS", "REFUTES", "NEI"), time.monotonic()
PACKAGES = "numpy pandas torch transformers sentence_transformers bm25s openai".split()
TREC = {6: "claim_id q0 abstract_id rank score tag".split(), 4: "claim_id q0 abstract_id label".split()}
if not sys.stderr.isatty():  # every tqdm obeys these: plain lines where no bar can be drawn
    os.environ.setdefault("TQDM_MININTERVAL", "10")
    os.environ.setdefault("TQDM_BAR_FORMAT", "{desc}: {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]\n")

def fail(where, what):
    """Bad input or usage: one line on stderr, exit status 2."""
    sys.exit(print("error:", *f"{where}: {what}".split(), file=sys.stderr) or 2)

def reject(path, table, bad, what):
    """Fail at the first row where bad (boolean, by row) holds; what may name the row's {columns}."""
    if bad.any():  # the index counts records: line breaks inside quoted fields come on top
        breaks = table.loc[: bad.idxmax()].iloc[:-1].apply(lambda column: column.str.count("\n")).to_numpy().sum()
        fail(f"{path}:{bad.idxmax() + int(breaks)}", what.format(**table.loc[bad.idxmax()]))

def read_table(path, columns, **known):
    """TSV with a header, or TREC, as strings; a run comes by claim and rank. known: the ids that a column may hold."""
    import pandas as pd
    try:
        with open(path, encoding="utf-8-sig") as file:
            words = file.readline().split()
        trec = set(columns) <= set(TREC.get(len(words), ())) and not set(columns) & set(words)
        shape = dict(sep=r"\s+", header=None, names=TREC[len(words)]) if trec else dict(sep="\t")
        table = pd.read_csv(path, dtype=str, na_filter=False, skip_blank_lines=False, encoding="utf-8-sig", **shape)
    except (OSError, ValueError) as error:
        fail(path, f"{getattr(error, 'strerror', None) or error}; give a table with the columns {', '.join(columns)}")
    if not isinstance(table.index, pd.RangeIndex) or not set(columns) <= set(table):
        found = ", ".join(map(str, table))
        fail(f"{path}:1", f"the columns {', '.join(columns)} are wanted, {found} found; mend the header")
    table.index += 1 if trec else 2
    table = table[(table != "").any(axis=1)].copy()
    ids = [column for column in columns if column.endswith("_id")]
    reject(path, table, (table[ids] == "").any(axis=1), "an id is empty; fill it in or remove the row")
    reject(path, table, table.duplicated(ids), " ".join(f"{c} {{{c}}}" for c in ids) + " stands twice; keep one row")
    for column, allowed in known.items():
        reject(path, table, ~table[column].isin(allowed), f"unknown {column} {{{column}}}; give the files that go together")
    if "label" in columns and trec:  # TREC judges relevance: no stance to be had
        table["label"] = np.where(pd.to_numeric(table["label"], errors="coerce") > 0, "RELEVANT", "NEI")
    elif "label" in columns:
        table["label"] = table["label"].str.upper()
        reject(path, table, ~table["label"].isin(LABELS), f"label {{label!r}} is none of {', '.join(LABELS)}; map it")
    if "rank" not in columns:
        return table
    rank, score = (pd.to_numeric(table[c], errors="coerce").astype(float) for c in ("rank", "score"))
    reject(path, table, ~np.isfinite(score), "score {score!r} is not a finite number; repair the row")
    if trec:  # as trec_eval does: by score, whatever the rank column says
        rank = score.groupby(table["claim_id"]).rank(method="first", ascending=False)
    reject(path, table, ~(rank >= 1) | (rank % 1 != 0), "rank {rank!r} is not an integer from 1; number the rows anew")
    run = table.assign(rank=rank.astype(int), score=score, order=table["claim_id"].factorize()[0])
    run = run.sort_values(["order", "rank"])
    gap = run["rank"] != run.groupby("order").cumcount() + 1
    reject(path, table, gap.sort_index(), "the ranks of claim {claim_id} have a gap or a tie here; number the rows anew")
    return run.drop(columns="order").reset_index(drop=True)

def read_corpus(path):
    """{abstract_id: record} in file order; an abstract that is no text becomes "", counted in one warning."""
    corpus, empty = {}, 0
    for number, line in enumerate(open(path, "rb"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            name = str(record["abstract_id"]) if type(record["abstract_id"]) in (str, int) else ""
        except (ValueError, KeyError, TypeError, RecursionError):
            fail(f"{path}:{number}", "no JSON object with an abstract_id; write one object a line")
        if not name or name in corpus:
            fail(f"{path}:{number}", f"abstract_id {name!r} is empty or stands twice; give every record its own string")
        text = record.get("abstract")
        empty += not (isinstance(text, str) and text.strip())
        corpus[name] = record | {"abstract": text if isinstance(text, str) else ""}
    if empty:
        print(f"warning: {path}: {empty} abstracts are null, empty or no text; kept as empty", file=sys.stderr)
    return corpus

def fingerprints(*paths):
    """{path: sha256} of this script, of files, and of folders (of their meta.json, else of all files inside)."""
    prints = {}
    for path in map(Path, (sys.argv[0], *paths)):
        files = [path / "meta.json"] if (path / "meta.json").is_file() else sorted(path.rglob("*")) or [path]
        digests = [hashlib.file_digest(f.open("rb"), "sha256").hexdigest() for f in files if f.is_file()]
        if not digests:
            fail(path, "no such file or folder; make it with the script before this one, or name another")
        prints[path.as_posix()] = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    return prints

def up_to_date(paths, args, inputs):
    """True, and said, if all paths stand with a provenance that names these arguments and inputs."""
    for path in paths:
        made = {}
        with contextlib.suppress(OSError, ValueError):
            made = json.loads(Path(f"{path}.meta.json").read_text(encoding="utf-8"))
        same = made.get("arguments") == vars(args) | {"force": False} and made.get("inputs") == inputs
        if args.force or not same or not Path(path).exists():
            return False
    return not print(*(f"up to date: {path}" for path in paths), sep="\n")

def remove(*paths):
    """Delete files and folders, those that are there."""
    for path in map(Path, paths):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

@contextlib.contextmanager
def written(path, args, inputs, **facts):
    """Yield a temporary path; the file or folder made there becomes path, whole, with its provenance beside it."""
    path, temporary, meta = Path(path), Path(f"{path}.tmp-{os.getpid()}"), Path(f"{path}.meta.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f"{path.name}.tmp-[0-9]*"):  # what a killed process left behind
        try:
            os.kill(int(left.name.split(".tmp-")[-1].split(".")[0]), 0)
        except ProcessLookupError:
            remove(left)
        except (OSError, ValueError):  # someone else's, alive; or no process number
            pass
    try:
        yield temporary
        packages = {name: sys.modules[name].__version__ for name in PACKAGES if name in sys.modules}
        arguments = vars(args) | {"force": False}
        made = dict(command=sys.argv, arguments=arguments, inputs=inputs, packages=packages, **facts, **spent())
        provenance = Path(f"{temporary}.meta.json")
        provenance.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        for file in filter(Path.is_file, (provenance, temporary, *temporary.rglob("*"))):
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
        meta.unlink(missing_ok=True)  # from here on an old provenance would vouch for the new bytes
        if path.is_dir():
            remove(path)
        os.replace(temporary, path)
        os.replace(provenance, meta)
    finally:
        remove(temporary, f"{temporary}.meta.json")

def model_folder(name):
    """The folder of a model: name itself, or the hub's snapshot of it (from the cache under HF_HUB_OFFLINE=1)."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(name, ignore_patterns=["*.onnx*", "openvino/*", "*.h5", "*.msgpack", "*.pkl"]))
    except Exception as error:  # a dozen kinds: no network, no such model, no access, not in the cache
        fail(name, f"no such folder, and no such model on the hub ({type(error).__name__}); see data/download.py --help")

@contextlib.contextmanager
def ticking(what):
    """While something without a progress bar goes on (imports, loading), say so every three seconds."""
    done = threading.Event()
    def tick(seconds=0):
        print(f"{what} ... {seconds} s", file=sys.stderr, flush=True)
        done.wait(3) or tick(seconds + 3)
    threading.Thread(target=tick, daemon=True).start()
    try:
        yield
    finally:
        done.set()

def spent():
    """Seconds and peak memory (MiB) of this process so far."""
    unit = 1024 if sys.platform == "linux" else 1024**2
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // unit
    return {"seconds": round(time.monotonic() - START, 1), "peak_mib": peak}

class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The docstring as it stands, and the defaults."""
    def _get_help_string(self, action):
        return super()._get_help_string(action) if action.default else action.help

def run_job(doc, jobs):
    """Run the job named by the first word (else the first of jobs); the last line of stdout is its JSON."""
    words = sys.argv[1:]
    job, flags = jobs[words.pop(0) if words and words[0] in jobs else next(iter(jobs))]
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=doc, formatter_class=Help, allow_abbrev=False)
    parser.error = lambda message: fail(Path(sys.argv[0]).name, f"{message}; see --help")
    flags(parser.add_argument)
    parser.add_argument("--data", default="data/demo", help="folder of corpus, claims and qrels")
    parser.add_argument("--work", default="work/demo", help="folder of all that is made from them")
    parser.add_argument("--split", default="train" if job.__name__ == "train" else "test", help="which claims")
    parser.add_argument("--seed", type=int, default=13, help="of every random choice")
    parser.add_argument("--device", default="auto", help="cuda, cuda:1, mps, cpu; auto takes the best there is")
    parser.add_argument("--force", action="store_true", help="make outputs again that are up to date")
    args = parser.parse_args(words)
    for word in ("data", "work", "split"):
        for name, value in vars(args).items():
            texts = [text.replace(f"{{{word}}}", getattr(args, word)) if isinstance(text, str) else text
                     for text in (value if isinstance(value, list) else [value])]
            setattr(args, name, texts if isinstance(value, list) else texts[0])
    try:
        print(json.dumps(job(args) | spent(), ensure_ascii=False))
    except KeyboardInterrupt:
        sys.exit(130)
# --- end of helpers

# ----------------------------------------------------------- Texts
def text_of(record):
    """What the cross-encoder reads of an abstract: the title, where there is one, and the abstract."""
    return f"{record.get('title') or ''} {record['abstract']}".strip()

def read_inputs(args, path):
    """The run at path, {claim_id: claim} and the corpus, all checked against each other."""
    claims = read_table(args.claims, ["claim_id", "claim"])
    corpus = read_corpus(args.corpus)
    run = read_table(path, ["claim_id", "abstract_id", "rank", "score"], claim_id=claims["claim_id"], abstract_id=corpus)
    return run, dict(zip(claims["claim_id"], claims["claim"])), corpus

def load_cross_encoder(model, args, labels=None):
    """A sequence-classification model with one logit; a plain encoder gets a new head, drawn with the seed."""
    with ticking(f"loading {model}"):
        import transformers
        from sentence_transformers import CrossEncoder

        transformers.logging.set_verbosity_error()  # a new head is what train asks for: no warning needed
        transformers.set_seed(args.seed)
        device = None if args.device == "auto" else args.device
        encoder = CrossEncoder(str(model), num_labels=labels, max_length=args.max_length, device=device)
    if encoder.num_labels != 1:
        fail(model, f"it has {encoder.num_labels} labels, a reranker has one; stance classifiers belong to 05_classify.py")
    return encoder

# ----------------------------------------------------------- Rerank
def score_pairs(encoder, pairs, batch_size):
    """Logits (pairs,) in the order given; pairs of like length share a batch."""
    import torch
    from tqdm.auto import tqdm

    order = sorted(range(len(pairs)), key=lambda row: (-sum(map(len, pairs[row])), row))
    scores = np.empty(len(pairs))
    with tqdm(total=len(pairs), desc="rerank", unit=" pairs") as bar:
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            batch = [pairs[row] for row in rows]
            scores[rows] = encoder.predict(batch, batch_size=len(batch), activation_fn=torch.nn.Identity())
            bar.update(len(rows))
    return scores

def by_score(run, order):
    """The run by new scores, best first, ranks from 1; equal scores in corpus order ({abstract_id: place})."""
    claims = {claim: place for place, claim in enumerate(dict.fromkeys(run["claim_id"]))}
    run = run.assign(claim=run["claim_id"].map(claims), place=run["abstract_id"].map(order), worse=-run["score"])
    run = run.sort_values(["claim", "worse", "place"], kind="stable")
    return run.assign(rank=run.groupby("claim").cumcount() + 1)[["claim_id", "abstract_id", "rank", "score"]]

def rerank(args):
    """Score the first candidates of each claim; what lies deeper in the run is left out."""
    if args.depth < 1:
        fail("--depth", "must be at least 1")
    model = model_folder(args.model)
    inputs = fingerprints(args.run, args.claims, args.corpus, model)
    if up_to_date([args.out], args, inputs):
        return {"made": []}
    run, claims, corpus = read_inputs(args, args.run)
    run = run[run["rank"] <= args.depth]
    encoder = load_cross_encoder(model, args)
    pairs = [(claims[claim], text_of(corpus[name])) for claim, name in zip(run["claim_id"], run["abstract_id"])]
    scores = score_pairs(encoder, pairs, args.batch_size)
    order = {name: place for place, name in enumerate(corpus)}
    run = by_score(run.assign(score=scores), order)
    with written(args.out, args, inputs, rows=len(run), seed=args.seed, device=str(encoder.device)) as temporary:
        run.to_csv(temporary, sep="\t", index=False, float_format="%.9g", lineterminator="\n")
    print(f"{args.out}: {len(run)} rows, {run['claim_id'].nunique()} claims")
    return {"made": [args.out], "rows": len(run)}

# ----------------------------------------------------------- Train
def mine_examples(run, qrels, hard, easy, rng):
    """Pairs to learn from: [{claim_id, abstract_id, kind, target}], claim by claim.

    Positives are the abstracts judged SUPPORTS or REFUTES. Hard negatives are those judged NEI, the best
    ranked of the run first; easy negatives are drawn from the run's unjudged candidates. A claim without a
    positive teaches no order and is left out. Never is an abstract judged relevant a negative.
    """
    judged = {claim: dict(zip(rows["abstract_id"], rows["label"])) for claim, rows in qrels.groupby("claim_id", sort=False)}
    ranked = {claim: list(rows["abstract_id"]) for claim, rows in run.groupby("claim_id", sort=False)}
    examples = []
    for claim, labels in judged.items():
        positives = [name for name, label in labels.items() if label != "NEI"]
        candidates = ranked.get(claim, [])
        nei = sorted((name for name in labels if labels[name] == "NEI"),
                     key=lambda name: candidates.index(name) if name in candidates else len(candidates))
        unjudged = [name for name in candidates if name not in labels]
        drawn = rng.choice(len(unjudged), min(easy, len(unjudged)), replace=False)
        kinds = {"positive": positives, "hard": nei[:hard], "easy": [unjudged[place] for place in sorted(drawn)]}
        if positives:
            examples += [{"claim_id": claim, "abstract_id": name, "kind": kind, "target": float(kind == "positive")}
                         for kind, names in kinds.items() for name in names]
    return examples

def fit(encoder, examples, args):
    """Binary cross-entropy on the logit, one phase, AdamW with linear decay; fp16 on a GPU."""
    from datasets import Dataset
    from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

    with tempfile.TemporaryDirectory() as folder:
        how = CrossEncoderTrainingArguments(
            output_dir=folder, save_strategy="no", report_to="none", logging_strategy="epoch", disable_tqdm=False,
            num_train_epochs=args.epochs, per_device_train_batch_size=args.batch_size,
            learning_rate=args.lr, weight_decay=WEIGHT_DECAY, seed=args.seed, data_seed=args.seed,
            fp16=encoder.device.type == "cuda", use_cpu=encoder.device.type == "cpu", dataloader_pin_memory=False)
        CrossEncoderTrainer(encoder, how, Dataset.from_list(examples), loss=BinaryCrossEntropyLoss(encoder)).train()

def train(args):
    """Fine-tune a cross-encoder on the judged pairs of one split and the candidates around them."""
    model = model_folder(args.model)
    inputs = fingerprints(args.run, args.claims, args.corpus, args.qrels, model)
    examples_path = f"{args.out}.examples.jsonl"
    if up_to_date([args.out, examples_path], args, inputs):
        return {"made": []}
    run, claims, corpus = read_inputs(args, args.run)
    qrels = read_table(args.qrels, ["claim_id", "abstract_id", "label"], claim_id=claims, abstract_id=corpus)
    examples = mine_examples(run, qrels, args.hard, args.easy, np.random.default_rng(args.seed))
    kinds = {kind: sum(example["kind"] == kind for example in examples) for kind in ("positive", "hard", "easy")}
    if not kinds["positive"]:
        fail(args.qrels, "no pair is judged SUPPORTS or REFUTES: there is nothing to train on; take another split")
    skipped = qrels["claim_id"].nunique() - len({example["claim_id"] for example in examples})
    print(f"{len(examples)} pairs: {kinds}, {skipped} claims without a positive left out")
    encoder = load_cross_encoder(model, args, labels=1)
    pairs = [{"claim": claims[example["claim_id"]], "abstract": text_of(corpus[example["abstract_id"]]),
              "label": example["target"]} for example in examples]
    fit(encoder, pairs, args)
    facts = kinds | {"claims_skipped": skipped, "seed": args.seed, "device": str(encoder.device)}
    with written(examples_path, args, inputs, **facts) as temporary:
        lines = [json.dumps(example, ensure_ascii=False) + "\n" for example in examples]
        temporary.write_text("".join(lines), encoding="utf-8")
    with written(args.out, args, inputs, **facts) as temporary:
        encoder.save_pretrained(str(temporary), create_model_card=False)
    return {"made": [args.out, examples_path], "pairs": len(examples)}

# ----------------------------------------------------------- Main
def rerank_flags(add):
    add("--run", "--in", default="{work}/{split}/hybrid.tsv", help="the run whose candidates are scored")
    add("--claims", default="{data}/claims.{split}.tsv", help="the claims")
    add("--corpus", default="{data}/corpus.jsonl", help="the abstracts")
    add("--model", default="{work}/models/reranker", help="cross-encoder with one logit, folder or hub id")
    add("--out", default="{work}/{split}/rerank.tsv", help="the reranked run")
    add("--depth", type=int, default=20, help="candidates scored a claim")
    add("--max-length", type=int, default=512, help="tokens kept of claim and abstract together")
    add("--batch-size", type=int, default=32, help="pairs scored at once")

def train_flags(add):
    add("--run", "--in", default="{work}/{split}/hybrid.tsv", help="the run that negatives are taken from")
    add("--claims", default="{data}/claims.{split}.tsv", help="the claims")
    add("--corpus", default="{data}/corpus.jsonl", help="the abstracts")
    add("--qrels", default="{data}/qrels.{split}.tsv", help="the judged pairs")
    add("--model", default="data/models/minilm", help="where to start: any encoder, folder or hub id")
    add("--out", default="{work}/models/reranker", help="folder of the trained model")
    add("--hard", type=int, default=4, help="hard negatives a claim: NEI, best ranked first")
    add("--easy", type=int, default=4, help="easy negatives a claim: random unjudged candidates")
    add("--epochs", type=int, default=EPOCHS, help="passes over the pairs")
    add("--lr", type=float, default=LEARNING_RATE, help="learning rate, decays linearly to 0")
    add("--batch-size", type=int, default=BATCH_SIZE, help="pairs a step")
    add("--max-length", type=int, default=512, help="tokens kept of claim and abstract together")

def main():
    run_job(__doc__, {"rerank": (rerank, rerank_flags), "train": (train, train_flags)})

if __name__ == "__main__":
    main()
