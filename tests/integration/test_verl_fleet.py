"""Requests of verl's clients whose engines die, and the engines' manager; engines, balancer and Ray are made up."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from ray.exceptions import ActorDiedError
from verl.workers.rollout.replica import RolloutMode, TokenOutput

from sglang_pat.integrations.verl import client, fleet, replica, resize, trainers
from sglang_pat.integrations.verl.fields import DEGREES, MOVES, STEPS, STOPS
from sglang_pat.messages import GENERATED_PARAM
from sglang_pat.tools import commands

pytestmark = pytest.mark.integration

ROLLOUT = {"name": "sglang_pat", "prompt_length": 10, "response_length": 20}
CONFIG = OmegaConf.create({"actor_rollout_ref": {"rollout": ROLLOUT}})
PROMPT = [90, 91, 92]


def remote(function):
    """A method of a Ray actor."""

    async def called(*args, **kwargs):
        return function(*args, **kwargs)

    return SimpleNamespace(remote=called)


class Engine:
    """Generates the tokens 0, 1, … of a response of nine; dies after so many, in parts of two; -1: before it gets the
    request; 9: after the whole answer; None: never.

    Args:
        whole: whether it sends no token before the whole answer.
    """

    def __init__(self, degree: int, dies_after: int | None, step: int = 7, whole: bool = False) -> None:
        self.degree, self.dies_after, self.step, self.whole = degree, dies_after, step, whole
        self.asked: list[tuple[list[int], dict[str, Any]]] = []
        self.generate_parts = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self._generate))

    async def _generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any):
        self.asked.append((prompt_ids, sampling_params))
        if self.dies_after == -1:
            raise ActorDiedError
        nothing = TokenOutput(token_ids=[])
        yield answer(nothing)
        known = len(prompt_ids) - len(PROMPT)
        fields = {DEGREES: ((0, self.degree),), STEPS: ((0, self.step),)}
        for begin in range(known, 9, 2):
            if self.dies_after is not None and begin >= self.dies_after:
                raise ActorDiedError
            ids = list(range(begin, min(begin + 2, 9)))
            part = TokenOutput(token_ids=ids, log_probs=[-float(i) for i in ids], extra_fields=fields)
            yield answer(nothing if self.whole else part)
        ids = list(range(known, 9))
        yield answer(
            TokenOutput(
                token_ids=ids, log_probs=[-float(i) for i in ids], stop_reason="stop",
                extra_fields=fields | {STOPS: ["stop"], "global_steps": self.step},
            )
        )  # fmt: skip
        if self.dies_after == 9:
            raise ActorDiedError


async def answer(value: Any) -> Any:
    return value


class Balancer:
    def __init__(self, engines: dict[str, Engine]) -> None:
        self.engines, self.removed = engines, []
        self.require_acquire_fields = self.require_release_fields = remote(list)
        self.acquire_server, self.remove_servers = remote(self._acquire), remote(self._remove)
        self.release_server = SimpleNamespace(remote=lambda **_: None)

    def _acquire(self, request_id: str) -> tuple[str, Engine]:
        if not self.engines:
            raise RuntimeError("No available servers in load balancer")
        return next(iter(self.engines.items()))

    def _remove(self, names: list[str]) -> None:
        for name in names:
            self.removed.append(name)
            del self.engines[name]


def generate(kind: type, engines: dict[str, Engine], **params: Any) -> TokenOutput:
    made = kind(config=CONFIG, load_balancer_handle=Balancer(engines))
    return asyncio.run(made.generate("r", prompt_ids=PROMPT, sampling_params=params))


KINDS = [client.AdaptiveClient, client.AdaptiveAsyncClient]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dies_after", [0, 2, 5])
def test_a_request_goes_on_from_its_tokens(kind, dies_after):
    engines = {"a": Engine(1, dies_after), "b": Engine(2, None)}
    second = engines["b"]
    output = generate(kind, engines, max_tokens=15, temperature=0.5)
    kept = -(-dies_after // 2) * 2
    assert output.token_ids == list(range(9)) and output.log_probs == [-float(i) for i in range(9)]
    assert output.extra_fields[MOVES] == [kept] and output.extra_fields[STOPS] == ["stop"]
    assert tuple(output.extra_fields[DEGREES]) == (((0, 1), (kept, 2)) if kept else ((0, 2),))
    assert tuple(output.extra_fields[STEPS]) == ((0, 7),)
    ((prompt, params),) = second.asked
    assert prompt == PROMPT + list(range(kept))
    limit = params.get("max_new_tokens", params.get("max_tokens"))
    assert limit == 15 - kept and params["temperature"] == 0.5
    assert list(engines) == ["b"], "the dead one is out of the balancer"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dies_after", [None, 9])
def test_nothing_is_added_to_a_whole_answer(kind, dies_after):
    output = generate(kind, {"a": Engine(1, dies_after)})
    assert output.token_ids == list(range(9)) and MOVES not in output.extra_fields


def test_the_limit_that_verls_server_would_set_counts_for_the_whole_response():
    engines = {"a": Engine(1, 4), "b": Engine(2, None)}
    second = engines["b"]
    generate(client.AdaptiveClient, engines, min_new_tokens=3)
    params = second.asked[0][1]
    assert params.pop("custom_params") == {GENERATED_PARAM: 4}, "policies know that it is no new response"
    assert params == {"max_new_tokens": 20 - 4, "min_new_tokens": 0}, "20, and not prompt and response: 27"


@pytest.mark.parametrize(
    ("lives", "said"),
    [
        ((0, 0), "engines a and b died while they had request r, 2 of them before its first token, with a prompt of 3"),
        ((1, 3, 5, 7), "engines a and b and c and d died while they had request r, 0 of them before its first token"),
        ((0, -1, 0), "engines a and c died while they had request r, 2 of them before its first token"),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_a_request_that_kills_is_given_up(lives, said, whole):
    engines = {name: Engine(1, dies, whole=whole) for name, dies in zip("abcd", lives, strict=False)}
    last = engines["e"] = Engine(1, None)
    with pytest.raises(RuntimeError, match=said):
        generate(client.AdaptiveClient, engines)
    assert not last.asked


@pytest.mark.parametrize("kind", KINDS)
def test_engines_that_were_dead_before_they_had_a_request_did_not_die_of_it(kind):
    engines = {name: Engine(1, -1) for name in "abcd"} | {"e": Engine(1, None)}
    output = generate(kind, engines)
    assert output.token_ids == list(range(9)) and MOVES not in output.extra_fields and list(engines) == ["e"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_least_step_of_a_response_is_that_of_its_oldest_tokens(kind):
    fields = generate(kind, {"a": Engine(1, 4, step=6), "b": Engine(1, -1, step=5), "c": Engine(1, None)}).extra_fields
    assert tuple(fields[STEPS]) == ((0, 6), (4, 7))
    assert (fields["min_global_steps"], fields["max_global_steps"]) == (6, 7)


def test_no_engine_is_left():
    with pytest.raises(RuntimeError, match="no engine is left: a and b died, and all others before"):
        generate(client.AdaptiveClient, {"a": Engine(1, 3), "b": Engine(1, 0)})


@pytest.mark.parametrize(
    "params", [{"stop": ["x"]}, {"repetition_penalty": 1.2}, {"frequency_penalty": 0.1}, {"json_schema": "{}"}]
)
def test_no_parts_of_what_looks_back_at_the_whole_response(params):
    assert replica.find_whole_only(params)


class Replica:
    """A replica whose engine may die in an update."""

    rollout_mode, nnodes, name_suffix = RolloutMode.HYBRID, 1, ""

    def __init__(self, number: int) -> None:
        self.replica_rank, self.asleep = number, True
        self._server_handle, self._server_address = f"actor {number}", f"address {number}"
        self.servers = []

    server_handle = property(lambda self: self._server_handle)
    server_address = property(lambda self: self._server_address)

    async def launch_servers(self) -> None:
        name, _, starts = self._server_handle.removeprefix("actor ").partition(".")
        name = f"{name}.{int(starts or 0) + 1}"
        self._server_handle, self._server_address = f"actor {name}", f"address {name}"
        self.asleep = False

    async def sleep(self) -> None:
        self.asleep = True

    async def abort_all_requests(self, reject_request: bool) -> None:
        if self.replica_rank == 0:
            raise ActorDiedError


class MadeFleet(fleet.Fleet):
    """A fleet without Ray; ``dying``: engines that die before, and in, each update.

    Attributes:
        fails: engines whose workers die in each of the first updates, which fail; None: a trainer dies.
    """

    backend, fails = "naive", ()

    def __init__(self, *dying: set[int]) -> None:
        self.replicas = [Replica(0), Replica(1)]
        self.added: dict[str, str] = {}
        self.removed: list[str] = []
        self._servers = SimpleNamespace(
            server_handles=["actor 0", "actor 1"], server_addresses=["address 0", "address 1"]
        )
        self._balancer = SimpleNamespace(
            add_servers=remote(self.added.update), remove_servers=remote(self.removed.extend)
        )
        self._new, self._deaths, self._start_seconds, self._lives, self._step = [], 0, 0.0, {}, None
        self._asleep = []
        self._count, self._leaving, self._dying, self.updates = None, [], list(dying), 0
        self._starts, self._threads, self._have_gpus = {}, ThreadPoolExecutor(), False

    def _watch(self, replica: Replica) -> None:
        pass

    def list_dead(self) -> list:
        return [replica for replica in self.replicas if replica.replica_rank in self._dying[0]]


@pytest.fixture
def made(monkeypatch):
    def make(*args) -> MadeFleet:
        one = MadeFleet(*args)

        async def update_weights(self, global_steps):
            one.updates += 1
            one._dying.pop(0)
            for each in one.replicas:
                assert each.asleep == (one.backend == "naive"), "verl wakes them up, or releases their KV"
                each.asleep = one.backend != "naive"
            if len(one.fails) >= one.updates:
                for each in one.replicas:
                    each.has_node = each.has_node and each.replica_rank != one.fails[one.updates - 1]
                raise ActorDiedError
            for each in one.replicas:
                each.asleep = False
            one.step = global_steps
            return {"sent": one.updates}

        async def free_names(replica):
            pass

        monkeypatch.setattr(fleet.CheckpointEngineManager, "update_weights", update_weights)
        monkeypatch.setattr(fleet, "_free_names", free_names)
        return one

    return make


def test_what_died_is_started_anew_and_joins_with_the_weights(made):
    one = made({0}, set(), set())
    assert asyncio.run(_update(one)) == {"sent": 1}
    assert one._servers.server_handles == ["actor 0.1", "actor 1"]
    assert one.added == {"address 0.1": "actor 0.1"}
    assert one.removed == ["address 0"], "it died asleep: no request has found it dead"
    assert one.take_metrics()["rollout/engine_deaths"] == 1 and one.take_metrics()["rollout/engine_deaths"] == 0


@pytest.mark.parametrize(("mode", "requested"), [("sync", "own"), ("separate_async", "standalone")])
def test_new_engines_join_the_balancer_that_has_the_requests(monkeypatch, mode, requested):
    """The trainer of ``separate_async`` may have added an engine's place to it before the update that replaces it."""
    made = []

    def setup(self) -> None:
        self.checkpoint_manager = self.llm_server_manager = SimpleNamespace(global_load_balancer="own")
        if mode == "separate_async":
            self.standalone_checkpoint_manager = self.checkpoint_manager
            self.standalone_server_manager = SimpleNamespace(global_load_balancer="standalone")

    kind = trainers.TRAINER_REGISTRY[mode]
    monkeypatch.setattr(kind.__mro__[2], "_setup", setup)
    monkeypatch.setattr(trainers, "Fleet", lambda manager, servers, balancer, own_gpus: made.append(balancer))
    monkeypatch.setattr(trainers.rewards, "is_used", lambda config: False)
    trainer = object.__new__(kind)
    trainer.is_adaptive, trainer.config = True, None
    trainer.replay_buffer = SimpleNamespace(_wait_for_next_poll=None)
    trainer._setup()
    assert made == [requested] * (1 + (mode == "separate_async"))


