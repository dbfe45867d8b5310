"""03_rerank.py: scores of every kind of model, and training with every loss."""
import functools
import json
from argparse import Namespace

import numpy as np
import pandas as pd
import pytest
from conftest import ABSTRACTS, KEY, RUN, facts, load, read, tiny, tiny_llm, tsv

SCRIPT, GRAPH = "03_rerank.py", "work/demo/index/graph"
KIT = load(SCRIPT)
TEMPLATE = """{% for m in messages %}{% if m.role == 'system' %}<|im_start|>{{ m.content }}
{% elif m.role == 'document' %}<Document>: {{ m.content }}{% endif %}{% endfor %}
<Query>: {% for m in messages if m.role == 'query' %}{{ m.content }}{% endfor %}<|im_end|>yes?"""

def scorer(folder, dtype="fp32", **own):
    """The script's model, and its function from pairs to scores and truncation flags."""
    args = Namespace(**{"device": ["cpu"], "batch_size": 2, "max_length": 512, "prompt": None,
                        "prompt_name": None, "verdicts": None} | own)
    model = KIT.open_model(KIT.load_reranker, folder, args, dtype, flags=args)
    return model, functools.partial(KIT.score_pairs, model, None, args)

@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_scores_are_those_of_predict_and_only_abstracts_truncated(models, tmp_path, dtype):
    import torch
    from sentence_transformers import CrossEncoder
    folder, rng = tiny(tmp_path / "tiny"), np.random.default_rng(2)
    pairs = [(f"claim {row} " * (row % 12), "ice " * rng.integers(90)) for row in range(60)]
    found, cut = scorer(folder, max_length=48, dtype=dtype)[1](pairs)
    encoder = CrossEncoder(folder, max_length=48, device="cpu")
    assert cut == [len(encoder.tokenizer(*pair)["input_ids"]) > 48 for pair in pairs] and any(cut)
    wanted = encoder.predict(pairs, activation_fn=torch.nn.Identity(),
                             processing_kwargs={"text": {"truncation": "only_second"}})
    np.testing.assert_allclose(found, wanted, atol=1e-5 if dtype == "fp32" else 1)
    if dtype == "bf16":  # the last layer is fp32: more digits than bf16 has
        assert (found != torch.tensor(found).bfloat16().float().numpy()).any()

def test_a_causal_reranker_keeps_template_and_claim(tmp_path):
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder.modules import LogitScore
    encoder = CrossEncoder(tiny_llm(tmp_path), device="cpu", prompts={"judge": "Judge it."})
    encoder.tokenizer.chat_template = TEMPLATE
    encoder.save_pretrained(str(tmp_path))
    long, pair = ("The sun is hot #sun", "Ice melts. " * 40), ("Up?", "Sea.")
    encoder, score = scorer(tmp_path, max_length=99, prompt_name="judge")
    (found, cut), [text] = score([long, pair]), KIT.truncated(encoder, [long])
    coded = encoder.preprocess([(long[0], text)], prompt="Judge it.")["input_ids"][0]
    seen = encoder.tokenizer.decode(coded)
    assert isinstance(encoder[1], LogitScore) and cut == [1, 0] and len(coded) in range(93, 100)
    assert seen.startswith("<|im_start|>Judge it.\n") and long[1].startswith(text) and text
    assert seen.endswith(f"{text}<Query>: {long[0]}<|im_end|>yes?")
    wanted = encoder.predict([pair], prompt="Judge it.", activation_fn=lambda logits: logits)
    assert found[1] == pytest.approx(wanted[0], abs=1e-4)
    assert abs(scorer(tmp_path, prompt="Refute it.")[1]([pair])[0][0] - found[1]) > 1e-3

def test_late_interaction_is_max_sim(models, tmp_path):
    from sentence_transformers import MultiVectorEncoder
    encoder = MultiVectorEncoder(tiny(tmp_path / "tiny"), device="cpu")
    encoder.save_pretrained(str(tmp_path / "late"))
    pairs = [("ice melts", "the sea is up"), ("ice melts", "ice"), ("sun", "the sea is up")]
    for pair, score in zip(pairs, scorer(tmp_path / "late")[1](pairs)[0]):
        similar = encoder.encode_query(pair[0]) @ encoder.encode_document(pair[1]).T
        assert float(score) == pytest.approx(float(similar.max(dim=1).values.sum()), abs=1e-4)

