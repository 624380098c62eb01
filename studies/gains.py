"""Where adaptive TP pays: nodes and models on which it is held against every static layout, by model.

    python -m studies.gains [--quick] [--jobs N] [--lengths SHAPE] [--rounds N] [--store]

A row is a node of eight GPUs and a model; a column so many responses a round.  Each static layout that fits has the
memory of its own ``--tp``.  Adaptive TP has that of the ``--tp`` it is started with, in every layout: here the one
with which its rounds take least in all.  Rounds are those of :mod:`studies.starts`: replicas have room for so many KV
tokens, what does not fit waits, and ``survival`` chooses where a round starts and when it goes on in another layout.
Prefill is left out, and so are the three kernels a layer more that a merged layout has.

``--store`` writes the figures to ``studies/gains.json``, seconds a round to ``gains.csv``, gains by the ``--tp`` of the
start to ``gains_bases.csv``, those of a second model to ``gains_compared.csv``, and the table into README.md; all pages
quote these.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import re
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import fill

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from profiler import grid
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.registry import make_policy
from sglang_pat.policies.start import RoundKind, StartDegrees
from sglang_pat.predict.cost import build_predictors
from sglang_pat.tools import pictures
from sglang_pat.tools.commands import Parser, UsageError, run
from studies import modelled
from studies.modelled import A3B, A40, H100, L40S, LLAMA, QWEN, QWEN_32B, RANKS, Machine, ModelSize, Roofline
from studies.shapes import Shape, parse_shape
from studies.starts import CORRELATION, GROUP, PROMPT, Node, SimulatedGeneration, make_load, make_snapshot

ROOT = Path(__file__).resolve().parents[1]
STORED, DETAILS = (Path(__file__).with_suffix(suffix) for suffix in (".json", ".csv"))
BASES, COMPARED = (Path(__file__).with_name(f"gains_{name}.csv") for name in ("bases", "compared"))
README = ROOT / "README.md"
MACHINES = {"8×A40, PCIe": A40, "8×L40S, PCIe": L40S, "8×H100, NVLink": H100}
MODELS = {"Llama-3.1-8B": LLAMA, "Qwen3-14B": QWEN, "Qwen2.5-32B": QWEN_32B, "Qwen3-30B-A3B": A3B}
SIZES = (128, 512, 1024)
"""Numbers of responses a round."""
LENGTHS = "lognormal:7.919,0.885,16384"
"""DeepScaleR's lengths, as PAT has them, of at most 16K tokens."""
OTHER_MODEL = {
    "8×A40, PCIe": ((5.3, 10), (5.4, 12), (4.3, 13), (2.4, 7)),
    "8×L40S, PCIe": ((4.4, 12), (6.2, 13), (5.0, 13), (2.1, 7)),
    "8×H100, NVLink": ((2.7, 13), (0.7, 5), (0.2, 3), (1.6, 6)),
}
"""What a second model, written apart from this project, says that the best moments of free switches gain over the best
static layout: percent, mean and most, by model as in :data:`MODELS`.  64 to 1,024 responses of at most 8K, 16K and 32K
tokens, three shapes of lengths."""
DEGREES = (1, 2, 4, 8)
MEMORY_SHARE = 0.85
"""Share of a GPU's memory for weights and KV."""


@dataclass(frozen=True)
class Rounds:
    """Seconds of each round, by responses a round.

    Attributes:
        tp: the degree, or for adaptive TP the one that it was started with (its ``--tp``).
        switches: in all rounds.
    """

    machine: str
    model: str
    tp: int
    adaptive: bool
    size: int
    seconds: list[float]
    switches: int = 0


def keep(times: Roofline) -> Roofline:
    return times


@dataclass(frozen=True)
class GainTask:
    machine: str
    model: str
    tp: int
    adaptive: bool
    size: int
    rounds: int
    lengths: str
    seed: int
    times: Callable[[Roofline], Roofline] = keep
    """What becomes of the modelled step times."""
    seen: Callable[[Roofline], Roofline] | None = None
    """What the policy's profile has of them; None: all of it."""


def count_room(machine: Machine, model: ModelSize, base_tp: int) -> dict[int, int]:
    """KV tokens that a replica has room for, by degree: what the weights of the base layout leave of each GPU."""
    free = MEMORY_SHARE * machine.memory - model.weight_bytes / base_tp
    per_head = model.kv_bytes / model.kv_heads
    return {tp: int(max(free, 0) / (per_head * model.count_kv_heads(tp))) for tp in DEGREES if tp >= base_tp}


