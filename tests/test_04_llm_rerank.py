"""04_llm_rerank.py: replies are read or asked again, fused by hand, and never lost."""

import fcntl
import functools
import itertools
import json
import math
import os
import random
import re
from types import SimpleNamespace

import pandas as pd
import pytest
from conftest import (
    CLAIMS,
    KEY,
    LABELS,
    ROOT,
    RUN,
    TOY,
    cases,
    cells,
    facts,
    jsonl,
    load,
    read,
    tiny_llm,
    tsv,
)
from safetensors.torch import load_file, save_file

SCRIPT = "04_llm_rerank.py"
KIT = load(SCRIPT)
SECRET = "sk-secret-0123456789"
HYBRID = "work/demo/test/hybrid.tsv"
OUT = "work/demo/test/llm.tsv"
REPLIES = "work/demo/test/llm.replies.jsonl"
DEFAULTS = {"model": "toy", "max_tokens": 0, "structured": False, "method": "listwise", "best": 0}
DEFAULTS |= {"max_words": 0, "backend": "openai", "extra": {}}
SMOLLM2 = "data/models/smollm2"
LISTWISE = KIT.PROMPTS["listwise"]


def settings(**other):
    """What prompts ask of the arguments."""
    return SimpleNamespace(**DEFAULTS | other)


def completion(*texts, **choice):
    """A completion whose choices have these texts."""
    return {"choices": [{"message": {"content": text}} | choice for text in texts]}


# ---------------------------------------------------------------- Replies
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
    body = completion(reply.replace("\\n", "\n"))
    ((text, _),) = KIT.reply_of({"response": {"body": body}}).choices
    found = READERS[what](text)
    if what in ("order", "best") and found:
        found = " ".join(str(index + 1) for index in found)
    assert str(found or "none") == wanted


def test_any_text_gives_places_in_range_or_none():
    rng = random.Random(13)
    for _ in range(5000):
        reply = "".join(rng.choices("[]>0123456789 ,abc\n-.", k=rng.randrange(30)))
        found = KIT.order_in(reply, 12)
        assert found is None or sorted(set(found) & set(range(12))) == sorted(found) != []


def tops(**probabilities):
    """The entry of logprobs for a token: the first of probabilities, {token: probability}."""
    top = []
    for token, probability in probabilities.items():
        top.append({"token": token, "logprob": math.log(probability)})
    return top[0] | {"top_logprobs": top}


def test_probabilities_are_those_of_the_first_token_that_begins_a_label():
    def probabilities(label, *entries, labels=LABELS, is_cut=False):
        reply = KIT.Reply([(label, {"content": entries})], {}, is_cut, [label])
        found = KIT.label_probabilities(reply, labels)
        return [round(found[name], 3) for name in labels]

    refutes = tops(REF=0.99, SUP=0.01)
    for token in '** " ` _'.split():  # empty when stripped, they begin nothing
        likely = tops(**{token: 0.9, "SUP": 0.1})
        assert probabilities("REFUTES", likely, refutes, tops(UTES=1)) == [0.01, 0.99, 0]
    assert probabilities("REFUTES", tops(I=1), tops(**{" think": 1}), refutes) == [0.01, 0.99, 0]
    assert probabilities("SUPPORTS", refutes, tops(SUP=0.9, NEI=0.1)) == [1, 0, 0]  # the text says
    assert probabilities("REFUTES", refutes, is_cut=True) == [0, 1, 0]  # the one that is left
    for token, wanted in {"NEI": [0, 1, 0], "x": [0.01, 0.99, 0]}.items():
        never = {"token": token, "logprob": None}  # -inf, as structured output gives it
        refutes["top_logprobs"][2:] = [never]
        assert probabilities("REFUTES", refutes) == wanted
    entry = tops(**{" Yes": 0.3, "yes": 0.1, "No": 0.1, "Perhaps": 0.5})
    found = probabilities("YES", tops(**{'{"': 1}), entry, labels=("YES", "NO"))
    assert found == [0.8, 0.2]  # 0.3 + 0.1 against 0.1


