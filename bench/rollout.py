"""One long-tail batch: static layouts and the adaptive engine, in one run, taking turns.

    python bench/rollout.py [--quick] [--only REGIME ...] [--rounds N] [--json FILE] [--png FILE]

Prompts are real chat prompts, response lengths are fixed in advance (quantiles, shuffled anew each round), so that in a
round every layout does the same work; the policies are told one limit for all responses, not the lengths.  No prompt
comes twice, so that of it nothing is learnt.  Each model and link has its own profile, made by ``profiler.sweep`` if it
is not there yet.  Both servers are alive all the time; the one that is not measured is stopped (SIGSTOP).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from scipy.special import ndtri

from sglang_pat.comm.shm import LINK_ENV
from sglang_pat.predict.predictor import Predictor
from sglang_pat.predict.profile import load
from sglang_pat.testing import models
from sglang_pat.testing.server import Server, stopped
from sglang_pat.tools.machine import machine
from sglang_pat.tools.prompts import PROMPTS

CACHE = Path(".cache")
RANKS = ("--tp", "1", "--dp", "2", "--max-running-requests", "128")
BASE = (*RANKS, "--adaptive-tp")
KV_TOKENS = 20_000
GRID = (
    "batch=1,2,4,8,16,32,64,128;context=64,256;lone=1,2,4;prefill_batch=1,8;prefill_length=32,128;"
    "switch_requests=4,16;switch_context=64,384"
)
"""What batches of this benchmark go through; the sweep's own grid covers all that the engine could hold."""
WARM_ROUNDS = 2
"""Rounds that do not count; after two of one size policies know how large a round is (coordinator/round_tracker.py)."""

WARM_TOKENS = 4
"""Response length in them, and their limit too, so that policies learn no length from them."""


@dataclass(frozen=True)
class Work:
    """Response lengths of a batch, in tokens.

    Lognormal with this median and sigma, at least ``least``; a share ``capped`` of them runs into the ``limit``.
    """

    batch: int
    median: float
    sigma: float
    limit: int
    capped: float = 0.0
    least: int = 4

    def lengths(self) -> list[int]:
        long = round(self.batch * self.capped)
        short = self.batch - long
        drawn = [self.median * math.exp(self.sigma * ndtri((i + 0.5) / short)) for i in range(short)]
        return [int(min(max(length, self.least), self.limit)) for length in drawn] + [self.limit] * long

    def bodies(self, round_number: int) -> list[dict]:
        """The requests of one round; those of the first ones end at once."""
        rng = random.Random(round_number)
        lengths, limit = self.lengths(), self.limit
        rng.shuffle(lengths)
        if round_number < WARM_ROUNDS:
            lengths, limit = [WARM_TOKENS] * len(lengths), WARM_TOKENS
        return [
            {
                "text": f"Question {round_number}.{i}: {rng.choice(PROMPTS)}\nAnswer:",
                "sampling_params": {
                    "temperature": 0,
                    "max_new_tokens": length,
                    "ignore_eos": True,
                    "custom_params": {"pat_limit": limit},
                },
            }
            for i, length in enumerate(lengths)
        ]


@dataclass(frozen=True)
class Regime:
    """A model, an emulated link (µs:GB/s) or ``none``, and the work."""

    model: str
    link: str
    work: Work


LOGNORMAL = Work(128, 32, 1.0, 448)
CAPPED = Work(128, 64, 0.3, 448, capped=0.06)
BANDWIDTH, LATENCY = "5:0.03", "200:1"
"""Emulated links: with the first, tp2 over tp1 is of ``wide`` at batch 128 what TP8 over TP2 is of 8×A40 (1.26); the
second takes its time for each message."""
REGIMES = {
    "smollm2": Regime("smollm2", "none", LOGNORMAL),
    "smollm2-bandwidth": Regime("smollm2", BANDWIDTH, Work(64, 32, 1.0, 448)),
    "smollm2-latency": Regime("smollm2", LATENCY, Work(64, 32, 1.0, 448)),
    "wide": Regime("wide", "none", LOGNORMAL),
    "wide-bandwidth": Regime("wide", BANDWIDTH, CAPPED),
    "wide-latency": Regime("wide", LATENCY, LOGNORMAL),
}
QUICK = Regime("llama", "none", Work(16, 24, 1.0, 200))
MODELS = {
    "smollm2": lambda folder: models.make_smollm2(folder),
    # 147 million parameters in two layers: steps are mostly weights, as those of a model of billions are.
    "wide": lambda folder: models.make_random(
        "llama", folder, layers=2, hidden=2048, intermediate=10240, heads=16, kv_heads=4, head_dim=128, vocab=2048
    ),
    "llama": lambda folder: models.make_random("llama", folder),
}


