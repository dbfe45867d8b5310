"""What exists stays, what is stale or damaged is made anew, and a number has a meaning.

All scripts, on the toy with tiny models. The helpers behind it have tests of their own in
test_helpers.py, the programs in recipes/ and data/ in their files.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import QRELS, RUN, facts, jsonl, kill_before, load, read, tiny, tsv
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

DEMO = "work/demo"
HYBRID = f"{DEMO}/test/hybrid.tsv"
BM25 = "01_index.py --indexes bm25"
SHARDS = {"SHARD = 4096": "SHARD = 5"} | kill_before("new.rename(path)", 3)
LABELLED = [*RUN, "label", "p_supports", "p_refutes", "p_nei"]


@pytest.fixture(scope="session")
def folders(models, tmp_path_factory):
    """A folder with tiny models: two rerankers, a classifier, an encoder."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny(folder / "tiny")
    tiny(folder / "tiny2", seed=1)
    tiny(folder / "nli", ["contradiction", "neutral", "entailment"])
    encoder = SentenceTransformer(str(folder / "tiny"), device="cpu")
    encoder.save_pretrained(str(folder / "encoder"))
    return folder


@pytest.fixture
def small(toy, folders):
    """The toy with these models, and with verdicts."""
    for folder in folders.iterdir():
        (toy / folder.name).symlink_to(folder)
    tsv(toy / "v.tsv", LABELLED, "c3|0001|1|2|NEI|0|0|1; c3|0002|2|1|REFUTES|0|1|0")
    return toy


# ---------------------------------------------------------------- Places
FILES = [  # commands that write files; the last word names one
    f"02_retrieve.py fuse {HYBRID} --out",
    f"fit_fusion.py {HYBRID} --split test --out",
    "mine.py --split train --out",
    "03_rerank.py --model tiny --out",
    "04_llm_rerank.py --run work/demo/test/hybrid.tsv --backend none --model m --out",
    "05_classify.py --model nli --out",
    "05_classify.py llm --backend none --model m --out",
    "05_classify.py aggregate v.tsv --out",
]
FOLDERS = [  # commands that write folders
    "01_index.py graph --index encoder --out",
    "encoder.py data/demo/tuples.jsonl --model encoder --split train --out",
    "reranker.py data/demo/pairs.jsonl --model tiny --out",
    "classifier.py --model tiny --out",
]
MANY = {  # a command, and what it writes below or beside the place that its last word names
    f"{BM25} --out": "/bm25",
    "02_retrieve.py --index index --out": "/bm25.tsv",
    f"06_evaluate.py {HYBRID} --out": ".claims.tsv",
}


@pytest.mark.parametrize("slash", ["", "/"])
@pytest.mark.parametrize("command", FILES + FOLDERS)
def test_a_folder_of_others_is_never_replaced(small, refused, command, slash):
    (small / "mine/deep").mkdir(parents=True)
    (small / "mine/deep/a").write_text("x")
    refused(small, *command.split(), f"mine{slash}", said="mine: not made by this script")


@pytest.mark.parametrize("command", FILES + FOLDERS)
def test_a_file_is_never_taken_for_a_folder(small, refused, command):
    (small / "mine").write_text("x")
    refused(small, *command.split(), "mine/out", said="File exists: 'mine'")
    if command in FOLDERS:
        refused(small, *command.split(), "mine", said="mine: not made by this script")


@pytest.mark.parametrize("command", MANY)
def test_outputs_beside_each_other_are_checked_before_any_is_written(small, refused, command):
    (small / "index/bm25").mkdir(parents=True)
    (small / f"mine{MANY[command]}").mkdir(parents=True)
    refused(small, *command.split(), "mine", said=f"mine{MANY[command]}: not made by this script")


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("02_retrieve.py fuse", HYBRID),
        (f"mine.py {HYBRID} --split test", "data/demo/qrels.test.tsv"),
        ("03_rerank.py --model tiny", HYBRID),
        ("05_classify.py --model nli", HYBRID),
        (f"06_evaluate.py {HYBRID} --report page", "data/demo/corpus.jsonl"),
    ],
)
def test_no_input_is_replaced(small, refused, command, name):
    words = command.replace("page", name).split()
    if "06" in command:
        words += ["--out", "new"]
    else:
        words += ["--out", name]
    if "fuse" in command:
        words.insert(2, name)
    refused(small, *words, said=f"{name}: not made by this script")