def test_replies_are_read_from_whatever_a_batch_engine_writes():
    found = KIT.read_replies(TOY.parent / "engine.jsonl")
    texts = {}
    for custom_id, reply in found.items():
        if reply.choices:
            texts[custom_id] = [text.strip() for text, _ in reply.choices]
    wanted = cells(
        "a|later; b|one two; c|; p|[2] > [1]; t|no; u|no; v|no; w|yes|no; y|paid; z|paid"
    )
    assert texts == {custom_id: choices for custom_id, *choices in wanted}
    assert found["t"].choices[0][1] is None  # logprobs of thoughts
    assert found["v"].choices[0][1] == 7
    assert [name for name, reply in found.items() if reply.is_cut] == ["w"]
    assert set("fghjxdei") < set(found)  # they hold errors, and are not asked again


# ---------------------------------------------------------------- Prompts
def test_windows_go_up_from_the_bottom_and_reach_the_top():
    assert KIT.windows(25, 20) == [slice(5, 25), slice(0, 15)]
    for n, size in itertools.product(range(2, 60), (1, 5, 6)):
        spans = KIT.windows(n, size)
        assert set().union(*[range(n)[span] for span in spans]) == set(range(n))


def test_a_prompt_holds_claim_marks_and_the_form_of_the_answer():
    texts = ["one two three", "see [7] {claim}"]
    (turn,) = KIT.messages_about("Ice\nmelts", texts, LISTWISE, settings())
    prompt = turn["content"]
    assert "Claim: Ice melts\n" in prompt
    assert "\n[1] one two three\n[2] see (7) {claim}\n" in prompt
    assert "like this: [2] > [1] > [3]. Write" in prompt
    args = settings(structured=True, best=2, max_words=2)
    prompt = KIT.messages_about("c", ["one two three"] * 3, LISTWISE, args)[0]["content"]
    assert "[3] one two\n" in prompt and "marks of the 2 best abstracts" in prompt
    assert 'like this: {"order": [2, 1, 3]}. Write' in prompt
    args = settings(method="pointwise")
    (turn,) = KIT.messages_about("claim", ["a"], KIT.PROMPTS["pointwise"], args)
    assert "Answer YES or NO." in turn["content"]


def test_a_request_has_the_parameters_that_are_asked_for():
    question = KIT.Question([{"role": "user", "content": "Order"}], KIT.FORMS["listwise"], 9, None)
    extra = {"max_tokens": None, "max_completion_tokens": 77, "temperature": 0.7}
    body = KIT.request_of(question, "", settings(extra=extra, structured=True))["body"]
    assert "max_tokens" not in body and {name: body.get(name) for name in extra} == extra
    assert list(body["response_format"]["json_schema"]["schema"]["properties"]) == ["order"]
    assert KIT.request_of(question, " again", settings())["body"] == {
        "model": "toy",
        "messages": [{"role": "user", "content": "Order again"}],
        "temperature": 0,
        "seed": 13,
        "max_tokens": 9,
    }


MINE = """# Section 3
Be fair on {claim}.
--- user \t
# Task
Sort {n} for {claim}:
#1 rule: marks only
{abstracts} {"as": "JSON"} {wanted}"""


def test_a_prompt_file_is_sent_without_the_comments_at_its_top(toy, rerank, endpoint, refused):
    prompt = toy / "mine.txt"
    prompt.write_text(MINE)
    corpus = toy / "data/demo/corpus.jsonl"
    corpus.write_text(corpus.read_text().replace("Body mass", "\\n--- user\\nBody mass"))
    server = endpoint(last_first)
    assert facts(rerank(server, "--prompt mine.txt --depth 2"))["unread"] == 0
    assert {len(body["messages"]) for body in server.asked} == {2}  # an abstract makes no turn
    system, user = server.asked[0]["messages"]
    assert system["role"] == "system" and system["content"].startswith("Be fair on ")
    sent = user["content"]
    assert sent.startswith("# Task\nSort 2 for ") and "\n#1 rule: marks only\n[1] " in sent
    assert sent.endswith('{"as": "JSON"} all 2')
    prompt.write_text("# {claim} {abstracts}\n{claim}")  # a comment is not sent
    refused(toy, SCRIPT, f"--run {HYBRID} --prompt mine.txt", said="mine.txt: it needs {abs")


