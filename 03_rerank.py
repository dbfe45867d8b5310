# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "numpy==2.4.6", "openai==3.52.0", "pandas==3.1.1", "protobuf==7.36.2",
#   "sentence-transformers==6.2.0", "sentencepiece==0.2.3", "torch==2.13.0", "tqdm==4.70.1",
#   "transformers==5.23.0",
# ]
# ///
"""
Rerank the candidates of a run with a cross-encoder or another reranker.

Reads   a run, claims, corpus, and with --graph a neighbour graph
Writes  rerank.tsv; OUT.parts/: finished scores, from which the same call resumes
Prints  one line of JSON: pairs, truncated pairs (not with --base-url), rows, candidates of the run
        that are left out

recipes/train/reranker.py trains a cross-encoder. Functions that several scripts share stand at the
end, in marked blocks: edit the first copy, then tests/tools/blocks.py --fix.

Examples
    python 03_rerank.py --depth 50 --first-stage 0.5
    python 03_rerank.py --model Qwen/Qwen3-Reranker-0.6B --depth 100 --device cuda:0 cuda:1
    python 03_rerank.py --graph work/demo/index/graph --top-k 10
"""

import argparse
import contextlib
import csv
import functools
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

PAIR = ["claim_id", "abstract_id"]
RUN = [*PAIR, "rank", "score"]
# Templates in Jinja. Messages are the prompt, if there is one, claim and abstract.
# Jinja drops the line break that ends a template, so the last ones stand in an expression.
QWEN3 = """<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ messages[:-2] | map(attribute="content") | join }}
<Query>: {{ messages[-2].content }}
<Document>: {{ messages[-1].content }}<|im_end|>
<|im_start|>assistant
<think>

</think>{{ "\n\n" }}"""
BGE_GEMMA = """{{ bos_token }}A: {{ messages[-2].content }}
B: {{ messages[-1].content }}
{{ messages[:-2] | map(attribute="content") | join }}"""
# Decoder-only rerankers whose files do not say how they are asked: {pattern of the name and of the
# network's class: template of a chat, default of --prompt, and two words, by their model cards}.
# The score is the logit of the first word as the next token, minus that of the second one, if there
# is one. It is also the output of a classification head that was made of these words (-seq-cls).
CAUSAL = {
    "(?i)qwen3-reranker.*'Qwen3For": (
        QWEN3,
        "Given a web search query, retrieve relevant passages that answer the query",
        "yes",
        "no",
    ),
    "(?i)bge-reranker-v2-gemma.*'GemmaFor": (
        BGE_GEMMA,
        "Given a query A and a passage B, determine whether the passage contains an answer to the "
        "query by providing a prediction of either 'Yes' or 'No'.",
        "Yes",
        None,
    ),
}


# ---------- Models
def mono_t5(name, device, model_kwargs, **options):
    """Load monoT5 (Nogueira et al. 2020); its tokenizer puts the prompt round a pair."""
    from sentence_transformers import CrossEncoder
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name, **options)
    words = [("</s>", tokenizer.eos_token_id)]
    for word in ("Query", "Document", "Relevant"):
        tokens = tokenizer.tokenize(f"{word}:")
        ids = tokenizer.convert_tokens_to_ids(tokens)
        words.append({"id": word, "ids": ids, "tokens": tokens})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        pair="Query $A Document $B Relevant </s>", special_tokens=words
    )
    t5 = AutoModelForSeq2SeqLM.from_pretrained(name, **options, **model_kwargs)
    t5.tokenizer = tokenizer
    t5.preprocess = None  # open_reranker() sets it
    t5.forward = functools.partial(mono_t5_scores, t5)
    return CrossEncoder(modules=[t5], device=device)


def mono_t5_scores(t5, batch):
    """Return the logit of true minus that of false as the first token that T5 writes."""
    import torch

    ids = batch["input_ids"]
    start = torch.full_like(ids[:, :1], t5.config.decoder_start_token_id)
    logits = type(t5).forward(t5, ids, batch["attention_mask"], start).logits[:, 0]
    true, false = t5.tokenizer("true false", add_special_tokens=False)["input_ids"]
    return {"scores": logits[:, true] - logits[:, false]}


def known_reranker(name, kind, **options):
    """Load a cross-encoder by its own files, or a decoder-only one of CAUSAL; else return None."""
    from sentence_transformers import CrossEncoder

    if "CrossEncoder" in kind:
        return CrossEncoder(name, **options)
    for pattern, (template, prompt, true, false) in CAUSAL.items():
        if re.search(pattern, f"{name} {kind}"):
            options |= {"prompts": {"own": prompt}, "default_prompt_name": "own"}
            model = CrossEncoder(name, processor_kwargs={"chat_template": template}, **options)
            token_ids = model.tokenizer.get_vocab()
            head = model[-1]
            head.true_token_id = token_ids[true]  # a classification head does without
            head.false_token_id = token_ids.get(false)
            return model


