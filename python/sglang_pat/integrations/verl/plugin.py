"""The entry point that verl imports in each of its processes (group ``verl.plugins``): the names under which verl finds
this engine and its trainers.

verl keeps quiet if that fails, so the failure is told here.  So nothing of verl is imported with this module; and
nothing of SGLang before an engine is used.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang_pat.config import VARIABLE
from sglang_pat.errors import format_one_line
from sglang_pat.integrations.verl import options

if TYPE_CHECKING:
    from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangReplica

    from sglang_pat.integrations.verl.adapter import SurvivingAdapter

STOCK_NAME = "sglang"
"""verl's own name of SGLang: a few of its features ask for exactly this one."""


def register() -> None:
    """Make ``sglang_pat`` a rollout of verl's; and ``sglang`` this one, where the configuration or the variable
    ``SGLANG_PAT`` asks for it.  Trainers and rewards are registered by their modules."""
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from sglang_pat.integrations.verl import response_ends, rewards, stream_lent, streaming, trainers  # noqa: F401

    load = partial(_load, RolloutReplicaRegistry._registry[STOCK_NAME])
    for name in (options.NAME, STOCK_NAME):
        RolloutReplicaRegistry.register(name, load)
        _ROLLOUT_REGISTRY[name, "async"] = f"{__name__}.make_checked_adapter"


def _load(load_stock: Callable[[], Callable[..., SGLangReplica]]) -> Callable[..., SGLangReplica]:
    """Load what makes a replica.  verl looks its class up by name alone; what else is asked for is known when one is
    made."""
    stock = load_stock()  # it puts the stand-ins of vLLM's modules in place that verl's SGLang modules import

    def make(*args: Any, **named: Any) -> SGLangReplica:
        import ray

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


def make_checked_adapter(config: Any, *args: Any, **kwargs: Any) -> SurvivingAdapter:
    """The client of an engine in each training process.  Ours takes whole tensors, and IPC handles by GPU.

    Settings of ours in the configuration are checked here, too: with ``disaggregation`` verl makes replicas of another
    class, which know nothing of them.
    """
    from sglang_pat.integrations.verl import newer_sglang
    from sglang_pat.integrations.verl.adapter import SurvivingAdapter

    newer_sglang.complete_client()
    adapter = SurvivingAdapter(config, *args, **kwargs)
    own = options.get_own_settings(adapter.config)
    if own is not None and options.STREAM not in own:
        options.check(adapter.config)
    return adapter


try:
    register()
except Exception as error:
    logging.getLogger(__name__).error(
        "rollout.name=sglang_pat is not there for this job, its registration with verl failed: %s: %s",
        type(error).__name__, format_one_line(error),
    )  # fmt: skip
    raise
