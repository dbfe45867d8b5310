"""data/convert.py: other people's tables become ours, whole or not at all, losses counted."""

import re
import subprocess
import sys

import pytest
from conftest import KEY, ROOT, TOY, cases, facts, jsonl, load, read, records

FORMATS = ROOT / "tests" / "formats"  # the toy's run and qrels; TREC's ranks are wrong there


@pytest.fixture
def convert(tmp_path, monkeypatch, capsys):
    """convert(name, content, *words): status and messages, with the output in out/t.tsv."""
    monkeypatch.chdir(tmp_path)

    def run(name, content, *words, out="out/t.tsv"):
        if content is not None:
            if isinstance(content, str):
                content = content.encode()
            (tmp_path / name).write_bytes(content)
        monkeypatch.setattr(sys, "argv", ["convert.py", name, "--out", out, *words])
        capsys.readouterr()
        status = 0
        try:
            load("data/convert.py").main()
        except SystemExit as end:
            status = end.code
        return subprocess.CompletedProcess(words, status, *capsys.readouterr())

    return run


@pytest.fixture
def rows(tmp_path):
    """rows(): the rows of the output, as lists of fields."""

    def read_output():
        lines = (tmp_path / "out/t.tsv").read_text("utf-8").split("\n")[1:-1]
        return [line.split("\t") for line in lines]

    return read_output


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


@pytest.mark.parametrize(
    ("name", "lines", "columns"),
    [
        (
            "p.csv",
            'pmid,heading,text,year\n1,T,"A.\nB.",2001\n',
            "abstract_id=pmid,abstract=text,title=heading",
        ),
        (
            "beir.jsonl",
            {"_id": 1, "title": "T", "text": "A. B.", "year": 2001, "metadata": {}},
            None,
        ),
        (
            "scifact.jsonl",
            {"doc_id": 1, "title": "T", "abstract": ["A.", "B."], "year": 2001},
            None,
        ),
    ],
)
def test_a_corpus_is_read_in_three_shapes(tmp_path, convert, name, lines, columns):
    if isinstance(lines, dict):
        jsonl(tmp_path / name, lines)
        lines = None
    words = []
    if columns:
        words = ["--columns", columns]
    done = convert(name, lines, *words, out="out/corpus.jsonl")
    assert facts(done)["kind"] == "corpus"
    (record,) = records(tmp_path / "out/corpus.jsonl")
    assert record.pop("abstract").split() == ["A.", "B."]
    assert str(record.pop("year")) == "2001"
    assert record == {"abstract_id": "1", "title": "T"}
    assert ("1 fields metadata" in done.stderr) == (name == "beir.jsonl")
    found = load("02_retrieve.py").read_corpus("out/corpus.jsonl")  # as scripts read it
    assert list(found) == ["1"]


def test_claims_with_evidence_become_claims_and_qrels(tmp_path, convert):
    jsonl(
        tmp_path / "claims_dev.jsonl",
        {
            "id": 7,
            "claim": "Seas\nrise",
            "cited_doc_ids": [1, 2],
            "evidence": {
                "1": [{"sentences": [0], "label": "SUPPORT"}],
                "3": [{"label": "CONTRADICT"}],
            },
        },
        {"id": 8, "claim": "It is cold", "cited_doc_ids": [], "evidence": {}},
    )
    made = facts(convert("claims_dev.jsonl", None, out="claims.dev.tsv"))["made"]
    claims, qrels = [read(tmp_path / path).values.tolist() for path in made]
    assert claims == [["7", "Seas rise"], ["8", "It is cold"]]
    assert qrels == [["7", "1", "SUPPORTS"], ["7", "2", "NEI"], ["7", "3", "REFUTES"]]
    jsonl(tmp_path / "bad.jsonl", {"id": 7, "claim": "C", "evidence": {"1": [{"stance": "x"}]}})
    done = convert("bad.jsonl", None, out="claims.x.tsv")
    assert done.returncode == 2 and "bad.jsonl:1: evidence is not" in done.stderr


def test_queries_and_qrels_of_beir(convert, rows, tmp_path):
    jsonl(tmp_path / "queries.jsonl", {"_id": "1", "text": "Seas rise", "metadata": {}})
    assert facts(convert("queries.jsonl", None))["kind"] == "claims"
    assert rows()[0][1] == "Seas rise"
    facts(convert("q.tsv", "query-id\tcorpus-id\tscore\n1\td\t2\n"))
    assert rows() == [["1", "d", "SUPPORTS"]]


