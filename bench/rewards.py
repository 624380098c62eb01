"""Rewards of programs: the adaptive time limit against a fixed one, what it cuts, and what a busy machine does to it.

    python bench/rewards.py [--quick] [--only cost speed wrong-cuts busy] [--json FILE]

Programs are made up and really run, in the sandbox of docs/rewards.md, by two workers.  The rollout is emulated: it is
a list of times at which responses end.

``cost``: of a start and of a test case.  ``speed``: rollout and reward together.  ``wrong-cuts``: right answers whose
times lie far apart; the programs sleep, and all limits are a twentieth, so that there are many cuts.  ``busy``: right
answers, first alone, then beside two processes that compute; which of them would be cut by which clock.
"""

from __future__ import annotations

import multiprocessing
import queue
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import _bench

from reward_sandbox.limits import LimitRules, TimeLimits
from reward_sandbox.programs import Score, get_keys, run_again, score_response
from reward_sandbox.runs import Run, Sandbox
from reward_sandbox.sandbox import make_sandbox

WORKERS = 2
SLEEPERS = 6
"""Workers for programs that sleep."""
ENDLESS = 0.05
"""Share of programs that never end; the paper's Fig. 7a."""
WRONG, RAISES = 0.3, 0.1
SCALE = 20
"""The limits of ``wrong-cuts`` are divided by it."""
SPIN = "n = int(input())\nfor _ in range({count}): pass\nprint(n + 1)"
SLEEP = "import time\nn = int(input())\ntime.sleep({seconds})\nprint(n + 1)"


@dataclass(frozen=True)
class ProgramResponse:
    """A program of one problem, and what it is."""

    problem: int
    kind: str
    program: str

    @property
    def text(self) -> str:
        return f"```python\n{self.program}\n```"

    @property
    def truth(self) -> dict[str, list[str]]:
        return {"inputs": [f"{self.problem}{case}" for case in range(2)],
                "outputs": [str(int(f"{self.problem}{case}") + 1) for case in range(2)]}  # fmt: skip


def measure_speed(sandbox: Sandbox) -> float:
    """Turns of a loop that a program makes in a second."""
    with sandbox.open(SPIN.format(count=10_000_000)) as session:
        return 10_000_000 / min(session.run("1", 60.0, 60.0).cpu for _ in range(3))


def make_responses(problems: int, group: int, speed: float, slowest: float, seed: int) -> list[ProgramResponse]:
    """Groups of each problem: right, wrong, failing and endless ones.

    Problems take from 0.05 seconds to ``slowest``, most of them less than one.  Right answers to a quick problem differ
    by up to two times, to one of more than 0.6 seconds by a tenth to both sides.
    """
    draw, responses = random.Random(seed), list[ProgramResponse]()
    for problem in range(problems):
        seconds = 0.05 * (slowest / 0.05) ** (problem / (problems - 1)) ** 2
        for _ in range(group):
            factor = draw.uniform(1, 2) if seconds <= 0.6 else draw.uniform(0.9, 1.1)
            right = SPIN.format(count=int(seconds * factor * speed / 2))  # two test cases
            responses.append(ProgramResponse(problem, "right", right))
    for number in draw.sample(range(len(responses)), round((ENDLESS + WRONG + RAISES) * len(responses))):
        kind, program = "wrong", "print(int(input()))"
        if draw.random() < RAISES / (WRONG + RAISES):
            kind, program = "raises", "raise ValueError(input())"
        responses[number] = ProgramResponse(responses[number].problem, kind, program)
    others = [number for number, response in enumerate(responses) if response.kind != "right"]
    for number in draw.sample(others, round(ENDLESS * len(responses))):
        responses[number] = ProgramResponse(responses[number].problem, "endless", "while True: pass")
    return responses


def make_rollout(count: int, seconds: float, seed: int) -> list[float]:
    """When responses end: lognormal lengths, the longest at ``seconds``."""
    draw = random.Random(seed)
    lengths = [draw.lognormvariate(0, 0.8) for _ in range(count)]
    return [length / max(lengths) * seconds for length in lengths]