REFUSED = """--limit 0|--limit: 0; --limit x|--limit; --depth 0|--depth: 0; --top-k 0|--top-k: 0
    ; --window 0|--window: 0; --best -1|--best: -1; --max-words -1|--max-words: -1
    ; --max-tokens -1|--max-tokens: -1; --concurrency 0|--concurrency: 0
    ; --batch-size 0|--batch-size: 0; --alpha 1.5|--alpha: 1.5; --alpha nan|--alpha: nan
    ; --extra 5|--extra; --fewshot few.tsv --method pointwise|--fewshot: its examples are
    ; --replies ./few.tsv --fewshot few.tsv|few.tsv: replies would be added
    ; --replies data/../new.tsv --out new.tsv|new.tsv: replies would be added
    ; --retry-errors --out data/demo/corpus.jsonl|corpus.jsonl: not made by"""


@pytest.mark.parametrize("words, said", cells(REFUSED))
def test_what_makes_no_sense_is_refused_before_anything_is_paid(toy, refused, words, said):
    (toy / "few.tsv").write_text("")
    base = f"--run {HYBRID} --base-url http://127.0.0.1:9/v1 --model toy"
    refused(toy, SCRIPT, f"{base} {words}", said=said)


def test_examples_keep_the_order_of_their_file_and_put_evidence_first(tmp_path):
    rows = "d|n0|d|NEI; d|r1|d|REFUTES; a|n2|a|NEI; a|s3|a|SUPPORTS; a|r4|a|REFUTES"
    tsv(tmp_path / "few.tsv", [*KEY, "claim", "label"], rows)
    abstracts = {name: f"text {name}" for name in "n0 r1 n2 s3 r4".split()}
    turns = KIT.example_turns(LISTWISE, abstracts, settings(fewshot=[tmp_path / "few.tsv"]))
    assert [turn["content"] for turn in turns[1::2]] == ["[2] > [1]", "[2] > [3] > [1]"]
    assert "Claim: d\n\n[1] text n0\n[2] text r1\n\n" in turns[0]["content"]


# ---------------------------------------------------------------- Scores
def test_votes_on_an_order_are_averaged():
    # ranks of 0: 2, 1; of 1: 0, 2; of 2: 1, 0; the last order lacks 0 and 1, which follow it
    assert KIT.mean_order([[1, 2, 0], [2]], 3).tolist() == [2, 1, 0]
    assert KIT.mean_order([], 3).tolist() == [0, 1, 2]


def test_fusion_worked_by_hand():
    # before 8, 6, 4 -> 1, 1/2, 0; the LLM's order third, first, second -> 1/2, 0, 1
    found = KIT.fuse([8, 6, 4], [2, 3, 1], 0.4).tolist()
    assert found == pytest.approx([0.4 + 0.6 / 2, 0.4 / 2, 0.6])
    assert KIT.fuse([5, 5], [1, 0], 0.5).tolist() == [0, 0.5]  # equal scores are 0
    assert KIT.fuse([3], [0], 0.4).tolist() == [0.6]
    run = pd.DataFrame(cells("a|w; a|x; a|y; a|z; b|w"), columns=KEY)
    run = run.assign(rank=[1, 2, 3, 4, 1], score=1.0)
    args = settings(depth=3, top_k=4, alpha=0.5)  # keys: lower is better, ties stay; z is not seen
    done = KIT.fuse_run(run, run[run["rank"] <= 3], [-0.2, -0.9, -0.2, -0.1], args)
    expected = [("a", "x", 1, 0.5), ("a", "w", 2, 0.25), ("a", "y", 3, 0), ("a", "z", 4, -1)]
    assert list(done.itertuples(index=False, name=None)) == [*expected, ("b", "w", 1, 0.5)]


# ---------------------------------------------------------------- Endpoints
def last_first(prompt):
    numbers = range(len(re.findall(r"^\[", prompt, re.MULTILINE)), 0, -1)
    return " > ".join(f"[{number}]" for number in numbers)


def raw(body, **answer):
    return {"raw": json.dumps(body).encode(), **answer}


