"""What the coordinator and the admitter take for large rounds: no model, no engine, scripted ranks.

    python bench/control_plane.py [--quick] [--mode MODE] [--json FILE]

Routing: a burst of requests to 8 leaders that report nothing meanwhile, and one that arrives while ranks switch.  Load
reports: decoding and taking in the report of a leader that has its part of the requests.  Decisions: of ``survival``
in tp1 in the middle of a batch of twice as many requests, with a profile of this repository.  Admitter: whole rounds,
each call timed; then a round on an engine that answers at once, where what counts is how long the event loop is kept
from others.  Times are CPU time of the one thread: what else the machine does is not in them.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import math
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
from sglang_pat.predict.cost import fitted
from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.records import Abort, Launch, Output, RoundOver, SampleId, Span
from sglang_pat.rollout.rounds import RolloutRound
from sglang_pat.rollout.rules import Rules

LEADERS = 8
PROFILE = Path(__file__).parents[1] / "studies" / "profiles" / "8xH100-llama3.1-8b.json"
MODES = ("strict", "reorder", "partial")
BARS = {"routing_us": 20, "event_us": 50, "slice_ms": 20}
PATIENCE_SECONDS = 30.0
"""A round that takes longer is measured as far as it came."""


class Nowhere:
    """An outbox that keeps nothing."""

    def to_leader(self, rank: int, obj: Any) -> None: ...
    def to_server(self, obj: Any) -> None: ...
    def switched(self, record: m.SwitchRecord) -> None: ...
    def stepped(self, step: Any) -> None: ...
    def counting(self) -> None: ...
    def decided(self, snapshot: Any, decision: Any) -> None: ...
    def finished(self, response: m.Finished) -> None: ...


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
        core.rank_message(m.Prepared(rank=rank, epoch=1, seconds=0.0), 0.0)
    begun = thread_time()
    for number in range(requests):
        core.receive(request(number), 0.0)
    for rank in range(LEADERS):
        phases = {"drain": 0.0}
        done = dict(requests_in=int(rank == 0), requests_out=int(rank == 0), migrated=int(rank == 0))
        core.rank_message(m.RankSwitched(rank=rank, epoch=1, tp=8, phases=phases, **done), 0.0)
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
        core.rank_message(m.decode_from_rank(data), 0.0)
        taken.append(thread_time() - begun)
    return 1e6 * statistics.median(taken)


def deciding(requests: int, repeats: int = 20) -> float:
    """Milliseconds of a decision of ``survival``: so many requests are left, with lengths from 1 to 1,500, in families
    of 8; 4,096 responses have been seen."""
    rng = np.random.default_rng(0)
    profile = profiles.load(PROFILE)
    predictor, costs = fitted(profile)
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


# -- rounds ---------------------------------------------------------------------------------------------------


def length(sample: SampleId) -> int:
    """Of a response: short mostly, one in 25 at the limit."""
    value = random.Random(f"{sample.epoch}/{sample.index}/{sample.number}").random()
    return 400 if value > 0.96 else 1 + int(100 * value)


def admitter(mode: str, prompts: int, responses: int, rounds: int) -> Admitter:
    made = Admitter(Rules(mode=mode, num_prompts=prompts, num_responses=responses))
    feed(made, 0, 3 * rounds * prompts)
    return made


def feed(to: Admitter, first: int, count: int) -> None:
    to.feed([((0, index), {"input_ids": [1]}) for index in range(first, first + count)])


def admission(mode: str, prompts: int, responses: int, rounds: int = 3) -> dict[str, Any]:
    """Whole rounds: a token a step for each sample, the ends in the order of time, aborts confirmed at once."""
    made = admitter(mode, prompts, responses, rounds)
    calls: list[float] = []
    begins: list[float] = []
    events = 0
    gave_up = thread_time() + PATIENCE_SECONDS
    for number in range(rounds):
        begun = thread_time()
        actions = made.begin(number)
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
                actions += _timed(calls, made.stopped, sample, Output())
            if gone:
                ends = [end for end in ends if end[1] not in gone]
                heapq.heapify(ends)
            elif not over:
                now, sample = heapq.heappop(ends)
                output = Output(spans=[Span(number, length(sample) - had[sample])], finish_reason="stop")
                actions += _timed(calls, made.finished, sample, output)
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


class Scripted:
    """An engine that takes nothing for a step; ``ENDS`` samples at most end in one turn of the event loop."""

    ENDS = 8

    def __init__(self) -> None:
        self._ends: list[tuple[int, str]] = []
        self._waiting: dict[str, tuple[asyncio.Future, int]] = {}
        self._now = 0

    async def begin_round(self, begun: Any) -> None:
        """Nobody asks."""

    async def end_round(self, name: str) -> None:
        """Nobody asks."""

    def updates(self) -> int:
        return 0

    async def generate(self, rid: str, prompt: Any, params: dict[str, Any]) -> Output:
        sample = SampleId(*map(int, rid.split("-")[2:]))
        tokens = length(sample) - len(prompt["input_ids"]) + 1
        future = asyncio.get_running_loop().create_future()
        self._waiting[rid] = future, self._now
        heapq.heappush(self._ends, (self._now + tokens, rid))
        reason = await future
        made = tokens if reason else min(tokens - 1, self._now - self._waiting[rid][1])
        del self._waiting[rid]
        return Output(token_ids=[7] * made, finish_reason=reason)

    def abort(self, rid: str) -> None:
        if rid in self._waiting and not self._waiting[rid][0].done():
            self._waiting[rid][0].set_result("")

    def text(self, token_ids: list[int]) -> str:
        return ""

    def step(self) -> None:
        """The next few samples end."""
        for _ in range(self.ENDS):
            while self._ends and (self._ends[0][1] not in self._waiting or self._waiting[self._ends[0][1]][0].done()):
                heapq.heappop(self._ends)
            if self._ends:
                self._now, rid = heapq.heappop(self._ends)
                self._waiting[rid][0].set_result("stop")


class Collector:
    """Python's garbage collector: seconds that it took, and the longest pause."""

    def __init__(self) -> None:
        self.seconds = self.longest = self._begun = 0.0
        gc.callbacks.append(self._told)

    def _told(self, phase: str, about: dict) -> None:
        if phase == "start":
            self._begun = thread_time()
        else:
            taken = thread_time() - self._begun
            self.seconds += taken
            self.longest = max(self.longest, taken)


