"""A step of verl with this engine and with stock SGLang in both static layouts, jobs taking turns.

    .venv-integration/bin/python bench/frameworks.py [--quick] [--repeats N] [--steps N] [--json FILE]

Each job is ``examples/verl_grpo/run_cpu.py`` with GRPO on two ranks; responses end by themselves (``--response`` at
most), so that most end early and a few are long.  They are sampled, so no two jobs do the same work: compare the time
of a generation with the tokens of its longest response.  The first step of a job does not count: everything is new.
Needs the environment of ``make test-integration``.  ``--quick`` takes eight minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

import _bench
import _verl_jobs
from rich.console import Console
from rich.table import Table

from sglang_pat.testing import models

ROOT = Path(__file__).resolve().parents[1]
MODEL = Path(".cache/models/llama-natural")
"""A small Llama whose probabilities are far from 0 and 1."""
CONTENDERS = {
    "stock sglang, tp1×2": ("--rollout", "sglang", "--tp", "1"),
    "stock sglang, tp2×1": ("--rollout", "sglang", "--tp", "2"),
    "sglang_pat": ("--rollout", "sglang_pat"),
}
SECONDS = {"step": "step", "generation": "gen", "weight sync": "update_weights", "training": "update_actor"}
"""Parts of a step, and what verl calls them."""


@dataclass
class ContenderFigures:
    """Figures of one contender, a value for each step that counts."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in SECONDS})
    longest: list[float] = field(default_factory=list)
    mean: list[float] = field(default_factory=list)
    switches: int = 0

    def add(self, folder: Path) -> None:
        """Add what a job left in its folder."""
        steps = [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for step in steps[1:]:
            for part, name in SECONDS.items():
                self.seconds[part].append(step[f"timing_s/{name}"])
            self.longest.append(step["response_length/max"])
            self.mean.append(step["response_length/mean"])
        for log in folder.glob("decisions.*.jsonl"):
            events = map(json.loads, log.read_text().splitlines())
            self.switches += sum(e["decision"]["tp"] != e["snapshot"]["tp"] for e in events if "decision" in e)


def run(name: str, args: argparse.Namespace, folder: Path) -> None:
    """Run one job; raises ``SystemExit`` with the end of its output if it fails."""
    command = [
        sys.executable, str(ROOT / "examples" / "verl_grpo" / "run_cpu.py"), *CONTENDERS[name],
        "--model", str(MODEL), "--out", str(folder), "--steps", str(args.steps), "--batch", str(args.batch),
        "--samples", str(args.samples), "--response", str(args.response), "--lr", "1e-6",
    ]  # fmt: skip
    if name == "sglang_pat":
        command += ["--settings", f"{{base_tp:1,policy:threshold,switch_at:{args.switch_at}}}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")


def show(figures: dict[str, ContenderFigures]) -> None:
    table = Table(title="verl, seconds of a step (medians)")
    table.add_column("rollout")
    for column in (*SECONDS, "mean tokens", "longest", "ms a token of the longest", "switches"):
        table.add_column(column, justify="right")
    for name, contender in figures.items():
        row = [f"{statistics.median(contender.seconds[part]):.2f}" for part in SECONDS]
        lengths = [f"{statistics.median(values):.0f}" for values in (contender.mean, contender.longest)]
        pace = [1000 * s / n for s, n in zip(contender.seconds["generation"], contender.longest, strict=True)]
        table.add_row(name, *row, *lengths, f"{statistics.median(pace):.1f}", str(contender.switches))
    Console(width=120).print(table)


def main() -> int:
    parser = _bench.options(__doc__, "each job once, three steps")
    parser.add_argument("--repeats", type=int, default=3, help="jobs of each kind")
    parser.add_argument("--steps", type=int, default=5, help="of a job; the first does not count")
    parser.add_argument("--batch", type=int, default=8, help="prompts a step")
    parser.add_argument("--samples", type=int, default=4, help="responses a prompt")
    parser.add_argument("--response", type=int, default=768, help="tokens of a response at most")
    parser.add_argument("--switch-at", type=int, default=4, help="requests left when the adaptive engine merges")
    args = parser.parse_args()
    _verl_jobs.need_verl()
    if args.quick:
        args.repeats, args.steps = 1, 3
    machine = _bench.about()
    models.make_random("llama", MODEL, heads=4, kv_heads=2, logit_std=1)
    figures = {name: ContenderFigures() for name in CONTENDERS}
    names = list(CONTENDERS)
    for number in range(args.repeats):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            with tempfile.TemporaryDirectory(prefix="pat_frameworks_") as folder:
                run(name, args, Path(folder))
                figures[name].add(Path(folder))
            print(f"job {number + 1}/{args.repeats}, {name}: {figures[name].seconds['step'][-1]:.2f} s a step")
    show(figures)
    all_figures = {name: asdict(one) for name, one in figures.items()}
    _bench.write(
        args.json, machine=machine, settings={n: v for n, v in vars(args).items() if n != "json"}, figures=all_figures
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
