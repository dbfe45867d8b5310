"""02_retrieve.py: exact search, fusion, examples; and what the blocks of all scripts refuse."""
import json
import resource
import signal
import subprocess
import sys
import time
import zlib
from types import SimpleNamespace

import bm25s
import numpy as np
import pandas as pd
import pytest
import Stemmer
from conftest import tsv
from filelock import FileLock
from scipy import sparse

SCRIPT, RUN = "02_retrieve.py", ["claim_id", "abstract_id", "rank", "score"]

def read(path):
    return pd.read_csv(path, sep="\t", dtype={"claim_id": str, "abstract_id": str}, na_filter=False)

def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

def refusal(capsys, function, *args, **known):
    with pytest.raises(SystemExit) as end:
        function(*args, **known)
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
    return error

# ---------------------------------------------------------------- Search
@pytest.mark.parametrize(("count", "spread"), [(1, 3), (39, 3), (4001, 3), (4001, 50), (4001, 999)])
def test_top_k_equals_a_full_stable_sort(load, count, spread):
    scores = np.random.default_rng(count).integers(0, spread, count).astype(np.float32)
    expected = np.argsort(-scores, kind="stable").tolist()
    for k in (1, 7, 250, 999, 1001, 9999):
        assert load(SCRIPT)["top_k"](scores, k).tolist() == expected[:k]

def test_inner_products_equal_float64_across_blocks_of_claims_and_rows(load):
    import torch
    inner_products, rng = load(SCRIPT)["inner_products"], np.random.default_rng(11)
    vectors, queries = rng.normal(size=(70_000, 8)).astype(np.float16), rng.normal(size=(300, 8))
    found = inner_products(torch.from_numpy(vectors), torch.from_numpy(queries).float())
    np.testing.assert_allclose(list(found), queries @ vectors.astype(float).T, atol=1e-4)

def brute_force(toy):
    """{kind: scores (claims, abstracts)} of the saved vectors, and of bm25s called directly."""
    from sentence_transformers import SentenceTransformer, SparseEncoder
    index, models = toy / "work/demo/index", toy / "data/models"
    claims = list(read(toy / "data/demo/claims.test.tsv")["claim"])
    dense = SentenceTransformer(str(models / "minilm"), device="cpu").encode(claims)
    terms = SparseEncoder(str(models / "splade-tiny"), device="cpu").encode_query(claims)
    parts = tuple(np.load(index / f"splade/{name}.npy") for name in ("data", "indices", "indptr"))
    bm25 = bm25s.BM25(k1=1.5, b=0.75)
    how = {"stopwords": "english", "stemmer": Stemmer.Stemmer("english"), "show_progress": False}
    texts = [record["abstract"] for record in lines(toy / "data/demo/corpus.jsonl")]
    bm25.index(bm25s.tokenize(texts, **how), show_progress=False)
    words = map(bm25.get_tokens_ids, bm25s.tokenize(claims, return_ids=False, **how))
    return {"dense": dense @ np.load(index / "dense/embeddings.npy").T.astype(np.float32),
            "splade": terms.to_dense().numpy() @ sparse.csc_matrix(parts, (12, 30_522)).T,
            "bm25": [bm25.get_scores_from_ids(ids) for ids in words]}

