"""Refusals before anything starts, of paths, ports, flags, models, functions; one line each.

Nothing here imports SGLang: a wrong path is refused in a moment, and a framework may check its job without it.
``host/arguments.py`` looks at a model that SGLang has read.  Whether the shards of a model are what we take them for is
asked of SGLang's own loaders when a rank builds its layouts (``rank/shard_check.py``).
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from sglang_pat.config import AdaptiveConfig
from sglang_pat.host import adapter
from sglang_pat.memory.shapes import read_config
from sglang_pat.predict.profile import Profile, load

GRPC_OFFSET, MAX_PORT = 10_000, 65_535

FUNCTIONS = (
    "sglang.srt.managers.scheduler.run_scheduler_process",
    "sglang.srt.managers.detokenizer_manager.run_detokenizer_process",
)
"""Functions of SGLang's own launchers in whose processes' place ours stand."""

SHARED_MEMORY = Path("/dev/shm")
STAGING_BYTES = 128 << 10
"""Least bytes of a rank in a group's segment (``csrc/segment.h``)."""
CHANNEL_BYTES = 132 << 10
"""Bytes of the channel from one rank of a group to another (``csrc/segment.h``)."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "moe_num_primary_experts")
MIXTURES = ("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
"""Mixtures whose experts are cut by their width (``host/experts.py``)."""
NUMBERED = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
"""Mixtures whose layers tell SGLang their number, so that it can say which experts a token was routed to."""
RECURRENT = ("mamba_d_state", "mamba_d_ssm", "ssm_state_size", "ssm_cfg", "state_size", "linear_num_key_heads")
RECURRENT += ("hybrid_override_pattern", "layers_block_type", "attn_type_list")
"""Names of the configuration's fields that only recurrent models have."""


def check_command_line(argv: Sequence[str]) -> None:
    """Raise ``ValueError`` for a model, a profile or a port that cannot be used; everything else is for later.

    A configuration file may say otherwise: with ``--config`` nothing is looked at here.
    """
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--model-path", "--model")
    parser.add_argument("--pat-profile")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30_000)
    if {"--config", "-h", "--help"} & {arg.split("=", 1)[0] for arg in argv}:
        return
    try:
        options, _ = parser.parse_known_args(argv)
    except argparse.ArgumentError:
        return
    if options.model_path is not None:
        check_model_path(options.model_path)
    if options.pat_profile is not None:
        load(options.pat_profile, complete=True)
    check_port(options.host, options.port)


def read_files(config: AdaptiveConfig) -> Profile | None:
    """Read the profile, if one is given; raises ValueError for one that is none, or a log that cannot be written."""
    profile = None if config.profile is None else load(config.profile, complete=True)
    if config.log is not None:
        try:
            open(config.log, "ab").close()
        except OSError as error:
            raise ValueError(f"--pat-log {config.log}: {error.strerror}; give a file that can be written") from None
    return profile


def check_model_path(model: str) -> None:
    """Raise ``ValueError`` for a folder that is none, or whose config.json cannot be read.

    What may be the name of a repository is left to SGLang, unless nothing can be downloaded.
    """
    looks_local = model.startswith(("/", ".", "~")) or model.count("/") > 1
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    if Path(model).exists() or ("://" not in model and (looks_local or offline)):
        read_config(model)


def check_port(host: str, port: int) -> None:
    """Raise ``ValueError`` unless a server can listen there."""
    check_second_port(port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(f"--host {host} --port {port}: {error.strerror}; choose another") from None


def check_second_port(port: int) -> None:
    """Raise ``ValueError`` for what is no port, or leaves no room for SGLang's second."""
    reserves = adapter.refusals.SECOND_PORT and "SGLANG_GRPC_PORT" not in os.environ
    highest = MAX_PORT - GRPC_OFFSET if reserves else MAX_PORT
    if not 0 <= port <= highest:
        why = f"SGLang also reserves the port 10,000 above, and the highest is {MAX_PORT:,}; " if reserves else ""
        raise ValueError(f"--port {port}: {why}choose one up to {highest}")


def refuse_function(name: str, function: Callable) -> None:
    """Raise ``ValueError`` for a function that would not be called: whoever gave it counts on what it does."""
    # By its name, as plug-ins of SGLang's wrap its own.
    path = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}"
    if path not in FUNCTIONS:
        raise ValueError(
            f"{name} is {path}: an adaptive engine starts its processes itself, and would not call it; launch SGLang "
            "without it, or without SGLANG_PAT"
        )


def check_shared_memory(config: AdaptiveConfig) -> None:
    """Raise ``ValueError`` unless the groups' segments find room."""
    need = count_shared_memory_needed(config)
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError as error:
        raise ValueError(f"{SHARED_MEMORY}: {error.strerror}; ranks meet in shared memory") from None
    if not os.access(SHARED_MEMORY, os.W_OK):
        raise ValueError(f"{SHARED_MEMORY} cannot be written; ranks meet in shared memory")
    if free < need:
        raise ValueError(
            f"{SHARED_MEMORY} has {free >> 20} MiB free, {config.num_ranks} ranks need {-(-need >> 20)} MiB: "
            f"enlarge it (docker: --shm-size)"
        )


