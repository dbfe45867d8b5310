"""03_rerank.py: scores of every kind of model, and training with every loss."""
import functools
import json
import re
import socketserver
import threading
from argparse import Namespace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import ABSTRACTS, RUN, facts, jsonl, load, read, tiny, tiny_llm, tsv

SCRIPT, GRAPH = "03_rerank.py", "work/demo/index/graph"
KIT, PAIR = load(SCRIPT), RUN[:2]
TEMPLATE = """{% for m in messages %}{% if m.role == 'system' %}<|im_start|>{{ m.content }}
{% elif m.role == 'document' %}<Document>: {{ m.content }}{% endif %}{% endfor %}
<Query>: {% for m in messages if m.role == 'query' %}{{ m.content }}{% endfor %}<|im_end|>yes?"""

def scorer(folder, dtype="fp32", **own):
    """The script's model, and its function from pairs to scores and truncation flags."""
    args = Namespace(**{"device": ["cpu"], "batch_size": 2, "max_length": 512, "prompt": None,
                        "verdicts": None, "dtype": dtype, "model": folder} | own)
    model = KIT.open_reranker(args)
    return model, functools.partial(KIT.score_batch, model, None, args)

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
    encoder = CrossEncoder(tiny_llm(tmp_path), device="cpu", prompts={"judge": "Judge it."},
                           default_prompt_name="judge")
    encoder.tokenizer.chat_template = TEMPLATE
    encoder.save_pretrained(str(tmp_path))
    long, pair = ("The sun is hot #sun", "Ice melts. " * 40), ("Up?", "Sea.")
    encoder, score = scorer(tmp_path, max_length=130)
    (found, cut), [(_, text)] = score([long, pair]), KIT.cut_to_fit(encoder, [long])[0]
    coded = encoder.preprocess([(long[0], text)], prompt="Judge it.")["input_ids"][0]
    seen = encoder.tokenizer.decode(coded)
    assert isinstance(encoder[1], LogitScore) and cut == [1, 0] and len(coded) in range(124, 131)
    assert seen.startswith("<|im_start|>Judge it.\n") and long[1].startswith(text) and text
    assert seen.endswith(f"{text}<Query>: {long[0]}<|im_end|>yes?")
    wanted = encoder.predict([pair], prompt="Judge it.", activation_fn=lambda logits: logits)
    assert found[1] == pytest.approx(wanted[0], abs=1e-4)
    assert abs(scorer(tmp_path, prompt="Refute it.")[1]([pair])[0][0] - found[1]) > 1e-3

@pytest.mark.parametrize("dropped", ["document", "query"])
def test_a_causal_reranker_that_cannot_tell_pairs_apart_is_refused(tmp_path, capsys, dropped):
    from sentence_transformers import CrossEncoder
    encoder = CrossEncoder(tiny_llm(tmp_path), device="cpu")
    encoder.tokenizer.chat_template = TEMPLATE
    encoder.save_pretrained(str(tmp_path))
    template = (tmp_path / "chat_template.jinja").read_text()
    (tmp_path / "chat_template.jinja").write_text(template.replace(f"'{dropped}'", "'nobody'"))
    with pytest.raises(SystemExit):  # the library sees what its template drops
        scorer(tmp_path)
    assert f"the '{dropped}' content does not reach" in capsys.readouterr().err

def make_useless(kind, folder, models):
    """Make a reranker of a kind that gives all pairs the same score."""
    import torch
    from sentence_transformers import CrossEncoder, MultiVectorEncoder
    from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration
    if kind == "causal":
        model = CrossEncoder(tiny_llm(folder), device="cpu")
        model.tokenizer.chat_template = TEMPLATE
        model[1].true_token_id = model[1].false_token_id  # as if both answers were one word
    elif kind == "cross-encoder":
        model = CrossEncoder(tiny(folder), device="cpu")
        model.model.classifier.weight.data.zero_()
        model.model.classifier.bias.data.fill_(1)
    elif kind == "multi-vector":
        model = MultiVectorEncoder(tiny(folder), device="cpu")
        last = model[0].model.encoder.layer[-1].output.LayerNorm
        last.weight.data.zero_()
        last.bias.data.fill_(1)
    else:
        config = T5Config(vocab_size=30_522, d_model=16, d_kv=8, d_ff=32, num_layers=2,
                          num_heads=2, decoder_start_token_id=0)
        model = T5ForConditionalGeneration(config)
        model.shared.weight.data.zero_()
        AutoTokenizer.from_pretrained(models / "minilm").save_pretrained(folder)
    with torch.no_grad():
        model.save_pretrained(str(folder))

