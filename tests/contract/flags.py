"""What ``--adaptive-tp`` makes of each flag of SGLang: docs/flags.md says it for users, a file for each version of
SGLang flag by flag.

    python -m tests.contract.flags        writes both

A field of SGLang's ``ServerArgs`` is in exactly one of the tables below or among those of ``launch/refusals.py``, or
``test_flags_table.py`` fails by its name: that is how flags of a new SGLang version are met.
"""

from __future__ import annotations

import csv
import fnmatch
import inspect
import io
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from sglang_pat.cpu import shim

shim.ensure()

from sglang.srt.server_args import ServerArgs  # noqa: E402

from sglang_pat import settings  # noqa: E402
from sglang_pat.host import adapter  # noqa: E402
from sglang_pat.launch import refusals  # noqa: E402
from sglang_pat.version import ADAPTERS  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs/flags.md"
REGISTER = Path(__file__).with_name(f"flags_{adapter.FOLDER}.csv")
WORKING = {
    "tests/engine/test_smoke.py": (
        "model_path port skip_server_warmup dtype max_total_tokens random_seed tp_size dp_size"
    ),
    "tests/engine/test_flags.py": (
        # what is scheduled, when and how much of it
        "schedule_policy schedule_conservativeness radix_eviction_policy max_prefill_tokens prefill_max_requests "
        "max_queued_requests allow_auto_truncate context_length disable_radix_cache chunked_prefill_size "
        "disable_priority_preemption abort_on_priority_when_disabled enable_dynamic_batch_tokenizer "
        "dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout "
        # what comes out, and in which pieces
        "stream_interval incremental_streaming_output stream_response_default_include_usage batch_notify_size "
        "enable_return_hidden_states enable_custom_logit_processor enable_fp32_lm_head "
        "preferred_sampling_params sampling_defaults enable_cache_report disable_tokenizer_batch_decode "
        "enable_tokenizer_batch_encode constrained_json_whitespace_pattern constrained_json_disable_any_whitespace "
        "sampling_backend attention_backend grammar_backend device disable_cuda_graph sleep_on_idle "
        # the OpenAI API
        "served_model_name chat_template completion_template reasoning_parser tool_call_parser weight_version "
        "strip_thinking_cache fastapi_root_path host "
        # the model's files
        "load_format trust_remote_code tokenizer_path tokenizer_mode tokenizer_backend json_model_override_args "
        "download_dir weight_loader_disable_mmap weight_loader_prefetch_checkpoints "
        "weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load model_loader_extra_config "
        "model_checksum model_config_parser custom_weight_loader "
        # where the ranks of the world meet
        "nccl_port dist_init_addr "
        # logs and metrics
        "log_level log_level_http log_requests log_requests_level log_requests_format log_requests_target "
        "uvicorn_access_log_exclude_prefixes show_time_cost decode_log_interval enable_request_time_stats_logging "
        "enable_metrics_for_all_schedulers enable_mfu_metrics tokenizer_metrics_custom_labels_header "
        "tokenizer_metrics_allowed_custom_labels extra_metric_labels bucket_time_to_first_token "
        "bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets generation_tokens_buckets "
        "gc_warning_threshold_secs gc_threshold export_metrics_to_file export_metrics_to_file_dir crash_dump_folder "
        "watchdog_timeout soft_watchdog_timeout dist_timeout"
    ),
    "tests/engine/test_agreement.py": (
        "scheduler_recv_interval enable_priority_scheduling schedule_low_priority_values_first "
        "priority_scheduling_preemption_threshold default_priority_value"
    ),
    "tests/engine/test_cramped.py": "max_running_requests",
    "tests/engine/test_routed_experts.py": "enable_return_routed_experts",
    "tests/engine/test_threshold.py": "enable_metrics api_key admin_api_key",
    "tests/engine/test_python_api.py": "skip_tokenizer_init",
    "tests/contract/test_start_refused.py": "custom_sigquit_handler",
}
"""Shown by a test, which switches with it (the last: starts with it): test -> fields."""

