"""What a profile must be besides of the right types: its parts fit each other, and what is complete can predict.

Every function raises a ValueError that says which field, what is there and what is expected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sglang_pat.files import wrong
from sglang_pat.layout import ParallelLayout, candidate_layouts

if TYPE_CHECKING:
    from sglang_pat.predict.profile import Fingerprint, Profile, SwitchSample

NUMBERS = ("temperature", "spent_seconds", "sessions", "others_share", "left_out", "failed")
"""Of ``machine``: what a sweep counts with when it goes on."""
MOST = 1e9


def check(profile: Profile) -> None:
    """The whole profile."""
    mark = profile.fingerprint
    _layouts(mark)
    _points("decode", profile.decode, "context", mark)
    _points("prefill", profile.prefill, "length", mark)
    _switches(profile.switches, mark)
    for place, setup in enumerate(profile.setup):
        _degree(f"setup[{place}].tp", setup.tp, mark)
    _once("setup", ((setup.tp,) for setup in profile.setup))
    for name in NUMBERS:
        value = profile.machine.get(name, 0)
        if not isinstance(value, int | float) or not 0 <= value <= MOST:
            raise wrong(f"machine.{name}", value, f"expected a number from 0 to {MOST:.0f}")
    for name, axis in profile.grid.items():
        if axis != sorted(set(axis)):
            raise wrong(f"grid.{name}", axis, "expected ascending numbers, each once")
    if profile.complete:
        suffices(profile)


def suffices(profile: Profile) -> None:
    """Whether the engine can predict from it: a step in every candidate layout, and a switch to each of them."""
    mark = profile.fingerprint
    for tp in mark.degrees:
        dp = mark.num_ranks // tp
        if not any((point.tp, point.replicas) == (tp, dp) for point in profile.decode):
            raise wrong("decode", profile.decode, f"no decode times of tp={tp}, with all {dp} replicas at work")
    if not profile.switches:
        raise wrong("switches", profile.switches, "no switches")
    if not any(sample.mode == "migrate" and sample.tokens for sample in profile.switches):
        for tp in mark.degrees:
            if not any(point.tp == tp for point in profile.prefill):
                raise wrong("switches", profile.switches, f"they can neither move nor recompute KV to tp={tp}")


def _layouts(mark: Fingerprint) -> None:
    if mark.num_ranks % mark.base_tp:
        raise wrong("fingerprint.base_tp", mark.base_tp, f"expected a divisor of the {mark.num_ranks} ranks")
    base = ParallelLayout(mark.base_tp, mark.num_ranks // mark.base_tp)
    try:
        allowed = tuple(layout.tp for layout in candidate_layouts(base, list(mark.degrees)))
    except ValueError as error:
        raise wrong("fingerprint.degrees", mark.degrees, str(error)) from None
    if mark.degrees != allowed:
        given = ", ".join(map(str, mark.degrees[:20]))
        expected = f"expected ascending degrees, each once, from the base {mark.base_tp}; given are {given or 'none'}"
        raise wrong("fingerprint.degrees", mark.degrees, expected)


def _points(name: str, points: Sequence[Any], length: str, mark: Fingerprint) -> None:
    for place, point in enumerate(points):
        _degree(f"{name}[{place}].tp", point.tp, mark)
        if point.replicas > (dp := mark.num_ranks // point.tp):
            expected = f"expected at most {dp}, as {mark.num_ranks} ranks have of tp={point.tp}"
            raise wrong(f"{name}[{place}].replicas", point.replicas, expected)
    _once(name, ((point.tp, point.replicas, point.batch, getattr(point, length)) for point in points))


def _switches(samples: Sequence[SwitchSample], mark: Fingerprint) -> None:
    for place, sample in enumerate(samples):
        _degree(f"switches[{place}].from_tp", sample.from_tp, mark)
        _degree(f"switches[{place}].to_tp", sample.to_tp, mark)
        if sample.from_tp == sample.to_tp:
            raise wrong(f"switches[{place}].to_tp", sample.to_tp, "expected another degree than from_tp")


def _degree(field: str, tp: int, mark: Fingerprint) -> None:
    if tp not in mark.degrees:
        raise wrong(field, tp, f"expected one of the degrees {', '.join(map(str, mark.degrees))}")


def _once(name: str, keys: Iterable[tuple[int, ...]]) -> None:
    """Each key is there once."""
    first: dict[tuple[int, ...], int] = {}
    for place, key in enumerate(keys):
        if (other := first.setdefault(key, place)) != place:
            raise wrong(f"{name}[{place}]", (), f"the same point as {name}[{other}], expected each once")
