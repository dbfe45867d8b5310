"""recipes/: what stands where an output goes stays; bad input of the programs is one line.

places.tsv has a line for each output: a program, its arguments (OUT is what is written), whether
this is a file or a folder, what the program puts below OUT, and the default below WORK.
bad_recipes.tsv has what x.json holds (| is a tab, ; the end of a line), and a part of the error.
"""

import re
from collections import Counter

import pytest
from conftest import QRELS, ROOT, RUN, VERDICTS, cases, jsonl, tiny, tsv

PLACES = cases("places.tsv")
REFUSED = "{}: not made by this script, which would replace it"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("models") / "m", ["x"])


@pytest.fixture
def ready(toy, model, monkeypatch):
    """The toy with inputs of all programs."""
    monkeypatch.syspath_prepend(ROOT)
    (toy / "m").symlink_to(model)
    for name in ("codes.tsv", "data/demo/narratives.train.tsv", "data/demo/narratives.test.tsv"):
        tsv(toy / name, ["claim_id", "codes"], "c1|0_0; c2|0_0")
    tsv(toy / "b.tsv", RUN, "c3|0001|1|1")
    tsv(toy / "p.tsv", QRELS, "c3|0001|NEI")
    tsv(toy / "v.tsv", VERDICTS, "c3|0001|1|1|NEI|0|x|1")
    jsonl(toy / "v.jsonl", {"claim": "Ice", "evidence": []})
    tsv(toy / "torn/claims.x.tsv", ["claim_id", "claim", "language"], "1|Ice|../x")
    (toy / "torn/model.safetensors").write_text("torn")
    return toy


def taken(path, kind):
    """Put something of a user at a place."""
    if kind == "folder":
        path = path / "mine"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")


def left(toy):
    """Return the files of the user, and what a program has left behind."""
    return {path for path in toy.rglob("*") if path.name == "mine" or path.suffix == ".tmp"}


@pytest.mark.parametrize("name, words, kind, below, default", PLACES)
def test_what_stands_there_stays(ready, program, refused, name, words, kind, below, default):
    taken(ready / "b" / below, "folder")
    taken(ready / "w" / default, "folder")
    calls = []
    if "OUT" in words:
        calls = [("b", f"b/{below}"), ("b/", f"b/{below}")]
    if "OUT" in words and kind == "folder":
        taken(ready / "c" / below, "file")
        calls.append(("c", f"c/{below}"))
    calls = [(words.replace("OUT", out), place) for out, place in calls]
    if default:
        words = words.replace("--out OUT", "--work")
        if "--work" not in words:
            words += " --work"
        calls += [(f"{words} w", f"w/{default}"), (f"{words} w/", default)]
    before = left(ready)
    for call, place in calls:
        refused(ready, name, *call.split(), said=REFUSED.format(place.rstrip("/")), by=program)
    assert left(ready) == before


def test_every_output_has_its_line():
    found = Counter()
    for path in [*ROOT.glob("recipes/*.py"), *ROOT.glob("recipes/tools/*.py")]:
        name = path.relative_to(ROOT / "recipes").with_suffix("").as_posix()
        pattern = r'add(?:_argument|_training\(add,)?[( ]"(?:--out|out|folder|row|work|narratives)"'
        found[name] += len(re.findall(pattern, path.read_text(encoding="utf-8")))
    assert +found == Counter(name for name, words, *_ in PLACES if "OUT" in words)


def test_a_model_of_another_job_is_not_averaged_away(ready, program, refused):
    taken(ready / "trained", "folder")
    jsonl(ready / "trained.meta.json", {"arguments": {"job": "train"}})
    said = "trained: a model that this script has not made; name OUT before the models"
    refused(ready, "tools/average", "trained", "m", "m", said=said, by=program)


@pytest.mark.parametrize("name, words, text, said", cases("bad_recipes.tsv"))
def test_bad_input_is_one_line(ready, program, refused, name, words, text, said):
    for file in ("x.json", "metrics.json"):
        (ready / file).write_text(text.replace("|", "\t").replace(";", "\n"))
    refused(ready, name, *words.split(), said=said, by=program, kept=".log")
