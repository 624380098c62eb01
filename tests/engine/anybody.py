"""Clients and a trainer who do anything in any order (``docs/pauses.md``); no test of its own."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import aiohttp

from sglang_pat.testing.server import Server

from .streams import body

WHAT = (
    "generate generate generate n abort abort_all pause pause continue flush patient update update release resume "
    "probe switch switch"
).split()


class Anybody:
    """Clients and a trainer who do whatever ``rng`` says, at once; some of it has to be answered now."""

    def __init__(self, server: Server, model: Path, session: aiohttp.ClientSession, rng: random.Random) -> None:
        self.server, self.model, self.session, self.rng = server, str(model), session, rng
        self.tasks: list[tuple[str, asyncio.Future]] = []
        self.mode = ""

    async def ask(self, path: str, data: dict | None, method: str = "POST") -> tuple[int, str]:
        async with self.session.request(method, self.server.url + path, json=data) as response:
            return response.status, await response.text()

    def does(self, path: str, data: dict | None = None, method: str = "POST") -> asyncio.Future:
        self.tasks.append((path, asyncio.ensure_future(self.ask(path, data, method))))
        return self.tasks[-1][1]

    async def anything(self) -> None:
        rng, number = self.rng, len(self.tasks)
        update = {"model_path": self.model, "flush_cache": False, "abort_all_requests": rng.random() < 0.3}
        what = rng.choice(WHAT)
        if what in ("generate", "n"):
            n = {"n": 2} if what == "n" else {}
            self.does("/generate", body(number, tokens=rng.choice([5, 300, 2000]), rid=f"any-{number}", **n))
        elif what == "abort":
            await self.does("/abort_request", {"rid": f"any-{rng.randrange(number + 1)}"})
        elif what == "abort_all":
            await self.does("/abort_request", {"abort_all": True})
        elif what == "pause":
            self.mode = rng.choice(["in_place", "retract", "abort"])
            await self.does("/pause_generation", {"mode": self.mode})
        elif what == "continue":
            self.mode = ""
            await self.does("/continue_generation", {})
        elif what == "flush":
            await self.does("/flush_cache")
        elif what == "patient":
            flush = self.does("/flush_cache?timeout=500")
            if self.mode == "retract":
                assert (await flush)[0] == 200
        elif what == "update":
            updates = [self.does("/update_weights_from_disk", update) for _ in range(rng.choice([1, 3]))]
            if self.mode in ("in_place", "retract"):
                await asyncio.gather(*updates)
        elif what in ("release", "resume"):
            await self.does(f"/{what}_memory_occupation", {"tags": ["kv_cache"]})
        elif what == "probe":
            await self.does("/health_generate", method="GET")
        else:
            await self.does("/pat/reconfigure", {"tp": rng.choice([1, 2])})

    async def end(self) -> None:
        """Whatever has stopped something lets it go on: then all is answered."""
        self.does("/continue_generation", {})
        self.does("/resume_memory_occupation", {"tags": ["kv_cache"]})
        for _, task in self.tasks:
            while not (await asyncio.wait([task], timeout=0.2))[0]:
                await self.ask("/abort_request", {"abort_all": True})
                await self.ask("/continue_generation", {})


EITHER = {"/flush_cache", "/release_memory_occupation", "/resume_memory_occupation", "/pat/reconfigure"}
"""What may be refused: requests run, memory is not there, a switch is under way."""
