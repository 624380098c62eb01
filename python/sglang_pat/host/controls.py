"""SGLang's messages, as the coordinator knows them: which are for one leader, and for control requests (``CONTROLS``)
how replies are merged, which need the base layout, and how one is refused (:func:`make_error_reply`).
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, get_origin, get_type_hints

from sglang.srt.constants import GPU_MEMORY_ALL_TYPES, HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers import io_struct as io
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_pat.host import adapter
from sglang_pat.host.assign import assign

MAX_MESSAGE = 500
"""Most characters of an error that a client gets to see."""

_ERROR = "pat-error: "
"""Beginning of the ``rid`` of a reply of :func:`make_error_reply`, before the error: a field that no reply else has,
where a message takes no attributes of ours."""


def _merge_success(replies: list[Any]) -> Any:
    """One reply that succeeded if all did, with the distinct messages of those that did not (or of all)."""
    merged = replies[0]
    failed = [reply for reply in replies if not reply.success]
    assign(merged, success=not failed)
    messages = [reply.message for reply in failed or replies if getattr(reply, "message", None)]
    if messages:
        assign(merged, message=" | ".join(dict.fromkeys(messages)))
    return merged


def _all_or_error(replies: list[Any]) -> Any:
    """The first reply with an error of :func:`make_error_reply`, else the first: for replies that have no field for a
    failure."""
    return next((reply for reply in replies if get_error(reply)), replies[0])


_SUCCESS = dict(merge=_merge_success)
_MEMORY = dict(merge=_all_or_error, needs_base=True, failed=lambda reply: bool(get_error(reply)))
_WEIGHTS = dict(merge=_merge_success, needs_base=True)
_NEW_WEIGHTS = dict(_WEIGHTS, takes_back=True)

CONTROLS: dict[type, tuple[type, dict[str, Any]]] = {
    io.FlushCacheReqInput: (io.FlushCacheReqOutput, _SUCCESS),
    io.ClearHiCacheReqInput: (io.ClearHiCacheReqOutput, _SUCCESS),
    io.AttachHiCacheStorageReqInput: (io.AttachHiCacheStorageReqOutput, _SUCCESS),
    io.DetachHiCacheStorageReqInput: (io.DetachHiCacheStorageReqOutput, _SUCCESS),
    io.AddExternalCorpusReqInput: (io.AddExternalCorpusReqOutput, _SUCCESS),
    io.RemoveExternalCorpusReqInput: (io.RemoveExternalCorpusReqOutput, _SUCCESS),
    io.ListExternalCorporaReqInput: (io.ListExternalCorporaReqOutput, _SUCCESS),
    io.LoadLoRAAdapterReqInput: (io.LoRAUpdateOutput, _SUCCESS),
    io.LoadLoRAAdapterFromTensorsReqInput: (io.LoRAUpdateOutput, _SUCCESS),
    io.UnloadLoRAAdapterReqInput: (io.LoRAUpdateOutput, _SUCCESS),
    io.ExpertDistributionReq: (io.ExpertDistributionReqOutput, {}),
    io.ProfileReq: (io.ProfileReqOutput, _SUCCESS),
    io.GetInternalStateReq: (io.GetInternalStateReqOutput, {}),
    io.SetInternalStateReq: (io.SetInternalStateReqOutput, {}),
    io.SlowDownReqInput: (io.SlowDownReqOutput, {}),
    io.DumperControlReqInput: (io.DumperControlReqOutput, _SUCCESS),
    io.OpenSessionReqInput: (io.OpenSessionReqOutput, {}),
    io.RpcReqInput: (io.RpcReqOutput, _SUCCESS),
    io.UpdateWeightFromDiskReqInput: (io.UpdateWeightFromDiskReqOutput, _NEW_WEIGHTS),
    io.UpdateWeightsFromTensorReqInput: (io.UpdateWeightsFromTensorReqOutput, _NEW_WEIGHTS),
    io.UpdateWeightsFromDistributedReqInput: (io.UpdateWeightsFromDistributedReqOutput, _NEW_WEIGHTS),
    io.UpdateWeightsFromIPCReqInput: (io.UpdateWeightsFromIPCReqOutput, _NEW_WEIGHTS),
    io.InitWeightsUpdateGroupReqInput: (io.InitWeightsUpdateGroupReqOutput, _WEIGHTS),
    io.DestroyWeightsUpdateGroupReqInput: (io.DestroyWeightsUpdateGroupReqOutput, _WEIGHTS),
    io.InitWeightsSendGroupForRemoteInstanceReqInput: (io.InitWeightsSendGroupForRemoteInstanceReqOutput, _WEIGHTS),
    io.SendWeightsToRemoteInstanceReqInput: (io.SendWeightsToRemoteInstanceReqOutput, _WEIGHTS),
    io.GetWeightsByNameReqInput: (io.GetWeightsByNameReqOutput, dict(needs_base=True)),
    io.CheckWeightsReqInput: (io.CheckWeightsReqOutput, _WEIGHTS),
    io.ReleaseMemoryOccupationReqInput: (io.ReleaseMemoryOccupationReqOutput, _MEMORY),
    io.ResumeMemoryOccupationReqInput: (io.ResumeMemoryOccupationReqOutput, _MEMORY),
} | adapter.controls.list_controls(_NEW_WEIGHTS)
"""Control requests that are answered: reply type, and the fields of :class:`~sglang_pat.coordinator.router.Control`.

