"""Processes of an engine: deaf to signals that are the main process's business, and gone when it is."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import psutil
import pytest

from sglang_pat.sglang.launch.processes import wait_until_ended

pytestmark = [pytest.mark.unit, pytest.mark.slow]

SCRIPT = """
import json, signal, sys, tempfile, threading
from sglang_pat.sglang.launch import processes

def child(parent_pid, writer):
    writer.send([str(signal.getsignal(number)) for number in processes.ENDING])
    threading.Event().wait()

if __name__ == "__main__":
    tempfile.tempdir = sys.argv[1]
    processes.PRELOAD = []
    getattr(processes, sys.argv[2])()
    started = [processes.start(child) for _ in range(2)]
    print(json.dumps([reader.recv() for _, reader in started]), flush=True)
    sys.stdin.readline()
    processes.end_children()
"""


NEVER_WAITS = """
import ctypes, subprocess, sys

PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
sys.exit(subprocess.call(sys.argv[1:]))
"""
"""Runs a command, adopts what it leaves and never takes an exit code, as process 1 of many a container."""


@pytest.fixture(params=["warm", "fork_here"])
def engine(request, tmp_path_factory):
    """A main process with two children, and what these said of their signals; the fork server is started either way."""
    place = tmp_path_factory.mktemp("p")
    script = place / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(place), request.param]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.said = json.loads(process.stdout.readline())
        yield process
        process.kill()


def test_children_ignore_what_ends_the_engine(engine):
    assert engine.said == [[str(signal.SIG_IGN)] * 2] * 2


def test_children_end_with_a_killed_parent(engine):
    children = psutil.Process(engine.pid).children(recursive=True)
    assert len(children) >= 2
    engine.kill()
    assert not wait_until_ended(children, 500)


def test_the_end_waits_for_all(engine):
    children = psutil.Process(engine.pid).children(recursive=True)
    engine.stdin.write("\n")
    engine.stdin.flush()
    assert engine.wait(timeout=500) == 0
    assert not wait_until_ended(children, 500)


def test_a_zombie_has_ended(tmp_path):
    """Else an engine's end would take END_SECONDS wherever process 1 takes no exit codes."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-c", NEVER_WAITS, sys.executable, str(script), str(tmp_path), "fork_here"]
    run = subprocess.run(command, input="\n", capture_output=True, text=True, timeout=500)
    assert run.returncode == 0 and not run.stderr, run.stderr