OUTSIDE = {
    "TLS ends in uvicorn, and what is behind it is the same": (
        "ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password enable_ssl_refresh"
    ),
    "it names a version of a repository, and models of tests are folders": "revision",
    "before the server is ready it waits for an update by the package checkpoint_engine, which is not installed": (
        "checkpoint_engine_wait_weights_before_ready"
    ),
    "the server picks one of several chat templates, and tokenizers of tests have one": "hf_chat_template_name",
    "it deletes the model's folder when the server is ready, and tests share theirs": "delete_ckpt_after_loading",
}
"""Left as it is: the adaptive engine has no part in it, and for this reason no test shows it: reason -> fields."""

GPU = {
    "memory and kernels of a GPU": (
        "mem_fraction_static base_gpu_id gpu_id_step decode_attention_backend prefill_attention_backend "
        "disable_flashinfer_autotune triton_attention_reduce_in_fp32 triton_attention_num_kv_splits "
        "triton_attention_split_tile_size disable_custom_all_reduce enable_nccl_nvls disable_overlap_schedule"
    ),
    "memory and cores near a rank's GPU": "numa_node",
    "a kernel for norms and positions of queries and keys, which Qwen3-MoE has": "enable_fused_qk_norm_rope",
    "it needs the grammar backend xgrammar, which has no kernels for a CPU": "enable_strict_thinking",
    "CUDA graphs, which each layout has": (
        "disable_cuda_graph_padding enable_cudagraph_gc enable_profile_cuda_graph debug_cuda_graph"
    ),
    "memory that RL frameworks have released between rounds": "enable_memory_saver enable_weights_cpu_backup",
}
"""Accepted; takes effect on GPUs, where nothing of this has run yet."""

UNUSED = {
    "pipeline parallelism is refused": "pp_* enable_dynamic_chunking",
    "LoRA is refused": "*lora*",
    "speculative decoding is refused": (
        "speculative_* enable_multi_layer_eagle enable_draft_weights_cpu_backup decrypted_draft_config_file"
    ),
    "expert parallelism is refused": "deepep_* eplb_* mooncake_ib_device",
    "of the models that are let in none has its shared expert among the others": "*_shared_experts_fusion",
    "hybrid, sliding-window and state-space models are refused": (
        "*mamba* linear_attn_* swa_full_tokens_ratio disable_hybrid_swa_memory"
    ),
    "MLA and sparse-attention models are refused": (
        "flashinfer_mla_disable_ragged disable_chunked_prefix_cache hisparse_config"
    ),
    "multimodal models are refused": (
        "mm_* encoder_* limit_mm_data_per_request enable_*_mm_* enable_mm_global_cache disable_fast_image_processor "
        "enable_precise_embedding_interpolation enable_adaptive_dispatch_to_encoder warmups"
    ),
    "the hierarchical cache is refused": "hicache_*",
    "prefill/decode disaggregation and multiplexing are refused": (
        "disaggregation_* num_reserved_decode_tokens pdmux_config_path sm_group_num"
    ),
    "quantisation is refused": (
        "quantization_param_path modelopt_* rl_quant_profile fp8_gemm_runner_backend fp4_gemm_runner_backend "
        "flashinfer_mxfp4_moe_precision disable_flashinfer_cutlass_moe_fp4_allgather"
    ),
    "what it is for is refused: offloading, prefill delaying, DP attention, context parallelism, diffusion": (
        "offload_* kt_* prefill_delayer_* enable_dp_* dllm_algorithm_config"
    ),
    "what it is for is refused: two-batch overlap, records of experts": (
        "tbo_token_distribution_threshold expert_distribution_recorder_buffer_size"
    ),
    "what it is for is refused: tracing, forward-pass metrics, debug dumps, seeds of weights": (
        "otlp_traces_endpoint forward_pass_metrics_* debug_tensor_dump_* remote_instance_weight_loader_* "
        "engine_info_bootstrap_port modelexpress_config"
    ),
    "the coordinator routes requests": "load_balance_method",
    "one node is the engine": "node_rank",
    "every group's communicator is made at start": "pre_warm_nccl",
    "read by nothing in this SGLang": "num_continuous_decode_steps disable_outlines_disk_cache file_storage_path",
    "its tools are for gpt-oss, which is refused": "tool_server",
    "it switches a refused flag off, and is always set": "enforce_disable_flashinfer_allreduce_fusion",
    "torch.compile is refused": "enable_torch_compile_debug_mode torch_compile_max_bs",
}
"""Accepted, and without effect: reason -> fields, or patterns of what the other tables do not name."""

