"""Launch the server: SGLang, plus ``--adaptive-tp``.

    python -m sglang_pat.launch_server --model-path M --tp 1 --dp 2 --adaptive-tp [any SGLang flag]

Without ``--adaptive-tp`` this runs SGLang's own launcher and nothing of the adaptive engine is imported.
``--stream-layers`` has such an engine keep layers in host memory.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from typing import Any

from sglang_pat.config import STREAM_VARIABLE
from sglang_pat.cpu import shim
from sglang_pat.launch import processes


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    shim.ensure(children=True)
    if any(word.startswith("--stream-layers") for word in argv):
        _serve_streaming(argv)
    elif "--adaptive-tp" in argv:
        _serve_adaptive(argv)
    elif STREAM_VARIABLE in os.environ:
        _serve_streaming(argv)
    else:
        _serve_plainly(argv)


def _serve_streaming(argv: list[str]) -> None:
    """As plainly, with layers in host memory.  Exits with one line for arguments that cannot be, SGLang's included."""
    from sglang_pat.errors import format_one_line
    from sglang_pat.judge.plan import CannotStream
    from sglang_pat.judge.refusals import take_flag

    try:
        rest = take_flag(argv)
        from sglang.srt import server_args

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
    if {"-h", "--help"} & {*argv}:
        print("Flags of SGLang. Those of the adaptive engine come with --adaptive-tp --help.", flush=True)
        print(
            "--stream-layers N|auto: keep N layers in host memory, or as many as must be (docs/judge.md).\n", flush=True
        )
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
