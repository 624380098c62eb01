"""Rounds in the server on an engine that is played: who was told what, and what is where afterwards."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from sglang_pat.messages import EndRound

from .rollouts_world import call, keys, read, server, waiting

pytestmark = pytest.mark.contract


@pytest.fixture
def make(tmp_path):
    return partial(server, tmp_path)


@pytest.mark.parametrize("stop_at", ["begin", "group", "round"])
def test_a_round_whose_end_was_not_sent_has_not_happened(make, stop_at):
    """``round``: the client is gone while its last event is being sent, when the engine has long finished."""

    async def run():
        rollouts = make()
        await read(rollouts, call(0, 6))
        before = waiting(rollouts)
        left = await read(rollouts, call(6, 2), stop_at)
        assert left[-1]["type"] == stop_at
        fresh, queue = waiting(rollouts)
        assert (fresh, queue) == ([*before[0], 6, 7], before[1]), "as before, and the prompts that came with the call"
        assert rollouts._jobs.get("default").history.numbers == [-1, 0]
        again = await read(rollouts, call(8, 0))
        assert again[0]["number"] == 1 and len(keys(again)) == 2

    asyncio.run(run())


def test_a_client_that_had_not_read_the_end_says_so(make):
    """All was sent, the client read one group and died.  Its next call names the last round that it has."""

    async def run():
        rollouts = make()
        first = await read(rollouts, call(0, 6))
        sent = await read(rollouts, call(6, 3))
        assert sent[-1]["type"] == "round"
        again = await read(rollouts, call(6, 3, after=first[-1]["number"]))
        assert keys(again) == keys(sent)
        assert [event["number"] for event in (sent[-1], again[-1])] == [1, 1]

    asyncio.run(run())


def test_versions_are_counted_once_whatever_is_asked_for_again(make):
    """Of weights that were updated after each round: 0, 1, …, also by a client that dies, and by one that goes back."""

    async def run():
        rollouts = make()

        async def version(first, count, stop_at="", updated=False, **fields):
            rollouts._manager.pat_weight_updates += updated
            return (await read(rollouts, call(first, count, **fields), stop_at))[0]["version"]

        assert await version(0, 6) == 0
        assert await version(6, 3, updated=True) == 1, "its client dies when all was sent"
        assert await version(6, 3, after=0) == 1
        assert await version(9, 3, "group", updated=True) == 2
        assert await version(12, 0) == 2
        assert await version(12, 3) == 2, "no update since"
        assert await version(6, 3, updated=True, after=0) == 1, "older weights, and all anew from there"
        assert await version(9, 3, updated=True) == 2

    asyncio.run(run())


def test_a_client_that_goes_while_its_round_is_settled(make, monkeypatch):
    """The next call waits for all that follows from it, and finds the prompts where they were."""

    async def run():
        rollouts = make()
        await read(rollouts, call(0, 6))
        before = waiting(rollouts)
        reached, go_on = asyncio.Event(), asyncio.Event()
        engine_after = rollouts._engine_after

        async def held(round_):
            reached.set()
            await go_on.wait()
            return await engine_after(round_)

        monkeypatch.setattr(rollouts, "_engine_after", held)
        first = asyncio.ensure_future(read(rollouts, call(6, 2)))
        await reached.wait()
        second = asyncio.ensure_future(read(rollouts, call(8, 0)))
        await asyncio.sleep(0)  # it waits for the first one's end
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        monkeypatch.undo()
        go_on.set()
        events = await second
        assert events[0]["number"] == 1 and len(keys(events)) == 2
        begun_from = rollouts._jobs.get("default").previous.state
        assert [group.index for group in begun_from.fresh] == [*before[0], 6, 7]
        assert [group.index for group in begun_from.waiting] == before[1]

    asyncio.run(run())


def untimed(event: dict) -> dict:
    """Without what a clock says."""
    assert all(event[name] >= 0 for name in ("seconds", "mean_seconds", "plain_seconds"))
    return {name: value for name, value in event.items() if not name.endswith("seconds")}


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("mode", ["strict", "reorder", "partial"])
def test_a_trainer_goes_back_two_steps(make, mode, restart):
    """The same prompts again, and all is as it was; also by a server that has been started since."""

    async def run():
        rollouts, course = make(), []
        for step in range(6):
            course.append(await read(rollouts, call(3 * step, 3, mode=mode, version=step, max_staleness=2)))
        rollouts = make() if restart else rollouts
        for step in (4, 5):
            after = {"after": 3} if step == 4 else {}
            again = await read(rollouts, call(3 * step, 3, mode=mode, version=step, max_staleness=2, **after))
            assert keys(again) == keys(course[step])
            assert untimed(again[-1]) == untimed(course[step][-1])

    asyncio.run(run())


def test_a_state_that_is_not_kept(make):
    async def run():
        rollouts = make()
        await read(rollouts, call(0, 6))
        before = waiting(rollouts)
        with pytest.raises(ValueError, match="after is 7, of job 'default' the states .* are kept: -1, 0"):
            await read(rollouts, call(6, 3, after=7))
        with pytest.raises(ValueError, match="after is 2, of job 'other' .*: none"):
            await read(rollouts, call(0, 3, job="other", after=2))
        assert waiting(rollouts) == before
        assert rollouts._jobs.get("other") is None
        assert (await read(rollouts, call(0, 6, after=-1)))[-1]["number"] == 0, "from the start"

    asyncio.run(run())


def test_a_state_that_cannot_be_written_is_refused_before_and_told_after(make, monkeypatch):
    from sglang_pat import files
    from sglang_pat.server.jobs import NotSaved

    def full(data, path):
        raise OSError(28, "No space left on device")

    async def run():
        rollouts = make()
        await read(rollouts, call(0, 6))
        before = waiting(rollouts)
        with monkeypatch.context() as patched:
            patched.setattr(files, "write", full)
            with pytest.raises(NotSaved, match=r"cannot be written \(No space left on device\)"):
                await read(rollouts, call(6, 2))
            with pytest.raises(NotSaved):
                await read(rollouts, call(0, 6, job="new"))
            assert isinstance(rollouts._manager.told[-1], EndRound), "so the engine is told"
        assert waiting(rollouts) == before, "its prompts were not taken"
        assert rollouts._jobs.get("new") is None
        events = rollouts.events(call(6, 2))
        await anext(events)
        monkeypatch.setattr(files, "write", full)
        *_, last = [event async for event in events]
        assert last["saved"] is False and "No space left" in last["problem"]

    asyncio.run(run())


def test_a_state_is_encoded_and_written_outside_the_event_loop(make, monkeypatch):
    """A piece for each group: tokens of thousands of responses take seconds, and the loop is to go on meanwhile."""
    from sglang_pat import files

    write, found = files.write, []

    def watched(data, path):
        pieces = list(data)
        found.append((threading.current_thread() is threading.main_thread(), len(pieces)))
        write(pieces, path)

    monkeypatch.setattr(files, "write", watched)
    asyncio.run(read(make(), call(0, 9)))
    assert found == [(False, 3 + 9), (False, 3 + 7)], "before the round with all prompts, and after it without its two"


def test_a_client_that_is_gone_before_its_round_is_saved(make, monkeypatch):
    """Its job is not busy for ever, and its prompts are there."""

    async def run():
        rollouts = make()
        await read(rollouts, call(0, 6))
        fresh, queue = waiting(rollouts)
        begun, never = asyncio.Event(), asyncio.Event()

        async def save(name, state, ended=None):
            begun.set()
            await never.wait()

        with monkeypatch.context() as patched:
            patched.setattr(rollouts._jobs, "save", save)
            first = asyncio.ensure_future(anext(rollouts.events(call(6, 2))))
            await begun.wait()
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
        again = await read(rollouts, call(8, 0))
        assert again[0]["number"] == 1 and len(keys(again)) == 2
        assert set(keys(again)) <= {*fresh, *queue, 6, 7}

    asyncio.run(asyncio.wait_for(run(), 60))
