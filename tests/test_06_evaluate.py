"""06_evaluate.py: the organisers' arithmetic, worked by hand, transcribed literally, and read from every format."""
import json

import numpy as np
import pandas as pd
import pytest
from conftest import tsv

SCRIPT = "06_evaluate.py"
RUN = ["claim_id", "abstract_id", "rank", "score"]
QRELS = ["claim_id", "abstract_id", "label"]

def run_of(**ranked):
    """A run from claim="abstracts in order of rank"."""
    rows = [(claim, name, rank, 1 / rank) for claim, names in ranked.items() for rank, name in enumerate(names.split(), 1)]
    return pd.DataFrame(rows, columns=RUN)

def qrels_of(**judged):
    """Qrels from claim="a:S b:N", S, R and N for the three labels."""
    labels = {"S": "SUPPORTS", "R": "REFUTES", "N": "NEI"}
    rows = [(claim, *pair.split(":")) for claim, pairs in judged.items() for pair in pairs.split()]
    return pd.DataFrame([(claim, name, labels[label]) for claim, name, label in rows], columns=QRELS)

# ----------------------------------------------------------- By hand
def test_recall_is_the_share_of_the_relevant_among_the_first_k(load):
    recall = load(SCRIPT)["recall"]
    assert recall(["a", "x", "b"], {"a", "b", "c"}, 2) == 1 / 3
    assert recall(["a", "x", "b"], {"a", "b", "c"}, 10) == 2 / 3

def test_bpref_divides_the_capped_count_by_r(load):
    bpref = load(SCRIPT)["bpref"]
    # R = 2: a after one non-relevant, b after three, which count as two: ((1 - 1/2) + (1 - 2/2)) / 2
    assert bpref("n a m o b".split(), {"a", "b"}, {"n", "m", "o"}) == (1 / 2 + 0) / 2
    # unjudged abstracts do not count; a relevant one that was not retrieved adds nothing
    assert bpref("u a v".split(), {"a", "b", "c"}, {"n"}) == 1 / 3

def test_a_claim_without_rows_counts_0_in_recall_and_not_at_all_in_bpref(load):
    row = load(SCRIPT)["retrieval_measures"](run_of(p="a n"), qrels_of(p="a:S n:N", q="b:R m:N"), (2,))
    assert row == {"R@2": (1 + 0) / 2, "B-Pref": 1.0}

def test_claims_with_only_nei_or_without_nei_are_left_out_where_undefined(load):
    qrels = qrels_of(only_nei="a:N b:N", no_nei="a:S", both="a:S n:N")
    row = load(SCRIPT)["retrieval_measures"](run_of(only_nei="a b", no_nei="x a", both="n a"), qrels, (2,))
    assert row == {"R@2": (1 + 1) / 2, "B-Pref": 0.0}

def test_subtask_one_is_the_mean_of_four(load):
    row = load(SCRIPT)["climatecheck2025"](run_of(p="a n b"), qrels_of(p="a:S b:R n:N"))
    # R = 2; a at rank 1, b at rank 3 after one non-relevant
    assert (row["R@2"], row["R@5"], row["R@10"], row["B-Pref"]) == (1 / 2, 1, 1, (1 + 1 / 2) / 2)
    assert row["Subtask I"] == pytest.approx((0.5 + 1 + 1 + 0.75) / 4)
    assert "F1" not in row

def verdicts_of(text):
    rows = [pair.split(":") for pair in text.split()]
    labels = {"S": "SUPPORTS", "R": "REFUTES", "N": "NEI"}
    frame = run_of(p=" ".join(name for name, _ in rows))
    return frame.assign(label=[labels[label] for _, label in rows])

def test_stance_is_weighted_by_support_over_judged_pairs(load):
    # gold S S R N; said S N R N, and one pair that is not judged.
    # S: P 1/1 R 1/2 F1 2/3; R: 1, 1, 1; N: P 1/2 R 1/1 F1 2/3. Weights 2/4, 1/4, 1/4.
    row = load(SCRIPT)["climatecheck2025"](verdicts_of("a:S b:N c:R d:N x:S"), qrels_of(p="a:S b:S c:R d:N"))
    assert row["judged"] == 4
    assert row["P"] == pytest.approx(2 / 4 * 1 + 1 / 4 * 1 + 1 / 4 * 1 / 2)
    assert row["R"] == pytest.approx(2 / 4 * 1 / 2 + 1 / 4 + 1 / 4)
    assert row["F1"] == pytest.approx(2 / 4 * 2 / 3 + 1 / 4 + 1 / 4 * 2 / 3)
    assert row["Subtask II"] == pytest.approx(row["F1"] + 1)

def test_2026_counts_recall_at_5_and_bpref(load):
    row = load(SCRIPT)["climatecheck2026"](verdicts_of("n:N a:S"), qrels_of(p="a:S n:N"))
    assert row["Retrieval 2026"] == pytest.approx((1 + 0) / 2)
    assert row["Verification 2026"] == pytest.approx(1 + 1)

# ----------------------------------------------------------- A literal transcription
def literal(run, qrels):
    """The organisers' arithmetic, step by step, as DESIGN and README state it in words."""
    recalls, bprefs = {2: [], 5: [], 10: []}, []
    for claim in dict.fromkeys(qrels["claim_id"]):
        gold = {name: label for c, name, label in qrels.values.tolist() if c == claim}
        relevant = [name for name in gold if gold[name] in ("SUPPORTS", "REFUTES")]
        rows = sorted((rank, name) for c, name, rank, _ in run.values.tolist() if c == claim)
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
    return [sum(values) / len(values) if values else None for values in (*recalls.values(), bprefs)]

def test_fifty_random_runs_equal_the_literal_transcription(load):
    measures = load(SCRIPT)["retrieval_measures"]
    rng = np.random.default_rng(3)
    for _ in range(50):
        qrels = pd.DataFrame([(f"c{c}", f"d{d}", rng.choice(["SUPPORTS", "REFUTES", "NEI"]))
                              for c in range(6) for d in rng.choice(15, rng.integers(1, 7), replace=False)], columns=QRELS)
        run = pd.DataFrame([(f"c{c}", f"d{d}", rank, -rank) for c in range(6) if rng.random() < 0.8
                            for rank, d in enumerate(rng.permutation(15)[: rng.integers(1, 15)], 1)], columns=RUN)
        found = list(measures(run, qrels).values())
        expected = literal(run, qrels)
        assert found == pytest.approx([np.nan if value is None else value for value in expected], nan_ok=True)

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
    (["--work", "work/none"], "work/none"),
])
def test_missing_files_and_bad_flags_are_refused(toy, run, contents, refused, arguments, word):
    before = contents(toy)
    refused(run(SCRIPT, *arguments, cwd=toy), before, toy, word)
