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
from transformers import AutoTokenizer, BertConfig, T5Config, T5ForConditionalGeneration

SCRIPT = "03_rerank.py"
GRAPH = "work/demo/index/graph"
HYBRID = "work/demo/test/hybrid.tsv"
KIT = load(SCRIPT)
PAIR = RUN[:2]
TEMPLATE = """{% for m in messages %}{% if m.role == 'system' %}<|im_start|>{{ m.content }}
{% elif m.role == 'document' %}<Document>: {{ m.content }}{% endif %}{% endfor %}
<Query>: {% for m in messages if m.role == 'query' %}{{ m.content }}{% endfor %}<|im_end|>yes?"""


def scorer(folder, dtype="fp32", **own):
    """The script's model, and its function from pairs to scores and truncation flags."""
    own = {"max_length": 512, "prompt": None, "fields": "abstract"} | own
    args = Namespace(device=["cpu"], model=folder, **own)
    model = KIT.open_reranker(KIT.load_reranker, args, dtype, batch_size=2)

    def score(pairs):
        cut = [model[0].preprocess.read(pair)[1] for pair in pairs]
        return KIT.outputs_of(model, pairs)[:, 0], cut

    return model, score


# ---------------------------------------------------------------- Models and truncation
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_scores_are_those_of_predict_and_only_abstracts_truncated(models, tmp_path, dtype):
    folder = tiny(tmp_path / "tiny")
    rng = np.random.default_rng(2)
    pairs = []
    for row in range(60):
        claim = (row % 5) * f"claim {row} "
        pairs.append((claim, rng.integers(90) * "ice "))
    found, cut = scorer(folder, max_length=48, dtype=dtype)[1](pairs)
    encoder = CrossEncoder(folder, max_length=48, device="cpu")
    assert cut == [len(encoder.tokenizer(*pair)["input_ids"]) > 48 for pair in pairs] and any(cut)
    wanted = encoder.predict(
        pairs,
        activation_fn=torch.nn.Identity(),
        processing_kwargs={"text": {"truncation": "only_second"}},
    )
    np.testing.assert_allclose(found, wanted, atol=1e-5 if dtype == "fp32" else 1)
    if dtype == "bf16":  # the last layer is fp32: more digits than bf16 has
        assert (found != torch.tensor(found).bfloat16().float().numpy()).any()


def test_a_claim_keeps_at_most_half_of_the_tokens(models, tmp_path):
    model, _ = scorer(tiny(tmp_path / "tiny"), max_length=43)  # three of them are special
    pairs = [
        ("sun " * 700, "ice " * 700),
        ("sun " * 700, "ice"),
        ("sun", "ice " * 700),
        ("sun " * 20, "ice " * 20),
        ("sun", ""),
    ]
    read = [model[0].preprocess.read(pair) for pair in pairs]
    assert [tuple(map(len, ids)) for ids, _ in read] == [
        (20, 20),
        (20, 1),
        (1, 39),
        (20, 20),
        (1, 0),
    ]
    assert [is_cut for _, is_cut in read] == [True, True, True, False, False]


def test_a_causal_reranker_keeps_template_and_claim(tmp_path):
    from sentence_transformers.cross_encoder.modules import LogitScore

    encoder = CrossEncoder(
        tiny_llm(tmp_path),
        device="cpu",
        prompts={"judge": "Judge it."},
        default_prompt_name="judge",
    )
    encoder.tokenizer.chat_template = TEMPLATE
    encoder.save_pretrained(str(tmp_path))
    long = ("The sun is hot #sun", "Ice melts. " * 40)
    pair = ("Up?", "Sea.")
    encoder, score = scorer(tmp_path, max_length=130)
    found, cut = score([long, pair])
    _, text = encoder[0].preprocess.truncated_texts(long)
    coded = encoder.preprocess([long], prompt="Judge it.")["input_ids"][0]
    seen = encoder.tokenizer.decode(coded)
    assert isinstance(encoder[1], LogitScore) and cut == [1, 0] and len(coded) in range(124, 131)
    assert seen.startswith("<|im_start|>Judge it.\n") and long[1].startswith(text) and text
    assert seen.endswith(f"{text}<Query>: {long[0]}<|im_end|>yes?")
    wanted = encoder.predict([pair], prompt="Judge it.", activation_fn=lambda logits: logits)
    assert found[1] == pytest.approx(wanted[0], abs=1e-4)
    assert abs(scorer(tmp_path, prompt="Refute it.")[1]([pair])[0][0] - found[1]) > 1e-3


