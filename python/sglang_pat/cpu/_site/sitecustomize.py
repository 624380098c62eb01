"""Python runs this at start-up if this folder is on ``PYTHONPATH``: it installs the CPU shim and steps aside.

It must stay cheap and must never stop the interpreter, since it runs in every child, whatever that child is
for. A process that cannot do without the shim asks ``shim.is_installed()`` itself.
"""

import importlib.machinery
import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def _load(name: str, path: str) -> None:
    """Run the file at `path` as a module of its own, whose name is `name`."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def _install_shim() -> None:
    # By path: importing it as part of the package would make every child depend on where that package is
    # found.
    name = "_sglang_pat_cpu_shim"
    try:
        _load(name, os.path.join(os.path.dirname(HERE), "shim.py"))
        sys.modules[name].install()
    except Exception as error:
        print(f"sglang_pat: the CPU shim is not installed in this process: {error!r}", file=sys.stderr)


def _run_next_sitecustomize() -> None:
    """Run the sitecustomize that this one hides, if there is one further down ``sys.path``."""
    further = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", further)
    if spec is not None and spec.origin is not None:
        _load("sitecustomize", spec.origin)


_install_shim()
_run_next_sitecustomize()
