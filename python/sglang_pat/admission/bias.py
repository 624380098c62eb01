"""How much shorter what is returned is than it would be if nothing were thrown away: an estimate, kept while running.

Kaplan and Meier's estimate over all samples drawn.  One that ended is an event; one that was aborted is *censored*: it
would have been longer.  A sample of a prompt that was passed over counts only from its floor on (left truncation, see
``redraws.py``): below it the prompt was counted with its first draw, and it must not count twice.

Prompts differ, and an aborted sample is like others of its own prompt, which are few.  So there is an estimate for each
*level*: for prompts whose short responses (the lower quartile of the first draw) lie between the same powers of two.
How far off it is, is in ``docs/results/tail_batching.md``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from sglang_pat.admission.records import RUNNING, Group, Sample
from sglang_pat.admission.redraws import floor

BINS = 4
"""Per doubling of the length."""

KEPT = 1 - 1 / 64
"""Weight of a round over that of the next one: the estimate follows the model, as of some 64 rounds."""


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
            _add(self.entered, _bin(floor), 1.0)
        if ended:
            _add(self.ended, _bin(tokens), 1.0)
            _add(self.tokens, _bin(tokens), tokens)
        else:
            _add(self.cut, _bin(tokens), 1.0)

    def take(self, more: Drawn) -> None:
        """Add others."""
        for mine, others in zip(msgspec.structs.astuple(self), msgspec.structs.astuple(more), strict=True):
            for place, weight in others.items():
                _add(mine, place, weight)

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

    def mean(self) -> float:
        """Tokens of a response if nothing had been thrown away; 0 if nothing ended."""
        risk = self.first
        share, mean, longest = 1.0, 0.0, 0.0
        for place in sorted({*self.ended, *self.cut, *self.entered}):
            ended, cut, entered = (found.get(place, 0.0) for found in (self.ended, self.cut, self.entered))
            # Those that come or go within a bin are there for half of it.
            exposed = max(risk + (entered - cut) / 2, ended)
            if ended:
                longest = self.tokens[place] / ended
                mean += share * ended / exposed * longest
                share *= 1 - ended / exposed
            risk += entered - ended - cut
        return mean + share * longest


class Bias(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Of rounds not long ago.

    Attributes:
        responses: of the groups that were returned or filtered; ``tokens``: of them, in all.
        levels: all samples, by level.
    """

    responses: float = 0.0
    tokens: float = 0.0
    levels: dict[int, Drawn] = {}

    def settle(self, levels: dict[int, Drawn], lengths: Sequence[int]) -> None:
        """Another round has happened, with these samples; ``lengths``: of those of its groups that have left."""
        self.responses = KEPT * self.responses + len(lengths)
        self.tokens = KEPT * self.tokens + sum(lengths)
        for drawn in self.levels.values():
            drawn.fade()
        for level, drawn in levels.items():
            self.levels.setdefault(level, Drawn()).take(drawn)

    def copy(self) -> Bias:
        levels = {level: drawn.copy() for level, drawn in self.levels.items()}
        return Bias(responses=self.responses, tokens=self.tokens, levels=levels)

    def mean_returned(self) -> float:
        """Tokens of a response; 0 if there was none."""
        return self.tokens / self.responses if self.responses else 0.0

    def mean_undropped(self) -> float:
        """Tokens of a response if nothing had been thrown away, an estimate; 0 if nothing ended."""
        first = sum(drawn.first for drawn in self.levels.values())
        return sum(drawn.first * drawn.mean() for drawn in self.levels.values()) / first if first else 0.0


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
        group.level = _bin(sample.output.tokens) // BINS
        samples += [(earlier, True) for earlier in group.kept()]
    drawn = levels.setdefault(group.level, Drawn())
    for each, whole in samples:
        drawn.note(each.output.tokens, whole, floor(group, each.number))


def _bin(tokens: int) -> int:
    return int(BINS * math.log2(max(tokens, 1)))


def _add(found: dict[int, float], place: int, weight: float) -> None:
    found[place] = found.get(place, 0.0) + weight
