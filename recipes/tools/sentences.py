# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy==2.4.6", "pandas==3.1.1", "protobuf==7.36.2",
#   "sentence-transformers==6.2.0", "sentencepiece==0.2.3", "torch==2.13.0",
#   "transformers==5.23.0"]
# ///
"""
Choose the sentence of each evidence abstract that speaks most clearly for the abstract's label.

The classifier that labels pairs of a claim and an abstract here labels pairs of the claim and each
sentence of the abstract, without the title. The sentence with the highest probability of the
abstract's label is chosen.

Reads   verdicts on claims, claims.jsonl of 05_classify.py aggregate; the corpus; a classifier
Writes  the same records, with the field sentence in each entry of their evidence; without
        arguments, they replace claims.jsonl
Prints  the last line is JSON

Example
    python 05_classify.py aggregate --out work/demo/test/verdicts.jsonl
    python recipes/tools/sentences.py work/demo/test/verdicts.jsonl
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import kit
from kit import CLASSIFY, LABELS

SENTENCE_END = r"(?<=[.!?])\s+(?=[A-Z0-9\"'(\[])"


def read_evidence(path, corpus):
    """Return verdicts on claims, and (entry, pairs) for each entry of their evidence.

    The pairs are the claim with each sentence of the abstract.
    """
    records = []
    evidence = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
                claim = record["claim"]
                if not isinstance(claim, str):
                    raise TypeError("a claim is no text")
                for entry in record["evidence"]:
                    LABELS.index(entry["label"])  # a ValueError if it is unknown
                    text = kit.text_of(corpus[entry["abstract_id"]], ["abstract"])
                    pairs = [(claim, sentence) for sentence in re.split(SENTENCE_END, text)]
                    evidence.append((entry, pairs))
            except (ValueError, LookupError, TypeError) as error:
                what = f"no verdict on a claim, with evidence of this corpus ({error})"
                kit.fail(f"{path}:{number}", f"{what}; run 05_classify.py aggregate")
            records.append(record)
    return records, evidence


def choose(evidence, args):
    """Add the field sentence to the entries of evidence."""
    from sentence_transformers import CrossEncoder

    defaults = {"max_length": 512, "dtype": "auto", "batch_size": None}
    flags = SimpleNamespace(**(vars(args) | defaults))
    model = CLASSIFY.open_model(CrossEncoder, flags.model, flags, flags.dtype)
    if not CLASSIFY.head_order(model.config):
        kit.fail(flags.model, "its outputs are not the three labels; train it")
    CLASSIFY.set_reader(model, flags, CLASSIFY.batch_size_of(flags))
    everything = [pair for _, pairs in evidence for pair in pairs]
    outputs, _ = CLASSIFY.outputs_of(model, everything)
    probabilities = CLASSIFY.probabilities_of(model, outputs)
    for entry, pairs in evidence:
        own = probabilities[: len(pairs), LABELS.index(entry["label"])]
        probabilities = probabilities[len(pairs) :]
        entry["sentence"] = pairs[own.argmax()][1]


def sentences(args):
    """Choose a sentence of each evidence abstract by a classifier."""
    task = kit.task_of(args, args.verdicts, args.corpus, models=[args.model])
    if Path(args.out).resolve() == Path(args.verdicts).resolve():
        del task["inputs"][args.verdicts]  # replaced by the output, which has all of its records
    if kit.up_to_date(args, task, args.out):
        return {"made": []}
    records, evidence = read_evidence(args.verdicts, kit.read_corpus(args.corpus))
    if evidence:
        choose(evidence, args)
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    with kit.written(args.out, task, sentences=len(evidence)) as new:
        new.write_text("".join(lines), encoding="utf-8")
    return {"made": [args.out], "sentences": len(evidence)}


# fmt: off
def add_sentences(add):
    add("verdicts", nargs="?", default="{work}/{split}/claims.jsonl",
        help="read verdicts on claims from this file")
    kit.add_corpus(add)
    add("--model", default="{work}/models/classifier",
        help="score sentences by this classifier or NLI model, a folder or a name on the hub")
    add("--out", default="{work}/{split}/claims.jsonl",
        help="write the verdicts with sentences to this file")
    add("--device", nargs=1, help="use this device: cpu, mps, cuda (default: a GPU, if any)")
# fmt: on


if __name__ == "__main__":
    kit.run(__doc__, sentences, add_sentences)
