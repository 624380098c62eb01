"""The three servers, one after the other, each on the same work."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil
import requests

from sglang_pat.demo.client import run_tasks
from sglang_pat.demo.display import Display
from sglang_pat.demo.records import DemoError, Run, switches_of
from sglang_pat.demo.tasks import Task
from sglang_pat.layout import ParallelLayout
from sglang_pat.testing.server import Server, ServerDied
from sglang_pat.tools.cpu_share import Meter

RETURN_SECONDS = 10.0
"""How long an engine that has run empty may take to go back to its base layout."""

WARM_UP = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Say hello."}],
    "temperature": 0,
    "max_tokens": 6,
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How one of the servers is started."""

    name: str
    layout: ParallelLayout
    switch_at: int | None = None
    """Requests left at which it switches; None: never."""

    @property
    def flags(self) -> list[str]:
        policy = ["off"] if self.switch_at is None else ["threshold", "--pat-switch-at", str(self.switch_at)]
        layout = ["--tp", str(self.layout.tp), "--dp", str(self.layout.dp)]
        return [*layout, "--adaptive-tp", "--pat-policy", *policy]


def setups(switch_at: int) -> list[Setup]:
    """Adaptive, and both of its layouts as static ones, in the same engine: only the layout differs."""
    low, high = ParallelLayout(1, 2), ParallelLayout(2, 1)
    return [
        Setup(name="adaptive", layout=low, switch_at=switch_at),
        Setup(name=f"static {low}", layout=low),
        Setup(name=f"static {high}", layout=high),
    ]


def run_setup(setup: Setup, model: Path, tasks: list[Task], display: Display) -> Run:
    """Start the server, warm it up, do the work, stop it.

    Raises:
        DemoError: whatever went wrong; with the end of the server's log if the server is to blame.
    """
    server = Server(model, *setup.flags, wait=False)
    try:
        with display.waiting(f"{setup.name}: starting the server"):
            server.wait_ready()
        run = _work(setup, server, tasks, display)
    except ServerDied as error:
        raise DemoError(f"{setup.name}: {error}") from None
    except (DemoError, aiohttp.ClientError, requests.RequestException, TimeoutError) as error:
        raise DemoError(f"{setup.name}: {_blame(server, error)}") from error
    finally:
        server.stop()
    server.log.unlink(missing_ok=True)
    return run


def _work(setup: Setup, server: Server, tasks: list[Task], display: Display) -> Run:
    with display.waiting(f"{setup.name}: warming up"):
        asyncio.run(_warm_up(server, setup.layout.dp))
        _back_in_base(server)
        server.post("/flush_cache").raise_for_status()
    meter = Meter([psutil.Process(), psutil.Process(server.process.pid), *server.children()])
    start, answers = asyncio.run(run_tasks(server, tasks, display, setup.name))
    others = meter.share()
    status = _back_in_base(server)
    return Run(
        name=setup.name,
        base=str(setup.layout),
        adaptive=setup.switch_at is not None,
        start_seconds=server.started_seconds,
        others=others,
        answers=answers,
        switches=switches_of(status, start, answers),
    )


async def _warm_up(server: Server, groups: int) -> None:
    """A short request for each group."""
    async with server.session() as session:

        async def one() -> None:
            async with session.post(server.url + "/v1/chat/completions", json=WARM_UP) as response:
                response.raise_for_status()
                await response.read()

        await asyncio.gather(*(one() for _ in range(groups)))


def _back_in_base(server: Server) -> dict:
    """The engine's status once it is empty and in its base layout."""
    begin = time.monotonic()
    while True:
        status = server.status()
        if status["layout"] == status["base"] and not status["switching"] and not status["requests"]:
            return status
        if time.monotonic() - begin > RETURN_SECONDS:
            raise DemoError(f"the engine did not return to its base layout within {RETURN_SECONDS:.0f} s: {status}")
        time.sleep(0.05)


def _blame(server: Server, error: Exception) -> str:
    """What to tell the user: what happened, and the end of the log."""
    time.sleep(1.0)  # a dying server closes its connections first
    code = server.process.poll()
    what = f"the server died (exit code {code})" if code is not None else str(error) or type(error).__name__
    return f"{what}; end of {server.log}:\n{server.log_text()[-3000:]}"
