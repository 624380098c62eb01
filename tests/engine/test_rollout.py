"""Rounds on a real engine: ``POST /pat/rollout``."""

from __future__ import annotations

import json
import random

import pytest
import requests

from sglang_pat.testing.server import Server
from sglang_pat.testing.tokenizer import EOS_ID, STOP_ID

from .rollout_calls import STOPS, body, events, idle, one_round, post, prompt, reached, schedule


def test_a_round_of_groups(server, jobs):
    prompts = [prompt(0, index) for index in range(6)]
    groups, summary = one_round(server, body(prompts, job="groups", version=41))
    assert summary["returned"] == len(groups) == 3
    assert summary["kind"] == "short"
    assert summary["engine"] == {"running": 0, "waiting": 0, "tokens": 0, "retracted": 0}
    for group in groups:
        assert len(group["responses"]) == 2
        for response in group["responses"]:
            assert response["versions"] == [[41, len(response["token_ids"])]]
            assert len(response["logprobs"]) == len(response["token_ids"])
            assert response["finish_reason"] == "length" or response["token_ids"][-1] in {*STOPS, EOS_ID, STOP_ID}
    waiting = json.loads((jobs / "groups.json").read_text())["state"]["waiting"]
    assert len(waiting) == 2
    assert not {group["index"] for group in waiting} & {group["key"][1] for group in groups}


@pytest.fixture(params=["", "as on CUDA"])
def either(request, server, servers, llama) -> Server:
    """The server, and one as on CUDA."""
    return servers.as_on_cuda(llama) if request.param else server


def test_responses_are_those_of_generate(either):
    """Greedy: the same tokens as without rounds, through a switch."""
    server = either
    greedy = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
    prompts = [prompt(0, index) for index in range(3)]
    wanted = server.generate([{"input_ids": p["input_ids"], "sampling_params": greedy} for p in prompts])
    schedule(server, {"tp": 2, "arrived": 6, "step": 20})
    groups, _ = one_round(server, body(prompts, job="greedy", sampling_params=greedy, eta_prompts=1.0, eta_responses=1))
    assert [switch["requests"] for switch in reached(server)["switches"]] == [6]
    found = {group["key"][1]: [r["token_ids"] for r in group["responses"]] for group in groups}
    assert found == {index: [answer["output_ids"]] * 2 for index, answer in enumerate(wanted)}


def spread_by(outputs: list[list[int]]) -> tuple[int, list[int]]:
    """A token that would end one of ``outputs`` long before any other, and how long all would be then."""

    def lengths(token: int) -> list[int]:
        ends = [next((i for i, t in enumerate(o) if t in (token, EOS_ID, STOP_ID)), len(o) - 1) for o in outputs]
        return [end + 1 for end in ends]

    def gap(token: int) -> int:
        first, second = sorted(lengths(token))[:2]
        return second - first

    best = max(range(5, 503), key=gap)
    assert gap(best) > 30, lengths(best)
    return best, lengths(best)


def test_partial_goes_on_with_the_same_tokens(either):
    """Interrupted and resumed in later rounds, greedily: as if never interrupted; versions say when."""
    server = either
    greedy = {"temperature": 0, "max_new_tokens": 240, "ignore_eos": True}
    prompts = [prompt(0, index, tokens=10 + index) for index in range(4)]
    whole = server.generate([{"input_ids": p["input_ids"], "sampling_params": greedy} for p in prompts])
    stop, lengths = spread_by([answer["output_ids"] for answer in whole])
    # One response is shorter than the others by far: the first round, which it ends, interrupts these.
    greedy = {"temperature": 0, "max_new_tokens": 240, "stop_token_ids": [stop]}
    fields = {"mode": "partial", "num_prompts": 1, "num_responses": 1, "eta_prompts": 4.0, "eta_responses": 1}
    fields |= {"max_staleness": 9, "job": "partial", "end_of_epoch": 0, "sampling_params": greedy}
    found, interrupted = {}, 0
    for version, given in enumerate([prompts, [], [], []]):
        groups, summary = one_round(server, body(given, version=version, **fields))
        assert summary["thrown"] == 0
        interrupted += len(summary["aborted_lengths"])
        found |= {group["key"][1]: group["responses"][0] for group in groups}
    assert sorted(found) == [0, 1, 2, 3]
    for index, (answer, length) in enumerate(zip(whole, lengths, strict=True)):
        assert found[index]["token_ids"] == answer["output_ids"][:length]
        assert len(found[index]["logprobs"]) == length
        assert [version for version, _ in found[index]["versions"]] == sorted({v for v, _ in found[index]["versions"]})
    assert interrupted
    assert any(len(response["versions"]) > 1 for response in found.values())


@pytest.mark.parametrize("rounds", [16, pytest.param(50, marks=pytest.mark.soak)])
def test_rounds_with_switches_leave_no_kv(either, rounds):
    """Random lengths, aborts in every round, a switch in the middle of each; each prompt of an epoch once."""
    server = either
    idle(server)
    chance = random.Random(3)
    returned, kinds, aborted, given = [], [], 0, 0
    last = rounds * 4 // 5
    for number in range(rounds):
        count = 5 if number < last else 0
        prompts = [prompt(0, given + i) for i in range(count)]
        given += count
        end = {"end_of_epoch": 0} if number == last else {}
        # Some switches come while samples are sent, some while they are aborted, some after the round.
        point = {chance.choice(["step", "batch", "tokens"]): chance.randrange(60)}
        schedule(server, {"tp": 2 - number % 2, "arrived": chance.randrange(3), **point})
        groups, summary = one_round(server, body(prompts, job=f"rounds-{rounds}", max_deferrals=5, **end))
        returned += [group["key"][1] for group in groups]
        kinds.append(summary["kind"])
        aborted += len(summary["aborted_lengths"])
        engine = summary["engine"]
        assert (engine["running"], engine["waiting"], engine["tokens"]) == (0, 0, 0)
    schedule(server)
    idle(server)
    assert len(kinds) == rounds
    assert len(returned) == len(set(returned)) == sum(3 for kind in kinds)
    assert aborted > rounds
    assert {"short", "long"} <= set(kinds)
    assert server.status()["num_switches"] > rounds // 3


