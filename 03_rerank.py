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

Reads   a run, claims, corpus, and if they are named a graph and verdicts; train: examples.jsonl of
        02_retrieve.py mine, and claims, qrels and a run of a dev split
Writes  rerank.tsv; train: models/reranker/
        OUT.parts/: finished groups and checkpoints, from which the same call resumes
Prints  how many rows of the run were left out; the last line is JSON

Examples
    python 03_rerank.py --depth 50 --first-stage 0.5
    python 03_rerank.py --model Qwen/Qwen3-Reranker-0.6B --depth 100 --device cuda:0 cuda:1
    python 03_rerank.py --graph work/demo/index/graph --top-k 10
    python 03_rerank.py train --loss bce --epochs 3 --lr 2e-4 --lora 16
"""

import argparse
import contextlib
import csv
import difflib
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import sys
import time
import zipfile
from pathlib import Path
from unittest import mock

import numpy as np

PAIR = ["claim_id", "abstract_id"]
RUN = [*PAIR, "rank", "score"]
LABELS = ("SUPPORTS", "REFUTES", "NEI")
MONO_T5 = "Query: {} Document: {} Relevant:"  # Nogueira et al. 2020; it answers true or false
# Decoder-only rerankers whose files do not say how they are asked, by a part of their names: a chat
# template of --prompt, claim and abstract, the prompt, and the words whose logits make a score
# (the first one's, minus the second one's). All are those of their model cards.
PART = '{{{{ messages | selectattr("role", "eq", "{}") | map(attribute="content") | first }}}}'
PROMPT, QUERY, DOCUMENT = [PART.format(role) for role in ("system", "query", "document")]
QWEN3 = f"""<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {PROMPT}
<Query>: {QUERY}
<Document>: {DOCUMENT}<|im_end|>
<|im_start|>assistant
<think>

</think>{{{{ "\n\n" }}}}"""
BGE_GEMMA = f"{{{{ bos_token }}}}A: {QUERY}\nB: {DOCUMENT}\n{PROMPT}"
CAUSAL = {
    "qwen3-reranker": (
        QWEN3,
        "Given a web search query, retrieve relevant passages that answer the query",
        ("yes", "no"),
    ),
    "bge-reranker-v2-gemma": (
        BGE_GEMMA,
        "Given a query A and a passage B, determine whether the passage contains an answer to the "
        "query by providing a prediction of either 'Yes' or 'No'.",
        ("Yes", None),
    ),
}
ADVICE = """train it (python 03_rerank.py train --data ...), name one (--model
    cross-encoder/ms-marco-MiniLM-L6-v2) or fetch the small ones (python data/download.py models)"""


# ---------- Inputs
def read_candidates(args, claims, abstracts):
    """Return candidates within --depth, and those beyond; column first: the scores of the run."""
    run = read_table(args.run, RUN, claim_id=claims, abstract_id=abstracts)
    is_within = run["rank"] <= args.depth
    run[PAIR] = run[PAIR].astype("category")  # a number for each id: runs have millions of rows
    run = run[[*PAIR, "score"]].rename(columns={"score": "first"})
    return run[is_within].reset_index(drop=True), run[~is_within]


def read_columns(path, columns, pairs):
    """Return the sum of columns of a table for each pair; without a value for one, fail."""
    import pandas as pd

    table = pairs[PAIR].merge(read_table(path, [*PAIR, *columns]), on=PAIR, how="left")
    total = table[columns].apply(pd.to_numeric, errors="coerce").sum(axis=1, skipna=False)
    if total.isna().any():
        claim_id, abstract_id = table.loc[total.isna().idxmax(), PAIR]
        fail(path, f"no {columns[0]} of claim {claim_id}, abstract {abstract_id}")
    return total


def read_graph(args, inputs):
    """Return {abstract_id: its nearest abstracts}; inputs: {path: sha256} of graph and corpus."""
    folder = Path(args.graph)
    if read_meta(folder, inputs[args.graph])["corpus"] != inputs[args.corpus]:
        fail(folder, "the corpus has changed since then; make the graph again by 01_index.py")
    abstract_ids = json.loads((folder / "abstract_ids.json").read_bytes())
    rows = np.load(folder / "neighbours.npy")[:, : args.neighbours]
    return dict(zip(abstract_ids, np.array(abstract_ids, object)[rows].tolist()))


# ---------- Models and truncation
def mono_t5(name, device, model_kwargs, **options):
    """Load monoT5; a score is the logit of true minus that of false."""
    import torch
    from sentence_transformers import CrossEncoder
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    class MonoT5(torch.nn.Module):
        preprocess = None  # a PairReader's

        def forward(self, batch):
            # (batch, 1), filled with the start token
            start = batch["input_ids"][:, :1] * 0 + self.t5.config.decoder_start_token_id
            inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
            logits = self.t5(**inputs, decoder_input_ids=start).logits[:, 0]
            true, false = self.tokenizer("true false", add_special_tokens=False)["input_ids"]
            return {"scores": logits[:, true] - logits[:, false]}

    module = MonoT5()
    module.t5 = AutoModelForSeq2SeqLM.from_pretrained(name, **options, **model_kwargs)
    module.tokenizer = AutoTokenizer.from_pretrained(name, **options)
    module.probe = [MONO_T5.format("a", "b")]
    return CrossEncoder(modules=[module], device=device)


def causal_reranker(name, **options):
    """Load a decoder-only reranker as its files say, else its name; None if neither says how."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.util import is_sentence_transformer_model

    if is_sentence_transformer_model(name, local_files_only=options["local_files_only"]):
        return CrossEncoder(name, **options)
    for part, (template, prompt, (true, false)) in CAUSAL.items():
        if part in name.lower():
            options["processor_kwargs"] = {"chat_template": template}
            options |= {"prompts": {"own": prompt}, "default_prompt_name": "own"}
            model = CrossEncoder(name, **options)
            number_of = model.tokenizer.get_vocab()
            model[1].true_token_id = number_of[true]
            model[1].false_token_id = number_of.get(false)
            return model
    return None


def kind_of(name, options):
    """Return the classes that a model's configuration names, as one text."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(
        name, trust_remote_code=False, local_files_only=options["local_files_only"]
    )
    return str(config.architectures)


def load_reranker(name, **options):
    """Load a cross-encoder, a decoder-only reranker or monoT5, as its config says."""
    import torch
    from sentence_transformers import CrossEncoder

    kind = kind_of(name, options)
    model = None
    if "ConditionalGeneration" in kind:
        model = mono_t5(name, **options)
    elif "Classification" in kind:
        model = CrossEncoder(name, **options)
    elif "CausalLM" in kind:
        model = causal_reranker(name, **options)
    if not model:
        what = "nothing in its files says how it scores a pair (a head, or modules.json)"
        fail(name, f"{what}; train it (python 03_rerank.py train --model {name})")
    if not model.keep_in_fp32_modules:  # in half precision, abstracts get equal scores
        layers = [path for path, part in model.named_modules() if type(part) is torch.nn.Linear]
        model.set_keep_in_fp32_modules(layers[-1:])
    return model


def load_to_train(name, **options):
    """Load a reranker, or a model that gets a new head."""
    from sentence_transformers import CrossEncoder
    from transformers import logging

    kind = kind_of(name, options)
    if "CausalLM" in kind:
        model = causal_reranker(name, **options)
        if model:
            return model
        # a language model, of which CrossEncoder would score yes against no
        options |= {"num_labels": 1, "config_kwargs": {"architectures": ["Classification"]}}
    if "Classification" not in kind:
        print(f"{name}: a new classification head is trained")
    logging.set_verbosity_error()  # it reports the weights of a new head as missing
    model = CrossEncoder(name, **options)
    logging.set_verbosity_warning()
    return model


def open_reranker(load, args, dtype, batch_size):
    """Return load's model, which scores by logits, with the length and prompt of the flags."""
    import torch

    model = open_model(load, args.model, args, dtype)
    if model.num_labels != 1:
        fail(args.model, f"{model.num_labels} labels; a classifier is for 05_classify.py")
    check_fields(model.config, args.model, args)
    model.activation_fn = torch.nn.Identity()  # a sigmoid would make large logits 1
    model.max_seq_length = min(model.max_seq_length or args.max_length, args.max_length)
    if args.prompt is not None:
        model.prompts["own"] = args.prompt
        model.default_prompt_name = "own"
    model[0].preprocess = PairReader(model, 0, batch_size)
    return model


