"""05_classify.py: labels and probabilities, training, language models, verdicts on claims."""

import json
import re
import shutil
import time
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from conftest import (
    LABELLED,
    LABELS,
    ROOT,
    RUN,
    cases,
    facts,
    jsonl,
    kill_before,
    load,
    read,
    records,
    tiny,
    tiny_llm,
    tsv,
)

SCRIPT = "05_classify.py"
KIT = load(SCRIPT)
HYBRID = "--run work/demo/test/hybrid.tsv"
P = ["p_supports", "p_refutes", "p_nei"]
NLI = ["contradiction", "neutral", "entailment"]
PROMPTS = ROOT / "recipes" / "systems" / "prompts"
SHORT = "--max-length 24"


# ---------------------------------------------------------------- Classify
def test_an_nli_model_labels_at_once_under_its_own_names(toy, call):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = tiny(toy / "nli", NLI)
    corpus = toy / "data/demo/corpus.jsonl"
    corpus.write_text(corpus.read_text().replace('"title": ""', '"title": "A title of it"'))
    words = f"{HYBRID} --model nli {SHORT}"
    made = facts(call(SCRIPT, words, cwd=toy))
    facts(call(SCRIPT, "aggregate --out c.jsonl", cwd=toy))
    verdicts = read(toy / "work/demo/test/verdicts.tsv")
    assert verdicts[RUN].equals(read(toy / "work/demo/test/hybrid.tsv")[RUN])
    papers = {record["abstract_id"]: record for record in records(corpus)}
    claims = read(toy / "data/demo/claims.test.tsv").set_index("claim_id")["claim"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    truncated = 0
    for row in verdicts.itertuples():  # by transformers alone; the abstract is the premise
        paper = papers[row.abstract_id]
        pair = (f"{paper['title']} {paper['abstract']}", claims[row.claim_id])
        if len(tokenizer(*pair)["input_ids"]) > 24:
            truncated += 1
        coded = tokenizer(*pair, max_length=24, truncation="only_first", return_tensors="pt")
        against, neither, entailed = model(**coded).logits[0].softmax(0).tolist()
        found = [row.p_supports, row.p_refutes, row.p_nei]
        assert found == pytest.approx([entailed, against, neither], abs=1e-5)
        assert row.label == LABELS[int(np.argmax(found))]
    assert made["truncated"] == truncated > 0
    assert "up to date" in call(SCRIPT, f"{words} --batch-size 3", cwd=toy).stdout


def test_heads_are_known_by_their_names_alone():
    def order(*names):
        config = SimpleNamespace(num_labels=len(names), id2label=dict(enumerate(names)))
        return KIT.head_order(config)

    assert order("contradiction", "NEUTRAL", "entailment") == [2, 0, 1]
    assert order("Supports", "Refutes", "not_enough_info") == [0, 1, 2]
    for names in (
        ("LABEL_0", "LABEL_1", "LABEL_2"),
        ("entailment", "not_entailment"),
        ("support", "refute", "nei", "other"),
    ):
        assert order(*names) is None


def test_a_killed_labelling_goes_on_where_it_was(toy, call, killed):
    tiny(toy / "nli", NLI)
    small = {"GROUP = 1024": "GROUP = 4"}  # five groups
    words = "--model nli --out"
    facts(call(SCRIPT, f"{words} whole.tsv", cwd=toy, edits=small))
    kill = kill_before("stored[start : start + size] =", 3)
    assert killed(SCRIPT, f"{words} killed.tsv", cwd=toy, edits=small | kill)
    [path] = toy.glob("killed.tsv.parts/*/outputs.npy")
    assert np.isfinite(np.load(path)).all(1).sum() == 8 and not (toy / "killed.tsv").exists()
    never = kill_before("stored[start : start + size] =", 4, by="sys.exit('done again')")
    facts(call(SCRIPT, f"{words} killed.tsv", cwd=toy, edits=small | never))
    assert (toy / "killed.tsv").read_bytes() == (toy / "whole.tsv").read_bytes()
    assert not (toy / "killed.tsv.parts").exists()


# ---------------------------------------------------------------- Language models
@pytest.mark.parametrize(
    "reply, wanted", [row[1:] for row in cases("replies.tsv") if row[0] == "digits"]
)
def test_digits_are_read_or_asked_for_again(reply, wanted):
    """-: no label; the pair is asked about once more, and is then NEI, and counted."""
    text = KIT.choice_of({"message": {"content": reply.replace("\\n", "\n")}}).text
    found = KIT.digits_in(text, 3) or [None] * 3
    assert " ".join(label or "-" for label in found) == wanted


@pytest.fixture
def llm(toy, call):
    """llm(server, "--top-k 2"): the script beside 04, asking the server."""
    shutil.copy(ROOT / "04_llm_rerank.py", toy)

    def ask(server, words):
        words = f"llm {HYBRID} --base-url {server.url} --model toy {words}"
        return call(SCRIPT, words, cwd=toy)

    return ask


TWO_STEP = "--strategy two-step --prompt"
TWO_STEP += f" {PROMPTS}/two-step-evidence.txt {PROMPTS}/two-step-direction.txt"
VERDICTS = "work/demo/test/llm_verdicts.tsv"


def test_what_gives_no_label_is_asked_again_and_then_counted(toy, llm, endpoint, call):
    says = {"starving": "hm", "stupid": "Label: REFUTES", "NOT": "NEI, or SUPPORTS"}

    def reply(prompt):
        word = re.search("starving|stupid|NOT", prompt).group()
        if word == "NOT" and "could not be read" in prompt:
            return "SUPPORTS"
        return says[word]

    server = endpoint(reply)
    done = llm(server, "--top-k 2")
    made = facts(done)
    assert made["labels"] == {"SUPPORTS": 2, "REFUTES": 2, "NEI": 2}
    assert made["unusable"] == 2
    assert "2 of 6 pairs have no label" in done.stderr
    assert len(server.asked) == 10
    assert read(toy / VERDICTS)[P].max(axis=1).eq(1).all()
    facts(call(SCRIPT, f"aggregate {VERDICTS} --out c.jsonl", cwd=toy))
    verdicts = [record["verdict"] for record in records(toy / "c.jsonl")]
    assert verdicts == ["NOT ENOUGH INFORMATION", "REFUTED", "SUPPORTED"]
    prompt = server.asked[0]["messages"][0]["content"]
    assert prompt.count("</abstract>") == 1
    assert server.asked[0]["logprobs"]
    assert "up to date" in llm(server, "--top-k 2 --timeout 9").stdout
    (toy / "mine.txt").write_text("# mine\n{claim} {abstract}")  # a changed prompt is asked anew
    assert facts(llm(server, "--top-k 2 --prompt mine.txt"))["replies"] == 6


def test_other_replies_are_labelled_anew_and_the_same_ones_are_not_asked_for(toy, llm, endpoint):
    server = endpoint(lambda prompt: "SUPPORTS")
    other = endpoint(lambda prompt: "REFUTES")
    assert facts(llm(server, "--top-k 1"))["labels"]["SUPPORTS"] == 3
    assert "up to date" in llm(other, "--top-k 1").stdout
    words = "--top-k 1 --replies other.jsonl"
    assert facts(llm(other, words))["labels"]["REFUTES"] == 3
    assert "up to date" in llm(server, words).stdout
    assert facts(llm(server, "--top-k 1"))["labels"]["SUPPORTS"] == 3
    assert (len(server.asked), len(other.asked)) == (3, 3)
    (toy / VERDICTS.replace(".tsv", ".replies.jsonl")).write_bytes(b"")  # they are gone
    assert "up to date" in llm(server, "--top-k 1").stdout
    assert facts(llm(other, "--top-k 1"))["labels"]["REFUTES"] == 3
    assert (len(server.asked), len(other.asked)) == (3, 6)


@pytest.mark.parametrize(
    "words, said",
    [
        ("--limit 0", "--limit: 0 is out of its range, 1 to"),
        ("--top-k -1", "--top-k: -1 is out of its range, 0 to"),
        ("--pairs-per-prompt 0", "--pairs-per-prompt: 0"),
        ("--concurrency 0", "--concurrency: 0"),
        ("--max-tokens -1", "--max-tokens: -1"),
        ("--timeout 0", "--timeout: 0.0"),
        (
            "--strategy two-step",
            "--prompt: --strategy two-step needs 2 of them",
        ),
        (
            f"--strategy batch --prompt {PROMPTS}/batch.txt --fewshot data/demo/qrels.train.tsv",
            "--fewshot: its examples are labels; take --strategy one-step",
        ),
    ],
)
def test_a_flag_out_of_range_is_refused_before_anything_is_paid(toy, refused, words, said):
    base = f"llm {HYBRID} --base-url http://127.0.0.1:9/v1 --model toy"
    refused(toy, SCRIPT, f"{base} {words}", said=said)


def test_two_steps_and_examples(toy, llm, endpoint):
    def reply(prompt):
        if "EVIDENCE or UNKNOWN" in prompt:
            return "UNKNOWN" if "starving" in prompt else "EVIDENCE"
        return "REFUTES"

    server = endpoint(reply)
    labels = facts(llm(server, f"--top-k 1 {TWO_STEP}"))["labels"]
    assert labels == {"SUPPORTS": 0, "REFUTES": 2, "NEI": 1}
    assert len(server.asked) == 5
    facts(llm(server, "--top-k 1 --fewshot data/demo/qrels.train.tsv"))
    turns = server.asked[-1]["messages"]
    judged = read(toy / "data/demo/qrels.train.tsv")
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * len(judged) + ["user"]
    assert [turn["content"] for turn in turns[1::2]] == judged["label"].tolist()
    done = llm(server, "--strategy two-step")
    assert done.returncode == 2 and "--strategy two-step needs 2 of" in done.stderr


def test_what_a_batch_leaves_out_is_asked_about_once_more(toy, llm, endpoint):
    replies = iter(["1: 1\n3: 2", "1: 0"])
    server = endpoint(lambda prompt: next(replies))
    words = f"--top-k 1 --strategy batch --prompt {PROMPTS}/batch.txt"
    assert facts(llm(server, words))["unusable"] == 0
    assert "<pair 2>" not in server.asked[1]["messages"][0]["content"]
    assert read(toy / VERDICTS)["label"].tolist() == ["SUPPORTS", "NEI", "REFUTES"]


def test_votes_have_shares(toy, llm, endpoint):
    def reply(prompt):
        texts = ["NEI", "NEI", "SUPPORTS", "?"] if "starving" in prompt else ["REFUTES", "NEI"]
        if "EVIDENCE or UNKNOWN" in prompt:
            texts = ["EVIDENCE", "EVIDENCE", "UNKNOWN", "EVIDENCE"]
        elif "SUPPORTS or REFUTES, and" in prompt:
            texts = ["SUPPORTS", "REFUTES"]
        choices = [{"message": {"content": text}} for text in texts]
        return {"raw": json.dumps({"choices": choices}).encode()}

    server = endpoint(reply)
    words = '--top-k 1 --extra {"n":4}'
    facts(llm(server, words))
    rows = np.array([[1 / 3, 0, 2 / 3], [0, 1 / 2, 1 / 2], [0, 1 / 2, 1 / 2]])
    np.testing.assert_allclose(read(toy / VERDICTS)[P], rows, atol=1e-8)
    facts(llm(server, f"{words} {TWO_STEP}"))
    np.testing.assert_allclose(read(toy / VERDICTS)[P], [[3 / 8, 3 / 8, 1 / 4]] * 3)


@pytest.mark.parametrize(
    "script, words", [(SCRIPT, "llm"), ("04_llm_rerank.py", "--method pointwise")]
)
def test_no_call_outlives_a_kill_and_none_is_paid_twice(toy, call, killed, endpoint, script, words):
    server = endpoint(lambda prompt: {"text": "NEI" if "NEI" in prompt else "NO", "sleep": 0.05})
    words += f" {HYBRID} --base-url {server.url} --model toy --concurrency 4"
    kill = kill_before("os.fsync(file.fileno())", 9)  # the first one is of no reply
    edits = {} if script == SCRIPT else kill
    text = (ROOT / "04_llm_rerank.py").read_text()
    (statement,) = kill
    (toy / "04_llm_rerank.py").write_text(text.replace(statement, kill[statement]))
    assert killed(script, words, cwd=toy, edits=edits)
    asked = len(server.asked)
    time.sleep(0.5)
    assert len(server.asked) == asked <= 12
    (replies,) = toy.glob("work/demo/test/*.replies.jsonl")
    replies.write_bytes(replies.read_bytes()[:-20])  # a torn line is asked again
    (toy / "04_llm_rerank.py").write_text(text)
    made = facts(call(script, words, cwd=toy))
    assert made["unusable_lines"] == 1 and len(server.asked) == asked + made["replies"] - 7


@pytest.mark.parametrize("path", sorted(PROMPTS.glob("*.txt")), ids=lambda path: path.stem)
def test_a_prompt_names_its_source_and_ends_with_the_form_of_the_answer(path):
    names = ("n", "pairs") if path.stem == "batch" else ("claim", "abstract")
    if path.stem in ("ranking", "ten-best"):
        names = ("claim", "abstracts", "wanted", "example")
    assert path.read_text().startswith("# ")
    assert "# " not in KIT.read_prompt(path, *names)[:2]
    last = path.read_text().strip().splitlines()[-1]
    assert last.startswith(("Answer with ", "Close with one line"))


def test_requests_wait_where_04_is_not_there_and_no_key_is_kept(toy, call):
    words = f"llm {HYBRID} --top-k 2 --model toy"
    done = call(SCRIPT, words, cwd=toy, env={"OPENAI_API_KEY": "sk-secret"})
    assert done.returncode == 3 and "6 of 6 requests have no reply yet" in done.stdout
    requests = records(toy / VERDICTS.replace(".tsv", ".requests.jsonl"))
    body = {"choices": [{"message": {"content": '{"label": "REFUTES"}'}}]}
    replies = []
    for request in requests:
        replies.append({"custom_id": request["custom_id"], "response": {"body": body}})
    jsonl(toy / VERDICTS.replace(".tsv", ".replies.jsonl"), *replies)
    assert facts(call(SCRIPT, words, cwd=toy))["labels"]["REFUTES"] == 6
    files = [path for path in toy.rglob("*") if path.is_file()]
    assert not any(b"sk-secret" in path.read_bytes() for path in files)


def test_local_models_give_probabilities(toy, call):
    shutil.copy(ROOT / "04_llm_rerank.py", toy)
    words = f"llm {HYBRID} --backend transformers --model {tiny_llm(toy / 'llm')}"
    facts(call(SCRIPT, f"{words} --top-k 1 --max-words 20", cwd=toy))
    table = read(toy / VERDICTS)
    assert table[P].sum(axis=1).to_numpy() == pytest.approx(1)
    assert table[P].max().max() < 1
    assert table["label"].tolist() == [LABELS[index] for index in table[P].to_numpy().argmax(1)]


# ---------------------------------------------------------------- Verdicts on claims
def test_verdicts_of_claims_by_hand():
    verdict = KIT.claim_verdict
    assert verdict(0, 0) == ("NOT ENOUGH INFORMATION", None)
    assert verdict(0.5, 0)[0] == "SUPPORTED"
    assert verdict(1.8, 0.5) == ("SUPPORTED", 0.782609)
    assert verdict(0.9, 0.5)[0] == "DISPUTED"
    assert verdict(0.75, 0.25) == ("DISPUTED", 0.75)
    assert verdict(0.4, 1.8)[0] == "REFUTED"


@pytest.mark.parametrize(
    "rows, verdict",
    [
        ([("SUPPORTS", 0.38), ("NEI", 0.34)], "UNDECIDED"),
        ([("NEI", 0.35)], "UNDECIDED"),
        ([("SUPPORTS", 0.39), ("NEI", 0.34)], "SUPPORTED"),
        ([("REFUTES", 0.36), ("NEI", 1)], "REFUTED"),
        ([("NEI", 0.39)], "NOT ENOUGH INFORMATION"),
        ([], "NOT ENOUGH INFORMATION"),
    ],
)
def test_labels_that_are_all_near_chance_decide_nothing(rows, verdict):
    table = pd.DataFrame(rows, columns=["label", "probability"])
    table = table.assign(abstract_id="1", rank=1)
    assert KIT.claim_record("c", "A claim", table)["verdict"] == verdict


def test_labels_of_a_weak_classifier_decide(toy, call):
    rows = """c3|0001|1|3|SUPPORTS|0.35|0.33|0.32;
              c3|0002|2|2|REFUTES|0.3|0.36|0.34;
              c3|0003|3|1|NEI|0|0|1;
              c4|0004|1|1|REFUTES|0.33|0.34|0.32"""
    tsv(toy / "v.tsv", [*LABELLED, *P], rows)
    facts(call(SCRIPT, "aggregate v.tsv --out c.jsonl", cwd=toy))
    first, second, third = records(toy / "c.jsonl")
    assert first["verdict"] == "DISPUTED"
    assert first["support"] == pytest.approx(0.35 / 0.71)
    assert [first[label] for label in LABELS] == [1, 1, 1]
    assert second["verdict"] == "UNDECIDED" and len(second["evidence"]) == 1
    assert third["verdict"] == "NOT ENOUGH INFORMATION" and third["evidence"] == []
    assert first["evidence"][0] == {
        "abstract_id": "0001",
        "rank": 1,
        "label": "SUPPORTS",
        "probability": 0.35,
    }
