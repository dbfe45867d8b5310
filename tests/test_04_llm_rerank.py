"""04_llm_rerank.py: replies are read or asked again, fused by hand, and never lost."""

import fcntl
import itertools
import json
import math
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
    cases,
    cells,
    facts,
    jsonl,
    kill_before,
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
LISTWISE = KIT.PROMPTS["listwise"]


def settings(**other):
    """What prompts ask of the arguments."""
    defaults = {"structured": False, "method": "listwise", "best": 0, "max_words": 0}
    return SimpleNamespace(**defaults | other)


def raw(*choices):
    """What an endpoint gives: a completion with these choices."""
    return {"raw": json.dumps({"choices": choices}).encode()}


def saying(text):
    return {"message": {"content": text}}


# ---------------------------------------------------------------- Replies
YES_NO = ("YES", "NO")
READERS = {
    "order": (KIT.order_in, 3),
    "best": (KIT.order_in, 4),
    "yes": (KIT.label_in, YES_NO),
    "label": (KIT.label_in, LABELS),
    "evidence": (KIT.label_in, ("EVIDENCE", "UNKNOWN")),
}


@pytest.mark.parametrize(
    "what, reply, wanted", [row for row in cases("replies.tsv") if row[0] in READERS]
)
def test_what_a_reply_says_is_read_or_it_is_asked_again(what, reply, wanted):
    """none: nothing that is said plainly; the prompt is asked once more."""
    body = {"choices": [saying(reply.replace("\\n", "\n"))]}
    ((text, _),) = KIT.reply_of({"response": {"body": body}}).choices
    reader, known = READERS[what]
    found = reader(text, known)
    if isinstance(found, list):
        found = " ".join(str(index + 1) for index in found)
    assert str(found or "none") == wanted


@pytest.mark.parametrize("label, tokens, is_cut, wanted", cases("probabilities.tsv"))
def test_probabilities_are_those_of_the_first_token_that_begins_a_label(
    label, tokens, is_cut, wanted
):
    """tokens: {candidate: probability} each, null: a logprob of -inf, as structured output has.

    The text decides against the tokens; where another choice was cut, shares of the votes do: 1/2,
    and a third of 1/2 for each label. The last row: 0.3 + 0.1 against 0.1.
    """
    content = []
    for candidates in json.loads(tokens):
        top = []
        for token, probability in candidates.items():
            top.append({"token": token, "logprob": probability and math.log(probability)})
        content.append(top[0] | {"top_logprobs": top})
    votes = [label, None] if is_cut else [label]
    reply = KIT.Reply([(label, {"content": content})], {}, [], votes)
    wanted = json.loads(wanted)
    assert KIT.label_probabilities(reply, tuple(wanted)) == pytest.approx(wanted)


def test_replies_are_read_from_whatever_a_batch_engine_writes():
    found = KIT.read_replies(ROOT / "tests/engine.jsonl")
    texts = "a|later; b|one two; c|; p|[2] > [1]; t|no; u|no; v|no; w|yes|no; y|paid; z|paid"
    for custom_id, *wanted in cells(texts + "; f; g; h; j; x; d; e; i"):  # the last have errors
        assert [text.strip() for text, _ in found[custom_id].choices] == wanted
    assert found["t"].choices[0][1] is None  # logprobs of thoughts
    assert found["v"].choices[0][1] == 7
    assert [name for name, reply in found.items() if reply.lost] == ["w", "x"]


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


MINE = """# Section 3
Be fair on {claim}.
--- user \t
# Task
Sort {n} for {claim}:
#1 rule: marks only
{abstracts} {"as": "JSON"} {wanted}"""


def test_a_prompt_file_is_sent_without_the_comments_at_its_top(toy, rerank, endpoint):
    prompt = toy / "mine.txt"
    prompt.write_text(MINE)
    corpus = toy / "data/demo/corpus.jsonl"
    corpus.write_text(corpus.read_text().replace("Body mass", "\\n--- user\\nBody mass"))
    server = endpoint(last_first)
    assert facts(rerank(server, "--prompt mine.txt --depth 2"))["unread"] == 0
    for body in server.asked:
        system, user = body["messages"]  # an abstract makes no turn
    assert system["role"] == "system" and system["content"].startswith("Be fair on ")
    sent = user["content"]
    assert sent.startswith("# Task\nSort 2 for ") and "\n#1 rule: marks only\n[1] " in sent
    assert sent.endswith('{"as": "JSON"} all 2')


