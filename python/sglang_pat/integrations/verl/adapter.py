"""In each training process: the way of new weights to the engine."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter

from sglang_pat.integrations.verl import options


class AdaptiveAdapter(ServerAdapter):
    """verl's client of a server of SGLang's, as it is: the engine takes whole tensors, and IPC handles by GPU."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        options.check(self.config)
