"""03_rerank.py: scores of every kind of model, blends, graphs, restarts."""

import json
from argparse import Namespace
from pathlib import Path

import layouts
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import ABSTRACTS, RUN, facts, kill_before, load, read, tiny, tiny_llm
from sentence_transformers import CrossEncoder, MultiVectorEncoder
from transformers import BertConfig

SCRIPT = "03_rerank.py"
GRAPH = "work/demo/index/graph"
HYBRID = "work/demo/test/hybrid.tsv"
KIT = load(SCRIPT)
PAIR = RUN[:2]
TEMPLATE = """{% for m in messages %}{% if m.role == 'system' %}<|im_start|>{{ m.content }}
{% elif m.role == 'document' %}<Document>: {{ m.content }}{% endif %}{% endfor %}
<Query>: {% for m in messages if m.role == 'query' %}{{ m.content }}{% endfor %}<|im_end|>yes?"""
TINY = ("--model", "tiny", "--out", "new.tsv")


def opened(folder, **own):
    """The script's model."""
    own = {"max_length": 512, "prompt": None, "batch_size": 2, "dtype": "fp32"} | own
    return KIT.open_reranker(Namespace(device=["cpu"], model=folder, fields="abstract", **own))


def scores_of(model, pairs):
    """Scores of pairs, and whether they are truncated."""
    outputs, is_truncated = KIT.outputs_of(model, pairs)
    return outputs[:, 0], is_truncated


# ---------------------------------------------------------------- Models and truncation
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_scores_are_those_of_predict_and_only_abstracts_truncated(models, tmp_path, dtype):
    folder = tiny(tmp_path / "tiny")
    rng = np.random.default_rng(2)
    pairs = []
    for row in range(60):
        claim = f"claim {row}"
        pairs.append((claim, rng.integers(90) * "ice "))
    found, cut = scores_of(opened(folder, max_length=48, dtype=dtype), pairs)
    encoder = CrossEncoder(folder, max_length=48, device="cpu")
    assert cut == [len(encoder.tokenizer(*pair)["input_ids"]) > 48 for pair in pairs] and any(cut)
    options = {"text": {"truncation": "only_second"}}
    identity = torch.nn.Identity()
    wanted = encoder.predict(pairs, activation_fn=identity, processing_kwargs=options)
    np.testing.assert_allclose(found, wanted, atol=1e-5 if dtype == "fp32" else 1)
    if dtype == "bf16":  # the last layer is fp32: more digits than bf16 has
        assert (found != torch.tensor(found).bfloat16().float().numpy()).any()


@pytest.mark.parametrize(
    ("claim", "abstract", "lengths", "is_cut"),
    [(700, 700, (20, 20), True), (700, 1, (20, 1), True), (1, 700, (1, 39), True)]
    + [(20, 20, (20, 20), False), (1, 0, (1, 0), False)],
)
def test_a_claim_keeps_at_most_half_of_the_tokens(tmp_path, claim, abstract, lengths, is_cut):
    model = opened(tiny(tmp_path / "tiny"), max_length=43)  # three of them are special
    ids, found = model[0].preprocess.read((claim * "sun ", abstract * "ice "))
    assert (tuple(map(len, ids)), found) == (lengths, is_cut)


def test_a_causal_reranker_keeps_template_and_claim(tmp_path):
    prompts = {"prompts": {"judge": "Judge it."}, "default_prompt_name": "judge"}
    encoder = CrossEncoder(tiny_llm(tmp_path), device="cpu", **prompts)
    encoder.tokenizer.chat_template = TEMPLATE
    encoder.save_pretrained(str(tmp_path))
    long = ("The sun is hot #sun", "Ice melts. " * 40)
    pair = ("Up?", "Sea.")
    model = opened(tmp_path, max_length=130)
    found, cut = scores_of(model, [long, pair])
    text = model.tokenizer.decode(model[0].preprocess.read(long)[0][1])
    coded = model.preprocess([long], prompt="Judge it.")["input_ids"][0]
    seen = model.tokenizer.decode(coded)
    assert cut == [True, False] and len(coded) in range(124, 131)
    assert seen.startswith("<|im_start|>Judge it.\n") and long[1].startswith(text) and text
    assert seen.endswith(f"{text}<Query>: {long[0]}<|im_end|>yes?")
    wanted = encoder.predict([pair], prompt="Judge it.", activation_fn=lambda logits: logits)
    assert found[1] == pytest.approx(wanted[0], abs=1e-4)
    assert abs(scores_of(opened(tmp_path, prompt="Refute it."), [pair])[0][0] - found[1]) > 1e-3


