"""The calibration before the first request: each layout decodes made-up requests, which corrects the profile.

Layouts take turns, so that a machine that becomes slower meanwhile is not taken for a layout that is.  What the steps
took comes to the coordinator with the leaders' load reports, as ever (``messages.CalibrationTurn``).
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from sglang_pat.figures import job_log
from sglang_pat.messages import DRAFTS_PARAM
from sglang_pat.predict.correction import BATCH, CONTEXT, TURNS

ENOUGH_TURNS, ENOUGH_SECONDS = 2, 5.0
"""Number of turns that do on a slow machine, once they have taken this many seconds."""
MOST_SECONDS = 15.0
"""Most seconds for which a layout decodes in one turn: where a step takes seconds, a few of them do."""
FLUSH_SECONDS = 60.0

CPU_CONTEXT = 2048
"""Most tokens of a request without a GPU: the attention there computes the square of the whole prompt for the one
token that is not in the cache, over a minute for 7,353 tokens of SmolLM2-135M."""

RID = "pat-calibration"
"""Request id that the made-up requests of a layout in a turn share."""

FULL = 0.9
"""Largest share of a replica's KV that is taken.  Every replica has the prompts of all: a message for each would be one
more thing."""


async def calibrate(manager: Any) -> None:
    """Measure all layouts; ends in the base layout with an empty cache.  What fails is logged, and nothing else.

    Args:
        manager: an ``AdaptiveTokenizerManager``, whose module imports this one.
    """
    begun = time.monotonic()
    try:
        await _run_turns(manager, begun)
        factors = (await manager.pat_status())["step_factors"]
        shown = ", ".join(f"tp{tp} {scale:.2f}" for tp, (scale, *_) in factors.items())
        seconds = time.monotonic() - begun
        where = f"{BATCH} requests of {CONTEXT} tokens"
        job_log.info(
            "calibrated in %.1f s; a step of %s takes so many times what the profile says: %s", seconds, where, shown
        )
    except Exception as error:
        job_log.warning("the profile is not calibrated: %s", error)


async def _run_turns(manager: Any, begun: float) -> None:
    spec = manager.server_args.spec
    config, points = spec.config, spec.profile.decode
    # Beyond what was profiled a step would be compared with a guess.
    most, longest = max(point.batch for point in points), max(point.context for point in points)
    degrees = [layout.tp for layout in config.layouts]
    room = FULL * min(group["kv_total"] for group in (await manager.pat_status())["groups"])
    try:
        for turn, (each, context) in enumerate(TURNS):
            if turn >= ENOUGH_TURNS and time.monotonic() - begun > ENOUGH_SECONDS:
                break
            manager.pat_send_calibration_turn()
            requests = min(each * config.base.dp, most)
            for tp in degrees[:: -1 if turn % 2 else 1]:  # there and back, which takes the fewest switches
                await manager.pat_reconfigure(tp)
                await _decode(manager, requests, min(context, longest), int(room / requests), config.calibrate)
                await manager.pat_wait_until_idle()
        await manager.pat_reconfigure(degrees[0])
    finally:
        try:  # also of one that failed: nothing was computed of what the cache has
            await _forget_prompts(manager)
        finally:
            manager.pat_send_calibration_turn(over=True)


async def _forget_prompts(manager: Any) -> None:
    answer = await manager.flush_cache(timeout_s=FLUSH_SECONDS)
    if not answer.success:
        raise RuntimeError(f"the cache still has made-up prompts: {answer.message or 'it cannot be emptied'}; flush it")
    await manager.pat_wait_until_idle()


async def _decode(manager: Any, requests: int, context: int, room: int, steps: int) -> None:
    """Decode ``requests`` requests at once, whose prompts have ``context`` tokens if there is room.  Each makes
    ``steps`` steps that count (the first token is prefill's, the next step follows it), fewer after
    :data:`MOST_SECONDS`.

    Prompts are not computed: what is in their KV changes no time.  No two are alike, nor are the tokens sampled after
    them: a mixture's time depends on how many experts they choose.
    """
    tokens = min(steps + 2, manager.context_len // 2)
    prompt = max(1, min(context, room - tokens, manager.context_len - tokens - 16))
    if manager.server_args.disable_radix_cache:
        prompt = min(prompt, TURNS[0][1])  # it would be computed
    if manager.server_args.device == "cpu":
        prompt = min(prompt, CPU_CONTEXT)
    ids = [random.choices(range(manager.model_config.vocab_size), k=prompt) for _ in range(requests)]
    manager.pat_inject_prefixes(ids)
    plain = {DRAFTS_PARAM: 0}  # the profile is of steps without drafts
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 1.0, "custom_params": plain}
    enough = asyncio.get_running_loop().call_later(MOST_SECONDS, manager.abort_request, RID)
    try:
        await manager.pat_generate_unlogged(rid=RID, input_ids=ids, sampling_params=sampling)
    finally:
        enough.cancel()
