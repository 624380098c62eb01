"""A start that is refused says so in its last line, in few lines, without a traceback."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from sglang_pat.config import AdaptiveConfig
from sglang_pat.layout import ParallelLayout

pytestmark = pytest.mark.contract

BASE = ["--tp", "1", "--dp", "2", "--adaptive-tp"]


def last_line(*flags: str, before: str = "", code: int = 1) -> str:
    """Start with ``flags``, after the statement ``before``; the last line of stderr."""
    script = f"import sys\n{before}\nfrom sglang_pat.launch_server import main\nmain(sys.argv[1:])"
    command = [sys.executable, "-c", script, *BASE, *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == code
    assert len((done.stdout + done.stderr).splitlines()) < 20 and "Traceback" not in done.stderr, done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    return line


def folder_with(tmp_path, text: str | None) -> str:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    return str(tmp_path)


def test_no_such_model():
    assert "--model-path /none/here: no such folder" in last_line("--model-path", "/none/here")


def test_the_python_engine_raises_the_same_line():
    from sglang_pat.sglang.launch.args import AdaptiveServerArgs

    with pytest.raises(ValueError, match="--model-path /none/here: no such folder$"):
        AdaptiveServerArgs(model_path="/none/here", tp_size=1, dp_size=2, adaptive_tp=True)


@pytest.mark.parametrize("text,said", [(None, "there is no config.json"), ("{", "is not JSON"), ("[1]", "JSON object")])
def test_a_model_without_a_config(tmp_path, text, said):
    assert said in last_line("--model-path", folder_with(tmp_path, text))


def test_ports(model):
    assert "choose one up to 55535" in last_line("--model-path", model, "--port", 55_536)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        if port <= 55_535:
            assert "in use; choose another" in last_line("--model-path", model, "--port", port)


def test_no_temporary_folder(model):
    before = "import tempfile; tempfile.tempdir = '/proc/none'; tempfile.mkdtemp = lambda **_: open('/proc/none/x')"
    assert "set TMPDIR to a folder that can be written" in last_line("--model-path", model, before=before)


def test_a_refusal_of_sglang_and_of_ours_are_the_last_line(model):
    """After all imports: nothing that they print, here or in the fork server, comes later."""
    assert "--pp-size 2" in last_line("--model-path", model, "--port", 31_999, "--pp-size", 2)


def test_little_shared_memory(monkeypatch):
    from sglang_pat.sglang.launch import start

    config = AdaptiveConfig(base=ParallelLayout(1, 8))
    need = start.shared_memory_needed(config)
    assert 8 << 20 < need < 64 << 20, "what docker gives by default suffices"
    monkeypatch.setattr(start.shutil, "disk_usage", lambda _: type("Usage", (), {"free": need - 1}))
    with pytest.raises(ValueError, match="8 ranks need .* --shm-size"):
        start.check_shared_memory(config)
    monkeypatch.setattr(start.shutil, "disk_usage", lambda _: type("Usage", (), {"free": need}))
    start.check_shared_memory(config)


@pytest.mark.parametrize("host,key,warned", [
    ("127.0.0.1", None, False), ("localhost", None, False), ("::1", None, False), ("0.0.0.0", "k", False),
    ("0.0.0.0", None, True), ("10.0.0.3", None, True), ("node7", None, True),
])  # fmt: skip
def test_an_open_server_says_so(host, key, warned, caplog):
    from sglang_pat.sglang.launch.start import warn_if_open

    warn_if_open(type("Args", (), {"host": host, "port": 30_000, "api_key": key}))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warned
