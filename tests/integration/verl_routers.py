"""Balancers of verl jobs that tell a test what they know, and one that kills: ``rollout.router_config_path``.

A line of ``balancer.jsonl``, in the job's folder, is the balancer's status after it has heard of one engine.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from sglang_pat.integrations.verl.balancer import AdaptiveBalancer

from .jobs import ROOT, Job

if TYPE_CHECKING:
    import pytest

KILLS_AT = 20
"""The request at which :class:`Killing` does: one of the second step, as a step has 16."""


class Noting(AdaptiveBalancer):
    async def _ask(self, name: str, handle: Any) -> None:
        await super()._ask(name, handle)
        with Path(os.environ["VERL_FILE_LOGGER_PATH"]).with_name("balancer.jsonl").open("a") as file:
            file.write(json.dumps(await self.get_status()) + "\n")


class Killing(Noting):
    """Kills the actor of the first engine."""

    requests = 0

    async def acquire_server(self, request_id: str, **named: Any) -> tuple[str, Any]:
        self.requests += 1
        if self.requests == KILLS_AT:
            ray.kill(next(iter(self._handles.values())))
        return await super().acquire_server(request_id, **named)


def arguments(balancer: type[Noting], folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Arguments of a job with two engines of two GPUs, and this balancer."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    router = folder / "router.yaml"
    router.write_text(f"router_class: {balancer.__module__}.{balancer.__name__}\n")
    return "--gpus", "4", "--tp", "2", f"actor_rollout_ref.rollout.router_config_path={router}"


def statuses(job: Job) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job.out / "balancer.jsonl").read_text().splitlines()]
