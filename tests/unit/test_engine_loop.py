"""The event loop of an ``Engine`` during a rollout: nobody who takes its events, or judges, can hold it up."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import AsyncGenerator

import pytest

from sglang_pat.rollout.loop import EngineLoop
from sglang_pat.rollout.records import Group, Summary

from .engine_loop_world import SECONDS, Ticking, admitter, get_thread_of_the_loop, list_events, threads
from .rounds_world import FOREVER

pytestmark = pytest.mark.unit


def test_a_call_runs_the_loop_in_the_callers_thread(loop):
    assert loop.run_until_complete(get_thread_of_the_loop()) is threading.current_thread()


def list_aborted(loop: EngineLoop, train) -> list[int]:
    """Tokens of each sample that is stopped in a round; ``train`` is called with each event."""
    engine = Ticking()
    for event in loop.iterate(list_events(admitter(5, 9, 3000, 4000), engine)):
        train(engine, event)
    assert event.returned == 2 and not engine.running
    return sorted(event.aborted_lengths)


def test_training_on_an_event_costs_no_tokens(loop):
    def long(engine: Ticking, event: Group | Summary) -> None:
        # As long as it takes the engine to end the whole round.
        assert engine.idle.wait(SECONDS), "the loop is frozen while its user trains"

    at_once = list_aborted(loop, lambda engine, event: None)
    assert list_aborted(loop, long) == at_once
    assert at_once == [9] * 4, "of both long prompts, until the second short one ended"


def test_calls_are_answered_between_two_events(loop):
    asked = []
    for _ in loop.iterate(list_events(admitter(5, 9, 30, 40), Ticking())):
        asked.append(loop.run_until_complete(get_thread_of_the_loop()))
        other = threading.Thread(target=lambda: asked.append(loop.run_until_complete(get_thread_of_the_loop())))
        other.start()
        other.join(SECONDS)
    assert len(asked) == 6 and {thread.name for thread in asked} == {"engine loop"}


def test_a_call_raises_what_it_raises_while_a_thread_runs_the_loop(loop):
    async def fails() -> None:
        raise LookupError("not there")

    for _ in loop.iterate(list_events(admitter(5, 9, 30, 40), Ticking())):
        with pytest.raises(LookupError, match="not there"):
            loop.run_until_complete(fails())


def test_a_call_inside_the_loop_is_refused(loop):
    async def inside() -> None:
        loop.run_until_complete(get_thread_of_the_loop())

    with pytest.raises(RuntimeError, match="made inside that loop"):
        loop.run_until_complete(inside())
    for _ in loop.iterate(list_events(admitter(5, 9, 30, 40), Ticking())):
        with pytest.raises(RuntimeError, match="made inside that loop"):
            loop.run_until_complete(inside())


def test_two_rollouts_at_once(loop):
    first, second = admitter(5, 9, 30, 40), admitter(6, 8, 30, 40)
    seen = []
    for _ in loop.iterate(list_events(first, Ticking())):
        seen += loop.iterate(list_events(second, Ticking())) if not seen else []
    assert first.state.returned == second.state.returned == 2 and len(seen) == 3


def test_two_rollouts_of_one_admitter_are_refused(loop):
    mine = admitter(5, FOREVER, FOREVER, FOREVER)
    events = loop.iterate(list_events(mine, Ticking()))
    next(events)
    with pytest.raises(RuntimeError, match="is not over"):
        list(loop.iterate(list_events(mine, Ticking())))
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

    *groups, summary = loop.iterate(list_events(mine, engine, judge))
    assert judging.is_set() and [group.index for group in groups] == [0, 2] and summary.filtered == 1
    assert [index for index, _ in judged] == [0, 1, 2, 3][: len(judged)]
    assert len({thread for _, thread in judged}) == 1 and judged[0][1] is not threading.current_thread()


def test_groups_are_judged_while_their_user_trains(loop):
    """A judge that is a coroutine function runs in the loop; a verdict does not wait until somebody takes the group."""

    async def judge(group: Group) -> bool:
        await asyncio.sleep(0)
        return True

    mine, engine = admitter(5, 9, FOREVER, FOREVER, filter_groups=True), Ticking()
    for _ in loop.iterate(list_events(mine, engine, judge)):
        assert engine.idle.wait(SECONDS), "a verdict was not given while its user trains"
    assert mine.state.returned == 2


def test_what_a_judge_raises_ends_the_round(loop):
    def judge(group: Group) -> bool:
        raise LookupError(f"no reward for {group.index}")

    mine, engine = admitter(5, 9, FOREVER, FOREVER, filter_groups=True), Ticking()
    with pytest.raises(LookupError, match="no reward for 0"):
        list(loop.iterate(list_events(mine, engine, judge)))
    assert len(mine.state.fresh) == 4 and not engine.running


# -- rollouts that are left, fail, or outlive what they began in -------------------------------------------------


@pytest.mark.parametrize("how", ["break", "close", "exception", "deleted"])
def test_leaving_cancels_the_round_and_ends_the_thread(loop, how):
    mine, engine = admitter(5, FOREVER, FOREVER, FOREVER), Ticking()
    events = loop.iterate(list_events(mine, engine))
    if how == "exception":

        def train() -> None:
            for event in events:
                raise ArithmeticError(event)

        with pytest.raises(ArithmeticError):
            train()
        events.close()  # what keeps it is the traceback
    else:
        for event in events:
            assert event.key.index == 0
            break
        if how == "close":
            events.close()
        del events
    assert mine.state.round is None and [group.index for group in mine.state.fresh] == [0, 1, 2, 3]
    assert not engine.running


def test_what_fails_inside_is_raised_outside(loop):
    mine, engine = admitter(5, -1, FOREVER, FOREVER), Ticking()
    with pytest.raises(ValueError, match="refused"):
        list(loop.iterate(list_events(mine, engine)))
    assert len(mine.state.fresh) == 4 and not engine.running


def test_ctrl_c_while_an_event_is_waited_for(loop):
    """Python loses a signal that comes just before it waits for a lock, and so the test repeats it."""
    mine, engine, over = admitter(FOREVER, FOREVER), Ticking(), threading.Event()

    def interrupt() -> None:
        assert engine.begun.wait(SECONDS)
        while not over.is_set():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            over.wait(5)

    other = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        other.start()
        with pytest.raises(KeyboardInterrupt):
            list(loop.iterate(list_events(mine, engine)))
    finally:
        over.set()
        other.join()
        signal.signal(signal.SIGINT, before)
    assert len(mine.state.fresh) == 2 and not engine.running
    assert loop.run_until_complete(get_thread_of_the_loop()) is threading.current_thread()


def test_a_rollout_that_began_in_somebodys_call_outlives_it(loop):
    """The loop's thread takes over when the call is answered."""
    entered, answered, after = asyncio.Event(), threading.Event(), []

    async def call() -> str:
        entered_too.set()
        await entered.wait()
        return "answer"

    async def rollout() -> AsyncGenerator[threading.Thread, None]:
        yield threading.current_thread()
        entered.set()
        yield threading.current_thread()

    def other() -> None:
        entered_too.wait(SECONDS)
        events = loop.iterate(rollout())
        after.append(next(events))
        after.append(next(events))
        answered.wait(SECONDS)
        after.append(loop.run_until_complete(get_thread_of_the_loop()))
        events.close()

    entered_too = threading.Event()
    thread = threading.Thread(target=other)
    thread.start()
    assert loop.run_until_complete(call()) == "answer"
    answered.set()
    thread.join(SECONDS)
    assert after[0] is threading.main_thread() and after[-1].name == "engine loop"


def test_a_rollout_may_be_collected_as_garbage_by_its_own_thread(loop):
    mine, engine = admitter(5, FOREVER, FOREVER, FOREVER), Ticking()
    gc.disable()
    try:
        events = loop.iterate(list_events(mine, engine))
        next(events)
        (running,) = threads()
        ring = [events]
        ring.append(ring)
        del events, ring
        loop.call_soon_threadsafe(gc.collect)
        running.join(SECONDS)
    finally:
        gc.enable()
    assert mine.state.round is None and not engine.running


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_when_the_engine_is_shut_down_nobody_waits_for_it():
    _shut_down_in_a_rollout()
    gc.collect()  # a round that nobody can end any more


def _shut_down_in_a_rollout() -> None:
    loop = EngineLoop()
    mine, engine = admitter(FOREVER, FOREVER), Ticking()

    def end() -> None:
        assert engine.begun.wait(SECONDS)
        loop.end()

    other = threading.Thread(target=end)
    other.start()
    with pytest.raises(RuntimeError, match="shut down"):
        list(loop.iterate(list_events(mine, engine)))
    other.join(SECONDS)
    with pytest.raises(RuntimeError, match="shut down"):
        loop.run_until_complete(get_thread_of_the_loop())
    assert not threads()
