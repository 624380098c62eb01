"""One case (:func:`run_rounds`): the static layouts and the adaptive engine, in turns, on the same batches.

Both servers are alive all the time; the one whose turn it is not is stopped (SIGSTOP).
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil

from sglang_pat.coordinator.round_tracker import ALIKE
from sglang_pat.cpu.shm import LINK_ENV
from sglang_pat.demo.cases import NATURAL, DemoCase
from sglang_pat.layout import ParallelLayout
from sglang_pat.predict.predictor import Predictor
from sglang_pat.predict.profile import load
from sglang_pat.testing import prefork as programs
from sglang_pat.testing.prefork import Prefork
from sglang_pat.testing.server import Server, ServerDied, suspend
from sglang_pat.tools.console import Speaker
from sglang_pat.tools.cpu_share import Meter

T = TypeVar("T")

LOW, HIGH = ParallelLayout(1, 2), ParallelLayout(2, 1)
ADAPTIVE = "adaptive"
POLICY = "survival"
RANKS = ("--tp", "1", "--dp", "2", "--max-running-requests", "128", "--device", "cpu")
KV_TOKENS = 20_000

WARM_REQUESTS, WARM_TOKENS = 8, 4
"""Requests of the runs that do not count, and the tokens of their responses.  The adaptive engine gets ``ALIKE`` whole
batches of this length, too: then policies know how large a round is (``coordinator/round_tracker.py``)."""

RETURN_SECONDS = 30.0
"""Seconds that an engine that has run empty may take to go back to its base layout."""


class DemoError(Exception):
    """Error of the demonstration; the message is for the user."""


@dataclass(frozen=True)
class Answer:
    """A response, with its ``end`` in seconds after the first request."""

    end: float
    tokens: int
    text: str


@dataclass(frozen=True)
class SwitchMark:
    """A switch; ``at``: seconds after the first request, without the preparation; ``pause``: seconds; what was
    alive."""

    from_tp: int
    to_tp: int
    at: float
    pause: float
    requests: int
    tokens: int
    error: str


@dataclass(frozen=True)
class BatchRun:
    """One batch in a static layout, or with the policy; ``others``: share of the cores that other programs took."""

    contender: str
    answers: list[Answer]
    switches: list[SwitchMark]
    others: float

    @property
    def seconds(self) -> float:
        return max(answer.end for answer in self.answers)

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a decode step with so many requests in the engine, by layout, as profiled."""

    requests: int
    seconds: dict[str, float]


@dataclass(frozen=True)
class ContestResult:
    """Step times, and the runs of each round, one of each contender; the last contender is the adaptive engine."""

    steps: list[StepTime]
    rounds: list[list[BatchRun]]

    @property
    def contenders(self) -> list[str]:
        return [run.contender for run in self.rounds[0]]

    def list_seconds(self, contender: str) -> list[float]:
        at = self.contenders.index(contender)
        return [runs[at].seconds for runs in self.rounds]

    def compute_median(self, contender: str) -> float:
        return statistics.median(self.list_seconds(contender))

    @property
    def static(self) -> list[str]:
        """The static layouts, the faster one first."""
        return sorted(self.contenders[:-1], key=self.compute_median)

    def count_different(self) -> int:
        """Number of responses of all rounds whose texts are not the same with all contenders."""
        texts = (zip(*([answer.text for answer in run.answers] for run in runs), strict=True) for runs in self.rounds)
        return sum(len(set(of_one)) > 1 for of_round in texts for of_one in of_round)

    def count_responses(self) -> int:
        """Number of responses of all rounds, of one contender."""
        return sum(len(runs[0].answers) for runs in self.rounds)


def make_link_environment(link: str) -> dict[str, str]:
    return {} if link == NATURAL else {LINK_ENV: link}


