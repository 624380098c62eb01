"""What several unit tests need."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest

from sglang_pat.rollout.loop import EngineLoop

from .engine_loop_world import threads


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Slow files first, but after engines: a worker that begins one when the others are done keeps them waiting.

    A unit test that is a coroutine takes a minute at most.
    """
    items.sort(key=lambda item: (item.get_closest_marker("engine") is None, item.get_closest_marker("slow") is None))
    for item in items:
        if item.get_closest_marker("unit") and inspect.iscoroutinefunction(item.function):
            item.add_marker(pytest.mark.timeout(60))


@pytest.fixture
def loop() -> Iterator[EngineLoop]:
    made = EngineLoop()
    yield made
    assert not threads() and not made.is_running(), "a rollout that is over leaves no thread"
    made.close()
