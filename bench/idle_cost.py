"""What ``--adaptive-tp`` costs while nothing switches: tokens/s against stock SGLang, in one run, taking turns.

    python bench/idle_cost.py [--quick] [--json FILE] [--model DIR]

Both servers are alive all the time; the one that is not being measured is stopped (SIGSTOP), because
stock SGLang's data-parallel controller polls without sleeping and would take a core from the other.
Every round sends the same batch to each in turn; the figure is the ratio of tokens/s, round by round.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import _bench

from sglang_pat.testing import models
from sglang_pat.testing.server import Server, suspend

CASES = {"one rank": ("--tp", "1", "--dp", "1"), "two replicas": ("--tp", "1", "--dp", "2")}
OFF = ("--adaptive-tp", "--pat-policy", "manual")


def tokens_per_second(server: Server, batch: int, tokens: int) -> float:
    bodies = [
        {
            "input_ids": [11 + i, 23, 37 + i, 41],
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        }
        for i in range(batch)
    ]
    begin = time.perf_counter()
    answers = server.generate(bodies)
    seconds = time.perf_counter() - begin
    assert all(len(answer["output_ids"]) == tokens for answer in answers)
    return batch * tokens / seconds


def compare(model: Path, flags: tuple[str, ...], rounds: int, batch: int, tokens: int) -> dict:
    with Server(model, *flags) as stock:
        with suspend(stock):
            adaptive = Server(model, *flags, *OFF)
        with adaptive:
            pairs = []
            for number in range(rounds + 1):
                with suspend(adaptive):
                    plain = tokens_per_second(stock, batch, tokens)
                with suspend(stock):
                    ours = tokens_per_second(adaptive, batch, tokens)
                if number:  # the first round warms both up
                    pairs.append((plain, ours))
                    ratio = ours / plain
                    print(f"  round {number}: stock {plain:8.1f}  adaptive {ours:8.1f}  ratio {ratio:.3f}", flush=True)
    ratios = sorted(ours / plain for plain, ours in pairs)
    return {
        "stock_tokens_per_s": statistics.median(plain for plain, _ in pairs),
        "adaptive_tokens_per_s": statistics.median(ours for _, ours in pairs),
        "ratio_median": statistics.median(ratios),
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
        "pairs": pairs,
    }


def main() -> int:
    parser = _bench.options(__doc__, "a tiny model and few rounds; 2 minutes at most")
    parser.add_argument("--model", type=Path, help="checkpoint (default: SmolLM2, made on the spot)")
    args = parser.parse_args()
    cache = Path(".cache/models")
    if args.quick:
        model, rounds, batch, tokens = models.make_random("llama", cache / "llama"), 5, 8, 200
    else:
        model, rounds, batch, tokens = models.make_smollm2(cache / "smollm2"), 7, 16, 48
    model = args.model or model
    machine = _bench.about()
    results = {}
    for name, flags in CASES.items():
        print(f"{name} ({' '.join(flags)}), {batch} requests of {tokens} tokens, {model.name}:")
        results[name] = compare(model, flags, rounds, batch, tokens)
        row = results[name]
        print(
            f"  median: stock {row['stock_tokens_per_s']:.1f} tokens/s, adaptive {row['adaptive_tokens_per_s']:.1f}, "
            f"ratio {row['ratio_median']:.3f} ({row['ratio_min']:.3f}-{row['ratio_max']:.3f})"
        )
    _bench.write(args.json, machine=machine, model=model.name, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
