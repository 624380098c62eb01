"""Launch the server: SGLang, plus ``--adaptive-tp``.

    python -m sglang_pat.launch_server --model-path M --tp 1 --dp 2 --adaptive-tp [any SGLang flag]

Without ``--adaptive-tp`` this runs SGLang's own launcher and nothing of the adaptive engine is imported.
"""

from __future__ import annotations

import runpy
import sys

from sglang_pat.host import cpu_shim, processes


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if cpu_shim.needed():
        cpu_shim.install()
        cpu_shim.install_for_children()
    if "--adaptive-tp" in argv:
        processes.warm()
        from sglang_pat.host.http import launch

        launch(argv)
        return
    stray = [arg for arg in argv if arg.startswith("--pat-")]
    if stray:
        sys.exit(f"error: {stray[0]} needs --adaptive-tp: add it, or leave the --pat-* flags out")
    sys.argv[1:] = argv
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
