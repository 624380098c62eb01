"""Training jobs in the server: what each remembers between its rounds, in memory and in ``--pat-rollout-dir``."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from pathlib import Path

from sglang_pat.rollout import saved
from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.history import History
from sglang_pat.rollout.job_files import JobFiles
from sglang_pat.rollout.rounds import RolloutRound
from sglang_pat.rollout.rules import Rules
from sglang_pat.rollout.state import State

logger = logging.getLogger(__name__)

SHOWN = 8
"""Names of jobs, or numbers of rounds, in an error."""

MAX_JOBS = 64
"""Jobs in memory; a new one beyond that is refused."""

MAX_SAVED_JOBS = 1024
"""Files in ``--pat-rollout-dir``; a new job beyond that is refused."""

JOB_SECONDS = 86_400.0
"""A job without a round for so long is forgotten when another one begins; its file stays, if there is one."""

VERSIONS = 256
"""Of a job, in memory: more than rounds in its history."""

BEFORE_THE_FIRST = -1
"""In place of the number of a round."""


class Busy(RuntimeError):
    """A round of this job is under way."""


class NotSaved(RuntimeError):
    """The state of a job cannot be written; the round was not begun."""


class Job:
    """A training job: its admitter, and what belongs to its rounds.

    Attributes:
        admitter: with the prompts that wait; ``previous``: as it was before the last round and its prompts, None for a
            new job.
        history: its states at the ends of the last rounds.
        round: the last one; ``settled``: it is over, and all that had to be written is.
        updates: by version, of the last ones: how often weights had been updated when a round began with it.
        tokens: of its prompts (:func:`held`), when it was last saved or fed.
        used: when its last round began or ended, seconds of the machine's monotonic clock.
        settling: what is done when it is over, once.
    """

    def __init__(self, admitter: Admitter) -> None:
        self.admitter = admitter
        self.previous: Admitter | None = None
        self.history = History()
        self.round: RolloutRound | None = None
        self.settled = True
        self.settling: asyncio.Task | None = None
        self.updates: dict[int, int] = {}
        self.tokens = 0
        self.used = time.monotonic()

    def began(self, version: int, updates: int) -> None:
        """A round has begun with weights of this ``version``, after so many ``updates`` of the server's weights."""
        self.updates.pop(version, None)
        self.updates[version] = updates
        for old in list(self.updates)[:-VERSIONS]:
            del self.updates[old]
        self.used = time.monotonic()


