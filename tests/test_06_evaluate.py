"""06_evaluate.py: formulas against arithmetic by hand and other implementations; tables; jobs."""
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import ir_measures
import numpy as np
import pandas as pd
import pytest
from conftest import KEY, ROOT, RUN, TOY, facts, load, read, tsv
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import accuracy_score, f1_score, precision_recall_fscore_support

SCRIPT, KIT = "06_evaluate.py", load("06_evaluate.py")
QRELS, LABELS = [*KEY, "label"], {"S": "SUPPORTS", "R": "REFUTES", "N": "NEI"}
NAMES = "abcdefghijklmnopqrst"  # of abstracts
TEST_QRELS = read(TOY / "qrels.test.tsv").values.tolist()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # as the script does itself

def table_of(**claims):
    """Rows of claim="a:S b:N", in order of rank; without labels claim="a b"."""
    rows = [(claim, pair[0], rank, -rank, LABELS.get(pair[2:])) for claim, pairs in claims.items()
            for rank, pair in enumerate(pairs.split(), 1)]
    return pd.DataFrame(rows, columns=[*RUN, "label"]).dropna(axis=1)

def measure(run, qrels, *names, depth=10):
    """The script's own numbers for one run, as floats."""
    parts = KIT.parts_of_measures(run, qrels, names, depth)
    sums = {name: part.sum(0) for name, part in parts.items()}
    return dict(zip(names, KIT.values_of(sums, names).tolist()))

# ---------------------------------------------------------------- Measures
@pytest.mark.parametrize(("run", "judged", "name", "value"), [
    # a claim without rows is 0 in recall and left out of B-Pref
    pytest.param("p: a n", "p: a:S n:N; q: b:R m:N", "R@2",
                 1 / 2, id="claim_without_rows_is_0_in_recall"),
    pytest.param("p: a n", "p: a:S n:N; q: b:R m:N", "B-Pref",
                 1, id="claim_without_rows_is_not_in_bpref"),
    # claims with NEI alone, or without NEI, are left out
    pytest.param("p: a b; q: x a; r: n a", "p: a:N b:N; q: a:S; r: a:S n:N", "R@2",
                 1, id="claims_of_nei_alone_are_not_in_recall"),
    pytest.param("p: a b; q: x a; r: n a", "p: a:N b:N; q: a:S; r: a:S n:N", "B-Pref",
                 0, id="claims_without_nei_are_not_in_bpref"),
    # R = 2: a is behind one other, b behind three, which count as two
    pytest.param("p: n a m o b", "p: a:S b:S n:N m:N o:N", "B-Pref",
                 (1 / 2 + 0) / 2, id="nei_capped_at_R"),
    # R = 3, N = 1: behind the NEI the organisers give 1 - 1/3, trec_eval 1 - 1/min(3, 1)
    pytest.param("p: a n b c", "p: a:S b:S c:R n:N", "B-Pref",
                 (1 + 2 / 3 + 2 / 3) / 3, id="more_relevant_than_nei"),
    pytest.param("p: a n b c", "p: a:S b:S c:R n:N", "B-Pref (trec_eval)",
                 1 / 3, id="trec_eval_divides_by_min_R_N"),
    pytest.param("p: a n b", "p: a:S b:R n:N", "B-Pref@1", 1 / 2, id="bpref_at_1"),
    pytest.param("p: a n b", "p: a:S b:R n:N", "Subtask I",
                 (1 / 2 + 1 + 1 + 3 / 4) / 4, id="subtask_I"),
    pytest.param("p: a n b", "p: a:S b:R n:N", "F1", np.nan, id="no_labels_no_F1"),
    pytest.param("p: n:N a:S", "p: a:S n:N", "Retrieval 2026", 1 / 2, id="retrieval_2026"),
    pytest.param("p: n:N a:S", "p: a:S n:N", "Verification 2026", 2, id="verification_2026"),
    # gold S S R N, said S N R N, one unjudged; F1 of S 2/3, R 1, N 2/3
    pytest.param("p: a:S b:N c:R d:N x:S", "p: a:S b:S c:R d:N", "P",
                 1 / 2 + 1 / 4 + 1 / 8, id="stance_P"),
    pytest.param("p: a:S b:N c:R d:N x:S", "p: a:S b:S c:R d:N", "R", 3 / 4, id="stance_R"),
    pytest.param("p: a:S b:N c:R d:N x:S", "p: a:S b:S c:R d:N", "F1",
                 1 / 2 * 2 / 3 + 1 / 4 + 1 / 4 * 2 / 3, id="stance_F1"),
    pytest.param("p: a:S b:N c:R d:N x:S", "p: a:S b:S c:R d:N", "Subtask II",
                 1 / 3 + 1 / 4 + 1 / 6 + 1, id="subtask_II"),
    pytest.param("p: a:S b:N c:R d:N x:S", "p: a:S b:S c:R d:N", "Judged@10",
                 4 / 5, id="judged_share"),
    pytest.param("p: x a b; q: a", "p: a:S b:S; q: b:S", "MRR@1", 0, id="mrr_at_1"),
    pytest.param("p: x a b; q: a", "p: a:S b:S; q: b:S", "MRR@5", 1 / 4, id="mrr_at_5"),
    pytest.param("p: x a b; q: a", "p: a:S b:S; q: b:S", "R@5", 1 / 2, id="mean_over_claims"),
    pytest.param("p: a; q: d e f", "p: a:S; q: b:S c:R d:S", "pooled R@10",
                 1 / 2, id="pooled_over_pairs"),
    pytest.param("p: a; q: d e f", "p: a:S; q: b:S c:R d:S", "R@10",
                 (1 + 1 / 3) / 2, id="not_pooled"),
    # called evidence: a, b, x; right: a; gold: a, b, c
    pytest.param("p: a:S b:S n:N x:R", "p: a:S b:R c:S n:N", "abstract P", 1 / 3, id="abstract_P"),
    pytest.param("p: a:S b:S n:N x:R", "p: a:S b:R c:S n:N", "abstract R", 1 / 3, id="abstract_R"),
    pytest.param("p: a:S b:S n:N x:R", "p: a:S b:R c:S n:N", "abstract F1",
                 1 / 3, id="abstract_F1"),
    # Chapelle et al. 2009, grades up to 4: a hit stops the reader with 1/16
    pytest.param("a-1: x a; b-1: b", "a-1: a:S; b-1: b:S", "ERR@10",
                 3 / 64, id="err_grades_up_to_4"),
    pytest.param("p: x a; q: b", "p: a:S; q: b:S n:N", "AP", 3 / 4, id="ap"),
    pytest.param("p: x a; q: b", "p: a:S; q: b:S n:N", "MAP", 3 / 4, id="map"),
    pytest.param("p: x a; q: b", "p: a:S; q: b:S n:N", "RR", 3 / 4, id="rr"),
    pytest.param("p: x a; q: b", "p: a:S; q: b:S n:N", "MRR", 3 / 4, id="mrr_of_ir_measures"),
    pytest.param("p: x a; q: b", "p: a:S; q: b:S n:N", "Bpref", 1, id="bpref_of_ir_measures"),
    # q has no evidence: left out of all means but Judged@k
    pytest.param("p: x a; q: b", "p: a:S; q: b:N", "MRR", 1 / 2, id="no_evidence_mrr"),
    pytest.param("p: x a; q: b", "p: a:S; q: b:N", "MRR@10", 1 / 2, id="no_evidence_mrr_at_10"),
    pytest.param("p: x a; q: b", "p: a:S; q: b:N", "P@5", 1 / 5, id="no_evidence_p_at_5"),
    pytest.param("p: x a; q: b", "p: a:S; q: b:N", "NumRet", 2, id="no_evidence_num_ret"),
    pytest.param("p: x a; q: b", "p: a:S; q: b:N", "Judged@10",
                 (1 / 2 + 1) / 2, id="no_evidence_but_judged"),
    pytest.param("q: b", "q: b:N", "AP", np.nan, id="no_evidence_at_all"),
])
def test_measures_by_hand(run, judged, name, value):
    run, judged = (dict(re.findall(r"([\w-]+): ([^;]+)", text)) for text in (run, judged))
    found = measure(table_of(**run), table_of(**judged), name)[name]
    assert found == pytest.approx(value, abs=1e-5, nan_ok=True)

