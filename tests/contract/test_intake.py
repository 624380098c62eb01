"""Prompts on their way into a round: other requests are served meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from .rollouts_world import call, more, read, server, waiting

pytestmark = pytest.mark.contract


class Turns:
    """Counts those of the event loop, from the time that a prompt is read to the next."""

    def __init__(self) -> None:
        self.now = 0
        self.read: list[int] = []

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """As a tokenizer does."""
        self.read.append(self.now)
        return [len(text)]

    async def count(self) -> None:
        while True:
            self.now += 1
            await asyncio.sleep(0)


@pytest.mark.parametrize("field", ["text", "input_ids"])
def test_the_event_loop_goes_on_while_prompts_come_in(tmp_path, monkeypatch, field):
    """A thousand of them take a second to tokenize, a million ids a tenth of one to read: a prompt in each turn."""
    from sglang_pat.server import intake

    decoded, prompt = intake.decoded, {"text": "abc"} if field == "text" else {"input_ids": [3]}
    first = call(0, 0, prompts=[{"key": [0, i], **prompt} for i in range(9)])
    second = more(prompts=[{"key": [0, 9 + i], **prompt} for i in range(5)])

    async def run():
        turns, rollouts = Turns(), server(tmp_path)
        rollouts._manager.tokenizer = turns
        if field == "input_ids":
            monkeypatch.setattr(intake, "decoded", lambda *given: turns.read.append(turns.now) or decoded(*given))
        counting = asyncio.ensure_future(turns.count())
        events = rollouts.events(first)
        await anext(events)
        assert len(turns.read) == len(set(turns.read)) == 9
        turns.read.clear()
        await rollouts.feed(second)
        assert len(turns.read) == len(set(turns.read)) == 5
        await events.aclose()
        await rollouts._over("default")
        counting.cancel()

    asyncio.run(run())


def test_two_calls_for_a_job_at_once(tmp_path):
    """The prompts of both come in at the same time; then one is refused, and nothing of it was taken."""
    from sglang_pat.server.jobs import Busy

    async def run():
        rollouts = server(tmp_path)
        found = await asyncio.gather(read(rollouts, call(0, 6)), read(rollouts, call(6, 6)), return_exceptions=True)
        assert sorted(type(one).__name__ for one in found) == ["Busy", "list"]
        fresh, queue = waiting(rollouts)
        taken = range(6) if isinstance(found[1], Busy) else range(6, 12)
        assert {*fresh, *queue} < set(taken)

    asyncio.run(run())
