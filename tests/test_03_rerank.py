"""03_rerank.py: scores, ensembles, graph, verifier, restart, what is mined, all recipes, and what is refused."""
import json
import os
import random
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from conftest import ABSTRACTS, kill_until, tsv

SCRIPT = "03_rerank.py"
RUN = ["claim_id", "abstract_id", "rank", "score"]

def read(path):
    return pd.read_csv(path, sep="\t", dtype={"claim_id": str, "abstract_id": str})

def tiny(folder, tokenizer, labels=1, seed=0):
    """A cross-encoder of two small layers with random weights."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig

    torch.manual_seed(seed)
    config = BertConfig(vocab_size=30_522, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
                        num_labels=labels, initializer_range=0.5)
    if labels == 3:
        config.id2label = dict(enumerate(("REFUTES", "NEI", "SUPPORTS")))
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder

def scorer(names, folder, max_length=512):
    class Args:
        seed, device, dtype, batch_tokens, verifier = 13, "cpu", "fp32", 0, None

    Args.max_length = max_length
    return names["load_scorer"](folder, Args)

# ----------------------------------------------------------- Scores
def test_scores_equal_those_of_predict(load, models, tmp_path):
    import torch
    from sentence_transformers import CrossEncoder

    names, folder = load(SCRIPT), tiny(tmp_path / "tiny", models / "minilm")
    rng = np.random.default_rng(2)
    pairs = [(f"claim {row % 7} " * (row % 5), "melting ice " * int(rng.integers(0, 300))) for row in range(60)]
    found = names["score_pairs"](scorer(names, folder, 128), pairs, 1024)
    predicted = CrossEncoder(str(folder), max_length=128, device="cpu").predict(pairs, activation_fn=torch.nn.Identity())
    assert found.shape == (60, 1)
    np.testing.assert_allclose(found[:, 0], predicted, atol=1e-5)

def test_a_text_is_cut_to_what_the_model_has_positions_for(load, models, tmp_path):
    from transformers import AutoModelForSequenceClassification, RobertaConfig

    names, pairs = load(SCRIPT), [("claim", "ice " * 900)]
    folder = tiny(tmp_path / "tiny", models / "minilm")
    most = names["score_pairs"](scorer(names, folder, 512), pairs, 1024)
    assert names["score_pairs"](scorer(names, folder, 600), pairs, 1024) == most  # of its 512
    config = RobertaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, max_position_embeddings=66)
    roberta = AutoModelForSequenceClassification.from_config(config)
    assert [names["readable"](roberta, length) for length in (63, 64, 65)] == [63, 64, 64]  # the first two stay unused

@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_a_score_that_is_no_number_is_refused(load, capsys, number):
    fake = lambda pairs: [{"input_ids": [1]} for _ in pairs], lambda batch: np.array([[0.5], [number]])
    with pytest.raises(SystemExit, match="2"):
        load(SCRIPT)["score_pairs"](fake, [("a", "b"), ("a", "c")], 64)
    assert capsys.readouterr().err.startswith("error: --dtype: ")

def test_mono_t5_scores_true_against_false(load, tmp_path):
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

    words = "<pad> </s> <unk> true false Query: Document: Relevant: ice melts fast is up sea".split()
    backend = Tokenizer(models.WordLevel(dict(zip(words, range(len(words)))), unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(tmp_path)
    torch.manual_seed(1)
    config = T5Config(vocab_size=len(words), d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
                      decoder_start_token_id=0)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    names = load(SCRIPT)
    pairs = [("ice melts", "sea is up fast"), ("sea", "ice " * 40), ("ice " * 20, "sea " * 40)]
    found = names["score_pairs"](scorer(names, tmp_path, 12), pairs, 64)

    model = T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    for row, text in enumerate(("Query: ice melts Document: sea is up fast Relevant:",
                                "Query: sea Document: " + "ice " * 7 + "Relevant:",  # cut to 12 tokens, the end kept
                                "Query: " + "ice " * 20 + "Document: Relevant:")):
        ids = torch.tensor([[words.index(word) for word in text.split()] + [1]])
        with torch.inference_mode():
            logits = model(input_ids=ids, decoder_input_ids=torch.tensor([[0]])).logits[0, 0]
        assert found[row, 0] == pytest.approx(float(logits[3] - logits[4]), abs=1e-5)
        chance = torch.softmax(logits[[3, 4]], 0)[0]
        assert 1 / (1 + np.exp(-found[row, 0])) == pytest.approx(float(chance), abs=1e-5)

def test_combo_score_equals_equations_4_and_5(load):
    stance = np.log([[0.2, 0.5, 0.3], [0.1, 0.8, 0.1]])  # REFUTES, NEI, SUPPORTS
    found = load(SCRIPT)["combine"](np.array([0.0, np.log(3)]), stance, 0.25, ["REFUTES", "NEI", "SUPPORTS"])
    np.testing.assert_allclose(found, [0.25 * 0.5 + 0.75 * 0.5, 0.25 * 0.2 + 0.75 * 0.75])

def test_equal_scores_fall_in_corpus_order_and_claims_keep_theirs(load):
    run = load(SCRIPT)["ranked"]({"2": {"c": 0.5, "a": 0.5, "b": 0.7}, "1": {"a": 9.0}}, {"a": 0, "b": 1, "c": 2}, 2)
    assert run.values.tolist() == [["2", "b", 1, 0.7], ["2", "a", 2, 0.5], ["1", "a", 1, 9.0]]

def test_blend_of_z_scores_by_hand(load):
    found = load(SCRIPT)["blend"]({"a": 3.0, "b": 1.0}, {"a": 10.0, "b": 20.0}, 0.25)
    assert found == pytest.approx({"a": 0.75 - 0.25, "b": -0.75 + 0.25})
    brought_in = load(SCRIPT)["blend"]({"a": 1.0, "x": 1.0}, {"a": 2.0, "b": 0.5}, 0.5)
    assert brought_in["a"] > brought_in["x"]

def test_rrf_by_hand(load):
    runs = [pd.DataFrame([("1", "a", 1), ("1", "b", 2)], columns=RUN[:3]), pd.DataFrame([("1", "b", 1)], columns=RUN[:3])]
    assert load(SCRIPT)["rrf"](runs) == {"1": pytest.approx({"a": 1 / 61, "b": 1 / 62 + 1 / 61})}

# ----------------------------------------------------------- Graph
GRAPH = {"a": ["b", "c"], "b": ["a", "d"], "c": ["a", "e"], "d": ["b", "f"], "e": ["c", "a"], "f": ["d", "b"],
         "g": ["f", "d"]}

def test_neighbours_of_the_best_come_in_until_nothing_is_new(load):
    names, calls = load(SCRIPT), []
    worth = dict(zip("abcdefg", (5, 6, 1, 9, 2, 7, 0)))

    def score(pairs, update):
        calls.append([text for _, text in pairs])
        return np.array([worth[text] for _, text in pairs], float)

    class Args:
        rounds, beam = 20, 2

    texts = {name: name for name in GRAPH}
    found = names["score_group"]({"1": ["a", "g"]}, {"1": "claim"}, texts, score, GRAPH, Args, lambda rows: None)
    # a and g bring b, c, f, d; of those the best two, d and f, bring no new one, then nothing is fresh among the best
    assert calls == [["a", "g"], ["b", "c", "f", "d"]]
    assert found["1"] == {name: worth[name] for name in "agbcfd"}
    calls.clear()
    Args.beam = 6
    names["score_group"]({"1": ["a", "g"]}, {"1": "claim"}, texts, score, GRAPH, Args, lambda rows: None)
    assert sorted(name for call in calls for name in call) == list("abcdefg")  # each once
    calls.clear()
    Args.rounds = 1
    names["score_group"]({"1": ["c"]}, {"1": "claim"}, texts, score, GRAPH, Args, lambda rows: None)
    assert calls == [["c"], ["a", "e"]]

@pytest.fixture
def ready(toy, models):
    """The toy with a tiny reranker, a tiny verifier and a graph of its corpus."""
    tiny(toy / "tiny", models / "minilm")
    tiny(toy / "other", models / "minilm", seed=5)
    tiny(toy / "stance", models / "minilm", labels=3)
    names = [json.loads(line)["abstract_id"] for line in open(toy / "data/demo/corpus.jsonl", encoding="utf-8")]
    folder = toy / "work/demo/index/graph"
    folder.mkdir(parents=True)
    np.save(folder / "neighbours.npy", np.array([[(row + 1) % 12, (row + 5) % 12] for row in range(12)], np.int32))
    (folder / "abstract_ids.json").write_text(json.dumps(names))
    import hashlib

    sha256 = hashlib.sha256((toy / "data/demo/corpus.jsonl").read_bytes()).hexdigest()
    (folder / "meta.json").write_text(json.dumps({"corpus": sha256}))
    return toy

# ----------------------------------------------------------- The whole script
def test_rerank_in_every_way(ready, run, load):
    done = run(SCRIPT, "--model", "tiny", "--depth", 4, cwd=ready)
    assert done.returncode == 0, done.stderr
    before, after = read(ready / "work/demo/test/hybrid.tsv"), read(ready / "work/demo/test/rerank.tsv")
    for claim, rows in after.groupby("claim_id"):
        assert sorted(rows["abstract_id"]) == sorted(before[before["claim_id"] == claim]["abstract_id"].head(4))
        assert rows["rank"].tolist() == [1, 2, 3, 4] and rows["score"].is_monotonic_decreasing
    assert "up to date" in run(SCRIPT, "--model", "tiny", "--depth", 4, cwd=ready).stdout
    assert not (ready / "work/demo/test/rerank.tsv.parts").exists()

    done = run(SCRIPT, "--model", "tiny", "other", "--depth", 4, "--top-k", 2, "--out", "both.tsv", cwd=ready)
    assert done.returncode == 0, done.stderr
    assert read(ready / "both.1.tsv").equals(after)
    fused = load(SCRIPT)["rrf"]([read(ready / "both.1.tsv"), read(ready / "both.2.tsv")])
    for row in read(ready / "both.tsv").itertuples():
        assert row.score == pytest.approx(fused[row.claim_id][row.abstract_id]) and row.rank <= 2

    done = run(SCRIPT, "--model", "tiny", "--depth", 3, "--graph", "work/demo/index/graph", "--out", "graph.tsv", cwd=ready)
    assert done.returncode == 0, done.stderr
    assert (read(ready / "graph.tsv").groupby("claim_id").size() == 12).all()  # the graph leads everywhere
    words = ["--graph", "work/demo/index/graph", "--rounds", 1, "--beam", 1, "--neighbours", 1, "--out", "once.tsv"]
    assert run(SCRIPT, "--model", "tiny", "--depth", 3, *words, cwd=ready).returncode == 0
    assert read(ready / "once.tsv").groupby("claim_id").size().isin((3, 4)).all()
    np.save(ready / "work/demo/index/graph/neighbours.npy", np.zeros((12, 2), np.int32))  # another graph of this corpus
    assert "up to date" not in run(SCRIPT, "--model", "tiny", "--depth", 3, *words, cwd=ready).stdout

    words = ["--verifier", "stance", "--alpha", 0.3, "--out", "combo.tsv"]
    done = run(SCRIPT, "--model", "tiny", "--depth", 4, *words, cwd=ready)
    assert done.returncode == 0, done.stderr
    from scipy.special import expit
    from transformers import pipeline

    judge = pipeline("text-classification", str(ready / "stance"), device="cpu", top_k=None)
    claims = dict(pd.read_csv(ready / "data/demo/claims.test.tsv", sep="\t").values)
    records = map(json.loads, open(ready / "data/demo/corpus.jsonl", encoding="utf-8"))
    texts = {record["abstract_id"]: record["abstract"] for record in records}
    logits = after.set_index(["claim_id", "abstract_id"])["score"]
    for row in read(ready / "combo.tsv").itertuples():
        said = judge({"text": claims[row.claim_id], "text_pair": texts[row.abstract_id]})
        nei = next(answer["score"] for answer in said if answer["label"] == "NEI")
        assert row.score == pytest.approx(0.3 * (1 - nei) + 0.7 * expit(logits[row.claim_id, row.abstract_id]), abs=1e-4)

def test_the_verifier_is_as_sure_as_it_was_calibrated(ready, run):
    from scipy.special import softmax
    from transformers import pipeline

    path = ready / "stance/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"stance_temperature": 2.5}))
    words = ["--model", "tiny", "--verifier", "stance", "--alpha", 1, "--depth", 2]
    assert run(SCRIPT, *words, cwd=ready).returncode == 0
    judge = pipeline("text-classification", str(ready / "stance"), device="cpu", top_k=None, function_to_apply="none")
    claims = dict(pd.read_csv(ready / "data/demo/claims.test.tsv", sep="\t").values)
    for row in read(ready / "work/demo/test/rerank.tsv").itertuples():
        said = judge({"text": claims[row.claim_id], "text_pair": ABSTRACTS[row.abstract_id]})
        logits = {answer["label"]: answer["score"] / 2.5 for answer in said}
        nei = dict(zip(logits, softmax(list(logits.values()))))["NEI"]
        assert row.score == pytest.approx(1 - nei, abs=1e-4)

def test_finished_groups_are_not_scored_again_after_a_crash(load, tmp_path):
    names, asked = load(SCRIPT), []
    names["score_all"].__globals__["GROUP"] = 4
    candidates = {claim: [f"{claim}{number}" for number in range(3)] for claim in "pqrst"}
    texts = {name: name for found in candidates.values() for name in found}

    def score(pairs, update):
        if len(asked) == 1 and not (tmp_path / "again").exists():
            raise KeyboardInterrupt  # a crash in the second group
        asked.append([text for _, text in pairs])
        return np.array([len(text) + hash(text[1]) % 7 / 8 for _, text in pairs])

    def call(folder):
        return names["score_all"](candidates, dict.fromkeys("pqrst", "c"), texts, lambda: score, None, None, folder)

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with pytest.raises(KeyboardInterrupt):
        call(tmp_path / "a")
    with open(tmp_path / "a" / "journal.jsonl", "a") as file:
        file.write('{"r": {"r0": 1.')  # and a torn line
    (tmp_path / "again").touch()
    resumed = call(tmp_path / "a")
    assert asked == [["p0", "p1", "p2", "q0", "q1", "q2"], ["r0", "r1", "r2", "s0", "s1", "s2"], ["t0", "t1", "t2"]]
    assert resumed == call(tmp_path / "b")
    before = len(asked)
    assert call(tmp_path / "a") == resumed and len(asked) == before

def test_kill_9_twenty_times_ends_in_the_same_bytes(toy, run, models):
    claims = [(f"k{n}", f"claim {n} on ice and " + "sea " * (n % 30)) for n in range(1500)]
    tsv(toy / "data/demo/claims.test.tsv", ["claim_id", "claim"], claims)
    rows = [(claim, f"{place:04}", place, 1 / place) for claim, _ in claims for place in range(1, 13)]
    tsv(toy / "work/demo/test/hybrid.tsv", ["claim_id", "abstract_id", "rank", "score"], rows)
    tiny(toy / "tiny", models / "minilm")
    words = [SCRIPT, "--model", "tiny", "--first-stage", "0.5"]
    whole = run(*words, "--out", "whole.tsv", cwd=toy)
    assert whole.returncode == 0, whole.stderr
    out = toy / "work/demo/test/rerank.tsv"
    kills = kill_until(out, toy, words, random.Random(9), (0.5, 2))
    assert kills >= 3, kills  # a fast machine finishes between fewer kills
    assert out.read_bytes() == (toy / "whole.tsv").read_bytes()
    assert sorted(path.name for path in out.parent.iterdir()) == ["hybrid.tsv", "rerank.tsv", "rerank.tsv.meta.json"]

# ----------------------------------------------------------- Mining
LABELS = {"a": "SUPPORTS", "b": "REFUTES", "c": "NEI", "d": "NEI", "e": "NEI"}
RANKED = ["d", "x", "a", "c", "y", "z"]

def mined(load, hard, easy, pool="both", seed=0, labels=LABELS):
    return load(SCRIPT)["mine_pairs"]("1", RANKED, labels, hard, easy, pool, np.random.default_rng(seed))

@pytest.mark.parametrize(("pool", "hard", "easy"), [
    ("both", ["d", "x", "c"], {"y", "z", "e"}), ("nei", ["d", "c", "e"], set()), ("unjudged", ["x", "y", "z"], set())])
def test_hard_negatives_are_the_best_ranked_and_easy_ones_from_the_rest(load, pool, hard, easy):
    examples = mined(load, 3, 9, pool)
    by_kind = {kind: [e["abstract_id"] for e in examples if e["kind"] == kind] for kind in ("positive", "hard", "easy")}
    assert by_kind["positive"] == ["a", "b"] and by_kind["hard"] == hard and set(by_kind["easy"]) == easy
    assert all(e["target"] == (e["kind"] == "positive") and e["judged"] == (e["abstract_id"] in LABELS) for e in examples)

def test_easy_negatives_follow_the_seed(load):
    draws = {mined(load, 0, 1, seed=seed)[-1]["abstract_id"] for seed in range(40)}
    assert draws == {"x", "y", "z", "c", "d", "e"}
    assert mined(load, 1, 1, seed=5) == mined(load, 1, 1, seed=5)

def test_no_relevant_abstract_is_ever_a_negative_and_a_claim_without_positives_gives_nothing(load):
    names = load(SCRIPT)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        assert {e["abstract_id"] for e in mined(load, 9, 9, seed=seed) if not e["target"]}.isdisjoint("ab")
        triples = names["mine_margins"]("1", RANKED, LABELS, 2, 3, list("abcdefxyz"), rng)
        assert {e["positive"] for e in triples} == {"a", "b"} and {e["negative"] for e in triples}.isdisjoint("ab")
        assert [e["kind"] for e in triples] == ["hard"] * 2 + ["easy"] * 3 + ["hard"] * 2 + ["easy"] * 3
        assert {e["negative"] for e in triples if e["kind"] == "hard"} <= set(RANKED)
    assert mined(load, 9, 9, labels={"c": "NEI"}) == []
    assert names["mine_margins"]("1", RANKED, {"c": "NEI"}, 2, 3, list("abc"), np.random.default_rng(0)) == []

def test_the_student_learns_the_teachers_best_and_all_evidence(load):
    found = load(SCRIPT)["distilled"]("1", {"c": 0.9, "a": 0.8, "x": 0.4}, LABELS, 2)
    assert [(e["abstract_id"], e["target"], e["kind"]) for e in found] == [
        ("c", 0.9, "taught"), ("a", 1.0, "positive"), ("b", 1.0, "positive")]
    assert load(SCRIPT)["distilled"]("1", {"c": 0.9}, {"c": "NEI"}, 2) == []

def test_dev_measures_by_hand(load):
    found = load(SCRIPT)["measures"](["c", "a", "x", "d", "e", "b"], LABELS)
    assert found == pytest.approx({"R@2": 1 / 2, "R@5": 1 / 2, "R@10": 1, "B-Pref": ((1 - 1 / 2) + (1 - 2 / 2)) / 2})

def test_negatives_are_mined_in_chunks_that_a_crash_does_not_lose(load, tmp_path):
    import torch

    names, sizes = load(SCRIPT), []
    known = names["rescored"].__globals__
    known["GROUP"] = 1

    def forward(batch):
        if len(sizes) == 2:
            raise KeyboardInterrupt  # a crash in the third chunk
        return np.array([[one["input_ids"][0]] for one in batch])

    def assemble(pairs):
        sizes.append(len(pairs))
        return [{"input_ids": [int(text[1:]) % 3]} for _, text in pairs]

    known["cross_encoder_scorer"] = lambda encoder, length: (assemble, forward)
    candidates = {claim: [f"{claim}{number}" for number in range(9)] for claim in "pqrst"}
    texts = {name: name for found in candidates.values() for name in found}
    given = (SimpleNamespace(device=torch.device("cpu")), candidates, dict.fromkeys("pqrst", "c"), texts,
             SimpleNamespace(max_length=8))
    with pytest.raises(KeyboardInterrupt):
        names["rescored"](*given, tmp_path)
    assert sizes == [18, 18]
    found = names["rescored"](*given, tmp_path)
    assert sizes == [18, 18, 18, 9]
    assert found["t"] == ["t2", "t5", "t8", "t1", "t4", "t7", "t0", "t3", "t6"]  # equal ones as they stood
    assert names["rescored"](*given) == found

# ----------------------------------------------------------- Train
def test_patience_is_not_forgotten_in_a_crash(load, models, tmp_path):
    from sentence_transformers.base.evaluation import BaseEvaluator

    class Falling(BaseEvaluator):
        """A dev score that only gets worse, and once, a crash."""
        asked, primary_metric = 0, "dev_Subtask I"

        def __call__(self, *_, **__):
            self.asked += 1
            if self.asked == 3:
                raise KeyboardInterrupt
            return {"dev_Subtask I": 1 / self.asked}

    names, dev = load(SCRIPT), Falling()
    args = SimpleNamespace(seed=13, device="cpu", max_length=16, batch_size=2, lr=1e-4, gradient_checkpointing=False,
                           report_to="none", patience=2)
    tiny(tmp_path / "tiny", models / "minilm")
    examples = [{"claim_id": "c", "abstract_id": name, "target": 1.0} for name in "abcd"]

    def fit():
        encoder = names["load_cross_encoder"](tmp_path / "tiny", args, labels=1)
        texts, folder = dict(zip("abcd", "wxyz")), tmp_path / "run"
        curve = names["fit"](encoder, examples, "bce", {"c": "claim"}, texts, 6, dev, folder, args)
        return [line["Subtask I"] for line in curve]

    (tmp_path / "run").mkdir()
    with pytest.raises(KeyboardInterrupt):
        fit()
    assert fit() == [1, 1 / 2, 1 / 4]  # a second epoch in vain, after that before the crash
    assert fit() == [1, 1 / 2, 1 / 4] and dev.asked == 4  # after a crash between the last epoch and the saved model

@pytest.mark.parametrize(("words", "phases"), [
    (["--epochs", 1, 1], {1, 2}),
    (["--recipe", "margin", "--epochs", 1, "--hard", 2, "--easy", 2, "--batch-size", 4], {1}),
    (["--recipe", "pointwise", "--epochs", 1, "--warm-start", "data/models/minilm", "--warm-pairs", 6,
      "--dev-split", "test"], {1}),
    (["--recipe", "pointwise", "--epochs", 1, "--warm-start", "work/demo/train/hybrid.tsv", "--warm-pairs", 6], {1}),
    (["--warm-start", "data/models/minilm", "--warm-pairs", 6, "--epochs", 0], set()),
    (["--recipe", "distil", "--epochs", 1, "--run", "taught.tsv"], {1}),
])
def test_every_recipe_trains_a_model_that_reranks(ready, run, words, phases):
    rows = [(claim, name, rank, 1 / (rank + 1)) for claim in ("c1", "c2") for rank, name in
            enumerate(("0010", "0011", "0012", "0004", "0009"), 1)]
    tsv(ready / "taught.tsv", RUN, rows)
    words = ["train", "--model", "tiny", "--max-length", 64, *words]
    done = run(SCRIPT, *words, cwd=ready)
    assert done.returncode == 0, done.stderr
    model = ready / "work/demo/models/reranker"
    assert not list(model.rglob("*.bin")) and not list(model.rglob("*.pt"))
    assert not (model.parent / "reranker.parts").exists()
    examples = [json.loads(line) for line in open(f"{model}.examples.jsonl", encoding="utf-8")]
    relevant = {"c1": {"0010"}, "c2": {"0012", "0004"}}
    assert {example["phase"] for example in examples} == phases
    for example in examples:
        if "negative" in example:
            assert example["positive"] in relevant[example["claim_id"]]
            assert example["negative"] not in relevant[example["claim_id"]]
        else:
            assert (example["kind"] == "positive") == (example["abstract_id"] in relevant[example["claim_id"]])
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["examples"] == len(examples)
    assert len(result["dev"]) == (2 if "--dev-split" in words else 0)  # after the warm start, after the epoch
    assert "up to date" in run(SCRIPT, *words, cwd=ready).stdout
    assert run(SCRIPT, "--depth", 4, cwd=ready).returncode == 0

    # the same model from the file of examples alone
    if phases == {1} and "--warm-start" not in words:
        again = [*words, "--examples", "work/demo/models/reranker.examples.jsonl", "--out", "again"]
        done = run(SCRIPT, *again, cwd=ready)
        assert done.returncode == 0, done.stderr
        assert (ready / "again/model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()

def test_the_sweep_trains_the_five_models_of_ant_bridge(load, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    names, trained = load(SCRIPT), []
    names["train"].__globals__["train_one"] = lambda args: trained.append(args) or {"made": [args.out]}
    blank = dict.fromkeys(("epochs", "lr", "batch_size", "depth", "hard", "easy", "pool", "margin"))
    args = SimpleNamespace(recipe="margin", sweep=True, model=["large", "m3"], out="model", device="cuda:1", **blank)
    assert names["train"](args) == {"made": [f"model-{number}" for number in range(1, 6)]}
    found = [(one.model[0], one.batch_size, one.margin, one.hard, one.easy, one.depth) for one in trained]
    assert found == [("large", 8, 0.2, 5, 10, 1000), ("large", 8, 0.25, 5, 10, 1000), ("large", 16, 0.2, 5, 10, 1000),
                     ("large", 16, 0.25, 5, 10, 1000), ("m3", 16, 0.2, 5, 10, 1000)]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7" and args.device == "cuda"  # a Trainer would take both

# ----------------------------------------------------------- Bad input
@pytest.mark.parametrize(("words", "said"), [
    (["--model", "stance"], ["stance", "3 labels"]),
    (["--model", "data/models/minilm"], ["minilm", "no classification head"]),
    (["--model", "tiny", "--verifier", "other"], ["other", "1 labels"]),
    (["train", "--model", "stance"], ["stance", "3 labels"]),
])
def test_a_head_that_does_not_fit_is_refused(ready, run, contents, refused, words, said):
    before = contents(ready)
    refused(run(SCRIPT, *words, cwd=ready), before, ready, *said)

@pytest.mark.parametrize(("arguments", "word"), [
    (["--model", "work/demo/models/nothing"], "work/demo/models/nothing"),
    (["--run", "nowhere.tsv", "--model", "data/models/minilm"], "nowhere.tsv"),
    (["--depth", "0"], "--depth"),
    (["--model", "tiny", "--graph", "work/demo/index/nothing"], "work/demo/index/nothing"),
    (["train", "--qrels", "nowhere.tsv"], "nowhere.tsv"),
    (["train", "--epochs", "many"], "--epochs"),
    (["train", "--recipe", "distil", "--run", "loud.tsv"], "loud.tsv"),
    (["--model", "tiny", "--device", "cuda:7"], "--device"),
    (["train", "--model", "tiny", "--device", "cuda:7"], "--device"),
    (["train", "--model", "tiny", "other"], "--model"),
    (["train", "--model", "tiny", "--sweep"], "--sweep"),
    (["train", "--model", "tiny", "other", "stance", "--recipe", "margin", "--sweep"], "--sweep"),
    (["train", "--model", "tiny", "--recipe", "margin", "--sweep", "--batch-size", 16], "--sweep"),
    (["train", "--model", "tiny", "--recipe", "margin", "--sweep", "--margin", 0.2], "--sweep"),
])
def test_missing_files_and_bad_flags_are_refused(ready, run, contents, refused, arguments, word):
    tsv(ready / "loud.tsv", RUN, [("c1", "0010", 1, 7.5)])
    before = contents(ready)
    refused(run(SCRIPT, *arguments, cwd=ready), before, ready, word)

GIVEN = {"claim_id": "c1", "abstract_id": "0010", "kind": "positive", "judged": True, "target": 1.0, "phase": 1}

@pytest.mark.parametrize(("line", "recipe", "said"), [
    ("{", "pointwise", [":2:", "JSON"]),
    ("7", "pointwise", [":2:", "JSON"]),
    (GIVEN | {"target": 2}, "pointwise", [":2:", "target"]),
    (GIVEN | {"claim_id": "c9"}, "pointwise", [":2:", "claim_id 'c9'"]),
    (GIVEN | {"abstract_id": "9999"}, "pointwise", [":2:", "abstract_id '9999'"]),
    (GIVEN | {"phase": 2}, "pointwise", [":2:", "phase 2"]),
    (GIVEN, "margin", [":1:", "negative", "margin"]),
    (GIVEN, "two-phase", ["given.jsonl:", "phase 2"]),
])
def test_examples_that_cannot_be_trained_on_are_refused_by_line(ready, run, contents, refused, line, recipe, said):
    lines = [json.dumps(GIVEN), line if isinstance(line, str) else json.dumps(line)]
    (ready / "given.jsonl").write_text("\n".join(lines))
    before = contents(ready)
    words = ["train", "--model", "tiny", "--recipe", recipe, "--examples", "given.jsonl"]
    refused(run(SCRIPT, *words, cwd=ready), before, ready, "given.jsonl", *said)

def test_a_graph_of_another_corpus_is_refused(ready, run, contents, refused):
    with open(ready / "data/demo/corpus.jsonl", "a", encoding="utf-8") as file:
        file.write('{"abstract_id": "new", "abstract": "text"}\n')
    before = contents(ready)
    refused(run(SCRIPT, "--model", "tiny", "--graph", "work/demo/index/graph", cwd=ready), before, ready, "another corpus")

@pytest.mark.parametrize(("row", "words"), [
    (("c9", "0001", 1, 0.5), ["hybrid.tsv:3:", "claim_id c9"]),
    (("c3", "9999", 2, 0.5), ["hybrid.tsv:3:", "abstract_id 9999"]),
    (("c3", "0001", 2, 0.5), ["hybrid.tsv:3:", "stands twice"]),
    (("c3", "0002", "2nd", 0.5), ["hybrid.tsv:3:", "rank"]),
    (("c3", "0002", 2, "nan"), ["hybrid.tsv:3:", "score"]),
])
def test_bad_runs_are_refused_by_line(toy, run, contents, refused, row, words):
    tsv(toy / "work/demo/test/hybrid.tsv", RUN, [("c3", "0001", 1, 0.9), row])
    before = contents(toy)
    refused(run(SCRIPT, "--model", "data/models/minilm", cwd=toy), before, toy, *words)

def test_a_train_split_without_a_positive_is_refused(toy, run, contents, refused):
    tsv(toy / "data/demo/qrels.train.tsv", ["claim_id", "abstract_id", "label"], [("c1", "0001", "NEI")])
    before = contents(toy)
    refused(run(SCRIPT, "train", cwd=toy), before, toy, "qrels.train.tsv", "SUPPORTS")

def test_an_unknown_label_is_refused_by_line(toy, run, contents, refused):
    tsv(toy / "data/demo/qrels.train.tsv", ["claim_id", "abstract_id", "label"], [("c1", "0001", "MAYBE")])
    before = contents(toy)
    refused(run(SCRIPT, "train", cwd=toy), before, toy, "qrels.train.tsv:2:", "MAYBE")
