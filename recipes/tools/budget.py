"""
Estimate what the recipes cost on one A100: operations of every model pass, hours, GPU memory.

Nothing is measured. Hours are operations / (share of the peak x peak); the default share is about
what an H100 reached with a BERT-large (tests/benchmarks/README.md). Stages without a network (BM25,
fusion, search) take seconds and are left out. Language models at an endpoint are billed by the
token: 04 and 05 llm print how many with --backend none. Memory is that of best.sh by size: weights,
the activations of a batch of the longest texts, and what OVERHEAD assumes; then that of training a
reranker, all weights or LoRA (--lora 16), with and without --checkpointing.

Prints  tables by recipe and step, of larger corpora, by step and size, of training by size; then
        one line of JSON

Example
    python recipes/tools/budget.py --share 0.3
"""

import argparse
import json

PEAK = 312e12  # A100, bf16, dense
# ClimateCheck 2025
CORPUS = 394_269
CLAIMS = 176
TRAIN_PAIRS = 1_144
POSITIVES = 687
TRAIN_CLAIMS = 259
GROWN = 3_023 / TRAIN_PAIRS  # edition 2026; its claims and positives are assumed to grow alike
ABSTRACT = 325  # tokens: 241 words of about 1.35 word pieces
CLAIM = 30  # tokens
PAIR = ABSTRACT + CLAIM
# CheckThat! 2025 4b
POSTS = 12_853
TEST_POSTS = 1_446
PAPERS = 7_718
# CheckThat! 2026
PAPERS_2026 = 10_000
ENGLISH_2026 = 14_977  # posts of its train split
TRAIN_2026 = 19_244  # in three languages
TEST_2026 = 8_172
SCIFACT_TRAIN = 809
SCIFACT_DEV = 300
EVALUATION = 279 * 2000 + 1504 * 347  # SciFact-Open: the best 2,000; Check-COVID: all abstracts
PROMPT = 130  # tokens of instructions and chat template around a pair
# best.sh
BATCH = 32  # texts
LONGEST = 1024  # tokens of a text
CONTEXT = 16_384  # tokens of a sequence in vLLM
OVERHEAD = 1.0  # GiB, assumed: CUDA's context, kernels' workspace, fragmentation
# Qwen3
WORDS = 151_936  # its vocabulary
HEAD = 128  # width of a head
KEYS = 8  # heads of keys and values
QWEN = {  # layers, width, gated feed-forward part, heads, whether in and out share embeddings
    "0.6B": (28, 1024, 3072, 16, True),
    "4B": (36, 2560, 9728, 32, True),
    "8B": (36, 4096, 12_288, 32, False),
}
# Training: layers, width, gated feed-forward part, heads, width of a head, words
TRAINED = {
    "0.6B": (28, 1024, 3072, 16, 128, WORDS),
    "1B": (16, 2048, 8192, 32, 64, 128_256),  # Llama 3.2
    "4B": (36, 2560, 9728, 32, 128, WORDS),
}
RANK = 16  # of LoRA's adapters
TRAINED_BATCH = 8  # pairs
TRAINED_LENGTH = 512  # tokens of a pair
CARDS = (16, 24, 40, 80)  # GB; 0.93 GiB each


def qwen(layers, width, feed, heads, _):
    """Return a row of MODELS.

    A gated feed-forward part has three matrices, not two. operations() counts 4 width² for the
    attention of a layer; the last number corrects this, as keys and values have fewer heads.
    """
    attention = layers * (2 * width * HEAD * (heads + KEYS) - 4 * width**2)
    return layers, width, 3 * feed // 2, attention


