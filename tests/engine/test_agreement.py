"""Ranks that come together from different groups go on as one: what they receive, its order, how they profile."""

from __future__ import annotations

import gzip
import json

from .streams import body, through, tokens

PRIORITIES = (None, 3, 3, -2)


def test_order_and_reception(checked):
    """More requests than run at once, some with equal priorities: followers keep the order of their leader's clock."""
    work = [body(i, 40, priority=PRIORITIES[i % len(PRIORITIES)]) for i in range(24)]
    want = tokens(checked.generate(work))
    answers, _ = through(checked, work, {10: 2, 25: 4, 40: 2, 55: 1, 70: 4})
    assert tokens(answers) == want


def test_a_profile_goes_on_over_a_switch(checked, tmp_path):
    """A profile's end is counted in steps, of which the groups have done different numbers; one has done none."""
    what = {"output_dir": str(tmp_path), "num_steps": 15, "activities": ["CPU"], "with_stack": False}
    begun = checked.post("/start_profile", what)
    assert begun.status_code == 200, begun.text
    ((answer,), _) = through(checked, [body(0, 60)], {8: 4})
    assert len(answer["output_ids"]) == 60
    traces = sorted(tmp_path.glob("*.trace.json.gz"))
    assert [trace.name.split("TP-")[1] for trace in traces] == [f"{rank}.trace.json.gz" for rank in range(4)]
    with gzip.open(traces[3]) as file:
        assert json.load(file)["traceEvents"]
