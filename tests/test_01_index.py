"""01_index.py: what is indexed, that it is whole, and what it refuses."""
import json
import re
import shutil
import zlib
from types import SimpleNamespace

import bm25s
import numpy as np
import pytest
import Stemmer
import torch
from conftest import ABSTRACTS, ROOT
from scipy import sparse
from sentence_transformers import SentenceTransformer, SparseEncoder
from transformers import AutoTokenizer

SCRIPT = "01_index.py"
KILL = "os.kill(os.getpid(), 9)"
TUPLES = [("c1", "0010", ["0011"]), ("c2", "0012", ["0009"]), ("c2", "0004", ["0009"])]

def changed(folder, *pairs):
    """Return the path of a copy of the script in which new replaces old for every pair."""
    text, path = (ROOT / SCRIPT).read_text(encoding="utf-8"), folder / "changed" / SCRIPT
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path

def examples(folder, rows=TUPLES):
    """Write tuples as 02_retrieve.py mine does."""
    lines = [json.dumps(dict(zip(("claim_id", "positive", "negatives"), row))) for row in rows]
    (folder / "examples.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder / "examples.jsonl"

def test_text_joins_the_fields_that_are_not_empty(load):
    text_of = load(SCRIPT)["text_of"]
    record = {"title": "Ice ", "abstract": "melts", "journal": None, "by": ["A", "B"], "year": 20}
    assert text_of(record, ["title", "journal", "abstract"]) == "Ice melts"
    assert text_of(record, ["title", "by", "no", "year"], " [SEP] ") == "Ice [SEP] A, B [SEP] 20"

@pytest.mark.parametrize(("analyser", "language", "text", "expected"), [
    ("default", "english", "Don't Glaciers do NOT melt? CO2-levels; it's A the sea",
     ["don", "glacier", "do", "melt", "co2", "level", "sea"]),
    ("default", "german", "Die Gletscher schmelzen und die Meere", ["gletsch", "schmelz", "meer"]),
    ("plain", "english", "It's the CO2-level;\u2003A", ["It's", "the", "CO2-level;", "A"]),
    ("nltk", "english", "Don't say climate-change_now!", ["say", "climate", "change"]),
])
def test_analysers(load, analyser, language, text, expected):
    names = load(SCRIPT)
    how = names["analyser_of"](analyser, language)
    assert set(how) == {"name", "lower", "token_pattern", "stopwords", "stemmer"}
    terms, ids, lengths = names["tokenise"](how, ["", text])
    assert [terms[number] for number in ids] == expected and lengths == [0, len(expected)]

@pytest.mark.parametrize("method", ["lucene", "bm25+"])
def test_postings_are_those_of_bm25s_by_the_arguments_in_meta_json(toy, run, method):
    script = changed(toy, ("SHARD = 4096", "SHARD = 5"))  # three chunks, by several processes
    done = run(script, "--indexes", "bm25", "--bm25-method", method, "--k1", 1.2, cwd=toy)
    assert done.returncode == 0, done.stderr
    index = toy / "work/demo/index/bm25"
    how = json.loads((index / "meta.json").read_text())["analyser"]
    assert how.pop("name") == "default"
    how["stemmer"] = Stemmer.Stemmer(how["stemmer"])
    theirs, ours = bm25s.BM25(1.2, 0.75, method=method), bm25s.BM25.load(index)
    theirs.index(bm25s.tokenize(list(ABSTRACTS.values()), **how), create_empty_token=False)
    assert set(ours.vocab_dict) == set(theirs.vocab_dict)
    for term in theirs.vocab_dict:
        assert np.array_equal(ours.get_scores([term]), theirs.get_scores([term])), term

def test_finished_shards_are_kept_for_another_batch_size(load, tmp_path):
    shards, made, task = load(SCRIPT)["shards"], [], {"arguments": {"dtype": "bf16"}}
    args = SimpleNamespace(out=str(tmp_path / "index"), force=False, batch_size=64)

    def make(rows):
        made.append(rows.start)
        if rows.start and args.batch_size == 64:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
        return {"rows": np.arange(5000)[rows]}

    with pytest.raises(RuntimeError, match="memory"):
        shards(args, task, 5000, make)
    args.batch_size = 8
    assert shards(args, task, 5000, make)["rows"].tolist() == list(range(5000))
    assert made == [0, 4096, 4096]

def test_kill_9_while_a_shard_is_written_changes_no_byte(toy, run):
    small, rename = ("SHARD = 4096", "SHARD = 4"), "new.rename(paths[-1])"
    keep, index = ('remove(f"{own.out}.parts")', "pass"), toy / "work/demo/index"
    words = ("--indexes", "dense", "splade", "--top-terms", 20)
    assert run(changed(toy, small), *words, "--out", "whole", cwd=toy).returncode == 0
    for kind in ("dense", "splade"):
        kill = f"{KILL} if (start, args.kind) == (8, '{kind}') else {rename}"
        assert run(changed(toy, small, (rename, kill)), *words, cwd=toy).returncode == -9
        assert {path.name for path in index.glob(f"{kind}.parts/[0-9]*")} == {"0", "4"}
    first = (index / "splade.parts/0").stat().st_mtime_ns
    assert run(changed(toy, small, keep), *words, cwd=toy).returncode == 0
    assert (index / "splade.parts/0").stat().st_mtime_ns == first  # not made again
    for path in [*toy.glob("whole/dense/*"), *toy.glob("whole/splade/*")]:
        assert path.read_bytes() == (index / path.relative_to(toy / "whole")).read_bytes(), path
    assert run(SCRIPT, *words, cwd=toy).stdout.count("up to date") == 2
    assert not list(index.glob("*.parts"))  # left by a kill behind the last rename

def test_windows_cover_a_text_overlap_and_are_pooled(load, models):
    names, tokenizer = load(SCRIPT), AutoTokenizer.from_pretrained(models / "minilm")
    words = " ".join(map(str, range(100, 400)))
    coded = names["windows_of"](tokenizer, 102, [words, "ice"], "sea ")
    assert coded["overflow_to_sample_mapping"].tolist() == [1, 0, 0, 0, 0, 0, 1]
    first, second = coded["input_ids"][:2].tolist()
    assert first[-1 - 50 : -1] == second[1:51] and len(first) == 102
    vectors = torch.tensor([[1.0, 4.0], [3.0, 0.0], [5.0, 2.0], [7.0, 7.0]])
    starts = torch.tensor([1, 0, 0, 1])
    features = {"sentence_embedding": vectors, "overflow_to_sample_mapping": starts}
    pooled = names["pool_windows"](None, None, features)["sentence_embedding"]
    assert pooled.tolist() == [[(3 + 5) / 2, (2 + 4) / 2], [7, 7]]

def test_a_vector_that_is_not_finite_is_refused(toy, run, models):
    encoder = SentenceTransformer(str(models / "minilm"))
    with torch.no_grad():
        encoder[0].model.embeddings.word_embeddings.weight[encoder.tokenizer.vocab["zoo"]] = np.nan
    encoder.save_pretrained(str(toy / "broken"))
    done = run(SCRIPT, "--indexes", "dense", "--dense-model", "broken", cwd=toy)
    assert done.returncode == 2 and not (toy / "work/demo/index/dense").exists()
    assert re.search(r"^error: abstract 0003: .*--dtype fp32$", done.stderr, re.M), done.stderr

def test_three_indexes_alone_in_a_folder(toy, run):
    with open(toy / "data/demo/corpus.jsonl", "a", encoding="utf-8") as file:
        file.write('{"abstract_id": "13", "abstract": null}\n{"abstract_id": 14, "abstract": 3}\n')
    words = ("--activation", "relu", "--pooling", "chunks")
    done, index = run(SCRIPT, *words, cwd=toy), toy / "work/demo/index"
    assert done.returncode == 0 and "2 abstracts without text" in done.stderr, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["abstracts"] == 14
    for kind in ("bm25", "dense", "splade"):
        meta = json.loads((index / kind / "meta.json").read_text())
        assert (meta["kind"], meta["abstracts"]) == (kind, 14)
        files = {path.name: path.read_bytes() for path in (index / kind).iterdir()}
        del files["meta.json"]
        assert meta["files"] == {name: [len(b), zlib.crc32(b)] for name, b in files.items()}
    texts, vectors = [*ABSTRACTS.values(), "", ""], np.load(index / "dense/embeddings.npy")
    expected = SentenceTransformer(str(toy / "data/models/minilm")).encode_document(texts)
    assert vectors.dtype == np.float16 and ((vectors * expected).sum(axis=1) > 0.999).all()
    parts = tuple(np.load(index / f"splade/{name}.npy") for name in ("data", "indices", "indptr"))
    splade = SparseEncoder(str(toy / "data/models/splade-tiny"))
    weights = splade.encode_document(texts, convert_to_sparse_tensor=False).numpy()
    found = sparse.csc_matrix(parts, shape=weights.shape).toarray()
    np.testing.assert_allclose(found, np.expm1(weights), atol=1e-4)  # the maximum of ReLU(logit)
    words += ("--b", 0.5, "--device", "cpu")
    done = run(SCRIPT, *words, "--batch-size", 3, "--indexes", "dense", "splade", cwd=toy)
    assert done.stdout.count("up to date") == 2
    done = run(SCRIPT, *words, "cpu", "--indexes", "dense", "--out", "two", cwd=toy)  # processes
    np.testing.assert_allclose(np.load(toy / "two/dense/embeddings.npy"), vectors, atol=1e-3)

def test_neighbours_are_exact_and_ties_in_corpus_order(load):
    vectors = np.random.default_rng(2).normal(size=(300, 8)).astype(np.float16)
    vectors[40:60] = vectors[7]  # more equal abstracts than neighbours
    corpus = torch.nn.functional.normalize(torch.from_numpy(vectors).float())
    found = load(SCRIPT)["graph_shard"](corpus, 5, slice(0, 300))
    cosines = (corpus.double() @ corpus.T.double()).numpy().round(6)
    np.fill_diagonal(cosines, -2)
    expected = np.argsort(-cosines, axis=1, kind="stable")[:, :5]
    assert (found["neighbours"] == expected).mean() > 0.999
    assert found["neighbours"][7].tolist() == [40, 41, 42, 43, 44]
    assert found["neighbours"][50].tolist() == [7, 40, 41, 42, 43]
    np.testing.assert_allclose(found["similarities"], -np.sort(-cosines, axis=1)[:, :5], atol=2e-6)

def test_the_graph_refuses_a_damaged_dense_index(toy, run, refused, contents):
    assert run(SCRIPT, "--indexes", "dense", cwd=toy).returncode == 0
    assert run(SCRIPT, "graph", "--neighbours", 3, cwd=toy).returncode == 0
    assert np.load(toy / "work/demo/index/graph/neighbours.npy").shape == (12, 3)
    with open(toy / "work/demo/index/dense/embeddings.npy", "r+b") as file:
        file.seek(1000)
        file.write(b"\xff")
    before = contents(toy)
    refused(run(SCRIPT, "graph", "--force", cwd=toy), before, toy, "index/dense", "--force")

def test_rows_of_examples_by_loss(load):
    columns_of = load(SCRIPT)["columns_of"]
    rows = [["q", "a", "b", "c"], ["q", "d", "e"], ["r", "f"]]
    assert columns_of(rows, "triplet") == (
        {"claim": ["q", "q", "q"], "positive": ["a", "a", "d"], "negative_1": ["b", "c", "e"]}, 1)
    assert columns_of(rows, "mnrl") == (
        {"claim": ["q"], "positive": ["a"], "negative_1": ["b"], "negative_2": ["c"]}, 2)

def test_training_killed_behind_its_last_epoch_begins_no_other(toy, run):
    words = ("train", examples(toy), "--loss", "triplet", "--dev-split", "test", "--lr", 3e-4,
             "--epochs", 4, "--patience", 1, "--max-length", 16)
    whole = run(SCRIPT, *words, "--out", "whole", cwd=toy)
    assert whole.returncode == 0, whole.stderr
    assert "{" not in whole.stderr and 2 <= whole.stderr.count("epoch ") < 4  # patience ended it
    fit = "trainer.train(resume_from_checkpoint=checkpoint)"
    assert run(changed(toy, (fit, f"{fit}; {KILL}")), *words, cwd=toy).returncode == -9
    done = run(SCRIPT, *words, cwd=toy)
    assert done.returncode == 0 and "epoch " not in done.stderr, done.stderr
    first, second = (json.loads(text.stdout.splitlines()[-1]) for text in (whole, done))
    assert first["dev_ndcg_at_10"] == second["dev_ndcg_at_10"]
    assert len(first["dev_ndcg_at_10"]) == whole.stderr.count("epoch ") + 1  # one before training
    model = toy / "work/demo/models/encoder/model.safetensors"
    assert model.read_bytes() == (toy / "whole/model.safetensors").read_bytes()

def test_training_on_chunks_makes_a_model_of_its_own_length(toy, run):
    words = ("--pooling", "chunks", "--max-length", 60, "--epochs", 1, "--query-prompt", "q: ")
    done = run(SCRIPT, "train", examples(toy), *words, cwd=toy)
    assert done.returncode == 0, done.stderr
    model = SentenceTransformer(str(toy / "work/demo/models/encoder"))
    assert model.max_seq_length == 256 and model.prompts == {"query": "q: ", "document": ""}
    assert not list(toy.glob("work/**/*.bin")) and not list(toy.glob("work/**/*.parts"))

@pytest.mark.parametrize(("arguments", "word"), [
    (["--corpus", "nowhere.jsonl"], "nowhere.jsonl"),
    (["--fields", "summary"], "--fields"),
    (["--k1", "nan"], "--k1"),
    (["--b", "1.5"], "--b"),
    (["--out", "data/demo/corpus.jsonl"], "corpus.jsonl"),
    (["graph"], "index/dense"),
    (["train"], "examples.jsonl"),
    (["train", "examples.jsonl", "--loss", "cached-mnrl", "--pooling", "chunks"], "cached-mnrl"),
    (["train", "examples.jsonl"], "examples.jsonl:2"),
])
def test_missing_files_and_bad_flags_are_refused(toy, run, contents, refused, arguments, word):
    examples(toy, [*TUPLES[:1], ("c9", "0010", [])])
    before = contents(toy)
    words = arguments if arguments[0] in ("graph", "train") else ["--indexes", "bm25", *arguments]
    refused(run(SCRIPT, *words, cwd=toy), before, toy, word)

def test_a_full_disk_is_one_line(toy, run, refused, contents):
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (900, 900)); main()"
    full = changed(toy, ('__main__":\n    main()', f'__main__":\n    {limit}'))
    shutil.copy(full, toy)
    before = contents(toy)
    done = run(full, "--indexes", "bm25", cwd=toy)
    done.stderr = done.stderr[done.stderr.index("error:") :].splitlines()[0]
    refused(done, before, toy, "check path, rights and space")
