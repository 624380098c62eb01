"""What slime, miles, NeMo-RL and AReaL ask of a server in a step, in their order, with their bodies, as it switches.

Each answer is checked: its status, and by the marker models which weights generated its tokens.  The frameworks
themselves are not run here; what has run of them is in docs/integrate.md.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from sglang_pat.host.adapter import FOLDER
from sglang_pat.testing.server import Server

from .conftest import long
from .marker_models import make_marker_state_dict
from .streams import hold
from .weight_updates import A, B, C, Trainer, check_success, flatten, read_degree, serialize

LIMIT = 120
"""Tokens of a response."""
STEP = 60
"""Decode step at which the engine is held, after it has switched."""
PROMPTS = [[50 + i, 8, 9, 10] for i in range(4)]
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": LIMIT, "ignore_eos": True}
SLIME = {
    "stop": None, "stop_token_ids": None, "skip_special_tokens": False, "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}  # fmt: skip
AREAL = {"stop_token_ids": [], "skip_special_tokens": True, "frequency_penalty": 0.0, "temperature": 0.0}


def make_body(prompt: list[int], options: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"input_ids": prompt, "sampling_params": SAMPLING | options, "return_logprob": True} | fields


def tokens(answer: dict[str, Any]) -> list[int]:
    """The tokens as all three read them, with a log-prob each."""
    pairs = answer["meta_info"]["output_token_logprobs"]
    assert all(logprob <= 0 for logprob, _, _ in pairs)
    return [token for _, token, _ in pairs]


def ok(response: Any) -> Any:
    assert response.status_code == 200, response.text
    return response


async def act_in_the_tail(server: Server, bodies: list[dict[str, Any]], act: Any) -> list[dict[str, Any]]:
    """The answers; the engine merges at a step, and ``act`` is called right then, while all requests decode."""
    async with server.session() as session:
        work = await hold(server, session, bodies, step=STEP, tp=2)
        released = asyncio.ensure_future(asyncio.to_thread(act))
        await server.set_schedule(session)
        await released
        return await asyncio.gather(*work)


def rollout(server: Server, options: dict[str, Any], said: int, **fields: Any) -> None:
    """A batch with a merge in its middle."""
    answers = asyncio.run(
        act_in_the_tail(server, [make_body(prompt, options, **fields) for prompt in PROMPTS], lambda: None)
    )
    assert [tokens(answer) for answer in answers] == [[said] * LIMIT] * len(PROMPTS)
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} == {"length"}
    assert read_degree(server) == 2


def test_slime_with_partial_rollout(two):
    """Servers started by others, GPUs of their own: a rollout is aborted once enough is there, and goes on with the
    next weights."""
    server = two.start_in(1)
    ok(server.get("/health_generate"))
    ok(server.get("/flush_cache"))
    info = ok(server.get("/get_server_info")).json()
    assert (info["tp_size"], info["dp_size"], info["pp_size"], info["nnodes"]) == (2, 1, 1, 1)
    trainer = Trainer(server, 2)

    def abort() -> None:
        while True:  # slime waits three seconds in between
            ok(server.post("/abort_request", {"abort_all": True}))
            loads = ok(server.get("/v1/loads?include=core,disagg,queues")).json()["loads"]
            if not sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads):
                return

    for old, new, version in ((A, B, "1"), (B, C, "2")):
        rollout(server, SLIME, old)
        server.reconfigure(1)
        parts = asyncio.run(act_in_the_tail(server, [make_body(prompt, SLIME) for prompt in PROMPTS], abort))
        assert {part["meta_info"]["finish_reason"]["type"] for part in parts} == {"abort"}
        assert all(STEP <= len(tokens(part)) < LIMIT and set(tokens(part)) == {old} for part in parts)
        ok(server.post("/pause_generation", {}))
        ok(server.get("/flush_cache"))
        trainer.send(new, flush_cache=False, weight_version=version)
        ok(server.post("/continue_generation", {}))
        assert ok(server.get("/model_info")).json()["weight_version"] == version
        rest = [
            make_body([*prompt, *tokens(part)], SLIME | {"max_new_tokens": LIMIT - len(tokens(part))})
            for prompt, part in zip(PROMPTS, parts, strict=True)
        ]
        for part, whole in zip(parts, server.generate(rest), strict=True):
            assert tokens(whole) == [new] * (LIMIT - len(tokens(part)))
    trainer.close()
    log = server.log_text()
    assert log.count("adaptive engine of 2 ranks: begins in tp1×dp2, may switch to tp2×dp1; policy schedule") == 1
    # The last step: a rollout of four that merged, four that merged and were aborted, and back; and the four before.
    assert re.findall(r"step: (\d+) requests in .* in tp1, .* in tp2\), (\d+) switches,", log)[-1] == ("12", "4")


FRAMEWORKS = ["slime", *(["NeMo-RL"] if FOLDER == "v0_5_12" else [long("NeMo-RL"), "NeMo-RL in sessions"])]
"""NeMo-RL updates in sessions since its pull request 3612, with an SGLang that has them."""


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_slime_and_nemo_rl_on_the_trainers_gpus(two, framework):
    """Memory is given away after a rollout and taken back by tags, around an update in buckets."""
    server = two.start_in(1)
    kv = ["kv_cache", "cuda_graph"]
    for old, new, version in ((A, B, "1"), (B, C, "2")):
        rollout(server, SLIME, old)
        ok(server.get("/flush_cache"))
        if framework == "slime":
            ok(server.post("/release_memory_occupation", {}))
        else:
            for tags in (kv, ["weights"]):
                ok(server.get("/flush_cache"))
                ok(server.post("/release_memory_occupation", {"tags": tags}))
        assert read_degree(server) == 1
        ok(server.post("/resume_memory_occupation", {"tags": ["weights"]}))
        if "sessions" in framework:
            check_success(server.post("/begin_weight_update", {"selector": "all"}))
            assert server.post("/begin_weight_update", {"selector": "all"}).status_code == 400, "it has begun"
        named = list(make_marker_state_dict(new).items())
        for part in (named[:7], named[7:]):
            body = {"serialized_named_tensors": [serialize(flatten(part))] * 2, "load_format": "flattened_bucket"}
            body |= {"flush_cache": False, "weight_version": version}
            check_success(server.post("/update_weights_from_tensor", body))
        if "sessions" in framework:
            check_success(server.post("/end_weight_update", {}))
            assert server.post("/end_weight_update", {}).status_code == 400, "it has ended"
        ok(server.get("/flush_cache"))
        ok(server.post("/resume_memory_occupation", {"tags": kv}))
        assert ok(server.get("/model_info")).json()["weight_version"] == version
    rollout(server, SLIME, C)


@pytest.mark.skipif(FOLDER == "v0_5_12", reason="SGLang 0.5.12 has no update sessions")
def test_miles_updates_in_the_middle_of_a_round(two):
    """Requests wait, retracted, for a session of updates, and go on with new weights, as in asynchronous rollouts."""
    server = two.start_in(1)
    ok(server.get("/health_generate"))
    ok(server.get("/flush_cache"))
    assert ok(server.get("/server_info")).json()["tp_size"] == 2
    trainer = Trainer(server, 2)

    def update(token: int, version: str) -> None:
        ok(server.post("/pause_generation", {"mode": "retract"}))
        ok(server.get("/flush_cache"))
        check_success(server.post("/begin_weight_update", {"selector": "all"}))
        trainer.send(token, flush_cache=False, selector="all", weight_version=version)
        check_success(server.post("/update_weight_version", {"new_version": version, "abort_all_requests": False}))
        check_success(server.post("/end_weight_update", {}))
        ok(server.post("/continue_generation", {}))

    for old, new, version in ((A, B, "1"), (B, C, "2")):
        bodies = [make_body(prompt, SLIME) for prompt in PROMPTS]
        answers = asyncio.run(act_in_the_tail(server, bodies, lambda new=new, version=version: update(new, version)))
        for answer in answers:
            kept = tokens(answer).count(old)
            assert STEP <= kept < LIMIT and tokens(answer) == [old] * kept + [new] * (LIMIT - kept)
        assert ok(server.get("/model_info")).json()["weight_version"] == version
    trainer.close()
    rollout(server, SLIME, C)


def test_areal(two, marker):
    """AReaL interrupts its requests for an update, and sends them again with what they had."""
    server = two.start_in(1)
    ok(server.get("/health"))
    trainer = Trainer(server, 2)

    def interrupt(token: int, disk: bool) -> None:
        ok(server.post("/pause_generation", {"mode": "retract"}))
        if disk:
            check_success(
                server.post("/update_weights_from_disk", {"model_path": str(marker(token)), "abort_all_requests": True})
            )
        else:
            trainer.send(token, abort_all_requests=True)
        ok(server.post("/continue_generation", {}))

    for old, new, disk in ((A, B, False), (B, C, True)):
        bodies = [make_body(prompt, AREAL, image_data=None, stream=False) for prompt in PROMPTS]
        parts = asyncio.run(act_in_the_tail(server, bodies, lambda new=new, disk=disk: interrupt(new, disk)))
        assert {part["meta_info"]["finish_reason"]["type"] for part in parts} == {"abort"}
        # What was retracted is answered with the tokens that the server had been sent, every 50; as in stock SGLang.
        assert all(len(tokens(part)) < LIMIT and set(tokens(part)) <= {old} for part in parts)
        assert read_degree(server) == 1
        rest = [
            make_body([*prompt, *tokens(part)], AREAL | {"max_new_tokens": LIMIT - len(tokens(part))}, stream=False)
            for prompt, part in zip(PROMPTS, parts, strict=True)
        ]
        for part, whole in zip(parts, server.generate(rest), strict=True):
            assert tokens(whole) == [new] * (LIMIT - len(tokens(part)))
    trainer.close()
    rollout(server, AREAL, C, stream=False)
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        for tags in (["kv_cache"], ["weights"]):
            ok(server.post(path, {"tags": tags}))
    rollout(server, AREAL, C, stream=False)
