"""One adaptive engine in a Ray actor of verl's: verl's SGLang replica and server, which launch ours."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

import ray
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer, SGLangReplica

from sglang_pat.host.attach import attach
from sglang_pat.integrations.verl import options

NOTED = ("weight_version", "tp_from_token")
"""Of an answer's ``meta_info``: what goes into the sample's extra fields."""

_noted: ContextVar[dict[str, Any]] = ContextVar("noted")


class AdaptiveServer(SGLangHttpServer):
    """The actor that holds the engine's main process."""

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        attach(options.given(self.config), options.WHERE)
        await super().launch_server(*args, **kwargs)
        manager = self.tokenizer_manager
        manager.generate_request = _noting(manager.generate_request)

    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        """verl's; the sample's extra fields say the weights' version, and which degree generated which tokens."""
        noted: dict[str, Any] = {}
        _noted.set(noted)
        output = await super().generate(*args, **kwargs)
        output.extra_fields.update(noted)
        return output


def _noting(generate_request: Any) -> Any:
    """verl drops an answer's ``meta_info`` after it took what it knows; this keeps what we add to it."""

    async def noted(*args: Any, **kwargs: Any) -> AsyncIterator[dict[str, Any]]:
        async for answer in generate_request(*args, **kwargs):
            meta = answer["meta_info"]
            _noted.get({}).update({name: meta[name] for name in NOTED if name in meta})
            yield answer

    return noted


class AdaptiveReplica(SGLangReplica):
    """verl's handle of an engine; of ``tensor_model_parallel_size`` GPUs, all on one node."""

    def __init__(self, replica_rank: int, config: Any, model_config: Any, gpus_per_node: int = 8, **named: Any) -> None:
        super().__init__(replica_rank, config, model_config, gpus_per_node, **named)
        options.check(self.config, gpus_per_node)
        self.server_class = ray.remote(AdaptiveServer)
