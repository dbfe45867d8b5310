"""Fixtures: scripts alone in a folder with their inputs, toy data, small models, an endpoint."""

import contextlib
import functools
import json
import multiprocessing
import os
import pickle
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pandas as pd
import pytest

ROOT = Path(__file__).resolve().parent.parent
TOY = ROOT / "tests/toy"  # twelve abstracts, five judged claims, a run that begins with those
SECRETS = ("OPENAI_API_KEY", "LLM_BASE_URL", "LLM_MODEL", "NO_COLOR")  # of this machine
RUN = ["claim_id", "abstract_id", "rank", "score"]
KEY = RUN[:2]
CLAIMS = ["claim_id", "claim"]
QRELS = [*KEY, "label"]
LABELLED = [*RUN, "label"]
VERDICTS = [*LABELLED, "p_supports", "p_refutes", "p_nei"]
LABELS = ["SUPPORTS", "REFUTES", "NEI"]
NLI = ["contradiction", "neutral", "entailment"]


# ---------------------------------------------------------------- Files
def cells(text):
    """Return the rows of a text in which | stands between cells and ; between rows."""
    return [row.strip().split("|") for row in text.split(";")]


def tsv(path, header, rows):
    """Write rows, and their header, as they are; rows: lists, or a text as cells() takes it."""
    if isinstance(rows, str):
        rows = cells(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in [header, *rows]), "utf-8")


def read(path):
    """Read a TSV file with ids as strings."""
    return pd.read_csv(path, sep="\t", dtype=dict.fromkeys(KEY, str), na_filter=False)


def jsonl(path, *lines):
    """Write records as JSON Lines."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def records(path):
    """Read JSON Lines."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


ABSTRACTS = {record["abstract_id"]: record["abstract"] for record in records(TOY / "corpus.jsonl")}


def cases(name):
    """Read a table of test cases in this folder, without its header."""
    lines = (ROOT / f"tests/{name}").read_text("utf-8").splitlines()
    return [line.split("\t") for line in lines[1:]]


@pytest.fixture
def contents():
    """contents(folder): {path: bytes} of its files without links, to see what a call changed."""

    def read_files(folder, aside="//"):
        found = {}
        for path in Path(folder).rglob("*"):
            is_other = path.suffix == ".py" or "models" in path.parts or aside in str(path)
            if path.is_file() and not path.is_symlink() and not is_other:
                found[path] = path.read_bytes()
        return found

    return read_files


# ---------------------------------------------------------------- Models and toy data
def pytest_sessionstart(session):
    """Fetch the models, and start warm_python(), once before tests run in parallel.

    Each process keeps to one core: a copy of one with threads of torch waits for them for ever.
    """
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "TQDM_BAR_FORMAT": "{desc}: {n_fmt}/{total_fmt}\n",
        "OMP_NUM_THREADS": "1",
    }
    for name in SECRETS:
        os.environ.pop(name, None)
    if not hasattr(session.config, "workerinput"):
        subprocess.run([sys.executable, ROOT / "data/download.py", "models"])
        running = contextlib.ExitStack()
        session.config.add_cleanup(running.close)
        os.environ["WARM_PATH"] = running.enter_context(warm_python())


def pytest_collection_modifyitems(items):
    """Two workers begin with Ray, one with short tests; no long one comes last."""
    order = ["test_on_ray", "test_02_retrieve", "test_03_rerank", "test_notebook", "test_recipes"]
    items.sort(key=lambda item: [*order, item.path.stem].index(item.path.stem))


@contextlib.contextmanager
def warm_python():
    """Give a PATH whose python runs scripts in copies of a process that has imported PyTorch."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # paths of sockets are short
        script = ROOT / "tests/tools/warm.py"
        python = Path(folder, "python")
        socket = Path(folder, "s")
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {script} ask {socket} "$@"\n')
        python.chmod(0o755)
        with subprocess.Popen([sys.executable, script, "serve", socket]) as server:
            while not socket.exists() and server.poll() is None:
                time.sleep(0.05)
            yield f"{folder}:{os.environ['PATH']}"
            server.kill()


@pytest.fixture(scope="session")
def warm():
    """The PATH of warm_python()."""
    return os.environ["WARM_PATH"]


@pytest.fixture(scope="session")
def models():
    """data/models/ with minilm, splade-tiny and smollm2."""
    folder = ROOT / "data/models"
    assert (folder / "smollm2").exists(), "python data/download.py models"
    return folder


@pytest.fixture(scope="session")
def served(warm, tmp_path_factory):
    """A hub, with .gated removed: served.url, served.folder, served.environment.

    served.make(text): make those models of layouts.py that a text names, once.
    """
    import hub

    def make(text):
        import layouts

        for name in layouts.MODELS:
            if name in text and not (folder / name).exists():
                layouts.make(folder, [name])

    folder = tmp_path_factory.mktemp("hub")
    with hub.serving(folder) as server:
        server.make = make
        server.environment = hub.online(server, folder / "home") | {"PATH": warm}
        yield server


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.5,
}


def tiny(folder, outputs=("LABEL_0",), seed=0, dtype="float32"):
    """Make a BERT of two small layers with random weights and outputs of these names."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig

    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=30_522,
        **SIZES,
        id2label=dict(enumerate(outputs)),
    )
    model = AutoModelForSequenceClassification.from_config(config)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "data/models/minilm").save_pretrained(folder)
    return str(folder)


