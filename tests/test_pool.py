"""recipes/tools: average.py, pool.py, published.py, seeds.py, verdicts.py."""

import json

import pandas as pd
import pytest
from conftest import KEY, LABELLED, QRELS, ROOT, RUN, TOY, cells, facts, load, read, tiny, tsv
from safetensors.torch import load_file
from sklearn.metrics import accuracy_score, f1_score

VERDICTS = [*LABELLED, "p_supports", "p_refutes", "p_nei"]
TEST_QRELS = read(TOY / "qrels.test.tsv")[QRELS].values.tolist()
published = load("recipes/tools/published.py")
verdicts = load("recipes/tools/verdicts.py")


@pytest.fixture
def tool(toy, program):
    """tool("pool", "merge ..."): the program in the folder of the toy."""
    return lambda name, words: program(f"tools/{name}", words, cwd=toy)


def test_what_was_pooled_and_labelled_is_merged(toy, tool):
    tsv(toy / "a.tsv", RUN, "c3|0001|1|3; c3|0011|2|2; c4|0012|1|1")
    tsv(toy / "b.tsv", RUN, "c3|0010|1|3; c3|0011|2|2; c3|0009|3|1")
    words = "pool a.tsv b.tsv --pool-depth 2 --out"
    assert facts(tool("pool", f"{words} pool.tsv"))["judged_already"] == 1
    pool = read(toy / "pool.tsv")
    wanted = cells("c3|0010; c3|0011; c4|0012")  # in the order of the corpus
    assert pool[KEY].values.tolist() == wanted
    assert (pool["abstract"] != "").all()
    as_run = cells("c3|0010|1|-1; c3|0011|2|-2; c4|0012|1|-1")
    assert read(toy / "pool.run.tsv")[RUN].astype(str).values.tolist() == as_run
    pool["label"] = ["NEI", "", "REFUTES"]
    for name in ("pool.tsv", "labelled.tsv"):
        pool.to_csv(toy / name, sep="\t", index=False)
    assert "pool.tsv: it has labels" in tool("pool", f"{words} pool.tsv --force").stderr
    done = tool("pool", "merge labelled.tsv --out more.tsv")
    made = facts(done)
    assert made["without_label"] == 1 and made["added"] == 2
    merged = read(toy / "more.tsv")[QRELS].values.tolist()
    assert sorted(merged) == sorted([*TEST_QRELS, [*wanted[0], "NEI"], [*wanted[2], "REFUTES"]])
    assert [row[0] for row in merged] == ["c3"] * 4 + ["c4"] * 4 + ["c5"] * 3  # claim by claim
    assert facts(tool("pool", f"{words} few.tsv --agreement 2"))["pairs"] == 1
    assert read(toy / "few.tsv")[KEY].values.tolist() == wanted[1:2]
    tsv(toy / "other.tsv", QRELS, "c3|0001|NEI")
    done = tool("pool", "merge other.tsv")
    assert done.returncode == 2 and "other.tsv:2: the qrels have another label" in done.stderr


def test_labels_of_a_model_are_no_judgements(toy, tool):
    tsv(toy / "v.tsv", VERDICTS, "c3|0001|1|9|SUPPORTS|1|0|0")
    done = tool("pool", "merge v.tsv")
    assert done.returncode == 2 and "labels of a model are no judgements" in done.stderr


def test_published_figures_stand_beside_measured_ones(tmp_path, program):
    figures = published.figures_of("ant_bridge")
    assert figures.loc["verdicts", "R@2"] == pytest.approx(0.2185, abs=1e-4)
    values = pd.DataFrame({"R@2": [0.5, None], "x": [1, 2]}, index=["verdicts", "mine"])
    shown = published.beside(values, figures)
    assert shown.to_dict() == {"R@2": {"verdicts": "0.500 (0.2185)"}}
    with pytest.raises(SystemExit):
        published.figures_of("nobody")
    path = tmp_path / "m.json"
    path.write_text(json.dumps({"value": {"verdicts": {"R@2": 0.5, "F1": None}}}))
    shown = program("tools/published", "", path, "ant_bridge", cwd=ROOT).stdout
    assert "0.500 (0.2185)" in shown and "- (0.7253)" in shown


