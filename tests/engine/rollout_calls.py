"""Rounds over HTTP, for tests: bodies, events, and when the engine is idle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import requests

from sglang_pat.testing.server import Server, sent_event

STOPS = list(range(100, 124))
"""Tokens that end a response: of 512 equally likely ones, so that it has some 20 tokens and sometimes 100."""

SAMPLING = {"temperature": 1.0, "max_new_tokens": 150, "stop_token_ids": STOPS}


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
