"""recipes/rewrite.py: what a reply becomes, and the way through 04 ask and on through 02."""

import re
import sys

import pytest
from conftest import ROOT, facts, load, read, tsv

sys.path.insert(0, str(ROOT / "recipes"))
REWRITE = load("recipes/rewrite.py")
AT = "work/demo/test/claims.statement"
HEADER = ["claim_id", "claim", "language"]
TEXTS = ["Polar bears are starving!! #ice", "It's the sun, stupid", 'sea level "is NOT" rising']
CLAIMS = [(f"c{n}", text, "en") for n, text in enumerate([*TEXTS, TEXTS[1]], 1)]


@pytest.fixture
def rewrite(program, toy):
    """rewrite("..."): the program on four claims, two of them the same."""
    tsv(toy / "data/demo/claims.test.tsv", HEADER, CLAIMS)
    return lambda words="": program("rewrite", f"--model toy {words}", cwd=toy)


def claim_in(prompt):
    return re.search("<claim>(.*)</claim>", prompt)[1]


@pytest.mark.parametrize(
    "reply, text",
    [
        ("<text>Ice melts.</text>", "Ice melts."),
        ("<TEXT>\nIce\tmelts.\n</TEXT> Ok?", "Ice melts."),
        ("<text>Ice melts.</text>\n<text>Seas rise.</text>", "Ice melts. Seas rise."),
        ("<text>A claim in <claim>tags</claim></text>", "A claim in tags"),
        ("Ice melts.", None),
        ("<text>Ice mel", None),
        ("<text> ... </text>", None),
        ("", None),
    ],
)
def test_what_stands_between_tags_is_the_new_text(reply, text):
    assert REWRITE.text_of_reply(reply) == text


@pytest.mark.parametrize(
    "claim, text",
    [
        ("Ice &amp; snow &lt; 2 °C &#39;now&#39;", "Ice & snow < 2 °C 'now'"),
        ("See https://t.co/aB1?x=y#z and www.who.int/x now", "See and now"),
        ("@WHO: #COVID19 is over, @me", ": COVID19 is over,"),
        ("Hot🔥🔥 ☀️ 1️⃣st 👨‍👩", "Hot 1 st"),
        ("mail a@b.org about No #1 and C# ™", "mail a@b.org about No 1 and C# ™"),
        ("https://t.co/x", ""),
    ],
)
def test_claims_are_cleaned(claim, text):
    assert REWRITE.cleaned(claim) == text


def test_the_clean_view_asks_no_model(toy, program, monkeypatch):
    monkeypatch.setenv("LLM_BASE_URL", "http://none/v1")  # that of another view
    rows = [("a", "Ice &amp; snow @me"), ("b", "https://t.co/x"), ("c", "Sun")]
    tsv(toy / "in.tsv", HEADER[:2], rows)
    made = facts(program("rewrite", "--view clean --claims in.tsv", cwd=toy))
    assert made == {"made": ["work/demo/test/claims.clean.tsv"], "claims": 3, "unchanged": 2}
    claims = read(toy / made["made"][0])["claim"].tolist()
    assert claims == ["Ice & snow", "https://t.co/x", "Sun"]  # of b, nothing would be left


def test_ones_own_prompt_is_asked_and_its_text_appended(toy, rewrite, endpoint):
    prompt = '# a note\nBe brief.\n--- user\nPut {"x"} in tags: <claim>{claim}</claim>\n'
    (toy / "mine.txt").write_text(prompt)
    server = endpoint(lambda prompt: "<text>warming</text>")
    words = f"--prompt mine.txt --append --base-url {server.url}"
    (out,) = facts(rewrite(words))["made"]
    system, _ = server.asked[0]["messages"]
    assert system == {"role": "system", "content": "Be brief."}
    asked = {body["messages"][1]["content"] for body in server.asked}
    assert asked == {f'Put {{"x"}} in tags: <claim>{text}</claim>' for text in TEXTS}
    assert out == "work/demo/test/claims.mine.tsv"
    assert read(toy / out)["claim"].tolist() == [f"{claim} warming" for _, claim, _ in CLAIMS]
    assert "up to date" in rewrite(f"{words}/other").stdout  # the replies are there
    (toy / "mine.txt").write_text("What?")
    done = rewrite(words)
    assert done.returncode == 2 and "mine.txt: it needs {claim}" in done.stderr


def test_claims_without_a_usable_reply_stand_as_they_are(toy, rewrite, endpoint, call):
    says = {
        TEXTS[0]: '<text>Ursus maritimus\n\tloses "mass".</text>',
        TEXTS[1]: "no tag",
        TEXTS[2]: {"status": 400, "text": "no"},
    }
    server = endpoint(lambda prompt: says[claim_in(prompt)])
    for count in (3, 4):  # the same claim is asked once, "no tag" again
        done = rewrite()
        (command,) = re.findall(r"python 04_llm_rerank.py (ask .*)", done.stdout)
        assert done.returncode == 3
        assert not (toy / f"{AT}.tsv").exists()
        facts(call("04_llm_rerank.py", f"{command} --base-url {server.url}", cwd=toy))
        assert len(server.asked) == count
        assert server.asked[0]["model"] == "toy"
    done = rewrite()
    made = facts(done)
    assert [made[name] for name in ("claims", "unread", "refused", "unchanged")] == [4, 2, 1, 3]
    assert "of 4 replies, 2 unread (" in done.stderr and ", 1 refused (" in done.stderr
    rows = read(toy / f"{AT}.tsv").to_numpy().tolist()
    assert rows == [["c1", 'Ursus maritimus loses "mass".', "en"], *map(list, CLAIMS[1:])]
    assert "up to date" in rewrite().stdout
    assert rewrite("--retry-errors").returncode == 3
    assert facts(rewrite(f"--retry-errors --base-url {server.url}"))["refused"] == 1
    assert len(server.asked) == 5  # what was refused is asked again, and nothing else
    assert rewrite("--view passage").returncode == 3  # another file, other requests
    replies = toy / f"{AT}.replies.jsonl"
    replies.write_text(replies.read_text().replace("Ursus maritimus", "It"))  # made anew
    assert facts(rewrite())["made"]
    assert read(toy / f"{AT}.tsv")["claim"][0].startswith("It")


def test_an_endpoint_is_asked_only_for_a_model_by_name(
    toy, program, endpoint, refused, monkeypatch
):
    server = endpoint("<text>Ice.</text>".format)
    monkeypatch.setenv("LLM_BASE_URL", server.url)
    said = "--model: an endpoint needs the name of a model"
    refused(toy, "rewrite", by=program, said=said)
    assert not server.asked


def test_the_new_claims_are_one_more_run_that_is_fused(toy, rewrite, endpoint, call, monkeypatch):
    server = endpoint(lambda prompt: f"<text>{claim_in(prompt)} glaciers of the Alps</text>")
    monkeypatch.setenv("LLM_BASE_URL", server.url)
    assert facts(rewrite())["unchanged"] == 0
    facts(call("01_index.py", "--indexes bm25", cwd=toy))
    runs = ["work/demo/test/bm25.tsv", f"{AT}/bm25.tsv", "work/demo/test/fused.tsv"]
    facts(call("02_retrieve.py", cwd=toy))
    facts(call("02_retrieve.py", f"--claims {AT}.tsv --out {AT}", cwd=toy))
    facts(call("02_retrieve.py", f"fuse {runs[0]} {runs[1]}", cwd=toy))
    original, rewritten, fused = [set(read(toy / run)["abstract_id"]) for run in runs]
    assert rewritten - original
    assert fused == original | rewritten
