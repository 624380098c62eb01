"""One long-tail batch: static layouts and the adaptive engine, in one run, taking turns.

    python bench/rollout.py [--quick] [--json FILE] [--png FILE] [--model M] [--batch N] [--link none US:GB/S ...]

Prompts are real chat prompts, response lengths are fixed in advance (lognormal quantiles, shuffled anew each round), so
that in a round every layout does the same work; the policies are told one limit for all responses, not the lengths.
No prompt comes twice, so that nothing is learnt about it.  Each link has its own profile, made by ``profiler.sweep`` if
it is not there yet.  Both servers are alive all the time; the one that is not measured is stopped (SIGSTOP).
"""

from __future__ import annotations

import argparse
import json
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
from sglang_pat.demo.prompts import PROMPTS
from sglang_pat.testing import models
from sglang_pat.testing.machine import machine
from sglang_pat.testing.server import Server, stopped

CACHE = Path(".cache")
RANKS = ("--tp", "1", "--dp", "2", "--max-running-requests", "128")
BASE = (*RANKS, "--adaptive-tp")
KV_TOKENS = 40_000
GRID = (
    "batch=1,4,16,64,128;context=64,256;lone=1,4;prefill_batch=1,8;prefill_length=64,256;"
    "switch_requests=4,16;switch_context=64,384"
)
"""What batches of this benchmark go through; the sweep's own grid covers all that the engine could hold."""


@dataclass(frozen=True)
class Work:
    """Lengths of a batch: lognormal with this median (tokens) and sigma, at least ``least``, cut at ``limit``."""

    batch: int
    median: float
    sigma: float
    limit: int
    least: int = 4

    def bodies(self, round_number: int) -> list[dict]:
        """The requests of one round."""
        ranks = (i + 0.5 for i in range(self.batch))
        lengths = [self.median * 2.718281828 ** (self.sigma * ndtri(rank / self.batch)) for rank in ranks]
        rng = random.Random(round_number)
        rng.shuffle(lengths)
        return [
            {
                "text": f"Question {round_number}.{i}: {rng.choice(PROMPTS)}\nAnswer:",
                "sampling_params": {
                    "temperature": 0,
                    "max_new_tokens": int(min(max(length, self.least), self.limit)),
                    "ignore_eos": True,
                    "custom_params": {"pat_limit": self.limit},
                },
            }
            for i, length in enumerate(lengths)
        ]


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


def compare(model: Path, link: str, profile: Path, work: Work, rounds: int, policies: list[str]) -> dict:
    environment = {"env": {} if link == "none" else {LINK_ENV: link}, "max_total_tokens": KV_TOKENS}
    with ExitStack() as stack:
        servers = []
        for flags in [["--pat-policy", "manual"]] + [
            ["--pat-policy", p, "--pat-profile", str(profile)] for p in policies
        ]:
            with stopped(*servers):
                servers.append(stack.enter_context(Server(model, *BASE, *flags, **environment)))
        contenders = [Contender("static tp1×dp2", servers[0], 1), Contender("static tp2×dp1", servers[0], 2)]
        contenders += [Contender(p, server, None) for p, server in zip(policies, servers[1:], strict=True)]
        for number in range(rounds + 1):
            warm = number == 0
            bodies = work.bodies(number)
            if warm:
                bodies = [b | {"sampling_params": b["sampling_params"] | {"max_new_tokens": 4}} for b in bodies[:32]]
            order = contenders[number % len(contenders) :] + contenders[: number % len(contenders)]
            for contender in order:
                with stopped(*(s for s in servers if s is not contender.server)):
                    contender.run(bodies)
            if warm:
                for contender in contenders:
                    contender.seconds, contender.switches = [], []
                continue
            print(f"  round {number}: " + ", ".join(f"{c.name} {c.seconds[-1]:.1f} s" for c in contenders), flush=True)
    static = {c.name: statistics.median(c.seconds) for c in contenders[:2]}
    best = min(static, key=static.get)
    return {
        "link": link,
        "work": asdict(work),
        "tokens": sum(b["sampling_params"]["max_new_tokens"] for b in work.bodies(1)),
        "best_static": best,
        "runs": {
            c.name: {
                "seconds": c.seconds,
                "median": statistics.median(c.seconds),
                "against_best_static": static[best] / statistics.median(c.seconds),
                "switches": [
                    [{k: s[k] for k in ("at", "from_tp", "to_tp", "requests", "tokens", "pause_seconds")} for s in made]
                    for made in c.switches
                ],
            }
            for c in contenders
        },
    }


