"""03_rerank.py: scores of every kind of model, restarts, all losses, and what is refused."""
import argparse
import functools
import hashlib
import json
import shutil
import subprocess
import sys
import zlib

import numpy as np
import pandas as pd
import pytest
from conftest import ABSTRACTS, CLAIMS, tsv

SCRIPT, KEY = "03_rerank.py", ["claim_id", "abstract_id"]
RUN, GRAPH = [*KEY, "rank", "score"], "work/demo/index/graph"
TEMPLATE = """{% for m in messages %}{% if m.role == 'system' %}<|im_start|>{{ m.content }}
{% elif m.role == 'document' %}<Document>: {{ m.content }}{% endif %}{% endfor %}
<Query>: {% for m in messages if m.role == 'query' %}{{ m.content }}{% endfor %}<|im_end|>yes?"""
KILLER = """import os, runpy, sys
from sentence_transformers import CrossEncoder
method, last, *sys.argv = sys.argv[1:]
plain, calls = getattr(CrossEncoder, method), iter(range(int(last) - 1))
def killed(*args, **kwargs):
    return os.kill(os.getpid(), 9) if next(calls, None) is None else plain(*args, **kwargs)
setattr(CrossEncoder, method, killed)
runpy.run_path(sys.argv[0], run_name="__main__")"""
PAIR = {"kind": "hard", "claim_id": "c1", "abstract_id": "0010", "target": 0}
TUPLE = {"kind": "evidence", "claim_id": "c1", "positive": "0010", "negatives": ["0011", "0003"]}
ALONE = [TUPLE | {"negatives": []}]
BAD = {"torn": [PAIR, "{"], "two": [PAIR, PAIR | {"target": 2}], "zeros": [PAIR], "alone": ALONE,
       "nan": [PAIR, PAIR | {"target": float("nan")}], "claim": [PAIR, PAIR | {"claim_id": "c9"}],
       "abstract": [PAIR, PAIR | {"abstract_id": "99"}]}  # examples.jsonl, as it should not be

def read(path):
    return pd.read_csv(path, sep="\t", dtype={"claim_id": str, "abstract_id": str})

def kill(folder, method, last, *words):
    """Run the script; kill -9 comes at the last-th call of a method of CrossEncoder."""
    command = [sys.executable, "-c", KILLER, method, str(last), SCRIPT, *map(str, words)]
    assert subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode == -9

def tiny(folder, models, labels=1, seed=0, dtype="float32"):
    """Make a cross-encoder of two small layers with random weights."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig
    torch.manual_seed(seed)
    config = BertConfig(vocab_size=30_522, hidden_size=32, num_hidden_layers=2, num_labels=labels,
                        num_attention_heads=2, intermediate_size=64, initializer_range=0.5)
    model = AutoModelForSequenceClassification.from_config(config)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(models / "minilm").save_pretrained(folder)
    return folder

@pytest.fixture
def ready(toy, models):
    """The toy with a small model, a graph, and examples of both shapes."""
    tiny(toy / "tiny", models)
    graph = toy / GRAPH
    graph.mkdir(parents=True)
    np.save(graph / "neighbours.npy", [[(n + 1) % 12, (n + 5) % 12] for n in range(12)])
    (graph / "abstract_ids.json").write_text(json.dumps(list(ABSTRACTS)))
    files = {path.name: path.read_bytes() for path in graph.iterdir()}
    files = {name: [len(data), zlib.crc32(data)] for name, data in files.items()}
    corpus = hashlib.sha256((toy / "data/demo/corpus.jsonl").read_bytes()).hexdigest()
    (graph / "meta.json").write_text(json.dumps({"corpus": corpus, "files": files}))
    targets = [("c1", "0010", 1), ("c1", "0011", 0), ("c2", "0012", 1), ("c2", "0004", 0.8),
               ("c2", "0009", 0.1)]
    pairs = [dict(zip([*KEY, "target"], row)) for row in targets]
    tuples = [TUPLE, {"claim_id": "c2", "positive": "0012", "negatives": ["0009"]}]
    (toy / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (toy / "tuples.jsonl").write_text("\n".join(map(json.dumps, tuples)))
    return toy

@pytest.fixture
def call(load, monkeypatch, capsys):
    """call(folder, *words): the script in this process; its result, and what it printed."""
    def run_here(folder, *words):
        monkeypatch.chdir(folder)
        names = load(SCRIPT)
        monkeypatch.setattr(sys, "argv", [SCRIPT, *map(str, words)])
        try:
            names["main"]()
        finally:
            for lock in names["LOCKS"]:
                lock.lock.release()
        said = capsys.readouterr()
        return json.loads(said.out.splitlines()[-1]), said
    return run_here

def scorer(names, folder, dtype="fp32", **own):
    """The script's model, and its function from pairs to scores and truncation flags."""
    args = {"device": ["cpu"], "max_length": 512, "prompt": None, "prompt_name": None} | own
    load = functools.partial(names["load_reranker"], args=argparse.Namespace(**args))
    model = names["open_model"](load, folder, argparse.Namespace(**args), dtype)
    return model, functools.partial(names["score_pairs"], model, 2, None)

