"""The experts of a mixture, multiplied on views of the base layer's weights.

SGLang keeps all experts of a layer in two parameters: ``w13_weight``, ``[experts, gate's rows and then up's, hidden]``,
and ``w2_weight``, ``[experts, hidden, columns]``.  A rank of a higher degree has some of gate's rows and as many of
up's from every expert: two views of the one.  Its part of the other is a view of columns, and remains a parameter.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from torch.nn.functional import linear, silu

from sglang_pat.host.experts_triton import multiply_gate_up

LARGEST_BATCH = 4096
"""Most tokens of a batch that kernels are compiled for; larger batches use the same kernels."""
UNQUANTISED = dict.fromkeys(
    ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "per_channel_quant"), False
)
"""Arguments of SGLang's functions for experts that say that weights are not quantised."""


def find_reason_against(experts: FusedMoE) -> tuple[str, str] | None:
    """Reason why these experts cannot be cut into shards and multiplied on views, and the advice; None if they can."""
    method, config = experts.quant_method, experts.moe_runner_config
    if experts.moe_ep_size > 1:
        return "its experts are spread over the ranks", "leave out --ep-size"
    if experts.num_fused_shared_experts:
        return "its shared expert is fused with the routed ones", "use --disable-shared-experts-fusion"
    if type(method) is not UnquantizedFusedMoEMethod:
        return "its experts are quantised", "use a checkpoint in bfloat16"
    if not method.runner.runner_backend.is_triton() or method.use_flashinfer_cutlass:
        return "its runner back end packs or reorders the experts", "use --moe-runner-backend triton"
    plain = config.activation == "silu" and config.is_gated and not method.with_bias
    plain &= (config.gemm1_alpha, config.gemm1_clamp_limit, config.swiglu_limit) == (None, None, None)
    plain &= config.routed_scaling_factor in (None, 1.0)
    if not plain or config.apply_router_weight_on_input or config.no_combine:
        return "its experts are not down(silu(gate(x)) * up(x))", "this model is not supported"
    return None


class PiecewiseExperts(UnquantizedFusedMoEMethod):
    """The method of experts whose gate and up are two pieces of the base layer's ``w13_weight``.

    It holds these two; the layer itself has ``w2_weight`` only.

    Attributes:
        gate, up: the two pieces, ``[experts, rows, hidden]`` each.
    """

    gate: torch.Tensor
    up: torch.Tensor

    def set_pieces(self, weights: list[torch.Tensor], _: object = None) -> None:
        """Multiply by these ``weights``, gate and up, from now on."""
        self.gate, self.up = weights

    def compile(self, layer: FusedMoE) -> None:
        """Have Triton compile, on a GPU, the kernels that SGLang's tables choose from by number of tokens."""
        top_k, experts = layer.top_k or 1, len(self.gate)
        for power in range(LARGEST_BATCH.bit_length()):
            for tokens in (1 << power, (1 << power) + 1):  # a multiple of 16, and none, are two kernels
                x = self.gate.new_zeros(tokens, self.gate.shape[2])
                ids = torch.arange(tokens * top_k, dtype=torch.int32, device=x.device) % experts
                ids = ids.view(tokens, top_k)
                self.multiply_on_gpu(x, layer.w2_weight, torch.ones_like(ids, dtype=torch.float32), ids)

    # Whatever the device: SGLang's own goes by an alias that was made in the class (``forward_native``).
    def apply(self, layer: torch.nn.Module, dispatch_output: Any) -> StandardCombineInput:
        """This rank's part of the layer's output, ``[tokens, hidden]``, which the ranks of a group add up."""
        x, (weights, ids, _) = dispatch_output.hidden_states, dispatch_output.topk_output
        multiply = self.multiply_on_gpu if x.is_cuda else self._multiply_on_cpu
        return StandardCombineInput(hidden_states=multiply(x, layer.w2_weight, weights, ids))

    def _multiply_on_cpu(
        self, x: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Do what SGLang's ``moe_forward_native`` does, with two products where that has one.

        Args:
            weights, ids: weights and numbers of the experts that the router has chosen, ``[tokens, chosen]``.
        """
        order = ids.flatten().argsort(stable=True)
        counts = ids.flatten().bincount(minlength=len(down)).tolist()
        rows = x[order // ids.shape[1]]
        terms = torch.empty_like(rows)
        begin = 0
        for expert, count in enumerate(counts):
            if count:
                inputs, places = rows[begin : begin + count], order[begin : begin + count]
                inner = silu(linear(inputs, self.gate[expert])) * linear(inputs, self.up[expert])
                terms[places] = linear(inner, down[expert])
                begin += count
        weighed = terms.view(*ids.shape, -1).to(weights.dtype) * weights.unsqueeze(-1)
        return weighed.sum(dim=1).to(x.dtype)

    def multiply_on_gpu(
        self, x: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Multiply by SGLang's kernels, with the blocks that SGLang would take for copies of the weights.

        Its wrapper refuses views, though the kernel in it takes all strides.
        """
        rows, hidden = self.gate.shape[1:]
        w13: Any = SimpleNamespace(shape=(len(down), 2 * rows, hidden))  # all that is looked at
        config, down_config, *rest = fused_moe._prepare_fused_moe_run(
            x, w13, down, ids, block_shape=None, **UNQUANTISED
        )
        order = rest[-3:]  # before it, whether TMA is used
        gate_up = x.new_empty(ids.numel(), 2 * rows)
        multiply_gate_up(x, self.gate, self.up, gate_up, ids, *order, config=config)
        inner = x.new_empty(ids.numel(), rows)
        fused_moe.silu_and_mul(gate_up, inner)
        terms = x.new_empty(*ids.shape, hidden)
        args: Any = (inner, down, None, terms, None, None, None, weights, ids, *order, True, 1, down_config or config)
        kind = getattr(fused_moe.tl, str(x.dtype).removeprefix("torch."))
        fused_moe.invoke_fused_moe_kernel(*args, compute_type=kind, filter_expert=False, **UNQUANTISED)
        out = torch.empty_like(x)
        fused_moe.moe_sum_reduce(terms, out, 1.0)  # for few tokens SGLang has another, which is compiled on first use
        return out
