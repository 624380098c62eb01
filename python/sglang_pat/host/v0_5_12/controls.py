"""SGLang's messages: dataclasses."""

from __future__ import annotations

import dataclasses
from typing import Any

from sglang.srt.managers import io_struct as io

from sglang_pat.host.assign import assign

MarkableRequest = io.TokenizedGenerateReqInput
"""The class of a request that has room for the coordinator's mark (``messages.ROUND_MARK``)."""


def list_controls(weights: dict[str, Any]) -> dict[type, tuple[type, dict[str, Any]]]:
    """Control requests that only this version has: reply type, and fields of ``Control``."""
    return {io.GetLoadsReqInput: (io.GetLoadsReqOutput, dict(merge=_sum_loads))}


def _sum_loads(replies: list[io.GetLoadsReqOutput]) -> io.GetLoadsReqOutput:
    """The load of the whole engine: counts add up, usage is the mean."""
    merged = replies[0]
    for name in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "num_total_tokens", "max_total_num_tokens"):
        if hasattr(merged, name):
            setattr(merged, name, sum(getattr(reply, name) for reply in replies))
    if hasattr(merged, "token_usage"):
        assign(merged, token_usage=sum(reply.token_usage for reply in replies) / len(replies))
    return merged


def list_fields(kind: type) -> list[tuple[str, bool]]:
    """Fields that a message of this kind is made with, and whether each must be given."""
    missing = dataclasses.MISSING
    fields = [field for field in dataclasses.fields(kind) if field.init]
    return [(field.name, field.default is field.default_factory is missing) for field in fields]


def is_for_controller(obj: Any) -> bool:
    """Whether an object is for SGLang's data-parallel controller, which is not here."""
    return isinstance(obj, io.WatchLoadUpdateReq)
