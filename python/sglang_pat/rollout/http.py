"""The samples of a round, as a server is asked for them over HTTP (:class:`HttpBackend`)."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Coroutine
from typing import Any, NamedTuple

import aiohttp
import msgspec

from sglang_pat.messages import BeginRound
from sglang_pat.rollout.records import Output
from sglang_pat.rollout.requests import make_output, name_round

logger = logging.getLogger(__name__)

CONNECTIONS = 4096
"""Requests that are at the server at once, of up to sixteen samples each; the others wait here."""

SPARED_FILES = 256
"""Number of files that this process may have open and keeps for others than connections."""

WHOLE = 1 << 30
"""Tokens after which a server sends what it has of a response: it is sent when it is whole."""

CALL_SECONDS = 30.0
"""Longest wait for the answer to a small call."""

LOOK_SECONDS = 10.0
"""Seconds between two looks whether the server is alive."""

UNNAMED = "default"
"""SGLang's ``weight_version`` where updates have named none."""

LOST_SECONDS = 120.0
"""A server that answers no look for so long, or an abort, is lost: so are the samples that it has."""


class EngineLost(ConnectionError):
    """A server is gone, or does not answer; ``had``: whether it had the sample, and may have died of it; ``output``:
    what it had sent of it."""

    def __init__(self, message: str, had_sample: bool, output: Output) -> None:
        super().__init__(message)
        self.had, self.output = had_sample, output


class Weights(NamedTuple):
    """The weights of a server: their ``weight_version``, and how often they were updated since its start."""

    version: str
    updates: int

    def are(self, others: Weights) -> bool:
        """Whether a server with ``others`` has the same, as far as can be known."""
        return self.version == others.version and (self.updates == others.updates or self.version != UNNAMED)

    def __str__(self) -> str:
        return f"weights {self.version!r} after {self.updates} updates"


class _SampleCall:
    """A sample that the server is asked for.

    Attributes:
        answer: SGLang's; None: aborted before it went out.  ``limit``: when it is lost.
        so_far: the last answer that was not whole.
        sent: whether it went out; ``had``: whether the server has begun to answer.
    """

    so_far: dict[str, Any] | None = None

    def __init__(self, prompt: dict[str, Any], params: dict[str, Any]) -> None:
        self.prompt, self.params = prompt, params
        self.answer: asyncio.Future[dict[str, Any] | None] = asyncio.get_running_loop().create_future()
        self.limit = asyncio.timeout(None)
        self.sent = self.had = False

    def expire(self, seconds: float) -> None:
        """Lose the call if no answer comes within ``seconds``, unless it is lost sooner."""
        due = asyncio.get_running_loop().time() + seconds
        if not self.limit.expired() and (self.limit.when() or due) >= due:
            self.limit.reschedule(due)


