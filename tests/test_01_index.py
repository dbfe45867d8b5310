"""01_index.py: what is indexed, that it is whole, and what training makes."""
import json
import shutil
import zlib
from types import SimpleNamespace

import bm25s
import numpy as np
import pytest
import Stemmer
import torch
from conftest import ABSTRACTS, facts, jsonl, load
from safetensors.torch import load_file, save_file
from scipy import sparse
from sentence_transformers import SentenceTransformer, SparseEncoder

SCRIPT, INDEX = "01_index.py", "work/demo/index"
KIT = load(SCRIPT)

def test_an_index_with_torn_provenance_is_made_again(toy, call):
    for text in ('{"argum', ""):
        assert facts(call(SCRIPT, "--indexes", "bm25", cwd=toy))["made"]
        (toy / "work/demo/index/bm25.meta.json").write_text(text)
    assert facts(call(SCRIPT, "--indexes", "bm25", cwd=toy))["made"]

def test_an_index_follows_its_link_and_knows_its_model(toy, call, refused):
    (toy / "disk").mkdir()
    (toy / INDEX).mkdir(parents=True, exist_ok=True)
    (toy / INDEX / "dense").symlink_to(toy / "disk")
    shutil.copytree(toy / "data/models/minilm", toy / "own")
    words = ("--indexes", "dense", "dense", "--dense-model", "./own/")
    assert len(facts(call(SCRIPT, *words, cwd=toy))["made"]) == 1
    assert (toy / INDEX / "dense").is_symlink() and (toy / "disk/meta.json").exists()
    weights = load_file(toy / "own/model.safetensors")
    save_file({name: -values for name, values in weights.items()}, toy / "own/model.safetensors")
    refused(toy, "02_retrieve.py", "--retrievers", "dense", said="not the model of the dense index")
    assert facts(call(SCRIPT, *words, cwd=toy))["made"]

def test_text_joins_the_fields_that_are_not_empty():
    text_of = KIT.text_of
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
def test_analysers(analyser, language, text, expected):
    terms, ids, sizes = KIT.tokenise(KIT.analyser_of(analyser, language), ["", text])
    assert [terms[number] for number in ids] == expected and sizes == [0, len(expected)]

@pytest.mark.parametrize("method", ["lucene", "robertson"])
def test_postings_are_those_of_bm25s_by_the_arguments_in_meta_json(toy, run, method):
    words = ("--indexes", "bm25", "--bm25-method", method, "--k1", 1.2)
    facts(run(SCRIPT, *words, cwd=toy, edits={"SHARD = 4096": "SHARD = 5"}))  # by three processes
    how = json.loads((toy / INDEX / "bm25/meta.json").read_text())["analyser"]
    assert how.pop("name") == "default"
    how["stemmer"] = Stemmer.Stemmer(how["stemmer"])
    theirs, ours = bm25s.BM25(1.2, 0.75, method=method), bm25s.BM25.load(toy / INDEX / "bm25")
    theirs.index(bm25s.tokenize(list(ABSTRACTS.values()), **how), create_empty_token=False)
    assert set(ours.vocab_dict) == set(theirs.vocab_dict)
    for term in theirs.vocab_dict:
        assert np.array_equal(ours.get_scores([term]), theirs.get_scores([term])), term

def test_finished_shards_are_kept_for_another_batch_size(tmp_path):
    made, task = [], {"arguments": {"dtype": "bf16"}}
    args = SimpleNamespace(out=str(tmp_path / "index"), force=False, batch_size=64)

    def make(rows):
        made.append(rows.start)
        if rows.start and args.batch_size == 64:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
        return {"rows": np.arange(5000)[rows]}

    with pytest.raises(RuntimeError, match="memory"):
        KIT.shards(args, task, 5000, make)
    args.batch_size = 8
    assert KIT.shards(args, task, 5000, make)["rows"].tolist() == list(range(5000))
    assert made == [0, 4096, 4096]

def test_three_indexes_alone_in_a_folder(toy, run):
    with open(toy / "data/demo/corpus.jsonl", "a", encoding="utf-8") as file:
        file.write('{"abstract_id": "13", "abstract": null}\n{"abstract_id": 14, "abstract": 3}\n')
    words, index = ("--activation", "relu", "--pooling", "chunks"), toy / INDEX
    done = run(SCRIPT, *words, cwd=toy)
    assert facts(done)["abstracts"] == 14 and "2 abstracts without text" in done.stderr
    for kind in ("bm25", "dense", "splade"):
        meta = json.loads((index / kind / "meta.json").read_text())
        files = {path.name: path.read_bytes() for path in (index / kind).iterdir()}
        del files["meta.json"]
        assert meta["files"] == {name: [len(b), zlib.crc32(b)] for name, b in files.items()}
        assert (meta["kind"], meta["abstracts"]) == (kind, 14)
        made = json.loads((index / f"{kind}.meta.json").read_text())
        assert made["device"] == "no GPU of CUDA" and made["peak_mib"] and made["packages"]
    texts, vectors = [*ABSTRACTS.values(), "", ""], np.load(index / "dense/embeddings.npy")
    expected = SentenceTransformer(str(toy / "data/models/minilm")).encode_document(texts)
    assert vectors.dtype == np.float16 and ((vectors * expected).sum(axis=1) > 0.999).all()
    parts = tuple(np.load(index / f"splade/{name}.npy") for name in ("data", "indices", "indptr"))
    splade = SparseEncoder(str(toy / "data/models/splade-tiny"))
    weights = splade.encode_document(texts, convert_to_sparse_tensor=False).numpy()
    found = sparse.csc_matrix(parts, shape=weights.shape).toarray()
    np.testing.assert_allclose(found, np.expm1(weights), atol=1e-4)  # the maximum of ReLU(logit)
    words += ("--b", 0.5, "--device", "cpu")  # another b makes no vector anew
    done = run(SCRIPT, *words, "--batch-size", 3, "--indexes", "dense", "splade", cwd=toy)
    assert done.stdout.count("up to date") == 2
    facts(run(SCRIPT, *words, "cpu", "--indexes", "dense", "--out", "two", cwd=toy))  # processes
    np.testing.assert_allclose(np.load(toy / "two/dense/embeddings.npy"), vectors, atol=1e-3)

