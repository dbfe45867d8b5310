# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "accelerate==1.15.0",
#     "datasets==5.2.0",
#     "numpy==2.4.6",
#     "pandas==3.1.1",
#     "protobuf==7.36.2",
#     "sentence-transformers==6.2.0",
#     "sentencepiece==0.2.3",
#     "torch==2.13.0",
#     "tqdm==4.70.1",
#     "transformers==5.23.0",
# ]
# ///
"""
Rerank the candidates of a run with cross-encoders, or train one.

Reads   a run, claims and corpus; --graph: 01_index.py graph; --verdicts: 05_classify.py
        train: examples.jsonl of 02_retrieve.py mine, and the dev split, if any
Writes  work/NAME/SPLIT/rerank.tsv, of several models their RRF; train: work/NAME/models/reranker/
        OUT.parts/ holds finished groups and checkpoints; an interrupted run resumes from them.
Prints  one line of JSON, last on stdout: pairs, truncated abstracts and equal scores per model

Examples
    python 02_retrieve.py --split train && python 02_retrieve.py mine && python 03_rerank.py train
    python 03_rerank.py --depth 50 --first-stage 0.5
    python 03_rerank.py --model BAAI/bge-reranker-large BAAI/bge-reranker-v2-m3 --depth 200
    python 03_rerank.py --model Qwen/Qwen3-Reranker-0.6B --device cuda:0 cuda:1
    python 03_rerank.py --graph work/demo/index/graph --top-k 10
"""
# --- constants (same in all six scripts)
import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during imports: no traceback
LABELS = ("SUPPORTS", "REFUTES", "NEI")
RUN = ["claim_id", "abstract_id", "rank", "score"]
NEUTRAL = {"force", "out", "device", "batch_size", "concurrency", "function"}  # decide no byte
# --- end of constants

import argparse
import atexit
import contextlib
import ctypes
import difflib
import functools
import hashlib
import io
import json
import os
import re
import resource
import shutil
import sys
import time
import unicodedata
import zlib
from pathlib import Path

import numpy as np

KEY = ["claim_id", "abstract_id"]
GROUP = 1024                # pairs that are scored and stored at once
RRF_K = 60                  # Cormack et al. 2009
MONO_T5 = "Query: {} Document: {} Relevant:"  # Nogueira et al. 2020; it answers true or false
LOSSES = {"bce": "BinaryCrossEntropyLoss", "margin": "MarginMSELoss", "mse": "MSELoss",
          "l1": "MSELoss", "lambda": "LambdaLoss", "listnet": "ListNetLoss",
          "ranknet": "RankNetLoss", "mnrl": "MultipleNegativesRankingLoss"}
MEASURE = "eval_dev_ndcg@10"  # decides on the best epoch

# -------------------- Inputs
def read_claims(path):
    """Return {claim_id: claim}."""
    return dict(read_table(path, ["claim_id", "claim"])[["claim_id", "claim"]].values)

def read_texts(path):
    """Return {abstract_id: title and abstract}."""
    texts = {}
    for name, record in read_corpus(path).items():
        parts = [str(record.get("title") or ""), record["abstract"]]
        texts[name] = " ".join(filter(str.strip, parts))
    return texts

def read_numbers(path, columns, run, low=-1e308, high=1e308):
    """Return columns of another table (rows of run, columns); it must have every pair of run."""
    import pandas as pd
    table = run.merge(read_table(path, [*KEY, *columns]), on=KEY, how="left")
    numbers = table[columns].apply(pd.to_numeric, errors="coerce").to_numpy()
    bad = ~((low <= numbers) & (numbers <= high)).all(axis=1)
    for claim, name in table.loc[bad, KEY].values[:1]:
        fail(path, f"no {' and '.join(columns)} of claim {claim}, abstract {name}, or out of "
             "range; make it from this very --run")
    return numbers

def read_graph(folder, corpus, ids, neighbours):
    """Return {abstract_id: [neighbours, nearest first]}; corpus: sha256 of that with these ids."""
    try:
        meta = json.loads(Path(folder, "meta.json").read_bytes())
        for name, mark in meta["files"].items():
            data = Path(folder, name).read_bytes()
            if mark != [len(data), zlib.crc32(data)] or meta["corpus"] != corpus:
                raise ValueError(f"{name} is damaged or made from another corpus")
        places = np.load(Path(folder, "neighbours.npy"))[:, :neighbours]
        return dict(zip(ids, np.array(ids, object)[places].tolist()))
    except (OSError, ValueError, LookupError, TypeError) as error:
        fail(folder, f"no neighbour graph ({error}); make it with 01_index.py graph --force")

# -------------------- Models
def mono_t5(name, device, model_kwargs, **how):
    """Load monoT5. It scores by the logit of true minus that of false; the sigmoid is P(true)."""
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
    module.t5 = AutoModelForSeq2SeqLM.from_pretrained(name, **how, **model_kwargs)
    module.tokenizer = AutoTokenizer.from_pretrained(name, **how)
    return CrossEncoder(modules=[module], device=device)

def load_reranker(name, flags, **how):
    """Load a cross-encoder, a multi-vector model or monoT5, as its folder says."""
    import torch
    from sentence_transformers import CrossEncoder, MultiVectorEncoder
    from sentence_transformers.util import load_file_path
    from transformers import AutoConfig
    kind = str(AutoConfig.from_pretrained(name, trust_remote_code=False).architectures)
    if saved := load_file_path(name, "config_sentence_transformers.json"):
        kind = str(json.loads(Path(saved).read_bytes()).get("model_type") or kind)
    train = "epochs" in flags
    if train or re.search("CrossEncoder|SequenceClassification|CausalLM", kind):
        model = CrossEncoder(name, default_prompt_name=flags.prompt_name, **how)
    elif "ConditionalGeneration" in kind:
        model = mono_t5(name, **how)
    elif re.search("MultiVector|ColBERT", kind) and not flags.verdicts:
        print(f"{name} has its own length, takes no prompt and one device", file=sys.stderr)
        return MultiVectorEncoder(name, **how)
    else:
        fail(name, "it has no head for a logit; 03_rerank.py train makes a reranker of it")
    if model.num_labels != 1:
        fail(name, f"it has {model.num_labels} labels, a reranker has one; see 05_classify.py")
    model.max_seq_length = min(flags.max_length, model.max_seq_length or flags.max_length)
    if flags.prompt is not None:
        model.prompts["own"], model.default_prompt_name = flags.prompt, "own"
    if not train:
        model.activation_fn = torch.nn.Identity()
        if not model.keep_in_fp32_modules:  # in half precision, abstracts get equal scores
            layers = [path for path, part in model.named_modules() if type(part) is torch.nn.Linear]
            model.set_keep_in_fp32_modules(layers[-1:])
    return model

