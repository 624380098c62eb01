"""A demonstration that was not run: its rounds, switches, samples and step times; no test of its own."""

from dataclasses import asdict

from sglang_pat.demo import cases, report
from sglang_pat.demo.records import (
    Answer,
    Result,
    Run,
    Sample,
    SeenSwitch,
    StepTime,
)

LOW, HIGH = "tp1×dp2", "tp2×dp1"
WORK = cases.LognormalBatch(4, 8, 1.0, 64)


def switch(**changes):
    fields = dict(before=LOW, after=HIGH, at=3.0, pause=0.5, requests=2, tokens=77, moved_bytes=1_500_000, error="")
    return SeenSwitch(**fields | changes)


BACK = switch(before=HIGH, after=LOW, at=8.0, pause=0.001, requests=0, tokens=0, moved_bytes=0)
SAMPLES = [
    Sample(at=0.5, layout=LOW, loads=[2, 2]), Sample(at=2.5, layout=LOW, loads=[2, 0]),
    Sample(at=4.0, layout=HIGH, loads=[2]), Sample(at=6.0, layout=HIGH, loads=[1]),
]  # fmt: skip


def run(contender="adaptive", last=8.0, texts="abcd", **changes):
    """Four responses, the last one at ``last``; merged at 3.5 s if adaptive."""
    answers = [Answer(end=last * (i + 1) / 4, tokens=10, text=text) for i, text in enumerate(texts)]
    adaptive = contender == "adaptive"
    fields = dict(
        contender=contender, layout=contender.removeprefix("static ") if not adaptive else LOW, answers=answers,
        switches=[switch(), BACK] if adaptive else [], samples=SAMPLES if adaptive else [], others=0.25,
    )  # fmt: skip
    return Run(**fields | changes)


STEPS = [StepTime(requests=1, seconds={LOW: 0.06, HIGH: 0.04}), StepTime(requests=64, seconds={LOW: 0.2, HIGH: 0.3})]


def result(*rounds, **changes):
    """Of rounds of seconds: static tp1×dp2, static tp2×dp1, adaptive."""
    made = [
        [run(f"static {LOW}", low), run(f"static {HIGH}", high), run("adaptive", adaptive)]
        for low, high, adaptive in rounds or [(10.0, 12.0, 8.0)]
    ]
    fields = dict(
        name="real-link", model="SmolLM2", link="none", link_name="real link", work=asdict(WORK), steps=STEPS,
        rounds=made,
    )  # fmt: skip
    return Result(**fields | changes)


def report_of(*results):
    return report.Report(results=list(results), machine={"cores": 2, "cpu": "a CPU"}, seconds=1.5)
