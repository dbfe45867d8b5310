"""Entering a shared task as README.md and recipes/enter.ipynb do, with tiny models from a hub."""

import json
import re
import shutil
import subprocess
import zipfile

import nbformat
import pandas as pd
import pytest
from conftest import ROOT, read
from nbclient import NotebookClient
from test_models import publish_climatecheck

NOTEBOOK = ROOT / "recipes/enter.ipynb"
MODELS = """BAAI/bge-m3 BAAI/bge-reranker-v2-m3 cross-encoder/ms-marco-MiniLM-L6-v2
    MoritzLaurer/DeBERTa-v3-large-mnli-fever-anli-ling-wanli"""
WARM = "import sys; sys.executable = 'python'"  # that of warm_python(), first in PATH
# What enter.ipynb imports on Colab. Both print what they are asked for.
COLAB = """
import types

drive = types.SimpleNamespace(mount=lambda path: print("mounted at", path))
files = types.SimpleNamespace(download=lambda path: print("downloaded", path))
sys.modules["google.colab"] = types.SimpleNamespace(drive=drive, files=files)
"""


@pytest.fixture
def published(served, models):
    """The hub, with ClimateCheck and the models that README names."""
    served.make(MODELS)
    publish_climatecheck(served.folder / "rabuahmad")
    return served


@pytest.fixture
def environment(published, tmp_path, monkeypatch):
    """Set the variables of a notebook's process: the hub, and folders for all that it makes."""
    monkeypatch.delenv("MPLBACKEND", raising=False)
    folders = {"DATA": "data", "WORK": "work", "IPYTHONDIR": "", "JUPYTER_RUNTIME_DIR": ""}
    names = {name: f"{tmp_path}/{folder}" for name, folder in folders.items()}
    for name, value in (published.environment | names).items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.fixture
def posts(tmp_path):
    """A folder with the demo in the form of CheckThat! 2026: four posts in three languages."""
    demo = ROOT / "data/demo"
    folder = tmp_path / "the posts"
    folder.mkdir()
    papers = pd.read_json(demo / "corpus.jsonl", lines=True, dtype=False)[["title", "abstract"]]
    papers.assign(pubkey=range(len(papers))).to_json(
        folder / "collection_data.json", orient="records"
    )
    for language, name in {"en": "test", "de": "test-de", "fr": "test-fr"}.items():
        claims = read(demo / f"claims.{name}.tsv")["claim"].head(4)
        table = pd.DataFrame({"index": range(4), "text": claims})
        table.to_json(folder / f"{language}_test.json", orient="records")
    return folder


def run(before=""):
    """Run the notebook, and return what it has printed and shown, as one text."""
    page = nbformat.read(NOTEBOOK, as_version=4)
    page.cells.insert(0, nbformat.v4.new_code_cell(WARM + before))
    client = NotebookClient(page, timeout=600, resources={"metadata": {"path": NOTEBOOK.parent}})
    client.execute()  # raises where a cell fails
    return str([cell.get("outputs") for cell in page.cells])


def tables_of(path):
    """Return {name: table} of a zip."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        return {name: pd.read_csv(archive.open(name), sep=None, engine="python") for name in names}


def check_checkthat(path):
    """Check that a zip has five papers for each post of each language."""
    tables = tables_of(path)
    assert sorted(tables) == [f"predictions_{language}.tsv" for language in ("de", "en", "fr")]
    for table in tables.values():
        assert list(table.columns) == ["index", "preds"] and set(table["index"]) == {0, 1, 2, 3}
        assert {len(json.loads(preds.replace("'", '"'))) for preds in table["preds"]} == {5}


def test_the_notebook_enters_climatecheck_on_a_gpu_and_scores_judged_claims(environment, tmp_path):
    environment.setenv("ROW", "T4 or L4")  # as if there were one
    environment.setenv("SPLIT", "train")
    shown = run()
    assert re.search(r"verdicts +\|? *[0-9.]", shown) and "Verification 2026" in shown
    path = tmp_path / "work/train/climatecheck2026/predictions.zip"
    [table] = tables_of(path).values()
    assert list(table.columns) == ["claim_id", "abstract_id", "rank", "label"]
    assert table["claim_id"].nunique() == 25 and table["rank"].max() == 10
    [link] = re.findall('href="([^"]*predictions.zip)"', shown)
    assert (NOTEBOOK.parent / link).resolve() == path.resolve()


def test_the_notebook_enters_checkthat_on_colab_and_goes_on_in_a_new_session(
    environment, tmp_path, posts
):
    environment.setenv("COLAB_RELEASE_TAG", "release-colab")
    environment.setenv("TASK", "checkthat2026")
    environment.setenv("COPY", str(posts))
    shown = run(COLAB)
    path = tmp_path / "work/test/checkthat2026/predictions.zip"
    check_checkthat(path)
    assert "No scores" in shown and not (tmp_path / "work/test/metrics.tsv").exists()
    assert "mounted at /content/drive" in shown and f"downloaded {path}" in shown
    shown = run(COLAB)
    for name in ("index/bm25", "test/bm25.tsv", "test/rerank.tsv", path):
        assert f"up to date: {tmp_path / 'work' / name}" in shown


def test_readme_enters_checkthat_2026(published, posts, tmp_path):
    page = (ROOT / "README.md").read_text("utf-8")
    assert len(page.encode()) <= 12_000
    (section,) = re.findall(r"## Enter CheckThat! 2026\n(.*?)\n## ", page, re.S)
    commands = re.search(r"```bash\n(.*?)```", section, re.S)[1].replace("\\\n", "").splitlines()
    assert len(commands) == 6
    (tmp_path / "data").mkdir()
    for path in [*ROOT.glob("0*.py"), *ROOT.glob("data/*.*")]:
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    posts.rename(tmp_path / "FOLDER")
    how = {"cwd": tmp_path, "env": published.environment, "capture_output": True, "text": True}
    for command in commands:
        done = subprocess.run(command.split(), **how)
        assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "work").rglob("predictions.zip")
    check_checkthat(path)
