"""recipes/rewrite.py: replies of all shapes, the way through 04 ask, and on through 02."""
import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT, facts, load, read, records, tsv

KIT = load("recipes/rewrite.py")
AT, SCRIPT = "work/demo/test/", "recipes/rewrite.py"
HEADER = ["claim_id", "claim", "language"]
TEXTS = ["Polar bears are starving!! #ice", "It's the sun, stupid", 'sea level "is NOT" rising']
CLAIMS = [(f"c{n}", text, "en") for n, text in enumerate([*TEXTS, TEXTS[1]], 1)]

def start(folder, script, *words):
    command = [sys.executable, ROOT / script, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)

@pytest.fixture
def folder(toy):
    tsv(toy / "data/demo/claims.test.tsv", HEADER, CLAIMS)
    return toy

@pytest.fixture
def rewrite(program, folder):
    return lambda *words: program("rewrite", "--model", "toy", *words, cwd=folder)

def claim_in(prompt):
    return re.search("<claim>(.*)</claim>", prompt)[1]

def answer(folder, says, view="statement"):
    """Append a reply for each request that waits; says: {claim: text}, None: it failed."""
    requests = records(folder / AT / f"claims.{view}.requests.jsonl")
    with open(folder / AT / f"claims.{view}.replies.jsonl", "a") as file:
        for request in requests:
            text = says[claim_in(request["body"]["messages"][0]["content"])]
            body = {"choices": [{"message": {"content": text}}]} if text else {"error": "no"}
            line = {"custom_id": request["custom_id"], "response": {"body": body}}
            file.write(json.dumps(line) + "\n")
    return len(requests)

@pytest.mark.parametrize(("reply", "text"), [
    ("<text>Ice melts.</text>", "Ice melts."), ("<TEXT>\nIce\tmelts.\n</TEXT> Ok?", "Ice melts."),
    ("<text>Ice melts.</text>\n<text>Seas rise.</text>", "Ice melts. Seas rise."),
    ("<text>A claim in <claim>tags</claim></text>", "A claim in tags"),
    ("<text>\ud800Ice\x00\u2028melts.\x1b</text>", "Ice melts."),
    ("Ice melts.", None), ("<text>Ice mel", None), ("<text> ... </text>", None), ("", None)])
def test_what_stands_between_tags_is_the_new_text(reply, text):
    assert KIT.text_of_reply(reply) == text

@pytest.mark.parametrize("view", KIT.VIEWS)
def test_prompts_hold_the_claim_as_data(view):
    args = KIT.SimpleNamespace(view=view, model="toy", temperature=0, seed=1, max_tokens=0,
                               structured=False, backend="none", extra={}, identity={})
    body = next(KIT.rewritten("Ice </claim>\nmelts <text>", args))["body"]
    prompt = body["messages"][0]["content"]
    assert "<claim>Ice melts</claim>" in prompt and body["max_tokens"] == KIT.LIMIT
    assert prompt.count("<text>") == 1 and KIT.VIEWS[view].split(",")[0] in prompt

def test_claims_without_a_usable_reply_stand_as_they_are(folder, rewrite):
    words = ("--view", "statement")
    done = rewrite(*words)
    assert done.returncode == 3 and not (folder / AT / "claims.statement.tsv").exists()
    ask = f"ask {AT}claims.statement.requests.jsonl --replies {AT}claims.statement.replies.jsonl"
    assert f"python 04_llm_rerank.py {ask}\n" in done.stdout
    says = dict(zip(TEXTS, ['<text>Ursus maritimus\n\tloses "mass".</text>', "no tag", None]))
    assert answer(folder, says) == 3  # the same claim is asked once
    done = rewrite(*words)
    assert done.returncode == 3 and answer(folder, says) == 1  # "no tag" is asked again
    done = rewrite(*words)
    made = facts(done)
    assert [made[name] for name in ("claims", "useless", "failed", "unchanged")] == [4, 2, 1, 3]
    assert "2 useless and 1 failed replies to 4 claims, which stand as they are" in done.stderr
    table = read(folder / AT / "claims.statement.tsv")
    assert table.to_numpy().tolist() == [
        ["c1", 'Ursus maritimus loses "mass".', "en"], *map(list, CLAIMS[1:])]
    lines = (folder / AT / "claims.statement.tsv").read_text().split("\n")
    assert len(lines) == 6 and all(line.count("\t") == 2 for line in lines[:5])
    assert "up to date" in rewrite(*words).stdout
    assert rewrite(*words, "--retry-errors").returncode == 3
    assert rewrite("--view", "passage").returncode == 3  # another file, other requests

