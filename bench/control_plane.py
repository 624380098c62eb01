"""What the coordinator and the admitter take for large rounds: no model, no engine, scripted ranks.

    python bench/control_plane.py [--quick] [--mode MODE] [--json FILE]

Routing: a burst of requests to 8 leaders that report nothing meanwhile, and one that arrives while ranks switch.  Load
reports: decoding and taking in the report of a leader that has its part of the requests.  Decisions: of ``survival``
in tp1 in the middle of a batch of twice as many requests, with a profile of this repository.  Admitter: whole rounds,
each call timed.  Times are CPU time of the one thread: what else the machine does is not in them.
"""

from __future__ import annotations

import gc
import heapq
import random
import statistics
import sys
from pathlib import Path
from time import thread_time
from typing import Any

import _bench
import numpy as np

from sglang_pat import messages as m
from sglang_pat.config import AdaptiveConfig
from sglang_pat.coordinator.replicas import Generation
from sglang_pat.coordinator.router import Coordinator
from sglang_pat.layout import ParallelLayout
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.registry import make_policy
from sglang_pat.policies.snapshot import Load, Snapshot
from sglang_pat.predict import profile as profiles
from sglang_pat.predict.cost import build_predictors
from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.records import Abort, Launch, Output, RoundOver, SampleId, Span
from sglang_pat.rollout.rules import Rules

LEADERS = 8
PROFILE = Path(__file__).parents[1] / "studies" / "profiles" / "8xH100-llama3.1-8b.json"
MODES = ("strict", "reorder", "partial")
BARS = {"routing_us": 20, "event_us": 50}
PATIENCE_SECONDS = 30.0
"""Seconds after which a round is measured as far as it came."""


class Nowhere:
    """An outbox that keeps nothing."""

    def send_to_leader(self, rank: int, obj: Any) -> None: ...
    def send_to_server(self, obj: Any) -> None: ...
    def record_switch(self, record: m.SwitchRecord) -> None: ...
    def record_training_step(self, step: Any) -> None: ...
    def start_counting_requests(self) -> None: ...
    def log_decision(self, snapshot: Any, decision: Any) -> None: ...
    def log_response(self, response: m.Finished) -> None: ...


def coordinator() -> Coordinator:
    return Coordinator(AdaptiveConfig(base=ParallelLayout(1, LEADERS), policy="threshold"), Nowhere())


def request(number: int) -> Generation:
    return Generation(obj=None, tokens=100 + number % 900)


def routing(requests: int) -> float:
    """Microseconds a request, in a burst that no report answers."""
    core = coordinator()
    begun = thread_time()
    for number in range(requests):
        core.receive(request(number), 0.0)
    return 1e6 * (thread_time() - begun) / requests


def held_back(requests: int) -> float:
    """Microseconds a request that arrives while the ranks switch, until it is on its way."""
    core = coordinator()
    core.receive(request(0), 0.0)
    core.reconfigure(m.Reconfigure(query_id=1, tp=8), 0.0)
    for rank in range(LEADERS):
        core.handle_rank_message(m.Prepared(rank=rank, epoch=1, seconds=0.0), 0.0)
    begun = thread_time()
    for number in range(requests):
        core.receive(request(number), 0.0)
    for rank in range(LEADERS):
        phases = {"drain": 0.0}
        done = dict(requests_in=int(rank == 0), requests_out=int(rank == 0), migrated=int(rank == 0))
        core.handle_rank_message(m.RankSwitched(rank=rank, epoch=1, phases=phases, **done), 0.0)
    assert core.layout.tp == 8
    return 1e6 * (thread_time() - begun) / requests


def load_report(requests: int, repeats: int = 20) -> float:
    """Microseconds for the report of a leader that has an eighth of the requests."""
    core, each = coordinator(), requests // LEADERS
    for number in range(requests):
        core.receive(request(number), 0.0)
    running = [m.Running(100, n, 4096, n) for n in range(each)]
    report = m.LoadReport(
        rank=0, tp=1, received=each, running=each, waiting=0, tokens=100 * each, kv_used=0, kv_total=0, retracted=0,
        weight_updates=0, requests=running,
    )  # fmt: skip
    data = m.encode(report)
    taken = []
    for _ in range(repeats):
        begun = thread_time()
        core.handle_rank_message(m.decode_from_rank(data), 0.0)
        taken.append(thread_time() - begun)
    return 1e6 * statistics.median(taken)


