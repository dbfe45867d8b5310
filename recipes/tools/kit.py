"""
What the programs in recipes/ share.

Most of it is functions of the numbered scripts. The scripts import nothing from each other, so
that each can be copied alone; programs in recipes/ stay beside them, so they import from the
scripts: a program then reads, checks and writes files exactly as the scripts do, and a mistake is
corrected in one place. Of functions that several scripts share, those of 04_llm_rerank.py are
taken, because no other script has all that is needed: tables, texts, prompts and requests.

Tables. read_table reads and checks the files that data/README.md describes: claims, judgements,
runs, verdicts. read_texts reads any other TSV file, all columns as texts. write_table writes both.

Language models. With --base-url or LLM_BASE_URL, an endpoint answers. Without, a program
writes its requests to a file and ends with status 3; 04_llm_rerank.py ask, or another engine,
answers them, and the same call of the program goes on.
"""

import argparse
import csv
import functools
import json
import os
import re
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))
EVALUATE = import_module("06_evaluate")
compare = EVALUATE.compare
warn_of_changes = EVALUATE.warn_of_changes
CLASSIFY = import_module("05_classify")
LLM_RERANK = import_module("04_llm_rerank")
LABELS = LLM_RERANK.LABELS
CLAIM = ["claim_id", "claim"]
PAIR = LLM_RERANK.PAIR
QRELS = [*PAIR, "label"]
RUN = LLM_RERANK.RUN
PROBABILITIES = CLASSIFY.PROBABILITIES
fail = LLM_RERANK.fail
warn = LLM_RERANK.warn
count = LLM_RERANK.count
count_or_0 = LLM_RERANK.count_or_0
share = LLM_RERANK.share
amount = LLM_RERANK.amount
read_table = LLM_RERANK.read_table
read_claims = LLM_RERANK.read_claims
read_corpus = LLM_RERANK.read_corpus
text_of = LLM_RERANK.text_of
digest = LLM_RERANK.digest
# Who is asked, and how fast, changes no output.
task_of = functools.partial(LLM_RERANK.task_of, without=LLM_RERANK.ASKING)
sidecar_of = LLM_RERANK.sidecar_of
with_replies = LLM_RERANK.with_replies
up_to_date = LLM_RERANK.up_to_date
written = LLM_RERANK.written
words_of = LLM_RERANK.words_of
read_prompt = LLM_RERANK.read_prompt
run_job = LLM_RERANK.run_job
positive = functools.partial(LLM_RERANK.number, float, 1e-9, 1_000_000_000)
LOCAL_LLM = "data/models/smollm2"
TAGS = r"<\s*/?\s*(?:abstract|claim|text|think)\b[^>]*>"  # as prompts have them
CONTROL = r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]"


def check_outs(*outs, inputs=(), is_folder=False):
    """End if an output would replace an input, or a folder that the kit has not made."""
    args = argparse.Namespace(force=True)
    up_to_date(args, {"inputs": inputs}, *outs, is_folder=is_folder)


def arguments(doc, jobs, split="test"):
    """Return the arguments of a program with jobs.

    doc: its docstring, for --help; jobs: {function of a job: function that adds its flags by
    add("--flag", ...)}, the default job first; split: the default of --split.
    """
    LLM_RERANK.__doc__ = doc  # which command_line shows
    groups = {
        job: functools.partial(add_groups, add_flags, split) for job, add_flags in jobs.items()
    }
    return LLM_RERANK.command_line(groups)


def run(doc, job, add_flags, split="test"):
    """Run a program of one job, whose --help shows doc and flags; arguments as in arguments()."""
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(doc)
        sys.argv.insert(1, job.__name__)
    run_job(arguments(doc, {job: add_flags}, split))


def add_groups(add_flags, split, job):
    """Add the flags of a job, and those that all scripts have; --split if a default names it."""
    add_flags(job.add_argument_group("flags of this job").add_argument)
    defaults = [flag.default for flag in job._actions]  # argparse has no public list of them
    LLM_RERANK.add_shared(job, split=split if "{split}" in str(defaults) else None)


def parser(doc):
    """Return the parser of a program without jobs; doc: its docstring, for --help."""
    layout = argparse.RawDescriptionHelpFormatter
    new = argparse.ArgumentParser(description=doc, formatter_class=layout)
    new.error = lambda what: fail(new.prog, f"{what}; see --help")
    return new