def test_replies_that_come_later_make_the_claims_anew(folder, rewrite):
    assert rewrite().returncode == 3
    answer(folder, dict.fromkeys(TEXTS, "<text>One.</text>"))
    assert facts(rewrite())["made"] and "up to date" in rewrite().stdout
    path = folder / AT / "claims.statement.replies.jsonl"
    path.write_text(path.read_text() + path.read_text().replace("One.", "Two."))
    assert facts(rewrite())["made"]
    assert set(read(folder / AT / "claims.statement.tsv")["claim"]) == {"Two."}

def test_what_failed_is_asked_again_by_the_command_that_is_printed(folder, rewrite, endpoint):
    assert rewrite().returncode == 3
    answer(folder, dict.fromkeys(TEXTS, "<text>One.</text>") | {TEXTS[0]: None})
    facts(rewrite())
    done = rewrite("--retry-errors")
    command, = re.findall(r"python 04_llm_rerank.py (ask .*)", done.stdout)
    server = endpoint(lambda prompt: "<text>Two.</text>")
    facts(start(folder, "04_llm_rerank.py", *command.split(), "--base-url", server.url))
    assert len(server.asked) == 1
    assert facts(rewrite())["failed"] == 0
    assert read(folder / AT / "claims.statement.tsv")["claim"][0] == "Two."

def test_files_inside_the_data_folder_are_known_again(rewrite):
    words = ("--out", "data/demo/new.tsv")
    for waiting in (3, 3):
        done = rewrite(*words)
        assert done.returncode == 3, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["waiting"] == waiting
    done = rewrite(*words, "--requests", "data/demo/corpus.jsonl")
    assert done.returncode == 2 and "did not make it" in done.stderr

def test_where_all_requests_fail_there_are_no_claims(folder, rewrite):
    assert rewrite().returncode == 3
    answer(folder, dict.fromkeys(TEXTS))
    done = rewrite()
    assert done.returncode == 2 and "all 3 requests failed" in done.stderr
    assert not (folder / AT / "claims.statement.tsv").exists()

def test_the_new_claims_are_one_more_run_that_is_fused(folder, endpoint):
    server = endpoint(lambda prompt: f"<text>{claim_in(prompt)} glaciers of the Alps</text>")
    assert start(folder, SCRIPT, "--model", "toy").returncode == 3
    at = f"{AT}claims.statement"
    facts(start(folder, "04_llm_rerank.py", "ask", f"{at}.requests.jsonl", "--base-url", server.url,
                "--replies", f"{at}.replies.jsonl"))
    assert {one["model"] for one in server.asked} == {"toy"} and len(server.asked) == 3
    assert facts(start(folder, SCRIPT, "--model", "toy"))["unchanged"] == 0
    for words in (("01_index.py", "--indexes", "bm25"), ("02_retrieve.py", "--retrievers", "bm25"),
                  ("02_retrieve.py", "--retrievers", "bm25", "--claims", f"{at}.tsv",
                   "--out", f"{AT}statement")):
        facts(start(folder, *words))
    runs = [f"{AT}bm25.tsv", f"{AT}statement/bm25.tsv"]
    facts(start(folder, "02_retrieve.py", "fuse", *runs))
    found = [set(read(folder / run)["abstract_id"]) for run in (*runs, f"{AT}fused.tsv")]
    assert found[1] - found[0] and found[2] == found[0] | found[1]
    assert set(read(folder / f"{AT}fused.tsv")["claim_id"]) == {"c1", "c2", "c3", "c4"}
