"""The profile of one deployment (:class:`Profile`): what ``python -m profiler.sweep`` writes and the engine reads.

Readable JSON with the raw samples; nothing in it is fitted.  Fits are made when a profile is loaded
(``sglang_pat.predict.predictor``, ``sglang_pat.predict.cost``), so a better fit needs no new sweep.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from sglang_pat import files
from sglang_pat.files import make_field_error
from sglang_pat.layout import ParallelLayout, list_candidate_layouts

VERSION = 2
"""Version of the file's format."""

MAKE_ONE = "make one with python -m profiler.sweep"

Time = Annotated[float, Meta(ge=1e-9, le=3600.0)]
"""Seconds of what takes some time: a step, a prefill."""
Part = Annotated[float, Meta(ge=0.0, le=3600.0)]
"""Seconds of what may take no time."""
Ranks = Annotated[int, Meta(ge=1, le=1024)]
Count = Annotated[int, Meta(ge=1, le=1 << 16)]
"""Number of requests that there are."""
Tokens = Annotated[int, Meta(ge=1, le=1 << 24)]
"""Tokens of one request."""
Size = Annotated[int, Meta(ge=0, le=1 << 50)]
"""Number of bytes, or of the tokens of many requests."""
Name = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f]*\Z", max_length=500)]
"""A text of one line."""
Samples = Annotated[tuple[Time, ...], Meta(max_length=10_000)]
MOST_POINTS = 4096
"""Most points of a kind: a surface through more would take more memory than there is."""


THIN = 0.5
"""Share of the points of a sweep from which on its profile is not called thin."""

COUNTED = ("points", "left_out", "failed", "sessions", "spent_seconds", "others_share")
"""Entries of a profile's ``machine`` that are numbers: a sweep goes on with them."""

INFORMATIVE = ("kv_tokens", "max_running")
"""Fields of a fingerprint that may differ."""


class ProfileError(ValueError):
    """A profile that cannot be used; one line with what was given, what is needed, what to do."""


def read_cpu_model() -> str:
    """Name of this machine's CPU; its architecture where the system does not say."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What a profile holds for.  Loaded for anything else it is refused.

    Attributes:
        model: architecture and sizes, e.g. ``LlamaForCausalLM L30 H576 heads12/4 I1536 V49152``.
        dtype: type of weights and KV.
        device: CPU or GPU model; ``attention``: SGLang's attention backend.
        num_ranks, base_tp: N and the lowest degree.
        degrees: candidate degrees, ascending, base first.
        link: emulated link between CPU ranks, or ``none``.
        weights: ``resident`` or ``reshard``; kv_exchange: ``direct``, ``alltoall`` or ``allgather``.
        kv_tokens: KV tokens that one replica of the base layout holds; max_running: most requests that it decodes
            at once.  They bound what was measured and do not change it, so they may differ.
        sglang, torch, package: versions of SGLang, torch and sglang_pat.
    """

    model: Name
    dtype: Name
    device: Name
    attention: Name = "default"
    num_ranks: Ranks
    base_tp: Ranks
    degrees: tuple[Ranks, ...]
    link: Name
    weights: Name
    kv_exchange: Name = "direct"
    kv_tokens: Annotated[int, Meta(ge=1, le=1 << 40)]
    max_running: Annotated[int, Meta(ge=1, le=1 << 24)]
    sglang: Name
    torch: Name
    package: Name


class DecodePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Decode step time of a replica.

    Attributes:
        tp: degree.
        replicas: replicas that decoded at the same time, each with ``batch`` requests.
        batch: requests of each of them.
        context: tokens of each request, in the middle of the window.
        seconds: step time, the median of the samples.
        samples: mean step time (seconds) of each measured window.
    """

    tp: Ranks
    replicas: Ranks
    batch: Count
    context: Tokens
    seconds: Time
    samples: Samples


class PrefillPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Time to prefill ``batch`` requests of ``length`` tokens on each of ``replicas`` replicas at once."""

    tp: Ranks
    replicas: Ranks
    batch: Count
    length: Tokens
    seconds: Time
    samples: Samples