# layers, width, width of the feed-forward part, further weights that every token passes
LARGE = "BERT-large (bge-m3, bge-reranker, e5-large)"
SPLADE = "SPLADE-v3 (BERT-base with its vocabulary)"
L12 = "MiniLM-L12"
L6 = "MiniLM-L6"
DEBERTA = "DeBERTa-large"
T5 = "monoT5-3B"
BASE = "BERT-base (SciBERT)"
MODERN = "ModernBERT-base (gte-reranker)"
HARRIER = "Harrier 27B (Gemma 3)"
MODELS = {
    LARGE: (24, 1024, 4096, 0),
    SPLADE: (12, 768, 3072, 768 * (768 + 30_522)),
    L12: (12, 384, 1536, 0),
    L6: (6, 384, 1536, 0),
    BASE: (12, 768, 3072, 0),
    MODERN: (22, 768, 3 * 1152 // 2, 0),  # a gated feed-forward part, as Qwen3's
    # 32 heads of 128, 16 of keys and values
    HARRIER: (62, 5376, 3 * 21_504 // 2, 62 * (2 * 5376 * HEAD * 48 - 4 * 5376**2)),
    "GritLM-7B": qwen(32, 4096, 14_336, 32, True),
    DEBERTA: (24, 1024, 4096, 0),
    T5: (48, 1024, 16_384, 24 * 4 * 1024 * 3072),  # 32 heads of 128: four times the usual attention
} | {size: qwen(*shape) for size, shape in QWEN.items()}
SYSTEMS = {  # recipe: step, model, texts, tokens per text, and True if it is training
    "ant_bridge": [
        ("mining, 2 models x 1,000 a claim", LARGE, 2 * TRAIN_CLAIMS * 1000, PAIR),
        ("training, 5 models x 15 negatives", LARGE, 5 * POSITIVES * 15 * 2, PAIR, True),
        ("reranking, 5 models x 5,000 a claim", LARGE, 5 * CLAIMS * 5000, PAIR),
    ],
    "kiepura_lam": [
        ("training BGE-M3, 3 epochs", LARGE, 3 * POSITIVES * 3, ABSTRACT, True),
        ("dense index", LARGE, CORPUS, ABSTRACT),
        ("SPLADE index", SPLADE, CORPUS, ABSTRACT),
        (
            "training the cross-encoder, 3 + 2 epochs",
            L6,
            5 * (POSITIVES + 8 * TRAIN_CLAIMS),
            PAIR,
            True,
        ),
        ("reranking 600 a claim", L6, CLAIMS * 600, PAIR),
    ],
    "alexunlp_fmt": [
        ("training the encoder, 10 epochs", LARGE, 10 * POSITIVES * 2, ABSTRACT, True),
        ("dense index", LARGE, CORPUS, ABSTRACT),
        ("index of the graph", L6, CORPUS, ABSTRACT),
        ("reranking, 20 rounds, at most 6,100 a claim", L12, CLAIMS * 6100, PAIR),
    ],
    "efc": [
        ("mining, the corpus once", LARGE, CORPUS, ABSTRACT),
        ("training E5, 3 epochs", LARGE, 3 * POSITIVES * 5, ABSTRACT, True),
        ("dense index", LARGE, CORPUS, ABSTRACT),
        ("reranking 150 a claim", L12, CLAIMS * 150, PAIR),
    ],
    "pranav": [("SPLADE index", SPLADE, CORPUS, ABSTRACT)],
    "baseline_2025": [
        ("dense index", L12, CORPUS, ABSTRACT),
        ("reranking 20 a claim", L6, CLAIMS * 20, PAIR),
    ],
    "airwaves": [
        ("training E5, 2 epochs", LARGE, 2 * POSTS * 2, ABSTRACT, True),
        ("dense index", LARGE, PAPERS, ABSTRACT),
        ("training SciBERT, 3 epochs", BASE, 3 * POSTS * 10, PAIR, True),
        ("reranking 10 a post", BASE, TEST_POSTS * 10, PAIR),
    ],
    "verirel": [
        ("verifier, 5 epochs", DEBERTA, 5 * SCIFACT_TRAIN * 6, PAIR, True),
        ("classifier, 5 epochs", DEBERTA, 5 * SCIFACT_TRAIN, PAIR, True),
        ("monoT5-3B on 100 a training claim", T5, SCIFACT_TRAIN * 100, PAIR),
        ("verifier on 100 a training claim", DEBERTA, SCIFACT_TRAIN * 100, PAIR),
        ("student, 10 epochs until it stops", BASE, 10 * SCIFACT_TRAIN * 20, PAIR, True),
        ("student on dev, 10 times", BASE, 10 * SCIFACT_DEV * 100, PAIR),
        ("student on the candidates", BASE, EVALUATION, PAIR),
    ],
    "checkthat_2026": [
        ("two dense indexes", LARGE, 2 * PAPERS_2026, ABSTRACT),
        ("training, 3 epochs of 1 + 5", MODERN, 3 * 6 * (ENGLISH_2026 + POSTS), PAIR, True),
        ("reranking 2,000 a post", MODERN, TEST_2026 * 2000, PAIR),
    ],
    "sourcesniffers": [
        ("dense index of bge-small", L12, PAPERS, ABSTRACT),
        ("training, 1 epoch of 1 + 5", MODERN, 6 * POSTS, PAIR, True),
        ("reranking 1,000 a post", MODERN, TEST_POSTS * 1000, PAIR),
    ],
    "kvist_2026": [
        ("dense index", HARRIER, PAPERS_2026, ABSTRACT),
        ("posts of train and test", HARRIER, TRAIN_2026 + TEST_2026, CLAIM),
    ],
    "claim2source_2026": [
        ("training, 4 epochs of 1 + 9", "GritLM-7B", 4 * 10 * TRAIN_2026, 256, True),
        ("dense index, posts of test", "GritLM-7B", PAPERS_2026 + TEST_2026, ABSTRACT),
        ("reranking 100 a post", "8B", TEST_2026 * 100, PAIR + PROMPT),
    ],
    "climatesense_2026": [
        ("mining, 5,000 a claim", LARGE, GROWN * TRAIN_CLAIMS * 5000, PAIR),
        (
            "training, 5 models x 15 negatives",
            LARGE,
            5 * GROWN * POSITIVES * 15 * 2,
            PAIR,
            True,
        ),
        ("reranking, 5 models x 5,000 a claim", LARGE, 5 * CLAIMS * 5000, PAIR),
    ],
}
for depth in (200, 1000):
    SYSTEMS[f"README.md, ClimateCheck, {depth}"] = [
        ("dense index", LARGE, CORPUS, ABSTRACT),
        (f"reranking {depth} a claim", LARGE, CLAIMS * depth, PAIR),
        ("NLI on 10 a claim", DEBERTA, CLAIMS * 10, PAIR),
    ]
for depth in (50, 200):
    SYSTEMS[f"README.md, CheckThat!, {depth}"] = [
        ("dense index", LARGE, PAPERS_2026, ABSTRACT),
        (f"reranking {depth} a post", LARGE, TEST_2026 * depth, PAIR),
    ]
for size in QWEN:
    SYSTEMS[f"best, {size}"] = [
        ("dense index", size, CORPUS, ABSTRACT),
        ("reranking 200 a claim", size, CLAIMS * 200, PAIR + PROMPT),
        ("pointwise, 50 a claim", size, CLAIMS * 50, PAIR + PROMPT),
        ("listwise, 20 in a prompt", size, CLAIMS, 20 * ABSTRACT + PROMPT),
        ("stance, two prompts for 10 a claim", size, 2 * CLAIMS * 10, PAIR + PROMPT),
        ("NLI on 10 a claim", DEBERTA, CLAIMS * 10, PAIR),
    ]
LARGER = {"PubMed": 36_000_000, "OpenAlex": 250_000_000}  # abstracts, as long as ClimateCheck's
BYTES = {"corpus": 1_716, "BM25": 1_313, "dense": 2 * 1024}  # an abstract; BGE-M3's in fp16


def operations(model, texts, tokens, training=False):
    """Return operations: for each token, 2 per weight and 4 x width x length per layer.

    Training takes three times as many.
    """
    layers, width, feed, further = MODELS[model]
    weights = layers * (4 * width**2 + 2 * width * feed) + further
    passes = 3 if training else 1
    return passes * texts * tokens * (2 * weights + 4 * layers * width * tokens)


def memory(layers, width, feed, heads, tied):
    """Return {step of best.sh: GiB} of a model in half precision."""
    words = WORDS * width
    body = words + layers * (2 * width * HEAD * (heads + KEYS) + 3 * width * feed)
    whole = body if tied else body + words
    activations = 2 * BATCH * LONGEST * (2 * width + 3 * feed)  # of one layer at a time, in bytes
    found = {
        "index": 2 * body + activations,
        "claims": 4 * body,  # 02_retrieve.py encodes them in fp32, one short text or a few
        "rerank": 2 * whole + activations + 4 * words,  # the last layer is computed in fp32
        "LLM": 2 * whole + 2 * 2 * layers * KEYS * HEAD * CONTEXT,  # keys and values of a sequence
    }
    return {step: count / 2**30 + OVERHEAD for step, count in found.items()}


def training_memory(shape, is_lora, is_checkpointed):
    """Return GiB of training with Adam, by autocast over fp32 weights.

    A weight takes 4 bytes, a trained one 12 more: gradient and two moments. A linear layer keeps a
    copy of its weights in 2 bytes until its backward pass, with checkpointing of one layer at a
    time. With checkpointing, a layer keeps its input alone of what a token needs for it.
    """
    layers, width, feed, heads, head, words = shape
    queries = heads * head
    keys = KEYS * head
    matrices = [(width, queries), (width, keys), (width, keys), (queries, width)]
    matrices += [(width, feed), (width, feed), (feed, width)]
    linear = layers * sum(rows * columns for rows, columns in matrices)
    adapters = layers * RANK * sum(rows + columns for rows, columns in matrices)
    weights = words * width + linear
    trained = adapters if is_lora else weights
    copies = 2 * linear
    in_fp32 = 4 * width  # the layer's input, the second norm's input, both normalised
    inputs = 5 * width  # of query, key, value, gate and up
    # Keys and values; queries before and after their norm, both repeated, attention's output.
    attention = 2 * keys + 5 * queries
    feed_forward = 5 * feed  # its four vectors, and the input of down
    kept = 4 * in_fp32 + 2 * (inputs + attention + feed_forward)
    if is_checkpointed:
        copies /= layers
        kept = 4 * width + kept / layers
    activations = TRAINED_BATCH * TRAINED_LENGTH * layers * kept
    return (4 * weights + 12 * trained + copies + activations) / 2**30 + OVERHEAD


def print_training():
    """Print the memory of training by size, and the smallest card that has it."""
    print("\n| training, 8 pairs of 512 tokens | weights | --checkpointing | GiB | card |")
    print("|---|---|---|---|---|")
    for size, shape in TRAINED.items():
        for is_lora in (False, True):
            for is_checkpointed in (False, True):
                gib = training_memory(shape, is_lora, is_checkpointed)
                weights = "LoRA" if is_lora else "all"
                with_it = "yes" if is_checkpointed else "no"
                cards = [f"{card} GB" for card in CARDS if 0.93 * card > gib]
                card = cards[0] if cards else "none"
                print(f"| {size} | {weights} | {with_it} | {gib:.1f} | {card} |")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--share", type=float, default=0.17, help="share of the peak reached")
    args = parser.parse_args()
    print("| recipe | step | model | 10^15 operations | A100 hours |\n|---|---|---|---|---|")
    totals = {}
    for name, steps in SYSTEMS.items():
        totals[name] = 0
        for step, model, *work in steps:
            count = operations(model, *work)
            hours = count / (args.share * PEAK) / 3600
            totals[name] += hours
            short = model.split(" (")[0]
            print(f"| `{name}` | {step} | {short} | {count / 1e15:,.1f} | {hours:.2f} |")
    print("\n| corpus | abstracts | hours: dense | SPLADE | GB:", " | ".join(BYTES), "|")
    for name, count in LARGER.items():
        values = []
        for model in (LARGE, SPLADE):
            work = operations(model, count, ABSTRACT)
            values.append(work / (args.share * PEAK) / 3600)
        for size in BYTES.values():
            values.append(count * size / 1e9)
        print(f"| {name} | {count:,} |", " | ".join(f"{value:,.0f}" for value in values), "|")
    hours = {name: round(total, 2) for name, total in totals.items()}
    print("\n| size of Qwen3, GiB | index | claims | rerank | LLM |\n|---|---|---|---|---|")
    gib = {size: memory(*shape) for size, shape in QWEN.items()}
    for size, steps in gib.items():
        print(f"| {size} |", " | ".join(f"{count:.1f}" for count in steps.values()), "|")
    gib = {size: round(max(steps.values()), 1) for size, steps in gib.items()}
    print_training()
    print(json.dumps({"share": args.share, "hours": hours, "gib": gib}))


if __name__ == "__main__":
    main()
