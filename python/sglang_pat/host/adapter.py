"""The adapter of the SGLang that is installed: one folder of modules for each version (``v0_5_12``, ``v0_5_23``).

An operation of this folder is written once.  Where versions differ it calls the adapter, as in
``adapter.rank.get_logprobs(req)``.  What is called so is in modules of the same names in each folder, and what a
version lacks is refused in one line.  Modules are imported on first use: a process that builds no rank imports none of
a rank's.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from sglang_pat.launch.contract import find_folder

FOLDER = find_folder()
"""Name of the folder."""


def __getattr__(name: str) -> Any:
    path = f"{__package__}.{FOLDER}.{name}"
    # Pickle asks every module for any name, so what is no module of the folder is an AttributeError.
    if name.startswith("__") or find_spec(path) is None:
        raise AttributeError(f"{FOLDER} has no module {name!r}", name=name)
    module = globals()[name] = import_module(path)
    return module
