"""06_evaluate.py: formulas against arithmetic by hand and other implementations; tables; jobs."""

import functools
import itertools
import json
import re
import zipfile
from fractions import Fraction

import ir_measures
import numpy as np
import pandas as pd
import pytest
from conftest import CLAIMS, LABELLED, QRELS, RUN, cases, facts, load, tsv
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import precision_recall_fscore_support

SCRIPT = "06_evaluate.py"
KIT = load(SCRIPT)
LABELS = {"S": "SUPPORTS", "R": "REFUTES", "N": "NEI"}
NAMES = "abcdefghijklmnopqrst"  # of abstracts
HYBRID = "work/demo/test/hybrid.tsv"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # as the script does itself


def table_of(**claims):
    """Rows of claim="a:S b:N", in order of rank; without labels claim="a b"."""
    rows = []
    for claim_id, pairs in claims.items():
        for rank, pair in enumerate(pairs.split(), 1):
            rows.append((claim_id, pair[0], rank, -rank, LABELS.get(pair[2:])))
    return pd.DataFrame(rows, columns=[*RUN, "label"]).dropna(axis=1)


def measure(run, qrels, *names, depth=10):
    """The script's own numbers for one run, as floats."""
    components = KIT.components_of(run, qrels, names, depth)
    sums = {name: component.sum(0) for name, component in components.items()}
    return dict(zip(names, KIT.values_of(sums, names).tolist()))


# ---------------------------------------------------------------- Measures
@pytest.mark.parametrize("run, judged, name, value, by_hand", cases("measures.tsv"))
def test_measures_by_hand(run, judged, name, value, by_hand):
    run, judged = (dict(re.findall(r"([\w-]+): ([^;]+)", text)) for text in (run, judged))
    found = measure(table_of(**run), table_of(**judged), name)[name]
    value = np.nan if value == "none" else float(Fraction(value))
    assert found == pytest.approx(value, abs=1e-5, nan_ok=True), by_hand


def test_the_organisers_arithmetic_by_hand():
    qrels = table_of(c1="a:S b:R n:N m:N", c2="d:S", c3="e:R f:S g:S o:N", c4="h:S p:N", c5="k:N")
    run = table_of(c1="n:N a:R x:S b:R", c2="x:N d:S", c3="e:R f:S o:S x:N g:N", c5="k:N")
    wanted = {
        "R@2": (1 / 2 + 1 + 2 / 3 + 0) / 4,  # c1 to c4, which was not submitted; c5 has no evidence
        "R@5": (1 + 1 + 1 + 0) / 4,
        "R@10": 3 / 4,
        # c1: a and b behind n, R = 2: 1 - 1/2 each. c3: e, f; g behind o, R = 3: 1 - 1/3
        "B-Pref": ((1 / 2 + 1 / 2) / 2 + (1 + 1 + 2 / 3) / 3) / 2,
        # gold: S a d f g, R b e, N n o k; given: S d f o, R a b e, N n g k; right: d f, b e, n k
        "P": (4 * 2 / 3 + 2 * 2 / 3 + 3 * 2 / 3) / 9,
        "R": (4 * 2 / 4 + 2 * 2 / 2 + 3 * 2 / 3) / 9,
        "F1": (4 * 4 / 7 + 2 * 4 / 5 + 3 * 4 / 6) / 9,
    }
    wanted["Subtask I"] = (13 / 24 + 3 / 4 + 3 / 4 + 25 / 36) / 4
    wanted["Subtask II"] = wanted["F1"] + 3 / 4
    assert measure(run, qrels, *wanted) == pytest.approx(wanted)


def literal(run, qrels):
    """The organisers' arithmetic, step by step."""
    recalls = {2: [], 5: [], 10: []}
    bprefs = []
    for claim_id, gold in qrels.groupby("claim_id"):
        relevant = set(gold["abstract_id"][gold["label"] != "NEI"])
        others = set(gold["abstract_id"]) - relevant
        found = run[run["claim_id"] == claim_id].sort_values("rank")["abstract_id"].tolist()
        if not relevant:
            continue
        for k, values in recalls.items():
            values.append(len(relevant & set(found[:k])) / len(relevant))
        if found and others:
            n = 0
            total = 0.0
            for abstract_id in found:
                if abstract_id in others and n < len(relevant):
                    n += 1
                if abstract_id in relevant:
                    total += 1 - n / len(relevant)
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


