# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "numpy==2.4.6", "pandas==3.1.1", "protobuf==7.36.2", "sentence-transformers==6.2.0",
#   "sentencepiece==0.2.3", "torch==2.13.0", "tqdm==4.70.1", "transformers==5.23.0",
# ]
# ///
"""
Rerank the candidates of a run with a cross-encoder or another reranker.

Reads   a run, claims, corpus, and with --graph a neighbour graph
Writes  rerank.tsv
        OUT.parts/: finished scores, from which the same call resumes
Prints  how many candidates of the run were left out; the last line is JSON

recipes/train/reranker.py trains a cross-encoder. Functions that several scripts share stand at the
end, in marked blocks.

Examples
    python 03_rerank.py --depth 50 --first-stage 0.5
    python 03_rerank.py --model Qwen/Qwen3-Reranker-0.6B --depth 100 --device cuda:0 cuda:1
    python 03_rerank.py --graph work/demo/index/graph --top-k 10
"""

import argparse
import contextlib
import csv
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
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np

PAIR = ["claim_id", "abstract_id"]
RUN = [*PAIR, "rank", "score"]
MONO_T5 = "Query: {} Document: {} Relevant:"  # monoT5 answers true or false


class Causal(NamedTuple):
    """The form in which a decoder-only reranker is asked, by its model card."""

    template: str  # of a chat
    prompt: str  # default of --prompt
    true: str  # the score is the logit of this word as the next token,
    false: str | None  # minus that of this one, if there is one


# Jinja: the content of the first message with a role. Braces are doubled, as format() halves them.
CONTENT = '{{{{ messages | selectattr("role", "eq", "{}") | map(attribute="content") | first }}}}'
PROMPT, QUERY, DOCUMENT = [CONTENT.format(role) for role in ("system", "query", "document")]
# Jinja drops the line break that ends a template, so the last ones stand in an expression.
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
CAUSAL = {  # by a part of the model's name: those that are published without this form
    "qwen3-reranker": Causal(
        QWEN3,
        "Given a web search query, retrieve relevant passages that answer the query",
        "yes",
        "no",
    ),
    "bge-reranker-v2-gemma": Causal(
        BGE_GEMMA,
        "Given a query A and a passage B, determine whether the passage contains an answer to the "
        "query by providing a prediction of either 'Yes' or 'No'.",
        "Yes",
        None,
    ),
}
API_KEY = os.environ.get("OPENAI_API_KEY", "").strip()
# Arguments of calls, which a task leaves out. It has base_url as "endpoint", without the password.
CALLING = ["base_url", "concurrency", "timeout"]
DOCUMENTS = 32  # in a call of a rerank endpoint: TEI's default limit
# The block "models" ends its messages with this.
ADVICE = """train it (python recipes/train/reranker.py --data ...) or name one (--model
    cross-encoder/ms-marco-MiniLM-L6-v2)"""


# ---------- Inputs
def read_candidates(args, claims, abstracts):
    """Return the rows of --run, whose score becomes the column first_stage."""
    run = read_table(args.run, RUN, claim_id=claims, abstract_id=abstracts)[RUN]
    run[PAIR] = run[PAIR].astype("category")  # numbers in place of ids: runs have millions of rows
    return run.rename(columns={"score": "first_stage"})


def read_graph(args, inputs):
    """Return {abstract_id: its nearest abstracts, nearest first}.

    inputs: {path: sha256}, so that a graph of another corpus is refused.
    """
    folder = Path(args.graph)
    if read_meta(folder, inputs[args.graph])["corpus"] != inputs[args.corpus]:
        fail(folder, "the corpus has changed since then; make the graph again by 01_index.py")
    abstract_ids = json.loads((folder / "abstract_ids.json").read_bytes())
    rows = np.load(folder / "neighbours.npy")[:, : args.neighbours]
    return dict(zip(abstract_ids, np.array(abstract_ids, object)[rows].tolist()))


# ---------- Models
def mono_t5(name, device, model_kwargs, **options):
    """Load monoT5; a score is the logit of true minus that of false (Nogueira et al. 2020)."""
    import torch
    from sentence_transformers import CrossEncoder
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    class MonoT5(torch.nn.Module):
        preprocess = None  # open_reranker() sets it

        def forward(self, batch):
            inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
            # The decoder gets one start token, and its first output is true or false.
            start = self.t5.config.decoder_start_token_id
            starts = torch.full_like(batch["input_ids"][:, :1], start)
            logits = self.t5(**inputs, decoder_input_ids=starts).logits[:, 0]
            true, false = self.tokenizer("true false", add_special_tokens=False)["input_ids"]
            return {"scores": logits[:, true] - logits[:, false]}

    module = MonoT5()
    module.t5 = AutoModelForSeq2SeqLM.from_pretrained(name, **options, **model_kwargs)
    module.tokenizer = AutoTokenizer.from_pretrained(name, **options)
    module.probe = [MONO_T5.format("a", "b")]  # for PairReader.frame_of()
    return CrossEncoder(modules=[module], device=device)


def causal_reranker(name, **options):
    """Load a decoder-only reranker by the settings in its files, else by CAUSAL, else None."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.util import is_sentence_transformer_model

    if is_sentence_transformer_model(name, local_files_only=options["local_files_only"]):
        return CrossEncoder(name, **options)
    for part, causal in CAUSAL.items():
        if part in name.lower():
            options["processor_kwargs"] = {"chat_template": causal.template}
            options |= {"prompts": {"own": causal.prompt}, "default_prompt_name": "own"}
            model = CrossEncoder(name, **options)
            token_ids = model.tokenizer.get_vocab()
            model[1].true_token_id = token_ids[causal.true]
            model[1].false_token_id = token_ids.get(causal.false)
            return model
    return None


def architectures_of(name, options):
    """Return the names of the classes for which a model's configuration is made, as one text."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(
        name, trust_remote_code=False, local_files_only=options["local_files_only"]
    )
    return str(config.architectures)


