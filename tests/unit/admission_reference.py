"""Rounds as the papers describe them, computed from lengths known in advance: slow, and nothing in common with ours."""

from __future__ import annotations

import math
from collections.abc import Callable

from sglang_pat.admission.records import Key
from sglang_pat.admission.rules import Rules


def schedulable(slacks: list[int], size: int) -> bool:
    """Whether prompts that may wait so many more rounds each can all be served, ``size`` a round, earliest first."""
    return all(place // size <= slack for place, slack in enumerate(sorted(slacks)))


def rounds(rules: Rules, epoch: int, indices: list[int], length: Callable[[Key, int], int]) -> list[tuple]:
    """(kind, keys returned in order, tokens thrown away) of each round of an epoch, in ``strict`` or ``reorder``."""
    size, bound = rules.num_prompts, rules.max_deferrals
    eta_r = rules.eta_responses or (1.25 if rules.mode == "strict" else 1.0)
    many_p, many_r = math.ceil(rules.eta_prompts * size - 1e-9), math.ceil(eta_r * rules.num_responses - 1e-9)
    fresh = [Key(epoch, index) for index in indices]
    waits: dict[Key, int] = {}  # rounds that passed it over
    seen: dict[Key, int] = {}
    order = {key: place for place, key in enumerate(fresh)}
    lengths: list[int] = []
    result = []
    while fresh or waits:
        target = min(size, len(fresh) + len(waits))
        oldest = sorted(waits, key=lambda key: (-waits[key], order[key]))
        slacks = [bound - waits[key] - 1 for key in oldest]
        forced = next(count for count in range(len(oldest) + 1) if schedulable(slacks[count:], size))
        room = bound * size + target - len(waits)
        if rules.mode == "strict":
            flush, long = len(fresh) < size, len(waits) >= size or forced > 0
            if flush or long:
                kind, responses = "flush" if flush else "long", rules.num_responses
                started = (oldest + fresh)[:target]
            else:
                kind, responses, started = "short", many_r, fresh[: min(many_p, room)]
        else:
            flush = len(fresh) + len(waits) <= size
            kind, responses = "flush" if flush else "long" if forced else "short", many_r
            under_way = many_p
            if forced:
                responses, under_way = rules.num_responses, size
            usual = sum(lengths) / len(lengths) if lengths else 0.0
            sign = -1 if kind != "short" else 1
            started, unused, recycled = [k for k in waits if k in oldest[:forced]], list(fresh), dict(seen)
            started.sort(key=order.get)
            others = [key for key in sorted(waits, key=order.get) if key not in started]
            while len(started) < under_way and (others or (unused and room)):
                options = [(sign * recycled.get(key, 0), order[key], key) for key in others]
                if unused and room:
                    options.append((sign * usual, order[unused[0]], unused[0]))
                _, _, pick = min(options, key=lambda option: option[:2])
                started.append(pick)
                if pick in others:
                    others.remove(pick)
                else:
                    unused.remove(pick)
                    room -= 1
        ends, places, place = {}, {}, 0
        for key in started:
            mine, places[key] = [], place
            for number in range(responses):
                mine.append((length(key, number), place, number))
                place += 1
            ends[key] = sorted(mine)[: rules.num_responses]
        complete = sorted(started, key=lambda key: ends[key][-1][:2])
        taken: list[Key] = []
        reached = 0
        held: list[Key] = []
        for key in complete:
            held.append(key)
            reached = ends[key][-1][0]
            again = True
            while again and len(taken) < target:
                again = False
                for candidate in held:
                    rest = [k for k in oldest if k not in taken and k != candidate]
                    left = target - len(taken) - 1
                    if schedulable([bound - waits[k] - 1 for k in rest[left:]], size):
                        taken.append(candidate)
                        held.remove(candidate)
                        again = True
                        break
            if len(taken) == target:
                break
        last = (reached, max((ends[key][-1][1] for key in taken + held if ends[key][-1][0] == reached), default=0))
        thrown = 0
        for key in started:
            whole = key in taken or key in held
            chosen = {number for _, _, number in ends[key]} if whole else set()
            until = ends[key][-1][:2] if whole else last
            for number in range(responses):
                tokens, event = length(key, number), (length(key, number), places[key] + number)
                came = tokens if number in chosen or (not whole and event < until) else min(tokens - 1, until[0])
                if key not in taken:
                    seen[key] = max(seen.get(key, 0), came)
                if key not in taken or number not in chosen:
                    thrown += came
        lengths += [length(key, number) for key in taken for _, _, number in ends[key]]
        fresh = [key for key in fresh if key not in started]
        waits = {key: waits.get(key, 0) + 1 for key in (*waits, *started) if key not in taken}
        result.append((kind, taken, thrown))
    return result
