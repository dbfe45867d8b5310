"""02_retrieve.py: exact search, fusion, examples; and what the blocks of all scripts refuse."""
import gzip
import hashlib
import json
import signal
import subprocess
import sys
import zlib
from types import SimpleNamespace

import bm25s
import numpy as np
import pandas as pd
import pytest
import Stemmer
from conftest import ABSTRACTS, KEY, ROOT, RUN, cases, facts, load, read, records, tsv
from filelock import FileLock
from scipy import sparse

SCRIPT = "02_retrieve.py"
KIT = load(SCRIPT)

def refusal(capsys, function, *args, **known):
    with pytest.raises(SystemExit) as end:
        function(*args, **known)
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
    return error

def marked(meta):
    """Return a meta.json with the digest of itself, as 01_index.py writes it."""
    text = json.dumps(meta, sort_keys=True)
    return meta | {"sha256": hashlib.sha256(text.encode()).hexdigest()}

@pytest.mark.parametrize(("count", "spread"), [(1, 3), (39, 3), (4001, 3), (4001, 50), (4001, 999)])
def test_top_k_equals_a_full_stable_sort(count, spread):
    scores = np.random.default_rng(count).integers(0, spread, count).astype(np.float32)
    expected = np.argsort(-scores, kind="stable").tolist()
    for k in (1, 7, 250, 999, 1001, 9999):
        assert KIT.top_k(scores, k).tolist() == expected[:k]

def test_inner_products_equal_float64_across_blocks_of_claims_and_rows():
    import torch
    inner_products, rng = KIT.inner_products, np.random.default_rng(11)
    vectors, queries = rng.normal(size=(70_000, 8)).astype(np.float16), rng.normal(size=(300, 8))
    found = inner_products(torch.from_numpy(vectors), torch.from_numpy(queries).float())
    np.testing.assert_allclose(list(found), queries @ vectors.astype(float).T, atol=1e-4)

def test_every_retriever_equals_brute_force_and_bad_vectors_are_refused(toy, call, refused):
    from sentence_transformers import SentenceTransformer, SparseEncoder
    facts(call("01_index.py", "--dense-model", "data/models/minilm", cwd=toy))
    facts(call(SCRIPT, "--top-k", 8, cwd=toy))
    index, out, models = toy / "work/demo/index", toy / "work/demo/test", toy / "data/models"
    claims = list(read(toy / "data/demo/claims.test.tsv")["claim"])
    dense = SentenceTransformer(str(models / "minilm"), device="cpu").encode(claims)
    splade = SparseEncoder(str(models / "splade-tiny"), device="cpu").encode_query(claims)
    parts = tuple(np.load(index / f"splade/{name}.npy") for name in ("data", "indices", "indptr"))
    how = {"stopwords": "english", "stemmer": Stemmer.Stemmer("english"), "show_progress": False}
    bm25 = bm25s.BM25()
    bm25.index(bm25s.tokenize(list(ABSTRACTS.values()), **how), show_progress=False)
    words = map(bm25.get_tokens_ids, bm25s.tokenize(claims, return_ids=False, **how))
    vectors, path = np.load(index / "dense/embeddings.npy"), index / "dense/meta.json"
    for kind, scores in {
            "dense": dense @ vectors.T.astype(np.float32),
            "splade": splade.to_dense().numpy() @ sparse.csc_matrix(parts, (12, 30_522)).T,
            "bm25": [bm25.get_scores_from_ids(ids) for ids in words]}.items():
        expected = []
        for claim, row in zip(("c3", "c4", "c5"), scores):
            best = [n for n in np.argsort(-row, kind="stable")[:8] if row[n] > 0 or kind == "dense"]
            expected += [(claim, f"{n + 1:04}", rank, row[n]) for rank, n in enumerate(best, 1)]
        expected = pd.DataFrame(expected, columns=RUN).astype({"score": float})
        pd.testing.assert_frame_equal(read(out / f"{kind}.tsv"), expected, rtol=1e-4)
    runs = [out / f"{kind}.tsv" for kind in ("bm25", "dense", "splade")]
    words = ("--top-k", 8, "--corpus", "data/demo/corpus.jsonl", "--out", "again.tsv")
    facts(call(SCRIPT, "fuse", *runs, *words, cwd=toy))
    assert (toy / "again.tsv").read_bytes() == (out / "hybrid.tsv").read_bytes()

    vectors[[1, 4, 9], 0] = np.nan, np.inf, -np.inf
    np.save(index / "dense/embeddings.npy", vectors)
    data, meta = (index / "dense/embeddings.npy").read_bytes(), json.loads(path.read_text())
    meta["files"]["embeddings.npy"] = [len(data), zlib.crc32(data)]
    del meta["sha256"]
    again = "make it again: python 01_index.py --dense-model data/models/minilm --force"
    refused(toy, SCRIPT, "--retrievers", "dense", "--out", "new", said=again)
    (index / "dense.meta.json").unlink()
    for model, words, said in (  # of a wrong model is known before BM25's run is written
            ("minilm", ["dense"], "3 of 12 scores are NaN"),
            ("splade-tiny", ["bm25", "dense"], "not the model")):
        path.write_text(json.dumps(marked(meta | {"model": f"data/models/{model}"})))
        refused(toy, SCRIPT, "--retrievers", *words, "--out", "new", said=said)

