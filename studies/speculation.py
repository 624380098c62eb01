"""What lossless speculation would gain over a round, without switches and with them (modelled).

    python -m studies.speculation [--quick] [--jobs N] [--rounds N] [--json FILE]

Rounds, nodes and models are those of :mod:`studies.gains`.  A step that checks ``k`` drafted tokens of each request is
a step of ``k + 1`` times the rows: of the products, the all-reduces and the experts that any row chooses.  It gives as
many tokens as were accepted, and one more.  ``k`` is the best one for each degree, batch and context, 0 among them, and
the policy sees the times that come of it.  The best ``k`` is known, and acceptance is the same at each position.

What a policy loses that knows nothing of drafts is in the ways ``blind``.

Each drafter has two bounds.  **Low**: each row reads the KV of its request by itself, the step takes 1 ms more on the
host, and a trained drafter takes twice as long as reading it takes.  **High**: rows of a request read its KV once, the
host adds 0.2 ms, and a trained drafter takes as long as reading it.  Each rank has the whole of it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from sglang_pat.tools.commands import Parser, run
from studies import gains
from studies.modelled import ELEMENT, ModelSize, Number, Roofline

SIZES = (128, 512)
"""Numbers of responses a round."""
DRAFTERS: dict[str, dict[int, float]] = {
    "itself": {2: 1.57, 4: 1.71, 8: 1.77},
    "one sibling": {2: 1.67, 4: 1.86, 8: 1.95},
    "trained": {4: 3.0},
}
"""Tokens a step by drafted tokens: measured on reasoning traces, with drafts from the response itself, and from a
response of another model as well; assumed of a drafter that was trained (docs/results/speculation.md)."""
BOUNDS = {"low": (1.0, 0.001, 2.0), "high": (0.0, 0.0002, 1.0)}
"""Share of a request's KV that each further row reads again; seconds that drafts, their sampling and a loop without
overlap add to a step; time of a trained drafter's draft over that of reading it."""
HEAD_VOCABULARY = 32000
"""Tokens that a trained drafter may draft, as of the published ones."""


def count_head_bytes(model: ModelSize) -> int:
    """Bytes of an EAGLE-3 head of ``model`` that a draft reads: a layer whose attention has two inputs, and the output
    embedding.  Of a mixture the published one has an MLP three times as wide as the model."""
    attention = model.hidden * model.head_dim * (3 * model.heads + 4 * model.kv_heads)
    mlp = 3 * model.hidden * (model.intermediate or 3 * model.hidden)
    return ELEMENT * (attention + mlp + HEAD_VOCABULARY * model.hidden)


@dataclass(frozen=True, kw_only=True)
class SpeculatingTimes(Roofline):
    """Seconds a token of each request, where steps check as many drafted tokens as pays.

    Attributes:
        gained: tokens a step by drafted tokens.
        again: share of a request's KV that each further row reads again.
        host_seconds: what a step that checks takes more.
        draft_seconds: what each drafted token of all requests takes.
    """

    gained: Mapping[int, float] = field(default_factory=dict)
    again: float = 0.0
    host_seconds: float = 0.0
    draft_seconds: float = 0.0

    def step_seconds(self, tp: int, batch: Number, tokens: Number) -> Number:
        seconds = super().step_seconds(tp, batch, tokens)
        for k, gained in self.gained.items():
            checking = super().step_seconds(tp, batch * (k + 1), tokens * (1 + k * self.again))
            drafting = self.host_seconds + k * self.draft_seconds
            seconds = np.minimum(seconds, (checking + drafting) / gained)
        return seconds


@dataclass(frozen=True)
class Speculate:
    """Makes the times of a node those with a drafter, at one of :data:`BOUNDS`."""

    drafter: str
    bound: str

    def __call__(self, times: Roofline) -> Roofline:
        again, host, over_reading = BOUNDS[self.bound]
        reading = count_head_bytes(times.model) / times.read_rate if self.drafter == "trained" else 0.0
        return SpeculatingTimes(
            **vars(times), gained=DRAFTERS[self.drafter], again=again, host_seconds=host,
            draft_seconds=over_reading * reading,
        )  # fmt: skip


Times = Callable[[Roofline], Roofline]
BLIND = [("one sibling", "high"), ("trained", "high")]
"""Drafters and bounds that are also tried with a policy to which steps are plain."""


def list_ways() -> dict[str, tuple[Times, Times | None]]:
    """What becomes of the step times, and of those that the policy knows if they are others, by way to generate."""
    return (
        {"plain": (gains.keep, None)}
        | {f"{name}, {bound}": (Speculate(name, bound), None) for name in DRAFTERS for bound in BOUNDS}
        | {f"{name}, {bound}, blind": (Speculate(name, bound), gains.keep) for name, bound in BLIND}
    )


def list_rows(found: Mapping[str, gains.Found]) -> list[tuple[str, ...]]:
    """Table: a row for each node, model and size; how many times as fast as the best static layout without speculation
    each way is without switches, and with them."""
    rows = []
    for key, (_, plain) in found["plain"].items():
        for size, gain in plain.items():
            best = gain.static[gain.best]
            cells = [f"{best:.1f} s (tp{gain.best})", f"{best / gain.adaptive:.2f}"]
            for name in list(found)[1:]:
                other = found[name][key][1][size]
                cells.append(f"{best / other.static[other.best]:.2f} (tp{other.best}) / {best / other.adaptive:.2f}")
            rows.append((*key, f"{size:,}", *cells))
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m studies.speculation", description="What speculation gains over a round (modelled).")
    parser.add_argument("--quick", action="store_true", help="128 responses, one round")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one a core)")
    parser.add_argument("--rounds", type=int, default=2, help="of each setting (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the table")
    args = parser.parse_args(argv)
    sizes, rounds = (SIZES[:1], 1) if args.quick else (SIZES, args.rounds)
    tasks, ways = gains.plan(gains.LENGTHS, rounds, sizes, seed=0), list_ways()
    of_way = [(name, replace(task, times=way, seen=seen)) for name, (way, seen) in ways.items() for task in tasks]
    with ProcessPoolExecutor(args.jobs) as pool:
        results = pool.map(gains.study, [task for _, task in of_way])
        done = list(track(results, "layouts", len(of_way), console=Console(stderr=True)))
    found = {
        name: gains.collect([one for (way, _), one in zip(of_way, done, strict=True) if way == name]) for name in ways
    }
    heads = ("node", "model", "responses", "best static, s", "switches", *list(ways)[1:])
    table = Table(*heads, title="Times the speed of the best static layout: without switches / with them (modelled)")
    rows = list_rows(found)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, width=220).print(table)
    if args.json:
        args.json.write_text(json.dumps([dict(zip(heads, row, strict=True)) for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(run("studies.speculation", main))
