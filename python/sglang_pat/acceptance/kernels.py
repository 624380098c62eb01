"""How long calls take on a device; KV pack and unpack beside a plain copy of as many bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from sglang_pat.switch import kv

FILLER = 1 << 30
"""Bytes that are written before each call on a GPU, in some 0.4 ms.  Meanwhile Python launches the call, which takes it
longer than the GPU needs for a small one; and no cache has any of its data."""


def time_calls(device: str, *calls: Callable[[], object], repeats: int) -> list[float]:
    """Median time of each of ``calls``, taking turns; on a GPU what it takes there, without the launch."""
    samples: list[list[float]] = [[] for _ in calls]
    filler = torch.empty(FILLER if device == "cuda" else 0, dtype=torch.uint8, device=device)
    for turn in range(repeats + 2):
        for call, times in zip(calls, samples, strict=True):
            if device == "cuda":
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                filler.zero_()
                begin.record()
                call()
                end.record()
                torch.cuda.synchronize()
                took = begin.elapsed_time(end) / 1e3
            else:
                started = time.perf_counter()
                call()
                took = time.perf_counter() - started
            if turn >= 2:
                times.append(took)
    return [statistics.median(times) for times in samples]


def capture_graph(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph: only what is launched takes time, as in a decode step, not Python."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()  # makes handles and workspaces, which a capture must not
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def measure(device: str, heads: int, dim: int, dtype: torch.dtype, parts: int, tokens: int, repeats: int) -> dict:
    """One layer of ``tokens`` tokens in random slots, cut by heads into ``parts`` parts, one for each peer."""
    slots_in_pool = 2 * tokens
    k, v = (torch.randn(slots_in_pool, heads, dim, device=device).to(dtype) for _ in range(2))
    slots = torch.randperm(slots_in_pool, device=device)[:tokens].repeat(parts)
    offsets = [tokens * part for part in range(parts + 1)]
    count = heads // parts
    move = kv.Parts(slots, offsets, [count * part for part in range(parts)], count)
    staged = torch.empty(kv.count_staged_elements(tokens * parts, count, dim, dim), dtype=dtype, device=device)
    other = torch.empty_like(staged)
    pack, unpack, copy = time_calls(
        device,
        lambda: move.pack(k, v, staged),
        lambda: move.unpack(k, v, staged),
        lambda: other.copy_(staged),
        repeats=repeats,
    )
    return {
        "tokens": tokens, "parts": parts, "bytes": staged.nbytes, "pack_seconds": pack, "unpack_seconds": unpack,
        "copy_seconds": copy,
    }  # fmt: skip
