"""
What the published systems cost on one A100, by arithmetic: the operations of every model pass at the data sets' sizes.

Prints  a table for people: operations and hours by recipe and step; then one line of JSON with the same data

Example
    python tests/benchmarks/budget.py --share 0.3

Nothing is measured here. Hours are operations / (share of the peak x peak). Stages without a network (BM25, fusion,
search) take seconds and are left out; language models behind an endpoint are a bill, which 04 and 05 tell with --dry-run.
"""
import argparse
import json

PEAK = 312e12                  # A100, bf16, dense
CORPUS, CLAIMS = 394_269, 176  # ClimateCheck 2025
TRAIN_PAIRS, POSITIVES, TRAIN_CLAIMS = 1_144, 687, 259
GROWN = 3_023 / TRAIN_PAIRS    # training pairs of the 2026 edition; claims and positives taken to grow like them
ABSTRACT, CLAIM = 325, 30      # tokens: 241 words, some 1.35 word pieces each
POSTS, TEST_POSTS, PAPERS = 12_853, 1_446, 7_718      # CheckThat! 2025 4b
SCIFACT_TRAIN, SCIFACT_DEV = 809, 300

# layers, width, width of the feed-forward part, weights behind the last layer that every token passes
MODELS = {
    "BERT-large (bge-m3, bge-reranker, e5-large)": (24, 1024, 4096, 0),
    "SPLADE-v3 (BERT-base with its vocabulary)": (12, 768, 3072, 768 * (768 + 30_522)),
    "MiniLM-L12": (12, 384, 1536, 0),
    "MiniLM-L6": (6, 384, 1536, 0),
    "BERT-base (DeBERTa-base, SciBERT)": (12, 768, 3072, 0),
    "DeBERTa-large": (24, 1024, 4096, 0),
    "monoT5-3B": (48, 1024, 16_384, 24 * 4 * 1024 * 3072),  # 32 heads of 128: four times the usual attention weights
}

def operations(model, texts, tokens, training=False):
    """2 a weight and token, and for attention 4 x width x length a token and layer; training takes three times that."""
    layers, width, feed, behind = MODELS[model]
    weights = layers * (4 * width**2 + 2 * width * feed) + behind
    return texts * tokens * (2 * weights + 4 * layers * width * tokens) * (3 if training else 1)

LARGE, SPLADE, L12, L6, BASE, DEBERTA, T5 = MODELS
PAIR = ABSTRACT + CLAIM
SYSTEMS = {  # recipe: (step, model, texts, tokens a text, training)
    "ant_bridge": [
        ("mining, 5 models x 1,000 a claim", LARGE, 5 * TRAIN_CLAIMS * 1000, PAIR, False),
        ("training, 5 models x 15 negatives", LARGE, 5 * POSITIVES * 15 * 2, PAIR, True),
        ("reranking, 5 models x 5,000 a claim", LARGE, 5 * CLAIMS * 5000, PAIR, False)],
    "kiepura_lam": [
        ("training BGE-M3, 3 epochs", LARGE, 3 * POSITIVES * 3, ABSTRACT, True),
        ("dense index", LARGE, CORPUS, ABSTRACT, False),
        ("SPLADE index", SPLADE, CORPUS, ABSTRACT, False),
        ("training the cross-encoder, 3 + 2 epochs", L6, 5 * (POSITIVES + 8 * TRAIN_CLAIMS), PAIR, True),
        ("reranking 600 a claim", L6, CLAIMS * 600, PAIR, False),
        ("DeBERTa, 10 epochs, encoder frozen", BASE, 10 * TRAIN_PAIRS, PAIR, False)],
    "alexunlp_fmt": [
        ("training the encoder, 10 epochs", LARGE, 10 * POSITIVES * 2, ABSTRACT, True),
        ("dense index", LARGE, CORPUS, ABSTRACT, False),
        ("index of the graph", L6, CORPUS, ABSTRACT, False),
        ("reranking, 20 rounds, at most 6,100 a claim", L12, CLAIMS * 6100, PAIR, False)],
    "efc": [
        ("mining, the corpus once", LARGE, CORPUS, ABSTRACT, False),
        ("training E5, 3 epochs", LARGE, 3 * POSITIVES * 5, ABSTRACT, True),
        ("dense index", LARGE, CORPUS, ABSTRACT, False),
        ("reranking 150 a claim", L12, CLAIMS * 150, PAIR, False),
        ("DeBERTa, 20 epochs", DEBERTA, 20 * TRAIN_PAIRS, PAIR, True)],
    "pranav": [
        ("SPLADE index", SPLADE, CORPUS, ABSTRACT, False)],
    "baseline_2025": [
        ("dense index", L12, CORPUS, ABSTRACT, False),
        ("reranking 20 a claim", L6, CLAIMS * 20, PAIR, False)],
    "airwaves": [
        ("training E5, 2 epochs", LARGE, 2 * POSTS * 3, ABSTRACT, True),
        ("dense index, in chunks", LARGE, PAPERS, 1.1 * ABSTRACT, False),
        ("training SciBERT, 3 epochs", BASE, 3 * POSTS * 9, PAIR, True),
        ("reranking 10 a post", BASE, TEST_POSTS * 10, PAIR, False)],
    "verirel": [
        ("verifier, 5 epochs", DEBERTA, 5 * SCIFACT_TRAIN * 21, PAIR, True),
        ("monoT5-3B on 100 a claim", T5, (SCIFACT_TRAIN + SCIFACT_DEV) * 100, PAIR, False),
        ("verifier on 100 a claim", DEBERTA, (SCIFACT_TRAIN + SCIFACT_DEV) * 100, PAIR, False),
        ("student, 10 epochs", BASE, 10 * SCIFACT_TRAIN * 20, PAIR, True)],
}
SYSTEMS["climatesense_2026"] = [(step, model, texts * (1 if step.startswith("reranking") else GROWN), *rest)
                                for step, model, texts, *rest in SYSTEMS["ant_bridge"]]

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.3, help="share of the GPU's peak that is reached")
    args = parser.parse_args()
    print("| recipe | step | model | 10^15 operations | A100 hours |\n|---|---|---|---|---|")
    totals = {}
    for name, steps in SYSTEMS.items():
        for step, model, *work in steps:
            hours = operations(model, *work) / (args.share * PEAK) / 3600
            totals[name] = totals.get(name, 0) + hours
            print(f"| `{name}` | {step} | {model.split(' (')[0]} | {operations(model, *work) / 1e15:,.1f} | {hours:.2f} |")
    print(json.dumps({"share": args.share, "hours": {name: round(hours, 2) for name, hours in totals.items()}}))

if __name__ == "__main__":
    main()
