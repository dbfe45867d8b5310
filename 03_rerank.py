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
import argparse
import atexit
import contextlib
import ctypes
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
import zlib
from pathlib import Path

import numpy as np

# --- constants (same in all six scripts)
LABELS = ("SUPPORTS", "REFUTES", "NEI")
RUN = ["claim_id", "abstract_id", "rank", "score"]
NEUTRAL = {"force", "out", "device", "batch_size", "concurrency"}  # no byte depends on these
# --- end of constants

PAIR = ["claim_id", "abstract_id"]
GROUP = 1024                # pairs that are scored and stored at once
RRF_K = 60                  # Cormack et al. 2009
MONO_T5 = "Query: {} Document: {} Relevant:"  # Nogueira et al. 2020; it answers true or false
LOSSES = ("bce", "margin", "l1", "lambda", "mnrl")
MEASURE = "dev_ndcg@10"     # decides on the best epoch
ALIKE = 1e-5                # a relative difference of scores below it is rounding in fp32
PROBES = [                  # the first pair must win: it alone is about one thing
    ("Sea ice in the Arctic is shrinking.", "Satellites show that Arctic sea ice is shrinking."),
    ("Sea ice in the Arctic is shrinking.", "The bakery opens at seven and sells fresh bread."),
    ("Bread is sold before eight o'clock.", "Satellites show that Arctic sea ice is shrinking.")]

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
        print(f"warning: {args.run} holds no candidates; {args.out} is empty, too", file=sys.stderr)
    return run

def read_graph(folder, corpus, ids, neighbours):
    """Return {abstract_id: [neighbours, nearest first]}; corpus: sha256 of that with these ids.

    meta.json vouches for the other files, and with its field sha256 for itself.
    """
    try:
        meta = json.loads(Path(folder, "meta.json").read_bytes())
        own = meta.pop("sha256")
        if own != hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest():
            raise ValueError("meta.json is damaged")
        for name, mark in meta["files"].items():
            data = Path(folder, name).read_bytes()
            if mark != [len(data), zlib.crc32(data)]:
                raise ValueError(f"{name} is damaged")
        if meta["corpus"] != corpus:
            raise ValueError("it is made from another corpus")
        places = np.load(Path(folder, "neighbours.npy"))[:, :neighbours]
        return dict(zip(ids, np.array(ids, object)[places].tolist(), strict=True))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
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

def check_template(name, model):
    """Refuse a causal reranker whose chat template drops the claim or the abstract of a pair."""
    import torch
    pairs = [(claim, text) for (claim, _), text in zip(PROBES, cut_to_fit(model, PROBES))]
    best, *others = model.predict(pairs, activation_fn=torch.nn.Identity()).tolist()
    if best in others:
        fail(name, "it scores unlike pairs alike: its chat template drops claims or abstracts; "
             "take the template of its authors")
    if best < max(others):
        print(f"warning: {name}: an abstract about something else wins over one that repeats the "
              f"claim ({max(others):.4g}, {best:.4g}); check its template", file=sys.stderr)

def load_reranker(name, flags, **how):
    """Load a cross-encoder, a causal reranker, a multi-vector model or monoT5, as its folder says.

    For scoring, its scores are logits.
    """
    import torch
    from sentence_transformers import CrossEncoder, MultiVectorEncoder
    from sentence_transformers.util import load_file_path
    from transformers import AutoConfig
    kind = str(AutoConfig.from_pretrained(name, trust_remote_code=False).architectures)
    if saved := load_file_path(name, "config_sentence_transformers.json"):
        kind = str(json.loads(Path(saved).read_bytes()).get("model_type") or kind)
    training = "epochs" in flags
    if training or re.search("CrossEncoder|SequenceClassification|CausalLM", kind):
        model = CrossEncoder(name, **how)
    elif "ConditionalGeneration" in kind:
        model = mono_t5(name, **how)
    elif re.search("MultiVector|ColBERT", kind):
        if flags.verdicts:
            fail("--verdicts", f"scores of {name}, a multi-vector model, are no logits")
        print(f"warning: {name} is a multi-vector model: it truncates claims and abstracts to its "
              "own lengths, takes no --prompt and runs on one device", file=sys.stderr)
        return MultiVectorEncoder(name, **how)
    else:
        fail(name, "it has no head for a logit; 03_rerank.py train makes a reranker of it")
    if model.num_labels != 1:
        fail(name, f"it has {model.num_labels} labels, a reranker has one; see 05_classify.py")
    model.max_seq_length = min(flags.max_length, model.max_seq_length or flags.max_length)
    if flags.prompt is not None:
        model.prompts["own"], model.default_prompt_name = flags.prompt, "own"
    if "message" in model.modalities:
        check_template(name, model)
    if not training:
        model.activation_fn = torch.nn.Identity()
        if not model.keep_in_fp32_modules:  # in half precision, abstracts get equal scores
            layers = [path for path, part in model.named_modules() if type(part) is torch.nn.Linear]
            model.set_keep_in_fp32_modules(layers[-1:])
    return model