@pytest.fixture
def rerank(toy, call):
    """rerank(server, "--depth 3"): the script with the key, asking the server."""

    def ask(server, words="", job=f"--run {HYBRID}", **how):
        words = f"{job} --base-url {server.url} --model toy {words}"
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
        words = f"--depth 6 --window 4 --alpha {alpha} --out {alpha}.tsv --replies replies.jsonl"
        done = rerank(server, words)
        assert facts(done)["unread"] == 0 and len(server.asked) == 6
        assert rerank(server, words).stdout.startswith("up to date")
    for claim_id, (a, b, c, d, e, f) in orders(toy / HYBRID).items():
        # a b c d e f: the window c d e f is reversed (a b f e d c), then the window a b f e
        assert orders(toy / "0.tsv")[claim_id] == [e, f, b, a, d, c]
        assert orders(toy / "1.tsv")[claim_id] == [a, b, c, d, e, f]
    assert {request["key"] for request in server.asked} == {f"Bearer {SECRET}"}
    everything = b"".join(path.read_bytes() for path in toy.rglob("*") if path.is_file())
    assert SECRET not in str(everything) + done.stdout + done.stderr


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
MALFORMED += ['{"order": ' + "[" * 9999, {"text": [{"type": "thinking", "thinking": "[1] > [2]"}]}]


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

    words = "--window 8 --depth 12 --alpha 0"
    server = endpoint(moody)
    for _ in range(9):  # what timed out is left to the next call
        done = rerank(server, f"{words} --timeout 3")
        if done.returncode == 0:
            break
        assert "--timeout" in done.stderr
    made = facts(done)
    assert len(server.asked) > 460
    assert len(server.answered) == len(set(server.answered))
    assert (made["read"], made["unread"], made["failed"]) == (400, 0, 0)
    facts(rerank(endpoint(last_first), f"{words} --out calm.tsv"))
    assert (toy / OUT).read_bytes() == (toy / "calm.tsv").read_bytes()
    asked = len(server.asked)
    facts(rerank(server, f"{words} --force"))
    assert len(server.asked) == asked


NO_RETRIES = {"RETRIES = 6": "RETRIES = 0"}
FILTERED = {"raw": b'{"choices": [], "promptFeedback": "filtered sk-secret-0123456789"}'}
UPSTREAM = raw({"choices": [{"error": {"code": 502, "message": f"filtered {SECRET}"}}]})
REFUSALS = [{"status": status, "text": f"filtered {SECRET}"} for status in (400, 403, 413, 500)]


@pytest.mark.parametrize("refusal", [*REFUSALS, FILTERED, UPSTREAM, "I cannot."])
def test_one_prompt_that_is_never_answered_is_counted(toy, rerank, endpoint, refusal):
    """Before a refusal is stored, the server has to answer a harmless question."""

    def reply(prompt):
        return refusal if "Claim: Polar" in prompt else last_first(prompt)

    server = endpoint(reply)
    for _ in range(2):  # the second time, nothing is asked
        done = rerank(server, "--alpha 0 --force", edits=NO_RETRIES)
        made = facts(done)
        assert made["failed"] + made["unread"] == 1 and len(server.asked) == 4
    asked = [body for body in server.asked if body["messages"][0]["content"] == "Say yes."]
    assert len(asked) == made["failed"]
    assert SECRET not in (toy / REPLIES).read_text() + done.stderr
    assert re.search(r"'unread': 1|'failed': 1}.*filtered \*\*\*", done.stderr)
    found = orders(toy / OUT)
    for claim_id, abstract_ids in orders(toy / HYBRID).items():
        if claim_id != "c3":  # the one whose request failed
            abstract_ids.reverse()
        assert found[claim_id] == abstract_ids
    server.reply = last_first
    assert facts(rerank(server, "--alpha 0 --retry-errors"))["failed"] == 0


NOTHING = """{"message": {"content": null}, "finish_reason": "length"}|'failed': 3
    ; {"message": {"content": "I cannot rank [1] and [2]."}}|'unread': 3
    ; {"message": {"content": null, "reasoning_content": "The order is [2] > [1]."}}|'unread': 3
    ; {"message": {"content": null, "reasoning": "The order is [2] > [1]."}}|'unread': 3"""


