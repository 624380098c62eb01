"""Prompts as they come in, by epoch: a prompt comes once in an epoch, and one epoch is over before the next begins."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from sglang_pat.rollout.records import Group, Key
from sglang_pat.rollout.state import State


def feed(state: State, prompts: Iterable[tuple[Sequence[int], Any]], end_of: int | None = None) -> None:
    """More prompts that were never started; see :meth:`Admitter.feed`.

    Raises:
        ValueError: a key that was there already or whose epoch is over; then none of them is taken.
    """
    new = [(Key(*map(operator.index, key)), prompt) for key, prompt in prompts]
    _check(state, [key for key, _ in new])
    for key, prompt in new:
        state.fresh.append(Group(epoch=key.epoch, index=key.index, prompt=prompt, order=state.fed))
        state.known.setdefault(str(key.epoch), []).append(key.index)
        state.fed += 1
    in_order(state.fresh)
    if end_of is not None and end_of >= state.over and end_of not in state.ended:
        state.ended.append(end_of)
    close(state)


def _check(state: State, keys: list[Key]) -> None:
    """Raises ValueError: a key that came before, or whose epoch is over."""
    begun = state.round.epoch if state.round else min((group.epoch for group in state.waiting), default=0)
    seen = {int(epoch): set(indices) for epoch, indices in state.known.items()}
    for key in keys:
        if key.epoch < max(begun, state.over) or key.epoch in state.ended:
            raise ValueError(f"key {list(key)}: epoch {key.epoch} is over; give a later one")
        indices = seen.setdefault(key.epoch, set())
        if key.index in indices:
            raise ValueError(f"key {list(key)}: was given before; a prompt comes once in an epoch")
        indices.add(key.index)


def in_order(fresh: list[Group]) -> None:
    """Sort prompts as they are to be started: by epoch, then by arrival."""
    fresh.sort(key=lambda group: (group.epoch, group.order))


def current(state: State) -> int | None:
    """The epoch that prompts are drawn from: it is over before the next one begins.  None without prompts."""
    return min((group.epoch for group in (*state.waiting, *state.fresh[:1])), default=None)


def fresh_of(state: State, epoch: int | None) -> int:
    """Number of prompts of an epoch that were never started."""
    return sum(group.epoch == epoch for group in state.fresh)


def close(state: State) -> None:
    """Forget the keys of epochs that have ended and of which nothing is left."""
    while state.ended and state.round is None:
        epoch = min(state.ended)
        if any(group.epoch <= epoch for group in (*state.fresh, *state.waiting)):
            return
        state.ended.remove(epoch)
        state.over = epoch + 1
        state.known = {other: indices for other, indices in state.known.items() if int(other) > epoch}