@pytest.mark.parametrize("method", ["lucene", "robertson"])
def test_no_row_without_a_common_term_nor_outside_of_restrict(toy, call, method):
    words = ("--indexes", "bm25", "--analyser", "plain", "--bm25-method", method)
    facts(call("01_index.py", *words, cwd=toy))
    claims = [("1", "sea level"), ("2", "xyzzy"), ("3", "?!")]
    tsv(toy / "data/demo/claims.test.tsv", ["claim_id", "claim"], claims)
    words = ("--retrievers", "bm25", "--top-k", 99)
    assert "3 rows, 3 claims, 2 of them without rows" in call(SCRIPT, *words, cwd=toy).stdout
    whole = read(toy / "work/demo/test/bm25.tsv").set_index("abstract_id")["score"].to_dict()
    assert set(whole) == {"0002", "0007", "0009"}  # plain: "Sea" is another term than "sea"
    tsv(toy / "few.tsv", RUN, [("1", "0009", 1, 2.0), ("1", "0001", 2, 1.0), ("2", "0002", 1, 1)])
    facts(call(SCRIPT, *words, "--restrict", "few.tsv", "--out", "o", cwd=toy))
    assert read(toy / "o/bm25.tsv").values.tolist() == [["1", "0009", 1, whole["0009"]]]

def test_feedback_by_hand():
    documents = sparse.csr_array(np.array([[2, 1, 0, 0], [0, 3, 1, 0]]))
    terms, weights = KIT.rm3([0, 2, 2], documents, np.array([2, 1]))  # of all: 2 * 2, 2 + 3, 1
    assert terms.tolist() == [0, 1, 2]
    by_hand = [0.7 / 3 + 0.3 * 4 / 10, 0.3 * 5 / 10, 2 * 0.7 / 3 + 0.3 * 1 / 10]
    np.testing.assert_allclose(weights, by_hand)
    documents = sparse.csr_array(np.arange(1, 41).reshape(1, 40))
    terms, weights = KIT.rm3([0], documents, np.array([1]))
    assert terms.tolist() == [0, *range(10, 40)]  # the claim's own and the 30 likeliest
    assert weights[0] == 0.7 and weights[1:].sum() == pytest.approx(0.3)

def test_feedback_finds_abstracts_that_share_no_term_with_the_claim(toy, call, refused):
    facts(call("01_index.py", "--indexes", "bm25", cwd=toy))
    claims = [("1", "sea level"), ("2", "xyzzy")]
    tsv(toy / "data/demo/claims.test.tsv", ["claim_id", "claim"], claims)
    words = ("--retrievers", "bm25", "--feedback", 2)
    done = call(SCRIPT, *words, cwd=toy)
    assert "bm25-rm3.tsv: " in done.stdout and "2 claims, 1 of them without rows" in done.stdout
    plain, more = (read(toy / f"work/demo/test/{name}.tsv") for name in ("bm25", "bm25-rm3"))
    assert set(plain["abstract_id"]) < set(more["abstract_id"]) and set(more["claim_id"]) == {"1"}
    refused(toy, SCRIPT, "--retrievers", "dense", "--feedback", 2, said="--feedback")

