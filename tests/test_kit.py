"""The kit as a whole: shared blocks, scripts that stand alone, instant help, true pages."""

import contextlib
import functools
import io
import json
import re
import runpy
import shlex
import string
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest import mock

import pytest
from blocks import blocks_of, main
from conftest import ROOT, cases, facts, load
from plain import finds_in, weight

TEXTS = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("0[1-6]_*.py")}
LINES = 1350  # of a script
TOKENS = {
    "01_index.py": 5700,
    "02_retrieve.py": 5100,
    "03_rerank.py": 6500,
    "04_llm_rerank.py": 7800,
    "05_classify.py": 8800,
    "06_evaluate.py": 6900,
    "0*.py": 40_800,
    "recipes/train/*.py": 7700,
    "recipes/**/*.py": 34_000,
    "data/*.py": 10_500,
    "tests/*.py": 62_000,
}
BLOCKS = {"helpers": 2060, "language models": 2040, "pairs": 1140}  # those above 600 tokens
WORDS = {"README.md": 1400, "**/*.md": 18_500}
PAGE_LINES = 140  # of HTML, CSS and JavaScript in 06_evaluate.py
UNTESTED = ["gensim==4.4.0"]  # of word2vec.py alone
# A second and more to import
HEAVY = set(
    "torch transformers sentence_transformers datasets pandas scipy sklearn bm25s openai".split()
)
PINNED = "\n".join(
    (ROOT / folder / "requirements.txt").read_text(encoding="utf-8") for folder in ("", "tests")
)


@functools.cache
def help_of(script, *job):
    """Return what --help shows, without a process of its own."""
    path = str(ROOT / script)
    shown = io.StringIO()
    sys.modules.pop("published", None)  # data/ and recipes/tools/ both have one
    as_called = {"argv": [path, *job, "--help"], "path": [str(Path(path).parent), *sys.path]}
    with mock.patch.multiple(sys, **as_called), contextlib.redirect_stdout(shown):
        with pytest.raises(SystemExit) as end:
            runpy.run_path(path, run_name="__main__")
    assert not end.value.code
    return shown.getvalue()


@functools.cache
def jobs_of(script):
    """Return the jobs of a script, the default one first."""
    text = (ROOT / script).read_text(encoding="utf-8")
    alone = re.findall(r"(?:command_line\(\{|run\(__doc__, )(\w+)(?:: \w+\}\)|, )", text)
    return alone or re.findall(r"^    ([a-z]+)  +[A-Z]", help_of(script), re.M)


def texts_of(pattern):
    """Return the texts of files that belong to the kit."""
    texts = []
    for path in ROOT.glob(pattern):
        if not set(path.relative_to(ROOT).parts) & {".venv", "work", "models"}:
            texts.append(path.read_text(encoding="utf-8"))
    return texts


def test_the_kit_is_light():
    assert load("06_evaluate.py").PAGE.count("\n") <= PAGE_LINES
    for text in TEXTS.values():
        assert text.count("\n") <= LINES and len(blocks_of(text)) <= 7
    for pattern, limit in TOKENS.items():
        assert sum(map(weight, texts_of(pattern))) <= limit, pattern
    for pattern, limit in WORDS.items():
        assert sum(len(text.split()) for text in texts_of(pattern)) <= limit, pattern


def test_nothing_has_to_be_decoded():
    for text in texts_of("**/*.py"):
        assert not finds_in(text), text[:200]


@pytest.mark.parametrize("line, finds", cases("packed.tsv"))
def test_the_finder_finds_packed_lines(line, finds):
    assert len(finds_in(line)) == int(finds)


def test_shared_blocks_are_the_same_small_and_last(capsys):
    assert not main(fix=False), capsys.readouterr().out
    for script in TEXTS.values():
        for block, text in blocks_of(script).items():
            assert weight(text) <= BLOCKS.get(block, 600), block
            assert script.index(text) > script.index("\ndef main("), block


@pytest.mark.parametrize("script", TEXTS)
def test_a_script_imports_no_other_and_nothing_unsafe(script):
    text = TEXTS[script]
    assert not re.search(r"^\s*(from|import) (conftest|data|recipes|utils|helpers)\b", text, re.M)
    unsafe = "pickle trust_remote_code=True allow_pickle=True exec( shell=True torch.load(".split()
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