def test_mono_t5_scores_true_against_false(models, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(models / "minilm")
    torch.manual_seed(1)
    config = T5Config(
        vocab_size=30_522,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config).eval()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    pairs = [("ice melts", "sea up fast"), ("sea", "ice " * 40), ("up", "sea")]
    found, cut = scorer(tmp_path, max_length=16)[1](pairs)
    assert cut == [False, True, False]
    pairs[1] = "sea", "ice " * 7  # Query : sea Document : ... Relevant :, with [CLS] and [SEP]
    true, false = tokenizer.convert_tokens_to_ids(["true", "false"])
    for number, (claim, text) in zip(found, pairs):
        ids = tokenizer(f"Query: {claim} Document: {text} Relevant:", return_tensors="pt").input_ids
        with torch.inference_mode():
            logits = model(input_ids=ids, decoder_input_ids=torch.tensor([[0]])).logits[0, 0]
        assert number == pytest.approx(float(logits[true] - logits[false]), abs=1e-5)


@pytest.mark.parametrize(
    "name", ["lightonai/LateOn", "lightonai/GTE-ModernColBERT-v1", "colbert-ir/colbertv2.0"]
)
def test_late_interaction_scores_by_maxsim(toy, call, refused, quick_processes, name):
    layouts.make(toy, [name])
    words = ("--model", name, "--depth", 4, "--out", "new.tsv")
    done = facts(call(SCRIPT, *words, cwd=toy))
    assert (done["pairs"], done["truncated"]) == (12, 0)
    model = MultiVectorEncoder(str(toy / name), device="cpu")
    claims = dict(read(toy / "data/demo/claims.test.tsv")[["claim_id", "claim"]].values)
    for claim_id, abstract_id, _, score in read(toy / "new.tsv")[RUN].values:
        tokens = model.encode_query([claims[claim_id]])[0]
        vectors = model.encode_document([ABSTRACTS[abstract_id]])[0]
        assert score == pytest.approx(float((tokens @ vectors.T).max(1).values.sum()), abs=1e-4)
    facts(call(SCRIPT, *words[:-1], "two.tsv", "--device", "cpu", "cpu", cwd=toy))  # processes
    both = read(toy / "new.tsv").merge(read(toy / "two.tsv"), on=PAIR)
    assert len(both) == 12 and np.allclose(both["score_x"], both["score_y"], atol=1e-4)
    short = facts(call(SCRIPT, *words[:-1], "short.tsv", "--max-length", 8, cwd=toy))
    assert short["truncated"] > 6
    refused(
        toy, SCRIPT, *words[:-1], "x.tsv", "--prompt", "Judge.", said="--prompt: a model of late"
    )


# ---------------------------------------------------------------- A rerank endpoint
def rerank_server(endpoint, form="results"):
    """A rerank endpoint; the score of a document is its number of letters e."""

    def reply(body):
        if form == "texts" and "texts" not in body:
            text = "Failed to deserialize the JSON body into the target type: missing field `texts`"
            return {"status": 422, "text": text}
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
    words = ("--base-url", server.url, "--model", "jina", "--batch-size", 5, "--out", "new.tsv")
    words = (*words, "--extra", '{"truncate": true}')
    done = facts(call(SCRIPT, *words, cwd=toy))
    run = read(toy / "new.tsv")
    assert done["pairs"] == len(run) == 18
    for _, abstract_id, _, score in run[RUN].values:
        assert score == ABSTRACTS[abstract_id].count("e")
    asked = [body for body in server.asked if form == "results" or "texts" in body]
    assert sorted(body["top_n"] for body in asked) == [1, 1, 1, 5, 5, 5]
    assert all(body["model"] == "jina" and body["truncate"] for body in asked)
    assert {body["key"] for body in asked} == {"Bearer secret-key"}
    assert b"secret-key" not in b"".join(contents(toy).values())
    assert "up to date" in call(SCRIPT, *words, "--concurrency", 1, cwd=toy).stdout
    server.asked.clear()
    facts(call(SCRIPT, *words, "--concurrency", 1, "--force", cwd=toy))
    assert len(server.asked) == (7 if form == "texts" else 6)  # one is refused, not each
    refused(toy, SCRIPT, *words, "--prompt", "Judge.", said="--prompt: a rerank endpoint has its")


def test_nothing_is_asked_of_a_rerank_endpoint_twice(toy, call, endpoint, refused):
    whole = rerank_server(endpoint)
    refusal = {"status": 400, "text": "a document is too long"}
    server = endpoint(lambda body: whole.reply(body) if len(server.asked) != 3 else refusal)
    words = ("--base-url", server.url, "--model", "m", "--batch-size", 2, "--concurrency", 1)
    words = (*words, "--out", "new.tsv")
    refused(toy, SCRIPT, *words, said="a document is too long", kept=".parts")
    assert len(server.asked) == 3  # no call begins after one that failed
    done = facts(call(SCRIPT, *words, cwd=toy))
    assert done["pairs"] == 18 and len(server.asked) == 3 + 7
    queries = [json.dumps([body["query"], body["documents"]]) for body in server.asked]
    assert len(set(queries)) == 9
    refused(toy, SCRIPT, *words[2:], said="m: ")


@pytest.mark.parametrize(
    "reply",
    [{"results": []}, {"results": [{"index": 0}]}, {"results": 2 * [{"index": 0, "score": 1}]}],
)
def test_a_rerank_reply_without_all_scores_ends_the_run(toy, endpoint, refused, reply):
    server = endpoint(lambda body: {"raw": json.dumps(reply).encode()})
    words = ("--base-url", server.url, "--model", "m", "--out", "new.tsv")
    how = {"kept": ".parts", "edits": {"RETRIES = 6": "RETRIES = 0"}}
    refused(toy, SCRIPT, *words, said="run again to go on", **how)


# ---------------------------------------------------------------- Arithmetic
def test_blended_scores_by_hand():
    rows = [("1", "a", 3, 10.0), ("1", "b", 1, 20.0), ("2", "a", 1, 2.0), ("2", "x", 1, None)]
    table = pd.DataFrame(rows, columns=[*PAIR, "score", "first_stage"])
    assert KIT.blend_first_stage(table, 0.25).tolist() == pytest.approx([0.5, -0.5, 0, 0])
    rows = [("1", "a", 1, 10.0), ("1", "b", 1, 20.0), ("1", "x", 1, None)]  # x counts as 10
    table = pd.DataFrame(rows, columns=[*PAIR, "score", "first_stage"])
    low = -1 / 2**0.5  # mean 40 / 3, standard deviation 10 sqrt(2) / 3
    high = 2**0.5
    assert KIT.blend_first_stage(table, 0.5).tolist() == pytest.approx([low / 2, high / 2, low / 2])


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
    def reranked(*words):
        facts(call(SCRIPT, "--model", "tiny", "--depth", 4, *words, "--out", "new.tsv", cwd=toy))
        return read(toy / "new.tsv")

    tiny(toy / "tiny")
    before = read(toy / HYBRID)
    after = reranked()
    first = before[before["rank"] <= 4][PAIR].values.tolist()
    assert sorted(after[PAIR].values.tolist()) == sorted(first)
    for _, rows in after.groupby("claim_id"):
        assert rows["rank"].tolist() == [1, 2, 3, 4] and rows["score"].is_monotonic_decreasing
    words = ("--model", "tiny", "--depth", 4, "--batch-size", 7, "--out", "new.tsv")
    assert "up to date" in call(SCRIPT, *words, cwd=toy).stdout
    facts(call(SCRIPT, *words[:-1], "two.tsv", "--device", "cpu", "cpu", cwd=toy))  # processes
    both = after.merge(read(toy / "two.tsv"), on=PAIR)
    assert len(both) == 12 and np.allclose(both["score_x"], both["score_y"], atol=1e-4)
    best = reranked("--top-k", 2)
    assert best["abstract_id"].tolist() == after[after["rank"] <= 2]["abstract_id"].tolist()


def test_what_stands_behind_depth_follows_where_top_k_asks_for_it(toy, call):
    tiny(toy / "tiny")
    before = read(toy / HYBRID)
    done = call(SCRIPT, "--model", "tiny", "--depth", 2, "--top-k", 5, "--out", "a.tsv", cwd=toy)
    assert facts(done)["left_out"] == len(before) - 15
    assert "15 rows, 3 of 18 candidates left out" in done.stdout
    for claim, rows in read(toy / "a.tsv").groupby("claim_id"):
        old = before[before["claim_id"] == claim]["abstract_id"].tolist()
        assert sorted(rows["abstract_id"][:2]) == sorted(old[:2])
        assert rows["abstract_id"].tolist()[2:] == old[2:5]
        lowest = rows["score"].iloc[1]
        assert rows["score"].tolist()[2:] == pytest.approx([lowest - n for n in (1, 2, 3)])
    done = call(SCRIPT, "--model", "tiny", "--depth", 9, "--top-k", 2, "--out", "b.tsv", cwd=toy)
    assert facts(done)["left_out"] == len(before) - 6  # nothing stands behind that depth


def test_neighbours_by_01_join(toy, call, refused):
    tiny(toy / "tiny")
    facts(call("01_index.py", "--indexes", "dense", "--dense-model", "tiny", cwd=toy))
    facts(call("01_index.py", "graph", cwd=toy))
    words = ("--model", "tiny", "--out", "new.tsv", "--depth", 4, "--graph", GRAPH)
    facts(call(SCRIPT, *words, cwd=toy))
    assert (read(toy / "new.tsv").groupby("claim_id").size() == 12).all()  # all are reached
    with open(toy / "data/demo/corpus.jsonl", "a") as file:
        file.write('{"abstract_id": "0013", "abstract": "snow"}\n')
    refused(toy, SCRIPT, *words, said=f"{GRAPH}: the corpus has changed")


def test_kill_9_in_the_middle_changes_no_byte(toy, call, killed):
    tiny(toy / "tiny")
    words = ("--model", "tiny", "--first-stage", 0.5)
    small = {"GROUP = 1024": "GROUP = 4"}  # five groups
    facts(call(SCRIPT, *words, "--out", "whole.tsv", cwd=toy, edits=small))
    kill = kill_before("stored[start : start + size] =", 3)
    assert killed(SCRIPT, *words, "--out", "killed.tsv", cwd=toy, edits=small | kill)
    [path] = toy.glob("killed.tsv.parts/*/scores.npy")
    scores = np.load(path, mmap_mode="r+")
    assert np.isfinite(scores).sum() == 2 * 8 and not (toy / "killed.tsv").exists()
    scores[6:8] = np.nan  # the second group is torn
    del scores
    never = kill_before("stored[start : start + size] =", 5, by="sys.exit('done again')")
    facts(call(SCRIPT, *words, "--out", "killed.tsv", cwd=toy, edits=small | never))
    assert (toy / "killed.tsv").read_bytes() == (toy / "whole.tsv").read_bytes()
    assert not (toy / "killed.tsv.parts").exists()


def test_finished_pairs_are_not_scored_again_though_the_last_group_is_small(toy, call, killed):
    tiny(toy / "tiny")
    words = ("--model", "tiny", "--out", "new.tsv")
    assert killed(SCRIPT, *words, cwd=toy, edits=kill_before("return pairs.assign(score=scores", 1))
    never = kill_before("stored[start : start + size] =", 1, by="sys.exit('done again')")
    facts(call(SCRIPT, *words, cwd=toy, edits=never))


def test_a_prompt_must_leave_room(toy, refused):
    tiny(toy / "tiny")
    words = ("--model", "tiny", "--max-length", 8, "--prompt", "ice ice ice ice")
    refused(toy, SCRIPT, *words, said="--max-length: no tokens are left")


def test_tensors_are_those_of_the_tokenizer(models, tmp_path):
    rng = np.random.default_rng(1)
    texts = [" ".join(rng.choice(list(ABSTRACTS.values()), 2)) for _ in range(9)]
    pairs = [(claim, text) for claim in ("It's the sun, stupid", "Größe [SEP]") for text in texts]
    for maker in (layouts.classifier(BertConfig), layouts.llama_classifier):
        folder = tmp_path / str(maker)
        folder.mkdir()
        maker(folder)
        model, _ = scorer(str(folder))
        found = model.preprocess(pairs)
        wanted = model.tokenizer(pairs, padding=True, return_tensors="pt")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in found)


