"""Estimates that a job is told of its rounds: how much shorter than drawn its responses are (:class:`Bias`), and what
rounds cost (:class:`Cost`).

**Bias.** Kaplan and Meier's estimate of the mean length over all samples drawn.  One that ended is an event; one that
was aborted is *censored*: it would have been longer.  A sample of a prompt that was passed over counts only from its
floor on (left truncation, see ``redraws.py``): below it the prompt was counted with its first draw, and it must not
count twice.  Prompts differ, and an aborted sample is like others of its own prompt, which are few.  So there is an
estimate for each *level*: for prompts whose short responses (the lower quartile of the first draw) lie between the same
powers of two, and for those of which nothing had ended when they were first passed over.  How far off it is, is in
``docs/results/tail_batching.md``.

**Cost.** A *plain* round draws P0 prompts with R0 responses each, and waits for the longest.  How long that is follows
from the lengths seen, where what was thrown away counts as it would have gone on.  A response of so many tokens takes
as long as those did that ended here with about so many: in full rounds and in empty ones, with their prefill, their
queue and their tools.  What is left out: a plain round starts fewer responses, and where the engine is full it gains by
that; prompts that differ within a level make it seem longer.  The seconds are told by the process that has a clock: of
each response with its output, of a round with :meth:`Admitter.record_round_time`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from sglang_pat.rollout.records import RUNNING, Group, Output, Sample, Summary
from sglang_pat.rollout.rules import Rules

logger = logging.getLogger(__name__)

BINS = 16
"""Bins per doubling of the length.  All prompts are cut at much the same one, and others end just before it."""

SLOW = -1
"""Level of the prompts of which nothing had ended when they were first passed over."""

KEPT = 1 - 1 / 64
"""Weight of a round over that of the next one: the estimate follows the model, as of some 64 rounds."""


class LengthBin(NamedTuple):
    """A bin of lengths: ``exposed`` samples came to it, ``share`` of them ended in it, with ``tokens`` tokens on
    average."""

    exposed: float
    share: float
    tokens: float


class DrawnLengths(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Samples by bins of their length, as weights.

    Attributes:
        ended: samples that ended by themselves; ``tokens``: their tokens, in all.
        cut: samples that were aborted, at their length.
        entered: samples that count from their floor on only, at their floor.
    """

    ended: dict[int, float] = {}
    tokens: dict[int, float] = {}
    cut: dict[int, float] = {}
    entered: dict[int, float] = {}

    def add_sample(self, tokens: int, ended: bool, floor: int) -> None:
        """A sample is out of the engine; ``floor``: 0 for one of a prompt's first draw."""
        if tokens <= floor:
            return
        if floor:
            add(self.entered, get_bin(floor), 1.0)
        if ended:
            add(self.ended, get_bin(tokens), 1.0)
            add(self.tokens, get_bin(tokens), tokens)
        else:
            add(self.cut, get_bin(tokens), 1.0)

    def merge(self, more: DrawnLengths) -> None:
        """Add the weights of other samples."""
        for weights, more_weights in zip(msgspec.structs.astuple(self), msgspec.structs.astuple(more), strict=True):
            for place, weight in more_weights.items():
                add(weights, place, weight)

    def fade(self) -> None:
        """Let all weights count for less, by ``KEPT``."""
        for weights in msgspec.structs.astuple(self):
            for place in weights:
                weights[place] *= KEPT

    @property
    def first(self) -> float:
        """Number of samples of first draws."""
        return sum(self.ended.values()) + sum(self.cut.values()) - sum(self.entered.values())

    def estimate_curve(self) -> dict[int, LengthBin]:
        """How responses end if nothing is thrown away, by bin, in their order."""
        risk = self.first
        curve: dict[int, LengthBin] = {}
        for place in sorted({*self.ended, *self.cut, *self.entered}):
            ended, cut, entered = (those.get(place, 0.0) for those in (self.ended, self.cut, self.entered))
            if ended:
                # Those that come or go within a bin are there for half of it.
                exposed = max(risk + (entered - cut) / 2, ended)
                curve[place] = LengthBin(exposed, ended / exposed, self.tokens[place] / ended)
            risk += entered - ended - cut
        return curve

    def estimate_mean(self) -> tuple[float, float, float]:
        """Tokens of a response if nothing had been thrown away, 0 if nothing ended; the variance of that estimate
        (Greenwood); and what there is in it of responses that outlive all that ended: they count as the longest.
        """
        bins = [*self.estimate_curve().values()]
        mean = unseen = bins[-1].tokens if bins else 0.0
        variance = 0.0
        for exposed, share, tokens in reversed(bins):
            survival = 1 - share
            variance = survival**2 * variance + share * survival / exposed * (mean - tokens) ** 2
            mean, unseen = share * tokens + survival * mean, survival * unseen
        return mean, variance, unseen


