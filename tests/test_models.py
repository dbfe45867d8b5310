"""Models as they are published, by name from a hub (layouts.py, hub.py).

Each scores as its authors say, or is refused in one line before the first pair.

"What loads" in data/README.md has the same table for users.
"""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import layouts
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import ABSTRACTS, KEY, LABELS, facts, load, read
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from torch.torch_version import TorchVersion
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

CLAIMS = {"c3": "Polar bears are starving!!", "c4": "It's the sun, stupid"}


TOKEN = {"HF_TOKEN": "hf_x"}


@pytest.fixture
def script(served, toy):
    """script("03_rerank.py --model ..."): the call, in toy; is_new: in a process of its own."""

    def call(text, is_new=False, **changes):
        name, *words = text.split()
        shutil.copy(layouts.ROOT / name, toy)
        command = [sys.executable if is_new else "python", name, *words]
        served.make(f"{text} BAAI/bge-m3")  # an adapter's base
        environment = served.environment | TOKEN | changes
        return subprocess.run(command, cwd=toy, env=environment, capture_output=True, text=True)

    return call


def scores_of(path, column="score"):
    """Return {(claim_id, abstract_id): score} of a run."""
    table = read(path)
    return dict(zip(table[KEY].itertuples(index=False, name=None), table[column]))


def assert_equal(found, own):
    """Check scores {pair: score}: found for all of some pairs."""
    assert found
    expected = {
        pair: own(CLAIMS[pair[0]], ABSTRACTS[pair[1]]) for pair in found if pair[0] in CLAIMS
    }
    assert {pair: found[pair] for pair in expected} == pytest.approx(expected, abs=1e-5)
    assert np.ptp(list(expected.values())) > 1e-3  # not all the same


# ---------- Encoders
def half(vector):
    """Return a vector of length 1 in the precision of the index."""
    return (vector / np.linalg.norm(vector)).astype(np.float16).astype(np.float32)


def by_prompt_name(folder):  # as cards of Qwen3-Embedding, BGE-M3, gte-modernbert have it
    encoder = SentenceTransformer(folder, device="cpu")
    name = "query" if encoder.prompts.get("query") else None

    def cosine(claim, abstract):
        vector = encoder.encode(claim, prompt_name=name)
        return float(half(encoder.encode(abstract)) @ (vector / np.linalg.norm(vector)))

    return cosine


def by_prefix(folder):  # as E5's card has it
    encoder = SentenceTransformer(folder, device="cpu")

    def cosine(claim, abstract):
        vector = encoder.encode(f"query: {claim}", prompt="")
        return float(half(encoder.encode(f"passage: {abstract}", prompt="")) @ vector)

    return cosine


def by_encode_query(folder):  # as EmbeddingGemma's card has it
    encoder = SentenceTransformer(folder, device="cpu")

    def cosine(claim, abstract):
        return float(half(encoder.encode_document(abstract)) @ encoder.encode_query(claim))

    return cosine


def by_adapter(folder):  # as peft's pages have it; the mean of token vectors
    import peft

    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModel.from_pretrained(Path(folder).parent.parent / "BAAI/bge-m3")
    model = peft.PeftModel.from_pretrained(base, folder).eval()

    @torch.no_grad()
    def vector(text):
        return model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0).numpy()

    def cosine(claim, abstract):
        query = vector(claim)
        return float(half(vector(abstract)) @ (query / np.linalg.norm(query)))

    return cosine


ENCODERS = {
    "BAAI/bge-m3": by_prompt_name,
    "intfloat/multilingual-e5-large": by_prefix,
    "Qwen/Qwen3-Embedding-0.6B": by_prompt_name,
    "Alibaba-NLP/gte-modernbert-base": by_prompt_name,
    "google/embeddinggemma-300m": by_encode_query,
    "allenai/scibert_scivocab_uncased": by_prompt_name,
    "sentence-transformers/static-retrieval-mrl-en-v1": by_prompt_name,
    "someone/encoder-adapter": by_adapter,
}


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_gives_the_cosines_of_its_card(script, served, toy, name):
    facts(script(f"01_index.py --indexes dense --dense-model {name}"))
    facts(script("02_retrieve.py --retrievers dense"))
    own = ENCODERS[name](str(served.folder / name))
    assert_equal(scores_of(toy / "work/demo/test/dense.tsv"), own)


