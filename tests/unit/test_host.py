"""One folder knows SGLang: ``host/``.

What else imports it, or names an attribute of its objects, is listed here, and the lists only shrink.
"""

from __future__ import annotations

import ast
import pickle
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from sglang_pat.host import adapter
from sglang_pat.host.assign import assign, assign_many

from . import code_names
from .code_names import PACKAGE, parse, walk

pytestmark = [pytest.mark.unit, pytest.mark.xdist_group(code_names.__name__)]

NOT_YET = {"acceptance", "testing"}
"""Folders and files of the package that import SGLang and are to call operations of ``host/`` instead."""

CLEAN = ("switch", "rank", "checks")
"""Folders whose objects of SGLang are opaque: they are handed to operations of ``host/``, and not looked into."""


def imports_sglang(path: Path) -> bool:
    """Whether a file imports SGLang, be it for types or inside functions."""
    names = []
    for node in walk(path):
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    return any(name.partition(".")[0] == "sglang" for name in names)


def test_no_other_folder_imports_sglang():
    found = {path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py") if imports_sglang(path)}
    assert found - {"host"} - NOT_YET == set(), "call an operation of host/, or write one"
    assert NOT_YET - found == set(), "these import it no more: take them off the list"


def test_a_module_is_asked_for_a_name_that_it_lacks():
    """Pickle asks all modules that are loaded, and so does ``torch.compile``, with which each rank on a GPU starts."""
    assert not hasattr(adapter, "torch")
    assert pickle.whichmodule(object(), "no_such_name") == "__main__"


# -- attributes of SGLang's objects ------------------------------------------------------------------------------------

SGLANG = (
    "constrained/base_grammar_backend.py", "constrained/grammar_manager.py", "distributed/parallel_state.py",
    "managers/io_struct.py", "managers/schedule_batch.py", "managers/scheduler.py", "managers/tp_worker.py",
    "mem_cache/allocator", "mem_cache/base_prefix_cache.py", "mem_cache/memory_pool.py", "mem_cache/radix_cache.py",
    "model_executor/forward_batch_info.py", "model_executor/model_runner.py", "sampling/sampling_params.py",
)  # fmt: skip
"""Files with the classes whose objects a rank and a switch deal with; a module without its suffix may be a folder."""

OURS = ("checks", "config.py", "cpu", "dropped.py", "files.py", "layout.py", "messages.py", "rank", "switch")
"""Whose classes the clean folders look into; a name that both have counts as ours."""

OF_OTHERS = {name for kind in (dict, str, list) for name in dir(kind)} | {
    "all", "parameters", "recv", "shape", "synchronize", "type",
}  # fmt: skip
"""Names that Python's types have, numpy's arrays, sockets, and torch's modules, devices and streams."""


def list_members(path: Path) -> set[str]:
    """Attributes, methods and fields of the classes in a file."""
    found: set[str] = set()
    for owner in (node for node in walk(path) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(owner):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
        for node in owner.body:
            if isinstance(node, ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    return found


@cache
def list_names_of_sglang() -> frozenset[str]:
    """Names of SGLang's that none of our classes has."""
    spec = find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0]) / "srt"
    sources = [path for name in SGLANG for path in (source / name, source / f"{name}.py") if path.exists()]
    assert len(sources) == len(SGLANG)
    theirs = set().union(
        *(list_members(file) for path in sources for file in ([path], path.glob("*.py"))[path.is_dir()])
    )
    files = [PACKAGE / name for name in OURS if name.endswith(".py")]
    files += [path for name in OURS for path in (PACKAGE / name).rglob("*.py")]
    return frozenset(theirs - set().union(*map(list_members, files)) - OF_OTHERS)


def list_accesses(tree: ast.Module) -> list[str]:
    """Attributes with a name of SGLang's, with their lines; functions of a module that is imported are none."""
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    found = []
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.Attribute)):
        of_module = isinstance(node.value, ast.Name) and node.value.id in imported
        if node.attr in list_names_of_sglang() and not of_module:
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def test_a_switch_and_a_rank_look_into_no_object_of_sglangs():
    found = {
        str(path.relative_to(PACKAGE)): accesses
        for folder in CLEAN
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        if (accesses := list_accesses(parse(path)))
    }
    assert found == {}, "call an operation of host/, or write one"