def test_a_batch_has_as_many_tokens_as_fit_and_half_of_them_where_memory_is_small(
    models, tmp_path, monkeypatch, capsys
):
    model, score = scorer(tiny(tmp_path / "tiny"), max_length=64)
    texts = ["ice", "ice " * 60, "ice ice", "ice " * 30, "ice ice ice", "sea"]
    pairs = [("sun", text) for text in texts]
    sizes = []
    predict = model.predict

    def small(batch, **options):
        sizes.append(len(batch))
        if len(batch) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return predict(batch, **options)

    wanted = score(pairs)[0]
    monkeypatch.setattr(model, "predict", small)
    np.testing.assert_allclose(score(pairs)[0], wanted, atol=1e-6)
    assert sizes[:2] == [2, 1] and sizes.count(1) == 6
    assert "--batch-size: 2 pairs of 64 tokens fill the GPU; now half" in capsys.readouterr().err
    monkeypatch.setattr(model, "predict", lambda *_, **__: small([1, 2]))
    with pytest.raises(torch.OutOfMemoryError):
        score(pairs)


def test_corpora_whose_fields_are_no_texts_are_reranked(toy, call):
    tiny(toy / "tiny")
    lines = (toy / "data/demo/corpus.jsonl").read_text().splitlines()
    for row, title in enumerate(("NaN", "null", "1984", '["a", "b"]')):
        lines[row] = lines[row].replace("{", f'{{"title": {title}, ', 1)
    lines[4] = '{"abstract_id": "0005", "abstract": ["Ice melts.", "Sea rises."]}'
    lines[5] = '{"abstract_id": "0006", "abstract": NaN}'
    (toy / "data/demo/corpus.jsonl").write_text("\n".join(lines))
    words = ("--model", "tiny", "--depth", 6, "--out", "new.tsv")
    assert facts(call(SCRIPT, *words, cwd=toy))["pairs"] == 18


def test_an_old_package_is_named_before_work_begins(monkeypatch, capsys):
    monkeypatch.setattr("importlib.metadata.version", lambda package: "5.7.0")
    with pytest.raises(SystemExit):
        KIT.check_model("x")
    assert (
        "sentence-transformers: 5.7.0 is older than 6.2; pip install -U" in capsys.readouterr().err
    )
