"""Where a pause waits for the device: read in the source, since a CPU waits for nothing.

A GPU is waited for by ``switch/transfer.py`` alone, and there by ``download`` and ``synchronize``.  What is called on
a tensor and would wait as well is listed here with the reason why that tensor lies in host memory.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import sglang_pat

pytestmark = pytest.mark.contract

PACKAGE = Path(sglang_pat.__file__).parent
HOST = [f"host/{name}.py" for name in ("batches", "grammars", "groups", "kv", "loop", "requests", "tree")]
OTHERS = [*HOST, "host/fixes/penalties.py", "cpu/windows.py"]
SWITCH = [str(path.relative_to(PACKAGE)) for path in sorted(PACKAGE.glob("switch/*.py")) if path.name != "transfer.py"]
PAUSE = SWITCH + OTHERS
"""What runs between QUIESCE and RESUME, but for SGLang's own code and ``drain``, which waits for the step in flight."""

READS = {"cpu", "item", "tolist", "numpy", "nonzero", "to", "cuda", "synchronize"}
"""Methods that wait, or may."""
IN_HOST_MEMORY = {
    ("host/tree.py", "leave_kv", "numpy"): "the tree's slots are uploaded when all are entered",
    ("switch/requests.py", "send_capsules", "numpy"): "capsules travel in host memory",
    ("host/batches.py", "read_sampled_tokens", "tolist"): "in no pause: test builds, after a step",
    ("switch/executor.py", "_vote", "item"): "votes go through shared memory",
    ("switch/requests.py", "is_engine_idle", "item"): "in no pause: before memory is released, as a vote",
    ("switch/kv.py", "__init__", "tolist"): "arrays of the plan",
    ("switch/kv_triton.py", "_move", "to"): "inside the kernel",
    ("host/batches.py", "fill_rows", "to"): "from type to type, on the device",
}
WAITS = {
    ("switch/kv.py", "run"): "the end of the exchange",
    ("host/kv.py", "read_rows"): "the request table",
    ("switch/requests.py", "read_kv_rows"): "what lies in the radix tree",
}
COMPARISON = {
    ("rank/layouts.py", "reshard"): "the end of it, --pat-weights reshard",
}
"""Places that wait in PAT's way, which is there to be compared with."""
LENT = {
    ("rank/lent_memory.py", "release"): "after the pause, of a rank that is lent",
    ("rank/lent_memory.py", "resume"): "before it, of a rank that is lent still",
}


def methods(path: str) -> set[tuple[str, str, str]]:
    """``(file, function, method)`` of all calls that may wait for a device."""
    return {
        (path, function.name, node.func.attr)
        for function in _functions(path)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READS
    }


def users(path: str) -> set[tuple[str, str]]:
    """``(file, function)`` where ``switch/transfer.py`` is asked to wait."""
    return {
        (path, function.name)
        for function in _functions(path)
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and node.id in ("download", "synchronize")
    }


def _functions(path: str) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(ast.parse((PACKAGE / path).read_text())) if isinstance(node, ast.FunctionDef)]


def test_nothing_else_in_a_pause_waits_for_the_device():
    found = set().union(*map(methods, PAUSE))
    assert found - IN_HOST_MEMORY.keys() == set(), "upload and download with switch/transfer.py"
    assert IN_HOST_MEMORY.keys() - found == set(), "no longer there"


def test_the_device_is_waited_for_three_times_beside_the_step_in_flight():
    everywhere = [str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if path.name != "transfer.py"]
    assert set().union(*map(users, everywhere)) == WAITS.keys() | COMPARISON.keys() | LENT.keys()