def test_a_client_that_goes_away_aborts_its_round(server):
    long = {"temperature": 0, "max_new_tokens": 2000, "ignore_eos": True}
    data = body([prompt(0, index) for index in range(5)], job="away", sampling_params=long)
    schedule(server, {"arrived": 5, "step": 5, "hold": True})
    stream = events(server, data)
    assert next(stream)["type"] == "begin"
    busy = post(server, data)
    assert busy.status_code == 409 and "round under way" in busy.text
    reached(server)
    stream.close()
    schedule(server)
    idle(server)
    groups, summary = one_round(server, body([], job="away"))
    assert summary["returned"] == 3, "its prompts are where they were"


def test_weights_between_rounds_and_in_one(server, llama):
    prompts = [prompt(0, index) for index in range(9)]
    one_round(server, body(prompts, job="weights", version=1))
    update = {"model_path": str(llama), "weight_version": "2"}
    assert requests.post(f"{server.url}/update_weights_from_disk", json=update).json()["success"]
    groups, _ = one_round(server, body([], job="weights", version=2))
    assert {r["versions"][0][0] for group in groups for r in group["responses"]} == {2}
    long = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}
    more = [prompt(0, 20 + index) for index in range(6)]
    schedule(server, {"arrived": 5, "step": 5, "hold": True})
    stream = events(server, body(more, job="weights", version=3, sampling_params=long))
    assert next(stream)["type"] == "begin"
    reached(server)
    assert requests.post(f"{server.url}/pause_generation", json={"mode": "in_place"}).status_code == 200
    schedule(server)
    # With requests alive SGLang's own flush would fail, and end the server.
    kept = update | {"flush_cache": False}
    assert requests.post(f"{server.url}/update_weights_from_disk", json=kept).json()["success"]
    assert requests.post(f"{server.url}/continue_generation", json={}).status_code == 200
    (error,) = stream
    assert error["type"] == "error" and "weights were updated" in error["message"]
    idle(server)
    groups, _ = one_round(server, body([], job="weights", version=4))
    assert len(groups) == 3


def test_verdicts(server):
    data = body([prompt(0, index) for index in range(8)], job="verdicts", filter_groups=True)
    kept, judged, useless = [], 0, 0
    for event in events(server, data):
        if event["type"] == "judge":
            judged += 1
            verdict = {"job": "verdicts", "key": event["key"], "number": event["number"], "keep": judged % 2 == 0}
            answer = requests.post(f"{server.url}/pat/rollout/verdict", json=verdict)
            assert answer.status_code == 200
            useless += answer.json()["counted"] and not verdict["keep"]
        elif event["type"] == "group":
            kept.append(event["key"])
    assert event["type"] == "round"
    assert event["filtered"] == useless > 0
    assert len(kept) == event["returned"] == 3


def test_a_job_can_be_dropped(server, jobs):
    one_round(server, body([prompt(0, index) for index in range(5)], job="dropped"))
    assert (jobs / "dropped.json").exists()
    assert requests.delete(f"{server.url}/pat/rollout/dropped").status_code == 200
    assert not (jobs / "dropped.json").exists()
    assert requests.delete(f"{server.url}/pat/rollout/dropped").status_code == 400
    groups, _ = one_round(server, body([prompt(0, index) for index in range(5)], job="dropped"))
    assert len(groups) == 3, "the same keys again: it is another job"


def test_rounds_one_right_after_the_other(server, jobs):
    """The next is asked for as soon as the last event is there; its state is on the disk by then."""
    for number in range(8):
        prompts = [prompt(0, 5 * number + index) for index in range(5)]
        _, summary = one_round(server, body(prompts, job="quick"))
        state = json.loads((jobs / "quick.json").read_text())["state"]
        assert state["round"] is None and len(state["waiting"]) == len(summary["ages"])


def test_metrics_of_rounds(server):
    one_round(server, body([prompt(0, index) for index in range(5)], job="metrics"))
    text = requests.get(f"{server.url}/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("sglang_pat_round"))

    def value(name: str, **labels: str) -> float:
        wanted = [f'{key}="{text}"' for key, text in ({"job": "metrics"} | labels).items()]
        (found,) = [v for key, v in lines.items() if key.startswith(name + "{") and all(w in key for w in wanted)]
        return float(found)

    assert value("sglang_pat_rounds_total", kind="short", outcome="done") == 1
    assert value("sglang_pat_round_prompts_total", became="returned") == 3
    assert value("sglang_pat_round_prompts_total", became="deferred") == 2
    assert value("sglang_pat_round_drawn_prompts") == 5
    assert value("sglang_pat_round_waiting_prompts") == 2
    assert value("sglang_pat_round_waiting_age_count") == 2
    assert value("sglang_pat_round_response_tokens_count", became="kept") == 6
    assert value("sglang_pat_round_response_tokens_count", became="aborted") == value(
        "sglang_pat_round_aborted_samples_total"
    )
    assert value("sglang_pat_round_kv_tokens_left") == 0
