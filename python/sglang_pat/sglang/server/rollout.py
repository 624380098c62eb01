"""Rounds in the server: ``POST /pat/rollout`` and ``Engine.rollout``."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from statistics import mean
from typing import Any
from weakref import WeakSet

import msgspec
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_pat.admission import saved
from sglang_pat.admission.admitter import Admitter
from sglang_pat.admission.planner import Planner, profiled_degree
from sglang_pat.admission.records import Group, Judge, Output, Summary
from sglang_pat.admission.rounds import RolloutRound
from sglang_pat.metrics import RolloutMetrics
from sglang_pat.predict import profile as profiles
from sglang_pat.predict.predictor import Predictor
from sglang_pat.sglang.server.intake import Intake, RolloutBody, Verdict, check_job

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 5.0
"""Longest wait for ranks to report that they have nothing, after all samples of a round are out."""

FLOOR_SECONDS = 30.0
"""A planner's floor is kept so long after a round, so that the next one finds the engine where it wants it."""


SHOWN = 8
"""Names of jobs in an error."""

MAX_JOBS = 64
"""Jobs in memory; a new one beyond that is refused."""

MAX_SAVED_JOBS = 1024
"""Files in ``--pat-rollout-dir``; a new job beyond that is refused."""

JOB_SECONDS = 86_400.0
"""A job without a round for so long is forgotten when another one begins; its file stays, if there is one."""


class Busy(RuntimeError):
    """A round of this job is under way."""