def test_several_engines_are_started_at_the_same_time(made, monkeypatch):
    one, under_way = made({0, 1}, set()), []

    async def launch_servers(self) -> None:
        self.asleep = False
        under_way.append(self.replica_rank)
        while len(under_way) < 2:
            await asyncio.sleep(0)
        self._server_handle = f"new {self.replica_rank}"

    monkeypatch.setattr(Replica, "launch_servers", launch_servers)
    asyncio.run(asyncio.wait_for(_update(one), 10))
    assert one._servers.server_handles == ["new 0", "new 1"] and one.take_metrics()["rollout/engine_deaths"] == 2


def test_an_engine_is_started_while_the_others_generate(made):
    """The new one sleeps with them, and joins with the weights."""
    one = made({0}, set())
    one.start_dead()
    assert not one._starts, "a trainer has the GPUs"
    one._have_gpus = True
    for _ in range(2):
        one.start_dead()
    assert list(one._starts) == [0] and one._servers.server_handles == ["actor 0", "actor 1"]
    asyncio.run(_sleep(one))
    assert one._servers.server_handles == ["actor 0.1", "actor 1"] and one.replicas[0].asleep and not one.added
    one._dying = [set(), set()]
    assert asyncio.run(_update(one)) == {"sent": 1} and one.added == {"address 0.1": "actor 0.1"}
    assert one.take_metrics()["rollout/engine_deaths"] == 1 and one._have_gpus


