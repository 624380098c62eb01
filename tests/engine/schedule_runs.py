"""How a schedule is run, and what must come out of it; no test of its own.

The engine follows the schedule itself (``--pat-policy schedule``), so that it hits the same stages of a generation on
a fast machine and on a busy one.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sglang_pat.testing.server import Server

from .schedules import Request, Schedule
from .streams import GREEDY

TIE = 1e-5
"""Logprobs this close are a tie: either token is right."""

TIES_PER_TOKEN = 1e-4
"""More ties than that are no accident."""


@dataclass
class Outcome:
    """What came of a schedule.

    Attributes:
        outputs: token ids of each request, in the order of ``Schedule.requests``, each copy.
        records: records of the switches.
        degrees: those that the pacer saw.
        drafts: how many drafts were checked, and how many were right.
    """

    outputs: list[list[list[int]]]
    records: list[dict]
    degrees: set[int]
    drafts: Counter[str]


def run(server: Server, schedule: Schedule, **extra) -> Outcome:
    """Run ``schedule`` on an adaptive server.  ``extra`` goes into each request's body."""
    return asyncio.run(_run(server, schedule, extra))


async def _run(server: Server, schedule: Schedule, extra: dict) -> Outcome:
    async with server.session() as session:
        code, _ = await server.reconfigure_async(session, schedule.start_tp)
        assert code == 200

        def send(requests: Iterable[Request]) -> list[asyncio.Task]:
            return [asyncio.ensure_future(server.generate_one(session, r.body(**extra))) for r in requests]

        first = (schedule.pacer, *schedule.first)
        # Of several copies of a prompt one comes ahead of the others.
        gate = {"arrived": len(first) if schedule.together else 1}
        before = [s for s in schedule.switches if s.at <= schedule.second_at]
        after = [s for s in schedule.switches if s.at > schedule.second_at]
        pause = {"step": schedule.second_at, "hold": True}
        await server.set_schedule(session, gate, *(switch.entry() for switch in before), pause)
        work = send(first)
        records = (await server.wait_for_schedule(session))["switches"]
        await server.set_schedule(session, *(switch.entry(schedule.second_at) for switch in after))
        work += send(schedule.second)
        records += (await server.wait_for_schedule(session))["switches"]
        answers = await asyncio.gather(*work)
        for record in records:
            assert not record["error"], record
    degrees = {tp for _, tp in answers[0]["meta_info"].get("tp_from_token", ())}
    drafts: Counter[str] = Counter()
    for copy in (copy for answer in answers for copy in (answer if isinstance(answer, list) else [answer])):
        drafts["drafts checked"] += copy["meta_info"].get("spec_num_proposed_drafts", 0)
        drafts["drafts right"] += copy["meta_info"].get("spec_num_correct_drafts", 0)
    return Outcome([_outputs(answer) for answer in answers], records, degrees, drafts)


def _outputs(answer: dict | list[dict]) -> list[list[int]]:
    copies = answer if isinstance(answer, list) else [answer]
    for copy in copies:
        reason = copy["meta_info"]["finish_reason"]
        assert reason["type"] == "length", reason
        assert copy["meta_info"]["completion_tokens"] == len(copy["output_ids"]), copy["meta_info"]
        starts, degrees = zip(*copy["meta_info"].get("tp_from_token", [(0, 1)]), strict=True)  # stock says nothing
        assert starts[0] == 0 and starts[-1] < len(copy["output_ids"]) and list(starts) == sorted(set(starts)), starts
        assert all(one != other for one, other in itertools.pairwise(degrees)), degrees
    return [copy["output_ids"] for copy in copies]


def add_expected(stock: Server, schedules: Iterable[Schedule], known: dict, chunk: int = 256) -> None:
    """Add what the stock server answers to every request of ``schedules`` to ``known``, by ``Request.key``."""
    longest: dict[tuple[int, ...], int] = {}
    for request in (r for s in schedules for r in s.requests if r.key not in known):
        longest[request.prompt] = max(longest.get(request.prompt, 0), request.max_new_tokens)
    keys = sorted(longest.items())
    for begin in range(0, len(keys), chunk):
        part = keys[begin : begin + chunk]
        bodies = [Request(prompt=prompt, max_new_tokens=new).body() for prompt, new in part]
        for (prompt, new), answer in zip(part, stock.generate(bodies), strict=True):
            (output,) = _outputs(answer)
            assert len(output) == new
            # Greedy and ignoring EOS: a shorter answer is the beginning of the longer one.
            known.update({(prompt, shorter): output[:shorter] for shorter in range(1, new + 1)})