@pytest.mark.parametrize(("name", "data"), [
    ("a", b"changed!!"), ("a", b"short"), ("a", b""), ("a", None), ("meta.json", b""),
    ("meta.json", b"[1]"), ("meta.json", b"null"), ("meta.json", b"[" * 100_000),
    ("meta.json", b'{"corpus": "sha", "files": {}, "sha256": "0"}'),
    ("meta.json", b'{"corpus": "another", "files": {}}')])
def test_a_damaged_index_or_one_of_another_corpus_is_refused(capsys, tmp_path, name, data):
    folder, open_index = tmp_path / "bm25", KIT.open_index
    folder.mkdir()
    (folder / "a").write_bytes(b"as it was")
    meta = {"corpus": "sha", "files": {"a": [9, zlib.crc32(b"as it was")]}}
    (folder / "meta.json").write_text(json.dumps(marked(meta)))
    args = SimpleNamespace(data="d", work="w", corpus="c", index=str(tmp_path))
    assert open_index(folder, "sha", args) == meta
    (folder / name).unlink() if data is None else (folder / name).write_bytes(data)
    again = f"01_index.py --indexes bm25 --data d --work w --corpus c --out {tmp_path} --force\n"
    assert again in refusal(capsys, open_index, folder, "sha", args)

SD = np.std([9, 5, 1]), np.std([0.5, 0.3])

@pytest.mark.parametrize(("method", "expected", "alone"), [
    ("rrf", {"a": 1 / 61 + 3 / 62, "b": 1 / 62, "c": 1 / 63 + 3 / 61}, 3 / 61),
    ("zscore", {"a": 8 / SD[0], "b": 4 / SD[0], "c": 3 * 0.2 / SD[1]}, 0),
    ("union", {"a": 3 / 2, "b": 1 / 2, "c": 3}, 3), ("top", {"a": 9, "b": 5, "c": 1.5}, 6)])
def test_fusion_equals_the_arithmetic_by_hand(method, expected, alone):
    first = [("1", "a", 1, 9.0), ("1", "b", 2, 5.0), ("1", "c", 3, 1.0)]
    second = [("2", "d", 1, 2.0), ("1", "c", 1, 0.5), ("1", "a", 2, 0.3)]
    runs = [pd.DataFrame(rows, columns=RUN) for rows in (first, second)]
    fused = KIT.fuse_runs(runs, [1, 3], method, 60, {})
    assert dict(zip(fused["abstract_id"], fused["score"])) == pytest.approx(expected | {"d": alone})
    best = sorted(expected, key=expected.get, reverse=True)
    assert list(zip(fused["claim_id"], fused["abstract_id"])) == [*zip("111", best), ("2", "d")]

@pytest.mark.parametrize("scores", [(0.1 + 1e-17, 0.1), (7, 7), (0, 0), (1e9 + 0.1, 1e9)])
def test_z_scores_do_not_blow_rounding_up(scores):
    run = pd.DataFrame(zip("11", "ab", (1, 2), scores), columns=RUN)
    assert KIT.fuse_runs([run], [1], "zscore", 60, {})["score"].tolist() == [0, 0]

def test_runs_of_other_claims_are_refused_and_missing_claims_are_counted(toy, call, refused):
    tsv(toy / "a.tsv", RUN, [("c3", "0001", 1, 1)])
    tsv(toy / "b.tsv", RUN, [("c3", "0001", 1, 1), ("c4", "0002", 1, 1)])
    tsv(toy / "c.tsv", RUN, [("x9", "0001", 1, 1)])
    said = "none is in all files (c3 in a.tsv, x9 in c.tsv)"
    refused(toy, SCRIPT, "fuse", "a.tsv", "c.tsv", said=said)
    done = call(SCRIPT, "fuse", "a.tsv", "b.tsv", "--out", "d.tsv", cwd=toy)
    assert "warning: a.tsv: 1 of the 2 claims are not in it" in done.stderr
    again = call(SCRIPT, "fuse", "a.tsv", "b.tsv", "--out", "d.tsv", cwd=toy)
    assert "up to date" in again.stdout and again.stderr == done.stderr

@pytest.mark.parametrize(("ids", "expected"), [("", "zya"), ("ayz", "ayz")])
def test_ties_are_broken_by_the_corpus_else_by_the_order_of_runs(ids, expected):
    ranks = (10, 1, 4), (4, 4, 10), (1, 10, 1)  # of z, y, a; in this order, their sums differ
    runs = [pd.DataFrame(zip("111", "zya", row, row), columns=RUN) for row in ranks]
    fused = KIT.fuse_runs(runs, [1, 1, 1], "rrf", 60, ids)
    assert "".join(fused["abstract_id"]) == expected

