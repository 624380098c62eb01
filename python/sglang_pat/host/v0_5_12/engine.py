"""SGLang's launch code: what it is given, and what it is told of our processes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sglang.srt.server_args import PortArgs, ServerArgs

from sglang_pat.host.arguments import AdaptiveServerArgs
from sglang_pat.host.assign import assign
from sglang_pat.host.v0_5_12.arguments import get_fields, make_view

JOIN = "wait_for_completion"
"""Field of SGLang's ``SchedulerInitResult`` with the function that waits until all schedulers have ended."""


def make_ports(identity: str, **addresses: Any) -> PortArgs:
    """SGLang's addresses; ``identity`` names the engine."""
    return PortArgs(**addresses)


def warm_up(args: AdaptiveServerArgs, replicas: int) -> bool:
    """Warm up as SGLang's server does, with a request for each replica."""
    from sglang.srt.entrypoints import http_server

    return http_server._execute_server_warmup(make_view(args, dp_size=replicas))


# -- stock arguments that somebody else launches with ------------------------------------------------------------------

_AS_GIVEN, _FILLED_IN = "_pat_as_given", "_pat_filled_in"
"""Attributes of server arguments: their fields before and after SGLang chose what was left open."""


def patch(engine: Any, swap: Callable[[Callable], Callable]) -> None:
    """Have arguments remember what the user gave, when SGLang fills in the rest."""
    fill_in = ServerArgs.__post_init__

    @functools.wraps(fill_in)
    def remember(args: ServerArgs) -> None:
        fields = get_fields(args)
        fill_in(args)
        vars(args).update({_AS_GIVEN: fields, _FILLED_IN: get_fields(args)})

    assign(ServerArgs, __post_init__=remember)


def find_adaptive(args: Any) -> AdaptiveServerArgs | None:
    """The adaptive arguments that ``args`` are; None for any other object."""
    return args if isinstance(args, AdaptiveServerArgs) else None


def become_adaptive(args: ServerArgs, adaptive: AdaptiveServerArgs) -> None:
    """Have :func:`find_adaptive` find ``adaptive`` for stock arguments from now on."""
    assign(args, __class__=AdaptiveServerArgs)
    vars(args).clear()
    vars(args).update(vars(adaptive))


def get_given_fields(args: ServerArgs) -> dict[str, Any]:
    """The fields of ``args`` without what SGLang chose, which it would choose otherwise for another layout."""
    now = get_fields(args)
    if _AS_GIVEN in vars(args):
        fields, filled_in = vars(args)[_AS_GIVEN], vars(args)[_FILLED_IN]
    else:  # made before we came: what SGLang chooses for the least that can be said
        least = type(args)(model_path=args.model_path, tp_size=args.tp_size, dp_size=args.dp_size, device=args.device)
        fields, filled_in = vars(least)[_AS_GIVEN], vars(least)[_FILLED_IN]
    return fields | {name: value for name, value in now.items() if value != filled_in[name]}
