"""The example of GRPO: its task and verifier, what it refuses, and kills in every part of a step on a played engine."""

from __future__ import annotations

import json
import random
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from statistics import mean

import pytest
import torch
from msgspec import structs
from rich.console import Console

from examples.grpo import __main__ as command
from examples.grpo import countdown, train
from examples.grpo.lend import Timeline, count_tokens
from examples.grpo.picture import Results, draw, draw_step, make_step_title, make_title
from examples.grpo.policy import TOKENS, compute_advantages, make_policy, split_by_length
from examples.grpo.train import RULES, Row, Run, Trainer, load_checkpoint
from sglang_pat.policies.lending import Training
from sglang_pat.rollout.loop import EngineLoop
from sglang_pat.rollout.records import Output
from sglang_pat.rollout.rounds import RolloutCalls

from .rounds_world import Played

pytestmark = [pytest.mark.unit, pytest.mark.xdist_group("transformers")]

RUN = Run(steps=3, prompts=3, responses=2, held_out=4, every=2, way="tail")


class PlayedEngine(RolloutCalls, Played):
    """One of two responses to a problem is right, the other nothing but the end."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = EngineLoop()
        self.asked: list[dict] = []
        self.script: dict[int, list[str]] = {}
        """What the lending policy says in turn when so many samples are complete; else ``wait``."""
        self.lent: list[int] = []
        """Samples that were complete when a rank was lent, and when it was taken back."""

    def decide_lending(self, **about):
        self.asked.append(about)
        script = self.script.get(about["complete"])
        return {"move": script.pop(0) if script else "wait"}

    def lend_ranks(self, stride):
        assert stride == 2 and len(self.lent) == 0
        self.lent.append(self.asked[-1]["complete"])

    def take_back_ranks(self):
        assert len(self.lent) == 1
        self.lent.append(self.asked[-1]["complete"])

    def trace(self):
        return [{"rank": 0, "tp": 2, "at": time.monotonic(), "seconds": 0.001}]

    def update_weights_from_tensor(self, tensors):
        self.pushed = {name: tensor.clone() for name, tensor in tensors}
        return True, ""

    def status(self):
        return {"totals": {"seconds": {"1": 0.0}}}

    def generate(self, *given, **named):
        if given:
            return self.sample(*given)
        return [{"output_ids": self.answer(ids)} for ids in named["input_ids"]]

    async def sample(self, rid, prompt, params) -> Output:
        length = len(prompt["input_ids"])
        output = await super().generate(rid, {"input_ids": [length]}, params)
        number = int(rid.split("-")[-2])
        ids = self.answer(prompt["input_ids"], number) if output.finish_reason else output.token_ids
        return Output(token_ids=ids, logprobs=[-1.0] * len(ids), finish_reason=output.finish_reason)

    def answer(self, ids: list[int], number: int = 0) -> list[int]:
        problem = countdown.decode(ids).partition("=")[0]
        return (
            [*countdown.encode(countdown.solve(problem)), countdown.EOS] if (sum(ids) + number) % 2 else [countdown.EOS]
        )

    @asynccontextmanager
    async def _connect(self):
        yield self

    def _watch(self, round_) -> None:
        """Weights never change in the middle of a round here."""

    def _loop_for_rounds(self) -> EngineLoop:
        return self.loop


class Killed(BaseException):
    """What nobody catches."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    make_policy().save_pretrained(folder)
    return folder


def begin(run: Run, model, folder, verify=countdown.verify) -> Trainer:
    task = replace(countdown.draw_task(run.steps * run.prompts, run.held_out, run.seed), verify=verify)
    path = folder / "checkpoint.pt"
    return Trainer(run, PlayedEngine(), model, task, path, load_checkpoint(path, run, task.problems))


def finish(trainer: Trainer) -> list[int]:
    """Numbers of all prompts that were trained."""
    while not trainer.over:
        trainer.step()
    return sorted(number for row in trainer.rows for number in row.trained)


