"""The kit as a whole: one helper block, scripts that stand alone, help that is instant, a README that tells the truth."""
import ast
import functools
import json
import re
import shlex
import subprocess
import sys
import time
from importlib import metadata

import pytest
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

DOWNLOADS = "models hub climatecheck scifact scifact-open check-covid climate-fever checkthat4b beir trec".split()
SCRIPTS = ["01_index.py", "02_retrieve.py", "03_rerank.py", "04_llm_rerank.py", "05_classify.py", "06_evaluate.py"]
JOBS = {"01_index.py": ["graph", "train"], "02_retrieve.py": ["fuse"], "03_rerank.py": ["train"],
        "05_classify.py": ["train", "llm", "combine"]}

def block(script, first, last):
    text = (ROOT / script).read_text(encoding="utf-8")
    assert text.count(first) == 1, script
    return text[text.index(first) : text.index(last) + len(last)]

def help_of(script, *job):
    done = subprocess.run([sys.executable, str(ROOT / script), *job, "--help"], capture_output=True, text=True, check=True)
    return done.stdout

# ----------------------------------------------------------- Scripts
def test_the_helper_block_is_the_same_in_all_six():
    marks = "# --- helpers: the same block in all six scripts", "# --- end of helpers"
    assert len({block(script, *marks) for script in SCRIPTS}) == 1

def test_the_block_that_finds_models_is_the_same_in_five():
    marks = "# --- models: the same block in all scripts that load one", "# --- end of models"
    assert len({block(script, *marks) for script in SCRIPTS[:5]}) == 1

def test_the_block_of_the_last_layer_is_the_same_in_both():
    marks = "# --- the last layer: the same block", "# --- end of the last layer"
    assert len({block(script, *marks) for script in ("03_rerank.py", "05_classify.py")}) == 1

def test_the_language_model_block_is_the_same_in_both():
    marks = "# --- language models: the same block", "# --- end of language models"
    assert len({block(script, *marks) for script in SCRIPTS[3:5]}) == 1

def test_the_block_of_terms_and_vectors_is_the_same_in_both():
    marks = "# --- texts to terms and vectors: the same block", "# --- end of texts to terms and vectors"
    assert len({block(script, *marks) for script in SCRIPTS[:2]}) == 1

def test_the_block_of_batches_and_restarts_is_the_same_in_all_three():
    marks = "# --- batches and restarts: the same block", "# --- end of batches and restarts"
    assert len({block(script, *marks) for script in ("01_index.py", "03_rerank.py", "05_classify.py")}) == 1

@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_imports_no_other_and_nothing_unsafe(script):
    text = (ROOT / script).read_text(encoding="utf-8")
    assert not re.search(r"^\s*(from|import) (conftest|data|recipes|utils|helpers)\b", text, re.M)
    for word in ("pickle", "trust_remote_code=True", "allow_pickle=True", "eval(", "exec(", "shell=True", "torch.load"):
        assert word not in text.replace("model.eval()", "").replace(".eval()", ""), word

@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_instant_and_opens_with_the_docstring(script):
    docstring = (ROOT / script).read_text(encoding="utf-8").split('"""')[1].strip()
    begun = time.monotonic()
    shown = help_of(script)
    assert time.monotonic() - begun < 3
    assert shown.strip().startswith(docstring)
    for flag in ("--data", "--work", "--split", "--seed", "--device", "--force", "--out"):
        assert flag in shown

def test_an_unknown_flag_is_one_line_and_exit_2():
    command = [sys.executable, "02_retrieve.py", "--topk", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(r"error: 02_retrieve.py: .*--topk.*\n", done.stderr)

# ----------------------------------------------------------- README and recipes
def commands(path):
    """Every call of a script in the fenced shell blocks of a page, or in a recipe: lists of words."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":  # its calls stand in sh("..."), long ones over several lines
        cells = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
        text = "\n".join(" ".join(call.split()) for call in re.findall(r'sh\(f?"+(.*?)"+\)', cells, re.S))
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", text, re.S) if path.suffix == ".md" else [text]
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        if found := re.search(r"\bpython (?:data/download\.py|0\d_\w+\.py).*", line.split(" #")[0]):
            for call in found.group(0).split("&&"):
                yield shlex.split(call)

PAGES = ["README.md", "data/README.md"]
PAGES += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "recipes").iterdir() if path.suffix != ".py")

@pytest.mark.parametrize("page", PAGES)
def test_pages_name_only_flags_that_exist(page):
    known, seen = {}, 0
    for _, script, *words in commands(ROOT / page):
        job = words[:1] if words and words[0] in JOBS.get(script, []) + DOWNLOADS else []
        key = (script, *job)
        known.setdefault(key, help_of(script, *job))
        seen += 1
        for flag in (word for word in words if word.startswith("--")):
            assert re.search(rf"(?<![\w-]){flag}(?![\w-])", known[key]), f"{page}: {' '.join(key)} has no {flag}"
    assert seen or page in ("data/README.md", "recipes/README.md")

def test_readme_has_the_two_commands_and_names_only_files_that_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "pip install -r requirements.txt && bash recipes/demo.sh" in text
    assert "pip install -r requirements.txt -r tests/requirements.txt && python -m pytest" in text
    for name in re.findall(r"\]\((?!http|#)([^)]+)\)", text):
        assert (ROOT / name).exists(), name

def test_nothing_points_at_this_machine():
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = done.stdout.split() or [str(p.relative_to(ROOT)) for p in ROOT.glob("*.*")]
    for name in names:
        text = (ROOT / name).read_text(encoding="utf-8", errors="replace")
        assert not re.search(r"\.\./shared|(?<![\w.])/(work|root|tmp|opt)/\w", text) or name.startswith("tests/"), name

# ----------------------------------------------------------- Requirements
OPTIONAL = {"spacy"}  # of --analyser spacy only, which says how to install it

@functools.cache
def brought():
    """The distributions that requirements.txt brings: those it names, and all that those require here."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / "requirements.txt").read_text("utf-8").splitlines())
    left, seen = [Requirement(line) for line in lines if line], set()
    while left:
        one = left.pop()
        for extra in {"", *one.extras} - {extra for name, extra in seen if name == canonicalize_name(one.name)}:
            seen.add((canonicalize_name(one.name), extra))
            needs = map(Requirement, metadata.requires(one.name) or ())
            left += [need for need in needs if not need.marker or need.marker.evaluate({"extra": extra})]
    return {name for name, _ in seen}

def not_brought(code):
    """The modules that code imports, at the top or in a function, and that neither Python nor requirements.txt brings."""
    nodes = list(ast.walk(ast.parse(code)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    modules, makers = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - OPTIONAL, providers()
    return {module for module in modules if not brought() & {canonicalize_name(name) for name in makers.get(module, ())}}

providers = functools.cache(metadata.packages_distributions)

@pytest.mark.parametrize("script", [*SCRIPTS, "data/download.py"])
def test_what_a_script_imports_comes_with_the_requirements(script):
    assert not_brought((ROOT / script).read_text(encoding="utf-8")) == set()

def test_a_module_that_is_here_by_chance_is_found_out():
    assert not_brought("import json, numpy\ndef fetch():\n    import httpx\n    from httpx._types import x") == {"httpx"}
