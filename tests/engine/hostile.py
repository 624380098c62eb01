"""Requests that nobody should send, and a check that the engine is none the worse for them; no test of its own.

Two sources: strategies of our own for what this project adds or passes on to the ranks, and a walk over the server's
OpenAPI schema (schemathesis).  Both only make requests, in a fixed order for a seed; they are sent in batches while the
layout changes.
"""

from __future__ import annotations

import asyncio
import json
import random
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import psutil
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from sglang_pat.testing.server import Server

BATCH = 25
"""Requests under way at once."""

BATCH_SECONDS = 4.0
"""After this long all requests of a batch are aborted: most are short, but some ask for all that fits."""

PATIENCE_SECONDS = 30.0
"""Then a client gives up: some requests wait by design (for the end of a schedule, or of another's flush)."""

NO_ANSWER, GAVE_UP = 0, -1
"""In the place of a status: the connection was closed without an answer; the client went away."""


@dataclass(frozen=True)
class Call:
    """One HTTP request.  ``body`` as it is sent: JSON that no client library would make is among it."""

    method: str
    path: str
    body: bytes = b""
    content_type: str = "application/json"
    query: tuple[tuple[str, str], ...] = ()


def drawn(strategy: st.SearchStrategy, count: int, number: int) -> list[Any]:
    """``count`` examples of ``strategy``, the same for a seed ``number``."""
    found: list[Any] = []

    @seed(number)
    @settings(
        max_examples=count, phases=[Phase.generate], database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def collect(example: Any) -> None:
        found.append(example)

    collect()
    return found[:count]


# -- our own generator ------------------------------------------------------------------------------------

EDGES = [-(2**70), -(2**63), -(2**31), -2, -1, 0, 1, 2, 502, 503, 4096, 2**31 - 1, 2**31, 2**53, 2**63, 2**64, 10**30]

numbers = st.one_of(
    st.sampled_from(EDGES),
    st.integers(-5, 600),
    st.floats(),
    st.sampled_from([float("nan"), float("inf"), float("-inf"), 1e-45, 1e-7, 1e38, 1e300, 0.5, 1.0, 16.0]),
)
words = st.one_of(st.text(max_size=8), st.sampled_from(["", "a", "\ud800", "x" * 5000, "(", "[" * 300, "pat-0-0"]))
junk = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, words),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(words, inner, max_size=3)),
    max_leaves=8,
)
patterns = st.one_of(
    words, st.sampled_from(["a", "[ab]+", "(a+)+$", ".*.*.*x", "(?=a)b", r"(a)\1", "a{3}", "(a{1000}){1000}", "\\d*"])
)
schemas = st.one_of(
    words,
    st.sampled_from(['{"type": "object"}', "{}", "[]", "null", "true", '{"type": 5}', '{"$ref": "#"}', "{" * 300]),
    junk.map(json.dumps),
)


def may(plausible: st.SearchStrategy) -> st.SearchStrategy:
    """Mostly what it should be: a request with one thing wrong gets further than one with five."""
    return st.integers(0, 7).flatmap(lambda dice: junk if dice == 7 else plausible)


def some(named: dict[str, st.SearchStrategy]) -> st.SearchStrategy[dict[str, Any]]:
    """A few of these fields."""
    return st.lists(st.sampled_from(sorted(named)), max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: may(named[name]) for name in names})
    )


sampling = some(
    {
        "max_new_tokens": st.integers(0, 40),
        "min_new_tokens": st.integers(0, 10),
        "n": st.integers(1, 3),
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0.01, 1),
        "top_k": st.integers(1, 600),
        "min_p": st.floats(0, 1),
        "frequency_penalty": st.floats(-2, 2),
        "presence_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(1e-6, 2),
        "stop": st.lists(words, max_size=3),
        "stop_token_ids": st.lists(st.integers(-2, 600), max_size=6),
        "stop_regex": patterns,
        "ignore_eos": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "spaces_between_special_tokens": st.booleans(),
        "no_stop_trim": st.booleans(),
        "stream_interval": st.integers(1, 5),
        "sampling_seed": st.integers(0, 2**31),
        "logit_bias": st.dictionaries(st.integers(-1, 503).map(str), numbers, max_size=5),
        "custom_params": st.one_of(st.fixed_dictionaries({"pat_limit": junk}), st.dictionaries(words, junk), junk),
    }
)
lengths = st.fixed_dictionaries({"max_new_tokens": may(st.integers(0, 40))})
grammars = st.one_of(
    st.fixed_dictionaries({}),
    st.fixed_dictionaries({"regex": patterns}),
    st.fixed_dictionaries({"json_schema": schemas}),
    st.fixed_dictionaries({"ebnf": st.one_of(words, st.sampled_from(['root ::= "a"', "root ::= root", "start: /a/"]))}),
    st.fixed_dictionaries({"structural_tag": schemas}),
    st.dictionaries(st.sampled_from(["regex", "json_schema", "ebnf", "structural_tag"]), junk),
)
parameters = st.builds(lambda *parts: {k: v for part in parts for k, v in part.items()}, lengths, sampling, grammars)

