"""Fixtures: scripts alone in a folder with their inputs, toy data, small models, an endpoint."""

import contextlib
import functools
import json
import multiprocessing
import os
import pickle
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
TOY = ROOT / "tests" / "toy"  # twelve abstracts, five judged claims, a run that begins with those
SECRETS = ("OPENAI_API_KEY", "LLM_BASE_URL", "LLM_MODEL", "NO_COLOR")  # of this machine
RUN = ["claim_id", "abstract_id", "rank", "score"]
KEY = RUN[:2]
CLAIMS = ["claim_id", "claim"]
QRELS = [*KEY, "label"]
LABELLED = [*RUN, "label"]
LABELS = ["SUPPORTS", "REFUTES", "NEI"]


# ---------------------------------------------------------------- Files
def cells(text):
    """Return the rows of a text in which | stands between cells and ; between rows."""
    return [row.strip().split("|") for row in text.split(";")]


def tsv(path, header, rows):
    """Write rows, and their header, as they are; rows: lists, or a text as cells() takes it."""
    if isinstance(rows, str):
        rows = cells(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["\t".join(map(str, row)) for row in [header, *rows]]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read(path):
    """Read a TSV file with ids as strings."""
    return pd.read_csv(path, sep="\t", dtype=dict.fromkeys(KEY, str), na_filter=False)


def jsonl(path, *lines):
    """Write records as JSON Lines."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def records(path):
    """Read JSON Lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


ABSTRACTS = {record["abstract_id"]: record["abstract"] for record in records(TOY / "corpus.jsonl")}


def cases(name):
    """Read a table of test cases in this folder, without its header."""
    lines = (ROOT / "tests" / name).read_text(encoding="utf-8").splitlines()
    return [line.split("\t") for line in lines[1:]]


@pytest.fixture
def contents():
    """contents(folder): {path: bytes} of its files without links, to see what a call changed."""

    def read_files(folder, aside="//"):
        paths = [path for path in Path(folder).rglob("*") if "models" not in path.parts]
        files = [path for path in paths if path.is_file() and not path.is_symlink()]
        return {
            path: path.read_bytes()
            for path in files
            if path.suffix != ".py" and aside not in str(path)
        }

    return read_files


# ---------------------------------------------------------------- Models and toy data
RUNNING = contextlib.ExitStack()  # what this session has started


def pytest_sessionstart(session):
    """Fetch the models, and start warm_python(), once before tests run in parallel.

    Each process keeps to one core: a copy of one with threads of torch waits for them for ever.
    """
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_BAR_FORMAT": "{desc}: {n_fmt}/{total_fmt}\n"}
    for name in SECRETS:
        os.environ.pop(name, None)
    os.environ["OMP_NUM_THREADS"] = "1"
    if not hasattr(session.config, "workerinput"):
        subprocess.run([sys.executable, ROOT / "data" / "download.py", "models"], check=False)
        os.environ["WARM_PATH"] = RUNNING.enter_context(warm_python())


def pytest_sessionfinish():
    RUNNING.close()


def pytest_collection_modifyitems(items):
    """Two workers begin with Ray, one with short tests; no long one comes last."""
    order = ["test_on_ray", "test_02_retrieve", "test_03_rerank", "test_notebook", "test_recipes"]

    def place(item):
        script = item.path.stem
        return order.index(script) if script in order else len(order)

    items.sort(key=place)


@contextlib.contextmanager
def warm_python():
    """Give a PATH whose python runs scripts in copies of a process that has imported PyTorch."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # paths of sockets are short
        script = ROOT / "tests/tools/warm.py"
        python = Path(folder, "python")
        socket = Path(folder, "s")
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {script} ask {socket} "$@"\n')
        python.chmod(0o755)
        command = [sys.executable, script, "serve", socket]
        with subprocess.Popen(command) as server:
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
    assert (ROOT / "data" / "models" / "smollm2").exists(), "python data/download.py models"
    return ROOT / "data" / "models"


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


def tiny(folder, outputs=("LABEL_0",), seed=0, dtype="float32"):
    """Make a BERT of two small layers with random weights and outputs of these names."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig

    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=30_522,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        initializer_range=0.5,
        id2label=dict(enumerate(outputs)),
    )
    model = AutoModelForSequenceClassification.from_config(config)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "data/models/minilm").save_pretrained(folder)
    return str(folder)


