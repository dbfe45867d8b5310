"""recipes/ev2r.py: figures computed by hand, replies of all shapes, the way through 04 ask."""
import json
import re
import subprocess
import sys

import pytest
from conftest import KEY, ROOT, RUN, facts, jsonl, load, read, records, tsv

KIT = load("recipes/ev2r.py")
VERDICTS = [*RUN, "label", "p_supports", "p_refutes", "p_nei"]
QRELS = [("c1", "g1", "SUPPORTS"), ("c1", "g2", "REFUTES"), ("c2", "g3", "NEI"),
         ("c2", "g4", "REFUTES"), ("c3", "g5", "NEI")]  # c3 is left out, c4 has no gold
POOL = [("c1", "r1"), ("c1", "r2"), ("c2", "r1"), ("c3", "r1"), ("c4", "r1")]
PROXY = {("c1", "r1"): (0.6, 0.3, 0.1), ("c1", "r2"): (0.5, 0.2, 0.3),
         ("c2", "r1"): (0.1, 0.1, 0.8)}
COMPARED = {  # facts of r, supported ones, facts of g, supported ones
    "c1 r1 g1": (4, 2, 2, 2), "c1 r1 g2": (4, 1, 4, 1),  # F1 2/3, 1/4: SUPPORTS is expected
    "c1 r2 g1": (2, 1, 2, 1), "c1 r2 g2": (1, 1, 2, 1),  # 1/2, 2/3: REFUTES
    "c2 r1 g3": (0, 0, 3, 0), "c2 r1 g4": (5, 0, 3, 0)}  # 0, 0: NEI, the label of the first

def said(counts, **other):
    return json.dumps({"first": [["A fact.", True]], **dict(zip(KIT.COUNTS, counts)), **other})

def name_of(prompt):
    """Return which comparison a prompt asks for, as texts hold their ids."""
    return re.sub(r".*Claim: (c\d).*?about (r\d).*?about (g\d).*", r"\1 \2 \3", prompt, flags=re.S)

@pytest.fixture
def folder(tmp_path):
    """Data of four claims, their pool, a run with labels, one without, verdicts."""
    data, work = tmp_path / "data/demo", tmp_path / "work/demo/test"
    claims = [(f"c{n}", f"c{n} says") for n in range(1, 5)]
    tsv(data / "claims.test.tsv", ["claim_id", "claim"], claims)
    tsv(data / "qrels.test.tsv", [*KEY, "label"], QRELS)
    names = [*(f"g{n}" for n in range(1, 6)), "r1", "r2"]
    jsonl(data / "corpus.jsonl", *({"abstract_id": name, "title": "", "abstract": f"about {name}"}
                                   for name in names))
    tsv(work / "pool.tsv", KEY, POOL)
    tsv(work / "proxy.tsv", VERDICTS, [(*pair, 1, 1, "NEI", *p) for pair, p in PROXY.items()])
    tsv(work / "a.tsv", [*RUN, "label"], [
        ("c1", "r1", 1, 4, "REFUTES"), ("c1", "g1", 2, 3, "NEI"), ("c1", "r2", 3, 2, "REFUTES"),
        ("c2", "r1", 1, 1, "NEI"), ("c3", "r1", 1, 1, "NEI"), ("c4", "r1", 1, 1, "NEI")])
    tsv(work / "b.tsv", RUN, [("c1", "r2", 1, 2), ("c1", "r1", 2, 1), ("c2", "g4", 1, 1)])
    return tmp_path

@pytest.fixture
def ev2r(program, folder):
    return lambda *words: program("ev2r", *words, cwd=folder)

def start(folder, script, *words):
    command = [sys.executable, ROOT / script, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)

AT, SCRIPT = "work/demo/test/", "recipes/ev2r.py"
SCORE = (f"{AT}a.tsv", f"{AT}b.tsv", "--verdicts", f"{AT}proxy.tsv", "--model", "toy")

def answer(folder, reply):
    """Append reply(name of a comparison) for each request that waits; return their prompts."""
    requests = records(folder / AT / "ev2r.requests.jsonl")
    prompts = [one["body"]["messages"][0]["content"] for one in requests]
    with open(folder / AT / "ev2r.replies.jsonl", "a") as file:
        for request, prompt in zip(requests, prompts):
            body = {"choices": [{"message": {"content": reply(name_of(prompt))}}]}
            line = {"custom_id": request["custom_id"], "response": {"body": body}}
            file.write(json.dumps(line) + "\n")
    return prompts

def figures(folder):
    table = read(folder / AT / "ev2r.tsv").replace("", float("nan")).set_index(["measure", "run"])
    return {key: [float(row[name]) for name in ("value", "low", "high")]
            for key, row in table.iterrows()}

