"""
Estimate what the published systems cost on one A100: operations of every model pass, and hours.

Nothing is measured. Hours are operations / (share of the peak x peak). Stages without a network
(BM25, fusion, search) take seconds and are left out. Language models at an endpoint are a bill:
see 04_llm_rerank.py --dry-run and 05_classify.py llm --dry-run.

Prints  a table by recipe and step, one of larger corpora, then one line of JSON with the hours

Example
    python tests/benchmarks/budget.py --share 0.3
"""
import argparse
import json

PEAK = 312e12  # A100, bf16, dense
CORPUS, CLAIMS = 394_269, 176  # ClimateCheck 2025
TRAIN_PAIRS, POSITIVES, TRAIN_CLAIMS = 1_144, 687, 259
GROWN = 3_023 / TRAIN_PAIRS  # edition 2026; its claims and positives are assumed to grow alike
ABSTRACT, CLAIM = 325, 30  # tokens: 241 words of about 1.35 word pieces
PAIR = ABSTRACT + CLAIM
POSTS, TEST_POSTS, PAPERS = 12_853, 1_446, 7_718  # CheckThat! 2025 4b
SCIFACT_TRAIN, SCIFACT_TEST = 809, 300

# layers, width, width of the feed-forward part, further weights that every token passes
LARGE = "BERT-large (bge-m3, bge-reranker, e5-large)"
SPLADE = "SPLADE-v3 (BERT-base with its vocabulary)"
L12, L6, DEBERTA, T5 = "MiniLM-L12", "MiniLM-L6", "DeBERTa-large", "monoT5-3B"
BASE = "BERT-base (DeBERTa-base, SciBERT)"
MODELS = {
    LARGE: (24, 1024, 4096, 0),
    SPLADE: (12, 768, 3072, 768 * (768 + 30_522)),
    L12: (12, 384, 1536, 0),
    L6: (6, 384, 1536, 0),
    BASE: (12, 768, 3072, 0),
    DEBERTA: (24, 1024, 4096, 0),
    T5: (48, 1024, 16_384, 24 * 4 * 1024 * 3072),  # 32 heads of 128: four times the usual attention
}
SYSTEMS = {  # recipe: step, model, texts, tokens per text, training
    "ant_bridge": [
        ("mining, 2 models x 1,000 a claim", LARGE, 2 * TRAIN_CLAIMS * 1000, PAIR, False),
        ("training, 5 models x 15 negatives", LARGE, 5 * POSITIVES * 15 * 2, PAIR, True),
        ("reranking, 5 models x 5,000 a claim", LARGE, 5 * CLAIMS * 5000, PAIR, False)],
    "kiepura_lam": [
        ("training BGE-M3, 3 epochs", LARGE, 3 * POSITIVES * 3, ABSTRACT, True),
        ("dense index", LARGE, CORPUS, ABSTRACT, False),
        ("SPLADE index", SPLADE, CORPUS, ABSTRACT, False),
        ("training the cross-encoder, 3 + 2 epochs", L6, 5 * (POSITIVES + 8 * TRAIN_CLAIMS), PAIR,
         True),
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
        ("training E5, 2 epochs", LARGE, 2 * POSTS * 2, ABSTRACT, True),
        ("dense index", LARGE, PAPERS, ABSTRACT, False),
        ("training SciBERT, 3 epochs", BASE, 3 * POSTS * 9, PAIR, True),
        ("reranking 10 a post", BASE, TEST_POSTS * 10, PAIR, False)],
    "verirel": [
        ("verifier, 5 epochs", DEBERTA, 5 * SCIFACT_TRAIN * 6, PAIR, True),
        ("classifier, 5 epochs", DEBERTA, 5 * SCIFACT_TRAIN, PAIR, True),
        ("monoT5-3B on 100 a claim", T5, (SCIFACT_TRAIN + SCIFACT_TEST) * 100, PAIR, False),
        ("verifier on 100 a claim", DEBERTA, (SCIFACT_TRAIN + SCIFACT_TEST) * 100, PAIR, False),
        ("student, 10 epochs", BASE, 10 * SCIFACT_TRAIN * 20, PAIR, True)],
    "climatesense_2026": [
        ("mining, 1,000 a claim", LARGE, GROWN * TRAIN_CLAIMS * 1000, PAIR, False),
        ("training, 5 models x 15 negatives", LARGE, 5 * GROWN * POSITIVES * 15 * 2, PAIR, True),
        ("reranking, 5 models x 5,000 a claim", LARGE, 5 * CLAIMS * 5000, PAIR, False)],
}
LARGER = {"PubMed": 36_000_000, "OpenAlex": 250_000_000}  # abstracts, as long as ClimateCheck's
BYTES = {"corpus": 1_716, "BM25": 1_313, "dense": 2 * 1024}  # an abstract; BGE-M3's in fp16

def operations(model, texts, tokens, training):
    """Return operations: per token 2 a weight and 4 x width x length a layer; training: x 3."""
    layers, width, feed, further = MODELS[model]
    weights = layers * (4 * width**2 + 2 * width * feed) + further
    passes = 3 if training else 1
    return passes * texts * tokens * (2 * weights + 4 * layers * width * tokens)

def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.3, help="share of the peak reached")
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
        work = [operations(model, count, ABSTRACT, False) for model in (LARGE, SPLADE)]
        values = [one / (args.share * PEAK) / 3600 for one in work]
        values += [count * size / 1e9 for size in BYTES.values()]
        print(f"| {name} | {count:,} |", " | ".join(f"{value:,.0f}" for value in values), "|")
    hours = {name: round(total, 2) for name, total in totals.items()}
    print(json.dumps({"share": args.share, "hours": hours}))

if __name__ == "__main__":
    main()
