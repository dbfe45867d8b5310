"""01_index.py: what is indexed, that it is whole, and what it refuses."""
import json
import os
import random
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from conftest import kill_until

SCRIPT = "01_index.py"

def corpus(folder):
    return folder / "data" / "demo" / "corpus.jsonl"

# ----------------------------------------------------------- Texts and batches
def test_text_joins_the_fields_that_are_not_empty(load):
    text_of = load(SCRIPT)["text_of"]
    record = {"title": "Ice ", "abstract": "melts", "journal": None, "authors": ["A. B.", "C. D."], "year": 2020}
    assert text_of(record, ["title", "journal", "abstract"]) == "Ice melts"
    assert text_of(record, ["title", "authors", "nothing", "year"], " [SEP] ") == "Ice [SEP] A. B., C. D. [SEP] 2020"

def test_batches_keep_to_the_budget_and_hardly_pad(load):
    names = load(SCRIPT)
    rng = np.random.default_rng(5)
    lengths = np.minimum(rng.lognormal(5, 0.8, 3000).astype(int) + 2, 512)
    found = list(names["batches"](lengths, 4096))
    assert sorted(row for batch in found for row in batch) == list(range(3000))
    for batch in found:
        padded = len(batch) * lengths[batch].max()
        assert padded <= 4096 and lengths[batch].sum() >= 0.95 * padded
    assert len(found) < 1.2 * lengths.sum() / 4096 + 60
    assert list(names["batches"](np.array([9000, 1]), 4096)) == [[0], [1]]

# ----------------------------------------------------------- BM25
def terms(names, analyser, text, model=""):
    split, terms_of = names["ANALYSERS"][analyser](model)
    return [term for words in split([text]) for term in terms_of(words) if term is not None]

@pytest.mark.parametrize(("analyser", "expected"), [
    ("default", ["do", "not", "glacier", "melt", "co2", "level", "rise", "it", "sea"]),  # "a" is too short, "the" a stopword
    ("plain", ["Don't", "Glaciers", "do", "NOT", "melt?", "CO2-levels", "_rise_;", "it's", "A", "the", "sea"]),
    ("nltk", ["glaciers", "melt", "co2levels", "rise", "sea"]),
])
def test_analysers(load, analyser, expected):
    found = terms(load(SCRIPT), analyser, "Don't Glaciers do NOT melt? CO2-levels _rise_; it's A the sea")
    if analyser == "default":  # bm25s itself says what it should be
        import bm25s
        import Stemmer

        text = "Don't Glaciers do NOT melt? CO2-levels _rise_; it's A the sea"
        expected = bm25s.tokenize(text, stemmer=Stemmer.Stemmer("english"), return_ids=False, show_progress=False)[0]
        assert expected[:3] == ["don", "glacier", "do"]
    assert found == expected

def test_spacy_lemmas_from_a_blank_pipeline(load, tmp_path):
    spacy = pytest.importorskip("spacy")
    pytest.importorskip("spacy_lookups_data")
    nlp = spacy.blank("en")
    nlp.add_pipe("lemmatizer", config={"mode": "lookup"})
    nlp.initialize()
    nlp.to_disk(tmp_path / "pipeline")
    found = terms(load(SCRIPT), "spacy", "The Glaciers are melting; CO2 is 3.5% up!", str(tmp_path / "pipeline"))
    assert found == ["glaciers", "melt", "co2"]  # the look-up table knows no capitals: it leaves "Glaciers" as it is

def test_terms_are_numbered_by_first_occurrence(load):
    vocabulary, ids, lengths = load(SCRIPT)["analyse_all"](["Melting glaciers melt", "the", "the glacier"], "default", "")
    assert vocabulary == {"melt": 0, "glacier": 1}
    assert ids.tolist() == [0, 1, 0, 1] and lengths.tolist() == [3, 0, 1]

