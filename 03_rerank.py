# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "accelerate==1.15.0", "datasets==5.2.0", "numpy==2.4.6", "pandas==3.1.1",
#     "protobuf==7.36.2", "sentence-transformers==6.2.0", "sentencepiece==0.2.3",
#     "torch==2.13.0", "tqdm==4.70.1", "transformers==5.23.0",
# ]
# ///
"""
Rerank the candidates of a run with a cross-encoder, or train one.

Reads   a run, claims and corpus; --graph: 01_index.py graph; --verdicts: 05_classify.py
        train: examples.jsonl of 02_retrieve.py mine, and the dev split, if any
Writes  work/NAME/SPLIT/rerank.tsv; train: work/NAME/models/reranker/
        OUT.parts/ holds finished groups and checkpoints; an interrupted run resumes from them.
Prints  one line of JSON, last on stdout: pairs, truncated abstracts, equal scores

Examples
    python 02_retrieve.py --split train && python 02_retrieve.py mine && python 03_rerank.py train
    python 03_rerank.py --depth 50 --first-stage 0.5
    python 03_rerank.py --model BAAI/bge-reranker-v2-m3 --depth 200
    python 03_rerank.py --model Qwen/Qwen3-Reranker-0.6B --device cuda:0 cuda:1
    python 03_rerank.py --graph work/demo/index/graph --top-k 10
"""
# --- old constants (same in the scripts before their rewrite)
import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during imports: no traceback
LABELS = ("SUPPORTS", "REFUTES", "NEI")
RUN = ["claim_id", "abstract_id", "rank", "score"]
# Flags that decide no byte of an output, but for the rounding of batches on a device
NEUTRAL = {"force", "out", "device", "batch_size", "concurrency", "function", "flags"}
# --- end of old constants

import argparse
import contextlib
import ctypes
import difflib
import functools
import hashlib
import io
import json
import logging
import os
import re
import resource
import shlex
import shutil
import sys
import time
import unicodedata
import zlib
from pathlib import Path

import numpy as np

PAIR = ["claim_id", "abstract_id"]
GROUP = 1024                # pairs that are scored and stored at once
LENGTH = 512                # tokens of a pair, unless a model reads fewer
MONO_T5 = "Query: {} Document: {} Relevant:"  # Nogueira et al. 2020; it answers true or false
LOSSES = ("bce", "margin", "l1", "lambda", "mnrl")
NDCG = "dev_ndcg@10"        # decides on the best epoch
ALIKE = 1e-5                # a relative difference of scores below it is rounding in fp32
PROBES = [                  # the first pair must win: it alone is about one thing
    ("Sea ice in the Arctic is shrinking.", "Satellites show that Arctic sea ice is shrinking."),
    ("Sea ice in the Arctic is shrinking.", "The bakery opens at seven and sells fresh bread."),
    ("Bread is sold before eight o'clock.", "Satellites show that Arctic sea ice is shrinking.")]

# -------------------- Inputs
def read_abstracts(path):
    """Return {abstract_id: title and abstract}."""
    return {name: text_of(record) for name, record in read_corpus(path).items()}

def read_columns(path, columns, run, low=-1e308, high=1e308):
    """Return columns of another table (rows of run, columns); it must have every pair of run."""
    import pandas as pd
    table = run.merge(read_table(path, [*PAIR, *columns]), on=PAIR, how="left")
    numbers = table[columns].apply(pd.to_numeric, errors="coerce").to_numpy()
    bad = ~((low <= numbers) & (numbers <= high)).all(axis=1)
    for claim, name in table.loc[bad, PAIR].values[:1]:
        fail(path, f"no {' and '.join(columns)} of claim {claim}, abstract {name}, or out of "
             "range; make it from this very --run")
    return numbers

def read_candidates(args, claims, texts):
    """Return the first candidates of --run: a pair a row, its score there (first), its stance."""
    run = read_table(args.run, RUN, claim_id=claims, abstract_id=texts)
    run = run[run["rank"] <= args.depth].rename(columns={"score": "first"})[[*PAIR, "first"]]
    if args.verdicts:
        probabilities = read_columns(args.verdicts, ["p_supports", "p_refutes"], run, 0, 1)
        run["stance"] = probabilities.sum(axis=1)
    if run.empty:
        warn(args.run, f"it holds no candidates; {args.out} is empty, too")
    return run

def read_graph(folder, corpus, ids, neighbours):
    """Return {abstract_id: [neighbours, nearest first]}; corpus: sha256 of that with these ids."""
    try:
        if json.loads(Path(folder, "meta.json").read_bytes())["corpus"] != corpus:
            raise ValueError("it is made from another corpus")
        places = np.load(Path(folder, "neighbours.npy"))[:, :neighbours]
        return dict(zip(ids, np.array(ids, object)[places].tolist(), strict=True))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        fail(folder, f"no neighbour graph ({error}); make it with 01_index.py graph --force")

# -------------------- Models
def is_table(model):
    """Return whether --model names a run, which stands for its scores."""
    return model.endswith(".tsv")

def mono_t5(name, device, model_kwargs, **options):
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
    module.t5 = AutoModelForSeq2SeqLM.from_pretrained(name, **options, **model_kwargs)
    module.tokenizer = AutoTokenizer.from_pretrained(name, **options)
    return CrossEncoder(modules=[module], device=device)

def load_reranker(name, **options):
    """Load a cross-encoder, causal or not, a multi-vector model or monoT5, as its folder says."""
    from sentence_transformers import CrossEncoder, MultiVectorEncoder
    from sentence_transformers.util import load_file_path
    from transformers import AutoConfig
    kind = str(AutoConfig.from_pretrained(name, trust_remote_code=False).architectures)
    if saved := load_file_path(name, "config_sentence_transformers.json"):
        kind = str(json.loads(Path(saved).read_bytes()).get("model_type") or kind)
    if re.search("CrossEncoder|SequenceClassification|CausalLM", kind):
        return CrossEncoder(name, **options)
    if "ConditionalGeneration" in kind:
        return mono_t5(name, **options)
    if re.search("MultiVector|ColBERT", kind):
        return MultiVectorEncoder(name, **options)
    fail(name, "it has no head for a logit; 03_rerank.py train makes a reranker of it")

