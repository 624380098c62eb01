"""What comes in a pause, beside an update, or while memory is released: ``docs/pauses.md``, in any order."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.managers import io_struct as io

from sglang_pat.host import tokenizer
from sglang_pat.host.fixes import pauses
from sglang_pat.host.fixes.weight_updates import NOT_FLUSHED
from sglang_pat.server.tokenizer import AdaptiveTokenizerManager
from tests.unit.drawn import examples

from .pausing_world import UPDATES, Call, World
from .tokenizer_world import settle

pytestmark = [pytest.mark.contract, pytest.mark.timeout(60)]

WHICH = st.integers(0, 5)
EVENT = st.one_of(
    st.tuples(st.just("generate"), st.sampled_from(["one", "stream", "batch", "n"])),
    st.tuples(st.sampled_from(["abort", "leave"]), WHICH),
    st.tuples(st.just("abort_all")),
    st.tuples(st.just("pause"), st.sampled_from(["in_place", "retract", "abort"])),
    st.tuples(st.just("go_on")),
    st.tuples(st.just("flush"), st.sampled_from([None, 1000.0])),
    st.tuples(st.just("update"), st.sampled_from(list(UPDATES)), st.booleans()),
    st.tuples(st.sampled_from(["release", "resume"]), st.sampled_from(["weights", "kv_cache"])),
    st.tuples(st.just("probe")),
)
BETWEEN = st.lists(st.sampled_from(["calm", "step", "take", "turn"]), max_size=3)


@pytest.mark.timeout(1200)
@given(st.lists(st.tuples(EVENT, BETWEEN), min_size=8, max_size=30))
@settings(examples(500), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_everything_is_answered_in_any_order(monkeypatch, drawn):
    async def scene() -> None:
        world = World(monkeypatch)
        for (what, *arguments), between in drawn:
            getattr(world, what)(*arguments)
            for number, then in enumerate(between):
                if then == "calm":
                    await world.calm()
                    world.check()
                elif then == "step":
                    await world.rank.step(number)
                elif then == "take":
                    world.rank.take()
                else:
                    await asyncio.sleep(0)
        await world.end()

    asyncio.run(asyncio.wait_for(scene(), 60))


@pytest.fixture
async def world(monkeypatch):
    made = World(monkeypatch)
    yield made
    await made.end()


@pytest.fixture
def manager(world):
    return world.manager


def reasons(call: Call) -> list[str]:
    answers = call.answer.result()
    parts = answers[0] if isinstance(answers[0], list) else answers[-1:]
    return [part["meta_info"]["finish_reason"]["type"] for part in parts]


async def test_a_client_that_leaves_the_gate(world, manager, monkeypatch):
    """SGLang's server does not cancel the handler of a request whose client has gone; it is looked for."""
    monkeypatch.setattr(tokenizer, "CLIENT_SECONDS", 1e-3)

    async def gone() -> bool:
        return left.is_set()

    left = asyncio.Event()
    client = SimpleNamespace(is_disconnected=gone, scope={"path": "/generate"})
    world.pause("in_place")
    answer = manager.ask("leaves", request=client)
    await world.calm()
    left.set()
    assert "client has left" in str((await asyncio.gather(answer, return_exceptions=True))[0])
    world.go_on()
    await world.calm()
    assert not manager.requests


async def test_an_abort_reaches_all_that_a_client_knows_by_one_id(world, manager):
    """n responses, whose ids SGLang makes: before their prompt is sent, while it is, and when they are."""
    for steps in range(3):
        world.generate("n")
        await world.calm()
        for _ in range(steps):
            await world.rank.step(0)
            await world.calm()
        manager.abort_request(world.calls[-1].name)
        while world.calls[-1].open:
            await world.calm()
            await world.rank.step(0)
        assert reasons(world.calls[-1]) == (["abort"] * 2 if steps < 2 else ["length", "abort"])


def test_a_stream_that_has_ended_aborts_nobody_afterwards():
    """SGLang aborts its id two seconds later: another request may have it then."""
    assert not AdaptiveTokenizerManager.create_abort_task(None, None).tasks


