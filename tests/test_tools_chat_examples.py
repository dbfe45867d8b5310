"""recipes/tools/chat_examples.py: requests of 05 with their gold labels, and what is left out."""

import pytest
from conftest import CLAIMS, QRELS, RUN, facts, jsonl, records, tsv

AT = "work/demo/train/llm_verdicts.requests.jsonl"
ABSTRACTS = [
    {"abstract_id": number, "title": f"T{number}", "abstract": f"No.\n{number}  is <think>"}
    for number in "12345"
]


@pytest.fixture
def chats(toy, program, call):
    """chats(flags of 05, flags): the answers of chats from a run of five pairs, and the summary.

    The claim b holds all of the claim a, and c is not judged.
    """
    data = toy / "data/demo"
    tsv(data / "claims.train.tsv", CLAIMS, "a|Ice melts; b|Ice melts fast; c|Sun")
    jsonl(data / "corpus.jsonl", *ABSTRACTS)
    tsv(data / "qrels.train.tsv", QRELS, "a|1|SUPPORTS; a|2|NEI; a|4|REFUTES; b|4|NEI")
    tsv(toy / "r.tsv", RUN, "a|1|1|8; a|2|2|7; a|3|3|6; b|4|1|8; c|5|1|8")

    def make(asked="", words=""):
        (toy / AT).unlink(missing_ok=True)
        asked = f"llm --split train --run r.tsv --backend none --model m {asked}"
        assert call("05_classify.py", asked, cwd=toy).returncode == 3
        made = facts(program("tools/chat_examples", f"--split train --force {words}", cwd=toy))
        chats = [chat["messages"] for chat in records(toy / made["made"][0])]
        requests = [request["body"]["messages"] for request in records(toy / AT)]
        assert all(messages in requests for *messages, _ in chats)
        return [answer for *_, answer in chats], made

    return make


def test_each_request_of_a_judged_pair_gets_its_label(chats):
    answers, made = chats()
    assert [made[count] for count in ("SUPPORTS", "REFUTES", "NEI")] == [1, 0, 2]
    assert made["left_out"] == 2  # a 3 and c 5 are not judged
    assert {answer["role"] for answer in answers} == {"assistant"}
    labels = [answer["content"] for answer in answers]
    assert labels == ["SUPPORTS", "NEI", "NEI"]  # b 4 is NEI, though a 4 is REFUTES


def test_answers_have_the_form_of_the_request(chats):
    short = "--max-words 2 --fields abstract"
    answers, _ = chats(f"--structured {short}", short)
    assert answers[0]["content"] == '{"label": "SUPPORTS"}'


def test_labels_that_a_prompt_does_not_name_are_left_out(toy, chats):
    (toy / "p.txt").write_text("SUPPORTS or REFUTES?\n--- user\n{claim}: {abstract}")
    answers, made = chats("--prompt p.txt")
    assert len(answers) == made["SUPPORTS"] == 1 and made["left_out"] == 4


def test_requests_without_gold_and_batches_are_refused(toy, chats, call, program, refused):
    chats()
    words = ("tools/chat_examples", "--split", "train", "--out", "new.jsonl")
    said = f"{AT}: no request is about one judged pair"
    refused(toy, *words, "--max-words", 1, said=said, by=program)
    (toy / "p.txt").write_text("SUPPORTS, REFUTES or NEI?\n{n} pairs\n{pairs}")
    asked = "llm --split train --run r.tsv --backend none --model m --strategy batch --prompt p.txt"
    assert call("05_classify.py", asked, cwd=toy).returncode == 3
    refused(toy, *words, said=said, by=program)
