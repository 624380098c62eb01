"""Which of verl's replicas are adaptive engines, and what their servers do beside verl's; nothing is started."""

from __future__ import annotations

import asyncio
import os
from base64 import b64encode
from types import SimpleNamespace

import numpy as np
import pytest
from verl.workers.config import RolloutConfig
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import RolloutMode, RolloutReplicaRegistry, get_rollout_replica_class

from sglang_pat import plugin
from sglang_pat.integrations import CALLS
from sglang_pat.messages import BeginRound, EndRound
from sglang_pat.server import attach

RolloutReplicaRegistry.get("sglang")  # puts stand-ins for vLLM's modules in place
from sglang_pat.integrations.verl import adapter  # noqa: E402
from sglang_pat.integrations.verl import replica as replicas  # noqa: E402
from sglang_pat.integrations.verl.fields import DEGREES, STEPS  # noqa: E402
from sglang_pat.integrations.verl.replica import (  # noqa: E402
    AdaptiveServer,
    PlainServer,
    SGLangHttpServer,
    _keep_meta_info,
    _meta,
)

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv("SGLANG_PAT", raising=False)


def config(name: str = "sglang", settings: object = None, **given) -> RolloutConfig:
    engine_kwargs = {} if settings is None else {"sglang_pat": settings}
    return RolloutConfig(name=name, tensor_model_parallel_size=2, engine_kwargs=engine_kwargs, **given)


def replica(rollout: RolloutConfig, **named):
    """A replica as verl makes one: the class by its name, then the replica with its configuration."""
    kind = get_rollout_replica_class(rollout.name)
    return kind(replica_rank=0, config=rollout, model_config=None, gpus_per_node=2, **named)


def classes(made) -> tuple[str, str]:
    """The class of the replica, and that of its server's actor."""
    return type(made).__name__, made.server_class.__ray_metadata__.class_name.rpartition(".")[2]


VERLS = ("SGLangReplica", "SGLangHttpServer")
OURS = ("AdaptiveReplica", "AdaptiveServer")
HELPERS = ["is_reward_model", "is_teacher_model"]


def test_the_name_sglang_is_verls_own():
    assert classes(replica(config())) == VERLS
    for helper in HELPERS:
        assert classes(replica(config(), **{helper: True})) == VERLS


@pytest.mark.parametrize("settings", [{}, {"base_tp": 1, "policy": "threshold"}])
def test_settings_in_the_configuration_make_it_this_engine(settings):
    """The variable does not reach the workers of a Ray cluster that runs already; the configuration does."""
    assert classes(replica(config(settings=settings))) == OURS


def test_so_does_the_variable(monkeypatch):
    monkeypatch.setenv("SGLANG_PAT", "base_tp=1")
    assert classes(replica(config())) == OURS


def test_and_the_name():
    assert classes(replica(config("sglang_pat"))) == OURS
    with pytest.raises(ValueError, match="rollout.engine_kwargs.sglang_pat has no setting 'polcy'"):
        replica(config("sglang_pat", {"polcy": "pat"}))


@pytest.mark.parametrize("helper", HELPERS)
@pytest.mark.parametrize("name", ["sglang", "sglang_pat"])
def test_reward_models_and_teachers_stay_verls_own(helper, name, monkeypatch):
    """Where a teacher has no name of its own, it has that of the policy's rollout."""
    monkeypatch.setenv("SGLANG_PAT", "base_tp=1")
    assert classes(replica(config(name), **{helper: True})) == ("SGLangReplica", "PlainServer")
    with pytest.raises(ValueError, match="must be left out there, or only have stream_layers: only the policy's"):
        replica(config(name, {}), **{helper: True})


@pytest.mark.parametrize("helper", HELPERS)
def test_they_may_stream_layers(helper):
    assert classes(replica(config(settings={"stream_layers": "auto"}), **{helper: True})) == (VERLS[0], "PlainServer")
    with pytest.raises(ValueError, match="stream_layers is 'most', must be auto or a number from 3 on"):
        replica(config(settings={"stream_layers": "most"}), **{helper: True})


def test_sglang_streams_layers_in_their_servers(monkeypatch):
    """What the server's process and its engine's processes read when SGLang loads its plug-ins."""
    seen = []

    async def launch_server(self, **_):
        seen.append((os.environ.get("SGLANG_PAT_STREAM_LAYERS"), os.environ.get("SGLANG_PAT")))

    monkeypatch.setattr(SGLangHttpServer, "launch_server", launch_server)
    monkeypatch.setattr(replicas, "attach_layers", lambda: seen.append("attached"))
    monkeypatch.setenv("SGLANG_PAT", "base_tp=1")
    monkeypatch.setenv("SGLANG_PAT_STREAM_LAYERS", "")  # to be put back
    server = PlainServer.__new__(PlainServer)
    server.config = config(settings={"stream_layers": 12})
    asyncio.run(server.launch_server())
    assert seen == ["attached", ("12", None)]


