"""Ranks are lent and taken back while requests run: no token changes, and those that are lent do nothing."""

from __future__ import annotations

import asyncio

import pytest

from .conftest import fault, long
from .streams import ask, body, hold, post, tokens, wait_for_status
from .weight_updates import A, B, C, check_all_layouts, check_success, say, update_from_disk, update_from_tensor

BODIES = [body(i, 120) for i in range(6)]


async def run_to(server, session, step: int) -> None:
    """All replicas hold so many steps from here."""
    await server.set_schedule(session, {"step": step, "hold": True})
    await server.wait_for_schedule(session)


async def test_two_ranks_of_which_one_is_lent(servers, session, llama):
    server = servers.adaptive(llama)
    expected = tokens(await server.generate_async(BODIES))
    work = await hold(server, session, BODIES, step=20)
    record = ask(server, "/pat/lend_ranks")
    assert (record["lent"], record["migrated"], record["released_bytes"]) == ([1], len(BODIES), 0)
    status = server.status()
    assert status["layout"] == {"tp": 1, "dp": 2, "stride": 2} and status["lent"] == [1]
    assert [group["ranks"] for group in status["groups"]] == [[0]]
    assert ask(server, "/pat/lend_ranks") == {}, "it is so already"
    await run_to(server, session, 30)
    record = ask(server, "/pat/take_back_ranks")
    assert (record["lent"], record["migrated"]) == ([], len(BODIES))
    assert [group["running"] for group in server.status()["groups"]] == [3, 3]
    assert ask(server, "/pat/take_back_ranks") == {}
    await server.set_schedule(session)
    assert tokens(await asyncio.gather(*work)) == expected


async def test_ranks_of_a_client_that_is_silent_come_back_and_of_one_at_work_do_not(servers, session, llama):
    """Requests of the client's own round, which hold, renew its lease; a round that nobody renews is over first."""
    server = servers.adaptive(llama)
    expected = tokens(await server.generate_async(BODIES))
    ask(server, "/pat/round", name="mine", requests=len(BODIES))
    work = await hold(server, session, BODIES, step=20)
    ask(server, "/pat/lend_ranks", client="mine", lease_seconds=1)
    ask(server, "/pat/round", name="silent", requests=1, lease_seconds=1)
    status = await wait_for_status(server.status, lambda status: len(status["rounds"]["open"]) == 1)
    assert status["lent"] == [1] and status["lease"]["left"] > 0 and not status["switching"]
    assert server.post("/pat/lend_ranks", {"client": "gone"}).status_code == 409
    ask(server, "/pat/take_back_ranks")
    ask(server, "/pat/lend_ranks", client="gone", lease_seconds=1)
    status = await wait_for_status(server.status, lambda status: not status["lent"])
    assert status["lease"] is None and status["switches"][-1]["reason"] == "lease over"
    assert [group["running"] for group in status["groups"]] == [3, 3]
    await server.set_schedule(session)
    assert tokens(await asyncio.gather(*work)) == expected
    assert (await session.delete(f"{server.url}/pat/round?name=mine")).status == 200


@pytest.fixture
def saving(servers, llama):
    """A server with a memory saver that loses what it releases."""
    return servers.as_on_cuda(llama, 4, "--enable-memory-saver")


async def test_memory_of_lent_ranks_comes_back_as_it_was(saving, session):
    """The others switch meanwhile."""
    expected = tokens(await saving.generate_async(BODIES))
    work = await hold(saving, session, BODIES, step=10)
    record = ask(saving, "/pat/lend_ranks", stride=2)
    assert record["lent"] == [1, 3] and record["released_bytes"] > 2 * 16384
    await run_to(saving, session, 10)
    assert (await saving.reconfigure_async(session, 2))[0] == 200
    await run_to(saving, session, 10)
    ask(saving, "/pat/take_back_ranks")
    assert (await saving.reconfigure_async(session, 4))[0] == 200
    await run_to(saving, session, 10)
    assert (await saving.reconfigure_async(session, 1))[0] == 200
    await saving.set_schedule(session)
    assert tokens(await asyncio.gather(*work)) == expected


