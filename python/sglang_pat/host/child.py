"""A process of the engine beside the ranks: set up as SGLang sets up its own."""

from __future__ import annotations

from typing import Any

import zmq
from sglang.srt.utils import configure_logger, kill_itself_when_parent_died
from sglang.srt.utils.network import get_zmq_socket

from sglang_pat.host.arguments import AdaptiveServerArgs


def set_up_child(server_args: AdaptiveServerArgs, name: str) -> None:
    """Let this process end with its parent, and put its ``name`` before its lines in the log."""
    kill_itself_when_parent_died()
    configure_logger(server_args, prefix=f" {name}")


def open_socket(context: zmq.Context, kind: int, address: str, binds: bool) -> Any:
    """A socket with SGLang's settings (buffers, no linger), bound to an address or connected to it."""
    return get_zmq_socket(context, kind, address, binds)


def import_model_files() -> None:
    """Import all of SGLang's models, which it would do on the first look-up."""
    from sglang.srt.models.registry import ModelRegistry

    ModelRegistry.get_supported_archs()
