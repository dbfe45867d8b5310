"""04_llm_rerank.py: replies are read or asked again, fused by hand, and never lost."""

import fcntl
import functools
import itertools
import json
import math
import os
import random
import re
import tempfile
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from conftest import (
    CLAIMS,
    LABELS,
    QRELS,
    ROOT,
    RUN,
    TOY,
    cases,
    cells,
    facts,
    jsonl,
    load,
    read,
    records,
    tiny_llm,
    tsv,
)
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

SCRIPT = "04_llm_rerank.py"
KIT = load(SCRIPT)
SECRET = "sk-secret-0123456789"
HYBRID = "work/demo/test/hybrid.tsv"
OUT = "work/demo/test/llm.tsv"
REPLIES = "work/demo/test/llm.replies.jsonl"


def settings(**other):
    """What prompts ask of the arguments."""
    known = {
        "model": "toy",
        "max_tokens": 0,
        "structured": False,
        "method": "listwise",
        "best": 0,
        "max_words": 0,
        "fewshot": 9,
        "backend": "openai",
        "extra": {},
    }
    return SimpleNamespace(**known | other)


def completion(text, **choice):
    return {"choices": [{"message": {"content": text}, **choice}]}


# ---------------------------------------------------------------- Replies
def text_of_reply(body):
    """The text of the only choice of a completion."""
    (choice,) = KIT.reply_of({"response": {"body": body}}).choices
    return choice.text


READERS = {
    "order": functools.partial(KIT.order_in, n=3),
    "best": functools.partial(KIT.order_in, n=4),
    "yes": functools.partial(KIT.label_in, labels=("YES", "NO")),
    "label": functools.partial(KIT.label_in, labels=LABELS),
    "evidence": functools.partial(KIT.label_in, labels=("EVIDENCE", "UNKNOWN")),
}


@pytest.mark.parametrize(
    "what, reply, wanted", [row for row in cases("replies.tsv") if row[0] in READERS]
)
def test_what_a_reply_says_is_read_or_it_is_asked_again(what, reply, wanted):
    """none: nothing that is said plainly; the prompt is asked once more."""
    text = text_of_reply(completion(reply.replace("\\n", "\n")))
    found = READERS[what](text)
    if what in ("order", "best") and found:
        found = " ".join(str(index + 1) for index in found)
    assert str(found or "none") == wanted


@given(st.text("[]>0123456789 ,abc\n-."), st.integers(1, 25))
def test_any_text_gives_places_in_range_or_none(reply, n):
    found = KIT.order_in(reply, n)
    assert found is None or len(set(found)) == len(found) > 0
    assert set(found or ()) <= set(range(n))


def tops(**probabilities):
    """The entry of logprobs for a token: the first of probabilities, {token: probability}."""
    top = []
    for token, probability in probabilities.items():
        top.append({"token": token, "logprob": math.log(probability)})
    return top[0] | {"top_logprobs": top}


def test_probabilities_are_those_of_the_first_token_that_begins_a_label():
    def probabilities(label, *entries, labels=LABELS):
        found = KIT.token_probabilities({"content": [*entries]}, labels, label)
        if found is None:
            return None
        return [round(found[name], 3) for name in labels]

    refutes = tops(REF=0.99, SUP=0.01)
    for token in ("**", "\n", '"', " `", "_"):  # empty when stripped, they begin nothing
        likely = tops(**{token: 0.9, "SUP": 0.1})
        assert probabilities("REFUTES", likely, refutes, tops(UTES=1)) == [0.01, 0.99, 0]
    assert probabilities("REFUTES", tops(I=1), tops(**{" think": 1}), refutes) == [0.01, 0.99, 0]
    assert probabilities("SUPPORTS", refutes) is None  # the likeliest is not what the text says
    assert KIT.token_probabilities(None, LABELS, "NEI") is None
    never = {"token": "NEI", "logprob": None}  # -inf, as structured output gives it
    assert probabilities("REFUTES", refutes | {"top_logprobs": [refutes, never]}) is None
    entry = tops(**{" Yes": 0.3, "yes": 0.1, "No": 0.1, "Perhaps": 0.5})
    found = probabilities("YES", tops(**{'{"': 1}), entry, labels=("YES", "NO"))
    assert found == [0.8, 0.2]  # 0.3 + 0.1 against 0.1


def test_replies_are_read_from_whatever_a_batch_engine_writes(tmp_path):
    found, unusable = KIT.read_replies(TOY.parent / "engine.jsonl", {})
    texts = {}
    for custom_id, reply in found.items():
        if not reply.error:
            texts[custom_id] = [choice.text.strip() for choice in reply.choices]
    wanted = cells("a|later; b|one two; c|; k|; p|[2] > [1]; t|no; u|no; v|no; w|yes|no|")
    assert texts == {custom_id: choices for custom_id, *choices in wanted}
    assert found["t"].choices[0].logprobs is None  # not of thoughts
    assert found["v"].choices[0].logprobs == 7
    assert [choice.is_cut for choice in found["w"].choices] == [False, False, True]
    assert found["w"].usage == {"prompt_tokens": 11, "completion_tokens": 5}
    assert found["d"].error == '{"message": "filtered"}'
    assert "expired" in found["e"].error
    assert "PROHIBITED" in found["i"].error
    assert all(found[custom_id].error for custom_id in "fghjx")  # and are not asked again
    assert unusable == 5


