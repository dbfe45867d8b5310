"""06_evaluate.py: formulas against arithmetic by hand and other implementations; tables; jobs."""

import itertools
import json
import re
import zipfile
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
from conftest import CLAIMS, LABELLED, QRELS, RUN, cases, facts, jsonl, load, tsv
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


def table_of(text):
    """Rows of "claim: a:S b:N; other: a", in order of rank; labels may be missing."""
    rows = []
    for claim_id, pairs in re.findall(r"([\w-]+): ([^;]*)", text):
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
    found = measure(table_of(run), table_of(judged), name)[name]
    value = np.nan if value == "none" else float(Fraction(value))
    assert found == pytest.approx(value, abs=1e-9, nan_ok=True), by_hand


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

    def labelled(claim, least, most):
        found = draw(st.lists(pairs, min_size=least, max_size=most, unique_by=lambda pair: pair[0]))
        return f"{claim}: " + " ".join(map(":".join, found))

    claims = [f"c{place}" for place in range(draw(st.integers(1, 6)))]
    run = [labelled(claim, claim == "c0", 14) for claim in claims]
    qrels = [labelled(claim, 1, 8) for claim in claims]
    return table_of("; ".join(run)), table_of("; ".join(qrels))


@settings(
    max_examples=60,
    deadline=None,  # shrinking a failed example takes minutes
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(judged_runs())
def test_measures_equal_the_literal_transcription_and_scikit_learn(case):
    run, qrels = case
    rankings = ("R@2", "R@5", "R@10", "B-Pref")
    for depth in (10, 99):
        found = measure(run, qrels, *rankings, depth=depth)
        expected = literal(run[run["rank"] <= depth], qrels)
        assert list(found.values()) == pytest.approx(expected, nan_ok=True)
    both = run.merge(qrels, on=QRELS[:2], suffixes=("", "_gold"))
    found = list(measure(run, qrels, "P", "R", "F1", depth=99).values())
    expected = [np.nan] * 3
    if len(both):
        labels = (both["label_gold"], both["label"])
        expected = precision_recall_fscore_support(*labels, average="weighted", zero_division=0)
    assert found == pytest.approx(expected[:3], nan_ok=True)


# ---------------------------------------------------------------- Comparison and tables
def compared(runs, qrels, names, resamples=20_000):
    """The components of runs, by run, and what compare() makes of them."""
    components = {name: KIT.components_of(run, qrels, names, 10) for name, run in runs.items()}
    return components, KIT.compare(components, names, resamples, 13)


def test_intervals_equal_scipys_and_p_values_all_swaps_counted_out():
    rng = np.random.default_rng(2)
    names = ["R@5", "B-Pref", "F1", "Subtask II", "R@10"]

    def drawn(count):
        text = ""
        for claim_id in "abcdefgh":
            found = rng.permutation(list(NAMES))[:count]
            pairs = " ".join(f"{name}:{rng.choice([*LABELS])}" for name in found)
            text += f"{claim_id}: {pairs};"
        return table_of(text)

    qrels = drawn(7)
    a = drawn(12)
    parts, cells = compared({"a": a, "b": drawn(12), "c": a}, qrels, names)
    assert (cells["p"].loc["c"] == 1).all()  # the same run
    turns = np.array(list(itertools.product((0, 1), repeat=8)))  # 256 ways to swap eight claims
    values = []
    for one, other in ("ab", "ba"):
        sums = {}
        for name, component in parts[one].items():
            moved = np.tensordot(turns, parts[other][name] - component, (1, 0))
            sums[name] = component.sum(0) + moved
        values.append(KIT.values_of(sums, names))
    apart = abs(values[0] - values[1])
    exact = np.mean(apart >= apart[0] - 1e-12, axis=0)
    assert cells["p"].loc["b"].tolist() == pytest.approx(exact, abs=0.02)
    recalls = np.divide(*parts["b"]["R@5"].T)
    theirs = stats.bootstrap((recalls[~np.isnan(recalls)],), np.mean, method="percentile", rng=5)
    ours = [cells[end].loc["b", "R@5"] for end in ("low", "high")]
    assert ours == pytest.approx(theirs.confidence_interval, abs=0.015)


def test_swaps_that_leave_no_value_do_not_make_p_smaller():
    """Each run has rows for one claim: after one of two swaps, one run has no B-Pref at all."""
    qrels = table_of("c: a:S n:N; d: a:S n:N")
    _, cells = compared(
        {"first": table_of("c: a n"), "other": table_of("d: n a")}, qrels, ["B-Pref"]
    )
    assert cells["difference"].loc["other", "B-Pref"] == -1
    assert cells["p"].loc["other", "B-Pref"] == 1


def test_holm():
    holm = KIT.holm(pd.Series([0.01, 0.04, 0.03, np.nan])).tolist()
    assert holm == pytest.approx([0.03, 0.06, 0.06, np.nan], nan_ok=True)


# ---------------------------------------------------------------- Tables
def test_the_best_of_different_runs_is_marked_and_so_is_a_significant_difference():
    values = pd.DataFrame({"R@5": [0.1, 0.3, 0.2], "F1": [np.nan, 0.5, 0.5]}, ["x", "y", "z"])
    p = pd.DataFrame({"R@5": [np.nan, 0.01, 0.2], "F1": [np.nan] * 3}, values.index)
    cells = {"value": values, "p_holm": p}
    shown = KIT.cell_texts(cells, [], best="<b>{}</b>")
    assert shown["R@5"].tolist() == ["0.100", "<b>0.300*</b>", "0.200"]
    assert shown["F1"].tolist() == ["-", "0.500", "0.500"]
    unfinished = KIT.cell_texts(cells, ["y"], best="<b>{}</b>")
    assert unfinished["R@5"].tolist() == ["0.100", "0.300", "<b>0.200</b>"]


def test_a_table_is_explained_by_what_it_shows():
    counts = {"x": {"judged pairs": 1_234_567, "majority F1": 0.12345, "claims not judged": 0}}
    names = "macro F1", "B-Pref", "Judged@5"
    notes = KIT.notes_on(names, table_of("c: a:S b:N; d: e:N"), {}, counts)
    assert notes[0] == "Means are over the 1 of 2 claims with evidence."
    assert [note.split()[0] for note in notes[1:-2]] == ["B-Pref", "Judged@k", "P,", "*:"]
    assert notes[-2:] == ["x: judged pairs: 1,234,567", "x: majority F1: 0.123"]


def test_outputs_agree_and_what_is_missing_is_counted(toy, call):
    tsv(toy / "work/demo/test/bm25.tsv", RUN, "c3|0003|1|2; c3|0001|2|1")
    tsv(toy / "a.tsv", LABELLED, "c4|0004|1|2|REFUTES; c5|0009|1|2|NEI; c9|1|1|2|NEI")
    words = "work/demo/test/bm25.tsv a.tsv --measures climatecheck2025 Success@1 --out out/m-0.1"
    done = call(SCRIPT, words, cwd=toy)
    made = ["out/m-0.1.tsv", "out/m-0.1.json", "out/m-0.1.claims.tsv"]
    assert facts(done) == {"made": made, "runs": 2}
    numbers = json.loads((toy / "out/m-0.1.json").read_text())
    values = numbers["value"]
    assert values["bm25"]["R@2"] == values["a"]["R@5"] == pytest.approx(1 / 6)
    assert values["bm25"]["F1"] is None and values["a"]["F1"] == 1
    assert 0 < numbers["p"]["a"]["R@5"] <= numbers["p_holm"]["a"]["R@5"] <= 1
    assert numbers["counts"]["a"] == {
        "claims without rows": 1,
        "claims not judged": 1,
        "judged pairs": 2,
    }
    assert "\na: claims not judged: 1\n" in done.stdout
    table = pd.read_csv(toy / "out/m-0.1.tsv", sep="\t", index_col="run")
    claims = pd.read_csv(toy / "out/m-0.1.claims.tsv", sep="\t")
    means = claims.groupby("run")["Success@1"].mean()
    assert means["a"] == table.loc["a", "Success@1"] == pytest.approx(1 / 3)
    assert call(SCRIPT, words, cwd=toy).stdout == done.stdout  # it is always done again
    words += "-without --resamples 0 --report page.html"
    facts(call(SCRIPT, words, cwd=toy))
    assert "nan" not in re.sub("<script.*", "", (toy / "page.html").read_text(), flags=re.S)


MEASURE = {
    "MEASURES = {": """def first_half(judgements):
    half = judgements.gold[:, : judgements.gold.shape[1] // 2]
    return mean_over(judgements.R > 0, is_evidence(half).sum(1) / judgements.R)

MEASURES = {"Half": first_half, """
}


def test_measures_of_the_registry_and_with_commas_are_computed_and_one_without_value_is_said(
    toy, call
):
    measures = ("F1", "Half@4", "R@2", "P(rel=1, judged_only=True)@1")
    rows = "c3|0011|1|4; c3|0001|2|3; c3|0012|3|2; c3|0010|4|1"  # 0011 is not judged
    tsv(toy / "r.tsv", RUN, rows)
    done = call(SCRIPT, "r.tsv --out m --measures", *measures, cwd=toy, edits=MEASURE)
    assert facts(done)["runs"] == 1 and "\nNo run has a value of F1.\n" in done.stdout
    table = pd.read_csv(toy / "m.tsv", sep="\t")
    assert list(table) == ["run", *measures[1:]]
    assert table.loc[0, list(measures[1:])].tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 3])


