"""``--pat-weights reshard``: one copy of the weights, moved at the switch, as PAT does (to compare with)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from sglang_pat.layout import ParallelLayout
from sglang_pat.rank.sharding import shard_specs
from sglang_pat.rank.shards import copies


def reshard(
    old_model: torch.nn.Module,
    new_model: torch.nn.Module,
    old: ParallelLayout,
    new: ParallelLayout,
    rank: int,
    group: dist.ProcessGroup,
) -> None:
    """Move the weights to another layout the way PAT does (section 4.3): all-gather, then slice.

    Parameter by parameter inside the old TP group ``group``, so that the extra memory is one full
    parameter; the old shard is given up as soon as the new one stands.  All ranks call it together.
    """
    specs = shard_specs(new_model)
    old_specs = shard_specs(old_model)
    old_params = dict(old_model.named_parameters())
    with torch.no_grad():
        for name, param in new_model.named_parameters():
            source, spec = old_params[name], specs[name]
            if spec.dim is None:
                param.data = source.data
                continue
            shards = [source.data]
            if old.tp > 1:
                shards = [torch.empty_like(source.data) for _ in range(old.tp)]
                dist.all_gather(shards, source.data.contiguous(), group=group)
            shape = list(source.shape)
            wanted = spec.intervals(new.tp, new.tp_rank(rank))
            shape[spec.dim] = sum(length for _, length in wanted)
            target = source.data.new_zeros(shape)
            for tp_rank, shard in enumerate(shards):
                for piece in copies(old_specs[name].intervals(old.tp, tp_rank), wanted):
                    target.narrow(spec.dim, piece.dst, piece.length).copy_(
                        shard.narrow(spec.dim, piece.src, piece.length)
                    )
            param.data = target
            source.data = source.data.new_empty(0)