def list_degrees(machine: Machine, model: ModelSize, shape: Shape) -> list[int]:
    """Degrees in which a replica has room for the longest response."""
    return [tp for tp in DEGREES if count_room(machine, model, tp)[tp] >= PROMPT + shape.limit]


def make_node(
    machine: Machine,
    model: ModelSize,
    base_tp: int,
    change: Callable[[Roofline], Roofline] = keep,
    seen: Callable[[Roofline], Roofline] | None = None,
) -> Node:
    """A node with the profile that ``profiler.sweep``'s grid gives of the modelled times.

    Args:
        change: what becomes of these times; ``seen``: what becomes of them in the profile, if that is something else.
    """
    plain, room = modelled.make_times(machine, model), count_room(machine, model, base_tp)
    times, axes = change(plain), (grid.BATCHES, grid.CONTEXTS)
    shown = (seen or change)(plain)
    profile = modelled.build(machine, model, base_tp, ("profiler.sweep's grid",), False, shown, axes, room)
    # Prefill is left out of the rounds, so the policy is not to count it.
    predictor, costs = build_predictors(msgspec.structs.replace(profile, prefill=()))
    policy = make_policy("survival", predictor=predictor, costs=costs, max_running=None)
    return Node(model=model, times=times, profile=profile, room=room, costs=costs, policy=policy)


def study(task: GainTask) -> Rounds:
    """All rounds of one layout; the same lengths for all."""
    machine, model, shape = MACHINES[task.machine], MODELS[task.model], parse_shape(task.lengths)
    base_tp = task.tp if task.adaptive else list_degrees(machine, model, shape)[0]
    node = make_node(machine, model, base_tp, task.times, task.seen)
    if not task.adaptive:
        node = replace(node, room=count_room(machine, model, task.tp))
    random, history, starts = np.random.default_rng(task.seed), LengthHistory(), StartDegrees(tuple(node.room))
    measured = Rounds(task.machine, task.model, task.tp, task.adaptive, task.size, [])
    switches = 0
    for _ in range(task.rounds):
        lengths = shape.draw(task.size, CORRELATION, GROUP, random)
        if not task.adaptive:
            course = SimulatedGeneration(node, lengths, shape.limit, task.tp, LengthHistory()).run()
            measured.seconds.append(round(course.seconds, 3))
            continue
        rule = starts.get_start_degree(RoundKind("", task.size))
        coming = make_load(task.size, shape.limit, np.zeros(task.size, dtype=int))
        snapshot = make_snapshot(node, task.tp, task.size, coming=coming, start=rule.tp)
        chosen = node.policy(snapshot, history).tp
        course = SimulatedGeneration(node, lengths, shape.limit, chosen, history, node.policy, rule.tp).run()
        rule.observe(course.retracted, int(lengths.sum()), course.seconds)
        switches += len(course.switches)
        measured.seconds.append(round(course.seconds + node.costs.estimate(task.tp, chosen).seconds, 3))
    return replace(measured, switches=switches)


@dataclass(frozen=True)
class Gain:
    """Seconds a round of a node, a model and a size: by static degree that fits, and adaptive."""

    static: dict[int, float]
    adaptive: float
    spread: tuple[float, float]
    """Least and largest ratio of single rounds: best static layout (of all rounds) over adaptive."""

    @property
    def best(self) -> int:
        return min(self.static, key=lambda tp: self.static[tp])

    @property
    def over_best(self) -> float:
        return self.static[self.best] / self.adaptive

    @property
    def over_worst(self) -> float:
        return max(self.static.values()) / self.adaptive

    @property
    def wrong(self) -> float:
        """What the worst static layout costs against the best one."""
        return max(self.static.values()) / self.static[self.best]


Found = dict[tuple[str, str], tuple[int, dict[int, Gain]]]
"""Base degree (``--tp``) of adaptive TP and gains by size, for each node and model."""


