"""How requests lie on the replicas of a layout."""

from __future__ import annotations

import numpy as np


def assigned(replica: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Requests and tokens of each replica that has any, ``[active replicas]`` each.

    Args:
        replica, lengths: of each request, ``[requests]``.
    """
    _, index, batch = np.unique(replica, return_inverse=True, return_counts=True)
    return batch, np.bincount(index, lengths, len(batch))


def even(requests: int, tokens: float, replicas: int) -> tuple[int, int, float]:
    """Active replicas, and requests and tokens of the fullest of them, when ``requests`` are spread evenly."""
    active = min(requests, replicas)
    return active, -(-requests // active), tokens / active
