"""06_evaluate.py: every formula against arithmetic by hand and against independent implementations, and the whole script."""
import itertools
import json
import re
import runpy
import shutil
import subprocess
import zipfile

import ir_measures
import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, tsv
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import precision_recall_fscore_support

SCRIPT = "06_evaluate.py"
KIT = runpy.run_path(str(ROOT / SCRIPT))
RUN = ["claim_id", "abstract_id", "rank", "score"]
QRELS = ["claim_id", "abstract_id", "label"]
LABELS = {"S": "SUPPORTS", "R": "REFUTES", "N": "NEI"}

def run_of(**ranked):
    """A run from claim="abstracts in order of rank"."""
    rows = [(claim, name, rank, 1 / rank) for claim, names in ranked.items() for rank, name in enumerate(names.split(), 1)]
    return pd.DataFrame(rows, columns=RUN)

def qrels_of(**judged):
    """Qrels from claim="a:S b:N", S, R and N for the three labels."""
    rows = [(claim, *pair.split(":")) for claim, pairs in judged.items() for pair in pairs.split()]
    return pd.DataFrame([(claim, name, LABELS[label]) for claim, name, label in rows], columns=QRELS)

def verdicts_of(**said):
    """Verdicts from claim="a:S b:N", in order of rank."""
    ranked = {claim: " ".join(pair.split(":")[0] for pair in pairs.split()) for claim, pairs in said.items()}
    return run_of(**ranked).assign(label=[LABELS[pair.split(":")[1]] for pairs in said.values() for pair in pairs.split()])

def measure(run, qrels, *names, depth=10):
    """The script's own numbers for one run, as floats."""
    names = KIT["columns_of"](names)
    parts, _ = KIT["parts_of"](run, qrels, KIT["gold_of"](qrels), names, depth)
    table, order = KIT["packed"](parts)
    return {name: float(value) for name, value in KIT["measures_of"](table.sum(0), order, names).items()}

# ----------------------------------------------------------- By hand
def test_recall_is_the_share_of_the_relevant_among_the_first_k():
    qrels = qrels_of(p="a:S b:R c:S n:N")
    assert measure(run_of(p="a x b"), qrels, "R@2", "R@10") == {"R@2": 1 / 3, "R@10": 2 / 3}

def test_bpref_divides_the_capped_count_by_r():
    # R = 2: a after one non-relevant, b after three, which count as two: ((1 - 1/2) + (1 - 2/2)) / 2
    assert measure(run_of(p="n a m o b"), qrels_of(p="a:S b:S n:N m:N o:N"), "B-Pref") == {"B-Pref": (1 / 2 + 0) / 2}
    # unjudged abstracts do not count; a relevant one that was not retrieved adds nothing
    assert measure(run_of(p="u a v"), qrels_of(p="a:S b:S c:S n:N"), "B-Pref") == {"B-Pref": pytest.approx(1 / 3)}

def test_the_two_b_prefs_differ_where_few_are_judged_non_relevant():
    # R = 3, N = 1: behind that one the organisers give 1 - 1/3, trec_eval 1 - 1/min(3, 1) = 0
    found = measure(run_of(p="a n b c"), qrels_of(p="a:S b:S c:R n:N"), "B-Pref", "B-Pref (trec_eval)")
    assert found == pytest.approx({"B-Pref": (1 + 2 / 3 + 2 / 3) / 3, "B-Pref (trec_eval)": 1 / 3})

def test_a_claim_without_rows_counts_0_in_recall_and_not_at_all_in_bpref():
    row = measure(run_of(p="a n"), qrels_of(p="a:S n:N", q="b:R m:N"), "R@2", "B-Pref")
    assert row == {"R@2": (1 + 0) / 2, "B-Pref": 1.0}

def test_claims_with_only_nei_or_without_nei_are_left_out_where_undefined():
    qrels = qrels_of(only_nei="a:N b:N", no_nei="a:S", both="a:S n:N")
    row = measure(run_of(only_nei="a b", no_nei="x a", both="n a"), qrels, "R@2", "B-Pref")
    assert row == {"R@2": (1 + 1) / 2, "B-Pref": 0.0}

def test_what_lies_beyond_the_depth_is_not_submitted():
    # R = 2: at depth 2 only a counts; at depth 3 b too, behind one non-relevant
    run, qrels = verdicts_of(p="a:S n:S b:S"), qrels_of(p="a:S b:S n:N")
    names = ("B-Pref", "P", "R", "F1", "R@3", "MRR@3", "Judged@3", "B-Pref@3", "AP", "abstract R")
    two, three, everything = (measure(run, qrels, *names, depth=depth) for depth in (2, 3, 0))
    assert (two["B-Pref"], three["B-Pref"]) == (1 / 2, (1 + 1 / 2) / 2) and everything == three
    # gold S N, said S S: class S has P 1/2, R 1, F1 2/3, class N nothing; each is half of the support
    assert (two["P"], two["R"], two["F1"]) == pytest.approx((1 / 2 * 1 / 2, 1 / 2, 1 / 2 * 2 / 3))
    assert three["R"] == pytest.approx(2 / 3)
    assert all(two[name] == three[name] for name in names[4:]) and two["R@3"] == two["abstract R"] == 1

def test_b_pref_at_k_looks_at_k_ranks_whatever_the_depth():
    run, qrels = run_of(p="a n b"), qrels_of(p="a:S b:S n:N")
    assert measure(run, qrels, "B-Pref@1", "B-Pref@3", "B-Pref", depth=1) == {
        "B-Pref@1": 1 / 2, "B-Pref@3": 3 / 4, "B-Pref": 1 / 2}

def test_every_name_of_one_measure_has_its_value():
    run, qrels = run_of(p="x a", q="b"), qrels_of(p="a:S", q="b:S n:N")
    row = measure(run, qrels, "trec", "AP", "MRR", "Bpref", "NDCG@10")
    assert row["MAP"] == row["AP"] == row["RR"] == row["MRR"] == (1 / 2 + 1) / 2
    assert row["B-Pref (trec_eval)"] == row["Bpref"] == 1 and row["nDCG@10"] == row["NDCG@10"] > 0

