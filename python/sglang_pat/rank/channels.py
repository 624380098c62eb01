"""A rank's lines to the coordinator."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from sglang.srt.managers.io_struct import AbortReq, BaseReq
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.utils.network import get_zmq_socket

from sglang_pat import messages
from sglang_pat.messages import PAT, SGLANG


class RankChannel:
    """A rank's line to the coordinator (PUSH); every rank has one, leader or not."""

    def __init__(self, context: zmq.Context, address: str, rank: int) -> None:
        self._socket = get_zmq_socket(context, zmq.PUSH, address, False)
        self._rank = str(rank).encode()

    def send_sglang(self, obj: Any) -> None:
        self._socket.send_multipart([SGLANG, self._rank, pickle.dumps(obj)])

    def send(self, message: msgspec.Struct) -> None:
        self._socket.send_multipart([PAT, self._rank, messages.encode(message)])


class ControlSender:
    """Stands for SGLang's ``send_to_tokenizer`` on a leader: replies go through the coordinator,
    which merges those of all leaders into one.

    Args:
        end_waiting: called with the word that a waiting request is aborted, in place of sending it, where that would
            overtake tokens of the request.
    """

    def __init__(self, channel: RankChannel, end_waiting: Callable[[AbortReq, Req], None]) -> None:
        self._channel = channel
        self._end_waiting = end_waiting

    def send_output(self, output: Any, recv_obj: Any = None) -> None:
        if isinstance(output, AbortReq) and isinstance(recv_obj, Req) and recv_obj.output_ids:
            self._end_waiting(output, recv_obj)
            return
        if isinstance(recv_obj, BaseReq) and recv_obj.http_worker_ipc is not None and output.http_worker_ipc is None:
            output.http_worker_ipc = recv_obj.http_worker_ipc
        self._channel.send_sglang(output)


class RpcRelay:
    """Stands for SGLang's ``recv_from_rpc``: requests come through the coordinator, replies go back to it."""

    def __init__(self, channel: RankChannel) -> None:
        self._channel = channel

    def recv_pyobj(self, flags: int = 0) -> Any:
        raise zmq.Again()

    def send_pyobj(self, obj: Any) -> None:
        self._channel.send_sglang(obj)
