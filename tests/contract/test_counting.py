"""What counts in a schedule and in a decision log: from when on, and which requests."""

from __future__ import annotations

import asyncio
import zlib
from array import array
from itertools import count
from types import MethodType, SimpleNamespace

import pytest
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_pat.config import AdaptiveConfig
from sglang_pat.layout import ParallelLayout
from sglang_pat.messages import ScheduleEntry, ScheduleState

from .graphs import OLD
from .requests_made import tokenize

pytestmark = pytest.mark.contract


def test_the_warm_up_does_not_count_in_a_log(monkeypatch):
    from sglang.srt.entrypoints import http_server

    from sglang_pat.host import engine

    manager, seen = SimpleNamespace(pat_log_begins=True), []
    monkeypatch.setattr(http_server, "get_global_state", lambda: SimpleNamespace(tokenizer_manager=manager))

    def warm_up(args) -> bool:
        replicas = args.dp_size if OLD else http_server.get_parallel().num_dp_ranks
        seen.append((manager.pat_log_begins, replicas))
        return True

    monkeypatch.setattr(http_server, "_execute_server_warmup", warm_up)
    config = AdaptiveConfig(base=ParallelLayout(1, 4))
    assert engine._warm_up(SimpleNamespace(dp_size=1, spec=SimpleNamespace(config=config))) is True
    assert seen == [(False, 4)], "a request for each replica"
    assert manager.pat_log_begins


class Scheduling:
    """The part of the TokenizerManager that sets schedules."""

    def __init__(self, begins: bool, policy: str = "schedule") -> None:
        from sglang_pat.server.tokenizer import AdaptiveTokenizerManager as Ours

        for name in ("_pat_check_schedule", "_pat_begin_log", "pat_set_schedule", "pat_get_schedule"):
            setattr(self, name, MethodType(getattr(Ours, name), self))
        self.pat_log_begins, self.sent, self._pat_ids = begins, [], count()
        config = AdaptiveConfig(base=ParallelLayout(1, 4), policy=policy, degrees=(1, 2), profile="-")
        self.server_args = SimpleNamespace(spec=SimpleNamespace(config=config))
        self.send_to_scheduler = SimpleNamespace(send_pyobj=self.sent.append)

    def auto_create_handle_loop(self) -> None: ...

    async def _pat_ask(self, kind, **fields):
        self.sent.append(kind(query_id=next(self._pat_ids), **fields))
        return ScheduleState(entries=0, done=0, holding=False, switches=[])


def test_a_log_begins_once_and_not_after_a_schedule():
    """An empty schedule does it: requests count from then on."""
    for begins, entries in ((False, []), (True, [[]])):
        manager = Scheduling(begins)
        for _ in range(2):
            manager._pat_begin_log()
        assert [message.entries for message in manager.sent] == entries
    manager = Scheduling(True)
    asyncio.run(manager.pat_set_schedule([{"tp": 2}]))
    manager._pat_begin_log()
    assert [message.entries for message in manager.sent] == [[ScheduleEntry(tp=2)]]


def test_a_schedule_for_another_policy_is_refused_before_it_goes_out():
    """The counts of a log would begin anew if it went out."""
    from sglang_pat.server.tokenizer import ReconfigureError

    manager = Scheduling(False, "manual")
    for ask in (lambda: manager.pat_set_schedule([]), manager.pat_get_schedule):
        with pytest.raises(ReconfigureError, match="does not follow a schedule") as refused:
            asyncio.run(ask())
        assert refused.value.code == 409 and not manager.sent


def test_siblings_of_long_prompts_are_known_before_a_rank_has_them():
    """Both sides compute the number that load reports give, also for a response that goes on."""
    from sglang_pat.coordinator.process import classify
    from sglang_pat.policies.prompts import LONG_PROMPT
    from sglang_pat.rank.load_reports import register

    ids = list(range(LONG_PROMPT))
    for tail in ([], [5, 6, 7]):
        given = tokenize(rid="r")
        given.input_ids = ids + tail
        given.sampling_params = SamplingParams(custom_params={"pat_generated": len(tail)} if tail else None)
        (work,) = classify(given)
        req = SimpleNamespace(pat_prompt=array("I", given.input_ids), sampling_params=given.sampling_params)
        register(req)
        assert work.family == req.pat_family == zlib.crc32(array("I", ids))
    given.input_ids = ids[1:]
    given.sampling_params = SamplingParams()
    assert classify(given)[0].family is None


def test_health_probes_do_not_count_in_a_schedule():
    from sglang_pat.coordinator.process import classify

    assert [work.counts for rid in ("r", "HEALTH_CHECK_17") for work in classify(tokenize(rid=rid))] == [
        True,
        False,
    ]


def test_the_prompt_of_several_responses_has_no_tokens_to_come():
    """SGLang sends it before them: it is none of the samples of a round."""
    from sglang_pat.coordinator.process import classify

    given = tokenize(rid="r")
    for tokens in (0, 7):
        given.sampling_params = SamplingParams(max_new_tokens=tokens)
        assert classify(given)[0].limit == tokens