def kind_of(name):
    """Return what a model's files say of its kind: class of its network, the library's settings."""
    from sentence_transformers.util import load_file_path
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    path = load_file_path(name, "config_sentence_transformers.json")
    settings = Path(path).read_text("utf-8") if path else ""
    return f"{config.architectures} {settings}"


def load_reranker(name, **options):
    """Load a cross-encoder, a decoder-only reranker, monoT5, or a model of late interaction.

    What its files do not say, its name has to: a decoder was trained with a text around the pair.
    """
    import torch
    from sentence_transformers import CrossEncoder, MultiVectorEncoder

    kind = kind_of(name)
    if re.search("MultiVectorEncoder|ColBERT|MaxSim", kind):
        return MultiVectorEncoder(name, **options)
    model = known_reranker(name, kind, **options)
    if not model and re.search("(?i)monot5.*'T5For", f"{name} {kind}"):
        model = mono_t5(name, **options)
    elif not model and "ForSequence" in kind:
        model = CrossEncoder(name, **options)
        if any(getattr(part, "is_causal", False) for part in model.modules()):
            model = None
    if not model:
        fail(name, "name and files do not say how it scores a pair; see recipes/train/reranker.py")
    if not model.keep_in_fp32_modules:
        # Half precision gives equal scores to different abstracts, so the last layer stays in fp32.
        layers = [path for path, part in model.named_modules() if type(part) is torch.nn.Linear]
        model.set_keep_in_fp32_modules(layers[-1:])
    return model


def open_reranker(args, load=load_reranker):
    """Open --model, set its length and prompt, and let a PairReader make its inputs."""
    import torch

    model = open_model(load, args.model, args, args.dtype)
    if model.model_type == "MultiVectorEncoder":
        if args.prompt:
            fail("--prompt", "a model of late interaction has its own; leave it out")
        own = model[0].document_length or model.max_seq_length or args.max_length
        model[0].document_length = min(own, args.max_length)
        return model
    if model.num_labels != 1:
        fail(args.model, f"{model.num_labels} labels; a classifier is for 05_classify.py")
    model.activation_fn = torch.nn.Identity()  # scores are logits; a sigmoid makes large ones 1
    model.max_seq_length = min(model.max_seq_length or args.max_length, args.max_length)
    if args.prompt is not None:
        model.prompts["own"] = args.prompt
        model.default_prompt_name = "own"
    model[0].preprocess = PairReader(model, batch_size_of(args))
    return model


# ---------- Scores of pairs (claim, abstract)
def max_sims(model, pairs, **options):
    """Return MaxSim of pairs (pairs, 1), and which abstracts are truncated.

    MaxSim is the sum over the tokens of a claim of the highest cosine with a token of the abstract
    (late interaction, Khattab and Zaharia 2020).
    """
    claims, abstracts = zip(*pairs)
    prompt = model.prompts["document"] or ""
    coded = model.tokenizer([prompt + abstract for abstract in abstracts], verbose=False)
    is_truncated = [len(ids) > model[0].document_length for ids in coded["input_ids"]]
    scores = model.similarity_pairwise(
        model.encode_query(claims, **options), model.encode_document(abstracts, **options)
    )
    return scores.cpu().numpy()[:, None], is_truncated


def scores_in(reply, number):
    """Return the scores of this many documents in a reply of a rerank endpoint."""
    if isinstance(reply, dict):  # TEI sends a list
        reply = reply.get("output", reply)  # DashScope
        reply = reply.get("results") or reply["data"]  # Voyage
    scores = np.full(number, np.nan)
    for result in reply:
        scores[result["index"]] = result.get("relevance_score", result.get("score"))
    if not np.isfinite(scores).all():
        raise ValueError("a score is no finite number")
    return scores


def endpoint_scores(args, table, texts, path):
    """Score by the rerank endpoint; an interrupted call pays for no reply twice."""
    from tqdm.contrib.concurrent import thread_map

    client = client_of(args)
    stored = open_outputs(path, len(table))
    size = args.batch_size or 32  # TEI's default limit of documents per call
    calls = []  # numbers of the pairs of each
    for numbers in table.groupby("claim_id", sort=False).indices.values():
        waiting = numbers[stored[numbers, 1] == 0]
        calls += [waiting[start : start + size] for start in range(0, len(waiting), size)]
    errors = []

    def answer(numbers, field="documents"):
        if errors:  # further calls would fail, too
            return
        claims, documents = zip(*paired_texts(table.iloc[numbers], texts))
        body = {"model": args.model, "query": claims[0], field: documents}
        reply = ""
        try:
            reply = client.post("/rerank", cast_to=object, body=body | args.extra)
            stored[numbers, 0] = scores_in(reply, len(numbers))
            stored[numbers, 1] = 1
        except Exception as error:  # no connection, a refusal, or a reply in another form
            if hasattr(error, "response"):
                reply = error.response.text
                if field == "documents" and "missing field `texts`" in reply:
                    return answer(numbers, "texts")  # as TEI calls them
            errors.append(f"{error!r} {reply}")

    thread_map(answer, calls[:1])  # alone, as the others will have its form
    thread_map(answer, calls[1:], max_workers=args.concurrency)
    if errors:
        fail(args.base_url, f"{scrubbed(errors[0])[:500]} (finished scores are kept)")
    return stored, False