def truncated(model, pairs):
    """Return the abstracts of (claim, abstract) pairs; only they are cut, no claim or template."""
    prompt, texts = model.prompts.get(model.default_prompt_name), []
    empty = model.preprocess([(claim, "") for claim, _ in pairs], prompt=prompt)
    # In a chat template, the first and last word may split into more tokens
    limit = model.max_seq_length - 4 * ("message" in model.modalities)
    rooms = (limit - empty["attention_mask"].sum(dim=1)).tolist()
    coded = model.tokenizer([text for _, text in pairs], add_special_tokens=False, verbose=False)
    for row, (claim, text) in enumerate(pairs):
        if rooms[row] < 1:
            fail("--max-length", f"{limit} tokens have no room beside the claim {claim!r:.60}")
        if len(coded["input_ids"][row]) > rooms[row]:
            text = text[: coded.token_to_chars(row, rooms[row] - 1).end]
        texts.append(text)
    return texts

# -------------------- Scores
def score_pairs(model, pool, args, pairs):
    """Return the scores of (claim, abstract) pairs as an array, and which ones are truncated."""
    claims, texts = map(list, zip(*pairs))
    if hasattr(model, "encode_query"):  # late interaction: MaxSim of token vectors
        once = list(dict.fromkeys(claims))
        vectors = dict(zip(once, model.encode_query(once, batch_size=args.batch_size)))
        claims = [vectors[claim] for claim in claims]
        texts = model.encode_document(texts, batch_size=args.batch_size)
        scores = model.similarity_pairwise(claims, texts)
        return scores.float().cpu().numpy(), [False] * len(pairs)
    short, share = truncated(model, pairs), -(-len(pairs) // len(args.device))
    scores = model.predict(
        list(zip(claims, short)), batch_size=args.batch_size, pool=pool, chunk_size=share)
    return scores, [text != whole for text, whole in zip(short, texts)]

def score_groups(claims, texts, score, path, pairs):
    """Score (claim_id, abstract_id) pairs; path holds finished groups, a JSON line each."""
    from tqdm.auto import tqdm
    known = {}
    with open(path, "a+", encoding="utf-8") as file:
        file.seek(0)
        for line in file:
            with contextlib.suppress(ValueError):  # a torn line is scored again
                known |= {tuple(row[:2]): row for row in json.loads(line)}
        left = [pair for pair in pairs if pair not in known]
        for start in tqdm(range(0, len(left), GROUP), desc=f"rerank, {GROUP} pairs each"):
            group = left[start : start + GROUP]
            scores, flags = score([(claims[claim], texts[name]) for claim, name in group])
            for row in np.flatnonzero(~np.isfinite(scores))[:1]:
                fail("claim {}, abstract {}".format(*group[row]), "the score is not a finite "
                     "number; take --dtype fp32, or train with a lower --lr")
            rows = [(*pair, *rest) for pair, *rest in zip(group, scores.tolist(), flags)]
            file.write("\n" + json.dumps(rows))
            file.flush()
            known |= dict(zip(group, rows))
    return [known[pair] for pair in pairs]

def score_run(pairs, score, graph, args):
    """Score pairs; with a graph, then neighbours of the best in rounds (AlexUNLP-FMT 2025)."""
    import pandas as pd
    rows, seen = [], set()
    for _ in range(1 + args.rounds):
        rows += score(pairs)
        seen.update(pairs)
        table, near = pd.DataFrame(rows, columns=[*KEY, "score", "truncated"]), {}
        for claim, group in table.groupby("claim_id", sort=False):
            for name in group.nlargest(args.beam, "score")["abstract_id"]:
                near |= dict.fromkeys((claim, other) for other in graph.get(name, ()))
        pairs = [pair for pair in near if pair not in seen]
        if not pairs:
            break
    return table

def scored(number, task, pairs, claims, texts, graph, args):
    """Return the table of score_run by a model, on several devices if it is a cross-encoder."""
    import torch
    name, pool = args.model[number], None
    model = open_model(load_reranker, name, args, args.dtype, flags=args)
    if hasattr(model, "predict"):  # a claim that leaves no room ends the script before any score
        truncated(model, [(claims[claim], "") for claim in dict(pairs)])
    if len(args.device) > 1 and hasattr(model, "predict") and not hasattr(model[0], "t5"):
        pool = model.start_multi_process_pool(args.device)
        torch.cuda.empty_cache()  # the model has moved into the workers
    score = functools.partial(score_pairs, model, pool, args)
    path = parts_of(args.out, task, args) / f"{number}.jsonl"
    args.force = False  # the next model keeps what this one finishes
    score = functools.partial(score_groups, claims, texts, score, path)
    try:
        return score_run(pairs, score, graph, args)
    finally:
        if pool:
            model.stop_multi_process_pool(pool)

def combined(logits, stance, alpha):
    """ComboScorer (+VeriRel 2025, eq. 5): (1 - alpha) sigmoid(s) + alpha (P(SUP) + P(REF))."""
    from scipy.special import expit
    return (1 - alpha) * expit(logits) + alpha * stance

def blended(table, weight):
    """(1 - weight) z(score) + weight z(first) in each claim; what first lacks counts lowest.

    z: (score - mean) / standard deviation; 0 where all are equal.
    """
    scores, claims = table[["score", "first"]], table["claim_id"]
    scores = scores.fillna(scores.groupby(claims).transform("min"))
    by = scores.groupby(claims)
    z = (scores - by.transform("mean")) / by.transform("std", ddof=0).replace(0, 1)
    return (1 - weight) * z["score"] + weight * z["first"]

def rrf(runs):
    """Sum over runs of 1 / (k + rank), a pair at a time (Cormack et al. 2009)."""
    import pandas as pd
    table = pd.concat(runs).eval(f"score = 1 / ({RRF_K} + rank)")
    return table.groupby(KEY, sort=False, as_index=False)["score"].sum()

def ranked(table, order):
    """Return a run, best first; equal scores by order, {abstract_id: place in the corpus}."""
    claim, place = table["claim_id"].factorize()[0], table["abstract_id"].map(order)
    table = table.iloc[np.lexsort((place, -table["score"], claim))]
    return table.assign(rank=table.groupby("claim_id").cumcount() + 1)[RUN]

def rerank(args):
    """Score the first candidates of each claim."""
    extra = filter(None, [args.graph, args.verdicts])
    task = task_of(args, args.run, args.claims, args.corpus, *extra, models=args.model)
    if up_to_date(args, task, args.out):
        return {"made": []}
    claims, texts, graph = read_claims(args.claims), read_texts(args.corpus), {}
    run = read_table(args.run, RUN, claim_id=claims, abstract_id=texts)
    run = run[run["rank"] <= args.depth].rename(columns={"score": "first"})[[*KEY, "first"]]
    if args.verdicts:
        shares = read_numbers(args.verdicts, ["p_supports", "p_refutes"], run, 0, 1)
        run["stance"] = shares.sum(axis=1)
    if args.graph:
        corpus = task["inputs"][str(Path(args.corpus))]
        graph = read_graph(args.graph, corpus, list(texts), args.neighbours)
    pairs, order = list(map(tuple, run[KEY].values)), {name: n for n, name in enumerate(texts)}
    runs, models = [], []
    for number, name in enumerate(args.model):
        if name.endswith(".tsv"):
            if args.graph:
                fail("--graph", f"{name} is no model to score neighbours with; fuse the runs")
            table = run.assign(score=read_numbers(name, ["score"], run), truncated=False)
        else:
            table = scored(number, task, pairs, claims, texts, graph, args)
            table = table.merge(run, on=KEY, how="left")
        ties, cut = table.duplicated(["claim_id", "score"]).sum(), table["truncated"].sum()
        models.append({"model": name, "pairs": len(table), "equal_scores": int(ties),
                       "truncated": int(cut)})
        if args.verdicts:
            table["score"] = combined(table["score"], table["stance"], args.alpha)
        if args.first_stage:
            table["score"] = blended(table, args.first_stage)
        runs.append(ranked(table, order))
    table = ranked(rrf(runs), order) if len(runs) > 1 else runs[0]
    table = table[table["rank"] <= (args.top_k or len(table))]
    facts = {"rows": len(table), "models": models}
    with written(args.out, task, **facts) as path:
        table.to_csv(path, sep="\t", index=False, float_format="%.9g", lineterminator="\n")
    remove(f"{args.out}.parts")
    return {"made": [args.out], **facts}

# -------------------- Train
def read_examples(path, claims, texts, loss):
    """Return a table of tuple, place (0: the positive, or a pair), claim, abstract, label."""
    import pandas as pd
    rows = []
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                example, label = json.loads(line), 1.0
                if "positive" in example or loss in ("margin", "mnrl"):
                    names = [example["positive"], *example["negatives"]]
                else:
                    names, label = [example["abstract_id"]], float(example["target"])
                if not 0 <= label <= 1:
                    raise ValueError(f"target {label}")
                claim = claims[example["claim_id"]]
                for place, name in enumerate(names):
                    rows.append((number, place, claim, texts[name], 0.0 if place else label))
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                fail(f"{path}:{number}", f"{error!r}; wanted: a pair or tuple of 02_retrieve.py "
                     "mine, known ids, target 0 to 1; --loss margin and mnrl read tuples only")
    table = pd.DataFrame(rows, columns=["tuple", "place", "claim", "abstract", "label"])
    if not table["label"].any() or (loss == "margin" and table["label"].all()):
        fail(path, "no positive, or no negative for margin: nothing to learn; mine others")
    return table

def rows_of(examples, loss):
    """Return the table that a loss reads."""
    if loss == "margin":  # a row for each negative
        first = examples["place"] == 0
        table = examples[first].merge(examples[~first], on=["tuple", "claim"])
        return table[["claim", "abstract_x", "abstract_y"]].assign(label=-1.0)
    if loss == "mnrl":  # as many negatives as all tuples have
        table = examples.pivot(index=["tuple", "claim"], columns="place", values="abstract")
        table = table.dropna(axis=1).rename(columns=str)
        print(f"{len(examples) - table.size} negatives are left out, so that all tuples fit")
        return table.reset_index("claim")
    table = examples[["claim", "abstract", "label"]].drop_duplicates()
    if loss in ("lambda", "listnet", "ranknet"):
        return table.groupby("claim", sort=False, as_index=False).agg(list)
    return table

def loss_of(model, args):
    """Return the loss on logits that --loss names; mse and l1 compare sigmoids with targets."""
    from sentence_transformers.cross_encoder import losses
    from torch import nn
    loss = getattr(losses, LOSSES[args.loss])(model)
    if args.loss in ("mse", "l1"):
        loss.activation_fn = nn.Sigmoid()
    if args.loss == "l1":
        loss.loss_fct = nn.L1Loss()
    if args.loss == "margin":  # max(0, margin - (s_pos - s_neg)): a hinge whose label is -1
        loss.loss_fct = nn.HingeEmbeddingLoss(margin=args.margin)
    return loss

def dev_evaluator(model, paths, texts, depth):
    """Return the evaluator of a reranked run; paths: its claims, their qrels, the run."""
    from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator
    claims, samples = read_claims(paths[0]), []
    known = {"claim_id": claims, "abstract_id": texts}
    qrels = read_table(paths[1], [*KEY, "label"], label=LABELS, **known).query("label != 'NEI'")
    run = read_table(paths[2], RUN, **known).query("rank <= @depth & claim_id in @qrels.claim_id")
    if run.empty:
        fail(paths[2], "no candidates of dev claims with evidence; give another --dev-run")
    pairs = [(claims[claim], texts[name]) for claim, name in run[KEY].values]
    run = run.assign(text=truncated(model, pairs))
    for claim, rows in run.groupby("claim_id", sort=False):
        samples.append({"query": claims[claim], "documents": rows["text"].tolist(),
                        "positive": rows.merge(qrels, on=KEY)["text"].tolist()})
    print(f"dev: {len(samples)} of {qrels['claim_id'].nunique()} claims have candidates")
    return CrossEncoderRerankingEvaluator(
        samples, name="dev", always_rerank_positives=False, write_csv=False)

def train(args):
    """Fine-tune a cross-encoder, weights in fp32 whatever the checkpoint is stored in."""
    NEUTRAL.discard("batch_size")  # here it changes the weights
    dev = [f"{args.data}/{name}.{args.dev_split}.tsv" for name in ("claims", "qrels")]
    dev.append(args.dev_run)
    if not all(map(os.path.isfile, dev)):
        print(f"warning: no dev evaluation without {', '.join(dev)}", file=sys.stderr)
        dev = []
    task = task_of(args, args.examples, args.claims, args.corpus, *dev, models=[args.model])
    if up_to_date(args, task, args.out):
        return {"made": []}
    claims, texts = read_claims(args.claims), read_texts(args.corpus)
    examples = read_examples(args.examples, claims, texts, args.loss)
    one_gpu(args)
    import transformers
    from datasets import Dataset
    from sentence_transformers import cross_encoder
    transformers.logging.set_verbosity_error()  # a new head is wanted here
    transformers.set_seed(args.seed)
    model = open_model(load_reranker, args.model, args, "fp32", flags=args)
    pairs, short = examples[["claim", "abstract"]].values.tolist(), []
    for start in range(0, len(pairs), GROUP):  # the tokens of all would take gigabytes
        short += truncated(model, pairs[start : start + GROUP])
    table = rows_of(examples.assign(abstract=short), args.loss)
    evaluator = dev_evaluator(model, dev, texts, args.dev_depth) if dev else None
    if dev:
        print(f"before training: nDCG@10 on dev {evaluator(model)['dev_ndcg@10']:.4f}")
    make = functools.partial(
        cross_encoder.CrossEncoderTrainer, model, evaluator=evaluator, loss=loss_of(model, args),
        train_dataset=Dataset.from_pandas(table, preserve_index=False))
    log = fit(
        make, cross_encoder.CrossEncoderTrainingArguments, model, parts_of(args.out, task, args),
        args, MEASURE if dev else None, per_device_train_batch_size=args.batch_size,
        prompts=model.prompts.get(model.default_prompt_name),
        weight_decay=0.01,  # Kiepura & Lam 2025
        lr_scheduler_type="cosine" if args.loss == "l1" else "linear",  # +VeriRel 2025
        batch_sampler="no_duplicates" if args.loss == "mnrl" else "batch_sampler")
    curve = [entry[MEASURE] for entry in log if MEASURE in entry]
    facts = {"rows": len(table), "dev": curve,
             "truncated": int((examples["abstract"] != short).sum())}
    with written(args.out, task, log=log, **facts) as path:
        model.save_pretrained(str(path), create_model_card=False)
    remove(f"{args.out}.parts")
    return {"made": [args.out], **facts}

# -------------------- Command line
def main():
    job, parser, shared, words = command_line("rerank", "train")
    add, data, work, split = parser.add_argument, shared.data, shared.work, shared.split
    share, count, positive = between(0, 1), between(1, kind=int), between(1e-9)
    add("--claims", default=f"{data}/claims.{split}.tsv", help="claims")
    add("--corpus", default=f"{data}/corpus.jsonl", help="abstracts")
    add("--max-length", type=count, default=512, help="tokens; abstracts are truncated")
    add("--prompt", help="instruction, in place of the model's own")
    add("--prompt-name", help="which of the model's own prompts")
    if job == "rerank":
        add("--run", default=f"{work}/{split}/hybrid.tsv", help="run to rerank")
        add("--model", nargs="+", default=[f"{work}/models/reranker"], help="folders or hub ids: "
            "cross-encoders, causal rerankers, multi-vector models, monoT5; a .tsv: its scores")
        add("--out", default=f"{work}/{split}/rerank.tsv", help="reranked run")
        add("--depth", type=count, default=20, help="candidates per claim")
        add("--top-k", type=between(0, kind=int), default=0, help="abstracts per claim; 0: all")
        add("--first-stage", type=share, default=0.0, help="weight of --run's z-scores")
        one = parser.add_mutually_exclusive_group().add_argument
        one("--graph", help="folder of a neighbour graph: neighbours of the best join")
        add("--rounds", type=count, default=20, help="graph: rounds at most")
        add("--neighbours", type=count, default=10, help="graph: neighbours per abstract")
        add("--beam", type=count, default=30, help="graph: abstracts expanded per round")
        one("--verdicts", help="verdicts of --run: P(SUPPORTS) + P(REFUTES) joins")
        add("--alpha", type=share, default=0.5, help="weight of the verdicts")
        add("--batch-size", type=count, default=32, help="pairs per batch")
        add("--dtype", choices=("auto", "fp32", "bf16", "fp16"), default="auto",
            help="auto: half precision on a GPU, last layer in fp32")
    else:
        add("examples", nargs="?", default=f"{work}/{split}/examples.jsonl", help="pairs or tuples")
        add("--model", default="data/models/minilm", help="encoder or reranker")
        add("--out", type=os.path.normpath, default=f"{work}/models/reranker", help="trained model")
        add("--loss", choices=LOSSES, default="bce", help="margin and mnrl need tuples")
        add("--margin", type=positive, default=0.2, help="margin: lead of a positive")
        add("--epochs", type=positive, default=3, help="passes, also fractions")
        add("--lr", type=positive, default=2e-5, help="learning rate")
        add("--batch-size", type=count, default=16, help="rows per batch")
        add("--accumulate", type=count, default=1, help="batches per step")
        add("--dev-split", default="dev", help="dev split; the epoch that is best on it is kept")
        add("--dev-run", default=f"{work}/dev/hybrid.tsv", help="run of the dev split")
        add("--dev-depth", type=count, default=20, help="candidates per claim")
        add("--patience", type=count, default=2, help="epochs without a gain on dev")
    finish({"rerank": rerank, "train": train}[job], parser.parse_args(words))

# --- helpers (same in all six scripts)
PACKAGES = ("numpy", "pandas", "torch", "transformers", "sentence_transformers", "bm25s", "openai")
MADE_BY = {  # names of files and folders that a script makes, and the command
    "bm25": "01_index.py --indexes bm25", "dense": "01_index.py --indexes dense",
    "splade": "01_index.py --indexes splade", "graph": "01_index.py graph",
    "encoder": "01_index.py train", "hybrid.tsv": "02_retrieve.py",
    "examples.jsonl": "02_retrieve.py mine", "reranker": "03_rerank.py train",
    "rerank.tsv": "03_rerank.py", "llm.tsv": "04_llm_rerank.py",
    "classifier": "05_classify.py train", "verdicts.tsv": "05_classify.py",
    "llm_verdicts.tsv": "05_classify.py llm", "claims.jsonl": "05_classify.py --aggregate FILE",
    "pool.tsv": "06_evaluate.py pool",
    **dict.fromkeys(("bm25.tsv", "dense.tsv", "splade.tsv"), "02_retrieve.py"),
    **dict.fromkeys(("minilm", "splade-tiny", "smollm2"), "data/download.py models")}
SPLITS = {"train": "train", "mine": "train", "fit": "dev"}  # of jobs, where it is not test
START, LOCKS, WARNINGS = time.monotonic(), [], []

def printable(text):
    """Return a text on one line, ? for control characters, which could steer a terminal."""
    line = " ".join(str(text).split())
    return "".join(c if c.isprintable() else "?" for c in line)

def warn(where, what):
    """Print a line on stderr, and keep it for the provenance of outputs."""
    WARNINGS.append(printable(f"warning: {where}: {what}"))
    print(WARNINGS[-1], file=sys.stderr)

def fail(where, what):
    """Bad input or usage: one line on stderr, exit status 2."""
    print(printable(f"error: {where}: {what}"), file=sys.stderr)
    sys.exit(2)

def read_lines(path):
    """Yield (number, line) of a UTF-8 file as an editor shows them, blank lines left out."""
    filled_lines, damaged = 0, []
    with open(path, "rb") as file:
        for number, data in enumerate(file, 1):
            if number == 1 and data[:2] in (b"\x1f\x8b", b"\xff\xfe", b"\xfe\xff"):
                kind = "compressed (gzip)" if data[:1] == b"\x1f" else "UTF-16"
                fail(path, f"the file is {kind}; see data/convert.py, or save it as UTF-8 text")
            if number == 1:
                data = data.removeprefix(b"\xef\xbb\xbf")  # byte order mark
            line = data.decode(errors="replace").rstrip("\r\n")
            if "\ufffd" in line and line.encode() != data.rstrip(b"\r\n"):
                damaged.append(number)
            if line.strip():
                filled_lines += 1
                yield number, line
    if damaged:
        warn(f"{path}:{damaged[0]}", f"{len(damaged)} lines are not UTF-8; U+FFFD replaces what "
             "cannot be read")
    if not filled_lines:
        fail(f"{path}:1", "the file is empty; a table needs a header, a corpus one abstract a line")

def unquoted(fields):
    """Return a column of texts without the quotation marks that pandas puts around a field."""
    inner = fields.str.slice(1, -1)
    quoted = fields.str.startswith('"') & fields.str.endswith('"') & (fields.str.len() > 1)
    quoted &= ~inner.str.replace('""', "", regex=False).str.contains('"', regex=False)
    return fields.mask(quoted, inner.str.replace('""', '"', regex=False))

def read_table(path, columns, **known):
    """Read a TSV file as strings, one row a line; a run by claim and rank, with numbers.

    known: the values that a column may hold. The first bad row ends the script, with its line.
    """
    import pandas as pd
    numbers, lines = zip(*read_lines(path))
    header = [name.strip('"') for name in lines[0].split("\t")]
    if not set(columns) <= set(header) or len(set(header)) < len(header):
        fail(f"{path}:{numbers[0]}", f"columns {', '.join(header)}, wanted {', '.join(columns)}; "
             "data/convert.py reads other formats, --columns renames")
    for number, line in zip(numbers, lines):
        fields = line.count("\t") + 1
        if fields != len(header):
            fail(f"{path}:{number}", f"{fields} fields, the header has {len(header)}; fix the row, "
                 "or convert the file by data/convert.py")
    table = pd.read_csv(
        io.StringIO("\n".join(lines)), sep="\t", dtype=str, na_filter=False, header=0, names=header,
        index_col=False, lineterminator="\n", quoting=3)  # csv.QUOTE_NONE
    table.index = numbers[1:]
    for column in header:
        if table[column].str.startswith('"').any():
            table[column] = unquoted(table[column])
    if "claim" in columns:
        table["claim"] = table["claim"].str.normalize("NFC")
    ids = [column for column in columns if column.endswith("_id")]
    bad = {f"{column} is empty": table[column].str.strip() == "" for column in columns}
    for column in ids:
        bad[f"white space around {column}"] = table[column] != table[column].str.strip()
    bad |= {f"unknown {column}": ~table[column].isin(known[column]) for column in known}
    bad["there is an earlier row for this"] = table.duplicated(ids)
    if "rank" in columns:
        claim = table["claim_id"].factorize()[0]
        values = table[["rank", "score"]].apply(pd.to_numeric, errors="coerce").astype(float)
        bad["score is not a finite number"] = ~np.isfinite(values["score"])
        bad["rank is not 1, 2, 3"] = values["rank"] != values.groupby(claim)["rank"].rank("first")
    for what, rows in bad.items():
        for number in rows.index[rows][:1]:
            value = table.loc[number].get(what.removeprefix("unknown "), "")
            what = f"{what} {value!r:.60}" if value else what
            fail(f"{path}:{number}", f"{what}: {' '.join(table.loc[number, ids])}; fix the row, or "
                 "see data/convert.py")
    if "rank" in columns:
        table = table.assign(rank=values["rank"].astype(int), score=values["score"])
        table = table.iloc[np.lexsort((table["rank"], claim))]
    return table.reset_index(drop=True)

def read_corpus(path):
    """Read {abstract_id: record} in file order; texts in NFC; an abstract that is no text is ""."""
    corpus, empty = {}, 0
    for number, line in read_lines(path):
        try:
            record = json.loads(line)
            if "\\ud" in line.lower():  # lone surrogates become U+FFFD
                text = json.dumps(record, ensure_ascii=False).encode("utf-16", "surrogatepass")
                record = json.loads(text.decode("utf-16", "replace"))
            name = record["abstract_id"]
        except (ValueError, LookupError, TypeError, RecursionError):
            fail(f"{path}:{number}", "not a JSON object with an abstract_id; fix the line")
        if type(name) not in (str, int):
            fail(f"{path}:{number}", f"abstract_id {name!r:.60} is no string or integer; put it "
                 "into quotation marks, spelt as in the qrels")
        name = str(name)
        if name in corpus or not name or name != name.strip() or re.search(r"[\t\r\n]", name):
            fail(f"{path}:{number}", f"abstract_id {name!r:.60} is empty, not unique, or has white "
                 "space that a table cannot hold; fix it")
        for field, value in record.items():
            if isinstance(value, str):
                record[field] = unicodedata.normalize("NFC", value)
        if not isinstance(record.get("abstract"), str):
            record["abstract"] = ""
        corpus[name] = record
        empty += not record["abstract"].strip()
    if empty:
        warn(path, f"{empty} abstracts without text, kept as empty")
    return corpus

def text_of(record, fields=("title", "abstract"), separator=" "):
    """Join the fields of a record that hold text; the items of a list are joined by commas."""
    texts = []
    for value in map(record.get, fields):
        items = value if isinstance(value, list) else [value]
        known = [str(item).strip() for item in items if item is not None and item == item]  # no NaN
        texts.append(", ".join(filter(None, known)))
    return separator.join(filter(None, texts))

def read_object(path):
    """Return the JSON object in a file, {} if there is none."""
    try:
        found = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}