def test_mono_t5_truncates_the_document_alone(models, tmp_path):
    layouts.mono_t5(tmp_path)
    model = opened(tmp_path, max_length=16)
    found, cut = scores_of(model, [("sea", "ice " * 40), ("sea", "of ice")])
    coded = model.preprocess([("sea", "ice " * 40)])["input_ids"][0]
    text = model.tokenizer.decode(coded).replace("▁", "")
    assert cut == [True, False] and found[0] != found[1]
    assert text == f"Query : sea Document : {'ice ' * 8}Relevant : </s>"


@pytest.mark.parametrize(
    "name", ["lightonai/LateOn", "lightonai/GTE-ModernColBERT-v1", "colbert-ir/colbertv2.0"]
)
def test_late_interaction_scores_by_maxsim(toy, call, refused, quick_processes, name):
    layouts.make(toy, [name])
    words = ("--model", name, "--depth", 4, "--out")
    done = facts(call(SCRIPT, *words, "new.tsv", cwd=toy))
    assert (done["pairs"], done["truncated"]) == (12, 0)
    model = MultiVectorEncoder(str(toy / name), device="cpu")
    claims = dict(read(toy / "data/demo/claims.test.tsv")[["claim_id", "claim"]].values)
    for claim_id, abstract_id, _, score in read(toy / "new.tsv")[RUN].values:
        tokens = model.encode_query([claims[claim_id]])[0]
        vectors = model.encode_document([ABSTRACTS[abstract_id]])[0]
        assert score == pytest.approx(float((tokens @ vectors.T).max(1).values.sum()), abs=1e-4)
    facts(call(SCRIPT, *words, "two.tsv", "--device", "cpu", "cpu", cwd=toy))  # processes
    both = read(toy / "new.tsv").merge(read(toy / "two.tsv"), on=PAIR)
    assert len(both) == 12 and np.allclose(both["score_x"], both["score_y"], atol=1e-4)
    assert facts(call(SCRIPT, *words, "cut.tsv", "--max-length", 8, cwd=toy))["truncated"] > 6
    refused(toy, SCRIPT, *words, "x.tsv", "--prompt", "Judge.", said="--prompt: a model of late")