@pytest.mark.parametrize("choice, said", cells(NOTHING))
def test_where_no_reply_says_anything_there_is_no_output(toy, rerank, endpoint, choice, said):
    server = endpoint(lambda prompt: raw({"choices": [json.loads(choice)]}))
    for _ in range(2):  # no second window is asked for, and nothing once more
        done = rerank(server, "--window 4")
        assert done.returncode == 2 and f"error: {REPLIES}: " in done.stderr and said in done.stderr
        assert len(server.asked) == (6 if "unread" in said else 3) and not (toy / OUT).exists()


def test_choices_vote_and_those_that_were_cut_are_told(toy, call, endpoint):
    body = completion("[3] > [2] > [1]", "[2] > [3]", "?")
    server = endpoint(lambda prompt: raw(body, headers={"Content-Type": "text/plain"}))
    words = f"--run {HYBRID} --base-url {server.url} --model toy --depth 3"
    words += ' --top-k 3 --alpha 0 --limit 2 --extra {"n":3}'
    done = call(SCRIPT, words, cwd=toy, env={"OPENAI_API_KEY": "1"})  # which is in ids
    assert facts(done)["read"] == 2 and "warning" not in done.stderr
    assert server.asked[0]["n"] == 3
    found = orders(toy / OUT)
    assert len(found) == 2
    for claim_id, (a, b, c) in found.items():  # mean ranks: 2, 1/2, 1/2, so ties keep their order
        assert orders(toy / HYBRID)[claim_id][:3] == [c, a, b]
    body["choices"][0]["finish_reason"] = "length"
    done = call(SCRIPT, f"{words} --replies new.jsonl", cwd=toy)
    assert facts(done)["read"] == 2 and "'failed': 2}" in done.stderr


@pytest.mark.parametrize("status", [401, 402, 404, 429, 502])
def test_an_outage_ends_the_run_and_what_came_is_kept(toy, rerank, endpoint, status):
    many(toy, 60)
    refusal = {"status": status, "text": f"away {SECRET}"}
    server = endpoint(lambda prompt: "[1]" if server.asked[20:] == [] else refusal)
    for address in (server, SimpleNamespace(url="http://127.0.0.1:9/v1")):  # nobody is there
        done = rerank(address, "--concurrency 4", edits=NO_RETRIES)
        assert done.returncode == 2 and f"error: {address.url}: " in done.stderr
        assert SECRET not in done.stderr + done.stdout and "run again" in done.stderr
        assert (toy / REPLIES).read_text().count("\n") == len(server.answered)
    assert len(server.asked) < 30 and not (toy / OUT).exists()
    server.reply = last_first
    assert facts(rerank(server))["failed"] == 0


def test_a_run_ends_if_its_first_requests_are_all_refused(toy, rerank, endpoint):
    many(toy, 99)
    server = endpoint(lambda prompt: "yes" if prompt == "Say yes." else REFUSALS[0])
    done = rerank(server)
    assert done.returncode == 2 and "32 requests, all refused" in done.stderr
    assert 64 <= len(server.asked) <= 96 and "--retry-errors" in done.stderr
    server.reply = last_first
    assert facts(rerank(server, "--retry-errors"))["failed"] == 0


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
    assert done.returncode == 2 and "No space left on device" in done.stderr
    assert 10 <= len(server.asked) <= 14 and not (toy / OUT).exists()
    facts(rerank(server))
    assert len(server.asked) == 60


# ---------------------------------------------------------------- Money
def test_a_call_that_times_out_is_not_repeated_and_left_to_the_next_run(toy, rerank, endpoint):
    slow = {"sleep": 1.5, "text": "[1]"}
    server = endpoint(lambda prompt: slow if "Claim: Polar" in prompt else last_first(prompt))
    for _ in range(2):
        asked = len(server.asked)
        done = rerank(server, "--timeout 0.5 --concurrency 1")
        last = done.stderr.splitlines()[-1]
        assert done.returncode == 2 and "Request timed out" in last and "--timeout" in last
        assert not (toy / OUT).exists()
    assert len(server.asked) == asked + 1
    assert facts(rerank(server, "--timeout 9"))["read"] == 3


