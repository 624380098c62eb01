"""Where OpenRLHF makes its engine actors, it makes ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from sglang_pat import settings

WHERE = "--sglang_pat"


@dataclass
class Given:
    """What a job says of its engines: SGLang's arguments by name, and our settings by name."""

    sglang: dict[str, Any] = field(default_factory=dict)
    pat: dict[str, Any] = field(default_factory=dict)

    def check(self, gpus: int | None = None) -> None:
        """Raise ``ValueError``, of one line, for an unknown setting, a wrong value or degrees that do not fit."""
        found = settings.fields(self.pat, WHERE)
        if gpus is not None:
            settings.base_layout(found.get(settings.BASE_TP.name, settings.BASE_TP.default), gpus, WHERE)


class Launcher:
    """Stands for ``openrlhf.trainer.ray.vllm_engine.RolloutRayActor``."""

    def __init__(self, given: Given) -> None:
        self._given = given

    def options(self, **options: Any) -> SimpleNamespace:
        def remote(**kwargs: Any) -> Any:
            from sglang_pat.integrations.openrlhf.actor import RolloutActor

            self._given.check(kwargs["tensor_parallel_size"])
            actor: Any = RolloutActor  # what ray made of the class
            return actor.options(**options).remote(given=self._given, **kwargs)

        return SimpleNamespace(remote=remote)


def install(given: Given) -> None:
    """From now on OpenRLHF's ``create_vllm_engines`` makes adaptive engines."""
    from openrlhf.trainer.ray import vllm_engine

    vllm_engine.RolloutRayActor = Launcher(given)
