"""A signal to a server: requests are aborted first, then uvicorn goes on, and waits a moment only."""

from __future__ import annotations

import asyncio
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import uvloop

pytestmark = pytest.mark.contract


class Server:
    """A stand-in for uvicorn's server."""

    force_exit = False

    def __init__(self) -> None:
        self.told: list[int] = []

    def handle_exit(self, number: int, frame) -> None:
        self.told.append(number)


class Manager:
    """What an ending uses of the TokenizerManager; ``stubborn`` requests do not go when they are aborted."""

    gracefully_exit = False

    def __init__(self, stubborn: bool) -> None:
        self.event_loop = asyncio.get_running_loop()
        self.asyncio_tasks: set[asyncio.Task] = set()
        self.rid_to_state = {"a": 1, "b": 2}
        self.stubborn = stubborn
        self.aborted = 0

    def abort_request(self, abort_all: bool) -> None:
        assert abort_all
        self.aborted += 1
        if not self.stubborn:
            self.rid_to_state.clear()


@pytest.fixture
def ending(monkeypatch):
    from sglang_pat.host import shutdown as ending

    monkeypatch.setattr(ending, "ABORT_SECONDS", 0.5)
    monkeypatch.setattr(ending, "ANSWER_SECONDS", 0)
    saved = {number: signal.getsignal(number) for number in (*ending.processes.ENDING, signal.SIGQUIT)}
    yield ending
    for number, handler in saved.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("stubborn", [False, True])
def test_requests_are_aborted_and_the_server_goes_on(ending, number, stubborn):
    server = Server()

    async def run() -> Manager:
        manager = Manager(stubborn)
        for each in ending.processes.ENDING:
            signal.signal(each, server.handle_exit)
        ending.Shutdown(manager, ending.get_handlers())
        signal.raise_signal(number)
        signal.raise_signal(number)
        while not manager.asyncio_tasks:
            await asyncio.sleep(0)
        await asyncio.gather(*manager.asyncio_tasks)
        return manager

    manager = asyncio.run(asyncio.wait_for(run(), 30))
    assert manager.gracefully_exit and manager.aborted >= 1
    assert server.told == [number] and server.force_exit


