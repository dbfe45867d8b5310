"""recipes/train/mine.py: evidence, hard and easy negatives, targets.

mined.tsv has a run, qrels, flags, how many candidates are left out, and the examples.
"""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from conftest import CLAIMS, KEY, QRELS, RUN, cases, facts, jsonl, load, read, records, tsv

SCRIPT = "mine.py"
KIT = load("recipes/train/mine.py")


def test_draws_by_hand():
    rng = np.random.default_rng(0)
    draw = KIT.draw
    assert draw("abcd", 2, "best", rng) == "ab" and draw("abcd", 2, "worst", rng) == "dc"
    assert len({tuple(draw("abcd", 2, "random", rng)) for _ in range(300)}) == 4 * 3
    assert sorted(draw("abcd", 9, "random", rng, {"b"})) == list("acd")


ROWS = {  # of a claim, by rank
    "abstract_id": list("pxqy"),
    "label": ["SUPPORTS", None, "REFUTES", "NEI"],
    "rank": [1, 2, 3, 4],
    "is_evidence": [True, False, True, False],
    "is_likely": False,
    "is_negative": [False, True, False, True],
}


@pytest.mark.parametrize(
    "shape, order, expected",
    [
        ("pairs", "best", ["evidence c p 1.0", "evidence c q 1.0", "hard c x 0.0", "easy c z 0.0"]),
        ("labels", "worst", ["hard c y NEI", "easy c z NEI"]),
        ("tuples", "worst", ["evidence c p ['y', 'z']", "evidence c q ['y', 'z']"]),
    ],
)
def test_examples_by_hand(shape, order, expected):
    args = SimpleNamespace(shape=shape, hard=1, easy=1, draw=order, from_top=9, gold=False, seed=0)
    found = KIT.examples_of("c", pd.DataFrame(ROWS), ["z", "x", "p"], args)
    assert list(map(shown, found)) == expected


def shown(example):
    return " ".join(map(str, example.values()))


@pytest.mark.parametrize("run, qrels, words, left_out, expected", cases("mined.tsv"))
def test_what_is_mined(toy, call, run, qrels, words, left_out, expected):
    tsv(toy / "r.tsv", RUN, run)
    tsv(toy / "q.tsv", QRELS, qrels)
    words = f"r.tsv --split test --qrels q.tsv --out x.jsonl {words}"
    made = facts(call(SCRIPT, words, cwd=toy))
    assert made["left_out"] == int(left_out)
    assert sorted(map(shown, records(toy / "x.jsonl"))) == expected.split("; ")


MINES = [
    ("--hard 2 --easy 9 --from-top 3", {"hard": 3}),
    ("--shape labels --hard 3", {"hard": 9}),
    ("--shape tuples --hard 2 --easy 3", {"evidence": 6}),
    ("--pool nei --hard 9", {"hard": 6}),
    ("--shape tuples --pool nei --hard 0 --easy 9", {"evidence": 6}),
]


@pytest.mark.parametrize("words, kinds", MINES)
def test_evidence_is_no_negative_and_no_draw_depends_on_other_claims(toy, call, words, kinds):
    table = read(toy / "data/demo/qrels.test.tsv")
    seen = []
    for judged in (table, table, table[table["claim_id"] != "c4"]):
        tsv(toy / "q.tsv", judged, judged.values)
        mine = f"{words} --qrels q.tsv --split test --out x.jsonl --force"
        facts(call(SCRIPT, mine, cwd=toy))
        seen.append(records(toy / "x.jsonl"))
    assert seen[0] == seen[1]
    assert kinds.items() <= pd.DataFrame(seen[0])["kind"].value_counts().to_dict().items()
    is_nei = table["label"] == "NEI"
    relevant = set(table[~is_nei][KEY].itertuples(index=False, name=None))
    drawn = set()
    for row in seen[0]:
        negatives = row.get("negatives", [])
        if row["kind"] != "evidence":
            negatives = [row["abstract_id"]]
        drawn |= {(row["claim_id"], abstract_id) for abstract_id in negatives}
    assert drawn and not drawn & relevant
    if "--pool nei" in words:  # of any claim, the own one too
        nei = set(table[is_nei][KEY].itertuples(index=False, name=None))
        assert {name for _, name in drawn} == {name for _, name in nei}
        assert drawn >= {pair for pair in nei if pair[0] in dict(relevant)}
    else:
        assert seen[2] == [row for row in seen[0] if row["claim_id"] != "c4"]


@pytest.mark.parametrize("name, run, qrels, words, said", cases("bad_mined.tsv"))
def test_what_gives_no_examples_is_refused(toy, refused, name, run, qrels, words, said):
    tsv(toy / name, RUN, run)
    tsv(toy / "q.tsv", QRELS, qrels)
    words = f"--split test --qrels q.tsv --out x.jsonl {words}"
    refused(toy, SCRIPT, name, *words.split(), said=said)


TWINS = """--hard 9; --hard 0 --easy 9; --shape labels --hard 9; --shape scores --gold;
    --shape tuples --hard 1 --easy 1 --draw best; --shape tuples --pool nei --hard 0 --easy 9"""


@pytest.mark.parametrize("words", TWINS.split(";"))
def test_a_text_that_is_evidence_is_no_negative_under_another_id(toy, call, words):
    """1 is evidence of c1, 4 of c2, a claim of the same words; 2 has the text of 1; 3 is the claim.

    0 and 5 have no text, and are not the same.
    """
    texts = ["", "Sea ice fell.", "Sea  ICE fell!", "It's the sun, stupid", "Cod moved.", ""]
    rows = [{"abstract_id": n, "abstract": text, "title": n} for n, text in enumerate(texts)]
    jsonl(toy / "data/demo/corpus.jsonl", *rows)
    tsv(
        toy / "data/demo/claims.train.tsv",
        CLAIMS,
        "c1|It's the sun, stupid; c2|It's the SUN stupid",
    )
    tsv(toy / "q.tsv", QRELS, "c1|1|SUPPORTS; c1|0|SUPPORTS; c2|4|REFUTES; c2|2|NEI; c1|5|NEI")
    run = [("c1", n, n + 1, -n) for n in range(6)] + [("c2", n, n + 1, -n) for n in range(6)]
    tsv(toy / "r.tsv", RUN, run)
    made = facts(call(SCRIPT, f"r.tsv --qrels q.tsv --out x.jsonl {words}", cwd=toy))
    assert made["left_out"] == 7
    drawn = set()
    for row in records(toy / "x.jsonl"):
        drawn |= set(row.get("negatives", []))
        if row["kind"] != "evidence":
            drawn.add(row["abstract_id"])
    assert drawn == {"5"}