class SwitchSample(msgspec.Struct, frozen=True, kw_only=True):
    """One measured switch.

    Attributes:
        requests: live requests of the whole engine; ``tokens`` their KV tokens, each shared one once.
        mode: what happened to their KV: ``migrate`` or ``recompute``.
        moved_bytes: KV bytes sent between ranks, all ranks together.
        pause_seconds: no step ran for this long.
        prepare_seconds: work ahead of the pause.
        phases: seconds by phase, slowest rank.
    """

    from_tp: Ranks
    to_tp: Ranks
    requests: Annotated[int, Meta(ge=0, le=1 << 24)]
    tokens: Size
    mode: Literal["migrate", "recompute"]
    moved_bytes: Size
    pause_seconds: Part
    prepare_seconds: Part
    phases: Annotated[dict[Name, Part], Meta(max_length=64)]


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A whole profile.

    Attributes:
        kind: ``measured``, or ``modelled`` from published numbers and bandwidths.
        sources: where each number of a modelled profile comes from.
        machine: free-form description (cores, load, kernel, date).
        complete: False while a sweep is under way or was interrupted.
        grid: what the sweep was asked to measure.
        window: decode steps in a window.
    """

    version: int = VERSION
    kind: Literal["measured", "modelled"] = "measured"
    fingerprint: Fingerprint
    machine: dict[Name, str | int | float] = {}
    sources: tuple[str, ...] = ()
    complete: bool = False
    window: Count = 60
    grid: dict[Name, list[Tokens]] = {}
    decode: Annotated[tuple[DecodePoint, ...], Meta(max_length=MOST_POINTS)] = ()
    prefill: Annotated[tuple[PrefillPoint, ...], Meta(max_length=MOST_POINTS)] = ()
    switches: Annotated[tuple[SwitchSample, ...], Meta(max_length=MOST_POINTS)] = ()


def load(path: str | os.PathLike[str], *, complete: bool = False) -> Profile:
    """Read and check a profile: what this returns, everything that takes a profile works with.

    Args:
        complete: whether one of an interrupted sweep is refused.  It can be drawn and gone on with; to predict from it
            (:func:`~sglang_pat.predict.cost.build_predictors`) there may be too little in it.

    Raises:
        ProfileError: no such file, not a profile, of another format version, or a field that cannot be.
    """
    try:
        fields = files.decode(files.read(path), dict[str, Any])
        version = fields.get("version")
        if isinstance(version, int) and version != VERSION:
            raise ValueError(f"has format version {version}, this package reads {VERSION}")
        if version != VERSION:
            raise files.make_field_error("version", version, f"expected {VERSION}, as profiles have it")
        profile = files.convert(fields, Profile)
        check(profile)
    except ValueError as error:
        raise ProfileError(f"profile {path}: {error}; {MAKE_ONE}") from None
    if complete:
        check_complete(profile, path)
    return profile


def check_complete(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Raise :class:`ProfileError` for one of an interrupted sweep."""
    if not profile.complete:
        raise ProfileError(f"profile {path} is of an interrupted sweep; run the same profiler.sweep again to finish it")


def describe_thinness(profile: Profile) -> str:
    """What to say of a profile of which less than :data:`THIN` was measured; nothing of others."""
    points = int(profile.machine.get("points", 0))
    measured = points - int(profile.machine.get("left_out", 0)) - int(profile.machine.get("failed", 0))
    if measured >= THIN * points:
        return ""
    return f"a thin profile: {measured} of {points} points were measured, the others are guessed from these"


