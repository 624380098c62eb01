"""``RolloutClient`` on several servers that are played: one that dies, comes back, or has other weights."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack

import pytest
from aiohttp import web

from sglang_pat.messages import GENERATED_PARAM, BeginRound
from sglang_pat.rollout import fleet, http
from sglang_pat.rollout.client import RolloutClient
from sglang_pat.rollout.fleet import FleetBackend, Losses
from sglang_pat.rollout.http import Weights
from sglang_pat.rollout.records import Output

from .rounds_world import admitter
from .test_rollout_client import PlayedServer, serve

pytestmark = pytest.mark.unit


class Mortal(PlayedServer):
    """Generates the tokens 1, 2, … of a response of n tokens, where its prompt is [n], or [n, 1, …] when it goes on.

    Args:
        dies_after: tokens of a response after which it dies; -1: before the first one; None: never.
        returns: number of calls that it does not answer before it is there again.
    """

    def __init__(self, dies_after: int | None = None, returns: int = 1 << 30) -> None:
        super().__init__()
        self.dies_after, self.silent, self.is_dead = dies_after, returns, False
        self.asked: list[tuple[list[int], dict]] = []

    async def answer(self, request: web.Request) -> web.Response:
        if self.is_dead and self.silent:
            self.silent -= 1
            request.transport.close()
            return web.Response()
        return await super().answer(request)

    async def generate(self, body: dict, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        for rid, prompt, params in zip(body["rid"], body["input_ids"], body["sampling_params"], strict=True):
            self.asked.append((prompt, params))
            known, ids = len(prompt) - 1, []
            for token in range(known + 1, prompt[0] + 1):
                if self.dies_after is not None and not self.is_dead and token > max(self.dies_after, 0):
                    self.is_dead = True
                    request.transport.close()
                    return answer
                ids.append(token)
                is_last = len(ids) == params["max_new_tokens"] or token == prompt[0]
                meta = {
                    "id": rid, "finish_reason": {"type": "stop"} if is_last else None, "weight_updates": self.updates,
                    "output_token_logprobs": [[-float(t), t, None] for t in ids],
                }  # fmt: skip
                await answer.write(self.line({"output_ids": ids, "text": f"{len(ids)} words", "meta_info": meta}))
                await asyncio.sleep(0)
        return answer


class Tokenizer:
    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "-".join(map(str, ids))


def play(servers: list[PlayedServer], mine, params: dict | None = None, losses: list | None = None, **named) -> list:
    """Events of a round; the client's losses are added to ``losses``."""

    async def run() -> list:
        async with AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(serve(server)) for server in servers]
            client = RolloutClient(urls, Tokenizer())
            if losses is not None:
                losses.append(client.losses)
            events = client.async_rollout(mine, {"max_new_tokens": 50} | (params or {}), 0, **named)
            return [event async for event in events]

    return asyncio.run(asyncio.wait_for(run(), 30))


def list_outputs(groups) -> list:
    return [sample.output for group in groups for sample in group.list_kept()]


@pytest.mark.parametrize("dies_after", [-1, 1, 4])
def test_a_server_dies_and_its_samples_go_on_elsewhere_from_their_tokens(dies_after):
    servers, mine, losses = [Mortal(dies_after), Mortal()], admitter(*[9] * 8), []
    *groups, summary = play(servers, mine, losses=losses)
    outputs = list_outputs(groups)
    assert [output.token_ids for output in outputs] == [list(range(1, 10))] * len(outputs) and not summary.cancelled
    assert all(output.logprobs == [-float(token) for token in output.token_ids] for output in outputs)
    assert {output.finish_reason for output in outputs} == {"stop"}
    assert all([span.tokens for span in output.spans] == [9] for output in outputs)
    assert servers[0].is_dead and mine.state.round is None
    moved = [(prompt, params) for prompt, params in servers[1].asked if len(prompt) > 1]
    assert bool(moved) == (dies_after > 0)
    assert losses[0].servers == 1 and losses[0].samples >= len(moved)
    assert losses[0].tokens == sum(len(prompt) - 1 for prompt, _ in moved)
    for prompt, params in moved:
        assert len(prompt) - 1 == dies_after and params["max_new_tokens"] == 50 - dies_after
        assert params["custom_params"][GENERATED_PARAM] == dies_after
    texts = {output.text for output in outputs}
    assert texts <= {"9 words", "-".join(map(str, range(1, 10)))}, "what came in two parts is decoded anew"