def sparse(folder):
    encoder = SparseEncoder(folder, device="cpu")

    def product(claim, abstract):
        vectors = encoder.encode_query(claim), encoder.encode_document(abstract)
        return float((vectors[0].to_dense() * vectors[1].to_dense()).sum())

    return product


@pytest.mark.parametrize(
    "name",
    ["naver/splade-v3", "opensearch-project/opensearch-neural-sparse-encoding-doc-v3-distill"],
)
def test_splade_gives_the_products_of_its_card(script, served, toy, name):
    facts(script(f"01_index.py --indexes splade --splade-model {name}"))
    facts(script("02_retrieve.py --retrievers splade"))
    found = scores_of(toy / "work/demo/test/splade.tsv")
    own = sparse(str(served.folder / name))
    scale = max(found.values())
    assert_equal(
        {pair: score / scale for pair, score in found.items()}, lambda *pair: own(*pair) / scale
    )


# ---------- Rerankers
def by_logit(folder):
    """Return the logit of a sequence classifier with one output."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()

    @torch.no_grad()
    def logit(claim, abstract):
        return float(model(**tokenizer(claim, abstract, return_tensors="pt")).logits[0, 0])

    return logit


def by_predict(folder):
    model = CrossEncoder(folder, device="cpu", activation_fn=torch.nn.Identity())
    return lambda claim, abstract: float(model.predict([(claim, abstract)])[0])


def by_next_token(folder, parts_of, yes, no=None):
    """Return the logit of yes, less that of no, behind the tokens of parts."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()

    @torch.no_grad()
    def logit(claim, abstract):
        ids = []
        for part in parts_of(claim, abstract):
            ids += tokenizer(part, add_special_tokens=False)["input_ids"]
        logits = model(torch.tensor([ids])).logits[0, -1]
        score = logits[tokenizer.convert_tokens_to_ids(yes)]
        if no:
            score -= logits[tokenizer.convert_tokens_to_ids(no)]
        return float(score)

    return logit


def by_qwen3(folder):
    def parts_of(claim, abstract):
        task = "Given a web search query, retrieve relevant passages that answer the query"
        yield (
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the "
            'Query and the Instruct provided. Note that the answer can only be "yes" or "no".'
            "<|im_end|>\n<|im_start|>user\n"
        )
        yield f"<Instruct>: {task}\n<Query>: {claim}\n<Document>: {abstract}"
        yield "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"

    return by_next_token(folder, parts_of, "yes", "no")


def by_gemma(folder):
    bos = AutoTokenizer.from_pretrained(folder).bos_token

    def parts_of(claim, abstract):
        question = (
            "Given a query A and a passage B, determine whether the passage contains an answer to "
            "the query by providing a prediction of either 'Yes' or 'No'."
        )
        return bos, f"A: {claim}", "\n", f"B: {abstract}", "\n", question

    return by_next_token(folder, parts_of, "Yes")


