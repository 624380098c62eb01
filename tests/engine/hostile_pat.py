"""Requests to ``/pat/*`` that nobody should send, and how many there are to each path; no test of its own.

Names of fields are those of the types that the server reads: one that is missing here fails when this is imported.
"""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
from hypothesis import strategies as st

from sglang_pat.messages import BeginRound, ScheduleEntry

from .hostile_requests import Call, generate, junk, parameters, posted, unreadable

ROUNDS = [*"abcdef", "x" * 64]
"""Names of rounds: few, so that calls meet; each ends now and then, so that none is waited for."""


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
likely = {
    "name": st.sampled_from(ROUNDS), "requests": st.integers(1, 8), "prompts": st.integers(1, 8),
    "prompt_tokens": whole, "max_new_tokens": whole, "tp": st.just(0),
}  # fmt: skip
begun = body(BeginRound, {name: likely[name] for name in BeginRound.__struct_fields__}, always=("name", "requests"))
ended = st.one_of(st.sampled_from(ROUNDS), st.sampled_from(["nobody", "..", "%2e%2e", "%00", "x" * 500]))

BODIES: dict[str, tuple[float, st.SearchStrategy, list[str]]] = {
    "/pat/round": (0.12, begun, list(BeginRound.__struct_fields__)),
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
    dice = random.Random(number)
    wrong = [*drawn(junk, 300, number), *drawn(parameters, 50, number)]
    found: list[Call] = []
    for path, (share, bodies, names) in BODIES.items():
        cases = drawn(bodies, round(count * share), number)
        for turn in range(round(count * share)):
            given = cases[turn % len(cases)]
            if dice.random() < SPOILT:
                given = _spoilt(given, dice.choice([*names, "unknown"]), dice.choice(wrong), dice)
            found.append(Call("POST", path, json.dumps(given).encode()))
    names = drawn(ended, count // 25, number)
    found += [Call("DELETE", f"/pat/round?name={dice.choice(names)}") for _ in range(count // 25)]
    paths = ["/generate", *BODIES]
    cases = [one for path in paths for one in drawn(unreadable(path), count // 200 + 1, number)]
    found += dice.sample(cases, min(len(cases), count // 25))
    rest = drawn(posted("/generate", generate), count - len(found), number)
    found += [dice.choice(rest) for _ in range(count - len(found) - len(rest))] + rest
    dice.shuffle(found)
    return found


def _spoilt(given: Any, name: str, value: Any, dice: random.Random) -> Any:
    """With one value replaced, or one added; in a list, in one of its elements."""
    if isinstance(given, list):
        place = dice.randrange(len(given))
        return [*given[:place], given[place] | {name: value}, *given[place + 1 :]]
    return given | {name: value}
