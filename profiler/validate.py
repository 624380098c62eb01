"""Compare a profile with real decoding.

    python -m profiler.validate profile.json --model-path M --tp 1 --dp 2 [SGLang flags] [--out DIR]

Chat prompts are answered once in the base layout to learn their natural lengths.  Then each layout decodes the same
batch three times, every answer held to its length, so that all runs and layouts do the same work whatever is sampled.
Each decode step is predicted from its batch, its tokens and the number of replicas at work.  The difference between
runs is what no predictor can do better than.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from profiler import display as displays
from profiler import launch, trajectory
from profiler.rig import Rig
from sglang_pat import files
from sglang_pat.predict.predictor import Predictor
from sglang_pat.predict.profile import Profile, check_fits, load
from sglang_pat.tools.commands import Parser, UsageError, output_folder, run, writing

RUNS = 3


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line; ``flags`` are SGLang's."""

    profile: Path
    model: str
    out: Path | None
    requests: int
    max_new_tokens: int
    flags: list[str]


def parse(argv: list[str] | None) -> Options:
    """Raises UsageError."""
    from sglang_pat.tools.prompts import PROMPTS

    parser = Parser(prog="python -m profiler.validate", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("profile", type=Path, metavar="profile.json")
    parser.add_argument("--model-path", "--model", required=True, metavar="M")
    parser.add_argument("--out", type=Path, metavar="DIR", help="for validation.json and the figures")
    parser.add_argument("--requests", type=int, default=len(PROMPTS), metavar="N", help=f"default {len(PROMPTS)}")
    parser.add_argument("--max-new-tokens", type=int, default=240, metavar="N", help="longest answer; default 240")
    args, flags = parser.parse_known_args(argv)
    for name, least in (("requests", 2), ("max_new_tokens", 16)):
        if getattr(args, name) < least:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} {getattr(args, name)}: must be at least {least}")
    return Options(
        profile=args.profile, model=args.model_path, out=args.out and output_folder(args.out), requests=args.requests,
        max_new_tokens=args.max_new_tokens, flags=flags,
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    profile = load(options.profile)
    if profile.kind != "measured":
        raise UsageError(f"{options.profile} is a {profile.kind} profile; give one that profiler.sweep measured here")
    predictor = Predictor(profile)
    args = launch.server_args(options.model, options.flags)
    check_fits(profile, launch.deployment(args), options.profile)
    display = displays.make()
    with display.waiting("starting the engine"):
        engine = launch.start(args)
    try:
        result = launch.run(engine, lambda: _validate(engine, options, profile, predictor, display))
    finally:
        engine.shutdown()
    rows = [trajectory.summary(name, runs) for name, runs in result.items()]
    display.console.print(_table(rows))
    between = trajectory.between_layouts(result)
    display.console.print(_told(between))
    if options.out:
        with writing(options.out):
            for path in write(options.out, rows, result, between):
                display.say(str(path))
    return 0


async def _validate(
    engine: Any, options: Options, profile: Profile, predictor: Predictor, display: displays.Display
) -> dict[str, list[list[trajectory.Decoded]]]:
    """Layout → its runs."""
    rig = Rig(engine, float(profile.machine.get("temperature", 1.0)))
    await rig.connect()
    prompts = chat_prompts(engine.tokenizer_manager.tokenizer, options.requests)
    with display.waiting("natural lengths, in the base layout"):
        free = rig.send(prompts, [options.max_new_tokens] * len(prompts), ignore_eos=False)
        lengths = [answer["meta_info"]["completion_tokens"] for answer in await rig.finish(free)]
    display.say(f"{len(prompts)} prompts; answers of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all")
    result: dict[str, list[list[trajectory.Decoded]]] = {}
    for number in range(RUNS):  # layouts in turn: what disturbs the machine for a while falls on all
        for layout in rig.layouts:
            await rig.reconfigure(layout.tp)
            with display.waiting(f"{layout}, run {number + 1} of {RUNS}"):
                await rig.flush()
                await rig.trace()
                await rig.finish(rig.send(prompts, lengths))
                steps = trajectory.decoded(await rig.trace(), predictor, layout.tp)
            result.setdefault(str(layout), []).append(steps)
    await rig.reconfigure(rig.layouts[0].tp)
    return result


def chat_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Token ids of ``count`` prompts of the demonstration, again from the first when they run out."""
    from sglang_pat.tools.prompts import PROMPTS

    found = []
    for index in range(count):
        text = PROMPTS[index % len(PROMPTS)]
        if getattr(tokenizer, "chat_template", None):
            message = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        found.append(list(tokenizer.encode(text)))
    return found


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="predicted step time against real decoding, mean absolute relative error", title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "layout" else "right")
    for row in rows:
        table.add_row(*(_shown(value) for value in row.values()))
    return table


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return "–" if math.isnan(value) else f"{100 * value:.2f} %"
    return str(value)


def _told(between: trajectory.Between) -> str:
    beside = ", ".join(f"{layout} {100 * off:+.1f} %" for layout, off in between.beside.items())
    return (
        f"all layouts are slower than predicted by {100 * between.common:.1f} %; beside that {beside}\n"
        f"error between layouts: {100 * between.error:.1f} %; the machine's noise: {100 * between.noise:.1f} % more"
    )


def write(
    folder: Path,
    rows: list[dict[str, Any]],
    result: dict[str, list[list[trajectory.Decoded]]],
    between: trajectory.Between,
) -> list[Path]:
    """``validation.json`` and a ``throughput_*.png`` for each layout; the files written."""
    from profiler.curves import throughput_figure

    curves = {name: trajectory.throughput([s for run in runs for s in run]) for name, runs in result.items()}
    data = {
        "table": [{name: _shown(value) for name, value in row.items()} for row in rows],
        "figures": rows,
        "between": asdict(between),
        "throughput": {
            name: [{"remaining": n, "measured": m, "predicted": p} for n, (m, p) in sorted(curve.items())]
            for name, curve in curves.items()
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "validation.json"
    files.write(json.dumps(data, indent=1).encode() + b"\n", target)
    written = [target]
    for number, (name, curve) in enumerate(curves.items()):
        written.append(throughput_figure(folder, name, curve, rows[number], number))
    return written


if __name__ == "__main__":
    sys.exit(run("profiler.validate", main))