@pytest.mark.parametrize("kind", ["causal", "cross-encoder", "multi-vector", "monoT5"])
def test_a_model_that_scores_all_alike_is_refused_when_it_is_loaded(toy, models, refused, kind):
    make_useless(kind, toy / "useless", models)
    refused(toy, SCRIPT, "--model", "useless", kept=".parts", said="useless: it scores unlike "
            "pairs alike; check its chat template, and that its head is trained")

@pytest.mark.parametrize("seen", [0, 1])
def test_a_model_that_sees_the_claim_or_the_abstract_alone_is_refused(tmp_path, capsys, seen):
    model, _ = scorer(tiny(tmp_path / "tiny"))
    model.predict = lambda pairs, **_: np.array([float(len(pair[seen])) for pair in pairs])
    with pytest.raises(SystemExit):
        KIT.check_order(model, "own", KIT.fail, "check it")
    assert "error: own: it scores unlike pairs alike; check it" in capsys.readouterr().err

def test_weights_that_are_random_are_called_out(toy, call):
    import transformers
    from safetensors.torch import load_file, save_file
    folder = tiny_llm(toy / "llm")
    weights = load_file(f"{folder}/model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, f"{folder}/model.safetensors", {"format": "pt"})
    (toy / "llm/chat_template.jinja").write_text(TEMPLATE)
    transformers.logging.set_verbosity_error()  # as TRANSFORMERS_VERBOSITY may ask for
    done = call(SCRIPT, "--model", "llm", "--depth", 2, "--out", "new.tsv", cwd=toy)
    assert transformers.logging.get_verbosity() == transformers.logging.ERROR
    assert "not sharded" not in done.stderr  # as it says where its loggers have levels of their own
    warning = "warning: llm: its files lack the weights that are MISSING above; they are random now"
    assert facts(done)["pairs"] == 6 and warning in done.stderr.splitlines()
    assert warning in json.loads((toy / "new.tsv.meta.json").read_text())["warnings"]

@pytest.mark.parametrize(("sign", "reversed"), [(1, False), (-1, True)])
def test_a_reversed_order_is_called_out(toy, call, sign, reversed):
    from safetensors.torch import load_file, save_file
    folder = tiny(toy / "tiny", seed=3)
    weights = load_file(f"{folder}/model.safetensors")
    weights["classifier.weight"] *= sign
    save_file(weights, f"{folder}/model.safetensors", {"format": "pt"})
    done = call(SCRIPT, "--model", "tiny", "--depth", 2, "--out", "new.tsv", cwd=toy)
    said = "warning: tiny: an abstract about something else wins over one that repeats the claim"
    kept = json.loads((toy / "new.tsv.meta.json").read_text())["warnings"]
    assert facts(done)["pairs"] == 6 and any(said in line for line in kept) == reversed
    assert (said in done.stderr) == reversed

def test_late_interaction_is_max_sim(models, tmp_path):
    from sentence_transformers import MultiVectorEncoder
    encoder = MultiVectorEncoder(tiny(tmp_path / "tiny"), device="cpu")
    encoder[0].document_length = 20
    encoder.save_pretrained(str(tmp_path / "late"))
    fits, cut = "ice " * 18, "ice " * 19  # [CLS] and [SEP] are two of the twenty tokens
    assert scorer(tmp_path / "late")[1]([("sun", fits), ("sun", cut)])[1] == [False, True]
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
    found = KIT.combo_score(np.array([0.0, np.log(3)]), np.array([0.5, 0.2]), 0.25)
    np.testing.assert_allclose(found, [0.75 * 0.5 + 0.25 * 0.5, 0.75 * 0.75 + 0.25 * 0.2])
    rows = [("1", "a", 3, 10.0), ("1", "b", 1, 20.0), ("2", "a", 1, 2.0), ("2", "x", 1, None)]
    table = pd.DataFrame(rows, columns=[*PAIR, "score", "first"])
    assert KIT.blend_first_stage(table, 0.25).tolist() == pytest.approx([0.5, -0.5, 0, 0])
    rows = [("1", "a", 1, 10.0), ("1", "b", 1, 20.0), ("1", "x", 1, None)]  # x counts as 10
    table = pd.DataFrame(rows, columns=[*PAIR, "score", "first"])
    low, high = -1 / 2**0.5, 2**0.5  # mean 40 / 3, standard deviation 10 sqrt(2) / 3
    assert KIT.blend_first_stage(table, 0.5).tolist() == pytest.approx([low / 2, high / 2, low / 2])
    same = pd.DataFrame({"claim_id": "c", "score": [0.1, 0.1 + 2e-17, 0.1], "first": 1.0})
    assert KIT.blend_first_stage(same, 0.5).tolist() == [0, 0, 0]  # rounding decides nothing
    rows = [("2", "c", 0.5), ("2", "a", 0.5), ("2", "b", 0.7), ("1", "a", 9.0)]
    table, order = pd.DataFrame(rows, columns=[*PAIR, "score"]), {"a": 0, "b": 1, "c": 2}
    run = KIT.sort_run(table, order)
    best = [["2", "b", 1, 0.7], ["2", "a", 2, 0.5], ["2", "c", 3, 0.5], ["1", "a", 1, 9.0]]
    assert run.values.tolist() == best

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
    found = KIT.score_with_graph(pairs, score, graph, args)
    assert asked == calls and "".join(found["abstract_id"]) == "".join(calls)

def test_candidates_join_by_models_runs_and_verdicts(toy, run, call, refused):
    def reranked(*words):
        facts(call(SCRIPT, "--model", "tiny", "--depth", 4, *words, "--out", "new.tsv", cwd=toy))
        return read(toy / "new.tsv")

    tiny(toy / "tiny")
    tiny(toy / "models/other", seed=5)
    before, after = read(toy / "work/demo/test/hybrid.tsv"), reranked()
    first = before[before["rank"] <= 4][PAIR].values.tolist()
    assert sorted(after[PAIR].values.tolist()) == sorted(first)
    for _, rows in after.groupby("claim_id"):
        assert rows["rank"].tolist() == [1, 2, 3, 4] and rows["score"].is_monotonic_decreasing
    words = ("--model", "tiny", "--depth", 4, "--batch-size", 7, "--out", "new.tsv")
    assert "up to date" in call(SCRIPT, *words, cwd=toy).stdout
    arguments = json.loads((toy / "new.tsv.meta.json").read_text())["arguments"]
    assert arguments["dtype"] == "fp32"  # what --dtype auto came to
    assert "up to date" in call(SCRIPT, *words, "--dtype", "fp32", cwd=toy).stdout
    facts(run(SCRIPT, *words[:-1], "two.tsv", "--device", "cpu", "cpu", cwd=toy))  # processes
    both = after.merge(read(toy / "two.tsv"), on=PAIR)
    assert len(both) == 12 and np.allclose(both["score_x"], both["score_y"], atol=1e-4)
    best = reranked("--top-k", 2)
    assert best["abstract_id"].tolist() == after[after["rank"] <= 2]["abstract_id"].tolist()
    rows = [(claim, name, 0.5, 0.1) for claim in ("c3", "c4", "c5") for name in ABSTRACTS]
    tsv(toy / "v.tsv", [*PAIR, "p_supports", "p_refutes"], rows)
    both = reranked("--verdicts", "v.tsv", "--alpha", 0.3).merge(after, on=PAIR)
    sigmoid = 1 / (1 + np.exp(-both["score_y"]))
    assert np.allclose(both["score_x"], 0.3 * 0.6 + 0.7 * sigmoid, atol=1e-6)
    words = ("--model", "two.tsv", "--verdicts", "v.tsv", "--alpha", 0.3)  # an earlier run
    again = reranked(*words).merge(both, on=PAIR)
    assert len(again) == 12 and np.allclose(again["score"], again["score_x"], atol=1e-4)
    words += ("--run", "work/demo/test/hybrid.tsv", "--out", "no.tsv", "--depth")
    refused(toy, SCRIPT, *words, 5, said="two.tsv: no score of claim c3")

def test_an_empty_run_gives_an_empty_run(toy, call):
    tiny(toy / "tiny")
    tsv(toy / "empty.tsv", RUN, [])
    done = call(SCRIPT, "--model", "tiny", "--run", "empty.tsv", "--out", "new.tsv", cwd=toy)
    assert facts(done)["rows"] == facts(done)["pairs"] == 0
    assert "warning: empty.tsv: it holds no candidates" in done.stderr
    assert (toy / "new.tsv").read_text() == "\t".join(RUN) + "\n"

@pytest.mark.parametrize("name", ["tiny", "same.tsv"])
def test_scores_that_rank_nothing_are_called_out(toy, call, name):
    tiny(toy / "tiny")
    with open(toy / "data/demo/corpus.jsonl", "a") as file:  # 0001 once more: an equal score
        file.write(json.dumps({"abstract_id": "0013", "abstract": ABSTRACTS["0001"]}))
    twins = [("c3", "0001", 1, 3), ("c3", "0013", 2, 3), ("c4", "0001", 1, 3), ("c4", "0002", 2, 2)]
    tsv(toy / "same.tsv", RUN, [*twins, ("c5", "0001", 1, 3)])  # one candidate is no tie
    done = call(SCRIPT, "--model", name, "--run", "same.tsv", "--dtype", "bf16", cwd=toy)
    assert "equal scores for all candidates of 1 of 3 claims" in done.stderr
    counts = {"pairs": 5, "equal_scores": 1, "claims_scored_alike": 1, "truncated": 0}
    assert counts.items() <= facts(done).items()
    low, high = np.array([-9.50005, -9.5]), np.array([-9.5, -9.49])
    assert KIT.alike(low, high).tolist() == [True, False]  # .00005 / 9.5 is rounding, .01 / 9.5 not

def test_advice_on_too_little_memory_names_flags_of_the_job(toy, refused):
    tiny(toy / "tiny")
    first = {"read_abstracts(args.corpus), {}": "exec('raise MemoryError')"}
    words = ("--model", "tiny", "--data", "data/demo")
    refused(toy, SCRIPT, *words, edits=first, said="03_rerank.py rerank: out of memory; lower "
            "--batch-size or --max-length or --top-k, and run it again to go on")
    first = {"    table, counts = training_table(":
             "    raise RuntimeError('CUDA out of memory')\n    table, counts = training_table("}
    words = ("train", "data/demo/pairs.jsonl", "--model", "tiny")
    refused(toy, SCRIPT, *words, edits=first, said="03_rerank.py train: out of memory; lower "
            "--batch-size or --max-length, and run it again to go on")

def test_an_unknown_hub_name_without_network_is_asked_for_once(toy, run, refused):
    """The client of the hub would try again for minutes."""
    calls = []

    class HangUp(socketserver.BaseRequestHandler):
        def handle(self):
            calls.append(self.client_address)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), HangUp) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        env = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": url, "NO_PROXY": "127.0.0.1"}
        refused(toy, SCRIPT, "--model", "nobody/no-model", by=run, env=env, kept=".parts",
                said="nobody/no-model: cannot be loaded")
        server.shutdown()
    assert len(calls) == 1

