"""03_rerank.py: truncation, blends, graphs, endpoints, restarts; test_models.py has what loads."""

import json
import re
from argparse import Namespace
from pathlib import Path

import layouts
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import (
    ABSTRACTS,
    CLAIMS,
    KEY,
    RUN,
    cells,
    facts,
    kill_before,
    load,
    read,
    tiny,
    tiny_llm,
    tsv,
)
from sentence_transformers import CrossEncoder

SCRIPT = "03_rerank.py"
GRAPH = "work/demo/index/graph"
HYBRID = "work/demo/test/hybrid.tsv"
KIT = load(SCRIPT)
TEMPLATE = """{% for m in messages %}{% if m.role == 'system' %}<|im_start|>{{ m.content }}
{% elif m.role == 'document' %}<Document>: {{ m.content }}{% endif %}{% endfor %}
<Query>: {% for m in messages if m.role == 'query' %}{{ m.content }}{% endfor %}<|im_end|>yes?"""
TINY = "--model tiny --out new.tsv"
QWEN = "Qwen/Qwen3-Reranker-0.6B"


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
def test_scores_are_those_of_predict_and_only_abstracts_truncated(tmp_path, dtype):
    folder = tiny(tmp_path / "tiny")
    pairs = [(f"Größe [SEP] {row}", row * 37 % 60 * "ice ") for row in range(60)]
    found, cut = scores_of(opened(folder, max_length=48, dtype=dtype), pairs)
    encoder = CrossEncoder(folder, max_length=48, device="cpu")
    assert cut == [len(encoder.tokenizer(*pair)["input_ids"]) > 48 for pair in pairs] and any(cut)
    options = {"text": {"truncation": "only_second"}}
    identity = torch.nn.Identity()
    wanted = encoder.predict(pairs, activation_fn=identity, processing_kwargs=options)
    np.testing.assert_allclose(found, wanted, atol=1e-5 if dtype == "fp32" else 1)
    if dtype == "bf16":  # the last layer is fp32: more digits than bf16 has
        assert (found != torch.tensor(found).bfloat16().float().numpy()).any()


def test_a_claim_keeps_half_of_the_tokens_or_what_the_abstract_leaves(tmp_path):
    model = opened(tiny(tmp_path / "tiny"), max_length=43)  # three of them are special
    rows = "700|700|20|20; 700|1|39|1; 30|15|25|15; 30|10|30|10; 1|700|1|39; 20|20|20|20; 1|0|1|0"
    for row in cells(rows):
        claim, abstract, *kept = map(int, row)
        ids, is_cut = model[0].preprocess.read((claim * "sun ", abstract * "ice "))
        assert [*map(len, ids)] == kept and is_cut == (claim + abstract > 40)


def test_a_causal_reranker_keeps_template_and_claim(tmp_path):
    prompts = {"prompts": {"judge": "Judge it."}, "default_prompt_name": "judge"}
    encoder = CrossEncoder(tiny_llm(tmp_path), device="cpu", **prompts)
    encoder.tokenizer.chat_template = TEMPLATE
    encoder.save_pretrained(str(tmp_path))
    long = ("The sun is hot #sun", "Ice melts. " * 40)
    pair = ("Up?", "Sea.")
    model = opened(tmp_path, max_length=130)
    found, cut = scores_of(model, [long, pair])
    coded = model.preprocess([long], prompt="Judge it.")["input_ids"][0]
    start, text, end = re.split("<Document>: |<Query>: ", model.tokenizer.decode(coded))
    assert cut == [True, False] and len(coded) in range(124, 131)
    assert start == "<|im_start|>Judge it.\n" and long[1].startswith(text) and text
    assert end == f"{long[0]}<|im_end|>yes?"
    wanted = encoder.predict([pair], activation_fn=lambda logits: logits)
    assert found[1] == pytest.approx(wanted[0], abs=1e-4)
    assert abs(scores_of(opened(tmp_path, prompt="Refute it."), [pair])[0][0] - found[1]) > 1e-3