@pytest.mark.parametrize("script", [*TEXTS, *[name for name in PROGRAMS if "/train/" in name]])
def test_help_shows_the_usage_the_docstring_and_a_sentence_for_each_job(script):
    command = [sys.executable, "-X", "importtime", str(ROOT / script), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = set(re.findall(r"\| +(\w+)$", done.stderr, re.M))
    shown = done.stdout
    docstring = (ROOT / script).read_text(encoding="utf-8").split('"""')[1].strip()
    assert f"\n{docstring}\n" in shown and not HEAVY & imported
    jobs = jobs_of(script)
    for job in jobs:
        is_shown = re.search(rf"^    {job}\s+[A-Z][^.]+\.", shown, re.M)
        assert is_shown or len(jobs) == 1, job


@pytest.mark.parametrize("script", TEXTS)
def test_the_help_of_a_job_shows_flags_as_sentences_with_their_defaults(script):
    for job in jobs_of(script):
        shown = help_of(script, job)
        assert not re.search(r"\(default: (None|False|\[\])?\)", shown), job
        entries = re.findall(
            r"^  (--[\w-]+)[^\n]*?(?:\n {20,}|  +)(.*?)(?=\n  \S|\n\n|\Z)", shown, re.M | re.S
        )
        for flag, text in entries:
            assert len(text.split("(default:")[0].split()) >= 4, (job, flag, text)
        assert ("--split SPLIT" in shown) == ("{split}/" in shown or ".{split}." in shown), job
        if job != "ask":  # its files are named
            assert {"--data", "--work", "--force"} <= {flag for flag, _ in entries}, job
            assert re.findall(r"^([a-z].+):$", shown, re.M)[-1] == "shared by all scripts", job


def test_the_flags_are_few():
    shown = [help_of(script, job) for script in TEXTS for job in jobs_of(script)]
    assert sum(len(set(re.findall(r"^  (--[\w-]+)", text, re.M))) for text in shown) <= 200


CALL = r"\bpython ((?:0\d_\w+|data/\w+|recipes/(?:tools/|train/)?\w+|tests/benchmarks/\w+)\.py.*)"


def commands(path):
    """Yield every call of a script in a page's code, a recipe or a notebook, as words.

    A variable of flags, such as D="--data data/mine", stands for them.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":  # sh("...") or sh(f\"\"\"...\"\"\"), over one or several lines
        cells = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
        calls = re.findall(r'sh\(f?"+(.*?)"+\)', cells, re.S)
        text = "\n".join(" ".join(call.split()) for call in calls)
    blocks = [text]
    if path.suffix == ".md":
        blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", text, re.S)
        for call in re.findall(r"(?<!`)`(?:python )?((?!.*NAME.py)[\w/]+\.py [^`]+)`", text):
            blocks.append("python " + " ".join(call.split()))
    flags = {}
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        flags |= re.findall(r'\b(\w+)="(--[^"]*)"', line)
        line = string.Template(line).safe_substitute(flags)
        for call in re.findall(CALL, line.split(" #")[0])[:1]:
            call = re.split(r"; | && | -- ", call)[0]  # words behind -- go to another script
            call = re.sub('^([^"]*)"$', r"\1", call)  # name="python SCRIPT.py FLAGS"
            yield shlex.split(call.rstrip(" };"))


PATTERNS = "*.md data/*.md recipes/**/*.md recipes/**/*.sh recipes/*.ipynb tests/**/*.md"
PAGES = sorted(
    str(path.relative_to(ROOT)) for pattern in PATTERNS.split() for path in ROOT.glob(pattern)
)


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


def test_readme_has_the_two_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tests = "pip install -r requirements.txt -r tests/requirements.txt && python -m pytest"
    assert "pip install -r requirements.txt && bash recipes/demo.sh" in text and tests in text


def anchors_of(page):
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    anchors = []
    for heading in re.findall(r"^#+ (.+)$", text, re.M):
        anchor = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        number = anchors.count(anchor)
        anchors.append(f"{anchor}-{number}" if number else anchor)
    return anchors


def test_every_link_of_a_page_leads_to_a_file_and_a_heading():
    assert len(PAGES) > 6
    for page in map(ROOT.joinpath, PAGES):
        text = page.read_text(encoding="utf-8")
        for name, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)", text):
            target = page.parent / name if name else page
            assert target.exists(), (page, name)
            assert not anchor or anchor in anchors_of(target), (page, name, anchor)


def test_nothing_points_at_this_machine():
    command = ["git", "-C", str(ROOT), "ls-files"]
    done = subprocess.run(command, capture_output=True, text=True)
    paths = [ROOT / name for name in done.stdout.split()] or list(ROOT.glob("*.*"))
    for path in filter(lambda path: path.is_file() and path.parent.name != "tests", paths):
        text = path.read_text(encoding="utf-8", errors="replace")
        assert not re.search(r"\.\./shared|(?<![\w.])/(work|root|tmp|opt)/\w", text), path


def test_six_scripts_in_sequence_with_data_alone(toy, call):
    """From a folder of data to verdicts and a table; stage 4 is left out."""
    (toy / "data/demo").rename(toy / "data/mine")
    commands = """01_index.py; 02_retrieve.py; 02_retrieve.py --split train; mine.py;
        reranker.py --epochs 1; 03_rerank.py; classifier.py --epochs 1; 05_classify.py"""
    for command in commands.split(";"):
        script, *words = command.split()
        done = call(script, *words, "--data", "data/mine", cwd=toy)
        assert facts(done)["made"]
        assert "LOAD REPORT" not in done.stderr and not re.search(r"[\r\n] *\d+%\|", done.stderr)
        assert ("a new classification head" in done.stdout) == (script == "classifier.py")
    assert "labelling work/mine/test/rerank.tsv" in done.stdout
    done = call("06_evaluate.py", "--data data/mine", cwd=toy)
    assert facts(done) and "verdicts" in done.stdout