def test_verdicts_on_claims_are_scored_against_the_labels_of_their_evidence(toy, tool):
    rows = """a|s|SUPPORTS; a|n|NEI; b|r|REFUTES; c|r|REFUTES; c|s|SUPPORTS; d|n|NEI;
              e|s|SUPPORTS; f|r|REFUTES"""
    qrels = pd.DataFrame(cells(rows), columns=QRELS)
    gold = ["SUPPORTED", "REFUTED", "DISPUTED", "NOT ENOUGH INFORMATION", "SUPPORTED", "REFUTED"]
    assert verdicts.gold_verdicts(qrels).to_dict() == dict(zip("abcdef", gold))
    predicted = ["SUPPORTED", "SUPPORTED", "REFUTED", "NOT ENOUGH INFORMATION", "REFUTED", ""]
    given = pd.Series(predicted[:5], list("abcde"))  # none on f
    accuracy, macro_f1, counts = verdicts.scores_of(given, verdicts.gold_verdicts(qrels))
    assert accuracy == accuracy_score(gold, predicted) == 2 / 6
    wanted = f1_score(gold, predicted, average="macro", labels=verdicts.VERDICTS)
    assert macro_f1 == pytest.approx(wanted)
    assert counts.loc["REFUTED", "none"] == 1
    undecided = pd.Series("UNDECIDED", list("abcdef"))
    accuracy, macro_f1, counts = verdicts.scores_of(undecided, verdicts.gold_verdicts(qrels))
    assert (accuracy, macro_f1) == (0, 0)
    assert counts["UNDECIDED"].tolist() == [2, 2, 1, 1] and "UNDECIDED" not in counts.index
    (toy / "c.jsonl").write_text('{"claim_id": "c3", "verdict": "SUPPORTED", "evidence": []}\n')
    done = tool("verdicts", "c.jsonl data/demo/qrels.test.tsv")
    assert "Verdicts on 3 claims: accuracy 0.333" in done.stdout
    assert "2 judged claims have no verdict" in done.stderr
    (toy / "c.jsonl").write_text("[]\n")
    done = tool("verdicts", "c.jsonl data/demo/qrels.test.tsv")
    assert done.returncode == 2 and done.stderr.startswith("error: c.jsonl: no verdicts of 05")


def test_verdicts_are_averaged(toy, tool):
    tsv(toy / "a.tsv", VERDICTS, "c3|1|1|2|NEI|0.2|0.3|0.5; c3|2|2|1|NEI|0|0|1")
    tsv(toy / "b.tsv", VERDICTS, "c3|2|1|2|NEI|0|0|1; c3|1|2|1|REFUTES|0.1|0.8|0.1")
    assert facts(tool("verdicts", "mean a.tsv b.tsv --out m.tsv"))["pairs"] == 2
    means = read(toy / "m.tsv")
    assert means["abstract_id"].tolist() == ["1", "2"]
    assert means["label"].tolist() == ["REFUTES", "NEI"]
    assert means.loc[0, "p_supports":].tolist() == pytest.approx([0.15, 0.55, 0.3])
    ties = "c3|1|1|2|REFUTES|.4|.4|.2; c3|2|2|1|NEI|.4|.2|.4; c4|1|1|1|NEI|.2|.4|.4"
    tsv(toy / "ties.tsv", VERDICTS, ties)
    facts(tool("verdicts", "mean ties.tsv --out t.tsv"))
    assert read(toy / "t.tsv")["label"].tolist() == ["REFUTES", "NEI", "NEI"]  # as 05 labels
    tsv(toy / "b.tsv", VERDICTS, "c3|1|1|2|NEI|0|0|1")
    done = tool("verdicts", "mean a.tsv b.tsv --out n.tsv")
    assert done.returncode == 2 and "b.tsv: other pairs than in a.tsv" in done.stderr


def test_the_mean_of_models_is_an_ordinary_model(toy, tool, call):
    for name, seed in {"a": 1, "b": 2}.items():
        tiny(toy / name, seed=seed)
    tiny(toy / "c", outputs=("x", "y", "z"))
    assert facts(tool("average", "mean a b"))["models"] == 2
    first, second, mean = (
        load_file(toy / name / "model.safetensors") for name in ("a", "b", "mean")
    )
    for name, tensor in mean.items():
        assert tensor.numpy() == pytest.approx((first[name] + second[name]).numpy() / 2)
    facts(call("03_rerank.py", "--model mean --out run.tsv", cwd=toy))
    done = tool("average", "other a c")
    assert done.returncode == 2 and "error: c: other parameters than a has" in done.stderr


def test_runs_of_several_seeds_beside_the_first_run(toy, tool, call):
    for name in ("base", "s2"):
        tsv(toy / f"{name}.tsv", RUN, "c|a|1|-1; c|b|2|-2")
    tsv(toy / "s1.tsv", RUN, "c|b|1|-1; c|a|2|-2")
    tsv(toy / "qrels.tsv", QRELS, "c|a|NEI; c|b|SUPPORTS")
    words = "base.tsv s1.tsv s2.tsv --qrels qrels.tsv --measures RR --out m.tsv"
    call("06_evaluate.py", words, cwd=toy)
    rows = tool("seeds", "m.json s1 s2").stdout.splitlines()
    assert rows[1].split() == "RR 0.5000 0.7500 0.3536 1 0 0".split()
