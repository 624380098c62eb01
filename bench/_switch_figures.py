"""What ``bench/switch.py`` measures, its table, and the figures that stand beside its bars."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.stats import bootstrap

from profiler.measure import make_sample
from sglang_pat.predict.cost import fit_control, fit_kv


@dataclass(frozen=True)
class SwitchSetting:
    """Ranks and the two degrees between which they switch; tokens alive × requests to measure.

    ``headline``: tokens and requests of the comparison with a restart; ``after``: of the steps after a switch, which
    are compared with the static layout's ``pairs`` times there and back.
    """

    ranks: int
    low: int
    high: int
    points: tuple[tuple[int, int], ...]
    headline: tuple[int, int] = (8192, 8)
    after: tuple[int, int] = (1024, 8)
    pairs: int = 30

    @property
    def flags(self) -> tuple[str, ...]:
        degrees = f"{self.low},{self.high}"
        return ("--tp", str(self.low), "--dp", str(self.ranks // self.low), "--pat-candidates", degrees)


POINTS = tuple((k * 1024, n) for k, n in ((1, 1), (1, 8), (1, 32), (8, 8), (32, 8), (64, 32)))
"""SmolLM2 takes 8,192 tokens a request."""
SETTINGS = {
    "2 ranks": SwitchSetting(2, 1, 2, POINTS),
    "4 ranks": SwitchSetting(4, 2, 4, POINTS),
}
QUICK = {"2 ranks, tiny": SwitchSetting(2, 1, 2, ((512, 1), (2048, 8)), headline=(2048, 8))}

PHASES = ("drain", "capsules", "plan", "kv", "weights", "install", "check")


def of(point: dict, way: str, up: bool) -> list[dict]:
    """Records of a point in one direction, the first one left out (page faults, lazy groups)."""
    records = [record for record in point["switches"][way] if (record["to_tp"] > record["from_tp"]) == up]
    return records[1:] or records


def of_lending(point: dict, reason: str, up: bool = False) -> list[dict]:
    """Records of the switches between which ranks were lent, with this reason (and up), the first one left out."""
    records = [r for r in point.get("lending", ()) if r["reason"] == reason and (r["to_tp"] > r["from_tp"]) == up]
    return records[1:]


def phase(switches: list[dict], name: str) -> float:
    """Median seconds of a phase."""
    return median(s["phases"].get(name, 0.0) for s in switches)


def pause(switches: list[dict]) -> float:
    return median(s["pause_seconds"] for s in switches)


def copy(point: dict) -> float:
    """Median seconds of a copy."""
    return median(point["copies"])


def own(switches: list[dict]) -> float:
    """Median pause without the steps in flight, which every way has to let end."""
    return median(s["pause_seconds"] - s["phases"]["drain"] for s in switches)


def line(point: dict) -> str:
    """Line of progress."""
    shown = []
    for way in point["switches"]:
        up, down = (of(point, way, direction) for direction in (True, False))
        shown.append(f"{way} {1e3 * own(up):.1f} up, {1e3 * own(down):.1f} down")
    shown.append(f"copy {1e3 * copy(point):.1f}")
    return f"{point['tokens']} tokens, {point['requests']} requests: pause without drain, ms: {'; '.join(shown)}"


def rows(result: dict, setting: SwitchSetting) -> list[dict]:
    """Rows of a result, one for each point, way and direction."""
    cells = []
    for point in result["points"]:
        for way in point["switches"]:
            for up in (True, False):
                switches = of(point, way, up)
                to = setting.high if up else setting.low
                record = switches[0]
                least = record["tokens"] * result["kv_bytes_per_token"] * (1 - setting.low / setting.high)
                taken = point.get("taken", {}).get(str(to), float("nan")) if way == "ours" else float("nan")
                cells.append(
                    {
                        "tokens": point["tokens"], "requests": point["requests"], "way": way,
                        "to": f"tp{to}", "pause": pause(switches), "own": own(switches),
                        **{name: phase(switches, name) for name in PHASES},
                        "sent_over_minimum": record["moved_bytes"] / least if least else float("nan"),
                        "moved_bytes": record["moved_bytes"],
                        "copy": copy(point),
                        "extra": taken,
                        "extra_over_layers": taken / two_layers(record, result),
                    }
                )  # fmt: skip
    return cells


def two_layers(record: dict, result: dict) -> float:
    """Bytes of the live KV of two layers on a rank, shared out evenly: what the exchange may take besides capsules."""
    return 2 * record["tokens"] * result["kv_bytes_per_token"] / result["layers"] / result["ranks"]


def modelled(result: dict) -> list[float]:
    """Predicted over measured pause without drain of each point and direction of ours.

    Predicted as the policies do (``sglang_pat.predict.fits``), from all *other* points.
    """
    ratios = []
    for point, up in itertools.product(result["points"], (True, False)):
        others = [make_sample(s) for p in result["points"] if p is not point for s in of(p, "ours", up)]
        if len({(s.requests, s.tokens) for s in others}) < 3:
            continue
        fixed, per_request, handing_over = fit_control(others, None)
        kv_fixed, per_token = fit_kv(others)
        records = of(point, "ours", up)
        tokens = median(s["tokens"] for s in records)
        predicted = fixed + per_request * point["requests"] + kv_fixed + (handing_over + per_token) * tokens
        ratios.append(predicted / own(records))
    return ratios


def linear(result: dict, up: bool) -> tuple[float, float]:
    """Exponent of a power law through the upper half of our points over the live tokens, and R² of a line."""
    points = [(p["tokens"], own(of(p, "ours", up))) for p in result["points"]]
    tokens, seconds = (np.array(column) for column in zip(*points, strict=True))
    large = tokens >= np.median(tokens)
    exponent = np.polyfit(np.log(tokens[large]), np.log(seconds[large]), 1)[0] if len(set(tokens[large])) > 1 else 1.0
    line = np.polyval(np.polyfit(tokens, seconds, 1), tokens)
    return float(exponent), float(1 - ((seconds - line) ** 2).sum() / ((seconds - seconds.mean()) ** 2).sum())


def bars(everything: list[dict], result: dict, setting: SwitchSetting) -> Iterator[tuple[str, str, str]]:
    """Bars of one setting as (figure, bar, measured); all of the pause without drain unless said otherwise."""
    ours = [row for row in everything if row["way"] == "ours"]
    head = {row["way"]: row for row in everything if _is_headline(row, setting)}
    whole, copies = sum(result["restart"].values()), [(row["own"] - 0.010) / row["copy"] for row in ours]
    ratios = [abs(ratio - 1) for ratio in modelled(result)]
    yield "bytes sent over the minimum, worst", "≤ 1.05", f"{max(row['sent_over_minimum'] for row in ours):.3f}"
    pats = head.get("PAT's")
    if pats is not None:
        without, drained = (pats[name] / head["ours"][name] for name in ("own", "pause"))
        yield "PAT's way over ours, headline", "≥ 5 with 4 ranks", f"{without:.1f} ({drained:.1f} with drain)"
    yield (
        "restart over ours, headline", "≥ 100",
        f"{whole / head['ours']['own']:.0f} ({whole / head['ours']['pause']:.0f} with drain)",
    )  # fmt: skip
    yield "(ours - 10 ms) over one copy, median; worst", "≤ 3", f"{median(copies):.2f}; {max(copies):.2f}"
    yield "return to base without requests", "≤ 5 ms", f"{1e3 * median(result['returning']):.1f} ms, drain included"
    for reason, what in (("lend", "lending over a merge"), ("take back", "taking back over a merge")):
        over = [
            own(lendings) / own(of_lending(point, "request", up=True))
            for point in result["points"]
            if (lendings := of_lending(point, reason))
        ]
        yield f"{what}, median; worst", "median ≤ 1", f"{median(over):.2f}; {max(over):.2f}"
    extra = [row["extra_over_layers"] for row in ours if row["tokens"] >= 4096]
    if extra:
        yield "extra memory over two layers' live KV, from 4K tokens, worst", "≤ 1 + capsules", f"{max(extra):.2f}"
    after = [a / b for pair in result["after"] for a, b in zip(pair["switched"], pair["static"], strict=True)]
    low, high = bootstrap((after,), np.median, method="percentile", rng=0).confidence_interval
    text = f"{median(after):.3f} ({low:.3f}-{high:.3f}), {len(after)} switches"
    yield f"step after over static, {setting.after[0]} tokens, median (95% interval)", "within 2%", text
    for up in (True, False):
        exponent, r2 = linear(result, up)
        yield f"pause ∝ tokens^x, {'up' if up else 'down'}", "x ≤ 1", f"x = {exponent:.2f}, line R² {r2:.3f}"
    if ratios:
        yield "model of the pause, error: mean; worst", "≤ 15%", f"{np.mean(ratios):.0%}; {max(ratios):.0%}"


def _is_headline(row: dict, setting: SwitchSetting) -> bool:
    return (row["tokens"], row["requests"], row["to"]) == (*setting.headline, f"tp{setting.high}")


def table(name: str, result: dict, setting: SwitchSetting) -> None:
    """Print the table."""
    console = Console(width=170)
    shown = Table(title=f"{name}: medians, ms", title_justify="left")
    measured = ("sent / min", "copy", "extra MB", "/ 2 layers")
    for column in ("tokens", "requests", "to", "way", "pause", "without drain", *PHASES[1:], *measured):
        shown.add_column(column, justify="right")
    everything = rows(result, setting)
    for row in everything:
        shown.add_row(
            str(row["tokens"]), str(row["requests"]), row["to"], row["way"], f"{1e3 * row['pause']:.0f}",
            f"{1e3 * row['own']:.1f}", *(f"{1e3 * row[p]:.1f}" for p in PHASES[1:]), f"{row['sent_over_minimum']:.3f}",
            f"{1e3 * row['copy']:.1f}", f"{row['extra'] / 1e6:.1f}", f"{row['extra_over_layers']:.2f}",
        )  # fmt: skip
    console.print(shown)
    parts = result["restart"]
    tokens, requests = setting.headline
    each = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items())
    console.print(f"restart, {requests} requests, {tokens} tokens: {sum(parts.values()):.1f} s ({each})")
    shown = Table(title=f"{name}: without drain unless said otherwise", title_justify="left")
    for column in ("figure", "bar", "measured"):
        shown.add_column(column)
    for row in bars(everything, result, setting):
        shown.add_row(*row)
    console.print(shown)