def digest(path):
    """Return the sha256 of a file, of an index's meta.json, or of all files of a model's folder."""
    path, total = Path(path), hashlib.sha256()
    if (path / "meta.json").is_file():
        path = path / "meta.json"
    if not path.is_dir():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    for file in sorted(path.rglob("*")):
        if file.is_file():
            total.update(f"{file.relative_to(path)} {digest(file)}\n".encode())
    return total.hexdigest()

def missing(path, args):
    """Return what to do about an input that does not exist."""
    path, place = str(path), f"--data {args.data} --work {args.work}"
    command = MADE_BY.get(Path(path).name)
    if not command:
        place = f"--data {args.data} and --split {args.split}"
        return f"no such file, and no script makes it; check {place}"
    if path.endswith((".tsv", ".jsonl")):
        place += f" --split {args.split}"
    if command.startswith("data/"):
        place = ""  # it takes neither
    flags = [f"--{name}".replace("_", "-") for name, value in vars(args).items() if value == path]
    other = f", or name another one by {flags[0]}" if flags else ""
    return f"it is missing; make it by: python {command} {place}{other}"

def task_of(args, *files, models=()):
    """Return what decides the bytes of an output: arguments, and digests of what is read.

    A model that is no folder is known by its name on the hub.
    """
    arguments = {name: value for name, value in vars(args).items() if name not in NEUTRAL}
    inputs = {}
    for path in map(str, (*files, *models)):
        name_on_hub = path in map(str, models) and path.count("/") < 2
        if not Path(path).exists() and not name_on_hub:
            fail(path, missing(path, args))
        inputs[path] = digest(path) if Path(path).exists() else ""
        made = read_object(f"{path}.meta.json") if Path(path).is_dir() else {}
        if made.get("sha256", inputs[path]) != inputs[path]:
            fail(path, "its files have changed since it was made; make it again with --force, or "
                 f"remove {path}.meta.json to use it as it is")
    return {"arguments": arguments, "inputs": inputs}

