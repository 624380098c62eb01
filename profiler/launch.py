"""Command line → engine: SGLang's flags go through to its own parser, the engine is started with ours."""

from __future__ import annotations

import json
import logging
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sglang_pat.predict.profile import Fingerprint
from sglang_pat.testing.prefork import ENVIRONMENT
from sglang_pat.tools.commands import Parser, UsageError, one_line

OURS = ("--adaptive-tp", "--pat-policy", "--pat-switch-at", "--pat-profile")
"""Flags that the profiler sets itself, or that have no meaning here."""


MANUAL = ("--pat-policy", "manual")
"""Flags of the policy that the profiler needs."""


def set_environment(quiet: bool) -> None:
    """One thread a rank, and nothing to be downloaded, as the Makefile sets it; what is set already stays.

    ``quiet``: no warnings while SGLang is imported (kernels that this machine lacks, models that it cannot load).
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if quiet:
        os.environ.setdefault("PYTHONWARNINGS", "ignore")
        warnings.simplefilter("ignore")
        logging.basicConfig(level=logging.ERROR)


def server_args(model: str, flags: list[str], policy: Sequence[str] = MANUAL) -> Any:
    """``AdaptiveServerArgs`` for ``model`` with these flags of ours for the ``policy`` and SGLang's ``flags``.

    Raises:
        UsageError: one that neither knows, or that the adaptive engine does not support.
    """
    if wrong := _model_folder_error(model):
        raise UsageError(wrong)
    for flag in flags:
        if flag.split("=")[0] in OURS:
            raise UsageError(f"{flag}: the profiler decides on switches itself; leave it out")
    quiet = not any(flag.startswith("--log-level") for flag in flags)
    set_environment(quiet)
    from sglang_pat.cpu import shim

    shim.ensure()
    from sglang_pat.launch.contract import SGLangMismatch, check_sglang
    from sglang_pat.launch.spec import AdaptiveServerArgs

    parser = Parser(prog="profiler", allow_abbrev=True)  # SGLang's own --tp is an abbreviation
    AdaptiveServerArgs.add_cli_args(parser)
    given = ["--model-path", model, *flags, "--adaptive-tp", *policy]
    given += ["--log-level", "error"] if quiet else []
    try:
        check_sglang()
        return AdaptiveServerArgs.from_cli_args(parser.parse_args(given))
    except UsageError:
        raise
    except (ValueError, OSError, SGLangMismatch, AssertionError) as error:
        raise UsageError(one_line(error)) from None


def _model_folder_error(model: str) -> str | None:
    """What is wrong with ``--model-path`` if it is meant as a folder."""
    folder = Path(model)
    if folder.is_dir():
        config = folder / "config.json"
        if not config.is_file():
            return f"--model-path {model}: no config.json there; give the folder of a model"
        try:
            json.loads(config.read_text())
        except ValueError:
            return f"--model-path {model}: its config.json is not JSON; give the folder of a model"
    elif folder.is_absolute() or model.startswith(".") or model.count("/") > 1 or folder.exists():
        return f"--model-path {model}: no such folder; give the folder of a model"
    return None


def deployment(args: Any) -> Fingerprint:
    """The fingerprint of what ``args`` would start, but for the sizes of its pools."""
    from sglang_pat.launch.spec import deployment as of

    return of(args, args.read_config())


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold back Ctrl-C while the engine starts, and from its processes for good.

    The terminal sends it to all processes of the command; ours stop when this one tells them to.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def start(args: Any) -> Any:
    """The engine; for a program that has no threads yet (``sglang_pat.launch.processes.fork_here``).

    Raises:
        UsageError: it did not start.
    """
    from sglang_pat.launch import processes

    with interrupts_held():
        try:
            processes.fork_here()
            from sglang_pat.server.engine import Engine

            return Engine(server_args=args)
        except (ValueError, RuntimeError, OSError) as error:
            raise UsageError(f"the engine did not start: {one_line(error)}") from None


def stop_on_term(engine: Any) -> None:
    """Make ``kill`` end the sweep as Ctrl-C does.

    SGLang would drain requests first; its handler is set when the first request comes, so call this later.
    """
    engine.loop.remove_signal_handler(signal.SIGTERM)
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def run(engine: Any, work: Callable[[], Any]) -> Any:
    """Run the coroutine function ``work`` on the engine's loop; Ctrl-C or ``kill`` raises KeyboardInterrupt here."""

    async def connected() -> Any:
        await engine.async_status()
        stop_on_term(engine)
        return await work()

    return engine.loop.run_until_complete(connected())
