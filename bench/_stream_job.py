"""What the jobs of ``bench/streaming.py`` have beside verl's and ours: an agent whose responses have drawn lengths, and
trainers that fetch complete groups otherwise than ``sglang_pat_stream`` does."""

from __future__ import annotations

import os
import random
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.trainer.ppo.v1.trainer_base import register_trainer

from sglang_pat.integrations.verl.streaming import AdaptiveStream, StreamStep

SIGMA_OF_PROMPTS, SIGMA_OF_RESPONSES = 0.9, 0.4
"""Standard deviations of the logarithms of lengths: between prompts, and between the responses to one."""
MEDIAN = 1 / 16
"""Median length of a response, as a share of the limit."""


def draw_length(prompt: int, response: int, limit: int) -> int:
    """Tokens of a response; lognormal, and the same in each job."""
    of_prompt = random.Random(f"{prompt}").gauss(0, SIGMA_OF_PROMPTS)
    length = MEDIAN * limit * random.Random(f"{prompt} {response}").lognormvariate(of_prompt, SIGMA_OF_RESPONSES)
    return max(1, min(limit, round(length)))


class DrawnLengths(SingleTurnAgentLoop):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        length = draw_length(int(kwargs["index"]), int(kwargs["session_id"]), self.response_length)
        params = sampling_params | {"max_tokens": length, "ignore_eos": True}
        return await super().run(params, **kwargs)


class WholeStep(StreamStep):
    """Trains when the batch is there."""

    def wait_for_groups(self) -> int:
        self.follow_round(self.left)
        return self.left


class OnceStep(StreamStep):
    """Trains on a share of the batch when that is there, and on the rest when all of it is."""

    def wait_for_groups(self) -> int:
        groups = round(float(os.environ["FETCH_SHARE"]) * self.batch) if self.left == self.batch else self.left
        self.follow_round(groups)
        return groups


@register_trainer("fetch_whole")
class FetchWhole(AdaptiveStream):
    step_class = WholeStep


@register_trainer("fetch_once")
class FetchOnce(AdaptiveStream):
    step_class = OnceStep
