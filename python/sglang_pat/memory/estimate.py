"""The plan of an engine that is not started here: from ``config.json`` and a description of the machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

import psutil

from sglang_pat.layout import ParallelLayout, candidate_layouts, default_degrees
from sglang_pat.memory.available import available_memory
from sglang_pat.memory.demand import GIB, Demand, Supply
from sglang_pat.memory.shapes import ModelShape

_SGLANG_DEFAULTS = ((20, 2048, 8, 8), (35, 2048, 24, 80), (60, 4096, 32, 160), (160, 8192, 256, 512))
"""SGLang's choices by memory below so many GiB: prefill chunk, largest graph batch below tp4 and from tp4 on."""


TAIL_BATCH = 16
"""Largest batch with a graph above the base layout, with the default policy."""


def sglang_defaults(total: int, tp: int) -> tuple[int, int]:
    """Prefill chunk (tokens) and largest graph batch that SGLang chooses for ``total`` bytes."""
    for below, chunk, small, large in _SGLANG_DEFAULTS:
        if total < below * GIB:
            return chunk, small if tp < 4 else large
    return 16384, 512


def read_config(model: str) -> dict[str, Any]:
    """The ``config.json`` of a folder, or of a repository that is in the local Hugging Face cache.

    Raises:
        ValueError: there is none, or it cannot be read; one line.
    """
    path = Path(model) / "config.json" if Path(model).is_dir() else _cached_config(model)
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


def _cached_config(model: str) -> Path:
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", model):
        raise ValueError(f"--model-path {model}: no such folder")
    # Takes a second to import.
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model, "config.json")
    if not isinstance(cached, str):
        raise ValueError(f"--model-path {model}: no such folder, and not in the Hugging Face cache")
    return Path(cached)


def parse_gpus(text: str) -> tuple[int, int]:
    """``"8x80GB"`` → ``(8, bytes of one)``; GB as vendors say it, taken as GiB.

    Raises:
        ValueError: not of that form.
    """
    match = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)G(?:i?B)?", text, re.IGNORECASE)
    if match is None or int(match[1]) < 1 or float(match[2]) <= 0:
        raise ValueError(f"--gpus {text!r}: give a number and a size, e.g. 8x80GB")
    return int(match[1]), int(float(match[2]) * GIB)


def supply_of_machine(gpus: str | None, ranks: int, free: int | None = None) -> Supply:
    """GPUs as described, or this machine's memory for ranks on its CPU.

    Args:
        free: bytes that can be taken of a GPU; None for an empty one.

    Raises:
        ValueError: fewer GPUs than ranks.
    """
    if gpus is None:
        return Supply(kind="cpu", free=available_memory(), total=psutil.virtual_memory().total)
    count, size = parse_gpus(gpus)
    if count < ranks:
        raise ValueError(f"{ranks} ranks need {ranks} GPUs, --gpus {gpus} has {count}: choose other --tp/--dp")
    return Supply(kind="cuda", free=size if free is None else free, total=size)


def demand_of(shape: ModelShape, base: ParallelLayout, supply: Supply, tokens: int | None = None) -> Demand:
    """An engine with SGLang's own defaults, the default policy and its candidates.

    Raises:
        ValueError: the model does not allow the base degree.
    """
    if reason := shape.why_not(base.tp):
        raise ValueError(f"--tp {base.tp} {reason}: choose another")
    chunk, graph_batch = sglang_defaults(supply.total, base.tp)
    graphs = supply.kind == "cuda"
    return Demand(
        shape=shape,
        base=base,
        degrees=default_degrees(shape.allowed(candidate_layouts(base)), only_ends=True),
        prefill_tokens=chunk,
        graph_batch=graph_batch if graphs else 0,
        tail_graph_batch=TAIL_BATCH if graphs else 0,
        tokens=tokens,
    )
