"""Rounds as the papers describe them, computed from lengths known in advance: slow, and nothing in common with ours."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from sglang_pat.rollout.records import PromptKey
from sglang_pat.rollout.rules import Rules

from .admission_world import AGAIN


def schedulable(slacks: list[int], size: int) -> bool:
    """Whether prompts that may wait so many more rounds each can all be served, ``size`` a round, earliest first."""
    return all(place // size <= slack for place, slack in enumerate(sorted(slacks)))


def rounds(rules: Rules, epoch: int, indices: list[int], length: Callable[[PromptKey, int], int]) -> list[tuple]:
    """(kind, keys returned in order, tokens thrown away) of each round of an epoch, in ``strict`` or ``reorder``."""
    size, bound = rules.num_prompts, rules.max_deferrals
    many_p, many_r = (
        math.ceil(rules.eta_prompts * size - 1e-9),
        math.ceil(rules.eta_responses * rules.num_responses - 1e-9),
    )
    if rules.num_responses == 1:
        many_r = math.floor(rules.eta_responses)
    fresh = [PromptKey(epoch, index) for index in indices]
    waits: dict[PromptKey, int] = {}  # rounds that passed it over
    seen: dict[PromptKey, int] = {}
    floors: dict[PromptKey, list[int]] = {}
    attempts: dict[tuple[PromptKey, int], int] = {}
    order = {key: place for place, key in enumerate(fresh)}
    lengths: list[int] = []
    result = []

    def again(key: PromptKey, number: int) -> int:
        return length(key, number + AGAIN * attempts.get((key, number), 0))

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
                mine.append((again(key, number), place, number))
                place += 1
            ends[key] = sorted(mine)[: rules.num_responses]
        redone = [key for key in started if rules.unbiased and key in floors]
        conditional, wasted = redrawn(redone, places, place, floors, rules.num_responses, again)
        ends |= conditional
        complete = sorted(started, key=lambda key: ends[key][-1][:2])
        taken: list[PromptKey] = []
        reached = 0
        held: list[PromptKey] = []
        for key in complete:
            held.append(key)
            reached = ends[key][-1][0]
            more = True
            while more and len(taken) < target:
                more = False
                for candidate in held:
                    rest = [k for k in oldest if k not in taken and k != candidate]
                    left = target - len(taken) - 1
                    if schedulable([bound - waits[k] - 1 for k in rest[left:]], size):
                        taken.append(candidate)
                        held.remove(candidate)
                        more = True
                        break
            if len(taken) == target:
                break
        last = (reached, max((ends[key][-1][1] for key in taken + held if ends[key][-1][0] == reached), default=0))
        thrown = wasted
        for key in started:
            if key in redone:
                assert key in taken
                continue
            whole = key in taken or key in held
            chosen = {number for _, _, number in ends[key]} if whole else set()
            until = ends[key][-1][:2] if whole else last
            had, ran = [], []
            for number in range(responses):
                tokens, event = again(key, number), (again(key, number), places[key] + number)
                came = tokens if number in chosen or (not whole and event < until) else min(tokens - 1, until[0])
                had.append(came)
                ran.append(not event < until)
                if key not in taken:
                    seen[key] = max(seen.get(key, 0), came)
                if key not in taken or number not in chosen:
                    thrown += came
            floors[key] = [mine if still else max(had) for mine, still in zip(had, ran, strict=True)]
        lengths += [again(key, number) for key in taken for _, _, number in ends[key]]
        for key in started:
            for number in range(responses):
                attempts[key, number] = attempts.get((key, number), 0) + 1
        fresh = [key for key in fresh if key not in started]
        waits = {key: waits.get(key, 0) + 1 for key in (*waits, *started) if key not in taken}
        result.append((kind, taken, thrown))
    return result


def redrawn(
    keys: list[PromptKey], places: dict[PromptKey, int], serial: int, floors: dict[PromptKey, list[int]], size: int,
    length: Callable[[PromptKey, int], int],
) -> tuple[dict[PromptKey, list[tuple[int, int, int]]], int]:  # fmt: skip
    """Deferred prompts that are drawn until a draw outlives their floors: what is kept of each, tokens thrown away.

    ``places``: of the first draws among all samples of the round; ``serial``: how many samples were started.
    """
    events = [(length(key, n), places[key] + n, key, n) for key in keys for n in range(size)]
    heapq.heapify(events)
    began = dict.fromkeys(keys, [0])  # when each draw was started
    ended: dict[PromptKey, dict[int, tuple[int, int, int]]] = {key: {} for key in keys}
    kept, thrown = {}, 0
    while len(kept) < len(keys):
        now, place, key, number = heapq.heappop(events)
        if key in kept:
            continue
        mine = ended[key]
        mine[number] = (now, place, number)

        def numbers(draw: int) -> range:
            return range(draw * size, (draw + 1) * size)

        def longer(draw: int, key=key, mine=mine) -> bool:
            return any(n in mine and length(key, n) > floors[key][n % size] for n in numbers(draw))

        rejected = 0
        while rejected < 62 and not longer(rejected) and all(n in mine for n in numbers(rejected)):
            rejected += 1
        if rejected == len(began[key]):
            for draw in range(rejected, min(63, rejected + min(8, rejected + 1))):
                began[key] = [*began[key], now]
                for n in numbers(draw):
                    heapq.heappush(events, (now + length(key, n), serial, key, n))
                    serial += 1
        survives = longer(rejected) or rejected == 62
        if survives and len(began[key]) > rejected + 1:
            for draw in range(rejected + 1, len(began[key])):
                for n in numbers(draw):
                    thrown += length(key, n) if n in mine else min(length(key, n) - 1, now - began[key][draw])
            began[key] = began[key][: rejected + 1]
            events = [event for event in events if event[2] != key or event[3] < (rejected + 1) * size]
            heapq.heapify(events)
        if survives and all(n in mine for n in numbers(rejected)):
            kept[key] = sorted(mine[n] for n in numbers(rejected))
            thrown += sum(length(key, n) for n in range(rejected * size))
    return kept, thrown