def is_late_interaction(name, architectures, options):
    """Return whether a model is one of late interaction: the library's, PyLate's or ColBERT's."""
    from sentence_transformers.util import load_file_path

    path = load_file_path(
        name, "config_sentence_transformers.json", local_files_only=options["local_files_only"]
    )
    config = json.loads(Path(path).read_bytes()) if path else {}
    is_late = config.get("model_type") in ("MultiVectorEncoder", "ColBERT")
    return is_late or config.get("similarity_fn_name") == "MaxSim" or "HF_ColBERT" in architectures


def load_reranker(name, **options):
    """Load a cross-encoder, a decoder-only reranker, monoT5, or a model of late interaction."""
    import torch
    from sentence_transformers import CrossEncoder, MultiVectorEncoder

    architectures = architectures_of(name, options)
    model = None
    if is_late_interaction(name, architectures, options):
        return MultiVectorEncoder(name, **options)
    if "ConditionalGeneration" in architectures:
        model = mono_t5(name, **options)
    elif "Classification" in architectures:
        model = CrossEncoder(name, **options)
    elif "CausalLM" in architectures:
        model = causal_reranker(name, **options)
    if not model:
        what = "nothing in its files says how it scores a pair (a head, or modules.json)"
        fail(name, f"{what}; train it (python recipes/train/reranker.py --model {name})")
    if not model.keep_in_fp32_modules:
        # Half precision gives equal scores to different abstracts, so the last layer stays in fp32.
        layers = [path for path, part in model.named_modules() if type(part) is torch.nn.Linear]
        model.set_keep_in_fp32_modules(layers[-1:])
    return model


def open_reranker(load, args, dtype, batch_size):
    """Open --model by load, set its length and prompt, and let a PairReader make its inputs."""
    import torch

    model = open_model(load, args.model, args, dtype)
    if model.model_type == "MultiVectorEncoder":
        if args.prompt is not None:
            fail("--prompt", "a model of late interaction has its own; leave it out")
        own = model[0].document_length or model.max_seq_length or args.max_length
        model[0].document_length = min(own, args.max_length)
        return model
    if model.num_labels != 1:
        fail(args.model, f"{model.num_labels} labels; a classifier is for 05_classify.py")
    check_fields(model.config, args.model, args)
    model.activation_fn = torch.nn.Identity()  # scores are logits; a sigmoid makes large ones 1
    model.max_seq_length = min(model.max_seq_length or args.max_length, args.max_length)
    if args.prompt is not None:
        model.prompts["own"] = args.prompt
        model.default_prompt_name = "own"
    model[0].preprocess = PairReader(model, 0, batch_size)
    return model


# ---------- Scores: a cross-encoder, late interaction, a rerank endpoint
def outputs_on_devices(model, args, pairs, bar):
    """Return scores (pairs, 1), by a process on each device, and which pairs are truncated."""
    reader = model[0].preprocess
    if not reader.library:  # which the processes need; monoT5 has none
        fail("--device", "monoT5 scores on one device; name one")
    is_truncated = [reader.read(pair)[1] for pair in pairs]
    # All token ids of the reader would be sent to each process.
    model[0].preprocess = reader.library
    outputs = model.predict(pairs, batch_size=batch_size_of(args), device=args.device)
    model[0].preprocess = reader
    bar.update(len(pairs))
    return outputs.reshape(-1, 1), is_truncated


def max_sims(model, args, pairs, bar):
    """Return MaxSim of claims and abstracts (pairs, 1), and which abstracts are truncated.

    MaxSim is the sum over the tokens of a claim of the highest cosine with a token of the abstract
    (Khattab and Zaharia 2020).
    """
    options = {"batch_size": batch_size_of(args)}
    if len(args.device or []) > 1:
        options["device"] = args.device
    claims, abstracts = [list(dict.fromkeys(texts)) for texts in zip(*pairs)]
    claim_vectors = dict(zip(claims, model.encode_query(claims, **options)))
    abstract_vectors = dict(zip(abstracts, model.encode_document(abstracts, **options)))
    scores = model.similarity_pairwise(
        [claim_vectors[claim] for claim, _ in pairs],
        [abstract_vectors[abstract] for _, abstract in pairs],
    )
    prompt = model.prompts["document"] or ""
    coded = model.tokenizer([prompt + abstract for abstract in abstracts])["input_ids"]
    lengths = dict(zip(abstracts, map(len, coded)))
    is_truncated = [lengths[abstract] > model[0].document_length for _, abstract in pairs]
    bar.update(len(pairs))
    return scores.cpu().numpy().reshape(-1, 1), is_truncated


def score_locally(args, texts):
    """Open --model, and return score(pairs, path), which scores a table of pairs.

    It returns the table with the columns score and is_truncated. Both are stored in the file path
    as they are computed, so that the same call resumes. texts: claims and abstracts, by their ids.
    """
    model = open_reranker(load_reranker, args, args.dtype, batch_size_of(args))
    size = 20 * GROUP  # for each group, processes start anew, and an abstract is encoded anew
    if model.model_type == "MultiVectorEncoder":
        compute = functools.partial(max_sims, model, args)
    elif len(args.device or []) > 1:
        compute = functools.partial(outputs_on_devices, model, args)
    else:
        compute = functools.partial(outputs_and_truncated, model)
        size = GROUP

    def score(pairs, path):
        scores, is_truncated = score_resumably(compute, 1, pairs, texts, path, args, size)
        return pairs.assign(score=scores[:, 0], is_truncated=is_truncated)

    return score


