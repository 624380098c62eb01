"""Which models are let in: dense decoders whose KV is one pool of heads.

What the configuration says is refused here, before anything starts.  Whether the shards are what we take them for is
asked of SGLang's own loaders when a rank builds its layouts (``shard_check.py``).
"""

from __future__ import annotations

from typing import Any

from sglang.srt.configs.model_config import AttentionArch, ModelConfig

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "moe_num_primary_experts")
RECURRENT = ("mamba_d_state", "mamba_d_ssm", "ssm_state_size", "ssm_cfg", "state_size", "linear_num_key_heads")
RECURRENT += ("hybrid_override_pattern", "layers_block_type", "attn_type_list")
"""Names of the configuration's fields that only such models have."""


def refuse_model(model: ModelConfig) -> None:
    """Raise ``ValueError`` with one line for a model that cannot cross a switch."""
    name = (model.hf_config.architectures or ["?"])[0]
    if why := _why_not(model, model.hf_text_config):
        raise ValueError(f"--adaptive-tp does not support {name}: {why}; choose a dense text model with MHA or GQA")


def _why_not(model: ModelConfig, config: Any) -> str | None:
    kinds = set(getattr(config, "layer_types", None) or ())
    if not model.is_generation:
        return "it does not generate text"
    if model.is_multimodal or model.hf_config is not config:
        return "it is multimodal"
    if getattr(config, "is_encoder_decoder", False):
        return "it has an encoder"
    if model.attention_arch == AttentionArch.MLA:
        return "its attention is MLA, whose KV has no heads to divide"
    if any(_several(getattr(config, field, None)) for field in EXPERTS):
        return "it is a mixture of experts"
    if kinds - {"full_attention", "sliding_attention"} or any(getattr(config, field, None) for field in RECURRENT):
        return "some of its layers are recurrent and keep a state instead of KV"
    if getattr(config, "block_configs", None):
        return "its layers differ in size from each other"
    if getattr(config, "attn_logit_softcapping", None):
        return "its attention logits are soft-capped"
    if "sliding_attention" in kinds or model.is_hybrid_swa:
        return "some of its layers have a sliding window"
    if model.has_attention_sinks:
        return "its attention has sinks"
    if model.quantization is not None:
        return f"its weights are quantised ({model.quantization})"
    return None


def _several(experts: Any) -> bool:
    return any(number > 1 for number in (experts if isinstance(experts, list) else [experts or 0]))
