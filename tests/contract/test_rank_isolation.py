"""What fails on a rank ends its request alone; only a step of a switch ends the engine."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from .requests_made import tokenized

pytestmark = pytest.mark.contract


def test_a_row_without_a_choice_gets_one():
    import torch

    from sglang_pat.rank.runner import leave_a_choice

    logits = torch.tensor([[-math.inf, -math.inf], [math.nan, 1.0], [-math.inf, 3.0]])
    leave_a_choice(logits)
    assert logits.tolist() == [[0.0, 0.0], [0.0, 0.0], [-math.inf, 3.0]]


def test_a_grammar_that_fails_aborts_its_request_alone():
    from sglang_pat.fixes import grammars

    class Grammar:
        finished = False

        def fill_vocab_mask(self, mask, idx):
            raise ValueError("too large")

    failing, fine = SimpleNamespace(grammar=Grammar(), to_finish=None), SimpleNamespace(grammar=None, to_finish=None)
    info = SimpleNamespace(grammars=[failing.grammar, None])
    grammars.guard(info)
    info.grammars[0].fill_vocab_mask(None, 0)
    assert info.grammars[0].finished is False and info.grammars[1] is None
    grammars.abort_failed([failing, fine])
    assert failing.to_finish.to_json()["status_code"] == 400 and "too large" in failing.to_finish.message
    assert fine.to_finish is None


def test_a_request_that_cannot_be_handled_is_answered_and_ends_nothing():
    from sglang.srt.managers import io_struct as io

    from sglang_pat.dropped import Dropped
    from sglang_pat.fixes.isolation import IsolatingDispatcher

    def broken(obj):
        raise KeyError("boom")

    dropped = Dropped()
    dispatch = IsolatingDispatcher(broken, dropped)
    answer = dispatch(tokenized(rid="mine"))
    assert isinstance(answer, io.AbortReq) and answer.rid == "mine"
    assert answer.finished_reason["type"] == "abort" and "boom" in answer.finished_reason["message"]
    assert dispatch(io.FlushCacheReqInput()).success is False
    assert dispatch(io.AbortReq(rid="x")) is None
    assert dropped.total == 3


def test_a_step_of_a_switch_that_fails_is_fatal():
    from sglang_pat import messages
    from sglang_pat.dropped import Dropped
    from sglang_pat.fixes.isolation import IsolatingDispatcher

    def broken(obj):
        raise RuntimeError("requests were lost")

    dispatch = IsolatingDispatcher(broken, Dropped())
    for message in (messages.Prepare(epoch=1, tp=2), messages.Switch(epoch=1, tp=2), messages.Cancel(epoch=1)):
        with pytest.raises(RuntimeError, match="requests were lost"):
            dispatch(message)


def test_every_control_request_has_an_answer_for_failure():
    """Without one its client waits for ever, and so does every switch; what leaders answer must also merge."""
    from sglang_pat.coordinator.controls import CONTROLS, error_of, failed
    from sglang_pat.coordinator.process import classify

    for kind, (reply, options) in CONTROLS.items():
        answers = [failed(object.__new__(kind), ValueError("boom")) for _ in range(2)]
        assert type(answers[0]) is reply
        merged = options["merge"](answers) if "merge" in options else answers[0]
        assert type(merged) is reply and not getattr(merged, "success", False)
        if options.get("needs_base"):  # the coordinator's own answer, where there is no way to the base layout
            asked = object.__new__(kind)
            asked.tags = None
            (control,) = classify(asked)
            refused = control.refusal("no way")
            assert type(refused) is reply and error_of(refused) == "RuntimeError: no way"
            assert not getattr(refused, "success", False)