_GRAPHS = "CUDA graphs, which each layout has"
_MLA = "MLA and sparse-attention models are refused"
_HYBRID = "hybrid, sliding-window and state-space models are refused"
_MULTIMODAL = "multimodal models are refused"
_EXPERTS = "expert parallelism is refused"
_PREFILL = "prefill runs without CUDA graphs in every layout"
_OTHERS = "what it is for is refused: offloading, prefill delaying, DP attention, context parallelism, diffusion"
ONLY: dict[str, tuple[tuple[dict[str, str], dict[str, str]], ...]] = {
    "v0_5_12": (
        (WORKING, {"tests/engine/test_flags.py": "enable_nan_detection"}),
        (GPU, {_GRAPHS: "cuda_graph_max_bs cuda_graph_bs"}),
        (UNUSED, {_MULTIMODAL: "keep_mm_feature_on_device", "the gRPC server is refused": "grpc_http_sidecar_port"}),
        (UNUSED, {_MLA: "nsa_*", _OTHERS: "prefill_cp_mode", _PREFILL: "*piecewise_cuda_graph*"}),
    ),
    "v0_5_23": (
        (OUTSIDE, {
            "it acts in the server alone, where no test shows it": (
                "default_chat_template_kwargs return_input_ids return_output_ids trust_request_chat_template "
                "enable_response_store enable_http_worker_reuseport"
            ),
            "no test shows it yet": (
                "radix_eviction_policy_config retraction_policy return_hidden_states_mode stat_loggers"
            ),
        }),
        (GPU, {
            _GRAPHS: "cuda_graph_config cuda_graph_bs_decode cuda_graph_max_bs_decode disable_decode_cuda_graph",
            "memory and kernels of a GPU": (
                "enable_tf32_matmul bf16_gemm_backend enable_lean_attention flashinfer_autotune_skip_ops"
            ),
            "it needs the grammar backend xgrammar, which has no kernels for a CPU": (
                "constrained_json_max_whitespace_cnt"
            ),
        }),
        (UNUSED, {
            _MLA: "dsa_* dsv4_* *_dsa_* enable_deepseek_v4_fp4_indexer qsa_indexer_dtype enable_linker_mla_dedup",
            _HYBRID: (
                "enable_linear_* linear_replayssm_cache_len swa_prefix_tails *_swa_bounded_replay c128_page_size "
                "_swa_full_tokens_ratio_explicitly_set"
            ),
            _MULTIMODAL: (
                "allowed_media_domains asr_* media_url_max_file_size_mb image_processor_backend trust_mm_content_hashes"
            ),
            _EXPERTS: (
                "elastic_ep_* ep_join_rank_offset max_ep_size fuseep_mode enable_w4a4_mxfp4_megamoe "
                "flashinfer_a2a_dispatch_type"
            ),
            _PREFILL: (
                "cuda_graph_bs_prefill cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill "
                "cuda_graph_prefill_max_context disable_prefill_cuda_graph"
            ),
            _OTHERS: (
                "ple_offload_* paged_experts_num_resident cp_strategy dcp_* disable_attn_tp_gather boundary_reduction "
                "enable_cp_tp_group_sharing dllm_fdfo prefill_decode_interval_min_bs"
            ),
            "speculative decoding is refused": (
                "decoupled_spec_* spec_trace_dir _speculative_draft_quantization_explicitly_set "
                "return_aux_hidden_state_layer_ids"
            ),
            "quantisation is refused": "prefill_kv_cache_dequant_dtype",
            "prefill/decode disaggregation and multiplexing are refused": "optimistic_prefill_attempts",
            "watermarks are refused": "watermark_*",
            "requests for it are refused": "sampling_mask_max_tokens",
            "other caches and servers are refused": (
                "lmcache_config_file flexkv_config_file unified_cache_* weight_cache_* kv_canary_* grpc_* sidecar_args "
                "smg_http_sidecar_port http2_*"
            ),
            "what it is for is refused: tracing": "otlp_service_name trace_modules",
            "the coordinator knows the load": "load_snapshot_publish_interval",
            "it is for other devices": "mlx_enable_sampling disable_aiter_allreduce_fusion_*",
            "SGLang sets it by itself": "_radix_eviction_policy_explicitly_set",
        }),
    ),
}  # fmt: skip
"""What only one version has, by its adapter: tables, and what is added to each."""

