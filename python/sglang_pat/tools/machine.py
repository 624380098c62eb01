"""What a figure was taken on."""

from __future__ import annotations

import os
import platform

from sglang_pat.predict.profile import cpu_model


def machine() -> dict[str, str | int | float]:
    """CPU model, cores this process may use, kernel, Python, torch, load before the run."""
    import torch

    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_before": round(os.getloadavg()[0], 2),
    }
