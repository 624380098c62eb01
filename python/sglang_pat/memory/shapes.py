"""What a model weighs: bytes of its weights and of its KV, at any TP degree."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

from sglang_pat.layout import ParallelLayout

ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
VOCAB_PADDING = 64
"""Number of which SGLang's padded vocabulary is a multiple."""
OTHER_NAMES = {
    "num_hidden_layers": ("n_layer", "num_layers"),
    "hidden_size": ("n_embd",),
    "num_attention_heads": ("n_head",),
    "num_key_value_heads": ("multi_query_group_num",),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocab_size": ("padded_vocab_size",),
    "max_position_embeddings": ("n_positions", "seq_length"),
}
"""Names of sizes in the configs of GPT-2, GPT-BigCode, GPT-J, OPT, EXAONE and ChatGLM, by the usual name."""
UNGATED = frozenset({"apertus", "arcee", "gpt2", "gpt_bigcode", "gptj", "opt", "persimmon", "phi", "starcoder2"})
"""Kinds of models (``model_type``) whose MLP has two matrices, up and down; that of all others has a gate, too."""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The experts of a layer: MLPs of three matrices, of which a router chooses some for each token."""

    experts: int
    per_token: int
    """Experts that a token goes through."""
    width: int
    """Intermediate size of one expert."""
    shared_width: int = 0
    """Intermediate size of the expert that all tokens go through, which has its own gate (Qwen2-MoE); 0 without it."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder with grouped-query attention: Llama, Mistral, Qwen2, Qwen3, Phi-3, OLMo-2, GLM-4, Granite,
    the mixtures Qwen3-MoE, Qwen2-MoE and Mixtral, and what is built like them.  Biases and norms are left out: they
    weigh next to nothing."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int
    """Longest sequence, tokens."""
    item: int
    """Bytes of a weight and of a KV element."""
    tied: bool = False
    """Whether the output head is the embedding."""
    mlp_matrices: int = 3
    """Matrices of an MLP: gate, up and down, or two without a gate."""
    mixture: Mixture | None = None
    """Experts that each layer has in the place of an MLP; then ``intermediate`` and ``mlp_matrices`` do not count."""
    whole_norms: bool = False
    """Whether norms go over all queries and all keys (OLMo-2), for which ranks gather them: each KV head once."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], dtype: str = "auto") -> ModelShape:
        """Read a Hugging Face ``config.json``.

        Args:
            dtype: as ``--dtype``; ``auto`` takes the model's own, but float16 for float32, as SGLang does.

        Raises:
            ValueError: a size is missing or is not a positive integer, or an unknown dtype.
        """
        kind = config.get("model_type")
        heads = _read_size(config, "num_attention_heads")
        hidden = _read_size(config, "hidden_size")
        return cls(
            layers=_read_size(config, "num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=_read_size(config, "num_key_value_heads", 1 if config.get("multi_query") else heads),
            head_dim=_read_size(config, "head_dim", hidden // heads or 1),
            intermediate=_read_size(config, "intermediate_size", 4 * hidden if "n_embd" in config else None),
            vocab=_read_size(config, "vocab_size"),
            context=_read_size(config, "max_position_embeddings", 2048),
            item=_read_item_size(config, dtype),
            tied=bool(config.get("tie_word_embeddings", False)),
            mlp_matrices=2 if kind in UNGATED else 3,
            mixture=_read_mixture(config),
            whole_norms=kind == "olmo2",
        )

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab // VOCAB_PADDING) * VOCAB_PADDING

    def find_reason_against_degree(self, tp: int) -> str | None:
        """Why the model cannot be cut into ``tp`` shards; None if it can."""
        if self.heads % tp:
            return f"does not divide the model's {self.heads} attention heads"
        if max(self.kv_heads, tp) % min(self.kv_heads, tp):
            return f"and the model's {self.kv_heads} KV heads: one must divide the other"
        if self.whole_norms and tp > self.kv_heads:
            return f"is more than the model's {self.kv_heads} KV heads, over which it has a norm"
        if self.mixture is not None and tp > self.mixture.experts:
            return f"is more than the model's {self.mixture.experts} experts"
        if wrong := next((width for width in self._widths if width % tp), None):
            return f"does not divide the model's intermediate size {wrong}"
        if self.padded_vocab % tp:
            return f"does not divide the model's vocabulary of {self.padded_vocab} (padded)"
        return None

    def list_allowed_degrees(self, layouts: Iterable[ParallelLayout]) -> tuple[int, ...]:
        """The degrees of ``layouts``, in order, up to the first that the model does not allow."""
        return tuple(
            layout.tp
            for layout in takewhile(lambda layout: self.find_reason_against_degree(layout.tp) is None, layouts)
        )

    def local_kv_heads(self, tp: int) -> int:
        """KV heads of a rank; with more ranks than KV heads each has one, as others do."""
        return max(1, self.kv_heads // tp)

    def kv_bytes(self, tp: int) -> int:
        """Bytes of KV of one token on one rank, in all layers."""
        return self.layers * 2 * self.local_kv_heads(tp) * self.head_dim * self.item

    @property
    def _widths(self) -> tuple[int, ...]:
        """Intermediate sizes that ranks divide among them."""
        return (self.intermediate,) if self.mixture is None else (self.mixture.width, self.mixture.shared_width)

    def parameters(self, tp: int = 1) -> int:
        tables = self.padded_vocab // tp * self.hidden * (1 if self.tied else 2)
        return self.layers * self._count_layer_parameters(tp) + tables

    def _count_layer_parameters(self, tp: int) -> int:
        queries, kv = self.heads // tp * self.head_dim, self.local_kv_heads(tp) * self.head_dim
        return 2 * (queries + kv) * self.hidden + self._count_mlp_parameters(tp)

    def _count_mlp_parameters(self, tp: int) -> int:
        if self.mixture is None:
            return self.mlp_matrices * self.hidden * (self.intermediate // tp)
        mixture = self.mixture
        matrices = 3 * self.hidden * (mixture.experts * mixture.width + mixture.shared_width) // tp
        # A row of the router for each expert, and the gate of the shared one, are whole on every rank.
        return matrices + self.hidden * (mixture.experts + bool(mixture.shared_width))

    def count_mlp_numbers(self, tp: int) -> int:
        """Numbers that a token has inside an MLP, or inside all its experts, on one rank."""
        if self.mixture is None:
            return 3 * self.intermediate // tp
        mixture = self.mixture
        routed = mixture.per_token * (3 * mixture.width // tp + self.hidden)
        return routed + 3 * mixture.shared_width // tp

    @property
    def largest_parameter(self) -> int:
        """Numbers of the largest parameter, whole: the embedding, or gate and up of all experts."""
        experts = 0 if self.mixture is None else self.mixture.experts * 2 * self.mixture.width
        return max(self.padded_vocab, experts) * self.hidden

    def layer_bytes(self, tp: int) -> int:
        """Bytes of one layer's weights on one rank."""
        return self._count_layer_parameters(tp) * self.item

    def weight_bytes(self, tp: int) -> int:
        return self.parameters(tp) * self.item