def tiny_llm(folder):
    """Make a language model of two small layers with random weights, which reads bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    marks = ["<|im_start|>", "<|im_end|>", "yes", "no"]
    byte_level = pre_tokenizers.ByteLevel(False)
    tokens = marks + sorted(byte_level.alphabet())
    vocabulary = {token: index for index, token in enumerate(tokens)}
    bpe = Tokenizer(BPE(vocabulary, []))
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
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.5,
        max_position_embeddings=4096,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def toy(tmp_path, models):
    """A folder with the toy as data/demo/, a hybrid run per split in work/demo/, data/models."""
    shutil.copytree(TOY, tmp_path / "data" / "demo")
    (tmp_path / "data" / "models").symlink_to(models)
    for split in ("train", "test"):
        (tmp_path / "work" / "demo" / split).mkdir(parents=True)
        run = tmp_path / "data" / "demo" / f"hybrid.{split}.tsv"
        run.rename(tmp_path / "work" / "demo" / split / "hybrid.tsv")
    return tmp_path


# ---------------------------------------------------------------- Scripts
def load(script):
    """Return the names of a script, without running it; it finds the modules beside it."""
    path = ROOT / script
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return SimpleNamespace(**runpy.run_path(str(path)))


def copy(script, folder, edits):
    """Copy a script alone into folder, and return its text.

    edits: {a part of it: what stands there instead}.
    """
    text = (ROOT / script).read_text(encoding="utf-8")
    for old, new in (edits or {}).items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / script).write_text(text, encoding="utf-8")
    return text


compiled = functools.cache(compile)


def kill_before(statement, time=1, by="__import__('signal').raise_signal(9)"):
    """Return an edit: kill -9 comes when the statement is about to be run for the time-th time."""
    lives = f"globals().setdefault('LIVES', iter(range(1, {time})))"
    return {statement: f"next({lives}, None) or {by}; {statement}"}


def end_of(main, args, capsys):
    """Call main and return what it leaves, as of a process."""
    from tqdm import tqdm  # here, since main's script has set how bars look

    status = 0
    tqdm._instances.clear()  # an error before may have left a bar, and bars make room for others
    capsys.readouterr()
    try:
        main()
    except SystemExit as end:
        status = end.code
    return subprocess.CompletedProcess(args, status, *capsys.readouterr())


TRAIN = ROOT / "recipes" / "train"


def train_texts(program, edits):
    """Return the texts of training.py and of a program beside it, with edits as copy() takes them.

    An edit is made in the one of the two that has its part.
    """
    texts = [path.read_text(encoding="utf-8") for path in (TRAIN / "training.py", TRAIN / program)]
    for old, new in (edits or {}).items():
        assert "".join(texts).count(old) == 1, old
        texts = [text.replace(old, new) for text in texts]
    return texts


@pytest.fixture
def train(monkeypatch, capsys):
    """train("mine.py", args, edits): a program of recipes/train in the current folder."""

    def call_train(program, args, edits):
        shared, text = train_texts(program, edits)
        monkeypatch.syspath_prepend(TRAIN)
        training = ModuleType("training")
        training.__file__ = str(TRAIN / "training.py")
        monkeypatch.setitem(sys.modules, "training", training)
        exec(compiled(shared, training.__file__, "exec"), training.__dict__)
        monkeypatch.setattr(sys, "argv", [str(TRAIN / program), *args])
        program_names = {"__name__": "__main__"}
        code = compiled(text, str(TRAIN / program), "exec")
        return end_of(lambda: exec(code, program_names), sys.argv, capsys)

    return call_train


@pytest.fixture
def call(monkeypatch, capsys, train):
    """call("03_rerank.py", "--depth 4", cwd=folder): the script alone, in this process.

    The first text is split into words; further arguments are passed on as they are. A name without
    a number, such as mine.py, is that of a program in recipes/train.
    """

    def call_script(script, text="", *args, cwd, env=None, edits=None):
        words = [*text.split(), *map(str, args)]
        monkeypatch.chdir(cwd)
        for name, value in (env or {}).items():
            monkeypatch.setenv(name, value)
        if not script[0].isdigit():
            return train(script, words, edits)
        text_of_script = copy(script, cwd, edits)
        monkeypatch.setattr(sys, "argv", [script, *words])
        module = ModuleType("<run_path>")
        monkeypatch.setitem(sys.modules, "<run_path>", module)  # to pickle
        exec(compiled(text_of_script, script, "exec"), module.__dict__)
        return end_of(module.main, sys.argv, capsys)

    return call_script


@pytest.fixture
def program(monkeypatch, capsys):
    """program("ev2r", "a.tsv b.tsv", cwd=folder): recipes/ev2r.py, as call() does it."""

    def call_program(name, text="", *args, cwd):
        path = ROOT / "recipes" / f"{name}.py"
        monkeypatch.syspath_prepend(path.parent)
        monkeypatch.chdir(cwd)
        args = [str(path), *text.split(), *map(str, args)]
        monkeypatch.setattr(sys, "argv", args)
        return end_of(lambda: runpy.run_path(str(path), run_name="__main__"), args, capsys)

    return call_program


@pytest.fixture
def quick_processes(monkeypatch):
    """Processes of a pool are copies of this one, not new ones that import PyTorch again.

    As a new one would, a copy gets a model that has been pickled.
    """

    class Copy(multiprocessing.get_context("fork").Process):
        def __init__(self, *, args, **options):
            device, model, *queues = args
            args = (device, pickle.loads(pickle.dumps(model)), *queues)
            super().__init__(args=args, **options)

    spawn = multiprocessing.get_context("spawn")
    monkeypatch.setattr(type(spawn), "Process", Copy)


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
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status) == -9

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
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
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
            self.close_connection = True
            return self.connection.close()
        status = answer.get("status", 200)
        text = answer.get("text")
        data = answer.get("raw")
        whole = {"error": {"message": text}}
        if status == 200:
            usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
            whole = {"choices": [{"message": {"content": text}}], "usage": usage}
            if not data:
                self.server.answered.append(prompt)
        if not data:
            data = json.dumps(whole).encode()
        with contextlib.suppress(OSError):  # the other side may be gone
            self.send_response(status)
            for name, value in answer.get("headers", {}).items():
                self.send_header(name, value)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
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
