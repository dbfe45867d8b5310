"""recipes/ev2r.py: figures computed by hand, replies of all shapes, what is asked again."""

import json
import re
import sys

import pytest
from conftest import (
    CLAIMS,
    KEY,
    LABELLED,
    QRELS,
    ROOT,
    RUN,
    cells,
    facts,
    jsonl,
    load,
    read,
    records,
    tsv,
)

sys.path.insert(0, str(ROOT / "recipes"))
KIT = load("recipes/ev2r.py")
VERDICTS = [*LABELLED, "p_supports", "p_refutes", "p_nei"]
GOLD = "c1|g1|SUPPORTS; c1|g2|REFUTES; c2|g3|NEI; c2|g4|REFUTES; c3|g5|NEI"
# c3 is left out, c4 has no gold
POOL = "c1|r1; c1|r2; c2|r1; c3|r1; c4|r1"
PROXY = """c1|r1|1|1|NEI|0.6|0.3|0.1;
           c1|r2|1|1|NEI|0.5|0.2|0.3;
           c2|r1|1|1|NEI|0.1|0.1|0.8"""
COMPARED = {  # facts of r, supported ones, facts of g, supported ones
    "c1 r1 g1": (4, 2, 2, 2),
    "c1 r1 g2": (4, 1, 4, 1),  # F1 2/3, 1/4: SUPPORTS is expected
    "c1 r2 g1": (2, 1, 2, 1),
    "c1 r2 g2": (1, 1, 2, 1),  # 1/2, 2/3: REFUTES
    "c2 r1 g3": (0, 0, 3, 0),
    "c2 r1 g4": (5, 0, 3, 0),
}  # 0, 0: NEI, the label of the first


def said(counts, **other):
    return json.dumps({"first": [["A fact.", True]], **dict(zip(KIT.COUNTS, counts)), **other})


def name_of(prompt):
    """Return which comparison a prompt asks for, as texts hold their ids."""
    return re.sub(r".*Claim: (c\d).*?about (r\d).*?about (g\d).*", r"\1 \2 \3", prompt, flags=re.S)


@pytest.fixture
def folder(tmp_path):
    """Data of four claims, their pool, a run with labels, one without, verdicts."""
    data = tmp_path / "data/demo"
    work = tmp_path / "work/demo/test"
    claims = [(f"c{n}", f"c{n} says") for n in range(1, 5)]
    tsv(data / "claims.test.tsv", CLAIMS, claims)
    tsv(data / "qrels.test.tsv", QRELS, GOLD)
    papers = []
    for abstract_id in "g1 g2 g3 g4 g5 r1 r2".split():
        text = f"about {abstract_id}"
        papers.append({"abstract_id": abstract_id, "title": "", "abstract": text})
    jsonl(data / "corpus.jsonl", *papers)
    tsv(work / "pool.tsv", KEY, POOL)
    tsv(work / "proxy.tsv", VERDICTS, PROXY)
    rows = """c1|r1|1|4|REFUTES; c1|g1|2|3|NEI; c1|r2|3|2|REFUTES;
              c2|r1|1|1|NEI; c3|r1|1|1|NEI; c4|r1|1|1|NEI"""
    tsv(work / "a.tsv", LABELLED, rows)
    tsv(work / "b.tsv", RUN, "c1|r2|1|2; c1|r1|2|1; c2|g4|1|1")
    return tmp_path


@pytest.fixture
def ev2r(program, folder):
    return lambda *words: program("ev2r", *words, cwd=folder)


AT = "work/demo/test/"
SCORE = (f"{AT}a.tsv", f"{AT}b.tsv", "--verdicts", f"{AT}proxy.tsv", "--model", "toy")


def answer(folder, reply):
    """Append reply(name of a comparison) for each request that waits; return their prompts."""
    requests = records(folder / AT / "ev2r.requests.jsonl")
    prompts = [request["body"]["messages"][0]["content"] for request in requests]
    with open(folder / AT / "ev2r.replies.jsonl", "a") as file:
        for request, prompt in zip(requests, prompts):
            body = {"choices": [{"message": {"content": reply(name_of(prompt))}}]}
            line = {"custom_id": request["custom_id"], "response": {"body": body}}
            file.write(json.dumps(line) + "\n")
    return prompts


def figures(folder):
    """Return {(measure, run): [value, low, high]}."""
    table = read(folder / AT / "ev2r.tsv").replace("", float("nan")).set_index(["measure", "run"])
    numbers = table[["value", "low", "high"]].astype(float)
    return {key: list(row) for key, row in numbers.iterrows()}