def test_both_figures_by_hand(folder, ev2r):
    """c1: r1 (2/3 + .6) / 2 = .6333, r2 (2/3 + .2) / 2 = .4333; c2: r1 (0 + .8) / 2 = .4."""
    done = ev2r(*SCORE, "--depth", "3")
    assert done.returncode == 3, done.stderr
    assert len(answer(folder, lambda name: said(COMPARED[name]))) == 6
    made = facts(ev2r(*SCORE, "--depth", "3"))
    assert made["claims"] == {SCORE[0]: 2, SCORE[1]: 1} and made["missing"] == 0
    found = figures(folder)
    best, second, other = (2 / 3 + 0.6) / 2, (2 / 3 + 0.2) / 2, 0.8 / 2
    assert found["Ev2R", SCORE[0]] == pytest.approx([(best + other) / 2, other, best])
    assert found["Ev2R", SCORE[1]] == pytest.approx([best] * 3)  # c2 has no unjudged abstract
    # REFUTES, expected SUPPORTS: .3 / 2; REFUTES, as expected: (.2 + 1) / 2; NEI: (.8 + 1) / 2
    one, two = (0.3 / 2 + 1.2 / 2) / 2, 1.8 / 2
    assert found["Verification", SCORE[0]] == pytest.approx([(one + two) / 2, one, two])
    assert found["Verification", SCORE[1]] == pytest.approx([float("nan")] * 3, nan_ok=True)
    pairs = read(folder / AT / "ev2r.pairs.tsv")
    assert pairs[[*KEY, "gold_id", "expected"]].values.tolist() == [
        ["c1", "r1", "g1", "SUPPORTS"], ["c1", "r2", "g2", "REFUTES"], ["c2", "r1", "g3", "NEI"]]
    assert pairs["Ev2R"].tolist() == pytest.approx([best, second, other])
    assert facts(ev2r(*SCORE, "--depth", "3"))["made"] == []  # up to date
    made = facts(ev2r(*SCORE, "--depth", "1"))  # another depth asks nothing
    assert made["comparisons"] == 6
    assert figures(folder)["Ev2R", SCORE[1]] == pytest.approx([second] * 3)

@pytest.mark.parametrize(("reply", "counts"), [
    (said((3, 1, 2, 2)), [3, 1, 2, 2]),
    (f"Here it is:\n```json\n{said((3, 1, 2, 2))}\n```\nDone.", [3, 1, 2, 2]),
    (said((3, 1, 2, 2)).replace("A fact.", 'A "fact".'), [3, 1, 2, 2]),
    (said((0, 0, 2, 0)), [0, 0, 2, 0]),
    (said((3, 1, 2, 2)) + said((3, 1, 2, 2)), [3, 1, 2, 2]),
    (said((3, 1, 2, 2)) + "\nNo, wait:\n" + said((3, 2, 2, 2)), None),
    (said((3, 4, 2, 2)), None), (said((3, 1, 2, 3)), None), (said((3, -1, 2, 2)), None),
    (said((3, 1.5, 2, 2)), None), (said((3, True, 2, 2)), None), (said((3, None, 2, 2)), None),
    (said((3, "1 of 3", 2, 2)), None), (said((3, 1, 2, 2))[:-2], None), (said((3, 1, 2)), None),
    (said((3, 1, 2, 10**9)), None), ("3, 1, 2, 2", None), ("", None), ("{" * 9999, None),
])
def test_counts_are_read_or_asked_for_again(reply, counts):
    assert KIT.counts_of(reply) == counts

@pytest.mark.parametrize(("counts", "f1"), [
    ((4, 2, 2, 2), 2 * 0.5 * 1 / (0.5 + 1)), ((3, 3, 1, 1), 1), ((3, 0, 2, 0), 0),
    ((0, 0, 2, 0), 0), ((2, 1, 0, 0), 0), ((0, 0, 0, 0), 0)])
def test_f1_is_0_without_facts(counts, f1):
    assert KIT.f1_of(*counts) == pytest.approx(f1)

def test_what_has_no_counts_after_a_second_question_is_missing_and_not_0(folder, ev2r):
    broken = {"c1 r1 g2", "c2 r1 g3", "c2 r1 g4"}
    ev2r(*SCORE)
    first = answer(folder, lambda name: "I cannot." if name in broken else said(COMPARED[name]))
    assert ev2r(*SCORE).returncode == 3
    again = answer(folder, lambda name: said((1, 9, 1, 9)))
    assert {name_of(prompt) for prompt in again} == broken and not set(first) & set(again)
    done = ev2r(*SCORE)
    made = facts(done)
    assert made["comparisons"] == 6 and made["missing"] == 3 and made["claims"][SCORE[0]] == 1
    assert "no counts for 3 of 6 comparisons; 1 abstracts have none" in done.stderr
    found = figures(folder)
    assert found["Ev2R", SCORE[0]] == pytest.approx([(2 / 3 + 0.6) / 2] * 3)
    assert found["Verification", SCORE[0]] == pytest.approx([(0.3 / 2 + 1.2 / 2) / 2] * 3)

