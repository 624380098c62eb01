"""The adapter of the SGLang that is installed: one folder of modules for each version (``v0_5_12``, ``v0_5_23``).

An operation of this folder is written once.  Where versions differ it calls the adapter, as in
``adapter.requests.get_logprobs(req)``.  The folders have the same modules with the same names
(``tests/unit/test_host.py``), and what a version lacks is refused in one line.  Modules are imported on first use: a
process that builds no rank imports none of a rank's.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from sglang_pat.launch.contract import find_folder

FOLDER = find_folder()
"""Name of the folder."""


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    module = globals()[name] = import_module(f"{__package__}.{FOLDER}.{name}")
    return module