# -------------------- Graph
def write_graph(folder, graph, corpus):
    """Write a neighbour graph as 01_index.py does."""
    folder.mkdir(exist_ok=True)
    np.save(folder / "neighbours.npy", np.array(graph, np.int32))
    (folder / "meta.json").write_text(json.dumps({"kind": "graph", "corpus": corpus}))

def test_a_graph_is_read_or_refused(tmp_path, capsys):
    def read_graph():
        return KIT.read_graph(tmp_path / "graph", "its digest", ["x", "y", "z"], 2)

    rows = [[1, 2], [2, 0], [0, 1]]
    write_graph(tmp_path / "graph", rows, "its digest")
    assert read_graph() == {"x": ["y", "z"], "y": ["z", "x"], "z": ["x", "y"]}
    for graph, corpus, said in (
            (rows, "another digest", "made from another corpus"),
            (rows[:2], "its digest", "no neighbour graph"),  # a row short, out of range, flat
            ([[1, 7], [2, 0], [0, 1]], "its digest", "no neighbour graph"),
            ([1, 2, 0], "its digest", "no neighbour graph")):
        write_graph(tmp_path / "graph", graph, corpus)
        with pytest.raises(SystemExit):
            read_graph()
        assert said in capsys.readouterr().err

def test_neighbours_by_01_join(toy, call, refused):
    tiny(toy / "tiny")
    facts(call("01_index.py", "--indexes", "dense", "--dense-model", "tiny", cwd=toy))
    facts(call("01_index.py", "graph", cwd=toy))
    words = ("--model", "tiny", "--out", "new.tsv", "--depth", 4, "--graph", GRAPH)
    facts(call(SCRIPT, *words, cwd=toy))
    assert (read(toy / "new.tsv").groupby("claim_id").size() == 12).all()  # all are reached
    refused(toy, SCRIPT, *words, "--model", "new.tsv", said="new.tsv is no model")

