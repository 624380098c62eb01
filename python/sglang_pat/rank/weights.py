"""Weights of every layout: the base shards stay, and all other layouts are views of them.

The model object of a layout is built by SGLang's own constructor under that layout's groups, without memory
for its parameters.  A parameter that is one interval of the base shard, in rows or in columns, becomes a view
of it.  One that is several (q, k and v; gate and up; those of experts) is multiplied piece by piece.  So a
weight update is in force in every layout at once, and there is nothing to fill, to release or to invalidate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from sglang.srt.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
from sglang.srt.model_loader.utils import set_default_torch_dtype
from torch.overrides import TorchFunctionMode

from sglang_pat.layout import ParallelLayout
from sglang_pat.rank.experts import PiecewiseExperts, find_reason_against
from sglang_pat.rank.shards import WHOLE, Block, Copy, ShardSpec, count_covered, list_copies

if TYPE_CHECKING:
    from sglang_pat.rank.pieces_triton import Pieces  # with it comes Triton


class Unsupported(ValueError):
    """The model turned out at start to be one that cannot cross a switch; one line with why and what to do."""


class ShardError(Unsupported):
    """It is because of how a parameter is sharded."""

    def __init__(self, parameter: str, tp: int, why: str, advice: str = "this model is not supported") -> None:
        super().__init__(f"--adaptive-tp, {parameter} at tp={tp}: {why}: {advice}")


# -- how SGLang's layers shard their parameters, as intervals of the full tensors --------------------------------------


def make_shard_specs(model: torch.nn.Module) -> dict[str, ShardSpec]:
    """How each parameter of ``model`` is sharded, by parameter name.

    Raises:
        ShardError: a sharded layer of a class that is not known here.
    """
    specs: dict[str, ShardSpec] = {}
    for module_name, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            specs[f"{module_name}.{name}" if module_name else name] = _make_spec(module_name, module, name)
    return specs


def list_checkpoint_parts(module: torch.nn.Module, spec: ShardSpec) -> dict[str | int | None, int]:
    """What a checkpoint may have for a sharded parameter: SGLang's shard id of each part, and its length along the
    sharded dimension."""
    if isinstance(module, VocabParallelEmbedding):
        return {None: module.org_vocab_size}
    ids: Sequence[str | int | None] = (None,)
    if isinstance(module, FusedMoE):
        ids = ("w1", "w3") if len(spec.blocks) == 2 else ("w2",)
    elif isinstance(module, QKVParallelLinear):
        ids = ("q", "k", "v")
    elif isinstance(module, MergedColumnParallelLinear):
        ids = range(len(spec.blocks))
    return {shard_id: block.size for shard_id, block in zip(ids, spec.blocks, strict=True)}


def _make_spec(module_name: str, module: torch.nn.Module, name: str) -> ShardSpec:
    """Of the parameter ``name`` of ``module``."""
    if isinstance(module, FusedMoE):
        if why := find_reason_against(module):
            raise ShardError(module_name, module.moe_tp_size, *why)
        width = Block(module.intermediate_size_per_partition * module.moe_tp_size)
        return ShardSpec(1, (width, width)) if name == "w13_weight" else ShardSpec(2, (width,))
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
        return WHOLE if name == "bias" else ShardSpec(1, (Block(module.input_size),))
    if isinstance(module, VocabParallelEmbedding):
        return ShardSpec(0, (Block(module.num_embeddings_padded),))
    if getattr(module, "tp_size", 1) > 1:
        raise ShardError(module_name, module.tp_size, f"it is not known how {type(module).__name__} is sharded")
    return WHOLE


# -- models without memory, and views of the base shards ---------------------------------------------------------------


class _NoFirstValues(TorchFunctionMode):
    """Layers of torch's own draw theirs (an embedding of positions): one element cannot take them."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return (kwargs or {}).get("tensor", *args[:1])
        return func(*args, **(kwargs or {}))


