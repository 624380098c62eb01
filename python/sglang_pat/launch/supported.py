"""Which models are let in: dense decoders whose KV is one pool of heads.

What the configuration says is refused here, before anything starts.  Whether the shards are what we take them for is
asked of SGLang's own loaders when a rank builds its layouts (``shard_check.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a framework reads a config.json where it does not import SGLang
    from sglang.srt.configs.model_config import ModelConfig

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "moe_num_primary_experts")
RECURRENT = ("mamba_d_state", "mamba_d_ssm", "ssm_state_size", "ssm_cfg", "state_size", "linear_num_key_heads")
RECURRENT += ("hybrid_override_pattern", "layers_block_type", "attn_type_list")
"""Names of the configuration's fields that only such models have."""


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