def test_err_needs_no_numbers_as_claim_ids():
    # Chapelle et al. 2009, grades up to 4: a hit stops the reader with (2**1 - 1) / 2**4
    row = measure(run_of(**{"a-1": "x a", "b-1": "b"}), qrels_of(**{"a-1": "a:S", "b-1": "b:S"}), "ERR@10")
    assert row["ERR@10"] == pytest.approx((1 / 16 / 2 + 1 / 16) / 2, abs=1e-5)

def test_subtask_one_is_the_mean_of_four():
    row = measure(run_of(p="a n b"), qrels_of(p="a:S b:R n:N"), "climatecheck2025")
    # R = 2; a at rank 1, b at rank 3 after one non-relevant
    assert (row["R@2"], row["R@5"], row["R@10"], row["B-Pref"]) == (1 / 2, 1, 1, (1 + 1 / 2) / 2)
    assert row["Subtask I"] == pytest.approx((0.5 + 1 + 1 + 0.75) / 4)
    assert np.isnan(row["F1"]) and np.isnan(row["Subtask II"])

def test_stance_is_weighted_by_support_over_judged_pairs():
    # gold S S R N; said S N R N, and one pair that is not judged.
    # S: P 1/1 R 1/2 F1 2/3; R: 1, 1, 1; N: P 1/2 R 1/1 F1 2/3. Weights 2/4, 1/4, 1/4.
    row = measure(verdicts_of(p="a:S b:N c:R d:N x:S"), qrels_of(p="a:S b:S c:R d:N"), "climatecheck2025")
    assert row["P"] == pytest.approx(2 / 4 * 1 + 1 / 4 * 1 + 1 / 4 * 1 / 2)
    assert row["R"] == pytest.approx(2 / 4 * 1 / 2 + 1 / 4 + 1 / 4)
    assert row["F1"] == pytest.approx(2 / 4 * 2 / 3 + 1 / 4 + 1 / 4 * 2 / 3)
    assert row["Subtask II"] == pytest.approx(row["F1"] + 1)
    assert row["Judged@10"] == 4 / 5

def test_2026_counts_recall_at_5_and_bpref():
    row = measure(verdicts_of(p="n:N a:S"), qrels_of(p="a:S n:N"), "climatecheck2026")
    assert row["Retrieval 2026"] == pytest.approx((1 + 0) / 2)
    assert row["Verification 2026"] == pytest.approx(1 + 1)

def test_mrr_counts_the_first_relevant_within_k():
    row = measure(run_of(p="x a b", q="a"), qrels_of(p="a:S b:S", q="b:S"), "checkthat")
    assert row == {"MRR@1": 0, "MRR@5": 1 / 4, "MRR@10": 1 / 4, "R@5": 1 / 2, "R@10": 1 / 2}

def test_pooled_recall_weighs_pairs_and_plain_recall_weighs_claims():
    row = measure(run_of(p="a", q="d e f"), qrels_of(p="a:S", q="b:S c:R d:S"), "pooled R@10", "R@10")
    assert row == {"pooled R@10": 2 / 4, "R@10": (1 + 1 / 3) / 2}

def test_scifact_abstract_level_counts_unjudged_evidence_as_wrong():
    # called evidence: a, b, x; right with its label: a; gold evidence: a, b, c
    row = measure(verdicts_of(p="a:S b:S n:N x:R"), qrels_of(p="a:S b:R c:S n:N"), "verirel")
    assert (row["abstract P"], row["abstract R"], row["abstract F1"]) == (1 / 3, 1 / 3, 1 / 3)

def test_condensed_lists_close_the_gaps_of_what_nobody_judged():
    run, qrels = run_of(p="x a y b"), qrels_of(p="a:S b:S")
    names = KIT["columns_of"](["R@2", "MRR@5"], condensed=True)
    assert names == ["R@2", "MRR@5", "R@2 condensed", "MRR@5 condensed"]
    assert measure(run, qrels, *names) == {"R@2": 1 / 2, "MRR@5": 1 / 2, "R@2 condensed": 1, "MRR@5 condensed": 1}

# ----------------------------------------------------------- Independent implementations
def literal(run, qrels):
    """The organisers' arithmetic, step by step, as README states it in words."""
    recalls, bprefs = {2: [], 5: [], 10: []}, []
    for claim in dict.fromkeys(qrels["claim_id"]):
        gold = {name: label for c, name, label in qrels.values.tolist() if c == claim}
        relevant = [name for name in gold if gold[name] in ("SUPPORTS", "REFUTES")]
        rows = sorted((rank, name) for c, name, rank in run[RUN[:3]].values.tolist() if c == claim)
        if relevant:
            for k in recalls:
                recalls[k].append(sum(1 for rank, name in rows if rank <= k and name in relevant) / len(relevant))
        if rows and relevant and len(relevant) < len(gold):
            n, total = 0, 0.0
            for _, name in rows:
                if gold.get(name) == "NEI" and n < len(relevant):
                    n += 1
                if name in relevant:
                    total += 1 - n / len(relevant)
            bprefs.append(total / len(relevant))
    return [sum(values) / len(values) if values else np.nan for values in (*recalls.values(), bprefs)]

@st.composite
def judged_runs(draw):
    """Verdicts and qrels of up to six claims: claims without rows, with only NEI, short runs, unjudged abstracts."""
    names, labels = [f"d{place}" for place in range(14)], st.sampled_from(list(LABELS.values()))
    qrels, rows = [], []
    for claim in (f"c{place}" for place in range(draw(st.integers(1, 6)))):
        judged = draw(st.lists(st.sampled_from(names), min_size=1, max_size=8, unique=True))
        qrels += [(claim, name, draw(labels)) for name in judged]
        ranked = draw(st.lists(st.sampled_from(names), max_size=14, unique=True))
        rows += [(claim, name, rank, -rank, draw(labels)) for rank, name in enumerate(ranked, 1)]
    return pd.DataFrame(rows, columns=[*RUN, "label"]), pd.DataFrame(qrels, columns=QRELS)