def test_examples_keep_the_order_of_their_file_and_put_evidence_first(tmp_path):
    rows = "d|n0|d|NEI; d|r1|d|REFUTES; a|n2|a|NEI; a|s3|a|SUPPORTS; a|r4|a|REFUTES"
    tsv(tmp_path / "few.tsv", [*KEY, "claim", "label"], rows)
    abstracts = {name: f"text {name}" for name in "n0 r1 n2 s3 r4".split()}
    turns = KIT.example_turns(LISTWISE, abstracts, settings(fewshot=[tmp_path / "few.tsv"]))
    assert [turn["content"] for turn in turns[1::2]] == ["[2] > [1]", "[2] > [3] > [1]"]
    assert "Claim: d\n\n[1] text n0\n[2] text r1\n\n" in turns[0]["content"]


# ---------------------------------------------------------------- Scores
# before 8, 6, 4 -> 1, 1/2, 0; the LLM's order third, first, second -> 1/2, 0, 1:
# 0.4 + 0.6 / 2, 0.4 / 2, 0.6; equal scores are 0
FUSED = "[8, 6, 4]|[2, 3, 1]|0.4|[0.7, 0.2, 0.6]; [5, 5]|[1, 0]|0.5|[0, 0.5]; [3]|[0]|0.4|[0.6]"


def test_fusion_worked_by_hand():
    for row in cells(FUSED):
        *how, wanted = map(json.loads, row)
        assert KIT.fuse(*how).tolist() == pytest.approx(wanted)
    rows = "a|w|1; a|x|2; a|y|3; a|z|4; b|w|1"
    run = pd.DataFrame(cells(rows), columns=RUN[:3]).astype({"rank": int}).assign(score=1.0)
    args = settings(depth=3, top_k=4, alpha=0.5)  # keys: lower is better, ties stay; z is not seen
    done = KIT.fuse_run(run, run[run["rank"] <= 3], [-0.2, -0.9, -0.2, -0.1], args)
    fused = "a|x|1|0.5; a|w|2|0.25; a|y|3|0.0; a|z|4|-1.0; b|w|1|0.5; "
    assert done.to_csv(header=False, index=False, sep="|", lineterminator="; ") == fused


# ---------------------------------------------------------------- Endpoints
def last_first(prompt):
    numbers = range(len(re.findall(r"^\[", prompt, re.MULTILINE)), 0, -1)
    return " > ".join(f"[{number}]" for number in numbers)


@pytest.fixture
def rerank(toy, call):
    """rerank(server, "--depth 3"): the script with the key, asking the server."""

    def ask(server, words="", job=f"--run {HYBRID}", **how):
        words = f"{job} --base-url {server.url} --model toy {words}"
        return call(SCRIPT, words, cwd=toy, env={"OPENAI_API_KEY": SECRET + "\r\n"}, **how)

    return ask


def orders(path):
    """{claim_id: abstract_ids in their order}."""
    return read(path).groupby("claim_id")["abstract_id"].agg(list).to_dict()


def many(toy, number):
    """Write number claims, each with the toy's twelve abstracts."""
    claims = [(f"m{n}", f"claim number {n} of many") for n in range(number)]
    tsv(toy / "data/demo/claims.test.tsv", CLAIMS, claims)
    pairs = itertools.product(range(number), range(1, 13))
    tsv(toy / HYBRID, RUN, [(f"m{n}", f"{rank:04}", rank, 1 / rank) for n, rank in pairs])


def test_windows_reach_the_top_nothing_is_paid_twice_and_no_key_is_kept(
    toy, rerank, endpoint, contents
):
    server = endpoint(last_first)
    for alpha in (0, 1):  # another --alpha costs nothing
        words = f"--depth 6 --window 4 --alpha {alpha} --out {alpha}.tsv --replies replies.jsonl"
        done = rerank(server, words)
        assert facts(done)["unread"] == 0 and len(server.asked) == 6
    for claim_id, (a, b, c, d, e, f) in orders(toy / HYBRID).items():
        # a b c d e f: the window c d e f is reversed (a b f e d c), then the window a b f e
        assert orders(toy / "0.tsv")[claim_id] == [e, f, b, a, d, c]
        assert orders(toy / "1.tsv")[claim_id] == [a, b, c, d, e, f]
    assert {request["key"] for request in server.asked} == {f"Bearer {SECRET}"}
    assert SECRET not in str(contents(toy)) + done.stdout + done.stderr


