"""SGLang's ``TokenizerManager``, below ours."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.managers.load_snapshot import LoadSnapshot
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sglang_pat.host.v0_5_23.controls import MarkableRequest
from sglang_pat.rank import degrees
from sglang_pat.speculate.acceptance import KEYS

IN_SESSION = (UpdateWeightsFromTensorReqInput, UpdateWeightsFromDistributedReqInput)
"""Updates that ranks take between the beginning and the end of a session only."""


class StockTokenizerManager(TokenizerManager):
    """SGLang's ``TokenizerManager``, with sessions of updates for clients that know none.

    A client that begins a session ends it.  An update outside is a session of its own.
    """

    tokenized_generate_req_type = MarkableRequest
    pat_pause_for_update: Callable[[Any], Any]
    pat_status: Callable[[], Awaitable[dict[str, Any]]]
    _pat_session = False
    """Whether a client has begun a session."""

    async def begin_weight_update(self, obj: Any, request: Any = None) -> tuple[bool, str]:
        """Begin a session, once nothing runs, or ranks are paused."""
        async with self.pat_pause_for_update(obj):
            success, message = await super().begin_weight_update(obj, request)
            self._pat_session |= success
            return success, message

    async def end_weight_update(self, obj: Any, request: Any = None) -> tuple[bool, str]:
        """End the session, as :meth:`begin_weight_update`."""
        async with self.pat_pause_for_update(obj):
            success, message = await super().end_weight_update(obj, request)
            self._pat_session &= not success
            return success, message

    async def pat_update_in_session(
        self, update: Callable[..., Awaitable[tuple[Any, ...]]], obj: Any, request: Any
    ) -> tuple[Any, ...]:
        """Run SGLang's ``update`` of the weights in the session of its client, or in one of its own."""
        if self._pat_session or not isinstance(obj, IN_SESSION):
            return await update(obj, request)
        begun, message = await super().begin_weight_update(BeginWeightUpdateReqInput(selector=obj.selector))
        if not begun:
            return begun, message
        try:
            answer = await update(obj, request)
        finally:
            ended, message = await super().end_weight_update(EndWeightUpdateReqInput())
        return answer if ended or not answer[0] else (ended, message)

    def update_request_meta_info(
        self, meta_info: dict, state: Any, customized_info: dict, index: int, finish_reason: dict | None
    ) -> None:
        """Add to what a client gets of its request; SGLang takes each value for one of the tokens since the last."""
        whole = customized_info.keys() & {degrees.KEY, *KEYS}
        others = {key: values for key, values in customized_info.items() if key not in whole}
        super().update_request_meta_info(meta_info, state, others, index, finish_reason)
        meta_info.update({key: customized_info[key][index] for key in whole})

    async def get_loads(self, include: list[str] | None = None, dp_rank: int | None = None) -> list[LoadSnapshot]:
        """The load of the whole engine, as one replica's: SGLang reads it from a file that each replica writes."""
        if dp_rank:
            return []
        groups = (await self.pat_status())["groups"]

        def add(*names: str) -> int:
            return sum(group[name] for group in groups for name in names)

        used, total = add("kv_used"), add("kv_total")
        return [
            LoadSnapshot(
                timestamp=time.time(),
                num_running_reqs=add("running"),
                num_waiting_reqs=add("waiting", "in_flight"),
                num_used_tokens=used,
                num_total_tokens=used,
                max_total_num_tokens=total,
                token_usage=used / total if total else 0.0,
            )
        ]


async def send_nothing() -> None:
    """What SGLang's methods that send a request return where none is sent."""


def get_weight_version(manager: TokenizerManager) -> str:
    return manager.config_value("weight_version")


def dump_requests(manager: Any) -> None:
    """Write the requests of ``--crash-dump-folder``.

    SGLang would also wait five seconds to look into its schedulers, which it finds by a title that ranks do not have.
    """
    with envs.SGLANG_PYSPY_DUMP_BEFORE_CRASH.override(False), envs.SGLANG_CUDA_COREDUMP_BEFORE_CRASH.override(False):
        manager.dump_requests_before_crash()


# -- checks of a request's fields that only this version has -----------------------------------------------------------

NOT_YET = {
    "return_sampling_mask": "a switch does not carry masks over",
    "return_flat_raw_top_logprobs": "a switch does not carry them over",
    "kv_hints": "they are for the hierarchical cache",
    "token_indices_to_pool": "the model does not embed",
}
"""Reasons against fields, by name."""


def check_tokenized(req: Any) -> None:
    """Raise ValueError for what the ranks would not survive, or a switch not carry over."""
    for name, reason in NOT_YET.items():
        if getattr(req, name):
            raise ValueError(f"{name}: not with --adaptive-tp, {reason}; leave it out")
    for name in ("session_id", "cache_salt"):
        if not isinstance(value := getattr(req, name), str | None):
            raise ValueError(f"{name} is of type {type(value).__name__}, must be a string")


def take_params(params: dict[str, Any]) -> dict[str, Any]:
    """Take from sampling parameters those that only this version has, and return those that SGLang needs.

    Left are those that a client has set, and that are refused.
    """
    for name, unset in (("watermark", (None,)), ("beam_width", (None, 1))):  # its OpenAI routes name them always
        if params.get(name) in unset:
            params.pop(name, None)
    whole = params.pop("ebnf_full_assistant", None)  # set by SGLang's routes where a model calls functions
    return {"ebnf_full_assistant": bool(whole)} if whole is not None else {}
