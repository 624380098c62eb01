"""Streams and events on a CPU: a stand-in for ``torch.cuda``, for code that copies on a stream of its own.

Work on the current stream runs when it is called.  A copy on another stream runs as late as it may, when the current
stream waits for it, or (``late`` is false) in the moment that it is asked for.

Between these two lies every order that a GPU may choose.  So each stream also counts what it knows to be over, on
itself and on others (a vector clock).  :meth:`Streams.use` and a copy raise :class:`Race` where nothing orders them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

ENV = "STREAM_REHEARSAL"
"""``late`` or ``early``: when copies of streamed layers are made, in the ranks of an engine.

With a seed after it (``late 7``) a judge with ``auto`` streams another number of layers in every fourth turn.
"""


class Race(AssertionError):
    """Two pieces of work on one place, which may run in either order."""


class Stream:
    def __init__(self) -> None:
        self.known: dict[Stream, int] = {self: 0}
        """How much of each stream's work is over before what this one does next."""
        self._pending: list[Callable[[], Any]] = []
        self._ran = 0

    def advance(self) -> int:
        self.known[self] += 1
        return self.known[self]

    def put(self, work: Callable[[], Any]) -> None:
        self._pending.append(work)

    def run_until(self, count: int) -> None:
        """Have the first ``count`` pieces of work done that were ever put here."""
        while self._ran < count:
            self._pending.pop(0)()
            self._ran += 1

    @property
    def put_so_far(self) -> int:
        return self._ran + len(self._pending)

    def wait_event(self, event: Event) -> None:
        assert event.stream is not None, "it waits for an event that was never recorded"
        self.learn(event.known)
        if not self._pending:  # else what is put here comes after it anyway
            event.stream.run_until(event.put_so_far)

    def wait_stream(self, other: Stream) -> None:
        self.learn(other.known)

    def learn(self, known: dict[Stream, int]) -> None:
        for stream, count in known.items():
            self.known[stream] = max(self.known.get(stream, 0), count)


class Event:
    stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self.stream, self.known, self.put_so_far = stream, dict(stream.known), stream.put_so_far


class Streams:
    """Stands in for ``torch.cuda``."""

    Stream, Event = Stream, Event

    def __init__(self, late: bool) -> None:
        self._late = late
        self._main = Stream()
        self._uses: dict[int, int] = {}
        self._copies: dict[int, tuple[Stream, int]] = {}
        self._over: list[int] = []

    def current_stream(self) -> Stream:
        return self._main

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        with _Copies(self, stream):
            yield

    def synchronize(self) -> None:
        streams = {self._main, *(stream for stream, _ in self._copies.values())}
        for stream in streams:
            stream.run_until(stream.put_so_far)
            for other in streams:
                stream.learn(other.known)
        self._over = self._count_work()

    def is_idle(self) -> bool:
        """Whether nothing was asked for since all was over."""
        return self._over == self._count_work()

    def _count_work(self) -> list[int]:
        return [stream.known[stream] for stream in dict.fromkeys([self._main, *(s for s, _ in self._copies.values())])]

    def use(self, tensor: torch.Tensor) -> None:
        """The current stream reads ``tensor`` now; raises :class:`Race` if a copy to its place may not be over."""
        place = _find_place(tensor)
        stream, count = self._copies.get(place, (self._main, 0))  # a resident layer has no copies
        if self._main.known.get(stream, 0) < count:
            raise Race("a layer is computed before its copy is over")
        self._uses[place] = self._main.advance()

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        place = _find_place(target)
        if stream.known.get(self._main, 0) < self._uses.get(place, 0):
            raise Race("a layer is overwritten before it is computed")
        self._copies[place] = stream, stream.advance()
        stream.put(lambda: target.copy_(source))
        if not self._late:
            stream.run_until(stream.put_so_far)


class _Copies(TorchFunctionMode):
    """What is copied inside is copied on a stream."""

    def __init__(self, streams: Streams, stream: Stream) -> None:
        super().__init__()
        self._streams, self._stream = streams, stream

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.copy_:
            self._streams.copy(self._stream, *args)
            return args[0]
        return function(*args, **kwargs or {})


def _find_place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def register() -> None:
    """Entry point; called in every process of an engine."""
    if given := os.environ.get(ENV):
        from stream_layers import layers

        order, _, seed = given.partition(" ")
        layers.get_device_module = lambda device: Streams(late=order == "late")
        if seed:
            draw_counts(seed)


def draw_counts(seed: str) -> None:
    """Have each rank want another number of streamed layers whenever it looks at its memory."""
    from stream_layers import follow
    from stream_layers.judge_memory import FEWEST

    def choose(self: Any, free: int) -> int:
        draws = self.__dict__.setdefault("draws", random.Random(f"{seed} of rank {torch.distributed.get_rank()}"))
        return draws.choice([0, *range(FEWEST, self._streamed.total + 1)])

    follow.EVERY, follow.Follower._choose = 4, choose
