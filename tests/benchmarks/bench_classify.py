"""
Measure 05_classify.py: its pairs per second beside the transformers pipeline's, its F1 beside two plain baselines.

Reads   for speed, nothing: makes abstracts of ClimateCheck's lengths and a classifier of MiniLM-L6's size, random weights
        baselines: claims, qrels (train, test) and corpus of --data
Prints  for speed, the ratio and how many labels agree; baselines: precision, recall and F1, weighted, of the majority class
        and of a logistic regression on TF-IDF (scikit-learn); one line of JSON, last on stdout

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
LABELS = ["SUPPORTS", "REFUTES", "NEI"]

def script(path):
    """The names of a script."""
    sys.argv = [Path(path).name]
    return runpy.run_path(str(path))

def make_classifier(folder):
    """A classifier of MiniLM-L6's size with random weights, large enough for its labels to differ, and its tokenizer."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    torch.manual_seed(13)
    config = BertConfig(**script(HERE / "bench_rerank.py")["MINI"], id2label=dict(enumerate(LABELS)),
                        label2id={label: place for place, label in enumerate(LABELS)}, initializer_range=0.1)
    BertForSequenceClassification(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "data/models/minilm", model_max_length=512).save_pretrained(folder)
    return folder

def speed(args):
    """Both ways over the same pairs, one after the other."""
    from transformers import pipeline

    given = script(HERE / "bench_rerank.py")["make_pairs"](args.claims, args.depth)
    pairs = [(claim, text) for claim, texts in given for text in texts]
    kit = script(ROOT / "05_classify.py")
    with tempfile.TemporaryDirectory() as folder:
        how = SimpleNamespace(max_length=512, windows="none", calibrate=True, adjust=0.0, seed=13, device="auto")
        classifier = kit["open_classifier"](make_classifier(folder), how)
        kit["probabilities_of"](classifier, pairs[:64], how)
        begun = time.monotonic()
        found = kit["probabilities_of"](classifier, pairs, how)
        ours = time.monotonic() - begun
        theirs_model = pipeline("text-classification", model=folder)
        inputs = [{"text": claim, "text_pair": text} for claim, text in pairs]
        theirs_model(inputs[:64], truncation="only_second")
        begun = time.monotonic()
        predicted = [one["label"] for one in theirs_model(inputs, truncation="only_second")]
        theirs = time.monotonic() - begun
    same = sum(LABELS[place] == label for place, label in zip(found.argmax(axis=1), predicted))
    counts = {label: predicted.count(label) for label in LABELS}
    print(f"{len(pairs)} pairs: {theirs / ours:.2f} times the pairs per second of the pipeline at its defaults; "
          f"{same} labels agree; {counts}")
    return {"pairs": len(pairs), "ratio": theirs / ours, "labels_agree": same, "labels": counts}

def baselines(args):
    """Weighted precision, recall and F1 on the test split's judged pairs."""
    from sklearn.dummy import DummyClassifier
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import precision_recall_fscore_support
    from sklearn.pipeline import make_pipeline

    kit, parts = script(ROOT / "05_classify.py"), {}
    for split in ("train", "test"):
        paths = SimpleNamespace(claims=f"{args.data}/claims.{split}.tsv", corpus=f"{args.data}/corpus.jsonl")
        qrels, pairs, *_ = kit["read_pairs"](paths, f"{args.data}/qrels.{split}.tsv", ["claim_id", "abstract_id", "label"])
        parts[split] = [f"{claim} [SEP] {text}" for claim, text in pairs], list(qrels["label"])
    models = {"majority": DummyClassifier(strategy="most_frequent"), "tf-idf + logistic regression": make_pipeline(
        TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True), LogisticRegression(max_iter=1000, class_weight="balanced"))}
    result = {}
    for name, model in models.items():
        predicted = model.fit(*parts["train"]).predict(parts["test"][0])
        found = precision_recall_fscore_support(parts["test"][1], predicted, average="weighted", zero_division=0)
        result[name] = dict(zip(("P", "R", "F1"), map(float, found)))
        print(f"{name:30}" + " ".join(f"{measure} {value:.3f}" for measure, value in result[name].items()))
    return result

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", nargs="?", choices=("speed", "baselines"), default="speed")
    parser.add_argument("--data", default="data/demo")
    parser.add_argument("--claims", type=int, default=20)
    parser.add_argument("--depth", type=int, default=100)
    args = parser.parse_args()
    print(json.dumps({"speed": speed, "baselines": baselines}[args.job](args)))

if __name__ == "__main__":
    main()