def results_of(body):
    """Return the results in the reply of a rerank endpoint: TEI sends them alone."""
    return body if isinstance(body, list) else body["results"]


def scores_in(results, number):
    """Return the scores of documents 0 to number - 1 in results."""
    scores = {}
    for result in results:
        name = "relevance_score" if "relevance_score" in result else "score"
        scores[result["index"]] = float(result[name])
    scores = [scores.get(index, np.nan) for index in range(number)]
    if not np.isfinite(scores).all():
        raise ValueError("the reply has no score, or none that is a number, for some documents")
    return scores


class RerankEndpoint:
    """Asks --base-url for scores. field: the name of the texts in a call, for TEI "texts"."""

    def __init__(self, args):
        self.args = args
        self.client = client_of(args, is_complete=results_of)  # without results, a call is repeated
        self.field = "documents"

    def call(self, claim, documents):
        """Return the scores of documents for a claim."""
        import openai

        field = self.field  # another thread may change it
        body = {"model": self.args.model, "query": claim, "top_n": len(documents)}
        body |= {field: documents, **self.args.extra}
        try:
            found = self.client.post("/rerank", cast_to=object, body=body)
        except openai.UnprocessableEntityError as error:
            if field == "texts" or "texts" not in str(error):
                raise
            self.field = "texts"
            return self.call(claim, documents)
        return scores_in(results_of(found), len(documents))


def score_by_endpoint(args, texts):
    """Return a function as score_locally() does, which asks the rerank endpoint --base-url.

    Each reply is stored when it comes, so that nothing is asked for twice.
    """
    from tqdm.contrib.concurrent import thread_map

    endpoint = RerankEndpoint(args)
    size = args.batch_size or DOCUMENTS
    errors = []

    def score(pairs, path):
        rows_of = pairs.groupby("claim_id", sort=False, observed=True).indices
        paired = paired_texts(pairs, texts)
        stored = open_scores(path, (len(pairs), 1))
        calls = []
        for rows in rows_of.values():
            rows = rows[np.isnan(stored[rows, 0])]
            calls += [rows[start : start + size] for start in range(0, len(rows), size)]

        def fetch(rows):
            if errors:
                return
            claim = paired[rows[0]][0]
            documents = [paired[row][1] for row in rows]
            try:
                stored[rows, 0] = endpoint.call(claim, documents)
            except Exception as error:  # of the client, or of a reply in another form
                errors.append(f"{type(error).__name__}: {error}")

        thread_map(fetch, calls, max_workers=args.concurrency, desc=args.job)
        if errors:
            fail(args.base_url, scrubbed(f"{errors[0]}; run again to go on", args))
        return pairs.assign(score=np.array(stored[:, 0]), is_truncated=False)

    return score


# ---------- Rerank
def with_neighbours(table, graph, score, parts, args):
    """Append neighbours of the best abstracts, round by round (AlexUNLP-FMT 2025).

    score: as score_locally() returns.
    """
    import pandas as pd

    for number in range(args.rounds):
        found = []
        for claim_id, rows in table.groupby("claim_id", sort=False, observed=True):
            for abstract_id in rows.nlargest(args.beam, "score")["abstract_id"]:
                found += [(claim_id, neighbour) for neighbour in graph[abstract_id]]
        seen = set(zip(table["claim_id"], table["abstract_id"]))
        new = [pair for pair in dict.fromkeys(found) if pair not in seen]
        if not new:
            break
        pairs = pd.DataFrame(new, columns=PAIR)
        neighbours = score(pairs, parts / f"neighbours-{number}.npy")
        table = pd.concat([table, neighbours], ignore_index=True)
    return table


def blend_first_stage(table, weight):
    """Return (1 - weight) z(score) + weight z(first_stage), with z-scores within each claim.

    A neighbour has no score of the first stage; it gets the claim's lowest one.
    """
    claims = table["claim_id"]
    scores = table[["score", "first_stage"]]
    # The claim's lowest score is subtracted, so it becomes 0, and fillna() gives neighbours 0, too.
    # Subtracting a constant does not change z-scores.
    shifted = (scores - scores.groupby(claims, observed=True).transform("min")).fillna(0)
    by_claim = shifted.groupby(claims, observed=True)
    deviations = by_claim.transform("std", ddof=0).replace(0, 1)  # 0 where all scores are equal
    z = (shifted - by_claim.transform("mean")) / deviations
    return (1 - weight) * z["score"] + weight * z["first_stage"]


def with_rest(table, rest, top_k):
    """Append the first top_k candidates beyond --depth in their order.

    Their scores are the claim's lowest score - 1, - 2, ...
    """
    import pandas as pd

    lowest = table.groupby("claim_id", observed=True)["score"].min()
    steps = 1 + rest.groupby("claim_id", observed=True).cumcount()
    scores = rest["claim_id"].map(lowest).astype(float) - steps
    both = pd.concat([table, rest.assign(score=scores)[steps <= top_k]])
    return both.drop_duplicates(PAIR)  # a neighbour may be such a candidate, too


def ranked(table, top_k):
    """Return the first top_k rows of each claim by score (None: all), with ranks."""
    run = table.iloc[np.lexsort((-table["score"], table["claim_id"].factorize()[0]))]
    run = run.assign(rank=run.groupby("claim_id", observed=True).cumcount() + 1)
    return run[run["rank"] <= top_k] if top_k else run


