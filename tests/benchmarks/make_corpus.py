"""
Make a corpus and claims with the sizes of a shared task, from a seed.

The words are random: this measures speed and memory, not quality. Abstracts have ClimateCheck's
lengths: 1 to 6,818 words, mean 241, sd 232 (as published).

Writes  OUT/corpus.jsonl, and for each split of the task OUT/claims.SPLIT.tsv, claims of 8 to 30
        words, and OUT/qrels.SPLIT.tsv: five random judgements a claim; for CheckThat! one paper
Prints  the statistics, as one line of JSON

Examples
    python tests/benchmarks/make_corpus.py work/benchmark
    python tests/benchmarks/make_corpus.py work/benchmark-small --abstracts 40000
    python tests/benchmarks/make_corpus.py data/checkthat2026 --task checkthat2026
"""

import argparse
import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

TASKS = {  # abstracts; claims of each split, by language
    "climatecheck2025": (394_269, {"train": {"": 259}, "test": {"": 176}}),
    "climatecheck2026": (394_269, {"train": {"": 684}, "test": {"": 176}}),  # assumed to grow alike
    "checkthat4b": (7_718, {"train": {"": 12_853}, "dev": {"": 1_400}, "test": {"": 1_446}}),
    "checkthat2026": (
        10_000,
        {
            "train": {"en": 14_977, "fr": 2_807, "de": 1_460},
            "dev": {"en": 3_905, "fr": 702, "de": 386},
            "test": {"en": 6_076, "fr": 1_220, "de": 876},
        },
    ),
}
# ClimateCheck: words per abstract (data set card)
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


class Vocabulary(NamedTuple):
    """Words, and the sums of their shares, by which they are drawn."""

    words: np.ndarray
    cumulative: np.ndarray


def draw(rng, vocabulary, count):
    """Return count random words, by frequency."""
    return vocabulary.words[np.searchsorted(vocabulary.cumulative, rng.random(count))]


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


def write_corpus(path, rng, vocabulary, lengths):
    """Write abstracts of these lengths, of random words."""
    with open(path, "w", encoding="utf-8") as file:
        for start in range(0, len(lengths), 8192):
            block = lengths[start : start + 8192]
            drawn = draw(rng, vocabulary, block.sum())
            texts = np.split(drawn, np.cumsum(block)[:-1])
            for row, text in enumerate(texts, start):
                record = {"abstract_id": str(row), "abstract": " ".join(text) + "."}
                file.write(json.dumps(record) + "\n")


def write_claims(folder, split, rng, vocabulary, languages, abstracts, labels):
    """Write a split's claims of random words, with random judgements."""
    claims = []
    judged = []
    for language, count in languages.items():
        for number, size in enumerate(rng.integers(8, 31, count)):
            claim_id = f"{language or split}-{number}"
            text = " ".join(draw(rng, vocabulary, size))
            claims.append((claim_id, text, language))
            rows = rng.choice(abstracts, len(labels), replace=False)
            judged += [(claim_id, str(row), label) for row, label in zip(rows, labels)]
    header = ("claim_id", "claim", "language")
    if "" in languages:
        header = header[:2]
        claims = [row[:2] for row in claims]
    write_table(folder / f"claims.{split}.tsv", header, claims)
    write_table(folder / f"qrels.{split}.tsv", ("claim_id", "abstract_id", "label"), judged)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to write to")
    parser.add_argument("--task", choices=TASKS, default="climatecheck2025", help="sizes")
    parser.add_argument("--abstracts", type=int, help="another number of abstracts")
    parser.add_argument("--seed", type=int, default=13)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    words = make_words(rng, WORDS)
    weights = 1 / (np.arange(WORDS) + SHIFT) ** EXPONENT
    vocabulary = Vocabulary(words, np.cumsum(weights) / weights.sum())
    abstracts, splits = TASKS[args.task]
    lengths = lengths_of(rng, args.abstracts or abstracts)
    args.out.mkdir(parents=True, exist_ok=True)
    write_corpus(args.out / "corpus.jsonl", rng, vocabulary, lengths)
    labels = ("SUPPORTS", "SUPPORTS", "REFUTES", "NEI", "NEI")
    if args.task.startswith("checkthat"):
        labels = ("SUPPORTS",)
    for split, languages in splits.items():
        write_claims(args.out, split, rng, vocabulary, languages, len(lengths), labels)
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
