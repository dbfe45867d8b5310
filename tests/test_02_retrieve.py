"""02_retrieve.py: exact search, fusion."""

import json
from pathlib import Path
from types import SimpleNamespace

import bm25s
import layouts
import numpy as np
import pandas as pd
import pytest
import Stemmer
import torch
from conftest import ABSTRACTS, CLAIMS, RUN, cells, facts, load, read, tsv
from scipy import sparse
from sentence_transformers import SentenceTransformer, SparseEncoder

SCRIPT = "02_retrieve.py"
KIT = load(SCRIPT)
HYBRID = "work/demo/test/hybrid.tsv"


# ---------------------------------------------------------------- Search
@pytest.mark.parametrize("count, spread", [(1, 3), (39, 3), (4001, 3), (4001, 50), (4001, 999)])
def test_best_rows_equal_a_full_stable_sort(count, spread):
    scores = np.random.default_rng(count).integers(0, spread, count).astype(np.float32)
    ranking = np.argsort(-scores, kind="stable")
    for lowest in (-np.inf, 0):
        expected = ranking[scores[ranking] > lowest].tolist()
        for k in (1, 7, 250, 999, 1001, 9999):
            assert KIT.best_rows(scores, lowest, k).tolist() == expected[:k]


def test_every_retriever_equals_brute_force(toy, call):
    facts(call("01_index.py", cwd=toy))
    facts(call(SCRIPT, "--top-k 8", cwd=toy))
    index = toy / "work/demo/index"
    out = toy / "work/demo/test"
    claims = list(read(toy / "data/demo/claims.test.tsv")["claim"])
    dense = SentenceTransformer("data/models/minilm", device="cpu").encode(claims)
    splade = SparseEncoder("data/models/splade-tiny", device="cpu").encode_query(claims)
    how = {"stopwords": "english", "stemmer": Stemmer.Stemmer("english")}
    bm25 = bm25s.BM25()
    bm25.index(bm25s.tokenize(list(ABSTRACTS.values()), **how))
    for kind, scores in {
        "dense": dense @ np.load(index / "dense/embeddings.npy").T.astype(np.float32),
        "splade": splade.to_dense().numpy() @ sparse.load_npz(index / "splade/weights.npz").T,
        "bm25": map(bm25.get_scores, bm25s.tokenize(claims, return_ids=False, **how)),
    }.items():
        expected = []
        for claim_id, row in zip(("c3", "c4", "c5"), scores):
            best = KIT.best_rows(row, 0 if kind != "dense" else -1, 8)
            expected += [(claim_id, f"{n + 1:04}", k, row[n]) for k, n in enumerate(best, 1)]
        expected = pd.DataFrame(expected, columns=RUN).astype({"score": float})
        pd.testing.assert_frame_equal(read(out / f"{kind}.tsv"), expected, rtol=1e-4)
    facts(call(SCRIPT, "fuse --top-k 8 --out again.tsv", *out.glob("[bds]*.tsv"), cwd=toy))
    assert (toy / "again.tsv").read_bytes() == (out / "hybrid.tsv").read_bytes()
    assert "up to date" in call(SCRIPT, "--top-k 8", cwd=toy).stdout


def test_an_index_of_other_files_is_refused(toy, call, refused):
    """test_safe.py has one whose model has changed."""
    facts(call("01_index.py", "--indexes dense", cwd=toy))
    index = toy / "work/demo/index/dense"
    vectors = np.load(index / "embeddings.npy")
    vectors[1, 0] = np.nan
    np.save(index / "embeddings.npy", vectors)
    refused(toy, SCRIPT, said="index/dense: damaged, or without its sidecar")
    sidecar = Path(f"{index}.meta.json")
    made = json.loads(sidecar.read_text())
    sidecar.write_text(json.dumps(made | {"sha256": KIT.digest(index)}))
    refused(toy, SCRIPT, said="index/dense: scores are not finite")
    (toy / "data/demo/corpus.jsonl").open("a").write('{"abstract_id": "new"}\n')
    refused(toy, SCRIPT, said="index/dense: the corpus has changed")


def test_vectors_of_other_dimensions_and_equal_scores(toy, call, monkeypatch, capsys):
    layouts.bert(toy / "m")
    path = toy / "m/model.safetensors"
    weights = layouts.load_file(path)
    for part in ("weight", "bias"):
        weights[f"encoder.layer.1.output.LayerNorm.{part}"] *= 0
    layouts.save_file(weights, path, metadata={"format": "pt"})
    facts(call("01_index.py", "--indexes dense --dense-model m", cwd=toy))
    done = call(SCRIPT, cwd=toy)
    assert facts(done) and "all scores are equal for 3 of 3 claims" in done.stderr
    search = KIT.search_dense
    monkeypatch.setitem(search.__globals__, "encode_claims", lambda *_: torch.ones(1, 3))
    index = toy / "work/demo/index/dense"
    job = SimpleNamespace(job="retrieve", function=lambda _: list(search(index, {}, ["ice"], None)))
    with pytest.raises(SystemExit, match="2"):
        KIT.run_job(job)
    assert "error: retrieve: mat1 and mat2 shapes" in capsys.readouterr().err


