"""06_evaluate.py: formulas against arithmetic by hand and other implementations; formats; jobs."""
import gzip
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
from conftest import QRELS as JUDGED
from conftest import ROOT, tsv
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import precision_recall_fscore_support

SCRIPT, KIT = "06_evaluate.py", runpy.run_path(str(ROOT / "06_evaluate.py"))
RUN, QRELS, LABELS = KIT["RUN"], KIT["QRELS"], {"S": "SUPPORTS", "R": "REFUTES", "N": "NEI"}
TEST_QRELS = [(claim, name, label) for claim in ("c3", "c4", "c5")
              for name, label in JUDGED[claim].items()]

def table_of(**claims):
    """Rows of claim="a:S b:N", in order of rank; without labels claim="a b"."""
    rows = [(claim, pair[0], rank, -rank, LABELS.get(pair[2:])) for claim, pairs in claims.items()
            for rank, pair in enumerate(pairs.split(), 1)]
    return pd.DataFrame(rows, columns=[*RUN, "label"]).dropna(axis=1)

def measure(run, qrels, *names, depth=10):
    """The script's own numbers for one run, as floats."""
    parts, _ = KIT["parts_of"](run, qrels, KIT["gold_of"](qrels), names, depth)
    values = KIT["measures_of"](np.hstack(list(parts.values())).sum(0), parts, names)
    return dict(zip(names, values.tolist()))

