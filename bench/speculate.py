"""What drafts gain in a real round: SmolLM2 on two ranks, with and without ``--pat-speculate``, in turns.

    python bench/speculate.py [--quick] [--profile FILE] [--rounds 2] [--temperatures 0.7 1.0] [--json FILE]

A round has groups of responses to problems of ``gsm_symbolic`` (reasoning-gym), whose lengths are drawn beforehand and
are the same in all rounds, with a long tail; each round has problems of its own.  The first round of an engine is not
counted.  In bfloat16, of which this kind of CPU multiplies five rows nearly as fast as one, as a GPU does.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import _bench
from drafts import draw_problems
from rich.console import Console
from rich.table import Table

from sglang_pat.testing import models
from sglang_pat.testing.server import Server
from sglang_pat.testing.smollm2 import load_transformers

BASE = ("--tp", "1", "--dp", "2", "--adaptive-tp", "--pat-policy", "off")


def make_rounds(model: Path, args: Any) -> list[list[dict[str, Any]]]:
    """Requests of each round: groups with lengths of a lognormal distribution, other problems each time."""
    tokenizer = load_transformers().AutoTokenizer.from_pretrained(model)
    problems = draw_problems(args.problems * (args.rounds + 1))
    rng, rounds = random.Random(46), []
    lengths = [
        [min(args.tokens, max(4, round(rng.lognormvariate(4.0, 0.9)))) for _ in range(args.responses)]
        for _ in range(args.problems)
    ]
    for number in range(args.rounds + 1):
        requests = []
        for problem, group in zip(problems[number * args.problems :], lengths, strict=False):
            chat = [{"role": "user", "content": problem}]
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
            requests += [
                {"input_ids": ids, "sampling_params": {"max_new_tokens": n, "ignore_eos": True}} for n in group
            ]
        rounds.append(requests)
    return rounds


def run(model: Path, way: str, rounds: list[list[dict]], temperature: float, profile: Path | None) -> dict[str, Any]:
    """Seconds of each round but the first, and what was drafted in them."""
    flags = (*BASE, "--pat-speculate", way, *(("--pat-profile", str(profile)) if profile else ()))
    seconds, steps, proposed, right = [], 0, 0, 0
    with Server(model, *flags, max_total_tokens=65536, dtype="bfloat16") as server:
        for number, requests in enumerate(rounds):
            for request in requests:
                request["sampling_params"]["temperature"] = temperature
            begun = time.perf_counter()
            answers = server.generate(requests)
            if number:
                seconds.append(time.perf_counter() - begun)
                for meta in (answer["meta_info"] for answer in answers):
                    steps += meta.get("spec_verify_ct", 0)
                    proposed += meta.get("spec_num_proposed_drafts", 0)
                    right += meta.get("spec_num_correct_drafts", 0)
    return {"seconds": seconds, "steps": steps, "proposed": proposed, "right": right}


def main() -> int:
    parser = _bench.options(__doc__, "one turn of one round, two problems, one temperature; two minutes")
    parser.add_argument("--profile", type=Path, help="of SmolLM2 on two ranks in bfloat16; with it auto takes its turn")
    parser.add_argument("--ways", nargs="+", default=["off", "4"], help="values of --pat-speculate")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.7, 1.0])
    parser.add_argument("--rounds", type=int, default=2, help="of each turn (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=2, help="of each way (default: %(default)s)")
    parser.add_argument("--problems", type=int, default=4)
    parser.add_argument("--responses", type=int, default=8, help="to each problem (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=300, help="of a response at most (default: %(default)s)")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.turns, args.problems, args.tokens, args.temperatures = 1, 1, 2, 64, args.temperatures[:1]
    machine = _bench.about()
    ways = [*args.ways, *(["auto"] if args.profile else [])]
    model = models.make_smollm2(Path(".cache/models/smollm2"))
    rounds = make_rounds(model, args)
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for temperature in args.temperatures:
        each = found[str(temperature)] = {way: [] for way in ways}
        for _ in range(args.turns):
            for way in ways:
                each[way].append(run(model, way, rounds, temperature, args.profile))
                _bench.write(args.json, machine=machine, found=found)
        table = Table(
            "--pat-speculate", "seconds a round", "times as fast", "right of checked", "tokens a step with drafts"
        )
        plain = [seconds for one in each["off"] for seconds in one["seconds"]] if "off" in each else []
        for way, turns in each.items():
            seconds = [second for one in turns for second in one["seconds"]]
            gains = [before / after for before, after in zip(plain, seconds, strict=False)]
            steps, proposed, right = (sum(one[key] for one in turns) for key in ("steps", "proposed", "right"))
            table.add_row(
                way,
                f"{median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})",
                f"{median(gains):.2f} ({min(gains):.2f} to {max(gains):.2f})" if gains else "",
                f"{right / proposed:.2f}" if proposed else "",
                f"{1 + right / steps:.2f}" if steps else "",
            )
        title = f"temperature {temperature}: {len(rounds[0])} responses, {args.turns} turns of {args.rounds} rounds"
        Console(width=110).print(title, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
