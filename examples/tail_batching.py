"""Tail batching in miniature: rounds without a tail, weights updated between them, every prompt trained once.

    python examples/tail_batching.py [--model DIR] [--prompts 40] [--mode strict|reorder|partial]

Prints a line a round: its kind, how long it took, the lengths that were kept and what waits.  Without ``--model`` a
small random model is made; its answers mean nothing.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from safetensors.torch import load_file

import sglang_pat
from profiler.launch import set_environment
from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.records import Group
from sglang_pat.rollout.rules import MODES, Rules
from sglang_pat.testing import models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a Hugging Face folder with safetensors")
    parser.add_argument("--prompts", type=int, default=40, help="of the epoch (default: 40)")
    parser.add_argument("--mode", choices=MODES, default="strict")
    args = parser.parse_args()
    model = args.model or models.make_random("llama", Path(".cache/models/llama"))

    set_environment(quiet=True)  # on a CPU SGLang warns of much that it lacks there
    print("starting the engine", flush=True)
    engine = sglang_pat.Engine(
        model_path=str(model), tp_size=1, dp_size=2, adaptive_tp=True, pat_switch_at=3,
        dtype="float32", max_total_tokens=16384, log_level="error",
    )  # fmt: skip
    weights = {name: tensor for file in sorted(model.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    # Of 512 tokens that are about equally likely 8 end a response: most are short, some are not.
    sampling = {"temperature": 1.0, "max_new_tokens": 400, "stop_token_ids": list(range(100, 108))}
    admitter = Admitter(Rules(num_prompts=4, num_responses=4, mode=args.mode))
    admitter.feed([((0, i), {"input_ids": [11 + i, 23, 37, 41 + i]}) for i in range(args.prompts)], end_of=0)
    step, trained = 0, 0
    while admitter.state.fresh or admitter.state.waiting:
        begun, lengths = time.perf_counter(), []
        for event in engine.rollout(admitter, sampling, version=step):
            if isinstance(event, Group):
                trained += 1
                lengths += [sample.output.tokens for sample in event.list_kept()]
        seconds = time.perf_counter() - begun
        print(
            f"round {step}, {event.kind}: {seconds:.2f} s, kept {min(lengths)} to {max(lengths)} tokens, "
            f"threw {event.thrown} away, {len(event.ages)} prompts wait"
        )
        engine.update_weights_from_tensor(list(weights.items()))
        step += 1
    print(f"{trained} of {args.prompts} prompts trained, each once")
    engine.shutdown()


if __name__ == "__main__":
    main()