class HttpBackend:
    """:class:`~.requests.Backend` over HTTP, for one round; see :class:`~.client.RolloutClient`.

    Samples that are started in one turn of the event loop are one request to ``/generate``, which streams each answer
    as it comes: a request costs client and server some ten times what a sample does.
    """

    def __init__(
        self, url: str, session: aiohttp.ClientSession, tokenizer: Any, name: str, part_tokens: int = WHOLE
    ) -> None:
        self._url, self._session, self.tokenizer, self._name = url, session, tokenizer, name
        self._part = {"stream_interval": part_tokens}
        self.weights = Weights(UNNAMED, 0)
        """The server's, when the round began."""
        self._calls: dict[str, _SampleCall] = {}
        self._new: list[str] = []
        self._places = asyncio.Semaphore(count_connections())
        self._updates = self._room = 0
        self._stop_tokens: list[int] = []
        self._routed = False
        """Whether the server returns routed experts."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._told = False
        """Whether the server knows of the round."""

    async def begin_round(self, begun: BeginRound) -> None:
        server = await self._call("POST", "/pat/round", msgspec.structs.replace(begun, name=self._name))
        if "weight_updates" not in server:
            raise ValueError(f"{self._url} runs another version of sglang_pat; use the same one here and there")
        self._updates, self._room = server["weight_updates"], server["room"]
        self.weights = Weights(server["weight_version"], self._updates)
        self._stop_tokens, self._routed = server["stop_token_ids"], server["routed_experts"]
        self._told = True
        self._begin(self._watch_server())

    async def end_round(self, name: str) -> None:
        if self._told:
            await self._call("DELETE", f"/pat/round?name={self._name}")

    def count_updates(self) -> int:
        return self._updates

    def get_token_limit(self) -> int:
        return self._room

    async def generate(self, rid: str, prompt: dict[str, Any], params: dict[str, Any]) -> Output:
        """See :meth:`~.requests.Backend.generate`.

        Raises:
            ValueError: the server refuses it; its own line.
            EngineLost: it is gone, or does not answer any more.
        """
        call = self._calls[rid] = _SampleCall(prompt, name_round(params, self._name))
        if not self._new:
            asyncio.get_running_loop().call_soon(self._send)
        self._new.append(rid)
        try:
            async with call.limit:
                answer = await call.answer
        except TimeoutError:
            raise self._make_lost_error(call, f"{self._url} has not answered for {LOST_SECONDS:.0f} s") from None
        except ConnectionError as error:
            raise self._make_lost_error(call, str(error)) from None
        finally:
            del self._calls[rid]
        if answer is None:
            return Output()
        self._updates = max(self._updates, answer["meta_info"]["weight_updates"])
        return make_output(answer, params, self._stop_tokens)

    def abort(self, rid: str) -> None:
        call = self._calls.get(rid)
        if call is None or call.answer.done():
            return
        if not call.sent:
            call.answer.set_result(None)
            return
        call.expire(LOST_SECONDS)
        self._begin(self._abort(rid))

    def lose(self, error: ConnectionError) -> None:
        """Lose all samples that the server has."""
        for call in self._calls.values():
            if not call.answer.done():
                call.answer.set_exception(error)

    async def close(self) -> None:
        """End all tasks of the backend."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- inside ----------------------------------------------------------------------------------------

    def _begin(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _send(self) -> None:
        """Ask for the samples that were started in this turn of the event loop."""
        new, self._new = self._new, []
        kinds: dict[tuple[str, ...], list[str]] = {}
        for rid in new:
            if rid in self._calls:
                kinds.setdefault(tuple(self._calls[rid].prompt), []).append(rid)
        for rids in kinds.values():
            self._begin(self._ask(rids))

    async def _ask(self, rids: list[str]) -> None:
        """One request for these samples, whose prompts have the same fields."""
        async with self._places:
            calls = {rid: call for rid in rids if (call := self._calls.get(rid)) and not call.answer.done()}
            if not calls:
                return
            try:
                data = self._encode(calls)
                for call in calls.values():
                    call.sent = True
                await self._read(calls, self._session.post(self._url + "/generate", data=data))
                error: Exception = ConnectionError(f"{self._url} broke off, and did not answer")
            except Exception as caught:  # whatever it is: who waits for an answer would wait for ever
                error = caught
            for call in calls.values():
                if not call.answer.done():
                    call.answer.set_exception(error)

    def _encode(self, calls: dict[str, _SampleCall]) -> bytes:
        """The body of one request.  Raises TypeError: something in a prompt, or in the parameters, is not of JSON."""
        prompts = [call.prompt for call in calls.values()]
        body = {
            **{field: [prompt[field] for prompt in prompts] for field in prompts[0]}, "rid": [*calls],
            "sampling_params": [call.params | self._part for call in calls.values()], "return_logprob": True,
            "stream": True, "return_routed_experts": self._routed,
        }  # fmt: skip
        return msgspec.json.encode(body)

    async def _read(self, calls: dict[str, _SampleCall], request: Any) -> None:
        """The answers, as they come.  Raises as :meth:`generate`."""
        try:
            async with request as answer:
                if answer.status != 200:
                    raise ValueError(format_refusal(self._url, answer.status, await answer.read()))
                for call in calls.values():
                    call.had = True
                async for line in answer.content:
                    if not line.startswith(b"data: {"):
                        continue
                    if line.startswith(b'data: {"error"'):
                        raise ValueError(format_refusal(self._url, 400, line[6:]))
                    response = msgspec.json.decode(line[6:])
                    call = calls[response["meta_info"]["id"]]
                    if response["meta_info"]["finish_reason"] is None:
                        call.so_far = response
                    elif not call.answer.done():
                        call.answer.set_result(response)
        except (aiohttp.ClientError, OSError) as error:
            raise self._make_gone_error(error) from None

    def _make_lost_error(self, call: _SampleCall, message: str) -> EngineLost:
        output = make_output(call.so_far, call.params, self._stop_tokens) if call.so_far is not None else Output()
        return EngineLost(message, call.had, output)

    def _make_gone_error(self, error: Exception) -> ConnectionError:
        return ConnectionError(f"{self._url} is gone, or cannot be reached: {error or type(error).__name__}")

    async def _abort(self, rid: str) -> None:
        try:
            await self._call("POST", "/abort_request", {"rid": rid})
        except (ValueError, ConnectionError) as error:  # the round sends it again; closed connections abort, too
            logger.warning("an abort was not taken: %s", error)

    async def _watch_server(self) -> None:
        """A server that is stopped closes no connection: ask it something now and then."""
        now = asyncio.get_running_loop().time
        heard = now()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self._call("GET", "/pat/status")
                heard = now()
            except (ValueError, ConnectionError) as error:
                logger.warning("%s", error)
            for call in list(self._calls.values()) if now() - heard > LOST_SECONDS else ():
                call.expire(0.0)

    async def _call(self, method: str, path: str, body: Any = None) -> Any:
        """A small call.  Raises as :meth:`generate`."""
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with (
                asyncio.timeout(CALL_SECONDS),
                self._session.request(method, self._url + path, data=data) as answer,
            ):
                content = await answer.read()
        except TimeoutError:
            raise ConnectionError(f"{self._url}{path} has not answered for {CALL_SECONDS:.0f} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._make_gone_error(error) from None
        if answer.status != 200:
            raise ValueError(format_refusal(self._url, answer.status, content))
        return msgspec.json.decode(content) if content else None


def count_connections() -> int:
    """Number of requests that may be at the server at once; first this process may have as many files open as it
    can."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < CONNECTIONS + SPARED_FILES and (soft < hard or hard == resource.RLIM_INFINITY):
        most = CONNECTIONS + SPARED_FILES
        soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(CONNECTIONS, soft - SPARED_FILES))


def format_refusal(url: str, status: int, data: bytes) -> str:
    """A server's refusal, in one line."""
    try:
        message = str(msgspec.json.decode(data)["error"]["message"])  # as this server and SGLang's write it
    except (ValueError, TypeError, KeyError):
        message = data.decode(errors="replace")
    if status == 404:
        message += " (is it a server of sglang_pat.launch_server, with --adaptive-tp?)"
    return f"{url} answered {status}: {' '.join(message.split())[:400]}"
