"""Run by test_grpo.py as a program of its own: the example of GRPO, two steps of each way, or until it is killed."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from examples.grpo import __main__ as command
from examples.grpo import countdown
from examples.grpo.policy import warm_up
from examples.grpo.train import RULES, Run, Trainer, draw_problems, load_checkpoint, start_engine
from sglang_pat.launch import processes

SMALL = "--steps 3 --prompts 4 --responses 4 --held-out 8 --every 2 --warm-up 2 --switch-at 6".split()


def two_steps(folder: Path) -> None:
    """Of each way, on one engine; then from the checkpoint to the end of the epoch."""
    engine = start_engine(Run(way="adaptive", switch_at=6), warm_up(folder / "model", 0, 2, 0.3))
    for way in RULES:
        run = Run(way=way, steps=3, prompts=4, responses=4, held_out=8, every=2, warm_up=2, rate=1e-3)
        problems, held_out = draw_problems(run)
        path = folder / f"{way}.pt"

        def resume(run=run, problems=problems, held_out=held_out, path=path) -> Trainer:
            saved = load_checkpoint(path, run, problems)
            return Trainer(run, engine, folder / "model", problems, held_out, countdown.verify, path, saved)

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


def main(kind: str, folder: str) -> int:
    processes.fork_here()
    if kind == "ways":
        two_steps(Path(folder))
        return 0
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
