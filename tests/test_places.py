"""recipes/: what stands where an output goes stays, whatever the program; numbers have ranges."""

import re
from collections import Counter

import pytest
from conftest import QRELS, ROOT, RUN, jsonl, tiny, tsv

HYBRID = "work/demo/test/hybrid.tsv"
FILE = "file"
FOLDER = "folder"
# The program and its words ({} is OUT), what OUT is, and what is written below WORK without --out
PLACES = [
    ("narratives", "llm --model m --out {}", FILE, "test/llm_narratives.tsv"),
    ("narratives", "train --model m --out {}", FOLDER, "models/narratives"),
    ("narratives", "classify --model m --out {}", FILE, "test/narratives.tsv"),
    ("narratives", "evaluate codes.tsv --out {}", FILE, "test/narrative_scores.codes.tsv"),
    ("on_ray", "rerank --only 0/2 --out {}", FILE, "test/rerank.tsv"),
    ("on_ray", "classify --only 0/2 --out {}", FILE, "test/verdicts.tsv"),
    ("on_ray", "index --only 0/2", FOLDER, "shards-2"),
    ("on_ray", "retrieve --only 0/2", FILE, "test/candidates.jsonl"),
    ("rewrite", "--model m --out {}", FILE, "test/claims.statement.tsv"),
    ("rewrite", "--model m --retry-errors", FILE, "test/claims.statement.requests.jsonl"),
    ("ev2r", "b.tsv --verdicts v.tsv --model m --pool p.tsv --out {}", FILE, "test/ev2r.pairs.tsv"),
    ("tools/average", "{} m m", FOLDER, None),
    ("tools/compare", "run {} true", FILE, None),
    ("tools/compare", "table {}", FILE, None),
    ("tools/expand", "b.tsv --out {}", FILE, "test/claims.expanded.tsv"),
    ("tools/fewshot", "--out {}", FILE, "test/fewshot.tsv"),
    ("tools/languages", "data/demo {}", FOLDER, None),
    ("tools/pool", "b.tsv --out {}", FILE, "test/pool.run.tsv"),
    ("tools/pool", "merge p.tsv --out {}", FILE, "test/qrels.tsv"),
    ("tools/sentences", "v.jsonl --model m --out {}", FILE, "test/claims.jsonl"),
    ("tools/stand_in", "{} --kind tiny-nli", FOLDER, None),
    ("tools/texts", "data/demo {}", FOLDER, None),
    ("tools/verdicts", "mean v.tsv --out {}", FILE, None),
    ("tools/word2vec", "data/demo --out {}", FILE, None),
]
BELOW = {"tools/languages": "/en", "tools/compare table": "/compare.tsv"}  # what OUT gets


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
    tsv(toy / "v.tsv", [*RUN, "label", "p_supports", "p_refutes", "p_nei"], "c3|0001|1|1|NEI|0|0|1")
    jsonl(toy / "v.jsonl", {"claim": "Ice", "evidence": []})
    return toy


def taken(toy, place, kind):
    """Put something of a user at a place where an output of this kind goes."""
    path = toy / place
    if kind == FOLDER:
        path = path / "mine"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")


def left(toy):
    """Return the names of what is not the program's own, and of what it has left behind."""
    return {path for path in toy.rglob("*") if path.name in ("mine", "a") or path.suffix == ".tmp"}


@pytest.mark.parametrize(("name", "words", "kind", "default"), PLACES)
def test_what_stands_where_an_output_goes_stays(
    ready, program, refused, name, words, kind, default
):
    below = BELOW.get(name, "") or BELOW.get(f"{name} {words.split()[0]}", "")
    taken(ready, "a", FILE)
    taken(ready, f"b{below}", FOLDER)
    taken(ready, f"c{below}", FILE)
    places = {"a/new": "a", "b": f"b{below}", "b/": f"b{below}"}
    if kind == FOLDER:
        places["c"] = f"c{below}"
    before = left(ready)
    said = "{}: not made by this script, which would replace it; give another name"
    if "{}" in words:
        for out, place in places.items():
            command = words.format(out).split()
            refused(ready, name, *command, said=said.format(place), by=program)
    if default:
        taken(ready, f"w/{default}", FOLDER)
        before = left(ready)
        command = words.replace("--out {}", "").split()
        for work, place in (("w", f"w/{default}"), ("w/", default), ("a", "a")):
            refused(ready, name, *command, "--work", work, said=said.format(place), by=program)
    assert left(ready) == before


def test_every_output_has_a_line_above():
    found = Counter()
    for path in [*ROOT.glob("recipes/*.py"), *ROOT.glob("recipes/tools/*.py")]:
        name = path.relative_to(ROOT / "recipes").with_suffix("").as_posix()
        pattern = r'add(?:_argument)?\("(?:--out|out|folder|row|work)"'
        found[name] += len(re.findall(pattern, path.read_text(encoding="utf-8")))
    assert +found == Counter(name for name, words, *_ in PLACES if "{}" in words)


def test_a_model_of_another_job_is_not_averaged_away(ready, program, refused):
    taken(ready, "trained", FOLDER)
    jsonl(ready / "trained.meta.json", {"arguments": {"job": "train"}})
    said = "trained: a model that this script has not made; name OUT before the models"
    refused(ready, "tools/average", "trained", "m", "m", said=said, by=program)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("narratives", "llm --fewshot -1"),
        ("narratives", "llm --max-tokens 0"),
        ("narratives", "llm --extra [1]"),
        ("narratives", "train --held-out 1.5"),
        ("narratives", "train --held-out 0"),
        ("narratives", "train --batch-size 0"),
        ("narratives", "train --epochs 0"),
        ("narratives", "train --lr nan"),
        ("narratives", "train --seed -1"),
        ("on_ray", "index --shards 0"),
        ("on_ray", "index --gpus -1"),
        ("ev2r", "b.tsv --verdicts v.tsv --depth 0"),
        ("ev2r", "b.tsv --verdicts v.tsv --seed -1"),
        ("check_claim", "Ice --top 0"),
        ("tools/count_tokens", "data/demo --max-length 0"),
        ("tools/expand", "--papers 0"),
        ("tools/expand", "--terms -1"),
        ("tools/fewshot", "--number 0"),
        ("tools/fewshot", "--seed -1"),
        ("tools/pool", "b.tsv --pool-depth 0"),
        ("tools/pool", "b.tsv --agreement 0"),
        ("tools/word2vec", "data/demo --out x --top-k 0"),
    ],
)
def test_numbers_out_of_their_range_are_refused(ready, program, refused, name, words):
    *_, flag, _ = words.split()
    refused(ready, name, *words.split(), said=flag, by=program)