def by_mono_t5(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    true, false = tokenizer.convert_tokens_to_ids(["▁true", "▁false"])

    @torch.no_grad()
    def logit(claim, abstract):
        text = f"Query: {claim} Document: {abstract} Relevant:"
        start = torch.tensor([[model.config.decoder_start_token_id]])
        logits = model(**tokenizer(text, return_tensors="pt"), decoder_input_ids=start).logits
        return float(logits[0, 0, true] - logits[0, 0, false])

    return logit


RERANKERS = {
    "cross-encoder/ms-marco-MiniLM-L6-v2": by_logit,
    "BAAI/bge-reranker-v2-m3": by_logit,
    "BAAI/bge-reranker-large": by_logit,
    "Alibaba-NLP/gte-reranker-modernbert-base": by_logit,
    "someone/llama-classifier": by_logit,
    "Qwen/Qwen3-Reranker-0.6B": by_qwen3,
    "BAAI/bge-reranker-v2-gemma": by_gemma,
    "mixedbread-ai/mxbai-rerank-base-v2": by_predict,
    "castorini/monot5-3b-msmarco-10k": by_mono_t5,
}


@pytest.mark.parametrize("name", RERANKERS)
def test_a_reranker_gives_the_scores_of_its_card(script, served, toy, name):
    facts(script(f"03_rerank.py --batch-size 3 --model {name}"))
    own = RERANKERS[name](str(served.folder / name))
    assert_equal(scores_of(toy / "work/demo/test/rerank.tsv"), own)


# ---------- NLI models
NLI = {
    "MoritzLaurer/DeBERTa-v3-base-mnli": [0, 2, 1],
    "cross-encoder/nli-deberta-v3-base": [1, 0, 2],
    "FacebookAI/roberta-large-mnli": [2, 0, 1],
}


@pytest.mark.parametrize("name", NLI)
def test_an_nli_model_gives_the_probabilities_of_its_card(script, served, toy, name):
    facts(script(f"05_classify.py --model {name}"))
    tokenizer = AutoTokenizer.from_pretrained(served.folder / name)
    model = AutoModelForSequenceClassification.from_pretrained(served.folder / name).eval()

    @torch.no_grad()
    def probabilities(claim, abstract):
        logits = model(**tokenizer(abstract, claim, return_tensors="pt")).logits
        return logits.softmax(1)[0, NLI[name]].tolist()

    verdicts = read(toy / "work/demo/test/verdicts.tsv")
    for number, label in enumerate(LABELS):
        found = scores_of(toy / "work/demo/test/verdicts.tsv", f"p_{label.lower()}")
        assert_equal(found, lambda *pair, number=number: probabilities(*pair)[number])
    best = verdicts[[f"p_{label.lower()}" for label in LABELS]].to_numpy().argmax(1)
    assert verdicts["label"].tolist() == [LABELS[index] for index in best]


# ---------- What is refused
REFUSED = [
    ("03_rerank.py --model HuggingFaceTB/SmolLM2-135M-Instruct", "how it scores a pair"),
    ("03_rerank.py --model BAAI/bge-m3", "how it scores a pair"),
    ("03_rerank.py --model MoritzLaurer/DeBERTa-v3-base-mnli", "a classifier is for 05"),
    ("03_rerank.py --model someone/adapter", "someone/adapter: not loaded"),
    ("03_rerank.py --model someone/model-GGUF", "someone/model-GGUF: not loaded"),
    ("05_classify.py --model someone/adapter", "someone/adapter: not loaded"),
    ("05_classify.py --model someone/nli-without-names", "its 3 outputs are not"),
    ("05_classify.py --model MoritzLaurer/deberta-v3-large-zeroshot-v2.0", "its 2 outputs are not"),
    ("01_index.py --indexes dense --dense-model someone/model-GGUF", "model-GGUF: not loaded"),
    ("01_index.py --indexes dense --dense-model someone/nothing", "someone/nothing"),
]


def error_of(done):
    """Return the one error line of a refused call."""
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and len(errors) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return errors[0]


@pytest.mark.parametrize(("command", "said"), REFUSED)
def test_what_has_no_known_score_is_refused(script, toy, command, said):
    assert said in error_of(script(command))
    assert not (toy / "work/demo/test/rerank.tsv").exists()


# ---------- The hub
def test_a_model_from_the_hub_is_there_offline_and_no_bot_is_asked(script, served, toy):
    command = "01_index.py --indexes dense --force --dense-model BAAI/bge-m3"
    facts(script(command))
    asked = [path for _, path in served.asked]
    assert any("bge-m3" in path and path.endswith("pytorch_model.bin") for path in asked)
    assert all("discussions" not in path and "linear.pt" not in path for path in asked)
    number = len(asked)
    facts(script(command, is_new=True, HF_HUB_OFFLINE="1"))
    assert len(served.asked) == number


def test_a_gated_model_is_refused_without_a_token(script, served, toy):
    said = error_of(script("01_index.py --indexes dense --dense-model someone/gated", HF_TOKEN=""))
    assert "gated" in said


@pytest.mark.parametrize("train", ["reranker.py data/demo/pairs.jsonl", "classifier.py"])
def test_a_language_model_can_be_trained_to_score_and_to_classify(script, toy, train):
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    done = script(f"{layouts.ROOT}/recipes/train/{train} --epochs 1 --model {name} --out work/m")
    job = "03_rerank.py" if "rerank" in train else "05_classify.py"
    assert facts(done)["loss"] and facts(script(f"{job} --model work/m"))["pairs"] > 0


def test_a_decoder_only_reranker_keeps_its_template_when_it_is_trained(script, toy):
    name = "Qwen/Qwen3-Reranker-0.6B"
    train = f"{layouts.ROOT}/recipes/train/reranker.py data/demo/pairs.jsonl --model {name}"
    facts(script(f"{train} --lora 2 --epochs 1 --lr 0.001 --out work/m"))
    facts(script("03_rerank.py --model work/m --out a.tsv"))
    facts(script(f"03_rerank.py --model {name} --out b.tsv"))
    trained = scores_of(toy / "a.tsv")
    before = scores_of(toy / "b.tsv")
    assert trained != before and trained == pytest.approx(before, abs=1)


# ---------- ClimateCheck 2026, as README enters it
def publish_climatecheck(folder):
    """Write the demo as the organisers publish their data: ids are numbers, labels are theirs."""
    if folder.exists():
        return
    folder.mkdir()
    demo = layouts.ROOT / "data/demo"
    spelling = {"SUPPORTS": "Supports", "REFUTES": "Refutes", "NEI": "Not Enough Information"}
    papers = pd.read_json(demo / "corpus.jsonl", lines=True, dtype=False)
    number_of = {abstract_id: number for number, abstract_id in enumerate(papers["abstract_id"])}
    corpus = folder / "climatecheck_publications_corpus"
    corpus.mkdir()
    papers["abstract_id"] = papers["abstract_id"].map(number_of)
    papers.to_parquet(corpus / "train-00000-of-00001.parquet")
    (folder / "climatecheck").mkdir()
    for split in ("train", "test"):
        table = read(demo / f"claims.{split}.tsv")[["claim_id", "claim"]]
        if split == "test":
            table = table[:9]  # for speed
        if split == "train":
            table = read(demo / "qrels.train.tsv").merge(table, on="claim_id")
            table["annotation"] = table.pop("label").map(spelling)
            table["abstract_id"] = table["abstract_id"].map(number_of)
        table["claim_id"] = table["claim_id"].factorize()[0]
        table.to_parquet(folder / "climatecheck" / f"{split}-00000-of-00001.parquet")


def test_readme_enters_climatecheck_2026(served, tmp_path):
    publish_climatecheck(served.folder / "rabuahmad")
    page = (layouts.ROOT / "README.md").read_text("utf-8")
    (section,) = re.findall(r"## Enter ClimateCheck 2026\n(.*?)\n## ", page, re.S)
    commands = re.search(r"```bash\n(.*?)```", section, re.S)[1].replace("\\\n", "").splitlines()
    assert len(commands) == 6
    shutil.copytree(
        layouts.ROOT / "data", tmp_path / "data", ignore=shutil.ignore_patterns("models")
    )
    for path in layouts.ROOT.glob("0*.py"):
        shutil.copy(path, tmp_path)
    for command in commands:
        served.make(command)
        env = served.environment | TOKEN
        done = subprocess.run(
            command.split(), cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "work").rglob("predictions.zip")
    with zipfile.ZipFile(path) as archive:
        (name,) = archive.namelist()
        table = pd.read_csv(archive.open(name))
    assert list(table.columns) == ["claim_id", "abstract_id", "rank", "label"]
    assert table["claim_id"].nunique() == 9 and table["rank"].max() == 10
    assert set(table["label"]) <= {"Supports", "Refutes", "Not Enough Information"}


# ---------- Weights in a .bin
KIT = load("03_rerank.py")
ANY_DEVICE = SimpleNamespace(device=None)


def test_before_torch_2_10_safetensors_alone_are_read(served, monkeypatch, capsys):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.9.1"))
    names = ["BAAI/bge-m3", "castorini/monot5-3b-msmarco-10k", "BAAI/bge-reranker-large"]
    served.make(" ".join([*names, "BAAI/bge-reranker-v2-m3"]))
    for name in names:
        load_model = SentenceTransformer if name == "BAAI/bge-m3" else KIT.load_reranker
        with pytest.raises(SystemExit, match="2"):
            KIT.open_model(load_model, served.folder / name, ANY_DEVICE)
        assert "no file named model.safetensors" in capsys.readouterr().err
    KIT.open_model(KIT.load_reranker, served.folder / "BAAI/bge-reranker-v2-m3", ANY_DEVICE)
