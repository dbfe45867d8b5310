# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy==2.4.6", "openai==3.52.0", "pandas==3.1.1"]
# ///
"""
Have OpenAI's queue (Batch API) answer a file of requests, at half the price and within a day.

The first call sends the requests that have no reply, and ends with status 3. Later calls fetch
replies until no batch is in progress; with --wait, the first call does all of this, and sends again
what the queue was too full for, whenever a batch has ended. If a batch expires or fails, its
replies are kept, the call ends with status 2, the number of requests that are left and the reason,
and the next call sends those.

Reads   requests that a script has written with --backend none; OPENAI_API_KEY
Writes  the replies, and beside them NAME.batches.json while batches are in progress
Prints  how much is sent, before it is sent; the last line is JSON

Example
    python recipes/tools/openai_batch.py work/demo/test/llm.requests.jsonl --wait
"""

import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import kit

# Limits of a batch and of its file: platform.openai.com/docs/guides/batch
MAX_REQUESTS = 50_000
MAX_BYTES = 200_000_000
BATCH = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
ENDED = ("completed", "failed", "expired", "cancelled")  # batches in other states are in progress
FULL = "token_limit_exceeded"  # error code of batches that the queue has no room for
NEVER_RUN = ("batch_expired", "batch_cancelled")  # error codes of requests that were not processed
API_KEY = os.environ.get("OPENAI_API_KEY", "").strip()


def scrubbed(text):
    """Return a server's text in one line, without the key and passwords of URLs."""
    return kit.LLM_RERANK.shown(str(text).replace(API_KEY or "***", "***"))


def read_requests(path):
    """Return {custom_id: request}; fail if one does not name a model."""
    requests = {}
    for number, request in enumerate(kit.LLM_RERANK.read_requests(path, None), 1):
        if not request["body"]["model"]:
            what = "no request that names a model; write it by --backend none --model NAME"
            kit.fail(f"{path}:{number}", what)
        requests[request["custom_id"]] = request
    return requests


def read_batches(path):
    """Return {batch id: the custom_ids of its requests} of the batches in progress."""
    return json.loads(path.read_bytes()) if path.exists() else {}


def write_batches(path, batches):
    """Replace the file of batches in progress; without a batch, remove it."""
    with tempfile.TemporaryDirectory(prefix=f"{path.name}.", dir=path.parent) as folder:
        new = Path(folder, path.name)
        new.write_text(json.dumps(batches), encoding="utf-8")
        new.replace(path)
    if not batches:
        path.unlink()


def append(lines, file):
    """Append lines to a file; if a kill has torn its last line, end that line first."""
    file.seek(0)
    content = file.read()
    if content and not content.endswith(b"\n"):
        file.write(b"\n")
    file.writelines(line + b"\n" for line in lines)
    file.flush()
    os.fsync(file.fileno())


def pieces_of(requests, max_requests, max_bytes):
    """Return a list of batches, {custom_id: line of the request} each."""
    pieces = []
    size = max_bytes  # so that the first request begins a batch
    for custom_id, request in requests.items():
        line = json.dumps(request).encode() + b"\n"
        size += len(line)
        if size > max_bytes or len(pieces[-1]) == max_requests:
            pieces.append({})
            size = len(line)
        pieces[-1][custom_id] = line
    return pieces


def unanswered(requests, args, retry_errors=False):
    """Return requests in no batch without a reply or, with retry_errors, refused or cut ones."""
    known = set().union(*read_batches(args.batches).values())
    for custom_id, reply in kit.LLM_RERANK.read_replies(args.replies).items():
        if reply.choices or not retry_errors:
            known.add(custom_id)
    return {name: request for name, request in requests.items() if name not in known}


def send(waiting, client, args):
    """Create the batches of requests, if there are any."""
    import openai

    pieces = pieces_of(waiting, args.max_requests, MAX_BYTES)
    size = sum(len(json.dumps(request["body"]["messages"])) for request in waiting.values())
    count = f"{len(waiting)} requests of about {size // 4} tokens"
    if waiting:
        print(f"sending {count} in {len(pieces)} batches", flush=True)
    batches = read_batches(args.batches)
    # No retries: if only the answer was lost, a retry would create, and pay for, a second batch.
    once = client.with_options(max_retries=0)
    for piece in pieces:
        content = b"".join(piece.values())
        file = client.files.create(file=("requests.jsonl", content), purpose="batch")
        try:
            batch = once.batches.create(input_file_id=file.id, **BATCH)
        except openai.APIConnectionError as error:  # a timeout, too: the batch may exist
            what = f"{error}; a batch of {file.id} may exist: look at the service's list first"
            kit.fail(args.batches, scrubbed(what))
        batches[batch.id] = list(piece)
        write_batches(args.batches, batches)  # at once, so that a kill loses no paid batch


