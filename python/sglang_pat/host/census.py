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
    for module, namespace in modules.items():
        # What starts with one underscore and is written in capitals is the state of these modules.
        state = {n: v for n, v in vars(namespace).items() if n.startswith("_") and n.isupper()}
        queue.extend((f"{module}.{name}", value, 1) for name, value in sorted(state.items()))
    while queue:
        path, node, depth = queue.popleft()
        if _is_sglang_object(node) or isinstance(node, torch.nn.Module):
            if seen.setdefault(id(node), path) != path:
                values[path] = f"-> {seen[id(node)]}"
                continue
            identities[path] = id(node)
        values[path] = describe(node)
        if depth < DEEPEST:
            queue.extend((path + step, value, depth + 1) for step, value in _iterate_children(node))
    return values, identities


def _is_sglang_object(node: Any) -> bool:
    """Whether an object's class is SGLang's or derived from one; our own objects and groups are none."""
    if isinstance(node, (type, types.ModuleType, GroupCoordinator, enum.Enum)) or callable(node):
        return False
    return any(kind.__module__.partition(".")[0] == "sglang" for kind in type(node).__mro__)


def _iterate_children(node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, torch.nn.Module):
        own = {name: value for name, value in vars(node).items() if not name.startswith("_")}
        for name, value in sorted({**own, **node._parameters, **node._buffers, **node._modules}.items()):
            if not name.isdigit() or name == "0":
                yield (".[]" if name == "0" else f".{name}"), value
    elif _is_sglang_object(node):
        names = set(getattr(node, "__dict__", ()))
        slots = {name for kind in type(node).__mro__ for name in getattr(kind, "__slots__", ())}
        names |= {name for name in slots if hasattr(node, name)}
        for name in sorted(names):
            yield f".{name}", getattr(node, name)
    elif isinstance(node, dict):
        for value in list(node.values())[:1]:
            if not isinstance(value, _PLAIN):
                yield "[]", value
    elif isinstance(node, (list, tuple, deque)) and len(node) and not isinstance(node[0], _PLAIN):
        yield "[]", node[0]


def read_paths(scheduler: Any, paths: Iterable[str]) -> dict[str, str]:
    """Values at ``paths``, as :func:`describe` gives them."""
    roots = SimpleNamespace(Scheduler=scheduler, ModelRunner=scheduler.tp_worker.model_runner)
    return {path: describe(find(roots, path)) for path in paths}


def describe(value: Any) -> str:
    """One line for a value: a tensor's shape, a container's length, a group's size and rank, or the plain value."""
    if isinstance(value, _PLAIN):
        return f"{type(value).__name__} {value}" if not isinstance(value, (type(None), str)) else repr(value)
    if isinstance(value, torch.Tensor):
        return f"tensor {value.dtype} {list(value.shape)}"
    if isinstance(value, GroupCoordinator):
        return f"group of {value.world_size}, rank {value.rank_in_group}"
    if isinstance(value, dist.ProcessGroup):
        return f"group of {value.size()}, rank {value.rank()}"
    if isinstance(value, (*_MANY, dict)):
        plain = isinstance(value, (list, tuple)) and len(value) <= 8 and all(isinstance(x, _PLAIN) for x in value)
        return f"{type(value).__name__} {list(value)}" if plain else f"{type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
