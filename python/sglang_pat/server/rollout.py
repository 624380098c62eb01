"""Rounds on the engine in this process: ``Engine.rollout`` and ``Engine.async_rollout``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from sglang_pat.messages import BeginRound, EndRound
from sglang_pat.rollout.loop import EngineLoop
from sglang_pat.rollout.records import Output
from sglang_pat.rollout.requests import make_output, name_round
from sglang_pat.rollout.rounds import RolloutCalls, RolloutRound


class EngineRollouts(RolloutCalls):
    """The rounds of ``Engine``, whose base class this is."""

    tokenizer_manager: Any
    loop: Any

    @asynccontextmanager
    async def _connect(self) -> AsyncGenerator[ManagerBackend]:
        yield ManagerBackend(self.tokenizer_manager)

    def _watch(self, round_: RolloutRound) -> None:
        # An update waits until no request is left, unless generation is paused: a round is not to be waited for.
        self.tokenizer_manager.pat_rounds.add(round_)

    def _loop_for_rounds(self) -> EngineLoop:
        """The engine's own event loop, ready for a round."""
        if not isinstance(self.loop, EngineLoop):
            raise RuntimeError("this engine was made inside an event loop; use async_rollout there")
        if self.tokenizer_manager.event_loop is None:
            # The first call says who handles signals, which it can in the main thread only.
            self.loop.run_until_complete(self.tokenizer_manager.pat_status())
        return self.loop


class ManagerBackend:
    """The engine behind a TokenizerManager, in its process: :class:`~sglang_pat.rollout.requests.Backend`."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.tokenizer = manager.tokenizer
        self._stop_tokens = stop_tokens(manager)
        self._name = ""

    async def begin_round(self, begun: BeginRound) -> None:
        self._name = begun.name
        self._manager.pat_send_round(begun)

    async def end_round(self, name: str) -> None:
        self._manager.pat_send_round(EndRound(name=name))

    def count_updates(self) -> int:
        return self._manager.pat_weight_updates

    async def generate(self, rid: str, prompt: dict[str, Any], params: dict[str, Any]) -> Output:
        answer = await self._manager.pat_generate(
            rid=rid, **prompt, sampling_params=name_round(params, self._name), return_logprob=True,
            return_routed_experts=self._manager.server_args.enable_return_routed_experts,
        )  # fmt: skip
        return make_output(answer, params, self._stop_tokens)

    def abort(self, rid: str) -> None:
        self._manager.abort_request(rid)

    def get_token_limit(self) -> int:
        return get_token_limit(self._manager)


def get_token_limit(manager: Any) -> int:
    """Most tokens of a request, prompt and response together."""
    return min(manager.context_len, manager.max_req_input_len or manager.context_len)


def stop_tokens(manager: Any) -> list[int]:
    """Tokens that end a response of the model."""
    tokens = {*(manager.model_config.hf_eos_token_id or ())}
    if (tokenizer := manager.tokenizer) is not None:
        tokens |= {tokenizer.eos_token_id, *(getattr(tokenizer, "additional_stop_token_ids", None) or ())}
    return sorted(token for token in tokens if token is not None)


def describe_engine(manager: Any) -> dict[str, Any]:
    """Facts of the engine that a client's round has to know, by name."""
    return {
        "weight_updates": manager.pat_weight_updates,
        "weight_version": manager.pat_get_weight_version(),
        "room": get_token_limit(manager),
        "stop_token_ids": stop_tokens(manager),
        "routed_experts": manager.server_args.enable_return_routed_experts,
    }
