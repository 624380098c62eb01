"""What tail batching costs: seconds of its rounds, and those of plain ones with the same lengths, an estimate.

A **plain** round draws P0 prompts with R0 responses each, and waits for the longest.  How long that is follows from the
lengths seen (``bias.py``), where what was thrown away counts as it would have gone on.  A response of so many tokens
takes as long as those did that ended here with about so many: in full rounds and in empty ones, with their prefill,
their queue and their tools.  What is left out: a plain round starts fewer responses, and where the engine is full it
gains by that; prompts that differ within a level (``bias.py``) make it seem longer.

The seconds are told by whoever has a clock: of each response with its output, of a round with :meth:`Admitter.took`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from sglang_pat.rollout.bias import KEPT, Bias, Bin, add, bin_of
from sglang_pat.rollout.records import Output, Summary

if TYPE_CHECKING:
    from sglang_pat.rollout.rules import Rules

logger = logging.getLogger(__name__)

LEAST = 14.0
"""Weight of the rounds before which nothing is said, that of sixteen: long rounds come after some short ones."""


class Cost(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Of rounds not long ago.

    Attributes:
        rounds, seconds: of them; ``kept``, ``thrown``: tokens.
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

    def note(self, output: Output) -> None:
        """A response has ended by itself."""
        if output.seconds:
            add(self.ended, bin_of(output.tokens), 1.0)
            add(self.took, bin_of(output.tokens), output.seconds)

    def settle(self, summary: Summary, seconds: float) -> None:
        """A round has happened."""
        self.rounds = KEPT * self.rounds + 1
        self.seconds = KEPT * self.seconds + seconds
        self.kept = KEPT * self.kept + sum(summary.kept_lengths)
        self.thrown = KEPT * self.thrown + summary.thrown
        for found in (self.ended, self.took):
            for place in found:
                found[place] *= KEPT

    def copy(self) -> Cost:
        return replace(self, ended=dict(self.ended), took=dict(self.took))

    def plain_seconds(self, bias: Bias, prompts: int, responses: int) -> float:
        """Of a plain round, an estimate; 0 if nobody has a clock."""
        chances = longest(((weight, drawn.curve()) for weight, drawn in bias.weighed()), prompts, responses)
        known = {place: chance for place, chance in chances.items() if place in self.took}
        seconds = sum(chance * self.took[place] / self.ended[place] for place, chance in known.items())
        return seconds / sum(known.values()) if known else 0.0


def longest(levels: Iterable[tuple[float, dict[int, Bin]]], prompts: int, responses: int) -> dict[int, float]:
    """Chance of each bin to have the longest of so many responses to each of so many prompts.

    Args:
        levels: share of the prompts, and how their responses end.
    """
    ends: dict[int, float] = {}
    """By bin: how much more likely it is that all responses to a prompt have ended by then than by the bin before."""
    for weight, curve in levels:
        longer = 1.0
        for number, (place, ended) in enumerate(curve.items()):
            # Who outlives the last is taken to be as long.
            before, longer = longer, longer * (1 - ended.share) if number + 1 < len(curve) else 0.0
            add(ends, place, weight * ((1 - longer) ** responses - (1 - before) ** responses))
    found: dict[int, float] = {}
    all_ended = 0.0
    for place in sorted(ends):
        before, all_ended = all_ended, min(all_ended + ends[place], 1.0)
        found[place] = all_ended**prompts - before**prompts
    return found


def told(rules: Rules, cost: Cost, bias: Bias, keep_rate: float, summary: Summary, seconds: float) -> Summary:
    """The summary of a round with what it cost; see :meth:`Admitter.took`."""
    if summary.cancelled:
        return replace(summary, seconds=seconds)
    cost.settle(summary, seconds)
    plain = cost.plain_seconds(bias, math.ceil(rules.num_prompts / keep_rate), rules.num_responses)
    summary = replace(summary, seconds=seconds, mean_seconds=cost.seconds / cost.rounds, plain_seconds=plain)
    warning = "" if cost.warned or cost.rounds < LEAST else advice(rules, cost, summary)
    if warning:
        cost.warned = True
        logger.warning("%s", warning)
    return replace(summary, warning=warning)


def advice(rules: Rules, cost: Cost, summary: Summary) -> str:
    """One line if tail batching does not pay, else nothing."""
    found: list[str] = []
    extra = rules.started_prompts > rules.num_prompts or rules.started_responses > rules.num_responses
    if extra and summary.mean_seconds > summary.plain_seconds > 0:
        found.append(
            f"its rounds take {summary.mean_seconds:.3g} s on average, with these lengths plain ones (eta_prompts "
            f"and eta_responses 1) would take some {summary.plain_seconds:.3g} s"
        )
    if rules.unbiased and cost.thrown > cost.kept:
        made = (cost.thrown + cost.kept) / max(cost.kept, 1.0)
        found.append(f"{made:.1f} tokens are generated for each one returned")
    name = f"{rules.mode}, unbiased" if rules.unbiased else rules.mode
    return f"tail batching ({name}): {'; '.join(found)}; see docs/rollouts.md, What it costs" if found else ""
