"""Rounds on a real engine: ``POST /pat/rollout``, ``Engine.rollout``."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from sglang_pat.predict import profile as profiles
from sglang_pat.testing.server import Server, sent_event
from sglang_pat.testing.tokenizer import EOS_ID, STOP_ID

from .made_up import made_up

STOPS = list(range(100, 124))
"""Tokens that end a response: of 512 equally likely ones, so that it has some 20 tokens and sometimes 100."""

SAMPLING = {"temperature": 1.0, "max_new_tokens": 150, "stop_token_ids": STOPS}


@pytest.fixture
def folder(jobs) -> Path:
    return jobs


@pytest.fixture
def server(serving) -> Server:
    return serving


def prompt(epoch: int, index: int, tokens: int = 12) -> dict[str, Any]:
    return {"key": [epoch, index], "input_ids": [6 + (index * 97 + i * 31) % 490 for i in range(tokens)]}


def body(prompts: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    rules = {"num_prompts": 3, "num_responses": 2, "eta_prompts": 1.5, "eta_responses": 1.5}
    return {"prompts": prompts, "sampling_params": SAMPLING} | rules | fields


def post(server: Server, data: Any, **options: Any) -> requests.Response:
    data = data if isinstance(data, bytes) else json.dumps(data)
    return requests.post(f"{server.url}/pat/rollout", data=data, **options)


def events(server: Server, data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with post(server, data, stream=True) as response:
        assert response.status_code == 200, response.text
        for line in response.iter_lines():
            if (found := sent_event(line)) is not None:
                yield found


def one_round(server: Server, data: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Groups and summary."""
    begin, *groups, summary = events(server, data)
    assert begin["type"] == "begin"
    assert {group["type"] for group in groups} <= {"group"}
    assert summary["type"] == "round", summary
    return groups, summary


def idle(server: Server) -> None:
    """Nothing is in the engine, no request and no KV: SGLang's flush waits until it has ended what was aborted."""
    assert requests.post(f"{server.url}/flush_cache?timeout=500").status_code == 200
    status = server.status()
    assert status["requests"] == 0
    assert not any(group["kv_used"] for group in status["groups"]), status["groups"]


def schedule(server: Server, *entries: dict[str, Any]) -> None:
    assert server.post("/pat/schedule", entries).status_code == 200


def reached(server: Server) -> dict[str, Any]:
    """Wait until the schedule is over."""
    return server.get("/pat/schedule", timeout=300).json()


def test_a_round_of_groups(server, folder):
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
    waiting = json.loads((folder / "groups.json").read_text())["state"]["waiting"]
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
    kept, judged = [], 0
    for event in events(server, data):
        if event["type"] == "judge":
            judged += 1
            verdict = {"job": "verdicts", "key": event["key"], "keep": judged % 2 == 0}
            assert requests.post(f"{server.url}/pat/rollout/verdict", json=verdict).status_code == 200
        elif event["type"] == "group":
            kept.append(event["key"])
    assert event["type"] == "round"
    assert event["filtered"] == judged - judged // 2
    assert len(kept) == event["returned"] == judged // 2 == 3


def test_a_job_can_be_dropped(server, folder):
    one_round(server, body([prompt(0, index) for index in range(5)], job="dropped"))
    assert (folder / "dropped.json").exists()
    assert requests.delete(f"{server.url}/pat/rollout/dropped").status_code == 200
    assert not (folder / "dropped.json").exists()
    assert requests.delete(f"{server.url}/pat/rollout/dropped").status_code == 400
    groups, _ = one_round(server, body([prompt(0, index) for index in range(5)], job="dropped"))
    assert len(groups) == 3, "the same keys again: it is another job"


def test_rounds_one_right_after_the_other(server, folder):
    """The next is asked for as soon as the last event is there; its state is on the disk by then."""
    for number in range(8):
        prompts = [prompt(0, 5 * number + index) for index in range(5)]
        _, summary = one_round(server, body(prompts, job="quick"))
        state = json.loads((folder / "quick.json").read_text())["state"]
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


