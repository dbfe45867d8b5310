"""recipes/tools/fewshot.py and sentences.py: what is drawn and chosen; bad input is one line."""

import json
from types import SimpleNamespace

from conftest import LABELS, facts, jsonl, load, tiny

TRAIN = {
    "claims": "claim_id claim\na Ice\nb Sun\nc Sea\nd Air\ne Sky\n",
    "qrels": """claim_id abstract_id label
a 1 SUPPORTS
a 2 SUPPORTS
b 1 REFUTES
c 1 NEI
d 1 NEI
a 3 REFUTES
d 2 REFUTES
a 4 NEI
b 2 SUPPORTS
e 1 NEI
e 2 SUPPORTS
e 3 NEI
""",
}
# np.random.default_rng(13).permutation(12): 6 1 5 0 4 7 2 8 3 10 11 9
DRAWN = """claim_id abstract_id label
a 2 SUPPORTS
a 3 REFUTES
a 4 NEI
d 2 REFUTES
d 1 NEI
e 2 SUPPORTS
e 3 NEI
"""
SENTENCES = ["Ice fell by 3.5 mm.", "It rose, e.g. in May?", "12 say!", "(Or not.)"]


def test_one_judgement_a_label_is_drawn_and_claims_with_most_labels_lead(toy, program, refused):
    for kind, text in TRAIN.items():
        (toy / f"data/demo/{kind}.train.tsv").write_text(text.replace(" ", "\t"))
    words = ("tools/fewshot", "--number", 3)
    (out,) = facts(program(*words, cwd=toy))["made"]
    assert (toy / out).read_text() == DRAWN.replace(" ", "\t")
    facts(program(*words, "--seed", 1, cwd=toy))
    assert (toy / out).read_text() != DRAWN.replace(" ", "\t")
    (toy / "asked.tsv").write_text("claim_id\tclaim\nx\tice \u2014!\n")  # the words of claim a
    said = "2 claims have both evidence and NEI; take --number from 1 to that many, or no examples"
    refused(toy, *words, "--claims", "asked.tsv", said=said, by=program)


def test_the_sentence_with_the_highest_probability_of_the_label_is_chosen(toy, program, refused):
    tiny(toy / "nli", ["contradiction", "neutral", "entailment"])
    abstract = {"abstract_id": "1", "title": "Ice. Bears.", "abstract": " ".join(SENTENCES)}
    jsonl(toy / "data/demo/corpus.jsonl", abstract)
    evidence = [{"abstract_id": "1", "label": label} for label in LABELS[:2]]
    verdict = {"claim": "Größe", "evidence": evidence}
    jsonl(toy / "in.jsonl", verdict)
    words = ("tools/sentences", "in.jsonl", "--model", "nli")
    (out,) = facts(program(*words, cwd=toy))["made"]
    kit = load("05_classify.py")
    args = SimpleNamespace(model="nli", max_length=512, dtype="fp32", fields="", device=None)
    model = kit.open_classifier(args)
    inputs, _ = kit.inputs_of(model, [("Größe", sentence) for sentence in SENTENCES])
    best = kit.probabilities_of(model, inputs, args).argmax(axis=0)
    for entry, index in zip(evidence, best):
        entry["sentence"] = SENTENCES[index]
    assert (toy / out).read_text("utf-8") == json.dumps(verdict, ensure_ascii=False) + "\n"
    assert facts(program(*words, cwd=toy))["made"] == []
    jsonl(toy / "in.jsonl", verdict, {"evidence": [{"abstract_id": "2"}]})
    refused(toy, *words, said="in.jsonl:2: no verdict on a claim", by=program)