class Contender:
    """One way to run a batch: a layout that stays, or a policy."""

    def __init__(self, name: str, server: Server, tp: int | None) -> None:
        self.name, self.server, self.tp = name, server, tp
        self.seconds: list[float] = []
        self.switches: list[list[dict]] = []

    def run(self, bodies: list[dict]) -> float:
        """Wall seconds from sending the batch to its last answer."""
        if self.tp is not None:
            self.server.reconfigure(self.tp)
        before = self.server.status()["num_switches"]
        began = time.time()
        answers = self.server.generate(bodies)
        seconds = time.time() - began
        wanted = [body["sampling_params"]["max_new_tokens"] for body in bodies]
        assert [answer["meta_info"]["completion_tokens"] for answer in answers] == wanted, "a response was cut"
        while self.tp is None and self.server.status()["layout"]["tp"] != 1:
            time.sleep(0.1)
        status = self.server.status()
        made = status["switches"][len(status["switches"]) - (status["num_switches"] - before) :]
        self.switches.append([record | {"at": record["started"] - began} for record in made])
        self.seconds.append(seconds)
        return seconds


def sweep(model: Path, link: str, budget: str) -> Path:
    """The profile of this model over this link."""
    out = CACHE / "profiles" / f"rollout-{model.name}-{link.replace(':', '_')}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "profiler.sweep", "--model-path", str(model), "--out", str(out)]
    command += ["--budget", budget, "--grid", GRID, *RANKS, "--dtype", "float32", "--max-total-tokens", str(KV_TOKENS)]
    environment = {name: value for name, value in os.environ.items() if name != LINK_ENV}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | ({} if link == "none" else {LINK_ENV: link})
    if code := subprocess.run(command, env=environment).returncode:
        sys.exit(code)  # it has said why
    return out


def ratios(profile: Path, batches: tuple[int, ...]) -> dict[int, float]:
    """Step time of tp2 over that of tp1 by requests in the engine, at 64 tokens of context, as profiled."""
    step = Predictor(load(profile)).step_seconds

    def of(batch: int) -> float:
        replicas = min(batch, 2)
        each = batch // replicas
        return step(2, batch, 64 * batch) / step(1, each, 64 * each, replicas)

    return {batch: round(of(batch), 2) for batch in batches}


def compare(model: Path, link: str, profile: Path, work: Work, rounds: int) -> dict:
    environment = {"env": {} if link == "none" else {LINK_ENV: link}, "max_total_tokens": KV_TOKENS}
    with ExitStack() as stack:
        servers = []
        for flags in (["--pat-policy", "manual"], ["--pat-policy", "survival", "--pat-profile", str(profile)]):
            with stopped(*servers):
                servers.append(stack.enter_context(Server(model, *BASE, *flags, **environment)))
        contenders = [
            Contender("static tp1×dp2", servers[0], 1),
            Contender("static tp2×dp1", servers[0], 2),
            Contender("survival", servers[1], None),
        ]
        for number in range(WARM_ROUNDS + rounds):
            bodies = work.bodies(number)
            order = contenders[number % len(contenders) :] + contenders[: number % len(contenders)]
            for contender in order:
                with stopped(*(s for s in servers if s is not contender.server)):
                    contender.run(bodies)
            if number < WARM_ROUNDS:
                for contender in contenders:
                    contender.seconds, contender.switches = [], []
                continue
            shown = ", ".join(f"{c.name} {c.seconds[-1]:.1f} s" for c in contenders)
            print(f"  round {number - WARM_ROUNDS + 1}: {shown}", flush=True)
    static = {c.name: statistics.median(c.seconds) for c in contenders[:2]}
    best = min(static, key=static.get)
    reference = next(c.seconds for c in contenders if c.name == best)
    return {
        "link": link,
        "work": asdict(work),
        "tokens": sum(work.lengths()),
        "best_static": best,
        "runs": {
            c.name: {
                "seconds": c.seconds,
                "median": statistics.median(c.seconds),
                # Round by round, since the machine's speed drifts from one to the next.
                "against_best_static": statistics.median(b / s for b, s in zip(reference, c.seconds, strict=True)),
                "switches": [
                    [{k: s[k] for k in ("at", "from_tp", "to_tp", "requests", "tokens", "pause_seconds")} for s in made]
                    for made in c.switches
                ],
            }
            for c in contenders
        },
    }


