"""recipes/kit.ipynb: runs from start to end, stops where a script fails; the form of notebooks."""

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from conftest import ROOT, read, records
from nbclient import NotebookClient

NOTEBOOK = ROOT / "recipes" / "kit.ipynb"
BOTH = [NOTEBOOK, NOTEBOOK.with_name("enter.ipynb")]  # test_enter.py runs the other one


@pytest.fixture
def notebook(toy, warm, monkeypatch):
    """The notebook, a client that runs it on the toy data, and the folder of these."""
    monkeypatch.delenv("MPLBACKEND", raising=False)
    env = {
        "DATA": f"{toy}/data/demo",
        "WORK": f"{toy}/work/demo",
        "LLM_MODEL": "toy",
        "IPYTHONDIR": str(toy),
        "JUPYTER_RUNTIME_DIR": str(toy),
        "PATH": f"{ROOT}/tests/stand_ins:{warm}",  # has a vllm
    }
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    pages = nbformat.read(NOTEBOOK, as_version=4)
    warmly = "import sys; sys.executable = 'python'"  # the one that warm has put into PATH
    pages.cells.insert(0, nbformat.v4.new_code_cell(warmly))
    here = {"metadata": {"path": NOTEBOOK.parent}}
    return pages, NotebookClient(pages, timeout=600, resources=here), toy


@pytest.mark.parametrize("path", BOTH, ids=["kit", "enter"])
def test_it_is_kept_without_outputs_and_always_written_the_same_way(path):
    text = path.read_text(encoding="utf-8")
    page = json.loads(text)
    assert text == json.dumps(page, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    nbformat.validate(page)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in page["cells"])


def test_both_notebooks_have_the_same_first_cells():
    kit, enter = [
        {cell.id: cell.source for cell in nbformat.read(path, as_version=4).cells} for path in BOTH
    ]
    for name in ("setup", "packages-text", "packages"):
        assert kit[name] == enter[name]


def test_a_call_of_vllm_that_dies_loses_one_piece(notebook, monkeypatch):
    pages, _, folder = notebook
    cells = {cell.id: cell.source for cell in pages.cells}
    split = folder / "work/demo/test"
    (split / "hybrid.tsv").rename(split / "rerank.tsv")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PIECE", "2")
    monkeypatch.setenv("VLLM_LOG", f"{folder}/log")
    monkeypatch.setattr(sys, "executable", "python")
    names = {"display": print, "side_by_side": print, "CLAIM": "c1"}
    exec(cells["setup"] + "\n" + cells["settings"], names)
    with pytest.raises(RuntimeError):
        exec(cells["llm"], names)
    assert len(records(split / "llm.replies.jsonl")) == 2
    exec(cells["llm"], names)
    replies = records(split / "llm.replies.jsonl")
    answered = " ".join(reply["custom_id"] for reply in replies)
    _, died, *again = (folder / "log").read_text().splitlines()
    assert again == [died] and len(replies) == 3 and answered.endswith(died)


def test_it_runs_from_start_to_end(notebook):
    pages, client, folder = notebook
    client.execute()  # raises where a cell fails
    runs = set(read(folder / "work/demo/test/metrics.tsv")["run"])
    assert {"bm25", "hybrid", "rerank", "llm", "verdicts", "llm_verdicts"} < runs
    shown = {cell.id: str(cell.get("outputs")) for cell in pages.cells}
    assert "image/png" in shown["plots"] and "exit status" not in str(shown)
    for name in "data retrieve rerank llm classify verdicts evaluate".split():
        assert "<table" in shown[name], name


MAKE = """git init -q && touch 01_index.py && git add . &&
git -c user.name=n -c user.email=e commit -qm m &&
mkdir -p runtime/content"""


def test_it_clones_the_kit_where_there_is_none(tmp_path, monkeypatch):
    subprocess.run(MAKE, shell=True, cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path / "runtime/content")
    monkeypatch.setenv("REPOSITORY", str(tmp_path))
    [setup] = [cell.source for cell in nbformat.read(NOTEBOOK, 4).cells if cell.id == "setup"]
    exec(setup, {})
    assert Path("../kit/01_index.py").exists()
