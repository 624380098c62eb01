"""What a verl job says about this engine, checked before anything is started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sglang_pat import job_settings, settings
from sglang_pat.config import VARIABLE
from stream_layers.plan import parse_count
from stream_layers.refusals import check_model

if TYPE_CHECKING:
    from verl.workers.config import RolloutConfig

NAME = "sglang_pat"
"""Value of ``rollout.name``."""
WHERE = f"rollout.engine_kwargs.{NAME}"
"""Where our settings are."""
STREAM = "stream_layers"
"""The one setting of a reward model's engine: how many of its layers stay in host memory."""
SGLANG = "rollout.engine_kwargs.sglang"
"""Where SGLang's own arguments stay, under either name."""


def get_own_settings(config: RolloutConfig) -> Mapping[str, Any] | None:
    """Our settings in the rollout's configuration; ``None``: it has none, ``{}`` are some.

    Raises:
        ValueError: they are something else.
    """
    found = (config.engine_kwargs or {}).get(NAME)
    if found is not None and not isinstance(found, Mapping):
        raise ValueError(f"{WHERE} is {found!r}, must be settings by name, e.g. {{base_tp: 1, policy: pat}}")
    return found


def is_adaptive(config: RolloutConfig, helper: bool) -> bool:
    """Whether a replica is an adaptive engine: its name says so, its settings, or the variable ``SGLANG_PAT``.

    Args:
        config: of the replica's rollout.
        helper: it is a reward model or a teacher.  Such a one is always verl's own: the variable and the name, which a
            teacher takes over from the policy, are about the policy's engines.

    Raises:
        ValueError: settings of the one kind for the other; one line.
    """
    found = get_own_settings(config)
    settings_given = found is not None
    if helper and settings_given and set(found) != {STREAM}:
        raise ValueError(
            f"{WHERE} is given for a reward model or a teacher, must be left out there, or only have {STREAM}: only "
            "the policy's engines are adaptive"
        )
    if not helper and settings_given and STREAM in found:
        raise ValueError(
            f"{WHERE}.{STREAM} is for a reward model or a teacher, must be left out here: the policy's engines keep "
            "all layers on their GPUs"
        )
    by_variable = VARIABLE in os.environ and config.name == "sglang"  # vLLM's rollouts are none of its business
    return not helper and (settings_given or config.name == NAME or by_variable)


def read_stream_setting(config: RolloutConfig, model: str | None = None) -> str | None:
    """What a reward model or a teacher has for :data:`STREAM`; None if nothing.

    Args:
        model: folder or name of its model, where it is known.

    Raises:
        ValueError: a wrong value, or a model that cannot be streamed; one line.
    """
    found = get_own_settings(config)
    if found is None:
        return None
    value, where = str(found[STREAM]), f"{WHERE}.{STREAM}"
    count = parse_count(value, where)
    if model is not None:
        check_model(model, count, where)
    return value


def read_settings(config: RolloutConfig, replica: int | None = None) -> dict[str, Any]:
    """Our settings of this job: those of the variable ``SGLANG_PAT``, then those of the rollout's configuration.

    ``replica``: those of the engine of this number (:func:`sglang_pat.settings.make_engine_settings`).
    """
    found = settings.read_environment() | dict(get_own_settings(config) or {})
    return found if replica is None else settings.make_engine_settings(found, replica)


def check(config: RolloutConfig, gpus_per_node: int | None = None, model: Any = None) -> None:
    """Refuse, in one line, what this engine cannot do as a rollout of verl's.

    Args:
        config: of the rollout.
        gpus_per_node: of the job, where it is known.
        model: verl's configuration of it, where it is known.

    Raises:
        ValueError: an unknown setting, a wrong value, degrees that do not fit the GPUs, a file that cannot be used, a
            feature or a model that the engine refuses; in the words of verl's configuration.
    """
    tp = config.tensor_model_parallel_size
    for name in ("data_parallel_size", "pipeline_model_parallel_size"):
        if (value := getattr(config, name)) != 1:
            raise ValueError(
                f"rollout.{name} is {value}, must be 1: an adaptive engine owns "
                f"rollout.tensor_model_parallel_size GPUs and divides them itself, from {WHERE}.base_tp on"
            )
    if gpus_per_node is not None and (tp > gpus_per_node or gpus_per_node % tp):
        raise ValueError(
            f"rollout.tensor_model_parallel_size is {tp}, must divide the node's {gpus_per_node} GPUs: "
            f"{settings.format_divisors(gpus_per_node)}; an adaptive engine of {gpus_per_node} owns them all"
        )
    adaptive_config = job_settings.check(read_settings(config, 0), tp, WHERE)
    if getattr(config.disaggregation, "enabled", False):
        raise ValueError("rollout.disaggregation.enabled is true, must be false: an adaptive engine does both itself")
    for name, off in _OFF.items():
        if (value := _get_value(config, name)) not in (None, off):
            raise ValueError(f"rollout.{name} is {value}, must be {off}: an adaptive engine cannot do it")
    job_settings.check_flags((config.engine_kwargs or {}).get("sglang") or {}, f"{SGLANG}.")
    if model is None:
        return
    for name in ("lora_rank", "lora.rank"):
        if (rank := _get_value(model, name)) and not _get_value(model, "lora.merge"):
            raise ValueError(
                f"model.{name} is {rank}, must be 0 (or model.lora.merge true): an adaptive engine serves no adapters"
            )
    job_settings.check_model(model.path, adaptive_config, "model.path")
    if _get_value(config, "enable_rollout_routing_replay"):
        job_settings.check_routed_experts(model.path, "rollout.enable_rollout_routing_replay is true")


_OFF = {
    "expert_parallel_size": 1,
    "quantization": None,
    "mtp.enable_rollout": False,
}
"""Options of which verl makes arguments of SGLang's that are refused, and their values without these."""


def _get_value(config: Any, name: str) -> Any:
    """A value of a configuration, whose parts are objects or mappings; None if there is none."""
    for part in name.split("."):
        config = config.get(part) if hasattr(config, "get") else getattr(config, part, None)
    return config
