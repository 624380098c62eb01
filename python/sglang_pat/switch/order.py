"""Outputs in order (:class:`OutputOrder`), though a request changes its leader.

Before a switch the tokens of a request come from one process, after it from another; over
separate sockets the second may overtake the first, and text would be shuffled.  Each leader
numbers what it sends, and the first message it sends after a switch carries a *fence*: how many
messages of every other leader must have been delivered before it.  A leader may come out of one
switch and go into the next without having sent anything; its fence then passes on to its heirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_pat.dropped import Dropped, read


@dataclass(frozen=True)
class NumberedOutput:
    """An output with its place: ``seq`` counts this rank's messages from 1."""

    rank: int
    seq: int
    fence: dict[int, int] | None
    payload: Any


def make_fence(rank: int, sent: Mapping[int, int], unsent: Iterable[Mapping[int, int] | None]) -> dict[int, int] | None:
    """Fence of the first output of ``rank`` after a switch.

    Args:
        sent: number of outputs that each leader of the old layout has sent so far.
        unsent: fences of those leaders that no output has carried yet.
    """
    fence = dict(sent)
    for earlier in unsent:
        for other, seq in (earlier or {}).items():
            fence[other] = max(fence.get(other, 0), seq)
    return {other: seq for other, seq in fence.items() if other != rank and seq} or None


@dataclass
class OutputOrder:
    """A queue that delivers :class:`NumberedOutput` messages so that every fence holds, and holds the others back."""

    _delivered: dict[int, int] = field(default_factory=dict)
    _held: dict[int, deque[NumberedOutput]] = field(default_factory=dict)

    def push(self, message: NumberedOutput) -> list[Any]:
        """Take a message; returns the payloads that may go on now, in order."""
        self._held.setdefault(message.rank, deque()).append(message)
        ready: list[Any] = []
        progress = True
        while progress:
            progress = False
            for queue in self._held.values():
                while queue and self._is_open(queue[0].fence):
                    head = queue.popleft()
                    self._delivered[head.rank] = head.seq
                    ready.append(head.payload)
                    progress = True
        return ready

    def _is_open(self, fence: dict[int, int] | None) -> bool:
        return not fence or all(self._delivered.get(rank, 0) >= seq for rank, seq in fence.items())


class OutputSender:
    """Stand-in for SGLang's ``send_to_detokenizer``, which numbers what it sends while its rank :attr:`leads` a group.

    Args:
        tell: adds to an output what ours say of the requests that it is about.
    """

    def __init__(self, inner: Any, rank: int, tell: Callable[[Any, list[Any]], None]) -> None:
        self._inner = inner
        self._rank = rank
        self._tell = tell
        self.leads = True
        self.sent = 0
        self.fence: dict[int, int] | None = None
        self.reqs: list[Any] = []
        """Requests that the next output is about."""

    def send_output(self, output: Any, recv_obj: Any = None) -> None:
        if not self.leads:
            return
        self._tell(output, self.reqs)
        self.sent += 1
        self._inner.send_output(NumberedOutput(self._rank, self.sent, self.fence, output))
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

    def recv_pyobj(self, flags: int = 0) -> Any:
        while not self._ready:
            self._take(self._socket.recv(flags))
        return self._ready.popleft()

    def _take(self, frame: bytes) -> None:
        for message in read(frame, self._dropped):
            self._ready.extend(self._order.push(message) if isinstance(message, NumberedOutput) else [message])


class AsyncOrderedReceiver(OrderedReceiver):
    """An :class:`OrderedReceiver` on an asyncio socket."""

    async def recv_pyobj(self, flags: int = 0) -> Any:
        while not self._ready:
            self._take(await self._socket.recv(flags))
        return self._ready.popleft()