@pytest.mark.parametrize("method", ["lucene", "robertson", "atire", "bm25l", "bm25+"])
def test_postings_equal_those_of_bm25s_bit_by_bit(load, method):
    import bm25s

    rng = np.random.default_rng(3)
    texts = [[f"w{word}" for word in rng.zipf(1.3, size) if word < 400] for size in rng.integers(0, 60, 300)]
    reference = bm25s.BM25(method=method, k1=1.2, b=0.6)
    reference.index(texts, show_progress=False)
    names = load(SCRIPT)
    vocabulary, ids, lengths = names["analyse_all"]([" ".join(words) for words in texts], "plain", "")
    data, indices, indptr, absent = names["bm25_postings"](ids, lengths, len(vocabulary), method, 1.2, 0.6, reference.delta)
    for term, number in vocabulary.items():
        theirs = slice(*reference.scores["indptr"][[reference.vocab_dict[term], reference.vocab_dict[term] + 1]])
        ours = slice(indptr[number], indptr[number + 1])
        assert indices[ours].tolist() == reference.scores["indices"][theirs].tolist()
        assert data[ours].tobytes() == reference.scores["data"][theirs].tobytes()
        if absent is not None:
            assert absent[number] == reference.nonoccurrence_array[reference.vocab_dict[term]]

def test_many_texts_are_analysed_on_all_cores_to_the_same_index(toy, run):
    rng = np.random.default_rng(1)
    texts = [" ".join(f"word{word}" for word in words) for words in rng.zipf(1.4, (20_000, 6))]
    corpus(toy).write_text("".join(json.dumps({"abstract_id": str(row), "abstract": text}) + "\n"
                                   for row, text in enumerate(texts)))
    done = run(SCRIPT, "--indexes", "bm25", "--analyser", "plain", cwd=toy)
    assert done.returncode == 0, done.stderr
    import bm25s

    index = toy / "work/demo/index/bm25"
    found, reference = bm25s.BM25.load(index), bm25s.BM25()
    reference.index([text.split() for text in texts], show_progress=False)
    assert list(found.vocab_dict) == list(dict.fromkeys(word for text in texts for word in text.split()))
    for words in (["word1", "word7"], ["word3", "word3", "word4000"]):
        words = [word for word in words if word in found.vocab_dict]
        assert found.get_scores(words).tobytes() == reference.get_scores(words).tobytes()
    assert json.loads((index / "meta.json").read_text())["analyser"] == {"name": "plain"}

# ----------------------------------------------------------- Dense
def test_windows_are_pooled_as_in_equation_3(load):
    pool = load(SCRIPT)["pool_windows"]
    np.testing.assert_allclose(pool(np.array([[1.0, -2.0], [3.0, 0.0], [2.0, 5.0]])), [(2 + 3) / 2, (1 + 5) / 2])
    assert pool(np.array([[0.6, 0.8]])).tolist() == [0.6, 0.8]

def test_chunk_pooling_equals_windows_cut_by_hand(load, models):
    import torch
    from transformers import AutoModel, AutoTokenizer

    names = load(SCRIPT)
    encoder, dtype = names["load_encoder"]("dense", models / "minilm", "cpu", "auto", 64)
    assert dtype == "fp32"
    text = " ".join(f"glacier {number} melts in summer" for number in range(40))
    found, _ = names["embed"](encoder, ["short", text], "", "chunks", 2048, lambda rows: None)

    tokenizer, model = AutoTokenizer.from_pretrained(models / "minilm"), AutoModel.from_pretrained(models / "minilm").eval()
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    starts, size = [0], 64 - 2
    while starts[-1] + size < len(ids):
        starts.append(starts[-1] + size - 50)
    vectors = []
    for start in starts:
        window = [tokenizer.cls_token_id, *ids[start : start + size], tokenizer.sep_token_id]
        with torch.inference_mode():
            vector = model(torch.tensor([window])).last_hidden_state[0].mean(dim=0).numpy()
        vectors.append(vector / np.linalg.norm(vector))
    assert len(vectors) > 5
    pooled = (np.mean(vectors, axis=0) + np.max(vectors, axis=0)) / 2
    np.testing.assert_allclose(found[1], pooled / np.linalg.norm(pooled), atol=1e-5)
    np.testing.assert_allclose(found[0], encoder.encode("short", normalize_embeddings=True), atol=1e-5)