def tiny_llm(folder):
    """Make a language model of two small layers with random weights, which reads bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    marks = ["<|im_start|>", "<|im_end|>", "yes", "no"]
    byte_level = pre_tokenizers.ByteLevel(False)
    tokens = marks + sorted(byte_level.alphabet())
    vocabulary = {token: index for index, token in enumerate(tokens)}
    bpe = Tokenizer(models.BPE(vocabulary, []))
    bpe.pre_tokenizer = byte_level
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=marks[1],
        pad_token=marks[1],
        extra_special_tokens=marks[:1],
    )
    tokenizer.chat_template = "{% for turn in messages %}<|im_start|>{{ turn.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokens),
        **SIZES,
        max_position_embeddings=4096,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def toy(tmp_path, models):
    """A folder with the toy as data/demo/, a hybrid run per split in work/demo/, data/models."""
    shutil.copytree(TOY, tmp_path / "data/demo")
    (tmp_path / "data/models").symlink_to(models)
    for split in ("train", "test"):
        folder = tmp_path / "work/demo" / split
        folder.mkdir(parents=True)
        (tmp_path / f"data/demo/hybrid.{split}.tsv").rename(folder / "hybrid.tsv")
    return tmp_path


# ---------------------------------------------------------------- Scripts
def load(script):
    """Return the names of a script, without running it; it finds the modules beside it."""
    path = str(ROOT / script)
    sys.path.append(os.path.dirname(path))
    return SimpleNamespace(**runpy.run_path(path))


def edited(edits, *paths):
    """Return the texts of files, with edits: {a part of one of them: what stands there instead}."""
    texts = [path.read_text("utf-8") for path in paths]
    for old, new in (edits or {}).items():
        assert "".join(texts).count(old) == 1, old
        texts = [text.replace(old, new) for text in texts]
    return texts


compiled = functools.cache(compile)


def kill_before(statement, time=1, by="__import__('signal').raise_signal(9)"):
    """Return an edit: kill -9 comes when the statement is about to be run for the time-th time."""
    lives = f"globals().setdefault('LIVES', iter(range(1, {time})))"
    return {statement: f"next({lives}, None) or {by}; {statement}"}


def end_of(main, capsys):
    """Call main and return what it leaves, as of a process."""
    from tqdm import tqdm  # here, since main's script has set how bars look

    status = 0
    tqdm._instances.clear()  # an error before may have left a bar, and bars make room for others
    capsys.readouterr()
    try:
        main()
    except SystemExit as end:
        status = end.code
    return subprocess.CompletedProcess(sys.argv, status, *capsys.readouterr())


TRAIN = ROOT / "recipes/train"


@pytest.fixture
def call(monkeypatch, capsys):
    """call("03_rerank.py", "--depth 4", cwd=folder): the script alone, in this process.

    The first text is split into words; further arguments are passed on as they are. A name without
    a number, such as mine.py, is that of a program in recipes/train.
    """

    def module_of(name, path, text):
        module = ModuleType(name)
        module.__file__ = path
        monkeypatch.setitem(sys.modules, name, module)  # to import, and to pickle
        exec(compiled(text, path, "exec"), module.__dict__)
        return module

    def call_script(script, text="", *args, cwd, env=None, edits=None):
        monkeypatch.chdir(cwd)
        for name, value in (env or {}).items():
            monkeypatch.setenv(name, value)
        is_stage = script[0].isdigit()
        path = script if is_stage else str(TRAIN / script)
        monkeypatch.setattr(sys, "argv", [path, *text.split(), *map(str, args)])
        if is_stage:
            [code] = edited(edits, ROOT / script)
            Path(script).write_text(code, "utf-8")
            return end_of(module_of("<run_path>", script, code).main, capsys)
        shared, code = edited(edits, TRAIN / "training.py", TRAIN / script)
        monkeypatch.syspath_prepend(TRAIN)
        module_of("training", str(TRAIN / "training.py"), shared)
        code = compiled(code, path, "exec")
        return end_of(lambda: exec(code, {"__name__": "__main__"}), capsys)

    return call_script


@pytest.fixture
def program(monkeypatch, capsys):
    """program("ev2r", "a.tsv b.tsv", cwd=folder): recipes/ev2r.py, as call() does it."""

    def call_program(name, text="", *args, cwd):
        path = str(ROOT / f"recipes/{name}.py")
        monkeypatch.syspath_prepend(Path(path).parent)
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", [path, *text.split(), *map(str, args)])
        return end_of(lambda: runpy.run_path(path, run_name="__main__"), capsys)

    return call_program


@pytest.fixture
def shell(warm):
    """shell("recipes/demo.sh", word, X=...): a recipe with these settings."""

    def run_recipe(path, word="", **settings):
        env = os.environ | {"PATH": warm} | settings
        command = ["bash", str(ROOT / path), word]
        return subprocess.run(command, env=env, capture_output=True, text=True)

    return run_recipe


@pytest.fixture
def quick_processes(monkeypatch):
    """Processes of a pool are copies of this one, not new ones that import PyTorch again.

    As a new one would, a copy gets a model that has been pickled.
    """

    class Copy(multiprocessing.context.ForkProcess):
        def __init__(self, *, args, **options):
            device, model, *queues = args
            model = pickle.loads(pickle.dumps(model))
            super().__init__(args=(device, model, *queues), **options)

    monkeypatch.setattr(multiprocessing.context.SpawnContext, "Process", Copy)


@pytest.fixture
def killed(call):
    """killed("03_rerank.py", ..., cwd=folder, edits=kill_before(...)): True if kill -9 came.

    As call(), in a copy of this process.
    """

    def fork(*command, **how):
        child = os.fork()
        if child == 0:  # in the copy
            with contextlib.suppress(BaseException):
                call(*command, **how)
            os._exit(1)
        return os.waitpid(child, 0)[1] == 9  # the signal that has ended it

    return fork


def facts(done):
    """Return the JSON object that ends the output of a script without an error."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def refused(call, contents):
    """refused(folder, script, args, said="part"): exit 2, one error line, no file touched.

    kept: a part of the names of unfinished work, which may stay.
    """

    def check(folder, *command, said, by=call, kept="//", **how):
        before = contents(folder, kept)
        done = by(*command, cwd=folder, **how)
        errors = re.findall("^error: .*", done.stderr, re.M)
        assert done.returncode == 2 and len(errors) == 1, done.stderr
        assert "Traceback" not in done.stderr and said in errors[0], done.stderr
        assert contents(folder, kept) == before

    return check


