"""SGLang's launch code, where somebody else calls it, pointed at ours.

SGLang loads plug-ins (:mod:`sglang_pat.plugin`) as late as inside ``Engine._launch_subprocesses``: nothing that runs
before that is patched, except to remember more exactly what the user gave.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from sglang.srt.entrypoints import engine
from sglang.srt.server_args import PortArgs, ServerArgs

from sglang_pat.host import adapter
from sglang_pat.host.arguments import AdaptiveServerArgs
from sglang_pat.host.assign import assign
from sglang_pat.host.engine import LaunchedEngine, make_private_ports


def patch_launcher(
    make_adaptive: Callable[[dict[str, Any]], AdaptiveServerArgs],
    ours: type[LaunchedEngine],
    manager: Callable[..., Any],
    add_routes: Callable[[Any], None],
) -> None:
    """Have SGLang's launch code in this process make adaptive arguments of stock ones, and launch our engine for them.

    It happens when SGLang checks the arguments, just before it starts anything.

    Args:
        make_adaptive: prepared arguments for the fields that a user gave.
        manager: the class of our TokenizerManager.
        add_routes: a function that is called with the application of SGLang's HTTP server, where it is loaded.
    """
    check = ServerArgs.check_server_args

    def become_adaptive(args: ServerArgs) -> None:
        if adapter.engine.find_adaptive(args) is None:
            adapter.engine.become_adaptive(args, make_adaptive(adapter.engine.get_given_fields(args)))
            if (http_server := sys.modules.get("sglang.srt.entrypoints.http_server")) is not None:
                add_routes(http_server.app)
        check(adapter.engine.find_adaptive(args))

    adapter.engine.patch(engine, lambda function: _choose_by_arguments(function, function))
    assign(ServerArgs, check_server_args=functools.wraps(check)(become_adaptive))
    assign(PortArgs, init_new=staticmethod(_choose_by_arguments(PortArgs.init_new, make_private_ports)))
    assign(engine, TokenizerManager=_choose_class(engine.TokenizerManager, manager))
    stock = engine.Engine
    assign(stock, shutdown=_choose_by_arguments(stock.shutdown, ours.shutdown))
    for name in ("_launch_scheduler_processes", "_launch_detokenizer_subprocesses"):
        either = _choose_by_arguments(getattr(stock, name).__func__, functools.partial(_call_ours, ours, name))
        assign(stock, **{name: classmethod(either)})


def _call_ours(ours: type[LaunchedEngine], name: str, stock: type, *args: Any, **named: Any) -> Any:
    return getattr(ours, name)(*args, **named)


def _choose_by_arguments(stock: Callable, ours: Callable) -> Callable:
    """A function that calls ``ours`` with an adaptive engine's arguments, and ``stock`` with all others."""

    def swap(one: Any) -> Any:
        arguments = adapter.engine.find_adaptive(one)
        return one if arguments is None else arguments

    @functools.wraps(stock, updated=())
    def call(*args: Any, **named: Any) -> Any:
        args, named = tuple(map(swap, args)), {name: swap(one) for name, one in named.items()}
        held = swap(getattr(args[0], "server_args", None)) if args else None
        adaptive = any(isinstance(one, AdaptiveServerArgs) for one in (held, *args, *named.values()))
        return (ours if adaptive else stock)(*args, **named)

    return call


def _choose_class(stock: type, ours: Callable) -> type:
    """A class to be called as :func:`_choose_by_arguments` says; its objects are those of ``stock``."""

    class Either(type):
        __call__ = staticmethod(_choose_by_arguments(stock, ours))

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, stock)

    return Either(stock.__name__, (), {})