def test_every_retriever_equals_brute_force_and_bad_vectors_are_refused(toy, run):
    assert run("01_index.py", cwd=toy).returncode == 0
    done = run(SCRIPT, "--top-k", 8, cwd=toy)
    assert done.returncode == 0, done.stderr
    out, dense = toy / "work/demo/test", toy / "work/demo/index/dense"
    for kind, scores in brute_force(toy).items():
        expected = []
        for claim, row in zip(("c3", "c4", "c5"), scores):
            best = [n for n in np.argsort(-row, kind="stable")[:8] if row[n] > 0 or kind == "dense"]
            expected += [(claim, f"{n + 1:04}", rank, row[n]) for rank, n in enumerate(best, 1)]
        expected = pd.DataFrame(expected, columns=RUN).astype({"score": float})
        pd.testing.assert_frame_equal(read(out / f"{kind}.tsv"), expected, rtol=1e-4)
    runs = [out / f"{kind}.tsv" for kind in ("bm25", "dense", "splade")]
    words = ("--top-k", 8, "--corpus", "data/demo/corpus.jsonl", "--out", "again.tsv")
    assert run(SCRIPT, "fuse", *runs, *words, cwd=toy).returncode == 0
    assert (toy / "again.tsv").read_bytes() == (out / "hybrid.tsv").read_bytes()
    command = [sys.executable, SCRIPT, "--retrievers", "dense", "--out", "new", "--device", "cpu"]
    with subprocess.Popen(command, cwd=toy, stderr=subprocess.PIPE, text=True) as process:
        process.stderr.readline()  # loading the model, behind the imports
        process.send_signal(signal.SIGINT)
        start, rest = time.monotonic(), process.stderr.read()
    assert process.returncode == 130 and "Traceback" not in rest and time.monotonic() - start < 10
    vectors, meta = np.load(dense / "embeddings.npy"), json.loads((dense / "meta.json").read_text())
    vectors[[1, 4, 9], 0] = np.nan, np.inf, -np.inf
    np.save(dense / "embeddings.npy", vectors)
    data = (dense / "embeddings.npy").read_bytes()
    meta["files"]["embeddings.npy"] = [len(data), zlib.crc32(data)]
    (dense / "meta.json").write_text(json.dumps(meta))
    assert "index/dense: 3 of 12 scores are NaN" in run(*command[1:], cwd=toy).stderr
    (dense / "meta.json").write_text(json.dumps(meta | {"model": "data/models/splade-tiny"}))
    assert "not the model of the dense index" in run(*command[1:], cwd=toy).stderr
    assert not list(toy.glob("new/*"))

@pytest.mark.parametrize("method", ["lucene", "bm25l", "bm25+"])
def test_no_row_without_a_common_term_nor_outside_of_restrict(toy, run, method):
    words = ("--indexes", "bm25", "--analyser", "plain", "--bm25-method", method)
    assert run("01_index.py", *words, cwd=toy).returncode == 0
    claims = [("1", "sea level"), ("2", "xyzzy"), ("3", "?!")]
    tsv(toy / "data/demo/claims.test.tsv", ["claim_id", "claim"], claims)
    words = ("--retrievers", "bm25", "--top-k", 99)
    done = run(SCRIPT, *words, cwd=toy)
    assert "3 rows, 3 claims, 2 of them without rows" in done.stdout, done.stderr
    whole = read(toy / "work/demo/test/bm25.tsv").set_index("abstract_id")["score"].to_dict()
    assert set(whole) == {"0002", "0007", "0009"}  # plain: "Sea" is another term than "sea"
    tsv(toy / "few.tsv", RUN, [("1", "0009", 1, 2.0), ("1", "0001", 2, 1.0), ("2", "0002", 1, 1)])
    assert run(SCRIPT, *words, "--restrict", "few.tsv", "--out", "o", cwd=toy).returncode == 0
    assert read(toy / "o/bm25.tsv").values.tolist() == [["1", "0009", 1, whole["0009"]]]

@pytest.mark.parametrize(("name", "data"), [
    ("a", b"changed!!"), ("a", b"short"), ("a", b""), ("a", None), ("meta.json", b""),
    ("meta.json", b"[1]"), ("meta.json", b'{"corpus": "another", "files": {}}')])
def test_a_damaged_index_or_one_of_another_corpus_is_refused(load, capsys, tmp_path, name, data):
    folder, open_index = tmp_path / "bm25", load(SCRIPT)["open_index"]
    folder.mkdir()
    (folder / "a").write_bytes(b"as it was")
    meta = {"corpus": "sha", "files": {"a": [9, zlib.crc32(b"as it was")]}}
    (folder / "meta.json").write_text(json.dumps(meta))
    assert open_index(folder, "sha") == meta
    (folder / name).unlink() if data is None else (folder / name).write_bytes(data)
    assert "01_index.py --indexes bm25" in refusal(capsys, open_index, folder, "sha")

