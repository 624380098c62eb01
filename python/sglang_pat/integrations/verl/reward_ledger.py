"""The ledger that a verl job's reward workers share with each other and with its trainer: one named Ray actor.

Its death costs a job nothing that it trains on.  Ray starts it anew, and it is empty then.  What was learnt of time
limits comes back (:meth:`RewardLedger.restore_limits`): the trainer tells what it knew after the last step, and each
worker what it has told since the job's start.  Of responses whose end is lost, verl's own queue tells later.  The
figures of the step are those since then.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from reward_sandbox.limits import CaseRun, LimitRules, TimeLimits
from reward_sandbox.pool import Failure
from sglang_pat import files
from sglang_pat.errors import format_one_line

NAME = "sglang_pat_rewards"

LARGEST = "/max"
"""End of the names of figures of which the largest is kept, not the sum."""
Prompt = tuple[int, str]
"""The step for which a prompt was started, and its uid, which it keeps when it is started again."""


class RewardLedger:
    """The ledger's actor.

    Attributes:
        life: random id, another one after each start.
    """

    def __init__(self, rules: LimitRules) -> None:
        self.life = uuid.uuid4().hex
        self._limits = TimeLimits(rules)
        self._ends: defaultdict[str, dict[int, int]] = defaultdict(dict)
        self._ends_of: int | None = None
        self._figures: dict[str, float] = {}
        self._dropped: frozenset[Prompt] = frozenset()
        self._drops = 0
        self._news = asyncio.Condition()

    # -- responses -------------------------------------------------------------------------------------

    async def note_end(self, prompt: Prompt, session: int, tokens: int) -> None:
        """Note that a response has ended, and its reward is on its way."""
        step, uid = prompt
        if step == self._ends_of:
            self._ends[uid][session] = tokens

    async def take_ends(self, step: int) -> dict[str, dict[int, int]]:
        """Number of tokens of each of the step's responses that have ended since the last call, by uid and session.

        Before the first call of a step none is kept.
        """
        ends, self._ends = dict(self._ends), defaultdict(dict)
        if step != self._ends_of:
            ends, self._ends_of = {}, step
        return ends

    async def drop(self, prompts: Iterable[Prompt]) -> None:
        """Have rewards of these prompts' responses cancelled: nobody will train on them.  They replace the prompts of
        the last call, whose responses have ended."""
        async with self._news:
            self._dropped, self._drops = frozenset(prompts), self._drops + 1
            self._news.notify_all()

    async def wait_for_drop(self, number: int) -> tuple[int, frozenset[Prompt]]:
        """Number and prompts of the last :meth:`drop`, as soon as it is another one than ``number``."""
        async with self._news:
            await self._news.wait_for(lambda: self._drops != number)
            return self._drops, self._dropped

    # -- figures ---------------------------------------------------------------------------------------

    async def add_figures(self, figures: Mapping[str, float]) -> None:
        """Add the figures of one reward, or of more."""
        total = self._figures
        for name, value in figures.items():
            total[name] = max(total.get(name, value), value) if name.endswith(LARGEST) else total.get(name, 0.0) + value

    async def take_figures(self) -> dict[str, float]:
        """Figures of the step that ends now, :meth:`TimeLimits.take_metrics` among them; the next one begins."""
        figures, self._figures = self._figures, {}
        cases = self._limits.take_metrics()
        counts = {"cases", "rerun"} & cases.keys()  # a job without programs has none
        return figures | ({f"cases/{name}": value for name, value in cases.items()} if counts else {})

    # -- time limits of test cases -----------------------------------------------------------------------

    async def get_limits(self, keys: Sequence[str]) -> tuple[str, list[float]]:
        """:attr:`life`, and seconds for each test case."""
        return self.life, self._limits.get_limits(keys)

    async def record_runs(self, runs: Sequence[CaseRun]) -> list[bool]:
        """Record runs; returns whether each has to be run again (:meth:`TimeLimits.record`)."""
        return self._limits.record(runs)

    async def restore_limits(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Merge what somebody else knows (:meth:`TimeLimits.merge`); returns all that is known now."""
        self._limits.merge(state)
        return self._limits.state_dict()

    async def get_limits_state(self) -> tuple[str, dict[str, Any]]:
        """:attr:`life`, and the state of the time limits, which a checkpoint keeps."""
        return self.life, self._limits.state_dict()


def connect(rules: LimitRules) -> ActorHandle:
    """The job's ledger, which is made by the first who asks."""
    # A call that is under way when the actor dies is made again: what it adds may count twice.
    options = {"name": NAME, "get_if_exists": True, "num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
    return ray.remote(RewardLedger).options(**options).remote(rules)


class TrainerLedger:
    """The trainer's side of the ledger.

    Args:
        rules: rules of the time limits.
    """

    def __init__(self, rules: LimitRules) -> None:
        self._actor = connect(rules)
        self._rules = rules
        self._known: dict[str, Any] = {}
        """The state of the time limits, when it was last asked for; nothing in the beginning."""
        self._life = ""
        self._incomplete = False
        """Whether figures of this step were lost."""

    def take_ends(self, step: int) -> dict[str, dict[int, int]]:
        """Call :meth:`RewardLedger.take_ends`."""
        return ray.get(self._actor.take_ends.remote(step))

    def drop(self, step: int, uids: Iterable[str]) -> None:
        """Call :meth:`RewardLedger.drop` for prompts that were started for one step."""
        ray.get(self._actor.drop.remote([(step, uid) for uid in uids]))

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the rewards of the step that ends now; ``reward/incomplete`` is 1 if some are missing."""
        self._get_state()
        incomplete, self._incomplete = self._incomplete, False
        return make_metrics(ray.get(self._actor.take_figures.remote())) | {"reward/incomplete": float(incomplete)}

    def save(self, path: Path) -> None:
        """Write what was learnt of time limits."""
        files.write(json.dumps(self._get_state()).encode(), path)

    def load(self, path: Path) -> None:
        """Go on with what was saved.

        Raises:
            ValueError: it cannot be read; one line.
        """
        try:
            state = json.loads(path.read_text())
            TimeLimits(self._rules).load_state_dict(state)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: {format_one_line(error)}; delete it to begin without") from None
        self._known, self._life = state, ""
        self._get_state()  # the first reward of the job has these limits already

    def _get_state(self) -> dict[str, Any]:
        """State of the time limits.  An actor that is another one than the last time is told first."""
        life, state = ray.get(self._actor.get_limits_state.remote())
        self._incomplete |= self._life not in ("", life)
        if life != self._life and self._known:
            state = ray.get(self._actor.restore_limits.remote(self._known))
        self._life, self._known = life, state
        return state


def make_metrics(figures: Mapping[str, float]) -> dict[str, float]:
    """Metrics ``reward/...`` of a step's sums; times are the mean over rewards, but for the longest."""
    names = "responses", "stopped", *(f"failed/{kind}" for kind in Failure)
    metrics = {name: figures.get(name, 0.0) for name in names}
    scored = max(1.0, metrics["responses"])
    for name, value in figures.items():
        if name.startswith("seconds/"):
            metrics[name] = value if name.endswith(LARGEST) else value / scored
        elif name not in metrics:
            metrics[name] = value
    return {f"reward/{name}": value for name, value in metrics.items()}