def count_shared_memory_needed(config: AdaptiveConfig) -> int:
    """Bytes of all groups' segments at their smallest, and of one whole segment of all ranks beside them."""
    ranks, layouts = config.num_ranks, len(config.layouts)
    # The world, two groups of each layout, one for each pair of layouts: all ranks are in each of these once.
    places = 1 + 2 * layouts + layouts * (layouts - 1) // 2
    return places * ranks * STAGING_BYTES + ranks * ranks * CHANNEL_BYTES


# -- flags of SGLang ---------------------------------------------------------------------------------------------------
# What becomes of all others is in ``tests/contract/flags.py``, which makes docs/flags.md of both.


@dataclass(frozen=True)
class Refusal:
    """A flag that must stay at one of ``allowed``, and what to do otherwise."""

    field: str
    allowed: tuple[Any, ...]
    advice: str
    reason: str

    def format_flag(self, value: Any) -> str:
        """The flag with its value, as the user would write it."""
        flag = "--" + self.field.replace("_", "-")
        return flag if value is True else f"{flag} {value}"


_OUT = "leave it out"
_ONE_DEGREE = "every layer is cut by the degree of the layout"


def _refuse_all(reason: str, names: str) -> tuple[Refusal, ...]:
    """Refusals of flags that may not be given at all."""
    empty = (None, False, 0, "", [], {})
    return tuple(Refusal(name, empty, _OUT, reason) for name in names.split())


IN_ALL = (
    Refusal("pp_size", (1,), "pipeline parallelism must be 1", "stages have no layouts"),
    Refusal("nnodes", (1,), "an engine spans one node; run one engine per node", "ranks share one machine's memory"),
    Refusal("ep_size", (1,), "expert parallelism must be 1", _ONE_DEGREE),
    Refusal("attn_cp_size", (1,), "context parallelism must be 1", "its groups have no layouts"),
    Refusal("moe_dp_size", (1,), "must be 1", _ONE_DEGREE),
    Refusal("moe_dense_tp_size", (None,), _OUT, _ONE_DEGREE),
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
    Refusal("moe_a2a_backend", ("none",), "must be none", _ONE_DEGREE),
    Refusal(
        "moe_runner_backend",
        ("auto", "triton"),
        "must be triton; leave it out",
        "experts of the other layouts are views, which only Triton's kernel takes",
    ),
    Refusal("init_expert_location", ("trivial",), "must be trivial", "experts stand in the same order in all layouts"),
    Refusal("offload_group_size", (-1, 0, None), _OUT, "the other layouts use these weights, too"),
    *_refuse_all(
        "the switch cannot carry it over",
        "enable_dp_attention speculative_algorithm enable_hierarchical_cache hicache_storage_backend enable_lmcache "
        "enable_mixed_chunk enable_pdmux enable_streaming_session enable_two_batch_overlap "
        "enable_single_batch_overlap dllm_algorithm enable_hisparse enable_lora lora_paths "
        "enable_attn_tp_input_scattered",
    ),
    *_refuse_all(
        "it is for expert parallelism, which is refused",
        "enable_eplb ep_num_redundant_experts ep_dispatch_algorithm elastic_ep_backend enable_elastic_expert_backup",
    ),
    *_refuse_all("its counts are those of one group", "expert_distribution_recorder_mode"),
    *_refuse_all("the adaptive engine starts its processes itself", "enable_http2 use_ray grpc_mode"),
    *_refuse_all(
        "it changes the base layout's model; the others would stay as they are",
        "cpu_offload_gb modelopt_quant quantize_and_serve kt_weight_path forward_hooks "
        "debug_tensor_dump_output_folder msprobe_dump_config enable_layerwise_nvtx_marker "
        "enable_fused_moe_sum_all_reduce",
    ),
    *_refuse_all(
        "its workspace or communicator belongs to one group",
        "enable_flashinfer_allreduce_fusion enable_aiter_allreduce_fusion enable_mscclpp enable_torch_symm_mem "
        "enable_symm_mem enable_quant_communications enable_prefill_delayer",
    ),
    *_refuse_all("a change of tp changes the order of sums", "enable_deterministic_inference rl_on_policy_target"),
    *_refuse_all(
        "each replica of the base layout would open the same port",
        "kv_events_config enable_forward_pass_metrics",
    ),
    *_refuse_all("ranks do not set it up", "enable_trace"),
    *_refuse_all("SGLang's check takes ranks of a group for numbers of GPUs", "enable_p2p_check"),
    *_refuse_all(
        "the model it is for is refused",
        "is_embedding prefill_only_disable_kv_cache enable_multimodal enable_mis encoder_only language_only "
        "enable_return_indexer_topk decrypted_config_file",
    ),
    *_refuse_all("layers on views of the base weights write their results in place", "enable_torch_compile"),
)
"""Refusals of flags that all versions of SGLang have."""


