"""Run scripts in copies of one process that has imported PyTorch: seven seconds less for each.

python warm.py serve SOCKET           copies itself for each requested script
python warm.py ask SOCKET SCRIPT ...  what recipes find as python on the PATH
"""

import gc
import importlib
import json
import os
import runpy
import shutil
import socket
import sys


def serve(server):
    """Copy this process for each requested script; the copy sends the script's exit status."""
    server.listen()
    import datasets  # noqa: F401
    import sentence_transformers  # noqa: F401

    gc.freeze()  # a copy shares this memory as long as nothing is collected there
    while True:
        client, _ = server.accept()
        if not os.fork():
            asked, streams, _, _ = socket.recv_fds(client, 1 << 20, 3)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            status = run(*json.loads(asked))
            client.send(bytes([status]))
            os._exit(0)
        client.close()


def run(folder, environment, words):
    """Run a script as __main__, and return its exit status; an error ends this process."""
    import huggingface_hub

    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in environment
    importlib.reload(huggingface_hub.constants)  # which reads the environment: the hub, its cache
    huggingface_hub.hf_api.api.endpoint = huggingface_hub.constants.ENDPOINT
    sys.argv = words
    sys.executable = shutil.which("python", path=environment["PATH"])  # for what it starts
    sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        return end.code or 0
    finally:
        sys.stdout.flush()
    return 0


def ask(server, words):
    """Return the exit status of a script that the server runs; 1 if it ended without one."""
    asked = json.dumps([os.getcwd(), dict(os.environ), words]).encode()
    socket.send_fds(server, [asked], [0, 1, 2])
    status = server.recv(1)
    return status[0] if status else 1


if __name__ == "__main__":
    job, path, *words = sys.argv[1:]
    if job == "ask" and not words[0].endswith(".py"):
        os.execv(sys.executable, [sys.executable, *words])  # python -m zipfile
    with socket.socket(socket.AF_UNIX) as server:
        if job == "ask":
            server.connect(path)
            sys.exit(ask(server, words))
        server.bind(path)
        serve(server)
