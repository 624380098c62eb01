"""Decisions on a profile that is wrong: each layout's step times off by the same share, up or down, drawn cell by cell.

The policy decides on the wrong profile; steps take what the right one says, and are reported with noise, as leaders do.
Before its first round it is calibrated, as an engine is, with other noise.  Errors of one sign in all layouts are left
out: they change no decision.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
from rich.table import Table

from sglang_pat.predict.profile import load
from sglang_pat.replay.compare import AS_IS, Machine, Workload, compare, regrets
from sglang_pat.replay.shapes import parse_shape
from sglang_pat.replay.simulate import crowded

NOISE = 0.1
"""Of the logarithm of each report's time: its standard deviation."""

CALIBRATION_NOISE = 0.03
"""The same of a layout in one turn of the calibration, unless asked otherwise."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A cell: ``wrong`` is the share by which step times are off, 0 for the right profile; ``calibration``: its noise,
    None: there is none."""

    path: str
    shape: str
    rho: float
    batch: int
    rounds: int
    seed: int
    wrong: float
    calibration: float | None
    spacing: int


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Regret of each round, ``[rounds]``; ``kept``: when the profile is believed to the end; most switches in one."""

    profile: str
    shape: str
    rho: float
    batch: int
    seed: int
    factors: tuple[float, ...]
    regret: tuple[float, ...]
    kept: tuple[float, ...]
    most_switches: int


@cache
def _machine(path: str, factors: tuple[float, ...] = ()) -> Machine:
    """``factors``: of the step times of each degree."""
    profile = load(path)
    by_degree = dict(zip(profile.fingerprint.degrees, factors, strict=False))
    decode = (msgspec.structs.replace(p, seconds=p.seconds * by_degree.get(p.tp, 1.0)) for p in profile.decode)
    return Machine(msgspec.structs.replace(profile, decode=tuple(decode)))


def study(task: Task) -> Cell | None:
    """None if the batch does not fit."""
    right = _machine(task.path)
    workload = Workload(
        shape=parse_shape(task.shape), batch=task.batch, rounds=task.rounds, correlation=task.rho, seed=task.seed
    )
    if any(crowded(right.profile.fingerprint, drawn) for drawn in workload.batches()):
        return None
    factors = _factors(task, len(right.profile.fingerprint.degrees))
    wrong = _machine(task.path, factors)
    names = ["survival", "survival" + AS_IS]
    runs = compare(right, workload, names, task.spacing, believed=wrong, noise=NOISE, calibration=task.calibration)
    return Cell(
        profile=Path(task.path).stem,
        shape=task.shape,
        rho=task.rho,
        batch=task.batch,
        seed=task.seed,
        factors=factors,
        regret=tuple(regrets(runs, "survival").tolist()),
        kept=tuple(regrets(runs, "survival" + AS_IS).tolist()),
        most_switches=max(len(run.switches) for run in runs["survival"]),
    )


def _factors(task: Task, degrees: int) -> tuple[float, ...]:
    mixed = [signs for signs in itertools.product((-1, 1), repeat=degrees) if len(set(signs)) > 1]
    name = f"{Path(task.path).stem} {task.shape} {task.rho} {task.batch} {task.seed}"
    return tuple(1 + sign * task.wrong for sign in mixed[zlib.crc32(name.encode()) % len(mixed)])


def table(cells: Sequence[Cell], wrong: float) -> Table:
    """By profile, and over all."""
    result = Table(title=f"survival on profiles whose layouts are off by ±{wrong:.0%}: regret against the oracle")
    heads = (
        "cells",
        "profile kept",
        "corrected",
        "first round",
        "later rounds",
        "worst cell",
        "cells > 5%",
        "switches",
    )
    for name in ("", *heads):
        result.add_column(name, justify="right" if name else "left")
    groups = {"all": list(cells)}
    for cell in cells:
        groups.setdefault(cell.profile, []).append(cell)
    for name, found in groups.items():
        regret = np.array([cell.regret for cell in found])  # [cells, rounds]
        means = regret.mean(axis=1)
        shares = (np.mean([cell.kept for cell in found]), means.mean(), regret[:, 0].mean(), regret[:, 1:].mean(),
                  means.max())  # fmt: skip
        most = max(cell.most_switches for cell in found)
        result.add_row(
            name, str(len(found)), *(f"{share:.2%}" for share in shares), str(int((means > 0.05).sum())), str(most)
        )
    return result