# ---------------------------------------------------------------- Fusion and examples
SD = np.std([9, 5, 1]), np.std([0.5, 0.3])

@pytest.mark.parametrize(("method", "expected", "alone"), [
    ("rrf", {"a": 1 / 61 + 3 / 62, "b": 1 / 62, "c": 1 / 63 + 3 / 61}, 3 / 61),
    ("zscore", {"a": 8 / SD[0], "b": 4 / SD[0], "c": 3 * 0.2 / SD[1]}, 0),
    ("union", {"a": 3 / 2, "b": 1 / 2, "c": 3}, 3), ("top", {"a": 9, "b": 5, "c": 1.5}, 6)])
def test_fusion_equals_the_arithmetic_by_hand(load, method, expected, alone):
    first = [("1", "a", 1, 9.0), ("1", "b", 2, 5.0), ("1", "c", 3, 1.0)]
    second = [("2", "d", 1, 2.0), ("1", "c", 1, 0.5), ("1", "a", 2, 0.3)]
    runs = [pd.DataFrame(rows, columns=RUN) for rows in (first, second)]
    fused = load(SCRIPT)["fuse_runs"](runs, [1, 3], method, 60, {})
    assert dict(zip(fused["abstract_id"], fused["score"])) == pytest.approx(expected | {"d": alone})
    best = sorted(expected, key=expected.get, reverse=True)
    assert list(zip(fused["claim_id"], fused["abstract_id"])) == [*zip("111", best), ("2", "d")]

@pytest.mark.parametrize(("order", "expected"), [({}, "zya"), ({"a": 0, "y": 1, "z": 2}, "ayz")])
def test_ties_are_broken_by_the_corpus_else_by_the_order_of_runs(load, order, expected):
    runs = [pd.DataFrame([("1", name, 1, 1.0)], columns=RUN) for name in "zya"]
    fused = load(SCRIPT)["fuse_runs"](runs, [1, 1, 1], "rrf", 60, order)
    assert "".join(fused["abstract_id"]) == expected

def test_targets_and_examples_by_hand(load):
    names, rng = load(SCRIPT), np.random.default_rng(0)
    draw, targets, examples_of = names["draw"], names["targets"], names["examples_of"]
    assert draw("abcd", 2, "best", rng) == "ab" and draw("abcd", 2, "worst", rng) == "dc"
    assert len({tuple(draw("abcd", 2, "random", rng)) for _ in range(300)}) == 4 * 3
    assert sorted(draw("abcd", 9, "random", rng)) == list("abcd") and not draw("", 1, "random", rng)
    assert targets(np.array([1.0, 2, 9]), 2, 0.25).tolist() == [0.25, 0.5, 1]
    assert targets(np.array([1.0, 3]), None, None).tolist() == [0.25, 0.75]  # mean 2, sd 1
    args = SimpleNamespace(shape="pairs", hard=1, easy=1, draw="best", seed=1)
    found = examples_of("c", ["p", "q"], ["x", "y"], ["z"], args)
    assert [(row["kind"], row["abstract_id"], row["target"]) for row in found] == [
        ("evidence", "p", 1), ("evidence", "q", 1), ("hard", "x", 0), ("easy", "z", 0)]
    args.shape, args.draw = "labels", "worst"  # for each evidence abstract
    assert list(examples_of("c", ["p", "q"], ["x", "y", "w"], [], args)) == [
        {"kind": "hard", "claim_id": "c", "abstract_id": name, "label": "NEI"} for name in "wy"]
    args.shape = "tuples"
    assert list(examples_of("c", ["p"], ["x", "y"], ["z"], args)) == [
        {"kind": "evidence", "claim_id": "c", "positive": "p", "negatives": ["y", "z"]}]

@pytest.mark.parametrize("words", [
    "--hard 2 --easy 9 --from-top 3", "--shape tuples --hard 2 --easy 3 --easy-from corpus",
    "--shape labels", "none.tsv --shape tuples --pool nei --nei-of any --hard 9"])
