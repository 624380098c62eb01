"""What is looked at before anything is started; every refusal is a ``ValueError`` of one line."""

from __future__ import annotations

import ipaddress
import logging
import os
import shutil
from pathlib import Path

from sglang_pat.config import AdaptiveConfig
from sglang_pat.launch import cuda, memory, sharing
from sglang_pat.launch.args import AdaptiveServerArgs, outer_view
from sglang_pat.launch.contract import check_sglang
from sglang_pat.launch.deployment import check_files
from sglang_pat.launch.folder import private_folder
from sglang_pat.launch.spec import EngineSpec
from sglang_pat.memory.plan import advice

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
STAGING_BYTES = 128 << 10
"""Of a rank in a group's segment, at least (``csrc/segment.h``)."""
CHANNEL_BYTES = 132 << 10
"""Between two ranks of a group."""


def ready(args: AdaptiveServerArgs) -> AdaptiveServerArgs:
    """The outer view of ``args``, checked, with its :class:`EngineSpec`; what is ready already comes back as it is.

    Raises:
        SGLangMismatch: another SGLang.
        ValueError: files that cannot be used, memory that does not suffice.
    """
    if args.resolved:
        return args
    check_sglang()
    private_folder()
    spec = resolve(args)
    check_shared_memory(spec.config)
    if args.device == "cuda":
        for line in cuda.lines(args, spec):
            logger.warning(line)
    if spec.memory is not None:
        for line in spec.memory.table().splitlines():
            logger.info(line)
        if line := advice(spec.memory):
            logger.warning(line)
        args = memory.with_pool(args, spec.memory)
    return outer_view(args, spec)


def resolve(args: AdaptiveServerArgs) -> EngineSpec:
    """Everything that is decided before the first process is started.  Raises ValueError, as :func:`ready`."""
    config = args.read_config()
    profile = check_files(args, config)
    sizes = cuda.graph_sizes(args, config, profile)
    places = [0 if sharing.shared() else config.place(rank) for rank in range(config.num_ranks)]
    gpus = tuple(args.base_gpu_id + place * args.gpu_id_step for place in places)
    plan = memory.plan(args, config, sizes, gpus) if args.device in ("cpu", "cuda") else None
    return EngineSpec(config=config, profile=profile, graph_sizes=sizes, memory=plan, gpus=gpus)


def check_shared_memory(config: AdaptiveConfig) -> None:
    """Raise ``ValueError`` unless the groups' segments find room."""
    need = shared_memory_needed(config)
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError as error:
        raise ValueError(f"{SHARED_MEMORY}: {error.strerror}; ranks meet in shared memory") from None
    if not os.access(SHARED_MEMORY, os.W_OK):
        raise ValueError(f"{SHARED_MEMORY} cannot be written; ranks meet in shared memory")
    if free < need:
        raise ValueError(
            f"{SHARED_MEMORY} has {free >> 20} MiB free, {config.num_ranks} ranks need {-(-need >> 20)} MiB: "
            f"enlarge it (docker: --shm-size)"
        )


def shared_memory_needed(config: AdaptiveConfig) -> int:
    """Bytes of all groups' segments at their smallest, and of one whole segment of all ranks beside them."""
    ranks, layouts = config.num_ranks, len(config.layouts)
    # The world, two groups of each layout, one for each pair of layouts: all ranks are in each of these once.
    places = 1 + 2 * layouts + layouts * (layouts - 1) // 2
    return places * ranks * STAGING_BYTES + ranks * ranks * CHANNEL_BYTES


def warn_if_open(args: AdaptiveServerArgs) -> None:
    """Say so if others than this machine's users can send requests, with no key."""
    if args.api_key is None and not _is_loopback(args.host):
        logger.warning(
            "listening on %s without --api-key: whoever reaches port %d can use this server", args.host, args.port
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
