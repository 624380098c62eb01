"""The arguments that a job gives its engines (:class:`GivenArguments`)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from sglang_pat import job_settings, settings

WHERE, WHERE_SGLANG = "--sglang_pat", "--sglang"
MODEL = "--actor.model_name_or_path"


@dataclass
class GivenArguments:
    """What a job says of its engines: SGLang's arguments by name, and our settings by name.

    The settings are those of the variable ``SGLANG_PAT`` of the driver, then those of its arguments.
    """

    sglang: dict[str, Any] = field(default_factory=dict)
    pat: dict[str, Any] = field(default_factory=dict)

    def for_engine(self, number: int) -> GivenArguments:
        """Arguments of one engine, with a decision log of its own
        (:func:`sglang_pat.settings.make_engine_settings`)."""
        return replace(self, pat=settings.make_engine_settings(self.pat, number))

    def check(self, gpus: int, model: str | None) -> None:
        """Raise ``ValueError``, of one line, for what engines of so many GPUs would refuse."""
        config = job_settings.check(self.for_engine(0).pat, gpus, WHERE)
        job_settings.check_flags(self.sglang, f"{WHERE_SGLANG}.")
        if model is not None:
            job_settings.check_model(model, config, MODEL)