def list_refusals(tables: Any) -> tuple[Refusal, ...]:
    """Refusals of flags that only one version has, of the tables of its adapter."""
    values = (Refusal(name, *rule) for name, rule in tables.MUST_BE.items())
    return (*values, *(one for reason, names in tables.NOT_AT_ALL.items() for one in _refuse_all(reason, names)))


REFUSED = IN_ALL + list_refusals(adapter.refusals)


ENVIRONMENT = {
    "SGLANG_REQ_WAITING_TIMEOUT": "the ranks of a group would each go by their own clock",
    "SGLANG_REQ_RUNNING_TIMEOUT": "the ranks of a group would each go by their own clock",
    "SGLANG_ENABLE_COLOCATED_BATCH_GEN": "its barrier knows one layout",
    "SGLANG_PROFILE_V2": "its barrier knows one layout",
} | adapter.refusals.ENVIRONMENT
"""Reasons why variables of SGLang's are refused, by name."""


def refuse_flags(arguments: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for what cannot cross a switch: one line with what was given and what to change.

    Args:
        arguments: SGLang's, by name.
    """
    for name, reason in ENVIRONMENT.items():
        if os.environ.get(name, "").lower() not in ("", "0", "-1", "false"):
            raise ValueError(f"--adaptive-tp does not support {name}={os.environ[name]} ({reason}): unset it")
    for name, reason in adapter.refusals.MUST_BE_ON.items():
        if os.environ.get(name, "1").lower() in ("", "0", "false", "no", "n", "off"):
            raise ValueError(f"--adaptive-tp does not support {name}={os.environ[name]} ({reason}): unset it")
    for refusal in REFUSED:
        if arguments[refusal.field] not in refusal.allowed:
            flag = refusal.format_flag(arguments[refusal.field])
            raise ValueError(f"--adaptive-tp does not support {flag}: {refusal.advice}")


# -- models ------------------------------------------------------------------------------------------------------------
# Decoders whose KV is one pool of heads are let in: dense ones, and MIXTURES.


def refuse_kind(name: str, why: str) -> NoReturn:
    """Raise ``ValueError`` with one line for a model that cannot cross a switch: its architecture, and why."""
    raise ValueError(f"--adaptive-tp does not support {name}: {why}; {_ADVICE}")


def refuse_routed_experts(architectures: Sequence[str] | None, option: str) -> None:
    """Raise ``ValueError`` with one line if SGLang cannot return the routed experts of a model.

    Args:
        architectures: the model configuration's.
        option: what asks for them, for the message.
    """
    name = (architectures or ["?"])[0]
    if name not in NUMBERED:
        why = "whose layers have no numbers in SGLang" if name in MIXTURES else "which has no experts"
        raise ValueError(f"{option}: cannot be had of {name}, {why}; leave it out")


def refuse_config(config: Mapping[str, Any], where: str) -> None:
    """Raise ``ValueError`` with one line for a model that cannot cross a switch, as far as its ``config.json`` tells.

    Args:
        where: setting that names the model, for the message.
    """
    name = (config.get("architectures") or ["?"])[0]
    if why := _find_reason_in_file(config) or find_reason_in_fields(config.get):
        raise ValueError(f"{where}: an adaptive engine does not support {name}: {why}; {_ADVICE}")


_ADVICE = "choose a text model with MHA or GQA that is dense, or is a Qwen3-MoE, Qwen2-MoE or Mixtral"
MLA = "its attention is MLA, whose KV has no heads to divide"


def _find_reason_in_file(config: Mapping[str, Any]) -> str | None:
    """Reason against a model, by the fields from which SGLang says what it is; None if there is none."""
    if any(config.get(part) for part in ("text_config", "vision_config", "audio_config")):
        return "it is multimodal"
    if config.get("kv_lora_rank"):
        return MLA
    if quantization := config.get("quantization_config"):
        return f"its weights are quantised ({quantization.get('quant_method')})"
    return None


WINDOW = "some of its layers have a sliding window"


def find_reason_in_fields(field: Callable[[str], Any]) -> str | None:
    """Reason against a model, by the fields of the text model's configuration, which ``field`` reads by name; None if
    there is none."""
    kinds = set(field("layer_types") or ())
    if field("is_encoder_decoder"):
        return "it has an encoder"
    if any(_has_several(field(name)) for name in EXPERTS) and not set(field("architectures") or ()) & set(MIXTURES):
        return "it is a mixture of experts of another kind than Qwen3-MoE, Qwen2-MoE and Mixtral"
    if field("mlp_only_layers") or (field("decoder_sparse_step") or 1) != 1:
        return "some of its layers have no experts, and SGLang gives experts to all, with weights that are never loaded"
    if kinds - {"full_attention", "sliding_attention"} or any(field(name) for name in RECURRENT):
        return "some of its layers are recurrent and keep a state instead of KV"
    if field("block_configs"):
        return "its layers differ in size from each other"
    if field("attn_logit_softcapping"):
        return "its attention logits are soft-capped"
    return WINDOW if "sliding_attention" in kinds else None


def _has_several(experts: Any) -> bool:
    return any(number > 1 for number in (experts if isinstance(experts, list) else [experts or 0]))
