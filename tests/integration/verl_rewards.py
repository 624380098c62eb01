"""Reward functions of verl jobs, and what happens to rewards: a module that verl imports in each of its processes.

What they note are lines of ``rewards.jsonl``, in the job's folder.  ``PAT_TEST_REWARDS=killed``: the process of the
first reward is killed in the middle of it, and the ledger's at the beginning of the second step.
"""

from __future__ import annotations

import json
import os
import signal
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

SECONDS = 5.0
"""That :func:`sleep` takes."""
_VARIABLE = "PAT_TEST_REWARDS"


def _note(**line: Any) -> None:
    with Path(os.environ["VERL_FILE_LOGGER_PATH"]).with_name("rewards.jsonl").open("a") as file:
        file.write(json.dumps(line | {"time": time.time()}) + "\n")


def count_vowels(solution_str: str, **_: Any) -> float:
    """As the example's, and killed once."""
    if os.environ.get(_VARIABLE) == "killed":
        try:
            Path(os.environ["VERL_FILE_LOGGER_PATH"]).with_name("killed").touch(exist_ok=False)
        except FileExistsError:
            pass
        else:
            _note(what="a process is killed")
            os.kill(os.getpid(), signal.SIGKILL)
    return sum(letter in "aeiou" for letter in solution_str) / max(1, len(solution_str))


def sleep(solution_str: str, extra_info: dict[str, Any], **_: Any) -> float:
    """Takes long; notes when it begins and ends."""
    _note(what="begun", prompt=extra_info["index"])
    time.sleep(SECONDS)
    _note(what="ended", prompt=extra_info["index"])
    return count_vowels(solution_str)


def draw(text: str) -> float:
    """From 0 to 1, by a hash."""
    return int.from_bytes(sha256(text.encode()).digest()[:4], "big") / 2**32


def _score(share: float, response: str, prompt: int) -> float:
    return 1.0 if draw(f"prompt {prompt}") < share else draw(response)


def half(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float:
    return _score(0.5, solution_str, extra_info["index"])


def most(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float:
    return _score(0.8, solution_str, extra_info["index"])


def _watch_trainer() -> None:
    """Note when a step has its batch; kill the ledger when the second one begins."""
    import ray

    from sglang_pat.integrations.verl import reward_ledger
    from sglang_pat.integrations.verl.trainers import AdaptiveSync

    sample_begins, sample_ends = AdaptiveSync.on_sample_begin, AdaptiveSync.on_sample_end

    def on_sample_begin(self: AdaptiveSync) -> None:
        if self.global_steps == 2 and os.environ.get(_VARIABLE) == "killed":
            actor = ray.get_actor(reward_ledger.NAME)
            pid = ray.get(actor.__ray_call__.remote(lambda ledger: os.getpid()))
            os.kill(pid, signal.SIGKILL)
            _note(what="the ledger is killed")
        sample_begins(self)

    def on_sample_end(self: AdaptiveSync) -> None:
        _note(what="batch", step=self.global_steps)
        sample_ends(self)

    AdaptiveSync.on_sample_begin, AdaptiveSync.on_sample_end = on_sample_begin, on_sample_end


if _VARIABLE in os.environ:
    _watch_trainer()
