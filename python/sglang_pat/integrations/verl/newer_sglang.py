"""What verl (0.9.1, made for SGLang 0.5.12) stumbles over with a newer SGLang, put right before verl meets it.

With the SGLang that verl asks for, both functions do nothing.
"""

from __future__ import annotations

from types import SimpleNamespace


def list_argument_fields() -> None:
    """Let verl's server list the fields of SGLang's arguments: they were a dataclass, and are a struct of msgspec's."""
    from verl.workers.rollout.sglang_rollout import async_sglang_server

    if (names := getattr(async_sglang_server.ServerArgs, "__struct_fields__", None)) is not None:
        fields = [SimpleNamespace(name=name) for name in names]
        async_sglang_server.dataclasses = SimpleNamespace(fields=lambda kind: fields)


def complete_client() -> None:
    """Let verl's client of a server be made: SGLang's base class has got abstract methods that verl never calls."""
    from verl.workers.rollout.sglang_rollout.http_server_engine import AsyncHttpServerAdapter

    AsyncHttpServerAdapter.__abstractmethods__ = frozenset()
