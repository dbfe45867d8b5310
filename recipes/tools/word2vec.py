# /// script
# requires-python = ">=3.11"
# dependencies = ["gensim==4.4.0", "numpy==2.4.6", "pandas==3.1.1"]
# ///
"""
Rank abstracts by the mean of their Word2Vec vectors (AIRwaves 2025, Table 5).

Word2Vec is trained on titles and abstracts of the collection: 100 dimensions, window 5, words that
occur at least twice. Tokens are lower-cased and split at whitespace. The score is the cosine.

Reads   DATA/corpus.jsonl, DATA/claims.SPLIT.tsv; DATA may be a copy that texts.py made
Writes  a run; a claim without a known word has no rows
Prints  the number of rows, and of claims without a known word

Example
    pip install gensim
    python recipes/tools/word2vec.py data/checkthat4b --out work/checkthat4b/test/word2vec-raw.tsv
"""

from pathlib import Path

import kit
import numpy as np
import pandas as pd


def means_of(texts, vectors):
    """Return the mean vector of each text's known words, at unit length; zeros without any."""
    table = np.zeros((len(texts), vectors.vector_size), np.float32)
    for row, words in enumerate(texts):
        known = [vectors[word] for word in words if word in vectors]
        if known:
            table[row] = np.mean(known, axis=0)
    lengths = np.linalg.norm(table, axis=1, keepdims=True)
    return table / np.where(lengths > 0, lengths, 1)


def main():
    parser = kit.parser(__doc__)
    # fmt: off
    add = parser.add_argument
    add("data", type=Path, help="read corpus.jsonl and claims.SPLIT.tsv of this folder")
    add("--split", default="test", help="rank for the claims of this split (default: %(default)s)")
    add("--top-k", type=kit.count, default=100,
        help="keep this many abstracts per claim (default: %(default)s)")
    add("--out", required=True, help="write the run to this file")
    # fmt: on
    args = parser.parse_args()
    inputs = [args.data / "corpus.jsonl", args.data / f"claims.{args.split}.tsv"]
    kit.check_outs(args.out, inputs=inputs)
    try:
        from gensim.models import Word2Vec
    except ImportError:
        kit.fail("gensim", "not installed; pip install gensim")
    corpus = kit.read_corpus(args.data / "corpus.jsonl")
    abstract_ids = np.array(list(corpus))
    texts = [kit.text_of(record).lower().split() for record in corpus.values()]
    claims = kit.read_claims(args.data / f"claims.{args.split}.tsv")
    # one worker: with several, vectors differ from run to run
    model = Word2Vec(texts, vector_size=100, window=5, min_count=2, seed=42, workers=1)
    abstract_vectors = means_of(texts, model.wv)
    claim_vectors = means_of([claim.lower().split() for claim in claims.values()], model.wv)
    rows = []
    for claim_id, vector in zip(claims, claim_vectors):
        if vector.any():
            scores = abstract_vectors @ vector
            best = np.argsort(-scores, kind="stable")[: args.top_k]
            for rank, index in enumerate(best, 1):
                rows.append((claim_id, abstract_ids[index], rank, scores[index]))
    run = pd.DataFrame(rows, columns=kit.RUN)
    with kit.written(args.out, {}) as new:
        kit.write_table(run, new)
    missing = len(claims) - run["claim_id"].nunique()
    print(f"{args.out}: {len(run)} rows, {missing} claims without a known word")


if __name__ == "__main__":
    kit.call(main)
