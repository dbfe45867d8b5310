"""04_llm_rerank.py: total parsing, the fusion by hand, dialogues, and replies that are never lost."""
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from conftest import tsv
from filelock import FileLock

SCRIPT = "04_llm_rerank.py"
KEY = "sk-secret-0123456789"
RUN, REPLIES = "work/demo/test/hybrid.tsv", "work/demo/test/llm.replies.jsonl"

# ---------------------------------------------------------------- Replies
@pytest.mark.parametrize(("reply", "order", "quality"), [
    ("[2] > [3] > [1]", [1, 2, 0], "perfect"),
    ("2 > 3 > 1", [1, 2, 0], "perfect"),
    ("2\n3\n1\n", [1, 2, 0], "perfect"),
    ('{"order": [3, 1, 2]}', [2, 0, 1], "perfect"),
    ("Of the 3 abstracts I prefer [3], then [1] and [2].", [2, 0, 1], "perfect"),
    ("[3] > [3] > [1]", [2, 0, 1], "repaired"),
    ("[03] > [3] > [1]", [2, 0, 1], "repaired"),
    ("[7] > [2]", [1, 0, 2], "repaired"),
    ("[0] > [2] > [99999999999]", [1, 0, 2], "repaired"),
    ("I cannot help with that.", [0, 1, 2], "useless"),
    ("", [0, 1, 2], "useless"),
    ("<think>[2] or [1]?</think>[3] > [1] > [2]", [2, 0, 1], "perfect"),
    ("Is it [1], [2]?\n</think>\n\n[3] > [1] > [2]", [2, 0, 1], "perfect"),
    ("<think>It could be [2] > [1]", [0, 1, 2], "useless"),
])
def test_replies_are_parsed_and_repaired(load, reply, order, quality):
    assert load(SCRIPT)["parse_permutation"](reply, 3) == (order, quality)

def test_any_text_gives_a_permutation(load):
    parse, rng = load(SCRIPT)["parse_permutation"], random.Random(5)
    for _ in range(500):
        n = rng.randint(1, 25)
        reply = "".join(rng.choice("[]>0123456789 ,abc\n-.") for _ in range(rng.randint(0, 80)))
        assert sorted(parse(reply, n)[0]) == list(range(n))

def test_only_the_best_are_asked_for_and_the_rest_follows_in_its_order(load):
    parse = load(SCRIPT)["parse_permutation"]
    assert parse("[4] > [2]", 4, 2) == ([3, 1, 0, 2], "perfect")
    assert parse("[4]", 4, 2) == ([3, 0, 1, 2], "repaired")

def test_the_probability_of_yes_comes_from_logprobs_else_from_the_text(load):
    parse = load(SCRIPT)["parse_yes"]
    top = [{"token": token, "logprob": math.log(p)} for token, p in
           [(" Yes", 0.3), ("yes", 0.1), ("No", 0.1), ("Perhaps", 0.5)]]
    tokens = [{"token": '{"', "top_logprobs": [{"token": '{"', "logprob": 0.0}]},
              {"token": " Yes", "top_logprobs": top}]
    reply = {"content": "No", "logprobs": {"content": tokens}, "error": None}
    assert parse(reply) == (pytest.approx((0.3 + 0.1) / (0.3 + 0.1 + 0.1)), "perfect")
    said = {"no.": (0, "perfect"), '{"label": "YES"}': (1, "perfect"), "yes or no": (0.5, "useless"),
            "": (0.5, "useless"), "<think>yes</think>NO": (0, "perfect")}
    broken = [None, 7, {}, {"content": None}, {"content": [{"top_logprobs": [{"token": 3}]}]}]
    for text, found in said.items():
        for logprobs in broken:
            assert parse({"content": text, "logprobs": logprobs, "error": None}) == found
    for odd in (math.nan, math.inf, 1e9):
        top[0]["logprob"] = odd
        assert 0 <= parse(reply)[0] <= 1

def test_windows_go_up_from_the_bottom_and_reach_the_top(load):
    windows = load(SCRIPT)["windows"]
    assert windows(20, 20, 10) == [(0, 20)] and windows(7, 20, 10) == [(0, 7)]
    assert windows(40, 20, 10) == [(20, 40), (10, 30), (0, 20)]
    assert windows(25, 20, 10) == [(5, 25), (0, 15)]
    for n in range(1, 60):
        spans = windows(n, 6, 4)
        assert spans[-1][0] == 0 and spans[0][1] == n
        assert set().union(*(range(*span) for span in spans)) == set(range(n))

# ---------------------------------------------------------------- Prompts
def settings(**other):
    """What prompts and calls ask of the arguments."""
    known = {"model": "toy", "temperature": 0.0, "seed": 1, "max_tokens": 0, "extra": {},
             "structured": False, "method": "listwise", "best": 0, "max_words": 0, "fewshot": 9,
             "window": 20, "step": 10, "base_url": "", "replies": "replies.jsonl", "timeout": 30,
             "retries": 3, "concurrency": 4, "price_in": 0.0, "price_out": 0.0, "batch_size": 2,
             "max_cost": math.inf, "device": ["cpu"], "retry_errors": False, "dry_run": False}
    return SimpleNamespace(**known | other)

def test_a_prompt_holds_claim_marks_and_whole_abstracts(load):
    question = load(SCRIPT)["question"]
    prompt = question("Ice\nmelts", ["one two three", "see [7] here"], settings())["content"]
    assert "Claim: Ice melts\n" in prompt and "\n[1] one two three\n[2] see (7) here\n" in prompt
    assert "all 2 abstracts" in prompt
    prompt = question("c", ["one two three"] * 3, settings(best=2, max_words=2))["content"]
    assert "[3] one two\n" in prompt and "the 2 best abstracts" in prompt

def test_parameters_join_and_replace(load):
    extra = {"max_tokens": None, "max_completion_tokens": 77, "reasoning_effort": "low"}
    args = settings(extra=extra, structured=True)
    [dialogue] = load(SCRIPT)["dialogues_about"]("c", ["x", "y"], [], args | {} if False else with_shuffle(args))
    body = next(dialogue)["body"]
    assert "max_tokens" not in body and body["max_completion_tokens"] == 77
    schema = body["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["order"]["items"] == {"type": "integer"}