def test_the_organisers_arithmetic_by_hand():
    qrels = table_of(c1="a:S b:R n:N m:N", c2="d:S", c3="e:R f:S g:S o:N", c4="h:S p:N", c5="k:N")
    run = table_of(c1="n:N a:R x:S b:R", c2="x:N d:S", c3="e:R f:S o:S x:N g:N", c5="k:N")
    wanted = {
        "R@2": (1 / 2 + 1 + 2 / 3 + 0) / 4,  # c1 to c4, which was not submitted; c5 has no evidence
        "R@5": (1 + 1 + 1 + 0) / 4, "R@10": 3 / 4,
        # c1: a and b behind n, R = 2: 1 - 1/2 each. c3: e, f; g behind o, R = 3: 1 - 1/3
        "B-Pref": ((1 / 2 + 1 / 2) / 2 + (1 + 1 + 2 / 3) / 3) / 2,
        # gold: S a d f g, R b e, N n o k; given: S d f o, R a b e, N n g k; right: d f, b e, n k
        "P": (4 * 2 / 3 + 2 * 2 / 3 + 3 * 2 / 3) / 9, "R": (4 * 2 / 4 + 2 * 2 / 2 + 3 * 2 / 3) / 9,
        "F1": (4 * 4 / 7 + 2 * 4 / 5 + 3 * 4 / 6) / 9}
    wanted["Subtask I"] = (13 / 24 + 3 / 4 + 3 / 4 + 25 / 36) / 4
    wanted["Subtask II"] = wanted["F1"] + 3 / 4
    assert measure(run, qrels, *wanted) == pytest.approx(wanted)

def literal(run, qrels):
    """The organisers' arithmetic, step by step."""
    recalls, bprefs = {2: [], 5: [], 10: []}, []
    for claim, gold in qrels.groupby("claim_id"):
        relevant = set(gold["abstract_id"][gold["label"] != "NEI"])
        names = run[run["claim_id"] == claim].sort_values("rank")["abstract_id"].tolist()
        for k in recalls if relevant else ():
            recalls[k].append(len(relevant & set(names[:k])) / len(relevant))
        if names and relevant and len(relevant) < len(gold):
            n, total = 0, 0.0
            for name in names:
                n += name in set(gold["abstract_id"]) - relevant and n < len(relevant)
                total += (1 - n / len(relevant)) * (name in relevant)
            bprefs.append(total / len(relevant))
    return [np.mean(values) if values else np.nan for values in (*recalls.values(), bprefs)]

@st.composite
def judged_runs(draw):
    """Verdicts and qrels: claims without rows or evidence, short runs, unjudged abstracts."""
    pairs = st.tuples(st.sampled_from(NAMES[:14]), st.sampled_from("SRN"))
    def labelled(least, most):
        found = draw(st.lists(pairs, min_size=least, max_size=most, unique_by=lambda pair: pair[0]))
        return " ".join(map(":".join, found))
    claims = [f"c{place}" for place in range(draw(st.integers(1, 6)))]
    run = {claim: labelled(claim == "c0", 14) for claim in claims}
    return table_of(**run), table_of(**{claim: labelled(1, 8) for claim in claims})

