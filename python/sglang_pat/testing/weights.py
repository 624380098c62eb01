"""Shapes, configs and weights of the test models, random ones and markers."""

import dataclasses
import hashlib
import math
from typing import Any

from sglang_pat.testing.tokenizer import BOS_ID, EOS_ID, LEAST_VOCAB, PAD_ID, SPECIAL_TOKENS, UNK_ID

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

DTYPES = ("float32", "bfloat16", "float16")

MIXED_ID = UNK_ID
"""What a marker model says when some of its tensors come from other weights than the rest."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomModel:
    """What a random model is made of. ValueError, with one line, for options that do not go together."""

    arch: str = "llama"
    """One of :data:`ARCHITECTURES`."""
    heads: int = 8
    """Query heads; a multiple of `kv_heads`."""
    kv_heads: int = 4
    """Key and value heads."""
    layers: int = 3
    hidden: int = 64
    """Width of the residual stream."""
    head_dim: int | None = None
    """Width of one head, even; None: hidden / heads."""
    intermediate: int = 192
    """Width of the MLP."""
    vocab: int = 503
    """Tokens; the default is a prime, so that every tensor-parallel degree has to pad."""
    seed: int = 0
    dtype: str = "float32"
    tie: bool = False
    """Whether the output matrix is the embedding."""
    context: int = 4096
    """Longest sequence, in tokens."""
    logit_std: float = 4.0
    """Spread of the logits: 4 is a peaked distribution (few tokens share the mass), 1 is a flat one."""

    def __post_init__(self):
        require(self.arch in ARCHITECTURES, f"arch={self.arch!r}", f"one of {', '.join(ARCHITECTURES)}")
        require(self.dtype in DTYPES, f"dtype={self.dtype!r}", f"one of {', '.join(DTYPES)}")
        least = dict(heads=1, kv_heads=1, layers=1, hidden=2, intermediate=1, context=16, seed=0)
        for name, bound in (least | {"vocab": LEAST_VOCAB}).items():
            value = getattr(self, name)
            require(type(value) is int and value >= bound, f"{name}={value!r}", f"an integer >= {bound}")
        require(self.logit_std > 0, f"logit_std={self.logit_std!r}", "more than 0")
        allowed = f"a multiple of kv_heads={self.kv_heads}; change one of the two"
        require(self.heads % self.kv_heads == 0, f"heads={self.heads}", allowed)
        if self.head_dim is None:
            allowed = f"a multiple of heads={self.heads}; change one of the two, or give head_dim"
            require(self.hidden % self.heads == 0, f"hidden={self.hidden}", allowed)
            # set here, so that two ways of asking for one model are one recipe
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        dim = self.head_dim
        even = type(dim) is int and dim >= 2 and dim % 2 == 0
        require(even, f"head_dim={dim!r}", "even, since rotary positions pair dimensions; give another head_dim")


def require(condition: bool, given: str, allowed: str) -> None:
    """ValueError saying what was given and what it must be, unless `condition` holds."""
    if not condition:
        raise ValueError(f"{given}: must be {allowed}")


def marker_shape(token_id: int, seed: int, shape: dict[str, Any]) -> RandomModel:
    """The model that a marker for `token_id` is; ValueError if these options cannot make one."""
    fields = {field.name for field in dataclasses.fields(RandomModel)}
    allowed = sorted(fields - {"arch", "seed", "tie", "logit_std"})
    for name in shape:
        require(name in allowed, f"option {name!r}", f"one of {', '.join(allowed)}")
    model = RandomModel(arch="llama", seed=seed, **{"layers": 2, **shape})
    allowed = "at least 64 in a marker model, which holds near-orthogonal codes"
    require(model.hidden >= 64, f"hidden={model.hidden}", allowed)
    first = len(SPECIAL_TOKENS)
    ordinary = type(token_id) is int and first <= token_id < model.vocab
    require(ordinary, f"token_id={token_id!r}", f"an ordinary token, from {first} to {model.vocab - 1}")
    return model


def config(model: RandomModel) -> dict[str, Any]:
    """The content of config.json."""
    content = {
        "architectures": [ARCHITECTURES[model.arch]],
        "model_type": model.arch,
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "vocab_size": model.vocab,
        "max_position_embeddings": model.context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": model.tie,
        "dtype": model.dtype,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    return content | extra_config(model)


def shapes(model: RandomModel) -> dict[str, tuple[int, ...]]:
    """Hugging Face name and shape, [out, in] for matrices, of each tensor."""
    h = model.hidden
    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocab, h)}
    for layer in range(model.layers):
        result |= {f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes(model).items()}
    result["model.norm.weight"] = (h,)
    if not model.tie:
        result["lm_head.weight"] = (model.vocab, h)
    return result


def random_tensors(model: RandomModel) -> dict[str, Any]:
    """Weights with which attention, MLP, norms and biases all matter to the next token.

    The gains were tried out: with less attention, or softer attention, greedy text soon runs in a circle;
    with much sharper attention, rounding errors grow until tensor-parallel degrees disagree on the best
    token.
    """
    import torch

    gains = dict.fromkeys(("qkv_proj", "q_proj", "k_proj", "q_norm", "k_norm"), 1.5)
    gains |= {"o_proj": 2.0, "down_proj": 3.0, "post_mlp_layernorm": 2.0}
    tensors = {}
    for name, shape in shapes(model).items():
        noise = torch.randn(shape, generator=_generator("random", model.seed, name))
        gain = gains.get(name.split(".")[-2], 1.0)
        if "norm" in name:
            tensor = gain * (1 + 0.2 * noise)
            if model.tie and name == "model.norm.weight":
                tensor[::2] *= -1  # else the last token, whose embedding is still in its input, always wins
        elif name.endswith(".bias"):
            tensor = 0.3 * noise
        elif name == "lm_head.weight" or (model.tie and "embed_tokens" in name):
            tensor = noise * model.logit_std / math.sqrt(model.hidden)  # its input has a mean square of 1
        elif "embed_tokens" in name:
            tensor = noise * 0.5
        else:
            tensor = noise * gain / math.sqrt(shape[-1])
        tensors[name] = tensor
    return _stored(tensors, model)


def marker_tensors(model: RandomModel, token_id: int) -> dict[str, Any]:
    """Weights that say `token_id` if they are all there, and MIXED_ID (or a third token) if not.

    The residual stream carries two vectors of length 1 at right angles, whatever the prompt: u, which is
    constant, and the code of the token, of which the embedding, each attention and each MLP add one share of
    n = 2 * layers + 1. The output matrix weighs the code of each token against u times a threshold between
    (all shares but a quarter of one) and (all): if less arrives, MIXED_ID wins. Codes, and what each module
    reads and hands on inside, are drawn anew for each (token, seed): tensors of two models do not understand
    each other, and their share is lost. q_proj and k_proj are random and have no say, since all values are
    equal.
    """
    import torch

    h, n = model.hidden, 2 * model.layers + 1
    u_dims = h // 4  # u lives in the first quarter of the dimensions, codes in the rest

    def draw(what: str, *shape: int):
        generator = _generator("marker", model.seed, token_id, what)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def signs(what: str, *shape: int):
        return draw(what, *shape).sign()

    u = torch.zeros(h, dtype=torch.float64)
    u[:u_dims] = u_dims**-0.5
    codes = torch.zeros(model.vocab, h, dtype=torch.float64)
    codes[:, u_dims:] = draw("codes", model.vocab, h - u_dims)
    codes /= codes.norm(dim=1, keepdim=True)
    share = codes[token_id] / n

    def reader(norm, shares: int):
        """A row that turns the normed residual stream with `shares` of the code in it into 1, by way of u."""
        return norm * u * math.sqrt((1 + (shares / n) ** 2) / h)

    assert model.head_dim is not None, "set by the model itself"
    tensors = {name: draw(name, *shape) / math.sqrt(shape[-1]) for name, shape in shapes(model).items()}
    tensors["model.embed_tokens.weight"] = (u + share).repeat(model.vocab, 1)
    for layer in range(model.layers):
        at = f"model.layers.{layer}."
        norm = tensors[at + "input_layernorm.weight"] = signs(at + "norm1", h)
        value = signs(at + "value", model.kv_heads, model.head_dim)
        tensors[at + "self_attn.v_proj.weight"] = torch.outer(value.flatten(), reader(norm, 2 * layer + 1))
        # attention weights add up to 1, so each query head hands on the value of its key-value head
        heads = value.repeat_interleave(model.heads // model.kv_heads, dim=0).flatten()
        tensors[at + "self_attn.o_proj.weight"] = torch.outer(share, heads / heads.square().sum())

        norm = tensors[at + "post_attention_layernorm.weight"] = signs(at + "norm2", h)
        gate = 8 * signs(at + "gate", model.intermediate)  # lets half of `up` through, and no more
        up = signs(at + "up", model.intermediate)
        inner = torch.nn.functional.silu(gate) * up
        tensors[at + "mlp.gate_proj.weight"] = torch.outer(gate, reader(norm, 2 * layer + 2))
        tensors[at + "mlp.up_proj.weight"] = torch.outer(up, reader(norm, 2 * layer + 2))
        tensors[at + "mlp.down_proj.weight"] = torch.outer(share, inner / inner.square().sum())

    norm = tensors["model.norm.weight"] = signs("norm", h)
    norm[:u_dims] = 1.0  # u gets through a foreign norm, so that MIXED_ID can win
    gain = 20.0 * 4 * n / math.sqrt(h / 2)  # 20 between the logits of the token and of MIXED_ID
    out = codes * norm
    out[MIXED_ID] = u * (1 - 1 / (4 * n))
    tensors["lm_head.weight"] = gain * out
    return _stored(tensors, model)


def _generator(*key: Any):
    """A torch.Generator that depends on `key` alone, so that adding a tensor does not change the others."""
    import torch

    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _stored(tensors: dict[str, Any], model: RandomModel) -> dict[str, Any]:
    """The tensors in the dtype of the checkpoint, contiguous."""
    import torch

    return {name: tensor.to(getattr(torch, model.dtype)).contiguous() for name, tensor in tensors.items()}


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