@pytest.mark.parametrize(
    ("architecture", "settings", "kind"),
    [
        ("BertModel", {"prompts": {"Classification": "CrossEncoder"}}, "['BertModel'] None None"),
        ("XForConditionalGeneration", {"model_type": "CrossEncoder"}, "CrossEncoder"),
        ("BertModel", {"similarity_fn_name": "MaxSim"}, "MaxSim"),
    ],
)
def test_the_kind_of_a_model_is_not_in_its_prompts(tmp_path, architecture, settings, kind):
    config = {"model_type": "bert", "architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    assert kind in KIT.kind_of(str(tmp_path))


# ---------------------------------------------------------------- A rerank endpoint
def rerank_server(endpoint, form="results"):
    """A rerank endpoint; the score of a document is its number of letters e."""

    def reply(body):
        if form == "texts" and "texts" not in body:
            return {"status": 422, "text": "missing field `texts`"}
        texts = body["texts" if form == "texts" else "documents"]
        name = "score" if form == "texts" else "relevance_score"
        found = [{"index": row, name: text.count("e")} for row, text in enumerate(texts)]
        found.sort(key=lambda result: -result[name])
        return {"raw": json.dumps(found if form == "texts" else {"results": found}).encode()}

    return endpoint(reply)


@pytest.mark.parametrize("form", ["results", "texts"])
def test_a_rerank_endpoint_scores(toy, call, refused, endpoint, form, monkeypatch, contents):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    server = rerank_server(endpoint, form)
    url = server.url.replace("://", "://me:pass@")
    words = ("--base-url", url, "--model", "jina", "--out", "new.tsv")
    words = (*words, "--extra", '{"truncate": true}')
    done = facts(call(SCRIPT, *words, "--batch-size", 5, cwd=toy))
    run = read(toy / "new.tsv")
    assert done["pairs"] == len(run) == 18
    for _, abstract_id, _, score in run[RUN].values:
        assert score == ABSTRACTS[abstract_id].count("e")
    asked = [body for body in server.asked if form == "results" or "texts" in body]
    assert sorted(body["top_n"] for body in asked) == [1, 1, 1, 5, 5, 5]
    assert all(body["model"] == "jina" and body["truncate"] for body in asked)
    written = b"".join(contents(toy).values())
    assert b"secret-key" not in written and b"pass@" not in written
    assert "up to date" in call(SCRIPT, *words, "--concurrency", 1, cwd=toy).stdout
    refused(toy, SCRIPT, *words, "--prompt", "Judge.", said="--prompt: a rerank endpoint has its")


def test_nothing_is_asked_of_a_rerank_endpoint_twice(toy, call, endpoint, refused):
    whole = rerank_server(endpoint)
    refusal = {"status": 400, "text": "a document is too long"}
    server = endpoint(lambda body: whole.reply(body) if len(server.asked) != 3 else refusal)
    words = ("--base-url", server.url, "--model", "m", "--concurrency", 1, "--out", "new.tsv")
    words = (*words, "--batch-size", 2)
    refused(toy, SCRIPT, *words, said="a document is too long", kept=".parts")
    assert len(server.asked) == 3  # no call begins after one that failed
    done = facts(call(SCRIPT, *words, cwd=toy))
    assert done["pairs"] == 18 and len(server.asked) == 3 + 7
    queries = [json.dumps([body["query"], body["documents"]]) for body in server.asked]
    assert len(set(queries)) == 9


@pytest.mark.parametrize(
    ("reply", "extra"),
    [
        ({"results": []}, {}),
        ({"data": []}, {}),
        ({"results": [{"index": row, "score": None} for row in range(6)]}, {}),
        ({"results": [{"index": row, "score": np.inf} for row in range(6)]}, {}),
        ({"results": 6 * [{"index": 0, "score": 1}]}, {}),
        ({"results": [{"index": row, "score": 1} for row in range(6)]}, 5),
    ],
)
def test_a_reply_in_another_form_ends_the_run(toy, endpoint, refused, reply, extra):
    server = endpoint(lambda body: {"raw": json.dumps(reply).encode()})
    words = ("--base-url", server.url, "--model", "m", "--extra", extra, "--out", "new.tsv")
    refused(toy, SCRIPT, *words, said="run again to go on", kept=".parts")


# ---------------------------------------------------------------- Arithmetic
LOW = -1 / 2**0.5  # z-scores of 10, 20 and 10: mean 40 / 3, standard deviation 10 sqrt(2) / 3
HIGH = 2**0.5


@pytest.mark.parametrize(
    ("rows", "weight", "expected"),
    [
        ([("1", 3, 10), ("1", 1, 20), ("2", 1, 2), ("2", 1, None)], 0.25, [0.5, -0.5, 0, 0]),
        ([("1", 1, 10), ("1", 1, 20), ("1", 1, None)], 0.5, [LOW / 2, HIGH / 2, LOW / 2]),
    ],
)
def test_blended_scores_by_hand(rows, weight, expected):
    table = pd.DataFrame(rows, columns=["claim_id", "score", "first_stage"])
    assert KIT.blend_first_stage(table, weight).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("start", "rounds", "beam", "calls"),
    [
        ("ag", 20, 2, ["ag", "bcfd"]),  # then d and f are best, and they know nothing new
        ("ag", 20, 6, ["ag", "bcfd", "e"]),
        ("c", 1, 2, ["c", "ae"]),
    ],
)
def test_neighbours_of_the_best_join_until_nothing_is_new(start, rounds, beam, calls):
    asked = []
    worth = dict(zip("abcdefg", (5, 6, 1, 9, 2, 7, 0)))
    graph = {"a": "bc", "b": "ad", "c": "ae", "d": "bf", "e": "ca", "f": "db", "g": "fd"}

    def score(pairs, _):
        asked.append("".join(pairs["abstract_id"]))
        return pairs.assign(score=pairs["abstract_id"].map(worth))

    args = Namespace(rounds=rounds, beam=beam)
    pairs = pd.DataFrame({"claim_id": "1", "abstract_id": list(start)})
    found = KIT.with_neighbours(score(pairs, None), graph, score, Path(), args)
    assert asked == calls
    assert "".join(found["abstract_id"]) == "".join(calls)


