"""data/convert.py: other people's tables become ours, whole or not at all, losses counted."""

import csv
import gzip
import re
import shlex
import sys
from pathlib import Path

import pytest
from conftest import KEY, ROOT, TOY, cases, cells, end_of, facts, load, read, records

FORMATS = ROOT / "tests" / "formats"  # the toy's run and qrels; TREC's ranks are wrong there
MARKS = str.maketrans("→¶␍", "\t\n\r")


@pytest.fixture
def convert(tmp_path, monkeypatch, capsys):
    """convert(name, content, *words): status and messages, with the output in out/t.tsv."""
    monkeypatch.chdir(tmp_path)

    def run(name, content, *words, out="out/t.tsv", cwd=None):
        if content is not None:
            if isinstance(content, str):
                content = content.encode()
            (tmp_path / name).write_bytes(content)
        monkeypatch.setattr(sys, "argv", ["convert.py", name, "--out", out, *words])
        return end_of(load("data/convert.py").main, capsys)

    return run


@pytest.mark.parametrize("form", ["trec", "csv", "lists"])
def test_other_formats_become_ours(tmp_path, convert, form):
    ranks = ["claim_id", "abstract_id", "rank"]
    wanted = sorted(read(TOY / "hybrid.test.tsv")[ranks].values.tolist())
    done = convert("run", (FORMATS / f"run.{form}").read_bytes())
    assert facts(done)["kind"] == "run" and not done.stderr
    assert sorted(read(tmp_path / "out/t.tsv")[ranks].values.tolist()) == wanted
    gold = read(TOY / "qrels.test.tsv")
    if form == "lists":
        gold = gold.head(1)  # CheckThat!: one paper a post
    done = convert("gold", (FORMATS / f"gold.{form}").read_bytes())
    assert facts(done)["kind"] == "qrels"
    assert ("stance" in done.stderr) == (form != "csv")
    found = read(tmp_path / "out/t.tsv")
    assert found[KEY].values.tolist() == gold[KEY].values.tolist()
    if form == "csv":
        assert found["label"].tolist() == gold["label"].tolist()


@pytest.mark.parametrize("name, text, words, wanted, said", cases("formats/kinds.tsv"))
def test_the_kinds_of_files(convert, name, text, words, wanted, said):
    """kinds.tsv: → is a tab, ¶ the end of a line; what comes out, and the warnings."""
    done = convert(name, text.translate(MARKS), *shlex.split(words))
    kind = facts(done)["kind"]
    assert Path("out/t.tsv").read_text("utf-8") == wanted.translate(MARKS)
    assert re.sub("(?m)^warning: .*?: ", "", done.stderr) == said.translate(MARKS)
    reader = load("02_retrieve.py")  # as scripts read it
    if kind == "corpus":
        assert reader.read_corpus("out/t.tsv")
    elif kind == "claims":
        rows = csv.reader(wanted.translate(MARKS).splitlines(), delimiter="\t")
        found = reader.read_table("out/t.tsv", ["claim_id", "claim"])
        assert found.values.tolist() == list(rows)[1:]
    else:
        assert len(reader.read_table("out/t.tsv", KEY))


def test_claims_with_evidence_become_claims_and_qrels(tmp_path, convert):
    evidence = """{"1": [{"sentences": [0], "label": "SUPPORT"}], "3": [{"label": "CONTRADICT"}]}"""
    text = f"""{{"id": 7, "claim": "Seas\\nrise", "cited_doc_ids": [1, 2], "evidence": {evidence}}}
        {{"id": 8, "claim": "It is cold", "cited_doc_ids": [], "evidence": {{}}}}
        {{"id": 9, "claim": "It is not", "evidence": null}}"""
    made = facts(convert("claims_dev.jsonl", text, out="claims.dev.tsv"))["made"]
    claims, qrels = [read(tmp_path / path).values.tolist() for path in made]
    assert claims == [["7", "Seas rise"], ["8", "It is cold"], ["9", "It is not"]]
    assert qrels == [["7", "1", "SUPPORTS"], ["7", "2", "NEI"], ["7", "3", "REFUTES"]]


PAIRS = "claim_id,claim,abstract_id,abstract,label\n1,Ice melts,7,A study.,SUPPORTS\n"
NAMES = """claims.test.tsv||claims|claim_id→claim¶1→Ice melts¶;
    qrels|--kind claims|claims|claim_id→claim¶1→Ice melts¶;
    corpus.jsonl||corpus|{"abstract_id": "7", "abstract": "A study."}¶;
    qrels.test.tsv||qrels|claim_id→abstract_id→label¶1→7→SUPPORTS¶;
    my.corpus||qrels|claim_id→abstract_id→label¶1→7→SUPPORTS¶;
    claims2.tsv||qrels|claim_id→abstract_id→label¶1→7→SUPPORTS¶"""


@pytest.mark.parametrize("out, words, kind, written", cells(NAMES))
def test_the_name_of_the_output_tells_the_kind(tmp_path, convert, out, words, kind, written):
    done = convert("pairs.csv", PAIRS, *words.split(), out=out)
    assert facts(done)["kind"] == kind
    assert (tmp_path / out).read_text() == written.translate(MARKS)


A_CORPUS = """{"abstract_id": 1, "title": "T", "abstract": "Ice melts.", "year": 2001}
{"abstract_id": 2, "title": null, "abstract": ["Seas", "rise."], "year": 2.5}
"""