async def test_new_weights_have_their_version_though_the_cache_was_not_flushed(world, manager):
    said = io.UpdateWeightsFromTensorReqOutput(success=False, message=NOT_FLUSHED)
    world.rank.replies[io.UpdateWeightsFromTensorReqInput] = lambda: said
    request = io.UpdateWeightsFromTensorReqInput(serialized_named_tensors=[], weight_version="8")
    updating = asyncio.ensure_future(manager.update_weights_from_tensor(request))
    await world.calm()
    assert updating.result() == (False, NOT_FLUSHED) and manager.pat_get_weight_version() == "8"
    said.message = f"{NOT_FLUSHED} | broken off"  # another replica's
    request.weight_version = "9"
    updating = asyncio.ensure_future(manager.update_weights_from_tensor(request))
    await world.calm()
    assert not updating.result()[0] and manager.pat_get_weight_version() == "8"


async def test_a_flush_whose_time_is_over(world, manager):
    world.generate("one")
    await world.calm()
    answer = await manager.flush_cache(timeout_s=1e-3)
    assert not answer.success and "Timed out" in answer.message


async def test_requests_wait_until_all_memory_is_back(world, manager):
    for tag in ("weights", "kv_cache"):
        world.release(tag)
    world.generate("one")
    world.resume("weights")
    await world.calm()
    assert not manager.requests
    world.resume("kv_cache")
    await world.calm()
    assert manager.requests == [world.calls[2].name]


async def test_a_pause_that_aborts_after_one_in_place(world):
    """Paused ranks end nothing: SGLang's server would wait for them, and continue would wait for the server."""
    world.generate("one")
    await world.calm()
    world.pause("in_place")
    world.pause("abort")
    await world.calm()
    await world.rank.step(0)
    await world.calm()
    assert not world.calls[2].open and reasons(world.calls[0]) == ["abort"]


async def test_a_pause_that_aborts_does_so_again_if_a_rank_did_not_hear_it(world, monkeypatch):
    """An abort may overtake its request on the way."""
    monkeypatch.setattr(pauses, "AGAIN_SECONDS", 1e-3)
    world.generate("one")
    await world.calm()
    world.pause("abort")
    await world.calm()
    world.rank.aborted.clear()
    while not world.rank.aborted:
        await asyncio.sleep(1e-3)
        await world.calm()
    await world.rank.step(0)
    await world.calm()
    assert not world.calls[1].open and reasons(world.calls[0]) == ["abort"]


async def test_a_pause_that_aborts_ends_what_no_rank_has_yet(world, manager):
    tokenize, may_go_on = manager._tokenize_one_request, asyncio.Event()

    async def tokenize_slowly(obj):
        if obj.rid == "b":
            await may_go_on.wait()
        return await tokenize(obj)

    manager._tokenize_one_request = tokenize_slowly
    answer = manager.ask(["a", "b"])
    await world.calm()
    world.pause("abort")
    await world.calm()
    may_go_on.set()
    await world.calm()
    assert manager.requests == ["a"] and world.calls[0].open
    await world.rank.step(0)
    await world.calm()
    assert not world.calls[0].open
    assert [part["meta_info"]["finish_reason"]["type"] for part in (await answer)[0]] == ["abort"] * 2


async def test_a_pause_that_aborts_waits_for_the_update_that_it_lets_go_on(world):
    world.generate("one")
    await world.calm()
    world.update("tensor", aborts=False)
    world.pause("abort")
    await world.calm()
    await world.rank.step(0)
    await settle()
    assert world.calls[2].open and not world.updated, "the rank has not answered the update"
    await world.calm()
    assert not world.calls[2].open and world.updated == [1]


async def test_a_flush_that_waits_succeeds_once_no_request_has_kv(world):
    world.generate("one")
    await world.calm()
    world.flush(1000.0)
    await world.calm()
    assert world.calls[1].open
    world.pause("retract")
    await world.calm()
    assert world.calls[1].answer.result().success and world.calls[0].open


async def test_a_pause_ends_after_the_updates_that_came_before(world):
    world.generate("one")
    world.pause("in_place")
    await world.calm()
    for kind in ("disk", "tensor"):
        world.update(kind, aborts=False)
    world.go_on()
    await world.calm()
    assert len(world.updated) == 2 and not world.calls[-1].open
