"""Clients of verl's whose responses say of all their tokens who generated them: in parts, and in several turns."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from sglang_pat.integrations.verl.fields import DEGREES, STEPS, STOPS, StopReasons, Turns, join_spans

_Kind = TypeVar("_Kind", Turns, StopReasons)

_parts: ContextVar[list[TokenOutput]] = ContextVar("parts")

_sessions: WeakValueDictionary[tuple[str, str], Turns | StopReasons] = WeakValueDictionary()
"""Fields by request, the same one in all turns of a response, and by name; for as long as they are in use."""


class AdaptiveClient(LLMServerClient):
    """verl's client: the extra fields of a response's first turn, which are those of the sample, grow by each turn."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], **named: Any) -> TokenOutput:
        output = await super().generate(request_id, prompt_ids=prompt_ids, **named)
        for name in (DEGREES, STEPS):
            if name in output.extra_fields:
                turns = _get_turns(Turns, request_id, name, len(prompt_ids))
                turns.add(len(prompt_ids) - turns.prompt, len(output.token_ids), output.extra_fields[name])
                output.extra_fields[name] = turns
        if STOPS in output.extra_fields:
            reasons = _get_turns(StopReasons, request_id, STOPS, len(prompt_ids))
            reasons += output.extra_fields[STOPS]
            output.extra_fields[STOPS] = reasons
        return output


def _get_turns(kind: type[_Kind], request_id: str, name: str, prompt: int) -> _Kind:
    """Field ``name`` of a response whose next turn comes after ``prompt`` tokens; a new one for a new response."""
    turns = _sessions.get((request_id, name))
    if not isinstance(turns, kind) or prompt <= turns.prompt:  # another response
        turns = _sessions[request_id, name] = kind(prompt)
    return turns


class _PartClient(LLMServerClient):
    """verl's client, which asks once for a part, and notes each: verl's own keeps only the tokens of all."""

    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        part = await super().generate(*args, **kwargs)
        _parts.get([]).append(part)
        return part


class _JoiningClient(FullyAsyncLLMServerClient, _PartClient):
    """verl's client that goes on after an abort."""

    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        parts: list[TokenOutput] = []
        _parts.set(parts)
        output = await super().generate(*args, **kwargs)
        for name in (DEGREES, STEPS):
            output.extra_fields[name] = join_spans(
                (len(part.token_ids), part.extra_fields[name]) for part in parts if name in part.extra_fields
            )
        output.extra_fields[STOPS] = [output.stop_reason]
        return output


class AdaptiveAsyncClient(AdaptiveClient, _JoiningClient):
    """A client that goes on after an abort, whose responses say it of all their parts and turns."""
