# /// script
# requires-python = ">=3.11"
# dependencies = ["bm25s==0.3.16", "numpy==2.4.6", "pandas==3.1.1"]
# ///
"""
Expand claims by the most frequent terms of their nearest papers (Retrix, CheckThat! 2026).

Each occurrence of a term in a paper counts max(1, round(5 * cosine)) times, where the cosine is the
paper's score in the run. Terms are in lower case and ASCII, have at least three letters or digits,
and are not stopwords. The claim stands before its terms, without @ and # before words and without
emoji.

Reads   claims, a run with cosines as scores, the corpus (title and abstract)
Writes  the claims, each followed by its terms
Prints  the last line is JSON

Example
    python 02_retrieve.py --retrievers dense --top-k 5
    python recipes/tools/expand.py work/demo/test/dense.tsv
"""

import re
import unicodedata
from collections import Counter

import kit
from bm25s.stopwords import STOPWORDS_EN_PLUS


def cleaned(claim):
    """Return a claim without @ and # before words, and without emoji."""
    claim = re.sub(r"\B[@#](?=\w)", "", claim)
    letters = [letter for letter in claim if unicodedata.category(letter) != "So"]  # symbols
    return kit.plain("".join(letters))


def terms_of(text):
    """Return the terms of a text."""
    ascii_text = unicodedata.normalize("NFKD", text.lower()).encode("ascii", "ignore").decode()
    words = [word.removesuffix("'s") for word in re.findall(r"\w+(?:'\w+)?", ascii_text)]
    return [word for word in words if len(word) > 2 and word not in STOPWORDS_EN_PLUS]


def most_frequent(papers, number):
    """Return the terms with the highest counts; the one that is seen first wins ties.

    papers: [(cosine, terms)], the nearest paper first.
    """
    counts = Counter()
    for score, terms in papers:
        for term in terms:
            counts[term] += max(1, round(5 * score))
    return [term for term, _ in counts.most_common(number)]


def expand(args):
    """Write each claim with the most frequent terms of its nearest papers."""
    task = kit.task_of(args, args.run, args.claims, args.corpus)
    if kit.up_to_date(args, task, args.out):
        return {"made": []}
    terms = {}
    for abstract_id, record in kit.read_corpus(args.corpus).items():
        terms[abstract_id] = terms_of(kit.text_of(record))
    claims = kit.read_table(args.claims, kit.CLAIM)
    run = kit.read_table(args.run, kit.RUN, claim_id=set(claims["claim_id"]), abstract_id=terms)
    papers = {claim_id: [] for claim_id in claims["claim_id"]}
    for claim_id, abstract_id, _, score in run[run["rank"] <= args.papers][kit.RUN].to_numpy():
        papers[claim_id].append((score, terms[abstract_id]))
    texts = []
    for claim_id, claim in zip(claims["claim_id"], claims["claim"]):
        texts.append(" ".join([cleaned(claim), *most_frequent(papers[claim_id], args.terms)]))
    with kit.written(args.out, task) as new:
        kit.write_table(claims.assign(claim=texts), new)
    return {"made": [args.out], "claims": len(claims)}


# fmt: off
def add_expand(add):
    add("run", nargs="?", default="{work}/{split}/dense.tsv",
        help="take the nearest papers, and their cosines, from this run")
    kit.add_claims(add)
    kit.add_corpus(add)
    add("--out", default="{work}/{split}/claims.expanded.tsv",
        help="write the expanded claims to this file")
    add("--papers", type=kit.count, default=5, help="take terms from this many nearest papers")
    add("--terms", type=kit.count, default=15, help="add this many terms")
# fmt: on


if __name__ == "__main__":
    kit.run(__doc__, expand, add_expand)