def open_scorer(args):
    """Return the function (table of pairs, texts, path) that scores by --model."""
    if args.base_url:
        if args.prompt:
            fail("--prompt", "a rerank endpoint has its own; leave it out, or see --extra")
        return functools.partial(endpoint_scores, args)
    model = open_reranker(args)
    pool = None
    if len(args.device or []) > 1:
        pool = model.start_multi_process_pool(args.device)
        pool["input"].cancel_join_thread()  # else a dead process leaves this one waiting
    compute = functools.partial(outputs_of, model, pool=pool)
    if model.model_type == "MultiVectorEncoder":
        compute = functools.partial(max_sims, model, pool=pool, batch_size=batch_size_of(args))
    return functools.partial(stored_outputs, compute)


def scored(scorer, texts, table, path):
    """Return a table of pairs with the columns score and is_truncated; texts: as paired_texts()."""
    scores, is_truncated = scorer(table, texts, path)
    return table.assign(score=scores[:, 0], is_truncated=is_truncated)


# ---------- Neighbours
def read_graph(args, corpus):
    """Return {abstract_id: its nearest abstracts, nearest first}; corpus: sha256 of --corpus."""
    folder = Path(args.graph)
    if json.loads((folder / "meta.json").read_bytes())["corpus"] != corpus:
        fail(folder, "the corpus has changed since then; make the graph again by 01_index.py")
    abstract_ids = json.loads((folder / "abstract_ids.json").read_bytes())
    rows = np.load(folder / "neighbours.npy")[:, : args.neighbours]
    return dict(zip(abstract_ids, np.array(abstract_ids, object)[rows].tolist()))


def with_neighbours(table, graph, score, parts, args):
    """Append neighbours of the best abstracts, round by round (AlexUNLP-FMT 2025).

    score(pairs, path): as scored(). parts: the folder of the scores.
    """
    import pandas as pd

    for number in range(args.rounds):
        best = ranked(table, args.beam)
        found = best.assign(abstract_id=best["abstract_id"].map(graph)).explode("abstract_id")
        new = pd.concat([table, found]).drop_duplicates(PAIR)[len(table) :]
        if new.empty:
            break
        neighbours = score(new[PAIR], parts / f"neighbours-{number}")
        table = pd.concat([table, neighbours])
    return table


# ---------- Rerank
def blend_first_stage(table, weight):
    """Return (1 - weight) z(score) + weight z(first_stage), with z-scores within each claim.

    A neighbour has no score of the first stage; it gets the claim's lowest one.
    """
    claims = table["claim_id"]
    scores = table[["score", "first_stage"]]
    # The claim's lowest score is subtracted, so it becomes 0, and fillna() gives neighbours 0, too.
    # Subtracting a constant does not change z-scores.
    shifted = (scores - scores.groupby(claims).transform("min")).fillna(0)
    by_claim = shifted.groupby(claims)
    deviations = by_claim.transform("std", ddof=0).replace(0, 1)  # 0 where all scores are equal
    z = (shifted - by_claim.transform("mean")) / deviations
    return (1 - weight) * z["score"] + weight * z["first_stage"]


def with_rest(table, rest, depth):
    """Append the candidates beyond --depth in their order.

    Their scores are the claim's lowest score - 1, - 2, ...
    """
    import pandas as pd

    lowest = table.groupby("claim_id")["score"].min()
    scores = lowest[rest["claim_id"]].to_numpy() - (rest["rank"] - depth)
    # A neighbour may be such a candidate, too.
    return pd.concat([table, rest.assign(score=scores)]).drop_duplicates(PAIR)


def ranked(table, top_k):
    """Return the first top_k rows of each claim by score (None: all), with ranks."""
    run = table.iloc[np.lexsort((-table["score"], table["claim_id"].factorize()[0]))]
    run = run.assign(rank=run.groupby("claim_id").cumcount() + 1)
    return run[run["rank"] <= top_k] if top_k else run


