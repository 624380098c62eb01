"""What an aborted switch does to the requests of its ranks; and when a rank is prepared."""

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
    from sglang_pat.switch import executor, live
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


@pytest.mark.parametrize(
    "kv, disable, waits", [("migrate", False, False), ("recompute", False, True), ("auto", True, True)]
)
@pytest.mark.parametrize("ends", ["computed", "paused"])
def test_a_switch_waits_for_a_prompt_whose_pieces_it_would_throw_away(monkeypatch, kv, disable, waits, ends):
    """Else one that comes again and again keeps the prompt from its end."""
    from sglang_pat.messages import Prepare
    from sglang_pat.switch import executor, handover, kv_exchange
    from sglang_pat.switch.state import SwitchState

    sent, prompt = [], object()
    tree = SimpleNamespace(is_chunk_cache=lambda: False, disable=disable)
    rank = SimpleNamespace(
        adaptive=SimpleNamespace(kv=kv), tree_cache=tree, chunked_req=prompt, _engine_paused=False,
        channel=SimpleNamespace(send=sent.append),
    )  # fmt: skip
    monkeypatch.setattr(kv_exchange, "reserve", lambda *_: None)
    monkeypatch.setattr(handover, "seal", lambda *_: [])
    made = executor.SwitchExecutor.__new__(executor.SwitchExecutor)
    made.scheduler, made.rank, made.state, made._compiling, made._computing = rank, 0, SwitchState.IDLE, None, None
    made.config = made.layouts = SimpleNamespace(layout=lambda tp: tp, prepare=lambda _: None)
    made.prepare(Prepare(epoch=1, tp=2))
    made.answer()
    assert len(sent) == (not waits)
    if ends == "paused":
        rank._engine_paused = True
    else:
        rank.chunked_req = object()  # the next one
    made.answer()
    made.answer()
    assert [message.epoch for message in sent] == [1] and not sent[0].error
