"""Rounds of a client on a real server: :class:`RolloutClient`; clients that die, and trainers that go on."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading

import pytest

from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.client import RolloutClient
from sglang_pat.rollout.records import Group
from sglang_pat.rollout.rounds import WeightsChanged
from sglang_pat.testing.server import Server
from sglang_pat.testing.tokenizer import EOS_ID, STOP_ID

from .conftest import long
from .rollout_calls import STOPS, admitter, prompts, run_round, schedule, tokens, wait_for_schedule
from .streams import GREEDY, check_idle, wait_for_status


@pytest.fixture(params=[long(""), "as on CUDA"])
def either(request, server, servers, llama) -> Server:
    """The server, and one as on CUDA."""
    return servers.as_on_cuda(llama) if request.param else server


def test_a_round_of_groups(server):
    mine = admitter(*range(6), eta_responses=1.5)
    groups, summary = run_round(server, mine, version=41)
    assert summary.returned == len(groups) == 3 and summary.kind == "short"
    for group in groups:
        for output in [sample.output for sample in group.list_kept()]:
            assert output.list_versions() == [41] * len(output.token_ids)
            assert len(output.logprobs) == len(output.token_ids)
            assert output.text or len(output.token_ids) == 1, "only what ends a response has no text"
            assert output.finish_reason == "length" or output.token_ids[-1] in {*STOPS, EOS_ID, STOP_ID}
    assert len(mine.state.waiting) == 2
    assert not {group.index for group in mine.state.waiting} & {group.index for group in groups}
    check_idle(server)


def test_responses_are_those_of_generate(either):
    """Greedy: the same tokens as without rounds, through a switch."""
    server = either
    greedy = GREEDY | {"max_new_tokens": 60}
    wanted = server.generate([prompt | {"sampling_params": greedy} for _, prompt in prompts(0, 1, 2)])
    schedule(server, {"tp": 2, "arrived": 6, "step": 20})
    groups, _ = run_round(server, admitter(0, 1, 2, eta_prompts=1.0), greedy)
    assert [switch["requests"] for switch in wait_for_schedule(server)["switches"]] == [6]
    assert tokens(groups) == {(i, n): answer["output_ids"] for i, answer in enumerate(wanted) for n in range(2)}


def choose_end(outputs: list[list[int]]) -> tuple[int, list[int]]:
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
    greedy = GREEDY | {"max_new_tokens": 240}
    given = [prompts(index, tokens=10 + index)[0] for index in range(4)]
    whole = server.generate([prompt | {"sampling_params": greedy} for _, prompt in given])
    stop, lengths = choose_end([answer["output_ids"] for answer in whole])
    # One response is shorter than the others by far: the first round, which it ends, interrupts these.
    greedy = {"temperature": 0, "max_new_tokens": 240, "stop_token_ids": [stop]}
    mine = admitter(mode="partial", num_prompts=1, num_responses=1, eta_prompts=4.0, max_staleness=9)
    mine.feed(given, end_of=0)
    found, interrupted = {}, 0
    for version in range(4):
        groups, summary = run_round(server, mine, greedy, version=version)
        assert summary.thrown == 0
        interrupted += len(summary.aborted_lengths)
        found |= {group.index: group.list_kept()[0].output for group in groups}
    assert sorted(found) == [0, 1, 2, 3] and interrupted
    for index, (answer, length) in enumerate(zip(whole, lengths, strict=True)):
        assert found[index].token_ids == answer["output_ids"][:length]
        assert len(found[index].logprobs) == length
        assert found[index].list_versions() == sorted(found[index].list_versions())
    assert any(len(output.spans) > 1 for output in found.values())


@pytest.mark.parametrize("rounds", [16, pytest.param(50, marks=pytest.mark.soak)])
def test_rounds_with_switches_leave_no_kv(either, rounds):
    """Random lengths, aborts in every round, a switch in the middle of each; each prompt of an epoch once."""
    server = either
    check_idle(server)
    chance = random.Random(3)
    returned, kinds, aborted, given = [], [], 0, 0
    mine = admitter(max_deferrals=5, eta_responses=1.5)
    last = rounds * 4 // 5
    for number in range(rounds):
        count = 5 if number < last else 0
        mine.feed(prompts(*range(given, given + count)), end_of=0 if number == last else None)
        given += count
        # Some switches come while samples are sent, some while they are aborted, some after the round.
        point = {chance.choice(["step", "batch", "tokens"]): chance.randrange(60)}
        schedule(server, {"tp": 2 - number % 2, "arrived": chance.randrange(3), **point})
        groups, summary = run_round(server, mine)
        returned += [group.index for group in groups]
        kinds.append(summary.kind)
        aborted += len(summary.aborted_lengths)
    schedule(server)
    check_idle(server)
    assert len(returned) == len(set(returned)) == 3 * rounds
    assert aborted > rounds
    assert {"short", "long"} <= set(kinds)
    assert server.status()["num_switches"] > rounds // 3


def test_weights_between_rounds_and_in_one(server, llama):
    mine = admitter(*range(9))
    run_round(server, mine, version=1)
    update = {"model_path": str(llama), "weight_version": "2"}
    assert server.post("/update_weights_from_disk", update).json()["success"]
    groups, _ = run_round(server, mine, version=2)
    assert {
        version for group in groups for sample in group.list_kept() for version in sample.output.list_versions()
    } == {2}
    mine.feed(prompts(*range(20, 26)))
    before = len(mine.state.fresh) + len(mine.state.waiting)
    long = GREEDY | {"max_new_tokens": 300}
    schedule(server, {"arrived": 5, "step": 5, "hold": True})

    def update_in_the_round() -> None:
        wait_for_schedule(server)
        assert server.post("/pause_generation", {"mode": "in_place"}).status_code == 200
        schedule(server)
        # With requests alive SGLang's own flush would fail, and end the server.
        assert server.post("/update_weights_from_disk", update | {"flush_cache": False}).json()["success"]
        assert server.post("/continue_generation", {}).status_code == 200

    thread = threading.Thread(target=update_in_the_round)
    thread.start()
    with pytest.raises(WeightsChanged, match="weights were updated"):
        next(RolloutClient(server.url).rollout(mine, long, version=3))
    thread.join()
    assert len(mine.state.fresh) + len(mine.state.waiting) == before, "its prompts are where they were"
    check_idle(server)
    assert len(run_round(server, mine, version=4)[0]) == 3


def test_samples_of_several_turns(server):
    """The model speaks, the environment answers: what the engine is asked for is the conversation so far."""
    sampling = {"temperature": 0, "max_new_tokens": 30, "stop_token_ids": list(range(5, 500, 4))}
    turns = []

    async def environment(turn):
        turns.append(turn)
        return [300 + turn.number, 301] if turn.number < 2 else None

    mine = admitter(0, 1, num_prompts=2, num_responses=1, eta_prompts=1.0)
    groups, summary = run_round(server, mine, sampling, version=7, environment=environment)
    assert max(turn.number for turn in turns) > 0
    for group in groups:
        output, at = group.list_kept()[0].output, 0
        for span in output.spans:
            if span.version is not None:
                body = {"input_ids": group.prompt["input_ids"] + output.token_ids[:at]}
                (answer,) = server.generate([body | {"sampling_params": sampling | {"max_new_tokens": span.tokens}}])
                assert answer["output_ids"] == output.token_ids[at : at + span.tokens]
            at += span.tokens
        assert at == len(output.token_ids) == len(output.logprobs)
    assert sorted(summary.kept_lengths) == sorted(group.list_kept()[0].output.tokens for group in groups)
    check_idle(server)


def test_a_round_that_is_left_aborts_its_requests(server):
    mine = admitter(*range(5))
    long = {"temperature": 1.0, "max_new_tokens": 1500, "stop_token_ids": list(range(5, 500, 4))}
    events = RolloutClient(server.url).rollout(mine, long, version=0)
    assert isinstance(next(events), Group)
    events.close()
    assert len(mine.state.fresh) == 5 and mine.state.round is None
    check_idle(server)


def test_what_the_server_refuses_is_said_in_its_own_words(server):
    mine = admitter(*range(5))
    with pytest.raises(ValueError, match="answered 400: .*top_p") as error:
        run_round(server, mine, {"max_new_tokens": 20, "top_p": 7})
    assert "\n" not in str(error.value)
    assert len(mine.state.fresh) == 5
    check_idle(server)


DYING = """
import sys
from sglang_pat.rollout.client import RolloutClient
from tests.engine.rollout_calls import admitter

