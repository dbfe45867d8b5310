"""recipes/train/fit_fusion.py: the best fusion of the grid, its value on unseen claims."""

import shutil

import ir_measures
import numpy as np
import pandas as pd
import pytest
from conftest import KEY, QRELS, RUN, facts, jsonl, load, read, tsv

SCRIPT = "fit_fusion.py"
FUSE = "02_retrieve.py"
KIT = load("recipes/train/fit_fusion.py")
RETRIEVE = KIT.RETRIEVE


def test_a_fitted_fusion_is_the_best_of_the_grid_and_is_applied_elsewhere(toy, call, refused):
    tsv(toy / "a.tsv", RUN, "c1|x|1|9; c1|a|2|8; c1|b|3|7; c2|d|1|5; c2|c|2|4")
    tsv(toy / "b.tsv", RUN, "c1|y|1|4; c1|a|2|3; c2|c|1|2; c2|d|2|1")
    judged = "c1|a|SUPPORTS; c1|q|REFUTES; c2|c|SUPPORTS; c2|d|NEI; c3|z|REFUTES; c4|x|NEI"
    tsv(toy / "q.tsv", QRELS, judged)
    done = call(SCRIPT, "a.tsv b.tsv --qrels q.tsv --out f.json", cwd=toy)
    fusion = facts(done)
    ideal = 1 + 1 / np.log2(3)  # c1 has two, c3 is in no run, c4 has none
    assert fusion["value"] == pytest.approx((1 / ideal + 1) / 3)
    assert sum(fusion["weights"]) == pytest.approx(1) and fusion["runs"] == ["a.tsv", "b.tsv"]
    lines = done.stdout.splitlines()
    # a.tsv has a at rank 2 and c at rank 2, b.tsv has a at rank 2 and c at rank 1
    second_rank = 1 / np.log2(3)
    assert lines[0] == f"{(second_rank / ideal + second_rank) / 3:.4f}  a.tsv alone"
    assert lines[1] == f"{(second_rank / ideal + 1) / 3:.4f}  b.tsv alone"
    assert f"{(1 / ideal + 1) / 3:.4f}  rrf, k = 1, weights (0.4, 0.6)" in lines
    assert "union" not in done.stdout and len(lines) == 2 + 1 + 10 + 1
    # One of three claims is held out each time, as folds are more than claims.
    assert "  in 5-fold cross-validation; the best fusions of all claims:" in lines[2]
    assert fusion["held_out_value"] <= fusion["value"] and fusion["claims"] == 3
    # c4 was judged, but has no evidence: it is in the qrels, and both runs lack c3 and c4
    assert done.stderr.count("warning: ") == 2 and "q.tsv" not in done.stderr
    facts(call(FUSE, "fuse a.tsv b.tsv --fusion f.json --out c.tsv", cwd=toy))
    runs = [read(toy / name) for name in ("a.tsv", "b.tsv")]
    fitted = RETRIEVE.Fusion(fusion["method"], fusion["rrf_k"], fusion["weights"])
    by_hand = RETRIEVE.fuse_runs(runs, fitted, [])
    assert read(toy / "c.tsv")["score"].tolist() == pytest.approx(by_hand["score"].tolist())
    shutil.copy(toy / "b.tsv", toy / "n.tsv")
    jsonl(toy / "other.json", {"runs": ["a.tsv", "n.tsv"]})
    for fusion, said in {
        "f.json": "f.json: it is for a.tsv, b.tsv",
        "a.tsv": "a.tsv: no fusion; make one by recipes/train/fit_fusion.py",
        "other.json": "other.json: no fusion",
    }.items():
        refused(toy, FUSE, f"fuse a.tsv n.tsv --fusion {fusion}", said=said)


@pytest.mark.parametrize("measure", ["MAP", "nDCG", "RR", "Bpref"])
def test_a_measure_without_a_cutoff_is_fitted_on_all_ranks(toy, call, measure):
    far = [("c3", f"n{rank}", rank, -rank) for rank in range(1, 200)]
    tsv(toy / "a.tsv", RUN, [*far, ("c3", "y", 200, -200)])
    tsv(toy / "q.tsv", QRELS, "c3|y|SUPPORTS; c3|n1|NEI")
    words = f"a.tsv --qrels q.tsv --out f.json --measure {measure}"
    value = {"MAP": 1 / 200, "RR": 1 / 200, "nDCG": 1 / np.log2(201), "Bpref": 0}
    fusion = facts(call(SCRIPT, words, cwd=toy))
    assert fusion["value"] == pytest.approx(value[measure])


