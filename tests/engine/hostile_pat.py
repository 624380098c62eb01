"""Requests to ``/pat/*`` that nobody should send, and how many there are to each path; no test of its own.

Names of fields are those of the types that the server reads: one that is missing here fails when this is imported.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
from hypothesis import strategies as st

from sglang_pat.messages import ScheduleEntry
from sglang_pat.sglang.server.bodies import Answer, MorePrompts, Prompt, RolloutBody, Verdict

from .hostile_requests import Call, generate, junk, may, numbers, parameters, posted, token_ids, unreadable, words

JOBS = [*"abcdef", "x" * 64]
"""Few, so that calls meet; a DELETE now and then makes room for what was fed before."""


def body(
    kind: type[msgspec.Struct], likely: dict[str, st.SearchStrategy], always: tuple[str, ...] = ()
) -> st.SearchStrategy:
    """What is read as ``kind``: its required fields, those named ``always`` and a few others.  In every third one a
    field is wrong, or one that nobody knows is added.
    """
    fields = {field.name: field.required for field in msgspec.structs.fields(kind)}
    assert set(likely) == set(fields), f"{kind.__name__} has other fields: {set(likely) ^ set(fields)}"
    sure = {name: likely[name] for name, required in fields.items() if required or name in always}
    rest = sorted(set(fields) - set(sure))
    more = st.lists(st.sampled_from(rest), max_size=3, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: likely[name] for name in names})
    )
    spoilt = st.dictionaries(st.sampled_from([*fields, "unknown"]), junk, min_size=1, max_size=1)
    nothing = st.just({})
    return st.builds(lambda *parts: {k: v for part in parts for k, v in part.items()},
                     st.fixed_dictionaries(sure), more, st.one_of(nothing, nothing, spoilt))  # fmt: skip


# A key comes once in an epoch, and an epoch begins when the one before is over.
keys = st.tuples(st.just(0), st.integers(0, 2**53)).map(list)
prompt = st.one_of(
    st.fixed_dictionaries({"key": keys, "input_ids": token_ids}),
    st.fixed_dictionaries({"key": keys, "input_ids": token_ids}),
    body(Prompt, {"key": keys, "text": words, "input_ids": token_ids}),
)
small = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(1, 12), "temperature": st.floats(0, 2), "ignore_eos": st.booleans()}
)
job = st.sampled_from(JOBS)
rollout = body(
    RolloutBody,
    {
        "num_prompts": st.integers(1, 2),
        "num_responses": st.integers(1, 2),
        "mode": st.sampled_from(["strict", "reorder", "partial"]),
        "eta_prompts": st.floats(1, 2),
        "eta_responses": st.one_of(st.just(1.0), st.floats(1, 2)),
        "max_deferrals": st.one_of(st.integers(0, 8), numbers),
        "max_staleness": st.one_of(st.integers(0, 3), numbers),
        "filter_groups": st.booleans(),
        "unbiased": st.booleans(),
        "prompts": st.lists(prompt, min_size=2, max_size=6),
        "sampling_params": st.one_of(small, small, small, parameters),
        "version": st.one_of(st.none(), st.integers(0, 3)),
        "end_of_epoch": st.integers(0, 1),
        "after": st.integers(-1, 2),
        "job": job,
        "turns": st.booleans(),
        "environment_seconds": st.floats(0.01, 2),
        "planner": st.booleans(),
    },
    always=("prompts", "sampling_params", "job", "filter_groups", "turns"),
)
verdict = body(Verdict, {"key": keys, "keep": st.booleans(), "reward": numbers, "job": job})
samples = st.tuples(st.just(0), st.integers(0, 5), st.integers(0, 2), st.integers(0, 2)).map(list)
answer = body(Answer, {"sample": samples, "text": words, "input_ids": token_ids, "job": job})
more_prompts = body(
    MorePrompts,
    {
        "prompts": st.lists(prompt, max_size=4), "end_of_epoch": st.integers(0, 1), "no_more": st.booleans(),
        "job": job,
    },
    always=("prompts", "job"),
)  # fmt: skip

whole = st.one_of(st.integers(0, 60), st.integers(0, 60), st.sampled_from([2**31, 2**53, 2**63 - 1]))
entry = body(
    ScheduleEntry,
    {
        "tp": st.sampled_from([1, 2]), "arrived": st.integers(0, 3), "step": whole, "batch": whole, "tokens": whole,
        "left": whole, "hold": st.just(False),
    },
)  # fmt: skip
points = {field.name for field in msgspec.structs.fields(ScheduleEntry)} - {"tp", "arrived", "hold"}
single = st.builds(
    lambda name, at, tp: {name: at, "tp": tp}, st.sampled_from(sorted(points)), whole, st.sampled_from([1, 2, None])
)
last = single.map(lambda one: one | {"hold": True})
schedule = st.one_of(
    st.lists(single, min_size=1, max_size=3),
    st.tuples(single, last).map(list),
    st.lists(entry, min_size=1, max_size=3),
    may(st.lists(entry, min_size=1, max_size=3)),
)
reconfigure = st.one_of(
    st.fixed_dictionaries({"tp": st.sampled_from([1, 2])}, optional={"dry_run": st.booleans()}),
    may(st.fixed_dictionaries({"tp": junk}, optional={"dry_run": junk, "dp": junk})),
)
forgotten = st.one_of(job, st.sampled_from(["nobody", "..", "%2e%2e", "%00", "x" * 500]))

SHARES = {
    "/generate": (0.60, posted("/generate", generate)),
    "/pat/rollout": (0.12, posted("/pat/rollout", rollout)),
    "/pat/rollout/prompts": (0.05, posted("/pat/rollout/prompts", more_prompts)),
    "/pat/rollout/verdict": (0.03, posted("/pat/rollout/verdict", verdict)),
    "/pat/rollout/turn": (0.03, posted("/pat/rollout/turn", answer)),
    "DELETE": (0.04, forgotten.map(lambda name: Call("DELETE", f"/pat/rollout/{name}"))),
    "/pat/schedule": (0.05, posted("/pat/schedule", schedule)),
    "/pat/reconfigure": (0.04, posted("/pat/reconfigure", reconfigure)),
    "unreadable": (
        0.04,
        st.sampled_from(["/generate", "/pat/rollout", "/pat/reconfigure", "/pat/rollout/verdict", "/pat/schedule"])
        .flatmap(unreadable),
    ),
}  # fmt: skip
"""Of all requests, how many go where: a fixed share of each, as hypothesis's own choices leave some of them out."""


def calls(count: int, number: int, drawn: Any) -> list[Call]:
    """``count`` requests, in an order that follows from ``number``; ``drawn``: see ``hostile.drawn``."""
    found: list[Call] = []
    for i, (share, strategy) in enumerate(SHARES.values()):
        wanted = round(count * share)
        cases = drawn(strategy, wanted, number + i)
        found += [cases[turn % len(cases)] for turn in range(wanted)]
    random.Random(number).shuffle(found)
    return found
