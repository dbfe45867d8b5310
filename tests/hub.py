"""
Serve folders as models and data sets of a hub, on loopback.

huggingface_hub follows HF_ENDPOINT to it.

Reads   FOLDER/OWNER/NAME/: the files of a model, in the layout in which it is published; a file
        .gated beside them: whoever has no token is refused
Prints  the address

Example
    HF_ENDPOINT=http://127.0.0.1:8009 HF_HOME=work/hub python 01_index.py --dense-model OWNER/NAME
beside
    python tests/hub.py FOLDER 8009

The routes and headers are those that huggingface_hub 1.x asks for and reads: the list of a model's
files, their sizes, and the files themselves, whole or from a byte on.
"""

import contextlib
import functools
import hashlib
import http.server
import json
import os
import re
import sys
import threading
from pathlib import Path

API = re.compile(r"/api/(?:models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?(?:/(.+))?")
FILE = re.compile(r"(?:/datasets)?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class Hub(http.server.ThreadingHTTPServer):
    """A server of the models and data sets below a folder.

    asked: (method, path) of all requests. cut: files of which the next reader gets this many bytes,
    before the connection breaks; {"weights.bin": 1000}.
    """

    def __init__(self, folder, port=0):
        super().__init__(("127.0.0.1", port), Answer)
        self.folder = Path(folder)
        self.asked = []
        self.cut = {}
        self.url = f"http://127.0.0.1:{self.server_port}"

    def files(self, name):
        """Return {name in the model: path} of its files."""
        folder = self.folder / name
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        files = {path.relative_to(folder).as_posix(): path for path in paths}
        files.pop(".gated", None)
        return files


@functools.cache
def digest_of(path, changed):
    """Return the SHA-1 of a file; changed: when it was written last."""
    return hashlib.sha1(path.read_bytes()).hexdigest()


class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Print nothing."""

    def send(self, status, body=b"", length=None, **headers):
        self.send_response(status)
        self.send_header("Content-Length", str(length or len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        path = self.path.split("?")[0]
        self.server.asked.append((self.command, path))
        match = API.fullmatch(path) or FILE.fullmatch(path)
        name = match[1] if match else ""
        if not match or not (self.server.folder / name).is_dir():
            return self.send(404, X_Error_Code="RepoNotFound")
        files = self.server.files(name)
        digests = {file: digest_of(path, path.stat().st_mtime_ns) for file, path in files.items()}
        commit = hashlib.sha1(json.dumps(digests).encode()).hexdigest()
        revision = match[3] if API.fullmatch(path) else match[2]
        is_old = re.fullmatch("[0-9a-f]{40}", revision or "") and revision != commit
        if is_old and "datasets/" not in path:  # of a model, the newest commit alone is there
            return self.send(404, X_Error_Code="RevisionNotFound")
        commit = revision if is_old else commit
        is_gated = (self.server.folder / name / ".gated").exists()
        if API.fullmatch(path):
            if match[2] == "tree":
                found = [
                    {
                        "type": "file",
                        "path": file,
                        "size": found.stat().st_size,
                        "oid": digests[file],
                    }
                    for file, found in files.items()
                    if file.startswith(match[4] or "")
                ]
                if not found:
                    return self.send(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
            else:
                siblings = [{"rfilename": file} for file in files]
                found = {"id": name, "modelId": name, "sha": commit, "siblings": siblings}
                found |= {"gated": "manual" if is_gated else False, "private": False}
            return self.send(200, json.dumps(found).encode(), Content_Type="application/json")
        file = match[3]
        if is_gated and "Authorization" not in self.headers:
            return self.send(401, X_Error_Code="GatedRepo")
        if file not in files:
            return self.send(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        content = files[file].read_bytes()
        known = {"ETag": f'"{digests[file]}"', "X_Repo_Commit": commit, "Accept_Ranges": "bytes"}
        start = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if start:
            part = content[int(start[1]) :]
            known["Content_Range"] = f"bytes {start[1]}-{len(content) - 1}/{len(content)}"
            return self.send(206, part, **known)
        if self.command == "GET" and file in self.server.cut:
            self.close_connection = True
            return self.send(200, content[: self.server.cut.pop(file)], len(content), **known)
        return self.send(200, content, **known)

    do_HEAD = do_GET


@contextlib.contextmanager
def serving(folder):
    """Give a Hub that answers from another thread."""
    with Hub(folder) as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield hub
        hub.shutdown()


def online(hub, home):
    """Return the environment of a process that knows this hub alone, with its cache in home."""
    names = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    names |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return {key: value for key, value in os.environ.items() if key != "HF_TOKEN"} | names


if __name__ == "__main__":
    server = Hub(sys.argv[1], int(sys.argv[2]))
    print(server.url, flush=True)
    server.serve_forever()