def rerank(args):
    """Score the first candidates of each claim with a model, and sort them by score."""
    inputs = [args.run, args.claims, args.corpus]
    if args.graph:
        inputs.append(args.graph)
    task = task_of(
        args, *inputs, models=[args.model], without=["base_url", "batch_size", "concurrency"]
    )
    task["base_url"] = shown(args.base_url)
    if up_to_date(args, task, args.out):
        return {"made": []}
    claims = read_claims(args.claims)
    abstracts = read_abstracts(args.corpus, args.fields)
    candidates = read_table(args.run, RUN, claim_id=claims, abstract_id=abstracts)
    candidates["first_stage"] = candidates["score"]
    graph = read_graph(args, task["inputs"][args.corpus]) if args.graph else {}
    score = functools.partial(scored, open_scorer(args), (claims, abstracts))
    is_within = candidates["rank"] <= args.depth
    with parts_of(args.out, task) as parts:
        table = score(candidates[is_within], parts / "scores")
        if graph:
            table = with_neighbours(table, graph, score, parts, args)
        counts = table.round(7).groupby("claim_id")["score"].agg(["size", "nunique"])
        different = counts["nunique"][counts["size"] > 1]
        equal = (different == 1).sum()
        if equal:
            warn(args.model, f"all scores are equal for {equal} of {len(different)} claims")
        if args.first_stage:
            table["score"] = blend_first_stage(table, args.first_stage)
        summary = {"pairs": len(table)}
        if not args.base_url:
            summary["truncated"] = int(table["is_truncated"].sum())
        if args.top_k:
            table = with_rest(table, candidates[~is_within], args.depth)
        run = ranked(table, args.top_k)
        summary["rows"] = len(run)
        summary["left_out"] = len(candidates) - len(candidates[PAIR].merge(run[PAIR]))
        with written(args.out, task, **summary) as new:
            write_table(run[RUN], new)
    return {"made": [args.out], **summary}


# ---------- Command line
# fmt: off
def add_rerank(job):
    add = job.add_argument_group("inputs and outputs").add_argument
    add("--run", default="{work}/{split}/hybrid.tsv", help="rerank the candidates of this run")
    add("--claims", default="{data}/claims.{split}.tsv", help="read the claims from this file")
    add("--corpus", default="{data}/corpus.jsonl", help="read the abstracts from this file")
    add("--fields", default="title,abstract", help="make the text of an abstract from these fields")
    add("--out", default="{work}/{split}/rerank.tsv", help="write the reranked run to this file")
    add("--depth", type=count, default=20, help="score this many candidates per claim")
    add("--top-k", type=count, help="""write this many abstracts per claim; candidates beyond
        --depth follow in their old order (default: those that are scored)""")
    add("--first-stage", type=share, default=0,
        help="""blend in the scores of --run with this weight (z-scores per claim): 0 leaves them
        out, 1 keeps their order; a weak reranker wants 0.5 to 0.8, a strong one 0 to 0.2""")
    add("--graph", help="""also score neighbours of the best abstracts, by
        this graph of 01_index.py graph""")
    add("--rounds", type=count_or_0, default=20,
        help="search neighbours for at most this many rounds")
    add("--neighbours", type=count, default=10,
        help="take this many neighbours of an abstract, at most those of the graph")
    add("--beam", type=count, default=30,
        help="expand this many best abstracts per claim and round")
    add = job.add_argument_group("model").add_argument
    add("--model", default="{work}/models/reranker",
        help="score with this reranker: a folder, a name on the hub, or its name at --base-url")
    add("--prompt", help="""instruct a causal reranker by this text; it is the text
        itself, no file as in 04_llm_rerank.py, with line breaks in bash as $'...\\n' (default: the
        model's own)""")
    add("--max-length", type=count, default=512,
        help="truncate a pair and its prompt to this many tokens (an endpoint: see --extra)")
    add("--batch-size", type=count, help="""score batches of at most this many times --max-length
        tokens, so of more pairs where they are short (default: 32, on a GPU 128); with --base-url,
        documents per call (32)""")
    add("--dtype", choices=("auto", *DTYPES), default="auto",
        help="precision of the model; auto takes half precision on a GPU, else fp32")
    add("--device", nargs="+", help="""score on cpu, mps, cuda, or on cuda:0 cuda:1 (default: a
        GPU, if any)""")
    add("--base-url", help="""have --model score at this endpoint, which serves /rerank, such as
        http://localhost:8000/v1 of vLLM; the key is read from OPENAI_API_KEY""")
    add("--extra", type=json.loads, default={},
        help="""add this JSON object of parameters to each call: {"truncate_prompt_tokens": 512}""")
    add("--concurrency", type=count, default=16, help="make this many calls at a time")
    add_shared(job, split="test")
# fmt: on


def main():
    if "train" in sys.argv[1:2]:
        fail("train", "is a program of its own: python recipes/train/reranker.py")
    run_job(command_line({rerank: add_rerank}))


# --- helpers (same in all six scripts)
CHANGE_NO_OUTPUT = {"force", "out", "device", "function"}  # arguments, in every job
PACKAGES = ("bm25s", "sentence_transformers", "torch", "transformers")  # whose versions are kept
START = time.monotonic()
# Files of a folder that no model or index needs: README.md, hidden ones (hf download leaves some)
NOT_LOADED = r"(^|/)\.\w|^README.md$"
ABSTRACT_ID = r"(?!None$)[^\t\r\n]+"  # fits into a TSV file; None is JSON's null


def shown(text):
    """Return a text in one line, with the passwords of URLs hidden."""
    return re.sub(r"(?<=://)[^/\s]+@", "***@", " ".join(str(text).split()))


def warn(where, what):
    """Print a warning on stderr."""
    print(shown(f"warning: {where}: {what}"), file=sys.stderr)


