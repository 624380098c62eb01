"""Tail batching under verl's synchronous trainer (RollPacker, section 3.1): prompts that would hold up a step wait for
a step of their own.

A step starts more prompts than it trains on, takes those whose responses are all there first, and stops the rest.  They
start anew in a later step: every response that is trained on was generated whole by the weights of its step, as without
tail batching.  When enough prompts wait, a step takes only them.  Which prompts run in which step is the decision of
:class:`~sglang_pat.admission.admitter.Admitter`, which also bounds how often a prompt can be passed over.

A prompt is started and stopped with all its responses: verl's agent loops run them together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from sglang_pat.admission import saved
from sglang_pat.admission.admitter import Admitter
from sglang_pat.admission.records import Abort, Action, Launch, Output, Return, RoundOver, SampleId, Span, Summary
from sglang_pat.admission.rules import Rules
from sglang_pat.admission.state import LONG

OPTIONS = {"tail_batching", "eta_prompts", "max_deferrals"}
"""Of ``trainer.v1.sglang_pat_sync``."""

POLL_SECONDS = 0.5
"""Between two looks at what is complete; verl's two seconds are the length of a small step."""


def rules(options: dict[str, Any], num_prompts: int) -> Rules | None:
    """What ``trainer.v1.sglang_pat_sync`` asks for; None: no tail batching.

    Raises:
        ValueError: an unknown option, or a value that cannot be; one line.
    """
    where = "trainer.v1.sglang_pat_sync"
    unknown = sorted(set(options) - OPTIONS - {"parameter_sync_step"})
    if unknown:
        raise ValueError(f"{where} has no option {unknown[0]!r}; choose from {', '.join(sorted(OPTIONS))}")
    mode = options.get("tail_batching")
    if mode in (None, False, "off"):
        return None
    if mode != "strict":
        raise ValueError(f"{where}.tail_batching is {mode!r}, must be strict or off")
    given = {name: options[name] for name in ("eta_prompts", "max_deferrals") if name in options}
    try:
        return Rules(num_prompts=num_prompts, num_responses=1, eta_responses=1.0, **given)
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from None


class TailBatchingBuffer(ReplayBuffer):
    """verl's replay buffer of synchronous training, which waits for the prompts that the admitter takes.

    Attributes:
        summary: of the last round.
    """

    def __init__(
        self, rules: Rules, submit: Callable[[list[TensorDict]], None], stop: Callable[[], None], **named: Any
    ) -> None:
        super().__init__(poll_interval=POLL_SECONDS, **named)
        self._admitter = Admitter(rules)
        self._submit, self._stop = submit, stop
        self._rows: dict[int, TensorDict] = {}
        """Prompts that were not trained on yet, by their index."""
        self._fed = 0
        self._under_way: dict[str, SampleId] = {}
        """By uid, what verl's workers have."""
        self._taken: list[str] = []
        self._over = True
        self.summary: Summary | None = None

    def state(self) -> dict[str, Any]:
        """Between two steps: what another process needs to go on, the prompts that wait among it."""
        return {"admitter": saved.dumps(self._admitter), "rows": self._rows, "fed": self._fed}

    def restore(self, state: dict[str, Any], source: str) -> None:
        """Go on where :meth:`state` was taken.

        Raises:
            ValueError: it is of another version, one line that names its ``source``.
        """
        self._admitter = saved.loads(state["admitter"], self._admitter.rules, source)
        self._rows, self._fed = state["rows"], state["fed"]

    def begin(self, version: int, fetch: Callable[[], TensorDict]) -> None:
        """Start a step's prompts; ``fetch`` gets more of them from the data."""
        while self._admitter.wanted:
            rows = fetch()
            for i in range(len(rows)):
                self._rows[self._fed] = rows[i : i + 1]
                self._admitter.feed([((0, self._fed), None)])
                self._fed += 1
        self._taken, self._over = [], False
        self._do(self._admitter.begin(version))

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        """The step's batch, once nothing of it is under way any more."""
        if partition_id == "val":
            return super().sample(global_steps, partition_id, batch_size)
        last, aborted = time.time(), False
        while True:
            self._sync_metadata_from_transfer_queue()
            ended = self.finished_keys[partition_id] | self.failure_keys[partition_id]
            for uid in [uid for uid in self._under_way if uid in ended]:  # in the order in which they were started
                self._ended(uid, aborted)
            if self._over:
                break
            if len(self._taken) >= self._admitter.rules.num_prompts:
                # An agent that goes on after its aborted turn is stopped again.
                self._stop()
                aborted = True
            last = self._wait_for_next_poll(partition_id, last)
        taken = set(self._taken)
        snapshot = dict(self.partitions[partition_id])
        self._clear_groups(partition_id, ({key.split("_")[0] for key in snapshot} | ended) - taken)
        return self._materialize_batch(partition_id, self._taken, snapshot), self._metrics()

    def _ended(self, uid: str, aborted: bool) -> None:
        sample = self._under_way.pop(uid)
        if aborted:
            return self._do(self._admitter.stopped(sample, Output()))
        under_way = self._admitter.state.round
        assert under_way is not None, "a sample ends in its round"
        spans = [Span(under_way.version, 1)]
        return self._do(self._admitter.finished(sample, Output(spans=spans, finish_reason="stop")))

    def _do(self, actions: Iterable[Action]) -> None:
        launches = []
        for action in actions:
            match action:
                case Launch(sample=sample):
                    launches.append(sample)
                case Return(group=group):
                    self._taken.append(_uid(self._rows.pop(group.index)))
                case RoundOver(summary=summary):
                    self._over, self.summary = True, summary
                case Abort():
                    pass  # all that are left, together: see sample
        if launches:
            rows = [self._rows[sample.index] for sample in launches]
            self._under_way |= {_uid(row): sample for row, sample in zip(rows, launches, strict=True)}
            self._submit(rows)

    def _metrics(self) -> dict[str, float]:
        summary = self.summary
        assert summary is not None, "asked after a round"
        return {
            "training/tail_batching/long_round": float(summary.kind == LONG),
            "training/tail_batching/stopped_prompts": len(summary.aborted_lengths),
            "training/tail_batching/waiting_prompts": len(summary.ages),
            "training/tail_batching/oldest_waiting": max(summary.ages, default=0),
        }


def _uid(row: TensorDict) -> str:
    return row["uid"][0]
