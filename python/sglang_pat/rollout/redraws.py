"""Redraws of a deferred prompt, under the condition that deferred it (``Rules.unbiased``).

A short round returns a prompt if its longest response ends before the batch is complete, and throws it away if not.
Drawn anew without a condition it may come back short: long responses are then rarer than the model gives them.  So a
**draw** (R0 responses) of a deferred prompt is *rejected*, and another one made, unless it would have been thrown away
as well.  The lowest-numbered draw that is not rejected is kept: which one ends first has no say in it.

**The condition** is the very event that deferred the prompt.  It was not complete when others had filled the batch;
that moment depends on the others, not on its own draw.  Sample n had run for T_n tokens by then (its *floor*), so the
event is: some sample n is longer than T_n.

- Samples that started at different moments have floors of their own; one that had not started has 0.
- A sample that had ended was in the engine as long as its longest sibling: that is its floor.
- An abort that arrives d steps late makes the floor d tokens too large.  What ends within those d steps is missing from
  what is returned: one response set in (T, T + d], which nobody will see with T some hundred times d.
- A response that its limit has ended counts as longer (a limit that was lowered may be below the floor).
- Its own short samples make room for others, so T depends on them after all, by as much as one prompt of a batch does.

**How many at once.**  As many as were rejected so far and one more, up to :data:`AT_ONCE`: 1, 2, 4, ….  No progress has
to be reported by the engine, and at most as many draws are made in vain as were rejected.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_pat.rollout.records import DONE, Group, Sample

AT_ONCE = 8
"""Draws of a prompt in the engine at most."""

MOST = 63
"""Draws of a prompt in a round; the last is accepted as it is, so that a round ends."""


def choose_sample_count(rejected: int) -> int:
    """Number of draws to start when so many were rejected."""
    return min(rejected + 1, AT_ONCE, MOST - rejected)


def list_length_floors(group: Group, responses: int) -> list[int]:
    """Tokens that each sample of a group had had when the group was passed over; ``[responses]``."""
    draw = _get_current_draw(group, responses)
    longest = max(max(sample.output.tokens, sample.had) for sample in draw)
    came = [longest if sample.state == DONE else sample.had for sample in draw]
    return [max(tokens, group.floor(number)) for number, tokens in enumerate(came)]


def reject_and_redraw(group: Group, responses: int) -> int:
    """A sample has ended: reject what has to be, and say what may run; returns tokens thrown away.

    Draws ``group.rejected`` to ``group.draws`` (without it) may run from now on.
    """
    thrown = 0
    while _is_rejected(group, responses):
        thrown += _drop_samples(group, _get_current_draw(group, responses))
        group.rejected += 1
        if group.rejected == group.draws:
            group.draws += choose_sample_count(group.rejected)
            group.fill(group.draws * responses)
    if _has_survivor(group, responses):
        group.draws = group.rejected + 1
        thrown += _drop_samples(group, group.samples[group.draws * responses :])
    return thrown


def complete(group: Group, responses: int) -> bool:
    """Whether the draw that is kept has all its responses."""
    return _has_survivor(group, responses) and all(
        sample.state == DONE for sample in _get_current_draw(group, responses)
    )


def has_given_up(group: Group) -> bool:
    """Whether a complete group's draw is kept although it would have been rejected."""
    return group.rejected == MOST - 1 and not any(_is_longer(group, sample) for sample in group.list_kept())


def _get_current_draw(group: Group, responses: int) -> list[Sample]:
    """The lowest draw that is not rejected."""
    return group.samples[group.rejected * responses : (group.rejected + 1) * responses]


def _is_longer(group: Group, sample: Sample) -> bool:
    """Whether a sample is longer than its floor, or would have been: a limit that is below the floor was lowered
    since."""
    output = sample.output
    return sample.state == DONE and (output.finish_reason == "length" or output.tokens > group.floor(sample.number))


def _has_survivor(group: Group, responses: int) -> bool:
    return group.rejected == MOST - 1 or any(
        _is_longer(group, sample) for sample in _get_current_draw(group, responses)
    )


def _is_rejected(group: Group, responses: int) -> bool:
    draw = _get_current_draw(group, responses)
    return all(sample.state == DONE for sample in draw) and not _has_survivor(group, responses)


def _drop_samples(group: Group, samples: Sequence[Sample]) -> int:
    """Throw away what has ended of a draw's samples."""
    ended = [sample for sample in samples if sample.state == DONE]
    numbers = {sample.number for sample in ended}
    group.chosen = [number for number in group.chosen if number not in numbers]
    return sum(group.drop_tokens(sample) for sample in ended)
