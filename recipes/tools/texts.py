# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy==2.4.6", "pandas==3.1.1", "spacy==3.8.18"]
# ///
"""
Copy a data folder with other texts: abstracts without titles, or lemmas of claims and abstracts.

ClimateCheck's papers index and judge abstracts alone. Lemmas are for BM25 with --analyser plain
(AIRwaves 2025, section 4.1): lower-cased words and numbers, without spaCy's stopwords.

Reads   DATA/corpus.jsonl, DATA/claims.SPLIT.tsv, DATA/qrels.SPLIT.tsv
Writes  OUT/corpus.jsonl, claims and qrels, whole or not at all

Examples
    python recipes/tools/texts.py data/climatecheck2025 work/climatecheck2025/abstracts
    pip install spacy && python -m spacy download en_core_web_sm
    python recipes/tools/texts.py data/checkthat4b work/checkthat4b/lemmas --lemmas en_core_web_sm
"""

import json
import shutil
from pathlib import Path

import kit


def lemmas_of(texts, nlp):
    """Yield the lemmas of each text, joined by spaces; "-" where no word is left."""
    for document in nlp.pipe(texts):
        lemmas = []
        for token in document:
            if (token.is_alpha or token.like_num) and not token.is_stop:
                lemmas.append(token.lemma_.lower())
        yield " ".join(lemmas) or "-"


def lemmatised(paths, nlp):
    """Return {name of a file: its table} of the claims among paths, as lemmas."""
    tables = {}
    for path in paths:
        if path.name.startswith("claims"):
            table = kit.read_table(path, ["claim_id", "claim"])
            tables[path.name] = table.assign(claim=list(lemmas_of(table["claim"], nlp)))
    return tables


def load(pipeline):
    """Return a spaCy pipeline by its name or folder."""
    try:
        import spacy

        return spacy.load(pipeline, exclude=["parser", "ner"])
    except (ImportError, OSError):
        kit.fail(
            pipeline, f"cannot be loaded; pip install spacy && python -m spacy download {pipeline}"
        )


def main():
    parser = kit.parser(__doc__)
    # fmt: off
    parser.add_argument("data", help="copy corpus, claims and qrels of this folder")
    parser.add_argument("out", help="write the copy to this folder")
    parser.add_argument("--lemmas", metavar="PIPELINE",
        help="replace words by lemmas of this spaCy pipeline, a name or a folder")
    parser.add_argument("--force", action="store_true",
        help="make the copy again, even if it is up to date")
    # fmt: on
    args = parser.parse_args()
    corpus = Path(args.data, "corpus.jsonl")
    tables = sorted([*corpus.parent.glob("claims.*.tsv"), *corpus.parent.glob("qrels.*.tsv")])
    pipelines = []
    if args.lemmas:
        pipelines.append(args.lemmas)
    task = kit.task_of(args, corpus, *tables, models=pipelines)
    if kit.up_to_date(args, task, args.out, is_folder=True):
        return
    records = kit.read_corpus(corpus).values()
    claims = {}
    if args.lemmas:
        nlp = load(args.lemmas)
        texts = lemmas_of(map(kit.text_of, records), nlp)
        claims = lemmatised(tables, nlp)
    else:
        texts = [kit.text_of(record, ["abstract"]) for record in records]
    with kit.written(args.out, task) as new:
        new.mkdir()
        for path in tables:
            shutil.copy(path, new)
        for name, table in claims.items():
            kit.write_table(table, new / name)
        with open(new / "corpus.jsonl", "w", encoding="utf-8") as file:
            for record, text in zip(records, texts):
                copied = {"abstract_id": str(record["abstract_id"]), "title": "", "abstract": text}
                file.write(json.dumps(copied, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    kit.call(main)