class Bias(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Samples of the rounds not long ago, by which the bias of a round is estimated.

    Attributes:
        responses: number of those of groups that were returned or filtered; ``tokens``: their tokens, in all.
        drawn: all samples, by level.
    """

    responses: float = 0.0
    tokens: float = 0.0
    drawn: dict[int, DrawnLengths] = {}

    def add_round(self, levels: dict[int, DrawnLengths], lengths: Sequence[int]) -> None:
        """Another round has happened, with these samples; ``lengths``: of those of its groups that have left."""
        self.responses = KEPT * self.responses + len(lengths)
        self.tokens = KEPT * self.tokens + sum(lengths)
        for drawn in self.drawn.values():
            drawn.fade()
        for level, drawn in levels.items():
            self.drawn.setdefault(level, DrawnLengths()).merge(drawn)

    def compute_mean_returned(self) -> float:
        """Mean tokens of a returned response; 0 if there was none."""
        return self.tokens / self.responses if self.responses else 0.0

    def estimate_mean_undropped(self) -> tuple[float, float]:
        """Tokens of a response if nothing had been thrown away, an estimate, 0 if nothing ended; and its error.

        The error is the standard error, and all that stands for responses of which nobody has seen the end.
        """
        mean = variance = unseen = 0.0
        for weight, drawn in self.compute_level_weights():
            level = drawn.estimate_mean()
            mean += weight * level[0]
            variance += weight**2 * level[1]
            unseen += weight * level[2]
        return mean, variance**0.5 + unseen

    def compute_level_weights(self) -> list[tuple[float, DrawnLengths]]:
        """Levels, each with the share of all samples that is of it."""
        first = sum(drawn.first for drawn in self.drawn.values())
        return [(drawn.first / first, drawn) for drawn in self.drawn.values()] if first else []


def note_sample(levels: dict[int, DrawnLengths], group: Group, sample: Sample, ended: bool, responses: int) -> None:
    """A sample is out of the engine and does not go on; it is not in ``group.chosen`` yet.

    The level of a group is known with the response that ends as a quarter of ``responses``, or with the first abort.
    """
    if not sample.output.tokens:
        return
    samples = [(sample, ended)]
    if group.level is None:
        if ended and sample.state == RUNNING and len(group.chosen) + 1 < responses / 4:
            return
        group.level = get_bin(sample.output.tokens) // BINS if ended or group.chosen else SLOW
        samples += [(earlier, True) for earlier in group.list_kept()]
    drawn = levels.setdefault(group.level, DrawnLengths())
    for each, whole in samples:
        drawn.add_sample(each.output.tokens, whole, group.floor(each.number))


def get_bin(tokens: int) -> int:
    return int(BINS * math.log2(max(tokens, 1)))


def add(weights: dict[int, float], place: int, weight: float) -> None:
    weights[place] = weights.get(place, 0.0) + weight


LEAST_ROUNDS = 14.0
"""Weight of the rounds before which nothing is said, that of sixteen: long rounds come after some short ones."""


class Cost(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Costs of the rounds not long ago.

    Attributes:
        rounds, seconds: number and time of these rounds; ``kept``, ``thrown``: their tokens.
        ended: responses that ended by themselves, by bins of their length; ``took``: seconds that they took, in all.
        warned: whether the job was told.
    """

    rounds: float = 0.0
    seconds: float = 0.0
    kept: float = 0.0
    thrown: float = 0.0
    ended: dict[int, float] = {}
    took: dict[int, float] = {}
    warned: bool = False

    def add_response(self, output: Output) -> None:
        """A response has ended by itself."""
        if output.seconds:
            add(self.ended, get_bin(output.tokens), 1.0)
            add(self.took, get_bin(output.tokens), output.seconds)

    def add_round(self, summary: Summary, seconds: float) -> None:
        self.rounds = KEPT * self.rounds + 1
        self.seconds = KEPT * self.seconds + seconds
        self.kept = KEPT * self.kept + sum(summary.kept_lengths)
        self.thrown = KEPT * self.thrown + summary.thrown
        for weights in (self.ended, self.took):
            for place in weights:
                weights[place] *= KEPT

    def estimate_plain_seconds(self, bias: Bias, prompts: int, responses: int) -> float:
        """Estimated seconds of a plain round; 0 if nobody has a clock."""
        chances = compute_longest_chances(
            ((weight, drawn.estimate_curve()) for weight, drawn in bias.compute_level_weights()), prompts, responses
        )
        measured = {place: chance for place, chance in chances.items() if place in self.took}
        seconds = sum(chance * self.took[place] / self.ended[place] for place, chance in measured.items())
        return seconds / sum(measured.values()) if measured else 0.0


def compute_longest_chances(
    levels: Iterable[tuple[float, dict[int, LengthBin]]], prompts: int, responses: int
) -> dict[int, float]:
    """Chance of each bin to have the longest of so many responses to each of so many prompts.

    Args:
        levels: share of the prompts, and how their responses end.
    """
    ends: dict[int, float] = {}
    """Chance by bin that the last response to a prompt ends in it."""
    for weight, curve in levels:
        longer = 1.0
        for number, (place, ended) in enumerate(curve.items()):
            # Who outlives the last is taken to be as long.
            before, longer = longer, longer * (1 - ended.share) if number + 1 < len(curve) else 0.0
            add(ends, place, weight * ((1 - longer) ** responses - (1 - before) ** responses))
    chances: dict[int, float] = {}
    all_ended = 0.0
    for place in sorted(ends):
        before, all_ended = all_ended, min(all_ended + ends[place], 1.0)
        chances[place] = all_ended**prompts - before**prompts
    return chances


def with_cost(rules: Rules, cost: Cost, bias: Bias, keep_rate: float, summary: Summary, seconds: float) -> Summary:
    """The summary of a round with what it cost; see :meth:`Admitter.record_round_time`."""
    if summary.cancelled:
        return replace(summary, seconds=seconds)
    cost.add_round(summary, seconds)
    plain = cost.estimate_plain_seconds(bias, math.ceil(rules.num_prompts / keep_rate), rules.num_responses)
    summary = replace(summary, seconds=seconds, mean_seconds=cost.seconds / cost.rounds, plain_seconds=plain)
    warning = "" if cost.warned or cost.rounds < LEAST_ROUNDS else format_advice(rules, cost, summary)
    if warning:
        cost.warned = True
        logger.warning("%s", warning)
    return replace(summary, warning=warning)


def format_advice(rules: Rules, cost: Cost, summary: Summary) -> str:
    """One line if tail batching does not pay, else nothing."""
    reasons: list[str] = []
    extra = rules.started_prompts > rules.num_prompts or rules.started_responses > rules.num_responses
    if extra and summary.mean_seconds > summary.plain_seconds > 0:
        reasons.append(
            f"its rounds take {summary.mean_seconds:.3g} s on average, with these lengths plain ones (eta_prompts "
            f"and eta_responses 1) would take some {summary.plain_seconds:.3g} s"
        )
    if rules.unbiased and cost.thrown > cost.kept:
        tokens = (cost.thrown + cost.kept) / max(cost.kept, 1.0)
        reasons.append(f"{tokens:.1f} tokens are generated for each one returned")
    name = f"{rules.mode}, unbiased" if rules.unbiased else rules.mode
    return f"tail batching ({name}): {'; '.join(reasons)}; see docs/rollouts.md, What it costs" if reasons else ""
