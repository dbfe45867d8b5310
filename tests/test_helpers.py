"""The block of helpers that all scripts share: tables, provenance, outputs, the command line."""

import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from conftest import CLAIMS, LABELLED, RUN, cases, facts, kill_before, load, tsv

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


@pytest.mark.parametrize("script", ["01_index.py", "03_rerank.py", "04_llm_rerank.py"])
def test_the_text_of_fields_that_are_no_texts(script):
    text_of = load(script).text_of
    assert text_of({"title": None, "abstract": "ice"}) == "ice"
    assert text_of({"title": float("nan"), "abstract": ["Ice melts.", None, " Sea rises. "]}) == (
        "Ice melts. Sea rises."
    )
    assert text_of({"title": 1984, "abstract": float("nan")}) == "1984"
    assert text_of({"title": "T"}) == "T" and text_of({}) == ""


def test_a_corpus_keeps_its_order_and_bad_lines_are_refused(capsys, tmp_path):
    path = tmp_path / "c.jsonl"
    good = '{"abstract_id": 7, "abstract": "ice", "year": 1}\n{"abstract_id": "a", "title": "b"}\n'
    path.write_text(good)
    found = KIT.read_corpus(path)
    assert list(found) == ["7", "a"] and found["7"]["year"] == 1 and found["a"]["title"] == "b"
    for line in ("[]", "{", '{"abstract": ""}', '{"abstract_id": "7"}', '{"abstract_id": "\xe9"}'):
        path.write_bytes(good.encode() + line.encode("latin-1"))
        assert f"{path}:3: " in refusal(capsys, KIT.read_corpus, path)


# ---------------------------------------------------------------- Outputs
def test_digests_are_of_files_of_sidecars_and_of_folders_without_one(tmp_path):
    model = tmp_path / "model"
    (model / "part").mkdir(parents=True)
    (model / "part" / "a").write_bytes(b"one")
    (model / "b").write_bytes(b"two")
    assert KIT.digest(model / "b") == hashlib.sha256(b"two").hexdigest()
    assert KIT.digest(model) == hashlib.sha256(b"twoone").hexdigest()  # b, part/a
    (tmp_path / "model.meta.json").write_bytes(b"{}")
    assert KIT.digest(model) == hashlib.sha256(b"{}").hexdigest()


def test_a_task_is_arguments_and_inputs_and_a_hub_model_is_a_name(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x").write_text("x")
    task = KIT.task_of(ARGS, "x", models=["BAAI/bge-m3"])
    assert task == {"arguments": {"job": "fuse", "k": 60}, "inputs": {"x": KIT.digest("x")}}
    assert "nowhere: not found" in refusal(capsys, KIT.task_of, ARGS, "nowhere")


def test_an_output_appears_whole_and_the_same_task_is_not_done_again(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text("1")
    monkeypatch.setattr(sys, "argv", ["script.py"])
    task = {"arguments": {"k": 60}, "inputs": {}}
    with pytest.raises(ValueError), KIT.written("sub/out", task) as new:
        new.write_text("half")
        raise ValueError
    assert not Path("sub/out").exists()
    for text in ("a", "b"):
        with KIT.written("sub/out", task, rows=1) as new:
            new.write_text(text)
        made = json.loads(Path("sub/out.meta.json").read_text())
        assert Path("sub/out").read_text() == text and made["rows"] == 1 and not new.exists()
        assert made["command"] == ["script.py"] and made["script"] == KIT.digest("script.py")
    assert KIT.up_to_date(ARGS, task, "sub/out")
    shown = "up to date: sub/out (same inputs and flags; --force makes it again)\n"
    assert capsys.readouterr().out == shown
    Path("script.py").write_text("2")  # the kit is made to be edited
    assert KIT.up_to_date(ARGS, task, "sub/out")
    assert not KIT.up_to_date(ARGS, task | {"inputs": {"x": "1"}}, "sub/out")
    assert not KIT.up_to_date(ARGS, task, "sub/out", "sub/other")
    assert not KIT.up_to_date(SimpleNamespace(force=True), task, "sub/out")


@pytest.mark.parametrize("torn", ["", '{"arguments": {"k"', "null"])
def test_an_output_with_a_torn_sidecar_counts_as_not_made(tmp_path, monkeypatch, torn):
    monkeypatch.chdir(tmp_path)
    Path("a").write_text("whole")
    Path("a.meta.json").write_text(torn)
    task = {"arguments": {"k": 60}, "inputs": {}}
    assert not KIT.up_to_date(ARGS, task, "a")
    assert not KIT.up_to_date(SimpleNamespace(force=True), task, "a")


def test_what_a_kill_has_left_in_the_temporary_place_is_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("index.tmp").write_text("a sidecar that was not renamed")
    with KIT.written("index", {}) as new:
        new.mkdir()
    assert Path("index").is_dir() and not Path("index.tmp").exists()
    Path("run.tsv.tmp").mkdir()
    with KIT.written("run.tsv", {}) as new:
        new.write_text("x")
    assert Path("run.tsv").read_text() == "x"


def test_a_folder_is_replaced_only_if_the_kit_made_it(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    assert "mine: not made by this script" in refusal(capsys, KIT.up_to_date, ARGS, {}, "mine")
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
    assert not list(toy.glob("*.tmp"))


# ---------------------------------------------------------------- Command line
def test_work_follows_data_and_the_first_job_is_the_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data/other").mkdir(parents=True)
    jobs = {KIT.retrieve: KIT.add_retrieve, KIT.mine: KIT.add_mine}
    monkeypatch.setattr(sys, "argv", [SCRIPT, "--data", "data/other/", "--top-k", "7"])
    args = KIT.command_line(jobs)
    assert (args.job, args.work, args.top_k) == ("retrieve", "work/other", 7)
    assert args.claims == "data/other//claims.test.tsv" and args.out == "work/other/test"
    monkeypatch.setattr(sys, "argv", [SCRIPT, "mine", "--work", "w"])
    args = KIT.command_line(jobs)
    assert args.run == "w/train/hybrid.tsv" and args.qrels == "data/demo/qrels.train.tsv"


def test_help_shows_the_defaults_that_there_are(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [SCRIPT, "mine", "--help"])
    with pytest.raises(SystemExit):
        KIT.command_line({KIT.mine: KIT.add_mine})
    shown = " ".join(capsys.readouterr().out.split())
    assert "abstract as --hard (default: 0)" in shown and "(default: {data}/corpus.jsonl)" in shown
    assert "it is required --scale" in shown and "found or not shared" in shown
    assert "(default: )" not in shown and "None)" not in shown and "False)" not in shown


@pytest.mark.parametrize(
    "error, said",
    [
        (OSError(28, "No space left on device", "a.tsv"), "error: a.tsv: [Errno 28] No space left"),
        (ImportError("No module named 'peft'"), "error: mine: No module named 'peft'"),
    ],
)
def test_faults_of_the_machine_are_one_line(capsys, error, said):
    def fault(_):
        raise error

    assert said in refusal(
        capsys, KIT.run, SimpleNamespace(function=fault, job="mine", data="data/demo")
    )