def test_their_servers_keep_sglangs_plugin_out(monkeypatch):
    seen = []

    async def launch_server(self, **address):
        plugin.plugin()  # as SGLang calls it when it launches an engine
        seen.append((address, os.environ.get("SGLANG_PAT"), attach.is_attached()))

    monkeypatch.setattr(SGLangHttpServer, "launch_server", launch_server)
    monkeypatch.setenv("SGLANG_PAT", "base_tp=1")
    server = PlainServer.__new__(PlainServer)
    server.config = config()
    asyncio.run(server.launch_server(master_port=1))
    assert seen == [({"master_port": 1}, None, False)]


@pytest.mark.parametrize("frees", [True, False])
@pytest.mark.parametrize("name", ["sleep", "release_kv_cache"])
def test_what_an_agent_has_given_up_is_ended_before_memory_is_released(name, frees, monkeypatch):
    """verl has its batch by then, and the engine would refuse."""
    done = []

    async def noted(*_):
        done.append("released")

    async def ended():
        done.append("ended")
        return 1

    monkeypatch.setattr(SGLangHttpServer, name, noted)
    server = AdaptiveServer.__new__(AdaptiveServer)
    server.config, server.rollout_mode = SimpleNamespace(free_cache_engine=frees), RolloutMode.HYBRID
    server.tokenizer_manager = SimpleNamespace(pat_end_running=ended, pat_send_round=lambda _: None)
    asyncio.run(getattr(server, name)())
    assert done == (["ended"] if frees else []) + ["released"]


def test_the_engine_is_told_of_a_step_that_ends_with_its_sleep(monkeypatch):
    """A step begins with the first request, or when our trainer says so; engines that never sleep have no steps."""

    async def generate(*_):
        return SimpleNamespace(extra_fields={"global_steps": 1}, stop_reason="completed")

    async def sleep(_):
        told.append("asleep")

    monkeypatch.setattr(SGLangHttpServer, "generate", generate)
    monkeypatch.setattr(SGLangHttpServer, "sleep", sleep)
    server = AdaptiveServer.__new__(AdaptiveServer)
    server.config = SimpleNamespace(free_cache_engine=False)

    async def two_steps(*announced: BeginRound):
        for _ in range(2):
            for begun in announced:
                await server.announce_round(begun)
            await server.generate()
            await server.generate()
            await server.sleep()

    mine = BeginRound(requests=2, kind="long")
    for mode in (RolloutMode.HYBRID, RolloutMode.STANDALONE):
        server.rollout_mode = mode
        for announced, begun in (((), BeginRound()), ((mine,), mine)):
            told: list = []
            server.tokenizer_manager = SimpleNamespace(pat_send_round=told.append)
            asyncio.run(two_steps(*announced))
            assert told == ([begun, EndRound(), "asleep"] if mode == RolloutMode.HYBRID else ["asleep"]) * 2


def test_a_validation_is_no_part_of_a_step(monkeypatch):
    server = AdaptiveServer.__new__(AdaptiveServer)
    server.rollout_mode, told = RolloutMode.HYBRID, []
    server.tokenizer_manager = SimpleNamespace(pat_send_round=told.append)

    async def generate(*_):
        return SimpleNamespace(extra_fields={"global_steps": 1}, stop_reason="completed")

    async def validate_and_train():
        await server.announce_round(BeginRound(kind="validation"))
        await server.generate()
        await server.announce_round(EndRound())
        await server.generate()

    monkeypatch.setattr(SGLangHttpServer, "generate", generate)
    asyncio.run(validate_and_train())
    assert told == [BeginRound(kind="validation"), EndRound(), BeginRound()]


def test_an_engines_actor_handles_a_nodes_requests_at_once():
    """Ray's limit counts aborts and pauses, too: they would wait behind requests."""
    made = replica(config("sglang_pat", {}, max_num_seqs=256))
    assert made.max_concurrency == CALLS > 16 * 256 * 8
    assert replica(config(max_num_seqs=256)).max_concurrency == 1000, "verl's own, which this is an override of"


def test_the_client_of_a_server_is_made_as_verls(monkeypatch):
    """The client says what is wrong with our settings; those of the variable are not about a reward model's client."""
    monkeypatch.setattr(adapter, "SurvivingAdapter", lambda config, device_mesh: SimpleNamespace(config=config))
    monkeypatch.setenv("SGLANG_PAT", "base_tp=3")
    for name in ("sglang", "sglang_pat"):
        kind, plain = get_rollout_class(name), config(name, data_parallel_size=2)
        assert kind(config=plain, device_mesh=None).config is plain
        with pytest.raises(ValueError, match="base_tp is 3, must divide the engine's 2 GPUs"):
            kind(config=config(name, {}), device_mesh=None)
    monkeypatch.delenv("SGLANG_PAT")
    apart = config(settings={}, disaggregation={"enabled": True})
    with pytest.raises(ValueError, match="rollout.disaggregation.enabled is true, must be false"):
        get_rollout_class("sglang")(config=apart, device_mesh=None)


