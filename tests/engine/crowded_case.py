"""Run by test_python_api.py as a program of its own: rounds whose KV has too little room."""

from __future__ import annotations

import json
import sys

import sglang_pat
from sglang_pat.launch import processes

from .rollout_calls import admitter
from .streams import NEVER_ENDS


def main(model: str) -> None:
    processes.fork_here()
    engine = sglang_pat.Engine(
        model_path=model, tp_size=1, dp_size=2, adaptive_tp=True, pat_policy="threshold", pat_switch_at=1,
        schedule_conservativeness=0.05, dtype="float32", max_total_tokens=700, random_seed=1, log_level="error",
    )  # fmt: skip
    mine, before, ahead = admitter(*range(20), num_prompts=4, num_responses=8, eta_prompts=2.0), 0, 0
    for version, tokens in enumerate((120, 20, 120)):
        sampling = {"temperature": 0, "max_new_tokens": tokens} | NEVER_ENDS
        *_, summary = engine.rollout(mine, sampling, version=version)
        status = engine.status()
        first = [record["to_tp"] for record in status["switches"] if record["to_tp"] == 2 and not record["requests"]]
        print(json.dumps([summary.kind, status["retracted"] - before, first[ahead:]]), flush=True)
        before, ahead = status["retracted"], len(first)
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
