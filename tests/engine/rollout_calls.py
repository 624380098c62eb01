"""Rounds of a client, for tests: prompts, one round, and the schedule of the engine meanwhile."""

from __future__ import annotations

from typing import Any

from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.client import RolloutClient
from sglang_pat.rollout.records import Group, Summary
from sglang_pat.rollout.rules import Rules
from sglang_pat.testing.server import Server

STOPS = list(range(100, 124))
"""Tokens that end a response: of 512 equally likely ones, so that it has some 20 tokens and sometimes 100."""

SAMPLING = {"temperature": 1.0, "max_new_tokens": 150, "stop_token_ids": STOPS}


def prompts(*indices: int, tokens: int = 12) -> list[tuple[tuple[int, int], dict[str, Any]]]:
    return [((0, index), {"input_ids": [6 + (index * 97 + i * 31) % 490 for i in range(tokens)]}) for index in indices]


def admitter(*indices: int, end: bool = False, **rules: Any) -> Admitter:
    given = {"num_prompts": 3, "num_responses": 2, "eta_prompts": 1.5} | rules
    made = Admitter(Rules(**given))
    made.feed(prompts(*indices), end_of=0 if end else None)
    return made


def run_round(server: Server, mine: Admitter, sampling: Any = SAMPLING, **named: Any) -> tuple[list[Group], Summary]:
    """Groups and summary."""
    *groups, summary = RolloutClient(server.url).rollout(mine, sampling, **({"version": 0} | named))
    assert isinstance(summary, Summary)
    return groups, summary


def tokens(groups: list[Group]) -> dict[tuple[int, int], list[int]]:
    """Tokens of each response, by prompt and number; which response of a group ends first is a matter of time."""
    return {(group.index, sample.number): sample.output.token_ids for group in groups for sample in group.list_kept()}


def schedule(server: Server, *entries: dict[str, Any]) -> None:
    assert server.post("/pat/schedule", entries).status_code == 200


def wait_for_schedule(server: Server) -> dict[str, Any]:
    return server.get("/pat/schedule", timeout=300).json()