token_ids = st.lists(st.integers(0, 502), min_size=1, max_size=40)
prompts = st.one_of(
    st.fixed_dictionaries({"input_ids": token_ids}),
    st.fixed_dictionaries({"input_ids": token_ids}),
    st.fixed_dictionaries({"input_ids": st.lists(token_ids, min_size=1, max_size=3)}),
    st.fixed_dictionaries({"text": words}),
    st.fixed_dictionaries({"text": st.lists(words, max_size=3)}),
    st.fixed_dictionaries({}, optional={"input_ids": junk, "text": junk, "input_embeds": junk}),
)
FIELDS = (
    "rid return_logprob logprob_start_len top_logprobs_num token_ids_logprob return_text_in_logprobs stream "
    "log_metrics return_hidden_states return_routed_experts routed_experts_start_len return_indexer_topk modalities "
    "session_params lora_path lora_id custom_logit_processor positional_embed_overrides bootstrap_host bootstrap_port "
    "bootstrap_room bootstrap_pair_key decode_tp_size require_reasoning routed_dp_rank disagg_prefill_dp_rank "
    "data_parallel_rank background conversation_id priority extra_key routing_key no_logs custom_labels return_bytes "
    "return_entropy external_trace_header received_time need_wait_for_mm_inputs num_items_assigned max_dynamic_patch "
    "image_data video_data audio_data multi_item_delimiter_indices http_worker_ipc use_audio_in_video unknown"
).split()
PLAUSIBLE = {
    "return_logprob": st.booleans(),
    "logprob_start_len": st.integers(-2, 50),
    "top_logprobs_num": st.integers(-1, 600),
    "token_ids_logprob": st.lists(st.integers(-1, 503), max_size=4),
    "stream": st.booleans(),
    "custom_labels": st.dictionaries(st.sampled_from(["a", "b"]), st.sampled_from(["x", "y"]), max_size=2),
    "extra_key": st.text(string.ascii_letters, max_size=3),
    "session_params": st.fixed_dictionaries({"id": words}),
}
fields = some({name: PLAUSIBLE.get(name, st.one_of(st.none(), words, numbers)) for name in FIELDS})
generate = st.builds(
    lambda prompt, params, more: prompt | {"sampling_params": params} | more,
    prompts, may(st.one_of(parameters, st.lists(parameters, max_size=3))), fields,
)  # fmt: skip

keys = may(st.tuples(st.integers(0, 1), st.integers(0, 5)).map(list))
rollout = st.fixed_dictionaries(
    {"num_prompts": may(st.integers(1, 3)), "num_responses": may(st.integers(1, 2))},
    optional={
        "mode": may(st.sampled_from(["strict", "reorder", "partial"])),
        "eta_prompts": may(st.floats(1, 2)),
        "eta_responses": may(st.floats(1, 2)),
        "max_deferrals": junk,
        "max_staleness": junk,
        "filter_groups": may(st.booleans()),
        "prompts": may(st.lists(st.fixed_dictionaries({"key": keys, "input_ids": may(token_ids)}), max_size=4)),
        "sampling_params": may(parameters),
        "version": junk,
        "end_of_epoch": junk,
        "job": may(st.sampled_from(["a", "b", "c"])),
        "planner": may(st.booleans()),
        "unknown": junk,
    },
)
more = {"dp": junk, "dry_run": may(st.booleans())}
reconfigure = may(st.fixed_dictionaries({"tp": may(st.sampled_from([1, 2]))}, optional=more))
kept = {"key": keys, "keep": may(st.booleans())}
verdict = may(st.fixed_dictionaries(kept, optional={"reward": numbers, "job": words}))
answer = may(
    st.fixed_dictionaries({"sample": junk}, optional={"text": words, "input_ids": may(token_ids), "job": words})
)
schedule = may(st.lists(st.dictionaries(st.sampled_from(["tp", "at_step", "at_tokens", "hold"]), junk), max_size=3))


def posted(path: str, bodies: st.SearchStrategy) -> st.SearchStrategy[Call]:
    return bodies.map(lambda body: Call("POST", path, json.dumps(body).encode()))


others = st.one_of(
    posted("/pat/rollout", rollout),
    posted("/pat/reconfigure", reconfigure),
    posted("/pat/rollout/verdict", verdict),
    posted("/pat/rollout/turn", answer),
    posted("/pat/schedule", schedule),
    st.sampled_from(["a", "b", "..", "%2e%2e", "%00", "x" * 500]).map(lambda j: Call("DELETE", f"/pat/rollout/{j}")),
    st.builds(
        lambda path, body: Call("POST", path, body),
        st.sampled_from(["/generate", "/pat/rollout", "/pat/reconfigure", "/pat/rollout/verdict", "/pat/schedule"]),
        st.one_of(st.binary(max_size=20), st.sampled_from([b"[" * 100_000, b"{", b"null", b'{"a":' * 900])),
    ),
)
calls = st.integers(0, 3).flatmap(lambda dice: others if dice == 3 else posted("/generate", generate))


# -- the server's schema ------------------------------------------------------------------------------------