def test_a_run_without_rows_for_a_tenth_of_the_claims_is_not_compared(toy, call):
    """Of twenty claims, the other run has rows for all, for 19 or 18; or the baseline for 18."""
    claims = [f"c{n}" for n in range(20)]
    judged = [(claim_id, "a", "SUPPORTS") for claim_id in claims]
    tsv(toy / "q.tsv", QRELS, [*judged, ("c0", "b", "NEI")])
    for first, count, mark in ((20, 20, "*"), (20, 19, "*"), (20, 18, ""), (18, 20, "")):
        tsv(toy / "a.tsv", RUN, [(claim_id, "a", 1, 1) for claim_id in claims[:first]])
        tsv(toy / "b.tsv", RUN, [(claim_id, "b", 1, 1) for claim_id in claims[:count]])
        done = call(SCRIPT, "a.tsv b.tsv --qrels q.tsv --out m --measures R@1 MRR", cwd=toy)
        assert f"\nb  0.000{mark} " in done.stdout, (first, count)


def test_what_was_made_from_another_file_is_told(toy, call):
    facts(call("02_retrieve.py", f"fuse {HYBRID} --out a.tsv", cwd=toy))
    jsonl(toy / "work/demo/test/claims.jsonl", {"claim_id": "c3", "verdict": "DISPUTED"})
    made = {"inputs": {"a.tsv": "another digest", "data": "another one", "gone.tsv": "its digest"}}
    jsonl(toy / "work/demo/test/claims.jsonl.meta.json", made)
    warnings = [
        "work/demo/test/claims.jsonl: a.tsv has changed since this was made; make it again",
        "work/demo/test/claims.jsonl: data has changed since this was made; make it again",
    ]
    words = "a.tsv --report page.html"
    for stale in ([], ["a.tsv: work/demo/test/hybrid.tsv has changed since this was made; make"]):
        lines = call(SCRIPT, words, cwd=toy).stderr.splitlines()
        assert len(lines) == len(stale) + len(warnings)
        for line, said in zip(lines, [*stale, *warnings]):
            assert line.startswith(f"warning: {said}")
        (toy / HYBRID).write_text((toy / HYBRID).read_text() + "\n")


