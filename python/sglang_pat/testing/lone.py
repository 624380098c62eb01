"""One rank of a TP group without its peers: models of any degree in one process, for benches and tests of shards."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.parallel_state import GroupCoordinator, init_model_parallel_group
from sglang.srt.server_args import ServerArgs

from sglang_pat.host import adapter
from sglang_pat.host.layers import build_model


class LoneGroup(GroupCoordinator):
    """A TP group of which only this rank exists: what its peers would have is what it has itself."""

    def __init__(self, single: GroupCoordinator, tp: int, tp_rank: int) -> None:
        vars(self).update(vars(single))
        self.world_size, self.rank_in_group = tp, tp_rank

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        return input_

    def all_gather(self, input_: torch.Tensor, dim: int = -1, *_) -> torch.Tensor:
        return torch.cat([input_] * self.world_size, dim)

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
        output.copy_(torch.cat([input] * self.world_size))


class LoneRank:
    """Builder of the models that a rank has in each layout, one in a process: SGLang's groups are global."""

    def __init__(self, server_args: ServerArgs) -> None:
        adapter.rank.publish_arguments(server_args)
        self.config = ModelConfig.from_server_args(server_args)
        if not dist.is_initialized():
            store = Path(tempfile.mkdtemp()) / "store"
            parallel_state.init_distributed_environment(
                backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{store}"
            )
        self._single = init_model_parallel_group([[0]], 0, "gloo", group_name="single")
        self.install(1, 0)
        adapter.rank.init_layers(server_args, self.config)

    def install(self, tp: int, tp_rank: int) -> None:
        """Be TP rank ``tp_rank`` of degree ``tp``."""
        adapter.rank.set_global_groups(LoneGroup(self._single, tp, tp_rank), self._single)

    def make_model(self, tp: int, tp_rank: int) -> torch.nn.Module:
        """SGLang's model of this rank at degree ``tp``; its parameters hold no memory."""
        self.install(tp, tp_rank)
        return build_model(self.config, LoadConfig(), "cpu")