def test_what_did_not_start_meanwhile_is_started_before_the_update(made, monkeypatch):
    one, fails = made({0}, set()), [True]

    async def launch_servers(self) -> None:
        if fails:
            fails.pop()
            raise ActorDiedError
        self._server_handle = "a second one"

    monkeypatch.setattr(Replica, "launch_servers", launch_servers)
    one._have_gpus = True
    one.start_dead()
    assert asyncio.run(_update(one)) == {"sent": 1} and one._servers.server_handles == ["a second one", "actor 1"]
    assert one.take_metrics()["rollout/engine_deaths"] == 1


def test_an_engine_that_dies_in_the_update_is_sent_the_weights_again(made):
    one = made(set(), {1}, set())
    assert asyncio.run(_update(one)) == {"sent": 2} and one._servers.server_handles == ["actor 0", "actor 1.1"]
    assert set(one.added) == {"address 1.1"}


def test_engines_that_die_again_and_again_end_the_job(made):
    one = made({0}, {1}, {1}, {0, 1})
    with pytest.raises(RuntimeError, match="engines 0, 1 have died in each of 3 updates of the weights to step 5"):
        asyncio.run(_update(one))
    assert not one.added


def test_without_a_step_the_weights_are_those_sent_last(made):
    """verl names no step after a validation; a new engine has none yet."""
    one = made(set(), set(), {1}, set())
    asyncio.run(_update(one))
    asyncio.run(_sleep(one))
    one._dying.pop(0)
    assert one.step == 5
    one.step = None
    assert asyncio.run(_update(one, None)) == {"sent": 2} and one.step == 5


