"""01_index.py: what is indexed, and that it is whole."""

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
from conftest import ABSTRACTS, CLAIMS, ROOT, facts, jsonl, kill_before, load, read, tsv
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.sparse_encoder.modules import SpladePooling

SCRIPT = "01_index.py"
INDEX = "work/demo/index"
KIT = load(SCRIPT)
STATIC = "sentence-transformers/static-retrieval-mrl-en-v1"
SMALL = {"SHARD = 4096": "SHARD = 5"}  # three shards of the toy


def encoder_of(path, load=SentenceTransformer, **options):
    return load(str(path), device="cpu", **options)


# ---------------------------------------------------------------- BM25
@pytest.mark.parametrize(
    "analyser, text, expected",
    [
        (
            "default",
            "Don't Glaciers do NOT melt? CO2-levels; it's A the sea",
            "don glacier do melt co2 level sea",
        ),
        ("plain", "It's the CO2-level;\u2003A", "It's the CO2-level; A"),
        ("unstemmed", "The Glaciers do NOT melt", "glaciers do melt"),
        ("nltk", "Don't say climate-change_now! 2", "say climate change 2"),
        ("letters", "Don't say CO2 is x 2.5", "say co"),
        ("words", "The CO2-level (1.5, 1,000) IS up.", "the co2-level 1.5 1,000 is up"),
        ("cased", "The CO2-level (1.5) IS up.", "The CO2-level 1.5 IS up"),
        # composed and decomposed accents, ligatures and indices are the same but for plain
        ("default", "cafe\u0301 \ufb01re CO\u2082", "caf\u00e9 fire co2"),
        ("plain", "cafe\u0301 \ufb01re", "cafe\u0301 \ufb01re"),
        # soft hyphens and zero-width characters, which nobody sees, part no word
        ("default", "Perma\u00adfrost perma\u200bfrost", "permafrost permafrost"),
        ("nltk", "perma\u00adfrost \ufeffperma\u2060frost", "permafrost permafrost"),
    ],
)
def test_analysers(analyser, text, expected):
    steps = dict(zip(KIT.STEPS, KIT.ANALYSERS[analyser]))
    assert KIT.tokenise(["", text], return_ids=False, **steps) == [[], expected.split()]


def without_delta(count):
    return count / (1.2 + count)


@pytest.mark.parametrize(
    "method, idf, part",
    [
        ("lucene", lambda df: math.log(1 + (3.5 - df) / (df + 0.5)), without_delta),
        # log(.5 / 3.5) < 0 counts as 0
        ("robertson", lambda df: math.log(max(1, (3.5 - df) / (df + 0.5))), without_delta),
        # delta raises the terms that occur, and no others (Lv and Zhai 2011)
        ("bm25+ --delta 5", lambda df: math.log(4 / df), lambda c: 2.2 * c / (1.2 + c) + 5),
        (
            "bm25l --delta 5",
            lambda df: math.log(4 / (df + 0.5)),
            lambda c: 2.2 * (c + 5) / (1.2 + c + 5),
        ),
    ],
)
def test_bm25_scores_by_hand(toy, call, method, idf, part):
    """Three texts of 4, 2 and 3 tokens, 3 on average; Kamphuis et al. 2020, table 1."""
    texts = ["ice ice sea sea", "sea rain", "sea rain wind"]
    records = ({"abstract_id": str(row), "abstract": text} for row, text in enumerate(texts))
    jsonl(toy / "data/demo/corpus.jsonl", *records)
    facts(call(SCRIPT, "--indexes bm25 --k1 1.2 --b 0.5 --bm25-method", *method.split(), cwd=toy))
    index = bm25s.BM25.load(toy / INDEX / "bm25")
    index.nonoccurrence_array = None  # as 02_retrieve.py does
    norm = 1 - 0.5 + 0.5 * np.array([4, 2, 3]) / 3
    for term, count in {"ice": np.array([2, 0, 0]), "sea": np.array([2, 1, 1])}.items():
        expected = np.where(count, idf((count > 0).sum()) * part(count / norm), 0)
        np.testing.assert_allclose(index.get_scores([term]), expected, rtol=1e-6)


def test_turkish_is_lower_cased_by_its_own_rules(toy, call):
    texts = ["\u0130STANBUL", "ISPANAK", "I\u0307zmir"]  # the third one decomposed
    records = ({"abstract_id": str(row), "abstract": text} for row, text in enumerate(texts))
    jsonl(toy / "data/demo/corpus.jsonl", *records)
    tsv(toy / "data/demo/claims.test.tsv", CLAIMS, "0|istanbul; 1|\u0131spanak; 2|\u0130ZM\u0130R")
    for analyser in ("default", "words"):
        words = f"--indexes bm25 --language turkish --analyser {analyser}"
        facts(call(SCRIPT, words, cwd=toy))
        facts(call("02_retrieve.py", cwd=toy))
        assert list(read(toy / "work/demo/test/bm25.tsv")["abstract_id"]) == ["0", "1", "2"]


