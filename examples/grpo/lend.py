"""Training while a round drains: the engine lends a rank, and its core computes the gradient of complete groups."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from sglang_pat.policies.lending import STRIDE, Move, TrainingPace
from sglang_pat.rollout.records import Group

RANKS = 2
GAP = 0.03
"""Seconds between two steps of a rank up to which it counts as working."""
Span = tuple[float, float]


class Timeline(msgspec.Struct, kw_only=True):
    """A step by rank, in seconds from its start.

    Attributes:
        generating: times in which each rank computed tokens.
        lent: time when a rank was lent and taken back; None if it was not.
        training: times in which gradients were computed.
        over: time of the last token; ``end``: end of the step, with its update and the weights in the engine.
    """

    generating: list[list[Span]]
    lent: Span | None
    training: list[Span]
    over: float
    end: float

    @property
    def hidden(self) -> float:
        """Share of the training that was done before the last token."""
        whole = sum(end - start for start, end in self.training)
        return sum(max(0.0, min(end, self.over) - start) for start, end in self.training) / whole if whole else 0.0


class Lending:
    """Lending of a rank: asks the engine's policy at each group of a round, and does what it says.

    The calls are :meth:`begin`, then :meth:`take` for each group, and :meth:`finish` when the round is over.

    Args:
        train: function that adds the gradient of some groups to that of the step.
        samples: number of samples of a step.

    Attributes:
        decide: the policy; measurements and tests put another one here.
        pace: pace of training in the steps so far.
        now: a monotonic clock.
    """

    def __init__(self, engine: Any, train: Callable[[Sequence[Group]], None], samples: int) -> None:
        self.engine, self.train, self.samples = engine, train, samples
        self.decide: Callable[..., dict[str, Any]] = engine.decide_lending
        self.pace = TrainingPace()
        self.now: Callable[[], float] = time.monotonic
        self.threads = torch.get_num_threads()

    def begin(self) -> None:
        self.pace.begin_step(self.now())
        self.groups: list[Group] = []
        self.asks = True
        """Whether the policy may still say something new in this round."""
        self.trained = self.ended = 0
        """Number of groups whose gradient is there; number of tokens of responses that have ended."""
        self.moves: list[float] = []
        """Times when a rank was lent, and taken back."""
        self.spans: list[tuple[Span, int]] = []
        """Times in which groups were trained, with their number of tokens."""

    @property
    def lent(self) -> bool:
        return len(self.moves) == 1

    def take(self, group: Group) -> None:
        """Take a complete group, and do what the policy says."""
        self.groups.append(group)
        self.follow_policy()
        if self.lent:  # the round goes on meanwhile, in a thread of its own
            self.train_new()
            self.follow_policy()

    def finish(self) -> None:
        """End the round: train what is left, with all ranks back."""
        if self.lent:
            self.take_back()
        self.train_new()

    def follow_policy(self) -> None:
        if not self.pace.is_known or not self.asks:
            return  # the first step is measured
        complete = sum(len(group.list_kept()) for group in self.groups)
        answer = self.decide(
            samples=max(self.samples, complete), complete=complete, ready=count_tokens(self.groups[self.trained :]),
            pending=max(0, self.ended - count_tokens(self.groups)), returned=len(self.moves) == 2,
            **self.pace.describe(self.now()),
        )  # fmt: skip
        if answer["move"] == Move.LEND:
            self.engine.lend_ranks(STRIDE)
            torch.set_num_threads(max(1, self.threads // STRIDE))
            self.moves.append(self.now())
            self.pace.lend(self.moves[0])
        elif answer["move"] == Move.TAKE_BACK:
            self.take_back()
        self.asks = answer["move"] != Move.NEVER

    def take_back(self) -> None:
        self.engine.take_back_ranks()
        torch.set_num_threads(self.threads)
        self.moves.append(self.now())
        self.pace.take_back()

    def train_new(self) -> None:
        """Train the groups that are complete and not trained yet."""
        if new := self.groups[self.trained :]:
            start = self.now()
            self.train(new)
            self.trained = len(self.groups)
            end, tokens = self.now(), count_tokens(new)
            self.spans.append(((start, end), tokens))
            self.pace.add(end - start, tokens, self.lent)

    def make_timeline(self, ends: Sequence[float]) -> Timeline:
        """Timeline of the step that has just ended; ``ends``: its start, the end of its round, …, its end (monotonic
        clock)."""
        start = ends[0]
        generating: list[list[Span]] = [[] for _ in range(RANKS)]
        for step in self.engine.trace():
            since, at = step["at"] - step["seconds"] - start, step["at"] - start
            for rank in range(step["rank"], RANKS, RANKS // step["tp"]):
                spans = generating[rank]
                if spans and since - spans[-1][1] < GAP:
                    spans[-1] = spans[-1][0], at
                elif since >= 0:  # else it is of a test before the step
                    spans.append((since, at))
        lent = (self.moves[0] - start, self.moves[1] - start) if self.moves else None
        training = [(began - start, ended - start) for (began, ended), _ in self.spans]
        # Whoever trains hears of the end of the round later than it is.
        last = max((at for spans in generating for _, at in spans), default=ends[1] - start)
        return Timeline(
            generating=generating, lent=lent, training=training, over=min(last, ends[1] - start), end=ends[-1] - start
        )


def count_tokens(groups: Sequence[Group]) -> int:
    """Number of tokens of prompts and responses."""
    return sum(
        len(group.prompt["input_ids"]) + len(sample.output.token_ids)
        for group in groups
        for sample in group.list_kept()
    )


def make_profile(model: Path, path: Path, flags: Sequence[str]) -> Path:
    """Profile of the steps and switches of this engine, which its policy needs; measured if it is not there yet."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        words = ["--model-path", str(model), "--tp", "1", "--dp", str(RANKS), "--out", str(path), "--budget", "2m"]
        subprocess.run([sys.executable, "-m", "profiler.sweep", *words, *flags], check=True)
    return path
