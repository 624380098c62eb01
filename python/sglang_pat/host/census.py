"""A census of what SGLang keeps: every attribute of its scheduler, worker and model runner, by path.

``attributes.txt`` in the folder of the version says of each what it is.
"""

from __future__ import annotations

import enum
import types
from collections import deque
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.layers import dp_attention

from sglang_pat.host.loop import find

DEEPEST = 7
"""Longest path that is followed, in attributes."""

_PLAIN = (type(None), bool, int, float, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size)
_MANY = (list, tuple, set, frozenset, deque)


def take_census(scheduler: Any) -> tuple[dict[str, str], dict[str, int]]:
    """``(path -> value, path -> identity of SGLang's object there)``.

    An object is described where it is nearest to a root; elsewhere its value is ``-> path``, so that a stale reference
    shows.  Of a list of objects the first one stands for all.
    """
    values: dict[str, str] = {}
    identities: dict[str, int] = {}
    seen: dict[int, str] = {}
    worker = scheduler.tp_worker
    roots = {"Scheduler": scheduler, "TpModelWorker": worker, "ModelRunner": worker.model_runner}
    modules = {"parallel_state": parallel_state, "dp_attention": dp_attention}
    queue = deque((name, root, 0) for name, root in roots.items())
    seen.update((id(root), name) for name, root in roots.items())
    for module, found in modules.items():
        # What starts with one underscore and is written in capitals is the state of these modules.
        state = {n: v for n, v in vars(found).items() if n.startswith("_") and n.isupper()}
        queue.extend((f"{module}.{name}", value, 1) for name, value in sorted(state.items()))
    while queue:
        path, found, depth = queue.popleft()
        if _is_sglang_object(found) or isinstance(found, torch.nn.Module):
            if seen.setdefault(id(found), path) != path:
                values[path] = f"-> {seen[id(found)]}"
                continue
            identities[path] = id(found)
        values[path] = describe(found)
        if depth < DEEPEST:
            queue.extend((path + step, value, depth + 1) for step, value in _iterate_children(found))
    return values, identities


def _is_sglang_object(found: Any) -> bool:
    """Whether an object's class is SGLang's or derived from one; our own objects and groups are none."""
    if isinstance(found, (type, types.ModuleType, GroupCoordinator, enum.Enum)) or callable(found):
        return False
    return any(kind.__module__.partition(".")[0] == "sglang" for kind in type(found).__mro__)


def _iterate_children(found: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(found, torch.nn.Module):
        own = {name: value for name, value in vars(found).items() if not name.startswith("_")}
        for name, value in sorted({**own, **found._parameters, **found._buffers, **found._modules}.items()):
            if not name.isdigit() or name == "0":
                yield (".[]" if name == "0" else f".{name}"), value
    elif _is_sglang_object(found):
        names = set(getattr(found, "__dict__", ()))
        slots = {name for kind in type(found).__mro__ for name in getattr(kind, "__slots__", ())}
        names |= {name for name in slots if hasattr(found, name)}
        for name in sorted(names):
            yield f".{name}", getattr(found, name)
    elif isinstance(found, dict):
        for value in list(found.values())[:1]:
            if not isinstance(value, _PLAIN):
                yield "[]", value
    elif isinstance(found, (list, tuple, deque)) and len(found) and not isinstance(found[0], _PLAIN):
        yield "[]", found[0]


def read_paths(scheduler: Any, paths: Iterable[str]) -> dict[str, str]:
    """Values at ``paths``, as :func:`describe` gives them."""
    roots = SimpleNamespace(Scheduler=scheduler, ModelRunner=scheduler.tp_worker.model_runner)
    return {path: describe(find(roots, path)) for path in paths}


def describe(found: Any) -> str:
    """One line for a value: a tensor's shape, a container's length, a group's size and rank, or the plain value."""
    if isinstance(found, _PLAIN):
        return f"{type(found).__name__} {found}" if not isinstance(found, (type(None), str)) else repr(found)
    if isinstance(found, torch.Tensor):
        return f"tensor {found.dtype} {list(found.shape)}"
    if isinstance(found, GroupCoordinator):
        return f"group of {found.world_size}, rank {found.rank_in_group}"
    if isinstance(found, dist.ProcessGroup):
        return f"group of {found.size()}, rank {found.rank()}"
    if isinstance(found, (*_MANY, dict)):
        plain = isinstance(found, (list, tuple)) and len(found) <= 8 and all(isinstance(x, _PLAIN) for x in found)
        return f"{type(found).__name__} {list(found)}" if plain else f"{type(found).__name__} of {len(found)}"
    return f"a {type(found).__name__}"
