"""What is refused before anything starts: paths, ports, models, functions; one line each.

Nothing here imports SGLang, but to look at a model that it has read: a wrong path is refused in a moment.  Whether the
shards of a model are what we take them for is asked of SGLang's own loaders when a rank builds its layouts
(``rank/shard_check.py``).
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_pat.config import AdaptiveConfig
from sglang_pat.memory.shapes import read_config
from sglang_pat.predict.profile import load

if TYPE_CHECKING:  # a framework reads a config.json where it does not import SGLang
    from sglang.srt.configs.model_config import ModelConfig

GRPC_OFFSET, MAX_PORT = 10_000, 65_535

FUNCTIONS = (
    "sglang.srt.managers.scheduler.run_scheduler_process",
    "sglang.srt.managers.detokenizer_manager.run_detokenizer_process",
)
"""Of SGLang's own launchers, of whose processes ours stand in the place."""

SHARED_MEMORY = Path("/dev/shm")
STAGING_BYTES = 128 << 10
"""Of a rank in a group's segment, at least (``csrc/segment.h``)."""
CHANNEL_BYTES = 132 << 10
"""Between two ranks of a group."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "moe_num_primary_experts")
RECURRENT = ("mamba_d_state", "mamba_d_ssm", "ssm_state_size", "ssm_cfg", "state_size", "linear_num_key_heads")
RECURRENT += ("hybrid_override_pattern", "layers_block_type", "attn_type_list")
"""Names of the configuration's fields that only such models have."""


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
        found, _ = parser.parse_known_args(argv)
    except argparse.ArgumentError:
        return
    if found.model_path is not None:
        check_model_path(found.model_path)
    if found.pat_profile is not None:
        load(found.pat_profile, complete=True)
    check_port(found.host, found.port)


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
    """Raise ``ValueError`` for a port that leaves no room for SGLang's second."""
    if port < 0 or ("SGLANG_GRPC_PORT" not in os.environ and port + GRPC_OFFSET > MAX_PORT):
        raise ValueError(
            f"--port {port}: SGLang also reserves the port 10,000 above, and the highest is {MAX_PORT:,}; "
            f"choose one up to {MAX_PORT - GRPC_OFFSET}"
        )


def refuse_function(name: str, given: Callable) -> None:
    """Raise ``ValueError`` for a function that would not be called: whoever gave it counts on what it does."""
    # By its name, as plug-ins of SGLang's wrap its own.
    found = f"{getattr(given, '__module__', '?')}.{getattr(given, '__qualname__', given)}"
    if found not in FUNCTIONS:
        raise ValueError(
            f"{name} is {found}: an adaptive engine starts its processes itself, and would not call it; launch SGLang "
            "without it, or without SGLANG_PAT"
        )


def check_shared_memory(config: AdaptiveConfig) -> None:
    """Raise ``ValueError`` unless the groups' segments find room."""
    need = shared_memory_needed(config)
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


def shared_memory_needed(config: AdaptiveConfig) -> int:
    """Bytes of all groups' segments at their smallest, and of one whole segment of all ranks beside them."""
    ranks, layouts = config.num_ranks, len(config.layouts)
    # The world, two groups of each layout, one for each pair of layouts: all ranks are in each of these once.
    places = 1 + 2 * layouts + layouts * (layouts - 1) // 2
    return places * ranks * STAGING_BYTES + ranks * ranks * CHANNEL_BYTES


# -- models ------------------------------------------------------------------------------------------------------------
# Dense decoders whose KV is one pool of heads are let in.


def refuse_model(model: ModelConfig) -> None:
    """Raise ``ValueError`` with one line for a model that cannot cross a switch."""
    name = (model.hf_config.architectures or ["?"])[0]
    if why := _why_not(model, model.hf_text_config):
        raise ValueError(f"--adaptive-tp does not support {name}: {why}; {_ADVICE}")


def refuse_config(config: Mapping[str, Any], where: str) -> None:
    """The same of a ``config.json`` alone, as far as it tells; ``where`` its model was given, for the message."""
    name = (config.get("architectures") or ["?"])[0]
    if why := _why_not_to_read(config) or _why_not_by_fields(config.get):
        raise ValueError(f"{where}: an adaptive engine does not support {name}: {why}; {_ADVICE}")


_ADVICE = "choose a dense text model with MHA or GQA"
_MLA = "its attention is MLA, whose KV has no heads to divide"


def _why_not_to_read(config: Mapping[str, Any]) -> str | None:
    """By what SGLang says of a model once it has read this file."""
    if any(config.get(part) for part in ("text_config", "vision_config", "audio_config")):
        return "it is multimodal"
    if config.get("kv_lora_rank"):
        return _MLA
    if quantization := config.get("quantization_config"):
        return f"its weights are quantised ({quantization.get('quant_method')})"
    return None


def _why_not(model: ModelConfig, config: Any) -> str | None:
    from sglang.srt.configs.model_config import AttentionArch

    if not model.is_generation:
        return "it does not generate text"
    if model.is_multimodal or model.hf_config is not config:
        return "it is multimodal"
    if model.attention_arch == AttentionArch.MLA:
        return _MLA
    if why := _why_not_by_fields(lambda name: getattr(config, name, None)):
        return why
    if model.is_hybrid_swa:
        return _WINDOW
    if model.has_attention_sinks:
        return "its attention has sinks"
    if model.quantization is not None:
        return f"its weights are quantised ({model.quantization})"
    return None


_WINDOW = "some of its layers have a sliding window"


def _why_not_by_fields(field: Callable[[str], Any]) -> str | None:
    """By fields of the text model's configuration, by name."""
    kinds = set(field("layer_types") or ())
    if field("is_encoder_decoder"):
        return "it has an encoder"
    if any(_several(field(name)) for name in EXPERTS):
        return "it is a mixture of experts"
    if kinds - {"full_attention", "sliding_attention"} or any(field(name) for name in RECURRENT):
        return "some of its layers are recurrent and keep a state instead of KV"
    if field("block_configs"):
        return "its layers differ in size from each other"
    if field("attn_logit_softcapping"):
        return "its attention logits are soft-capped"
    return _WINDOW if "sliding_attention" in kinds else None


def _several(experts: Any) -> bool:
    return any(number > 1 for number in (experts if isinstance(experts, list) else [experts or 0]))