def test_an_error_that_comes_later_replaces_no_reply(tmp_path):
    error = {"response": None, "error": {"code": "batch_expired"}}
    paid = {"response": {"body": completion("paid")}}
    pairs = zip("aabbcc", (paid, error, error, paid, error, error))
    jsonl(tmp_path / "replies", *[{"custom_id": custom_id} | line for custom_id, line in pairs])
    found, _ = KIT.read_replies(tmp_path / "replies", {})
    texts = [[choice.text for choice in found[custom_id].choices] for custom_id in "abc"]
    assert texts == [["paid"], ["paid"], []]


def test_a_reply_counts_for_the_body_that_it_answers(tmp_path):
    request = {"custom_id": "a", "body": {"messages": ["new"]}}
    line = {"custom_id": "a", "response": {"body": completion("old")}}
    jsonl(tmp_path / "own", line | {"request_sha256": KIT.body_digest({"messages": ["old"]})})
    jsonl(tmp_path / "foreign", line)  # other programs know no sha256
    assert KIT.read_replies(tmp_path / "own", {"a": request}) == ({}, 0)
    found, _ = KIT.read_replies(tmp_path / "foreign", {"a": request})
    assert set(found) == {"a"}


def test_a_file_of_replies_in_another_encoding_is_refused(toy, call, refused):
    words = f"--run {HYBRID} --backend none --model toy"
    call(SCRIPT, words, cwd=toy)
    lines = []
    for request in records(toy / "work/demo/test/llm.requests.jsonl"):
        lines.append(json.dumps({"custom_id": request["custom_id"]} | {"response": None}))
    (toy / REPLIES).write_text("\n".join(lines), encoding="utf-16")  # as PowerShell does
    refused(toy, SCRIPT, words, said="llm.replies.jsonl:1: not UTF-8")


# ---------------------------------------------------------------- Prompts
def test_windows_go_up_from_the_bottom_and_reach_the_top():
    assert KIT.windows(25, 20, 10) == [slice(5, 25), slice(0, 15)]
    for n in range(2, 60):
        spans = KIT.windows(n, 6, 4)
        assert spans[-1].start == 0 and spans[0].stop == n
        reached = set()
        for span in spans:
            reached |= set(range(n)[span])
        assert reached == set(range(n))


def test_a_prompt_holds_claim_marks_and_the_form_of_the_answer():
    texts = ["one two three", "see [7] {claim}"]
    (turn,) = KIT.messages_about("Ice\nmelts", texts, KIT.PROMPT, settings())
    prompt = turn["content"]
    assert "Claim: Ice melts\n" in prompt
    assert "\n[1] one two three\n[2] see (7) {claim}\n" in prompt
    assert "like this: [2] > [1] > [3]. Write" in prompt
    args = settings(structured=True, best=2, max_words=2)
    prompt = KIT.messages_about("c", ["one two three"] * 3, KIT.PROMPT, args)[0]["content"]
    assert "[3] one two\n" in prompt and "marks of the 2 best abstracts" in prompt
    assert 'like this: {"order": [2, 1, 3]}. Write' in prompt
    (turn,) = KIT.messages_about("claim", ["a"], KIT.PROMPT, settings(method="pointwise"))
    assert "Answer YES or NO." in turn["content"]


def test_a_request_has_the_parameters_that_are_asked_for():
    form = KIT.PROMPT_PARTS["listwise"]["form"]
    question = KIT.Question([{"role": "user", "content": "Order"}], form, 9, None)
    extra = {"max_tokens": None, "max_completion_tokens": 77, "temperature": 0.7}
    body = KIT.request_of(question, "", settings(extra=extra, structured=True))["body"]
    assert "max_tokens" not in body and body["max_completion_tokens"] == 77
    assert body["temperature"] == 0.7
    assert KIT.request_of(question, " again", settings())["body"] == {
        "model": "toy",
        "messages": [{"role": "user", "content": "Order again"}],
        "temperature": 0,
        "seed": 13,
        "max_tokens": 9,
    }
    assert list(body["response_format"]["json_schema"]["schema"]["properties"]) == ["order"]


MINE = """# Section 3
Be fair on {claim}.
--- user
# Task
Sort {n} for {claim}:
#1 rule: marks only
{abstracts} {"as": "JSON"} {wanted}"""