def test_a_fit_ranks_ties_as_a_fusion_does():
    rng = np.random.default_rng(0)
    runs = []
    for _ in range(3):
        rows = []
        for claim in (f"c{n}" for n in range(20)):
            names = rng.permutation([f"d{n}" for n in range(9)])
            rows += [(claim, name, rank, 1 / rank) for rank, name in enumerate(names, 1)]
        runs.append(pd.DataFrame(rows, columns=RUN))
    pairs = [(f"c{n}", name) for n in range(20) for name in ("d3", "d7")]
    evidence = pd.DataFrame(pairs, columns=KEY).assign(label="SUPPORTS")
    fusions = KIT.all_fusions(3)
    values = KIT.try_fusions(runs, fusions, evidence, ir_measures.MRR @ 9)
    claims = [f"c{n}" for n in range(20)]
    for fusion, found in list(zip(fusions, values))[::9]:
        fused = RETRIEVE.fuse_runs(runs, fusion, [])
        hits = fused["abstract_id"].isin(["d3", "d7"]).to_numpy().reshape(20, 9)
        by_claim = dict(zip(fused["claim_id"].unique(), 1 / (hits.argmax(axis=1) + 1)))
        assert found == pytest.approx([by_claim[claim_id] for claim_id in sorted(claims)])
    weights = np.array([fusion.weights for fusion in fusions if fusion.method == "zscore"])
    assert len(weights) == 66 and np.allclose(weights.sum(axis=1), 1)
    assert weights[0].tolist() in ([0.3, 0.3, 0.4], [0.3, 0.4, 0.3])  # the most even ones first
    assert {fusion.method for fusion in fusions} == {"zscore", "rrf"}  # union has no weights


def test_the_value_of_a_held_out_claim_is_that_of_the_fusion_that_others_choose(monkeypatch):
    values = np.array([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0], [0.6, 0.6, 0.6, 0.6]])
    # Folds of one claim: of the three other claims, two like one of the first two fusions (sum 2,
    # against 1.8), and this one gives the claim that is held out 0.
    monkeypatch.setitem(KIT.held_out_value.__globals__, "FOLDS", 4)
    assert KIT.held_out_value(values) == 0


def test_with_many_claims_the_best_fusions_of_some_are_compared_on_all(toy, call):
    rng = np.random.default_rng(1)
    claims = [f"t{n:02}" for n in range(40)]
    for name in ("a.tsv", "b.tsv"):
        rows = []
        for claim in claims:
            abstracts = rng.permutation(list("uvwxyz"))
            rows += [(claim, key, rank, 9 - rank) for rank, key in enumerate(abstracts, 1)]
        tsv(toy / name, RUN, rows)
    tsv(toy / "q.tsv", QRELS, [(claim, "x", "SUPPORTS") for claim in claims])
    words = "a.tsv b.tsv --qrels q.tsv --out {} --measure RR@3"
    whole = facts(call(SCRIPT, words.format("f.json"), cwd=toy))
    edits = {"COMPARED = 500": "COMPARED = 25"}
    done = call(SCRIPT, words.format("g.json"), cwd=toy, edits=edits)
    assert facts(done)["claims"] == 40 and facts(done)["value"] == pytest.approx(whole["value"])


def test_a_fusion_knows_its_runs_by_their_place_below_the_split(toy, call, refused):
    for split in ("dev", "test"):
        for name in ("x/run.tsv", "y/run.tsv"):
            tsv(toy / "work/demo" / split / name, RUN, "c1|a|1|9; c1|b|2|8")
    tsv(toy / "q.tsv", QRELS, "c1|a|SUPPORTS")
    runs = "work/demo/{0}/x/run.tsv work/demo/{0}/y/run.tsv"
    fusion = facts(call(SCRIPT, f"{runs.format('dev')} --qrels q.tsv --out f.json", cwd=toy))
    assert fusion["runs"] == ["x/run.tsv", "y/run.tsv"]
    facts(call(FUSE, f"fuse {runs.format('test')} --fusion f.json --out o.tsv", cwd=toy))
    other = "work/demo/test/y/run.tsv work/demo/test/x/run.tsv"
    refused(toy, FUSE, f"fuse {other} --fusion f.json", said="f.json: it is for x/run.tsv, y")


def test_a_method_in_the_registry_is_fitted_and_a_measure_that_is_none_is_refused(
    toy, call, refused, monkeypatch
):
    for name, ranks in {"a.tsv": "xyz", "b.tsv": "yx", "c.tsv": "zy"}.items():
        rows = [("c3", key, rank, 9 - rank) for rank, key in enumerate(ranks, 1)]
        tsv(toy / name, RUN, rows)
    tsv(toy / "q.tsv", QRELS, "c3|y|SUPPORTS")
    least = RETRIEVE.Method(RETRIEVE.inverse_rank, np.nanmin, [0])
    methods = {"least": least, **RETRIEVE.METHODS}
    monkeypatch.setattr(RETRIEVE, "METHODS", methods)
    words = "a.tsv b.tsv c.tsv --qrels q.tsv --out f.json --measure"
    assert facts(call(SCRIPT, f"{words} R@5", cwd=toy))["method"] == "least"  # of equal ones
    for measure in ("nDCG10", "R"):
        refused(toy, SCRIPT, f"{words} {measure}", said="--measure: ")
