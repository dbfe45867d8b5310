"""The block of helpers that all scripts share: tables, provenance, outputs, the command line."""

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from conftest import CLAIMS, LABELLED, ROOT, RUN, cases, facts, kill_before, load, tsv

SCRIPT = "02_retrieve.py"
KIT = load(SCRIPT)
ARGS = SimpleNamespace(job="fuse", k=60, force=False, out="a", device=None)


def refusal(capsys, function, *args, **known):
    with pytest.raises(SystemExit) as end:
        function(*args, **known)
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
    return error


# ---------------------------------------------------------------- Reading
def test_ids_are_strings_and_claims_lose_the_quotation_marks_of_pandas(tmp_path):
    path = tmp_path / "a.tsv"
    claims = ['says "no"', '"', '""', '"cooling"', '"A" and "B"', "NA"]
    table = pd.DataFrame({"claim_id": ["007", "NA", "3", "4", "5", "6"], "claim": claims})
    table.to_csv(path, sep="\t", index=False)
    found = KIT.read_table(path, CLAIMS)
    assert found.values.tolist() == table.values.tolist()
    claims = ['"open', 'Polar "bears', '"Ice" melts']
    tsv(path, CLAIMS, enumerate(claims))
    assert KIT.read_table(path, CLAIMS)["claim"].tolist() == claims
    path.write_bytes(b"\xef\xbb\xbfclaim_id\tclaim\r\n1\tice\r\n")  # as Windows saves it
    assert KIT.read_table(path, CLAIMS).values.tolist() == [["1", "ice"]]


def test_a_run_is_sorted_by_claim_and_rank_and_has_numbers(tmp_path):
    path = tmp_path / "a.tsv"
    tsv(path, LABELLED, "b|x|2|1|NEI; a|x|1|0.3|NEI; b|y|1|2|REFUTES")
    found = KIT.read_table(path, RUN, label=["NEI", "REFUTES"])
    assert found.values.tolist() == [
        ["b", "y", 1, 2.0, "REFUTES"],
        ["b", "x", 2, 1.0, "NEI"],
        ["a", "x", 1, 0.3, "NEI"],
    ]
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


