"""Drafts change nothing of what comes out (``--pat-speculate``), but the number of steps that it takes.

A prompt is sent twice: the second response is drafted from the first.  Random schedules of switches with drafts are in
``test_same_tokens.py``.
"""

from __future__ import annotations

import asyncio
import random
import re

import msgspec
import numpy as np
import pytest
import requests

from sglang_pat.predict import profile as profiles
from sglang_pat.testing import models
from sglang_pat.testing.server import Server

from .conftest import MODELS, long, make_model
from .features import PENALISED
from .made_up import make_profile
from .stock_answers import check_whole
from .streams import body, check_idle, hold, post, prompt, through, tokens
from .test_routed_experts import FLAG, ask, check_same
from .test_sampling import assert_distribution, count_places
from .weight_updates import check_success, make_body, update_from_disk

DRAFTS = 4
FLAGS = ("--pat-speculate", str(DRAFTS), "--enable-metrics")
ONE_BY_ONE = PENALISED | {"regex", "json_schema"}
"""Features with which a token changes how the next one is sampled: nothing is drafted."""


@pytest.fixture(params=["plain", long("as on CUDA")])
def server(request, servers, llama) -> Server:
    """Two ranks, with either of SGLang's event loops."""
    return servers.adaptive(llama, 2, *FLAGS) if request.param == "plain" else servers.as_on_cuda(llama, 2, *FLAGS)


def count(answer: dict, what: str) -> int:
    return answer["meta_info"][f"spec_{what}"]


def test_what_ended_elsewhere_is_known(server, stock):
    """A response of the other replica, and one from before a merge."""
    server.reconfigure(1)
    asked = body(33, 300)
    (first,) = server.generate([asked])
    both = server.generate([asked] * 2)  # one on each replica
    assert tokens(both) == [first["output_ids"]] * 2
    assert min(count(answer, "num_correct_drafts") for answer in both) > 60
    server.reconfigure(2)
    (merged,) = server.generate([asked])
    assert merged["output_ids"] == first["output_ids"] and count(merged, "num_correct_drafts") > 60
    check_idle(server)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_known_response_takes_few_steps(server, stock, tp):
    server.reconfigure(tp)
    asked = body(30 + tp, 100)
    # As many at once as make each replica see one.
    first, *_ = server.generate([asked] * 4)
    others = [server.generate([asked])[0] for _ in range(2)]
    assert tokens(others) == [first["output_ids"]] * 2
    for answer in others:
        proposed, right = count(answer, "num_proposed_drafts"), count(answer, "num_correct_drafts")
        assert 75 <= right <= proposed <= DRAFTS * count(answer, "verify_ct")
        # Nothing is known of what comes before the first token; the last one needs no draft.
        assert 100 // (DRAFTS + 1) <= count(answer, "verify_ct") <= 26
    check_idle(server)
    totals, metrics = server.status()["totals"], requests.get(f"{server.url}/metrics").text
    found = {name: float(value) for name, value in re.findall(r"^sglang_pat_(\w*drafts)_total (\S+)$", metrics, re.M)}
    assert found == {name: totals[name] for name in ("drafts", "right_drafts")}


@pytest.mark.parametrize("kind", ["plain", long("as on CUDA")])
def test_features_are_those_of_stock(servers, llama, stock, kind):
    """Every feature of generation, twice: the second time its tokens are known."""
    server = servers.adaptive(llama, 2, *FLAGS) if kind == "plain" else servers.as_on_cuda(llama, 2, *FLAGS)
    names = [name for name in stock.bodies if kind == "plain" or name not in PENALISED]
    for _ in range(2):
        # All at once: requests that have drafts beside others that have none.
        answers = dict(zip(names, server.generate([stock.bodies[name] for name in names]), strict=True))
        for name, answer in answers.items():
            check_whole(stock, answer, name)
            if name in ONE_BY_ONE:
                assert count(answer, "num_proposed_drafts") == 0, name
    server.reconfigure(2)
    (again,) = [server.generate([stock.bodies["plain"]])[0] for _ in range(2)][1:]
    check_whole(stock, again, "plain")
    assert count(again, "num_correct_drafts") > again["meta_info"]["completion_tokens"] / 2
    check_idle(server)