def test_a_fitted_fusion_is_the_best_of_the_grid_and_is_applied_elsewhere(toy, call, refused):
    import ir_measures
    first = [("c1", "x", 1, 9), ("c1", "a", 2, 8), ("c1", "b", 3, 7), ("c2", "d", 1, 5),
             ("c2", "c", 2, 4)]
    second = [("c1", "y", 1, 4), ("c1", "a", 2, 3), ("c2", "c", 1, 2), ("c2", "d", 2, 1)]
    for name, rows in {"a.tsv": first, "b.tsv": second}.items():
        tsv(toy / name, RUN, rows)
    judged = [("c1", "a", "SUPPORTS"), ("c1", "q", "REFUTES"), ("c2", "c", "SUPPORTS"),
              ("c2", "d", "NEI"), ("c3", "z", "REFUTES"), ("c4", "x", "NEI")]
    tsv(toy / "q.tsv", [*KEY, "label"], judged)
    fit = ("fit", "a.tsv", "b.tsv", "--qrels", "q.tsv", "--out", "f.json")
    fusion = facts(call(SCRIPT, *fit, cwd=toy))
    ideal = 1 + 1 / np.log2(3)  # c1 has two abstracts with evidence, c3 is in no run
    assert fusion["alone"]["a.tsv"] == pytest.approx((1 / np.log2(3) / ideal + 1 / np.log2(3)) / 3)
    assert fusion["value"] == pytest.approx((1 / ideal + 1) / 3)
    assert fusion["value"] > max(fusion["alone"].values())
    assert "up to date" in call(SCRIPT, *fit, cwd=toy).stdout
    facts(call(SCRIPT, "fuse", "a.tsv", "b.tsv", "--fusion", "f.json", "--out", "c.tsv", cwd=toy))
    runs = [read(toy / name) for name in ("c.tsv", "a.tsv")]
    qrels = [ir_measures.Qrel(claim, name, int(label != "NEI")) for claim, name, label in judged]
    for run, value in zip(runs, (fusion["value"], fusion["alone"]["a.tsv"])):
        rows = [ir_measures.ScoredDoc(row.claim_id, row.abstract_id, -row.rank)
                for row in run.itertuples()]
        found = {one.query_id: one.value
                 for one in ir_measures.iter_calc([ir_measures.nDCG @ 10], qrels, rows)}
        assert sum(found.get(claim, 0) for claim in ("c1", "c2", "c3")) / 3 == pytest.approx(value)
    refused(toy, SCRIPT, "fuse", "b.tsv", "a.tsv", "--fusion", "f.json", said="in this order")
    refused(toy, SCRIPT, *fit, "--measure", "MAP", said="--measure")
    (toy / "x").mkdir()
    (toy / "x/b.tsv").write_bytes((toy / "a.tsv").read_bytes())
    refused(toy, SCRIPT, "fit", "x/b.tsv", *fit[2:], "--force", said="different names")
    tsv(toy / "n.tsv", RUN, [("c1", "x", 1, 2), ("c2", "d", 1, 1)])
    done = call(SCRIPT, "fit", "n.tsv", *fit[2:], cwd=toy)
    alone = facts(done)["alone"]["b.tsv"]
    assert "no fusion is better than b.tsv alone" in done.stderr
    assert f"nDCG@10 {alone:.4f}" in done.stderr
    assert facts(done)["weights"] == [0, 1] and "1 of the 4 claims" not in done.stderr
    assert "warning: all runs: 1 of the 3 claims are not in it" in done.stderr
    for damaged in ({"weights": [1]}, {"method": ["rrf"]}, {"rrf_k": "1"}):
        (toy / "f.json").write_text(json.dumps(fusion | damaged))
        words = ("fuse", "n.tsv", "b.tsv", "--fusion", "f.json")
        refused(toy, SCRIPT, *words, said="f.json: no fusion")

def test_grid_and_measures_of_a_fit_by_hand():
    assert len(KIT.grid(3)) == 66 and np.allclose(KIT.grid(3).sum(axis=1), 1)
    hits, evidence = np.array([[0, 1, 1], [0, 0, 0]]), np.array([4, 1])
    assert KIT.recall(hits, evidence).tolist() == [0.5, 0]
    assert KIT.first_hit(hits, evidence).tolist() == [0.5, 0]

