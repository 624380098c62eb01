"""SGLang's model, layer by layer: how its parameters are sharded, how it is built without memory, and layers that
multiply by several pieces of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch.overrides import TorchFunctionMode

from sglang_pat.host import adapter
from sglang_pat.host.assign import assign
from sglang_pat.host.experts import PiecewiseExperts, find_reason_against
from sglang_pat.rank.shards import WHOLE, Block, ShardError, ShardSpec

if TYPE_CHECKING:
    from sglang_pat.rank.pieces_triton import Pieces  # with it comes Triton


# -- how SGLang's layers shard their parameters, as intervals of the full tensors --------------------------------------


def make_shard_specs(model: torch.nn.Module) -> dict[str, ShardSpec]:
    """The :class:`ShardSpec` of each parameter of ``model``, by parameter name.

    Raises:
        ShardError: a sharded layer of a class that is not known here.
    """
    specs: dict[str, ShardSpec] = {}
    for module_name, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            specs[f"{module_name}.{name}" if module_name else name] = _make_spec(module_name, module, name)
    return specs


def list_checkpoint_parts(module: torch.nn.Module, spec: ShardSpec) -> dict[str | int | None, int]:
    """Length along the sharded dimension of each part that a checkpoint may have, by SGLang's shard id."""
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
    """The :class:`ShardSpec` of the parameter ``name`` of ``module``."""
    if getattr(module, "parallel_group", None) == "replicated":  # a linear layer of SGLang 0.5.23
        return WHOLE
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
    group = getattr(module, "tp_group", None)  # where SGLang 0.5.23 keeps the degree of a linear layer
    if (tp := getattr(module, "tp_size", 1) if group is None else group.world_size) > 1:
        raise ShardError(module_name, tp, f"it is not known how {type(module).__name__} is sharded")
    return WHOLE


# -- what else the layers say ------------------------------------------------------------------------------------------


def list_attention_heads(model: torch.nn.Module) -> list[tuple[str, int]]:
    """Name of each attention layer, and the number of KV heads that it has on this rank."""
    return [
        (name, module.tp_k_head_num) for name, module in model.named_modules() if isinstance(module, RadixAttention)
    ]


def get_weight_loader(param: torch.nn.Parameter) -> Callable[..., Any]:
    """The function that writes what a checkpoint has into this rank's shard of ``param``."""
    return getattr(param, "weight_loader", default_weight_loader)


def count_experts(module: torch.nn.Module) -> int:
    """Number of experts of the layer; 0 if it has none."""
    return module.num_experts if isinstance(module, FusedMoE) else 0


def has_experts(model: torch.nn.Module) -> bool:
    """Whether ``model`` is a mixture of experts."""
    return any(isinstance(module, FusedMoE) for module in model.modules())


def has_dummy_weights(scheduler: Any) -> bool:
    """Whether the weights are made up (``--load-format dummy``)."""
    return scheduler.server_args.load_format == "dummy"


def count_words(module: torch.nn.Module) -> int | None:
    """Number of words that the layer embeds, without SGLang's padding; None if it embeds none."""
    return module.org_vocab_size if isinstance(module, VocabParallelEmbedding) else None


def is_packed(module: torch.nn.Module) -> bool:
    """Whether SGLang has packed the weights of ``module`` for AMX."""
    return getattr(module, "use_intel_amx_backend", False)


# -- models without memory ---------------------------------------------------------------------------------------------


class _NoDraws(TorchFunctionMode):
    """A mode in which torch's own layers draw no first values, which one element cannot take (embedded positions)."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init" and func.__name__ != "constant_":
            return (kwargs or {}).get("tensor", *args[:1])
        return func(*args, **(kwargs or {}))


@contextmanager
def _skip_allocation() -> Iterator[None]:
    """Have parameters that modules register inside the block keep shape, dtype and device, but hold one element.

    Its value stays: constructors look at it.  SGLang's Transformers backend tells a norm that multiplies by its weight
    (first values of 1) from one that multiplies by 1 more (of 0) that way.
    """
    register = torch.nn.Module.register_parameter

    def register_first(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        if param is not None:
            first = param.data.reshape(-1)[:1].clone() if param.numel() else param.data.new_zeros(1)
            param.data = first.view(()).expand(param.shape)
        register(module, name, param)

    torch.nn.Module.register_parameter = register_first
    try:
        with _NoDraws():
            yield
    finally:
        torch.nn.Module.register_parameter = register


def build_model(model_config, load_config, device: str) -> torch.nn.Module:
    """Build SGLang's model under the groups that are installed now; its parameters hold no memory."""
    quantization = _get_quantization_config(model_config, load_config)
    with _skip_allocation(), set_default_torch_dtype(model_config.dtype), torch.device(device):
        model = _initialize_model(model_config, load_config, quantization).eval()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()  # each parameter had its memory for a moment
    return model


# -- layers that multiply by several pieces ----------------------------------------------------------------------------


