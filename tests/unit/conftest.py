"""What several unit tests need."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator

import pytest

from sglang_pat.rollout.loop import EngineLoop

from .engine_loop_world import threads


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Slow files first, but after engines: a worker that begins one when the others are done keeps them waiting."""
    items.sort(key=lambda item: (item.get_closest_marker("engine") is None, item.get_closest_marker("slow") is None))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """A test that is a coroutine function runs in an event loop, a minute at most."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    asyncio.run(asyncio.wait_for(test(**given), 60))
    return True


@pytest.fixture
def loop() -> Iterator[EngineLoop]:
    made = EngineLoop()
    yield made
    assert not threads() and not made.is_running(), "a rollout that is over leaves no thread"
    made.close()