@settings(max_examples=80, deadline=None)
@given(judged_runs())
def test_the_organisers_measures_equal_the_literal_transcription(case):
    found = measure(*case, "R@2", "R@5", "R@10", "B-Pref", depth=0)
    assert list(found.values()) == pytest.approx(literal(*case), nan_ok=True)
    run, qrels = case
    found = measure(run, qrels, "R@2", "R@5", "R@10", "B-Pref")
    assert list(found.values()) == pytest.approx(literal(run[run["rank"] <= 10], qrels), nan_ok=True)

@settings(max_examples=80, deadline=None)
@given(judged_runs())
def test_stance_equals_scikit_learn(case):
    run, qrels = case
    both = run.merge(qrels, on=QRELS[:2], suffixes=("", "_gold"))
    found = measure(run, qrels, "P", "R", "F1", depth=0)
    if len(both):
        expected = precision_recall_fscore_support(both["label_gold"], both["label"], average="weighted", zero_division=0)
        assert list(found.values()) == pytest.approx(expected[:3])
    else:
        assert np.isnan(list(found.values())).all()

@settings(max_examples=80, deadline=None)
@given(judged_runs())
def test_standard_measures_equal_ir_measures(case):
    run, qrels = case
    theirs = qrels.assign(relevance=(qrels["label"] != "NEI").astype(int)), run.assign(score=-run["rank"].astype(float))
    theirs = [table.rename(columns={"claim_id": "query_id", "abstract_id": "doc_id"}) for table in theirs]
    names = ("nDCG@10", "AP", "RR", "Bpref", "Judged@10", "P@5")
    expected = ir_measures.calc_aggregate([ir_measures.parse_measure(name) for name in names], *theirs)
    found = measure(run, qrels, "trec", "P@5")
    assert list(found.values()) == pytest.approx([expected[ir_measures.parse_measure(name)] for name in (
        "nDCG@10", "AP", "RR", "Bpref", "Judged@10", "P@5")])
    # over the claims that have evidence, our own ones are theirs, too
    known = set(qrels["claim_id"][qrels["label"] != "NEI"])
    if known:
        ours = measure(run, qrels, "R@5", "MRR@5", "Success@3", "R@5 condensed", "MRR@14 condensed")
        some = [table[table["query_id"].isin(known)] for table in theirs]
        wanted = [ir_measures.parse_measure(name) for name in (
            "R@5", "RR@5", "Success@3", "R(judged_only=True)@5", "RR(judged_only=True)")]
        values = ir_measures.calc_aggregate(wanted, *some)
        assert list(ours.values()) == pytest.approx([values[name] for name in wanted])

# ----------------------------------------------------------- Comparison
def random_parts(seed, claims=30, runs=3):
    """Parts of several runs on random judgements, and the names of the measures."""
    rng, names = np.random.default_rng(seed), ["R@5", "B-Pref", "F1", "Subtask II", "R@10"]
    qrels = pd.DataFrame([(f"c{c}", f"d{d}", rng.choice(list(LABELS.values()))) for c in range(claims)
                          for d in rng.choice(20, 7, replace=False)], columns=QRELS)
    gold = KIT["gold_of"](qrels)
    return {f"run{one}": KIT["parts_of"](pd.DataFrame(
        [(f"c{c}", f"d{d}", rank, -rank, rng.choice(list(LABELS.values()))) for c in range(claims)
         for rank, d in enumerate(rng.permutation(20)[:12], 1)], columns=[*RUN, "label"]), qrels, gold, names)[0]
        for one in range(runs)}, names

def test_intervals_equal_scipys_bootstrap_within_chance():
    parts, names = random_parts(1, claims=60)
    cells = KIT["compare"](parts, names, 4000, 13).set_index(["run", "measure"])
    for name in ("R@5", "B-Pref"):
        part = parts["run1"][name]
        values = (part[0] / np.where(part[1] > 0, part[1], 1))[part[1] > 0]
        theirs = stats.bootstrap((values,), np.mean, n_resamples=4000, method="percentile", rng=5).confidence_interval
        assert tuple(cells.loc[("run1", name), ["low", "high"]]) == pytest.approx(tuple(theirs), abs=0.012)

def test_randomisation_equals_all_swaps_counted_out():
    parts, names = random_parts(2, claims=8, runs=2)
    cells = KIT["compare"](parts, names, 20_000, 13).set_index(["run", "measure"])
    tables = [KIT["packed"](parts[run])[0] for run in parts]
    order = KIT["packed"](parts["run0"])[1]
    for name in names:  # 256 ways to swap eight claims, composed scores and F1 included
        apart = []
        for swapped in itertools.product((False, True), repeat=8):
            pair = [np.where(np.array(swapped)[:, None], *turn) for turn in (tables, tables[::-1])]
            values = [KIT["measures_of"](table.sum(0), order, names)[name] for table in pair]
            apart.append(abs(values[0] - values[1]))
        exact = np.mean(np.array(apart) >= apart[0] - 1e-12)
        assert cells.loc[("run1", name), "p_randomisation"] == pytest.approx(exact, abs=0.02)

def test_wilcoxon_is_scipys_on_the_claims_that_both_count():
    ours, theirs = ((np.array([1, .5, 0, .2, .9, .4]), np.array([1, 1, 1, 1, 1, 0.])),
                    (np.array([.5, .25, .1, .1, .3, .9]), np.array([1, 1, 1, 1, 1, 1.])))
    expected = stats.wilcoxon([.5, .25, -.1, .1, .6]).pvalue
    assert KIT["wilcoxon"](ours, theirs) == pytest.approx(expected)
    assert KIT["wilcoxon"](ours, ours) == 1.0

def test_mcnemar_is_the_binomial_test_of_the_claims_that_differ():
    this, that = (np.array([1, 1, 1, 1, 0, 1, 0]), np.ones(7)), (np.array([0, 0, 0, 0, 1, 1, 0]), np.ones(7))
    assert KIT["mcnemar"](this, that) == pytest.approx(2 * (1 + 5) / 2**5)  # 4 against 1 of 5: two tails
    assert KIT["mcnemar"](this, this) == 1.0

def test_holm_steps_down_and_never_up():
    assert KIT["holm"]([0.01, 0.04, 0.03, np.nan]) == pytest.approx([0.03, 0.06, 0.06, np.nan], nan_ok=True)

