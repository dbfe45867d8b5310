"""data/convert.py: other people's tables become ours, whole or not at all, losses counted."""
import gzip
import json
import os
import re
import subprocess
import sys

import pytest
from conftest import KEY, ROOT, TOY, cases, facts, load, read

FORMATS = ROOT / "tests" / "formats"  # the toy's run and qrels; TREC's ranks are wrong there

@pytest.fixture
def convert(tmp_path, monkeypatch, capsys):
    """convert(name, content, *words): status and messages, with the output in out/t.tsv."""
    monkeypatch.chdir(tmp_path)
    def run(name, content, *words, out="out/t.tsv"):
        if content is not None:
            content = content.encode() if isinstance(content, str) else content
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
    gold = gold.head(1) if form == "lists" else gold  # CheckThat!: one paper a post
    done = convert("gold.gz", gzip.compress((FORMATS / f"gold.{form}").read_bytes()))
    assert facts(done)["kind"] == "qrels" and ("stance" in done.stderr) == (form != "csv")
    found = read(tmp_path / "out/t.tsv")
    assert found[KEY].values.tolist() == gold[KEY].values.tolist()
    if form == "csv":
        assert found["label"].tolist() == gold["label"].tolist()

def test_trec_ties_are_broken_as_in_trec_eval(convert, rows):
    facts(convert("run", "c Q0 a 1 1.5 x\nc Q0 b 2 1.5 x\nc Q0 d 3 2 x\n"))
    assert [row[1] for row in rows()] == ["d", "b", "a"]
    # equal in single precision, so the later id is first
    facts(convert("run", "c Q0 a 1 .1234567892 x\nc Q0 b 2 .1234567891 x\n"))
    assert [row[1:3] for row in rows()] == [["b", "1"], ["a", "2"]]
    facts(convert("run", "c Q0 a 1 .12345689 x\nc Q0 b 2 .12345678 x\n"))
    assert [row[1] for row in rows()] == ["a", "b"]

def test_rows_of_negative_relevance_are_not_judged(convert, rows):
    done = convert("gold", "c 0 a 1\nc 0 b -1\nc 0 d 0\n")
    assert facts(done)["rows"] == 2 and "1 rows of relevance below 0: not judged" in done.stderr
    assert rows() == [["c", "a", "SUPPORTS"], ["c", "d", "NEI"]]

@pytest.mark.parametrize(("text", "wanted", "warned"), cases("tables.tsv"))
def test_quotation_marks_and_white_space(tmp_path, convert, text, wanted, warned):
    """tables.tsv: | is a tab, ; the end of a line; wanted: the rows, with blanks between fields."""
    data = text.replace("|", "\t").replace(";", "\n") + "\n"
    done = convert("t", "\ufeff" + data)
    assert done.returncode == 0, done.stderr
    columns = (tmp_path / "out/t.tsv").read_text("utf-8").split("\n")[0].split("\t")
    table = load("02_retrieve.py").read_table("out/t.tsv", columns).astype(str)  # as scripts do
    assert [" ".join(row) for row in table.values] == wanted.split(";")
    assert warned in done.stderr and bool(warned) == ("warning" in done.stderr)

def test_a_text_is_one_line_in_nfc(tmp_path, convert):
    facts(convert("c.csv", 'claim_id,claim\r\n7,"\t\r\nCafe\u0301\u2028 \u00a0is  open"\r\n'))
    assert (tmp_path / "out/t.tsv").read_bytes().decode() == "claim_id\tclaim\n7\tCafé is open\n"

@pytest.mark.parametrize(("columns", "kind", "wanted"), [
    ("rank=position", "run", ["c", "a", "1", "2"]),
    ("label=stance", "qrels", ["c", "a", "REFUTES"])])
def test_named_columns_tell_what_a_table_of_papers_is(convert, rows, columns, kind, wanted):
    text = "post_id,cord_uid,position,score,stance\nc,a,1,2,Refutes\n"
    done = convert("t.csv", text, "--columns", columns)
    assert facts(done)["kind"] == kind and rows() == [wanted]

