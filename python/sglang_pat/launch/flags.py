"""Flags of SGLang that ``--adaptive-tp`` refuses, and what to do instead.

What becomes of all others is in ``tests/contract/flags.py``, which makes docs/flags.md of both.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a framework reads the tables where it does not import SGLang
    from sglang.srt.server_args import ServerArgs


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A flag that must stay at one of ``allowed``, and what to do otherwise."""

    field: str
    allowed: tuple[Any, ...]
    advice: str
    reason: str

    def given(self, value: Any) -> str:
        """As the user would write it."""
        flag = "--" + self.field.replace("_", "-")
        return flag if value is True else f"{flag} {value}"


_OUT = "leave it out"


def _off(reason: str, names: str) -> tuple[Refusal, ...]:
    """Flags that are refused when they are given at all."""
    empty = (None, False, 0, "", [], {})
    return tuple(Refusal(name, empty, _OUT, reason) for name in names.split())


REFUSED = (
    Refusal("pp_size", (1,), "pipeline parallelism must be 1", "stages have no layouts"),
    Refusal("nnodes", (1,), "an engine spans one node; run one engine per node", "ranks share one machine's memory"),
    Refusal("ep_size", (1,), "expert parallelism must be 1", "no mixture-of-experts models"),
    Refusal("attn_cp_size", (1,), "context parallelism must be 1", "its groups have no layouts"),
    Refusal("moe_dp_size", (1,), "must be 1", "no mixture-of-experts models"),
    Refusal("disaggregation_mode", ("null",), "must be null", "a switch knows one kind of engine"),
    Refusal("quantization", (None, "unquant"), "must be unquantized", "packed shards of two degrees do not nest"),
    Refusal("kv_cache_dtype", ("auto",), "must be auto", "the KV exchange knows the model's dtype"),
    Refusal(
        "page_size",
        (None, 1),
        "must be 1; choose the attention backend flashinfer, fa3 or triton",
        "tokens move one by one",
    ),
    Refusal("tokenizer_worker_num", (1,), "must be 1", "one TokenizerManager talks to the coordinator"),
    Refusal("detokenizer_worker_num", (1,), "must be 1", "one detokenizer puts outputs in order"),
    Refusal("model_impl", ("auto", "sglang"), "must be auto or sglang", "only the base layout would use it"),
    Refusal("moe_a2a_backend", ("none",), "must be none", "no mixture-of-experts models"),
    Refusal("offload_group_size", (-1, 0, None), _OUT, "the other layouts use these weights, too"),
    *_off(
        "the switch cannot carry it over",
        "enable_dp_attention speculative_algorithm enable_hierarchical_cache hicache_storage_backend enable_lmcache "
        "enable_mixed_chunk enable_pdmux enable_streaming_session enable_two_batch_overlap "
        "enable_single_batch_overlap dllm_algorithm enable_hisparse enable_lora lora_paths "
        "enable_prefill_context_parallel enable_nsa_prefill_context_parallel enable_attn_tp_input_scattered",
    ),
    *_off("the adaptive engine starts its processes itself", "enable_http2 use_ray grpc_mode"),
    *_off(
        "it changes the base layout's model; the others would stay as they are",
        "cpu_offload_gb torchao_config modelopt_quant quantize_and_serve kt_weight_path forward_hooks "
        "debug_tensor_dump_output_folder msprobe_dump_config enable_layerwise_nvtx_marker",
    ),
    *_off(
        "its workspace or communicator belongs to one group",
        "enable_flashinfer_allreduce_fusion enable_aiter_allreduce_fusion enable_mscclpp enable_torch_symm_mem "
        "enable_symm_mem enable_quant_communications enable_prefill_delayer elastic_ep_backend",
    ),
    *_off("a change of tp changes the order of sums", "enable_deterministic_inference rl_on_policy_target"),
    *_off(
        "each replica of the base layout would open the same port",
        "kv_events_config enable_forward_pass_metrics",
    ),
    *_off("ranks do not set it up", "enable_trace"),
    *_off("SGLang's check takes ranks of a group for numbers of GPUs", "enable_p2p_check"),
    *_off(
        "the model it is for is refused",
        "is_embedding prefill_only_disable_kv_cache enable_multimodal enable_mis encoder_only language_only "
        "enable_return_routed_experts enable_return_indexer_topk enable_eplb expert_distribution_recorder_mode "
        "decrypted_config_file",
    ),
    *_off("its graphs are pieces that know one layout", "enable_breakable_cuda_graph enforce_piecewise_cuda_graph"),
    *_off("layers on views of the base weights write their results in place", "enable_torch_compile"),
)


ENVIRONMENT = {
    "SGLANG_REQ_WAITING_TIMEOUT": "the ranks of a group would each go by their own clock",
    "SGLANG_REQ_RUNNING_TIMEOUT": "the ranks of a group would each go by their own clock",
    "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE": "a switch fills SGLang's own tree",
    "SGLANG_ENABLE_UNIFIED_RADIX_TREE": "a switch fills SGLang's own tree",
    "SGLANG_ENABLE_COLOCATED_BATCH_GEN": "its barrier knows one layout",
    "SGLANG_PROFILE_V2": "its barrier knows one layout",
}
"""Variables of SGLang's that are refused: name -> reason."""


def refuse_flags(args: ServerArgs) -> None:
    """Raise ``ValueError`` for what cannot cross a switch: one line with what was given and what to change.

    To be called before SGLang's ``__post_init__``, which turns some of these into other errors, and after it, which
    chooses values by itself.
    """
    if args.device == "cpu":
        from sglang.srt.utils import cpu_has_amx_support

        if cpu_has_amx_support():
            # It packs the base layout's weights in place, and the other layouts would be sliced from packed bytes.
            raise ValueError("--adaptive-tp does not support SGLang's AMX kernels: use an sgl-kernel without them")
    for name, reason in ENVIRONMENT.items():
        if os.environ.get(name, "").lower() not in ("", "0", "-1", "false"):
            raise ValueError(f"--adaptive-tp does not support {name}={os.environ[name]} ({reason}): unset it")
    for refusal in REFUSED:
        value = getattr(args, refusal.field)
        if value not in refusal.allowed:
            raise ValueError(f"--adaptive-tp does not support {refusal.given(value)}: {refusal.advice}")
