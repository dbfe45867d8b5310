"""01_index.py: what is indexed, that it is whole, and what training makes."""

import json
import math
import os
import subprocess
import sys

import bm25s
import layouts
import numpy as np
import pytest
import torch
from conftest import ABSTRACTS, ROOT, facts, jsonl, kill_before, load, read
from scipy import sparse
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.sparse_encoder.modules import SpladePooling

SCRIPT = "01_index.py"
INDEX = "work/demo/index"
KIT = load(SCRIPT)
SMALL = {"SHARD = 4096": "SHARD = 5"}  # three shards of the toy


def meta_of(folder):
    return json.loads((folder / "meta.json").read_text())


def test_the_text_of_a_record():
    record = json.loads(
        '{"title": NaN, "abstract": " a b ", "year": 2020, "authors": '
        '["X", "", null, "Y"], "n": null, "zero": 0}'
    )
    assert KIT.text_of(record) == "a b"
    assert KIT.text_of(record, ["abstract", "year", "authors", "n", "zero"], " [SEP] ") == (
        "a b [SEP] 2020 [SEP] X, Y [SEP] 0"
    )


def test_a_field_that_no_record_has_is_warned_of(toy, call):
    done = call(SCRIPT, "--indexes", "bm25", "--fields", "title,abstract,abstrct", cwd=toy)
    assert facts(done)["made"] and done.stderr.count("warning: ") == 1
    assert "corpus.jsonl: no record has the field abstrct; see --fields\n" in done.stderr


# ---------------------------------------------------------------- BM25
@pytest.mark.parametrize(
    ("analyser", "text", "expected"),
    [
        (
            "default",
            "Don't Glaciers do NOT melt? CO2-levels; it's A the sea",
            ["don", "glacier", "do", "melt", "co2", "level", "sea"],
        ),
        ("plain", "It's the CO2-level;\u2003A", ["It's", "the", "CO2-level;", "A"]),
        ("unstemmed", "The Glaciers do NOT melt", ["glaciers", "do", "melt"]),
        ("nltk", "Don't say climate-change_now! 2", ["say", "climate", "change", "2"]),
        ("letters", "Don't say CO2 is x 2.5", ["say", "co"]),
        ("words", "The CO2-level (1.5, 1,000) IS up.", "the co2-level 1.5 1,000 is up".split()),
        ("cased", "The CO2-level (1.5) IS up.", ["The", "CO2-level", "1.5", "IS", "up"]),
        # composed and decomposed accents, ligatures and indices are the same but for plain
        ("default", "cafe\u0301 \ufb01re CO\u2082", ["caf\u00e9", "fire", "co2"]),
        ("plain", "cafe\u0301 \ufb01re", ["cafe\u0301", "\ufb01re"]),
        # soft hyphens and zero-width characters, which nobody sees, part no word
        ("default", "Perma\u00adfrost perma\u200bfrost", ["permafrost", "permafrost"]),
        ("nltk", "perma\u00adfrost \ufeffperma\u2060frost", ["permafrost", "permafrost"]),
    ],
)
def test_analysers(analyser, text, expected):
    steps = KIT.ANALYSERS[analyser]._asdict()
    found = KIT.tokenise(["", text], name=analyser, return_ids=False, **steps)
    assert found == [[], expected]


def test_bm25_scores_by_hand(toy, call):
    """Three texts of 4, 2 and 3 tokens, 3 on average; Kamphuis et al. 2020, table 1.

    sea is in all three, ice in one. Robertson's idf of sea, log(.5 / 3.5) < 0, counts as 0.
    """
    texts = ["ice ice sea sea", "sea rain", "sea rain wind"]
    records = ({"abstract_id": str(row), "abstract": text} for row, text in enumerate(texts))
    jsonl(toy / "data/demo/corpus.jsonl", *records)
    norm = 1.2 * (1 - 0.5 + 0.5 * np.array([4, 2, 3]) / 3)
    frequency = {"ice": np.array([2, 0, 0]), "sea": np.array([2, 1, 1])}
    idf = {
        "lucene": {"ice": math.log(1 + 2.5 / 1.5), "sea": math.log(1 + 0.5 / 3.5)},
        "robertson": {"ice": math.log(2.5 / 1.5), "sea": 0},
    }
    for method, values in idf.items():
        words = ("--indexes", "bm25", "--bm25-method", method, "--k1", 1.2, "--b", 0.5)
        assert facts(call(SCRIPT, *words, cwd=toy))["made"]
        index = bm25s.BM25.load(toy / INDEX / "bm25")
        for term, count in frequency.items():
            expected = values[term] * count / (count + norm)
            np.testing.assert_allclose(index.get_scores([term]), expected, rtol=1e-6)


