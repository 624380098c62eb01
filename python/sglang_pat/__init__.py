"""SGLang plus adaptive tensor parallelism for synchronous RL generation.

The package itself imports neither ``torch`` nor ``sglang``; everything heavy is
loaded on first use, so ``launch_server`` without ``--adaptive-tp`` is plain SGLang.
"""

from typing import TYPE_CHECKING

from sglang_pat.layout import ParallelLayout
from sglang_pat.version import __version__

if TYPE_CHECKING:
    from sglang_pat.server.engine import Engine

__all__ = ["Engine", "ParallelLayout", "__version__"]


def __getattr__(name: str):
    if name == "Engine":
        from sglang_pat.server.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
