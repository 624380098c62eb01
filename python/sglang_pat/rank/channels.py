"""A rank's line to the coordinator (:class:`RankChannel`)."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import zmq

from sglang_pat import messages
from sglang_pat.host.child import open_socket
from sglang_pat.messages import PAT, SGLANG


class RankChannel:
    """A rank's line to the coordinator (PUSH); every rank has one, leader or not."""

    def __init__(self, context: zmq.Context, address: str, rank: int) -> None:
        self._socket = open_socket(context, zmq.PUSH, address, binds=False)
        self._rank = str(rank).encode()

    def send_sglang(self, obj: Any) -> None:
        self._socket.send_multipart([SGLANG, self._rank, pickle.dumps(obj)])

    def send(self, message: msgspec.Struct) -> None:
        self._socket.send_multipart([PAT, self._rank, messages.encode(message)])