def test_a_stop_in_the_middle_of_right_drafts(server, stock):
    """What comes after it was checked in the same step, and nobody gets to see it."""
    whole = body(40, 60)
    server.generate([whole])
    (known,) = server.generate([whole])
    for end in range(30, 36):
        token = known["output_ids"][end]
        at = known["output_ids"].index(token)
        stop = body(40, 60, stop_token_ids=[token], ignore_eos=False, return_logprob=True)
        (answer,) = server.generate([stop])
        assert answer["output_ids"] == known["output_ids"][: at + 1]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
        assert len(answer["meta_info"]["output_token_logprobs"]) == answer["meta_info"]["completion_tokens"] == at + 1
    check_idle(server)


def test_logprobs_are_those_of_a_prefill(servers, flat):
    """Each row attends to the drafts before it as to tokens: within 1e-5 of themselves."""
    server = servers.adaptive(flat, 2, *FLAGS)
    bodies = [body(80 + i, 60, return_logprob=True) for i in range(4)]
    answers = [server.generate(bodies) for _ in range(3)][-1]
    assert sum(count(answer, "num_correct_drafts") for answer in answers) > 100
    for one, answer in zip(bodies, answers, strict=True):
        whole = one["input_ids"] + answer["output_ids"]
        score = body(0, 1, return_logprob=True, logprob_start_len=0) | {"input_ids": whole}
        (scored,) = servers.stock(flat).generate([score])
        wanted = [logprob for logprob, *_ in scored["meta_info"]["input_token_logprobs"][len(one["input_ids"]) :]]
        found = [logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]]
        assert np.allclose(found, wanted, rtol=1e-5, atol=0)


def test_hidden_states_of_accepted_drafts(servers, llama):
    server = servers.adaptive(llama, 2, *FLAGS, "--enable-return-hidden-states")
    server.reconfigure(2)
    asked = body(41, 40) | {"return_hidden_states": True}
    first, second = (server.generate([asked])[0] for _ in range(2))
    assert count(second, "num_correct_drafts") > 20
    plain, drafted = (answer["meta_info"]["hidden_states"][-39:] for answer in (first, second))
    assert np.allclose(np.array(plain), np.array(drafted), atol=1e-4)


@pytest.mark.long
def test_routed_experts_of_accepted_drafts(servers):
    model = make_model("qwen3_moe")
    server = servers.adaptive(model, 2, FLAG, *FLAGS, "--chunked-prefill-size", "64", "--disable-radix-cache")
    server.reconfigure(2)
    bodies = [ask(seed, 60) for seed in range(3)]
    first = server.generate(bodies)
    assert all(count(answer, "num_correct_drafts") < 10 for answer in first)
    second = server.generate(bodies)
    assert all(count(answer, "num_correct_drafts") > 30 for answer in second)
    check_same(second, first)
    check_idle(server)


@pytest.mark.long
def test_distribution_of_accepted_tokens(servers, llama):
    """Chi-square test of tokens of which many were drafted from other responses to their prompts."""
    server, rng = servers.adaptive(llama, 2, *FLAGS), random.Random(1)
    # Short ones: responses of such a model that have gone apart have no context in common any more.
    bodies = [body(seed, 12, temperature=0.5, n=24) for seed in range(12)]
    server.generate(bodies)
    answers = [copy for one in bodies for copy in server.generate([one])[0]]
    right, drawn = sum(count(answer, "num_correct_drafts") for answer in answers), 12 * len(answers)
    assert right > 0.1 * drawn, f"{right} of {drawn}"
    prompts = [prompt(seed) for seed in range(12) for _ in range(24)]
    cells = count_places(servers.stock(llama), prompts, tokens(answers), rng, 0.5)
    assert_distribution(cells, [1 / len(cells)] * len(cells), f"{drawn} tokens, {right} of them drafted")


