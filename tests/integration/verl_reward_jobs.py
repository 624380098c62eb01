"""Reward functions of verl jobs, and what happens to rewards: a module that verl imports in each of its processes.

What they note are lines of ``rewards.jsonl``, in the job's folder.  ``PAT_TEST_REWARDS=killed``: the process of the
first reward is killed in the middle of it, and the ledger's at the beginning of the second step.  ``programs``: each
response is a program, the first of four one that never ends; the first sandbox is killed before it answers, and the
ledger's process at the beginning of the second step and before its checkpoint.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

SECONDS = 5.0
"""Seconds that :func:`sleep` takes."""
TASK = {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]}
RIGHT = "import time\nnumber = int(input())\ntime.sleep(number - 1)\nprint(2 * number)"
"""Takes a second in the second case."""
ENDLESS = f"{RIGHT}\nwhile number == 2:\n    time.sleep(60)"
_VARIABLE = "PAT_TEST_REWARDS"
_WHAT = os.environ.get(_VARIABLE)


def _note(**line: Any) -> None:
    with Path(os.environ["VERL_FILE_LOGGER_PATH"]).with_name("rewards.jsonl").open("a") as file:
        file.write(json.dumps(line | {"time": time.time()}) + "\n")


def _kill_once(pid: int, what: str) -> None:
    try:
        Path(os.environ["VERL_FILE_LOGGER_PATH"]).with_name("killed").touch(exist_ok=False)
    except FileExistsError:
        return
    _note(what=f"{what} is killed")
    os.kill(pid, signal.SIGKILL)


def count_vowels(solution_str: str, **_: Any) -> float:
    """The example's reward, and killed once."""
    if _WHAT == "killed":
        _kill_once(os.getpid(), "a process")
    return share_of_vowels(solution_str)


def share_of_vowels(text: str) -> float:
    return sum(letter in "aeiou" for letter in text) / max(1, len(text))


def sleep(solution_str: str, extra_info: dict[str, Any], **_: Any) -> float:
    """Takes long; notes when it begins and ends."""
    _note(what="begun", prompt=extra_info["index"])
    time.sleep(SECONDS)
    _note(what="ended", prompt=extra_info["index"])
    return count_vowels(solution_str)


def _watch_trainer() -> None:
    """Note when a step has its batch; kill the ledger when the second one begins, and before its checkpoint."""
    import ray

    from sglang_pat.integrations.verl import reward_ledger
    from sglang_pat.integrations.verl.trainers import AdaptiveSync

    sample_begins, sample_ends = AdaptiveSync.on_sample_begin, AdaptiveSync.on_sample_end
    saves = AdaptiveSync._save_checkpoint

    def kill_the_ledger(trainer: AdaptiveSync) -> None:
        if trainer.global_steps == 2 and _WHAT in ("killed", "programs"):
            actor = ray.get_actor(reward_ledger.NAME)
            pid = ray.get(actor.__ray_call__.remote(lambda ledger: os.getpid()))
            os.kill(pid, signal.SIGKILL)
            _note(what="the ledger is killed")

    def on_sample_begin(self: AdaptiveSync) -> None:
        kill_the_ledger(self)
        sample_begins(self)

    def on_sample_end(self: AdaptiveSync) -> None:
        _note(what="batch", step=self.global_steps)
        sample_ends(self)

    def save_checkpoint(self: AdaptiveSync) -> None:
        kill_the_ledger(self)
        saves(self)

    AdaptiveSync.on_sample_begin, AdaptiveSync.on_sample_end = on_sample_begin, on_sample_end
    AdaptiveSync._save_checkpoint = save_checkpoint


def _answer_with_programs() -> None:
    from reward_sandbox.programs import _Runner
    from sglang_pat.integrations.verl.reward_programs import ProgramScorer

    score, run, count = ProgramScorer.score, _Runner.run, itertools.count()

    def score_a_program(self: ProgramScorer, response: str, ground_truth: Any) -> Any:
        return score(self, f"```python\n{RIGHT if next(count) % 4 else ENDLESS}\n```", ground_truth)

    def run_case(self: _Runner, case: Any, limit: float) -> Any:
        if case.key.endswith("-1"):
            _note(what="second case", limit=limit)
        _kill_once(self.session.process.pid, "a sandbox")
        return run(self, case, limit)

    ProgramScorer.score, _Runner.run = score_a_program, run_case


if _WHAT:
    _watch_trainer()
if _WHAT == "programs":
    _answer_with_programs()