# ---------- Rerank
def scored(model, texts, args, path, pairs):
    """Return pairs with score and is_truncated; path keeps both. texts: claims and abstracts."""
    claims, abstracts = texts

    def read_pairs(start, end):
        ids = pairs[PAIR].iloc[start:end].to_numpy()
        return [(claims[claim_id], abstracts[abstract_id]) for claim_id, abstract_id in ids]

    scores, is_truncated = score_resumably(model, read_pairs, len(pairs), path, args)
    return pairs.assign(score=scores[:, 0], is_truncated=is_truncated)


def with_neighbours(score, table, graph, parts, args):
    """Append, round by round, new neighbours of each claim's best, scored (AlexUNLP-FMT 2025)."""
    import pandas as pd

    for number in range(args.rounds):
        seen = set(zip(table["claim_id"], table["abstract_id"]))
        new = {}  # keeps the order in which neighbours were found
        for claim_id, group in table.groupby("claim_id", sort=False, observed=True):
            for abstract_id in group.nlargest(args.beam, "score")["abstract_id"]:
                for other in graph[abstract_id]:
                    if (claim_id, other) not in seen:
                        new[claim_id, other] = None
        if not new:
            break
        scored = score(parts / f"neighbours-{number}.npy", pd.DataFrame(list(new), columns=PAIR))
        table = pd.concat([table, scored], ignore_index=True)
    return table


def combo_score(logits, stance, alpha):
    """ComboScorer (+VeriRel 2025, eq. 5): (1 - alpha) sigmoid(s) + alpha (P(SUP) + P(REF))."""
    from scipy.special import expit

    return (1 - alpha) * expit(logits) + alpha * stance


def blend_first_stage(table, weight):
    """(1 - weight) z(score) + weight z(first) by claim; a missing first is the claim's lowest."""
    claims = table["claim_id"]
    scores = table[["score", "first"]]
    shifted = (scores - scores.groupby(claims, observed=True).transform("min")).fillna(0)
    by_claim = shifted.groupby(claims, observed=True)
    # (score - mean) / standard deviation, 0 if all are equal
    z = (shifted - by_claim.transform("mean")) / by_claim.transform("std", ddof=0).replace(0, 1)
    return (1 - weight) * z["score"] + weight * z["first"]


def score_pairs(pairs, texts, graph, parts, args):
    """Return pairs with score (of --model, --verdicts, --first-stage) and is_truncated."""
    if "score" in pairs:
        table = pairs.assign(is_truncated=False)
    else:
        model = open_reranker(load_reranker, args, args.dtype, batch_size_of(args))
        score = functools.partial(scored, model, texts, args)
        table = score(parts / "scores.npy", pairs)
        if graph:
            table = with_neighbours(score, table, graph, parts, args)
    if args.verdicts:
        table["score"] = combo_score(table["score"], table["stance"], args.alpha)
    if args.first_stage:
        table["score"] = blend_first_stage(table, args.first_stage)
    return table


def with_rest(table, rest, top_k):
    """Append top_k candidates beyond --depth in their order, at the lowest score - 1, - 2, ..."""
    import pandas as pd

    lowest = table.groupby("claim_id", observed=True)["score"].min()
    steps = 1 + rest.groupby("claim_id", observed=True).cumcount()
    scores = rest["claim_id"].map(lowest).astype(float) - steps
    # a neighbour may be one of them
    return pd.concat([table, rest.assign(score=scores)[steps <= top_k]]).drop_duplicates(PAIR)


def ranked(table, top_k):
    """Return the first top_k rows of each claim by score (None: all), with ranks."""
    run = table.iloc[np.lexsort((-table["score"], table["claim_id"].factorize()[0]))]
    run = run.assign(rank=run.groupby("claim_id", observed=True).cumcount() + 1)
    return run[run["rank"] <= top_k] if top_k else run


def rerank(args):
    """Score the first candidates of each claim by a model, and sort them by it."""
    is_run = args.model.endswith(".tsv")
    if args.graph and (is_run or args.verdicts):
        fail("--graph", "not with --verdicts, or a run as --model")
    optional = filter(None, (args.graph, args.verdicts))
    inputs = [args.run, args.claims, args.corpus, *optional]
    task = task_of(args, *inputs, models=[args.model], without=["batch_size"])
    if up_to_date(args, task, args.out):
        return {"made": []}
    check_model(args.model)
    claims = read_claims(args.claims)
    abstracts = read_abstracts(args.corpus, args.fields)
    pairs, rest = read_candidates(args, claims, abstracts)
    total = len(pairs) + len(rest)
    if is_run:
        pairs["score"] = read_columns(args.model, ["score"], pairs)
    if args.verdicts:
        pairs["stance"] = read_columns(args.verdicts, ["p_supports", "p_refutes"], pairs)
    graph = read_graph(args, task["inputs"]) if args.graph else {}
    with parts_of(args.out, task) as parts:
        table = score_pairs(pairs, (claims, abstracts), graph, parts, args)
        summary = {"pairs": len(table), "truncated": int(table["is_truncated"].sum())}
        if args.top_k:
            table = with_rest(table, rest, args.top_k)
        run = ranked(table, args.top_k)
        neighbours = run[run["first"].isna()]  # some of them candidates beyond --depth
        left_out = total - len(run) + len(neighbours) - len(neighbours.merge(rest, on=PAIR))
        summary |= {"rows": len(run), "left_out": left_out}
        with written(args.out, task, **summary) as new:
            write_table(run[RUN], new)
    print(f"{args.out}: {len(run)} rows, {left_out} of {total} candidates left out")
    return {"made": [args.out], **summary}


# ---------- Train
def read_examples(path, claims, abstracts, loss):
    """Return rows (claim, text, target), for margin (claim, positive, negative, -1)."""
    rows = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                rows += rows_of(json.loads(line), claims, abstracts, loss)
            except (ValueError, LookupError, TypeError) as error:
                fail(f"{path}:{number}", f"{error!r}; see 02_retrieve.py mine --help")
    if not rows:
        fail(path, f"no examples for --loss {loss}; see 02_retrieve.py mine --help")
    return list(dict.fromkeys(rows))  # positives of tuples are repeated


