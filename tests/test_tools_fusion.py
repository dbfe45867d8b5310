"""recipes/tools: learn_fusion.py and disagreement.py, each by hand (bad_recipes.tsv, too)."""

import pytest
from conftest import CLAIMS, QRELS, RUN, facts, load, read, tsv


# ---------------------------------------------------------------- Learnt fusion
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


# ---------------------------------------------------------------- Disagreement
def test_claims_are_chosen_and_put_back(toy, program):
    tsv(toy / "c.tsv", [*CLAIMS, "language"], "1|Ice|en; 2|Sun|de; 3|Sea|en; 4|Air|en")
    tsv(toy / "a.tsv", RUN, "1|x|1|9; 1|y|2|8; 2|x|1|9; 2|y|2|8; 3|x|1|9; 3|z|2|8")
    tsv(toy / "b.tsv", RUN, "1|x|1|9; 1|z|2|8; 2|y|1|9; 2|x|2|8")
    words = "a.tsv b.tsv --claims c.tsv --out d.tsv"
    made = facts(program("tools/disagreement", words, cwd=toy))
    assert made == {"made": ["d.tsv", "d.run.tsv"], "claims": 4, "disputed": 2}
    assert (toy / "d.tsv").read_text() == "claim_id\tclaim\tlanguage\n2\tSun\tde\n3\tSea\ten\n"
    run = read(toy / "d.run.tsv")
    assert list(run["claim_id"] + run["abstract_id"]) == ["2x", "2y", "3x", "3z"]
    made = facts(program("tools/disagreement", f"{words} --places 2", cwd=toy))
    assert made["disputed"] == 2  # now 1 and 3: claim 2 has the same two
    tsv(toy / "new.tsv", RUN, "2|y|1|.9; 2|x|2|.1")
    made = facts(program("tools/disagreement", "merge a.tsv new.tsv --out m.tsv", cwd=toy))
    assert made["claims_replaced"] == 1
    merged = read(toy / "m.tsv")
    assert list(merged["claim_id"] + merged["abstract_id"]) == ["1x", "1y", "3x", "3z", "2y", "2x"]
    assert merged["score"].tolist() == [9, 8, 9, 8, 0.9, 0.1]


def test_the_disputed_claims_go_to_04_alone(toy, program, call):
    hybrid = "work/demo/test/hybrid.tsv"
    turned = read(toy / hybrid)
    is_c4 = turned["claim_id"] == "c4"
    turned.loc[is_c4, "abstract_id"] = turned.loc[is_c4, "abstract_id"].tolist()[::-1]
    tsv(toy / "turned.tsv", RUN, turned[RUN].values)
    facts(program("tools/disagreement", f"{hybrid} turned.tsv", cwd=toy))
    at = "work/demo/test/disagreement"
    words = f"--claims {at}.tsv --run {at}.run.tsv --backend none --model m"
    done = call("04_llm_rerank.py", words, cwd=toy)
    assert done.returncode == 3 and '"waiting": 1}' in done.stdout
