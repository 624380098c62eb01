"""The states of a switch, what an aborted one does to the requests of its ranks, and when a rank is prepared."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from sglang_pat.layout import ParallelLayout

pytestmark = pytest.mark.contract


def test_a_switch_goes_through_its_states_in_order_and_is_aborted_before_commit_only():
    from sglang_pat.switch.executor import SwitchState as S
    from sglang_pat.switch.executor import advance

    main = [S.IDLE, S.PREPARE, S.QUIESCE, S.EXCHANGE, S.COMMIT, S.RESUME, S.IDLE]
    allowed = {*itertools.pairwise(main), (S.ABORT, S.IDLE)}
    allowed |= {(state, S.ABORT) for state in (S.PREPARE, S.QUIESCE, S.EXCHANGE)}
    for current, to in itertools.product(S, repeat=2):
        if (current, to) in allowed:
            assert advance(current, to) is to
        else:
            with pytest.raises(RuntimeError, match=f"switch cannot go from {current.name} to {to.name}"):
                advance(current, to)


@pytest.mark.parametrize("state", ["QUIESCE", "EXCHANGE"])
@pytest.mark.parametrize("paused", [True, False])
@pytest.mark.parametrize("in_parts", [True, False])
def test_what_is_computed_anew(monkeypatch, state, paused, in_parts):
    """Ranks compute anew what the exchange may have overwritten.

    In a client's pause they also compute anew a prompt of which a part is computed:
    SGLang's ``pause_generation("retract")`` forgets such a prompt where other requests run.
    """
    from sglang_pat.switch import executor, requests
    from sglang_pat.switch.executor import SwitchState

    computed = []
    monkeypatch.setattr(requests, "recompute_all", computed.append)
    aborted = executor.SwitchExecutor.__new__(executor.SwitchExecutor)
    nothing = SimpleNamespace(clear=lambda: None, release=lambda: None)
    aborted.scheduler = SimpleNamespace(
        grammars=nothing, _engine_paused=paused, chunked_req=object() if in_parts else None
    )
    aborted.staging = aborted.memory = nothing
    aborted.rank, aborted.layouts = 1, SimpleNamespace(layout=ParallelLayout(1, 2))
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
    """Switches that come again and again would otherwise keep the prompt from its end."""
    from sglang_pat.messages import Prepare
    from sglang_pat.switch import executor, requests
    from sglang_pat.switch import kv as exchange
    from sglang_pat.switch.executor import SwitchState

    sent, prompt = [], object()
    tree = SimpleNamespace(is_chunk_cache=lambda: False, disable=disable)
    rank = SimpleNamespace(
        adaptive=SimpleNamespace(kv=kv), tree_cache=tree, chunked_req=prompt, _engine_paused=False,
        channel=SimpleNamespace(send=sent.append),
    )  # fmt: skip
    monkeypatch.setattr(exchange, "reserve", lambda *_: None)
    monkeypatch.setattr(requests, "seal_requests", lambda *_: [])
    made = executor.SwitchExecutor.__new__(executor.SwitchExecutor)
    made.scheduler, made.rank, made.state, made._compiling, made._computing = rank, 0, SwitchState.IDLE, None, None
    monkeypatch.setattr(requests, "count_tokens_to_move", lambda *_: 0)
    made.staging = None
    made.memory = SimpleNamespace(resume=lambda: None)
    made.config = SimpleNamespace(layout=lambda tp, stride: ParallelLayout(tp, 1, stride))
    made.layouts = SimpleNamespace(prepare=lambda _: None)
    made.prepare(Prepare(epoch=1, tp=2))
    made.poll_command()
    assert len(sent) == (not waits)
    if ends == "paused":
        rank._engine_paused = True
    else:
        rank.chunked_req = object()  # the next one
    made.poll_command()
    made.poll_command()
    assert [message.epoch for message in sent] == [1] and not sent[0].error
