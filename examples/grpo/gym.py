"""Tasks of ``reasoning-gym``, for a checkpoint with its tokenizer."""

from __future__ import annotations

import difflib
import random
from collections.abc import Collection
from pathlib import Path
from typing import Any

from examples.grpo.task import Task
from sglang_pat.errors import format_one_line
from sglang_pat.testing.smollm2 import load_transformers

TRIES = 10
"""Problems that are drawn for one that is wanted: in some tasks many are the same."""

EVALUATING = frozenset(
    "binary_matrix countdown intermediate_integration n_queens polynomial_multiplication puzzle24 simple_integration "
    "spiral_matrix string_insertion".split()
)
"""Tasks whose verifier gives an answer to ``eval``, itself or by way of SymPy."""


def draw_task(name: str, model: Path, limit: int, count: int, tested: int, seed: int) -> Task:
    """``count`` problems to train, and ``tested`` to test, the same for every seed.  All are different.

    Raises ValueError: no such task or checkpoint, too few problems, too long with ``limit`` tokens of an answer.
    """
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
        from reasoning_gym.utils import extract_answer
    except ImportError:
        how = "pip install -r requirements/tasks.txt"
        raise ValueError(f"--task {name}: the package reasoning-gym is not installed; {how}") from None
    if name not in DATASETS:
        near = ", ".join(difflib.get_close_matches(name, DATASETS, 3, cutoff=0.0))
        raise ValueError(f"--task {name}: reasoning-gym has no such task; the nearest are {near}")
    if name in EVALUATING:
        what = "reasoning-gym runs its answers as Python, so that a model could do anything here"
        raise ValueError(f"--task {name}: {what}; give another task")

    def draw(wanted: int, what: str, known: Collection[str] = ()) -> dict[str, Any]:
        """Problems by question.  Seeds far apart: the library draws number ``i`` of seed ``s`` from ``s + i``."""
        entries: dict[str, Any] = {}
        for entry in create_dataset(name, seed=random.Random(what).randrange(1 << 31), size=TRIES * wanted):
            if entry["question"] not in known:
                entries[entry["question"]] = entry
            if len(entries) == wanted:
                return entries
        raise ValueError(f"of {TRIES * wanted} problems {len(entries)} are different, must be {wanted}; ask for fewer")

    try:
        held_out = draw(tested, "held out")
        problems = draw(count, f"train {seed}", held_out)
        score, entries = create_dataset(name).score_answer, held_out | problems
    except Exception as error:  # some cannot be made without options; each says so in its own way
        raise ValueError(f"--task {name}: {format_one_line(error)}") from None
    tokenizer, context = load_tokenizer(model)

    def make_prompt(problem: str) -> list[int]:
        text = f"{problem}\n\nGive the final answer between <answer> and </answer>."
        if not tokenizer.chat_template:
            return tokenizer.encode(f"{text}\n")
        turns = [{"role": "user", "content": text}]
        asked = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return tokenizer.encode(asked, add_special_tokens=False)

    def decode(token_ids: list[int]) -> str:
        text = tokenizer.decode(token_ids, skip_special_tokens=True)
        tagged = extract_answer(text)
        return text.strip() if tagged is None else tagged

    def verify(problem: str, answer: str) -> float:
        try:
            return score(answer, entries[problem])
        except Exception:  # whatever an answer that cannot be read leads to
            return 0.0

    longest = max(len(make_prompt(problem)) for problem in entries)
    if longest + limit > context:
        what = f"{longest} tokens of a prompt and --limit {limit} are more than the {context} of {model}"
        raise ValueError(f"--task {name}: {what}; give another task, or a smaller --limit")
    return Task(problems=[*problems], held_out=[*held_out], make_prompt=make_prompt, decode=decode, verify=verify)


def load_tokenizer(model: Path) -> tuple[Any, int]:
    """Tokenizer of a checkpoint, and the tokens that a sequence may have.  Raises ValueError: one line, there is no
    checkpoint or no tokenizer."""
    for file in ("config.json", "tokenizer_config.json"):
        if not (model / file).is_file():
            raise ValueError(f"--model {model}: no {file} there; give the folder of a checkpoint with its tokenizer")
    try:
        auto = load_transformers()
        context = auto.AutoConfig.from_pretrained(model).max_position_embeddings
        return auto.AutoTokenizer.from_pretrained(model), context
    except Exception as error:  # each kind of tokenizer raises its own
        raise ValueError(f"--model {model}: {format_one_line(error)}") from None
