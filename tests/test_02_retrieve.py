"""02_retrieve.py: exact rankings, ties in corpus order, reciprocal rank fusion, and what it refuses."""
import json
import shutil

import numpy as np
import pandas as pd
import pytest
from conftest import tsv

SCRIPT = "02_retrieve.py"
RUN = ["claim_id", "abstract_id", "rank", "score"]

def read(path):
    return pd.read_csv(path, sep="\t", dtype={"claim_id": str, "abstract_id": str}, keep_default_na=False)

@pytest.fixture
def indexed(toy, run):
    """The toy with a BM25 index, which takes no model."""
    assert run("01_index.py", "--indexes", "bm25", cwd=toy).returncode == 0
    return toy

# ----------------------------------------------------------- Functions
def test_top_k_breaks_ties_by_corpus_order_also_at_the_cut(load):
    top_k = load(SCRIPT)["top_k"]
    scores = np.array([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    assert top_k(scores, 3).tolist() == [1, 2, 3]
    assert top_k(scores, 99).tolist() == [1, 2, 3, 4, 0, 5]

def test_top_k_equals_a_full_stable_sort(load):
    top_k = load(SCRIPT)["top_k"]
    rng = np.random.default_rng(7)
    for _ in range(50):
        scores = rng.integers(0, 6, rng.integers(1, 40)).astype(float)
        k = int(rng.integers(1, 45))
        assert top_k(scores, k).tolist() == sorted(range(len(scores)), key=lambda row: (-scores[row], row))[:k]

def test_top_k_equals_a_full_stable_sort_where_blocks_are_taken(load):
    top_k = load(SCRIPT)["top_k"]
    rng = np.random.default_rng(8)
    for spread in (3, 50, 10**6):
        scores = rng.integers(0, spread, 4001).astype(np.float32)
        for k in (1, 7, 250, 999, 1000, 1001, 9999):
            assert top_k(scores, k).tolist() == np.lexsort((np.arange(4001), -scores))[:k].tolist()

# ----------------------------------------------------------- Fusion
A, B = [("a", 9.0), ("b", 5.0), ("c", 1.0)], [("c", 0.5), ("a", 0.3)]

def fused(load, *given, **how):
    return load(SCRIPT)["fuse_rankings"](given, {name: place for place, name in enumerate("abcdef")}, **how)

def test_rrf_equals_the_sum_worked_by_hand(load):
    assert dict(fused(load, A, B)) == pytest.approx({"a": 1 / 61 + 1 / 62, "b": 1 / 62, "c": 1 / 63 + 1 / 61})
    weighted = dict(fused(load, A, B, weights=[1, 3], k=10))
    assert weighted == pytest.approx({"a": 1 / 11 + 3 / 12, "b": 1 / 12, "c": 1 / 13 + 3 / 11})

def test_minmax_equals_the_sum_worked_by_hand(load):
    found = dict(fused(load, A, B, method="minmax", weights=[0.5, 2]))
    assert found == pytest.approx({"a": 0.5 * 1 + 2 * 0, "b": 0.5 * 4 / 8, "c": 0 + 2 * 1})

def test_zscore_ranks_like_z_scores_with_the_lowest_for_what_is_missing(load):
    found = dict(fused(load, A, B, method="zscore", weights=[0.3, 0.7]))
    of_a, of_b = np.std([9, 5, 1]), np.std([0.5, 0.3])
    assert found == pytest.approx({"a": 0.3 * 8 / of_a, "b": 0.3 * 4 / of_a, "c": 0.7 * 0.2 / of_b})

def test_union_keeps_each_abstract_once_by_its_best_rank(load):
    assert fused(load, A, B, method="union") == [("a", 1), ("c", 1), ("b", 1 / 2)]

@pytest.mark.parametrize("method", ["rrf", "minmax", "zscore", "union"])
def test_fusion_of_equal_scores_and_of_nothing(load, method):
    assert [name for name, _ in fused(load, [("b", 1.0)], [("a", 1.0)], [], method=method)] == ["a", "b"]
    assert fused(load, [], method=method) == []

# ----------------------------------------------------------- Search
def test_dense_search_equals_brute_force_in_float64_for_any_block(load):
    names, rng = load(SCRIPT), np.random.default_rng(11)
    vectors = rng.normal(size=(3000, 48))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16)
    queries = rng.normal(size=(300, 48)).astype(np.float32)  # more than are scored at once
    exact = queries.astype(float) @ vectors.astype(float).T
    for block in (7, 1024, 10**6):
        found = list(names["inner_products"](vectors, queries, block, "cpu"))
        assert len(found) == 300
        np.testing.assert_allclose(found, exact, atol=1e-5)
        same = [names["top_k"](scores, 100).tolist() == np.argsort(-row, kind="stable")[:100].tolist()
                for scores, row in zip(found, exact)]
        assert np.mean(same) > 0.98  # float32 may swap neighbours that differ by less than 1e-6

def test_splade_search_equals_brute_force_in_float64(load):
    from scipy import sparse

    names, rng = load(SCRIPT), np.random.default_rng(12)
    matrix = sparse.random(2000, 500, density=0.05, random_state=rng, format="csc", dtype=np.float32)
    queries = sparse.random(40, 500, density=0.04, random_state=rng, dtype=np.float32).toarray()
    exact = queries.astype(float) @ matrix.toarray().astype(float).T
    for query, row in zip(queries, exact):
        scores = names["sum_postings"](query, matrix.data, matrix.indices, matrix.indptr, 2000)
        np.testing.assert_allclose(scores, row, rtol=1e-5)
        assert names["top_k"](scores, 50).tolist() == np.argsort(-row, kind="stable")[:50].tolist()

# ----------------------------------------------------------- The whole script
def test_every_retriever_alone_in_a_folder(toy, run, load):
    assert run("01_index.py", cwd=toy).returncode == 0
    done = run(SCRIPT, "--top-k", 8, cwd=toy)
    assert done.returncode == 0, done.stderr
    out = toy / "work" / "demo" / "test"
    runs = {name: read(out / f"{name}.tsv") for name in ("bm25", "dense", "splade", "hybrid")}
    for name, table in runs.items():
        assert list(table.columns) == RUN
        assert (out / f"{name}.tsv.meta.json").is_file()
        for _, rows in table.groupby("claim_id"):
            assert rows["rank"].tolist() == list(range(1, len(rows) + 1)) and len(rows) <= 8
            assert rows["score"].is_monotonic_decreasing
    assert (runs["bm25"]["score"] > 0).all()
    assert set(runs["dense"]["claim_id"]) == {"c3", "c4", "c5"} and len(runs["dense"]) == 3 * 8

    # dense scores are the cosines of the saved vectors; SPLADE's are inner products over all postings
    from scipy import sparse
    from sentence_transformers import SentenceTransformer

    index = toy / "work" / "demo" / "index"
    claims = pd.read_csv(toy / "data/demo/claims.test.tsv", sep="\t")["claim"].tolist()
    queries = SentenceTransformer(str(toy / "data/models/minilm"), device="cpu").encode(claims).astype(float)
    cosines = queries @ np.load(index / "dense" / "embeddings.npy").astype(float).T
    for row, claim in enumerate(("c3", "c4", "c5")):
        best = sorted(range(12), key=lambda place: (-cosines[row, place], place))[:8]
        assert runs["dense"][runs["dense"]["claim_id"] == claim]["abstract_id"].tolist() == [f"{b + 1:04d}" for b in best]
    names = load(SCRIPT)
    encoder, _ = names["load_encoder"]("splade", toy / "data/models/splade-tiny", "cpu", "fp32")
    terms = names["sparse_vectors"](encoder, claims, "log1p_relu", "query").astype(float)
    parts = [np.load(index / "splade" / f"{name}.npy") for name in ("data", "indices", "indptr")]
    products = terms @ sparse.csc_matrix(tuple(parts), shape=(12, 30_522)).toarray().astype(float).T
    found = runs["splade"].set_index(["claim_id", "abstract_id"])["score"]
    for (claim, name), score in found.items():
        assert score == pytest.approx(products[["c3", "c4", "c5"].index(claim), int(name) - 1], rel=1e-4)

    # fusing the written runs gives the hybrid once more
    names = [f"work/demo/test/{name}.tsv" for name in ("bm25", "dense", "splade")]
    done = run(SCRIPT, "fuse", *names, "--top-k", 8, "--corpus", "data/demo/corpus.jsonl", "--out", "again.tsv", cwd=toy)
    assert done.returncode == 0, done.stderr
    assert (toy / "again.tsv").read_bytes() == (out / "hybrid.tsv").read_bytes()

def test_bm25_equals_bm25s_called_directly(indexed, run):
    import bm25s
    import Stemmer

    assert run(SCRIPT, "--retrievers", "bm25", cwd=indexed).returncode == 0
    stemmer = Stemmer.Stemmer("english")
    texts = [json.loads(line)["abstract"] for line in open(indexed / "data/demo/corpus.jsonl", encoding="utf-8")]
    claims = pd.read_csv(indexed / "data/demo/claims.test.tsv", sep="\t")
    reference = bm25s.BM25(k1=1.5, b=0.75)
    reference.index(bm25s.tokenize(texts, stopwords="english", stemmer=stemmer, show_progress=False), show_progress=False)
    found = read(indexed / "work/demo/test/bm25.tsv")
    for claim, text in zip(claims["claim_id"], claims["claim"]):
        tokens = bm25s.tokenize(text, stopwords="english", stemmer=stemmer, return_ids=False, show_progress=False)[0]
        scores = reference.get_scores([token for token in tokens if token in reference.vocab_dict])
        rows = found[found["claim_id"] == claim]
        assert len(rows) == (scores > 0).sum()
        for name, score in zip(rows["abstract_id"], rows["score"]):
            assert score == pytest.approx(float(scores[int(name) - 1]), rel=1e-6)

@pytest.mark.parametrize("analyser", ["plain", "nltk"])
def test_claims_go_through_the_analyser_of_the_index(indexed, run, analyser):
    assert run("01_index.py", "--indexes", "bm25", "--analyser", analyser, cwd=indexed).returncode == 0
    claims = [("1", "SEA"), ("2", "level rose"), ("3", "altimeters!")]
    tsv(indexed / "data/demo/claims.test.tsv", ["claim_id", "claim"], claims)
    assert run(SCRIPT, "--retrievers", "bm25", cwd=indexed).returncode == 0
    found = read(indexed / "work/demo/test/bm25.tsv").groupby("claim_id")["abstract_id"].apply(set).to_dict()
    by_word = {"1": {"0002", "0007", "0009"}, "2": {"0007", "0009"}, "3": {"0008"}}
    assert found == (by_word if analyser == "nltk" else {"2": {"0007", "0009"}})  # plain leaves case and signs alone

@pytest.mark.parametrize("method", ["bm25l", "bm25+"])
def test_what_shares_no_word_with_a_claim_is_no_candidate_by_any_formula(indexed, run, method):
    words = ("--indexes", "bm25", "--analyser", "plain", "--bm25-method", method)
    assert run("01_index.py", *words, cwd=indexed).returncode == 0
    tsv(indexed / "data/demo/claims.test.tsv", ["claim_id", "claim"], [("1", "Glaciers")])
    assert run(SCRIPT, "--retrievers", "bm25", cwd=indexed).returncode == 0
    assert read(indexed / "work/demo/test/bm25.tsv")["abstract_id"].tolist() == ["0012"]

def test_numba_and_numpy_score_alike(indexed, load):
    pytest.importorskip("numba")
    folder = indexed / "work/demo/index/bm25"
    meta, names = json.loads((folder / "meta.json").read_text()), load(SCRIPT)
    claims = ["polar bears and sea ice", "", "sun"]
    plain = list(names["search_bm25"](folder, meta, claims, None))
    names["search_bm25"].__globals__["COMPILE"] = 1
    compiled = list(names["search_bm25"](folder, meta, claims, None))
    np.testing.assert_allclose(compiled, plain, rtol=1e-6)
    assert plain[0].max() > 0 and not plain[1].any()

def test_restrict_scores_only_the_candidates_of_an_earlier_run(indexed, run):
    assert run(SCRIPT, "--retrievers", "bm25", cwd=indexed).returncode == 0
    whole = read(indexed / "work/demo/test/bm25.tsv")
    few = [("c3", "0003", 1, 2.0), ("c3", "0001", 2, 1.0), ("c3", "0012", 3, 0.5), ("c5", "0009", 1, 1.0)]
    tsv(indexed / "few.tsv", RUN, few)
    done = run(SCRIPT, "--retrievers", "bm25", "--restrict", "few.tsv", "--out", "out", cwd=indexed)
    assert done.returncode == 0, done.stderr
    found = read(indexed / "out/bm25.tsv")
    kept = {("c3", "0001"), ("c3", "0003"), ("c5", "0009")}
    expected = whole[[pair in kept for pair in zip(whole["claim_id"], whole["abstract_id"])]]
    columns = ["claim_id", "abstract_id", "score"]
    assert found[columns].values.tolist() == expected[columns].values.tolist()
    assert "3 claims, 1 of them without any" in done.stdout

def test_short_long_and_empty_texts_and_a_k_beyond_the_corpus(toy, run):
    texts = ["sea", "ice " * 6818, "", "sea ice " * 10]
    (toy / "data/demo/corpus.jsonl").write_text("".join(json.dumps({"abstract_id": str(row), "abstract": text}) + "\n"
                                                        for row, text in enumerate(texts)))
    tsv(toy / "data/demo/claims.test.tsv", ["claim_id", "claim"], [("1", "sea ice"), ("2", "\"\""), ("3", "?!")])
    done = run("01_index.py", cwd=toy)
    assert done.returncode == 0, done.stderr
    assert "1 abstracts are null, empty or no text" in done.stderr and "4 abstracts, 1 of them truncated" in done.stdout
    done = run(SCRIPT, "--top-k", 5000, cwd=toy)
    assert done.returncode == 0, done.stderr
    runs = {name: read(toy / f"work/demo/test/{name}.tsv") for name in ("bm25", "dense", "splade", "hybrid")}
    assert set(runs["bm25"]["abstract_id"]) == {"0", "1", "3"} and set(runs["bm25"]["claim_id"]) == {"1"}
    assert runs["dense"].groupby("claim_id").size().to_dict() == {"1": 4, "2": 4, "3": 4}
    assert runs["hybrid"].groupby("claim_id").size().to_dict() == {"1": 4, "2": 4, "3": 4}

def test_claims_without_a_known_word_have_no_row_and_are_counted(indexed, run):
    tsv(indexed / "data/demo/claims.test.tsv", ["claim_id", "claim"], [("1", "xyzzy"), ("2", "polar bears"), ("3", "\"\"")])
    done = run(SCRIPT, "--retrievers", "bm25", cwd=indexed)
    assert done.returncode == 0, done.stderr
    assert "3 claims, 2 of them without any" in done.stdout
    assert set(read(indexed / "work/demo/test/bm25.tsv")["claim_id"]) == {"2"}

def test_bom_crlf_and_tabs_in_quotes_read_back_equal(indexed, run):
    path = indexed / "data/demo/claims.test.tsv"
    path.write_bytes(b'\xef\xbb\xbfclaim_id\tclaim\r\n007\t"polar\tbears ""starve"""\r\nNA\tsun\r\n')
    assert run(SCRIPT, "--retrievers", "bm25", cwd=indexed).returncode == 0
    assert set(read(indexed / "work/demo/test/bm25.tsv")["claim_id"]) == {"007", "NA"}

def test_a_second_call_finds_its_runs_up_to_date_until_the_claims_change(indexed, run):
    assert run(SCRIPT, "--retrievers", "bm25", cwd=indexed).returncode == 0
    assert "up to date: work/demo/test/bm25.tsv" in run(SCRIPT, "--retrievers", "bm25", cwd=indexed).stdout
    tsv(indexed / "data/demo/claims.test.tsv", ["claim_id", "claim"], [("9", "glaciers")])
    assert "up to date" not in run(SCRIPT, "--retrievers", "bm25", cwd=indexed).stdout
    assert set(read(indexed / "work/demo/test/bm25.tsv")["claim_id"]) == {"9"}

def test_trec_runs_are_fused_by_score(toy, run):
    (toy / "a.trec").write_text("1 Q0 x 0 5.0 tag\n1 Q0 y 1 7.0 tag\n")
    tsv(toy / "b.tsv", RUN, [("1", "y", 1, 0.5), ("1", "z", 2, 0.25)])
    done = run(SCRIPT, "fuse", "a.trec", "b.tsv", "--out", "c.tsv", cwd=toy)
    assert done.returncode == 0, done.stderr
    fused = read(toy / "c.tsv")
    assert fused["abstract_id"].tolist() == ["y", "x", "z"]
    assert fused["score"].tolist() == pytest.approx([2 / 61, 1 / 62, 1 / 62], rel=1e-8)

def test_fuse_takes_method_and_weights(toy, run):
    tsv(toy / "a.tsv", RUN, [("1", "x", 1, 3), ("1", "y", 2, 1)])
    tsv(toy / "b.tsv", RUN, [("1", "y", 1, 0.9), ("1", "z", 2, 0.1), ("2", "z", 1, 1)])
    words = ["fuse", "a.tsv", "b.tsv", "--method", "minmax", "--weights", 1, 3, "--out", "c.tsv"]
    done = run(SCRIPT, *words, cwd=toy)
    assert done.returncode == 0, done.stderr
    found = read(toy / "c.tsv")
    assert found[["claim_id", "abstract_id", "rank", "score"]].values.tolist() == [
        ["1", "y", 1, 3.0], ["1", "x", 2, 1.0], ["1", "z", 3, 0.0], ["2", "z", 1, 0.0]]

# ----------------------------------------------------------- Bad input
@pytest.mark.parametrize(("words", "word"), [
    (["fuse", "a.tsv", "a.tsv", "--weights", "1"], "--weights"),
    (["fuse", "a.tsv", "--weights", "1", "--method", "union"], "--weights"),
    (["fuse", "a.tsv", "--method", "best"], "--method"),
    (["fuse", "a.tsv", "a.tsv", "--weights", "nan", "1"], "--weights"),
    (["fuse", "a.tsv", "--out", "work/../a.tsv"], "a.tsv: this command reads it"),
    (["fuse", "a.tsv", "--out", "work/demo/index"], "work/demo/index"),  # a folder: it would be gone
    (["fuse", "a.tsv", "--out", "a.tsv/b.tsv"], "a.tsv"),
    (["--retrievers", "bm25", "--top-k", "0"], "--top-k"),
    (["--retrievers", "bm25", "--restrict", "nowhere.tsv"], "nowhere.tsv"),
    (["--retrievers", "bm25", "--restrict", "a.tsv"], "a.tsv:2: unknown abstract_id x"),
])
def test_bad_flags_are_refused(indexed, run, contents, refused, words, word):
    tsv(indexed / "a.tsv", RUN, [("1", "x", 1, 3)])
    before = contents(indexed)
    refused(run(SCRIPT, *words, cwd=indexed), before, indexed, word)

@pytest.mark.parametrize(("text", "words"), [
    ("claim_id\ttext\n1\tice\n", ["claims.test.tsv:1:", "claim"]),
    ("claim_id\tclaim\n1\tice\n1\tsun\n", ["claims.test.tsv:3:", "stands twice"]),
    ("claim_id\tclaim\n\tice\n", ["claims.test.tsv:2:", "empty"]),
    ("claim_id\tclaim\n1\ta\tb\n", ["claims.test.tsv"]),
    ("claim_id\tclaim\n1\t\"open\n", ["claims.test.tsv"]),
    ('claim_id\tclaim\n1\t"two\nlines"\n2\tsun\n2\tsea\n', ["claims.test.tsv:5:"]),
    ("claim_id\tclaim\n", ["claims.test.tsv", "no claim"]),
    ("", ["claims.test.tsv"]),
])
def test_bad_claims_are_refused_by_line(indexed, run, contents, refused, text, words):
    (indexed / "data/demo/claims.test.tsv").write_text(text)
    before = contents(indexed)
    refused(run(SCRIPT, "--retrievers", "bm25", cwd=indexed), before, indexed, *words)

def test_an_index_of_another_corpus_is_refused(indexed, run, contents, refused):
    with open(indexed / "data/demo/corpus.jsonl", "a") as file:
        file.write('{"abstract_id": "new", "abstract": "text"}\n')
    before = contents(indexed)
    refused(run(SCRIPT, "--retrievers", "bm25", cwd=indexed), before, indexed, "meta.json", "another corpus")

def test_indexes_of_different_corpora_are_refused_also_where_no_corpus_is_at_hand(indexed, run, contents, refused):
    index = indexed / "work/demo/index"
    shutil.copytree(index / "bm25", index / "splade")
    meta = json.loads((index / "splade/meta.json").read_text())
    (index / "splade/meta.json").write_text(json.dumps(meta | {"kind": "splade", "corpus": "another"}))
    before = contents(indexed)
    done = run(SCRIPT, "--retrievers", "bm25", "splade", "--corpus", "nowhere.jsonl", cwd=indexed)
    refused(done, before, indexed, "different corpora")

def test_an_index_that_is_not_there_is_refused(indexed, run, contents, refused):
    before = contents(indexed)
    refused(run(SCRIPT, "--retrievers", "dense", cwd=indexed), before, indexed, "index/dense")

@pytest.mark.parametrize(("row", "words"), [
    ("1\ty\t2\tnan", ["b.tsv:3:", "score"]),
    ("1\ty\t2\tinf", ["b.tsv:3:", "score"]),
    ("1\ty\t0\t0.1", ["b.tsv:3:", "rank"]),
    ("1\ty\tsecond\t0.1", ["b.tsv:3:", "rank"]),
    ("1\ty\t1.5\t0.1", ["b.tsv:3:", "rank"]),
    ("1\ty\t3\t0.1", ["b.tsv:3:", "gap"]),
    ("1\ty\t1\t0.1", ["b.tsv:3:", "tie"]),
    ("1\tx\t2\t0.1", ["b.tsv:3:", "stands twice"]),
    ("1\tq\t2\t0.1", ["b.tsv:3:", "unknown", "q"]),
])
def test_bad_runs_are_refused_by_line(toy, run, contents, refused, row, words):
    (toy / "corpus.jsonl").write_text("".join(f'{{"abstract_id": "{i}", "abstract": "t"}}\n' for i in "xyz"))
    tsv(toy / "a.tsv", RUN, [("1", "x", 1, 0.5)])
    (toy / "b.tsv").write_text("\t".join(RUN) + "\n1\tx\t1\t0.5\n" + row + "\n")
    before = contents(toy)
    done = run(SCRIPT, "fuse", "a.tsv", "b.tsv", "--corpus", "corpus.jsonl", "--out", "c.tsv", cwd=toy)
    refused(done, before, toy, *words)
