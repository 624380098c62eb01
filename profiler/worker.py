"""An adaptive engine in a process of its own, which runs coroutine functions of its parent's choice.

    with Worker(model, "--tp", "1", "--dp", "2") as worker:
        answer = worker.do(function, tokens=8)  # there: await function(rig, tokens=8); JSON both ways

What fails there fails here, and an engine that dies takes nobody along.
"""

from __future__ import annotations

import asyncio
import json
import os
import pkgutil
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from profiler import launch
from profiler.rig import Rig
from sglang_pat.testing.prefork import Prefork, popen
from sglang_pat.testing.server import Program

END_SECONDS = 60


def search_path() -> dict[str, str]:
    """Environment of a process that is to find modules where this one does."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


class WorkerError(RuntimeError):
    """What went wrong in the worker: its traceback, or the end of its log."""


class Worker(Program):
    """The parent's side.

    Attributes:
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
        self._answer(seconds)
        self.started_seconds = time.monotonic() - begun

    def _answer(self, seconds: float) -> Any:
        answers = self.process.stdout
        assert answers is not None, "a pipe"
        if not select.select([answers], [], [], seconds)[0]:
            self.kill()
            raise WorkerError(f"no answer after {seconds:.0f} s{self._read_log()}")
        if not (line := answers.readline()):
            raise WorkerError(f"the engine ended with code {self.process.wait()}{self._read_log()}")
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply["answer"]

    def _read_log(self) -> str:
        return f"; end of {self._log}:\n{self._log.read_text(errors='replace')[-3000:]}" if self._log else ""

    def do(self, function: Callable, *, seconds: float = 1800, **arguments: Any) -> Any:
        """What the coroutine function ``function(rig, **arguments)`` returns there.

        Raises:
            WorkerError: it failed, took longer than ``seconds``, or the engine ended.
        """
        what = f"{function.__module__}:{function.__qualname__}"
        print(json.dumps({"do": what, "with": arguments}), file=self.process.stdin, flush=True)
        return self._answer(seconds)

    def stop(self) -> None:
        """End the engine, in order if it can."""
        if self.process.poll() is None and self.process.stdin is not None:
            self.process.stdin.close()
            try:
                self.process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()


async def serve(engine: Any, answer: Callable[..., None]) -> None:
    """Run what comes on stdin, one line after the other, until it is closed."""
    rig = Rig(engine, temperature=0.0)
    await rig.connect()
    answer(answer=os.getpid())
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        try:
            answer(answer=await pkgutil.resolve_name(command["do"])(rig, **command["with"]))
        except Exception:
            answer(error=traceback.format_exc())


def main() -> int:
    policy, model, *flags = sys.argv[1:]
    # Whatever the engine prints goes to stderr: stdout is for answers.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=out, flush=True)

    engine = launch.start(launch.make_server_args(model, flags, json.loads(policy)))
    try:
        launch.run(engine, lambda: serve(engine, answer))
    finally:
        engine.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