def test_a_fit_ranks_ties_as_a_fusion_does():
    rng, claims, runs = np.random.default_rng(0), [f"c{n}" for n in range(20)], []
    for _ in range(3):
        rows = []
        for claim in claims:
            names = rng.permutation([f"d{n}" for n in range(9)])
            rows += [(claim, name, rank, 1 / rank) for rank, name in enumerate(names, 1)]
        runs.append(pd.DataFrame(rows, columns=RUN))
    evidence = pd.DataFrame([(claim, name) for claim in claims for name in ("d3", "d7")],
                            columns=KEY)
    for value, method, k, weights in KIT.settings_by_value(runs, evidence, "MRR@9")[::9]:
        fused = KIT.fuse_runs(runs, weights, method, k, ())
        hits = fused["abstract_id"].isin(["d3", "d7"]).to_numpy().reshape(20, 9)
        assert value == pytest.approx(np.mean(1 / (hits.argmax(axis=1) + 1))), (method, k, weights)

def test_examples_by_hand():
    rng, draw, examples_of = np.random.default_rng(0), KIT.draw, KIT.examples_of
    assert draw("abcd", 2, "best", rng) == "ab" and draw("abcd", 2, "worst", rng) == "dc"
    assert len({tuple(draw("abcd", 2, "random", rng)) for _ in range(300)}) == 4 * 3
    assert sorted(draw("abcd", 9, "random", rng)) == list("abcd") and not draw("", 1, "random", rng)
    args = SimpleNamespace(shape="pairs", hard=1, easy=1, draw="best", seed=1)
    assert list(examples_of("c", ["p", "q"], ["x", "y"], ["z"], args)) == [
        ("evidence", "c", "p", 1), ("evidence", "c", "q", 1), ("hard", "c", "x", 0),
        ("easy", "c", "z", 0)]
    args.shape, args.draw = "labels", "worst"  # for each evidence abstract
    assert list(examples_of("c", ["p", "q"], ["x", "y", "w"], [], args)) == [
        ("hard", "c", "w", "NEI"), ("hard", "c", "y", "NEI")]
    args.shape = "tuples"
    assert list(examples_of("c", ["p"], ["x", "y"], ["z"], args)) == [
        ("evidence", "c", "p", ["y", "z"])]

@pytest.mark.parametrize("words", [
    "--hard 2 --easy 9 --from-top 3", "--shape tuples --hard 2 --easy 3 --easy-from corpus",
    "--shape labels", "none.tsv --shape tuples --pool nei --nei-of any --hard 9",
    "--pool unjudged --easy 2", "--pool nei --hard 9"])
def test_evidence_is_no_negative_and_no_draw_depends_on_other_claims(toy, call, words):
    table, seen, drawn = read(toy / "data/demo/qrels.test.tsv"), [], set()
    mine = ("mine", *words.split(), "--qrels", "q.tsv", "--split", "test", "--out", "x.jsonl")
    for judged in (table, table, table[table["claim_id"] != "c4"]):
        tsv(toy / "q.tsv", judged, judged.values)
        made = facts(call(SCRIPT, *mine, "--force", cwd=toy))
        skipped = made["skipped_claims_without_evidence"]
        few = any(word in words for word in ("9", "unjudged", "labels"))
        assert (made["claims_short_of_negatives"] > 0) == few
        seen.append(records(toy / "x.jsonl"))
    fields = {tuple(row)[2:] for row in seen[0]}
    assert len(fields) == 1 and fields < {
        ("abstract_id", "target"), ("abstract_id", "label"), ("positive", "negatives")}
    for row in seen[0]:
        own = [row.get("abstract_id")] * (row["kind"] != "evidence")
        drawn |= {(row["claim_id"], name) for name in row.get("negatives", own)}
    relevant = set(map(tuple, table[table["label"] != "NEI"][KEY].values))
    assert not drawn & relevant and seen[0] == seen[1]
    if words.startswith("--pool"):  # of NEI there is one a claim
        assert len(drawn & set(map(tuple, table[KEY].values))) == 3 * ("nei" in words)
    assert len(drawn) > (2 if words.startswith("--pool nei") else 6)
    if "any" not in words:
        assert skipped == 1 and seen[2] == [row for row in seen[0] if row["claim_id"] != "c4"]