def test_a_bm25_index_has_the_same_bytes_whatever_the_order_of_sets(toy):
    """JAX, which bm25s imports, leaves the GPU alone; Colab has it."""
    said = "import os, sys; print('JAX on', os.environ.get('JAX_PLATFORMS'), file=sys.stderr)\n"
    (toy / "fake/jax").mkdir(parents=True)
    (toy / "fake/jax/__init__.py").write_text(said)
    (toy / "fake/jax/lax.py").write_text("def top_k(*_):\n    pass\n")
    environment = os.environ | {"PYTHONPATH": str(toy / "fake")}
    environment.pop("JAX_PLATFORMS", None)  # set by the scripts in this process
    command = [sys.executable, ROOT / SCRIPT, *"--indexes bm25 --language german --out".split()]
    for seed in "12":
        environment["PYTHONHASHSEED"] = seed
        words = [*command, f"index{seed}"]
        done = subprocess.run(words, cwd=toy, env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and "JAX on cpu" in done.stderr, done.stderr
    for path in (toy / "index1/bm25").iterdir():
        assert path.read_bytes() == (toy / "index2/bm25" / path.name).read_bytes(), path.name
    analyser = json.loads((toy / "index1/bm25/meta.json").read_text())["analyser"]
    assert analyser["stemmer"] == analyser["stopwords"] == "german"


# ---------------------------------------------------------------- Dense and SPLADE
def test_chunks_are_pooled_by_mean_and_maximum():
    # Two windows of a text, one of another; in training, texts of another column may follow.
    features = {
        "sentence_embedding": torch.tensor([[1.0, 8], [3, 2], [5, 5], [7, 7]]),
        "overflow_to_sample_mapping": torch.tensor([0, 0, 1, 0]),
    }
    pooled = KIT.pool_windows(None, None, features)["sentence_embedding"]
    assert pooled.tolist() == [
        [2.5, 6.5],
        [5, 5],
        [7, 7],
    ]  # means 2, 5 and maxima 3, 8; a window alone


def test_windows_of_a_long_text_overlap_and_short_texts_are_as_they_were(toy, call):
    cosines = 1
    for pooling in ("chunks", "truncate"):
        words = f"--indexes dense --max-length 16 --pooling {pooling} --out {pooling}"
        facts(call(SCRIPT, words, cwd=toy))
        cosines = cosines * np.load(toy / pooling / "dense/embeddings.npy").astype(float)
    tokenizer = encoder_of(toy / "data/models/minilm").tokenizer
    lengths = [len(row) for row in tokenizer(list(ABSTRACTS.values()))["input_ids"]]
    is_short = np.array(lengths) <= 16
    assert 0 < is_short.sum() < 12
    assert ((cosines.sum(axis=1) > 0.9999) == is_short).all()


LONG = ["ice melts " * 3000, " " * 9000 + "snow", "\u200b " * 700 + "ice", "", "rain\n" * 2000]
TEXTS = [*ABSTRACTS.values(), *LONG]


def from_ids(encoder, batch_size=3):
    """Return the vectors of TEXTS as the script makes them, beside those of the library."""
    theirs = encoder.encode_document(TEXTS, convert_to_tensor=True)
    template = KIT.plain_features(encoder)
    found = list(KIT.encode_ahead([TEXTS[:4], TEXTS[4:]], encoder, template, batch_size))
    return torch.cat(found).to_dense(), theirs.to_dense()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("includes_prompt", [True, False])
@pytest.mark.parametrize("name", ["intfloat/multilingual-e5-large", "Qwen/Qwen3-Embedding-0.6B"])
def test_vectors_from_ids_are_those_of_the_library(tmp_path, models, name, includes_prompt, side):
    layouts.make(tmp_path, [name])
    encoder = encoder_of(tmp_path / name, truncate_dim=12)
    encoder.prompts["document"] = "passage: "
    encoder.set_pooling_include_prompt(includes_prompt)
    encoder.max_seq_length = 64
    encoder.tokenizer.truncation_side = side
    found, theirs = from_ids(encoder)
    torch.testing.assert_close(found, theirs, atol=1e-6, rtol=0)
    assert found.shape == (len(TEXTS), 12)


def test_the_maximum_of_logits_comes_before_the_logarithm():
    logits = torch.randn(4, 50, 1000, generator=torch.manual_seed(0)) * 4 - 6
    mask = (torch.arange(50) < torch.tensor([[50], [7], [1], [0]])).long()

    def pooled(pool):
        features = {"token_embeddings": logits.clone(), "attention_mask": mask}
        return pool(features)["sentence_embedding"]

    theirs = pooled(SpladePooling("max").eval())
    assert torch.equal(pooled(lambda features: KIT.pool_logits("log1p_relu", features)), theirs)
    relu = pooled(lambda features: KIT.pool_logits("relu", features))  # Kiepura & Lam, eq. 2
    torch.testing.assert_close(relu, theirs.expm1(), atol=0, rtol=1e-6)


@pytest.mark.parametrize("strategy", ["max", "sum"])
def test_splade_from_ids_has_the_terms_of_the_library(models, strategy):
    encoder = encoder_of(models / "splade-tiny", SparseEncoder)
    encoder.max_seq_length = 64
    encoder[1].pooling_strategy = strategy
    found, theirs = from_ids(encoder)
    torch.testing.assert_close(found, theirs, atol=1e-5, rtol=1e-5)
    assert torch.equal(found != 0, theirs != 0)


def test_what_is_not_plain_is_left_to_the_library(tmp_path, models, toy, refused):
    router = "opensearch-project/opensearch-neural-sparse-encoding-doc-v3-distill"
    layouts.make(tmp_path, [router, STATIC])
    windows = encoder_of(models / "minilm")
    assert KIT.plain_features(windows)
    KIT.pool_chunks(windows)
    limited = encoder_of(models / "splade-tiny", SparseEncoder, max_active_dims=9)
    routed = encoder_of(tmp_path / router, SparseEncoder)
    for encoder in (windows, limited, routed, encoder_of(tmp_path / STATIC)):
        assert not KIT.plain_features(encoder)
    words = f"--indexes splade --activation relu --splade-model {tmp_path / router}"
    refused(toy, SCRIPT, words, said="--activation: the model does not pool by maximum")


def test_batches_have_as_many_tokens_as_so_many_of_the_longest():
    batches = KIT.batches_of(np.array([5, 1, 10, 2, 9]), 2)
    assert [rows.tolist() for rows in batches] == [[2, 4], [0, 3, 1]]


def test_batches_become_smaller_where_memory_is_too_small(models):
    encoder = encoder_of(models / "minilm")
    sizes = []

    def fill_memory(_, args):
        sizes.append(len(args[0]["input_ids"]))
        if sizes[-1] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    template = KIT.plain_features(encoder)
    encoder.register_forward_pre_hook(fill_memory)
    found = list(KIT.encode_ahead([["ice"] * 6, ["sea"]], encoder, template, 8))
    assert sizes == [6, 6, 6, 5, 4, 3, 2, *[1] * 7] and list(map(len, found)) == [6, 1]


def test_prompts_stand_before_claims_and_abstracts(toy, call):
    words = "--indexes dense --query-prompt query: --document-prompt passage:"
    facts(call(SCRIPT, words, cwd=toy, edits=SMALL))
    facts(call("02_retrieve.py", "--top-k 1", cwd=toy))
    encoder = encoder_of(toy / "data/models/minilm")
    claims = read(toy / "data/demo/claims.test.tsv")["claim"]
    texts = ["passage:" + text for text in ABSTRACTS.values()]
    theirs = encoder.encode(texts, normalize_embeddings=True)
    vectors = np.load(toy / INDEX / "dense/embeddings.npy")
    assert vectors.dtype == np.float16 and np.allclose(vectors, theirs, atol=1e-3)
    scores = encoder.encode(list("query:" + claims)) @ theirs.T
    found = read(toy / "work/demo/test/dense.tsv")["score"]
    np.testing.assert_allclose(found, scores.max(axis=1), atol=2e-3)


def encoder_folder(folder, **changes):
    """Make an encoder that pools by the mean, without Normalize; changes: of its configuration."""
    layouts.bert(folder)
    layouts.as_encoder(folder, "mean")
    layouts.edit(folder / "config_sentence_transformers.json", **changes)
    return f"--indexes dense --dense-model {folder.name}"


def test_dot_products_are_no_cosines(toy, call, refused):
    words = encoder_folder(toy / "m", similarity_fn_name="dot")
    facts(call(SCRIPT, words, cwd=toy))
    facts(call("02_retrieve.py", "--top-k 1", cwd=toy))
    encoder = encoder_of(toy / "m")
    claims = list(read(toy / "data/demo/claims.test.tsv")["claim"])
    scores = encoder.similarity(encoder.encode(claims), encoder.encode([*ABSTRACTS.values()]))
    found = read(toy / "work/demo/test/dense.tsv")["score"]
    np.testing.assert_allclose(found, scores.max(1).values, rtol=1e-3)
    assert found.min() > 1.5
    jsonl(toy / "x", {"claim_id": "c1", "positive": "0010", "negatives": ["0001"]})
    facts(call("encoder.py", "x --model m --out trained", cwd=toy))
    assert encoder_of(toy / "trained").similarity_fn_name == "cosine"
    weights = layouts.load_file(toy / "m/model.safetensors")
    weights["encoder.layer.1.output.LayerNorm.bias"] += 1e5  # beyond float16
    layouts.save_file(weights, toy / "m/model.safetensors", metadata={"format": "pt"})
    refused(toy, SCRIPT, words, said="not finite in half precision", kept=".parts")
    words = encoder_folder(toy / "n", similarity_fn_name="euclidean")
    refused(toy, SCRIPT, words, said="it is for euclidean distances", kept=".parts")


def test_prompts_of_other_names_and_pooling_of_a_decoder_are_named(toy, call):
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    layouts.make(toy, [name])
    words = encoder_folder(toy / "m", prompts={"web_query": "x: ", "web_text": "y: "})
    for command, count, said in (
        (words, 1, "['web_query', 'web_text'] are not used"),
        (f"{words} --query-prompt x:", 0, ""),
        (f"--indexes dense --dense-model {name}", 1, "its files name no pooling"),
    ):
        done = call(SCRIPT, command, cwd=toy)
        assert facts(done) and done.stderr.count("warning: ") == count and said in done.stderr


def test_a_dead_worker_ends_the_call(toy, refused, quick_processes):
    start = "template = plain_features(encoder)"
    edits = SMALL | {start: f"{start}; pool['processes'][0].kill()"}
    words = "--indexes dense --device cpu cpu"
    refused(toy, SCRIPT, words, said="1 multi-process pool worker", edits=edits, kept=".parts")


def test_static_embeddings_are_trained_indexed_and_searched(toy, call):
    layouts.make(toy, [STATIC])
    jsonl(toy / "x", {"claim_id": "c1", "positive": "0010", "negatives": ["0001"]})
    facts(call("encoder.py", f"x --model {STATIC} --out trained", cwd=toy))
    facts(call(SCRIPT, "--indexes dense --dense-model trained", cwd=toy))
    assert facts(call("02_retrieve.py", cwd=toy))["made"] == ["work/demo/test/dense.tsv"]
    assert len(read(toy / "work/demo/test/dense.tsv")) == 36


# ---------------------------------------------------------------- Outputs
def test_another_flag_makes_only_the_index_that_it_decides(toy, call, refused):
    jsonl(toy / "dense")
    refused(toy, SCRIPT, "--indexes bm25 dense --out .", said="dense: ")  # before bm25 is made
    words = "--indexes bm25 dense --max-length 16"
    assert len(facts(call(SCRIPT, words, cwd=toy))["made"]) == 2
    assert facts(call(SCRIPT, f"{words} --batch-size 3 --device cpu", cwd=toy))["made"] == []
    assert facts(call(SCRIPT, f"{words} --k1 2", cwd=toy))["made"] == [f"{INDEX}/bm25"]


@pytest.mark.parametrize("kind", ["dense", "splade"])
def test_kill_9_in_the_middle_of_encoding_changes_no_byte(toy, call, killed, kind):
    words = f"--indexes {kind} --max-length 24 --out"
    facts(call(SCRIPT, f"{words} whole", cwd=toy, edits=SMALL))
    kill = kill_before("new.rename(path)", 3)
    assert killed(SCRIPT, f"{words} killed", cwd=toy, edits=SMALL | kill)
    first, second = sorted(toy.glob(f"killed/{kind}.parts/*/[0-9]*.npz"))
    assert (first.name, second.name) == ("0.npz", "5.npz")
    second.write_bytes(second.read_bytes()[:-9])  # a torn shard is made again
    never = kill_before("new.rename(path)", 3, by="sys.exit('done again')")
    facts(call(SCRIPT, f"{words} killed", cwd=toy, edits=SMALL | never))
    for path in (toy / f"whole/{kind}").iterdir():
        assert path.read_bytes() == (toy / f"killed/{kind}" / path.name).read_bytes(), path.name
    assert not (toy / f"killed/{kind}.parts").exists()


def test_neighbours_equal_brute_force(toy, call):
    facts(call(SCRIPT, "--indexes dense", cwd=toy))
    facts(call(SCRIPT, "graph --neighbours 3", cwd=toy, edits={"split(256)": "split(5)"}))
    vectors = np.load(toy / INDEX / "dense/embeddings.npy").astype(float)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = vectors @ vectors.T
    np.fill_diagonal(cosines, -2)
    found = np.load(toy / INDEX / "graph/neighbours.npy")
    assert found.tolist() == np.argsort(-cosines, axis=1)[:, :3].tolist()
    assert json.loads((toy / INDEX / "graph/abstract_ids.json").read_text()) == list(ABSTRACTS)