def rerank(args):
    """Score the first candidates of each claim with a model, and sort them by score."""
    inputs = [args.run, args.claims, args.corpus]
    if args.graph:
        inputs += [args.graph]
    if args.base_url and args.prompt is not None:
        fail("--prompt", "a rerank endpoint has its own; leave it out, or see --extra")
    models = [] if args.base_url else [args.model]
    task = task_of(args, *inputs, models=models, without=["batch_size", *CALLING])
    task["endpoint"] = shown(args.base_url or "")
    if up_to_date(args, task, args.out):
        return {"made": []}
    for model in models:
        check_model(model)
    claims = read_claims(args.claims)
    abstracts = read_abstracts(args.corpus, args.fields)
    candidates = read_candidates(args, claims, abstracts)
    is_within = candidates["rank"] <= args.depth
    graph = read_graph(args, task["inputs"]) if args.graph else {}
    with parts_of(args.out, task) as parts:
        open_scorer = score_by_endpoint if args.base_url else score_locally
        score = open_scorer(args, (claims, abstracts))
        table = score(candidates[is_within], parts / "scores.npy")
        if graph:
            table = with_neighbours(table, graph, score, parts, args)
        if args.first_stage:
            table["score"] = blend_first_stage(table, args.first_stage)
        summary = {"pairs": len(table), "truncated": int(table["is_truncated"].sum())}
        if args.top_k:
            table = with_rest(table, candidates[~is_within], args.top_k)
        run = ranked(table, args.top_k)
        left_out = len(candidates) - len(candidates[PAIR].merge(run[PAIR]))
        summary |= {"rows": len(run), "left_out": left_out}
        with written(args.out, task, **summary) as new:
            write_table(run[RUN], new)
    print(f"{args.out}: {len(run)} rows, {left_out} of {len(candidates)} candidates left out")
    return {"made": [args.out], **summary}


# ---------- Command line
# fmt: off
def add_texts(add):
    add("--claims", default="{data}/claims.{split}.tsv", help="read the claims from this file")
    add("--corpus", default="{data}/corpus.jsonl", help="read the abstracts from this file")

def add_fields(add):
    add("--fields", type=field_names, default="title,abstract",
        help="make the text of an abstract from these fields")

def add_reading(add):
    add("--max-length", type=length, default=512,
        help="truncate a pair and its prompt to this many tokens")
    add("--prompt", metavar="TEXT", help="""instruct a causal reranker or monoT5 by this text; it is
        the text itself, no file as in 04_llm_rerank.py (default: the model's own)""")

def add_rerank(job):
    add = job.add_argument_group("inputs and outputs").add_argument
    add("--run", default="{work}/{split}/hybrid.tsv", help="rerank the candidates of this run")
    add_texts(add)
    add_fields(add)
    add("--out", default="{work}/{split}/rerank.tsv", help="write the reranked run to this file")
    add("--depth", type=count, default=20, help="score this many candidates per claim")
    add("--top-k", type=count, help="""write this many abstracts per claim; candidates beyond
        --depth follow in their old order (default: those that are scored)""")
    add("--first-stage", type=share, default=0, metavar="WEIGHT",
        help="""blend in the scores of --run with this weight (z-scores per claim): 0 leaves them
        out, 1 keeps their order; a weak reranker wants 0.5 to 0.8, a strong one 0 to 0.2""")
    add = job.add_argument_group("model").add_argument
    add("--model", default="{work}/models/reranker",
        help="score with this reranker: a folder, a name on the hub, or its name at --base-url")
    add_reading(add)
    add("--batch-size", type=count, help="""score batches of at most this many times --max-length
        tokens, so of more pairs where they are short (default: 32, on a GPU 128); with --base-url,
        documents per call (32)""")
    add("--dtype", choices=("auto", "fp32", "bf16", "fp16"), default="auto",
        help="precision of the model; auto takes half precision on a GPU, else fp32")
    add("--device", nargs="+", help="""score on cpu, mps, cuda, or on cuda:0 cuda:1 (default: a
        GPU, if any)""")
    add = job.add_argument_group("rerank endpoint").add_argument
    add("--base-url", help="""have --model score at this endpoint, which serves /rerank, such as
        http://localhost:8000/v1 of vLLM; the key is read from OPENAI_API_KEY""")
    add("--extra", type=json_object, default={},
        help="""add this JSON object of parameters to each call: {"truncate_prompt_tokens": 512}""")
    add("--concurrency", type=count, default=16, help="make this many calls at a time")
    add("--timeout", type=seconds, default=120, help="""wait this many seconds for each reply; a
        timeout ends the job, and the next run asks again""")
    add = job.add_argument_group("neighbours").add_argument
    add("--graph", metavar="FOLDER", help="""also score neighbours of the best abstracts, by
        this graph of 01_index.py graph""")
    add("--rounds", type=count_or_0, default=20,
        help="search neighbours for at most this many rounds")
    add("--neighbours", type=count, default=10,
        help="take this many neighbours of an abstract, at most those of the graph")
    add("--beam", type=count, default=30,
        help="expand this many best abstracts per claim and round")
    add_shared(job, split="test")

# fmt: on


def main():
    if sys.argv[1:2] == ["train"]:
        fail("train", "is a program of its own: python recipes/train/reranker.py")
    run_job(command_line({rerank: add_rerank}))


# --- helpers (same in all six scripts)
START = time.monotonic()
WARNINGS = []  # what this call has warned of; sidecars keep it
CHANGE_NO_OUTPUT = {"force", "out", "device", "function"}  # arguments, in every job
PACKAGES = ("numpy", "pandas", "torch", "transformers", "sentence_transformers", "bm25s", "openai")
MADE_BY = {  # {a file's name, or its part before the first dot: the job that makes it}
    "bm25.tsv": "02_retrieve.py",
    "dense.tsv": "02_retrieve.py",
    "splade.tsv": "02_retrieve.py",
    "bm25": "01_index.py",
    "dense": "01_index.py",
    "splade": "01_index.py",
    "graph": "01_index.py graph",
    "hybrid": "02_retrieve.py",
    "fused": "02_retrieve.py fuse",
    "fusion": "recipes/train/fit_fusion.py",
    "examples": "recipes/train/mine.py",
    "rerank": "03_rerank.py",
    "verdicts": "05_classify.py",
}
# Files of a folder that no model or index needs: README.md, hidden ones (hf download leaves some)
NOT_LOADED = r"(^|/)\.\w|^README.md$"
ONE_LINE = r"[^\t\r\n]+"  # an id that fits into a TSV file