def test_embedding_equals_sentence_transformers_and_counts_what_is_cut(load, models):
    names = load(SCRIPT)
    encoder, _ = names["load_encoder"]("dense", models / "minilm", "cpu", "fp32", 20)
    texts = ["ice " * 100, "sea", "", "a b c d e"]
    found, cut = names["embed"](encoder, texts, "passage: ", "truncate", 2048, lambda rows: None)
    expected = [encoder.encode("passage: " + text, normalize_embeddings=True) for text in texts]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert cut == 1

# ----------------------------------------------------------- SPLADE
@pytest.mark.parametrize(("activation", "formula"), [("log1p_relu", lambda x: np.log(1 + x)), ("relu", lambda x: x)])
def test_splade_is_the_maximum_over_tokens_of_the_activated_logits(load, models, activation, formula):
    import torch
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    folder, names = models / "splade-tiny", load(SCRIPT)
    texts = ["polar bears need sea ice", "wheat"]
    encoder, _ = names["load_encoder"]("splade", folder, "cpu", "fp32")
    found = names["sparse_vectors"](encoder, texts, activation, "document")
    batch = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        logits = AutoModelForMaskedLM.from_pretrained(folder).eval()(**batch).logits
    weights = formula(np.maximum(logits.numpy(), 0)) * batch["attention_mask"].numpy()[..., None]
    np.testing.assert_allclose(found, weights.max(axis=1), atol=1e-5)
    if activation == "log1p_relu":  # what sentence-transformers makes of the same model
        theirs = encoder.encode_document(texts, convert_to_sparse_tensor=False).numpy()
        np.testing.assert_allclose(found, theirs, atol=1e-5)

def test_top_terms_keeps_the_heaviest(load):
    keep = load(SCRIPT)["keep_top_terms"]
    assert keep(np.array([[1.0, 3.0, 2.0, 2.0], [0.0, 0.0, 5.0, 0.0]]), 2).tolist() == [[0, 3, 2, 0], [0, 0, 5, 0]]
    assert keep(np.array([[1.0, 3.0]]), 0).tolist() == [[1, 3]]

# ----------------------------------------------------------- Graph
def test_nearest_neighbours_in_corpus_order_also_where_a_tie_is_cut(load):
    import torch

    nearest = load(SCRIPT)["nearest"]
    rows, scores = nearest(torch.tensor([[0.1, 0.5, 0.9, 0.5, 0.5], [0.0, 0.3, 0.1, 0.2, 0.2]]), 3)
    assert rows.tolist() == [[2, 1, 3], [1, 3, 4]]
    np.testing.assert_allclose(scores, [[0.9, 0.5, 0.5], [0.3, 0.2, 0.2]])

def test_the_graph_equals_brute_force(toy, run):
    index = toy / "work/demo/index/dense"
    index.mkdir(parents=True)
    vectors = np.random.default_rng(2).normal(size=(5000, 16))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16)
    np.save(index / "embeddings.npy", vectors)
    (index / "abstract_ids.json").write_text(json.dumps([str(row) for row in range(5000)]))
    (index / "meta.json").write_text(json.dumps({"corpus": "", "abstracts": 5000, "model": "m", "model_sha256": ""}))
    done = run(SCRIPT, "graph", "--neighbours", 7, "--rows", 300, cwd=toy)
    assert done.returncode == 0, done.stderr
    cosines = vectors.astype(float) @ vectors.astype(float).T
    np.fill_diagonal(cosines, -1)
    found = np.load(toy / "work/demo/index/graph/neighbours.npy")
    similarities = np.load(toy / "work/demo/index/graph/similarities.npy")
    assert found.shape == (5000, 7) and found.dtype == np.int32
    assert (found == np.argsort(-cosines, axis=1, kind="stable")[:, :7]).mean() > 0.9999  # float32 may swap near ties
    np.testing.assert_allclose(similarities, -np.sort(-cosines, axis=1)[:, :7], atol=1e-6)
    assert not (toy / "work/demo/index/graph.parts").exists()

    def of_the_dense_index():
        return json.loads((toy / "work/demo/index/graph/meta.json").read_text())["dense"]

    before = of_the_dense_index()  # the same corpus and model, encoded otherwise, is another graph to those who read it
    meta = {"corpus": "", "abstracts": 5000, "model": "m", "model_sha256": "", "pooling": "chunks"}
    (index / "meta.json").write_text(json.dumps(meta))
    assert run(SCRIPT, "graph", cwd=toy).returncode == 0 and of_the_dense_index() != before

