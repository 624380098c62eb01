"""SGLang's messages: structs, which take no attributes beside their fields."""

from __future__ import annotations

from typing import Any

import msgspec
from sglang.srt.managers import io_struct as io


class MarkableRequest(io.TokenizedGenerateReqInput, kw_only=True):
    """A request with room for the coordinator's mark (``messages.ROUND_MARK``)."""

    pat_round: str = ""


def list_controls(weights: dict[str, Any]) -> dict[type, tuple[type, dict[str, Any]]]:
    """Control requests that only this version has: reply type, and fields of ``Control``.

    Args:
        weights: fields of a request that changes weights.
    """
    return {
        io.BeginWeightUpdateReqInput: (io.BeginWeightUpdateReqOutput, weights),
        io.EndWeightUpdateReqInput: (io.EndWeightUpdateReqOutput, weights),
        io.UpdateWeightVersionReqInput: (io.UpdateWeightVersionReqOutput, {}),
        io.GetHiCacheL3LayoutReq: (io.GetHiCacheL3LayoutReqOutput, {}),
        io.PdRoleSwitchReqInput: (io.PdRoleSwitchReqOutput, {}),
        io.ScaleElasticEPReqInput: (io.ScaleElasticEPReqOutput, {}),
    }


def list_fields(kind: type) -> list[tuple[str, bool]]:
    """Fields that a message of this kind is made with, and whether each must be given."""
    return [(field.name, field.required) for field in msgspec.structs.fields(kind)]


def is_for_controller(obj: Any) -> bool:
    """Whether an object is for SGLang's data-parallel controller: none is, it reads shared memory."""
    return False