@pytest.mark.parametrize("way", RULES)
def test_every_prompt_is_trained_once(way, model, tmp_path):
    trainer = begin(replace(RUN, way=way), model, tmp_path)
    assert finish(trainer) == list(range(9))
    assert trainer.rows[-1].held_out is not None
    weights = trainer.policy.state_dict()
    assert all(weights[name].equal(tensor) for name, tensor in trainer.engine.pushed.items())


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory) -> Trainer:
    """A run that nobody kills."""
    trainer = begin(RUN, model, tmp_path_factory.mktemp("whole"))
    finish(trainer)
    return trainer


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.long), 2])  # with 2 there is a checkpoint
@pytest.mark.parametrize("phase", ["generate", "judge", "update", "push_weights", "test", "save", "written"])
def test_a_kill_in_any_part_of_a_step(phase, step, model, whole, tmp_path, monkeypatch):
    """The next process ends with the weights, the rows and the prompts that there would have been without it."""
    calls = []

    def at(call):
        def killed(*given, **named):
            found = call(*given, **named) if phase in ("generate", "written") else None
            calls.append(None)
            if len(calls) == step + (phase == "push_weights"):  # the first is that of the start
                raise Killed
            return call(*given, **named) if found is None else found

        return killed

    with monkeypatch.context() as patched:
        if phase == "written":
            patched.setattr(train.files, "write", at(train.files.write))
        else:
            patched.setattr(Trainer, phase, at(getattr(Trainer, phase)))
        trainer = begin(RUN, model, tmp_path)
        with pytest.raises(BaseException):  # noqa: B017  (in the thread of rewards it is wrapped)
            finish(trainer)
    again = begin(RUN, model, tmp_path)
    assert finish(again) == list(range(9))
    assert [row.trained for row in again.rows] == [row.trained for row in whole.rows]
    assert [row.held_out for row in again.rows] == [row.held_out for row in whole.rows]
    for mine, other in zip(again.policy.parameters(), whole.policy.parameters(), strict=True):
        assert mine.equal(other)


# -- a rank is lent -----------------------------------------------------------------------------------------------

LEND = replace(RUN, way="adaptive", lend=True)


def take_two_steps(model, folder, script: dict[int, list[str]]) -> tuple[Trainer, torch.Tensor]:
    """The policy follows ``script`` in the second step; the gradient of that step."""
    folder.mkdir()
    trainer = begin(LEND, model, folder)
    trainer.step()
    assert not trainer.engine.asked, "how long training takes is not known yet"
    trainer.engine.script = script
    trainer.step()
    return trainer, torch.cat([parameter.grad.flatten() for parameter in trainer.policy.parameters()])


@pytest.mark.parametrize(
    ("script", "lent", "parts"),
    [
        ({2: ["lend"]}, [2, 6], [1, 1, 1]),  # and the end of the round takes it back
        ({4: ["lend"]}, [4, 6], [2, 1]),
        ({2: ["lend", "take_back"]}, [2, 2], [1, 2]),
        ({2: ["lend"], 4: ["wait", "take_back"]}, [2, 4], [1, 1, 1]),
    ],
    ids=str,
)
def test_groups_that_are_trained_on_a_lent_rank_make_the_same_update(script, lent, parts, model, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda parameters, most: None)  # hides a wrong factor
    mine, gradient = take_two_steps(model, tmp_path / "lent", script)
    other, whole = take_two_steps(model, tmp_path / "whole", {})
    assert mine.engine.lent == lent and other.engine.lent == []
    counted = []
    groups = mine.lending.groups
    for _, tokens in mine.lending.spans:
        counted.append(next(n for n in range(len(groups) + 1) if count_tokens(groups[:n]) == tokens))
        groups = groups[counted[-1] :]
    assert counted == parts and not groups
    assert float((gradient - whole).norm() / whole.norm()) <= 1e-5 and whole.norm() > 0
    assert [row.trained for row in mine.rows] == [row.trained for row in other.rows]


def test_what_the_policy_is_told(model, tmp_path):
    trainer, _ = take_two_steps(model, tmp_path / "run", {2: ["lend"], 4: ["take_back"]})
    asked = trainer.engine.asked
    assert [one["complete"] for one in asked] == [2, 2, 4, 6] and {one["samples"] for one in asked} == {6}
    assert [one["returned"] for one in asked] == [False, False, False, True]
    tokens = [count_tokens(trainer.lending.groups[:n]) for n in range(4)]
    assert [one["ready"] for one in asked] == [tokens[1], 0, tokens[2] - tokens[1], tokens[3] - tokens[1]]
    assert all(0 <= one["pending"] <= tokens[3] - tokens[1] for one in asked)
    for one in asked:
        Training(**one)
    assert asked[0]["seconds_per_token"] > 0 and "slowdown" not in asked[0]
    trainer.engine.script = {2: ["never"]}
    trainer.step()
    assert asked[-1]["setup"] >= 0, "it was measured"
    assert len(asked) == 5, "never is for this step"


