"""recipes/kit.ipynb: kept without outputs, runs from the first cell to the last, stops at a stage that fails."""
import csv
import json

import nbformat
import pytest
from conftest import ROOT, SECRETS, tsv
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

NOTEBOOK = ROOT / "recipes" / "kit.ipynb"
DEMO = ROOT / "data" / "demo"
CLAIMS = 4  # of each split: enough to train on and to plot; most of the time is what eight scripts need to start

def some_of_the_demo(folder):
    """The first claims of each split, with the abstracts that were judged for them."""
    wanted = set()
    for split in ("train", "test"):
        with (DEMO / f"claims.{split}.tsv").open(encoding="utf-8", newline="") as file:
            claims = list(csv.DictReader(file, delimiter="\t"))[:CLAIMS]
        with (DEMO / f"qrels.{split}.tsv").open(encoding="utf-8", newline="") as file:
            names = {row["claim_id"] for row in claims}
            judged = [row for row in csv.DictReader(file, delimiter="\t") if row["claim_id"] in names]
        tsv(folder / f"claims.{split}.tsv", claims[0], [row.values() for row in claims])
        tsv(folder / f"qrels.{split}.tsv", judged[0], [row.values() for row in judged])
        wanted |= {row["abstract_id"] for row in judged}
    with (DEMO / "corpus.jsonl").open(encoding="utf-8") as file:
        lines = [line for line in file if json.loads(line)["abstract_id"] in wanted]
    (folder / "corpus.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder

@pytest.fixture
def notebook(tmp_path, models, monkeypatch, warm_python):
    """notebook(data): the notebook and a client that runs it, from recipes/, into tmp_path/work."""

    def prepare(data):
        for name in (*SECRETS, "MPLBACKEND"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {"DATA": data, "WORK": tmp_path / "work", "HF_HUB_OFFLINE": 1, "IPYTHONDIR": tmp_path / "ipython",
                            "JUPYTER_RUNTIME_DIR": tmp_path / "jupyter"}.items():
            monkeypatch.setenv(name, str(value))
        pages, here = nbformat.read(NOTEBOOK, as_version=4), {"metadata": {"path": str(NOTEBOOK.parent)}}
        setup = next(iter(code(pages).values()))
        setup.source = setup.source.replace("words[0] = sys.executable", f"words[0] = '{warm_python}/python'")
        return pages, NotebookClient(pages, kernel_name="python3", timeout=600, resources=here)

    return prepare

def code(pages):
    return {cell.id: cell for cell in pages.cells if cell.cell_type == "code"}

def shown(cell, kind):
    """What a cell displayed as text/html or image/png."""
    return [output.data[kind] for output in cell.outputs if kind in output.get("data", {})]

def said(cell):
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")

def test_it_is_kept_without_outputs_and_always_written_the_same_way():
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert text == json.dumps(json.loads(text), indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    pages = nbformat.reads(text, as_version=4)
    nbformat.validate(pages)
    assert (pages.nbformat, pages.nbformat_minor, pages.metadata.kernelspec.name) == (4, 5, "python3")
    assert len({cell.id for cell in pages.cells}) == len(pages.cells)
    for cell in code(pages).values():
        assert cell.outputs == [] and cell.execution_count is None and not cell.metadata, cell.id

def test_every_code_cell_has_its_text_before_it():
    kinds = [cell.cell_type for cell in nbformat.read(NOTEBOOK, as_version=4).cells]
    assert kinds == ["markdown"] + ["markdown", "code"] * (len(kinds) // 2)

def test_it_runs_from_the_first_cell_to_the_last(notebook, tmp_path):
    pages, client = notebook(some_of_the_demo(tmp_path / "data"))
    client.execute()  # raises where a cell fails
    cells, out = code(pages), tmp_path / "work" / "test"
    with (out / "metrics.tsv").open(encoding="utf-8", newline="") as file:
        metrics = {row["run"]: row for row in csv.DictReader(file, delimiter="\t")}
    assert list(metrics) == ["bm25", "dense", "splade", "hybrid", "rerank", "verdicts"]
    assert metrics["verdicts"]["F1"] and (out / "report.html").exists() and not (out / "llm.tsv").exists()
    assert "goes on from rerank.tsv" in said(cells["llm"])
    assert said(cells["packages"]) == "All packages are here.\n"
    assert '{"' not in "".join(map(said, cells.values()))

    for name in ("data", "index", "retrieve", "side-by-side", "rerank", "classify", "verdicts", "evaluate"):
        assert shown(cells[name], "text/html") and "<table" in shown(cells[name], "text/html")[-1], name
    for name in ("labels", "plots"):
        assert len(shown(cells[name], "image/png")) == 1, name
    first = next(csv.DictReader((out / "hybrid.tsv").open(encoding="utf-8"), delimiter="\t"))["abstract_id"]
    assert len(first) == 4 and f">{first}<" in shown(cells["retrieve"], "text/html")[0]  # 0075, not 75
    title = next(row["title"] for row in map(json.loads, (DEMO / "corpus.jsonl").open(encoding="utf-8"))
                 if row["abstract_id"] == first)
    assert title in shown(cells["side-by-side"], "text/html")[0]

def test_a_stage_that_fails_stops_it_with_the_words_of_the_script(notebook, tmp_path):
    data = some_of_the_demo(tmp_path / "data")
    lines = (data / "corpus.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (data / "corpus.jsonl").write_text("".join([*lines, lines[0]]), encoding="utf-8")  # an identifier twice
    pages, client = notebook(data)
    with pytest.raises(CellExecutionError) as stopped:
        client.execute()
    assert stopped.value.ename == "RuntimeError"
    assert stopped.value.evalue.startswith(f"error: {data}/corpus.jsonl:{len(lines) + 1}: abstract_id ")
    ran = [name for name, cell in code(pages).items() if cell.execution_count]
    assert ran[-1] == "index" and not (tmp_path / "work" / "test").exists()