def test_the_first_run_is_compared_with_nothing_and_equal_runs_do_not_differ():
    parts, names = random_parts(3, runs=1)
    cells = KIT["compare"]({"a": parts["run0"], "b": parts["run0"]}, names, 200, 13).set_index(["run", "measure"])
    assert cells.loc["a"][["difference", "p_randomisation", "p_wilcoxon"]].isna().all(axis=None)
    assert (cells.loc["b"]["p_randomisation"] == 1).all() and cells.loc[("b", "Success@1"), "p_mcnemar"] == 1

# ----------------------------------------------------------- Tables and curves
def test_best_is_bold_second_italic_and_folders_stand_together():
    cells = pd.DataFrame([(run, name, value, value - .1, value + .1, p) for run, name, value, p in [
        ("x/bm25", "R@5", .1, np.nan), ("x/all_runs", "R@5", .3, .01), ("y/all", "R@5", .2, .2),
        ("x/bm25", "F1", np.nan, np.nan), ("x/all_runs", "F1", .5, np.nan), ("y/all", "F1", .5, np.nan)]],
        columns=["run", "measure", "value", "low", "high", "p_holm"])
    page = KIT["markdown"](cells, ["R@5", "F1"]).splitlines()
    assert page[2:7] == ["| *x* |  |  |", "| bm25 | 0.100 | - |", "| all_runs | **0.300**† | 0.500 |", "| *y* |  |  |",
                         "| all | *0.200* | 0.500 |"]
    page = KIT["latex"](cells, ["R@5", "F1"])
    assert r"all\_runs & \textbf{0.300}$^\dagger$ & 0.500 \\" in page and page.count(r"\midrule") == 2
    assert "0.300*" in KIT["show"](cells, ["R@5", "F1"]) and "p < 0.05" in KIT["show"](cells, ["R@5", "F1"])

def test_curves_give_recall_and_first_evidence_by_depth():
    qrels = qrels_of(p="a:S b:S", q="c:R")
    gold = KIT["gold_of"](qrels)
    found, _ = KIT["judge"](run_of(p="x a b", q="y z w c u"), gold)
    assert KIT["curves"](found, gold) == [(1, 0, 0), (2, 1 / 4, 1 / 2), (3, 1 / 2, 1 / 2), (5, 1, 1)]

def test_runs_that_differ_in_a_number_at_the_end_are_a_sweep():
    runs = ["llm.alpha-0.4", "llm.alpha-0", "llm.alpha-0.2", "depth-20", "depth-5", "x.1", "x.2", "x.3", "bm25"]
    assert KIT["sweeps"](runs) == {"llm.alpha": {"llm.alpha-0": 0, "llm.alpha-0.2": 0.2, "llm.alpha-0.4": 0.4}}

def test_side_by_side_tells_what_moved_and_which_evidence_was_lost():
    first, second = {"p": [("a",), ("b",), ("c",)]}, {"p": [("b", "NEI"), ("d", "SUPPORTS"), ("a", "NEI")]}
    tops, losses = KIT["side_by_side"]([first, second], "p", {("p", "a"): "REFUTES", ("p", "c"): "NEI"}, depth=2)
    assert tops[1] == [["b", 1, "", "NEI", "↑1"], ["d", 2, "", "SUPPORTS", "new"]]
    assert losses == [[], [["a", 1, "REFUTES", "", "→ 3"]]]

# ----------------------------------------------------------- The whole script
def test_table_json_and_last_line_agree_and_keep_the_order_given(toy, run):
    tsv(toy / "b.tsv", RUN, [("c3", "0003", 1, 2), ("c3", "0001", 2, 1)])
    tsv(toy / "a.tsv", [*RUN, "label"], [("c4", "0004", 1, 2, "Refutes"), ("c5", "0009", 1, 2, "nei")])
    call = (SCRIPT, "b.tsv", "a.tsv", "--out", "out/m.tsv", "--measures", "climatecheck2025", "climatecheck2026")
    done = run(*call, cwd=toy)
    assert done.returncode == 0, done.stderr
    table = pd.read_csv(toy / "out/m.tsv", sep="\t")
    values = json.loads((toy / "out/m.json").read_text())
    assert table["run"].tolist() == list(values) == ["b", "a"]
    assert json.loads(done.stdout.splitlines()[-1])["runs"] == values
    assert values["b"]["R@2"] == pytest.approx((1 / 2 + 0 + 0) / 3)
    assert values["a"]["R@5"] == pytest.approx((0 + 1 / 2 + 0) / 3)
    assert values["a"]["F1"] == 1.0 and "F1" not in values["b"]
    assert "2 claims of the qrels have no row" in done.stderr and "1 claims of the qrels have no row" in done.stderr
    again = run(*call, cwd=toy)
    assert "up to date" in again.stdout and json.loads(again.stdout.splitlines()[-1])["runs"] == values

def test_trec_files_give_the_same_numbers(toy, run):
    assert run(SCRIPT, "work/demo/test/hybrid.tsv", "--out", "tsv.tsv", cwd=toy).returncode == 0
    frame = pd.read_csv(toy / "work/demo/test/hybrid.tsv", sep="\t", dtype=str)
    lines = [f"{c} Q0 {a} {r} {s} kit" for c, a, r, s in frame.values.tolist()]
    (toy / "hybrid.trec").write_text("\n".join(reversed(lines)) + "\n")
    qrels = pd.read_csv(toy / "data/demo/qrels.test.tsv", sep="\t", dtype=str)
    (toy / "gold.trec").write_text("".join(f"{c} 0 {a} {int(label != 'NEI')}\n" for c, a, label in qrels.values.tolist()))
    done = run(SCRIPT, "hybrid.trec", "--qrels", "gold.trec", "--out", "trec.tsv", cwd=toy)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((toy / name).read_text())["hybrid"] for name in ("tsv.json", "trec.json"))
    assert first == second

def test_without_runs_those_of_the_pipeline_are_taken_in_its_order(toy, run):
    for name in ("verdicts", "bm25"):
        tsv(toy / f"work/demo/test/{name}.tsv", RUN, [("c3", "0001", 1, 1)])
    done = run(SCRIPT, cwd=toy)
    assert list(json.loads(done.stdout.splitlines()[-1])["runs"]) == ["bm25", "hybrid", "verdicts"]