def result(done):
    """The runs in the last line of stdout."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])["runs"]

HALF, THIRD = 1 / 2, 1 / 3

@pytest.mark.parametrize(("run", "qrels", "wanted"), [
    # a claim without rows: 0 in recall, left out of B-Pref; only NEI, no NEI: left out
    ({"p": "a n"}, {"p": "a:S n:N", "q": "b:R m:N"}, {"R@2": HALF, "B-Pref": 1}),
    ({"p": "a b", "q": "x a", "r": "n a"}, {"p": "a:N b:N", "q": "a:S", "r": "a:S n:N"},
     {"R@2": 1, "B-Pref": 0}),
    # R = 2: a behind one non-relevant, b behind three, which count as two
    ({"p": "n a m o b"}, {"p": "a:S b:S n:N m:N o:N"}, {"B-Pref": (HALF + 0) / 2}),
    # R = 3, N = 1: behind the NEI the organisers give 1 - 1/3, trec_eval 1 - 1/min(3, 1)
    ({"p": "a n b c"}, {"p": "a:S b:S c:R n:N"},
     {"B-Pref": (1 + 2 / 3 + 2 / 3) / 3, "B-Pref (trec_eval)": THIRD}),
    ({"p": "a n b"}, {"p": "a:S b:R n:N"},
     {"B-Pref@1": HALF, "Subtask I": (HALF + 1 + 1 + 3 / 4) / 4, "F1": np.nan}),
    ({"p": "n:N a:S"}, {"p": "a:S n:N"}, {"Retrieval 2026": HALF, "Verification 2026": 2}),
    # gold S S R N, said S N R N, one unjudged; F1 of S 2/3, R 1, N 2/3
    ({"p": "a:S b:N c:R d:N x:S"}, {"p": "a:S b:S c:R d:N"}, {
        "P": HALF + 1 / 4 + 1 / 8, "R": 3 / 4, "F1": HALF * 2 / 3 + 1 / 4 + 1 / 4 * 2 / 3,
        "Subtask II": THIRD + 1 / 4 + 1 / 6 + 1, "Judged@10": 4 / 5}),
    ({"p": "x a b", "q": "a"}, {"p": "a:S b:S", "q": "b:S"},
     {"MRR@1": 0, "MRR@5": 1 / 4, "R@5": HALF}),
    ({"p": "a", "q": "d e f"}, {"p": "a:S", "q": "b:S c:R d:S"},
     {"pooled R@10": HALF, "R@10": (1 + THIRD) / 2}),
    # called evidence: a, b, x; right: a; gold: a, b, c
    ({"p": "a:S b:S n:N x:R"}, {"p": "a:S b:R c:S n:N"},
     {"abstract P": THIRD, "abstract R": THIRD, "abstract F1": THIRD}),
    # Chapelle et al. 2009, grades up to 4: a hit stops the reader with 1 / 16
    ({"a-1": "x a", "b-1": "b"}, {"a-1": "a:S", "b-1": "b:S"}, {"ERR@10": 3 / 64}),
    ({"p": "x a", "q": "b"}, {"p": "a:S", "q": "b:S n:N"},
     {"AP": 3 / 4, "MAP": 3 / 4, "RR": 3 / 4, "MRR": 3 / 4, "Bpref": 1}),
])
def test_measures_by_hand(run, qrels, wanted):
    found = measure(table_of(**run), table_of(**qrels), *wanted)
    assert found == pytest.approx(wanted, abs=1e-5, nan_ok=True)

# ----------------------------------------------------------- Other implementations
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
    names, labels = [f"d{place}" for place in range(14)], st.sampled_from(list(LABELS.values()))
    qrels, rows = [], []
    for claim in (f"c{place}" for place in range(draw(st.integers(1, 6)))):
        judged = st.lists(st.sampled_from(names), min_size=1, max_size=8, unique=True)
        qrels += [(claim, name, draw(labels)) for name in draw(judged)]
        ranked = st.lists(st.sampled_from(names), min_size=not rows, max_size=14, unique=True)
        rows += [(claim, name, r, -r, draw(labels)) for r, name in enumerate(draw(ranked), 1)]
    return pd.DataFrame(rows, columns=[*RUN, "label"]), pd.DataFrame(qrels, columns=QRELS)

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

def test_intervals_equal_scipys_and_p_values_all_swaps_counted_out():
    rng, names, parts = np.random.default_rng(2), ["R@5", "B-Pref", "F1", "Subtask II", "R@10"], {}
    labels, claims = list(LABELS.values()), [f"c{place}" for place in range(8)]
    qrels = pd.DataFrame([(claim, f"d{d}", rng.choice(labels)) for claim in claims
                          for d in rng.choice(20, 7, replace=False)], columns=QRELS)
    for one in "ab":
        run = pd.DataFrame([(claim, f"d{d}", rank, -rank, rng.choice(labels)) for claim in claims
                            for rank, d in enumerate(rng.permutation(20)[:12], 1)],
                           columns=[*RUN, "label"])
        parts[one] = KIT["parts_of"](run, qrels, KIT["gold_of"](qrels), names, 10)[0]
    cells = KIT["compare"](parts | {"c": parts["a"]}, names, 20_000, 13)
    for field in ("difference", "p_holm", "p_wilcoxon"):
        assert cells[field].loc["a"].isna().all()
    assert (cells["p_randomisation"].loc["c"] == 1).all()  # the same run
    first, second = (np.hstack(list(part.values())) for part in parts.values())
    turns = np.array(list(itertools.product((0, 1), repeat=8)))  # 256 ways to swap eight claims
    these, those = (KIT["measures_of"](sums, parts["a"], names) for sums in (
        first.sum(0) + turns @ (second - first), second.sum(0) + turns @ (first - second)))
    exact = np.mean(abs(these - those) >= abs(these - those)[0] - 1e-12, axis=0)
    found = cells["p_randomisation"].loc["b", names].tolist()
    assert found == pytest.approx(exact, abs=0.02)
    above, below = parts["b"]["R@5"].T
    theirs = stats.bootstrap(((above / below)[below > 0],), np.mean, method="percentile", rng=5)
    found = tuple(cells[field].loc["b", "R@5"] for field in ("low", "high"))
    assert found == pytest.approx(tuple(theirs.confidence_interval), abs=0.015)

def test_wilcoxon_mcnemar_and_holm():
    ours, theirs = np.array([1, .5, 0, .2, .9, .4]), np.array([.5, .25, .1, .1, .3, np.nan])
    expected = stats.wilcoxon([.5, .25, -.1, .1, .6]).pvalue  # the sixth counts in one run only
    assert KIT["wilcoxon"](ours, theirs) == pytest.approx(expected)
    this, that = np.array([1, 1, 1, 1, 0, 1]), np.array([0, 0, 0, 0, 1, 1])
    assert KIT["mcnemar"](this, that) == pytest.approx(2 * (1 + 5) / 2**5)  # 4 against 1: two tails
    assert KIT["wilcoxon"](ours, ours) == KIT["mcnemar"](this, this) == 1
    holm = KIT["holm"](np.array([0.01, 0.04, 0.03, np.nan]))
    assert holm == pytest.approx([0.03, 0.06, 0.06, np.nan], nan_ok=True)

def test_tables_mark_best_and_second_and_escape_names():
    values = pd.DataFrame({"R@5": [.1, .3, .2], "F1": [np.nan, .5, .5]}, ["a_b|<i>&$", "x", "y"])
    p = pd.DataFrame({"R@5": [np.nan, .01, .2], "F1": [np.nan] * 3}, values.index)
    cells = {"value": values, "low": values - .1, "high": values + .1, "p_holm": p}
    assert KIT["markdown"](cells).splitlines()[2:5] == [
        r"| a\_b\|\<i\>\&\$ | 0.100 | - |", "| x | **0.300†** | 0.500 |", "| y | *0.200* | 0.500 |"]
    tex, page = KIT["latex"](cells), KIT["html_table"](cells)
    assert r"a\_b|<i>\&\$ & 0.100 & - \\" in tex and r"\textbf{0.300$^\dagger$} & 0.500 \\" in tex
    assert "a_b|&lt;i&gt;&amp;$" in page and "<b>0.300†</b><small>0.200–0.400</small>" in page

# ----------------------------------------------------------- Evaluate, and other people's formats
def test_outputs_agree_and_are_up_to_date_the_second_time(toy, run):
    tsv(toy / "work/demo/test/bm25.tsv", RUN, [("c3", "0003", 1, 2), ("c3", "0001", 2, 1)])
    rows = [("c4", "0004", 1, 2, "Refutes"), ("c5", "0009", 1, 2, "nei"), ("c9", "1", 1, 2, "nei")]
    tsv(toy / "a.tsv", [*RUN, "label"], rows)
    call = (SCRIPT, "work/demo/test/bm25.tsv", "a.tsv", "--out", "out/m.tsv")
    done = run(*call, cwd=toy)
    values = result(done)
    assert list(values) == ["bm25", "a"] and values == json.loads((toy / "out/m.json").read_text())
    assert values["bm25"]["R@2"] == pytest.approx(HALF / 3) and "F1" not in values["bm25"]
    assert values["a"]["R@5"] == pytest.approx(HALF / 3) and values["a"]["F1"] == 1
    assert "bm25.tsv: 2 claims" in done.stderr and "1 others are left out" in done.stderr
    table, cells, claims, curves = (pd.read_csv(toy / f"out/m{name}.tsv", sep="\t")
                                    for name in ("", ".cells", ".claims", ".curves"))
    shown = cells[(cells["measure"] == "R@5") & (cells["run"] == "bm25")].iloc[0]
    assert shown["low"] - 1e-9 <= shown["value"] == table["R@5"][0] <= shown["high"] + 1e-9
    assert claims.groupby("run", sort=False)["R@5"].mean().tolist() == table["R@5"].tolist()
    assert curves.iloc[1].tolist() == ["bm25", 2, HALF / 3, THIRD]
    again = run(*call, cwd=toy)
    assert "up to date" in again.stdout and result(again) == values
    assert list(result(run(SCRIPT, cwd=toy))) == ["bm25", "hybrid"]  # those of the pipeline

def formats(folder):
    """Write the run and the qrels of the toy data in three formats, run.FORM and gold.FORM.gz."""
    rows = pd.read_csv(folder / "work/demo/test/hybrid.tsv", sep="\t", dtype=str).values.tolist()
    spelt = {"SUPPORTS": "Supports", "REFUTES": "Contradict", "NEI": "Not Enough Information"}
    posts = {claim: [row[1] for row in rows if row[0] == claim] for claim in ("c3", "c4", "c5")}
    texts = {  # TREC's ranks are wrong, as they often are: the scores count
        "run.trec": [f"{c} Q0 {a}  {99 - int(r)} {s} kit" for c, a, r, s in reversed(rows)],
        "gold.trec": [f"{c}\t0\t{a}\t{int(kind != 'NEI')}" for c, a, kind in TEST_QRELS],
        "run.csv": ["claim_id, abstract_id, rank", *(f'{c}, "{a}", {r}\r' for c, a, r, _ in rows)],
        "gold.csv": ["claim_id,abstract_original_index,annotation",
                     *(f"{c},{a},{spelt[kind]}" for c, a, kind in TEST_QRELS)],
        "run.lists": ["post_id\tpreds", *(f"{c}\t{names}" for c, names in posts.items())],
        "gold.lists": ["post_id\ttweet_text\tcord_uid", "c3\tso\t0001"]}
    for name, parts in texts.items():
        data = ("\ufeff" + "\n".join(parts) + "\n").encode()
        packed = name.startswith("gold")
        (folder / f"{name}{'.gz' * packed}").write_bytes(gzip.compress(data) if packed else data)

@pytest.mark.parametrize("form", ["trec", "csv", "lists"])
def test_other_formats_score_as_ours_directly_and_converted(toy, run, form):
    formats(toy)
    judged = TEST_QRELS[:1] if form == "lists" else TEST_QRELS  # CheckThat!: one paper a post
    tsv(toy / "data/demo/qrels.test.tsv", QRELS, judged)
    names, measures = [f"run.{form}", f"gold.{form}.gz"], ("--measures", "R@5", "MRR@10", "AP")
    ours = result(run(SCRIPT, *measures, cwd=toy))["hybrid"]
    assert result(run(SCRIPT, names[0], "--qrels", names[1], *measures, cwd=toy))["run"] == ours
    for name in names:
        done = run(SCRIPT, "convert", name, "--to", "tsv", "--out", f"{name}.tsv", cwd=toy)
        assert done.returncode == 0, done.stderr
        assert ("stance" in done.stderr) == (name.startswith("gold") and form != "csv")
    converted, hybrid = (KIT["read_table"](str(toy / name), RUN)[RUN[:3]] for name in (
        f"run.{form}.tsv", "work/demo/test/hybrid.tsv"))
    assert sorted(converted.values.tolist()) == sorted(hybrid.values.tolist())
    gold = KIT["read_table"](str(toy / f"gold.{form}.gz.tsv"), QRELS, label=KIT["LABELS"])
    assert gold[QRELS[:2]].values.tolist() == [list(row[:2]) for row in judged]

@pytest.mark.parametrize(("text", "wanted", "warned"), [
    # a tweet that begins with a quotation mark, written by a tool that does not quote
    ('7\t"Polar bears\n8\tx\n9\t"Ice" melts\n', ['"Polar bears', "x", '"Ice" melts'], True),
    ('7\t"Polar ""bears"""\n\n8\t"a\tb"\n9\t"c\nd"\n', ['Polar "bears"', "a b", "c d"], False),
])
def test_claims_with_quotation_marks_are_converted(toy, run, text, wanted, warned):
    (toy / "c.tsv").write_bytes(b"\xef\xbb\xbf" + f"claim_id\tclaim\n{text}".encode())
    done = run(SCRIPT, "convert", "c.tsv", "--out", "d.tsv", cwd=toy)
    assert done.returncode == 0 and ("without quotation marks" in done.stderr) == warned
    assert KIT["read_table"](str(toy / "d.tsv"), ["claim_id", "claim"])["claim"].tolist() == wanted

