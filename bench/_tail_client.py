"""A client of a server that gives each sample its length, for ``bench/tail_rounds.py``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

from sglang_pat.rollout.client import HttpBackend, RolloutClient
from sglang_pat.rollout.records import Output, SampleId

Lengths = Callable[[SampleId], int]


class Client(RolloutClient):
    """Args: ``lengths``: of each sample; None: they end by themselves.  Policies are told the limit only."""

    def __init__(self, url: str, lengths: Lengths | None) -> None:
        super().__init__(url)
        self._lengths = lengths

    @asynccontextmanager
    async def _connect(self) -> AsyncGenerator[HttpBackend]:
        async with super()._connect() as backend:
            if self._lengths is not None:
                backend.generate = _given(backend.generate, self._lengths)
            yield backend


def _given(generate: Callable[..., Any], lengths: Lengths) -> Callable[..., Any]:
    async def with_length(rid: str, prompt: dict[str, Any], params: dict[str, Any]) -> Output:
        length = lengths(SampleId(*map(int, rid.split("-")[-4:])))
        limit = {"pat_limit": params["max_new_tokens"]}
        return await generate(
            rid, prompt, params | {"max_new_tokens": length, "ignore_eos": True, "custom_params": limit}
        )

    return with_length
