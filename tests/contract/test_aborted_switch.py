"""What an aborted switch does to the requests of its ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("state", ["QUIESCE", "EXCHANGE"])
@pytest.mark.parametrize("paused", [True, False])
@pytest.mark.parametrize("in_parts", [True, False])
def test_what_is_computed_anew(monkeypatch, state, paused, in_parts):
    """What the exchange may have overwritten; and in a client's pause a prompt of which a part is computed.

    SGLang's ``pause_generation("retract")`` forgets such a prompt where other requests run.
    """
    from sglang_pat.sglang.switch import executor, live
    from sglang_pat.switch.state import SwitchState

    computed = []
    monkeypatch.setattr(live, "recompute", computed.append)
    aborted = executor.SwitchExecutor.__new__(executor.SwitchExecutor)
    nothing = SimpleNamespace(forget=lambda: None, release=lambda: None)
    aborted.scheduler = SimpleNamespace(
        grammars=nothing, _engine_paused=paused, chunked_req=object() if in_parts else None
    )
    aborted.layouts = SimpleNamespace(staging=nothing)
    aborted.state = SwitchState[state]
    aborted._mark = lambda _: None
    aborted._abort()
    assert computed == [aborted.scheduler] * (state == "EXCHANGE" or (paused and in_parts))
    assert aborted.state is SwitchState.IDLE
