"""In each training process: the way of new weights to the engine."""

from __future__ import annotations

from typing import Any

import torch
from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter

from sglang_pat.integrations.verl import options


class AdaptiveAdapter(ServerAdapter):
    """verl's client of a server of SGLang's, as it is: the engine takes whole tensors, and IPC handles by GPU."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        options.check(self.config)
        if not torch.cuda.is_available():
            # Weights lie in shared memory there; descriptors pass only between processes of one ancestor.
            torch.multiprocessing.set_sharing_strategy("file_system")
