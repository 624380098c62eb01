"""The machine that a figure was taken on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

from sglang_pat.predict.profile import read_cpu_model
from sglang_pat.version import __version__


def describe_machine() -> dict[str, str | int | float]:
    """CPU model, cores this process may use, kernel, Python, versions, load before the run.

    ``emulated_link``: what the environment says that the link between ranks is to be slowed down to, if it does.
    """
    import torch

    from sglang_pat.cpu.shm import LINK_ENV

    link = os.environ.get(LINK_ENV)
    return {
        "cpu": read_cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "sglang": version("sglang"),
        "sglang_pat": __version__,
        "load_before": round(os.getloadavg()[0], 2),
    } | ({"emulated_link": link} if link else {})
