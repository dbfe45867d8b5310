"""recipes/rewrite.py: what a reply becomes, and the way through 04 ask and on through 02."""

import re

import pytest
from conftest import CLAIMS, facts, read, tsv

AT = "work/demo/test/claims.statement"
TEXTS = ["Polar bears are starving!! #ice", "It's the sun, stupid", 'sea level "is NOT" rising']
ROWS = [(f"c{n}", text, "en") for n, text in enumerate([*TEXTS, TEXTS[1]], 1)]


@pytest.fixture
def rewrite(program, toy):
    """rewrite("..."): the program on four claims, two of them the same."""
    tsv(toy / "data/demo/claims.test.tsv", [*CLAIMS, "language"], ROWS)
    return lambda words="": program("rewrite", f"--model toy {words}", cwd=toy)


def claim_in(prompt):
    return re.search("<claim>(.*)</claim>", prompt)[1]


def test_the_clean_view_asks_no_model(toy, program, monkeypatch):
    monkeypatch.setenv("LLM_BASE_URL", "http://none/v1")  # that of another view
    tsv(
        toy / "in.tsv", CLAIMS, [("a", "Ice &amp; snow @me"), ("b", "https://t.co/x"), ("c", "Sun")]
    )
    made = facts(program("rewrite", "--view clean --claims in.tsv", cwd=toy))
    assert made == {"made": ["work/demo/test/claims.clean.tsv"], "claims": 3, "unchanged": 2}
    claims = read(toy / made["made"][0])["claim"].tolist()
    assert claims == ["Ice & snow", "https://t.co/x", "Sun"]  # of b, nothing would be left


PROMPT = '# a note\nBe brief.\n--- user\nPut {"x"} in tags: <claim>{claim}</claim>\n'


def test_ones_own_prompt_is_asked_and_its_text_appended(toy, rewrite, endpoint):
    (toy / "mine.txt").write_text(PROMPT)
    server = endpoint(lambda prompt: "<text>warming</text>")
    words = f"--prompt mine.txt --append --base-url {server.url}"
    assert facts(rewrite(words))["made"] == ["work/demo/test/claims.mine.tsv"]
    system, _ = server.asked[0]["messages"]
    assert system == {"role": "system", "content": "Be brief."}
    asked = {body["messages"][1]["content"] for body in server.asked}
    assert asked == {f'Put {{"x"}} in tags: <claim>{text}</claim>' for text in TEXTS}
    claims = read(toy / "work/demo/test/claims.mine.tsv")["claim"].tolist()
    assert claims == [f"{claim} warming" for _, claim, _ in ROWS]
    facts(rewrite(f"{words} --append => --out labelled.tsv"))
    assert read(toy / "labelled.tsv")["claim"][0] == f"{TEXTS[0]} =>warming"


def test_claims_without_a_usable_reply_stand_as_they_are(toy, rewrite, endpoint, call):
    says = {
        TEXTS[0]: '<text>Ursus maritimus\n\tloses "mass".</text>',
        TEXTS[1]: "no tag",
        TEXTS[2]: {"status": 400, "text": "no"},
        "Say yes.": "yes",
    }
    server = endpoint(lambda prompt: says.get(prompt) or says[claim_in(prompt)])
    ask = f"ask {AT}.requests.jsonl --replies {AT}.replies.jsonl --model toy --base-url"
    for count in (3, 1):  # the same claim is asked once, "no tag" again
        done = rewrite()
        assert done.returncode == 3 and f'"waiting": {count}}}' in done.stdout
        assert not (toy / f"{AT}.tsv").exists()
        facts(call("04_llm_rerank.py", ask, server.url, cwd=toy))
    asked = len(server.asked)
    made = facts(rewrite())
    counts = [made[name] for name in ("claims", "read", "unread", "failed", "unchanged")]
    assert counts == [4, 1, 2, 1, 3]
    rows = read(toy / f"{AT}.tsv").to_numpy().tolist()
    assert rows == [["c1", 'Ursus maritimus loses "mass".', "en"], *map(list, ROWS[1:])]
    assert "up to date" in rewrite().stdout
    assert rewrite("--retry-errors").returncode == 3
    assert facts(rewrite(f"--retry-errors --base-url {server.url}"))["failed"] == 1
    again = {body["messages"][-1]["content"] for body in server.asked[asked:]} - {"Say yes."}
    assert set(map(claim_in, again)) == {TEXTS[2]}  # what was refused, and nothing else
    assert rewrite("--view passage").returncode == 3  # another file, other requests
    replies = toy / f"{AT}.replies.jsonl"
    replies.write_text(replies.read_text().replace("Ursus maritimus", "It"))  # made anew
    assert facts(rewrite())["made"]
    assert read(toy / f"{AT}.tsv")["claim"][0].startswith("It")


def test_the_new_claims_are_one_more_run_that_is_fused(toy, rewrite, endpoint, call, monkeypatch):
    server = endpoint(lambda prompt: f"<text>{claim_in(prompt)} glaciers of the Alps</text>")
    monkeypatch.setenv("LLM_BASE_URL", server.url)
    assert facts(rewrite())["unchanged"] == 0
    facts(call("01_index.py", "--indexes bm25", cwd=toy))
    runs = ["work/demo/test/bm25.tsv", f"{AT}/bm25.tsv", "work/demo/test/fused.tsv"]
    for words in ("", f"--claims {AT}.tsv --out {AT}", f"fuse {runs[0]} {runs[1]}"):
        facts(call("02_retrieve.py", words, cwd=toy))
    original, rewritten, fused = [set(read(toy / run)["abstract_id"]) for run in runs]
    assert rewritten - original
    assert fused == original | rewritten
