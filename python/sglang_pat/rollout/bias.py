"""How much shorter what is returned is than it would be if nothing were thrown away: an estimate, kept while running.

Kaplan and Meier's estimate over all samples drawn.  One that ended is an event; one that was aborted is *censored*: it
would have been longer.  A sample of a prompt that was passed over counts only from its floor on (left truncation, see
``redraws.py``): below it the prompt was counted with its first draw, and it must not count twice.

Prompts differ, and an aborted sample is like others of its own prompt, which are few.  So there is an estimate for each
*level*: for prompts whose short responses (the lower quartile of the first draw) lie between the same powers of two,
and for those of which nothing had ended when they were first passed over.  How far off it is, is in
``docs/results/tail_batching.md``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from sglang_pat.rollout.records import RUNNING, Group, Sample
from sglang_pat.rollout.redraws import floor

BINS = 16
"""Per doubling of the length.  All prompts are cut at much the same one, and others end just before it."""

SLOW = -1
"""Level of the prompts of which nothing had ended when they were first passed over."""

KEPT = 1 - 1 / 64
"""Weight of a round over that of the next one: the estimate follows the model, as of some 64 rounds."""


class Bin(NamedTuple):
    """Of the samples that came to a bin so many that ended there, with so many tokens on average; ``share``: of all."""

    exposed: float
    share: float
    tokens: float


class Drawn(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Samples by bins of their length, as weights.

    Attributes:
        ended: those that ended by themselves; ``tokens``: of them, in all.
        cut: those that were aborted, where they were.
        entered: those that count from their floor on only, there.
    """

    ended: dict[int, float] = {}
    tokens: dict[int, float] = {}
    cut: dict[int, float] = {}
    entered: dict[int, float] = {}

    def note(self, tokens: int, ended: bool, floor: int) -> None:
        """A sample is out of the engine; ``floor``: 0 for one of a prompt's first draw."""
        if tokens <= floor:
            return
        if floor:
            add(self.entered, bin_of(floor), 1.0)
        if ended:
            add(self.ended, bin_of(tokens), 1.0)
            add(self.tokens, bin_of(tokens), tokens)
        else:
            add(self.cut, bin_of(tokens), 1.0)

    def take(self, more: Drawn) -> None:
        """Add others."""
        for mine, others in zip(msgspec.structs.astuple(self), msgspec.structs.astuple(more), strict=True):
            for place, weight in others.items():
                add(mine, place, weight)

    def fade(self) -> None:
        """Count for less, by ``KEPT``."""
        for mine in msgspec.structs.astuple(self):
            for place in mine:
                mine[place] *= KEPT

    def copy(self) -> Drawn:
        return Drawn(ended=dict(self.ended), tokens=dict(self.tokens), cut=dict(self.cut), entered=dict(self.entered))

    @property
    def first(self) -> float:
        """Samples of first draws."""
        return sum(self.ended.values()) + sum(self.cut.values()) - sum(self.entered.values())

    def curve(self) -> dict[int, Bin]:
        """How responses end if nothing is thrown away, by bin, in their order."""
        risk = self.first
        found: dict[int, Bin] = {}
        for place in sorted({*self.ended, *self.cut, *self.entered}):
            ended, cut, entered = (those.get(place, 0.0) for those in (self.ended, self.cut, self.entered))
            if ended:
                # Those that come or go within a bin are there for half of it.
                exposed = max(risk + (entered - cut) / 2, ended)
                found[place] = Bin(exposed, ended / exposed, self.tokens[place] / ended)
            risk += entered - ended - cut
        return found

    def mean(self) -> tuple[float, float, float]:
        """Tokens of a response if nothing had been thrown away, 0 if nothing ended; the variance of that estimate
        (Greenwood); and what there is in it of responses that outlive all that ended: they count as the longest.
        """
        bins = [*self.curve().values()]
        mean = unseen = bins[-1].tokens if bins else 0.0
        variance = 0.0
        for exposed, share, tokens in reversed(bins):
            rest = 1 - share
            variance = rest**2 * variance + share * rest / exposed * (mean - tokens) ** 2
            mean, unseen = share * tokens + rest * mean, rest * unseen
        return mean, variance, unseen


class Bias(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Of rounds not long ago.  Older files have other bins, as ``levels``: they are left out.

    Attributes:
        responses: of the groups that were returned or filtered; ``tokens``: of them, in all.
        drawn: all samples, by level.
    """

    responses: float = 0.0
    tokens: float = 0.0
    drawn: dict[int, Drawn] = {}

    def settle(self, levels: dict[int, Drawn], lengths: Sequence[int]) -> None:
        """Another round has happened, with these samples; ``lengths``: of those of its groups that have left."""
        self.responses = KEPT * self.responses + len(lengths)
        self.tokens = KEPT * self.tokens + sum(lengths)
        for drawn in self.drawn.values():
            drawn.fade()
        for level, drawn in levels.items():
            self.drawn.setdefault(level, Drawn()).take(drawn)

    def copy(self) -> Bias:
        drawn = {level: drawn.copy() for level, drawn in self.drawn.items()}
        return Bias(responses=self.responses, tokens=self.tokens, drawn=drawn)

    def mean_returned(self) -> float:
        """Tokens of a response; 0 if there was none."""
        return self.tokens / self.responses if self.responses else 0.0

    def mean_undropped(self) -> tuple[float, float]:
        """Tokens of a response if nothing had been thrown away, an estimate, 0 if nothing ended; and its error.

        The error is the standard error, and all that stands for responses of which nobody has seen the end.
        """
        mean = variance = unseen = 0.0
        for weight, drawn in self.weighed():
            mine = drawn.mean()
            mean, variance, unseen = mean + weight * mine[0], variance + weight**2 * mine[1], unseen + weight * mine[2]
        return mean, variance**0.5 + unseen

    def weighed(self) -> list[tuple[float, Drawn]]:
        """Each level with the share of all samples that is of it."""
        first = sum(drawn.first for drawn in self.drawn.values())
        return [(drawn.first / first, drawn) for drawn in self.drawn.values()] if first else []


def note(levels: dict[int, Drawn], group: Group, sample: Sample, ended: bool, responses: int) -> None:
    """A sample is out of the engine and does not go on; it is not in ``group.chosen`` yet.

    The level of a group is known with the response that ends as a quarter of ``responses``, or with the first abort.
    """
    if not sample.output.tokens:
        return
    samples = [(sample, ended)]
    if group.level is None:
        if ended and sample.state == RUNNING and len(group.chosen) + 1 < responses / 4:
            return
        group.level = bin_of(sample.output.tokens) // BINS if ended or group.chosen else SLOW
        samples += [(earlier, True) for earlier in group.kept()]
    drawn = levels.setdefault(group.level, Drawn())
    for each, whole in samples:
        drawn.note(each.output.tokens, whole, floor(group, each.number))


def bin_of(tokens: int) -> int:
    """Of a length."""
    return int(BINS * math.log2(max(tokens, 1)))


def add(found: dict[int, float], place: int, weight: float) -> None:
    """To what there is in a bin."""
    found[place] = found.get(place, 0.0) + weight
