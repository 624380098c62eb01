"""Run by test_python_api.py as a program of its own: rounds whose KV has too little room.

Prints a line for each round: kind, retractions, and its degrees as the decision log (the second argument) has them
(``read_degrees``).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import sglang_pat
from sglang_pat.launch import processes

from .rollout_calls import admitter
from .streams import NEVER_ENDS, read_degrees


def main(model: str, log: str) -> None:
    processes.fork_here()
    engine = sglang_pat.Engine(
        model_path=model, tp_size=1, dp_size=2, adaptive_tp=True, pat_policy="threshold", pat_switch_at=1,
        schedule_conservativeness=0.05, dtype="float32", max_total_tokens=700, random_seed=1, log_level="error",
        pat_log=log,
    )  # fmt: skip
    mine, before, read = admitter(*range(20), num_prompts=4, num_responses=8, eta_prompts=2.0), 0, 0
    for version, tokens in enumerate((120, 20, 120)):
        sampling = {"temperature": 0, "max_new_tokens": tokens} | NEVER_ENDS
        *_, summary = engine.rollout(mine, sampling, version=version)
        start, tps, read = read_degrees(engine.status, Path(log), read)
        retracted = engine.status()["retracted"]
        print(json.dumps([summary.kind, retracted - before, start, tps]), flush=True)
        before = retracted
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