def _read_size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    sizes = (config.get(alias) for alias in (name, *OTHER_NAMES.get(name, ())))
    value = next((size for size in sizes if size is not None), default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        problem = "is missing" if value is None else f"is {value!r}"
        raise ValueError(f"the model's config.json: {name} {problem}, must be a positive integer")
    return value


def _read_mixture(config: Mapping[str, Any]) -> Mixture | None:
    name = "num_local_experts" if config.get("num_local_experts") else "num_experts"
    if (config.get(name) or 0) == 0:
        return None
    return Mixture(
        experts=_read_size(config, name),
        per_token=_read_size(config, "num_experts_per_tok"),
        width=_read_size(config, "moe_intermediate_size", config.get("intermediate_size")),
        shared_width=config.get("shared_expert_intermediate_size") or 0,
    )


def _read_item_size(config: Mapping[str, Any], dtype: str) -> int:
    own = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    name = {"half": "float16", "float": "float32"}.get(dtype, dtype)
    if name == "auto":
        name = "float16" if own == "float32" else own
    if name not in ITEM_SIZES:
        raise ValueError(f"dtype {name!r}: choose one of {', '.join(ITEM_SIZES)}")
    return ITEM_SIZES[name]


def read_config(model: str) -> dict[str, Any]:
    """The ``config.json`` of a folder, or of a repository that is in the local Hugging Face cache.

    Raises:
        ValueError: there is none, or it cannot be read; one line.
    """
    path = Path(model) / "config.json" if Path(model).is_dir() else _find_cached_config(model)
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"--model-path {model}: there is no config.json in it") from None
    except OSError as error:
        raise ValueError(f"--model-path {model}: cannot read its config.json: {error.strerror}") from None
    except ValueError:
        raise ValueError(f"--model-path {model}: its config.json is not JSON") from None
    if not isinstance(config, dict):
        raise ValueError(f"--model-path {model}: its config.json is not a JSON object")
    return cast("dict[str, Any]", config)


def _find_cached_config(model: str) -> Path:
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", model):
        raise ValueError(f"--model-path {model}: no such folder")
    # Takes a second to import.
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model, "config.json")
    if not isinstance(cached, str):
        raise ValueError(f"--model-path {model}: no such folder, and not in the Hugging Face cache")
    return Path(cached)
