"""A program that a model wrote, run on test cases: what it is worth.

Blocking functions, made to be called in worker processes.  The owner of the time limits is asked first, and told of the
runs afterwards; a worker talks to nobody::

    keys = get_keys(ground_truth)
    maximum = limits.rules.maximum
    score = score_response(response, ground_truth, sandbox, limits.get_limits(keys), maximum=maximum)
    again = limits.record(score.runs)              # for each run: do it again when there is nothing else to do
    limits.record([run_again(response, ground_truth, index, sandbox, maximum)])

Test cases have verl's form, that of APPS and TACO: a mapping, or its JSON, with ``inputs`` and ``outputs``, lists of
as many texts.  With ``fn_name`` an input is the arguments of this function as JSON, one a line, and an output is JSON,
too; without it they are what is read from stdin and written to stdout.  What is expected never enters the sandbox.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from reward_sandbox.limits import CaseRun
from reward_sandbox.runs import Run, Sandbox, SandboxError

PATIENCE = 10
"""Wall time of a second run, as a multiple of the maximum."""
SHARED_CASES = 10
"""Number of test cases that count for a share of right ones, as in verl."""
_FENCE = "```"
_LANGUAGE = re.compile(r"[\w+-]*")
_LANGUAGES = ("", "py", "python", "python3")
_DIGITS = 1e-5, 1e-8
"""Relative and absolute distance of numbers that count as equal, as in APPS."""

_CALL = """\
import json, os, sys
answers = os.dup(1)
os.dup2(2, 1)
space = {{"__name__": "program"}}
exec("import collections, functools, heapq, itertools, math, bisect, string, re\\nfrom typing import *", space)
exec("from collections import *; from functools import *; from heapq import *; from itertools import *", space)
exec("from math import *; from bisect import *; from builtins import *", space)
exec(compile({source!r}, "program.py", "exec"), space)
function = space.get({name!r}) or getattr(space["Solution"](), {name!r})
text = sys.stdin.read()
result = json.dumps(function(*map(json.loads, text.split("\\n") if text.strip() else [])))
sys.stdout.flush()
with open(answers, "w") as file:
    file.write(result)
