# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy==2.4.6", "pandas==3.1.1", "spacy==3.8.18", "transformers==5.23.0"]
# ///
"""
Copy a data folder with other texts: without titles, with named fields, or terms for BM25.

Without flags, the copy has abstracts alone, as ClimateCheck's papers index and judge them.

With --described N, claims and fields stay, but the field authors, such as Ng, A.; Li, B., keeps the
last names of the first N and last N, with "Authors:" before them, and the venue has "Venue:" before
it (claim2source, CheckThat! 2026: 3).

With the other flags, all claims and all fields of the corpus become terms with spaces between them,
to be indexed by 01_index.py --analyser plain. Fields stay apart, so that --fields
title,title,abstract still counts the title twice. Terms are the words of a text in lower case, and
each flag changes them:

--lemmas      replaces them by lemmas and leaves out stopwords (spaCy; AIRwaves 2025, section 4.1)
--tokenizer   replaces them by subwords (Budoš and Vojtek, CheckThat! 2026: those of GPT-2)
--digits N    repeats each term that holds a digit, so that it occurs N times (the same team: 4)
--bigrams     adds pairs of neighbours, such as polar_bears (Kvist et al., CheckThat! 2026)

With --bigrams or --digits alone, the default analyser can index the copy, too: it then stems terms
and leaves out stopwords.

Reads   DATA/corpus.jsonl, DATA/claims.SPLIT.tsv, DATA/qrels.SPLIT.tsv
Writes  OUT/corpus.jsonl, claims and qrels

Examples
    python recipes/tools/texts.py data/climatecheck2025 work/climatecheck2025/abstracts
    python recipes/tools/texts.py data/checkthat2026 work/named --described 3
    python recipes/tools/texts.py data/checkthat4b work/checkthat4b/bigrams --bigrams --digits 4
    pip install spacy && python -m spacy download en_core_web_sm
    python recipes/tools/texts.py data/checkthat4b work/checkthat4b/lemmas --lemmas en_core_web_sm
"""

import json
import re
import shutil
from pathlib import Path

import kit

NOTHING = "-"  # a claim in which no term is left, since a claim cannot be empty


# -------------------- Terms
def lemmas_of(texts, pipeline):
    """Yield the lemmas of each text by a spaCy pipeline, a name or a folder."""
    try:
        import spacy

        nlp = spacy.load(pipeline, exclude=["parser", "ner"])
    except (ImportError, OSError):
        advice = f"pip install spacy && python -m spacy download {pipeline}"
        kit.fail(pipeline, f"cannot be loaded; {advice}")
    for document in nlp.pipe(texts):
        lemmas = []
        for token in document:
            if (token.is_alpha or token.like_num) and not token.is_stop:
                lemmas.append(token.lemma_.lower())
        yield lemmas


def words_of(text):
    """Return the words of a text in lower case: letters, digits and _."""
    return re.findall(r"\w+", text.lower())