def call(main):
    """Call the main function of a program without jobs; an error of the system is one line."""
    try:
        main()
    except (OSError, UnicodeError, ImportError) as error:
        fail(getattr(error, "filename", None) or sys.argv[0], error)


# -------------------- Tables
def read_texts(path, *columns):
    """Read a TSV file with these columns, and maybe others, as texts."""
    import pandas as pd

    try:
        table = pd.read_csv(
            path,
            sep="\t",
            dtype=str,
            na_filter=False,
            quoting=csv.QUOTE_NONE,
            encoding="utf-8-sig",
        )
    except ValueError as error:  # an empty file, another encoding, a row that is too long
        fail(path, f"{error}; give a TSV file with the columns {', '.join(columns)}")
    is_whole = isinstance(table.index, pd.RangeIndex)  # else a row has more fields than the header
    if not is_whole or not set(columns) <= set(table):
        wanted = f"wanted {', '.join(columns)}, between tabs, in rows of one length"
        fail(f"{path}:1", f"found columns {', '.join(table)}; {wanted}")
    return table


def read_metrics(path, field):
    """Return a field of metrics.json, such as value, as a table [runs, measures]; null is NaN."""
    import pandas as pd

    try:
        values = {**json.loads(Path(path).read_bytes())[field]}  # a TypeError if it is no object
        return pd.DataFrame(values).T.astype(float)
    except (OSError, ValueError, LookupError, TypeError) as error:
        fail(path, f"no metrics.json of 06_evaluate.py ({error}); make it: python 06_evaluate.py")


def read_values(path):
    """Return values [(run, claim_id), measures] of metrics.claims.tsv; an empty cell is NaN."""
    table = read_texts(path, "run", "claim_id").set_index(["run", "claim_id"])
    try:
        table = table.replace("", "nan").astype(float)
    except ValueError as error:
        fail(path, f"{error}; make it again: python 06_evaluate.py")
    if table.index.has_duplicates:
        fail(path, "two rows have one run and claim_id; make it again: python 06_evaluate.py")
    return table


def read_qrels(path, **known):
    """Return judged pairs, [claim_id, abstract_id, label]; known: as in read_table."""
    return read_table(path, QRELS, label=LABELS, **known)[QRELS]


def read_judged(claims_path, qrels_path, abstracts):
    """Return claims, judgements, and a series {claim_id: abstract ids of its evidence}."""
    claims = read_claims(claims_path)
    qrels = read_qrels(qrels_path, claim_id=claims, abstract_id=abstracts)
    if qrels.empty:
        fail(qrels_path, "no judged pair")
    evidence = qrels[qrels["label"] != "NEI"].groupby("claim_id")["abstract_id"].agg(set)
    return claims, qrels, evidence


def with_twins(qrels, claims, corpus):
    """Return judged pairs, and as TWIN those that can be no negatives because of their texts.

    The abstract of a TWIN has, under another id, the text of evidence of a claim of the same words,
    or it is the claim itself, in whatever case and punctuation. A TWIN takes the place of NEI.
    claims, corpus: by id.
    """
    import pandas as pd

    texts = [text_of(record, ["abstract"]) or text_of(record) for record in corpus.values()]
    abstracts = pd.DataFrame({"abstract_id": list(corpus), "text": map(words_of, texts)})
    judged = qrels.assign(words=qrels["claim_id"].map(claims).map(words_of))
    itself = judged.drop_duplicates("claim_id").assign(text=judged["words"])
    evidence = judged[judged["label"] != "NEI"]
    found = pd.concat([evidence.merge(abstracts), itself])[["words", "text"]]
    pairs = itself[["words", "claim_id"]].merge(found).merge(abstracts)[PAIR]
    labels = qrels.set_index(PAIR)["label"]
    twins = dict.fromkeys(pairs.itertuples(index=False, name=None), "TWIN")
    # A key keeps its first place, and gets its last value.
    known = labels.to_dict() | twins | labels[labels != "NEI"].to_dict()
    return pd.Series(known).rename_axis(PAIR).reset_index(name="label")


def read_verdicts(path, columns):
    """Read verdicts on pairs that have these columns and probabilities, which become numbers."""
    import pandas as pd

    table = read_table(path, [*columns, *PROBABILITIES])
    numbers = table[PROBABILITIES].apply(pd.to_numeric, errors="coerce")
    is_right = ((numbers >= 0) & (numbers <= 1)).all(axis=1)
    if not is_right.all():
        pair = " ".join(table.loc[is_right.idxmin(), PAIR])
        fail(path, f"no probabilities: {pair}; label the run again")
    return table.assign(**numbers)