def test_signals_are_handled_while_another_thread_runs_the_loop(ending, monkeypatch):
    """A rollout of an ``Engine`` does so: SIGTERM aborts what runs, SIGQUIT ends everything."""
    quits: list[int] = []
    monkeypatch.setattr(
        ending.ShutdownSignalHandler, "running_phase_sigquit_handler", lambda _, *given: quits.append(given[0])
    )
    server, before = Server(), ending.get_handlers()
    before[signal.SIGTERM] = server.handle_exit

    async def place() -> Manager:
        manager = Manager(False)
        for number in (*ending.processes.ENDING, signal.SIGQUIT):
            manager.event_loop.add_signal_handler(number, lambda: None)  # as SGLang does
        ending.Shutdown(manager, before)
        return manager

    async def ended() -> None:
        while not server.told:
            await asyncio.sleep(0)

    loop = uvloop.new_event_loop()
    manager = loop.run_until_complete(place())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGQUIT)
    asyncio.run_coroutine_threadsafe(ended(), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    assert manager.aborted == 1 and quits == [signal.SIGQUIT]


def test_in_a_script_signals_keep_their_default(ending):
    async def run() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        before = ending.get_handlers()
        manager = Manager(False)
        manager.event_loop.add_signal_handler(signal.SIGTERM, lambda: None)  # as SGLang does
        ending.Shutdown(manager, before)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    asyncio.run(run())


LAUNCHING = """
import os, signal, sys, threading
from multiprocessing import get_context
from sglang_pat.cpu import shim
shim.ensure()
from sglang_pat.launch import processes
from sglang_pat.host.shutdown import end_if_a_child_fails, make_watchdog

def launch():
    end_if_a_child_fails()
    child = get_context("fork").Process(target=signal.pause, name="sglang_pat: rank 1")
    child.start()
    make_watchdog([child], ["scheduler_2"]).start()
    if sys.argv[2] == "child":
        child.kill()
    else:
        os.kill(os.getpid(), signal.SIGQUIT)
        print("still there", flush=True)
        child.kill()

print(processes.get_private_folder(), flush=True)
if sys.argv[1] == "main":
    launch()
else:
    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
while True:
    signal.pause()
"""


@pytest.mark.parametrize(
    "thread, failure, ignored", [("main", "child", True), ("another", "child", False), ("another", "signal", False)]
)
def test_the_end_of_a_child_ends_all_and_says_so(run_code, thread, failure, ignored):
    """The main thread launches in a script, another one in a Ray actor.

    A shell's ``command &`` ignores SIGQUIT for all of a job.
    """
    before = f"import signal\nsignal.signal(signal.SIGQUIT, signal.{'SIG_IGN' if ignored else 'SIG_DFL'})\n"
    done = run_code(before + LAUNCHING, thread, failure)
    folder, *said = done.stdout.splitlines()
    assert done.returncode == 1 and not Path(folder).exists(), done.stderr
    assert "sglang_pat: rank 1 has ended (pid " in done.stderr and "exit code -9)" in done.stderr
    assert said == ["still there"] * (failure == "signal")


def test_whoever_launches_sglang_makes_our_watchdog():
    """verl throws away what SGLang's launch returns of it."""
    from sglang.srt.entrypoints import engine

    import sglang_pat.server.engine  # noqa: F401
    from sglang_pat.host.shutdown import make_watchdog

    assert "SubprocessWatchdog" in engine.Engine._launch_subprocesses.__func__.__code__.co_names
    assert engine.SubprocessWatchdog is make_watchdog


def test_the_end_after_a_failure_takes_no_lock(ending, monkeypatch):
    """The signal comes at any moment: while this thread stops the watchdog, or within the handler itself."""
    from sglang_pat.host.shutdown import ChildrenWatchdog

    ended = threading.Event()
    monkeypatch.setattr(ending, "_end_all", ended.set)
    watchdog = ChildrenWatchdog([])
    manager = SimpleNamespace(_subprocess_watchdog=watchdog, dump_requests_before_crash=lambda: None)
    handle = ending.ShutdownSignalHandler(manager).running_phase_sigquit_handler
    with watchdog._stop_event._cond:
        threading.Thread(target=handle, daemon=True).start()
        assert ended.wait(30)
    assert watchdog.over


def test_a_crash_dump_that_fails_keeps_nothing_alive(ending, monkeypatch):
    ended = []
    monkeypatch.setattr(ending, "_end_all", lambda: ended.append(True))

    def dump():
        raise OSError("No space left on device")

    manager = SimpleNamespace(_subprocess_watchdog=None, dump_requests_before_crash=dump)
    with pytest.raises(OSError):  # here only: the process is gone otherwise
        ending.ShutdownSignalHandler(manager).running_phase_sigquit_handler()
    assert ended


SIGNALLED = """
import os, signal, threading
from types import SimpleNamespace
from multiprocessing import get_context
from sglang_pat.cpu import shim
shim.ensure()
from sglang_pat.host.shutdown import ShutdownSignalHandler, make_watchdog

child = get_context("fork").Process(target=signal.pause, name="sglang_pat: rank 1")
child.start()
watchdog = make_watchdog([child], ["scheduler_2"])
watchdog.start()
manager = SimpleNamespace(_subprocess_watchdog=watchdog, dump_requests_before_crash=lambda: None)
signal.signal(signal.SIGQUIT, ShutdownSignalHandler(manager).running_phase_sigquit_handler)

def signals():
    while True:
        os.kill(os.getpid(), signal.SIGQUIT)

threading.Thread(target=signals, daemon=True).start()
while True:
    signal.pause()
"""


def test_many_signals_at_once(run_code):
    done = run_code(SIGNALLED)
    assert done.returncode == 1 and "a process of the engine failed: all end" in done.stderr
    assert "Traceback" not in done.stderr and "has ended" not in done.stderr, done.stderr