@pytest.mark.parametrize("name", ["tp_size", "output_ids", "kv_committed_len", "running_batch", "req_to_token_pool"])
def test_an_access_would_be_found(name):
    assert list_accesses(ast.parse(f"def f(one):\n    return one.{name}")) == [f"2: one.{name}"]


# -- writes ------------------------------------------------------------------------------------------------------------


UNCHECKED = {
    ("fixes/pauses.py", "abort_all_requests"): "a field of a message",
    ("fixes/request_validation.py", "custom_labels"): "a field of a message",
    ("fixes/request_validation.py", "http_worker_ipc"): "a field of a message",
    ("fixes/request_validation.py", "sampling_params"): "a field of a message",
    ("fixes/request_validation.py", "stop_token_ids"): "it was read before",
    ("fixes/shared_memory.py", "rebuild_storage_filename"): "of torch, and read before",
    ("fixes/weight_updates.py", "weight_loader"): "a plain parameter has none",
    ("grammars.py", "finished"): "checked once, written after every token",
    ("layers.py", "data"): "of torch",
    ("layers.py", "register_parameter"): "of torch",
    ("requests.py", "surr_and_decode_ids"): "SGLang makes it on first use",
    ("scheduler.py", "fence"): "ours",
    ("scheduler.py", "leads"): "ours",
    ("scheduler.py", "reqs"): "ours",
    ("shutdown.py", "argtypes"): "of ctypes",
    ("shutdown.py", "force_exit"): "of uvicorn, and read before",
    ("shutdown.py", "over"): "ours",
    ("shutdown.py", "restype"): "of ctypes",
    ("v0_5_12/scheduler.py", "reqs"): "ours",
    ("v0_5_23/scheduler.py", "rank"): "ours",
    ("v0_5_23/scheduler.py", "scheduler"): "ours",
}
"""Attributes of objects other than ``self`` that ``host/`` writes without ``assign``, and why."""


def test_attributes_are_written_by_assign():
    """Attributes that begin with ``pat_`` are ours; what ``+=`` writes it has read."""
    host, found = PACKAGE / "host", set()
    for path in host.rglob("*.py"):
        added = {node.target for node in walk(path) if isinstance(node, ast.AugAssign)}
        for node in (node for node in walk(path) if isinstance(node, ast.Attribute)):
            own = isinstance(node.value, ast.Name) and node.value.id == "self"
            if isinstance(node.ctx, ast.Store) and not own and node not in added and not node.attr.startswith("pat_"):
                found.add((str(path.relative_to(host)), node.attr))
    assert found - UNCHECKED.keys() == set(), "write it by host/assign.py"
    assert UNCHECKED.keys() - found == set(), "no longer there"


class Pool:
    size = 4


def test_what_is_there_is_written():
    pool = Pool()
    assign(pool, size=8)
    assert pool.size == 8


def test_many_are_written_at_once():
    pool = Pool()
    pool.free = 1
    assign_many(pool, {"free": 2, "used": 3}, late=frozenset({"used"}))
    assert (pool.free, pool.used) == (2, 3)
    with pytest.raises(AttributeError, match="SGLang's Pool has no attribute capacity"):
        assign_many(pool, {"free": 7, "capacity": 9})
    assert pool.free == 2


def test_a_write_to_a_name_that_has_moved_fails_and_writes_nothing():
    pool = Pool()
    with pytest.raises(
        AttributeError, match="SGLang's Pool has no attribute capacity, which sglang_pat writes"
    ) as caught:
        assign(pool, size=8, capacity=9)
    assert pool.size == 4 and "\n" not in str(caught.value)
