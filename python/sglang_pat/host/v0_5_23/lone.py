"""One rank without its peers (``testing/lone.py``)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import bootstrap
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.runtime_context import SpawnRanks, create_context, publish, use_context
from sglang.srt.server_args import ServerArgs


def publish_arguments(args: ServerArgs) -> None:
    """Make ``args`` those of this process."""
    args.resolve_once()
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0))


def use_arguments(args: ServerArgs) -> AbstractContextManager[Any]:
    """Have ``args`` be those of this process inside the block."""
    args.resolve_once()
    return use_context(create_context(args, role="scheduler", ranks=SpawnRanks(world_rank=0)))


def init_layers(args: ServerArgs, config: ModelConfig) -> None:
    """Set up what layers look at, once the groups are there."""
    initialize_dp_attention(server_args=args)
    bootstrap.init_layer_runtime(model_config=config)