def test_no_row_without_a_common_term_nor_outside_of_restrict(toy, call, refused):
    facts(call("01_index.py", "--indexes bm25 --analyser plain", cwd=toy))
    tsv(toy / "data/demo/claims.test.tsv", CLAIMS, "1|sea level; 2|xyzzy; 3|?!")
    done = call(SCRIPT, cwd=toy)
    assert "bm25.tsv: 3 rows, 3 claims, 2 without rows" in done.stdout
    assert facts(done)["made"] == ["work/demo/test/bm25.tsv"]  # the one index that is there
    whole = read(toy / "work/demo/test/bm25.tsv").set_index("abstract_id")["score"].to_dict()
    assert set(whole) == {"0002", "0007", "0009"}  # plain: "Sea" is another term than "sea"
    tsv(toy / "few.tsv", RUN, "1|0009|1|2.0; 1|0001|2|1.0; 2|0002|1|1")
    facts(call(SCRIPT, "--restrict few.tsv --out o", cwd=toy))
    assert read(toy / "o/bm25.tsv").values.tolist() == [["1", "0009", 1, whole["0009"]]]
    refused(toy, SCRIPT, "--restrict work/demo/test/hybrid.tsv", said="unknown claim_id: c3")
    refused(toy, SCRIPT, "--index nowhere", said="nowhere: no index; make one by 01")


# ---------------------------------------------------------------- Fusion
KIT.METHODS["least"] = KIT.Method(KIT.inverse_rank, np.nanmin, [0])  # one that users add
SD = np.std([9, 5, 1]), np.std([0.5, 0.3])


@pytest.mark.parametrize(
    "method, expected, alone",
    [
        ("rrf", {"a": 1 / 61 + 3 / 62, "b": 1 / 62, "c": 1 / 63 + 3 / 61}, 3 / 61),
        ("zscore", {"a": 8 / SD[0], "b": 4 / SD[0], "c": 3 * 0.2 / SD[1]}, 0),
        ("union", {"a": 3 / 2, "b": 1 / 2, "c": 3}, 3),
        ("least", {"a": 1, "b": 1 / 2, "c": 1 / 3}, 3),
    ],
)
def test_fusion_equals_the_arithmetic_by_hand(method, expected, alone):
    first = [("1", "a", 1, 9.0), ("1", "b", 2, 5.0), ("1", "c", 3, 1.0)]
    second = [("2", "d", 1, 2.0), ("1", "c", 1, 0.5), ("1", "a", 2, 0.3)]
    runs = [pd.DataFrame(rows, columns=RUN) for rows in (first, second)]
    fused = KIT.fuse_runs(runs, KIT.Fusion(method, 60, [1, 3]), [])
    assert dict(zip(fused["abstract_id"], fused["score"])) == pytest.approx(expected | {"d": alone})
    best = sorted(expected, key=expected.get, reverse=True)
    assert fused["abstract_id"].tolist() == [*best, "d"]


@pytest.mark.parametrize("ids, expected", cells("|zya; ayz|ayz"))
def test_equal_scores_have_the_z_score_0_and_ties_follow_the_corpus(ids, expected):
    ranks = (10, 1, 4), (4, 4, 10), (1, 10, 1)  # of z, y, a; in this order, their sums differ
    runs = [pd.DataFrame(zip("111", "zya", row, (7.1,) * 3), columns=RUN) for row in ranks]
    for method in ("rrf", "zscore"):
        fused = KIT.fuse_runs(runs, KIT.Fusion(method, 60, [1, 1, 1]), list(ids))
        assert "".join(fused["abstract_id"]) == expected
    assert fused["score"].tolist() == [0, 0, 0]


def test_fused_runs_are_of_the_same_claims(toy, call, refused):
    """But for a union; ids with quotation marks, which csv would double, pass through."""
    rows = {"a": 'c3|a"b|1|1', "b": 'c3|"c"|1|1; c4|0002|1|1', "c": "x9|0001|1|1"}
    for name, text in rows.items():
        tsv(toy / f"{name}.tsv", RUN, text)
    refused(toy, SCRIPT, "fuse a.tsv c.tsv", said="a.tsv, c.tsv: no claim in common")
    facts(call(SCRIPT, "fuse a.tsv c.tsv --method union --out u.tsv", cwd=toy))
    assert KIT.read_table(toy / "u.tsv", RUN)["claim_id"].tolist() == ["c3", "x9"]
    done = call(SCRIPT, "fuse a.tsv b.tsv --split train --out d.tsv", cwd=toy)
    assert "d.tsv: 3 rows, 2 claims, 0 without rows" in done.stdout
    assert done.stderr == "warning: a.tsv: 1 of 2 claims are not in it\n"
    found = KIT.read_table(toy / "d.tsv", RUN)["abstract_id"].tolist()
    assert found == ['a"b', '"c"', "0002"]
    done = call(SCRIPT, "fuse d.tsv --split dev --out e.tsv", cwd=toy)
    assert "d.tsv: it was made for the split train, this call is for dev" in done.stderr
