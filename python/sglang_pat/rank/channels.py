"""Sockets of a rank and of the processes that listen to it."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from sglang.srt.managers.io_struct import AbortReq, BaseReq
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.utils.network import get_zmq_socket

from sglang_pat import messages
from sglang_pat.dropped import Dropped, read
from sglang_pat.rank import degrees
from sglang_pat.switch.order import OutputOrder, Stamped

SGLANG, PAT = b"h", b"p"
"""First frame of what a rank sends to the coordinator: an object of SGLang's (pickled, as SGLang does) or ours."""


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


class OutputSender:
    """Stands for SGLang's ``send_to_detokenizer``: numbers what it sends (``sglang_pat.switch.order``)."""

    def __init__(self, inner: Any, rank: int) -> None:
        self._inner = inner
        self._rank = rank
        self.sent = 0
        self.fence: dict[int, int] | None = None
        self.reqs: list[Req] = []
        """Those that the next output is about."""

    def send_output(self, output: Any, recv_obj: Any = None) -> None:
        degrees.tell(output, self.reqs)
        self.sent += 1
        self._inner.send_output(Stamped(self._rank, self.sent, self.fence, output))
        self.fence = None


class OrderedReceiver:
    """A PULL socket behind which outputs of all leaders come out in order; ``recv_pyobj`` as SGLang calls it.

    A frame that cannot be read is dropped.
    """

    def __init__(self, socket: Any, dropped: Dropped) -> None:
        self._socket = socket
        self._dropped = dropped
        self._order = OutputOrder()
        self._ready: deque[Any] = deque()

    def recv_pyobj(self) -> Any:
        while not self._ready:
            self._take(self._socket.recv())
        return self._ready.popleft()

    def _take(self, frame: bytes) -> None:
        for message in read(frame, self._dropped):
            self._ready.extend(self._order.push(message) if isinstance(message, Stamped) else [message])


class AsyncOrderedReceiver(OrderedReceiver):
    """The same on an asyncio socket."""

    async def recv_pyobj(self) -> Any:
        while not self._ready:
            self._take(await self._socket.recv())
        return self._ready.popleft()