def test_evidence_is_no_negative_and_no_draw_depends_on_other_claims(toy, run, words):
    table, seen, drawn = read(toy / "data/demo/qrels.test.tsv"), [], set()
    mine = ("mine", *words.split(), "--qrels", "q.tsv", "--split", "test", "--out", "x.jsonl")
    for judged in (table, table, table[table["claim_id"] != "c4"]):
        tsv(toy / "q.tsv", judged, judged.values)
        done = run(SCRIPT, *mine, "--force", cwd=toy)
        assert done.returncode == 0, done.stderr
        seen.append(lines(toy / "x.jsonl"))
    for row in seen[0]:
        own = [row.get("abstract_id")] * (row["kind"] != "evidence")
        drawn |= {(row["claim_id"], name) for name in row.get("negatives", own)}
    relevant = set(map(tuple, table[table["label"] != "NEI"][RUN[:2]].values))
    assert len(drawn) > 6 and not drawn & relevant and seen[0] == seen[1]
    if "any" not in words:
        assert '"skipped_claims_without_evidence": 1' in done.stdout
        assert seen[2] == [row for row in seen[0] if row["claim_id"] != "c4"]

@pytest.mark.parametrize(("pool", "expected"), [("nei", ["0003"]), ("unjudged", ["0004", "0005"]),
                                                ("both", ["0003", "0004", "0005"])])
def test_a_pool_holds_the_negatives_of_its_labels(toy, run, pool, expected):
    words = f"--split test --from-top 5 --draw best --out x.jsonl --pool {pool}".split()
    assert run(SCRIPT, "mine", *words, cwd=toy).returncode == 0
    hard = [row for row in lines(toy / "x.jsonl") if row["kind"] == "hard"]
    assert [row["abstract_id"] for row in hard if row["claim_id"] == "c3"] == expected

def test_scores_as_targets_with_gold_evidence(toy, run):
    tsv(toy / "q.tsv", [*RUN[:2], "label"], [("c3", "0001", "SUPPORTS"), ("c5", "0009", "NEI")])
    words = "--targets score --gold --from-top 2 --middle 0.5 --scale 0.5 --qrels q.tsv"
    words = ("mine", *words.split(), "--split", "test", "--out", "x.jsonl")
    assert '"skipped_claims_without_evidence": 2' in run(SCRIPT, *words, cwd=toy).stdout
    assert [tuple(row.values()) for row in lines(toy / "x.jsonl")] == [
        ("score", "c3", "0003", 0.75), ("score", "c3", "0002", 0.5), ("evidence", "c3", "0001", 1)]
    assert '"examples": 7' in run(SCRIPT, *words, "--keep-claims-without-evidence", cwd=toy).stdout

# ---------------------------------------------------------------- Blocks of all scripts
HEADS = {"C": "claim_id|claim", "R": "claim_id|abstract_id|rank|score;1|x|1|0.5"}

@pytest.mark.parametrize(("text", "line"), [
    (";", 1), ("claim_id|text;1|ice", 1), ("claim_id|claim|claim;1|a|b", 1), ("C;1|ice;1|sun", 3),
    ("C;|ice", 2), ("C;1| ", 2), ("C;1|ice;2", 3), ("C;1|a|b", 2), ('C;1|"open;2|sun', 2),
    ('C;1|"two;lines";2|sun;2|sea', 4), ('C;;1|"a|b";;2', 5), ("R;1|y|2|nan", 3), ("R;1|q|2|1", 3),
    ("R;1|y|2|x", 3), ("R;1|y|1.5|1", 3), ("R;1|y|3|1", 3), ("R;1|y|1|1", 3), ("R;1|x|2|1", 3),
    ("R;1|y|2|-inf", 3), ('C;1|ice;2|"open', 3), ('C;1|"open' + ";2|sun" * 30_000, 2)])
def test_bad_tables_are_refused_by_line(load, capsys, tmp_path, text, line):
    path, read_table = tmp_path / "a.tsv", load(SCRIPT)["read_table"]
    rows = HEADS.get(text[0], text[0]) + text[1:]
    path.write_text(rows.replace("|", "\t").replace(";", "\n") + "\n")
    columns = RUN if text[0] == "R" else ["claim_id", "claim"]
    known = {"abstract_id": ["x", "y"]} if text[0] == "R" else {}
    assert f"a.tsv:{line}: " in refusal(capsys, read_table, path, columns, **known)

