"""Take the decisions of an engine's log again: the same inputs must give the same decisions."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from sglang_pat.coordinator.decision_log import load_decision
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.registry import make_policy
from sglang_pat.policies.snapshot import Decision
from sglang_pat.predict.cost import fitted
from sglang_pat.predict.profile import load

TOLERANCE = 1e-9
"""Relative, of estimates: other versions of NumPy round the last digit differently."""


@dataclass
class Replayed:
    """What came of it.

    Attributes:
        decisions: decisions in the log; ``switches``: of these, those to switch.
        different: (line, what the log says, what came out) of those that differ.
        found: all that came out; ``factors``: the last that the log has of the profile's step times.
    """

    decisions: int = 0
    switches: int = 0
    different: list[tuple[int, Decision, Decision]] = field(default_factory=list)
    found: list[Decision] = field(default_factory=list)
    factors: Mapping[int, float] = field(default_factory=dict)


def replay_log(path: Path, profile: str | None = None, factors: Mapping[int, float] | None = None) -> Replayed:
    """Decide again everything that ``path`` says was decided.

    Args:
        profile: file to use instead of the one that the log names.
        factors: of step times, by degree, as if they had been known from the first on; None for what the log has.

    Raises:
        ValueError: not such a log, one line with the file and the line in it; or its profile cannot be used.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ValueError(f"--log {path}: {reason}") from None
    policy, history, result = None, LengthHistory(), Replayed()
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
            kind = event["event"]
            if kind == "start":
                policy, history = _policy(event, profile)
            elif policy is None:
                raise ValueError("no start event before it")
            elif kind == "length":
                history.observe(event["length"], event["family"], event["finished"], event.get("since", 0))
            elif kind == "decision":
                snapshot, logged = load_decision(event)
                result.factors = snapshot.factors
                if factors is not None:
                    snapshot = replace(snapshot, factors=factors, doubts={})
                found = policy(snapshot, history)
                result.found.append(found)
                result.decisions += 1
                result.switches += logged.tp != snapshot.tp
                if not _same(logged, found):
                    result.different.append((number, logged, found))
        except _Unusable as error:
            raise ValueError(str(error)) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            # The end of a log is cut short when an engine is killed.
            if number == len(lines) and isinstance(error, json.JSONDecodeError) and number > 1:
                break
            what = f"no {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"--log {path}, line {number}: not a decision log ({what})") from None
    if policy is None:
        raise ValueError(f"--log {path}: empty")
    return result


class _Unusable(Exception):
    """The profile of a log cannot be read."""


def _policy(event: dict, profile: str | None):
    predictor = costs = None
    name = profile or event["profile"]
    if name is not None:
        try:
            predictor, costs = fitted(load(name))
        except ValueError as error:
            raise _Unusable(error) from None
    policy = make_policy(
        event["policy"],
        switch_at=event["switch_at"],
        predictor=predictor,
        costs=costs,
        max_running=event["max_running"],
    )
    return policy, LengthHistory.from_dict(event["history"])


def _same(a: Decision, b: Decision) -> bool:
    return (
        a.tp == b.tp
        and a.recompute_below == b.recompute_below
        and a.estimates.keys() == b.estimates.keys()
        and all(math.isclose(a.estimates[tp], b.estimates[tp], rel_tol=TOLERANCE) for tp in a.estimates)
    )
