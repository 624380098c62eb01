"""``RolloutClient`` against a server that is played: refusals, silence, broken connections, few connections."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import asynccontextmanager

import numpy as np
import pytest
from aiohttp import web

from sglang_pat.messages import BeginRound
from sglang_pat.rollout import client, http
from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.client import RolloutClient, make_socket
from sglang_pat.rollout.records import Group
from sglang_pat.rollout.rounds import WeightsChanged

from .rounds_world import admitter

pytestmark = pytest.mark.unit


class PlayedServer:
    """A response to the prompt [n, …] has n tokens, at once; one to [0, …] waits until it is aborted."""

    def __init__(self, fault: str = "") -> None:
        self.fault, self.updates, self.version = fault, 0, "default"
        self.calls: list[tuple[str, str]] = []
        self.bodies: list[dict] = []
        self.running: dict[str, asyncio.Event] = {}
        self.requests: list[int] = []
        """Requests under way, by their samples; ``most`` of them were."""
        self.most = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.calls.append((request.method, request.path))
        match request.method, request.path:
            case _ if self.fault == "other server":
                return web.json_response({"detail": "Not Found"}, status=404)
            case "POST", "/generate":
                return await self.generate(await request.json(), request)
            case "POST", "/abort_request":
                if (stop := self.running.get((await request.json())["rid"])) is not None and self.fault != "deaf":
                    stop.set()
                return web.Response()
            case "POST", "/pat/round":
                self.bodies.append(await request.json())
                if self.fault == "older":
                    return web.json_response({})
                about = {
                    "weight_updates": self.updates,
                    "weight_version": self.version,
                    "room": 100,
                    "stop_token_ids": [2],
                    "routed_experts": False,
                }
                return web.json_response(about)
            case "GET", "/pat/status" if self.fault == "silent":
                await asyncio.sleep(60)
        return web.json_response({})

    async def generate(self, body: dict, request: web.Request) -> web.StreamResponse:
        if self.fault == "refuses":
            said = {"error": {"message": "top_p is 7,\nmust be at most 1", "code": 400}}
            return web.json_response(said, status=400)
        self.most = max(self.most, len(self.requests) + 1)
        self.requests.append(len(body["rid"]))
        answer = web.StreamResponse()
        await answer.prepare(request)
        if self.fault == "breaks off":
            request.transport.close()
        if self.fault == "refuses later":
            await answer.write(b'data: {"error": {"message": "prompt 3 is too long"}}\n\n')
        else:
            ids = [prompt[0] for prompt in body["input_ids"]]
            self.running |= {rid: asyncio.Event() for rid in body["rid"]}
            await asyncio.gather(*(self.sample(answer, rid, n) for rid, n in zip(body["rid"], ids, strict=True)))
            await answer.write(b"data: [DONE]\n\n")
        self.requests.remove(len(body["rid"]))
        return answer

    @staticmethod
    def line(answer: dict) -> bytes:
        """A line of a stream."""
        return b"data: " + json.dumps(answer).encode() + b"\n\n"

    async def sample(self, answer: web.StreamResponse, rid: str, tokens: int) -> None:
        def line(ids: list[int], reason: str | None) -> bytes:
            meta = {
                "id": rid, "finish_reason": None if reason is None else {"type": reason},
                "weight_updates": self.updates, "output_token_logprobs": [[-1.0, 7, None]] * len(ids),
            }  # fmt: skip
            return self.line({"output_ids": ids, "text": "words", "meta_info": meta})

        await answer.write(line([7], None))  # the first token
        await asyncio.sleep(0.001)
        if not tokens:
            await self.running[rid].wait()
        stop = self.running.pop(rid)
        if self.fault == "updates":
            self.updates += 1
        await answer.write(line([7] * tokens, "abort" if stop.is_set() else "stop"))


@asynccontextmanager
async def serve(server: PlayedServer):
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def play(server: PlayedServer, mine: Admitter, params: dict | None = None, **named) -> list:
    async def run() -> list:
        async with serve(server) as url:
            given = {"max_new_tokens": 50} | (params or {})
            events = RolloutClient(url, name="mine").async_rollout(mine, given, 0, **named)
            return [event async for event in events]

    return asyncio.run(asyncio.wait_for(run(), 30))


def test_a_round_and_what_is_left_of_it():
    server, mine = PlayedServer(), admitter(3, 4, 0)
    *groups, summary = play(server, mine)
    assert [sample.output.token_ids for group in groups for sample in group.list_kept()] == [[7] * 3] * 2 + [
        [7] * 4
    ] * 2
    assert groups[0].list_kept()[0].output.logprobs == [-1.0] * 3 and groups[0].list_kept()[0].output.text == "words"
    assert summary.deferred == 1 and not server.running
    assert server.bodies[0]["name"] == "mine" and server.bodies[0]["requests"] == 6
    assert server.calls[0] == ("POST", "/pat/round") and server.calls[-1] == ("DELETE", "/pat/round")


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        ("refuses", ValueError, "answered 400: top_p is 7, must be at most 1"),
        ("refuses later", ValueError, "answered 400: prompt 3 is too long"),
        ("breaks off", ConnectionError, "is gone, or cannot be reached"),
        ("other server", ValueError, "answered 404: .* with --adaptive-tp"),
        ("older", ValueError, "runs another version of sglang_pat"),
        ("updates", WeightsChanged, "weights were updated"),
    ],
)
def test_faults_end_the_round_in_one_line_and_nothing_is_lost(fault, error, said):
    server, mine = PlayedServer(fault), admitter(3, 3, 3)
    with pytest.raises(error, match=said) as caught:
        play(server, mine)
    assert "\n" not in str(caught.value)
    assert len(mine.state.fresh) == 3 and mine.state.round is None


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ({"input_ids": [np.int64(3)]}, {}),
        ({"input_ids": np.array([3])}, {}),
        ({"input_ids": [3]}, {"temperature": np.float32(0.5)}),
        ([3], {}),
    ],
    ids=["tokens", "array", "parameter", "no fields"],
)
def test_what_cannot_be_sent_ends_the_round(prompt, params):
    mine = admitter(end=False)
    mine.feed([((0, index), prompt) for index in range(2)], end_of=0)
    with pytest.raises((TypeError, LookupError)):
        play(PlayedServer(), mine, params)
    assert len(mine.state.fresh) == 2 and mine.state.round is None


def test_no_server():
    mine = admitter(3, 3)
    with pytest.raises(ConnectionError, match="http://127.0.0.1:1 is gone, or cannot be reached"):
        next(RolloutClient("http://127.0.0.1:1/").rollout(mine, {"max_new_tokens": 5}, 0))
    assert len(mine.state.fresh) == 2


@pytest.mark.parametrize("fault", ["silent", "deaf"])
def test_nobody_waits_for_ever(fault, monkeypatch):
    """All samples of a server that is stopped, or does not do what it says, are lost after a while."""
    for name, seconds in (("LOOK_SECONDS", 0.02), ("LOST_SECONDS", 0.2), ("CALL_SECONDS", 0.1)):
        monkeypatch.setattr(http, name, seconds)
    lengths = (0, 0) if fault == "silent" else (3, 3, 0)
    mine = admitter(*lengths)
    if fault == "silent":
        with pytest.raises(ConnectionError, match="has not answered for 0 s"):
            play(PlayedServer(fault), mine)
        assert len(mine.state.fresh) == 2
    else:  # the batch is there, and what was to be aborted is not known to be out
        with pytest.raises(ConnectionError, match="has not answered"):
            play(PlayedServer(fault), mine)
        assert len(mine.state.fresh) == 3


@pytest.mark.parametrize("leave", [False, True])
async def test_samples_wait_here_for_a_connection(leave, monkeypatch):
    """Samples that are started together go in one request."""
    monkeypatch.setattr(http, "CONNECTIONS", 2)

    server, mine = PlayedServer(), admitter(*[0 if leave else 3] * 40, num_prompts=40, eta_prompts=1.0)
    async with serve(server) as url:
        events = RolloutClient(url).async_rollout(mine, {"max_new_tokens": 50}, 0)
        if leave:
            first = asyncio.ensure_future(anext(events))
            while len(server.requests) < 2 or len(server.running) < sum(server.requests):
                await asyncio.sleep(0.01)
            assert sum(server.requests) < 80
            first.cancel()
            await asyncio.wait([first])
            assert sum(path == "/generate" for _, path in server.calls) == 2
        else:
            assert sum(isinstance(event, Group) for event in [event async for event in events]) == 40
            assert sum(path == "/generate" for _, path in server.calls) <= 5
        await events.aclose()
    assert server.most <= 2 and not server.running


@pytest.mark.parametrize("turns", range(8))
async def test_an_abort_in_any_turn_of_a_samples_start_is_no_error(turns):
    """The answer is empty, or what there was: before it goes out, while it does, and after."""
    async with serve(PlayedServer()) as url, RolloutClient(url)._connect() as backend:
        await backend.begin_round(BeginRound())
        asked = asyncio.ensure_future(backend.generate("one", {"input_ids": [3]}, {"max_new_tokens": 50}))
        for _ in range(turns):
            await asyncio.sleep(0)
        backend.abort("one")
        assert (await asked).token_ids in ([], [7] * 3)


@pytest.mark.parametrize("servers", [1, 2])
def test_only_connections_to_several_servers_break_with_their_machine(monkeypatch, servers):
    """The kernel finds out within ten seconds that the other machine of a connection has gone."""
    made: list[list[int]] = []

    def make(address):
        sock = make_socket(address)
        made.append([sock.getsockopt(socket.IPPROTO_TCP, option) for option in client.KEEPALIVE])
        return sock

    monkeypatch.setattr(client, "make_socket", make)

    async def run() -> None:
        async with serve(PlayedServer()) as one, serve(PlayedServer()) as other:
            events = RolloutClient([one, other][:servers]).async_rollout(admitter(3, 4, 3), {"max_new_tokens": 50}, 0)
            assert len([event async for event in events]) == 3

    asyncio.run(run())
    assert made == [[*client.KEEPALIVE.values()]] * len(made) and bool(made) == (servers > 1)
    idle, interval, count, unanswered = client.KEEPALIVE.values()
    assert idle + interval * count == unanswered // 1000 == 10
