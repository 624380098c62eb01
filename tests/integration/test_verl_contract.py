"""Each symbol of verl's that the adapter overrides, calls or reads, with its parameters: ``verl_contract.txt``.

Another verl fails here first, by name; so does an adapter that uses what is not in the list.  What a list cannot say is
in ``test_verl_symbols.py``.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from verl.workers.rollout.replica import RolloutReplicaRegistry

from sglang_pat.integrations import verl as adapter
from sglang_pat.launch.contract import Symbol

pytestmark = pytest.mark.integration

LINES = [
    line
    for line in Path(__file__).with_name("verl_contract.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
HELD = {
    "checkpoint_manager": "verl.checkpoint_engine.base:CheckpointEngineManager",
    "llm_server_manager": "verl.workers.rollout.llm_server:LLMServerManager",
    "standalone_server_manager": "verl.workers.rollout.llm_server:LLMServerManager",
}
"""Attributes of verl's objects that are objects of verl's, too."""
OURS = {"config", "replay_buffer", "tokenizer_manager"}
"""Attributes of verl's objects that are values, or objects of our own classes."""

RolloutReplicaRegistry.get("sglang")  # puts stand-ins for vLLM's modules in place


def problem(line: str) -> str | None:
    """What is wrong with verl's symbol; one without parameters is no function."""
    if "(" in line:
        found = Symbol.parse(line).problem()
        # Ray adds this one to the methods of what a test before has made an actor.
        return None if found == "parameters changed: _ray_trace_ctx" else found
    module, _, name = line.partition(":")
    owner, _, last = name.rpartition(".")
    found = importlib.import_module(module)
    if not owner:
        return None if hasattr(found, last) else "missing"
    kind = getattr(found, owner)
    return None if hasattr(kind, last) or last in names_of_self(stock(kind), ast.Store) else "missing"


def stock(kind: type) -> list[type]:
    """verl's classes that ``kind`` is made of."""
    return [one for one in kind.__mro__ if one.__module__.startswith("verl.")]


def names_of_self(kinds: list[type], context: type = ast.expr_context) -> set[str]:
    """``NAME`` of each ``self.NAME`` in these classes; of those that are set with ``ast.Store``."""
    trees = (ast.parse(inspect.getsource(kind)) for kind in kinds)
    return {one.attr for tree in trees for one in of(tree, "self") if isinstance(one.ctx, context)}


def of(tree: ast.AST, owner: str) -> list[ast.Attribute]:
    """All ``owner.NAME``."""
    return [one for one in ast.walk(tree) if isinstance(one, ast.Attribute) and ast.unparse(one.value) == owner]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.partition("(")[0].rpartition(":")[2])
def test_symbol(line):
    assert problem(line) is None


def test_a_changed_symbol_is_named():
    where = "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer"
    assert problem(f"{where}._clear_groups(self, partition_id, uids, more)") == "parameters changed: more"
    assert problem(f"{where}.no_such_method(self)").startswith("missing")
    assert problem(f"{where}.no_such_attribute") == "missing"


def used(path: Path) -> Iterator[set[str]]:
    """What a module of the adapter uses of verl's: any one of these names is to be in the list."""
    tree = ast.parse(path.read_text())
    imports = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "verl":
            imports |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
    for module, name in imports.values():
        if not isinstance(getattr(importlib.import_module(module), name, None), ModuleType):
            yield {f"{module}:{name}"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imports:
            module, name = imports[node.value.id]
            whole = isinstance(getattr(importlib.import_module(module), name), ModuleType)
            yield {f"{module}.{name}:{node.attr}" if whole else f"{module}:{name}.{node.attr}"}
    ours = importlib.import_module(f"{adapter.__name__}.{path.stem}")
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and (kinds := stock(getattr(ours, node.name))):
            for name in of_class(node, getattr(ours, node.name)):
                owners = [kind for kind in kinds if name in vars(kind)][:1] or kinds
                yield {name} if ":" in name else {f"{kind.__module__}:{kind.__name__}.{name}" for kind in owners}


def of_class(node: ast.ClassDef, kind: type) -> Iterator[str]:
    """What our ``kind`` overrides of verl's, and what it asks of it."""
    kinds = stock(kind)
    theirs = names_of_self(kinds).union(*map(vars, kinds))
    yield from (item.name for item in node.body if hasattr(item, "name") and item.name in theirs)
    made = {name for one in kind.__mro__ if one.__module__.startswith(adapter.__name__) for name in vars(one)}
    made |= {one.attr for one in of(node, "self") if isinstance(one.ctx, ast.Store) and one.attr not in theirs}
    yield from (one.attr for one in of(node, "super()"))
    for name in {one.attr for one in of(node, "self")} - made:
        yield name
        if name not in OURS and (asked := of(node, f"self.{name}")):
            assert name in HELD, f"say in HELD or OURS what self.{name} is"
            yield from (f"{HELD[name]}.{one.attr}" for one in asked)


@pytest.mark.parametrize("path", sorted(Path(adapter.__file__).parent.glob("[!_]*.py")), ids=lambda path: path.stem)
def test_all_that_the_adapter_uses_is_in_the_list(path):
    listed = {line.partition("(")[0] for line in LINES}
    listed |= {name.rpartition(".")[0] for name in listed}  # the class of a method
    missing = sorted({min(names) for names in used(path) if not names & listed})
    assert not missing, "to be added to verl_contract.txt"
