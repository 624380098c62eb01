"""A check at start (:func:`check_shards`): our intervals are SGLang's shards, as its own weight loaders say.

In each layout every parameter's loader is given a full tensor that is as long as the checkpoint's along the sharded
dimension and one wide along the others, and whose values are positions.  What arrives in the shard is then compared
with the intervals that the views are cut by.  No checkpoint is read, and the real weights are not touched.

A checkpoint has the experts of a mixture one by one: some of them are loaded, with positions of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sglang_pat.host import layers
from sglang_pat.rank.shards import ShardError, ShardSpec

PADDING = 0.0
"""Value that SGLang's loader writes where a shard reaches beyond the vocabulary; positions start at 1."""


def check_heads(model: torch.nn.Module, tp: int, kv_heads: int) -> None:
    """Check that each attention layer takes K and V as they are cut: SGLang's GPT-2 takes all heads at any degree.

    Args:
        kv_heads: number of KV heads of the whole model.

    Raises:
        ShardError: names the first layer that does not.
    """
    local = max(1, kv_heads // tp)
    for name, heads in layers.list_attention_heads(model):
        if heads != local:
            raise ShardError(name, tp, f"SGLang gives it {heads} KV heads on each rank, must be {local}")


def check_shards(model: torch.nn.Module, tp: int, tp_rank: int) -> None:
    """Compare the intervals of every parameter of ``model``, built for this rank, with what its loader puts there.

    Raises:
        ShardError: they differ; names the first such parameter.
    """
    specs = layers.make_shard_specs(model)
    for module_name, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            full_name = f"{module_name}.{name}" if module_name else name
            spec = specs[full_name]
            try:
                loaded = _load_positions(module, name, param, spec)
            except Exception as error:
                why = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
                raise ShardError(full_name, tp, f"SGLang's loader does not shard it as expected ({why})") from error
            positions = _list_positions(module, param, spec, tp, tp_rank)
            if not torch.equal(loaded, positions):
                raise ShardError(full_name, tp, "SGLang's loader puts other parts there than expected")


def _load_positions(module: torch.nn.Module, name: str, param: torch.nn.Parameter, spec: ShardSpec) -> torch.Tensor:
    """Positions that SGLang's loader puts into the shard, ``[length along the sharded dimension]``.

    A mixture has those of each expert that is looked at, one after the other.
    """
    real = param.data
    loader = layers.get_weight_loader(param)
    experts = _choose_experts(module)
    reduced = _make_reduced_shape(real.shape, spec.dim)
    if experts:
        reduced[0] = len(real)
    param.data = real.new_full(reduced, -1.0, dtype=torch.float64)
    try:
        for shard_id, positions in _make_checkpoint_tensors(module, param, spec):
            shape = [1] * real.dim()
            if shape:
                shape[spec.dim or 0] = -1
            full = positions.to(real.device).view(shape)
            if experts:
                for expert in experts:
                    own = full[0] + expert * _count(spec)
                    loader(param, own, f"experts.{name}", shard_id=shard_id, expert_id=expert)
            else:
                loader(param, full) if shard_id is None else loader(param, full, shard_id)
        return (param.data[experts] if experts else param.data).flatten().cpu()
    finally:
        param.data = real


def _choose_experts(module: torch.nn.Module) -> list[int]:
    """Numbers of the experts that are looked at; none of a layer that has no experts."""
    count = layers.count_experts(module)
    return sorted({0, 1, count - 1}) if count else []


def _count(spec: ShardSpec) -> int:
    return sum(block.size for block in spec.blocks)


def _make_reduced_shape(shape: torch.Size, dim: int | None) -> list[int]:
    """``shape`` with one element along all dimensions but ``dim`` (the first, for a parameter that is whole)."""
    return [size if i == (dim or 0) else 1 for i, size in enumerate(shape)]


def _make_checkpoint_tensors(
    module: torch.nn.Module, param: torch.nn.Parameter, spec: ShardSpec
) -> Iterator[tuple[object, torch.Tensor]]:
    """Tensors that a checkpoint has for this parameter: SGLang's shard id, and positions from 1 on."""
    if spec.dim is None:
        yield None, _make_range(0, param.shape[0] if param.dim() else 1)
        return
    origin = 0
    for shard_id, length in layers.list_checkpoint_parts(module, spec).items():
        yield shard_id, _make_range(origin, length)
        origin += length


def _list_positions(
    module: torch.nn.Module, param: torch.nn.Parameter, spec: ShardSpec, tp: int, tp_rank: int
) -> torch.Tensor:
    """Positions of the intervals that we take for the shard's."""
    if spec.dim is None:
        return _make_range(0, param.shape[0] if param.dim() else 1)
    positions = torch.cat([_make_range(start, length) for start, length in spec.list_intervals(tp, tp_rank)])
    if (words := layers.count_words(module)) is not None:
        positions[positions > words] = PADDING
    if experts := _choose_experts(module):
        return torch.cat([positions + expert * _count(spec) for expert in experts])
    return positions


def _make_range(start: int, length: int) -> torch.Tensor:
    return torch.arange(start + 1, start + length + 1, dtype=torch.float64)