def test_mono_t5_scores_true_against_false(models, tmp_path):
    import torch
    from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration
    tokenizer = AutoTokenizer.from_pretrained(models / "minilm")
    torch.manual_seed(1)
    config = T5Config(vocab_size=30_522, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
                      decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).eval()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    pairs = [("ice melts", "sea up fast"), ("sea", "ice " * 40), ("up", "sea")]
    found, cut = scorer(tmp_path, max_length=16)[1](pairs)
    assert cut == [False, True, False]
    pairs[1] = "sea", "ice " * 7
    true, false = tokenizer.convert_tokens_to_ids(["true", "false"])
    for number, (claim, text) in zip(found, pairs):
        ids = tokenizer(f"Query: {claim} Document: {text} Relevant:", return_tensors="pt").input_ids
        with torch.inference_mode():
            logits = model(input_ids=ids, decoder_input_ids=torch.tensor([[0]])).logits[0, 0]
        assert number == pytest.approx(float(logits[true] - logits[false]), abs=1e-5)

def test_arithmetic_by_hand():
    found = KIT.combined(np.array([0.0, np.log(3)]), np.array([0.5, 0.2]), 0.25)
    np.testing.assert_allclose(found, [0.75 * 0.5 + 0.25 * 0.5, 0.75 * 0.75 + 0.25 * 0.2])
    rows = [("1", "a", 3, 10.0), ("1", "b", 1, 20.0), ("2", "a", 1, 2.0), ("2", "x", 1, None)]
    table = pd.DataFrame(rows, columns=[*KEY, "score", "first"])
    assert KIT.blended(table, 0.25).tolist() == pytest.approx([0.5, -0.5, 0, 0])
    rows = [("2", "c", 0.5), ("2", "a", 0.5), ("2", "b", 0.7), ("1", "a", 9.0)]
    table, order = pd.DataFrame(rows, columns=[*KEY, "score"]), {"a": 0, "b": 1, "c": 2}
    run = KIT.ranked(table, order)
    best = [["2", "b", 1, 0.7], ["2", "a", 2, 0.5], ["2", "c", 3, 0.5], ["1", "a", 1, 9.0]]
    assert run.values.tolist() == best
    fused = KIT.rrf([run, run[1:2].assign(rank=1)])
    assert fused["score"].tolist() == pytest.approx([1 / 61, 1 / 62 + 1 / 61, 1 / 63, 1 / 61])

@pytest.mark.parametrize(("start", "rounds", "beam", "calls"), [
    ("ag", 20, 2, ["ag", "bcfd"]),  # then d and f are best, and they know nothing new
    ("ag", 20, 6, ["ag", "bcfd", "e"]), ("c", 1, 2, ["c", "ae"])])
def test_neighbours_of_the_best_join_until_nothing_is_new(start, rounds, beam, calls):
    asked, worth = [], dict(zip("abcdefg", (5, 6, 1, 9, 2, 7, 0)))
    graph = {"a": "bc", "b": "ad", "c": "ae", "d": "bf", "e": "ca", "f": "db", "g": "fd"}
    def score(pairs):
        asked.append("".join(name for _, name in pairs))
        return [(claim, name, worth[name], False) for claim, name in pairs]
    args, pairs = Namespace(rounds=rounds, beam=beam), [("1", name) for name in start]
    found = KIT.score_run(pairs, score, graph, args)
    assert asked == calls and "".join(found["abstract_id"]) == "".join(calls)

