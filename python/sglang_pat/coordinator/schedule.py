"""Switches at given steps: ``--pat-policy schedule``.

A schedule is a list of entries, carried out one after another.  An entry says when it is due and which degree it
leads to.  While a schedule is in force, every replica works until a point that the coordinator has set, holds there,
and says so.  So an entry is carried out at the same point of the generation on a fast machine and on a busy one, and
nothing ends meanwhile.  Tests are made of it; users repeat a decision log (``--pat-log``) on a real engine with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from sglang_pat.coordinator.decision_log import load_decision
from sglang_pat.coordinator.leader import Generation
from sglang_pat.layout import ParallelLayout
from sglang_pat.messages import Go, Held, ScheduleEntry, ScheduleState, SwitchRecord
from sglang_pat.policies.snapshot import Snapshot

EXAMPLE = '{"tp": 2, "step": 40}'


def parse(data: bytes | str) -> list[ScheduleEntry]:
    """Entries from JSON: a list of them, or one a line; or a decision log (:func:`from_log`).

    Raises:
        ValueError: one line that names the entry and what is wrong with it.
    """
    text = data.decode("utf-8", errors="replace") if isinstance(data, bytes) else data
    stripped = text.strip()
    if stripped.startswith("["):
        return check(_json(stripped, "the schedule"))
    values = [_json(line, f"line {n}") for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if values and isinstance(values[0], dict) and "event" in values[0]:
        return from_log(values)
    return check(values)


def check(values: Any) -> list[ScheduleEntry]:
    """Entries from plain values; raises ValueError as :func:`parse` does."""
    if not isinstance(values, list):
        raise ValueError(f"a schedule is a list of entries like {EXAMPLE}, not {type(values).__name__}")
    entries: list[ScheduleEntry] = []
    for number, value in enumerate(cast("list[Any]", values), 1):
        try:
            entries.append(msgspec.convert(value, ScheduleEntry))
        except ValueError as error:  # msgspec's ValidationError is one
            raise ValueError(f"entry {number}: {error} (an entry looks like {EXAMPLE})") from None
    if any(entry.hold for entry in entries[:-1]):
        raise ValueError("hold: only the last entry may have it")
    return entries


def _json(text: str, where: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from None


def read(path: str) -> list[ScheduleEntry]:
    """The schedule in a file; raises ValueError with one line that names the file."""
    try:
        return parse(Path(path).read_bytes())
    except OSError as error:
        raise ValueError(f"--pat-schedule {path}: {error.strerror}; give a file that can be read") from None
    except ValueError as error:
        raise ValueError(f"--pat-schedule {path}: {error}") from None


def check_degrees(entries: Iterable[ScheduleEntry], layouts: Iterable[ParallelLayout]) -> None:
    """Raises ValueError if an entry leads to a degree that is not a candidate."""
    degrees = [layout.tp for layout in layouts]
    for number, entry in enumerate(entries, 1):
        if entry.tp is not None and entry.tp not in degrees:
            raise ValueError(f"entry {number}: tp={entry.tp} is not a candidate; choose one of {degrees}")


def from_log(events: Iterable[Mapping[str, Any]]) -> list[ScheduleEntry]:
    """The decisions to switch in a decision log, as a schedule.

    By generated tokens where the log has those of each request (policies that predict), else by requests: those that
    have come, and those that are left if there have been more.

    Raises:
        ValueError: the log does not say how many have come.
    """
    entries: list[ScheduleEntry] = []
    ended = 0
    for event in events:
        kind = event.get("event")
        if kind == "counting":
            ended, entries = 0, []
        if kind == "length":
            ended += event["length"]
        if kind != "decision":
            continue
        snapshot, decision = load_decision(event)
        if decision.tp == (entries[-1].tp if entries else snapshot.tp):
            continue
        if generated := int(snapshot.load.output.sum()):
            entries.append(ScheduleEntry(tp=decision.tp, tokens=ended + generated))
        else:
            entries.append(_by_requests(snapshot, decision.tp))
    return entries


def _by_requests(snapshot: Snapshot, tp: int) -> ScheduleEntry:
    came, alive = snapshot.arrived, snapshot.requests
    if came is None:
        raise ValueError("a decision in it does not say how many requests had arrived, as in old logs: record it anew")
    if alive and not snapshot.peak:
        return ScheduleEntry(tp=tp, came=came + 1)  # ahead of a round: its first request comes now
    return ScheduleEntry(tp=tp, came=came, left=alive if alive < snapshot.peak or not alive else None)


@dataclass
class _Replica:
    """What is known of one leader: whether it holds, which :class:`Go` it was given last, what its replica has done."""

    held: bool = False
    number: int = -1
    steps: int = 0
    batches: int = 0


class Schedule:
    """A schedule on its way.

    Life cycle: :meth:`begin`; then :meth:`look` after every event, and :meth:`carried_out` when an entry that it
    returned has been; over when all have been.

    Args:
        leaders: of the layout in force.
        numbers: gives every ``Go`` of an engine another number.
    """

    def __init__(self, entries: Iterable[ScheduleEntry], leaders: Iterable[int], numbers: Iterator[int]) -> None:
        self._entries = tuple(entries)
        self._replicas: dict[int, _Replica] = {rank: _Replica() for rank in leaders}
        self._numbers = numbers
        self._base = None if any(entry.tokens is not None for entry in self._entries) else 0
        """Tokens generated before this schedule: known once all replicas hold."""
        self._next = 0
        self._arrived = 0
        self._peak = 0
        self._records: list[SwitchRecord] = []

    @property
    def over(self) -> bool:
        return self._next == len(self._entries)

    @property
    def holding(self) -> bool:
        """Whether replicas hold until there is another schedule."""
        return self.over and bool(self._entries) and self._entries[-1].hold

    def state(self) -> ScheduleState:
        return ScheduleState(
            entries=len(self._entries), done=self._next, holding=self.holding, switches=list(self._records)
        )

    # -- events ---------------------------------------------------------------------------------------

    def begin(self) -> dict[int, Go]:
        """What to tell the leaders: hold, or, of an empty schedule, go on without end."""
        steps = 0 if self._entries else None
        return {rank: self._go(rank, steps=steps) for rank in self._replicas}

    def arrived(self, request: Generation) -> None:
        """A request was passed on to a replica."""
        self._arrived += request.counts

    def held(self, message: Held) -> None:
        """A leader has come to the point that its last ``Go`` set."""
        replica = self._replicas.get(message.rank)
        if replica is None or replica.number != message.number:
            return  # of a schedule that has been replaced
        replica.held = True
        replica.steps += message.steps
        replica.batches += message.batches

    def switched(self, old: ParallelLayout, new: ParallelLayout) -> None:
        """After a switch every replica holds; what the replicas of a group have done counts once."""
        if self.over and not self.holding:
            self._replicas = {rank: _Replica() for rank in new.leaders}
            return
        before = self._replicas
        self._replicas = {}
        for leader in new.leaders:
            came = [before[old.group_of(rank)] for rank in new.group(leader)]
            steps, batches = max(r.steps for r in came), max(r.batches for r in came)
            self._replicas[leader] = _Replica(held=True, steps=steps, batches=batches)

    def carried_out(self, record: SwitchRecord | None) -> None:
        """The entry that was due has been carried out; ``record``: of its switch, None if there was none to make."""
        if record is not None:
            self._records.append(record)
        done, following = self._entries[self._next], self._entries[self._next + 1 : self._next + 2]
        self._next += 1
        # "3 left", then "none left" may be of the same round, whose last requests may end all at once.
        falls = done.left is not None and any(one.left is not None and one.left < done.left for one in following)
        if not falls:
            self._peak = 0

    # -- what is to happen now ------------------------------------------------------------------------

    def look(
        self, requests: Mapping[int, int], generated: Callable[[], int | None]
    ) -> tuple[dict[int, Go], ScheduleEntry | None]:
        """What to tell which leader, and the entry that is due now, if one is.

        Args:
            requests: alive at each leader, those on their way to it included.
            generated: says how many tokens the engine has generated so far; None if that is not known now.
        """
        if self.over:
            held = [] if self.holding else [rank for rank, replica in self._replicas.items() if replica.held]
            return {rank: self._go(rank) for rank in held}, None
        entry, alive = self._entries[self._next], sum(requests.values())
        self._peak = max(self._peak, alive)
        if self._arrived < entry.arrived:
            return {}, None
        busy = [rank for rank in self._replicas if requests.get(rank)]
        ready = all(self._replicas[rank].held for rank in busy)
        if self._base is None:
            self._base = generated() if ready else None
            if self._base is None:
                return {}, None
        left = None
        if entry.tokens is not None:
            # As long as some replicas work, the count grows under our hands.
            total = generated() if ready else None
            if total is None:
                return {}, None
            left = entry.tokens - (total - self._base)
        if self._due(entry, busy, ready, alive, left):
            return {}, entry
        goes: dict[int, Go] = {}
        for rank in busy:
            point = self._further(entry, rank, alive, left) if self._replicas[rank].held else None
            if point is not None:
                goes[rank] = self._go(rank, **point)
        return goes, None

    def _due(self, entry: ScheduleEntry, busy: list[int], ready: bool, alive: int, left: int | None) -> bool:
        """``left``: tokens to be generated yet, where the entry counts tokens."""
        if entry.came is not None:
            return self._arrived >= entry.came and (entry.left is None or alive <= entry.left)
        if entry.left is not None:
            return self._peak > entry.left >= alive
        if not ready:
            return False
        if left is not None:
            return left <= 0
        for name, point in (("steps", entry.step), ("batches", entry.batch)):
            if point is not None:
                done = {rank: getattr(replica, name) >= point for rank, replica in self._replicas.items()}
                return any(done.values()) and all(done[rank] for rank in busy)
        return True

    def _further(self, entry: ScheduleEntry, rank: int, alive: int, left: int | None) -> dict[str, int] | None:
        """How far a replica that holds may go on towards ``entry``, in fields of ``Go``; None if it has to wait for
        the others."""
        replica = self._replicas[rank]
        if entry.left is not None or entry.came is not None:
            return {"finish": True}
        if left is not None:
            # Never far beyond it, as a step gives each request a token: nearer with every stop.
            return {"steps": max(1, left // alive)}
        if entry.step is not None and replica.steps < entry.step:
            return {"steps": entry.step - replica.steps}
        if entry.batch is not None and replica.batches < entry.batch:
            return {"batches": entry.batch - replica.batches}
        return None

    def _go(self, rank: int, **point: Any) -> Go:
        replica = self._replicas[rank]
        replica.held, replica.number = False, next(self._numbers)
        return Go(number=replica.number, **point)
