"""The adaptive engine wherever somebody else launches SGLang: RL frameworks, ``python -m sglang.launch_server``.

:func:`attach` points SGLang's launch code at ours, in this process.  From then on server arguments with ``tp_size``
GPUs become those of an adaptive engine on as many ranks, at the moment SGLang checks them, just before it starts
anything.  The object stays the same: whoever holds it sees one engine of that many GPUs.

SGLang loads plug-ins (:mod:`sglang_pat.plugin`) as late as inside ``Engine._launch_subprocesses``: nothing that runs
before that is patched, except to remember more exactly what the user gave.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sglang_pat import settings
from sglang_pat.figures import enable_job_log

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

_AS_GIVEN, _FILLED_IN = "_pat_as_given", "_pat_filled_in"
"""On server arguments: their fields before and after SGLang chose what was left open."""

_where, _settings = "", None


def attach(given: Mapping[str, Any], where: str) -> None:
    """Launch adaptive engines with these settings from now on; again: with these instead.

    Raises:
        SGLangMismatch: another SGLang.
        ValueError: as :func:`sglang_pat.settings.parse_fields`; ``where`` they were given is in the message.
    """
    global _where, _settings
    from sglang_pat.launch.contract import check_sglang

    check_sglang()
    fields = settings.parse_fields(given, where)
    enable_job_log()
    if not is_attached():
        _patch()
    _where, _settings = where, fields


def is_attached() -> bool:
    """Whether this process launches adaptive engines."""
    return _settings is not None


def _patch() -> None:
    from sglang.srt.entrypoints import engine
    from sglang.srt.server_args import PortArgs, ServerArgs

    from sglang_pat.server.engine import AdaptiveEngine, make_private_ports
    from sglang_pat.server.tokenizer import AdaptiveTokenizerManager

    fill_in, check = ServerArgs.__post_init__, ServerArgs.check_server_args

    def remember(args: ServerArgs) -> None:
        given = _get_fields(args)
        fill_in(args)
        vars(args).update({_AS_GIVEN: given, _FILLED_IN: _get_fields(args)})

    def become_adaptive(args: ServerArgs) -> None:
        _convert(args)
        check(args)

    ServerArgs.__post_init__ = functools.wraps(fill_in)(remember)
    ServerArgs.check_server_args = functools.wraps(check)(become_adaptive)
    PortArgs.init_new = staticmethod(_choose_by_arguments(PortArgs.init_new, make_private_ports))
    engine.TokenizerManager = _choose_by_arguments(engine.TokenizerManager, AdaptiveTokenizerManager)
    stock, ours = engine.Engine, AdaptiveEngine
    stock.shutdown = _choose_by_arguments(stock.shutdown, ours.shutdown)
    for name in ("_launch_scheduler_processes", "_launch_detokenizer_subprocesses"):
        either = _choose_by_arguments(getattr(stock, name).__func__, getattr(ours, name).__func__)
        setattr(stock, name, classmethod(either))


def _choose_by_arguments(stock: Callable, ours: Callable) -> Callable:
    """``ours`` if the call is about an adaptive engine's arguments, else ``stock``."""
    from sglang_pat.launch.spec import AdaptiveServerArgs

    @functools.wraps(stock, updated=())
    def call(*args: Any, **named: Any) -> Any:
        held = getattr(args[0], "server_args", None) if args else None
        adaptive = any(isinstance(one, AdaptiveServerArgs) for one in (held, *args, *named.values()))
        return (ours if adaptive else stock)(*args, **named)

    return call


def _get_fields(args: ServerArgs) -> dict[str, Any]:
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}


def _convert(args: ServerArgs) -> None:
    """Make of stock arguments those of an adaptive engine on as many ranks, in place; no-op for adaptive ones.

    Raises:
        ValueError: as ``AdaptiveServerArgs`` and :func:`~sglang_pat.launch.spec.prepare_start`.
    """
    from sglang_pat.launch.spec import AdaptiveServerArgs, prepare_start

    if isinstance(args, AdaptiveServerArgs):
        return
    given = _get_given_fields(args)
    assert _settings is not None, "attached"
    tp, dp, own = given["tp_size"], given["dp_size"], dict(_settings)
    base = own.pop(settings.BASE_TP.name, tp if dp > 1 else settings.BASE_TP.default)
    given["tp_size"], given["dp_size"] = settings.compute_base_layout(base, tp * dp, _where)
    adaptive = prepare_start(AdaptiveServerArgs(**given, adaptive_tp=True, pat_in_a_job=True, **own))
    args.__class__ = AdaptiveServerArgs
    vars(args).clear()
    vars(args).update(vars(adaptive))
    if (http_server := sys.modules.get("sglang.srt.entrypoints.http_server")) is not None:
        from sglang_pat.server.http import add_routes

        add_routes(http_server.app)


def _get_given_fields(args: ServerArgs) -> dict[str, Any]:
    """The fields of ``args`` without what SGLang chose, which it would choose otherwise for another layout."""
    now = _get_fields(args)
    if _AS_GIVEN in vars(args):
        given, filled_in = vars(args)[_AS_GIVEN], vars(args)[_FILLED_IN]
    else:  # made before we came: what SGLang chooses for the least that can be said
        least = type(args)(model_path=args.model_path, tp_size=args.tp_size, dp_size=args.dp_size, device=args.device)
        given, filled_in = vars(least)[_AS_GIVEN], vars(least)[_FILLED_IN]
    return given | {name: value for name, value in now.items() if value != filled_in[name]}
