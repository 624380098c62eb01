"""SGLang's HTTP server, as our routes use it: its TokenizerManager and its administrator's key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.entrypoints import http_server
from sglang.srt.utils.auth import AuthLevel, auth_level


def get_manager() -> Any:
    """The TokenizerManager behind the server of this process."""
    return http_server.get_global_state().tokenizer_manager


def needs_admin(handler: Callable) -> Callable:
    """Let ``handler`` answer only with the administrator's key, if the server has one."""
    return auth_level(AuthLevel.ADMIN_OPTIONAL)(handler)