def test_bom_crlf_and_tabs_in_quotes_are_read(toy, run):
    (toy / "r.tsv").write_bytes(b'\xef\xbb\xbfclaim_id\tabstract_id\trank\tscore\tnote\r\nc3\t0001\t1\t0.5\t"a\tb"\r\n')
    (toy / "data/demo/qrels.test.tsv").write_bytes(b"\xef\xbb\xbfclaim_id\tabstract_id\tlabel\r\nc3\t0001\tSUPPORTS\r\n")
    done = run(SCRIPT, "r.tsv", cwd=toy)
    assert json.loads(done.stdout.splitlines()[-1])["runs"]["r"]["R@2"] == 1.0

def test_an_ablation_is_a_folder_of_runs_in_the_order_of_their_names(toy, run):
    for name in ("2 with dense/b", "1 lexical/bm25", "2 with dense/a"):
        tsv(toy / "ablation" / f"{name}.tsv", RUN, [("c3", "0001", 1, 1)])
    for _ in range(2):  # its own outputs are no runs
        done = run(SCRIPT, "--ablation", "ablation", "--out", "ablation/metrics.tsv", "--force", cwd=toy)
        assert done.returncode == 0, done.stderr
        names = list(json.loads(done.stdout.splitlines()[-1])["runs"])
        assert names == ["1 lexical/bm25", "2 with dense/a", "2 with dense/b"]
    assert "| *2 with dense* |" in (toy / "ablation/metrics.md").read_text()
    assert (toy / "ablation/metrics.tex").read_text().count(r"\midrule") == 2

def test_cells_claims_and_curves_lie_beside_the_table(toy, run):
    tsv(toy / "b.tsv", RUN, [("c3", "0003", 1, 2), ("c3", "0001", 2, 1)])
    assert run(SCRIPT, "work/demo/test/hybrid.tsv", "b.tsv", "--out", "m.tsv", "--resamples", 200, cwd=toy).returncode == 0
    cells, claims, curves = (pd.read_csv(toy / f"m.{name}.tsv", sep="\t") for name in ("cells", "claims", "curves"))
    table = pd.read_csv(toy / "m.tsv", sep="\t").set_index("run")
    for row in cells[cells["measure"].isin(table.columns)].itertuples():
        assert row.value == pytest.approx(table.loc[row.run, row.measure])
        assert row.low - 1e-9 <= row.value <= row.high + 1e-9
    assert claims.groupby("run")["R@5"].mean().to_dict() == pytest.approx(table["R@5"].to_dict())
    assert set(curves["run"]) == {"hybrid", "b"} and list(curves.columns) == ["run", "k", "recall", "success"]
    meta = json.loads((toy / "m.cells.tsv.meta.json").read_text())
    assert meta["counts"]["b"]["claims_missing"] == 2 and meta["counts"]["b"]["judged_pairs"] == 2

# ----------------------------------------------------------- Other people's formats
def test_a_climatecheck_submission_scored_against_its_gold_csv_gives_the_same_numbers(toy, run):
    qrels = pd.read_csv(toy / "data/demo/qrels.test.tsv", sep="\t", dtype=str)
    named = {"SUPPORTS": "Supports", "REFUTES": "Refutes", "NEI": "Not Enough Information"}
    gold = qrels.assign(annotation=qrels["label"].map(named)).rename(columns={"abstract_id": "abstract_original_index"})
    gold[["claim_id", "abstract_original_index", "annotation"]].to_csv(toy / "gold.csv", index=False)
    hybrid = pd.read_csv(toy / "work/demo/test/hybrid.tsv", sep="\t", dtype=str)
    labelled = hybrid.assign(label="supports")
    labelled[["claim_id", "abstract_id", "rank", "label"]].to_csv(toy / "theirs.csv", index=False)
    labelled.assign(label="SUPPORTS").to_csv(toy / "ours.tsv", sep="\t", index=False)
    first, second = run(SCRIPT, "theirs.csv", "--qrels", "gold.csv", cwd=toy), run(SCRIPT, "ours.tsv", cwd=toy)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    ours, theirs = (json.loads(done.stdout.splitlines()[-1])["runs"] for done in (second, first))
    assert theirs["theirs"] == ours["ours"] and theirs["theirs"]["F1"] > 0

def test_checkthat_lists_and_gold_are_read(toy, run):
    (toy / "preds.tsv").write_text("post_id\tpreds\n16\t['x1', 'x2', 'x3']\n7\t[\"x9\", \"x2\"]\n")
    (toy / "gold.tsv").write_text("post_id\ttweet_text\tcord_uid\n16\tso true\tx2\n7\tno way\tx9\n5\twell\tx1\n")
    done = run(SCRIPT, "preds.tsv", "--qrels", "gold.tsv", "--measures", "checkthat", cwd=toy)
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout.splitlines()[-1])["runs"]["preds"]
    assert values == pytest.approx({"MRR@1": 1 / 3, "MRR@5": 1.5 / 3, "MRR@10": 1.5 / 3, "R@5": 2 / 3, "R@10": 2 / 3})

def test_an_abstract_twice_in_a_list_is_refused(toy, run, contents, refused):
    (toy / "preds.tsv").write_text("post_id\tpreds\nc4\t['0001']\nc3\t['0001', '0002', '0001']\n")
    before = contents(toy)
    refused(run(SCRIPT, "preds.tsv", cwd=toy), before, toy, "preds.tsv:3:", "twice")

@pytest.mark.parametrize(("name", "text", "words"), [
    ("r.csv", "claim_id,abstract_id,rank\nc3,0001,1,Supports\n", ["r.csv:1:", "more fields than the header"]),
    ("r.csv", "claim_id,abstract_id,rank,label,annotation\nc3,0001,1,NEI,NEI\n", ["r.csv:1:", "two columns mean label"]),
    ("r.csv", "claim_id,abstract_id,abstract_original_index,rank\nc3,0001,0001,1\n", ["r.csv:1:", "abstract_id"]),
    ("preds.tsv", "post_id\tpreds\nc4\t['0001']\nc3\t['0001']\nc4\t['0002']\n", ["preds.tsv:4:", "c4 stands twice"]),
])
def test_tables_that_could_be_misread_are_refused(toy, run, contents, refused, name, text, words):
    (toy / name).write_text(text)
    before = contents(toy)
    refused(run(SCRIPT, name, cwd=toy), before, toy, *words)