def cut_to_fit(model, pairs):
    """Return the abstracts of (claim, abstract) pairs, truncated to the room that is left.

    Neither a claim nor a template is ever truncated; if they leave no room, the script ends.
    """
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

def find_cut(model, texts):
    """Return which texts a multi-vector model truncates to its own length, as booleans."""
    prompts = [model.prompts[name] for name in ("document", "passage", "corpus")
               if name in model.prompts]
    lengths = []
    for truncation in (True, False):
        how = {"text": {"truncation": truncation} | ({} if truncation else {"max_length": None})}
        batch = model.preprocess(texts, prompt=next(iter(prompts), None), task="document",
                                 processing_kwargs=how)
        lengths.append(batch["attention_mask"].sum(dim=1))
    return (lengths[0] < lengths[1]).tolist()

# -------------------- Scores
def score_late(model, args, claims, texts):
    """Return MaxSim scores of a multi-vector model, and which texts are truncated."""
    once = list(dict.fromkeys(claims))
    vectors = dict(zip(once, model.encode_query(once, batch_size=args.batch_size)))
    documents = model.encode_document(texts, batch_size=args.batch_size)
    scores = model.similarity_pairwise([vectors[claim] for claim in claims], documents)
    return scores.float().cpu().numpy(), find_cut(model, texts)

