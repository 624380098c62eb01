"""What the demonstration finds out. All times are seconds; those of a run count from its first request on."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec


class DemoError(RuntimeError):
    """The demonstration cannot go on; the first line of the message says why."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One response: when it was complete, its tokens, its text."""

    end: float
    tokens: int
    text: str


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """The engine at one moment: its layout (``tp1×dp2``), and the requests of each of its replicas."""

    at: float
    layout: str
    loads: list[int]


class SeenSwitch(msgspec.Struct, frozen=True, kw_only=True):
    """One switch, as the engine reports it.

    Attributes:
        before, after: layouts, e.g. ``tp1×dp2``.
        at: when the pause began.
        pause: how long no request decoded.
        requests, tokens: what was handed over, KV tokens.
        error: why it was aborted, or empty.
    """

    before: str
    after: str
    at: float
    pause: float
    requests: int
    tokens: int
    moved_bytes: int
    error: str

    @property
    def from_tp(self) -> int:
        return degrees(self.before)[0]

    @property
    def to_tp(self) -> int:
        return degrees(self.after)[0]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One batch on one contender.

    Attributes:
        contender: a static layout, or the policy.
        layout: in force when the batch came.
        others: share of the cores' time that other programs took meanwhile, 0 to 1.
    """

    contender: str
    layout: str
    answers: list[Answer]
    switches: list[SeenSwitch]
    samples: list[Sample]
    others: float

    @property
    def seconds(self) -> float:
        return max(answer.end for answer in self.answers)

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a decode step with so many requests in the engine, by layout, as profiled."""

    requests: int
    seconds: dict[str, float]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one case.

    Attributes:
        name, model, link, work: of the case (``cases.py``).
        link_name: for people; says so if the link is emulated.
        rounds: the runs of each round, one of each contender; the last contender is the adaptive engine.
    """

    name: str
    model: str
    link: str
    link_name: str
    work: dict[str, Any]
    steps: list[StepTime]
    rounds: list[list[Run]]

    @property
    def contenders(self) -> list[str]:
        return [run.contender for run in self.rounds[0]]

    @property
    def static(self) -> list[str]:
        return self.contenders[:-1]

    @property
    def adaptive(self) -> str:
        return self.contenders[-1]

    def seconds(self, contender: str) -> list[float]:
        """Of its batches, by round."""
        at = self.contenders.index(contender)
        return [runs[at].seconds for runs in self.rounds]

    def median(self, contender: str) -> float:
        return statistics.median(self.seconds(contender))

    @property
    def best_static(self) -> str:
        return min(self.static, key=self.median)

    @property
    def worst_static(self) -> str:
        return max(self.static, key=self.median)

    def gains(self, contender: str) -> list[float]:
        """Seconds of the better static layout over those of ``contender``, round by round: the machine's speed drifts
        from one round to the next, and the runs of one round are neighbours."""
        best = self.seconds(self.best_static)
        return [b / s for b, s in zip(best, self.seconds(contender), strict=True)]

    @property
    def gain(self) -> float:
        """Of the adaptive engine: the median of its rounds."""
        return statistics.median(self.gains(self.adaptive))

    @property
    def typical(self) -> list[Run]:
        """The runs of the round whose gain is the median one (of two, the smaller)."""
        gains = self.gains(self.adaptive)
        return self.rounds[gains.index(statistics.median_low(gains))]

    @property
    def switched(self) -> bool:
        """Whether the adaptive engine ever switched with requests alive."""
        return any(switch.requests for runs in self.rounds for switch in runs[-1].switches)

    def different(self) -> int:
        """Responses of all rounds whose texts are not the same with all contenders."""
        return sum(
            len({run.answers[index].text for run in runs}) > 1
            for runs in self.rounds
            for index in range(len(runs[0].answers))
        )

    def responses(self) -> int:
        """Responses of all rounds, of one contender."""
        return sum(len(runs[0].answers) for runs in self.rounds)


def name_of(layout: dict[str, int]) -> str:
    """``{"tp": 1, "dp": 2}`` → ``tp1×dp2``."""
    return "tp{tp}×dp{dp}".format(**layout)


def degrees(layout: str) -> tuple[int, int]:
    """``tp1×dp2`` → (1, 2)."""
    tp, dp = layout.removeprefix("tp").split("×dp")
    return int(tp), int(dp)


def switches_of(status: dict[str, Any], began: float, made: int) -> list[SeenSwitch]:
    """The last ``made`` switches of a ``/pat/status``; ``began`` is the unix time of the run's beginning."""
    ranks = status["base"]["tp"] * status["base"]["dp"]
    records: Sequence[dict[str, Any]] = status["switches"]
    return [
        SeenSwitch(
            before=name_of({"tp": record["from_tp"], "dp": ranks // record["from_tp"]}),
            after=name_of({"tp": record["to_tp"], "dp": ranks // record["to_tp"]}),
            at=record["started"] + record["phases"].get("prepare", 0.0) - began,
            pause=record["pause_seconds"],
            **{name: record[name] for name in ("requests", "tokens", "moved_bytes", "error")},
        )
        for record in records[len(records) - made :]
    ]