HEAD = "\t".join(RUN) + "\n"

@pytest.mark.parametrize(("name", "text", "words"), [
    ("r.tsv", "claim_id\tabstract_id\trank\n1\ta\t1\n5\n", ["r.tsv:3: abstract_id is empty"]),
    ("r.tsv", "c3\t0001\t1\t0.5\t7\n", ["r.tsv:1:", "claim_id"]),
    ("r.tsv", HEAD + "c3\t0001\t1\t0.5\n\nc3\t0001\t2\t0.4\n", ["r.tsv:4:", "earlier", "c3 0001"]),
    ("r.tsv", HEAD + "c3\t0001\t1\tnan\n", ["r.tsv:2:", "score"]),
    ("r.tsv", HEAD + "c3\t0001\t1\t1\nc3\t0002\t3\t1\n", ["r.tsv:3:", "ranks"]),
    ("r.tsv", HEAD + "c9\t0001\t1\t1\n", ["r.tsv:", "none of its claims", "c3"]),
    ("r.tsv", HEAD.replace("rank", "rank\trank"), ["r.tsv:1:", "two columns"]),
    ("r.tsv", HEAD.replace("\n", "\tlabel\n") + "c3\t1\t1\t1\t\x1b[1m\n", ["r.tsv:2:", "?[1m"]),
    ("r.csv", "claim_id,abstract_id,rank\nc3,1,1\nc3,2,2,NEI\n", ["r.csv:3:", "3 fields", "saw 4"]),
    ("r.csv", 'claim_id,note,abstract_id,rank\nc3,"a\nb",1,1\nc3,b,2,1\n', ["r.csv:4:", "ranks"]),
    ("p.tsv", "post_id\tpreds\nc4\t['1']\nc3\t['1', '2', '1']\n", ["p.tsv:3:", "earlier", "c3 1"]),
    ("p.tsv", "post_id\tpreds\nc4\t['1']\nc3\t['1']\nc4\t['2']\n", ["p.tsv:4:", "earlier list"]),
    ("q.tsv", "c3 0 1 0\nc3 0 2 yes\n", ["q.tsv:2:", "relevance"]),
    ("q.tsv", "\t".join(QRELS) + "\nc3\t1\tMAYBE\n", ["q.tsv:2:", "label", "MAYBE"]),
    ("r.tsv.gz", "", ["r.tsv.gz", "damaged"]),
])
def test_bad_tables_are_refused_by_line(tmp_path, capsys, name, text, words):
    data = text.encode() if text else gzip.compress(b"x" * 999)[:-9]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SystemExit):
        KIT["read_any"](str(tmp_path / name), QRELS if name.startswith("q") else RUN)
        KIT["read_run"](str(tmp_path / name), KIT["gold_of"](table_of(c3="1:S")))
    error = capsys.readouterr().err
    assert re.fullmatch("error: .*\n", error) and all(word in error for word in words), error