def run_step(
    responses: Sequence[ProgramResponse],
    ends: Sequence[float],
    sandbox: Sandbox,
    limits: TimeLimits,
    maximum: float,
    workers: int = WORKERS,
) -> tuple[float, list[Score], list[tuple[ProgramResponse, int]]]:
    """Rewards beside the emulated rollout: seconds until both are done, scores, and what is to be run again."""
    waiting: queue.Queue[int | None] = queue.Queue()
    scores: list[Any] = [None] * len(responses)
    again, lock = list[tuple[ProgramResponse, int]](), threading.Lock()

    def work() -> None:
        while (number := waiting.get()) is not None:
            response = responses[number]
            with lock:
                seconds = limits.get_limits(get_keys(response.truth))
            score = scores[number] = score_response(response.text, response.truth, sandbox, seconds, maximum=maximum)
            with lock:
                repeats = limits.record(score.runs)
            again.extend((response, index) for index, yes in enumerate(repeats) if yes)

    start = time.monotonic()
    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for end, number in sorted(zip(ends, range(len(responses)), strict=True)):
        time.sleep(max(0.0, start + end - time.monotonic()))
        waiting.put(number)
    for _ in threads:
        waiting.put(None)
    for thread in threads:
        thread.join()
    return time.monotonic() - start, scores, again


def bench_speed(sandbox: Sandbox, quick: bool) -> dict[str, Any]:
    """A fixed limit of 30 s, then two steps with adaptive limits: nothing is learnt yet, and the next one."""
    problems, group, rollout, maximum = (8, 8, 12.0, 6.0) if quick else (16, 16, 60.0, 30.0)
    speed = measure_speed(sandbox)
    steps = [make_responses(problems, group, speed, 2.0 if quick else 4.0, seed) for seed in (1, 2)]
    orders = [random.Random(seed).sample(responses, len(responses)) for seed, responses in enumerate(steps)]
    ends = make_rollout(len(orders[0]), rollout, seed=3)
    learnt = TimeLimits(LimitRules(minimum=min(2.0, maximum), maximum=maximum))
    fixed = TimeLimits(LimitRules(minimum=maximum, maximum=maximum))
    results: dict[str, Any] = {"programs": dict(Counter(response.kind for response in orders[0])), "rollout": rollout}
    ways = (("fixed", fixed, 0), ("adaptive, first step", learnt, 0), ("adaptive, second step", learnt, 1))
    for name, limits, step in ways:
        seconds, scores, _ = run_step(orders[step], ends, sandbox, limits, maximum)
        pairs = list(zip(orders[step], scores, strict=True))
        right = [score.outcome for response, score in pairs if response.kind == "right"]
        endless = [score.outcome for response, score in pairs if response.kind == "endless"]
        results[name] = {
            "seconds": round(seconds, 1),
            "after the rollout": round(seconds - rollout, 1),
            "times as fast": 1.0,
            "right": dict(Counter(right)),
            "endless": dict(Counter(endless)),
            "rewarded, not right": sum(response.kind != "right" and score.value > 0 for response, score in pairs),
        }
        results[name]["times as fast"] = round(results["fixed"]["seconds"] / results[name]["seconds"], 2)
        print(f"{name}: {results[name]}", flush=True)
    return results


def bench_wrong_cuts(sandbox: Sandbox, quick: bool) -> dict[str, Any]:
    """Right answers that sleep for times of a wide spread: how many are cut, and what the estimate says."""
    problems, group = (10, 10) if quick else (40, 30)
    draw = random.Random(5)
    responses = list[ProgramResponse]()
    for problem in range(problems):
        base = 0.04 * 10 ** draw.random()
        for _ in range(group):
            if draw.random() < 0.2:
                responses.append(ProgramResponse(problem, "endless", "import time\ntime.sleep(1000)"))
            else:
                seconds = min(base * draw.lognormvariate(0, 0.7), 0.8 * 30.0 / SCALE)
                responses.append(ProgramResponse(problem, "right", SLEEP.format(seconds=seconds)))
    draw.shuffle(responses)
    rules = LimitRules(minimum=2.0 / SCALE, maximum=30.0 / SCALE, rerun_share=0.3 if quick else 0.1)
    limits = TimeLimits(rules)
    seconds, scores, again = run_step(responses, [0.0] * len(responses), sandbox, limits, rules.maximum, SLEEPERS)
    cut = [response for response, score in zip(responses, scores, strict=True)
           if score.outcome == "cut" and score.runs[-1].limit < rules.maximum]  # fmt: skip
    with ThreadPoolExecutor(SLEEPERS) as pool:
        jobs = [pool.submit(run_again, response.text, response.truth, index, sandbox, rules.maximum)
                for response, index in again]  # fmt: skip
        limits.record([job.result() for job in jobs])
    estimate = limits.estimate_wrong_cuts(len(cut))
    truth = sum(response.kind == "right" for response in cut)
    results = {
        "programs": len(responses), "seconds": round(seconds, 1), "cut": len(cut), "of them right": truth,
        "run again": len(again), "estimate": round(estimate.estimate, 1),
        "interval": [round(estimate.low, 1), round(estimate.high, 1)],
        "within": estimate.low <= truth <= estimate.high,
    }  # fmt: skip
    print(results, flush=True)
    return results


