"""How SGLang's layers shard their parameters, as intervals of the full tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sglang.srt.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

from sglang_pat.rank.shards import WHOLE, Block, ShardSpec


class Unsupported(ValueError):
    """The model turned out at start to be one that cannot cross a switch; one line with why and what to do."""


class ShardError(Unsupported):
    """It is because of how a parameter is sharded."""

    def __init__(self, parameter: str, tp: int, why: str, advice: str = "this model is not supported") -> None:
        super().__init__(f"--adaptive-tp, {parameter} at tp={tp}: {why}: {advice}")


def shard_specs(model: torch.nn.Module) -> dict[str, ShardSpec]:
    """How each parameter of ``model`` is sharded, by parameter name.

    Raises:
        ShardError: a sharded layer of a class that is not known here.
    """
    specs: dict[str, ShardSpec] = {}
    for module_name, module in model.named_modules():
        spec = _module_spec(module_name, module)
        for name, _ in module.named_parameters(recurse=False):
            full_name = f"{module_name}.{name}" if module_name else name
            row_bias = isinstance(module, RowParallelLinear) and name == "bias"
            specs[full_name] = WHOLE if spec is None or row_bias else spec
    return specs


def checkpoint_parts(module: torch.nn.Module, spec: ShardSpec) -> dict[str | int | None, int]:
    """What a checkpoint may have for a sharded parameter: SGLang's shard id of each part, and its length along the
    sharded dimension."""
    if isinstance(module, VocabParallelEmbedding):
        return {None: module.org_vocab_size}
    ids: Sequence[str | int | None] = (None,)
    if isinstance(module, QKVParallelLinear):
        ids = ("q", "k", "v")
    elif isinstance(module, MergedColumnParallelLinear):
        ids = range(len(spec.blocks))
    return {shard_id: block.size for shard_id, block in zip(ids, spec.blocks, strict=True)}


def _module_spec(name: str, module: torch.nn.Module) -> ShardSpec | None:
    if isinstance(module, QKVParallelLinear):
        heads, kv_heads = module.total_num_heads, module.total_num_kv_heads
        return ShardSpec(
            0,
            (
                Block(heads * module.head_size, heads),
                Block(kv_heads * module.head_size, kv_heads),
                Block(kv_heads * module.v_head_size, kv_heads),
            ),
        )
    if isinstance(module, MergedColumnParallelLinear):
        return ShardSpec(0, tuple(Block(size) for size in module.output_sizes))
    if isinstance(module, ColumnParallelLinear):
        return ShardSpec(0, (Block(module.output_size),))
    if isinstance(module, RowParallelLinear):
        return ShardSpec(1, (Block(module.input_size),))
    if isinstance(module, VocabParallelEmbedding):
        return ShardSpec(0, (Block(module.num_embeddings_padded),))
    if getattr(module, "tp_size", 1) > 1 and list(module.parameters(recurse=False)):
        raise ShardError(name, module.tp_size, f"it is not known how {type(module).__name__} is sharded")
    return None
