"""Before the first request: each layout decodes some made-up requests, so that the profile is corrected from the start.

Layouts take turns, so that a machine that becomes slower meanwhile is not taken for a layout that is.  What the steps
took comes to the coordinator with the leaders' load reports, as ever (``messages.CalibrationTurn``).
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_pat.figures import job_log
from sglang_pat.predict.correction import PROMPT, TURNS

if TYPE_CHECKING:
    from sglang_pat.sglang.server.tokenizer import AdaptiveTokenizerManager

ENOUGH_TURNS, ENOUGH_SECONDS = 2, 5.0
"""On a slow machine so many turns do, once they have taken so long."""
FLUSH_SECONDS = 60.0


async def calibrate(manager: AdaptiveTokenizerManager) -> None:
    """Measure all layouts; ends in the base layout with an empty cache.  What fails is logged, and nothing else."""
    begun = time.monotonic()
    try:
        await _turns(manager, begun)
        factors = (await manager.pat_status())["step_factors"]
        shown = ", ".join(f"tp{tp} {factor:.2f}" for tp, factor in factors.items())
        seconds = time.monotonic() - begun
        job_log.info("calibrated in %.1f s; a step takes so many times what the profile says: %s", seconds, shown)
    except Exception as error:
        job_log.warning("the profile is not calibrated: %s", error)


async def _turns(manager: AdaptiveTokenizerManager, begun: float) -> None:
    config = manager.server_args.adaptive_config()
    degrees = [layout.tp for layout in config.layouts]
    try:
        for turn, each in enumerate(TURNS):
            if turn >= ENOUGH_TURNS and time.monotonic() - begun > ENOUGH_SECONDS:
                break
            manager.pat_calibration_turn()
            for tp in degrees[:: -1 if turn % 2 else 1]:  # there and back, which takes the fewest switches
                await manager.pat_reconfigure(tp)
                await _decode(manager, each * config.base.dp, config.calibrate)
                await manager.pat_until_idle()
        await manager.pat_reconfigure(degrees[0])
        await manager.flush_cache(timeout_s=FLUSH_SECONDS)
        await manager.pat_until_idle()
    finally:
        manager.pat_calibration_turn(over=True)


async def _decode(manager: AdaptiveTokenizerManager, requests: int, steps: int) -> None:
    """So many requests at once; each makes ``steps`` steps that count: the first token is prefill's, the next step
    follows it."""
    tokens = min(steps + 2, manager.context_len // 2)
    prompt = max(1, min(PROMPT, manager.context_len - tokens - 16))
    ids = [random.choices(range(manager.model_config.vocab_size), k=prompt) for _ in range(requests)]
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
    await manager.pat_made_up(GenerateReqInput(input_ids=ids, sampling_params=sampling))
