"""A server's rounds on an engine that is played, for tests; no test of its own."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import msgspec

from sglang_pat.messages import BeginRound, EndRound


class Manager:
    """As much of a TokenizerManager as rounds use.  A response to the prompt [n, …] has n tokens."""

    tokenizer = None
    context_len = max_req_input_len = 1000
    pat_weight_updates = 0

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(vocab_size=5000, hf_eos_token_id=None)
        config = SimpleNamespace(base=SimpleNamespace(tp=2), layouts=[SimpleNamespace(tp=tp) for tp in (1, 2)])
        self.server_args = SimpleNamespace(spec=SimpleNamespace(config=config, profile=None))
        self.rid_to_state: dict[str, None] = {}
        self.stopped: dict[str, asyncio.Event] = {}
        self.told: list[BeginRound | EndRound] = []

    async def generate_request(self, request, _):
        stop = self.stopped.setdefault(request.rid, asyncio.Event())
        tokens = []
        while len(tokens) < request.input_ids[0] and not stop.is_set():
            tokens.append(7)
            await asyncio.sleep(0)
        reason = "abort" if stop.is_set() else "length"
        meta = {"finish_reason": {"type": reason}, "output_token_logprobs": [(-1.0, 7, None)] * len(tokens)}
        yield {"meta_info": meta, "output_ids": tokens, "text": ""}

    def abort_request(self, rid: str) -> None:
        self.stopped.setdefault(rid, asyncio.Event()).set()

    def pat_round(self, message: BeginRound | EndRound) -> None:
        self.told.append(message)

    async def pat_status(self):
        return {"groups": [{"running": 0, "waiting": 0, "tokens": 0}], "retracted": 0}


def server(folder):
    """A server's rounds, whose jobs are kept in ``folder``; a second one is the server after a restart."""
    from sglang_pat.server.rollout import Rollouts

    return Rollouts(Manager(), folder, None)


def call(first: int, count: int, lengths=(3, 4, 5, 30), **fields):
    """The body of a round of two prompts with one response each; prompts with these indices come with it."""
    from sglang_pat.server.bodies import parse

    prompts = [{"key": [0, i], "input_ids": [lengths[i % len(lengths)], i]} for i in range(first, first + count)]
    given = {
        "num_prompts": 2, "num_responses": 1, "eta_prompts": 1.5, "eta_responses": 1.0, "prompts": prompts,
        "sampling_params": {"max_new_tokens": 100, "ignore_eos": True},
    }  # fmt: skip
    return parse(msgspec.json.encode(given | fields))


def more(*indices: int, **fields):
    """The body of a call with prompts of these indices for a round that is under way."""
    from sglang_pat.server.bodies import parse_more

    return parse_more(msgspec.json.encode({"prompts": [{"key": [0, i], "input_ids": [3]} for i in indices]} | fields))


async def read(rollouts, body, stop_at: str = "") -> list[dict]:
    """The events of a round; left at the first one of the type ``stop_at``."""
    events, found = rollouts.events(body), []
    async for event in events:
        found.append(event)
        if event["type"] == stop_at:
            await events.aclose()
            break
    await rollouts._over(body.job)
    return found


def keys(events: list[dict]) -> list[int]:
    return [event["key"][1] for event in events if event["type"] == "group"]


def waiting(rollouts) -> tuple[list[int], list[int]]:
    state = rollouts._jobs.get("default").admitter.state
    return [group.index for group in state.fresh], [group.index for group in state.waiting]
