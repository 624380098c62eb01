"""One point of the grid: the requests that make it up, and what their steps took."""

from __future__ import annotations

import asyncio
from statistics import median
from typing import Any

from profiler.budget import PREFILLS, QUICK_SECONDS, SWITCH_ROUNDS
from profiler.grid import LEAST_STEPS, SLACK, SWITCH_ANSWER, WARM_UP
from profiler.points import Point
from profiler.rig import Rig
from profiler.windows import by_rank, decode_windows, prefill_seconds
from sglang_pat.predict.profile import DecodePoint, PrefillPoint, SwitchSample

ATTEMPTS = 5
"""Runs in which the batch was not what it should be (requests placed or started otherwise), before giving up."""
PLUG, PLUG_LEAD = 256, 0.004
"""Tokens of the request behind which a batch is held, and the seconds by which it is sent earlier."""
FILLER_STEPS = 12
"""Decode steps of the requests that keep the other replicas' places while one is filled."""


class NotMeasured(RuntimeError):
    """The batch could not be brought about."""


async def decode(rig: Rig, point: Point, steps: int) -> tuple[DecodePoint, float]:
    """Decode step time at ``point`` from a run of ``steps`` steps, the median of its windows; and the seconds that its
    prefill took.  The prompts are injected, not computed.

    Raises:
        NotMeasured: never was the batch full for :data:`~profiler.grid.LEAST_STEPS` steps.
    """
    alone_after = FILLER_STEPS if point.replicas < _dp(rig, point) else 0
    length = max(8, point.context - alone_after - WARM_UP - steps // 2)
    ids = [rig.tokens(length) for _ in range(point.batch)]
    for _ in range(ATTEMPTS):
        await rig.flush()
        rig.inject(ids)
        await rig.trace()
        await rig.finish(_start(rig, point, ids, WARM_UP + steps + SLACK))
        trace = await rig.trace()
        found = decode_windows(
            trace, tp=point.tp, replicas=point.replicas, batch=point.batch, warm_up=WARM_UP, most=steps
        )
        if found is not None and len(found.samples) * found.size >= LEAST_STEPS:
            break
    else:
        raise NotMeasured(f"{point}: the batch was never full for {LEAST_STEPS} steps")
    measured = DecodePoint(
        tp=point.tp, replicas=point.replicas, batch=point.batch, context=round(found.context),
        seconds=median(found.samples), samples=found.samples,
    )  # fmt: skip
    prefills = by_rank(trace, kind="prefill").values()
    return measured, max((sum(step["seconds"] for step in mine) for mine in prefills), default=0.0)


def _start(rig: Rig, point: Point, ids: list[list[int]], answer: int) -> list:
    """Send the batch.

    Requests go to the replica with the fewest, so each prompt is sent once for every replica in a row: whichever
    replica takes it, all have the same prompts; but for the last token, since a long prompt would go where it is
    already.  For a lone replica all but the first of each row end early.
    """
    dp = _dp(rig, point)
    prompts, answers = [], []
    for prompt in ids:
        prompts += [[*prompt[:-1], *rig.tokens(1)] for _ in range(dp)]
        answers += [answer] * dp if point.replicas == dp else [answer + FILLER_STEPS] + [FILLER_STEPS] * (dp - 1)
    return rig.send(prompts, answers)


def _dp(rig: Rig, point: Point) -> int:
    return next(layout.dp for layout in rig.layouts if layout.tp == point.tp)


async def prefill(rig: Rig, point: Point) -> PrefillPoint:
    """Time to prefill fresh random prompts; median of up to :data:`PREFILLS` runs, of one where it takes long.

    After a run in which the requests were not prefilled together, the next one holds them behind a plug.

    Raises:
        NotMeasured: the requests never were spread as they should be.
    """
    together: list[float] = []
    apart: list[float] = []
    for _ in range(ATTEMPTS):
        await rig.flush()
        plug = min(PLUG, point.context) if apart else 0
        batch = [rig.tokens(point.context) for _ in range(point.replicas * point.batch)]
        await rig.trace()
        plugs = [rig.tokens(plug) for _ in range(point.replicas if plug else 0)]
        tasks = rig.send(plugs, [1] * len(plugs))
        await asyncio.sleep(PLUG_LEAD if plug else 0)
        await rig.finish([*tasks, *rig.send(batch, [1] * len(batch))])
        found = prefill_seconds(
            await rig.trace(), tp=point.tp, replicas=point.replicas, batch=point.batch, length=point.context, plug=plug
        )
        if found is not None:
            (together if found[1] else apart).append(found[0])
        if len(together) >= PREFILLS or sum(together) > QUICK_SECONDS or sum(apart) > 2 * QUICK_SECONDS:
            break
    samples = tuple(together or apart)
    if not samples:
        raise NotMeasured(f"{point}: requests were never spread evenly")
    return PrefillPoint(
        tp=point.tp, replicas=point.replicas, batch=point.batch, length=point.context, seconds=median(samples),
        samples=samples,
    )  # fmt: skip


async def switches(rig: Rig, point: Point) -> list[SwitchSample]:
    """From ``point.tp`` to ``point.to_tp`` and back, :data:`~profiler.budget.SWITCH_ROUNDS` times with the same live
    requests, which decode a little in between.  Their prompts are injected, not computed.

    Raises:
        NotMeasured: they ended too soon.
    """
    await rig.reconfigure(point.tp)
    await rig.flush()
    prompts = [rig.tokens(point.context) for _ in range(point.batch)]
    rig.inject(prompts)
    await rig.trace()
    tasks = rig.send(prompts, [SWITCH_ANSWER] * point.batch)
    records = []
    try:
        for _ in range(SWITCH_ROUNDS):
            for target in (point.to_tp, point.tp):
                if point.batch:
                    await rig.until_decoding(tasks, point.batch)
                records.append(await rig.reconfigure(target))
    finally:
        if tasks:
            await rig.abort(tasks)
    found = [sample(record) for record in records if record["requests"] == point.batch]
    if not found:
        raise NotMeasured(f"{point}: the requests ended before the switch")
    return found


def sample(record: dict[str, Any]) -> SwitchSample:
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