def subwords_of(texts, name):
    """Yield the subwords of each text by a tokenizer, a folder or a name on the hub."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    for text in texts:
        yield tokenizer.tokenize(" ".join(words_of(text)))


def with_repeats(words, digits):
    """Return words, those that hold a digit repeated so that they occur digits times."""
    terms = []
    for word in words:
        terms.append(word)
        if re.search(r"\d", word):
            terms.extend([word] * (digits - 1))
    return terms


def terms_of(texts, args):
    """Yield the terms of each text, with spaces between them."""
    if args.lemmas:
        all_words = lemmas_of(texts, args.lemmas)
    elif args.tokenizer:
        all_words = subwords_of(texts, args.tokenizer)
    else:
        all_words = map(words_of, texts)
    for words in all_words:
        terms = with_repeats(words, args.digits)
        if args.bigrams:
            terms += [f"{first}_{second}" for first, second in zip(words, words[1:])]
        yield " ".join(terms)


# -------------------- The copy
def as_terms(records, args):
    """Return records of a corpus with terms in all fields."""
    copied = [{"abstract_id": str(record["abstract_id"])} for record in records]
    places = []
    texts = []
    for record, copy in zip(records, copied):
        for field in record:
            if field != "abstract_id":
                places.append((copy, field))
                texts.append(kit.text_of(record, [field]))
    for (copy, field), terms in zip(places, terms_of(texts, args)):
        copy[field] = terms
    return copied


def described(record, most):
    """Return a record of a corpus with names before venue and authors, and with last names.

    most: keeps this many authors from both ends of a list, or of a text such as "Ng, A.; Li, B.".
    """
    authors = record.get("authors") or ""
    if isinstance(authors, str):
        authors = authors.split(";")
    names = [name.split(",")[0].strip() for name in authors if name.strip()]
    del names[most:-most]
    texts = {"venue": kit.text_of(record, ["venue"]), "authors": ", ".join(names)}
    return record | {field: f"{field.title()}: {text}" for field, text in texts.items() if text}


def without_titles(records):
    """Return records of a corpus with their abstracts alone."""
    copied = []
    for record in records:
        abstract = kit.text_of(record, ["abstract"])
        record = {"abstract_id": str(record["abstract_id"]), "title": "", "abstract": abstract}
        copied.append(record)
    return copied


def write_copy(args, corpus, tables, task):
    """Write the copy."""
    records = kit.read_corpus(corpus).values()
    claims = {}
    if args.lemmas or args.tokenizer or args.bigrams or args.digits > 1:
        records = as_terms(records, args)
        for path in tables:
            if path.name.startswith("claims"):
                table = kit.read_table(path, kit.CLAIM)
                terms = [text or NOTHING for text in terms_of(table["claim"], args)]
                claims[path.name] = table.assign(claim=terms)
    elif args.described:
        records = [described(record, args.described) for record in records]
    else:
        records = without_titles(records)
    with kit.written(args.out, task) as new:
        new.mkdir()
        for path in tables:
            shutil.copy(path, new)
        for name, table in claims.items():
            kit.write_table(table, new / name)
        with open(new / "corpus.jsonl", "w", encoding="utf-8") as file:
            for record in records:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")


def main():
    parser = kit.parser(__doc__)
    # fmt: off
    parser.add_argument("data", help="copy corpus, claims and qrels of this folder")
    parser.add_argument("out", help="write the copy to this folder")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--lemmas", metavar="PIPELINE",
        help="replace words by lemmas of this spaCy pipeline, a name or a folder")
    kinds.add_argument("--tokenizer", metavar="NAME",
        help="replace words by subwords of this tokenizer, a folder or a name on the hub")
    parser.add_argument("--digits", type=kit.count, default=1, metavar="N",
        help="repeat each term that holds a digit, so that it occurs N times")
    parser.add_argument("--bigrams", action="store_true",
        help="add each pair of neighbouring terms as one term")
    parser.add_argument("--described", type=kit.count, metavar="N",
        help="keep the last names of the first N and last N authors; name venue and authors")
    parser.add_argument("--force", action="store_true",
        help="make the copy again, even if it is up to date")
    # fmt: on
    args = parser.parse_args()
    corpus = Path(args.data, "corpus.jsonl")
    tables = sorted([*corpus.parent.glob("claims.*.tsv"), *corpus.parent.glob("qrels.*.tsv")])
    models = [name for name in (args.lemmas, args.tokenizer) if name]
    if args.described and (models or args.bigrams or args.digits > 1):
        kit.fail("--described", "the other flags make terms; copy the copy with them")
    task = kit.task_of(args, corpus, *tables, models=models)
    kit.check_outs(args.out, inputs=[args.data], is_folder=True)
    if not kit.up_to_date(args, task, args.out, is_folder=True):
        write_copy(args, corpus, tables, task)


if __name__ == "__main__":
    kit.call(main)