def divide_layer(
    module: torch.nn.Module, name: str, tp: int, parameters: set[str]
) -> tuple[PiecewiseLinear | PiecewiseExperts, list[str], list[str]]:
    """Have ``module`` multiply by pieces, which are to be set, in place of some of its ``parameters``.

    Returns:
        Its method, the parameters that it wants in pieces (weight, and bias where there is one), and those that remain.
    """
    if isinstance(module, FusedMoE):
        del module.w13_weight
        method = PiecewiseExperts()
        assign(module, quant_method=method)
        return method, ["w13_weight"], ["w2_weight"]
    plain = isinstance(module, LinearBase) and type(module.quant_method) is UnquantizedLinearMethod
    if not plain or module.skip_bias_add or not parameters <= {"weight", "bias"}:
        why = f"a {type(module).__name__} like this one cannot be multiplied piece by piece"
        raise ShardError(name, tp, why, "use --pat-weights reshard")
    for parameter in parameters:
        delattr(module, parameter)
    module.register_parameter("bias", None)
    method = PiecewiseLinear()
    assign(module, quant_method=method)
    return method, sorted(parameters, reverse=True), []


class PiecewiseLinear(UnquantizedLinearMethod):
    """The linear method of a layer whose rows lie in several pieces of the base layer's weight.

    It holds the weight and the bias; the layer itself has neither.

    Attributes:
        weights: the pieces, transposed: ``[in, out_i]`` each.
        biases: ``[out_i]`` each; None without a bias.
        at_once: multiplies the few tokens of a decode step by all pieces in one kernel, on a GPU; None where it cannot.
    """

    weights: list[torch.Tensor]
    biases: list[torch.Tensor] | None
    at_once: Pieces | None = None

    def set_pieces(self, weights: list[torch.Tensor], biases: list[torch.Tensor] | None) -> None:
        """Multiply by these pieces from now on, ``[out_i, in]`` and ``[out_i]`` each."""
        self.weights, self.biases = [weight.t() for weight in weights], biases
        if weights[0].is_cuda:
            from sglang_pat.rank.pieces_triton import make_pieces

            self.at_once = make_pieces(weights, biases)

    def compile(self) -> None:
        """Compile :attr:`at_once`, on a GPU, for every number of tokens."""
        if self.at_once is not None:
            self.at_once.compile()

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The layer's output, ``[..., sum of out_i]``, for ``x``, ``[..., in]``."""
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        if self.at_once is not None and 0 < len(rows) <= self.at_once.most_tokens:
            out = self.at_once.multiply(rows)
        else:
            out = self._multiply_on_gpu(rows) if rows.is_cuda else self._multiply_on_cpu(rows)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[1])

    def _multiply_on_cpu(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply and concatenate: writing into columns costs more on a CPU than copying (bench/tail_weights.py)."""
        if self.biases is None:
            return torch.cat([torch.mm(rows, weight) for weight in self.weights], dim=1)
        pairs = zip(self.biases, self.weights, strict=True)
        return torch.cat([torch.addmm(bias, rows, weight) for bias, weight in pairs], dim=1)

    def _multiply_on_gpu(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply with one kernel a piece and no other."""
        widths = [weight.shape[1] for weight in self.weights]
        out = rows.new_empty(len(rows), sum(widths))
        for i, part in enumerate(out.split(widths, dim=1)):
            if self.biases is None:
                torch.mm(rows, self.weights[i], out=part)
            else:
                torch.addmm(self.biases[i], rows, self.weights[i], out=part)
        return out


def compile_layers(model: torch.nn.Module, device: str) -> None:
    """Compile now what would be compiled in the first step after a switch: SGLang's ``torch.compile`` of the
    sharded embedding and of the sum over a token's experts, once for one token and once for several, and our products
    of weights in pieces.

    Not on a CPU, see ``run_rank``.  All ranks of a group together.
    """
    if device == "cpu":
        return
    experts = next((module for module in model.modules() if isinstance(module, FusedMoE)), None)
    with torch.no_grad():
        if experts is not None:  # those of all layers are alike
            _compile_experts(experts, device)
        for module in model.modules():
            if type(module) is VocabParallelEmbedding:
                for tokens in (1, 4):
                    module(torch.zeros(tokens, dtype=torch.int64, device=device))
            elif isinstance(method := getattr(module, "quant_method", None), PiecewiseLinear):
                method.compile()


def _compile_experts(experts: FusedMoE, device: str) -> None:
    if isinstance(experts.quant_method, PiecewiseExperts):
        experts.quant_method.compile(experts)
        return
    config = experts.moe_runner_config
    chosen = config.top_k or 0
    if chosen <= 2:  # for which SGLang has another sum
        return
    for tokens in (1, 4):
        each = torch.zeros(tokens, chosen, config.hidden_size, dtype=config.params_dtype, device=device)
        adapter.kernels.add_few(each, each.new_empty(tokens, config.hidden_size))
