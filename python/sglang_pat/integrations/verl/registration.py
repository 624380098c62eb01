"""The names under which verl finds this engine.  Nothing of SGLang is imported until one is used."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

from sglang_pat.config import VARIABLE
from sglang_pat.integrations.verl import options

if TYPE_CHECKING:
    from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangReplica
    from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter

STOCK_NAME = "sglang"
"""verl's own name of SGLang: a few of its features ask for exactly this one."""

_load_stock = RolloutReplicaRegistry._registry[STOCK_NAME]


def register() -> None:
    """Make ``sglang_pat`` a rollout of verl's; and ``sglang`` this one, where the configuration or the variable
    ``SGLANG_PAT`` asks for it."""
    for name in (options.NAME, STOCK_NAME):
        RolloutReplicaRegistry.register(name, _load)
        _ROLLOUT_REGISTRY[name, "async"] = f"{__name__}.make_checked_adapter"


def _load() -> Callable[..., SGLangReplica]:
    """verl looks a replica's class up by its name alone.  What else is asked for is known when one is made."""
    stock = _load_stock()  # it puts the stand-ins of vLLM's modules in place that verl's SGLang modules import

    def make(*args: Any, **named: Any) -> SGLangReplica:
        replica = stock(*args, **named)  # starts nothing yet
        helper = replica.is_reward_model or replica.is_teacher_model
        if options.is_adaptive(replica.config, helper):
            from sglang_pat.integrations.verl.replica import AdaptiveReplica

            return AdaptiveReplica(*args, **named)
        streams = helper and options.read_stream_setting(replica.config, getattr(replica.model_config, "path", None))
        if streams or VARIABLE in os.environ:  # the variable is not about this one
            from sglang_pat.integrations.verl.replica import PlainServer

            replica.server_class = ray.remote(PlainServer)
        return replica

    return make


def make_checked_adapter(config: Any, *args: Any, **kwargs: Any) -> ServerAdapter:
    """In each training process: verl's client of a server of SGLang's, as it is.  The engine takes whole tensors, and
    IPC handles by GPU.

    Settings of ours in the configuration are checked here, too: with ``disaggregation`` verl makes replicas of another
    class, which know nothing of them.
    """
    from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter

    adapter = ServerAdapter(config, *args, **kwargs)
    found = options.get_own_settings(adapter.config)
    if found is not None and options.STREAM not in found:
        options.check(adapter.config)
    return adapter
