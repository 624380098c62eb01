"""Check what a profile says of the layouts beside each other: on this the decisions hang.

    python -m profiler.validate profile.json --model-path M --tp 1 --dp 2 [SGLang flags] [--out DIR]

Chat prompts are answered once in the base layout to learn their natural lengths.  Then each layout decodes the same
batch three times, every answer held to its length, so that all runs do the same work whatever is sampled.  A profile
that is wrong in all layouts alike changes no decision; what it gets wrong between them does.
"""

from __future__ import annotations

import json
import sys
from bisect import bisect_left
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from profiler import launch
from profiler.rig import Rig
from profiler.windows import Step, group_by_rank
from sglang_pat import files
from sglang_pat.predict.predictor import Predictor
from sglang_pat.predict.profile import Profile, check_fits, load
from sglang_pat.tools import console
from sglang_pat.tools.commands import Parser, UsageError, check_output_folder, run
from sglang_pat.tools.console import Speaker
from sglang_pat.tools.prompts import PROMPTS

RUNS = 3
VALIDATION = "validation.json"
"""Name of the validation in the folder of a report."""


class LayoutComparison(msgspec.Struct, frozen=True, kw_only=True):
    """What a profile gets wrong between layouts.

    Attributes:
        common: share by which all layouts are slower than predicted.
        beside: share by which each is slower than that.
        error: standard deviation of ``beside``, with the machine's noise taken out; 0 where that explains all of it.
        noise: standard deviation of ``beside`` that the runs' own differences explain.
    """

    common: float
    beside: dict[str, float]
    error: float
    noise: float

    def __str__(self) -> str:
        beside = ", ".join(f"{layout} {100 * off:+.1f} %" for layout, off in self.beside.items())
        return (
            f"all layouts are slower than predicted by {100 * self.common:.1f} %; beside that {beside}\n"
            f"error between layouts: {100 * self.error:.1f} %; the machine's noise: {100 * self.noise:.1f} % more"
        )


class Validation(msgspec.Struct, frozen=True, kw_only=True):
    """A ``validation.json``."""

    between: LayoutComparison


def main(argv: list[str] | None = None) -> int:
    """The command; raises UsageError or ProfileError."""
    parser = Parser(prog="python -m profiler.validate", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("profile", type=Path, metavar="profile.json")
    parser.add_argument("--model-path", "--model", required=True, metavar="M")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"for {VALIDATION}, which the report shows")
    parser.add_argument("--requests", type=int, default=len(PROMPTS), metavar="N", help=f"default {len(PROMPTS)}")
    parser.add_argument("--max-new-tokens", type=int, default=240, metavar="N", help="longest answer; default 240")
    args, flags = parser.parse_known_args(argv)
    for name, least in (("requests", 2), ("max_new_tokens", 16)):
        if getattr(args, name) < least:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {least}")
    profile = load(args.profile)
    if profile.kind != "measured":
        raise UsageError(f"{args.profile} is a {profile.kind} profile; give one that profiler.sweep measured here")
    server_args = launch.make_server_args(args.model_path, flags)
    check_fits(profile, launch.make_fingerprint(server_args), args.profile)
    if args.out:
        check_output_folder(args.out)
    speaker = Speaker(console.make())
    with speaker.show_waiting("starting the engine"):
        engine = launch.start(server_args)
    try:
        slowness = launch.run(engine, lambda: _decode_all(engine, profile, args.requests, args.max_new_tokens, speaker))
    finally:
        engine.shutdown()
    between = compare_layouts(slowness)
    speaker.say(str(between))
    if args.out:
        written = {"between": msgspec.structs.asdict(between), "slowness": slowness}
        files.write(json.dumps(written, indent=1).encode() + b"\n", args.out / VALIDATION)
    return 0


async def _decode_all(
    engine: Any, profile: Profile, requests: int, most: int, speaker: Speaker
) -> dict[str, list[float]]:
    """Layout → the slowness of each of its runs."""
    predictor = Predictor(profile)
    rig = Rig(engine, temperature=1.0)
    await rig.connect()
    prompts = make_chat_prompts(engine.tokenizer_manager.tokenizer, requests)
    with speaker.show_waiting("natural lengths, in the base layout"):
        free = rig.send(prompts, [most] * requests, ignore_eos=False)
        lengths = [answer["meta_info"]["completion_tokens"] for answer in await rig.finish(free)]
    speaker.say(f"{requests} prompts; answers of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all")
    slowness: dict[str, list[float]] = {str(layout): [] for layout in rig.layouts}
    for number in range(RUNS):  # layouts in turn: what disturbs the machine for a while falls on all
        for layout in rig.layouts:
            await rig.reconfigure(layout.tp)
            with speaker.show_waiting(f"{layout}, run {number + 1} of {RUNS}"):
                await rig.flush()
                await rig.read_trace()
                await rig.finish(rig.send(prompts, lengths))
                slowness[str(layout)].append(compute_slowdown(await rig.read_trace(), predictor, layout.tp))
    await rig.reconfigure(rig.layouts[0].tp)
    return slowness


def make_chat_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Token ids of ``count`` prompts of the demonstration, again from the first when they run out."""
    token_ids = []
    for index in range(count):
        text = PROMPTS[index % len(PROMPTS)]
        if getattr(tokenizer, "chat_template", None):
            message = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        token_ids.append(list(tokenizer.encode(text)))
    return token_ids


def compute_slowdown(trace: list[Step], predictor: Predictor, tp: int) -> float:
    """Measured over predicted time of all decode steps of a run.

    Each step is predicted from its batch, its tokens and the number of replicas at work in its middle.
    """
    ranks = group_by_rank(trace, tp=tp)
    ends = {rank: [step["at"] for step in steps] for rank, steps in ranks.items()}

    def works(rank: int, moment: float) -> bool:
        place = bisect_left(ends[rank], moment)
        return place < len(ends[rank]) and ranks[rank][place]["at"] - ranks[rank][place]["seconds"] <= moment

    measured = predicted = 0.0
    for step in (step for steps in ranks.values() for step in steps if step["kind"] == "decode"):
        active = sum(works(rank, step["at"] - step["seconds"] / 2) for rank in ranks)
        measured += step["seconds"]
        predicted += float(predictor.step_seconds(tp, step["requests"], step["tokens"], max(active, 1)))
    return measured / predicted


def compare_layouts(slowness: dict[str, list[float]]) -> LayoutComparison:
    """Layout → the slowness of its runs, as many of each and in turn: what slows the machine down for a while is common
    to a turn."""
    logs = np.log(list(slowness.values()))  # [layouts, runs]
    common = logs.mean(axis=0)
    beside = logs - common
    means, runs, free = beside.mean(axis=1), logs.shape[1], max(len(logs) - 1, 1)
    noise = float((beside.var(axis=1, ddof=1) / runs).sum() / free) if runs > 1 else 0.0
    return LayoutComparison(
        common=float(np.expm1(common.mean())),
        beside=dict(zip(slowness, np.expm1(means).tolist(), strict=True)),
        error=float(np.sqrt(max(0.0, (means**2).sum() / free - noise))),
        noise=float(np.sqrt(noise)),
    )


if __name__ == "__main__":
    sys.exit(run("profiler.validate", main))
