"""A synchronous RL loop in miniature: generate a batch, "train", send the weights back, again.

    python examples/rollout_loop.py [--model DIR] [--rounds 3]

The engine starts as two replicas, merges them as each batch drains, and is back in its base layout when
the weights come.  Without ``--model`` a small random model is made; its answers mean nothing.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from safetensors.torch import load_file

import sglang_pat
from profiler.launch import set_environment
from sglang_pat.testing import models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a Hugging Face folder with safetensors")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model = args.model or models.make_random("llama", Path(".cache/models/llama"))

    set_environment(quiet=True)  # on a CPU SGLang warns of much that it lacks there
    print("starting the engine", flush=True)
    engine = sglang_pat.Engine(
        model_path=str(model), tp_size=1, dp_size=2, adaptive_tp=True, pat_switch_at=3,
        dtype="float32", max_total_tokens=16384, log_level="error",
    )  # fmt: skip
    weights = {name: tensor for file in sorted(model.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    prompts = [[11 + i, 23, 37, 41 + i] for i in range(16)]
    # A long tail: most answers are short, a few are not.
    lengths = [40] * 12 + [120, 200, 400, 800]
    params = [{"temperature": 1.0, "max_new_tokens": n, "ignore_eos": True} for n in lengths]
    for number in range(args.rounds):
        begin = time.perf_counter()
        answers = engine.generate(input_ids=prompts, sampling_params=params)
        seconds = time.perf_counter() - begin
        tokens = sum(len(answer["output_ids"]) for answer in answers)
        merged = [record for record in engine.status()["switches"] if record["to_tp"] == 2][-1]
        print(
            f"round {number}: {tokens} tokens in {seconds:.2f} s; merged with {merged['requests']} requests left, "
            f"pause {merged['pause_seconds'] * 1e3:.1f} ms; now in {engine.layout}"
        )
        # Where a trainer would change the weights.
        ok, message = engine.update_weights_from_tensor(list(weights.items()))
        assert ok, message
    engine.shutdown()


if __name__ == "__main__":
    main()
