"""
Measure 05_classify.py: pairs per second beside the transformers pipeline, F1 of two baselines.

Reads   for speed, nothing: makes abstracts of ClimateCheck's lengths and a classifier of
        MiniLM-L6's size with random weights; baselines: claims, qrels and corpus of --data
Prints  speed: the ratio and how many labels agree; baselines: weighted precision, recall and F1
        of the majority class and of a logistic regression on TF-IDF; last, one line of JSON

Examples
    python tests/benchmarks/bench_classify.py
    python tests/benchmarks/bench_classify.py baselines --data data/demo
"""

import argparse
import json
import runpy
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def script(path):
    """Return the names of a script."""
    sys.argv = [Path(path).name]
    return runpy.run_path(str(path))


def speed(args):
    """Label the same pairs both ways, one after the other."""
    from sentence_transformers import CrossEncoder
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, pipeline

    bench = script(HERE / "bench_rerank.py")
    kit = script(ROOT / "05_classify.py")
    labels = kit["LABELS"]
    claims, abstracts, candidates = bench["make_texts"](args.claims, args.depth)
    pairs = bench["pairs_of"](claims, abstracts, candidates)
    config = BertConfig(**bench["MINI"], id2label=dict(enumerate(labels)), initializer_range=0.1)
    how = SimpleNamespace(device=None, batch_size=32, job="classify", dtype="fp32")
    how.max_length = 512
    with tempfile.TemporaryDirectory() as folder:
        how.model = folder
        BertForSequenceClassification(config).save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(ROOT / "data/models/minilm", model_max_length=512)
        tokenizer.save_pretrained(folder)
        model = kit["open_model"](CrossEncoder, folder, how, how.dtype)
        kit["set_reader"](model, how, how.batch_size)
        kit["outputs_of"](model, pairs[:64])  # warms up
        model[0].preprocess.known.clear()
        start = time.monotonic()
        probabilities = kit["probabilities_of"](model, kit["outputs_of"](model, pairs)[0])
        ours = time.monotonic() - start
        theirs_model = pipeline("text-classification", model=folder)
        inputs = [{"text": abstract, "text_pair": claim} for claim, abstract in pairs]
        theirs_model(inputs[:64], truncation="only_first")
        start = time.monotonic()
        theirs = [output["label"] for output in theirs_model(inputs, truncation="only_first")]
        ratio = (time.monotonic() - start) / ours
    predicted = [labels[index] for index in probabilities.argmax(axis=1)]
    same = sum(label == their_label for label, their_label in zip(predicted, theirs))
    print(
        f"{len(pairs)} pairs: {ratio:.2f} times the pairs per second of the pipeline at its "
        f"defaults; {same} labels agree"
    )
    return {"pairs": len(pairs), "seconds": ours, "ratio": ratio, "labels_agree": same}


def baselines(args):
    """Return weighted precision, recall and F1 on the test split's judged pairs."""
    from sklearn.dummy import DummyClassifier
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import precision_recall_fscore_support
    from sklearn.pipeline import make_pipeline

    kit = script(ROOT / "05_classify.py")
    texts = {}
    labels = {}
    for split in ("train", "test"):
        claims = kit["read_claims"](f"{args.data}/claims.{split}.tsv")
        abstracts = kit["read_abstracts"](f"{args.data}/corpus.jsonl", "title,abstract")
        qrels = kit["read_table"](f"{args.data}/qrels.{split}.tsv", [*kit["PAIR"], "label"])
        pairs = kit["paired_texts"](qrels, (claims, abstracts))
        texts[split] = [f"{claim} [SEP] {abstract}" for claim, abstract in pairs]
        labels[split] = qrels["label"]
    vectors = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    regression = LogisticRegression(max_iter=1000, class_weight="balanced")
    models = {
        "majority": DummyClassifier(strategy="most_frequent"),
        "tf-idf + logistic regression": make_pipeline(vectors, regression),
    }
    result = {}
    for name, model in models.items():
        model.fit(texts["train"], labels["train"])
        predicted = model.predict(texts["test"])
        precision, recall, f1, _ = precision_recall_fscore_support(
            labels["test"], predicted, average="weighted", zero_division=0
        )
        result[name] = {"P": float(precision), "R": float(recall), "F1": float(f1)}
        print(f"{name:30} {result[name]}")
    return result


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", nargs="?", choices=("speed", "baselines"), default="speed")
    parser.add_argument("--data", default="data/demo")
    parser.add_argument("--claims", type=int, default=20)
    parser.add_argument("--depth", type=int, default=100)
    args = parser.parse_args()
    result = speed(args) if args.job == "speed" else baselines(args)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
