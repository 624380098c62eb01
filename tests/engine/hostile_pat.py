"""Requests to ``/pat/*`` that nobody should send, and how many there are to each path; no test of its own.

Names of fields are those of the types that the server reads: one that is missing here fails when this is imported.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import msgspec
from hypothesis import strategies as st

from sglang_pat.messages import ScheduleEntry
from sglang_pat.server.bodies import Answer, MorePrompts, Prompt, RolloutBody, Verdict

from .hostile_requests import Call, generate, junk, numbers, parameters, posted, token_ids, unreadable, words

JOBS = [*"abcdef", "x" * 64]
"""Few, so that calls meet; a DELETE now and then makes room for what was fed before."""


def body(
    kind: type[msgspec.Struct], likely: dict[str, st.SearchStrategy], always: tuple[str, ...] = ()
) -> st.SearchStrategy[dict[str, Any]]:
    """What is read as ``kind``: its required fields, those named ``always`` and a few others."""
    fields = {field.name: field.required for field in msgspec.structs.fields(kind)}
    assert set(likely) == set(fields), f"{kind.__name__} has other fields: {set(likely) ^ set(fields)}"
    sure = {name: likely[name] for name, required in fields.items() if required or name in always}
    rest = sorted(set(fields) - set(sure))
    more = st.lists(st.sampled_from(rest), max_size=3, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: likely[name] for name in names})
    )
    return st.builds(lambda known, others: known | others, st.fixed_dictionaries(sure), more)


keys = st.tuples(st.just(0), st.integers(0, 2**53)).map(list)
prompt = st.fixed_dictionaries({"key": keys, "input_ids": token_ids})
odd = body(Prompt, {"key": keys, "text": words, "input_ids": token_ids})
STOPS = list(range(0, 500, 3))
"""Of three tokens one ends a turn."""
small = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(1, 12), "temperature": st.floats(0, 2), "stop_token_ids": st.just(STOPS)}
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
        "max_deferrals": st.integers(0, 8),
        "max_staleness": st.integers(0, 3),
        "filter_groups": st.booleans(),
        "unbiased": st.booleans(),
        "prompts": st.lists(prompt, min_size=3, max_size=6),
        "sampling_params": small,
        "version": st.integers(0, 3),
        "end_of_epoch": st.integers(0, 1),
        "after": st.integers(-1, 2),
        "job": job,
        "turns": st.booleans(),
        "environment_seconds": st.floats(0.01, 2),
    },
    always=("prompts", "sampling_params", "job", "filter_groups", "turns"),
)
verdict = body(
    Verdict, {"key": keys, "number": st.integers(0, 2), "keep": st.booleans(), "reward": numbers, "job": job}
)
samples = st.tuples(st.just(0), st.integers(0, 5), st.integers(0, 2), st.integers(0, 2)).map(list)
answer = body(Answer, {"sample": samples, "text": words, "input_ids": token_ids, "job": job})
more_prompts = body(
    MorePrompts,
    {
        "prompts": st.lists(prompt, max_size=4), "end_of_epoch": st.integers(0, 1), "no_more": st.booleans(),
        "number": st.integers(0, 2),
        "job": job,
    },
    always=("prompts", "job"),
)  # fmt: skip

whole = st.one_of(st.integers(0, 60), st.sampled_from([2**31, 2**53, 2**63 - 1]))
degrees = st.sampled_from([1, 2])
points = sorted({field.name for field in msgspec.structs.fields(ScheduleEntry)} - {"tp", "arrived", "hold"})
single = st.builds(lambda name, at, tp: {name: at, "tp": tp}, st.sampled_from(points), whole, degrees)
entry = body(
    ScheduleEntry,
    {name: whole for name in points} | {"tp": degrees, "arrived": st.integers(0, 3), "hold": st.booleans()},
)
schedule = st.one_of(
    st.lists(single, min_size=1, max_size=3),
    st.builds(lambda first, last: [first, last | {"hold": True}], single, single),
    st.lists(entry, min_size=1, max_size=3),
)
reconfigure = st.fixed_dictionaries({"tp": degrees}, optional={"dry_run": st.booleans()})
forgotten = st.one_of(job, st.sampled_from(["nobody", "..", "%2e%2e", "%00", "x" * 500]))

BODIES: dict[str, tuple[float, st.SearchStrategy, list[str]]] = {
    "/pat/rollout": (0.12, rollout, list(RolloutBody.__struct_fields__)),
    "/pat/rollout/prompts": (0.05, more_prompts, list(MorePrompts.__struct_fields__)),
    "/pat/rollout/verdict": (0.03, verdict, list(Verdict.__struct_fields__)),
    "/pat/rollout/turn": (0.03, answer, list(Answer.__struct_fields__)),
    "/pat/schedule": (0.05, schedule, list(ScheduleEntry.__struct_fields__)),
    "/pat/reconfigure": (0.04, reconfigure, ["tp", "dry_run", "dp"]),
}
"""By path: its share of all requests (hypothesis's own choices would leave some out), sound bodies, names of fields."""

SPOILT = 0.35
"""So many of the bodies have something wrong: one thing gets further than five."""


def calls(count: int, number: int, drawn: Any) -> list[Call]:
    """``count`` requests, of which some 60% go to ``/generate``; the same for a seed ``number``.

    Args:
        drawn: draws so many examples of a strategy (``hostile.drawn``).
    """
    dice, fresh = random.Random(number), itertools.count()
    wrong = [*drawn(junk, 300, number), *drawn(odd, 50, number), *drawn(parameters, 50, number)]
    found: list[Call] = []
    for path, (share, bodies, names) in BODIES.items():
        cases = drawn(bodies, round(count * share), number)
        for turn in range(round(count * share)):
            given = _with_fresh_keys(cases[turn % len(cases)], fresh)
            if dice.random() < SPOILT:
                given = _spoilt(given, dice.choice([*names, "unknown"]), dice.choice(wrong), dice)
            found.append(Call("POST", path, json.dumps(given).encode()))
    names = drawn(forgotten, count // 25, number)
    found += [Call("DELETE", f"/pat/rollout/{dice.choice(names)}") for _ in range(count // 25)]
    paths = ["/generate", *BODIES]
    cases = [one for path in paths for one in drawn(unreadable(path), count // 200 + 1, number)]
    found += dice.sample(cases, min(len(cases), count // 25))
    rest = drawn(posted("/generate", generate), count - len(found), number)
    found += [dice.choice(rest) for _ in range(count - len(found) - len(rest))] + rest
    dice.shuffle(found)
    return found


def _with_fresh_keys(given: Any, fresh: Iterator[int]) -> Any:
    """A prompt comes once in an epoch, and an epoch begins when the one before is over."""
    if not isinstance(given, dict) or "prompts" not in given:
        return given
    return given | {"prompts": [one | {"key": [0, next(fresh)]} for one in given["prompts"]]}


def _spoilt(given: Any, name: str, value: Any, dice: random.Random) -> Any:
    """With one value replaced, or one added; in a list, in one of its elements."""
    if isinstance(given, list):
        place = dice.randrange(len(given))
        return [*given[:place], given[place] | {name: value}, *given[place + 1 :]]
    if name == "prompts" and given.get(name):
        return given | {name: [*given[name], value]}
    if name == "sampling_params" and isinstance(value, dict):
        return given | {name: given[name] | value}
    return given | {name: value}
