"""The pause of a switch by the number of requests alive: plain, with penalties, with logprobs, with grammars.

    python bench/many_requests.py [--quick] [--requests 8,64] [--json FILE]

A tiny model on two ranks, so that what is measured is what a request costs and not its KV.  Each batch decodes for some
steps, merges (tp1×dp2 to tp2×dp1) and is split again.  Pauses are without drain, the wait for the steps in flight.

At last, without an engine, what goes over of requests with a long history: CPU time of the leader that offers them, and
of a rank that takes them.  The histories are made up.
"""

from __future__ import annotations

import asyncio
import gc
import pickle
import random
import statistics
import sys
from array import array
from pathlib import Path
from time import thread_time
from types import SimpleNamespace
from typing import Any

import _bench

from profiler import launch
from profiler.rig import Rig
from sglang_pat.cpu import shim
from sglang_pat.testing import models

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.5},
    "logprobs": {"return_logprob": True, "top_logprobs_num": 2},
    "grammars": {"regex": "([a-f]{3,%d}-)+"},
}
"""Fields of requests; each request has a grammar of its own."""
PROMPT, BEFORE, ANSWER = 16, 64, 400
"""Tokens of a prompt; decoded before the switch; of an answer, which is aborted."""


def send(rig: Rig, requests: int, kind: dict[str, Any]) -> list[asyncio.Task]:
    asked = {name: value for name, value in kind.items() if "logprob" in name}
    params = {"max_new_tokens": ANSWER, "ignore_eos": True, "temperature": 0.0}
    params |= {name: value for name, value in kind.items() if name not in asked}

    def one(number: int) -> asyncio.Task:
        sampling = params | ({"regex": params["regex"] % (4 + number)} if "regex" in params else {})
        return asyncio.ensure_future(
            rig.engine.async_generate(input_ids=rig.sample_tokens(PROMPT), sampling_params=sampling, **asked)
        )

    return [one(number) for number in range(requests)]


async def switches(rig: Rig, requests: int, kind: dict[str, Any]) -> list[dict[str, Any]]:
    """The records of one there and one back."""
    await rig.reconfigure(1)
    await rig.flush()
    await rig.read_trace()
    tasks, records = send(rig, requests, kind), []
    try:
        await rig.wait_until_decoding(tasks, requests, steps=BEFORE)
        for target in (2, 1):
            records.append(await rig.reconfigure(target))
            await rig.wait_until_decoding(tasks, requests, steps=1)
    finally:
        await rig.abort(tasks)
    return records


async def measure(engine: Any, numbers: list[int], rounds: int) -> list[dict[str, Any]]:
    rig, rows = Rig(engine, temperature=0.0), []
    await rig.connect()
    for requests in numbers:
        for name, kind in KINDS.items():
            by_degree: dict[int, list[dict[str, Any]]] = {2: [], 1: []}
            for number in range(rounds + 1):
                switched = await switches(rig, requests, kind)
                for record in switched if number else ():  # the first round warms up
                    by_degree[record["to_tp"]].append(record)
            for tp, records in by_degree.items():
                pauses = [1e3 * (r["pause_seconds"] - r["phases"]["drain"]) for r in records]
                phases = {
                    phase: 1e3 * statistics.median(r["phases"].get(phase, 0.0) for r in records)
                    for phase in ("capsules", "plan", "kv", "install")
                }
                row = {"requests": requests, "kind": name, "to_tp": tp, "pause_ms": statistics.median(pauses)} | phases
                rows.append(row | {"recomputed": max(r["recomputed"] for r in records)})
                shown = "".join(f"{value:>10.1f}" for value in phases.values())
                print(f"{requests:>8}  {name:>9}  {tp:>5}  {row['pause_ms']:>9.1f}{shown}", flush=True)
    return rows


# -- requests with a long history of logprobs, without an engine ----------------------------------------------

SENT_EVERY = 50
"""Tokens; what is not streamed SGLang sends so many at a time."""
HISTORIES = {"no logprobs": None, "logprobs": 0, "top 5": 5}
"""Top logprobs that a request asks for."""


