"""SGLang's launch code: what it is given, and what it is told of our processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.server_args import PortArgs, ServerArgs

from sglang_pat.host.arguments import AdaptiveServerArgs
from sglang_pat.host.assign import Overlaid, assign, assigned

JOIN = "block_until_scheduler_exits"
"""Field of SGLang's ``SchedulerInitResult`` with the function that waits until all schedulers have ended."""


def make_ports(identity: str, **addresses: Any) -> PortArgs:
    """SGLang's addresses; ``identity`` names the engine."""
    return PortArgs(**addresses, decoupled_spec_ipc_config=None, instance_id=identity)


def warm_up(args: AdaptiveServerArgs, replicas: int) -> bool:
    """Warm up as SGLang's server does, with a request for each replica."""
    from sglang.srt.entrypoints import http_server

    parallel = Overlaid(http_server.get_parallel(), num_dp_ranks=replicas)
    with assigned(http_server, get_parallel=lambda: parallel):
        return http_server._execute_server_warmup(args)


# -- stock arguments that somebody else launches with ------------------------------------------------------------------

# They cannot become adaptive themselves: a record of SGLang's has no room for other fields, and stays as the user gave
# it.
_ADAPTIVE = "_pat_adaptive"
"""Attribute of stock arguments: the adaptive ones."""


def patch(engine: Any, swap: Callable[[Callable], Callable]) -> None:
    """Have SGLang's launch code decide about the adaptive arguments, and publish them, in place of the stock ones.

    Args:
        engine: SGLang's module with the launch code.
        swap: makes of a function one that is given the adaptive arguments.
    """
    assign(engine, publish=swap(engine.publish), resolve_auto_parsers=swap(engine.resolve_auto_parsers))


def find_adaptive(args: Any) -> AdaptiveServerArgs | None:
    """The adaptive arguments that ``args`` are or that stand for them; None for any other object."""
    if isinstance(args, AdaptiveServerArgs):
        return args
    return vars(args).get(_ADAPTIVE) if isinstance(args, ServerArgs) else None


def become_adaptive(args: ServerArgs, adaptive: AdaptiveServerArgs) -> None:
    """Have :func:`find_adaptive` find ``adaptive`` for stock arguments from now on."""
    vars(args)[_ADAPTIVE] = adaptive


def get_given_fields(args: ServerArgs) -> dict[str, Any]:
    """The fields of ``args`` without what SGLang chose, which it would choose otherwise for another layout."""
    return {field.name: getattr(args, field.name) for field in record_fields(type(args))}