def fail(where, what):
    """End with one line on stderr and exit status 2."""
    print(shown(f"error: {where}: {what}"), file=sys.stderr)
    sys.exit(2)


def number(kind, least, most, text):
    """Return a number within a range; argparse tells the user of any other text."""
    try:
        value = kind(text)
    except ValueError:
        value = np.nan
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{text} is no number from {least:,} to {most:,}")
    return value


count = functools.partial(number, int, 1, 1_000_000_000)
count_or_0 = functools.partial(number, int, 0, 1_000_000_000)
amount = functools.partial(number, float, 0, 1_000_000_000)
share = functools.partial(number, float, 0, 1)


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


def task_of(args, *inputs, models=(), without=()):
    """Return what decides an output: arguments but without, digests of inputs and local models."""
    for path in map(Path, inputs):
        if not path.exists():
            names = sorted(other.name for other in path.parent.glob(f"*{path.suffix}"))
            fail(path, f"not found; run the stage that makes it, or name (--run) one of {names}")
    arguments = {k: v for k, v in vars(args).items() if k not in CHANGE_NO_OUTPUT.union(without)}
    local = [path for path in models if Path(path).exists()]  # others are on the hub
    return {"arguments": arguments, "inputs": {str(p): digest(p) for p in [*inputs, *local]}}