@pytest.mark.parametrize(("flags", "word"), [
    ("nowhere.tsv", "nowhere.tsv"), ("--work work/none", "work/none"),
    ("--resamples 0", "--resamples"), ("submission --out x.zip", "x.zip"),
    ("--qrels work/demo/test/hybrid.tsv", "label"), ("--measures R@0", "--measures"),
    ("--out work/demo/test/hybrid.tsv", "hybrid.tsv"),
    ("--report r.html --aggregated work/demo/test/hybrid.tsv", "hybrid.tsv:1:")])
def test_bad_flags_are_refused(toy, run, contents, refused, flags, word):
    before = contents(toy)
    refused(run(SCRIPT, *flags.split(), cwd=toy), before, toy, word)

def test_measures_that_cannot_be_computed_are_refused(capsys):
    for name in "mrr MRR@0 P@0 P(cutoff=0) B-Pref@0 RBP P@1.5 SDCG@10 P(rel=0)@5".split():
        with pytest.raises(SystemExit):
            measure(table_of(p="a b"), table_of(p="a:S n:N"), name)
        assert "error: --measures:" in capsys.readouterr().err

# ----------------------------------------------------------- Pool, merge, submission
def test_what_was_pooled_and_labelled_is_merged(toy, run, contents, refused):
    tsv(toy / "a.tsv", RUN, [("c3", "0001", 1, 3), ("c3", "0011", 2, 2), ("c4", "0012", 1, 1)])
    tsv(toy / "b.tsv", RUN, [("c3", "0010", 1, 3), ("c3", "0011", 2, 2), ("c3", "0009", 3, 1)])
    flags = ("--depth", 2, "--out", "pool.tsv")
    assert run(SCRIPT, "pool", "a.tsv", "b.tsv", *flags, cwd=toy).returncode == 0
    pool = pd.read_csv(toy / "pool.tsv", sep="\t", dtype=str, keep_default_na=False)
    wanted = [["c3", "0010"], ["c3", "0011"], ["c4", "0012"]]  # in the order of the corpus
    assert pool[QRELS[:2]].values.tolist() == wanted and (pool["abstract"] != "").all()
    pool["label"] = ["Not Enough Information", "", "refuted"]
    pool.to_csv(toy / "labelled.csv", index=False)
    done = run(SCRIPT, "merge", "labelled.csv", "--out", "more.tsv", cwd=toy)
    merged = KIT["read_table"](str(toy / "more.tsv"), QRELS)[QRELS].values.tolist()
    added = [[*wanted[0], "NEI"], [*wanted[2], "REFUTES"]]
    assert sorted(merged) == sorted([*map(list, TEST_QRELS), *added])
    assert json.loads(done.stdout.splitlines()[-1])["without_label"] == 1
    tsv(toy / "x.tsv", QRELS, [("c3", "0009", "NEI"), ("c3", "0001", "NEI")])
    before = contents(toy)
    refused(run(SCRIPT, "merge", "x.tsv", cwd=toy), before, toy, "x.tsv:3:", "another label")