FAULTS = """{"status": 429, "headers": {"Retry-After": "0.2"}}|; {"drop": true}|
    ; {"status": 408}|oops; {"status": 409}|oops; {"status": 500}|oops; {"status": 502}|oops
    ; {"status": 503}|oops; {"status": 504}|oops; {"status": 529}|oops; {"status": 503}|
    ; {}|; {}|{"choices": [{"mess; {}|<html>busy</html>; {}|{"choices": []}
    ; {}|{"choices": null, "error": {"message": "overloaded", "code": 502}}"""
MALFORMED = ["", "x" * 1_000_000, {"text": [{"type": "thinking", "thinking": "[1] > [2]"}]}]


def test_200_prompts_through_faults_give_the_same_as_without(toy, rerank, endpoint):
    many(toy, 200)
    rng = random.Random(7)
    faults = itertools.cycle(cells(FAULTS))  # what a server may do, by turns
    malformed = itertools.cycle(MALFORMED)

    def moody(prompt):
        if rng.random() < 0.2:
            answer, body = next(faults)
            return json.loads(answer) | {"raw": body.encode()}
        if rng.random() < 0.05 and "could not be read" not in prompt:
            return next(malformed)
        return last_first(prompt)

    words = "--window 8 --depth 12 --alpha 0"
    server = endpoint(moody)
    made = facts(rerank(server, words))
    assert len(server.asked) > 460
    assert len(server.answered) == len(set(server.answered))
    assert (made["read"], made["unread"], made["failed"]) == (400, 0, 0)
    facts(rerank(endpoint(last_first), f"{words} --out calm.tsv"))
    assert (toy / OUT).read_bytes() == (toy / "calm.tsv").read_bytes()


NO_RETRIES = {"RETRIES = 6": "RETRIES = 0"}
FILTERED = {"raw": b'{"choices": [], "promptFeedback": "filtered sk-secret-0123456789"}'}
UPSTREAM = raw({"error": {"code": 502, "message": f"filtered {SECRET}"}})
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
    assert str(server.asked).count("'Say yes.'") == made["failed"]
    assert SECRET not in (toy / REPLIES).read_text() + done.stderr
    assert re.search(r"'unread': 1|'failed': 1}.*filtered \*\*\*", done.stderr)
    wanted = orders(toy / HYBRID)
    wanted["c4"].reverse()
    wanted["c5"].reverse()
    assert orders(toy / OUT) == wanted  # c3 keeps its order


NOTHING = """{"message": {"content": null}, "finish_reason": "length"}|'failed': 3
    ; {"message": {"content": "I cannot rank [1] and [2]."}}|'unread': 3
    ; {"message": {"content": null, "reasoning_content": "The order is [2] > [1]."}}|'unread': 3
    ; {"message": {"content": null, "reasoning": "The order is [2] > [1]."}}|'unread': 3"""


@pytest.mark.parametrize("choice, said", cells(NOTHING))
def test_where_no_reply_says_anything_there_is_no_output(toy, rerank, endpoint, choice, said):
    server = endpoint(lambda prompt: raw(json.loads(choice)))
    for _ in range(2):  # no second window is asked for, and nothing once more
        done = rerank(server, "--window 4")
        assert done.returncode == 2 and f"error: {REPLIES}: " in done.stderr and said in done.stderr
        assert len(server.asked) == (6 if "unread" in said else 3) and not (toy / OUT).exists()


def test_choices_vote_and_those_that_were_cut_are_told(toy, call, endpoint):
    choices = [saying("[3] > [2] > [1]"), saying("[2] > [3]"), saying("?")]
    server = endpoint(lambda prompt: raw(*choices))
    words = f"--run {HYBRID} --base-url {server.url} --model toy --depth 3"
    words += ' --top-k 3 --alpha 0 --limit 2 --structured --extra {"n":3}'
    done = call(SCRIPT, words, cwd=toy, env={"OPENAI_API_KEY": "1"})  # which is in ids
    made = facts(done)
    assert (made["read"], made["unread"]) == (2, 2) and "'unread': 2" in done.stderr
    assert (
        "prompts_cut" not in made
        and "'n': 3" in str(server.asked[0])
        and "'required': ['order']" in str(server.asked[0])
    )
    found = orders(toy / OUT)
    assert len(found) == 2
    for claim_id, (a, b, c) in found.items():  # ranks: 2 2 0, 1 0 1, 0 1 2; ? keeps the old order
        assert orders(toy / HYBRID)[claim_id][:3] == [c, a, b]
    assert KIT.mean_order([[2, 1, 0], [1, 2]], 3).tolist() == [1, 2, 0]  # ties keep their order
    choices[0]["finish_reason"] = "length"
    done = call(SCRIPT, f"{words} --replies new.jsonl", cwd=toy)
    assert facts(done)["read"] == 2 and "'failed': 2}" in done.stderr


