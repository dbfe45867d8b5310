"""recipes/tools: what is drawn, chosen and copied; tables as the scripts have them; bad input."""

import json
import sys

import torch
from conftest import LABELS, NLI, ROOT, RUN, cells, facts, jsonl, tiny, tsv
from sentence_transformers import CrossEncoder

sys.path.insert(0, str(ROOT / "recipes"))
from tools import kit  # noqa: E402

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
DRAWN = """claim_id abstract_id claim label
a 2 Ice SUPPORTS
a 3 Ice REFUTES
a 4 Ice NEI
d 2 Air REFUTES
d 1 Air NEI
e 2 Sky SUPPORTS
e 3 Sky NEI
"""
SENTENCES = ["Ice fell by 3.5 mm.", "It rose, e.g. in May?", "12 say!", "(Or not.)"]


def test_one_judgement_a_label_is_drawn_and_claims_with_most_labels_lead(toy, program, refused):
    for kind, text in TRAIN.items():
        (toy / f"data/demo/{kind}.train.tsv").write_text(text.replace(" ", "\t"))
    words = ("tools/fewshot", "--number", 3)
    [out] = facts(program(*words, cwd=toy))["made"]
    drawn = (toy / out).read_text()
    assert drawn == DRAWN.replace(" ", "\t")
    facts(program(*words, "--seed", 1, cwd=toy))
    assert (toy / out).read_text() != drawn
    (toy / "asked.tsv").write_text("claim_id\tclaim\nx\tice \u2014!\n")  # the words of claim a
    said = "only 2 claims have both evidence and NEI; lower --number"
    refused(toy, *words, "--claims", "asked.tsv", said=said, by=program)


def test_the_sentence_with_the_highest_probability_of_the_label_is_chosen(toy, program):
    """The verdicts on pairs of the claim and a sentence alone decide, by 05."""
    tiny(toy / "nli", NLI)
    abstract = {"abstract_id": "1", "title": "Ice. Bears.", "abstract": " ".join(SENTENCES)}
    jsonl(toy / "data/demo/corpus.jsonl", abstract)
    evidence = [{"abstract_id": "1", "label": label} for label in LABELS[:2]]
    verdict = {"claim": "Größe", "evidence": evidence}
    jsonl(toy / "in.jsonl", verdict)
    words = ("tools/sentences", "in.jsonl", "--model", "nli")
    [out] = facts(program(*words, cwd=toy))["made"]
    pairs = [(sentence, "Größe") for sentence in SENTENCES]  # premise and hypothesis
    model = CrossEncoder(str(toy / "nli"))
    probabilities = model.predict(pairs, activation_fn=torch.nn.Softmax(1))
    refuting, _, supporting = probabilities.argmax(axis=0)
    for entry, index in zip(evidence, (supporting, refuting)):
        entry["sentence"] = SENTENCES[index]
    assert (toy / out).read_text("utf-8") == json.dumps(verdict, ensure_ascii=False) + "\n"
    assert facts(program(*words, cwd=toy))["made"] == []


# ---------------------------------------------------------------- Tables
CLAIMS = {  # their texts are no names, so that expand.py changes none
    "NA": "NA",
    "null": '"cooling"',
    '"q"': 'It says "no", and "no"',
    "007": '"',
    "1e5": "nan",
}
COPYING = {
    "tools/expand": "run.tsv --out expanded.tsv",
    "rewrite": "--model m --languages de --out rewritten.tsv",
    "tools/languages": "data/demo parts",
    "tools/texts": "data/demo copy",
}


def test_claims_of_any_name_and_marks_survive_what_copies_them(toy, program):
    header = ["claim_id", "claim", "language"]
    rows = [(name, kit.quoted(text), "en") for name, text in CLAIMS.items()]
    tsv(toy / "data/demo/claims.test.tsv", header, rows)
    (toy / "data/demo/claims.train.tsv").unlink()
    tsv(toy / "data/demo/qrels.test.tsv", [*RUN[:2], "label"], [('"q"', '"a"', "NEI")])
    tsv(toy / "run.tsv", RUN, [])
    for name, words in COPYING.items():
        assert program(name, words, cwd=toy).returncode == 0, name
    for name in ("expanded", "rewritten", "parts/en/claims.test", "copy/claims.test"):
        table = kit.read_table(toy / f"{name}.tsv", header)
        assert table.values.tolist() == [[*claim, "en"] for claim in CLAIMS.items()], name
    assert (toy / "parts/en/qrels.test.tsv").read_text().endswith('\n"q"\t"a"\tNEI\n')


def test_texts_are_read_as_they_are(tmp_path):
    """As on_ray.py cuts and joins runs."""
    content = 'claim_id\tscore\tx\nNA\t0.10\t"a\n007\t1e5\t\n"q"\tnull\t"b"\n'
    (tmp_path / "a").write_text(content)
    kit.LLM_RERANK.write_table(kit.read_texts(tmp_path / "a", "claim_id"), tmp_path / "b")
    assert (tmp_path / "b").read_text() == content


VALUES = """x|NA|0|1; x|null|0|1; x|nan|0|1; x|None|0|1; x|1e5|0|1; x|007|0|1; x|7|0|1; x|True|1|1;
    y|NA|0|1; y|null|0|1; y|nan|0|1; y|None|0|1; y|1e5|1|1; y|007|0|1; y|7|1|1; y|True|0|;
    z|NA|0|1; z|null|0|1; z|nan|0|1; z|None|0|1; z|1e5|1|1; z|007|0|1; z|7|1|1; z|True|1|1"""
METRICS = """{"value": {"x": {"R@2": 0.125, "MRR": 0.5}, "y": {"R@2": 0.25, "MRR": null},
    "z": {"R@2": 0.375, "MRR": 0.5}}, "counts": {"x": {"claims without rows": 0}}}"""


def test_values_by_claim_are_of_all_claims(toy, program):
    """Against x, y wins two claims, ties five and loses one, and has no second measure of one."""
    tsv(toy / "m.claims.tsv", ["run", "claim_id", "R@2", "MRR"], VALUES)
    (toy / "m.json").write_text(METRICS)
    shown = program("tools/seeds", "m.json y z", cwd=toy).stdout
    # means (1/4 + 3/8) / 2, deviation (1/8) / sqrt(2); the mean of y and z loses the last claim
    assert "R@2 0.1250 0.3125 0.0884 2 5 1 MRR 0.5000 0.5000 - 0 8 0" in " ".join(shown.split())
    shown = program("tools/significance", "m.claims.tsv", cwd=toy).stdout
    counts = [line.split("\t")[2:6] for line in shown.splitlines()[1:]]
    assert counts == cells("8|0.125|2|1; 8|0.25|2|0; 7|0|0|0; 8|0|0|0")
