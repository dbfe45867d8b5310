# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "accelerate==1.15.0", "datasets==5.2.0", "numpy==2.4.6", "pandas==3.1.1", "protobuf==7.36.2",
#   "sentence-transformers==6.2.0", "sentencepiece==0.2.3", "torch==2.13.0", "tqdm==4.70.1",
#   "transformers==5.23.0",
# ]
# ///
"""
Rerank the candidates of a run with a cross-encoder, or train one.

Reads   a run, claims, corpus; train: examples.jsonl of 02_retrieve.py mine, and a dev split
Writes  rerank.tsv; train: models/reranker/
        OUT.parts/: finished groups and checkpoints, from which a run resumes
Prints  how many candidates were left out; the last line is JSON

Examples
    python 03_rerank.py --depth 50 --first-stage 0.5
    python 03_rerank.py --model Qwen/Qwen3-Reranker-0.6B --depth 100 --device cuda:0 cuda:1
    python 03_rerank.py --graph work/demo/index/graph --top-k 10
    python 03_rerank.py train --loss bce --epochs 3 --lr 2e-5
"""

import argparse
import contextlib
import csv
import functools
import hashlib
import json
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np

CLAIM, PAIR = ["claim_id", "claim"], ["claim_id", "abstract_id"]
RUN = [*PAIR, "rank", "score"]
LABELS = ("SUPPORTS", "REFUTES", "NEI")
MONO_T5 = "Query: {} Document: {} Relevant:"  # Nogueira et al. 2020; it answers true or false
GROUP = 1024  # pairs that are scored and stored at once; on several devices 20 times as many


# ---------- Inputs
def read_texts(claims, corpus):
    """Return {claim_id: claim} and {abstract_id: title and abstract} of two files."""
    texts = {
        name: " ".join(filter(None, [one.get("title"), one["abstract"]]))
        for name, one in read_corpus(corpus).items()
    }
    return dict(read_table(claims, CLAIM)[CLAIM].values), texts


def default_run(folder):
    """Return the path of hybrid.tsv, else of the one run of 02_retrieve.py in a folder."""
    paths = [f"{folder}/{name}.tsv" for name in ("hybrid", "bm25", "dense", "splade")]
    return next(filter(os.path.exists, paths), paths[0])


def read_columns(path, columns, pairs):
    """Return the sum of columns of a table for each row of pairs."""
    import pandas as pd

    table = pairs[PAIR].merge(read_table(path, [*PAIR, *columns]), on=PAIR, how="left")
    total = table[columns].apply(pd.to_numeric, errors="coerce").sum(axis=1, skipna=False)
    for claim, name in table.loc[total.isna(), PAIR].values[:1]:
        fail(path, f"no {columns[0]} of claim {claim}, abstract {name}")
    return total


def read_graph(folder, inputs, args):
    """Return {abstract_id: its nearest abstracts}; inputs: {path: sha256}."""
    meta, ids = (
        json.loads(Path(folder, f"{name}.json").read_bytes()) for name in ("meta", "abstract_ids")
    )
    if meta["corpus"] != inputs[args.corpus]:
        fail(folder, "the corpus has changed since then; see 01_index.py")
    neighbours = np.load(Path(folder, "neighbours.npy"))[:, : args.neighbours]
    return dict(zip(ids, np.array(ids, object)[neighbours].tolist()))


# ---------- Models
def mono_t5(name, device, model_kwargs, **options):
    """Load monoT5; a score is the logit of true minus that of false."""
    import torch
    from sentence_transformers import CrossEncoder
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    class MonoT5(torch.nn.Module):
        def preprocess(self, pairs, prompt=None, **_):
            texts = [(prompt or "") + MONO_T5.format(*pair) for pair in pairs]
            return self.tokenizer(texts, padding=True, return_tensors="pt")

        def forward(self, batch):
            start = batch["input_ids"][:, :1] * 0 + self.t5.config.decoder_start_token_id
            logits = self.t5(**batch, decoder_input_ids=start).logits[:, 0]
            true, false = self.tokenizer("true false", add_special_tokens=False)["input_ids"]
            return {"scores": logits[:, true] - logits[:, false]}

    module = MonoT5()
    module.t5 = AutoModelForSeq2SeqLM.from_pretrained(name, **options, **model_kwargs)
    module.tokenizer = AutoTokenizer.from_pretrained(name, **options)
    return CrossEncoder(modules=[module], device=device)


