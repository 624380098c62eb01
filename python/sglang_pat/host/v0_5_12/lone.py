"""One rank without its peers (``testing/lone.py``)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from sglang.srt import server_args
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sglang_pat.host.assign import assigned


def publish_arguments(args: ServerArgs) -> None:
    """Make ``args`` those of this process."""
    set_global_server_args_for_scheduler(args)


def use_arguments(args: ServerArgs) -> AbstractContextManager[Any]:
    """Have ``args`` be those of this process inside the block."""
    return assigned(server_args, _global_server_args=args)


def init_layers(args: ServerArgs, config: ModelConfig) -> None:
    """Set up what layers look at, once the groups are there."""
    initialize_dp_attention(server_args=args, model_config=config)