def test_what_looks_back_at_the_whole_response_is_generated_anew():
    servers, mine = [Mortal(4), Mortal()], admitter(*[9] * 4)
    *groups, _ = play(servers, mine, {"stop": ["end"]})
    assert all(output.token_ids == list(range(1, 10)) for output in list_outputs(groups))
    assert all(len(prompt) == 1 for prompt, _ in servers[1].asked)


def test_a_response_whose_end_was_not_said_ends_at_its_last_token():
    """The server dies after token 2, which ends a response of this model."""
    *groups, _ = play([Mortal(2), Mortal()], admitter(*[9] * 4))
    lengths = {(len(output.token_ids), output.finish_reason) for output in list_outputs(groups)}
    assert lengths == {(2, "stop"), (9, "stop")}


def test_all_servers_die():
    mine = admitter(*[9] * 4)
    with pytest.raises(ConnectionError, match="no server is left; .*:.*; .*:.*") as caught:
        play([Mortal(3), Mortal(5)], mine)
    assert "\n" not in str(caught.value)
    assert len(mine.state.fresh) == 4 and mine.state.round is None, "nothing is lost"


def test_a_sample_that_kills_is_not_tried_on_a_third_server():
    servers = [Mortal(-1), Mortal(-1), Mortal(-1), Mortal()]
    with pytest.raises(ConnectionError, match="2 servers were lost while they had .*, 2 of them before its first"):
        play(servers, admitter(9, num_prompts=1, eta_prompts=1))
    assert sum(server.is_dead for server in servers) == 2


@pytest.mark.parametrize("had", [False, True], ids=["it waited here", "the server had it"])
def test_a_server_that_had_not_got_a_sample_did_not_die_of_it(had):
    async def run() -> None:
        server = PlayedServer()
        async with serve(server) as url, RolloutClient(url)._connect() as backend:
            work = asyncio.ensure_future(backend.generate("r-0-0-0-0", {"input_ids": [0]}, {"max_new_tokens": 5}))
            await asyncio.sleep(0)
            while had and not backend._calls["r-0-0-0-0"].had:
                await asyncio.sleep(0.001)
            backend.lose(ConnectionError("gone"))
            with pytest.raises(http.EngineLost, match="gone") as caught:
                await work
            assert caught.value.had == had

    asyncio.run(asyncio.wait_for(run(), 30))


async def test_a_server_that_cannot_be_reached_did_not_die_of_a_sample():
    """Two servers that are gone at once, with their node, cost no round."""
    async with RolloutClient("http://127.0.0.1:1")._connect() as backend:
        with pytest.raises(http.EngineLost, match="cannot be reached") as caught:
            await backend.generate("r-0-0-0-0", {"input_ids": [0]}, {"max_new_tokens": 5})
        assert not caught.value.had


def test_a_server_answers_again(monkeypatch, caplog):
    monkeypatch.setattr(fleet, "LOOK_SECONDS", 0.02)
    back = Mortal(3, returns=1)
    caplog.set_level(logging.WARNING)

    class Slow(Mortal):
        async def generate(self, body, request):
            while back.is_dead and "answers again" not in caplog.text:
                await asyncio.sleep(0.01)
            return await super().generate(body, request)

    *groups, _ = play([back, Slow()], admitter(*[9] * 40))
    assert all(output.token_ids == list(range(1, 10)) for output in list_outputs(groups))
    assert "is lost, its samples go on elsewhere" in caplog.text and "answers again, and gets samples" in caplog.text


def test_a_server_with_other_weights_gets_nothing(caplog):
    servers = [Mortal(), Mortal()]
    servers[0].updates = 5
    *groups, _ = play(servers, admitter(9, 9))
    assert len(list_outputs(groups)) == 4 and not servers[1].asked
    (line,) = [record.getMessage() for record in caplog.records if record.name == fleet.__name__]
    assert "gets no samples of this round: it has weights 'default' after 0 updates, others have weights" in line


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (("default", 3), ("default", 3), True), (("default", 0), ("default", 3), False),
        (("step-5", 1), ("step-5", 5), True), (("step-4", 5), ("step-5", 5), False),
        (("default", 5), ("step-5", 5), False),
    ],
)  # fmt: skip
def test_which_weights_are_the_same(one, other, same):
    assert Weights(*one).are(Weights(*other)) == Weights(*other).are(Weights(*one)) == same