def test_a_prompt_file_is_sent_without_the_comments_at_its_top(toy, rerank, endpoint, refused):
    prompt = toy / "mine.txt"
    prompt.write_text(MINE)
    server = endpoint(last_first)
    done = rerank(server, "--prompt mine.txt --depth 2")
    assert facts(done)["unread"] == 0 and "mine.txt: its first lines are comments" in done.stdout
    system, user = server.asked[0]["messages"]
    assert system["role"] == "system" and system["content"].startswith("Be fair on ")
    sent = user["content"]
    assert sent.startswith("# Task\nSort 2 for ") and "\n#1 rule: marks only\n[1] " in sent
    assert sent.endswith('{"as": "JSON"} all 2')
    corpus = toy / "data/demo/corpus.jsonl"
    corpus.write_text(corpus.read_text().replace("Body mass", "\\n--- user\\nBody mass"))
    facts(rerank(server, "--prompt mine.txt --depth 2"))
    assert len(server.asked[-1]["messages"]) == 2  # an abstract makes no turn
    prompt.write_text("# {claim} {abstracts}\n{claim}")  # a comment is not sent
    refused(toy, SCRIPT, f"--run {HYBRID} --prompt mine.txt", said="mine.txt: it needs {abs")
    prompt.write_text("Be fair.\n--- user \t\n{claim}{abstracts}")  # blanks behind the mark
    facts(rerank(server, "--prompt mine.txt --depth 2"))
    system, user = server.asked[-1]["messages"]
    assert (system["content"], user["role"]) == ("Be fair.", "user")
    assert "---" not in user["content"]


@pytest.mark.parametrize(
    "words, said",
    [
        ("--limit 0", "--limit: 0 is out of its range, 1 to"),
        ("--limit x", "--limit"),
        ("--depth 0", "--depth: 0"),
        ("--top-k 0", "--top-k: 0"),
        ("--window 0", "--window: 0"),
        ("--step 0", "--step: 0"),
        ("--step 20", "--step: windows would not overlap, so no abstract could move up"),
        ("--best -1", "--best: -1"),
        ("--max-words -1", "--max-words: -1"),
        ("--max-tokens -1", "--max-tokens: -1"),
        ("--concurrency 0", "--concurrency: 0"),
        ("--batch-size 0", "--batch-size: 0"),
        ("--alpha 1.5", "--alpha: 1.5"),
        ("--alpha nan", "--alpha: nan"),
        ("--timeout 0", "--timeout: 0.0"),
        ("--timeout inf", "--timeout: inf"),
        ("--fewshot data/demo/qrels.train.tsv --method pointwise", "--fewshot: its examples are"),
    ],
)
def test_a_number_out_of_range_is_refused_before_anything_is_paid(toy, refused, words, said):
    base = f"--run {HYBRID} --base-url http://127.0.0.1:9/v1 --model toy"
    refused(toy, SCRIPT, f"{base} {words}", said=said)


def test_examples_keep_the_order_of_their_file_and_put_evidence_first(tmp_path):
    tsv(tmp_path / "claims.train.tsv", CLAIMS, [("id a", "a"), ("id d", "d")])
    rows = [("id d", "NEI d0", "NEI"), ("id d", "REFUTES d1", "REFUTES")]
    rows += [("id a", f"{label} a", label) for label in ("NEI", "SUPPORTS", "REFUTES")]
    tsv(tmp_path / "few.tsv", QRELS, rows)
    abstracts = {abstract_id: abstract_id for _, abstract_id, _ in rows}
    args = settings(fewshot=str(tmp_path / "few.tsv"), data=tmp_path)
    turns = KIT.example_turns(KIT.PROMPT, abstracts, args)
    assert len(turns) == 4 and "Claim: d\n" in turns[0]["content"]
    for prompt, gold, n in zip(turns[::2], turns[1::2], (2, 3)):
        shown = re.findall(r"^\[\d\] (\w+)", prompt["content"], re.MULTILINE)
        order = [shown[int(mark) - 1] for mark in re.findall(r"\d", gold["content"])]
        assert sorted(order) == sorted(shown) and len(set(shown)) == n
        assert order[-1] == "NEI"


# ---------------------------------------------------------------- Scores
def test_votes_on_an_order_are_averaged():
    # ranks: 0: 0, 2, 1; 1: 1, 0, 2; 2: 2, 1, 0; the last order lacks 0 and 1, which follow it
    assert KIT.mean_order([[0, 1, 2], [1, 2, 0], [2]], 3).tolist() == [0, 1, 2]
    assert KIT.mean_order([[2, 0, 1], [2, 1, 0]], 3).tolist() == [2, 0, 1]
    assert KIT.mean_order([], 3).tolist() == [0, 1, 2]


def test_fusion_worked_by_hand():
    # before 8, 6, 4 -> 1, 1/2, 0; the LLM's order third, first, second -> 1/2, 0, 1
    found = KIT.fuse([8, 6, 4], [2, 3, 1], 0.4).tolist()
    assert found == pytest.approx([0.4 + 0.6 / 2, 0.4 / 2, 0.6])
    assert KIT.fuse([8, 6, 4], [2, 3, 1], 1).tolist() == [1, 1 / 2, 0]
    assert KIT.fuse([5, 5], [1, 0], 0.5).tolist() == [0, 0.5]  # equal scores are 0
    assert KIT.fuse([3], [0], 0.4).tolist() == [0.6]
    rows = [("a", abstract_id, rank, 1.0) for rank, abstract_id in enumerate("wxyz", 1)]
    rows.append(("b", "w", 1, 5.0))
    run = pd.DataFrame(rows, columns=RUN)
    args = settings(depth=3, top_k=4, alpha=0.5)  # keys: lower is better, ties stay; z is not seen
    done = KIT.fuse_run(run, run[run["rank"] <= 3], [-0.2, -0.9, -0.2, -0.1], args)
    expected = [("a", "x", 1, 0.5), ("a", "w", 2, 0.25), ("a", "y", 3, 0), ("a", "z", 4, -1)]
    assert list(done.itertuples(index=False, name=None)) == [*expected, ("b", "w", 1, 0.5)]