@pytest.mark.parametrize("number", [0, 1], ids=["it has died", "it lives"])
def test_an_engine_that_left_the_round_sleeps_until_the_next_update(made, number):
    one = made(set(), set())
    for each in one.replicas:
        each.asleep = False
    asyncio.run(_leave(one, number))
    assert one.removed == [f"address {number}"] and one.replicas[number].asleep == bool(number)
    assert one.count_awake() == 1 and one.count_living() == 2
    slept = list[int]()
    for each in one.replicas:
        each.sleep = lambda each=each: slept.append(each.replica_rank) or asyncio.sleep(0)
    asyncio.run(_sleep(one))
    assert slept == [1 - number], "SGLang does not release memory twice"
    for each in one.replicas:
        each.asleep = True
    asyncio.run(_update(one))
    assert one.added == {f"address {number}": f"actor {number}"}, "it gets requests again"
    asyncio.run(_sleep(one))
    assert sorted(slept[1:]) == [0, 1]


async def _leave(one: MadeFleet, number: int) -> None:
    await one.leave_round(number)


async def _update(one: MadeFleet, step: int | None = 5) -> Any:
    return await one.update_weights(step)


async def _sleep(one: MadeFleet) -> None:
    await one.sleep_replicas()


class OwnReplica(Replica):
    """A replica with GPUs of its own; ``has_node``: whether its workers live."""

    rollout_mode, gpus_per_replica_node, resource_pool, has_node = RolloutMode.STANDALONE, 2, None, True

    def __init__(self, replica_rank: int, **_: Any) -> None:
        super().__init__(replica_rank)
        self.asleep = False
        self.workers, self.aborted = [SimpleNamespace(__ray_ready__=SimpleNamespace(remote=self._ready))], False

    async def _ready(self) -> None:
        if not self.has_node:
            raise ActorDiedError

    init_standalone = Replica.launch_servers

    async def abort_all_requests(self, reject_request: bool) -> None:
        self.aborted = reject_request

    async def resume_kv_cache(self) -> None:
        assert self.asleep, "SGLang fails"
        self.asleep = False


