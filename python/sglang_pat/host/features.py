"""What some layers of the model make of the tokens of a step, for a trained drafter (``rank/draft_model.py``)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch

from sglang_pat.host.requests import get_name


class FeatureTap:
    """Keeps the inputs of some decoder layers in the last step.

    Steps of up to ``rows`` tokens are kept in a buffer, which CUDA graphs write, too.

    Args:
        layers: indices of the layers.
        rows: of the largest CUDA graph, or more.
    """

    def __init__(
        self, layers: Sequence[int], hidden: int, rows: int, dtype: torch.dtype, device: str | torch.device
    ) -> None:
        self._layers = layers
        self._buffer = torch.zeros(rows, len(layers), hidden, dtype=dtype, device=device)
        self._large = [self._buffer[:0, 0]] * len(layers)
        """Inputs of the layers in the last larger step."""

    def attach(self, model: torch.nn.Module) -> None:
        """Keep what goes into the layers of ``model`` from now on.

        Raises:
            ValueError: it has no such layers, or they are not called as SGLang's decoder layers are.
        """
        layers = getattr(getattr(model, "model", None), "layers", None)
        if layers is None or not all(0 < layer < len(layers) for layer in self._layers):
            count = "no" if layers is None else len(layers)
            raise ValueError(f"the head needs the inputs of layers {self._layers}, but the model has {count} layers")
        for place, layer in enumerate(self._layers):
            names = list(inspect.signature(layers[layer].forward).parameters)
            if not {"hidden_states", "residual"} <= set(names):
                raise ValueError(f"{type(layers[layer]).__name__} takes {', '.join(names)}, and no residual")
            layers[layer].register_forward_pre_hook(self._make_hook(place, names), with_kwargs=True)

    def _make_hook(self, place: int, names: Sequence[str]) -> Callable[..., None]:
        def keep(_: torch.nn.Module, args: Sequence[Any], named: Mapping[str, Any]) -> None:
            given = dict(zip(names, args, strict=False)) | dict(named)
            value = given["hidden_states"] + given["residual"]
            if len(value) <= len(self._buffer):
                self._buffer[: len(value), place] = value
            else:
                self._large[place] = value

        return keep

    def take(self, count: int) -> torch.Tensor:
        """A copy of the features of the last step, which had ``count`` tokens: ``[count, layers * hidden]``."""
        if count <= len(self._buffer):
            return self._buffer[:count].flatten(1).clone()
        return torch.cat([value[:count] for value in self._large], dim=1)


def list_rows(batch: ScheduleBatch, most: int) -> list[tuple[str, int]]:
    """Name of the request, and position, of each token of a step of ``batch``; none of a decode step of more than
    ``most`` requests."""
    if batch.forward_mode.is_decode():
        if len(batch.reqs) > most:
            return []
        return [
            (get_name(req), length - 1) for req, length in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True)
        ]
    return [
        (get_name(req), position)
        for req, begin, count in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
        for position in range(begin, begin + count)
    ]


def get_step_stream(scheduler: Any) -> Any:
    """The context of the stream on which steps run."""
    return scheduler.forward_stream_ctx if scheduler.enable_overlap else nullcontext()


def get_embed(model: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """The embedding of ``model``; all ranks of its group call it together."""
    return model.model.embed_tokens
