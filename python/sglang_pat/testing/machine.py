"""What a figure was taken on."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def machine() -> dict[str, str | int | float]:
    """CPU model, cores this process may use, kernel, Python, torch, load before the run."""
    import torch

    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line.split(":", 1)[1] for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = models[0].strip() if models else model
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_before": round(os.getloadavg()[0], 2),
    }
