"""02_retrieve.py: exact search, fusion, fitted weights, training examples."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import bm25s
import numpy as np
import pandas as pd
import pytest
import Stemmer
from conftest import ABSTRACTS, CLAIMS, KEY, QRELS, RUN, TOY, facts, jsonl, load, read, records, tsv
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


def test_a_method_in_the_registry_is_offered_and_fitted(toy, call):
    for name, ranks in {"a.tsv": "xyz", "b.tsv": "yx", "c.tsv": "zy"}.items():
        rows = [("c3", key, rank, 9 - rank) for rank, key in enumerate(ranks, 1)]
        tsv(toy / name, RUN, rows)
    tsv(toy / "q.tsv", QRELS, "c3|y|SUPPORTS")
    words = "fuse a.tsv b.tsv c.tsv --method combmnz --out d.tsv"
    facts(call(SCRIPT, words, cwd=toy, edits=COMBMNZ))
    found = read(toy / "d.tsv").set_index("abstract_id")["score"].to_dict()
    assert found == pytest.approx({"x": 1.5 * 2, "y": 2.0 * 3, "z": (1 / 3 + 1) * 2})
    words = "fit a.tsv b.tsv c.tsv --qrels q.tsv --out f.json --measure RR@5"
    done = call(SCRIPT, words, cwd=toy, edits=COMBMNZ)
    assert facts(done)["method"] == "combmnz"  # the first of equal ones
    shown = call(SCRIPT, "fuse --help", cwd=toy, edits=COMBMNZ).stdout
    assert "combmnz: 1 / rank" in " ".join(shown.split())


def test_a_fitted_fusion_is_the_best_of_the_grid_and_is_applied_elsewhere(toy, call, refused):
    tsv(toy / "a.tsv", RUN, "c1|x|1|9; c1|a|2|8; c1|b|3|7; c2|d|1|5; c2|c|2|4")
    tsv(toy / "b.tsv", RUN, "c1|y|1|4; c1|a|2|3; c2|c|1|2; c2|d|2|1")
    judged = "c1|a|SUPPORTS; c1|q|REFUTES; c2|c|SUPPORTS; c2|d|NEI; c3|z|REFUTES; c4|x|NEI"
    tsv(toy / "q.tsv", QRELS, judged)
    done = call(SCRIPT, "fit a.tsv b.tsv --qrels q.tsv --out f.json", cwd=toy)
    fusion = facts(done)
    ideal = 1 + 1 / np.log2(3)  # c1 has two, c3 is in no run, c4 has none
    assert fusion["value"] == pytest.approx((1 / ideal + 1) / 3)
    assert sum(fusion["weights"]) == pytest.approx(1) and fusion["runs"] == ["a.tsv", "b.tsv"]
    lines = done.stdout.splitlines()
    # a.tsv has a at rank 2 and c at rank 2, b.tsv has a at rank 2 and c at rank 1
    second_rank = 1 / np.log2(3)
    assert lines[0] == f"{(second_rank / ideal + second_rank) / 3:.4f}  a.tsv alone"
    assert lines[1] == f"{(second_rank / ideal + 1) / 3:.4f}  b.tsv alone"
    assert lines[2].endswith("  rrf, k = 60, equal weights")
    assert f"{(1 / ideal + 1) / 3:.4f}  rrf, k = 1, weights 0.4 0.6" in lines
    assert "union" not in done.stdout and len(lines) == 3 + 10 + 3
    assert lines[-3] == "These are means over 3 claims." and fusion["claims"] == 3
    # One of three claims is held out each time, as folds are more than claims.
    assert "  in 5-fold cross-validation over 3 claims; " in lines[-2]
    assert fusion["held_out_value"] <= fusion["value"]
    # c4 was judged, but has no evidence: it is in the qrels, and both runs lack c3 and c4
    assert done.stderr.count("warning: ") == 2 and "q.tsv" not in done.stderr
    facts(call(SCRIPT, "fuse a.tsv b.tsv --fusion f.json --out c.tsv", cwd=toy))
    runs = [read(toy / name) for name in ("a.tsv", "b.tsv")]
    fitted = KIT.Fusion(fusion["method"], fusion["rrf_k"], fusion["weights"])
    by_hand = KIT.fuse_runs(runs, fitted, [])
    assert read(toy / "c.tsv")["score"].tolist() == pytest.approx(by_hand["score"].tolist())
    shutil.copy(toy / "b.tsv", toy / "n.tsv")
    jsonl(toy / "other.json", {"runs": ["a.tsv", "n.tsv"]})
    for fusion, said in {
        "f.json": "f.json: it is for a.tsv, b.tsv",
        "a.tsv": "a.tsv: no fusion; make one by 02_retrieve.py fit",
        "other.json": "other.json: no fusion",
    }.items():
        refused(toy, SCRIPT, f"fuse a.tsv n.tsv --fusion {fusion}", said=said)


@pytest.mark.parametrize("measure", ["MAP", "nDCG", "RR", "Bpref"])
def test_a_measure_without_a_cutoff_is_fitted_on_all_ranks(toy, call, measure):
    far = [("c3", f"n{rank}", rank, -rank) for rank in range(1, 200)]
    tsv(toy / "a.tsv", RUN, [*far, ("c3", "y", 200, -200)])
    tsv(toy / "q.tsv", QRELS, "c3|y|SUPPORTS; c3|n1|NEI")
    words = f"fit a.tsv --qrels q.tsv --out f.json --measure {measure}"
    value = {"MAP": 1 / 200, "RR": 1 / 200, "nDCG": 1 / np.log2(201), "Bpref": 0}
    fusion = facts(call(SCRIPT, words, cwd=toy))
    assert fusion["value"] == pytest.approx(value[measure])


def test_a_fit_ranks_ties_as_a_fusion_does():
    rng = np.random.default_rng(0)
    runs = []
    for _ in range(3):
        rows = []
        for claim in (f"c{n}" for n in range(20)):
            names = rng.permutation([f"d{n}" for n in range(9)])
            rows += [(claim, name, rank, 1 / rank) for rank, name in enumerate(names, 1)]
        runs.append(pd.DataFrame(rows, columns=RUN))
    pairs = [(f"c{n}", name) for n in range(20) for name in ("d3", "d7")]
    evidence = pd.DataFrame(pairs, columns=KEY).assign(label="SUPPORTS")
    found = KIT.try_fusions(runs, KIT.scorer_of("MRR@9", evidence))
    claims = [f"c{n}" for n in range(20)]
    for fusion in list(found)[::9]:
        fused = KIT.fuse_runs(runs, fusion, [])
        hits = fused["abstract_id"].isin(["d3", "d7"]).to_numpy().reshape(20, 9)
        by_claim = dict(zip(fused["claim_id"].unique(), 1 / (hits.argmax(axis=1) + 1)))
        wanted = [by_claim[claim_id] for claim_id in sorted(claims)]
        assert found[fusion] == pytest.approx(wanted)
    weights = KIT.weight_grid(3)
    assert len(weights) == 66 and np.allclose(weights.sum(axis=1), 1)
    assert {fusion.method for fusion in found} == {"zscore", "rrf"}  # union has no weights
    chosen = list(found)[3:5]
    again = KIT.try_fusions(runs, KIT.scorer_of("MRR@9", evidence), chosen)
    assert list(again) == chosen and (again[chosen[0]] == found[chosen[0]]).all()


def test_the_value_of_a_held_out_claim_is_that_of_the_fusion_that_others_choose():
    values = np.array([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0], [0.6, 0.6, 0.6, 0.6]])
    # Four folds of a claim: of the three other claims, two like one of the first two fusions (sum
    # 2, against 1.8), and this one gives the claim that is held out 0.
    assert KIT.held_out_value(dict(enumerate(values)), 4, seed=1) == 0


def test_with_many_claims_the_best_fusions_of_some_are_compared_on_all(toy, call):
    rng = np.random.default_rng(1)
    claims = [f"t{n:02}" for n in range(40)]
    for name in ("a.tsv", "b.tsv"):
        rows = []
        for claim in claims:
            abstracts = rng.permutation(list("uvwxyz"))
            rows += [(claim, key, rank, 9 - rank) for rank, key in enumerate(abstracts, 1)]
        tsv(toy / name, RUN, rows)
    tsv(toy / "q.tsv", QRELS, [(claim, "x", "SUPPORTS") for claim in claims])
    words = "fit a.tsv b.tsv --qrels q.tsv --out {} --measure RR@3"
    whole = facts(call(SCRIPT, words.format("f.json"), cwd=toy))
    edits = {"COMPARED = 500": "COMPARED = 25"}
    done = call(SCRIPT, words.format("g.json"), cwd=toy, edits=edits)
    assert "all fusions: on 25 claims; the best 30 of them: on all" in done.stdout
    assert facts(done)["value"] == pytest.approx(whole["value"])


def test_a_fusion_knows_its_runs_by_their_place_below_the_split(toy, call, refused):
    for split in ("dev", "test"):
        for name in ("x/run.tsv", "y/run.tsv"):
            tsv(toy / "work/demo" / split / name, RUN, "c1|a|1|9; c1|b|2|8")
    tsv(toy / "q.tsv", QRELS, "c1|a|SUPPORTS")
    runs = "work/demo/{0}/x/run.tsv work/demo/{0}/y/run.tsv"
    fusion = facts(call(SCRIPT, f"fit {runs.format('dev')} --qrels q.tsv --out f.json", cwd=toy))
    assert fusion["runs"] == ["x/run.tsv", "y/run.tsv"]
    facts(call(SCRIPT, f"fuse {runs.format('test')} --fusion f.json --out o.tsv", cwd=toy))
    other = "work/demo/test/y/run.tsv work/demo/test/x/run.tsv"
    refused(toy, SCRIPT, f"fuse {other} --fusion f.json", said="f.json: it is for x/run.tsv, y")


def test_each_language_gets_a_fusion_of_its_own(toy, call, refused):
    """One run is right in German, the other in English."""
    good = "|x|1|9; {0}|y|2|8"
    bad = "|y|1|9; {0}|x|2|8"
    languages = {"c1": "de", "c2": "de", "c3": "en", "c4": "en", "c5": "en"}
    for name, known in (("a.tsv", "de"), ("b.tsv", "en")):
        rows = [
            claim + (good if language == known else bad).format(claim)
            for claim, language in languages.items()
        ]
        tsv(toy / name, RUN, "; ".join(rows))
    tsv(toy / "q.tsv", QRELS, [(claim, "x", "SUPPORTS") for claim in languages])
    header = ["claim_id", "claim", "language", "year"]
    years = {"de": 2025, "en": 2026}  # numbers, which JSON has as texts
    claims = [(claim, "text", code, years[code]) for claim, code in languages.items()]
    tsv(toy / "c.tsv", header, claims)
    words = "fit a.tsv b.tsv --qrels q.tsv --measure RR@5 --out f.json --claims c.tsv"
    assert facts(call(SCRIPT, words, cwd=toy))["value"] < 1
    facts(call(SCRIPT, f"{words} --by year", cwd=toy))
    facts(call(SCRIPT, "fuse a.tsv b.tsv --fusion f.json --claims c.tsv --out o.tsv", cwd=toy))
    done = call(SCRIPT, f"{words} --by language", cwd=toy)
    fusion = facts(done)
    assert list(fusion["groups"]) == ["de", "en"] and fusion["value"] == 1
    assert "1.0000  in all 2 groups, 5 claims\n1.0000  in cross-validation" in done.stdout
    words = "fuse a.tsv b.tsv --fusion f.json --claims {} --out o.tsv"
    facts(call(SCRIPT, words.format("c.tsv"), cwd=toy))
    fused = read(toy / "o.tsv")
    first = fused[fused["rank"] == 1]
    assert dict(first[KEY].to_numpy().tolist()) == dict.fromkeys(languages, "x")
    german = fusion["groups"]["de"]
    runs = [read(toy / name)[:4] for name in ("a.tsv", "b.tsv")]
    fitted = KIT.Fusion(german["method"], german["rrf_k"], german["weights"])
    by_hand = KIT.fuse_runs(runs, fitted, [])
    assert fused[:4]["score"].tolist() == pytest.approx(by_hand["score"].tolist())
    english = "c3|x|1|9; c3|y|2|8"
    for name in ("a.tsv", "b.tsv"):
        tsv(toy / "test" / name, RUN, english)  # no claim in German
    facts(call(SCRIPT, words.format("c.tsv").replace("a.tsv b", "test/a.tsv test/b"), cwd=toy))
    assert read(toy / "o.tsv")["abstract_id"].tolist() == ["x", "y"]
    tsv(toy / "d.tsv", header[:3], "c1|text|de")
    words_of_fit = "fit a.tsv b.tsv --qrels q.tsv --by language --claims d.tsv"
    refused(toy, SCRIPT, words_of_fit, said="d.tsv: no claim c2, which is in q.tsv")
    tsv(toy / "d.tsv", header[:3], "c1|text|de; c2|text|fr; c3|text|en; c4|text|en; c5|text|en")
    refused(toy, SCRIPT, words.format("d.tsv"), said="claim c2: the language 'fr' was not fitted")
    said = "claims.test.tsv:1: found columns claim_id, claim; wanted claim_id, language"
    refused(toy, SCRIPT, words.format("data/demo/claims.test.tsv"), said=said)


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


# ---------------------------------------------------------------- Training examples
def test_examples_by_hand():
    rng = np.random.default_rng(0)
    draw = KIT.draw
    assert draw("abcd", 2, "best", rng) == "ab" and draw("abcd", 2, "worst", rng) == "dc"
    assert len({tuple(draw("abcd", 2, "random", rng)) for _ in range(300)}) == 4 * 3
    assert sorted(draw("abcd", 9, "random", rng, {"b"})) == list("acd")
    args = SimpleNamespace(shape="pairs", hard=1, easy=1, draw="best")
    negatives = KIT.Negatives(["x", "y"], ["z", "x", "p"], {"x", "y", "p"})

    def rows(examples_of, *evidence):
        examples = examples_of("c", list(evidence), negatives, rng, args)
        return [tuple(example.values()) for example in examples]

    assert rows(KIT.draw_pairs, "p", "q") == [
        ("evidence", "c", "p", 1),
        ("evidence", "c", "q", 1),
        ("hard", "c", "x", 0),
        ("easy", "c", "z", 0),
    ]
    vars(args).update(shape="labels", draw="worst")  # as many with evidence as without
    expected = [("hard", "c", "y", "NEI"), ("easy", "c", "z", "NEI")]
    assert rows(KIT.draw_pairs, "p", "q") == rows(KIT.draw_pairs) == expected
    args.shape = "tuples"
    assert rows(KIT.draw_tuples, "p") == [("evidence", "c", "p", ["y", "z"])]


MINES = [
    ("--hard 2 --easy 9 --from-top 3", {"hard": 3}),
    ("--shape labels --hard 3", {"hard": 9}),
    ("--shape tuples --hard 2 --easy 3", {"evidence": 6}),
    ("--pool nei --hard 9", {"hard": 6}),
    ("--shape tuples --pool nei --hard 0 --easy 9", {"evidence": 6}),
    ("--pool unjudged --easy 2", {"hard": 9}),
]


@pytest.mark.parametrize("words, kinds", MINES)
def test_evidence_is_no_negative_and_no_draw_depends_on_other_claims(toy, call, words, kinds):
    table = read(toy / "data/demo/qrels.test.tsv")
    seen = []
    mine = f"mine {words} --qrels q.tsv --split test --out x.jsonl --force"
    for judged in (table, table, table[table["claim_id"] != "c4"]):
        tsv(toy / "q.tsv", judged, judged.values)
        made = facts(call(SCRIPT, mine, cwd=toy))
        seen.append(records(toy / "x.jsonl"))
    relevant = set(map(tuple, table[table["label"] != "NEI"][KEY].values))
    drawn = set()
    for row in seen[0]:
        negatives = row.get("negatives", [])
        if "abstract_id" in row and row["kind"] != "evidence":
            negatives = [row["abstract_id"]]
        drawn |= {(row["claim_id"], abstract_id) for abstract_id in negatives}
    assert drawn and not drawn & relevant and seen[0] == seen[1]
    assert kinds.items() <= pd.DataFrame(seen[0])["kind"].value_counts().to_dict().items()
    if "--pool nei" in words:  # of any claim, the own one too
        nei = set(map(tuple, table[table["label"] == "NEI"][KEY].values))
        assert {name for _, name in drawn} == {name for _, name in nei}
        assert drawn >= {pair for pair in nei if pair[0] in dict(relevant)}
    else:
        assert seen[2] == [row for row in seen[0] if row["claim_id"] != "c4"]
    assert set(made) >= {"examples", "claims_without_evidence"}


@pytest.mark.parametrize(
    ("shape", "kinds", "skipped"),
    [
        # of each of the two judged claims, 3 from the run and 1 from the rest of the corpus
        ("labels", {"hard": 2 * 3, "easy": 2 * 1}, 1),
        # of the one claim with evidence
        ("pairs", {"evidence": 2, "hard": 3, "easy": 1}, 2),
        ("tuples", {"evidence": 2}, 2),
    ],
)
def test_labels_alone_have_claims_without_evidence(toy, call, shape, kinds, skipped):
    """The run has six abstracts of each claim; c5 is not judged."""
    tsv(toy / "q.tsv", QRELS, "c3|0001|SUPPORTS; c3|0002|REFUTES; c4|0006|NEI")
    words = "mine --split test --qrels q.tsv --out x.jsonl --hard 3 --easy 1 --shape"
    made = facts(call(SCRIPT, f"{words} {shape}", cwd=toy))
    assert made["claims_without_evidence"] == skipped
    rows = pd.DataFrame(records(toy / "x.jsonl"))
    assert rows["kind"].value_counts().to_dict() == kinds
    if shape == "labels":
        assert (rows["claim_id"].value_counts() == 4).all()
        assert set(rows["label"]) == {"NEI"}


def test_easy_negatives_come_from_the_corpus_and_repeat_no_hard_one(toy, call):
    tsv(toy / "r.tsv", RUN, [("c3", f"{n:04}", n, 100 - n) for n in range(1, 5)])
    tsv(toy / "q.tsv", QRELS, "c3|0012|SUPPORTS")
    words = "mine r.tsv --qrels q.tsv --out x.jsonl --easy 9 --hard 3 --skip-top 1"
    facts(call(SCRIPT, words, cwd=toy))
    kinds = {"hard": set(), "easy": set(), "evidence": set()}
    for row in records(toy / "x.jsonl"):
        kinds[row["kind"]].add(row["abstract_id"])
    assert kinds["hard"] == {"0002", "0003", "0004"}
    assert kinds["easy"] == {f"{n:04}" for n in range(5, 12)}  # 12 in all, 4 on top, 1 evidence


@pytest.mark.parametrize(
    ("rule", "name", "count", "hard"),
    [
        ("--skip-top 2", "skip_top", 4, {"0003", "0004", "0005"}),
        ("--max-score 8", "max_score", 3, {"0003", "0004", "0005"}),
        ("--margin 2", "margin", 2, {"0003", "0004", "0005"}),  # evidence has 9: up to 7
        ("--relative-margin 0.7", "relative_margin", 3, {"0004", "0005"}),  # up to 6.3
    ],
)
def test_likely_evidence_is_no_negative(toy, call, rule, name, count, hard):
    run = [("c3", f"{n:04}", n, [10, 9, 7, 6, 5][n - 1]) for n in range(1, 6)]
    tsv(toy / "r.tsv", RUN, [*run, ("c5", "0001", 1, 10), ("c5", "0003", 2, 1)])
    tsv(toy / "q.tsv", QRELS, "c3|0002|SUPPORTS; c5|0009|REFUTES")
    words = f"mine r.tsv --qrels q.tsv --out x.jsonl --hard 9 {rule}"
    made = facts(call(SCRIPT, words, cwd=toy))
    assert made["left_out"] == dict.fromkeys(made["left_out"], 0) | {name: count}
    rows = [row for row in records(toy / "x.jsonl") if row["kind"] == "hard"]
    assert {row["abstract_id"] for row in rows if row["claim_id"] == "c3"} == hard


def test_without_rules_negative_scores_leave_nothing_out(toy, call):
    tsv(toy / "r.tsv", RUN, "c3|0001|1|-1.0; c3|0002|2|-2.0; c3|0003|3|-3.0")
    tsv(toy / "q.tsv", QRELS, "c3|0003|SUPPORTS")
    words = "mine r.tsv --qrels q.tsv --out x.jsonl --hard 2"
    made = facts(call(SCRIPT, words, cwd=toy))
    assert made["examples"] == 3 and set(made["left_out"].values()) == {0}
    words += " --shape scores --middle 0 --scale 1 --skip-top 2"
    assert facts(call(SCRIPT, words, cwd=toy))["examples"] == 3
    assert all(row["target"] == 0 for row in records(toy / "x.jsonl"))


@pytest.mark.parametrize("scores", ["-1.0", "fused"])
def test_a_share_of_a_score_needs_a_scale(toy, call, refused, scores):
    tsv(toy / "r.tsv", RUN, f"c3|0001|1|1.0; c3|0002|2|{scores.replace('fused', '0.5')}")
    tsv(toy / "q.tsv", QRELS, "c3|0002|SUPPORTS")
    if scores == "fused":
        facts(call(SCRIPT, "fuse r.tsv r.tsv --out r2.tsv", cwd=toy))
        (toy / "r2.tsv").rename(toy / "r.tsv")
        (toy / "r2.tsv.meta.json").rename(toy / "r.tsv.meta.json")
    words = "mine r.tsv --qrels q.tsv --out x.jsonl --relative-margin 0.9"
    refused(toy, SCRIPT, words, said="r.tsv is a fusion or has negative scores")


def test_a_fusion_is_known_by_its_job_or_its_name(toy, call, refused):
    tsv(toy / "r.tsv", RUN, "c3|0001|1|1.0; c3|0002|2|0.5")
    tsv(toy / "q.tsv", QRELS, "c3|0002|SUPPORTS")
    jsonl(toy / "r.tsv.meta.json", {"arguments": {"job": "retrieve", "split": "fuse"}})
    words = "mine {} --qrels q.tsv --out x.jsonl --relative-margin 0.9"
    facts(call(SCRIPT, words.format("r.tsv"), cwd=toy))
    (toy / "r.tsv").rename(toy / "hybrid.tsv")
    refused(toy, SCRIPT, words.format("hybrid.tsv"), said="hybrid.tsv is a fusion")


def test_a_file_without_examples_is_not_written(toy, refused):
    tsv(toy / "q.tsv", QRELS, "c3|0001|NEI")
    words = "mine --hard 0 --qrels q.tsv --split test --out x.jsonl"
    refused(toy, SCRIPT, words, said="q.tsv: none of its 1 claims gives an example")


def test_ids_with_quotation_marks_pass_through_all_runs(toy, call):
    """As read_table reads them; csv would double the marks in some stages and not in others."""
    tsv(toy / "a.tsv", RUN, 'c3|a"b|1|2.0; c3|"c"|2|1.0')
    facts(call(SCRIPT, "fuse a.tsv a.tsv --out b.tsv", cwd=toy))
    facts(call(SCRIPT, "fuse b.tsv b.tsv --out c.tsv", cwd=toy))
    assert KIT.read_table(toy / "c.tsv", RUN)["abstract_id"].tolist() == ['a"b', '"c"']


def test_scores_as_targets_with_gold_evidence(toy, call, refused):
    tsv(toy / "q.tsv", QRELS, "c3|0001|SUPPORTS; c5|0009|NEI")
    words = "mine --qrels q.tsv --split test --out x.jsonl --shape scores --gold --from-top 2"
    refused(toy, SCRIPT, words, said="--shape scores: it needs --middle and --scale")
    assert facts(call(SCRIPT, f"{words} --middle 0.6 --scale 2", cwd=toy))["examples"] == 7
    assert [tuple(row.values()) for row in records(toy / "x.jsonl")][:3] == [
        ("score", "c3", "0003", 1),
        ("score", "c3", "0002", 0.3),
        ("evidence", "c3", "0001", 1),
    ]