def rows_of(example, claims, abstracts, loss):
    """Return the rows of an example, a pair or a tuple."""
    claim = claims[str(example["claim_id"])]
    if loss != "margin" and "positive" not in example:
        return [(claim, abstracts[str(example["abstract_id"])], float(example["target"]))]
    positive = abstracts[str(example["positive"])]
    negatives = [abstracts[str(abstract_id)] for abstract_id in example["negatives"]]
    if loss == "margin":
        return [(claim, positive, negative, -1.0) for negative in negatives]
    return [(claim, positive, 1.0)] + [(claim, negative, 0.0) for negative in negatives]


def training_table(model, rows):
    """Return {column: values} of rows, and how many of their pairs are truncated."""
    claims, *columns, labels = zip(*rows)
    table = {"claim": claims}
    truncated = 0
    for number, texts in enumerate(columns):
        table[f"text_{number}"] = texts
        truncated += sum(model[0].preprocess.read(pair)[1] for pair in zip(claims, texts))
    return table | {"label": labels}, truncated


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
    loss = losses.MarginMSELoss(model)  # at label -1: max(0, margin - (s(pos) - s(neg)))
    loss.loss_fct = torch.nn.HingeEmbeddingLoss(args.margin)
    return loss


def dev_evaluator(paths, abstracts, depth):
    """Return an evaluator: nDCG@10 of claims with evidence; ideal: that among candidates."""
    from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator

    claims = read_claims(paths[0])
    known = {"claim_id": claims, "abstract_id": abstracts}
    qrels = read_table(paths[1], [*PAIR, "label"], label=LABELS, **known)
    run = read_table(paths[2], RUN, **known)
    candidates = run[run["rank"] <= depth].groupby("claim_id")["abstract_id"].agg(list)
    evidence = qrels[qrels["label"] != "NEI"].groupby("claim_id")["abstract_id"].agg(set)
    samples = []
    for claim_id, relevant in evidence.items():
        found = candidates.get(claim_id, [""])  # a claim without candidates counts 0
        documents = [abstracts.get(abstract_id, "") for abstract_id in found]
        positive = [text for key, text in zip(found, documents) if key in relevant]
        sample = {"query": claims[claim_id], "positive": positive, "documents": documents}
        samples.append(sample)
    return CrossEncoderRerankingEvaluator(
        samples, name="dev", always_rerank_positives=False, show_progress_bar=True
    )


def train(args):
    """Fine-tune a cross-encoder on mined examples."""
    dev = [f"{args.data}/claims.{args.dev_split}.tsv", f"{args.data}/qrels.{args.dev_split}.tsv"]
    dev = dev_files([*dev, args.dev_run or f"{args.work}/{args.dev_split}/hybrid.tsv"])
    task = task_of(args, args.examples, args.claims, args.corpus, *dev, models=[args.model])
    if up_to_date(args, task, args.out, is_folder=True):
        return {"made": []}
    check_splits(args)
    check_model(args.model)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # a Trainer multiplies its batch by GPUs
    import transformers
    from datasets import Dataset
    from sentence_transformers import cross_encoder

    claims = read_claims(args.claims)
    abstracts = read_abstracts(args.corpus, args.fields)
    rows = read_examples(args.examples, claims, abstracts, args.loss)
    transformers.set_seed(args.seed)  # of a new head
    model = open_reranker(load_to_train, args, "fp32", 32)
    table, truncated = training_table(model, rows)
    with parts_of(args.out, task) as parts:
        summary = {"rows": len(rows), "truncated": truncated} | fine_tune(
            parts,
            args,
            trainer=cross_encoder.CrossEncoderTrainer,
            arguments=cross_encoder.CrossEncoderTrainingArguments,
            model=model,
            data=Dataset.from_dict(table),
            loss=loss_of(model, args),
            evaluator=dev_evaluator(dev, abstracts, args.dev_depth) if dev else None,
            measure="dev_ndcg@10",
            prompts=model.prompts.get(model.default_prompt_name),
            weight_decay=0.01,  # Kiepura & Lam 2025
            lr_scheduler_type="cosine" if args.loss == "l1" else "linear",  # +VeriRel 2025
        )
        with written(args.out, task, **summary) as folder:
            save_model(model, folder, task, summary)
    return {"made": [args.out], **summary}


# ---------- Command line
# fmt: off
def add_texts(add):
    add("--claims", default="{data}/claims.{split}.tsv", help="read the claims from this file")
    add("--corpus", default="{data}/corpus.jsonl", help="read the abstracts from this file")
    add("--fields", type=field_names, default="title,abstract",
        help="make the text of an abstract from these fields")

def add_length(add):
    add("--max-length", type=length, default=512,
        help="truncate prompt and pair to this many tokens")
    add("--prompt", help="instruct a causal reranker or monoT5 by this text (default: its own)")

def add_rerank(job):
    add = job.add_argument_group("inputs and outputs").add_argument
    add("--run", default="{work}/{split}/hybrid.tsv", help="rerank the candidates of this run")
    add_texts(add)
    add("--out", default="{work}/{split}/rerank.tsv", help="write the reranked run to this file")
    add("--depth", type=count, default=20, help="score this many candidates per claim")
    add("--top-k", type=count, help="""write this many abstracts per claim; those that are not
        scored follow in their old order (default: those that are scored)""")
    add = job.add_argument_group("model").add_argument
    add("--model", default="{work}/models/reranker", help="""score by this reranker, a folder or a
        name on the hub; or take the scores of a run, FILE.tsv""")
    add_length(add)
    add("--batch-size", type=count, help="""score this many pairs of --max-length tokens at once, or
        more shorter ones (default: 32, on a GPU 128)""")
    add("--dtype", choices=("auto", "fp32", "bf16", "fp16"), default="auto",
        help="precision of the model; auto takes half precision on a GPU, else fp32")
    add("--device", nargs="+", help="score on cpu, mps, cuda, or on cuda:0 cuda:1 (default: a GPU)")
    add = job.add_argument_group("other scores").add_argument
    add("--first-stage", type=share, default=0, metavar="WEIGHT",
        help="blend in the scores of --run with this weight, from 0 to 1 (z-scores per claim)")
    add("--verdicts", metavar="FILE", help="""average the sigmoid of the score with P(SUPPORTS) +
        P(REFUTES) of these verdicts on the same pairs (ComboScorer); --first-stage comes after""")
    add("--alpha", type=share, default=0.5, help="weight of --verdicts in this average, 0 to 1")
    add = job.add_argument_group("neighbours").add_argument
    add("--graph", metavar="FOLDER", help="""score neighbours in this graph of 01_index.py,
        too (not with --verdicts, or a run as --model)""")
    add("--rounds", type=count_or_0, default=20,
        help="search neighbours for at most this many rounds")
    add("--neighbours", type=count, default=10, help="take so many, at most the graph's")
    add("--beam", type=count, default=30,
        help="expand this many best abstracts per claim and round")
    add_shared(job, split="test")

