"""When half of the ranks are lent to the trainer in the middle of a round, and when they are taken back.

RollPacker's stream trainer (section 4.4, Algorithm 1) moves half of the GPUs to training at the first of the milestones
at which the rest's projected peak KV fits the other half, and back when the round is over.  It leaves out what the move
and the slower tail cost.  Here ranks are lent only if what is gained is more than that:

    gained = training that is done meanwhile, in seconds on all ranks
           - (the round with ranks lent - the round without), switches, moves and the way back included

Both rounds follow the best course over layouts (:mod:`~sglang_pat.policies.course`), one on half of the ranks up to the
best moment to take them back.  So ranks come back when the trainer has caught up, if the tail is faster then.

Three things differ from the paper.  The trainer takes whole groups only, since an advantage needs all responses of its
prompt; so completion counts them, and what can be trained is estimated by groups.  Training is counted in tokens, for
the responses that end first are short ones.  And :data:`LAST_MILESTONE` is later: groups are complete late.

In a layout of stride 2 every second TP group works (:class:`~sglang_pat.layout.ParallelLayout`); requests of a group
that is lent go on in the one before it, in the same degree.  A degree that takes all ranks is left for the next lower
one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from sglang_pat.policies.course import Course, LayoutPlanner, Outlook, look_ahead
from sglang_pat.policies.lengths import Curve, LengthHistory
from sglang_pat.policies.snapshot import Load, Snapshot
from sglang_pat.predict.cost import SwitchCosts
from sglang_pat.predict.predictor import StepPredictor

STRIDE = 2
"""Half of the ranks are lent, as in the paper."""

MILESTONE = 0.05
"""Share of the batch between two questions before ranks are lent (the paper's)."""

FIRST_MILESTONE, LAST_MILESTONE = 0.2, 0.5
"""Completion at which ranks may be lent first and last."""

ROOM = 0.9
"""Of the KV room of the ranks that stay: so much the projected peak may take.  Lengths vary, and replicas differ."""

MARGIN = 0.01
"""Lending must gain at least this share of the rest of the round."""

MARGIN_SECONDS = 0.1
"""And at least this much."""


Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]


class Move(StrEnum):
    """What is to be done with the ranks.

    ``wait``: nothing now, ask again at the next milestone, or, while they are lent, after some time.  ``never``:
    nothing more in this round.
    """

    LEND = "lend"
    WAIT = "wait"
    NEVER = "never"
    TAKE_BACK = "take_back"


