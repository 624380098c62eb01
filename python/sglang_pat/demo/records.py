"""What a run leaves behind. All times are seconds since the run's first request was sent."""

from __future__ import annotations

import msgspec


class DemoError(RuntimeError):
    """The demonstration cannot go on; the first line of the message says why."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One request and its answer.

    Attributes:
        group: TP group that it was first given to, if that was seen.
        sent: when it was sent.
        times, counts: when text came in, and how many tokens the answer had by then.
        finish: ``stop`` or ``length``.
    """

    index: int
    prompt: str
    group: int | None
    sent: float
    times: list[float]
    counts: list[int]
    text: str
    finish: str

    @property
    def first(self) -> float:
        return self.times[0]

    @property
    def last(self) -> float:
        return self.times[-1]

    @property
    def tokens(self) -> int:
        return self.counts[-1]

    def longest_gap(self, start: float, end: float) -> float:
        """Longest wait for more text, of those waits that touch ``[start, end]``; 0 if none does."""
        gaps = zip(self.times, self.times[1:], strict=False)
        return max((b - a for a, b in gaps if b >= start and a <= end), default=0.0)


class SeenSwitch(msgspec.Struct, frozen=True, kw_only=True):
    """One switch, as the engine reports it.

    Attributes:
        before, after: layouts, e.g. ``tp1×dp2``.
        at: when the pause began, to about one decode step.
        pause: how long no request decoded.
        phases: slowest rank's seconds in each phase; ``prepare`` is before the pause.
        felt: longest wait for the next token that a request had around it.
        requests, tokens, moved_bytes: what was handed over.
        error: why it was aborted, or empty.
    """

    before: str
    after: str
    at: float
    pause: float
    phases: dict[str, float]
    felt: float
    reason: str
    requests: int
    migrated: int
    recomputed: int
    tokens: int
    moved_bytes: int
    error: str


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One server on the whole work.

    Attributes:
        base: layout it started in.
        adaptive: whether it may switch.
        start_seconds: time until the server was ready.
        others: share of the cores' time that other programs took during the run, 0 to 1.
    """

    name: str
    base: str
    adaptive: bool
    start_seconds: float
    others: float
    answers: list[Answer]
    switches: list[SeenSwitch]

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def wall(self) -> float:
        return max(answer.last for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.wall

    def tail_start(self, left: int) -> float:
        """When all but ``left`` answers were complete."""
        ends = sorted(answer.last for answer in self.answers)
        return ends[-left - 1] if left < len(ends) else 0.0

    def tail_token_time(self, left: int) -> float | None:
        """:meth:`token_time` of the last ``left`` requests, from the end of the last pause on."""
        pauses = [switch.at + switch.pause for switch in self.switches if switch.requests]
        return self.token_time(max([self.tail_start(left), *pauses]), self.wall)

    def token_time(self, start: float, end: float) -> float | None:
        """Mean seconds from one token of a request to its next, within ``[start, end]``; None without any."""
        seconds, tokens = 0.0, 0
        for answer in self.answers:
            inside = [(t, n) for t, n in zip(answer.times, answer.counts, strict=True) if start <= t <= end]
            if inside:
                seconds += inside[-1][0] - inside[0][0]
                tokens += inside[-1][1] - inside[0][1]
        return seconds / tokens if tokens else None


def difference(runs: list[Run]) -> dict[int, int]:
    """Prompts whose answers are not the same in all runs: index → first character that differs."""
    found = {}
    for index in range(len(runs[0].answers)):
        texts = [run.answers[index].text for run in runs]
        if len(set(texts)) > 1:
            shortest = min(map(len, texts))
            same = (i for i in range(shortest) if len({text[i] for text in texts}) > 1)
            found[index] = next(same, shortest)
    return found


def switches_of(status: dict, start: float, answers: list[Answer]) -> list[SeenSwitch]:
    """The switches in a ``/pat/status`` that began after ``start`` (unix time)."""
    ranks = status["base"]["tp"] * status["base"]["dp"]
    found = []
    for record in status["switches"]:
        at = record["started"] + record["phases"].get("prepare", 0.0) - start
        if record["started"] < start:
            continue
        pause = record["pause_seconds"]
        felt = [answer.longest_gap(at, at + pause) for answer in answers]
        copied = ("phases", "reason", "requests", "migrated", "recomputed", "tokens", "moved_bytes", "error")
        found.append(
            SeenSwitch(
                before=f"tp{record['from_tp']}×dp{ranks // record['from_tp']}",
                after=f"tp{record['to_tp']}×dp{ranks // record['to_tp']}",
                at=at,
                pause=pause,
                felt=max(felt) if record["requests"] else 0.0,
                **{name: record[name] for name in copied},
            )
        )
    return found
