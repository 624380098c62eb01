"""A step of verl by stage, with one technique after the other (RollPacker's Table 2), on this machine.

    .venv-integration/bin/python bench/rl_step.py [--quick] [--repeats N] [--steps N] [--ways W …] [--png FILE]

Two ranks of a trainer and two of an engine share two cores.  Lengths of responses and programs in their place are drawn
once, with a long tail and some that never end.  Jobs take turns.  The first step of a job does not count: everything is
new.  With five that do, tail batching makes four short rounds and a long one.  Needs the environment of ``make
test-integration``.  ``python -m studies.rl_step`` simulates the paper's settings.

Rows are cumulative.  Trainer and engine share their ranks:

- ``plain``: verl's sync trainer, its own reward manager, one layout; a program has one limit;
- ``tail batching``: ``strict``, η = 1.25 for prompts;
- ``rewards``: our reward manager, whose limits are learnt;
- ``adaptive TP``: the layout changes in the round, and a round starts where it is best (``survival``);
- ``stream``: trains on complete groups while rewards are computed, and on a lent rank while others are generated.

Other rows.  With all of it, where trainer and engine have ranks of their own:

- ``apart``: trains when the batch is there;
- ``apart, streamed``: trains on groups while others are generated.

Without tail batching, where they share them:

- ``together``: trains when the batch is there;
- ``lent at a milestone``: a rank is lent by the paper's rule;
- ``lent``: when the engine says so.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

import _bench
import _verl_jobs
import rollout
from _programs import MAXIMUM, MINIMUM, make_ground_truth
from _verl_jobs import APART, ROOT, Steps
from matplotlib.patches import Patch

from sglang_pat.demo.cases import NATURAL, DemoCase
from sglang_pat.testing import models
from sglang_pat.tools import console, pictures
from sglang_pat.tools.console import Speaker

sys.path += [str(ROOT), str(ROOT / "examples"), str(ROOT / "examples" / "verl_grpo")]
import run_cpu
from on_cpu import cpu_jobs

MODEL = Path(".cache/models/llama-step")
SHAPE = dict(layers=2, hidden=256, intermediate=1536, heads=4, kv_heads=2, logit_std=1)
"""Shape of the model, so large that training takes about as much of a step as in the paper. tp2 is hardly faster than
tp1."""
STAGES = {
    "rollout, s": "step/generation", "reward, s": "step/reward", "training, s": "step/training",
    "weights, s": "timing_s/update_weights", "step, s": "timing_s/step", "hidden, s": "step/hidden",
    "tokens": "response_length/mean", "switches": "rollout/switches",
}  # fmt: skip
"""Columns, and what verl calls them: means of a step."""
FIXED = "{base_tp:1,policy:off}"
WORKERS = "reward.num_workers=8"
"""verl's default; the example for a CPU has one."""
ETA = 1.25
OTHERS = ("apart", "apart, streamed", "together", "lent at a milestone", "lent")
"""Rows that are not drawn."""