def test_a_format_can_be_forced(toy, run):
    (toy / "r.csv").write_text("claim_id,abstract_id,rank\nc3,0001,1\n")
    assert run(SCRIPT, "r.csv", "--format", "climatecheck", cwd=toy).returncode == 0
    for job in ([], ["submission"]):
        done = run(SCRIPT, *job, "r.csv", "--format", "tsv", cwd=toy)
        assert done.returncode == 2 and "r.csv:1:" in done.stderr

def test_ranks_win_over_scores_and_that_is_said(toy, run):
    tsv(toy / "r.tsv", RUN, [("c3", "0001", 1, 0.1), ("c3", "0003", 2, 0.9)])
    done = run(SCRIPT, "r.tsv", "--measures", "MRR@1", cwd=toy)
    assert "1 claims have scores that rise with the rank" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["runs"]["r"] == {"MRR@1": pytest.approx(1 / 3)}

def test_a_run_that_is_hardly_judged_gets_a_warning(toy, run):
    tsv(toy / "r.tsv", RUN, [("c3", f"x{rank}", rank, -rank) for rank in range(1, 10)] + [("c3", "0001", 10, -10)])
    assert "of its first 10 are judged" in run(SCRIPT, "r.tsv", cwd=toy).stderr

# ----------------------------------------------------------- Pool, merge, submission
def test_what_was_pooled_and_labelled_is_merged_into_the_qrels(toy, run):
    tsv(toy / "a.tsv", RUN, [("c3", "0001", 1, 3), ("c3", "0011", 2, 2), ("c3", "0012", 3, 1), ("c4", "0012", 1, 1)])
    tsv(toy / "b.tsv", RUN, [("c3", "0012", 1, 3), ("c3", "0010", 2, 2), ("c3", "0011", 3, 1)])
    done = run(SCRIPT, "pool", "a.tsv", "b.tsv", "--min-runs", 2, "--depth", 3, "--top", 1, "--out", "pool.tsv", cwd=toy)
    assert done.returncode == 0, done.stderr
    pool = pd.read_csv(toy / "pool.tsv", sep="\t", dtype=str, keep_default_na=False)
    judged = pd.read_csv(toy / "data/demo/qrels.test.tsv", sep="\t", dtype=str).values.tolist()
    wanted = [pair for pair in (["c3", "0011"], ["c3", "0012"], ["c4", "0012"]) if pair not in [row[:2] for row in judged]]
    assert pool[QRELS[:2]].values.tolist() == wanted and len(wanted) > 1
    assert (pool["label"] == "").all() and (pool["abstract"] != "").all() and (pool["claim"] != "").all()
    pool.loc[0, "label"] = "Not Enough Information"
    pool.to_csv(toy / "labelled.tsv", sep="\t", index=False)
    done = run(SCRIPT, "merge", "labelled.tsv", "--out", "more.tsv", cwd=toy)
    assert done.returncode == 0, done.stderr
    merged = pd.read_csv(toy / "more.tsv", sep="\t", dtype=str).values.tolist()
    assert sorted(merged) == sorted([*judged, [*wanted[0], "NEI"]])
    assert json.loads(done.stdout.splitlines()[-1]) | {"seconds": 0, "peak_mib": 0} == {
        "made": ["more.tsv"], "added": 1, "without_label": len(wanted) - 1, "seconds": 0, "peak_mib": 0}
    again = run(SCRIPT, "merge", "labelled.tsv", "--qrels", "more.tsv", "--out", "same.tsv", cwd=toy)
    assert json.loads(again.stdout.splitlines()[-1])["added"] == 0

def test_labels_of_texts_with_carriage_returns_are_merged(toy, run):
    records = [json.loads(line) for line in (toy / "data/demo/corpus.jsonl").read_text().splitlines()]
    texts = {record["abstract_id"]: record | {"title": "a\rb", "abstract": "one\rtwo\r\nthree"} for record in records}
    (toy / "data/demo/corpus.jsonl").write_text("".join(json.dumps(record) + "\n" for record in texts.values()))
    tsv(toy / "a.tsv", RUN, [("c3", "0011", 1, 2), ("c3", "0012", 2, 1)])
    assert run(SCRIPT, "pool", "a.tsv", "--out", "pool.tsv", cwd=toy).returncode == 0
    text = (toy / "pool.tsv").read_bytes().decode()
    assert "\r" not in text and "one\ntwo\nthree" in text and "a\nb" in text
    (toy / "pool.tsv").write_text(text.replace("\t\t1\t", "\tREFUTES\t1\t"))
    done = run(SCRIPT, "merge", "pool.tsv", "--out", "more.tsv", cwd=toy)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["added"] == 2

def test_relevance_without_a_stance_is_not_merged(toy, run, contents, refused):
    (toy / "gold.trec").write_text("c3 0 0001 0\nc3 0 0002 1\n")
    tsv(toy / "pool.tsv", QRELS, [("c3", "0011", "REFUTES")])
    before = contents(toy)
    refused(run(SCRIPT, "merge", "pool.tsv", "--qrels", "gold.trec", cwd=toy), before, toy, "gold.trec:2:", "stance")

def test_a_label_that_contradicts_the_qrels_is_named_and_refused(toy, run, contents, refused):
    claim, name, label = pd.read_csv(toy / "data/demo/qrels.test.tsv", sep="\t", dtype=str).iloc[0]
    tsv(toy / "pool.tsv", QRELS, [(claim, name, "REFUTES" if label != "REFUTES" else "NEI")])
    before = contents(toy)
    refused(run(SCRIPT, "merge", "pool.tsv", cwd=toy), before, toy, "pool.tsv:2:", claim, name, label)

