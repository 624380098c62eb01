"""Is everything in place for ``--adaptive-tp``, and does a model fit?

    python -m sglang_pat.preflight
    python -m sglang_pat.preflight --model-path M --tp 1 --dp 8 [--gpus 8x80GB]

The first prints one line for each thing that is needed, the second the memory plan of an engine on this machine, or on
GPUs that need not be here.  Exits with 1 if something is missing or does not fit.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from reward_sandbox.sandbox import make_sandbox
from sglang_pat.cpu import shim
from sglang_pat.host.fixes import jit
from sglang_pat.launch import contract
from sglang_pat.layout import ParallelLayout
from sglang_pat.memory.memory_plan import (
    MemoryPlan,
    Supply,
    format_advice,
    make_default_demand,
    make_plan,
    measure_cpu_memory,
    measure_gpu_memory,
)
from sglang_pat.memory.shapes import ModelShape, read_config
from sglang_pat.predict.profile import Profile, load
from sglang_pat.version import SGLANG_VERSIONS, __version__

Line = tuple[bool, str, str]
"""``(fine, what, finding)``."""


def run_checks() -> Iterator[Line]:
    yield sys.version_info >= (3, 11), "Python", f"{sys.version.split()[0]} (3.11 or newer needed)"
    installed = contract.get_installed_version()
    yield installed in SGLANG_VERSIONS, "SGLang", f"{installed} ({' or '.join(SGLANG_VERSIONS)} needed)"
    if installed is None:
        return
    shimmed = shim.is_needed()
    shim.ensure()
    yield True, "CPU shim", "in place: no sgl_kernel here" if shimmed else "not needed: sgl_kernel is installed"
    yield from _check_packages()
    yield _check_web()
    yield from _check_sglang_symbols()
    yield from _check_backend()
    yield from _check_devices()
    yield _check_sandbox()


def _check_packages() -> Iterator[Line]:
    """What this project needs and SGLang does not bring: ``pip install --no-deps`` leaves it out."""
    try:
        lines = metadata.requires("sglang_pat") or []
    except metadata.PackageNotFoundError:  # used from its folder
        return
    for line in lines:
        if line.startswith("sglang") or "extra ==" in line:
            continue
        name = re.split(r"[^\w.-]", line, maxsplit=1)[0]
        try:
            yield True, name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield False, name, f"not installed: pip install {name}"


def _check_web() -> Line:
    """SGLang's metrics read the path of each route of its application, which newer FastAPIs do not give to all."""
    from fastapi import APIRouter, FastAPI

    app, router = FastAPI(), APIRouter()
    router.add_api_route("/path", lambda: None)
    app.include_router(router)
    version = metadata.version("fastapi")
    if all(hasattr(route, "path") for route in app.routes):
        return True, "FastAPI", version
    failing = "with --enable-metrics SGLang answers /v1/loads with 500, which slime asks; 0.121.3 has no such fault"
    return True, "FastAPI", f"{version}: {failing}"


def _check_sglang_symbols() -> Iterator[Line]:
    for symbol in contract.read_symbols():
        problem = symbol.find_problem()
        yield problem is None, f"hook {symbol.module}:{symbol.name}", problem or "as expected"


def _check_backend() -> Iterator[Line]:
    from sglang_pat.cpu import shm

    built = shm.is_available()
    yield built, "compiled backend", "sglang_pat._C loads" if built else "sglang_pat._C is not built: run make setup"
    shared = Path("/dev/shm")
    writable = shared.is_dir() and os.access(shared, os.W_OK)
    yield writable, "shared memory", f"{shared} is {'' if writable else 'not '}writable"


def _check_devices() -> Iterator[Line]:
    import torch

    cores = len(os.sched_getaffinity(0))
    yield True, "torch", torch.__version__
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        yield True, "devices", f"{len(names)} CUDA devices: {', '.join(sorted(set(names)))}; one rank each"
        wrong = jit.find_jit_problem()
        yield wrong is None, "SGLang's kernels", wrong or "the first one compiles, and runs"
    else:
        yield True, "devices", f"CPU, {cores} cores; ranks may outnumber cores, slowly"


def _check_sandbox() -> Line:
    """Check the sandbox.  It is for rewards of programs only, so nothing fails without it."""
    try:
        return True, "sandbox of rewards", make_sandbox(None).describe()
    except ValueError as error:
        return True, "sandbox of rewards", f"not here: {error}"


def plan_memory(args: argparse.Namespace) -> MemoryPlan:
    """The memory plan that the command line asks for.

    Raises:
        ValueError: no such model, no such layout, or it does not fit; one line.
    """
    shape = ModelShape.from_config(read_config(args.model_path), args.dtype)
    base = ParallelLayout(args.tp, args.dp)
    supply = measure_gpu_memory(args.gpus, base.num_ranks) if args.gpus else _measure_memory_here(base.num_ranks)
    return make_plan(make_default_demand(shape, base, supply, contract.find_folder(), args.max_total_tokens), supply)


def _read_profile(path: str | None, base: ParallelLayout) -> Profile | None:
    """Profile of an engine that starts in ``base``; None without a path."""
    if path is None:
        return None
    profile = load(path, complete=True)
    profiled = ParallelLayout(profile.fingerprint.base_tp, profile.fingerprint.num_ranks // profile.fingerprint.base_tp)
    if profiled != base:
        raise ValueError(f"--pat-profile {path} is of {profiled}, not of {base}: give another, or other --tp and --dp")
    return profile


def _measure_memory_here(ranks: int) -> Supply:
    """Memory of the GPU that has least among those that the ranks would have; without CUDA the machine's memory."""
    import torch

    from sglang_pat.launch.gpu_memory import measure_gpus

    if not torch.cuda.is_available():
        return measure_cpu_memory()
    if (count := torch.cuda.device_count()) < ranks:
        raise ValueError(f"{ranks} ranks need {ranks} GPUs, {count} are visible: choose other --tp/--dp")
    return measure_gpus(range(ranks))


def report() -> int:
    """Print what is in place; 1 if something is missing."""
    fine = True
    print(f"sglang_pat {__version__}")
    for good, what, finding in run_checks():
        fine &= good
        print(f"{'ok  ' if good else 'FAIL'}  {what}: {finding}")
    print("ready for --adaptive-tp" if fine else "not ready: see the lines that say FAIL")
    return 0 if fine else 1


def main(argv: list[str] | None = None) -> int:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m sglang_pat.preflight", description=summary)
    parser.add_argument("--model-path", help="print the memory plan of this model")
    parser.add_argument("--tp", type=int, default=1, help="TP degree of the base layout (default 1)")
    parser.add_argument("--dp", type=int, default=1, help="replicas of the base layout (default 1)")
    parser.add_argument("--gpus", help="e.g. 8x80GB (default: those here, else the CPU)")
    parser.add_argument("--dtype", default="auto", help="as the server's (default auto)")
    parser.add_argument("--max-total-tokens", type=int, help="as the server's (default: what fits)")
    parser.add_argument("--pat-profile", metavar="FILE", help="as the server's: a better --tp is then found by it, too")
    args = parser.parse_args(argv)
    if args.model_path is None:
        return report()
    try:
        plan = plan_memory(args)
        print(plan.format_table())
        if line := format_advice(plan, _read_profile(args.pat_profile, plan.demand.base)):
            print(f"  {line}")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