def add_train(job):
    add = job.add_argument_group("inputs and outputs").add_argument
    add("examples", nargs="?", default="{work}/{split}/examples.jsonl",
        help="train on these examples of 02_retrieve.py mine: pairs, tuples or scores")
    add_texts(add)
    add("--out", default="{work}/models/reranker", help="write the trained model to this folder")
    add = job.add_argument_group("model").add_argument
    add("--model", default="data/models/minilm", help="""start from this encoder or reranker, a
        folder or a name on the hub; an encoder gets a new head""")
    add_length(add)
    add = job.add_argument_group("training").add_argument
    add("--loss", choices=("bce", "margin", "l1"), default="bce", help="""bce: binary cross-entropy;
        margin: hinge loss on tuples; l1: distance of the sigmoid from the target""")
    add("--margin", type=float, default=0.2, help="margin: lead of a positive over a negative")
    add("--epochs", type=positive, default=3, help="train for this many passes over the examples")
    add("--lr", type=amount, default=2e-5, help="learning rate, which falls to 0 (l1: by a cosine)")
    add("--batch-size", type=count, default=16,
        help="train on this many rows at once")
    add("--dev-split", default="dev", help="""keep the epoch with the best nDCG@10 on claims and
        qrels of this split, as far as candidates reach; the last one without these files""")
    add("--dev-run", metavar="RUN", help="rerank this run of dev claims (default: hybrid.tsv)")
    add("--dev-depth", type=count, default=20, help="rerank this many candidates per dev claim")
    add("--patience", type=count, default=2, help="stop after this many epochs without improvement")
    add_training(add)
    add_shared(job, split="train")
# fmt: on


def main():
    run_job(command_line({rerank: add_rerank, train: add_train}))


# --- helpers (same in all six scripts)
START = time.monotonic()
WARNINGS = []  # what this call has warned of; sidecars keep it
CHANGE_NO_OUTPUT = {"force", "out", "device", "function"}  # arguments of all jobs
PACKAGES = ("numpy", "pandas", "torch", "transformers", "sentence_transformers", "bm25s", "openai")
MADE_BY = {  # {first word of a missing file or folder: the job that makes it}
    "bm25": "01_index.py",
    "dense": "01_index.py",
    "graph": "01_index.py graph",
    "hybrid": "02_retrieve.py",
    "examples": "02_retrieve.py mine",
    "rerank": "03_rerank.py",
    "verdicts": "05_classify.py",
}
# Files of a folder that no model or index needs: README.md, hidden ones (hf download leaves some)
NOT_LOADED = r"(^|/)\.\w|^README.md$"
ONE_LINE = r"[^\t\r\n]+"  # an id that fits into a TSV file


def shown(text):
    """Return a text in one line, its control characters escaped, without passwords of addresses."""
    text = re.sub(r"(?<=://)[^/@\s]+@", "***@", " ".join(str(text).split()))
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def warn(where, what):
    """Print a warning on stderr, and keep it for the sidecars."""
    WARNINGS.append(shown(f"warning: {where}: {what}"))
    print(WARNINGS[-1], file=sys.stderr)


def fail(where, what):
    """End with one line on stderr and exit status 2."""
    print(shown(f"error: {where}: {what}"), file=sys.stderr)
    sys.exit(2)


def within(number, least, most=10**9):
    """Return the number if it is in this range; argparse shows the error to the user."""
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"{number} is out of its range, {least:,} to {most:,}")
    return number


def count(text):
    """Return a whole number of at least 1."""
    return within(int(text), 1)


def count_or_0(text):
    """Return a whole number of at least 0."""
    return within(int(text), 0)


def amount(text):
    """Return a number of at least 0."""
    return within(float(text), 0)


def share(text):
    """Return a number from 0 to 1."""
    return within(float(text), 0, 1)


def digest(path):
    """Return the sha256 of a file, or of the files of a folder that are loaded."""
    path = Path(path)
    total = hashlib.sha256()
    for part in [path, *sorted(path.rglob("*"))]:
        name = part.relative_to(path).as_posix()
        if part.is_file() and not re.search(NOT_LOADED, name):
            with part.open("rb") as file:
                hashlib.file_digest(file, lambda: total)
    return total.hexdigest()


def check_input(path, args):
    """End if an input is missing: name the job that makes it, the splits there, its argument."""
    path = Path(path)
    if path.exists():
        return
    kind = path.name.split(".")[0]
    advice = [f"make it by {MADE_BY[kind]}"] if kind in MADE_BY else []
    for folder in reversed(path.parents):
        if not folder.exists() and kind not in MADE_BY:
            fail(folder, "no such folder; fix its name, or see data/README.md")
    splits = [other.name.split(".")[1] for other in path.parent.glob(f"{kind}.*.tsv")]
    if splits:
        advice.append(f"splits there: {', '.join(sorted(splits))}")
    for name, value in vars(args).items():
        if str(value) == str(path):
            advice.append(f"name another file for {name}")
    fail(path, f"not found; {'; '.join(advice) or 'fix its name'}")


def task_of(args, *inputs, models=(), without=()):
    """Return what decides an output: arguments, and digests of inputs and of local models.

    without: names of arguments that change no output of this job.
    """
    for path in inputs:
        check_input(path, args)
    paths = [str(path) for path in (*inputs, *models) if Path(path).exists()]
    left_out = CHANGE_NO_OUTPUT.union(without)
    arguments = {name: value for name, value in vars(args).items() if name not in left_out}
    return {"arguments": arguments, "inputs": {path: digest(path) for path in paths}}


def sidecar_of(path):
    """Return the provenance of an output; {} without a sidecar, or with a torn one."""
    made = {}
    with contextlib.suppress(OSError, ValueError):
        made = json.loads(Path(f"{Path(path)}.meta.json").read_bytes())
    return made if isinstance(made, dict) else {}


def check_outs(*outs, inputs=(), is_folder=False):
    """Refuse outputs that would replace an input, a folder of others, or a file by a folder."""
    for out in map(Path, outs):
        taken = [path for path in out.parents if path.is_file()]
        is_ours = is_folder and Path(f"{out}.meta.json").exists()
        if (out.is_dir() and not is_ours) or (is_folder and out.is_file()):
            taken.append(out)
        for path in taken:
            fail(path, "not made by this script, which would replace it; give another name")
        if out in map(Path, inputs):
            fail(out, "this call reads it; give another name for what it writes")


def up_to_date(args, task, *outs, is_folder=False):
    """Return whether this very task has made all outs, and nobody has changed them since."""
    check_outs(*outs, inputs=task.get("inputs", ()), is_folder=is_folder)
    for out in outs:
        if args.force or not Path(out).exists():
            return False
        if not (task | {"sha256": digest(out)}).items() <= sidecar_of(out).items():
            return False
    for out in outs:
        print(f"up to date: {out} (same inputs and flags; --force makes it again)")
    return True


def remove(path):
    """Remove a folder or a file, if it is there."""
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)


def clear(path):
    """Remove what killed processes have left beside an output: PATH.PID.tmp."""
    for left in path.parent.glob(f"{path.name}.*.tmp"):
        pid = left.with_suffix("").suffix[1:]
        try:
            os.kill(int(pid), 0)  # which only asks whether this process runs
        except ProcessLookupError:
            remove(left)
        except (OSError, ValueError, OverflowError):
            pass  # another user's process, or not the number of one


