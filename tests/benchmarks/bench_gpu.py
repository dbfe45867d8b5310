"""
Measure stages 1, 3 and 5: rates without loading, loading apart, share of the GPU's peak.

Models have full size and random weights. A step calls a script in this process, first on few texts
to import and to start the GPU, then on as many as fit into its share of eight minutes. What is
timed begins when the library has loaded the model, and ends when the script does: tokenising,
network, and writing. Without a GPU, --small rehearses all of this with tiny models, in a
few minutes.

--before names another checkout of the kit (for steps of training, one that has recipes/train),
whose scripts take turns with these on the same texts;
"beside the first" then is seconds / seconds of the checkout. --sleep takes the network's place: a
forward pass that sleeps for so many milliseconds a text, as a GPU computes while the CPU is free.
With 0 it costs nothing, so that CPU ms are what a text or pair costs beside the network.

Operations are those that the texts need, without padding. A token takes 2 for each weight of the
linear layers, and in each layer 4 x width of all heads x tokens of its text, for queries by keys
and weights by values. The relative positions of DeBERTa are left out (8 % more), training takes
three times as many. The share of the peak is operations / seconds / peak of PEAKS.

Reads   data/models/minilm: the tokenizer of all models; data/demo, whose words make abstracts of
        ClimateCheck's lengths; or --data, whose texts are repeated, with their words in another
        order, where more are needed
Writes  FOLDER: models and texts
Prints  each row as it is measured; a table; one line of JSON

Examples
    python tests/benchmarks/bench_gpu.py
    python tests/benchmarks/bench_gpu.py --before ../kit-before --batch-size 128
    python tests/benchmarks/bench_gpu.py --small
    python tests/benchmarks/bench_gpu.py --small --sleep 0 --texts 2000 --steps "rerank MiniLM-L6"
"""

import argparse
import contextlib
import csv
import functools
import gc
import importlib
import itertools
import json
import os
import re
import runpy
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np

os.environ["HF_HUB_OFFLINE"] = "1"

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PEAKS = {  # operations a second in half precision, without sparsity: NVIDIA's data sheets
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L4": 121e12,
    "T4": 65e12,
}
SECONDS = 8 * 60  # of the whole call, without --texts
COUNTS = (256, 32_768)  # texts of the first call, and of the others at most
SMALL_COUNTS = (32, 128)
ORIGINALS = 4096  # abstracts that are made of words
DEPTH = 20  # candidates a claim
BERT_TINY = (2, 128, 512, 2)  # layers, width, width of the feed-forward part, heads
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
INSTRUCTION = "Judge whether the document is evidence about the query. Answer yes or no."
BUDGET = runpy.run_path(str(ROOT / "recipes/tools/budget.py"))
COLUMNS = {  # of the table: what a row of the JSON has
    "step": "step",
    "scripts": "scripts",
    "batch": "batch",
    "texts or pairs": "texts",
    "loading, s": "loading",
    "seconds": "seconds",
    "beside the first": "ratio",
    "a second": "per_second",
    "tokens a second": "tokens_per_second",
    "CPU ms": "cpu_ms",
    "10^12 operations": "tera_operations",
    "of the peak": "share_of_peak",
    "GPU GiB": "gpu_gib",
}


class Step(NamedTuple):
    """A job of the scripts with a model of budget.py."""

    job: str  # index, splade, rerank, classify or train
    model: str
    flags: str = ""
    longest: int = 512  # tokens


class Side(NamedTuple):
    """A checkout and a batch size; sides take turns on the same texts."""

    name: str  # before or now
    folder: Path
    batch_size: int | None  # None: the script's default


class Measured(NamedTuple):
    """What a call of a script took."""

    loading: float  # seconds until the model is loaded
    seconds: float  # from then on
    cpu: float  # CPU seconds of all threads, from then on
    gpu_gib: float  # peak of what PyTorch had allocated