@pytest.mark.parametrize(
    ("state", "rank"),
    [("EXCHANGE", 0), *(long(state, rank) for state, rank in (("PREPARE", 1), ("QUIESCE", 2), ("EXCHANGE", 3)))],
)
async def test_what_fails_leaves_ranks_lent_or_working(saving, session, state, rank):
    """Both directions; memory that was taken back is given away again, and comes back when it goes well."""
    expected = tokens(await saving.generate_async(BODIES))
    work = await hold(saving, session, BODIES, step=10)
    for path, stays in (("/pat/lend_ranks", []), ("/pat/take_back_ranks", [1, 3])):
        with fault(saving, f"{state}:{rank}:raise"):
            failed = saving.post(path)
        assert failed.status_code == 500 and f"rank {rank}" in failed.json()["error"]["message"], failed.text
        assert saving.status()["lent"] == stays
        await saving.set_schedule(session, {"batch": 10, "hold": True})
        await saving.wait_for_schedule(session)
        ask(saving, path)
        await run_to(saving, session, 10)
    await saving.set_schedule(session)
    assert tokens(await asyncio.gather(*work)) == expected


async def test_new_weights_in_a_pause_take_ranks_back(saving, session, llama):
    """The weights are those of before, so requests go on as if nothing had been."""
    expected = tokens(await saving.generate_async(BODIES))
    work = await hold(saving, session, BODIES, step=10)
    ask(saving, "/pat/lend_ranks")
    await run_to(saving, session, 10)
    assert (await saving.reconfigure_async(session, 2))[0] == 200
    ask_plainly = ("/pause_generation", {"mode": "retract"}), ("/update_weights_from_disk", {"model_path": str(llama)})
    for path, given in ask_plainly:
        assert await post(session, saving, path, given) == 200
    assert saving.status()["layout"] == {"tp": 1, "dp": 4} and saving.status()["lent"] == []
    assert await post(session, saving, "/continue_generation", {}) == 200
    await saving.set_schedule(session)
    assert tokens(await asyncio.gather(*work)) == expected


@pytest.mark.long
def test_weights_are_new_on_all_ranks_after_an_update_while_some_were_lent(servers, marker):
    server = servers.as_on_cuda(marker(A), 4, "--enable-memory-saver")
    for stride, send, token in ((2, update_from_disk, B), (4, update_from_tensor, C)):
        ask(server, "/pat/lend_ranks", stride=stride)
        check_success(send(server, marker, token) if send is update_from_disk else send(server, token, 4))
        check_all_layouts(server, token)
        ask(server, "/pat/lend_ranks", stride=stride)
        said = say(server)
        assert said == [{token}] * len(said)
        ask(server, "/pat/take_back_ranks")
        check_all_layouts(server, token)


def test_what_needs_all_ranks_is_refused_while_some_are_lent(saving):
    """New weights are not; SGLang keeps the reason of a failed look at weights for itself."""
    ask(saving, "/pat/lend_ranks")
    says = "ranks 1, 3 are lent; take them back first (POST /pat/take_back_ranks)"
    for path in ("/release_memory_occupation", "/resume_memory_occupation", "/init_weights_update_group"):
        given = dict(
            master_address="localhost", master_port=1, rank_offset=1, world_size=5, group_name="g", backend="gloo"
        )
        answer = saving.post(path, given if path.startswith("/init") else {})
        assert answer.status_code in (400, 500) and says in answer.text, (path, answer.status_code, answer.text)
    look = "/get_weights_by_name", {"name": "model.norm.weight"}
    assert saving.post(*look).status_code == 400
    assert saving.status()["lent"] == [1, 3]
    ask(saving, "/pat/take_back_ranks")
    assert saving.post(*look).status_code == 200


@pytest.mark.parametrize("mode", ["in_place", long("retract")])
async def test_lent_in_a_pause(saving, session, mode):
    """A rank that comes back is paused as the others are."""
    expected = tokens(await saving.generate_async(BODIES))
    work = await hold(saving, session, BODIES, step=10)
    ask(saving, "/pat/lend_ranks")
    assert await post(session, saving, "/pause_generation", {"mode": mode}) == 200
    await saving.set_schedule(session)  # now it is the pause alone that holds them
    record = ask(saving, "/pat/take_back_ranks")
    assert record["migrated"] == (len(BODIES) if mode == "in_place" else 0)
    ask(saving, "/pat/lend_ranks", stride=4)
    ask(saving, "/pat/take_back_ranks")
    assert await post(session, saving, "/continue_generation", {}) == 200
    assert tokens(await asyncio.gather(*work)) == expected