@pytest.fixture
def planned(servers, llama, deployment, tmp_path_factory) -> Server:
    """Little KV, and a profile by which tp1 is faster for many requests and tp2 for few."""
    path = tmp_path_factory.getbasetemp() / "planned.json"
    if not path.exists():
        profiles.save(made_up(deployment), path)
    flags = ("--schedule-conservativeness", "0.05", "--pat-profile", str(path))
    return servers.adaptive(llama, 2, *flags, max_total_tokens=700)


def by_planner(server: Server) -> list[int]:
    """Degrees to which a planner has switched."""
    return [record["to_tp"] for record in server.status()["switches"] if record["reason"] == "planner"]


def test_the_planner_raises_tp_when_kv_runs_out(planned, llama):
    """A pool so small that requests are put back: the second short round with more of them starts in tp2."""
    retracted, first = [], {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
    more = first | {"max_new_tokens": 120}
    rules = {"job": "planner", "planner": True, "eta_prompts": 1.0, "eta_responses": 1.0, "num_prompts": 8}
    for number, sampling in enumerate((first, more, more)):
        prompts = [prompt(0, 8 * number + index) for index in range(8)]
        schedule(planned, {"arrived": 16})
        _, summary = one_round(planned, body(prompts, sampling_params=sampling, **rules))
        retracted.append(summary["engine"]["retracted"])
        assert by_planner(planned) == ([2] if number == 2 else []), retracted
    assert retracted[1] > 1.05 * retracted[0], retracted
    # The floor is kept for a while, for the next round; a weight update goes to the base layout all the same.
    update = {"model_path": str(llama)}
    assert requests.post(f"{planned.url}/update_weights_from_disk", json=update).json()["success"]
    assert planned.status()["layout"]["tp"] == 1


def test_the_planner_starts_with_what_the_profile_says(planned):
    before = by_planner(planned)
    requests.delete(f"{planned.url}/pat/rollout/planner")
    rules = {"planner": True, "eta_prompts": 1.0, "eta_responses": 1.0, "num_responses": 1}
    sampling = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    for job, count, switched in (("many", 24, []), ("few", 1, [2])):
        prompts = [prompt(0, index) for index in range(count)]
        one_round(planned, body(prompts, job=job, num_prompts=count, sampling_params=sampling, **rules))
        assert by_planner(planned) == before + switched, job
        # And what it asked for with it.
        assert requests.delete(f"{planned.url}/pat/rollout/{job}").status_code == 200


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"eta_prompts": 0.5}, "eta_prompts"),
        ({"eta_responses": 0}, "eta_responses"),
        ({"num_prompts": 0}, "num_prompts"),
        ({"num_responses": -1}, "num_responses"),
        ({"num_prompts": "three"}, "num_prompts"),
        ({"mode": "loose"}, "mode"),
        ({"prompts": []}, "prompts"),
        ({"prompts": [{"key": [0, 0], "input_ids": []}]}, "prompts[0].input_ids"),
        ({"prompts": [{"key": [0, 0]}]}, "prompts[0]"),
        ({"prompts": [{"key": [0, 0], "input_ids": [5, 99999]}]}, "prompts[0].input_ids"),
        ({"prompts": [prompt(0, 0), prompt(0, 0)]}, "key [0, 0]"),
        ({"prompts": [prompt(0, 0), prompt(0, 1, tokens=9000)]}, "prompts[1].input_ids"),
        ({"prompts": [{"key": [0], "input_ids": [5]}]}, "prompts[0].key"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params"),
        ({"sampling_params": {"heat": 1}}, "sampling_params"),
        ({"sampling_params": {"n": 4}}, "sampling_params.n"),
        ({"sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"sampling_params": {"custom_params": "abc"}}, "custom_params"),
        ({"sampling_params": {"logit_bias": {"5": "x"}}}, "logit_bias"),
        ({"sampling_params": {"logit_bias": {"99999": 1}}}, "sampling_params: token 99999"),
        ({"sampling_params": {"stop_token_ids": [10000000], "min_new_tokens": 1}}, "sampling_params: token 10000000"),
        ({"sampling_params": {"stop": 5}}, "stop"),
        ({"sampling_params": {"stop_regex": "("}}, "sampling_params"),
        ({"sampling_params": {"sampling_seed": "x"}}, "sampling_seed"),
        ({"sampling_params": {"min_new_tokens": 9, "max_new_tokens": 3}}, "min_new_tokens"),
        ({"mode": "partial", "eta_responses": 1, "sampling_params": {"regex": "a"}}, "sampling_params.regex"),
        ({"mode": "partial", "eta_responses": 1.5}, "eta_responses"),
        ({"etaa": 1.5}, "etaa"),
        ({"job": "../../etc/passwd"}, "job"),
        ({"max_deferrals": -1}, "max_deferrals"),
    ],
)
def test_bad_bodies(server, change, said):
    answer = post(server, body([prompt(0, index) for index in range(6)], job="bad") | change)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert said in message and "\n" not in message


DEEP = b'{"sampling_params": {"custom_params": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}"


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b'{"prompts": 3}', DEEP], ids=range(6))
def test_no_bodies(server, data):
    answer = post(server, data)
    assert answer.status_code == 400
    assert "\n" not in answer.json()["error"]["message"]