# ---------------------------------------------------------------- Endpoints
def last_first(prompt):
    numbers = range(len(re.findall(r"^\[", prompt, re.MULTILINE)), 0, -1)
    return " > ".join(f"[{number}]" for number in numbers)


@pytest.fixture
def rerank(toy, call):
    """rerank(server, "--depth 3"): the script with the key, asking the server."""

    def ask(server, words="", **how):
        words = f"--run {HYBRID} --base-url {server.url} --model toy {words}"
        return call(SCRIPT, words, cwd=toy, env={"OPENAI_API_KEY": SECRET + "\r\n"}, **how)

    return ask


def orders(path):
    """{claim_id: abstract_ids in their order}."""
    return {
        claim_id: list(rows["abstract_id"]) for claim_id, rows in read(path).groupby("claim_id")
    }


def many(toy, number):
    """Write number claims, each with the toy's twelve abstracts."""
    claims = [(f"m{n}", f"claim number {n} of many") for n in range(number)]
    tsv(toy / "data/demo/claims.test.tsv", CLAIMS, claims)
    rows = []
    for claim_id, _ in claims:
        for rank in range(1, 13):
            rows.append((claim_id, f"{rank:04}", rank, 1 / rank))
    tsv(toy / HYBRID, RUN, rows)


def test_windows_reach_the_top_nothing_is_paid_twice_and_no_key_is_kept(toy, rerank, endpoint):
    server = endpoint(last_first)
    for alpha in (0, 1):  # another --alpha costs nothing
        words = f"--depth 6 --window 4 --step 2 --alpha {alpha}"
        words += f" --out {alpha}.tsv --replies replies.jsonl"
        done = rerank(server, words)
        assert facts(done)["unread"] == 0 and len(server.asked) == 6
        assert rerank(server, words).stdout.startswith("up to date")
    for claim_id, (a, b, c, d, e, f) in orders(toy / HYBRID).items():
        # a b c d e f: the window c d e f is reversed (a b f e d c), then the window a b f e
        assert orders(toy / "0.tsv")[claim_id] == [e, f, b, a, d, c]
        assert orders(toy / "1.tsv")[claim_id] == [a, b, c, d, e, f]
    assert {request["key"] for request in server.asked} == {f"Bearer {SECRET}"}
    everything = b"".join(path.read_bytes() for path in toy.rglob("*") if path.is_file())
    assert SECRET.encode() not in everything
    assert SECRET not in done.stdout + done.stderr


FAULTS = [  # what a server may do, by turns
    {"status": 429, "text": "slow down", "headers": {"Retry-After": "0.2"}},
    {"drop": True},
    *[{"status": status, "text": "oops"} for status in (408, 409, 500, 502, 503, 504, 529)],
    {"status": 500, "sleep": 4},
    {"status": 503, "raw": b""},
    {"raw": b""},
    {"raw": b'{"choices": [{"mess'},
    {"raw": b"<html>busy</html>"},
    {"raw": b'{"choices": []}'},
    {"raw": b'{"choices": null, "error": {"message": "overloaded", "code": 502}}'},
]
MALFORMED = ["", "I'm sorry, I can't help with that.", "x" * 1_000_000, {"text": None}]
MALFORMED.append({"text": [{"type": "thinking", "thinking": "[1] > [2]"}]})


def test_200_prompts_through_faults_give_the_same_as_without(toy, rerank, endpoint):
    many(toy, 200)
    rng = random.Random(7)
    faults = itertools.cycle(FAULTS)
    malformed = itertools.cycle(MALFORMED)

    def moody(prompt):
        if rng.random() < 0.2:
            return next(faults)
        if rng.random() < 0.05 and "could not be read" not in prompt:
            return next(malformed)
        return last_first(prompt)

    words = "--window 8 --step 4 --depth 12 --alpha 0"
    server = endpoint(moody)
    calm = endpoint(last_first)
    for _ in range(9):  # what timed out is left to the next call
        done = rerank(server, f"{words} --timeout 3")
        if done.returncode == 0:
            break
        assert "--timeout" in done.stderr
    made = facts(done)
    assert len(server.asked) > 460
    assert len(server.answered) == len(set(server.answered))
    assert (made["replies"], made["unread"], made["refused"]) == (400, 0, 0)
    facts(rerank(calm, f"{words} --out calm.tsv"))
    assert (toy / OUT).read_bytes() == (toy / "calm.tsv").read_bytes()
    asked = len(server.asked)
    facts(rerank(server, f"{words} --force"))
    assert len(server.asked) == asked


