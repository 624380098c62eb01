"""Run by test_python_api.py as a program of its own: rounds whose KV has too little room.

Prints a line for each round: kind, retractions, the degree in which it was to start, and the degrees in which more than
one request was left, as the decision log has them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import sglang_pat
from sglang_pat.launch import processes

from .rollout_calls import admitter
from .streams import NEVER_ENDS


def main(model: str) -> None:
    processes.fork_here()
    log = Path(tempfile.mkdtemp()) / "log"
    engine = sglang_pat.Engine(
        model_path=model, tp_size=1, dp_size=2, adaptive_tp=True, pat_policy="threshold", pat_switch_at=1,
        schedule_conservativeness=0.05, dtype="float32", max_total_tokens=700, random_seed=1, log_level="error",
        pat_log=str(log),
    )  # fmt: skip
    mine, before, ahead = admitter(*range(20), num_prompts=4, num_responses=8, eta_prompts=2.0), 0, 0
    for version, tokens in enumerate((120, 20, 120)):
        sampling = {"temperature": 0, "max_new_tokens": tokens} | NEVER_ENDS
        *_, summary = engine.rollout(mine, sampling, version=version)
        retracted, lines = engine.status()["retracted"], log.read_bytes().splitlines()
        snapshots = [event["snapshot"] for event in map(json.loads, lines[ahead:]) if event["event"] == "decision"]
        full = [snapshot for snapshot in snapshots if snapshot["requests"] > 1]
        tps = sorted({snapshot["tp"] for snapshot in full})
        print(json.dumps([summary.kind, retracted - before, full[0]["start"], tps]), flush=True)
        before, ahead = retracted, len(lines)
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