@dataclass
class Totals:
    """What has been compared so far, and where an answer went another way at a tie."""

    counts: Counter[str] = field(default_factory=Counter)
    ties: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return ", ".join(f"{count} {what}" for what, count in self.counts.items()) + f", {len(self.ties)} ties"


def has_steps_before_last(schedule: Schedule) -> bool:
    """Whether there are decode steps between the last switch and the one before, in another degree."""
    *before, last = schedule.switches
    degree = before[-1].tp if before else schedule.start_tp
    return degree != last.tp and all(switch.batch is None and switch.at < last.at for switch in before)


def compare(schedule: Schedule, outcome: Outcome, known: dict, stock, totals: Totals) -> None:
    """Raise ``AssertionError`` if an output differs from the stock server's other than by a tie.

    ``stock`` is called to get the stock server, if it is needed.
    """
    counts, records = totals.counts, outcome.records
    if has_steps_before_last(schedule):
        assert len(outcome.degrees) > 1, "the pacer saw one degree only"
    assert any(record["requests"] for record in records), "the pacer lives at the last switch"
    counts["schedules"] += 1
    counts["pacers in several degrees"] += len(outcome.degrees) > 1
    counts["switches"] += len(records)
    counts["with live requests"] += sum(record["requests"] > 0 for record in records)
    counts["requests moved with their KV"] += sum(record["migrated"] for record in records)
    counts["recomputed"] += sum(record["recomputed"] for record in records)
    counts.update(outcome.drafts)
    for index, (request, copies) in enumerate(zip(schedule.requests, outcome.outputs, strict=True)):
        assert len(copies) == request.n, f"request {index} of seed {schedule.seed}: {len(copies)} of {request.n} copies"
        want = known[request.key]
        for got in copies:
            where = f"seed {schedule.seed}, request {index} (prompt of {len(request.prompt)})"
            assert len(got) == len(want), f"{where}: {len(got)} tokens, not {len(want)}"
            differ = (i for i, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1])
            position = next(differ, len(want))
            counts["outputs"] += 1
            counts["tokens compared"] += position
            if position < len(want):
                totals.ties.append(tie(stock(), request.prompt, got, want, position, where))


def tie(stock: Server, prompt: Sequence[int], got: list[int], want: list[int], position: int, where: str) -> str:
    """A line about a tie at ``position``; ``AssertionError`` if it is none."""
    params = GREEDY | {"max_new_tokens": 1}
    body = {"input_ids": [*prompt, *want[:position]], "sampling_params": params}
    (answer,) = stock.generate([body | {"return_logprob": True, "top_logprobs_num": 2}])
    (best, token, _), (second, other, _) = answer["meta_info"]["output_top_logprobs"][0]
    line = (
        f"{where}: token {position} of {len(want)} is {got[position]}, stock says {want[position]}; "
        f"its two best are {token} and {other}, {best - second:.2g} apart"
    )
    assert {got[position], want[position]} == {token, other} and best - second <= TIE, line
    return line


def agreement(stock: Server, schedule: Schedule, outcome: Outcome) -> float:
    """Share of tokens that are the stock server's best, given the tokens before them."""
    params = GREEDY | {"max_new_tokens": 1}
    pairs = [(r.prompt, o) for r, outputs in zip(schedule.requests, outcome.outputs, strict=True) for o in outputs]
    bodies = [
        {
            "input_ids": [*prompt, *output],
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": len(prompt) - 1,
            "top_logprobs_num": 1,
        }
        for prompt, output in pairs
    ]
    same = [
        token == best[0][1]
        for (_, output), answer in zip(pairs, stock.generate(bodies), strict=True)
        # The first entry is the last token of the prompt.
        for token, best in zip(output, answer["meta_info"]["input_top_logprobs"][1:], strict=True)
    ]
    return sum(same) / len(same)