class Told:
    """A server's backend: ``told`` of the begin and the end of a round; ``answers``: when, or with which error."""

    weights = Weights("default", 0)

    def __init__(self, url: str, told: list[str], answers: asyncio.Event | Exception | None = None) -> None:
        self._url, self._told, self._answers = url, told, answers

    async def begin_round(self, begun) -> None:
        if isinstance(self._answers, Exception):
            raise self._answers
        if self._answers is not None:
            await self._answers.wait()
        self._told.append(f"begins at {self._url}")

    async def end_round(self, name) -> None:
        self._told.append(f"ends at {self._url}")

    def count_updates(self) -> int:
        return 0

    async def generate(self, rid, prompt, params):
        raise http.EngineLost(f"{self._url} is gone", True, Output())

    def lose(self, error) -> None: ...
    async def close(self) -> None: ...


async def test_a_refusal_waits_for_the_other_servers_which_are_told_of_the_end():
    answers, told = asyncio.Event(), []
    kinds = {"a": ValueError("not ready"), "b": answers}
    backend = FleetBackend("ab", lambda url: Told(url, told, kinds[url]), None, Losses())
    begins = asyncio.ensure_future(backend.begin_round(BeginRound()))
    for _ in range(5):
        await asyncio.sleep(0)
    answers.set()
    with pytest.raises(ValueError, match="not ready"):
        await begins
    await backend.end_round("")
    await backend.close()
    assert told == ["begins at b", "ends at b"]


async def test_when_no_server_is_left():
    backend = FleetBackend("a", lambda url: Told(url, []), None, Losses())
    await backend.begin_round(BeginRound())
    for _ in range(2):  # the first sample loses it, the second never had one
        with pytest.raises(ConnectionError, match="no server is left; a is gone"):
            await backend.generate("r-0-0-0-0", {"input_ids": [1]}, {"max_new_tokens": 5})
    with pytest.raises(ConnectionError, match="no server is left; a is gone"):
        backend.get_token_limit()
    await backend.close()


async def test_a_server_that_answers_after_the_end_is_told_of_no_round(monkeypatch):
    monkeypatch.setattr(fleet, "LOOK_SECONDS", 0)
    told = []
    backend = FleetBackend("a", lambda url: Told(url, told), None, Losses())
    await backend.begin_round(BeginRound())
    with pytest.raises(ConnectionError):
        await backend.generate("r-0-0-0-0", {"input_ids": [1]}, {"max_new_tokens": 5})
    await backend.end_round("")
    for _ in range(5):  # rewards are waited for
        await asyncio.sleep(0)
    assert told == ["begins at a"]
    await backend.close()


@pytest.mark.parametrize("url", [[], ["http://a:1", "http://a:1/"]])
def test_no_address_or_one_twice(url):
    with pytest.raises(ValueError, match="must be an address, or several different ones"):
        RolloutClient(url)


def test_servers_join_and_leave_between_rounds():
    servers = [Mortal(), Mortal()]
    mine = admitter(*[3] * 6, num_prompts=2, num_responses=4, eta_prompts=1, end=False)

    async def run() -> list[list[int]]:
        asked = []
        async with AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(serve(server)) for server in servers]
            client = RolloutClient(urls[0], Tokenizer())
            for number, now in enumerate([urls[:1], urls, urls[1:]]):
                client.urls = now
                before = [len(server.asked) for server in servers]
                async for _ in client.async_rollout(mine, {"max_new_tokens": 50}, number):
                    pass
                asked.append([len(server.asked) - more for server, more in zip(servers, before, strict=True)])
            with pytest.raises(ValueError, match="must be an address, or several different ones"):
                client.urls = []
            assert list(client.urls) == urls[1:]
        return asked

    first, all_, last = asyncio.run(asyncio.wait_for(run(), 30))
    assert first == [8, 0] and all_ == [4, 4] and last == [0, 8]
