"""recipes/tools/texts.py: abstracts alone, or terms for BM25 in fields of their own."""

import pytest
from conftest import CLAIMS, ROOT, load, read, records, tsv

CORPUS = """\
{"abstract_id": "1", "title": "COVID-19 waves", "abstract": "In 2020, it rose.", "year": 2020}
{"abstract_id": "2", "abstract": "Ice melts", "authors": ["Ng, A.", "Li, B."], "doi": null}
"""


@pytest.fixture
def copied(toy, program):
    """copied(flags): the corpus of a copy, and its claims."""
    (toy / "data/demo/corpus.jsonl").write_text(CORPUS)
    tsv(toy / "data/demo/claims.test.tsv", CLAIMS, "a|Sea-ice in 2020!; b|?!")

    def copy(flags):
        done = program("tools/texts", f"data/demo copy {flags}", cwd=toy)
        assert done.returncode == 0, done.stderr
        claims = read(toy / "copy/claims.test.tsv")["claim"].tolist()
        return records(toy / "copy/corpus.jsonl"), claims

    return copy


def test_a_copy_has_no_titles_and_follows_its_data(toy, copied, program):
    for title in ("Bears", "Polar bears"):
        (toy / "data/demo/corpus.jsonl").write_text(CORPUS.replace("COVID-19 waves", title))
        corpus, _ = copied("")
        assert corpus[0] == {"abstract_id": "1", "title": "", "abstract": "In 2020, it rose."}
        said = program("tools/texts", "data/demo copy", cwd=toy).stdout
        assert said.startswith("up to date: copy (")
    for file in ("claims.test.tsv", "qrels.test.tsv"):
        assert (toy / "copy" / file).read_bytes() == (toy / "data/demo" / file).read_bytes()


def test_authors_are_few_last_names_and_fields_have_names(toy, copied):
    many = '"authors": "Ng, A.; Li, B.; Du; Wu, D.", "venue": "Sea"'
    corpus, _ = copied("--described 1")
    assert corpus[1]["authors"] == "Authors: Ng, Li" and "venue" not in corpus[1]
    (toy / "data/demo/corpus.jsonl").write_text(CORPUS.replace('"year": 2020', many))
    corpus, _ = copied("--described 1")
    assert corpus[0]["authors"] == "Authors: Ng, Wu" and corpus[0]["venue"] == "Venue: Sea"


def test_digits_and_bigrams_in_every_field(toy, copied):
    corpus, claims = copied("--digits 3 --bigrams")
    assert corpus[0] == {
        "abstract_id": "1",
        "title": "covid 19 19 19 waves covid_19 19_waves",
        "abstract": "in 2020 2020 2020 it rose in_2020 2020_it it_rose",
        "year": "2020 2020 2020",
    }
    assert corpus[1]["authors"] == "ng a li b ng_a a_li li_b"
    assert corpus[1]["doi"] == "" and "title" not in corpus[1]
    twice = load("01_index.py").read_abstracts(toy / "copy/corpus.jsonl", "title,title")
    assert twice["1"].count("covid_19") == 2  # --fields may still weigh them
    assert claims == ["sea ice in 2020 2020 2020 sea_ice ice_in in_2020", "-"]


def test_subwords_of_a_tokenizer(copied):
    corpus, claims = copied(f"--tokenizer {ROOT}/data/models/minilm --digits 2")
    assert corpus[0]["title"] == "co ##vid 19 19 waves"
    assert claims[0] == "sea ice in 2020 2020"


def test_lemmas_of_a_pipeline(toy, copied):
    spacy = pytest.importorskip("spacy")
    nlp = spacy.blank("en")
    nlp.add_pipe("lemmatizer", config={"mode": "lookup"})
    nlp.initialize()
    nlp.to_disk(toy / "pipeline")
    corpus, claims = copied("--lemmas pipeline")
    assert corpus[1]["abstract"] == "ice melt" and claims[0] == "sea ice 2020"
