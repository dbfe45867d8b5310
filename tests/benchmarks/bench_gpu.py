"""
Measure stages 1, 3 and 5 on a GPU, with models of full size and random weights.

Each command runs twice in this process: with few texts, to import, to start the GPU and to compile;
then with many, which is measured as a whole, loading included. Peak memory is what PyTorch had
allocated on the GPU. The share of the peak counts the operations of budget.py for the tokens of
the texts; training and its memory stand beside budget.py's table.

Reads   data/models/minilm: the tokenizer of all models; makes texts of ClimateCheck's lengths in
        words, drawn from README.md, whose words have more tokens
Prints  a line of JSON for each step; a table

Examples
    python tests/benchmarks/bench_gpu.py --folder work/gpu
    python tests/benchmarks/bench_gpu.py --folder work/gpu --steps "train 0.6B" "splade"
    python tests/benchmarks/bench_gpu.py --folder work/gpu-small --scale 0.01  # on a CPU
"""

import argparse
import gc
import itertools
import json
import os
import runpy
import shutil
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
H100 = 989e12  # bf16, dense
CLAIMS = 32
DEPTH = 256  # candidates a claim
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
INSTRUCTION = "Judge whether the document is evidence about the query. Answer yes or no."
BUDGET = runpy.run_path(str(ROOT / "recipes/tools/budget.py"))


class Step(NamedTuple):
    """A job of the scripts with a model of budget.py, and how many texts or pairs it gets."""

    job: str  # index, splade, rerank, classify or train
    model: str
    texts: int
    flags: str = ""
    longest: int = 512  # tokens


LARGE = BUDGET["LARGE"]
SPLADE = BUDGET["SPLADE"]
DEBERTA = BUDGET["DEBERTA"]
MINI = BUDGET["L6"]
STEPS = {
    "index BERT-large": Step("index", LARGE, 16_384),
    "index BERT-large, batch 128": Step("index", LARGE, 16_384, "--batch-size 128"),
    "index MiniLM-L6": Step("index", MINI, 32_768),
    "index MiniLM-L6, batch 256": Step("index", MINI, 32_768, "--batch-size 256"),
    "index 0.6B": Step("index", "0.6B", 4_096, longest=1024),
    "index 4B": Step("index", "4B", 1_024, longest=1024),
    "splade": Step("splade", SPLADE, 4_096),
    "splade, batch 128": Step("splade", SPLADE, 8_192, "--batch-size 128"),
    "rerank BERT-large": Step("rerank", LARGE, 8_192),
    "rerank MiniLM-L6": Step("rerank", MINI, 8_192),
    "rerank MiniLM-L6, batch 256": Step("rerank", MINI, 8_192, "--batch-size 256"),
    "rerank 0.6B": Step("rerank", "0.6B", 4_096, longest=1024),
    "rerank 4B": Step("rerank", "4B", 1_024, longest=1024),
    "classify DeBERTa-large": Step("classify", DEBERTA, 2_048),
    "train 0.6B": Step("train", "0.6B", 256),
    "train 0.6B, checkpointing": Step("train", "0.6B", 256, "--checkpointing"),
    "train 0.6B, LoRA": Step("train", "0.6B", 256, "--lora 16"),
    "train 0.6B, both": Step("train", "0.6B", 256, "--lora 16 --checkpointing"),
    "train 4B, both": Step("train", "4B", 64, "--lora 16 --checkpointing"),
}


