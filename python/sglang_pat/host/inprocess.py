"""An engine in somebody else's process, which has an event loop: what RL frameworks ask of one, in SGLang's terms."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import sglang
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    InitWeightsUpdateGroupReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.common import init_custom_process_group

from sglang_pat.host import adapter
from sglang_pat.messages import BeginRound, EndRound

__all__ = ["InProcessEngine", "init_custom_process_group"]

SPARED = 7
"""Tokens added to the context: SGLang takes no prompt of its last six, and ends an answer one token before it."""


class InProcessEngine:
    """SGLang's own ``Engine``, which is adaptive after :func:`sglang_pat.server.attach.attach`.

    Args:
        arguments: SGLang's server arguments by name; ``tp_size``: GPUs that the engine owns; ``context_length``:
            tokens that a prompt and its answer may have together, all of which can be used here.

    Raises:
        ValueError: an argument that cannot be, among them a ``context_length`` that is longer than the model's.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._ranks: int = arguments["tp_size"]
        self._context: int = arguments["context_length"]
        adapter.arguments.resolve(sglang.ServerArgs(**arguments))  # before what follows allows every length
        with envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.override(True):
            self._engine = sglang.Engine(**{**arguments, "context_length": self._context + SPARED})
        self._manager = self._engine.tokenizer_manager

    async def generate(self, input_ids: list[int], sampling_params: dict[str, Any], logprobs: bool) -> dict[str, Any]:
        """One answer, as ``/generate`` gives it; without ``max_new_tokens`` as long as there is room.

        Raises:
            ValueError: there is no room for a token after the prompt.
        """
        room = self._context - len(input_ids)
        if room < 1:
            raise ValueError(f"the prompt has {len(input_ids)} tokens, may have {self._context - 1}: shorten it")
        limit = min(sampling_params.get("max_new_tokens", room), room)
        return await self._manager.pat_generate(
            rid=uuid.uuid4().hex, input_ids=input_ids, sampling_params=sampling_params | {"max_new_tokens": limit},
            return_logprob=logprobs,
        )  # fmt: skip

    def announce_round(self, message: BeginRound | EndRound) -> None:
        """Begin a round, to which all later requests belong, or end it."""
        self._manager.pat_send_round(message)

    async def pause(self, mode: str) -> None:
        """Pause generation; ``mode`` is ``abort``, ``retract`` or ``in_place``."""
        await self._manager.pause_generation(PauseGenerationReqInput(mode=mode))

    async def resume(self) -> None:
        await self._manager.continue_generation(ContinueGenerationReqInput())

    async def flush_cache(self) -> None:
        await self._manager.flush_cache()

    async def release_memory(self, tags: list[str]) -> None:
        """Release what ``tags`` name (``weights``, ``kv_cache``); nothing without the memory saver."""
        if tags and self._manager.server_args.enable_memory_saver:
            await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags), None)

    async def resume_memory(self, tags: list[str]) -> None:
        if tags and self._manager.server_args.enable_memory_saver:
            await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags), None)

    async def join_update_group(
        self, address: str, port: int, rank_offset: int, world_size: int, name: str, backend: str
    ) -> None:
        """Have all ranks join the trainer's group ``name``, the first as rank ``rank_offset``."""
        request = InitWeightsUpdateGroupReqInput(
            master_address=address, master_port=port, rank_offset=rank_offset, world_size=world_size, group_name=name,
            backend=backend,
        )  # fmt: skip
        _check_success(await self._manager.init_weights_update_group(request, None))

    async def receive_weight(self, group: str, name: str, dtype: str, shape: list[int], flush: bool) -> None:
        """Receive one parameter, which rank 0 of the group broadcasts at the same time."""
        request = UpdateWeightsFromDistributedReqInput(
            names=[name], dtypes=[dtype], shapes=[shape], group_name=group, flush_cache=flush
        )
        _check_success(await self._manager.update_weights_from_distributed(request, None))

    async def open_weight(self, name: str, handles: list[Any], flush: bool) -> None:
        """Load one parameter; ``handles`` has for each rank what unpickles to the tensor in its process."""
        values = [MultiprocessingSerializer.serialize(handle) for handle in handles]
        local = adapter.runner.LocalSerializedTensor(values=values)
        tensor = MultiprocessingSerializer.serialize([(name, local)])
        request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=[tensor] * self._ranks, flush_cache=flush)
        _check_success(await self._manager.update_weights_from_tensor(request, None))

    async def status(self) -> dict[str, Any]:
        """The answer of ``GET /pat/status``."""
        return await self._manager.pat_status()


def _check_success(answer: Any) -> None:
    """Raise ``RuntimeError`` with the engine's own line for an update, or a group, that it refused."""
    success, message = answer[:2]
    if not success:
        raise RuntimeError(message)
