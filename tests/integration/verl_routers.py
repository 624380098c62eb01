"""Balancers of verl jobs that tell a test what they know, and one that kills: ``rollout.router_config_path``.

A line of ``balancer.jsonl``, in the job's folder, is the balancer's status after it has heard of one engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray
from ray.exceptions import RayActorError

from sglang_pat.checks import faults
from sglang_pat.integrations.verl.balancer import AdaptiveBalancer

from .jobs import ROOT, Job

if TYPE_CHECKING:
    import pytest

KILLS = "PAT_TEST_KILLS"
"""Variable with what is killed: ``20:0:now:main 40:1:sleep:rank`` kills the main process of engine 0 at request 20, and
a rank of engine 1 when it is to sleep after request 40.  At the moment ``node`` all that its node has of it is killed.
A step has 16 requests."""
RESIZES = "PAT_TEST_RESIZES"
"""Variable with numbers of engines: ``20:3`` asks for three at request 20."""
MOMENTS = {"sleep": "pat_send_round", "update": "update_weights_from_tensor", "flush": "flush_cache"}
"""Methods of SGLang's tokenizer manager at whose next call an engine is killed; other moments: states of a switch."""


class Noting(AdaptiveBalancer):
    async def _ask(self, name: str, handle: Any) -> None:
        await super()._ask(name, handle)
        with Path(os.environ["VERL_FILE_LOGGER_PATH"]).with_name("balancer.jsonl").open("a") as file:
            file.write(json.dumps(await self.get_status()) + "\n")


class Killing(Noting):
    """Has engines killed as :data:`KILLS` says, and asks for others as :data:`RESIZES` says."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.seen: set[str] = set()

    async def acquire_server(self, request_id: str, **named: Any) -> tuple[str, Any]:
        is_new = request_id not in self.seen
        self.seen.add(request_id)
        for entry in os.environ[KILLS].split() if is_new else ():
            request, engine, moment, process = entry.split(":")
            if int(request) == len(self.seen):
                await _call(ray.get_actor(f"sglang_server_{engine}_0"), _arm, moment, process)
        for entry in os.environ.get(RESIZES, "").split() if is_new else ():
            request, engines = entry.split(":")
            if int(request) == len(self.seen):
                await _resize(engines)
        name, actor = await super().acquire_server(request_id, **named)
        await _call(actor, _send_often)
        return name, actor


async def _resize(engines: str) -> None:
    address = ray.get_runtime_context().gcs_address
    command = sys.executable, "-m", "sglang_pat.integrations.verl.resize", engines, "--address", address
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    printed, _ = await process.communicate()
    with Path(os.environ["VERL_FILE_LOGGER_PATH"]).with_name("resizes.txt").open("a") as file:
        file.write(f"{process.returncode} {printed.decode()}")


async def _call(actor: Any, function: Any, *args: Any) -> None:
    """Call a function in an actor's process, which may be dead, or die of it."""
    with suppress(RayActorError):
        await actor.__ray_call__.remote(function, *args)


def _send_often(server: Any) -> None:
    """Have clients sent parts of responses that are as short as those of tests."""
    from sglang_pat.integrations.verl import replica

    replica.PART_TOKENS, replica.LOOK_TOKENS = 8, 8


def _arm(server: Any, moment: str, process: str) -> None:
    """Kill a process of this actor's engine, now or at the next call of a method."""
    if moment == "now":
        return _kill(process)
    if moment == "node":
        for worker in server.workers:
            ray.kill(worker)
        _kill("main")
    if moment.isupper():  # at the next switch
        Path(os.environ[faults.ENV][1:]).write_text(f"{moment}:pid{_find(process).pid}:kill")
        return
    manager, name = server.tokenizer_manager, MOMENTS[moment]
    stock = getattr(manager, name)

    def die(*args: Any, **named: Any) -> Any:
        setattr(manager, name, stock)
        _kill(process)
        return stock(*args, **named)

    setattr(manager, name, die)


def _kill(process: str) -> None:
    if process == "main":
        psutil.Process().kill()
    _find(process).kill()


def _find(title: str) -> psutil.Process:
    """A process of this actor's engine whose title has this in it."""
    children = psutil.Process().children(recursive=True)
    return next(child for child in children if title in " ".join(child.cmdline()))


def arguments(
    balancer: type[Noting], folder: Path, monkeypatch: pytest.MonkeyPatch, kills: str = ""
) -> tuple[str, ...]:
    """Arguments of a job with two engines of two GPUs, and this balancer; ``kills``: see :data:`KILLS`."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setenv(KILLS, kills)
    monkeypatch.setenv(faults.ENV, f"@{folder / 'fault'}")
    router = folder / "router.yaml"
    router.write_text(f"router_class: {balancer.__module__}.{balancer.__name__}\n")
    return "--gpus", "4", "--tp", "2", f"actor_rollout_ref.rollout.router_config_path={router}"


def statuses(job: Job) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job.out / "balancer.jsonl").read_text().splitlines()]
