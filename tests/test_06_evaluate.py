"""06_evaluate.py: formulas against arithmetic by hand and other implementations; formats; jobs."""
import gzip
import itertools
import json
import re
import shutil
import subprocess
import zipfile

import ir_measures
import numpy as np
import pandas as pd
import pytest
from conftest import KEY, ROOT, RUN, TOY, cases, facts, load, read, tsv
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import precision_recall_fscore_support

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
    parts, by_claim, _ = KIT.parts_of(run, qrels, KIT.gold_of(qrels), names, depth)
    return dict(zip(names, KIT.measures_of(parts.sum(0), by_claim.columns, names).tolist()))

@pytest.mark.parametrize(("run", "judged", "name", "value", "why"), cases("measures.tsv"))
def test_measures_by_hand(run, judged, name, value, why):
    run, judged = (dict(re.findall(r"([\w-]+): ([^;]+)", text)) for text in (run, judged))
    found = measure(table_of(**run), table_of(**judged), name)[name]
    assert found == pytest.approx(eval(value, {"nan": np.nan}), abs=1e-5, nan_ok=True), why

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

@settings(max_examples=60, deadline=None)
@given(judged_runs())
def test_measures_equal_the_literal_transcription_scikit_learn_and_ir_measures(case):
    run, qrels = case
    for depth, part in ((99, run), (10, run[run["rank"] <= 10])):
        found = measure(run, qrels, "R@2", "R@5", "R@10", "B-Pref", depth=depth)
        assert list(found.values()) == pytest.approx(literal(part, qrels), nan_ok=True)
    both, expected = run.merge(qrels, on=QRELS[:2], suffixes=("", "_gold")), [np.nan] * 3
    if len(both):
        expected = precision_recall_fscore_support(
            both["label_gold"], both["label"], average="weighted", zero_division=0)[:3]
    found = measure(run, qrels, "P", "R", "F1", depth=99)
    assert list(found.values()) == pytest.approx(expected, nan_ok=True)
    names = {"claim_id": "query_id", "abstract_id": "doc_id"}
    tables = (qrels.assign(relevance=(qrels["label"] != "NEI").astype(int)).rename(columns=names),
              run.assign(score=-run["rank"].astype(float)).rename(columns=names))
    with_evidence = qrels["claim_id"][qrels["label"] != "NEI"]
    for ours, theirs, claims in (  # ours count claims with evidence, theirs all
            ("R@5 MRR@5 Success@3", "R@5 RR@5 Success@3", with_evidence),
            ("nDCG@10 AP RR Bpref Judged@10 P@5",) * 2 + (qrels["claim_id"],)):
        wanted = [ir_measures.parse_measure(name) for name in theirs.split()]
        values = len(claims) and ir_measures.calc_aggregate(
            wanted, *(one[one["query_id"].isin(claims)] for one in tables))
        found = list(measure(run, qrels, *ours.split()).values())
        assert not len(claims) or found == pytest.approx([values[name] for name in wanted])

def compared(runs, qrels, names, resamples=20_000):
    """The parts of runs, by run; those by claim; what compare() makes of them."""
    parts, by_claim, gold = {}, {}, KIT.gold_of(qrels)
    for name, run in runs.items():
        parts[name], by_claim[name], _ = KIT.parts_of(run, qrels, gold, names, 10)
    return parts, by_claim, KIT.compare(parts, by_claim, names, resamples, 13)

def test_intervals_equal_scipys_and_p_values_all_swaps_counted_out():
    rng, names = np.random.default_rng(2), ["R@5", "B-Pref", "F1", "Subtask II", "R@10"]
    def drawn(count):
        names = rng.permutation(list(NAMES))[:count]
        return " ".join(f"{name}:{rng.choice(list(LABELS))}" for name in names)
    qrels = table_of(**{f"c{place}": drawn(7) for place in range(8)})
    a, b = (table_of(**{f"c{place}": drawn(12) for place in range(8)}) for _ in "ab")
    parts, by_claim, cells = compared({"a": a, "b": b, "c": a}, qrels, names)
    for field in ("difference", "p_holm", "p_wilcoxon", "p_mcnemar"):
        assert cells[field].loc["a"].isna().all()
    assert (cells["p_randomisation"].loc["c"] == 1).all()  # the same run
    first, second, _ = parts.values()
    turns = np.array(list(itertools.product((0, 1), repeat=8)))  # 256 ways to swap eight claims
    these, those = (KIT.measures_of(sums, by_claim["a"].columns, names) for sums in (
        first.sum(0) + turns @ (second - first), second.sum(0) + turns @ (first - second)))
    exact = np.mean(abs(these - those) >= abs(these - those)[0] - 1e-12, axis=0)
    found = cells["p_randomisation"].loc["b", names].tolist()
    assert found == pytest.approx(exact, abs=0.02)
    recalls = by_claim["b"]["R@5"].dropna().to_numpy()
    theirs = stats.bootstrap((recalls,), np.mean, method="percentile", rng=5)
    found = tuple(cells[field].loc["b", "R@5"] for field in ("low", "high"))
    assert found == pytest.approx(tuple(theirs.confidence_interval), abs=0.015)