long = {"temperature": 0, "max_new_tokens": 3000, "ignore_eos": True}
list(RolloutClient(sys.argv[1]).rollout(admitter(*range(5)), long, version=0))
"""


def test_a_client_that_dies_leaves_no_request_running(server):
    """The client says nothing: its connections break, and the server aborts what came over them."""
    schedule(server, {"arrived": 10, "step": 60, "hold": True})
    process = subprocess.Popen([sys.executable, "-c", DYING, server.url])
    wait_for_schedule(server)
    assert server.status()["requests"] == 10 and server.status()["rounds"]["open"]
    process.kill()
    process.wait()
    schedule(server)
    asyncio.run(wait_for_status(server.status, lambda status: not status["requests"]))
    # The next round of this name takes the place of the one that nobody ends.
    run_round(server, admitter(*range(5)))
    check_idle(server)


def test_a_trainer_goes_on_from_its_checkpoint(server):
    """Groups and, greedily, tokens are those of a run without the restart."""
    sampling = GREEDY | {"max_new_tokens": 30}

    def rounds(mine: Admitter, *versions: int) -> dict[tuple[int, int], list[int]]:
        found = {}
        for version in versions:
            mine.feed(prompts(*range(5 * version, 5 * version + 5)))
            groups, _ = run_round(server, mine, sampling, version=version)
            assert len(groups) == 3
            found |= tokens(groups)
        return found

    mine = admitter(num_responses=1)
    course = rounds(mine, 0, 1)
    saved = mine.state_dict()["admitter"]
    again = admitter(num_responses=1)
    again.load_state_dict({"admitter": saved})
    assert again.state_dict()["admitter"] == saved
    without, restarted = rounds(mine, 2, 3), rounds(again, 2, 3)
    assert not course.keys() & restarted.keys(), "none comes twice"
    both = without.keys() & restarted.keys()  # which of those launched ends first is a matter of time
    assert both and all(without[key] == restarted[key] for key in both)
    check_idle(server)