@pytest.mark.parametrize(("task", "text"), [
    ("climatecheck2026", "claim_id,abstract_id,rank,label\nc3,d1,1,Supports\nc3,d2,2,Refutes\n"),
    ("checkthat4b", "post_id\tpreds\nc3\t['d1', 'd2']\n")])
def test_a_submission_is_the_file_that_the_task_asks_for(toy, run, contents, refused, task, text):
    (toy / "data/demo/corpus.jsonl").write_text(
        "".join(f'{{"abstract_id": "d{rank}", "abstract": "x"}}\n' for rank in range(1, 13)))
    rows = [(claim, f"d{rank}", rank, -rank, label) for claim in ("c5", "c4", "c3")
            for rank, label in enumerate(["SUPPORTS", "REFUTES", *["NEI"] * 10], 1)]
    tsv(toy / "v.tsv", [*RUN, "label"], rows)
    call = (SCRIPT, "submission", "v.tsv", "--task", task)
    made = json.loads(run(*call, "--top-k", 2, cwd=toy).stdout.splitlines()[-1])["made"]
    file, archive = (toy / path for path in made)
    assert file.read_text().startswith(text)
    with zipfile.ZipFile(archive) as zipped:
        assert zipped.namelist() == [file.name] and zipped.read(file.name) == file.read_bytes()
    assert run(*call, cwd=toy).returncode == 0
    assert len(set(re.findall(r"d\d+", file.read_text()))) == (5 if task == "checkthat4b" else 10)
    for row, word in ((["c3", "d1"], "0 abstracts"), (["c3", "no"], "no"), (["c9", "d1"], "c9")):
        tsv(toy / "v.tsv", RUN, [(*row, 1, 1)])
        before = contents(toy)
        refused(run(*call, cwd=toy), before, toy, word)