def is_cross_encoder(model):
    """Return whether a model reads claim and abstract at once, as all but multi-vector ones do."""
    return hasattr(model, "predict")

def set_up(model, args):
    """Give a cross-encoder the length and the prompt of the flags."""
    if model.num_labels != 1:
        fail(args.model, f"it has {model.num_labels} labels, a reranker has one; see "
             "05_classify.py")
    own = model.max_seq_length or args.max_length
    if own < args.max_length != LENGTH:
        warn("--max-length", f"{args.model} reads {own} tokens of a pair, not {args.max_length}")
    model.max_seq_length = min(own, args.max_length)
    if args.prompt is not None:
        model.prompts["own"], model.default_prompt_name = args.prompt, "own"

@contextlib.contextmanager
def load_report():
    """Yield a file that receives what transformers reports on the weights of a model."""
    import transformers
    report, verbosity = io.StringIO(), transformers.logging.get_verbosity()
    handler = logging.StreamHandler(report)
    transformers.logging.set_verbosity_warning()
    transformers.logging.add_handler(handler)
    try:
        yield report
    finally:
        transformers.logging.remove_handler(handler)
        transformers.logging.set_verbosity(verbosity)

def open_reranker(args):
    """Return the model of the flags, to score pairs."""
    import torch
    with load_report() as report:
        model = open_model(load_reranker, args.model, args, args.dtype)
    if "MISSING" in report.getvalue():
        warn(args.model, "its files lack the weights that are MISSING above; they are random now")
    if is_cross_encoder(model):
        set_up(model, args)
        if not model.keep_in_fp32_modules:  # in half precision, abstracts get equal scores
            layers = [path for path, part in model.named_modules() if type(part) is torch.nn.Linear]
            model.set_keep_in_fp32_modules(layers[-1:])
    elif args.verdicts:
        fail("--verdicts", f"scores of {args.model}, a multi-vector model, are no logits")
    else:
        warn(args.model, "a multi-vector model truncates claims and abstracts to its own lengths, "
             "takes no --prompt and runs on one device")
    return model

def find_cut(model, texts):
    """Return which texts a multi-vector model truncates to its own length, as booleans."""
    names = [name for name in ("document", "passage", "corpus") if name in model.prompts]
    prompt = model.prompts[names[0]] if names else None
    batch = model.preprocess(texts, prompt=prompt, task="document")
    return [bool(row.overflowing) for row in batch.encodings]

def cut_group(model, pairs):
    """Return (claim, abstract) pairs, the abstracts truncated to the room that is left."""
    prompt, short = model.prompts.get(model.default_prompt_name), []
    empty = model.preprocess([(claim, "") for claim, _ in pairs], prompt=prompt)
    # In a chat template, the first and last word may split into more tokens
    limit = model.max_seq_length - 4 * ("message" in model.modalities)
    rooms = (limit - empty["attention_mask"].sum(dim=1)).tolist()
    if min(rooms) < 1:
        claim, _ = pairs[np.argmin(rooms)]
        fail("--max-length", f"{model.max_seq_length} tokens have no room beside the claim "
             f"{claim!r:.60}; raise it by {1 - min(rooms)} or more")
    coded = model.tokenizer([text for _, text in pairs], add_special_tokens=False, verbose=False)
    for row, (claim, text) in enumerate(pairs):
        if len(coded["input_ids"][row]) > rooms[row]:
            text = text[: coded.token_to_chars(row, rooms[row] - 1).end]
        short.append((claim, text))
    return short

def cut_to_fit(model, pairs):
    """Return (claim, abstract) pairs with truncated abstracts, and which ones are truncated.

    Neither a claim nor a template is ever truncated; if one leaves no room, the script ends.
    A multi-vector model truncates by itself.
    """
    if not is_cross_encoder(model):
        return pairs, find_cut(model, [text for _, text in pairs])
    short = []
    for start in range(0, len(pairs), GROUP):  # the tokens of all would take gigabytes
        short += cut_group(model, pairs[start : start + GROUP])
    return short, [part != whole for part, whole in zip(short, pairs)]

# -------------------- Scores
def score_pairs(model, pairs, **options):
    """Return the scores of (claim, abstract) pairs: logits, or MaxSim of a multi-vector model."""
    import torch
    if is_cross_encoder(model):  # a sigmoid would make large logits 1
        return model.predict(pairs, activation_fn=torch.nn.Identity(), **options)
    claims, texts = map(list, zip(*pairs))
    once = list(dict.fromkeys(claims))
    vectors = dict(zip(once, model.encode_query(once, **options)))
    documents = model.encode_document(texts, **options)
    scores = model.similarity_pairwise([vectors[claim] for claim in claims], documents)
    return scores.float().cpu().numpy()

def alike(low, high):
    """Return whether the lowest and the highest score differ by rounding alone."""
    return high - low <= ALIKE * np.maximum(abs(low), abs(high))

def check_order(model, where, refuse, advice):
    """Refuse a model that scores PROBES alike, and call out one that does not rank the best first.

    Equal scores mean that it does not see the claim or the abstract: a chat template that drops
    one, a head without weights.
    """
    pairs, _ = cut_to_fit(model, PROBES)
    best, *others = score_pairs(model, pairs).tolist()
    if any(alike(min(best, other), max(best, other)) for other in others):
        refuse(where, f"it scores unlike pairs alike; {advice}")
    elif best < max(others):
        warn(where, "an abstract about something else wins over one that repeats the claim "
             f"({max(others):.4g}, {best:.4g}); {advice}")

