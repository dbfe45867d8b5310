"""
Make a corpus and claims with the size and the length statistics of ClimateCheck, from a seed.

The words are random: this measures speed and memory, not quality.

Writes  OUT/corpus.jsonl     394,269 abstracts of 1 to 6,818 words, mean 241, sd 232 (as published)
        OUT/claims.test.tsv  176 claims of 8 to 30 words
        --train N: OUT/claims.train.tsv and qrels.train.tsv, N claims with five random judgements
Prints  the statistics, as one line of JSON

Examples
    python tests/benchmarks/make_corpus.py work/benchmark
    python tests/benchmarks/make_corpus.py work/benchmark-small --abstracts 40000 --train 10
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np

# ClimateCheck: its corpus, the claims of its test split, words per abstract (data set card)
ABSTRACTS = 394_269
CLAIMS = 176
MEAN = 240.93
SD = 232.46
LONGEST = 6818
# Zipf-Mandelbrot: the r-th word has the weight 1 / (r + SHIFT) ** EXPONENT, r from 0
WORDS = 400_000
EXPONENT = 1.07
SHIFT = 2.7
GRAMMAR = (
    "the of and in to a is for with that as by on are this be an at from it was which not or but"
)
ONSETS = "b c d f g h k l m n p r s t v w z br cl gr pl st tr".split()
SYLLABLES = [onset + vowel for onset in ONSETS for vowel in "a e i o u ai ea".split()]
ENDINGS = ["", "", "", "n", "r", "s", "ing", "ed", "ation", "al"]  # for the stemmer


def make_words(rng, count):
    """Return count different words, the most frequent first."""
    words = dict.fromkeys(GRAMMAR.split())
    while len(words) < count:
        parts = rng.integers(0, len(SYLLABLES), (count, 3))
        lengths = rng.integers(1, 4, count)
        ends = rng.integers(0, len(ENDINGS), count)
        for row, length, end in zip(parts.tolist(), lengths.tolist(), ends.tolist()):
            stem = "".join(SYLLABLES[part] for part in row[:length])
            words[stem + ENDINGS[end]] = None
    return np.array(list(words)[:count], dtype=object)


def draw(rng, cumulative, words, count):
    """Return count random words, by frequency."""
    return words[np.searchsorted(cumulative, rng.random(count))]


def lengths_of(rng, count):
    """Return log-normal lengths with the published mean, standard deviation and extremes."""
    variance = math.log(1 + (SD / MEAN) ** 2)
    lengths = rng.lognormal(math.log(MEAN) - variance / 2, math.sqrt(variance), count)
    lengths = np.clip(lengths, 1, LONGEST).astype(int)
    lengths[:2] = (1, LONGEST)
    return rng.permutation(lengths)


def write_table(path, header, rows):
    """Write a TSV file."""
    lines = ["\t".join(row) for row in [header, *rows]]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to write to")
    parser.add_argument("--abstracts", type=int, default=ABSTRACTS)
    parser.add_argument("--train", type=int, default=0, help="claims of a train split")
    parser.add_argument("--seed", type=int, default=13)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    words = make_words(rng, WORDS)
    weights = 1 / (np.arange(WORDS) + SHIFT) ** EXPONENT
    cumulative = np.cumsum(weights) / weights.sum()
    lengths = lengths_of(rng, args.abstracts)
    args.out.mkdir(parents=True, exist_ok=True)
    with open(args.out / "corpus.jsonl", "w", encoding="utf-8") as file:
        for start in range(0, len(lengths), 8192):
            block = lengths[start : start + 8192]
            drawn = draw(rng, cumulative, words, block.sum())
            texts = np.split(drawn, np.cumsum(block)[:-1])
            for row, text in enumerate(texts, start):
                record = {"abstract_id": str(row), "abstract": " ".join(text) + "."}
                file.write(json.dumps(record) + "\n")
    sizes = rng.integers(8, 31, CLAIMS + args.train)
    claims = []
    for row, size in enumerate(sizes):
        claims.append((f"c{row}", " ".join(draw(rng, cumulative, words, size))))
    write_table(args.out / "claims.test.tsv", ("claim_id", "claim"), claims[:CLAIMS])
    judged = []
    for claim_id, _ in claims[CLAIMS:]:
        rows = rng.choice(len(lengths), 5, replace=False)
        for row, label in zip(rows, ("SUPPORTS", "SUPPORTS", "REFUTES", "NEI", "NEI")):
            judged.append((claim_id, str(row), label))
    if args.train:
        write_table(args.out / "claims.train.tsv", ("claim_id", "claim"), claims[CLAIMS:])
        write_table(args.out / "qrels.train.tsv", ("claim_id", "abstract_id", "label"), judged)
    statistics = {
        "abstracts": len(lengths),
        "words": int(lengths.sum()),
        "mean": round(lengths.mean(), 2),
        "sd": round(lengths.std(), 2),
        "shortest": int(lengths.min()),
        "longest": int(lengths.max()),
    }
    print(json.dumps(statistics))


if __name__ == "__main__":
    main()