def test_decimal_commas_of_a_spreadsheet_are_points(convert, rows):
    text = "claim_id;abstract_id;rank;score\nc;1,5;1;0,95\nc;b;2;-1,5E-03\nc;d;3;-2\n"
    done = convert("r.csv", text)
    assert rows() == [["c", "1,5", "1", "0.95"], ["c", "b", "2", "-1.5E-03"], ["c", "d", "3", "-2"]]
    assert "2 fields of score with a decimal comma" in done.stderr
    done = convert("r.csv", 'claim_id,abstract_id,rank,score\nc,a,1,"1,234"\n')
    assert done.returncode == 2 and "score is not a finite number" in done.stderr

@pytest.mark.parametrize("encoded", [
    lambda text: gzip.compress(text.encode()), lambda text: text.encode("utf-16"),
    lambda text: text.replace("\n", "\r").encode(), lambda text: text.replace("\t", ";").encode()])
def test_gzip_utf_16_old_line_breaks_and_semicolons_are_read(convert, rows, encoded):
    facts(convert("c.tsv", encoded("claim_id\tclaim\n1\tä\n2\tb\n")))
    assert rows() == [["1", "ä"], ["2", "b"]]

def test_labels_in_other_spellings_and_unlabelled_pairs(convert, rows):
    spelt = "Support,ENTAILMENT,refuted,Contradiction,not enough_info,Neutral,".split(",")
    lines = [f"c,{place},{label}\n" for place, label in enumerate(spelt)]
    done = convert("pool.csv", "claim_id,abstract_id,label\n" + "".join(lines))
    assert "1 rows without a label" in done.stderr
    assert [row[2] for row in rows()] == ["SUPPORTS"] * 2 + ["REFUTES"] * 2 + ["NEI"] * 2

def test_verdicts_keep_their_probabilities(tmp_path, convert):
    text = ("claim_id,rank,abstract_id,label,p_supports,p_refutes,p_nei,note\n"
            "c,2,b,nei,.1,.2,.7,x\nc,1,a,Supports,\".8\n\",.1,.1,x\n")
    assert facts(convert("v.csv", text))["kind"] == "verdicts"
    assert (tmp_path / "out/t.tsv").read_text() == (
        "claim_id\tabstract_id\trank\tscore\tlabel\tp_supports\tp_refutes\tp_nei\n"
        "c\ta\t1\t-1.0\tSUPPORTS\t.8\t.1\t.1\nc\tb\t2\t-2.0\tNEI\t.1\t.2\t.7\n")

def test_claims_keep_their_language(tmp_path, convert):
    done = convert("c.csv", "post_id,lang,tweet_text\n7,de,Meere\n", "--columns", "language=lang")
    assert facts(done)["kind"] == "claims" and not done.stderr
    assert (tmp_path / "out/t.tsv").read_text() == "claim_id\tclaim\tlanguage\n7\tMeere\tde\n"

def test_columns_of_other_names_are_named_in_the_advice_and_read(convert, rows):
    text = "Claim_ID,text,label\n7,Seas rise,x\n"
    done = convert("c.csv", text)
    named = re.search(r"--columns (\S+)", done.stderr)[1]
    assert done.returncode == 2 and named == "claim_id=Claim_ID,claim=text"
    for kind in ("verdicts", "run", "qrels", "claims"):
        assert f"{kind}: claim_id, " in done.stderr
    assert facts(convert("c.csv", text, "--columns", named))["kind"] == "claims"
    assert rows() == [["7", "Seas rise"]]
    qrels = "query-id\tcorpus-id\tscore\n1\td\t2\n"
    facts(convert("q.tsv", qrels, "--columns",
                  "claim_id=query-id,abstract_id=corpus-id,relevance=score"))
    assert rows() == [["1", "d", "SUPPORTS"]]
    for named, said in (("claim=tweet", "no column tweet"), ("text=claim", "not OURS=THEIRS"),
                        ("claim", "not OURS=THEIRS"), ("claim_id=text", "no known table")):
        done = convert("c.csv", text, "--columns", named)
        assert done.returncode == 2 and said in done.stderr