"""
"""Template of a program whose function is called.  Its own prints go to stderr.  Names that answers of this kind use
without importing them are there, as in verl."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """The score of a response, and how it came about."""

    value: float
    """Score from 0 to 1."""
    outcome: str
    """``right``, ``no_code``, or the outcome of the first case that was not right: ``wrong``, ``cut``, ``error``,
    ``memory``, ``output`` or ``lost``."""
    runs: tuple[CaseRun, ...]
    """Runs in the order of the cases; there are fewer where the first that was not right ended it."""
    error: str = ""
    """The last line of stderr of the first case that was not right."""


class Case(NamedTuple):
    key: str
    stdin: str
    expected: Any


class Task(NamedTuple):
    """Task of a program: the function to call, or None for a program that reads stdin, and the test cases."""

    function: str | None
    cases: list[Case]


def read_task(ground_truth: str | Mapping[str, Any]) -> Task:
    """Test cases from what a dataset has; raises ``ValueError`` with one line."""
    try:
        fields: Any = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        function, inputs, outputs = fields.get("fn_name"), fields["inputs"], fields["outputs"]
        # The digest says which problem it is: two problems may have a test case that reads the same.
        digest = hashlib.blake2b(json.dumps([function, inputs, outputs]).encode(), digest_size=8).hexdigest()
        pairs = list(zip(inputs, outputs, strict=True))
        if not pairs:
            raise ValueError("no case")
        cases: list[Case] = []
        for index, (stdin, expected) in enumerate(pairs):
            text = "\n".join(stdin) if isinstance(stdin, list) else str(stdin)
            if function:
                expected = json.loads(expected)
            elif isinstance(expected, list):
                expected = "\n".join(expected)
            cases.append(Case(f"{digest}-{index}", text, expected if function else str(expected)))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"ground_truth {str(ground_truth)[:80]!r} are no test cases ({type(error).__name__}: {error}), must be "
            '{"inputs": [...], "outputs": [...]}, two lists of the same length, with "fn_name" for a function'
        ) from None
    return Task(function or None, cases)


def get_keys(ground_truth: str | Mapping[str, Any]) -> list[str]:
    """Key of each test case, which is the same in each run of the job; raises as :func:`read_task`."""
    return [case.key for case in read_task(ground_truth).cases]


def find_program(response: str) -> str | None:
    """The last block of Python in a response, or the last without a language; one that is not closed counts."""
    blocks = list(_list_blocks(response))
    named = [text for language, text in blocks if language in _LANGUAGES and language]
    plain = [text for language, text in blocks if not language]
    return (named or plain or [None])[-1]


def _list_blocks(response: str) -> Iterator[tuple[str, str]]:
    """Language, in small letters, and text of each block; in time linear in the response, whatever a policy writes."""
    at = 0
    while (begin := response.find(_FENCE, at)) >= 0 and (line := response.find("\n", begin)) >= 0:
        language = _LANGUAGE.match(response, begin + len(_FENCE))
        assert language is not None, "an empty one matches"
        end = response.find(_FENCE, line)
        end = len(response) if end < 0 else end
        yield language[0].lower(), response[line + 1 : end]
        at = end + len(_FENCE)


def score_response(
    response: str,
    ground_truth: str | Mapping[str, Any],
    sandbox: Sandbox,
    time_limits: Sequence[float],
    all_or_nothing: bool = True,
    *,
    maximum: float,
) -> Score:
    """Run the program of a response on the test cases.

    A case whose sandbox was killed from outside is run again, once.

    Args:
        time_limits: seconds of each case, in their order.
        all_or_nothing: 1 if all cases are right, else 0, and the first that is not ends it; false: the share of the
            first :data:`SHARED_CASES` that are right.
        maximum: wall seconds of a case; that of the rules (:class:`~reward_sandbox.limits.LimitRules`).

    Raises:
        ValueError: these are no test cases; one line.
        SandboxError: the sandbox does not start any more; one line.
    """
    task = read_task(ground_truth)
    program = find_program(response)
    if program is None:
        return Score(value=0.0, outcome="no_code", runs=())
    limited = list(zip(task.cases, time_limits, strict=True))
    if not all_or_nothing:
        del limited[SHARED_CASES:]
    outcome, error, runs = "right", "", list[CaseRun]()
    with _Runner(program, task, sandbox, maximum) as runner:
        for case, limit in limited:
            run, case_outcome = runner.run(case, limit)
            runs.append(CaseRun(case.key, case_outcome, run.seconds, limit))
            if case_outcome != "right":
                if outcome == "right":
                    outcome, error = case_outcome, run.error
                if all_or_nothing:
                    break
    right = sum(run.outcome == "right" for run in runs)
    value = float(outcome == "right") if all_or_nothing else right / len(limited)
    return Score(value=value, outcome=outcome, runs=tuple(runs), error=error)


def run_again(
    response: str, ground_truth: str | Mapping[str, Any], index: int, sandbox: Sandbox, maximum: float
) -> CaseRun:
    """The second run of the case ``index`` that was cut, for ``TimeLimits.record``.  It changes no reward.

    It may take ``PATIENCE`` times ``maximum`` on the wall: perhaps it runs at a low priority.
    """
    task = read_task(ground_truth)
    case = task.cases[index]
    with _Runner(find_program(response) or "", task, sandbox, PATIENCE * maximum) as runner:
        run, outcome = runner.run(case, maximum)
    return CaseRun(case.key, outcome, run.seconds, maximum, rerun=True)


class _Runner(contextlib.ExitStack):
    """A program in a sandbox that is opened again if it was killed."""

    def __init__(self, program: str, task: Task, sandbox: Sandbox, maximum: float) -> None:
        super().__init__()
        self.program = program if task.function is None else _CALL.format(source=program, name=task.function)
        self.agrees = matches_output if task.function is None else matches_result
        self.sandbox, self.maximum = sandbox, maximum
        try:
            self._open()
        except SandboxError:  # a machine that is short of processes for a moment
            self._open()

    def _open(self) -> None:
        self.close()
        self.session = self.enter_context(self.sandbox.open(self.program))

    def run(self, case: Case, limit: float) -> tuple[Run, str]:
        """The run of the program on a case, and its outcome."""
        run = self.session.run(case.stdin, limit, self.maximum)
        if run.ended == "lost":
            self._open()
            run = self.session.run(case.stdin, limit, self.maximum)
        if run.ended != "exit":
            return run, run.ended
        return run, "right" if self.agrees(run.output, case.expected) else "wrong"


def matches_output(output: str, expected: str) -> bool:
    """Whether stdout is what was expected.

    Lines are compared without the blanks at their ends, and without empty lines at the end; numbers with a point may
    differ in the sixth digit.
    """
    lines, expected_lines = ([line.split() for line in text.strip().splitlines()] for text in (output, expected))
    return len(lines) == len(expected_lines) and all(
        len(a) == len(b) and all(map(_matches_word, a, b)) for a, b in zip(lines, expected_lines, strict=True)
    )


def _matches_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    try:
        return not (_is_whole(word) and _is_whole(expected)) and _is_close(float(word), float(expected))
    except ValueError:
        return False


def _is_whole(word: str) -> bool:
    return word.lstrip("+-").isdigit()


def matches_result(output: str, expected: Any) -> bool:
    """Whether what a function returned, as JSON, is what was expected, or the only element of it, as in APPS."""
    try:
        result = json.loads(output)
    except (ValueError, RecursionError):
        return False
    return _matches_value(result, expected) or (
        isinstance(expected, list) and bool(expected) and _matches_value(result, expected[0])
    )


def _matches_value(value: Any, expected: Any) -> bool:
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_matches_value, value, expected))
    if isinstance(value, int | float) and isinstance(expected, int | float):
        whole = isinstance(value, int) and isinstance(expected, int)
        return value == expected or (not whole and _is_close(value, expected))
    return value == expected


def _is_close(value: float, expected: float) -> bool:
    relative, absolute = _DIGITS
    try:
        return math.isfinite(expected) and math.isclose(value, expected, rel_tol=relative, abs_tol=absolute)
    except OverflowError:  # a whole number that is too large
        return False
