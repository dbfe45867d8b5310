"""02_retrieve.py: exact search, fusion."""

import json
import shutil
from pathlib import Path

import bm25s
import numpy as np
import pandas as pd
import pytest
import Stemmer
from conftest import ABSTRACTS, CLAIMS, KEY, RUN, TOY, facts, load, read, tsv
from scipy import sparse

SCRIPT = "02_retrieve.py"
KIT = load(SCRIPT)
HYBRID = "work/demo/test/hybrid.tsv"


# ---------------------------------------------------------------- Search
@pytest.mark.parametrize("count, spread", [(1, 3), (39, 3), (4001, 3), (4001, 50), (4001, 999)])
def test_best_rows_equal_a_full_stable_sort(count, spread):
    scores = np.random.default_rng(count).integers(0, spread, count).astype(np.float32)
    expected = np.argsort(-scores, kind="stable").tolist()
    for k in (1, 7, 250, 999, 1001, 9999):
        assert KIT.best_rows(scores, -np.inf, k).tolist() == expected[:k]
        above = [row for row in expected[:k] if scores[row] > 0]
        assert KIT.best_rows(scores, 0, k).tolist() == above


def seal(folder):
    """Have the sidecar of an index vouch for what is in it now."""
    path = Path(f"{folder}.meta.json")
    made = json.loads(path.read_text())
    path.write_text(json.dumps(made | {"sha256": KIT.digest(folder)}))


def test_every_retriever_equals_brute_force(toy, call, refused):
    from sentence_transformers import SentenceTransformer, SparseEncoder

    facts(call("01_index.py", cwd=toy))
    facts(call(SCRIPT, "--top-k 8", cwd=toy))
    index = toy / "work/demo/index"
    out = toy / "work/demo/test"
    models = toy / "data/models"
    claims = list(read(toy / "data/demo/claims.test.tsv")["claim"])
    dense = SentenceTransformer(str(models / "minilm"), device="cpu").encode(claims)
    splade = SparseEncoder(str(models / "splade-tiny"), device="cpu").encode_query(claims)
    postings = sparse.load_npz(index / "splade/weights.npz")
    vectors = np.load(index / "dense/embeddings.npy")
    how = {"stopwords": "english", "stemmer": Stemmer.Stemmer("english"), "show_progress": False}
    bm25 = bm25s.BM25()
    bm25.index(bm25s.tokenize(list(ABSTRACTS.values()), **how), show_progress=False)
    words = map(bm25.get_tokens_ids, bm25s.tokenize(claims, return_ids=False, **how))
    for kind, scores in {
        "dense": dense @ vectors.T.astype(np.float32),
        "splade": splade.to_dense().numpy() @ postings.T,
        "bm25": [bm25.get_scores_from_ids(ids) for ids in words],
    }.items():
        expected = []
        for claim, row in zip(("c3", "c4", "c5"), scores):
            best = [n for n in np.argsort(-row, kind="stable")[:8] if row[n] > 0 or kind == "dense"]
            expected += [(claim, f"{n + 1:04}", rank, row[n]) for rank, n in enumerate(best, 1)]
        expected = pd.DataFrame(expected, columns=RUN).astype({"score": float})
        pd.testing.assert_frame_equal(read(out / f"{kind}.tsv"), expected, rtol=1e-4)
    words = f"fuse {out}/bm25.tsv {out}/dense.tsv {out}/splade.tsv --top-k 8 --out again.tsv"
    facts(call(SCRIPT, words, cwd=toy))
    assert (toy / "again.tsv").read_bytes() == (out / "hybrid.tsv").read_bytes()
    assert "up to date" in call(SCRIPT, "--top-k 8", cwd=toy).stdout

    words = "--retrievers bm25 dense --out new"
    (toy / "data/demo/corpus.jsonl").open("a").write('{"abstract_id": "new"}\n')
    refused(toy, SCRIPT, words, said="index/bm25: the corpus has changed")
    shutil.copy(TOY / "corpus.jsonl", toy / "data/demo")
    meta = json.loads((index / "dense/meta.json").read_text())
    (index / "dense/meta.json").write_text(json.dumps(meta | {"model_sha256": "another"}))
    refused(toy, SCRIPT, words, said="index/dense: damaged, or without its sidecar; make it again")
    seal(index / "dense")
    refused(toy, SCRIPT, words, said="minilm: it has changed since the dense index was made")
    (index / "dense/meta.json").write_text(json.dumps(meta))
    vectors[1, 0] = np.nan
    np.save(index / "dense/embeddings.npy", vectors)
    seal(index / "dense")
    refused(toy, SCRIPT, words, said="index/dense: scores are not finite")


