"""The names under which verl finds this engine.  Nothing of SGLang is imported here."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

from sglang_pat.plugin import VARIABLE

if TYPE_CHECKING:
    from sglang_pat.integrations.verl.replica import AdaptiveReplica

NAME = "sglang_pat"
"""Value of ``rollout.name``."""
STOCK_NAME = "sglang"
"""verl's own name of SGLang: a few of its features ask for exactly this one.

With ``SGLANG_PAT`` set in the job's environment it means this engine, too.
"""

_load_stock = RolloutReplicaRegistry._registry[STOCK_NAME]


def register() -> None:
    """Make ``sglang_pat`` a rollout of verl's; and ``sglang`` this one, if the variable ``SGLANG_PAT`` is set."""
    for name in (NAME, STOCK_NAME) if VARIABLE in os.environ else (NAME,):
        RolloutReplicaRegistry.register(name, _load_replica)
        _ROLLOUT_REGISTRY[name, "async"] = f"{__package__}.adapter.AdaptiveAdapter"


def _load_replica() -> type[AdaptiveReplica]:
    _load_stock()  # it puts the stand-ins of vLLM's modules in place that verl's SGLang modules import
    from sglang_pat.integrations.verl.replica import AdaptiveReplica

    return AdaptiveReplica
