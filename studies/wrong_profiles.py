"""Decisions on a profile that is wrong: each layout's step times off by a share, up or down, drawn cell by cell.

The share may be the same everywhere, or depend on batch or context (``KINDS``); or the profile is another machine's.

The policy decides on the wrong profile; steps take what the right one says, and are reported with noise, as leaders do.
Before its first round it is calibrated, as an engine is, with other noise.  Errors of one sign in all layouts are left
out: they change no decision.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
from rich.table import Table

from sglang_pat.predict.profile import DecodePoint, load
from studies.compare import AS_IS, ProfiledMachine, Workload, compare, compute_regrets
from studies.shapes import parse_shape
from studies.simulate import describe_queueing

KINDS: dict[str, Callable[[float, float], float]] = {
    "layout": lambda batch, context: 1.0,
    "batch": lambda batch, context: batch,
    "small": lambda batch, context: 1 - batch,
    "twist": lambda batch, context: 2 * batch - 1,
    "context": lambda batch, context: context,
    "ctwist": lambda batch, context: 2 * context - 1,
    "middle": lambda batch, context: 1 - 2 * abs(2 * batch - 1),  # which no power of the batch has
    "points": lambda batch, context: 1.0,  # times a normal number, drawn for each point by itself
}
"""Shares of its layout's error by which a step is off.  ``batch``, ``context``: the place of their logarithm between
the least (0) and the greatest (1) of the profile."""

NOISE = 0.1
"""Standard deviation of the logarithm of each report's time."""

CALIBRATION_NOISE = 0.03
"""Standard deviation of the logarithm of a layout's time in one turn of the calibration, unless asked otherwise."""


@dataclass(frozen=True, kw_only=True)
class WrongProfileTask:
    """A cell: ``wrong`` is the share by which step times are off, 0 for the right profile; ``error``: of ``KINDS``, or
    the profile of another machine; ``calibration``: its noise, None: there is none."""

    path: str
    shape: str
    rho: float
    batch: int
    rounds: int
    seed: int
    wrong: float
    error: str
    calibration: float | None
    spacing: int


@dataclass(frozen=True, kw_only=True)
class WrongProfileCell:
    """Regret of each round, ``[rounds]``; ``kept``: when the profile is believed to the end; most switches in one."""

    profile: str
    shape: str
    rho: float
    batch: int
    seed: int
    error: str
    factors: tuple[float, ...]
    regret: tuple[float, ...]
    kept: tuple[float, ...]
    most_switches: int


@cache
def _machine(path: str, error: str = "layout", off: tuple[float, ...] = (), seed: int = 0) -> ProfiledMachine:
    """A machine; ``off``: error of the step times of each degree; ``seed``: of the noise at each point."""
    profile = load(path if error in KINDS else error)
    by_degree = dict(zip(profile.fingerprint.degrees, off, strict=False)) if error in KINDS else {}
    batches, contexts = ([getattr(p, name) for p in profile.decode] for name in ("batch", "context"))

    random = np.random.default_rng(seed)

    def seconds(point: DecodePoint) -> float:
        part = KINDS.get(error, KINDS["layout"])(
            _compute_place(point.batch, batches), _compute_place(point.context, contexts)
        )
        part *= random.normal() if error == "points" else 1.0
        return point.seconds * max(1 + by_degree.get(point.tp, 0.0) * part, 0.3)

    decode = (msgspec.structs.replace(point, seconds=seconds(point)) for point in profile.decode)
    return ProfiledMachine(msgspec.structs.replace(profile, decode=tuple(decode)))


def _compute_place(value: float, values: Sequence[float]) -> float:
    least, greatest = min(values), max(values)
    return float(np.log(value / least) / np.log(greatest / least)) if greatest > least else 0.0


def study(task: WrongProfileTask) -> WrongProfileCell | None:
    """Study one cell.  None if the batch does not fit, or another machine's profile lacks a layout."""
    right = _machine(task.path)
    workload = Workload(
        shape=parse_shape(task.shape), batch=task.batch, rounds=task.rounds, correlation=task.rho, seed=task.seed
    )
    if any(describe_queueing(right.profile.fingerprint, drawn) for drawn in workload.make_batches()):
        return None
    degrees = right.profile.fingerprint.degrees
    factors = _make_factors(task, len(degrees))
    wrong = _machine(task.path, task.error, tuple(factor - 1 for factor in factors), zlib.crc32(_name(task)))
    if not set(degrees) <= set(wrong.profile.fingerprint.degrees):
        return None
    names = ["survival", "survival" + AS_IS]
    runs = compare(right, workload, names, task.spacing, believed=wrong, noise=NOISE, calibration=task.calibration)
    return WrongProfileCell(
        profile=Path(task.path).stem,
        shape=task.shape,
        rho=task.rho,
        batch=task.batch,
        seed=task.seed,
        error=task.error if task.error in KINDS else Path(task.error).stem,
        factors=factors,
        regret=tuple(compute_regrets(runs, "survival").tolist()),
        kept=tuple(compute_regrets(runs, "survival" + AS_IS).tolist()),
        most_switches=max(len(run.switches) for run in runs["survival"]),
    )


def _make_factors(task: WrongProfileTask, degrees: int) -> tuple[float, ...]:
    mixed = [signs for signs in itertools.product((-1, 1), repeat=degrees) if len(set(signs)) > 1]
    return tuple(1 + sign * task.wrong for sign in mixed[zlib.crc32(_name(task)) % len(mixed)])


def _name(task: WrongProfileTask) -> bytes:
    """Name of a cell, that seeds what is drawn for it."""
    return f"{Path(task.path).stem} {task.shape} {task.rho} {task.batch} {task.seed}".encode()


def format_table(cells: Sequence[WrongProfileCell], wrong: float) -> Table:
    """Table by kind of error and profile, and over all."""
    result = Table(title=f"survival on profiles whose layouts are off by ±{wrong:.0%}: regret against the oracle")
    heads = (
        "cells",
        "profile kept",
        "worst cell",
        "corrected",
        "first round",
        "later rounds",
        "worst cell",
        "most beyond kept",
        "cells > 5%",
        "switches",
    )
    for name in ("", *heads):
        result.add_column(name, justify="right" if name else "left")
    groups = {"all": list(cells)}
    for cell in cells:
        groups.setdefault(f"{cell.error}, {cell.profile}", []).append(cell)
    for name, of_group in groups.items():
        regret = np.array([cell.regret for cell in of_group])  # [cells, rounds]
        means = regret.mean(axis=1)
        kept = np.array([cell.kept for cell in of_group]).mean(axis=1)
        shares = (kept.mean(), kept.max(), means.mean(), regret[:, 0].mean(), regret[:, 1:].mean(), means.max(),
                  (means - kept).max())  # fmt: skip
        most = max(cell.most_switches for cell in of_group)
        result.add_row(
            name, str(len(of_group)), *(f"{share:.2%}" for share in shares), str(int((means > 0.05).sum())), str(most)
        )
    return result
