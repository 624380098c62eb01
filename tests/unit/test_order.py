"""Outputs in order over switches, whatever the sockets do to the messages of different ranks."""

from __future__ import annotations

import random
from collections import deque
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pat.switch.order import OutputOrder, Stamped, fence_after_switch

from .drawn import examples

pytestmark = pytest.mark.unit


class Leaders:
    """Ranks that number their outputs and switch, as ``sglang.channels`` and ``sglang.switch`` do.

    A payload is ``(request, index of its output)``.
    """

    def __init__(self, ranks: int) -> None:
        self.sent = dict.fromkeys(range(ranks), 0)
        self.fence: dict[int, dict[int, int] | None] = dict.fromkeys(range(ranks))
        self.wire: dict[int, list[Stamped]] = {rank: [] for rank in range(ranks)}

    def send(self, rank: int, payload) -> None:
        self.sent[rank] += 1
        self.wire[rank].append(Stamped(rank, self.sent[rank], self.fence[rank], payload))
        self.fence[rank] = None

    def switch(self, old: range, new: range) -> None:
        sent = {rank: self.sent[rank] for rank in old}
        unsent = [self.fence[rank] for rank in old]
        for rank in self.sent:
            self.fence[rank] = fence_after_switch(rank, sent, unsent) if rank in new else None


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


def deliver(rng: random.Random, wire: dict[int, list[Stamped]], order: OutputOrder | None) -> list:
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
    rng = random.Random(seed)
    leaders = random_run(rng, ranks, max_steps)
    delivered = deliver(rng, leaders.wire, OutputOrder())
    assert in_order(delivered)
    assert sorted(delivered) == sorted(m.payload for messages in leaders.wire.values() for m in messages)


@examples(200)
@given(st.integers(0, 2**32 - 1))
def test_fences_hold(seed):
    """Nothing comes out before its fence, and each rank's messages come out in its order."""
    rng = random.Random(seed)
    leaders = random_run(rng, 4, 5)
    messages = {m.payload: m for sent in leaders.wire.values() for m in sent}
    count = dict.fromkeys(range(4), 0)
    for payload in deliver(rng, leaders.wire, OutputOrder()):
        message = messages[payload]
        assert message.seq == count[message.rank] + 1
        assert all(count[rank] >= seq for rank, seq in (message.fence or {}).items())
        count[message.rank] += 1


def test_without_the_fence_text_is_shuffled():
    """Rank 1 hands its request to rank 0, whose output overtakes the last one of rank 1."""
    old, new = Stamped(1, 1, None, ("r", 0)), Stamped(0, 1, {1: 1}, ("r", 1))
    order = OutputOrder()
    assert order.push(new) == []
    assert order.push(old) == [("r", 0), ("r", 1)]
    bare = Stamped(0, 1, None, ("r", 1))
    order = OutputOrder()
    assert not in_order(order.push(bare) + order.push(old))


def test_random_runs_fail_without_fences():
    """The property above has teeth."""
    broken = 0
    for seed in range(50):
        rng = random.Random(seed)
        leaders = random_run(rng, 2, 3)
        broken += not in_order(deliver(rng, leaders.wire, None))
    assert broken > 10


def test_a_fence_outlives_a_leader_that_sent_nothing():
    """Rank 3 → leader 1 → leader 0, and leader 1 had no output in between."""
    for ordering in permutations(range(3)):
        leaders = Leaders(4)
        leaders.send(3, ("r", 0))
        leaders.switch(range(4), range(2))
        leaders.send(0, ("other", 0))
        leaders.switch(range(2), range(1))
        leaders.send(0, ("r", 1))
        first, after = leaders.wire[0]
        assert after.fence == {3: 1}
        wire = [leaders.wire[3][0], first, after]
        if ordering.index(1) > ordering.index(2):
            continue  # rank 0's own messages keep their order on the socket
        order = OutputOrder()
        delivered = [payload for i in ordering for payload in order.push(wire[i])]
        assert in_order(delivered) and len(delivered) == 3


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
    assert fence_after_switch(0, sent, unsent) == fence


def test_unfenced_messages_pass_straight_through():
    order = OutputOrder()
    assert [order.push(Stamped(r, s, None, (r, s))) for r, s in [(0, 1), (1, 1), (0, 2)]] == [
        [(0, 1)],
        [(1, 1)],
        [(0, 2)],
    ]
    assert order.push(Stamped(2, 1, {}, "empty fence")) == ["empty fence"]
