"""recipes/tools/texts.py: words, subwords and bigrams for BM25, in fields of their own."""

import pytest
from conftest import ROOT, jsonl, read, records, tsv

RECORDS = [
    {"abstract_id": "1", "title": "COVID-19 waves", "abstract": "In 2020, it rose.", "year": 2020},
    {"abstract_id": "2", "abstract": "Ice melts", "authors": ["Ng, A.", "Li, B."], "doi": None},
]


@pytest.fixture
def copied(toy, program):
    """copied(flags): the corpus of a copy, and its claims."""
    jsonl(toy / "data/demo/corpus.jsonl", *RECORDS)
    tsv(toy / "data/demo/claims.test.tsv", ["claim_id", "claim"], "a|Sea-ice in 2020!; b|?!")

    def copy(flags):
        done = program("tools/texts", f"data/demo copy {flags}", cwd=toy)
        assert done.returncode == 0, done.stderr
        claims = read(toy / "copy/claims.test.tsv")["claim"].tolist()
        return records(toy / "copy/corpus.jsonl"), claims

    return copy


def test_digits_and_bigrams_in_every_field(copied):
    corpus, claims = copied("--digits 3 --bigrams")
    assert corpus[0] == {
        "abstract_id": "1",
        "title": "covid 19 19 19 waves covid_19 19_waves",
        "abstract": "in 2020 2020 2020 it rose in_2020 2020_it it_rose",
        "year": "2020 2020 2020",
    }
    assert corpus[1]["authors"] == "ng a li b ng_a a_li li_b"
    assert corpus[1]["doi"] == "" and "title" not in corpus[1]
    assert claims == ["sea ice in 2020 2020 2020 sea_ice ice_in in_2020", "-"]


def test_subwords_of_a_tokenizer(copied):
    corpus, claims = copied(f"--tokenizer {ROOT}/data/models/minilm --digits 2")
    assert corpus[0]["title"] == "co ##vid 19 19 waves"
    assert claims[0] == "sea ice in 2020 2020"


def test_the_title_still_counts_twice(copied, toy, call):
    tsv(toy / "data/demo/claims.test.tsv", ["claim_id", "claim"], "a|covid waves")
    copied("--bigrams")
    scores = []
    for fields in ("title,abstract", "title,title,abstract"):
        words = f"--data copy --work w --indexes bm25 --analyser plain --fields {fields}"
        assert call("01_index.py", words, cwd=toy).returncode == 0
        assert call("02_retrieve.py", "--data copy --work w", cwd=toy).returncode == 0
        scores.append(read(toy / "w/test/bm25.tsv")["score"][0])
    assert scores[1] > 1.1 * scores[0]
