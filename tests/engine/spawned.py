"""A program that starts SGLang as NeMo-RL and slime do: it makes stock arguments, and a spawned process is given them.

python -m tests.engine.spawned --model-path M --tp 2 [any SGLang flag]
"""

from __future__ import annotations

import multiprocessing
import sys
from typing import TYPE_CHECKING

from sglang_pat.cpu import shim
from sglang_pat.launch import processes
from sglang_pat.testing.prefork import die_with_parent

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def serve(arguments: ServerArgs) -> None:
    """Run SGLang's own function in the spawned process, with what saves the ranks an import of SGLang."""
    die_with_parent()
    processes.fork_here()
    from sglang.srt.entrypoints.http_server import launch_server

    launch_server(arguments)


def main() -> None:
    if shim.is_needed():
        shim.install()
        shim.install_for_children()
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    arguments = prepare_server_args(sys.argv[1:])
    assert type(arguments) is ServerArgs, "SGLang's own"
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(arguments,))
    process.start()
    process.join()
    sys.exit(process.exitcode)


if __name__ == "__main__":
    main()