# ---------------------------------------------------------------- A language model
class Endpoint(BaseHTTPRequestHandler):
    """Answers as an OpenAI-compatible server does, with what server.reply(prompt) returns.

    A request without messages, such as one to rerank, is given to server.reply() whole.

    That is a text, or a dict of status, text, headers, raw (bytes in place of a completion),
    sleep (seconds before it answers), drop (hang up without an answer).
    """

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][-1]["content"] if "messages" in body else body
        self.server.asked.append(body | {"key": self.headers["Authorization"]})
        answer = self.server.reply(prompt)
        if isinstance(answer, str):
            answer = {"text": answer}
        time.sleep(answer.get("sleep", 0))
        if answer.get("drop"):
            return self.connection.close()
        status = answer.get("status", 200)
        data = answer.get("raw")
        if not data:
            text = answer.get("text")
            whole = {"error": {"message": text}}
            if status == 200:
                usage = {"prompt_tokens": len(str(body)), "completion_tokens": 3}
                whole = {"choices": [{"message": {"content": text}}], "usage": usage}
                self.server.answered.append(prompt)
            data = json.dumps(whole).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(data))}
        with contextlib.suppress(OSError):  # the other side may be gone
            self.send_response(status)
            for header in (headers | answer.get("headers", {})).items():
                self.send_header(*header)
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def endpoint(monkeypatch):
    """endpoint(reply): a server with its url, and what it was asked and answered so far.

    The openai package pauses before it asks again; in this process, only for a moment.
    """
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    with contextlib.ExitStack() as running:

        def start(reply):
            server = running.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Endpoint))
            server.reply = reply
            server.asked = []
            server.answered = []
            server.url = f"http://127.0.0.1:{server.server_port}/v1"
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            running.callback(server.shutdown)
            return server

        yield start
