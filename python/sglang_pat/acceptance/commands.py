"""What the acceptance has an engine do (``profiler.worker``): coroutine functions of a ``Rig``, JSON both ways."""

from __future__ import annotations

import asyncio
import statistics
import time
from itertools import takewhile
from typing import Any

import torch

from profiler import measure, validate
from profiler.grid import Point
from profiler.rig import Rig

STEPS = 3
"""Decode steps of the whole batch between two switches."""


async def describe(rig: Rig) -> dict[str, Any]:
    """The engine's degrees and sizes."""
    info = rig.engine.server_args
    return {
        "degrees": [layout.tp for layout in rig.layouts],
        "kv_tokens": rig.engine.get_fingerprint().kv_tokens,
        "graph_sizes": {str(tp): sizes for tp, sizes in info.spec.graph_sizes.items()},
        "graphs": not info.disable_cuda_graph,
    }


async def _begin(rig: Rig, tp: int | None) -> None:
    """An engine without prefixes and without a trace, of degree ``tp``; None to stay in the layout in force."""
    if tp is not None:
        await rig.reconfigure(tp)
    await rig.flush()
    await rig.read_trace()


async def generate_greedy(
    rig: Rig, prompts: list[list[int]], answer: int, visits: list[int], start: int
) -> dict[str, Any]:
    """Greedy answers of ``answer`` tokens from degree ``start`` on, which switch to each of ``visits`` on the way.

    Returns the answers' token ids, their routed experts if the engine returns these, the record of each switch, and the
    seconds of all.
    """
    await _begin(rig, start)
    begun = time.monotonic()
    tasks = rig.send(prompts, [answer] * len(prompts))
    records = []
    for tp in visits:
        await rig.wait_until_decoding(tasks, len(prompts), STEPS)
        records.append(await rig.reconfigure(tp))
    answers = await rig.finish(tasks)
    return {
        "outputs": [a["output_ids"] for a in answers],
        "routes": [a["meta_info"].get("routed_experts") for a in answers],
        "switches": records,
        "seconds": time.monotonic() - begun,
    }


async def count_drafts(rig: Rig) -> dict[str, int]:
    """Number of drafts, and of right ones, since the start."""
    totals = (await rig.engine.async_status())["totals"]
    return {name: totals[name] for name in ("drafts", "right_drafts")}


async def generate_while_lent(rig: Rig, prompts: list[list[int]], answer: int) -> dict[str, Any]:
    """Greedy answers of ``answer`` tokens, while every second rank is lent and taken back.

    Returns the answers' token ids, the records of both switches, and the free bytes of the first GPU before and while
    ranks are lent (none on a CPU).
    """
    await _begin(rig, 1)
    tasks, records, free = rig.send(prompts, [answer] * len(prompts)), [], []
    for move in (rig.engine.async_lend_ranks, rig.engine.async_take_back_ranks):
        await rig.wait_until_decoding(tasks, len(prompts), STEPS)
        if torch.cuda.is_available():
            free.append(torch.cuda.mem_get_info()[0])
        records.append(await move())
    answers = await rig.finish(tasks)
    return {"outputs": [a["output_ids"] for a in answers], "switches": records, "free": free}


async def make_chat_prompts(rig: Rig, count: int) -> list[list[int]]:
    """Token ids of ``count`` questions, by the model's chat template."""
    return validate.make_chat_prompts(rig.engine.tokenizer_manager.tokenizer, count)


async def decode_outputs(rig: Rig, outputs: list[list[int]]) -> list[str]:
    """Text of each output until the model ends its turn."""
    tokenizer = rig.engine.tokenizer_manager.tokenizer
    ends = tokenizer.eos_token_id
    return [tokenizer.decode(list(takewhile(lambda token: token != ends, output))) for output in outputs]


async def compute_nll(rig: Rig, prompts: list[list[int]], outputs: list[list[int]], tp: int) -> list[float]:
    """Mean negative log-likelihood (nats) of the tokens of each output, given those before, as degree ``tp`` says."""
    await rig.reconfigure(tp)
    await rig.flush()

    async def one(prompt: list[int], output: list[int]) -> float:
        answer = await rig.engine.async_generate(
            input_ids=prompt + output, sampling_params={"max_new_tokens": 1, "temperature": 0},
            return_logprob=True, logprob_start_len=len(prompt) - 1,
        )  # fmt: skip
        return -statistics.mean(entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:])

    means = await asyncio.gather(*(one(p, o) for p, o in zip(prompts, outputs, strict=True)))
    await rig.wait_until_idle()
    return list(means)


async def measure_pauses(
    rig: Rig, low: int, high: int, requests: int, tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """Records of ``rounds`` switches there and back with ``requests`` live requests of ``tokens`` tokens in all."""
    return await measure.switch_there_and_back(rig, low, high, requests, max(1, tokens // requests), rounds)


async def time_prefill(rig: Rig, tokens: int, requests: int) -> float:
    """Seconds to prefill fresh requests of ``tokens`` tokens in all."""
    await rig.flush()
    begun = time.monotonic()
    await rig.finish(rig.send([rig.sample_tokens(max(1, tokens // requests)) for _ in range(requests)], [1] * requests))
    return time.monotonic() - begun


async def time_step(rig: Rig, tp: int, batch: int, context: int, steps: int) -> float:
    """Seconds of a decode step of all replicas of degree ``tp`` with ``batch`` requests each."""
    await rig.reconfigure(tp)
    replicas = next(layout.dp for layout in rig.layouts if layout.tp == tp)
    point = Point(kind="decode", tp=tp, replicas=replicas, batch=batch, context=context)
    return (await measure.decode(rig, point, steps)).seconds


async def run_long_tail(
    rig: Rig, lengths: list[int], start: int | None = None, merge_at: int | None = None, high: int = 1
) -> dict[str, Any]:
    """Seconds until the last answer of a batch is there, whose answers have these lengths.

    Args:
        start: degree to begin in; None where the engine's policy decides.
        merge_at: switch to degree ``high`` when so many requests are left; None to leave that to the policy.
    """
    await _begin(rig, start)
    begun = time.monotonic()
    tasks = rig.send([rig.sample_tokens(16) for _ in lengths], lengths)
    if merge_at is not None:
        pending = set(tasks)
        while len(pending) > merge_at:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        await rig.reconfigure(high)
    await rig.finish(tasks)
    seconds = time.monotonic() - begun
    return {"seconds": seconds, "switches": (await rig.engine.async_status())["num_switches"]}


async def update(rig: Rig, names_and_shapes: dict[str, list[int]], seed: int) -> None:
    """Give these float32 parameters other random values, on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [(name, torch.randn(shape, generator=generator) * 0.02) for name, shape in names_and_shapes.items()]
    succeeded, message = await rig.engine.async_update_weights_from_tensor(tensors)
    rig.tp = (await rig.engine.async_status())["layout"]["tp"]
    if not succeeded:
        raise RuntimeError(message)