def test_blank_lines_are_skipped_and_ranks_of_floats_are_integers(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("claim_id\tclaim\n\n1\tice\n\n2\tsun\n\n")
    assert KIT.read_table(path, CLAIMS).values.tolist() == [["1", "ice"], ["2", "sun"]]
    tsv(path, RUN, "c|x|1.0|2.5; c|y|2.0|1e-3")  # as pandas may write
    found = KIT.read_table(path, RUN)
    assert found["rank"].tolist() == [1, 2] and found["rank"].dtype.kind == "i"
    assert found["score"].tolist() == pytest.approx([2.5, 0.001])


def test_the_text_of_fields_that_are_no_texts():
    sentences = ["Ice melts.", None, " Sea rises. "]
    for text, record in {
        "ice": {"title": None, "abstract": "ice"},
        "Ice melts. Sea rises.": {"title": float("nan"), "abstract": sentences},
        "1984": {"title": 1984, "abstract": float("nan")},
        "T": {"title": "T"},
        "": {},
    }.items():
        assert KIT.text_of(record) == text


def test_a_corpus_keeps_its_order_and_bad_lines_are_refused(capsys, tmp_path):
    path = tmp_path / "c.jsonl"
    good = '{"abstract_id": 7, "abstract": "ice", "year": 1}\n{"abstract_id": "a", "title": "b"}\n'
    path.write_text(good)
    found = KIT.read_corpus(path)
    assert list(found) == ["7", "a"] and found["7"]["year"] == 1 and found["a"]["title"] == "b"
    ids = ("null", '""', '"a\\tb"', '"a\\nb"', '"7"', '"\xe9"', '"\\ud83d"')
    lines = [f'{{"abstract_id": {text}}}' for text in ids]
    half = '{"abstract_id": "9", "abstract": "\\ud83d"}'  # of a surrogate pair
    for line in ("[]", "{", '{"abstract": ""}', half, *lines):
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


def test_a_task_is_arguments_and_inputs_and_a_hub_model_is_a_name(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x").write_text("x")
    task = KIT.task_of(ARGS, "x", models=["BAAI/bge-m3"])
    assert task == {"arguments": {"job": "fuse", "k": 60}, "inputs": {"x": KIT.digest("x")}}
    assert "nowhere: not found; run the stage" in refusal(capsys, KIT.task_of, ARGS, "nowhere")


def test_an_output_appears_whole_and_the_same_task_is_not_done_again(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text("1")
    monkeypatch.setattr(sys, "argv", ["script.py"])
    task = {"arguments": {"k": 60}, "inputs": {}}
    assert not KIT.up_to_date(ARGS, task, "sub/out")
    with pytest.raises(ValueError), KIT.written("sub/out", task) as new:
        new.write_text("half")
        raise ValueError
    assert not Path("sub/out").exists()
    for text in ("a", "b"):
        with KIT.written("sub/out", task, rows=1) as new:
            new.write_text(text)
        made = json.loads(Path("sub/out.meta.json").read_text())
        assert made["sha256"] == hashlib.sha256(text.encode()).hexdigest()
        assert Path("sub/out").read_text() == text and made["rows"] == 1 and not new.exists()
        assert made["command"] == ["script.py"] and made["script"] == KIT.digest("script.py")
    assert KIT.up_to_date(ARGS, task, "sub/out")
    assert capsys.readouterr().out == "up to date: sub/out (--force makes it again)\n"
    Path("script.py").write_text("2")  # the kit is made to be edited
    assert KIT.up_to_date(ARGS, task, "sub/out")
    assert not KIT.up_to_date(ARGS, task | {"inputs": {"x": "1"}}, "sub/out")
    assert not KIT.up_to_date(ARGS, task, "sub/out", "sub/other")
    assert not KIT.up_to_date(SimpleNamespace(force=True), task, "sub/out")
    Path("sub/out").write_text("c")  # of the same size
    assert not KIT.up_to_date(ARGS, task, "sub/out")


@pytest.mark.parametrize("torn", ["", '{"arguments": {"k"'])
def test_an_output_with_a_torn_sidecar_counts_as_not_made(tmp_path, monkeypatch, torn):
    monkeypatch.chdir(tmp_path)
    Path("a").write_text("whole")
    Path("a.meta.json").write_text(torn)
    task = {"arguments": {"k": 60}, "inputs": {}}
    assert not KIT.up_to_date(ARGS, task, "a")


def test_two_processes_may_write_one_output(tmp_path, monkeypatch):
    """Each writes half, waits for the other, and writes the rest; one of them comes last."""
    monkeypatch.chdir(tmp_path)
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
    assert len(list(tmp_path.iterdir())) == 5  # a, b, out.tsv and its sidecar, the script


@pytest.mark.parametrize("name", ["mine", "mine/"])
def test_what_others_have_made_is_not_replaced(capsys, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("mine/file").write_text("x")

    def refuses(out, inputs=(), **options):
        args = SimpleNamespace(force=True)
        error = refusal(capsys, KIT.up_to_date, args, {"inputs": inputs}, out, **options)
        assert error.startswith(f"error: {Path(out)}: not made by this script")

    for is_folder in (True, False):
        refuses(name, is_folder=is_folder)
    refuses("mine/file", is_folder=True)
    refuses("./mine/file", ["mine/file"])
    refuses("/dev/null")
    Path("mine.meta.json").write_text("{}")  # a kill has left it while an output was replaced
    refuses(name)
    args = SimpleNamespace(force=True)
    assert not KIT.up_to_date(args, {"inputs": []}, name, is_folder=True)
    assert not KIT.up_to_date(args, {"inputs": []}, "mine/file")  # it may be written again
    assert Path("mine/file").read_text() == "x"


def test_a_folder_of_the_kit_is_replaced_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        with KIT.written("index", {}) as new:
            new.mkdir()
            (new / name).touch()
    assert [path.name for path in Path("index").iterdir()] == ["b"]


def test_kill_9_between_output_and_sidecar_vouches_for_nothing(toy, killed, call):
    words = "fuse work/demo/test/hybrid.tsv --out a.tsv"
    facts(call(SCRIPT, words, cwd=toy))
    whole = (toy / "a.tsv").read_bytes()
    kill = kill_before("new.replace(path)")
    assert killed(SCRIPT, f"{words} --force", cwd=toy, edits=kill)
    assert json.loads((toy / "a.tsv.meta.json").read_text()) == {}
    done = call(SCRIPT, words, cwd=toy)
    assert facts(done)["made"] and (toy / "a.tsv").read_bytes() == whole


# ---------------------------------------------------------------- Command line
@pytest.mark.parametrize(
    ("kind", "taken", "refused"),
    [
        ("count", ["1", "7"], ["0", "-1", "1.5", "x", "nan"]),
        ("count_or_0", ["0", "7"], ["-1", "1e3", ""]),
        ("amount", ["0", "0.5", "2e-5"], ["-1", "nan", "x"]),
        ("share", ["0", "0.5", "1"], ["-0.1", "1.1", "nan", "inf", "x"]),
    ],
)
def test_a_number_out_of_its_range_is_refused(kind, taken, refused):
    numbers = getattr(KIT, kind)
    assert [numbers(text) for text in taken] == [float(text) for text in taken]
    for text in refused:
        with pytest.raises(argparse.ArgumentTypeError, match="is no number from"):
            numbers(text)


def test_messages_are_one_line_without_passwords(capsys):
    KIT.warn("http://me:secret@host/v1", "a\n b")
    assert capsys.readouterr().err == "warning: http://***@host/v1: a b\n"


def test_work_follows_data_and_the_first_job_is_the_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data/other").mkdir(parents=True)
    jobs = {KIT.retrieve: KIT.add_retrieve, KIT.fuse: KIT.add_fuse}
    monkeypatch.setattr(sys, "argv", [SCRIPT, "--data", "data/other/", "--top-k", "7"])
    args = KIT.command_line(jobs)
    assert (args.job, args.work, args.top_k) == ("retrieve", "work/other", 7)
    assert args.claims == "data/other//claims.test.tsv" and args.out == "work/other/test"
    monkeypatch.setattr(sys, "argv", [SCRIPT, "fuse", "a.tsv", "--work", "w"])
    assert KIT.command_line(jobs).out == "w/test/fused.tsv"


def test_help_shows_the_defaults_that_there_are(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [SCRIPT, "retrieve", "--help"])
    with pytest.raises(SystemExit):
        KIT.command_line({KIT.retrieve: KIT.add_retrieve})
    shown = " ".join(capsys.readouterr().out.split())
    assert "in a run (default: 100)" in shown and "(default: {data}/corpus.jsonl)" in shown
    assert "(default: all that are in --index) --restrict" in shown
    assert "(default: )" not in shown and "None)" not in shown and "False)" not in shown


@pytest.mark.parametrize(
    "error, said",
    [
        (
            OSError(28, "No space left on device", "a.tsv"),
            "error: retrieve: [Errno 28] No space left on device: 'a.tsv'",
        ),
        (ImportError("No module named 'peft'"), "error: retrieve: No module named 'peft'"),
    ],
)
def test_faults_of_the_machine_are_one_line(capsys, error, said):
    def fault(_):
        raise error

    assert said in refusal(
        capsys, KIT.run_job, SimpleNamespace(function=fault, job="retrieve", data="data/demo")
    )
