"""The example of GRPO on tasks of reasoning-gym: how they are drawn, asked and scored, and what is refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from examples.grpo import __main__ as command
from examples.grpo import gym, train
from sglang_pat.testing import models

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return models.make_random("llama", tmp_path_factory.mktemp("models") / "llama", context=512)


def draw(model: Path, name: str = "chain_sum", seed: int = 0, count: int = 40, tested: int = 20, limit: int = 30):
    return gym.draw_task(name, model, limit, count, tested, seed)


def test_no_problem_is_trained_twice_or_tested(model):
    """Though the library's seeds 0 and 1 have all problems but one in common."""
    task, other = draw(model), draw(model, seed=1)
    everything = [*task.problems, *task.held_out]
    assert (len(task.problems), len(task.held_out)) == (40, 20) and len({*everything}) == 60
    assert other.held_out == task.held_out and not {*other.problems} & {*everything}
    assert draw(model).problems == task.problems


def test_a_problem_is_asked_with_the_chat_template(model):
    from transformers import AutoTokenizer

    task = draw(model)
    asked = AutoTokenizer.from_pretrained(model).decode(task.make_prompt(task.problems[0]))
    assert asked.startswith("<|im_start|>user\nAnswer the question directly. Provide your answer between <answer> and")
    assert asked.endswith(f"\n\n{task.problems[0]}<|im_end|>\n<|im_start|>assistant\n")


def test_a_model_without_a_chat_template_goes_on_after_the_problem(model, tmp_path):
    settings = (model / "tokenizer_config.json").read_text()
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).write_bytes((model / file).read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(settings.replace("chat_template", "other"))
    from transformers import AutoTokenizer

    task = draw(tmp_path)
    asked = AutoTokenizer.from_pretrained(tmp_path).decode(task.make_prompt(task.problems[0]))
    assert asked.startswith("Answer the question") and asked.endswith(f"\n\n{task.problems[0]}\n")


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


# -- what is refused ----------------------------------------------------------------------------------------------


def refuse(capsys, *words: str) -> str:
    """The one line."""
    assert command.main([*words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("python -m examples.grpo: error: ")


def test_a_task_that_is_not_there(model, capsys):
    said = refuse(capsys, "--model", str(model), "--task", "chainsum")
    assert said.startswith("--task chainsum: reasoning-gym has no such task; the nearest are chain_sum, ")
    assert refuse(capsys, "--model", str(model), "--task", "composite").startswith("--task composite: ")


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
    with pytest.raises(ValueError, match=r"^--task chain_sum: \d+ tokens of a prompt and --limit 400 are more than"):
        draw(model, limit=400)
    with pytest.raises(ValueError, match=r"^--task coin_flip: of \d+ problems \d+ are different, must be 9999"):
        draw(model, "coin_flip", count=9999)


def test_a_checkpoint_of_another_task_or_model(model, tmp_path):
    """Before an engine is started."""
    task, path = draw(model), tmp_path / "checkpoint.pt"
    run = train.Run(model=str(model), task="chain_sum")
    train.torch.save({"run": train.identify(run, task.problems)}, path)
    assert train.load_checkpoint(path, run, task.problems)
    for name, value in (("task", "spell_backward"), ("model", "elsewhere")):
        other = replace(run, **{name: value})
        with pytest.raises(ValueError, match=f"a checkpoint of another run: {name} is .* there, '{value}' here"):
            train.load_checkpoint(path, other, task.problems)
