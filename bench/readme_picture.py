"""README's picture, drawn from README's own table: what each layout takes against the better static one.

    python bench/readme_picture.py

The figures come from ``bench/rollout.py``; put new ones into the table first.
"""

from __future__ import annotations

from pathlib import Path

from sglang_pat.tools import pictures

ROOT = Path(__file__).resolve().parents[1]
HEAD = "| model, link |"
WAYS = (
    ("always tp1×dp2", "D", pictures.BLUE),
    ("always tp2×dp1", "D", pictures.ORANGE),
    ("adaptive", "o", pictures.OURS),
)


def rows(readme: str) -> dict[str, list[float]]:
    """Of each case: seconds of both static layouts and of the adaptive engine."""
    lines = readme[readme.index(HEAD) :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip(" *`") for cell in line.strip("|").split("|")] for line in lines]
    return {case.replace("`", ""): [float(s.strip("* ")) for s in seconds] for case, *seconds, speed in cells if speed}


def percents(cases: dict[str, list[float]]) -> dict[str, list[float]]:
    """Time beyond the better static layout's, percent; negative where it is faster."""
    return {case: [100 * (each / min(seconds[:2]) - 1) for each in seconds] for case, seconds in cases.items()}


def message(found: dict[str, list[float]]) -> str:
    static, adaptive = (max(max(each[part]) for each in found.values()) for part in (slice(2), slice(2, 3)))
    ours = f"adaptive is at most {adaptive:.1f}% slower" if adaptive > 0 else "adaptive never is"
    return f"A fixed layout is up to {static:.0f}% slower if you choose the wrong one; {ours}"


def draw(found: dict[str, list[float]], path: Path) -> None:
    figure, (axes,) = pictures.panels(1, width=9.9, height=4.0)
    places = range(len(found), 0, -1)
    for place, each in zip(places, found.values(), strict=True):
        axes.plot([min(each), max(each)], [place, place], color=pictures.LIGHT, linewidth=2, zorder=1)
    for way, (name, marker, color) in enumerate(WAYS):
        values = [each[way] for each in found.values()]
        axes.scatter(values, places, marker=marker, color=color, s=90, label=name, zorder=2 + way)
    axes.axvline(0, color=pictures.LINE, linewidth=1, zorder=0)
    axes.set_yticks(list(places), [case.replace("emulated ", "") + "*" * ("emulated" in case) for case in found])
    pictures.labels(axes, "time of a batch against the better fixed layout, % (left is faster)", "")
    axes.legend(frameon=False, loc="lower right", fontsize=9.5)
    pictures.message(figure, message(found))
    pictures.footer(figure, "* emulated link; two CPU cores, one rank each; medians; rounds vary by 20%")
    pictures.save(figure, path)


if __name__ == "__main__":
    draw(percents(rows((ROOT / "README.md").read_text())), ROOT / "docs/img/layouts.png")
