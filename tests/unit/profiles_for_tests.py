"""Profiles made from formulas."""

from __future__ import annotations

from sglang_pat.predict.profile import DecodePoint, Fingerprint, PrefillPoint, Profile, SwitchSample

LAYOUTS = ((1, 4), (2, 2), (4, 1))
"""(tp, replicas) of four ranks."""

FINGERPRINT = Fingerprint(
    model="LlamaForCausalLM L2 H64 heads4/4 I128 V512",
    dtype="float32",
    device="CPU",
    num_ranks=4,
    base_tp=1,
    degrees=(1, 2, 4),
    link="none",
    weights="resident",
    kv_tokens=65536,
    max_running=16,
    sglang="0.5.12.post1",
    torch="2.13.0",
    package="0.1.0",
)


def decode_points(seconds, batches, contexts, layouts=LAYOUTS) -> tuple[DecodePoint, ...]:
    """``seconds(tp, replicas, batch, context)``."""
    return tuple(
        DecodePoint(tp=tp, replicas=n, batch=b, context=c, seconds=seconds(tp, n, b, c), samples=())
        for tp, n in layouts
        for b in batches
        for c in contexts
    )


def prefill_points(seconds, batches, lengths, layouts=LAYOUTS) -> tuple[PrefillPoint, ...]:
    """``seconds(tp, replicas, batch, length)``."""
    return tuple(
        PrefillPoint(tp=tp, replicas=n, batch=b, length=c, seconds=seconds(tp, n, b, c), samples=())
        for tp, n in layouts
        for b in batches
        for c in lengths
    )


def switch_sample(from_tp, to_tp, requests, tokens, mode="migrate", prepare=0.0, **phases) -> SwitchSample:
    """The pause is the sum of the phases."""
    return SwitchSample(
        from_tp=from_tp,
        to_tp=to_tp,
        requests=requests,
        tokens=tokens,
        mode=mode,
        moved_bytes=0,
        pause_seconds=sum(phases.values()),
        prepare_seconds=prepare,
        phases=phases,
    )


def profile(**parts) -> Profile:
    """Complete; with decode, prefill and switch times of some formula unless given."""
    parts.setdefault("decode", decode_points(lambda tp, n, b, c: (4e-3 + 1e-8 * b * c) / tp, (1, 2, 4), (128, 1024)))
    parts.setdefault("prefill", prefill_points(lambda tp, n, b, c: 1e-5 * b * c / tp, (1, 2, 4), (128, 1024)))
    parts.setdefault("switches", (switch_sample(1, 4, 2, 100, kv=1e-3, install=1e-2),))
    return Profile(**{"fingerprint": FINGERPRINT, "complete": True, **parts})
