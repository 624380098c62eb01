"""The profile of one deployment: what ``python -m profiler.sweep`` writes and the engine reads.

Readable JSON with the raw samples; nothing in it is fitted.  Fits are made when a profile is loaded
(``sglang_pat.predict.predictor``, ``sglang_pat.predict.cost``), so a better fit needs no new sweep.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import msgspec

VERSION = 2
"""Of the file's format."""


INFORMATIVE = ("kv_tokens", "max_running")
"""Fields of a fingerprint that may differ."""


class ProfileError(ValueError):
    """A profile that cannot be used; one line with what was given, what is needed, what to do."""


def cpu_model() -> str:
    """Name of this machine's CPU; its architecture where the system does not say."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What a profile holds for.  Loaded for anything else it is refused.

    Attributes:
        model: architecture and sizes, e.g. ``LlamaForCausalLM L30 H576 heads12/4 I1536 V49152``.
        dtype: of weights and KV.
        device: CPU or GPU model; ``attention``: SGLang's attention backend.
        num_ranks, base_tp: N and the lowest degree.
        degrees: candidate degrees, ascending, base first.
        link: emulated link between CPU ranks, or ``none``.
        weights: ``resident`` or ``reshard``; kv_exchange: ``direct``, ``alltoall`` or ``allgather``.
        kv_tokens: KV tokens that one replica of the base layout holds; max_running: most requests that it decodes
            at once.  They bound what was measured and do not change it, so they may differ.
        sglang, torch, package: versions of SGLang, torch and sglang_pat.
    """

    model: str
    dtype: str
    device: str
    attention: str = "default"
    num_ranks: int
    base_tp: int
    degrees: tuple[int, ...]
    link: str
    weights: str
    kv_exchange: str = "direct"
    kv_tokens: int
    max_running: int
    sglang: str
    torch: str
    package: str


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

    tp: int
    replicas: int
    batch: int
    context: int
    seconds: float
    samples: tuple[float, ...]


class PrefillPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Time to prefill ``batch`` requests of ``length`` tokens on each of ``replicas`` replicas at once."""

    tp: int
    replicas: int
    batch: int
    length: int
    seconds: float
    samples: tuple[float, ...]


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

    from_tp: int
    to_tp: int
    requests: int
    tokens: int
    mode: str
    moved_bytes: int
    pause_seconds: float
    prepare_seconds: float
    phases: dict[str, float]


class LayoutSetup(msgspec.Struct, frozen=True, kw_only=True):
    """One-time work for a layout at start, seconds: groups, model object and buffers, graphs."""

    tp: int
    groups_seconds: float
    build_seconds: float
    graphs_seconds: float


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A whole profile.

    Attributes:
        kind: ``measured``, or ``modelled`` from published numbers and bandwidths.
        sources: for a modelled profile, where each number comes from.
        machine: free-form description (cores, load, kernel, date).
        complete: False while a sweep is under way or was interrupted.
        grid: what the sweep was asked to measure.
        window: decode steps in a window.
    """

    version: int = VERSION
    kind: str = "measured"
    fingerprint: Fingerprint
    machine: dict[str, str | int | float] = {}
    sources: tuple[str, ...] = ()
    complete: bool = False
    window: int = 60
    grid: dict[str, list[int]] = {}
    decode: tuple[DecodePoint, ...] = ()
    prefill: tuple[PrefillPoint, ...] = ()
    switches: tuple[SwitchSample, ...] = ()
    setup: tuple[LayoutSetup, ...] = ()


def load(path: str | os.PathLike) -> Profile:
    """Read a profile.

    Raises:
        ProfileError: no such file, not a profile, or of another format version.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ProfileError(f"profile {path}: {error.strerror}; make one with python -m profiler.sweep") from None
    try:
        found = msgspec.json.decode(data, type=dict)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProfileError(f"profile {path} is not JSON ({error}); make one with python -m profiler.sweep") from None
    if found.get("version") != VERSION:
        raise ProfileError(
            f"profile {path} has format version {found.get('version')}, this package reads {VERSION}; sweep again"
        )
    try:
        return msgspec.convert(found, Profile, strict=False)
    except msgspec.ValidationError as error:
        raise ProfileError(f"profile {path}: {error}; sweep again") from None


def save(profile: Profile, path: str | os.PathLike) -> None:
    """Write a profile, whole or not at all."""
    path = Path(path)
    text = msgspec.json.format(msgspec.json.encode(profile), indent=1)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(text + b"\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_fits(profile: Profile, deployment: Fingerprint, path: str | os.PathLike = "") -> None:
    """Raise :class:`ProfileError` naming the first field in which ``profile`` is for another deployment."""
    for name in sorted(set(Fingerprint.__struct_fields__) - set(INFORMATIVE), key=Fingerprint.__struct_fields__.index):
        theirs, ours = getattr(profile.fingerprint, name), getattr(deployment, name)
        if theirs != ours:
            raise ProfileError(
                f"profile {path} was made for {name}={theirs!r}, this deployment has {ours!r}; "
                "make one for it with python -m profiler.sweep"
            )
    if not profile.complete:
        raise ProfileError(f"profile {path} is of an interrupted sweep; run the same profiler.sweep again to finish it")