def draw(results: list[dict], about: str, path: Path) -> None:
    """Seconds of each contender by regime, every round a point; below, when the last round's switches came."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(3, len(results))
    rows = -(-len(results) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(1 + 4.2 * columns, 4 * rows), squeeze=False)
    for axis in axes.flat[len(results) :]:
        axis.axis("off")
    for axis, result in zip(axes.flat, results, strict=False):
        runs = result["runs"]
        for x, (name, run) in enumerate(runs.items()):
            color = {"static tp1×dp2": "#2f6db5", "static tp2×dp1": "#ef8a2c"}.get(name, "#3a9a5b")
            axis.bar(x, run["median"], color=color, width=0.65)
            axis.plot([x] * len(run["seconds"]), run["seconds"], "k.", markersize=4)
            top = max(run["seconds"])
            axis.text(x, top * 1.02, f"{run['median']:.1f} s\n×{run['against_best_static']:.2f}", ha="center")
        made = runs["survival"]["switches"][-1]
        arrows = [f"tp{m['to_tp']} at {m['at']:.1f} s ({m['requests']} left)" for m in made if m["requests"]]
        axis.set_xticks(range(len(runs)), [name.replace(" ", "\n") for name in runs])
        axis.set_xlabel("survival: " + (",\n".join(arrows) or "no switch"), fontsize=8)
        axis.set_ylim(0, max(max(run["seconds"]) for run in runs.values()) * 1.2)
        link = "natural link" if result["link"] == "none" else f"emulated link {result['link']}"
        axis.set_title(f"{result['model']}, {result['work']['batch']} requests\n{link}", fontsize=10)
        axis.set_ylabel("seconds for the batch")
    figure.text(0.99, 0.01, about, ha="right", fontsize=8, color="#666f7b")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model and one round; 2 minutes at most")
    parser.add_argument("--only", nargs="+", choices=REGIMES, metavar="REGIME", help=f"of {', '.join(REGIMES)}")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count (default: 3)")
    parser.add_argument("--budget", default="4m", help="of a sweep, if the profile is not there yet (default: 4m)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the results here, after each regime, beside those of others"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw them here, with all that are in --json")
    args = parser.parse_args()
    regimes = {"quick": QUICK} if args.quick else {name: REGIMES[name] for name in args.only or REGIMES}
    rounds, budget = (1, "20s") if args.quick else (args.rounds, args.budget)
    about = machine()
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    results = {}
    if args.json and args.json.is_file():
        results = {result["regime"]: result for result in json.loads(args.json.read_text())["results"]}
    for name, regime in regimes.items():
        model = MODELS[regime.model](CACHE / "models" / regime.model)
        profile = sweep(model, regime.link, budget)
        link = "natural link" if regime.link == "none" else f"emulated link {regime.link}"
        over = ratios(profile, (1, 4, 16, regime.work.batch))
        print(f"{name}: {regime.work.batch} requests, {sum(regime.work.lengths())} tokens, {link}")
        shown = ", ".join(f"{ratio} at {batch}" for batch, ratio in over.items())
        print(f"  a step of tp2 over one of tp1, by requests: {shown}", flush=True)
        found = compare(model, regime.link, profile, regime.work, rounds)
        results[name] = {"regime": name, "model": regime.model, "tp2_over_tp1": over, "machine": about} | found
        for contender, run in found["runs"].items():
            ratio = found["runs"][found["best_static"]]["median"] / run["median"]
            by_rounds = f"{run['against_best_static']:.3f} by rounds"
            print(f"  {contender:16} median {run['median']:6.1f} s, best static over it {ratio:.3f}, {by_rounds}")
        if args.json:
            args.json.write_text(json.dumps({"results": list(results.values())}, indent=1) + "\n")
    if args.png:
        shown = [results[name] for name in (*REGIMES, "quick") if name in results]
        draw(shown, f"{about['cpu']}, {about['cores']} cores; bars: medians, points: rounds", args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