def save(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile, whole or not at all."""
    files.write(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n", path)


def check_fits(profile: Profile, deployment: Fingerprint, path: str | os.PathLike[str] = "") -> None:
    """Raise :class:`ProfileError` naming the first field in which ``profile`` is for another deployment."""
    for name in (field for field in Fingerprint.__struct_fields__ if field not in INFORMATIVE):
        theirs, ours = getattr(profile.fingerprint, name), getattr(deployment, name)
        if theirs != ours:
            raise ProfileError(
                f"profile {path} was made for {name}={theirs!r}, this deployment has {ours!r}; "
                "make one for it with python -m profiler.sweep"
            )
    check_complete(profile, path)


def check(profile: Profile) -> None:
    mark = profile.fingerprint
    _check_layouts(mark)
    for name in COUNTED:
        if isinstance(value := profile.machine.get(name), str):
            raise make_field_error(f"machine.{name}", value, "expected a number, as the sweep counts it")
    _check_points("decode", profile.decode, "context", mark)
    _check_points("prefill", profile.prefill, "length", mark)
    _check_switches(profile.switches, mark)
    if profile.complete:
        check_sufficient(profile)


def check_sufficient(profile: Profile) -> None:
    """Check that the engine can predict from the profile: it has a step in every candidate layout, and a switch to each
    of them."""
    mark = profile.fingerprint
    for tp in mark.degrees:
        dp = mark.num_ranks // tp
        if not any((point.tp, point.replicas) == (tp, dp) for point in profile.decode):
            raise make_field_error(
                "decode", profile.decode, f"no decode times of tp={tp}, with all {dp} replicas at work"
            )
    if not profile.switches:
        raise make_field_error("switches", profile.switches, "no switches")
    if not any(sample.mode == "migrate" and sample.tokens for sample in profile.switches):
        for tp in mark.degrees:
            if not any(point.tp == tp for point in profile.prefill):
                raise make_field_error(
                    "switches", profile.switches, f"they can neither move nor recompute KV to tp={tp}"
                )


def _check_layouts(mark: Fingerprint) -> None:
    if mark.num_ranks % mark.base_tp:
        raise make_field_error("fingerprint.base_tp", mark.base_tp, f"expected a divisor of the {mark.num_ranks} ranks")
    base = ParallelLayout(mark.base_tp, mark.num_ranks // mark.base_tp)
    try:
        allowed = tuple(layout.tp for layout in list_candidate_layouts(base, list(mark.degrees)))
    except ValueError as error:
        raise make_field_error("fingerprint.degrees", mark.degrees, str(error)) from None
    if mark.degrees != allowed:
        listed = ", ".join(map(str, mark.degrees[:20]))
        expected = f"expected ascending degrees, each once, from the base {mark.base_tp}; given are {listed or 'none'}"
        raise make_field_error("fingerprint.degrees", mark.degrees, expected)


def _check_points(name: str, points: Sequence[Any], length: str, mark: Fingerprint) -> None:
    first: dict[tuple[int, ...], int] = {}
    for place, point in enumerate(points):
        _check_degree(f"{name}[{place}].tp", point.tp, mark)
        if point.replicas > (dp := mark.num_ranks // point.tp):
            expected = f"expected at most {dp}, as {mark.num_ranks} ranks have of tp={point.tp}"
            raise make_field_error(f"{name}[{place}].replicas", point.replicas, expected)
        key = (point.tp, point.replicas, point.batch, getattr(point, length))
        if (other := first.setdefault(key, place)) != place:
            raise make_field_error(f"{name}[{place}]", (), f"the same point as {name}[{other}], expected each once")


def _check_switches(samples: Sequence[SwitchSample], mark: Fingerprint) -> None:
    for place, sample in enumerate(samples):
        _check_degree(f"switches[{place}].from_tp", sample.from_tp, mark)
        _check_degree(f"switches[{place}].to_tp", sample.to_tp, mark)
        if sample.from_tp == sample.to_tp:
            raise make_field_error(f"switches[{place}].to_tp", sample.to_tp, "expected another degree than from_tp")


def _check_degree(field: str, tp: int, mark: Fingerprint) -> None:
    if tp not in mark.degrees:
        raise make_field_error(field, tp, f"expected one of the degrees {', '.join(map(str, mark.degrees))}")
