"""recipes/train/fit_fusion.py: the best fusion of the grid, its value on unseen claims."""

import ir_measures
import numpy as np
import pandas as pd
import pytest
from conftest import QRELS, RUN, facts, jsonl, load, tsv

SCRIPT = "fit_fusion.py"
FUSE = "02_retrieve.py"
KIT = load("recipes/train/fit_fusion.py")
RETRIEVE = KIT.RETRIEVE


def test_a_fitted_fusion_is_the_best_of_the_grid_and_is_applied_elsewhere(toy, call, refused):
    """A fusion knows its runs by their place below the split."""
    rows = {
        "x": "c1|x|1|9; c1|a|2|8; c1|b|3|7; c2|d|1|5; c2|c|2|4",
        "y": "c1|y|1|4; c1|a|2|3; c2|c|1|2; c2|d|2|1",
    }
    for name, text in rows.items():
        for split in ("dev", "test"):
            tsv(toy / f"work/demo/{split}/{name}/run.tsv", RUN, text)
    pairs = "c1|a|SUPPORTS; c1|q|REFUTES; c2|c|SUPPORTS; c2|d|NEI; c3|z|REFUTES; c4|x|NEI"
    tsv(toy / "q.tsv", QRELS, pairs)
    runs = "work/demo/{0}/x/run.tsv work/demo/{0}/y/run.tsv"
    done = call(SCRIPT, f"{runs.format('dev')} --qrels q.tsv --out f.json", cwd=toy)
    fusion = facts(done)
    # In both runs a is at rank 2; c is at rank 2 of the first run, at rank 1 of the second. c1 has
    # two abstracts with evidence, c3 is in no run, c4 has no evidence.
    second_rank = 1 / np.log2(3)
    ideal = 1 + second_rank
    values = [second_rank / ideal + second_rank, second_rank / ideal + 1, 1 / ideal + 1]
    first, second, _, best, *_ = done.stdout.splitlines()
    for value, line in zip(values, (first, second, best)):
        assert line.startswith(f"{value / 3:.4f}  ")
    assert fusion["value"] == pytest.approx(values[2] / 3)
    # One of three claims is held out each time, as folds are more than claims.
    assert fusion["held_out_value"] <= fusion["value"] and fusion["claims"] == 3
    assert done.stderr.count("warning: ") == 2  # both runs lack c3 and c4
    fuse = f"fuse {runs.format('test')} --out o.tsv"
    facts(call(FUSE, f"{fuse} --fusion f.json", cwd=toy))
    fused = (toy / "o.tsv").read_bytes()
    flags = f"--method {fusion['method']} --rrf-k {fusion['rrf_k']} --weights"
    facts(call(FUSE, f"{fuse} {flags}", *fusion["weights"], cwd=toy))
    assert (toy / "o.tsv").read_bytes() == fused
    jsonl(toy / "groups.json", {"runs": ["x/run.tsv", "y/run.tsv"], "groups": {"en": fusion}})
    for name in ("q.tsv", "groups.json"):
        refused(toy, FUSE, f"{fuse} --fusion {name}", said=f"{name}: no fusion of runs; make one")
    refused(toy, FUSE, "fuse q.tsv --fusion f.json", said="it is for x/run.tsv, y/run.tsv; name")


def test_a_measure_without_a_cutoff_is_fitted_on_all_ranks(toy, call, refused):
    tsv(toy / "a.tsv", RUN, [("c3", f"n{rank}", rank, -rank) for rank in range(1, 201)])
    tsv(toy / "q.tsv", QRELS, "c3|n200|SUPPORTS; c3|n1|NEI")
    words = "a.tsv --qrels q.tsv --out f.json --measure"
    values = {"MAP": 1 / 200, "RR": 1 / 200, "nDCG": 1 / np.log2(201), "Bpref": 0}
    for measure, value in values.items():
        fusion = facts(call(SCRIPT, words, measure, cwd=toy))
        assert fusion["value"] == pytest.approx(value)
    refused(toy, SCRIPT, words, "R", said="--measure: ")


CLAIMS = [f"c{n}" for n in range(10, 50)]


def shuffled_runs(count):
    """Return runs that rank the same abstracts for each claim at random."""
    rng = np.random.default_rng(0)
    runs = []
    for _ in range(count):
        rankings = [(claim, rng.permutation(list("abcdefghi"))) for claim in CLAIMS]
        rows = [(claim, key, k, 1 / k) for claim, keys in rankings for k, key in enumerate(keys, 1)]
        runs.append(pd.DataFrame(rows, columns=RUN))
    return runs


def test_a_fit_ranks_ties_as_a_fusion_does():
    runs = shuffled_runs(3)
    evidence = runs[0][runs[0]["abstract_id"].isin(["d", "h"])].assign(label="SUPPORTS")
    fusions = KIT.all_fusions(3)
    values = KIT.try_fusions(runs, fusions, evidence, ir_measures.MRR @ 9)
    for fusion, found in list(zip(fusions, values))[::9]:
        fused = RETRIEVE.fuse_runs(runs, fusion, [])
        hits = fused["abstract_id"].isin(["d", "h"]).to_numpy().reshape(40, 9)
        assert (found == 1 / (hits.argmax(axis=1) + 1)).all()
    # Once for z-scores and for each of four constants of rrf, the most even weights first.
    assert len(fusions) == 5 * 66 and sorted(fusions[0].weights) == [0.3, 0.3, 0.4]


def test_the_value_of_a_held_out_claim_is_that_of_the_fusion_that_others_choose(monkeypatch):
    values = np.array([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0], [0.6, 0.6, 0.6, 0.6]])
    # Folds of one claim: of the three other claims, two like one of the first two fusions (sum 2,
    # against 1.8), and this one gives the claim that is held out 0.
    monkeypatch.setitem(KIT.held_out_value.__globals__, "FOLDS", 4)
    assert KIT.held_out_value(values) == 0


def test_with_many_claims_the_best_fusions_of_some_are_compared_on_all(toy, call):
    for name, run in zip("ab", shuffled_runs(2)):
        RETRIEVE.write_table(run, toy / f"{name}.tsv")
    tsv(toy / "q.tsv", QRELS, [(claim, "d", "SUPPORTS") for claim in CLAIMS])
    words = "a.tsv b.tsv --qrels q.tsv --out f.json --measure RR@3"
    whole = facts(call(SCRIPT, words, cwd=toy))
    some = facts(call(SCRIPT, words, "--force", cwd=toy, edits={"= 500": "= 25"}))
    assert some["claims"] == 40 and some["value"] == pytest.approx(whole["value"])
