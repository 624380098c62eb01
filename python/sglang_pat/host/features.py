"""What some layers of the model make of the tokens of a step, for a trained drafter (``rank/draft_model.py``)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch

from sglang_pat.host.requests import get_name
from sglang_pat.switch.transfer import upload


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
            layers[layer].register_forward_pre_hook(self._make_hook(layers[layer], place, names), with_kwargs=True)

    def _make_hook(self, layer: torch.nn.Module, place: int, names: Sequence[str]) -> Callable[..., Any]:
        keep = functools.partial(self._keep, place)
        if "capture_output" in names:  # SGLang 0.5.23 hands its own drafters the input so
            return lambda _, args, named: (args, {**named, "capture_output": keep})
        if not {"hidden_states", "residual"} <= set(names):
            raise ValueError(f"{type(layer).__name__} takes {', '.join(names)}, and no residual")

        def add_up(_: torch.nn.Module, args: Sequence[Any], named: Mapping[str, Any]) -> None:
            arguments = dict(zip(names, args, strict=False)) | dict(named)
            keep(arguments["hidden_states"] + arguments["residual"], owned=True)

        return add_up

    def _keep(self, place: int, value: torch.Tensor, *, owned: bool = False) -> None:
        """Keep the input of a layer; ``owned``: nobody else will write to it."""
        if len(value) <= len(self._buffer):
            self._buffer[: len(value), place] = value
        else:
            self._large[place] = value if owned else value.clone()

    def take(self, rows: Rows) -> torch.Tensor:
        """A copy of the features of some tokens of the last step: ``[rows, layers * hidden]``."""
        if rows.total <= len(self._buffer):
            kept = self._buffer[: rows.total].flatten(1)
        else:
            kept = torch.cat([value[: rows.total] for value in self._large], dim=1)
            self._large = [self._buffer[:0, 0]] * len(self._layers)
        return kept[upload(rows.indices, torch.int64, kept.device)]


@dataclass(frozen=True)
class Rows:
    """Some tokens of a step.

    Attributes:
        owners, positions: name of the request and the position in it of each.
        indices: places among the tokens of the step, ``total`` in all.
    """

    owners: list[str]
    positions: list[int]
    indices: list[int]
    total: int


def list_rows(batch: ScheduleBatch, most: int, window: int) -> Rows | None:
    """The last tokens of each request in a step of ``batch``, ``window`` at most; None for a decode step of more than
    ``most`` requests."""
    if batch.forward_mode.is_decode():
        positions = [length - 1 for length in batch.seq_lens_cpu.tolist()]
        count = len(positions)
        return (
            Rows([get_name(req) for req in batch.reqs], positions, list(range(count)), count) if count <= most else None
        )
    rows = Rows([], [], [], sum(batch.extend_lens))
    end = 0
    for req, begin, count in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
        end, kept = end + count, min(count, window)
        rows.owners.extend([get_name(req)] * kept)
        rows.positions.extend(range(begin + count - kept, begin + count))
        rows.indices.extend(range(end - kept, end))
    return rows


def get_step_stream(scheduler: Any) -> Any:
    """The context of the stream on which steps run."""
    return scheduler.forward_stream_ctx if scheduler.enable_overlap else nullcontext()


def get_embed(model: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """The embedding of ``model``; all ranks of its group call it together."""
    return model.model.embed_tokens