def lock(path):
    """Lock an output until the process ends; another command that makes it is refused."""
    from filelock import FileLock, Timeout
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        LOCKS.append(FileLock(f"{path}.lock").acquire(timeout=0))
    except Timeout:
        fail(path, "another command is making it; wait until that one ends")
    if len(LOCKS) == 1:
        atexit.register(unlock)

def unlock():
    for one in LOCKS:
        Path(one.lock.lock_file).unlink(missing_ok=True)

def check_owner(path, task):
    """Refuse an output that the task reads, or a folder that another job or the user made."""
    if path.resolve() in {Path(name).resolve() for name in task["inputs"]}:
        fail(path, "this command reads it; give another --out")
    arguments = read_object(f"{path}.meta.json").get("arguments")
    job = arguments.get("job") if isinstance(arguments, dict) else task["arguments"]["job"]
    ours = Path(f"{path}.meta.json").exists() and job == task["arguments"]["job"]
    if path.is_dir() and any(path.iterdir()) and not ours:
        fail(path, "this command did not make it; give another --out")

def up_to_date(args, task, *outs):
    """Return whether this very task made outs, which are locked until the process ends."""
    outs = list(map(Path, outs))
    for path in outs:
        lock(path)
        check_owner(path, task)
    fresh = not args.force
    for path in outs:
        made = read_object(f"{path}.meta.json")
        fresh = fresh and path.exists() and task.items() <= made.items()
    for path in outs if fresh else ():
        remove(f"{path}.parts")  # left by a process that was killed at its very end
        print(f"up to date: {path}")
    for line in made.get("warnings", []) if fresh else ():
        print(line, file=sys.stderr)
    return fresh

