"""The engine as a round sees it (:class:`sglang_pat.rollout.rounds.Backend`)."""

from __future__ import annotations

from statistics import mean
from typing import Any

from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_pat.messages import BeginRound
from sglang_pat.rollout import epochs
from sglang_pat.rollout.records import Output
from sglang_pat.rollout.rounds import RolloutRound
from sglang_pat.server.intake import Intake


def announced(round_: RolloutRound) -> BeginRound:
    """What the engine is told of a round that has just begun.

    How many samples there will be is not known where groups are filtered, and where samples go on that were stopped.
    """
    state, rules = round_.admitter.state, round_.admitter.rules
    about = {"name": round_.name, "max_new_tokens": round_.params["max_new_tokens"]}
    begun = state.round
    if begun is None:  # and over
        return BeginRound(**about)
    about["prompt_tokens"] = round(mean(len(g.prompt["input_ids"]) for g in (*begun.everyone, *state.fresh)))
    if rules.filter_groups or rules.mode == "partial":
        return BeginRound(**about)
    there = len(begun.everyone) + len(state.waiting) + epochs.fresh_of(state, begun.epoch)
    prompts = min(begun.prompts, there)
    return BeginRound(requests=prompts * begun.responses, prompts=prompts, **about)


class ManagerBackend:
    """The engine behind a TokenizerManager, in its process."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def updates(self) -> int:
        return self._manager.pat_weight_updates

    async def generate(self, rid: str, prompt: dict[str, Any], params: dict[str, Any]) -> Output:
        request = GenerateReqInput(rid=rid, **prompt, sampling_params=dict(params), return_logprob=True)
        answer = await anext(self._manager.generate_request(request, None))
        meta, ids = answer["meta_info"], list(answer["output_ids"])
        reason = meta["finish_reason"]["type"]
        if reason == "abort":
            reason = "stop" if self._ended(ids, params) else ""
        logprobs = [entry[0] for entry in meta.get("output_token_logprobs") or []]
        return Output(token_ids=ids, logprobs=logprobs, text=answer.get("text") or "", finish_reason=reason)

    def abort(self, rid: str) -> None:
        self._manager.abort_request(rid)

    def text(self, token_ids: list[int]) -> str:
        tokenizer = self._manager.tokenizer
        return tokenizer.decode(token_ids, skip_special_tokens=True) if tokenizer is not None else ""

    def room(self) -> int:
        return Intake(self._manager).room

    def _ended(self, ids: list[int], params: dict[str, Any]) -> bool:
        """Whether an aborted response has its last token already: the abort came in the step that made it."""
        if params.get("ignore_eos"):
            return False
        tokenizer = self._manager.tokenizer
        stops = {*(params.get("stop_token_ids") or ()), *(self._manager.model_config.hf_eos_token_id or ())}
        if tokenizer is not None:
            stops |= {tokenizer.eos_token_id, *(getattr(tokenizer, "additional_stop_token_ids", None) or ())}
        return bool(ids) and ids[-1] in stops