# ---------------------------------------------------------------- The page
def test_the_report_shows_texts_as_texts(toy, call):
    evil = "</script><script>document.title = 'gotcha'</script><b>bold</b> @DATA@"
    tsv(toy / "data/demo/claims.test.tsv", CLAIMS, [("c3", evil), ("c4", "sun")])
    tsv(toy / "<u>x.tsv", LABELLED, "c3|0001|1|1|NEI")
    evidence = [{"abstract_id": "0001", "sentence": "Body mass"}]
    verdict = {"claim_id": "c3", "verdict": "DISPUTED", "evidence": evidence}
    jsonl(toy / "work/demo/test/claims.jsonl", verdict)
    facts(call(SCRIPT, f"{HYBRID} <u>x.tsv --report report.html --resamples 100", cwd=toy))
    page = (toy / "report.html").read_text()
    assert not re.findall(r"(?:src|href)=\"(?!#)", page)
    assert "gotcha'</script>" not in page and "<u>" not in page
    shown = " ".join(re.sub("<[^>]+>", " ", page).split())
    assert "&lt;u&gt;x 0.167 0.000–0.500 " in shown and "SUPPORTS 0 0 1 REFUTES 0 0 0 " in shown
    data = json.loads(re.search(r'application/json">(.*?)</script>', page, re.S)[1])
    wanted = {"claim": evil, "recall": [1, 1 / 2], "verdict": "DISPUTED", "evidence": evidence}
    assert wanted.items() <= data["claims"][0].items()
    assert ["c3", "0002", "SUPPORTS", 1e9, None] in dict(data["runs"])["<u>x"]  # missed