def sweep_profile(
    case: DemoCase, model: Path, out: Path, budget: str, grid: str, speaker: Speaker, prefork: Prefork | None
) -> Path:
    """The profile of this model over this link, at ``out``; a file that is there is gone on with.

    ``budget`` and ``grid``: arguments of ``profiler.sweep``.

    Raises:
        DemoError: the sweep failed; with what it said.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    argv = ["--model-path", str(model), "--out", str(out), "--budget", budget, "--grid", grid, *RANKS]
    argv += ["--dtype", "float32", "--max-total-tokens", str(KV_TOKENS)]
    environment = {name: value for name, value in os.environ.items() if name != LINK_ENV}
    environment |= programs.ENVIRONMENT | make_link_environment(case.link)
    output: list[str] = []
    with speaker.show_waiting(f"profiling both layouts of {case.model}, {case.link_name}: {budget} at most"):
        files = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        process = programs.popen(prefork, "profiler.sweep", argv, environment, **files)
        try:
            for line in process.stdout or ():
                output.append(line)
                speaker.say(f"  {line.rstrip()}")
            code = process.wait()
        finally:
            process.kill()
    if code:
        raise DemoError(f"profiler.sweep failed (exit code {code}):\n{''.join(output)[-3000:]}")
    return out


def predict_step_times(profile: Path, batches: tuple[int, ...]) -> list[StepTime]:
    """Step times of both layouts with so many requests of 64 tokens, as profiled."""
    predictor = Predictor(load(profile, complete=True))

    def of(layout: ParallelLayout, batch: int) -> float:
        replicas = min(batch, layout.dp)
        each = -(-batch // replicas)
        return predictor.step_seconds(layout.tp, each, 64 * each, replicas)

    return [
        StepTime(requests=batch, seconds={str(layout): of(layout, batch) for layout in (LOW, HIGH)})
        for batch in batches
    ]


class Contender:
    """One way to run a batch: a layout that stays, or the policy (``layout`` None)."""

    def __init__(self, name: str, server: Server, layout: ParallelLayout | None) -> None:
        self.name, self.server, self.layout = name, server, layout

    def run(self, bodies: list[dict[str, Any]]) -> BatchRun:
        """Send the batch at once, wait for its last answer.

        Raises:
            DemoError: an answer is not as long as was asked for.
        """
        if self.layout is not None:
            self.server.reconfigure(self.layout.tp)
        before = self.server.status()["num_switches"]
        meter = Meter([psutil.Process(), psutil.Process(self.server.process.pid), *self.server.list_children()])
        began, answers = asyncio.run(_send(self.server, bodies))
        others = meter.share()
        lengths = [body["sampling_params"]["max_new_tokens"] for body in bodies]
        if [answer.tokens for answer in answers] != lengths:
            raise DemoError(f"{self.name}: a response is shorter or longer than asked for")
        status = self._return_to_base()
        return BatchRun(self.name, answers, parse_switches(status, began, status["num_switches"] - before), others)

    def _return_to_base(self) -> dict[str, Any]:
        """Wait until the engine is empty and, if it is adaptive, in its base layout; returns its status."""
        begin = time.monotonic()
        while True:
            status = self.server.status()
            if not status["requests"] and (self.layout is not None or status["layout"] == status["base"]):
                return status
            if time.monotonic() - begin > RETURN_SECONDS:
                raise DemoError(f"the engine did not go back to its base layout in {RETURN_SECONDS:.0f} s: {status}")
            time.sleep(0.1)


async def _send(server: Server, bodies: list[dict[str, Any]]) -> tuple[float, list[Answer]]:
    """Send the requests; returns the unix time of the first one, and the answers."""
    async with server.session() as session:
        began = time.time()

        async def one(body: dict[str, Any]) -> Answer:
            data = await server.generate_one(session, body)
            return Answer(time.time() - began, data["meta_info"]["completion_tokens"], data["text"])

        return began, await asyncio.gather(*map(one, bodies))


def parse_switches(status: dict[str, Any], began: float, count: int) -> list[SwitchMark]:
    """The last ``count`` switches of a ``/pat/status``; ``began`` is the unix time of the run's beginning."""
    records = status["switches"]
    return [
        SwitchMark(
            at=record["started"] + record["phases"].get("prepare", 0.0) - began,
            pause=record["pause_seconds"],
            **{name: record[name] for name in ("from_tp", "to_tp", "requests", "tokens", "error")},
        )
        for record in records[len(records) - count :]
    ]