def test_mono_t5_truncates_the_document_alone(tmp_path):
    layouts.mono_t5(tmp_path / "monot5")
    model = opened(tmp_path / "monot5", max_length=16)
    pairs = [("sea", "ice " * 40), ("sea", "of ice")]
    found, cut = scores_of(model, pairs)
    text = model.tokenizer.decode(model.preprocess(pairs[:1])["input_ids"][0]).replace("▁", "")
    assert cut == [True, False] and found[0] != found[1]
    assert text == f"Query : sea Document : {'ice ' * 8}Relevant : </s>"


def test_a_batch_is_halved_where_memory_is_small(tmp_path, monkeypatch):
    model = opened(tiny(tmp_path / "tiny"), max_length=64)
    pairs = [("sun", number * "ice ") for number in (1, 60, 2, 30, 3, 1)]
    sizes = []
    predict = model.predict

    def small(batch, **options):
        sizes.append(len(batch))
        if len(batch) > most:
            raise torch.OutOfMemoryError
        return predict(batch, **options)

    wanted = scores_of(model, pairs)[0]
    monkeypatch.setattr(model, "predict", small)
    most = 1
    np.testing.assert_allclose(scores_of(model, pairs)[0], wanted, atol=1e-6)
    assert sizes[:2] == [2, 1] and sizes.count(1) == 6
    most = 0
    with pytest.raises(torch.OutOfMemoryError):
        scores_of(model, pairs)


# ---------------------------------------------------------------- A rerank endpoint
# How TEI, of which it is the last row, answers documents
NO_TEXTS = (
    b"Failed to deserialize the JSON body into the target type: missing field `texts` at line 1"
)
PLAIN = {"headers": {"Content-Type": "text/plain"}}


@pytest.mark.parametrize(
    "texts, score, form",
    cells("""documents|relevance_score|{"results": FOUND}; documents|score|{"data": FOUND};
        documents|relevance_score|{"output": {"results": FOUND}}; texts|score|FOUND"""),
)
def test_a_rerank_endpoint_scores_each_pair_once(
    toy, call, refused, endpoint, texts, score, form, contents
):
    """The score of a text is its number of letters e; the third call fails."""
    scored = []

    def reply(body):
        if len(server.asked) == 3:
            return {"status": 400, "raw": b"a document is too long"} | PLAIN
        if texts not in body:
            return {"status": 422, "raw": NO_TEXTS} | PLAIN
        scored.extend((body["query"], text) for text in body[texts])
        found = [{"index": row, score: text.count("e")} for row, text in enumerate(body[texts])]
        found.reverse()
        return {"raw": form.replace("FOUND", json.dumps(found)).encode()}

    server = endpoint(reply)
    url = server.url.replace("://", "://me:pass@")
    words = f"--base-url {url} --model jina --out new.tsv --batch-size"
    how = {"cwd": toy, "env": {"OPENAI_API_KEY": "pass@key"}}
    extra = ("--extra", '{"truncate": true}')
    refused(
        toy,
        SCRIPT,
        f"{words} 5 --concurrency 1",
        *extra,
        said="a document is too long",
        kept=".parts",
    )
    assert len(server.asked) == 3  # no call begins after one that failed
    done = facts(call(SCRIPT, f"{words} 5", *extra, **how))
    assert done["pairs"] == 18 and "truncated" not in done  # nobody knows
    for _, abstract_id, _, value in read(toy / "new.tsv")[RUN].values:
        assert value == ABSTRACTS[abstract_id].count("e")
    assert len(scored) == len(set(scored)) == 18
    for body in server.asked:
        assert body["model"] == "jina" and body["truncate"]
    assert b"pass@" not in b"".join(contents(toy).values())
    assert "up to date" in call(SCRIPT, f"{words} 9", *extra, **how).stdout