def test_the_page_shows_ten_ranks_and_the_evidence_behind_them():
    run = table_of("c: " + " ".join(NAMES[:14]))
    qrels = table_of("c: a:N k:S l:N z:R")[QRELS]
    rows = [(name, rank, label) for _, name, label, rank, _ in KIT.side_by_side(run, qrels)]
    ten = [(name, rank, "NEI" if name == "a" else None) for rank, name in enumerate(NAMES[:10], 1)]
    assert rows == [*ten, ("k", 11, "SUPPORTS"), ("z", 1e9, "REFUTES")]


# ---------------------------------------------------------------- Submissions
@pytest.mark.parametrize("task, claims, files, starts", cases("submissions.tsv"))
def test_a_submission_is_the_zip_that_the_task_asks_for(
    toy, call, refused, task, claims, files, starts
):
    """submissions.tsv: → is a tab, ¶ the end of a line, & stands between files."""
    rows = []
    for claim_id in reversed(claims.split()):
        for rank, label in enumerate(["SUPPORTS", "REFUTES", *["NEI"] * 10], 1):
            rows.append((claim_id, f"d{rank}", f"{rank}.0", -rank, label))  # ranks of floats
    jsonl(toy / "data/demo/corpus.jsonl", *[{"abstract_id": row[1]} for row in rows[:12]])
    tsv(toy / "data/demo/claims.test.tsv", CLAIMS, [(name, "Ice") for name in claims.split()])
    tsv(toy / "n.tsv", ["claim_id", "codes"], [("c5", "0_0"), ("c3", "1_4;5_2"), ("c4", "2_1")])
    tsv(toy / "v.tsv", LABELLED, rows)
    tsv(toy / "r.tsv", RUN, [row[:4] for row in rows])
    words = f"--narratives n.tsv --task {task}"
    if not files:
        return refused(toy, SCRIPT, f"submission v.tsv {words}", said=starts)
    [path] = facts(call(SCRIPT, f"submission v.tsv {words}", cwd=toy))["made"]
    with zipfile.ZipFile(toy / path) as zipped:
        assert zipped.namelist() == files.split()
        texts = [zipped.read(name).decode() for name in files.split()]
    for text, start in zip(texts, starts.split(" & ")):
        assert text.startswith(start.replace("→", "\t").replace("¶", "\n")) and "d11" not in text
        assert ("d10" in text) == ("climate" in task)
    unlabelled = call(SCRIPT, f"submission r.tsv {words}", cwd=toy)
    assert facts(unlabelled) and ("it has no labels" in unlabelled.stderr) == ("climate" in task)