# ---------------------------------------------------------------- Reranking
def test_candidates_are_sorted_by_the_scores_of_a_model(toy, call, quick_processes):
    tiny(toy / "tiny")
    words = (*TINY, "--depth", 4)
    facts(call(SCRIPT, *words, cwd=toy))
    before = read(toy / HYBRID)
    after = read(toy / "new.tsv")
    first = before[before["rank"] <= 4][PAIR].values.tolist()
    assert sorted(after[PAIR].values.tolist()) == sorted(first)
    for _, rows in after.groupby("claim_id"):
        assert rows["rank"].tolist() == [1, 2, 3, 4] and rows["score"].is_monotonic_decreasing
    assert "up to date" in call(SCRIPT, *words, "--batch-size", 7, cwd=toy).stdout
    facts(call(SCRIPT, *words, "--force", "--device", "cpu", "cpu", cwd=toy))  # processes
    both = after.merge(read(toy / "new.tsv"), on=PAIR)
    assert len(both) == 12 and np.allclose(both["score_x"], both["score_y"], atol=1e-4)


def test_what_stands_behind_depth_follows_where_top_k_asks_for_it(toy, call):
    tiny(toy / "tiny")
    before = read(toy / HYBRID)
    done = facts(call(SCRIPT, *TINY, "--depth", 2, "--top-k", 5, cwd=toy))
    assert done["left_out"] == len(before) - 15
    for claim, rows in read(toy / "new.tsv").groupby("claim_id"):
        old = before[before["claim_id"] == claim]["abstract_id"].tolist()
        assert sorted(rows["abstract_id"][:2]) == sorted(old[:2])
        assert rows["abstract_id"].tolist()[2:] == old[2:5]
        lowest = rows["score"].iloc[1]
        assert rows["score"].tolist()[2:] == pytest.approx([lowest - n for n in (1, 2, 3)])
    done = facts(call(SCRIPT, *TINY, "--depth", 9, "--top-k", 2, cwd=toy))
    assert done["left_out"] == len(before) - 6  # nothing stands behind that depth


def test_neighbours_by_01_join(toy, call, refused):
    tiny(toy / "tiny")
    facts(call("01_index.py", "--indexes", "dense", "--dense-model", "tiny", cwd=toy))
    facts(call("01_index.py", "graph", cwd=toy))
    words = (*TINY, "--depth", 4, "--graph", GRAPH)
    facts(call(SCRIPT, *words, cwd=toy))
    assert (read(toy / "new.tsv").groupby("claim_id").size() == 12).all()  # all are reached
    with open(toy / "data/demo/corpus.jsonl", "a") as file:
        file.write('{"abstract_id": "0013", "abstract": "snow"}\n')
    refused(toy, SCRIPT, *words, said=f"{GRAPH}: the corpus has changed")


