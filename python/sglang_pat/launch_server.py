"""Launch the server: SGLang, plus ``--adaptive-tp``.

    python -m sglang_pat.launch_server --model-path M --tp 1 --dp 2 --adaptive-tp [any SGLang flag]

Without ``--adaptive-tp`` this runs SGLang's own launcher and nothing of the adaptive engine is imported.
``--stream-layers`` has such an engine keep layers in host memory.  ``--help`` is about our flags, and imports nothing
of SGLang; ``--help-sglang`` lists all of its flags.
"""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import sys
import warnings
from typing import Any

from sglang_pat.cpu import shim
from sglang_pat.launch import processes
from stream_layers import STREAM_VARIABLE

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
    if any(word.startswith("--stream-layers") for word in argv):
        _serve_streaming(argv)
    elif "--adaptive-tp" in argv:
        _serve_adaptive(argv)
    elif STREAM_VARIABLE in os.environ:
        _serve_streaming(argv)
    else:
        _serve_plainly(argv)


def _print_help() -> None:
    """Our flags; SGLang has some three hundred more."""
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


def _serve_streaming(argv: list[str]) -> None:
    """As plainly, with layers in host memory.  Exits with one line for arguments that cannot be, SGLang's included."""
    from sglang_pat.errors import format_one_line
    from stream_layers.plan import CannotStream
    from stream_layers.refusals import take_flag

    try:
        rest = take_flag(argv)
        import sglang.srt.server_args as server_args  # pyright: ignore[reportMissingTypeStubs]

        prepare = server_args.prepare_server_args

        def prepare_or_refuse(argv: list[str]) -> Any:
            try:
                return prepare(argv)
            except Exception as error:
                raise CannotStream(format_one_line(error)) from error

        server_args.prepare_server_args = prepare_or_refuse  # SGLang's launcher takes it from its module
        _serve_plainly(rest)
    except CannotStream as error:
        sys.exit(f"error: {error}")


def _serve_plainly(argv: list[str]) -> None:
    stray = [arg for arg in argv if arg.startswith("--pat-")]
    if stray:
        sys.exit(f"error: {stray[0]} needs --adaptive-tp: add it, or leave the --pat-* flags out")
    sys.argv[1:] = argv
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def _serve_adaptive(argv: list[str]) -> None:
    """Serve until a signal ends it; whatever happens, no process and no socket stays."""
    from sglang_pat.launch import refusals

    processes.exit_on_signals()
    try:
        try:
            refusals.check_command_line(argv)
            processes.fork_here()
        except ValueError as error:
            sys.exit(f"error: {error}")
        from sglang_pat.server.http import launch

        launch(argv)
    finally:
        # SGLang's watchdog reports with it what we now do ourselves.
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)
        processes.end_children()


if __name__ == "__main__":
    main()