@contextlib.contextmanager
def written(path, task, **summary):
    """Yield a temporary path. What is made there becomes path, whole, with a sidecar."""
    path = Path(path)
    meta = Path(f"{path}.meta.json")
    end = f"{os.getpid()}.tmp"  # two processes may write one output
    new = Path(f"{path}.{end}")
    new_meta = Path(f"{meta}.{end}")
    old = Path(f"{path}.old.{end}")
    path.parent.mkdir(parents=True, exist_ok=True)
    clear(path)
    remove(new)
    yield new
    check_outs(path, is_folder=new.is_dir())
    loaded = {name: sys.modules[name].__version__ for name in PACKAGES if name in sys.modules}
    made = {"command": list(map(shown, sys.argv)), "script": digest(sys.argv[0])}
    made |= {"packages": loaded, "warnings": WARNINGS, "sha256": digest(new)}
    made["seconds"] = round(time.monotonic() - START, 1)
    new_meta.write_text(json.dumps(task | summary | made, indent=1))
    meta.write_text("{}")  # while the output is replaced
    if path.is_dir():
        path.rename(old)  # a folder cannot take the place of another one
    new.replace(path)
    new_meta.replace(meta)
    remove(old)


def add_shared(job, split=None):
    """Add the flags of all scripts; split: the default of --split, None for jobs without one."""
    add = job.add_argument_group("shared by all scripts").add_argument
    # fmt: off
    add("--data", default="data/demo", help="read from this folder; {data} in other defaults")
    add("--work", help="write to this folder; {work} in other defaults (default: work/DATA)")
    if split:
        add("--split", default=split, help="take this split; {split} in other defaults")
    add("--force", action="store_true", help="make outputs again, even if they are up to date")
    # fmt: on


def with_nearest(message, flags):
    """Return an error of argparse with the known flag that is most like an unknown one.

    flags: {flag: the job that has it}.
    """
    unknown = re.search(r"unrecognized arguments:.* (--[\w-]+)", message)
    if unknown:
        for flag in difflib.get_close_matches(unknown[1], flags, 1):
            message += f"; {flag} is a flag of {flags[flag]}"
    return f"{message}; see --help"


def command_line(jobs):
    """Return the parsed arguments; jobs: {function: what adds its flags}, the default job first.

    In defaults, {data}, {work} and {split} stand for the values of these flags.
    """
    names = [function.__name__ for function in jobs]
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    choices = parser.add_subparsers(title="jobs", metavar=f"JOB (default: {names[0]})")
    flags = {}
    for name, function in zip(names, jobs):
        job = choices.add_parser(name, help=function.__doc__, description=function.__doc__)
        job.set_defaults(function=function, job=name)
        parser.error = job.error = lambda text: fail(parser.prog, with_nearest(text, flags))
        jobs[function](job)
        for flag in job._actions:  # argparse has no public list of them
            for text in flag.option_strings:
                flags.setdefault(text, name)
            is_shown = str(flag.default) not in ("None", "False", argparse.SUPPRESS)
            if is_shown and "(default" not in flag.help:
                flag.help += " (default: %(default)s)"
    words = sys.argv[1:]
    if not words or words[0] not in (*names, "-h", "--help"):
        words = [names[0], *words]
    args = parser.parse_args(words)
    args.work = args.work or f"work/{Path(args.data).resolve().name}"
    for field in ("data", "work", "split"):
        for name, value in vars(args).items():
            if isinstance(value, str) and field in args:
                setattr(args, name, value.replace(f"{{{field}}}", vars(args)[field]))
    return args


def run_job(args):
    """Run the job, and print its result as JSON."""
    try:
        print(json.dumps(args.function(args)))
    except OSError as error:
        fail(error.filename or vars(args).get("out", args.job), error)
    except (UnicodeError, ImportError) as error:
        fail(args.job, error)


def read_table(path, columns, **known):
    """Read a TSV file of texts; ranks and scores are numbers, a run is sorted by claim and rank.

    known: {column: the values that it may hold, if it is there}. A faulty row ends the script.
    """
    import pandas as pd

    texts = dict.fromkeys(("claim_id", "abstract_id", "claim", "label", "codes"), str)
    layout = {"sep": "\t", "quoting": csv.QUOTE_NONE, "encoding": "utf-8-sig", "low_memory": False}
    layout |= {"na_filter": False, "skip_blank_lines": False}  # so that rows are lines
    try:
        table = pd.read_csv(path, dtype=texts, **layout)
    except ValueError as error:  # an empty file, another encoding, a row that is too long
        fail(path, f"{error}; see data/convert.py")
    is_whole = isinstance(table.index, pd.RangeIndex)  # else a row has more fields than the header
    if not is_whole or not set(columns) <= set(table):
        found = f"""found columns {", ".join(table)}; wanted {", ".join(columns)}, between tabs, in
            rows of one length; python data/convert.py {path} --out NEW.tsv (--columns WANTED=FOUND
            renames)"""
        fail(f"{path}:1", found)
    table = table[(table[list(columns)] != "").any(axis=1)]
    if "claim" in columns:
        quoted = '^"((?:[^"]|"")*)"$'  # as pandas writes texts with quotation marks
        claims = table["claim"].str
        table["claim"] = claims.replace(quoted, lambda text: text[1].replace('""', '"'), regex=True)
    ids = [column for column in columns if column.endswith("_id")]
    faults = {f"{column} is empty": table[column] == "" for column in columns}
    for column, values in known.items():
        if column in table:
            faults[f"unknown {column}"] = ~table[column].isin(values)
    faults[f"an earlier row has this {' and '.join(ids)}"] = table.duplicated(ids)
    if "rank" in columns:
        for column in ("rank", "score"):
            table[column] = pd.to_numeric(table[column], errors="coerce")
        table = table.iloc[np.lexsort((table["rank"], table["claim_id"].factorize()[0]))]
        counted = table.groupby("claim_id").cumcount() + 1
        faults["score is not a finite number"] = ~np.isfinite(table["score"])
        faults["the ranks of a claim are not 1, 2, 3, ..."] = table["rank"] != counted
        last = table.groupby("claim_id")["score"].shift()
        faults[
            "the score is above that of the rank before: higher is better, so negate distances"
        ] = table["score"] > last
        table = table.assign(rank=counted)  # integers; some tools write 1.0
    for what, is_faulty in faults.items():
        if is_faulty.any():
            row = is_faulty.idxmax()
            what += f": {' '.join(table.loc[row].filter(regex='_id$|^label$'))}"
            advice = (
                "fix this row (data/convert.py mends line breaks), or name a file of this split"
            )
            fail(f"{path}:{row + 2}", f"{what}; {advice}")
    return table.reset_index(drop=True)


def read_claims(path):
    """Return {claim_id: claim}."""
    table = read_table(path, ["claim_id", "claim"])
    return dict(zip(table["claim_id"], table["claim"]))


def read_corpus(path):
    """Return {abstract_id: record}."""
    corpus = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line.decode("utf-8-sig"))
                abstract_id = str(record["abstract_id"])
                is_id = record["abstract_id"] is not None and re.fullmatch(ONE_LINE, abstract_id)
                if b"\\u" in line:
                    json.dumps(record, ensure_ascii=False).encode()  # fails at half a character
            except (ValueError, LookupError, TypeError):
                is_id = False
            if not is_id:
                what = "no JSON object in UTF-8 with an abstract_id of one line"
                fail(f"{path}:{number}", f"{what}; see data/convert.py")
            if abstract_id in corpus:
                fail(f"{path}:{number}", f"a second abstract {abstract_id}; remove one")
            corpus[abstract_id] = record
    if not corpus:
        fail(path, "no abstracts; see data/convert.py")
    return corpus


def write_table(table, path):
    """Write a table as read_table reads it: quotation marks mean nothing."""
    table.to_csv(path, sep="\t", index=False, float_format="%.9g", quoting=csv.QUOTE_NONE)


