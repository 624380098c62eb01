"""The hooks where OpenRLHF makes its engine actors: it makes ours (:class:`Launcher`), its generator tells them of
rounds, and its trainer logs what they did (:func:`train_step`)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sglang_pat import figures
from sglang_pat.integrations import CALLS
from sglang_pat.integrations.openrlhf.given import GivenArguments


class Launcher:
    """Stands for ``openrlhf.trainer.ray.vllm_engine.RolloutRayActor``."""

    def __init__(self, job_arguments: GivenArguments) -> None:
        self._given, self._numbers = job_arguments, itertools.count()

    def options(self, **options: Any) -> SimpleNamespace:
        def remote(**kwargs: Any) -> Any:
            from sglang_pat.integrations.openrlhf.actor import RolloutActor

            actor: Any = RolloutActor  # what ray made of the class
            return actor.options(max_concurrency=CALLS, **options).remote(
                job_arguments=self._given.for_engine(next(self._numbers)), **kwargs
            )

        return SimpleNamespace(remote=remote)


def install(job_arguments: GivenArguments) -> None:
    """Have OpenRLHF's ``create_vllm_engines`` make adaptive engines, and wait until all of them are up.

    Otherwise one that is refused would be waited for by the trainer, which has loaded its model by then and joins the
    group of weight updates with it: half an hour.
    """
    from openrlhf.trainer import ppo_trainer, ppo_trainer_async
    from openrlhf.trainer import ray as where_it_looks
    from openrlhf.trainer.ray import vllm_engine

    from sglang_pat.integrations.openrlhf.generator import RoundGenerator

    vllm_engine.RolloutRayActor = Launcher(job_arguments)
    where_it_looks.create_vllm_engines = _wrap_create(where_it_looks.create_vllm_engines)
    # Ray hands the class of an actor on as it is here when the first one is made, and what it finds in its module.
    for trainer in (ppo_trainer.PPOTrainer, ppo_trainer_async.TrainingActor):
        trainer.__ray_metadata__.modified_class.train_step = train_step
    for module in (ppo_trainer, ppo_trainer_async):
        module.SamplesGenerator = RoundGenerator


def _wrap_create(create: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    @functools.wraps(create)
    def created(*args: Any, **named: Any) -> list[Any]:
        import ray

        engines = create(*args, **named)
        ray.get([engine.get_num_unfinished_requests.remote() for engine in engines])
        return engines

    return created


def train_step(self: Any, rollout_samples: Any, global_step: int) -> tuple[dict[str, Any], int]:
    """OpenRLHF's training step, in the process of its trainer: it ends with new weights in the engines.

    Its status, which OpenRLHF logs and tracks, also says how the engines spent the step.
    """
    import ray
    from openrlhf.trainer.ppo_trainer import BasePPOTrainer

    status, step = BasePPOTrainer.train_step(self, rollout_samples, global_step)
    if self.vllm_engines:
        now = ray.get([engine.get_totals.remote() for engine in self.vllm_engines])
        before = getattr(self, "_pat_figures", [figures.Figures()] * len(now))
        self._pat_figures = now
        status |= figures.compute_metrics([one.subtract(then) for one, then in zip(now, before, strict=True)])
    return status, step
