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
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, pipeline

    bench, kit = script(HERE / "bench_rerank.py"), script(ROOT / "05_classify.py")
    labels, (claims, texts, found) = kit["LABELS"], bench["make_texts"](args.claims, args.depth)
    pairs = [(claims[claim], texts[name]) for claim, names in found.items() for name in names]
    config = BertConfig(**bench["MINI"], id2label=dict(enumerate(labels)), initializer_range=0.1)
    how = SimpleNamespace(device=None, batch_size=32, job="classify")
    with tempfile.TemporaryDirectory() as folder:
        BertForSequenceClassification(config).save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(ROOT / "data/models/minilm", model_max_length=512)
        tokenizer.save_pretrained(folder)
        model = kit["open_classifier"](folder, how)
        kit["probabilities_of"](model, kit["inputs_of"](model, pairs[:64])[0], how)
        start = time.monotonic()
        inputs, _ = kit["inputs_of"](model, pairs)
        found = kit["probabilities_of"](model, inputs, how)
        ours = time.monotonic() - start
        theirs_model = pipeline("text-classification", model=folder)
        inputs = [{"text": text, "text_pair": claim} for claim, text in pairs]
        theirs_model(inputs[:64], truncation="only_first")
        start = time.monotonic()
        predicted = [one["label"] for one in theirs_model(inputs, truncation="only_first")]
        ratio = (time.monotonic() - start) / ours
    same = sum(labels[place] == label for place, label in zip(found.argmax(axis=1), predicted))
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

    kit, parts = script(ROOT / "05_classify.py"), {}
    for split in ("train", "test"):
        paths = f"{args.data}/claims.{split}.tsv", f"{args.data}/corpus.jsonl"
        claims, texts = kit["read_texts"](*paths)
        qrels = kit["read_table"](f"{args.data}/qrels.{split}.tsv", kit["QRELS"])
        pairs = kit["pairs_of"](qrels, claims, texts)
        parts[split] = [f"{claim} [SEP] {text}" for claim, text in pairs], qrels["label"]
    vectors = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    regression = LogisticRegression(max_iter=1000, class_weight="balanced")
    models = {
        "majority": DummyClassifier(strategy="most_frequent"),
        "tf-idf + logistic regression": make_pipeline(vectors, regression),
    }
    result = {}
    for name, model in models.items():
        predicted = model.fit(*parts["train"]).predict(parts["test"][0])
        scores = precision_recall_fscore_support(
            parts["test"][1], predicted, average="weighted", zero_division=0
        )
        result[name] = dict(zip(("P", "R", "F1"), map(float, scores)))
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
    print(json.dumps({"speed": speed, "baselines": baselines}[args.job](args)))


if __name__ == "__main__":
    main()