# ----------------------------------------------------------- Restart
def test_finished_shards_are_read_back_and_torn_ones_made_again(load, tmp_path):
    sharded, made = load(SCRIPT)["sharded"], []

    def make(start, stop, update):
        made.append(start)
        return {"rows": np.arange(start, stop)}

    first = [part["rows"].tolist() for part in sharded(tmp_path, 10, 4, make, "x")]
    assert first == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] and made == [0, 4, 8]
    torn = tmp_path / "000000004.npz"
    torn.write_bytes(torn.read_bytes()[:-60])
    flipped = bytearray((tmp_path / "000000008.npz").read_bytes())
    flipped[-180] ^= 255
    (tmp_path / "000000008.npz").write_bytes(flipped)
    assert [part["rows"].tolist() for part in sharded(tmp_path, 10, 4, make, "x")] == first
    assert made == [0, 4, 8, 4, 8]

def test_kill_9_twenty_times_ends_in_the_same_bytes(toy, run):
    records = [{"abstract_id": str(row), "abstract": f"Finding {row} on " + "ice and sea level " * (row % 60)}
               for row in range(320)]
    corpus(toy).write_text("".join(json.dumps(record) + "\n" for record in records))
    words = [SCRIPT, "--indexes", "dense", "splade", "--shard-size", "16"]
    whole = run(*words, "--out", "whole", cwd=toy)
    assert whole.returncode == 0, whole.stderr
    kills = kill_until(toy / "work/demo/index/splade.meta.json", toy, words, random.Random(4), (0.4, 1.6))
    assert kills >= 5, kills  # a fast machine finishes between fewer kills
    index = toy / "work/demo/index"
    for kind in ("dense", "splade"):
        for path in (toy / "whole" / kind).iterdir():
            if path.name != "meta.json":
                assert path.read_bytes() == (index / kind / path.name).read_bytes(), path
    assert sorted(path.name for path in index.iterdir()) == ["dense", "dense.meta.json", "splade", "splade.meta.json"]

# ----------------------------------------------------------- Train
def table(rows):
    return pd.DataFrame(rows, columns=["claim_id", "abstract_id", "label"])

def test_triplets_pair_all_evidence_with_all_nei_of_a_claim(load):
    qrels = table([("1", "a", "SUPPORTS"), ("1", "b", "NEI"), ("1", "c", "REFUTES"), ("1", "d", "NEI"),
                   ("2", "e", "SUPPORTS")])
    found = [(e["claim_id"], e["positive"], *e["negatives"]) for e in load(SCRIPT)["triplets"](qrels)]
    assert found == [("1", "a", "b"), ("1", "a", "d"), ("1", "c", "b"), ("1", "c", "d")]

@pytest.mark.parametrize(("end", "expected"), [("top", ["x", "b"]), ("bottom", ["y", "z"])])
def test_hard_negatives_come_from_either_end_and_are_never_evidence(load, end, expected):
    qrels = table([("1", "a", "SUPPORTS"), ("1", "b", "NEI"), ("2", "c", "REFUTES")])
    found = load(SCRIPT)["with_negatives"](qrels, {"1": ["a", "x", "b", "y", "z"], "2": ["c", "x"]}, 2, end)
    assert found == [{"claim_id": "1", "positive": "a", "negatives": expected}]

