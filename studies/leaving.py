"""What it gains that engines leave a round one after the other, when their ranks can train (modelled).

    python -m studies.leaving [--quick] [--jobs N] [--rounds N] [--json FILE]

Several engines of eight GPUs generate a batch, and a trainer has the ranks that they lend it, as in verl's mode
``sglang_pat_stream_lent``.  The policy of :mod:`sglang_pat.policies.lending` decides at each complete group, from the
lengths of earlier rounds.  Three ways: ``plain``, all is trained after the round; ``lend``, engines lend half of their
ranks; ``leave``, and the one with the fewest responses may leave: the others go on with them, from their tokens.

Each engine decodes in the degree that is best at the moment, and switches between degrees cost nothing.  A lending, a
return and what is computed again cost what the profile says.  A group's responses begin in one engine.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from statistics import mean

import numpy as np
from rich.console import Console
from rich.table import Table

from sglang_pat.policies.lending import STRIDE, Move, Others, Training, make_lending_policy
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.snapshot import Load, Snapshot
from sglang_pat.predict.cost import build_predictors
from sglang_pat.tools.commands import run
from studies import modelled
from studies.gains import MACHINES, MODELS, count_room
from studies.lending import SETUP, TRAINING
from studies.modelled import RANKS
from studies.repack import ENGINES, Engine, Task, study_all
from studies.shapes import NAMED, parse_shape
from studies.starts import CORRELATION, GROUP, PROMPT

WAYS = ("plain", "lend", "leave")
TICKS = 256
"""Looks at the round, at equal shares of its time in ``plain``."""
EARLIER = 2
"""Rounds whose lengths are known."""
DELAY = 1.0
"""Seconds until verl's client sends a request that was aborted elsewhere."""


@dataclass(frozen=True)
class Result:
    """One step in one way: seconds of its round and of all of it, and engines that left with and without requests."""

    round: float
    step: float
    left_busy: int = 0
    left_idle: int = 0


@dataclass(frozen=True)
class Steps:
    """Results of one step, in each of :data:`WAYS`."""

    plain: Result
    lend: Result
    leave: Result


@dataclass
class Running:
    """An engine of the round; ``share``: of its ranks that generate; ``free_at``: when the trainer has the others."""

    context: np.ndarray
    left: np.ndarray
    family: np.ndarray
    since: float = 0.0
    share: float = 1.0
    free_at: float = 0.0
    never: bool = False
    engine: Engine = field(init=False)

    def begin(self, node: Node, now: float) -> None:
        """Decode from ``now`` on."""
        ranks = round(RANKS * self.share)
        order = np.argsort(self.left, kind="stable")
        self.context, self.left, self.family = self.context[order], self.left[order], self.family[order]
        self.engine, self.since = Engine(node.times, node.list_degrees(ranks), self.context, self.left, ranks), now

    def look(self, now: float) -> None:
        """Leave out what has ended by ``now``; the others have so many tokens more."""
        if now <= self.since:
            return
        context, left = self.engine.look(now - self.since)
        self.family = self.family[len(self.family) - len(left) :]
        self.context, self.left = context, left


