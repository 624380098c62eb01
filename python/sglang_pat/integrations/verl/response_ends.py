"""The end of a response in verl's agent workers, under any reward manager: the ledger hears of it at once, a stopped
response gets no reward, and a sample says of itself if its reward is missing.

verl's worker asks for the reward of each response, and writes the response when it has it.
"""

from __future__ import annotations

import functools
from typing import Any

from ray.actor import ActorHandle
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, AgentLoopWorker
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

from sglang_pat.integrations.verl import options, reward_ledger, rewards
from sglang_pat.integrations.verl.fields import MISSING, was_stopped

_LEDGER = "_sglang_pat_ledger"
"""Attribute of a worker: the job's ledger; None if it has none."""
_compute_score = AgentLoopWorker._compute_score


@functools.wraps(_compute_score)
async def compute_score(self: AgentLoopWorker, outputs: list[AgentLoopOutput], kwargs: dict[str, Any]) -> None:
    """Stand in for verl's ``AgentLoopWorker._compute_score``."""
    if not hasattr(self, _LEDGER):
        hears = rewards.is_used(self.config) or options.has_tail_batching(self.config)
        setattr(self, _LEDGER, reward_ledger.connect(rewards.read_limit_rules(self.config)) if hears else None)
    ledger: ActorHandle | None = getattr(self, _LEDGER)
    if ledger is None or "session_id" not in kwargs:
        return await _compute_score(self, outputs, kwargs)
    last = outputs[-1]
    if was_stopped(last.extra_fields):
        ledger.add_figures.remote({"stopped": 1})
        metric = rewards.get_filter_metric(self.config)  # verl's filter wants it of all
        info = {metric: 0.0} if metric else {}
        last.reward_score, last.extra_fields["reward_extra_info"] = 0.0, info | {MISSING: True}
    else:
        tokens = sum(len(output.response_ids) for output in outputs)
        prompt = int(kwargs["global_steps"]), str(kwargs["uid"])
        ledger.note_end.remote(prompt, int(kwargs["session_id"]), tokens)
        await _compute_score(self, outputs, kwargs)
    if last.extra_fields.get("reward_extra_info", {}).pop(MISSING, False):
        for output in outputs:
            output.extra_fields[MISSING] = True


AgentLoopWorker._compute_score = compute_score
# Ray has given the actor's class a copy of each method that it inherits, when it was made.
_actor = AgentLoopWorkerTQ.__ray_metadata__.modified_class
if "_compute_score" in vars(_actor):
    del _actor._compute_score
