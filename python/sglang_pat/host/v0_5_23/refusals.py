"""Flags and variables that only this version has, and that are refused (``launch/refusals.py``)."""

from __future__ import annotations

from typing import Any

_ONE_DEGREE = "every layer is cut by the degree of the layout"
_OUT = "leave it out"

MUST_BE: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "attn_dp_size": ((1,), "must be 1", _ONE_DEGREE),
    "dcp_size": ((1,), "must be 1", "its groups have no layouts"),
    "dwdp_size": ((1,), "must be 1", _ONE_DEGREE),
    "decoupled_spec_role": (("null",), _OUT, "the switch cannot carry it over"),
    "expert_balancedness_report_mode": (("off",), _OUT, "its counts are those of one group"),
    "weight_cache_mode": (("off",), _OUT, "the other layouts use these weights, too"),
    "startup_weight_load_mode": (("serial",), _OUT, "layouts are built when the weights are loaded"),
    "kv_canary": (("none",), _OUT, "it knows one pool, and each layout has its own view"),
    "cuda_graph_backend_decode": (
        (None, "full", "disabled"), "must be full or disabled", "its graphs are pieces that know one layout",
    ),
    "cuda_graph_backend_prefill": (
        (None, "disabled"), "must be disabled; leave it out", "its graphs are pieces that know one layout",
    ),
    "load_publish_endpoint": ((None, "off"), _OUT, "each replica of the base layout would open the same port"),
}  # fmt: skip
"""Fields that must stay at one of some values: what to do otherwise, and why."""

NOT_AT_ALL = {
    "the switch cannot carry it over": (
        "enable_prefill_cp enable_cp_decode_attn_tp enable_return_aux_hidden_states aux_hidden_state_capture "
        "enable_unified_memory enable_page_major_kv_layout enable_kv_cache_sharding enable_session_radix_cache "
        "radix_cache_backend enable_unified_cache_external_linker enable_flexkv enable_watermark min_free_slots_delay"
    ),
    "the ranks of a group would each count rounds for themselves": "prefill_decode_interval",
    "every layer is cut by the degree of the layout": (
        "enable_dense_mlp_attn_tp enable_shared_experts_attn_tp shared_experts_tp_size enable_tp_lm_head_all_to_all "
        "enable_layernorm_sp enable_megamoe_for_layernorm_sp enable_scattered_sconv"
    ),
    "it is for expert parallelism, which is refused": "enable_waterfill ep_join_mode",
    "the adaptive engine starts its processes itself": (
        "gated_launch_port grpc_port smg_grpc_mode sidecar enable_pd_role_switch"
    ),
    "it changes the base layout's model; the others would stay as they are": "enable_paged_experts",
    "its workspace or communicator belongs to one group": "flashinfer_allreduce_fusion_backend",
    "its kernels are of whole models, whose weights they pack": "enable_nvidia_megakernel enable_amd_monokernel",
    "the model it is for is refused": "language_model_only",
}
"""Fields that may not be given at all, by reason."""

ENVIRONMENT = {
    "SGLANG_RUST_SERVER": "requests come to SGLang's own server",
    "SGLANG_GRPC_PORT": "the adaptive engine starts its processes itself",
    "SGLANG_LOAD_SNAPSHOT_USE_ZMQ": "the coordinator knows the load",
}
"""Reasons why variables are refused, by name."""

MUST_BE_ON = {"SGLANG_USE_PICKLE_IPC": "messages of ours travel with SGLang's"}
"""Reasons why variables must not be off, by name."""

SECOND_PORT = False
"""Whether SGLang also reserves the port 10,000 above."""
