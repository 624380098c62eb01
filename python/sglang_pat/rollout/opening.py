"""How a round begins: whether it may, what it is to be, and what it takes over from earlier ones."""

from __future__ import annotations

from sglang_pat.rollout import epochs
from sglang_pat.rollout.deadlines import Deadlines
from sglang_pat.rollout.modes import Mode
from sglang_pat.rollout.records import Action, Group, Judge
from sglang_pat.rollout.rules import Rules
from sglang_pat.rollout.state import FLUSH, Round, State


def open_round(
    rules: Rules, state: State, mode: Mode, deadlines: Deadlines, version: int
) -> tuple[Round, list[Action]]:
    """A round with the weights ``version``, which is ``state.round`` from now on; and what is to be done at once.

    Raises:
        ValueError: there are no prompts, or too few of an epoch that has not ended; nothing changes.
        RuntimeError: a round is under way.
    """
    epoch, fresh = _may_begin(rules, state, version)
    deadlines.check(state.waiting)
    jump = 1 if state.version is None else max(1, version - state.version)
    state.waiting, thrown = deadlines.throw_stale(state.waiting, version, jump)
    slacks = [deadlines.slack(group, version, jump) for group in state.waiting]
    owed = deadlines.owed(slacks)
    plan = mode.plan(state, owed, fresh)
    flushes = epoch in state.ended and mode.flushes(len(state.waiting), fresh)
    target = min(rules.num_prompts, len(state.waiting) + fresh)
    urgent = sorted(zip(slacks, state.waiting, strict=True), key=lambda pair: (pair[0], pair[1].order))
    round_ = state.round = Round(
        number=state.last + 1, epoch=epoch, kind=FLUSH if flushes else plan.kind, version=version,
        target=target, prompts=plan.prompts, responses=plan.responses, owed=[min(count, target) for count in owed],
        jump=jump, thrown=thrown, forced=[group.key for _, group in urgent[: max(owed)]],
        room=deadlines.bound(jump) * rules.num_prompts + target - len(state.waiting),
    )  # fmt: skip
    state.version = version
    return round_, _take_over(rules, state, round_) if mode.keeps else []


def _may_begin(rules: Rules, state: State, version: int) -> tuple[int, int]:
    """The epoch, and the number of its prompts that were never started; raises as :func:`open_round`."""
    if state.round is not None:
        raise RuntimeError(f"round {state.round.number} is not over")
    epoch = epochs.current(state)
    if epoch is None:
        raise ValueError("there are no prompts: feed some")
    if state.version is not None and version < state.version:
        raise ValueError(f"version is {version}, the last round's was {state.version}: it cannot be smaller")
    fresh = epochs.fresh_of(state, epoch)
    total = len(state.waiting) + fresh
    if total < rules.num_prompts and epoch not in state.ended:
        raise ValueError(f"{total} prompts for a round of {rules.num_prompts}: feed more, or end epoch {epoch}")
    return epoch, fresh


def _take_over(rules: Rules, state: State, round_: Round) -> list[Action]:
    """What is complete or half done is part of the round from the start, and not copied but to be judged."""
    waiting, state.waiting = state.waiting, []
    actions: list[Action] = []
    for group in waiting:
        if group.complete and rules.filter_groups and not group.useful:
            group = group.own()
            actions += ask(rules, round_, group)
        (round_.complete if group.complete else round_.open)[group.order] = group
    return actions


def ask(rules: Rules, round_: Round, group: Group) -> list[Action]:
    """For the verdict on a complete group, where one is wanted and was not given."""
    group.judging = rules.filter_groups and not group.useful
    round_.judging += group.judging
    return [Judge(group)] if group.judging else []