def shown(text):
    """Return a text in one line, with control characters escaped and passwords of URLs hidden."""
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


def within(number, least, most=1_000_000_000):
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


def seconds(text):
    """Return a number of seconds, up to a day."""
    return within(float(text), 0.1, 86_400)


def json_object(text):
    """Return a dict of JSON; argparse shows a text that is none to the user."""
    return {**json.loads(text)}


def digest(path):
    """Return the sha256 of a file, or of the files of a folder that are loaded."""
    path = Path(path)
    total = hashlib.sha256()
    for part in [path, *sorted(path.rglob("*"))]:
        name = part.relative_to(path).as_posix()
        if part.is_file() and not re.search(NOT_LOADED, name):
            with part.open("rb") as file:
                hashlib.file_digest(file, lambda: total)  # goes on with total
    return total.hexdigest()


def check_input(path, args):
    """End if an input is missing; say which job makes it, or which splits are there."""
    path = Path(path)
    if path.exists():
        return
    kind = path.name.split(".")[0]
    made_by = MADE_BY.get(path.name, MADE_BY.get(kind))
    advice = [f"make it by {made_by}"] if made_by else []
    for folder in reversed(path.parents):
        if not folder.exists() and not made_by:
            fail(folder, "no such folder; fix its name, or see data/README.md")
    splits = [other.name.split(".")[1] for other in path.parent.glob(f"{kind}.*.tsv")]
    if splits:
        advice.append(f"splits there: {', '.join(sorted(splits))}")
    for name, value in vars(args).items():
        if str(value) == str(path):
            advice.append(f"name another file for {name.replace('_', '-')}")
    fail(path, f"not found; {'; '.join(advice) or 'fix its name'}")


def task_of(args, *inputs, models=(), without=()):
    """Return what decides an output: arguments, and digests of inputs and of local models.

    without: names of arguments that change no output of this job.
    """
    for path in inputs:
        check_input(path, args)
    # A model that is not there is one of the hub.
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
    """End if an output would replace an input of this call, or what the kit has not made.

    A file never replaces a folder, nor a folder a file. A folder (is_folder) replaces only one that
    has a sidecar.
    """
    are_read = [os.path.abspath(path) for path in inputs]  # a file may be named in several ways
    for out in map(Path, outs):
        taken = [path for path in out.parents if path.is_file()]
        is_ours = is_folder and Path(f"{out}.meta.json").exists()
        is_other = out.exists() and not out.is_file()  # a folder, or a device such as /dev/null
        if (is_other and not is_ours) or (is_folder and out.is_file()):
            taken.append(out)
        for path in taken:
            fail(path, "not made by this script, which would replace it; give another name")
        if os.path.abspath(out) in are_read:
            fail(out, "this call reads it; give another name for what it writes")


def up_to_date(args, task, *outs, is_folder=False):
    """Return whether this very task has made all outs, and nobody has changed them since."""
    check_outs(*outs, inputs=task.get("inputs", ()), is_folder=is_folder)
    for out in outs:
        if args.force or not Path(out).exists():
            return False
        # <=: the sidecar has all of this, and more
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
        pid = left.with_suffix("").suffix[1:]  # 123 of PATH.123.tmp
        try:
            os.kill(int(pid), 0)  # which only asks whether this process runs
        except ProcessLookupError:
            remove(left)
        except (OSError, ValueError, OverflowError):
            pass  # another user's process, or not the number of one


@contextlib.contextmanager
def written(path, task, **summary):
    """Yield a temporary path for a new output, which then replaces path as a whole.

    The sidecar gets the task, the summary, and how the output was made. While the output is
    replaced, the sidecar is {}, which fits no task: after a kill then, the output is made again.
    """
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
    check_outs(path, is_folder=new.is_dir())  # again: something may be in this place by now
    loaded = {name: sys.modules[name].__version__ for name in PACKAGES if name in sys.modules}
    made = {
        "command": list(map(shown, sys.argv)),
        "script": digest(sys.argv[0]),
        "packages": loaded,
        "warnings": WARNINGS,
        "sha256": digest(new),
        "seconds": round(time.monotonic() - START, 1),
    }
    new_meta.write_text(json.dumps(task | summary | made, indent=1))
    meta.write_text("{}")
    if path.is_dir():
        path.rename(old)  # a folder cannot take the place of another one
    new.replace(path)
    new_meta.replace(meta)
    remove(old)


def add_shared(job, split=None, force=True):
    """Add the flags that all scripts share.

    split: the default of --split, None for jobs without one. force: whether the job has --force;
    a job that is never up to date needs none.
    """
    add = job.add_argument_group("shared by all scripts").add_argument
    # fmt: off
    add("--data", default="data/demo", help="read data of this folder, {data} in other defaults")
    add("--work", help="""keep indexes, models and runs in this folder, {work} in other defaults,
        where the next scripts find them (default: work/NAME, with the last name in --data)""")
    if split:
        add("--split", default=split,
            help="take claims and judgements of this split, {split} in other defaults")
    if force:
        add("--force", action="store_true", help="make outputs again, even if they are up to date")
    # fmt: on


