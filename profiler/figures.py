"""Figures of step times: as PAT's Fig. 4 (over the batch, by layout) and Fig. 6 (over tokens and over the batch)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sglang_pat.predict.predictor import Predictor
from sglang_pat.predict.profile import DecodePoint, Profile
from sglang_pat.tools import pictures


class View:
    """A profile and its predictor as the figures see them: replicas all at work unless told otherwise.

    Attributes:
        degrees: those that were measured so, at least one.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile, self.predictor = profile, Predictor(profile)
        self.ranks = profile.fingerprint.num_ranks
        self.degrees = tuple(tp for tp in self.predictor.degrees if self.points(tp))

    def dp(self, tp: int) -> int:
        return self.ranks // tp

    def name(self, tp: int) -> str:
        return pictures.name(self.ranks, tp)

    def color(self, tp: int) -> str:
        return pictures.color(self.degrees, tp)

    def points(self, tp: int, replicas: int | None = None) -> list[DecodePoint]:
        """Decode points of ``tp`` with ``replicas`` replicas at work, all by default, in order."""
        wanted = self.dp(tp) if replicas is None else replicas
        found = [p for p in self.profile.decode if p.tp == tp and p.replicas == wanted]
        return sorted(found, key=lambda p: (p.batch, p.context))

    def step(self, tp: int, requests: np.ndarray, context: np.ndarray | float) -> np.ndarray:
        """Predicted seconds of a step with ``requests`` requests in the engine, spread evenly: the fullest replica."""
        requests = np.asarray(requests, dtype=float)
        replicas = np.minimum(self.dp(tp), requests)
        batch = np.ceil(requests / self.dp(tp))
        return np.asarray(self.predictor.step_seconds(tp, batch, batch * context, replicas))

    @property
    def label(self) -> str:
        """What the figures are of, in one line."""
        mark = self.profile.fingerprint
        link = "" if mark.link == "none" else f", emulated link {mark.link}"
        return f"{self.profile.kind}: {mark.model}, {mark.dtype}, {mark.num_ranks} × {mark.device}{link}"


def latency_by_layout(view: View) -> Figure:
    """PAT Fig. 4: time per token over the global batch, one line a layout, at a short and at a long context."""
    contexts = _typical(view)
    figure, axes = pictures.panels(len(contexts), width=5.6)
    for one, context in zip(axes, contexts, strict=True):
        batches: set[int] = set()
        measured: list[int] = []
        for tp in view.degrees:
            dp, found = view.dp(tp), [p for p in view.points(tp) if abs(p.context - context) <= 0.1 * context]
            most = max((p.batch for p in found), default=1) * dp
            line = np.unique(np.geomspace(1, most, 200).round())
            one.plot(line, 1e3 * view.step(tp, line, context), color=view.color(tp), label=view.name(tp), linewidth=1.8)
            one.plot([p.batch * dp for p in found], [1e3 * p.seconds for p in found], "o", color=view.color(tp), ms=4)
            lone = [p for p in view.points(tp, 1) if p.batch == 1 and abs(p.context - context) <= 0.1 * context]
            if dp > 1:
                one.plot([1] * len(lone), [1e3 * p.seconds for p in lone], "o", color=view.color(tp), ms=4, mfc="white")
            batches |= {p.batch * dp for p in found}
            measured.append(most)
        one.set_xscale("log", base=2)
        pictures.plain_log(one.xaxis, sorted(batches | {1}))
        title = f"{context} tokens of context: {fastest(view, context, min(measured))}"
        _explain(one, "requests in the engine", "ms a token", title, 62, small=8.5)
    pictures.footer(figure, view.label)
    return figure


def latency_over_tokens(view: View) -> Figure:
    """PAT Fig. 6a: step time over the aggregate tokens of a replica's batch; points measured, lines as predicted."""
    figure, axes = pictures.panels(len(view.degrees))
    for one, tp in zip(axes, view.degrees, strict=True):
        batches = sorted({p.batch for p in view.points(tp)})
        for batch, shade in zip(batches, _shades(len(batches)), strict=True):
            found = [p for p in view.points(tp) if p.batch == batch]
            tokens = np.array([p.batch * p.context for p in found], dtype=float)
            line = np.geomspace(tokens.min(), tokens.max(), 60)
            one.plot(line, 1e3 * view.predictor.step_seconds(tp, batch, line), color=shade, linewidth=1.2)
            _measured(one, tokens, found, shade, f"batch {batch}" if _shown(batch, batches) else None)
        one.set_xscale("log", base=2)
        title = f"{view.name(tp)}: {growth_by_tokens(view, tp)}"
        _explain(one, "tokens of the batch (one replica)", "ms a step", title, 50)
    pictures.footer(figure, view.label)
    return figure


