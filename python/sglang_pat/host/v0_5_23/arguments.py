"""SGLang's ``ServerArgs``: a record of what the user gave.  What SGLang decides in :func:`resolve` is noted beside its
fields, which are sealed from then on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.arg_groups.overrides import declare_resolution, resolution_result, resolving_view
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

from sglang_pat.host.assign import assign

__all__ = ["ConfigArgumentMerger"]

Args = TypeVar("Args", bound=ServerArgs)

SOURCE = "sglang_pat"
"""Who has decided, in SGLang's notes."""


def make_class(
    name: str, ours: type, fields: list[tuple[str, Any, Any]], fill_in: Callable[[Any, Callable[[], None]], None]
) -> type:
    """The class of SGLang's arguments with the methods of ``ours`` and more ``fields``: name, type, default.

    Args:
        fill_in: called with the arguments and with SGLang's function that fills in what is open.
    """

    def resolve_once(self: Any) -> None:
        if not getattr(self, "_resolution_finished", False):
            fill_in(self, lambda: ServerArgs.resolve_once(self))

    members = {"__doc__": ours.__doc__, "resolve_once": resolve_once}
    return msgspec.defstruct(name, fields, bases=(ours, ServerArgs), module=ours.__module__, namespace=members)


def resolve(args: Args) -> Args:
    """A view of ``args`` with all that is left open filled in; the fields of ``args`` stay as they were given."""
    args.resolve_once()
    return make_view(args)


def read(args: Any) -> Any:
    """A view of ``args`` whose attributes are what was decided."""
    return resolving_view(args)


def get_fields(args: ServerArgs) -> dict[str, Any]:
    """All fields by name, as they are decided."""
    return {field.name: resolution_result(args, field.name) for field in record_fields(type(args))}


def decide(args: ServerArgs, **values: Any) -> None:
    """Give fields other values, once what was open is filled in."""
    declare_resolution(args, SOURCE, **values)
    for name, value in values.items():
        msgspec.structs.force_setattr(args, name, value)


def make_view(args: Args, **values: Any) -> Args:
    """A copy of ``args`` with other values, whose fields are what was decided: whoever reads them needs no notes."""
    view = copy.copy(args)  # without notes
    vars(view).update(vars(args))
    vars(view)["_resolved_overrides"] = list(vars(args).get("_resolved_overrides", ()))
    decide(view, **get_fields(args) | values)
    return view


# -- graphs ------------------------------------------------------------------------------------------------------------

GRAPH_SIZES_FLAG = "--cuda-graph-bs-decode"
"""Flag with the sizes of the batches that get decode graphs."""


def are_graph_sizes_given(args: Any) -> bool:
    """Whether the user has said for which batch sizes decode graphs are captured."""
    explicit = args.cuda_graph_config
    if not isinstance(explicit, dict):
        explicit = explicit.to_dict() if explicit is not None else {}
    return args.cuda_graph_bs_decode is not None or explicit.get("decode", {}).get("bs") is not None


def disable_prefill_graphs(args: Any) -> None:
    """Choose that prefill has no graphs; before what is open is filled in."""
    assign(args, disable_prefill_cuda_graph=True)


def has_decode_graphs(args: Any) -> bool:
    """Whether decode graphs are captured, on a device that has them."""
    return _get_decode(args).backend != Backend.DISABLED


def find_refused_graphs(args: Any) -> str | None:
    """The flag, with its value, of graphs that know one layout; None if there are none such."""
    config = resolution_result(args, "cuda_graph_config")
    for phase, allowed in (("decode", (Backend.FULL, Backend.DISABLED)), ("prefill", (Backend.DISABLED,))):
        if (backend := getattr(config, phase).backend) not in allowed:
            return f"--cuda-graph-backend-{phase} {backend}"
    return None


def list_graph_sizes(args: Any) -> tuple[int, ...]:
    """Batch sizes for which SGLang would capture a decode graph."""
    return tuple(_get_decode(args).bs or ())


def get_largest_graph(args: Any) -> int:
    """Largest batch size that has a decode graph."""
    return _get_decode(args).max_bs or 0


def _get_decode(args: Any) -> Any:
    return resolution_result(args, "cuda_graph_config").decode
