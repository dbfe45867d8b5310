"""recipes/train/training.py: adapters, checkpoints, fields."""

import json
import re
import subprocess
import sys
from argparse import Namespace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from conftest import (
    ABSTRACTS,
    CLAIMS,
    facts,
    jsonl,
    kill_before,
    load,
    records,
    tiny,
    tiny_llm,
    tsv,
)
from safetensors.torch import load_file
from sentence_transformers import CrossEncoder, SentenceTransformer

needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="peft is optional")
PAIRS = [("ice", "the sea is up " * 5), ("sun", "ice melts"), ("the sun is up", "sea")]
JOBS = {  # the model, examples of the toy, and the folder of the trained model
    "encoder.py": ("encoder", ["tuples.jsonl"], "work/demo/models/encoder"),
    "reranker.py": ("tiny", ["data/demo/pairs.jsonl"], "work/demo/models/reranker"),
    "classifier.py": ("tiny", ["--held-out", 0], "work/demo/models/classifier"),
}
SHORT = ("--max-length", 24, "--batch-size", 1, "--epochs", 1, "--lr", 1e-2)

TUPLES = """{"claim_id": "c1", "positive": "0001", "negatives": ["0002"]}
{"claim_id": "c1", "positive": "0002", "negatives": ["0003"]}
{"claim_id": "c1", "positive": "0003", "negatives": ["0004"]}
{"claim_id": "c1", "positive": "0004", "negatives": ["0005"]}
{"claim_id": "c1", "positive": "0005", "negatives": ["0006"]}
{"claim_id": "c1", "positive": "0006", "negatives": ["0007"]}
"""