While ranks are lent: new weights take them back, as whoever has them has trained; what else needs the base layout is
refused, as its client may not know that a trainer has the memory of some ranks; all others go to lent ranks as well,
which must be as the others are when they come back.
"""

SINGLES = (io.TokenizedGenerateReqInput, io.TokenizedEmbeddingReqInput)
"""Requests that go to one leader."""


BATCHES = (io.BatchTokenizedGenerateReqInput, io.BatchTokenizedEmbeddingReqInput)
"""Messages that hold several of :data:`SINGLES`."""


def list_generations(obj: Any) -> list[Any] | None:
    """The requests for tokens in an object from the TokenizerManager, each on its own; None for a control request."""
    return list(obj) if isinstance(obj, BATCHES) else [obj] if isinstance(obj, SINGLES) else None


def is_probe(rid: str | None) -> bool:
    """Whether a request with this id is a health probe."""
    return HEALTH_CHECK_RID_PREFIX in (rid or "")


def is_rpc_reply(obj: Any) -> bool:
    """Whether a reply goes to the socket of remote calls."""
    return isinstance(obj, io.RpcReqOutput)


def clear_sender(obj: Any) -> None:
    """Take from a control request what a client may have put into it, and what nobody needs.

    Ranks look for health checks by ``rid``, which an abort alone means, and die of one that is no text.
    """
    if not isinstance(obj, io.BaseReq):
        return
    if not isinstance(obj, io.AbortReq):
        assign(obj, rid=None)
    elif not isinstance(obj.rid, str):
        assign(obj, rid=str(obj.rid))
    assign(obj, http_worker_ipc=None)


def find_effects(obj: Any) -> dict[str, Any]:
    """Effects of a control request on the engine, in fields of :class:`~sglang_pat.coordinator.router.Control`."""
    if isinstance(obj, io.PauseGenerationReqInput):
        return {"pauses": True}
    if isinstance(obj, io.ContinueGenerationReqInput):
        return {"pauses": False}
    if isinstance(obj, (io.ReleaseMemoryOccupationReqInput, io.ResumeMemoryOccupationReqInput)):
        name = "releases" if isinstance(obj, io.ReleaseMemoryOccupationReqInput) else "resumes"
        return {name: frozenset(obj.tags or GPU_MEMORY_ALL_TYPES)}
    return {}


def make_error_reply(obj: Any, error: Exception) -> Any:
    """The answer of a leader to a request whose handling raised ``error``; None if nobody waits for an answer."""
    message = f"{type(error).__name__}: {error}"[:MAX_MESSAGE]
    if isinstance(obj, SINGLES):
        return io.AbortReq(rid=obj.rid, finished_reason=FINISH_ABORT(message, HTTPStatus.BAD_REQUEST).to_json())
    reply, _ = CONTROLS.get(type(obj), (None, None))
    if reply is None:
        return None
    values = {"success": False, "rid": _ERROR + message}
    values |= dict.fromkeys(("message", "error_msg", "error_message"), message)
    kinds = get_type_hints(reply)
    return reply(
        **{
            name: values[name] if name in values else _make_empty_value(kinds[name])
            for name, required in adapter.controls.list_fields(reply)
            if required or name in values
        }
    )


def get_error(reply: Any) -> str:
    """The error that :func:`make_error_reply` was given for this reply; "" for any other reply."""
    rid = getattr(reply, "rid", None)
    return rid.removeprefix(_ERROR) if isinstance(rid, str) and rid.startswith(_ERROR) else ""


def _make_empty_value(kind: Any) -> Any:
    """An empty value of a field's type."""
    kind = get_origin(kind) or kind
    # Of weights asked for by name SGLang takes None for an error, and any list for an answer.
    return kind() if kind in (dict, str, bool, int, float) else None