def deciding(requests: int, repeats: int = 20) -> float:
    """Milliseconds of a decision of ``survival``: so many requests are left, with lengths from 1 to 1,500, in families
    of 8; 4,096 responses have been seen."""
    rng = np.random.default_rng(0)
    profile = profiles.load(PROFILE)
    predictor, costs = build_predictors(profile)
    policy = make_policy("survival", predictor=predictor, costs=costs)
    history = LengthHistory()
    for number, drawn in enumerate(np.exp(rng.normal(6, 1, 4096)).astype(int)):
        history.observe(int(min(drawn, 4096)), -1 - number // 8)
    load = Load(
        prompt=np.full(requests, 256), output=rng.integers(1, 1500, requests), limit=np.full(requests, 4096),
        family=np.arange(requests) // 8, replica=np.arange(requests) % LEADERS,
    )  # fmt: skip
    situation = Snapshot(
        now=100.0, tp=1, degrees=(1, 2, 4, 8), num_ranks=LEADERS, requests=requests, peak=2 * requests,
        last_arrival=0.0, complete=True, load=load,
    )  # fmt: skip
    taken = []
    for _ in range(repeats):
        begun = thread_time()
        policy(situation, history)
        taken.append(thread_time() - begun)
    return 1e3 * statistics.median(taken)


def length(sample: SampleId) -> int:
    """Tokens of a response: few mostly, one in 25 at the limit."""
    value = random.Random(f"{sample.epoch}/{sample.index}/{sample.number}").random()
    return 400 if value > 0.96 else 1 + int(100 * value)


def admission(mode: str, prompts: int, responses: int, rounds: int = 3) -> dict[str, Any]:
    """Whole rounds: a token a step for each sample, the ends in the order of time, aborts confirmed at once."""
    admitter = Admitter(Rules(mode=mode, num_prompts=prompts, num_responses=responses))
    admitter.feed([((0, index), {"input_ids": [1]}) for index in range(3 * rounds * prompts)])
    calls: list[float] = []
    begins: list[float] = []
    events = 0
    gave_up = thread_time() + PATIENCE_SECONDS
    for number in range(rounds):
        begun = thread_time()
        actions = admitter.begin(number)
        begins.append(thread_time() - begun)
        ends: list[tuple[int, SampleId, int]] = []
        now, over = 0, False
        had: dict[SampleId, int] = {}
        while not over:
            stopped: list[SampleId] = []
            for action in actions:
                if isinstance(action, Launch):
                    before = had[action.sample] = action.prefix.tokens if action.prefix else 0
                    heapq.heappush(ends, (now + length(action.sample) - before, action.sample))
                elif isinstance(action, Abort):
                    stopped.append(action.sample)
                elif isinstance(action, RoundOver):
                    over = True
            actions = []
            gone = set(stopped)
            for sample in stopped:
                actions += _timed(calls, admitter.record_stopped, sample, Output())
            if gone:
                ends = [end for end in ends if end[1] not in gone]
                heapq.heapify(ends)
            elif not over:
                now, sample = heapq.heappop(ends)
                output = Output(spans=[Span(number, length(sample) - had[sample])], finish_reason="stop")
                actions += _timed(calls, admitter.record_finished, sample, output)
            if thread_time() > gave_up:
                break
        events = len(calls)
        if thread_time() > gave_up:
            break
    return {
        "mode": mode, "prompts": prompts, "responses": responses, "rounds": number + over, "events": events,
        "begin_ms": 1e3 * max(begins), "event_us": 1e6 * statistics.fmean(calls),
        "event_median_us": 1e6 * statistics.median(calls), "longest_ms": 1e3 * max(calls),
    }  # fmt: skip


def _timed(calls: list[float], call: Any, *arguments: Any) -> list:
    begun = thread_time()
    actions = call(*arguments)
    calls.append(thread_time() - begun)
    return actions


def main() -> int:
    parser = _bench.options(__doc__, "up to 4,096 requests and 256 prompts; half a minute")
    parser.add_argument("--mode", action="append", choices=MODES, help="only rounds of this mode; again for others")
    args = parser.parse_args()
    machine = _bench.about()
    results: dict[str, list[dict[str, Any]]] = {"requests": [], "rounds": []}
    gc.collect()
    gc.freeze()  # what imports have left is not gone through again and again
    print(f"\n{'requests':>8}  {'routed, us':>10}  {'held back, us':>13}  {'a report, us':>12}  {'decided, ms':>11}")
    for requests in (256, 1024, 4096) if args.quick else (256, 1024, 4096, 16384):
        row = {
            "requests": requests, "routing_us": statistics.median(routing(requests) for _ in range(3)),
            "held_back_us": held_back(requests), "report_us": load_report(requests),
            "decided_ms": deciding(requests),
        }  # fmt: skip
        results["requests"].append(row)
        print(
            f"{requests:>8}  {row['routing_us']:>10.1f}  {row['held_back_us']:>13.1f}  {row['report_us']:>12.0f}  "
            f"{row['decided_ms']:>11.1f}"
        )
    titles = "mode prompts rounds events begin,ms event,us median longest,ms".split()
    print("\n" + "  ".join(f"{title:>11}" for title in titles))
    for prompts in (64, 256) if args.quick else (64, 256, 1024):
        for mode in args.mode or MODES:
            row = admission(mode, prompts, 16)
            results["rounds"].append(row)
            print(
                f"{mode:>11}  {prompts:>11}  {row['rounds']:>11}  {row['events']:>11}  {row['begin_ms']:>11.1f}  "
                f"{row['event_us']:>11.1f}  {row['event_median_us']:>11.1f}  {row['longest_ms']:>11.1f}",
                flush=True,
            )
    _bench.write(args.json, machine=machine, bars=BARS, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
