"""Every flag of SGLang is classified, refusals are one line, and docs/flags.md and the registers say the same."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import pytest
from sglang.srt.server_args import ServerArgs

from sglang_pat.host import adapter
from sglang_pat.launch import refusals

from . import flags as tables
from .checkpoints import arguments

pytestmark = pytest.mark.contract

ROOT = Path(__file__).parents[2]


def test_every_flag_is_classified():
    """A new SGLang version fails here, by the names of its new flags."""
    fields = set(tables.list_fields())
    found = set(tables.classify_fields())
    assert not fields - found, f"flags that tests/contract/flags.py does not know: {sorted(fields - found)}"
    assert not found - fields, f"flags that SGLang no longer has: {sorted(found - fields)}"


@pytest.mark.parametrize("test", tables.WORKING)
def test_what_works_is_used_by_the_test_named(test):
    """Words of its code, or of what starts its servers, name the flag; comments do not count."""
    shared = ("tests/engine/conftest.py", "python/sglang_pat/testing/server.py")
    words = {word for name in (test, *shared) for word in _words(ROOT / name)}
    unused = [name for name in tables.WORKING[test].split() if not {_option(name), name} & words]
    assert not unused, f"{test} does not use {unused}"


def _words(path: Path) -> Iterator[str]:
    """Words of the strings in a file's code, names of arguments that it gives and of attributes that it sets."""
    tree = ast.parse(path.read_text())
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield from node.value.split()
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _option(field: str) -> str:
    return {"tp_size": "--tp", "dp_size": "--dp"}.get(field, "--" + field.replace("_", "-"))


@pytest.mark.parametrize("refusal", refusals.REFUSED, ids=lambda refusal: refusal.field)
def test_refused_in_one_line(model, refusal):
    kinds = {name: str(kind) for name, kind in get_type_hints(ServerArgs).items()}
    kind = kinds[refusal.field]
    value = True if "bool" in kind else 7 if "int" in kind else "x"
    with pytest.raises(ValueError) as caught:
        arguments(model, **{refusal.field: value})
    message = str(caught.value)
    assert message == f"--adaptive-tp does not support {refusal.format_flag(value)}: {refusal.advice}"


def test_defaults_are_accepted(model):
    args = adapter.arguments.resolve(ServerArgs(model_path=str(model), device="cpu"))
    refusals.refuse_flags(adapter.arguments.get_fields(args))


def test_what_sglang_chooses_is_refused_too(model, monkeypatch):
    """SGLang chooses an attention backend with pages of 64 tokens on Blackwell."""
    if adapter.FOLDER == "v0_5_12":
        monkeypatch.setattr(ServerArgs, "_handle_page_size", lambda self: setattr(self, "page_size", 64))
    else:
        from sglang.srt.arg_groups import pipeline

        monkeypatch.setattr(pipeline, "_page_size_default", lambda view: {"page_size": 64})
    with pytest.raises(ValueError, match="--page-size 64: must be 1; choose the attention backend"):
        arguments(model)
    adapter.arguments.resolve(ServerArgs(model_path=str(model), device="cpu"))


def test_packed_weights_are_refused(model, monkeypatch):
    monkeypatch.setattr("sglang_pat.host.arguments.cpu_has_amx_support", lambda: True)
    with pytest.raises(ValueError, match="AMX kernels: use an sgl-kernel without them"):
        arguments(model)


@pytest.mark.parametrize("name", refusals.ENVIRONMENT)
def test_variables_are_refused(model, monkeypatch, name):
    if name != "SGLANG_GRPC_PORT":  # SGLang itself refuses the port 0
        monkeypatch.setenv(name, "0")
        arguments(model)
    monkeypatch.setenv(name, "5")
    with pytest.raises(ValueError, match=f"does not support {name}=5 .*: unset it"):
        arguments(model)


def test_page_and_register_are_up_to_date():
    make = "python -m tests.contract.flags"
    assert tables.PAGE.read_text() == tables.page(), make
    assert tables.REGISTER.read_text() == tables.register(), make
