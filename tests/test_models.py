"""Models as they are published, by name from a hub (layouts.py, hub.py).

Each scores as its authors say, or is refused in one line before the first pair.

"What loads" in data/README.md has the same table for users.
"""

import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import layouts
import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from conftest import ABSTRACTS, KEY, LABELS, cases, cells, facts, load, read, tsv
from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder
from torch.torch_version import TorchVersion
from transformers import AutoModelForSequenceClassification, AutoTokenizer

CLAIMS = {"c3": "Polar bears are starving!!", "c4": "It's the sun, stupid"}
RERANKED = "work/demo/test/rerank.tsv"
SMOLLM = "HuggingFaceTB/SmolLM2-135M-Instruct"
QWEN = "Qwen/Qwen3-Reranker-0.6B"


@pytest.fixture
def script(served, toy):
    """script("03_rerank.py --model ..."): the call, in toy; is_new: in a process of its own."""

    def call(text, is_new=False, cwd=toy, **changes):
        name, *words = text.split()
        shutil.copy(layouts.ROOT / name, toy)
        command = [sys.executable if is_new else "python", name, *words]
        served.make(f"{text} BAAI/bge-m3")  # an adapter's base
        environment = served.environment | {"HF_TOKEN": "hf_x"} | changes
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)

    return call


def assert_scores(path, own, columns="score"):
    """Check the scores of two claims of a run by own(claim, abstract)."""
    run = read(path).query("claim_id in @CLAIMS")
    found = run[columns].to_numpy().ravel()
    expected = [
        np.ravel(own(CLAIMS[claim_id], ABSTRACTS[name])) for claim_id, name in run[KEY].values
    ]
    assert found == pytest.approx(np.concatenate(expected), rel=1e-4, abs=1e-5)
    assert np.ptp(found) > 1e-3  # not all the same


# ---------- Encoders
@pytest.mark.parametrize("query, passage, name", cases("models_encoders.tsv"))
def test_an_encoder_gives_the_cosines_of_its_card(script, served, toy, query, passage, name):
    facts(script(f"01_index.py --indexes dense --dense-model {name}"))
    facts(script("02_retrieve.py --retrievers dense"))
    folder = served.folder / name
    if "adapter" in name:
        base = f"{served.folder}/BAAI/bge-m3"
        layouts.edit(folder / "adapter_config.json", base_model_name_or_path=base)
    encoder = SentenceTransformer(str(folder), device="cpu")

    def cosine(claim, abstract):
        texts = [query.replace("\\n", "\n") + claim, passage + abstract]
        vectors = encoder.encode(texts, prompt="", normalize_embeddings=True)
        return vectors[0] @ vectors[1].astype(np.float16).astype(np.float32)  # as in the index

    assert_scores(toy / "work/demo/test/dense.tsv", cosine)


@pytest.mark.parametrize(
    "name",
    ["naver/splade-v3", "opensearch-project/opensearch-neural-sparse-encoding-doc-v3-distill"],
)
def test_splade_gives_the_products_of_its_card(script, served, toy, name):
    facts(script(f"01_index.py --indexes splade --splade-model {name}"))
    facts(script("02_retrieve.py --retrievers splade"))
    encoder = SparseEncoder(str(served.folder / name), device="cpu")

    def product(claim, abstract):
        vectors = encoder.encode_query([claim]), encoder.encode_document([abstract])
        return encoder.similarity(*vectors)

    assert_scores(toy / "work/demo/test/splade.tsv", product)


# ---------- Rerankers
@pytest.mark.parametrize("name, kind, prompt, yes, no", cases("models_rerankers.tsv"))
def test_a_reranker_gives_the_scores_of_its_card(script, served, toy, name, kind, prompt, yes, no):
    """With yes, that is the logit of yes as the next token, less that of no."""
    facts(script(f"03_rerank.py --batch-size 3 --model {name}"))
    tokenizer = AutoTokenizer.from_pretrained(served.folder / name)
    model = getattr(transformers, kind).from_pretrained(served.folder / name).eval()

    @torch.no_grad()
    def score(claim, abstract):
        texts = [claim, abstract]
        if prompt:
            text = prompt.replace("\\n", "\n")
            texts = [text.format(bos=tokenizer.bos_token, claim=claim, abstract=abstract)]
        inputs = tokenizer(*texts, return_tensors="pt")
        if "Seq2Seq" in kind:
            inputs["decoder_input_ids"] = torch.tensor([[model.config.decoder_start_token_id]])
        logits = model(**inputs).logits
        if not yes:
            return logits
        logits = logits[0, -1]
        found = logits[tokenizer.convert_tokens_to_ids(yes)]
        if no:
            found -= logits[tokenizer.convert_tokens_to_ids(no)]
        return found

    assert_scores(toy / RERANKED, score)


