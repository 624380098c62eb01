"""How fast math-verify judges in the processes of a reward pool: 200 answers, against the goal of 2 s on two cores.

    python bench/verdicts.py [--quick] [--json FILE] [--processes 2]

math-verify refuses to work in a thread.  It parses both answers each time, as a reward function has to.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import _bench

from reward_sandbox.pool import Reward, RewardPool

PAIRS = [
    (r"\frac{1}{2}", "0.5", True),
    (r"\sqrt{8}", r"2\sqrt{2}", True),
    ("x^2 - 1", "(x - 1)(x + 1)", True),
    (r"\{1, 2, 3\}", r"\{3, 2, 1\}", True),
    (r"(-\infty, 4]", r"(-\infty,4.0]", True),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}", True),
    (r"\frac{7}{3}", r"2\frac{1}{3}", True),
    ("1024", "1,024", True),
    (r"\pi", "3.14", False),
    ("17", "71", False),
]
"""What is right, an answer, and the verdict."""


def verify(gold: str, answer: str, **_: Any) -> float:
    """A reward function."""
    from math_verify import parse, verify  # each process once

    return float(verify(parse(f"${gold}$"), parse(f"so the answer is ${answer}$")))


async def judge(pool: RewardPool, verdicts: int) -> tuple[float, list[Reward]]:
    pairs = [PAIRS[number % len(PAIRS)] for number in range(verdicts)]
    begin = time.perf_counter()
    rewards = await asyncio.gather(*(pool.score({"gold": gold, "answer": answer}) for gold, answer, _ in pairs))
    seconds = time.perf_counter() - begin
    wrong = [pair for pair, reward in zip(pairs, rewards, strict=True) if reward.value != pair[2]]
    assert not wrong, wrong[0]
    return seconds, rewards


async def measure(processes: int, rounds: int) -> list[float]:
    pool = RewardPool(verify, processes=processes)
    await judge(pool, 10 * processes)  # each process imports math-verify
    times = []
    for _ in range(rounds):
        seconds, rewards = await judge(pool, 200)
        running = sum(reward.running for reward in rewards) / len(rewards)
        print(f"  200 verdicts in {seconds:.2f} s, {200 / seconds:.0f}/s; {1e3 * running:.1f} ms each in a process")
        times.append(seconds)
    await pool.close()
    return times


def main() -> int:
    parser = _bench.options(__doc__, "3 rounds in place of 10; some 5 s")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    machine = _bench.about()
    seconds = sorted(asyncio.run(measure(args.processes, 3 if args.quick else 10)))
    median = seconds[len(seconds) // 2]
    print(f"median {median:.2f} s, slowest {seconds[-1]:.2f} s; goal: at most 2 s")
    _bench.write(args.json, about=machine, processes=args.processes, seconds=seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