def score_batch(model, pool, args, pairs):
    """Return the scores of (claim, abstract) pairs as an array, and which ones are truncated."""
    claims, texts = map(list, zip(*pairs))
    if hasattr(model, "encode_query"):
        return score_late(model, args, claims, texts)
    short, share = cut_to_fit(model, pairs), -(-len(pairs) // len(args.device))
    scores = model.predict(
        list(zip(claims, short)), batch_size=args.batch_size, pool=pool, chunk_size=share)
    return scores, [text != whole for text, whole in zip(short, texts)]

def read_scores(path):
    """Return {pair: (claim_id, abstract_id, score, truncated)} of whatever can be read."""
    scores = {}
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                for claim, name, score, cut in json.loads(line):
                    if np.isfinite(score):
                        scores[claim, name] = claim, name, score, bool(cut)
            except (ValueError, TypeError, RecursionError):
                continue  # torn or damaged: these pairs are scored again
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

def score_by_model(name, path, pairs, claims, texts, graph, args):
    """Return the table of score_with_graph, on several devices if it is a cross-encoder.

    path keeps finished groups.
    """
    import torch
    model, pool = open_model(load_reranker, name, args, args.dtype, flags=args), None
    if hasattr(model, "predict"):  # a claim that leaves no room ends the script before any score
        cut_to_fit(model, [(claims[claim], "") for claim in dict(pairs)])
    if len(args.device) > 1 and hasattr(model, "predict") and not hasattr(model[0], "t5"):
        pool = model.start_multi_process_pool(args.device)
        torch.cuda.empty_cache()  # the model has moved into the workers
    score = functools.partial(score_batch, model, pool, args)
    score = functools.partial(score_resumably, claims, texts, score, path)
    try:
        return score_with_graph(pairs, score, graph, args)
    finally:
        if pool:
            model.stop_multi_process_pool(pool)

def count_alike(table):
    """Return how many claims have several candidates whose scores differ by rounding alone."""
    scores = table.groupby("claim_id")["score"].agg(["min", "max", "size"])
    alike = scores["max"] - scores["min"] <= ALIKE * scores[["min", "max"]].abs().max(axis=1)
    return int((alike & (scores["size"] > 1)).sum())

def facts_of(name, table):
    """Return counts of a model's scores for the provenance, and call out those without meaning."""
    claims, alike = table["claim_id"].nunique(), count_alike(table)
    if alike:
        print(f"warning: {name}: equal scores for all candidates of {alike} of {claims} claims, "
              "which stay in the order of the corpus", file=sys.stderr)
    ties, cut = table.duplicated(["claim_id", "score"]).sum(), table["truncated"].sum()
    return {"model": name, "pairs": len(table), "equal_scores": int(ties),
            "claims_scored_alike": alike, "truncated": int(cut)}

# -------------------- Fusion
def combo_score(logits, stance, alpha):
    """ComboScorer (+VeriRel 2025, eq. 5): (1 - alpha) sigmoid(s) + alpha (P(SUP) + P(REF))."""
    from scipy.special import expit
    return (1 - alpha) * expit(logits) + alpha * stance

def blend_first_stage(table, weight):
    """(1 - weight) z(score) + weight z(first) in each claim; what first lacks counts lowest.

    z: (score - mean) / standard deviation; 0 where all are equal.
    """
    scores, claims = table[["score", "first"]], table["claim_id"]
    scores = scores.fillna(scores.groupby(claims).transform("min"))
    by = scores.groupby(claims)
    z = (scores - by.transform("mean")) / by.transform("std", ddof=0).replace(0, 1)
    return (1 - weight) * z["score"] + weight * z["first"]

def sort_run(table, order):
    """Return a run, best first; equal scores by order, {abstract_id: place in the corpus}."""
    claim, place = table["claim_id"].factorize()[0], table["abstract_id"].map(order)
    table = table.iloc[np.lexsort((place, -table["score"], claim))]
    return table.assign(rank=table.groupby("claim_id").cumcount() + 1)[RUN]

def rrf(runs):
    """Sum over runs of 1 / (k + rank), a pair at a time (Cormack et al. 2009)."""
    import pandas as pd
    table = pd.concat(runs).eval(f"score = 1 / ({RRF_K} + rank)")
    return table.groupby(PAIR, sort=False, as_index=False)["score"].sum()

def rerank(args):
    """Score the first candidates of each claim."""
    extra = filter(None, [args.graph, args.verdicts])
    task = task_of(args, args.run, args.claims, args.corpus, *extra, models=args.model)
    if up_to_date(args, task, args.out):
        return {"made": []}
    tables = [name for name in args.model if name.endswith(".tsv")]
    if args.graph and tables:
        fail("--graph", f"{tables[0]} is no model to score neighbours with; fuse the runs")
    claims, texts, graph = read_claims(args.claims), read_texts(args.corpus), {}
    candidates = read_candidates(args, claims, texts)
    if args.graph:
        corpus = task["inputs"][str(Path(args.corpus))]
        graph = read_graph(args.graph, corpus, list(texts), args.neighbours)
    pairs = list(map(tuple, candidates[PAIR].values))
    order = {name: place for place, name in enumerate(texts)}
    parts, runs, models = None, [], []
    for number, name in enumerate(args.model if pairs else []):
        if name in tables:
            scores = read_columns(name, ["score"], candidates)
            table = candidates.assign(score=scores, truncated=False)
        else:
            parts = parts or parts_of(args.out, task, args)
            path = parts / f"{number}.jsonl"
            table = score_by_model(name, path, pairs, claims, texts, graph, args)
            table = table.merge(candidates, on=PAIR, how="left")
        models.append(facts_of(name, table))
        if args.verdicts:
            table["score"] = combo_score(table["score"], table["stance"], args.alpha)
        if args.first_stage:
            table["score"] = blend_first_stage(table, args.first_stage)
        runs.append(sort_run(table, order))
    if not runs:
        runs = [candidates.reindex(columns=RUN)]
    run = sort_run(rrf(runs), order) if len(runs) > 1 else runs[0]
    run = run[run["rank"] <= (args.top_k or len(run))]
    facts = {"rows": len(run), "models": models}
    with written(args.out, task, **facts) as path:
        run.to_csv(path, sep="\t", index=False, float_format="%.9g", lineterminator="\n")
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

def common_width(sizes):
    """Return w: w negatives of each tuple that has so many keep most negatives altogether.

    sizes: negatives of each tuple. Among equals, w is the one that keeps more tuples.
    """
    kept = {width: width * int((sizes >= width).sum()) for width in range(1, sizes.max() + 1)}
    return max(kept, key=kept.get, default=0)  # the first of equals

def tuples_of_one_width(examples):
    """Return a table of tuples of one width (claim, columns 0 to width), and what is left out."""
    sizes = examples.groupby("tuple")["place"].max()
    width = common_width(sizes)
    whole = examples["tuple"].map(sizes) >= width
    table = examples[whole & (examples["place"] <= width)]
    table = table.pivot(index=["tuple", "claim"], columns="place", values="abstract")
    left_out = {"tuples_left_out": int((sizes < width).sum()),
                "negatives_left_out": int(sizes.sum()) - width * len(table)}
    if any(left_out.values()):
        tuples, negatives = left_out.values()
        print(f"warning: tuples of unlike size: {width} negatives of each are used; {tuples} of "
              f"{len(sizes)} tuples have fewer and are left out, {negatives} of {sizes.sum()} "
              "negatives in all", file=sys.stderr)
    return table.rename(columns=str).reset_index("claim"), left_out

def rows_of(examples, loss):
    """Return the table that a loss reads, and counts of what it leaves out."""
    if loss == "margin":  # a row for each negative
        first = examples["place"] == 0
        table = examples[first].merge(examples[~first], on=["tuple", "claim"])
        return table[["claim", "abstract_x", "abstract_y"]], {}
    if loss == "mnrl":
        return tuples_of_one_width(examples)
    table = examples[["claim", "abstract", "label"]].drop_duplicates()
    if loss == "lambda":  # a row for each claim
        table = table.groupby("claim", sort=False, as_index=False).agg(list)
    return table, {}

def margin_loss(model, margin):
    """Return the hinge loss of pairs: max(0, margin - (s(positive) - s(negative))), s: logits."""
    import torch
    from sentence_transformers.util import batch_to_device

    class MarginLoss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def logits(self, claims, texts, prompt):
            batch = self.model.preprocess(list(zip(claims, texts)), prompt=prompt)
            return self.model(batch_to_device(batch, self.model.device))["scores"].view(-1)

        def forward(self, columns, labels=None, prompt=None, task=None):
            claims, positives, negatives = columns
            lead = self.logits(claims, positives, prompt) - self.logits(claims, negatives, prompt)
            return (margin - lead).clamp(min=0).mean()

    return MarginLoss()

def loss_of(model, args):
    """Return the loss on logits that --loss names."""
    from sentence_transformers.cross_encoder import losses
    from torch import nn
    if args.loss == "margin":
        return margin_loss(model, args.margin)
    if args.loss == "lambda":
        return losses.LambdaLoss(model)
    if args.loss == "mnrl":
        return losses.MultipleNegativesRankingLoss(model)
    if args.loss == "bce":
        return losses.BinaryCrossEntropyLoss(model)
    loss = losses.MSELoss(model, nn.Sigmoid())  # l1: |sigmoid - target|
    loss.loss_fct = nn.L1Loss()
    return loss

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
    import torch
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
    pairs = [(claim, text) for (claim, _), text in zip(pairs, cut_to_fit(model, pairs))]
    print(f"dev: {run['claim_id'].nunique()} of {len(evidence)} claims have candidates, "
          f"{int(run['relevant'].sum())} of {evidence.sum()} relevant abstracts are among them")

    class Reranked(BaseEvaluator):
        def __call__(self, model, *_, **__):
            scores = model.predict(pairs, activation_fn=torch.nn.Identity())
            table = sort_run(run.assign(score=scores), order).merge(run, on=PAIR)
            return {MEASURE: mean_ndcg(table, evidence)}

    return Reranked()

def train(args):
    """Fine-tune a cross-encoder, weights in fp32 whatever the checkpoint is stored in."""
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
        short += cut_to_fit(model, pairs[start : start + GROUP])
    table, left_out = rows_of(examples.assign(abstract=short), args.loss)
    evaluator = dev_evaluator(model, dev, texts, args.dev_depth) if dev else None
    if dev:
        print(f"before training: nDCG@10 on dev {evaluator(model)[MEASURE]:.4f}")
    make = functools.partial(
        cross_encoder.CrossEncoderTrainer, model, evaluator=evaluator, loss=loss_of(model, args),
        train_dataset=Dataset.from_pandas(table, preserve_index=False))
    log = fit(
        make, cross_encoder.CrossEncoderTrainingArguments, model, parts_of(args.out, task, args),
        args, f"eval_{MEASURE}" if dev else None, per_device_train_batch_size=args.batch,
        prompts=model.prompts.get(model.default_prompt_name),
        weight_decay=0.01,  # Kiepura & Lam 2025
        lr_scheduler_type="cosine" if args.loss == "l1" else "linear",  # +VeriRel 2025
        batch_sampler="no_duplicates" if args.loss == "mnrl" else "batch_sampler")
    curve = [entry[f"eval_{MEASURE}"] for entry in log if f"eval_{MEASURE}" in entry]
    facts = {"rows": len(table), **left_out, "dev": curve,
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
        add("--batch-size", type=count, default=16, dest="batch", help="rows per batch")
        add("--accumulate", type=count, default=1, help="batches per step")
        add("--dev-split", default="dev", help="dev split; the epoch that is best on it is kept")
        add("--dev-run", default=f"{work}/dev/hybrid.tsv", help="run of the dev split")
        add("--dev-depth", type=count, default=20, help="candidates per claim")
        add("--patience", type=count, default=2, help="epochs without a gain on dev")
    finish({"rerank": rerank, "train": train}[job], parser.parse_args(words))

# --- helpers (same in all six scripts)
PACKAGES = ("numpy", "pandas", "torch", "transformers", "sentence_transformers", "bm25s", "openai")
DEVICES = ["auto", "cpu", "mps", "cuda", *map("cuda:{}".format, range(16))]
START, LOCKS = time.monotonic(), []

def fail(where, what):
    """Bad input or usage: one line on stderr, exit status 2."""
    line = " ".join(f"error: {where}: {what}".split())
    print("".join(c if c.isprintable() else "?" for c in line), file=sys.stderr)
    sys.exit(2)

def read_table(path, columns, **known):
    """Read a TSV file as strings; a run by claim and rank, with rank and score as numbers.

    known: the values that a column may hold. The first bad row ends the script, with its line.
    """
    import pandas as pd
    try:
        table = pd.read_csv(path, sep="\t", header=None, dtype=str, na_filter=False,
                            skip_blank_lines=False, encoding="utf-8-sig", encoding_errors="replace")
    except ValueError as error:  # an open quotation mark, a row longer than the header
        [(kind, line)] = re.findall(r"(line|row) (\d+)", str(error))[:1] or [("line", 1)]
        line = int(line) + (kind == "row")  # pandas counts rows from 0
        fail(f"{path}:{line}", f"{error}; check its quotation marks; see 06_evaluate.py convert")
    header = table.iloc[0].tolist()
    if not set(columns) <= set(header) or len(set(header)) < len(header):
        fail(f"{path}:1", f"columns {header}, wanted {columns}; see 06_evaluate.py convert")
    table = table.set_axis(header, axis=1).set_axis(table.index + 1).iloc[1:]  # lines from 1
    table = table[(table != "").any(axis=1)]
    ids = [column for column in columns if column.endswith("_id")]
    torn = table.map(lambda field: "\t" in field and "\n" in field).any(axis=1)
    bad = {"a quotation mark is not closed": torn}
    for column in [*columns, header[-1]]:  # a short row has no last field
        bad[f"{column} is empty, or the row is short"] = table[column].str.strip() == ""
    bad |= {f"unknown {column}": ~table[column].isin(known[column]) for column in known}
    bad["there is an earlier row for this"] = table.duplicated(ids)
    if "rank" in columns:
        claim = table["claim_id"].factorize()[0]
        numbers = table[["rank", "score"]].apply(pd.to_numeric, errors="coerce").astype(float)
        bad["score is not a finite number"] = ~np.isfinite(numbers["score"])
        bad["rank is not 1, 2, 3"] = numbers["rank"] != numbers.groupby(claim)["rank"].rank("first")
    for what, rows in bad.items():
        for row in rows.index[rows][:1]:  # earlier texts may hold line breaks
            line = row + table.loc[: row - 1].map(lambda text: text.count("\n")).to_numpy().sum()
            fail(f"{path}:{line}", f"{what}: {' '.join(table.loc[row, ids])}; fix the row")
    if "rank" in columns:
        table = table.assign(rank=numbers["rank"].astype(int), score=numbers["score"])
        table = table.iloc[np.lexsort((table["rank"], claim))]
    return table.reset_index(drop=True)

def read_corpus(path):
    """Read {abstract_id: record} in file order; an abstract that is not a text becomes ""."""
    corpus, empty = {}, 0
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                if "\\ud" in line.lower():  # lone surrogates become U+FFFD
                    text = json.dumps(record, ensure_ascii=False).encode("utf-16", "surrogatepass")
                    record = json.loads(text.decode("utf-16", "replace"))
                name, text = str(record["abstract_id"]), record.get("abstract")
            except (ValueError, LookupError, TypeError, RecursionError):
                fail(f"{path}:{number}", "not a JSON object with an abstract_id; fix the line")
            if record["abstract_id"] is None or not name.strip() or name in corpus:
                fail(f"{path}:{number}", f"abstract_id {name!r} is empty or not unique; fix it")
            corpus[name] = record | {"abstract": text if isinstance(text, str) else ""}
            empty += not corpus[name]["abstract"].strip()
    if empty:
        print(f"warning: {path}: {empty} abstracts without text, kept as empty", file=sys.stderr)
    return corpus

def task_of(args, *files, models=()):
    """Return what decides the bytes of an output: arguments, and sha256 of what is read.

    Of an index counts meta.json, of a model its provenance, weights, config.json or name.
    """
    arguments = {name: value for name, value in vars(args).items() if name not in NEUTRAL}
    task = {"arguments": arguments, "inputs": {}}
    for path in map(Path, (*files, *models)):
        ends = "", "/meta.json", ".meta.json", "/model.safetensors", "/config.json"
        mark = next(filter(Path.is_file, (Path(f"{path}{end}") for end in ends)), None)
        if not mark and path not in map(Path, models):
            fail(path, "no such file or index; make it with the script before this one")
        with mark.open("rb") if mark else io.BytesIO() as data:
            task["inputs"][str(path)] = hashlib.file_digest(data, "sha256").hexdigest()
    return task

def up_to_date(args, task, *outs):
    """Return whether this very task made outs. Locks them until the process ends."""
    from filelock import FileLock, Timeout
    same, read = not args.force, {Path(path).resolve() for path in task["inputs"]}
    for path in map(Path, outs):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock, meta, made = FileLock(f"{path}.lock"), Path(f"{path}.meta.json"), {}
        try:
            LOCKS.append(lock.acquire(timeout=0))
        except Timeout:
            fail(path, "another command is making it; wait until that one ends")
        atexit.register(Path(lock.lock_file).unlink, missing_ok=True)
        with contextlib.suppress(OSError, ValueError):
            made = json.loads(meta.read_bytes())
        ours = meta.exists() and made.get("arguments", vars(args)).get("job") == args.job
        if path.resolve() in read or (path.is_dir() and any(path.iterdir()) and not ours):
            fail(path, "this command reads it, or did not make it; give another --out")
        same = same and path.exists() and task.items() <= made.items()
    for path in outs if same else ():
        remove(f"{path}.parts")  # left by a process that was killed at its very end
        print(f"up to date: {path}")
    return same

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
        made = task | {"command": sys.argv, "packages": modules, "device": device} | facts | spent()
        text = json.dumps(made, indent=1, ensure_ascii=False) + "\n"
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
    def _get_help_string(self, action):  # the docstring as it stands, and defaults but None
        return action.help if action.default is None else super()._get_help_string(action)

def between(low, high=1e9, kind=float):
    """Return an argparse type: a number from low to high."""
    def number(text):
        if not low <= kind(text) <= high:
            raise argparse.ArgumentTypeError(f"{text} is not a number from {low:g} to {high:g}")
        return kind(text)
    return number

def command_line(*jobs):
    """Return (parser, shared flags, words behind the job: the first word, by default jobs[0])."""
    words = sys.argv[1:]
    job = words.pop(0) if words and words[0] in jobs else jobs[0]
    parser = argparse.ArgumentParser(
        description=sys.modules["__main__"].__doc__, formatter_class=Help, usage=argparse.SUPPRESS,
        allow_abbrev=False)
    parser.error = lambda message: fail(Path(sys.argv[0]).name, f"{message}; see --help")
    parser.set_defaults(job=f"{Path(sys.argv[0]).name} {job}")
    add = parser.add_argument
    add("--data", default="data/demo", help="folder of corpus, claims and qrels")
    add("--work", default="work/demo", help="folder of everything made from them")
    add("--split", default="train" if job in ("train", "mine") else "test", help="which claims")
    add("--seed", type=between(0, 2**32 - 1, int), default=13, help="of every random choice")
    add("--device", nargs="+", choices=DEVICES, metavar="cuda:0", default=["auto"], help="or cpu")
    add("--force", action="store_true", help="make outputs again, from the start")
    shared, _ = parser.parse_known_args([word for word in words if word not in ("-h", "--help")])
    return job, parser, shared, words

def finish(job, args):
    """Run the job and print its result as JSON; a fault of the disk is one line, Ctrl-C silence."""
    try:
        print(json.dumps(job(args) | spent(), ensure_ascii=False))
    except (KeyboardInterrupt, BrokenPipeError):  # Ctrl-C; | head
        os._exit(130)  # without tearing libraries down, which takes seconds
    except OSError as error:
        fail(error.filename or args.job, f"{error.strerror or error}; check path, rights and space")
    except (RuntimeError, MemoryError) as error:
        if "memory" not in repr(error).lower() or "illegal" in repr(error):
            raise
        fail(args.job, "out of memory; lower --batch-size or lengths, and run it again to go on")
# --- end of helpers

# --- models (same in 01, 02, 03 and 05)
def open_model(load, name, args, dtype="auto", **how):
    """Return load(name, ...), a sentence-transformers model; a bad one ends the script.

    dtype: fp32, bf16 or fp16; auto is fp32 on a CPU, and on a GPU bf16 where it has it, else fp16.
    """
    import torch
    device = None if args.device == ["auto"] else args.device[0]
    gpu = torch.cuda.is_available() if device is None else device.startswith("cuda")
    if dtype == "auto":
        dtype = ("bf16" if torch.cuda.is_bf16_supported(False) else "fp16") if gpu else "fp32"
    precision = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    print(f"loading {name}", file=sys.stderr)
    try:
        weights = {"dtype": precision, "use_safetensors": True}
        model = load(str(name), device=device, trust_remote_code=False, model_kwargs=weights, **how)
        words = len(model.tokenizer.get_vocab())
        for place in args.device[1:]:
            torch.empty(0, device=place)  # raises if there is no such device
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
    folder, mark = Path(f"{out}.parts"), json.dumps(task)
    path = folder / "task.json"
    if args.force or not path.is_file() or path.read_text(encoding="utf-8") != mark:
        remove(folder)
        folder.mkdir(parents=True)
        path.write_text(mark, encoding="utf-8")
    return folder

def one_gpu(args):
    """Hide all GPUs but the first of --device: a Trainer multiplies its batch by those it sees."""
    kind, _, place = args.device[0].partition(":")
    if kind in ("auto", "cuda"):
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")
        if place and place not in map(str, range(len(seen))):
            fail("--device", f"no {args.device[0]} among GPUs {', '.join(seen)}")
        os.environ["CUDA_VISIBLE_DEVICES"], args.device = seen[int(place or 0)], [kind]

def fit(make, arguments, model, folder, args, measure=None, **more):
    """Train with a checkpoint an epoch in folder, from the newest one on. Return the log.

    make: arguments to trainer. With a measure, the epoch that is best on dev is kept.
    """
    import torch
    from transformers import EarlyStoppingCallback, ProgressCallback, logging
    class Epochs(ProgressCallback):  # one bar, and one line an epoch
        def on_log(self, how, state, control, logs, **_):
            if not np.isfinite(logs.get("loss", 0)):
                fail("--lr", "the loss is not a finite number; lower it")

        def on_save(self, how, state, control, **_):
            last = {name: value for line in state.log_history for name, value in line.items()}
            shown = [name for name in ("epoch", "loss", measure) if name in last]
            line = ", ".join(f"{name} {last[name]:.4f}" for name in shown)
            self.training_bar.write(line, file=sys.stderr)

    checkpoint, state = None, {}
    for path in sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name[11:])):
        try:
            state, checkpoint = json.loads((path / "trainer_state.json").read_bytes()), str(path)
        except (OSError, ValueError):
            remove(path)  # torn: its state is written last
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
    trainer.add_callback(Epochs)
    if measure:
        trainer.add_callback(EarlyStoppingCallback(args.patience))
    trainer.train(resume_from_checkpoint=checkpoint)
    if best := trainer.state.best_model_checkpoint:  # the trainer keeps the last one if that fails
        how = {"trust_remote_code": False, "model_kwargs": {"use_safetensors": True}}
        model.load_state_dict(type(model)(best, device="cpu", **how).state_dict())
    return trainer.state.log_history
# --- end of training

if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__" and sys.platform == "linux":  # a worker of several devices
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: it ends with its parent
