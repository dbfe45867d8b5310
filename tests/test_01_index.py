"""01_index.py: what is indexed, that it is whole, and what training makes."""
import hashlib
import json
import math
import multiprocessing
import shutil
import zlib
from types import SimpleNamespace

import bm25s
import numpy as np
import pytest
import Stemmer
import torch
from conftest import ABSTRACTS, facts, jsonl, kill_before, load
from safetensors.torch import load_file, save_file
from scipy import sparse
from sentence_transformers import SentenceTransformer, SparseEncoder

SCRIPT, INDEX = "01_index.py", "work/demo/index"
KIT = load(SCRIPT)

def meta_of(folder):
    return json.loads((folder / "meta.json").read_text())

def test_the_text_of_a_record():
    record = json.loads('{"title": NaN, "abstract": " a b ", "year": 2020, "authors": '
                        '["X", "", null, "Y"], "n": null, "zero": 0}')
    assert KIT.text_of(record) == "a b"
    assert KIT.text_of(record, ["abstract", "year", "authors", "n", "zero"], " [SEP] ") == (
        "a b [SEP] 2020 [SEP] X, Y [SEP] 0")

# ---------------------------------------------------------------- Outputs
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

@pytest.mark.parametrize("kind", ["bm25", "dense", "splade"])
def test_only_what_decides_the_bytes_of_an_index_stands_in_its_task(toy, call, kind):
    words = ("--indexes", kind, "--max-length", 16)
    assert facts(call(SCRIPT, *words, cwd=toy))["made"]
    arguments = json.loads((toy / INDEX / f"{kind}.meta.json").read_text())["arguments"]
    others = {"seed": 7, "split": "train", "device": "cpu", "batch-size": 3}
    assert not {"data", "work", "out", "force", *others} & set(arguments)
    other = [word for name, value in others.items() for word in (f"--{name}", value)]
    other += ["--k1", 2] if kind != "bm25" else ["--dtype", "bf16", "--pooling", "chunks"]
    assert "up to date" in call(SCRIPT, *words, *other, cwd=toy).stdout
    if kind != "bm25":
        assert arguments["dtype"] == "fp32"  # not auto, which means another one on a GPU
        assert facts(call(SCRIPT, *words, "--dtype", "bf16", cwd=toy))["made"]

def test_a_field_that_is_empty_everywhere_is_not_said_to_be_missing(toy, call):
    records = ({"abstract_id": name, "abstract": "ice", "title": ""} for name in "ab")
    jsonl(toy / "data/demo/corpus.jsonl", *records)
    done = call(SCRIPT, "--indexes", "bm25", "--fields", "title, year,abstract", cwd=toy)
    assert "the field title is empty in all 2 records" in done.stderr
    assert "no record has the field year" in done.stderr and facts(done)["abstracts"] == 2

# ---------------------------------------------------------------- BM25
@pytest.mark.parametrize(("analyser", "language", "text", "expected"), [
    ("default", "english", "Don't Glaciers do NOT melt? CO2-levels; it's A the sea",
     ["don", "glacier", "do", "melt", "co2", "level", "sea"]),
    ("default", "german", "Die Gletscher schmelzen und die Meere", ["gletsch", "schmelz", "meer"]),
    ("plain", "english", "It's the CO2-level;\u2003A", ["It's", "the", "CO2-level;", "A"]),
    ("nltk", "english", "Don't say climate-change_now!", ["say", "climate", "change"]),
    # composed and decomposed accents, ligatures and indices are the same but for plain
    ("default", "english", "caf\u00e9 cafe\u0301 \ufb01re CO\u2082",
     ["caf\u00e9", "caf\u00e9", "fire", "co2"]),
    ("nltk", "english", "cafe\u0301 \ufb01re", ["caf\u00e9", "fire"]),
    ("plain", "english", "cafe\u0301 \ufb01re", ["cafe\u0301", "\ufb01re"]),
])
def test_analysers(analyser, language, text, expected):
    terms, numbers, lengths = KIT.tokenise(KIT.analyser_of(analyser, language), ["", text])
    term_of = {number: term for term, number in terms.items()}
    assert [term_of[number] for number in numbers] == expected and lengths == [0, len(expected)]