def test_a_torn_checkpoint_is_not_resumed_from(load, tmp_path):
    for step, state in ((4, "{}"), (12, '{"torn'), (8, "{}")):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    (tmp_path / "checkpoint-16").mkdir()
    assert load(SCRIPT)["last_checkpoint"](tmp_path) == str(tmp_path / "checkpoint-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "checkpoint-8"]

@pytest.mark.parametrize("words", [
    ("--loss", "triplet", "--dev-split", "test"),
    ("--loss", "mnrl", "--hard-negatives", "2", "--query-prompt", "query: ", "--document-prompt", "passage: "),
])
def test_train_makes_a_model_that_indexes(toy, run, words):
    words = [*words, "--lr", "2e-5", "--epochs", "1", "--max-length", "50"]
    done = run(SCRIPT, "train", *words, cwd=toy)
    assert done.returncode == 0, done.stderr
    model = toy / "work/demo/models/encoder"
    assert (model / "model.safetensors").is_file() and not (toy / "work/demo/models/encoder.parts").exists()
    assert (model / "model.safetensors").read_bytes() != (toy / "data/models/minilm/model.safetensors").read_bytes()
    assert not list(model.rglob("*.bin")) and not list(model.rglob("*.pt"))
    examples = [json.loads(line) for line in open(f"{model}.examples.jsonl", encoding="utf-8")]
    relevant = {"c1": {"0010"}, "c2": {"0012", "0004"}}
    assert examples and all(e["positive"] in relevant[e["claim_id"]] for e in examples)
    assert not any(set(e["negatives"]) & relevant[e["claim_id"]] for e in examples)
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["dev_ndcg_at_10"]) == (2 if "--dev-split" in words else 0)  # before and after the epoch
    prompts = json.loads((model / "config_sentence_transformers.json").read_text())["prompts"]
    assert prompts["query"] == ("query: " if "--query-prompt" in words else "")
    assert "up to date" in run(SCRIPT, "train", *words, cwd=toy).stdout
    done = run(SCRIPT, "--indexes", "dense", "--dense-model", model, cwd=toy)
    assert done.returncode == 0, done.stderr
    assert json.loads((toy / "work/demo/index/dense/meta.json").read_text())["max_length"] == 256  # MiniLM's own, not 50

@pytest.mark.parametrize("end", ["top", "bottom"])
def test_the_models_own_ranking_gives_the_most_or_the_least_similar(toy, run, models, end):
    from sentence_transformers import SentenceTransformer

    words = ("--hard-negatives", 1, "--negatives-from", end, "--depth", 3, "--epochs", 1, "--max-length", 24)
    done = run(SCRIPT, "train", *words, "--out", "model/", cwd=toy)  # a slash at its end changes nothing
    assert done.returncode == 0 and not (toy / "model.parts").exists(), done.stderr
    encoder = SentenceTransformer(str(models / "minilm"))
    encoder.max_seq_length = 24
    names, texts = zip(*[(record["abstract_id"], record["abstract"]) for record in map(json.loads, corpus(toy).open())])
    claim = "More CO2 makes wheat less nutritious"
    cosines = encoder.encode_document(list(texts)) @ encoder.encode_query(claim)
    ranked = [names[row] for row in np.argsort(-cosines) if names[row] != "0010"]
    example = json.loads((toy / "model.examples.jsonl").read_text().splitlines()[0])
    assert example == {"claim_id": "c1", "positive": "0010", "negatives": [ranked[0 if end == "top" else -1]]}

def test_training_that_is_killed_stops_where_it_would_have(toy, run):
    words = [SCRIPT, "train", "--loss", "triplet", "--dev-split", "test", "--lr", "3e-4", "--epochs", "4", "--patience", "1",
             "--max-length", "16"]
    whole = run(*words, "--out", "whole", cwd=toy)
    assert whole.returncode == 0, whole.stderr
    kill_until(toy / "work/demo/models/encoder", toy, words, random.Random(3), (5, 9), 2)
    curves = [json.loads((toy / f"{name}.meta.json").read_text())["dev_ndcg_at_10"]
              for name in ("whole", "work/demo/models/encoder")]
    assert curves[0] == curves[1]

