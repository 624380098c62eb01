"""Stock arguments become adaptive in place: whoever holds them sees the engine's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from sglang.srt.server_args import ServerArgs

from sglang_pat.host.arguments import AdaptiveServerArgs
from sglang_pat.host.assign import assign

_AS_GIVEN, _FILLED_IN = "_pat_as_given", "_pat_filled_in"
"""Attributes of server arguments: their fields before and after SGLang chose what was left open."""


def patch(engine: Any, swap: Callable[[Callable], Callable]) -> None:
    """Have arguments remember what the user gave, when SGLang fills in the rest."""
    fill_in = ServerArgs.__post_init__

    def remember(args: ServerArgs) -> None:
        given = _get_fields(args)
        fill_in(args)
        vars(args).update({_AS_GIVEN: given, _FILLED_IN: _get_fields(args)})

    wrappers = {"__post_init__": functools.wraps(fill_in)(remember)}
    assign(ServerArgs, **wrappers)


def find_adaptive(args: Any) -> AdaptiveServerArgs | None:
    """The adaptive arguments that ``args`` are; None for any other object."""
    return args if isinstance(args, AdaptiveServerArgs) else None


def become_adaptive(args: ServerArgs, adaptive: AdaptiveServerArgs) -> None:
    """Have :func:`find_adaptive` find ``adaptive`` for stock arguments from now on."""
    assign(args, __class__=AdaptiveServerArgs)
    vars(args).clear()
    vars(args).update(vars(adaptive))


def _get_fields(args: ServerArgs) -> dict[str, Any]:
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}


def get_given_fields(args: ServerArgs) -> dict[str, Any]:
    """The fields of ``args`` without what SGLang chose, which it would choose otherwise for another layout."""
    now = _get_fields(args)
    if _AS_GIVEN in vars(args):
        given, filled_in = vars(args)[_AS_GIVEN], vars(args)[_FILLED_IN]
    else:  # made before we came: what SGLang chooses for the least that can be said
        least = type(args)(model_path=args.model_path, tp_size=args.tp_size, dp_size=args.dp_size, device=args.device)
        given, filled_in = vars(least)[_AS_GIVEN], vars(least)[_FILLED_IN]
    return given | {name: value for name, value in now.items() if value != filled_in[name]}