REPLIES = """{}|{"results": []}; {}|{"ranking": [{"index": 0, "score": 1}]};
{}|{"results": [{"index": 1, "score": 1}]}; {}|{"results": [{"index": 0, "score": null}]};
{}|{"results": [{"index": 0, "score": Infinity}]}; {}|[0.5]; {}|{"detail": "wrong path"}"""


@pytest.mark.parametrize("extra, reply", cells(REPLIES))
def test_a_reply_in_another_form_ends_the_run(toy, endpoint, refused, extra, reply):
    server = endpoint(lambda body: {"raw": reply.encode()})
    words = f"--base-url {server.url} --model m --depth 1 --out new.tsv --extra {extra}"
    refused(toy, SCRIPT, words, said=reply.strip('{"[').split('"')[0], kept=".parts")
    assert len(server.asked) == 1


def test_equal_scores_of_a_claim_are_counted(toy, call, endpoint):
    """Claim 2 has different ones; claim 3 has one candidate."""

    def reply(body):
        found = [{"index": row, "score": 0.5} for row in range(len(body["documents"]))]
        found[0]["score"] += body["query"] == "b"
        return {"raw": json.dumps({"results": found}).encode()}

    tsv(toy / "claims.tsv", CLAIMS, "1|a; 2|b; 3|c")
    tsv(toy / "run.tsv", RUN, "1|0001|1|3; 1|0002|2|2; 2|0001|1|3; 2|0002|2|2; 3|0001|1|3")
    words = f"--base-url {endpoint(reply).url} --model m --run run.tsv --claims claims.tsv --out"
    done = call(SCRIPT, f"{words} new.tsv --first-stage 0.5", cwd=toy)
    assert "m: all scores are equal for 1 of 2 claims" in done.stderr


# ---------------------------------------------------------------- Arithmetic
def test_blended_scores_by_hand():
    """The z-scores of 10, 20 and none, so 10, are -1/sqrt(2), sqrt(2) and -1/sqrt(2)."""
    table = pd.DataFrame({"claim_id": list("1122333"), "score": [3, 1, 1, 1, 1, 1, 1]})
    table["first_stage"] = [10, 20, 2, None, 10, 20, None]
    low = -0.25 / 2**0.5
    expected = [0.5, -0.5, 0, 0, low, -2 * low, low]
    assert KIT.blend_first_stage(table, 0.25).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    "rounds, beam, calls",  # with a beam of 2, d and f become best, and know nothing new
    [(20, 2, "ag bcfd"), (20, 6, "ag bcfd e"), (1, 2, "c ae")],
)
def test_neighbours_of_the_best_join_until_nothing_is_new(rounds, beam, calls):
    asked = []
    worth = dict(zip("abcdefg", (5, 6, 1, 9, 2, 7, 0)))
    graph = dict(zip("abcdefg", map(list, "bc ad ae bf ca db fd".split())))

    def score(pairs, _):
        asked.append("".join(pairs["abstract_id"]))
        return pairs.assign(score=pairs["abstract_id"].map(worth))

    args = Namespace(rounds=rounds, beam=beam)
    pairs = pd.DataFrame({"claim_id": "1", "abstract_id": list(calls.split()[0])})
    found = KIT.with_neighbours(score(pairs, None), graph, score, Path(), args)
    assert " ".join(asked) == calls
    assert "".join(found["abstract_id"]) == "".join(asked)


# ---------------------------------------------------------------- Reranking
def test_a_worker_that_dies_ends_the_run(toy, refused, quick_processes):
    tiny(toy / "tiny")
    kill = kill_before("found = [self.read(pair)[0][:: self.step] for pair in pairs]")
    words = f"{TINY} --device cpu cpu"
    refused(toy, SCRIPT, words, said="died unexpectedly", kept=".parts", edits=kill)


