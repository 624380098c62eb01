"""What an engine did in some time: the one source of the lines that a job's log shows, and of what its tracker gets.

The coordinator keeps the sums since the start (``totals`` of ``/pat/status``).  A step is the difference of two.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import msgspec

from sglang_pat.config import AdaptiveConfig
from sglang_pat.messages import StepCounts, SwitchRecord

job_log = logging.getLogger("sglang_pat.job")
"""A line at the start, and one a step.  RL frameworks silence SGLang below errors: there this one has a level of its
own, in the process that holds the engine and in the coordinator's."""


def enable_job_log() -> None:
    """Let the lines of :data:`job_log` through in this process, whatever SGLang's log level is."""
    job_log.setLevel(logging.INFO)


def start_line(config: AdaptiveConfig) -> str:
    """What an engine is, as far as whoever runs a job should know."""
    first, *others = config.layouts
    layouts = f"may switch to {', '.join(map(str, others))}" if others else "its only layout: nothing will switch"
    policy = f"policy {config.policy}"
    if config.policy == "threshold":
        policy += f", merges when {config.switch_at} requests or fewer are left"
    profile = f"profile {config.profile}" if config.profile else "no profile: python -m profiler.sweep makes one"
    return f"adaptive engine of {config.num_ranks} ranks: begins in {first}, {layouts}; {policy}; {profile}"


@dataclass(frozen=True)
class Figures:
    """Sums over some time.

    Attributes:
        requests: number of requests that came; health probes and the calibration's are none.
        switches: number of switches between layouts; ``aborted_switches`` are not among them.
        pause_seconds: seconds of their pauses.
        seconds: time with requests in the engine, not paused by a client, by TP degree in force.
        decode_steps, draft_steps, drafts, right_drafts, seconds_saved: see :class:`~sglang_pat.messages.StepCounts`.
    """

    requests: int = 0
    switches: int = 0
    aborted_switches: int = 0
    pause_seconds: float = 0.0
    seconds: Mapping[int, float] = field(default_factory=dict[int, float])
    decode_steps: int = 0
    draft_steps: int = 0
    drafts: int = 0
    right_drafts: int = 0
    seconds_saved: float = 0.0

    @classmethod
    def from_status(cls, status: Mapping[str, Any]) -> Figures:
        """Sums since the engine's start, from ``/pat/status``."""
        return msgspec.convert(status["totals"], cls, str_keys=True)

    def subtract(self, earlier: Figures) -> Figures:
        """Sums of what came after ``earlier``, of the same engine."""
        return self._add_scaled(earlier, -1)

    def __add__(self, other: Figures) -> Figures:
        return self._add_scaled(other, 1)

    def _add_scaled(self, other: Figures, sign: int) -> Figures:
        degrees = sorted({*self.seconds, *other.seconds})
        seconds = {tp: self.seconds.get(tp, 0.0) + sign * other.seconds.get(tp, 0.0) for tp in degrees}
        counts = [one.name for one in fields(self) if one.name != "seconds"]
        return Figures(seconds=seconds, **{n: getattr(self, n) + sign * getattr(other, n) for n in counts})

    def format_line(self) -> str:
        whole = sum(self.seconds.values())
        shares = [f"{seconds / whole:.0%} in tp{tp}" for tp, seconds in sorted(self.seconds.items()) if seconds > 0]
        aborted = f", {self.aborted_switches} aborted" if self.aborted_switches else ""
        drafts = ""
        if self.drafts:
            share = self.draft_steps / max(self.decode_steps, 1)
            drafts = f", {share:.0%} of steps with drafts, {self.right_drafts} of {self.drafts} right"
            drafts += f", which saved {self.seconds_saved:.1f} s by the profile" if self.seconds_saved else ""
        return (
            f"{self.requests} requests in {whole:.1f} s ({', '.join(shares)}), "
            f"{self.switches} switches{aborted}, {self.pause_seconds:.3f} s paused by them{drafts}"
        )


def compute_metrics(engines: Collection[Figures]) -> dict[str, float]:
    """Metrics by name, for a tracker: counts of all engines together, seconds of a mean one."""
    metrics = {
        "rollout/switches": float(sum(one.switches for one in engines)),
        "rollout/aborted_switches": float(sum(one.aborted_switches for one in engines)),
        "rollout/pause_seconds": sum(one.pause_seconds for one in engines) / len(engines),
    }
    if drafts := sum(one.drafts for one in engines):
        metrics["rollout/drafts"] = float(drafts)
        metrics["rollout/right_drafts"] = float(sum(one.right_drafts for one in engines))
        steps = sum(one.decode_steps for one in engines)
        metrics["rollout/share_of_steps_with_drafts"] = sum(one.draft_steps for one in engines) / max(steps, 1)
        metrics["rollout/seconds_saved_by_drafts"] = sum(one.seconds_saved for one in engines) / len(engines)
    for tp in sorted({tp for one in engines for tp in one.seconds}):
        metrics[f"rollout/seconds/tp{tp}"] = sum(one.seconds.get(tp, 0.0) for one in engines) / len(engines)
    return metrics


RECORDS = 256
"""Records of switches that are kept for ``/pat/status``."""


class Account:
    """The coordinator's sums.

    Args:
        degrees: degrees of the layouts.
    """

    def __init__(self, degrees: Collection[int]) -> None:
        self.requests = self._switches = self._aborted = 0
        self.records: deque[SwitchRecord] = deque(maxlen=RECORDS)
        self._pause_seconds = 0.0
        self._counts = StepCounts()
        self._seconds = dict.fromkeys(degrees, 0.0)
        self._since: float | None = None
        """Time since which there has been work; None: there is none."""
        self._tp = 0
        self._last = Figures()

    def record_state(self, now: float, tp: int, works: bool) -> None:
        """Note that from ``now`` on the engine is in degree ``tp``, and has requests that it may decode or not."""
        if self._since is not None:
            self._seconds[self._tp] += now - self._since
        self._since, self._tp = (now if works else None), tp

    def record_switch(self, record: SwitchRecord) -> None:
        self.records.append(record)
        self._switches += not record.error
        self._aborted += bool(record.error)
        self._pause_seconds += record.pause_seconds

    def record_steps(self, counts: StepCounts) -> None:
        self._counts = self._counts.add(counts)

    def get_totals(self) -> Figures:
        counts = self.requests, self._switches, self._aborted, self._pause_seconds
        return Figures(*counts, dict(self._seconds), *self._counts)

    def get_status(self) -> dict[str, Any]:
        """Fields of ``/pat/status``."""
        switches = [msgspec.to_builtins(record) for record in self.records]
        return {"num_switches": self._switches, "totals": asdict(self.get_totals()), "switches": switches}

    def end_training_step(self) -> Figures | None:
        """End a step: what happened in it; None, and it goes on, if no request has come since the last one ended."""
        now = self.get_totals()
        if now.requests == self._last.requests:
            return None
        figures, self._last = now.subtract(self._last), now
        return figures
