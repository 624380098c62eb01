"""A reward function, which OpenRLHF loads where the engine is, and what goes wrong there in the meantime.

``PAT_TEST_FAULT=name:35``: the 35th tensor that the trainer sends has another name; ``die:35``: when it comes, the
trainer's first process is killed.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import psutil

from examples.openrlhf_grpo.reward import reward_func
from sglang_pat.host.inprocess import InProcessEngine

__all__ = ["reward_func"]

_what, _, _when = os.environ["PAT_TEST_FAULT"].partition(":")
_tensors = itertools.count(1)
TRAINER = "ray::PolicyModelActor"
"""How Ray names the trainer's processes."""


def _trainer() -> psutil.Process:
    """One of the trainer's processes, of the same job: Ray has started it beside this one."""
    beside = psutil.Process().parent().children()
    return next(process for process in beside if "".join(process.cmdline()).startswith(TRAINER))


def _faulty(stock: Any, place: int) -> Any:
    """The method, whose ``place``-th argument is a tensor's name."""

    async def method(self: InProcessEngine, *args: Any) -> None:
        if next(_tensors) == int(_when):
            if _what == "die":
                _trainer().kill()
            else:
                args = (*args[:place], "model.layers.0.nonsense.weight", *args[place + 1 :])
        await stock(self, *args)

    return method


InProcessEngine.receive_weight = _faulty(InProcessEngine.receive_weight, 1)
InProcessEngine.open_weight = _faulty(InProcessEngine.open_weight, 0)