NO_RETRIES = {"RETRIES = 6": "RETRIES = 0"}
FILTERED = b'{"choices": [], "promptFeedback": "filtered sk-secret-0123456789"}'
REFUSALS = [{"status": status, "text": f"filtered {SECRET}"} for status in (400, 403, 413, 500)]


@pytest.mark.parametrize("refusal", [*REFUSALS, {"raw": FILTERED}, "I cannot."])
def test_one_prompt_that_is_never_answered_is_counted(toy, rerank, endpoint, refusal):
    """Before a server error is stored, the server has to answer another question."""

    def reply(prompt):
        return refusal if "Claim: Polar" in prompt else last_first(prompt)

    server = endpoint(reply)
    for _ in range(2):  # the second time, nothing is asked
        done = rerank(server, "--alpha 0 --force", edits=NO_RETRIES)
        made = facts(done)
        assert made["refused"] + made["unread"] == 1
        assert len(server.asked) == 3 + (refusal not in REFUSALS[:3])
    assert SECRET not in (toy / REPLIES).read_text() + done.stderr
    assert re.search(r"of 3 replies, 1 (unread|refused \(.*filtered \*\*\*)", done.stderr)
    found = orders(toy / OUT)
    for claim_id, abstract_ids in orders(toy / HYBRID).items():
        if claim_id != "c3":  # the one whose request failed
            abstract_ids.reverse()
        assert found[claim_id] == abstract_ids
    server.reply = last_first
    assert facts(rerank(server, "--alpha 0 --retry-errors"))["refused"] == 0


def completions(*texts, reason="stop"):
    """A reply whose choices have these texts, as bytes."""
    choices = [{"message": {"content": text}, "finish_reason": reason} for text in texts]
    usage = {"prompt_tokens": 1000, "completion_tokens": 100, "prompt_tokens_details": {}}
    return {"raw": json.dumps({"choices": choices, "usage": usage}).encode()}


PARSER = """asked for; if they hold only reasoning, raise --max-tokens, or serve the model without \
a reasoning parser"""


def thoughts(field):
    """What a server sends whose reasoning parser takes the whole answer for thoughts."""
    message = {"content": None, field: "The order is [2] > [1]."}
    return {"raw": json.dumps({"choices": [{"message": message}]}).encode()}


@pytest.mark.parametrize(
    "reply, said",
    [
        (completions(None, reason="length"), "3 cut (raise --max-tokens where"),
        ("I cannot rank [1] and [2].", "3 unread ("),
        ({"status": 400, "text": "max_tokens is not known"}, "3 refused ("),
        (thoughts("reasoning_content"), f"3 unread (their form is not the one {PARSER})"),
        (thoughts("reasoning"), f"3 unread (their form is not the one {PARSER})"),
    ],
)
def test_where_no_reply_says_anything_there_is_no_output(toy, rerank, endpoint, reply, said):
    server = endpoint(lambda prompt: reply)
    for _ in range(2):  # no second window is asked for, and nothing once more
        done = rerank(server, "--window 4 --step 2")
        assert done.returncode == 2 and f"error: {REPLIES}: of 3 replies, {said}" in done.stderr
        assert len(server.asked) == (6 if "unread" in said else 3) and not (toy / OUT).exists()


def test_choices_vote_tokens_are_summed_and_a_first_look_is_short(toy, call, endpoint):
    server = endpoint(lambda prompt: completions("[3] > [2] > [1]", "[2] > [3]", "?"))
    words = f"--run {HYBRID} --base-url {server.url} --model toy --depth 3"
    words += ' --top-k 3 --alpha 0 --limit 2 --extra {"n":3}'
    made = facts(call(SCRIPT, words, cwd=toy, env={"OPENAI_API_KEY": "1"}))  # which is in ids
    assert server.asked[0]["n"] == 3
    assert (made["prompt_tokens"], made["completion_tokens"]) == (2000, 200)
    found = orders(toy / OUT)
    assert len(found) == 2
    for claim_id, (a, b, c) in found.items():  # mean ranks: 2, 1/2, 1/2, so ties keep their order
        assert orders(toy / HYBRID)[claim_id][:3] == [c, a, b]


@pytest.mark.parametrize("status", [401, 402, 404, 429, 502])
def test_an_outage_ends_the_run_and_what_came_is_kept(toy, rerank, endpoint, status):
    many(toy, 60)
    refusal = {"status": status, "text": f"away {SECRET}"}
    server = endpoint(lambda prompt: "[1]" if server.asked[20:] == [] else refusal)
    for address in (server, SimpleNamespace(url="http://127.0.0.1:9/v1")):  # nobody is there
        done = rerank(address, "--concurrency 4", edits=NO_RETRIES)
        assert done.returncode == 2 and f"error: {address.url}: " in done.stderr
        assert SECRET not in done.stderr + done.stdout and "then run again" in done.stderr
        assert (toy / REPLIES).read_text().count("\n") == len(server.answered)
    assert len(server.asked) < 30 and not (toy / OUT).exists()
    server.reply = last_first
    assert facts(rerank(server))["refused"] == 0