# ---------------------------------------------------------------- Stale
def flip(folder):
    """Change the weights of a model by hand; the file keeps its size."""
    path = folder / "model.safetensors"
    weights = {name: weight.flip(0) for name, weight in load_file(path).items()}
    save_file(weights, path, {"format": "pt"})


def test_weights_that_were_replaced_by_hand_are_noticed(small, call, refused):
    """The models have sidecars, as trained ones do, and the new files are as large as the old."""
    (small / "models").mkdir()
    for name in ("tiny", "encoder"):
        with load("01_index.py").written(small / "models" / name, {}) as new:
            shutil.copytree(small / name, new)
    rerank = ("03_rerank.py", "--model", "models/tiny")
    index = ("01_index.py", "--indexes", "dense", "--dense-model", "models/encoder")
    for command in (index, rerank):
        assert facts(call(*command, cwd=small))["made"]
        assert facts(call(*command, cwd=small))["made"] == []
    before = (small / f"{DEMO}/test/rerank.tsv").read_bytes()
    flip(small / "models/tiny")
    flip(small / "models/encoder")
    assert facts(call(*rerank, cwd=small))["made"]
    assert (small / f"{DEMO}/test/rerank.tsv").read_bytes() != before
    refused(small, "02_retrieve.py", "--out", "new", said="encoder: it has changed since the dense")
    assert facts(call(*index, cwd=small))["made"]
    facts(call("02_retrieve.py", "--out", "new", cwd=small))


def test_what_hf_download_leaves_changes_no_model(small, call):
    shutil.copytree(small / "encoder", small / "own")
    index = ("01_index.py", "--indexes", "dense", "--dense-model", "own")
    facts(call(*index, cwd=small))
    (small / "own/.cache/huggingface").mkdir(parents=True)
    (small / "own/.cache/huggingface/.gitignore").write_text("*")
    (small / "own/README.md").write_text("A model.")
    facts(call("02_retrieve.py", "--out", "new", cwd=small))
    assert facts(call(*index, cwd=small))["made"] == []


def test_an_output_that_was_cut_or_lost_a_file_is_made_again(small, call):
    rerank = ("03_rerank.py", "--model", "tiny")
    facts(call(*rerank, cwd=small))
    run = small / f"{DEMO}/test/rerank.tsv"
    whole = run.read_text()
    run.write_text("\n".join(whole.splitlines()[:5]) + "\n")
    assert facts(call(*rerank, cwd=small))["made"] and run.read_text() == whole
    index = ("01_index.py", "--indexes", "dense", "--dense-model", "encoder")
    facts(call(*index, cwd=small))
    vectors = small / f"{DEMO}/index/dense/embeddings.npy"
    vectors.unlink()
    assert facts(call(*index, cwd=small))["made"] and vectors.exists()


# ---------------------------------------------------------------- Unfinished work
KILLED = {"GROUP = 1024": "GROUP = 8"} | kill_before("group[:, -1] = np.add(is_truncated, 1)", 2)


