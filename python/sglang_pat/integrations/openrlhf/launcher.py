"""What a job gives its engines; and where OpenRLHF makes its engine actors, it makes ours."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from sglang_pat import figures, job_settings, settings
from sglang_pat.integrations import CALLS

WHERE, WHERE_SGLANG = "--sglang_pat", "--sglang"
MODEL = "--actor.model_name_or_path"


@dataclass
class Given:
    """What a job says of its engines: SGLang's arguments by name, and our settings by name.

    The settings are those of the variable ``SGLANG_PAT`` of the driver, then those of its arguments.
    """

    sglang: dict[str, Any] = field(default_factory=dict)
    pat: dict[str, Any] = field(default_factory=dict)

    def of_engine(self, number: int) -> Given:
        """With a decision log of its own (:func:`sglang_pat.settings.of_engine`)."""
        return replace(self, pat=settings.of_engine(self.pat, number))

    def check(self, gpus: int, model: str | None) -> None:
        """Raise ``ValueError``, of one line, for what engines of so many GPUs would refuse."""
        config = job_settings.check(self.of_engine(0).pat, gpus, WHERE)
        job_settings.check_flags(self.sglang, f"{WHERE_SGLANG}.")
        if model is not None:
            job_settings.check_model(model, config, MODEL)


class Launcher:
    """Stands for ``openrlhf.trainer.ray.vllm_engine.RolloutRayActor``."""

    def __init__(self, given: Given) -> None:
        self._given, self._numbers = given, itertools.count()

    def options(self, **options: Any) -> SimpleNamespace:
        def remote(**kwargs: Any) -> Any:
            from sglang_pat.integrations.openrlhf.actor import RolloutActor

            actor: Any = RolloutActor  # what ray made of the class
            return actor.options(max_concurrency=CALLS, **options).remote(
                given=self._given.of_engine(next(self._numbers)), **kwargs
            )

        return SimpleNamespace(remote=remote)


def install(given: Given) -> None:
    """From now on OpenRLHF's ``create_vllm_engines`` makes adaptive engines, and waits until all of them are up.

    Otherwise one that is refused would be waited for by the trainer, which has loaded its model by then and joins the
    group of weight updates with it: half an hour.
    """
    from openrlhf.trainer import ray as where_it_looks
    from openrlhf.trainer.ppo_trainer import PPOTrainer
    from openrlhf.trainer.ppo_trainer_async import TrainingActor
    from openrlhf.trainer.ray import vllm_engine

    vllm_engine.RolloutRayActor = Launcher(given)
    where_it_looks.create_vllm_engines = _until_up(where_it_looks.create_vllm_engines)
    for trainer in (PPOTrainer, TrainingActor):
        # Ray hands the class of an actor on as it is here when the first one is made.
        trainer.__ray_metadata__.modified_class.train_step = train_step


def _until_up(create: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    @functools.wraps(create)
    def created(*args: Any, **named: Any) -> list[Any]:
        import ray

        engines = create(*args, **named)
        ray.get([engine.get_num_unfinished_requests.remote() for engine in engines])
        return engines

    return created


def train_step(self: Any, rollout_samples: Any, global_step: int) -> tuple[dict[str, Any], int]:
    """OpenRLHF's, in the process of its trainer: it ends with new weights in the engines.

    Its status, which OpenRLHF logs and tracks, also says how the engines spent the step.
    """
    import ray
    from openrlhf.trainer.ppo_trainer import BasePPOTrainer

    status, step = BasePPOTrainer.train_step(self, rollout_samples, global_step)
    if self.vllm_engines:
        now = ray.get([engine.figures.remote() for engine in self.vllm_engines])
        before = getattr(self, "_pat_figures", [figures.Figures()] * len(now))
        self._pat_figures = now
        status |= figures.metrics([one.since(then) for one, then in zip(now, before, strict=True)])
    return status, step