def _request(top: int | None) -> Any:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    from sglang_pat.rank import degrees

    prompt = list(range(16))
    request = Req("r", "", prompt, SamplingParams(), return_logprob=top is not None, top_logprobs_num=top or 0)
    request.pat_request, request.pat_prompt = SimpleNamespace(input_ids=prompt), array("I", prompt)
    request.pat_sealed = b""
    degrees.begin(request, tp=1)
    return request


def _with_history(top: int | None, tokens: int, rng: random.Random) -> Any:
    request = _request(top)
    request.output_ids = [rng.randrange(49_152) for _ in range(tokens)]
    if top is not None:
        request.send_output_token_logprobs_offset = tokens // SENT_EVERY * SENT_EVERY
        request.output_token_logprobs_val = [-rng.random() for _ in range(tokens)]
        request.output_token_logprobs_idx = list(request.output_ids)
    if top:
        request.output_top_logprobs_val = [[-rng.random() for _ in range(top)] for _ in range(tokens)]
        request.output_top_logprobs_idx = [[rng.randrange(49_152) for _ in range(top)] for _ in range(tokens)]
    return request


def _through_a_pause(reqs: list[Any], top: int | None) -> dict[str, float]:
    from sglang_pat.switch import requests

    fresh = [_request(top) for _ in reqs]
    begun = thread_time()
    data = pickle.dumps([requests.serialize_request(req) for req in reqs], pickle.HIGHEST_PROTOCOL)
    sent = thread_time()
    for req, capsule in zip(fresh, pickle.loads(data), strict=True):
        requests.restore_state(req, capsule)
    return {"offer_ms": 1e3 * (sent - begun), "take_ms": 1e3 * (thread_time() - sent), "mb": len(data) / 1e6}


def histories(requests: int, repeats: int = 5) -> list[dict[str, Any]]:
    """CPU time of the leader that offers so many requests, and of a rank that takes them; medians."""
    if shim.is_needed():
        shim.install()
    rng, results = random.Random(0), []
    for kind, top in HISTORIES.items():
        for tokens in (64, 4096):
            reqs = [_with_history(top, tokens, rng) for _ in range(requests)]
            gc.collect()
            gc.freeze()
            pauses = [_through_a_pause(reqs, top) for _ in range(repeats)]
            row = {name: statistics.median(one[name] for one in pauses) for name in pauses[0]}
            results.append({"requests": requests, "kind": kind, "tokens": tokens} | row)
    return results


def main() -> int:
    parser = _bench.options(__doc__, "8 and 64 requests, two rounds; a minute")
    parser.add_argument("--requests", metavar="N,N", help="how many are alive (default 8,64,256,512)")
    args = parser.parse_args()
    numbers, rounds = ([8, 64], 2) if args.quick else ([8, 64, 256, 512], 3)
    if args.requests:
        numbers = [int(number) for number in args.requests.split(",")]
    launch.set_environment(quiet=True)
    machine = _bench.about()
    model = models.make_random("llama", Path(".cache/models/llama"))
    flags = ["--tp", "1", "--dp", "2", "--dtype", "float32", "--max-running-requests", "640"]
    engine = launch.start(launch.make_server_args(str(model), [*flags, "--max-total-tokens", "300000"]))
    titles = "".join(f"{title:>10}" for title in ("capsules", "plan", "KV", "install"))
    print(f"{'requests':>8}  {'kind':>9}  {'to tp':>5}  {'pause, ms':>9}{titles}")
    rows: list[dict[str, Any]] = []
    try:

        async def run() -> None:
            rows.extend(await measure(engine, numbers, rounds))

        launch.run(engine, run)
    finally:
        engine.shutdown()
    of_histories = histories(64 if args.quick else 128)
    print(f"\n{'requests':>8}  {'history':>11}  {'tokens':>6}  {'offer, ms':>9}  {'take, ms':>8}  {'MB':>6}")
    for row in of_histories:
        numbers = f"{row['offer_ms']:>9.1f}  {row['take_ms']:>8.1f}  {row['mb']:>6.2f}"
        print(f"{row['requests']:>8}  {row['kind']:>11}  {row['tokens']:>6}  {numbers}")
    _bench.write(args.json, machine=machine, results=rows, histories=of_histories)
    return 0


if __name__ == "__main__":
    sys.exit(main())
