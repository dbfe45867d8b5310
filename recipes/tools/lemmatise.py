# /// script
# requires-python = ">=3.11"
# dependencies = ["pandas==3.1.1", "spacy==3.8.18", "tqdm==4.70.1"]
# ///
"""
Replace texts by their lemmas, for BM25 with --analyser plain (AIRwaves 2025, section 4.1).

Lemmas are lower-cased. Words and numbers are kept, stopwords of spaCy are not.

Reads   DATA/corpus.jsonl, DATA/claims.SPLIT.tsv
Writes  OUT/corpus.jsonl and OUT/claims.SPLIT.tsv with lemmas in place of texts, OUT/qrels.SPLIT.tsv
        as they are; OUT/meta.json: the pipeline and the sha256 of what was read

Examples
    pip install spacy && python -m spacy download en_core_web_sm
    python recipes/tools/lemmatise.py data/checkthat4b work/checkthat4b/lemmas
"""
import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path

from kit import read_corpus, read_table, text_of
from tqdm.auto import tqdm

def lemmas_of(texts, nlp):
    """Yield the lemmas of each text, joined by spaces."""
    for document in tqdm(nlp.pipe(texts), total=len(texts), unit=" texts"):
        words = [token for token in document if token.is_alpha or token.like_num]
        yield " ".join(token.lemma_.lower() for token in words if not token.is_stop)

def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder of corpus and claims")
    parser.add_argument("out", type=Path, help="folder for the lemmatised copy")
    parser.add_argument("--pipeline", default="en_core_web_sm", help="spaCy pipeline or its folder")
    args = parser.parse_args()
    paths = [args.data / "corpus.jsonl", *args.data.glob("claims.*.tsv")]
    paths += args.data.glob("qrels.*.tsv")
    marks = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(paths)}
    task = json.dumps({"pipeline": args.pipeline, "inputs": marks}, indent=1)
    done = args.out / "meta.json"  # written last
    if done.exists() and done.read_text() == task:
        print(f"up to date: {args.out}")
        return
    try:
        import spacy
        nlp = spacy.load(args.pipeline, exclude=["parser", "ner"])
    except (ImportError, OSError):
        print(f"error: {args.pipeline}: not installed; pip install spacy, then "
              f"python -m spacy download {args.pipeline}", file=sys.stderr)
        sys.exit(2)
    args.out.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    for path in sorted(args.data.glob("qrels.*.tsv")):
        shutil.copy(path, args.out)
    for path in sorted(args.data.glob("claims.*.tsv")):
        claims = read_table(path, ["claim_id", "claim"])
        claims["claim"] = list(lemmas_of(claims["claim"], nlp))
        claims["claim"] = claims["claim"].where(claims["claim"] != "", "-")  # no word is left
        claims.to_csv(args.out / path.name, sep="\t", index=False)
    corpus = read_corpus(args.data / "corpus.jsonl")
    texts = [text_of(record) for record in corpus.values()]
    new = args.out / "corpus.tmp"
    with open(new, "w", encoding="utf-8") as file:
        for name, text in zip(corpus, lemmas_of(texts, nlp)):
            line = {"abstract_id": name, "abstract": text}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    new.replace(args.out / "corpus.jsonl")
    done.write_text(task)

if __name__ == "__main__":
    main()
