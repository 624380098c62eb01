"""Marker models: their output says which weights they hold, and whether all of them; no test of its own."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from sglang_pat.testing import models
from sglang_pat.testing.tokenizer import UNK_ID

MARKER_LAYERS = 2
MIXED_ID = UNK_ID
"""Token that a marker model says when some of its tensors come from other weights than the rest."""


def make_marker_model(out_dir: str | os.PathLike, token_id: int) -> Path:
    """Write a small Llama that answers every prompt with ``token_id``, again and again, and return its folder.

    If any tensor comes from the marker model of another token, it says :data:`MIXED_ID` or a third token instead; only
    q_proj and k_proj have no say.  Values from a stale cache are found out as well.
    """

    def write(folder: Path) -> None:
        models._write(folder, models.make_config(layers=MARKER_LAYERS), make_marker_state_dict(token_id))

    return models._write_once(out_dir, {"kind": "marker", "token_id": token_id}, write)


def make_marker_state_dict(token_id: int) -> dict[str, Any]:
    """The tensors of :func:`make_marker_model` by Hugging Face name, for a weight update.

    The residual stream carries two vectors of length 1 at right angles, whatever the prompt: u, which is
    constant, and the code of the token, of which the embedding, each attention and each MLP add one share of
    n = 2 * layers + 1. The output matrix weighs the code of each token against u times a threshold between
    (all shares but a quarter of one) and (all): if less arrives, MIXED_ID wins. Codes, and what each module
    reads and hands on inside, are drawn anew for each token: tensors of two models do not understand each other,
    and their share is lost. q_proj and k_proj are random and have no say, since all values are equal.
    """
    import torch

    about = models.make_config(layers=MARKER_LAYERS)
    h, n = about.hidden_size, 2 * about.num_hidden_layers + 1
    kv_heads, groups = about.num_key_value_heads, about.num_attention_heads // about.num_key_value_heads
    u_dims = h // 4  # u lives in the first quarter of the dimensions, codes in the rest

    def draw(what: str, *shape: int):
        generator = models._make_generator("marker", token_id, what)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def signs(what: str, *shape: int):
        return draw(what, *shape).sign()

    u = torch.zeros(h, dtype=torch.float64)
    u[:u_dims] = u_dims**-0.5
    codes = torch.zeros(about.vocab_size, h, dtype=torch.float64)
    codes[:, u_dims:] = draw("codes", about.vocab_size, h - u_dims)
    codes /= codes.norm(dim=1, keepdim=True)
    share = codes[token_id] / n

    def reader(norm, shares: int):
        """A row that turns the normed residual stream with `shares` of the code in it into 1, by way of u."""
        return norm * u * math.sqrt((1 + (shares / n) ** 2) / h)

    tensors = {name: draw(name, *shape) / math.sqrt(shape[-1]) for name, shape in models.list_shapes(about).items()}
    tensors["model.embed_tokens.weight"] = (u + share).repeat(about.vocab_size, 1)
    for layer in range(about.num_hidden_layers):
        at = f"model.layers.{layer}."
        norm = tensors[at + "input_layernorm.weight"] = signs(at + "norm1", h)
        value = signs(at + "value", kv_heads, about.head_dim)
        tensors[at + "self_attn.v_proj.weight"] = torch.outer(value.flatten(), reader(norm, 2 * layer + 1))
        # attention weights add up to 1, so each query head hands on the value of its key-value head
        heads = value.repeat_interleave(groups, dim=0).flatten()
        tensors[at + "self_attn.o_proj.weight"] = torch.outer(share, heads / heads.square().sum())

        norm = tensors[at + "post_attention_layernorm.weight"] = signs(at + "norm2", h)
        gate = 8 * signs(at + "gate", about.intermediate_size)  # lets half of `up` through, and no more
        up = signs(at + "up", about.intermediate_size)
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
    return models._cast_tensors(tensors, about)
