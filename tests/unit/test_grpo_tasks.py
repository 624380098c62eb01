"""The example of GRPO on tasks of reasoning-gym: how they are drawn, asked and scored, and what is refused."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from examples.grpo import gym, train
from sglang_pat.testing import models

from .test_grpo_example import refuse

pytestmark = [pytest.mark.unit, pytest.mark.xdist_group("transformers")]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return models.make_random("llama", tmp_path_factory.mktemp("models") / "llama", context=1024)


def draw(model: Path, name: str = "chain_sum", seed: int = 0, count: int = 40, tested: int = 20, limit: int = 30):
    return gym.draw_task(name, model, limit, count, tested, seed)


@pytest.mark.parametrize("name", ["chain_sum", "tower_of_hanoi"])
def test_no_problem_is_trained_twice_or_tested(name, model):
    """Though the second task has some 90 different ones."""
    task = draw(model, name)
    assert (len(task.problems), len(task.held_out)) == (40, 20) and len({*task.problems, *task.held_out}) == 60
    assert draw(model, name).problems == task.problems


def test_another_seed_trains_others_and_tests_the_same(model):
    """Though the library's seeds 0 and 1 have all problems but one in common."""
    task, other = draw(model), draw(model, seed=1)
    assert other.held_out == task.held_out and not {*other.problems} & {*task.problems}


def test_a_problem_is_asked_with_the_chat_template(model):
    from transformers import AutoTokenizer

    task = draw(model)
    asked = AutoTokenizer.from_pretrained(model).decode(task.make_prompt(task.problems[0]))
    text = f"{task.problems[0]}\n\nGive the final answer between <answer> and </answer>."
    assert asked == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def test_a_model_without_a_chat_template_goes_on_after_the_problem(model, tmp_path):
    settings = (model / "tokenizer_config.json").read_text()
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).write_bytes((model / file).read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(settings.replace("chat_template", "other"))
    from transformers import AutoTokenizer

    task = draw(tmp_path)
    asked = AutoTokenizer.from_pretrained(tmp_path).decode(task.make_prompt(task.problems[0]))
    assert asked == f"{task.problems[0]}\n\nGive the final answer between <answer> and </answer>.\n"


@pytest.mark.parametrize(
    ("form", "worth"),
    [
        ("<answer>{}</answer>", 1), ("The sum is <answer> {} </answer>.<|im_end|>", 1), (" {}\n", 1),
        ("<answer>1</answer> no <answer>{}</answer>", 1), ("<answer>x</answer>", 0), ("", 0),
    ],
)  # fmt: skip
def test_an_answer_is_what_is_tagged_or_else_all_of_it(form, worth, model):
    from transformers import AutoTokenizer

    task = draw(model)
    problem = task.problems[0]
    right = str(eval(problem.partition(": ")[2].rstrip(" =")))
    ids = AutoTokenizer.from_pretrained(model).encode(form.format(right), add_special_tokens=False)
    assert task.verify(problem, task.decode(ids)) == worth


def test_an_answer_that_the_library_cannot_read_is_worth_nothing(model):
    task = draw(model, "prime_factorization")
    assert task.verify(task.problems[0], "seven") == 0.0


# -- what is refused ----------------------------------------------------------------------------------------------


def test_a_task_that_is_not_there(model, capsys):
    said = refuse(capsys, "--model", str(model), "--task", "chainsum")
    assert said.startswith("--task chainsum: reasoning-gym has no such task; the nearest are chain_sum, ")
    assert refuse(capsys, "--model", str(model), "--task", "composite").startswith("--task composite: ")


def test_no_answer_is_run(model, capsys):
    from reasoning_gym.factory import DATASETS

    runs = re.compile(r"\b(eval|exec|parse_expr)\(answer")
    found = {name for name, (of, _) in DATASETS.items() if runs.search(inspect.getsource(of.score_answer))}
    assert found == gym.EVALUATING
    said = "reasoning-gym runs its answers as Python, so that a model could do anything here; give another task"
    assert refuse(capsys, "--model", str(model), "--task", "countdown") == f"--task countdown: {said}"


def test_a_package_that_is_not_there(model, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    assert refuse(capsys, "--model", str(model), "--task", "chain_sum") == (
        "--task chain_sum: the package reasoning-gym is not installed; pip install -r requirements/tasks.txt"
    )


@pytest.mark.parametrize("words", [["--task", "chain_sum"], ["--model", "somewhere"]])
def test_a_task_without_a_model_and_the_other_way_round(words, capsys):
    said = "--model and --task go together: the small Llama counts down, and nothing else does"
    assert refuse(capsys, *words) == said


@pytest.mark.parametrize("words", [["--warm-up", "3"], ["--slips", "0.1"], ["--problems", "file"]])
def test_what_is_for_counting_down(words, model, capsys):
    said = refuse(capsys, "--model", str(model), "--task", "chain_sum", *words)
    assert said == f"{words[0]} is for counting down; leave it out with --model"


def test_a_model_that_is_none(model, tmp_path, capsys):
    words = ["--task", "chain_sum", "--steps", "1", "--prompts", "2", "--held-out", "2", "--model", str(tmp_path)]
    assert refuse(capsys, *words) == (
        f"--model {tmp_path}: no config.json there; give the folder of a checkpoint with its tokenizer"
    )
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    assert refuse(capsys, *words).startswith(f"--model {tmp_path}: no tokenizer_config.json there; give the folder")


def test_sizes_that_the_task_or_the_model_has_no_room_for(model):
    with pytest.raises(ValueError, match=r"^--task chain_sum: \d+ tokens of a prompt and --limit 1000 are more than"):
        draw(model, limit=1000)
    with pytest.raises(ValueError, match=r"^--task tower_of_hanoi: of 990 problems \d+ are different, must be 99; "):
        draw(model, "tower_of_hanoi", count=99)


def test_a_checkpoint_of_another_task_or_model(model, tmp_path):
    task, path = draw(model), tmp_path / "checkpoint.pt"
    run = train.Run(model=str(model), task="chain_sum")
    train.torch.save({"run": train.identify(run, task.problems)}, path)
    assert train.load_checkpoint(path, run, task.problems)
    for name, value in (("task", "spell_backward"), ("model", "elsewhere")):
        other = replace(run, **{name: value})
        with pytest.raises(ValueError, match=f"a checkpoint of another run: {name} is .* there, '{value}' here"):
            train.load_checkpoint(path, other, task.problems)