# -------------------- Texts
def make_texts(data, scale):
    """Make claims, a corpus and a run in the folder data."""
    if (data / "run.tsv").exists():
        return
    names = runpy.run_path(str(HERE / "make_corpus.py"))
    rng = np.random.default_rng(13)
    words = np.array((ROOT / "README.md").read_text(encoding="utf-8").split(), dtype=object)
    vocabulary = names["Vocabulary"](words, np.arange(1, len(words) + 1) / len(words))
    data.mkdir(parents=True, exist_ok=True)
    lengths = names["lengths_of"](rng, max(DEPTH, int(32_768 * scale)))
    names["write_corpus"](data / "corpus.jsonl", rng, vocabulary, lengths)
    labels = ["SUPPORTS", "REFUTES", "NEI", "NEI", "NEI"]
    names["write_claims"](data, "test", rng, vocabulary, {"": CLAIMS}, len(lengths), labels)
    rows = []
    for claim in range(CLAIMS):
        for rank, abstract in enumerate(rng.permutation(len(lengths))[:DEPTH], 1):
            rows.append((f"test-{claim}", str(abstract), str(rank), str(-rank)))
    header = ("claim_id", "abstract_id", "rank", "score")
    names["write_table"](data / "run.tsv", header, rows)


def examples(folder, count):
    """Make this many pairs to train on; return the file."""
    lines = []
    run = (folder / "data/run.tsv").read_text().splitlines()[1:]
    for number, row in enumerate(run[:count]):
        claim_id, abstract_id, *_ = row.split("\t")
        record = {"claim_id": claim_id, "abstract_id": abstract_id}
        lines.append(json.dumps(record | {"target": number % 2}))
    path = folder / f"examples-{count}.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def tokens_of(path, longest):
    """Return the mean tokens of the first abstracts in a corpus, each truncated to longest."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "data/models/minilm")
    with open(path, encoding="utf-8") as file:
        texts = [json.loads(line)["abstract"] for line in itertools.islice(file, 256)]
    coded = tokenizer(texts, truncation=True, max_length=longest)["input_ids"]
    return sum(map(len, coded)) / len(coded)


# -------------------- Models
def make_model(folder, job, name):
    """Save a model with random weights for a job; return its folder."""
    import torch
    from transformers import AutoTokenizer

    path = folder / f"{job}-{name.split(' ')[0]}"
    if path.exists():
        return path
    new = folder / "new"
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "data/models/minilm", model_max_length=1024)
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(13)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        build(job, name).bfloat16().save_pretrained(new)
    tokenizer.save_pretrained(new)
    if name in BUDGET["QWEN"] and job == "rerank":
        as_reranker(new)
    new.rename(path)
    return path


def as_reranker(folder):
    """Let a causal model in a folder answer yes or no."""
    from sentence_transformers import CrossEncoder

    encoder = CrossEncoder(
        str(folder),
        device="cpu",
        prompts={"query": INSTRUCTION},
        default_prompt_name="query",
        model_kwargs={"dtype": "bfloat16"},
    )
    encoder.save_pretrained(str(folder), create_model_card=False)


def build(job, name):
    """Return a model of the sizes in budget.py."""
    import transformers

    if name in BUDGET["QWEN"]:
        layers, width, feed, heads, tied = BUDGET["QWEN"][name]
        config = transformers.Qwen3Config(
            vocab_size=BUDGET["WORDS"],
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=BUDGET["KEYS"],
            head_dim=BUDGET["HEAD"],
            intermediate_size=feed,
            tie_word_embeddings=tied,
        )
        if job == "index":
            return transformers.Qwen3Model(config)
        return transformers.Qwen3ForCausalLM(config)
    layers, width, feed, _ = BUDGET["MODELS"][name]
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": feed}
    sizes["num_attention_heads"] = max(width // 64, 12)  # MiniLM: 12 of 32
    if job == "classify":
        labels = {0: "entailment", 1: "neutral", 2: "contradiction"}
        config = transformers.DebertaV2Config(
            **sizes,
            id2label=labels,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            position_buckets=256,
            share_att_key=True,
            norm_rel_ebd="layer_norm",
            type_vocab_size=0,
            position_biased_input=False,
        )
        return transformers.DebertaV2ForSequenceClassification(config)
    config = transformers.BertConfig(num_labels=1, **sizes)
    if job == "rerank":
        return transformers.BertForSequenceClassification(config)
    if job == "splade":
        return sparse_at_random(transformers.BertForMaskedLM(config))
    return transformers.BertModel(config)


def sparse_at_random(model):
    """Return a SPLADE model that gives a text about a hundred terms."""
    import torch

    with torch.no_grad():
        ids = torch.randint(1000, 30_000, (8, 400))
        highest = model.eval()(ids).logits.amax(1).sort(descending=True).values
        model.cls.predictions.bias -= highest[:, 100].mean()
    return model


# -------------------- Commands
def run_script(words):
    """Run a script in this process; return seconds, and the GPU's peak in GiB."""
    import torch

    gc.collect()
    peak = 0
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    sys.argv = list(words)
    begun = time.monotonic()
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"{' '.join(words)}: status {end.code}") from end
    seconds = time.monotonic() - begun
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / 2**30
    return seconds, peak