def text_of(record, fields=("title", "abstract"), separator=" "):
    """Join the fields of a record that hold texts, numbers or lists; null and NaN hold nothing."""
    texts = []
    for field in fields:
        value = record.get(field)
        items = value if isinstance(value, list) else [value]
        known = [str(item).strip() for item in items if item is not None and item == item]
        between = " " if field == "abstract" else ", "  # sentences; names of authors
        texts.append(between.join(filter(None, known)))
    return separator.join(filter(None, texts))


def field_names(text):
    """Return names of fields without the blanks around their commas."""
    return re.sub(r"\s*,\s*", ",", text.strip())


def read_abstracts(path, fields, separator=" "):
    """Return {abstract_id: text} of a corpus; fields: their names, with commas between them."""
    fields = fields.split(",")
    records = read_corpus(path)
    unknown = set(fields) - {"title"}.union(*records.values())  # a title is optional
    if unknown:
        tell = warn if unknown < set(fields) else fail
        tell(path, f"no record has the field {', '.join(sorted(unknown))}; see --fields")
    return {key: text_of(record, fields, separator) for key, record in records.items()}


def claims_of(split, args):
    """Return the ids and the words of the claims of a split; nothing if it does not exist."""
    path = Path(args.data, f"claims.{split}.tsv")
    claims = read_claims(path) if path.exists() else {}
    words = {" ".join(re.findall(r"\w+", claim.lower())) for claim in claims.values()}
    return set(claims), words


def check_splits(args):
    """Warn of claims of --split that another split has, too: figures on them are too high."""
    kind = args.split.split("-")[0]  # train-cited has the claims of train
    ids, words = claims_of(args.split, args)
    for split in ("train", "dev", "test"):
        other_ids, other_words = claims_of(split, args)
        same = (
            f"{len(words & other_words)} claims with the words, {len(ids & other_ids)} with the id"
        )
        is_other = kind in ("train", "dev", "test") and kind != split
        if is_other and (words & other_words or ids & other_ids):
            warn(f"{args.data}, {args.split}", f"it has {same} of a claim in {split}")


# --- end of helpers


# --- models (same in 01, 02, 03 and 05)
LEAST_TOKENS = 200  # a tokenizer without its files knows special tokens alone


def device_of(args):
    """Return the first device of --device, else a GPU if there is one, else None."""
    import torch

    has_gpu = torch.cuda.is_available()
    if not args.device:
        return "cuda" if has_gpu else None
    if args.device[0].startswith("cuda") and not has_gpu:
        fail(f"--device {args.device[0]}", "no GPU is visible; leave out --device, or give cpu")
    return args.device[0]


def batch_size_of(args):
    """Return --batch-size; without it, what is fast on the device."""
    if args.batch_size:
        return args.batch_size
    return 128 if str(device_of(args)).startswith("cuda") else 32


def refuse_bin(*_, **__):
    """Stand in for torch.load where its weights-only loader can be made to run code."""
    raise ValueError("its weights are a .bin, which the kit reads with torch 2.10 or newer alone")


def open_model(load, name, args, dtype="fp32", **options):
    """Return load(name, ...), which runs no code of the model; auto: half precision on a GPU.

    Weights are read from safetensors, else from a .bin by PyTorch's weights-only loader.
    """
    import torch

    device = device_of(args)
    if dtype == "auto":
        dtype = "fp32"
        if str(device).startswith("cuda"):
            dtype = "bf16" if torch.cuda.is_bf16_supported(False) else "fp16"
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    options |= {"device": device, "trust_remote_code": False}
    options["model_kwargs"] = {"dtype": names[dtype]}
    options["local_files_only"] = Path(name).exists()  # a folder needs no hub
    os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "1"  # else a .bin starts a bot of the hub
    guard = contextlib.nullcontext()
    if torch.__version__ < "2.10":  # CVE-2025-32434, CVE-2026-24747
        guard = mock.patch("torch.load", refuse_bin)
    try:
        with guard:
            model = load(str(name), **options)
    except Exception as error:  # of many kinds
        fail(name, f"{reason_of(error)}; {ADVICE}; or python data/download.py model OWNER/NAME")
    if len(model.tokenizer.get_vocab()) < LEAST_TOKENS:
        fail(name, "files of its tokenizer are missing, as tokenizer.json; copy the whole folder")
    if getattr(model.tokenizer, "pad_token", True) is None:  # as with Llama
        model.tokenizer.pad_token = model.tokenizer.eos_token
        model.transformers_model.config.pad_token_id = model.tokenizer.pad_token_id
    return model


def reason_of(error):
    """Return why a model cannot be opened, and what helps."""
    reason = str(error)
    if "trust_remote_code" in reason:
        return "it comes with code of its own, which the kit does not run"
    if "gated" in reason:
        return (
            "it is gated; ask for access on its page, then export HF_TOKEN=hf_... with your token"
        )
    if "model_type" in reason or "valid JSON" in reason:
        return (
            "it has no config.json of a model; merge an adapter into its base first, and take the "
            "original of a GGUF file"
        )
    if "Weights only load failed" in reason:
        return "its .bin holds more than weights, so it is not read"
    if isinstance(error, MemoryError) or "allocate memory" in reason or "out of memory" in reason:
        return (
            "memory is too small for its weights; try --dtype bf16 or a smaller model; in training "
            "--lora 16 --lr 2e-4 or --checkpointing"
        )
    return reason


def length(text):
    """Return a number of tokens that has room for texts beside special tokens."""
    return within(int(text), 8)


def check_model(name):
    """Refuse old packages, and a folder that is not there; OWNER/NAME may be on the hub."""
    from packaging.version import Version

    installed = importlib.metadata.version("sentence-transformers")
    if Version(installed) < Version("6.2"):
        what = f"{installed} is older than 6.2; pip install -U 'sentence-transformers>=6.2'"
        fail("sentence-transformers", what)
    if not Path(name).exists() and name.count("/") > 1:
        fail(name, f"no such model; {ADVICE}")


def check_fields(config, name, args):
    """Warn if a model was trained on other fields of abstracts than it gets."""
    trained = getattr(config, "trained_fields", args.fields)
    if trained != args.fields:
        warn(name, f"trained on the fields {trained}, it gets {args.fields}; see --fields")


def read_meta(folder, sha256):
    """Return the meta.json of an index, whose files have this digest; refuse a damaged one."""
    if sidecar_of(folder).get("sha256") != sha256:
        fail(folder, "damaged, or without its sidecar; make it again by 01_index.py --force")
    return json.loads(Path(folder, "meta.json").read_bytes())


# --- end of models


# --- pairs (same in 03 and 05)
GROUP = 1024  # pairs that are scored and stored at once; on several devices 20 times as many


