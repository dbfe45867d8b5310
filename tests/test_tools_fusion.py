"""recipes/tools/learn_fusion.py by hand (bad_recipes.tsv, too)."""

import pytest
from conftest import QRELS, RUN, facts, load, read, tsv


def runs_of(folder, claim_ids, best="g"):
    """Write two runs of these claims: the first has x, y and g by score, the second knows best."""
    first = []
    second = []
    for number, name in enumerate(claim_ids):
        first += [(name, "x", 1, 9), (name, "y", 2, 8 + number / 100), (name, best, 3, 7)]
        second += [(name, best, 1, 0.9), (name, "x", 2, 0.2)]
    tsv(folder / "a.tsv", RUN, first)
    tsv(folder / "b.tsv", RUN, second)
    return f"{folder}/a.tsv {folder}/b.tsv"


def test_candidates_have_scores_ranks_and_reciprocal_ranks(tmp_path):
    paths = runs_of(tmp_path, ["1"]).split()
    table = load("recipes/tools/learn_fusion.py").read_candidates(paths)
    assert table["abstract_id"].tolist() == ["x", "g", "y"]
    assert table["score"].tolist() == pytest.approx([1 / 61 + 1 / 62, 1 / 63 + 1 / 61, 1 / 62])
    wanted = [("rank", [1, 2, 3]), ("score_0", [9, 7, 8]), ("rank_0", [1, 3, 2])]
    for column, values in [*wanted, ("score_1", [0.2, 0.9, -1])]:
        assert table[column].fillna(-1).tolist() == values, column


@pytest.mark.parametrize("model", ["forest", "boosting"])
def test_what_decides_is_learnt_and_applied(toy, program, model):
    train_ids = [f"t{number}" for number in range(40)]
    train = runs_of(toy / "train", train_ids)
    test = runs_of(toy / "test", ["a", "b"], best="h")
    tsv(toy / "q.tsv", QRELS, [(name, "g", "SUPPORTS") for name in train_ids])
    words = f"{train} --test {test} --qrels q.tsv --model {model} --top-k 2"
    made = facts(program("tools/learn_fusion", words, cwd=toy))
    assert made["claims"] == 40 and made["candidates"] == 120
    run = read(toy / made["made"][0])
    assert list(run["claim_id"] + run["abstract_id"])[::2] == ["ah", "bh"]
    assert run["rank"].tolist() == [1, 2, 1, 2]
    held_out = read(toy / made["made"][1])
    first = held_out.query("rank == 1")
    assert list(first["claim_id"] + first["abstract_id"]) == [f"{name}g" for name in train_ids]
    before = (toy / made["made"][0]).read_bytes()
    facts(program("tools/learn_fusion", f"{words} --force", cwd=toy))
    assert (toy / made["made"][0]).read_bytes() == before


def test_a_held_out_claim_teaches_nothing(toy, program):
    """The evidence of claim t0 alone is x, which no other claim's folds can know."""
    train_ids = [f"t{number}" for number in range(20)]
    train = runs_of(toy / "train", train_ids)
    rows = [(claim_id, "g", "REFUTES") for claim_id in train_ids[1:]]
    tsv(toy / "q.tsv", QRELS, [("t0", "x", "SUPPORTS"), ("t0", "g", "NEI"), *rows])
    made = facts(program("tools/learn_fusion", f"{train} --test {train} --qrels q.tsv", cwd=toy))
    [first] = read(toy / made["made"][1]).query("claim_id == 't0' and rank == 1").to_dict("records")
    assert first["abstract_id"] == "g" and first["score"] > 0.99
