"""checkthat_2026.sh on the toy in three languages; its expansion and languages alone."""

import re
import zipfile

import pandas as pd
import pytest
from conftest import CLAIMS, QRELS, RUN, facts, read, tsv

IDS = {"c1": "en-1", "c2": "de-2", "c3": "en-3", "c4": "de-4", "c5": "fr-5"}


def translated(prompt):
    return f"<text>{re.search('<claim>(.*)</claim>', prompt)[1]} in English</text>"


def multilingual(data):
    """Give the toy a language a claim, and a dev split that is its test split."""
    for split in ("train", "test"):
        claims = read(data / f"claims.{split}.tsv")
        qrels = read(data / f"qrels.{split}.tsv").replace({"claim_id": IDS}).values
        posts = [(IDS[claim_id], claim, IDS[claim_id][:2]) for claim_id, claim in claims.values]
        for out in (split, split.replace("test", "dev")):
            tsv(data / f"claims.{out}.tsv", [*CLAIMS, "language"], posts)
            tsv(data / f"qrels.{out}.tsv", QRELS, qrels)


def test_posts_in_three_languages_up_to_their_tables_and_the_submission(toy, endpoint, shell):
    """French and German posts alone are translated; an English post is what the reranker learns."""
    multilingual(toy / "data/demo")
    server = endpoint(translated)
    how = {
        "DATA": f"{toy}/data/demo",
        "WORK": f"{toy}/made",
        "EARLIER": f"{toy}/none",
        "SMALL": "1",
        "LLM_MODEL": "toy",
        "LLM_BASE_URL": server.url,
    }
    done = shell("recipes/systems/checkthat_2026.sh", "tables", **how)
    assert done.returncode == 0, done.stderr[-3000:]
    asked = [re.search("<claim>(.*)</claim>", prompt)[1] for prompt in server.answered]
    texts = ["It's the sun, stupid", "sea level rise is NOT accelerating"]
    assert sorted(asked) == sorted(texts * 2)  # of test, then of dev
    test = toy / "made/test"
    posts = read(test / "claims.translation.tsv").set_index("claim_id")["claim"]
    expanded = read(test / "claims.expanded.tsv").set_index("claim_id")["claim"]
    assert list(posts) == ["Polar bears are starving!!", *(f"{text} in English" for text in texts)]
    for claim_id, post in posts.items():
        assert expanded[claim_id].startswith(post)
        assert len(expanded[claim_id].split()) == len(post.split()) + 15
    folders = toy / "made/languages"
    for name in "claims.train en-1,qrels.train en-1,claims.test de-4,qrels.test fr-5".split(","):
        file, claim_id = name.split()
        assert set(read(folders / f"{claim_id[:2]}/{file}.tsv")["claim_id"]) == {claim_id}
    assert not (folders / "fr/claims.train.tsv").exists()
    examples = (toy / "made/english/train/examples.jsonl").read_text()
    assert set(re.findall(r'"claim_id": "([^"]*)"', examples)) == {"en-1"}
    values = pd.read_csv(test / "metrics.claims.tsv", sep="\t").set_index(["run", "claim_id"])
    run = read(test / "rerank.tsv").set_index("claim_id")["abstract_id"]
    archive = zipfile.ZipFile(test / "checkthat2026/predictions.zip")
    for claim_id in posts.index:
        language, number = claim_id.split("-")
        table = pd.read_csv(test / f"{language}.tsv", sep="\t", index_col="run")
        runs = "dense rerank rerank-100 fitted gte gte-authors qwen qwen-authors"
        assert list(table.index) == runs.split()
        mrr = values.loc[("rerank", claim_id), "MRR@5"]
        assert table.loc["rerank", "MRR@5"] == pytest.approx(mrr)
        text = archive.read(f"predictions_{language}.tsv").decode()
        assert text == f"index\tpreds\n{number}\t{list(run[claim_id][:5])}\n"


def test_the_terms_of_the_nearest_papers_by_hand(toy, program):
    """A term counts five times the cosine of its paper, rounded, and at least once."""
    papers = """
        {"abstract_id": "a", "title": "Viruses, and the VIRUSES in aérosols", "abstract": ""}
        {"abstract_id": "b", "title": "Aerosols in 2020", "abstract": ""}
        {"abstract_id": "c", "title": "C19 mask's", "abstract": ""}"""
    (toy / "papers.jsonl").write_text(papers.lstrip(), "utf-8")
    tsv(toy / "posts.tsv", CLAIMS, "p|@who says #Viruses 😀 spread")
    # a: 5 * .5 = 2.5, which Python rounds to 2; b: 5 * .7 = 3.5, to 4; c: 5 * .05 = .25, at least 1
    tsv(toy / "run.tsv", RUN, "p|b|1|0.7; p|a|2|0.5; p|c|3|0.05")
    words = "run.tsv --claims posts.tsv --corpus papers.jsonl --out out.tsv"
    # aerosols 4 + 2, viruses 2 + 2, 2020 4, c19 1, mask 1: of a tie, what stands nearest first
    for limit, terms in {
        "--terms 4": "aerosols 2020 viruses c19",
        "--terms 9": "aerosols 2020 viruses c19 mask",
        "--papers 1": "aerosols 2020",
    }.items():
        facts(program("tools/expand", f"{words} {limit}", cwd=toy))
        (claim,) = read(toy / "out.tsv")["claim"]
        assert claim == f"who says Viruses spread {terms}"