def test_a_full_disk_ends_all_calls_and_what_was_written_counts(toy, rerank, endpoint, monkeypatch):
    many(toy, 60)
    server = endpoint(last_first)

    left = iter(range(10))

    def full(file):
        if next(left, None) is None:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        done = rerank(server, "--concurrency 4")
    said = f"No space left on device: '{REPLIES}'; make room"
    assert done.returncode == 2 and said in done.stderr
    assert 10 <= len(server.asked) <= 14 and not (toy / OUT).exists()
    facts(rerank(server))
    assert len(server.asked) == 60


def test_a_full_disk_is_noticed_before_the_first_call(toy, rerank, endpoint, monkeypatch):
    server = endpoint(last_first)
    (toy / REPLIES).write_text('{"torn')

    def full(file):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        done = rerank(server)
    assert done.returncode == 2 and done.stderr.splitlines()[-1] == (
        f"error: {REPLIES}: [Errno 28] No space left on device: '{REPLIES}'"
    )
    assert server.asked == [] and (toy / REPLIES).read_text() == '{"torn'
    facts(rerank(server))
    assert " " * 99 not in (toy / REPLIES).read_text()


def test_an_error_of_the_system_names_the_file_of_replies(toy, call, monkeypatch):
    tiny_llm(toy / "llm")

    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    words = f"--run {HYBRID} --backend transformers --model llm --method pointwise"
    done = call(SCRIPT, words, cwd=toy)
    assert f"error: {REPLIES}: [Errno 28] No space left" in done.stderr and done.returncode == 2


# ---------------------------------------------------------------- Money
def test_a_call_that_times_out_is_not_repeated_and_left_to_the_next_run(toy, rerank, endpoint):
    slow = {"sleep": 1.5, "text": "[1]"}
    server = endpoint(lambda prompt: slow if "Claim: Polar" in prompt else last_first(prompt))
    for number in (1, 2):
        done = rerank(server, "--timeout 0.5 --concurrency 1")
        assert done.returncode == 2
        last = done.stderr.splitlines()[-1]
        assert last.startswith(f"error: {REPLIES}: 1 requests have no reply; run again")
        assert last.endswith("--timeout")
        assert len(records(toy / REPLIES)) == 2 and len(server.asked) == 2 + number
    assert facts(rerank(server, "--timeout 9"))["replies"] == 3 and len(server.asked) == 5


def test_two_timeouts_in_a_row_end_the_run(toy, rerank, endpoint):
    many(toy, 20)
    server = endpoint(lambda prompt: {"sleep": 1, "text": "[1]"})
    done = rerank(server, "--timeout 0.3 --concurrency 1")
    said = f"error: {server.url}: two calls in a row timed out; give a larger --timeout, then run"
    assert done.returncode == 2 and said in done.stderr
    assert len(server.asked) == 2 and (toy / REPLIES).read_bytes() == b""


def refusal(message, **fields):
    """A 400 in the form of OpenAI's errors."""
    error = {"message": message, "type": "invalid_request_error", **fields}
    return {"status": 400, "raw": json.dumps({"error": error}).encode()}


PARAMETERS = [
    ("unsupported_parameter", "max_tokens", {"max_tokens": None, "max_completion_tokens": 4000}),
    ("unsupported_value", "temperature", {"top_p": 1, "temperature": None}),
    ("unsupported_parameter", "logprobs", {"logprobs": None, "top_logprobs": None}),
    ("unsupported_value", "n", {"n": None}),
]


@pytest.mark.parametrize("code, name, extra", PARAMETERS)
def test_a_parameter_that_a_model_refuses_ends_the_run(toy, rerank, endpoint, code, name, extra):
    many(toy, 20)

    def reply(prompt):
        if name not in server.asked[-1]:
            return "YES" if name == "logprobs" else last_first(prompt)
        return refusal(f"'{name}' is not supported with this model.", code=code, param=name)

    server = endpoint(reply)
    words = "--concurrency 1 --depth 20"
    if name == "logprobs":
        words += " --method pointwise --depth 1"
    else:
        words += " --max-tokens 184"
    own = {"n": ' --extra {"n":2}', "temperature": ' --extra {"top_p":1}'}.get(name, "")
    done = rerank(server, words + own)
    flag = f"--extra '{json.dumps(extra)}'"
    assert done.returncode == 2 and flag in done.stderr.splitlines()[-1]
    assert len(server.asked) == 1 and (toy / REPLIES).read_bytes() == b""
    flag = json.dumps(extra, separators=(",", ":"))
    assert facts(rerank(server, f"{words} --extra {flag}"))["refused"] == 0


def test_what_a_model_refuses_in_one_prompt_is_no_parameter(toy, rerank, endpoint):
    bad = refusal("no such role", code="unsupported_value", param="messages[0].role")
    server = endpoint(lambda prompt: bad if "Claim: Polar" in prompt else last_first(prompt))
    assert facts(rerank(server))["refused"] == 1