NOT_WALKED = {
    "/pause_generation": "stops everybody's generation until it is continued: what it is for",
    "/release_memory_occupation": "gives the KV memory away until it is taken back: what it is for",
    "/resume_memory_occupation": "only after a release",
    "/slow_down": "makes every step slow: what it is for",
    "/init_weights_update_group": "waits for the other members of a process group",
    "/init_weights_send_group_for_remote_instance": "waits for the other members of a process group",
    "/update_weights_from_disk": "gives the model other weights, random ones with load_format dummy: other tokens",
    "/weights_checker": "can overwrite the weights with random ones: what it is for",
    "/set_internal_state": "changes how the schedulers work: what it is for",
    "/start_profile": "writes traces to any folder, and slows every step down",
    "/stop_profile": "writes traces",
    "/configure_logging": "writes requests to any folder",
    "/metrics": "no operation of the engine",
}
"""Operations left out of the walk, each with its reason; all of them are an administrator's."""


def walked(url: str, count: int, number: int) -> list[Call]:
    """``count`` requests over all operations of the server's OpenAPI schema; in every second one a value is wrong."""
    import schemathesis

    schema = schemathesis.openapi.from_url(url + "/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    operations = [operation for operation in operations if operation.path not in NOT_WALKED]
    each = -(-count // len(operations))
    found: list[list[Call]] = []
    for i, operation in enumerate(operations):
        cases = drawn(operation.as_strategy(), each, number + i)
        # Few operations have so many different requests.
        found.append([_call(cases[turn % len(cases)], url, number + turn) for turn in range(each)])
    # In turns: a few requests reach every operation.
    return [part[turn] for turn in range(each) for part in found][:count]


WRONG = [None, True, -1, 0, 2**31, 2**63, 10**30, float("nan"), 1e300, "", "\ud800", [], {}, [None], {"": None}]


def _spoilt(body: bytes, number: int) -> bytes:
    """A JSON object with one of its values replaced, another field beside them if it has none."""
    try:
        content = json.loads(body)
    except ValueError:
        return body
    if not isinstance(content, dict):
        return json.dumps(random.Random(number).choice(WRONG)).encode()
    choose = random.Random(f"{number} {len(body)}").choice
    content[choose(sorted(content) or ["rid"])] = choose(WRONG)
    return json.dumps(content).encode()


def _call(case: Any, url: str, turn: int) -> Call:
    import requests

    kwargs = case.as_transport_kwargs(base_url=url)
    try:
        ready = requests.Request(**kwargs).prepare()
    except (ValueError, requests.RequestException):
        return Call("GET", "/pat/status")  # what no client can send
    body = ready.body or b""
    body = body.encode() if isinstance(body, str) else bytes(body)
    kind = ready.headers.get("Content-Type", "application/json")
    if turn % 2 and kind == "application/json":
        body = _spoilt(body, turn)
    return Call(ready.method, ready.url.removeprefix(url), body, kind)


# -- sending them ---------------------------------------------------------------------------------------------


def send(server: Server, calls: Sequence[Call], after: Callable[[Counter], None]) -> Counter:
    """Send ``calls`` in batches while the layout changes; ``after`` is called between batches.

    Returns:
        How often each ``(path, status)`` came.
    """
    total: Counter = Counter()
    for begin in range(0, len(calls), BATCH):
        total += asyncio.run(_batch(server, calls[begin : begin + BATCH]))
        after(total)
    return total


async def _batch(server: Server, calls: Sequence[Call]) -> Counter:
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        tasks = [asyncio.ensure_future(_one(session, server.url, call)) for call in calls]
        switching = asyncio.ensure_future(_switch(session, server, tasks))
        await asyncio.wait(tasks, timeout=BATCH_SECONDS)
        async with session.post(server.url + "/abort_request", json={"abort_all": True}) as answer:
            await answer.read()
        await asyncio.wait(tasks, timeout=PATIENCE_SECONDS)
        found: Counter = Counter()
        for call, task in zip(calls, tasks, strict=True):
            path = call.path.split("?")[0]
            found[path, task.result() if task.done() else GAVE_UP] += 1
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await switching
    return found


async def _one(session: aiohttp.ClientSession, url: str, call: Call) -> int:
    from yarl import URL

    headers = {"Content-Type": call.content_type}
    try:
        target = URL(url + call.path, encoded=True)
        async with session.request(call.method, target, data=call.body, headers=headers) as answer:
            await answer.read()
            return answer.status
    except (aiohttp.ClientError, ConnectionError):
        return NO_ANSWER


async def _switch(session: aiohttp.ClientSession, server: Server, tasks: Sequence[asyncio.Task]) -> None:
    """Change the layout again and again until all of ``tasks`` are done."""
    tp = 1
    while not all(task.done() for task in tasks):
        tp = 3 - tp
        try:
            await asyncio.wait_for(server.reconfigure_async(session, tp), PATIENCE_SECONDS)
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return


def memory(server: Server) -> int:
    """Bytes that the processes of ``server`` have for themselves."""
    return sum(process.memory_full_info().uss for process in [psutil.Process(server.process.pid), *server.children()])