@pytest.mark.parametrize(("task", "text"), [
    ("climatecheck2025", "claim_id,abstract_id,rank,label\nc3,0001,1,Supports\nc3,0002,2,Refutes\n"),
    ("climatecheck2026", "claim_id,abstract_id,rank,label\nc3,0001,1,Supports\nc3,0002,2,Refutes\n"),
    ("checkthat4b", "post_id\tpreds\nc3\t['0001', '0002']\n"),
])
def test_a_submission_is_the_file_that_the_task_asks_for(toy, run, task, text):
    claims = pd.read_csv(toy / "data/demo/claims.test.tsv", sep="\t", dtype=str)["claim_id"]
    rows = [(claim, f"000{rank}", rank, -rank, label) for claim in reversed(claims)
            for rank, label in ((1, "SUPPORTS"), (2, "REFUTES"), (3, "NEI"))]
    tsv(toy / "v.tsv", [*RUN, "label"], rows)
    done = run(SCRIPT, "submission", "v.tsv", "--task", task, "--top-k", 2, cwd=toy)
    assert done.returncode == 0, done.stderr
    made = [toy / path for path in json.loads(done.stdout.splitlines()[-1])["made"]]
    assert made[0].read_text().startswith(text)
    assert len(made[0].read_text().splitlines()) == 1 + len(claims) * (1 if task == "checkthat4b" else 2)
    with zipfile.ZipFile(made[1]) as archive:
        assert archive.namelist() == [made[0].name] and archive.read(made[0].name) == made[0].read_bytes()

@pytest.mark.parametrize(("task", "depth"), [("climatecheck2025", 10), ("climatecheck2026", 10), ("checkthat4b", 5)])
def test_a_submission_has_as_many_abstracts_as_the_task_takes(toy, run, task, depth):
    claims = pd.read_csv(toy / "data/demo/claims.test.tsv", sep="\t", dtype=str)["claim_id"]
    tsv(toy / "v.tsv", RUN, [(claim, f"{rank:04}", rank, -rank) for claim in claims for rank in range(1, 13)])
    done = run(SCRIPT, "submission", "v.tsv", "--task", task, cwd=toy)
    assert done.returncode == 0, done.stderr
    made = (toy / json.loads(done.stdout.splitlines()[-1])["made"][0]).read_text()
    assert f"00{depth:02}" in made and f"00{depth + 1:02}" not in made

@pytest.mark.parametrize(("rows", "words"), [
    ([("c3", "0001", 1, 1)], ["v.tsv", "c3 has 1 abstracts", "fewer than 2"]),
    ([("c3", "0001", 1, 1), ("c3", "nowhere", 2, 0)], ["v.tsv", "nowhere"]),
    ([("c99", "0001", 1, 1), ("c99", "0002", 2, 0)], ["v.tsv", "c99"]),
])
def test_a_submission_that_would_be_refused_is_refused_here(toy, run, contents, refused, rows, words):
    tsv(toy / "v.tsv", RUN, rows)
    before = contents(toy)
    refused(run(SCRIPT, "submission", "v.tsv", "--top-k", 2, cwd=toy), before, toy, *words)

# ----------------------------------------------------------- The report, in a browser
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
browser = pytest.mark.skipif(not BROWSER, reason="no Chromium on this machine: apt-get install chromium")

def dom(page, hash="", script="", width=1200):
    """The page as a headless browser leaves it, after its own scripts, and one more."""
    if script:
        page = page.with_name("clicked.html").write_text(page.read_text().replace(
            "</html>", f"<script>{script}</script></html>")) and page.with_name("clicked.html")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},2000", "--dump-dom",
               f"--user-data-dir={page.parent / 'profile'}", f"{page.as_uri()}#{hash}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout

@pytest.fixture
def page(toy, run):
    """The report of two runs, a claim of which tries to be a script, and whose verdict names an evidence sentence."""
    claims = pd.read_csv(toy / "data/demo/claims.test.tsv", sep="\t", dtype=str)
    claims.loc[0, "claim"] = "</script><script>document.title = 'gotcha'</script><b>bold</b> & co"
    claims.to_csv(toy / "data/demo/claims.test.tsv", sep="\t", index=False)
    text = json.loads((toy / "data/demo/corpus.jsonl").read_text().splitlines()[0])
    verdict = {"claim_id": "c3", "verdict": "DISPUTED", "evidence": [
        {"abstract_id": text["abstract_id"], "label": "SUPPORTS", "sentence": text["abstract"][:20]}]}
    (toy / "claims.jsonl").write_text(json.dumps(verdict) + "\n")
    tsv(toy / "other.tsv", [*RUN, "label"], [("c3", text["abstract_id"], 1, 1, "SUPPORTS"), ("c3", "0005", 2, 0, "NEI")])
    done = run(SCRIPT, "work/demo/test/hybrid.tsv", "other.tsv", "--report", "report.html", "--aggregated", "claims.jsonl",
               "--resamples", 100, cwd=toy)
    assert done.returncode == 0, done.stderr
    return toy / "report.html"

def test_the_report_is_one_file_without_a_network(page):
    text = page.read_text()
    assert not re.findall(r"(?:src|href)=\"(?!#)", text) and "@import" not in text and text.count("<svg") >= 2
    assert "gotcha'</script>" not in text and not re.search(r"@[A-Z]+@", text)

@browser
def test_texts_stay_texts_in_the_browser(page):
    seen = dom(page)
    assert "<title>demo, test</title>" in seen
    assert "&lt;b&gt;bold&lt;/b&gt; &amp; co" in seen and "<b>bold</b>" not in seen

@browser
def test_the_search_leaves_the_claims_that_match_and_opens_a_single_one(page):
    everything, one = dom(page), dom(page, "c3 disputed")
    assert everything.count('class="claim"') == 3 and one.count('class="claim"') == 1
    assert "1 of 3 claims" in one and "<mark>" in one and "said SUPPORTS" in one and 'class="run"' in one