def sidecar_of(path):
    """Return how an output was made; {} without a sidecar, or with a torn one."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(Path(f"{path}.meta.json").read_bytes())
    return {}


def up_to_date(args, task, *outs, is_folder=False):
    """Return whether this very task has made all outs, and nobody has changed them since.

    End if an output would replace an input, or what the kit has not made: a file replaces a file
    alone, a folder (is_folder) a folder that has a sidecar.
    """
    inputs = {os.path.abspath(path) for path in task["inputs"]}
    for out in map(Path, outs):
        out.parent.mkdir(parents=True, exist_ok=True)
        is_ours = out.is_dir() and Path(f"{out}.meta.json").exists() if is_folder else out.is_file()
        if out.exists() and not is_ours or os.path.abspath(out) in inputs:
            fail(out, "not made by this script, which would replace it, or read by this call")
    for out in outs:
        if args.force or not Path(out).exists():
            return False
        made = task | {"sha256": digest(out)}
        if not made.items() <= sidecar_of(out).items():
            return False
    print("up to date:", *outs, "(--force makes it again)")
    return True


@contextlib.contextmanager
def written(path, task, **summary):
    """Yield a temporary path for a new output, which then replaces path as a whole."""
    path = Path(path)
    with tempfile.TemporaryDirectory(prefix=f"{path.name}.", dir=path.parent) as folder:
        new = Path(folder, path.name)
        yield new
        made = {
            "command": [shown(word) for word in sys.argv],
            "script": digest(sys.argv[0]),
            "packages": {
                name: sys.modules[name].__version__ for name in PACKAGES if name in sys.modules
            },
            "seconds": round(time.monotonic() - START),
            "sha256": digest(new),  # before another process may replace path, too
        }
        meta = Path(f"{path}.meta.json")
        meta.write_text("{}")  # fits no task: after a kill from here on, the output is made again
        if path.is_dir() and new.is_dir():  # no folder takes the place of another one
            path.rename(f"{folder}/old")
        new.replace(path)
        meta.write_text(json.dumps(made | task | summary, indent=1))


def add_shared(job, split=None):
    """Add the flags that all scripts share; split: default of --split, None for jobs without it."""
    add = job.add_argument_group("shared by all scripts").add_argument
    # fmt: off
    add("--data", default="data/demo", help="read data of this folder, {data} in other defaults")
    add("--work", help="""keep indexes, models and runs in this folder, {work} in other defaults,
        where the next scripts find them (default: work/NAME, with the last name in --data)""")
    if split:
        add("--split", default=split,
            help="take claims and judgements of this split, {split} in other defaults")
    add("--force", action="store_true", help="make outputs again, even if they are up to date")
    # fmt: on


class Parser(argparse.ArgumentParser):
    def error(self, message):  # one line, in place of argparse's usage
        fail(self.prog, f"{message}; see --help")


def command_line(jobs):
    """Return the parsed arguments; jobs: {function: what adds its flags}, the default job first."""
    names = [function.__name__ for function in jobs]
    layout = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=__doc__, formatter_class=layout)
    choices = parser.add_subparsers(title="jobs", metavar=f"JOB (default: {names[0]})")
    for function, add_flags in jobs.items():
        name = function.__name__
        job = choices.add_parser(name, help=function.__doc__, description=function.__doc__)
        job.set_defaults(function=function, job=name)
        add_flags(job)
        for flag in job._actions:  # argparse has no public list of them
            if flag.default and flag.default != argparse.SUPPRESS:
                flag.help += f" (default: {shown(flag.default)})"
    words = sys.argv[1:]
    if not words or words[0] not in (*names, "-h", "--help"):
        words = [names[0], *words]
    args = parser.parse_args(words)
    if "data" in args:
        args.work = args.work or f"work/{Path(args.data).resolve().name}"
    for name, value in vars(args).items():
        if isinstance(value, str):
            for field in ("data", "work", "split"):  # defaults may name these flags
                value = value.replace(f"{{{field}}}", str(vars(args).get(field)))
            setattr(args, name, value)
    return args


def run_job(args):
    """Run the job, and print its result as JSON; errors of the machine are one line."""
    try:
        print(json.dumps(args.function(args)))
    except (OSError, UnicodeError, ImportError, RuntimeError) as error:
        fail(args.job, error)


def read_table(path, columns, **known):
    """Read a TSV file of texts; ranks and scores are numbers, a run is sorted by claim and rank.

    known: {column: the values that it may hold, if it is there}. The first faulty row ends the job.
    """
    import pandas as pd

    try:
        table = pd.read_csv(
            path,
            sep="\t",
            dtype=dict.fromkeys({*columns, *known} - {"rank", "score"}, str),
            encoding="utf-8-sig",
            quoting=csv.QUOTE_NONE,
            na_filter=False,
            skip_blank_lines=False,  # so that rows are lines
        )
    except ValueError as error:  # an empty file, another encoding, a row that is too long
        fail(path, f"{error}; see data/convert.py")
    is_whole = isinstance(table.index, pd.RangeIndex)  # else a row has more fields than the header
    if not is_whole or not set(columns) <= set(table):
        fail(
            f"{path}:1",
            f"""found columns {", ".join(table)}; wanted {", ".join(columns)}, between tabs, in
            rows of one length; python data/convert.py {path} --out NEW.tsv (--columns WANTED=FOUND
            renames)""",
        )
    table = table[(table[list(columns)] != "").any(axis=1)]  # without blank lines
    if "claim" in columns:
        quoted = '^"((?:[^"]|"")*)"$'  # as pandas writes texts with quotation marks
        table["claim"] = table["claim"].str.replace(
            quoted, lambda text: text[1].replace('""', '"'), regex=True
        )
    ids = [column for column in columns if column.endswith("_id")]
    faults = {f"{column} is empty": table[column] == "" for column in columns}
    for column in known.keys() & set(table):
        faults[f"unknown {column}"] = ~table[column].isin(known[column])
    faults[f"an earlier row has this {' and '.join(ids)}"] = table.duplicated(ids)
    if "rank" in columns:
        for column in ("rank", "score"):
            table[column] = pd.to_numeric(table[column], errors="coerce")
        table = table.iloc[np.lexsort((table["rank"], table["claim_id"].factorize()[0]))]
        by_claim = table.groupby("claim_id")
        counted = by_claim.cumcount() + 1
        before = by_claim["score"].shift()
        faults["score is not a finite number"] = ~np.isfinite(table["score"])
        faults["the ranks of a claim are not 1, 2, 3, ..."] = table["rank"] != counted
        faults[
            "the score is above that of the rank before: higher is better, so negate distances"
        ] = table["score"] > before
        table = table.assign(rank=counted)  # integers; some tools write 1.0
    for what, is_faulty in faults.items():
        if is_faulty.any():
            row = is_faulty.idxmax()
            fail(f"{path}:{row + 2}", f"{what}: {' '.join(table.loc[row].filter(like='_id'))}")
    return table.reset_index(drop=True)


def read_claims(path):
    """Return {claim_id: claim}."""
    columns = ["claim_id", "claim"]
    return dict(read_table(path, columns)[columns].to_numpy())


def read_corpus(path):
    """Return {abstract_id: record}."""
    corpus = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line.decode("utf-8-sig"))
                abstract_id = re.fullmatch(ABSTRACT_ID, str(record["abstract_id"]))[0]
            except (ValueError, LookupError, TypeError):
                fail(
                    f"{path}:{number}",
                    "no JSON object in UTF-8 with an abstract_id of one line; see data/convert.py",
                )
            if abstract_id in corpus:
                fail(f"{path}:{number}", f"a second abstract {abstract_id}; remove one")
            corpus[abstract_id] = record
    if not corpus:
        fail(path, "no abstracts; see data/convert.py")
    return corpus


def read_abstracts(path, fields, separator=" "):
    """Return {abstract_id: text} of a corpus; fields: names with commas between them."""
    names = [name.strip() for name in fields.split(",")]
    records = read_corpus(path)
    unknown = set(names) - {"title"}.union(*records.values())  # a title is optional
    if unknown:
        fail(path, f"no record has the field {', '.join(sorted(unknown))}; see --fields")
    return {key: text_of(record, names, separator) for key, record in records.items()}


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


def write_table(table, path):
    """Write a table as read_table reads it: quotation marks mean nothing."""
    table.to_csv(path, sep="\t", index=False, float_format="%.9g", quoting=csv.QUOTE_NONE)


# --- end of helpers


# --- models (same in 01, 02, 03 and 05)
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Else transformers asks the hub to convert a .bin, which opens a pull request there.
os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "1"


def device_of(args):
    """Return the first device of --device, else the one that the library takes."""
    from sentence_transformers.util import get_device_name

    return args.device[0] if args.device else get_device_name()


def batch_size_of(args):
    """Return --batch-size; without it, what is fast on the device."""
    return args.batch_size or (128 if device_of(args).startswith("cuda") else 32)


def open_model(load, name, args, dtype="fp32", **options):
    """Load a model with load(name, ...), a class or function that takes the library's arguments.

    No code of the model is run. dtype: auto is half precision on a GPU, else fp32.
    """
    import torch
    from sentence_transformers.util import load_file_path
    from tokenizers import Tokenizer

    is_old = torch.__version__ < "2.10" or None  # in which a .bin can run code (CVE-2026-24747)
    device = device_of(args)
    if dtype == "auto":
        dtype = "fp32"
        if device.startswith("cuda"):
            dtype = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    options |= {
        "device": device,
        "trust_remote_code": False,
        "model_kwargs": {"dtype": DTYPES[dtype], "use_safetensors": is_old},
        "local_files_only": Path(name).exists(),  # the hub is not asked about a folder
    }
    try:
        model = load(name, **options)
    except Exception as error:  # the libraries raise many kinds
        fail(
            name,
            f"""not loaded; train it (recipes/train), or name another (data/README.md, What loads):
            {error}""",
        )
    if model.config:  # static embeddings have none
        tokenizer = model.tokenizer
        commit = model.model_card_data.base_model_revision
        path = load_file_path(tokenizer.name_or_path, "tokenizer.json", revision=commit)
        # For some classes of tokenizers, transformers 5 takes the vocabulary alone from this file.
        if path and tokenizer.is_fast and not getattr(model[0], "do_lower_case", None):
            file = Tokenizer.from_file(path)
            tokenizer.backend_tokenizer.normalizer = file.normalizer
            tokenizer.backend_tokenizer.pre_tokenizer = file.pre_tokenizer
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # Llama has none
        model.config.pad_token_id = tokenizer.pad_token_id
        if not tokenizer.pad_token or len(tokenizer.get_vocab()) < 200:  # special tokens alone
            fail(name, "files of its tokenizer are missing, or a padding token; copy all files")
    return model


# --- end of models


# --- parts (same in 01, 03 and 05)
@contextlib.contextmanager
def parts_of(out, task):
    """Yield a folder for the unfinished work of a task, OUT.parts/.../, and remove it at the end.

    The same call finds there what an interrupted one has finished.
    """
    task_id = hashlib.sha256(json.dumps(task).encode()).hexdigest()[:16]
    parts = Path(f"{out}.parts", task_id)
    parts.mkdir(parents=True, exist_ok=True)
    yield parts
    shutil.rmtree(parts)
    with contextlib.suppress(OSError):  # work of other flags is there, too
        parts.parent.rmdir()


# --- end of parts


# --- pairs (same in 03 and 05)
GROUP = 1024  # pairs of which batches are made, and whose outputs are stored at once


class PairReader:
    """Makes the inputs of a cross-encoder from pairs (claim, abstract).

    The library tokenises both texts anew in each pair. Here a text is tokenised once, and its token
    ids take the places of a and b in what the tokenizer makes of these two. Unlike there, the claim
    of a pair that is too long is cut to half of the tokens that fit, or to what a short abstract
    leaves, and the abstract to the rest.

    batch_size: a batch has as many tokens as this many pairs of --max-length. step: -1 if the
    model's first text is the abstract.
    """

    def __init__(self, model, batch_size, step=1):
        self.tokenizer = model.tokenizer
        self.library = model[0].preprocess
        self.batch_tokens = batch_size * model.max_seq_length
        self.step = step  # pair[::-1] is (abstract, claim)
        self.known = {}  # {text: its token ids}
        self.prompt = model.prompts.get(model.default_prompt_name) or ""  # before the claim
        self.is_chat = "message" in model.modalities
        if self.is_chat:  # a template makes one text of prompt and pair, which is tokenised anew
            empty = self.library([("", "")], prompt=self.prompt)["input_ids"]
            self.around = empty.numel() + 4  # the ends of texts may be tokenised differently there
            self.prompt = ""
        else:
            self.coded = self.tokenizer("a", "b", return_tensors="np")
            kinds = self.coded.sequence_ids()  # 0 in a, 1 in b, None for special tokens
            self.is_text = np.array([kind is not None for kind in kinds])
            self.starts = [kinds.index(0), kinds.index(1)]
            self.around = kinds.count(None)
        self.room = model.max_seq_length - self.around
        prompt_length = len(self.ids_of(self.prompt))
        self.claim_room = (self.room + prompt_length) // 2
        if self.claim_room <= prompt_length:
            fail("--max-length", "no tokens are left beside the prompt; raise it")

    def ids_of(self, text):
        """Return the token ids of a text, without special tokens."""
        if text not in self.known:
            encode = self.tokenizer.backend_tokenizer.encode_batch_fast
            self.known[text] = np.array(encode([text], add_special_tokens=False)[0].ids, np.int32)
        return self.known[text]

    def read(self, pair):
        """Return the token ids of claim and abstract, and whether one of them is cut."""
        claim = self.ids_of(self.prompt + pair[0])
        abstract = self.ids_of(pair[1])
        is_cut = len(claim) + len(abstract) > self.room
        claim = claim[: max(self.claim_room, self.room - len(abstract))]
        abstract = abstract[: self.room - len(claim)]
        return (claim, abstract), is_cut

    def __call__(self, pairs, **options):
        """Return the tensors of pairs, as the library's preprocess()."""
        import torch

        found = [self.read(pair)[0][:: self.step] for pair in pairs]
        if self.is_chat:
            decode = self.tokenizer.backend_tokenizer.decode_batch
            return self.library(
                [tuple(decode(ids, skip_special_tokens=False)) for ids in found], **options
            )
        rows = []
        for ids in found:
            counts = 1 - self.is_text  # how often each token of coded is repeated
            counts[self.starts] = [*map(len, ids)]
            row = {name: np.repeat(values[0], counts) for name, values in self.coded.items()}
            row["input_ids"][np.repeat(self.is_text, counts)] = np.concatenate(ids)
            rows.append(row)
        # The tokenizer's own pad() takes ten times as long.
        padding = {"input_ids": self.tokenizer.pad_token_id}
        return {
            name: torch.nn.utils.rnn.pad_sequence(
                [torch.from_numpy(row[name]) for row in rows],
                True,  # texts come first
                padding.get(name, 0),
                self.tokenizer.padding_side,
            )
            for name in self.coded
        }