class Count:
    """:class:`~.resize.EngineCount` as an actor."""

    def __init__(self, wanted: int) -> None:
        self.reports: list[tuple[int, str]] = []
        self.get_wanted = remote(lambda: wanted)
        self.report = remote(lambda *told: self.reports.append(told))


class OnceMadeGroup:
    def __init__(self, rebuild_group: bool = False) -> None: ...


@pytest.fixture
def resized(made, monkeypatch):
    """Makes fleets of two engines with GPUs of their own: 1 and 2; ``lacks``: what Ray lacks for more, at one look
    after the other."""

    def make(
        wanted: int,
        dying: set[int] = frozenset(),
        without_node: set[int] = frozenset(),
        lacks: Iterable[str] = repeat(""),
    ) -> Any:
        one = made(dying, set(), set(), set())
        one.replicas = [OwnReplica(number) for number in (1, 2)]
        for each in one.replicas:
            each.has_node = each.replica_rank not in without_node
        one.released = []
        one._count, one._last_number, one._lives, one._lacks = Count(wanted), 2, {1: None, 2: None, 3: None}, ""
        one.backend, one.backend_cls, one.config = "gloo", object, SimpleNamespace(engine_kwargs={})
        one._servers.server_handles, one._servers.server_addresses = ["actor 1", "actor 2"], ["address 1", "address 2"]
        one._servers.rollout_replica_class, one._servers.model_config = OwnReplica, None
        one._servers.rollout_config = SimpleNamespace(n_gpus_per_node=2)
        looks = iter(lacks)
        monkeypatch.setattr(fleet, "_find_lacking", lambda gpus: next(looks))
        monkeypatch.setattr(fleet, "_release", lambda replica: one.released.append(replica.replica_rank))
        return one

    return make


