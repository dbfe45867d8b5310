"""What exists stays, what is stale or damaged is made anew, and a number has a meaning.

All scripts, on the toy with tiny models. The helpers behind it have tests of their own in
test_helpers.py, the programs in recipes/ and data/ in their files; what a kill leaves is in the
file of each script, replies of language models in those of stages 4 and 5, code in files of models
in test_bad_input.py and test_download.py.
"""

import json
import shutil
from argparse import Namespace
from pathlib import Path

import pandas as pd
import pytest
from conftest import (
    NLI,
    QRELS,
    RUN,
    VERDICTS,
    cases,
    facts,
    jsonl,
    kill_before,
    load,
    read,
    tiny,
    tsv,
)
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

TEST = "work/demo/test"
HYBRID = f"{TEST}/hybrid.tsv"


@pytest.fixture(scope="session")
def folders(models, tmp_path_factory):
    """A folder with tiny models, each also without the files of its tokenizer, or one of them."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny(folder / "tiny")
    tiny(folder / "tiny2", seed=1)
    tiny(folder / "nli", NLI)
    encoder = SentenceTransformer(str(folder / "tiny"), device="cpu")
    encoder.save_pretrained(str(folder / "encoder"))
    for name in ("tiny", "nli", "encoder"):
        for number, pattern in enumerate(("tokenizer.json", "tokenizer*"), 1):
            ignore = shutil.ignore_patterns(pattern, "vocab.txt")
            shutil.copytree(folder / name, folder / f"{name}-torn{number}", ignore=ignore)
    return folder


@pytest.fixture
def small(toy, folders):
    """The toy with these models, and with verdicts."""
    for folder in folders.iterdir():
        (toy / folder.name).symlink_to(folder)
    tsv(toy / "v.tsv", VERDICTS, "c3|0001|1|2|NEI|0|0|1; c3|0002|2|1|REFUTES|0|1|0")
    return toy


@pytest.mark.parametrize("files, content, command, said", cases("refused.tsv"))
def test_what_is_refused_touches_nothing(small, refused, files, content, command, said):
    """refused.tsv: files that stand there, what they hold (| is a tab, ; the end of a line)."""
    for path in map(small.joinpath, files.split()):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content.replace("|", "\t").replace(";", "\n") + "\n")
    kept = ".parts" if "-torn" in command else "//"
    refused(small, *command.split(), said=said, kept=kept)


# ---------------------------------------------------------------- Stale and unfinished
def cut(path, size=-9):
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    "command, output, damage",
    [
        ("03_rerank.py --model models/tiny", "test/rerank.tsv", cut),
        (
            "01_index.py --indexes dense --dense-model models/encoder",
            "index/dense/embeddings.npy",
            Path.unlink,
        ),
    ],
)
def test_what_was_replaced_or_cut_by_hand_is_made_anew(
    small, call, refused, command, output, damage
):
    """The model has a sidecar, as a trained one does, and its new file is as large as the old."""
    model = small / command.split()[-1]
    model.parent.mkdir()
    with load("01_index.py").written(model, {}) as new:
        shutil.copytree(small / model.name, new)

    def makes():
        return bool(facts(call(*command.split(), cwd=small))["made"])

    assert makes() and not makes()
    output = small / "work/demo" / output
    whole = output.read_bytes()
    damage(output)
    assert makes() and output.read_bytes() == whole
    path = model / "model.safetensors"
    weights = {name: weight.flip(0) for name, weight in load_file(path).items()}
    save_file(weights, path, {"format": "pt"})
    if model.name == "encoder":
        said = "encoder: it has changed since the dense"
        refused(small, "02_retrieve.py", "--out", "new", said=said)
    assert makes() and output.read_bytes() != whole


@pytest.mark.parametrize("size", [0, -9])
def test_torn_work_is_made_anew_and_that_of_another_model_stays(small, call, killed, size):
    groups = {"GROUP = 1024": "GROUP = 8"}
    words = "03_rerank.py", "--depth 6 --out r.tsv --model"
    facts(call(*words, "tiny", cwd=small, edits=groups))
    whole = (small / "r.tsv").rename(small / "whole").read_bytes()
    kill = kill_before("group[:, -1] = np.add(is_truncated, 1)", 2)
    assert killed(*words, "tiny", cwd=small, edits=groups | kill)
    [unfinished] = small.glob("r.tsv.parts/*/*")
    cut(unfinished, size)
    torn = unfinished.read_bytes()
    facts(call(*words, "tiny2", cwd=small))
    assert list(small.glob("r.tsv.parts/*/*")) == [unfinished] and unfinished.read_bytes() == torn
    facts(call(*words, "tiny", cwd=small, edits=groups))
    assert (small / "r.tsv").read_bytes() == whole and not (small / "r.tsv.parts").exists()


@pytest.mark.parametrize("words", ["dense --dense-model encoder", "splade"])
def test_an_empty_shard_is_made_anew(small, call, killed, words):
    """test_01_index.py cuts one and compares the bytes."""
    words = "01_index.py", f"--max-length 16 --out new --indexes {words}"
    shards = {"SHARD = 4096": "SHARD = 5"}
    assert killed(*words, cwd=small, edits=shards | kill_before("new.rename(path)", 3))
    shard, _ = small.glob("new/*.parts/*/[0-9]*")
    cut(shard, 0)
    assert facts(call(*words, cwd=small, edits=shards))["made"]
    assert not list(small.glob("new/*.parts"))


@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_a_damaged_index_is_one_line_that_names_it(small, call, refused, damage):
    facts(call("01_index.py", "--max-length 16 --dense-model encoder", cwd=small))
    for path in sorted((small / "work/demo/index").rglob("*/*")):
        content = path.read_bytes()
        damage(path)
        kind = path.parent.name
        words = f"--out new --retrievers {kind}"
        refused(small, "02_retrieve.py", words, said=f"index/{kind}: damaged")
        path.write_bytes(content)


@pytest.mark.parametrize("statement", ['path.rename(f"{folder}/old")', "new.replace(path)"])
def test_a_folder_is_replaced_whole_or_not_at_all(toy, call, killed, statement):
    index = toy / "index/bm25"

    def names():
        return sorted(path.name for path in index.iterdir())

    words = "01_index.py", "--indexes bm25 --out index"
    facts(call(*words, cwd=toy))
    whole = names()
    assert killed(*words, "--force", cwd=toy, edits=kill_before(statement))
    assert not index.exists() or names() == whole
    facts(call(*words, "--k1", 2, cwd=toy))
    assert names() == whole


# ---------------------------------------------------------------- Told
def test_texts_without_a_word_give_a_run_without_rows(toy, call, refused):
    jsonl(toy / "data/demo/corpus.jsonl", {"abstract_id": 0, "abstract": "zzz"})
    facts(call("01_index.py", "--indexes bm25", cwd=toy))
    assert "3 without rows" in call("02_retrieve.py", cwd=toy).stdout
    assert read(toy / f"{TEST}/bm25.tsv").empty
    refused(toy, "06_evaluate.py", said="bm25.tsv: no claim_id is in the qrels")


def test_evidence_that_the_corpus_lacks_is_told(toy, call):
    corpus = toy / "data/demo/corpus.jsonl"
    corpus.write_text(corpus.read_text().split("\n", 1)[1])  # without 0001, which supports c3
    done = call("06_evaluate.py", f"{HYBRID} --report page.html", cwd=toy)
    for text in (
        "1 evidence abstracts are not in the corpus: a run of it cannot find them.",
        "Means are over the 3 of 3 claims with evidence.",
    ):
        assert text in done.stdout and text in (toy / "page.html").read_text()


def test_tuples_that_are_left_out_are_told(small, call):
    tuples = {"0001": [], "0002": [], "0004": ["0005", "0006"]}
    rows = [{"claim_id": "c1", "positive": key, "negatives": tuples[key]} for key in tuples]
    jsonl(small / "t.jsonl", *rows)
    words = "t.jsonl --model encoder --epochs 1 --out m --max-length 16"
    done = facts(call("encoder.py", words, cwd=small))
    assert done["rows"] == 1 and done["left_out"] == 2


# ---------------------------------------------------------------- Numbers
def test_fit_scores_as_06_evaluate_does(toy, call):
    tsv(toy / "a.tsv", RUN, "c3|0003|1|3; c3|0001|2|2; c4|0012|1|2; c4|0004|2|1; c5|0009|1|1")
    only_nei = "c3|0001|SUPPORTS; c3|0003|NEI; c4|0004|REFUTES; c4|0006|NEI; c5|0009|NEI"
    tsv(toy / "q.tsv", QRELS, only_nei)
    words = "a.tsv --qrels q.tsv --split test --out f.json --measure"
    names = {"Bpref": "B-Pref (trec_eval)", "nDCG@10": "nDCG@10", "R@2": "R@2", "MAP": "MAP"}
    scored = "a.tsv --qrels q.tsv --out m.tsv --resamples 0 --measures"
    facts(call("06_evaluate.py", scored, *names.values(), cwd=toy))
    values = json.loads((toy / "m.json").read_text())["value"]["a"]
    for measure, name in names.items():
        line = call("fit_fusion.py", words, measure, cwd=toy).stdout.splitlines()[0]
        assert line == f"{values[name]:.4f}  a.tsv alone", measure


@pytest.mark.parametrize("split_by", ["instance", "claim"])
def test_the_share_that_is_asked_for_is_held_out(split_by):
    rows = [(f"c{n // 4}", n % 3) for n in range(600)]
    table = pd.DataFrame(rows, columns=["claim_id", "gold"])
    for share in (0.1, 0.15, 0.4, 0.6, 0.7, 0):
        args = Namespace(held_out=share, split_by=split_by, seed=13, qrels="q.tsv")
        parts = load("recipes/train/classifier.py").hold_out(table, args)
        assert len(parts[1]) == pytest.approx(share * 600, abs=6)
        assert sorted(pd.concat(parts).index) == list(table.index)


NUMBERS = "0 1 2 0.5 7 -1 nan inf -0.5 1e400 99999999999999999999 x "


@pytest.mark.parametrize("command, flag", cases("numbers.tsv"))
def test_any_number_ends_in_a_result_or_in_one_line(small, call, contents, command, flag):
    """Status 0, 2, or 3 where requests wait; no traceback; only the outputs named are changed."""
    before = contents(small, "new")
    for number in NUMBERS.split(" "):
        done = call(*command.split(), f"{flag}={number}", cwd=small)
        assert done.returncode in (0, 2, 3) and "Traceback" not in done.stderr, done.stderr
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == (done.returncode == 2), (number, done.stderr)
        assert contents(small, "new") == before
