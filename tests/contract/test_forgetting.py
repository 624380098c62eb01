"""A request is forgotten once nobody waits for it; no engine, but SGLang's own TokenizerManager."""

from __future__ import annotations

import asyncio
from dataclasses import fields
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from sglang.srt.managers.io_struct import AbortReq, BatchTokenIDOutput, GenerateReqInput
from sglang.srt.managers.tokenizer_manager import ReqState

from sglang_pat.sglang.rank import degrees
from sglang_pat.sglang.server.forgetting import ForgettingTokenizerManager

pytestmark = pytest.mark.contract


@pytest.fixture
def manager() -> ForgettingTokenizerManager:
    made = ForgettingTokenizerManager.__new__(ForgettingTokenizerManager)
    made.rid_to_state, made.enable_metrics = {}, False
    made.server_args = SimpleNamespace(
        weight_version="7",
        skip_tokenizer_init=True,
        incremental_streaming_output=False,
        batch_notify_size=1,
        speculative_algorithm=None,
        enable_lora=False,
        enable_trace=False,
        dp_size=1,
    )
    made.dump_requests_folder = made.crash_dump_folder = ""
    made.request_logger = MagicMock()
    made.request_metrics_exporter_manager = SimpleNamespace(exporter_enabled=lambda: False)
    return made


def begun(manager: ForgettingTokenizerManager, rid: str = "r") -> GenerateReqInput:
    """A request that went to a rank."""
    obj = GenerateReqInput(rid=rid, input_ids=[1, 2, 3])
    obj.normalize_batch_and_arguments()
    manager.rid_to_state[rid] = ReqState([], False, asyncio.Event(), obj, time_stats=MagicMock())
    manager.pat_note_sent([SimpleNamespace(rid=rid)])
    return obj


async def waited_for(manager: ForgettingTokenizerManager, obj: GenerateReqInput) -> asyncio.Future:
    """Its answer, for which somebody waits already."""
    answer = asyncio.ensure_future(anext(manager._wait_one_response(obj)))
    await asyncio.sleep(0)
    return answer


ABORT = AbortReq(rid="r", finished_reason={"type": "abort", "message": "Abort in waiting queue"})


def last_token() -> BatchTokenIDOutput:
    """The output that ends the request."""
    values = dict.fromkeys((field.name for field in fields(BatchTokenIDOutput)), None)
    one = {name: [0] for name in ("prompt_tokens", "reasoning_tokens", "completion_tokens", "cached_tokens")}
    one |= {"rids": ["r"], "finished_reasons": [{"type": "length"}], "output_ids": [[5]], "retraction_counts": [0]}
    return BatchTokenIDOutput(**values | one)


def test_one_that_was_aborted_while_it_waited(manager):
    async def run():
        answer = await waited_for(manager, begun(manager))
        manager._handle_abort_req(ABORT)
        return await answer

    answer = asyncio.run(run())
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert answer["meta_info"][degrees.KEY] == (), "no token, no degree"
    assert not manager.rid_to_state


@pytest.mark.parametrize("end", ["aborted", "finished"])
def test_one_whose_answer_is_there_before_anybody_waits(manager, end):
    """As of a batch, whose first answers come while the last requests are tokenized, or sent."""

    async def run():
        obj = begun(manager)
        waiting = manager._wait_one_response(obj)
        if end == "aborted":
            manager._handle_abort_req(ABORT)
        else:
            await manager._handle_batch_output(last_token())
        assert [answer["meta_info"]["id"] async for answer in waiting] == ["r"]

    asyncio.run(run())
    assert not manager.rid_to_state


def test_one_whose_client_has_left(manager):
    async def run():
        waiting = await waited_for(manager, begun(manager))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert [*manager.rid_to_state] == ["r"], "a rank has it, and will say when it has ended"
        manager._handle_abort_req(ABORT)
        manager._handle_abort_req(ABORT)  # a late one is no error

    asyncio.run(run())
    assert not manager.rid_to_state


def test_another_one_of_the_same_id_is_kept(manager):
    async def run():
        waiting = await waited_for(manager, begun(manager))
        manager._handle_abort_req(ABORT)
        second = begun(manager)
        await waiting
        return second

    second = asyncio.run(run())
    assert manager.rid_to_state["r"].obj is second