class PairReader:
    """Turns pairs of texts into tensors, as a model's preprocess does, but reads a text only once.

    A claim and an abstract are in many pairs. Where both do not fit, the claim keeps at most half
    of the tokens, and the other text is cut to what is left.

    claim_at: 0 or 1, the claim's place in a pair. batch_size: pairs of --max-length tokens.
    """

    def __init__(self, model, claim_at, batch_size):
        self.tokenizer = model.tokenizer
        self.library = model[0].preprocess
        self.claim_at = claim_at
        self.batch_size = batch_size
        self.tokens = batch_size * model.max_seq_length  # of a batch, at most
        self.known = {}  # {text: its token ids}
        self.prompt = model.prompts.get(model.default_prompt_name) or ""
        self.by_library = "message" in model.modalities  # a chat template
        if not self.by_library:
            # Two short texts show which tokens stand around all pairs.
            self.probe = self.tokenizer(*getattr(model[0], "probe", ("a", "b")))
            self.places = [self.place_of(text) for text in "ab"]
            self.by_library = None in self.places
        prompt_length = 0
        if self.by_library:
            empty = self.library([("", "")], prompt=self.prompt)["input_ids"]
            around = empty.numel() + 4  # the ends of texts may be tokenised anew
        else:
            around = len(self.probe["input_ids"]) - 2
            prompt_length = len(self.ids_of(self.prompt))
        self.room = model.max_seq_length - around
        self.most = (self.room - prompt_length) // 2  # tokens of a claim
        if self.most < 1:
            fail("--max-length", "no tokens are left beside the prompt; raise it")
        if claim_at == 0:
            self.most += prompt_length

    def place_of(self, text):
        """Return where the probe has a text, and leave one token of it there; None without it."""
        part = self.ids_of(text).tolist()
        ids = self.probe["input_ids"]
        for place in range(len(ids)):
            if ids[place : place + len(part)] == part:
                for values in self.probe.values():
                    del values[place + 1 : place + len(part)]
                return place
        return None

    def ids_of(self, text):
        """Return the token ids of a text, without special tokens."""
        if text not in self.known:
            backend = self.tokenizer.backend_tokenizer
            backend.no_truncation()
            (coded,) = backend.encode_batch_fast([text], add_special_tokens=False)
            self.known[text] = np.array(coded.ids, np.int32)
        return self.known[text]

    def read(self, pair):
        """Return the token ids of both texts of a pair, cut, and whether it was cut."""
        prompt = "" if self.by_library else self.prompt
        whole = [self.ids_of(prompt + pair[0]), self.ids_of(pair[1])]
        claim = whole[self.claim_at][: self.most]
        other = whole[1 - self.claim_at][: self.room - len(claim)]
        ids = [claim, other] if self.claim_at == 0 else [other, claim]
        return ids, sum(map(len, ids)) < sum(map(len, whole))

    def cut_texts(self, pair):
        """Return the texts of a pair, as far as they are read."""
        texts = []
        for text, ids in zip(pair, self.read(pair)[0]):
            if len(ids) < len(self.ids_of(text)):
                coded = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
                text = text[: coded.offsets[len(ids) - 1][1]]
            texts.append(text)
        return tuple(texts)

    def __call__(self, pairs, prompt=None, **options):
        """Return the tensors of pairs; prompt: that of the model."""
        import torch

        if self.by_library:
            return self.library([*map(self.cut_texts, pairs)], prompt=prompt, **options)
        rows = []
        for pair in pairs:
            ids, _ = self.read(pair)
            lengths = np.ones(len(self.probe["input_ids"]), int)
            lengths[self.places] = [len(part) for part in ids]
            row = {name: np.repeat(values, lengths) for name, values in self.probe.items()}
            ends = lengths.cumsum()
            for place, part in zip(self.places, ids):
                row["input_ids"][ends[place] - len(part) : ends[place]] = part
            rows.append(row)
        tensors = {}
        for name in self.probe:
            tensors[name] = torch.nn.utils.rnn.pad_sequence(
                [torch.from_numpy(row[name]) for row in rows],
                batch_first=True,
                padding_value=self.tokenizer.pad_token_id if name == "input_ids" else 0,
                padding_side=self.tokenizer.padding_side,
            )
        return tensors


