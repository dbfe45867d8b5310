"""
Measure the scoring of 03_rerank.py beside CrossEncoder.predict.

Reads   nothing; makes abstracts of ClimateCheck's lengths and a cross-encoder of MiniLM-L6's size
        with random weights (on a GPU: of XLM-R-large's size, 560M parameters, in fp32 and bf16)
Prints  pairs per second of the stage (truncation, groups, checks), of one predict call over all
        pairs and of a call per claim, both ratios, the largest difference of scores, equal scores
        within a claim, and on a GPU its peak memory; one line of JSON, last on stdout

What the stage costs beside the network is measured by bench_gpu.py --sleep 0.

Examples
    python tests/benchmarks/bench_rerank.py
    python tests/benchmarks/bench_rerank.py --claims 10 --depth 20
"""

import argparse
import functools
import json
import runpy
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MINI = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "vocab_size": 40_000,
}


def script(path):
    """Return the names of a script."""
    sys.argv = [Path(path).name]
    return runpy.run_path(str(path))


def make_model(folder, sizes):
    """Save a cross-encoder with one logit, random weights and MiniLM's tokenizer."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    torch.manual_seed(13)
    BertForSequenceClassification(BertConfig(num_labels=1, **sizes)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "data/models/minilm").save_pretrained(folder)


def make_texts(claims, depth):
    """Return {claim_id: claim}, {abstract_id: abstract} and {claim_id: [abstract_id]}."""
    rng = np.random.default_rng(13)
    words = np.array((ROOT / "README.md").read_text(encoding="utf-8").split(), dtype=object)
    lengths = script(HERE / "make_corpus.py")["lengths_of"](rng, claims * depth)
    abstracts = {str(row): " ".join(rng.choice(words, size)) for row, size in enumerate(lengths)}
    abstract_ids = np.reshape(list(abstracts), (claims, depth)).tolist()
    queries = {f"c{row}": " ".join(rng.choice(words, 15)) for row in range(claims)}
    return queries, abstracts, dict(zip(queries, abstract_ids))


def pairs_of(claims, abstracts, candidates):
    """Return (claim, abstract) of each candidate, claim by claim."""
    pairs = []
    for claim_id, abstract_ids in candidates.items():
        pairs += [(claims[claim_id], abstracts[abstract_id]) for abstract_id in abstract_ids]
    return pairs


def stage(names, folder, dtype, batch_size, claims, abstracts, candidates):
    """Return the scores of the stage, seconds without loading, and GiB on the GPU."""
    import pandas as pd
    import torch

    args = argparse.Namespace(
        device=None,
        batch_size=batch_size,
        max_length=512,
        prompt=None,
        model=folder,
        fields="title,abstract",
        dtype=dtype,
    )
    model = names["open_reranker"](args)
    model.predict([("a claim", "an abstract")] * 64)  # warms up
    keys = []
    for claim_id, abstract_ids in candidates.items():
        keys += [(claim_id, abstract_id) for abstract_id in abstract_ids]
    pairs = pd.DataFrame(keys, columns=names["PAIR"])
    begun = time.monotonic()
    path = Path(folder) / f"{dtype}.scores"  # finished groups: none of another precision
    scorer = functools.partial(names["outputs_of"], model)
    scored = names["scored"](scorer, (claims, abstracts), pairs, path)
    seconds = time.monotonic() - begun
    memory = 0
    if torch.cuda.is_available():
        memory = torch.cuda.max_memory_allocated() / 2**30
    return scored["score"].to_numpy(), seconds, memory


def library(folder, dtype, batch_size, pairs, depth):
    """Return the scores of predict and seconds: one call over all pairs, one call per claim."""
    import torch
    from sentence_transformers import CrossEncoder

    encoder = CrossEncoder(folder, max_length=512, model_kwargs={"dtype": dtype})
    how = {"activation_fn": torch.nn.Identity(), "batch_size": batch_size}
    encoder.predict(pairs[:64], **how)  # warms up
    seconds = []
    for step in (len(pairs), depth):
        begun = time.monotonic()
        scores = []
        for start in range(0, len(pairs), step):
            scores.append(encoder.predict(pairs[start : start + step], **how))
        seconds.append(time.monotonic() - begun)
    return np.concatenate(scores), *seconds


def ties_in(scores, claims):
    """Return how many scores repeat another one of their claim."""
    return sum(len(part) - len(set(part.tolist())) for part in np.split(scores, claims))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--claims", type=int, default=30)
    parser.add_argument("--depth", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    import torch

    sizes = MINI
    dtypes = {"fp32": torch.float32}
    if torch.cuda.is_available():
        sizes = LARGE
        dtypes["bf16"] = torch.bfloat16
    names = script(ROOT / "03_rerank.py")
    texts = make_texts(args.claims, args.depth)
    pairs = pairs_of(*texts)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder, sizes)
        for dtype, torch_dtype in dtypes.items():
            size = args.batch_size
            found, ours, memory = stage(names, folder, dtype, size, *texts)
            theirs, one_call, per_claim = library(folder, torch_dtype, size, pairs, args.depth)
            results[dtype] = {
                "pairs": len(pairs),
                "stage_per_second": len(pairs) / ours,
                "one_call_per_second": len(pairs) / one_call,
                "ratio_to_one_call": one_call / ours,
                "per_claim_per_second": len(pairs) / per_claim,
                "ratio_to_per_claim": per_claim / ours,
                "largest_difference": float(np.abs(found - theirs).max()),
                "gpu_gib": memory,
                "ties": ties_in(found, args.claims),
                "ties_of_predict": ties_in(theirs, args.claims),
            }
            line = ", ".join(f"{name} {value:.4g}" for name, value in results[dtype].items())
            print(f"{dtype}: {line}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
