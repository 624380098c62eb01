"""The balancer's actor and what an engine tells it, without Ray and without engines."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from verl.workers.rollout.replica import RolloutReplicaRegistry

from sglang_pat import messages as m
from sglang_pat.integrations.balance import EngineReport
from sglang_pat.integrations.verl.balancer import AdaptiveBalancer
from tests.unit.coordinator_rig import Rig

pytestmark = pytest.mark.integration


class Engine:
    """A handle of an actor whose ``load()`` gives, or raises, one answer after the other."""

    def __init__(self, *answers) -> None:
        self.answers = list(answers)
        self.load = SimpleNamespace(remote=self._load)

    async def _load(self) -> EngineReport:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def asked(engine: Engine, times: int) -> AdaptiveBalancer:
    async def main() -> AdaptiveBalancer:
        made = AdaptiveBalancer({"e0": engine}, {})
        for _ in range(times):
            await made._ask("e0", engine)
        return made

    return asyncio.run(main())


def status(balancer: AdaptiveBalancer) -> dict:
    return asyncio.run(balancer.get_status())


@pytest.mark.parametrize("error", [ActorDiedError(), TimeoutError()])
def test_an_engine_that_is_gone_is_lost_until_it_answers(error, caplog):
    engine = Engine(error, error, EngineReport(gpus=8))
    assert status(asked(engine, 2))["lost"] == ["e0"]
    assert not status(asked(engine, 1))["lost"] and not caplog.records


def raised_in_the_actor(error: Exception) -> Exception:
    return RayTaskError("load", "", error).as_instanceof_cause()


@pytest.mark.parametrize("error", [raised_in_the_actor(KeyError("groups")), TypeError("no such field")])
def test_a_load_that_cannot_be_read_is_told_once_and_the_engine_is_not_lost(error, caplog):
    with caplog.at_level(logging.ERROR):
        found = status(asked(Engine(EngineReport(gpus=8), error, error), 3))
    assert not found["lost"] and found["reports"]["e0"]["gpus"] == 8
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("load of engine e0 not known, ") and "\n" not in line


@pytest.mark.parametrize(("most", "slots"), [(7, 28), (None, EngineReport.slots)])
def test_an_engine_reports_what_it_was_started_with(most, slots):
    """Not what verl's max_num_seqs says: ``engine_kwargs.sglang.max_running_requests`` goes before it."""
    RolloutReplicaRegistry.get("sglang")  # puts stand-ins for vLLM's modules in place
    from sglang_pat.integrations.verl.replica import AdaptiveServer

    rig = Rig(1, 4)
    rig.coordinator.handle_status_query(m.StatusQuery(query_id=1), 0.0)

    async def pat_status() -> dict:
        return rig.world.server[-1].answer

    manager = SimpleNamespace(pat_status=pat_status, server_args=SimpleNamespace(max_running_requests=most))
    server = SimpleNamespace(tokenizer_manager=manager, config=SimpleNamespace(max_num_seqs=1024))
    assert asyncio.run(AdaptiveServer.load(server)) == EngineReport(4, 4, slots=slots, expected_seconds=0.0)


def test_an_engine_that_hangs_does_not_keep_the_others_waiting():
    hangs = Engine()

    async def main() -> None:
        never, answered = asyncio.Event(), asyncio.Event()
        hangs.load = SimpleNamespace(remote=never.wait)
        made = AdaptiveBalancer({"e0": hangs, "e1": Engine(*[EngineReport(gpus=8)] * 2)}, {"interval": 0.001})
        made._balancer.report = lambda name, report: answered.set()
        await made.acquire_server("a session")
        for _ in range(2):
            await asyncio.wait_for(answered.wait(), 20)
            answered.clear()
        made._watch.cancel()

    asyncio.run(main())
