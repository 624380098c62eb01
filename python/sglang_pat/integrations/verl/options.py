"""What a verl job says about this engine, checked before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sglang_pat import job_settings, settings

if TYPE_CHECKING:
    from verl.workers.config import RolloutConfig

WHERE = "rollout.engine_kwargs.sglang_pat"
"""Where our settings are; SGLang's own flags stay under ``rollout.engine_kwargs.sglang``."""


def given(config: RolloutConfig, replica: int | None = None) -> dict[str, Any]:
    """Our settings of this job: those of the variable ``SGLANG_PAT``, then those of the rollout's configuration.

    ``replica``: those of the engine of this number (:func:`sglang_pat.settings.of_engine`).
    """
    own = (config.engine_kwargs or {}).get("sglang_pat") or {}
    if not isinstance(own, Mapping):
        raise ValueError(f"{WHERE} is {own!r}, must be settings by name, e.g. {{base_tp: 1, policy: pat}}")
    found = settings.of_environment() | dict(own)
    return found if replica is None else settings.of_engine(found, replica)


def check(config: RolloutConfig, gpus_per_node: int | None = None) -> None:
    """Refuse, in one line, what this engine cannot do as a rollout of verl's.

    Args:
        config: of the rollout.
        gpus_per_node: of the job, where it is known.

    Raises:
        ValueError: an unknown setting, a wrong value, degrees that do not fit the GPUs, a file that cannot be used.
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
            f"{settings.divisors(gpus_per_node)}; an adaptive engine of {gpus_per_node} owns them all"
        )
    job_settings.check(given(config, 0), tp, WHERE)
    if getattr(config.disaggregation, "enabled", False):
        raise ValueError("rollout.disaggregation.enabled is true, must be false: an adaptive engine does both itself")
