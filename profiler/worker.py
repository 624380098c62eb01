"""An adaptive engine in a process of its own, which runs coroutine functions of its parent's choice.

    with Worker(model, "--tp", "1", "--dp", "2") as worker:
        answer = worker.do(function, tokens=8)  # there: await function(rig, tokens=8); JSON both ways

What fails there fails here, and an engine that dies takes nobody along.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil

from profiler import launch
from profiler.rig import Rig
from sglang_pat.testing.prefork import Prefork, popen

END_SECONDS = 60


def search_path() -> dict[str, str]:
    """For the environment of a process that is to find modules where this one does."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


class WorkerError(RuntimeError):
    """What went wrong in the worker: its traceback, or the end of its log."""


class Worker:
    """The parent's side.

    Attributes:
        process: the worker.
        started_seconds: until the engine could take requests.

    Args:
        flags: SGLang's and ours, but for those of the policy.
        policy: flags of the policy; ``manual`` if not given.
        log: file for what the engine prints; None to drop it.
        prefork: starts the worker as a fork (``sglang_pat.testing.prefork``), not as a new interpreter.

    Raises:
        WorkerError: the engine did not start.
    """

    def __init__(
        self,
        model: Path,
        *flags: str,
        policy: Sequence[str] = launch.MANUAL,
        log: Path | None = None,
        env: dict[str, str] | None = None,
        seconds: float = 900,
        prefork: Prefork | None = None,
    ) -> None:
        begun = time.monotonic()
        self._log = log
        argv = [json.dumps(policy), str(model), *flags]
        environment = os.environ | search_path() | (env or {})
        with open(log or os.devnull, "ab") as output:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": output}
            self.process = popen(prefork, "profiler.worker", argv, environment, **pipes)
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None, "both are pipes"
        self._stdin = stdin
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(stdout,), daemon=True).start()
        self._answer(seconds)
        self.started_seconds = time.monotonic() - begun

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            self._lines.put(line)
        self._lines.put("")

    def _answer(self, seconds: float) -> Any:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            self.kill()
            raise WorkerError(f"no answer after {seconds:.0f} s{self._said()}") from None
        if not line:
            raise WorkerError(f"the engine ended with code {self.process.wait()}{self._said()}")
        found = json.loads(line)
        if "error" in found:
            raise WorkerError(found["error"])
        return found["answer"]

    def _said(self) -> str:
        return f"; end of {self._log}:\n{self._log.read_text(errors='replace')[-3000:]}" if self._log else ""

    def do(self, function: Callable, *, seconds: float = 1800, **arguments: Any) -> Any:
        """What the coroutine function ``function(rig, **arguments)`` returns there.

        Raises:
            WorkerError: it failed, took longer than ``seconds``, or the engine ended.
        """
        what = f"{function.__module__}:{function.__qualname__}"
        self._stdin.write(json.dumps({"do": what, "with": arguments}) + "\n")
        self._stdin.flush()
        return self._answer(seconds)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self) -> None:
        """End the engine, in order if it can."""
        if self.process.poll() is None:
            self._stdin.close()
            try:
                self.process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        with suppress(psutil.NoSuchProcess):
            for child in self.children():
                with suppress(psutil.NoSuchProcess):
                    child.kill()
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()


async def serve(engine: Any, answer: Callable[..., None]) -> None:
    """Run what comes on stdin, one line after the other, until it is closed."""
    rig = Rig(engine, temperature=0.0)
    await rig.connect()
    answer(answer=os.getpid())
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        module, name = command["do"].split(":")
        try:
            answer(answer=await getattr(importlib.import_module(module), name)(rig, **command["with"]))
        except Exception:
            answer(error=traceback.format_exc())


def main() -> int:
    policy, model, *flags = sys.argv[1:]
    # Whatever the engine prints goes to stderr: stdout is for answers.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**found: Any) -> None:
        print(json.dumps(found), file=out, flush=True)

    engine = launch.start(launch.server_args(model, flags, json.loads(policy)))
    try:
        launch.run(engine, lambda: serve(engine, answer))
    finally:
        engine.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
