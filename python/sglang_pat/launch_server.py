"""Launch the server: SGLang, plus ``--adaptive-tp``.

    python -m sglang_pat.launch_server --model-path M --tp 1 --dp 2 --adaptive-tp [any SGLang flag]

Without ``--adaptive-tp`` this runs SGLang's own launcher and nothing of the adaptive engine is imported.
``--stream-layers`` has such an engine keep layers in host memory.  ``--help`` is about our flags, and imports nothing
of SGLang; ``--help-sglang`` lists all of its flags.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import runpy
import signal
import sys
import warnings

from sglang_pat.cpu import shim
from sglang_pat.launch import processes
from stream_layers import STREAM_VARIABLE

logger = logging.getLogger(__name__)

SGLANGS_HELP = "--help-sglang"


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & {*argv}:
        _print_help()
        return
    shim.ensure(children=True)
    if SGLANGS_HELP in argv:
        warnings.simplefilter("ignore")
        sys.argv[1:] = ["--help"]
        runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
    streams = any(word.startswith("--stream-layers") for word in argv)
    if "--adaptive-tp" in argv and not streams:
        _serve_adaptive(argv)
    elif streams or STREAM_VARIABLE in os.environ:
        _serve_streaming(argv)
    else:
        _serve_plainly(argv)


def _print_help() -> None:
    """Print our flags; SGLang has some three hundred more."""
    from sglang_pat.settings import add_flags

    parser = argparse.ArgumentParser(
        prog="python -m sglang_pat.launch_server",
        usage="%(prog)s --model-path M --tp N --dp N --adaptive-tp [flags]",
        description="SGLang's server, as one engine of tp x dp ranks that merges its replicas as a batch drains.",
        epilog="Flags of SGLang work as they do there, but for those that docs/flags.md lists.",
    )
    parser.add_argument(SGLANGS_HELP, action="store_true", help="list all flags of SGLang and exit")
    parser.add_argument("--model-path", metavar="M", help="the model's folder or name, as for SGLang")
    parser.add_argument("--tp", type=int, metavar="N", help="ranks of a replica in the layout to start in")
    parser.add_argument("--dp", type=int, metavar="N", help="replicas of the layout to start in")
    parser.add_argument(
        "--stream-layers", metavar="N|auto",
        help="without --adaptive-tp: keep N layers in host memory, or as many as must be (docs/judge.md)",
    )  # fmt: skip
    add_flags(parser)
    parser.print_help()


def _serve_adaptive(argv: list[str]) -> None:
    """Serve until a signal ends it; whatever happens, no process and no socket stays."""
    processes.exit_on_signals()
    try:
        launch(argv)
    finally:
        # SGLang's watchdog reports with it what we now do ourselves.
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)
        processes.end_children()
        gc.unfreeze()  # what preload.py has frozen Triton would call leaked, in 40 lines


def launch(argv: list[str]) -> None:
    """Serve until a signal ends it.  Exits with one line if the arguments, the machine or SGLang do not fit."""
    from sglang_pat.errors import format_one_line
    from sglang_pat.launch.contract import SGLangMismatch
    from sglang_pat.launch.refusals import check_command_line, check_port

    try:
        check_command_line(argv)
        processes.fork_here()
    except ValueError as error:
        sys.exit(f"error: {error}")

    from sglang_pat.host.arguments import parse_args, prepare_start
    from sglang_pat.host.engine import serve
    from sglang_pat.server.engine import AdaptiveEngine
    from sglang_pat.server.http import add_routes

    try:
        arguments = parse_args(argv)
        check_port(arguments.host, arguments.port)
        server_args = prepare_start(arguments)
    except (ValueError, AssertionError, OSError, SGLangMismatch) as error:
        logger.debug("refused", exc_info=True)
        sys.exit(f"error: {format_one_line(error)}")
    try:
        serve(server_args, AdaptiveEngine, add_routes)
    except processes.NotStarted as error:
        sys.exit(f"error: {error}")


def _serve_streaming(argv: list[str]) -> None:
    """Serve with SGLang's own launcher, with layers in host memory.  Exits with one line for arguments that cannot be,
    SGLang's included."""
    from stream_layers.judge_memory import CannotStream
    from stream_layers.refusals import take_flag

    try:
        rest = take_flag(argv)
        from sglang_pat.host.plain import refuse_in_one_line

        refuse_in_one_line(CannotStream)
        _serve_plainly(rest)
    except CannotStream as error:
        sys.exit(f"error: {error}")


def _serve_plainly(argv: list[str]) -> None:
    stray = [arg for arg in argv if arg.startswith("--pat-")]
    if stray:
        sys.exit(f"error: {stray[0]} needs --adaptive-tp: add it, or leave the --pat-* flags out")
    sys.argv[1:] = argv
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