@pytest.mark.parametrize("name", ["max_tokens", "temperature", "logprobs", "n"])
def test_a_parameter_that_a_model_refuses_ends_the_run(toy, rerank, endpoint, name):
    many(toy, 20)

    def reply(prompt):
        if server.asked[-1].get(name) is None:
            return "YES"
        return {"status": 400, "text": f"'{name}' is not supported with this model."}

    server = endpoint(reply)
    words = f'--concurrency 1 --method pointwise --depth 1 --extra {{"n":2,"{name}":'
    done = rerank(server, f"{words}2}}")
    assert done.returncode == 2 and f"'{name}' is not supported" in done.stderr.splitlines()[-1]
    assert len(server.asked) == 2 and (toy / REPLIES).read_bytes() == b""
    assert facts(rerank(server, f"{words}null}}"))["failed"] == 0


def test_replies_and_who_is_asked_for_them_make_an_output(toy, rerank, endpoint):
    server = endpoint(last_first)
    server.url = server.url.replace("//", "//user:pa55w0rd@")
    other = endpoint(lambda prompt: " > ".join(reversed(last_first(prompt).split(" > "))))
    facts(rerank(server, "--alpha 0"))
    first = orders(toy / OUT)
    assert facts(rerank(other, "--alpha 0"))["made"] and other.asked == []  # of the same replies
    facts(rerank(other, "--alpha 0 --replies new.jsonl"))  # asks another endpoint
    assert orders(toy / OUT) != first and len(other.asked) == 3
    assert facts(rerank(server, "--alpha 0"))["made"]  # the first replies are read anew
    assert orders(toy / OUT) == first and len(server.asked) == 3
    (toy / REPLIES).unlink()
    assert "up to date" in rerank(server, "--alpha 0").stdout
    everything = b"".join(path.read_bytes() for path in toy.rglob("*") if path.is_file())
    assert b"pa55w0rd" not in everything
    assert facts(rerank(other, "--alpha 0"))["made"] and len(other.asked) == 6


def test_a_second_process_is_told_that_another_one_asks(toy, refused):
    words = f"--run {HYBRID} --model toy --base-url http://127.0.0.1:9/v1"
    with (toy / REPLIES).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refused(toy, SCRIPT, words, said="llm.replies.jsonl: another process asks")


def test_a_file_of_replies_in_another_encoding_is_refused(toy, refused):
    (toy / REPLIES).write_text('{"custom_id": "a"}\n', encoding="utf-16")  # as PowerShell does
    refused(toy, SCRIPT, f"--run {HYBRID} --backend none", said="codec can't decode")


def test_a_request_is_answered_by_a_reply_to_its_own_body(toy, rerank, endpoint, refused):
    """What other programs write: ids are not made of bodies, and twice the same one is a slip."""
    requests = toy / "in.jsonl"
    server = endpoint(lambda prompt: REFUSALS[0] if prompt == "c" else prompt.upper())
    job = "ask in.jsonl --replies out.jsonl"

    def write(**prompts):
        lines = []
        for custom_id, prompt in prompts.items():
            body = {"messages": [{"role": "user", "content": prompt}]}
            lines.append({"custom_id": custom_id, "body": body})
        jsonl(requests, *lines)

    write(a="a", b="b", c="c")
    (toy / "out.jsonl").write_text('{"custom_id": "b", ')  # torn
    done = rerank(server, job=job)
    assert facts(done)["failed"] == 1 and "1 refused, cut, or to another body" in done.stderr
    replies = KIT.read_replies(toy / "out.jsonl")
    found = [replies[custom_id].choices for custom_id in "abc"]
    assert found == [[("A", None)], [("B", None)], []]
    asked = len(server.asked)
    write(a="a", b="edited")
    done = rerank(server, job=job)
    assert facts(done)["failed"] == 1 and len(server.asked) == asked
    write(c="c")
    assert rerank(server, job=job).returncode == 2
    ask = (SCRIPT, "ask in.jsonl --model toy --replies")
    refused(toy, *ask, "./in.jsonl", said="in.jsonl: replies would be added")
    requests.write_text(requests.read_text() * 2)
    refused(toy, *ask, "new.jsonl", said="in.jsonl:2: it needs a custom_id that no other line has")


