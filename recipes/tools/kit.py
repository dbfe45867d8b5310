"""
What the programs in recipes/ share: helpers of the scripts, and asking through 04_llm_rerank.py.

While requests wait, a program writes them and ends with status 3; the same call reads the replies.
"""

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
SCRIPT = import_module("04_llm_rerank")
AGAIN, LABELS, PAIR, RUN = SCRIPT.AGAIN, SCRIPT.LABELS, SCRIPT.PAIR, SCRIPT.RUN
fail, warn, read_table, read_corpus = (
    SCRIPT.fail,
    SCRIPT.warn,
    SCRIPT.read_table,
    SCRIPT.read_corpus,
)
digest, task_of, up_to_date, written, run = (
    SCRIPT.digest,
    SCRIPT.task_of,
    SCRIPT.up_to_date,
    SCRIPT.written,
    SCRIPT.run,
)


def arguments(doc, jobs):
    """Return the arguments of a program; doc: its docstring, for --help; jobs: see command_line."""
    SCRIPT.__doc__ = doc
    return SCRIPT.command_line(jobs)


def read_claims(path):
    """Return {claim_id: claim}."""
    return dict(read_table(path, ["claim_id", "claim"]).set_index("claim_id")["claim"])


def plain(text):
    """Return a text on one line, without tags of prompts and control characters."""
    tags = r"<\s*/?\s*(?:abstract|claim|text|think)\b[^>]*>"
    return " ".join(re.sub(rf"{tags}|[\x00-\x1f\x7f-\x9f\ud800-\udfff]", " ", text).split())


# -------------------- Language model
def wait(requests, args):
    """Write the requests that wait, say how to answer them, and end with exit status 3."""
    Path(args.requests).parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(request) + "\n" for request in requests]
    Path(args.requests).write_text("".join(lines), encoding="utf-8")
    words = ["ask", args.requests, "--replies", args.replies]
    words += ["--model", args.model] + ["--retry-errors"] * args.retry_errors
    print(f"python 04_llm_rerank.py {shlex.join(words)}")
    print(json.dumps({"made": [args.requests], "waiting": len(lines)}))
    sys.exit(3)


def answers_to(prompts, read, args):
    """Return what read makes of the reply to each prompt, None after two that it cannot read."""
    SCRIPT.answer, args.backend, args.structured = wait, "none", False
    form, asked, questions = ("text", {}), set(), []
    for prompt in prompts:
        messages = [{"role": "user", "content": prompt}]
        again = [{"role": "user", "content": prompt + AGAIN}]
        questions.append((messages, args.max_tokens, read))
        asked |= {
            SCRIPT.request_of(one, args.max_tokens, form, args)["custom_id"]
            for one in (messages, again)
        }
    if others := len(SCRIPT.read_replies(args.replies).keys() - asked):
        warn(args.replies, f"{others} replies belong to other requests, as of another --model")
    answers = SCRIPT.answers_to(questions, form, args)
    failed = sum(bool(reply["error"]) for _, reply in answers)
    useless = sum(answer is None for answer, _ in answers) - failed
    if useless:
        warn(args.replies, f"{useless} useless replies; see --max-tokens")
    facts = {"useless": useless, "failed": failed, "unknown_replies": others}
    return [answer for answer, _ in answers], facts


def add_model(add, max_tokens):
    add("--model", default=os.environ.get("LLM_MODEL") or "data/models/smollm2", help="its name")
    add("--max-tokens", type=int, default=max_tokens, help="of a reply")
    add("--extra", type=json.loads, default={}, help="JSON of parameters; null drops one")
    add("--retry-errors", action="store_true", help="ask again what failed")
