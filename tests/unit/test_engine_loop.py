"""The event loop of an ``Engine`` during a rollout: nobody who takes its events, or judges, can hold it up."""

from __future__ import annotations

import asyncio
import threading

import pytest

from sglang_pat.rollout.loop import EngineLoop
from sglang_pat.rollout.records import Group, Summary

from .engine_loop_world import FOREVER, SECONDS, Ticking, admitter, events_of, thread_of_the_loop

pytestmark = pytest.mark.unit


def test_a_call_runs_the_loop_in_the_callers_thread(loop):
    assert loop.run_until_complete(thread_of_the_loop()) is threading.current_thread()


def aborted(loop: EngineLoop, train) -> list[int]:
    """Tokens of each sample that is stopped in a round; ``train`` is called with each event."""
    engine = Ticking()
    for event in loop.iterate(events_of(admitter(5, 9, 3000, 4000), engine)):
        train(engine, event)
    assert event.returned == 2 and not engine.stops
    return sorted(event.aborted_lengths)


def test_training_on_an_event_costs_no_tokens(loop):
    def long(engine: Ticking, event: Group | Summary) -> None:
        # As long as it takes the engine to end the whole round.
        assert engine.idle.wait(SECONDS), "the loop is frozen while its user trains"

    at_once = aborted(loop, lambda engine, event: None)
    assert aborted(loop, long) == at_once
    assert at_once == [10] * 4, "of both long prompts, until the second short one ended"


def test_calls_are_answered_between_two_events(loop):
    asked = []
    for _ in loop.iterate(events_of(admitter(5, 9, 30, 40), Ticking())):
        asked.append(loop.run_until_complete(thread_of_the_loop()))
        other = threading.Thread(target=lambda: asked.append(loop.run_until_complete(thread_of_the_loop())))
        other.start()
        other.join(SECONDS)
    assert len(asked) == 6 and {thread.name for thread in asked} == {"engine loop"}


def test_a_call_raises_what_it_raises_while_a_thread_runs_the_loop(loop):
    async def fails() -> None:
        raise LookupError("not there")

    for _ in loop.iterate(events_of(admitter(5, 9, 30, 40), Ticking())):
        with pytest.raises(LookupError, match="not there"):
            loop.run_until_complete(fails())


def test_a_call_inside_the_loop_is_refused(loop):
    async def inside() -> None:
        loop.run_until_complete(thread_of_the_loop())

    with pytest.raises(RuntimeError, match="made inside that loop"):
        loop.run_until_complete(inside())
    for _ in loop.iterate(events_of(admitter(5, 9, 30, 40), Ticking())):
        with pytest.raises(RuntimeError, match="made inside that loop"):
            loop.run_until_complete(inside())


def test_two_rollouts_at_once(loop):
    first, second = admitter(5, 9, 30, 40), admitter(6, 8, 30, 40)
    seen = []
    for _ in loop.iterate(events_of(first, Ticking())):
        seen += loop.iterate(events_of(second, Ticking())) if not seen else []
    assert first.state.returned == second.state.returned == 2 and len(seen) == 3


def test_two_rollouts_of_one_admitter_are_refused(loop):
    mine = admitter(5, FOREVER, FOREVER, FOREVER)
    events = loop.iterate(events_of(mine, Ticking()))
    next(events)
    with pytest.raises(RuntimeError, match="is not over"):
        list(loop.iterate(events_of(mine, Ticking())))
    events.close()


def test_a_slow_judge_holds_up_neither_the_loop_nor_the_groups(loop):
    """The first group is judged for as long as the second is generated, judged by nobody yet, and asked about."""
    judging, judged = threading.Event(), []
    mine, engine = admitter(5, 9, 30, 40, filter_groups=True), Ticking()

    def judge(group: Group) -> bool:
        judged.append((group.index, threading.current_thread()))
        if group.index == 0:
            judging.set()
            assert engine.idle.wait(SECONDS), "the loop is frozen while a group is judged"
        return group.index != 1

    *groups, summary = loop.iterate(events_of(mine, engine, judge))
    assert judging.is_set() and [group.index for group in groups] == [0, 2] and summary.filtered == 1
    assert [index for index, _ in judged] == [0, 1, 2, 3][: len(judged)]
    assert len({thread for _, thread in judged}) == 1 and judged[0][1] is not threading.current_thread()


def test_groups_are_judged_while_their_user_trains(loop):
    """In the loop if the judge is a coroutine function; a verdict does not wait until somebody takes the group."""

    async def judge(group: Group) -> bool:
        await asyncio.sleep(0)
        return True

    mine, engine = admitter(5, 9, FOREVER, FOREVER, filter_groups=True), Ticking()
    for _ in loop.iterate(events_of(mine, engine, judge)):
        assert engine.idle.wait(SECONDS), "a verdict was not given while its user trains"
    assert mine.state.returned == 2


def test_what_a_judge_raises_ends_the_round(loop):
    def judge(group: Group) -> bool:
        raise LookupError(f"no reward for {group.index}")

    mine, engine = admitter(5, 9, FOREVER, FOREVER, filter_groups=True), Ticking()
    with pytest.raises(LookupError, match="no reward for 0"):
        list(loop.iterate(events_of(mine, engine, judge)))
    assert len(mine.state.fresh) == 4 and not engine.stops
