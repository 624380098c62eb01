"""Prompts and their samples (:class:`Group`, :class:`Sample`, :class:`Output`), and what the admitter says is to be
done with them (:data:`Action`).

There are tens of thousands of samples in a large round: none refers to what refers to it, so Python's garbage collector
does not go through them (``gc=False``), which would hold up the event loop.
"""

from __future__ import annotations

from copy import copy
from typing import Any, NamedTuple

import msgspec

from sglang_pat.rollout.missing import choose_rewarded


class PromptKey(NamedTuple):
    """A prompt: the same one comes again in another epoch."""

    epoch: int
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]  (a tuple's method of that name is not called)


class SampleId(NamedTuple):
    """A response: ``number`` within its group, ``attempt`` counts how often it was started or taken up again."""

    epoch: int
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]
    number: int
    attempt: int

    @property
    def key(self) -> PromptKey:
        return PromptKey(self.epoch, self.index)


class Span(msgspec.Struct, array_like=True, gc=False):
    """A run of ``tokens`` tokens that were generated under one weight version; None: they were given (``turns.py``), by
    a tool for example."""

    version: int | None
    tokens: int


class Output(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """What there is of a response so far.

    Attributes:
        spans: weight versions of its tokens, in their order.
        token_ids, logprobs: ``[tokens]`` each, given ones included (log-prob 0), or empty where nobody needs them
            (simulations).
        text: the tokens, decoded.
        finish_reason: ``stop``, ``length``, or one of ``turns.py``; empty while unfinished.
        asked: the model has ended its turn, and the environment has not answered yet.
        seconds: time of the response, tools included; 0 where nobody has a clock.
        routed_experts: experts of each token of prompt and response but the last, from an engine with
            ``--enable-return-routed-experts``: int16 ``[tokens - 1, layers, experts per token]``, as bytes.
    """

    spans: list[Span] = []
    token_ids: list[int] = []
    logprobs: list[float] = []
    text: str = ""
    finish_reason: str = ""
    asked: bool = False
    seconds: float = 0.0
    routed_experts: bytes = b""

    @property
    def tokens(self) -> int:
        """Number of generated tokens: what limits count, and what a length is."""
        tokens = 0
        for span in self.spans:
            if span.version is not None:
                tokens += span.tokens
        return tokens

    @property
    def oldest(self) -> int | None:
        """Weight version of the oldest token; None without tokens."""
        return min((span.version for span in self.spans if span.tokens and span.version is not None), default=None)

    def list_versions(self) -> list[int | None]:
        """Weight version of each token, ``[tokens]``; None for given ones."""
        return [span.version for span in self.spans for _ in range(span.tokens)]

    def make_mask(self) -> list[bool]:
        """Whether the model generated each token, ``[tokens]``: what a loss may count."""
        return [version is not None for version in self.list_versions()]

    def concatenate(self, more: Output) -> Output:
        """This output, followed by what was generated after it."""
        spans = [Span(span.version, span.tokens) for span in self.spans]
        for span in more.spans:
            if spans and spans[-1].version == span.version:
                spans[-1].tokens += span.tokens
            else:
                spans.append(Span(span.version, span.tokens))
        return Output(
            spans=spans, token_ids=self.token_ids + more.token_ids, logprobs=self.logprobs + more.logprobs,
            text=self.text + more.text, finish_reason=more.finish_reason,
            asked=more.asked or (self.asked and not more.spans and not more.finish_reason),
            seconds=self.seconds + more.seconds,
            # Those of the prefix, too, which may have been computed again with other weights: what there was stays.
            routed_experts=self.routed_experts + more.routed_experts[len(self.routed_experts) :],
        )  # fmt: skip


NEW, RUNNING, STOPPING, DONE = "new", "running", "stopping", "done"


class Sample(msgspec.Struct, kw_only=True, omit_defaults=True, eq=False, gc=False):
    """A response: ``new``, ``running``, ``stopping`` (its abort is not confirmed) or ``done``.

    ``had``: tokens that were thrown away last, in this round.  ``reward``: None where nobody asked for one,
    and where it is missing.
    """

    number: int
    state: str = NEW
    attempt: int = 0
    had: int = 0
    output: Output = msgspec.field(default_factory=Output)
    reward: float | None = None

    @property
    def alive(self) -> bool:
        """Whether the engine has the sample."""
        return self.state in (RUNNING, STOPPING)

    def reset(self) -> int:
        """Forget what the sample generated, and return its number of tokens."""
        tokens = self.output.tokens
        self.output, self.state, self.had, self.reward = Output(), NEW, tokens, None
        return tokens


class Group(msgspec.Struct, kw_only=True, omit_defaults=True, eq=False):
    """A prompt and its samples.

    Attributes:
        prompt: whatever the engine is to be given, as JSON has it.
        order: number of its arrival.
        deferrals: rounds that passed it over since it was first started.
        seen: tokens of the longest response that was thrown away; to the end it would have been longer.
        begun: whether it was started in a round before this one.
        complete: whether it has all its responses.
        judging: complete, and waits for a verdict; ``useful``: it had one, and it was good.
        chosen: numbers of the samples that are kept, in the order in which they ended.
        oldest: weight version of its oldest token, where tokens outlive their round; None without tokens.  Kept event
            by event (``deadlines.py``): to go through all tokens of all groups when a round begins takes long.
        level: level of the length of its short responses, see ``estimates.py``; None: not known yet.
        floors: tokens that each response had had when the group was last passed over; empty before.
        rejected: draws that were rejected in this round, see ``redraws.py``; those up to ``draws`` may run.
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
    oldest: int | None = None
    level: int | None = None
    floors: list[int] = []
    rejected: int = 0
    draws: int = 1
    samples: list[Sample] = []

    @property
    def key(self) -> PromptKey:
        return PromptKey(self.epoch, self.index)

    def find_oldest(self) -> int | None:
        """What :attr:`oldest` is to be, by going through its tokens."""
        versions = [sample.output.oldest for sample in self.samples]
        return min((version for version in versions if version is not None), default=None)

    @property
    def tokens(self) -> int:
        return sum(sample.output.tokens for sample in self.samples)

    def list_kept(self) -> list[Sample]:
        return [self.samples[number] for number in self.chosen]

    def list_rewarded(self) -> list[Sample]:
        """Samples to train on after a round with rewards (:func:`~sglang_pat.rollout.missing.choose_rewarded`)."""
        kept = self.list_kept()
        return [kept[index] for index in choose_rewarded([sample.reward is not None for sample in kept])]

    def floor(self, number: int) -> int:
        """Floor of a sample, whichever draw it is of; 0 if the group was never passed over."""
        return self.floors[number % len(self.floors)] if self.floors else 0

    def get_sample_id(self, sample: Sample) -> SampleId:
        """Id of one of the group's samples, in its present attempt."""
        return SampleId(*self.key, sample.number, sample.attempt)

    def copy_for_changes(self) -> Group:
        """A copy that may be changed.  Between two rounds groups are shared with copies of the state."""
        group = copy(self)
        group.samples, group.chosen = [copy(sample) for sample in self.samples], list(self.chosen)
        return group

    def fill(self, responses: int) -> None:
        """Have at least ``responses`` samples from now on."""
        self.samples += [Sample(number=number) for number in range(len(self.samples), responses)]

    def drop_tokens(self, sample: Sample) -> int:
        """Throw away what one of the samples generated, and return its number of tokens."""
        tokens = sample.reset()
        self.seen = max(self.seen, tokens)
        return tokens


class Launch(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Start a sample, or go on with ``prefix``."""

    sample: SampleId
    prompt: Any
    prefix: Output | None = None


class Abort(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Stop a sample, and say so with :meth:`Admitter.record_stopped` (or that it has ended after all)."""

    sample: SampleId


class Judge(msgspec.Struct, frozen=True, tag=True):
    """A group is complete; say with :meth:`Admitter.record_verdict` whether it is of use."""

    group: Group


class NeedPrompts(msgspec.Struct, frozen=True, tag=True):
    """The round could start so many prompts that nobody has fed: :meth:`Admitter.feed`, or
    :meth:`Admitter.end_prompts`."""

    prompts: int


class ReturnGroup(msgspec.Struct, frozen=True, tag=True):
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
        ages: rounds that passed over each group that waits now.
        redraws, gave_up: see :class:`~.state.Round`.
        mean_returned: tokens of a response of the groups that were returned or filtered in some 64 rounds;
            ``mean_undropped``: what it would be if nothing were thrown away, an estimate (``estimates.py``), and
            ``mean_undropped_error``: how far off it may be by chance.
        seconds: time of the round, 0 where nobody has a clock; ``mean_seconds``: mean of some 64 rounds;
            ``plain_seconds``: that of a round with the same lengths and without tail batching, an estimate
            (``estimates.py``).
        warning: what its job should know, one line, once; empty mostly.
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
    ages: list[int]
    redraws: int = 0
    gave_up: int = 0
    mean_returned: float = 0.0
    mean_undropped: float = 0.0
    mean_undropped_error: float = 0.0
    seconds: float = 0.0
    mean_seconds: float = 0.0
    plain_seconds: float = 0.0
    warning: str = ""


class RoundOver(msgspec.Struct, frozen=True, tag=True):
    """The engine has nothing of this round any more."""

    summary: Summary


Action = Launch | Abort | Judge | NeedPrompts | ReturnGroup | RoundOver
