"""What the figures say, in sentences: whether the adaptive engine is ahead, and if it is not, why."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_pat.demo import timeline
from sglang_pat.demo.records import Result, Run, StepTime

EVEN = 0.02
"""Gains nearer to 1 than this count as none."""

MOMENT = 0.05
"""Share of a run: an engine may leave its base layout while the first requests come."""


def standing(result: Result) -> str:
    """``ahead``, ``even`` or ``behind``.

    An engine that stayed in the better static layout is that layout: what it differs by is the machine's doing.
    """
    if all(used(runs[-1]) == {result.best_static.removeprefix("static ")} for runs in result.rounds):
        return "even"
    return "ahead" if result.gain > 1 + EVEN else "behind" if result.gain < 1 - EVEN else "even"


def used(run: Run) -> set[str]:
    """Layouts that were in force for more than a moment."""
    return {band.layout for band in timeline.bands(run) if band.end - band.start > MOMENT * run.seconds}


def headline(results: Sequence[Result]) -> str:
    """The message of the whole demonstration."""
    words = {
        "ahead": "ahead of the better static layout",
        "even": "level with the better static layout",
        "behind": "behind the better static layout",
    }
    parts = []
    for which, said in words.items():
        where = [f"{r.model}, {r.link_name} (×{r.gain:.2f})" for r in results if standing(r) == which]
        if where:
            parts.append(f"{said}: {' and '.join(where)}")
    return "Adaptive is " + "; ".join(parts)


def choice(results: Sequence[Result]) -> str:
    """What the choice between the static layouts costs."""
    best = [result.best_static for result in results]
    cost = max(result.median(result.worst_static) / result.median(result.best_static) - 1 for result in results)
    if len(set(best)) > 1:
        return f"No static layout is best in all cases: the wrong one takes up to {cost:.0%} longer."
    return f"{best[0]} is the better static layout here; the other one takes up to {cost:.0%} longer."


def case(result: Result) -> str:
    """One case in one sentence."""
    best, adaptive = result.median(result.best_static), result.median(result.adaptive)
    said = {"ahead": "adaptive is ahead", "even": "adaptive is level", "behind": "adaptive is behind"}
    spread = ", ".join(f"{gain:.2f}" for gain in result.gains(result.adaptive))
    return (
        f"{result.model}, {result.link_name}: {said[standing(result)]}, ×{result.gain:.2f} by the median of the "
        f"rounds ({spread}); medians {adaptive:.1f} s against {best:.1f} s of {result.best_static}"
    )


def faster(step: StepTime) -> str:
    """The layout whose step is the shorter one."""
    return min(step.seconds, key=lambda layout: step.seconds[layout])


def steps(times: Sequence[StepTime]) -> str:
    """The measured step times in one line."""
    layouts = " / ".join(times[0].seconds)
    said = [
        f"{' / '.join(f'{seconds * 1e3:.0f}' for seconds in step.seconds.values())} ms with {step.requests}"
        for step in times
    ]
    return f"a decode step takes, as {layouts}: {', '.join(said)} requests"


def reason(result: Result) -> str:
    """Why the adaptive engine is not ahead, from the step times of both layouts."""
    layouts = [faster(step) for step in result.steps]
    if len(set(layouts)) == 1 and layouts[0] != result.best_static.removeprefix("static "):
        why = (
            f"the profile takes {layouts[0]} for the faster layout, but {result.best_static} was faster: other "
            "programs disturbed one of the two; run it again on a quiet machine"
        )
    elif len(set(layouts)) == 1:
        why = f"{layouts[0]} is the faster layout for any number of requests here, so a change wins nothing"
    elif not result.switched:
        why = "the policy expected no gain from a switch while the batch drains, and made none then"
    else:
        first = result.steps[0].requests
        many = next(step.requests for step in reversed(result.steps) if faster(step) == layouts[-1])
        why = (
            f"the faster layout is {layouts[-1]} with {many} left and {layouts[0]} with {first}, but what the "
            "switches win is no more than what they cost and what the rounds differ by"
        )
    return f"{why}; {steps(result.steps)}"
