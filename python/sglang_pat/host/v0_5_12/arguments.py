"""SGLang's ``ServerArgs``: a dataclass.  SGLang fills in what the user left open in its own fields, once it is made."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from sglang.srt.server_args import ServerArgs
from sglang.srt.server_args_config_parser import ConfigArgumentMerger

from sglang_pat.host.assign import assign

__all__ = ["ConfigArgumentMerger"]

Args = TypeVar("Args", bound=ServerArgs)


def make_class(
    name: str, ours: type, fields: list[tuple[str, Any, Any]], fill_in: Callable[[Any, Callable[[], None]], None]
) -> type:
    """The class of SGLang's arguments with the methods of ``ours`` and more ``fields``: name, type, default.

    Args:
        fill_in: called with the arguments and with SGLang's function that fills in what is open.
    """

    def __post_init__(self: Any) -> None:
        fill_in(self, lambda: ServerArgs.__post_init__(self))

    members = {"__module__": ours.__module__, "__doc__": ours.__doc__, "__post_init__": __post_init__}
    members |= {"__annotations__": {field: kind for field, kind, _ in fields}}
    members |= {field: default for field, _, default in fields}
    return dataclasses.dataclass(type(name, (ours, ServerArgs), members))


def resolve(args: Args) -> Args:
    """``args`` with all that is left open filled in, which it is since it was made."""
    return args


def read(args: Any) -> Any:
    """A view of ``args`` whose attributes are what was decided."""
    return args


def get_fields(args: ServerArgs) -> dict[str, Any]:
    """All fields by name."""
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}


def decide(args: ServerArgs, **values: Any) -> None:
    """Give fields other values, once what was open is filled in."""
    assign(args, **values)


def make_view(args: Args, **values: Any) -> Args:
    """A copy of ``args`` with other values."""
    view = copy.copy(args)
    assign(view, **values)
    return view


# -- graphs ------------------------------------------------------------------------------------------------------------

GRAPH_SIZES_FLAG = "--cuda-graph-bs"
"""Flag with the sizes of the batches that get decode graphs."""


def are_graph_sizes_given(args: Any) -> bool:
    """Whether the user has said for which batch sizes decode graphs are captured."""
    return args.cuda_graph_bs is not None


def disable_prefill_graphs(args: Any) -> None:
    """Choose that prefill has no graphs; before what is open is filled in."""
    assign(args, disable_piecewise_cuda_graph=True)


def has_decode_graphs(args: Any) -> bool:
    """Whether decode graphs are captured, on a device that has them."""
    return not args.disable_cuda_graph


def find_refused_graphs(args: Any) -> str | None:
    """The flag, with its value, of graphs that know one layout; None if there are none such.  None can be given."""
    return None


def list_graph_sizes(args: Any) -> tuple[int, ...]:
    """Batch sizes for which SGLang would capture a decode graph."""
    return tuple(args.cuda_graph_bs or ())


def get_largest_graph(args: Any) -> int:
    """Largest batch size that has a decode graph."""
    return args.cuda_graph_max_bs
