"""Requests with a long history of logprobs on their way through a pause, without an engine; for ``many_requests.py``.

The histories are made up: as long as those of requests that have decoded so many tokens, and sent them as SGLang does.
"""

from __future__ import annotations

import gc
import pickle
import random
import statistics
from array import array
from time import thread_time
from types import SimpleNamespace
from typing import Any

from sglang_pat.cpu import shim

SENT_EVERY = 50
"""Tokens; what is not streamed SGLang sends so many at a time."""
KINDS = {"no logprobs": None, "logprobs": 0, "top 5": 5}
"""Top logprobs that a request asks for."""


def _request(top: int | None) -> Any:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    from sglang_pat.rank import degrees

    prompt = list(range(16))
    made = Req("r", "", prompt, SamplingParams(), return_logprob=top is not None, top_logprobs_num=top or 0)
    made.pat_request, made.pat_prompt = SimpleNamespace(input_ids=prompt), array("I", prompt)
    made.pat_sealed = b""
    degrees.begin(made, tp=1)
    return made


def _with_history(top: int | None, tokens: int, rng: random.Random) -> Any:
    made = _request(top)
    made.output_ids = [rng.randrange(49_152) for _ in range(tokens)]
    if top is not None:
        made.send_output_token_logprobs_offset = tokens // SENT_EVERY * SENT_EVERY
        made.output_token_logprobs_val = [-rng.random() for _ in range(tokens)]
        made.output_token_logprobs_idx = list(made.output_ids)
    if top:
        made.output_top_logprobs_val = [[-rng.random() for _ in range(top)] for _ in range(tokens)]
        made.output_top_logprobs_idx = [[rng.randrange(49_152) for _ in range(top)] for _ in range(tokens)]
    return made


def _switch(reqs: list[Any], top: int | None) -> dict[str, float]:
    from sglang_pat.switch import requests

    fresh = [_request(top) for _ in reqs]
    begun = thread_time()
    data = pickle.dumps([requests.capture(req) for req in reqs], pickle.HIGHEST_PROTOCOL)
    sent = thread_time()
    for req, capsule in zip(fresh, pickle.loads(data), strict=True):
        requests.restore(req, capsule)
    return {"offer_ms": 1e3 * (sent - begun), "take_ms": 1e3 * (thread_time() - sent), "mb": len(data) / 1e6}


def rows(requests: int, repeats: int = 5) -> list[dict[str, Any]]:
    """CPU time of the leader that offers so many requests, and of a rank that takes them; medians."""
    if shim.needed():
        shim.install()
    rng, found = random.Random(0), []
    for kind, top in KINDS.items():
        for tokens in (64, 4096):
            reqs = [_with_history(top, tokens, rng) for _ in range(requests)]
            gc.collect()
            gc.freeze()
            made = [_switch(reqs, top) for _ in range(repeats)]
            row = {name: statistics.median(one[name] for one in made) for name in made[0]}
            found.append({"requests": requests, "kind": kind, "tokens": tokens} | row)
    return found