@settings(
    max_examples=60,
    deadline=None,  # shrinking a failed example takes minutes
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(judged_runs())
def test_measures_equal_the_literal_transcription_scikit_learn_and_ir_measures(case):
    run, qrels = case
    rankings = ("R@2", "R@5", "R@10", "B-Pref")
    found = measure(run, qrels, *rankings, depth=10)
    expected = literal(run[run["rank"] <= 10], qrels)
    assert list(found.values()) == pytest.approx(expected, nan_ok=True)
    both = run.merge(qrels, on=QRELS[:2], suffixes=("", "_gold"))
    expected = [np.nan] * 4
    if len(both):
        score = functools.partial(
            precision_recall_fscore_support, both["label_gold"], both["label"], zero_division=0
        )
        *expected, _ = score(average="weighted")
        expected.append(score(average="macro")[2])
    found = measure(run, qrels, *rankings, "P", "R", "F1", "macro F1", depth=99)
    expected = [*literal(run, qrels), *expected]
    assert list(found.values()) == pytest.approx(expected, nan_ok=True)
    names = {"claim_id": "query_id", "abstract_id": "doc_id"}
    judged = qrels.assign(relevance=(qrels["label"] != "NEI").astype(int)).rename(columns=names)
    ranked = run.assign(score=-run["rank"].astype(float)).rename(columns=names)
    with_evidence = qrels["claim_id"][qrels["label"] != "NEI"]
    theirs = "R@5 RR@5 Success@3 nDCG@10 AP RR Bpref P@5 Judged@10".split()
    ours = "R@5 MRR@5 Success@3 nDCG@10 AP RR Bpref P@5 Judged@10".split()
    found = measure(run, qrels, *ours)
    for number, claims in ((slice(8), with_evidence), (slice(8, 9), qrels["claim_id"])):
        if len(claims):
            tables = [table[table["query_id"].isin(claims)] for table in (judged, ranked)]
            wanted = [ir_measures.parse_measure(name) for name in theirs[number]]
            values = ir_measures.calc_aggregate(wanted, *tables)
            expected = [values[measure] for measure in wanted]
            assert [found[name] for name in ours[number]] == pytest.approx(expected)


# ---------------------------------------------------------------- Comparison and tables
def compared(runs, qrels, names, resamples=20_000):
    """The components of runs, by run, and what compare() makes of them."""
    components = {name: KIT.components_of(run, qrels, names, 10) for name, run in runs.items()}
    return components, KIT.compare(components, names, resamples, 13)


def test_intervals_equal_scipys_and_p_values_all_swaps_counted_out():
    rng = np.random.default_rng(2)
    names = ["R@5", "B-Pref", "F1", "Subtask II", "R@10"]

    def drawn(count):
        names = rng.permutation(list(NAMES))[:count]
        return " ".join(f"{name}:{rng.choice(list(LABELS))}" for name in names)

    qrels = table_of(**{f"c{place}": drawn(7) for place in range(8)})
    a, b = (table_of(**{f"c{place}": drawn(12) for place in range(8)}) for _ in "ab")
    parts, cells = compared({"a": a, "b": b, "c": a}, qrels, names)
    for field in ("difference", "p", "p_holm"):
        assert cells[field].loc["a"].isna().all()
    assert (cells["p"].loc["c"] == 1).all()  # the same run
    turns = np.array(list(itertools.product((0, 1), repeat=8)))  # 256 ways to swap eight claims
    these = {}
    those = {}
    for name, first in parts["a"].items():
        moved = np.tensordot(turns, parts["b"][name] - first, (1, 0))
        these[name] = first.sum(0) + moved
        those[name] = parts["b"][name].sum(0) - moved
    apart = abs(KIT.values_of(these, names) - KIT.values_of(those, names))
    exact = np.mean(apart >= apart[0] - 1e-12, axis=0)
    found = cells["p"].loc["b", names].tolist()
    assert found == pytest.approx(exact, abs=0.02)
    recalls = np.divide(*parts["b"]["R@5"].T)
    theirs = stats.bootstrap((recalls[~np.isnan(recalls)],), np.mean, method="percentile", rng=5)
    found = tuple(cells[field].loc["b", "R@5"] for field in ("low", "high"))
    assert found == pytest.approx(tuple(theirs.confidence_interval), abs=0.015)


def test_swaps_that_leave_no_value_do_not_make_p_smaller():
    """Each run has rows for one claim: after one of two swaps, one run has no B-Pref at all."""
    qrels = table_of(c="a:S n:N", d="a:S n:N")
    _, cells = compared({"first": table_of(c="a n"), "other": table_of(d="n a")}, qrels, ["B-Pref"])
    assert cells["difference"].loc["other", "B-Pref"] == -1
    assert cells["p"].loc["other", "B-Pref"] == 1


def test_holm():
    holm = KIT.holm(pd.Series([0.01, 0.04, 0.03, np.nan])).tolist()
    assert holm == pytest.approx([0.03, 0.06, 0.06, np.nan], nan_ok=True)


def test_wilcoxon_and_mcnemar(tmp_path, program):
    tool = load("recipes/tools/significance.py")
    differences = pd.Series([0.5, 0.25, -0.1, 0.1, 0.6])
    expected = stats.wilcoxon([0.5, 0.25, -0.1, 0.1, 0.6]).pvalue
    assert tool.wilcoxon(differences) == pytest.approx(expected)
    noise = pd.Series([0.5, 0.25, 1e-17, -0.1 + 1e-17, 0.1, 0.6])  # rounding decides no rank
    assert tool.wilcoxon(noise) == pytest.approx(tool.wilcoxon(noise.round(3)))
    assert abs(tool.wilcoxon(noise) - stats.wilcoxon(noise).pvalue) > 1e-3
    hits = pd.Series([1, 1, 1, 1, -1, 0])
    assert tool.mcnemar(hits) == pytest.approx(2 * (1 + 5) / 2**5)  # 4 against 1: two tails
    assert [tool.wilcoxon(hits * 0), tool.mcnemar(hits * 0)] == pytest.approx([1, 1])
    path = tmp_path / "metrics.claims.tsv"
    values = "b|1|0.5|1; b|2|0.1|0; b|3||; b|4|0.2|0; a|1|0.1|0; a|2|0.2|0; a|3|0.3|0; a|4|0.8|1"
    tsv(path, ["run", "claim_id", "MRR@5", "Success@1"], values)
    words = f"{path} --measures"
    shown = program("tools/significance", f"{words} MRR@5 Success@1", cwd=tmp_path).stdout
    lines = [line.split("\t") for line in shown.splitlines()]
    assert lines[0] == "measure run claims difference won lost p_wilcoxon p_mcnemar".split()
    # b comes first, and has no value for the third claim
    mean = (0.1 - 0.5 + 0.2 - 0.1 + 0.8 - 0.2) / 3
    assert lines[1][:3] == ["MRR@5", "a", "3"] and float(lines[1][3]) == pytest.approx(mean)
    assert lines[1][7] == "" and lines[2][4:6] == ["1", "1"] and float(lines[2][7]) == 1
    done = program("tools/significance", f"{words} nDCG", cwd=tmp_path)
    assert done.returncode == 2 and "no measure nDCG; it has MRR@5, Success@1" in done.stderr


# ---------------------------------------------------------------- Tables
def test_tables_mark_best_and_second_and_escape_names():
    values = pd.DataFrame(
        {"R@5": [0.1, 0.3, 0.2], "F1": [np.nan, 0.5, 0.5]}, ["a_b|<i>&$", "x", "y"]
    )
    p = pd.DataFrame({"R@5": [np.nan, 0.01, 0.2], "F1": [np.nan] * 3}, values.index)
    cells = {"value": values, "low": values - 0.1, "high": values + 0.1, "p_holm": p}
    shown = KIT.markdown(KIT.cell_texts(cells), []).splitlines()
    assert shown[1:5] == [
        "| --------------- | ---------- | ----- |",
        r"| a\_b\|\<i\>\&\$ | 0.100      | -     |",
        "| x               | **0.300†** | 0.500 |",
        "| y               | *0.200*    | 0.500 |",
    ]
    parts = {run: {"R@5": np.ones((1, 2)), "confusion": np.ones((1, 3, 3))} for run in values.index}
    tex = KIT.tables_of(cells, parts, ["c"], {})[KIT.TABLES.index(".tex")]
    assert r"a\_b|<i>\&\$ & 0.100 & - \\" in tex and r"\textbf{0.300$^\dagger$} & 0.500 \\" in tex


def test_tables_explain_only_what_they_show():
    values = pd.DataFrame({"R@5": [0.1, 0.3]}, ["x", "y"])
    cells = {"value": values, "p_holm": values + 1}
    notes = "\n".join(KIT.notes_on(cells, "claims"))
    assert notes == (
        "Bold: the best run. Italics: the second best.\nMeans are over claims with evidence."
    )
    cells = {field: cell.set_axis(["pooled R@5"], axis=1) for field, cell in cells.items()}
    notes = "\n".join(KIT.notes_on(cells, "claims"))
    assert "Pooled" in notes and "Means are" not in notes and "B-Pref" not in notes
    cells["p_holm"] *= 0
    assert KIT.notes_on(cells, "claims")[1].startswith("† differs")


def test_a_wide_table_is_split_into_parts_that_fit_a_terminal():
    names = [f"pooled R@{k}" for k in range(1, 16)]
    values = pd.DataFrame(0.5, index=["bm25", "a-run-with-a-long-name"], columns=names)
    cells = {"value": values, "p_holm": values}
    shown = KIT.markdown(KIT.cell_texts(cells), KIT.notes_on(cells, "claims"))
    first, second, *more, notes = shown.split("\n\n")
    assert notes == "Pooled R@k is the share of all evidence pairs that is found."
    headers = []
    for part in (first, second, *more):
        lines = part.strip().splitlines()
        assert len(lines) == 4 and max(map(len, lines)) <= 100
        assert lines[2].startswith("| bm25                   | 0.500")
        run, *columns = lines[0].strip("| ").split(" | ")
        headers += [column.strip() for column in columns]
    assert headers == names  # each once, in their order
    narrow = KIT.cell_texts(cells)[["run", names[0]]]
    assert len(KIT.markdown(narrow, [notes]).split("\n\n")) == 2


def test_outputs_agree_and_what_is_missing_is_counted(toy, call):
    tsv(toy / "work/demo/test/bm25.tsv", RUN, "c3|0003|1|2; c3|0001|2|1")
    tsv(toy / "a.tsv", LABELLED, "c4|0004|1|2|REFUTES; c5|0009|1|2|NEI; c9|1|1|2|NEI")
    words = "work/demo/test/bm25.tsv a.tsv --measures climatecheck2025 Success@1 --out out/m.tsv"
    done = call(SCRIPT, words, cwd=toy)
    assert facts(done)["runs"] == 2 and len(done.stdout.splitlines()[-1]) < 200
    numbers = json.loads((toy / "out/m.json").read_text())
    values = numbers["value"]
    counts = numbers["counts"]
    assert values["bm25"]["R@2"] == pytest.approx(1 / 6) and values["bm25"]["F1"] is None
    assert values["a"]["R@5"] == pytest.approx(1 / 6) and values["a"]["F1"] == 1
    assert numbers["low"]["a"]["R@5"] <= 1 / 6 <= numbers["high"]["a"]["R@5"]
    assert 0 < numbers["p"]["a"]["R@5"] <= numbers["p_holm"]["a"]["R@5"] <= 1
    assert counts["bm25"] == {"claims without rows": 2, "claims not judged": 0}
    basis = {"labelled pairs": 2, "judged pairs": 2, "majority F1": 1 / 2 * 2 / 3}
    assert basis.items() <= counts["a"].items()
    line = (
        "a: claims without rows: 1.\na: claims not judged: 1.\na: P, R, F1 of 2 judged pairs of 2 "
    )
    assert line + "labelled ones; F1 of the majority label is 0.333.\n" in done.stdout
    assert "bm25: claims without rows: 2.\n" in done.stdout
    assert "\n-: no value, such as F1" in done.stdout
    table, claims = (pd.read_csv(toy / f"out/m{name}.tsv", sep="\t") for name in ("", ".claims"))
    means = claims.groupby("run", sort=False)[["R@5", "Success@1"]].mean()
    assert means["R@5"].tolist() == pytest.approx(table["R@5"].tolist())
    assert means.loc["a", "Success@1"] == pytest.approx(1 / 3)
    again = call(SCRIPT, words, cwd=toy)  # the one job that is always done again
    assert again.stdout == done.stdout
    assert call(SCRIPT, cwd=toy).stdout.count("\n| hybrid ") == 1  # bm25 and hybrid are there
    tsv(toy / "q.tsv", QRELS, "c3|0001|SUPPORTS")
    made = facts(call(SCRIPT, "--qrels q.tsv --resamples 10", cwd=toy))["made"]
    assert made[0] == "work/demo/test/metrics-q.tsv"
    words = words.replace("out/m.tsv", "out/n.tsv --resamples 0")
    facts(call(SCRIPT, words, cwd=toy))
    without = json.loads((toy / "out/n.json").read_text())
    assert without["value"] == values and without["p"]["a"]["R@5"] is None


MEASURE = {
    "MEASURES = {": """def first_half(judgements):
    \"\"\"Share of evidence among the first half of the ranks\"\"\"
    half = judgements.gold[:, : judgements.gold.shape[1] // 2]
    return mean_over(judgements.R > 0, is_evidence(half).sum(1) / judgements.R)

MEASURES = {"Half": Measure(first_half, "Half@k reads half of them."), """
}


def test_a_measure_in_the_registry_is_computed(toy, call):
    words = f"{HYBRID} --measures Half@4 R@2 --out m.tsv"
    done = call(SCRIPT, words, cwd=toy, edits=MEASURE)
    assert facts(done) and "\nHalf@k reads half of them.\nMeans are over" in done.stdout
    table = pd.read_csv(toy / "m.tsv", sep="\t")
    assert table["Half@4"].tolist() == table["R@2"].tolist() != [0]


# ---------------------------------------------------------------- The page
def data_of(page):
    return json.loads(re.search(r'application/json">(.*?)</script>', page, re.S)[1])


def test_the_report_shows_texts_as_texts(toy, call):
    evil = "</script><script>document.title = 'gotcha'</script><b>bold</b> @DATA@"
    tsv(toy / "data/demo/claims.test.tsv", CLAIMS, [("c3", evil), ("c4", "sun")])
    tsv(toy / "<u>x.tsv", LABELLED, "c3|0001|1|1|NEI")
    (toy / "work/demo/test/claims.jsonl").write_text(
        '{"claim_id": "c3", "verdict": "DISPUTED", "evidence": '
        '[{"abstract_id": "0001", "sentence": "Body mass"}]}'
    )
    facts(call(SCRIPT, f"{HYBRID} <u>x.tsv --report report.html --resamples 100", cwd=toy))
    page = (toy / "report.html").read_text()
    assert not re.findall(r"(?:src|href)=\"(?!#)", page)
    assert "gotcha'</script>" not in page and "<u>" not in page
    shown = " ".join(re.sub("<[^>]+>", " ", page).split())
    assert "&lt;u&gt;x 0.167 0.000–0.500 " in shown and "SUPPORTS 0 0 1 REFUTES 0 0 0 " in shown
    assert "Below a value: its 95 % bootstrap interval over claims." in page
    assert data_of(page)["abstracts"]["0001"][2:] == ["", ""]  # url, doi
    data = data_of(page)
    assert list(dict(data["runs"])) == ["hybrid", "<u>x"]  # as in the table
    assert page.count("data.runs.map(([name], n) =>") == 2  # a claim's line and the selection, too
    assert data["title"] == "demo, test: 3 judged claims"
    assert data["claims"][0]["claim"] == evil and data["claims"][0]["recall"] == [1, 1 / 2]
    assert data["claims"][0]["verdict"] == "DISPUTED"
    rows = [
        ["c3", "0001", "SUPPORTS", 1, "NEI"],
        ["c3", "0002", "SUPPORTS", 1e9, None],
    ]  # one missed
    assert [row for row in dict(data["runs"])["<u>x"] if row[0] == "c3"] == rows


def test_the_page_shows_ten_ranks_and_the_evidence_behind_them():
    run = table_of(c=" ".join(NAMES[:14]))
    qrels = table_of(c="a:N k:S l:N z:R")[QRELS]
    rows = [(name, rank, label) for _, name, label, rank, _ in KIT.side_by_side(run, qrels)]
    ten = [(name, rank, "NEI" if name == "a" else None) for rank, name in enumerate(NAMES[:10], 1)]
    assert rows == [*ten, ("k", 11, "SUPPORTS"), ("z", 1e9, "REFUTES")]


# ---------------------------------------------------------------- Submissions
@pytest.mark.parametrize(
    "task, text",
    [
        (
            "climatecheck2026",
            "claim_id,abstract_id,rank,label\nc3,d1,1,Supports\nc3,d2,2,Refutes\n",
        ),
        ("checkthat4b", "post_id\tpreds\nc3\t['d1', 'd2']\n"),
    ],
)
def test_a_submission_is_the_file_that_the_task_asks_for(toy, call, task, text):
    (toy / "data/demo/corpus.jsonl").write_text(
        "".join(f'{{"abstract_id": "d{rank}", "abstract": "x"}}\n' for rank in range(1, 13))
    )
    labels = ["SUPPORTS", "REFUTES", *["NEI"] * 10]
    rows = []
    for claim_id in ("c5", "c4", "c3"):
        for rank, label in enumerate(labels, 1):
            rows.append((claim_id, f"d{rank}", f"{rank}.0", -rank, label))  # ranks of floats
    tsv(toy / "v.tsv", LABELLED, rows)
    words = f"submission v.tsv --task {task}"
    made = facts(call(SCRIPT, f"{words} --top-k 2", cwd=toy))["made"]
    file, archive = (toy / path for path in made)
    assert file.read_text().startswith(text)
    with zipfile.ZipFile(archive) as zipped:
        assert zipped.namelist() == [file.name] and zipped.read(file.name) == file.read_bytes()
    facts(call(SCRIPT, words, cwd=toy))
    assert len(set(re.findall(r"d\d+", file.read_text()))) == (5 if task == "checkthat4b" else 10)
    assert "up to date" in call(SCRIPT, words, cwd=toy).stdout
    tsv(toy / "r.tsv", RUN, [row[:4] for row in rows])
    unlabelled = call(SCRIPT, f"submission r.tsv --task {task} --out u", cwd=toy)
    assert ("it has no labels" in unlabelled.stderr) == task.startswith("climatecheck")


def test_a_measure_without_a_value_is_said_and_a_comma_may_be_in_one(toy, call):
    measures = ("F1", "P@1", "P(rel=1, judged_only=True)@1")
    tsv(toy / "r.tsv", RUN, "c3|0011|1|2; c3|0001|2|1")  # 0011 is not judged, 0001 is evidence
    done = call(SCRIPT, "r.tsv", "--measures", *measures, cwd=toy)
    assert facts(done)["runs"] == 1 and "--measures: F1: no run has a value" in done.stderr
    header, values = (toy / "work/demo/test/metrics.tsv").read_text().splitlines()
    assert header == "run\tP@1\tP(rel=1, judged_only=True)@1" and "r\t0.0\t0.333" in values


def test_a_submission_with_narratives_has_them_in_all_rows_of_a_claim(toy, call, refused):
    claims = ("c3", "c4", "c5")
    rows = [(claim, f"00{rank:02}", rank, -rank) for claim in claims for rank in (1, 2)]
    tsv(toy / "v.tsv", RUN, rows)
    header = ["claim_id", "codes"]
    codes = [("c5", "0_0"), ("c3", "1_4;5_2"), ("c4", "2_1")]
    words = "submission v.tsv --task climatecheck2026-narratives"
    words += " --top-k 2 --narratives n.tsv --out s.csv"
    tsv(toy / "n.tsv", header, codes[:2])
    refused(toy, SCRIPT, words, said="n.tsv: no codes for claim c4")
    tsv(toy / "n.tsv", header, codes)
    facts(call(SCRIPT, words, cwd=toy))
    table = pd.read_csv(toy / "s.csv", dtype=str)
    assert list(table) == [*RUN[:3], "narrative"]
    assert table["narrative"].tolist() == ["1_4;5_2"] * 2 + ["2_1"] * 2 + ["0_0"] * 2


def test_a_submission_to_checkthat_2026_has_a_table_for_each_language(toy, call, refused):
    """Each with the numbers behind the language; ids of another form are refused."""
    words = "submission run.tsv --task checkthat2026 --top-k 1 --claims posts.tsv --out s.zip"
    for ids in (["de-17", "3"], ["de-17", "en-17", "en-3"]):
        tsv(toy / "posts.tsv", CLAIMS, [(claim_id, "Ice") for claim_id in ids])
        tsv(toy / "run.tsv", RUN, [(claim_id, "0001", 1, 1) for claim_id in ids])
        if ids[-1] == "3":
            refused(toy, SCRIPT, words, said="run.tsv: 3...: ids begin with en-, fr- or de-")
    facts(call(SCRIPT, words, cwd=toy))
    with zipfile.ZipFile(toy / "s.zip") as zipped:
        assert zipped.read("predictions_de.tsv") == b"index\tpreds\n17\t['0001']\n"
        assert zipped.read("predictions_en.tsv").endswith(b"\n17\t['0001']\n3\t['0001']\n")


def test_outputs_with_points_in_their_names_replace_no_others(toy, call):
    for name in ("w-0.1", "w-0.2"):
        done = call(SCRIPT, f"{HYBRID} --out out/{name} --resamples 9", cwd=toy)
        endings = (".tsv", ".json", ".tex", ".claims.tsv")
        assert facts(done)["made"] == [f"out/{name}{ending}" for ending in endings]
    done = call(
        SCRIPT, f"submission {HYBRID} --task climatecheck2025 --top-k 1 --out s/run-0.5", cwd=toy
    )
    assert facts(done)["made"] == ["s/run-0.5.csv", "s/run-0.5.zip"]
