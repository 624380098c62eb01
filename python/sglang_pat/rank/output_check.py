"""A check at start (:func:`check_outputs`): each layout computes what the base layout does.

Shards may be as they should (``shard_check.py``) and a layer wrong all the same: of another class, with a buffer that
was never loaded, at a place where the engine does not look.  Its requests would be answered with garbage, from the
first token after a switch on.  So every layout prefills the same made-up prompts and decodes one more token of each, by
the steps that real requests take, and its logits are compared with those of the base layout.

A rank compares its own: nothing is sent but what the steps send.  What counts is the mean over the tokens.  A mixture
of experts in bfloat16 is another matter: many of its tokens may be given another expert, and be far off.  There a tenth
of the tokens must be close; a wrong layer is wrong for all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang_pat.errors import Unsupported, format_one_line
from sglang_pat.host import batches, kv, layers, loop
from sglang_pat.layout import ParallelLayout

if TYPE_CHECKING:
    from sglang_pat.switch.scheduler import SwitchingScheduler

logger = logging.getLogger(__name__)

PROMPTS = 16
"""Most prompts in one batch."""
SHORTEST = 4
"""Number of tokens of the first prompt; each other one has one more than the one before."""
STEPS = ("prefill", "decode")

ALLOWED = {torch.float32: 0.02, torch.bfloat16: 0.2, torch.float16: 0.2}
"""Largest distance of a right layout's logits, by dtype, as :func:`measure_distances` counts (architecture.md)."""

CLOSE = 0.1
"""Share of the tokens of a mixture in bfloat16 or float16 that must be nearer than :data:`ALLOWED`."""

DUMMY_STD = 2.0**-10 / 3**0.5
"""Standard deviation of SGLang's dummy weights, about: they are uniform between -0.001 and 0.001."""


def check_outputs(scheduler: SwitchingScheduler) -> None:
    """Compare the logits of every layout with those of the base.  All ranks together, with empty pools.

    The scheduler is in its last layout afterwards, with empty pools; weights are in the base layout.

    Raises:
        Unsupported: a layout is wrong, or its forward pass fails.
    """
    begun = time.perf_counter()
    base, *others = scheduler.adaptive.layouts
    model, dtype = scheduler.layouts.base.model, scheduler.layouts.dtype
    dummy = layers.has_dummy_weights(scheduler)
    flips = dtype != torch.float32 and layers.has_experts(model)
    with torch.no_grad(), _enlarge(model if dummy else None):
        expected = _compute_logits(scheduler, base)
        allowed, results, held = ALLOWED[dtype], [], base
        for layout in others:
            if scheduler.layouts.resharding:
                scheduler.layouts.reshard(held, layout)
                held = layout
            logits = _compute_logits(scheduler, layout)
            for step, ours, theirs in zip(STEPS, logits, expected, strict=True):
                distances = measure_distances(ours, theirs)
                off = (distances.quantile(CLOSE) if flips else distances.mean()).item()
                results.append(f"tp{layout.tp} {step} {off:.2g}")
                if not off <= allowed:
                    raise Unsupported(
                        f"--adaptive-tp does not support this model: its logits at tp={layout.tp} are not those at "
                        f"tp={base.tp} ({step}: off by {off:.0%} of their spread, {allowed:.0%} may be rounding); "
                        f"leave tp={layout.tp} out of --pat-candidates, or serve it without --adaptive-tp"
                    )
        if held != base:
            scheduler.layouts.reshard(held, base)
    if scheduler.rank == 0:
        seconds = time.perf_counter() - begun
        logger.info("all layouts compute the same within rounding (%s), checked in %.2f s", ", ".join(results), seconds)


def measure_distances(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Distance of ``logits`` from ``expected``, both ``[tokens, vocabulary]``, for each token.

    It is the root mean square of the difference in units of the spread of ``expected``, ``[tokens]``.

    0 where both are the same; about 1.4 where they have nothing to do with each other.  Relative, as logits of random
    weights may all be nearly the same.
    """
    if not torch.equal(logits.isfinite(), expected.isfinite()):
        return torch.full_like(expected[:, 0], float("inf"), dtype=torch.float64)
    logits, expected = logits.double().nan_to_num(), expected.double().nan_to_num()
    spread = expected.std(dim=1, correction=0)
    off = (logits - expected).square().mean(dim=1).sqrt()
    return torch.where(off == 0, 0.0, off / spread)


def choose_lengths(room: int, most: int) -> list[int]:
    """Number of tokens of each prompt; at most ``most`` prompts, which fit into ``room`` with one more token each."""
    lengths: list[int] = []
    for length in range(SHORTEST, SHORTEST + min(most, PROMPTS)):
        if sum(lengths) + len(lengths) + length + 1 > room:
            break
        lengths.append(length)
    return lengths or [max(1, room - 1)]


def _compute_logits(scheduler: SwitchingScheduler, layout: ParallelLayout) -> list[torch.Tensor]:
    """Logits of the last token of each made-up prompt, and of the token after it, ``[prompts, vocabulary]`` each."""
    try:
        scheduler.enter_layout(layout, epoch=0)
        lengths = choose_lengths(_count_tokens(scheduler), _count_prompts(scheduler))
        draw = np.random.default_rng(0)
        tokens = [draw.integers(batches.get_vocab_size(scheduler), size=length + 1).tolist() for length in lengths]
        batch = batches.make_prefill(scheduler, [prompt[:-1] for prompt in tokens])
        prefill = batches.compute_logits(scheduler, batch)
        batches.go_on_with(scheduler, batch, [prompt[-1] for prompt in tokens])
        return [prefill, batches.compute_logits(scheduler, batch)]
    except Exception as error:
        logger.debug("forward pass at tp=%d", layout.tp, exc_info=True)
        raise Unsupported(
            f"--adaptive-tp does not support this model: its forward pass at tp={layout.tp} fails with "
            f"{type(error).__name__}: {format_one_line(error)}"
        ) from error
    finally:
        kv.clear_pools(scheduler)


def _count_tokens(scheduler: SwitchingScheduler) -> int:
    """Number of tokens that fit into KV in every layout, and into a step."""
    chunk = loop.get_chunk_size(scheduler)
    return min(scheduler.base_capacity, chunk) if chunk > 0 else scheduler.base_capacity


def _count_prompts(scheduler: SwitchingScheduler) -> int:
    """Most prompts with which the decode step of every layout that has graphs is a graph."""
    return min([PROMPTS, loop.get_max_running(scheduler), *scheduler.layouts.list_largest_graphs()])


@contextmanager
def _enlarge(model: torch.nn.Module | None) -> Iterator[None]:
    """Multiply the parameters so that each layer has a say, inside the block; by a power of 2, so nothing is rounded.

    SGLang's dummy weights are so small that the output of a layer is lost in what goes around it.
    """
    scales = {}
    for param in model.parameters() if model is not None else ():
        std = param.shape[-1] ** -0.5 if param.dim() > 1 else 1.0
        scales[param] = 2.0 ** round(np.log2(std / DUMMY_STD))
    try:
        for param, scale in scales.items():
            param.data.mul_(scale)
        yield
    finally:
        for param, scale in scales.items():
            param.data.div_(scale)
