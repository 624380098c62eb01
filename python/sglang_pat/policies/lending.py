"""When half of the ranks are lent to the trainer in the middle of a round, and when they are taken back
(:func:`make_lending_policy`).

RollPacker's stream trainer (section 4.4, Algorithm 1) moves half of the GPUs to training when a share of the batch is
complete and the rest's projected peak KV fits the other half, and back when the round is over.  That is
:func:`decide_by_room`, all that can be said where no step times are known.  It leaves out what the move and the slower
tail cost.  With a profile ranks are lent only if what is gained is more than that (:func:`_decide_lending`):

    gained = training that is done meanwhile, in seconds on all ranks
           - (the round with ranks lent - the round without), switches, moves and the way back included

Both rounds follow the best course over layouts (:mod:`~sglang_pat.policies.course`), one on half of the ranks up to the
best moment to take them back.  So ranks come back when the trainer has caught up, if the tail is faster then.

That is an expectation, and a step is one draw.  So the loss is bounded: before ranks are lent (:func:`_estimate_loss`),
and by what was measured since (:func:`_decide_return`).

Three things differ from the paper.  The trainer takes whole groups only, since an advantage needs all responses of its
prompt; so completion counts them, and what can be trained is estimated by groups, without the one that is complete last
and ends the round.  Training is counted in tokens, for the responses that end first are short ones.  And ranks may be
lent late: where useless prompts are replaced by new ones (DAPO) most of the time is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from sglang_pat.policies.course import Course, LayoutPlanner, Outlook, look_ahead
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.snapshot import Load, Snapshot
from sglang_pat.predict.cost import SwitchCosts
from sglang_pat.predict.predictor import StepPredictor

STRIDE = 2
"""Half of the ranks are lent, as in the paper."""

FIRST_MILESTONE = 0.2
"""Completion at which ranks may be lent first (the paper's)."""

LAST_MILESTONE = 0.5
"""Completion up to which a lending may be put off for a better moment, and up to which, where no step times are known,
ranks are lent as soon as KV fits (the paper's)."""

LEAST_REST = 0.5
"""Share of a response that must still be generated after a lending: the round is expected to last at least that
long."""

ROOM = 0.9
"""Share of the KV room of the ranks that stay that the projected peak may take.  Lengths vary, and replicas differ."""

MARGIN = 0.01
"""Lending must gain at least this share of the rest of the round."""

MARGIN_SECONDS = 0.1
"""Seconds that lending must gain at least, besides :data:`MARGIN`."""

UNLIKELY = 0.001
"""An end of the round that is less likely by then is left out of account, once a whole batch of lengths is known."""

RISK = 0.0125
"""Share of the step that a lending may lose before ranks are taken back."""


MOST_COUNT, MOST_SECONDS = 2**53, 1e9
"""Most that a client may say of anything: up to there floats are exact, and nothing that is computed overflows."""

MOST_REQUESTS = 2**20
"""Most requests of an engine: each is looked at."""

Count = Annotated[int, Meta(ge=0, le=MOST_COUNT)]
Requests = Annotated[int, Meta(ge=0, le=MOST_REQUESTS)]
Seconds = Annotated[float, Meta(ge=0, le=MOST_SECONDS)]


class Move(StrEnum):
    """What is to be done with the ranks.

    ``wait``: nothing now, ask again when another group is complete, or, while they are lent, after some time.
    ``never``: nothing more in this round.  ``leave``: one of several engines leaves the round, with all its ranks.
    """

    LEND = "lend"
    WAIT = "wait"
    NEVER = "never"
    TAKE_BACK = "take_back"
    LEAVE = "leave"


class Others(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engines that would get the requests of one that leaves.

    Attributes:
        engines: their number.
        running, waiting: requests of the one that has most.
        tokens: KV tokens of those that run there; ``room``: KV tokens that it has room for.
        delay: seconds until a request that is moved is sent to its new engine.
        lent: share of the ranks of all engines that the trainer has now.
    """

    engines: Annotated[int, Meta(ge=1, le=MOST_COUNT)]
    running: Requests
    waiting: Requests
    tokens: Count
    room: Count
    delay: Seconds = 0.0
    lent: Annotated[float, Meta(ge=0, le=1)] = 0.0


class Training(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the client knows of the training of this step.

    Attributes:
        samples: number of the batch's samples; above 0.
        complete: samples in groups that are complete and have their rewards, trained or not.
        ready: tokens (prompt and response) of complete groups that the trainer has not begun.
        pending: tokens of samples that have ended while their group goes on.
        seconds_per_token: of training on all ranks, as earlier steps took; 0 if it is not known yet.
        slowdown: on those that are lent a token takes so many times as long.
        setup: seconds between the lending and the first token that is trained, as in earlier steps.
        spare: samples in the engine that the batch can do without (tail batching): it is complete before they end.
        returned: ranks were lent in this step, and taken back.
        elapsed: seconds since the step began.
        lent: seconds since ranks were lent, in which the trainer could use them; 0 if none are.
        busy: seconds of these in which it trained, and ``trained``: the tokens that it trained.
        others: the other engines of the step, if the one that is asked may leave.  ``samples``, ``ready`` and so on are
            its share then, and ``seconds_per_token`` those in which all of them train a token of each share.

    Raises:
        ValueError: more complete samples than there are.
    """

    samples: Annotated[int, Meta(ge=1, le=MOST_COUNT)]
    complete: Count
    ready: Count
    pending: Count = 0
    seconds_per_token: Seconds
    slowdown: Annotated[float, Meta(ge=1, le=MOST_SECONDS)] = STRIDE
    setup: Seconds = 0.0
    spare: Count = 0
    returned: bool = False
    elapsed: Seconds = 0.0
    lent: Seconds = 0.0
    busy: Seconds = 0.0
    trained: Count = 0
    others: Others | None = None

    def __post_init__(self) -> None:
        if self.complete > self.samples:
            raise ValueError(f"complete is {self.complete}, of {self.samples} samples: give at most as many")

    @property
    def completion(self) -> float:
        """Share of the batch that the trainer could have."""
        return self.complete / self.samples

    @property
    def hidden(self) -> float:
        """Seconds of training on all ranks that lent ones have done so far.  Of two ways to count them the lower one:
        ``seconds_per_token`` and ``slowdown`` may be wrong, and what was measured bounds either."""
        return min(self.busy / self.slowdown, self.trained * self.seconds_per_token)


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
"""Asked whenever a group is complete, and while ranks are lent every second or so in which the trainer trains nothing.

``Snapshot`` is of the ranks that work, as any policy sees it: ``num_ranks`` and ``load.replica`` count them only.
"""


class TrainingPace:
    """What training takes, as the client measures it: by token, with all ranks and with those that are lent, and to
    begin on lent ones.  Of the last two steps that had such training the quicker one: the first step of a job compiles,
    and any may be held up.

    Times are seconds of one clock.
    """

    def __init__(self) -> None:
        self._lent: deque[float] = deque(maxlen=2)
        self._whole: deque[float] = deque(maxlen=2)
        self._setup: deque[float] = deque(maxlen=2)
        self._chunks: list[tuple[float, int, bool]] = []
        self._began: float | None = None
        self._since: float | None = None

    def begin_step(self, now: float) -> None:
        """Keep the paces of the step that is over, and begin with the next one."""
        whole = [chunk for chunk in self._chunks if not chunk[2]]
        first, *later = [chunk for chunk in self._chunks if chunk[2]] or [(0.0, 0, True)]
        self._whole.extend(_compute_pace(whole))
        # What the first chunk on lent ranks takes longer than those after it is what it takes to begin.
        self._lent.extend(_compute_pace(later))
        if first[1] and (pace := min(self._lent, default=STRIDE * min(self._whole, default=0.0))):
            self._setup.append(max(0.0, first[0] - first[1] * pace))
        self._chunks, self._began, self._since = [], now, None

    def lend(self, now: float) -> None:
        """Record that ranks are lent from now on."""
        self._since = now

    def take_back(self) -> None:
        """Record that no ranks are lent any more."""
        self._since = None

    def add(self, seconds: float, tokens: int, lent: bool) -> None:
        """Record a chunk; ``lent``: it was trained on lent ranks."""
        self._chunks.append((seconds, tokens, lent))

    @property
    def is_known(self) -> bool:
        """Whether a step was trained with all ranks."""
        return bool(self._whole)

    def describe(self, now: float) -> dict[str, Any]:
        """Fields of :class:`Training` that are known now."""
        whole = min(self._whole, default=0.0)
        fields: dict[str, Any] = {"seconds_per_token": whole, "setup": min(self._setup, default=0.0)}
        if self._lent and whole:
            fields["slowdown"] = max(1.0, min(self._lent) / whole)
        if self._began is not None:
            fields["elapsed"] = now - self._began
        if self._since is not None:
            lent = [(seconds, tokens) for seconds, tokens, lent in self._chunks if lent]
            fields |= {
                "lent": now - self._since,
                "busy": sum(one for one, _ in lent),
                "trained": sum(n for _, n in lent),
            }
        return fields


def _compute_pace(chunks: Sequence[tuple[float, int, bool]]) -> list[float]:
    """Seconds of a token, if any was trained."""
    tokens = sum(tokens for _, tokens, _ in chunks)
    return [sum(seconds for seconds, _, _ in chunks) / tokens] if tokens else []


def project_peak(outlook: Outlook | None) -> float:
    """Most KV tokens that the running requests are expected to have together, at any later moment (section 4.4).

    None: nothing runs.
    """
    return 0.0 if outlook is None else float((outlook.number * outlook.any_alive * outlook.context).max())


def make_load(running: int, waiting: int, tokens: int, prompt: int, limit: int) -> Load:
    """Requests of which only the number is known, and the sum of their tokens: all that run are alike.

    Args:
        tokens: tokens of the requests that run, prompts included; the others wait for their first one.
        prompt: tokens of a prompt, on average; ``limit``: of a response at most.
    """
    each = min(max(tokens // max(running, 1) - prompt, 1), limit)
    count = running + waiting
    return Load(
        prompt=np.full(count, prompt),
        output=np.repeat([each, 0], [running, waiting]),
        limit=np.full(count, limit),
        family=np.arange(count),
        replica=np.zeros(count, dtype=np.int64),
    )


def decide_by_room(training: Training, outlook: Outlook | None, room: float) -> LendingDecision:
    """Whether ranks may be lent, as far as it can be said without step times: ``lend``, or ``wait``.

    Up to :data:`LAST_MILESTONE` it is Algorithm 1.  Later a long rest and work for the trainer are asked for besides.

    Args:
        outlook: what is expected of the running requests; None: nothing runs, as between two turns of agents.
        room: KV tokens of the ranks that stay.
    """
    if why := _find_hindrance(training, project_peak(outlook), room):
        return LendingDecision(move=Move.WAIT, why=why)
    late = training.completion > LAST_MILESTONE + 1e-9
    if outlook is None:
        return LendingDecision(move=Move.WAIT if late else Move.LEND, why="nothing runs now")
    if late:
        tokens_left = float((outlook.width * outlook.any_alive).sum())
        if tokens_left < LEAST_REST * outlook.response:
            return LendingDecision(move=Move.WAIT, why=f"late: the round is over in {tokens_left:.0f} tokens")
        work = training.ready * training.seconds_per_token * training.slowdown
        if not training.ready or work < training.setup:
            return LendingDecision(move=Move.WAIT, why="late: there is little to train")
    return LendingDecision(move=Move.LEND, why="KV fits")


def _find_hindrance(training: Training, peak: float, room: float) -> str:
    """Why ranks may not be lent now, whatever it gains; empty if they may."""
    if training.completion < FIRST_MILESTONE - 1e-9:
        return "before the first milestone"
    if peak > ROOM * room:
        return f"KV: {peak:.0f} tokens expected, room for {room:.0f}"
    return ""


def make_lending_policy(
    predictor: StepPredictor | None,
    costs: SwitchCosts | None,
    num_ranks: int,
    degrees: Sequence[int],
    max_running: int | None = None,
) -> LendingPolicy:
    """The policy for a deployment.

    Args:
        predictor, costs: step times and switch costs of its profile; None without one: then :func:`decide_by_room`
            decides, and ranks are taken back when the round is over or KV no longer fits.
        num_ranks, degrees: ranks and degrees of the engine with all its ranks.
        max_running: requests that one replica decodes at once; None if memory is the only bound.
    """
    planner = LayoutPlanner(predictor, costs, max_running) if predictor is not None and costs is not None else None
    half_ranks = num_ranks // STRIDE
    usable = tuple(tp for tp in degrees if num_ranks % STRIDE == 0 and half_ranks % tp == 0)

    def decide(snapshot: Snapshot, history: LengthHistory, training: Training) -> LendingDecision:
        decision = decide_without_leaving(snapshot, history, training)
        if training.others is None or not training.ready or training.completion < LAST_MILESTONE:
            return decision
        if not snapshot.requests:
            return _say(snapshot, Move.LEAVE, "nothing runs here")
        leaving = planner and _decide_leaving(planner, snapshot, history, training, num_ranks)
        if not leaving or (decision.move is Move.LEND and decision.gain >= leaving.gain):
            return decision
        return leaving

    def decide_without_leaving(snapshot: Snapshot, history: LengthHistory, training: Training) -> LendingDecision:
        lent = snapshot.num_ranks < num_ranks
        outlook = look_ahead(snapshot.load, history) if len(snapshot.load) else None
        over = outlook is None and (planner is not None or training.complete == training.samples)
        if lent and over:
            return _say(snapshot, Move.TAKE_BACK, "the round is over")
        if not usable:
            return _say(snapshot, Move.NEVER, "no degree fits half of the ranks")
        if training.returned and not lent:
            return _say(snapshot, Move.NEVER, "ranks were lent in this step already")
        outlook = outlook and _end_with_spare(outlook, training.spare)
        left = snapshot.num_ranks if lent else half_ranks  # fewer than half where others have lent more
        rooms = (snapshot.room[tp] * (left // tp) for tp in usable if tp in snapshot.room and tp <= left)
        room = min(rooms, default=0.0)
        on = snapshot.load.output < snapshot.load.limit
        peak = max(project_peak(outlook), float((snapshot.load.prompt + snapshot.load.output)[on].sum()))
        if lent and peak > room:
            return _say(snapshot, Move.TAKE_BACK, f"KV: {peak:.0f} tokens expected, room for {room:.0f}")
        if not lent and (why := _find_hindrance(training, peak, room)):
            return _say(snapshot, Move.WAIT, why)
        if planner is None or costs is None:
            if lent:
                return _say(snapshot, Move.WAIT, "the round goes on")
            decision = decide_by_room(training, outlook, room)
            return replace(
                decision, tp=_choose_half_tp(usable, snapshot.tp) if decision.move is Move.LEND else snapshot.tp
            )
        if outlook is None:
            return _say(snapshot, Move.WAIT, "nothing runs now")
        courses = _plan_courses(planner, snapshot, outlook, num_ranks, tuple(degrees), usable)
        alive = np.append(np.concatenate([[1.0], outlook.any_alive])[: len(outlook.width)], 0.0)
        moves = _estimate_moves(costs, snapshot.tp, snapshot.load, outlook)
        work = expect_work(snapshot.load, history, training, outlook)
        if lent:
            return _decide_return(courses, alive * moves, work, training)
        decision = _decide_lending(courses, alive * moves, work, training)
        # Responses to one prompt are alike in length, which the curve leaves out: they end as one.
        alike = len(snapshot.load) / len(np.unique(snapshot.load.family))
        unlikely = UNLIKELY**alike if len(history) >= training.samples else 0.0
        if decision.move is Move.LEND and (loss := _estimate_loss(courses, moves, outlook, training, unlikely)) > RISK:
            return replace(decision, move=Move.WAIT, why=f"{loss:.1%} of the step may be lost", tp=snapshot.tp)
        return decision

    return decide


def _say(snapshot: Snapshot, move: Move, why: str) -> LendingDecision:
    """A decision without an estimate."""
    return LendingDecision(move=move, why=why, tp=snapshot.tp)


def _choose_half_tp(usable: Sequence[int], tp: int) -> int:
    """Degree of the ranks that stay: the one in force, or the next lower one that fits them."""
    return max(degree for degree in usable if degree <= max(tp, usable[0]))


@dataclass(frozen=True, kw_only=True)
class _Courses:
    """The best course on all ranks and on those that stay, and the degrees in force there at the start.

    Attributes:
        tokens: the batch's tokens so far that are not trained yet, in groups that are complete and in others.
    """

    whole: Course
    half: Course
    whole_tp: int
    half_tp: int
    tokens: int

    def get_floor(self, training: Training) -> float:
        """Seconds that the step takes if the round ends now."""
        return training.elapsed + training.seconds_per_token * (training.ready + training.pending + self.tokens)

    @property
    def slower(self) -> float:
        """Share of the time with ranks lent that all of them would save, as things are now."""
        half = self.half.running[self.half.degrees.index(self.half_tp), 0]
        return float(1 - self.whole.running[:, 0].min() / half)

    def unfold(self, alive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Seconds up to the start of each interval and to the end on all ranks and on those that stay, if some request
        runs until then, ``[intervals + 1]`` each.

        Args:
            alive: probability that one does, ``[intervals]``.
        """
        ways = ((self.whole, self.whole_tp), (self.half, self.half_tp))
        whole, half = (np.append(0.0, np.cumsum(np.diff(course.follow(0, tp)[0]) / alive)) for course, tp in ways)
        return whole, half

    def seconds_if_returned(self, start: int, moving: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Seconds with ranks lent from the start of interval ``start``: up to the start of each later interval, and of
        the whole rest if they are taken back there.  Both begin with now and end with the end of the round."""
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
    half_ranks, tp = num_ranks // STRIDE, snapshot.tp
    half_tp = _choose_half_tp(usable, tp)
    if snapshot.num_ranks < num_ranks:
        half = snapshot
        replica = np.arange(len(snapshot.load)) % (num_ranks // tp)  # those that come back take half of the requests
        whole = replace(snapshot, num_ranks=num_ranks, degrees=degrees, load=replace(snapshot.load, replica=replica))
    else:
        whole = snapshot
        replica = snapshot.load.replica // STRIDE % (half_ranks // half_tp)
        load = replace(snapshot.load, replica=replica)
        half = replace(snapshot, num_ranks=half_ranks, degrees=usable, tp=half_tp, load=load)
    return _Courses(
        whole=planner.plan(whole, outlook).course,
        half=planner.plan(half, outlook).course,
        whole_tp=tp,
        half_tp=half_tp,
        tokens=int((snapshot.load.prompt + snapshot.load.output).sum()),
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
        tokens: that the trainer can have begun by then, in the round, if it is quick enough; those that are ready now
            included.
        samples: in complete groups, of the whole batch.
    """

    tokens: np.ndarray
    samples: np.ndarray


def expect_work(load: Load, history: LengthHistory, training: Training, outlook: Outlook) -> Work:
    """The work expected of groups: each is complete when all of its prompt's responses that still run have ended."""
    ends = np.concatenate([[0.0], np.cumsum(outlook.width)])
    curve = history.make_curve(int(load.limit.max()), load.output)
    alive = curve.compute_alive(load.output, np.maximum(load.limit - load.output, 1), ends)
    ending = -np.diff(alive, axis=1)  # probability to end in each interval
    middle = (ends[:-1] + ends[1:]) / 2
    ended = 1 - alive
    own = np.concatenate([np.zeros((len(load), 1)), np.cumsum(ending * middle, axis=1)], axis=1)
    tokens = (load.prompt + load.output)[:, None] + own / np.maximum(ended, 1e-12)
    # Not with a matrix of families and requests: there may be thousands of both.
    order = np.argsort(load.family, kind="stable")
    family, starts = np.unique(load.family[order], return_index=True)
    log_done, in_group = (
        np.add.reduceat(each[order], starts) for each in (np.log(np.maximum(ended, 1e-12)), tokens)
    )  # [families, intervals + 1]
    done, others = np.exp(log_done), np.exp(log_done.sum(axis=0) - log_done)
    # The group that is complete last ends the round: nothing of it can be trained meanwhile.
    early = np.cumsum(np.diff(done, axis=1, prepend=0.0) * (1 - others), axis=1)
    each = in_group + training.pending / len(family)
    left = (training.samples - training.complete) / len(family)
    return Work(tokens=training.ready + (early * each).sum(axis=0), samples=training.complete + left * done.sum(axis=0))


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
    """Decide while all ranks work, by what is expected."""
    training_seconds = training.seconds_per_token * work.tokens
    _, held = courses.whole.follow(0, courses.whole_tp)
    gains = np.full(len(moving), -np.inf)
    # Beyond the last milestone nothing is put off: questions come when groups are complete, late ones far apart.
    later = np.flatnonzero(work.samples[:-1] <= LAST_MILESTONE * training.samples)
    for start in {0, *later.tolist()}:
        lent, totals = courses.seconds_if_returned(start, moving)
        hidden = _count_hidden_seconds(lent, training_seconds[start:], training.setup, training.slowdown)
        without = courses.whole.to_go[start, courses.whole.degrees.index(held[start])]
        gains[start] = (without - moving[start] - totals + hidden).max()
    gain, least = float(gains[0]), max(MARGIN * float(courses.whole.to_go[0].min()), MARGIN_SECONDS)
    if gain < least or gains.max() - gain > least:
        why = "too little to gain" if gains.max() < least else "later is better"
        return LendingDecision(move=Move.WAIT, gain=gain, why=why, tp=courses.whole_tp)
    return LendingDecision(move=Move.LEND, gain=gain, why="hides training", tp=courses.half_tp)


def _estimate_loss(
    courses: _Courses, moves: np.ndarray, outlook: Outlook, training: Training, unlikely: float
) -> float:
    """Most of the step that a lending now may lose, as a share, if no other group gets complete: because the round is
    over before the trainer has begun or caught up, or because ranks are taken back when it has.

    Args:
        moves: seconds of a lending or a return at the start of each interval and at the end.
        unlikely: an end of the round that is less likely by an interval is left out of account there.
    """
    whole, half = courses.unfold(outlook.any_alive)
    ready = training.seconds_per_token * training.ready
    hidden = _count_hidden_seconds(half, np.full(len(half), ready), training.setup, training.slowdown)
    lost = moves[0] + half - whole - hidden
    done = min(int(np.searchsorted(half, training.setup + training.slowdown * ready)), len(half) - 1)
    lost[done] += moves[done]
    may = np.append(0.0, 1 - outlook.any_alive) >= unlikely
    may[done] = True
    return float((lost / (courses.get_floor(training) + whole + 1e-9))[: done + 1][may[: done + 1]].max())


def _decide_leaving(
    planner: LayoutPlanner, snapshot: Snapshot, history: LengthHistory, training: Training, num_ranks: int
) -> LendingDecision | None:
    """Decide for the engine with the fewest requests, which go on elsewhere from their tokens; None: it stays.

    Gained is what its ranks train of what is ready, and those that the trainer has would not, less what the round of
    the others takes longer.  All engines are taken to be in the layout of this one.
    """
    others, load, tp = training.others, snapshot.load, snapshot.tp
    replicas = snapshot.num_ranks // tp
    if others is None or not len(load) or not planner.predictor.has_prefill(tp):
        return None
    prompt, limit = int(load.prompt.mean()), int(load.limit.max())
    their_load = make_load(others.running, others.waiting, others.tokens, prompt, limit)
    rows = np.argsort(load.output)[:: others.engines]  # what one of the others gets
    lengths = (load.prompt + load.output)[rows]
    joined = Load(
        prompt=np.append(their_load.prompt, load.prompt[rows]),
        output=np.append(their_load.output, load.output[rows]),
        limit=np.append(their_load.limit, load.limit[rows]),
        family=np.arange(len(their_load) + len(rows)),
    )

    def look(some: Load) -> tuple[Outlook | None, float]:
        """What is expected of these requests in one engine, and the seconds until they have ended."""
        some = replace(some, replica=np.arange(len(some)) % replicas)
        outlook = look_ahead(some, history) if len(some) else None
        if outlook is None:
            return None, 0.0
        outlook = _end_with_spare(outlook, training.spare)
        course = planner.plan(replace(snapshot, load=some), outlook).course
        return outlook, float(course.to_go[0, course.degrees.index(tp)])

    outlook, longer = look(joined)
    if project_peak(outlook) > ROOM * others.room:
        return None
    used, rms = min(replicas, len(rows)), float(np.sqrt((lengths**2.0).mean()))
    pause = others.delay + float(planner.predictor.prefill_uniform(tp, -(-len(rows) // used), rms, used))
    if snapshot.num_ranks < num_ranks:  # the others are taken back before
        pause += planner.costs.estimate_lending(tp, load.prompt + load.output).seconds
    stays = max(look(load)[1], look(their_load)[1])
    share = snapshot.num_ranks / num_ranks / (others.engines + 1)  # of all ranks, those that it has now
    ready = training.seconds_per_token * training.ready
    hidden = min(others.lent * (pause + longer) + share * max(pause + longer - training.setup, 0.0), ready)
    gain = hidden - min(others.lent * stays, ready) - (pause + longer - stays)
    if gain < max(MARGIN * stays, MARGIN_SECONDS) or pause > RISK * (training.elapsed + ready + stays):
        return None
    return LendingDecision(move=Move.LEAVE, gain=gain, why="the others can do its last requests", tp=tp)


def _decide_return(courses: _Courses, moving: np.ndarray, work: Work, training: Training) -> LendingDecision:
    """Decide while ranks are lent."""
    lent, totals = courses.seconds_if_returned(0, moving)
    stays = float(totals[-1])
    totals -= _count_hidden_seconds(lent, training.seconds_per_token * work.tokens, 0.0, training.slowdown)
    gain = float(totals[1:].min() - totals[0])
    least = max(MARGIN * float(totals[0]), MARGIN_SECONDS)
    if gain >= 0 and totals[-1] - totals[0] >= least:
        return LendingDecision(
            move=Move.TAKE_BACK, gain=gain, why="the rest is faster on all ranks", tp=courses.half_tp
        )
    lost = courses.slower * training.lent + 2 * moving[0] - training.hidden
    risk = max(RISK * courses.get_floor(training), MARGIN_SECONDS)
    if not training.ready and lost > risk and stays - totals[0] >= least:
        why = f"the trainer waits, {lost:.1f} s are lost"
        return LendingDecision(move=Move.TAKE_BACK, gain=gain, why=why, tp=courses.half_tp)
    return LendingDecision(move=Move.WAIT, gain=gain, why="there is training to hide", tp=courses.half_tp)