def run_rounds(
    case: DemoCase,
    model: Path,
    profile: Path,
    more: Callable[[int, float], bool],
    speaker: Speaker,
    prefork: Prefork | None = None,
) -> list[list[BatchRun]]:
    """The rounds of a case.

    Args:
        more: whether there is another round, of the rounds so far and the seconds that the longest took.

    Raises:
        DemoError: whatever went wrong; with the end of the server's log if a server is to blame.
    """
    with ExitStack() as stack:
        contenders = _start_contenders(case, model, profile, speaker, prefork, stack)
        servers = list({contender.server: None for contender in contenders})

        def run(contender: Contender, bodies: list[dict[str, Any]], doing: str) -> BatchRun:
            others = (server for server in servers if server is not contender.server)
            with suspend(*others), speaker.show_waiting(f"{doing}, {contender.name}"):
                return _call_with_server_log(contender.server, partial(contender.run, bodies))

        for contender in contenders:
            run(contender, case.work.make_requests(0, WARM_TOKENS)[:WARM_REQUESTS], "warming up")
        for number in range(1, 1 + ALIKE):
            run(
                contenders[-1],
                case.work.make_requests(number, WARM_TOKENS),
                f"warming up, whole batch {number} of {ALIKE}",
            )
        rounds: list[list[BatchRun]] = []
        longest = 0.0
        while not rounds or more(len(rounds), longest):
            began, number = time.monotonic(), len(rounds)
            bodies, turn = case.work.make_requests(1 + ALIKE + number), number % len(contenders)
            in_turn = contenders[turn:] + contenders[:turn]
            runs = {contender.name: run(contender, bodies, f"round {number + 1}") for contender in in_turn}
            rounds.append([runs[contender.name] for contender in contenders])
            longest = max(longest, time.monotonic() - began)
            shown = ", ".join(f"{one.contender} {one.seconds:.1f} s" for one in rounds[-1])
            speaker.say(f"  round {number + 1}: {shown}")
    return rounds


def _start_contenders(
    case: DemoCase, model: Path, profile: Path, speaker: Speaker, prefork: Prefork | None, stack: ExitStack
) -> list[Contender]:
    servers: list[Server] = []
    for flags in (["--pat-policy", "manual"], ["--pat-policy", POLICY, "--pat-profile", str(profile)]):
        with suspend(*servers), speaker.show_waiting(f"starting engine {len(servers) + 1} of 2"):
            server = Server(
                model,
                *RANKS,
                "--adaptive-tp",
                *flags,
                max_total_tokens=KV_TOKENS,
                env=make_link_environment(case.link),
                prefork=prefork,
                wait=False,
            )
            stack.enter_context(server)
            _call_with_server_log(server, server.wait_ready)
            servers.append(server)
    fixed, switching = servers
    return [
        Contender(f"static {LOW}", fixed, LOW),
        Contender(f"static {HIGH}", fixed, HIGH),
        Contender(ADAPTIVE, switching, None),
    ]


def _call_with_server_log(server: Server, what: Callable[[], T]) -> T:
    """Call ``what``; whatever goes wrong is a DemoError with the end of the server's log."""
    try:
        return what()
    except (DemoError, KeyboardInterrupt):
        raise
    except ServerDied as error:
        raise DemoError(str(error)) from None
    except Exception as error:
        with suppress(Exception):
            server.process.wait(2)  # a dying server closes its connections first
        code = server.process.poll()
        why = f"the server died (exit code {code})" if code is not None else str(error) or type(error).__name__
        raise DemoError(f"{why}; end of {server.log}:\n{server.log_text()[-3000:]}") from error
