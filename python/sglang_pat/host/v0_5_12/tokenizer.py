"""SGLang's ``TokenizerManager``, below ours."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from sglang.srt.managers.tokenizer_manager import TokenizerManager


class StockTokenizerManager(TokenizerManager):
    """SGLang's ``TokenizerManager``, with a mend that only this version needs."""

    def _wait_one_response(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        """Wait as SGLang does, for a request that may have ended before anybody begins to wait.

        SGLang sends all parts of a batch first, and waits for them then.  A short response comes back in between,
        and SGLang would look in vain for its state.
        """
        rid: Any = obj.rid
        waits: Any = _Knowing(self, {rid: self.rid_to_state[rid]})
        return TokenizerManager._wait_one_response(waits, obj, request)

    async def pat_update_in_session(
        self, update: Callable[..., Awaitable[tuple[Any, ...]]], obj: Any, request: Any
    ) -> tuple[Any, ...]:
        """Run SGLang's ``update`` of the weights, which needs no session."""
        return await update(obj, request)


class _Knowing:
    """A manager that knows of these requests only."""

    def __init__(self, manager: TokenizerManager, rid_to_state: dict[str, Any]) -> None:
        self._manager = manager
        self.rid_to_state = rid_to_state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


def send_nothing() -> None:
    """What SGLang's methods that send a request return where none is sent."""


def get_weight_version(manager: TokenizerManager) -> str:
    """The version that clients have given to the weights in force."""
    return manager.server_args.weight_version