@contextlib.contextmanager
def written(path, task, **facts):
    """Yield a temporary path. What is made there becomes path, whole, with its provenance."""
    meta, path = Path(f"{path}.meta.json"), Path(path).resolve()  # behind a symbolic link
    new = Path(f"{path}.tmp")
    remove(new)
    try:
        yield new
        modules = {name: sys.modules[name].__version__ for name in PACKAGES if name in sys.modules}
        gpu = "torch" in modules and sys.modules["torch"].cuda
        device = gpu.get_device_name() if gpu and gpu.is_initialized() else "no GPU of CUDA"
        made = {"command": sys.argv, "sha256": digest(new), "packages": modules, "device": device,
                "warnings": WARNINGS}
        text = json.dumps(task | made | facts | spent(), indent=1, ensure_ascii=False) + "\n"
        meta.write_text(json.dumps({"arguments": task["arguments"]}))  # vouches for no bytes
        if path.is_dir():
            remove(path)
        new.rename(path)
        meta.write_text(text, encoding="utf-8")
    finally:
        remove(new)

def remove(*paths):
    """Delete files and folders, where they exist."""
    for path in map(Path, paths):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

def spent():
    """Return seconds and peak memory (MiB) of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak //= 1024 if sys.platform == "linux" else 1024**2
    return {"seconds": round(time.monotonic() - START, 1), "peak_mib": peak}

if not sys.stderr.isatty():  # tqdm prints a plain line every ten seconds
    os.environ.setdefault("TQDM_MININTERVAL", "10")
    os.environ.setdefault("TQDM_BAR_FORMAT", "{desc}: {n_fmt}/{total_fmt} [{elapsed}]\n")

class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action):  # no "(default: None)"
        plain = any(action.default is nothing for nothing in (None, False, ""))
        return action.help if plain else super()._get_help_string(action)

def between(low, high=1e9, kind=float):
    """Return an argparse type: a number from low to high."""
    def number(text):
        if not low <= kind(text) <= high:
            raise argparse.ArgumentTypeError(f"{text} is not a number from {low:g} to {high:g}")
        return kind(text)
    return number

def device(text):
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text} is none of auto, cpu, mps, cuda, cuda:1")
    return text

def command_line(*functions):
    """Return (parser, {job: its parser}) with the flags of all jobs. The first job is the default.

    The first line of a function's docstring is the job's sentence in --help.
    """
    script, names = Path(sys.argv[0]).name, [function.__name__ for function in functions]
    parser = argparse.ArgumentParser(
        prog=script, description=sys.modules["__main__"].__doc__, formatter_class=Help,
        usage=f"{script} [{' | '.join(names)}] [flags]",
        epilog=f"{script} JOB --help shows the flags of a job; without a job: {names[0]}")
    jobs = parser.add_subparsers(title="jobs", metavar="", prog=script)
    for name, function in zip(names, functions):
        sentence = " ".join(function.__doc__.split("\n\n")[0].split())
        job = jobs.add_parser(
            name, help=sentence, description=sentence, formatter_class=Help, allow_abbrev=False)
        job.error = lambda message, name=name: fail(script, f"{message}; see {name} --help")
        job.set_defaults(job=f"{script} {name}", function=function)
        add = job.add_argument_group("data and device").add_argument
        add("--data", default="data/demo", help="folder of corpus, claims and qrels")
        add("--work", help="folder of everything made from them (default: work/ and the name of "
            "the data folder)")
        add("--split", default=SPLITS.get(name, "test"), help="which claims")
        add("--seed", type=between(0, 2**32 - 1, int), default=13, help="of every random choice")
        add("--device", nargs="+", type=device, default=["auto"], help="cpu, cuda, or cuda:0 ...")
        add("--force", action="store_true", help="make outputs again, from the start")
    return parser, jobs.choices

def arguments_of(parser, jobs):
    """Return the arguments; {data}, {work} and {split} in defaults are filled in."""
    words, names, script = sys.argv[1:], list(jobs), Path(sys.argv[0]).name
    for word in words:
        if re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", word):
            fail(script, f"control characters in {word!r:.60}; rename the file")
    if words and words[0] in ("-h", "--help"):
        parser.parse_args(words)
    job = words.pop(0) if words and words[0] in jobs else names[0]
    first = words[0] if words else ""
    if job == names[0] and first[:1] != "-" and not Path(first).exists():  # a misspelt job?
        for near in difflib.get_close_matches(first, names, 1, 0.7):
            fail(script, f"no job {first}; did you mean {near}?")
    args, unknown = jobs[job].parse_known_args(words)
    if unknown:
        flags = re.findall(r"--[\w-]+", jobs[job].format_help())
        near = difflib.get_close_matches(unknown[0], flags, 1)
        advice = f"did you mean {near[0]}?" if near else f"see {job} --help"
        fail(script, f"unrecognized arguments: {' '.join(unknown)}; {advice}")
    args.work = args.work or f"work/{Path(args.data).resolve().name}"
    for name, value in vars(args).items():
        if isinstance(value, list):
            setattr(args, name, [filled(one, args) for one in value])
        else:
            setattr(args, name, filled(value, args))
    return args

def filled(value, args):
    """Return a default value with {data}, {work} and {split} filled in."""
    if isinstance(value, str) and value.startswith(("{data}", "{work}")):
        return value.format(data=args.data, work=args.work, split=args.split)
    return value

def finish(args):
    """Run the job and print its result as JSON; a fault of the disk is one line, Ctrl-C silence."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        print(json.dumps(args.function(args) | spent(), ensure_ascii=False), flush=True)
    except (KeyboardInterrupt, BrokenPipeError):  # Ctrl-C; | head
        unlock()
        os._exit(130)  # without tearing libraries down, which takes seconds
    except OSError as error:
        fail(error.filename or args.job, f"{error.strerror or error}; check path, rights and space")
    except Exception as error:
        text, flags = repr(error), ("--batch-size", "--max-length", "--top-k")
        if "Symlink loop" in text or "SafetensorError" in text:  # links, a full disk
            fail(args.job, f"{error}; check path, rights and space")
        if "memory" not in text.lower() or "illegal" in text:
            raise
        names = {"batch_size" if name == "batch" else name for name in vars(args)}
        flags = [flag for flag in flags if flag[2:].replace("-", "_") in names]
        fail(args.job, f"out of memory; lower {' or '.join(flags)}, and run it again to go on")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while the process ends