# ----------------------------------------------------------- The report
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")

def test_the_report_shows_texts_as_texts(toy, run):
    evil = "</script><script>document.title = 'gotcha'</script><b>bold</b> @DATA@"
    tsv(toy / "data/demo/claims.test.tsv", ["claim_id", "claim"], [("c3", evil), ("c4", "sun")])
    tsv(toy / "<u>x.tsv", [*RUN, "label"], [("c3", "0001", 1, 1, "NEI")])
    (toy / "claims.jsonl").write_text('{"claim_id": "c3", "verdict": "DISPUTED", "evidence": '
                                      '[{"abstract_id": "0001", "sentence": "Body mass"}]}')
    call = ("work/demo/test/hybrid.tsv", "<u>x.tsv", "--report", "report.html", "--aggregated")
    assert run(SCRIPT, *call, "claims.jsonl", "--resamples", 100, cwd=toy).returncode == 0
    page = (toy / "report.html").read_text()
    assert not re.findall(r"(?:src|href)=\"(?!#)", page) and page.count("<svg") == 1
    assert "gotcha'</script>" not in page and "<u>" not in page
    data = json.loads(re.search(r'application/json">(.*?)</script>', page, re.S)[1])
    assert data["claims"][0]["text"] == evil and data["claims"][0]["recall"] == [1, HALF]
    rows = [["c3", "0001", 1, "SUPPORTS", "NEI"], ["c3", "0002", 0, "SUPPORTS", ""]]  # one missed
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

def test_published_figures_stand_beside_measured_ones(toy, run):
    (toy / "recipes").mkdir()
    tsv(toy / "recipes" / "published.tsv", ["system", "table", "row", "measure", "value"],
        [("mine", "A", "hybrid", "R@5", 0.25), ("mine", "A", "other", "R@5", 0.5),
         ("mine", "B", "hybrid", "R@5", 0.75)])
    words = ("work/demo/test/hybrid.tsv", "--measures", "R@5", "--resamples", 10, "--out", "m.tsv")
    for name, figures in (("mine", [0.25, 0.5]), ("mine:B", [0.75])):
        assert run(SCRIPT, *words, "--published", name, cwd=toy).returncode == 0
        table = pd.read_csv(toy / "m.tsv", sep="\t")
        assert list(table) == ["run", "R@5", "R@5 published"]
        assert table["R@5 published"].tolist() == figures and table["R@5"].count() == 1
    assert "no figures of nobody" in run(SCRIPT, *words, "--published", "nobody", cwd=toy).stderr
