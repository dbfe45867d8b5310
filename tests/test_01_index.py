"""01_index.py: what is indexed, that it is whole, and what it refuses."""
import json

import numpy as np
import pytest

SCRIPT = "01_index.py"

def corpus(folder):
    return folder / "data" / "demo" / "corpus.jsonl"

# ----------------------------------------------------------- Functions
def test_text_joins_the_fields_that_are_not_empty(load):
    text_of = load(SCRIPT)["text_of"]
    assert text_of({"title": "Ice ", "abstract": "melts", "journal": None}, ["title", "journal", "abstract"]) == "Ice melts"

def test_batches_cover_every_row_once_longest_first(load):
    batches = load(SCRIPT)["batches_by_length"](["a", "ccc", "bb", "ddd", ""], 2)
    assert batches == [[1, 3], [2, 0], [4]]

def test_stems_are_numbered_by_first_occurrence(load):
    ids, vocabulary = load(SCRIPT)["analyse"](["Melting glaciers melt", "the glacier"])
    assert vocabulary == {"melt": 0, "glacier": 1}
    assert ids == [[0, 1, 0], [1]]

def test_splade_is_the_maximum_over_tokens_of_log_one_plus_relu(load, models):
    import torch
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    folder = models / "splade-tiny"
    texts = ["polar bears need sea ice", "wheat"]
    found = load(SCRIPT)["load_splade"](folder, "cpu").encode_document(texts, convert_to_sparse_tensor=False)
    batch = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        logits = AutoModelForMaskedLM.from_pretrained(folder).eval()(**batch).logits
    weights = torch.log(1 + torch.relu(logits)) * batch["attention_mask"][..., None]
    np.testing.assert_allclose(found.numpy(), weights.max(dim=1).values.numpy(), atol=1e-5)

# ----------------------------------------------------------- The whole script
def test_three_indexes_alone_in_an_empty_folder(toy, run):
    with open(corpus(toy), "a", encoding="utf-8") as file:
        file.write(json.dumps({"abstract_id": "0013", "abstract": None}) + "\n")
        file.write(json.dumps({"abstract_id": 14, "abstract": 3.5}) + "\n")
    done = run(SCRIPT, cwd=toy)
    assert done.returncode == 0, done.stderr
    assert "2 abstracts are null, empty or no text" in done.stderr
    index = toy / "work" / "demo" / "index"
    ids = [f"{number:04d}" for number in range(1, 14)] + ["14"]
    for kind in ("bm25", "dense", "splade"):
        meta = json.loads((index / kind / "meta.json").read_text())
        assert json.loads((index / kind / "abstract_ids.json").read_text()) == ids
        assert (meta["kind"], meta["abstracts"]) == (kind, 14)
        assert (index / f"{kind}.meta.json").is_file()
    vectors = np.load(index / "dense" / "embeddings.npy")
    assert (vectors.shape, vectors.dtype) == ((14, 384), np.float16)
    np.testing.assert_allclose(np.linalg.norm(vectors.astype(np.float32), axis=1), 1, atol=1e-3)
    data, indices, indptr = (np.load(index / "splade" / f"{name}.npy") for name in ("data", "indices", "indptr"))
    assert len(indptr) == 30_522 + 1 and indptr[-1] == len(data) == len(indices) and (data > 0).all()
    assert json.loads(done.stdout.splitlines()[-1])["abstracts"] == 14

    first = {path: path.read_bytes() for path in index.rglob("*") if path.is_file() and not path.name.endswith(".meta.json")}
    again = run(SCRIPT, cwd=toy)
    assert again.returncode == 0 and again.stdout.count("up to date: ") == 3
    forced = run(SCRIPT, "--force", cwd=toy)
    assert forced.returncode == 0, forced.stderr
    assert {path: path.read_bytes() for path in first} == first

def test_an_index_is_made_again_when_an_argument_changes(toy, run):
    assert run(SCRIPT, "--indexes", "bm25", cwd=toy).returncode == 0
    done = run(SCRIPT, "--indexes", "bm25", "--b", "0.5", cwd=toy)
    assert "up to date" not in done.stdout
    assert json.loads((toy / "work/demo/index/bm25/meta.json").read_text())["b"] == 0.5

def test_an_index_is_kept_when_only_other_indexes_arguments_change(toy, run):
    assert run(SCRIPT, "--indexes", "bm25", cwd=toy).returncode == 0
    done = run(SCRIPT, "--indexes", "bm25", "--max-length", "99", "--dense-model", "other/model", cwd=toy)
    assert "up to date: work/demo/index/bm25" in done.stdout

# ----------------------------------------------------------- Bad input
GOOD = '{"abstract_id": "1", "abstract": "ice"}\n'

@pytest.mark.parametrize(("text", "line"), [
    (GOOD + "{not json\n", 2),
    (GOOD + "[1, 2]\n", 2),
    (GOOD + '"text"\n', 2),
    (GOOD + '{"abstract": "no id"}\n', 2),
    (GOOD + '{"abstract_id": null, "abstract": "x"}\n', 2),
    (GOOD + '{"abstract_id": "", "abstract": "x"}\n', 2),
    (GOOD + GOOD, 2),
    ('{"abstract_id": 1, "abstract": "x"}\n' + GOOD, 2),
    (GOOD + "\n" + GOOD, 3),
    (GOOD + '{"abstract_id": "2", "abstract": "\udcff"}\n', 2),
    ("[" * 100_000 + "\n", 1),
])
def test_a_bad_corpus_line_is_refused_by_number(toy, run, contents, refused, text, line):
    corpus(toy).write_bytes(text.encode("utf-8", "surrogateescape"))
    before = contents(toy)
    refused(run(SCRIPT, "--indexes", "bm25", cwd=toy), before, toy, f"corpus.jsonl:{line}:")

def test_bom_crlf_and_a_blank_last_line_are_read(toy, run):
    corpus(toy).write_bytes(b"\xef\xbb\xbf" + GOOD.strip().encode() + b'\r\n{"abstract_id": "2", "abstract": "sea"}\r\n\r\n')
    assert run(SCRIPT, "--indexes", "bm25", cwd=toy).returncode == 0
    assert json.loads((toy / "work/demo/index/bm25/abstract_ids.json").read_text()) == ["1", "2"]

@pytest.mark.parametrize(("arguments", "word"), [
    (["--corpus", "nowhere.jsonl"], "nowhere.jsonl"),
    (["--indexes", "dense", "--dense-model", "data/models/nothing"], "data/models/nothing"),
    (["--indexes", "sparse"], "sparse"),
    (["--k1", "high"], "--k1"),
    (["--fields", "summary"], "--fields"),
])
def test_missing_files_and_bad_flags_are_refused(toy, run, contents, refused, arguments, word):
    before = contents(toy)
    refused(run(SCRIPT, "--indexes", "bm25", *arguments, cwd=toy), before, toy, word)

def test_an_empty_corpus_is_refused(toy, run, contents, refused):
    corpus(toy).write_text("")
    before = contents(toy)
    refused(run(SCRIPT, "--indexes", "bm25", cwd=toy), before, toy, "corpus.jsonl")