def now_of(collector: Collector) -> float:
    return thread_time() - collector.seconds


async def read(round_: RolloutRound) -> None:
    """As a client does."""
    async for _ in round_:
        pass


async def turns_of(round_: RolloutRound, engine: Scripted, collector: Collector, begun: float, cancel: bool) -> list:
    """Seconds of each turn of the event loop, without the collector's, until the round is over and freed.

    Args:
        begun: when the round was about to begin, by :func:`now_of`.
        cancel: give it up when a third of its groups have been returned.
    """
    reader, found, last = asyncio.ensure_future(read(round_)), [], begun
    third, left, gave_up = round_.admitter.state.round.target // 3, 0, thread_time() + PATIENCE_SECONDS
    while (not reader.done() or left > 0) and thread_time() < gave_up:
        await asyncio.sleep(0)
        found.append(now_of(collector) - last)
        left = round_.admitter.rules.num_prompts if round_.summary is None else left - 1
        engine.step()
        last = now_of(collector)
        state = round_.admitter.state.round
        if cancel and state is not None and not state.cancelled and len(state.taken) > third:
            round_.cancel()
    reader.cancel()
    return found


async def loop_slices(mode: str, prompts: int, responses: int, rounds: int = 3) -> dict[str, Any]:
    """Milliseconds of the longest turns of the event loop, without the collector's, and of the collector's longest.

    Rounds as the server has them, each on a copy of the job's state; one more is cancelled in the middle.
    """
    collector = Collector()
    made, engine = admitter(mode, prompts, responses, rounds + 1), Scripted()
    begins, others, cancelled = [], [], []
    for number in range(rounds + 1):
        begun = now_of(collector)
        made = Admitter(made.rules, made.snapshot())
        round_ = RolloutRound(made, engine, number, {})
        found = await turns_of(round_, engine, collector, begun, cancel=number == rounds)
        begins.append(found[0])
        (cancelled if number == rounds else others).append(max(found[1:]))
        if round_.summary is None:
            break
    gc.callbacks.clear()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    return {
        "begin_turn_ms": 1e3 * max(begins), "slice_ms": 1e3 * max(others),
        "cancelled_ms": 1e3 * max(cancelled, default=math.nan), "collector_ms": 1e3 * collector.longest,
    }  # fmt: skip


def main() -> int:
    parser = _bench.options(__doc__, "up to 4,096 requests and 256 prompts; half a minute")
    parser.add_argument("--mode", action="append", choices=MODES, help="only rounds of this mode; again for others")
    args = parser.parse_args()
    about = _bench.about()
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
    titles = "mode prompts rounds events begin,ms event,us median longest,ms first,ms turn,ms cancelled gc,ms".split()
    print("\n" + "  ".join(f"{title:>11}" for title in titles))
    for prompts in (64, 256) if args.quick else (64, 256, 1024):
        for mode in args.mode or MODES:
            row = admission(mode, prompts, 16) | asyncio.run(loop_slices(mode, prompts, 16))
            results["rounds"].append(row)
            print(
                f"{mode:>11}  {prompts:>11}  {row['rounds']:>11}  {row['events']:>11}  {row['begin_ms']:>11.1f}  "
                f"{row['event_us']:>11.1f}  {row['event_median_us']:>11.1f}  {row['longest_ms']:>11.1f}  "
                f"{row['begin_turn_ms']:>11.1f}  {row['slice_ms']:>11.1f}  {row['cancelled_ms']:>11.1f}  "
                f"{row['collector_ms']:>11.1f}",
                flush=True,
            )
    _bench.write(args.json, machine=about, bars=BARS, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
