"""Table and picture of ``bench/switch.py``, and the figures that stand beside its bars."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

PHASES = ("drain", "capsules", "plan", "kv", "weights", "install", "check")
COLORS = {
    "drain": "#c9ced6", "capsules": "#8e6bbf", "plan": "#5b8def", "kv": "#ef8a2c", "weights": "#c0504d",
    "install": "#3a9a5b", "check": "#7f8c8d",
}  # fmt: skip


def of(point: dict, way: str, up: bool) -> list[dict]:
    """Switches of a point in one direction, the first one there and back left out (page faults, lazy groups)."""
    made = point["switches"][way]
    found = [s for s in made if (s["record"]["to_tp"] > s["record"]["from_tp"]) == up]
    return found[1:] or found


def phase(switches: list[dict], name: str) -> float:
    """Median seconds."""
    return median(s["record"]["phases"].get(name, 0.0) for s in switches)


def pause(switches: list[dict]) -> float:
    return median(s["record"]["pause_seconds"] for s in switches)


def own(switches: list[dict]) -> float:
    """Median pause without the steps in flight, which every way has to let end."""
    return median(s["record"]["pause_seconds"] - s["record"]["phases"]["drain"] for s in switches)


def line(point: dict, setting: Any) -> str:
    """Progress."""
    shown = []
    for way in point["switches"]:
        up, down = (of(point, way, direction) for direction in (True, False))
        shown.append(f"{way} {1e3 * own(up):.1f} up, {1e3 * own(down):.1f} down")
    shown.append(f"copy {1e3 * point['copy_seconds']:.1f}")
    return f"{point['tokens']} tokens, {point['requests']} requests: pause without drain, ms: {'; '.join(shown)}"


def rows(result: dict, setting: Any) -> list[dict]:
    """One for each point, way and direction."""
    found = []
    for point in result["points"]:
        for way in point["switches"]:
            for up in (True, False):
                switches = of(point, way, up)
                to = setting.high if up else setting.low
                after = median(median(s["steps"]) for s in switches)
                record = switches[0]["record"]
                least = record["tokens"] * result["kv_bytes_per_token"] * (1 - setting.low / setting.high)
                static = point["static"].get(to, point["static"].get(str(to)))
                found.append(
                    {
                        "tokens": point["tokens"], "requests": point["requests"], "way": way,
                        "to": f"tp{to}", "pause": pause(switches), "own": own(switches),
                        **{name: phase(switches, name) for name in PHASES},
                        "sent_over_minimum": record["moved_bytes"] / least if least else float("nan"),
                        "moved_bytes": record["moved_bytes"],
                        "copy": point["copy_seconds"],
                        "rise": median(max(s["rise"]) for s in switches),
                        "layer_bytes": record["tokens"] * result["kv_bytes_per_token"],
                        "after_over_static": after / median(static) if way == "ours" else float("nan"),
                    }
                )  # fmt: skip
    return found


def table(name: str, result: dict, setting: Any) -> None:
    """Printed."""
    console = Console(width=170)
    shown = Table(title=f"{name}: medians, ms", title_justify="left")
    measured = ("sent / min", "copy", "RSS +MB", "step / static")
    for column in ("tokens", "requests", "to", "way", "pause", "without drain", *PHASES[1:], *measured):
        shown.add_column(column, justify="right")
    for row in rows(result, setting):
        shown.add_row(
            str(row["tokens"]), str(row["requests"]), row["to"], row["way"], f"{1e3 * row['pause']:.0f}",
            f"{1e3 * row['own']:.1f}", *(f"{1e3 * row[p]:.1f}" for p in PHASES[1:]), f"{row['sent_over_minimum']:.3f}",
            f"{1e3 * row['copy']:.1f}", f"{row['rise'] / 1e6:.1f}", f"{row['after_over_static']:.3f}",
        )  # fmt: skip
    console.print(shown)
    back = result["returning"]
    median_ms, longest_ms = 1e3 * median(back), 1e3 * max(back)
    console.print(f"return to base without requests: median {median_ms:.2f} ms, longest {longest_ms:.2f} ms")
    parts = result["restart"]
    whole = sum(parts.values())
    tokens, requests = setting.headline
    each = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items())
    console.print(f"restart, {requests} requests, {tokens} tokens: {whole:.1f} s ({each})")
    for row in rows(result, setting):
        if (row["tokens"], row["requests"], row["to"]) == (*setting.headline, f"tp{setting.high}"):
            console.print(
                f"  {row['way']}: {1e3 * row['pause']:.0f} ms, without drain {1e3 * row['own']:.1f} ms; "
                f"a restart is {whole / row['pause']:.0f} and {whole / row['own']:.0f} times that"
            )


def draw(results: dict, about: str, path: Path) -> None:
    """Pause without drain by tokens, phases stacked, both ways; one column a setting, up above down."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from switch import QUICK, SETTINGS  # noqa: PLC0415

    columns = len(results)
    figure, axes = plt.subplots(2, columns, figsize=(1 + 6 * columns, 8), squeeze=False)
    for column, (name, result) in enumerate(results.items()):
        setting = (SETTINGS | QUICK)[name]
        everything = rows(result, setting)
        for direction, axis in zip((setting.high, setting.low), axes[:, column], strict=True):
            mine = [row for row in everything if row["to"] == f"tp{direction}"]
            points = sorted({(row["tokens"], row["requests"]) for row in mine})
            for at, point in enumerate(points):
                for offset, way in ((-0.2, "ours"), (0.2, "PAT's")):
                    row = next(r for r in mine if (r["tokens"], r["requests"]) == point and r["way"] == way)
                    low = 0.0
                    for part in PHASES[1:]:
                        axis.bar(at + offset, 1e3 * row[part], 0.36, bottom=low, color=COLORS[part], label=part)
                        low += 1e3 * row[part]
                    axis.text(at + offset, low, f"{low:.0f}", ha="center", va="bottom", fontsize=7)
            axis.set_xticks(range(len(points)), [f"{t // 1024}K\n{n} req." for t, n in points], fontsize=7)
            axis.set_yscale("symlog", linthresh=10)
            axis.set_ylabel("pause without drain, ms")
            axis.set_title(f"{name}: to tp{direction} (left bar ours, right PAT's way)", fontsize=10)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), loc="lower left", ncol=len(unique), fontsize=8)
    figure.text(0.99, 0.01, about, ha="right", fontsize=8, color="#666f7b")
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path, dpi=110)