def test_the_picture_of_a_step_says_what_was_hidden(model, tmp_path):
    trainer, _ = take_two_steps(model, tmp_path / "run", {2: ["lend"]})
    step = trainer.rows[-1].timeline
    assert step.lent and step.lent[0] <= step.training[0][0] <= step.training[0][1] <= step.over <= step.end
    assert len(step.generating) == 2 and step.generating[0] == step.generating[1], "merged"
    assert draw_step(tmp_path / "step.png", Results(run=LEND, before=0.0, rows=trainer.rows)).stat().st_size > 10_000
    step = Timeline(generating=[[], []], lent=(1.0, 3.0), training=[(1.0, 2.0), (2.5, 4.5)], over=3.5, end=5.0)
    assert make_step_title(7, step) == (
        "Step 7, 5.0 s: on a rank that was lent for 2.0 s, 67% of the training was done before the last token"
    )
    step.lent = None
    assert make_step_title(7, step) == "Step 7, 5.0 s: no rank was lent, and all is trained after the round"


def test_counting_down():
    assert countdown.solve("50-45") == "49,48,47,46,45." and countdown.solve("10-09") == "09."
    assert countdown.decode([*countdown.encode("11,10."), countdown.EOS]) == "11,10."
    right = ["09,08.", "09,08", "09,07.", "09.", "", "09,08.?"]
    assert [countdown.verify("10-08", answer) for answer in right] == [1, 0, 0, 0, 0, 0]
    rng = random.Random(1)
    problems = [countdown.draw_problem(rng) for _ in range(2000)]
    for problem in problems:
        countdown.check_problem(problem)
    lengths = sorted(len(countdown.solve(problem)) + 1 for problem in problems)
    assert lengths[1000] <= 16 and lengths[-20] >= 50 and lengths[-1] <= 91 < countdown.LIMIT
    slipped = [countdown.solve(problem, rng, 0.1) == countdown.solve(problem) for problem in problems]
    assert 0.5 < mean(slipped) < 0.7


def test_a_group_of_equals_teaches_nothing():
    assert compute_advantages([1.0, 1.0, 1.0]) == [0.0, 0.0, 0.0]
    up, down = compute_advantages([1.0, 0.0])
    assert up == pytest.approx(-down) and up > 0.7


def test_rows_of_similar_length_go_together():
    rows = [random.Random(1).randrange(5, 80) for _ in range(7)] + [5, 80] * 200
    parts = list(split_by_length(rows, lambda row: row))
    assert sorted(row for part in parts for row in part) == sorted(rows)
    assert all(len(part) * max(part) <= TOKENS for part in parts)
    assert sum(len(part) * max(part) for part in parts) < 1.1 * sum(rows)
    assert list(split_by_length([TOKENS + 1], lambda row: row)) == [[TOKENS + 1]]


def test_no_problem_is_trained_and_tested():
    task = countdown.draw_task(640, 200, seed=0)
    assert len(task.problems) == 640 and not set(task.problems) & set(task.held_out)
    assert countdown.draw_task(640, 200, seed=1).held_out == task.held_out


# -- what is refused ----------------------------------------------------------------------------------------------