def test_unfinished_work_of_another_model_stays(small, call, killed):
    words = ("--out", "r.tsv", "--depth", 6)
    command = ("03_rerank.py", "--model", "tiny", *words)
    assert killed(*command, cwd=small, edits=KILLED)
    [unfinished] = small.glob("r.tsv.parts/*/*")
    before = unfinished.read_bytes()
    other = ("03_rerank.py", "--model", "tiny2", *words)
    facts(call(*other, cwd=small))
    assert list(small.glob("r.tsv.parts/*/*")) == [unfinished]
    assert unfinished.read_bytes() == before
    facts(call(*command, cwd=small))  # resumes, and leaves nothing
    assert not (small / "r.tsv.parts").exists()


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [halve, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize(
    ("command", "edits"),
    [
        ("03_rerank.py --model tiny --out new", KILLED),
        ("01_index.py --indexes dense --dense-model encoder --max-length 16 --out new", SHARDS),
        ("01_index.py --indexes splade --max-length 16 --out new", SHARDS),
    ],
)
def test_a_torn_part_is_made_anew(small, call, killed, contents, command, edits, damage):
    size = dict(list(edits.items())[:1])
    facts(call(*command.split(), "--out", "whole", cwd=small, edits=size))
    assert killed(*command.split(), cwd=small, edits=edits)
    parts = [path for path in small.glob("new*/**/*") if ".parts/" in str(path) and path.is_file()]
    damage(sorted(parts)[0])
    assert facts(call(*command.split(), cwd=small, edits=size))["made"]
    for path, content in contents(small).items():
        name = str(path.relative_to(small))
        if name.startswith("whole") and not name.endswith("meta.json"):
            assert content == (small / name.replace("whole", "new")).read_bytes(), name


# ---------------------------------------------------------------- Damaged and foreign inputs
@pytest.mark.parametrize("damage", [halve, Path.unlink])
def test_a_damaged_index_is_one_line_that_names_it(small, call, refused, damage):
    facts(call("01_index.py", "--dense-model", "encoder", "--max-length", 16, cwd=small))
    for path in sorted((small / f"{DEMO}/index").rglob("*/*")):
        content = path.read_bytes()
        damage(path)
        words = ("--retrievers", path.parent.name, "--out", "new")
        refused(small, "02_retrieve.py", *words, said=f"index/{path.parent.name}: damaged")
        path.write_bytes(content)


@pytest.mark.parametrize(
    "fusion",
    [
        {"method": "borda"},
        {"method": ["rrf"]},
        {"weights": ["x"]},
        {"weights": [-1]},
        {"weights": 1},
        {"rrf_k": "x"},
        {"rrf_k": None},
    ],
)
def test_a_fusion_that_nobody_has_fitted_is_refused(toy, refused, fusion):
    whole = {"runs": ["hybrid.tsv"], "weights": [1.0], "method": "rrf", "rrf_k": 60}
    jsonl(toy / "f.json", whole | fusion)
    words = f"fuse {HYBRID} --fusion f.json --out new.tsv"
    refused(toy, "02_retrieve.py", words, said="f.json: no fusion")


@pytest.mark.parametrize("line", ['{"verdict": "x"}', '{"claim_id"', "[]", '{"claim_id": []}'])
def test_verdicts_on_claims_that_are_none_are_refused(toy, refused, line):
    path = toy / f"{DEMO}/test/claims.jsonl"
    path.write_text('{"claim_id": "c3", "verdict": "SUPPORTED"}\n' + line + "\n")
    words = ("06_evaluate.py", HYBRID, "--report", "page.html")
    refused(toy, *words, said="test/claims.jsonl: a line is no verdict on a claim")


@pytest.mark.parametrize(
    "files", [("tokenizer.json", "tokenizer_config.json"), ("tokenizer.json",)]
)
@pytest.mark.parametrize(
    ("model", "command"),
    [
        ("encoder", "01_index.py --indexes dense --dense-model"),
        ("tiny", "03_rerank.py --model"),
        ("tiny", "reranker.py data/demo/pairs.jsonl --model"),
        ("nli", "05_classify.py --model"),
        ("tiny", "classifier.py --model"),
    ],
)
def test_a_model_without_its_tokenizer_is_refused(small, refused, model, command, files):
    folder = shutil.copytree(small / model, small / "torn")
    for name in (*files, "vocab.txt"):
        (folder / name).unlink(missing_ok=True)
    refused(small, *command.split(), "torn", said="torn: ", kept=".parts")


@pytest.mark.parametrize("statement", ['path.rename(f"{folder}/old")', "new.replace(path)"])
def test_a_folder_is_replaced_whole_or_not_at_all(toy, call, killed, statement):
    words = ("01_index.py", "--indexes", "bm25", "--out", "index")
    facts(call(*words, cwd=toy))
    whole = sorted(path.name for path in (toy / "index/bm25").iterdir())
    assert killed(*words, "--force", cwd=toy, edits=kill_before(statement))
    if (toy / "index/bm25").exists():
        assert sorted(path.name for path in (toy / "index/bm25").iterdir()) == whole
    facts(call(*words, "--k1", 2, cwd=toy))
    assert sorted(path.name for path in (toy / "index/bm25").iterdir()) == whole


def test_texts_without_a_word_give_a_run_without_rows(toy, call, refused):
    jsonl(toy / "data/demo/corpus.jsonl", {"abstract_id": 0, "abstract": "zzz"})
    facts(call("01_index.py", "--indexes", "bm25", cwd=toy))
    assert "3 without rows" in call("02_retrieve.py", cwd=toy).stdout
    assert read(toy / f"{DEMO}/test/bm25.tsv").empty
    refused(toy, "06_evaluate.py", said="bm25.tsv: no claim_id is in the qrels")


def test_evidence_that_the_corpus_lacks_is_told(toy, call):
    corpus = toy / "data/demo/corpus.jsonl"
    lines = corpus.read_text().splitlines()
    corpus.write_text("\n".join(lines[1:]) + "\n")  # without 0001, which supports c3
    done = call("06_evaluate.py", HYBRID, "--report", "page.html", cwd=toy)
    line = "1 evidence abstracts are not in the corpus: a run of it cannot find them."
    means = "Means are over the 3 of 3 claims with evidence."
    page = (toy / "page.html").read_text()
    for text in (line, means):
        assert text in done.stdout and text in page


def test_scores_that_rise_with_the_ranks_are_refused(toy, refused):
    tsv(toy / "d.tsv", RUN, "c3|0001|1|.1; c3|0002|2|.2")
    words = "fuse d.tsv --method zscore --out new.tsv"
    refused(toy, "02_retrieve.py", words, said="d.tsv:3: the score is above that of the rank")


# ---------------------------------------------------------------- Judgements
def test_fit_scores_as_06_evaluate_does(toy, call):
    tsv(toy / "a.tsv", RUN, "c3|0003|1|3; c3|0001|2|2; c4|0012|1|2; c4|0004|2|1; c5|0009|1|1")
    only_nei = "c3|0001|SUPPORTS; c3|0003|NEI; c4|0004|REFUTES; c4|0006|NEI; c5|0009|NEI"
    tsv(toy / "q.tsv", QRELS, only_nei)
    words = "a.tsv --qrels q.tsv --split test --out f.json --measure"
    for measure, name in {
        "Bpref": "B-Pref (trec_eval)",
        "nDCG@10": "nDCG@10",
        "R@2": "R@2",
        "MAP": "MAP",
    }.items():
        line = call("fit_fusion.py", words, measure, cwd=toy).stdout.splitlines()[0]
        scored = ("06_evaluate.py", "a.tsv", "--qrels", "q.tsv", "--out", "m.tsv", "--measures")
        facts(call(*scored, name, "--resamples", 0, cwd=toy))
        value = json.loads((toy / "m.json").read_text())["value"]["a"][name]
        assert line == f"{value:.4f}  a.tsv alone", measure


@pytest.mark.parametrize("measure", ["ERR@10", "nDCG(x=1)@10", "R@-1", "P"])
def test_a_measure_that_cannot_be_computed_is_one_line(toy, refused, measure):
    words = f"{HYBRID} --split test --out f.json --measure {measure}"
    refused(toy, "fit_fusion.py", words, said=f"--measure: cannot compute {measure}")


def test_nothing_is_fitted_on_judgements_without_evidence(toy, refused):
    tsv(toy / "q.tsv", QRELS, "c3|0001|NEI; c4|0004|NEI")
    words = f"{HYBRID} --qrels q.tsv --split test --out f.json"
    refused(toy, "fit_fusion.py", words, said="q.tsv: no row is SUPPORTS or REFUTES")


def test_tuples_that_are_left_out_are_told(small, call):
    tuples = [("0001", []), ("0002", []), ("0004", ["0005", "0006"])]
    rows = [
        {"claim_id": "c1", "positive": positive, "negatives": negatives}
        for positive, negatives in tuples
    ]
    jsonl(small / "t.jsonl", *rows)
    words = ("encoder.py", "t.jsonl", "--model", "encoder", "--epochs", 1, "--out", "m")
    done = call(*words, "--max-length", 16, cwd=small)
    assert facts(done)["rows"] == 1 and facts(done)["left_out"] == 2


@pytest.mark.parametrize("split_by", ["instance", "claim"])
@pytest.mark.parametrize("share", [0.1, 0.15, 0.4, 0.6, 0.7, 0])
def test_the_share_that_is_asked_for_is_held_out(split_by, share):
    from argparse import Namespace

    import pandas as pd

    kit = load("recipes/train/classifier.py")
    rows = [(f"c{n // 4}", f"{n}", n % 3) for n in range(600)]
    table = pd.DataFrame(rows, columns=[*QRELS[:2], "gold"])
    args = Namespace(held_out=share, split_by=split_by, seed=13, qrels="q.tsv")
    trained, held_out = kit.hold_out(table, args)
    assert len(held_out) == pytest.approx(share * 600, abs=6)
    assert sorted([*trained.index, *held_out.index]) == list(table.index)
    if split_by == "claim":
        assert not set(trained["claim_id"]) & set(held_out["claim_id"])


# ---------------------------------------------------------------- Numbers
WITHIN = ["0", "1", "2", "0.5", "7"]
WITHOUT = ["-1", "nan", "inf", "-0.5", "1e400", "99999999999999999999", "x", ""]
FLAGS = {
    "02_retrieve.py fuse work/demo/test/hybrid.tsv --out new": "--top-k --rrf-k --weights",
    "mine.py work/demo/train/hybrid.tsv --out new": """--hard --easy --from-top
        --skip-top --max-score --margin --relative-margin --seed""",
    "mine.py work/demo/train/hybrid.tsv --shape tuples --out new": "--hard --easy",
    "mine.py work/demo/train/hybrid.tsv --shape labels --out new": "--hard --seed",
    f"{BM25} --out new": "--k1 --b --max-length --batch-size",
    "03_rerank.py --model tiny --out new": """--depth --top-k --first-stage --rounds --neighbours
        --beam --max-length --batch-size""",
    f"06_evaluate.py {HYBRID} --out new.tsv": "--depth --resamples --seed",
    "04_llm_rerank.py --run work/demo/test/hybrid.tsv --backend none --model m --out new": """
        --depth --top-k --alpha --window --best --limit --max-words --max-tokens
        --concurrency --timeout --batch-size""",
    "05_classify.py llm --backend none --model m --out new": """--top-k --max-words
        --max-tokens --pairs-per-prompt --concurrency --timeout --batch-size""",
}


@pytest.mark.parametrize("command", FLAGS)
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(choice=st.data())
def test_random_numbers_end_in_a_result_or_in_one_line(small, call, contents, command, choice):
    """Status 0, 2, or 3 where requests wait; no traceback; only the outputs named are changed."""
    names = choice.draw(st.lists(st.sampled_from(FLAGS[command].split()), min_size=1, max_size=3))
    words = []
    for name in dict.fromkeys(names):
        number = choice.draw(st.one_of(st.sampled_from(WITHIN), st.sampled_from(WITHOUT)))
        words.append(f"{name}={number}")
    before = contents(small, "new")
    done = call(*command.split(), *words, cwd=small)
    assert done.returncode in (0, 2, 3), (words, done.stderr)
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == (done.returncode == 2), (words, done.stderr)
    assert contents(small, "new") == before
    for path in small.glob("new*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


TRAIN = {
    "encoder.py data/demo/tuples.jsonl --model encoder --out new --max-length 16": """
        --epochs=-1 --epochs=0 --lr=-1 --batch-size=0 --accumulate=0 --lora=-1
        --patience=-1 --seed=-1""",
    "reranker.py data/demo/pairs.jsonl --model tiny --out new --max-length 16": """
        --epochs=-1 --epochs=nan --lr=nan --batch-size=-1 --accumulate=0 --lora=-1
        --patience=0 --seed=-1 --dev-depth=0""",
    "classifier.py --model tiny --out new --max-length 16": """
        --epochs=0 --lr=-1 --batch-size=0 --accumulate=-1 --lora=x --patience=-1
        --seed=-1 --held-out=1.5 --held-out=-0.1 --freeze=-1""",
    "01_index.py graph --index encoder --out new": "--neighbours=-1 --neighbours=0",
    "01_index.py --indexes dense --dense-model encoder --out new": "--batch-size=0",
    "03_rerank.py --model tiny --out new": "--depth=0 --first-stage=80 --batch-size=0 --beam=0",
    "05_classify.py --model nli --out new": "--top-k=-1 --adjust=2 --batch-size=0",
}
CASES = [(command, flag) for command, flags in TRAIN.items() for flag in flags.split()]


@pytest.mark.parametrize(("command", "flag"), CASES)
def test_a_number_without_a_meaning_is_an_error_of_its_flag(small, refused, command, flag):
    name = flag.split("=")[0]
    refused(small, *command.split(), flag, said=f"argument {name}")


def test_numbers_are_still_numbers(small, call):
    """Those that tests, recipes and rehearsals use: parts of epochs, a learning rate of 0."""
    words = ("reranker.py", "data/demo/pairs.jsonl", "--model", "tiny", "--out", "new")
    assert np.isfinite(facts(call(*words, "--epochs", 0.25, "--lr", 0, cwd=small))["loss"]).all()
