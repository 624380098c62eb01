"""One point of the grid (:func:`decode`, :func:`measure_prefill`, :func:`measure_switches`): the requests that make it
up, and what their steps took."""

from __future__ import annotations

import asyncio
import math
import time
from statistics import median
from typing import Any

from profiler.grid import SLACK, STEPS, SWITCH_ANSWER, SWITCH_ROUNDS, WARM_UP, Point
from profiler.rig import Rig
from profiler.windows import decode_windows, measure_prefill_seconds
from sglang_pat.predict.profile import DecodePoint, PrefillPoint, SwitchSample

ATTEMPTS = 5
"""Number of runs in which the batch may not be what it should be (requests placed otherwise), before giving up."""
FILLER_STEPS = 12
"""Decode steps of the requests that keep the other replicas' places while one is filled."""
PREFILLS, QUICK_SECONDS = 3, 1.0
"""Most repeats of a prefill, and the seconds that its runs must have taken together for it to end sooner."""


class NotMeasured(RuntimeError):
    """The batch could not be brought about."""


class TooSlow(NotMeasured):
    """A point takes longer than it may: what has more requests or tokens does so, too."""


async def decode(
    rig: Rig, point: Point, steps: int = STEPS, share: float | None = None, limit: float = math.inf
) -> DecodePoint:
    """Decode step time at ``point`` from ``steps`` steps, the median of its windows.

    The prompts are injected, not computed.  After ``share`` seconds the requests are aborted as soon as the steps made
    so far are enough, and after ``limit`` seconds in any case.

    Raises:
        NotMeasured: never was the batch full for :data:`~profiler.grid.LEAST_STEPS` steps.
    """
    alone_after = FILLER_STEPS if point.replicas < _get_dp(rig, point) else 0
    length = max(8, point.context - alone_after - WARM_UP - steps // 2)
    ids = [rig.sample_tokens(length) for _ in range(point.batch)]
    for _ in range(ATTEMPTS):
        await rig.flush()
        rig.inject(ids)
        await rig.read_trace()
        begun, wait, trace = time.monotonic(), share, []
        tasks = _start(rig, point, ids, WARM_UP + steps + SLACK)
        while True:
            _, late = await asyncio.wait(tasks, timeout=wait)
            trace += await rig.read_trace()
            windows = decode_windows(trace, tp=point.tp, replicas=point.replicas, batch=point.batch, most=steps)
            if not late or windows is not None or time.monotonic() - begun > limit:
                break
            wait = share and share / 4
        await (rig.abort(tasks) if late else rig.finish(tasks))
        if windows is not None:
            samples, context = windows
            return DecodePoint(
                tp=point.tp, replicas=point.replicas, batch=point.batch, context=round(context),
                seconds=median(samples), samples=samples,
            )  # fmt: skip
        if late:
            raise TooSlow(f"{point}: takes over {limit:.0f} s")
    raise NotMeasured(f"{point}: the batch was never full for long enough")


def _start(rig: Rig, point: Point, ids: list[list[int]], answer: int) -> list[asyncio.Task]:
    """Send the batch.

    Requests go to the replica with the fewest, so each prompt is sent once for every replica in a row: whichever
    replica takes it, all have the same prompts; but for the last token, since a long prompt would go where it is
    already.  For a lone replica all but the first of each row end early.
    """
    dp = _get_dp(rig, point)
    prompts, answers = [], []
    for prompt in ids:
        prompts += [[*prompt[:-1], *rig.sample_tokens(1)] for _ in range(dp)]
        answers += [answer] * dp if point.replicas == dp else [answer + FILLER_STEPS] + [FILLER_STEPS] * (dp - 1)
    return rig.send(prompts, answers)


def _get_dp(rig: Rig, point: Point) -> int:
    return next(layout.dp for layout in rig.layouts if layout.tp == point.tp)


async def measure_prefill(rig: Rig, point: Point, limit: float = math.inf) -> PrefillPoint:
    """Time to prefill fresh random prompts; median of up to :data:`PREFILLS` runs, of one where it takes long.

    Raises:
        NotMeasured: the requests never were spread as they should be, or it takes longer than ``limit`` seconds.
    """
    samples: list[float] = []
    for _ in range(ATTEMPTS):
        await rig.flush()
        batch = [rig.sample_tokens(point.context) for _ in range(point.replicas * point.batch)]
        await rig.read_trace()
        tasks = rig.send(batch, [1] * len(batch))
        _, late = await asyncio.wait(tasks, timeout=limit if limit < math.inf else None)
        await (rig.abort(tasks) if late else rig.finish(tasks))
        if late:
            raise TooSlow(f"{point}: takes over {limit:.0f} s")
        seconds = measure_prefill_seconds(
            await rig.read_trace(), tp=point.tp, replicas=point.replicas, batch=point.batch, length=point.context
        )
        samples += [] if seconds is None else [seconds]
        if len(samples) >= PREFILLS or sum(samples) > QUICK_SECONDS:
            break
    if not samples:
        raise NotMeasured(f"{point}: requests were never spread evenly")
    return PrefillPoint(
        tp=point.tp, replicas=point.replicas, batch=point.batch, length=point.context, seconds=median(samples),
        samples=tuple(samples),
    )  # fmt: skip


async def measure_switches(rig: Rig, point: Point, limit: float = math.inf) -> list[SwitchSample]:
    """Samples of switches from ``point.tp`` to ``point.to_tp`` and back, :data:`SWITCH_ROUNDS` times.

    Raises:
        NotMeasured: the requests ended too soon, or do not begin within ``limit`` seconds.
    """
    try:
        records = await switch_there_and_back(
            rig, point.tp, point.to_tp, point.batch, point.context, SWITCH_ROUNDS, limit
        )
    except TimeoutError:
        raise TooSlow(f"{point}: takes over {limit:.0f} s") from None
    if not records:
        raise NotMeasured(f"{point}: the requests ended before the switch")
    return [make_sample(record) for record in records]


async def switch_there_and_back(
    rig: Rig, low: int, high: int, requests: int, context: int, rounds: int, limit: float = math.inf
) -> list[dict[str, Any]]:
    """The records of switches from degree ``low`` to ``high`` and back, so many times with the same live requests.

    They decode a little in between.  Their prompts of ``context`` tokens are injected, not computed.  A switch before
    which one of them ended is left out.

    Raises:
        TimeoutError: they do not begin within ``limit`` seconds.
    """
    await rig.reconfigure(low)
    await rig.flush()
    prompts = [rig.sample_tokens(context) for _ in range(requests)]
    rig.inject(prompts)
    await rig.read_trace()
    tasks = rig.send(prompts, [SWITCH_ANSWER] * requests)
    records = []
    try:
        for _ in range(rounds):
            for target in (high, low):
                if requests:
                    async with asyncio.timeout(limit if limit < math.inf else None):
                        await rig.wait_until_decoding(tasks, requests)
                records.append(await rig.reconfigure(target))
    finally:
        if tasks:
            await rig.abort(tasks)
    return [record for record in records if record["requests"] == requests]


def make_sample(record: dict[str, Any]) -> SwitchSample:
    """A switch record of the engine as the profile keeps it."""
    phases = {name: seconds for name, seconds in record["phases"].items() if name != "prepare"}
    return SwitchSample(
        from_tp=record["from_tp"],
        to_tp=record["to_tp"],
        requests=record["requests"],
        tokens=record["tokens"],
        mode="recompute" if record["recomputed"] else "migrate",
        moved_bytes=record["moved_bytes"],
        pause_seconds=record["pause_seconds"],
        prepare_seconds=record["phases"].get("prepare", 0.0),
        phases=phases,
    )