def words_of(step, model, folder, count):
    """Return the words of a script's call over this many texts or pairs, from an empty work/."""
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    flags = ["--data", str(folder / "data"), "--work", str(work), *step.flags.split()]
    flags += ["--max-length", str(step.longest)]
    if step.job in ("index", "splade"):
        kind = "dense" if step.job == "index" else "splade"
        corpus = folder / f"corpus-{count}.jsonl"
        with open(folder / "data/corpus.jsonl", encoding="utf-8") as file:
            corpus.write_text("".join(itertools.islice(file, count)))
        flags += ["--corpus", str(corpus)]
        return ["01_index.py", "--indexes", kind, f"--{kind}-model", str(model), *flags]
    flags += ["--split", "test", "--model", str(model)]
    if step.job == "train":
        flags += ["--epochs", "1", "--batch-size", "8", "--save-steps", "1000"]
        return ["03_rerank.py", "train", str(examples(folder, count)), *flags]
    run = folder / f"run-{count}.tsv"
    header, *rows = (folder / "data/run.tsv").read_text().splitlines()
    run.write_text("\n".join([header, *rows[:count]]) + "\n")
    if step.job == "rerank":
        return ["03_rerank.py", "--run", str(run), "--depth", str(DEPTH), *flags]
    return ["05_classify.py", "--run", str(run), "--top-k", str(DEPTH), *flags]


def measure(name, step, folder, args):
    """Run a step with few and then with all of its texts, and return its row."""
    is_training = step.job == "train"
    model = make_model(folder, "rerank" if is_training else step.job, step.model)
    count = max(64, int(step.texts * args.scale))
    run_script(words_of(step, model, folder, max(16, count // 8)))
    seconds, peak = run_script(words_of(step, model, folder, count))
    row = {"step": name, "texts": count, "seconds": round(seconds, 1)}
    row |= {"per_second": round(count / seconds), "gpu_gib": round(peak, 2)}
    if not is_training:
        tokens = tokens_of(folder / "data/corpus.jsonl", step.longest)
        if step.job in ("rerank", "classify"):
            tokens = min(tokens + BUDGET["CLAIM"], step.longest)
        operations = count * BUDGET["operations"](step.model, 1, tokens, False)
        row["share_of_peak"] = round(operations / seconds / args.peak, 3)
    return row


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="write models and texts here")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), metavar="STEP")
    parser.add_argument("--peak", type=float, default=H100, help="operations a second of the GPU")
    parser.add_argument("--scale", type=float, default=1, help="this share of the texts")
    args = parser.parse_args()
    os.chdir(ROOT)
    folder = args.folder.resolve()
    make_texts(folder / "data", args.scale)
    rows = []
    for name in args.steps:
        try:
            rows.append(measure(name, STEPS[name], folder, args))
        except Exception as error:  # the other steps go on
            rows.append({"step": name, "error": str(error)[:300]})
        print(json.dumps(rows[-1]), flush=True)
    print("| step | texts | seconds | a second | GPU GiB | share of the peak |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        cells = [row["step"]]
        for name in ("texts", "seconds", "per_second", "gpu_gib", "share_of_peak"):
            cells.append(f"{row[name]:,}" if name in row else "")
        print("|", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