def test_several_files_become_one_corpus(tmp_path, convert):
    """The same id and text once, whatever the form of the files; other fields may differ."""
    (tmp_path / "b.csv").write_text("id,abstract,venue\n3,It is cold.,V\n2,Seas  rise.,W\n")
    done = convert("a.jsonl", A_CORPUS, "b.csv", out="corpus.jsonl")
    assert facts(done)["rows"] == 3
    assert done.stderr == "warning: a.jsonl, b.csv: 1 rows that repeat an earlier one: left out\n"
    assert (tmp_path / "corpus.jsonl").read_text().splitlines() == [
        '{"abstract_id": "1", "title": "T", "abstract": "Ice melts.", "year": 2001}',
        '{"abstract_id": "2", "abstract": "Seas rise.", "year": 2.5}',
        '{"abstract_id": "3", "abstract": "It is cold.", "venue": "V"}',
    ]


SEVERAL = """b.csv|corpus.jsonl|b.csv:3: an earlier row for this abstract_id differs: 1;
    c.csv|t.tsv|c.csv: it holds claims, but only a corpus is made of several;
    c.csv|corpus.jsonl|c.csv:1: columns claim_id, claim make no corpus table;
    a.jsonl|a.jsonl|a.jsonl: this command reads it;
    c.csv c.csv|claims|a.jsonl:1: columns abstract_id, title, abstract, year make no"""


@pytest.mark.parametrize("words, out, said", cells(SEVERAL))
def test_several_files_that_make_no_corpus(tmp_path, convert, refused, words, out, said):
    (tmp_path / "a.jsonl").write_text(A_CORPUS)
    (tmp_path / "b.csv").write_text("abstract_id,abstract\n2,Seas rise.\n1,Ice\n")
    (tmp_path / "c.csv").write_text("claim_id,claim\n1,Ice\n")
    refused(tmp_path, "a.jsonl", None, *words.split(), out=out, said=said, by=convert)


def test_empty_texts_are_left_out_of_all_files(tmp_path, convert):
    """The ids of claims, qrels and corpus fit together; without --make-ids, too."""
    text = "claim,abstract,label\nIce,A,NEI\n,B,NEI\nSea, ,NEI\nSun,A,Supports\n"
    done = convert("p.csv", text.replace("\n,", "\nSnow,"), "--make-ids", out="claims.tsv")
    assert facts(done)["rows"] == 4  # one without evidence
    numbered = "claim_id,claim,abstract_id,abstract,label\n"
    for number, row in enumerate(text.splitlines()[1:]):
        claim, abstract, label = row.split(",")
        numbered += f"{number},{claim},{number},{abstract},{label}\n"
    for content, words in ((text, ["--make-ids"]), (numbered, [])):
        found = {}
        for out in ("claims.tsv", "qrels.tsv", "corpus.jsonl"):
            done = convert("p.csv", content, "--drop-empty", *words, out=out)
            assert done.stderr.startswith(
                "warning: p.csv: 1 rows with an empty claim: left out\n"
                "warning: p.csv: 1 rows with an empty abstract: left out\n"
            )
            table = records(Path(out)) if out == "corpus.jsonl" else read(out).to_dict("records")
            found[out] = table
        assert [row["claim"] for row in found["claims.tsv"]] == ["Ice", "Sun"]
        assert {row["abstract"] for row in found["corpus.jsonl"]} == {"A"}
        for column, out in (("claim_id", "claims.tsv"), ("abstract_id", "corpus.jsonl")):
            ids = {str(row[column]) for row in found[out]}
            assert {row[column] for row in found["qrels.tsv"]} == ids


@pytest.mark.parametrize("name", ["c.csv.gz", "c.csv", "c.jsonl.gz", "run"])
def test_gzip_is_read_whatever_the_name(tmp_path, convert, name):
    content = b"claim_id,claim\n1,Caf\xc3\xa9\n"
    if "jsonl" in name:
        content = b'{"claim_id": 1, "claim": "Caf\xc3\xa9"}\n'
    packed = gzip.compress(content)
    assert facts(convert(name, packed))["kind"] == "claims"
    assert (tmp_path / "out/t.tsv").read_text("utf-8") == "claim_id\tclaim\n1\tCafé\n"
    done = convert(name, packed[:-9])
    assert done.returncode == 2 and f"error: {name}: no text in UTF-8 (Compr" in done.stderr
    for damaged in (packed[:10] + b"??" + packed[12:], packed[:-8] + bytes(8)):
        done = convert(name, damaged)
        assert done.returncode == 2 and f"error: {name}: no text in UTF-8 (" in done.stderr


def test_columns_of_other_names_are_named(tmp_path, convert):
    text = "Claim_ID,lang,text,label\n7,de,Seas rise,x\n"
    done = convert("c.csv", text)
    assert re.search(r"--columns (\S+)", done.stderr)[1] == "claim=THEIRS"
    named = "claim_id=Claim_ID,claim=text,language=lang"
    assert facts(convert("c.csv", text, "--columns", named))["kind"] == "claims"
    assert (tmp_path / "out/t.tsv").read_text().startswith("claim_id\tclaim\tlanguage\n7\t")


@pytest.mark.parametrize("name, text, words, said", cases("bad_formats.tsv"))
def test_bad_tables_are_refused_by_line(tmp_path, convert, contents, name, text, words, said):
    """bad_formats.tsv: → is a tab, ¶ the end of a line, \\x.. a byte."""
    content = text.translate(MARKS).encode()
    content = re.sub(rb"\\x(..)", lambda match: bytes.fromhex(match[1].decode()), content)
    (tmp_path / name).write_bytes(content)
    before = contents(tmp_path)
    done = convert(name, None, *shlex.split(words))
    assert done.returncode == 2 and contents(tmp_path) == before
    errors = [line for line in done.stderr.splitlines() if not line.startswith("warning: ")]
    assert len(errors) == 1 and said in errors[0]
    assert "\x1b" not in done.stderr