def command_line(jobs):
    """Return the parsed arguments; jobs: {function: what adds its flags}, the default job first.

    In defaults, {data}, {work} and {split} stand for the values of these flags.
    """
    names = [function.__name__ for function in jobs]
    helps = ["-h", "--help"]
    own = {}
    if len(jobs) == 1:  # the job is the script
        helps = []
        own = {"prog": os.path.basename(sys.argv[0]), "description": __doc__}
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    choices = parser.add_subparsers(title="jobs", metavar=f"JOB (default: {names[0]})")
    for name, function in zip(names, jobs):
        texts = {"help": function.__doc__, "description": function.__doc__} | own
        job = choices.add_parser(name, formatter_class=layout, **texts)
        job.set_defaults(function=function, job=name)
        # argparse prints its usage before an error, and has no setting for that.
        parser.error = job.error = lambda text: fail(parser.prog, f"{text}; see --help")
        jobs[function](job)
        for flag in job._actions:  # argparse has no public list of them
            is_shown = str(flag.default) not in ("None", "False", argparse.SUPPRESS)
            if is_shown and "(default" not in flag.help:
                flag.help += " (default: %(default)s)"
    words = sys.argv[1:]
    if not words or words[0] not in (*names, *helps):
        words = [names[0], *words]
    args = parser.parse_args(words)
    if "data" in args:
        args.work = args.work or f"work/{Path(args.data).resolve().name}"
    for field in ("data", "work", "split"):
        for name, value in vars(args).items():
            if isinstance(value, str) and field in args:
                setattr(args, name, value.replace(f"{{{field}}}", vars(args)[field]))
    return args


def run_job(args):
    """Run the job, and print its result as JSON; errors of files and packages are one line."""
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
    # Blank lines go; the index keeps counting them, so it is a line's number less 2.
    table = table[(table[list(columns)] != "").any(axis=1)]
    if "claim" in columns:
        quoted = '^"((?:[^"]|"")*)"$'  # as pandas writes texts with quotation marks
        claims = table["claim"].str
        table["claim"] = claims.replace(quoted, lambda text: text[1].replace('""', '"'), regex=True)
    ids = [column for column in columns if column.endswith("_id")]
    # {what is wrong: in which rows}; the first fault that occurs is reported
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
                    # It fails at half of a surrogate pair.
                    json.dumps(record, ensure_ascii=False).encode()
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
    known = {"title"}.union(*records.values())  # a title is optional
    unknown = set(fields) - known
    if unknown:
        tell = warn if unknown < set(fields) else fail  # fail if all are unknown
        tell(path, f"no record has the field {', '.join(sorted(unknown))}; see --fields")
    return {key: text_of(record, fields, separator) for key, record in records.items()}


# --- end of helpers


# --- models (same in 01, 02, 03 and 05)
LEAST_TOKENS = 200  # a tokenizer with fewer knows special tokens alone: files of it are missing


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
    """Load a model with load(name, ...), a class or function that takes the library's arguments.

    No code of the model is run. Weights are read from safetensors, else from a .bin by PyTorch's
    weights-only loader. dtype: auto is half precision on a GPU, else fp32.
    """
    import torch

    device = device_of(args)
    if dtype == "auto":
        dtype = "fp32"
        if str(device).startswith("cuda"):
            dtype = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    options |= {"device": device, "trust_remote_code": False}
    options["model_kwargs"] = {"dtype": names[dtype]}
    options["local_files_only"] = Path(name).exists()  # a folder needs no hub
    # Else transformers asks the hub to convert a .bin, which opens a pull request there.
    os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "1"
    guard = contextlib.nullcontext()
    if torch.__version__ < "2.10":  # TorchVersion compares numbers; CVE-2025-32434, 2026-24747
        guard = mock.patch("torch.load", refuse_bin)
    try:
        with guard:
            model = load(str(name), **options)
    except Exception as error:  # the libraries raise many kinds
        fail(name, f"{reason_of(error)}; {ADVICE}; or fetch it: python data/download.py model NAME")
    if len(model.tokenizer.get_vocab()) < LEAST_TOKENS:
        what = "files of its tokenizer are missing, such as tokenizer.json"
        fail(name, f"{what}; copy the whole folder")
    # Llama has none; tokenizers of static embeddings do not even have the attribute.
    if getattr(model.tokenizer, "pad_token", True) is None:
        model.tokenizer.pad_token = model.tokenizer.eos_token
        model.transformers_model.config.pad_token_id = model.tokenizer.pad_token_id
    return model


def reason_of(error):
    """Return why a model cannot be opened, in other words than the library's where they help."""
    reason = str(error)
    if "trust_remote_code" in reason:
        return "it comes with code of its own, which the kit does not run"
    if "gated repo" in reason:
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
    """Return a number of tokens that leaves room for texts beside special tokens."""
    return within(int(text), 8)


def check_model(name):
    """End if the library is too old, or a folder is not there; OWNER/NAME may be on the hub."""
    from packaging.version import Version

    installed = importlib.metadata.version("sentence-transformers")
    if Version(installed) < Version("6.2"):
        what = f"{installed} is older than 6.2; pip install -U 'sentence-transformers>=6.2'"
        fail("sentence-transformers", what)
    if not Path(name).exists() and name.count("/") > 1:
        fail(name, f"no such model; {ADVICE}")


def check_fields(config, name, args):
    """Warn if a model was trained on other fields of abstracts than those it is given now."""
    trained = getattr(config, "trained_fields", args.fields)
    if trained != args.fields:
        warn(name, f"trained on the fields {trained}, it gets {args.fields}; see --fields")


def read_meta(folder, sha256):
    """Return the meta.json of an index; end if its files have another digest than when made."""
    if sidecar_of(folder).get("sha256") != sha256:
        fail(folder, "damaged, or without its sidecar; make it again by 01_index.py --force")
    return json.loads(Path(folder, "meta.json").read_bytes())


