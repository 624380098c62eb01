"""One rank without its peers (``testing/lone.py``)."""

from __future__ import annotations

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler


def publish_arguments(args: ServerArgs) -> None:
    """Make ``args`` those of this process."""
    set_global_server_args_for_scheduler(args)


def init_layers(args: ServerArgs, config: ModelConfig) -> None:
    """Set up what layers look at, once the groups are there."""
    initialize_dp_attention(server_args=args, model_config=config)
