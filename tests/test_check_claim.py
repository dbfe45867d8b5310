"""recipes/check_claim.sh: a claim, its verdict and the abstracts behind it, for eyes and programs; and what is refused."""
import csv
import json
import os
import pty
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ABSTRACTS, ROOT, SECRETS

LABELS = ["SUPPORTS", "REFUTES", "NEI"]
HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202e"
CORPUS = [{"abstract_id": name, "title": "", "abstract": text} for name, text in ABSTRACTS.items()]
CORPUS[0]["title"] = f"Bears{HOSTILE} of a bay"
CORPUS[0]["abstract"] = f"{HOSTILE}Polar bears\x9b31m lost\x07 a tenth of their mass."

CONTROL = r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]"

def check(*words, cwd=ROOT, stdout=subprocess.PIPE, **env):
    """The recipe as a subprocess, without keys of this machine."""
    clean = {key: value for key, value in os.environ.items() if key not in (*SECRETS, "NO_COLOR", "COLUMNS")}
    clean |= {"HF_HUB_OFFLINE": "1", **env}
    command = ["bash", str(ROOT / "recipes" / "check_claim.sh"), *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=clean, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)

@pytest.fixture(autouse=True)
def warm(warm_python, monkeypatch):
    monkeypatch.setenv("PATH", f"{warm_python}:{os.environ['PATH']}")

