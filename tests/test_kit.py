"""The kit as a whole: shared blocks, scripts that stand alone, instant help, true pages."""

import functools
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import pytest
from blocks import blocks_of, main
from conftest import ROOT

TEXTS = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("0[1-6]_*.py")}
LIGHT = sorted(TEXTS)
LINES = {
    "01_index.py": 620,
    "02_retrieve.py": 590,
    "03_rerank.py": 620,
    "04_llm_rerank.py": 700,
    "05_classify.py": 970,
    "06_evaluate.py": 620,
}  # a whole file, with its blocks
BYTES = 55  # a line on average
BLOCKS = {"helpers": 150, "analyser": 10, "models": 20, "training": 60, "requests": 190}
UNTESTED = ["gensim==4.4.0"]  # of word2vec.py alone
HEAVY = {
    "torch",
    "transformers",
    "sentence_transformers",
    "datasets",
    "pandas",
    "scipy",
    "sklearn",
    "bm25s",
    "openai",
}  # a second and more to import
PINNED = "\n".join(
    (ROOT / folder / "requirements.txt").read_text(encoding="utf-8") for folder in ("", "tests")
)


@functools.cache
def call_help(script, *job):
    """Return what --help shows, and the packages that it has imported."""
    command = [sys.executable, "-X", "importtime", str(ROOT / script), *job, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = re.findall(r"\| +(\w+)$", done.stderr, re.M)
    return done.stdout, set(imported)


def help_of(script, *job):
    return call_help(script, *job)[0]


@functools.cache
def jobs_of(script):
    """Return the jobs of a script, the default one first."""
    return re.findall(r"^    ([a-z]+)  +[A-Z]", help_of(script), re.M)


def test_the_scripts_are_light():
    assert sum(text.count("\n") for text in TEXTS.values()) <= 4100
    assert sum(len(text.encode()) for text in TEXTS.values()) <= 214_000
    for most, folder in ((4000, "tests/*.py"), (950, "data/*.py"), (2000, "recipes/**/*.py")):
        lines = sum(path.read_text("utf-8").count("\n") for path in ROOT.glob(folder))
        assert lines <= most, folder
    for name in LIGHT:
        text = TEXTS[name]
        assert text.count("\n") <= LINES[name], name
        assert len(text.encode()) <= LINES[name] * BYTES, name
        assert max(map(len, text.splitlines())) <= 100, name


def test_shared_blocks_are_the_same_small_and_last(capsys):
    assert not main(fix=False), capsys.readouterr().out
    for name in LIGHT:
        for block, text in blocks_of(TEXTS[name]).items():
            assert text.count("\n") - 2 <= BLOCKS[block], block
            assert TEXTS[name].index(text) > TEXTS[name].index("\ndef main("), block


@pytest.mark.parametrize("script", TEXTS)
def test_a_script_imports_no_other_and_nothing_unsafe(script):
    text = TEXTS[script]
    assert not re.search(r"^\s*(from|import) (conftest|data|recipes|utils|helpers)\b", text, re.M)
    unsafe = "pickle trust_remote_code=True allow_pickle=True exec( shell=True torch.load".split()
    assert not [word for word in [*unsafe, " eval("] if word in text]


PROGRAMS = [
    str(path.relative_to(ROOT))
    for path in sorted(ROOT.glob("recipes/**/*.py"))
    if path.read_text(encoding="utf-8").startswith("# /// script")
]


@pytest.mark.parametrize("script", [*TEXTS, *PROGRAMS])
def test_the_header_pins_what_the_requirements_pin(script):
    text = (ROOT / script).read_text(encoding="utf-8")
    header = re.match(r"# /// script\n((?:#.*\n)*?)# ///\n", text)[1]
    for one in tomllib.loads(header.replace("#", ""))["dependencies"]:  # uv run reads these
        assert re.search(rf"^{re.escape(one)}\s", PINNED, re.M) or one in UNTESTED, one


def test_uv_runs_a_script_that_is_alone_in_a_folder(tmp_path):
    (tmp_path / "02_retrieve.py").write_text(TEXTS["02_retrieve.py"], encoding="utf-8")
    uv = shutil.which("uv") or f"{sys.prefix}/bin/uv"
    command = [uv, "run", "--no-project", "02_retrieve.py", "--help"]
    shown = subprocess.check_output(command, cwd=tmp_path, text=True)
    assert shown.startswith("usage: 02_retrieve.py [-h] JOB (default: retrieve)")


@pytest.mark.parametrize("script", TEXTS)
def test_help_shows_the_usage_the_docstring_and_a_sentence_for_each_job(script):
    shown, imported = call_help(script)
    docstring = TEXTS[script].split('"""')[1].strip()
    assert shown.split("\n", 2)[2].startswith(docstring) and not HEAVY & imported
    for job in jobs_of(script):
        assert re.search(rf"^    {job}\s+[A-Z][^.]+\.", shown, re.M), job


@pytest.mark.parametrize("script", LIGHT)
def test_the_help_of_a_job_shows_flags_and_their_defaults(script):
    for job in jobs_of(script):
        shown, imported = call_help(script, job)
        assert not HEAVY & imported and "(default: None)" not in shown, job
        for flag in ("--data DATA", "--work WORK", "--split SPLIT", "--force"):
            assert f"  {flag} " in shown or f"  {flag}\n" in shown, (job, flag)


def test_the_flags_are_few():
    shown = [help_of(script, job) for script in TEXTS for job in jobs_of(script)]
    assert sum(len(set(re.findall(r"^  (--[\w-]+)", text, re.M))) for text in shown) <= 320


CALL = r"\bpython ((?:0\d_\w+|data/\w+|recipes/(?:tools/)?\w+|tests/benchmarks/\w+)\.py.*)"


def commands(path):
    """Yield every call of a script in a page's shell blocks, a recipe or the notebook, as words."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":  # sh("...") or sh(f\"\"\"...\"\"\"), over one or several lines
        cells = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
        calls = re.findall(r'sh\(f?"+(.*?)"+\)', cells, re.S)
        text = "\n".join(" ".join(call.split()) for call in calls)
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", text, re.S) if path.suffix == ".md" else [text]
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        for call in re.findall(CALL, line.split(" #")[0])[:1]:
            call = re.split(r"; | && | -- ", call)[0]  # words behind -- go to another script
            call = re.sub(r'\.py"$', ".py", call)  # name="python SCRIPT.py"
            yield shlex.split(call.rstrip(" };"))


PAGES = [
    "README.md",
    *(
        str(path.relative_to(ROOT))
        for folder in ("data", "recipes")
        for ending in ("md", "sh", "ipynb")
        for path in sorted(ROOT.glob(f"{folder}/*.{ending}"))
    ),
]


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_only_flags_that_exist(page):
    for script, *words in commands(ROOT / page):
        with_jobs = re.findall(r"^    ([a-z][\w-]+)(?:  |$)", help_of(script), re.M)
        job = words[:1] if words and words[0] in with_jobs else []
        if not job and (script in TEXTS or "JOB (default: " in help_of(script)):
            job = jobs_of(script)[:1]
        for flag in (word.split("=")[0] for word in words if re.match(r"--\w", word)):
            known = re.search(rf"(?<![\w-]){flag}(?![\w-])", help_of(script, *job))
            assert known, f"{page}: {script} {job} has no {flag}"


def test_the_page_of_recipes_can_be_read_at_one_sitting():
    assert (ROOT / "recipes" / "README.md").stat().st_size <= 12_000


def test_readme_has_the_two_commands_and_pages_link_only_to_files_that_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tests = "pip install -r requirements.txt -r tests/requirements.txt && python -m pytest"
    assert "pip install -r requirements.txt && bash recipes/demo.sh" in text and tests in text
    for page in (ROOT / name for name in PAGES if name.endswith(".md")):
        for name in re.findall(r"\]\((?!http|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / name).exists(), (page, name)


def test_nothing_points_at_this_machine():
    command = ["git", "-C", str(ROOT), "ls-files"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    paths = [ROOT / name for name in done.stdout.split()] or list(ROOT.glob("*.*"))
    for path in filter(lambda path: path.is_file() and path.parent.name != "tests", paths):
        text = path.read_text(encoding="utf-8", errors="replace")
        assert not re.search(r"\.\./shared|(?<![\w.])/(work|root|tmp|opt)/\w", text), path


def test_six_scripts_in_sequence_with_data_alone(toy, call):
    """From a folder of data to verdicts and a table; stage 4 is left out."""
    (toy / "data/demo").rename(toy / "data/mine")
    for script, *words in (
        ("01_index.py",),
        ("02_retrieve.py",),
        ("02_retrieve.py", "--split", "train"),
        ("02_retrieve.py", "mine"),
        ("03_rerank.py", "train", "--epochs", 1),
        ("03_rerank.py",),
        ("05_classify.py", "train", "--epochs", 1),
        ("05_classify.py",),
    ):
        done = call(script, *words, "--data", "data/mine", cwd=toy)
        assert json.loads(done.stdout.splitlines()[-1])["made"], done.stderr
    assert "labelling work/mine/test/rerank.tsv" in done.stdout
    done = call("06_evaluate.py", "--data", "data/mine", cwd=toy)
    assert done.returncode == 0 and "| verdicts " in done.stdout