def list_ways(profile: Path) -> dict[str, tuple[str, ...]]:
    """What each way adds to a job's arguments."""
    tail = ("trainer.v1.trainer_mode=sglang_pat_sync", *_batch_tail("sglang_pat_sync"))
    fixed = ("--settings", FIXED)
    adaptive = ("--settings", f"{{base_tp:1,policy:survival,profile:{profile.resolve()}}}")
    one_limit = (
        "reward.custom_reward_function.path=pkg://_step_job", "reward.custom_reward_function.name=score_with_one_limit"
    )  # fmt: skip
    limits = (
        "reward.custom_reward_function.path=null", "reward.reward_manager.name=sglang_pat",
        f"+reward.sglang_pat={{processes:6,time_limits:{{minimum:{MINIMUM},maximum:{MAXIMUM}}}}}",
    )  # fmt: skip
    apart = (*adaptive, *_batch_tail("sglang_pat_stream"), *limits, *APART, "ray_kwargs.ray_init.num_gpus=4")
    lent = (*adaptive, *limits, "actor_rollout_ref.actor.fsdp_config.fsdp_size=1")
    return {
        "plain": (*fixed, "trainer.v1.trainer_mode=sglang_pat_sync", *one_limit),
        "tail batching": (*fixed, *tail, *one_limit),
        "rewards": (*fixed, *tail, *limits),
        "adaptive TP": (*adaptive, *tail, *limits),
        "stream": (*lent, "trainer.v1.trainer_mode=sglang_pat_stream_lent", *_batch_tail("sglang_pat_stream_lent")),
        "apart": (*apart, "trainer.v1.trainer_mode=fetch_whole"),
        "apart, streamed": (*apart, "trainer.v1.trainer_mode=sglang_pat_stream"),
        "together": (*lent, "trainer.v1.trainer_mode=lent_never"),
        "lent at a milestone": (*lent, "trainer.v1.trainer_mode=lent_at_milestone"),
        "lent": (*lent, "trainer.v1.trainer_mode=sglang_pat_stream_lent"),
    }


def _batch_tail(mode: str) -> tuple[str, ...]:
    where = f"+trainer.v1.{mode}"
    return f"{where}.tail_batching=strict", f"{where}.eta_prompts={ETA}"


def write_prompts(file: Path, count: int) -> None:
    """Write prompts as verl reads them, with the test cases of programs."""
    import pandas

    rows = run_cpu.rows(cpu_jobs.prompts(count, chat=False))
    programs = {"data_source": "taco"}
    for prompt, row in enumerate(rows):
        row |= programs | {"reward_model": {"style": "rule", "ground_truth": make_ground_truth(prompt)}}
    pandas.DataFrame(rows).to_parquet(file)


def compare(found: dict[str, list[Steps]], others: dict[str, str]) -> dict[str, list[float]]:
    """How many times as fast as another way each is, turn by turn: in all steps of a job, since tail batching has the
    long responses of a step in another one."""
    seconds = {way: [sum(step["timing_s/step"] for step in steps) for steps in jobs] for way, jobs in found.items()}
    return {
        way: [one / own for one, own in zip(seconds[others[way]], jobs, strict=True)] for way, jobs in seconds.items()
    }


def list_rows(found: dict[str, list[Steps]]) -> list[tuple[str, ...]]:
    """The cells of the page's table, a line each."""
    ways = list(found)
    whole, alone = (
        compare(found, dict.fromkeys(ways, ways[0])),
        compare(found, dict(zip(ways, [ways[0], *ways[:-1]], strict=True))),
    )
    lines = []
    for way, jobs in found.items():
        steps = [step for job in jobs for step in job]
        cells = [f"{mean(step.get(name, 0.0) for step in steps):.1f}" for name in STAGES.values()]
        lines.append((way, *cells, _format(whole[way]), _format(alone[way])))
    return lines


def _format(values: list[float]) -> str:
    span = f" ({min(values):.2f}–{max(values):.2f})" if len(values) > 1 else ""
    return f"{mean(values):.2f}{span}"


BARS = {"rollout, s": ("rollout", pictures.BLUE), "reward, s": ("waiting for rewards", pictures.ORANGE),
        "training, s": ("training", pictures.OURS), "rest, s": ("weights, and the rest", pictures.FAINT)}  # fmt: skip
"""Columns of the table, and what they leave of a step: name and colour."""