@pytest.fixture
def small(toy):
    """The toy with a reranker of one output, an encoder, both without dropout, and six tuples."""
    tiny(toy / "tiny")
    config = json.loads((toy / "tiny/config.json").read_text())
    config |= {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    jsonl(toy / "tiny/config.json", config)
    (toy / "tuples.jsonl").write_text(TUPLES)
    SentenceTransformer(str(toy / "tiny"), device="cpu").save_pretrained(str(toy / "encoder"))
    return toy


def words_of(script):
    model, examples, _ = JOBS[script]
    return (*examples, "--model", model, *SHORT)


def weights_of(folder):
    return load_file(folder / "model.safetensors")


# ---------------------------------------------------------------- LoRA
def scores_of(model):
    if isinstance(model, CrossEncoder):
        return model.predict(PAIRS, activation_fn=torch.nn.Identity())
    return model.encode([text for _, text in PAIRS])


KINDS = {  # class, outputs and its own options
    "encoder": (SentenceTransformer, ["a"], {}),
    "new head": (CrossEncoder, ["a"], {"num_labels": 1}),
    "reranker": (CrossEncoder, ["a"], {}),
    "classifier": (CrossEncoder, ["a", "b", "c"], {}),
    "causal": (CrossEncoder, [], {}),
}


@needs_peft
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_the_same_before_and_after_an_adapter_is_merged(models, tmp_path, kind):
    kit = load("recipes/train/training.py")
    model_class, outputs, options = KINDS[kind]
    folder = tiny(tmp_path / "base", outputs) if outputs else tiny_llm(tmp_path / "base")
    if kind in ("encoder", "new head"):
        SentenceTransformer(folder, device="cpu").save_pretrained(folder)
    model = model_class(folder, device="cpu", **options)
    before = scores_of(model)
    args = Namespace(lora=4, lora_alpha=None, lora_dropout=0.0)
    adapter = kit.add_adapter(model.transformers_model, args)
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    heads = [name for name in trained if "lora" not in name]
    assert len(trained) > 20 and all("classifier" in name for name in heads)
    assert bool(heads) == (kind in ("new head", "reranker", "classifier"))
    for name, weight in model.named_parameters():
        if "lora_B" in name:  # it begins with zeros
            torch.nn.init.normal_(weight, std=0.01)
    wanted = scores_of(model)
    adapter.merge_and_unload()
    merged = str(tmp_path / "merged")
    kit.save_model(model, {}, {}, Namespace(out=merged, fields="title,abstract"))
    found = scores_of(model_class(merged, device="cpu"))
    assert abs(wanted - before).max() > 1e-3
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@needs_peft
@pytest.mark.parametrize("script", JOBS)
def test_an_adapter_trains_less_and_leaves_an_ordinary_model(small, call, script):
    words = (*words_of(script), "--lora", 2, "--checkpointing", "--accumulate", 2)
    facts(call(script, *words, cwd=small))
    model, _, out = JOBS[script]
    base = weights_of(small / model)
    found = weights_of(small / out)
    assert not list((small / out).glob("adapter*"))
    changed = " ".join(name for name in base if not torch.equal(base[name], found[name]))
    assert "attention" in changed and not re.search("embeddings|LayerNorm", changed)


@needs_peft
def test_every_flag_of_training_acts_and_defaults_are_what_help_says(small, call):
    weights = []
    defaults = "--lora-alpha 4 --lora-dropout 0 --warmup 0.1 --weight-decay 0"
    others = ["--lora-alpha 5", "--lora-dropout 0.5", "--warmup 0", "--weight-decay 0.5"]
    for flags in ("", defaults, *others):
        facts(call("encoder.py", f"--lora 2 {flags}", *words_of("encoder.py"), cwd=small))
        weights.append((small / JOBS["encoder.py"][2] / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] and len(set(weights)) == 5


def test_without_peft_one_line_names_it(small, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    words = (*words_of("reranker.py"), "--lora", 2)
    refused(small, "reranker.py", *words, said="peft", kept=".parts")


# ---------------------------------------------------------------- Checkpoints
@pytest.mark.parametrize("script", JOBS)
@pytest.mark.parametrize("lora", [0, pytest.param(2, marks=needs_peft)])
@pytest.mark.filterwarnings("error::FutureWarning")  # a user would read it at each training
def test_kill_9_within_the_only_epoch_ends_in_the_same_bytes(small, call, killed, script, lora):
    words = (*words_of(script), "--lora", lora)
    _, _, out = JOBS[script]
    whole = facts(call(script, *words, cwd=small))
    (small / out).rename(small / "whole")
    (small / f"{out}.meta.json").unlink()
    kill = kill_before("weights = self.model.named_parameters()", 2)
    assert killed(script, *words, cwd=small, edits=kill)
    assert not (small / out).exists()
    [checkpoint] = (small / out).parent.glob("*.parts/*/checkpoint-*/trained.safetensors")
    trained = [name for name in load_file(checkpoint) if "lora" in name or "classifier" in name]
    assert trained == list(load_file(checkpoint)) or not lora
    again = facts(call(script, *words, cwd=small, edits=kill_before("weights = self", 9)))
    assert again == whole and len(whole["loss"]) >= 3
    subprocess.run(["diff", "-r", small / "whole", small / out], check=True)


@pytest.mark.parametrize(
    "words", ["reranker.py --loss bce", "classifier.py --loss cross-entropy --sampler shuffle"]
)
def test_accumulated_batches_train_as_one(small, call, words):
    script, *options = words.split()
    found = []
    for batch, accumulate in ((4, 1), (2, 2), (2, 1), (4, 1)):
        words = ("--batch-size", batch, "--accumulate", accumulate, "--lr", 1e-3)
        assert facts(call(script, *words_of(script), *options, *words, cwd=small))["made"]
        found.append(weights_of(small / JOBS[script][2])["classifier.weight"])
    one, accumulated, other, again = found
    assert (one == again).all()
    assert abs(one - accumulated).max() < 1e-5 < 1e-4 < abs(one - other).max()


@pytest.mark.parametrize("script", JOBS)
def test_texts_of_one_letter_train(small, call, script):
    abstracts = [{"abstract_id": name, "abstract": "x"} for name in ABSTRACTS]
    jsonl(small / "data/demo/corpus.jsonl", *abstracts)
    tsv(small / "data/demo/claims.train.tsv", CLAIMS, "c1|y; c2|z")
    assert facts(call(script, *words_of(script), cwd=small))["made"]


# ---------------------------------------------------------------- Fields
def test_other_fields_change_what_a_model_reads(small, call):
    corpus = small / "data/demo/corpus.jsonl"
    jsonl(corpus, *[record | {"authors": ["A. Sun", "B. Sea"]} for record in records(corpus)])
    runs = set()
    for fields in ("title,abstract", "abstract,authors"):
        words = f"--model tiny --depth 4 --out x.tsv --fields {fields}"
        facts(call("03_rerank.py", words, cwd=small))
        runs.add((small / "x.tsv").read_text())
    assert len(runs) == 2
    words = "--run x.tsv --backend none --model m --out y.tsv --fields authors,abstract"
    assert call("04_llm_rerank.py", words, cwd=small).returncode == 3
    assert "A. Sun, B. Sea" in (small / "y.requests.jsonl").read_text()