@pytest.mark.parametrize(("of", "wanted"), [
    ("run", {"c3": {"0003"}, "c4": {"0006"}, "c5": {"0009"}}),  # evidence takes the second rank
    ("pool", {"c3": {"0003", "0004"}, "c4": {"0006", "0001"}, "c5": {"0009", "0001"}})])
def test_ranks_of_hard_negatives_may_leave_evidence_out(toy, call, of, wanted):
    words = "mine --split test --out x.jsonl --hard 9 --from-top 2 --top-of"
    facts(call(SCRIPT, *words.split(), of, cwd=toy))
    found = {}
    for row in records(toy / "x.jsonl"):
        if row["kind"] == "hard":
            found.setdefault(row["claim_id"], set()).add(row["abstract_id"])
    assert found == wanted

def test_scores_as_targets_with_gold_evidence(toy, call, refused):
    tsv(toy / "q.tsv", [*KEY, "label"], [("c3", "0001", "SUPPORTS"), ("c5", "0009", "NEI")])
    words = "mine --qrels q.tsv --split test --out x.jsonl --targets score --gold --from-top 2"
    refused(toy, SCRIPT, *words.split(), said="--middle")
    words = (*words.split(), "--middle", 0.6, "--scale", 2)
    assert facts(call(SCRIPT, *words, cwd=toy))["skipped_claims_without_evidence"] == 2
    assert [tuple(row.values()) for row in records(toy / "x.jsonl")] == [
        ("score", "c3", "0003", 1), ("score", "c3", "0002", 0.3), ("evidence", "c3", "0001", 1)]
    words += ("--keep-claims-without-evidence",)
    assert facts(call(SCRIPT, *words, cwd=toy))["examples"] == 7
    for shape in ("tuples", "labels"):
        refused(toy, SCRIPT, "mine", "--shape", shape, words[-1], said=f"--shape {shape}")

@pytest.mark.parametrize(("text", "line"), [
    *cases("bad_tables.tsv"), ('claim_id|claim;1|"open' + ";2|sun" * 30_000, 4)])
def test_bad_tables_are_refused_by_line(capsys, tmp_path, text, line):
    path, known = tmp_path / "a.tsv", {"abstract_id": ["x", "y"]} if "rank" in text else {}
    path.write_text(text.replace("|", "\t").replace(";", "\n") + "\n")
    columns = RUN if known else ["claim_id", "claim"]
    assert f"a.tsv:{line}: " in refusal(capsys, KIT.read_table, path, columns, **known)

def test_bytes_of_all_kinds_are_read_and_none_controls_the_terminal(capsys, tmp_path):
    path = tmp_path / "a"
    path.write_bytes(
        b'\xef\xbb\xbfclaim_id\tclaim\r\n07\t"a b ""c"""\r\nNA\t"d" or "e"\r\n\n8\t\xed\xa0\n')
    found = KIT.read_table(path, ["claim_id", "claim"]).values.tolist()
    assert found == [["07", 'a b "c"'], ["NA", '"d" or "e"'], ["8", "\ufffd\ufffd"]]
    assert "a:5: 1 lines are not UTF-8" in capsys.readouterr().err
    good = b'{"abstract_id": 1, "abstract": "\xed"}\n{"abstract_id": "\\ud800", "abstract": "a"}\n'
    for line in (b"[]", b"{", b'{"abstract": ""}', b'{"abstract_id": "1"}', b'{"abstract_id": ""}',
                 b'{"abstract_id": null}', b'{"abstract_id": 20.0}', b'{"abstract_id": true}',
                 b'{"abstract_id": "a\\tb"}', b'{"abstract_id": " a"}', b"[" * 100_000):
        path.write_bytes(good + line)
        assert f"{path}:3: " in refusal(capsys, KIT.read_corpus, path)
    path.write_bytes(good)
    found = [(name, record["abstract"]) for name, record in KIT.read_corpus(path).items()]
    assert capsys.readouterr().err.count("warning: ") == 1
    assert found == [("1", "\ufffd"), ("\ufffd", "a")]
    assert refusal(capsys, KIT.fail, "a\x1b[2J", "b\x07\n\u202ec") == "error: a?[2J: b? ?c\n"

