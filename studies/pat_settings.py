"""PAT's own settings, replayed: 128 DeepScaleR responses on 8×A40 and 8×H100, with PAT's policy and switch costs.

    python -m studies.pat_settings [--quick]

A batch is handed over as a whole there, so that all policies know it to be complete.  The second table has PAT's own
metric: tokens a second of a training step, whose other parts take what PAT's figures leave for them.  The tokens of a
step follow from them, too, and are fewer than those of the modelled lengths; so it has a line with as many.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.predict.profile import load
from sglang_pat.tools.commands import Parser, run
from studies import PROFILES, modelled
from studies.compare import ProfiledMachine, Workload
from studies.shapes import Shape, parse_shape
from studies.simulate import Batch

CAPS = {
    "8xA40-llama3.1-8b": (6144, 8192, 12288, 16384),
    "8xH100-llama3.1-8b": (6144, 8192, 12288, 16384, 24576),
    "8xH100-qwen3-14b": (6144, 8192, 12288, 16384),
}
PUBLISHED = {
    ("8xH100-llama3.1-8b", 24576): "134.3 → 87.9 s (-34.6%)",
    ("8xH100-qwen3-14b", 16384): "133.9 → 91.1 s (-32.0%)",
    ("8xA40-llama3.1-8b", 6144): "step 1.05×",
    ("8xA40-llama3.1-8b", 16384): "step 1.27×",
}
"""Figures of PAT sections 5.2 and 5.3.  For 8×A40 only the throughput of whole steps is given, for 6K to 16K 1.05 to
1.27."""


MU, SIGMA, BATCH, CORRELATION = 7.919, 0.885, 128, 0.5
"""Parameters of the lengths, with PAT's shares of Llama's responses over 8K and 16K tokens.  Qwen's have no published
ones; Llama's are taken."""


@dataclass(frozen=True)
class Throughput:
    """What PAT reports of training steps, static and with its switches.

    Attributes:
        generation: seconds of a step.
        rate: tokens a second of a step.
        step: seconds, where given; else they follow from the other two, if the rest of a step is the same in both.
    """

    generation: tuple[float, float]
    rate: tuple[float, float]
    step: tuple[float, float] | None = None

    @property
    def tokens(self) -> float:
        """Tokens of a step."""
        if self.step is not None:
            return float(np.mean(np.multiply(self.step, self.rate)))
        return (self.generation[0] - self.generation[1]) / (1 / self.rate[0] - 1 / self.rate[1])

    @property
    def rest(self) -> float:
        """Seconds of a step that are not generation."""
        return float(
            np.mean([self.tokens / rate - seconds for rate, seconds in zip(self.rate, self.generation, strict=True)])
        )


REPORTED = {
    ("8xH100-llama3.1-8b", 24576): Throughput((134.3, 87.9), (2570.6, 3510.9), (172.5, 125.6)),
    ("8xH100-qwen3-14b", 16384): Throughput((133.9, 91.1), (1780.0, 2292.6)),
}
"""PAT sections 5.2 and 5.3."""


def list_settings(rounds: int) -> list[dict]:
    """One row a profile and cap: mean seconds of every policy over rounds that reach the cap (PAT reports those).

    Without prefill: PAT says that decoding takes over 90% of generation.
    """
    rows = []
    for name, caps in CAPS.items():
        if not (PROFILES / f"{name}-pat-costs.json").exists():
            continue
        theirs, ours = (_from_tp2(PROFILES / f"{name}{costs}.json") for costs in ("-pat-costs", ""))
        for cap in caps:
            rows.append({"profile": name, "cap": cap, "published": PUBLISHED.get((name, cap), "")} |
                        _seconds(theirs, ours, cap, rounds))  # fmt: skip
    return rows


def _from_tp2(path: Path) -> ProfiledMachine:
    """The profile with PAT's start: TP2."""
    profile = load(path, complete=True)
    degrees = tuple(tp for tp in profile.fingerprint.degrees if tp >= 2)
    fingerprint = msgspec.structs.replace(profile.fingerprint, base_tp=2, degrees=degrees)
    return ProfiledMachine(msgspec.structs.replace(profile, fingerprint=fingerprint))


def draw_batches(shape: Shape, rounds: int) -> list[Batch]:
    """Batches that reach the cap."""
    workload = Workload(shape=shape, batch=BATCH, rounds=150 * rounds, correlation=CORRELATION)
    return [batch for batch in workload.make_batches() if batch.length.max() == shape.limit][:rounds]


def fit_mu(cap: int, tokens: float, rounds: int) -> float:
    """The ``mu`` with which the batches that are drawn have so many tokens in the mean."""
    low, high = MU - 1, MU
    for _ in range(12):
        middle = (low + high) / 2
        batches = draw_batches(parse_shape(f"lognormal:{middle},{SIGMA},{cap}"), rounds)
        low, high = (middle, high) if np.mean([batch.length.sum() for batch in batches]) < tokens else (low, middle)
    return (low + high) / 2