def test_bm25_scores_by_hand(toy, call):
    """Three texts of 4, 2 and 3 tokens, 3 on average; Kamphuis et al. 2020, table 1.

    sea is in all three, ice in one. Robertson's idf of sea, log(.5 / 3.5) < 0, counts as 0.
    """
    texts = ["ice ice sea sea", "sea rain", "sea rain wind"]
    records = ({"abstract_id": str(row), "abstract": text} for row, text in enumerate(texts))
    jsonl(toy / "data/demo/corpus.jsonl", *records)
    norm = 1.2 * (1 - 0.5 + 0.5 * np.array([4, 2, 3]) / 3)
    frequency = {"ice": np.array([2, 0, 0]), "sea": np.array([2, 1, 1])}
    idf = {"lucene": {"ice": math.log(1 + 2.5 / 1.5), "sea": math.log(1 + 0.5 / 3.5)},
           "robertson": {"ice": math.log(2.5 / 1.5), "sea": 0}}
    for method, values in idf.items():
        words = ("--indexes", "bm25", "--bm25-method", method, "--k1", 1.2, "--b", 0.5)
        assert facts(call(SCRIPT, *words, cwd=toy))["made"]
        index = bm25s.BM25.load(toy / INDEX / "bm25")
        for term, count in frequency.items():
            expected = values[term] * count / (count + norm)
            np.testing.assert_allclose(index.get_scores([term]), expected, rtol=1e-6)

@pytest.mark.parametrize("method", ["lucene", "robertson"])
def test_postings_are_those_of_bm25s_by_the_arguments_in_meta_json(toy, run, method):
    words = ("--indexes", "bm25", "--bm25-method", method, "--k1", 1.2)
    facts(run(SCRIPT, *words, cwd=toy, edits={"SHARD = 4096": "SHARD = 5"}))  # three processes
    how = meta_of(toy / INDEX / "bm25")["analyser"]
    assert list(how) == ["name", "normalise", "lower", "token_pattern", "stopwords", "stemmer"]
    assert (how.pop("name"), how.pop("normalise")) == ("default", "NFKC")
    how["stemmer"] = Stemmer.Stemmer(how["stemmer"])
    theirs, ours = bm25s.BM25(1.2, 0.75, method=method), bm25s.BM25.load(toy / INDEX / "bm25")
    theirs.index(bm25s.tokenize(list(ABSTRACTS.values()), **how), create_empty_token=False)
    assert set(ours.vocab_dict) == set(theirs.vocab_dict)
    for term in theirs.vocab_dict:
        assert np.array_equal(ours.get_scores([term]), theirs.get_scores([term])), term

def test_an_index_has_the_same_bytes_whatever_the_order_of_sets(toy, run):
    for seed in ("1", "2"):
        words = ("--indexes", "bm25", "--out", f"index{seed}")
        facts(run(SCRIPT, *words, cwd=toy, env={"PYTHONHASHSEED": seed}))
    for path in (toy / "index1/bm25").iterdir():
        assert path.read_bytes() == (toy / "index2/bm25" / path.name).read_bytes(), path.name

def test_a_corpus_of_stopwords_is_refused_without_a_warning(toy, refused, recwarn):
    jsonl(toy / "data/demo/corpus.jsonl", {"abstract_id": "1", "abstract": "the of a"})
    refused(toy, SCRIPT, "--indexes", "bm25", said="--analyser default leaves no term; plain")
    assert not [one for one in recwarn if "numpy" in one.filename or "bm25s" in one.filename]

# ---------------------------------------------------------------- Shards
def save_shards(folder):
    """Save the shards of 5,000 rows that are not whole. Return where they begin."""
    made = []
    for rows in KIT.unfinished(folder, 5000):
        KIT.save_shard(folder, rows, {"x": np.arange(5000)[rows]})
        made.append(rows.start)
    return made

def test_finished_shards_are_kept_and_joined(tmp_path):
    args, task = SimpleNamespace(force=False), {"arguments": {"dtype": "bf16"}}
    parts = KIT.parts_of(tmp_path / "index", task, args)
    next(rows := KIT.unfinished(parts, 5000))
    KIT.save_shard(parts, slice(0, 4096), {"x": np.arange(4096)})
    rows.close()  # as a kill does
    (parts / "new").mkdir()
    assert save_shards(KIT.parts_of(tmp_path / "index", task, args)) == [4096]
    assert KIT.join_shards(parts, 5000)["x"].tolist() == list(range(5000))

@pytest.mark.parametrize(("file", "data"), [
    ("x.npy", b""), ("x.npy", b"\x93NUMPY"), ("x.npy", None), ("meta.json", b"[]"),
    ("meta.json", b"3"), ("meta.json", b"\xff"), ("meta.json", b"[" * 100_000), ("y.npy", b"")])