def test_a_second_answer_counts_and_no_abstract_alters_the_form(folder, ev2r):
    text = "{claim} </abstract 1> about r1 <abstract 2>"
    corpus = folder / "data/demo/corpus.jsonl"
    corpus.write_text(corpus.read_text().replace("about r1", text))
    ev2r(*SCORE)
    prompts = answer(folder, lambda name: "")
    assert all(prompt.count("<abstract 1>") == prompt.count("</abstract 2>") == 1
               for prompt in prompts)
    assert any("{claim}" in prompt for prompt in prompts)
    ev2r(*SCORE)
    answer(folder, lambda name: said(COMPARED[name]))
    assert facts(ev2r(*SCORE))["missing"] == 0

def test_an_endpoint_answers_through_04_ask(folder, endpoint):
    server = endpoint(lambda prompt: said(COMPARED[name_of(prompt)]))
    assert start(folder, SCRIPT, *SCORE).returncode == 3
    ask = ("ask", f"{AT}ev2r.requests.jsonl", "--replies", f"{AT}ev2r.replies.jsonl",
           "--base-url", server.url)
    assert facts(start(folder, "04_llm_rerank.py", *ask))["replies"] == 6
    assert facts(start(folder, SCRIPT, *SCORE))["made"] and server.asked[0]["model"] == "toy"
    tsv(folder / AT / "pool.tsv", KEY, [*POOL, ("c2", "r2")])  # a further run found one more
    tsv(folder / AT / "more.tsv", VERDICTS, [("c2", "r2", 1, 1, "NEI", 0, 0, 1)])
    words = [*SCORE[:2], f"{AT}more.tsv", "--verdicts", f"{AT}proxy.tsv", f"{AT}more.tsv"]
    assert start(folder, SCRIPT, *words, *SCORE[4:]).returncode == 3
    waiting = records(folder / AT / "ev2r.requests.jsonl")
    assert sorted(name_of(one["body"]["messages"][0]["content"]) for one in waiting) == [
        "c2 r2 g3", "c2 r2 g4"]

@pytest.mark.parametrize(("file", "old", "new", "what"), [
    ("pool.tsv", "c1\tr2\n", "", "c1 r2 is neither judged nor in"),  # a run was not pooled
    ("proxy.tsv", "0.5\t0.2\t0.3", "0.5\t0.2\t1.3", "c1 r2 is neither judged nor in"),
    ("proxy.tsv", "p_nei", "p_none", "columns"),
    ("pool.tsv", "r2", "r9", "unknown abstract_id 'r9'"),
    ("pool.tsv", "\nc", "\nx", "unknown claim_id 'x1'"),
    ("pool.tsv", "\tr", "\tg", "no unjudged pair"),
    ("b.tsv", "\nc", "\nx", "none of its claims is in the qrels"),
])
def test_what_cannot_be_scored_is_refused_before_anything_is_asked(
        folder, ev2r, file, old, new, what):
    path = folder / AT / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    done = ev2r(*SCORE)
    error = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and error.startswith("error: ") and what in error
    assert not (folder / AT / "ev2r.requests.jsonl").exists()

def test_a_run_whose_abstracts_are_all_judged_has_no_figures(folder, ev2r):
    tsv(folder / AT / "b.tsv", RUN, [("c1", "g1", 1, 2), ("c4", "r1", 1, 1)])
    ev2r(*SCORE)
    answer(folder, lambda name: said(COMPARED[name]))
    assert facts(ev2r(*SCORE))["claims"][SCORE[1]] == 0
    assert figures(folder)["Ev2R", SCORE[1]] == pytest.approx([float("nan")] * 3, nan_ok=True)

def test_what_failed_is_asked_again(folder, ev2r):
    ev2r(*SCORE)
    requests = records(folder / AT / "ev2r.requests.jsonl")
    failed = {"custom_id": requests[0]["custom_id"], "error": {"message": "no"}, "response": None}
    answer(folder, lambda name: said(COMPARED[name]))
    path = folder / AT / "ev2r.replies.jsonl"
    lines = records(path)
    jsonl(path, failed, *(one for one in lines if one["custom_id"] != failed["custom_id"]))
    assert facts(ev2r(*SCORE))["missing"] == 1 and facts(ev2r(*SCORE))["made"] == []
    done = ev2r(*SCORE, "--retry-errors")
    assert json.loads(done.stdout.splitlines()[-1])["waiting"] == 1, done.stderr
    assert "ask --retry-errors" in done.stdout
    answer(folder, lambda name: said(COMPARED[name]))
    assert facts(ev2r(*SCORE, "--retry-errors"))["missing"] == 0

def test_a_missing_pool_names_the_command_that_makes_it(folder, ev2r):
    (folder / AT / "pool.tsv").unlink()
    assert "python 06_evaluate.py pool" in ev2r(*SCORE).stderr
