"""A server in a process of its own, for tests, benches and the demo.

    with Server(model, "--tp", "1", "--dp", "2", "--adaptive-tp", dtype="float32") as server:
        outputs = server.generate([{"input_ids": [1, 2, 3], "sampling_params": {...}}])
        server.reconfigure(tp=2)

The same command line as a user's (``python -m sglang_pat.launch_server``, or another ``module`` with these arguments):
adaptive with ``--adaptive-tp``, stock SGLang without.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import aiohttp
import psutil
import requests

from sglang_pat.launch.processes import RANK_TITLE, is_resource_tracker, wait_until_ended
from sglang_pat.testing.ports import find_free_port
from sglang_pat.testing.prefork import ENVIRONMENT, SERVER, Fork, Prefork, popen


def find_rank_processes(processes: Iterable[psutil.Process]) -> dict[int, psutil.Process]:
    """Processes that are ranks of an engine, by rank in ascending order.  Their titles say so."""
    ranks = {}
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            title = "".join(process.cmdline()[:1]).strip()
            if title.startswith(RANK_TITLE):
                ranks[int(title.removeprefix(RANK_TITLE))] = process
    return dict(sorted(ranks.items()))


START_SECONDS = 500
"""Longest start of a server."""

STOCK_CPU_FLAGS = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch "
    "--disable-overlap-schedule --disable-cuda-graph --sleep-on-idle --grammar-backend llguidance"
).split()
"""Arguments that stock SGLang needs on a CPU; the adaptive engine chooses them by itself."""


def parse_event(line: bytes) -> dict[str, Any] | None:
    """Data of a line of server-sent events; None for a line without data and for the last."""
    kind, _, data = line.strip().partition(b": ")
    return None if kind != b"data" or data == b"[DONE]" else json.loads(data)


@contextmanager
def suspend(*servers: Server) -> Iterator[None]:
    """Hold all processes of ``servers`` still (SIGSTOP) inside the block."""
    processes = [p for server in servers for p in (psutil.Process(server.process.pid), *server.list_children())]
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in reversed(processes):
            process.resume()


class ServerDied(RuntimeError):
    """Error of a server that ended; the message has the end of its log."""


class Program:
    """A program with an engine.  Use as a context manager or call :meth:`stop`.

    Attributes:
        process: its main process (the engine's parent).
    """

    process: subprocess.Popen | Fork

    def list_children(self) -> list[psutil.Process]:
        """All processes of the engine below the main one."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """End the program and everything it started; no-op if it has ended.

        Python's resource trackers are left to end by themselves: they remove the dead processes' semaphores.
        """
        processes, trackers = [], []
        for process in self.list_children():
            (trackers if is_resource_tracker(process) else processes).append(process)
        self.process.kill()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        wait_until_ended(processes, 10)
        self.process.wait()
        for process in wait_until_ended(trackers, 10):
            process.kill()

    stop = kill

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()


class Server(Program):
    """One running server, started by the constructor.

    Attributes:
        url: base URL.
        log: path of its log, in ``folder``.  It is removed at the end of a ``with`` block that raised nothing.
    """

    def __init__(
        self,
        model: str | os.PathLike,
        *flags: str,
        dtype: str = "float32",
        max_total_tokens: int | None = 16384,
        env: dict[str, str] | None = None,
        wait: bool = True,
        prefork: Prefork | None = None,
        module: str = SERVER,
        folder: Path | None = None,
    ) -> None:
        self.port = find_free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        stock = [] if "--adaptive-tp" in flags else STOCK_CPU_FLAGS
        argv = [
            "--model-path", str(model), "--port", str(self.port), "--dtype", dtype, "--random-seed", "1",
            "--skip-server-warmup", *stock, *flags,
        ]  # fmt: skip
        if max_total_tokens is not None:
            argv += ["--max-total-tokens", str(max_total_tokens)]
        environment = os.environ | ENVIRONMENT | (env or {})
        # In our session: Linux schedules sessions against each other, and one whose ranks compute without end keeps its
        # clients waiting for seconds.  In a process group of its own: an interrupt is for us.
        with tempfile.NamedTemporaryFile(
            "ab", prefix="sglang_pat_server_", suffix=".log", dir=folder, delete=False
        ) as log:
            self.log = Path(log.name)
            self.process = popen(prefork, module, argv, environment, stdout=log, stderr=log)
        self.started_seconds = 0.0
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Block until requests are served.

        Raises:
            ServerDied: it ended, or took longer than :data:`START_SECONDS`.
        """
        begin = time.monotonic()
        while time.monotonic() - begin < START_SECONDS:
            if self.process.poll() is not None:
                raise ServerDied(self._describe_death(f"exit code {self.process.returncode}"))
            try:
                if requests.get(self.url + "/health", timeout=5).status_code == 200:
                    self.started_seconds = time.monotonic() - begin
                    return
            except requests.RequestException:
                pass
            time.sleep(0.2)
        self.stop()
        raise ServerDied(self._describe_death(f"not ready after {START_SECONDS} s"))

    def _describe_death(self, why: str) -> str:
        return f"server died ({why}); end of {self.log}:\n" + self.log_text()[-3000:]

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self.stop()
        if kind is None:
            self.log.unlink(missing_ok=True)

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    # -- requests ---------------------------------------------------------------------------------

    def post(self, path: str, body: Any = None, timeout: float = 300, **kwargs: Any) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=timeout, **kwargs)

    def get(self, path: str, timeout: float = 60, **kwargs: Any) -> requests.Response:
        return requests.get(self.url + path, timeout=timeout, **kwargs)

    def status(self) -> dict[str, Any]:
        return self.get("/pat/status").json()

    def reconfigure(self, tp: int) -> dict[str, Any]:
        """Switch; raises ``requests.HTTPError`` with the server's message if it refuses."""
        response = self.post("/pat/reconfigure", {"tp": tp})
        if response.status_code != 200:
            raise requests.HTTPError(response.text, response=response)
        return response.json()

    def generate(self, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Send each body to ``/generate`` at once; the answers in the same order."""
        return asyncio.run(self.generate_async(bodies))

    async def generate_async(self, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        async with self.session() as session:
            return list(await asyncio.gather(*(self.generate_one(session, body) for body in bodies)))

    def session(self) -> aiohttp.ClientSession:
        # A connection for each request: one that is kept may be closed by the server just when it is used again.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=1800))

    async def generate_one(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> dict[str, Any]:
        async with session.post(self.url + "/generate", json=body) as response:
            data = await response.json()
            if response.status != 200:
                raise RuntimeError(f"/generate answered {response.status}: {data}")
            return data

    async def stream(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Chunks of a streamed ``/generate``, as they come."""
        async with session.post(self.url + "/generate", json=body | {"stream": True}) as response:
            async for line in response.content:
                if (chunk := parse_event(line)) is not None:
                    yield chunk