# --- end of helpers

# --- hub (same in 01, 02, 03, 04 and 05)
def offline_without_hub(name):
    """Use cached files alone if the hub cannot be reached: its client retries for minutes."""
    from huggingface_hub import constants, get_session
    if not Path(name).exists() and not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=5)
        except Exception:  # whatever its HTTP library raises
            constants.HF_HUB_OFFLINE = True
# --- end of hub

# --- models (same in 01, 02, 03 and 05)
def precision_of(args):
    """Return fp32, bf16 or fp16: --dtype, or what auto means: fp32 on a CPU, half on a GPU."""
    if args.dtype != "auto" or args.device[0] in ("cpu", "mps"):
        return args.dtype.replace("auto", "fp32")
    import torch
    if not torch.cuda.is_available():
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(False) else "fp16"

def open_model(load, name, args, dtype, **options):
    """Return load(name, ...), a sentence-transformers model; a bad one ends the script.

    dtype: fp32, bf16 or fp16. The model reads two inputs before anything depends on it.
    """
    import torch
    place = None if args.device == ["auto"] else args.device[0]
    precision = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    weights = {"dtype": precision, "use_safetensors": True}
    options |= {"device": place, "trust_remote_code": False, "model_kwargs": weights}
    print(f"loading {name}", file=sys.stderr)
    offline_without_hub(name)
    try:
        model = load(str(name), **options)
        words = len(model.tokenizer.get_vocab())
        for other in args.device[1:]:
            torch.empty(0, device=other)  # raises if there is no such device
        if hasattr(model, "predict"):
            model.predict([("a", "b"), ("a", "b c d")], show_progress_bar=False)
        else:
            model.encode_document(["a", "b c d"], show_progress_bar=False)
    except Exception as error:  # of many kinds: no such model, no network, no access, damaged files
        fail(name, f"cannot be loaded ({type(error).__name__}: {error}); see data/download.py")
    parts = [part for part in model.modules() if isinstance(part, torch.nn.Embedding)]
    sizes = [part.num_embeddings for part in parts]
    if sizes and not max(sizes) / 2 <= words <= max(sizes) + 64:  # added tokens may lack a row
        fail(name, f"tokenizer of {words} entries, embeddings of {max(sizes)}; copy it whole")
    return model
