"""A step of verl that trains on groups while others are generated, against one that waits, and one that fetches once.

    .venv-integration/bin/python bench/streaming.py [--quick] [--repeats N] [--steps N] [--shares S …] [--json FILE]

The trainer has one rank and the engine another, each a core of its own.  Lengths are drawn with a long tail and given
to the engine, so that all ways do the same work in the same step.  The jobs take turns, and steps are compared with the
same step of the same turn.  The first step of a job does not count: everything is new.  Needs the environment of ``make
test-integration``, and a machine with two quiet cores.
``--quick`` takes four minutes.

``whole``: train when the batch is there.  ``once N%``: train on so much of it when that is there, and on the rest when
all of it is (RollPacker's Table 4).  ``stream``: ``trainer.v1.trainer_mode=sglang_pat_stream``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median

import _bench
from rich.console import Console
from rich.table import Table

from sglang_pat.testing import models

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(__file__).resolve().parent
MODEL = Path(".cache/models/llama-stream")
"""A small Llama whose probabilities are far from 0 and 1."""
COLUMNS = {
    "step, s": "timing_s/step",
    "waits, s": "timing_s/gen",
    "weights, s": "timing_s/update_weights",
    "training hidden, s": "training/stream/hidden_seconds",
    "not hidden, s": "training/stream/exposed_seconds",
    "chunks": "training/stream/chunks",
}
Steps = list[dict[str, float]]
"""verl's metrics of the steps that count."""


def run(mode: str, share: float, args: argparse.Namespace) -> Steps:
    """One job."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        agents = out / "agents.yaml"
        agents.write_text("- name: drawn\n  _target_: _stream_job.DrawnLengths\n")
        rollout, engine = "actor_rollout_ref.rollout", "actor_rollout_ref.rollout.checkpoint_engine"
        command = [
            sys.executable, str(ROOT / "examples" / "verl_grpo" / "run_cpu.py"), "--model", str(MODEL.resolve()),
            "--out", folder, "--gpus", "1", "--steps", str(args.steps), "--batch", str(args.batch),
            "--samples", str(args.samples), "--response", str(args.response), "--settings", "{base_tp:1}",
            f"trainer.v1.trainer_mode={mode}", "actor_rollout_ref.hybrid_engine=false", "data.shuffle=false",
            f"{rollout}.nnodes=1", f"{rollout}.calculate_log_probs=false", f"{engine}.backend=gloo",
            f"{engine}.custom_backend_module=on_cpu.verl_gloo", "ray_kwargs.ray_init.num_gpus=2",
            f"{rollout}.agent.agent_loop_config_path={agents}", f"{rollout}.agent.default_agent_loop=drawn",
            f"{rollout}.max_num_seqs={args.batch * args.samples}",
        ]  # fmt: skip
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
            "VERL_USE_EXTERNAL_MODULES": "_stream_job",
            "FETCH_SHARE": str(share),
        }
        done = subprocess.run(
            command, env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        if done.returncode:
            sys.exit(f"the job of {mode} failed:\n{done.stdout[-4000:]}")
        lines = (out / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["data"] for line in lines][1:]


def compare(found: dict[str, Steps]) -> dict[str, list[float]]:
    """How many times as long as with ``stream`` each step takes."""
    name = "timing_s/step"
    return {
        way: [one[name] / other[name] for one, other in zip(steps, found["stream"], strict=True)]
        for way, steps in found.items()
    }


def show(found: dict[str, Steps]) -> None:
    table = Table(title="means over steps; of the ratio the median, the least and the most", title_justify="left")
    for column in ("way", "steps", *COLUMNS, "step / stream's"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for way, longer in compare(found).items():
        values = [f"{mean(step[name] for step in found[way]):.2f}" for name in COLUMNS.values()]
        table.add_row(way, str(len(found[way])), *values, f"{median(longer):.2f} ({min(longer):.2f}-{max(longer):.2f})")
    Console(width=140).print(table)


def main() -> None:
    parser = _bench.options(__doc__ or "", "two steps that count of each way, one repeat, one share")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=32, help="prompts a step")
    parser.add_argument("--samples", type=int, default=4, help="responses a prompt")
    parser.add_argument("--response", type=int, default=1536, help="tokens of a response at most")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.2, 0.3, 0.4, 0.5])
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.steps, args.shares = 1, 3, [0.3]
    models.make_random("llama", MODEL, heads=4, kv_heads=2, logit_std=1)
    about = _bench.about(batch=args.batch, samples=args.samples, response=args.response, load=os.getloadavg()[0])
    ways = {"whole": ("fetch_whole", 1.0), "stream": ("sglang_pat_stream", 1.0)}
    ways |= {f"once {share:.0%}": ("fetch_once", share) for share in args.shares}
    found: dict[str, Steps] = {way: [] for way in ways}
    for _ in range(args.repeats):
        for way, (mode, share) in ways.items():
            found[way] += run(mode, share, args)
    show(found)
    columns = {way: [{name: step[name] for name in COLUMNS.values()} for step in steps] for way, steps in found.items()}
    _bench.write(args.json, about=about, steps=columns, longer=compare(found))


if __name__ == "__main__":
    main()
