"""The block of helpers that all scripts share: tables, provenance, outputs, the command line."""

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from conftest import CLAIMS, LABELLED, ROOT, RUN, cases, cells, facts, kill_before, load, tsv

SCRIPT = "02_retrieve.py"
KIT = load(SCRIPT)
TASK = {"arguments": {"k": 60}, "inputs": {}}
ARGS = SimpleNamespace(job="fuse", k=60, force=False, out="a", device=None)


@pytest.fixture
def work(tmp_path, monkeypatch):
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(capsys, function, *args, **known):
    with pytest.raises(SystemExit) as end:
        function(*args, **known)
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
    return error


# ---------------------------------------------------------------- Reading
def test_ids_are_strings_and_claims_lose_the_quotation_marks_of_pandas(tmp_path):
    path = tmp_path / "a.tsv"
    claims = {"007": 'says "no"', "NA": '"', "3": '""', "4": '"cooling"', "5": '"A" "B"', "6": "NA"}
    pd.DataFrame(claims.items(), columns=CLAIMS).to_csv(path, sep="\t", index=False)
    assert dict(KIT.read_table(path, CLAIMS).values) == claims
    claims = {"0": '"open', "1": 'Polar "bears', "2": '"Ice" melts'}
    tsv(path, CLAIMS, claims.items())
    assert dict(KIT.read_table(path, CLAIMS).values) == claims
    path.write_bytes(b"\xef\xbb\xbfclaim_id\tclaim\r\n\r\n1\tice\r\n")  # as Windows saves it
    assert dict(KIT.read_table(path, CLAIMS).values) == {"1": "ice"}


def test_a_run_is_sorted_by_claim_and_rank_and_has_numbers(tmp_path):
    path = tmp_path / "a.tsv"
    tsv(path, LABELLED, "b|x|2.0|1e-1|NEI; a|x|1.0|0.3|NEI; b|y|1.0|2|REFUTES")
    found = KIT.read_table(path, RUN, label=["NEI", "REFUTES"])
    rows = [["b", "y", 1, 2.0, "REFUTES"], ["b", "x", 2, 0.1, "NEI"], ["a", "x", 1, 0.3, "NEI"]]
    assert found.values.tolist() == rows and found["rank"].dtype.kind == "i"
    tsv(path, RUN, [])
    assert KIT.read_table(path, RUN).empty


@pytest.mark.parametrize("text, said", cases("bad_tables.tsv"))
def test_bad_tables_are_refused_by_line(capsys, tmp_path, text, said):
    """bad_tables.tsv: what a.tsv holds (| is a tab, ; the end of a line), a part of the error."""
    path = tmp_path / "a.tsv"
    path.write_text(text.replace("|", "\t").replace(";", "\n"))
    columns = CLAIMS
    known = {}
    if "rank" in text:
        columns = RUN
        known = {"abstract_id": ["x", "y"]}
    assert said in refusal(capsys, KIT.read_table, path, columns, **known)


def test_the_text_of_fields_that_are_no_texts():
    sentences = {"title": np.nan, "abstract": ["Ice melts.", None, " Sea rises. "]}
    assert KIT.text_of(sentences) == "Ice melts. Sea rises."
    assert KIT.text_of({"title": 1984, "abstract": None}) == "1984"
    assert KIT.text_of({}) == ""


def test_a_corpus_keeps_its_order_and_bad_lines_are_refused(capsys, tmp_path):
    path = tmp_path / "c.jsonl"
    good = '{"abstract_id": 7, "abstract": "ice", "year": 1}\n{"abstract_id": "a", "title": "b"}\n'
    path.write_text(good)
    found = KIT.read_corpus(path)
    assert list(found) == ["7", "a"] and found["7"]["year"] == 1 and found["a"]["title"] == "b"
    ids = ("null", '""', '"a\\tb"', '"a\\nb"', '"7"', '"\xe9"')
    lines = [f'{{"abstract_id": {text}}}' for text in ids]
    for line in ("[]", "{", '{"abstract": ""}', *lines):
        path.write_bytes(good.encode() + line.encode("latin-1"))
        assert f"{path}:3: " in refusal(capsys, KIT.read_corpus, path)


# ---------------------------------------------------------------- Outputs
def test_digests_are_of_files_and_of_what_is_loaded_from_folders(tmp_path):
    model = tmp_path / "model"
    (model / "part").mkdir(parents=True)
    (model / "part" / "a").write_bytes(b"one")
    (model / "b").write_bytes(b"two")
    assert KIT.digest(model / "b") == hashlib.sha256(b"two").hexdigest()
    both = hashlib.sha256(b"twoone").hexdigest()  # b, part/a
    assert KIT.digest(model) == both
    (tmp_path / "model.meta.json").write_bytes(b"{}")
    (model / ".cache/huggingface").mkdir(parents=True)  # as hf download leaves it
    for name in (".cache/huggingface/b.lock", ".gitattributes", "README.md"):
        (model / name).write_text("x")
    assert KIT.digest(f"{model}/") == both
    (model / "part/README.md").write_text("x")  # a file of a model may have this name
    assert KIT.digest(model) != both


def test_a_task_is_arguments_and_inputs_and_a_hub_model_is_a_name(work):
    Path("x").write_text("x")
    task = KIT.task_of(ARGS, "x", models=["BAAI/bge-m3"])
    assert task == {"arguments": {"job": "fuse", "k": 60}, "inputs": {"x": KIT.digest("x")}}