def paired_texts(rows, texts):
    """Return (claim, abstract) of each row; texts: {claim_id: claim} and {abstract_id: text}."""
    claims, abstracts = texts
    return [
        (claims[claim_id], abstracts[abstract_id])
        for claim_id, abstract_id in rows[PAIR].to_numpy()
    ]


def outputs_of(model, pairs, pool=None):
    """Return a model's outputs (pairs, labels), and which pairs are truncated.

    Batches have pairs of similar lengths. pool: the library's processes on several devices.
    """
    import torch

    reader = model[0].preprocess
    outputs = np.empty((len(pairs), model.num_labels))
    read = [reader.read(pair) for pair in pairs]
    lengths = [reader.around + sum(map(len, ids)) for ids, _ in read]
    longest_first = np.argsort(lengths, kind="stable")[::-1]
    devices = len(pool["processes"]) if pool else 1
    start = 0
    while start < len(pairs):
        longest = lengths[longest_first[start]]
        size = max(1, reader.batch_tokens // longest)  # pairs for each device
        batch = longest_first[start : start + size * devices]
        texts = [pairs[index] for index in batch]
        try:
            found = model.predict(
                texts,
                activation_fn=torch.nn.Identity(),
                batch_size=size,
                chunk_size=size,
                pool=pool,
            )
        except torch.OutOfMemoryError:
            if size == 1:
                raise
            reader.batch_tokens = longest * size // 2  # half of what did not fit
            continue
        outputs[batch] = found.reshape(len(batch), -1)
        start += len(batch)
    return outputs, [is_cut for _, is_cut in read]


def open_outputs(path, rows, labels=1):
    """Return the array (rows, labels + 1) in a file; what is written to it survives a kill.

    Its last column is 0 where there are no outputs yet (new and torn files are filled up with 0),
    1 where there are, and 2 where the pair is truncated.
    """
    path.touch()
    return np.memmap(path, float, shape=(rows, labels + 1))


def stored_outputs(compute, rows, texts, path, labels=1):
    """Return outputs for rows of a run (rows, labels), and which rows are truncated.

    compute(pairs) returns both, as outputs_of(), for a GROUP. Those that are stored in the file
    path are not computed again.
    """
    from tqdm.auto import tqdm

    stored = open_outputs(path, len(rows), labels)
    for start in tqdm(range(0, len(rows), GROUP)):
        group = stored[start : start + GROUP]
        if not group[:, -1].all():
            outputs, is_truncated = compute(paired_texts(rows[start : start + GROUP], texts))
            if not np.isfinite(outputs).all():
                fail("--model", "a score is no finite number; try --dtype fp32")
            group[:, :-1] = outputs
            group[:, -1] = np.add(is_truncated, 1)
    return stored[:, :-1], stored[:, -1] == 2


# --- end of pairs


# --- endpoint (same in 03 and 04)
API_KEY = os.environ.get("OPENAI_API_KEY", "").strip()
RETRIES = 6  # after outages and rate limits, by the openai package, with growing pauses


def scrubbed(text):
    """Return a text without the key, which some servers repeat in their errors."""
    return str(text).replace(API_KEY or "***", "***")


def client_of(args):
    """Return an openai client of --base-url; it waits ten minutes for a reply."""
    import openai

    # Local servers want no key, but the client does.
    return openai.OpenAI(base_url=args.base_url, api_key=API_KEY or "none", max_retries=RETRIES)


# --- end of endpoint

if __name__ == "__main__":
    main()
