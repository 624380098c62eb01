"""How many nodes each process of a verl job can serve that there is once: the balancer, a client, the trainer.

    .venv-integration/bin/python bench/many_nodes.py [--quick] [--rate TOKENS] [--length TOKENS] [--json FILE]

Ray is real, engines are **played** by one actor that generates nothing.  Measured is CPU time of a process, of all its
threads: the balancer's for a request and for a look at an engine, a client's for a response and for a part of it, the
trainer's for asking each engine something.  From these: the number of nodes, each with ``--rate`` tokens a second in
responses of ``--length``, at which the process uses one core.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import _bench
import _verl_jobs

_verl_jobs.need_verl()  # Ray is with it only
# ruff: noqa: E402

import ray
from rich.console import Console
from rich.table import Table

from sglang_pat.cpu import shim
from sglang_pat.integrations.balance import EngineReport
from sglang_pat.integrations.verl.balancer import INTERVAL_SECONDS, AdaptiveBalancer

AT_ONCE = 64
"""Requests of a client that are under way at the same time."""
LOOKS = 10
"""Looks of the balancer at all engines, without a request."""
REPORT = EngineReport(gpus=8, replicas=8, slots=512, waiting=0, kv_free=1 << 20, tokens=1 << 18, running=100)


@ray.remote(num_cpus=0, max_concurrency=1000)
class Engine:
    """Answers at once."""

    async def load(self) -> EngineReport:
        return REPORT

    async def get_seconds(self) -> float:
        return time.process_time()

    async def generate_parts(self, parts: int, tokens: int) -> AsyncIterator[Any]:
        from verl.workers.rollout.replica import TokenOutput

        part = TokenOutput(token_ids=[7] * tokens, log_probs=[-0.5] * tokens)
        for _ in range(parts):
            yield part


class Measured(AdaptiveBalancer):
    async def get_seconds(self) -> float:
        return time.process_time()


async def spread(calls: int, call: Any) -> None:
    """Await ``call(number)`` for each number below ``calls``, :data:`AT_ONCE` at a time."""
    left = iter(range(calls))

    async def work() -> None:
        for number in left:
            await call(number)

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))


def measure_balancer(engine: Any, engines: int, calls: int) -> dict[str, float]:
    """Microseconds of the balancer for a request (acquired and released) and for a look at an engine."""
    servers = {f"engine {number}": engine for number in range(engines)}
    balancer = ray.remote(num_cpus=0)(Measured).remote(servers, {"interval": 1e6})

    async def request(number: int) -> None:
        name, _ = await balancer.acquire_server.remote(f"session {number}")
        balancer.release_server.remote(name)

    asyncio.run(spread(AT_ONCE, request))
    before = ray.get(balancer.get_seconds.remote())
    asyncio.run(spread(calls, request))
    a_request = (ray.get(balancer.get_seconds.remote()) - before) / calls
    ray.kill(balancer)
    balancer = ray.remote(num_cpus=0)(Measured).remote(servers, {"interval": INTERVAL_SECONDS})
    ray.get(balancer.acquire_server.remote("it begins to look"))
    time.sleep(2 * INTERVAL_SECONDS)
    before, begun = ray.get(balancer.get_seconds.remote()), time.monotonic()
    time.sleep(LOOKS * INTERVAL_SECONDS)
    used, seconds = ray.get(balancer.get_seconds.remote()) - before, time.monotonic() - begun
    ray.kill(balancer)
    return {"request_us": 1e6 * a_request, "look_us": 1e6 * used * INTERVAL_SECONDS / (seconds * engines)}


def measure_client(engine: Any, parts: int, tokens: int, calls: int) -> dict[str, float]:
    """Microseconds of a client, and of the engine's actor, for a response in so many parts of so many tokens."""

    async def respond(_: int) -> None:
        async for reference in engine.generate_parts.options(num_returns="streaming").remote(parts, tokens):
            await reference

    asyncio.run(spread(AT_ONCE, respond))
    of_engine, mine = ray.get(engine.get_seconds.remote()), time.process_time()
    asyncio.run(spread(calls, respond))
    mine, of_engine = time.process_time() - mine, ray.get(engine.get_seconds.remote()) - of_engine
    return {"client_us": 1e6 * mine / calls, "engine_us": 1e6 * of_engine / calls}


def measure_trainer(engine: Any, engines: int) -> float:
    """Microseconds of the trainer for asking one of so many engines."""
    import verl  # noqa: F401  its plug-in imports what follows

    from sglang_pat.integrations.verl.fleet import ask_each

    ask_each([engine] * engines, "load")
    before = time.process_time()
    ask_each([engine] * engines, "load")
    return 1e6 * (time.process_time() - before) / engines


def main() -> int:
    parser = _bench.options(__doc__, "fewer calls; a minute")
    parser.add_argument("--rate", type=int, default=20_000, help="tokens a second of a node (default: %(default)s)")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a response (default: %(default)s)")
    args = parser.parse_args()
    shim.ensure(children=True)
    from sglang_pat.integrations.verl.replica import PART_TOKENS

    machine, calls = _bench.about(), 500 if args.quick else 4000
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200_000_000)
    engine, rows = Engine.remote(), []
    responses, parts = args.rate / args.length, max(1, args.length // PART_TOKENS)
    client = measure_client(engine, parts, PART_TOKENS, calls // parts)
    table = Table("engines", "balancer: a request, µs", "a look, µs", "in use, % of a core", "trainer: an engine, µs")
    for engines in (2, 16, 128, 1000):
        row = measure_balancer(engine, engines, calls) | {"ask_us": measure_trainer(engine, engines)}
        row["core"] = 1e-6 * engines * (responses * row["request_us"] + row["look_us"] / INTERVAL_SECONDS)
        rows.append({"engines": engines} | row)
        table.add_row(
            f"{engines:,}", *(f"{row[name]:.0f}" for name in ("request_us", "look_us")), f"{100 * row['core']:.0f}",
            f"{row['ask_us']:.0f}",
        )  # fmt: skip
    ray.shutdown()
    console = Console(width=110)
    console.print(table)
    nodes = {name: 1e6 / (responses * client[name]) for name in client}
    console.print(
        f"A response in {parts} parts: {client['client_us']:.0f} µs of a client, which so serves "
        f"{nodes['client_us']:.0f} nodes, and {client['engine_us']:.0f} µs of the engine's actor "
        f"({100 / nodes['engine_us']:.1f}% of a core).  A node: {args.rate:,} tokens a second, {responses:.1f} "
        "responses."
    )
    _bench.write(args.json, machine=machine, client=client, engines=rows, nodes=nodes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