def load_reranker(name, **options):
    """Load a cross-encoder, a causal reranker or monoT5, as its config says."""
    import torch
    from sentence_transformers import CrossEncoder
    from transformers import AutoConfig

    kind = str(AutoConfig.from_pretrained(name, trust_remote_code=False).architectures)
    load = mono_t5 if "ConditionalGeneration" in kind else CrossEncoder
    if load is CrossEncoder and "Classification" not in kind and "CausalLM" not in kind:
        fail(name, "no head that scores; see 03_rerank.py train")
    model = load(name, **options)
    if not model.keep_in_fp32_modules:  # in half precision, abstracts get equal scores
        layers = [path for path, part in model.named_modules() if type(part) is torch.nn.Linear]
        model.set_keep_in_fp32_modules(layers[-1:])
    return model


def open_reranker(load, args, dtype):
    """Return load's model, which scores by logits, with the flags' length and prompt."""
    import torch

    model = open_model(load, args.model, args, dtype)
    if model.num_labels != 1:
        fail(args.model, f"{model.num_labels} labels; see 05_classify.py")
    model.activation_fn = torch.nn.Identity()  # a sigmoid would make large logits 1
    model.max_seq_length = min(model.max_seq_length or args.max_length, args.max_length)
    if args.prompt is not None:
        model.prompts["own"], model.default_prompt_name = args.prompt, "own"
    return model


# ---------- Truncation
def first_tokens(tokenizer, texts, limits):
    """Return texts cut to limits of tokens, and how many they have."""
    coded = tokenizer(texts, add_special_tokens=False, truncation=False, verbose=False)
    counts = [len(row) for row in coded["input_ids"]]
    ends = [
        coded.token_to_chars(row, limit - 1).end if counts[row] > limit else None
        for row, limit in enumerate(limits)
    ]
    return [text[:end] for text, end in zip(texts, ends)], np.minimum(counts, limits)


