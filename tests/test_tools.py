"""recipes/tools: what is drawn, chosen and copied; tables as the scripts have them; bad input."""

import json
import sys
from types import SimpleNamespace

import pytest
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
    kit.SCRIPT.write_table(kit.read_texts(tmp_path / "a", "claim_id"), tmp_path / "b")
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


TABLE = "run\tclaim_id\tMRR\n"
TORN = [
    ("tools/seeds", "x.json a", '{"value": {"a"', "x.json: no metrics.json of 06_evaluate.py"),
    ("tools/seeds", "x.json a", '{"value": [1]}', "x.json: no metrics.json"),
    ("tools/seeds", "none.json a", "", "none.json: no metrics.json"),
    ("tools/seeds", "x.json a", '{"value": {"a": {"MRR": 1}}}', "x.claims.tsv"),
    ("tools/published", "x.json ant_bridge", "[]", "x.json: no metrics.json"),
    ("tools/published", "--remarks nobody", "", "nobody: no figures"),
    ("tools/significance", "x.json", TABLE + "a\tc\tx\n", "x.json: could not convert"),
    ("tools/significance", "x.json", TABLE + "a\tc\t1\n", "x.json: values of one run"),
    ("tools/significance", "x.json", TABLE + "a\tc\t1\n" * 2, "x.json: two rows have one run"),
    ("tools/significance", "x.json", TABLE + "a\tc\t1\t2\n", "x.json:1: found columns"),
    ("tools/significance", "x.json", "", "x.json: No columns"),
    ("tools/significance", "none", "", "none: [Errno 2]"),
    ("tools/compare", "table .", '{"value": 1}', "metrics.json: no metrics.json"),
    ("tools/compare", "run x.json true", "[1", "x.json: no row of compare.sh"),
    ("tools/compare", "run row.json nothing", "", "nothing: [Errno 2]"),
    ("tools/compare", "run row.json", "", "row.json: no command"),
    ("tools/verdicts", "x.json data/demo/qrels.test.tsv", '{"claim_id": 1}', "x.json: no verdicts"),
    ("tools/verdicts", "mean v.tsv --out m.tsv", "", "v.tsv: no probabilities: c3 0001"),
    ("ev2r", "v.tsv --verdicts v.tsv --pool v.tsv --model m", "", "v.tsv: no probabilities"),
    ("tools/sentences", "x.json --model m", '{"claim": 1, "evidence": []}', "x.json:1: no verdict"),
    ("tools/average", "out torn torn", "", "torn/model.safetensors: "),
    ("tools/languages", "none parts", "", "none: no claims.SPLIT.tsv in it"),
    ("tools/languages", "torn parts", "", "torn/claims.x.tsv: the language '../x' of 1 is no name"),
    ("tools/count_tokens", "none", "", "none/corpus.jsonl: [Errno 2]"),
    ("tools/texts", "none out", "", "none/corpus.jsonl: not found"),
]


@pytest.mark.parametrize(("name", "words", "content", "said"), TORN)
def test_torn_and_foreign_files_are_one_line(toy, program, refused, name, words, content, said):
    for file in ("x.json", "metrics.json"):
        (toy / file).write_text(content)
    verdicts = [*RUN, "label", "p_supports", "p_refutes", "p_nei"]
    tsv(toy / "v.tsv", verdicts, "c3|0001|1|1|NEI|0|x|1")
    tsv(toy / "torn/claims.x.tsv", ["claim_id", "claim", "language"], "1|Ice|../x")
    (toy / "torn/model.safetensors").write_text("torn")
    refused(toy, name, *words.split(), said=said, by=program, kept=".log")
