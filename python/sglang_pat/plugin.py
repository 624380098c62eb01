"""The entry point that SGLang calls in each of its processes (group ``sglang.srt.plugins``).

Without the variable ``SGLANG_PAT`` it imports nothing and changes nothing.
"""

from __future__ import annotations

import os
import sys

from sglang_pat.config import VARIABLE


def plugin() -> None:
    """:func:`sglang_pat.launch.attach.attach` with the settings of ``SGLANG_PAT``.

    It fails closed: SGLang logs an exception of a plug-in and goes on without it, so an error here ends the process.
    """
    if VARIABLE not in os.environ:
        return
    from sglang_pat import errors, settings

    try:
        from sglang_pat.launch import attach

        if not attach.is_attached():  # else by an adapter, which has read the variable, too
            attach.attach(settings.read_environment(), VARIABLE)
    except Exception as error:
        sys.exit(f"error: {errors.format_one_line(error)}")
