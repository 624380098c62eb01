"""In each training process: the way of new weights to the engine."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter

from sglang_pat.integrations.verl import options


def checked(config: Any, *args: Any, **kwargs: Any) -> ServerAdapter:
    """verl's client of a server of SGLang's, as it is: the engine takes whole tensors, and IPC handles by GPU.

    Settings of ours in the configuration are checked here, too: with ``disaggregation`` verl makes replicas of another
    class, which know nothing of them.
    """
    adapter = ServerAdapter(config, *args, **kwargs)
    if options.own(adapter.config) is not None:
        options.check(adapter.config)
    return adapter
