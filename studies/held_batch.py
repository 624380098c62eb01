"""What a chunk costs that is trained on lent ranks when the batch becomes complete: to its end, or ended early.

    python -m studies.held_batch [--seeds N]

A step of ``trainer_mode=sglang_pat_stream_lent``: all ranks generate until half of the groups are complete.  Then half
of them train, at half the pace, on what is complete, a chunk after the other.  When the batch is complete, all ranks
train on the rest; or, if a chunk is trained to its end, after that.  Modelled, so that no machine matters.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from sglang_pat.tools.commands import Parser, run

ROUND = 60.0
"""Seconds until the last group is complete."""
RESPONSES = 8
"""Number of responses of a group."""
BETWEEN, WITHIN = 0.7, 0.7
"""Standard deviations of the logarithm of lengths, between prompts and between the responses to one."""
LENT_AT = 0.5
"""Share of the groups that is complete when ranks are lent."""
SLOWDOWN = 2
"""Factor on the time of training on half of the ranks."""
LEAST = 0.2
"""Least share of the groups that are left that makes a chunk."""
CHUNK_SECONDS = 0.12
"""Seconds of each chunk before its first token."""
LATE_GROUPS = 0.5
"""Groups trained after the batch is complete when a chunk ends early: two micro-batches of a quarter of a group."""
STEPS = 100
"""Number of steps for each seed."""


def draw_ends(groups: int, random: np.random.Generator) -> np.ndarray:
    """Seconds at which groups are complete, sorted."""
    lengths = random.normal(0, BETWEEN, (groups, 1)) + random.normal(0, WITHIN, (groups, RESPONSES))
    ends = np.sort(np.exp(lengths).max(axis=1))
    return ends * ROUND / ends[-1]


def simulate_step(ends: np.ndarray, seconds: float, ends_early: bool) -> float:
    """Seconds of a step.

    Args:
        ends: of :func:`draw_ends`.
        seconds: of training a group on all ranks.
        ends_early: a chunk does, when the batch is complete.
    """
    groups, now, trained = len(ends), ends[int(LENT_AT * len(ends)) - 1], 0.0
    while now < ends[-1]:
        complete = np.searchsorted(ends, now, side="right")
        least = max(1, int(LEAST * (groups - trained)))
        if complete - trained < least:
            now = ends[int(np.ceil(trained)) + least - 1]
            continue
        chunk = complete - trained
        if ends_early:
            first = now + CHUNK_SECONDS
            chunk = min(chunk, max(0.0, ends[-1] - first) / (SLOWDOWN * seconds) + LATE_GROUPS)
        now += CHUNK_SECONDS + SLOWDOWN * seconds * chunk
        trained += chunk
    return now + (CHUNK_SECONDS + seconds * (groups - trained) if trained < groups else 0)


def compare(groups: int, training: float, seeds: int) -> list[str]:
    """Cells of a row; ``training`` of the batch on all ranks, as a share of the round."""
    seconds, times = training * ROUND / groups, []
    for seed in range(seeds):
        random = np.random.default_rng(seed)
        drawn = [draw_ends(groups, random) for _ in range(STEPS)]
        times.append([[simulate_step(ends, seconds, early) for early in (False, True)] for ends in drawn])
    held, early = np.moveaxis(np.array(times), 2, 0)  # [seeds, steps]
    loss = held / early - 1
    means = loss.mean(axis=1)
    return [
        str(groups), f"{training:.2f}", f"{ROUND * (1 + training) + CHUNK_SECONDS:.1f}", f"{held.mean():.1f}",
        f"{early.mean():.1f}", f"{means.mean():.1%} ({means.min():.1%} to {means.max():.1%})", f"{loss.max():.1%}",
    ]  # fmt: skip


HEADS = (
    "groups", "training / round", "never lent, s", "to the chunk's end, s", "ended early, s", "loss, mean", "worst step"
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10, help=f"of {STEPS} steps each")
    args = parser.parse_args(argv)
    rows = [compare(groups, training, args.seeds) for training in (0.15, 0.31, 0.5) for groups in (16, 32, 64)]
    for cells in (HEADS, ["---"] * len(HEADS), *rows):
        print(f"| {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(run("studies.held_batch", main))
