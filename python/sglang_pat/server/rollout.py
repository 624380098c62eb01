"""Rounds in the server: ``POST /pat/rollout`` and what belongs to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any
from weakref import WeakSet

import msgspec

from sglang_pat.messages import EndRound
from sglang_pat.metrics import RolloutMetrics
from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.events import let_go
from sglang_pat.rollout.records import Summary
from sglang_pat.rollout.rounds import RolloutRound
from sglang_pat.rollout.state import State
from sglang_pat.rollout.turns import Turns
from sglang_pat.server.bodies import Answer, MorePrompts, RolloutBody, Verdict
from sglang_pat.server.intake import Intake
from sglang_pat.server.jobs import Busy, Job, Jobs, NotSaved, check_job, held
from sglang_pat.server.rollout_backend import ManagerBackend, announced
from sglang_pat.server.rollout_events import described

SETTLE_SECONDS = 5.0
"""Longest wait for ranks to report that they have nothing, after all samples of a round are out."""


class Rollouts:
    """Jobs and their rounds.

    Args:
        folder: where the state of each job is kept; None: nowhere.
        metrics: fed with each round; None: nobody asked for them.
    """

    def __init__(self, manager: Any, folder: Path | None, metrics: RolloutMetrics | None) -> None:
        self._manager = manager
        self._metrics = metrics
        self._intake = Intake(manager)
        self._jobs = Jobs(folder)
        self._watched: WeakSet[RolloutRound] = WeakSet()

    def watch(self, round_: RolloutRound) -> None:
        """Cancel it if weights are updated."""
        self._watched.add(round_)

    def weights_changed(self) -> None:
        for round_ in list(self._watched):
            round_.weights_changed()

    # -- a round ---------------------------------------------------------------------------------------

    async def events(self, body: RolloutBody) -> AsyncIterator[dict[str, Any]]:
        """A round: what happens in it, as JSON has it, first that it has begun.

        Left before its end, it is cancelled; left before all of it was sent, it is taken back.  Whether the client has
        read what was sent, it says with the next call (``after``).

        Raises:
            ValueError, Busy, NotSaved: at the first step; nothing was taken.
        """
        params = self._intake.params(body.sampling_params, body.mode)
        prompts = await self._intake.prompts(body.prompts, params["max_new_tokens"])
        await self._over(body.job)
        job, start = self._begin(body, params, prompts)
        round_ = job.round
        try:
            problem = await self._jobs.save(body.job, round_.before)
        except asyncio.CancelledError:  # whoever asked is gone, and the next call must not find the job busy
            round_.cancel()
            self._settled(body, job, None)
            raise
        if problem:
            await self._jobs.undo(body.job)
            self._manager.pat_round(EndRound(name=round_.name))
            raise NotSaved(problem)
        if body.after is not None:
            job.history.back_to(body.after)
        if start.last not in job.history.numbers:
            job.history.add(start)
        sent = False
        try:
            before = await self._engine()
            yield {"type": "begin", "number": round_.number, "version": round_.version, "kind": round_.kind}
            async with aclosing(aiter(round_)) as found:
                async for event in found:
                    if isinstance(event, Summary):
                        # Before the client hears of it: it may ask for the next round at once, or this may be the end.
                        after = await asyncio.shield(self._settled(body, job, before))
                        yield {"type": "round", **msgspec.to_builtins(event), **after}
                        sent = True
                    else:
                        yield described(event, round_.number)
        finally:
            # The client may be gone: nobody waits for the end of it, but the next round needs it.
            round_.cancel()
            if job.round is round_:  # else the next one has begun: whoever asked for it has said what was read
                settled = self._settled(body, job, None)
                if not sent:
                    job.settling = asyncio.ensure_future(self._take_back(body.job, job, settled))

    def _begin(self, body: RolloutBody, params: dict[str, Any], prompts: list[Any]) -> tuple[Job, State]:
        """The job with its round, and its state before this call.  Raises ValueError or Busy: nothing was taken."""
        known = self._jobs.get(body.job)
        if known is not None and not known.settled:
            raise Busy(f"job {body.job!r} has a round under way; wait for its end, or give another job")
        self._jobs.make_room(body.job)
        # A copy: if anything is refused the job is what it was.
        job, admitter = self._jobs.resumed(body.job, body.rules, body.after)
        self._intake.fits(admitter, prompts, params["max_new_tokens"], self._jobs.tokens_beside(body.job))
        version = self._version(body, admitter, known)
        start = admitter.snapshot()
        try:
            admitter.feed(prompts, end_of=body.end_of_epoch)
            turns = Turns(None, body.environment_seconds) if body.turns else None
            round_ = RolloutRound(admitter, ManagerBackend(self._manager), version, params, turns=turns)
        except ValueError as error:
            raise ValueError(_named(error)) from None
        self._jobs.put(body.job, job, admitter)
        job.round, job.settled, job.settling = round_, False, None
        job.began(version, self._manager.pat_weight_updates)
        self.watch(round_)
        # Goes out before the first sample: its tasks have not run yet.
        self._manager.pat_round(announced(round_))
        return job, start

    def _version(self, body: RolloutBody, admitter: Admitter, known: Job | None) -> int:
        """Of the weights: as given, or counted: one more if they were updated since those of the state got theirs."""
        last = admitter.state.version
        updated = known is None or known.updates.get(last) != self._manager.pat_weight_updates
        if body.version is not None:
            if body.mode == "partial" and body.version == last and updated and known is not None:
                raise ValueError(f"version is {last} as in the last round, but weights were updated since; raise it")
            return body.version
        return 0 if last is None else last + updated

    def judge(self, verdict: Verdict) -> bool:
        """Whether it came in time.  Raises ValueError: no verdict was asked for on such a group."""
        round_ = self._round(verdict.job)
        if verdict.number != round_.number:
            return False  # the next round may ask about other responses to the same prompt
        return round_.judge(verdict.key, verdict.keep, verdict.reward)

    def answer(self, given: Answer) -> None:
        """Raises ValueError: such a turn awaits no answer, or these are no tokens."""
        self._round(given.job).answer(given.sample, self._intake.answer(given))

    async def feed(self, more: MorePrompts) -> bool:
        """More prompts for a round under way; False if it is over.  Raises ValueError: all of them are refused."""
        round_ = self._round(more.job)
        if more.number not in (None, round_.number):
            return False
        limit = round_.params["max_new_tokens"]
        prompts = await self._intake.prompts(more.prompts, limit)
        self._intake.fits(round_.admitter, prompts, limit, self._jobs.tokens_beside(more.job))
        taken = round_.feed(prompts, end_of=more.end_of_epoch)
        if taken and (job := self._jobs.get(more.job)) is not None:
            job.tokens = held(round_.admitter.state)
        if more.no_more:
            round_.no_more()
        return taken

    def _round(self, name: str) -> RolloutRound:
        job = self._jobs.get(name)
        if job is None or job.round is None:
            raise ValueError(f"job is {name!r}, which has no round; there are {self._jobs.known()}")
        return job.round

    # -- its end ---------------------------------------------------------------------------------------

    async def _over(self, name: str) -> None:
        """Wait for what is left to do of a job's last round, if it is over: whoever left it need not know of that."""
        job = self._jobs.get(name)
        while job is not None and job.settling is not None and not job.settling.done():
            await asyncio.wait([job.settling])  # while it settles its client may go, and then it is taken back

    def _settled(self, body: RolloutBody, job: Job, before: dict[str, int] | None) -> asyncio.Task:
        """:meth:`_settle`, once a round, in a task of its own: it goes on when the client is gone."""
        job.settling = job.settling or asyncio.ensure_future(self._settle(body, job, before))
        return job.settling

    async def _settle(self, body: RolloutBody, job: Job, before: dict[str, int] | None) -> dict[str, Any]:
        """What is left to do when a round is over; what the engine holds then, and whether the job was saved."""
        round_ = job.round
        await round_.wait()
        self._manager.pat_round(EndRound(name=round_.name))
        summary = round_.summary
        after = await self._engine_after(round_)
        after["retracted"] -= before["retracted"] if before is not None else after["retracted"]
        if self._metrics is not None:
            self._metrics.observe(body.job, summary, after)
        if not summary.cancelled:
            let_go(job.history.add(job.admitter.state))
        problem = await self._jobs.save(body.job, job.admitter.state, None if summary.cancelled else summary.number)
        job.settled, job.used = True, time.monotonic()
        told = {"engine": after, "wanted": job.admitter.wanted, "saved": not problem}
        return told | ({"problem": problem} if problem else {})

    async def _take_back(self, name: str, job: Job, settled: asyncio.Task) -> None:
        """Nobody has been told of the whole round: its prompts are where they were."""
        await asyncio.wait([settled])
        job.settled = False
        if self._metrics is not None and not job.round.summary.cancelled:
            self._metrics.taken_back(name, job.round.summary)
        job.round.take_back()
        job.history.back_to(job.admitter.state.last)
        await self._jobs.save(name, job.admitter.state)
        job.settled = True

    async def forget(self, name: str) -> None:
        """Drop a job, and all prompts that wait in it; first what is still to be done of its last round is.

        Raises:
            ValueError: there is none.
            Busy: it has a round under way.
        """
        check_job(name)
        await self._over(name)
        self._jobs.drop(name)

    # -- the engine ------------------------------------------------------------------------------------

    async def _engine_after(self, round_: RolloutRound) -> dict[str, int]:
        """What the engine has when the round is over: nothing, unless others use it.

        Leaders report what they have when it changes, so it may take a moment.
        """
        until = time.monotonic() + SETTLE_SECONDS
        while True:
            found = await self._engine()
            others = any(not rid.startswith(round_.name) for rid in self._manager.rid_to_state)
            if not (found["running"] or found["waiting"]) or others or time.monotonic() > until:
                return found
            await asyncio.sleep(0.005)

    async def _engine(self) -> dict[str, int]:
        status = await self._manager.pat_status()
        load = {name: sum(group[name] for group in status["groups"]) for name in ("running", "waiting", "tokens")}
        return load | {"retracted": status["retracted"]}


def _named(error: ValueError) -> str:
    """With the field that is wrong in front."""
    text = str(error)
    return text if text.startswith(("version", "num_prompts", "unbiased")) else f"prompts: {text}"
