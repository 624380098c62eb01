"""A program that a model wrote, run on test cases: what it is worth.

Blocking functions, made to be called in worker processes.  Who owns the time limits asks for them first and records the
runs afterwards, so a worker talks to nobody::

    keys = get_keys(ground_truth)
    score = score_response(response, ground_truth, sandbox, limits.get_limits(keys))
    again = limits.record(score.runs)              # for each run: do it again when there is nothing else to do
    limits.record([run_again(response, ground_truth, index, sandbox, rules.maximum)])

Test cases have verl's form (that of APPS and TACO): a mapping, or its JSON, with ``inputs`` and ``outputs``, lists of as
many texts.  With ``fn_name`` an input is the arguments of this function as JSON, one a line, and an output is JSON, too;
without it they are what is read from stdin and written to stdout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_pat.rewards.limits import CaseRun
from sglang_pat.rewards.sandbox import Sandbox


@dataclass(frozen=True, kw_only=True)
class Score:
    """What a response is worth, and what happened."""

    value: float
    """0 to 1."""
    outcome: str
    """``right``, ``no_code``, or of the first case that was not right: ``wrong``, ``cut``, ``error``, ``memory``,
    ``output``, ``lost``."""
    runs: tuple[CaseRun, ...]
    """In order of the cases; shorter than these where the first that was not right ended it."""


def get_keys(ground_truth: str | Mapping[str, Any]) -> list[str]:
    """Of each test case, the same in each run of the job.

    Raises:
        ValueError: these are no test cases; one line.
    """
    raise NotImplementedError


def score_response(
    response: str,
    ground_truth: str | Mapping[str, Any],
    sandbox: Sandbox,
    time_limits: Sequence[float],
    all_or_nothing: bool = True,
) -> Score:
    """Run the last block of code of a response on the test cases.

    Args:
        time_limits: seconds of each case, in their order.
        all_or_nothing: 1 if all cases are right, else 0, and the first that is not ends it; false: the share of cases
            that are right.

    Raises:
        ValueError: these are no test cases; one line.
    """
    raise NotImplementedError


def run_again(
    response: str, ground_truth: str | Mapping[str, Any], index: int, sandbox: Sandbox, limit: float
) -> CaseRun:
    """The second run of one case that was cut, for ``TimeLimits.record``; changes no reward."""
    raise NotImplementedError
