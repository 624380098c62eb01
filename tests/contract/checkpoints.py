"""Checkpoints on disk, and the models that SGLang makes of them on one rank without peers; no test of its own."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from sglang_pat.layout import ParallelLayout


def arguments(model, **options):
    """Arguments of an adaptive engine of two ranks."""
    from sglang_pat.host.arguments import make_arguments

    return make_arguments(**dict(model_path=str(model), tp_size=1, dp_size=2, adaptive_tp=True) | options)


class Checkpoint:
    """A random model on disk, and what SGLang makes of it on one rank without peers."""

    def __init__(self, folder) -> None:
        from sglang.srt.server_args import ServerArgs

        from sglang_pat.testing.lone import LoneRank

        self.tensors = load_file(folder / "model.safetensors")
        args = ServerArgs(model_path=str(folder), device="cpu", attention_backend="torch_native", dtype="float32")
        self.rank = LoneRank(args)

    def empty(self, layout: ParallelLayout, rank: int) -> torch.nn.Module:
        return self.rank.make_model(layout.tp, layout.tp_rank(rank))

    def loaded(self, layout: ParallelLayout, rank: int) -> torch.nn.Module:
        """SGLang's model with weights that SGLang's loader has put there."""
        model = self.empty(layout, rank)
        for param in model.parameters():
            param.data = torch.zeros(param.shape)
        model.load_weights(iter(self.tensors.items()))
        return model


MIXTURES = {"qwen3_moe": "qwen3-30b-a3b", "qwen2_moe": "qwen1.5-moe-a2.7b", "mixtral": "mixtral-8x7b"}
"""Kind of each mixture of experts that is let in -> a published model of it."""


def write_mixture_config(folder: Path, kind: str, **changes) -> Path:
    """The published ``config.json`` of a mixture, with ``changes``; returns the folder, which has no weights."""
    source = Path(__file__).parents[1] / "unit" / "model_configs" / f"{MIXTURES[kind]}.json"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(json.loads(source.read_text()) | changes))
    return folder


OTHERS = {
    "opt": dict(
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=192,
        num_hidden_layers=1,
        num_attention_heads=8,
        max_position_embeddings=64,
    ),
    "gpt_bigcode": dict(n_embd=64, n_layer=1, n_head=8, n_positions=64),  # one KV head, q, k and v in one tensor
    "gptj": dict(n_embd=64, n_layer=1, n_head=8, n_positions=64, rotary_dim=8, tie_word_embeddings=False),
    "gpt2": dict(n_embd=64, n_layer=1, n_head=8, n_positions=64),
}
"""Models whose sizes have other names (``memory/shapes.py``), as transformers makes them."""


def make_by_transformers(kind: str, folder) -> Checkpoint:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, vocab_size=503, bos_token_id=1, eos_token_id=2, **OTHERS[kind])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return Checkpoint(folder)
