"""A client of verl's for responses that are generated in parts: they keep what each part says of its tokens."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from sglang_pat.integrations.verl.fields import DEGREES, STEPS, joined

_parts: ContextVar[list[TokenOutput]] = ContextVar("parts")


class _PartClient(LLMServerClient):
    """Notes each part: verl's client, which asks once for a part, keeps only the tokens of all."""

    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        part = await super().generate(*args, **kwargs)
        _parts.get([]).append(part)
        return part


class AdaptiveClient(FullyAsyncLLMServerClient, _PartClient):
    """verl's client that goes on after an abort."""

    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        parts: list[TokenOutput] = []
        _parts.set(parts)
        output = await super().generate(*args, **kwargs)
        for name in (DEGREES, STEPS):
            output.extra_fields[name] = joined(
                (len(part.token_ids), part.extra_fields[name]) for part in parts if name in part.extra_fields
            )
        return output