@pytest.mark.parametrize(
    ("wanted", "dying", "without_node", "stays", "left"),
    [
        (2, set(), set(), ["actor 1", "actor 2"], []),
        (3, set(), set(), ["actor 1", "actor 2", "actor 3.1"], []),
        (1, set(), set(), ["actor 1"], [2]),
        (1, {1}, set(), ["actor 2"], [1]),
        (2, {1}, set(), ["actor 1.1", "actor 2"], []),
        (3, {1}, set(), ["actor 1.1", "actor 2", "actor 3.1"], []),
        (2, {1}, {1}, ["actor 2", "actor 3.1"], [1]),
        (1, {1}, {1}, ["actor 2"], [1]),
        (2, {1, 2}, {1, 2}, ["actor 3.1", "actor 4.1"], [1, 2]),
    ],
)
def test_as_many_engines_as_are_wanted(resized, wanted, dying, without_node, stays, left):
    one = resized(wanted, dying, without_node)
    assert asyncio.run(_update(one)) == {"sent": 1}
    assert one._servers.server_handles == [replica.server_handle for replica in one.replicas] == stays
    assert one._servers.server_addresses == [replica.server_address for replica in one.replicas]
    restarted = dying - set(left)
    assert sorted(one.released) == left and set(one.removed) == {f"address {number}" for number in {*left, *restarted}}
    assert set(one.added.values()) == {handle for handle in stays if "." in handle}, "those join with the weights"
    metrics = one.take_metrics()
    assert metrics["rollout/engines"] == len(stays) and metrics["rollout/engine_deaths"] == len(dying)
    assert one._count.reports == [(len(stays), "")]


@pytest.mark.parametrize(("dying", "stays"), [(set(), ["actor 1", "actor 2"]), ({1}, ["actor 2"])])
def test_there_is_no_room_for_more_engines(resized, monkeypatch, dying, stays):
    monkeypatch.setattr(fleet, "ROOM_SECONDS", 0.0)
    one = resized(3, dying, dying, lacks=repeat("it needs 2 GPU"))
    asyncio.run(_update(one))
    assert one._servers.server_handles == stays and not one.added
    ((present, lacks),) = one._count.reports
    assert present == len(stays) and "did not start: it needs 2 GPU" in lacks


def test_ray_counts_late_what_an_engine_had(resized):
    """The workers of a dead engine have died: what they had is free a moment later."""
    one = resized(2, {1}, {1}, lacks=["it needs 2 GPU", "it needs 2 GPU", "", ""])
    asyncio.run(_update(one))
    assert one._servers.server_handles == ["actor 2", "actor 3.1"]


def test_all_nodes_are_gone(resized, monkeypatch):
    monkeypatch.setattr(fleet, "ROOM_SECONDS", 0.0)
    with pytest.raises(RuntimeError, match="the nodes of all are gone, and one more engine did not start"):
        asyncio.run(_update(resized(2, {1, 2}, {1, 2}, lacks=repeat("it needs 2 GPU"))))


def test_a_group_that_is_made_once_keeps_its_engines(resized):
    one = resized(2, {1}, {1})
    one.backend, one.backend_cls = "nccl", OnceMadeGroup
    with pytest.raises(RuntimeError, match="cannot go on without it: rollout.checkpoint_engine.engine_kwargs.nccl.reb"):
        asyncio.run(_update(one))
    one.config.engine_kwargs = {"nccl": {"rebuild_group": True}}
    assert not one._find_why_fixed()


def test_an_engine_that_cannot_get_weights_leaves(resized):
    """Workers have died, and nobody has told Ray of their server."""
    one = resized(2, without_node={1})
    assert asyncio.run(_update(one)) == {"sent": 1}
    assert one._servers.server_handles == ["actor 2", "actor 3.1"] and one.released == [1]
    assert one.take_metrics()["rollout/engine_deaths"] == 1


def test_a_node_that_goes_in_the_update(resized):
    one = resized(2)
    one.fails = (1, 3)
    assert asyncio.run(_update(one)) == {"sent": 3}
    assert one._servers.server_handles == ["actor 2", "actor 4.1"] and sorted(one.released) == [1, 3]
    assert one.take_metrics()["rollout/engine_deaths"] == 2 and set(one.added) == {"address 4.1"}
    one = resized(2)
    one.fails = (1, 3, 4)
    with pytest.raises(RuntimeError, match="engines 4 have died in each of 3 updates"):
        asyncio.run(_update(one))


