"""The event loop of an ``Engine``: rollouts that are left, fail, or outlive what they began in."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import AsyncGenerator

import pytest

from sglang_pat.rollout.loop import EngineLoop

from .engine_loop_world import FOREVER, SECONDS, Ticking, admitter, events_of, thread_of_the_loop, threads

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("how", ["break", "close", "exception", "deleted"])
def test_leaving_cancels_the_round_and_ends_the_thread(loop, how):
    mine, engine = admitter(5, FOREVER, FOREVER, FOREVER), Ticking()
    events = loop.iterate(events_of(mine, engine))
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
    assert not engine.stops


def test_what_fails_inside_is_raised_outside(loop):
    mine, engine = admitter(5, -1, FOREVER, FOREVER), Ticking()
    with pytest.raises(ValueError, match="refused"):
        list(loop.iterate(events_of(mine, engine)))
    assert len(mine.state.fresh) == 4 and not engine.stops


def test_ctrl_c_while_an_event_is_waited_for(loop):
    mine, engine = admitter(FOREVER, FOREVER), Ticking()

    def interrupt() -> None:
        assert engine.begun.wait(SECONDS)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    other = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        other.start()
        with pytest.raises(KeyboardInterrupt):
            list(loop.iterate(events_of(mine, engine)))
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(mine.state.fresh) == 2 and not engine.stops
    assert loop.run_until_complete(thread_of_the_loop()) is threading.current_thread()


def test_a_rollout_that_began_in_somebodys_call_outlives_it(loop):
    """Its thread takes over when the call is answered."""
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
        after.append(loop.run_until_complete(thread_of_the_loop()))
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
        events = loop.iterate(events_of(mine, engine))
        next(events)
        (running,) = threads()
        ring = [events]
        ring.append(ring)
        del events, ring
        loop.call_soon_threadsafe(gc.collect)
        running.join(SECONDS)
    finally:
        gc.enable()
    assert mine.state.round is None and not engine.stops


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
        list(loop.iterate(events_of(mine, engine)))
    other.join(SECONDS)
    with pytest.raises(RuntimeError, match="shut down"):
        loop.run_until_complete(thread_of_the_loop())
    assert not threads()
