"""Bad input of all six scripts: exit status 2, one line that says where and what, no file touched.

bad_input.tsv has the commands, what file x holds (| is a tab, ; the end of a line), and a part of
the error. Bad tables, which all scripts read alike, are in test_helpers.py, other people's formats
in test_convert.py, what a server may do in test_04_llm_rerank.py.
"""

import json
import shutil

import pytest
from conftest import NLI, cases, cells, tiny, tiny_llm
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

HEAD = "claim_id|abstract_id|rank|score"
VERDICTS = "|label|p_supports|p_refutes|p_nei;c3|0001|1|2|NEI|1|0|0;c3|0002|2|1|NEI|0|0|1"


@pytest.fixture(scope="session")
def folders(models, tmp_path_factory):
    """A folder with small models of every kind."""
    folder = tmp_path_factory.mktemp("models")
    tiny(folder / "tiny")
    tiny(folder / "nli", NLI)
    tiny(folder / "other", ["x", "y", "z"])
    tiny_llm(folder / "llm")
    cold = AutoTokenizer.from_pretrained(folder / "nli").vocab["cold"]  # in abstract 0003 alone
    for name in ("tiny", "nli"):
        shutil.copytree(folder / name, folder / f"{name}-nan")
        weights = load_file(folder / name / "model.safetensors")
        weights["bert.embeddings.word_embeddings.weight"][cold] = float("nan")
        save_file(weights, folder / f"{name}-nan" / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def ready(toy, folders):
    """The toy with these models, and with runs wherever scripts look for one."""
    for folder in folders.iterdir():
        (toy / folder.name).symlink_to(folder)
    for name in ("llm.tsv", "rerank.tsv"):
        shutil.copy(toy / "work/demo/test/hybrid.tsv", toy / "work/demo/test" / name)
    return toy


@pytest.mark.parametrize("command, text, said", cases("bad_input.tsv"))
def test_bad_input_is_one_line_and_no_file_is_touched(ready, refused, command, text, said):
    texts = {
        "x": text,
        "run.tsv": HEAD,
        "verdicts.tsv": HEAD + VERDICTS,
        "notes.md": "",
        "recipes/published.tsv": "system|table|row|measure|value",
    }
    (ready / "recipes").mkdir()
    for name, content in texts.items():
        (ready / name).write_text(content.replace("|", "\t").replace(";", "\n") + "\n")
    kept = ".parts" if "nan" in command else "//"
    words = command.replace("LONG", "x" * 300).split()
    for _ in range(2):  # a restart is refused alike
        refused(ready, *words, said=said, kept=kept)


READERS = """nli|01_index.py --indexes dense --dense-model; tiny|03_rerank.py --model;
    llm|04_llm_rerank.py --backend transformers --model; nli|05_classify.py --model"""
FOREIGN = {"AutoConfig": "evil.C", "AutoModel": "evil.M", "AutoModelForCausalLM": "evil.M"}


@pytest.mark.parametrize(
    "broken",
    [
        {"model.safetensors": "torn"},
        {"model.safetensors": "", "pytorch_model.bin": "cos\nmkdir\n(Vpwned\ntR."},  # a pickle
        {
            "config.json": json.dumps({"model_type": "odd", "auto_map": FOREIGN}),
            "evil.py": "import os; os.mkdir('pwned')",
        },
    ],
)
@pytest.mark.parametrize("kind, command", cells(READERS))
def test_a_model_runs_no_code_and_a_damaged_one_is_refused(ready, refused, kind, command, broken):
    folder = ready / "models" / "broken"
    shutil.copytree(ready / kind, folder)
    said = "models/broken"
    for name, text in broken.items():  # an empty one is not there
        if text:
            (folder / name).write_text(text)
        else:
            (folder / name).unlink()
    kept = ".replies" if kind == "llm" else "//"  # their folder may stay
    refused(ready, *command.split(), "models/broken", said=said, kept=kept)
    assert not (ready / "pwned").exists()


def test_a_model_without_the_files_of_its_tokenizer_is_refused(ready, refused):
    folder = shutil.copytree(ready / "llm", ready / "part")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    words = ("04_llm_rerank.py", "--backend", "transformers", "--model", "part")
    refused(
        ready,
        *words,
        said="part: it lacks a chat template, as base models do, or the files of its",
        kept=".replies",
    )


def test_a_local_model_is_one(ready, refused):
    for name in "ab":
        (ready / "two" / f"{name}.gguf").parent.mkdir(exist_ok=True)
        (ready / "two" / f"{name}.gguf").write_bytes(b"GGUF")
    words = ("04_llm_rerank.py", "--backend", "transformers", "--model")
    refused(
        ready, *words, "two", said="2 GGUF files; name one, such as two/a.gguf", kept=".replies"
    )


def test_a_base_model_has_no_chat_template(ready, refused):
    folder = shutil.copytree(ready / "llm", ready / "base")
    (folder / "chat_template.jinja").unlink()
    words = ("04_llm_rerank.py", "--backend", "transformers", "--model", "base")
    refused(ready, *words, said="base: it lacks a chat template", kept=".replies")