def test_bad_bodies_did_no_harm(server):
    groups, _ = one_round(server, body([prompt(0, index) for index in range(6)], job="bad"))
    assert len(groups) == 3
    assert requests.post(f"{server.url}/pat/rollout/verdict", json={"key": [0, 0]}).status_code == 400
    idle(server)


SCRIPT = """
import sglang_pat
from sglang_pat.sglang.launch import processes
from sglang_pat.admission.admitter import Admitter
from sglang_pat.admission.records import Group, Summary
from sglang_pat.admission.rules import Rules

if __name__ == "__main__":
    processes.fork_here()
    engine = sglang_pat.Engine(
        model_path={model!r}, tp_size=1, dp_size=2, adaptive_tp=True, pat_policy="schedule", dtype="float32",
        max_total_tokens=20000, log_level="error",
    )
    sampling = {{"temperature": 1.0, "max_new_tokens": 100, "stop_token_ids": list(range(100, 124))}}

    def check_idle():
        # The flush waits until the ranks have ended what was aborted; their load is reported before it is answered.
        assert engine.loop.run_until_complete(engine.tokenizer_manager.flush_cache(timeout_s=60)).success
        assert engine.status()["requests"] == 0

    for mode in ("strict", "reorder", "partial"):
        rules = Rules(mode=mode, num_prompts=3, num_responses=2, eta_prompts=1.5, max_staleness=2, filter_groups=True)
        admitter = Admitter(rules)
        admitter.feed([((0, i), {{"input_ids": [10 + i, 20, 30 + i]}}) for i in range(10)], end_of=0)
        useless = []

        def judge(group):
            if group.index % 4 == 3:
                useless.append(group.index)
            return group.index % 4 != 3

        returned, rounds = [], 0
        while admitter.state.fresh or admitter.state.waiting:
            for event in engine.rollout(admitter, sampling, version=rounds, judge=judge):
                if isinstance(event, Group):
                    returned.append(event.index)
            assert isinstance(event, Summary)
            rounds += 1
        assert sorted(returned + useless) == list(range(10)), (mode, returned, useless)
        check_idle()
        print(mode, "rounds", rounds)
    admitter = Admitter(Rules(num_prompts=2, num_responses=1))
    admitter.feed([((0, i), {{"input_ids": [10 + i, 20, 30 + i]}}) for i in range(4)])
    events = engine.rollout(admitter, sampling, version=0)
    next(events)
    events.close()
    assert admitter.state.round is None
    assert len(admitter.state.fresh) + len(admitter.state.waiting) + admitter.state.returned == 4
    check_idle()
    assert not engine.tokenizer_manager.rid_to_state
    engine.shutdown()
    print("done")
"""


def test_engine_rollout(servers, llama, tmp_path):
    (tmp_path / "rounds_of_python.py").write_text(SCRIPT.format(model=str(llama)))
    found = servers.run("rounds_of_python", env={"PYTHONPATH": str(tmp_path)}, seconds=500)
    assert found.returncode == 0, found.stderr[-3000:]
    assert found.stdout.strip().endswith("done")
    assert all(f"{mode} rounds" in found.stdout for mode in ("strict", "reorder", "partial"))