@settings(max_examples=60, deadline=None,  # shrinking a failed example takes minutes
          phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(judged_runs())
def test_measures_equal_the_literal_transcription_scikit_learn_and_ir_measures(case):
    run, qrels = case
    for depth, part in ((99, run), (10, run[run["rank"] <= 10])):
        found = measure(run, qrels, "R@2", "R@5", "R@10", "B-Pref", depth=depth)
        assert list(found.values()) == pytest.approx(literal(part, qrels), nan_ok=True)
    both, expected = run.merge(qrels, on=QRELS[:2], suffixes=("", "_gold")), [np.nan] * 4
    if len(both):
        weighted, macro = (precision_recall_fscore_support(
            both["label_gold"], both["label"], average=how, zero_division=0)[:3]
            for how in ("weighted", "macro"))
        expected = [*weighted, macro[2]]
    found = measure(run, qrels, "P", "R", "F1", "macro F1", depth=99)
    assert list(found.values()) == pytest.approx(expected, nan_ok=True)
    names = {"claim_id": "query_id", "abstract_id": "doc_id"}
    tables = (qrels.assign(relevance=(qrels["label"] != "NEI").astype(int)).rename(columns=names),
              run.assign(score=-run["rank"].astype(float)).rename(columns=names))
    with_evidence = qrels["claim_id"][qrels["label"] != "NEI"]
    for ours, theirs, claims in (
            ("R@5 MRR@5 Success@3", "R@5 RR@5 Success@3", with_evidence),
            ("nDCG@10 AP RR Bpref P@5",) * 2 + (with_evidence,),
            ("Judged@10",) * 2 + (qrels["claim_id"],)):
        wanted = [ir_measures.parse_measure(name) for name in theirs.split()]
        values = len(claims) and ir_measures.calc_aggregate(
            wanted, *(one[one["query_id"].isin(claims)] for one in tables))
        found = list(measure(run, qrels, *ours.split()).values())
        assert not len(claims) or found == pytest.approx([values[name] for name in wanted])

# ---------------------------------------------------------------- Comparison and tables
def compared(runs, qrels, names, resamples=20_000):
    """The parts of runs, by run, and what compare() makes of them."""
    parts = {name: KIT.parts_of_measures(run, qrels, names, 10) for name, run in runs.items()}
    return parts, KIT.compare(parts, names, resamples, 13)

def test_intervals_equal_scipys_and_p_values_all_swaps_counted_out():
    rng, names = np.random.default_rng(2), ["R@5", "B-Pref", "F1", "Subtask II", "R@10"]
    def drawn(count):
        names = rng.permutation(list(NAMES))[:count]
        return " ".join(f"{name}:{rng.choice(list(LABELS))}" for name in names)
    qrels = table_of(**{f"c{place}": drawn(7) for place in range(8)})
    a, b = (table_of(**{f"c{place}": drawn(12) for place in range(8)}) for _ in "ab")
    parts, cells = compared({"a": a, "b": b, "c": a}, qrels, names)
    for field in ("difference", "p_randomisation", "p_holm"):
        assert cells[field].loc["a"].isna().all()
    assert (cells["p_randomisation"].loc["c"] == 1).all()  # the same run
    turns = np.array(list(itertools.product((0, 1), repeat=8)))  # 256 ways to swap eight claims
    these, those = {}, {}
    for name, first in parts["a"].items():
        moved = np.tensordot(turns, parts["b"][name] - first, (1, 0))
        these[name], those[name] = first.sum(0) + moved, parts["b"][name].sum(0) - moved
    apart = abs(KIT.values_of(these, names) - KIT.values_of(those, names))
    exact = np.mean(apart >= apart[0] - 1e-12, axis=0)
    found = cells["p_randomisation"].loc["b", names].tolist()
    assert found == pytest.approx(exact, abs=0.02)
    recalls = KIT.quotients(parts["b"])["R@5"]
    theirs = stats.bootstrap((recalls[~np.isnan(recalls)],), np.mean, method="percentile", rng=5)
    found = tuple(cells[field].loc["b", "R@5"] for field in ("low", "high"))
    assert found == pytest.approx(tuple(theirs.confidence_interval), abs=0.015)

def test_there_is_no_p_value_where_the_first_run_has_no_value():
    qrels, run = table_of(c="a:S b:R", d="b:S"), table_of(c="a:S b:S", d="b:S")
    runs = {"unlabelled": run.drop(columns="label"), "labelled": run}
    _, cells = compared(runs, qrels, ["abstract P"], resamples=50)
    for field in ("p_randomisation", "p_holm"):
        assert cells[field]["abstract P"].isna().all()

def test_swaps_that_leave_no_value_do_not_make_p_smaller():
    """Each run has rows for one claim: after one of two swaps, one run has no B-Pref at all."""
    qrels = table_of(c="a:S n:N", d="a:S n:N")
    _, cells = compared({"first": table_of(c="a n"), "other": table_of(d="n a")}, qrels, ["B-Pref"])
    assert cells["difference"].loc["other", "B-Pref"] == -1
    assert cells["p_randomisation"].loc["other", "B-Pref"] == 1

def test_holm():
    holm = KIT.holm(pd.Series([0.01, 0.04, 0.03, np.nan])).tolist()
    assert holm == pytest.approx([0.03, 0.06, 0.06, np.nan], nan_ok=True)

def test_wilcoxon_and_mcnemar(tmp_path):
    tool = load("recipes/tools/significance.py")
    differences = pd.Series([.5, .25, -.1, .1, .6])
    assert tool.wilcoxon(differences) == stats.wilcoxon([.5, .25, -.1, .1, .6]).pvalue
    noise = pd.Series([.5, .25, 1e-17, -.1 + 1e-17, .1, .6])  # rounding decides no rank
    assert tool.wilcoxon(noise) == tool.wilcoxon(noise.round(3)) != stats.wilcoxon(noise).pvalue
    hits = pd.Series([1, 1, 1, 1, -1, 0])
    assert tool.mcnemar(hits) == pytest.approx(2 * (1 + 5) / 2**5)  # 4 against 1: two tails
    assert tool.wilcoxon(hits * 0) == tool.mcnemar(hits * 0) == 1
    path = tmp_path / "metrics.claims.tsv"
    tsv(path, ["run", "claim_id", "MRR@5", "Success@1"], [
        ("b", 1, .5, 1), ("b", 2, .1, 0), ("b", 3, "", ""), ("b", 4, .2, 0),
        ("a", 1, .1, 0), ("a", 2, .2, 0), ("a", 3, .3, 0), ("a", 4, .8, 1)])
    command = [sys.executable, ROOT / "recipes/tools/significance.py", path]
    shown = subprocess.check_output([*command, "--measures", "MRR@5", "Success@1"], text=True)
    lines = [line.split("\t") for line in shown.splitlines()]
    assert lines[0] == "measure run claims difference won lost p_wilcoxon p_mcnemar".split()
    mean = (.1 - .5 + .2 - .1 + .8 - .2) / 3  # b comes first, and has no value for the third claim
    assert lines[1][:3] == ["MRR@5", "a", "3"] and float(lines[1][3]) == pytest.approx(mean)
    assert lines[1][7] == "" and lines[2][4:6] == ["1", "1"] and float(lines[2][7]) == 1
    done = subprocess.run([*command, "--measures", "nDCG"], capture_output=True, text=True)
    assert done.returncode == 2 and "no measure nDCG; it has MRR@5, Success@1" in done.stderr

def test_tables_mark_best_and_second_and_escape_names():
    values = pd.DataFrame({"R@5": [.1, .3, .2], "F1": [np.nan, .5, .5]}, ["a_b|<i>&$", "x", "y"])
    p = pd.DataFrame({"R@5": [np.nan, .01, .2], "F1": [np.nan] * 3}, values.index)
    cells = {"value": values, "low": values - .1, "high": values + .1, "p_holm": p}
    assert KIT.markdown(KIT.texts_of(cells, "**{}**", "*{}*"), "run").splitlines()[1:5] == [
        "| --------------- | ---------- | ----- |",
        r"| a\_b\|\<i\>\&\$ | 0.100      | -     |",
        "| x               | **0.300†** | 0.500 |", "| y               | *0.200*    | 0.500 |"]
    tex, page = KIT.latex(cells), KIT.html_table(cells)
    assert r"a\_b|<i>\&\$ & 0.100 & - \\" in tex and r"\textbf{0.300$^\dagger$} & 0.500 \\" in tex
    assert "a_b|&lt;i&gt;&amp;$" in page and "<b>0.300†</b><small>0.200–0.400</small>" in page

def test_outputs_agree_and_are_the_same_the_second_time(toy, call):
    tsv(toy / "work/demo/test/bm25.tsv", RUN, [("c3", "0003", 1, 2), ("c3", "0001", 2, 1)])
    rows = [("c4", "0004", 1, 2, "REFUTES"), ("c5", "0009", 1, 2, "NEI"), ("c9", "1", 1, 2, "NEI")]
    tsv(toy / "a.tsv", [*RUN, "label"], rows)
    words = (SCRIPT, "work/demo/test/bm25.tsv", "a.tsv", "--out", "out/m.tsv")
    done = call(*words, cwd=toy)
    values = facts(done)["runs"]
    assert list(values) == ["bm25", "a"] and values == json.loads((toy / "out/m.json").read_text())
    assert values["bm25"]["R@2"] == pytest.approx(1 / 6) and "F1" not in values["bm25"]
    assert values["a"]["R@5"] == pytest.approx(1 / 6) and values["a"]["F1"] == 1
    assert "bm25.tsv: 2 claims" in done.stderr and "1 others are left out" in done.stderr
    table, cells, claims, curves = (pd.read_csv(toy / f"out/m{name}.tsv", sep="\t")
                                    for name in ("", ".cells", ".claims", ".curves"))
    shown = cells[(cells["measure"] == "R@5") & (cells["run"] == "bm25")].iloc[0]
    assert shown["low"] - 1e-9 <= shown["value"] == table["R@5"][0] <= shown["high"] + 1e-9
    assert claims.groupby("run", sort=False)["R@5"].mean().tolist() == table["R@5"].tolist()
    assert curves.iloc[1].tolist() == ["bm25", 2, 1 / 6, 1 / 3]
    again = call(*words, cwd=toy)
    assert "up to date" in again.stdout and facts(again)["runs"] == values
    assert again.stderr == done.stderr and again.stdout.startswith("up to date")
    lines = [line for line in again.stdout.splitlines() if not line.startswith("up to date: ")]
    assert lines[:-1] == done.stdout.splitlines()[:-1] and lines[0].startswith("| run ")
    assert list(facts(call(SCRIPT, cwd=toy))["runs"]) == ["bm25", "hybrid"]  # of the pipeline

def test_metrics_by_other_qrels_have_their_own_files(toy, call):
    tsv(toy / "data/demo/qrels.test-cited.tsv", QRELS, [("c3", "0001", "SUPPORTS")])
    own = facts(call(SCRIPT, cwd=toy))
    kept = (toy / "work/demo/test/metrics.tsv").read_bytes()
    words = ("--qrels", "data/demo/qrels.test-cited.tsv")
    other = facts(call(SCRIPT, *words, "--resamples", 10, cwd=toy))
    assert other["made"][0] == "work/demo/test/metrics-test-cited.tsv" != own["made"][0]
    assert (toy / "work/demo/test/metrics.tsv").read_bytes() == kept
    assert facts(call(SCRIPT, "--qrels", "./data/demo/qrels.test.tsv", cwd=toy))["made"]  # anew
    assert facts(call(SCRIPT, *words, "--out", "m.tsv", cwd=toy))["made"][0] == "m.tsv"

# ---------------------------------------------------------------- Further columns and rows
def test_condensed_lists_by_hand():
    qrels = table_of(c="a:S b:R n:N", d="e:S m:N")[QRELS]
    run = table_of(c="x n y a b", d="x y")
    names = ("R@2", "B-Pref", "MRR@5", "P@2", "Judged@5")
    plain = {"R@2": 0, "B-Pref": 0, "MRR@5": 1 / 4 / 2, "P@2": 0, "Judged@5": 3 / 5 / 2}
    assert measure(run, qrels, *names, depth=3) == pytest.approx(plain)
    kept = KIT.condensed(run, qrels)  # c: n a b; d found nothing, which is not to be left out
    assert kept[["abstract_id", "rank"]].values.tolist() == [
        ["n", 1], ["a", 2], ["b", 3], ["x", 1], ["y", 2]]
    wanted = {"R@2": 1 / 2 / 2, "B-Pref": (1 / 2 + 1 / 2) / 2 / 2, "MRR@5": 1 / 2 / 2,
              "P@2": 1 / 2 / 2, "Judged@5": 1 / 2}
    assert measure(kept, qrels, *names, depth=3) == pytest.approx(wanted)

def views(toy, call):
    """Evaluate two runs with further columns and groups; return the values and the call."""
    tsv(toy / "claims.tsv", ["claim_id", "claim", "lang"],
        [("p", "x", "de"), ("q", "y", "en"), ("r", "z", "de")])
    tsv(toy / "q.tsv", QRELS, [("p", "0001", "SUPPORTS"), ("p", "0002", "NEI"),
                               ("q", "0003", "REFUTES"), ("r", "0004", "SUPPORTS")])
    tsv(toy / "s.tsv", [*QRELS, "judge"], [
        ("p", "0001", "SUPPORTS", "m"), ("p", "0002", "SUPPORTS", "m"),
        ("q", "0003", "REFUTES", "m"), ("r", "0005", "SUPPORTS", "m"), ("z", "1", "NEI", "m")])
    for name, rows in (("a", ["p 0009", "p 0001", "q 0003", "r 0005"]), ("b", ["q 0003"])):
        rows = [row.split() for row in rows]
        ranks = [1 + (row == ["p", "0001"]) for row in rows]
        tsv(toy / f"{name}.tsv", RUN, [(*row, k, -k) for row, k in zip(rows, ranks)])
    done = call(SCRIPT, "a.tsv", "b.tsv", "--qrels", "q.tsv", "--claims", "claims.tsv",
                "--measures", "R@1", "F1", "--condensed", "--silver", "s.tsv", "--by", "lang",
                "--out", "m.tsv", "--resamples", 50, cwd=toy)
    return facts(done), done

def test_further_columns_stand_beside_the_normal_ones(toy, call):
    found, done = views(toy, call)
    a = {"R@1": 1 / 3, "R@1 condensed": 2 / 3,  # q; and p without 0009
         "R@1 silver": (0 + 1 + 1 / 2) / 3}  # r: 0004, which a lacks, and 0005
    assert found["runs"]["a"] == pytest.approx(a)
    assert "s.tsv: 1 labels on claims without gold are left out" in done.stderr
    assert list(pd.read_csv(toy / "m.tsv", sep="\t")) == ["run", *a]
    assert list(pd.read_csv(toy / "m.claims.tsv", sep="\t"))[:4] == [
        "run", "claim_id", "R@1", "R@5"]
    again, shown = views(toy, call)
    assert again["made"] == [] and again["silver"] == found["silver"]
    assert shown.stdout.splitlines()[-20:-1] == done.stdout.splitlines()[-20:-1]

def test_measures_by_group_have_a_row_a_run_and_group(toy, call):
    _, done = views(toy, call)
    rows = pd.read_csv(toy / "m.groups.tsv", sep="\t").to_numpy().tolist()
    assert [row[:3] for row in rows] == [
        ["a", "de", 2], ["a", "en", 1], ["b", "de", 2], ["b", "en", 1]]
    assert [row[3:] for row in rows] == [
        [0, 1 / 2, (0 + 1 / 2) / 2], [1, 1, 1], [0, 0, 0], [1, 1, 1]]
    assert "| a   | de    | 2      | 0.000 | 0.500         | 0.250      |" in done.stdout
    tsv(toy / "claims.tsv", ["claim_id", "claim", "lang"], [("p", "x", "de")])
    words = ("a.tsv", "--qrels", "q.tsv", "--claims", "claims.tsv", "--by")
    done = call(SCRIPT, *words, "lang", "--out", "n.tsv", cwd=toy)
    assert facts(done) and "claims.tsv: lacks 2 of 3 judged claims" in done.stderr
    done = call(SCRIPT, *words, "tongue", "--out", "n.tsv", cwd=toy)
    assert done.returncode == 2 and "no column tongue in claims.tsv; it has claim_id, claim, lang" \
        in done.stderr
    assert facts(call(SCRIPT, *words, "claim_id", "--out", "n.tsv", cwd=toy))

def test_agreement_of_silver_with_gold_by_hand(toy, call):
    gold = table_of(p="a:S b:S c:R d:N", q="e:S")[QRELS]
    silver = table_of(p="a:S b:R c:R d:N x:S")[QRELS].assign(judge="m")
    row = KIT.agreement(silver, gold).to_dict("records")[0]
    chance = 2 / 4 * 1 / 4 + 1 / 4 * 2 / 4 + 1 / 4 * 1 / 4  # S, R, N: share in gold and in silver
    assert row == pytest.approx({"judge": "m", "pairs": 5, "with_gold": 4, "agreement": 3 / 4,
                                 "kappa": (3 / 4 - chance) / (1 - chance), "kappa_relevance": 1})
    asked = SimpleNamespace(condensed=False, silver="s.tsv")
    _, judged = KIT.views_of(asked, None, gold, silver)[" silver"]
    added = [["p", "x", "SUPPORTS"]]  # b keeps its gold label
    assert judged.values.tolist() == gold.values.tolist() + added
    found, done = views(toy, call)
    assert found["silver"][0]["with_gold"] == 3 and found["silver"][0]["agreement"] == 2 / 3
    assert "| m     | 4     | 3         | 0.667     | 0.500 | 0.000           |" in done.stdout

def test_silver_judgements_are_kept_apart_from_gold(toy, call, refused):
    header = [*RUN, "label", "p_supports", "p_refutes", "p_nei"]
    tsv(toy / "verdicts.tsv", header, [("c3", "0001", 1, 2, "NEI", .1, .1, .8),
                                       ("c3", "0012", 2, 1, "REFUTES", .1, .8, .1)])
    done = facts(call(SCRIPT, "merge", "verdicts.tsv", "--judge", "a\tmodel", cwd=toy))
    assert done["made"] == ["work/demo/test/qrels.silver.tsv"] and done["labels"] == 2
    path = toy / done["made"][0]
    assert path.read_text().splitlines() == [
        "claim_id\tabstract_id\tlabel\tjudge", "c3\t0001\tNEI\ta model",
        "c3\t0012\tREFUTES\ta model"]
    for model in ("verdicts.tsv", done["made"][0]):
        refused(toy, SCRIPT, "merge", model, said="do not join the qrels; name it by --judge")
    refused(toy, SCRIPT, "--silver", "data/demo/qrels.test.tsv", said="wanted claim_id, abstract_id"
            ", label, judge")
    done = call(SCRIPT, "--qrels", done["made"][0], cwd=toy)
    assert facts(done) and "silver judgements stand in for gold" in done.stderr

# ---------------------------------------------------------------- Numbers that mean little
def test_a_run_with_few_judged_abstracts_is_named_and_one_with_many_is_not(toy, call):
    tsv(toy / "many.tsv", RUN, [(claim, name, 1, 1) for claim, name, _ in TEST_QRELS[::3]])
    rows = [(claim, f"{rank:04}", rank, -rank) for claim in ("c3", "c4", "c5")
            for rank in range(7, 11)]  # 0007 to 0010: three of twelve are judged
    tsv(toy / "few.tsv", RUN, [(*row[:2], row[2] - 6, row[3]) for row in rows])
    done = call(SCRIPT, "many.tsv", "few.tsv", "--out", "m.tsv", cwd=toy)
    assert facts(done)["runs"]["few"]["Judged@10"] == 3 / 12
    warned = [line for line in done.stderr.splitlines() if "ranks are judged" in line]
    assert len(warned) == 1 and warned[0].startswith("warning: few.tsv: 25% of the first 10 ranks")
    assert warned[0].endswith("python 06_evaluate.py pool few.tsv --data data/demo --work "
                              "work/demo --split test")

def test_advice_quotes_paths_for_the_shell(toy, call):
    (toy / "data/demo").rename(toy / "data/it's")
    tsv(toy / "a (b).tsv", RUN, [("c3", "0001", 1, 9), *(("c3", f"{k:04}", k, -k) for k in (2, 3)),
                                 *(("c3", f"x{k}", k, -k) for k in range(4, 11))])
    done = call(SCRIPT, "a (b).tsv", "--data", "data/it's", "--out", "m.tsv", cwd=toy)
    advice = re.search("what to judge: (.*)", done.stderr)[1]
    assert shlex.split(advice)[:5] == ["python", SCRIPT, "pool", "a (b).tsv", "--data"]
    assert shlex.split(advice)[5] == "data/it's"
    done = call(SCRIPT, "--data", "data/it's", cwd=toy)
    words = shlex.split(re.search("make some by: (.*)", done.stderr)[1])
    assert words == ["python", "02_retrieve.py", "--data", "data/it's", "--work", "work/it's",
                     "--split", "test"]

@pytest.mark.parametrize(("row", "said"), [
    (("3", "0001", 1, 1), "none of its claims is in the qrels: '3' here, 'c3' there"),
    (("c3", "1", 1, 1), "none of its abstracts is in the qrels: '1' here, '0001' there")])
def test_a_run_of_another_data_set_is_refused_with_both_spellings(toy, refused, row, said):
    tsv(toy / "other.tsv", RUN, [row])
    refused(toy, SCRIPT, "other.tsv", "--out", "m.tsv", said=f"other.tsv: {said}")

def test_judged_abstracts_that_are_nowhere_are_counted(toy, call):
    path = toy / "data/demo/qrels.test.tsv"
    path.write_text(path.read_text() + "c3\t99\tSUPPORTS\nc4\t99\tNEI\nc5\t98\tREFUTES\n")
    done = call(SCRIPT, "--out", "m.tsv", cwd=toy)
    assert "2 of 11 judged abstracts are neither in data/demo/corpus.jsonl nor in a run, such as " \
        "'99'" in done.stderr and facts(done)
    (toy / "data/demo/corpus.jsonl").unlink()
    done = call(SCRIPT, "--out", "m.tsv", cwd=toy)
    assert "neither" not in done.stderr and facts(done)  # runs alone cannot tell

def test_labels_beside_qrels_that_may_know_relevance_only(toy, call):
    tsv(toy / "v.tsv", [*RUN, "label"], [("c3", "0001", 1, 1, "REFUTES")])
    for judged, warned in ((TEST_QRELS, False), (TEST_QRELS[:3], True)):
        tsv(toy / "q.tsv", QRELS, judged)
        done = call(SCRIPT, "v.tsv", "--qrels", "q.tsv", "--out", "m.tsv", cwd=toy)
        assert facts(done) and ("no pair of q.tsv is REFUTES" in done.stderr) == warned

def test_published_figures_stand_beside_measured_ones(toy, call):
    tsv(toy / "recipes" / "published.tsv", ["system", "table", "row", "measure", "value"],
        [("mine", "A", "hybrid", "R@5", 0.25), ("mine", "A", "other", "R@5", 0.5),
         ("mine", "B", "hybrid", "R@5", 0.75)])
    words = ("work/demo/test/hybrid.tsv", "--measures", "R@5", "--resamples", 10, "--out", "m.tsv")
    for name, figure in (("mine", 0.25), ("mine:B", 0.75)):
        facts(call(SCRIPT, *words, "--published", name, cwd=toy))
        table = pd.read_csv(toy / "m.tsv", sep="\t")
        assert list(table) == ["run", "R@5", "R@5 published"]
        assert list(table["run"]) == ["hybrid"]  # rows without a run are left out
        assert table["R@5 published"].tolist() == [figure]

def test_what_was_pooled_and_labelled_is_merged(toy, call):
    tsv(toy / "a.tsv", RUN, [("c3", "0001", 1, 3), ("c3", "0011", 2, 2), ("c4", "0012", 1, 1)])
    tsv(toy / "b.tsv", RUN, [("c3", "0010", 1, 3), ("c3", "0011", 2, 2), ("c3", "0009", 3, 1)])
    facts(call(SCRIPT, "pool", "a.tsv", "b.tsv", "--pool-depth", 2, "--out", "pool.tsv", cwd=toy))
    pool = read(toy / "pool.tsv")
    wanted = [["c3", "0010"], ["c3", "0011"], ["c4", "0012"]]  # in the order of the corpus
    assert pool[KEY].values.tolist() == wanted and (pool["abstract"] != "").all()
    as_run = [["c3", "0010", "1", "-1"], ["c3", "0011", "2", "-2"], ["c4", "0012", "1", "-1"]]
    assert read(toy / "pool.run.tsv")[RUN].astype(str).values.tolist() == as_run
    pool["label"] = ["NEI", "", "REFUTES"]
    pool.to_csv(toy / "labelled.tsv", sep="\t", index=False)
    done = call(SCRIPT, "merge", "labelled.tsv", "--out", "more.tsv", cwd=toy)
    assert facts(done)["without_label"] == 1
    added = [[*wanted[0], "NEI"], [*wanted[2], "REFUTES"]]
    merged = read(toy / "more.tsv")[QRELS].values.tolist()
    assert sorted(merged) == sorted(TEST_QRELS + added)
    assert [row[0] for row in merged] == ["c3"] * 4 + ["c4"] * 4 + ["c5"] * 3  # claim by claim

def test_a_pool_can_ask_for_the_agreement_of_runs(toy, call, refused):
    rows = {"a": ["0001", "0010", "0011"], "b": ["0012", "0011", "0010"], "c": ["0012"]}
    for name, found in rows.items():
        ranked = enumerate(found, 1)
        tsv(toy / f"{name}.tsv", RUN, [("c3", abstract, k, -k) for k, abstract in ranked])
    runs = ("a.tsv", "b.tsv", "c.tsv")
    for least, pairs in ((1, ["0010", "0011", "0012"]), (2, ["0012"]), (3, [])):
        words = ("--pool-depth", 2, "--agreement", least, "--out", "p.tsv")
        done = facts(call(SCRIPT, "pool", *runs, *words, cwd=toy))  # b has 0010 third: too deep
        assert read(toy / "p.tsv")["abstract_id"].tolist() == pairs
        assert done["pairs"] == len(pairs) and done["judged_already"] == (least == 1)
    refused(toy, SCRIPT, "pool", *runs, "--agreement", 4, said="4 runs, but there are 3")

@pytest.mark.parametrize(("task", "text"), [
    ("climatecheck2026", "claim_id,abstract_id,rank,label\nc3,d1,1,Supports\nc3,d2,2,Refutes\n"),
    ("checkthat4b", "post_id\tpreds\nc3\t['d1', 'd2']\n")])
def test_a_submission_is_the_file_that_the_task_asks_for(toy, call, task, text):
    (toy / "data/demo/corpus.jsonl").write_text(
        "".join(f'{{"abstract_id": "d{rank}", "abstract": "x"}}\n' for rank in range(1, 13)))
    rows = [(claim, f"d{rank}", rank, -rank, label) for claim in ("c5", "c4", "c3")
            for rank, label in enumerate(["SUPPORTS", "REFUTES", *["NEI"] * 10], 1)]
    tsv(toy / "v.tsv", [*RUN, "label"], rows)
    words = (SCRIPT, "submission", "v.tsv", "--task", task)
    file, archive = (toy / path for path in facts(call(*words, "--top-k", 2, cwd=toy))["made"])
    assert file.read_text().startswith(text)
    with zipfile.ZipFile(archive) as zipped:
        assert zipped.namelist() == [file.name] and zipped.read(file.name) == file.read_bytes()
    facts(call(*words, cwd=toy))
    assert facts(call(*words, "--out", "sub.zip", cwd=toy))["made"] == [
        f"sub{file.suffix}", "sub.zip"]  # the table is made with its zip
    assert (toy / f"sub{file.suffix}").read_bytes() == file.read_bytes()
    assert len(set(re.findall(r"d\d+", file.read_text()))) == (5 if task == "checkthat4b" else 10)

def test_a_submission_with_narratives_has_them_in_all_rows_of_a_claim(toy, call, refused):
    rows = [(claim, f"00{rank:02}", rank, -rank) for claim in ("c3", "c4", "c5")
            for rank in (1, 2)]
    tsv(toy / "v.tsv", RUN, rows)
    header, codes = ["claim_id", "codes"], [("c5", "0_0"), ("c3", "1_4;5_2"), ("c4", "2_1")]
    words = (SCRIPT, "submission", "v.tsv", "--task", "climatecheck2026-narratives", "--top-k", 2,
             "--narratives", "n.tsv", "--out", "s.csv")
    tsv(toy / "n.tsv", header, codes[:2])
    refused(toy, *words, said="n.tsv: no codes for claim c4")
    tsv(toy / "n.tsv", header, codes)
    facts(call(*words, cwd=toy))
    table = pd.read_csv(toy / "s.csv", dtype=str)
    assert list(table) == [*RUN[:3], "narrative"]
    assert table.groupby("claim_id", sort=False)["narrative"].agg(list).to_dict() == {
        "c3": ["1_4;5_2"] * 2, "c4": ["2_1"] * 2, "c5": ["0_0"] * 2}

# ---------------------------------------------------------------- Verdicts on claims
def test_verdicts_on_claims_are_scored_against_the_labels_of_their_evidence(capsys):
    qrels = table_of(a="x:S y:N", b="x:R", c="x:R y:S", d="x:N", e="x:S", f="x:R")
    gold = ["SUPPORTED", "REFUTED", "DISPUTED", "NOT ENOUGH INFORMATION", "SUPPORTED", "REFUTED"]
    assert KIT.gold_verdicts(qrels).to_dict() == dict(zip("abcdef", gold))
    given = ["SUPPORTED", "SUPPORTED", "REFUTED", "NOT ENOUGH INFORMATION", "REFUTED", ""]
    verdicts = {claim: {"verdict": verdict} for claim, verdict in zip("abcdeg", given)}
    verdicts["g"] = {"verdict": "REFUTED"}  # no such claim; there is none on f
    scores = KIT.score_verdicts("claims.jsonl", verdicts, qrels)
    assert scores["accuracy"] == accuracy_score(gold, given) == 2 / 6
    right, both = np.array([1, 0, 0, 1]), np.array([2 + 2, 2 + 2, 1 + 0, 1 + 1])
    assert scores["macro_f1"] == pytest.approx(np.mean(2 * right / both))
    assert scores["macro_f1"] == pytest.approx(
        f1_score(gold, given, average="macro", labels=KIT.VERDICTS))
    assert scores["counts"]["REFUTED"] == {
        "SUPPORTED": 1, "REFUTED": 0, "DISPUTED": 0, "NOT ENOUGH INFORMATION": 0, "none": 1}
    assert "1 judged claims without a verdict count as wrong, 1 verdicts on other claims" in (
        capsys.readouterr().err)
    only = {claim: {"verdict": "SUPPORTED"} for claim in "ae"}  # verdicts that do not occur
    scores = KIT.score_verdicts("claims.jsonl", only, qrels[qrels["claim_id"].isin(["a", "e"])])
    assert scores["accuracy"] == scores["macro_f1"] == 1

def test_verdicts_are_printed_and_kept_where_there_are_some(toy, call, refused):
    line = '{{"claim_id": "{}", "verdict": "{}", "evidence": []}}\n'
    path = toy / "work/demo/test/claims.jsonl"  # c3 is supported, c4 and c5 are refuted
    path.write_text(line.format("c3", "SUPPORTED") + line.format("c4", "DISPUTED"))
    done = call(SCRIPT, cwd=toy)
    assert facts(done)["claims"]["accuracy"] == 1 / 3
    assert "claims.jsonl: accuracy 0.333, macro F1 0.333." in done.stdout
    again = call(SCRIPT, cwd=toy)
    assert facts(again)["claims"] == facts(done)["claims"]
    assert again.stdout.splitlines()[-9:-1] == done.stdout.splitlines()[-9:-1]
    for text, said in ((line.format("c9", "SUPPORTED"),
                        "none of its claims is in the qrels: 'c9' here, 'c3' there"),
                       (line.format("c3", "TRUE"), "claims.jsonl:1: not a verdict"),
                       (line.format("c3", "REFUTED") * 2, "claims.jsonl:2: not a verdict")):
        path.write_text(text)
        refused(toy, SCRIPT, "--force", "--aggregated", path, said=said)

def test_verdicts_that_nobody_named_are_left_out_if_they_are_on_other_claims(toy, call):
    path = toy / "work/demo/test/claims.jsonl"
    path.write_text('{"claim_id": "c9", "verdict": "SUPPORTED", "evidence": []}\n')
    for _ in range(2):  # the second call is up to date
        done = call(SCRIPT, cwd=toy)
        assert "claims" not in facts(done)
        assert "claims.jsonl: left out, as none of its claims is in" in done.stderr

# ---------------------------------------------------------------- The page
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")

def data_of(page):
    return json.loads(re.search(r'application/json">(.*?)</script>', page, re.S)[1])

def clicked(folder, page, script):
    """Return the page as a browser has it after the script; skip the test without a browser."""
    if not BROWSER:
        pytest.skip("no Chromium: the scripts of the page are not tested")
    path = folder / "clicked.html"
    path.write_text(page.replace("</html>", f"<script>{script}</script></html>"))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
               f"--user-data-dir={folder / 'profile'}", path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout

def test_the_report_shows_texts_as_texts(toy, call):
    evil = "</script><script>document.title = 'gotcha'</script><b>bold</b> @DATA@"
    tsv(toy / "data/demo/claims.test.tsv", ["claim_id", "claim"], [("c3", evil), ("c4", "sun")])
    tsv(toy / "<u>x.tsv", [*RUN, "label"], [("c3", "0001", 1, 1, "NEI")])
    (toy / "claims.jsonl").write_text('{"claim_id": "c3", "verdict": "DISPUTED", "evidence": '
                                      '[{"abstract_id": "0001", "sentence": "Body mass"}]}')
    words = ("work/demo/test/hybrid.tsv", "<u>x.tsv", "--report", "report.html", "--aggregated")
    done = call(SCRIPT, *words, "claims.jsonl", "--resamples", 100, cwd=toy)
    page = (toy / "report.html").read_text()
    assert facts(done) and "claims.test.tsv: lacks 1 of 3 judged claims" in done.stderr
    assert "<h1>demo, test: 3 judged claims, 2 of them with text</h1>" in page
    assert not re.findall(r"(?:src|href)=\"(?!#)", page) and page.count("<svg") == 1
    assert "gotcha'</script>" not in page and "<u>" not in page
    data = data_of(page)
    assert data["claims"][0]["text"] == evil and data["claims"][0]["recall"] == [1, 1 / 2]
    rows = [["c3", "0001", "SUPPORTS", 1, "NEI"], ["c3", "0002", "SUPPORTS", 0, ""]]  # one missed
    assert [row for row in dict(data["runs"])["<u>x"] if row[0] == "c3"] == rows
    seen = clicked(toy, page, """search.value = 'disputed'; search.oninput();
        const claim = data.claims[0].node; claim.open = true; claim.ontoggle();
        document.title = count.textContent""")
    assert "<title>1 of 2 claims</title>" in seen and "&lt;b&gt;bold&lt;/b&gt;" in seen
    assert '<mark class="">Body mass</mark>' in seen and "said NEI" in seen

def test_the_page_shows_ten_ranks_and_the_evidence_behind_them():
    run, qrels = table_of(c=" ".join(NAMES[:14])), table_of(c="a:N k:S l:N z:R")[QRELS]
    rows = [(name, rank, label) for _, name, label, rank, _ in KIT.side_by_side(run, qrels)]
    ten = [(name, rank, "NEI" if name == "a" else "") for rank, name in enumerate(NAMES[:10], 1)]
    assert rows == [*ten, ("z", 0, "REFUTES"), ("k", 11, "SUPPORTS")]

@pytest.mark.parametrize("number", [1, 19, 40])
def test_the_curves_of_many_runs_have_room_beside_their_names(number):
    curve = pd.DataFrame({"k": [1, 10, 100], "recall": [0.1, 0.5, 0.9]})
    picture = KIT.plot({f"run {n}": SimpleNamespace(curve=curve) for n in range(number)})
    height = float(re.search(r'viewBox="0 0 \S+ (\S+)"', picture)[1])
    frame = re.search('id="patch_2">(.*?)</g>', picture, re.DOTALL)[1]
    y = [float(corner) for corner in re.findall(r"[ML] \S+ (\S+)", frame)]
    assert max(y) - min(y) > 0.8 * height

def test_names_of_runs_and_abstracts_mean_nothing_to_the_page(toy, call):
    """Integers are no order, constructor and __proto__ no properties, _ hides no line of a plot."""
    record = '{{"abstract_id": "{}", "abstract": "It melts."}}\n'
    (toy / "data/demo/corpus.jsonl").write_text("".join(map(record.format, ("constructor", "b"))))
    tsv(toy / "data/demo/qrels.test.tsv", QRELS, [
        ("c3", "constructor", "SUPPORTS"), ("c3", "__proto__", "SUPPORTS"), ("c4", "b", "NEI")])
    tsv(toy / "10.tsv", RUN, [("c3", "constructor", 1, 2), ("c3", "__proto__", 2, 1)])
    tsv(toy / "2.tsv", RUN, [("c3", "b", 1, 1)])
    tsv(toy / "_x.tsv", RUN, [("c3", "constructor", 1, 1)])
    runs = ("10.tsv", "2.tsv", "_x.tsv")
    facts(call(SCRIPT, *runs, "--report", "r.html", "--out", "m.tsv", cwd=toy))
    page = (toy / "r.html").read_text()
    assert ">_x</text>" in page[:page.index("application/json")]
    data = data_of(page)
    assert [name for name, _ in data["runs"]] == ["10", "2", "_x"]
    assert [claim["recall"] for claim in data["claims"]] == [[1, 0, 1 / 2], [None] * 3]
    seen = clicked(toy, page, """const claim = data.claims[0].node; claim.open = true;
        claim.ontoggle(); order.value = 1; order.onchange();
        document.title = data.claims[0].node.textContent""")
    title = re.search("<title>(.*?)</title>", seen, re.S)[1]
    assert "10 1.00" in title and "2 0.00" in title and "_x 0.50" in title and "It melts." in title

def test_verdicts_that_are_named_must_be_there(toy, refused):
    refused(toy, SCRIPT, "work/demo/test/hybrid.tsv", "--aggregated", "nowhere.jsonl",
            said="nowhere.jsonl: no such file")
