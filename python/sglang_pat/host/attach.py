"""SGLang's launch code, where somebody else calls it, pointed at ours.

SGLang loads plug-ins (:mod:`sglang_pat.plugin`) as late as inside ``Engine._launch_subprocesses``: nothing that runs
before that is patched, except to remember more exactly what the user gave.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

from sglang.srt.entrypoints import engine
from sglang.srt.server_args import PortArgs, ServerArgs

from sglang_pat.host.arguments import AdaptiveServerArgs
from sglang_pat.host.assign import assign
from sglang_pat.host.engine import LaunchedEngine, make_private_ports

_AS_GIVEN, _FILLED_IN = "_pat_as_given", "_pat_filled_in"
"""Attributes of server arguments: their fields before and after SGLang chose what was left open."""


def patch_launcher(
    make_adaptive: Callable[[dict[str, Any]], AdaptiveServerArgs],
    ours: type[LaunchedEngine],
    manager: Callable[..., Any],
    add_routes: Callable[[Any], None],
) -> None:
    """Have SGLang's launch code in this process make adaptive arguments of stock ones, and launch our engine for them.

    It happens when SGLang checks the arguments, just before it starts anything.  The object stays the same.

    Args:
        make_adaptive: prepared arguments for the fields that a user gave.
        manager: the class of our TokenizerManager.
        add_routes: a function that is called with the application of SGLang's HTTP server, where it is loaded.
    """
    fill_in, check = ServerArgs.__post_init__, ServerArgs.check_server_args

    def remember(args: ServerArgs) -> None:
        given = _get_fields(args)
        fill_in(args)
        vars(args).update({_AS_GIVEN: given, _FILLED_IN: _get_fields(args)})

    def become_adaptive(args: ServerArgs) -> None:
        if not isinstance(args, AdaptiveServerArgs):
            adaptive = make_adaptive(_get_given_fields(args))
            assign(args, __class__=AdaptiveServerArgs)
            vars(args).clear()
            vars(args).update(vars(adaptive))
            if (http_server := sys.modules.get("sglang.srt.entrypoints.http_server")) is not None:
                add_routes(http_server.app)
        check(args)

    wrappers = {"__post_init__": functools.wraps(fill_in)(remember)}
    assign(ServerArgs, check_server_args=functools.wraps(check)(become_adaptive), **wrappers)
    assign(PortArgs, init_new=staticmethod(_choose_by_arguments(PortArgs.init_new, make_private_ports)))
    assign(engine, TokenizerManager=_choose_by_arguments(engine.TokenizerManager, manager))
    stock = engine.Engine
    assign(stock, shutdown=_choose_by_arguments(stock.shutdown, ours.shutdown))
    for name in ("_launch_scheduler_processes", "_launch_detokenizer_subprocesses"):
        either = _choose_by_arguments(getattr(stock, name).__func__, functools.partial(_call_ours, ours, name))
        assign(stock, **{name: classmethod(either)})


def _call_ours(ours: type[LaunchedEngine], name: str, stock: type, *args: Any, **named: Any) -> Any:
    return getattr(ours, name)(*args, **named)


def _choose_by_arguments(stock: Callable, ours: Callable) -> Callable:
    """A function that calls ``ours`` with an adaptive engine's arguments, and ``stock`` with all others."""

    @functools.wraps(stock, updated=())
    def call(*args: Any, **named: Any) -> Any:
        held = getattr(args[0], "server_args", None) if args else None
        adaptive = any(isinstance(one, AdaptiveServerArgs) for one in (held, *args, *named.values()))
        return (ours if adaptive else stock)(*args, **named)

    return call


def _get_fields(args: ServerArgs) -> dict[str, Any]:
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}


def _get_given_fields(args: ServerArgs) -> dict[str, Any]:
    """The fields of ``args`` without what SGLang chose, which it would choose otherwise for another layout."""
    now = _get_fields(args)
    if _AS_GIVEN in vars(args):
        given, filled_in = vars(args)[_AS_GIVEN], vars(args)[_FILLED_IN]
    else:  # made before we came: what SGLang chooses for the least that can be said
        least = type(args)(model_path=args.model_path, tp_size=args.tp_size, dp_size=args.dp_size, device=args.device)
        given, filled_in = vars(least)[_AS_GIVEN], vars(least)[_FILLED_IN]
    return given | {name: value for name, value in now.items() if value != filled_in[name]}
