"""The shared-memory ``torch.distributed`` backend for CPU tensors, ``"pat_shm"``.

    from sglang_pat.cpu import shm
    shm.register()
    dist.init_process_group(backend=shm.BACKEND, ...)      # or
    group = dist.new_group(ranks, backend=shm.BACKEND)     # under a world of any backend

All ranks of a group must run on one node and share /dev/shm. Operations are done when they return; results
of reductions are the same bits on every rank. A rank that dies makes the others raise ``DistBackendError``
within about 0.1 s, with its name; after any such error the group is unusable.

An emulated link makes every operation take at least ``latency + bytes / bandwidth``, with the bytes that the
busiest rank would send or receive. With S the bytes of the tensor (of one rank's input for gathers, of one
rank's output for reduce_scatter and scatter) and n ranks:

    ====================================  =========================================================
    all_reduce                            2 (n-1)/n S
    all_gather, reduce_scatter            (n-1) S
    gather, scatter                       (n-1) S
    broadcast, reduce, send and recv      S
    all_to_all                            largest row or column sum of the split matrix, own part out
    barrier                               0
    ====================================  =========================================================

A group of one rank has no link. Say so beside any figure that was taken with an emulated link.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

BACKEND = "pat_shm"
"""Name for ``init_process_group`` and ``new_group``."""

LINK_ENV = "SGLANG_PAT_LINK"
"""Environment variable ``"<latency_us>:<GB_per_s>"``, read when a group is created; the same on all its ranks."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """An emulated link."""

    latency_us: float
    """Microseconds that every operation takes at least, 0 or more."""
    gb_per_s: float
    """Bandwidth in 1e9 bytes a second, one way, more than 0."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency_us) and 0 <= self.latency_us <= 1e7):
            raise ValueError(f"link latency is {self.latency_us} us; allowed: 0 to 10,000,000")
        if not (math.isfinite(self.gb_per_s) and 1e-6 <= self.gb_per_s <= 1e6):
            raise ValueError(f"link bandwidth is {self.gb_per_s} GB/s; allowed: 0.000001 to 1,000,000")

    @classmethod
    def parse(cls, text: str) -> Link:
        """Reads ``"<latency_us>:<GB_per_s>"``. Errors: ValueError."""
        try:
            latency, bandwidth = (float(part) for part in text.split(":"))
        except ValueError:
            raise ValueError(
                f'{LINK_ENV} is "{text}"; allowed: "<latency_us>:<GB_per_s>", for example "10:25"'
            ) from None
        return cls(latency_us=latency, gb_per_s=bandwidth)


def get_current_link() -> Link | None:
    """The emulated link that a group created now would have.

    Errors: ValueError (bad environment variable).
    """
    text = os.environ.get(LINK_ENV, "")
    return Link.parse(text) if text else None


def is_available() -> bool:
    """Whether the extension ``sglang_pat._C`` is built."""
    return find_spec("sglang_pat._C") is not None


def register() -> None:
    """Registers the backend with ``torch.distributed``; again is harmless.

    Errors: RuntimeError if the extension is not built.
    """
    if BACKEND in dist.Backend.backend_list:
        return
    if not is_available():
        raise RuntimeError("sglang_pat._C is not built; run `pip install --no-build-isolation -e .` in the repository")
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])


def get_backend(group: dist.ProcessGroup) -> Any:
    """The ``ShmBackend`` behind a group of this backend, for what ``torch.distributed`` has no call for.

    ``meet(link_bytes)``: a barrier that takes as long as the emulated link takes for so many bytes, the same number on
    every rank; returns a ``Work``.
    """
    return group._get_backend(torch.device("cpu"))


def _create(options, _backend_options):
    """Called by torch.distributed on every rank of a new group, with ``c10d::DistributedBackendOptions``."""
    extension = import_module("sglang_pat._C")
    link = get_current_link()
    world = dist.get_world_size() if dist.is_initialized() else options.group_size
    return extension.create_shm_backend(
        store=options.store,
        rank=options.group_rank,
        size=options.group_size,
        timeout_ms=max(1, int(options.timeout.total_seconds() * 1000)),
        id=options.group_id or "world",
        global_ranks=list(options.global_ranks_in_group),
        node_ranks=max(world, options.group_size),
        link_latency_us=link.latency_us if link else 0.0,
        link_gb_per_s=link.gb_per_s if link else 0.0,
    )
