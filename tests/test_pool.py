"""recipes/tools: average.py, pool.py, published.py, verdicts.py (bad_recipes.tsv, too)."""

import json

import pandas as pd
import pytest
from conftest import KEY, QRELS, ROOT, RUN, VERDICTS, cells, facts, load, read, tiny, tsv
from safetensors.torch import load_file
from sklearn.metrics import accuracy_score, f1_score

MERGED = """c3|0001|SUPPORTS; c3|0002|SUPPORTS; c3|0003|NEI; c3|0010|NEI;
    c4|0004|REFUTES; c4|0005|REFUTES; c4|0006|NEI; c4|0012|REFUTES;
    c5|0007|REFUTES; c5|0008|REFUTES; c5|0009|NEI"""


@pytest.fixture
def tool(toy, program):
    """tool("pool", "merge ..."): the program in the folder of the toy."""
    return lambda name, words: program(f"tools/{name}", words, cwd=toy)


def rows_of(path, columns):
    """Return the rows of a table as cells() does."""
    return read(path)[columns].astype(str).to_numpy().tolist()


def test_what_was_pooled_and_labelled_is_merged(toy, tool):
    tsv(toy / "a.tsv", RUN, "c3|0001|1|3; c3|0011|2|2; c4|0012|1|1")
    tsv(toy / "b.tsv", RUN, "c3|0010|1|3; c3|0011|2|2; c3|0009|3|1")
    words = "a.tsv b.tsv --pool-depth 2 --out"
    assert facts(tool("pool", f"{words} pool.tsv"))["judged_already"] == 1
    pool = read(toy / "pool.tsv")
    assert rows_of(toy / "pool.tsv", KEY) == cells("c3|0010; c3|0011; c4|0012")  # as the corpus
    assert (pool["abstract"] != "").all()
    as_run = cells("c3|0010|1|-1; c3|0011|2|-2; c4|0012|1|-1")
    assert rows_of(toy / "pool.run.tsv", RUN) == as_run
    pool["label"] = ["NEI", "", "REFUTES"]
    pool.to_csv(toy / "pool.tsv", sep="\t", index=False)
    assert "pool.tsv: it has labels" in tool("pool", f"{words} pool.tsv --force").stderr
    made = facts(tool("pool", "merge pool.tsv --out more.tsv"))
    assert made["without_label"] == 1 and made["added"] == 2
    assert rows_of(toy / "more.tsv", QRELS) == cells(MERGED)
    assert facts(tool("pool", f"{words} few.tsv --agreement 2"))["pairs"] == 1
    assert rows_of(toy / "few.tsv", KEY) == [["c3", "0011"]]


def test_published_figures_stand_beside_measured_ones(tmp_path, program):
    path = tmp_path / "m.json"
    values = {"verdicts": {"R@2": 0.5, "F1": None, "own": 1}, "mine": {"R@2": 0.5}}
    path.write_text(json.dumps({"value": values}))
    shown = program("tools/published", "", path, "ant_bridge", cwd=ROOT).stdout.split()
    assert " ".join(shown[-7:]) == "R@2 F1 verdicts 0.500 (0.2185) - (0.7253)"


def test_verdicts_on_claims_are_scored_against_the_labels_of_their_evidence(toy, tool):
    verdicts = load("recipes/tools/verdicts.py")
    rows = """a|s|SUPPORTS; a|n|NEI; b|r|REFUTES; c|r|REFUTES; c|s|SUPPORTS; d|n|NEI;
              e|s|SUPPORTS; f|r|REFUTES"""
    gold = verdicts.gold_verdicts(pd.DataFrame(cells(rows), columns=QRELS))
    wanted = ["SUPPORTED", "REFUTED", "DISPUTED", "NOT ENOUGH INFORMATION", "SUPPORTED", "REFUTED"]
    assert gold.to_dict() == dict(zip("abcdef", wanted))
    predicted = ["SUPPORTED", "SUPPORTED", "REFUTED", "NOT ENOUGH INFORMATION", "REFUTED", ""]
    given = pd.Series(predicted[:5], list("abcde"))  # none on f
    accuracy, macro_f1, counts = verdicts.scores_of(given, gold)
    assert accuracy == accuracy_score(wanted, predicted) == 2 / 6
    expected = f1_score(wanted, predicted, average="macro", labels=verdicts.VERDICTS)
    assert macro_f1 == pytest.approx(expected)
    assert counts.loc["REFUTED", "none"] == 1
    undecided = pd.Series("UNDECIDED", gold.index)
    accuracy, macro_f1, counts = verdicts.scores_of(undecided, gold)
    assert accuracy == macro_f1 == 0
    assert counts["UNDECIDED"].tolist() == [2, 2, 1, 1] and "UNDECIDED" not in counts.index
    (toy / "c.jsonl").write_text('{"claim_id": "c3", "verdict": "SUPPORTED", "evidence": []}\n')
    done = tool("verdicts", "c.jsonl data/demo/qrels.test.tsv")
    assert "Verdicts on 3 claims: accuracy 0.333" in done.stdout
    assert "2 judged claims have no verdict" in done.stderr


def test_verdicts_are_averaged(toy, tool, refused, program):
    tsv(toy / "a.tsv", VERDICTS, "c3|1|1|2|NEI|0.2|0.3|0.5; c3|2|2|1|NEI|0|0|1")
    tsv(toy / "b.tsv", VERDICTS, "c3|2|1|2|NEI|0|0|1; c3|1|2|1|REFUTES|0.1|0.8|0.1")
    assert facts(tool("verdicts", "mean a.tsv b.tsv --out m.tsv"))["pairs"] == 2
    columns = ["abstract_id", *VERDICTS[4:]]
    assert rows_of(toy / "m.tsv", columns) == cells("1|REFUTES|0.15|0.55|0.3; 2|NEI|0.0|0.0|1.0")
    ties = "c3|1|1|2|REFUTES|.4|.4|.2; c3|2|2|1|NEI|.4|.2|.4; c4|1|1|1|NEI|.2|.4|.4"
    tsv(toy / "ties.tsv", VERDICTS, ties)
    facts(tool("verdicts", "mean ties.tsv --out t.tsv"))
    assert read(toy / "t.tsv")["label"].tolist() == ["REFUTES", "NEI", "NEI"]  # as 05 labels
    words = "tools/verdicts mean a.tsv ties.tsv --out n.tsv"
    refused(toy, *words.split(), said="ties.tsv: other pairs than in a.tsv", by=program)


def test_the_mean_of_models_is_an_ordinary_model(toy, tool, call, refused, program):
    for name, seed in {"a": 1, "b": 2}.items():
        tiny(toy / name, seed=seed)
    tiny(toy / "c", outputs=("x", "y", "z"))
    assert facts(tool("average", "mean a b"))["models"] == 2
    first, second, mean = [
        load_file(toy / f"{name}/model.safetensors") for name in ("a", "b", "mean")
    ]
    for name, tensor in mean.items():
        assert tensor.numpy() == pytest.approx((first[name] + second[name]).numpy() / 2)
    facts(call("03_rerank.py", "--model mean --out run.tsv", cwd=toy))
    words = "tools/average other a c"
    refused(toy, *words.split(), said="c: other parameters than a has", by=program)
