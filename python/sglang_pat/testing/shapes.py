"""Models of real shape without weights (``--load-format dummy``): what they say means nothing, what they take does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_pat.testing.tokenizer import BOS_ID, EOS_ID, write_tokenizer

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "max_position_embeddings": 40960, "vocab_size": 151936, "num_key_value_heads": 8,
    "head_dim": 128, "attention_bias": False, "tie_word_embeddings": True,
}  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": QWEN3 | {
        "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072,
    },
    "Qwen3-4B": QWEN3 | {
        "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 9728,
    },
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "rope_theta": 5e5, "max_position_embeddings": 131072, "vocab_size": 128256, "num_key_value_heads": 8,
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336,
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""The models' own ``config.json``, as published; rotary scaling left out."""


def write_shape(folder: Path, name: str) -> Path:
    """Write config and tokenizer of ``name`` below ``folder``; its folder."""
    config = SHAPES[name] | {"torch_dtype": "bfloat16", "bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    write_tokenizer(place, config["vocab_size"], config["max_position_embeddings"])
    (place / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return place