class Training(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the client knows of the training of this step.

    Attributes:
        samples: of the batch; above 0.
        complete: of them, those in groups that are complete and have their rewards, trained or not.
        ready: tokens (prompt and response) of complete groups that the trainer has not begun.
        pending: tokens of samples that have ended while their group goes on.
        seconds_per_token: of training on all ranks, as the last step took.
        slowdown: on those that are lent a token takes so many times as long.
        setup: seconds between the lending and the first token that is trained, as the last time.
        spare: samples in the engine that the batch can do without (tail batching): it is complete before they end.
        returned: ranks were lent in this step, and taken back.

    Raises:
        ValueError: more complete samples than there are.
    """

    samples: Annotated[int, Meta(ge=1)]
    complete: Count
    ready: Count
    pending: Count = 0
    seconds_per_token: Seconds
    slowdown: Annotated[float, Meta(ge=1)] = STRIDE
    setup: Seconds = 0.0
    spare: Count = 0
    returned: bool = False

    def __post_init__(self) -> None:
        if self.complete > self.samples:
            raise ValueError(f"complete is {self.complete}, of {self.samples} samples: give at most as many")

    @property
    def completion(self) -> float:
        """Share of the batch that the trainer could have."""
        return self.complete / self.samples


@dataclass(frozen=True, kw_only=True)
class LendingDecision:
    """What to do, and why.

    Attributes:
        gain: expected seconds of the step that it gains: lending now against not lending at all; while ranks are lent,
            taking them back now against the best later moment.  0 if nothing was estimated.
        why: in a few words, for a log.
        tp: degree of the ranks that work after the move.
    """

    move: Move
    gain: float = 0.0
    why: str = ""
    tp: int = 0


LendingPolicy = Callable[[Snapshot, LengthHistory, Training], LendingDecision]
"""Asked at every milestone (:class:`Milestones`), and while ranks are lent every second or so.

``Snapshot`` is of the ranks that work, as any policy sees it: ``num_ranks`` and ``load.replica`` count them only.
"""


def count_milestones(completion: float) -> int:
    """Milestones that are passed at a share of the batch; none before :data:`FIRST_MILESTONE`."""
    return max(0, int((completion - FIRST_MILESTONE) / MILESTONE + 1 + 1e-9)) if completion > 0 else 0


@dataclass
class Milestones:
    """Those of a round; whoever has them asks a policy once at each."""

    passed: int = 0

    def reach(self, completion: float) -> bool:
        """Whether a share of the batch is past another one."""
        before, self.passed = self.passed, count_milestones(completion)
        return self.passed != before


class TrainingPace:
    """What a token took to be trained: with all ranks and with those that are lent, in the last step that had such
    training."""

    def __init__(self) -> None:
        self._last: dict[bool, float] = {}
        self._step: dict[bool, tuple[float, int]] = {}

    def add(self, seconds: float, tokens: int, lent: bool) -> None:
        """Of a chunk; ``lent``: on lent ranks."""
        before, trained = self._step.get(lent, (0.0, 0))
        self._step[lent] = before + seconds, trained + tokens

    def end_step(self) -> None:
        self._last |= {lent: seconds / tokens for lent, (seconds, tokens) in self._step.items() if tokens}
        self._step = {}

    def describe(self) -> dict[str, float]:
        """Fields of :class:`Training`; none before a first step was trained with all ranks."""
        whole, lent = self._last.get(False), self._last.get(True)
        if not whole:
            return {}
        return {"seconds_per_token": whole} | ({"slowdown": max(1.0, lent / whole)} if lent else {})


def compute_peak_tokens(outlook: Outlook) -> float:
    """Most KV tokens that the running requests are expected to have together, at any later moment (section 4.4)."""
    return float((outlook.number * outlook.any_alive * outlook.context).max())


def make_lending_policy(
    predictor: StepPredictor,
    costs: SwitchCosts,
    num_ranks: int,
    degrees: Sequence[int],
    max_running: int | None = None,
) -> LendingPolicy:
    """The policy for a deployment.

    Args:
        predictor, costs: step times and switch costs of its profile.
        num_ranks, degrees: of the engine with all its ranks.
        max_running: requests that one replica decodes at once; None if memory is the only bound.
    """
    planner = LayoutPlanner(predictor, costs, max_running)
    rest = num_ranks // STRIDE
    usable = tuple(tp for tp in degrees if num_ranks % STRIDE == 0 and rest % tp == 0)

    def decide(snapshot: Snapshot, history: LengthHistory, training: Training) -> LendingDecision:
        lent = snapshot.num_ranks < num_ranks
        outlook = look_ahead(snapshot.load, history) if len(snapshot.load) else None
        if outlook is None:
            return _say(snapshot, Move.TAKE_BACK if lent else Move.NEVER, "the round is over")
        if not lent and (found := _refuse(snapshot, training, usable)):
            return found
        outlook = _end_with_spare(outlook, training.spare)
        room = min((snapshot.room[tp] * (rest // tp) for tp in usable if tp in snapshot.room), default=0.0)
        peak = compute_peak_tokens(outlook)
        if peak > (room if lent else ROOM * room):
            why = f"KV: {peak:.0f} tokens expected, room for {room:.0f}"
            return _say(snapshot, Move.TAKE_BACK if lent else Move.WAIT, why)
        courses = _plan_courses(planner, snapshot, outlook, num_ranks, tuple(degrees), usable)
        alive = np.append(np.concatenate([[1.0], outlook.any_alive])[: len(outlook.width)], 0.0)
        moving = alive * _estimate_moves(costs, snapshot.tp, snapshot.load, outlook)
        work = expect_work(snapshot.load, history, training, outlook)
        if lent:
            return _decide_return(courses, moving, work, training)
        return _decide_lending(courses, moving, work, training)

    return decide


def _say(snapshot: Snapshot, move: Move, why: str) -> LendingDecision:
    """Without an estimate."""
    return LendingDecision(move=move, why=why, tp=snapshot.tp)


def _refuse(snapshot: Snapshot, training: Training, usable: Sequence[int]) -> LendingDecision | None:
    """What needs no estimate while all ranks work."""
    if not usable:
        return _say(snapshot, Move.NEVER, "no degree fits half of the ranks")
    if training.returned:
        return _say(snapshot, Move.NEVER, "ranks were lent in this step already")
    if training.completion > LAST_MILESTONE + MILESTONE:
        return _say(snapshot, Move.NEVER, "the last milestone is past")
    if not count_milestones(training.completion):
        return _say(snapshot, Move.WAIT, "before the first milestone")
    return None


@dataclass(frozen=True, kw_only=True)
class _Courses:
    """The best course on all ranks and on those that stay, and the degrees in force there at the start."""

    whole: Course
    half: Course
    whole_tp: int
    half_tp: int

    def seconds_if_returned(self, start: int, moving: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """With ranks lent from the start of an interval: seconds up to the start of each later one, and seconds of the
        whole rest if they are taken back there; both begin with now and end with the end of the round."""
        lent, held = self.half.follow(start, self.half_tp)
        at = [self.whole.degrees.index(tp) for tp in held]
        return lent, lent + moving[start:] + self.whole.to_go[np.arange(start, len(self.whole.to_go)), at]


def _plan_courses(
    planner: LayoutPlanner,
    snapshot: Snapshot,
    outlook: Outlook,
    num_ranks: int,
    degrees: tuple[int, ...],
    usable: tuple[int, ...],
) -> _Courses:
    rest, tp = num_ranks // STRIDE, snapshot.tp
    half_tp = max(degree for degree in usable if degree <= max(tp, usable[0]))
    if snapshot.num_ranks < num_ranks:
        half = snapshot
        replica = np.arange(len(snapshot.load)) % (num_ranks // tp)  # those that come back take half of the requests
        whole = replace(snapshot, num_ranks=num_ranks, degrees=degrees, load=replace(snapshot.load, replica=replica))
    else:
        whole = snapshot
        replica = snapshot.load.replica // STRIDE % (rest // half_tp)
        load = replace(snapshot.load, replica=replica)
        half = replace(snapshot, num_ranks=rest, degrees=usable, tp=half_tp, load=load)
    return _Courses(
        whole=planner.plan(whole, outlook).course, half=planner.plan(half, outlook).course, whole_tp=tp, half_tp=half_tp
    )


def _estimate_moves(costs: SwitchCosts, tp: int, load: Load, outlook: Outlook) -> np.ndarray:
    """Seconds of a lending or a return at the start of each interval and at the end, ``[intervals + 1]``."""
    lengths = load.prompt + load.output
    now = costs.estimate_lending(tp, lengths)
    tokens = np.concatenate([[float(lengths.sum())], outlook.number * outlook.context])
    return now.seconds - now.state_seconds + now.state_seconds * tokens / max(tokens[0], 1.0)


def _end_with_spare(outlook: Outlook, spare: int) -> Outlook:
    """The outlook of a batch that is complete when only ``spare`` requests are left."""
    if not spare:
        return outlook
    return replace(outlook, any_alive=np.where(outlook.number * outlook.any_alive > spare, outlook.any_alive, 1e-12))


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is expected of complete groups at the start of each interval and at the end, ``[intervals + 1]``.

    Attributes:
        tokens: that the trainer can have begun by then if it is quick enough, those that are ready now included.
        samples: in complete groups, of the whole batch.
    """

    tokens: np.ndarray
    samples: np.ndarray


def expect_work(load: Load, history: LengthHistory, training: Training, outlook: Outlook) -> Work:
    """When groups will be complete: all of a prompt's responses that still run have ended."""
    ends = np.concatenate([[0.0], np.cumsum(outlook.width)])
    curve = history.make_curve(int(load.limit.max()), load.output)
    alive = _expect_alive(load, curve, ends)
    family, place = np.unique(load.family, return_inverse=True)
    ending = -np.diff(alive, axis=1)  # probability to end in each interval
    middle = (ends[:-1] + ends[1:]) / 2
    ended = 1 - alive
    own = np.concatenate([np.zeros((len(load), 1)), np.cumsum(ending * middle, axis=1)], axis=1)
    tokens = (load.prompt + load.output)[:, None] + own / np.maximum(ended, 1e-12)
    members = np.zeros((len(family), len(load)))
    members[place, np.arange(len(load))] = 1.0
    done = np.exp(members @ np.log(np.maximum(ended, 1e-12)))  # [families, intervals + 1]
    each = members @ tokens + training.pending / len(family)
    left = (training.samples - training.complete) / len(family)
    return Work(tokens=training.ready + (done * each).sum(axis=0), samples=training.complete + left * done.sum(axis=0))


def _expect_alive(load: Load, curve: Curve, ends: np.ndarray) -> np.ndarray:
    """Probability that a request still runs after so many tokens, ``[requests, ends]``."""
    left = (load.limit - load.output)[:, None]
    alive = np.exp(curve.hazard(load.output)[:, None] - curve.hazard(load.output[:, None] + ends))
    return np.where(ends < np.maximum(left, 1), alive, 0.0)


def _count_hidden_seconds(lent: np.ndarray, work: np.ndarray, setup: float, slowdown: float = STRIDE) -> np.ndarray:
    """Seconds on all ranks of the training that is done on those that are lent, up to each moment, ``[moments]``.

    Args:
        lent: seconds since the lending, ``[moments]``, the first 0.
        work: seconds on all ranks of what can be begun by then, ``[moments]``.
    """
    hidden = np.zeros(len(lent))
    busy = np.diff(np.maximum(lent - setup, 0.0)) / slowdown
    usable = (work[:-1] + work[1:]) / 2
    for moment, (most, ready) in enumerate(zip(busy, usable, strict=True)):
        hidden[moment + 1] = max(hidden[moment], min(hidden[moment] + most, ready))
    return hidden


def _decide_lending(courses: _Courses, moving: np.ndarray, work: Work, training: Training) -> LendingDecision:
    """All ranks work."""
    training_seconds = training.seconds_per_token * work.tokens
    _, held = courses.whole.follow(0, courses.whole_tp)
    may = work.samples <= training.samples * LAST_MILESTONE
    may[0], may[-1] = True, False
    gains = np.full(len(moving), -np.inf)
    for start in np.flatnonzero(may):
        lent, totals = courses.seconds_if_returned(int(start), moving)
        hidden = _count_hidden_seconds(lent, training_seconds[start:], training.setup, training.slowdown)
        without = courses.whole.to_go[start, courses.whole.degrees.index(held[start])]
        gains[start] = (without - moving[start] - totals + hidden).max()
    gain, least = float(gains[0]), max(MARGIN * float(courses.whole.to_go[0].min()), MARGIN_SECONDS)
    if gain < least or gains.max() - gain > least:
        why = "too little to gain" if gains.max() < least else "later is better"
        return LendingDecision(move=Move.WAIT, gain=gain, why=why, tp=courses.whole_tp)
    return LendingDecision(move=Move.LEND, gain=gain, why="hides training", tp=courses.half_tp)


def _decide_return(courses: _Courses, moving: np.ndarray, work: Work, training: Training) -> LendingDecision:
    """Ranks are lent."""
    lent, totals = courses.seconds_if_returned(0, moving)
    totals -= _count_hidden_seconds(lent, training.seconds_per_token * work.tokens, 0.0, training.slowdown)
    gain = float(totals[1:].min() - totals[0])
    least = max(MARGIN * float(totals[0]), MARGIN_SECONDS)
    if gain >= 0 and totals[-1] - totals[0] >= least:
        return LendingDecision(
            move=Move.TAKE_BACK, gain=gain, why="the rest is faster on all ranks", tp=courses.half_tp
        )
    return LendingDecision(move=Move.WAIT, gain=gain, why="there is training to hide", tp=courses.half_tp)
