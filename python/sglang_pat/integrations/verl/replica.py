"""One adaptive engine in a Ray actor of verl's: verl's SGLang replica and server, which launch ours."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

import ray
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer, SGLangReplica

from sglang_pat.integrations.balance import EngineReport
from sglang_pat.integrations.verl import options
from sglang_pat.integrations.verl.fields import DEGREES, STEPS
from sglang_pat.sglang.attach import attach

_meta: ContextVar[dict[str, Any]] = ContextVar("meta")


class AdaptiveServer(SGLangHttpServer):
    """The actor that holds the engine's main process."""

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        attach(options.given(self.config, self.replica_rank), options.WHERE)
        await super().launch_server(*args, **kwargs)
        manager = self.tokenizer_manager
        manager.generate_request = _noting(manager.generate_request)

    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        """verl's; the sample's extra fields say which degree, and which step's weights, generated which tokens."""
        meta: dict[str, Any] = {}
        _meta.set(meta)
        output = await super().generate(*args, **kwargs)
        output.extra_fields[DEGREES] = meta.get(DEGREES, ())
        output.extra_fields[STEPS] = ((0, output.extra_fields["global_steps"]),)
        return output

    async def load(self) -> EngineReport:
        """What a balancer of requests wants to know."""
        manager = self.tokenizer_manager
        return EngineReport.of_status(await manager.pat_status(), manager.server_args.max_running_requests)


def _noting(generate_request: Any) -> Any:
    """verl drops an answer's ``meta_info`` after it took what it knows; this keeps it for the one who asked."""

    async def noted(*args: Any, **kwargs: Any) -> AsyncIterator[dict[str, Any]]:
        async for answer in generate_request(*args, **kwargs):
            _meta.get({}).update(answer["meta_info"])
            yield answer

    return noted


class AdaptiveReplica(SGLangReplica):
    """verl's handle of an engine; of ``tensor_model_parallel_size`` GPUs, all on one node."""

    def __init__(self, replica_rank: int, config: Any, model_config: Any, gpus_per_node: int = 8, **named: Any) -> None:
        super().__init__(replica_rank, config, model_config, gpus_per_node, **named)
        options.check(self.config, gpus_per_node)
        self.server_class = ray.remote(AdaptiveServer)
