"""The entry point that SGLang calls in each of its processes (group ``sglang.srt.plugins``).

Without the variables ``SGLANG_PAT`` and ``SGLANG_PAT_STREAM_LAYERS`` it imports nothing and changes nothing.
"""

from __future__ import annotations

import os
import sys

from sglang_pat.config import VARIABLE
from stream_layers import STREAM_VARIABLE


def plugin() -> None:
    """:func:`sglang_pat.server.attach.attach` with the settings of ``SGLANG_PAT``; for a judge that streams layers
    :func:`stream_layers.attach.attach`.

    It fails closed: SGLang logs an exception of a plug-in and goes on without it, so an error here ends the process.
    """
    if not {VARIABLE, STREAM_VARIABLE} & os.environ.keys():
        return
    from sglang_pat import errors, settings

    try:
        if STREAM_VARIABLE in os.environ:
            from stream_layers import attach as judge

            judge.attach()
            return
        from sglang_pat.server import attach

        if not attach.is_attached():  # else by an adapter, which has read the variable, too
            attach.attach(settings.read_environment(), VARIABLE)
    except Exception as error:
        sys.exit(f"error: {errors.format_one_line(error)}")
