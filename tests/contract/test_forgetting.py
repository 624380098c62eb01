"""A request goes on for as long as somebody waits for it, and is forgotten then; SGLang's own manager, no engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

from sglang_pat.host.fixes import request_lifetime
from sglang_pat.rank import degrees

from .tokenizer_world import LONGEST, Manager, settle

pytestmark = [pytest.mark.contract, pytest.mark.timeout(60)]


@pytest.fixture
async def manager(monkeypatch):
    """SGLang's; nothing is left of any request."""
    made = Manager(monkeypatch)
    yield made
    await settle()
    assert not made.rid_to_state and not made._pat_parts
    assert not made._pat_named and not made._pat_inside


async def wait_for_end(answer: asyncio.Future) -> BaseException | None:
    """Wait for an answer; returns the error that it ended with, None without one."""
    (how,) = await asyncio.gather(answer, return_exceptions=True)
    return how if isinstance(how, BaseException) else None


async def test_one_that_was_aborted_while_it_waited(manager):
    answer = manager.ask("r")
    await settle()
    manager.told_aborted("r")
    meta = (await answer)[0]["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert meta[degrees.KEY] == (), "no token, no degree"
    manager.told_aborted("r")  # a late one is no error


async def test_the_id_of_a_part_that_was_aborted_while_it_waited_is_free_before_its_call_ends(manager):
    first = manager.ask(["a", "b"])
    await settle()
    manager.told_aborted("a")
    await settle()
    second = manager.ask("a")
    await settle()
    for rid in "ab":
        await manager.told(rid, "length")
    parts = [*(await first)[0], (await second)[0]]
    assert [part["meta_info"]["finish_reason"]["type"] for part in parts] == ["abort", "length", "length"]


async def test_another_one_of_the_same_id_has_its_own_answer(manager):
    first = manager.ask(["a", "b"])
    while manager.requests != ["a"]:
        await asyncio.sleep(0)
    await manager.told("a", "length")
    second = manager.ask("a")
    await settle()
    await manager.told("b", "length")
    assert (await first)[0][0]["meta_info"]["finish_reason"]["type"] == "length"
    await manager.told("a", "stop")
    assert (await second)[0]["meta_info"]["finish_reason"]["type"] == "stop"


async def test_the_rest_of_a_batch_with_a_wrong_prompt_is_aborted(manager):
    answer = manager.ask(["a", "b", "c"], text=["x", "x", "x" * (LONGEST + 1)])
    assert "too long" in str(await wait_for_end(answer))
    assert manager.requests == manager.aborted == ["a", "b"]
    manager.told_aborted("a")
    await manager.told("b", "abort")
    again = manager.ask(["a", "b", "c"])
    await settle()
    for rid in "abc":
        await manager.told(rid, "length")
    assert len((await again)[0]) == 3


async def test_a_batch_with_an_id_that_is_in_use(manager):
    first = manager.ask("b")
    await settle()
    assert "Duplicate" in str(await wait_for_end(manager.ask(["a", "b"])))
    await manager.told("b", "length")
    assert await first
    assert not manager.aborted


@pytest.mark.parametrize("n", [1, 2])
async def test_a_fault_of_the_server_is_no_malformed_request(manager, n):
    manager.request_logger.log_finished_request = MagicMock(side_effect=TypeError("a fault"))
    answer = manager.ask("r", n=n)
    await settle()
    if n > 1:
        manager.request_logger.log_finished_request.side_effect = None
        await manager.told(manager.requests[0], "length")
        await settle()
        manager.request_logger.log_finished_request.side_effect = TypeError("a fault")
    for rid in manager.requests[-n:]:
        await manager.told(rid, "length")
    assert isinstance(await wait_for_end(answer), TypeError)


async def test_all_that_runs_is_ended(manager):
    """Clients that are still there get the tokens that there are."""
    answers = [manager.ask(rid) for rid in "ab"]
    await settle()
    ending = asyncio.ensure_future(manager.pat_end_running())
    await settle()
    assert manager.aborted == ["a", "b"] and not ending.done()
    await manager.told("a", "abort")
    manager.told_aborted("b")
    assert await ending == 2
    assert [(await answer)[0]["meta_info"]["finish_reason"]["type"] for answer in answers] == ["abort"] * 2
    assert await manager.pat_end_running() == 0


async def test_an_update_does_not_wait_for_ever(manager, monkeypatch):
    monkeypatch.setattr(request_lifetime, "LEFT_SECONDS", 0.0)
    answer = manager.ask("r")
    await settle()
    answer.cancel()
    await wait_for_end(answer)
    with pytest.raises(RuntimeError, match="1 requests were aborted, and have not ended for 0 s"):
        await manager.pat_pause_for_update(None).__aenter__()
    await manager.told("r", "abort")


async def test_memory_is_released_once_those_that_were_left_have_ended(manager):
    everything, released = SimpleNamespace(tags=None), []

    async def communicator(obj):
        released.append(obj)
        return []

    manager.release_memory_occupation_communicator = communicator
    answer = manager.ask("r")
    probe = manager.ask(f"{HEALTH_CHECK_RID_PREFIX}_1")  # a busy rank does not answer it
    await settle()
    with pytest.raises(ValueError, match="1 requests run"):
        await manager.release_memory_occupation(everything)
    answer.cancel()
    await wait_for_end(answer)
    releasing = asyncio.ensure_future(manager.release_memory_occupation(everything))
    await settle()
    assert not released
    await manager.told("r", "abort")
    await releasing
    assert released == [everything]
    probe.cancel()
    manager.rid_to_state.clear()  # as SGLang does