def make_launch(monkeypatch, launch_server):
    """A function that launches a server; verl's part of that is ``launch_server``."""

    async def launch(given: RolloutConfig) -> AdaptiveServer:
        server = AdaptiveServer.__new__(AdaptiveServer)
        hf_config = SimpleNamespace(num_hidden_layers=3, num_experts_per_tok=2)
        server.config, server.model_config = given, SimpleNamespace(hf_config=hf_config)
        server.rollout_mode, server.replica_rank, server.global_steps = RolloutMode.HYBRID, 0, 1
        server._disaggregation_role = "null"
        await server.launch_server()
        return server

    monkeypatch.setattr(SGLangHttpServer, "launch_server", launch_server)
    monkeypatch.setattr(SGLangHttpServer, "lora_as_adapter", False)
    monkeypatch.setattr("sglang_pat.integrations.verl.replica.attach", lambda *_: None)
    return launch


@pytest.mark.parametrize("whole", ["", "routed", "stop"])
def test_a_response_comes_in_parts_if_it_could_go_on_from_its_tokens(monkeypatch, whole):
    """Nothing, the first token, then each four; the answer has all tokens, whatever came before."""
    monkeypatch.setattr(replicas, "PART_TOKENS", 4)

    async def generate_request(obj, request):
        for count in range(1, 12) if obj.stream else (11,):
            meta = {
                "finish_reason": {"type": "stop"} if count == 11 else None, "tp_from_token": [(0, 2)],
                "output_token_logprobs": [(-float(i), i, None) for i in range(count)],
            }  # fmt: skip
            yield {"output_ids": list(range(count)), "meta_info": meta}

    async def launch_server(self, **address):
        self.tokenizer_manager = SimpleNamespace(generate_request=generate_request, pat_send_round=lambda _: None)

    async def ask() -> list:
        given = config("sglang_pat", {}, enable_rollout_routing_replay=whole == "routed")
        given.max_model_len = 100
        server = await make_launch(monkeypatch, launch_server)(given)
        params = {"logprobs": True} | ({"stop": ["x"]} if whole == "stop" else {})
        request = {"prompt_ids": [1, 2, 3], "sampling_params": params, "request_id": "a"}
        return [part async for part in server.generate_parts(**request)]

    first, *parts, answer = asyncio.run(ask())
    assert not first.token_ids and first.stop_reason is None
    if whole:
        assert len(parts) == 3 and not any(part.token_ids for part in parts), "but it is known that it has begun"
        return
    assert [part.token_ids for part in parts] == [[0], [1, 2, 3, 4], [5, 6, 7, 8]]
    assert [part.log_probs for part in parts] == [[-float(i) for i in part.token_ids] for part in parts]
    assert all(part.extra_fields == {DEGREES: [(0, 2)], STEPS: ((0, 1),)} for part in parts)
    assert answer.token_ids == list(range(11)) and answer.stop_reason == "stop"


@pytest.mark.parametrize("skip", [True, False], ids=["skip_tokenizer_init", "tokenizer"])
def test_routed_experts_of_a_sample(skip, monkeypatch):
    """Through verl's own ``generate``, which by itself reads them as an older SGLang returned them."""
    rows = np.arange(5 * 3 * 2, dtype=np.int32)
    meta = {"finish_reason": {"type": "stop"}, "routed_experts": b64encode(rows.tobytes()).decode()}
    asked = []

    async def generate_request(obj, request):
        asked.append(obj.return_routed_experts)
        yield {"output_ids": [7, 8, 9], "meta_info": meta}

    async def launch_server(self, **address):
        self.tokenizer_manager = SimpleNamespace(generate_request=generate_request, pat_send_round=lambda _: None)

    async def launch_and_ask(given: RolloutConfig):
        return await (await launch(given)).generate([1, 2, 3], {}, "a")

    launch = make_launch(monkeypatch, launch_server)
    for routed in (True, False):
        given = config("sglang_pat", {}, enable_rollout_routing_replay=routed, skip_tokenizer_init=skip)
        given.max_model_len = 100
        output = asyncio.run(launch_and_ask(given))
        assert output.token_ids == [7, 8, 9] and asked.pop() == routed
        if routed:
            assert output.routed_experts.tolist() == rows.reshape(5, 3, 2).tolist()
    del meta["routed_experts"]
    given = config("sglang_pat", {}, enable_rollout_routing_replay=True, skip_tokenizer_init=skip)
    given.max_model_len = 100
    assert asyncio.run(launch_and_ask(given)).token_ids == [], "aborted while it waited: tokens without experts"


def test_answers_of_several_responses_pass_through():
    """A client over HTTP may ask for several (n=2, several prompts, a list to /generate): their answer is a list."""
    batch = [{"meta_info": {"id": "a"}}, {"meta_info": {"id": "b"}}]
    single = {"meta_info": {"tp_from_token": [(0, 1)]}}

    async def generate(*answers):
        for answer in answers:
            yield answer

    async def got(*answers):
        return [answer async for answer in _keep_meta_info(generate)(*answers)]

    async def asked():
        """Stands in for ``AdaptiveServer.generate``."""
        meta = {}
        _meta.set(meta)
        await got(single)
        return meta

    assert asyncio.run(got(batch, single)) == [batch, single]
    assert asyncio.run(asked()) == single["meta_info"]
