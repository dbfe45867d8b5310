"""recipes/tools: what is drawn, chosen and copied; tables as the scripts have them; bad input."""

import json
import sys
from types import SimpleNamespace

from conftest import LABELS, ROOT, RUN, facts, jsonl, load, tiny, tsv

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
    said = "only 2 claims have both evidence and NEI; lower --number"
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
    args.batch_size = 2
    model = kit.open_classifier(args)
    pairs = [("Größe", sentence) for sentence in SENTENCES]
    best = kit.probabilities_of(model, kit.outputs_of(model, pairs)).argmax(axis=0)
    for entry, index in zip(evidence, best):
        entry["sentence"] = SENTENCES[index]
    assert (toy / out).read_text("utf-8") == json.dumps(verdict, ensure_ascii=False) + "\n"
    assert facts(program(*words, cwd=toy))["made"] == []
    jsonl(toy / "in.jsonl", verdict, {"evidence": [{"abstract_id": "2"}]})
    refused(toy, *words, said="in.jsonl:2: no verdict on a claim", by=program)


# ---------------------------------------------------------------- Tables
CLAIMS = {  # their texts are no names, so that expand.py changes none
    "NA": "NA",
    "null": '"cooling"',
    '"q"': 'It says "no", and "no"',
    "007": '"',
    "1e5": "nan",
}


def test_claims_of_any_name_and_marks_survive_what_copies_them(toy, program):
    header = ["claim_id", "claim", "language"]
    rows = [(name, kit.quoted(text), "en") for name, text in CLAIMS.items()]
    tsv(toy / "data/demo/claims.test.tsv", header, rows)
    (toy / "data/demo/claims.train.tsv").unlink()
    tsv(toy / "data/demo/qrels.test.tsv", [*RUN[:2], "label"], [('"q"', '"a"', "NEI")])
    tsv(toy / "run.tsv", RUN, [])
    facts(program("tools/expand", "run.tsv --out expanded.tsv", cwd=toy))
    facts(program("rewrite", "--model m --languages de --out rewritten.tsv", cwd=toy))
    assert program("tools/languages", "data/demo parts", cwd=toy).returncode == 0
    assert program("tools/texts", "data/demo copy", cwd=toy).returncode == 0
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


def test_values_by_claim_are_of_all_claims(toy, program):
    """Against x, y wins two claims, ties five and loses one, and has no second measure of one."""
    names = ["NA", "null", "nan", "None", "1e5", "007", "7", "True"]
    values = {"x": "00000001", "y": "00001010"}
    rows = []
    for run, hits in values.items():
        rows += [(run, name, hit, "0.5") for name, hit in zip(names, hits)]
    rows[-1] = (*rows[-1][:3], "")
    tsv(toy / "m.claims.tsv", ["run", "claim_id", "R@2", "MRR"], rows)
    means = {"x": {"R@2": 0.125, "MRR": 0.5}, "y": {"R@2": 0.25, "MRR": None}}
    (toy / "m.json").write_text(json.dumps({"value": means}))
    shown = program("tools/seeds", "m.json y", cwd=toy).stdout.splitlines()
    assert shown[1].split()[-3:] == ["2", "5", "1"] and shown[2].split()[-3:] == ["0", "7", "0"]
    shown = program("tools/significance", "m.claims.tsv", cwd=toy).stdout.splitlines()
    assert [line.split("\t")[2] for line in shown[1:]] == ["8", "7"]
    assert shown[1].split("\t")[4:6] == ["2", "1"]