def test_a_damaged_shard_is_made_again(tmp_path, file, data):
    assert save_shards(tmp_path) == [0, 4096] and save_shards(tmp_path) == []
    path = tmp_path / "4096" / file
    path.write_bytes(data) if data is not None else path.unlink()
    assert save_shards(tmp_path) == [4096]
    assert KIT.join_shards(tmp_path, 5000)["x"].tolist() == list(range(5000))

@pytest.mark.parametrize("kind", ["dense", "splade"])
def test_an_index_that_was_killed_after_its_last_shard_is_finished(toy, killed, call, kind):
    words, kill = ("--indexes", kind), kill_before("arrays = join_shards(parts, len(texts))")
    assert killed(SCRIPT, *words, cwd=toy, edits=kill)
    assert facts(call(SCRIPT, *words, cwd=toy))["abstracts"] == 12
    size = {"dense": 384, "splade": 30_522}[kind]
    assert meta_of(toy / INDEX / kind)["shape"] == [12, size]

# ---------------------------------------------------------------- Dense and SPLADE
def test_three_indexes_alone_in_a_folder(toy, run):
    with open(toy / "data/demo/corpus.jsonl", "a", encoding="utf-8") as file:
        file.write('{"abstract_id": "13", "abstract": null}\n{"abstract_id": 14, "abstract": 3}\n')
    words, index = ("--activation", "relu", "--pooling", "chunks"), toy / INDEX
    done = run(SCRIPT, *words, cwd=toy)
    assert facts(done)["abstracts"] == 14 and "2 abstracts without text" in done.stderr
    for kind in ("bm25", "dense", "splade"):
        meta = meta_of(index / kind)
        files = {path.name: path.read_bytes() for path in (index / kind).iterdir()}
        del files["meta.json"]
        assert meta["files"] == {name: [len(b), zlib.crc32(b)] for name, b in files.items()}
        assert (meta["kind"], meta["abstracts"]) == (kind, 14)
        digest, text = meta.pop("sha256"), json.dumps(meta, sort_keys=True)
        assert digest == hashlib.sha256(text.encode()).hexdigest()
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

def test_truncated_texts_are_counted_with_their_prompt(toy, call):
    words = ("--indexes", "dense", "--max-length", 22, "--document-prompt", "a b c ")
    tokenizer = SentenceTransformer(str(toy / "data/models/minilm")).tokenizer
    tokens = tokenizer([f"a b c {text}" for text in ABSTRACTS.values()])["input_ids"]
    for shard in (5, 4096):
        edits = {"SHARD = 4096": f"SHARD = {shard}"}
        facts(call(SCRIPT, *words, "--force", cwd=toy, edits=edits))
        truncated = meta_of(toy / INDEX / "dense")["truncated"]
        assert truncated == sum(len(row) > 22 for row in tokens) and 0 < truncated < 12
    edits = {'getattr(inputs[0], "encodings", None)': "None"}  # as of other tokenizers
    done = call(SCRIPT, *words, "--force", cwd=toy, edits=edits)
    assert facts(done) and "an unknown number of them truncated" in done.stdout

def test_one_batch_that_does_not_tell_makes_the_number_unknown():
    counter, cut, whole = multiprocessing.Value("d"), *(
        SimpleNamespace(overflowing=rest) for rest in ([1], []))
    for features, total in (([cut, whole], 1), ([cut], 2), (None, math.nan), ([cut], math.nan)):
        KIT.count_truncated(counter, None, [SimpleNamespace(encodings=features)])
        assert counter.value == pytest.approx(total, nan_ok=True)

def test_windows_cover_a_text_overlap_and_are_pooled(models):
    how = SimpleNamespace(model=models / "minilm", device=["cpu"], pooling="chunks",
                          query_prompt=None, document_prompt="sea ")
    encoder = KIT.open_encoder(SentenceTransformer, how, "fp32")
    assert KIT.limit_length(encoder, 102) == 256 and encoder.max_seq_length == 102
    own = KIT.pool_chunks(encoder, how)
    words = " ".join(map(str, range(100, 400)))
    coded = encoder.preprocess([words, "ice"], prompt="sea ")
    assert coded["overflow_to_sample_mapping"].tolist() == [0, 0, 0, 0, 0, 0, 1]
    first, second = coded["input_ids"][:2].tolist()
    assert first[-1 - 50 : -1] == second[1:51] and len(first) == 102
    encoder[0].processing_kwargs = own
    assert len(encoder.preprocess([words, "ice"])["input_ids"]) == 2
    vectors = torch.tensor([[1.0, 4.0], [3.0, 0.0], [5.0, 2.0], [7.0, 7.0]])
    rows = torch.tensor([0, 0, 0, 1])
    features = {"sentence_embedding": vectors, "overflow_to_sample_mapping": rows}
    pooled = KIT.pool_windows(None, None, features)["sentence_embedding"]
    assert pooled.tolist() == [[(3 + 5) / 2, (2 + 4) / 2], [7, 7]]

