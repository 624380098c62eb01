"""Draw a profile.

    python -m profiler.report profile.json --out DIR

Writes ``latency_by_layout.png`` (as PAT Fig. 4), ``latency_over_tokens.png`` and ``latency_over_batch.png`` (as
Fig. 6), ``best_layout.png``, ``switch.png``, ``accuracy.png`` and ``index.html``, one page that has them all inside.
If DIR has a ``validation.json`` of ``profiler.validate``, the page shows that too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sglang_pat import files
from sglang_pat.predict.profile import Profile, load
from sglang_pat.tools.commands import Parser, UsageError, output_folder, run, writing


class Validation(msgspec.Struct):
    """What is read of ``validation.json``: the rows of a table, text by column."""

    table: list[dict[str, str]]


def main(argv: list[str] | None = None) -> int:
    """Returns 0; raises UsageError or ProfileError for bad input, before anything is written."""
    parser = Parser(prog="python -m profiler.report", description="Figures of a profile and one page that shows them.")
    parser.add_argument("profile", type=Path, metavar="profile.json")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="made if it is not there")
    args = parser.parse_args(argv)
    profile, folder = load(args.profile), output_folder(args.out)
    ranks = profile.fingerprint.num_ranks
    if not any(point.replicas == ranks // point.tp for point in profile.decode):
        raise UsageError(f"{args.profile} has no decode times yet; run the same profiler.sweep again to go on")
    rows, throughput = validation_rows(folder), throughput_figures(folder)
    with writing(folder):
        for path in write(profile, folder, rows, throughput):
            print(path)
    return 0


def validation_rows(folder: Path) -> list[dict[str, str]]:
    """The table of a ``validation.json`` in ``folder``; empty if there is none.

    Raises:
        UsageError: one that ``profiler.validate`` did not write.
    """
    path = folder / "validation.json"
    if not path.exists():
        return []
    try:
        rows = files.decode(files.read(path), Validation).table
        for number, row in enumerate(rows):
            if row.keys() != rows[0].keys():
                raise files.wrong(f"table[{number}]", row, f"expected the columns {', '.join(rows[0])}")
    except ValueError as error:
        raise UsageError(f"{path}: {error}; run profiler.validate again, or remove it") from None
    return rows


def throughput_figures(folder: Path) -> list[tuple[str, bytes]]:
    """Layout and PNG of each figure of ``profiler.validate`` in ``folder``.

    Raises:
        UsageError: one cannot be read.
    """
    found = []
    for path in sorted(folder.glob("throughput_*.png")):
        try:
            found.append((path.stem.removeprefix("throughput_"), files.read(path)))
        except ValueError as error:
            raise UsageError(f"{path}: {error}; run profiler.validate again, or remove it") from None
    return found


def write(
    profile: Profile,
    folder: Path,
    rows: Sequence[dict[str, str]] = (),
    throughput: Sequence[tuple[str, bytes]] = (),
) -> list[Path]:
    """All figures and the page in ``folder``; the files written, the page last.

    Args:
        rows, throughput: what :func:`validation_rows` and :func:`throughput_figures` found.
    """
    # Late: a bad command line is told at once.
    from profiler import accuracy, figures, maps, page
    from sglang_pat.tools import pictures

    view = figures.View(profile)
    checks = accuracy.leave_one_out(profile)
    plan = [
        ("latency_by_layout", "Time per token by layout", BY_LAYOUT, figures.latency_by_layout(view)),
        ("latency_over_tokens", "Step time over the batch's tokens", OVER_TOKENS, figures.latency_over_tokens(view)),
        ("latency_over_batch", "Step time over the batch", OVER_BATCH, figures.latency_over_batch(view)),
        ("best_layout", "Best layout", BEST, maps.best_layout(view)),
        ("switch", "What a switch costs", SWITCH, maps.switch_costs(view)),
        ("accuracy", "Predicted against measured", ACCURACY, maps.predicted_against_measured(view, checks)),
    ]
    drawn = [(heading, text, name, pictures.drawn(figure)) for name, heading, text, figure in plan if figure]
    shown = [(f"Throughput while a batch drains, {name}", THROUGHPUT, "throughput", data) for name, data in throughput]
    html = page.build(view, [*drawn, *shown], accuracy.summary(profile, checks), rows)
    # All of it is made before the first file is written.
    contents = [(f"{name}.png", data) for _, _, name, data in drawn] + [("index.html", html.encode())]
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in contents:
        files.write(data, folder / name)
    return [folder / name for name, _ in contents]


BY_LAYOUT = (
    "As PAT's Fig. 4: requests spread evenly over the replicas of each layout. Dots are measured, lines predicted; "
    "hollow dots: one replica at work alone."
)
OVER_TOKENS = (
    "As PAT's Fig. 6a, all replicas at work. Dots are measured (bars from the least to the largest window), lines are "
    "the piecewise-linear fit, one for each batch."
)
OVER_BATCH = "As PAT's Fig. 6b: dots measured, lines interpolated between the batches."
BEST = "The layout with the shortest predicted step, for so many requests of one length."
SWITCH = (
    "Medians of the measured switches by part of the pause. A part is that of the slowest rank, so all together can be "
    "longer than the pause, which the line marks."
)
ACCURACY = (
    "Each point predicted from the others of its layout. Between points this is the error of interpolation with twice "
    "the grid's gap; at the ends that of going on beyond the grid."
)
THROUGHPUT = "As PAT's Fig. 14: real prompts, tokens per second over the requests that remain."


if __name__ == "__main__":
    sys.exit(run("profiler.report", main))
