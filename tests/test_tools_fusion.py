"""recipes/tools: learn_fusion.py and disagreement.py, each by hand."""

import pytest
from conftest import CLAIMS, QRELS, RUN, facts, load, read, tsv

LEARN = load("recipes/tools/learn_fusion.py")


# ---------------------------------------------------------------- Learnt fusion
def runs_of(folder, claim_ids, best="g"):
    """Write two runs of these claims: the first has x, y and g by score, the second knows best."""
    first = []
    second = []
    for number, claim_id in enumerate(claim_ids):
        first += [
            (claim_id, "x", 1, 9),
            (claim_id, "y", 2, 8 + number / 100),
            (claim_id, best, 3, 7),
        ]
        second += [(claim_id, best, 1, 0.9), (claim_id, "x", 2, 0.2)]
    tsv(folder / "a.tsv", RUN, first)
    tsv(folder / "b.tsv", RUN, second)
    return f"{folder}/a.tsv {folder}/b.tsv"


def test_candidates_have_scores_ranks_and_reciprocal_ranks(tmp_path):
    paths = runs_of(tmp_path, ["1"]).split()
    table = LEARN.read_candidates(paths)
    assert table["abstract_id"].tolist() == ["x", "g", "y"]
    assert table["score"].tolist() == pytest.approx([1 / 61 + 1 / 62, 1 / 63 + 1 / 61, 1 / 62])
    assert table["rank"].tolist() == [1, 2, 3]
    assert table["score_0"].tolist() == [9, 7, 8] and table["rank_0"].tolist() == [1, 3, 2]
    assert table["score_1"].tolist()[:2] == [0.2, 0.9] and table["score_1"].isna()[2]


@pytest.mark.parametrize("model", ["forest", "boosting"])
def test_what_decides_is_learnt_and_applied(toy, program, model):
    train_ids = [f"t{number}" for number in range(40)]
    train = runs_of(toy / "train", train_ids)
    test = runs_of(toy / "test", ["a", "b"], best="h")
    tsv(toy / "q.tsv", QRELS, [(claim_id, "g", "SUPPORTS") for claim_id in train_ids])
    words = f"{train} --test {test} --qrels q.tsv --model {model} --top-k 2"
    made = facts(program("tools/learn_fusion", words, cwd=toy))
    assert made["claims"] == 40 and made["candidates"] == 120
    run = read(toy / made["made"][0])
    assert run["claim_id"].tolist() == ["a", "a", "b", "b"]
    assert run["abstract_id"].tolist()[::2] == ["h", "h"] and run["rank"].tolist() == [1, 2, 1, 2]
    held_out = read(toy / made["made"][1])
    assert set(held_out["claim_id"]) == set(train_ids)
    assert (held_out.query("rank == 1")["abstract_id"] == "g").all()
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
    held_out = read(toy / made["made"][1])
    first = held_out[(held_out["claim_id"] == "t0") & (held_out["rank"] == 1)]
    assert first["abstract_id"].tolist() == ["g"] and first["score"].item() > 0.99


def test_too_few_claims_and_other_runs_are_refused(toy, program, refused):
    train = runs_of(toy / "train", ["1", "2", "3"])
    tsv(toy / "q.tsv", QRELS, "1|g|SUPPORTS; 2|g|NEI; 3|y|REFUTES; 4|g|SUPPORTS")
    words = f"tools/learn_fusion {train} --qrels q.tsv --test"
    said = "q.tsv: 2 claims have evidence among the candidates"
    refused(toy, *words.split(), *train.split(), said=said, by=program)
    said = "--test: other runs than those to learn from; give a.tsv, b.tsv"
    refused(toy, *words.split(), *train.split()[::-1], said=said, by=program)


# ---------------------------------------------------------------- Disagreement
def test_claims_are_chosen_and_put_back(toy, program, call):
    tsv(toy / "c.tsv", [*CLAIMS, "language"], "1|Ice|en; 2|Sun|de; 3|Sea|en; 4|Air|en")
    tsv(toy / "a.tsv", RUN, "1|x|1|9; 1|y|2|8; 2|x|1|9; 2|y|2|8; 3|x|1|9; 3|z|2|8")
    tsv(toy / "b.tsv", RUN, "1|x|1|9; 1|z|2|8; 2|y|1|9; 2|x|2|8")
    words = "a.tsv b.tsv --claims c.tsv --out d.tsv"
    made = facts(program("tools/disagreement", words, cwd=toy))
    assert made == {"made": ["d.tsv", "d.run.tsv"], "claims": 4, "disputed": 2}
    assert (toy / "d.tsv").read_text() == "claim_id\tclaim\tlanguage\n2\tSun\tde\n3\tSea\ten\n"
    assert read(toy / "d.run.tsv")[RUN[:2]].values.tolist() == [
        *map(list, ("2x", "2y", "3x", "3z"))
    ]
    made = facts(program("tools/disagreement", f"{words} --places 2", cwd=toy))
    assert made["disputed"] == 2  # now 1 and 3: claim 2 has the same two
    tsv(toy / "new.tsv", RUN, "2|y|1|.9; 2|x|2|.1")
    made = facts(program("tools/disagreement", "merge a.tsv new.tsv --out m.tsv", cwd=toy))
    assert made["rows"] == 6 and made["claims_replaced"] == 1
    merged = read(toy / "m.tsv")
    assert merged.query("claim_id == '2'")["abstract_id"].tolist() == ["y", "x"]
    assert merged.query("claim_id == '1'")["score"].tolist() == [9, 8]


def test_the_disputed_claims_go_to_04_alone(toy, program, call):
    hybrid = read(toy / "work/demo/test/hybrid.tsv")
    turned = hybrid.copy()
    is_c4 = turned["claim_id"] == "c4"
    turned.loc[is_c4, "abstract_id"] = hybrid.loc[is_c4, "abstract_id"].tolist()[::-1]
    tsv(toy / "turned.tsv", RUN, turned[RUN].values.tolist())
    facts(program("tools/disagreement", "work/demo/test/hybrid.tsv turned.tsv", cwd=toy))
    at = "work/demo/test/disagreement"
    words = f"--claims {at}.tsv --run {at}.run.tsv --backend none --model m"
    done = call("04_llm_rerank.py", words, cwd=toy)
    assert done.returncode == 3 and '"waiting": 1}' in done.stdout
