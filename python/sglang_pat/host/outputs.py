"""Outputs of a rank: tokens to the detokenizer, and replies to the TokenizerManager."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import zmq
from sglang.srt.managers.io_struct import AbortReq, BaseReq, BatchTokenIDOutput

from sglang_pat.host.assign import assign
from sglang_pat.host.requests import Req


def list_told(output: Any, reqs: Iterable[Req]) -> list[Req]:
    """The requests whose tokens are in ``output``, which is about some of ``reqs``, in their order."""
    if not isinstance(output, BatchTokenIDOutput):  # it has no tokens
        return []
    remaining = iter(reqs)
    return [next(req for req in remaining if req.rid == name) for name in output.rids or ()]


def add_info(output: BatchTokenIDOutput, key: str, values: list[Any]) -> None:
    """Add ``values``, one for each request of the output, to what their clients get as ``meta_info[key]``."""
    before: Any = output.customized_info or {}
    assign(output, customized_info=before | {key: values})


class ControlSender:
    """Stands for SGLang's ``send_to_tokenizer``: while its rank :attr:`leads` a group, replies go through the
    coordinator, which merges those of all leaders into one.

    Args:
        send: sends a reply to the coordinator.
        end_waiting: called with the word that a waiting request is aborted, in place of sending it, where that would
            overtake tokens of the request.
    """

    def __init__(self, send: Callable[[Any], None], end_waiting: Callable[[AbortReq, Req], None]) -> None:
        self.leads = True
        self._send = send
        self._end_waiting = end_waiting

    def send_output(self, output: Any, recv_obj: Any = None) -> None:
        if isinstance(output, AbortReq) and isinstance(recv_obj, Req) and recv_obj.output_ids:
            self._end_waiting(output, recv_obj)  # followers, too: they end what the leader ends
            return
        if not self.leads:
            return
        if isinstance(recv_obj, BaseReq) and recv_obj.http_worker_ipc is not None and output.http_worker_ipc is None:
            assign(output, http_worker_ipc=recv_obj.http_worker_ipc)
        self._send(output)


class RpcRelay:
    """Stands for SGLang's ``recv_from_rpc``: requests come through the coordinator, replies go back to it."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send, self._silent = send, os.eventfd(0)

    def fileno(self) -> int:
        """A descriptor on which nothing comes: a leader without work sleeps until something does, here or elsewhere."""
        return self._silent

    def recv_pyobj(self, flags: int = 0) -> Any:
        raise zmq.Again()

    def send_pyobj(self, obj: Any, flags: int = 0, protocol: int = -1) -> None:
        self._send(obj)
