"""A decision log (``--pat-log``) read: its decisions are taken again, or become a schedule.

    python -m sglang_pat.replay --log FILE [--profile FILE] [--schedule | --picture FILE]

The same inputs must give the same decisions.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sglang_pat import files
from sglang_pat.config import PREDICTING
from sglang_pat.figures import Figures
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.registry import make_policy
from sglang_pat.policies.snapshot import Decision, Policy, Snapshot
from sglang_pat.predict.cost import build_predictors
from sglang_pat.predict.profile import ProfileError, load
from sglang_pat.tools.commands import Parser, format_short_line

TOLERANCE = 1e-9
"""Relative, of estimates: other versions of NumPy round the last digit differently."""

TIMES = ("last_arrival", "last_switch", "last_abort")
"""Fields of a snapshot that may be minus infinity, which JSON has not."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """A ``start`` event: what :func:`~sglang_pat.policies.registry.make_policy` was given."""

    policy: str
    switch_at: int
    profile: str | None
    max_running: int | None


class Length(msgspec.Struct, frozen=True, kw_only=True):
    """A ``length`` event: what :meth:`LengthHistory.observe` was given."""

    length: int
    family: int
    finished: bool
    since: int = 0


class _Decided(msgspec.Struct, frozen=True, kw_only=True):
    """A ``decision`` event."""

    snapshot: dict[str, Any]
    decision: Decision


def load_decision(event: dict[str, Any]) -> tuple[Snapshot, Decision]:
    """The snapshot and the answer of a ``decision`` event."""
    logged = files.convert(event, _Decided)
    never = [name for name in TIMES if logged.snapshot.get(name, 0.0) is None]
    snapshot = files.convert(logged.snapshot | dict.fromkeys(never, 0.0), Snapshot, _load_column)
    return replace(snapshot, **dict.fromkeys(never, -math.inf)), logged.decision


def _load_column(kind: type, values: Any) -> Any:
    """A column of requests: the only type of a snapshot that JSON has not."""
    return np.array(files.convert(values, list[int]), dtype=np.int64)


@dataclass
class Replayed:
    """What came of it.

    Attributes:
        decisions: decisions in the log; ``switches``: of these, those to switch.
        different: (line, what the log says, what came out) of those that differ.
        seen: what the policy was shown in the last step; ``figures``: of that step, None if it has not ended.
        steps: number of steps that ended in the log, and ``spent``: how the engine spent them.
    """

    decisions: int = 0
    switches: int = 0
    steps: int = 0
    spent: Figures = field(default_factory=Figures)
    different: list[tuple[int, Decision, Decision]] = field(default_factory=list)
    seen: list[Snapshot] = field(default_factory=list)
    figures: Figures | None = None


def replay_log(path: Path, profile: str | None = None) -> Replayed:
    """Decide again everything that ``path`` says was decided.

    Args:
        profile: file to use instead of the one that the log names.

    Raises:
        ValueError: not such a log, one line with the file and the line in it; or its profile cannot be used.
    """
    result, history = Replayed(), LengthHistory()
    policy: Policy | None = None

    def play(number: int, kind: str, event: dict[str, Any]) -> None:
        nonlocal policy, history
        if kind in ("start", "counting"):
            result.seen, result.figures = [], None
        if kind == "start":
            policy, history = _make_policy(files.convert(event, Start), profile), LengthHistory()
        elif policy is None:
            raise ValueError("no start event before it")
        elif kind == "length":
            response = files.convert(event, Length)
            history.observe(response.length, response.family, response.finished, response.since)
        elif kind == "step":
            result.steps += 1
            result.figures = files.convert(event, Figures)
            result.spent += result.figures
        elif kind == "decision":
            snapshot, logged = load_decision(event)
            if result.figures and snapshot.requests:  # another step has begun
                result.seen, result.figures = [], None
            result.seen.append(snapshot)
            again = policy(snapshot, history)
            result.decisions += 1
            result.switches += logged.tp != snapshot.tp
            if not _are_same(logged, again):
                result.different.append((number, logged, again))

    _read(path, play)
    return result


def _make_policy(start: Start, profile: str | None) -> Policy:
    name = profile or start.profile
    predictor, costs = build_predictors(load(name, complete=True)) if name is not None else (None, None)
    return make_policy(
        start.policy, switch_at=start.switch_at, predictor=predictor, costs=costs, max_running=start.max_running
    )


def _are_same(a: Decision, b: Decision) -> bool:
    return (
        a.tp == b.tp
        and a.recompute_below == b.recompute_below
        and a.estimates.keys() == b.estimates.keys()
        and all(math.isclose(a.estimates[tp], b.estimates[tp], rel_tol=TOLERANCE) for tp in a.estimates)
    )


def read_schedule(path: Path) -> list[dict[str, int]]:
    """The decisions to switch in a log, as entries of a schedule (``POST /pat/schedule``): by generated tokens.

    Raises:
        ValueError: not such a log; or of a policy that does not predict, which says nothing of tokens.  One line.
    """
    entries: list[dict[str, int]] = []
    ended = 0

    def read(number: int, kind: str, event: dict[str, Any]) -> None:
        nonlocal ended
        if kind == "start" and (policy := files.convert(event, Start).policy) not in PREDICTING:
            raise ValueError(f"it is of the policy {policy}, which another engine repeats by itself")
        if kind == "counting":
            ended = 0
            entries.clear()
        elif kind == "length":
            ended += files.convert(event, Length).length
        elif kind == "decision":
            snapshot, decision = load_decision(event)
            if decision.tp != (entries[-1]["tp"] if entries else snapshot.tp):
                entries.append({"tp": decision.tp, "tokens": ended + int(snapshot.load.output.sum())})

    _read(path, read)
    return entries


def _read(path: Path, take: Callable[[int, str, dict[str, Any]], None]) -> None:
    """Give ``take`` the number of each line, its kind of event, and the event.

    Raises:
        ValueError: it cannot be read, or ``take`` raises one: one line with the file and the line in it.
    """
    number = last = 0
    cut: ValueError | None = None
    try:
        with open(path, "rb") as file:
            for last, line in enumerate(file, 1):
                if last > 1 and not line.endswith(b"\n"):
                    break  # cut short: the engine was killed
                number = last if cut is None else number
                try:
                    event = files.decode(line, dict[str, Any])
                except files.NotJson as error:
                    if cut is not None:
                        raise cut from None
                    cut = error
                    continue
                if cut is not None and event.get("event") != "start":  # else another engine went on with the file
                    raise cut
                number, cut = last, None
                take(number, event.get("event", ""), event)
            if cut is not None:
                raise cut
    except OSError as error:
        raise ValueError(f"--log {path}: {error.strerror}; give a decision log") from None
    except ProfileError:
        raise
    except ValueError as error:
        raise ValueError(f"--log {path}, line {number}: {error}; give a log (--pat-log) of this version") from None
    if not number:
        raise ValueError(f"--log {path}: empty; give a decision log")


def _draw(result: Replayed, path: Path) -> None:
    from sglang_pat.tools import timeline  # matplotlib takes a second

    try:
        timeline.draw(result.seen, result.figures, path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"--picture {path}: {reason}") from None
    print(f"picture: {path}")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 if a decision came out differently, 2 for bad input."""
    parser = Parser(prog="python -m sglang_pat.replay", description="Take the decisions of a log again.")
    parser.add_argument("--log", type=Path, required=True, metavar="FILE", help="of an engine (--pat-log)")
    parser.add_argument("--profile", metavar="FILE", help="in place of the one that the log names")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--schedule", action="store_true", help="print its switches as entries for POST /pat/schedule")
    ways.add_argument("--picture", type=Path, metavar="FILE", help="draw its last step: requests, layouts, drafts")
    try:
        args = parser.parse_args(argv)
        if args.schedule:
            print(json.dumps(read_schedule(args.log)))
            return 0
        result = replay_log(args.log, args.profile)
        if args.picture:
            _draw(result, args.picture)
    except ValueError as error:
        print(f"error: {format_short_line(error)}", file=sys.stderr)
        return 2
    for line, logged, repeated in result.different[:10]:
        print(f"line {line}: the log says {logged}, this version {repeated}")
    if result.steps:
        print(f"{result.steps} steps: {result.spent.format_line()}")
    same = result.decisions - len(result.different)
    print(f"{result.decisions} decisions, {result.switches} of them to switch: {same} came out the same")
    return 1 if result.different else 0


if __name__ == "__main__":
    sys.exit(main())
