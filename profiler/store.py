"""The profile while it grows: what is measured already, saved after each point, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from statistics import median

import msgspec

from profiler.grid import Grid, at_most, nearest
from profiler.points import Point
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


def existing(path: Path) -> Profile | None:
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
        Grid(**{name: tuple(axis) for name, axis in profile.grid.items()})
    except (TypeError, UsageError) as error:
        raise UsageError(f"--out {path} has no grid to go on with ({error}); give another file") from None
    return profile


def check_asked(path: Path, profile: Profile, asked: dict[str, str | float]) -> None:
    """Whether a sweep may go on with ``profile``: ``--grid`` and temperature, as its ``machine`` keeps them.

    Raises:
        UsageError: naming the first thing that differs.
    """
    _compare(path, [(name, profile.machine.get(name), value) for name, value in asked.items()])


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
    """A profile on its way to ``path``.  Every ``add`` saves."""

    def __init__(self, path: Path, profile: Profile) -> None:
        self.path = path
        self.profile = profile

    @classmethod
    def fresh(cls, path: Path, fingerprint: Fingerprint, grid: Grid, asked: dict[str, str | float]) -> Store:
        """An empty profile; ``asked``: see :func:`check_asked`."""
        return cls(path, Profile(fingerprint=fingerprint, grid=grid.as_lists(), machine=dict(asked)))

    def decode_points(self, points: list[Point]) -> dict[Point, DecodePoint]:
        """Those of ``points`` that are in the profile, and what was measured there."""
        found = {self._key(measured): measured for measured in self.profile.decode}
        return {point: found[point.key] for point in points if point.key in found}

    def is_of(self, measured: DecodePoint, point: Point) -> bool:
        """Whether a profile with ``measured`` has ``point``."""
        return measured.context > 0 and self._key(measured) == point.key

    def _key(self, measured: DecodePoint) -> tuple:
        context = nearest(tuple(self.profile.grid["context"]), measured.context)
        return ("decode", measured.tp, 0, measured.replicas, measured.batch, context)

    def done(self) -> set[tuple]:
        """Keys of the points (:attr:`profiler.points.Point.key`) that are in the profile."""
        grid = self.profile.grid
        keys: set[tuple] = {self._key(measured) for measured in self.profile.decode}
        keys |= {("prefill", p.tp, 0, p.replicas, p.batch, p.length) for p in self.profile.prefill}
        contexts = tuple(grid["switch_context"])
        for s in self.profile.switches:
            if s.from_tp < s.to_tp:
                replicas = self.profile.fingerprint.num_ranks // s.from_tp
                # Longer than their prompts by what they decoded; a few tokens fewer where random prompts begin alike.
                context = at_most(contexts, s.tokens // s.requests + 8) if s.requests else 0
                keys.add(("switch", s.from_tp, s.to_tp, replicas, s.requests, context))
        return keys

    def add(self, measured: DecodePoint | PrefillPoint | list[SwitchSample], spent: float) -> None:
        """Keep what was measured at a point; ``spent``: seconds of all sessions so far."""
        profile = self.profile
        if isinstance(measured, DecodePoint):
            change = {"decode": (*profile.decode, measured)}
        elif isinstance(measured, PrefillPoint):
            change = {"prefill": (*profile.prefill, measured)}
        else:
            change = {"switches": (*profile.switches, *measured)}
        self._keep(spent, **change)

    def again(self, before: DecodePoint, measured: DecodePoint, spent: float) -> None:
        """Keep another visit to the same point.

        The median of all samples counts, as within a visit: the fastest would be what the machine does at its best, and
        the more so the more often a point was visited.
        """
        samples = before.samples + measured.samples
        both = msgspec.structs.replace(before, samples=samples, seconds=median(samples))
        decode = tuple(both if point is before else point for point in self.profile.decode)
        self._keep(spent, decode=decode)

    def _keep(self, spent: float, **fields: object) -> None:
        self.change(**fields, machine=self.profile.machine | {"spent_seconds": round(spent, 1)})

    def change(self, **fields: object) -> None:
        """Replace fields of the profile and save it."""
        self.profile = msgspec.structs.replace(self.profile, **fields)
        save(self.profile, self.path)

    @property
    def spent(self) -> float:
        return float(self.profile.machine.get("spent_seconds", 0.0))