# ---------------------------------------------------------------- Scores
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_scores_are_those_of_predict_and_only_abstracts_truncated(load, models, tmp_path, dtype):
    import torch
    from sentence_transformers import CrossEncoder
    folder, rng = tiny(tmp_path / "tiny", models), np.random.default_rng(2)
    pairs = [(f"claim {row} " * (row % 12), "ice " * rng.integers(90)) for row in range(60)]
    found, cut = scorer(load(SCRIPT), folder, max_length=48, dtype=dtype)[1](pairs)
    encoder = CrossEncoder(str(folder), max_length=48, device="cpu")
    assert cut == [len(encoder.tokenizer(*pair)["input_ids"]) > 48 for pair in pairs] and any(cut)
    wanted = encoder.predict(pairs, activation_fn=torch.nn.Identity(),
                             processing_kwargs={"text": {"truncation": "only_second"}})
    np.testing.assert_allclose(found, wanted, atol=1e-5 if dtype == "fp32" else 1)
    if dtype == "bf16":  # the last layer is fp32: more digits than bf16 has
        assert (found != torch.tensor(found).bfloat16().float().numpy()).any()

def test_a_causal_reranker_keeps_template_and_claim(load, smollm, tmp_path):
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder.modules import LogitScore
    encoder = CrossEncoder(str(smollm), device="cpu", prompts={"judge": "Judge it."})
    encoder.tokenizer.chat_template = TEMPLATE
    encoder.save_pretrained(str(tmp_path))
    names, long, pair = load(SCRIPT), ("The sun is hot #sun", "Ice melts. " * 40), ("Up?", "Sea.")
    encoder, score = scorer(names, tmp_path, max_length=64, prompt_name="judge")
    (found, cut), [[(claim, text)], _] = score([long, pair]), names["truncated"](encoder, [long])
    coded = encoder.preprocess([(claim, text)], prompt="Judge it.")["input_ids"][0]
    seen = encoder.tokenizer.decode(coded)
    assert isinstance(encoder[1], LogitScore) and cut == [1, 0] and len(coded) in range(58, 65)
    assert seen.startswith("<|im_start|>Judge it.\n") and long[1].startswith(text) and text
    assert seen.endswith(f"{text}<Query>: {long[0]}<|im_end|>yes?")
    wanted = encoder.predict([pair], prompt="Judge it.", activation_fn=lambda logits: logits)
    assert found[1] == pytest.approx(wanted[0], abs=1e-4)
    assert abs(scorer(names, tmp_path, prompt="Refute it.")[1]([pair])[0][0] - found[1]) > 1e-3

def test_late_interaction_is_max_sim(load, models, tmp_path):
    from sentence_transformers import MultiVectorEncoder
    encoder = MultiVectorEncoder(str(tiny(tmp_path / "tiny", models)), device="cpu")
    encoder.save_pretrained(str(tmp_path / "late"))
    pairs = [("ice melts", "the sea is up"), ("ice melts", "ice"), ("sun", "the sea is up")]
    for pair, score in zip(pairs, scorer(load(SCRIPT), tmp_path / "late")[1](pairs)[0]):
        similar = encoder.encode_query(pair[0]) @ encoder.encode_document(pair[1]).T
        assert float(score) == pytest.approx(float(similar.max(dim=1).values.sum()), abs=1e-4)

def test_mono_t5_scores_true_against_false(load, models, tmp_path):
    import torch
    from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration
    tokenizer = AutoTokenizer.from_pretrained(models / "minilm")
    torch.manual_seed(1)
    config = T5Config(vocab_size=30_522, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
                      decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).eval()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    found, cut = scorer(load(SCRIPT), tmp_path, max_length=16)[1](
        [("ice melts", "sea up fast"), ("sea", "ice " * 40), ("up", "sea")])
    true, false = tokenizer.convert_tokens_to_ids(["true", "false"])
    seen = [("ice melts", "sea up fast"), ("sea", "ice " * 7), ("up", "sea")]
    for number, (claim, text) in zip(found, seen):
        ids = tokenizer(f"Query: {claim} Document: {text} Relevant:", return_tensors="pt").input_ids
        with torch.inference_mode():
            logits = model(input_ids=ids, decoder_input_ids=torch.tensor([[0]])).logits[0, 0]
        assert number == pytest.approx(float(logits[true] - logits[false]), abs=1e-5)
    assert cut == [False, True, False]