@pytest.mark.parametrize("rebuilds", [True, False])
def test_an_update_that_cannot_go_on(resized, rebuilds):
    """A trainer dies, or an engine whose group is made once."""
    one = resized(2)
    one.fails = (None,) if rebuilds else (1,)
    one.backend, one.backend_cls = "nccl", OnceMadeGroup
    one.config.engine_kwargs = {"nccl": {"rebuild_group": rebuilds}}
    with pytest.raises(ActorDiedError):
        asyncio.run(_update(one))
    assert one.updates == 1


def test_the_number_of_engines_is_said_and_refused():
    count = resize.EngineCount(2, "")
    assert not count.want(3) and count.get_wanted() == 3
    assert count.describe() == "2 engines, 3 from the next update of the weights"
    count.report(2, "engine 3 did not start: why")
    assert count.describe() == "2 engines, 3 from the next update of the weights; engine 3 did not start: why"
    fixed = resize.EngineCount(2, "the group is made once")
    assert fixed.want(3) == "the group is made once" and fixed.get_wanted() == 2


@pytest.mark.parametrize(
    ("words", "jobs", "said"),
    [
        (["0"], ["01"], "ENGINES is 0, must be at least 1"),
        (["x"], ["01"], "argument engines: invalid int value: 'x'"),
        (["3", "--address", "127.0.0.1:1"], ["01"], "no Ray cluster at --address 127.0.0.1:1: .*refused"),
        (["3"], [], "no job of this cluster has engines of ours with GPUs of their own"),
        (["3"], ["01", "02"], "there are 2 jobs, say which: --job with one of 01, 02"),
        (["3", "--job", "03"], ["01", "02"], "--job is 03, must be one of 01, 02"),
        (["3", "--job", "02"], ["01", "02"], "job 02 keeps its number of engines: made once"),
        (["3"], ["01"], None),
        ([], ["01", "02"], None),
    ],
)
def test_the_command_for_another_number(monkeypatch, capsys, words, jobs, said):
    actors = {f"engines of job {job}": resize.EngineCount(2, "made once" if job == "02" else "") for job in jobs}
    named = [dict(name=name, namespace=resize.NAMESPACE) for name in actors] + [dict(name="x", namespace="")]
    asked = lambda actor, method: SimpleNamespace(remote=lambda *args: getattr(actor, method)(*args))  # noqa: E731
    handles = {
        name: SimpleNamespace(want=asked(actor, "want"), describe=asked(actor, "describe"))
        for name, actor in actors.items()
    }
    monkeypatch.setattr(resize, "list_named_actors", lambda all_namespaces: named)
    played = dict(init=lambda *_, **__: None, shutdown=lambda: None, get=lambda value: value)
    monkeypatch.setattr(resize, "ray", SimpleNamespace(get_actor=lambda name, _: handles[name], **played))
    code = commands.run("resize", resize.main, words)
    printed, error = capsys.readouterr()
    if said is not None:
        assert code == 2 and re.fullmatch(f"resize: error: {said}\n", error) and not printed
    elif words:
        assert code == 0 and printed == "job 01: 2 engines, 3 from the next update of the weights\n"
    else:
        assert code == 0 and printed == "job 01: 2 engines\njob 02: 2 engines\n"


def test_a_batch_is_not_trained_that_lost_its_last_engine(made):
    one, other = made({0, 1}), made({0})
    fleet.check_some_live([])
    fleet.check_some_live([one, other])
    with pytest.raises(RuntimeError, match="no engine is left: all have died in this step"):
        fleet.check_some_live([one])


def test_a_dead_engine_is_passed_over_where_all_are_asked(made):
    one = made({0})

    async def run() -> None:
        await one.abort_replicas()

    asyncio.run(run())
