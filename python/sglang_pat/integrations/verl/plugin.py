"""The entry point that verl imports in each of its processes (group ``verl.plugins``).

verl keeps quiet if that fails, so the failure is told here.
"""

from __future__ import annotations

import logging

from sglang_pat.errors import format_one_line

try:
    from sglang_pat.integrations.verl import (  # noqa: F401 - these register themselves
        lending,
        missing_rewards,
        response_ends,
        streaming,
        trainers,
    )  # fmt: skip
    from sglang_pat.integrations.verl.registration import register

    register()
except Exception as error:
    logging.getLogger(__name__).error(
        "rollout.name=sglang_pat is not there for this job, its registration with verl failed: %s: %s",
        type(error).__name__,
        format_one_line(error),
    )
    raise
