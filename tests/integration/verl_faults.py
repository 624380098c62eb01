"""A trainer that fails while it sends weights: a module that verl imports in each of its processes.

``PAT_TEST_FAULT=die:2``: the first trainer process is killed in its second update, when half of the tensors are on
their way; ``name:2``: it calls one of them something else.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from typing import Any

from verl.workers.rollout import base

AT = 5
"""Number of the tensor that it happens to."""

_stock = base.get_rollout_class
_what, _, _when = os.environ["PAT_TEST_FAULT"].partition(":")
_updates = itertools.count(1)


def _faulty(weights: Any) -> Iterator[Any]:
    for number, (name, tensor) in enumerate(weights):
        if number == AT and _what == "die" and os.environ.get("RANK") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        if number == AT and _what == "name":
            name = "model.layers.0.nonsense.weight"
        yield name, tensor


def get_rollout_class(*args: Any, **named: Any) -> Any:
    found = _stock(*args, **named)
    if found.__module__ != "sglang_pat.integrations.verl.plugin":
        return found

    def faulty(*args: Any, **named: Any) -> Any:
        made = found(*args, **named)
        stock = made.update_weights

        async def update_weights(weights: Any, *args: Any, **named: Any) -> Any:
            return await stock(_faulty(weights) if next(_updates) == int(_when) else weights, *args, **named)

        made.update_weights = update_weights
        return made

    return faulty


base.get_rollout_class = get_rollout_class