def test_there_is_no_p_value_where_the_first_run_has_no_value():
    qrels, run = table_of(c="a:S b:R", d="b:S"), table_of(c="a:S b:S", d="b:S")
    runs = {"unlabelled": run.drop(columns="label"), "labelled": run}
    _, _, cells = compared(runs, qrels, ["abstract P"], resamples=50)
    for field in ("p_randomisation", "p_holm", "p_wilcoxon"):
        assert cells[field]["abstract P"].isna().all()

def test_wilcoxon_mcnemar_and_holm():
    expected = stats.wilcoxon([.5, .25, -.1, .1, .6]).pvalue  # the sixth counts in one run only
    apart = pd.Series([.5, .25, -.1, .1, .6, np.nan])
    assert KIT.wilcoxon(apart) == pytest.approx(expected)
    apart = pd.Series([1, 1, 1, 1, -1, 0, np.nan])
    assert KIT.mcnemar(apart) == pytest.approx(2 * (1 + 5) / 2**5)  # 4 against 1: two tails
    assert KIT.wilcoxon(apart * 0) == KIT.mcnemar(apart * 0) == 1
    holm = KIT.holm(pd.Series([0.01, 0.04, 0.03, np.nan])).tolist()
    assert holm == pytest.approx([0.03, 0.06, 0.06, np.nan], nan_ok=True)

def test_tables_mark_best_and_second_and_escape_names():
    values = pd.DataFrame({"R@5": [.1, .3, .2], "F1": [np.nan, .5, .5]}, ["a_b|<i>&$", "x", "y"])
    p = pd.DataFrame({"R@5": [np.nan, .01, .2], "F1": [np.nan] * 3}, values.index)
    cells = {"value": values, "low": values - .1, "high": values + .1, "p_holm": p}
    assert KIT.markdown(cells).splitlines()[2:5] == [
        r"| a\_b\|\<i\>\&\$ | 0.100 | - |", "| x | **0.300†** | 0.500 |", "| y | *0.200* | 0.500 |"]
    tex, page = KIT.latex(cells), KIT.html_table(cells)
    assert r"a\_b|<i>\&\$ & 0.100 & - \\" in tex and r"\textbf{0.300$^\dagger$} & 0.500 \\" in tex
    assert "a_b|&lt;i&gt;&amp;$" in page and "<b>0.300†</b><small>0.200–0.400</small>" in page

def test_outputs_agree_and_are_up_to_date_the_second_time(toy, call):
    tsv(toy / "work/demo/test/bm25.tsv", RUN, [("c3", "0003", 1, 2), ("c3", "0001", 2, 1)])
    rows = [("c4", "0004", 1, 2, "Refutes"), ("c5", "0009", 1, 2, "nei"), ("c9", "1", 1, 2, "nei")]
    tsv(toy / "a.tsv", [*RUN, "label"], rows)
    words = (SCRIPT, "work/demo/test/bm25.tsv", "a.tsv", "--out", "out/m.tsv")
    done = call(*words, cwd=toy)
    values = facts(done)["runs"]
    assert list(values) == ["bm25", "a"] and values == json.loads((toy / "out/m.json").read_text())
    assert values["bm25"]["R@2"] == pytest.approx(1 / 6) and "F1" not in values["bm25"]
    assert values["a"]["R@5"] == pytest.approx(1 / 6) and values["a"]["F1"] == 1
    assert "bm25.tsv: 2 claims" in done.stderr and "1 others are left out" in done.stderr
    assert "of the first 10 ranks are judged" in done.stderr
    table, cells, claims, curves = (pd.read_csv(toy / f"out/m{name}.tsv", sep="\t")
                                    for name in ("", ".cells", ".claims", ".curves"))
    shown = cells[(cells["measure"] == "R@5") & (cells["run"] == "bm25")].iloc[0]
    assert shown["low"] - 1e-9 <= shown["value"] == table["R@5"][0] <= shown["high"] + 1e-9
    assert claims.groupby("run", sort=False)["R@5"].mean().tolist() == table["R@5"].tolist()
    assert curves.iloc[1].tolist() == ["bm25", 2, 1 / 6, 1 / 3]
    again = call(*words, cwd=toy)
    assert "up to date" in again.stdout and facts(again)["runs"] == values
    assert list(facts(call(SCRIPT, cwd=toy))["runs"]) == ["bm25", "hybrid"]  # of the pipeline