def draw(results: list[dict], about: str, path: Path) -> None:
    """Seconds of each contender by regime, every round a point; switches of the last round below the names."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(1 + 4.2 * len(results), 4), squeeze=False)
    for axis, result in zip(axes[0], results, strict=True):
        runs = result["runs"]
        for x, (name, run) in enumerate(runs.items()):
            color = {"static tp1×dp2": "#2f6db5", "static tp2×dp1": "#ef8a2c"}.get(name, "#3a9a5b")
            axis.bar(x, run["median"], color=color, width=0.65)
            axis.plot([x] * len(run["seconds"]), run["seconds"], "k.", markersize=4)
            axis.text(x, run["median"] * 1.02, f"{run['median']:.1f} s\n×{run['against_best_static']:.2f}", ha="center")
        axis.set_xticks(range(len(runs)), [name.replace(" ", "\n") for name in runs])
        axis.set_ylim(0, max(max(run["seconds"]) for run in runs.values()) * 1.2)
        axis.set_title(f"{result['model']}, {result['work']['batch']} requests\nlink: {result['link']}", fontsize=10)
        axis.set_ylabel("seconds for the batch")
    figure.text(0.99, 0.01, about, ha="right", fontsize=8, color="#666f7b")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=130)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model and one round; 2 minutes at most")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw them here")
    parser.add_argument("--model", default="smollm2", help="smollm2, or a checkpoint (default: smollm2)")
    parser.add_argument("--batch", type=int, default=128, help="requests (default: 128)")
    parser.add_argument("--median", type=float, default=32, help="median response, tokens (default: 32)")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the lognormal (default: 1)")
    parser.add_argument("--limit", type=int, default=448, help="longest response, tokens (default: 448)")
    parser.add_argument("--link", nargs="+", default=["none"], metavar="US:GB/S", help="emulated links, or none")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--budget", default="4m", help="of a sweep, if the profile is not there yet (default: 4m)")
    parser.add_argument(
        "--policies", nargs="+", default=["survival"], help="survival, pat, threshold (default: survival)"
    )
    args = parser.parse_args()
    if args.quick:
        model = models.make_random("llama", CACHE / "models" / "llama")
        work, rounds, budget = Work(16, 24, 1.0, 200), 1, "20s"
    else:
        named = {"smollm2": lambda: models.make_smollm2(CACHE / "models" / "smollm2")}
        model = named.get(args.model, lambda: Path(args.model))()
        work, rounds, budget = Work(args.batch, args.median, args.sigma, args.limit), args.rounds, args.budget
    about = machine()
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    results = []
    for link in args.link:
        profile = sweep(model, link, budget)
        print(f"{model.name}, {work.batch} requests, link {link}{'' if link == 'none' else ' (emulated)'}:", flush=True)
        results.append({"model": model.name} | compare(model, link, profile, work, rounds, args.policies))
        for name, run in results[-1]["runs"].items():
            against = run["against_best_static"]
            print(f"  {name:16} median {run['median']:6.1f} s, ×{against:.3f} of the best static layout")
        if args.json:
            args.json.write_text(json.dumps({"machine": about, "results": results}, indent=1) + "\n")
    if args.png:
        draw(results, f"{about['cpu']}, {about['cores']} cores; median of {rounds} rounds, each a point", args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