def test_arithmetic_by_hand(load):
    names = load(SCRIPT)
    found = names["combined"](np.array([0.0, np.log(3)]), np.array([0.5, 0.2]), 0.25)
    np.testing.assert_allclose(found, [0.75 * 0.5 + 0.25 * 0.5, 0.75 * 0.75 + 0.25 * 0.2])
    rows = [("1", "a", 3, 10.0), ("1", "b", 1, 20.0), ("2", "a", 1, 2.0), ("2", "x", 1, None)]
    table = pd.DataFrame(rows, columns=[*KEY, "score", "first"])
    assert names["blended"](table, 0.25).tolist() == pytest.approx([0.5, -0.5, 0, 0])
    rows = [("2", "c", 0.5), ("2", "a", 0.5), ("2", "b", 0.7), ("1", "a", 9.0)]
    table, order = pd.DataFrame(rows, columns=[*KEY, "score"]), {"a": 0, "b": 1, "c": 2}
    run = names["ranked"](table, order)
    best = [["2", "b", 1, 0.7], ["2", "a", 2, 0.5], ["2", "c", 3, 0.5], ["1", "a", 1, 9.0]]
    assert run.values.tolist() == best
    fused = names["rrf"]([run, run[1:2].assign(rank=1)])
    assert fused["score"].tolist() == pytest.approx([1 / 61, 1 / 62 + 1 / 61, 1 / 63, 1 / 61])

@pytest.mark.parametrize(("start", "rounds", "beam", "calls"), [
    ("ag", 20, 2, ["ag", "bcfd"]),  # then d and f are best, and they know nothing new
    ("ag", 20, 6, ["ag", "bcfd", "e"]), ("c", 1, 2, ["c", "ae"])])
def test_neighbours_of_the_best_join_until_nothing_is_new(load, start, rounds, beam, calls):
    asked, worth = [], dict(zip("abcdefg", (5, 6, 1, 9, 2, 7, 0)))
    graph = {"a": "bc", "b": "ad", "c": "ae", "d": "bf", "e": "ca", "f": "db", "g": "fd"}
    def score(pairs):
        asked.append("".join(name for _, name in pairs))
        return [(claim, name, worth[name], False) for claim, name in pairs]
    args, pairs = argparse.Namespace(rounds=rounds, beam=beam), [("1", name) for name in start]
    found = load(SCRIPT)["score_run"](pairs, score, graph, args)
    assert asked == calls and "".join(found["abstract_id"]) == "".join(calls)

def test_what_cannot_be_scored_is_named(load, models, tmp_path, capsys):
    names, path = load(SCRIPT), tmp_path / "0.jsonl"
    with pytest.raises(SystemExit, match="2"):
        names["score_groups"]({"c3": ""}, {"a": "", "b": ""}, lambda pairs: (
            np.array([0.5, np.nan]), [0, 0]), path, [("c3", "a"), ("c3", "b")])
    with pytest.raises(SystemExit, match="2"):
        scorer(names, tiny(tmp_path / "tiny", models), max_length=20)[1]([("a " * 30, "b")])
    said = capsys.readouterr().err
    assert "claim c3, abstract b" in said and "--dtype fp32" in said and "--max-length: 20" in said
    assert path.read_text() == ""