def score_batch(model, pool, args, pairs):
    """Return the scores of (claim, abstract) pairs as an array, and which ones are truncated."""
    short, cut = cut_to_fit(model, pairs)
    share = -(-len(pairs) // len(args.device))
    options = {"batch_size": args.batch_size, "pool": pool, "chunk_size": share}
    return score_pairs(model, short, **options), cut

def read_scores(path):
    """Return {pair: (claim_id, abstract_id, score, truncated)} of whatever can be read."""
    scores = {}
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            # A torn or damaged line is skipped: its pairs are scored again
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                for claim, name, score, cut in json.loads(line):
                    if isinstance(score, float) and np.isfinite(score):
                        scores[claim, name] = claim, name, score, bool(cut)
    return scores

def score_resumably(claims, texts, score, path, pairs):
    """Return rows (claim_id, abstract_id, score, truncated) of (claim_id, abstract_id) pairs.

    path holds finished groups, a JSON line each.
    """
    from tqdm.auto import tqdm
    finished = read_scores(path) if path.exists() else {}
    left = [pair for pair in pairs if pair not in finished]
    with open(path, "a", encoding="utf-8") as file:
        for start in tqdm(range(0, len(left), GROUP), desc=f"rerank, {GROUP} pairs each"):
            group = left[start : start + GROUP]
            scores, cut = score([(claims[claim], texts[name]) for claim, name in group])
            for row in np.flatnonzero(~np.isfinite(scores))[:1]:
                fail("claim {}, abstract {}".format(*group[row]), "the score is not a finite "
                     "number; take --dtype fp32, or train with a lower --lr")
            rows = [(*pair, *rest) for pair, *rest in zip(group, scores.tolist(), cut)]
            file.write("\n" + json.dumps(rows))
            file.flush()
            finished |= dict(zip(group, rows))
    return [finished[pair] for pair in pairs]

def score_with_graph(pairs, score, graph, args):
    """Score pairs; with a graph, then neighbours of the best in rounds (AlexUNLP-FMT 2025)."""
    import pandas as pd
    rows, seen = [], set()
    for _ in range(1 + args.rounds):
        rows += score(pairs)
        seen.update(pairs)
        table, near = pd.DataFrame(rows, columns=[*PAIR, "score", "truncated"]), {}
        for claim, group in table.groupby("claim_id", sort=False):
            for name in group.nlargest(args.beam, "score")["abstract_id"]:
                near |= dict.fromkeys((claim, other) for other in graph.get(name, ()))
        pairs = [pair for pair in near if pair not in seen]
        if not pairs:
            break
    return table

def score_by_model(args, path, pairs, claims, texts, graph):
    """Return the table of score_with_graph, on several devices if it is a cross-encoder.

    path keeps finished groups.
    """
    import torch
    model, pool = open_reranker(args), None
    once = dict.fromkeys(claim for claim, _ in pairs)  # one without room is found before any score
    cut_to_fit(model, [(claims[claim], "") for claim in once])
    check_order(model, args.model, fail, "check its chat template, and that its head is trained")
    if len(args.device) > 1 and is_cross_encoder(model) and not hasattr(model[0], "t5"):
        pool = model.start_multi_process_pool(args.device)
        torch.cuda.empty_cache()  # the model has moved into the workers
    score = functools.partial(score_batch, model, pool, args)
    score = functools.partial(score_resumably, claims, texts, score, path)
    try:
        return score_with_graph(pairs, score, graph, args)
    finally:
        if pool:
            model.stop_multi_process_pool(pool)

def facts_of(name, table):
    """Return counts of a model's scores for the provenance, and call out those without meaning."""
    by_claim = table.groupby("claim_id")["score"].agg(["min", "max", "size"])
    unranked = alike(by_claim["min"], by_claim["max"]) & (by_claim["size"] > 1)
    if unranked.any():
        warn(name, f"equal scores for all candidates of {unranked.sum()} of {len(by_claim)} "
             "claims: they rank nothing")
    ties, cut = table.duplicated(["claim_id", "score"]).sum(), table["truncated"].sum()
    return {"pairs": len(table), "equal_scores": int(ties),
            "claims_scored_alike": int(unranked.sum()), "truncated": int(cut)}

# -------------------- Rerank
def combo_score(logits, stance, alpha):
    """ComboScorer (+VeriRel 2025, eq. 5): (1 - alpha) sigmoid(s) + alpha (P(SUP) + P(REF))."""
    from scipy.special import expit
    return (1 - alpha) * expit(logits) + alpha * stance

def blend_first_stage(table, weight):
    """(1 - weight) z(score) + weight z(first) in each claim; what first lacks counts lowest.

    z: (score - mean) / standard deviation; 0 where all are equal but for rounding.
    """
    scores, claims = table[["score", "first"]], table["claim_id"]
    scores = scores.fillna(scores.groupby(claims).transform("min"))
    by = scores.groupby(claims)
    equal = alike(by.transform("min"), by.transform("max"))
    z = ((scores - by.transform("mean")) / by.transform("std", ddof=0)).mask(equal, 0.0)
    return (1 - weight) * z["score"] + weight * z["first"]

def sort_run(table, order):
    """Return a run, best first; equal scores by order, {abstract_id: place in the corpus}."""
    claim, place = table["claim_id"].factorize()[0], table["abstract_id"].map(order)
    table = table.iloc[np.lexsort((place, -table["score"], claim))]
    return table.assign(rank=table.groupby("claim_id").cumcount() + 1)[RUN]

def rerank(args):
    """Score the first candidates of each claim by a model."""
    if args.graph and is_table(args.model):
        fail("--graph", f"{args.model} is no model to score neighbours with; fuse the runs")
    if args.graph and args.verdicts:
        fail("--verdicts", "neighbours have none; leave out --graph or --verdicts")
    files = [path for path in (args.graph, args.verdicts) if path]
    models = [args.model]
    if is_table(args.model):
        files, models = [*files, args.model], []
    task = task_of(args, args.run, args.claims, args.corpus, *files, models=models)
    if up_to_date(args, task, args.out):
        return {"made": []}
    claims, texts, graph = read_claims(args.claims), read_abstracts(args.corpus), {}
    candidates = read_candidates(args, claims, texts)
    if args.graph:
        corpus = task["inputs"][args.corpus]
        graph = read_graph(args.graph, corpus, list(texts), args.neighbours)
    if candidates.empty:
        table = candidates.assign(score=0.0, truncated=False)
    elif is_table(args.model):
        scores = read_columns(args.model, ["score"], candidates)
        table = candidates.assign(score=scores, truncated=False)
    else:
        pairs = list(map(tuple, candidates[PAIR].values))
        path = parts_of(args.out, task, args) / "0.jsonl"
        table = score_by_model(args, path, pairs, claims, texts, graph)
        table = table.merge(candidates, on=PAIR, how="left")
    facts = facts_of(args.model, table)
    if args.verdicts:
        table["score"] = combo_score(table["score"], table["stance"], args.alpha)
    if args.first_stage:
        table["score"] = blend_first_stage(table, args.first_stage)
    run = sort_run(table, {name: place for place, name in enumerate(texts)})
    run = run[run["rank"] <= (args.top_k or len(run))]
    facts = {"rows": len(run), **facts}
    with written(args.out, task, **facts) as path:
        run.to_csv(path, sep="\t", index=False, float_format="%.9g", lineterminator="\n")
    remove(f"{args.out}.parts")
    return {"made": [args.out], **facts}

# -------------------- Dev
def mean_ndcg(run, evidence):
    """Return the mean nDCG@10 of a run (claim_id, rank, relevant: 0 or 1).

    evidence: the number of relevant abstracts of each claim, retrieved or not; it sets the ideal.
    The mean is over all these claims: one without candidates counts 0.
    """
    discounts = 1 / np.log2(np.arange(2, 12))  # of ranks 1 to 10
    ideal = discounts.cumsum()[np.minimum(evidence, 10) - 1]
    top = run[run["rank"] <= 10]
    gains = top["relevant"] * discounts[top["rank"] - 1]
    gains = gains.groupby(top["claim_id"]).sum().reindex(evidence.index, fill_value=0)
    return float((gains / ideal).mean())

def dev_evaluator(model, paths, texts, depth):
    """Return an evaluator: nDCG@10 of a reranked run; paths: its claims, their qrels, the run."""
    from sentence_transformers.base.evaluation import BaseEvaluator
    claims, order = read_claims(paths[0]), {name: place for place, name in enumerate(texts)}
    known = {"claim_id": claims, "abstract_id": texts}
    qrels = read_table(paths[1], [*PAIR, "label"], label=LABELS, **known).query("label != 'NEI'")
    evidence = qrels.groupby("claim_id").size()
    run = read_table(paths[2], RUN, **known).query("rank <= @depth & claim_id in @evidence.index")
    if run.empty:
        fail(paths[2], "no candidates of dev claims with evidence; give another --dev-run")
    run = run[PAIR].merge(qrels[PAIR].assign(relevant=1), on=PAIR, how="left").fillna(0)
    pairs = [(claims[claim], texts[name]) for claim, name in run[PAIR].values]
    pairs, _ = cut_to_fit(model, pairs)
    print(f"dev: {run['claim_id'].nunique()} of {len(evidence)} claims have candidates, "
          f"{int(run['relevant'].sum())} of {evidence.sum()} relevant abstracts are among them")

    class Reranked(BaseEvaluator):
        def __call__(self, model, *_, **__):
            scored = run.assign(score=score_pairs(model, pairs))
            return {NDCG: mean_ndcg(sort_run(scored, order).merge(run, on=PAIR), evidence)}

    return Reranked()

# -------------------- Train
def read_pairs(path, claims, texts):
    """Return (claim, abstract, target) of each pair; a tuple is a pair of target 1, others of 0."""
    pairs = []
    for number, line in read_lines(path):
        try:
            example = json.loads(line)
            if "positive" in example:
                targets = [1.0] + [0.0] * len(example["negatives"])
                names = [example["positive"], *example["negatives"]]
            else:
                targets, names = [float(example["target"])], [example["abstract_id"]]
            if not 0 <= targets[0] <= 1:
                raise ValueError(f"target {targets[0]}")
            claim = claims[str(example["claim_id"])]
            pairs += [(claim, texts[str(name)], target) for name, target in zip(names, targets)]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            fail(f"{path}:{number}", f"{error!r}; wanted: a pair or tuple of 02_retrieve.py mine, "
                 "known ids, target 0 to 1")
    if not any(target for *_, target in pairs):
        fail(path, "no positive and no target above 0: nothing to learn; mine other examples")
    return pairs

def training_table(path, claims, texts, loss):
    """Return a table of claim, texts and perhaps label, and counts of what is left out of it."""
    import pandas as pd
    if loss in ("margin", "mnrl"):
        rows, counts = tuple_rows(path, read_tuples(path, claims, texts), loss == "margin")
        columns = ["claim", "positive", *(f"negative_{place}" for place in range(len(rows[0]) - 2))]
        return pd.DataFrame(rows, columns=columns), counts
    pairs = read_pairs(path, claims, texts)
    table = pd.DataFrame(list(dict.fromkeys(pairs)), columns=["claim", "abstract", "label"])
    left_out = len(pairs) - len(table)
    if left_out:
        warn(path, f"{left_out} of {len(pairs)} pairs repeat an earlier one: left out")
    return table, {"examples": len(pairs), "left_out": left_out}

def margin_loss(model, margin):
    """Return the hinge loss of pairs: max(0, margin - (s(positive) - s(negative))), s: logits."""
    import torch
    from sentence_transformers.util import batch_to_device

    class MarginLoss(torch.nn.Module):
        def logits(self, claims, texts, prompt):
            batch = self.model.preprocess(list(zip(claims, texts)), prompt=prompt)
            return self.model(batch_to_device(batch, self.model.device))["scores"].view(-1)

        def forward(self, columns, labels=None, prompt=None, task=None):
            claims, positives, negatives = columns
            lead = self.logits(claims, positives, prompt) - self.logits(claims, negatives, prompt)
            return (margin - lead).clamp(min=0).mean()

    loss = MarginLoss()
    loss.model = model
    return loss

def loss_of(model, args):
    """Return the loss on logits that --loss names."""
    import torch
    from sentence_transformers.cross_encoder import losses
    if args.loss == "margin":
        return margin_loss(model, args.margin)
    if args.loss == "l1":  # |sigmoid - target|
        loss = losses.MSELoss(model, torch.nn.Sigmoid())
        loss.loss_fct = torch.nn.L1Loss()
        return loss
    return {"bce": losses.BinaryCrossEntropyLoss, "lambda": losses.LambdaLoss,
            "mnrl": losses.MultipleNegativesRankingLoss}[args.loss](model)

def train(args):
    """Fine-tune a cross-encoder on examples.

    Its weights are trained in fp32, whatever precision the checkpoint is stored in.
    """
    dev = dev_files(args, args.dev_run)
    task = task_of(args, args.examples, args.claims, args.corpus, *dev, models=[args.model])
    if up_to_date(args, task, args.out):
        return {"made": []}
    claims, texts = read_claims(args.claims), read_abstracts(args.corpus)
    table, counts = training_table(args.examples, claims, texts, args.loss)
    import transformers
    from datasets import Dataset
    from sentence_transformers import cross_encoder
    transformers.logging.set_verbosity_error()  # a new head is wanted here
    transformers.set_seed(args.seed)
    model = open_model(cross_encoder.CrossEncoder, args.model, args, "fp32")
    set_up(model, args)
    if "message" in model.modalities:  # others may begin with a new head
        check_order(model, args.model, fail, "check its chat template")
    truncated = 0
    for column in table.columns.drop(["claim", "label"], errors="ignore"):
        pairs, cut = cut_to_fit(model, list(zip(table["claim"], table[column])))
        table[column] = [text for _, text in pairs]
        truncated += sum(cut)
    if args.loss == "lambda":  # a row for each claim
        table = table.groupby("claim", sort=False, as_index=False).agg(list)
    evaluator = dev_evaluator(model, dev, texts, args.dev_depth) if dev else None
    make = functools.partial(
        cross_encoder.CrossEncoderTrainer, model, loss=loss_of(model, args),
        train_dataset=Dataset.from_pandas(table, preserve_index=False))
    log, curve = fit_on_dev(
        make, cross_encoder.CrossEncoderTrainingArguments, model, parts_of(args.out, task, args),
        args, evaluator, NDCG, per_device_train_batch_size=args.batch,
        prompts=model.prompts.get(model.default_prompt_name),
        weight_decay=0.01,  # Kiepura & Lam 2025
        lr_scheduler_type="cosine" if args.loss == "l1" else "linear",  # +VeriRel 2025
        batch_sampler="no_duplicates" if args.loss == "mnrl" else "batch_sampler")
    check_order(model, args.out, warn, "lower --lr, or mine other examples")
    facts = {"rows": len(table), **counts, "truncated": truncated, "dev_ndcg_at_10": curve}
    with written(args.out, task, log=log, **facts) as path:
        save_model(model, path)
    remove(f"{args.out}.parts")
    return {"made": [args.out], **facts}

# -------------------- Command line
def add_inputs(job):
    add = job.add_argument_group("inputs and outputs").add_argument
    add("--claims", default="{data}/claims.{split}.tsv", help="claims")
    add("--corpus", default="{data}/corpus.jsonl", help="abstracts")
    return add

def add_model(job, **model):
    add = job.add_argument_group("model").add_argument
    add("--model", **model)
    add("--max-length", type=between(1, kind=int), default=LENGTH,
        help="tokens of a pair; the abstract is truncated")
    add("--prompt", help="instruction (default: the model's own, if it has one)")
    return add

def add_rerank(job):
    share, count = between(0, 1), between(1, kind=int)
    add = add_inputs(job)
    add("--run", default="{work}/{split}/hybrid.tsv", help="run to rerank")
    add("--out", default="{work}/{split}/rerank.tsv", help="reranked run")
    add("--depth", type=count, default=20, help="candidates per claim that are scored")
    add("--top-k", type=between(0, kind=int), default=0,
        help="abstracts per claim that are written; 0: all")
    add = add_model(
        job, default="{work}/models/reranker",
        help="folder or hub id: a cross-encoder, causal reranker, multi-vector model or monoT5; a "
        "run.tsv stands for its scores")
    add("--batch-size", type=count, default=32,
        help="pairs per batch; changes scores by rounding only")
    add("--dtype", choices=("auto", "fp32", "bf16", "fp16"), default="auto",
        help="precision; auto: half on a GPU, the last layer in fp32")
    add = job.add_argument_group("combination with other scores").add_argument
    add("--first-stage", type=share, default=0.0,
        help="weight of --run's scores, 0 to 1; both as z-scores")
    add("--verdicts", help="verdicts of --run: P(SUPPORTS) + P(REFUTES) joins the sigmoid score")
    add("--alpha", type=share, default=0.5, help="weight of --verdicts, 0 to 1")
    add = job.add_argument_group("neighbours of the best join the candidates").add_argument
    add("--graph", help="folder of 01_index.py graph (default: none join)")
    add("--rounds", type=count, default=20, help="rounds at most")
    add("--neighbours", type=count, default=10, help="neighbours per abstract")
    add("--beam", type=count, default=30, help="abstracts expanded per claim and round")

def add_train(job):
    positive, count = between(1e-9), between(1, kind=int)
    add = add_inputs(job)
    add("examples", nargs="?", default="{work}/{split}/examples.jsonl", help="pairs or tuples")
    add("--out", type=os.path.normpath, default="{work}/models/reranker", help="trained model")
    add_model(job, default="data/models/minilm", help="folder or hub id: encoder or reranker")
    add = job.add_argument_group("training").add_argument
    add("--loss", choices=LOSSES, default="bce",
        help="bce, l1: targets of pairs; lambda: lists of a claim; margin, mnrl: tuples")
    add("--margin", type=positive, default=0.2, help="margin: lead of a positive, in logits")
    add("--epochs", type=positive, default=3, help="passes over the examples, also fractions")
    add("--lr", type=positive, default=2e-5, help="learning rate")
    add("--batch-size", type=count, default=16, dest="batch", help="rows per batch")
    add("--accumulate", type=count, default=1, help="batches per step")
    add = job.add_argument_group("dev split; the epoch that is best on it is kept").add_argument
    add("--dev-split", default="dev", help="it chooses the best epoch; none: the last one stays")
    add("--dev-run", help="its run (default: WORK/DEV_SPLIT/hybrid.tsv)")
    add("--dev-depth", type=count, default=20, help="candidates per claim that are scored")
    add("--patience", type=count, default=2, help="epochs without a gain before training stops")

def resolve(args):
    """Return the arguments as the jobs use them; nothing changes them afterwards."""
    if args.function is train:
        args = one_gpu(args)  # before torch sees any
        args.dev_run = args.dev_run or f"{args.work}/{args.dev_split}/hybrid.tsv"
        args.dtype = "auto"  # of autocast; the weights are fp32
    if not is_table(args.model):
        args.dtype = precision_of(args)
    return args

def main():
    parser, jobs = command_line(rerank, train)
    add_rerank(jobs["rerank"])
    add_train(jobs["train"])
    finish(resolve, arguments_of(parser, jobs))

# --- old helpers (same in the scripts before their rewrite)
PACKAGES = ("numpy", "pandas", "torch", "transformers", "sentence_transformers", "bm25s", "openai")
MADE_BY = {  # names of files and folders that a script makes, and the command
    "bm25": "01_index.py --indexes bm25", "dense": "01_index.py --indexes dense",
    "splade": "01_index.py --indexes splade", "graph": "01_index.py graph",
    "encoder": "01_index.py train", "hybrid.tsv": "02_retrieve.py",
    "examples.jsonl": "02_retrieve.py mine", "reranker": "03_rerank.py train",
    "rerank.tsv": "03_rerank.py", "llm.tsv": "04_llm_rerank.py",
    "classifier": "05_classify.py train", "verdicts.tsv": "05_classify.py",
    "llm_verdicts.tsv": "05_classify.py llm", "claims.jsonl": "05_classify.py --aggregate FILE",
    "pool.tsv": "06_evaluate.py pool", "pool.run.tsv": "06_evaluate.py pool",
    **dict.fromkeys(("bm25.tsv", "dense.tsv", "splade.tsv"), "02_retrieve.py"),
    "bm25-rm3.tsv": "02_retrieve.py --retrievers bm25 --feedback 10",
    **dict.fromkeys(("minilm", "splade-tiny", "smollm2"), "data/download.py models")}
SPLITS = {"train": "train", "mine": "train", "fit": "dev"}  # of jobs, where it is not test
START, LOCKS, WARNINGS = time.monotonic(), contextlib.ExitStack(), []

def printable(text):
    """Return a text on one line, ? for control characters, which could steer a terminal."""
    line = " ".join(str(text).split())
    return "".join(c if c.isprintable() else "?" for c in line)

def warn(where, what):
    """Print a line on stderr, and keep it for the provenance of outputs."""
    warn_once(printable(f"warning: {where}: {what}"))

def warn_once(line):
    if line not in WARNINGS:
        WARNINGS.append(line)
        print(line, file=sys.stderr)

def fail(where, what):
    """Bad input or usage: one line on stderr, exit status 2."""
    print(printable(f"error: {where}: {what}"), file=sys.stderr)
    sys.exit(2)

# ---------- Reading
def read_lines(path):
    """Yield (number, line) of a UTF-8 file as an editor shows them, blank lines left out."""
    damaged, empty = [], True
    with open(path, "rb") as file:
        start = file.peek(2)[:2]
        kind = {b"\x1f\x8b": "gzip", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}.get(start)
        if kind:
            fail(path, f"the file is {kind}; see data/convert.py, or save it as UTF-8 text")
        for number, line in enumerate(file, 1):
            try:
                text = line.decode()
            except UnicodeDecodeError:
                damaged.append(number)
                text = line.decode(errors="replace")
            text = text.removeprefix("\ufeff").rstrip("\r\n")  # a byte order mark
            if text.strip():
                empty = False
                yield number, text
    if damaged:
        warn(f"{path}:{damaged[0]}", f"{len(damaged)} lines are not UTF-8; U+FFFD replaces what "
             "cannot be read")
    if empty:
        fail(f"{path}:1", "the file is empty; a table needs a header, a corpus one abstract a line")

def unquoted(field):
    """Return a field of a table without the quotation marks that pandas puts around it."""
    quoted = re.fullmatch('"((?:[^"]|"")*)"', field)
    return quoted[1].replace('""', '"') if quoted else field

def read_table(path, columns, **known):
    """Read a TSV file as strings, one row a line; a run by claim and rank, with numbers.

    known: the values that a column may hold. A bad row ends the script, with its line.
    """
    import pandas as pd
    rows = {}
    for number, line in read_lines(path):
        fields = line.split("\t")
        rows[number] = list(map(unquoted, fields)) if '"' in line else fields
    first = next(iter(rows))
    header = rows.pop(first)
    if not {*columns, *known} <= set(header) or len(set(header)) < len(header):
        fail(f"{path}:{first}", f"columns {', '.join(header)}, wanted {', '.join(columns)}; "
             "data/convert.py reads other formats and renames columns")
    for number, row in rows.items():
        if len(row) != len(header):
            fail(f"{path}:{number}", f"{len(row)} fields, the header has {len(header)}; fix the "
                 "row, or convert the file by data/convert.py")
    table = pd.DataFrame(rows.values(), index=rows.keys(), columns=header, dtype=str)
    if "claim" in columns:
        table["claim"] = table["claim"].str.normalize("NFC")
    ids = [column for column in columns if column.endswith("_id")]
    bad = {f"{column} is empty": table[column].str.strip() == "" for column in columns}
    for column in ids:
        bad[f"white space around {column}"] = table[column] != table[column].str.strip()
    bad |= {f"unknown {column}": ~table[column].isin(known[column]) for column in known}
    bad["there is an earlier row for this"] = table.duplicated(ids)
    if "rank" in columns:
        for column in ("rank", "score"):
            table[column] = pd.to_numeric(table[column], errors="coerce").astype(float)
        expected = table.groupby("claim_id")["rank"].rank("first")
        bad["score is not a finite number"] = ~np.isfinite(table["score"])
        bad["rank is not 1, 2, 3"] = table["rank"] != expected
    for what, rows in bad.items():
        if rows.any():
            number = rows.idxmax()
            value = table.loc[number].get(what.removeprefix("unknown "), "")
            what = f"{what} {value!r:.60}" if what.startswith("unknown") else what
            fail(f"{path}:{number}", f"{what}: {' '.join(table.loc[number, ids])}; fix the row, or "
                 "see data/convert.py")
    if "rank" in columns:
        table = table.astype({"rank": int})
        table = table.iloc[np.lexsort((table["rank"], table["claim_id"].factorize()[0]))]
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

# ---------- Provenance
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
    command = MADE_BY.get(Path(path).name)
    if not command:
        splits = sorted(file.name[7:-4] for file in Path(args.data).glob("claims.*.tsv"))
        return (f"no such file, and no script makes it; check --data {args.data} and --split "
                f"{args.split} (claims of {', '.join(splits) or 'no split'} are there)")
    words = ["python", *command.split()]
    if not command.startswith("data/"):
        words += ["--data", args.data, "--work", args.work]
    if path.endswith((".tsv", ".jsonl")):
        words += ["--split", args.split]
    flags = [f"--{name}".replace("_", "-") for name, value in vars(args).items() if value == path]
    other = "".join(f", or name another one by {flag}" for flag in flags if flag in args.flags)
    return f"it is missing; make it by: {shlex.join(words)}{other}"

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
        LOCKS.enter_context(FileLock(f"{path}.lock", timeout=0))
    except Timeout:
        fail(path, "another command is making it; wait until that one ends")
    LOCKS.callback(remove, f"{path}.lock")  # FileLock leaves the file there

def check_owner(args, task, path, known=False):
    """Refuse an output that the task reads, and folders and data that others made, unless known."""
    if path.resolve() in {Path(name).resolve() for name in task["inputs"]}:
        fail(path, "this command reads it; give another --out")
    arguments = read_object(f"{path}.meta.json").get("arguments")
    job = arguments.get("job") if isinstance(arguments, dict) else task["arguments"]["job"]
    ours = Path(f"{path}.meta.json").exists() and job == task["arguments"]["job"]
    data = Path(args.data).resolve()
    foreign = path.is_dir() and any(path.iterdir()) or data in path.resolve().parents
    if path.exists() and foreign and not (ours or known):
        fail(path, "this command did not make it; give another --out")

def up_to_date(args, task, *outs):
    """Return whether this very task made outs, which are locked until the process ends."""
    provenance = {}
    for path in map(Path, outs):
        lock(path)
        check_owner(args, task, path)
        provenance[path] = read_object(f"{path}.meta.json") if path.exists() else {}
    if args.force or any(not task.items() <= made.items() for made in provenance.values()):
        return False
    for path, made in provenance.items():
        remove(f"{path}.parts")  # left by a process that was killed at its very end
        for line in made.get("warnings") or ():
            warn_once(line)
        print(f"up to date: {path}")
        if made.get("sha256") != digest(path):
            warn(path, "its bytes have changed since it was made; --force makes it again")
    return True

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

def remove(path):
    """Delete a file or a folder, if it exists."""
    if Path(path).is_dir() and not Path(path).is_symlink():
        shutil.rmtree(path)
    else:
        Path(path).unlink(missing_ok=True)

def spent():
    """Return seconds and peak memory (MiB) of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak //= 1024 if sys.platform == "linux" else 1024**2
    return {"seconds": round(time.monotonic() - START, 1), "peak_mib": peak}

# ---------- Command line
if not sys.stderr.isatty():  # tqdm prints a plain line every ten seconds
    os.environ.setdefault("TQDM_MININTERVAL", "10")
    os.environ.setdefault("TQDM_BAR_FORMAT", "{desc}: {n_fmt}/{total_fmt} [{elapsed}]\n")

class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action):  # no "(default: None)"
        if isinstance(action.default, list):
            return f"{action.help} (default: {' '.join(action.default)})"
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

    The first paragraph of a function's docstring is the job's sentence in --help.
    """
    script, names = Path(sys.argv[0]).name, [function.__name__ for function in functions]
    parser = argparse.ArgumentParser(
        prog=script, description=sys.modules["__main__"].__doc__, formatter_class=Help,
        usage=f"{script} [{' | '.join(names)}] [flags]",
        epilog=f"{script} JOB --help shows the flags of a job; without a job: {names[0]}")
    jobs = parser.add_subparsers(title="jobs", metavar="", prog=script)
    for name, function in zip(names, functions):
        sentence = " ".join((function.__doc__ or name).split("\n\n")[0].split())
        job = jobs.add_parser(
            name, help=sentence, description=sentence, formatter_class=Help, allow_abbrev=False)
        job.error = lambda message, name=name: fail(script, f"{message}; see {name} --help")
        job.set_defaults(job=f"{script} {name}", function=function)
        add = job.add_argument_group("data and device").add_argument
        add("--data", type=os.path.normpath, default="data/demo",
            help="folder of corpus, claims and qrels")
        add("--work", help="folder of everything made from them (default: work/ and the name of "
            "the data folder; two data folders of one name need it)")
        add("--split", default=SPLITS.get(name, "test"), help="which claims")
        add("--seed", type=between(0, 2**32 - 1, int), default=13, help="of every random choice")
        add("--device", nargs="+", type=device, default=["auto"], metavar="cuda:0",
            help="or cpu, mps; auto: a GPU where there is one")
        add("--force", action="store_true", help="make outputs again, from the start")
    return parser, jobs.choices

def arguments_of(parser, jobs):
    """Return the arguments; {data}, {work} and {split} in defaults are filled in.

    args.flags are the flags of the job.
    """
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
    flags = sorted(set(re.findall(r"--[\w-]+", jobs[job].format_help())))
    if unknown:
        near = difflib.get_close_matches(unknown[0], flags, 1)
        advice = f"did you mean {near[0]}?" if near else f"see {job} --help"
        fail(script, f"unrecognized arguments: {' '.join(unknown)}; {advice}")
    args.work = args.work or f"work/{Path(os.path.abspath(args.data)).name}"
    for name, value in vars(args).items():
        setattr(args, name, filled(value, args))
    args.flags = flags
    return args

def filled(value, args):
    """Return a default value with {data}, {work} and {split} filled in."""
    if isinstance(value, list):
        return [filled(one, args) for one in value]
    if isinstance(value, str) and value.startswith(("{data}", "{work}")):
        value = value.replace("{data}", args.data).replace("{work}", args.work)
        return value.replace("{split}", args.split)
    return value

def finish(resolve, args):
    """Run the job and print its result as JSON; a fault of the disk is one line, Ctrl-C silence.

    resolve: returns the arguments as the job uses them; nothing changes them afterwards.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        args = resolve(args)
        print(json.dumps(args.function(args) | spent(), ensure_ascii=False), flush=True)
    except (KeyboardInterrupt, BrokenPipeError):  # Ctrl-C; | head
        LOCKS.close()
        os._exit(130)  # without tearing libraries down, which takes seconds
    except OSError as error:
        fail(error.filename or args.job, f"{error.strerror or error}; check path, rights and space")
    except Exception as error:
        text = repr(error)
        if "Symlink loop" in text or "SafetensorError" in text:  # links, a full disk
            fail(args.job, f"{error}; check path, rights and space")
        if "memory" not in text.lower() or "illegal" in text:
            raise
        flags = [flag for flag in ("--batch-size", "--max-length", "--top-k") if flag in args.flags]
        advice = f"lower {' or '.join(flags)}" if flags else "end other programs"
        fail(args.job, f"out of memory; {advice}, and run it again to go on")
    finally:
        LOCKS.close()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while the process ends
# --- end of old helpers

# --- texts (same in 01, 03, 04, 05 and 06)
def text_of(record, fields=("title", "abstract"), separator=" "):
    """Join the fields of a record that hold text; the items of a list are joined by commas."""
    texts = []
    for value in map(record.get, fields):
        items = value if isinstance(value, list) else [value]
        known = [str(item).strip() for item in items if item is not None and item == item]  # no NaN
        texts.append(", ".join(filter(None, known)))
    return separator.join(filter(None, texts))
# --- end of texts

# --- old hub (same in the scripts before their rewrite)
def offline_without_hub(name):
    """Use cached files alone if the hub cannot be reached: its client retries for minutes."""
    from huggingface_hub import constants, get_session
    if not Path(name).exists() and not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=5)
        except Exception:  # whatever its HTTP library raises
            constants.HF_HUB_OFFLINE = True
# --- end of old hub

# --- old models (same in the scripts before their rewrite)
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
# --- end of old models

# --- old training (same in the scripts before their rewrite)
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
    checkpoints = [path for path in folder.glob("checkpoint-*") if path.name[11:].isdecimal()]
    checkpoints.sort(key=lambda path: int(path.name[11:]))
    for path in reversed(checkpoints):
        if read_object(path / "meta.json").get("files") == files_of(path):
            return path
        remove(path)
    return None

def one_gpu(args):
    """Hide all GPUs but the first of --device: a Trainer multiplies its batch by those it sees."""
    kind, _, place = args.device[0].partition(":")
    if kind in ("auto", "cuda"):
        import torch
        place, count = int(place or 0), torch.cuda.device_count()
        seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        if args.device[0] != "auto" and place >= count:
            fail("--device", f"no {args.device[0]} among {count} GPUs")
        os.environ["CUDA_VISIBLE_DEVICES"] = seen.split(",")[place].strip()
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
                line = f"{state.max_steps} steps, about {left / 60:.1f} minutes without dev"
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

def save_model(model, folder):
    """Save a trained model; its tokenizer as it was loaded, whatever it has truncated since."""
    backend = getattr(model.tokenizer, "backend_tokenizer", None)
    if backend:
        backend.no_truncation()
        backend.no_padding()
    model.save_pretrained(str(folder), create_model_card=False)
# --- end of old training

# --- old dev (same in the scripts before their rewrite)
def read_claims(path):
    """Return {claim_id: claim}."""
    return dict(read_table(path, ["claim_id", "claim"])[["claim_id", "claim"]].values)

def dev_files(args, *more):
    """Return the paths of claims and qrels of the dev split, and more; none if one is missing."""
    paths = [f"{args.data}/{name}.{args.dev_split}.tsv" for name in ("claims", "qrels")]
    absent = [path for path in (*paths, *more) if not Path(path).is_file()]
    if absent and args.dev_split != "none":
        warn("no dev evaluation", f"it needs {', '.join(absent)}")
    return [] if absent else [*paths, *more]

def fit_on_dev(make, arguments, model, folder, args, evaluator, measure, **more):
    """Train as fit does. Return the log, and nDCG@10 on dev before training and by epoch.

    evaluator: returns {measure: nDCG@10} of the model; None without a dev split.
    """
    curve = []
    if evaluator:
        curve = [evaluator(model)[measure]]
        print(f"before training: nDCG@10 on dev {curve[0]:.4f}")
    make = functools.partial(make, evaluator=evaluator)
    logged = f"eval_{measure}"
    log = fit(make, arguments, model, folder, args, logged if evaluator else None, **more)
    curve += [line[logged] for line in log if logged in line]
    return log, [round(value, 4) for value in curve]
# --- end of old dev

# --- old tuples (same in the scripts before their rewrite)
def width_of(counts):
    """Return how many negatives each tuple gives, given how many each has, to lose the fewest.

    All tuples of a batch have the same number. Width w keeps w negatives of each tuple that has
    as many; ties go to more tuples. Example: of 1, 3 and 3, a width of 3 keeps 6.
    """
    kept = {}
    for width in range(1, max(counts, default=0) + 1):
        kept[width] = width * sum(count >= width for count in counts)
    return max(kept, key=kept.get, default=0)

def read_tuples(path, claims, texts):
    """Return [(claim, positive, negatives)] as texts, from tuples of 02_retrieve.py mine."""
    tuples = []
    for number, line in read_lines(path):
        try:
            example = json.loads(line)
            claim, positive = claims[str(example["claim_id"])], texts[str(example["positive"])]
            negatives = [texts[str(name)] for name in example["negatives"]]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            fail(f"{path}:{number}", f"{error!r}; mine --shape tuples of these claims again")
        tuples.append((claim, positive, negatives))
    return tuples

def tuple_rows(path, tuples, one_negative):
    """Return rows of texts (claim, positive, negatives), and counts of what they leave out.

    one_negative: a tuple with several becomes several rows; else all rows have as many.
    """
    counts = [len(negatives) for _, _, negatives in tuples]
    width, rows, left_out = 1 if one_negative else width_of(counts), [], 0
    for claim, positive, negatives in tuples:
        if len(negatives) < width:
            left_out += 1
        elif one_negative:
            rows += [(claim, positive, negative) for negative in negatives]
        else:
            rows.append((claim, positive, *negatives[:width]))
    used = len(rows) * width
    unused = sum(counts) - used
    if not rows:
        fail(path, "no tuple has a negative, which --loss needs; see mine --pool and --hard")
    if left_out and one_negative:
        warn(path, f"{left_out} of {len(tuples)} tuples have no negative: left out")
    elif left_out or unused:
        warn(path, f"{left_out} of {len(tuples)} tuples and {unused} negatives are left out, as "
             "all tuples need as many negatives")
    return rows, {"examples": len(tuples), "left_out": left_out, "negatives": used,
                  "negatives_left_out": unused}
# --- end of old tuples

if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__" and sys.platform == "linux":  # a worker of several devices
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: it ends with its parent