for _table, _more in ONLY[adapter.FOLDER]:
    for _reason, _names in _more.items():
        _table[_reason] = f"{_table.get(_reason, '')} {_names}".strip()

LIMITS = """\
## Limits of a replica

These hold for each replica, as in stock SGLang with `--dp`. So the engine takes as many times more
as it has replicas.

- `--max-running-requests`: how many requests a replica decodes at once. A merged replica has the
  same limit.
- `--max-queued-requests`: how many requests wait in a replica. A merge may bring more together.
  None is refused for that, only the next that comes.
- Priorities order the requests of a replica. A request preempts only those of its own replica.""".splitlines()


def list_fields() -> list[str]:
    """The fields of SGLang's ``ServerArgs``."""
    return list(inspect.signature(ServerArgs).parameters)


def classify_fields() -> dict[str, tuple[str, str]]:
    """field -> (status, test or reason).  A field in two tables is an error, and so is a pattern that fits nothing."""
    found: dict[str, tuple[str, str]] = {}
    tables = (("works", WORKING), ("as in SGLang", OUTSIDE), ("GPU, not run yet", GPU))
    rows = [(name, status, note) for status, table in tables for note, names in table.items() for name in names.split()]
    rows += [(refusal.field, "refused", refusal.reason) for refusal in refusals.REFUSED]
    for name, status, note in rows:
        assert name not in found, f"{name} is in two tables"
        found[name] = status, note
    left = [name for name in list_fields() if name not in found]
    for note, patterns in UNUSED.items():
        for pattern in patterns.split():
            fitting = fnmatch.filter(left, pattern)
            assert fitting, f"no other flag is called {pattern}"
            found |= dict.fromkeys(fitting, ("no effect", note))
            left = [name for name in left if name not in fitting]
    return found


def page() -> str:
    """The page docs/flags.md, whole."""
    tables = {folder: import_module(f"sglang_pat.host.{folder}.refusals") for folder in sorted({*ADAPTERS.values()})}
    versions = {folder: " and ".join(v for v, f in ADAPTERS.items() if f == folder) for folder in tables}
    only = [
        line
        for folder, table in tables.items()
        for line in (
            "", f"Also, with SGLang {versions[folder]}:", "", *_format_reasons(refusals.list_refusals(table)), "",
            *(f"- `{name}`: {reason}" for name, reason in table.ENVIRONMENT.items()),
            *(f"- `{name}=0`: {reason}" for name, reason in table.MUST_BE_ON.items()),
        )
    ]  # fmt: skip
    common = refusals.ENVIRONMENT.keys() - adapter.refusals.ENVIRONMENT.keys()
    lines = [
        "# Flags",
        "",
        "Made by `python -m tests.contract.flags`; do not edit.",
        "",
        "## Ours",
        "",
        *settings.format_table(),
        "",
        "## SGLang's, under --adaptive-tp",
        "",
        "All flags work as in SGLang, but for those below, and those that are accepted without effect or act",
        "on GPUs only: `tests/contract/flags_*.csv` say of each, by version of SGLang, which it is, why, or",
        "which test shows it.",
        "Names are those of SGLang's `ServerArgs`: `pp_size` is `--pp-size`.",
        "",
        "Refused at start, in one line that says what to change:",
        "",
        *_format_reasons(refusals.IN_ALL),
        "",
        "Variables that are refused:",
        "",
        *(f"- `{name}`: {reason}" for name, reason in refusals.ENVIRONMENT.items() if name in common),
        *only,
        "",
        *LIMITS,
    ]
    return "\n".join(lines) + "\n"


def _format_reasons(refused: Iterable[refusals.Refusal]) -> list[str]:
    names: dict[str, list[str]] = {}
    for refusal in refused:
        names.setdefault(refusal.reason, []).append(refusal.field)
    rows = [f"| {', '.join(f'`{name}`' for name in some)} | {reason} |" for reason, some in names.items()]
    return ["| flag | reason |", "| --- | --- |", *rows]


def register() -> str:
    """The file of this version: a line a flag, in the order of SGLang's ``ServerArgs``."""
    found = classify_fields()
    text = io.StringIO()
    rows = [(name, *found[name]) for name in list_fields()]
    csv.writer(text, lineterminator="\n").writerows([("flag", "status", "test or reason"), *rows])
    return text.getvalue()


if __name__ == "__main__":
    PAGE.write_text(page())
    REGISTER.write_text(register())