def test_bytes_of_all_kinds_are_read_and_none_controls_the_terminal(load, capsys, tmp_path):
    names, path = load(SCRIPT), tmp_path / "a"
    rows = b'\xef\xbb\xbfclaim_id\tclaim\r\n07\t"a\tb ""c"""\r\nNA\t"d\ne"\r\n8\t\xed\xa0\n'
    path.write_bytes(rows)
    found = names["read_table"](path, ["claim_id", "claim"]).values.tolist()
    assert found == [["07", 'a\tb "c"'], ["NA", "d\ne"], ["8", "\ufffd\ufffd"]]
    good = b'{"abstract_id": 1, "abstract": "\xed"}\n{"abstract_id": "\\ud800", "abstract": "a"}\n'
    for line in (b"[]", b"{", b'{"abstract": ""}', b'{"abstract_id": "1"}', b'{"abstract_id": ""}'):
        path.write_bytes(good + line)
        assert f"{path}:3: " in refusal(capsys, names["read_corpus"], path)
    path.write_bytes(good)
    found = [(name, record["abstract"]) for name, record in names["read_corpus"](path).items()]
    assert found == [("1", "\ufffd"), ("\ufffd", "a")]
    assert refusal(capsys, names["fail"], "a\x1b[2J", "b\x07\n\u202ec") == "error: a?[2J: b? ?c\n"

def test_bad_flags_and_paths_are_one_line(toy, run, contents, refused):
    tsv(toy / "a.tsv", RUN, [("1", "0002", 1, 1e308), ("1", "0003", 2, 1)])
    for words, word in [
            ("--out a.tsv", "a.tsv: this command reads it"), ("--out a.tsv/c.tsv", "a.tsv"),
            ("--out " + "x" * 300, "too long"), ("--out /proc/c.tsv", "/proc/c.tsv"),
            ("/proc/self/mem", "Input/output"), ("none.tsv", "none.tsv"), ("--top-k -1", "--top-k"),
            ("--weights 1", "--weights"), ("--weights 1 nan", "--weights"),
            ("--method top --weights 9 1", "1 of 2 scores"), ("--corpus a.tsv", "a.tsv:1")]:
        words = words.split() + ["--out", "c.tsv"] * ("--out" not in words)
        before = contents(toy)
        refused(run(SCRIPT, "fuse", "a.tsv", "a.tsv", *words, cwd=toy), before, toy, word)

def test_a_run_may_be_empty_and_a_folder_that_no_command_made_is_kept(toy, run, contents, refused):
    tsv(toy / "none.tsv", RUN, [])
    done = run(SCRIPT, "fuse", "none.tsv", "none.tsv", "--out", "d.tsv", cwd=toy)
    assert "d.tsv: 0 rows, 0 claims" in done.stdout, done.stderr
    before = contents(toy)
    refused(run(SCRIPT, "mine", "--out", "data", cwd=toy), before, toy, "data")

def test_a_full_disk_a_second_command_and_leftovers(toy, run, contents, refused):
    tsv(toy / "b.tsv", RUN, [(n, "0002", 1, n / 3) for n in range(500)])
    words = ("fuse", "b.tsv", "--out", "c.tsv")
    assert run(SCRIPT, *words, cwd=toy).returncode == 0
    (toy / "c.tsv.parts").mkdir()  # of a process that was killed behind its last rename
    assert "up to date: c.tsv" in run(SCRIPT, *words, cwd=toy).stdout
    assert not (toy / "c.tsv.parts").exists()
    before, command = contents(toy), [sys.executable, SCRIPT, *words, "--force"]
    full = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))}
    done = subprocess.run(command, cwd=toy, capture_output=True, text=True, check=False, **full)
    refused(done, before, toy, "File too large")
    with FileLock(toy / "c.tsv.lock"):
        before = contents(toy)
        refused(run(*command[1:], cwd=toy), before, toy, "another command")
