"""What SGLang does before a crash ends it."""

from __future__ import annotations

from typing import Any

from sglang.srt.environ import envs


def dump_requests(manager: Any) -> None:
    """Write the requests of ``--crash-dump-folder``.

    SGLang would also wait five seconds to look into its schedulers, which it finds by a title that ranks do not have.
    """
    with envs.SGLANG_PYSPY_DUMP_BEFORE_CRASH.override(False), envs.SGLANG_CUDA_COREDUMP_BEFORE_CRASH.override(False):
        manager.dump_requests_before_crash()
