"""Weights of every layout: the base shards stay, other layouts are sliced from them.

The model object of a layout is built by SGLang's own constructor under that layout's groups;
its parameters lie at fixed addresses (the *arena*), so CUDA graphs stay valid over switches
and weight updates.  A parameter that is one contiguous piece of the base shard is a view and
needs no memory and no filling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from sglang.srt.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
from sglang.srt.model_loader.utils import set_default_torch_dtype

from sglang_pat.layout import ParallelLayout
from sglang_pat.weights.shards import WHOLE, Block, Copy, ShardSpec, copies, covered


def build_model(model_config, load_config, device: str) -> torch.nn.Module:
    """The host's model object under the groups that are installed now, weights uninitialised."""
    quantization = _get_quantization_config(model_config, load_config)
    with set_default_torch_dtype(model_config.dtype), torch.device(device):
        return _initialize_model(model_config, load_config, quantization).eval()


def shard_specs(model: torch.nn.Module) -> dict[str, ShardSpec]:
    """How each parameter of ``model`` is sharded, by parameter name.

    Raises:
        TypeError: a sharded layer of a class that is not known here.
    """
    specs: dict[str, ShardSpec] = {}
    for module_name, module in model.named_modules():
        spec = _module_spec(module)
        for name, _ in module.named_parameters(recurse=False):
            full_name = f"{module_name}.{name}" if module_name else name
            row_bias = isinstance(module, RowParallelLinear) and name == "bias"
            specs[full_name] = WHOLE if spec is None or row_bias else spec
    return specs


def _module_spec(module: torch.nn.Module) -> ShardSpec | None:
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
        raise TypeError(f"--adaptive-tp does not know how {type(module).__name__} is sharded")
    return None



@dataclass
class _View:
    """A parameter that is a contiguous piece (or the whole, ``piece`` None) of the base parameter."""

    target: torch.nn.Parameter
    source: torch.nn.Parameter
    piece: Copy | None

    def place(self) -> None:
        data = self.source.data
        self.target.data = data if self.piece is None else data.narrow(0, self.piece.src, self.piece.length)


@dataclass
class _Slice:
    """One parameter of a layout's arena: copies from the base parameter along ``dim``."""

    target: torch.nn.Parameter
    source: torch.nn.Parameter
    dim: int
    pieces: list[Copy]


class Arena:
    """One layout's parameters, sliced from the base model's.

    Life cycle: built once; stale until :meth:`fill` was called for the current weight version.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        base_model: torch.nn.Module,
        layout: ParallelLayout,
        base: ParallelLayout,
        rank: int,
    ) -> None:
        """Place ``model``'s parameters: views of ``base_model``'s where possible.

        Raises:
            ValueError: a parameter of this layout does not lie inside the base shard.
        """
        self.model = model
        self.version = -1
        self._slices: list[_Slice] = []
        self._views: list[_View] = []
        base_params = dict(base_model.named_parameters())
        base_specs, specs = shard_specs(base_model), shard_specs(model)
        for name, param in model.named_parameters():
            source, spec = base_params[name], specs[name]
            if spec.dim is None:
                _require(param.shape == source.shape, name, layout)
                self._views.append(_View(param, source, None))
                continue
            held = base_specs[name].intervals(base.tp, base.tp_rank(rank))
            wanted = spec.intervals(layout.tp, layout.tp_rank(rank))
            pieces = copies(held, wanted)
            size = param.shape[spec.dim]
            _require(sum(length for _, length in wanted) == size and covered(pieces) == size, name, layout)
            if len(pieces) == 1 and spec.dim == 0:
                self._views.append(_View(param, source, pieces[0]))
            else:
                self._slices.append(_Slice(param, source, spec.dim, pieces))
        for view in self._views:
            view.place()

    def fill(self, version: int) -> int:
        """Copy the slices of weight version ``version``; returns the bytes copied (0 if fresh)."""
        if version == self.version:
            return 0
        copied = 0
        for view in self._views:
            # A no-op unless a weight update replaced the base tensor instead of writing into it.
            view.place()
        with torch.no_grad():
            for entry in self._slices:
                for piece in entry.pieces:
                    entry.target.data.narrow(entry.dim, piece.dst, piece.length).copy_(
                        entry.source.data.narrow(entry.dim, piece.src, piece.length)
                    )
                copied += entry.target.nbytes
        self.version = version
        return copied


def _require(holds: bool, name: str, layout: ParallelLayout) -> None:
    if not holds:
        raise ValueError(
            f"the shard of {name} at tp={layout.tp} does not lie inside the base shard "
            f"(vocabulary padding?): leave tp={layout.tp} out of --pat-candidates or use --pat-weights reshard"
        )


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


def drop_weights(model: torch.nn.Module) -> None:
    """Give back the memory of ``model``'s parameters (reshard mode: only one layout holds weights)."""
    for param in model.parameters():
        param.data = param.data.new_empty(0)