def test_prompts_are_those_given_else_the_models_own(load):
    prompt_of = load(SCRIPT)["prompt_of"]
    encoder = SimpleNamespace(prompts={"query": "Find: ", "document": "", "passage": "Text: "})
    for given, query, document in ((None, "Find: ", "Text: "), ("q: ", "q: ", "q: "), ("", "", "")):
        args = SimpleNamespace(query_prompt=given, document_prompt=given)
        assert (prompt_of(encoder, "query", args), prompt_of(encoder, "document", args)) == (query, document)

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
    (["--analyser", "spacy", "--spacy-model", "no_such_pipeline"], "pip install spacy"),
    (["--indexes", "dense", "--pooling", "chunks", "--max-length", "50"], "--max-length"),
    (["graph"], "no dense index"),
    (["train", "--loss", "triplet", "--hard-negatives", "2"], "--hard-negatives"),
    (["train", "--hard-negatives", "50", "--negatives-run", "work/demo/train/hybrid.tsv"], "qrels.train.tsv"),
    (["--indexes", "dense", "--shard-size", "0"], "--shard-size"),
    (["--indexes", "bm25", "--b", "1.5"], "--b"),
    (["--corpus", "data/demo"], "data/demo"),
    (["graph", "--index", "data", "--out", "data/demo"], "data"),
    (["train", "--out", "data/demo/"], "data/demo"),  # not made by this command: it would be gone
    (["train", "--out", "."], "."),
    (["train", "--out", "data/demo/corpus.jsonl/model"], "model"),
])
def test_missing_files_and_bad_flags_are_refused(toy, run, contents, refused, arguments, word):
    before = contents(toy)
    words = arguments if arguments[0] in ("graph", "train") else ["--indexes", "bm25", *arguments]
    refused(run(SCRIPT, *words, cwd=toy), before, toy, word)

def test_a_device_that_is_not_there_is_refused(toy, run, contents, refused):
    before = contents(toy)
    done = run(SCRIPT, "--indexes", "dense", "--device", "cuda:99", cwd=toy)
    done.stderr = "\n".join(line for line in done.stderr.splitlines() if line.startswith(("error:", "Traceback")))
    refused(done, before, toy, "--device", "cuda:99")

def test_training_sees_one_gpu_and_none_that_were_hidden(load, monkeypatch):
    one_gpu = load(SCRIPT)["one_gpu"]
    for seen, device, shown, left in ((None, "auto", "0", "auto"), (None, "cuda:1", "1", "cuda"),
                                      ("2,3", "cuda:1", "3", "cuda"), ("2,3", "cuda", "2", "cuda"), ("", "auto", "", "auto"),
                                      ("2", "cuda:1", "", "cuda"),
                                      ("2,3", "cpu", "2,3", "cpu"), ("2,3", "cuda:x", "2,3", "cuda:x")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen or "")
        if seen is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        args = SimpleNamespace(device=device)
        one_gpu(args)
        assert (os.environ["CUDA_VISIBLE_DEVICES"], args.device) == (shown, left), (seen, device)

def test_half_a_character_is_mended(toy, run):
    corpus(toy).write_text('{"abstract_id": "1", "abstract": "ice \\ud83d melts \\ud83d\\ude00"}\n')
    done = run(SCRIPT, "--indexes", "bm25", "dense", "--analyser", "plain", cwd=toy)
    assert done.returncode == 0, done.stderr

def test_an_empty_corpus_is_refused(toy, run, contents, refused):
    corpus(toy).write_text("")
    before = contents(toy)
    refused(run(SCRIPT, "--indexes", "bm25", cwd=toy), before, toy, "corpus.jsonl")
