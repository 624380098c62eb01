"""Weights of mixtures under the names that transformers 5 has for them in memory, which trainers send.

There all experts of a layer are two tensors, and Mixtral's layers have other names than in its checkpoint.  SGLang's
models know the checkpoint's names only.  They pass over others, and their experts stay as they were.

Upstream: https://github.com/sgl-project/sglang/pull/29659 (the same for another model)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, cast

import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

from sglang_pat.host.assign import assign

PARTS = {"mlp": ("gate_proj", "up_proj", "down_proj"), "block_sparse_moe": ("w1", "w3", "w2")}
"""Name of a layer's mixture in a checkpoint, and so in SGLang's model -> names of gate, up and down of an expert.
In transformers' memory all models have the first."""

Weights = Iterable[tuple[str, torch.Tensor]]


class Loader(Protocol):
    """A model of SGLang, all of which have what ``torch.nn.Module`` does not declare."""

    def load_weights(self, weights: Weights) -> object: ...


class TrainerNames:
    """Translator of trainers' names to the checkpoint's, which it leaves as they are.

    Args:
        model: SGLang's model, with or without memory.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._mixtures: dict[str, tuple[str, int]] = {}
        for name, module in model.named_modules():
            if isinstance(module, FusedMoE):
                layer, mixture, _ = name.rsplit(".", 2)  # model.layers.0, mlp, experts
                self._mixtures[layer] = mixture, module.num_experts

    def translate(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield weights under the checkpoint's names: each expert by itself, as a view.

        Raises:
            ValueError: a tensor of all experts is not of as many as the model has; in one line.
        """
        for name, tensor in weights:
            layer, _, rest = name.partition(".mlp.")
            if rest and layer in self._mixtures:
                yield from self._translate(name, tensor, layer, rest)
            else:
                yield name, tensor

    def _translate(self, name: str, tensor: torch.Tensor, layer: str, rest: str) -> Iterator[tuple[str, torch.Tensor]]:
        mixture, experts = self._mixtures[layer]
        gate, up, down = PARTS[mixture]
        if rest == "experts.gate_up_proj":  # [experts, gate's rows and then up's, hidden]
            parts = gate, up
        elif rest == "experts.down_proj":
            parts = (down,)
        else:
            names = dict(zip(PARTS["mlp"], PARTS[mixture], strict=True))
            yield f"{layer}.{mixture}." + ".".join(names.get(word, word) for word in rest.split(".")), tensor
            return
        if tensor.shape[:1] != (experts,):
            raise ValueError(f"{name} has the shape {list(tensor.shape)}, must be of {experts} experts")
        for expert, whole in enumerate(tensor):
            for part, piece in zip(parts, whole.chunk(len(parts)), strict=True):
                yield f"{layer}.{mixture}.experts.{expert}.{part}.weight", piece


def accept_trainer_names(model: torch.nn.Module) -> None:
    """Have ``model.load_weights``, in which all kinds of updates end, take names of both kinds."""
    names, load = TrainerNames(model), cast("Loader", model).load_weights
    assign(model, load_weights=lambda weights: load(names.translate(weights)))
