"""The routes ``/pat/*`` of SGLang's HTTP server."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from fastapi import Request
from fastapi.responses import JSONResponse, Response

from sglang_pat import files
from sglang_pat.host.http import get_manager, needs_admin
from sglang_pat.messages import CLIENT, LEASE_SECONDS, BeginRound, ClientName, EndRound, LeaseSeconds
from sglang_pat.policies.lending import Training
from sglang_pat.server.rollout import describe_engine
from sglang_pat.server.tokenizer import ReconfigureError

MAX_BYTES = 1 << 16
"""Most bytes of a request's body."""


class _Reconfigure(msgspec.Struct, forbid_unknown_fields=True):
    """The body of ``POST /pat/reconfigure``."""

    tp: Annotated[int, msgspec.Meta(ge=1)]
    dry_run: bool = False


class _LendRanks(msgspec.Struct, forbid_unknown_fields=True):
    """The body of ``POST /pat/lend_ranks``."""

    stride: Annotated[int, msgspec.Meta(ge=2)] = 2
    client: ClientName = CLIENT
    lease_seconds: LeaseSeconds = LEASE_SECONDS


class _TakeBackRanks(msgspec.Struct, forbid_unknown_fields=True):
    """The body of ``POST /pat/take_back_ranks``, which takes back all ranks."""

    client: ClientName = CLIENT


def add_routes(app: Any) -> None:
    """Add ``/pat/*`` to SGLang's FastAPI application, under its API-key rules; once."""
    if any(getattr(route, "path", None) == "/pat/status" for route in app.routes):
        return
    app.add_api_route("/pat/status", status, methods=["GET"])
    app.add_api_route("/pat/reconfigure", reconfigure, methods=["POST"])
    app.add_api_route("/pat/lend_ranks", lend_ranks, methods=["POST"])
    app.add_api_route("/pat/take_back_ranks", take_back_ranks, methods=["POST"])
    app.add_api_route("/pat/lending", decide_lending, methods=["POST"])
    app.add_api_route("/pat/round", begin_round, methods=["POST"])
    app.add_api_route("/pat/round", end_round, methods=["DELETE"])
    app.add_api_route("/pat/schedule", schedule, methods=["GET"])
    app.add_api_route("/pat/schedule", set_schedule, methods=["POST"])


def _answer_refusals(handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Wrap a handler: what it refuses is answered with a status code and one line, 400 for bad input and 409 for not
    now.  A plain ``dict`` becomes JSON."""

    @functools.wraps(handler)
    async def answer(*args: Any, **kwargs: Any) -> Response:
        try:
            reply = await handler(*args, **kwargs)
        except ValueError as error:
            return _make_error(400, str(error))
        except ReconfigureError as error:
            return _make_error(error.code, str(error))
        return reply if isinstance(reply, Response) else JSONResponse(reply)

    return answer


async def status() -> dict:
    """Layout, candidates, load of each group, switches so far with phase times, weight version."""
    return await get_manager().pat_status()


@needs_admin
@_answer_refusals
async def reconfigure(request: Request) -> dict:
    """``{"tp": 2}``: switch to degree 2 now; 200 with the switch record when it is over.

    With ``"dry_run": true`` it only says what that would do to the requests that are alive: how many go over, with how
    many KV tokens, how many would have to wait for a decode slot, and how many tokens would find no room; and, with a
    profile, for how long nothing would be decoded (``expected_seconds``).

    400: not a body like that, or not a candidate; 409: a switch is under way; 500: aborted, the old
    layout goes on.
    """
    try:
        body = files.decode(await _read_body(request), _Reconfigure)
    except ValueError as error:
        raise ValueError(f'{error}: send {{"tp": 2}}') from None
    return await get_manager().pat_reconfigure(body.tp, body.dry_run)


@needs_admin
@_answer_refusals
async def lend_ranks(request: Request) -> dict:
    """``{"stride": 2, "client": "mine", "lease_seconds": 600}``, or no body: the first of every two ranks goes on, the
    others are lent; 200 with the record of the switch, whose ``lent`` names them.

    Others may have them back when nothing was heard of the client for ``lease_seconds``.

    400: not a body like that, or not with this stride; 409: a switch is under way, memory is released, or they are lent
    to another client; 500: aborted, nothing is lent.
    """
    body = files.decode(await _read_body(request) or b"{}", _LendRanks)
    return await get_manager().pat_lend_ranks(body.stride, body.client, body.lease_seconds)


@needs_admin
@_answer_refusals
async def take_back_ranks(request: Request) -> dict:
    """``{"client": "mine"}``, or no body: all ranks go on, whoever has them; 200 with the record of the switch, ``{}``
    if none is lent.

    400: a body with anything else in it; 409, 500: as for lending.
    """
    body = files.decode(await _read_body(request) or b"{}", _TakeBackRanks)
    return await get_manager().pat_lend_ranks(1, body.client)


@_answer_refusals
async def decide_lending(request: Request) -> dict:
    """``{"samples": 1024, "complete": 312, "ready": 210000, "seconds_per_token": 4e-5}``, fields of
    :class:`~sglang_pat.policies.lending.Training`: whether ranks should be lent now, or taken back (``move``), and why.
    ``client``: who asks, whose lease it renews.

    400: not a body like that.
    """
    values = files.decode(await _read_body(request), dict[str, Any])
    client = files.convert({"client": values.pop("client", CLIENT)}, _TakeBackRanks).client
    return await get_manager().pat_decide_lending(files.convert(values, Training), client)


@_answer_refusals
async def begin_round(request: Request) -> dict:
    """``{"requests": 64, "prompts": 8, "prompt_tokens": 500, "max_new_tokens": 4096}``: a round begins
    (:class:`~sglang_pat.messages.BeginRound`); for the requests that are sent after the answer.

    The answer says what the round's client has to know: ``weight_updates`` so far (as in ``meta_info`` of each answer),
    ``room`` for the tokens of a request, ``stop_token_ids`` of the model.  400: not a body like that.
    """
    values = files.decode(await _read_body(request), dict[str, Any])
    begun = files.convert({"lease_seconds": LEASE_SECONDS} | values, BeginRound)
    if begun.lease_seconds is None:
        begun = msgspec.structs.replace(begun, lease_seconds=LEASE_SECONDS)
    get_manager().pat_send_round(begun)
    return describe_engine(get_manager())


@_answer_refusals
async def end_round(name: str = "default") -> dict:
    """The round of this name is over; nothing happens if there is none."""
    get_manager().pat_send_round(EndRound(name=name))
    return {}


@needs_admin
@_answer_refusals
async def set_schedule(request: Request) -> dict:
    """``[{"tp": 2, "step": 40}]``: the switches from now on (``sglang_pat.coordinator.schedule``); ``[]`` for none.

    400: not such a list; 409: the policy is another one.
    """
    entries = files.decode(await _read_body(request) or b"[]", list[Any])
    return await get_manager().pat_set_schedule(entries)


@_answer_refusals
async def schedule(request: Request) -> dict:
    """Record of how the schedule went, when it is over or replaced (:class:`~sglang_pat.messages.ScheduleState`)."""
    return await get_manager().pat_get_schedule()


async def _read_body(request: Request) -> bytes:
    """Read the body.  Raises ValueError for one longer than :data:`MAX_BYTES`; no more than these are held."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BYTES:
            raise ValueError(f"the body is longer than {MAX_BYTES} bytes; send less")
    return bytes(body)


def _make_error(code: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": code}}, status_code=code)
