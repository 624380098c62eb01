"""Processes of an engine: deaf to signals that are the main process's business, and gone when it is."""

from __future__ import annotations

import json
import multiprocessing as mp
import signal
import subprocess
import sys

import psutil
import pytest

from sglang_pat.launch import processes
from sglang_pat.launch.processes import wait_until_ended

pytestmark = [pytest.mark.unit, pytest.mark.slow]

SCRIPT = """
import json, signal, sys, tempfile, threading
from sglang_pat.launch import processes

def child(parent_pid, writer):
    writer.send([str(signal.getsignal(number)) for number in processes.ENDING])
    threading.Event().wait()

if __name__ == "__main__":
    tempfile.tempdir = sys.argv[1]
    processes.PRELOAD = []
    getattr(processes, sys.argv[2])()
    started = [processes.start("a child", child) for _ in range(2)]
    print(json.dumps([reader.recv() for _, reader in started]), flush=True)
    sys.stdin.readline()
    processes.end_children()
"""


IMPORTS_ENGINE = """
from sglang_pat.launch import processes

processes.PRELOAD = ["json"]
processes.warm_up_fork_server()  # as ``from sglang_pat import Engine`` does

if __name__ == "__main__":
    child = processes.get_context().Process(target=print, args=("ran",))
    child.start()
    child.join()
"""


START = """
import json, os, signal, sys, tempfile, threading
import psutil
from sglang_pat.launch import processes

def child(what, parent_pid, writer):
    if what == "ready":
        writer.send({"status": "ready"})
        writer.close()
    elif what == "quit":
        writer.send({"status": "ready"})
        writer.close()
        processes.end_engine(parent_pid, writer, "failed later")
    elif what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "exit":
        os._exit(3)
    elif what != "hangs":
        processes.end_engine(parent_pid, writer, what)
    threading.Event().wait()

if __name__ == "__main__":
    tempfile.tempdir = sys.argv[1]
    processes.PRELOAD = []
    quits = threading.Event()
    signal.signal(signal.SIGQUIT, lambda *_: quits.set())
    started = {f"rank {i}": processes.start(f"rank {i}", child, what) for i, what in enumerate(sys.argv[2:])}
    try:
        said = processes.wait_until_ready(started)
        left = None
    except processes.NotStarted as error:
        said = str(error)
        left = [one for one in psutil.Process().children(recursive=True) if not processes.is_resource_tracker(one)]
        left = len(processes.wait_until_ended(left, 0))
    if "quit" in sys.argv:
        quits.wait(60)
    print(json.dumps([said, left, quits.is_set()]), flush=True)
    processes.end_children()
"""


NEVER_WAITS = """
import ctypes, subprocess, sys

PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
sys.exit(subprocess.call(sys.argv[1:]))
"""
"""Runs a command, adopts what it leaves and never takes an exit code, as process 1 of many a container."""


@pytest.fixture(params=["warm_up_fork_server", "fork_here"])
def engine(request, tmp_path_factory):
    """A main process with two children; the fork server is started either way."""
    place = tmp_path_factory.mktemp("p")
    script = place / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(place), request.param]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        said = json.loads(process.stdout.readline())
        assert said == [[str(signal.SIG_IGN)] * 2] * 2, "children ignore what ends the engine"
        yield process
        process.kill()


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


def test_a_program_may_import_the_engine_above_its_main(tmp_path):
    """The program's children read that part of it, too."""
    script = tmp_path / "script.py"
    script.write_text(IMPORTS_ENGINE)
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=500)
    assert run.stdout == "ran\n" and not run.stderr, run.stderr


def test_a_zombie_has_ended(tmp_path):
    """An engine's end would take END_SECONDS otherwise, wherever process 1 takes no exit codes."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-c", NEVER_WAITS, sys.executable, str(script), str(tmp_path), "fork_here"]
    run = subprocess.run(command, input="\n", capture_output=True, text=True, timeout=500)
    assert run.returncode == 0 and not run.stderr, run.stderr


@pytest.mark.parametrize(
    "children,said",
    [
        (("ready", "ready"), [{"status": "ready"}] * 2),
        (("hangs", "--x cannot be"), "--x cannot be"),
        (("ready", "hangs", "killed"), "rank 2 was killed while it started: the kernel does that when memory runs out"),
        (("exit", "hangs"), "rank 0 ended while it started, with exit code 3"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else "",
)
def test_a_child_that_cannot_start_ends_the_others_and_says_why(tmp_path_factory, children, said):
    found, left, quits = start_children(tmp_path_factory, *children)
    assert found[: len(said)] == said
    assert not left and not quits


def test_a_child_that_fails_later_says_so_by_a_signal(tmp_path_factory):
    assert start_children(tmp_path_factory, "quit") == [[{"status": "ready"}], None, True]


def start_children(tmp_path_factory, *children: str) -> list:
    place = tmp_path_factory.mktemp("p")
    (script := place / "script.py").write_text(START)
    done = subprocess.run(
        [sys.executable, str(script), str(place), *children], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_reason_is_that_of_the_first_to_fail(monkeypatch):
    """The others fail because it is gone."""
    monkeypatch.setattr(processes, "end_children", lambda: None)
    pipes = {name: mp.Pipe(duplex=False) for name in ("rank 0", "rank 1", "rank 2")}
    for (_, writer), at in zip(pipes.values(), (7.0, 5.0, 6.0), strict=True):
        writer.send({"status": "refused", "why": f"failed at {at}", "at": at})
    with pytest.raises(processes.NotStarted, match="failed at 5"):
        processes.wait_until_ready({name: (None, reader) for name, (reader, _) in pipes.items()})
