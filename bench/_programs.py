"""Programs in place of the responses of ``bench/rl_step.py``, the same in each job: they sleep, and some never end."""

from __future__ import annotations

import json
import random

from rewards import ENDLESS, RAISES, SLEEP, WRONG

SCALE = 6
"""All times of programs and all limits are divided by it, since a rollout is that much shorter than a real one."""
MINIMUM, MAXIMUM = 2.0 / SCALE, 30.0 / SCALE
"""Seconds of the least and of the longest limit."""
QUICKEST, SLOWEST = 0.05 / SCALE, 4.4 / SCALE
"""Seconds of right programs, by problem."""
PROBLEMS = 8
"""Number of problems; they come again, so that after the first step limits are those of a second epoch."""
FOREVER = "import time\ntime.sleep(1000)"


def make_ground_truth(prompt: int) -> str:
    problem = prompt % PROBLEMS
    return json.dumps({"inputs": [str(problem)], "outputs": [str(problem + 1)]})


def make_response(prompt: int, session: int) -> str:
    """A program in place of a response: right answers to most problems take little time, and those to one problem
    differ by a tenth to both sides."""
    draw, problem = random.Random(f"program {prompt} {session}"), prompt % PROBLEMS / (PROBLEMS - 1)
    seconds, fate = QUICKEST * (SLOWEST / QUICKEST) ** problem**2 * draw.uniform(0.9, 1.1), draw.random()
    program = SLEEP.format(seconds=seconds)
    if fate < ENDLESS:
        program = FOREVER
    elif fate < ENDLESS + WRONG + RAISES:
        program = "print(int(input()))"
    return f"```python\n{program}\n```"
