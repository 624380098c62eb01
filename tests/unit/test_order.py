"""Outputs in order over switches, whatever the sockets do to the messages of different ranks."""

from __future__ import annotations

import pickle
import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pat.dropped import Dropped
from sglang_pat.switch.order import (
    AsyncOrderedReceiver,
    NumberedOutput,
    OrderedReceiver,
    OutputOrder,
    OutputSender,
    make_fence,
)

from .drawn import examples

pytestmark = pytest.mark.unit


class Leaders:
    """Ranks that number their outputs, and switch as ``switch/executor.py`` does.

    A payload is ``(request, index of its output)``.
    """

    def __init__(self, ranks: int) -> None:
        self.wire: dict[int, list[NumberedOutput]] = {rank: [] for rank in range(ranks)}
        self.told: list[Any] = []
        self.senders = [
            OutputSender(SimpleNamespace(send_output=sent.append), rank, lambda output, _: self.told.append(output))
            for rank, sent in self.wire.items()
        ]

    def send(self, rank: int, payload) -> None:
        self.senders[rank].send_output(payload)
        assert self.told[-1] == payload

    def switch(self, old: range, new: range) -> None:
        sent = {rank: self.senders[rank].sent for rank in old}
        unsent = [self.senders[rank].fence for rank in old]
        for rank, sender in enumerate(self.senders):
            sender.fence = make_fence(rank, sent, unsent) if rank in new else None


def random_run(rng: random.Random, ranks: int, max_steps: int) -> Leaders:
    """Several switches up and down; in each layout a few outputs, perhaps none."""
    leaders, outputs = Leaders(ranks), {request: 0 for request in range(6)}
    current = range(ranks)
    home = {request: rng.choice(current) for request in outputs}
    for _ in range(rng.randint(1, 6)):
        for _ in range(rng.randint(0, max_steps)):
            request = rng.choice(list(outputs))
            leaders.send(home[request], (request, outputs[request]))
            outputs[request] += 1
        new = range(rng.choice([n for n in (1, 2, 4) if n <= ranks]))
        leaders.switch(current, new)
        current = new
        home = {request: rng.choice(current) for request in outputs}
    for request in outputs:
        leaders.send(home[request], (request, outputs[request]))
    return leaders


def deliver(rng: random.Random, wire: dict[int, list[NumberedOutput]], order: OutputOrder | None) -> list:
    """All messages, each rank's in order but the ranks interleaved at random."""
    queues = {rank: deque(messages) for rank, messages in wire.items() if messages}
    result = []
    while queues:
        rank = rng.choice(sorted(queues))
        # Bursts: a rank may get far ahead of the others.
        for _ in range(min(len(queues[rank]), rng.choice([1, 1, 2, 50]))):
            message = queues[rank].popleft()
            result += order.push(message) if order else [message.payload]
        if not queues[rank]:
            del queues[rank]
    return result


def in_order(delivered: list) -> bool:
    seen: dict[int, int] = {}
    for request, index in delivered:
        if index != seen.get(request, 0):
            return False
        seen[request] = index + 1
    return True


@examples(400)
@given(st.integers(0, 2**32 - 1), st.sampled_from([2, 4]), st.sampled_from([0, 1, 3, 20]))
def test_every_request_in_order_and_complete(seed, ranks, max_steps):
    """Nothing comes out before its fence, each rank's messages in its order."""
    rng = random.Random(seed)
    leaders = random_run(rng, ranks, max_steps)
    delivered = deliver(rng, leaders.wire, OutputOrder())
    assert in_order(delivered)
    messages = {m.payload: m for sent in leaders.wire.values() for m in sent}
    assert sorted(delivered) == sorted(messages)
    count = dict.fromkeys(range(ranks), 0)
    for message in map(messages.get, delivered):
        assert message.seq == count[message.rank] + 1
        assert all(count[rank] >= seq for rank, seq in (message.fence or {}).items())
        count[message.rank] += 1


def test_random_runs_fail_without_fences():
    """The property above has teeth."""
    broken = 0
    for seed in range(50):
        rng = random.Random(seed)
        leaders = random_run(rng, 2, 3)
        broken += not in_order(deliver(rng, leaders.wire, None))
    assert broken > 10


async def test_receivers_deliver_in_order():
    outputs = NumberedOutput(0, 1, {1: 1}, "later"), NumberedOutput(1, 1, None, "first")
    frames = iter([pickle.dumps(output) for output in 2 * outputs])

    async def recv(flags: int) -> bytes:
        return next(frames)

    receiver = OrderedReceiver(SimpleNamespace(recv=lambda flags: next(frames)), Dropped())
    assert [receiver.recv_pyobj() for _ in outputs] == ["first", "later"]
    receiver = AsyncOrderedReceiver(SimpleNamespace(recv=recv), Dropped())
    assert [await receiver.recv_pyobj() for _ in outputs] == ["first", "later"]


@pytest.mark.parametrize(
    ("sent", "unsent", "fence"),
    [
        ({0: 3, 1: 5}, [], {1: 5}),
        ({0: 3, 1: 0}, [None, None], None),
        ({0: 3}, [], None),
        ({0: 3, 1: 5}, [{2: 7}, None], {1: 5, 2: 7}),
        ({1: 5}, [{1: 2, 2: 7}, {2: 9}], {1: 5, 2: 9}),
        ({1: 5}, [{0: 4}], {1: 5}),
    ],
)
def test_fence_after_switch(sent, unsent, fence):
    assert make_fence(0, sent, unsent) == fence
