"""What of ours replaces a method of SGLang's: found in all modules, listed, and refused where SGLang has none."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from types import ModuleType

import pytest

import sglang_pat
from sglang_pat.host import adapter, guard
from sglang_pat.launch.contract import SGLangMismatch, get_installed_version, read_symbols
from sglang_pat.version import ADAPTERS

pytestmark = pytest.mark.contract

MADE_UP = "sglang_pat.made_up"


@pytest.fixture(scope="module")
def overrides() -> dict[str, guard.Override]:
    """All overrides of the package, by class and name."""
    for module in pkgutil.walk_packages(sglang_pat.__path__, "sglang_pat."):
        name, version = module.name, module.name.removeprefix("sglang_pat.host.").partition(".")[0]
        if version in {*ADAPTERS.values()} - {adapter.FOLDER}:
            continue
        if not ("_site" in name or name.endswith(("__main__", "._C")) or name.startswith("sglang_pat.integrations")):
            importlib.import_module(name)
    return {str(override): override for override in guard.list_overrides()}


def test_all_that_is_overridden_is_in_the_list(overrides):
    """``contract.txt`` is what :func:`guard.check_overrides` knows our overrides by."""
    listed = {(symbol.module, symbol.name) for symbol in read_symbols()}
    missing = [
        f"{override.base.__module__}:{override.base.__qualname__}.{override.name}"
        for override in overrides.values()
        if override.base
        and override.name in vars(override.base)
        and not {(base.__module__, f"{base.__qualname__}.{override.name}") for base in override.kind.__mro__} & listed
    ]
    assert not missing, "to be added to contract.txt"


def test_each_is_found_in_this_sglang(overrides):
    assert not list(filter(None, (override.find_problem() for override in overrides.values())))
    guard.check_overrides()
    # A property, in place of an attribute that SGLang's loops read.
    assert len(overrides["AdaptiveScheduler._engine_paused"].functions) == 2
    assert "AdaptiveScheduler.is_leader" not in overrides


class Stock:
    """A class of SGLang's, for :class:`Ours`."""

    __module__ = "sglang.made_up"

    def run_batch(self, batch: object, pp_proxy_tensors: object = None) -> None: ...


class Ours(Stock):
    __module__ = MADE_UP

    def run_batch(self, batch: object) -> None: ...

    def is_new(self) -> None: ...


class Lost(Ours):
    """SGLang has moved it: SGLang's class has no such method any more."""

    __module__ = MADE_UP

    def recv_requests(self) -> None: ...


class Changed(Stock):
    __module__ = MADE_UP

    def run_batch(self) -> None: ...


@pytest.fixture
def check(monkeypatch):
    """A function that runs the check at start for these classes only."""

    def check(*kinds: type) -> None:
        module = ModuleType(MADE_UP)
        vars(module).update({kind.__name__: kind for kind in kinds})
        monkeypatch.setitem(sys.modules, MADE_UP, module)
        monkeypatch.setattr(guard, "FOLDER", __file__)
        guard.check_overrides()

    return check


def test_what_overrides_nothing_is_refused_in_one_line(check):
    check(Ours)
    with pytest.raises(SGLangMismatch) as refused:
        check(Ours, Lost)
    problem, advice = str(refused.value).split(": install ")
    assert problem == "Lost.recv_requests: SGLang has no method of this name any more"
    assert advice == f"sglang=={get_installed_version()} as it was released"


def test_what_takes_less_than_sglang_gives_is_refused(check):
    """What SGLang may leave out need not be taken."""
    with pytest.raises(SGLangMismatch, match=r"^Changed.run_batch: SGLang's takes batch, ours does not: install"):
        check(Changed)
