"""Rounds on a real engine: bodies that are refused."""

from __future__ import annotations

import pytest
import requests

from .rollout_calls import body, idle, one_round, post, prompt


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"eta_prompts": 0.5}, "eta_prompts"),
        ({"eta_responses": 0}, "eta_responses"),
        ({"unbiased": True, "eta_responses": 1.0, "turns": True}, "unbiased is true, must be false with turns"),
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