@pytest.mark.parametrize("is_alike", [True, False])
def test_a_run_ends_if_most_of_its_first_requests_are_refused_alike(
    toy, rerank, endpoint, is_alike
):
    many(toy, 60)

    def reply(prompt):
        number = len(server.asked)
        if number % 3 == 0:
            return last_first(prompt)
        if is_alike:
            return refusal(f"no: {number} tokens, req_{number}x")
        return refusal("".join(["a"] * len(server.asked)))

    server = endpoint(reply)
    done = rerank(server, "--concurrency 1")
    if is_alike:  # requests 1, 2, 4, 5, 7, 8, ..., 22, 23, 25
        said = "17 of the first 25 requests are refused: Error code: 400 - no: 25 tokens"
        assert done.returncode == 2 and said in done.stderr.splitlines()[-1]
        assert len(server.asked) == 25 and not (toy / OUT).exists()
        server.reply = last_first
        assert facts(rerank(server, "--retry-errors"))["refused"] == 0
        assert len(server.asked) == 25 + 60 - 8
    else:
        assert facts(done)["refused"] == 40


def test_a_password_in_the_address_is_kept_nowhere(toy, rerank, endpoint, contents):
    server = endpoint(lambda prompt: refusal("who is user:pa55w0rd?"))
    address = SimpleNamespace(url=server.url.replace("//", "//user:pa55w0rd@"))
    failed = rerank(address)
    server.reply = lambda prompt: {"status": 401, "text": "pa55w0rd\u2028is wrong, pa55w0rd"}
    outage = rerank(address, "--retry-errors")
    assert outage.returncode == 2 and "error: http://***@127.0.0.1" in outage.stderr
    assert "*** is wrong, ***" in outage.stderr
    server.reply = last_first
    facts(rerank(address, "--retry-errors"))
    said = failed.stderr + failed.stdout + outage.stderr + outage.stdout
    assert "pa55w0rd" not in said + str(contents(toy))


def test_replies_and_who_is_asked_for_them_make_an_output(toy, rerank, endpoint):
    server = endpoint(last_first)
    other = endpoint(lambda prompt: " > ".join(reversed(last_first(prompt).split(" > "))))
    facts(rerank(server, "--alpha 0"))
    first = orders(toy / OUT)
    for address in (server, other):
        assert "up to date" in rerank(address, "--alpha 0").stdout
    assert other.asked == []
    facts(rerank(other, "--alpha 0 --replies new.jsonl"))  # asks another endpoint
    assert orders(toy / OUT) != first and len(other.asked) == 3
    assert facts(rerank(server, "--alpha 0"))["made"]  # the first replies are read anew
    assert orders(toy / OUT) == first and len(server.asked) == 3
    (toy / REPLIES).unlink()
    assert "up to date" in rerank(server, "--alpha 0").stdout
    assert facts(rerank(other, "--alpha 0"))["made"]
    assert (len(server.asked), len(other.asked)) == (3, 6)


# ---------------------------------------------------------------- Odd replies
def nested(inner):
    """Return lists and objects of JSON values."""
    return st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([10**400, "", "text", "YES", "length", "\ud800", "9" * 5000])
    | st.text(),
    nested,
    max_leaves=5,
)
TOKEN = {"token": "YES", "logprob": -0.1, "top_logprobs": [{"token": "YES", "logprob": -0.1}]}
CHOICE = {"message": {"content": "YES", "reasoning": "so"}, "finish_reason": "stop", "index": 0}
WHOLE = {
    "custom_id": "a",
    "request_sha256": None,
    "error": None,
    "response": {
        "status_code": 200,
        "body": {
            "choices": [CHOICE | {"logprobs": {"content": [TOKEN, TOKEN]}, "error": None}],
            "usage": {"prompt_tokens": 7, "completion_tokens": 3},
            "error": None,
        },
    },
}


def places_in(value, path=()):
    """Return the paths of all places in a JSON value."""
    entries = []
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, list):
        entries = enumerate(value)
    found = [path]
    for key, inner in entries:
        found += places_in(inner, (*path, key))
    return found


def replaced(value, path, new):
    """Return a JSON value with new in a place; without this place, if new is MISSING."""
    if not path:
        return new
    key, *rest = path
    copy = value.copy()
    if new is MISSING and not rest:
        del copy[key]
    else:
        copy[key] = replaced(value[key], rest, new)
    return copy


MISSING = object()
PLACES = places_in(WHOLE)