def collect(done: list[Rounds]) -> Found:
    gains_by_case: Found = {}
    for key in dict.fromkeys((each.machine, each.model) for each in done):
        cases = [each for each in done if (each.machine, each.model) == key]
        sizes = sorted({each.size for each in cases})
        bases = sorted({each.tp for each in cases if each.adaptive})
        # Each size counts the same, whatever its rounds take.
        least = {size: min(sum(each.seconds) for each in cases if each.size == size) for size in sizes}
        base = min(
            bases, key=lambda tp: sum(sum(e.seconds) / least[e.size] for e in cases if e.adaptive and e.tp == tp)
        )
        gains = {}
        for size in sizes:
            static = {each.tp: each for each in cases if each.size == size and not each.adaptive}
            (adaptive,) = (each for each in cases if each.size == size and each.adaptive and each.tp == base)
            best = min(static.values(), key=lambda each: sum(each.seconds)).seconds
            each = [one / other for one, other in zip(best, adaptive.seconds, strict=True)]
            means = {tp: float(np.mean(one.seconds)) for tp, one in static.items()}
            gains[size] = Gain(means, float(np.mean(adaptive.seconds)), (min(each), max(each)))
        gains_by_case[key] = base, gains
    return gains_by_case


def plan(lengths: str, rounds: int, sizes: tuple[int, ...], seed: int) -> list[GainTask]:
    tasks, shape = list[GainTask](), parse_shape(lengths)
    for machine, on in MACHINES.items():
        for model, of in MODELS.items():
            degrees = list_degrees(on, of, shape)
            cases = [(tp, False) for tp in degrees] + [(tp, True) for tp in degrees if tp < RANKS]
            tasks += [GainTask(machine, model, *case, size, rounds, lengths, seed) for case in cases for size in sizes]
    return tasks


HEADS = ("node", "model", "`--tp`")


def list_rows(found: Found) -> list[tuple[str, ...]]:
    """README's table: how many times as fast as the best static layout / as the worst that fits."""
    return [
        (*key, str(base), *(f"{gain.over_best:.2f} / {gain.over_worst:.2f}" for gain in gains.values()))
        for key, (base, gains) in found.items()
    ]


def list_details(found: Found) -> list[tuple[str, ...]]:
    """The lines of ``studies/gains.csv``: seconds a round."""
    return [
        (
            *key, str(base), f"{size:,}", *(f"{gain.static[tp]:.1f}" if tp in gain.static else "–" for tp in DEGREES),
            f"{gain.adaptive:.1f}", f"{gain.over_best:.2f} ({pictures.format_span(gain.spread)})",
            f"{gain.over_worst:.2f}", f"{gain.wrong:.2f}",
        )
        for key, (base, gains) in found.items() for size, gain in gains.items()
    ]  # fmt: skip


DETAIL_HEADS = (
    *HEADS, "responses", "static tp1, s", "tp2", "tp4", "tp8", "adaptive, s", "over the best", "over the worst",
    "worst over best static",
)  # fmt: skip


BASES_HEADS = ("node", "model", *(f"from tp{tp}" for tp in DEGREES if tp < RANKS))


def list_bases(done: list[Rounds]) -> list[tuple[str, ...]]:
    """Adaptive TP over the best static layout, mean over the sizes, by the ``--tp`` that it is started with."""
    lines = []
    for machine, model in dict.fromkeys((each.machine, each.model) for each in done):
        cases = [each for each in done if (each.machine, each.model) == (machine, model)]
        best = {size: min(sum(e.seconds) for e in cases if not e.adaptive and e.size == size) for size in SIZES}
        cells = []
        for tp in DEGREES[:-1]:
            ratios = [best[each.size] / sum(each.seconds) for each in cases if each.adaptive and each.tp == tp]
            cells.append(f"{np.mean(ratios):.2f}" if ratios else "–")
        lines.append((machine, model, *cells))
    return lines


COMPARED_HEADS = ("node", "model", "ours: mean, most", "second model, free switches: mean, most")


def list_compared(found: Found) -> list[tuple[str, ...]]:
    """Gains over the best static layout in percent, beside those of the second model."""
    lines = []
    for (machine, model), (_, sizes) in found.items():
        ours = [100 * (gain.over_best - 1) for gain in sizes.values()]
        mean, most = OTHER_MODEL[machine][list(MODELS).index(model)]
        lines.append((machine, model, f"{np.mean(ours):.1f}, {max(ours):.1f}%", f"{mean}, {most}%"))
    return lines