# ---------------------------------------------------------------- The whole script
def test_rerank_in_every_way(ready, call, load, models):
    call(ready, "--model", "tiny", "--depth", 4)
    before, after = (read(ready / f"work/demo/test/{name}.tsv") for name in ("hybrid", "rerank"))
    for claim, rows in after.groupby("claim_id"):
        given = before[before["claim_id"] == claim]["abstract_id"].head(4)
        assert sorted(rows["abstract_id"]) == sorted(given)
        assert rows["rank"].tolist() == [1, 2, 3, 4] and rows["score"].is_monotonic_decreasing
    assert "up to date" in call(ready, "--model", "tiny", "--depth", 4, "--batch-size", 7)[1].out
    tiny(ready / "other", models, seed=5)
    call(ready, "--model", "other", "--depth", 4, "--out", "other.tsv")
    call(ready, "--model", "tiny", "other", "--depth", 4, "--top-k", 2, "--out", "both.tsv")
    fused = load(SCRIPT)["rrf"]([after, read(ready / "other.tsv")])
    merged = read(ready / "both.tsv").merge(fused, on=KEY)
    assert len(merged) == 6 and np.allclose(merged["score_x"], merged["score_y"])
    call(ready, "--model", "tiny", "--graph", GRAPH, "--depth", 3, "--out", "graph.tsv")
    assert (read(ready / "graph.tsv").groupby("claim_id").size() == 12).all()  # all are reached
    rows = [(claim, name, 0.5, 0.1) for claim in CLAIMS["test"] for name in ABSTRACTS]
    tsv(ready / "verdicts.tsv", [*KEY, "p_supports", "p_refutes"], rows)
    words = ["--verdicts", "verdicts.tsv", "--alpha", 0.3, "--out", "combo.tsv"]
    call(ready, "--model", "tiny", "--depth", 4, *words)
    merged = read(ready / "combo.tsv").merge(after, on=KEY)
    sigmoid = 1 / (1 + np.exp(-merged["score_y"]))
    assert np.allclose(merged["score_x"], 0.3 * 0.6 + 0.7 * sigmoid, atol=1e-6)
    with open(ready / "data/demo/corpus.jsonl", "a") as file:  # 0001 once more: an equal score
        file.write(json.dumps({"abstract_id": "0013", "abstract": ABSTRACTS["0001"]}))
    tsv(ready / "twins.tsv", RUN, [("c3", "0001", 1, 3), ("c3", "0013", 2, 2)])
    [made] = call(ready, "--model", "tiny", "--run", "twins.tsv", "--dtype", "bf16")[0]["models"]
    assert made == {"model": "tiny", "pairs": 2, "equal_scores": 1, "truncated": 0}

def test_kill_9_then_another_batch_size_and_two_devices(toy, run, models):
    claims = [(f"k{n}", f"claim {n} on ice and " + "sea " * (n % 30)) for n in range(200)]
    tsv(toy / "data/demo/claims.test.tsv", ["claim_id", "claim"], claims)
    rows = [(f"k{n}", f"{rank:04}", rank, 1 / rank) for n in range(200) for rank in range(1, 13)]
    tsv(toy / "work/demo/test/hybrid.tsv", RUN, rows)
    tiny(toy / "tiny", models)
    words = ["--model", "tiny", "--depth", 12, "--first-stage", 0.5]
    assert run(SCRIPT, *words, "--out", "whole.tsv", cwd=toy).returncode == 0
    kill(toy, "predict", 3, *words)
    out, path = toy / "work/demo/test/rerank.tsv", toy / "work/demo/test/rerank.tsv.parts/0.jsonl"
    journal = path.read_text()
    shutil.copytree(path.parent, toy / "again.tsv.parts")
    assert journal.count("\n") == 2  # two groups of 1,024 pairs
    path.write_text(journal[:-40])  # and the second line is torn
    assert run(SCRIPT, *words, cwd=toy).returncode == 0
    assert out.read_bytes() == (toy / "whole.tsv").read_bytes() and not path.parent.exists()
    words += ["--out", "again.tsv", "--batch-size", 5, "--device", "cpu", "cpu"]
    again = run(SCRIPT, *words, cwd=toy)
    assert again.returncode == 0 and "1/1" in again.stderr, again.stderr  # one group of three
    both = read(toy / "whole.tsv").merge(read(toy / "again.tsv"), on=KEY)
    assert len(both) == 2400 and np.allclose(both["score_x"], both["score_y"], atol=1e-4)

# ---------------------------------------------------------------- Train
ROWS = {"bce": 5, "mse": 5, "l1": 5, "margin": 3, "mnrl": 2, "lambda": 2, "listnet": 2,
        "ranknet": 2}  # of five pairs, or two tuples with three negatives

@pytest.mark.parametrize("loss", ROWS)
def test_every_loss_trains_a_model_that_reranks(ready, call, loss):
    shape = "tuples" if loss in ("margin", "mnrl", "lambda") else "pairs"
    words = ["train", f"{shape}.jsonl", "--model", "tiny", "--loss", loss, "--lr", 1e-3,
             "--batch-size", 2, "--epochs", 1.5, "--max-length", 32, "--dev-split", "test",
             "--dev-run", "work/demo/test/hybrid.tsv"]
    made, said = call(ready, *words)
    assert "{" not in said.err and said.err.count("epoch ") == 2 and "before training" in said.out
    log = json.loads((ready / "work/demo/models/reranker.meta.json").read_text())["log"]
    assert made["rows"] == ROWS[loss] and len(made["dev"]) == 2
    assert loss != "bce" or 1 < log[-1]["epoch"] < 2
    assert not (ready / "work/demo/models/reranker.parts").exists()
    assert "up to date" in call(ready, *words)[1].out
    assert call(ready, "--depth", 4)[0]["made"]

