# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy==2.4.6", "pandas==3.1.1", "spacy==3.8.18"]
# ///
"""
Copy a data folder with other texts: abstracts without titles, or lemmas of claims and abstracts.

ClimateCheck's papers index and judge abstracts alone. Lemmas are for BM25 with --analyser plain
(AIRwaves 2025, section 4.1): lower-cased words and numbers, without spaCy's stopwords.

Reads   DATA/corpus.jsonl, DATA/claims.SPLIT.tsv, DATA/qrels.SPLIT.tsv
Writes  OUT/corpus.jsonl, claims and qrels; last OUT/meta.json, the sha256 of the inputs

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
    parser.add_argument("data", type=Path, help="copy corpus, claims and qrels of this folder")
    parser.add_argument("out", type=Path, help="write the copy to this folder")
    parser.add_argument("--lemmas", metavar="PIPELINE",
        help="replace words by lemmas of this spaCy pipeline, a name or a folder")
    # fmt: on
    args = parser.parse_args()
    corpus = args.data / "corpus.jsonl"
    tables = sorted([*args.data.glob("claims.*.tsv"), *args.data.glob("qrels.*.tsv")])
    task = {path.name: kit.digest(path) for path in [corpus, *tables]}
    task["lemmas"] = args.lemmas
    done = args.out / "meta.json"
    if done.exists() and json.loads(done.read_bytes()) == task:
        print(f"up to date: {args.out}")
        return
    nlp = load(args.lemmas) if args.lemmas else None
    records = kit.read_corpus(corpus)
    args.out.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    for path in tables:
        shutil.copy(path, args.out)
        if nlp and path.name.startswith("claims"):
            claims = kit.read_table(path, ["claim_id", "claim"])
            claims["claim"] = list(lemmas_of(claims["claim"], nlp))
            claims.to_csv(args.out / path.name, sep="\t", index=False)
    fields = ["title", "abstract"] if nlp else ["abstract"]
    texts = [kit.text_of(record, fields) for record in records.values()]
    if nlp:
        texts = lemmas_of(texts, nlp)
    with open(args.out / "corpus.jsonl", "w", encoding="utf-8") as file:
        for abstract_id, text in zip(records, texts):
            record = {"abstract_id": abstract_id, "title": "", "abstract": text}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    done.write_text(json.dumps(task, indent=1))


if __name__ == "__main__":
    main()