def test_windows_cover_a_text_overlap_and_are_pooled(models):
    how = SimpleNamespace(model=models / "minilm", device=["cpu"], max_length=102, pooling="chunks",
                          query_prompt=None, document_prompt="sea ")
    encoder = KIT.open_encoder(SentenceTransformer, how, "fp32")
    words = " ".join(map(str, range(100, 400)))
    coded = encoder.preprocess([words, "ice"], prompt="sea ")
    assert coded["overflow_to_sample_mapping"].tolist() == [1, 0, 0, 0, 0, 0, 1]
    first, second = coded["input_ids"][:2].tolist()
    assert first[-1 - 50 : -1] == second[1:51] and len(first) == 102
    vectors = torch.tensor([[1.0, 4.0], [3.0, 0.0], [5.0, 2.0], [7.0, 7.0]])
    starts = torch.tensor([1, 0, 0, 1])
    features = {"sentence_embedding": vectors, "overflow_to_sample_mapping": starts}
    pooled = KIT.pool_windows(None, None, features)["sentence_embedding"]
    assert pooled.tolist() == [[(3 + 5) / 2, (2 + 4) / 2], [7, 7]]

def test_neighbours_are_exact_and_ties_in_corpus_order():
    vectors = np.random.default_rng(2).normal(size=(300, 8)).astype(np.float16)
    vectors[40:60] = vectors[7]  # more equal abstracts than neighbours
    corpus = torch.nn.functional.normalize(torch.from_numpy(vectors).float())
    found = KIT.graph_shard(corpus, 5, slice(0, 300))
    cosines = (corpus.double() @ corpus.T.double()).numpy().round(6)
    np.fill_diagonal(cosines, -2)
    expected = np.argsort(-cosines, axis=1, kind="stable")[:, :5]
    assert (found["neighbours"] == expected).mean() > 0.999
    assert found["neighbours"][7].tolist() == [40, 41, 42, 43, 44]
    assert found["neighbours"][50].tolist() == [7, 40, 41, 42, 43]
    np.testing.assert_allclose(found["similarities"], -np.sort(-cosines, axis=1)[:, :5], atol=2e-6)

def test_the_graph_refuses_a_damaged_dense_index(toy, call, refused):
    facts(call(SCRIPT, "--indexes", "dense", cwd=toy))
    facts(call(SCRIPT, "graph", "--neighbours", 3, cwd=toy))
    assert np.load(toy / INDEX / "graph/neighbours.npy").shape == (12, 3)
    with open(toy / INDEX / "dense/embeddings.npy", "r+b") as file:
        file.seek(1000)
        file.write(b"\xff")
    refused(toy, SCRIPT, "graph", "--force", said="index/dense: its files have changed")

@pytest.mark.parametrize(("loss", "rows", "left_out"), [
    ("triplet", [["q", "a", "b"], ["q", "a", "c"], ["q", "d", "e"]], 1),
    ("mnrl", [["q", "a", "b", "c"]], 2)])
def test_rows_of_examples_by_loss(tmp_path, loss, rows, left_out):
    jsonl(tmp_path / "x", *({"claim_id": claim, "positive": positive, "negatives": negatives}
                            for claim, positive, *negatives in ("qabc", "qde", "rf")))
    texts = {letter: letter for letter in "abcdefqr"}
    found = KIT.read_examples(tmp_path / "x", texts, texts, loss)
    assert found[0].values.tolist() == rows
    assert found[1] == {"examples": 3, "left_out": left_out}

def test_training_on_chunks_makes_a_model_of_its_own_length(toy, call):
    words = ("--pooling", "chunks", "--max-length", 60, "--epochs", 1, "--query-prompt", "q: ")
    facts(call(SCRIPT, "train", "data/demo/tuples.jsonl", *words, cwd=toy))
    model = SentenceTransformer(str(toy / "work/demo/models/encoder"))
    assert model.max_seq_length == 256 and model.prompts == {"query": "q: ", "document": ""}
    assert not list(toy.glob("work/**/*.bin")) and not list(toy.glob("work/**/*.parts"))
