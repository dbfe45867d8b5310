"""The nine systems, each in small on the demo, against a scripted endpoint; and how their files are written."""
import os
import re
import subprocess
import sys

import pandas as pd
import pytest
from conftest import ROOT, SECRETS

RECIPES = ROOT / "recipes"
SYSTEMS = {  # the runs that its table holds, and the submission that it ends in
    "kiepura_lam": ("bm25 splade dense hybrid rerank llm verdicts deberta", "climatecheck2025"),
    "ant_bridge": ("bm25 rerank verdicts", "climatecheck2025"),
    "alexunlp_fmt": ("bm25 dense union rerank", "climatecheck2025"),
    "efc": ("bm25 dense rerank verdicts llm_verdicts", "climatecheck2025"),
    "pranav": ("splade llm", "climatecheck2025"),
    "baseline_2025": ("bm25 dense rerank verdicts", "climatecheck2025"),
    "airwaves": ("bm25 dense rerank", "checkthat4b"),
    "verirel": ("bm25 combo verirel verdicts", None),
    "climatesense_2026": ("bm25 rerank verdicts", "climatecheck2026"),
}

# ----------------------------------------------------------- Running one
def answer(prompt):
    """What a language model could say to any question of stages 4 and 5."""
    if pairs := re.findall(r"^<pair (\d+)>", prompt, re.M):
        return "\n".join(f"{number}: {int(number) % 3}" for number in pairs)
    if marks := re.findall(r"^\[(\d+)\]", prompt, re.M):
        return " > ".join(f"[{mark}]" for mark in [*marks[1::-1], *marks[2:]])
    label = ("SUPPORTS", "REFUTES", "NEI")[len(prompt) % 3]
    return f"The two match in part.\nLabel: {label}" if "Label:" in prompt else label

@pytest.fixture
def recipe(tmp_path, stand_in, endpoint, warm_python):
    """recipe("pranav"): bash recipes/pranav.sh in small on the demo, against the scripted endpoint."""
    server = endpoint(answer)
    env = {key: value for key, value in os.environ.items() if key not in SECRETS}
    env |= {"PATH": f"{warm_python}:{env['PATH']}", "HF_HUB_OFFLINE": "1", "LLM_BASE_URL": server.url, "LLM_MODEL": "toy",
            "DATA": "data/demo", "SMALL": "1", "WORK": str(tmp_path / "work")}
    return lambda name: subprocess.run(["bash", str(RECIPES / f"{name}.sh")], env=env, stdout=subprocess.PIPE,
                                       stderr=subprocess.STDOUT, text=True, check=False)

@pytest.fixture(scope="session")
def stand_in(models, tmp_path_factory):
    """work/small/cross-encoder, made before recipes run side by side, and anew where its script has changed."""
    from filelock import FileLock

    folder, script = ROOT / "work/small/cross-encoder", RECIPES / "stand_in.py"
    with FileLock(tmp_path_factory.getbasetemp().parent / "stand-in.lock"):
        if not folder.is_dir() or folder.stat().st_mtime < script.stat().st_mtime:
            subprocess.run([sys.executable, str(script), str(folder)], cwd=ROOT, capture_output=True, check=True)
    return folder

@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_in_small(name, recipe, tmp_path):
    done = recipe(name)
    assert done.returncode == 0, done.stdout[-3000:]
    runs, task = SYSTEMS[name]
    table = pd.read_csv(tmp_path / "work/test/metrics.tsv", sep="\t").set_index("run")
    assert list(table.index) == runs.split()
    assert table.select_dtypes("number").max(axis=None) <= 2 and table.iloc[:, 2].between(0.2, 1).all()  # R@10 or its like
    large = set(re.findall(r"\$\((?:model|llm) ([^\s)]+)", (RECIPES / f"{name}.sh").read_text()))
    assert large == set(re.findall(r"^small: .* stands for (\S+)$", done.stdout, re.M))
    if task:
        file = next(path for path in (tmp_path / "work/test" / task).iterdir() if path.suffix in (".csv", ".tsv"))
        assert pd.read_csv(file, sep=None, engine="python", dtype=str).iloc[:, 0].nunique() == 25
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("*") if path.is_file()}
    again = recipe(name)  # a second time makes nothing
    assert again.returncode == 0, again.stdout[-3000:]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("*") if path.is_file()} == before

# ----------------------------------------------------------- The stand-in
def test_the_stand_in_scores_how_much_of_a_claim_an_abstract_holds(stand_in):
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(stand_in)
    model = AutoModelForSequenceClassification.from_pretrained(stand_in).eval()
    texts = ["Bread is baked from flour.", "The bread of the baker is the best of all.", "Norway bakes bread from flour.",
             "Glaciers in Norway, and bread.", "Melting glaciers in Norway are the talk of the town.",
             "Melting glaciers in Norway are the talk of the town. " + "Bread is baked from flour. " * 60]
    claim, how = "the glaciers of norway are melting", {"return_tensors": "pt", "truncation": True}
    with torch.inference_mode():
        coded = [tokenizer(claim, text, **how) for text in texts]
        scores = [model(**one).logits.item() for one in coded]
        hidden = model.bert.embeddings(coded[0]["input_ids"], coded[0]["token_type_ids"])
    none, grammar, norway, two, whole, long = scores
    assert none < grammar < norway < two < whole  # a rare word weighs more than three frequent ones
    assert abs(long - whole) < 0.1 * (whole - none)  # however much else stands there
    torch.testing.assert_close(hidden[..., :128].norm(dim=-1), torch.ones(hidden.shape[:2]))
    torch.testing.assert_close(hidden[..., :128], -hidden[..., 128:])

@pytest.mark.parametrize("settings, words", [
    ({"SMALL": ""}, ["LLM_BASE_URL", "gemini-2.0-flash"]),  # before hours of work, not after them
    ({"SMALL": "", "OPENAI_API_KEY": "sk-1"}, ["LLM_BASE_URL", "gemini-2.0-flash"]),  # OpenAI has no Gemini
    ({"SMALL": "yes"}, ["SMALL", "'yes'"]),
    ({"SMALL": "1", "DATA": "data/dmeo"}, ["DATA", "'data/dmeo'"]),  # no download under a mistyped name
    ({"SMALL": "1", "DATA": "my data"}, ["DATA", "'my data'"]),
])
def test_what_would_fail_later_is_said_before_anything_is_made(settings, words, tmp_path):
    env = {key: value for key, value in os.environ.items() if key not in SECRETS}
    env |= {"DATA": "data/demo", "WORK": str(tmp_path / "work"), **settings}
    done = subprocess.run(["bash", str(RECIPES / "pranav.sh")], env=env, capture_output=True, text=True, check=False)
    error, = done.stderr.splitlines()
    assert done.returncode == 2 and error.startswith("error: ") and not (tmp_path / "work").exists()
    assert all(word in error for word in words)

# ----------------------------------------------------------- How they are written
@pytest.mark.parametrize("name", SYSTEMS)
def test_a_recipe_is_short_and_holds_nothing_but_calls(name):
    text = (RECIPES / f"{name}.sh").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 50
    assert "# Published, " in text.split("06_evaluate.py")[-1]
    call = r"(\s+|\[ .* \] \|\| )?python (0\d_\w+|data/download)\.py "
    for line in filter(None, text.replace("\\\n", " ").splitlines()):
        assert re.match(rf"#|\. |stage |{call}|[A-Z][A-Z0-9_]*\+?=|for |done", line), line
        assert "python 0" not in line or "$D" in line, line

