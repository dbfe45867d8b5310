"""05_classify.py: labels and probabilities, language models, verdicts on claims."""

import json
import shutil
import time
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from conftest import (
    ABSTRACTS,
    LABELLED,
    LABELS,
    NLI,
    ROOT,
    RUN,
    cases,
    cells,
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
PROMPTS = ROOT / "recipes" / "systems" / "prompts"


# ---------------------------------------------------------------- Classify
def test_an_nli_model_labels_at_once_under_its_own_names(toy, call):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = tiny(toy / "nli", NLI)
    corpus = toy / "data/demo/corpus.jsonl"
    corpus.write_text(corpus.read_text().replace('"title": ""', '"title": "A title of it"'))
    words = f"{HYBRID} --model nli --max-length 24"
    made = facts(call(SCRIPT, words, cwd=toy))
    verdicts = read(toy / "work/demo/test/verdicts.tsv")
    assert verdicts[RUN].equals(read(toy / "work/demo/test/hybrid.tsv")[RUN])
    claims = read(toy / "data/demo/claims.test.tsv").set_index("claim_id")["claim"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    truncated = 0
    for row in verdicts.itertuples():  # by transformers alone; the abstract is the premise
        pair = (f"A title of it {ABSTRACTS[row.abstract_id]}", claims[row.claim_id])
        truncated += len(tokenizer(*pair)["input_ids"]) > 24
        coded = tokenizer(*pair, max_length=24, truncation="only_first", return_tensors="pt")
        against, neither, entailed = model(**coded).logits[0].softmax(0).tolist()
        found = [row.p_supports, row.p_refutes, row.p_nei]
        assert found == pytest.approx([entailed, against, neither], abs=1e-5)
        assert row.label == LABELS[int(np.argmax(found))]
    assert made["truncated"] == truncated > 0 and made["equal"] == 0
    assert "up to date" in call(SCRIPT, f"{words} --batch-size 3", cwd=toy).stdout


def test_a_model_that_does_not_tell_pairs_apart_is_told(toy, call):
    tiny(toy / "nli", NLI)
    twins = [{"abstract_id": abstract_id, "abstract": "Ice"} for abstract_id in ABSTRACTS]
    jsonl(toy / "data/demo/corpus.jsonl", *twins)
    done = call(SCRIPT, f"{HYBRID} --model nli", cwd=toy)
    assert facts(done)["equal"] == 3 and "3 of 3 claims" in done.stderr


HEADS = """contradiction NEUTRAL entailment|[2, 0, 1]; Supports Refutes not_enough_info|[0, 1, 2]
    ; INSUFFICIENT contradicts Entails|[2, 1, 0]; entailment neutral not_entailment|None
    ; LABEL_0 LABEL_1 LABEL_2|None; entailment not_entailment|None; support refute nei other|None"""


@pytest.mark.parametrize("names, order", cells(HEADS))
def test_heads_are_known_by_their_names_alone(names, order):
    config = SimpleNamespace(id2label=dict(enumerate(names.split())))
    assert str(KIT.head_order(config)) == order


def test_a_killed_labelling_goes_on_where_it_was(toy, call, killed):
    tiny(toy / "nli", NLI)
    small = {"GROUP = 1024": "GROUP = 4"}  # five batches
    words = "--model nli --out"
    facts(call(SCRIPT, f"{words} whole.tsv", cwd=toy, edits=small))
    kill = kill_before("group[:, :-1] =", 3)
    assert killed(SCRIPT, f"{words} killed.tsv", cwd=toy, edits=small | kill)
    assert not (toy / "killed.tsv").exists()
    never = kill_before("group[:, :-1] =", 4, by="sys.exit('done again')")
    facts(call(SCRIPT, f"{words} killed.tsv", cwd=toy, edits=small | never))
    assert (toy / "killed.tsv").read_bytes() == (toy / "whole.tsv").read_bytes()


# ---------------------------------------------------------------- Language models
@pytest.mark.parametrize(
    "reply, wanted", [row[1:] for row in cases("replies.tsv") if "digits" in row]
)
def test_digits_are_read_or_asked_for_again(reply, wanted):
    """-: no label; the pair is asked about once more, and is then NEI, and counted."""
    text = KIT.THOUGHTS.sub(" ", reply.replace("\\n", "\n"))
    found = KIT.digits_in(text, 3) or [None] * 3
    assert " ".join(label or "-" for label in found) == wanted


@pytest.fixture
def llm(toy, call):
    """llm(server, "--top-k 2"): the script beside 04, asking the server."""
    shutil.copy(ROOT / "04_llm_rerank.py", toy)

    def ask(server, words):
        base = f"llm {HYBRID} --base-url {server.url} --model toy"
        return call(SCRIPT, f"{base} {words}", cwd=toy)

    return ask


STEPS = f"{PROMPTS}/two-step-evidence.txt {PROMPTS}/two-step-direction.txt"
TWO_STEP = f"--strategy two-step --prompt {STEPS}"
VERDICTS = "work/demo/test/llm_verdicts.tsv"
REPLIES = "work/demo/test/llm_verdicts.replies.jsonl"


def test_what_gives_no_label_is_asked_again_and_then_counted(toy, llm, endpoint):
    def reply(prompt):
        if "starving" in prompt:
            return "hm"
        if "stupid" in prompt:
            return "Label: REFUTES"
        return "SUPPORTS" if "could not be read" in prompt else "NEI, or SUPPORTS"

    server = endpoint(reply)
    done = llm(server, "--top-k 2")
    assert facts(done)["labels"] == {"SUPPORTS": 2, "REFUTES": 2, "NEI": 2}
    assert facts(done)["unusable"] == 2 and "2 of 6 pairs have no label" in done.stderr
    assert len(server.asked) == 10
    assert server.asked[0]["messages"][0]["content"].count("</abstract>") == 1
    assert "up to date" in llm(server, "--top-k 2 --timeout 9 --batch-size 1").stdout
    (toy / "mine.txt").write_text("# mine\n{claim} {abstract}")  # a changed prompt is asked anew
    facts(llm(server, "--top-k 2 --prompt mine.txt"))
    assert len(server.asked) == 20


def test_replies_make_the_verdicts_and_none_is_paid_twice(toy, llm, endpoint):
    server = endpoint(lambda prompt: "SUPPORTS")
    other = endpoint(lambda prompt: "REFUTES")
    facts(llm(server, "--top-k 1"))
    assert facts(llm(other, "--top-k 1 --replies other.jsonl"))["labels"]["REFUTES"] == 3
    assert facts(llm(server, "--top-k 1"))["labels"]["SUPPORTS"] == 3
    assert len(server.asked) == 3


def test_two_steps_and_examples(toy, llm, endpoint):
    def reply(prompt):
        if "EVIDENCE or UNKNOWN" in prompt:
            return "UNKNOWN" if "starving" in prompt else "EVIDENCE"
        return "REFUTES"

    server = endpoint(reply)
    labels = facts(llm(server, f"--top-k 1 {TWO_STEP}"))["labels"]
    assert labels == {"SUPPORTS": 0, "REFUTES": 2, "NEI": 1}
    assert len(server.asked) == 5
    judged = read(toy / "data/demo/qrels.train.tsv").assign(claim="A claim")
    judged.to_csv(toy / "few.tsv", sep="\t", index=False)
    facts(llm(server, "--top-k 1 --fewshot few.tsv"))
    turns = server.asked[-1]["messages"]
    assert turns[1::2] == [{"role": "assistant", "content": label} for label in judged["label"]]


def test_what_a_batch_leaves_out_is_asked_about_once_more(toy, llm, endpoint):
    replies = iter(["1: 1\n3: 2", "1: 0"])
    server = endpoint(lambda prompt: next(replies))
    words = f"--top-k 1 --strategy batch --prompt {PROMPTS}/batch.txt"
    assert facts(llm(server, words))["unusable"] == 0
    assert "<pair 2>" not in server.asked[1]["messages"][0]["content"]
    assert read(toy / VERDICTS)["label"].tolist() == ["SUPPORTS", "NEI", "REFUTES"]


# 1/4, 0, 1/2 and a third of 1/4 each; 0, 1/2, 1/2 twice: in a tie NEI wins, then REFUTES;
# 3/4 1/2, 3/4 1/2, 1/4; batch: 2/4 and a third of 2/4, for pair 2: 1/4 and a third of 3/4
VOTES = f"""|NEI|[0.33333, 0.08333, 0.58333, 0, 0.5, 0.5, 0, 0.5, 0.5]
    ; {TWO_STEP}|REFUTES|[0.375, 0.375, 0.25, 0.375, 0.375, 0.25, 0.375, 0.375, 0.25]
    ; --strategy batch --prompt {PROMPTS}/batch.txt|NEI|[0.16667, 0.16667, 0.66667, 0.25, 0.25, 0.5,
    0.16667, 0.16667, 0.66667]"""


@pytest.mark.parametrize("flags, label, shares", cells(VOTES))
def test_votes_have_shares(toy, llm, endpoint, flags, label, shares):
    def reply(prompt):
        texts = "NEI NEI error SUPPORTS" if "starving" in prompt else "REFUTES NEI"
        if "EVIDENCE or UNKNOWN" in prompt:
            texts = "EVIDENCE EVIDENCE UNKNOWN EVIDENCE"
        elif "SUPPORTS or REFUTES, and" in prompt:
            texts = "SUPPORTS REFUTES ?"
        elif "<pair 3>" in prompt:
            texts = "1:0,2:0,3:0 1:0,3:0 ? 1:-,3:-"
        texts = texts.replace(",", "\n").split(" ")
        choices = [
            {text: 502} if text == "error" else {"message": {"content": text}} for text in texts
        ]
        return {"raw": json.dumps({"choices": choices}).encode()}

    facts(llm(endpoint(reply), f'--top-k 1 --extra {{"n":4}} {flags}'))
    verdicts = read(toy / VERDICTS)
    assert np.ravel(verdicts[P]) == pytest.approx(json.loads(shares), abs=1e-5)
    assert set(verdicts["label"]) == {label}


def test_schemas_are_strict_and_labels_are_spelled_as_in_convert():
    question = KIT.batch_question("{n}{pairs}", [("a claim", "a text")], [0])
    items = {"type": "integer", "enum": [0, 1, 2]}
    assert question.form == ("digits", {"type": "array", "items": items})
    assert load("data/convert.py").SPELLINGS == KIT.SPELLINGS


def test_no_call_outlives_a_kill_and_none_is_paid_twice(toy, call, killed, endpoint):
    server = endpoint(lambda prompt: {"text": "NEI", "sleep": 0.05})
    words = f"llm {HYBRID} --base-url {server.url} --model toy --concurrency 4"
    text = (ROOT / "04_llm_rerank.py").read_text()
    [(statement, kill)] = kill_before("os.fsync(file.fileno())", 8).items()
    (toy / "04_llm_rerank.py").write_text(text.replace(statement, kill))
    assert killed(SCRIPT, words, cwd=toy)
    asked = len(server.asked)
    time.sleep(0.5)
    assert len(server.asked) == asked <= 12
    replies = toy / REPLIES
    replies.write_bytes(replies.read_bytes()[:-20])  # a torn line is asked again
    (toy / "04_llm_rerank.py").write_text(text)
    made = facts(call(SCRIPT, words, cwd=toy))
    assert len(server.asked) == asked + made["read"] - 7


def test_requests_wait_where_04_is_not_there_and_no_key_is_kept(toy, call, contents):
    words = f"llm {HYBRID} --top-k 2 --model toy"
    done = call(SCRIPT, words, cwd=toy, env={"OPENAI_API_KEY": "sk-secret"})
    assert done.returncode == 3 and "6 of 6 requests have no reply" in done.stdout
    body = {"choices": [{"message": {"content": '{"label": "REFUTES"}'}}]}
    requests = records(toy / VERDICTS.replace(".tsv", ".requests.jsonl"))
    replies = [request | {"response": {"body": body}} for request in requests]
    jsonl(toy / REPLIES, *replies)
    assert facts(call(SCRIPT, words, cwd=toy))["labels"]["REFUTES"] == 6
    assert "sk-secret" not in str(contents(toy))


def test_local_models_give_probabilities(toy, call):
    shutil.copy(ROOT / "04_llm_rerank.py", toy)
    words = f"llm {HYBRID} --backend transformers --model {tiny_llm(toy / 'llm')}"
    facts(call(SCRIPT, f"{words} --top-k 1 --max-words 20", cwd=toy))
    probabilities = read(toy / VERDICTS)[P].to_numpy()
    assert probabilities.sum(axis=1) == pytest.approx(1) and probabilities.max() < 1


# ---------------------------------------------------------------- Verdicts on claims
BY_HAND = """SUPPORTS .5                        | SUPPORTED              | 1.0;
             SUPPORTS .9 SUPPORTS .9 REFUTES .5 | SUPPORTED              | 0.782609;
             SUPPORTS .9 REFUTES .5             | DISPUTED               | 0.642857;
             SUPPORTS .75 REFUTES .25           | DISPUTED               | 0.75;
             SUPPORTS .4 REFUTES .9 REFUTES .9  | REFUTED                | 0.181818;
             SUPPORTS .38 NEI .34               | UNDECIDED              | 1.0;
             NEI .35                            | UNDECIDED              | null;
             SUPPORTS .39 NEI .34               | SUPPORTED              | 1.0;
             REFUTES .36 NEI 1                  | REFUTED                | 0.0;
             NEI .39                            | NOT ENOUGH INFORMATION | null;
                                                | NOT ENOUGH INFORMATION | null"""


@pytest.mark.parametrize("rows, verdict, support", cells(BY_HAND))
def test_verdicts_by_hand(rows, verdict, support):
    """UNDECIDED: all labels are near chance."""
    words = rows.split()
    table = pd.DataFrame({"label": words[::2], "probability": map(float, words[1::2])})
    record = KIT.claim_record("c", "A claim", table.assign(abstract_id="1", rank=1))
    assert record["verdict"] == verdict.strip()
    assert json.dumps(record["support"]) == support.strip()


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
    assert {first[label] for label in LABELS} == {1}
    assert len(second["evidence"]) == 1 and third["evidence"] == []
    assert [*first["evidence"][0].values()] == ["0001", 1, "SUPPORTS", 0.35]
