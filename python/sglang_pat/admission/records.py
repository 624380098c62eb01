"""What the admitter knows: prompts, their samples, the round under way.  All of it can be written to a file.

There are tens of thousands of samples in a large round: none refers to what refers to it, so Python's garbage collector
does not go through them (``gc=False``), which would hold up the event loop.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec


class Key(NamedTuple):
    """A prompt: the same one comes again in another epoch."""

    epoch: int
    index: int


class SampleId(NamedTuple):
    """A response: ``number`` within its group, ``attempt`` counts how often it was started or taken up again."""

    epoch: int
    index: int
    number: int
    attempt: int

    @property
    def key(self) -> Key:
        return Key(self.epoch, self.index)


class Span(msgspec.Struct, array_like=True, gc=False):
    """So many tokens, one after the other, were generated under this weight version."""

    version: int
    tokens: int


class Output(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """What was generated of a response so far.

    Attributes:
        spans: weight versions of its tokens, in their order.
        token_ids, logprobs: ``[tokens]`` each, or empty where nobody needs them (simulations).
        text: of the tokens.
        finish_reason: ``stop`` or ``length``; empty while unfinished.
    """

    spans: list[Span] = []
    token_ids: list[int] = []
    logprobs: list[float] = []
    text: str = ""
    finish_reason: str = ""

    @property
    def tokens(self) -> int:
        tokens = 0
        for span in self.spans:
            tokens += span.tokens
        return tokens

    @property
    def oldest(self) -> int | None:
        """Weight version of the oldest token; None without tokens."""
        return min((span.version for span in self.spans if span.tokens), default=None)

    def versions(self) -> list[int]:
        """Weight version of each token, ``[tokens]``."""
        return [span.version for span in self.spans for _ in range(span.tokens)]

    def followed_by(self, more: Output) -> Output:
        """This prefix and what was generated after it."""
        spans = [Span(span.version, span.tokens) for span in self.spans]
        for span in more.spans:
            if spans and spans[-1].version == span.version:
                spans[-1].tokens += span.tokens
            else:
                spans.append(Span(span.version, span.tokens))
        return Output(
            spans=spans, token_ids=self.token_ids + more.token_ids, logprobs=self.logprobs + more.logprobs,
            text=self.text + more.text, finish_reason=more.finish_reason,
        )  # fmt: skip


NEW, RUNNING, STOPPING, DONE = "new", "running", "stopping", "done"


class Sample(msgspec.Struct, kw_only=True, omit_defaults=True, eq=False, gc=False):
    """A response: ``new``, ``running``, ``stopping`` (its abort is not confirmed) or ``done``."""

    number: int
    state: str = NEW
    attempt: int = 0
    output: Output = msgspec.field(default_factory=Output)

    @property
    def alive(self) -> bool:
        """Whether the engine has it."""
        return self.state in (RUNNING, STOPPING)

    def reset(self) -> int:
        """Forget what it generated; so many tokens."""
        tokens = self.output.tokens
        self.output, self.state = Output(), NEW
        return tokens


class Group(msgspec.Struct, kw_only=True, omit_defaults=True, eq=False):
    """A prompt and its samples.

    Attributes:
        prompt: whatever the engine is to be given, as JSON has it.
        order: of arrival.
        deferrals: rounds that passed it over since it was first started.
        seen: tokens of the longest response that was thrown away; to the end it would have been longer.
        begun: whether it was started in a round before this one.
        complete: it has all its responses.
        judging: complete, and waits for a verdict; ``useful``: it had one, and it was good.
        chosen: numbers of the samples that are kept, in the order in which they ended.
        reward: as given with the verdict.
    """

    epoch: int
    index: int
    prompt: Any = None
    order: int = 0
    deferrals: int = 0
    seen: int = 0
    begun: bool = False
    complete: bool = False
    judging: bool = False
    useful: bool = False
    chosen: list[int] = []
    reward: float | None = None
    samples: list[Sample] = []

    @property
    def key(self) -> Key:
        return Key(self.epoch, self.index)

    @property
    def oldest(self) -> int | None:
        """Weight version of its oldest token; None without tokens."""
        # A loop: this is looked at for every group that waits, whenever a round begins.
        oldest = None
        for sample in self.samples:
            for span in sample.output.spans:
                if span.tokens and (oldest is None or span.version < oldest):
                    oldest = span.version
        return oldest

    @property
    def tokens(self) -> int:
        return sum(sample.output.tokens for sample in self.samples)

    def kept(self) -> list[Sample]:
        return [self.samples[number] for number in self.chosen]


SHORT, LONG, FLUSH = "short", "long", "flush"


class Round(msgspec.Struct, kw_only=True):
    """A round under way.

    Attributes:
        number: counts rounds from 0.
        epoch: of its prompts.
        kind: ``short``, ``long`` or ``flush`` (the rest of an epoch).
        version: of the weights.
        target: groups wanted.
        prompts: groups under way or taken at most (``partial``: unlimited); ``responses``: samples started for each.
        open: groups of this round that lack responses, by order, as they joined it.
        complete: those that have them, by order, as they were completed, but those returned or filtered.
        taken: returned groups, in order; kept until the round is over, so that it can be taken back.
        filtered: groups that were judged useless, likewise.
        owed: ``[bound + 1]`` or shorter: of the groups that may wait at most so many more rounds, how many must be
            returned in this one, or some group will wait too long; what is not there is 0.
        forced: those groups.
        room: fresh prompts that may still be started.
        stopping: the batch is complete, or the round was cancelled.
        cancelled: it will not have happened.
        thrown: tokens thrown away; ``aborted``: lengths of the samples that were stopped.
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
    forced: list[Key] = []
    room: int = 0
    stopping: bool = False
    cancelled: bool = False
    thrown: int = 0
    aborted: list[int] = []

    @property
    def groups(self) -> list[Group]:
        """Of this round, those that are not returned or filtered."""
        return [*self.complete.values(), *self.open.values()]

    @property
    def everyone(self) -> list[Group]:
        """All groups of this round, also those that have left it."""
        return [*self.groups, *self.taken, *self.filtered]