def test_rerank_in_every_way(toy, run, call, refused):
    def reranked(*words):
        facts(call(SCRIPT, "--model", "tiny", "--depth", 4, *words, "--out", "new.tsv", cwd=toy))
        return read(toy / "new.tsv")

    tiny(toy / "tiny")
    tiny(toy / "models/other", seed=5)
    before, after = read(toy / "work/demo/test/hybrid.tsv"), reranked()
    first = before[before["rank"] <= 4][KEY].values.tolist()
    assert sorted(after[KEY].values.tolist()) == sorted(first)
    for _, rows in after.groupby("claim_id"):
        assert rows["rank"].tolist() == [1, 2, 3, 4] and rows["score"].is_monotonic_decreasing
    words = ("--model", "tiny", "--depth", 4, "--batch-size", 7, "--out", "new.tsv")
    assert "up to date" in call(SCRIPT, *words, cwd=toy).stdout
    facts(run(SCRIPT, *words[:-1], "two.tsv", "--device", "cpu", "cpu", cwd=toy))  # processes
    both = after.merge(read(toy / "two.tsv"), on=KEY)
    assert len(both) == 12 and np.allclose(both["score_x"], both["score_y"], atol=1e-4)
    fused = KIT.rrf([after, reranked("--model", "models/other")])
    both = reranked("--model", "tiny", "models/other", "--top-k", 2).merge(fused, on=KEY)
    assert len(both) == 6 and np.allclose(both["score_x"], both["score_y"])
    rows = [(claim, name, 0.5, 0.1) for claim in ("c3", "c4", "c5") for name in ABSTRACTS]
    tsv(toy / "v.tsv", [*KEY, "p_supports", "p_refutes"], rows)
    both = reranked("--verdicts", "v.tsv", "--alpha", 0.3).merge(after, on=KEY)
    sigmoid = 1 / (1 + np.exp(-both["score_y"]))
    assert np.allclose(both["score_x"], 0.3 * 0.6 + 0.7 * sigmoid, atol=1e-6)
    words = ("--model", "two.tsv", "--verdicts", "v.tsv", "--alpha", 0.3)  # an earlier run
    again = reranked(*words).merge(both, on=KEY)
    assert len(again) == 12 and np.allclose(again["score"], again["score_x"], atol=1e-4)
    words += ("--run", "work/demo/test/hybrid.tsv", "--out", "no.tsv", "--depth")
    refused(toy, SCRIPT, *words, 5, said="two.tsv: no score of claim c3")

    facts(call("01_index.py", "--indexes", "dense", "--dense-model", "tiny", cwd=toy))
    facts(call("01_index.py", "graph", cwd=toy))
    assert (reranked("--graph", GRAPH).groupby("claim_id").size() == 12).all()  # all are reached
    words, path = ("--graph", GRAPH, "--out", "x.tsv"), toy / GRAPH / "neighbours.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    refused(toy, SCRIPT, "--model", "tiny", *words, said="neighbours.npy is damaged")
    path.write_bytes(whole)
    with open(toy / "data/demo/corpus.jsonl", "a") as file:  # 0001 once more: an equal score
        file.write(json.dumps({"abstract_id": "0013", "abstract": ABSTRACTS["0001"]}))
    refused(toy, SCRIPT, "--model", "tiny", *words, said="another corpus")
    tsv(toy / "twins.tsv", RUN, [("c3", "0001", 1, 3), ("c3", "0013", 2, 2)])
    words = ("--model", "tiny", "--run", "twins.tsv", "--dtype", "bf16")
    [made] = facts(call(SCRIPT, *words, cwd=toy))["models"]
    assert made == {"model": "tiny", "pairs": 2, "equal_scores": 1, "truncated": 0}

ROWS = {"bce": 5, "mse": 5, "l1": 5, "margin": 3, "mnrl": 2, "lambda": 2, "listnet": 2,
        "ranknet": 2}  # of five pairs, or two tuples with three negatives

@pytest.mark.parametrize("loss", ROWS)
def test_every_loss_trains_a_model_that_reranks(toy, call, loss):
    import torch
    from safetensors.torch import load_file
    tiny(toy / "tiny", dtype="bfloat16")
    shape = "tuples" if loss in ("margin", "mnrl", "lambda") else "pairs"
    words = ["train", f"data/demo/{shape}.jsonl", "--model", "tiny", "--loss", loss, "--lr", 1e-3,
             "--batch-size", 2, "--epochs", 1.5, "--max-length", 32, "--dev-split", "test",
             "--dev-run", "work/demo/test/hybrid.tsv"]
    done = call(SCRIPT, *words, cwd=toy)
    made = facts(done)
    assert made["rows"] == ROWS[loss] and len(made["dev"]) == 2
    assert "{" not in done.stderr and done.stderr.count("epoch ") == 2
    log = json.loads((toy / "work/demo/models/reranker.meta.json").read_text())["log"]
    assert loss != "bce" or 1 < log[-1]["epoch"] < 2
    weights = load_file(toy / "work/demo/models/reranker/model.safetensors").values()
    assert {part.dtype for part in weights} == {torch.float32}  # as always in training
    assert "up to date" in call(SCRIPT, *words, cwd=toy).stdout
    assert facts(call(SCRIPT, "--depth", 4, cwd=toy))["made"]