@pytest.mark.parametrize("form", ["trec", "csv", "lists"])
def test_other_formats_score_as_ours_directly_and_converted(toy, call, form):
    """formats/ has the toy's run and qrels; TREC's ranks are wrong there: the scores count."""
    run, gold, folder = f"run.{form}", f"gold.{form}.gz", ROOT / "tests" / "formats"
    shutil.copy(folder / run, toy)
    (toy / gold).write_bytes(gzip.compress((folder / f"gold.{form}").read_bytes()))
    judged = TEST_QRELS[:1] if form == "lists" else TEST_QRELS  # CheckThat!: one paper a post
    tsv(toy / "data/demo/qrels.test.tsv", QRELS, judged)
    measures = ("--measures", "R@5", "MRR@10", "AP")
    ours = facts(call(SCRIPT, *measures, cwd=toy))["runs"]["hybrid"]
    assert facts(call(SCRIPT, run, "--qrels", gold, *measures, cwd=toy))["runs"] == {"run": ours}
    for name in (run, gold):
        done = call(SCRIPT, "convert", name, "--out", f"{name}.tsv", cwd=toy)
        assert facts(done)["rows"] and ("stance" in done.stderr) == (
            name == gold and form != "csv")
    converted, hybrid = (read(toy / name)[RUN[:3]].values.tolist() for name in (
        f"{run}.tsv", "work/demo/test/hybrid.tsv"))
    assert sorted(converted) == sorted(hybrid)
    assert read(toy / f"{gold}.tsv")[KEY].values.tolist() == [row[:2] for row in judged]

def test_trec_ties_and_unjudged_rows_are_as_in_trec_eval(tmp_path, capsys):
    run, gold = tmp_path / "run", tmp_path / "gold"
    run.write_text("c Q0 a 1 1.5 x\nc Q0 b 2 1.5 x\nc Q0 d 3 2 x\n")
    gold.write_text("c 0 a 1\nc 0 b -1\nc 0 d 0\n")
    assert KIT.read_any(str(run), RUN)["abstract_id"].tolist() == ["d", "b", "a"]
    assert KIT.read_any(str(gold), QRELS)["abstract_id"].tolist() == ["a", "d"]
    assert "1 rows of relevance below 0" in capsys.readouterr().err
    gold.write_text("post_id\tcord_uid\tlabel\nc\ta\tNEI\n")  # not just what a post is about
    assert KIT.read_any(str(gold), QRELS)["label"].tolist() == ["NEI"]

@pytest.mark.parametrize(("text", "wanted", "warned"), [
    # a tweet that begins with a quotation mark, written by a tool that does not quote
    ('7\t"Polar bears\n8\tx\n9\t"Ice" melts\n', ['"Polar bears', "x", '"Ice" melts'], True),
    ('7\t"Polar ""bears"""\n\n8\t"a\tb"\n9\t"c\nd"\n', ['Polar "bears"', "a b", "c d"], False)])
def test_claims_with_quotation_marks_are_converted(toy, call, text, wanted, warned):
    (toy / "c.tsv").write_bytes(b"\xef\xbb\xbf" + f"claim_id\tclaim\n{text}".encode())
    done = call(SCRIPT, "convert", "c.tsv", "--out", "d.tsv", cwd=toy)
    assert facts(done)["rows"] == 3 and ("without quotation marks" in done.stderr) == warned
    assert KIT.read_table(str(toy / "d.tsv"), ["claim_id", "claim"])["claim"].tolist() == wanted

@pytest.mark.parametrize(("name", "text", "said"), cases("bad_formats.tsv"))
def test_bad_tables_are_refused_by_line(tmp_path, capsys, name, text, said):
    data = text.replace("|", "\t").replace(";", "\n").replace("ESC", "\x1b").encode() + b"\n"
    (tmp_path / name).write_bytes(data if text else gzip.compress(b"x" * 999)[:-9])
    with pytest.raises(SystemExit):
        KIT.read_any(str(tmp_path / name), QRELS if name.startswith("q") else RUN)
        KIT.read_run(str(tmp_path / name), KIT.gold_of(table_of(c3="1:S")))
    error = capsys.readouterr().err
    assert re.fullmatch("error: .*\n", error) and said in error