@settings_of_hypothesis(max_examples=300, deadline=None)
@given(st.sampled_from(PLACES[1:]), st.just(MISSING) | JSON)
def test_no_json_in_any_place_of_a_reply_is_a_traceback(place, new):
    reads = functools.partial(KIT.label_in, labels=("YES", "NO"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "replies")
        path.write_text(json.dumps(replaced(WHOLE, place, new)))
        requests = {"a": {"custom_id": "a", "body": {}}}
        asker = KIT.Asker(None, None)
        known, _ = KIT.read_replies(path, requests)
        for reply in known.values():
            votes = [reads(choice.text) for choice in reply.choices]
            reply = reply._replace(answers=[vote for vote in votes if vote])
            asker.count(reply)
            asker.counts.update(reply.usage)
            found = KIT.label_probabilities(reply, ("YES", "NO"))
            assert found is None or sum(found.values()) == pytest.approx(1)
            KIT.order_in("".join(choice.text for choice in reply.choices), 3)


ODD = [
    {"usage": [1, 2]},
    {"usage": {"prompt_tokens": "7", "completion_tokens": None}},
    {"choices": [CHOICE | {"logprobs": {"content": [{"logprob": 0}]}}]},
    {"choices": [CHOICE | {"logprobs": [7]}]},
    {"choices": [CHOICE | {"logprobs": {"content": [TOKEN | {"logprob": "x"}]}}]},
]


@pytest.mark.parametrize("odd", ODD)
def test_odd_parts_of_a_reply_leave_its_answer(toy, rerank, endpoint, odd):
    raw = json.dumps({"choices": [CHOICE], "usage": None} | odd).encode()
    server = endpoint(lambda prompt: {"raw": raw})
    made = facts(rerank(server, "--method pointwise --depth 1"))
    assert (made["unread"], made["replies"], made["prompt_tokens"]) == (0, 3, 0)


def test_a_choice_with_an_error_is_no_answer_and_its_key_is_not_kept(
    toy, rerank, endpoint, contents
):
    error = {"code": 502, "message": f"upstream {SECRET}"}
    raw = json.dumps({"choices": [CHOICE | {"error": error}]}).encode()
    server = endpoint(lambda prompt: {"raw": raw} if "Claim: Polar" in prompt else "YES")
    done = rerank(server, "--method pointwise --depth 1")
    assert facts(done)["refused"] == 1 and len(server.asked) == 3
    assert "upstream ***" in done.stderr and SECRET not in str(contents(toy))


def test_a_second_process_is_told_that_another_one_asks(toy, refused):
    words = f"--run {HYBRID} --model toy --base-url http://127.0.0.1:9/v1"
    with (toy / REPLIES).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refused(toy, SCRIPT, words, said="llm.replies.jsonl: another process asks")


@pytest.mark.parametrize(
    "model, backend",
    [(None, "transformers"), ("gpt-4.1", "openai"), ("tests", "transformers")],  # tests is a folder
)
def test_a_paid_endpoint_is_asked_for_a_named_model_only(monkeypatch, model, backend):
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(KIT.with_backend.__globals__, "API_KEY", "key")
    args = {"job": "rerank", "backend": None, "base_url": None, "model": model}
    args |= {"force": False, "retry_errors": True}
    args = KIT.with_backend(Namespace(**args, out="x.tsv", replies=None))
    assert args.force  # an output is made anew from the new replies
    assert args.backend == backend and args.model == (model or "data/models/smollm2")


# ---------------------------------------------------------------- Batch engines, local models
def test_a_local_model_judges_by_its_first_logits_and_is_not_asked_twice(toy, call):
    tiny_llm(toy / "llm")
    words = f"--run {HYBRID} --backend transformers --model llm --batch-size 4 --alpha 0"
    pointwise = f"{words} --depth 3 --method pointwise"
    assert facts(call(SCRIPT, pointwise, cwd=toy))["unread"] == 0
    whole = read(toy / OUT)
    lines = (toy / REPLIES).read_text().splitlines()
    for reply in records(toy / REPLIES):
        choice = reply["response"]["body"]["choices"][0]
        top = choice["logprobs"]["content"][0]["top_logprobs"]
        found = {entry["token"]: entry["logprob"] for entry in top}
        label = choice["message"]["content"]
        assert set(found) == {"YES", "NO"}
        assert label == max(found, key=found.get)
        probabilities = KIT.token_probabilities(choice["logprobs"], ("YES", "NO"), label)
        sigmoid = 1 / (1 + math.exp(found["NO"] - found["YES"]))
        assert probabilities["YES"] == pytest.approx(sigmoid)
    facts(call(SCRIPT, f"{pointwise} --force", cwd=toy))
    assert read(toy / OUT).equals(whole)
    assert (toy / REPLIES).read_text().splitlines() == lines
    done = call(SCRIPT, f"{words} --depth 2 --method listwise", cwd=toy)
    assert done.returncode == 2 and "of 3 replies, 3 cut (raise --max-tokens where" in done.stderr
    weights = load_file(toy / "llm/model.safetensors")
    weights["model.norm.weight"] *= math.nan  # as half precision may make
    save_file(weights, toy / "llm/model.safetensors", {"format": "pt"})
    done = call(SCRIPT, f"{pointwise} --out nan.tsv", cwd=toy)
    assert done.returncode == 2 and "logits are not finite" in done.stderr


@pytest.mark.parametrize("ends, reason", [(None, "length"), ([*range(260)], "stop")])
def test_a_local_reply_says_whether_the_token_limit_cut_it(tmp_path, ends, reason):
    folder = tiny_llm(tmp_path / "llm")
    _, model = KIT.load_local(folder, "cpu")
    model.generation_config.eos_token_id = ends
    body = {"model": folder, "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    assert KIT.generate([body], "cpu")[0]["finish_reason"] == reason