def test_an_output_appears_whole_and_the_same_task_is_not_done_again(capsys, work, monkeypatch):
    out = Path("sub/out")
    meta = Path("sub/out.meta.json")
    monkeypatch.setattr(sys, "argv", ["script.py"])

    def is_made(*others, task=TASK, args=ARGS):
        return KIT.up_to_date(args, task, out, *others)

    Path("script.py").write_text("1")
    assert not is_made()
    with pytest.raises(ValueError), KIT.written(out, TASK) as new:
        new.write_text("half")
        raise ValueError
    assert not out.exists()
    for text in ("a", "b"):
        with KIT.written(out, TASK, rows=1) as new:
            new.write_text(text)
        made = json.loads(meta.read_text())
        assert made["sha256"] == hashlib.sha256(text.encode()).hexdigest()
        assert out.read_text() == text and made["rows"] == 1 and not new.exists()
        assert made["command"] == ["script.py"] and made["script"] == KIT.digest("script.py")
    Path("script.py").write_text("2")  # the kit is made to be edited
    assert is_made()
    assert capsys.readouterr().out == "up to date: sub/out (--force makes it again)\n"
    assert not is_made(task=TASK | {"inputs": {"x": "1"}})
    assert not is_made("sub/other") and not is_made(args=SimpleNamespace(force=True))
    for path, text in ((out, "c"), (meta, ""), (meta, '{"arguments": {"k"')):
        whole = path.read_text()
        path.write_text(text)  # of the same size, or torn
        assert not is_made()
        path.write_text(whole)
    assert is_made()


def test_two_processes_may_write_one_output(work):
    """Each writes half, waits for the other, and writes the rest; one of them comes last."""
    script = f"""
import pathlib, runpy, sys, time
kit = runpy.run_path({str(ROOT / SCRIPT)!r})
own, other = sys.argv[1:]
with kit["written"]("out.tsv", {{"inputs": own}}) as new:
    new.write_text(own)
    pathlib.Path(own).touch()
    while not pathlib.Path(other).exists():
        time.sleep(0.01)
    new.write_text(own * 1000)
"""
    Path("write.py").write_text(script)
    words = [[sys.executable, "write.py", *names] for names in ("ab", "ba")]
    started = [subprocess.Popen(command) for command in words]
    assert [process.wait() for process in started] == [0, 0]
    made = json.loads(Path("out.tsv.meta.json").read_text())
    assert Path("out.tsv").read_text() == made["inputs"] * 1000
    assert len(list(work.iterdir())) == 5  # a, b, out.tsv and its sidecar, the script


def test_a_folder_whose_replacement_a_kill_has_stopped_may_be_written_again(capsys, work):
    """test_safe.py has what is never replaced."""
    Path("mine").mkdir()
    Path("mine.meta.json").write_text("{}")
    assert not KIT.up_to_date(ARGS, TASK, "mine", is_folder=True)
    said = "error: mine: not made by this script"
    assert said in refusal(capsys, KIT.up_to_date, ARGS, TASK, "mine/")


def test_kill_9_between_output_and_sidecar_vouches_for_nothing(toy, killed, call):
    words = "fuse work/demo/test/hybrid.tsv --out a.tsv"
    assert killed(SCRIPT, words, cwd=toy, edits=kill_before("new.replace(path)"))
    assert json.loads((toy / "a.tsv.meta.json").read_text()) == {}
    assert facts(call(SCRIPT, words, cwd=toy))["made"]


# ---------------------------------------------------------------- Command line
NUMBERS = """count|1 7|0 -1 1.5 x nan; count_or_0|0 7|-1  1e3; amount|0 0.5 2e-5|-1 nan x;
    share|0 0.5 1|-0.1 1.1 nan inf x"""


@pytest.mark.parametrize("kind, taken, refused", cells(NUMBERS))
def test_a_number_out_of_its_range_is_refused(kind, taken, refused):
    numbers = getattr(KIT, kind)
    assert [numbers(text) for text in taken.split()] == [float(text) for text in taken.split()]
    for text in refused.split(" "):
        with pytest.raises(argparse.ArgumentTypeError, match="is no number from"):
            numbers(text)


def test_messages_are_one_line_without_passwords(capsys):
    KIT.warn("http://me:secret@host/v1", "a\n b")
    assert capsys.readouterr().err == "warning: http://***@host/v1: a b\n"


def test_work_follows_data_and_the_first_job_is_the_default(work, monkeypatch):
    Path("data/other").mkdir(parents=True)

    def parsed(words):
        monkeypatch.setattr(sys, "argv", [SCRIPT, *words.split()])
        return KIT.command_line({KIT.retrieve: KIT.add_retrieve, KIT.fuse: KIT.add_fuse})

    args = parsed("--data data/other/ --top-k 7")
    assert (args.job, args.work, args.top_k) == ("retrieve", "work/other", 7)
    assert args.claims == "data/other//claims.test.tsv" and args.out == "work/other/test"
    assert parsed("fuse a.tsv --work w").out == "w/test/fused.tsv"


@pytest.mark.parametrize(
    "error, said",
    [
        (OSError(28, "No space", "a.tsv"), "error: retrieve: [Errno 28] No space: 'a.tsv'"),
        (ImportError("No module named 'peft'"), "error: retrieve: No module named 'peft'"),
    ],
)
def test_faults_of_the_machine_are_one_line(capsys, error, said):
    def fault(_):
        raise error

    args = SimpleNamespace(function=fault, job="retrieve", data="data/demo")
    assert said in refusal(capsys, KIT.run_job, args)
