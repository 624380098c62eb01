"""Run by test_grpo.py as a program of its own: the example of GRPO, two steps of each way, until it is killed, or with
another model and task; and a step in which a rank is lent."""

from __future__ import annotations

import os
import signal
import sys
from copy import deepcopy
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch

from examples.grpo import __main__ as command
from examples.grpo import countdown, train
from examples.grpo.policy import add_gradient, warm_up
from examples.grpo.train import RULES, Run, Trainer, load_checkpoint, start_engine
from sglang_pat.launch import processes
from sglang_pat.predict import profile as profiles
from sglang_pat.testing import models

from .made_up import make_profile, read_fingerprint

SMALL = "--steps 3 --prompts 4 --responses 4 --held-out 8 --every 2 --warm-up 2 --switch-at 6".split()


def two_steps(folder: Path) -> None:
    """Steps of each way, on one engine; then from the checkpoint to the end of the epoch."""
    engine = start_engine(Run(way="adaptive", switch_at=6), warm_up(folder / "model", 0, 2, 0.3))
    for way in RULES:
        run = Run(way=way, steps=3, prompts=4, responses=4, held_out=8, every=2, warm_up=2, rate=1e-3)
        task = countdown.draw_task(12, 8, seed=0)
        path = folder / f"{way}.pt"

        def resume(run=run, task=task, path=path) -> Trainer:
            saved = load_checkpoint(path, run, task.problems)
            return Trainer(run, engine, folder / "model", task, path, saved)

        trainer = resume()
        assert not trainer.rows and trainer.step().apart < 1e-4 and trainer.step().samples == 2 * 16
        again = resume()
        assert again.before == trainer.before and again.rows == trainer.rows
        for mine, other in zip(again.policy.parameters(), trainer.policy.parameters(), strict=True):
            assert mine.equal(other)
        while not again.over:
            again.step()
        assert sorted(number for row in again.rows for number in row.trained) == list(range(12)), way
        print(way)
    engine.shutdown()


def lend(folder: Path) -> None:
    """Lend in the second step, by force: the engine's policy is asked; its answer is looked at, but not followed."""
    model, train.PROFILES = warm_up(folder / "model", 0, 2, 0.3), folder
    profiles.save(make_profile(read_fingerprint(str(model))), folder / "grpo-model.json")
    run = Run(
        way="adaptive", lend=True, steps=3, prompts=4, responses=4, held_out=8, every=9, warm_up=2, rate=1e-3
    )  # fmt: skip
    engine = start_engine(run, model)
    task = replace(countdown.draw_task(12, 8, seed=0), verify=lambda problem, answer: len(answer) / run.limit)
    trainer = Trainer(run, engine, model, task, folder / "lend.pt", None)
    torch.nn.utils.clip_grad_norm_ = lambda parameters, most: None
    assert trainer.step().timeline.lent is None
    before, said = deepcopy(trainer.policy), []

    def decide(**about):
        said.append(engine.decide_lending(**about))
        return {"move": {4: "lend", 12: "take_back"}.get(about["complete"], "wait") if about["ready"] else "wait"}

    trainer.lending.decide = decide
    row = trainer.step()
    assert row.apart < 1e-4 and row.timeline.lent and row.timeline.hidden > 0
    assert said[0]["move"] in ("lend", "wait") and all(one["why"] for one in said), said
    switches = [record["reason"] for record in engine.status()["switches"]]
    # Two switches to lend, if the policy had merged before.
    moves = [reason for reason, _ in groupby(switches) if reason in ("lend", "take back")]
    assert moves == ["lend", "take back"], switches
    groups = trainer.lending.groups
    before.zero_grad()
    add_gradient(before, groups, decoupled=False)
    tokens = sum(row.lengths)
    mine = torch.cat([parameter.grad.flatten() for parameter in trainer.policy.parameters()])
    whole = torch.cat([parameter.grad.flatten() / tokens for parameter in before.parameters()])
    assert float((mine - whole).norm() / whole.norm()) <= 1e-5
    engine.shutdown()


def verify(problem: str, answer: str) -> float:
    """The share of letters before "m", which a random model can learn."""
    return sum(letter < "m" for letter in answer) / max(1, len(answer))


def main(kind: str, folder: str) -> int:
    processes.fork_here()
    if kind == "ways":
        two_steps(Path(folder))
        return 0
    if kind == "lend":
        lend(Path(folder))
        return 0
    if kind == "task":
        model = models.make_random("qwen3", Path(folder, "model"), kv_heads=2, layers=2, tie=True)
        words = "--way all --steps 2 --prompts 4 --responses 4 --held-out 8 --rate 1e-3 --limit 20".split()
        words += ["--model", str(model), "--task", "chain_sum", "--verifier", "tests.engine.grpo_case:verify"]
        return command.main([*words, "--out", folder])
    if kind == "killed":
        update, steps = Trainer.update, []

        def killed(self: Trainer, groups):
            steps.append(None)
            if len(steps) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return update(self, groups)

        Trainer.update = killed
    return command.main(["--way", "all", "--out", folder, *SMALL])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
