"""recipes/train/mine.py: evidence, hard and easy negatives, targets."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from conftest import KEY, QRELS, RUN, facts, load, read, records, tsv

SCRIPT = "mine.py"
KIT = load("recipes/train/mine.py")


def test_examples_by_hand():
    rng = np.random.default_rng(0)
    draw = KIT.draw
    assert draw("abcd", 2, "best", rng) == "ab" and draw("abcd", 2, "worst", rng) == "dc"
    assert len({tuple(draw("abcd", 2, "random", rng)) for _ in range(300)}) == 4 * 3
    assert sorted(draw("abcd", 9, "random", rng, {"b"})) == list("acd")
    args = SimpleNamespace(
        shape="pairs",
        hard=1,
        easy=1,
        draw="best",
        from_top=9,
        gold=False,
        seed=0,
    )
    rows = [("p", "SUPPORTS", 1), ("x", None, 2), ("q", "REFUTES", 3), ("y", "NEI", 4)]
    rows = pd.DataFrame(rows, columns=["abstract_id", "label", "rank"])
    rows = rows.assign(
        is_evidence=rows["abstract_id"].isin(["p", "q"]),
        is_likely=False,
        is_negative=rows["abstract_id"].isin(["x", "y"]),
    )

    def examples(**other):
        vars(args).update(other)
        found = KIT.examples_of("c", rows, ["z", "x", "p"], args)
        return [tuple(example.values()) for example in found]

    assert examples() == [
        ("evidence", "c", "p", 1),
        ("evidence", "c", "q", 1),
        ("hard", "c", "x", 0),
        ("easy", "c", "z", 0),
    ]
    expected = [("hard", "c", "y", "NEI"), ("easy", "c", "z", "NEI")]
    assert examples(shape="labels", draw="worst") == expected
    found = examples(shape="tuples")
    assert found == [("evidence", "c", "p", ["y", "z"]), ("evidence", "c", "q", ["y", "z"])]


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
    mine = f"{words} --qrels q.tsv --split test --out x.jsonl --force"
    for judged in (table, table, table[table["claim_id"] != "c4"]):
        tsv(toy / "q.tsv", judged, judged.values)
        made = facts(call(SCRIPT, mine, cwd=toy))
        seen.append(records(toy / "x.jsonl"))
    relevant = set(map(tuple, table[table["label"] != "NEI"][KEY].values))
    drawn = set()
    for row in seen[0]:
        negatives = row.get("negatives", [])
        if "abstract_id" in row and row["kind"] != "evidence":
            negatives = [row["abstract_id"]]
        drawn |= {(row["claim_id"], abstract_id) for abstract_id in negatives}
    assert drawn and not drawn & relevant and seen[0] == seen[1]
    assert kinds.items() <= pd.DataFrame(seen[0])["kind"].value_counts().to_dict().items()
    if "--pool nei" in words:  # of any claim, the own one too
        nei = set(map(tuple, table[table["label"] == "NEI"][KEY].values))
        assert {name for _, name in drawn} == {name for _, name in nei}
        assert drawn >= {pair for pair in nei if pair[0] in dict(relevant)}
    else:
        assert seen[2] == [row for row in seen[0] if row["claim_id"] != "c4"]
    assert set(made) >= {"examples", "left_out"}


@pytest.mark.parametrize(
    ("shape", "kinds"),
    [
        # of each of the two judged claims, 3 from the run and 1 from the rest of the corpus
        ("labels", {"hard": 2 * 3, "easy": 2 * 1}),
        # of the one claim with evidence
        ("pairs", {"evidence": 2, "hard": 3, "easy": 1}),
        ("tuples", {"evidence": 2}),
    ],
)
def test_labels_alone_have_claims_without_evidence(toy, call, shape, kinds):
    """The run has six abstracts of each claim; c5 is not judged."""
    tsv(toy / "q.tsv", QRELS, "c3|0001|SUPPORTS; c3|0002|REFUTES; c4|0006|NEI")
    words = "--split test --qrels q.tsv --out x.jsonl --hard 3 --easy 1 --shape"
    facts(call(SCRIPT, f"{words} {shape}", cwd=toy))
    rows = pd.DataFrame(records(toy / "x.jsonl"))
    assert rows["kind"].value_counts().to_dict() == kinds
    if shape == "labels":
        assert (rows["claim_id"].value_counts() == 4).all()
        assert set(rows["label"]) == {"NEI"}


def test_easy_negatives_come_from_the_corpus_and_repeat_no_hard_one(toy, call):
    tsv(toy / "r.tsv", RUN, [("c3", f"{n:04}", n, 100 - n) for n in range(1, 5)])
    tsv(toy / "q.tsv", QRELS, "c3|0012|SUPPORTS")
    words = "r.tsv --qrels q.tsv --out x.jsonl --easy 9 --hard 3 --skip-top 1"
    facts(call(SCRIPT, words, cwd=toy))
    kinds = {"hard": set(), "easy": set(), "evidence": set()}
    for row in records(toy / "x.jsonl"):
        kinds[row["kind"]].add(row["abstract_id"])
    assert kinds["hard"] == {"0002", "0003", "0004"}
    assert kinds["easy"] == {f"{n:04}" for n in range(5, 12)}  # 12 in all, 4 on top, 1 evidence


@pytest.mark.parametrize(
    ("rule", "count", "hard"),
    [
        ("--skip-top 2", 4, {"0003", "0004", "0005"}),
        ("--max-score 8", 3, {"0003", "0004", "0005"}),
        ("--margin 2", 2, {"0003", "0004", "0005"}),  # evidence has 9: up to 7
        ("--relative-margin 0.7", 3, {"0004", "0005"}),  # up to 6.3
    ],
)
def test_likely_evidence_is_no_negative(toy, call, rule, count, hard):
    run = [("c3", f"{n:04}", n, [10, 9, 7, 6, 5][n - 1]) for n in range(1, 6)]
    tsv(toy / "r.tsv", RUN, [*run, ("c5", "0001", 1, 10), ("c5", "0003", 2, 1)])
    tsv(toy / "q.tsv", QRELS, "c3|0002|SUPPORTS; c5|0009|REFUTES")
    words = f"r.tsv --qrels q.tsv --out x.jsonl --hard 9 {rule}"
    made = facts(call(SCRIPT, words, cwd=toy))
    assert made["left_out"] == count
    rows = [row for row in records(toy / "x.jsonl") if row["kind"] == "hard"]
    assert {row["abstract_id"] for row in rows if row["claim_id"] == "c3"} == hard


def test_without_rules_negative_scores_leave_nothing_out(toy, call):
    tsv(toy / "r.tsv", RUN, "c3|0001|1|-1.0; c3|0002|2|-2.0; c3|0003|3|-3.0")
    tsv(toy / "q.tsv", QRELS, "c3|0003|SUPPORTS")
    words = "r.tsv --qrels q.tsv --out x.jsonl --hard 2"
    made = facts(call(SCRIPT, words, cwd=toy))
    assert made["examples"] == 3 and made["left_out"] == 0
    words += " --shape scores --middle 0 --scale 1 --skip-top 2"
    assert facts(call(SCRIPT, words, cwd=toy))["examples"] == 3
    assert all(row["target"] == 0 for row in records(toy / "x.jsonl"))


def test_a_share_of_a_score_needs_a_scale(toy, refused):
    tsv(toy / "r.tsv", RUN, "c3|0001|1|1.0; c3|0002|2|-1.0")
    tsv(toy / "q.tsv", QRELS, "c3|0002|SUPPORTS")
    words = "{} --qrels q.tsv --out x.jsonl --relative-margin 0.9"
    said = "{}: ratios of fused or negative scores"
    refused(toy, SCRIPT, words.format("r.tsv"), said=said.format("r.tsv"))
    tsv(toy / "hybrid.tsv", RUN, "c3|0001|1|1.0; c3|0002|2|0.5")
    refused(toy, SCRIPT, words.format("hybrid.tsv"), said=said.format("hybrid.tsv"))


def test_a_file_without_examples_is_not_written(toy, refused):
    tsv(toy / "q.tsv", QRELS, "c3|0001|NEI")
    words = "--hard 0 --qrels q.tsv --split test --out x.jsonl"
    refused(toy, SCRIPT, words, said="q.tsv: none of its claims gives an example")


def test_scores_as_targets_with_gold_evidence(toy, call):
    tsv(toy / "q.tsv", QRELS, "c3|0001|SUPPORTS; c5|0009|NEI")
    words = "--qrels q.tsv --split test --out x.jsonl --shape scores --gold --from-top 2"
    words += " --hard 0 --middle 0.6 --scale 2"  # scores need the run in any case
    assert facts(call(SCRIPT, words, cwd=toy))["examples"] == 7
    assert [tuple(row.values()) for row in records(toy / "x.jsonl")][:3] == [
        ("score", "c3", "0003", 1),
        ("score", "c3", "0002", 0.3),
        ("evidence", "c3", "0001", 1),
    ]
