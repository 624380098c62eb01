"""What of a judge is refused before anything starts: one line each.  Nothing here imports SGLang."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sglang_pat.launch.refusals import EXPERTS
from sglang_pat.memory.shapes import read_config
from stream_layers import STREAM_VARIABLE
from stream_layers.judge_memory import AUTO, FEWEST, FLAG, CannotStream, parse_count

Refusal = tuple[str, tuple[Any, ...], str]
"""An argument of SGLang, its values that are allowed, and what to do otherwise."""

_EMPTY = (None, False, 0, "", [], {})
REFUSED: tuple[Refusal, ...] = (
    ("quantization", (None, "unquant"), "give an unquantised model"),
    ("pp_size", (1,), "use tensor parallelism instead"),
    ("device", ("cuda", "cpu"), "use a GPU of NVIDIA's or AMD's"),
    ("load_format", ("auto", "safetensors", "pt", "dummy"), "its loader places the weights itself; leave it out"),
    ("model_impl", ("auto", "sglang"), "leave it out"),
    ("cpu_offload_gb", _EMPTY, "both keep weights in host memory; leave one out"),
    ("offload_group_size", (*_EMPTY, -1), "both keep weights in host memory; leave one out"),
    ("speculative_algorithm", _EMPTY, "leave it out: its draft model would be streamed, too"),
    ("enable_lora", _EMPTY, "leave it out: adapters change layers"),
    ("lora_paths", _EMPTY, "leave it out: adapters change layers"),
    ("enable_torch_compile", _EMPTY, "leave it out: it compiles a model without the waits for its layers"),
    ("enable_two_batch_overlap", _EMPTY, "leave it out: it runs two layers at once"),
)
"""What every version of SGLang has."""


def take_flag(argv: Sequence[str]) -> list[str]:
    """Put ``--stream-layers`` of a command line into the environment, and return the other arguments.

    Raises:
        CannotStream: a wrong number, or a model that cannot be streamed; one line.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(FLAG)
    options, rest = parser.parse_known_args(argv)
    if options.stream_layers is None:
        return list(argv)
    parser.add_argument("--model-path", "--model")
    model = parser.parse_known_args(rest)[0].model_path
    if "--adaptive-tp" in argv:
        raise CannotStream(f"{FLAG} is for a plain engine: leave out {FLAG} or --adaptive-tp")
    count = parse_count(options.stream_layers)
    if model is not None:
        check_model(model, count, FLAG)
    os.environ[STREAM_VARIABLE] = options.stream_layers
    return rest


def check_model(model: str, count: int | None, where: str) -> None:
    """Raise :class:`CannotStream` for a model that cannot be streamed, by its ``config.json``, if it is here.

    Args:
        count: layers to stream; None for ``auto``.
        where: where the model was given, for the message.
    """
    try:
        config = read_config(model)
    except ValueError as error:
        if os.path.isabs(model):
            raise CannotStream(str(error)) from None
        return  # whoever loads it says what is wrong with it
    name = (config.get("architectures") or ["?"])[0]
    if why := _find_reason_against(config):
        raise CannotStream(f"{where} does not support {name}: {why}; choose a dense text model that is not quantised")
    layers = config.get("num_hidden_layers")
    if count is not None and isinstance(layers, int) and count > layers:
        raise CannotStream(
            f"{where} is {count}, must be {AUTO} or a number from {FEWEST} to the model's {layers} layers"
        )


def _find_reason_against(config: Mapping[str, Any]) -> str | None:
    if any(config.get(part) for part in ("text_config", "vision_config", "audio_config")):
        return "it is multimodal"
    if any(config.get(part) for part in ("quantization_config", "compression_config")):
        return "its weights are quantised"
    if any(isinstance(number := config.get(name), list) or (number or 0) > 1 for name in EXPERTS):
        return "it is a mixture of experts, of which a token needs few"
    return None


def refuse_arguments(args: Any, more: Iterable[Refusal] = ()) -> None:
    """Raise :class:`CannotStream` for SGLang's arguments of an engine that cannot stream layers.

    Args:
        more: what only the installed version of SGLang has.
    """
    for field, allowed, advice in (*REFUSED, *more):
        value = getattr(args, field)
        if value not in allowed:
            argument = "--" + field.replace("_", "-") + ("" if value is True else f" {value}")
            raise CannotStream(f"{FLAG} does not support {argument}: {advice}")
    # Of a command line the flag was checked by `take_flag`.
    check_model(args.model_path, parse_count(os.environ[STREAM_VARIABLE], STREAM_VARIABLE), STREAM_VARIABLE)
