"""Is everything in place for ``--adaptive-tp``?

    python -m sglang_pat.preflight

Prints one line for each thing that is needed; exits with 1 if one is missing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from sglang_pat.host import contract, cpu_shim
from sglang_pat.version import HOST_VERSION, __version__

Line = tuple[bool, str, str]
"""``(fine, what, finding)``."""


def checks() -> Iterator[Line]:
    yield sys.version_info >= (3, 11), "Python", f"{sys.version.split()[0]} (3.11 or newer needed)"
    installed = contract.installed_version()
    yield installed == HOST_VERSION, "SGLang", f"{installed} ({HOST_VERSION} needed)"
    if installed is None:
        return
    shim = cpu_shim.needed()
    if shim:
        cpu_shim.install()
    yield True, "CPU shim", "in place: no sgl_kernel here" if shim else "not needed: sgl_kernel is installed"
    yield from _host_symbols()
    yield from _backend()
    yield from _devices()


def _host_symbols() -> Iterator[Line]:
    for symbol in contract.symbols():
        problem = symbol.problem()
        yield problem is None, f"hook {symbol.module}:{symbol.name}", problem or "as expected"


def _backend() -> Iterator[Line]:
    from sglang_pat.comm import shm

    built = shm.is_available()
    yield built, "compiled backend", "sglang_pat._C loads" if built else "sglang_pat._C is not built: run make setup"
    shared = Path("/dev/shm")
    writable = shared.is_dir() and os.access(shared, os.W_OK)
    yield writable, "shared memory", f"{shared} is {'' if writable else 'not '}writable"


def _devices() -> Iterator[Line]:
    import torch

    cores = len(os.sched_getaffinity(0))
    yield True, "torch", torch.__version__
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        yield True, "devices", f"{len(names)} CUDA devices: {', '.join(sorted(set(names)))}; one rank each"
    else:
        yield True, "devices", f"CPU, {cores} cores; ranks may outnumber cores, slowly"


def main() -> int:
    fine = True
    print(f"sglang_pat {__version__}")
    for good, what, finding in checks():
        fine &= good
        print(f"{'ok  ' if good else 'FAIL'}  {what}: {finding}")
    print("ready for --adaptive-tp" if fine else "not ready: see the lines that say FAIL")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
