"""05_classify.py: labels and probabilities that agree, replies that are counted, and what is refused."""
import json

import pandas as pd
import pytest
from conftest import tsv

SCRIPT = "05_classify.py"
PROBABILITIES = ["p_supports", "p_refutes", "p_nei"]
LABELS = ["SUPPORTS", "REFUTES", "NEI"]

def read(path):
    return pd.read_csv(path, sep="\t", dtype={"claim_id": str, "abstract_id": str}, keep_default_na=False)

# ----------------------------------------------------------- Prompt and reply
@pytest.mark.parametrize(("reply", "label"), [
    ("SUPPORTS", "SUPPORTS"), ("supported.", "SUPPORTS"), ("Label: Support", "SUPPORTS"), ("REFUTES", "REFUTES"),
    ("It contradicts the claim", "REFUTES"), ("refuted", "REFUTES"), ("NEI", "NEI"), ("Not Enough Information", "NEI"),
    ("not_enough_info", "NEI"), ("", None), ("maybe", None), ("SUPPORTS or REFUTES", None), ("insupportable", None),
])
def test_one_label_is_read_and_none_or_two_are_not(load, reply, label):
    assert load(SCRIPT)["parse_label"](reply) == label

def test_an_abstract_cannot_close_its_tags(load):
    request = load(SCRIPT)["messages_for"]("c", "a </abstract> b < /ABSTRACT > c </ abstract> d", 99)[-1]["content"]
    assert request.lower().count("</abstract>") == 1
    inside = request.split("<abstract>\n")[1].split("\n</abstract>")[0]
    assert inside.split() == ["a", "b", "<", "/ABSTRACT", ">", "c", "d"]

def test_the_abstract_is_cut_to_words(load):
    request = load(SCRIPT)["messages_for"]("c", "one two three", 2)[-1]["content"]
    assert "\none two\n" in request

# ----------------------------------------------------------- Classifier
def test_train_then_classify_alone_in_a_folder(toy, run):
    trained = run(SCRIPT, "train", "--epochs", 1, "--max-length", 48, cwd=toy)
    assert trained.returncode == 0, trained.stderr
    assert "{'SUPPORTS': 2, 'REFUTES': 1, 'NEI': 2}" in trained.stdout
    model = toy / "work/demo/models/classifier"
    assert json.loads((model / "config.json").read_text())["id2label"] == {"0": "SUPPORTS", "1": "REFUTES", "2": "NEI"}
    done = run(SCRIPT, "--run", "work/demo/test/hybrid.tsv", "--max-length", 48, cwd=toy)
    assert done.returncode == 0, done.stderr
    verdicts, before = read(toy / "work/demo/test/verdicts.tsv"), read(toy / "work/demo/test/hybrid.tsv")
    columns = ["claim_id", "abstract_id", "rank", "score"]
    assert verdicts[columns].equals(before[columns])
    assert list(verdicts.columns) == [*columns, "label", *PROBABILITIES]
    assert verdicts[PROBABILITIES].sum(axis=1).tolist() == pytest.approx([1] * len(verdicts), abs=1e-6)
    best = verdicts[PROBABILITIES].to_numpy().argmax(axis=1)
    assert verdicts["label"].tolist() == [LABELS[place] for place in best]
    bytes_before = (toy / "work/demo/test/verdicts.tsv").read_bytes()
    again = run(SCRIPT, "--run", "work/demo/test/hybrid.tsv", "--max-length", 48, cwd=toy)
    assert "up to date" in again.stdout and (toy / "work/demo/test/verdicts.tsv").read_bytes() == bytes_before

def test_a_model_without_the_three_labels_is_refused(toy, run, contents, refused):
    before = contents(toy)
    done = run(SCRIPT, "--run", "work/demo/test/hybrid.tsv", "--model", "data/models/minilm", cwd=toy)
    done.stderr = "\n".join(line for line in done.stderr.splitlines() if line.startswith(("error:", "Traceback")))
    refused(done, before, toy, "data/models/minilm", "labels")

# ----------------------------------------------------------- Language model
def test_labels_come_from_the_endpoint_and_unusable_replies_count_as_nei(toy, run, endpoint):
    replies = {"wheat": "x", "bears": "SUPPORTS", "sun": "It refutes the claim.", "sea level": "who knows"}
    server = endpoint(lambda prompt: next(replies[word] for word in replies if word in prompt.split("\n")[0].lower()))
    call = (SCRIPT, "llm", "--run", "work/demo/test/hybrid.tsv", "--base-url", server.url, "--model", "toy", "--top-k", 2)
    done = run(*call, cwd=toy)
    assert done.returncode == 0, done.stderr
    verdicts = read(toy / "work/demo/test/llm_verdicts.tsv")
    labels = dict(zip(verdicts["claim_id"], verdicts["label"]))
    assert labels == {"c3": "SUPPORTS", "c4": "REFUTES", "c5": "NEI"} and len(verdicts) == 3 * 2
    assert verdicts[PROBABILITIES].to_numpy().max(axis=1).tolist() == [1] * 6
    assert json.loads(done.stdout.splitlines()[-1])["unusable"] == 2
    assert run(*call, "--force", cwd=toy).returncode == 0
    assert len(server.asked) == 6

# ----------------------------------------------------------- Bad input
@pytest.mark.parametrize(("arguments", "word"), [
    (["--run", "nowhere.tsv", "--model", "data/models/minilm"], "nowhere.tsv"),
    (["--run", "work/demo/test/hybrid.tsv"], "work/demo/models/classifier"),
    (["train", "--qrels", "nowhere.tsv"], "nowhere.tsv"),
    (["llm", "--run", "work/demo/test/hybrid.tsv", "--backend", "transformers", "--model", "data/none"], "data/none"),
])
def test_missing_files_are_refused(toy, run, contents, refused, arguments, word):
    before = contents(toy)
    refused(run(SCRIPT, *arguments, cwd=toy), before, toy, word)

@pytest.mark.parametrize(("text", "words"), [
    ("claim_id\tabstract_id\tlabel\nc1\t0010\tTRUE\n", ["qrels.train.tsv:2:", "TRUE"]),
    ("claim_id\tabstract_id\tlabel\nc1\t0010\tNEI\nc1\t0010\tSUPPORTS\n", ["qrels.train.tsv:3:", "stands twice"]),
    ("claim_id\tabstract_id\tlabel\nc9\t0010\tNEI\n", ["qrels.train.tsv:2:", "c9"]),
    ("claim_id\tabstract_id\tlabel\n", ["qrels.train.tsv", "no pair"]),
    ("c1 0 0010 1\n", ["qrels.train.tsv:1:", "stance"]),
])
def test_bad_judgements_are_refused_by_line(toy, run, contents, refused, text, words):
    (toy / "data/demo/qrels.train.tsv").write_text(text)
    before = contents(toy)
    refused(run(SCRIPT, "train", cwd=toy), before, toy, *words)

def test_a_bad_run_is_refused_by_line(toy, run, contents, refused):
    tsv(toy / "r.tsv", ["claim_id", "abstract_id", "rank", "score"], [("c3", "0001", 1, 1), ("c3", "0002", 2, "nan")])
    before = contents(toy)
    refused(run(SCRIPT, "--run", "r.tsv", "--model", "data/models/minilm", cwd=toy), before, toy, "r.tsv:3:", "score")
