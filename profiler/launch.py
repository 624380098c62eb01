"""Command line → engine: SGLang's flags go through to its own parser (:func:`make_server_args`), the engine is started
with ours (:func:`start`)."""

from __future__ import annotations

import logging
import os
import signal
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from sglang_pat.cpu import shim
from sglang_pat.launch.contract import SGLangMismatch, check_sglang
from sglang_pat.launch.refusals import check_model_path
from sglang_pat.predict.profile import Fingerprint
from sglang_pat.testing.prefork import ENVIRONMENT
from sglang_pat.tools.commands import Parser, UsageError, format_short_line

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


def make_server_args(model: str, flags: list[str], policy: Sequence[str] = MANUAL) -> Any:
    """``AdaptiveServerArgs`` for ``model`` with these flags of ours for the ``policy`` and SGLang's ``flags``.

    Raises:
        UsageError: one that neither knows, or that the adaptive engine does not support.
    """
    for flag in flags:
        if flag.split("=")[0] in OURS:
            raise UsageError(f"{flag}: the profiler decides on switches itself; leave it out")
    quiet = not any(flag.startswith("--log-level") for flag in flags)
    set_environment(quiet)
    try:
        check_model_path(model)
        shim.ensure()
        from sglang_pat.host.arguments import AdaptiveServerArgs, resolve

        parser = Parser(prog="profiler", allow_abbrev=True)  # SGLang's own --tp is an abbreviation
        AdaptiveServerArgs.add_cli_args(parser)
        arguments = ["--model-path", model, *flags, "--adaptive-tp", *policy]
        arguments += ["--log-level", "error"] if quiet else []
        check_sglang()
        return resolve(AdaptiveServerArgs.from_cli_args(parser.parse_args(arguments)))
    except (ValueError, OSError, SGLangMismatch, AssertionError) as error:
        raise UsageError(format_short_line(error)) from None


def make_fingerprint(args: Any) -> Fingerprint:
    """The fingerprint of what ``args`` would start, but for the sizes of its pools."""
    from sglang_pat.host.arguments import make_fingerprint as of

    return of(args, args.read_config())


def start(args: Any) -> Any:
    """The engine; for a program that has no threads yet (``sglang_pat.launch.processes.fork_here``).

    Ctrl-C is held back while it starts, and from its processes for good: the terminal sends it to all processes of the
    command; ours stop when this one tells them to.

    Raises:
        UsageError: it did not start.
    """
    from sglang_pat.launch import processes

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        processes.fork_here()
        from sglang_pat.server.engine import Engine

        return Engine(server_args=args)
    except (ValueError, RuntimeError, OSError) as error:
        raise UsageError(f"the engine did not start: {format_short_line(error)}") from None
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def run(engine: Any, work: Callable[[], Any]) -> Any:
    """Run the coroutine function ``work`` on the engine's loop; Ctrl-C or ``kill`` raises KeyboardInterrupt here."""

    async def connected() -> Any:
        await engine.async_status()
        # SGLang's handler is there from the first request on, and would drain requests first.
        engine.loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        return await work()

    return engine.loop.run_until_complete(connected())
