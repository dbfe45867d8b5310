"""
Measure what stage 1 does beside the network, and SPLADE's pooling, beside encode_document.

Both ways take turns, in the same process. The network is MiniLM's with a forward pass that costs
nothing, or that sleeps, as a GPU that computes; and the whole of the small SPLADE.

Reads   DATA/corpus.jsonl; data/models/minilm and splade-tiny
Prints  seconds of the way that was (encode_document) and of 01_index.py, medians, and their ratio

Examples
    python tests/benchmarks/bench_encode.py --data data/scifact
    python tests/benchmarks/bench_encode.py --data data/scifact --rounds 5 --parts splade
"""

import argparse
import itertools
import json
import os
import runpy
import statistics
import sys
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

ROOT = Path(__file__).resolve().parent.parent.parent
MODELS = ROOT / "data/models"


def script():
    """Return the names of 01_index.py."""
    sys.argv = ["01_index.py"]
    return runpy.run_path(str(ROOT / "01_index.py"))


def encoder_that(seconds):
    """Return MiniLM with a forward pass that sleeps for so many seconds a text."""
    import torch
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(str(MODELS / "minilm"), device="cpu")

    def forward(features, **_):
        texts = len(features["input_ids"])
        if seconds:
            time.sleep(seconds * texts)
        return features | {"sentence_embedding": torch.zeros(texts, 384)}

    encoder.forward = forward
    return encoder


def splade(names, is_new):
    """Return the small SPLADE, with its own pooling or that of 01_index.py."""
    from sentence_transformers import SparseEncoder

    encoder = SparseEncoder(str(MODELS / "splade-tiny"), device="cpu")
    if is_new:
        names["pool_maxima"](encoder, "log1p_relu")
    return encoder


def measure(old, new, rounds):
    """Return medians of wall and CPU seconds: [old, new] each; the two ways take turns."""
    seconds = {old: [], new: []}
    for _ in range(rounds):
        for way in (old, new):
            wall = time.perf_counter()
            cpu = time.process_time()
            way()
            seconds[way].append((time.perf_counter() - wall, time.process_time() - cpu))
    walls = []
    cpus = []
    for way in (old, new):
        wall, cpu = zip(*seconds[way])
        walls.append(statistics.median(wall))
        cpus.append(statistics.median(cpu))
    return walls, cpus


def ways(names, old, new, texts, batch_size):
    """Return two functions that encode texts in shards: by encode_document, and as 01_index.py."""
    size = names["SHARD"]
    shards = [texts[start : start + size] for start in range(0, len(texts), size)]

    def by_library():
        list(names["encode_by_library"](shards, old, batch_size, None))

    def from_ids():
        like = names["plain_features"](new)
        list(names["encode_ahead"](shards, new, like, batch_size))

    return by_library, from_ids


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=ROOT / "data/demo")
    parser.add_argument("--texts", type=int, default=20_000, help="for the network that sleeps")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", default=["free", "sleeps", "splade"])
    args = parser.parse_args()
    names = script()
    with open(args.data / "corpus.jsonl", encoding="utf-8") as file:
        texts = [names["text_of"](record) for record in map(json.loads, file)]
    parts = {
        "free": (encoder_that(0), encoder_that(0), texts[:1000], 32),
        "sleeps": (
            encoder_that(0.001),
            encoder_that(0.001),
            list(itertools.islice(itertools.cycle(texts), args.texts)),
            32,
        ),
        "splade": (splade(names, False), splade(names, True), texts[:128], 8),
    }
    print("| network | texts | wall: old | new | new / old | CPU: old | new | new / old |")
    print("|---|---|---|---|---|---|---|---|")
    for part in args.parts:
        old, new, some, batch_size = parts[part]
        by_library, from_ids = ways(names, old, new, some, batch_size)
        cells = [part, f"{len(some):,}"]
        for before, after in measure(by_library, from_ids, args.rounds):
            cells += [f"{before:.2f}", f"{after:.2f}", f"{after / before:.2f}"]
        print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
