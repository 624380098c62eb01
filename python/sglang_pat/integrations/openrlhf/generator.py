"""OpenRLHF's generator of samples (:class:`RoundGenerator`), in the process that asks the engines: it tells them of
each round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

from sglang_pat.messages import BeginRound, EndRound


class RoundGenerator(SamplesGenerator):
    """A round lasts from its first prompt until all its agents are done, also while all of these wait for a tool."""

    _begins: bool = False
    """Whether the next prompts are the first of a round."""
    _kind: str = ""
    _more: bool = False
    """Whether other prompts may come in place of some."""

    def _generate_vllm(self, dataloader_iter: Any, num_prompts: int, dynamic_filtering: bool, **named: Any) -> Any:
        validates = dataloader_iter is getattr(self, "_eval_dataloader_iter", None)
        self._begins, self._kind, self._more = True, "validation" if validates else "", dynamic_filtering
        samples = super()._generate_vllm(dataloader_iter, num_prompts, dynamic_filtering, **named)
        self._announce(EndRound())
        return samples

    def _dispatch_prompts_to_vllm(self, prompts: Sequence[str], labels: Sequence[str], **named: Any) -> list[Any]:
        if self._begins:
            self._begins = False
            self._announce(self._describe_round(len(prompts), named))
        return super()._dispatch_prompts_to_vllm(prompts, labels, **named)

    def _describe_round(self, prompts: int, named: dict[str, Any]) -> BeginRound:
        fields = {"kind": self._kind, "max_new_tokens": named.get("max_new_tokens") or named.get("max_len", 2048)}
        if self._more or len(self.vllm_engines) > 1:  # of several nobody knows yet how many requests each will get
            return BeginRound(**fields)
        responses = named.get("n_samples_per_prompt", self.args.rollout.n_samples_per_prompt)
        return BeginRound.of_size(prompts, responses, **fields)

    def _announce(self, message: BeginRound | EndRound) -> None:
        ray.get([engine.announce_round.remote(message) for engine in self.vllm_engines])
