"""SGLang's ``TokenizerManager``, below ours."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sglang_pat.host.assign import Overlaid


class StockTokenizerManager(TokenizerManager):
    """SGLang's ``TokenizerManager``, with a mend that only this version needs."""

    def _wait_one_response(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        """Wait as SGLang does, for a request that may have ended before anybody begins to wait.

        SGLang sends all parts of a batch first, and waits for them then.  A short response comes back in between,
        and SGLang would look in vain for its state.
        """
        rid: Any = obj.rid
        waits: Any = Overlaid(self, rid_to_state={rid: self.rid_to_state[rid]})
        return TokenizerManager._wait_one_response(waits, obj, request)

    async def pat_update_in_session(
        self, update: Callable[..., Awaitable[tuple[Any, ...]]], obj: Any, request: Any
    ) -> tuple[Any, ...]:
        """Run SGLang's ``update`` of the weights, which needs no session."""
        return await update(obj, request)


def send_nothing() -> None:
    """What SGLang's methods that send a request return where none is sent."""


def get_weight_version(manager: TokenizerManager) -> str:
    return manager.server_args.weight_version


def dump_requests(manager: Any) -> None:
    """Write the requests of ``--crash-dump-folder``."""
    manager.dump_requests_before_crash()


# -- checks of a request's fields that only this version has -----------------------------------------------------------


def check_tokenized(req: Any) -> None:
    """Raise ValueError for what the ranks would not survive, or a switch not carry over."""


def take_params(params: dict[str, Any]) -> dict[str, Any]:
    """Take from sampling parameters those that only this version has, and return those that SGLang needs."""
    return {}