def test_an_empty_run_a_full_disk_a_second_command_ctrl_c_and_leftovers(toy, run, call, refused):
    tsv(toy / "a.tsv", RUN, [])
    done = call(SCRIPT, "fuse", "a.tsv", "--out", "d.tsv", cwd=toy)
    assert "d.tsv: 0 rows, 0 claims" in done.stdout
    words = ("fuse", "a.tsv", "work/demo/test/hybrid.tsv", "--method", "zscore", "--out", "e.tsv")
    assert "e.tsv: 18 rows, 3 claims" in call(SCRIPT, *words, cwd=toy).stdout
    tsv(toy / "b.tsv", RUN, [(n, "0002", 1, n / 3) for n in range(500)])
    words = ("fuse", "b.tsv", "--out", "c.tsv")
    facts(call(SCRIPT, *words, cwd=toy))
    (toy / "c.tsv.parts").mkdir()  # of a process that was killed behind its last rename
    assert "up to date: c.tsv" in call(SCRIPT, *words, cwd=toy).stdout
    assert not (toy / "c.tsv.parts").exists()
    words += ("--force",)
    refused(toy, SCRIPT, *words, said="File too large", by=run, limit=4096)
    with FileLock(toy / "c.tsv.lock"):
        refused(toy, SCRIPT, *words, said="another command")
    ctrl_c = {"if args.weights and M": "raise KeyboardInterrupt\n    if args.weights and M"}
    done = run(SCRIPT, *words, cwd=toy, edits=ctrl_c)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")

# ---------------------------------------------------------------- What all scripts share
def test_white_space_in_texts_quoting_and_unicode(tmp_path):
    path = tmp_path / "a.tsv"
    claims = ['says "no"', '"', '""', '"cooling"', '"A" and "B"', "cafe\u0301"]
    table = pd.DataFrame({"claim_id": range(6), "claim": claims})
    table.to_csv(path, sep="\t", index=False)  # as pandas quotes them
    found = KIT.read_table(path, ["claim_id", "claim"])["claim"].tolist()
    assert found == [*claims[:-1], "caf\u00e9"]
    tsv(path, ["claim_id", "claim"], [(1, '"open'), (2, 'Polar "bears'), (3, '"Ice" melts')])
    found = KIT.read_table(path, ["claim_id", "claim"])["claim"].tolist()
    assert found == ['"open', 'Polar "bears', '"Ice" melts']

@pytest.mark.parametrize(("data", "said"), [
    (gzip.compress(b"claim_id\tclaim\n", mtime=0), "gzip"), ("claim_id".encode("utf-16"), "UTF-16"),
    (b"", "empty"), (b"\n \n", "empty")])
def test_files_that_are_no_text_are_named_as_what_they_are(capsys, tmp_path, data, said):
    (tmp_path / "a.tsv").write_bytes(data)
    assert said in refusal(capsys, KIT.read_table, tmp_path / "a.tsv", ["claim_id", "claim"])

def test_work_follows_data_so_that_no_data_set_replaces_another(toy, call):
    (toy / "data/other").mkdir()
    claims = (toy / "data/demo/claims.train.tsv").read_bytes()
    (toy / "data/other/claims.train.tsv").write_bytes(claims)
    run = (toy / "work/demo/test/hybrid.tsv").read_bytes()
    made = facts(call(SCRIPT, "fuse", "work/demo/test/hybrid.tsv", "--data", "data/other/",
                      cwd=toy))["made"]
    assert made == ["work/other/test/fused.tsv"]
    assert (toy / "work/demo/test/hybrid.tsv").read_bytes() == run

@pytest.mark.parametrize(("words", "said"), [
    ("retreive", "no job retreive; did you mean retrieve?"),
    ("mine --hrad 2", "did you mean --hard?"),
    ("--split tset", "claims.tset.tsv: no such file, and no script makes it"),
    ("--retrievers bm25", "make it by: python 01_index.py --indexes bm25 --data data/demo --work "),
    ("mine --split test none.tsv", "none.tsv: no such file"),
    ("mine work/demo/x/hybrid.tsv", "make it by: python 02_retrieve.py --data data/demo --work "
     "work/demo --split train"),
    ("fuse a\x1b[2J.tsv", "control characters"), ("fuse a.tsv --device cuda:x", "cuda:x is none")])
def test_advice_names_the_command_the_flag_or_the_nearest_name(toy, words, said, refused):
    refused(toy, SCRIPT, *words.split(" "), said=said)

