"""What a round tells its client: events as JSON has them, and as lines of a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec

from sglang_pat.rollout.events import Event
from sglang_pat.rollout.records import Group, Judge, More, Output, Waiting
from sglang_pat.rollout.turns import Turn


def described(event: Event, number: int) -> dict[str, Any]:
    """All events but the summary, of the round of this ``number``, which an answer has to name."""
    match event:
        case Judge(group):
            return _group("judge", group) | {"number": number}
        case Group():
            return _group("group", event)
        case More(prompts):
            return {"type": "more", "prompts": prompts, "number": number}
        case Turn():
            turn = msgspec.to_builtins(event)
            del turn["prompt"]  # which the client knows
            return {"type": "turn", **turn}
        case Waiting():
            return {"type": "waiting", **msgspec.to_builtins(event)}
    raise TypeError(f"{type(event).__name__} is not told to clients")


def _group(kind: str, group: Group) -> dict[str, Any]:
    """A group with its responses."""
    responses = [{"number": sample.number, **response(sample.output)} for sample in group.kept()]
    return {"type": kind, "key": list(group.key), "deferrals": group.deferrals, "responses": responses}


def response(output: Output) -> dict[str, Any]:
    """``versions``: [weight version, tokens] of each span; None for given tokens."""
    return {
        "text": output.text, "token_ids": output.token_ids, "logprobs": output.logprobs,
        "versions": [[span.version, span.tokens] for span in output.spans], "finish_reason": output.finish_reason,
    }  # fmt: skip


async def server_sent(first: dict[str, Any], events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """``data: {…}`` lines; an error in the middle is the last of them."""
    try:
        async with aclosing(events):
            yield _line(first)
            async for event in events:
                yield _line(event)
        yield b"data: [DONE]\n\n"
    except Exception as error:  # the status line is sent, so it has to be said here
        yield _line({"type": "error", "message": str(error)})


def _line(event: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"