class Node:
    """Step times and policy of an engine."""

    def __init__(self, machine: str, model: str) -> None:
        kind, size = MACHINES[machine], MODELS[model]
        self.times = modelled.make_times(kind, size)
        self.degrees = [tp for tp in (1, 2, 4, 8) if count_room(kind, size, tp)[tp] > PROMPT]
        self.room = count_room(kind, size, self.degrees[0])
        profile = modelled.build(kind, size, self.degrees[0], ("leaving",), False, self.times, room=self.room)
        predictor, self.costs = build_predictors(profile)
        self.decide = make_lending_policy(predictor, self.costs, RANKS, self.degrees)

    def list_degrees(self, ranks: int) -> list[int]:
        """Degrees of a layout of so many ranks."""
        return [tp for tp in self.degrees if tp <= ranks]

    def choose_tp(self, number: int, context: float, ranks: int) -> int:
        """The degree of the least step time."""

        def estimate(tp: int) -> float:
            batch = -(-number * tp // ranks)
            return float(self.times.step_seconds(tp, batch, batch * context))

        return min(self.list_degrees(ranks), key=estimate)


def simulate(node: Node, lengths: np.ndarray, task: Task, limit: int, history: LengthHistory, way: str) -> Result:
    """One step; ``lengths``: of all engines, ``[engines, responses]``."""
    families = np.arange(lengths.size).reshape(lengths.shape) // GROUP
    engines = [Running(np.full(task.size, PROMPT), own, family) for own, family in zip(lengths, families, strict=True)]
    for engine in engines:
        engine.begin(node, 0.0)
    plain = max(engine.engine.seconds for engine in engines)
    tokens = np.bincount(families.ravel(), (lengths + PROMPT).ravel())
    whole = TRAINING["as in the paper"] * plain
    per_token, total = whole / tokens.sum(), len(engines)
    if way == "plain":
        return Result(plain, plain + whole)
    now, tick, trained, busy, since, seen = 0.0, plain / TICKS, 0.0, 0.0, 0.0, 0
    returned, left_busy, left_idle = set[int](), 0, 0
    while any(len(engine.left) for engine in engines):
        now += tick
        free = sum(1 - engine.share for engine in engines if now >= engine.free_at) / total
        for engine in engines:
            engine.look(now)
        alive = np.unique(np.concatenate([engine.family for engine in engines]))
        complete = len(tokens) - len(alive)
        ready = tokens.sum() - tokens[alive].sum() - trained
        work = min(free * tick / per_token, ready)
        trained, ready = trained + work, ready - work
        busy += tick if work else 0.0
        if complete == seen and not any(0 < engine.share < 1 for engine in engines):
            continue
        is_new, seen = complete != seen, complete
        awake = [number for number, engine in enumerate(engines) if engine.share]
        fewest = min(awake, key=lambda number: len(engines[number].left))
        for number in awake:
            engine = engines[number]
            may_leave = way == "leave" and is_new and number == fewest and len(awake) > 1
            asked = may_leave or engine.share < 1 or (is_new and not engine.never)
            if not asked:
                continue
            others = None
            if may_leave:
                fullest = max((engines[one] for one in awake if one != number), key=lambda one: len(one.left))
                room = min(node.room[tp] * RANKS * fullest.share // tp for tp in node.list_degrees(RANKS // STRIDE))
                others = Others(
                    engines=len(awake) - 1, running=len(fullest.left), waiting=0, tokens=int(fullest.context.sum()),
                    room=int(room), delay=DELAY, lent=sum(1 - one.share for one in engines) / total,
                )  # fmt: skip
            lent = any(0 < one.share < 1 for one in engines)
            training = Training(
                samples=task.size, complete=complete * GROUP // total, ready=int(ready / total),
                seconds_per_token=per_token * total, setup=SETUP, elapsed=now, returned=number in returned,
                lent=now - since if lent else 0.0, busy=busy if lent else 0.0,
                trained=int(trained / total) if lent else 0, others=others,
                slowdown=total / sum(1 - one.share for one in engines) if engine.share < 1 else STRIDE,
            )  # fmt: skip
            move = node.decide(make_snapshot(node, engine, limit, now), history, training).move
            if move is Move.LEND and engine.share == 1 and not engine.never:
                since = since or now
                pause = estimate_move(node, engine)
                engine.share, engine.free_at = 1 / STRIDE, now + pause + SETUP
                engine.begin(node, now + pause)
            elif move is Move.TAKE_BACK and engine.share < 1:
                engine.share, engine.never = 1.0, True
                returned.add(number)
                engine.begin(node, now + estimate_move(node, engine))
            elif move is Move.NEVER:
                engine.never = True
            elif move is Move.LEAVE:
                left_busy, left_idle = left_busy + (len(engine.left) > 0), left_idle + (len(engine.left) == 0)
                since = since or now
                leave(node, engines, number, [one for one in awake if one != number], now)
                awake.remove(number)
                break
    round_ = max(engine.since + engine.engine.seconds for engine in engines)
    free = sum(1 - engine.share for engine in engines if now >= engine.free_at) / total
    trained -= max(now - round_, 0.0) * free / per_token  # the last tick is longer than the round
    back = max((estimate_move(node, engine) for engine in engines if 0 < engine.share < 1), default=0.0)
    rest = whole - max(trained, 0.0) * per_token
    return Result(float(round_), float(round_ + back + rest), left_busy, left_idle)


def make_snapshot(node: Node, engine: Running, limit: int, now: float) -> Snapshot:
    """What the policy sees of an engine."""
    ranks, number = round(RANKS * engine.share), len(engine.left)
    tp = node.choose_tp(max(number, 1), float(engine.context.mean()) if number else PROMPT, ranks)
    load = Load(
        prompt=np.full(number, PROMPT), output=engine.context - PROMPT, limit=np.full(number, limit),
        family=engine.family, replica=np.arange(number) % (ranks // tp),
    )  # fmt: skip
    return Snapshot(
        now=now, tp=tp, degrees=tuple(node.list_degrees(ranks)), num_ranks=ranks, requests=number,
        peak=number, last_arrival=0.0, complete=True, in_round=True, load=load, room=node.room,
    )  # fmt: skip


def estimate_move(node: Node, engine: Running) -> float:
    """Seconds of a lending, or of a return."""
    if not len(engine.context):
        return 0.0
    tp = node.choose_tp(len(engine.left), float(engine.context.mean()), RANKS // STRIDE)
    return node.costs.estimate_lending(tp, engine.context).seconds


def leave(node: Node, engines: list[Running], number: int, stay: list[int], now: float) -> None:
    """Give the responses of an engine to the others, which compute them again first."""
    gone = engines[number]
    back = estimate_move(node, gone) if 0 < gone.share < 1 else 0.0
    for place, one in enumerate(stay):
        rows = slice(place, None, len(stay))
        if not len(context := gone.context[rows]):
            continue
        engine = engines[one]
        ranks = round(RANKS * engine.share)
        tp = max(node.list_degrees(ranks))
        replicas = min(ranks // tp, len(context))
        pause = float(node.times.prefill_seconds(tp, -(-len(context) // replicas), context.mean()))
        for name in ("context", "left", "family"):
            setattr(engine, name, np.append(getattr(engine, name), getattr(gone, name)[rows]))
        engine.begin(node, max(now, engine.since) + back + DELAY + pause)
    gone.context, gone.left, gone.family = gone.context[:0], gone.left[:0], gone.family[:0]
    gone.share, gone.free_at = 0.0, now + back + SETUP
    gone.begin(node, now)


def study(task: Task) -> Steps:
    node, shape = Node(task.machine, task.model), parse_shape(NAMED[task.shape])
    random = np.random.default_rng((task.seed, task.engines, task.size))
    count, history = task.engines * task.size, LengthHistory()
    for _ in range(EARLIER):
        for number, length in enumerate(shape.draw(count, CORRELATION, GROUP, random)):
            history.observe(int(length), number // GROUP, length < shape.limit)
    lengths = shape.draw(count, CORRELATION, GROUP, random).reshape(task.engines, task.size)
    return Steps(*(simulate(node, lengths, task, shape.limit, history, way) for way in WAYS))


def main(argv: list[str] | None = None) -> int:
    found = study_all("leaving", "What engines that leave a round gain (modelled).", ENGINES, study, argv)
    heads = ("node", "model", "lengths", "responses an engine", "engines", "plain, s", "lend", "leave", "left, idle")
    table = Table(*heads, title="Plain over the time of a step: ranks lent, and engines that leave (modelled)")
    for task, some in found:
        cells = []
        for way in WAYS[1:]:
            gains = [one.plain.step / getattr(one, way).step for one in some]
            cells.append(f"{mean(gains):.3f} ({min(gains):.3f} to {max(gains):.3f})")
        left = ", ".join(f"{mean(getattr(one.leave, name) for one in some):.1f}" for name in ("left_busy", "left_idle"))
        seconds = f"{mean(one.plain.step for one in some):.0f}"
        table.add_row(task.machine, task.model, task.shape, str(task.size), str(task.engines), seconds, *cells, left)
    console = Console(highlight=False, width=200)
    console.print(table)
    against = [one.lend.step / one.leave.step for _, some in found for one in some]
    console.print(f"leave against lend: {mean(against):.3f} on average, {min(against):.3f} to {max(against):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(run("studies.leaving", main))
