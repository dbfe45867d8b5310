"""The kit as a whole: shared blocks, scripts that stand alone, instant help, true pages."""
import ast
import functools
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from importlib import metadata

import pytest
from blocks import blocks_of, with_blocks
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SCRIPTS = sorted(path.name for path in ROOT.glob("0[1-6]_*.py"))
JOBS = {"01_index.py": ["graph", "train"], "02_retrieve.py": ["fuse", "mine"],
        "03_rerank.py": ["train"], "04_llm_rerank.py": ["ask"],
        "05_classify.py": ["train", "llm", "combine"],
        "06_evaluate.py": ["convert", "pool", "merge", "submission"]}
EVERY = [(script, *job) for script, jobs in JOBS.items() for job in [[], *([job] for job in jobs)]]
DOWNLOADS = "models hub climatecheck scifact scifact-open check-covid climate-fever checkthat4b " \
            "beir trec".split()

@functools.cache
def help_of(script, *job):
    command = [sys.executable, str(ROOT / script), *job, "--help"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout

# ---------------------------------------------------------------- Scripts
def test_shared_blocks_are_the_same_and_small():
    command = [sys.executable, str(ROOT / "tests" / "blocks.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    blocks = {}
    for script in SCRIPTS:
        blocks |= blocks_of((ROOT / script).read_text(encoding="utf-8"))
    most = {"helpers": 195, "models": 27, "training": 68, "dialogues": 37}
    assert set(most) == set(blocks)
    for name, block in blocks.items():
        assert block.count("\n") <= most[name], name

def test_a_block_that_differs_is_found_and_fixed():
    old = "a\n# --- x (same in both)\n1\n# --- end of x\nb\n"
    assert blocks_of(old) == {"x": "# --- x (same in both)\n1\n# --- end of x\n"}
    new = {"x": "# --- x (same in both)\n2\n# --- end of x\n"}
    assert with_blocks(old, new) == old.replace("1", "2")

@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_imports_no_other_and_nothing_unsafe(script):
    text = (ROOT / script).read_text(encoding="utf-8")
    assert not re.search(r"^\s*(from|import) (conftest|data|recipes|utils|helpers)\b", text, re.M)
    unsafe = "pickle trust_remote_code=True allow_pickle=True exec( shell=True torch.load".split()
    for word in [*unsafe, " eval("]:
        assert word not in text, word

@pytest.mark.parametrize("script", [*SCRIPTS, "recipes/check_claim.py", "recipes/lemmatise.py",
                                    "recipes/count_tokens.py", "recipes/on_ray.py"])
def test_the_header_pins_what_the_requirements_pin(script):
    text = (ROOT / script).read_text(encoding="utf-8")
    header = re.match(r"# /// script\n((?:#.*\n)*?)# ///\n", text)[1]
    pages = ("requirements.txt", "tests/requirements.txt")
    pinned = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in pages)
    for one in re.findall(r'"([\w.-]+==[\w.+-]+)"', header):
        assert re.search(rf"^{re.escape(one)}\s", pinned, re.M), one

def test_uv_runs_a_script_that_is_alone_in_a_folder(tmp_path):
    shutil.copy(ROOT / "02_retrieve.py", tmp_path)
    uv = shutil.which("uv") or f"{sys.prefix}/bin/uv"
    command = [uv, "run", "--no-project", "02_retrieve.py", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--rrf-k" in done.stdout

@pytest.mark.parametrize("call", EVERY, ids=" ".join)
def test_help_is_instant_and_opens_with_the_docstring(call):
    docstring = (ROOT / call[0]).read_text(encoding="utf-8").split('"""')[1].strip()
    begun = time.monotonic()
    shown = help_of(*call)
    assert time.monotonic() - begun < 3  # half a second where nothing else runs
    assert shown.strip().startswith(docstring)
    for flag in ("--data", "--work", "--split", "--seed", "--device", "--force"):
        assert flag in shown

@pytest.mark.parametrize("script", SCRIPTS)
def test_an_unknown_flag_is_one_line_and_exit_2(script, tmp_path):
    command = [sys.executable, str(ROOT / script), "--topk", "3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (2, "", [])
    assert re.fullmatch(rf"error: {script}: .*--topk.*\n", done.stderr)

# ---------------------------------------------------------------- Pages
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

PAGES = ["README.md", "data/README.md", "recipes/README.md", "recipes/kit.ipynb"]
PAGES += sorted(f"recipes/{path.name}" for path in ROOT.glob("recipes/*.sh"))

@pytest.mark.parametrize("page", PAGES)
def test_pages_name_only_flags_that_exist(page):
    for script, *words in commands(ROOT / page):
        job = words[:1] if words and words[0] in JOBS.get(script, []) + DOWNLOADS else []
        for flag in (word for word in words if word.startswith("--")):
            known = re.search(rf"(?<![\w-]){flag}(?![\w-])", help_of(script, *job))
            assert known, f"{page}: {script} {job} has no {flag}"

def test_readme_has_the_two_commands_and_links_only_to_files_that_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "pip install -r requirements.txt && bash recipes/demo.sh" in text
    tests = "pip install -r requirements.txt -r tests/requirements.txt && python -m pytest"
    assert tests in text
    for name in re.findall(r"\]\((?!http|#)([^)]+)\)", text):
        assert (ROOT / name).exists(), name

def test_nothing_points_at_this_machine():
    command = ["git", "-C", str(ROOT), "ls-files"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    paths = [ROOT / name for name in done.stdout.split()] or list(ROOT.glob("*.*"))
    for path in filter(lambda path: path.is_file() and path.parent.name != "tests", paths):
        text = path.read_text(encoding="utf-8", errors="replace")
        assert not re.search(r"\.\./shared|(?<![\w.])/(work|root|tmp|opt)/\w", text), path

# ---------------------------------------------------------------- Requirements
@functools.cache
def brought():
    """Return the distributions that requirements.txt brings, with all that those require here."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    left = [Requirement(line.partition("#")[0]) for line in lines if line.partition("#")[0].strip()]
    seen = set()
    while left:
        one = left.pop()
        name = canonicalize_name(one.name)
        for extra in {"", *one.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for need in map(Requirement, metadata.requires(one.name) or ()):
                if not need.marker or need.marker.evaluate({"extra": extra}):
                    left.append(need)
    return {name for name, _ in seen}

@pytest.mark.parametrize("script", [*SCRIPTS, "data/download.py", "recipes/check_claim.py"])
def test_what_a_script_imports_comes_with_the_requirements(script):
    nodes = list(ast.walk(ast.parse((ROOT / script).read_text(encoding="utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    makers = metadata.packages_distributions()
    for module in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"numba"}:
        assert {canonicalize_name(name) for name in makers[module]} & brought(), module
