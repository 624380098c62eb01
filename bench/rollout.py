"""One long-tail batch: static layouts and the adaptive engine, in one run, taking turns.

    python bench/rollout.py [--quick] [--only REGIME ...] [--rounds N] [--json FILE]

Prompts are real chat prompts, response lengths are fixed in advance (quantiles, shuffled anew each round), so that in a
round every layout does the same work; the policies are told one limit for all responses, not the lengths.  No prompt
comes twice, so that of it nothing is learnt.  Each model and link has its own profile, made by ``profiler.sweep`` if it
is not there yet.  Both servers are alive all the time; the one that is not measured is stopped (SIGSTOP).
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

import _bench

from sglang_pat.demo import contest
from sglang_pat.demo.cases import BANDWIDTH, MAKERS, NATURAL, QUICK, SMOLLM2, WIDE, DemoCase, LognormalBatch
from sglang_pat.demo.contest import HIGH, LOW, POLICY, BatchRun, ContestResult, DemoError, StepTime
from sglang_pat.tools import console
from sglang_pat.tools.console import Speaker

CACHE = Path(".cache")
GRID = (
    "batch=1,2,4,8,16,32,64,128;context=64,256;lone=1,2,4;prefill_batch=1,8;prefill_length=32,128;"
    "switch_requests=4,16;switch_context=64,384"
)
"""What batches of this benchmark go through; the sweep's own grid covers all that the engine could hold."""

LOGNORMAL = LognormalBatch(128, 32, 1.0, 448)
CAPPED = LognormalBatch(128, 64, 0.3, 448, capped=0.06)
LATENCY = "200:1"
"""An emulated link that takes its time for each message; ``BANDWIDTH`` is one that takes it for each byte."""
REGIMES = {
    "smollm2": DemoCase(SMOLLM2, NATURAL, LOGNORMAL),
    "smollm2-bandwidth": DemoCase(SMOLLM2, BANDWIDTH, LognormalBatch(64, 32, 1.0, 448)),
    "smollm2-latency": DemoCase(SMOLLM2, LATENCY, LognormalBatch(64, 32, 1.0, 448)),
    "wide": DemoCase(WIDE, NATURAL, LOGNORMAL),
    "wide-bandwidth": DemoCase(WIDE, BANDWIDTH, CAPPED),
    "wide-latency": DemoCase(WIDE, LATENCY, LOGNORMAL),
}


def sweep(case: DemoCase, model: Path, budget: str, speaker: Speaker) -> Path:
    """The profile of this model over this link; a sweep that was interrupted goes on."""
    out = CACHE / "profiles" / f"rollout-{model.name}-{case.link.replace(':', '_')}.json"
    return contest.sweep_profile(case, model, out, budget, GRID, speaker, None)


def ratios(times: list[StepTime]) -> dict[int, float]:
    """Step time of tp2 over that of tp1 by requests in the engine, at 64 tokens of context, as profiled."""
    return {time.requests: round(time.seconds[str(HIGH)] / time.seconds[str(LOW)], 2) for time in times}


def figures(case: DemoCase, result: ContestResult) -> dict:
    """Figures of a case, for ``--json``."""
    return {
        "link": case.link,
        "work": asdict(case.work),
        "tokens": result.rounds[0][0].tokens,
        "best_static": result.static[0],
        "runs": {
            POLICY if name == contest.ADAPTIVE else name: {
                "seconds": result.list_seconds(name),
                "median": result.compute_median(name),
                # Round by round, since the machine's speed drifts from one to the next.
                "against_best_static": statistics.median(gains(result, name)),
                "switches": [_switches(runs[at]) for runs in result.rounds],
            }
            for at, name in enumerate(result.contenders)
        },
    }


def gains(result: ContestResult, name: str) -> list[float]:
    """Seconds of the better static layout over those of a contender, round by round."""
    best = result.list_seconds(result.static[0])
    return [one / other for one, other in zip(best, result.list_seconds(name), strict=True)]


def _switches(run: BatchRun) -> list[dict]:
    return [
        {
            "at": switch.at, "from_tp": switch.from_tp, "to_tp": switch.to_tp, "requests": switch.requests,
            "tokens": switch.tokens, "pause_seconds": switch.pause,
        }
        for switch in run.switches
    ]  # fmt: skip


def last_switches(found: dict) -> str:
    """Switches of ``survival`` in its last round."""
    switches = [switch for switch in found["runs"][POLICY]["switches"][-1] if switch["requests"]]
    each = [f"tp{s['to_tp']} at {s['at']:.1f} s ({s['requests']} left)" for s in switches]
    return "switches of the last round: " + (", ".join(each) or "none")


def main() -> int:
    parser = _bench.options(__doc__, "a tiny model and one round; 2 minutes at most")
    parser.add_argument("--only", nargs="+", choices=REGIMES, metavar="REGIME", help=f"of {', '.join(REGIMES)}")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count (default: 3)")
    parser.add_argument("--budget", default="4m", help="of a sweep, if the profile is not there yet (default: 4m)")
    args = parser.parse_args()
    regimes = QUICK if args.quick else {name: REGIMES[name] for name in args.only or REGIMES}
    rounds, budget = (1, "20s") if args.quick else (args.rounds, args.budget)
    machine = _bench.about()
    results = {}
    if args.json and args.json.is_file():
        results = {result["regime"]: result for result in json.loads(args.json.read_text())["results"]}
    speaker = Speaker(console.make())
    for name, case in regimes.items():
        model = MAKERS[case.model]()
        print(f"{name}: {case.work.batch} requests, {sum(case.work.compute_lengths())} tokens, {case.link_name}")
        try:
            profile = sweep(case, model, budget, speaker)
            steps = contest.predict_step_times(profile, (1, 4, 16, case.work.batch))
            over = ratios(steps)
            shown = ", ".join(f"{ratio} at {batch}" for batch, ratio in over.items())
            print(f"  a step of tp2 over one of tp1, by requests: {shown}", flush=True)
            played = contest.run_rounds(case, model, profile, lambda done, _: done < rounds, speaker)
        except DemoError as error:
            sys.exit(f"error: {error}")
        case_figures = figures(case, ContestResult(steps, played))
        results[name] = {"regime": name, "model": case.model, "tp2_over_tp1": over, "machine": machine} | case_figures
        for contender, run in case_figures["runs"].items():
            ratio = case_figures["runs"][case_figures["best_static"]]["median"] / run["median"]
            by_rounds = f"{run['against_best_static']:.3f} by rounds"
            print(f"  {contender:16} median {run['median']:6.1f} s, best static over it {ratio:.3f}, {by_rounds}")
        print(f"  {last_switches(case_figures)}")
        _bench.write(args.json, results=list(results.values()))  # beside those of others
    return 0


if __name__ == "__main__":
    sys.exit(main())