class ManagerBackend:
    """The engine behind a TokenizerManager, in its process."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def updates(self) -> int:
        return self._manager.pat_weight_updates

    async def generate(self, rid: str, prompt: dict[str, Any], params: dict[str, Any]) -> Output:
        request = GenerateReqInput(rid=rid, **prompt, sampling_params=dict(params), return_logprob=True)
        try:
            answer = await anext(self._manager.generate_request(request, None))
        finally:
            # SGLang keeps what was aborted in the queue, or was refused.
            self._manager.rid_to_state.pop(rid, None)
        meta, ids = answer["meta_info"], list(answer["output_ids"])
        reason = meta["finish_reason"]["type"]
        if reason == "abort":
            reason = "stop" if self._ended(ids, params) else ""
        logprobs = [entry[0] for entry in meta.get("output_token_logprobs") or []]
        return Output(token_ids=ids, logprobs=logprobs, text=answer.get("text") or "", finish_reason=reason)

    def abort(self, rid: str) -> None:
        self._manager.abort_request(rid)

    def text(self, token_ids: list[int]) -> str:
        tokenizer = self._manager.tokenizer
        return tokenizer.decode(token_ids, skip_special_tokens=True) if tokenizer is not None else ""

    def _ended(self, ids: list[int], params: dict[str, Any]) -> bool:
        """Whether an aborted response has its last token already: the abort came in the step that made it."""
        if params.get("ignore_eos"):
            return False
        tokenizer = self._manager.tokenizer
        stops = {*(params.get("stop_token_ids") or ()), *(self._manager.model_config.hf_eos_token_id or ())}
        if tokenizer is not None:
            stops |= {tokenizer.eos_token_id, *(getattr(tokenizer, "additional_stop_token_ids", None) or ())}
        return bool(ids) and ids[-1] in stops


class Job:
    """A training job: its admitter, and what belongs to its rounds.

    Attributes:
        round: the last one; ``settled``: it is over, and all that had to be written is.
        updates: weight updates before it.
        used: when its last round began or ended, seconds of the machine's monotonic clock.
        settling: what is done when it is over, once.
        floor: lowest tp that its planner asks for, 0 for none.
    """

    def __init__(self, admitter: Admitter) -> None:
        self.admitter = admitter
        self.round: RolloutRound | None = None
        self.settled = True
        self.settling: asyncio.Task | None = None
        self.updates = 0
        self.planner: Planner | None = None
        self.floor = 0
        self.used = time.monotonic()


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
        self._folder = folder
        self._jobs: dict[str, Job] = {}
        self._watched: WeakSet[RolloutRound] = WeakSet()

    def watch(self, round_: RolloutRound) -> None:
        """Cancel it if weights are updated."""
        self._watched.add(round_)

    def weights_changed(self) -> None:
        for round_ in list(self._watched):
            round_.weights_changed()

    def _begin(self, body: RolloutBody) -> Job:
        """Raises ValueError or Busy: then nothing was taken."""
        params = self._intake.params(body.sampling_params, body.mode)
        prompts = self._intake.prompts(body.prompts, params["max_new_tokens"])
        known = self._jobs.get(body.job)
        if known is not None and not known.settled:
            raise Busy(f"job {body.job!r} has a round under way; wait for its end, or give another job")
        self._make_room(body.job)
        # A copy: if anything is refused the job is what it was.
        admitter = self._copy(body)
        self._intake.fits(admitter, len(prompts), params["max_new_tokens"])
        version = self._version(body, admitter, known)
        try:
            admitter.feed(prompts, end_of=body.end_of_epoch)
            round_ = RolloutRound(admitter, ManagerBackend(self._manager), version, params)
        except ValueError as error:
            raise ValueError(str(error) if str(error).startswith("version") else f"prompts: {error}") from None
        job = self._jobs[body.job] = known or Job(admitter)
        job.admitter, job.round, job.settled, job.settling = admitter, round_, False, None
        job.updates, job.used = self._manager.pat_weight_updates, time.monotonic()
        self.watch(round_)
        if body.planner and admitter.state.round is not None:
            job.planner = job.planner or self._planner(round_, params["max_new_tokens"])
            # Goes out before the first sample: its tasks have not run yet.
            self._set_floor(job, job.planner.tp(round_.kind))
        return job

    def _make_room(self, name: str) -> None:
        """Forget jobs that nobody has used for long.  Raises ValueError: there are too many for another one."""
        old = time.monotonic() - JOB_SECONDS
        for other in [n for n, job in self._jobs.items() if job.settled and job.used < old and n != name]:
            del self._jobs[other]
        if name in self._jobs:
            return
        if len(self._jobs) >= MAX_JOBS:
            raise ValueError(f"job is {name!r}, and there are {MAX_JOBS} others; DELETE /pat/rollout/JOB drops one")
        if self._folder is not None and not self._file(name).exists():
            if (files := sum(1 for _ in self._folder.glob("*.json"))) >= MAX_SAVED_JOBS:
                raise ValueError(f"job is {name!r}, and {files} are kept; DELETE /pat/rollout/JOB drops one")

    def _copy(self, body: RolloutBody) -> Admitter:
        file = self._file(body.job)
        if body.job in self._jobs:
            return saved.loads(saved.dumps(self._jobs[body.job].admitter), body.rules, f"job {body.job!r}")
        return saved.restore(file, body.rules) if file is not None and file.exists() else Admitter(body.rules)

    def _version(self, body: RolloutBody, admitter: Admitter, known: Job | None) -> int:
        """Of the weights: as given, or counted: one more if they were updated since the last round."""
        last = admitter.state.version
        updated = known is None or known.updates != self._manager.pat_weight_updates
        if body.version is not None:
            if body.mode == "partial" and body.version == last and updated and known is not None:
                raise ValueError(f"version is {last} as in the last round, but weights were updated since; raise it")
            return body.version
        return 0 if last is None else last + updated

    def _planner(self, round_: RolloutRound, limit: int) -> Planner:
        """Starts with what the profile says of this round; without one, with the base layout."""
        args, rules = self._manager.server_args, round_.admitter.rules
        config = args.adaptive_config()
        start = config.base.tp
        if args.pat_profile is not None:
            profile, state = profiles.load(args.pat_profile, complete=True), round_.admitter.state
            prompt = mean(len(group.prompt["input_ids"]) for group in (*state.round.groups, *state.fresh))
            samples = rules.num_prompts * rules.num_responses
            start = profiled_degree(Predictor(profile), profile.fingerprint, samples, prompt, limit)
        return Planner([layout.tp for layout in config.layouts], start)

    def _set_floor(self, job: Job, tp: int) -> None:
        job.floor = tp
        self._manager.pat_floor(max((other.floor for other in self._jobs.values()), default=0))

    def _file(self, job: str) -> Path | None:
        return self._folder / f"{job}.json" if self._folder else None

    async def forget(self, name: str) -> None:
        """Drop a job, and all prompts that wait in it; first what is still to be done of its last round is.

        Raises:
            ValueError: there is none.
            Busy: it has a round under way.
        """
        check_job(name)
        await self._over(name)
        file = self._file(name)
        if name not in self._jobs and not (file is not None and file.exists()):
            raise ValueError(f"job is {name!r}, there are {sorted(self._jobs)[:SHOWN]}")
        if name in self._jobs and not self._jobs[name].settled:
            raise Busy(f"job {name!r} has a round under way; close its stream first")
        if (job := self._jobs.pop(name, None)) is not None and job.floor:
            self._set_floor(job, 0)
        if file is not None:
            file.unlink(missing_ok=True)

    def judge(self, verdict: Verdict) -> None:
        """Raises ValueError: no verdict is awaited for such a group."""
        job = self._jobs.get(verdict.job)
        if job is None or job.round is None:
            raise ValueError(f"job is {verdict.job!r}, which has no round; there are {sorted(self._jobs)[:SHOWN]}")
        job.round.judge(verdict.key, verdict.keep, verdict.reward)

    async def events(self, body: RolloutBody) -> AsyncIterator[dict[str, Any]]:
        """A round: what happens in it, as JSON has it, first that it has begun.  Left before its end, it is cancelled.

        Raises:
            ValueError, Busy: at the first step; nothing was taken.
        """
        await self._over(body.job)
        job = self._begin(body)
        round_ = job.round
        try:
            await self._save(body.job)
            before = await self._engine()
            yield {"type": "begin", "version": round_.version, "kind": round_.kind}
            async with aclosing(aiter(round_)) as found:
                async for event in found:
                    if isinstance(event, Summary):
                        # Before the client hears of it: it may ask for the next round at once, or this may be the end.
                        after = await asyncio.shield(self._settled(body, job, before))
                        yield {"type": "round", **msgspec.to_builtins(event), "engine": after}
                    else:
                        yield described(event)
        finally:
            # The client may be gone: nobody waits for the end of it, but the next round needs it.
            round_.cancel()
            self._settled(body, job, None)

    async def _over(self, name: str) -> None:
        """Wait for what is left to do of a job's last round, if it is over: whoever left it need not know of that."""
        job = self._jobs.get(name)
        if job is not None and job.settling is not None:
            await asyncio.wait([job.settling])

    def _settled(self, body: RolloutBody, job: Job, before: dict[str, int] | None) -> asyncio.Task:
        """:meth:`_settle`, once a round, in a task of its own: it goes on when the client is gone."""
        job.settling = job.settling or asyncio.ensure_future(self._settle(body, job, before))
        return job.settling

    async def _settle(self, body: RolloutBody, job: Job, before: dict[str, int] | None) -> dict[str, int]:
        """What is left to do when a round is over; what the engine holds then."""
        round_ = job.round
        await round_.wait()
        after = await self._engine_after(round_)
        after["retracted"] -= before["retracted"] if before is not None else after["retracted"]
        if self._metrics is not None:
            self._metrics.observe(body.job, round_.summary, after)
        if body.planner and job.planner is not None:
            if not round_.summary.cancelled:
                job.planner.observe(round_.summary.kind, after["retracted"])
            asyncio.get_running_loop().call_later(FLOOR_SECONDS, self._lift_floor, job, round_)
        await self._save(body.job)
        job.settled, job.used = True, time.monotonic()
        return after

    def _lift_floor(self, job: Job, round_: RolloutRound) -> None:
        if job.round is round_:
            self._set_floor(job, 0)

    async def _save(self, name: str) -> None:
        file = self._file(name)
        if file is not None:
            try:
                await asyncio.to_thread(saved.write, saved.dumps(self._jobs[name].admitter), file)
            except OSError as error:
                logger.error("the state of job %s was not saved: %s", name, error)

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


def described(event: Group | Judge) -> dict[str, Any]:
    """A group with its responses."""
    group = event.group if isinstance(event, Judge) else event
    return {
        "type": "judge" if isinstance(event, Judge) else "group",
        "key": list(group.key),
        "deferrals": group.deferrals,
        "responses": [{"number": s.number, **response(s.output)} for s in group.kept()],
    }


def response(output: Output) -> dict[str, Any]:
    """``versions``: [weight version, tokens] of each span."""
    return {
        "text": output.text, "token_ids": output.token_ids, "logprobs": output.logprobs,
        "versions": [[span.version, span.tokens] for span in output.spans], "finish_reason": output.finish_reason,
    }  # fmt: skip


async def server_sent(first: dict[str, Any], events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """``data: {…}`` lines; an error in the middle is the last of them."""
    try:
        async with aclosing(events):
            yield _line(first)
            async for event in events:
                yield _line(event)
        yield b"data: [DONE]\n\n"
    except Exception as error:  # the status line is sent, so it has to be said here
        yield _line({"type": "error", "message": str(error)})


def _line(event: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"
