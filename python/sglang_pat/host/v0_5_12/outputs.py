"""Outputs of requests that ask for different things, and happen to be in one batch.

SGLang lays some of it out as if all had asked for the same: a request gets what belongs to another one, or the server
or a rank ends.

Upstream: https://github.com/sgl-project/sglang/issues/34719 (logprobs of given tokens),
``docs/upstream/hidden_states.md``
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

from sglang_pat.host.assign import assign


def group_by_outputs(reqs: list[Req]) -> list[list[Req]]:
    """``reqs``, in parts that ask for the same optional outputs.

    SGLang lists hidden states, routed experts and customized info of those only that have some, and its server looks
    for them at a request's place among all: it finds another's, or none and ends.
    """
    if not any(req.return_hidden_states or req.return_routed_experts or req.customized_info for req in reqs):
        return [reqs]
    parts: dict[tuple[Any, ...], list[Req]] = {}
    for req in reqs:
        kinds = req.return_hidden_states, req.return_routed_experts, *(req.customized_info or ())
        parts.setdefault(kinds, []).append(req)
    return list(parts.values())


class OwnRows:
    """Stand-in for the hidden states of a prefill, ``[tokens of all requests, width]``.

    SGLang cuts a piece as long as the prompt for each request that asks, one after the other: of a batch in which some
    do not ask, or have a cached prefix, it gets the rows of others.  Here each gets its own, whatever is cut: those of
    the tokens that were computed; of one that has tokens already, and computes its KV again, the last.

    Args:
        lengths: tokens of each request of ``batch`` that were computed.
    """

    def __init__(self, states: torch.Tensor, batch: ScheduleBatch, lengths: Sequence[int]) -> None:
        parts = []
        for req, rows in zip(batch.reqs, states[: sum(lengths)].split(list(lengths)), strict=True):
            if req.return_hidden_states and not (req.finished() or req.is_retracted or req.is_chunked > 0):
                parts.append(rows[-1] if req.output_ids else rows)
        self._rows = iter(parts)

    def __getitem__(self, _: slice) -> torch.Tensor:
        return next(self._rows)


def complete_token_ids(batch: ScheduleBatch) -> None:
    """Let the others of ``batch`` ask for no logprobs of given tokens, where some requests ask for them.

    A rank of SGLang (0.5.12) dies of None beside a list.  Replicas that had one kind each become one batch in a switch.
    """
    token_ids = batch.token_ids_logprobs
    if token_ids and any(ids is not None for ids in token_ids):
        assign(batch, token_ids_logprobs=[ids or [] for ids in token_ids])
