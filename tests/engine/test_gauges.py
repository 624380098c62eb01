"""SGLang's gauges tell of the whole engine: each rank has series of its own, and a follower's are 0."""

from __future__ import annotations

import asyncio
import re

from sglang_pat.testing.server import Server

from .controls import body

LOGGED = 40
"""SGLang's ``decode_log_interval``: gauges are set at every so many decode steps."""


def gauge(server: Server, name: str) -> list[float]:
    """A value for each rank."""
    found = re.findall(rf'^sglang:{name}{{.*dp_rank="(\d+)".*}} (\S+)$', server.get("/metrics").text, re.MULTILINE)
    return [float(value) for _, value in sorted(found)]


def test_gauges_of_all_replicas_add_up_in_every_layout(server):
    async def run() -> list[tuple[list[float], float]]:
        seen = []
        async with server.session() as session:
            first = {"arrived": 6, "step": LOGGED + 2}
            await server.arm(session, first | {"hold": True})
            answers = [asyncio.create_task(server.one(session, body(i, 4 * LOGGED))) for i in range(6)]
            for more in (None, {"tp": 2, "step": 0}, {"tp": 1, "step": 0}):
                if more is not None:
                    await server.arm(session, more, {"step": LOGGED + 2, "hold": True})
                await server.reached(session)
                seen.append((gauge(server, "num_running_reqs"), sum(gauge(server, "num_used_tokens"))))
            await server.arm(session)
            await asyncio.gather(*answers)
        return seen

    (apart, some), (merged, more), (split, most) = asyncio.run(run())
    assert apart == split == [3, 3] and merged == [6, 0]
    assert 0 < some < more < most