# ---------------------------------------------------------------- Neighbours
def test_neighbours_are_exact_and_ties_in_corpus_order():
    vectors = np.random.default_rng(2).normal(size=(300, 8)).astype(np.float16)
    vectors[40:60] = vectors[7]  # more equal abstracts than neighbours
    corpus = torch.nn.functional.normalize(torch.from_numpy(vectors).float())
    found = np.concatenate([KIT.neighbours_of(rows, corpus, 5)
                            for rows in (slice(0, 100), slice(100, 4196))])
    cosines = (corpus.double() @ corpus.T.double()).numpy().round(6)
    np.fill_diagonal(cosines, -2)
    expected = np.argsort(-cosines, axis=1, kind="stable")[:, :5]
    assert (found == expected).mean() > 0.999 and found.dtype == np.int32
    assert found[7].tolist() == [40, 41, 42, 43, 44]
    assert found[50].tolist() == [7, 40, 41, 42, 43]

def test_the_graph_refuses_a_damaged_dense_index(toy, call, refused):
    facts(call(SCRIPT, "--indexes", "dense", cwd=toy))
    facts(call(SCRIPT, "graph", "--neighbours", 3, cwd=toy))
    neighbours = np.load(toy / INDEX / "graph/neighbours.npy")
    vectors = np.load(toy / INDEX / "dense/embeddings.npy").astype(float)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)  # fp16 has changed their lengths
    cosines = vectors @ vectors.T - 3 * np.eye(12)
    assert np.array_equal(neighbours, np.argsort(-cosines, axis=1)[:, :3])
    assert [path.name for path in (toy / INDEX / "graph").glob("*.npy")] == ["neighbours.npy"]
    index, said = toy / INDEX / "dense", "index/dense: its files have changed"
    whole = (index / "meta.json").read_bytes()
    for changed in (whole.replace(b'"fp32"', b'"fp16"'), b"[]", b"[" * 100_000, b""):
        (index / "meta.json").write_bytes(changed)
        refused(toy, SCRIPT, "graph", said="index/dense: ")
    (index / "meta.json").write_bytes(whole)
    with open(index / "embeddings.npy", "r+b") as file:
        file.seek(1000)
        file.write(b"\xff")
    refused(toy, SCRIPT, "graph", "--force", said=said)

def test_the_lengths_of_vectors_do_not_matter_to_the_graph(toy, call):
    vectors = np.array([[1, 0], [0.9, 0.1], [0, 9], [5, 5]], np.float16)  # the last is long
    (toy / INDEX).mkdir(parents=True)
    KIT.complete(toy / INDEX / "dense", list("abcd"), {"corpus": ""}, {"embeddings": vectors})
    facts(call(SCRIPT, "graph", "--neighbours", 1, cwd=toy))
    assert np.load(toy / INDEX / "graph/neighbours.npy").tolist() == [[1], [0], [3], [1]]

def test_one_abstract_has_no_neighbours(toy, call, refused):
    jsonl(toy / "data/demo/corpus.jsonl", {"abstract_id": "1", "abstract": "ice"})
    facts(call(SCRIPT, "--indexes", "dense", cwd=toy))
    refused(toy, SCRIPT, "graph", said="it has one abstract")

# ---------------------------------------------------------------- Training
@pytest.mark.parametrize(("counts", "width"), [
    ([2, 2, 2], 2), ([1, 3, 3], 3), ([1, 1, 3], 1), ([4] + [3] * 40 + [2] * 49, 2),
    ([0, 2], 2), ([0, 0], 0), ([], 0), ([1, 2], 1)])  # 1 x 2 = 2 x 1: more tuples
def test_ragged_tuples_are_cut_to_the_width_that_keeps_most_negatives(counts, width):
    assert KIT.width_of(counts) == width

@pytest.mark.parametrize(("loss", "tuples", "rows", "left_out", "unused"), [
    ("triplet", ["qabc", "qde", "rf"], ["qab", "qac", "qde"], 1, 0),
    ("mnrl", ["qabc", "qde", "rf"], ["qab", "qde"], 1, 1),
    ("mnrl", ["qabcd", "qefgh", "qde", "rf"], ["qabcd", "qefgh"], 2, 1),
    ("mnrl", ["qa", "rf"], ["qa", "rf"], 0, 0)])
