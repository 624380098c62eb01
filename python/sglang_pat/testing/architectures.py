"""The architectures that random models can have: what tells their configs and their tensors apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_pat.testing.weights import RandomModel

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",  # bias in q, k and v
    "qwen3": "Qwen3ForCausalLM",  # norms on the heads of q and k
    "phi3": "Phi3ForCausalLM",  # q, k and v in one tensor of the checkpoint; gate and up likewise
    "olmo2": "Olmo2ForCausalLM",  # norms on all of q and k, which ranks gather for it; and behind attention and MLP
    "glm4": "Glm4ForCausalLM",  # bias as qwen2, gate and up in one tensor, norms on both sides, half a head rotated
    "granite": "GraniteForCausalLM",  # fixed factors on embedding, attention, residual and logits
}

_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False, "mlp_bias": False},
    "mistral": {"attention_bias": False, "sliding_window": None},
    "qwen2": {},  # has its bias without asking
    "qwen3": {"attention_bias": False},
    "phi3": {"attention_bias": False, "sliding_window": None},
    "olmo2": {"attention_bias": False},
    "glm4": {"attention_bias": True},
    "granite": {
        "attention_bias": False,
        "mlp_bias": False,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 0.5,
    },
}


def extra_config(model: RandomModel) -> dict[str, Any]:
    """What config.json has besides what all architectures have."""
    extra = dict(_CONFIGS[model.arch])
    assert model.head_dim is not None, "set by the model itself"
    if model.arch == "granite":
        extra["attention_multiplier"] = 1.5 * model.head_dim**-0.5
    if model.arch == "glm4":
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        extra |= {"partial_rotary_factor": 0.5, "rope_parameters": rope}
    return extra


def layer_shapes(model: RandomModel) -> dict[str, tuple[int, ...]]:
    """Hugging Face name, behind ``model.layers.N.``, and shape of each tensor of a layer."""
    arch, h = model.arch, model.hidden
    assert model.head_dim is not None, "set by the model itself"
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    found: dict[str, tuple[int, ...]] = {}
    if arch == "phi3":
        found["self_attn.qkv_proj.weight"] = (q + 2 * kv, h)
    else:
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            found[f"self_attn.{name}_proj.weight"] = (rows, h)
            if arch in ("qwen2", "glm4"):
                found[f"self_attn.{name}_proj.bias"] = (rows,)
            if arch == "qwen3" and name != "v":
                found[f"self_attn.{name}_norm.weight"] = (model.head_dim,)
            if arch == "olmo2" and name != "v":
                found[f"self_attn.{name}_norm.weight"] = (rows,)
    found["self_attn.o_proj.weight"] = (h, q)
    if arch in ("phi3", "glm4"):
        found["mlp.gate_up_proj.weight"] = (2 * model.intermediate, h)
    else:
        found["mlp.gate_proj.weight"] = found["mlp.up_proj.weight"] = (model.intermediate, h)
    found["mlp.down_proj.weight"] = (h, model.intermediate)
    norms = {
        "olmo2": ("post_attention_layernorm", "post_feedforward_layernorm"),
        "glm4": ("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"),
    }
    for name in norms.get(arch, ("input_layernorm", "post_attention_layernorm")):
        found[f"{name}.weight"] = (h,)
    return found
