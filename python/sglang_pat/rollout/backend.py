"""What a round needs of an engine."""

from __future__ import annotations

from typing import Any, Protocol

from sglang_pat.rollout.records import Output


class Backend(Protocol):
    """An engine, in this process or behind a connection."""

    def updates(self) -> int:
        """Weight updates so far."""
        ...

    async def generate(self, rid: str, prompt: Any, params: dict[str, Any]) -> Output:
        """What was generated, without ``spans``; without ``finish_reason`` if it did not end by itself.

        Raises:
            Exception: the engine refuses the prompt, or is gone.
        """
        ...

    def abort(self, rid: str) -> None:
        """Stop it; :meth:`generate` returns what there is."""

    def text(self, token_ids: list[int]) -> str:
        """Of a response that came in pieces."""
        ...

    def room(self) -> int:
        """Tokens of a request at most, prompt and response; asked for samples of several turns only."""
        ...
