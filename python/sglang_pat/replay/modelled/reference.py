"""Profiles of machines that are not here, from published numbers.

Written by ``python -m sglang_pat.replay.modelled.reference --out profiles``, for the simulator and for tests of
policies.  They are marked ``modelled``, and every number's origin is in their ``sources``.  Nothing here has run on
such a machine.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from sglang_pat.predict.predictor import Number
from sglang_pat.predict.profile import DecodePoint, Fingerprint, PrefillPoint, Profile, save
from sglang_pat.replay.modelled import costs as switch_costs
from sglang_pat.replay.modelled.roofline import ModelSize, Roofline, prefill_operations, reduced_bytes

RANKS = 8
BATCHES = (1, 2, 4, 8, 16, 24, 32, 64, 128, 256)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192, 12288, 16384, 24576, 32768)
"""Denser where short, as PAT's; points beyond the active-token budget are left out (PAT section 4.2)."""

LLAMA = ModelSize(
    name="llama3.1-8b",
    architecture="LlamaForCausalLM",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    vocabulary=128256,
)
QWEN = ModelSize(
    name="qwen3-14b",
    architecture="Qwen3ForCausalLM",
    layers=40,
    hidden=5120,
    heads=40,
    kv_heads=8,
    head_dim=128,
    intermediate=17408,
    vocabulary=151936,
)

QWEN_32B = ModelSize(
    name="qwen2.5-32b",
    architecture="Qwen2ForCausalLM",
    layers=64,
    hidden=5120,
    heads=40,
    kv_heads=8,
    head_dim=128,
    intermediate=27648,
    vocabulary=152064,
)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A GPU's peaks from its data sheet: bytes a second of memory and of its link one way, bf16 operations a second."""

    name: str
    memory_rate: float
    flops: float
    link_rate: float
    tokens_per_gpu: int


A40 = Machine(name="NVIDIA A40 48GB", memory_rate=696e9, flops=149.7e12, link_rate=25e9, tokens_per_gpu=131072)
H100 = Machine(name="NVIDIA H100 80GB SXM", memory_rate=3.35e12, flops=989e12, link_rate=450e9, tokens_per_gpu=262144)

FIG4 = ((2, 1, 15.37e-3), (8, 1, 9.64e-3), (2, 32, 24.41e-3), (8, 128, 30.87e-3))
"""PAT Fig. 4 on 8×A40: (tp, requests of a replica, step seconds); its batch of 128 is 32 a replica at TP2."""
FIG4_CONTEXT = 2048
"""Tokens, assumed: the text does not say.  Memory then delivers 84% of its peak; 1,024 would give 42%, 2,560 105%."""
A40_PREFILL = (8, 9, 12288, 19.01)
"""PAT section 5.4, KV by full prefill: tp, requests, tokens of each, seconds."""
H100_GENERATION = (2, 24576, 134.3)
"""PAT section 5.3, static generation: degree (assumed), cap on response tokens, seconds."""


def deepscaler_lengths(cap: int, count: int = 128) -> np.ndarray:
    """Response lengths, tokens, cut at ``cap``: quantiles of a lognormal with PAT Fig. 3b's shares over 8K and 16K."""
    quantiles = (np.arange(count) + 0.5) / count
    return np.minimum(np.exp(7.919 + 0.885 * ndtri(quantiles)), cap).astype(int)


@cache
def a40_llama() -> Roofline:
    """Four published step times, linear in four unknowns: memory, all-reduce, hop and fixed time."""
    rows = np.array(
        [
            [
                (LLAMA.read_bytes + LLAMA.kv_bytes * batch * FIG4_CONTEXT) / tp,
                reduced_bytes(LLAMA, tp, batch),
                LLAMA.layers * 4 * (tp - 1),
                LLAMA.layers,
            ]
            for tp, batch, _ in FIG4
        ],
        dtype=float,
    )
    scale: NDArray[np.float64] = np.max(rows, axis=0)
    solved = np.linalg.solve(rows / scale, [seconds for *_, seconds in FIG4]) / scale
    memory, link, hop, layer = (float(value) for value in solved)
    tp, batch, length, seconds = A40_PREFILL
    computing = seconds - reduced_bytes(LLAMA, tp, batch * length) * link - LLAMA.layers * (layer + 4 * (tp - 1) * hop)
    return Roofline(
        model=LLAMA,
        read_rate=1 / memory,
        flops=A40.flops,
        prefill_share=float(prefill_operations(LLAMA, batch, length) / (tp * A40.flops) / computing),
        reduce_rate=1 / link,
        hop_seconds=hop,
        layer_seconds=layer,
    )