@contextmanager
def _skip_allocation() -> Iterator[None]:
    """Parameters that modules register meanwhile keep shape, dtype and device, but hold one element only."""
    register = torch.nn.Module.register_parameter

    def register_empty(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        if param is not None:
            param.data = param.data.new_empty(()).expand(param.shape)
        register(module, name, param)

    torch.nn.Module.register_parameter = register_empty
    try:
        with _NoFirstValues():
            yield
    finally:
        torch.nn.Module.register_parameter = register


def build_model(model_config, load_config, device: str) -> torch.nn.Module:
    """SGLang's model object under the groups that are installed now; its parameters hold no memory."""
    quantization = _get_quantization_config(model_config, load_config)
    with _skip_allocation(), set_default_torch_dtype(model_config.dtype), torch.device(device):
        model = _initialize_model(model_config, load_config, quantization).eval()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()  # each parameter had its memory for a moment
    return model


class PiecewiseLinear(UnquantizedLinearMethod):
    """The linear method of a layer whose rows lie in several pieces of the base layer's weight.

    It has the weight and the bias; the layer itself has neither.

    Attributes:
        weights: the pieces, transposed: ``[in, out_i]`` each.
        biases: ``[out_i]`` each; None without a bias.
        at_once: multiplies the few tokens of a decode step by all pieces in one kernel, on a GPU; None where it cannot.
    """

    weights: list[torch.Tensor]
    biases: list[torch.Tensor] | None
    at_once: Pieces | None = None

    def set_pieces(self, weights: list[torch.Tensor], biases: list[torch.Tensor] | None) -> None:
        """Multiply by these from now on: ``[out_i, in]`` and ``[out_i]`` each."""
        self.weights, self.biases = [weight.t() for weight in weights], biases
        if weights[0].is_cuda:
            from sglang_pat.rank.pieces_triton import make_pieces

            self.at_once = make_pieces(weights, biases)

    def compile(self) -> None:
        """On a GPU: have what multiplies at once compiled, for every number of tokens."""
        if self.at_once is not None:
            self.at_once.compile()

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``[..., in]`` to ``[..., sum of out_i]``."""
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        if self.at_once is not None and 0 < len(rows) <= self.at_once.most_tokens:
            out = self.at_once.multiply(rows)
        else:
            out = self._multiply_on_gpu(rows) if rows.is_cuda else self._multiply_on_cpu(rows)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[1])

    def _multiply_on_cpu(self, rows: torch.Tensor) -> torch.Tensor:
        """On a CPU, where to write into columns costs more than to copy there (bench/tail_weights.py)."""
        if self.biases is None:
            return torch.cat([torch.mm(rows, weight) for weight in self.weights], dim=1)
        pairs = zip(self.biases, self.weights, strict=True)
        return torch.cat([torch.addmm(bias, rows, weight) for bias, weight in pairs], dim=1)

    def _multiply_on_gpu(self, rows: torch.Tensor) -> torch.Tensor:
        """On a GPU: one kernel a piece and no other."""
        widths = [weight.shape[1] for weight in self.weights]
        out = rows.new_empty(len(rows), sum(widths))
        for i, part in enumerate(out.split(widths, dim=1)):
            if self.biases is None:
                torch.mm(rows, self.weights[i], out=part)
            else:
                torch.addmm(self.biases[i], rows, self.weights[i], out=part)
        return out


@dataclass
class _Source:
    """Where a parameter of a layout lies in the base layout's: pieces along ``dim``, or all of it (``dim`` None)."""

    module: torch.nn.Module
    name: str
    dim: int | None
    pieces: list[Copy]

    @property
    def tensor(self) -> torch.Tensor:
        return getattr(self.module, self.name).data

    def make_views(self) -> list[torch.Tensor]:
        if self.dim is None:
            return [self.tensor]
        return [self.tensor.narrow(self.dim, piece.src, piece.length) for piece in self.pieces]


class Views:
    """One layout's parameters, as views of the base model's.

    Life cycle: placed once, and again (:meth:`refresh`) before a switch to the layout if base weights have moved.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        base_model: torch.nn.Module,
        layout: ParallelLayout,
        base: ParallelLayout,
        rank: int,
    ) -> None:
        """Place ``model``'s parameters.

        Raises:
            ShardError: a parameter of this layout does not lie inside the base shard, or SGLang has packed it.
        """
        self._whole: list[tuple[torch.nn.Parameter, _Source]] = []
        self._split: list[tuple[PiecewiseLinear | PiecewiseExperts, _Source, _Source | None]] = []
        specs, base_specs = make_shard_specs(model), make_shard_specs(base_model)
        base_modules = dict(base_model.named_modules())
        for module_name, module in model.named_modules():
            base_module, sources = base_modules[module_name], {}
            if getattr(base_module, "use_intel_amx_backend", False):
                raise ShardError(module_name, base.tp, "SGLang has packed it for AMX", "use --dtype float32")
            for name, param in module.named_parameters(recurse=False):
                full_name = f"{module_name}.{name}" if module_name else name
                dim = specs[full_name].dim
                held = base_specs[full_name].list_intervals(base.tp, base.tp_rank(rank))
                wanted = specs[full_name].list_intervals(layout.tp, layout.tp_rank(rank))
                source = sources[name] = _Source(base_module, name, dim, list_copies(held, wanted))
                shape = list(source.tensor.shape)
                if dim is not None:
                    shape[dim] = count_covered(source.pieces)
                if list(param.shape) != shape:
                    advice = f"leave tp={layout.tp} out of --pat-candidates or use --pat-weights reshard"
                    why = "its shard does not lie inside the base shard (vocabulary padding?)"
                    raise ShardError(full_name, layout.tp, why, advice)
            if any(len(source.pieces) > 1 for source in sources.values()):
                self._divide(module, module_name, layout.tp, sources)
            else:
                self._whole += [(getattr(module, name), source) for name, source in sources.items()]
        self.refresh()

    def _divide(self, module: torch.nn.Module, name: str, tp: int, sources: dict[str, _Source]) -> None:
        if isinstance(module, FusedMoE):
            del module.w13_weight
            module.quant_method = PiecewiseExperts()
            self._split.append((module.quant_method, sources["w13_weight"], None))
            self._whole.append((module.w2_weight, sources["w2_weight"]))
            return
        plain = isinstance(module, LinearBase) and type(module.quant_method) is UnquantizedLinearMethod
        if not plain or module.skip_bias_add or not set(sources) <= {"weight", "bias"}:
            why = f"a {type(module).__name__} like this one cannot be multiplied piece by piece"
            raise ShardError(name, tp, why, "use --pat-weights reshard")
        for parameter in sources:
            delattr(module, parameter)
        module.register_parameter("bias", None)
        module.quant_method = PiecewiseLinear()
        self._split.append((module.quant_method, sources["weight"], sources.get("bias")))

    def _find_sources(self) -> Iterator[_Source]:
        yield from (source for _, source in self._whole)
        yield from (source for _, *both in self._split for source in both if source is not None)

    def _list_addresses(self) -> list[int]:
        return [source.tensor.data_ptr() for source in self._find_sources()]

    def have_moved(self) -> bool:
        """Whether base parameters lie elsewhere than when the views were placed.

        An update that writes into them, as SGLang's do, moves none; one that replaces a tensor does.
        """
        return self._list_addresses() != self._placed

    def refresh(self) -> None:
        """Look at the base parameters where they lie now."""
        for param, source in self._whole:
            (param.data,) = source.make_views()
        for method, weight, bias in self._split:
            method.set_pieces(weight.make_views(), bias.make_views() if bias else None)
        self._placed = self._list_addresses()


# -- ``--pat-weights reshard``: one copy, moved at the switch, as PAT does (to compare with) ---------------------------


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
    specs = make_shard_specs(new_model)
    old_specs = make_shard_specs(old_model)
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
            wanted = spec.list_intervals(new.tp, new.tp_rank(rank))
            shape[spec.dim] = sum(length for _, length in wanted)
            target = source.data.new_zeros(shape)
            for tp_rank, shard in enumerate(shards):
                for piece in list_copies(old_specs[name].list_intervals(old.tp, tp_rank), wanted):
                    target.narrow(spec.dim, piece.dst, piece.length).copy_(
                        shard.narrow(spec.dim, piece.src, piece.length)
                    )
            param.data = target
            source.data = source.data.new_empty(0)