def test_a_model_whose_files_have_changed_is_refused(capsys, tmp_path):
    args = SimpleNamespace(data="d", work="w", split="s")
    model = tmp_path / "a/b/model"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"weights")
    whole = KIT.task_of(args, models=[model])["inputs"]
    (tmp_path / "a/b/model.meta.json").write_text(json.dumps({"sha256": whole[str(model)]}))
    assert KIT.task_of(args, models=[model, "hub/name"])["inputs"] == whole | {"hub/name": ""}
    (model / "model.safetensors").write_bytes(b"weight\0")
    assert "have changed" in refusal(capsys, KIT.task_of, args, models=[model])
    assert "missing" in refusal(capsys, KIT.task_of, args, models=["work/demo/models/reranker"])

def test_an_edited_output_stays_with_a_warning_and_data_are_never_replaced(toy, call, refused):
    words = ("fuse", "work/demo/test/hybrid.tsv", "--out", "a.tsv")
    facts(call(SCRIPT, *words, cwd=toy))
    (toy / "a.tsv").write_text("mine")
    done = call(SCRIPT, *words, cwd=toy)
    assert "a.tsv: its bytes have changed" in done.stderr and (toy / "a.tsv").read_text() == "mine"
    refused(toy, SCRIPT, *words[:3], "data/demo/claims.train.tsv", said="did not make it")

@pytest.mark.parametrize("text", ["[]", "null", "3", "[" * 100_000, "{", '{"arguments": []}'])
def test_provenance_that_is_no_object_makes_the_output_anew(toy, call, text):
    words = ("fuse", "work/demo/test/hybrid.tsv", "--out", "a.tsv")
    facts(call(SCRIPT, *words, cwd=toy))
    (toy / "a.tsv.meta.json").write_text(text)
    assert facts(call(SCRIPT, *words, cwd=toy))["made"] == ["a.tsv"]

def test_a_loop_of_links_is_one_line(toy, refused):
    (toy / "loop.tsv").symlink_to("loop.tsv")
    refused(toy, SCRIPT, "fuse", "work/demo/test/hybrid.tsv", "--out", "loop.tsv", said="loop")

def test_ctrl_c_during_imports_and_at_the_end_prints_no_traceback(toy):
    (toy / SCRIPT).write_text((ROOT / SCRIPT).read_text())
    command = [sys.executable, "-X", "importtime", SCRIPT, "fuse", "nowhere.tsv"]
    for module in ("argparse", "pathlib", "numpy"):  # sent while the next one is imported
        process = subprocess.Popen(command, cwd=toy, stderr=subprocess.PIPE, text=True)
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.split("|")[-1].strip() == module:
                process.send_signal(signal.SIGINT)
        assert process.wait() == -signal.SIGINT and "Traceback" not in "".join(lines), module

def test_easy_negatives_are_drawn_by_default_and_repeat_no_hard_one(toy, call):
    rows = [("c3", f"{n:04}", n, 100 - n) for n in range(1, 13)]
    tsv(toy / "r.tsv", RUN, rows)
    tsv(toy / "q.tsv", [*KEY, "label"], [("c3", "0012", "SUPPORTS")])
    mine = ("mine", "r.tsv", "--qrels", "q.tsv", "--out", "x.jsonl", "--hard", 3, "--easy", 4)
    facts(call(SCRIPT, *mine, "--from-top", 4, cwd=toy))
    kinds = {kind: {row["abstract_id"] for row in records(toy / "x.jsonl") if row["kind"] == kind}
             for kind in ("hard", "easy")}
    assert len(kinds["hard"]) == 3 and len(kinds["easy"]) == 4 and not kinds["hard"] & kinds["easy"]
    assert max(kinds["hard"]) <= "0004" < min(kinds["easy"])
    mine += ("--shape", "labels")
    done = call(SCRIPT, *mine, "--from-top", 4, "--easy-from", "corpus", cwd=toy)
    assert facts(done)["claims_short_of_negatives"] == 0
    tsv(toy / "q.tsv", [*KEY, "label"], [("c3", "0012", "SUPPORTS"), ("c3", "0011", "REFUTES")])
    done = call(SCRIPT, *mine, "--from-top", 4, cwd=toy)
    assert facts(done)["claims_short_of_negatives"] == 1  # 6 hard ones are wanted of 4
    assert "1 claims have fewer negatives" in done.stderr
