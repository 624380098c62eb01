"""Tail batching on this machine: real rounds without it, with it, and with it and adaptive TP, in turn.

    python bench/tail_rounds.py [--quick] [--models MODEL ...] [--json FILE]

SmolLM2 with natural lengths; ``wide``, whose weights are random, with lengths given in advance that have a tail.  The
admitter is in this process, its samples go to a server (``RolloutClient``).  ``studies/tail_batching.py`` simulates
RollPacker's settings.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import _bench
import rollout
from rich.console import Console
from rich.table import Table

from sglang_pat.demo.cases import MAKERS, QUICK, SMOLLM2, TINY, WIDE, DemoCase
from sglang_pat.demo.contest import KV_TOKENS, LOW, POLICY, RANKS
from sglang_pat.policies.registry import make_policy
from sglang_pat.predict.cost import build_predictors
from sglang_pat.predict.profile import load
from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.client import RolloutClient
from sglang_pat.rollout.http import HttpBackend
from sglang_pat.rollout.records import Output, SampleId, Summary
from sglang_pat.rollout.rules import Rules
from sglang_pat.testing.server import Server, suspend
from sglang_pat.tools.console import Speaker
from sglang_pat.tools.prompts import PROMPTS

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from studies.rounds import Engines, Simulation
from studies.shapes import Shape

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPT_TOKENS = 32
"""Tokens of a prompt, about as many as the chats have."""
RHO, SEED = 0.5, 1
"""Correlation and seed of lengths that are given."""


@dataclass(frozen=True)
class RealJob:
    """A rollout job of one model.

    Attributes:
        case: the model, and the distribution of lengths that are given.
        limit: most tokens of a response.
        rounds: that count; whole cycles of four short rounds and a long one.
        natural: responses end by themselves; else their lengths are drawn as the case says, those to one prompt with
            correlation RHO.
    """

    case: DemoCase
    num_prompts: int
    num_responses: int
    rounds: int
    limit: int
    natural: bool

    @property
    def shape(self) -> Shape:
        batch = self.case.work
        return Shape("given", self.limit, mu=math.log(batch.median), sigma=batch.sigma, atom=batch.capped)

    def rules(self, eta: float) -> Rules:
        return Rules(num_prompts=self.num_prompts, num_responses=self.num_responses, eta_prompts=eta, eta_responses=eta)


JOBS = {
    SMOLLM2: RealJob(rollout.REGIMES["smollm2"], 4, 2, rounds=5, limit=128, natural=True),
    WIDE: RealJob(rollout.REGIMES["wide"], 8, 2, rounds=10, limit=448, natural=False),
}
QUICK_JOBS = {TINY: RealJob(QUICK["quick"], 4, 2, rounds=2, limit=200, natural=False)}


Lengths = Callable[[SampleId], int]


class Client(RolloutClient):
    """Args: ``lengths``: of each sample; None: they end by themselves.  Policies are told the limit only."""

    def __init__(self, url: str, lengths: Lengths | None) -> None:
        super().__init__(url)
        self._lengths = lengths

    @asynccontextmanager
    async def _connect(self) -> AsyncGenerator[HttpBackend]:
        async with super()._connect() as backend:
            if self._lengths is not None:
                backend.generate = _given(backend.generate, self._lengths)
            yield backend


def _given(generate: Callable[..., Any], lengths: Lengths) -> Callable[..., Any]:
    async def with_length(rid: str, prompt: dict[str, Any], params: dict[str, Any]) -> Output:
        length = lengths(SampleId(*map(int, rid.split("-")[-4:])))
        limit = {"pat_limit": params["max_new_tokens"]}
        return await generate(
            rid, prompt, params | {"max_new_tokens": length, "ignore_eos": True, "custom_params": limit}
        )

    return with_length


class RoundContender:
    """A way to make rounds, over-provisioned by ``eta``."""

    def __init__(self, name: str, server: Server, job: RealJob, eta: float) -> None:
        self.name, self.server, self.job, self.rules = name, server, job, job.rules(eta)
        self.rounds: list[dict[str, Any]] = []
        self._admitter, self._fed = Admitter(self.rules), 0

    def run_round(self, version: int) -> None:
        """Run one more of :attr:`rounds`: seconds, kind, each response's length, whether it ended by itself, and so
        on."""
        self._feed_prompts()
        before = self.server.status()["num_switches"]
        began = time.monotonic()
        outputs, summary = self._play(version)
        self.rounds.append(
            {
                "seconds": time.monotonic() - began, "kind": summary.kind, "thrown": summary.thrown,
                "switches": self.server.status()["num_switches"] - before,
                "lengths": [output.tokens for output in outputs],
                "ended": [output.finish_reason == "stop" for output in outputs],
                "logprobs": [mean(output.logprobs) for output in outputs],
            }
        )  # fmt: skip

    def _feed_prompts(self) -> None:
        indices = range(self._fed, self._fed + self._admitter.wanted)
        self._admitter.feed([((0, i), {"text": CHAT.format(PROMPTS[i % len(PROMPTS)])}) for i in indices])
        self._fed = indices.stop

    def _play(self, version: int) -> tuple[list[Output], Summary]:
        params = {"temperature": 1.0, "max_new_tokens": self.job.limit}
        shape = self.job.shape
        lengths = None if self.job.natural else partial(shape.sample_length, SEED, correlation=RHO)
        *groups, summary = Client(self.server.url, lengths).rollout(self._admitter, params, version)
        return [sample.output for group in groups for sample in group.list_kept()], summary


def run(console: Console, jobs: dict[str, RealJob], budget: str) -> dict:
    """Run all contenders on each model, round by round in turn; the first round does not count."""
    machine, models = _bench.about(), {}
    for name, job in jobs.items():
        models[name] = _model(console, job, budget)
        show(console, name, job, models[name])
    return {"machine": machine, "models": models}


def _model(console: Console, job: RealJob, budget: str) -> dict[str, list[dict]]:
    model = MAKERS[job.case.model]()
    profile = rollout.sweep(job.case, model, budget, Speaker(console))
    with ExitStack() as stack:
        servers: list[Server] = []
        for flags in (["--pat-policy", "off"], ["--pat-policy", POLICY, "--pat-profile", str(profile)]):
            with suspend(*servers):
                new_server = Server(model, *RANKS, "--adaptive-tp", *flags, max_total_tokens=KV_TOKENS)
                servers.append(stack.enter_context(new_server))
        contenders = [
            RoundContender("without", servers[0], job, 1.0),
            RoundContender("tail batching", servers[0], job, 1.25),
            RoundContender("tail batching, adaptive", servers[1], job, 1.25),
        ]
        for number in range(1 + job.rounds):
            for contender in contenders:
                with suspend(*(server for server in servers if server is not contender.server)):
                    contender.run_round(number)
            shown = ", ".join(f"{c.name} {c.rounds[-1]['seconds']:.1f} s ({c.rounds[-1]['kind']})" for c in contenders)
            console.print(f"  {job.case.model}, round {number}: {shown}")
    if not job.natural:
        for contender in contenders:
            predict(contender, profile, adaptive=contender.server is servers[1])
    return {contender.name: contender.rounds[1:] for contender in contenders}


def predict(contender: RoundContender, path: Path, adaptive: bool) -> None:
    """How long the simulator says that the same rounds take, on the profile: same prompts, same lengths."""
    profile = load(path, complete=True)
    predictor, costs = build_predictors(profile)
    engines = Engines(
        predictor=predictor, costs=costs, fingerprint=profile.fingerprint, nodes=1, tp=LOW.tp,
        policy=make_policy(POLICY, predictor=predictor, costs=costs) if adaptive else None,
    )  # fmt: skip
    simulation = Simulation(engines, contender.rules, contender.job.shape, RHO, SEED, PROMPT_TOKENS)
    for number, measured in enumerate(contender.rounds):
        measured["predicted"] = simulation.run_round(number).seconds


def show(console: Console, name: str, job: RealJob, contenders: dict[str, list[dict]]) -> None:
    """``longest``: tokens of the longest response that a round returns, about its decode steps."""
    lengths = "natural lengths" if job.natural else f"given lengths, rho {RHO}"
    title = f"real rounds of {name}, P0 = {job.num_prompts}, R0 = {job.num_responses}, {lengths}; in tokens"
    table = Table(title=title, title_justify="left")
    for column in (
        "", "seconds a round", "predicted", "short", "long", "short, s", "long, s", "longest: short", "long",
        "ms a token of it", "thrown", "switches", "length, mean", "short", "long", "ended by themselves", "log-prob",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for contender, rounds in contenders.items():
        table.add_row(contender, *_cells(rounds))
    console.print(table)


def _cells(rounds: list[dict]) -> list[str]:
    kinds = [[one for one in rounds if one["kind"] == kind] for kind in ("short", "long")]
    every = {key: [value for one in rounds for value in one[key]] for key in ("lengths", "ended", "logprobs")}
    thrown, kept = sum(one["thrown"] for one in rounds), sum(every["lengths"])
    seconds = [one["seconds"] for one in rounds]
    per_token = sum(seconds) / sum(max(one["lengths"]) for one in rounds)
    return [
        f"{mean(seconds):.1f} ({median(seconds):.1f})",
        _mean([one["predicted"] for one in rounds if "predicted" in one], ".1f"), *(f"{len(of)}" for of in kinds),
        *(_mean([one["seconds"] for one in of], ".1f") for of in kinds),
        *(_mean([max(one["lengths"]) for one in of]) for of in kinds), f"{1e3 * per_token:.0f}",
        f"{thrown / (thrown + kept):.0%}", f"{sum(one['switches'] for one in rounds)}", _mean(every["lengths"]),
        *(_mean([length for one in of for length in one["lengths"]]) for of in kinds),
        f"{mean(every['ended']):.0%}", f"{mean(every['logprobs']):.3f}",
    ]  # fmt: skip


def _mean(values: list[float], form: str = ".0f") -> str:
    return format(mean(values), form) if values else "–"


def main() -> int:
    parser = _bench.options(__doc__, "a tiny model, fewer rounds")
    parser.add_argument("--models", nargs="+", choices=JOBS, default=list(JOBS))
    args = parser.parse_args()
    jobs = QUICK_JOBS if args.quick else {name: JOBS[name] for name in args.models}
    results = run(Console(width=170), jobs, "20s" if args.quick else "4m")
    _bench.write(args.json, **results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