USAGE = '64|3; 0|None; null|None; "7"|None'


@pytest.mark.parametrize("tokens, cut", cells(USAGE))
def test_a_prompt_that_a_server_has_cut_is_told(toy, rerank, endpoint, tokens, cut):
    """Of 150 words and more; 0 and no number: it does not count."""
    usage = {"prompt_tokens": json.loads(tokens)}
    body = {"choices": [saying("[2] > [1]")], "usage": usage}
    server = endpoint(lambda prompt: {"raw": json.dumps(body).encode()})
    for _ in range(2):  # the second time, of the replies on disk
        done = rerank(server, "--force")
        assert str(facts(done).get("prompts_cut")) == cut and len(server.asked) == 3
        assert ("OLLAMA_CONTEXT_LENGTH" in done.stderr) == (cut == "3")


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
    facts(rerank(server))


def test_a_run_ends_if_its_first_requests_are_all_refused(toy, rerank, endpoint):
    many(toy, 99)
    server = endpoint(lambda prompt: "yes" if prompt == "Say yes." else REFUSALS[0])
    done = rerank(server)
    assert done.returncode == 2 and "32 requests, all refused" in done.stderr
    assert 64 <= len(server.asked) <= 96
    server.reply = last_first
    assert facts(rerank(server, "--retry-errors"))["failed"] == 0


def test_a_full_disk_ends_all_calls_and_what_was_written_counts(toy, rerank, endpoint):
    many(toy, 60)
    server = endpoint(last_first)
    full = kill_before("os.fsync(file.fileno())", 11, by="open('/dev/full', 'wb', 0).write(b'x')")
    done = rerank(server, "--concurrency 4", edits=full)
    assert done.returncode == 2 and "No space left on device" in done.stderr
    assert 10 <= len(server.asked) <= 14 and not (toy / OUT).exists()
    facts(rerank(server))
    assert len(server.asked) == 60


# ---------------------------------------------------------------- Money
def test_a_call_that_times_out_is_not_repeated_and_left_to_the_next_run(toy, rerank, endpoint):
    slow = {"sleep": 1.5, "text": "[1]"}
    server = endpoint(lambda prompt: slow if "Claim: Polar" in prompt else last_first(prompt))
    for asked in (1, 2):
        done = rerank(server, "--timeout 0.5 --concurrency 1")
        assert done.returncode == 2 and re.search("Request timed out.*--timeout", done.stderr)
        assert len(server.asked) == asked and not (toy / OUT).exists()
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
    assert done.returncode == 2 and f"'{name}' is not supported" in done.stderr
    assert len(server.asked) == 2 and (toy / REPLIES).read_bytes() == b""
    assert facts(rerank(server, f"{words}null}}"))["failed"] == 0


def test_replies_and_who_is_asked_for_them_make_an_output(toy, rerank, endpoint, contents):
    server = endpoint(last_first)
    server.url = server.url.replace("//", "//user:pa55w0rd@")
    other = endpoint(lambda prompt: "[1]")
    facts(rerank(server, "--alpha 0"))
    first = orders(toy / OUT)
    assert "up to date" in rerank(other, "--alpha 0").stdout  # of the same replies
    facts(rerank(other, "--alpha 0 --replies new.jsonl"))  # asks another endpoint
    assert orders(toy / OUT) != first and len(other.asked) == 3
    assert facts(rerank(server, "--alpha 0"))["made"]  # the first replies are read anew
    assert orders(toy / OUT) == first and len(server.asked) == 3
    (toy / REPLIES).unlink()
    assert "up to date" in rerank(server, "--alpha 0").stdout
    assert "pa55w0rd" not in str(contents(toy))


def test_replies_that_another_process_adds_or_in_another_encoding_are_refused(toy, refused):
    job = (SCRIPT, f"--run {HYBRID} --model toy --base-url http://127.0.0.1:9/v1")
    with (toy / REPLIES).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refused(toy, *job, said="llm.replies.jsonl: another process asks")
    (toy / REPLIES).write_text("{}", encoding="utf-16")  # as PowerShell does
    refused(toy, *job, said="codec can't decode")