def format_markdown(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def format_csv(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows((heads, *rows))
    return text.getvalue()


def format_sizes(found: Found) -> tuple[str, ...]:
    _, gains = next(iter(found.values()))
    return tuple(f"{size:,} responses" for size in gains)


def format_message(done: list[Rounds]) -> str:
    """What README says above its table, computed from what is in it."""
    gains_by_case = collect(done)
    gains = [(machine, gain) for (machine, _), (_, sizes) in gains_by_case.items() for gain in sizes.values()]
    wrong = pictures.format_span((gain.wrong for _, gain in gains), ".1f")
    best = {
        kind: [round(100 * (gain.over_best - 1), 3) for machine, gain in gains if machine.endswith(kind)]
        for kind in ("PCIe", "NVLink")
    }
    lines = [f"- **Choosing the wrong static layout makes rounds take {wrong} times as long.**"]
    lines += [
        f"- **With {kind}** adaptive TP is {np.mean(shares):.1f}% faster than the best static layout on average; at "
        f"worst {round(min(shares)) + 0}%, at best {round(max(shares))}%."
        for kind, shares in best.items()
    ]
    least = min(cell for _, _, *cells in list_bases(done) for cell in cells if cell != "–")
    lines.append(
        "- **Start with a `--tp` whose weights leave room for KV.** From a lower one adaptive TP cannot repair that, "
        f"and may reach only {least} of the best static layout's speed."
    )
    return "".join(fill(line, 100, subsequent_indent="  ") + "\n" for line in lines)


def format_stored(done: list[Rounds]) -> str:
    """JSON, a line each."""
    return "[\n" + ",\n".join(json.dumps(asdict(each), ensure_ascii=False) for each in done) + "\n]\n"


def list_stored() -> list[Rounds]:
    return [Rounds(**each) for each in json.loads(STORED.read_text())]


def read_stored() -> Found:
    return collect(list_stored())


def replace_between(page: Path, mark: str, text: str) -> None:
    """Put a table between ``<!-- MARK:begin -->`` and ``<!-- MARK:end -->``."""
    pattern = rf"(<!-- {mark}:begin -->\n).*?(<!-- {mark}:end -->)"
    whole, count = re.subn(pattern, lambda found: found[1] + text + found[2], page.read_text(), flags=re.DOTALL)
    if count != 1:
        raise UsageError(f"{page}: must have <!-- {mark}:begin --> and <!-- {mark}:end --> once")
    page.write_text(whole)


def main(argv: list[str] | None = None) -> int:
    text = "Where adaptive TP pays: nodes, models, responses a round (modelled)."
    parser = Parser(prog="python -m studies.gains", description=text)
    parser.add_argument("--quick", action="store_true", help="128 responses, one round")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one a core)")
    text = "of responses, as in studies.compare (default: %(default)s)"
    parser.add_argument("--lengths", metavar="SHAPE", default=LENGTHS, help=text)
    parser.add_argument("--rounds", type=int, default=3, help="of each setting (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths (default 0)")
    parser.add_argument(
        "--store", action="store_true", help=f"write {STORED.name}, {DETAILS.name} and the tables of the pages"
    )
    args: argparse.Namespace = parser.parse_args(argv)
    if args.rounds < 1:
        raise UsageError(f"--rounds {args.rounds}: must be at least 1")
    if args.store and (args.quick or args.lengths != LENGTHS):
        raise UsageError("--store: not with --quick or --lengths; pages have the whole table with its own lengths")
    try:
        tasks = plan(args.lengths, 1 if args.quick else args.rounds, SIZES[:1] if args.quick else SIZES, args.seed)
    except ValueError as error:
        raise UsageError(str(error)) from None
    with ProcessPoolExecutor(args.jobs) as pool:
        done = list(track(pool.map(study, tasks), "layouts", len(tasks), console=Console(stderr=True)))
    gains = collect(done)
    table = Table(title="Seconds a round (modelled)", title_justify="left")
    for head in DETAIL_HEADS:
        table.add_column(head, justify="right")
    for row in list_details(gains):
        table.add_row(*row)
    Console(highlight=False, width=200).print(table)
    if args.store:
        STORED.write_text(format_stored(done))
        store_tables(done)
    return 0


def store_tables(done: list[Rounds]) -> None:
    found = collect(done)
    BASES.write_text(format_csv(BASES_HEADS, list_bases(done)))
    replace_between(README, "gains:text", format_message(done))
    replace_between(README, "gains", format_markdown((*HEADS, *format_sizes(found)), list_rows(found)))
    COMPARED.write_text(format_csv(COMPARED_HEADS, list_compared(found)))
    DETAILS.write_text(format_csv(DETAIL_HEADS, list_details(found)))


if __name__ == "__main__":
    sys.exit(run("studies.gains", main))