def test_rows_of_examples_by_loss(tmp_path, loss, tuples, rows, left_out, unused):
    jsonl(tmp_path / "x", *({"claim_id": claim, "positive": positive, "negatives": negatives}
                            for claim, positive, *negatives in tuples))
    texts = {letter: letter for letter in "abcdefghqr"}
    examples = KIT.read_tuples(tmp_path / "x", texts, texts)
    found, counts = KIT.tuple_rows("x", examples, loss == "triplet")
    assert found == [tuple(row) for row in rows]
    assert (counts["examples"], counts["left_out"]) == (len(tuples), left_out)
    assert counts["negatives_left_out"] == unused
    assert counts["negatives"] == sum(len(row) - 2 for row in rows)

def test_missing_examples_are_mined_as_tuples(toy, refused):
    refused(toy, SCRIPT, "train", said="make it by: python 02_retrieve.py mine --shape tuples "
            "--data data/demo --work work/demo --split train")

@pytest.mark.parametrize("line", ["[]", "null", "3", "[" * 100_000, '{"negatives": 3}'])
def test_an_example_that_is_no_tuple_is_one_line(toy, refused, line):
    good = {"claim_id": "c1", "positive": "0010", "negatives": ["0001"]}
    (toy / "x").write_text(f"{json.dumps(good)}\n{line}\n")
    refused(toy, SCRIPT, "train", "x", said="x:2: ")

def test_training_on_chunks_makes_a_model_of_its_own_length(toy, call):
    words = ("--pooling", "chunks", "--max-length", 60, "--epochs", 1, "--query-prompt", "q: ")
    done = call(SCRIPT, "train", "data/demo/tuples.jsonl", *words, "--dev-split", "test", cwd=toy)
    before, after = facts(done)["dev_ndcg_at_10"]
    assert f"before training: nDCG@10 on dev {before:.4f}" in done.stdout and after > 0
    folder = toy / "work/demo/models/encoder"
    model = SentenceTransformer(str(folder))
    assert model.max_seq_length == 256 and model.prompts == {"query": "q: ", "document": ""}
    assert not model[0].processing_kwargs  # no windows where it is used without chunks
    assert not list(toy.glob("work/**/*.bin")) and not list(toy.glob("work/**/*.parts"))

def test_ragged_tuples_are_counted_in_a_warning(toy, call):
    examples = [("c1", "0010", ["0001", "0002"]), ("c2", "0011", ["0003"]), ("c1", "0009", [])]
    jsonl(toy / "x", *(dict(zip(("claim_id", "positive", "negatives"), one)) for one in examples))
    done = call(SCRIPT, "train", "x", "--epochs", 1, "--dev-split", "no", cwd=toy)
    assert facts(done)["negatives"] == 2
    assert "x: 1 of 3 tuples and 1 negatives are left out, as all tuples" in done.stderr
    made = json.loads((toy / "work/demo/models/encoder.meta.json").read_text())
    assert (made["left_out"], made["negatives_left_out"]) == (1, 1)
    assert made["arguments"]["dtype"] == "fp32"  # what autocast would use, on this device
    again = call(SCRIPT, "train", "x", "--epochs", 1, "--dev-split", "no", cwd=toy)
    assert again.stderr.splitlines().count("warning: no dev evaluation: it needs "
        "data/demo/claims.no.tsv, data/demo/qrels.no.tsv") == 1

@pytest.mark.parametrize(("split", "warnings"), [("none", 0), ("dve", 1)])
def test_only_a_dev_split_that_is_wanted_is_missed(split, warnings, tmp_path, capsys):
    assert KIT.dev_files(SimpleNamespace(data=tmp_path, dev_split=split)) == []
    assert capsys.readouterr().err.count("warning: no dev evaluation") == warnings

def test_dev_claims_rank_the_judged_and_some_others(toy):
    texts = dict(ABSTRACTS) | {str(number): "ice" for number in range(3000)}
    paths = [toy / f"data/demo/{name}.test.tsv" for name in ("claims", "qrels")]
    prompts = {"query": "", "document": ""}
    evaluator = KIT.dev_evaluator(paths, prompts, texts, SimpleNamespace(seed=13))
    assert KIT.DEV_POOL <= len(evaluator.corpus) <= KIT.DEV_POOL + len(ABSTRACTS)
    assert set.union(*evaluator.relevant_docs.values()) <= set(evaluator.corpus_ids)