class Jobs:
    """By name.

    Args:
        folder: where the state of each job is kept; None: nowhere.
    """

    def __init__(self, folder: Path | None) -> None:
        self._files = JobFiles(folder) if folder is not None else None
        self._jobs: dict[str, Job] = {}

    def get(self, name: str) -> Job | None:
        """None if it is not in memory."""
        return self._jobs.get(name)

    def tokens_beside(self, name: str) -> int:
        """Of the prompts of all other jobs."""
        return sum(job.tokens for other, job in self._jobs.items() if other != name)

    def known(self) -> str:
        """Names for an error."""
        return str(sorted(self._jobs)[:SHOWN])

    def make_room(self, name: str) -> None:
        """Forget jobs that nobody has used for long.  Raises ValueError: there are too many for another one."""
        old = time.monotonic() - JOB_SECONDS
        for other in [n for n, job in self._jobs.items() if job.settled and job.used < old and n != name]:
            del self._jobs[other]
        if name in self._jobs:
            return
        if len(self._jobs) >= MAX_JOBS:
            raise ValueError(f"job is {name!r}, and there are {MAX_JOBS} others; DELETE /pat/rollout/JOB drops one")
        if self._files is not None and name not in self._files:
            if (kept := len(self._files)) >= MAX_SAVED_JOBS:
                raise ValueError(f"job is {name!r}, and {kept} are kept; DELETE /pat/rollout/JOB drops one")

    def resumed(self, name: str, rules: Rules, after: int | None) -> tuple[Job, Admitter]:
        """The job, and an admitter to go on with: as it is, or as it was at the end of the round ``after``.

        The job itself is not changed yet, and a new one is not there before :meth:`put`.

        Raises:
            ValueError: the state at the end of that round is not kept, or does not go with the rules.
        """
        job = self._jobs.get(name)
        source = f"job {name!r}"
        if job is not None and after is None:
            state = job.admitter.snapshot()
            saved.check_rules(job.admitter.rules, rules, state, source)
            return job, Admitter(rules, state)
        state = job.history.at(after) if job is not None and after is not None else None
        if job is not None and state is not None:
            saved.check_rules(job.admitter.rules, rules, state, source)
            return job, Admitter(rules, state)
        if after == BEFORE_THE_FIRST or (job is None and after is None and not self._saved(name)):
            return job or Job(Admitter(rules)), Admitter(rules)
        found = self._read(name, after)
        admitter = saved.restored(found, rules, source)
        if job is None:
            job = Job(admitter)
        return job, admitter

    def put(self, name: str, job: Job, admitter: Admitter) -> None:
        """``admitter`` has begun a round: keep it, and for :meth:`undo` the one before."""
        job.previous = job.admitter if name in self._jobs else None
        job.admitter = admitter
        self._jobs[name] = job

    def _saved(self, name: str) -> bool:
        return self._files is not None and name in self._files

    def _read(self, name: str, after: int | None) -> saved.Saved:
        """Raises ValueError: there is no such state."""
        job = self._jobs.get(name)
        kept = set(job.history.numbers) if job is not None else set()
        if self._files is not None:
            kept |= set(self._files.past(name))
            try:
                return saved.decode(self._files.read(name, after), str(self._files.path(name)))
            except FileNotFoundError:
                pass
            except OSError as error:
                raise ValueError(f"job is {name!r}, whose file cannot be read: {error.strerror}") from None
        numbers = ", ".join(map(str, sorted(kept)[-SHOWN:])) or "none"
        raise ValueError(f"after is {after}, of job {name!r} the states after these rounds are kept: {numbers}")

    async def save(self, name: str, state: State, ended: int | None = None) -> str:
        """Write its state between two rounds; ``ended``: the round that has just ended.

        What went wrong, in one line, or nothing.
        """
        job = self._jobs[name]
        job.tokens = held(state)
        if self._files is None:
            return ""
        # A copy, which nothing changes while it is encoded in another thread.
        data = saved.pieces(job.admitter.rules, state.copy())
        try:
            await asyncio.to_thread(self._files.write, name, data, ended)
        except OSError as error:
            logger.error("the state of job %s was not saved: %s", name, error)
            return f"the state of job {name!r} cannot be written ({error.strerror}); make room in --pat-rollout-dir"
        return ""

    async def undo(self, name: str) -> None:
        """The round that has just been begun was not: neither its prompts nor, if it was new, the job are there."""
        job = self._jobs[name]
        assert job.round is not None
        job.round.cancel()
        await job.round.wait()
        if job.previous is None:
            del self._jobs[name]
        else:
            job.admitter, job.settled, job.tokens = job.previous, True, held(job.previous.state)

    def drop(self, name: str) -> None:
        """Raises ValueError: there is none; Busy: it has a round under way."""
        if name not in self._jobs and not self._saved(name):
            raise ValueError(f"job is {name!r}, there are {self.known()}")
        if name in self._jobs and not self._jobs[name].settled:
            raise Busy(f"job {name!r} has a round under way; close its stream first")
        if self._files is not None:
            self._files.remove(name)
        self._jobs.pop(name, None)


def held(state: State) -> int:
    """Tokens of the prompts that wait or are in a round."""
    groups = (*state.fresh, *state.waiting, *(state.round.everyone if state.round else ()))
    return sum(len(group.prompt["input_ids"]) for group in groups)


def check_job(name: str) -> None:
    """Raises ValueError: not the name of a job."""
    # It names a file.
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        raise ValueError(f"job is {name!r}, must be letters, digits, - and _, 64 of them at most")
