"""Profiles of machines that are not here, from published numbers.

    python -m studies.modelled [--out studies/profiles]

For the simulator and for tests of policies.  They are marked ``modelled``, and every number's origin is in their
``sources``.  Nothing here has run on such a machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from sglang_pat.predict.predictor import Number
from sglang_pat.predict.profile import DecodePoint, Fingerprint, PrefillPoint, Profile, SwitchSample, save
from studies import PROFILES

# -- step and prefill times, from bytes, operations and bandwidths -------------------------------------------------

ELEMENT = 2
"""Bytes of a bf16 number."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A decoder with grouped-query attention and gated MLPs; sizes from the published configuration.

    Attributes:
        intermediate: width of the MLP that every token goes through; 0 if each layer has experts only.
        experts: of each layer, with the width ``expert_intermediate``; a token goes through ``chosen`` of them.
    """

    name: str
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int = 0
    vocabulary: int
    experts: int = 0
    chosen: int = 0
    expert_intermediate: int = 0

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert in every layer."""
        return self.layers * 3 * self.hidden * self.expert_intermediate

    @property
    def token_parameters(self) -> int:
        """Parameters that one token goes through in all layers; norms and routers left out (less than 0.1%)."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        dense = self.layers * (attention + 3 * self.hidden * self.intermediate)
        return dense + self.chosen * self.expert_parameters

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights; input and output embedding are separate in the models used here."""
        others = (self.experts - self.chosen) * self.expert_parameters
        return ELEMENT * (self.token_parameters + others + 2 * self.vocabulary * self.hidden)

    @property
    def read_bytes(self) -> int:
        """Bytes of weights read in a decode step of one request: all but the input embedding and the experts not
        chosen."""
        return ELEMENT * (self.token_parameters + self.vocabulary * self.hidden)

    def count_read_bytes(self, tokens: Number) -> Number:
        """Bytes of weights read in a step over ``tokens`` tokens: experts that any of them has chosen are read once."""
        return self.read_bytes + ELEMENT * (self.count_experts(tokens) - self.chosen) * self.expert_parameters

    def count_experts(self, tokens: Number) -> Number:
        """Number of experts of a layer that ``tokens`` tokens go through, if each chooses evenly and by itself."""
        return self.experts * (1 - (1 - self.chosen / self.experts) ** tokens) if self.experts else 0

    def count_kv_heads(self, tp: int) -> int:
        """Number of KV heads of a rank.  Above one rank a head they are copied."""
        return max(1, self.kv_heads // tp)

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV of one token, all layers and heads."""
        return ELEMENT * 2 * self.layers * self.kv_heads * self.head_dim

    def describe(self) -> str:
        experts = f" experts{self.experts}/{self.chosen} I{self.expert_intermediate}" if self.experts else ""
        return (
            f"{self.architecture} L{self.layers} H{self.hidden} heads{self.heads}/{self.kv_heads} "
            f"I{self.intermediate} V{self.vocabulary}{experts}"
        )


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Times of one model on one machine.

    Attributes:
        read_rate: bytes a second that a GPU gets from its memory in a step.
        flops: peak bf16 operations a second of a GPU; ``prefill_share`` of it is reached in prefill.
        reduce_rate: bytes a second of a ring all-reduce, each byte counted 2(tp-1)/tp times.
        hop_seconds: latency of one of the 2(tp-1) hops of a ring; 0 where an all-reduce takes one hop.
        layer_seconds: fixed time of a layer in every step (launches, scheduler, one-hop latencies).
    """

    model: ModelSize
    read_rate: float
    flops: float
    prefill_share: float
    reduce_rate: float
    hop_seconds: float
    layer_seconds: float

    def step_seconds(self, tp: int, batch: Number, tokens: Number) -> Number:
        """Seconds of a decode step of a replica with ``batch`` requests of ``tokens`` context tokens together."""
        weights = self.model.count_read_bytes(batch) / (tp * self.read_rate)
        compute = self.model.read_bytes / ELEMENT * 2 * batch / (tp * self.flops)
        kv = self.model.kv_bytes * tokens / (min(tp, self.model.kv_heads) * self.read_rate)
        return np.maximum(weights, compute) + kv + self._compute_fixed_seconds(tp) + self._reduce(tp, batch)

    def prefill_seconds(self, tp: int, batch: Number, length: Number) -> Number:
        """Seconds of a prefill of ``batch`` requests of ``length`` tokens on a replica."""
        weights = self.model.count_read_bytes(batch * length) / (tp * self.read_rate)
        compute = count_prefill_operations(self.model, batch, length) / (tp * self.flops * self.prefill_share)
        return np.maximum(weights, compute) + self._compute_fixed_seconds(tp) + self._reduce(tp, batch * length)

    def generation_seconds(self, tp: int, lengths: np.ndarray, replicas: int) -> float:
        """Seconds of a batch of ``lengths`` output tokens in one static layout; prompts left out.

        The longest request's replica decides; requests are dealt out in order of length.
        """
        longest = np.sort(lengths)[::-1][::replicas]
        step = np.arange(int(longest[0]))
        live = len(longest) - np.searchsorted(longest[::-1], step, side="right")
        return float(np.sum(self.step_seconds(tp, live, live * step)))

    def _compute_fixed_seconds(self, tp: int) -> float:
        return self.model.layers * (self.layer_seconds + 2 * 2 * (tp - 1) * self.hop_seconds)

    def _reduce(self, tp: int, tokens: Number) -> Number:
        return count_reduced_bytes(self.model, tp, tokens) / self.reduce_rate


def count_reduced_bytes(model: ModelSize, tp: int, tokens: Number) -> Number:
    """Bytes through a GPU's link for the two all-reduces of every layer over ``tokens`` hidden states."""
    return 2 * model.layers * ELEMENT * model.hidden * tokens * 2 * (tp - 1) / tp


def count_prefill_operations(model: ModelSize, batch: Number, length: Number) -> Number:
    """Number of operations of the matrix products of all layers and of causal attention; the output embedding of one
    position is left out."""
    attention = 2 * 2 * model.layers * model.heads * model.head_dim * length / 2
    return batch * length * (2 * model.token_parameters + attention)


# -- models and machines, and what was published of them -----------------------------------------------------------

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

A3B = ModelSize(
    name="qwen3-30b-a3b",
    architecture="Qwen3MoeForCausalLM",
    layers=48,
    hidden=2048,
    heads=32,
    kv_heads=4,
    head_dim=128,
    vocabulary=151936,
    experts=128,
    chosen=8,
    expert_intermediate=768,
)
MIXTRAL = ModelSize(
    name="mixtral-8x7b",
    architecture="MixtralForCausalLM",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocabulary=32000,
    experts=8,
    chosen=2,
    expert_intermediate=14336,
)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A GPU's peaks from its data sheet: bytes of memory, bytes a second of it and of its link one way, bf16 operations
    a second (dense).  ``tokens_per_gpu``: room for KV that the reference profiles count with."""

    name: str
    memory: float
    memory_rate: float
    flops: float
    link_rate: float
    tokens_per_gpu: int = 131072


A40 = Machine(name="NVIDIA A40 48GB", memory=48e9, memory_rate=696e9, flops=149.7e12, link_rate=25e9)
L40S = Machine(name="NVIDIA L40S 48GB", memory=48e9, memory_rate=864e9, flops=362e12, link_rate=25e9)
"""PCIe 4.0 ×16 as the A40 has, and no NVLink."""
H100 = Machine(
    name="NVIDIA H100 80GB SXM", memory=80e9, memory_rate=3.35e12, flops=989e12, link_rate=450e9, tokens_per_gpu=262144
)

FIG4 = ((2, 1, 15.37e-3), (8, 1, 9.64e-3), (2, 32, 24.41e-3), (8, 128, 30.87e-3))
"""PAT Fig. 4 on 8×A40: (tp, requests of a replica, step seconds); its batch of 128 is 32 a replica at TP2."""
FIG4_CONTEXT = 2048
"""Tokens, assumed: the text does not say.  Memory then delivers 84% of its peak; 1,024 would give 42%, 2,560 105%."""
A40_PREFILL = (8, 9, 12288, 19.01)
"""PAT section 5.4, KV by full prefill: tp, requests, tokens of each, seconds."""
H100_GENERATION = (2, 24576, 134.3)
"""PAT section 5.3, static generation: degree (assumed), cap on response tokens, seconds."""


def make_deepscaler_lengths(cap: int, count: int = 128) -> np.ndarray:
    """Response lengths, tokens, cut at ``cap``: quantiles of a lognormal with PAT Fig. 3b's shares over 8K and 16K."""
    quantiles = (np.arange(count) + 0.5) / count
    return np.minimum(np.exp(7.919 + 0.885 * ndtri(quantiles)), cap).astype(int)


@cache
def fit_a40_llama() -> Roofline:
    """Four published step times, linear in four unknowns: memory, all-reduce, hop and fixed time."""
    rows = np.array(
        [
            [
                (LLAMA.read_bytes + LLAMA.kv_bytes * batch * FIG4_CONTEXT) / tp,
                count_reduced_bytes(LLAMA, tp, batch),
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
    computing = (
        seconds - count_reduced_bytes(LLAMA, tp, batch * length) * link - LLAMA.layers * (layer + 4 * (tp - 1) * hop)
    )
    return Roofline(
        model=LLAMA,
        read_rate=1 / memory,
        flops=A40.flops,
        prefill_share=float(count_prefill_operations(LLAMA, batch, length) / (tp * A40.flops) / computing),
        reduce_rate=1 / link,
        hop_seconds=hop,
        layer_seconds=layer,
    )


@cache
def make_h100(model: ModelSize) -> Roofline:
    """The A40's shares of peak at the H100's peaks; the fixed time of a layer from PAT's 24K generation."""
    return fit_h100(model, make_deepscaler_lengths(H100_GENERATION[1]))


def fit_h100(model: ModelSize, lengths: np.ndarray) -> Roofline:
    """The H100's times, if PAT's generation had these lengths."""
    a40, (tp, cap, seconds) = fit_a40_llama(), H100_GENERATION

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

    free = roofline(LLAMA, 0.0).generation_seconds(tp, lengths, RANKS // tp)
    return roofline(model, (seconds - free) / (cap * LLAMA.layers))


def make_times(machine: Machine, model: ModelSize) -> Roofline:
    """Times of a model that has no published ones on a machine.

    The A40's numbers are those of Llama-3.1-8B there: rates and the time of a hop are the machine's, and the fixed time
    of a layer is taken for every model.  The L40S has its own peaks, and the A40's shares of them, link and fixed time.
    """
    if machine is H100:
        return make_h100(model)
    a40 = fit_a40_llama()
    return replace(
        a40, model=model, read_rate=a40.read_rate / A40.memory_rate * machine.memory_rate, flops=machine.flops,
        reduce_rate=a40.reduce_rate / A40.link_rate * machine.link_rate,
    )  # fmt: skip


A40_SOURCES = (
    "Step times: roofline of weight bytes, KV bytes, two ring all-reduces a layer and a fixed time a layer "
    "(studies/modelled.py); memory rate, all-reduce rate, hop latency and fixed time solved from "
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
MIXTURE_SOURCES = (
    *H100_SOURCES[:4],
    "Experts: a step reads those that any of its n tokens has chosen, E(1-(1-k/E)^n) of E where each chooses k evenly "
    "and by itself; each is read once, at the rate of dense weights.",
    "KV heads: copied where there are fewer than ranks, and then read by each.",
    "Held against one layer of experts of Qwen3-30B-A3B on an H100 (docs/results/gpu.md): 0.93 to 1.17 of this rate's "
    "time with 1 to 64 requests of a replica, 1.06 to 1.26 with 512.",
    "Doubt: no time of a whole step is in it. Real tokens choose less evenly, the responses to one prompt alike; the "
    "layers launch more.",
    "Room for KV: Qwen3-30B-A3B by this package's memory plan for 80 GB; Mixtral by its weights beside that.",
)

# -- switches: PAT's as published and scaled, and the arithmetic of this package's exchange ------------------------

SWITCHES = ((0, 0), (1, 2048), (4, 8192), (9, 12288), (32, 4096))
"""(live requests, KV tokens of each)."""

# PAT section 5.4: 8×A40, Llama-3.1-8B, TP2 → TP8, 9 requests of 12K tokens, seconds.
PAT_KV, PAT_WEIGHTS, PAT_GRAPHS, PAT_REST = 2.36, 1.03, 0.73, 1.40
PAT_TOKENS, PAT_KV_BYTES, PAT_WEIGHT_BYTES, PAT_LINK = 9 * 12288, 131072, 16059990016, 25e9

OUR_CONTROL = 25e-3
"""Votes, plan and installation: the middle of the 20-30 ms that CPU runs of this package take beside the exchange."""

Switches = tuple[tuple[SwitchSample, ...], tuple[str, ...]]
"""Samples, and the sources of their numbers."""


def pat_switches(
    model: ModelSize, read_rate: float, link_rate: float, degrees: tuple[int, ...], ranks: int
) -> Switches:
    """PAT's switches: all-gather of KV in the target group and of weights, graphs captured again.

    With ``top`` the larger degree, a rank receives the KV of ``top - 1`` of the ``ranks`` ranks, and of the weights
    the 1 - 1/from_tp that it has not.
    """
    samples: list[SwitchSample] = []
    for from_tp, to_tp in permutations(degrees, 2):
        wire = PAT_LINK / link_rate
        weights = PAT_WEIGHTS * wire * (model.weight_bytes * (1 - 1 / from_tp)) / (PAT_WEIGHT_BYTES / 2)
        # From TP1 nothing is received; the slice is read and written in place.
        weights = weights or 2 * model.weight_bytes / to_tp / read_rate
        per_token = PAT_KV / PAT_TOKENS * wire * model.kv_bytes / PAT_KV_BYTES * (max(from_tp, to_tp) - 1) / (8 - 1)
        for requests, length in SWITCHES:
            tokens = requests * length
            moved = tokens * model.kv_bytes * (max(from_tp, to_tp) - 1)
            phases = {"kv": per_token * tokens, "weights": weights, "graphs": PAT_GRAPHS, "install": PAT_REST}
            samples.append(_switch_sample(from_tp, to_tp, requests, tokens, moved, phases))
    return tuple(samples), (
        "Switch: PAT section 5.4 (8×A40, Llama-3.1-8B, TP2 → TP8, 9 requests of 12K tokens): KV 2.36 s, weights "
        "1.03 s, graphs 0.73 s, the rest 1.40 s.",
        "Scaled to other pairs, models and machines: KV and weights by the bytes a rank receives in PAT's all-gathers "
        "over its link's rate one way (25 GB/s A40, 450 GB/s H100); graphs and the rest unchanged, also on the H100, "
        "for which PAT published no switch.",
    )


def our_switches(
    model: ModelSize, read_rate: float, link_rate: float, degrees: tuple[int, ...], ranks: int
) -> Switches:
    """This package's switches: all-to-all of the slices that change rank; weights stay where they are.

    The busiest rank decides: at the lower degree its replica has ceil(requests / replicas) of them.
    """
    samples: list[SwitchSample] = []
    for from_tp, to_tp in permutations(degrees, 2):
        low, share = min(from_tp, to_tp), count_sent_share(model, from_tp, to_tp)
        for requests, length in SWITCHES:
            tokens = requests * length
            busiest = -(-requests // (ranks // low)) * length * model.kv_bytes / min(low, model.kv_heads) * share
            phases = {"kv": busiest / link_rate, "install": OUR_CONTROL}
            moved = tokens * model.kv_bytes * model.count_kv_heads(low) * low / model.kv_heads * share
            samples.append(_switch_sample(from_tp, to_tp, requests, tokens, moved, phases))
    return tuple(samples), (
        "Switch, KV: bytes that the busiest rank sends in an all-to-all over its link's rate one way (25 GB/s A40, "
        "450 GB/s H100), as in 9 requests of 12K tokens: 72 ms for 8×A40 TP2 → TP8, 6.3 ms for 8×H100 TP1 → TP8; "
        "no overhead of packing, so a lower bound.",
        "Switch, control: 25 ms, the middle of the 20-30 ms of sglang_pat's runs on CPU; not measured on a GPU.",
    )


def count_sent_share(model: ModelSize, from_tp: int, to_tp: int) -> float:
    """Share of the KV that a rank has in the lower degree that it sends (tp is raised) or receives (tp is lowered).

    Without copied heads this is 1 - low/high either way.  With copies a raise sends each head to all that copy it, and
    a rank that lowers has it already.
    """
    low, high = sorted((from_tp, to_tp))
    kept = model.count_kv_heads(high) / model.count_kv_heads(low)
    return (high // low - 1) * kept if to_tp == high else 1 - kept


def _switch_sample(
    from_tp: int, to_tp: int, requests: int, tokens: int, moved: float, phases: dict[str, float]
) -> SwitchSample:
    phases = {name: round(seconds, 9) for name, seconds in phases.items()}
    return SwitchSample(
        from_tp=from_tp,
        to_tp=to_tp,
        requests=requests,
        tokens=tokens,
        mode="migrate",
        moved_bytes=round(moved),
        pause_seconds=round(sum(phases.values()), 9),
        prepare_seconds=0.0,
        phases=phases,
    )


# -- the profiles ----------------------------------------------------------------------------------------------------

MIXTURE_BATCHES = (*BATCHES, 512, 1024)
"""Batches of a mixture, for which a high degree is best in large rounds as well."""

MIXTURE_ROOM = {(A3B.name, 1): 75_008, (A3B.name, 2): 683_264, (A3B.name, 4): 1_889_536, (MIXTRAL.name, 2): 303_616}
"""KV tokens of a replica of the base layout on 8 GPUs of 80 GB, by (model, base degree), as the memory plan has it; a
test holds them near it."""

CASES: tuple[tuple[str, Machine, ModelSize, int, tuple[str, ...]], ...] = (
    ("8xA40-llama3.1-8b", A40, LLAMA, 2, A40_SOURCES),
    ("8xH100-llama3.1-8b", H100, LLAMA, 1, H100_SOURCES),
    ("8xH100-qwen3-14b", H100, QWEN, 2, H100_SOURCES),
    ("8xH100-qwen2.5-32b", H100, QWEN_32B, 2, H100_SOURCES),
    ("8xH100-qwen3-30b-a3b", H100, A3B, 2, MIXTURE_SOURCES),
    ("8xH100-mixtral-8x7b", H100, MIXTRAL, 2, MIXTURE_SOURCES),
)
"""(name, machine, model, base degree, sources)."""


def count_room(machine: Machine, model: ModelSize, base_tp: int) -> dict[int, int]:
    """KV tokens that a replica has room for, by degree.  A rank's pool has the same bytes in every layout."""
    base = MIXTURE_ROOM[model.name, base_tp] if model.experts else machine.tokens_per_gpu * base_tp
    heads = model.count_kv_heads(base_tp)
    return {tp: base * heads // model.count_kv_heads(tp) for tp in (1, 2, 4, 8) if tp >= base_tp}


def build(
    machine: Machine,
    model: ModelSize,
    base_tp: int,
    sources: tuple[str, ...],
    pat_costs: bool,
    times: Roofline | None = None,
    axes: tuple[Sequence[int], Sequence[int]] | None = None,
    room: dict[int, int] | None = None,
) -> Profile:
    """One reference profile, with PAT's switch costs or with those of this package's exchange.

    Args:
        times: of the steps; None for the machine's.
        axes: batches and contexts; None for those of the files.
        room: KV tokens of a replica by degree; None for that of the files.
    """
    times = times or (fit_a40_llama() if machine is A40 else make_h100(model))
    batches, contexts = axes or (MIXTURE_BATCHES if model.experts else BATCHES, CONTEXTS)
    room = room or count_room(machine, model, base_tp)
    degrees = tuple(room)
    grid = [
        (tp, RANKS // tp, batch, context)
        for tp in degrees
        for batch in batches
        for context in contexts
        if batch * context <= room[tp]
    ]
    decode = ((point, times.step_seconds(point[0], point[2], point[2] * point[3])) for point in grid)
    prefill = ((point, times.prefill_seconds(point[0], point[2], point[3])) for point in grid if point[2] <= 32)
    costs = pat_switches if pat_costs else our_switches
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
            kv_tokens=room[base_tp],
            max_running=max(batches),
            sglang="0.4.8 (PAT's)",
            torch="2.7.1 (PAT's)",
            package="modelled",
        ),
        sources=sources + why,
        complete=True,
        grid={"batch": list(batches), "context": list(contexts)},
        decode=tuple(
            DecodePoint(tp=tp, replicas=n, batch=b, context=c, seconds=_round_seconds(seconds), samples=())
            for (tp, n, b, c), seconds in decode
        ),
        prefill=tuple(
            PrefillPoint(tp=tp, replicas=n, batch=b, length=c, seconds=_round_seconds(seconds), samples=())
            for (tp, n, b, c), seconds in prefill
        ),
        switches=switches,
    )


def make_references() -> dict[str, Profile]:
    """Reference profiles by file name."""
    return {
        f"{name}{'-pat-costs' if pat else ''}.json": build(machine, model, base_tp, sources, pat_costs=pat)
        for name, machine, model, base_tp, sources in CASES
        for pat in ((False,) if model.experts else (False, True))
    }


def _round_seconds(seconds: Number) -> float:
    """Round to a nanosecond, so that files do not differ between machines' linear algebra."""
    return round(float(seconds), 9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PROFILES, help="folder to write to")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, profile in make_references().items():
        save(profile, out / name)
        print(out / name)


if __name__ == "__main__":
    main()
