"""What several unit tests need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglang_pat.sglang.server.loop import EngineLoop

from .engine_loop_world import threads


@pytest.fixture
def loop() -> Iterator[EngineLoop]:
    made = EngineLoop()
    yield made
    assert not threads() and not made.is_running(), "a rollout that is over leaves no thread"
    made.close()
