"""How a round ends: groups that are left wait for another one, and what happened is summed up."""

from __future__ import annotations

from msgspec.structs import replace

from sglang_pat.rollout import epochs, redraws
from sglang_pat.rollout.records import NEW, Group, Summary
from sglang_pat.rollout.state import Round, State

REMEMBERED = 0.75
"""Weight of a round's verdicts in the round after it: what is useless changes as the policy learns."""


def end_round(state: State, round_: Round, keeps: bool, kept: list[int]) -> Summary:
    """Nothing of the round is in the engine, and all of it is taken back if it was cancelled.

    ``state.round`` is None from now on.

    Args:
        keeps: whether tokens outlive their round.
        kept: tokens of each response returned.
    """
    deferred = round_.groups
    if round_.cancelled:
        epochs.in_order(state.fresh)
        state.waiting.sort(key=_by_arrival)
    else:
        _settle(state, round_, keeps, kept)
    state.thrown += round_.thrown
    state.round = None
    epochs.close(state)
    return _summary(state, round_, len(deferred), kept)


def _settle(state: State, round_: Round, keeps: bool, kept: list[int]) -> None:
    """It has happened: what it returned or filtered is gone, it has passed the others over."""
    state.rounds[round_.kind] = state.rounds.get(round_.kind, 0) + 1
    state.lengths = [state.lengths[0] + len(kept), state.lengths[1] + sum(kept)]
    state.verdicts = [count * REMEMBERED for count in state.verdicts]
    useless = [sample.output.tokens for group in round_.filtered for sample in group.kept()]
    state.bias.settle(round_.drawn, kept + useless)
    for group in round_.groups:
        _put_back(state, round_, group, keeps)
    passed_over = [replace(group, deferrals=group.deferrals + 1) for group in state.waiting]
    state.waiting = sorted(passed_over, key=_by_arrival)


def take_back(state: State, round_: Round, keeps: bool, most: int) -> bool:
    """A cancelled round has not happened: ``most`` of its groups are where they were; whether it has others."""
    for _ in range(most):
        # First those that are the smallest loss: some may have to start anew.
        if round_.filtered:
            group = round_.filtered.pop()
            state.filtered -= 1
        elif round_.open or round_.complete:
            group = (round_.open or round_.complete).popitem()[1]
        elif round_.taken:
            group = round_.taken.pop()
            state.returned -= 1
        else:
            break
        _put_back(state, round_, group, keeps)
    return bool(round_.everyone)


def _put_back(state: State, round_: Round, group: Group, keeps: bool) -> None:
    """A group waits, or is a fresh prompt again as before a cancelled round."""
    group.judging = False
    # More could not all be returned in time than there was room for.
    anew = round_.cancelled and not group.begun and not (keeps and group.tokens and round_.room >= 0)
    if not keeps and not round_.cancelled:
        group.floors = redraws.floors(group, round_.responses)
    if anew or not keeps:
        for sample in group.samples:
            if sample.state != NEW or sample.output.spans:
                round_.thrown += group.throw(sample)
            sample.had = 0
        group.chosen, group.complete, group.useful = [], False, False
        group.rejected, group.draws = 0, 1
    if anew:
        group.level = group.oldest = None
        round_.room += 1
        state.drawn -= 1
        state.fresh.append(group)
    else:
        group.begun = True
        state.waiting.append(group)


def _summary(state: State, round_: Round, deferred: int, kept: list[int]) -> Summary:
    cancelled = round_.cancelled
    undropped, error = state.bias.mean_undropped()
    return Summary(
        number=round_.number,
        kind=round_.kind,
        version=round_.version,
        target=round_.target,
        returned=0 if cancelled else len(round_.taken),
        filtered=0 if cancelled else len(round_.filtered),
        deferred=0 if cancelled else deferred,
        thrown=round_.thrown,
        cancelled=cancelled,
        drawn=state.drawn,
        kept_lengths=[] if cancelled else kept,
        aborted_lengths=round_.aborted,
        kept_rewards=[] if cancelled else _rewards(round_.taken),
        filtered_rewards=[] if cancelled else _rewards(round_.filtered),
        ages=[group.deferrals for group in state.waiting],
        redraws=round_.redraws,
        gave_up=round_.gave_up,
        mean_returned=state.bias.mean_returned(),
        mean_undropped=undropped,
        mean_undropped_error=error,
    )


def _rewards(groups: list[Group]) -> list[float]:
    return [group.reward for group in groups if group.reward is not None]


def _by_arrival(group: Group) -> int:
    return group.order