async def test_a_pause_and_an_abort_find_plain_requests(server, session):
    """Requests that are held between two steps, while others come and go."""
    bodies = [body(seed, 80) for seed in (50, 51)]
    wanted = tokens(await asyncio.to_thread(server.generate, bodies))
    work = await hold(server, session, bodies, step=4)
    for path, data in (("/pause_generation", {"mode": "in_place"}), ("/continue_generation", {})):
        async with session.post(server.url + path, json=data) as response:
            assert response.status == 200, await response.text()
    await server.set_schedule(session, {"arrived": 1, "step": 3, "hold": True})
    extra = asyncio.ensure_future(server.generate_one(session, body(52, 3000, rid="gone")))
    await server.wait_for_schedule(session)
    async with session.post(server.url + "/abort_request", json={"rid": "gone"}) as response:
        assert response.status == 200
    await server.set_schedule(session)
    assert tokens([await one for one in work]) == wanted
    assert (await extra)["meta_info"]["finish_reason"]["type"] == "abort"
    await asyncio.to_thread(check_idle, server)


@pytest.mark.long
async def test_requests_are_aborted_that_wait_with_tokens(servers, flat, session):
    """Four of eight responses to a prompt wait after a merge: all ranks draft alike from those that are aborted."""
    server = servers.adaptive(flat, 2, *FLAGS, "--max-running-requests", "4")
    bodies = [body(60, 300, rid=f"a-{i}", logit_bias={str(300 + i): 2.0}) for i in range(8)]
    wanted = tokens(await asyncio.to_thread(servers.stock(flat).generate, bodies[:2]))
    await asyncio.to_thread(server.reconfigure, 1)
    work = await hold(server, session, bodies, step=100)
    await server.set_schedule(session, {"tp": 2}, {"step": 102, "hold": True})
    (record,) = (await server.wait_for_schedule(session))["switches"]
    assert record["parked"] == 4, record
    for one in bodies[2:]:
        async with session.post(server.url + "/abort_request", json={"rid": one["rid"]}) as response:
            assert response.status == 200
    await server.set_schedule(session)
    answers = [await one for one in work]
    assert tokens(answers[:2]) == wanted
    assert min(count(answer, "num_proposed_drafts") for answer in answers[:2]) > 20
    await asyncio.to_thread(check_idle, server)


async def test_an_update_in_the_middle_of_right_drafts(servers, marker, session):
    """Drafts of the old weights' token are checked with the new weights, and are wrong."""
    old, new = 100, 200
    server = servers.adaptive(marker(old), 2, *FLAGS)
    update_from_disk(server, marker, old)  # another test may have been here
    (before,) = await asyncio.to_thread(server.generate, [make_body(50, 60)])
    assert set(before["output_ids"]) == {old} and count(before, "num_correct_drafts") > 30
    # Four steps give some twenty tokens.
    work = await hold(server, session, [make_body(50 + i, 200) for i in range(4)], step=4)
    assert await post(session, server, "/pause_generation", {"mode": "retract"}) == 200
    await server.set_schedule(session)
    check_success(await asyncio.to_thread(update_from_disk, server, marker, new, flush_cache=True))
    assert await post(session, server, "/continue_generation", {}) == 200
    for answer in await asyncio.gather(*work):
        ids = answer["output_ids"]
        changed = ids.index(new)
        assert 5 <= changed <= 21 and ids == [old] * changed + [new] * (200 - changed)
        assert count(answer, "num_correct_drafts") > 100
    await asyncio.to_thread(check_idle, server)


