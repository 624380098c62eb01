"""verl jobs of benches: GRPO on a CPU by ``examples/verl_grpo/run_cpu.py``, with given lengths of responses."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
ROLLOUT = "actor_rollout_ref.rollout"
APART = (
    "actor_rollout_ref.hybrid_engine=false", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.checkpoint_engine.backend=gloo",
    f"{ROLLOUT}.checkpoint_engine.custom_backend_module=on_cpu.verl_gloo",
)  # fmt: skip
"""Overrides: trainer and engine have ranks of their own."""
Steps = list[dict[str, float]]
"""Metrics of verl's steps."""


def need_verl() -> None:
    """End here, without an error, where verl is not installed."""
    if importlib.util.find_spec("verl") is None:
        print(f"{sys.argv[0]} needs verl: run `make test-integration`, then .venv-integration/bin/python {sys.argv[0]}")
        sys.exit()


def add_options(
    parser: argparse.ArgumentParser, *, repeats: int, steps: int, batch: int, samples: int, response: int
) -> None:
    """Add the options of a job, with their defaults, as :func:`run` reads them."""
    parser.add_argument("--repeats", type=int, default=repeats, help="jobs of each kind")
    parser.add_argument("--steps", type=int, default=steps, help="of a job; the first does not count")
    parser.add_argument("--batch", type=int, default=batch, help="prompts a step")
    parser.add_argument("--samples", type=int, default=samples, help="responses a prompt")
    parser.add_argument("--response", type=int, default=response, help="tokens of a response at most")


def run(args: argparse.Namespace, model: Path, agent: str, *more: str, **environment: str) -> Steps:
    """Run one job; returns the metrics of the steps that count.

    Args:
        args: of :func:`add_options`.
        agent: class of verl's agent loop, with its module in ``bench/``, which all of verl's processes import.
        more: of run_cpu.py's arguments, and of verl's overrides.

    Raises:
        SystemExit: the job failed; with the end of what it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        agents = Path(folder) / "agents.yaml"
        agents.write_text(f"- name: drawn\n  _target_: {agent}\n")
        command = [
            sys.executable, str(ROOT / "examples" / "verl_grpo" / "run_cpu.py"), "--model", str(model.resolve()),
            "--out", folder, "--steps", str(args.steps), "--batch", str(args.batch), "--samples", str(args.samples),
            "--response", str(args.response), "data.shuffle=false", f"{ROLLOUT}.calculate_log_probs=false",
            f"{ROLLOUT}.agent.agent_loop_config_path={agents}", f"{ROLLOUT}.agent.default_agent_loop=drawn",
            f"{ROLLOUT}.max_num_seqs={args.batch * args.samples}", *more,
        ]  # fmt: skip
        module = agent.partition(".")[0]
        paths = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            command, env=os.environ | environment | {"PYTHONPATH": paths, "VERL_USE_EXTERNAL_MODULES": module},
            cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"a job failed: {' '.join(command)}\n{done.stdout[-4000:]}")
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["data"] for line in lines][1:]