def burn(ready: Any) -> None:
    ready.set()
    while True:
        pass


@contextmanager
def burners(count: int) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    processes = [(context.Process(target=burn, args=(ready,), daemon=True), ready) for ready in
            (context.Event() for _ in range(count))]  # fmt: skip
    for process, ready in processes:
        process.start()
        ready.wait()
    try:
        yield
    finally:
        for process, _ in processes:
            process.kill()
            process.join()


CLOCKS = {"wall": lambda run: run.wall, "CPU": lambda run: run.cpu, "own": lambda run: run.seconds}
"""``own``: wall time less the time without a core, which is the clock of the limits."""


def bench_busy(sandbox: Sandbox, quick: bool) -> dict[str, Any]:
    """All run to the maximum; what would be cut is computed from their times, for each clock in the same way."""
    rules = LimitRules()
    speed = measure_speed(sandbox)
    draw = random.Random(7)
    # Right answers of one problem differ by a tenth to both sides.
    work = [(problem, seconds * draw.uniform(0.9, 1.1))
            for problem, seconds in enumerate([1.5, 2.5] if quick else [0.5, 1.0, 1.5, 2.0, 3.0, 4.0])
            for _ in range(2 if quick else 8)]  # fmt: skip

    def run_all() -> list[Run]:
        def one(seconds: float) -> Run:
            with sandbox.open(SPIN.format(count=int(seconds * speed))) as session:
                return session.run("1", rules.maximum, rules.maximum)

        with ThreadPoolExecutor(WORKERS) as pool:
            return list(pool.map(one, [seconds for _, seconds in work]))

    quiet = run_all()
    with burners(WORKERS):
        busy = run_all()
    results: dict[str, Any] = {"programs": len(work)}
    for name, clock in CLOCKS.items():
        anchors = dict[int, float]()
        for (problem, _), run in zip(work, quiet, strict=True):
            anchors[problem] = max(anchors.get(problem, 0.0), clock(run))
        limits = {problem: min(max(rules.minimum, rules.factor * anchor), rules.maximum)
                  for problem, anchor in anchors.items()}  # fmt: skip
        cut = sum(clock(run) > limits[problem] for (problem, _), run in zip(work, busy, strict=True))
        longer = sorted(clock(after) / clock(before) for before, after in zip(quiet, busy, strict=True))
        results[name] = {"cut": cut, "seconds of all, before": round(sum(map(clock, quiet)), 1),
                       "beside": round(sum(map(clock, busy)), 1), "longer, median": round(statistics.median(longer), 2),
                       "longer, most": round(longer[-1], 2)}  # fmt: skip
        print(f"{name}: {results[name]}", flush=True)
    return results


def bench_cost(sandbox: Sandbox, quick: bool) -> dict[str, Any]:
    """Milliseconds of a start and of a test case, in turns with no sandbox at all."""
    sandboxes = {"bubblewrap": sandbox, "none": make_sandbox("none")}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sandboxes}
    for _ in range(10 if quick else 100):
        for name, each in sandboxes.items():
            start = time.monotonic()
            with each.open("print(int(input()) + 1)") as session:
                opened = time.monotonic()
                session.run("1", 30.0, 30.0)
                ran = time.monotonic()
            times[name].append((opened - start + time.monotonic() - ran, ran - opened))
    results = {
        name: {what: round(1000 * statistics.median(values), 1)
               for what, values in zip(("start and end, ms", "case, ms"), zip(*rows, strict=True), strict=True)}
        for name, rows in times.items()
    }  # fmt: skip
    print(results, flush=True)
    return results


BENCHES = {"cost": bench_cost, "speed": bench_speed, "wrong-cuts": bench_wrong_cuts, "busy": bench_busy}


def main() -> int:
    parser = _bench.options(__doc__ or "", "64 programs, a fixed limit of 6 s")
    parser.add_argument("--only", nargs="+", choices=BENCHES, default=list(BENCHES))
    args = parser.parse_args()
    try:
        sandbox = make_sandbox(None)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    machine = _bench.about(sandbox=sandbox.describe())
    results = {}
    for name in args.only:
        print(f"== {name}", flush=True)
        results[name] = BENCHES[name](sandbox, args.quick)
    _bench.write(args.json, about=machine, **results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