# --- end of models

# --- training (same in 01, 03 and 05)
def parts_of(out, task, args):
    """Return OUT.parts/ for unfinished work, emptied if it belongs to another task."""
    folder, mark = Path(f"{out}.parts"), json.dumps(task).encode()
    path = folder / "task.json"
    if args.force or not path.is_file() or path.read_bytes() != mark:
        remove(folder)
        folder.mkdir(parents=True)
        path.write_bytes(mark)
    return folder

def files_of(folder):
    """Return {name: [size, crc32]} of the files in a folder, without its meta.json."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "meta.json":
            data = np.memmap(path, mode="r") if path.stat().st_size else b""
            files[path.relative_to(folder).as_posix()] = [len(data), zlib.crc32(data)]
    return files

def newest_checkpoint(folder):
    """Return the newest whole checkpoint of a trainer, or None; torn or damaged ones go."""
    checkpoints = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    for path in reversed(checkpoints):
        if read_object(path / "meta.json").get("files") == files_of(path):
            return path
        remove(path)
    return None

def one_gpu(args):
    """Hide all GPUs but the first of --device: a Trainer multiplies its batch by those it sees."""
    kind, _, place = args.device[0].partition(":")
    if kind in ("auto", "cuda"):
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")
        if place and place not in map(str, range(len(seen))):
            fail("--device", f"no {args.device[0]} among GPUs {', '.join(seen)}")
        os.environ["CUDA_VISIBLE_DEVICES"] = seen[int(place or 0)]
    return argparse.Namespace(**vars(args) | {"device": [kind]})

def epochs_shown(measure):
    """Return a callback of a Trainer: one bar, its duration, one line an epoch, whole checkpoints.

    measure: the field of the log that decides on the best epoch, or None.
    """
    from transformers import ProgressCallback
    class Epochs(ProgressCallback):
        def on_step_end(self, how, state, control, **_):
            super().on_step_end(how, state, control)
            self.begun = getattr(self, "begun", (state.global_step, time.monotonic()))
            step, start = self.begun
            if state.global_step == step + 3:  # the first step is slow
                left = (time.monotonic() - start) / 3 * (state.max_steps - state.global_step)
                line = f"{state.max_steps} steps, about {left / 60:.0f} minutes without dev"
                self.training_bar.write(line, file=sys.stderr)

        def on_log(self, how, state, control, logs, **_):
            if not np.isfinite(logs.get("loss", 0)):
                fail("--lr", "the loss is not a finite number; lower it")

        def on_save(self, how, state, control, **_):
            folder = Path(how.output_dir, f"checkpoint-{state.global_step}")
            (folder / "meta.json").write_text(json.dumps({"files": files_of(folder)}))
            last = {name: value for line in state.log_history for name, value in line.items()}
            shown = [name for name in ("epoch", "loss", measure) if name in last]
            line = ", ".join(f"{name} {last[name]:.4f}" for name in shown)
            self.training_bar.write(line, file=sys.stderr)
    return Epochs()

def fit(make, arguments, model, folder, args, measure=None, **more):
    """Train with a checkpoint an epoch in folder, from the newest one on. Return the log.

    make: arguments to trainer. With a measure, the epoch that is best on dev is kept. The log is a
    list of {field: number}, without times: the same after an interruption.
    """
    import torch
    from transformers import EarlyStoppingCallback, ProgressCallback, logging
    checkpoint = newest_checkpoint(folder)
    state = read_object(checkpoint / "trainer_state.json") if checkpoint else {}
    if checkpoint and state["stateful_callbacks"]["TrainerControl"]["args"]["should_training_stop"]:
        more["max_steps"] = state["global_step"]  # killed after it had stopped early
    if measure:
        more |= {"eval_strategy": "epoch", "load_best_model_at_end": True,
                 "metric_for_best_model": measure, "greater_is_better": True}
    logging.disable_progress_bar()  # one for every file that is saved
    gpu = model.device.type == "cuda"
    bf16 = gpu and torch.cuda.is_bf16_supported(False)
    trainer = make(arguments(
        str(folder), num_train_epochs=args.epochs, learning_rate=args.lr, seed=args.seed,
        gradient_accumulation_steps=args.accumulate, bf16=bf16, fp16=gpu and not bf16,
        use_cpu=model.device.type == "cpu", dataloader_pin_memory=False, save_strategy="epoch",
        save_total_limit=2, logging_strategy="epoch", report_to="none", disable_tqdm=False,
        logging_nan_inf_filter=False, restore_callback_states_from_checkpoint=True, **more))
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(epochs_shown(measure))
    if measure:
        trainer.add_callback(EarlyStoppingCallback(args.patience))
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if best := trainer.state.best_model_checkpoint:  # the trainer keeps the last one if that fails
        safely = {"trust_remote_code": False, "model_kwargs": {"use_safetensors": True}}
        model.load_state_dict(type(model)(best, device="cpu", **safely).state_dict())
    log = [line for line in trainer.state.log_history if "train_runtime" not in line]
    return [{name: value for name, value in line.items() if "runtime" not in name
             and "per_second" not in name} for line in log]

def save(model, folder):
    """Save a trained model; its tokenizer as it was loaded, whatever it has truncated since."""
    backend = getattr(model.tokenizer, "backend_tokenizer", None)
    if backend:
        backend.no_truncation()
        backend.no_padding()
    model.save_pretrained(str(folder), create_model_card=False)
# --- end of training

if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__" and sys.platform == "linux":  # a worker of several devices
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: it ends with its parent
