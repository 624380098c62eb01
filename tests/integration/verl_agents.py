"""What a user brings to a verl job: an agent of several turns, and a reward that asks a reward model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

FIRST_TOKENS = 48
"""Most tokens of the first turn."""
TOOL = [7, 8, 9, 10, 11]
"""What the agent's tool answers."""
NO_SCORES: dict[str, Any] = {"turn_scores": [], "tool_rewards": []}
"""Fields that verl's own agents give."""


class TwoTurns(AgentLoopBase):
    """Asks, "calls a tool", and asks again.

    A line of ``turns.jsonl``, in the job's folder: where the tool's tokens begin and end in a response, how many
    tokens it has, and its extra fields.
    """

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        request = uuid4().hex
        prompt = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        first = await self.server_manager.generate(
            request, prompt_ids=prompt, sampling_params=sampling_params | {"max_tokens": FIRST_TOKENS}
        )
        so_far = prompt + first.token_ids + TOOL
        second = await self.server_manager.generate(request, prompt_ids=so_far, sampling_params=sampling_params)
        limit = self.rollout_config.response_length
        found = {
            "response_ids": first.token_ids + TOOL + second.token_ids,
            "response_mask": [1] * len(first.token_ids) + [0] * len(TOOL) + [1] * len(second.token_ids),
            "response_logprobs": first.log_probs + [0.0] * len(TOOL) + second.log_probs,
        }
        found = {name: values[:limit] for name, values in found.items()}
        tool = len(first.token_ids), len(first.token_ids) + len(TOOL)
        line = {"tool": tool, "tokens": len(found["response_ids"])} | first.extra_fields
        with Path(os.environ["VERL_FILE_LOGGER_PATH"]).with_name("turns.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return AgentLoopOutput(
            prompt_ids=prompt, num_turns=4, metrics={}, extra_fields=first.extra_fields | NO_SCORES, **found
        )


async def judged(solution_str: str, reward_router_address: str, **_: Any) -> float:
    """The share of vowels in what the reward model, which generates, makes of a response."""
    asked = {"text": f"judge: {solution_str}", "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{reward_router_address}/generate", json=asked) as response,
    ):
        answer = await response.json()
    if "tp_from_token" in answer["meta_info"]:
        raise AssertionError("the reward model is an adaptive engine")
    return sum(letter in "aeiou" for letter in answer["text"]) / max(1, len(answer["text"]))
