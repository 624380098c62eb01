"""Requests that nobody should send, and a check that the engine is none the worse for them; no test of its own.

Two sources: strategies of our own (``hostile_requests.py``), and a walk over the server's OpenAPI schema
(schemathesis).  Both only make requests, in a fixed order for a seed; they are sent in batches while the layout
changes.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import psutil
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from sglang_pat.testing.server import Server

from .hostile_requests import Call

BATCH = 25
"""Requests under way at once."""

BATCH_SECONDS = 4.0
"""After this long all requests of a batch are aborted: most are short, but some ask for all that fits, and a schedule
may hold all of them."""

PATIENCE_SECONDS = 30.0
"""Then a client gives up."""

STREAM_BROKEN_OFF = {"/api/chat", "/api/generate"}
"""Where SGLang says 200 before it has looked at the request, and ends the stream with what it refuses; stock SGLang
does the same."""

ENDLESS = {"/pat/schedule", "/flush_cache"}
"""They wait by design: for the end of a schedule, and until nobody generates.  Only there a client may give up."""

NO_ANSWER, GAVE_UP = 0, -1
"""In the place of a status: the connection was closed without an answer; the client went away."""


def drawn(strategy: st.SearchStrategy, count: int, number: int) -> list[Any]:
    """``count`` examples of ``strategy``, the same for a seed ``number``."""
    found: list[Any] = []

    @seed(number)
    @settings(
        max_examples=count, phases=[Phase.generate], database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def collect(example: Any) -> None:
        found.append(example)

    collect()
    return found[:count]


# -- the server's schema ------------------------------------------------------------------------------------

NOT_WALKED = {
    "/pause_generation": "stops everybody's generation until it is continued: what it is for",
    "/release_memory_occupation": "gives the KV memory away until it is taken back: what it is for",
    "/resume_memory_occupation": "only after a release",
    "/slow_down": "makes every step slow: what it is for",
    "/init_weights_update_group": "waits for the other members of a process group",
    "/init_weights_send_group_for_remote_instance": "waits for the other members of a process group",
    "/update_weights_from_disk": "gives the model other weights, random ones with load_format dummy: other tokens",
    "/weights_checker": "can overwrite the weights with random ones: what it is for",
    "/set_internal_state": "changes how the schedulers work: what it is for",
    "/start_profile": "writes traces to any folder, and slows every step down",
    "/stop_profile": "writes traces",
    "/configure_logging": "writes requests to any folder",
    "/metrics": "no operation of the engine",
}
"""Operations left out of the walk, each with its reason; all of them are an administrator's."""


def walked(url: str, count: int, number: int) -> list[Call]:
    """``count`` requests over all operations of the server's OpenAPI schema; in every second one a value is wrong."""
    import schemathesis

    schema = schemathesis.openapi.from_url(url + "/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    operations = [operation for operation in operations if operation.path not in NOT_WALKED]
    each = -(-count // len(operations))
    found: list[list[Call]] = []
    for i, operation in enumerate(operations):
        cases = drawn(operation.as_strategy(), each, number + i)
        # Few operations have so many different requests.
        found.append([_call(cases[turn % len(cases)], url, number + turn) for turn in range(each)])
    # In turns: a few requests reach every operation.
    return [part[turn] for turn in range(each) for part in found][:count]


WRONG = [None, True, -1, 0, 2**31, 2**63, 10**30, float("nan"), 1e300, "", "\ud800", [], {}, [None], {"": None}]


def _spoilt(body: bytes, number: int) -> bytes:
    """A JSON object with one of its values replaced, another field beside them if it has none."""
    try:
        content = json.loads(body)
    except ValueError:
        return body
    if not isinstance(content, dict):
        return json.dumps(random.Random(number).choice(WRONG)).encode()
    choose = random.Random(f"{number} {len(body)}").choice
    content[choose(sorted(content) or ["rid"])] = choose(WRONG)
    return json.dumps(content).encode()


def _call(case: Any, url: str, turn: int) -> Call:
    import requests

    kwargs = case.as_transport_kwargs(base_url=url)
    try:
        ready = requests.Request(**kwargs).prepare()
    except (ValueError, requests.RequestException):
        return Call("GET", "/pat/status")  # what no client can send
    body = ready.body or b""
    body = body.encode() if isinstance(body, str) else bytes(body)
    kind = ready.headers.get("Content-Type", "application/json")
    if turn % 2 and kind == "application/json":
        body = _spoilt(body, turn)
    return Call(ready.method, ready.url.removeprefix(url), body, kind)


# -- sending them ---------------------------------------------------------------------------------------------


def send(server: Server, calls: Sequence[Call], after: Callable[[Counter], None]) -> Counter:
    """Send ``calls`` in batches while the layout changes; ``after`` is called between batches.

    Returns:
        How often each ``(path, status)`` came.
    """
    total: Counter = Counter()
    for begin in range(0, len(calls), BATCH):
        total += asyncio.run(_batch(server, calls[begin : begin + BATCH]))
        after(total)
    return total


async def _batch(server: Server, calls: Sequence[Call]) -> Counter:
    """Times say how much of the batch is done before it is aborted, or given up.  Any of that is fine."""
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        found: Counter = Counter()
        tasks = [asyncio.ensure_future(_one(session, server.url, call, found)) for call in calls]
        switching = asyncio.ensure_future(_switch(session, server, tasks))
        await asyncio.wait(tasks, timeout=BATCH_SECONDS)
        await server.arm(session)
        async with session.post(server.url + "/abort_request", json={"abort_all": True}) as answer:
            await answer.read()
        await asyncio.wait(tasks, timeout=PATIENCE_SECONDS)
        for call, task in zip(calls, tasks, strict=True):
            if not task.done():
                found[_where(call), GAVE_UP] += 1
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await switching
    return found


def _where(call: Call) -> str:
    """What its answer is counted under."""
    return call.path.split("?")[0]


async def _one(session: aiohttp.ClientSession, url: str, call: Call, found: Counter) -> None:
    """Send ``call`` and count its answer."""
    from yarl import URL

    headers = {"Content-Type": call.content_type}
    try:
        target = URL(url + call.path, encoded=True)
        async with session.request(call.method, target, data=call.body, headers=headers) as answer:
            said = await answer.read()
            found[_where(call), answer.status] += 1
            if answer.status >= 500:  # pytest shows it with the failure
                print(answer.status, call, said[:1000])
    except (aiohttp.ClientError, ConnectionError):
        found[_where(call), NO_ANSWER] += 1


async def _switch(session: aiohttp.ClientSession, server: Server, tasks: Sequence[asyncio.Task]) -> None:
    """Change the layout again and again until all of ``tasks`` are done."""
    tp = 1
    while not all(task.done() for task in tasks):
        tp = 3 - tp
        try:
            await asyncio.wait_for(server.reconfigure_async(session, tp), PATIENCE_SECONDS)
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return


def memory(server: Server) -> int:
    """Bytes that the processes of ``server`` have for themselves."""
    return sum(process.memory_full_info().uss for process in [psutil.Process(server.process.pid), *server.children()])