# --- end of models


# --- pairs (same in 03 and 05)
GROUP = 1024  # pairs that are scored and stored at once


class PairReader:
    """Makes the inputs of a cross-encoder from pairs (claim, abstract).

    The library tokenises both texts anew in each pair. Here a text is tokenised once, and its token
    ids are put between the special tokens of a pair. Unlike there, the claim of a pair that is too
    long is cut to half of the tokens that fit, and the abstract to what is left.

    claim_at: the claim is the first (0) or second (1) text of the model's input.
    batch_size: a batch has as many tokens as this many pairs of --max-length.
    """

    def __init__(self, model, claim_at, batch_size):
        self.tokenizer = model.tokenizer
        self.library = model[0].preprocess
        self.claim_at = claim_at
        self.batch_tokens = batch_size * model.max_seq_length
        self.known = {}  # {text: its token ids}
        self.prompt = model.prompts.get(model.default_prompt_name) or ""  # before the first text
        self.frame = None  # as of frame_of(); None: the library puts a pair together
        if "message" not in model.modalities:  # no chat template
            self.frame = self.frame_of(getattr(model[0], "probe", ("a", "b")))
        # around: tokens of a pair beside self.prompt and its texts; room: tokens left for these
        if self.frame:
            self.around = sum(map(len, self.frame["input_ids"][::2]))  # before, between, behind
        else:  # the library adds the prompt, so around counts it
            empty = self.library([("", "")], prompt=self.prompt)["input_ids"]
            self.around = empty.numel() + 4  # the ends of texts may be tokenised differently there
            self.prompt = ""
        self.room = model.max_seq_length - self.around
        prompt_length = len(self.ids_of(self.prompt))
        self.claim_room = (self.room - prompt_length) // 2
        if self.claim_room < 1:
            fail("--max-length", "no tokens are left beside the prompt; raise it")
        if claim_at == 0:  # the prompt is a part of the first text, so its room holds both
            self.claim_room += prompt_length

    def frame_of(self, probe):
        """Return what the tokenizer makes of a probe, the texts a and b, as {name: five arrays}.

        They are the values before a, of a, between the two, of b, and behind b. None if the tokens
        of a or b cannot be found.
        """
        coded = self.tokenizer(*probe)
        ids = coded["input_ids"]
        bounds = []
        for text in "ab":
            part = self.ids_of(text).tolist()
            starts = [n for n in range(len(ids)) if ids[n : n + len(part)] == part]
            if not starts:
                return None
            bounds += [starts[0], starts[0] + len(part)]
        return {name: np.split(values, bounds) for name, values in coded.items()}

    def in_order(self, pair):
        """Turn (claim, abstract) into the order of the model's input, or that order back."""
        return pair if self.claim_at == 0 else pair[::-1]

    def ids_of(self, text):
        """Return the token ids of a text, without special tokens."""
        if text not in self.known:
            backend = self.tokenizer.backend_tokenizer
            backend.no_truncation()
            (coded,) = backend.encode_batch_fast([text], add_special_tokens=False)
            self.known[text] = np.array(coded.ids, np.int32)
        return self.known[text]

    def read(self, pair):
        """Return the token ids of both texts in the model's order, and whether the pair is cut."""
        first, second = self.in_order(pair)
        whole = [self.ids_of(self.prompt + first), self.ids_of(second)]
        claim, abstract = self.in_order(whole)
        claim = claim[: self.claim_room]
        abstract = abstract[: self.room - len(claim)]
        ids = self.in_order([claim, abstract])
        return ids, sum(map(len, ids)) < sum(map(len, whole))

    def truncated_texts(self, pair):
        """Return both texts in the model's order, each up to the last token that read() leaves."""
        texts = []
        for text, ids in zip(self.in_order(pair), self.read(pair)[0]):
            if len(ids) < len(self.ids_of(text)):
                coded = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
                text = text[: coded.offsets[len(ids) - 1][1]]
            texts.append(text)
        return tuple(texts)

    def __call__(self, pairs, prompt=None, **options):
        """Return the tensors of pairs, as preprocess(); prompt: that of the model."""
        import torch

        if not self.frame:
            return self.library([*map(self.truncated_texts, pairs)], prompt=prompt, **options)
        found = [self.read(pair)[0] for pair in pairs]
        tensors = {}
        for name, (before, first, between, second, behind) in self.frame.items():
            rows = []
            for first_values, second_values in found:
                if name != "input_ids":  # all tokens of a text have the same value, such as 1
                    first_values = np.resize(first, len(first_values))
                    second_values = np.resize(second, len(second_values))
                row = np.concatenate([before, first_values, between, second_values, behind])
                rows.append(torch.from_numpy(row))
            tensors[name] = torch.nn.utils.rnn.pad_sequence(
                rows,
                batch_first=True,
                padding_value=self.tokenizer.pad_token_id if name == "input_ids" else 0,
                padding_side=self.tokenizer.padding_side,
            )
        return tensors


def paired_texts(rows, texts):
    """Return (claim, abstract) of each row; texts: {claim_id: claim} and {abstract_id: text}."""
    claims, abstracts = texts
    ids = rows[PAIR].to_numpy()
    return [(claims[claim_id], abstracts[abstract_id]) for claim_id, abstract_id in ids]