@pytest.mark.parametrize("model", ["tiny", QWEN, "lightonai/LateOn"])
def test_candidates_are_sorted_by_the_scores_of_a_model(toy, call, quick_processes, model):
    tiny(toy / "tiny")
    layouts.make(toy, {model} - {"tiny"})
    words = f"--model {model} --depth 4 --max-length 400 --out"
    facts(call(SCRIPT, f"{words} one.tsv", cwd=toy))
    one = read(toy / "one.tsv")
    before = read(toy / HYBRID)
    assert len(one) == len(one.merge(before[before["rank"] <= 4], on=KEY)) == 12
    for _, rows in one.groupby("claim_id"):
        assert rows["rank"].tolist() == [1, 2, 3, 4] and rows["score"].is_monotonic_decreasing
    assert "up to date" in call(SCRIPT, f"{words} one.tsv --batch-size 7", cwd=toy).stdout
    facts(call(SCRIPT, f"{words} two.tsv --device cpu cpu", cwd=toy))  # processes
    both = one.merge(read(toy / "two.tsv"), on=KEY)
    assert len(both) == 12 and np.allclose(both["score_x"], both["score_y"], atol=1e-4)
    words = words.replace("400", "330" if model == QWEN else "8")
    assert facts(call(SCRIPT, f"{words} cut.tsv", cwd=toy))["truncated"] > 6
    if model == QWEN:  # truncated in one way on all devices
        facts(call(SCRIPT, f"{words} two.tsv --device cpu cpu", cwd=toy))
        both = read(toy / "cut.tsv").merge(read(toy / "two.tsv"), on=KEY)
        assert np.allclose(both["score_x"], both["score_y"], atol=1e-6)


def test_what_stands_behind_depth_follows_where_top_k_asks_for_it(toy, call):
    tiny(toy / "tiny")
    before = read(toy / HYBRID).groupby("claim_id")["abstract_id"].agg(list)
    assert facts(call(SCRIPT, f"{TINY} --depth 2 --top-k 5", cwd=toy))["left_out"] == 3
    for claim_id, rows in read(toy / "new.tsv").groupby("claim_id"):
        found = rows["abstract_id"].tolist()
        assert sorted(found[:2]) == sorted(before[claim_id][:2])
        assert found[2:] == before[claim_id][2:5]
        _, lowest, *scores = rows["score"]
        assert scores == pytest.approx([lowest - n for n in (1, 2, 3)])
    done = facts(call(SCRIPT, f"{TINY} --depth 9 --top-k 2", cwd=toy))
    assert done["left_out"] == 12  # nothing stands behind that depth


def test_neighbours_by_01_join(toy, call, refused):
    tiny(toy / "tiny")
    facts(call("01_index.py", "--indexes dense --dense-model tiny", cwd=toy))
    facts(call("01_index.py", "graph", cwd=toy))
    words = f"{TINY} --depth 4 --graph {GRAPH}"
    facts(call(SCRIPT, words, cwd=toy))
    assert len(read(toy / "new.tsv")) == 36  # all are reached
    with open(toy / "data/demo/corpus.jsonl", "a") as file:
        file.write('{"abstract_id": "0013", "abstract": "snow"}\n')
    refused(toy, SCRIPT, words, said=f"{GRAPH}: the corpus has changed")


def test_kill_9_in_the_middle_changes_no_byte(toy, call, killed):
    tiny(toy / "tiny")
    words = "--model tiny --first-stage 0.5 --out"
    small = {"GROUP = 1024": "GROUP = 4"}  # five groups
    facts(call(SCRIPT, f"{words} whole.tsv", cwd=toy, edits=small))
    store = "group[:, -1] = np.add(is_truncated, 1)"
    assert killed(SCRIPT, f"{words} new.tsv", cwd=toy, edits=small | kill_before(store, 4))
    assert not (toy / "new.tsv").exists()
    [path] = toy.glob("new.tsv.parts/*/*")
    path.write_bytes(path.read_bytes()[:128])  # a crash of the machine leaves two of three groups
    never = kill_before(store, 4, by="sys.exit('done again')")
    facts(call(SCRIPT, f"{words} new.tsv", cwd=toy, edits=small | never))
    assert (toy / "new.tsv").read_bytes() == (toy / "whole.tsv").read_bytes()
    assert not (toy / "new.tsv.parts").exists()
