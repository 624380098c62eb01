"""A round of many samples over HTTP: what it costs the training process, and the server.

    python bench/rounds_http.py [--quick] [--rounds N] [--json FILE]

The server is **a stub**: SGLang's own FastAPI application under uvicorn, with our routes, and behind them a
TokenizerManager that answers each sample with 16 tokens without computing any.  What is measured is what a round costs
beside the model.  *At once*: each answer comes in the next turn of the server's event loop.  *Together*: all come when
the last sample is there, so that all are under way at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parents[1]
TOKENS = 16
"""Tokens of each answer."""
PROMPT = list(range(100, 356))
RESPONSES = 16
SAMPLING = {"max_new_tokens": 64, "ignore_eos": True}
TICK_SECONDS = 0.001


class Stalls:
    """Longest time that an event loop stands still: what wakes every millisecond is late by so much."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._task = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            self.longest = max(self.longest, now - last - TICK_SECONDS)
            last = now


class Stub:
    """A TokenizerManager, as far as rounds use it."""

    tokenizer = None
    context_len = max_req_input_len = 100_000
    pat_weight_updates = 0

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(vocab_size=5000, hf_eos_token_id=None)
        self.rid_to_state: dict[str, None] = {}
        self.expected = 0
        """Number of samples that are waited for before any is answered."""
        self._came = 0
        self._all = asyncio.Event()

    def expect(self, samples: int) -> None:
        self.expected, self._came, self._all = samples, 0, asyncio.Event()

    async def generate_request(self, obj: Any, request: Any):
        """Answers in SGLang's manner: several requests in one are answered as they end; what is streamed begins with
        the first token."""
        obj.normalize_batch_and_arguments()
        if obj.is_single:
            await self._sample()
            yield _answer(obj.rid, TOKENS)
            return
        assert obj.stream
        for i, rid in enumerate(obj.rid):
            yield _answer(rid, 1) | {"index": i}
        tasks = {asyncio.ensure_future(self._sample()): rid for rid in obj.rid}
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield _answer(tasks.pop(task), TOKENS) | {"index": 0}

    async def _sample(self) -> None:
        self._came += 1
        if self._came >= self.expected:
            self._all.set()
        await (self._all.wait() if self.expected else asyncio.sleep(0))

    def create_abort_task(self, obj: Any) -> None:
        """Nobody leaves."""

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        raise AssertionError("nothing is aborted here")

    def pat_send_round(self, message: Any) -> None:
        """Nobody decides."""

    async def pat_status(self) -> dict[str, Any]:
        return {"groups": [{"running": 0, "waiting": 0, "tokens": 0}], "retracted": 0}


def _answer(rid: str, tokens: int) -> dict[str, Any]:
    meta = {
        "id": rid, "finish_reason": {"type": "length"} if tokens == TOKENS else None, "prompt_tokens": len(PROMPT),
        "weight_version": "default", "completion_tokens": tokens, "cached_tokens": 0, "weight_updates": 0,
        "output_token_logprobs": [(-1.0, 7, None)] * tokens,
    }  # fmt: skip
    return {"meta_info": meta, "output_ids": [7] * tokens, "text": "some words of an answer"}


def serve(port: int) -> None:
    """Serve, in the server's process."""
    from sglang_pat.cpu import shim

    if shim.is_needed():
        shim.install()
    import uvicorn
    from sglang.srt.entrypoints import http_server

    from sglang_pat.server import http

    app, stub = http_server.app, Stub()
    app.router.lifespan_context = app.router.__class__().lifespan_context  # SGLang's needs an engine
    http.add_routes(app)
    http_server.set_global_state(SimpleNamespace(tokenizer_manager=stub))
    stalls: list[Stalls] = []

    async def begin(expected: int) -> dict[str, float]:
        stub.expect(expected)
        stalls.append(Stalls())
        return {"cpu": time.process_time()}

    async def end() -> dict[str, float]:
        return {"cpu": time.process_time(), "stall": stalls[-1].longest}

    app.add_api_route("/bench/begin", begin)
    app.add_api_route("/bench/end", end)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", loop="uvloop")


def start(port: int) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    return subprocess.Popen([sys.executable, __file__, "--serve", str(port)], env=environment)


async def get(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    async with session.get(url) as answer:
        return await answer.json()


async def ready(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                return await get(session, url + "/bench/begin?expected=0") and None
            except aiohttp.ClientError:
                await asyncio.sleep(0.5)


async def run_round(url: str, prompts: int, number: int) -> int:
    """Run a round of ``RolloutClient``; returns the number of responses."""
    from sglang_pat.rollout.admitter import Admitter
    from sglang_pat.rollout.client import RolloutClient
    from sglang_pat.rollout.records import Group
    from sglang_pat.rollout.rules import Rules

    admitter = Admitter(Rules(num_prompts=prompts, num_responses=RESPONSES, eta_prompts=1.0))
    admitter.feed([((0, i), {"input_ids": [*PROMPT, i]}) for i in range(prompts)], end_of=0)
    events = RolloutClient(url).async_rollout(admitter, SAMPLING, number)
    return sum([len(event.list_kept()) async for event in events if isinstance(event, Group)])


async def one(url: str, prompts: int, number: int, together: bool) -> dict[str, float]:
    """Microseconds a sample of one round, by the clock and of CPU; milliseconds of the longest stalls."""
    samples = prompts * RESPONSES
    async with aiohttp.ClientSession() as session:
        before = await get(session, f"{url}/bench/begin?expected={samples if together else 0}")
        stalls, cpu, begun = Stalls(), time.process_time(), time.monotonic()
        assert await run_round(url, prompts, number) == samples
        seconds, cpu = time.monotonic() - begun, time.process_time() - cpu
        after = await get(session, f"{url}/bench/end")
    each = 1e6 / samples
    return {
        "clock_us": each * seconds, "client_us": each * cpu, "server_us": each * (after["cpu"] - before["cpu"]),
        "client_stall_ms": 1e3 * stalls.longest, "server_stall_ms": 1e3 * after["stall"],
    }  # fmt: skip


async def measure(url: str, prompts: int, rounds: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for together in (False, True):
        # The first does not count.
        measured = [await one(url, prompts, n + together * (rounds + 1), together) for n in range(rounds + 1)][1:]
        row = {key: statistics.median(one[key] for one in measured) for key in measured[0]}
        rows.append({"answers": "together" if together else "at once"} | row)
        shown = "  ".join(f"{key} {value:8.1f}" for key, value in row.items())
        print(f"{rows[-1]['answers']:>8}  {shown}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="1,024 samples, one round")
    parser.add_argument("--rounds", type=int, default=3, help="that count (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return 0
    from sglang_pat.testing.ports import find_free_port
    from sglang_pat.tools.machine import describe_machine

    prompts, rounds = (64, 1) if args.quick else (1024, args.rounds)
    machine = describe_machine()
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print(f"{prompts * RESPONSES} samples; a stub server; medians of {rounds}", flush=True)
    port = find_free_port()
    process = start(port)
    try:
        url = f"http://127.0.0.1:{port}"
        asyncio.run(ready(url))
        import uvloop

        rows = uvloop.run(measure(url, prompts, rounds))
    finally:
        process.kill()
    if args.json:
        args.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