def truncate(model, pairs):
    """Return pairs that a model reads whole, and which ones are truncated.

    A claim loses only what fills more than half of the tokens.
    """
    prompt, short = model.prompts.get(model.default_prompt_name), []
    room = model.max_seq_length - model.preprocess([("", "")], prompt=prompt)["input_ids"].numel()
    room -= 4 * ("message" in model.modalities)  # in a template, ends of texts may split anew
    for start in range(0, len(pairs), GROUP):  # the tokens of all may take gigabytes
        claims, texts = map(list, zip(*pairs[start : start + GROUP]))
        claims, counts = first_tokens(model.tokenizer, claims, [room // 2] * len(claims))
        texts, _ = first_tokens(model.tokenizer, texts, room - counts)
        short += zip(claims, texts)
    return short, [new != old for new, old in zip(short, pairs)]


# ---------- Scores
def score_resumably(model, claims, texts, args, path, pairs):
    """Return rows (claim_id, abstract_id, score, truncated); path holds finished groups."""
    from tqdm.auto import tqdm

    devices = args.device if len(args.device or ()) > 1 else None  # a list starts processes
    finished, size = {}, GROUP * (20 if devices else 1)
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):  # a kill has torn it
            finished |= {(row[0], row[1]): row for row in json.loads(line)}
    left = [pair for pair in pairs if pair not in finished]
    with open(path, "a") as file:
        for start in tqdm(range(0, len(left), size), f"rerank, {size} pairs each"):
            group = left[start : start + size]
            inputs = [(claims[claim], texts[name]) for claim, name in group]
            inputs, truncated = truncate(model, inputs)
            scores = model.predict(inputs, batch_size=args.batch_size, device=devices)
            if not np.isfinite(scores).all():
                fail(args.model, "a score is no finite number; use --dtype fp32")
            rows = [(*pair, *rest) for pair, *rest in zip(group, scores.tolist(), truncated)]
            file.write("\n" + json.dumps(rows))  # not behind a torn line
            file.flush()
            finished |= dict(zip(group, rows))
    return [finished[pair] for pair in pairs]


def score_with_graph(score, pairs, graph, args):
    """Score pairs, then in rounds neighbours of the best (AlexUNLP-FMT 2025)."""
    import pandas as pd

    rows, columns = score(pairs), [*PAIR, "score", "truncated"]
    for _ in range(args.rounds if graph else 0):
        near, seen = {}, {(claim, name) for claim, name, *_ in rows}
        for claim, group in pd.DataFrame(rows, columns=columns).groupby("claim_id", sort=False):
            for name in group.nlargest(args.beam, "score")["abstract_id"]:
                near |= dict.fromkeys((claim, other) for other in graph.get(name, ()))
        rows += score([pair for pair in near if pair not in seen])
    return pd.DataFrame(rows, columns=columns)


# ---------- Rerank
def combo_score(logits, stance, alpha):
    """ComboScorer (+VeriRel 2025, eq. 5): (1 - alpha) sigmoid(s) + alpha (P(SUP) + P(REF))."""
    from scipy.special import expit

    return (1 - alpha) * expit(logits) + alpha * stance


def blend_first_stage(table, weight):
    """(1 - weight) z(score) + weight z(first) by claim; what first lacks counts lowest."""
    claims, scores = table["claim_id"], table[["score", "first"]]
    above = (scores - scores.groupby(claims).transform("min")).fillna(0)
    by_claim = above.groupby(claims)
    # (score - mean) / standard deviation, 0 if all are equal
    z = (above - by_claim.transform("mean")) / by_claim.transform("std", ddof=0).replace(0, 1)
    return (1 - weight) * z["score"] + weight * z["first"]


def with_rest(table, before):
    """Append what has no score, in its old order, at the lowest score - 1, - 2, ..."""
    import pandas as pd

    rest = before[PAIR].merge(table, on=PAIR, how="left")
    rest = rest[rest["score"].isna()]
    lowest = rest["claim_id"].map(table.groupby("claim_id")["score"].min()).astype(float)
    place = 1 + rest.groupby("claim_id").cumcount()
    return pd.concat([table, rest.assign(score=lowest - place)])


def rerank(args):
    """Score the first candidates of each claim by a model, and sort them by it."""
    source = args.run or default_run(f"{args.work}/{args.split}")
    is_run = args.model.endswith(".tsv")
    if args.graph and (is_run or args.verdicts):
        fail("--graph", "not with --verdicts, or a run as --model")
    files = [source, args.claims, args.corpus, *filter(None, [args.graph, args.verdicts])]
    task = task_of(args, *files, *[args.model] * is_run, models=[args.model])
    if up_to_date(args, task, args.out):
        return {"made": []}
    claims, texts = read_texts(args.claims, args.corpus)
    before = read_table(source, RUN, claim_id=claims, abstract_id=texts)
    first = before[before["rank"] <= args.depth].rename(columns={"score": "first"})
    first = first[[*PAIR, "first"]].reset_index(drop=True)
    if args.verdicts:
        stance = read_columns(args.verdicts, ["p_supports", "p_refutes"], first)
    if is_run:
        table = first.assign(score=read_columns(args.model, ["score"], first), truncated=False)
    else:
        graph = read_graph(args.graph, task["inputs"], args) if args.graph else {}
        model = open_reranker(load_reranker, args, args.dtype)
        path = parts_of(args.out, task) / "scores.jsonl"
        score = functools.partial(score_resumably, model, claims, texts, args, path)
        table = score_with_graph(score, list(map(tuple, first[PAIR].values)), graph, args)
        table = table.merge(first, on=PAIR, how="left")
    facts = {"pairs": len(table), "truncated": int(table["truncated"].sum())}
    if args.verdicts:
        table["score"] = combo_score(table["score"], stance, args.alpha)
    if args.first_stage:
        table["score"] = blend_first_stage(table, args.first_stage)
    if args.top_k:
        table = with_rest(table, before)
    run = table.iloc[np.lexsort((-table["score"], table["claim_id"].factorize()[0]))]
    run = run.assign(rank=run.groupby("claim_id").cumcount() + 1)
    run = run.loc[run["rank"] <= (args.top_k or len(run)), RUN]
    facts |= {"rows": len(run), "left_out": len(before) - len(before.merge(run, on=PAIR))}
    with written(args.out, task, **facts) as new:
        run.to_csv(new, sep="\t", index=False, float_format="%.9g")
    shutil.rmtree(f"{args.out}.parts", ignore_errors=True)
    print(f"{args.out}: {len(run)} rows, {facts['left_out']} of {len(before)} candidates left out")
    return {"made": [args.out], **facts}


# ---------- Train
def read_examples(path, claims, texts, loss):
    """Return rows (claim, text, target), for margin (claim, positive, negative, -1)."""
    rows = []
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            try:
                example = json.loads(line)
                claim = claims[example["claim_id"]]
                negatives = [texts[name] for name in example.get("negatives", ())]
                if loss == "margin":
                    positive = texts[example["positive"]]
                    rows += [(claim, positive, negative, -1.0) for negative in negatives]
                elif "positive" in example:  # a tuple for bce: pairs with the targets 1 and 0
                    rows.append((claim, texts[example["positive"]], 1.0))
                    rows += [(claim, negative, 0.0) for negative in negatives]
                else:
                    rows.append((claim, texts[example["abstract_id"]], float(example["target"])))
            except (ValueError, LookupError, TypeError) as error:
                fail(f"{path}:{number}", f"{error!r}; see 02_retrieve.py mine")
    return list(dict.fromkeys(rows))  # positives of tuples are repeated


def training_table(model, rows):
    """Return {column: values} of rows, and how many texts are truncated."""
    claims, *columns, labels = zip(*rows)
    table, count = {}, 0
    for place, texts in enumerate(columns):
        short, truncated = truncate(model, list(zip(claims, texts)))
        table["claim"], table[f"text_{place}"] = map(list, zip(*short))
        count += sum(truncated)
    return table | {"label": list(labels)}, count


def loss_of(model, args):
    """Return the loss on logits that --loss names."""
    import torch
    from sentence_transformers.cross_encoder import losses

    if args.loss == "bce":
        return losses.BinaryCrossEntropyLoss(model)
    if args.loss == "l1":
        loss = losses.MSELoss(model, torch.nn.Sigmoid())
        loss.loss_fct = torch.nn.L1Loss()  # |sigmoid(s) - target|
        return loss
    loss = losses.MarginMSELoss(model)  # of the label -1: max(0, margin - (s(pos) - s(neg)))
    loss.loss_fct = torch.nn.HingeEmbeddingLoss(args.margin)
    return loss


def dev_evaluator(model, paths, texts, depth):
    """Return an evaluator: nDCG@10 of claims with evidence; paths: claims, qrels, run."""
    from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator

    claims, samples = dict(read_table(paths[0], CLAIM)[CLAIM].values), []
    known = {"claim_id": claims, "abstract_id": texts}
    qrels = read_table(paths[1], [*PAIR, "label"], label=LABELS, **known)
    run = read_table(paths[2], RUN, **known)
    candidates = run[run["rank"] <= depth].groupby("claim_id")["abstract_id"].agg(list)
    evidence = qrels[qrels["label"] != "NEI"].groupby("claim_id")["abstract_id"].agg(set)
    for claim, relevant in evidence.items():
        names = candidates.get(claim, [None])  # a claim without candidates counts 0
        short, _ = truncate(model, [(claims[claim], texts.get(name, "")) for name in names])
        documents = [text for _, text in short]
        positive = [text for name, text in zip(names, documents) if name in relevant]
        samples.append({"query": short[0][0], "positive": positive, "documents": documents})
    return CrossEncoderRerankingEvaluator(
        samples, always_rerank_positives=False, name="dev", write_csv=False
    )


def train(args):
    """Fine-tune a cross-encoder on mined examples."""
    dev = [f"{args.data}/{name}.{args.dev_split}.tsv" for name in ("claims", "qrels")]
    dev.append(args.dev_run or f"{args.work}/{args.dev_split}/hybrid.tsv")
    if not all(map(os.path.exists, dev)):
        print(f"the last epoch is kept; to choose one: {', '.join(dev)}")
        dev = []
    task = task_of(args, args.examples, args.claims, args.corpus, *dev, models=[args.model])
    if up_to_date(args, task, args.out):
        return {"made": []}
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # a Trainer multiplies its batch by GPUs
    import transformers
    from datasets import Dataset
    from sentence_transformers import cross_encoder

    claims, texts = read_texts(args.claims, args.corpus)
    rows = read_examples(args.examples, claims, texts, args.loss)
    transformers.set_seed(args.seed)  # of a new head
    model = open_reranker(cross_encoder.CrossEncoder, args, "fp32")
    table, truncated = training_table(model, rows)
    facts = {"rows": len(rows), "truncated": truncated} | fit(
        cross_encoder.CrossEncoderTrainer,
        cross_encoder.CrossEncoderTrainingArguments,
        model,
        Dataset.from_dict(table),
        loss_of(model, args),
        dev_evaluator(model, dev, texts, args.dev_depth) if dev else None,
        "dev_ndcg@10",
        parts_of(args.out, task),
        args,
        prompts=model.prompts.get(model.default_prompt_name),
        weight_decay=0.01,  # Kiepura & Lam 2025
        lr_scheduler_type="cosine" if args.loss == "l1" else "linear",
    )  # +VeriRel 2025
    with written(args.out, task, **facts) as folder:
        save_model(model, folder)
    shutil.rmtree(f"{args.out}.parts")
    return {"made": [args.out], **facts}


# ---------- Command line
def add_shared(add, **model):
    add("--claims", default="{data}/claims.{split}.tsv", help="claims")
    add("--corpus", default="{data}/corpus.jsonl", help="abstracts")
    add("--model", **model)
    add("--max-length", type=int, default=512, help="tokens of a pair, at most")
    add("--prompt", help="instruction (default: the model's own)")


def add_rerank(add):
    add("--run", help="run to rerank (default: hybrid.tsv, else another of 02)")
    add("--out", default="{work}/{split}/rerank.tsv", help="reranked run")
    add_shared(add, default="{work}/models/reranker", help="reranker; or a RUN.tsv: its scores")
    add("--depth", type=int, default=20, help="candidates per claim that are scored")
    add("--top-k", type=int, help="abstracts per claim, beyond --depth in their old order")
    add("--batch-size", type=int, default=32, help="pairs at a time")
    add(
        "--dtype",
        choices=("auto", "fp32", "bf16", "fp16"),
        default="auto",
        help="precision; auto: half on a GPU",
    )
    add("--device", nargs="+", help="cpu, mps, cuda:0 cuda:1 (default: a GPU, if any)")
    add("--first-stage", type=float, default=0, help="weight of --run's z-scores")
    add("--verdicts", help="of --run: P(SUP) + P(REF) joins the score's sigmoid")
    add("--alpha", type=float, default=0.5, help="weight of --verdicts")
    add("--graph", help="of 01_index.py: neighbours join candidates")
    add("--rounds", type=int, default=20, help="graph: rounds at most")
    add("--neighbours", type=int, default=10, help="graph: neighbours of an abstract")
    add("--beam", type=int, default=30, help="graph: the best of a claim in each round")


def add_train(add):
    add("examples", nargs="?", default="{work}/{split}/examples.jsonl", help="of 02 mine")
    add("--out", default="{work}/models/reranker", help="model")
    add_shared(add, default="data/models/minilm", help="an encoder or a reranker to start from")
    add("--loss", choices=("bce", "margin", "l1"), default="bce", help="margin: tuples alone")
    add("--margin", type=float, default=0.2, help="margin: lead of a positive, in logits")
    add("--epochs", type=float, default=3, help="passes over the examples")
    add("--lr", type=float, default=2e-5, help="learning rate")
    add("--batch-size", type=int, default=16, dest="batch", help="rows per batch")
    add("--dev-split", default="dev", help="it chooses the epoch; none: the last")
    add("--dev-run", help="candidates of dev (default: WORK/DEV_SPLIT/hybrid.tsv)")
    add("--dev-depth", type=int, default=20, help="how many are scored")
    add("--patience", type=int, default=2, help="epochs without a gain")
    add("--seed", type=int, default=13, help="of order and new head")
    add("--device", nargs=1, help="cpu, mps, cuda (default: a GPU, if any)")


def main():
    run(command_line({rerank: add_rerank, train: add_train}))


# --- helpers (same in all six scripts)
START, WARNINGS = time.monotonic(), []
NEUTRAL = {"force", "out", "device", "batch_size", "function"}  # change no output
SPLITS = {"train": "train", "mine": "train", "fit": "dev"}  # of jobs; else test
PACKAGES = ("numpy", "pandas", "torch", "transformers", "sentence_transformers", "bm25s", "openai")


def warn(where, what):
    """Print a line on stderr; sidecars keep it."""
    WARNINGS.append(f"warning: {where}: {what}")
    print(WARNINGS[-1], file=sys.stderr)


def fail(where, what):
    """End with one line on stderr and exit status 2."""
    print(" ".join(f"error: {where}: {what}".split()), file=sys.stderr)
    sys.exit(2)


def read_table(path, columns, **known):
    """Read a TSV file as strings, a run with numbers; known: {column: its values}."""
    import pandas as pd

    try:
        table = pd.read_csv(
            path, sep="\t", dtype=str, na_filter=False, quoting=csv.QUOTE_NONE, encoding="utf-8-sig"
        )
    except ValueError as error:  # empty, not UTF-8, a long row
        fail(path, f"{error}; see data/convert.py")
    if not set(columns) <= set(table) or not isinstance(table.index, pd.RangeIndex):
        fail(f"{path}:1", f"wanted {', '.join(columns)} in rows of one length; see data/convert.py")
    if "claim" in columns:  # as pandas quotes
        table["claim"] = table["claim"].str.replace(
            '^"((?:[^"]|"")*)"$', lambda quoted: quoted[1].replace('""', '"'), regex=True
        )
    ids = [column for column in columns if column.endswith("_id")]
    bad = {f"{column} is empty": table[column] == "" for column in columns}
    bad |= {f"unknown {column}": ~table[column].isin(list(known[column])) for column in known}
    bad["an earlier row has this " + " and ".join(ids)] = table.duplicated(ids)
    if "rank" in columns:
        for column in ("rank", "score"):
            table[column] = pd.to_numeric(table[column], errors="coerce")
        table = table.iloc[np.lexsort((table["rank"], table["claim_id"].factorize()[0]))]
        bad["score is not a finite number"] = ~np.isfinite(table["score"])
        bad["rank is not 1, 2, 3"] = table["rank"] != table.groupby("claim_id").cumcount() + 1
    for what, rows in bad.items():
        if rows.any():
            row = rows.idxmax()
            fail(f"{path}:{row + 2}", f"{what}: {' '.join(table.loc[row, ids])}; fix this row")
    return table.reset_index(drop=True)


def read_corpus(path):
    """Read {abstract_id: record}; an abstract that is missing or null is ""."""
    corpus = {}
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
                name = str(record["abstract_id"])
            except (ValueError, LookupError, TypeError):
                fail(f"{path}:{number}", "no JSON object with an abstract_id; see data/convert.py")
            if name in corpus:
                fail(f"{path}:{number}", f"a second abstract {name}; remove one")
            corpus[name] = record | {"abstract": record.get("abstract") or ""}
    return corpus


def digest(path):
    """Return the sha256 of a file, of a folder's sidecar, or of all its files."""
    path, total = Path(path), hashlib.sha256()
    if path.is_dir() and Path(f"{path}.meta.json").exists():
        path = Path(f"{path}.meta.json")
    for one in filter(Path.is_file, [path, *sorted(path.rglob("*"))]):
        with one.open("rb") as file:
            hashlib.file_digest(file, lambda: total)
    return total.hexdigest()


def task_of(args, *inputs, models=()):
    """Return what decides an output: arguments and digests."""
    for path in inputs:
        if not Path(path).exists():
            fail(path, "not found; make it or fix its name")
    paths = [str(path) for path in (*inputs, *models) if Path(path).exists()]
    arguments = {name: value for name, value in vars(args).items() if name not in NEUTRAL}
    return {"arguments": arguments, "inputs": {path: digest(path) for path in paths}}


def up_to_date(args, task, *outs):
    """Return whether this very task has made all outs."""
    made, script = [], Path(sys.argv[0])
    for out in outs:
        meta = Path(f"{out}.meta.json")
        if Path(out).is_dir() and not meta.exists():
            fail(out, "not made by this script; give another --out")
        made.append(json.loads(meta.read_bytes()) if Path(out).exists() and meta.exists() else {})
    if args.force or not all(task.items() <= one.items() for one in made):
        return False
    for out, one in zip(outs, made):
        edited = f" (made by another version of {script.name}; --force makes it again)"
        print(f"up to date: {out}" + edited * (one["script"] != digest(script)))
    return True


@contextlib.contextmanager
def written(path, task, **facts):
    """Yield a temporary path. What is made there becomes path, whole, with a sidecar."""
    path, new, meta = Path(path), Path(f"{path}.tmp"), Path(f"{path}.meta.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(new, ignore_errors=True)
    yield new
    meta.write_text("{}")  # while the output is replaced
    shutil.rmtree(path, ignore_errors=True)
    new.replace(path)
    loaded = {name: sys.modules[name].__version__ for name in PACKAGES if name in sys.modules}
    made = {
        "command": sys.argv,
        "script": digest(sys.argv[0]),
        "packages": loaded,
        "warnings": WARNINGS,
        "seconds": round(time.monotonic() - START, 1),
    }
    new.write_text(json.dumps(task | facts | made, indent=1) + "\n")
    new.replace(meta)


def command_line(jobs):
    """Return the arguments; jobs: {function: what adds its flags}, the default first."""
    script, names = Path(sys.argv[0]).name, [function.__name__ for function in jobs]
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(script, description=__doc__, formatter_class=layout)
    choices = parser.add_subparsers(title="jobs", metavar=f"JOB (default: {names[0]})")
    for function, add_flags in jobs.items():
        name, sentence = function.__name__, function.__doc__.splitlines()[0]
        job = choices.add_parser(name, help=sentence, description=sentence)
        parser.error = job.error = lambda message: fail(script, f"{message}; see --help")
        job.set_defaults(function=function, job=name)
        job.add_argument("--data", default="data/demo", help="corpus, claims and qrels")
        job.add_argument("--work", help="what is made of it (default: work/NAME)")
        job.add_argument("--split", default=SPLITS.get(name, "test"), help="which claims")
        job.add_argument("--force", action="store_true", help="make outputs again")
        add_flags(job.add_argument)
        for flag in job._actions:
            known = flag.default not in (None, False, argparse.SUPPRESS)
            flag.help += " (default: %(default)s)" * known
    given = sys.argv[1:2] and sys.argv[1] in (*names, "-h", "--help")
    args = parser.parse_args(sys.argv[1:] if given else [names[0], *sys.argv[1:]])
    args.work = args.work or f"work/{Path(args.data).resolve().name}"
    for name, value in vars(args).items():
        for field in ("data", "work", "split") if isinstance(value, str) else ():
            value = value.replace(f"{{{field}}}", vars(args)[field])
        setattr(args, name, value)
    return args


def run(args):
    """Run the job, and print its result as JSON."""
    try:
        print(json.dumps(args.function(args)))
    except Exception as error:
        if not isinstance(error, (OSError, UnicodeError)) and "memory" not in repr(error).lower():
            raise
        fail(getattr(error, "filename", None) or args.job, error)


# --- end of helpers


# --- models (same in 01, 02, 03 and 05)
def open_model(load, name, args, dtype="fp32", **options):
    """Return load(name), of safetensors, without code. auto: half precision on a GPU."""
    import torch

    device = args.device[0] if args.device else None
    gpu = torch.cuda.is_available() and device != "cpu"
    half = torch.bfloat16 if gpu and torch.cuda.is_bf16_supported(False) else torch.float16
    types = {
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "auto": half if gpu else torch.float32,
    }
    try:
        return load(
            str(name),
            device=device,
            trust_remote_code=False,
            **options,
            model_kwargs={"dtype": types[dtype], "use_safetensors": True},
        )
    except Exception as error:  # of many kinds
        fail(name, f"cannot be loaded: {error}; see data/README.md, models")


# --- end of models


# --- training (same in 01, 03 and 05)
def parts_of(out, task):
    """Return OUT.parts/ for unfinished work; that of another task is removed."""
    folder, mark = Path(f"{out}.parts"), Path(f"{out}.parts/task.json")
    if not mark.exists() or mark.read_text() != json.dumps(task):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        mark.write_text(json.dumps(task))
    return folder


def newest_checkpoint(folder):
    """Return the newest checkpoint, where trainer_state.json is written last, or None."""
    states = folder.glob("checkpoint-*/trainer_state.json")
    steps = [int(path.parent.name.removeprefix("checkpoint-")) for path in states]
    return str(folder / f"checkpoint-{max(steps)}") if steps else None


def fit(trainer, arguments, model, data, loss, evaluator, measure, folder, args, **settings):
    """Train on from the newest checkpoint; keep the best epoch. Return losses, curve."""
    import torch
    from transformers import EarlyStoppingCallback

    gpu, curve, callbacks = model.device.type == "cuda", [], []
    settings["bf16" if gpu and torch.cuda.is_bf16_supported(False) else "fp16"] = gpu
    with contextlib.redirect_stdout(sys.stderr):  # trainers print their logs
        if evaluator:
            curve, callbacks = [evaluator(model)[measure]], [EarlyStoppingCallback(args.patience)]
            settings |= {
                "eval_strategy": "epoch",
                "metric_for_best_model": measure,
                "load_best_model_at_end": True,
            }
        how = arguments(
            str(folder),
            num_train_epochs=args.epochs,
            learning_rate=args.lr,
            seed=args.seed,
            per_device_train_batch_size=args.batch,
            use_cpu=model.device.type == "cpu",
            save_strategy="epoch",
            save_total_limit=2,
            logging_strategy="epoch",
            logging_nan_inf_filter=False,
            report_to="none",
            restore_callback_states_from_checkpoint=True,
            **settings,
        )
        training = trainer(model, how, data, loss=loss, evaluator=evaluator, callbacks=callbacks)
        training.train(resume_from_checkpoint=newest_checkpoint(folder))
    log = training.state.log_history
    losses = [line["loss"] for line in log if "loss" in line]
    if not np.isfinite(losses).all():
        fail("--lr", "the loss is not a finite number; lower it")
    curve += [line[f"eval_{measure}"] for line in log if f"eval_{measure}" in line]
    return {"loss": losses, measure: [round(value, 4) for value in curve]}


def save_model(model, folder):
    """Save a model; its tokenizer without the truncation of training."""
    model.tokenizer.backend_tokenizer.no_truncation()
    model.tokenizer.backend_tokenizer.no_padding()
    model.max_seq_length = model.tokenizer.init_kwargs.get("model_max_length")
    model.save_pretrained(str(folder), create_model_card=False)


# --- end of training

if __name__ == "__main__":
    main()
