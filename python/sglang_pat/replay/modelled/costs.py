"""Switch costs for reference profiles: PAT's as published and scaled, and the arithmetic of this package's exchange."""

from __future__ import annotations

from itertools import permutations

from sglang_pat.predict.profile import SwitchSample
from sglang_pat.replay.modelled.roofline import ModelSize

CASES = ((0, 0), (1, 2048), (4, 8192), (9, 12288), (32, 4096))
"""(live requests, KV tokens of each)."""

# PAT section 5.4: 8×A40, Llama-3.1-8B, TP2 → TP8, 9 requests of 12K tokens, seconds.
PAT_KV, PAT_WEIGHTS, PAT_GRAPHS, PAT_REST = 2.36, 1.03, 0.73, 1.40
PAT_TOKENS, PAT_KV_BYTES, PAT_WEIGHT_BYTES, PAT_LINK = 9 * 12288, 131072, 16059990016, 25e9

OUR_CONTROL = 25e-3
"""Votes, plan and installation: the middle of the 20-30 ms that CPU runs of this package take beside the exchange."""

Switches = tuple[tuple[SwitchSample, ...], tuple[str, ...]]
"""Samples, and the sources of their numbers."""


def pat(model: ModelSize, read_rate: float, link_rate: float, degrees: tuple[int, ...], ranks: int) -> Switches:
    """All-gather of KV in the target group and of weights, graphs captured again.

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
        for requests, length in CASES:
            tokens = requests * length
            moved = tokens * model.kv_bytes * (max(from_tp, to_tp) - 1)
            phases = {"kv": per_token * tokens, "weights": weights, "graphs": PAT_GRAPHS, "install": PAT_REST}
            samples.append(_sample(from_tp, to_tp, requests, tokens, moved, phases))
    return tuple(samples), (
        "Switch: PAT section 5.4 (8×A40, Llama-3.1-8B, TP2 → TP8, 9 requests of 12K tokens): KV 2.36 s, weights "
        "1.03 s, graphs 0.73 s, the rest 1.40 s.",
        "Scaled to other pairs, models and machines: KV and weights by the bytes a rank receives in PAT's all-gathers "
        "over its link's rate one way (25 GB/s A40, 450 GB/s H100); graphs and the rest unchanged, also on the H100, "
        "for which PAT published no switch.",
    )


def ours(model: ModelSize, read_rate: float, link_rate: float, degrees: tuple[int, ...], ranks: int) -> Switches:
    """All-to-all of the slices that change rank; weights stay where they are.

    The busiest rank decides: at the lower degree its replica has ceil(requests / replicas) of them.
    """
    samples: list[SwitchSample] = []
    for from_tp, to_tp in permutations(degrees, 2):
        low, share = min(from_tp, to_tp), 1 - min(from_tp, to_tp) / max(from_tp, to_tp)
        for requests, length in CASES:
            tokens = requests * length
            busiest = -(-requests // (ranks // low)) * length * model.kv_bytes / low * share
            phases = {"kv": busiest / link_rate, "install": OUR_CONTROL}
            moved = tokens * model.kv_bytes * share
            samples.append(_sample(from_tp, to_tp, requests, tokens, moved, phases))
    return tuple(samples), (
        "Switch, KV: bytes that the busiest rank sends in an all-to-all over its link's rate one way (25 GB/s A40, "
        "450 GB/s H100), as in 9 requests of 12K tokens: 72 ms for 8×A40 TP2 → TP8, 6.3 ms for 8×H100 TP1 → TP8; "
        "no overhead of packing, so a lower bound.",
        "Switch, control: 25 ms, the middle of the 20-30 ms of sglang_pat's runs on CPU; not measured on a GPU.",
    )


def _sample(
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