def test_kill_9_in_the_middle_changes_no_byte(toy, call, killed):
    tiny(toy / "tiny")
    words = ("--model", "tiny", "--first-stage", 0.5, "--out")
    small = {"GROUP = 1024": "GROUP = 4"}  # five groups
    facts(call(SCRIPT, *words, "whole.tsv", cwd=toy, edits=small))
    store = "group[:, -1] = np.add(is_truncated, 1)"
    assert killed(SCRIPT, *words, "new.tsv", cwd=toy, edits=small | kill_before(store, 4))
    [path] = toy.glob("new.tsv.parts/*/scores.npy")
    bytes_of_group = 4 * 2 * 8
    assert any(path.read_bytes()[3 * bytes_of_group :]) and not (toy / "new.tsv").exists()
    path.write_bytes(path.read_bytes()[: 2 * bytes_of_group])  # a crash of the machine tears it
    never = kill_before(store, 4, by="sys.exit('done again')")
    facts(call(SCRIPT, *words, "new.tsv", cwd=toy, edits=small | never))
    assert (toy / "new.tsv").read_bytes() == (toy / "whole.tsv").read_bytes()
    assert not (toy / "new.tsv.parts").exists()


@pytest.mark.parametrize("form", [layouts.classifier(BertConfig), layouts.llama_classifier])
def test_tensors_are_those_of_the_tokenizer(models, tmp_path, form):
    form(tmp_path)
    rng = np.random.default_rng(1)
    texts = [" ".join(rng.choice(list(ABSTRACTS.values()), 2)) for _ in range(9)]
    pairs = [(claim, text) for claim in ("It's the sun, stupid", "Größe [SEP]") for text in texts]
    model = opened(str(tmp_path))
    found = model.preprocess(pairs)
    wanted = model.tokenizer(pairs, padding=True, return_tensors="pt")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in found)


def test_a_batch_has_as_many_tokens_as_fit_and_half_of_them_where_memory_is_small(
    models, tmp_path, monkeypatch
):
    model = opened(tiny(tmp_path / "tiny"), max_length=64)
    texts = ["ice", "ice " * 60, "ice ice", "ice " * 30, "ice ice ice", "sea"]
    pairs = [("sun", text) for text in texts]
    sizes = []
    predict = model.predict

    def small(batch, **options):
        sizes.append(len(batch))
        if len(batch) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return predict(batch, **options)

    wanted = scores_of(model, pairs)[0]
    monkeypatch.setattr(model, "predict", small)
    np.testing.assert_allclose(scores_of(model, pairs)[0], wanted, atol=1e-6)
    assert sizes[:2] == [2, 1] and sizes.count(1) == 6
    monkeypatch.setattr(model, "predict", lambda *_, **__: small([1, 2]))
    with pytest.raises(torch.OutOfMemoryError):
        scores_of(model, pairs)


def test_corpora_whose_fields_are_no_texts_are_reranked(toy, call, refused):
    tiny(toy / "tiny")
    lines = (toy / "data/demo/corpus.jsonl").read_text().splitlines()
    for row, title in enumerate(("NaN", "null", "1984", '["a", "b"]')):
        lines[row] = lines[row].replace("{", f'{{"title": {title}, ', 1)
    lines[4] = '{"abstract_id": "0005", "abstract": ["Ice melts.", "Sea rises."]}'
    lines[5] = '{"abstract_id": "0006", "abstract": NaN}'
    (toy / "data/demo/corpus.jsonl").write_text("\n".join(lines))
    assert facts(call(SCRIPT, *TINY, "--depth", 6, cwd=toy))["pairs"] == 18
    words = (*TINY, "--max-length", 8, "--prompt", "ice ice ice ice")
    refused(toy, SCRIPT, *words, said="--max-length: no tokens are left")
