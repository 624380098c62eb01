"""Drafts of a trained model for the requests of a rank (:class:`ModelDrafts`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from sglang_pat.host import features, groups, runner
from sglang_pat.host import requests as host
from sglang_pat.host.batches import ScheduleBatch
from sglang_pat.host.features import Rows
from sglang_pat.host.requests import Req
from sglang_pat.rank.draft_model import WINDOW, Learnt, Pairs
from sglang_pat.speculate.acceptance import MOST_ROWS
from sglang_pat.switch.transfer import upload

if TYPE_CHECKING:
    from sglang_pat.switch.scheduler import SwitchingScheduler

DRAFT_COST = 2.0
"""Time of a draft over what its share of the weights would take: it is some twenty kernels, without a CUDA graph."""


class Lines:
    """Which request is on which line of the model, and how many of its tokens it knows there.

    Where no line is left for a request, it gets that of the one that has learnt nothing for longest.
    """

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._used: dict[str, tuple[int, int]] = {}
        """Line and number of tokens of each request, those that learnt last at the end."""

    def find(self, name: str, tokens: int) -> int | None:
        """The line of a request of which all ``tokens`` are known; None if not all are."""
        line, count = self._used.get(name, (None, 0))
        return line if count == tokens else None

    def use(self, name: str, tokens: int) -> tuple[int, bool]:
        """Note that a request has learnt ``tokens`` tokens; returns its line, and whether it is new there."""
        new = name not in self._used
        if not new:
            line, _ = self._used.pop(name)
        elif self._free:
            line = self._free.pop()
        else:
            line, _ = self._used.pop(next(iter(self._used)))
        self._used[name] = line, tokens
        return line, new

    def end(self, name: str) -> None:
        if name in self._used:
            self._free.append(self._used.pop(name)[0])

    def keep(self, names: Collection[str]) -> None:
        """End all requests but these."""
        for name in self._used.keys() - names:
            self.end(name)
        self._free.sort()


def choose_rows(names: Sequence[str], positions: Sequence[int], lengths: Mapping[str, int]) -> list[int]:
    """Indices of the tokens that are worth learning: those whose next token is known, of the last requests, as many as
    there are lines.

    Args:
        lengths: number of tokens so far, by request; those of others do not count.
    """
    indices = [i for i, name in enumerate(names) if positions[i] + 1 < lengths.get(name, 0)]
    chosen = set(list(dict.fromkeys(names[i] for i in indices))[-MOST_ROWS:])
    return [i for i in indices if names[i] in chosen]


class ModelDrafts:
    """The trained drafter of a rank, fed with what the model makes of each step's tokens.

    All ranks of a group have the same calls since :meth:`enter_group`.

    Attributes:
        share: seconds of a draft over those of a plain step of one request in the base layout, by the bytes that each
            reads, so that all ranks reckon alike; a draft takes as long in every layout, for each rank has all of it.
    """

    def __init__(self, scheduler: SwitchingScheduler) -> None:
        self._scheduler = scheduler
        self._model, self._tap = runner.get_drafter(scheduler.layouts.runner)
        self._lines = Lines(MOST_ROWS)
        self.share = DRAFT_COST * self._model.count_bytes() / runner.count_bytes(scheduler.layouts.base.model)

    def forget(self) -> None:
        self._lines.keep(())

    def read(self, reqs: Sequence[Req]) -> dict[str, Learnt]:
        """What the model knows of ``reqs``, by name; of those of which it does not know all tokens nothing."""
        lines = {host.get_name(req): line for req in reqs if (line := self._find(req)) is not None}
        return dict(zip(lines, self._model.read(self._upload(lines.values())), strict=True)) if lines else {}

    def enter_group(self, reqs: Sequence[Req], learnt: Mapping[str, Learnt]) -> None:
        """Go on with ``reqs``, those of a new group, and with what was ``learnt`` elsewhere, by name.

        All ranks of the group know the same requests now; of those that they had before, more tokens.
        """
        tokens = {host.get_name(req): host.count_tokens(req) for req in reqs}
        own = {name for name in tokens if self._lines.find(name, tokens[name]) is not None}
        names = [name for name in tokens if name in own or name in learnt][-MOST_ROWS:]
        self._lines.keep(own.intersection(names))
        lines = {name: self._lines.use(name, tokens[name])[0] for name in names}
        if new := [name for name in names if name not in own]:
            self._model.write(self._upload(lines[name] for name in new), [learnt[name] for name in new])

    def end(self, req: Req) -> None:
        self._lines.end(host.get_name(req))

    def list_rows(self, batch: ScheduleBatch) -> Rows | None:
        """Tokens of a step of ``batch`` that are to be learnt, if any are; before it is run."""
        return features.list_rows(batch, MOST_ROWS, WINDOW)

    def take(self, rows: Rows | None, result: Any) -> None:
        """Keep with its ``result`` what the model made of the tokens of a step that was just launched."""
        if rows is not None:
            with features.get_step_stream(self._scheduler):
                result.pat_features = rows, self._tap.take(rows)

    def learn(self, reqs: Sequence[Req], result: Any) -> None:
        """Learn what was kept of a step of ``reqs``, whose tokens are known by now."""
        kept: tuple[Rows, torch.Tensor] | None = getattr(result, "pat_features", None)
        if kept is None:
            return
        rows, taken = kept
        texts = {
            host.get_name(req): (host.get_prompt(req), host.get_output(req)) for req in reqs if not host.has_ended(req)
        }
        lengths = {name: len(prompt) + len(output) for name, (prompt, output) in texts.items()}
        chosen = choose_rows(rows.owners, rows.positions, lengths)
        if not chosen:
            return
        last = {rows.owners[i]: number for number, i in enumerate(chosen)}
        lines: dict[str, int] = {}
        for name, number in last.items():
            lines[name], new = self._lines.use(name, rows.positions[chosen[number]] + 2)
            if new:
                self._model.forget(lines[name])
        columns: list[tuple[int, int, int]] = []
        for i in chosen:
            name, position = rows.owners[i], rows.positions[i]
            prompt, output = texts[name]
            behind = position + 1 - len(prompt)
            columns.append((lines[name], position, output[behind] if behind >= 0 else prompt[position + 1]))
        at, positions, tokens = self._upload(zip(*columns, strict=True)).unbind()
        pairs = Pairs(at, positions, tokens, taken[self._upload(chosen)], self._upload(last.values()))
        self._model.learn(pairs, self._embed)

    def knows(self, req: Req) -> bool:
        """Whether there can be drafts for ``req`` now."""
        return self._find(req) is not None

    def draft(self, reqs: Sequence[Req], count: int) -> list[list[int]]:
        """``count`` tokens that are expected next, for each of ``reqs``; all of them are known."""
        layouts = self._scheduler.layouts
        lines = self._upload(self._find(req) for req in reqs)
        drafted = self._model.draft(lines, count, self._embed)
        # Ranks that drafted differently, by a bit in which a sum differs, would wait for each other for ever.
        return groups.take_first_ranks(layouts.groups.get_tp_group(layouts.current.layout), drafted).tolist()

    def _upload(self, numbers: Iterable[Any]) -> torch.Tensor:
        return upload(list(numbers), torch.int64, self._scheduler.layouts.device)

    def _find(self, req: Req) -> int | None:
        return self._lines.find(host.get_name(req), host.count_tokens(req))

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return features.get_embed(self._scheduler.layouts.current.model)(tokens)