def lines_of(batch, client):
    """Return the lines of a batch's files that are replies to requests, errors included."""
    answers = []
    for file_id in filter(None, (batch.output_file_id, batch.error_file_id)):
        for line in client.files.content(file_id).read().splitlines():
            code = None
            with contextlib.suppress(*kit.LLM_RERANK.MALFORMED):  # no error in it, or a torn line
                code = json.loads(line)["error"]["code"]
            if code not in NEVER_RUN:
                answers.append(line)
    return answers


def fetch(file, client, args):
    """Append the replies of batches that have ended; return the errors of each, None for none."""
    batches = read_batches(args.batches)
    ended = []
    for batch_id in list(batches):
        batch = client.batches.retrieve(batch_id)
        state = f"{batch_id} {batch.status} {batch.request_counts} {batch.errors}"
        print(scrubbed(state), file=sys.stderr)
        if batch.status in ENDED:
            append(lines_of(batch, client), file)
            ended.append(scrubbed(batch.errors) if batch.errors else None)
            del batches[batch_id]
            write_batches(args.batches, batches)
    return ended


def batch(args):
    """Send the requests that wait to a queue, or fetch their replies."""
    import openai

    stem = args.requests.removesuffix(".jsonl").removesuffix(".requests")
    args.replies = args.replies or f"{stem}.replies.jsonl"
    args.batches = Path(f"{args.replies.removesuffix('.jsonl')}.batches.json")
    if not API_KEY and not args.base_url:
        kit.fail("OPENAI_API_KEY", "not set; set it, or name another service with --base-url")
    requests = read_requests(args.requests)
    if Path(args.replies).resolve() == Path(args.requests).resolve():
        kit.fail("--replies", f"{args.replies} holds the requests; name another file")
    address = args.base_url or "https://api.openai.com/v1"  # and no other of the environment
    client = openai.OpenAI(base_url=address, api_key=API_KEY or "none")
    try:
        with open(args.replies, "a+b") as file:
            kit.LLM_RERANK.lock(file)
            waiting = unanswered(requests, args, args.retry_errors)
            send(waiting, client, args)
            ended = []
            while True:
                new = fetch(file, client, args)
                ended += new
                if args.wait and None in new and FULL in str(ended):
                    send(unanswered(requests, args), client, args)
                if not args.wait or not read_batches(args.batches):
                    break
                time.sleep(args.interval)
    except (openai.OpenAIError, ValueError) as error:  # ValueError: a page in place of JSON
        advice = f"check address and key, then call again; {args.batches} has the batches"
        kit.fail(address, f"{scrubbed(error)}; {advice}")
    in_progress = len(read_batches(args.batches))
    left = len(unanswered(requests, args))
    if left:
        what = f"{left} requests came back without a reply; {set(ended) - {None} or 'expired'}"
        if not any(ended) or FULL in str(ended):
            what += "; call again (if no batch is in progress, with lower --max-requests)"
        kit.fail(args.requests, what)
    summary = {"made": [args.replies], "sent": len(waiting), "batches_in_progress": in_progress}
    if in_progress:
        print(json.dumps(summary))
        sys.exit(3)
    return summary


# -------------------- Command line
# fmt: off
def add_batch(add):
    add("requests", help="send the requests of this file that have no reply")
    add("--replies", help="append replies to this file (default: beside the requests)")
    add("--wait", action="store_true", help="wait until all batches have ended")
    add("--interval", type=kit.positive, default=60,
        help="while waiting, look for replies every so many seconds")
    add("--max-requests", type=kit.count, default=MAX_REQUESTS,
        help="put at most this many requests into a batch")
    add("--base-url", default=os.environ.get("LLM_BASE_URL"),
        help="ask this compatible service (default: LLM_BASE_URL, else OpenAI)")
    add("--retry-errors", action="store_true", help="send requests again that were refused or cut")
# fmt: on


if __name__ == "__main__":
    kit.run(__doc__, batch, add_batch)