def _seconds(theirs: ProfiledMachine, ours: ProfiledMachine, cap: int, rounds: int, mu: float = MU) -> dict[str, float]:
    reached = draw_batches(parse_shape(f"lognormal:{mu},{SIGMA},{cap}"), rounds)
    times: dict[str, list[float]] = {"tokens": [float(batch.length.sum()) for batch in reached]}
    histories = {"survival, PAT's costs": LengthHistory(), "survival, our costs": LengthHistory()}
    for batch in reached:
        for costs, on in (("PAT's", theirs), ("our", ours)):
            drain = on.drain(batch)
            runs = {
                "pat": drain.run_policy(on.make_policy("pat"), LengthHistory(), complete=True),
                "survival": drain.run_policy(
                    on.make_policy("survival"), histories[f"survival, {costs} costs"], complete=True
                ),
            }
            for name, policy_run in runs.items():
                times.setdefault(f"{name}, {costs} costs", []).append(policy_run.seconds)
        for tp in drain.degrees:
            times.setdefault(f"static TP{tp}", []).append(drain.run_static(tp).seconds)
    return {name: float(np.mean(seconds)) for name, seconds in times.items()}


def format_table(rows: list[dict]) -> Table:
    """Seconds of generation, and gains over static TP2 and over the best static layout."""
    result = Table(
        title="PAT's settings: batch 128, DeepScaleR, base TP2; seconds of decoding (gain over TP2 / best static)"
    )
    for head in ("profile", "cap", "TP2", "TP4", "TP8", "pat, its costs", "pat, our costs", "survival, its costs",
                 "survival, our costs", "published"):  # fmt: skip
        result.add_column(head, justify="left" if head in ("profile", "published") else "right")
    for row in rows:
        statics = [row[f"static TP{tp}"] for tp in (2, 4, 8)]
        cells = [
            f"{row[key]:.1f} ({row[key] / statics[0] - 1:+.0%} / {row[key] / min(statics) - 1:+.1%})"
            for key in ("pat, PAT's costs", "pat, our costs", "survival, PAT's costs", "survival, our costs")
        ]
        result.add_row(
            row["profile"], f"{row['cap'] // 1024}K", *(f"{s:.1f}" for s in statics), *cells, row["published"]
        )
    return result


def list_throughputs(rounds: int) -> list[dict]:
    """One row a setting with published throughput and kind of lengths: as PAT's shares have them, and shifted to its
    tokens."""
    rows = []
    for (name, cap), reported in REPORTED.items():
        theirs, ours = (_from_tp2(PROFILES / f"{name}{costs}.json") for costs in ("-pat-costs", ""))
        for lengths, mu in (("PAT's shares", MU), ("PAT's tokens", fit_mu(cap, reported.tokens, rounds))):
            rows.append({"profile": name, "cap": cap, "lengths": lengths, "mu": mu} |
                        _seconds(theirs, ours, cap, rounds, mu))  # fmt: skip
    return rows


def fit_layer_seconds() -> dict[str, float]:
    """The fixed time of a layer on the H100, the one number that is fitted, by the lengths that PAT's run had."""
    _, cap, _ = modelled.H100_GENERATION
    lengths = modelled.make_deepscaler_lengths(cap)
    tokens = REPORTED["8xH100-llama3.1-8b", cap].tokens
    fewer = np.sort(lengths * tokens / lengths.sum()).astype(int)
    fewer[-1] = cap  # the longest decides
    fits = {"PAT's shares": lengths, "PAT's tokens": fewer}
    return {name: modelled.fit_h100(modelled.LLAMA, each).layer_seconds for name, each in fits.items()}


THROUGHPUT_HEADS = (
    "setting", "lengths", "tokens a step", "PAT's", "rest, s", "TP2, tokens/s", "best static", "`pat`, its costs",
    "over TP2", "`survival`, our costs", "PAT reports",
)  # fmt: skip


def list_throughput_rows(rows: list[dict]) -> list[tuple[str, ...]]:
    """Tokens a second of a step: those of the batch over its generation and the rest of a step."""
    lines = []
    for row in rows:
        reported = REPORTED[row["profile"], row["cap"]]

        def rate(*ways: str, row: dict = row, rest: float = reported.rest) -> float:
            return row["tokens"] / (min(row[way] for way in ways) + rest)

        statics = [key for key in row if key.startswith("static")]
        static, pat = rate("static TP2"), rate("pat, PAT's costs")
        lines.append((
            f"{row['profile']}, {row['cap'] // 1024}K", row["lengths"], f"{row['tokens']:,.0f}",
            f"{reported.tokens:,.0f}", f"{reported.rest:.1f}", f"{static:.0f}", f"{rate(*statics):.0f}", f"{pat:.0f}",
            f"{pat / static:.2f}", f"{rate('survival, our costs'):.0f}",
            f"{reported.rate[0]} → {reported.rate[1]} ({reported.rate[1] / reported.rate[0]:.2f})",
        ))  # fmt: skip
    return lines


def format_throughputs(rows: list[dict]) -> Table:
    table = Table(title="PAT's metric: tokens a second of a step (simulated)", title_justify="left")
    for head in THROUGHPUT_HEADS:
        table.add_column(head, justify="right")
    for line in list_throughput_rows(rows):
        table.add_row(*line)
    return table


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m studies.pat_settings", description="PAT's own settings, replayed (simulated).")
    parser.add_argument("--quick", action="store_true", help="few rounds")
    args: argparse.Namespace = parser.parse_args(argv)
    rounds = 2 if args.quick else 8
    console = Console(highlight=False, width=190)
    console.print(format_table(list_settings(rounds)))
    console.print(format_throughputs(list_throughputs(rounds)))
    fits = ", ".join(f"{1e6 * seconds:.1f} µs with {lengths}" for lengths, seconds in fit_layer_seconds().items())
    console.print(f"Fixed time of a layer on the H100, fitted to PAT's 134.3 s: {fits}")
    return 0


if __name__ == "__main__":
    sys.exit(run("studies.pat_settings", main))
