"""Rounds in the server on an engine that is played: what they ask for, wait for, and plan."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from sglang_pat.messages import EndRound
from sglang_pat.rollout import events as round_events
from sglang_pat.rollout import rounds

from .rollouts_world import call, keys, more, read, server, waiting

pytestmark = pytest.mark.contract


@pytest.fixture
def make(tmp_path):
    return partial(server, tmp_path)


def test_the_engine_is_told_of_each_round(make):
    """How much will come, from the first sample on."""

    async def run():
        rollouts = make()
        await read(rollouts, call(0, 6))
        await read(rollouts, call(6, 3))
        await read(rollouts, call(9, 6, job="other", mode="partial"))
        return rollouts._manager.told

    told = asyncio.run(run())
    begun, ended = told[::2], told[1::2]
    assert [type(one) for one in ended] == [EndRound] * 3
    assert [one.name for one in begun] == [one.name for one in ended] and len({one.name for one in begun}) == 3
    assert [(one.requests, one.prompts) for one in begun] == [(3, 3), (3, 3), (None, None)]
    assert {one.max_new_tokens for one in begun} == {100}


@pytest.mark.parametrize("left", [0, 1, 3], ids="at events {}".format)
def test_it_is_told_of_the_end_of_a_round_that_its_client_leaves(make, left):
    async def run():
        rollouts = make()
        events = rollouts.events(call(0, 6))
        for _ in range(left + 1):
            await anext(events)
        await events.aclose()
        await rollouts._over("default")
        return rollouts._manager.told

    begun, ended = asyncio.run(run())
    assert ended == EndRound(name=begun.name)


def test_prompts_that_a_round_asks_for(make):
    """All of the first ones are useless: it asks, gets others, and the batch is full."""
    from sglang_pat.server.bodies import Verdict

    async def run():
        rollouts, given, found = make(), 6, []
        with pytest.raises(ValueError, match="job is 'default', which has no round"):
            await rollouts.feed(more())
        async for event in rollouts.events(call(0, 6, filter_groups=True)):
            found.append(event)
            if event["type"] == "judge":
                rollouts.judge(Verdict(key=tuple(event["key"]), number=event["number"], keep=event["key"][1] > 5))
            elif event["type"] == "more":
                if given == 6:  # and the round cannot be over
                    with pytest.raises(ValueError, match="was given before"):
                        await rollouts.feed(more(5, end_of_epoch=0))
                given += event["prompts"] * await rollouts.feed(more(*range(given, given + event["prompts"])))
        assert given > 6
        assert found[-1]["returned"] == 2 and min(keys(found)) > 5
        assert not await rollouts.feed(more(999)), "the round is over"

    asyncio.run(run())


def test_a_round_says_what_it_waits_for(make, monkeypatch):
    """No verdict, and no prompts: it says so; without prompts it ends at last with what it has."""
    from sglang_pat.server.bodies import Verdict

    monkeypatch.setattr(round_events, "WAITING_SECONDS", 0.05)

    async def run():
        rollouts, judged, found = make(), [], []
        async for event in rollouts.events(call(0, 2, filter_groups=True, eta_prompts=1.0)):
            found.append(event)
            if event["type"] == "judge":
                judged.append(tuple(event["key"]))
            elif event["type"] == "waiting" and event["judging"]:
                for key in judged:
                    rollouts.judge(Verdict(key=key, number=0, keep=key == judged[0]))
                judged = []
        told = [event for event in found if event["type"] == "waiting"]
        assert next(event for event in told if event["judging"])["running"] == 0
        assert [event["prompts"] > 0 for event in told[-rounds.PROMPTS_PATIENCE :]] == [True] * rounds.PROMPTS_PATIENCE
        assert found[-1]["returned"] == 1

    asyncio.run(run())


def test_a_verdict_that_is_late(make):
    from sglang_pat.server.bodies import Verdict

    async def run():
        rollouts, judged = make(), []
        async for event in rollouts.events(call(0, 3, lengths=(3, 3, 3), filter_groups=True)):
            if event["type"] != "judge":
                continue
            judged.append(tuple(event["key"]))
            for key in judged[:2] if len(judged) == 3 else ():
                assert rollouts.judge(Verdict(key=key, number=0, keep=True))
        assert not rollouts.judge(Verdict(key=judged[2], number=0, keep=False)), "it did not count"
        assert waiting(rollouts)[1] == [judged[2][1]]
        with pytest.raises(ValueError, match="key is"):
            rollouts.judge(Verdict(key=(0, 77), number=0, keep=False))

    asyncio.run(run())


def test_a_verdict_of_the_last_round(make):
    """The next one asks about the same prompt, but other responses to it."""
    from sglang_pat.server.bodies import Verdict

    async def run():
        rollouts, late = make(), None
        for number, (first, new) in enumerate([(0, 3), (3, 1)]):
            async for event in rollouts.events(call(first, new, lengths=(3, 3, 3), filter_groups=True)):
                if event["type"] != "judge":
                    continue
                key = tuple(event["key"])
                if key == late:
                    assert not rollouts.judge(Verdict(key=key, number=0, keep=False)), "of the round before"
                elif number == 0 and key == (0, 0):
                    late = key
                    continue
                assert rollouts.judge(Verdict(key=key, number=number, keep=True))
                if key == late:
                    return
        raise AssertionError("the prompt did not come again")

    asyncio.run(run())
