"""
Answer chat completions as a language model would, by a script: no model, no cost.

The form of a reply follows the prompt: an order of the marks [1], [2], ...; a digit for each of
many pairs; a text between <text> tags; a JSON object with a label; else a label alone. Which order,
digit or label it is depends on the prompt alone.

Reads   POST /v1/chat/completions
Prints  when it is stopped (Ctrl-C), one line of JSON: requests, words of prompts and of replies

Examples
    python tests/benchmarks/endpoint.py --port 8000 --delay 0.01
    LLM_BASE_URL=http://localhost:8000/v1 LLM_MODEL=scripted bash recipes/systems/pranav.sh
"""

import argparse
import json
import re
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LABELS = ("SUPPORTS", "REFUTES", "NEI")
COUNTS = {"requests": 0, "prompt_words": 0, "reply_words": 0}
LOCK = threading.Lock()


def reply_to(prompt):
    """Return the reply to a prompt, the texts of its messages."""
    number = zlib.crc32(prompt.encode())
    marks = list(dict.fromkeys(re.findall(r"^\[(\d+)\]", prompt, re.MULTILINE)))
    if marks:
        turn = number % len(marks)
        return " > ".join(f"[{mark}]" for mark in marks[turn:] + marks[:turn])
    pairs = re.findall(r"^<pair (\d+)>", prompt, re.MULTILINE)
    if pairs:
        return "\n".join(f"{pair}: {(number + int(pair)) % 3}" for pair in pairs)
    if "<text>" in prompt:
        return "<text>a claim in other words</text>"
    label = LABELS[number % 3]
    if "EVIDENCE or UNKNOWN" in prompt:
        return ("EVIDENCE", "UNKNOWN")[number % 2]
    if "YES or NO" in prompt:
        return ("YES", "NO")[number % 2]
    if "JSON object" in prompt:
        return json.dumps({"label": label})
    return label


class Handler(BaseHTTPRequestHandler):
    """One endpoint, /v1/chat/completions."""

    protocol_version = "HTTP/1.1"
    delay = 0.0

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = "\n".join(message["content"] for message in body["messages"])
        reply = reply_to(prompt)
        time.sleep(self.delay)
        words = len(prompt.split()), len(reply.split())
        with LOCK:
            COUNTS["requests"] += 1
            COUNTS["prompt_words"] += words[0]
            COUNTS["reply_words"] += words[1]
        usage = {"prompt_tokens": words[0], "completion_tokens": words[1]}
        message = {"role": "assistant", "content": reply}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        answer = {"id": "1", "object": "chat.completion", "model": body["model"], "created": 0}
        answer |= {"choices": [choice], "usage": usage}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        """Print nothing for each request."""


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=8000, help="listen on this port of localhost")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before each reply")
    args = parser.parse_args()
    Handler.delay = args.delay
    server = ThreadingHTTPServer(("localhost", args.port), Handler)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print(json.dumps(COUNTS))


if __name__ == "__main__":
    main()
