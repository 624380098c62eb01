"""What routing replay adds to the pause of a switch: engines with and without it, taking turns.

    python bench/routed_experts.py [--quick] [--rounds N] [--json FILE]

A small mixture of experts whose tokens have as much KV for each routed expert as those of Qwen3-30B-A3B in bfloat16,
on two ranks.  Prompts are injected, not computed: what a switch moves does not depend on the values.  Each batch makes
several switches: SGLang's attention on a CPU takes a minute for the last token of 64 prompts of 8,192, since it
computes the rows of all the others as well.  Ten rounds take 5 minutes.
"""

from __future__ import annotations

import statistics
import sys
from contextlib import ExitStack
from pathlib import Path

import _bench
import _switch_commands as commands

from profiler import launch
from profiler.worker import Worker
from sglang_pat.testing import models
from sglang_pat.testing.server import suspend

FLAG = "--enable-return-routed-experts"
WAYS = {"without": (), "with": (FLAG,)}
CONTEXT = 8192
MODEL = dict(layers=2, heads=8, kv_heads=4, head_dim=64, experts=128, chosen=8, context=2 * CONTEXT)
"""4 KiB of KV a token in float32, and 16 routed experts."""
REQUESTS = 64
TURNS = 2
"""Batches of each engine."""


def main() -> int:
    parser = _bench.options(__doc__, "64 requests of 1,024 tokens in place of 8,192, three rounds; 2 minutes")
    parser.add_argument("--rounds", type=int, default=10, help="switches there and back of each engine (default: 10)")
    args = parser.parse_args()
    launch.set_environment(quiet=True)
    machine = _bench.about()
    model = models.make_random("qwen3_moe", Path(".cache/models/qwen3_moe-routed"), **MODEL)
    tokens, rounds = REQUESTS * (1024 if args.quick else CONTEXT), 3 if args.quick else args.rounds
    sizes = ("--dtype", "float32", "--max-total-tokens", str(tokens // 2 + 16384), "--max-running-requests", "64")
    records: dict[str, dict[int, list[dict]]] = {way: {2: [], 1: []} for way in WAYS}
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for way, flags in WAYS.items():
            with suspend(*workers.values()):
                engine = Worker(model, "--tp", "1", "--dp", "2", *sizes, *flags)
                workers[way] = stack.enter_context(engine)
        for _ in range(TURNS):
            for way, worker in workers.items():
                with suspend(*(other for other in workers.values() if other is not worker)):
                    switched = worker.do(
                        commands.switches, low=1, high=2, requests=REQUESTS, tokens=tokens,
                        rounds=1 + -(-rounds // TURNS),
                    )  # fmt: skip
                for record in switched[2:]:  # the first of a batch touches memory for the first time
                    records[way][record["to_tp"]].append(record)
    print(f"{REQUESTS} requests of {tokens // REQUESTS} tokens, median pause of {rounds} switches, ms:")
    for tp in (2, 1):
        pauses = {way: [1e3 * record["pause_seconds"] for record in switched[tp]] for way, switched in records.items()}
        ratios = [one / other for one, other in zip(pauses["with"], pauses["without"], strict=True)]
        shown = ", ".join(
            f"{way} {statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f})"
            for way, times in pauses.items()
        )
        print(f"  to tp{tp}: {shown}; ratio {statistics.median(ratios):.3f}")
        plans = {way: [record["phases"]["plan"] for record in switched[tp]] for way, switched in records.items()}
        print(
            "    its part 'plan': " + ", ".join(f"{way} {1e3 * statistics.median(p):.1f}" for way, p in plans.items())
        )
    _bench.write(args.json, machine=machine, tokens=tokens, found=records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
