"""Tensors that a trainer hands over in shared memory, on a machine that is busy.

Without this an update of the weights is refused now and then, since torch waits a second only.

Upstream: https://github.com/pytorch/pytorch/issues/2482
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.multiprocessing import reductions

LATE, ATTEMPTS = "Shared memory manager connection has timed out", 30
"""Torch's message when its helper for shared memory takes more than a second to answer, as on a busy machine, and the
number of tries."""


def retry_late(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes ``call`` again while torch's helper is only late, :data:`ATTEMPTS` times at most."""

    @wraps(call)
    def repeated(*args: Any, **kwargs: Any) -> Any:
        for _ in range(ATTEMPTS - 1):
            try:
                return call(*args, **kwargs)
            except RuntimeError as error:
                if LATE not in str(error):
                    raise
        return call(*args, **kwargs)

    return repeated


def open_with_retry() -> None:
    """Have torch open shared memory patiently in this process.

    One storage at a time, and not a whole list of tensors: whoever opens a storage takes one off the count of those who
    are still to open it.  One that is opened a second time may be gone before another rank has it.
    """
    if not hasattr(reductions.rebuild_storage_filename, "__wrapped__"):
        reductions.rebuild_storage_filename = retry_late(reductions.rebuild_storage_filename)