@pytest.fixture
def indexed(toy, call):
    """The toy with a BM25 index of words as they are, and three claims."""
    facts(call("01_index.py", "--indexes bm25 --analyser plain", cwd=toy))
    tsv(toy / "data/demo/claims.test.tsv", CLAIMS, "1|sea level; 2|xyzzy; 3|?!")
    return toy


def test_no_row_without_a_common_term_nor_outside_of_restrict(indexed, call, refused):
    done = call(SCRIPT, cwd=indexed)
    assert "bm25.tsv: 3 rows, 3 claims, 2 without rows" in done.stdout
    assert facts(done)["made"] == ["work/demo/test/bm25.tsv"]  # the one index that is there
    whole = read(indexed / "work/demo/test/bm25.tsv").set_index("abstract_id")["score"].to_dict()
    assert set(whole) == {"0002", "0007", "0009"}  # plain: "Sea" is another term than "sea"
    tsv(indexed / "few.tsv", RUN, "1|0009|1|2.0; 1|0001|2|1.0; 2|0002|1|1")
    facts(call(SCRIPT, "--restrict few.tsv --out o", cwd=indexed))
    assert read(indexed / "o/bm25.tsv").values.tolist() == [["1", "0009", 1, whole["0009"]]]
    refused(indexed, SCRIPT, "--restrict work/demo/test/hybrid.tsv", said="unknown claim_id: c3")


def test_without_an_index_one_line_says_how_to_make_one(indexed, refused):
    refused(indexed, SCRIPT, "--index nowhere", said="nowhere: no index; make one by 01")


# ---------------------------------------------------------------- Fusion
SD = np.std([9, 5, 1]), np.std([0.5, 0.3])


@pytest.mark.parametrize(
    "method, expected, alone",
    [
        ("rrf", {"a": 1 / 61 + 3 / 62, "b": 1 / 62, "c": 1 / 63 + 3 / 61}, 3 / 61),
        ("zscore", {"a": 8 / SD[0], "b": 4 / SD[0], "c": 3 * 0.2 / SD[1]}, 0),
        ("union", {"a": 3 / 2, "b": 1 / 2, "c": 3}, 3),
    ],
)
def test_fusion_equals_the_arithmetic_by_hand(method, expected, alone):
    first = [("1", "a", 1, 9.0), ("1", "b", 2, 5.0), ("1", "c", 3, 1.0)]
    second = [("2", "d", 1, 2.0), ("1", "c", 1, 0.5), ("1", "a", 2, 0.3)]
    runs = [pd.DataFrame(rows, columns=RUN) for rows in (first, second)]
    fused = KIT.fuse_runs(runs, KIT.Fusion(method, 60, [1, 3]), [])
    assert dict(zip(fused["abstract_id"], fused["score"])) == pytest.approx(expected | {"d": alone})
    best = sorted(expected, key=expected.get, reverse=True)
    assert list(zip(fused["claim_id"], fused["abstract_id"])) == [*zip("111", best), ("2", "d")]


@pytest.mark.parametrize("ids, expected", [([], "zya"), (list("ayz"), "ayz")])
def test_equal_scores_have_the_z_score_0_and_ties_follow_the_corpus(ids, expected):
    ranks = (10, 1, 4), (4, 4, 10), (1, 10, 1)  # of z, y, a; in this order, their sums differ
    runs = [pd.DataFrame(zip("111", "zya", row, (7.1,) * 3), columns=RUN) for row in ranks]
    for method in ("rrf", "zscore"):
        fused = KIT.fuse_runs(runs, KIT.Fusion(method, 60, [1, 1, 1]), ids)
        assert "".join(fused["abstract_id"]) == expected
    assert fused["score"].tolist() == [0, 0, 0]