def draw(rows: Sequence[Mapping[str, str]], path: Path) -> Path:
    """A bar a row, as long as the step; both panels have one scale.  Args: ``rows``: of the table, by its heads."""
    numbers = {
        row["with"]: {head: float(cell.partition(" ")[0]) for head, cell in row.items() if head != "with"}
        for row in rows
        if row["with"] not in OTHERS
    }
    ways = list(numbers)
    figure, (axes,) = pictures.make_panels(1, width=8.0, height=2.6, columns=1)
    for place, way in enumerate(ways):
        row, left = numbers[way], 0.0
        row["rest, s"] = max(0.0, row["step, s"] - sum(row[head] for head in BARS if head in row))
        for head, (_, color) in BARS.items():
            axes.barh(place, row[head], left=left, color=color, height=0.72)
            left += row[head]
        axes.text(left, place, f" {row['step, s']:.1f} s", va="center", fontsize=10, color=pictures.LINE)
    axes.set_yticks(range(len(ways)), [f"+ {way}" if place else way for place, way in enumerate(ways)], fontsize=10)
    axes.set_ylim(len(ways) - 0.5, -0.5)
    axes.set_xlim(0, 1.1 * max(row["step, s"] for row in numbers.values()))
    axes.grid(axis="y", visible=False)
    pictures.set_labels(axes, "seconds of a step", "")
    handles = [Patch(color=color, label=name) for name, color in BARS.values()]
    figure.legend(handles=handles, fontsize=10, frameon=False, loc="outside lower left", ncols=4)
    faster = numbers[ways[-1]]["times as fast"]
    pictures.set_figure_title(figure, f"On two CPU cores a step of verl is {faster:.2f} times as fast with all of it")
    return pictures.save(figure, path)


HEADS = ("with", *STAGES, "times as fast", "as the row above")


def show(found: dict[str, list[Steps]]) -> None:
    """Print the table as the page has it: means over steps; of the last columns the mean over turns, the least and the
    most."""
    for cells in (HEADS, ["---"] * len(HEADS), *list_rows(found)):
        print(f"| {' | '.join(cells)} |")


def main() -> int:
    parser = _bench.options(__doc__ or "", "a job of each way, one small step that counts")
    _verl_jobs.add_options(parser, repeats=3, steps=6, batch=16, samples=4, response=1024)
    every = list(list_ways(Path()))
    parser.add_argument(
        "--ways", nargs="+", choices=every, default=every, metavar="W",
        help=f"these only; the first is what others are compared with: {'; '.join(every)}",
    )  # fmt: skip
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw the stages here")
    args = parser.parse_args()
    if args.png and not set(every) - set(OTHERS) <= set(args.ways):
        parser.error(f"--png draws all ways but {'; '.join(OTHERS)}: leave --ways out, or give them all")
    _verl_jobs.need_verl()
    if args.quick:
        args.repeats, args.steps, args.batch, args.response = 1, 2, 8, 256
    models.make_random("llama", MODEL, **SHAPE)
    speaker = Speaker(console.make())
    profile = rollout.sweep(
        DemoCase("llama-step", NATURAL, rollout.LOGNORMAL), MODEL, "20s" if args.quick else "1m", speaker
    )
    settings = {name: value for name, value in vars(args).items() if name not in ("json", "png")}
    machine = _bench.about(**settings)
    arguments = list_ways(profile)
    ways = {way: arguments[way] for way in args.ways}
    steps_by_way: dict[str, list[Steps]] = {way: [] for way in ways}
    loads: dict[str, list[float]] = {way: [] for way in ways}
    first = dict.fromkeys(ways, next(iter(ways)))
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.parquet"
        write_prompts(prompts, round(ETA * args.batch * args.steps))
        for turn in range(args.repeats):
            for way, more in ways.items():
                steps = _verl_jobs.run(
                    args, MODEL, "_step_job.TimedLengths", f"data.train_files={prompts}", WORKERS, *more
                )
                steps_by_way[way].append(steps)
                loads[way].append(os.getloadavg()[0])
                text = f"{mean(step['timing_s/step'] for step in steps):.1f} s a step, load {loads[way][-1]:.1f}"
                print(f"turn {turn + 1}/{args.repeats}, {way}: {text}", flush=True)
            # After each turn, so that one who has to stop it has the turns before.
            _bench.write(args.json, about=machine, loads=loads, steps=steps_by_way, faster=compare(steps_by_way, first))
    show(steps_by_way)
    if args.png:
        draw([dict(zip(HEADS, line, strict=True)) for line in list_rows(steps_by_way)], args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