def outputs_of(model, pairs, bar=None):
    """Return a model's outputs (pairs, labels), computed in batches of pairs of similar lengths."""
    import torch

    reader = model[0].preprocess
    lengths = [reader.around + sum(map(len, reader.read(pair)[0])) for pair in pairs]
    longest_first = np.argsort(lengths, kind="stable")[::-1]
    outputs = np.zeros((len(pairs), model.num_labels))
    start = 0
    while start < len(pairs):
        longest = lengths[longest_first[start]]
        batch = longest_first[start : start + max(1, reader.batch_tokens // longest)]
        texts = [pairs[index] for index in batch]
        try:
            found = model.predict(texts, batch_size=len(batch), activation_fn=torch.nn.Identity())
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise
            reader.batch_tokens = longest * len(batch) // 2
            warn("--batch-size", f"{len(batch)} pairs of {longest} tokens fill the GPU; now half")
            continue
        outputs[batch] = found.reshape(len(batch), -1)
        start += len(batch)
        if bar is not None:
            bar.update(len(batch))
    return outputs


def open_scores(path, shape):
    """Return the array of scores in the file path, NaN where a pair is not scored yet.

    A damaged file is replaced.
    """
    try:
        # mmap_mode "r+" would fill up a file that is too short with zeros; "r" raises an error.
        is_whole = np.load(path, mmap_mode="r").shape == shape
    except (OSError, ValueError, EOFError):
        is_whole = False
    if not is_whole:
        if path.exists():
            warn(path, "the stored scores are damaged; these pairs are scored anew")
        new = path.with_name("new.npy")
        np.save(new, np.full(shape, np.nan))
        new.rename(path)
    return np.load(path, mmap_mode="r+")


def outputs_and_truncated(model, pairs, bar):
    """Return a model's outputs (pairs, labels), and which pairs are truncated."""
    is_truncated = [model[0].preprocess.read(pair)[1] for pair in pairs]
    return outputs_of(model, pairs, bar), is_truncated


def score_resumably(compute, labels, rows, texts, path, args, size=GROUP):
    """Return a model's outputs for rows of a run (rows, labels), and which pairs are truncated.

    compute(pairs, bar): returns both for a group of pairs, as outputs_and_truncated(); size: pairs
    in a group. path keeps both; NaN stands for groups that are not finished. texts: claims and
    abstracts.
    """
    from tqdm.auto import tqdm

    stored = open_scores(path, (len(rows), labels + 1))
    finished = np.isfinite(stored[:, 0]).sum()
    if finished < len(rows):
        finished -= finished % size  # a kill may have torn the last group, so it is scored anew
    with tqdm(desc=args.job, unit=" pairs", total=len(rows) - finished) as bar:
        for start in range(finished, len(rows), size):
            pairs = paired_texts(rows.iloc[start : start + size], texts)
            found, is_truncated = compute(pairs, bar)
            if not np.isfinite(found).all():
                what = "a score is no finite number; use --dtype fp32, which takes twice as long"
                fail(args.model, what)
            stored[start : start + size] = np.column_stack([found, is_truncated])
    return stored[:, :-1], stored[:, -1] > 0


# --- end of pairs


# --- endpoints (same in 03 and 04)
RETRIES = 6  # of a call, by the openai package, with growing pauses


def scrubbed(text, args):
    """Return a text in one line, without the key and the password in --base-url."""
    passwords = re.findall(r"://(?:[^/@\s]*:)?([^/@\s]+)@", args.base_url or "")
    for secret in (API_KEY, *passwords):
        if secret:
            text = text.replace(secret, "***")
    return shown(text)


def send_once(is_complete, send, request, **options):
    """Send a request for the openai client, and so decide what the client retries.

    The client retries timeouts and statuses of 500 and above. A call that timed out may be paid
    for, so it must not be retried: it is raised as an error of openai's own, which the client
    passes on. A status of 200 whose body is_complete() does not accept, such as an HTML page,
    becomes 520, so it is retried.
    """
    import openai

    try:
        response = send(request, **options)
    except Exception as error:
        if "Timeout" not in type(error).__name__:  # of httpx or httpx2, by the version of openai
            raise
        raise openai.APITimeoutError(request) from error
    if not response.is_success:
        return response  # the client handles errors
    is_whole = False
    with contextlib.suppress(LookupError, TypeError, ValueError, RecursionError):
        is_whole = is_complete(json.loads(response.read()))
    if not is_whole:
        response.status_code = 520
    return response


def client_of(args, is_complete):
    """Return an openai client of --base-url; is_complete(body): whether a 200 holds an answer."""
    import openai

    http_client = openai.DefaultHttpxClient()
    # The client has no option for what it retries, so the send() of its HTTP client is replaced.
    http_client.send = functools.partial(send_once, is_complete, http_client.send)
    return openai.OpenAI(
        base_url=args.base_url or "https://api.openai.com/v1",
        api_key=API_KEY or "none",  # local servers want none
        timeout=args.timeout,
        max_retries=RETRIES,
        http_client=http_client,
    )


# --- end of endpoints


# --- parts (same in 01, 03 and 05)
def remove_parts(folder):
    """Remove a folder in OUT.parts/, and OUT.parts/ itself if only its lock is left."""
    shutil.rmtree(folder)
    if len(os.listdir(folder.parent)) == 1:
        shutil.rmtree(folder.parent)


@contextlib.contextmanager
def parts_of(out, task):
    """Yield a folder in OUT.parts/ for the unfinished work of a task, and remove it at the end.

    OUT.parts/ is locked, so a second process on the same output is refused.
    """
    parts = Path(f"{Path(out)}.parts")
    folder = parts / hashlib.sha256(json.dumps(task).encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with open(parts / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fail(parts, "another process works on it; wait for it, or give another --out")
        except OSError:
            pass  # a file system without locks, such as a mounted drive
        try:
            yield folder
        except SystemExit:  # bad input
            if not any(map(os.path.isfile, folder.rglob("*"))):  # before any work
                remove_parts(folder)
            raise
    remove_parts(folder)


# --- end of parts

if __name__ == "__main__":
    main()
