"""
What the programs in recipes/ share: helpers of the scripts, and requests to a language model.

While requests wait, a program writes them and ends with status 3; the same call reads the replies.
"""

import argparse
import functools
import json
import os
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))
text_of = import_module("01_index").text_of
compare = import_module("06_evaluate").compare
CLASSIFY = import_module("05_classify")
SCRIPT = import_module("04_llm_rerank")
LABELS = SCRIPT.LABELS
PAIR = SCRIPT.PAIR
RUN = SCRIPT.RUN
fail = SCRIPT.fail
warn = SCRIPT.warn
read_table = SCRIPT.read_table
read_corpus = SCRIPT.read_corpus
digest = SCRIPT.digest
task_of = SCRIPT.task_of
up_to_date = SCRIPT.up_to_date
write_table = SCRIPT.write_table
written = SCRIPT.written
words_of = SCRIPT.words_of
run = SCRIPT.run
TAGS = r"<\s*/?\s*(?:abstract|claim|text|think)\b[^>]*>"  # of prompts
CONTROL = r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]"


def arguments(doc, jobs):
    """Return the arguments of a program.

    doc: its docstring, for --help; jobs: {function: what adds its flags by add("--flag", ...)}.
    """
    SCRIPT.__doc__ = doc  # command_line describes the module that it stands in
    groups = {job: functools.partial(add_groups, add_flags) for job, add_flags in jobs.items()}
    return SCRIPT.command_line(groups)


def add_groups(add_flags, job):
    """Add the flags of a job, and those that all scripts have."""
    add_flags(job.add_argument_group("flags of this job").add_argument)
    SCRIPT.add_shared(job, split="test")


def parser(doc):
    """Return the parser of a program without jobs; doc: its docstring, for --help."""
    layout = argparse.RawDescriptionHelpFormatter
    new = argparse.ArgumentParser(description=doc, formatter_class=layout)
    new.error = lambda what: fail(new.prog, f"{what}; see --help")
    return new


def read_claims(path):
    """Return {claim_id: claim}."""
    return dict(read_table(path, ["claim_id", "claim"]).set_index("claim_id")["claim"])


def plain(text):
    """Return a text on one line, without tags of prompts and control characters."""
    return " ".join(re.sub(f"{TAGS}|{CONTROL}", " ", text).split())


# -------------------- Language model
def wait(requests, args):
    """Write the requests that wait, print the command that answers them, and exit with status 3."""
    lines = [json.dumps(request) + "\n" for request in requests]
    Path(args.requests).write_text("".join(lines))
    words = ["ask", args.requests, "--replies", args.replies, "--model", args.model]
    if args.retry_errors:
        words.append("--retry-errors")
    print(f"python 04_llm_rerank.py {shlex.join(words)}")
    print(json.dumps({"made": [args.requests], "waiting": len(lines)}))
    sys.exit(3)


def answers_to(prompts, read, args):
    """Return what read() makes of the reply to each prompt, and counts of replies.

    A reply of which read() makes None is asked for once more; the second None stays.
    """
    SCRIPT.REPLY_COUNTS.clear()  # of an earlier call
    SCRIPT.answer_requests = wait  # 04 would ask at once; here its job ask does, in its own call
    args.backend = "none"
    args.structured = False
    form = ("text", {})  # no JSON schema
    questions = []
    for prompt in prompts:
        messages = [{"role": "user", "content": prompt}]
        questions.append(SCRIPT.Question(messages, args.max_tokens, read))
    answers = []
    for texts, _ in SCRIPT.answers_to(questions, form, args):
        answers.append(texts[0] if texts else None)
    return answers, SCRIPT.count_replies(args)


# -------------------- Flags that several programs have
# fmt: off
def add_claims(add):
    add("--claims", default="{data}/claims.{split}.tsv", help="read claims from this file")


def add_corpus(add):
    add("--corpus", default="{data}/corpus.jsonl", help="read abstracts from this file")


def add_qrels(add):
    add("--qrels", default="{data}/qrels.{split}.tsv", help="read judged pairs from this file")


def add_model(add, max_tokens):
    add("--model", default=os.environ.get("LLM_MODEL") or "data/models/smollm2",
        help="name this language model in the requests")
    add("--max-tokens", type=int, default=max_tokens, help="limit each reply to this many tokens")
    add("--extra", type=json.loads, default={},
        help="add these parameters, a JSON object, to each request; null removes a parameter")
    add("--retry-errors", action="store_true", help="ask failed requests again")
# fmt: on