def test_the_output_is_whole_has_provenance_and_is_up_to_date(tmp_path, convert):
    done = convert("c.csv", "claim_id,claim\n 1,b\n1,b\n")
    out, meta = tmp_path / "out/t.tsv", tmp_path / "out/t.tsv.meta.json"
    made = json.loads(meta.read_text())
    assert sorted(os.listdir(tmp_path / "out")) == ["t.tsv", "t.tsv.meta.json"]
    assert made["rows"] == 1 and len(made["inputs"]["c.csv"]) == 64 and made["command"]
    assert made["warnings"] == done.stderr.splitlines() and "1 duplicate rows" in done.stderr
    out.write_text("mine")
    again = convert("c.csv", None)  # with the same warnings, and without touching the file
    changed = "warning: out/t.tsv: its bytes have changed since it was made; --force makes it again"
    assert "up to date: out/t.tsv" in again.stdout
    assert again.stderr == f"{done.stderr}{changed}\n" and out.read_text() == "mine"
    facts(convert("c.csv", None, "--force"))
    assert convert("c.csv", None).stderr == done.stderr
    for change in (lambda: convert("c.csv", None, "--force"),
                   lambda: convert("c.csv", "claim_id,claim\n1,b\n"),
                   lambda: meta.write_text("[" * 100_000) and convert("c.csv", None),
                   lambda: meta.unlink() or convert("c.csv", None)):
        out.write_text("mine")
        assert "made" in facts(change()) and out.read_text() == "claim_id\tclaim\n1\tb\n"

def test_provenance_never_describes_other_bytes(tmp_path, convert, monkeypatch):
    facts(convert("c.csv", "claim_id,claim\n1,a\n"))
    def full(*_, **__):
        raise OSError(28, "No space left on device", "x")
    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.write_text", full)  # of the provenance
        assert convert("c.csv", "claim_id,claim\n1,b\n").returncode == 2
    assert os.listdir(tmp_path / "out") == ["t.tsv"]
    facts(convert("c.csv", None))
    (tmp_path / "out/t.tsv").unlink()
    assert "made" in facts(convert("c.csv", None)) and (tmp_path / "out/t.tsv").exists()

@pytest.mark.parametrize(("name", "text", "said"), cases("bad_formats.tsv"))
def test_bad_tables_are_refused_by_line(tmp_path, convert, contents, name, text, said):
    """bad_formats.tsv: | is a tab, ; the end of a line, \\x.. a byte."""
    text = text.replace("|", "\t").replace(";", "\n").encode() + b"\n" * bool(text)
    text = re.sub(rb"\\x(..)", lambda byte: bytes.fromhex(byte[1].decode()), text)
    (tmp_path / name).write_bytes(text)
    before = contents(tmp_path)
    done = convert(name, None)
    assert done.returncode == 2 and contents(tmp_path) == before
    errors = [line for line in done.stderr.splitlines() if not line.startswith("warning: ")]
    assert len(errors) == 1 and errors[0].startswith(f"error: {name}") and said in errors[0]
    assert "\x1b" not in done.stderr

def test_its_input_a_folder_and_a_missing_file_are_refused(tmp_path, convert):
    (tmp_path / "folder").mkdir()
    for name, out, said in (("c.csv", "c.csv", "another --out"), ("c.csv", "folder", "folder"),
                            ("none", "x", "No such file"), ("\x1b[1m", "x", "?[1m: No such file")):
        done = convert(name, "claim_id,claim\n1,b\n" if name == "c.csv" else None, out=out)
        assert done.returncode == 2 and said in done.stderr
        assert len(done.stderr.splitlines()) == 1 and "\x1b" not in done.stderr