def outputs_of(model, pairs, bar=None):
    """Return a model's outputs (pairs, labels), computed in batches of pairs of similar lengths."""
    import torch

    reader = model[0].preprocess
    lengths = [sum(map(len, reader.read(pair)[0])) for pair in pairs]
    order = np.argsort(lengths, kind="stable")[::-1]
    outputs = np.zeros((len(pairs), model.num_labels))
    start = 0
    while start < len(order):
        longest = lengths[order[start]] + model.max_seq_length - reader.room
        batch = order[start : start + max(1, reader.tokens // longest)]
        texts = [pairs[index] for index in batch]
        try:
            found = model.predict(texts, batch_size=len(batch), activation_fn=torch.nn.Identity())
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise
            reader.tokens = longest * len(batch) // 2
            warn("--batch-size", f"{len(batch)} pairs of {longest} tokens fill the GPU; now half")
            continue
        outputs[batch] = found.reshape(len(batch), -1)
        start += len(batch)
        if bar is not None:
            bar.update(len(batch))
    return outputs


def open_scores(path, shape):
    """Return stored numbers of this shape, NaN in new files; a damaged one is made anew."""
    try:
        is_whole = np.load(path, mmap_mode="r").shape == shape  # "r+" fills torn files with zeros
    except (OSError, ValueError, EOFError):
        is_whole = False
    if not is_whole:
        if path.exists():
            warn(path, "the stored scores are damaged; these pairs are scored anew")
        new = path.with_name("new.npy")
        np.save(new, np.full(shape, np.nan))
        new.rename(path)
    return np.load(path, mmap_mode="r+")


def score_resumably(model, read_pairs, n, path, args):
    """Return a model's outputs for n pairs (n, labels), and which of them are truncated.

    path holds both, NaN for unfinished groups. read_pairs(start, end): returns pairs of texts.
    """
    from tqdm.auto import tqdm

    reader = model[0].preprocess
    devices = args.device if len(args.device or ()) > 1 else None
    size = GROUP
    if devices:
        size = 20 * GROUP  # predict starts processes for each group
        model[0].preprocess = reader.library  # which they can be given
        if not reader.library:
            fail("--device", "monoT5 takes one")
    stored = open_scores(path, (n, model.num_labels + 1))
    finished = np.isfinite(stored[:, 0]).sum()
    if finished < n:
        finished -= finished % size  # whole groups
    with tqdm(desc=args.job, unit=" pairs", total=n - finished) as bar:
        for start in range(finished, n, size):
            pairs = read_pairs(start, start + size)
            is_truncated = [reader.read(pair)[1] for pair in pairs]
            if devices:
                found = model.predict(pairs, batch_size=reader.batch_size, device=devices)
                bar.update(len(pairs))
            else:
                found = outputs_of(model, pairs, bar)
            if not np.isfinite(found).all():
                what = "a score is no finite number; use --dtype fp32, which takes twice as long"
                fail(args.model, what)
            stored[start : start + size] = np.column_stack([found, is_truncated])
    return stored[:, :-1], stored[:, -1] > 0


# --- end of pairs


# --- training (same in 01, 03 and 05)
KEPT = 30 * 24 * 3600  # seconds that unfinished work of other calls stays


def positive(text):
    """Return a number above 0."""
    return within(float(text), 1e-9)


@contextlib.contextmanager
def parts_of(out, task):
    """Yield a folder for unfinished work, locked, as two processes would spoil the output."""
    parts = Path(f"{Path(out)}.parts")
    folder = parts / hashlib.sha256(json.dumps(task).encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with open(parts / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fail(parts, "another process works on it; wait for it, or give another --out")
        except OSError:
            pass  # a file system without locks, as a mounted drive
        try:
            yield folder
        except SystemExit:
            if not any(map(os.path.isfile, folder.rglob("*"))):  # there is no work to keep
                shutil.rmtree(folder if len(list(parts.iterdir())) > 2 else parts)
            raise
    shutil.rmtree(folder)
    for other in parts.glob("[0-9a-f]" * 16):  # of other models or flags
        if time.time() - other.stat().st_mtime > KEPT:
            print(f"{other}: unfinished for more than 30 days, removed")
            shutil.rmtree(other)
    if len(list(parts.iterdir())) == 1:
        shutil.rmtree(parts)  # with the lock


def is_intact(path):
    """Return whether a file is a zip archive, as .npz and .pt are, without a damaged part."""
    with contextlib.suppress(OSError, zipfile.BadZipFile):
        return zipfile.ZipFile(path).testzip() is None
    return False


def can_resume(checkpoint, names=None):
    """Return whether a checkpoint is whole, with weights of these names (None: of any)."""
    from safetensors import SafetensorError, safe_open

    try:
        json.loads((checkpoint / "trainer_state.json").read_bytes())
        [weights] = checkpoint.glob("*.safetensors")
        with safe_open(weights, "pt") as file:
            is_other = names not in (None, set(file.keys()))
    except (OSError, ValueError, SafetensorError):
        return False
    states = [checkpoint / "optimizer.pt", *checkpoint.glob("*.pt*")]
    return not is_other and all(map(is_intact, states))


def newest_checkpoint(folder, names=None):
    """Return the newest checkpoint (its trainer_state.json is written last), or None.

    If one is damaged, all are removed, as the best epoch may be in it.
    """
    states = sorted(folder.glob("checkpoint-*/trainer_state.json"), key=os.path.getmtime)
    for state in states:
        if not can_resume(state.parent, names):
            warn(state.parent, "the checkpoint is damaged; training begins anew")
            for other in states:
                shutil.rmtree(other.parent)
            return None
    return str(states[-1].parent) if states else None


def add_adapter(network, rank):
    """Freeze a network but for its head and low-rank adapters, which are new (Hu et al. 2021)."""
    from peft import LoraConfig, LoraModel

    network.requires_grad_("Classification" in type(network).__name__)  # the head; no LM head
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    return LoraModel(network.base_model, config, "default")


def resumable(trainer):
    """Return a trainer whose checkpoints hold trained weights alone."""
    from safetensors.torch import load_file, save_file

    class Resumable(trainer):
        def _save(self, folder, **_):
            Path(folder).mkdir(exist_ok=True)
            weights = self.model.named_parameters()
            trained = {name: weight for name, weight in weights if weight.requires_grad}
            save_file(trained, f"{folder}/trained.safetensors")

        def _load_from_checkpoint(self, folder):
            self.model.load_state_dict(load_file(f"{folder}/trained.safetensors"), strict=False)

    return Resumable


def fine_tune(
    folder, args, *, trainer, arguments, model, data, loss, evaluator, measure, **settings
):
    """Train from the newest checkpoint on; keep the epoch with the best measure of evaluator."""
    import torch
    from transformers import EarlyStoppingCallback, logging, trainer_callback

    # The trainer's progress bar has no label, and no argument for one.
    # So the trainer gets a tqdm that has.
    trainer_callback.tqdm = functools.partial(trainer_callback.tqdm, desc="train")
    strategy = "epoch" if evaluator else "steps"
    is_gpu = model.device.type == "cuda"
    has_bf16 = is_gpu and torch.cuda.is_bf16_supported(False)
    settings |= {
        "num_train_epochs": args.epochs,
        "per_device_train_batch_size": args.batch_size,
        "gradient_accumulation_steps": args.accumulate,
        "gradient_checkpointing": args.checkpointing,
        "learning_rate": args.lr,
        "seed": args.seed,
        "use_cpu": model.device.type == "cpu",
        "bf16": has_bf16,
        "fp16": is_gpu and not has_bf16,
        "save_strategy": strategy,
        "save_steps": args.save_steps,
        "save_total_limit": 2,
        "restore_callback_states_from_checkpoint": True,
        "logging_strategy": strategy,
        "logging_steps": args.save_steps,
        "logging_nan_inf_filter": False,
        "metric_for_best_model": measure,
    }
    callbacks = []
    if evaluator:
        settings |= {"eval_strategy": "epoch", "load_best_model_at_end": True}
        callbacks.append(EarlyStoppingCallback(args.patience))
    if args.lora:
        adapter = add_adapter(model.transformers_model, args.lora)
    curve = []
    with contextlib.redirect_stdout(sys.stderr):  # trainers print their logs
        if evaluator:
            curve.append(evaluator(model)[measure])
        arguments = arguments(str(folder), **settings)
        training = resumable(trainer)(
            model, arguments, data, loss=loss, evaluator=evaluator, callbacks=callbacks
        )
        names = {name for name, weight in model.named_parameters() if weight.requires_grad}
        logging.set_verbosity_error()  # a resumed training warns of steps that are the same
        training.train(resume_from_checkpoint=newest_checkpoint(folder, names))
    if args.lora:
        adapter.merge_and_unload()  # into fp32 weights: in bf16, scores would move by 0.01
    log = training.state.log_history
    losses = [line["loss"] for line in log if "loss" in line]
    if not np.isfinite(losses).all():
        fail("--lr", "the loss is not a finite number; lower it")
    curve += [line[f"eval_{measure}"] for line in log if f"eval_{measure}" in line]
    return {"loss": losses, measure: [round(value, 4) for value in curve]}


def save_model(model, folder, task, summary):
    """Save a model with a card; its tokenizer without the truncation of training."""
    model.tokenizer.backend_tokenizer.no_truncation()
    model.tokenizer.backend_tokenizer.no_padding()
    model.max_seq_length = model.tokenizer.init_kwargs.get("model_max_length")
    if model.transformers_model:  # static embeddings have none
        model.transformers_model.config.trained_fields = task["arguments"]["fields"]
    model.save_pretrained(str(folder), create_model_card=False)
    (folder / "README.md").write_text(f"""# Fine-tuned from {task["arguments"]["model"]}

- Data: {", ".join(task["inputs"])}
- Flags: {json.dumps(task["arguments"])}
- Figures: {json.dumps(summary)}
- Version: sentence-transformers {importlib.metadata.version("sentence-transformers")}
""")


# fmt: off
def add_training(add):
    add("--accumulate", type=count, default=1, help="average the gradients of this many batches")
    add("--lora", type=count_or_0, default=0, metavar="RANK", help="""train adapters of this rank
        (alpha: twice the rank; 0: all weights) and the head, and merge them; wants the package
        peft""")
    add("--checkpointing", action="store_true", help="gradient checkpointing: slower, less memory")
    add("--save-steps", type=positive, default=0.1, metavar="SHARE", help="""save after this
        share of the steps (1 and more: after so many steps); with a dev split, after each epoch""")
    add("--seed", type=count_or_0, default=13,
        help="seed of the order, a new head and random draws")
    add("--device", nargs=1, help="cpu, mps, cuda (of CUDA_VISIBLE_DEVICES; default: a GPU)")
# fmt: on


def dev_files(paths):
    """Return the files that a dev evaluation needs if all are there, else none."""
    missing = [path for path in paths if not Path(path).exists()]
    if missing:
        print(f"no {', '.join(missing)}, so no dev evaluation: the last epoch is kept")
        return []
    return paths


# --- end of training

if __name__ == "__main__":
    main()
