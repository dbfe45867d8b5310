"""The kit as a whole: shared blocks, scripts that stand alone, instant help, true pages."""
import functools
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib

import pandas as pd
import pytest
from blocks import SCRIPTS, blocks_of, main, with_blocks
from conftest import KEY, LABELS, ROOT, read, records

TEXTS = {path.name: path.read_text(encoding="utf-8") for path in SCRIPTS}
JOBS = {"01_index.py": ["graph", "train"], "02_retrieve.py": ["fuse", "mine"],
        "03_rerank.py": ["train"], "04_llm_rerank.py": ["ask"],
        "05_classify.py": ["train", "llm", "combine"],
        "06_evaluate.py": ["convert", "pool", "merge", "submission"],
        "data/download.py": "models hub climatecheck scifact scifact-open check-covid "
                            "climate-fever checkthat4b beir trec".split()}
PINNED = "\n".join((ROOT / folder / "requirements.txt").read_text(encoding="utf-8")
                   for folder in ("", "tests"))

@functools.cache
def help_of(script, *job):
    command = [sys.executable, str(ROOT / script), *job, "--help"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout

def test_shared_blocks_are_the_same_and_small(capsys):
    assert not main(fix=False), capsys.readouterr().out
    most, found = {"constants": 5, "helpers": 195, "models": 27, "training": 68, "dialogues": 37}, {}
    for text in TEXTS.values():
        found |= {name: block.count("\n") for name, block in blocks_of(text).items()}
    assert set(most) == set(found) and all(found[name] <= most[name] for name in most), found

def test_a_block_that_differs_is_found_and_fixed():
    old = "a\n# --- x (same in both)\n1\n# --- end of x\nb\n"
    assert with_blocks(old, blocks_of(old.replace("1", "2"))) == old.replace("1", "2")

@pytest.mark.parametrize("script", TEXTS)
def test_a_script_imports_no_other_and_nothing_unsafe(script):
    text = TEXTS[script]
    assert not re.search(r"^\s*(from|import) (conftest|data|recipes|utils|helpers)\b", text, re.M)
    unsafe = "pickle trust_remote_code=True allow_pickle=True exec( shell=True torch.load".split()
    assert not [word for word in [*unsafe, " eval("] if word in text]

@pytest.mark.parametrize("script", [*TEXTS, "recipes/check_claim.py", "recipes/lemmatise.py",
                                    "recipes/count_tokens.py", "recipes/on_ray.py"])
def test_the_header_pins_what_the_requirements_pin(script):
    text = (ROOT / script).read_text(encoding="utf-8")
    header = re.match(r"# /// script\n((?:#.*\n)*?)# ///\n", text)[1]
    for one in tomllib.loads(header.replace("#", ""))["dependencies"]:  # uv run reads these
        assert re.search(rf"^{re.escape(one)}\s", PINNED, re.M), one

def test_uv_runs_a_script_that_is_alone_in_a_folder(tmp_path):
    (tmp_path / "02_retrieve.py").write_text(TEXTS["02_retrieve.py"], encoding="utf-8")
    uv = shutil.which("uv") or f"{sys.prefix}/bin/uv"
    command = [uv, "run", "--no-project", "02_retrieve.py", "--help"]
    assert "--rrf-k" in subprocess.check_output(command, cwd=tmp_path, text=True)

@pytest.mark.parametrize(("script", "job"), [
    (script, job) for script in TEXTS for job in [(), *((job,) for job in JOBS[script])]])
def test_help_is_instant_and_opens_with_the_docstring(script, job):
    begun = time.monotonic()
    shown = help_of(script, *job)
    assert time.monotonic() - begun < 3  # half a second where nothing else runs
    assert shown.strip().startswith(TEXTS[script].split('"""')[1].strip())
    for flag in ("--data", "--work", "--split", "--seed", "--device", "--force"):
        assert flag in shown

def commands(path):
    """Yield every call of a script in a page's shell blocks, a recipe or the notebook, as words."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":  # sh("...") or sh(f\"\"\"...\"\"\"), over one or several lines
        cells = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
        calls = re.findall(r'sh\(f?"+(.*?)"+\)', cells, re.S)
        text = "\n".join(" ".join(call.split()) for call in calls)
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", text, re.S) if path.suffix == ".md" else [text]
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        call = re.search(r"\bpython ((?:data/download\.py|0\d_\w+\.py).*)", line.split(" #")[0])
        if call:
            yield shlex.split(call[1].split("&&")[0].split("; done")[0].rstrip(" };"))

@pytest.mark.parametrize("page", [
    "README.md", "data/README.md", "recipes/README.md", "recipes/kit.ipynb",
    *sorted(f"recipes/{path.name}" for path in ROOT.glob("recipes/*.sh"))])
def test_pages_name_only_flags_that_exist(page):
    for script, *words in commands(ROOT / page):
        job = words[:1] if words and words[0] in JOBS[script] else []
        for flag in (word for word in words if word.startswith("--")):
            known = re.search(rf"(?<![\w-]){flag}(?![\w-])", help_of(script, *job))
            assert known, f"{page}: {script} {job} has no {flag}"

def test_readme_has_the_two_commands_and_links_only_to_files_that_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tests = "pip install -r requirements.txt -r tests/requirements.txt && python -m pytest"
    assert "pip install -r requirements.txt && bash recipes/demo.sh" in text and tests in text
    for name in re.findall(r"\]\((?!http|#)([^)]+)\)", text):
        assert (ROOT / name).exists(), name

def test_the_demo_is_what_its_page_promises():
    demo = ROOT / "data" / "demo"
    corpus = {one["abstract_id"]: one["abstract"] for one in records(demo / "corpus.jsonl")}
    claims, qrels = (pd.concat([read(demo / f"{name}.{split}.tsv") for split in ("train", "test")])
                     for name in ("claims", "qrels"))
    assert len(claims) >= 48 and len(corpus) == len(records(demo / "corpus.jsonl")) >= 240
    assert all(80 <= len(text.split()) <= 200 for text in corpus.values())
    shares = qrels["label"].value_counts(normalize=True)[LABELS]
    assert (shares - [0.4, 0.2, 0.4]).abs().max() < 0.05 and not qrels.duplicated(KEY).any()
    assert set(qrels["abstract_id"]) <= set(corpus)
    assert set(qrels["claim_id"]) == set(claims["claim_id"])
    for _, labels in qrels.groupby("claim_id")["label"]:
        assert 4 <= len(labels) <= 8 and 2 <= (labels != "NEI").sum() < len(labels)

def test_nothing_points_at_this_machine():
    command = ["git", "-C", str(ROOT), "ls-files"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    paths = [ROOT / name for name in done.stdout.split()] or list(ROOT.glob("*.*"))
    for path in filter(lambda path: path.is_file() and path.parent.name != "tests", paths):
        text = path.read_text(encoding="utf-8", errors="replace")
        assert not re.search(r"\.\./shared|(?<![\w.])/(work|root|tmp|opt)/\w", text), path
