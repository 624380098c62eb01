"""What the admitter remembers between two calls (:class:`State`): prompts by epoch, the round under way
(:class:`Round`), everything else; as bytes, too (:func:`dump_admitter`, :func:`load_admitter`).

A prompt comes once in an epoch, and one epoch is over before the next begins.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

import msgspec
from msgspec.structs import replace

from sglang_pat.rollout.estimates import Bias, Cost, DrawnLengths
from sglang_pat.rollout.records import Group, PromptKey
from sglang_pat.rollout.rules import Rules

SHORT, LONG, FLUSH = "short", "long", "flush"


class Round(msgspec.Struct, kw_only=True):
    """A round under way.

    Attributes:
        number: counts rounds from 0.
        epoch: epoch of its prompts.
        kind: ``short``, ``long`` or ``flush`` (the rest of an epoch).
        version: version of the weights.
        target: groups wanted.
        prompts: groups under way or taken at most (``partial``: unlimited); ``responses``: samples started for each.
        open: groups of this round that lack responses, by order, as they joined it.
        complete: groups that have all responses, by order, as they were completed; not those returned or filtered.
        taken: returned groups, in order.
        filtered: groups that were judged useless.
        owed: ``[bound + 1]`` or shorter: of the groups that may wait at most so many more rounds, how many must be
            returned in this one, or some group will wait too long; what is not there is 0.
        jump: weight versions from the round before to this one, at least 1; as many are expected to the next one.
        forced: keys of the groups that must be returned in this round.
        room: fresh prompts that may still be started.
        judging: complete groups that wait for a verdict.
        asked: prompts that were asked for and are not there yet; ``dry``: none come any more.
        stopping: the batch is complete, or the round was cancelled.
        cancelled: whether it will not have happened.
        made: tokens generated; ``thrown``: thrown away; ``aborted``: lengths of the samples that were stopped.
        drawn: lengths of all samples that came out of the engine for good, by level, see ``estimates.py``.
        redraws: draws of deferred prompts that were rejected, see ``redraws.py``; ``gave_up``: prompts whose last draw
            was accepted although it would have been rejected.
    """

    number: int
    epoch: int
    kind: str
    version: int
    target: int
    prompts: int
    responses: int
    open: dict[int, Group] = {}
    complete: dict[int, Group] = {}
    taken: list[Group] = []
    filtered: list[Group] = []
    owed: list[int] = []
    jump: int = 1
    forced: list[PromptKey] = []
    room: int = 0
    judging: int = 0
    asked: int = 0
    dry: bool = False
    stopping: bool = False
    cancelled: bool = False
    made: int = 0
    thrown: int = 0
    aborted: list[int] = []
    drawn: dict[int, DrawnLengths] = {}
    redraws: int = 0
    gave_up: int = 0

    @property
    def groups(self) -> list[Group]:
        """Groups of this round that are not returned or filtered."""
        return [*self.complete.values(), *self.open.values()]


LEAST_KEPT = 0.25
"""A round starts no more than four times the prompts for the sake of those that will be useless."""


class State(msgspec.Struct, kw_only=True):
    """All that the admitter has to remember.

    Between two rounds nothing changes a group in ``fresh`` or ``waiting``: who has to makes it its own first
    (:meth:`Group.copy_for_changes`).  So a :meth:`copy` costs little, however many tokens there are.

    Attributes:
        fresh: prompts that were never started, in order; ``waiting``: those that were, oldest first.
        round: the one under way; it is not saved.
        rounds: number of rounds that were completed, by kind.
        ended: epochs of which no more prompts come.
        known: indices of each epoch that is not over; ``over``: epochs up to and without this one are.
        fed: prompts that ever came.
        drawn, returned, filtered: prompts that were ever started, returned, filtered.
        thrown: tokens thrown away.
        lengths: number and sum of the lengths of all returned responses.
        verdicts: groups found useful, and groups judged; older ones count less.
        version: version of the weights in the last round; None before the first.
        bias: lengths of what was returned, and of all that was drawn, in rounds not long ago; ``cost``: what they took.
    """

    fresh: list[Group] = []
    waiting: list[Group] = []
    round: Round | None = None
    rounds: dict[str, int] = {}
    ended: list[int] = []
    known: dict[str, list[int]] = {}
    over: int = 0
    fed: int = 0
    drawn: int = 0
    returned: int = 0
    filtered: int = 0
    thrown: int = 0
    lengths: list[int] = msgspec.field(default_factory=lambda: [0, 0])
    verdicts: list[float] = msgspec.field(default_factory=lambda: [0.0, 0.0])
    version: int | None = None
    bias: Bias = msgspec.field(default_factory=Bias)
    cost: Cost = msgspec.field(default_factory=Cost)

    @property
    def last(self) -> int:
        """Number of the last round that was completed; -1 before the first."""
        return sum(self.rounds.values()) - 1

    @property
    def keep_rate(self) -> float:
        """Share of complete groups that are found useful, as far as is known; 1 before the first verdict."""
        useful, judged = self.verdicts
        return max((useful + 1) / (judged + 1), LEAST_KEPT)

    def copy(self) -> State:
        """A copy that stays as it is, whatever happens to this state.

        Raises:
            RuntimeError: a round is under way.
        """
        if self.round is not None:
            raise RuntimeError(f"round {self.round.number} is not over")
        return replace(
            self, fresh=list(self.fresh), waiting=list(self.waiting), ended=list(self.ended), rounds=dict(self.rounds),
            known={epoch: list(indices) for epoch, indices in self.known.items()},
            bias=deepcopy(self.bias), cost=deepcopy(self.cost),
        )  # fmt: skip

    # -- prompts ---------------------------------------------------------------------------------------

    def feed(self, prompts: Iterable[tuple[Sequence[int], Any]], end_of: int | None = None) -> None:
        """Add prompts that were never started; see :meth:`Admitter.feed`.

        Raises:
            ValueError: a key that was there already or whose epoch is over; then none of them is taken.
        """
        new = [(PromptKey(*map(operator.index, key)), prompt) for key, prompt in prompts]
        self._check([key for key, _ in new])
        for key, prompt in new:
            self.fresh.append(Group(epoch=key.epoch, index=key.index, prompt=prompt, order=self.fed))
            self.known.setdefault(str(key.epoch), []).append(key.index)
            self.fed += 1
        self.sort_fresh()
        if end_of is not None and end_of >= self.over and end_of not in self.ended:
            self.ended.append(end_of)
        self.close_epochs()

    def _check(self, keys: list[PromptKey]) -> None:
        """Raises ValueError: a key that came before, or whose epoch is over."""
        begun = self.round.epoch if self.round else min((group.epoch for group in self.waiting), default=0)
        seen = {int(epoch): set(indices) for epoch, indices in self.known.items()}
        for key in keys:
            if key.epoch < max(begun, self.over) or key.epoch in self.ended:
                raise ValueError(f"key {list(key)}: epoch {key.epoch} is over; give a later one")
            indices = seen.setdefault(key.epoch, set())
            if key.index in indices:
                raise ValueError(f"key {list(key)}: was given before; a prompt comes once in an epoch")
            indices.add(key.index)

    def sort_fresh(self) -> None:
        """Sort the fresh prompts as they are to be started: by epoch, then by arrival."""
        self.fresh.sort(key=lambda group: (group.epoch, group.order))

    @property
    def epoch(self) -> int | None:
        """The epoch that prompts are drawn from: it is over before the next one begins.  None without prompts."""
        return min((group.epoch for group in (*self.waiting, *self.fresh[:1])), default=None)

    def count_fresh(self, epoch: int | None) -> int:
        """Number of prompts of an epoch that were never started."""
        return sum(group.epoch == epoch for group in self.fresh)

    def close_epochs(self) -> None:
        """Forget the keys of epochs that have ended and of which nothing is left."""
        while self.ended and self.round is None:
            epoch = min(self.ended)
            if any(group.epoch <= epoch for group in (*self.fresh, *self.waiting)):
                return
            self.ended.remove(epoch)
            self.over = epoch + 1
            self.known = {other: indices for other, indices in self.known.items() if int(other) > epoch}


SAVED_VERSION = 2


class _Header(msgspec.Struct):
    """The head that saved states of all versions have."""

    version: int


class _Saved(msgspec.Struct, kw_only=True):
    version: int
    rules: Rules
    state: State


def dump_admitter(rules: Rules, state: State) -> bytes:
    """JSON of all that the admitter knows between two rounds."""
    return msgspec.json.encode(_Saved(version=SAVED_VERSION, rules=rules, state=state))


def load_admitter(data: bytes, source: str) -> tuple[Rules, State]:
    """What :func:`dump_admitter` gave.

    Raises:
        ValueError: one line: not such a state, or of another version.
    """
    try:
        version = msgspec.json.decode(data, type=_Header).version
        if version != SAVED_VERSION:
            raise ValueError(f"{source}: version {version}, this is version {SAVED_VERSION}; finish its epoch there")
        saved = msgspec.json.decode(data, type=_Saved)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{source}: not the state of an admitter ({error})") from None
    if saved.state.round is not None:
        raise ValueError(f"{source}: saved within a round, by an earlier version; give one from between two rounds")
    return saved.rules, saved.state


def check_rules(old: Rules, new: Rules, state: State, source: str) -> None:
    """Raises ValueError: what was begun under the old rules cannot go on under the new ones.

    The mode must be the same, and in ``partial`` the size of groups while some are half done.
    """
    if new.mode != old.mode:
        raise ValueError(f"mode is {new.mode!r}, {source} is of mode {old.mode!r}; give another one")
    # As many as the groups have, and not as the old rules say: the state may have been restored.
    was = next((len(g.samples) for g in state.waiting if g.samples and len(g.samples) != new.num_responses), 0)
    if new.mode == "partial" and was:
        raise ValueError(f"num_responses is {new.num_responses}, {source} has groups of {was} half done; finish them")