# -------------------- Unfinished work
ROW = '["c3", "0001", 7.5, false]'

@pytest.mark.parametrize(("line", "kept"), [
    (f"[{ROW}]", 1), (f"[{ROW}", 0), ("", 0), ("null", 0), ("3", 0), ("{}", 0), ('{"abcd": 1}', 0),
    ('"abcd"', 0), ("[3]", 0), ("[[]]", 0), ("[" * 100_000, 0), (f"[{ROW}, null]", 1),
    (f"[{ROW.replace('7.5', 'NaN')}]", 0), (f"[{ROW.replace('7.5', 'null')}]", 0),
    (f'[{ROW.replace("7.5", "[7.5]")}]', 0), (f"[{ROW.replace('7.5', '1e999')}]", 0),
    (f"[{ROW.replace('7.5', '9' * 400)}]", 0), ('[[["c3"], "0001", 7.5, false]]', 0)])
def test_what_cannot_be_read_of_finished_groups_is_scored_again(tmp_path, line, kept):
    whole = '[["c4", "0002", -1.5, true]]'
    path = tmp_path / "0.jsonl"
    path.write_bytes(b"\xff\xfe\n" + line.encode() + b"\n" + whole.encode())
    found = KIT.read_scores(path)
    assert found.pop(("c4", "0002")) == ("c4", "0002", -1.5, True) and len(found) == kept
    asked = []
    def score(pairs):
        asked.extend(pairs)
        return np.zeros(len(pairs)), [False] * len(pairs)
    texts = {"0001": "ice", "0002": "sea"}
    pairs = [("c3", "0001"), ("c4", "0002")]
    rows = KIT.score_resumably({"c3": "up", "c4": "sun"}, texts, score, path, pairs)
    assert asked == [("up", "ice")] * (1 - kept) and rows[1][2] == -1.5
    assert set(KIT.read_scores(path)) == set(pairs)  # for the next restart