def test_texts_are_split_as_tokenizer_json_says(script, served, toy):
    """In place of the rules of a class, which transformers 5 follows for GPT-2."""
    tsv(toy / "data/demo/claims.test.tsv", ["claim_id", "claim"], "c3|1990; c4|80 km; c5|2")
    command = "03_rerank.py --model someone/digits --out"
    facts(script(f"{command} a.tsv"))
    facts(script(f"{command} b.tsv", HF_HUB_OFFLINE="1"))
    config = served.folder / "someone/digits/tokenizer_config.json"
    layouts.edit(config, tokenizer_class="PreTrainedTokenizerFast")
    facts(script(f"{command} c.tsv"))
    for name in "ab":
        assert (toy / f"{name}.tsv").read_bytes() == (toy / "c.tsv").read_bytes()


@pytest.mark.parametrize("lowers", [False, True])
def test_capitals_are_kept_as_tokenizer_json_says(tmp_path, lowers):
    folder = shutil.copytree(layouts.MINILM, tmp_path / "cased")
    layouts.edit(folder / "tokenizer.json", normalizer=None)
    layouts.edit(folder / "tokenizer_config.json", do_lower_case=None)
    layouts.edit(folder / "sentence_bert_config.json", do_lower_case=lowers)
    model = KIT.open_model(SentenceTransformer, str(folder), SimpleNamespace(device=["cpu"]))
    assert (model.tokenizer.tokenize("Sea") == ["sea"]) == lowers


@pytest.mark.parametrize(
    "name", ["lightonai/LateOn", "lightonai/GTE-ModernColBERT-v1", "colbert-ir/colbertv2.0"]
)
def test_late_interaction_scores_by_maxsim(script, served, toy, name):
    facts(script(f"03_rerank.py --model {name}"))
    model = MultiVectorEncoder(str(served.folder / name), device="cpu")

    def max_sim(claim, abstract):
        [tokens] = model.encode_query([claim])
        [vectors] = model.encode_document([abstract])
        return (tokens @ vectors.T).max(1).values.sum()

    assert_scores(toy / RERANKED, max_sim)


# ---------- NLI models
@pytest.mark.parametrize(
    "name, outputs",
    cells("""MoritzLaurer/DeBERTa-v3-base-mnli|021; cross-encoder/nli-deberta-v3-base|102;
        FacebookAI/roberta-large-mnli|201"""),
)
def test_an_nli_model_gives_the_probabilities_of_its_card(script, served, toy, name, outputs):
    facts(script(f"05_classify.py --model {name}"))
    tokenizer = AutoTokenizer.from_pretrained(served.folder / name)
    model = AutoModelForSequenceClassification.from_pretrained(served.folder / name).eval()

    @torch.no_grad()
    def probabilities(claim, abstract):
        logits = model(**tokenizer(abstract, claim, return_tensors="pt")).logits
        return logits.softmax(1)[0, [*map(int, outputs)]]

    columns = [f"p_{label.lower()}" for label in LABELS]
    assert_scores(toy / "work/demo/test/verdicts.tsv", probabilities, columns)


# ---------- What is refused
@pytest.mark.parametrize("command, token, said", cases("models_refused.tsv"))
def test_what_has_no_known_score_is_refused(script, toy, refused, command, token, said):
    refused(toy, command, said=said, kept=".parts", by=script, HF_TOKEN=token)


# ---------- The hub
def test_a_model_from_the_hub_is_there_offline_and_no_bot_is_asked(script, served):
    command = "01_index.py --indexes dense --force --dense-model BAAI/bge-m3"
    facts(script(command))
    asked = [path for _, path in served.asked]
    assert any("bge-m3" in path and path.endswith("pytorch_model.bin") for path in asked)
    assert all("discussions" not in path and "linear.pt" not in path for path in asked)
    facts(script(command, is_new=True, HF_HUB_OFFLINE="1"))
    assert len(served.asked) == len(asked)