@browser
def test_columns_and_claims_are_sorted_by_a_click(page):
    click = "document.querySelectorAll('#metrics th')[1].click();"
    down, up = (re.findall(r"<td>(hybrid|other)</td>", dom(page, script=click * times)) for times in (1, 2))
    assert down == up[::-1] and len(down) == 2
    ordered = dom(page, script="order.value = data.orders[1]; order.dispatchEvent(new Event('change'))")
    shown = re.findall(r"<small>(c\d)", ordered[ordered.index('id="claims"'):])
    values = pd.read_csv(page.parent / "work/demo/test/metrics.claims.tsv", sep="\t")
    recalls = values[values["run"] == "other"].set_index("claim_id")["R@5"].loc[shown]
    assert len(shown) == 3 and recalls.is_monotonic_increasing

@browser
def test_nothing_but_tables_is_wider_than_a_phone(page):
    measured = "document.title = document.documentElement.scrollWidth + ' of ' + innerWidth"
    seen, inner = map(int, re.search(r"<title>(\d+) of (\d+)</title>", dom(page, "c3", measured, width=500)).groups())
    assert seen <= inner

# ----------------------------------------------------------- Bad input
@pytest.mark.parametrize(("text", "words"), [
    ("claim_id\tabstract_id\trank\n1\ta\t1\n", ["r.tsv:1:", "score"]),
    ("c3\t0001\t1\t0.5\n", ["r.tsv:1:", "claim_id"]),
    ("\t".join(RUN) + "\nc3\t0001\t1\t0.5\nc3\t0001\t2\t0.4\n", ["r.tsv:3:", "stands twice"]),
    ("\t".join(RUN) + "\nc3\t0001\t1\tnan\n", ["r.tsv:2:", "score"]),
    ("\t".join(RUN) + "\nc3\t0001\t0\t1\n", ["r.tsv:2:", "rank"]),
    ("\t".join(RUN) + "\nc3\t0001\tx\t1\n", ["r.tsv:2:", "rank"]),
    ("\t".join(RUN) + "\nc3\t0001\t1\t1\nc3\t0002\t3\t1\n", ["r.tsv:3:", "gap"]),
    ("\t".join([*RUN, "label"]) + "\nc3\t0001\t1\t1\tPERHAPS\n", ["r.tsv:2:", "PERHAPS"]),
])
def test_bad_runs_are_refused_by_line(toy, run, contents, refused, text, words):
    (toy / "r.tsv").write_text(text)
    before = contents(toy)
    refused(run(SCRIPT, "r.tsv", cwd=toy), before, toy, *words)

@pytest.mark.parametrize(("arguments", "word"), [
    (["nowhere.tsv"], "nowhere.tsv"), (["--qrels", "nowhere.tsv"], "nowhere.tsv"), (["--measures", "mrr"], "mrr"),
    (["--work", "work/none"], "work/none"), (["--measures", "nDCG@ten"], "nDCG@ten"), (["--ablation", "work/no"], "work/no"),
    (["--format", "yaml"], "yaml"), (["submission", "--task", "trec"], "trec"), (["pool", "nowhere.tsv"], "nowhere.tsv"),
    *((["--measures", "trec", name], name) for name in (
        "MRR@0", "R@0", "Judged@0", "P@0", "P(cutoff=0)", "nDCG@0", "AP@0", "B-Pref@0", "RBP", "P@1.5", "SDCG@10",
        "P(rel=0)@5", "alpha_nDCG@10")),
    *((["--out", f"m{kind}"], f"m{kind}") for kind in (".json", ".md", ".tex")), (["--out", "."], "a folder"),
    (["--out", "m.tsv", "--report", "x/../m.md"], "x/../m.md"), (["submission", "--out", "x.zip"], "x.zip"),
    (["work/demo/test/hybrid.tsv", "--ablation", "work/demo/test"], "--ablation"),
])
def test_missing_files_and_bad_flags_are_refused(toy, run, contents, refused, arguments, word):
    before = contents(toy)
    refused(run(SCRIPT, *arguments, cwd=toy), before, toy, word)

def test_qrels_that_contradict_themselves_are_refused(toy, run, contents, refused):
    tsv(toy / "data/demo/qrels.test.tsv", QRELS, [
        ("c3", "0001", "SUPPORTS"), ("c4", "0001", "NEI"), ("c3", "0001", "REFUTES")])
    before = contents(toy)
    refused(run(SCRIPT, cwd=toy), before, toy, "qrels.test.tsv:4:", "c3", "0001", "stands twice")

@pytest.mark.parametrize(("claim", "name", "column"), [
    ("7.0", "12", "claim_id"), ("7", "12.0", "abstract_id"), ("c7", "12", "claim_id")])
def test_ids_that_are_written_otherwise_in_both_files_are_refused(toy, run, contents, refused, claim, name, column):
    tsv(toy / "data/demo/qrels.test.tsv", QRELS, [("7", "12", "SUPPORTS")])
    tsv(toy / "r.tsv", RUN, [(claim, name, 1, 1)])
    before = contents(toy)
    refused(run(SCRIPT, "r.tsv", cwd=toy), before, toy, "r.tsv", column, claim if column == "claim_id" else name)

@pytest.mark.parametrize(("name", "text", "arguments", "words"), [
    ("data/demo/qrels.test.tsv", "claim_id\tabstract_id\tlabel\n", [], ["qrels.test.tsv", "no judged pair"]),
    ("v.jsonl", '{"claim_id": "c3"}\n', ["--report", "r.html", "--aggregated", "v.jsonl"], ["v.jsonl:1:", "--aggregate"]),
    ("v.jsonl", "{\udcff}\n", ["--report", "r.html", "--aggregated", "v.jsonl"], ["v.jsonl:1:", "--aggregate"]),
    ("p.tsv", "claim_id\tabstract_id\nc3\t0001\n", ["merge", "p.tsv"], ["p.tsv:1:", "label"]),
    ("p.tsv", "claim_id\tabstract_id\tlabel\nc3\t0011\tMAYBE\n", ["merge", "p.tsv"], ["p.tsv:2:", "MAYBE"]),
])
def test_other_files_that_are_not_as_they_should_be_are_refused(toy, run, contents, refused, name, text, arguments, words):
    (toy / name).write_text(text, errors="surrogateescape")  # "\udcff" becomes a byte that is no UTF-8
    before = contents(toy)
    refused(run(SCRIPT, *arguments, cwd=toy), before, toy, *words)