@pytest.mark.parametrize("damage", [b"", b"null", b"\xff", b"[" * 100_000])
def test_damaged_unfinished_work_is_made_again(toy, call, damage):
    tiny(toy / "tiny")
    words = ("--model", "tiny", "--depth", 2, "--out", "new.tsv")
    facts(call(SCRIPT, *words, cwd=toy))
    whole = (toy / "new.tsv").read_bytes()
    for name in ("task.json", "0.jsonl"):
        (toy / "new.tsv.parts").mkdir()
        (toy / "new.tsv.parts" / name).write_bytes(damage)
        facts(call(SCRIPT, *words, "--force", cwd=toy))
        assert (toy / "new.tsv").read_bytes() == whole and not (toy / "new.tsv.parts").exists()

@pytest.mark.parametrize("damage", [Path.unlink, Path.mkdir, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize("name", ["optimizer.pt", "trainer_state.json", "meta.json"])
def test_only_whole_checkpoints_are_resumed(tmp_path, name, damage):
    names = "optimizer.pt", "trainer_state.json"
    for folder in (tmp_path / "checkpoint-3", tmp_path / "checkpoint-12"):
        folder.mkdir()
        for place in names:
            (folder / place).write_text(f'{{"of": "{folder}"}}')
        files = KIT.files_of(folder)
        (folder / "meta.json").write_text(json.dumps({"files": files}))
    assert KIT.newest_checkpoint(tmp_path) == tmp_path / "checkpoint-12"
    if damage == Path.mkdir:
        (tmp_path / "checkpoint-12" / name).unlink()
    damage(tmp_path / "checkpoint-12" / name)
    assert KIT.newest_checkpoint(tmp_path) == tmp_path / "checkpoint-3"
    assert not (tmp_path / "checkpoint-12").exists()

# -------------------- Train
ROWS = {"bce": 5, "l1": 5, "margin": 3, "mnrl": 2, "lambda": 2}  # of pairs.jsonl or tuples.jsonl

@pytest.mark.parametrize("loss", ROWS)
def test_every_loss_trains_a_model_that_reranks(toy, call, loss):
    import torch
    from safetensors.torch import load_file
    tiny(toy / "tiny", dtype="bfloat16")
    shape = "tuples" if loss in ("margin", "mnrl", "lambda") else "pairs"
    words = ["train", f"data/demo/{shape}.jsonl", "--model", "tiny", "--loss", loss, "--lr", 1e-3,
             "--batch-size", 2, "--epochs", 1.5, "--max-length", 32, "--dev-split", "test"]
    done = call(SCRIPT, *words, cwd=toy)
    made = facts(done)
    assert made["rows"] == ROWS[loss] and len(made["dev_ndcg_at_10"]) == 3  # before, two epochs
    assert "{" not in done.stderr and done.stderr.count("epoch ") == 2
    said = re.findall(r"(\d+) steps, about \d+\.\d minutes without dev", done.stderr)
    assert said == (["5"] if loss in ("bce", "l1") else [])  # others have fewer than four steps
    log = json.loads((toy / "work/demo/models/reranker.meta.json").read_text())["log"]
    assert loss != "bce" or 1 < log[-1]["epoch"] < 2
    weights = load_file(toy / "work/demo/models/reranker/model.safetensors").values()
    assert {part.dtype for part in weights} == {torch.float32}  # as always in training
    assert "up to date" in call(SCRIPT, *words, cwd=toy).stdout
    assert facts(call(SCRIPT, "--depth", 4, cwd=toy))["made"]

def test_training_says_how_long_it_takes_after_four_steps(monkeypatch):
    lines, seconds = [], iter([100, 0, 0, 0, 160, 0])  # the first step is not counted
    monkeypatch.setattr("time.monotonic", lambda: next(seconds))
    shown = KIT.epochs_shown(None)
    shown.current_step = 50  # a training that was resumed there
    shown.training_bar = Namespace(
        update=lambda _: None, write=lambda line, file: lines.append(line))
    for step in range(51, 56):
        shown.on_step_end(None, Namespace(
            global_step=step, max_steps=174, is_world_process_zero=True), None)
    assert lines == ["174 steps, about 40.0 minutes without dev"]  # (174 - 54) x 60 s / 3

def test_a_trained_model_that_has_changed_is_refused(toy, call, refused):
    tiny(toy / "tiny")
    words = ["train", "data/demo/pairs.jsonl", "--model", "tiny", "--epochs", 1, "--max-length", 32]
    facts(call(SCRIPT, *words, cwd=toy))
    path = toy / "work/demo/models/reranker/model.safetensors"
    path.write_bytes(path.read_bytes()[:-64] + bytes(64))
    refused(toy, SCRIPT, said="work/demo/models/reranker: its files have changed")

@pytest.mark.parametrize(("sizes", "width"), [
    ([4, 4, 2, 2, 2], 2),     # 1: 5, 2: 10, 3: 6, 4: 8
    ([2, 1, 1], 1),           # 1: 3, 2: 2
    ([2, 1], 1),              # 2 and 2: the width that keeps both tuples
    ([9, 1, 1, 1, 0], 9),     # 1: 4, 9: 9
    ([3, 0, 0], 3), ([0, 0], 0)])
def test_ragged_tuples_get_the_width_that_keeps_most_negatives(sizes, width):
    assert KIT.width_of(sizes) == width

def test_ragged_tuples_are_counted(toy, call):
    tiny(toy / "tiny")
    names = list(ABSTRACTS)
    jsonl(toy / "x.jsonl", *({"claim_id": "c1", "positive": "0010", "negatives": names[:size]}
                             for size in (3, 2, 2, 1, 0)))  # 1: 4, 2: 6, 3: 3 of eight
    words = ["train", "x.jsonl", "--model", "tiny", "--max-length", 32, "--epochs", 1, "--loss"]
    done = call(SCRIPT, *words, "mnrl", cwd=toy)
    wanted = {"rows": 3, "examples": 5, "left_out": 2, "negatives": 6, "negatives_left_out": 2}
    assert wanted.items() <= facts(done).items()
    assert "warning: x.jsonl: 2 of 5 tuples and 2 negatives are left out" in done.stderr
    made = json.loads((toy / "work/demo/models/reranker.meta.json").read_text())
    assert wanted.items() <= made.items()
    done = call(SCRIPT, *words, "margin", cwd=toy)
    assert facts(done)["rows"] == facts(done)["negatives"] == 8
    assert "warning: x.jsonl: 1 of 5 tuples have no negative" in done.stderr

def test_margin_loss_is_a_hinge(models, tmp_path):
    import torch
    from sentence_transformers import CrossEncoder
    model = CrossEncoder(tiny(tmp_path / "tiny"), device="cpu").eval()
    columns = [["ice", "sea"], ["ice melts", "sun"], ["up", "the sea is up"]]
    claims, positives, negatives = columns
    good, bad = (model.predict(list(zip(claims, texts)), activation_fn=torch.nn.Identity())
                 for texts in (positives, negatives))
    lead = np.abs(good - bad)
    margin = float(lead.mean())  # one pair may be beyond it
    wanted = np.maximum(0, margin - (good - bad)).mean()
    assert KIT.margin_loss(model, margin)(columns).item() == pytest.approx(wanted, abs=1e-5)

def test_dev_ndcg_counts_all_evidence():
    rows = [("1", 1, 0), ("1", 2, 1), ("1", 11, 1), ("2", 1, 1), ("2", 2, 1)]
    run = pd.DataFrame(rows, columns=["claim_id", "rank", "relevant"])
    evidence = pd.Series({"1": 3, "2": 2, "3": 1})  # one of 1 below rank 10, one not retrieved
    log3, log4 = 1 / np.log2(3), 1 / np.log2(4)
    wanted = (log3 / (1 + log3 + log4) + 1 + 0) / 3  # claim 3 has no candidates
    assert KIT.mean_ndcg(run, evidence) == pytest.approx(wanted)
    run = pd.DataFrame([("1", 1, 1)], columns=run.columns)
    ideal = sum(1 / np.log2(rank + 1) for rank in range(1, 11))  # of twelve, ten fit
    assert KIT.mean_ndcg(run, pd.Series({"1": 12})) == pytest.approx(1 / ideal)

def test_a_model_that_reads_fewer_tokens_than_asked_for_says_so(tmp_path, capsys):
    short = str(tmp_path / "short")
    scorer(tiny(tmp_path / "tiny"), max_length=32)[0].save_pretrained(short)
    for length, reads in ((16, 16), (KIT.LENGTH, 32), (48, 32)):
        assert "warning" not in capsys.readouterr().err
        assert scorer(short, max_length=length)[0].max_seq_length == reads
    assert f"--max-length: {short} reads 32 tokens of a pair, not 48" in capsys.readouterr().err

@pytest.mark.parametrize("depth", [1, 3, 9])
def test_dev_ndcg_is_that_of_the_reranked_run(toy, call, depth):
    tiny(toy / "tiny")
    words = ("--model", "tiny", "--max-length", 48)
    done = call(SCRIPT, "train", "data/demo/pairs.jsonl", *words, "--epochs", 1, "--dev-split",
                "test", "--dev-depth", depth, "--out", "trained", cwd=toy)
    said = float(re.search(r"before training: nDCG@10 on dev (\S+)", done.stdout)[1])
    facts(call(SCRIPT, *words, "--depth", depth, "--out", "new.tsv", cwd=toy))
    qrels, run = read(toy / "data/demo/qrels.test.tsv"), read(toy / "new.tsv")
    values = []
    for claim, judged in qrels[qrels["label"] != "NEI"].groupby("claim_id"):
        relevant = set(judged["abstract_id"])
        top = run[(run["claim_id"] == claim) & (run["rank"] <= 10)]
        gain = sum(1 / np.log2(rank + 1) for name, rank in top[["abstract_id", "rank"]].values
                   if name in relevant)
        ideal = sum(1 / np.log2(rank + 1) for rank in range(1, min(10, len(relevant)) + 1))
        values.append(gain / ideal)
    assert said == pytest.approx(np.mean(values), abs=1e-4)

def test_a_model_that_has_learnt_nothing_is_called_out(toy, call):
    from safetensors.torch import load_file, save_file
    folder = tiny(toy / "tiny")
    weights = load_file(f"{folder}/model.safetensors")
    weights |= {"classifier.weight": weights["classifier.weight"] * 0,
                "classifier.bias": weights["classifier.bias"] + 1}
    save_file(weights, f"{folder}/model.safetensors", {"format": "pt"})
    words = ["train", "data/demo/pairs.jsonl", "--model", "tiny", "--max-length", 32, "--lr"]
    done = call(SCRIPT, *words, 1e-9, cwd=toy)
    assert "reranker: it scores unlike pairs alike; lower --lr, or mine other" in done.stderr
    assert facts(done)["made"]  # a warning, not an error: hours of training are not thrown away
    assert "alike" not in call(SCRIPT, *words, 1e-2, cwd=toy).stderr