def latency_over_batch(view: View) -> Figure:
    """PAT Fig. 6b: step time over the batch of a replica, one line a context."""
    figure, axes = pictures.panels(len(view.degrees))
    for one, tp in zip(axes, view.degrees, strict=True):
        found = view.points(tp)
        counts: dict[int, set[int]] = {}
        for point in found:
            counts.setdefault(_near(point.context, counts), set()).add(point.batch)
        contexts = sorted(counts, key=lambda c: (-len(counts[c]), c))[:6]
        for context, shade in zip(sorted(contexts), _shades(len(contexts)), strict=True):
            mine = [p for p in found if _near(p.context, {context: None}) == context]
            batches = np.array([p.batch for p in mine], dtype=float)
            line = np.linspace(batches.min(), batches.max(), 120)
            one.plot(line, 1e3 * view.predictor.step_seconds(tp, line, line * context), color=shade, linewidth=1.2)
            _measured(one, batches, mine, shade, f"{context} tokens each")
        title = f"{view.name(tp)}: {growth_by_batch(view, tp, contexts)}"
        _explain(one, "batch (one replica)", "ms a step", title, 50)
    pictures.footer(figure, view.label)
    return figure


def _explain(axes: Axes, x: str, y: str, title: str, columns: int, small: float = 7.5) -> None:
    """What a panel shows: labels, title and legend; times begin at 0."""
    axes.set_ylim(bottom=0)
    pictures.labels(axes, x, y)
    pictures.title(axes, title, columns)
    axes.legend(fontsize=small, frameon=False)


def fastest(view: View, context: int, most: int) -> str:
    """Which layout has the shortest step, from one request to ``most``."""
    requests = np.arange(1, most + 1) if most <= 4096 else np.unique(np.geomspace(1, most, 4096).round())
    best = np.stack([view.step(tp, requests, context) for tp in view.degrees]).argmin(axis=0)
    starts = [0, *(np.flatnonzero(np.diff(best)) + 1)]
    names = [view.name(view.degrees[best[start]]) for start in starts]
    if len(starts) == 1:
        return f"{names[0]} is fastest"
    if len(starts) > 4:
        return f"{names[0]} is fastest for one request, {names[-1]} for {most}; they change places in between"
    until = [f"{name} up to {requests[end - 1]:.0f}" for name, end in zip(names, starts[1:], strict=False)]
    return f"fastest are {', '.join(until)}, {names[-1]} with more requests"


def growth_by_tokens(view: View, tp: int) -> str:
    """From the fewest tokens to the most, in the batch in which that matters most."""
    by_batch: dict[int, list[DecodePoint]] = {}
    for point in view.points(tp):
        by_batch.setdefault(point.batch, []).append(point)
    found = max(by_batch.values(), key=lambda points: points[-1].seconds / points[0].seconds, default=[])
    if not found or found[0].context == found[-1].context:
        return "no step takes longer with more tokens"
    least, most = found[0], found[-1]
    times, tokens = most.seconds / least.seconds, most.context / least.context
    return f"up to {times:.2f} times as long with {tokens:.0f} times the tokens (batch {most.batch})"


def growth_by_batch(view: View, tp: int, contexts: list[int]) -> str:
    """From the smallest batch to the largest, at the context that has most of them."""
    if not contexts:
        return "nothing measured"
    found = [point for point in view.points(tp) if _near(point.context, {contexts[0]: None}) == contexts[0]]
    least, most = found[0], found[-1]
    if least.batch == most.batch:
        return f"batch {most.batch}"
    return f"{most.seconds / least.seconds:.2f} times as long with batch {most.batch} as with {least.batch}"


def _measured(axes, x: np.ndarray, found: list[DecodePoint], shade, label: str | None) -> None:
    """Medians, with bars from the least to the largest window."""
    y = np.array([p.seconds for p in found])
    low = np.array([min(p.samples, default=p.seconds) for p in found])
    high = np.array([max(p.samples, default=p.seconds) for p in found])
    bars = 1e3 * np.clip([y - low, high - y], 0, None)
    axes.errorbar(x, 1e3 * y, bars, fmt="o", color=shade, ms=3.5, linewidth=0.8, label=label)


def _typical(view: View) -> list[int]:
    """Two contexts at which much was measured: a short one, and the longest with at least half as many batches."""
    counts: dict[int, int] = {}
    for tp in view.degrees:
        for point in view.points(tp):
            context = _near(point.context, counts)
            counts[context] = counts.get(context, 0) + 1
    if not counts:
        return []
    most = max(counts.values())
    many = sorted(context for context, count in counts.items() if 2 * count >= most)
    return [many[0]] if many[0] == many[-1] else [many[0], many[-1]]


def _near(context: int, known: Iterable[int]) -> int:
    """The one of ``known`` that is the same context but for a few tokens, else ``context``."""
    return next((other for other in known if abs(other - context) <= max(4, 0.03 * other)), context)


def _shades(count: int) -> list:
    return [colormaps["viridis"](0.05 + 0.85 * i / max(1, count - 1)) for i in range(count)]


def _shown(batch: int, batches: list[int]) -> bool:
    """Whether the legend has room for it."""
    return len(batches) <= 8 or batches.index(batch) % (len(batches) // 6) == 0 or batch == batches[-1]
