"""The profile while it grows (:class:`Store`): what is measured already, saved after each point, whole or not at
all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from profiler.grid import Grid, Point
from sglang_pat.predict.profile import (
    INFORMATIVE,
    DecodePoint,
    Fingerprint,
    PrefillPoint,
    Profile,
    SwitchSample,
    load,
    save,
)
from sglang_pat.tools.commands import UsageError


def load_existing(path: Path) -> Profile | None:
    """The profile at ``path``, to go on with; None if there is none.

    Raises:
        ProfileError: something else is there.
        UsageError: no such folder, or a profile that no sweep made.
    """
    if path.is_dir() or not path.parent.is_dir():
        wrong = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise UsageError(f"--out {path} {wrong}; give a file to write the profile to")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"--out {path} cannot be written to; give another file")
    if not path.exists():
        return None
    profile = load(path)
    if profile.kind != "measured":
        raise UsageError(f"--out {path} is a {profile.kind} profile; give another file")
    try:
        grid = Grid(**{name: tuple(axis) for name, axis in profile.grid.items()})
    except (TypeError, UsageError) as error:
        raise UsageError(f"--out {path} has no grid to go on with ({error}); give another file") from None
    return msgspec.structs.replace(profile, grid=grid.as_lists())  # an axis that is not there is the default one


def check_asked(path: Path, profile: Profile, grid: str) -> None:
    """Whether a sweep of this ``--grid`` (canonical) may go on with ``profile``.  Raises UsageError."""
    _compare(path, [("grid", profile.machine.get("grid"), grid)])


def check_same(path: Path, profile: Profile, deployment: Fingerprint) -> None:
    """Whether a sweep of ``deployment`` may go on with ``profile``.

    The sizes of the pools only bound what is measured; the grid stays that of the first session.

    Raises:
        UsageError: naming the first field that differs.
    """
    ours, theirs = (msgspec.structs.asdict(mark) for mark in (deployment, profile.fingerprint))
    _compare(path, [(name, theirs[name], ours[name]) for name in ours if name not in INFORMATIVE])


def _compare(path: Path, pairs: list[tuple[str, object, object]]) -> None:
    for name, before, now in pairs:
        if before != now:
            raise UsageError(
                f"--out {path} was measured with {name}={before!r}, this sweep has {now!r}; "
                "give another --out, or remove the file"
            )


class Store:
    """A profile on its way to ``path``.  Every ``add`` saves it."""

    def __init__(self, path: Path, profile: Profile) -> None:
        self.path, self.profile = path, profile

    @property
    def spent(self) -> float:
        """Seconds of all sessions so far."""
        return float(self.profile.machine.get("spent_seconds", 0.0))

    def find_point(self, measured: DecodePoint | PrefillPoint | SwitchSample) -> Point:
        """The point of the grid that was measured; its context is not exactly the one that was asked for."""
        if isinstance(measured, DecodePoint):
            context = min(self.profile.grid["context"], key=lambda c: abs(c - measured.context))
            return Point(
                kind="decode", tp=measured.tp, replicas=measured.replicas, batch=measured.batch, context=context
            )
        if isinstance(measured, PrefillPoint):
            return Point(
                kind="prefill", tp=measured.tp, replicas=measured.replicas, batch=measured.batch,
                context=measured.length,
            )  # fmt: skip
        low, high = sorted((measured.from_tp, measured.to_tp))
        # Longer than their prompts by what they decoded; a few tokens fewer where random prompts begin alike.
        tokens = measured.tokens // measured.requests + 8 if measured.requests else 0
        axis: Sequence[int] = self.profile.grid["switch_context"] if tokens else (0,)
        context = max((c for c in axis if c <= tokens), default=next(iter(axis), 0))
        replicas = self.profile.fingerprint.num_ranks // low
        return Point(kind="switch", tp=low, to_tp=high, replicas=replicas, batch=measured.requests, context=context)

    def list_done(self) -> set[Point]:
        """The points that are in the profile."""
        profile = self.profile
        up = [sample for sample in profile.switches if sample.from_tp < sample.to_tp]
        return {self.find_point(measured) for measured in (*profile.decode, *profile.prefill, *up)}

    def add(self, measured: DecodePoint | PrefillPoint | list[SwitchSample], spent: float) -> None:
        """Keep what was measured; ``spent``: seconds of all sessions so far.

        Another visit to a decode point: the median of all samples counts, as within a visit.  The fastest would be what
        the machine does at its best, and the more so the more often a point was visited.
        """
        profile = self.profile
        if isinstance(measured, list):
            change: dict[str, object] = {"switches": (*profile.switches, *measured)}
        elif isinstance(measured, PrefillPoint):
            change = {"prefill": (*profile.prefill, measured)}
        else:
            points = {self.find_point(earlier): earlier for earlier in profile.decode}
            point = self.find_point(measured)
            if before := points.get(point):
                samples = before.samples + measured.samples
                measured = msgspec.structs.replace(before, samples=samples, seconds=median(samples))
            change = {"decode": tuple((points | {point: measured}).values())}
        self.change(**change, machine=profile.machine | {"spent_seconds": round(spent, 1)})

    def change(self, **fields: object) -> None:
        """Replace fields of the profile and save it."""
        self.profile = msgspec.structs.replace(self.profile, **fields)
        save(self.profile, self.path)