def test_a_request_is_answered_by_a_reply_to_its_own_body(toy, rerank, endpoint):
    """What other programs write: ids are not made of bodies."""
    server = endpoint(lambda prompt: REFUSALS[0] if prompt == "c" else prompt.upper())

    def ask(**prompts):
        lines = []
        for custom_id, prompt in prompts.items():
            body = {"messages": [{"role": "user", "content": prompt}]}
            lines.append({"custom_id": custom_id, "body": body})
        jsonl(toy / "in.jsonl", *lines)
        return rerank(server, job="ask in.jsonl --replies out.jsonl")

    (toy / "out.jsonl").write_text('{"custom_id": "b", ')  # torn
    done = ask(a="a", b="b", c="c")
    assert facts(done)["failed"] == 1 and "to another body" in done.stderr
    replies = KIT.read_replies(toy / "out.jsonl")
    choices = [replies[custom_id].choices for custom_id in "abc"]
    assert choices == [[("A", None)], [("B", None)], []]
    asked = len(server.asked)
    assert facts(ask(a="a", b="edited"))["failed"] == 1 and len(server.asked) == asked
    assert ask(c="c").returncode == 2


# ---------------------------------------------------------------- Odd replies
TOKEN = '{"token": "YES", "logprob": -0.1, "top_logprobs": [{"token": "YES", "logprob": -1}]}'
LINE = """{"custom_id": "a", "response": {"body": {"choices": [{"error": null,
    "finish_reason": "stop", "message": {"content": "YES"}, "logprobs": {"content": [%s]}}]}}}"""
VALUES = r'("\w*"|-[\d.]+|null)'
OBJECTS = r"(\{[^{}]*\}|\[[^][]*\])"
ODD = r'null true 7 NaN 1e999 "" "YES" "\ud800" [] [7] {"x":[]} {'.split()
ODD += ["7" * 5000, "[" * 9999]


@pytest.mark.parametrize("part", [VALUES, OBJECTS])
def test_no_json_in_any_place_of_a_reply_is_a_traceback(tmp_path, part):
    pieces = re.split(part, LINE.replace("\n", "") % TOKEN)
    for place, odd in itertools.product(range(1, len(pieces), 2), ODD):
        line = "".join([*pieces[:place], odd, *pieces[place + 1 :]])
        (tmp_path / "replies").write_text(line)
        for reply in KIT.read_replies(tmp_path / "replies").values():
            votes = [KIT.label_in(text, YES_NO) for text, _ in reply.choices]
            reply = reply._replace(answers=[vote for vote in votes if vote])
            found = KIT.label_probabilities(reply, YES_NO)
            assert found is None or sum(found.values()) == pytest.approx(1)


# ---------------------------------------------------------------- Who answers, local models
WHO = """|key|transformers|data/models/smollm2; --model gpt-4.1|key|openai|gpt-4.1
    ; --model tests|key|transformers|tests; --model owner/name||transformers|owner/name
    ; --model tests --base-url http://127.0.0.1:9/v1||openai|tests"""


@pytest.mark.parametrize("words, key, backend, model", cells(WHO))  # tests is a folder
def test_a_paid_endpoint_is_asked_for_a_named_model_only(monkeypatch, words, key, backend, model):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OPENAI_API_KEY", key)
    monkeypatch.setattr("sys.argv", [SCRIPT, *words.split()])
    args = KIT.command_line({KIT.rerank: KIT.add_rerank})
    KIT.with_files(args)
    assert (args.backend, args.model) == (backend, model)


def test_a_local_model_is_not_asked_twice_and_has_finite_logits(toy, call):
    tiny_llm(toy / "llm")
    pointwise = f"--run {HYBRID} --model llm --batch-size 4 --depth 3 --method pointwise"
    assert facts(call(SCRIPT, pointwise, cwd=toy))["unread"] == 0
    lines = (toy / REPLIES).read_bytes()
    facts(call(SCRIPT, f"{pointwise} --force", cwd=toy))
    assert (toy / REPLIES).read_bytes() == lines
    weights = load_file(toy / "llm/model.safetensors")
    weights["model.norm.weight"] *= math.nan  # as half precision may make
    save_file(weights, toy / "llm/model.safetensors", {"format": "pt"})
    done = call(SCRIPT, f"{pointwise} --out nan.tsv", cwd=toy)
    assert done.returncode == 2 and "logits are not finite" in done.stderr


def test_a_local_reply_that_ended_is_not_cut(tmp_path):
    body = {"model": tiny_llm(tmp_path), "messages": [{"role": "user", "content": "a"}]}
    _, model = KIT.load_local(body["model"])
    model.generation_config.eos_token_id = [*range(260)]
    body["max_tokens"] = 3
    assert KIT.generate([body])[0]["finish_reason"] == "stop"