def test_trec_ties_are_broken_as_in_trec_eval(convert, rows):
    facts(convert("run", "c Q0 a 1 1.5 x\nc Q0 b 2 1.5 x\nc Q0 d 3 2 x\n"))
    assert [row[1] for row in rows()] == ["d", "b", "a"]
    # equal in single precision, so the later id is first
    facts(convert("run", "c Q0 a 1 .1234567892 x\nc Q0 b 2 .1234567891 x\n"))
    assert [row[1:3] for row in rows()] == [["b", "1"], ["a", "2"]]
    facts(convert("run", "c Q0 a 1 .12345689 x\nc Q0 b 2 .12345678 x\n"))
    assert [row[1] for row in rows()] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('claim_id|claim;1|"a;2|b"', [["1", '"a'], ["2", 'b"']]),  # no mark swallows a row
        ('claim_id|claim;1|"a ""b"""', [["1", 'a "b"']]),  # as pandas quotes
        ('claim_id|claim|note;1|"a;b"|x', [["1", "a b"]]),  # as spreadsheets do
        ("|claim_id|claim||;0|1|a|x|", [["1", "a"]]),  # an index, and a column without a name
        ("\ufeffclaim_id|claim; 1| a\u00a0 b \r;;2|c", [["1", "a b"], ["2", "c"]]),
    ],
)
def test_quotation_marks_and_white_space(convert, text, wanted):
    """| is a tab, ; the end of a line."""
    facts(convert("t", text.replace("|", "\t").replace(";", "\n") + "\n"))
    found = load("02_retrieve.py").read_table("out/t.tsv", ["claim_id", "claim"])  # as scripts do
    assert found.values.tolist() == wanted


def test_labels_in_other_spellings_and_unlabelled_pairs(convert, rows):
    spelt = "Support,ENTAILMENT,refuted,Contradiction,not enough_info,Neutral,silent,".split(",")
    lines = "".join(f"c,{abstract_id},{label}\n" for abstract_id, label in enumerate(spelt))
    done = convert("t.csv", f"claim_id,abstract_id,label\n{lines}", "--labels", "NEI=silent")
    assert "1 rows without a label" in done.stderr
    assert [row[2] for row in rows()] == ["SUPPORTS"] * 2 + ["REFUTES"] * 2 + ["NEI"] * 3


def test_verdicts_keep_their_probabilities(tmp_path, convert):
    text = (
        "claim_id;rank;abstract_id;label;p_supports;p_refutes;p_nei;note\n"
        "c;2;b;nei;.1;.2;.7;x\nc;1;a;Supports;.8;.1;.1;x\n"
    )
    done = convert("v.csv", text)
    assert facts(done)["kind"] == "verdicts" and "no use in verdicts): note" in done.stderr
    assert (tmp_path / "out/t.tsv").read_text() == (
        "claim_id\tabstract_id\trank\tscore\tlabel\tp_supports\tp_refutes\tp_nei\n"
        "c\ta\t1\t-1.0\tSUPPORTS\t.8\t.1\t.1\nc\tb\t2\t-2.0\tNEI\t.1\t.2\t.7\n"
    )


def test_columns_of_other_names_are_named(tmp_path, convert, rows):
    text = "Claim_ID,lang,text,label\n7,de,Seas rise,x\n"
    done = convert("c.csv", text)
    named = re.search(r"--columns (\S+)", done.stderr)[1]
    assert done.returncode == 2 and named == "claim_id=THEIRS,claim=THEIRS"
    named = "claim_id=Claim_ID,claim=text,language=lang"
    assert facts(convert("c.csv", text, "--columns", named))["kind"] == "claims"
    assert (tmp_path / "out/t.tsv").read_text().startswith("claim_id\tclaim\tlanguage\n7\t")
    for named, said in (
        ("claim=tweet", "no column tweet"),
        ("claim", "is not of the form OURS=THEIRS"),
        ("claim_id=text", "no known table"),
    ):
        done = convert("c.csv", text, "--columns", named)
        assert done.returncode == 2 and said in done.stderr


@pytest.mark.parametrize(("name", "text", "said"), cases("bad_formats.tsv"))
def test_bad_tables_are_refused_by_line(tmp_path, convert, contents, name, text, said):
    """bad_formats.tsv: | is a tab, ; the end of a line, \\x.. a byte."""
    if text:
        text += ";"
    content = text.replace("|", "\t").replace(";", "\n").encode()
    content = re.sub(rb"\\x(..)", lambda match: bytes.fromhex(match[1].decode()), content)
    (tmp_path / name).write_bytes(content)
    before = contents(tmp_path)
    done = convert(name, None)
    assert done.returncode == 2 and contents(tmp_path) == before
    errors = [line for line in done.stderr.splitlines() if not line.startswith("warning: ")]
    assert len(errors) == 1 and said in errors[0]
    assert "\x1b" not in done.stderr