def test_both_figures_by_hand(folder, ev2r, endpoint):
    """c1: r1 (2/3 + .6) / 2 = .6333, r2 (2/3 + .2) / 2 = .4333; c2: r1 (0 + .8) / 2 = .4."""
    server = endpoint(lambda prompt: said(COMPARED[name_of(prompt)]))
    made = facts(ev2r(*SCORE, "--depth", "3", "--base-url", server.url))
    assert len(server.asked) == 6
    assert made["claims"] == {SCORE[0]: 2, SCORE[1]: 1}
    assert made["missing"] == 0
    found = figures(folder)
    best = (2 / 3 + 0.6) / 2
    second = (2 / 3 + 0.2) / 2
    other = 0.8 / 2
    assert found["Ev2R", SCORE[0]] == pytest.approx([(best + other) / 2, other, best])
    assert found["Ev2R", SCORE[1]] == pytest.approx([best] * 3)  # c2 has no unjudged abstract
    # REFUTES, expected SUPPORTS: .3 / 2; REFUTES, as expected: (.2 + 1) / 2; NEI: (.8 + 1) / 2
    c1 = (0.3 / 2 + 1.2 / 2) / 2
    c2 = 1.8 / 2
    assert found["Verification", SCORE[0]] == pytest.approx([(c1 + c2) / 2, c1, c2])
    assert found["Verification", SCORE[1]] == pytest.approx([float("nan")] * 3, nan_ok=True)
    pairs = read(folder / AT / "ev2r.pairs.tsv")
    wanted = cells("c1|r1|g1|SUPPORTS; c1|r2|g2|REFUTES; c2|r1|g3|NEI")
    assert pairs[[*KEY, "gold_id", "expected"]].values.tolist() == wanted
    assert pairs["Ev2R"].tolist() == pytest.approx([best, second, other])
    assert facts(ev2r(*SCORE, "--depth", "3"))["made"] == []  # up to date
    made = facts(ev2r(*SCORE, "--depth", "1"))  # another depth asks nothing
    assert made["comparisons"] == 6
    assert figures(folder)["Ev2R", SCORE[1]] == pytest.approx([second] * 3)


@pytest.mark.parametrize(
    "reply, counts",
    [
        (f"Here it is:\n```json\n{said((3, 1, 2, 2))}\n```\nDone.", [3, 1, 2, 2]),
        (said((3, 1, 2, 2)).replace("A fact.", 'A "fact".'), [3, 1, 2, 2]),
        (said((0, 0, 2, 0)), [0, 0, 2, 0]),
        (said((3, 1, 2, 2)) + "\nNo, wait:\n" + said((3, 2, 2, 2)), None),
        (said((3, 4, 2, 2)), None),
        (said((3, 1, 2, 3)), None),
        (said((3, -1, 2, 2)), None),
        (said((3, 1.5, 2, 2)), None),
        (said((3, True, 2, 2)), None),
        (said((3, None, 2, 2)), None),
        (said((3, 1, 2, 2))[:-2], None),
        (said((3, 1, 2)), None),
        ("3, 1, 2, 2", None),
        ("", None),
    ],
)
def test_counts_are_read_or_asked_for_again(reply, counts):
    assert KIT.counts_of(reply) == counts


def test_what_has_no_counts_after_a_second_question_is_missing_and_not_0(folder, ev2r):
    broken = {"c1 r1 g2", "c2 r1 g3", "c2 r1 g4"}
    ev2r(*SCORE)

    def reply(name):
        return "I cannot." if name in broken else said(COMPARED[name])

    first = answer(folder, reply)
    assert ev2r(*SCORE).returncode == 3
    again = answer(folder, lambda name: said((1, 9, 1, 9)))
    assert {name_of(prompt) for prompt in again} == broken
    assert not set(first) & set(again)
    done = ev2r(*SCORE)
    made = facts(done)
    assert (made["comparisons"], made["missing"], made["claims"][SCORE[0]]) == (6, 3, 1)
    assert "1 abstracts are skipped" in done.stderr
    found = figures(folder)
    assert found["Ev2R", SCORE[0]] == pytest.approx([(2 / 3 + 0.6) / 2] * 3)
    assert found["Verification", SCORE[0]] == pytest.approx([(0.3 / 2 + 1.2 / 2) / 2] * 3)


@pytest.mark.parametrize(
    "file, old, new, what",
    [
        ("pool.tsv", "c1\tr2\n", "", "c1 r2 is neither judged nor in"),  # a run was not pooled
        ("proxy.tsv", "p_nei", "p_none", "p_nei"),
        ("pool.tsv", "r2", "r9", "unknown abstract_id: c1 r9"),
        ("pool.tsv", "\tr", "\tg", "no unjudged pair"),
        ("b.tsv", "\nc", "\nx", "none of its claims is in"),
    ],
)
def test_what_cannot_be_scored_is_refused_before_anything_is_asked(
    folder, ev2r, file, old, new, what
):
    path = folder / AT / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    done = ev2r(*SCORE)
    error = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and error.startswith("error: ") and what in error
    assert not (folder / AT / "ev2r.requests.jsonl").exists()