def refuse(capsys, *words: str) -> str:
    assert command.main([*words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("python -m examples.grpo: error: ")


def test_a_verifier_that_is_not_there(capsys):
    for name in ("nowhere:verify", "examples.grpo.sums:nothing", "verify", "examples.grpo.sums:LIMIT"):
        assert refuse(capsys, "--verifier", name).startswith(f"--verifier {name}: no such function; give MODULE:FUNCT")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "empty; give a problem a line, such as 50-45"), ("50-45\n50+45\n", "'50+45' is no problem"),
        ("45-50", "'45-50' is a distance of -5, must be 1 to 30"), ("5-4", "'5-4' is no problem"),
        (None, "No such file"),
    ],
)  # fmt: skip
def test_problems_that_are_none(content, said, capsys, tmp_path):
    file = tmp_path / "problems.txt"
    if content is not None:
        file.write_text(content)
    line = refuse(capsys, "--problems", str(file))
    assert line.startswith(f"--problems {file}: ") and said in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "0"], "steps is 0, must be at least 1"),
        (["--responses", "1"], "responses is 1, must be at least 2"),
        (["--rate", "2"], "rate is 2.0, must be more than 0 and less than 1"),
        (["--slips", "1.5"], "slips is 1.5, must be 0 to 1"),
        (["--lend"], "--lend is for --way adaptive, in which every response is trained, not for plain"),
        (["--prompts", "0"], "num_prompts is 0"),
    ],
)
def test_sizes_that_cannot_be(words, said, capsys):
    assert said in refuse(capsys, *words)


@pytest.mark.parametrize("given", [float("nan"), 1.5, -1, None, "1"])
def test_a_reward_that_is_none(given, model, tmp_path):
    trainer = begin(RUN, model, tmp_path, verify=lambda problem, answer: given)
    trainer.before = 0.0
    with pytest.raises(ValueError, match="the verifier gave .* for '.*', must give a number from 0 to 1"):
        trainer.step()
    assert len(trainer.admitter.state.fresh) == 9


def test_a_checkpoint_of_another_run(model, tmp_path, capsys):
    begin(RUN, model, tmp_path).step()
    words = "--way tail --steps 3 --prompts 3 --responses 2 --held-out 4 --every 2 --out".split()
    line = refuse(capsys, *words, str(tmp_path), "--seed", "1")
    path = tmp_path / "checkpoint.pt"
    said = "seed is 0 there, 1 here; give another --out, or remove it"
    assert line == f"{path} is a checkpoint of another run: {said}"
    path.write_bytes(b"cut off")
    assert refuse(capsys, *words, str(tmp_path)) == (
        f"{path} is no checkpoint of this program; give another --out, or remove it"
    )


# -- what is left -------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_picture_says_what_was_learnt(whole, tmp_path):
    rows = [*whole.rows[:-1], structs.replace(whole.rows[-1], held_out=0.75)]
    results = Results(run=RUN, before=0.25, rows=rows)
    assert make_title(results).startswith(
        "Counting down, way tail, seed 0: from 0.25 to 0.75 on held-out problems in 18 responses"
    )
    assert draw(tmp_path / "grpo.png", results).stat().st_size > 10_000
    assert results.list_tests()[0] == (0, 0.0, 0.25)
    assert json.loads(train.msgspec.json.encode(results))["run"]["way"] == "tail"


def test_the_bench_compares_the_ways_over_responses(model, tmp_path, monkeypatch):
    """Two seeds each: one way is between ``plain``'s seeds everywhere, the other one only at the first test."""
    monkeypatch.syspath_prepend("bench")
    import learning

    def results(way: str, seed: int, *held_out: float) -> Results:
        row = {"reward": 0.1, "kind": "short", "waiting": 0, "apart": 0.0, "trained": [], "degrees": {1: 1.0}}
        parts = {"generation": 1.0, "training": 0.5, "weight sync": 0.1}
        rows = [
            Row(samples=32 * number, seconds=2.0 * number, held_out=value, lengths=[5] * 9 + [20 + seed], thrown=5,
                parts=parts, **row)
            for number, value in enumerate(held_out, 1)
        ]  # fmt: skip
        return Results(run=Run(way=way, seed=seed), before=0.1, rows=rows)

    found = {
        "plain": {0: results("plain", 0, 0.2, 0.4), 1: results("plain", 1, 0.3, 0.6)},
        "tail": {0: results("tail", 0, 0.2, 0.4), 1: results("tail", 1, 0.3, 0.5)},
        "all": {0: results("all", 0, 0.2, 0.1), 1: results("all", 1, 0.3, 0.2)},
    }
    assert [learning.count_inside(found, way) for way in found] == [(2, 2), (2, 2), (1, 2)]
    assert learning.draw(tmp_path / "learning.png", found).stat().st_size > 10_000
    console = Console(width=250, record=True)
    learning.show(console, found)
    shown = console.export_text()
    assert "0.400, 0.600" in shown and "20.0, 21.0" in shown