@cache
def h100(model: ModelSize) -> Roofline:
    """The A40's shares of peak at the H100's peaks; the fixed time of a layer from PAT's 24K generation."""
    a40, (tp, cap, seconds) = a40_llama(), H100_GENERATION

    def roofline(size: ModelSize, layer_seconds: float) -> Roofline:
        return Roofline(
            model=size,
            read_rate=a40.read_rate / A40.memory_rate * H100.memory_rate,
            flops=H100.flops,
            prefill_share=a40.prefill_share,
            reduce_rate=a40.reduce_rate / A40.link_rate * H100.link_rate,
            hop_seconds=0.0,
            layer_seconds=layer_seconds,
        )

    free = roofline(LLAMA, 0.0).generation_seconds(tp, deepscaler_lengths(cap), RANKS // tp)
    return roofline(model, (seconds - free) / (cap * LLAMA.layers))


A40_SOURCES = (
    "Step times: roofline of weight bytes, KV bytes, two ring all-reduces a layer and a fixed time a layer "
    "(sglang_pat/replay/modelled/roofline.py); memory rate, all-reduce rate, hop latency and fixed time solved from "
    "PAT Fig. 4: batch 1 TP2 15.37 ms, TP8 9.64 ms; batch 128 (of the node) TP2 24.41 ms, TP8 30.87 ms.",
    "Assumed: contexts of 2,048 tokens in Fig. 4; the text does not give them.",
    "Prefill: all-reduces as above; share of the 149.7 TFLOP/s peak (data sheet) from PAT section 5.4, 9 requests of "
    "12K prefilled at TP8 in 19.01 s.",
    "Grid within PAT's active-token budget, 128K tokens a GPU (section 4.2); base TP2, the lowest degree PAT reports.",
)
H100_SOURCES = (
    "Peaks from the data sheet: 3.35 TB/s memory, 989 TFLOP/s bf16, NVLink 450 GB/s one way.",
    "Shares of peak reached by memory, link and prefill: those of the A40 profile (PAT Fig. 4 and section 5.4).",
    "All-reduce in one hop over NVLink, its latency in the fixed time of a layer, at TP1 too.",
    "Fixed time of a layer: such that static TP2 takes PAT's 134.3 s for 128 DeepScaleR lengths with cap 24K "
    "(Llama-3.1-8B, section 5.3). That PAT's static layout was TP2 is inferred: at TP1 the fixed time would be "
    "negative, and from TP4 or TP8 no switch could save PAT's 34.6%.",
    "Doubt: with these times static TP4 and TP8 beat static TP2 for a whole batch; PAT says its static one was best.",
    "Not calibrated, for comparison: PAT's Qwen3-14B, static at 16K, took 133.9 s; static TP2 takes 140.4 s here.",
    "Assumed: 256K tokens of KV a GPU; PAT gives no budget for the H100.",
)

CASES: tuple[tuple[str, Machine, ModelSize, int, tuple[str, ...]], ...] = (
    ("8xA40-llama3.1-8b", A40, LLAMA, 2, A40_SOURCES),
    ("8xH100-llama3.1-8b", H100, LLAMA, 1, H100_SOURCES),
    ("8xH100-qwen3-14b", H100, QWEN, 2, H100_SOURCES),
    ("8xH100-qwen2.5-32b", H100, QWEN_32B, 2, H100_SOURCES),
)
"""(name, machine, model, base degree, sources)."""


def build(machine: Machine, model: ModelSize, base_tp: int, sources: tuple[str, ...], pat_costs: bool) -> Profile:
    """One reference profile, with PAT's switch costs or with those of this package's exchange."""
    times = a40_llama() if machine is A40 else h100(model)
    degrees = tuple(tp for tp in (1, 2, 4, 8) if tp >= base_tp)
    budget = machine.tokens_per_gpu * RANKS
    grid = [
        (tp, RANKS // tp, batch, context)
        for tp in degrees
        for batch in BATCHES
        for context in CONTEXTS
        if batch * context * (RANKS // tp) <= budget
    ]
    decode = ((point, times.step_seconds(point[0], point[2], point[2] * point[3])) for point in grid)
    prefill = ((point, times.prefill_seconds(point[0], point[2], point[3])) for point in grid if point[2] <= 32)
    costs = switch_costs.pat if pat_costs else switch_costs.ours
    switches, why = costs(model, times.read_rate, machine.link_rate, degrees, RANKS)
    return Profile(
        kind="modelled",
        fingerprint=Fingerprint(
            model=model.describe(),
            dtype="bfloat16",
            device=machine.name,
            num_ranks=RANKS,
            base_tp=base_tp,
            degrees=degrees,
            link="none",
            weights="reshard" if pat_costs else "resident",
            kv_exchange="allgather" if pat_costs else "direct",
            kv_tokens=machine.tokens_per_gpu * base_tp,
            max_running=max(BATCHES),
            sglang="0.4.8 (PAT's)",
            torch="2.7.1 (PAT's)",
            package="modelled",
        ),
        sources=sources + why,
        complete=True,
        grid={"batch": list(BATCHES), "context": list(CONTEXTS)},
        decode=tuple(
            DecodePoint(tp=tp, replicas=n, batch=b, context=c, seconds=_rounded(seconds), samples=())
            for (tp, n, b, c), seconds in decode
        ),
        prefill=tuple(
            PrefillPoint(tp=tp, replicas=n, batch=b, length=c, seconds=_rounded(seconds), samples=())
            for (tp, n, b, c), seconds in prefill
        ),
        switches=switches,
    )


def references() -> dict[str, Profile]:
    """File name → profile."""
    return {
        f"{name}{'-pat-costs' if pat else ''}.json": build(machine, model, base_tp, sources, pat_costs=pat)
        for name, machine, model, base_tp, sources in CASES
        for pat in (False, True)
    }


def _rounded(seconds: Number) -> float:
    """To a nanosecond, so that files do not differ between machines' linear algebra."""
    return round(float(seconds), 9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("profiles"), help="folder to write to")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, profile in references().items():
        save(profile, out / name)
        print(out / name)


if __name__ == "__main__":
    main()
