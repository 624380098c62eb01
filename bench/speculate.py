"""What drafts cost and gain in real rounds on two ranks: ``--pat-speculate`` off, at a number, and by itself, in turns.

    python bench/speculate.py [--quick] [--profile FILE] [--ways off 4] [--new] [--switches] [--turns 2]

``wide``, a model of random weights.  In bfloat16 a CPU with AVX512_BF16 multiplies five rows nearly as fast as one, as
a GPU does; one without it does not.  Lengths are drawn beforehand, with a long tail.  A round of new prompts has drafts
that are as good as never right: what they cost.  The same prompts again, greedy, have drafts that are always right:
what they gain at most.
How many are right for a real policy: ``drafts.py``.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import _bench
from rich.console import Console
from rich.table import Table

from sglang_pat.demo.cases import MAKERS, WIDE
from sglang_pat.testing.server import Server

BASE = ("--tp", "1", "--dp", "2", "--adaptive-tp")
KINDS = ("new", "again")
PROMPT = 32
"""Tokens of a prompt."""


def make_round(rng: random.Random, lengths: list[int], tokens: range) -> list[dict[str, Any]]:
    """Requests with new prompts and these lengths."""
    return [
        {
            "input_ids": [rng.choice(tokens) for _ in range(PROMPT)],
            "sampling_params": {"temperature": 0, "max_new_tokens": length, "ignore_eos": True},
        }
        for length in lengths
    ]


def run(
    model: Path, flags: Mapping[str, Sequence[str]], kinds: Sequence[str], dtype: str, lengths: list[int], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds of each way and kind of round; the first rounds of an engine are not counted.

    The engines of all ways wait side by side, without taking a core, and each round goes to one after the other: what
    else the machine does changes more from minute to minute than drafts cost.

    Args:
        flags: of each way.
    """
    seconds: dict[str, dict[str, list[float]]] = {way: {kind: [] for kind in kinds} for way in flags}
    rng = random.Random(46)
    with ExitStack() as stack:
        servers = [
            (way, stack.enter_context(Server(model, *BASE, *given, max_total_tokens=32768, dtype=dtype)))
            for way, given in flags.items()
        ]
        for number in range(rounds + 1):
            requests = make_round(rng, lengths, range(5, 500))
            for kind in kinds:
                for way, server in servers:
                    begun = time.perf_counter()
                    server.generate(requests)
                    if number:
                        seconds[way][kind].append(time.perf_counter() - begun)
            servers.reverse()
    return seconds


def list_flags(way: str, args: argparse.Namespace) -> list[str]:
    """Flags of a way.  Without a profile a number of drafts is checked in each step, whether they pay or not."""
    profile = ["--pat-profile", str(args.profile)] if args.switches or way == "auto" else []
    return ["--pat-speculate", way, "--pat-policy", "survival" if args.switches else "off", *profile]


def main() -> int:
    parser = _bench.options(__doc__, "one turn of one round with short responses; two minutes")
    parser.add_argument("--profile", type=Path, help="of this model on two ranks; with it auto takes its turn")
    parser.add_argument("--ways", nargs="+", default=["off", "4"], help="values of --pat-speculate")
    parser.add_argument("--new", action="store_true", help="rounds of new prompts only")
    parser.add_argument("--dtype", default="bfloat16", help="of the model, as in the profile (default: %(default)s)")
    parser.add_argument("--switches", action="store_true", help="survival decides on the layout; needs --profile")
    parser.add_argument("--rounds", type=int, default=2, help="of each turn (default: %(default)s)")
    parser.add_argument(
        "--turns", type=int, default=2, help="in each of which the engines start anew (default: %(default)s)"
    )
    parser.add_argument("--responses", type=int, default=16, help="of a round (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=300, help="of a response at most (default: %(default)s)")
    args = parser.parse_args()
    if args.switches and not args.profile:
        parser.error("--switches needs --profile FILE (python -m profiler.sweep makes one)")
    if args.profile and not args.profile.is_file():
        parser.error(f"--profile {args.profile}: no such file; python -m profiler.sweep makes one")
    if args.quick:
        args.rounds, args.turns, args.tokens = 1, 1, 64
    kinds = KINDS[:1] if args.new else KINDS
    machine, model = _bench.about(), MAKERS[WIDE]()
    rng = random.Random(46)
    lengths = [min(args.tokens, max(4, round(rng.lognormvariate(4.0, 0.9)))) for _ in range(args.responses)]
    flags = {way: list_flags(way, args) for way in dict.fromkeys([*args.ways, *(["auto"] * bool(args.profile))])}
    found: dict[str, list[dict[str, list[float]]]] = {way: [] for way in flags}
    for _ in range(args.turns):
        for way, seconds in run(model, flags, kinds, args.dtype, lengths, args.rounds).items():
            found[way].append(seconds)
        _bench.write(args.json, machine=machine, lengths=lengths, found=found)
    table = Table("--pat-speculate", *(f"{kind}: seconds, times as fast" for kind in kinds))
    for way, turns in found.items():
        cells = []
        for kind in kinds:
            own = [second for turn in turns for second in turn[kind]]
            plain = [second for turn in found[args.ways[0]] for second in turn[kind]]
            gains = [before / after for before, after in zip(plain, own, strict=True)]
            cells.append(f"{median(own):.1f}, {median(gains):.2f} ({min(gains):.2f} to {max(gains):.2f})")
        table.add_row(way, *cells)
    title = f"{args.responses} responses of {min(lengths)} to {max(lengths)} tokens, {args.turns} turns"
    Console(width=110).print(title, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
