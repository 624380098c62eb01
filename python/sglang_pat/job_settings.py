"""The settings that a job of somebody else's has for its engines, checked when the job starts.

An engine checks its own settings when it starts.  In an RL framework that is late: models have been loaded by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_pat import settings
from sglang_pat.config import AdaptiveConfig
from sglang_pat.launch.refusals import REFUSED, read_files, refuse_config, refuse_routed_experts
from sglang_pat.layout import ParallelLayout
from sglang_pat.memory.shapes import ModelShape, read_config


def check(values: Mapping[str, Any], ranks: int, where: str) -> AdaptiveConfig:
    """Refuse what an engine of ``ranks`` would refuse, as far as that can be said without its model.

    Args:
        values: settings by name, of one engine; ``where`` they stand, for the message.

    Raises:
        ValueError: an unknown setting, a wrong value, a file that cannot be used on this machine; one line.
    """
    fields = settings.parse_fields(values, where)
    base = fields.pop(settings.BASE_TP.name, settings.BASE_TP.default)
    layout = ParallelLayout(*settings.compute_base_layout(base, ranks, where))
    try:
        config = settings.make_configuration(fields, layout)
        read_files(config)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return config


def check_model(model: str, config: AdaptiveConfig, where: str) -> None:
    """Refuse, by its ``config.json``, a model that an engine of this configuration would refuse; raises ValueError.

    Args:
        model: a folder, or a name in the Hugging Face cache; one that is not on this machine passes.
    """
    try:
        model_config = read_config(model)
    except ValueError:
        return  # whoever loads it says what is wrong with it
    refuse_config(model_config, f"{where} {model}")
    try:
        shape = ModelShape.from_config(model_config)
    except ValueError:
        return  # a size that is left to the model's class
    layouts = config.layouts if config.degrees else config.layouts[:1]
    for layout in layouts:
        if why := shape.find_reason_against_degree(layout.tp):
            raise ValueError(f"{where} {model}: tp={layout.tp} {why}; choose other degrees (base_tp, candidates)")


def check_routed_experts(model: str, source: str) -> None:
    """Raise ``ValueError`` for a model whose routed experts an engine cannot return; as :func:`check_model`.

    Args:
        source: what asks for them, for the message.
    """
    try:
        model_config = read_config(model)
    except ValueError:
        return
    refuse_routed_experts(model_config.get("architectures"), source)


def check_flags(arguments: Mapping[str, Any], where: str) -> None:
    """Raise ``ValueError`` for SGLang's own arguments that an engine would refuse.

    Args:
        arguments: by name; ``where``, for the message: what stands before a name.
    """
    for refusal in REFUSED:
        value = arguments.get(refusal.field)
        if refusal.field in arguments and value not in refusal.allowed:
            raise ValueError(
                f"{where}{refusal.field} is {value!r}, which an adaptive engine does not support "
                f"({refusal.reason}): {refusal.advice}"
            )