LARGE = BUDGET["LARGE"]
MINI = BUDGET["L6"]
STEPS = {
    "index BERT-large": Step("index", LARGE),
    "index MiniLM-L6": Step("index", MINI),
    "index 0.6B": Step("index", "0.6B", longest=1024),
    "splade": Step("splade", BUDGET["SPLADE"]),
    "rerank BERT-large": Step("rerank", LARGE),
    "rerank MiniLM-L6": Step("rerank", MINI),
    "classify DeBERTa-large": Step("classify", BUDGET["DEBERTA"]),
}
MORE_STEPS = {  # by name only
    "classify MiniLM-L6": Step("classify", MINI),
    "rerank 0.6B": Step("rerank", "0.6B", longest=1024),
    "index 4B": Step("index", "4B", longest=1024),
    "rerank 4B": Step("rerank", "4B", longest=1024),
    "train 0.6B": Step("train", "0.6B"),
    "train 0.6B, checkpointing": Step("train", "0.6B", "--checkpointing"),
    "train 0.6B, LoRA": Step("train", "0.6B", "--lora 16"),
    "train 0.6B, both": Step("train", "0.6B", "--lora 16 --checkpointing"),
}


# -------------------- Texts
def read_originals(data):
    """Return the abstracts and claims of a folder."""
    with open(data / "corpus.jsonl", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    abstracts = [f"{record.get('title', '')} {record['abstract']}" for record in records]
    with open(data / "claims.test.tsv", encoding="utf-8") as file:
        claims = [row["claim"] for row in csv.DictReader(file, delimiter="\t", quoting=3)]
    return abstracts, claims


def make_originals():
    """Return abstracts of ClimateCheck's lengths of the demo's words, and its claims."""
    rng = np.random.default_rng(13)
    abstracts, claims = read_originals(ROOT / "data/demo")
    words = " ".join(abstracts).split()
    lengths = runpy.run_path(str(HERE / "make_corpus.py"))["lengths_of"](rng, ORIGINALS)
    return [" ".join(rng.choice(words, length)) for length in lengths], claims


def texts_like(originals, count):
    """Return so many different texts: the originals, then the same words in another order."""
    rng = np.random.default_rng(13)
    texts = []
    for number, text in enumerate(itertools.islice(itertools.cycle(originals), count)):
        words = text.split()
        if number >= len(originals):
            words = rng.permutation(words)
        texts.append(" ".join(words))
    return texts


def write_data(folder, originals, count, shared):
    """Write a corpus, claims, a run and training examples of so many pairs; return both texts.

    shared: how many claims each abstract is a candidate of.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    abstracts = texts_like(originals[0], max(DEPTH, count // shared))
    claims = texts_like(originals[1], -(-count // DEPTH))
    records = [{"abstract_id": str(row), "abstract": text} for row, text in enumerate(abstracts)]
    lines = ["claim_id\tclaim"]
    lines += [f"c{row}\t{text}" for row, text in enumerate(claims)]
    run = ["claim_id\tabstract_id\trank\tscore"]
    examples = []
    for pair in range(count):
        claim_id = f"c{pair // DEPTH}"
        abstract_id = str(pair % len(abstracts))
        run.append(f"{claim_id}\t{abstract_id}\t{pair % DEPTH + 1}\t{-(pair % DEPTH)}")
        ids = {"claim_id": claim_id, "abstract_id": abstract_id}
        examples.append(json.dumps(ids | {"target": pair % 2}))
    files = {"claims.test.tsv": lines, "run.tsv": run, "examples.jsonl": examples}
    files["corpus.jsonl"] = map(json.dumps, records)
    for name, rows in files.items():
        (folder / name).write_text("\n".join(rows) + "\n", encoding="utf-8")
    return abstracts, claims


def lengths_of(step, abstracts, claims, count):
    """Return the tokens of each text or pair (count,), special tokens included."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "data/models/minilm").backend_tokenizer
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def count_tokens(texts):
        coded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return np.array([len(ids) for ids in coded])

    lengths = count_tokens(abstracts)
    if step.job in ("index", "splade"):
        return np.minimum(lengths + 2, step.longest)
    pairs = np.arange(count)
    of_claims = count_tokens(claims)[pairs // DEPTH]
    return np.minimum(lengths[pairs % len(lengths)] + of_claims + 3, step.longest)


# -------------------- Models
def build(step, is_small):
    """Return a model of the sizes in budget.py; small: those of BERT-tiny."""
    import transformers

    if step.model in BUDGET["QWEN"]:
        layers, width, feed, heads, tied = BUDGET["QWEN"][step.model]
    else:
        layers, width, feed, _ = BUDGET["MODELS"][step.model]
        heads = max(width // 64, 12)  # MiniLM: 12 of 32
    if is_small:
        layers, width, feed, heads = BERT_TINY
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": feed}
    sizes["num_attention_heads"] = heads
    if step.model in BUDGET["QWEN"]:
        config = transformers.Qwen3Config(
            **sizes,
            vocab_size=BUDGET["WORDS"],
            num_key_value_heads=min(heads, BUDGET["KEYS"]),
            head_dim=BUDGET["HEAD"],
            tie_word_embeddings=tied,
        )
        if step.job == "index":
            return transformers.Qwen3Model(config)
        return transformers.Qwen3ForCausalLM(config)
    if step.job == "classify":
        sizes["id2label"] = {0: "entailment", 1: "neutral", 2: "contradiction"}
    if step.model == BUDGET["DEBERTA"]:
        config = transformers.DebertaV2Config(
            **sizes,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            position_buckets=256,
            share_att_key=True,
            norm_rel_ebd="layer_norm",
            type_vocab_size=0,
            position_biased_input=False,
        )
        return transformers.DebertaV2ForSequenceClassification(config)
    if step.job == "rerank":
        sizes["num_labels"] = 1
    config = transformers.BertConfig(**sizes)
    if step.job in ("rerank", "classify"):
        return transformers.BertForSequenceClassification(config)
    if step.job == "splade":
        return transformers.BertForMaskedLM(config)
    return transformers.BertModel(config)


def make_sparse(model):
    """Let a SPLADE model of random weights give a text about a hundred terms."""
    import torch

    with torch.no_grad():
        ids = torch.randint(1000, 30_000, (8, 400))
        highest = model.eval()(ids).logits.amax(1).sort(descending=True).values
        model.cls.predictions.bias -= highest[:, 100].mean()


def make_model(folder, step, is_small):
    """Save the model of a step with random weights, unless it is there; return its folder."""
    import torch
    from transformers import AutoTokenizer

    size = "small-" if is_small else ""
    job = "rerank" if step.job == "train" else step.job
    path = folder / f"{size}{job}-{step.model.split(' ')[0]}"
    if path.exists():
        return path
    new = folder / "new"
    shutil.rmtree(new, ignore_errors=True)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "data/models/minilm", model_max_length=1024)
    is_causal = job == "rerank" and step.model in BUDGET["QWEN"]
    if is_causal:
        tokenizer.chat_template = TEMPLATE
    torch.manual_seed(13)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = build(step, is_small)
        if job == "splade":
            make_sparse(model)
    model.bfloat16().save_pretrained(new)
    tokenizer.save_pretrained(new)
    if is_causal:
        save_as_reranker(new)
    new.rename(path)
    return path


def save_as_reranker(folder):
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


def operations(step, lengths, is_small):
    """Return the operations of a step over texts of these tokens (formula: above)."""
    import torch

    with torch.device("meta"):
        model = build(step, is_small)
    if step.job != "splade":  # only SPLADE needs words for every token
        model = model.base_model
    weights = 0
    for part in model.modules():
        if isinstance(part, torch.nn.Linear):
            weights += part.weight.numel()
    config = model.config
    heads = config.num_attention_heads
    width = heads * getattr(config, "head_dim", config.hidden_size // heads)
    of_token = 2 * weights + 4 * config.num_hidden_layers * width * lengths
    passes = 3 if step.job == "train" else 1
    return float(passes * (lengths * of_token).sum())


# -------------------- Calls
def stand_in(model, seconds):
    """Return a forward pass that sleeps for so many seconds a text, and returns zeros."""
    import torch

    def forward(features, **_):
        texts = len(features["input_ids"])
        time.sleep(seconds * texts)
        scores = torch.zeros(texts, getattr(model, "num_labels", 1))
        return features | {"scores": scores, "sentence_embedding": torch.zeros(texts, 384)}

    return forward


@contextlib.contextmanager
def watched(loaded, sleep):
    """Append the wall and the CPU clock to a list when the library has loaded a model."""
    import sentence_transformers

    def watch(init):
        @functools.wraps(init)
        def wrapped(model, *words, **options):
            init(model, *words, **options)
            if sleep is not None:
                model.forward = stand_in(model, sleep / 1000)
            loaded.append((time.perf_counter(), time.process_time()))

        return wrapped

    with contextlib.ExitStack() as stack:
        for name in ("SentenceTransformer", "SparseEncoder", "CrossEncoder"):
            kind = getattr(sentence_transformers, name)
            stack.enter_context(mock.patch.object(kind, "__init__", watch(kind.__init__)))
        yield


@contextlib.contextmanager
def importing_from(script):
    """Let a script import modules beside it, and forget those of its kit afterwards.

    A training writes no checkpoint within an epoch, so that its steps alone are measured.
    """
    folder = Path(script).parent
    before = set(sys.modules)
    with mock.patch.object(sys, "path", [str(folder), *sys.path]):
        if folder.name == "train":
            from transformers import TrainerCallback

            importlib.import_module("training").saves_within_epochs = TrainerCallback
        yield
    for name in set(sys.modules) - before:
        if name in ("training", "tools.kit") or name[:1] == "0":
            del sys.modules[name]


def run_script(words, sleep):
    """Run a script in this process, its results on stderr; return what it took."""
    import torch

    has_gpu = torch.cuda.is_available()
    gc.collect()
    if has_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    sys.argv = list(words)
    loaded = []
    begun = time.perf_counter()
    try:
        quiet = contextlib.redirect_stdout(sys.stderr)
        with watched(loaded, sleep), quiet, importing_from(words[0]):
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"{' '.join(words)}: status {end.code}") from end
    wall, cpu = loaded[-1]
    seconds = time.perf_counter() - wall
    peak = torch.cuda.max_memory_allocated() / 2**30 if has_gpu else 0
    return Measured(wall - begun, seconds, time.process_time() - cpu, peak)


def words_of(step, side, model, folder):
    """Return the words of a script's call, from an empty work/."""
    work = folder / "work"
    data = folder / "data"
    shutil.rmtree(work, ignore_errors=True)
    flags = ["--data", data, "--work", work, "--max-length", step.longest, *step.flags.split()]
    if side.batch_size:
        flags += ["--batch-size", side.batch_size]
    if step.job in ("index", "splade"):
        kind = "dense" if step.job == "index" else "splade"
        words = ["01_index.py", "--indexes", kind, f"--{kind}-model", model]
    elif step.job == "train":
        words = ["recipes/train/reranker.py", data / "examples.jsonl", "--model", model]
        words += ["--split", "test", "--epochs", 1]
    elif step.job == "rerank":
        words = ["03_rerank.py", "--run", data / "run.tsv", "--model", model]
    else:
        words = ["05_classify.py", "--run", data / "run.tsv", "--top-k", DEPTH, "--model", model]
    script, *words = map(str, [*words, *flags])
    return [str(side.folder / script), *words]


def measure(name, step, sides, originals, seconds, args):
    """Yield a row for each side; seconds: what the step may take, without --texts."""
    begun = time.monotonic()
    model = make_model(args.folder, step, args.small)
    few, most = SMALL_COUNTS if args.small else COUNTS

    def call(side):
        print(f"{name}: {side.name}", file=sys.stderr, flush=True)
        return run_script(words_of(step, side, model, args.folder), args.sleep)

    few = min(few, args.texts or few)
    write_data(args.folder / "data", originals, few, args.shared)
    trial = [call(side) for side in sides]  # imports, starts the GPU
    if not args.texts:
        trial = [call(side) for side in sides]  # tells the rate
    left = seconds - (time.monotonic() - begun)
    left -= args.rounds * sum(made.loading for made in trial)
    rate = few / args.rounds / sum(made.seconds for made in trial)
    count = args.texts or int(np.clip(0.7 * left * rate, few, most))
    abstracts, claims = write_data(args.folder / "data", originals, count, args.shared)
    calls = {side: [] for side in sides}
    for _ in range(args.rounds):
        for side in sides:
            calls[side].append(call(side))
    lengths = lengths_of(step, abstracts[:count], claims, count)
    work = operations(step, lengths, args.small)
    baseline = None
    for side, made in calls.items():
        loading, wall, cpu, gpu_gib = map(statistics.median, zip(*made))
        baseline = baseline or wall
        row = {"step": name, "scripts": side.name, "batch": side.batch_size or "default"}
        row |= {"texts": count, "loading": round(loading, 1), "seconds": round(wall, 2)}
        row |= {"ratio": round(wall / baseline, 2), "per_second": round(count / wall)}
        row |= {"tokens_per_second": round(lengths.sum() / wall)}
        row |= {"cpu_ms": round(1000 * cpu / count, 2), "tera_operations": round(work / 1e12, 1)}
        row |= {"gpu_gib": round(gpu_gib, 2)}
        if args.peak and args.sleep is None:
            row["share_of_peak"] = round(work / wall / args.peak, 3)
        yield row


def peak_of(device):
    """Return the operations a second of a GPU by its name, None of another."""
    for name, peak in PEAKS.items():
        if all(re.search(rf"\b{word}\b", device) for word in name.split()):
            return peak
    return None


def print_table(rows):
    """Print rows for people."""
    print("|", " | ".join(COLUMNS), "|")
    print("|---" * len(COLUMNS) + "|")
    for row in rows:
        cells = []
        for name in COLUMNS.values():
            value = row.get(name, "")
            cells.append(f"{value:,}" if isinstance(value, (int, float)) else value)
        print("|", " | ".join(cells), "|")


def main():
    import torch

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = STEPS | MORE_STEPS
    parser.add_argument("--steps", nargs="+", choices=steps, default=list(STEPS), metavar="STEP")
    parser.add_argument("--before", type=Path, help="measure the scripts of this checkout, too")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[None], help="of the scripts")
    parser.add_argument("--texts", type=int, help="so many texts or pairs, however long it takes")
    parser.add_argument("--rounds", type=int, default=1, help="measure so often, print medians")
    parser.add_argument("--shared", type=int, default=1, help="claims that share an abstract")
    parser.add_argument("--sleep", type=float, metavar="MS", help="in place of the network, a text")
    parser.add_argument("--small", action="store_true", help="tiny models and few texts")
    parser.add_argument("--peak", type=float, help="operations a second of a GPU not in PEAKS")
    parser.add_argument("--data", type=Path, help="take abstracts and test claims of this folder")
    parser.add_argument("--folder", type=Path, default=ROOT / "work/gpu")
    args = parser.parse_args()
    begun = time.monotonic()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    args.peak = args.peak or peak_of(device)
    args.folder = args.folder.resolve()
    sides = []
    for batch_size in args.batch_size:
        if args.before:
            sides.append(Side("before", args.before.resolve(), batch_size))
        sides.append(Side("now", ROOT, batch_size))
    originals = read_originals(args.data) if args.data else make_originals()
    os.chdir(ROOT)
    rows = []
    for number, name in enumerate(args.steps):
        seconds = (SECONDS - (time.monotonic() - begun)) / (len(args.steps) - number)
        try:
            found = list(measure(name, steps[name], sides, originals, seconds, args))
        except Exception as error:  # the other steps go on
            found = [{"step": name, "error": str(error)[:300]}]
        for row in found:
            print(json.dumps(row), flush=True)
        rows += found
    print_table(rows)
    print(json.dumps({"device": device, "peak": args.peak, "sleep_ms": args.sleep, "rows": rows}))
    sys.exit(any("error" in row for row in rows))


if __name__ == "__main__":
    main()