# ---------------------------------------------------------------- Odd replies
TOKEN = '{"token": "YES", "logprob": -0.1, "top_logprobs": [{"token": "YES", "logprob": -1}]}'
LINE = """{"custom_id": "a", "response": {"body": {"choices": [{"error": null,
    "finish_reason": "stop", "message": {"content": "YES"}, "logprobs": {"content": [%s]}}]}}}"""
VALUES = r'("\w*"|-[\d.]+|null)'
OBJECTS = r"(\{[^{}]*\}|\[[^][]*\])"
ODD = [
    "null",
    "true",
    "7",
    "NaN",
    "1e999",
    '""',
    '"YES"',
    '"\\ud800"',
    "[]",
    "[7]",
    '{"x": []}',
    "{",
]
ODD += ["7" * 5000, "[" * 9999]


@pytest.mark.parametrize("part", [VALUES, OBJECTS])
def test_no_json_in_any_place_of_a_reply_is_a_traceback(tmp_path, part):
    pieces = re.split(part, LINE.replace("\n", "") % TOKEN)
    for place, odd in itertools.product(range(1, len(pieces), 2), ODD):
        line = "".join([*pieces[:place], odd, *pieces[place + 1 :]])
        (tmp_path / "replies").write_text(line)
        for reply in KIT.read_replies(tmp_path / "replies").values():
            votes = [READERS["yes"](text) for text, _ in reply.choices]
            reply = reply._replace(answers=[vote for vote in votes if vote])
            found = KIT.label_probabilities(reply, ("YES", "NO"))
            assert found is None or sum(found.values()) == pytest.approx(1)


# ---------------------------------------------------------------- Who answers, local models
WHO = """|key|transformers; --model gpt-4.1|key|openai; --model tests|key|transformers
    ; --model owner/name||transformers; --model tests --base-url http://127.0.0.1:9/v1||openai"""


@pytest.mark.parametrize("words, key, backend", cells(WHO))  # tests is a folder
def test_a_paid_endpoint_is_asked_for_a_named_model_only(monkeypatch, words, key, backend):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OPENAI_API_KEY", key)
    monkeypatch.setattr("sys.argv", [SCRIPT, *words.split()])
    args = KIT.command_line({KIT.rerank: KIT.add_rerank})
    KIT.with_files(args)
    assert (args.backend, args.model) == (backend, words.split()[1] if words else SMOLLM2)


def test_a_local_model_judges_by_its_first_logits_and_is_not_asked_twice(toy, call):
    tiny_llm(toy / "llm")
    words = f"--run {HYBRID} --model llm --batch-size 4 --alpha 0"
    pointwise = f"{words} --depth 3 --method pointwise"
    assert facts(call(SCRIPT, pointwise, cwd=toy))["unread"] == 0
    whole = (toy / OUT).read_bytes()
    lines = (toy / REPLIES).read_bytes()
    for reply in KIT.read_replies(toy / REPLIES).values():
        ((label, logprobs),) = reply.choices
        (token,) = logprobs["content"]
        found = {entry["token"]: entry["logprob"] for entry in token["top_logprobs"]}
        assert set(found) == {"YES", "NO"} and label == max(found, key=found.get)
    facts(call(SCRIPT, f"{pointwise} --force", cwd=toy))
    assert ((toy / OUT).read_bytes(), (toy / REPLIES).read_bytes()) == (whole, lines)
    done = call(SCRIPT, f"{words} --depth 2 --method listwise", cwd=toy)
    assert done.returncode == 2 and "'failed': 3" in done.stderr
    weights = load_file(toy / "llm/model.safetensors")
    weights["model.norm.weight"] *= math.nan  # as half precision may make
    save_file(weights, toy / "llm/model.safetensors", {"format": "pt"})
    done = call(SCRIPT, f"{pointwise} --out nan.tsv", cwd=toy)
    assert done.returncode == 2 and "logits are not finite" in done.stderr


def test_a_local_reply_that_ended_is_not_cut(tmp_path):
    folder = tiny_llm(tmp_path / "llm")
    _, model = KIT.load_local(folder)
    model.generation_config.eos_token_id = [*range(260)]
    body = {"model": folder, "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    assert KIT.generate([body])[0]["finish_reason"] == "stop"