def test_a_kill_behind_the_last_epoch_begins_no_other(ready, run):
    words = ["train", "pairs.jsonl", "--model", "tiny", "--epochs", 2, "--lr", 1e-3]
    assert run(SCRIPT, *words, "--out", "whole", cwd=ready).returncode == 0
    for number in (2, 3):  # while the second checkpoint is written; behind the last epoch
        kill(ready, "save_pretrained", number, *words, "--out", number)
        done = run(SCRIPT, *words, "--out", number, cwd=ready)
        assert done.returncode == 0 and done.stderr.count("epoch ") == 3 - number, done.stderr
        one, other = (ready / name / "model.safetensors" for name in ("whole", str(number)))
        assert one.read_bytes() == other.read_bytes()

@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_trained_in_fp32(ready, call, models, dtype):
    import torch
    from safetensors.torch import load_file
    stored = load_file(tiny(ready / "half", models, dtype=dtype) / "model.safetensors")
    call(ready, "train", "pairs.jsonl", "--model", "half", "--lr", 1e-5, "--batch-size", 2)
    for name, weights in load_file(ready / "work/demo/models/reranker/model.safetensors").items():
        moved = (weights != stored[name].float()).float().mean()
        assert weights.dtype == torch.float32 and ("embeddings" in name or moved > 0.7)

# ---------------------------------------------------------------- Bad input
@pytest.mark.parametrize(("words", "said"), [
    ("train torn.jsonl", ["torn.jsonl:2:", "JSON"]), ("train nan.jsonl", ["nan.jsonl:2:", "nan"]),
    ("train two.jsonl", ["two.jsonl:2:", "target 2.0", "0 to 1"]),
    ("train claim.jsonl", ["claim.jsonl:2:", "'c9'"]),
    ("train abstract.jsonl", ["abstract.jsonl:2:", "'99'"]),
    ("train zeros.jsonl", ["zeros.jsonl", "no positive"]),
    ("train zeros.jsonl --loss margin", ["zeros.jsonl:1:", "'positive'", "tuple"]),
    ("train alone.jsonl --loss margin", ["alone.jsonl", "no negative"]),
    ("train pairs.jsonl --model stance", ["stance", "3 labels", "05_classify.py"]),
    ("--model stance", ["stance", "3 labels", "05"]), ("--model torn", ["torn: cannot be loaded"]),
    ("--model data/models/minilm", ["minilm", "03_rerank.py train"]),
    ("--model tiny --prompt-name judge", ["tiny", "prompt name 'judge'"]),
    ("--model tiny --device cuda:7", ["tiny: cannot be loaded"]), ("--depth 0", ["--depth"]),
    ("--alpha nan", ["--alpha"]), ("--top-k x", ["--top-k"]), ("train --lr inf", ["--lr"]),
    ("--run nowhere.tsv", ["nowhere.tsv"]),
    ("--graph nowhere", ["nowhere"]), ("--graph broken", ["neighbours.npy is damaged"]),
    (f"--graph {GRAPH} --corpus more.jsonl --run one.tsv", ["another corpus"]),
    ("--verdicts few.tsv", ["claim c3, abstract 0003"]), ("--out lock.tsv", ["another command"]),
    (f"--graph {GRAPH} --verdicts few.tsv", ["--verdicts"])])
def test_bad_input_is_one_line(ready, call, models, contents, capsys, words, said):
    from filelock import FileLock
    tiny(ready / "stance", models, labels=3)
    shutil.copytree(ready / "tiny", ready / "torn")
    (ready / "torn" / "model.safetensors").write_bytes(b"torn")
    shutil.copytree(ready / GRAPH, ready / "broken")
    (ready / "broken" / "neighbours.npy").write_bytes(b"")
    for name, lines in BAD.items():
        text = "\n".join(map(json.dumps, lines)).replace('"{"', "{")
        (ready / f"{name}.jsonl").write_text(text)
    (ready / "more.jsonl").write_text('{"abstract_id": "0001", "abstract": "text"}')
    tsv(ready / "few.tsv", [*KEY, "p_supports", "p_refutes"], [("c3", "0003", 0.5, 5)])
    tsv(ready / "one.tsv", RUN, [("c3", "0001", 1, 1)])
    before = contents(ready)
    with FileLock(ready / "lock.tsv.lock"), pytest.raises(SystemExit, match="2"):
        call(ready, *words.split())
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and all(word in errors[0] for word in said)
    after = contents(ready).items()
    assert dict(row for row in after if ".parts" not in row[0] and ".lock" not in row[0]) == before