def tiny(folder, tokenizer, *names):
    """A model of one small layer with random weights, with an output for each name."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig

    torch.manual_seed(1)
    config = BertConfig(vocab_size=30_522, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
                        num_labels=len(names), id2label=dict(enumerate(names)), initializer_range=0.5)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)

@pytest.fixture(scope="module")
def made(models, tmp_path_factory):
    """["--data", a folder of toy abstracts, "--work", a folder with BM25 and dense index, reranker and classifier]."""
    folder = tmp_path_factory.mktemp("check")
    (folder / "data").mkdir()
    (folder / "data/corpus.jsonl").write_text("".join(json.dumps(record) + "\n" for record in CORPUS), encoding="utf-8")
    words = ["--data", str(folder / "data"), "--work", str(folder / "work")]
    with pytest.MonkeyPatch.context() as patch:  # in this process, where torch may be loaded already
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", ["01_index.py", "--indexes", "bm25", "dense", *words])
        runpy.run_path("01_index.py", run_name="__main__")
    tiny(folder / "work/models/reranker", models / "minilm", "relevant")
    tiny(folder / "work/models/classifier", models / "minilm", *LABELS)
    return words

@pytest.fixture
def only(made, tmp_path):
    """only("index/bm25", ...): the words for a new work folder that has nothing else of the first one."""

    def pick(*parts):
        for part in parts:
            (tmp_path / "work" / part).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "work" / part).symlink_to(Path(made[3]) / part)
        return [*made[:2], "--work", str(tmp_path / "work")]

    return pick

def checked(words):
    """The folders of claims that a work folder has."""
    return sorted((Path(words[3]) / "checked").glob("*"))

def rows_of(path):
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))

def state(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.tsv") if path.name != "claims.test.tsv"}

# ----------------------------------------------------------- Trained classifier
def test_a_hostile_claim_is_data_and_its_answer_is_that_of_the_verdict_file(made, tmp_path):
    claim = "--top \"polar\tbears\"' are\n\x1b[31m $(touch pwned) `touch pwned`; touch pwned # {é} \\n%s"
    seen = check(*made, "--", claim, cwd=tmp_path)
    assert (seen.returncode, seen.stderr) == (0, ""), seen.stderr
    folder, = checked(made)
    before = state(folder)
    told = check("--", claim, "--json", *made, cwd=tmp_path)  # asked again, and the options stand behind the claim
    assert told.returncode == 0 and told.stdout.count("\n") == 1 and state(folder) == before, told.stderr
    assert not list(tmp_path.iterdir()) and not (ROOT / "pwned").exists()

    answer, rows = json.loads(told.stdout), rows_of(folder / "verdicts.5.tsv")
    behind = json.loads((folder / "verdicts.5.jsonl").read_text(encoding="utf-8"))
    assert answer["claim"] == "--top \"polar bears\"' are $(touch pwned) `touch pwned`; touch pwned # {é} \\n%s"
    assert rows_of(folder / "claims.test.tsv") == [{"claim_id": folder.name, "claim": answer["claim"]}]
    for key in ("claim", "verdict", "support", *LABELS):
        assert answer[key] == behind[key]
    assert answer["judge"] == f"{made[3]}/models/classifier" and answer["unusable"] == 0
    sentences = {one["abstract_id"]: one["sentence"] for one in behind["evidence"]}
    titles = {record["abstract_id"]: record["title"] for record in CORPUS}
    assert len(rows) == 5 and (folder / "rerank.tsv").exists()
    for row, one in zip(rows, answer["abstracts"], strict=True):
        assert one == {"abstract_id": row["abstract_id"], "rank": int(row["rank"]), "title": titles[row["abstract_id"]],
                       "label": row["label"], "p_supports": float(row["p_supports"]), "p_refutes": float(row["p_refutes"]),
                       "p_nei": float(row["p_nei"]), "probability": float(row[f"p_{row['label'].lower()}"]),
                       "sentence": sentences.get(row["abstract_id"])}

    lines = seen.stdout.splitlines()
    assert lines[0].startswith('Claim    --top "polar bears"') and not re.search(CONTROL, seen.stdout)
    assert f"Verdict  {answer['verdict']} (" in seen.stdout and max(map(len, lines)) <= 100
    heads = [line.split()[:4] for line in lines if re.match(r" \d  ", line)]
    chances = [max(float(row[f"p_{label.lower()}"]) for label in LABELS) for row in rows]
    assert heads == [[row["rank"], row["label"], f"{100 * chance:.0f}", "%"] for row, chance in zip(rows, chances)]
    assert [line.strip() for line in lines if re.fullmatch(r"    \d{4}", line)] == [row["abstract_id"] for row in rows]

# ----------------------------------------------------------- Language model
def reply(prompt):
    return "SUPPORTS" if "tenth of their mass" in prompt else "REFUTES" if "in zoos" in prompt else "NEI"

def test_an_endpoint_judges_and_is_not_asked_twice(only, endpoint):
    words, server = only("index/bm25"), endpoint(reply)
    env = {"LLM_BASE_URL": server.url, "LLM_MODEL": "toy", "OPENAI_API_KEY": "dummy"}
    words += ["Polar bears prefer to lose mass where sea ice breaks", "--top", "3"]
    told = check("--json", *words, **env)
    assert told.returncode == 0, told.stderr
    answer = json.loads(told.stdout)
    found = {one["abstract_id"]: (one["label"], one["probability"], one["sentence"]) for one in answer["abstracts"]}
    assert found == {"0001": ("SUPPORTS", 1, None), "0003": ("REFUTES", 1, None), "0002": ("NEI", 1, None)}
    assert [answer[key] for key in ("verdict", "support", *LABELS, "judge")] == ["DISPUTED", 0.5, 1, 1, 1, "toy"]
    folder, = checked(words)
    (folder / "llm_verdicts.3.jsonl").unlink()  # as if the check had been killed before its end
    master, slave = pty.openpty()  # a terminal: the labels are coloured, and only they
    shown = []
    for extra in ({}, {"NO_COLOR": "1"}):
        assert check(*words, stdout=slave, COLUMNS="60", **env, **extra).returncode == 0
        shown.append(os.read(master, 65_536).decode().replace("\r\n", "\n"))
    codes = re.findall(r"\x1b\[(\d+)m(\w+)\x1b\[0m", shown[0])
    assert sorted(codes) == [("2", "NEI"), ("31", "REFUTES"), ("32", "SUPPORTS"), ("33", "DISPUTED")]
    assert shown[0].count("\x1b") == 8 and not re.search(CONTROL, shown[1])
    assert max(map(len, shown[1].splitlines())) <= 60

    only("models/classifier")  # which picks sentences: now the endpoint's labels get them
    seen = check(*words, **env)
    assert seen.returncode == 0 and len(server.asked) == 3 and not re.search(CONTROL, seen.stdout), seen.stderr
    assert "Verdict  DISPUTED (SUPPORTS 1, REFUTES 1, NEI 1)" in seen.stdout
    assert "SUPPORTS 100 %  Bears]0;owned of a bay" in seen.stdout
    assert "\n    ]0;ownedPolar bears lost a tenth of their mass.\n    0001\n" in seen.stdout

def test_what_settles_nothing_is_shown_too_and_replies_without_a_label_are_told(only, endpoint):
    words, server = only("index/bm25"), endpoint(lambda prompt: "who knows")
    env = {"LLM_BASE_URL": server.url, "LLM_MODEL": "toy"}
    seen = check("maize", *words, **env)
    assert seen.returncode == 0, seen.stderr
    assert "Verdict  NOT ENOUGH INFORMATION (SUPPORTS 0, REFUTES 0, NEI 1)" in seen.stdout
    assert "count as NEI: 1" in seen.stdout and " 1  NEI      100 %  Farmers in Kenya" in seen.stdout
    answer = json.loads(check("maize", *words, "--json", **env).stdout)
    assert [(one["abstract_id"], one["sentence"]) for one in answer["abstracts"]] == [("0011", None)]
    assert answer["support"] is None and answer["unusable"] == 1

    seen = check("zzqx", *words, **env)
    assert (seen.returncode, seen.stdout.splitlines()) == (0, [
        "Claim    zzqx", "Verdict  NOT ENOUGH INFORMATION (SUPPORTS 0, REFUTES 0, NEI 0)",
        "Judge    none, as no index knows a word of the claim"]), seen.stderr

# ----------------------------------------------------------- Help and errors
def test_help_is_the_head_of_the_file():
    done = check("--help")
    head = (ROOT / "recipes/check_claim.sh").read_text(encoding="utf-8").split("\nset ")[0].splitlines()[1:]
    assert done.returncode == 0 and done.stdout.splitlines() == [line[2:] for line in head]

READY = "index/bm25 models/classifier"

@pytest.mark.parametrize(("parts", "words", "said"), [
    (READY, [], "no claim"),
    (READY, [""], "empty"),
    (READY, [" \t\n\u00a0\x1b[31m"], "empty"),
    (READY, ["polar", "bears"], "quotes"),
    (READY, ["a claim", "--", "another"], "quotes"),
    (READY, ["a claim", "--tpo\n\x1b[31m", "3"], "unknown option"),
    (READY, ["a claim", "--top"], "--top"),
    *((READY, ["a claim", "--top", top], "--top") for top in ("0", "-1", "2.5", "x", "", "1 2", "101")),
    (READY, ["a claim", "--data", "nowhere"], "nowhere/corpus.jsonl"),
    ("models/classifier", ["a claim"], "recipes/demo.sh"),
    ("index/bm25", ["a claim"], "05_classify.py train"),
])
def test_one_line_says_what_is_wrong_and_nothing_is_made(only, parts, words, said):
    where = only(*parts.split())
    done = check(*where, *words)
    assert (done.returncode, done.stdout) == (2, "") and said in done.stderr and not checked(where)
    assert re.fullmatch(r"error: [^\n\x1b]+: [^\n\x1b]+\n", done.stderr), done.stderr

def test_an_endpoint_needs_the_name_of_a_model(only):
    where = only("index/bm25")
    done = check("a claim", *where, LLM_BASE_URL="http://127.0.0.1:9/v1")
    assert done.returncode == 2 and done.stderr.startswith("error: LLM_MODEL: ") and not checked(where)

def test_the_error_of_a_script_is_passed_on(only, tmp_path):
    where = only("index/bm25", "models/classifier")
    (tmp_path / "corpus.jsonl").write_text(json.dumps(CORPUS[1]) + "\n", encoding="utf-8")
    done = check("a claim", "--work", where[3], "--data", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: .*another corpus.*\n", done.stderr), done.stderr
