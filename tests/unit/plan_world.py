"""Random requests of every group at a switch, for tests of the KV plan; no test of its own."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from sglang_pat.layout import ParallelLayout
from sglang_pat.switch import plan


def divisors(n: int) -> list[int]:
    return [t for t in range(1, n + 1) if n % t == 0]


def list_heads(kv_heads: int, layout: ParallelLayout, rank: int) -> list[int]:
    """Heads of a rank as SGLang deals them: evenly, or one to neighbours."""
    tp_rank = layout.group(layout.group_of(rank)).index(rank)
    if layout.tp >= kv_heads:
        return [tp_rank // (layout.tp // kv_heads)]
    per_rank = kv_heads // layout.tp
    return list(range(tp_rank * per_rank, (tp_rank + 1) * per_rank))


MOVES = [
    (ParallelLayout(t, n // t), ParallelLayout(u, n // u))
    for n in (2, 4, 8, 6)
    for t, u in itertools.product(divisors(n), repeat=2)
    if t != u and max(t, u) % min(t, u) == 0
]
"""Switches ``(old, new)`` in both directions."""

LENT = [
    (old.with_stride(s), new.with_stride(s))
    for old, new in MOVES
    for s in divisors(old.num_ranks)[1:]
    if old.dp % s == new.dp % s == 0
]
"""Pairs of layouts while ranks are lent."""

LENDING = [
    (layout.with_stride(r), layout.with_stride(s))
    for layout in (ParallelLayout(t, n // t) for n in (2, 4, 8, 6) for t in divisors(n))
    for r, s in itertools.permutations(divisors(layout.dp), 2)
    if max(r, s) % min(r, s) == 0
]
"""Ranks are lent, or taken back; also some more, or some of them."""


@dataclass
class Case:
    """Random requests of every old group.

    ``tokens[g][i]``: identity of each token of request ``i`` (equal where a prefix is shared);
    ``slots[g][i]``: its slots in the group's old pools.
    """

    old: ParallelLayout
    new: ParallelLayout
    kv_heads: int
    tokens: list[list[list[int]]]
    slots: list[list[np.ndarray]]
    num_slots: int
    max_requests: int
    capacity: int
    incomplete: frozenset[tuple[int, int]] = frozenset()
    """Group and number of those that are in the middle of a prefill."""
    keep: bool = True

    def __post_init__(self) -> None:
        self.dests = [
            plan.choose_destinations(self.old, self.new, g, [len(t) for t in tokens])
            for g, tokens in enumerate(self.tokens)
        ]
        self.live = []
        for group, (tokens, slots, dests) in enumerate(zip(self.tokens, self.slots, self.dests, strict=True)):
            shared = plan.find_shared_prefixes(slots, dests, self.num_slots)
            self.live.append(
                [
                    plan.LiveRequest(len(t), *s, d, (group, number) not in self.incomplete)
                    for number, (t, s, d) in enumerate(zip(tokens, shared, dests, strict=True))
                ]
            )
        sources = dict(enumerate(self.live))
        self.plans = {
            dest: plan.plan_group(dest, sources, self.max_requests, self.capacity, self.keep)
            for dest in self.new.leaders
        }


@st.composite
def cases(draw, roomy: bool = True, moves: list[tuple[ParallelLayout, ParallelLayout]] = MOVES):
    old, new = draw(st.sampled_from(moves))
    low, high = sorted((old.tp, new.tp))
    allowed = [k for k in range(1, 13) if all(max(k, t) % min(k, t) == 0 for t in (low, high))]
    kv_heads = draw(st.sampled_from(allowed))
    # Hypothesis favours small cases; the requests are drawn evenly.
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    most = rng.integers(0, 8)
    sharing = rng.choice([0.0, 0.5, 1.0])
    names = itertools.count()
    # Divisible by every ratio of heads; few are in use, at the beginning or anywhere.
    all_tokens, all_slots, num_slots = [], [], 480
    span = rng.choice([200, num_slots])
    for leader in old.leaders:
        free = iter(rng.permutation(np.arange(1, span)))
        tokens: list[list[int]] = []
        slots: list[np.ndarray] = []
        for _ in range(rng.integers(0, most + 1) if leader in old.working else 0):
            row_tokens: list[int] = []
            row: list[int] = []
            if tokens and rng.random() < sharing:
                parent = rng.integers(len(tokens))
                keep = rng.integers(0, len(tokens[parent]) + 1)
                row_tokens, row = tokens[parent][:keep], list(slots[parent][:keep])
            own = int(rng.integers(0, 9))
            tokens.append(row_tokens + [next(names) for _ in range(own)])
            slots.append(np.array(row + [next(free) for _ in range(own)], dtype=np.int64))
        all_tokens.append(tokens)
        all_slots.append(slots)
    case = old, new, kv_heads, all_tokens, all_slots, num_slots
    if roomy:
        return Case(*case, 10_000, 10_000)
    numbers = ((group, number) for group, tokens in enumerate(all_tokens) for number in range(len(tokens)))
    rest = frozenset(place for place in numbers if rng.random() < 0.2)
    return Case(*case, draw(st.integers(0, 12)), draw(st.integers(1, 60)), rest, bool(rng.random() < 0.8))
