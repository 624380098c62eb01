"""Ranks that come together from different groups go on as one: what they receive, its order, how they profile."""

from __future__ import annotations

import asyncio
import gzip
import json

PRIORITIES = (None, 3, 3, -2)


def bodies(count: int, tokens: int) -> list[dict]:
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    prompts = [[5 + i, 7 + 3 * i, 9] for i in range(count)]
    return [
        {"input_ids": prompt, "sampling_params": params, "priority": PRIORITIES[i % len(PRIORITIES)]}
        for i, prompt in enumerate(prompts)
    ]


def test_order_and_reception(checked):
    """More requests than run at once, some with equal priorities: followers keep the order of their leader's clock."""
    work = bodies(40, 60)
    want = [answer["output_ids"] for answer in checked.generate(work)]

    async def switching() -> list[dict]:
        async with checked.session() as session:
            switches = [{"tp": tp, "arrived": 40, "step": 10 + 15 * i} for i, tp in enumerate((2, 4, 2, 1, 4))]
            await checked.arm(session, *switches)
            return await asyncio.gather(*(checked.one(session, body) for body in work))

    got = [answer["output_ids"] for answer in asyncio.run(switching())]
    assert got == want
    assert [record["error"] for record in checked.status()["switches"]][-5:] == [""] * 5


def test_a_profile_goes_on_over_a_switch(checked, tmp_path):
    """Its end is counted in steps, of which the groups have done different numbers; one has done none."""
    what = {"output_dir": str(tmp_path), "num_steps": 30, "activities": ["CPU"], "with_stack": False}
    begun = checked.post("/start_profile", what)
    assert begun.status_code == 200, begun.text

    async def switching() -> dict:
        async with checked.session() as session:
            (body,) = bodies(1, 120)
            await checked.arm(session, {"tp": 4, "arrived": 1, "step": 8})
            return await checked.one(session, body)

    assert len(asyncio.run(switching())["output_ids"]) == 120
    traces = sorted(tmp_path.glob("*.trace.json.gz"))
    assert [trace.name.split("TP-")[1] for trace in traces] == [f"{rank}.trace.json.gz" for rank in range(4)]
    with gzip.open(traces[3]) as file:
        assert json.load(file)["traceEvents"]