def quoted(text):
    """Return a text with quotation marks as pandas would quote it; read_table undoes this."""
    return '"' + text.replace('"', '""') + '"' if '"' in text else text


def write_table(table, path):
    """Write a table as read_table reads it; only texts with quotation marks are quoted."""
    for column in table.columns.intersection(["claim", "title", "abstract"]):
        table = table.assign(**{column: table[column].map(quoted)})
    LLM_RERANK.write_table(table, path)


def ranked(table):
    """Return scored pairs as a run: the best of each claim first, equal scores in their order."""
    order = np.lexsort((-table["score"], table["claim_id"].factorize()[0]))
    run = table.iloc[order]
    return run.assign(rank=run.groupby("claim_id").cumcount() + 1)[RUN]


def plain(text):
    """Return a text on one line, without tags of prompts and control characters."""
    return " ".join(re.sub(f"{TAGS}|{CONTROL}", " ", text).split())


# -------------------- Language model
def filled(template, **values):
    """Return a template with {name} replaced by its value; other braces stay."""
    return re.sub(r"\{(\w+)\}", lambda name: str(values.get(name[1], name[0])), template)


def is_answered(args, task, *outs):
    """Return whether outs are up to date; sets what the functions of 04 read of the arguments.

    With --retry-errors, outs are never up to date.
    """
    args.requests = str(Path(args.out).with_suffix(".requests.jsonl"))
    args.backend = "openai" if args.base_url else "none"
    args.structured = False
    args.force |= args.retry_errors
    check_outs(args.requests, inputs=[*task["inputs"], *outs])
    return up_to_date(args, with_replies(task, args), *outs)


def answers_to(prompts, read, args):
    """Return what read() finds in the reply to each prompt, and counts of replies.

    prompts: texts; what stands above a line "--- user" is the system message.
    Where read() returns None, the question is asked once more; the second None is final.
    """
    if args.base_url and args.model == LOCAL_LLM:
        fail("--model", "an endpoint needs the name of a model; or set LLM_MODEL")
    form = ("text", {})  # name and JSON schema of an answer: any text
    questions = []
    for prompt in prompts:
        messages = LLM_RERANK.messages_of(prompt)
        questions.append(LLM_RERANK.Question(messages, form, args.max_tokens, read))
    counts = Counter()
    answers = []
    for reply in LLM_RERANK.answers_to(questions, counts, args):
        found = [answer for answer in reply.answers if answer is not None]
        answers.append(found[0] if found else None)
    return answers, dict(counts)


# -------------------- Flags that several programs have
# fmt: off
def add_claims(add):
    add("--claims", default="{data}/claims.{split}.tsv", help="read claims from this file")


def add_corpus(add):
    add("--corpus", default="{data}/corpus.jsonl", help="read abstracts from this file")


def add_qrels(add):
    add("--qrels", default="{data}/qrels.{split}.tsv", help="read judged pairs from this file")


def add_pairs(add):
    """Add the flags of pairs, as 03_rerank.py and 05_classify.py have them."""
    add_claims(add)
    add_corpus(add)
    add("--fields", default="title,abstract", help="make the text of an abstract from these fields")
    add("--max-length", type=count, default=512, help="truncate a pair to this many tokens")


def add_model(add, max_tokens):
    add("--model", default=os.environ.get("LLM_MODEL") or LOCAL_LLM,
        help="ask this model, by its name at the endpoint; a folder is for 04_llm_rerank.py ask")
    add("--base-url", default=os.environ.get("LLM_BASE_URL"),
        help="""have --model answer at this OpenAI-compatible endpoint, such as
        http://localhost:8000/v1; the key is read from OPENAI_API_KEY (default: LLM_BASE_URL;
        without either, requests are written beside --out, to NAME.requests.jsonl, and the exit
        status is 3)""")
    add("--concurrency", type=count, default=16, help="make this many calls at a time")
    add("--timeout", type=positive, default=120, help="""wait this many seconds for each
        reply; a call that times out may be paid for, so only the next run asks again""")
    add("--max-tokens", type=count, default=max_tokens,
        help="""limit each reply, thoughts included, to this many tokens; reasoning models need 4000
        or more""")
    add("--extra", type=lambda text: dict(json.loads(text)), default={},
        help="add these parameters, a JSON object, to each request; null removes a parameter")
    add("--retry-errors", action="store_true", help="""ask again what the server has refused;
        replies that came but could not be read stay as they are""")
# fmt: on
