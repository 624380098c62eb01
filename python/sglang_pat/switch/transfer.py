"""Copies between host memory and a rank's device: a switch makes them here and nowhere else.

A copy to a GPU waits for nothing, a copy from it waits for all work that was launched before.  On a CPU nothing is
copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

Device = torch.device | str


def upload(values: np.ndarray | torch.Tensor | Sequence, dtype: torch.dtype, device: Device) -> torch.Tensor:
    """``values`` of host memory on ``device``; on a CPU an array or tensor of that type is taken as it is."""
    tensor = torch.as_tensor(values, dtype=dtype)
    if torch.device(device).type == "cpu":
        return tensor
    # From pageable memory torch waits for the copy.
    return tensor.pin_memory().to(device, non_blocking=True)


def download(tensor: torch.Tensor) -> np.ndarray:
    """``tensor`` in host memory; waits for the device."""
    return tensor.cpu().numpy()


def synchronize(device: Device) -> None:
    """Wait until the device has done everything that was launched, and raise what went wrong there."""
    if torch.device(device).type == "cuda":
        torch.cuda.current_stream().synchronize()
