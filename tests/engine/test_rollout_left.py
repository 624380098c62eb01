"""Rounds on a real engine: clients that have not read the end, trainers that go back, prompts that are asked for."""

from __future__ import annotations

import json
from typing import Any

import requests

from .rollout_calls import body, events, idle, one_round, prompt

GREEDY = {"temperature": 0, "max_new_tokens": 30, "ignore_eos": True}


def indices(groups: list[dict[str, Any]]) -> list[int]:
    return sorted(group["key"][1] for group in groups)


def tokens(groups: list[dict[str, Any]]) -> dict[tuple[int, int], list[int]]:
    """Of each response, by prompt and number; which response of a group ends first is a matter of time."""
    return {(group["key"][1], r["number"]): r["token_ids"] for group in groups for r in group["responses"]}


def call(first: int, count: int, **fields: Any) -> dict[str, Any]:
    """Prompts from ``first`` on; as many are started as are kept, so that which come back does not depend on time."""
    given = {"eta_prompts": 1.0, "eta_responses": 1, "sampling_params": GREEDY} | fields
    return body([prompt(0, index) for index in range(first, first + count)], **given)


def test_a_client_that_died_before_it_had_read_the_end(server):
    """The server has sent all; one group was read.  The next call says which round the client has."""
    groups, summary = one_round(server, call(0, 3, job="died"))
    assert summary["number"] == 0 and indices(groups) == [0, 1, 2]
    stream = events(server, call(3, 3, job="died"))
    assert [next(stream)["type"], next(stream)["type"]] == ["begin", "group"]
    idle(server)
    stream.close()
    groups, summary = one_round(server, call(3, 3, job="died", after=0))
    assert summary["number"] == 1 and indices(groups) == [3, 4, 5]
    idle(server)


def test_a_trainer_that_goes_back_two_steps(server, jobs):
    """The same prompts and, greedily, the same tokens; what the later rounds had is as if it had never been."""
    course = [one_round(server, call(3 * step, 3, job="back", version=step)) for step in range(4)]
    again = [
        one_round(server, call(3 * step, 3, job="back", version=step, **({"after": 1} if step == 2 else {})))
        for step in (2, 3)
    ]
    for (groups, summary), (groups_before, summary_before) in zip(again, course[2:], strict=True):
        assert tokens(groups) == tokens(groups_before)
        assert summary["number"] == summary_before["number"]
    assert sorted(int(file.stem) for file in (jobs / "back.past").iterdir()) == [0, 1, 2, 3]
    refused = requests.post(f"{server.url}/pat/rollout", json=call(12, 3, job="back", after=9))
    assert refused.status_code == 400 and "are kept: -1, 0, 1, 2, 3" in refused.json()["error"]["message"]


def test_full_batches_although_most_groups_are_useless(server):
    """Four of five are: the round asks for prompts until its batch is full."""
    fed, kept = 3, []
    for event in events(server, call(0, 3, job="useless", filter_groups=True)):
        if event["type"] == "judge":
            verdict = {
                "job": "useless",
                "key": event["key"],
                "number": event["number"],
                "keep": event["key"][1] % 5 == 4,
            }
            assert requests.post(f"{server.url}/pat/rollout/verdict", json=verdict).status_code == 200
        elif event["type"] == "more":
            prompts = [prompt(0, fed + i) for i in range(event["prompts"])]
            answer = requests.post(f"{server.url}/pat/rollout/prompts", json={"job": "useless", "prompts": prompts})
            assert answer.status_code == 200, answer.text
            fed += len(prompts) * answer.json()["taken"]
        elif event["type"] == "group":
            kept.append(event["key"][1])
    assert event["type"] == "round", json.dumps(event)
    assert event["returned"] == 3 == len(kept)
    assert all(index % 5 == 4 for index in kept)
    assert fed >= 15
    idle(server)