def test_published_figures_stand_beside_measured_ones(toy, call):
    tsv(toy / "recipes" / "published.tsv", ["system", "table", "row", "measure", "value"],
        [("mine", "A", "hybrid", "R@5", 0.25), ("mine", "A", "other", "R@5", 0.5),
         ("mine", "B", "hybrid", "R@5", 0.75)])
    words = ("work/demo/test/hybrid.tsv", "--measures", "R@5", "--resamples", 10, "--out", "m.tsv")
    for name, figures in (("mine", [0.25, 0.5]), ("mine:B", [0.75])):
        facts(call(SCRIPT, *words, "--published", name, cwd=toy))
        table = pd.read_csv(toy / "m.tsv", sep="\t")
        assert list(table) == ["run", "R@5", "R@5 published"]
        assert table["R@5 published"].tolist() == figures and table["R@5"].count() == 1

def test_what_was_pooled_and_labelled_is_merged(toy, call):
    tsv(toy / "a.tsv", RUN, [("c3", "0001", 1, 3), ("c3", "0011", 2, 2), ("c4", "0012", 1, 1)])
    tsv(toy / "b.tsv", RUN, [("c3", "0010", 1, 3), ("c3", "0011", 2, 2), ("c3", "0009", 3, 1)])
    facts(call(SCRIPT, "pool", "a.tsv", "b.tsv", "--depth", 2, "--out", "pool.tsv", cwd=toy))
    pool = read(toy / "pool.tsv")
    wanted = [["c3", "0010"], ["c3", "0011"], ["c4", "0012"]]  # in the order of the corpus
    assert pool[KEY].values.tolist() == wanted and (pool["abstract"] != "").all()
    pool["label"] = ["Not Enough Information", "", "refuted"]
    pool.to_csv(toy / "labelled.csv", index=False)
    done = call(SCRIPT, "merge", "labelled.csv", "--out", "more.tsv", cwd=toy)
    assert facts(done)["without_label"] == 1
    added = [[*wanted[0], "NEI"], [*wanted[2], "REFUTES"]]
    assert sorted(read(toy / "more.tsv")[QRELS].values.tolist()) == sorted(TEST_QRELS + added)

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
    assert len(set(re.findall(r"d\d+", file.read_text()))) == (5 if task == "checkthat4b" else 10)

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")

def test_the_report_shows_texts_as_texts(toy, call):
    evil = "</script><script>document.title = 'gotcha'</script><b>bold</b> @DATA@"
    tsv(toy / "data/demo/claims.test.tsv", ["claim_id", "claim"], [("c3", evil), ("c4", "sun")])
    tsv(toy / "<u>x.tsv", [*RUN, "label"], [("c3", "0001", 1, 1, "NEI")])
    (toy / "claims.jsonl").write_text('{"claim_id": "c3", "verdict": "DISPUTED", "evidence": '
                                      '[{"abstract_id": "0001", "sentence": "Body mass"}]}')
    words = ("work/demo/test/hybrid.tsv", "<u>x.tsv", "--report", "report.html", "--aggregated")
    facts(call(SCRIPT, *words, "claims.jsonl", "--resamples", 100, cwd=toy))
    page = (toy / "report.html").read_text()
    assert not re.findall(r"(?:src|href)=\"(?!#)", page) and page.count("<svg") == 1
    assert "gotcha'</script>" not in page and "<u>" not in page
    data = json.loads(re.search(r'application/json">(.*?)</script>', page, re.S)[1])
    assert data["claims"][0]["text"] == evil and data["claims"][0]["recall"] == [1, 1 / 2]
    rows = [["c3", "0001", "SUPPORTS", 1, "NEI"], ["c3", "0002", "SUPPORTS", 0, ""]]  # one missed
    assert [row for row in data["runs"]["<u>x"] if row[0] == "c3"] == rows
    if not BROWSER:
        pytest.skip("no Chromium: the scripts of the page are not tested")
    click = """search.value = 'disputed'; search.oninput(); claim = data.claims[0].node;
        claim.open = true; claim.ontoggle(); document.title = count.textContent"""
    (toy / "clicked.html").write_text(page.replace("</html>", f"<script>{click}</script></html>"))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
               f"--user-data-dir={toy / 'profile'}", (toy / "clicked.html").as_uri()]
    seen = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert "<title>1 of 2 claims</title>" in seen and "&lt;b&gt;bold&lt;/b&gt;" in seen
    assert '<mark class="">Body mass</mark>' in seen and "said NEI" in seen
