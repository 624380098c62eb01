"""What it would gain to move the last responses of a round to few of several engines (modelled).

    python -m studies.repack [--quick] [--jobs N] [--rounds N] [--json FILE]

Engines of eight GPUs start a round together, each with as many responses.  Each decodes in the degree that is best at
the moment, and switches cost nothing: what is left to gain is then between the engines.  At one moment all responses
that still run are moved to ``m`` of the engines, dealt out evenly; those that move are computed again from their
tokens, and the others of their new engine wait for it.  Moment and ``m`` are the best ones, known in advance: bounds.

Two things are asked.  **The round**: how much sooner does it end?  **Free engines**: which share of all engines' time
is free for a trainer if the round may end 1% later, or 5%; and which is without moving, as engines end one after the
other?
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from sglang_pat.tools.commands import Parser, run
from studies.gains import MACHINES, MODELS, count_room
from studies.modelled import RANKS, Roofline, make_times
from studies.shapes import NAMED, parse_shape
from studies.starts import CORRELATION, GROUP, PROMPT

ENGINES = (2, 8, 32)
SIZES = (128, 512)
"""Numbers of responses of an engine in a round."""
SHAPES = ("deepscaler", "rollpacker")
NODES = (("8×A40, PCIe", "Llama-3.1-8B"), ("8×H100, NVLink", "Llama-3.1-8B"), ("8×H100, NVLink", "Qwen2.5-32B"))
MOMENTS = 48
"""Moments that are tried, at equal shares of the round."""
LATER = (0.01, 0.05)
"""Shares of a round by which it may end later."""


@dataclass(frozen=True)
class Task:
    machine: str
    model: str
    shape: str
    engines: int
    size: int
    seed: int


@dataclass(frozen=True)
class Result:
    """Seconds of a round; shares of its time by which moving ends it sooner, and for which engines are free, without
    moving and with, for each of :data:`LATER`."""

    seconds: float
    sooner: float
    free: float
    free_moved: tuple[float, ...]


class Engine:
    """Responses that decode on one engine, each time in its best degree.

    Args:
        context, left: tokens of each response so far, prompt included, and to come, ``[responses]``.
        ranks: number of its ranks.
    """

    def __init__(
        self, times: Roofline, degrees: list[int], context: np.ndarray, left: np.ndarray, ranks: int = RANKS
    ) -> None:
        order = np.argsort(left, kind="stable")
        self.context, self.left = context[order], left[order]
        self._ends = np.concatenate([[0], np.unique(self.left)])
        begin = np.searchsorted(self.left, self._ends[:-1], side="right")
        number = len(left) - begin
        sums = np.concatenate([np.cumsum(self.context[::-1])[::-1], [0]])[begin]
        tokens = sums + number * (self._ends[:-1] + self._ends[1:]) / 2
        steps = [
            times.step_seconds(tp, np.ceil(number * tp / ranks), tokens * tp / ranks * _round_up(number, tp / ranks))
            for tp in degrees
        ]
        seconds = np.min(steps, axis=0) * np.diff(self._ends) if len(left) else np.zeros(0)
        self._clock = np.concatenate([[0.0], np.cumsum(seconds)])

    @property
    def seconds(self) -> float:
        """Seconds until all have ended."""
        return float(self._clock[-1])

    def look(self, now: float) -> tuple[np.ndarray, np.ndarray]:
        """Context and tokens to come of what runs after ``now`` seconds."""
        steps = int(np.interp(now, self._clock, self._ends))
        running = self.left > steps
        return self.context[running] + steps, self.left[running] - steps


def _round_up(number: np.ndarray, share: float) -> np.ndarray:
    """How many times as much as the mean the fullest replica has, which gets this share of the requests."""
    return np.ceil(number * share) / np.maximum(number * share, 1e-9)


def move(times: Roofline, degrees: list[int], running: list[tuple[np.ndarray, np.ndarray]], count: int) -> float:
    """Seconds until all has ended, if it is moved to ``count`` of the engines: those with the most."""
    order = sorted(running, key=lambda one: -len(one[0]))
    stay, leave = order[:count], order[count:]
    context, left = (np.concatenate([one[part] for one in leave]) for part in (0, 1))
    longest = 0.0
    for place, (own_context, own_left) in enumerate(stay):
        new_context, new_left = context[place::count], left[place::count]
        pause = 0.0
        if len(new_context):
            tp = max(degrees)
            replicas = RANKS // tp
            pause = float(times.prefill_seconds(tp, np.ceil(len(new_context) / replicas), new_context.mean()))
        engine = Engine(times, degrees, np.append(own_context, new_context), np.append(own_left, new_left))
        longest = max(longest, pause + engine.seconds)
    return longest


def study(task: Task) -> Result:
    machine, model = MACHINES[task.machine], MODELS[task.model]
    times, shape = make_times(machine, model), parse_shape(NAMED[task.shape])
    degrees = [tp for tp, room in ((tp, count_room(machine, model, tp)[tp]) for tp in (1, 2, 4, 8)) if room > PROMPT]
    random = np.random.default_rng((task.seed, task.engines, task.size))
    engines = [
        Engine(times, degrees, np.full(task.size, PROMPT), shape.draw(task.size, CORRELATION, GROUP, random))
        for _ in range(task.engines)
    ]
    seconds = max(engine.seconds for engine in engines)
    free = sum(seconds - engine.seconds for engine in engines) / (seconds * task.engines)
    counts = [2**power for power in range(task.engines.bit_length()) if 2**power < task.engines]
    least, most = seconds, [free] * len(LATER)
    for now in np.linspace(0, seconds, MOMENTS, endpoint=False)[1:]:
        running = [engine.look(now) for engine in engines]
        room = count_room(machine, model, max(degrees))[max(degrees)] * RANKS // max(degrees)
        for count in counts:
            if sum(context.sum() + left.sum() for context, left in running) / count > room:
                continue
            end = now + move(times, degrees, running, count)
            least = min(least, end)
            before = sum(max(now - engine.seconds, 0.0) for engine in engines)
            share = (before + (task.engines - count) * (end - now)) / (end * task.engines)
            most = [
                max(known, share) if end <= (1 + later) * seconds else known
                for known, later in zip(most, LATER, strict=True)
            ]
    return Result(seconds, 1 - least / seconds, free, tuple(most))


def study_all(
    name: str, description: str, sizes: tuple[int, ...], study: Callable[[Task], Any], argv: list[str] | None
) -> list[tuple[Task, list[Any]]]:
    """Results of all settings, with the first task of each: those of its rounds.

    Args:
        name, description: of the command; ``sizes``: numbers of engines; ``study``: of a task, returns a dataclass.
    """
    parser = Parser(prog=f"python -m studies.{name}", description=description)
    parser.add_argument("--quick", action="store_true", help="two engines, one round")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one a core)")
    parser.add_argument("--rounds", type=int, default=3, help="of each setting (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the table")
    args = parser.parse_args(argv)
    engines, rounds = (sizes[:1], 1) if args.quick else (sizes, args.rounds)
    tasks = [
        Task(machine, model, shape, number, size, seed)
        for machine, model in NODES
        for shape in SHAPES
        for size in SIZES
        for number in engines
        for seed in range(rounds)
    ]
    with ProcessPoolExecutor(args.jobs) as pool:
        results = list(track(pool.map(study, tasks), "rounds", len(tasks), console=Console(stderr=True)))
    if args.json:
        pairs = [asdict(task) | asdict(one) for task, one in zip(tasks, results, strict=True)]
        args.json.write_text(json.dumps(pairs, indent=1))
    return [(tasks[at], results[at : at + rounds]) for at in range(0, len(tasks), rounds)]


def main(argv: list[str] | None = None) -> int:
    found = study_all("repack", "What moving the last responses gains (modelled).", ENGINES, study, argv)
    later = [f"free, {share:.0%} later" for share in LATER]
    heads = ("node", "model", "lengths", "responses an engine", "engines", "round, s", "sooner", "free", *later)
    table = Table(*heads, title="Moving the last responses of a round to few engines, at best (modelled)")
    for task, some in found:
        columns = [(one.sooner, one.free, *one.free_moved) for one in some]
        cells = [
            f"{mean(values):.1%} ({min(values):.1%} to {max(values):.1%})" for values in zip(*columns, strict=True)
        ]
        seconds = f"{mean(one.seconds for one in some):.0f}"
        table.add_row(task.machine, task.model, task.shape, str(task.size), str(task.engines), seconds, *cells)
    Console(highlight=False, width=200).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(run("studies.repack", main))