class State(msgspec.Struct, kw_only=True):
    """All that the admitter has to remember.

    Attributes:
        fresh: prompts that were never started, in order; ``waiting``: those that were, oldest first.
        round: the one under way.
        rounds: number of rounds that were completed, by kind.
        ended: epochs of which no more prompts come.
        known: indices of each epoch that is not over; ``over``: epochs up to and without this one are.
        fed: prompts that ever came.
        drawn, returned, filtered: prompts that were ever started, returned, filtered.
        aborted: samples that were stopped; ``thrown``: tokens thrown away.
        lengths: number and sum of the lengths of all returned responses.
        version: of the weights in the last round; None before the first.
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
    aborted: int = 0
    thrown: int = 0
    lengths: list[int] = msgspec.field(default_factory=lambda: [0, 0])
    version: int | None = None


class Launch(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Start a sample, or go on with ``prefix``."""

    sample: SampleId
    prompt: Any
    prefix: Output | None = None


class Abort(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Stop a sample, and say so with :meth:`Admitter.stopped` (or that it has ended after all)."""

    sample: SampleId


class Judge(msgspec.Struct, frozen=True, tag=True):
    """A group is complete; say with :meth:`Admitter.judged` whether it is of use."""

    group: Group


class Return(msgspec.Struct, frozen=True, tag=True):
    """A group of the batch."""

    group: Group


class Summary(msgspec.Struct, kw_only=True, frozen=True):
    """One round; of a cancelled one only what it cost.

    Attributes:
        target, returned, filtered, deferred: groups; ``deferred``: of this round, that wait now.
        drawn: groups ever started.
        thrown: tokens thrown away.
        kept_lengths: tokens of the responses returned.
        aborted_lengths: tokens of the samples that were stopped, as far as they had come.
        kept_rewards, filtered_rewards: of groups that were given one with their verdict.
        ages: of all groups that wait now, rounds that passed them over.
    """

    number: int
    kind: str
    version: int
    target: int
    returned: int
    filtered: int
    deferred: int
    drawn: int
    thrown: int
    cancelled: bool
    kept_lengths: list[int]
    aborted_lengths: list[int]
    kept_rewards: list[float]
    filtered_rewards: list[float]
    ages: list[int]


class RoundOver(msgspec.Struct, frozen=True, tag=True):
    """The engine has nothing of this round any more."""

    summary: Summary


Action = Launch | Abort | Judge | Return | RoundOver