def test_runs_of_other_claims_are_refused_and_missing_claims_are_counted(toy, call, refused):
    tsv(toy / "a.tsv", RUN, "c3|0001|1|1")
    tsv(toy / "b.tsv", RUN, "c3|0001|1|1; c4|0002|1|1")
    tsv(toy / "c.tsv", RUN, "x9|0001|1|1")
    refused(toy, SCRIPT, "fuse a.tsv c.tsv", said="a.tsv, c.tsv: no claim in common")
    done = call(SCRIPT, "fuse a.tsv b.tsv --out d.tsv", cwd=toy)
    assert facts(done) and "warning: a.tsv: 1 of 2 claims are not in it" in done.stderr
    assert "d.tsv: 2 rows, 2 claims, 0 without rows" in done.stdout
    assert json.loads((toy / "d.tsv.meta.json").read_text())["warnings"]


COMBMNZ = {  # Fox and Shaw 1994, over ranks: the sum of the points times how many runs have it
    "class Method(NamedTuple):": '''def count(terms, axis):
    """CombMNZ"""
    return np.nansum(terms, axis) * np.sum(~np.isnan(terms), axis)

class Method(NamedTuple):''',
    "METHODS = {": 'METHODS = {"combmnz": Method(inverse_rank, count, [0]),',
}


def test_a_method_in_the_registry_is_offered(toy, call):
    for name, ranks in {"a.tsv": "xyz", "b.tsv": "yx", "c.tsv": "zy"}.items():
        rows = [("c3", key, rank, 9 - rank) for rank, key in enumerate(ranks, 1)]
        tsv(toy / name, RUN, rows)
    words = "fuse a.tsv b.tsv c.tsv --method combmnz --out d.tsv"
    facts(call(SCRIPT, words, cwd=toy, edits=COMBMNZ))
    found = read(toy / "d.tsv").set_index("abstract_id")["score"].to_dict()
    assert found == pytest.approx({"x": 1.5 * 2, "y": 2.0 * 3, "z": (1 / 3 + 1) * 2})
    shown = call(SCRIPT, "fuse --help", cwd=toy, edits=COMBMNZ).stdout
    assert "combmnz: 1 / rank" in " ".join(shown.split())


def test_a_union_joins_runs_of_different_claims(toy, call, refused):
    tsv(toy / "en.tsv", RUN, "c1|a|1|9; c1|b|2|8")
    tsv(toy / "de.tsv", RUN, "c2|b|1|3")
    facts(call(SCRIPT, "fuse en.tsv de.tsv --method union --out o.tsv", cwd=toy))
    assert read(toy / "o.tsv")[KEY].to_numpy().tolist() == [["c1", "a"], ["c1", "b"], ["c2", "b"]]
    refused(toy, SCRIPT, "fuse en.tsv de.tsv", said="no claim in common")


def test_a_run_of_another_split_is_noticed(toy, call):
    tsv(toy / "a.tsv", RUN, "c1|a|1|9")
    facts(call(SCRIPT, "fuse a.tsv --split train --out b.tsv", cwd=toy))
    assert "warning" not in call(SCRIPT, "fuse b.tsv --split train --out c.tsv", cwd=toy).stderr
    said = "b.tsv: it was made for the split train, this call is for dev"
    assert said in call(SCRIPT, "fuse a.tsv b.tsv --split dev --out d.tsv", cwd=toy).stderr


def test_ids_with_quotation_marks_pass_through_all_runs(toy, call):
    """As read_table reads them; csv would double the marks in some stages and not in others."""
    tsv(toy / "a.tsv", RUN, 'c3|a"b|1|2.0; c3|"c"|2|1.0')
    facts(call(SCRIPT, "fuse a.tsv a.tsv --out b.tsv", cwd=toy))
    facts(call(SCRIPT, "fuse b.tsv b.tsv --out c.tsv", cwd=toy))
    assert KIT.read_table(toy / "c.tsv", RUN)["abstract_id"].tolist() == ['a"b', '"c"']
