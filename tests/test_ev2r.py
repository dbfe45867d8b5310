"""recipes/ev2r.py: figures computed by hand, replies of all shapes, what is asked again."""

import json
import re

import pandas as pd
import pytest
from conftest import (
    CLAIMS,
    KEY,
    LABELLED,
    QRELS,
    RUN,
    VERDICTS,
    cases,
    cells,
    facts,
    jsonl,
    load,
    read,
    tsv,
)

KIT = load("recipes/ev2r.py")
GOLD = "c1|g1|SUPPORTS; c1|g2|REFUTES; c2|g3|NEI; c2|g4|REFUTES; c3|g5|NEI"
# c3 is left out, c4 has no gold
POOL = "c1|r1; c1|r2; c2|r1; c3|r1; c4|r1"
PROXY = """c1|r1|1|1|NEI|0.6|0.3|0.1;
           c1|r2|1|1|NEI|0.5|0.2|0.3;
           c2|r1|1|1|NEI|0.1|0.1|0.8"""
COMPARED = {  # facts of r, supported ones, facts of g, supported ones
    comparison: list(map(int, counts))
    for comparison, *counts in cells("""c1 r1 g1|4|2|2|2; c1 r1 g2|4|1|4|1;
        c1 r2 g1|2|1|2|1; c1 r2 g2|1|1|2|1;
        c2 r1 g3|0|0|3|0; c2 r1 g4|5|0|3|0""")
}
# F1: c1 r1 2/3, 1/4 (SUPPORTS is expected), r2 1/2, 2/3 (REFUTES), c2 r1 0, 0 (the first: NEI)


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
    tsv(data / "claims.test.tsv", CLAIMS, "c1|c1 says; c2|c2 says; c3|c3 says; c4|c4 says")
    tsv(data / "qrels.test.tsv", QRELS, GOLD)
    names = "g1 g2 g3 g4 g5 r1 r2".split()
    papers = [{"abstract_id": name, "abstract": f"about {name}"} for name in names]
    jsonl(data / "corpus.jsonl", *papers)
    tsv(work / "pool.tsv", KEY, POOL)
    tsv(work / "proxy.tsv", VERDICTS, PROXY)
    rows = """c1|r1|1|4|REFUTES; c1|g1|2|3|NEI; c1|r2|3|2|REFUTES;
              c2|r1|1|1|NEI; c3|r1|1|1|NEI; c4|r1|1|1|NEI"""
    tsv(work / "a.tsv", LABELLED, rows)
    tsv(work / "b.tsv", RUN, "c1|r2|1|2; c1|r1|2|1; c2|g4|1|1")
    return tmp_path


AT = "work/demo/test/"
RUNS = [f"{AT}a.tsv", f"{AT}b.tsv"]
SCORE = (*RUNS, "--verdicts", f"{AT}proxy.tsv", "--model", "toy")


@pytest.fixture
def score(program, folder):
    """score("--depth", "3"): the program on both runs."""
    return lambda *words: program("ev2r", *SCORE, *words, cwd=folder)


def figures(folder):
    """Return {(measure, run): [value, low, high]}."""
    table = pd.read_csv(folder / AT / "ev2r.tsv", sep="\t", index_col=["measure", "run"])
    return table[["value", "low", "high"]].T.to_dict("list")


def test_both_figures_by_hand(folder, score, endpoint):
    """c1: r1 (2/3 + .6) / 2 = .6333, r2 (2/3 + .2) / 2 = .4333; c2: r1 (0 + .8) / 2 = .4."""
    server = endpoint(lambda prompt: said(COMPARED[name_of(prompt)]))
    words = ("--base-url", server.url, "--depth")
    made = facts(score(*words, "3"))
    assert list(made["claims"].values()) == [2, 1] and made["missing"] == 0
    found = figures(folder)
    best = (2 / 3 + 0.6) / 2
    second = (2 / 3 + 0.2) / 2
    other = 0.8 / 2
    assert found["Ev2R", RUNS[0]] == pytest.approx([(best + other) / 2, other, best])
    assert found["Ev2R", RUNS[1]] == pytest.approx([best] * 3)  # c2 has no unjudged abstract
    # REFUTES, expected SUPPORTS: .3 / 2; REFUTES, as expected: (.2 + 1) / 2; NEI: (.8 + 1) / 2
    c1 = (0.3 / 2 + 1.2 / 2) / 2
    c2 = 1.8 / 2
    assert found["Verification", RUNS[0]] == pytest.approx([(c1 + c2) / 2, c1, c2])
    assert found["Verification", RUNS[1]] == pytest.approx([float("nan")] * 3, nan_ok=True)
    pairs = read(folder / AT / "ev2r.pairs.tsv")
    wanted = cells("c1|r1|g1|SUPPORTS; c1|r2|g2|REFUTES; c2|r1|g3|NEI")
    assert pairs[[*KEY, "gold_id", "expected"]].values.tolist() == wanted
    assert pairs["Ev2R"].tolist() == pytest.approx([best, second, other])
    assert facts(score(*words, "3"))["made"] == []  # up to date
    assert facts(score(*words, "1"))["comparisons"] == len(server.asked) == 6  # no new question
    assert figures(folder)["Ev2R", RUNS[1]] == pytest.approx([second] * 3)


def test_what_has_no_counts_after_a_second_question_is_missing_and_not_0(folder, score, endpoint):
    broken = {"c1 r1 g2": "I cannot.", "c2 r1 g3": "", "c2 r1 g4": said((1, 9, 1, 9))}

    def reply(prompt):
        name = name_of(prompt)
        return broken.get(name, said(COMPARED[name]))

    server = endpoint(reply)
    done = score("--base-url", server.url)
    asked = [name_of(body["messages"][0]["content"]) for body in server.asked]
    assert sorted(asked) == sorted([*COMPARED, *broken])
    made = facts(done)
    assert (made["comparisons"], made["missing"], made["claims"][RUNS[0]]) == (6, 3, 1)
    assert "1 abstracts are skipped" in done.stderr
    found = figures(folder)
    assert found["Ev2R", RUNS[0]] == pytest.approx([(2 / 3 + 0.6) / 2] * 3)
    assert found["Verification", RUNS[0]] == pytest.approx([(0.3 / 2 + 1.2 / 2) / 2] * 3)


@pytest.mark.parametrize("file, old, new, what", cases("bad_ev2r.tsv"))
def test_what_cannot_be_scored_is_refused_before_anything_is_asked(
    folder, program, refused, file, old, new, what
):
    path = folder / AT / file
    text = path.read_text()
    old, new = (part.replace("|", "\t").replace(";", "\n") for part in (old, new))
    assert old in text
    path.write_text(text.replace(old, new))
    refused(folder, "ev2r", *SCORE, said=what, by=program)