def test_jax_which_bm25s_imports_leaves_the_gpu_alone(toy):
    """Colab has JAX, which takes three quarters of a GPU's memory with its first operation."""
    said = "import os, sys; print('JAX on', os.environ.get('JAX_PLATFORMS'), file=sys.stderr)\n"
    (toy / "fake/jax").mkdir(parents=True)
    (toy / "fake/jax/__init__.py").write_text(said)
    (toy / "fake/jax/lax.py").write_text("def top_k(*_):\n    pass\n")
    environment = os.environ | {"PYTHONPATH": str(toy / "fake")}
    environment.pop("JAX_PLATFORMS", None)  # set by the scripts in this process
    for command in ("01_index.py --indexes bm25", "02_retrieve.py --retrievers bm25"):
        script, *words = command.split()
        words = [sys.executable, ROOT / script, *words]
        done = subprocess.run(words, cwd=toy, env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and "JAX on cpu" in done.stderr, done.stderr


def test_a_bm25_index_has_the_same_bytes_whatever_the_order_of_sets(toy):
    for seed in ("1", "2"):
        words = ("--indexes", "bm25", "--out", f"index{seed}", "--language", "german")
        subprocess.run(
            [sys.executable, ROOT / SCRIPT, *words],
            cwd=toy,
            check=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        )
    for path in (toy / "index1/bm25").iterdir():
        assert path.read_bytes() == (toy / "index2/bm25" / path.name).read_bytes(), path.name
    how = meta_of(toy / "index1/bm25")["analyser"]
    assert how["stemmer"] == how["stopwords"] == "german"


# ---------------------------------------------------------------- Dense and SPLADE
def test_chunks_are_pooled_by_mean_and_maximum():
    rows = torch.tensor([[1.0, 8], [3, 2], [5, 5]])  # two windows of a text, one of another
    features = {"sentence_embedding": rows, "overflow_to_sample_mapping": torch.tensor([0, 0, 1])}
    pooled = KIT.pool_windows(None, None, features)["sentence_embedding"]
    assert pooled.tolist() == [[(2 + 3) / 2, (5 + 8) / 2], [5, 5]]


def test_windows_of_a_long_text_overlap_and_short_texts_are_as_they_were(toy, call):
    words = ("--indexes", "dense", "--max-length", 16)
    facts(call(SCRIPT, *words, "--pooling", "chunks", "--out", "c", cwd=toy))
    facts(call(SCRIPT, *words, "--out", "t", cwd=toy))
    pooled, cut = (np.load(toy / f"{name}/dense/embeddings.npy").astype(float) for name in "ct")
    encoder = SentenceTransformer(str(toy / "data/models/minilm"), device="cpu")
    texts = list(ABSTRACTS.values())
    lengths = [len(row) for row in encoder.tokenizer(texts)["input_ids"]]
    short = np.array(lengths) <= 16
    assert 0 < short.sum() < 12
    cosines = (pooled * cut).sum(axis=1)
    assert (cosines[short] > 0.9999).all() and (cosines[~short] < 0.9999).all()


def test_vectors_are_those_of_the_library_and_shards_change_nothing(toy, call):
    facts(call(SCRIPT, "--indexes", "dense", "splade", cwd=toy, edits=SMALL))
    encoder = SentenceTransformer(str(toy / "data/models/minilm"), device="cpu")
    theirs = encoder.encode(list(ABSTRACTS.values()), normalize_embeddings=True)
    vectors = np.load(toy / INDEX / "dense/embeddings.npy")
    assert vectors.dtype == np.float16 and np.allclose(vectors, theirs, atol=1e-3)
    weights = sparse.load_npz(toy / INDEX / "splade/weights.npz")
    facts(call(SCRIPT, "--indexes", "splade", "--activation", "relu", "--out", "r", cwd=toy))
    relu = sparse.load_npz(toy / "r/splade/weights.npz")  # Kiepura & Lam, eq. 2
    assert weights.shape == (12, 30_522)
    np.testing.assert_allclose(np.log1p(relu.toarray()), weights.toarray(), atol=1e-5)
    meta = meta_of(toy / INDEX / "dense")
    assert meta["abstracts"] == 12 and json.loads(
        (toy / INDEX / "dense/abstract_ids.json").read_text()
    ) == list(ABSTRACTS)


LONG = ["ice melts " * 3000, " " * 9000 + "snow", "\u200b " * 700 + "ice", "", "rain\n" * 2000]
TEXTS = [*ABSTRACTS.values(), *LONG]


def from_ids(encoder, texts, batch_size=3):
    """Return the vectors of texts as the script makes them, beside those of the library."""
    theirs = encoder.encode_document(texts, convert_to_tensor=True)
    like = KIT.plain_features(encoder)
    found = list(KIT.encode_ahead([texts[:4], texts[4:]], encoder, like, batch_size))
    return torch.cat(found).to_dense(), theirs.to_dense()


@pytest.mark.parametrize("includes_prompt", [True, False])
@pytest.mark.parametrize("name", ["intfloat/multilingual-e5-large", "Qwen/Qwen3-Embedding-0.6B"])
def test_vectors_from_ids_are_those_of_the_library(tmp_path, models, name, includes_prompt):
    layouts.make(tmp_path, [name])
    encoder = SentenceTransformer(str(tmp_path / name), device="cpu", truncate_dim=12)
    encoder.prompts["document"] = "passage: "
    encoder.set_pooling_include_prompt(includes_prompt)
    encoder.max_seq_length = 64
    found, theirs = from_ids(encoder, TEXTS)
    torch.testing.assert_close(found, theirs, atol=1e-6, rtol=0)
    assert found.shape == (len(TEXTS), 12)


@pytest.mark.parametrize("limit", [8, 256])
def test_of_thousands_of_words_the_first_ones_make_the_same_ids(models, limit):
    encoder = SentenceTransformer(str(models / "minilm"), device="cpu")
    encoder.max_seq_length = limit
    assert KIT.plain_features(encoder)
    found = KIT.token_ids(encoder, TEXTS)
    for ids, text in zip(found, TEXTS):
        assert ids.tolist() == encoder.preprocess([text])["input_ids"][0].tolist()
        encoder.tokenizer.backend_tokenizer.no_padding()


def test_the_maximum_of_logits_comes_before_the_logarithm():
    torch.manual_seed(0)
    logits = torch.randn(4, 50, 1000) * 4 - 6
    mask = (torch.arange(50) < torch.tensor([[50], [7], [1], [0]])).long()
    features = {"token_embeddings": logits, "attention_mask": mask}
    copies = [features | {"token_embeddings": logits.clone()} for _ in range(3)]
    theirs = SpladePooling("max").eval()(copies[0])["sentence_embedding"]
    ours, relu = (
        KIT.pool_logits(activation, copy)["sentence_embedding"]
        for activation, copy in zip(("log1p_relu", "relu"), copies[1:])
    )
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(relu, theirs.expm1(), atol=0, rtol=1e-6)


def test_splade_from_ids_has_the_terms_of_the_library(models):
    encoder = SparseEncoder(str(models / "splade-tiny"), device="cpu")
    encoder.max_seq_length = 64
    theirs = encoder.encode_document(TEXTS, convert_to_tensor=True).to_dense()
    assert KIT.pool_maxima(encoder, "log1p_relu")
    found, _ = from_ids(encoder, TEXTS)
    torch.testing.assert_close(found, theirs, atol=1e-5, rtol=0)  # theirs moves so with the batch
    assert torch.equal(found != 0, theirs != 0)


def test_what_is_not_plain_is_left_to_the_library(tmp_path, models, toy, refused):
    router = "opensearch-project/opensearch-neural-sparse-encoding-doc-v3-distill"
    static = "sentence-transformers/static-retrieval-mrl-en-v1"
    layouts.make(tmp_path, [router, static])
    routed = SparseEncoder(str(tmp_path / router), device="cpu")
    assert not KIT.plain_features(routed) and not KIT.pool_maxima(routed, "relu")
    words = f"--indexes splade --activation relu --splade-model {tmp_path / router}"
    refused(toy, SCRIPT, words, said="--activation: the model does not pool by maximum")
    assert not KIT.plain_features(SentenceTransformer(str(tmp_path / static), device="cpu"))
    encoder = SentenceTransformer(str(models / "minilm"), device="cpu")
    encoder.tokenizer.truncation_side = "left"
    assert not KIT.plain_features(encoder)
    encoder.tokenizer.truncation_side = "right"
    assert KIT.plain_features(encoder)
    KIT.pool_chunks(encoder)
    assert not KIT.plain_features(encoder)
    splade = SparseEncoder(str(models / "splade-tiny"), device="cpu")
    splade.max_seq_length = 64
    splade[1].pooling_strategy = "sum"
    assert not KIT.pool_maxima(splade, "relu")
    found, theirs = from_ids(splade, TEXTS)
    torch.testing.assert_close(found, theirs, atol=1e-5, rtol=1e-5)


def test_batches_have_as_many_tokens_as_so_many_of_the_longest():
    batches = KIT.batches_of(np.array([5, 1, 10, 2, 9]), 2)
    assert [rows.tolist() for rows in batches] == [[2, 4], [0, 3, 1]]


def test_a_thread_makes_two_in_advance_and_its_error_is_raised():
    begun = []

    def make(item):
        begun.append(item)
        return 1 / (5 - item)

    items = KIT.ahead(make, range(9))
    assert next(items) == 0.2 and max(begun) <= 2
    with pytest.raises(ZeroDivisionError):
        list(items)


def test_batches_are_halved_where_memory_is_too_small(models, capsys):
    encoder = SentenceTransformer(str(models / "minilm"), device="cpu")
    encoder.max_seq_length = 8  # all texts are longer
    texts = list(ABSTRACTS.values())
    sizes = []
    most = 1

    def fill_memory(_, args):
        sizes.append(len(args[0]["input_ids"]))
        if sizes[-1] > most:
            raise torch.OutOfMemoryError

    theirs = encoder.encode_document(texts, convert_to_tensor=True)
    encoder.register_forward_pre_hook(fill_memory)
    found = list(KIT.encode_ahead([texts[:6], texts[6:]], encoder, KIT.plain_features(encoder), 8))
    assert sizes[:4] == [6, 4, 2, 1] and set(sizes[3:]) == {1}
    torch.testing.assert_close(torch.cat(found), theirs, atol=1e-6, rtol=0)
    assert capsys.readouterr().err.count("warning: --batch-size: ") == 1
    most = 0
    with pytest.raises(torch.OutOfMemoryError):
        next(KIT.encode_ahead([texts], encoder, KIT.plain_features(encoder), 2))


def test_prompts_stand_before_claims_and_abstracts(toy, call):
    words = ("--indexes", "dense", "--query-prompt", "query: ", "--document-prompt", "passage: ")
    facts(call(SCRIPT, *words, cwd=toy))
    facts(call("02_retrieve.py", "--top-k", 1, cwd=toy))
    encoder = SentenceTransformer(str(toy / "data/models/minilm"), device="cpu")
    claims = read(toy / "data/demo/claims.test.tsv")["claim"]
    texts = ["passage: " + text for text in ABSTRACTS.values()]
    scores = encoder.encode(list("query: " + claims)) @ encoder.encode(texts).T
    found = read(toy / "work/demo/test/dense.tsv")["score"]
    np.testing.assert_allclose(found, scores.max(axis=1), atol=2e-3)


def test_static_embeddings_are_trained_indexed_and_searched(toy, call, refused):
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer

    words = Tokenizer.from_file(str(toy / "data/models/minilm/tokenizer.json"))
    words.no_truncation()
    torch.manual_seed(0)
    static = SentenceTransformer(modules=[StaticEmbedding(words, embedding_dim=16)], device="cpu")
    static.save_pretrained(str(toy / "static"))
    words = "--indexes dense --dense-model static"
    refused(
        toy, SCRIPT, f"{words} --pooling chunks", said="--pooling: static embeddings read whole"
    )
    jsonl(toy / "x", {"claim_id": "c1", "positive": "0010", "negatives": ["0001"]})
    facts(call("encoder.py", "x --model static --out trained", cwd=toy))
    facts(call(SCRIPT, "--indexes dense --dense-model trained --out other", cwd=toy))
    facts(call(SCRIPT, words, cwd=toy))
    assert meta_of(toy / INDEX / "dense")["max_length"] is None
    assert facts(call("02_retrieve.py", cwd=toy))["made"] == ["work/demo/test/dense.tsv"]
    assert len(read(toy / "work/demo/test/dense.tsv")) == 36


# ---------------------------------------------------------------- Outputs
def test_another_flag_makes_only_the_index_that_it_decides(toy, call):
    words = ("--indexes", "bm25", "dense", "--max-length", 16)
    assert len(facts(call(SCRIPT, *words, cwd=toy))["made"]) == 2
    assert facts(call(SCRIPT, *words, "--batch-size", 3, "--device", "cpu", cwd=toy))["made"] == []
    assert facts(call(SCRIPT, *words, "--k1", 2, cwd=toy))["made"] == [f"{INDEX}/bm25"]
    edit = {'"--k1", type=amount, default=1.5': '"--k1", type=amount, default=2'}
    shown = call(SCRIPT, *words, cwd=toy, edits=edit).stdout
    assert shown.count("(same inputs and flags; --force makes it again)") == 2


@pytest.mark.parametrize("kind", ["dense", "splade"])
def test_kill_9_in_the_middle_of_encoding_changes_no_byte(toy, call, killed, kind):
    words = ("--indexes", kind, "--max-length", 24)
    facts(call(SCRIPT, *words, "--out", "whole", cwd=toy, edits=SMALL))
    kill = kill_before('(parts / "new.npz").rename(path)', 3)
    assert killed(SCRIPT, *words, "--out", "killed", cwd=toy, edits=SMALL | kill)
    parts = toy / f"killed/{kind}.parts"
    assert sorted(path.name for path in parts.glob("*/[0-9]*.npz")) == ["0.npz", "5.npz"]
    never = kill_before('(parts / "new.npz").rename(path)', 2, by="sys.exit('done again')")
    facts(call(SCRIPT, *words, "--out", "killed", cwd=toy, edits=SMALL | never))
    for path in (toy / f"whole/{kind}").iterdir():
        assert path.read_bytes() == (toy / f"killed/{kind}" / path.name).read_bytes(), path.name
    assert not parts.exists()


def test_neighbours_equal_brute_force(toy, call):
    facts(call(SCRIPT, "--indexes", "dense", cwd=toy))
    facts(call(SCRIPT, "graph", "--neighbours", 3, cwd=toy, edits={"split(256)": "split(5)"}))
    vectors = np.load(toy / INDEX / "dense/embeddings.npy").astype(float)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = vectors @ vectors.T
    np.fill_diagonal(cosines, -2)
    found = np.load(toy / INDEX / "graph/neighbours.npy")
    assert found.tolist() == np.argsort(-cosines, axis=1)[:, :3].tolist()
    assert meta_of(toy / INDEX / "graph")["corpus"] == meta_of(toy / INDEX / "dense")["corpus"]