@pytest.mark.parametrize("kind", ["plain", long("as on CUDA")])
async def test_a_trained_drafter(servers, marker, session, kind):
    """The next tokens are known without any having been seen, also at once after a switch."""
    head = models.make_head(MODELS / "head300", drafts=[300], layers=[0], inner=8)
    flags = (*FLAGS, "--pat-draft-model", str(head))
    server = servers.adaptive(marker(300), 2, *flags) if kind == "plain" else servers.as_on_cuda(marker(300), 2, *flags)
    (answer,) = await asyncio.to_thread(server.generate, [make_body(50, 61)])
    assert answer["output_ids"] == [300] * 61
    found = [count(answer, what) for what in ("verify_ct", "num_proposed_drafts", "num_correct_drafts")]
    assert found == [12, 48, 48], "of five tokens each; one came with the prompt"
    # A rank that knew nothing of the request would make one plain step: no text has these tokens yet.
    for layouts in ({1: 2}, {1: 1}, {1: 2, 2: 1, 3: 2, 4: 1}):
        (answer,), records = await asyncio.to_thread(through, server, [make_body(50, 61)], layouts, at="batch")
        found = [count(answer, what) for what in ("verify_ct", "num_proposed_drafts", "num_correct_drafts")]
        assert answer["output_ids"] == [300] * 61 and found == [12, 48, 48]
        assert [record["migrated"] for record in records] == [1] * len(layouts)
    await asyncio.to_thread(check_idle, server)


def test_a_trained_drafter_where_it_pays(servers, marker, deployment, tmp_path):
    """Drafts of a small head, in a profile in which rows cost next to nothing."""
    path = tmp_path / "profile.json"
    small = msgspec.structs.replace(deployment, model="LlamaForCausalLM L2 H64 heads8/4x8 I192 V503")
    profiles.save(make_profile(small, tp2_with_16=0.012), path)
    flags = ("--pat-speculate", "auto", "--pat-profile", str(path))
    head = models.make_head(MODELS / "head300", drafts=[300], layers=[0], inner=8)
    server = servers.adaptive(marker(300), 2, *flags, "--pat-draft-model", str(head))
    (answer,) = server.generate([make_body(50, 61)])
    assert answer["output_ids"] == [300] * 61
    proposed, right = (count(answer, what) for what in ("num_proposed_drafts", "num_correct_drafts"))
    assert proposed == right > 40
    assert server.status()["totals"]["seconds_saved"] > 0


@pytest.mark.long
@pytest.mark.parametrize(("rows", "given"), [("cheap", "auto"), ("dear", str(DRAFTS))])
def test_as_many_drafts_as_pay(servers, llama, deployment, tmp_path, rows, given):
    """Two profiles: in one a step of sixteen requests takes 1.2 times as long as one of a single request, in the other
    one sixteen times.  With a profile a given number is the most."""
    made, path = make_profile(deployment, tp2_with_16=0.012), tmp_path / "profile.json"
    if rows == "dear":
        decode = tuple(msgspec.structs.replace(point, seconds=0.01 * point.batch) for point in made.decode)
        made = msgspec.structs.replace(made, decode=decode)
    profiles.save(made, path)
    server = servers.adaptive(llama, 2, "--pat-speculate", given, "--pat-profile", str(path))
    server.reconfigure(2)
    known = body(70, 200)
    first, second, third = [server.generate([known])[0] for _ in range(3)]
    (plain,) = server.generate([body(70, 200, custom_params={"pat_drafts": 0})])
    assert tokens([second, third, plain]) == [first["output_ids"]] * 3
    assert count(plain, "num_proposed_drafts") == 0
    totals = server.status()["totals"]
    if rows == "dear":
        assert [count(answer, "num_proposed_drafts") for answer in (second, third)] == [0, 0]
        assert totals["draft_steps"] == 0 < totals["decode_steps"] <= 4 * 199
        return
    assert 0 < totals["draft_steps"] < totals["decode_steps"] < 4 * 199
    assert totals["seconds_saved"] > 1, "of 2 to 4 s"
    assert count(third, "num_correct_drafts") > 140 and count(third, "verify_ct") < 50
    # Drafts for what was never said are wrong, and soon there are few.
    new = [server.generate([body(71 + i, 200)])[0] for i in range(3)]
    assert count(new[2], "num_proposed_drafts") < 60
    # That says nothing of what was said before.
    (again,) = server.generate([known])
    assert again["output_ids"] == first["output_ids"] and count(again, "num_correct_drafts") > 140
