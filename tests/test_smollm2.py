"""The packaged language model answers what recipes/ ask: rewrite, narratives and ev2r."""
import shutil

import pytest
from conftest import KEY, ROOT, facts, read, records, tsv

AT = "work/demo/test/"
SHORT = ("--model", "data/models/smollm2", "--extra", '{"max_tokens": 12}')  # seconds, not minutes
PROGRAMS = {
    "rewrite": ("--view", "translation"),
    "narratives": ("llm", "--fewshot", "2", "--taxonomy", "data/short.tsv"),
    "ev2r": (f"{AT}hybrid.tsv", "--verdicts", f"{AT}pool.tsv", "--depth", "3")}
OUT = {"rewrite": "claims.translation", "narratives": "llm_narratives", "ev2r": "ev2r"}

@pytest.fixture
def folder(toy):
    """The toy with one claim, its narrative, and a pool of one pair with a verdict."""
    data = toy / "data/demo"
    tsv(data / "claims.test.tsv", ["claim_id", "claim"], [("c3", "Polar bears are starving!!")])
    tsv(data / "qrels.test.tsv", [*KEY, "label"], [("c3", "0001", "SUPPORTS")])
    tsv(data / "narratives.train.tsv", ["claim_id", "codes"], [("c1", "3_3"), ("c2", "0_0")])
    tsv(toy / AT / "hybrid.tsv", [*KEY, "rank", "score", "label"], [("c3", "0002", 1, 1, "NEI")])
    tsv(toy / AT / "pool.tsv", [*KEY, "p_supports", "p_refutes", "p_nei"],
        [("c3", "0002", 0.6, 0.1, 0.3)])
    lines = (ROOT / "data/taxonomy.tsv").read_text(encoding="utf-8").splitlines(keepends=True)
    (data.parent / "short.tsv").write_text("".join(lines[:4]), encoding="utf-8")
    return toy

def test_its_replies_are_read_and_the_programs_come_to_their_ends(folder, program, call):
    """One load of the model answers all three; what cannot be read is asked once more."""
    def status(name):
        return program(name, *PROGRAMS[name], *SHORT, cwd=folder).returncode
    asked, waiting = [], list(PROGRAMS)
    for _ in range(2):
        waiting = [name for name in waiting if status(name) == 3]
        files = [folder / AT / f"{OUT[name]}.requests.jsonl" for name in waiting]
        if not files:
            break
        requests = "".join(file.read_text(encoding="utf-8") for file in files)
        (folder / "all.jsonl").write_text(requests, encoding="utf-8")
        asked += [request["custom_id"] for request in records(folder / "all.jsonl")]
        facts(call("04_llm_rerank.py", "ask", "all.jsonl", "--replies", "replies.jsonl",
                   "--backend", "transformers", "--model", SHORT[1], cwd=folder))
        for name in waiting:
            shutil.copy(folder / "replies.jsonl", folder / AT / f"{OUT[name]}.replies.jsonl")
    assert [status(name) for name in waiting] == [0] * len(waiting)
    assert 3 <= len(asked) == len(set(asked)) <= 6  # nothing twice
    contents = [reply["response"]["body"]["choices"][0]["message"]["content"]
                for reply in records(folder / "replies.jsonl")]
    assert len(contents) == len(asked) and all(contents)
    assert read(folder / AT / "claims.translation.tsv")["claim_id"].tolist() == ["c3"]
    assert read(folder / AT / "llm_narratives.tsv")["claim_id"].tolist() == ["c3"]
    assert set(read(folder / AT / "ev2r.tsv")["measure"]) == {"Ev2R", "Verification"}