def test_an_index_is_searched_by_the_commit_that_made_it(script, served, toy, refused):
    name = "intfloat/e5-large-v2"
    facts(script(f"01_index.py --indexes dense --dense-model {name}"))
    command = "02_retrieve.py --retrievers dense --force"
    facts(script(command))
    layouts.edit(served.folder / name / "config.json", changed=True)
    facts(script(command, HF_HUB_OFFLINE="1"))
    how = {"said": f"{name}: not loaded", "by": script, "kept": "/new/"}
    refused(toy, command, **how, is_new=True, HF_HOME=f"{toy}/new")


@pytest.mark.parametrize(
    "train, job",
    cells("reranker.py data/demo/pairs.jsonl|03_rerank.py; classifier.py|05_classify.py"),
)
def test_a_language_model_can_be_trained_to_score_and_to_classify(script, train, job):
    train = f"{layouts.ROOT}/recipes/train/{train}"
    assert facts(script(f"{train} --epochs 1 --model {SMOLLM} --out work/m"))["loss"]
    assert facts(script(f"{job} --model work/m"))["pairs"] > 0


def test_a_decoder_only_reranker_keeps_its_template_when_it_is_trained(script, toy):
    train = f"{layouts.ROOT}/recipes/train/reranker.py data/demo/pairs.jsonl --model {QWEN}"
    facts(script(f"{train} --lora 2 --epochs 1 --lr 0.001 --out work/m"))
    facts(script("03_rerank.py --model work/m --out a.tsv"))
    facts(script(f"03_rerank.py --model {QWEN} --out b.tsv"))
    both = read(toy / "a.tsv").merge(read(toy / "b.tsv"), on=KEY)
    assert len(both) == 18 and 0 < abs(both["score_x"] - both["score_y"]).max() < 1


# ---------- ClimateCheck 2026, as README enters it
def publish_climatecheck(folder):
    """Write the demo as the organisers publish their data: ids are numbers, labels are theirs."""
    demo = layouts.ROOT / "data/demo"
    spelling = {"SUPPORTS": "Supports", "REFUTES": "Refutes", "NEI": "Not Enough Information"}
    claims, qrels, test = [
        pd.read_csv(demo / f"{name}.tsv", sep="\t")
        for name in ("claims.train", "qrels.train", "claims.test")
    ]
    train = qrels.merge(claims)
    train["annotation"] = train.pop("label").map(spelling)
    for name, table in {
        "climatecheck_publications_corpus/train": pd.read_json(demo / "corpus.jsonl", lines=True),
        "climatecheck/train": train,
        "climatecheck/test": test[:9],  # for speed
    }.items():
        path = folder / f"{name}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        table.to_parquet(path)


def test_readme_enters_climatecheck_2026(script, served, toy):
    publish_climatecheck(served.folder / "rabuahmad")
    page = (layouts.ROOT / "README.md").read_text("utf-8")
    section = re.search(r"## Enter ClimateCheck 2026\n.*?```bash\n(.*?)```", page, re.S)[1]
    commands = section.replace("\\\n", "").splitlines()
    assert len(commands) == 6
    for path in layouts.ROOT.glob("data/*.*"):
        shutil.copy(path, toy / "data")
    for command in commands:
        done = script(command.removeprefix("python "))
        assert done.returncode == 0, done.stderr
    [path] = (toy / "work").rglob("predictions.zip")
    table = pd.read_csv(path)
    assert list(table.columns) == ["claim_id", "abstract_id", "rank", "label"]
    assert table["claim_id"].nunique() == 9 and table["rank"].max() == 10
    assert set(table["label"]) <= {"Supports", "Refutes", "Not Enough Information"}


# ---------- Weights in a .bin
KIT = load("03_rerank.py")


def test_before_torch_2_10_safetensors_alone_are_read(served, monkeypatch, capsys):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.9.1"))
    device = SimpleNamespace(device=None)
    for name, load_model in {
        "BAAI/bge-m3": SentenceTransformer,
        "castorini/monot5-3b-msmarco-10k": KIT.load_reranker,
        "BAAI/bge-reranker-large": KIT.load_reranker,
    }.items():
        served.make(name)
        with pytest.raises(SystemExit, match="2"):
            KIT.open_model(load_model, f"{served.folder}/{name}", device)
        assert "no file named model.safetensors" in capsys.readouterr().err
    served.make("BAAI/bge-reranker-v2-m3")
    KIT.open_model(KIT.load_reranker, f"{served.folder}/BAAI/bge-reranker-v2-m3", device)
